// Which build of the grouped-GEMM kernel runs: host code, tested without a device.
#include "experts/sm90/grouped_gemm.h"

#include <algorithm>
#include <cmath>
#include <numbers>

#include "core/fault.h"
#include "moesaic/activation.h"

namespace moesaic::cuda {
namespace {

// Where silu, which rises from below 0 on, is `limit` > 0.
float gate_of_silu(float limit) {
  if (!std::isfinite(limit)) return limit;
  if (MOESAIC_FAULT(cuda_step_limit_is_of_the_gate)) return limit;
  const double of = static_cast<double>(limit);
  double low = of, high = of + 2;  // silu(x) < x, and x - silu(x) < 0.3
  if (of < 1) high = 2 * of;       // silu(x) > x / 2
  for (int step = 0; step < 64; ++step) {
    const double middle = 0.5 * (low + high);
    (middle / (1 + std::exp(-middle)) < of ? low : high) = middle;
  }
  return static_cast<float>(high);
}

}  // namespace

GroupedActivation grouped_activation(const ActivationSpec& a) {
  GroupedActivation to = {static_cast<int>(a.kind), a.limit, a.alpha, a.beta, a.up_limit};
  // silu is limited where its gate is: the rest of its curve lies below.
  to.most_gate = a.kind == ActivationKind::kSwigluStep ? gate_of_silu(a.limit) : a.limit;
  const bool gelu = a.kind == ActivationKind::kGeluTanh;
  // 0.5 g (1 + tanh(c (g + 0.044715 g^3))) = g sigmoid(2 c (g + 0.044715 g^3)), c = sqrt(2 / pi)
  const double slope =
      -std::numbers::log2e * (gelu ? 1.5957691216057308 : static_cast<double>(a.alpha));
  to.slope = static_cast<float>(slope);
  to.cubic = gelu ? static_cast<float>(slope * 0.044715) : 0.0F;
  return to;
}

GroupedVariant choose_grouped(const TileRules& rules, EpilogueKind epilogue, std::int64_t tokens,
                              std::int64_t top_k, std::int64_t experts, std::int64_t bands,
                              const DeviceTraits& device) {
  GroupedVariant v;
  v.epilogue = epilogue;
  const bool swiglu = epilogue == EpilogueKind::kSwiglu;
  if (!swiglu && epilogue != EpilogueKind::kRelu2) {
    v.max_columns = 32;
    return v;
  }
  // A group should hold every row of an ordinary expert, so that weights stream once. Uniform
  // routing gives rows per expert near the mean; twice the mean leaves room for skew.
  const std::int64_t mean = (tokens * top_k + experts - 1) / experts;
  v.max_columns = mean <= rules.narrow_rows ? 32 : mean <= 32 ? rules.middle : rules.widest;
  if (!swiglu) return v;
  if (mean > 96 && mean <= rules.snug) v.max_columns = rules.snug;
  // One token may have fewer items than there are multiprocessors: halves of them keep more busy.
  // Past the rule's limit whole bands, each taken by a CTA that is free, are as fast or faster.
  const std::int64_t pairs_of_ctas = device.sms / 2;
  if (tokens <= 1 && top_k * bands <= rules.split_items * pairs_of_ctas) {
    v.max_columns = kSplitColumns;
  }
  v.paired = rules.paired_rows > 0 && mean >= rules.paired_rows;
  return v;
}

}  // namespace moesaic::cuda
