// What a CudaExperts holds.
#pragma once

#include <cstdint>
#include <vector>

#include "cuda/device_memory.h"
#include "experts/sm90/experts.h"
#include "experts/sm90/experts_plan.h"

namespace moesaic::cuda {

struct CudaExperts::Impl {
  MoeProblem problem;
  ExpertsPlan plan;
  int device = 0;
  int num_sms = 0;
  // Repacked weights of all local experts, and biases as the checkpoint orders them.
  Allocation w13, w2, w13_scale, w2_scale, w13_bias, w2_bias;

  Status load(ExpertSource& source);
  Status upload(const RepackShape& shape, const ConstTensorView& weight,
                const ConstTensorView& scale, const Allocation& staging,
                const Allocation& scale_staging, std::byte* image, float* image_scale) const;
  Status upload_bias(const ConstTensorView& bias, float* to, std::int64_t count,
                     std::vector<float>& row) const;
  QuantRowsParams quant_params(const CudaExpertsArgs& a, const ExpertsWorkspace& w) const;
  GroupedVariant variant(const CudaExpertsArgs& a) const {
    return choose_grouped(
        plan.format, plan.epilogue, a.tokens, a.top_k > 0 ? a.top_k : problem.top_k,
        a.used_experts > 0 ? a.used_experts : problem.num_experts, plan.w13.bands());
  }
  // The last expert is one of every token: part of its w13 is asked for while the gate computes.
  void ask_ahead(GroupedParams& g) const;
  // Rows that depend on the hidden states alone are quantised.
  bool quantizes_rows() const {
    return plan.format == GroupedFormat::kFp8Block && !plan.weight_on_input;
  }
};

}  // namespace moesaic::cuda
