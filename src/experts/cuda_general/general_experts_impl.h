// What the general experts hold.
#pragma once

#include "cuda/device_memory.h"
#include "experts/cuda_general/general_experts.h"
#include "experts/cuda_general/general_kernels.h"
#include "experts/cuda_general/general_plan.h"

namespace moesaic::cuda {

class GeneralExperts final : public GpuExperts {
 public:
  GeneralExperts(const MoeProblem& problem, int device, const DeviceTraits& traits)
      : problem_(problem), plan_(problem), device_(device), traits_(traits) {}
  ~GeneralExperts() override;
  // general_load.cc
  Status load(ExpertSource& source);

  std::string_view name() const override { return kGeneralExpertsName; }
  std::string_view determinism() const override { return kGeneralExpertsDeterminism; }
  bool takes_any_rows() const override { return true; }
  std::int64_t rows_alignment(DType dtype) const override { return dtype_bits(dtype) / 8; }
  std::int64_t weight_bytes() const override;
  std::vector<ExpertPart> expert_parts(std::int64_t count) const override;
  Status enqueue(void* stream, const CudaExpertsArgs& args) const override;
  // general_numerics.cc
  Status add_numerics(const CudaExpertsArgs& args, std::span<RowNumerics> rows) const override;

 private:
  // One matrix of all experts in device memory.
  struct Matrix {
    Allocation data, scale, bias;
    Allocation input_scale, perm;  // [E_l], [E_l, columns], where rows become values
    GeneralMatrix view;
    std::int64_t bytes() const {
      return data.bytes() + scale.bytes() + bias.bytes() + input_scale.bytes() + perm.bytes();
    }
  };
  Status reserve(std::string_view name, std::int64_t rows, std::int64_t columns, bool gated,
                 Matrix& m) const;
  MoeProblem of_call(const CudaExpertsArgs& a) const;
  // The stored scales of w13's or w2's rows in a call: the caller's, or the experts'.
  const float* static_scales(const CudaExpertsArgs& a, const GeneralWorkspace& w, bool of_w2) const;
  GeneralValues values_of(const MoeProblem& problem, const CudaExpertsArgs& a,
                          const GeneralWorkspace& w, bool of_w2) const;

  MoeProblem problem_;
  GeneralPlan plan_;
  int device_ = 0;
  DeviceTraits traits_;
  Matrix w13_, w2_;
};

}  // namespace moesaic::cuda
