#include "support/moe_oracle.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <map>
#include <numbers>

#include "support/oracle_formats.h"

namespace moesaic::test {
namespace {

bool is_f32_scheme(const MoeProblem& p) {
  return p.quant.activation.dtype == DType::kF32 &&
         p.quant.activation.granularity == ScaleGranularity::kNone;
}

// Codes times scales, by the definitions of the formats. Scales and quotients are fp32 by
// definition, so that part is computed in fp32.
void quantise_group(const OperandQuant& a, float input_scale, std::span<double> x) {
  float amax = 0;
  for (const double v : x) amax = std::max(amax, static_cast<float>(std::abs(v)));
  const bool fp4 = a.dtype == DType::kF4E2M1;
  const auto code = [&](float y) {
    if (a.dtype == DType::kI8)
      return std::clamp(std::nearbyint(static_cast<double>(y)), -128.0, 127.0);
    return fp4 ? e2m1_round(static_cast<double>(y)) : e4m3_round(static_cast<double>(y));
  };
  if (a.granularity == ScaleGranularity::kTensor) {
    const float inverse = 1.0F / input_scale;
    for (double& v : x)
      v = code(static_cast<float>(v) * inverse) * static_cast<double>(input_scale);
    return;
  }
  if (a.scale_format == ScaleFormat::kE4M3) {
    const float gscale = 1.0F / input_scale;
    const auto sf = static_cast<float>(e4m3_round(static_cast<double>(gscale * (amax / 6.0F))));
    const float factor = sf == 0 ? 0.0F : gscale / sf;
    for (double& v : x)
      v = code(static_cast<float>(v) * factor) * static_cast<double>(sf) *
          static_cast<double>(input_scale);
    return;
  }
  float scale = 0;
  if (a.dtype == DType::kI8) {
    scale = amax / 127.0F;
  } else if (a.granularity == ScaleGranularity::kToken) {
    scale = std::max(amax / 448.0F, 1.0F / (448.0F * 512.0F));
  } else if (a.rule == ExponentRule::kRound175) {
    const int exponent = std::ilogb(amax);
    const bool up = static_cast<double>(amax) >= std::ldexp(1.75, exponent);
    scale = std::exp2(static_cast<float>(exponent + (up ? 1 : 0) - 2));
  } else if (a.rule == ExponentRule::kCeil) {
    scale = std::exp2(std::ceil(std::log2(amax / 448.0F)));
  } else {
    scale = std::max(amax, 1e-10F) / 448.0F;
    if (a.scale_format == ScaleFormat::kE8M0)  // up to a power of two
      scale = std::exp2(std::ceil(std::log2(std::max(scale, 1e-10F))));
  }
  for (double& v : x) {
    v = amax > 0 ? code(static_cast<float>(v) / scale) * static_cast<double>(scale) : 0.0;
  }
}

// Rounds a GEMM operand as the scheme does: to activation_dtype, then to codes.
void round_operand(const MoeProblem& p, const ConstTensorView& input_scale, std::int64_t e,
                   std::vector<double>& row) {
  if (is_f32_scheme(p)) return;
  for (double& v : row) v = round_to(p.activation_dtype, v);
  const OperandQuant& a = p.quant.activation;
  if (a.granularity == ScaleGranularity::kNone) return;
  const float fixed = input_scale.present() ? input_scale.as<float>()[e] : 1.0F;
  const auto group =
      a.granularity == ScaleGranularity::kGroup ? static_cast<std::size_t>(a.block_k) : row.size();
  for (std::size_t begin = 0; begin < row.size(); begin += group) {
    quantise_group(a, fixed, std::span(row).subspan(begin, std::min(group, row.size() - begin)));
  }
}

double sigmoid(double v) { return 1.0 / (1.0 + std::exp(-v)); }
double gelu(double v) { return 0.5 * v * (1.0 + std::erf(v / std::numbers::sqrt2)); }
double gelu_tanh(double v) {
  return 0.5 * v *
         (1.0 + std::tanh(std::sqrt(2.0 / std::numbers::pi) * (v + 0.044715 * v * v * v)));
}

double activate(const ActivationSpec& a, double g, double u) {
  const auto limit = static_cast<double>(a.limit);
  const auto alpha = static_cast<double>(a.alpha);
  const auto beta = static_cast<double>(a.beta);
  const auto up_limit = static_cast<double>(a.up_limit);
  switch (a.kind) {
    case ActivationKind::kSilu: {
      const double gl = std::min(g, limit);
      return gl * sigmoid(gl) * std::clamp(u, -limit, limit);
    }
    case ActivationKind::kGelu:
      return gelu(g) * u;
    case ActivationKind::kGeluTanh:
      return gelu_tanh(g) * u;
    case ActivationKind::kSwigluOai: {
      const double gl = std::min(g, limit);
      return (std::clamp(u, -limit, limit) + beta) * gl * sigmoid(alpha * gl);
    }
    case ActivationKind::kSwigluStep:
      return std::min(g * sigmoid(g), limit) * std::clamp(u, -limit, limit);
    case ActivationKind::kSitu:
      return beta * std::tanh(g / beta) * sigmoid(g) *
             (up_limit > 0 ? up_limit * std::tanh(u / up_limit) : u);
    case ActivationKind::kSiluNoMul:
      return g * sigmoid(g);
    case ActivationKind::kGeluNoMul:
      return gelu(g);
    case ActivationKind::kGeluTanhNoMul:
      return gelu_tanh(g);
    case ActivationKind::kRelu2NoMul:
      return g > 0 ? g * g : 0.0;
  }
  std::abort();
}

// The tensors of one projection of a stack.
struct Projection {
  ConstTensorView w, scale, bias, global_scale, channel_scale, zero, min, input_scale, perm;
  std::int64_t parts = 1;  // gate and up
};
Projection w13_of(const StackedExpertWeights& s) {
  return {s.w13,      s.w13_scale, s.w13_bias,        s.w13_global_scale, s.w13_channel_scale,
          s.w13_zero, s.w13_min,   s.w13_input_scale, s.w13_perm,         1};
}
Projection w2_of(const StackedExpertWeights& s) {
  return {s.w2,      s.w2_scale, s.w2_bias,        s.w2_global_scale, s.w2_channel_scale,
          s.w2_zero, s.w2_min,   s.w2_input_scale, s.w2_perm,         1};
}

// What element [e, n, k] of the stored matrix stands for; schemes of bf16 arithmetic round entries
// of a table.
double weight_value(const OperandQuant& q, const Projection& m, std::int64_t e, std::int64_t n,
                    std::int64_t k, bool bf16_tables) {
  const std::int64_t rows = m.w.dim(1), columns = m.w.dim(2);
  const std::int64_t at = (e * rows + n) * columns + k;
  double v = q.table == CodeTable::kNone ? element(m.w, at) : table_value(q.table, m.w, at);
  if (bf16_tables && q.table != CodeTable::kNone) v = round_to(DType::kBF16, v);
  const std::int64_t block_n = std::max<std::int64_t>(q.block_n, 1);
  std::int64_t index = e;  // one per expert
  if (q.granularity == ScaleGranularity::kChannel) index = e * rows + n;
  if (q.block_k > 0) {
    const std::int64_t across = (columns + q.block_k - 1) / q.block_k;
    // Rows of blocks are counted within gate and up.
    const std::int64_t part = rows / (q.block_n > 1 ? m.parts : 1);
    const std::int64_t per_part = (part + block_n - 1) / block_n;
    index = (e * (rows / part) * per_part + n / part * per_part + n % part / block_n) * across +
            k / q.block_k;
  }
  if (m.zero.present()) v -= element(m.zero, index);
  if (m.scale.present()) v *= element(m.scale, index);
  if (m.min.present()) v -= element(m.min, index);
  if (m.channel_scale.present()) {
    if (q.dtype == DType::kI4) v = e4m3_round(v);
    v *= element(m.channel_scale, e * rows + n);
  }
  if (m.global_scale.present()) v *= element(m.global_scale, e);
  return v;
}

// Slice e of w [E, rows, K], decoded.
std::vector<double> matrix_of(const OperandQuant& q, const Projection& m, std::int64_t e,
                              bool bf16_tables) {
  const std::int64_t rows = m.w.dim(1), columns = m.w.dim(2);
  std::vector<double> values;
  values.reserve(static_cast<std::size_t>(rows * columns));
  for (std::int64_t n = 0; n < rows; ++n) {
    for (std::int64_t k = 0; k < columns; ++k) {
      values.push_back(weight_value(q, m, e, n, k, bf16_tables));
    }
  }
  return values;
}

// x [K] times the matrix of slice e transposed, plus bias.
std::vector<double> linear(const std::vector<double>& matrix, const Projection& m, std::int64_t e,
                           std::span<const double> x) {
  const std::int64_t rows = m.w.dim(1), columns = m.w.dim(2);
  std::vector<double> y(static_cast<std::size_t>(rows));
  for (std::int64_t n = 0; n < rows; ++n) {
    const double* const row = matrix.data() + n * columns;
    double sum = 0;
    for (std::int64_t k = 0; k < columns; ++k) sum += row[k] * x[static_cast<std::size_t>(k)];
    if (m.bias.present()) sum += element(m.bias, e * rows + n);
    y[static_cast<std::size_t>(n)] = sum;
  }
  return y;
}

// In the order of the stored columns.
std::vector<double> gathered(const Projection& m, std::int64_t e, std::vector<double> x) {
  if (!m.perm.present()) return x;
  std::vector<double> out(x.size());
  for (std::size_t k = 0; k < x.size(); ++k) {
    const auto at = e * m.perm.dim(1) + static_cast<std::int64_t>(k);
    out[k] = x[static_cast<std::size_t>(m.perm.as<std::int32_t>()[at])];
  }
  return out;
}

}  // namespace

std::vector<double> oracle_row(ConstTensorView t, std::int64_t offset, std::int64_t columns) {
  std::vector<double> row(static_cast<std::size_t>(columns));
  for (std::int64_t i = 0; i < columns; ++i)
    row[static_cast<std::size_t>(i)] = element(t, offset + i);
  return row;
}

bool oracle_is_gated(const MoeProblem& p) {
  return p.activation.kind != ActivationKind::kSiluNoMul &&
         p.activation.kind != ActivationKind::kGeluNoMul &&
         p.activation.kind != ActivationKind::kGeluTanhNoMul &&
         p.activation.kind != ActivationKind::kRelu2NoMul;
}

OracleExpert::OracleExpert(const MoeProblem& problem, const StackedExpertWeights& weights,
                           std::int64_t local_expert, const OracleOptions& options)
    : problem_(&problem), weights_(&weights), expert_(local_expert), options_(options) {
  Projection w13 = w13_of(weights);
  w13.parts = oracle_is_gated(problem) ? 2 : 1;
  const bool bf16_tables = options.round_like_scheme && !is_f32_scheme(problem);
  const OperandQuant& q = problem.quant.weight;
  w13_ = matrix_of(q, w13, local_expert, bf16_tables);
  w2_ = matrix_of(q, w2_of(weights), local_expert, bf16_tables);
}

std::vector<double> OracleExpert::first(std::span<const double> x_in, double scale_input) const {
  const bool in_dtype = options_.round_like_scheme && !is_f32_scheme(*problem_);
  const DType dtype = problem_->activation_dtype;
  std::vector<double> x(x_in.begin(), x_in.end());
  if (problem_->apply_router_weight_on_input) {
    const double w = in_dtype ? round_to(dtype, scale_input) : scale_input;
    for (double& v : x) v = (in_dtype ? round_to(dtype, v) : v) * w;
  }
  const Projection w13 = w13_of(*weights_);
  x = gathered(w13, expert_, std::move(x));
  if (options_.round_like_scheme) round_operand(*problem_, w13.input_scale, expert_, x);
  return linear(w13_, w13, expert_, x);
}

std::vector<double> OracleExpert::activated(std::span<const double> sums) const {
  const bool gated = oracle_is_gated(*problem_);
  const auto size = static_cast<std::size_t>(problem_->intermediate_size);
  std::vector<double> y(size);
  for (std::size_t i = 0; i < size; ++i) {
    y[i] = activate(problem_->activation, sums[i], gated ? sums[size + i] : 0.0);
  }
  return gathered(w2_of(*weights_), expert_, std::move(y));
}

std::vector<double> OracleExpert::second_operand(std::vector<double> row) const {
  round_operand(*problem_, weights_->w2_input_scale, expert_, row);
  return row;
}

std::vector<double> OracleExpert::second(std::span<const double> operand) const {
  return linear(w2_, w2_of(*weights_), expert_, operand);
}

std::vector<double> OracleExpert::row(std::span<const double> x, double scale_input) const {
  std::vector<double> y = activated(first(x, scale_input));
  if (options_.round_like_scheme) y = second_operand(std::move(y));
  return second(y);
}

std::vector<double> oracle_expert(const MoeProblem& problem, const StackedExpertWeights& weights,
                                  std::int64_t local_expert, std::span<const double> x,
                                  double scale_input, const OracleOptions& options) {
  return OracleExpert(problem, weights, local_expert, options).row(x, scale_input);
}

std::vector<double> oracle_moe(const MoeProblem& problem, const StackedExpertWeights& weights,
                               ConstTensorView x, ConstTensorView ids, ConstTensorView topk_weights,
                               std::span<const std::int32_t> expert_map,
                               const OracleOptions& options) {
  const std::int64_t tokens = x.dim(0);
  const std::int64_t hidden = problem.hidden_size;
  const std::int64_t top_k = problem.top_k;
  std::vector<double> out(static_cast<std::size_t>(tokens * hidden));
  std::map<std::int64_t, OracleExpert> experts;  // those that a token has
  for (std::int64_t t = 0; t < tokens; ++t) {
    const std::vector<double> row = oracle_row(x, t * x.strides[0], hidden);
    for (std::int64_t j = 0; j < top_k; ++j) {
      const std::int32_t id = ids.as<std::int32_t>()[t * top_k + j];
      if (id < 0) continue;
      const std::int32_t e = expert_map.empty() ? id : expert_map[static_cast<std::size_t>(id)];
      if (e < 0) continue;
      const auto w = static_cast<double>(topk_weights.as<float>()[t * top_k + j]);
      const OracleExpert& expert =
          experts.try_emplace(e, problem, weights, e, options).first->second;
      const std::vector<double> z = expert.row(row, w);
      const double factor = problem.apply_router_weight_on_input ? 1.0 : w;
      for (std::int64_t h = 0; h < hidden; ++h) {
        out[static_cast<std::size_t>(t * hidden + h)] += factor * z[static_cast<std::size_t>(h)];
      }
    }
  }
  return out;
}

std::vector<double> oracle_batched(const MoeProblem& problem, const StackedExpertWeights& weights,
                                   ConstTensorView x, std::span<const std::int32_t> counts,
                                   const OracleOptions& options) {
  // A weight on the input was applied by prepare, before the experts see the rows.
  MoeProblem unweighted = problem;
  unweighted.apply_router_weight_on_input = false;
  const std::int64_t rows = x.dim(1);
  const std::int64_t hidden = problem.hidden_size;
  std::vector<double> out(static_cast<std::size_t>(x.dim(0) * rows * hidden));
  for (std::int64_t e = 0; e < x.dim(0); ++e) {
    if (counts[static_cast<std::size_t>(e)] == 0) continue;
    const OracleExpert expert(unweighted, weights, e, options);
    for (std::int64_t r = 0; r < counts[static_cast<std::size_t>(e)]; ++r) {
      const std::vector<double> row = oracle_row(x, e * x.strides[0] + r * x.strides[1], hidden);
      const std::vector<double> z = expert.row(row, 1.0);
      std::copy(z.begin(), z.end(),
                out.begin() + static_cast<std::ptrdiff_t>((e * rows + r) * hidden));
    }
  }
  return out;
}

}  // namespace moesaic::test
