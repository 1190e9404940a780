// What a CudaExperts holds.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "cuda/device_memory.h"
#include "experts/sm90/experts.h"
#include "experts/sm90/experts_plan.h"

namespace moesaic::cuda {

struct CudaExperts::Impl {
  MoeProblem problem;
  ExpertsPlan plan;
  int device = 0;
  DeviceTraits traits;
  // Repacked weights of all local experts, one allocation for each part of the format, then biases
  // as the checkpoint orders them.
  std::vector<Allocation> parts;
  Allocation w13_bias, w2_bias;
  PlacedWeights weights;  // pointers into these
  // Static scales of hidden states that differ between experts, or may (let_parts_change).
  bool own_scales_differ = false;
  // Then a row is made for every pair. Of a call's scales only their number is known here.
  bool rows_per_pair(const CudaExpertsArgs& a) const {
    if (a.x_scales.of == nullptr) return own_scales_differ;
    return !a.x_scales.one_for_all && problem.num_local_experts > 1;
  }
  // Of both GEMMs in a call: its own in the workspace, or the experts'.
  const float* x_static(const CudaExpertsArgs& a, const ExpertsWorkspace& w) const {
    return a.x_scales.of != nullptr ? w.call_scales : weights.w13_input_scale;
  }
  const float* inner_static(const CudaExpertsArgs& a, const ExpertsWorkspace& w) const {
    return a.inner_scales.of != nullptr ? w.call_scales + problem.num_local_experts
                                        : weights.w2_input_scale;
  }

  Status load(ExpertSource& source);
  QuantRowsParams quant_params(const CudaExpertsArgs& a, const ExpertsWorkspace& w) const;
  // Launches what comes before the GEMMs (experts_rows.cc); of_rows: problem_of_rows of the call.
  Status make_rows(void* stream, const CudaExpertsArgs& a, const MoeProblem& of_rows,
                   const ExpertsWorkspace& w, std::int32_t rows_per_record) const;
  GroupedVariant variant(const CudaExpertsArgs& a) const {
    return choose_grouped(
        plan.format->tiles, plan.epilogue, a.likely_tokens > 0 ? a.likely_tokens : a.tokens,
        a.top_k > 0 ? a.top_k : problem.top_k,
        a.used_experts > 0 ? a.used_experts : problem.num_experts, plan.w13.bands(), traits);
  }
  // F16 operand rows are made of the call's.
  bool makes_half_rows(const CudaExpertsArgs& a) const {
    return plan.half_rows() && (a.rows.dtype != DType::kF16 || plan.weight_on_input);
  }
  // The last expert is one of every token: part of its w13 is prefetched while the gate computes.
  void prefetch_ahead(AheadWeights& ahead) const;
  // Rows that depend on the hidden states alone are quantised.
  bool quantizes_rows() const {
    return plan.quantizes() && !plan.weight_on_input && !plan.static_scales;
  }
};

// One expert's weights on their way to the device.
struct RepackCall {
  const ExpertsPlan& plan;
  const ExpertWeightsView& weights;   // checked
  Allocation& staging;                // device memory to reuse from expert to expert
  std::span<std::byte* const> parts;  // this expert's place in each part of the format
  std::int64_t expert = 0;            // for messages
};

}  // namespace moesaic::cuda
