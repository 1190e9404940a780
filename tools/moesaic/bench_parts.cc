#include "bench_parts.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "bench_random.h"

namespace moesaic::tool {
namespace {

double matrices(const MoeLayerSpec& spec) { return is_gated(spec.activation.kind) ? 3 : 2; }

// Stored bytes of one weight, scales, zero points and minima of groups and blocks included; one scale
// for a whole row or matrix is next to nothing.
double bytes_of(const OperandQuant& w) {
  const int bits = w.code_bits != 0 ? w.code_bits : dtype_bits(w.dtype);
  const double bytes = bits / 8.0;
  if (w.block_k == 0) return bytes;
  if (w.super_bits != 0) {
    const double numbers = w.zero_point == ZeroPoint::kMin ? 2 : 1;
    return bytes + numbers * (w.super_bits / 8.0 / static_cast<double>(w.block_k) +
                              2.0 / kSuperBlockColumns);
  }
  const double scale = w.scale_format == ScaleFormat::kF32 ? dtype_bits(w.scale_dtype) / 8 : 1;
  const ZeroPoint zero = w.zero_point;
  const double origin = zero == ZeroPoint::kMin ? 4.0 : zero == ZeroPoint::kInteger ? 1.0 : 0.0;
  return bytes + (scale + origin) / static_cast<double>(w.block_n * w.block_k);
}

}  // namespace

int rotations_for(std::int64_t tokens, const BenchSettings& settings) {
  if (settings.options.device.is_cuda()) return tokens <= 256 ? 8 : tokens <= 1024 ? 4 : 2;
  return tokens <= 16 ? 8 : tokens <= 256 ? 4 : 2;
}

DType row_dtype(const BenchSettings& settings) {
  const DType own = settings.spec.activation_dtype;
  return settings.options.device.is_cuda() && own == DType::kF32 ? DType::kBF16 : own;
}

MoeProblem problem_of(const MoeLayerSpec& spec, std::int64_t max_tokens, int num_threads) {
  MoeProblem p;
  p.num_experts = p.num_local_experts = spec.num_experts;
  p.top_k = spec.routing.top_k;
  p.hidden_size = spec.hidden_size;
  p.intermediate_size = spec.intermediate_size;
  p.activation = spec.activation;
  p.quant = spec.quant;
  p.activation_dtype = spec.activation_dtype;
  p.has_expert_bias = spec.has_expert_bias;
  p.apply_router_weight_on_input = spec.apply_router_weight_on_input;
  p.max_tokens = max_tokens;
  p.num_threads = num_threads;
  return p;
}

double expert_weights(const MoeLayerSpec& spec, std::int64_t intermediate) {
  return matrices(spec) * static_cast<double>(spec.hidden_size) * static_cast<double>(intermediate);
}

double expert_bytes(const MoeLayerSpec& spec, std::int64_t intermediate, const Scheme& quant) {
  const double matrix = static_cast<double>(spec.hidden_size) * static_cast<double>(intermediate);
  const MatrixForms forms = quant.forms.value_or(MatrixForms{quant.weight, quant.weight});
  return matrix * ((matrices(spec) - 1) * bytes_of(forms.w13) + bytes_of(forms.w2));
}

void add_touched(const Tensor& ids, std::set<std::int32_t>& seen) {
  const std::int64_t n = ids.bytes() / 4;
  for (std::int64_t i = 0; i < n; ++i) seen.insert(ids.as<std::int32_t>()[i]);
  seen.erase(-1);
}
std::int64_t touched_experts(const Tensor& ids) {
  std::set<std::int32_t> seen;
  add_touched(ids, seen);
  return static_cast<std::int64_t>(seen.size());
}

Result<Workspace> Workspace::allocate(std::int64_t bytes) {
  Workspace w;
  MOESAIC_ASSIGN_OR_RETURN(w.memory, Tensor::uninitialized(DType::kU8, {bytes}));
  return w;
}

double bound_of_one_row(double bound, double activation, const RowNumerics& row) {
  constexpr double kFewRows = 1.3;  // docs/accuracy.md
  return std::max(computed_bound(bound, activation, summarize({&row, 1})), kFewRows * bound);
}

Status upper_bound_check(const BenchPoint& point, std::string_view what) {
  if (point.rel_l2 <= point.bound) return {};
  return {StatusCode::kInternal,
          fmt::format("{}: relative L2 against float64 is {:.2e}, bound {:.2e}", what, point.rel_l2,
                      point.bound)};
}

Result<std::vector<float>> routing_bias_of(const BenchSettings& settings) {
  const RoutingSpec& r = settings.spec.routing;
  return routing_bias(settings.routing, r.num_experts, r.num_experts + r.num_zero_experts, r.top_k);
}

}  // namespace moesaic::tool
