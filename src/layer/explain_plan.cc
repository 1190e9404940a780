// What explain lists of a layer: every stage's candidates on either kind of device.
#include <fmt/format.h>

#include <algorithm>
#include <string>
#include <utility>

#include "core/refusal.h"
#include "experts/sm90/experts.h"
#include "gate/sm90/gate.h"
#include "gate/tier_rules.h"
#include "layer/fused_plan.h"
#include "moesaic/gate.h"
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

// Tiers 1 to 3 stand for kernels of sm_90 and sm_100 devices; on a CPU the rules leave the last.
void append_gate(const FusedPlan& plan, Device device, Rows& rows) {
  GateTierRules::Problem problem;
  problem.device = device.is_cuda() ? GateDevice::cuda(9, 0) : GateDevice::cpu();
  problem.weight_dtype = plan.gate_dtype;
  problem.num_experts = plan.routing.num_experts + plan.routing.num_zero_experts;
  problem.hidden_size = plan.hidden_size;
  problem.has_bias = plan.has_router_bias;
  problem.out_dtype = DType::kF32;
  problem.force_fp32_compute = true;
  const GateTierRules rules(problem);
  const auto add = [&](GateTier tier, bool accepted, std::string_view need) {
    const std::string text = device.is_cuda()
                                 ? fmt::format("need {}", need)
                                 : "device: cpu, this tier needs compute capability 9.0 or 10.x";
    rows.push_back(
        row_of("gate", std::string(gate_tier_name(tier)), accepted ? Status() : unsupported(text)));
  };
  add(GateTier::kSmallBatch, rules.allow_dsv3() && plan.routed.max_tokens <= 16,
      "bf16 weights without bias of [256 or 384, 7168] and at most 16 tokens");
  add(GateTier::kFp32, rules.allow_fp32(),
      "fp32 weights without bias of [256, 3072] or [128, 6144]");
  add(GateTier::kWideningGemm, rules.allow_cublas(), "bf16 weights without bias");
  add(GateTier::kFallback, true, "");
}

// A tier fixes dtypes and roundings; which kernel computes it depends on the tokens of a call.
void append_gate_kernels(const FusedPlan& plan, Device device, Rows& rows) {
  if (!device.is_cuda()) return;
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
    rows.push_back(row_of("gate_kernel", std::string(cuda::gate_kernel_name(kernel)),
                          used(kernel) ? Status() : unsupported(fmt::format("need {}", need))));
  };
  using cuda::GateKernel;
  add(GateKernel::kFewTokens, "bf16 weights with rows of a multiple of 8 that fit shared memory");
  add(GateKernel::kSomeTokens, "such weights and over 16 tokens");
  add(GateKernel::kFp32Rows, "fp32 weights of [256, 3072] or [128, 6144]");
  add(GateKernel::kManyTokens, "bf16 weights with rows of a multiple of 8 and over 64 tokens");
  add(GateKernel::kWarpPerLogit, "a shape or dtype that no other kernel takes");
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
  append_gate_kernels(plan, device, rows);
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
