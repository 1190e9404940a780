// GpuExperts as a user of the catalogue sees them: device views and a stream in, launches out.
#include <algorithm>
#include <memory>
#include <new>
#include <utility>
#include <vector>

#include "cuda/dense_rows.h"
#include "cuda/device_memory.h"
#include "experts/cuda_general/general_experts.h"
#include "experts/sm90/catalogue_row.h"
#include "experts/sm90/experts.h"

namespace moesaic::cuda {
namespace {

class DeviceExperts final : public Experts {
 public:
  using WorkspaceSize = Result<std::int64_t>(const MoeProblem& problem, std::int64_t tokens);
  DeviceExperts(const MoeProblem& problem, std::unique_ptr<GpuExperts> experts,
                WorkspaceSize& workspace)
      : problem_(problem), experts_(std::move(experts)), workspace_size_(workspace) {}

  std::string_view name() const override { return experts_->name(); }
  TopKWeightAndReduce reduction() const override {
    return slabs() ? TopKWeightAndReduce::kNaiveBatched : TopKWeightAndReduce::kNoOp;
  }
  ActivationFormat format() const override { return problem_.format; }
  bool takes_quantized_rows() const override {
    return problem_.quant.kind == ComputeScheme::kFp8Block;
  }
  Result<std::int64_t> workspace_size(std::int64_t tokens) const override {
    return workspace_size_(problem_, tokens);
  }
  std::int64_t weight_bytes() const override { return experts_->weight_bytes(); }
  std::vector<ExpertPart> expert_parts() override {
    experts_->let_parts_change();
    return experts_->expert_parts(problem_.num_local_experts);
  }
  std::string_view determinism() const override { return experts_->determinism(); }

  Status run(const ExpertsArgs& args) const override {
    MOESAIC_RETURN_IF_ERROR(check_sm90_args(problem_, args, any_rows()));
    const std::int64_t tokens = args.hidden_states.dim(slabs() ? 1 : 0);
    if (tokens == 0) return {};
    if (problem_.num_local_experts == 0) return write_zeros(args);
    MOESAIC_RETURN_IF_ERROR(check_addresses(args));
    const DeviceScope scope(problem_.device.index());
    MOESAIC_RETURN_IF_ERROR(scope.status());
    DenseRows dense(args.stream.handle);
    MOESAIC_ASSIGN_OR_RETURN(const ConstTensorView x,
                             dense.of("hidden_states", args.hidden_states,
                                      experts_->rows_alignment(args.hidden_states.dtype)));
    CudaExpertsArgs a;
    a.tokens = tokens;
    const void* const rows = x.data;
    a.rows = args.hidden_scale.present()
                 ? CudaRows::codes(rows, args.hidden_scale.as<float>(),
                                   args.hidden_scale.strides[slabs() ? 2 : 1])
                 : CudaRows::values(rows, x.dtype);
    a.topk_ids = args.topk_ids.as<std::int32_t>();
    a.topk_weights = args.topk_weights.as<float>();
    a.expert_map = args.expert_map.data();
    a.slab_counts = args.expert_num_tokens.data();
    a.result = slabs() ? CudaResult::slots(args.output.data, args.output.dtype)
                       : CudaResult::sum(args.output.data, args.output.dtype);
    a.workspace = args.workspace.data();
    a.workspace_bytes = static_cast<std::int64_t>(args.workspace.size());
    const auto scales_of = [](const ConstTensorView& t) {
      return t.present() ? CudaCallScales{t.as<float>(), t.dim(0) == 1} : CudaCallScales{};
    };
    a.x_scales = scales_of(args.a1_scale);
    a.inner_scales = scales_of(args.a2_scale);
    MOESAIC_RETURN_IF_ERROR(experts_->enqueue(args.stream.handle, a));
    if (args.numerics.empty()) return {};
    MOESAIC_RETURN_IF_ERROR(synchronize(args.stream.handle));
    std::fill(args.numerics.begin(), args.numerics.end(), RowNumerics());
    return experts_->add_numerics(a, args.numerics);
  }

 private:
  // What no expert here adds to.
  Status write_zeros(const ExpertsArgs& args) const {
    if (slabs()) return {};
    const DeviceScope scope(problem_.device.index());
    MOESAIC_RETURN_IF_ERROR(scope.status());
    MOESAIC_ASSIGN_OR_RETURN(const std::int64_t bytes,
                             contiguous_bytes(args.output.dtype, args.output.shape));
    return fill_zero("output", args.output.data, bytes, args.stream.handle);
  }
  bool slabs() const { return problem_.format == ActivationFormat::kBatched; }
  bool any_rows() const { return experts_->takes_any_rows(); }
  // Host memory, or another GPU's, would be read or written long after this call has returned.
  Status check_addresses(const ExpertsArgs& args) const {
    struct Address {
      std::string_view field;
      const void* data;
      std::int64_t alignment;
    };
    for (const Address& at :
         {Address{"hidden_scale", args.hidden_scale.data, 4},
          Address{"a1_scale", args.a1_scale.data, 4}, Address{"a2_scale", args.a2_scale.data, 4},
          Address{"topk_ids", args.topk_ids.data, 4},
          Address{"topk_weights", args.topk_weights.data, 4},
          Address{"expert_map", args.expert_map.data(), 4},
          Address{"expert_num_tokens", args.expert_num_tokens.data(), 4},
          Address{"output", args.output.data, experts_->rows_alignment(args.output.dtype)},
          Address{"workspace", args.workspace.data(), 256}}) {
      const bool optional = at.field == "expert_map" || at.field.ends_with("_scale");
      const bool other =
          at.field.starts_with("topk_") ? slabs() : at.field == "expert_num_tokens" && !slabs();
      if (other || (at.data == nullptr && optional)) continue;
      MOESAIC_RETURN_IF_ERROR(
          check_device_pointer(at.field, at.data, at.alignment, problem_.device.index()));
    }
    return {};
  }

  MoeProblem problem_;
  std::unique_ptr<GpuExperts> experts_;
  WorkspaceSize& workspace_size_;
};

Result<std::unique_ptr<Experts>> behind_interface(const MoeProblem& problem,
                                                  std::unique_ptr<GpuExperts> experts,
                                                  DeviceExperts::WorkspaceSize& workspace) {
  std::unique_ptr<Experts> made(new (std::nothrow)
                                    DeviceExperts(problem, std::move(experts), workspace));
  if (!made) return Status(StatusCode::kOutOfMemory, "cannot allocate the experts object");
  return made;
}

}  // namespace

Result<std::unique_ptr<Experts>> make_sm90_experts(const MoeProblem& problem,
                                                   ExpertSource& source) {
  MOESAIC_RETURN_IF_ERROR(sm90_experts_can_implement(problem));
  MOESAIC_RETURN_IF_ERROR(check_device(problem.device));
  MOESAIC_ASSIGN_OR_RETURN(std::unique_ptr<CudaExperts> experts,
                           CudaExperts::create(problem, source, problem.device.index()));
  return behind_interface(problem, std::move(experts), sm90_experts_workspace_size);
}

Result<std::unique_ptr<Experts>> make_general_experts(const MoeProblem& problem,
                                                      ExpertSource& source) {
  MOESAIC_RETURN_IF_ERROR(general_experts_can_implement(problem));
  MOESAIC_RETURN_IF_ERROR(check_device(problem.device));
  MOESAIC_ASSIGN_OR_RETURN(std::unique_ptr<GpuExperts> experts,
                           make_general_gpu_experts(problem, source, problem.device.index()));
  return behind_interface(problem, std::move(experts), general_experts_workspace_size);
}

}  // namespace moesaic::cuda
