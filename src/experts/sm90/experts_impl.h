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
  // Static scales of hidden states that differ between experts: a row is made for every pair.
  bool rows_per_pair = false;

  Status load(ExpertSource& source);
  QuantRowsParams quant_params(const CudaExpertsArgs& a, const ExpertsWorkspace& w) const;
  GroupedVariant variant(const CudaExpertsArgs& a) const {
    return choose_grouped(
        plan.format->tiles, plan.epilogue, a.tokens, a.top_k > 0 ? a.top_k : problem.top_k,
        a.used_experts > 0 ? a.used_experts : problem.num_experts, plan.w13.bands(), traits);
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
};

}  // namespace moesaic::cuda
