// The ordered list of experts backends and the choice among them. A new backend is one more row.
#include <fmt/format.h>

#include <array>
#include <string>

#include "core/fault.h"
#include "cpu/tiers.h"
#include "experts/cpu/experts.h"
#include "experts/cuda_general/general_experts.h"
#include "experts/problem_checks.h"
#include "experts/reference/experts.h"
#include "experts/sm90/catalogue_row.h"
#include "experts/sm90/experts.h"
#include "moesaic/experts.h"

namespace moesaic {
namespace {

// One row of function pointers per tier of the same backend.
struct Amx {
  static constexpr std::string_view kTier = "amx";
};
struct Avx512Bf16 {
  static constexpr std::string_view kTier = "avx512_bf16";
};
struct Avx512 {
  static constexpr std::string_view kTier = "avx512";
};
struct Avx2 {
  static constexpr std::string_view kTier = "avx2";
};
struct Neon {
  static constexpr std::string_view kTier = "neon";
};
struct Baseline {
  static constexpr std::string_view kTier = "baseline";
};
template <class T>
Status cpu_can_implement(const MoeProblem& problem) {
  return experts::cpu_experts_can_implement(T::kTier, problem);
}
template <class T>
Result<std::unique_ptr<Experts>> make_cpu(const MoeProblem& problem, ExpertSource& source) {
  return experts::make_cpu_experts(T::kTier, problem, source);
}
template <class T>
Result<std::int64_t> cpu_workspace_size(const MoeProblem& problem, std::int64_t tokens) {
  return experts::cpu_experts_workspace_size(T::kTier, problem, tokens);
}
template <class T>
int cpu_threads(const MoeProblem& problem, std::int64_t tokens) {
  const Result<int> threads = experts::cpu_experts_threads(T::kTier, problem, tokens);
  return threads.ok() ? *threads : 1;
}
int one_thread(const MoeProblem&, std::int64_t) { return 1; }
template <class T>
constexpr ExpertsBackend cpu_row(std::string_view name, std::string_view description) {
  return {name,
          description,
          &cpu_can_implement<T>,
          &make_cpu<T>,
          &cpu_workspace_size<T>,
          experts::kCpuExpertsDeterminism,
          &cpu_threads<T>};
}

// Fastest first for each kind of device; the general row of GPUs is their last, and cpu_reference,
// which computes everything, that of CPUs.
constexpr auto kCatalogue = std::to_array<ExpertsBackend>({
    {cuda::kCudaExpertsName, "tensor cores of a Hopper GPU (sm_90), bf16 and fp8-block",
     &cuda::sm90_experts_can_implement, &cuda::make_sm90_experts,
     &cuda::sm90_experts_workspace_size, cuda::kCudaExpertsDeterminism, &one_thread},
    {cuda::kGeneralExpertsName,
     "multiply-adds of a Hopper GPU, every size; fp8-block, and weights of every format where "
     "activations are not quantised",
     &cuda::general_experts_can_implement, &cuda::make_general_experts,
     &cuda::general_experts_workspace_size, cuda::kGeneralExpertsDeterminism, &one_thread},
    cpu_row<Amx>("cpu_amx", "AMX tiles of bf16 and int8, the rest on AVX-512"),
    cpu_row<Avx512Bf16>("cpu_avx512_bf16", "AVX-512 with bf16 dot products and byte permutes"),
    cpu_row<Avx512>("cpu_avx512", "AVX-512, fp32 multiply-add"),
    cpu_row<Avx2>("cpu_avx2", "AVX2 with FMA, fp32 multiply-add"),
    cpu_row<Neon>("cpu_neon", "64-bit ARM with NEON, fp32 multiply-add"),
    cpu_row<Baseline>("cpu_baseline", "the build's baseline (x86-64-v2 or ARMv8-A), fp32"),
    {"cpu_reference", "plain loops, every scheme, activation and format; one thread",
     &experts::ref_experts_can_implement, &experts::make_ref_experts,
     &experts::ref_experts_workspace_size, experts::kRefExpertsDeterminism, &one_thread},
});

std::string all_names() {
  std::string text;
  for (const ExpertsBackend& row : kCatalogue) {
    if (!text.empty()) text += ", ";
    text += row.name;
  }
  return text;
}

}  // namespace

std::span<const ExpertsBackend> experts_catalogue() { return kCatalogue; }

std::vector<CandidateReport> explain_experts(const MoeProblem& problem) {
  std::vector<CandidateReport> reports;
  reports.reserve(experts_catalogue().size());
  for (const ExpertsBackend& row : experts_catalogue()) {
    const Status status = row.can_implement(problem);
    reports.push_back({"experts", std::string(row.name), status.message(), status.ok()});
  }
  return reports;
}

Result<const ExpertsBackend*> choose_experts(const MoeProblem& problem, std::string_view forced) {
  // A problem that makes no sense is the caller's error, not a matter of backends.
  MOESAIC_RETURN_IF_ERROR(check_problem(problem));
  // No tier's row accepts then, and the reference is not what was asked for.
  if (forced.empty() && !problem.device.is_cuda() && !MOESAIC_FAULT(experts_tier_that_is_none)) {
    MOESAIC_RETURN_IF_ERROR(cpu::current_kernels().status());
  }
  std::string reasons;
  for (const ExpertsBackend& row : experts_catalogue()) {
    if (!forced.empty() && row.name != forced) continue;
    const Status status = row.can_implement(problem);
    if (status.ok()) return &row;
    reasons += fmt::format("{}{}: {}", reasons.empty() ? "" : "; ", row.name, status.message());
  }
  if (!reasons.empty()) return Status(StatusCode::kUnsupported, "experts backend " + reasons);
  return Status(StatusCode::kNotFound, fmt::format("experts backend: got \"{}\", need one of {}",
                                                   forced.substr(0, 64), all_names()));
}

}  // namespace moesaic
