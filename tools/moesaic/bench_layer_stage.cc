// The layer stage of the bench: FusedMoE, on one rank or as this rank's part.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <set>
#include <utility>
#include <vector>

#include "bench_parts.h"
#include "bench_random.h"
#include "bench_reference.h"
#include "layer/quant_selection.h"
#include "layer_io.h"
#include "moesaic/communicator.h"
#include "options.h"

namespace moesaic::tool {
namespace {

// This rank's experts of a source of all.
class RankSource final : public ExpertSource {
 public:
  RankSource(std::unique_ptr<ExpertSource> all, std::vector<std::int64_t> ids)
      : all_(std::move(all)), ids_(std::move(ids)) {}
  Result<ExpertWeightsView> expert(std::int64_t e) override {
    return all_->expert(ids_[static_cast<std::size_t>(e)]);
  }

 private:
  std::unique_ptr<ExpertSource> all_;
  std::vector<std::int64_t> ids_;
};

class LayerStage final : public BenchStage {
 public:
  static Result<std::unique_ptr<BenchStage>> create(const BenchSettings& settings) {
    if (settings.checkpoint != nullptr && settings.routing != "uniform") {
      return Status(StatusCode::kUnsupported,
                    fmt::format("--routing {}: a checkpoint's layer routes by its own gate; use "
                                "--shape, or --stage experts",
                                settings.routing));
    }
    MOESAIC_RETURN_IF_ERROR(check_routes_by_hidden_states(settings.spec));
    auto stage = std::make_unique<LayerStage>();
    stage->s_ = settings;
    MOESAIC_ASSIGN_OR_RETURN(stage->door_, door_of(settings));
    MOESAIC_ASSIGN_OR_RETURN(const std::vector<float> bias, routing_bias_of(settings));
    if (!bias.empty()) stage->s_.spec.has_router_bias = true;  // how a random gate gets skewed
    MoeLayerWeights weights;
    if (settings.checkpoint != nullptr) {
      MOESAIC_ASSIGN_OR_RETURN(
          weights, settings.checkpoint->load_layer(settings.spec.layer, settings.options.parallel,
                                                   settings.options.progress));
      MOESAIC_ASSIGN_OR_RETURN(MoeLayerWeights again,
                               settings.checkpoint->load_layer(settings.spec.layer, {}));
      stage->check_source_ = std::move(again.experts);
      stage->check_shared_ = std::move(again.shared);
    } else {
      const MoeProblem p =
          problem_of(settings.spec, settings.options.max_tokens, settings.options.num_threads);
      weights.spec = stage->s_.spec;
      MOESAIC_ASSIGN_OR_RETURN(weights.tensors,
                               random_layer_tensors(stage->s_.spec, settings.seed, bias));
      if (settings.options.parallel.tp_size > 1) {
        return Status(StatusCode::kUnsupported,
                      "--no-ep: random weights are drawn expert by expert; use --model for slices");
      }
      MOESAIC_ASSIGN_OR_RETURN(
          std::vector<std::int64_t> ids,
          local_expert_ids(settings.spec.num_experts, settings.options.parallel));
      weights.experts =
          std::make_unique<RankSource>(make_random_source(p, settings.seed), std::move(ids));
      weights.shared = make_random_shared_source(stage->s_.spec, settings.seed);
      weights.shared_quant = stage->s_.spec.quant;
      stage->check_source_ = make_random_source(p, settings.seed);
      stage->check_shared_ = make_random_shared_source(stage->s_.spec, settings.seed);
    }
    stage->keep_small(weights.tensors);
    stage->shared_quant_ = weights.shared_quant;
    // As they are in memory: a model may leave them in another format than its routed experts.
    if (settings.spec.shared.intermediate_size > 0) {
      MOESAIC_ASSIGN_OR_RETURN(
          const layer::QuantPlan plan,
          layer::plan_shared_quant(weights.shared_quant, settings.spec.quant,
                                   settings.spec.activation_dtype, settings.options.quant));
      stage->shared_in_force_ = plan.scheme;
    }
    stage->gate_bytes_ = weights.tensors.gate_weight.bytes();
    MOESAIC_ASSIGN_OR_RETURN(FusedMoE layer,
                             FusedMoE::create(std::move(weights), settings.options));
    stage->layer_ = std::make_unique<FusedMoE>(std::move(layer));
    return std::unique_ptr<BenchStage>(std::move(stage));
  }

  std::string backend() const override { return layer_->experts_backend(); }
  std::string quant() const override { return std::string(layer_->quant().name); }
  std::string backend_note() const override { return slow_backend_note(*layer_); }
  std::int64_t bytes_sent() const override { return layer_->bytes_sent(); }
  RankTransport transport() const override { return layer_->transport(); }

  Result<BenchPoint> prepare(std::int64_t tokens) override {
    struct Rotation {
      Tensor x, y, ids, weights, logits;
    };
    const MoeLayerSpec& spec = s_.spec;
    const std::int64_t k = spec.routing.top_k;
    auto rotations = std::make_shared<std::vector<Rotation>>();
    BenchPoint point;
    const auto run = [this](Rotation& r, Door door) {
      FusedMoE::Args args;
      args.hidden_states = r.x.view();
      args.output = r.y.view();
      if (door == Door::kTopk) {
        args.topk_ids = r.ids.view();
        args.topk_weights = r.weights.view();
        return layer_->forward(args);
      }
      args.trace.topk_ids = r.ids.view();
      args.trace.topk_weights = r.weights.view();
      if (door == Door::kLogits) args.router_logits = r.logits.view();
      return layer_->forward(args);
    };
    // What the layer itself finds, for the other doors.
    const auto run_first = [&](Rotation& r) -> Status {
      if (door_ != Door::kLogits) return run(r, Door::kHidden);
      const std::int64_t columns = spec.num_experts + spec.routing.num_zero_experts;
      MOESAIC_ASSIGN_OR_RETURN(r.logits, Tensor::zeros(DType::kF32, {tokens, columns}));
      FusedMoE::Trace trace;
      trace.router_logits = r.logits.view();
      MOESAIC_RETURN_IF_ERROR(layer_->forward(r.x.view(), r.y.view(), trace));
      return run(r, door_);
    };
    // Every rank has a gate and shared experts (or a slice of them) for its rows; experts that all
    // ranks' rows choose lie on one each, or in slices.
    const auto& world = s_.options.ranks.communicator;
    const double ranks = world ? world->size() : 1;
    const double same_rows = peers_with_the_same_rows();
    const double gate = door_ == Door::kHidden ? 1.0 : 0.0;
    const double shared = s_.options.ranks.cut_shared ? 1.0 / same_rows : 1.0;
    const double fixed =
        gate * static_cast<double>(gate_bytes_) +
        shared * expert_bytes(spec, spec.shared.intermediate_size, shared_in_force_);
    const double of_expert = expert_bytes(spec, spec.intermediate_size, layer_->quant());
    std::set<std::int32_t> touched;
    const auto enough = [&](int i) {
      if (i < rotations_for(tokens, s_)) return false;
      return !layer_->device().is_cuda() || i >= kMostRotations ||
             static_cast<double>(touched.size()) * of_expert >= kPastTheCache ||
             static_cast<std::int64_t>(touched.size()) == spec.num_experts;
    };
    // Ranks go on until all of them have enough.
    const auto goes_on = [&](int i) -> Result<bool> {
      const bool mine = !enough(i);
      if (!world) return mine;
      MOESAIC_ASSIGN_OR_RETURN(const std::vector<std::int64_t> all,
                               world->control().all_gather("rotations", mine ? 1 : 0));
      return std::count(all.begin(), all.end(), 1) > 0;
    };
    for (int i = 0;; ++i) {
      MOESAIC_ASSIGN_OR_RETURN(const bool more, goes_on(i));
      if (!more) break;
      Rotation r;
      const std::uint64_t seed = s_.seed * 1000003 + static_cast<std::uint64_t>(i) +
                                 static_cast<std::uint64_t>(s_.engine) * 7919;
      MOESAIC_ASSIGN_OR_RETURN(r.x,
                               random_tensor(row_dtype(s_), {tokens, spec.hidden_size}, 1.0, seed));
      MOESAIC_ASSIGN_OR_RETURN(r.y, Tensor::zeros(row_dtype(s_), {tokens, spec.hidden_size}));
      MOESAIC_ASSIGN_OR_RETURN(r.ids, Tensor::zeros(DType::kI32, {tokens, k}));
      MOESAIC_ASSIGN_OR_RETURN(r.weights, Tensor::zeros(DType::kF32, {tokens, k}));
      MOESAIC_RETURN_IF_ERROR(run_first(r));
      add_touched(r.ids, touched);
      MOESAIC_ASSIGN_OR_RETURN(const double chosen, touched_on_all_ranks(r.ids));
      point.bytes +=
          chosen * of_expert +
          ranks * (fixed + static_cast<double>(r.x.bytes() + r.y.bytes() + r.logits.bytes()));
      rotations->push_back(std::move(r));
    }
    point.rotations = static_cast<int>(rotations->size());
    point.bytes /= point.rotations;
    point.flops =
        2.0 * static_cast<double>(tokens) *
        (ranks / same_rows * static_cast<double>(k) * expert_weights(spec, spec.intermediate_size) +
         ranks * (shared * expert_weights(spec, spec.shared.intermediate_size) +
                  gate * static_cast<double>(spec.num_experts * spec.hidden_size)));
    point.run = [rotations, run, door = door_](int i) {
      return run((*rotations)[static_cast<std::size_t>(i)], door);
    };
    MOESAIC_RETURN_IF_ERROR(point.run(0));  // what is checked came through this door
    const Rotation& first = rotations->front();
    MOESAIC_RETURN_IF_ERROR(check(first.x, first.y, first.ids, first.weights, point));
    if (layer_->device().is_cuda()) {
      MOESAIC_ASSIGN_OR_RETURN(gpu_, make_gpu_layer(*layer_));
      std::vector<std::vector<ConstTensorView>> in;
      std::vector<std::vector<TensorView>> out;
      for (Rotation& r : *rotations) {
        in.push_back({r.x.view()});
        if (door_ == Door::kLogits) in.back().push_back(r.logits.view());
        if (door_ == Door::kTopk)
          in.back().insert(in.back().end(), {r.ids.view(), r.weights.view()});
        out.push_back({r.y.view()});
      }
      if (world && s_.options.ranks.engine == RankEngine::kPeerWindows) {
        MOESAIC_ASSIGN_OR_RETURN(const GpuStage::PassFn pass,
                                 gpu_->captured(in, out, [&] { return world->barrier("bench"); }));
        // Calls that have ended with a failure take no time.
        point.pass = [pass, layer = layer_.get()]() -> Result<double> {
          MOESAIC_ASSIGN_OR_RETURN(const double us, pass());
          MOESAIC_RETURN_IF_ERROR(layer->health());
          return us;
        };
      } else if (world) {  // ranks wait for each other on the host
        MOESAIC_ASSIGN_OR_RETURN(point.run, gpu_->resident(in, out));
      } else {
        MOESAIC_ASSIGN_OR_RETURN(point.time, gpu_->timer(in, out));
      }
    }
    return point;
  }

 private:
  enum class Door { kHidden, kLogits, kTopk };  // of kDoors, in order

  static Result<Door> door_of(const BenchSettings& settings) {
    const auto at = std::find(kDoors.begin(), kDoors.end(), settings.door);
    if (at == kDoors.end()) {
      return Status(
          StatusCode::kInvalidArgument,
          fmt::format("--door: got '{}', need {}", settings.door, fmt::join(kDoors, " or ")));
    }
    const auto door = static_cast<Door>(at - kDoors.begin());
    if (door == Door::kTopk && settings.spec.routing.num_zero_experts > 0) {
      return Status(StatusCode::kUnsupported,
                    "--door topk: got a layer with identity experts, whose weights its ids do not "
                    "tell; need hidden or logits");
    }
    return door;
  }

  int peers_with_the_same_rows() const {
    const ParallelConfig& p = s_.options.parallel;
    return !s_.options.ranks.communicator || p.is_sequence_parallel() ? 1 : p.engine_tp_size();
  }

  // Experts that the rows of some rank choose.
  Result<double> touched_on_all_ranks(const Tensor& ids) const {
    std::set<std::int32_t> mine;
    add_touched(ids, mine);
    const auto& world = s_.options.ranks.communicator;
    if (!world) return static_cast<double>(mine.size());
    std::vector<float> ranks_of(static_cast<std::size_t>(s_.spec.num_experts), 0.0F);
    for (const std::int32_t id : mine) ranks_of[static_cast<std::size_t>(id)] = 1.0F;
    MOESAIC_RETURN_IF_ERROR(world->control().all_reduce_sum("touched", ranks_of));
    return static_cast<double>(
        std::count_if(ranks_of.begin(), ranks_of.end(), [](float ranks) { return ranks > 0; }));
  }

  // What the check needs of the small tensors.
  void keep_small(const MoeLayerTensors& t) {
    const auto copy = [](const Tensor& from) {
      Tensor to;
      if (!from.present()) return to;
      auto made = Tensor::uninitialized(from.dtype(), from.shape());
      if (!made.ok()) return to;
      to = std::move(made).value();
      std::copy(from.data(), from.data() + from.bytes(), to.data());
      return to;
    };
    experts_norm_weight_ = copy(t.experts_norm_weight);
    shared_gate_weight_ = copy(t.shared_gate_weight);
  }

  // For the one row that is checked: the layer's, or the wider one that rounding this row leaves.
  Result<double> bound_of_row(const ConstTensorView& x) const {
    const double stated = layer_->quant().output_bound, activation = layer_->activation_bound();
    RowNumerics numerics;
    // Over ranks nothing is measured.
    if (s_.options.ranks.communicator) return bound_of_one_row(stated, activation, numerics);
    const Shape one{1, s_.spec.hidden_size};
    MOESAIC_ASSIGN_OR_RETURN(Tensor y, Tensor::zeros(DType::kF32, one));
    FusedMoE::Trace trace;
    trace.numerics = {&numerics, 1};
    MOESAIC_RETURN_IF_ERROR(layer_->forward({x.data, x.dtype, one}, y.view(), trace));
    return bound_of_one_row(stated, activation, numerics);
  }

  // First token: the experts that the layer chose and the shared expert, in float64.
  Status check(const Tensor& x, const Tensor& y, const Tensor& ids, const Tensor& weights,
               BenchPoint& point) const {
    const auto k = static_cast<std::size_t>(s_.spec.routing.top_k);
    MoeProblem p = problem_of(s_.spec, 1, s_.options.num_threads);
    const std::vector<double> in = row_to_doubles(x.view(), 0);
    std::vector<double> routed_in = in;
    if (s_.spec.input_norm_eps > 0) {
      double squares = 0;
      for (const double v : in) squares += v * v;
      const double root =
          std::sqrt(squares / static_cast<double>(in.size()) + s_.spec.input_norm_eps);
      for (std::size_t i = 0; i < in.size(); ++i) {
        routed_in[i] *= double{experts_norm_weight_.as<float>()[i]} / root;
      }
    }
    MOESAIC_ASSIGN_OR_RETURN(std::vector<double> want, reference_token(p, *check_source_, routed_in,
                                                                       {ids.as<std::int32_t>(), k},
                                                                       {weights.as<float>(), k}));
    if (s_.spec.routing.scale_on_output) {
      for (double& v : want) v *= s_.spec.routing.routed_scaling_factor;
    }
    if (s_.spec.shared.intermediate_size > 0) {
      p.intermediate_size = s_.spec.shared.intermediate_size;
      p.quant = shared_quant_;
      p.activation = s_.spec.shared.activation.value_or(s_.spec.activation);
      p.has_expert_bias = p.apply_router_weight_on_input = false;
      float factor = 1.0F;
      if (shared_gate_weight_.present()) {
        const std::vector<double> g = row_to_doubles(shared_gate_weight_.view(), 0);
        double dot = 0;
        for (std::size_t i = 0; i < g.size(); ++i) dot += g[i] * in[i];
        factor = static_cast<float>(1 / (1 + std::exp(-dot)));
      }
      const std::int32_t zero = 0;
      MOESAIC_ASSIGN_OR_RETURN(const std::vector<double> s,
                               reference_token(p, *check_shared_, in, {&zero, 1}, {&factor, 1}));
      for (std::size_t i = 0; i < want.size(); ++i) want[i] += s[i];
    }
    point.rel_l2 = relative_l2(row_to_doubles(y.view(), 0), want);
    MOESAIC_ASSIGN_OR_RETURN(point.bound, bound_of_row(x.view()));
    point.bound += rounding_of(row_dtype(s_));
    return upper_bound_check(point, "layer");
  }

  BenchSettings s_;
  Door door_ = Door::kHidden;
  std::unique_ptr<FusedMoE> layer_;
  std::unique_ptr<ExpertSource> check_source_;
  std::unique_ptr<ExpertSource> check_shared_;
  Scheme shared_quant_, shared_in_force_;
  Tensor experts_norm_weight_, shared_gate_weight_;
  std::int64_t gate_bytes_ = 0;
  std::unique_ptr<GpuStage> gpu_;
};

}  // namespace

Result<std::unique_ptr<BenchStage>> make_layer_stage(const BenchSettings& settings) {
  return LayerStage::create(settings);
}

}  // namespace moesaic::tool
