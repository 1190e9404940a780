#include "layer/random_world.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "numerics/element.h"
#include "support/experts_run.h"
#include "support/random_cases.h"

namespace moesaic::test {
namespace {

// The helpers do not cut scales.
bool is_quantized(const MoeLayerSpec& spec) {
  const DType stored = spec.quant.weight.dtype;
  return stored != DType::kF32 && stored != DType::kBF16 && stored != DType::kF16;
}

MoeLayerSpec draw_spec(Rng& rng, bool whole, bool gpu, std::string& scheme) {
  MoeLayerSpec spec = small_spec();
  scheme = pick<std::string>(rng, {"f32", "bf16", "bf16", "f16"});
  spec.hidden_size = 8 * rng.integer(1, 9);
  spec.intermediate_size = 24 * rng.integer(1, 2);
  if (whole && chance(rng, 0.4)) {  // the helpers do not cut scales
    scheme = pick<std::string>(
        rng, {"fp8-block", "fp8-block", "fp8-bf16", "fp8-channel", "fp8-tensor", "int8", "mxfp8",
              "mxfp4", "mxfp4-bf16", "nvfp4", "int4-g128", "int4-fp8", "mxfp4-int8"});
    spec.hidden_size = 128 * rng.integer(1, 2);
    spec.intermediate_size = 128;
  } else if (gpu && chance(rng, 0.6)) {  // sizes of the fast kernels
    spec.hidden_size = 64 * rng.integer(1, 4);
    spec.intermediate_size = 64 * (whole ? rng.integer(1, 3) : 24);
  }
  spec.quant = scheme_called(scheme);
  const bool fast = gpu && chance(rng, 0.7);  // mostly what a GPU's own ways take
  spec.activation_dtype =
      fast ? DType::kBF16
           : pick<DType>(rng, {DType::kBF16, DType::kBF16, DType::kF16, DType::kF32});
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

RandomWorld draw_world(Rng& rng, int ranks, bool ep, bool eplb) {
  RandomWorld w;
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

void draw_options(Rng& rng, const MoeLayerSpec& spec, const RandomWorld& world,
                  FusedMoE::Options& o) {
  o.num_threads = 1;
  o.max_tokens = pick<std::int64_t>(rng, {1, 2, 3, 5, 16});
  const bool gpu = o.device.is_cuda();
  if (gpu) {
    o.ranks.engine = pick<RankEngine>(rng, {RankEngine::kAuto, RankEngine::kMessages});
    if (chance(rng, 0.6)) o.max_tokens = 16;
  }
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
  if (gpu) return;
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
RankRows draw_rows(Rng& rng, const RandomRanks& c, bool batched,
                   std::vector<std::int32_t>& ids_of_rows, const FusedMoE& one) {
  const MoeLayerSpec& spec = c.tensors.spec;
  const std::int64_t k = spec.routing.top_k, experts = spec.num_experts;
  const std::int64_t columns = experts + spec.routing.num_zero_experts;
  const std::int64_t tokens = chance(rng, 0.2) ? 0 : rng.integer(1, 11);
  RankRows r;
  const DType dtype = chance(rng, 0.6) ? spec.activation_dtype : DType::kBF16;
  const std::int64_t pitch = spec.hidden_size + (chance(rng, 0.2) ? 8 : 0);
  r.memory = random_hidden(rng.next(), tokens, pitch, dtype);
  r.x = ConstTensorView(r.memory.data(), dtype, Shape{tokens, spec.hidden_size});
  r.x.strides[0] = pitch;
  r.output = pick<DType>(rng, {DType::kF32, DType::kF32, DType::kBF16, DType::kF16});
  // The device's own memory takes no other from BF16 models.
  if (c.options.device.is_cuda() && r.output == DType::kF16 && chance(rng, 0.8)) {
    r.output = DType::kF32;
  }
  r.apart = (spec.shared.intermediate_size > 0 || c.options.shared_experts) && chance(rng, 0.3);
  // In which a GPU adds them.
  if (r.apart && c.options.ranks.cut_shared && c.options.device.is_cuda()) r.output = DType::kF32;
  std::vector<bool> is_padding(static_cast<std::size_t>(tokens), false);
  if (chance(rng, 0.4)) {
    r.padding = Tensor::zeros(DType::kU8, {tokens}).value();
    const std::int64_t row_bytes = pitch * dtype_bits(dtype) / 8;
    for (std::int64_t t = 0; t < tokens; ++t) {
      if (!chance(rng, 0.3)) continue;
      is_padding[static_cast<std::size_t>(t)] = true;
      r.padding.as<std::uint8_t>()[t] = 255;
      if (chance(rng, 0.5)) poison(r.memory.data() + t * row_bytes, row_bytes);
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
    r.logits =
        random_normal(rng, pick<DType>(rng, {DType::kF32, DType::kBF16}), {tokens, columns}, 2.0);
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
          poison(r.weights.data() + (t * k + j) * 4, 4);
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

RankCall draw_call(Rng& rng, const RandomRanks& c, const RandomWorld& world, const FusedMoE& one) {
  RankCall call;
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
    call.refusal =
        pick<RankRefusal>(rng, {RankRefusal::kWidth, RankRefusal::kDType, RankRefusal::kNoMemory,
                                RankRefusal::kIds, RankRefusal::kPadding});
    if (world.replicas() > 1 && chance(rng, 0.3)) call.refusal = RankRefusal::kRows;
  }
  return call;
}

}  // namespace

std::string RandomRanks::describe() const {
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
      dtype_name(options.ranks.combine_dtype), options.max_tokens, options.ranks.dual_batch_tokens,
      options.ranks.reduce_results ? "" : ", parts",
      options.transform.output ? ", transforms" : "");
  if (options.inplace) text += ", in place";
  if (options.shared_experts) text += ", shared function";
  for (const RankEra& e : eras) {
    text += fmt::format("; tp{} pcp{} dp{}{}{} {}, {} calls", e.world.tp, e.world.pcp, e.world.dp,
                        e.world.ep ? " ep" : "", e.world.sp ? " sp" : "",
                        expert_placement_name(e.world.placement), e.calls.size());
  }
  return text;
}

std::optional<RandomRanks> draw_ranks(std::uint64_t seed, std::vector<Device> devices) {
  Rng rng(seed * 7919 + 17);
  RandomRanks c;
  c.devices = std::move(devices);
  const bool gpu = c.devices.front().is_cuda();
  c.seed = seed;
  const bool ep = chance(rng, 0.75);
  const int ranks = pick<int>(
      rng, ep ? std::vector<int>{2, 3, 4, 4, 5, 6, 7, 8} : std::vector<int>{2, 3, 4, 6, 8});
  const MoeLayerSpec spec = draw_spec(rng, ep, gpu, c.scheme);
  if (!validate(spec).ok()) return std::nullopt;
  const bool eplb = ep && chance(rng, 0.4);
  RankEra first;
  first.world = draw_world(rng, ranks, ep, eplb);
  FusedMoE::Options& o = c.options;
  o.device = c.devices.front();
  o.ranks.enable_eplb = eplb;
  if (eplb) {
    const std::int64_t over = spec.num_experts % ranks;
    o.ranks.num_redundant_experts = (over == 0 ? 0 : ranks - over) + ranks * rng.integer(0, 2);
    o.ranks.eplb_window = rng.integer(1, 4);
  }
  draw_options(rng, spec, first.world, o);
  c.tensors = make_tensors(seed, spec);

  FusedMoE::Options alone;
  alone.num_threads = 1;
  alone.device = o.device;
  alone.transform = o.transform;
  alone.shared_experts = o.shared_experts;
  const Result<FusedMoE> one = FusedMoE::create(c.tensors.weights(), alone);
  if (!one.ok()) return std::nullopt;
  // On a GPU slices and the rows of slabs are rounded to bf16 before they are added.
  const bool rounded =
      gpu && (!ep || o.ranks.cut_shared || o.ranks.transport == RankTransport::kBatched);
  const bool pinned = ep && !o.ranks.cut_shared && !rounded &&
                      (o.ranks.reduction_in_force() == RankReduction::kPerSlot ||
                       o.ranks.transport == RankTransport::kBatched || spec.routing.top_k == 1) &&
                      o.ranks.combine_dtype == DType::kF32;
  c.tolerance = pinned ? 0 : rounded || o.ranks.combine_dtype != DType::kF32 ? 8e-3 : 1e-5;
  c.eras.push_back(std::move(first));
  if (chance(rng, 0.25)) c.eras.push_back({draw_world(rng, ranks, ep, eplb), {}});
  if (!gpu && chance(rng, 0.3)) c.failing = static_cast<int>(rng.integer(0, ranks - 1));
  for (RankEra& era : c.eras) {
    for (std::int64_t n = rng.integer(1, 3); n > 0; --n) {
      era.calls.push_back(draw_call(rng, c, era.world, *one));
    }
  }
  return c;
}

}  // namespace moesaic::test
