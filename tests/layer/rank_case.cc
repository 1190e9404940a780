#include "layer/rank_case.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <thread>

#include "moesaic/interop/parallel.h"
#include "support/metrics.h"
#include "support/random.h"

namespace moesaic::test {
namespace {

// This rank's part of stacked weights: some experts, or columns [first, first + count) of the
// intermediate of each.
class PartSource final : public ExpertSource {
 public:
  PartSource(const LayerTensors& t, const ParallelConfig& p)
      : PartSource(t.experts, local_expert_ids(t.spec.num_experts, p).value(), t,
                   t.spec.intermediate_size, p.tp_size, p.tp_rank) {}
  // Slice `slice` of `slices` of some experts.
  PartSource(const OwnedExpertWeights& experts, std::vector<std::int64_t> ids,
             const LayerTensors& t, std::int64_t width, int slices, int slice)
      : all_(make_stacked_source(experts.view())),
        ids_(std::move(ids)),
        gated_(is_gated(t.spec.activation.kind)),
        full_(width),
        count_(full_ / slices),
        first_(count_ * slice) {}

  Result<ExpertWeightsView> expert(std::int64_t e) override {
    MOESAIC_ASSIGN_OR_RETURN(ExpertWeightsView v, all_->expert(ids_[static_cast<std::size_t>(e)]));
    if (count_ == full_) return v;
    // Gate and up rows are cut separately.
    for (int half = 0; half < (gated_ ? 2 : 1); ++half) {
      copy(v.w13, half * full_ + first_, 0, count_, v.w13.dim(1), w13_, half * count_,
           gated_ ? 2 * count_ : count_);
      if (v.w13_bias.present()) {
        const ConstTensorView row(v.w13_bias.data, v.w13_bias.dtype, Shape{v.w13_bias.dim(0), 1});
        copy(row, half * full_ + first_, 0, count_, 1, b13_, half * count_,
             gated_ ? 2 * count_ : count_);
      }
    }
    copy(v.w2, 0, first_, v.w2.dim(0), count_, w2_, 0, v.w2.dim(0));
    v.w13 = w13_.view();
    v.w2 = w2_.view();
    if (v.w13_bias.present()) {
      v.w13_bias = ConstTensorView(b13_.data(), b13_.dtype(), Shape{b13_.shape()[0]});
    }
    if (v.w2_bias.present() && first_ > 0) {
      b2_ = Tensor::zeros(v.w2_bias.dtype, v.w2_bias.shape).value();
      v.w2_bias = b2_.view();
    }
    return v;
  }

 private:
  static void copy(const ConstTensorView& from, std::int64_t row, std::int64_t column,
                   std::int64_t rows, std::int64_t columns, Tensor& to, std::int64_t to_row,
                   std::int64_t to_rows) {
    if (!to.present()) to = Tensor::zeros(from.dtype, {to_rows, columns}).value();
    const std::int64_t bytes = dtype_bits(from.dtype) / 8;
    for (std::int64_t r = 0; r < rows; ++r) {
      std::memcpy(to.data() + (to_row + r) * columns * bytes,
                  from.data + ((row + r) * from.dim(1) + column) * bytes,
                  static_cast<std::size_t>(columns * bytes));
    }
  }

  std::unique_ptr<ExpertSource> all_;
  std::vector<std::int64_t> ids_;
  bool gated_;
  std::int64_t full_, count_, first_;
  Tensor w13_, w2_, b13_, b2_;
};

MoeLayerSpec deepseek() {
  MoeLayerSpec spec = deepseek_like();
  spec.num_experts = spec.routing.num_experts = 12;
  spec.routing.top_k = 4;
  return spec;
}
MoeLayerSpec llama() {
  MoeLayerSpec spec = llama4_like();
  spec.shared.intermediate_size = 32;
  spec.shared.gated_output = true;
  return spec;
}
MoeLayerSpec biased() {
  MoeLayerSpec spec = small_spec();
  spec.has_router_bias = spec.has_expert_bias = true;
  spec.routing.method = RoutingMethod::kTopKSoftmax;
  spec.activation = make_activation("swigluoai").value();
  spec.routing.scale_on_output = true;
  spec.routing.routed_scaling_factor = 3.0;
  return spec;
}
void add_transports(std::vector<RankCombo>& all, RankCombo c) {
  const bool rows_differ = c.dp * c.pcp > 1 || c.sp;
  std::vector<RankTransport> transports = {RankTransport::kAuto};
  if (rows_differ) {
    transports.push_back(RankTransport::kGather);
  } else {
    transports.push_back(RankTransport::kNone);
  }
  if (c.ep) transports.push_back(RankTransport::kAllToAll);
  if (c.ep) transports.push_back(RankTransport::kBatched);
  for (const RankTransport transport : transports) {
    c.transport = transport;
    // kAuto is one of the others: only once, as the plainest case.
    if (transport == RankTransport::kAuto && (c.placement != ExpertPlacement::kLinear)) continue;
    c.reduction = RankReduction::kPerRank;
    all.push_back(c);
    if (!c.ep || transport == RankTransport::kAuto || transport == RankTransport::kBatched)
      continue;
    c.reduction = RankReduction::kPerSlot;
    all.push_back(c);
  }
}

}  // namespace

std::vector<Feature> rank_specs() {
  return {{"deepseek", deepseek},
          {"llama", llama},
          {"biased", biased},
          {"zero experts", with_identity_experts}};
}

std::string RankCombo::name() const {
  return fmt::format("tp{}_pcp{}_dp{}_{}{}_{}_{}_{}{}", tp, pcp, dp, ep ? "ep" : "slices",
                     sp ? "_sp" : "", expert_placement_name(placement),
                     rank_transport_name(transport), rank_reduction_name(reduction),
                     dual ? "_dual" : "");
}

std::vector<RankCombo> rank_combos(int ranks) {
  std::vector<RankCombo> all;
  for (int tp = 1; tp <= ranks; ++tp) {
    for (int pcp = 1; pcp <= ranks; ++pcp) {
      if (ranks % (tp * pcp) != 0) continue;
      for (const bool ep : {false, true}) {
        for (const bool sp : {false, true}) {
          if (sp && tp == 1) continue;
          for (const auto placement : {ExpertPlacement::kLinear, ExpertPlacement::kRoundRobin}) {
            if (!ep && placement != ExpertPlacement::kLinear) continue;
            add_transports(all, {tp, pcp, ranks / (tp * pcp), ep, sp, placement});
          }
        }
      }
    }
  }
  return all;
}

void solve_on_one_rank(RankProblem& problem) {
  FusedMoE::Options options = problem.options;
  const FusedMoE layer = std::move(problem.make(options)).value();
  LayerRun run = run_layer(layer, problem.x);
  problem.top_k = layer.spec().routing.top_k;
  problem.want = std::move(run.output);
  problem.ids = std::move(run.topk_ids);
}

std::string run_rank(const RankProblem& problem, const RankCombo& combo,
                     const std::vector<std::int64_t>& tokens,
                     const std::shared_ptr<Communicator>& communicator) {
  const int rank = communicator->rank();
  ParallelSizes sizes;
  sizes.tp_size = combo.tp;
  sizes.tp_rank = rank % combo.tp;
  sizes.pcp_size = combo.pcp;
  sizes.pcp_rank = rank / combo.tp % combo.pcp;
  sizes.dp_size = combo.dp;
  sizes.dp_rank = rank / combo.tp / combo.pcp;
  sizes.enable_expert_parallel = combo.ep;
  sizes.sequence_parallel = combo.sp;
  FusedMoE::Options options = problem.options;
  options.parallel = ParallelConfig::from_sizes(sizes).value();
  options.parallel.placement = combo.placement;
  options.ranks.communicator = communicator;
  options.ranks.transport = combo.transport;
  options.ranks.reduction = combo.reduction;
  options.ranks.dual_batch_tokens = combo.dual ? 1 : 0;
  const auto layer = problem.make(options);
  if (!layer.ok()) return layer.status().to_string();

  // The engine's rows; with sequence parallelism this rank's padded share of them.
  const auto engine = static_cast<std::size_t>(rank / combo.tp);
  std::int64_t first = 0;
  for (std::size_t i = 0; i < engine; ++i) first += tokens[i];
  std::int64_t rows = tokens[engine];
  std::int64_t real = rows;
  if (combo.sp) {
    const std::int64_t offset = std::min(rows, (rows + combo.tp - 1) / combo.tp * sizes.tp_rank);
    first += offset;
    real = rows - offset;
    rows = sequence_parallel_rows(tokens, combo.tp).value()[static_cast<std::size_t>(rank)];
    real = std::min(real, rows);
  }
  const std::int64_t hidden = problem.x.shape()[1];
  const std::int64_t row_bytes = hidden * dtype_bits(problem.x.dtype()) / 8;
  Tensor mine = Tensor::zeros(problem.x.dtype(), {rows, hidden}).value();
  std::memcpy(mine.data(), problem.x.data() + first * row_bytes,
              static_cast<std::size_t>(real * row_bytes));
  Tensor output = Tensor::uninitialized(DType::kF32, {rows, hidden}).value();
  const RoutingSpec& routing = layer->spec().routing;
  Tensor ids = Tensor::uninitialized(DType::kI32, {rows, problem.top_k}).value();
  Tensor weights = Tensor::uninitialized(DType::kF32, ids.shape()).value();
  Tensor logits =
      Tensor::uninitialized(DType::kF32, {rows, routing.num_experts + routing.num_zero_experts})
          .value();
  Tensor own;  // the output of the layer's own routing
  const bool slices = options.ranks.cut_shared && combo.tp > 1 && !combo.sp;  // of shared experts
  // Slabs of a GPU hold rows that are rounded before they are weighted.
  const bool slabs = combo.transport == RankTransport::kBatched;
  const bool pinned = !slices && combo.ep && !(slabs && options.device.is_cuda()) &&
                      (combo.reduction == RankReduction::kPerSlot || slabs || problem.top_k == 1);
  std::string wrong;  // told at the end, so that the other ranks are not left waiting
  // The layer's routing; then what it was, given back: logits by some ranks, ids by the others (but
  // ids do not carry the weight of identity experts); then the other way round.
  for (int repeat = 0; repeat < 3; ++repeat) {
    poison(output.view());
    FusedMoE::Args args;
    args.hidden_states = mine.view();
    args.output = output.view();
    if (repeat == 0) {
      for (Tensor* t : {&ids, &weights, &logits}) poison(t->view());
      args.trace.topk_ids = ids.view();
      args.trace.topk_weights = weights.view();
      args.trace.router_logits = logits.view();
    } else if ((rank + repeat) % 2 == 0 && routing.num_zero_experts == 0) {
      args.topk_ids = ids.view();
      args.topk_weights = weights.view();
    } else {
      args.router_logits = logits.view();
    }
    Status status = layer->forward(args);
    if (status.ok()) status = layer->maybe_all_reduce(output.view());
    if (!status.ok()) return status.to_string();
    const ConstTensorView got(output.data(), DType::kF32, Shape{real, hidden});
    const ConstTensorView want(problem.want.data() + first * hidden * 4, DType::kF32,
                               Shape{real, hidden});
    if (std::memcmp(ids.data(), problem.ids.data() + first * problem.top_k * 4,
                    static_cast<std::size_t>(real * problem.top_k * 4)) != 0) {
      wrong = "other topk_ids than on one rank";
    }
    std::string why;
    if (repeat == 0) {
      own = Tensor::uninitialized(DType::kF32, {rows, hidden}).value();
      std::memcpy(own.data(), output.data(), static_cast<std::size_t>(output.bytes()));
    } else if (!same_bits(output.view(), own.view(), &why)) {
      wrong = "other bits than with the layer's own routing: " + why;
    }
    if (pinned && !same_bits(got, want, &why)) wrong = "other bits than on one rank: " + why;
    if (real == 0) continue;
    const auto result = compare(to_doubles(got), to_doubles(want));
    if (!(result.rel_l2 <= problem.bound)) wrong = result.describe;
  }
  return wrong;
}

std::string run_ranks(const RankProblem& problem, const RankCombo& combo,
                      const std::vector<std::int64_t>& tokens) {
  auto ranks = make_in_process_communicators(combo.ranks(), {.timeout_ms = kHangGuardMs}).value();
  std::vector<std::string> wrong(ranks.size());
  std::vector<std::thread> threads;
  for (std::size_t r = 0; r < ranks.size(); ++r) {
    threads.emplace_back([&, r] {
      wrong[r] =
          run_rank(problem, combo, tokens, std::shared_ptr<Communicator>(std::move(ranks[r])));
    });
  }
  for (std::thread& t : threads) t.join();
  std::string text;
  for (std::size_t r = 0; r < wrong.size(); ++r) {
    if (!wrong[r].empty()) text += fmt::format("rank {}: {}\n", r, wrong[r]);
  }
  return text;
}

std::vector<std::int64_t> uneven_tokens(std::uint64_t seed, std::int64_t total, int parts) {
  Rng rng(seed);
  std::vector<std::int64_t> tokens(static_cast<std::size_t>(parts), 0);
  // Half of the parts share everything: the others are empty or get little.
  for (std::int64_t t = 0; t < total; ++t) {
    const auto part = static_cast<std::size_t>(rng.next() % static_cast<std::uint64_t>(parts));
    ++tokens[part % 3 == 1 ? 0 : part];
  }
  return tokens;
}

MoeLayerWeights rank_weights(const LayerTensors& tensors, const ParallelConfig& parallel,
                             bool cut_shared) {
  MoeLayerWeights w = tensors.weights();
  w.experts = std::make_unique<PartSource>(tensors, parallel);
  if (cut_shared && w.shared) {
    const std::vector<int> same = parallel.replica_group();
    const auto at = std::find(same.begin(), same.end(), parallel.flat_rank());
    w.shared = std::make_unique<PartSource>(tensors.shared, std::vector<std::int64_t>{0}, tensors,
                                            tensors.spec.shared.intermediate_size,
                                            static_cast<int>(same.size()),
                                            static_cast<int>(at - same.begin()));
  }
  return w;
}

RankProblem checkpoint_problem(const Checkpoint& checkpoint, const std::string& folder,
                               const std::string& quant, std::int64_t rows) {
  const MoeLayerSpec spec = checkpoint.layers().front();
  const TensorFile golden = TensorFile::open(folder + "/golden.safetensors").value();
  const Tensor all = golden.read(spec.prefix + ".input").value();
  RankProblem p;
  p.make = [&checkpoint, layer = spec.layer](const FusedMoE::Options& options) {
    return FusedMoE::from_checkpoint(checkpoint, layer, options);
  };
  p.options.quant = quant;
  p.options.num_threads = 1;
  p.options.max_tokens = 12;
  p.x = Tensor::uninitialized(all.dtype(), {rows, spec.hidden_size}).value();
  std::memcpy(p.x.data(), all.data(), static_cast<std::size_t>(p.x.bytes()));
  solve_on_one_rank(p);
  return p;
}

MakeRankLayer maker_of(const LayerTensors& tensors) {
  return [&tensors](const FusedMoE::Options& options) {
    return FusedMoE::create(rank_weights(tensors, options.parallel, options.ranks.cut_shared),
                            options);
  };
}

std::vector<Status> on_two_ranks(
    const std::function<Status(int, std::shared_ptr<Communicator>)>& body, int timeout_ms) {
  auto ranks = make_in_process_communicators(2, {.timeout_ms = timeout_ms}).value();
  std::vector<Status> result(2);
  std::vector<std::thread> threads;
  for (int r = 0; r < 2; ++r) {
    threads.emplace_back([&, r] {
      const auto i = static_cast<std::size_t>(r);
      result[i] = body(r, std::shared_ptr<Communicator>(std::move(ranks[i])));
    });
  }
  for (std::thread& t : threads) t.join();
  return result;
}

}  // namespace moesaic::test
