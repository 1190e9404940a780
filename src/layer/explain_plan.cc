// What explain lists of a layer: every stage's candidates on either kind of device.
#include <fmt/format.h>

#include <algorithm>
#include <string>
#include <utility>

#include "core/refusal.h"
#include "cpu/tiers.h"
#include "experts/sm90/experts.h"
#include "gate/sm90/gate.h"
#include "layer/fused_plan.h"
#include "moesaic/modular_kernel.h"
#include "router/sm90/router.h"

namespace moesaic {
namespace {

using Rows = std::vector<CandidateReport>;

CandidateReport row_of(std::string stage, std::string name, const Status& status) {
  return {std::move(stage), std::move(name), status.message(), status.ok()};
}

// Candidates of the other kind of device keep their own reason when they have one.
Status elsewhere(const Status& own, Device device, std::string_view need) {
  if (!own.ok()) return own;
  return unsupported(fmt::format("device: {}, need {}", device.to_string(), need));
}

// The GPU's kernels (which of them computes the logits depends on the tokens of a call, so several
// may be accepted) and the CPU's instruction-set tiers.
void append_gate(const FusedPlan& plan, Device device, Rows& rows) {
  cuda::GateParams p;
  p.weight_f32 = plan.gate_dtype != DType::kBF16;
  p.experts = static_cast<std::int32_t>(plan.routing.num_experts + plan.routing.num_zero_experts);
  p.hidden = static_cast<std::int32_t>(plan.hidden_size);
  const auto used = [&](cuda::GateKernel kernel) {
    for (const std::int64_t tokens : {1, 16, 17, 32, 33, 64, 96, 128, 129}) {
      p.tokens = std::min(tokens, plan.routed.max_tokens);
      if (choose_gate_kernel(p) == kernel) return true;
    }
    p.tokens = plan.routed.max_tokens;
    return choose_gate_kernel(p) == kernel;
  };
  const auto add = [&](cuda::GateKernel kernel, std::string_view need) {
    const Status own = used(kernel) ? Status() : unsupported(fmt::format("need {}", need));
    rows.push_back(row_of("gate", std::string(cuda::gate_kernel_name(kernel)),
                          device.is_cuda() ? own : elsewhere(own, device, "a Hopper GPU")));
  };
  using cuda::GateKernel;
  add(GateKernel::kFewTokens, "bf16 weights with rows of a multiple of 8 that fit shared memory");
  add(GateKernel::kSomeTokens, "such weights and over 16 tokens");
  add(GateKernel::kFp32Rows, "fp32 weights of [256, 3072] or [128, 6144]");
  add(GateKernel::kManyTokens, "bf16 weights with rows of a multiple of 8 and over 64 tokens");
  add(GateKernel::kWarpPerLogit, "a shape or dtype that no other kernel takes");
  for (const cpu::TierInfo& tier : cpu::cpu_tiers()) {
    const Status own = cpu::usable_kernels(tier.name).status();
    rows.push_back(row_of("gate", fmt::format("cpu_{}", tier.name),
                          device.is_cuda() ? elsewhere(own, device, "cpu") : own));
  }
}

void append_experts(const MoeProblem& problem, Device device, const std::string& stage,
                    Rows& rows) {
  const Status gpu = cuda::CudaExperts::can_implement(problem);
  rows.push_back(row_of(stage, std::string(cuda::kCudaExpertsName),
                        device.is_cuda() ? gpu : elsewhere(gpu, device, "a Hopper GPU")));
  for (CandidateReport& row : explain_experts(problem)) {
    if (device.is_cuda() && row.accepted) {
      row.accepted = false;
      row.reason = elsewhere({}, device, "cpu").message();
    }
    row.stage = stage;
    rows.push_back(std::move(row));
  }
}

}  // namespace

std::vector<CandidateReport> explain_plan(const FusedPlan& plan, std::string_view router_name,
                                          Device device) {
  Rows rows;
  append_gate(plan, device, rows);
  const Status gpu_router = cuda::CudaRouter::can_implement(plan.routing);
  rows.push_back(
      row_of("router", fmt::format("cuda_{}", router_name),
             device.is_cuda() ? gpu_router : elsewhere(gpu_router, device, "a Hopper GPU")));
  rows.push_back(row_of("router", std::string(router_name),
                        device.is_cuda() ? elsewhere({}, device, "cpu") : Status()));
  // On a GPU the experts gather their own rows and combine them.
  rows.push_back(row_of("prepare_finalize", "cuda_in_experts",
                        device.is_cuda() ? Status() : elsewhere({}, device, "a Hopper GPU")));
  for (CandidateReport& row : explain_prepare_finalize(plan.routed, plan.ranks.parallel)) {
    if (device.is_cuda() && row.accepted) {
      row.accepted = false;
      row.reason = elsewhere({}, device, "cpu").message();
    }
    row.stage = "prepare_finalize";
    rows.push_back(std::move(row));
  }
  append_experts(plan.routed, device, "experts", rows);
  if (plan.has_shared) append_experts(plan.shared, device, "shared_experts", rows);
  return rows;
}

}  // namespace moesaic
