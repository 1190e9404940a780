#include "bench_reference.h"

#include <cmath>
#include <limits>

#include "activation/reference/activation.h"
#include "experts/weight_value.h"
#include "numerics/element.h"

namespace moesaic::tool {
namespace {

// y[n] = sum_k w[n][k] * x[k] + bias[n], x in the order of the columns
std::vector<double> multiply(const experts::ProjectionView& m, const OperandQuant& quant,
                             std::span<const double> x) {
  const std::int64_t rows = m.weight.dim(0), cols = m.weight.dim(1);
  std::vector<double> y(static_cast<std::size_t>(rows));
#pragma omp parallel for schedule(static) if (rows * cols > (1 << 14))
  for (std::int64_t n = 0; n < rows; ++n) {
    double sum = 0;
    for (std::int64_t k = 0; k < cols; ++k) {
      const std::int64_t from = m.perm.present() ? m.perm.as<std::int32_t>()[k] : k;
      sum += weight_value(quant, m, n, k) * x[static_cast<std::size_t>(from)];
    }
    if (m.bias.present()) sum += static_cast<double>(load_as_f32(m.bias.data, m.bias.dtype, n));
    y[static_cast<std::size_t>(n)] = sum;
  }
  return y;
}

}  // namespace

Result<std::vector<double>> reference_token(const MoeProblem& problem, ExpertSource& source,
                                            std::span<const double> x,
                                            std::span<const std::int32_t> ids,
                                            std::span<const float> weights) {
  std::vector<double> y(static_cast<std::size_t>(problem.hidden_size), 0.0);
  const GateUpLayout layout =
      is_gated(problem.activation.kind) ? GateUpLayout::kGateThenUp : GateUpLayout::kNonGated;
  for (std::size_t j = 0; j < ids.size(); ++j) {
    if (ids[j] < 0) continue;
    MOESAIC_ASSIGN_OR_RETURN(const ExpertWeightsView v, source.expert(ids[j]));
    const bool on_input = problem.apply_router_weight_on_input;
    const auto w = static_cast<double>(weights[j]);
    std::vector<double> in(x.begin(), x.end());
    if (on_input) {
      for (double& value : in) value *= w;
    }
    experts::ProjectionView w13 = experts::w13_of(v);
    w13.parts = is_gated(problem.activation.kind) ? 2 : 1;
    const std::vector<double> h = multiply(w13, problem.quant.weight, in);
    std::vector<double> act(static_cast<std::size_t>(problem.intermediate_size));
    activation::ref_activation_f64(problem.activation, layout, h.data(), act.data(),
                                   problem.intermediate_size);
    const std::vector<double> z = multiply(experts::w2_of(v), problem.quant.weight, act);
    for (std::size_t i = 0; i < y.size(); ++i) y[i] += (on_input ? 1.0 : w) * z[i];
  }
  return y;
}

double relative_l2(std::span<const double> got, std::span<const double> want) {
  if (got.size() != want.size()) return std::numeric_limits<double>::infinity();
  double err = 0, ref = 0;
  std::size_t compared = 0;
  for (std::size_t i = 0; i < want.size(); ++i) {
    // NaN in weights is data, and yields NaN (or, with infinity, the same infinity) on both sides.
    const bool nan = std::isnan(got[i]) && std::isnan(want[i]);
    if (nan || (std::isinf(want[i]) && got[i] == want[i])) continue;
    err += (got[i] - want[i]) * (got[i] - want[i]);
    ref += want[i] * want[i];
    ++compared;
  }
  if (compared == 0) return 0;
  return ref > 0 ? std::sqrt(err / ref) : std::numeric_limits<double>::infinity();
}

std::vector<double> row_to_doubles(const ConstTensorView& matrix, std::int64_t row) {
  const std::int64_t n = matrix.dim(1);
  std::vector<double> out(static_cast<std::size_t>(n));
  for (std::int64_t i = 0; i < n; ++i) {
    out[static_cast<std::size_t>(i)] =
        static_cast<double>(load_as_f32(matrix.data, matrix.dtype, row * n + i));
  }
  return out;
}

}  // namespace moesaic::tool
