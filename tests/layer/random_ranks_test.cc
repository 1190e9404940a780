// Worlds of two to eight ranks, the layer that is spread over them and what is done with it, all
// drawn from one seed: every rank's rows are those of one rank, and what one rank refuses ends the
// call of all. MOESAIC_RANDOM_SEED and MOESAIC_RANDOM_CASES choose other cases.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "layer/eplb_case.h"
#include "layer/rank_case.h"
#include "numerics/element.h"
#include "support/experts_run.h"
#include "support/metrics.h"
#include "support/random.h"

namespace moesaic {
namespace {

using test::LayerTensors;
using test::Rng;

// A rank that waits so long was not told.
constexpr int kPatienceMs = 60'000;

bool chance(Rng& rng, double p) { return rng.uniform() < p; }
template <class T>
T pick(Rng& rng, const std::vector<T>& of) {
  return of[static_cast<std::size_t>(rng.integer(0, std::ssize(of) - 1))];
}

// How ranks are laid out.
struct World {
  int tp = 1, pcp = 1, dp = 1;
  bool ep = true, sp = false;
  ExpertPlacement placement = ExpertPlacement::kLinear;

  int ranks() const { return tp * pcp * dp; }
  bool rows_differ() const { return pcp * dp > 1 || sp; }
  int replicas() const { return sp ? 1 : tp; }
  // Ranks that have the same rows have one set of them.
  int sets() const { return ranks() / replicas(); }
  int set_of(int rank) const { return rank / replicas(); }
  ParallelConfig parallel(int rank) const {
    ParallelSizes sizes;
    sizes.tp_size = tp;
    sizes.tp_rank = rank % tp;
    sizes.pcp_size = pcp;
    sizes.pcp_rank = rank / tp % pcp;
    sizes.dp_size = dp;
    sizes.dp_rank = rank / tp / pcp;
    sizes.enable_expert_parallel = ep;
    sizes.sequence_parallel = sp;
    ParallelConfig config = ParallelConfig::from_sizes(sizes).value();
    config.placement = placement;
    return config;
  }
};

// A call's arguments for the ranks that have these rows, and what one rank makes of them.
struct Rows {
  Tensor memory;  // of hidden states, whose rows may lie apart
  ConstTensorView x;
  Tensor logits, weights, ids, input_ids, padding;
  DType output = DType::kF32;
  bool apart = false;  // shared experts in an output of their own
  Tensor want, want_shared;

  FusedMoE::Args args(TensorView to, TensorView shared) const {
    FusedMoE::Args a;
    a.hidden_states = x;
    a.router_logits = logits.view();
    a.topk_weights = weights.view();
    a.topk_ids = ids.view();
    a.input_ids = input_ids.view();
    a.padding_mask = padding.view();
    a.output = to;
    if (apart) a.shared_output = shared;
    return a;
  }
};

enum class Refusal { kNone, kWidth, kDType, kNoMemory, kIds, kPadding, kRows };

struct Call {
  std::vector<Rows> sets;
  std::vector<double> load;  // rows of all sets that chose each expert
  int refuser = 0;           // rank that passes what it must not
  Refusal refusal = Refusal::kNone;
};

// Calls in one world, and what is done between them.
struct Era {
  World world;
  std::vector<Call> calls;
};

struct Case {
  std::uint64_t seed = 0;
  LayerTensors tensors;
  std::string scheme;
  FusedMoE::Options options;  // what all ranks have in common
  std::vector<Era> eras;      // all of as many ranks
  double tolerance = 0;       // of F32 sums; 0: the bits of one rank
  int failing = -1;           // rank on which a function of the caller's fails in the end

  std::string describe() const {
    const MoeLayerSpec& s = tensors.spec;
    std::string text = fmt::format(
        "seed {}: {} E{} k{} H{} I{} {} shared {}{}{}, transport {}, {}{}, combine {}, max_tokens "
        "{}, dual {}{}{}",
        seed, scheme, s.num_experts, s.routing.top_k, s.hidden_size, s.intermediate_size,
        routing_method_name(s.routing.method), s.shared.intermediate_size,
        s.shared.gated_output ? " gated" : "", options.ranks.cut_shared ? " cut" : "",
        rank_transport_name(options.ranks.transport),
        rank_reduction_name(options.ranks.reduction_in_force()),
        options.ranks.enable_eplb
            ? fmt::format(" eplb +{} window {}", options.ranks.num_redundant_experts,
                          options.ranks.eplb_window)
            : "",
        dtype_name(options.ranks.combine_dtype), options.max_tokens,
        options.ranks.dual_batch_tokens, options.ranks.reduce_results ? "" : ", parts",
        options.transform.output ? ", transforms" : "");
    if (options.inplace) text += ", in place";
    if (options.shared_experts) text += ", shared function";
    for (const Era& e : eras) {
      text += fmt::format("; tp{} pcp{} dp{}{}{} {}, {} calls", e.world.tp, e.world.pcp, e.world.dp,
                          e.world.ep ? " ep" : "", e.world.sp ? " sp" : "",
                          expert_placement_name(e.world.placement), e.calls.size());
    }
    return text;
  }
};

// The helpers do not cut scales.
bool is_quantized(const MoeLayerSpec& spec) {
  const DType stored = spec.quant.weight.dtype;
  return stored != DType::kF32 && stored != DType::kBF16 && stored != DType::kF16;
}

MoeLayerSpec draw_spec(Rng& rng, bool whole, std::string& scheme) {
  MoeLayerSpec spec = test::small_spec();
  scheme = pick<std::string>(rng, {"f32", "bf16", "bf16", "f16"});
  spec.hidden_size = 8 * rng.integer(1, 9);
  spec.intermediate_size = 24 * rng.integer(1, 2);
  if (whole && chance(rng, 0.4)) {  // the helpers do not cut scales
    scheme = pick<std::string>(
        rng, {"fp8-block", "fp8-block", "fp8-bf16", "fp8-channel", "fp8-tensor", "int8", "mxfp8",
              "mxfp4", "mxfp4-bf16", "nvfp4", "int4-g128", "int4-fp8", "mxfp4-int8"});
    spec.hidden_size = 128 * rng.integer(1, 2);
    spec.intermediate_size = 128;
  }
  spec.quant = test::scheme_called(scheme);
  spec.activation_dtype = pick<DType>(rng, {DType::kBF16, DType::kBF16, DType::kF16, DType::kF32});
  spec.num_experts = spec.routing.num_experts = rng.integer(1, 12);
  RoutingSpec& routing = spec.routing;
  routing.top_k = rng.integer(1, std::min<std::int64_t>(5, spec.num_experts));
  routing.renormalize = chance(rng, 0.5);
  if (chance(rng, 0.4)) {
    routing.routed_scaling_factor = 2.5;
    routing.scale_on_output = chance(rng, 0.5);
  }
  switch (rng.integer(0, 7)) {
    case 0:
      routing.method = RoutingMethod::kGroupedTopK;
      routing.scoring_func = ScoringFunc::kSigmoid;
      routing.has_correction_bias = true;
      if (spec.num_experts % 2 == 0 && routing.top_k <= spec.num_experts / 2) {
        routing.num_expert_group = 2;
        routing.topk_group = rng.integer(1, 2);
      }
      break;
    case 1:
      routing.method = RoutingMethod::kLlama4;
      routing.renormalize = false;
      spec.apply_router_weight_on_input = true;
      if (chance(rng, 0.7)) routing.top_k = 1;
      break;
    case 2:
      routing.method = RoutingMethod::kZeroExpert;
      routing.has_correction_bias = true;
      routing.renormalize = false;
      routing.num_zero_experts = rng.integer(1, 4);
      break;
    case 3:
      routing.method = RoutingMethod::kHash;
      routing.scoring_func = ScoringFunc::kSqrtSoftplus;
      spec.hash_vocabulary = rng.integer(1, 20);
      break;
    default:
      break;
  }
  if (chance(rng, 0.5)) {
    spec.shared.intermediate_size = scheme.size() > 4 ? 128 : 24 * rng.integer(1, 2);
    spec.shared.gated_output = chance(rng, 0.4);
  }
  spec.has_router_bias = chance(rng, 0.2);
  spec.has_expert_bias = chance(rng, 0.3);
  return spec;
}

World draw_world(Rng& rng, int ranks, bool ep, bool eplb) {
  World w;
  w.ep = ep;
  std::vector<int> divisors;
  for (int d = 1; d <= ranks; ++d) {
    if (ranks % d == 0) divisors.push_back(d);
  }
  w.tp = pick(rng, divisors);
  std::erase_if(divisors, [&](int d) { return ranks / w.tp % d != 0; });
  w.pcp = chance(rng, 0.7) ? 1 : pick(rng, divisors);
  w.dp = ranks / w.tp / w.pcp;
  w.sp = w.tp > 1 && chance(rng, 0.3);
  if (ep && !eplb && chance(rng, 0.4)) w.placement = ExpertPlacement::kRoundRobin;
  return w;
}

void draw_options(Rng& rng, const MoeLayerSpec& spec, const World& world, FusedMoE::Options& o) {
  o.num_threads = 1;
  o.max_tokens = pick<std::int64_t>(rng, {1, 2, 3, 5, 16});
  std::vector<RankTransport> transports = {RankTransport::kAuto, RankTransport::kGather};
  if (world.ep) {
    transports.push_back(RankTransport::kAllToAll);
    transports.push_back(RankTransport::kBatched);
  }
  if (!world.rows_differ()) transports.push_back(RankTransport::kNone);
  o.ranks.transport = pick(rng, transports);
  // Its table may name an expert twice, for which slabs have no place.
  if (spec.routing.method == RoutingMethod::kHash && o.ranks.transport == RankTransport::kBatched) {
    o.ranks.transport = RankTransport::kAllToAll;
  }
  if (chance(rng, 0.5)) {
    o.ranks.reduction =
        world.ep && chance(rng, 0.6) ? RankReduction::kPerSlot : RankReduction::kPerRank;
  }
  if (chance(rng, 0.2)) o.ranks.combine_dtype = DType::kBF16;
  if (chance(rng, 0.3)) o.ranks.dual_batch_tokens = rng.integer(1, 4);
  o.ranks.reduce_results = chance(rng, 0.7);
  o.ranks.cut_shared = spec.shared.intermediate_size > 0 && !is_quantized(spec) &&
                       !o.ranks.enable_eplb && chance(rng, 0.4);
  o.inplace = chance(rng, 0.2);
  if (spec.shared.intermediate_size == 0 && chance(rng, 0.3)) {
    o.shared_experts = [](ConstTensorView x, TensorView to) {
      for (std::int64_t i = 0; i < to.dim(0) * to.dim(1); ++i) {
        const std::int64_t at = i / x.dim(1) * x.strides[0] + i % x.dim(1);
        to.as<float>()[i] = 0.5F * load_as_f32(x.data, x.dtype, at);
      }
      return Status();
    };
  }
  if (chance(rng, 0.15)) {
    o.transform.hidden_size = spec.hidden_size;
    o.transform.input = [](ConstTensorView from, TensorView to) {
      const std::int64_t element = dtype_bits(from.dtype) / 8, row = from.dim(1) * element;
      for (std::int64_t t = 0; t < from.dim(0); ++t) {
        std::memcpy(to.data + t * row, from.data + t * from.strides[0] * element,
                    static_cast<std::size_t>(row));
      }
      return Status();
    };
    // Not linear.
    o.transform.output = [](ConstTensorView from, TensorView to) {
      for (std::int64_t i = 0; i < from.dim(0) * from.dim(1); ++i) {
        to.as<float>()[i] = from.as<float>()[i] * from.as<float>()[i];
      }
      return Status();
    };
  }
}

// Rows whose routing is the layer's, or given as logits or as ids.
Rows draw_rows(Rng& rng, const Case& c, bool batched, std::vector<std::int32_t>& ids_of_rows,
               const FusedMoE& one) {
  const MoeLayerSpec& spec = c.tensors.spec;
  const std::int64_t k = spec.routing.top_k, experts = spec.num_experts;
  const std::int64_t columns = experts + spec.routing.num_zero_experts;
  const std::int64_t tokens = chance(rng, 0.2) ? 0 : rng.integer(1, 11);
  Rows r;
  const DType dtype = chance(rng, 0.6) ? spec.activation_dtype : DType::kBF16;
  const std::int64_t pitch = spec.hidden_size + (chance(rng, 0.2) ? 8 : 0);
  r.memory = test::random_hidden(rng.next(), tokens, pitch, dtype);
  r.x = ConstTensorView(r.memory.data(), dtype, Shape{tokens, spec.hidden_size});
  r.x.strides[0] = pitch;
  r.output = pick<DType>(rng, {DType::kF32, DType::kF32, DType::kBF16, DType::kF16});
  r.apart = (spec.shared.intermediate_size > 0 || c.options.shared_experts) && chance(rng, 0.3);
  std::vector<bool> is_padding(static_cast<std::size_t>(tokens), false);
  if (chance(rng, 0.4)) {
    r.padding = Tensor::zeros(DType::kU8, {tokens}).value();
    const std::int64_t row_bytes = pitch * dtype_bits(dtype) / 8;
    for (std::int64_t t = 0; t < tokens; ++t) {
      if (!chance(rng, 0.3)) continue;
      is_padding[static_cast<std::size_t>(t)] = true;
      r.padding.as<std::uint8_t>()[t] = 255;
      if (chance(rng, 0.5)) test::poison(r.memory.data() + t * row_bytes, row_bytes);
    }
  }
  const bool hash = spec.routing.method == RoutingMethod::kHash;
  if (hash) {
    r.input_ids = Tensor::zeros(DType::kI32, {tokens}).value();
    for (std::int64_t t = 0; t < tokens; ++t) {
      r.input_ids.as<std::int32_t>()[t] =
          static_cast<std::int32_t>(rng.integer(0, spec.hash_vocabulary - 1));
    }
  }
  const std::int64_t door = rng.integer(0, 2);
  if (door == 1) {
    r.logits = test::random_normal(rng, pick<DType>(rng, {DType::kF32, DType::kBF16}),
                                   {tokens, columns}, 2.0);
  }
  if (door == 2) {
    const DType ids = pick<DType>(rng, {DType::kI32, DType::kI64});
    r.ids = Tensor::zeros(ids, {tokens, k}).value();
    r.weights = Tensor::zeros(DType::kF32, {tokens, k}).value();
    for (std::int64_t t = 0; t < tokens; ++t) {
      for (std::int64_t j = 0; j < k; ++j) {
        std::int64_t id = batched ? (t * 3 + j) % experts : rng.integer(0, columns - 1);
        r.weights.as<float>()[t * k + j] = static_cast<float>(rng.uniform()) - 0.3F;
        if (chance(rng, 0.2)) {
          id = -1;
          test::poison(r.weights.data() + (t * k + j) * 4, 4);
        }
        if (is_padding[static_cast<std::size_t>(t)]) id = 1 << 30;
        if (ids == DType::kI64) {
          r.ids.as<std::int64_t>()[t * k + j] = id;
        } else {
          r.ids.as<std::int32_t>()[t * k + j] = static_cast<std::int32_t>(id);
        }
      }
    }
  }
  r.want = Tensor::uninitialized(r.output, {tokens, spec.hidden_size}).value();
  r.want_shared = Tensor::uninitialized(r.output, {tokens, spec.hidden_size}).value();
  Tensor chosen = Tensor::zeros(DType::kI32, {tokens, k}).value();
  Tensor weights = Tensor::zeros(DType::kF32, {tokens, k}).value();
  FusedMoE::Args args = r.args(r.want.view(), r.want_shared.view());
  args.trace.topk_ids = chosen.view();
  args.trace.topk_weights = weights.view();
  const Status status = one.forward(args);
  EXPECT_TRUE(status.ok()) << status.to_string();
  for (std::int64_t i = 0; i < tokens * k; ++i) {
    // The slot of an identity expert names none.
    const bool none = spec.routing.num_zero_experts > 0 && weights.as<float>()[i] == 0.0F;
    ids_of_rows.push_back(none ? -1 : chosen.as<std::int32_t>()[i]);
  }
  return r;
}

Call draw_call(Rng& rng, const Case& c, const World& world, const FusedMoE& one) {
  Call call;
  std::vector<std::int32_t> ids;
  const bool batched = c.options.ranks.transport == RankTransport::kBatched;
  for (int s = 0; s < world.sets(); ++s) {
    call.sets.push_back(draw_rows(rng, c, batched, ids, one));
  }
  call.load.assign(static_cast<std::size_t>(c.tensors.spec.num_experts), 0.0);
  for (const std::int32_t id : ids) {
    if (id >= 0) ++call.load[static_cast<std::size_t>(id)];
  }
  if (chance(rng, 0.25)) {
    call.refuser = static_cast<int>(rng.integer(0, world.ranks() - 1));
    call.refusal = pick<Refusal>(rng, {Refusal::kWidth, Refusal::kDType, Refusal::kNoMemory,
                                       Refusal::kIds, Refusal::kPadding});
    if (world.replicas() > 1 && chance(rng, 0.3)) call.refusal = Refusal::kRows;
  }
  return call;
}

// Absent where one rank refuses the layer.
std::optional<Case> draw_case(std::uint64_t seed) {
  Rng rng(seed * 7919 + 17);
  Case c;
  c.seed = seed;
  const bool ep = chance(rng, 0.75);
  const int ranks = pick<int>(
      rng, ep ? std::vector<int>{2, 3, 4, 4, 5, 6, 7, 8} : std::vector<int>{2, 3, 4, 6, 8});
  const MoeLayerSpec spec = draw_spec(rng, ep, c.scheme);
  if (!validate(spec).ok()) return std::nullopt;
  const bool eplb = ep && chance(rng, 0.4);
  Era first;
  first.world = draw_world(rng, ranks, ep, eplb);
  FusedMoE::Options& o = c.options;
  o.ranks.enable_eplb = eplb;
  if (eplb) {
    const std::int64_t over = spec.num_experts % ranks;
    o.ranks.num_redundant_experts = (over == 0 ? 0 : ranks - over) + ranks * rng.integer(0, 2);
    o.ranks.eplb_window = rng.integer(1, 4);
  }
  draw_options(rng, spec, first.world, o);
  c.tensors = test::make_tensors(seed, spec);

  FusedMoE::Options alone;
  alone.num_threads = 1;
  alone.transform = o.transform;
  alone.shared_experts = o.shared_experts;
  const Result<FusedMoE> one = FusedMoE::create(c.tensors.weights(), alone);
  if (!one.ok()) return std::nullopt;
  const bool pinned = ep && !o.ranks.cut_shared &&
                      (o.ranks.reduction_in_force() == RankReduction::kPerSlot ||
                       o.ranks.transport == RankTransport::kBatched || spec.routing.top_k == 1) &&
                      o.ranks.combine_dtype == DType::kF32;
  c.tolerance = pinned ? 0 : o.ranks.combine_dtype == DType::kF32 ? 1e-5 : 8e-3;
  c.eras.push_back(std::move(first));
  if (chance(rng, 0.25)) c.eras.push_back({draw_world(rng, ranks, ep, eplb), {}});
  if (chance(rng, 0.3)) c.failing = static_cast<int>(rng.integer(0, ranks - 1));
  for (Era& era : c.eras) {
    for (std::int64_t n = rng.integer(1, 3); n > 0; --n) {
      era.calls.push_back(draw_call(rng, c, era.world, *one));
    }
  }
  return c;
}

double rounding_of(DType dtype) {
  return dtype == DType::kBF16 ? 4e-3 : dtype == DType::kF16 ? 5e-4 : 0;
}

// One rank of a case.
class RankRun {
 public:
  RankRun(const Case& c, std::shared_ptr<Communicator> communicator)
      : c_(c), rank_(communicator->rank()), comm_(std::move(communicator)), rng_(c.seed) {}

  // What is wrong, or empty. `refused`: the layer is one that ranks cannot have.
  std::string run(bool& refused) {
    FusedMoE::Options options = c_.options;
    const World& world = c_.eras.front().world;
    options.parallel = world.parallel(rank_);
    options.ranks.communicator = comm_;
    // The last function of a call that is the caller's.
    if (c_.options.transform.output) {
      options.transform.output = [this](ConstTensorView from, TensorView to) {
        return fails_ ? kFailure : c_.options.transform.output(from, to);
      };
    } else {
      options.capture = [this](ConstTensorView) {
        if (fails_) throw std::runtime_error(kFailure.message());
      };
    }
    Result<FusedMoE> made = FusedMoE::create(weights(options.parallel), options);
    // explain says what create does.
    const Result<LayerExplanation> explained = explain_layer(c_.tensors.spec, options);
    if (explained.ok() != made.ok()) {
      return fmt::format("explain: {}, create: {}", explained.status().to_string(),
                         made.status().to_string());
    }
    refused = made.status().code() == StatusCode::kUnsupported ||
              made.status().code() == StatusCode::kInvalidArgument;
    if (refused) return "";
    if (!made.ok()) return "create: " + made.status().to_string();
    FusedMoE layer = std::move(made).value();
    for (std::size_t i = 0; i < c_.eras.size(); ++i) {
      world_ = &c_.eras[i].world;
      if (i > 0 && !enter(layer)) return wrong_;
      for (const Call& call : c_.eras[i].calls) {
        step(layer, call);
        if (!wrong_.empty()) {
          static_cast<void>(comm_->abandon("a rank of the test ends here"));
          return wrong_;
        }
      }
    }
    if (c_.failing >= 0) fail(layer, c_.eras.back().calls.back());
    return wrong_;
  }

 private:
  MoeLayerWeights weights(const ParallelConfig& parallel) const {
    return c_.options.ranks.enable_eplb
               ? c_.tensors.weights()
               : test::rank_weights(c_.tensors, parallel, c_.options.ranks.cut_shared);
  }
  void wrong(std::string text) {
    if (wrong_.empty()) wrong_ = std::move(text);
  }

  // The layer in the next world. False: it cannot be in it, which all ranks say.
  bool enter(FusedMoE& layer) {
    const ParallelConfig parallel = world_->parallel(rank_);
    MoeLayerWeights w = weights(parallel);
    const Status status = layer.update_expert_map(
        {parallel, comm_, c_.options.ranks.num_redundant_experts}, *w.experts);
    past_.clear();
    if (status.ok()) return true;
    if (status.code() != StatusCode::kUnsupported &&
        status.code() != StatusCode::kInvalidArgument) {
      wrong("update_expert_map: " + status.to_string());
    }
    return false;
  }

  void step(FusedMoE& layer, const Call& call) {
    if (call.refusal != Refusal::kNone) refuse(layer, call);
    serve(layer, call);
    if (!c_.options.ranks.enable_eplb || !wrong_.empty()) return;
    check_load(layer);
    if (!chance(rng_, 0.5)) return;
    const auto slots = std::ssize(layer.physical_to_logical());
    const auto wanted = test::random_map(rng_.next(), c_.tensors.spec.num_experts, slots);
    const bool measured = chance(rng_, 0.4);
    const Status begun = measured ? layer.begin_rebalance() : layer.begin_rearrange(wanted);
    if (!begun.ok()) return wrong("rearrange: " + begun.to_string());
    const std::int64_t most = rng_.integer(0, 4);
    for (bool done = false; !done && wrong_.empty();) {
      const Result<bool> moved = layer.continue_rearrange(most);
      if (!moved.ok()) return wrong("rearrange: " + moved.status().to_string());
      done = *moved;
      serve(layer, call);
    }
    if (!measured && layer.physical_to_logical() != wanted) wrong("not the map that was wanted");
    check_load(layer);
  }

  // A call with arguments of which one rank's are wrong.
  void refuse(const FusedMoE& layer, const Call& call) {
    const Rows& rows = call.sets[static_cast<std::size_t>(world_->set_of(rank_))];
    Tensor output = Tensor::uninitialized(rows.output, rows.want.shape()).value();
    Tensor shared = Tensor::uninitialized(rows.output, rows.want.shape()).value();
    FusedMoE::Args a = rows.args(output.view(), shared.view());
    const Tensor ids = Tensor::zeros(DType::kF32, {3, 3}).value();
    if (rank_ == call.refuser) {
      switch (call.refusal) {
        case Refusal::kWidth:
          a.hidden_states.shape = Shape{rows.x.dim(0), rows.x.dim(1) + 1};
          break;
        case Refusal::kDType:
          a.output.dtype = DType::kI32;
          break;
        case Refusal::kNoMemory:
          a.hidden_states.shape = Shape{3, rows.x.dim(1)};
          a.hidden_states.data = nullptr;
          break;
        case Refusal::kIds:
          a.topk_ids = ids.view();
          break;
        case Refusal::kPadding:
          a.padding_mask = ids.view();
          break;
        default: {  // other rows than the ranks beside it
          const std::int64_t more = rows.x.dim(0) + 1;
          other_ = test::random_hidden(1, more, rows.x.dim(1), rows.x.dtype);
          other_output_ = Tensor::zeros(DType::kF32, {more, rows.x.dim(1)}).value();
          other_ids_ = Tensor::zeros(DType::kI32, {more}).value();
          a = {};
          a.hidden_states = other_.view();
          a.output = other_output_.view();
          a.input_ids = other_ids_.view();
        }
      }
    }
    const Status status = layer.forward(a);
    if (status.ok()) return wrong(fmt::format("rank {} was to refuse", call.refuser));
    if (!comm_->state().ok()) wrong("broken by a refusal: " + status.to_string());
  }

  // A failure in the middle of a call.
  void fail(const FusedMoE& layer, const Call& call) {
    const bool any = std::any_of(call.sets.begin(), call.sets.end(),
                                 [](const Rows& r) { return r.x.dim(0) > 0; });
    if (!any) return;  // nobody calls a function
    const Rows& rows = call.sets[static_cast<std::size_t>(world_->set_of(rank_))];
    Tensor output = Tensor::uninitialized(rows.output, rows.want.shape()).value();
    Tensor shared = Tensor::uninitialized(rows.output, rows.want.shape()).value();
    // It would end what others are still about.
    if (!comm_->barrier("before a failure").ok()) return wrong("not all came to the last call");
    fails_ = rank_ == c_.failing;
    const auto told = [&](const Status& status) {
      return status.message().find(kFailure.message()) != std::string::npos;
    };
    const Status status = layer.forward(rows.args(output.view(), shared.view()));
    // Whose own rows are complete learns of it in the next call.
    if (!told(status) && (fails_ || !status.ok())) wrong("fails: " + status.to_string());
    const Status next = layer.forward(rows.args(output.view(), shared.view()));
    if (!told(next)) wrong("after a failure: " + next.to_string());
  }

  void serve(const FusedMoE& layer, const Call& call) {
    const Rows& rows = call.sets[static_cast<std::size_t>(world_->set_of(rank_))];
    Tensor output = Tensor::uninitialized(rows.output, rows.want.shape()).value();
    Tensor shared = Tensor::uninitialized(rows.output, rows.want.shape()).value();
    test::poison(output.view());
    test::poison(shared.view());
    FusedMoE::Args args = rows.args(output.view(), shared.view());
    if (c_.options.inplace && rows.output == rows.x.dtype && rows.x.is_contiguous()) {
      std::memcpy(output.data(), rows.x.data, static_cast<std::size_t>(output.bytes()));
      args.hidden_states = output.view();
    }
    Status status = layer.forward(args);
    if (status.ok()) status = layer.maybe_all_reduce(output.view());
    if (!status.ok()) return wrong("forward: " + status.to_string());
    // Parts of rows are rounded by themselves.
    const bool parts = !layer.output_is_reduced();
    compare("output", output, rows.want, parts);
    if (rows.apart) compare("shared output", shared, rows.want_shared, false);
    past_.push_back(call.load);
  }

  void compare(const char* what, const Tensor& got, const Tensor& want, bool parts) {
    std::string why;
    const bool bits = c_.tolerance == 0 && (!parts || got.dtype() == DType::kF32);
    if (test::same_bits(got.view(), want.view(), &why)) return;
    // Identity experts of parts are added before the sum is.
    const bool identity = parts && c_.tensors.spec.routing.num_zero_experts > 0;
    if (bits && !identity) return wrong(fmt::format("{}: other bits: {}", what, why));
    const std::vector<double> a = test::to_doubles(got.view()), b = test::to_doubles(want.view());
    double size = 0;
    for (const double v : b) size += v * v;
    double apart = 0;
    for (std::size_t i = 0; i < a.size(); ++i) apart += (a[i] - b[i]) * (a[i] - b[i]);
    const double most = std::max(c_.tolerance, 1e-5) + (parts ? 2 : 1) * rounding_of(got.dtype());
    if (!(apart <= most * most * size)) {
      wrong(fmt::format("{}: relative error {} above {}: {}", what, std::sqrt(apart / size), most,
                        why));
    }
  }

  void check_load(const FusedMoE& layer) {
    const Result<std::vector<double>> load = layer.measured_load();
    if (!load.ok()) return wrong("measured_load: " + load.status().to_string());
    std::vector<double> want(load->size(), 0.0);
    const auto window = static_cast<std::size_t>(c_.options.ranks.eplb_window);
    for (std::size_t i = past_.size() - std::min(window, past_.size()); i < past_.size(); ++i) {
      for (std::size_t e = 0; e < want.size(); ++e) want[e] += past_[i][e];
    }
    if (*load != want) {
      wrong(fmt::format("load: got {}, need {}", fmt::join(*load, " "), fmt::join(want, " ")));
    }
  }

  const Status kFailure = Status(StatusCode::kInvalidArgument, "not today");
  bool fails_ = false;
  const Case& c_;
  int rank_;
  std::shared_ptr<Communicator> comm_;
  Rng rng_;  // the same on all ranks
  const World* world_ = nullptr;
  std::vector<std::vector<double>> past_;  // loads of calls that count
  Tensor other_, other_output_, other_ids_;
  std::string wrong_;
};

// Whether ranks could have the layer.
bool run_case(const Case& c) {
  auto ranks =
      make_in_process_communicators(c.eras.front().world.ranks(), {.timeout_ms = kPatienceMs})
          .value();
  std::vector<std::string> wrong(ranks.size());
  std::vector<char> refused(ranks.size(), 0);
  std::vector<std::thread> threads;
  for (std::size_t r = 0; r < ranks.size(); ++r) {
    threads.emplace_back([&, r] {
      bool none = false;
      wrong[r] = RankRun(c, std::shared_ptr<Communicator>(std::move(ranks[r]))).run(none);
      refused[r] = none ? 1 : 0;
    });
  }
  for (std::thread& t : threads) t.join();
  for (std::size_t r = 0; r < wrong.size(); ++r) {
    EXPECT_EQ(wrong[r], "") << "rank " << r << ", " << c.describe();
    EXPECT_EQ(refused[r], refused[0]) << "rank " << r << ", " << c.describe();
  }
  return refused[0] == 0;
}

std::uint64_t setting(const char* name, std::uint64_t otherwise) {
  const char* text = std::getenv(name);
  return text != nullptr ? std::strtoull(text, nullptr, 10) : otherwise;
}

TEST(RandomRanks, EveryRankHasTheRowsOfOneRank) {
  const std::uint64_t first = setting("MOESAIC_RANDOM_SEED", 1);
  const std::uint64_t cases = setting("MOESAIC_RANDOM_CASES", 200);
  std::uint64_t ran = 0;
  for (std::uint64_t seed = first; seed < first + cases; ++seed) {
    const std::optional<Case> c = draw_case(seed);
    if (c && run_case(*c)) ++ran;
  }
  EXPECT_GE(2 * ran, cases > 20 ? cases : 0) << "most are to be layers that ranks can have";
}

}  // namespace
}  // namespace moesaic
