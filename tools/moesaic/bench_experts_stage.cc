// The experts stage of the bench: the backend that the layer would choose, on routings drawn at
// random; alone, or in the kernel that the layer puts around it (the stage "kernel").

#include <cmath>
#include <optional>
#include <utility>
#include <vector>

#include "bench_parts.h"
#include "bench_random.h"
#include "bench_reference.h"
#include "layer_io.h"
#include "moesaic/modular_kernel.h"
#include "options.h"

namespace moesaic::tool {
namespace {

class ExpertsStage final : public BenchStage {
 public:
  static Result<std::unique_ptr<BenchStage>> create(const BenchSettings& settings, bool in_kernel) {
    auto stage = std::make_unique<ExpertsStage>();
    stage->s_ = settings;
    stage->p_ =
        problem_of(settings.spec, settings.options.max_tokens, settings.options.num_threads);
    stage->p_.device = settings.options.device;
    const bool gpu = settings.options.device.is_cuda();
    MOESAIC_ASSIGN_OR_RETURN(const ExpertsBackend* row,
                             choose_experts(stage->p_, settings.options.backend));
    stage->backend_ = std::string(row->name);
    if (settings.checkpoint != nullptr) {
      MOESAIC_ASSIGN_OR_RETURN(
          MoeLayerWeights weights,
          settings.checkpoint->load_layer(settings.spec.layer, {}, settings.options.progress));
      stage->source_ = std::move(weights.experts);
    } else {
      stage->source_ = make_random_source(stage->p_, settings.seed);
    }
    if (gpu) {
      MOESAIC_ASSIGN_OR_RETURN(stage->gpu_,
                               make_gpu_experts(*row, stage->p_, *stage->source_, in_kernel));
    } else {
      MOESAIC_ASSIGN_OR_RETURN(stage->experts_, row->create(stage->p_, *stage->source_));
    }
    if (in_kernel && !gpu) MOESAIC_RETURN_IF_ERROR(stage->put_in_kernel());
    return std::unique_ptr<BenchStage>(std::move(stage));
  }

  std::string backend() const override { return backend_; }
  std::string quant() const override { return std::string(p_.quant.name); }
  std::string backend_note() const override {
    return slow_backend_note(backend_, explain_experts(p_));
  }

  Result<BenchPoint> prepare(std::int64_t tokens) override {
    struct Rotation {
      Tensor x, y;
      Routing routing;
    };
    auto rotations = std::make_shared<std::vector<Rotation>>();
    BenchPoint point;
    point.rotations = rotations_for(tokens, s_);
    for (int i = 0; i < point.rotations; ++i) {
      const std::uint64_t seed = s_.seed * 1000003 + static_cast<std::uint64_t>(i);
      Rotation r;
      MOESAIC_ASSIGN_OR_RETURN(r.x,
                               random_tensor(row_dtype(s_), {tokens, p_.hidden_size}, 1.0, seed));
      MOESAIC_ASSIGN_OR_RETURN(r.y, Tensor::zeros(row_dtype(s_), {tokens, p_.hidden_size}));
      MOESAIC_ASSIGN_OR_RETURN(r.routing, random_routing(s_.routing, tokens, p_.num_experts,
                                                         p_.top_k, kRoutingSeed + seed));
      point.bytes += (static_cast<double>(touched_experts(r.routing.ids)) *
                          expert_bytes(s_.spec, p_.intermediate_size, p_.quant) +
                      static_cast<double>(r.x.bytes() + r.y.bytes())) /
                     point.rotations;
      rotations->push_back(std::move(r));
    }
    point.flops = 2.0 * static_cast<double>(tokens * p_.top_k) *
                  expert_weights(s_.spec, p_.intermediate_size);
    auto workspace = std::make_shared<Workspace>();
    if (!gpu_) {
      MOESAIC_ASSIGN_OR_RETURN(const std::int64_t bytes, experts().workspace_size(tokens));
      MOESAIC_ASSIGN_OR_RETURN(*workspace, Workspace::allocate(bytes));
    }
    point.run = [this, rotations, workspace](int i) -> Status {
      Rotation& r = (*rotations)[static_cast<std::size_t>(i)];
      if (gpu_) {
        return gpu_->run({r.x.view(), r.routing.ids.view(), r.routing.weights.view()},
                         {r.y.view()});
      }
      if (kernel_) {  // in its own workspace
        return kernel_->run(
            {r.x.view(), r.routing.weights.view(), r.routing.ids.view(), {}, r.y.view()});
      }
      return experts_->run({.hidden_states = r.x.view(),
                            .topk_ids = r.routing.ids.view(),
                            .topk_weights = r.routing.weights.view(),
                            .expert_map = {},
                            .expert_num_tokens = {},
                            .workspace = workspace->span(),
                            .output = r.y.view()});
    };
    MOESAIC_RETURN_IF_ERROR(point.run(0));
    const Rotation& first = rotations->front();
    const auto k = static_cast<std::size_t>(p_.top_k);
    MOESAIC_ASSIGN_OR_RETURN(const std::vector<double> want,
                             reference_token(p_, *source_, row_to_doubles(first.x.view(), 0),
                                             {first.routing.ids.as<std::int32_t>(), k},
                                             {first.routing.weights.as<float>(), k}));
    point.rel_l2 = relative_l2(row_to_doubles(first.y.view(), 0), want);
    // The output is stored in the activation dtype: half an ulp of it comes on top.
    point.bound = output_bound(p_.quant, p_.intermediate_size);
    if (!gpu_) {
      MOESAIC_ASSIGN_OR_RETURN(point.bound,
                               bound_of_row(first.x.view(), first.routing, *workspace));
    }
    point.bound += rounding_of(row_dtype(s_));
    MOESAIC_RETURN_IF_ERROR(upper_bound_check(point, "experts"));
    if (gpu_) {
      std::vector<std::vector<ConstTensorView>> in;
      std::vector<std::vector<TensorView>> out;
      for (Rotation& r : *rotations) {
        in.push_back({r.x.view(), r.routing.ids.view(), r.routing.weights.view()});
        out.push_back({r.y.view()});
      }
      MOESAIC_ASSIGN_OR_RETURN(point.time, gpu_->timer(in, out));
    }
    return point;
  }

 private:
  const Experts& experts() const { return kernel_ ? kernel_->experts() : *experts_; }

  Status put_in_kernel() {
    MOESAIC_ASSIGN_OR_RETURN(auto rows, make_local_prepare_finalize(p_));
    ModularKernel::Options options;
    options.max_tokens = p_.max_tokens;
    MOESAIC_ASSIGN_OR_RETURN(
        ModularKernel kernel,
        ModularKernel::create(p_, std::move(rows), std::move(experts_), options));
    kernel_.emplace(std::move(kernel));
    return {};
  }

  // For the one row that is checked: the scheme's, or the wider one that rounding this row leaves.
  Result<double> bound_of_row(const ConstTensorView& x, const Routing& routing,
                              Workspace& workspace) const {
    const Shape one{1, p_.hidden_size}, slots{1, p_.top_k};
    MOESAIC_ASSIGN_OR_RETURN(Tensor y, Tensor::zeros(DType::kF32, one));
    RowNumerics numerics;
    MOESAIC_RETURN_IF_ERROR(
        experts().run({.hidden_states = {x.data, x.dtype, one},
                       .topk_ids = {routing.ids.data(), DType::kI32, slots},
                       .topk_weights = {routing.weights.data(), DType::kF32, slots},
                       .expert_map = {},
                       .expert_num_tokens = {},
                       .workspace = workspace.span(),
                       .output = y.view(),
                       .numerics = {&numerics, 1}}));
    return bound_of_one_row(output_bound(p_.quant, p_.intermediate_size),
                            activation_bound(p_.quant.activation, p_.intermediate_size), numerics);
  }

  BenchSettings s_;
  MoeProblem p_;
  std::unique_ptr<ExpertSource> source_;
  std::string backend_;
  std::unique_ptr<Experts> experts_;
  std::optional<ModularKernel> kernel_;  // then experts_ are in it
  std::unique_ptr<GpuStage> gpu_;        // instead of experts_
};

}  // namespace

Result<std::unique_ptr<BenchStage>> make_experts_stage(const BenchSettings& settings) {
  return ExpertsStage::create(settings, false);
}
Result<std::unique_ptr<BenchStage>> make_kernel_stage(const BenchSettings& settings) {
  return ExpertsStage::create(settings, true);
}

}  // namespace moesaic::tool
