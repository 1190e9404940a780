#include "support/moe_oracle.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <numbers>

#include "numerics/element.h"
#include "support/half.h"
#include "support/metrics.h"
#include "support/random.h"

namespace moesaic::test {
namespace {

// --- Number formats, by definition rather than by bit tricks -------------------------------------

// Nearest multiple of the spacing of a binary format at |v|, ties to even.
double round_to_grid(double v, int mantissa_bits, int min_exponent) {
  if (v == 0 || !std::isfinite(v)) return v;
  const int exponent = std::max(std::ilogb(v), min_exponent);
  const double step = std::ldexp(1.0, exponent - mantissa_bits);
  return std::nearbyint(v / step) * step;
}

double round_to(DType dtype, double v) {
  switch (dtype) {
    case DType::kF32:
      return static_cast<double>(static_cast<float>(v));
    case DType::kBF16:
      return round_to_grid(v, 7, -126);
    case DType::kF16:
      return round_to_grid(v, 10, -14);
    default:
      std::abort();  // not a rounding that a scheme asks for
  }
}

double e4m3_value(std::uint8_t code) {
  const int exponent = (code >> 3) & 15;
  const int mantissa = code & 7;
  const double magnitude =
      exponent == 0 ? mantissa * 0x1p-9 : (1.0 + mantissa / 8.0) * std::ldexp(1.0, exponent - 7);
  return (code & 0x80) != 0 ? -magnitude : magnitude;
}
double e4m3_round(double v) { return round_to_grid(std::clamp(v, -448.0, 448.0), 3, -6); }
std::uint8_t e4m3_code(double v) {
  const double want = std::abs(e4m3_round(v));
  // Codes are ordered like their values.
  std::uint8_t low = 0;
  std::uint8_t high = 0x7E;
  while (low < high) {
    const auto middle = static_cast<std::uint8_t>((low + high) / 2);
    if (e4m3_value(middle) < want) {
      low = static_cast<std::uint8_t>(middle + 1);
    } else {
      high = middle;
    }
  }
  if (e4m3_value(low) != want) std::abort();  // e4m3_round returned a value off the grid
  return static_cast<std::uint8_t>(low | (std::signbit(v) ? 0x80 : 0));
}

// Two per byte, low one first.
int nibble(const ConstTensorView& t, std::int64_t i) {
  return (t.as<std::uint8_t>()[i / 2] >> (i % 2 * 4)) & 15;
}

// bitsandbytes tables, by code.
constexpr double kNf4[16] = {-1.0,
                             -0.6961928009986877,
                             -0.5250730514526367,
                             -0.39491748809814453,
                             -0.28444138169288635,
                             -0.18477343022823334,
                             -0.09105003625154495,
                             0.0,
                             0.07958029955625534,
                             0.16093020141124725,
                             0.24611230194568634,
                             0.33791524171829224,
                             0.44070982933044434,
                             0.5626170039176941,
                             0.7229568362236023,
                             1.0};
constexpr double kFp4[8] = {0, 0.005208333, 0.6666667, 1, 0.33333334, 0.5, 0.16666667, 0.25};

double e2m1_round(double v) { return round_to_grid(std::clamp(v, -6.0, 6.0), 1, 0); }

double element(const ConstTensorView& t, std::int64_t i) {
  switch (t.dtype) {
    case DType::kF32:
      return static_cast<double>(t.as<float>()[i]);
    case DType::kBF16: {
      const std::uint32_t bits = static_cast<std::uint32_t>(t.as<std::uint16_t>()[i]) << 16;
      float f = 0;
      std::memcpy(&f, &bits, sizeof(f));
      return static_cast<double>(f);
    }
    case DType::kF16:
      return half_value(t.as<std::uint16_t>()[i]);
    case DType::kF8E4M3:
      return e4m3_value(t.as<std::uint8_t>()[i]);
    case DType::kF8E8M0:
      return std::ldexp(1.0, t.as<std::uint8_t>()[i] - 127);
    case DType::kF4E2M1: {
      constexpr double kMagnitude[8] = {0, 0.5, 1, 1.5, 2, 3, 4, 6};
      const int code = nibble(t, i);
      return code < 8 ? kMagnitude[code] : -kMagnitude[code - 8];
    }
    case DType::kI4:
      return nibble(t, i) < 8 ? nibble(t, i) : nibble(t, i) - 16;
    case DType::kU4:
      return nibble(t, i);
    case DType::kI8:
      return t.as<std::int8_t>()[i];
    case DType::kU8:
      return t.as<std::uint8_t>()[i];
    default:
      std::abort();  // not a dtype of weights or activations
  }
}

// --- The scheme ----------------------------------------------------------------------------------

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
  if (a.granularity == ScaleGranularity::kToken) {
    scale =
        a.dtype == DType::kI8 ? amax / 127.0F : std::max(amax / 448.0F, 1.0F / (448.0F * 512.0F));
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
};
Projection w13_of(const StackedExpertWeights& s) {
  return {s.w13,      s.w13_scale, s.w13_bias,        s.w13_global_scale, s.w13_channel_scale,
          s.w13_zero, s.w13_min,   s.w13_input_scale, s.w13_perm};
}
Projection w2_of(const StackedExpertWeights& s) {
  return {s.w2,      s.w2_scale, s.w2_bias,        s.w2_global_scale, s.w2_channel_scale,
          s.w2_zero, s.w2_min,   s.w2_input_scale, s.w2_perm};
}

// What element [e, n, k] of the stored matrix stands for; schemes of bf16 arithmetic round entries
// of a table.
double weight_value(const OperandQuant& q, const Projection& m, std::int64_t e, std::int64_t n,
                    std::int64_t k, bool bf16_tables) {
  const std::int64_t rows = m.w.dim(1), columns = m.w.dim(2);
  const std::int64_t at = (e * rows + n) * columns + k;
  double v = 0;
  if (q.table == CodeTable::kNf4) {
    v = kNf4[nibble(m.w, at)];
  } else if (q.table == CodeTable::kFp4) {
    const int code = nibble(m.w, at);
    v = code < 8 ? kFp4[code] : -kFp4[code - 8];
  } else {
    v = element(m.w, at);
  }
  if (bf16_tables && q.table != CodeTable::kNone) v = round_to(DType::kBF16, v);
  const std::int64_t block_n = std::max<std::int64_t>(q.block_n, 1);
  std::int64_t index = e;  // one per expert
  if (q.granularity == ScaleGranularity::kChannel) index = e * rows + n;
  if (q.block_k > 0) {
    const std::int64_t across = (columns + q.block_k - 1) / q.block_k;
    index = (e * ((rows + block_n - 1) / block_n) + n / block_n) * across + k / q.block_k;
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

// x [K] times slice e of w [E, rows, K] transposed, plus bias.
std::vector<double> linear(const OperandQuant& q, const Projection& m, std::int64_t e,
                           std::span<const double> x, bool bf16_tables) {
  const std::int64_t rows = m.w.dim(1), columns = m.w.dim(2);
  std::vector<double> y(static_cast<std::size_t>(rows));
  for (std::int64_t n = 0; n < rows; ++n) {
    double sum = 0;
    for (std::int64_t k = 0; k < columns; ++k)
      sum += weight_value(q, m, e, n, k, bf16_tables) * x[static_cast<std::size_t>(k)];
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

std::vector<double> row_of(const ConstTensorView& t, std::int64_t offset, std::int64_t columns) {
  std::vector<double> row(static_cast<std::size_t>(columns));
  for (std::int64_t i = 0; i < columns; ++i)
    row[static_cast<std::size_t>(i)] = element(t, offset + i);
  return row;
}

bool gated(const MoeProblem& p) {
  return p.activation.kind != ActivationKind::kSiluNoMul &&
         p.activation.kind != ActivationKind::kGeluNoMul &&
         p.activation.kind != ActivationKind::kGeluTanhNoMul &&
         p.activation.kind != ActivationKind::kRelu2NoMul;
}

}  // namespace

std::vector<double> oracle_expert(const MoeProblem& problem, const StackedExpertWeights& weights,
                                  std::int64_t local_expert, std::span<const double> x_in,
                                  double scale_input, const OracleOptions& options) {
  const bool round = options.round_like_scheme;
  std::vector<double> x(x_in.begin(), x_in.end());
  if (problem.apply_router_weight_on_input) {
    const bool in_dtype = round && !is_f32_scheme(problem);
    const double w = in_dtype ? round_to(problem.activation_dtype, scale_input) : scale_input;
    for (double& v : x) v = (in_dtype ? round_to(problem.activation_dtype, v) : v) * w;
  }
  const OperandQuant& q = problem.quant.weight;
  const Projection w13 = w13_of(weights), w2 = w2_of(weights);
  const bool bf16_tables = round && !is_f32_scheme(problem);
  x = gathered(w13, local_expert, std::move(x));
  if (round) round_operand(problem, w13.input_scale, local_expert, x);
  const std::vector<double> g1 = linear(q, w13, local_expert, x, bf16_tables);
  const auto size = static_cast<std::size_t>(problem.intermediate_size);
  std::vector<double> y(size);
  for (std::size_t i = 0; i < size; ++i) {
    y[i] = activate(problem.activation, g1[i], gated(problem) ? g1[size + i] : 0.0);
  }
  y = gathered(w2, local_expert, std::move(y));
  if (round) round_operand(problem, w2.input_scale, local_expert, y);
  return linear(q, w2, local_expert, y, bf16_tables);
}

std::vector<double> oracle_moe(const MoeProblem& problem, const StackedExpertWeights& weights,
                               ConstTensorView x, ConstTensorView ids, ConstTensorView topk_weights,
                               std::span<const std::int32_t> expert_map,
                               const OracleOptions& options) {
  const std::int64_t tokens = x.dim(0);
  const std::int64_t hidden = problem.hidden_size;
  const std::int64_t top_k = problem.top_k;
  std::vector<double> out(static_cast<std::size_t>(tokens * hidden));
  for (std::int64_t t = 0; t < tokens; ++t) {
    const std::vector<double> row = row_of(x, t * x.strides[0], hidden);
    for (std::int64_t j = 0; j < top_k; ++j) {
      const std::int32_t id = ids.as<std::int32_t>()[t * top_k + j];
      if (id < 0) continue;
      const std::int32_t e = expert_map.empty() ? id : expert_map[static_cast<std::size_t>(id)];
      if (e < 0) continue;
      const auto w = static_cast<double>(topk_weights.as<float>()[t * top_k + j]);
      const std::vector<double> z = oracle_expert(problem, weights, e, row, w, options);
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
    for (std::int64_t r = 0; r < counts[static_cast<std::size_t>(e)]; ++r) {
      const std::vector<double> row = row_of(x, e * x.strides[0] + r * x.strides[1], hidden);
      const std::vector<double> z = oracle_expert(unweighted, weights, e, row, 1.0, options);
      std::copy(z.begin(), z.end(),
                out.begin() + static_cast<std::ptrdiff_t>((e * rows + r) * hidden));
    }
  }
  return out;
}

StackedExpertWeights OwnedExpertWeights::view() const {
  return {w13.view(),
          w13_scale.view(),
          w13_bias.view(),
          w2.view(),
          w2_scale.view(),
          w2_bias.view(),
          w13_global_scale.view(),
          w2_global_scale.view(),
          w13_channel_scale.view(),
          w2_channel_scale.view(),
          w13_zero.view(),
          w2_zero.view(),
          w13_min.view(),
          w2_min.view(),
          w13_input_scale.view(),
          w2_input_scale.view(),
          w13_perm.view(),
          w2_perm.view()};
}

namespace {

// e4m3 codes and F32 scales of a stacked F32 tensor, per 128x128 tile, ragged edges allowed.
void quantise_blocks(const Tensor& source, Tensor& codes, Tensor& scales) {
  const std::int64_t experts = source.shape()[0];
  const std::int64_t rows = source.shape()[1];
  const std::int64_t columns = source.shape()[2];
  const std::int64_t tile_rows = (rows + 127) / 128;
  const std::int64_t tile_columns = (columns + 127) / 128;
  codes = Tensor::zeros(DType::kF8E4M3, source.shape()).value();
  scales = Tensor::zeros(DType::kF32, {experts, tile_rows, tile_columns}).value();
  for (std::int64_t tile = 0; tile < experts * tile_rows * tile_columns; ++tile) {
    const std::int64_t e = tile / (tile_rows * tile_columns);
    const std::int64_t n0 = tile / tile_columns % tile_rows * 128;
    const std::int64_t k0 = tile % tile_columns * 128;
    const auto for_each = [&](auto&& use) {
      for (std::int64_t n = n0; n < std::min(n0 + 128, rows); ++n) {
        for (std::int64_t k = k0; k < std::min(k0 + 128, columns); ++k) {
          use((e * rows + n) * columns + k);
        }
      }
    };
    float amax = 1e-4F;
    for_each([&](std::int64_t i) { amax = std::max(amax, std::abs(source.as<float>()[i])); });
    const float scale = amax / 448.0F;
    scales.as<float>()[tile] = scale;
    for_each([&](std::int64_t i) {
      codes.as<std::uint8_t>()[i] = e4m3_code(static_cast<double>(source.as<float>()[i] / scale));
    });
  }
}

// The tensors of one projection to be drawn.
struct Drawn {
  Tensor &codes, &scale, &global_scale, &channel_scale, &zero, &min, &input_scale, &perm;
};

Tensor constant(const Shape& shape, float value) {
  Tensor t = Tensor::zeros(DType::kF32, shape).value();
  for (std::int64_t i = 0; i < t.bytes() / 4; ++i) t.as<float>()[i] = value;
  return t;
}

// Random codes of any quantised format and scales that give a stacked tensor a standard deviation
// of about `sd`. Every expert and row has scales of its own. Integers with a zero point get scales
// of F16, so that the widening is seen.
void draw_codes(Rng& rng, const OperandQuant& q, const Shape& shape, double sd, Drawn out) {
  const std::int64_t experts = shape[0], rows = shape[1], columns = shape[2];
  out.codes = Tensor::zeros(q.dtype, shape).value();
  const bool zero = q.zero_point == ZeroPoint::kInteger, min = q.zero_point == ZeroPoint::kMin;
  double code_sd = 4.6;  // I4, U4: all 16 codes alike
  if (q.dtype == DType::kF4E2M1) code_sd = 2.7;
  if (q.dtype == DType::kI8 || q.dtype == DType::kU8) code_sd = 74;
  if (q.dtype == DType::kF8E4M3) code_sd = 132;
  if (q.table != CodeTable::kNone) code_sd = 0.55;
  for (std::int64_t i = 0; i < out.codes.bytes(); ++i) {
    auto code = static_cast<std::uint8_t>(rng.uniform() * 256);
    if (q.dtype == DType::kF8E4M3 && (code & 0x7F) == 0x7F) code ^= 1;  // no NaN
    out.codes.as<std::uint8_t>()[i] = code;
  }
  Shape scales{experts, 1};
  if (q.granularity == ScaleGranularity::kChannel) scales = {experts, rows};
  if (q.block_k > 0) scales = {experts, rows, (columns + q.block_k - 1) / q.block_k};
  const auto random_scale = [&] { return sd / code_sd * std::exp2(rng.uniform() - 0.5); };
  switch (q.scale_format) {
    case ScaleFormat::kE8M0: {  // exponents one below to one above what sd asks for
      out.scale = Tensor::zeros(DType::kF8E8M0, scales).value();
      const int middle = static_cast<int>(std::lround(std::log2(sd / code_sd)));
      for (std::int64_t i = 0; i < out.scale.bytes(); ++i) {
        const int exponent = middle - 1 + static_cast<int>(rng.uniform() * 3);
        out.scale.as<std::uint8_t>()[i] = static_cast<std::uint8_t>(127 + exponent);
      }
      break;
    }
    case ScaleFormat::kE4M3: {  // values 16 to 48, the rest in the outer scale
      out.scale = Tensor::zeros(DType::kF8E4M3, scales).value();
      for (std::int64_t i = 0; i < out.scale.bytes(); ++i)
        out.scale.as<std::uint8_t>()[i] = e4m3_code(16.0 + 32.0 * rng.uniform());
      const bool tensor = q.outer_scale == OuterScale::kTensor;
      Tensor& outer = tensor ? out.global_scale : out.channel_scale;
      outer = constant(tensor ? Shape{experts, 1} : Shape{experts, rows}, 0);
      for (std::int64_t i = 0; i < outer.bytes() / 4; ++i)
        outer.as<float>()[i] = static_cast<float>(random_scale() / 32);
      break;
    }
    default: {
      out.scale = Tensor::zeros(zero ? DType::kF16 : DType::kF32, scales).value();
      const std::int64_t count = scales.num_elements().value();
      for (std::int64_t i = 0; i < count; ++i)
        store_from_f32(out.scale.data(), out.scale.dtype(), i, static_cast<float>(random_scale()));
      break;
    }
  }
  const std::int64_t count = scales.num_elements().value();
  const bool eight = q.dtype == DType::kU8 || q.dtype == DType::kI8;
  const int middle = q.dtype == DType::kU8 ? 128 : q.dtype == DType::kU4 ? 8 : 0;
  if (zero) out.zero = Tensor::zeros(DType::kI8, scales).value();
  if (zero && middle > 0) out.zero = Tensor::zeros(DType::kU8, scales).value();
  for (std::int64_t i = 0; zero && i < count; ++i) {
    const auto spread = rng.integer(-3, 3) * (eight ? 8 : 1);
    out.zero.as<std::uint8_t>()[i] = static_cast<std::uint8_t>(middle + spread);
  }
  if (min) out.min = constant(scales, 0);
  for (std::int64_t i = 0; min && i < count; ++i) {
    const auto scale = element(out.scale.view(), i);
    out.min.as<float>()[i] = static_cast<float>(scale * (middle + 3 * (rng.uniform() - 0.5)));
  }
  if (!q.act_order) return;
  out.perm = Tensor::zeros(DType::kI32, {experts, columns}).value();
  for (std::int64_t e = 0; e < experts; ++e) {
    std::int32_t* perm = out.perm.as<std::int32_t>() + e * columns;
    for (std::int64_t k = 0; k < columns; ++k) {
      const std::int64_t other = rng.integer(0, k);
      perm[k] = perm[other];
      perm[other] = static_cast<std::int32_t>(k);
    }
  }
}

}  // namespace

OwnedExpertWeights random_expert_weights(std::uint64_t seed, const MoeProblem& problem) {
  Rng rng(seed);
  const std::int64_t experts = problem.num_local_experts;
  const std::int64_t hidden = problem.hidden_size;
  const std::int64_t inner = problem.intermediate_size;
  const std::int64_t rows = gated(problem) ? 2 * inner : inner;
  const DType stored = problem.quant.weight.dtype;
  const DType drawn =
      stored == DType::kF8E4M3 ? DType::kF32 : stored;  // blocks are quantised below
  OwnedExpertWeights w;
  const double sd13 = 1.0 / std::sqrt(static_cast<double>(hidden));
  const double sd2 = 2.0 / std::sqrt(static_cast<double>(inner));
  const OperandQuant& q = problem.quant.weight;
  const bool block = q.granularity == ScaleGranularity::kBlock;
  if (q.granularity == ScaleGranularity::kNone || block) {
    w.w13 = random_normal(rng, drawn, {experts, rows, hidden}, sd13);
    w.w2 = random_normal(rng, drawn, {experts, hidden, inner}, sd2);
  } else {
    draw_codes(rng, q, {experts, rows, hidden}, sd13,
               {w.w13, w.w13_scale, w.w13_global_scale, w.w13_channel_scale, w.w13_zero, w.w13_min,
                w.w13_input_scale, w.w13_perm});
    draw_codes(rng, q, {experts, hidden, inner}, sd2,
               {w.w2, w.w2_scale, w.w2_global_scale, w.w2_channel_scale, w.w2_zero, w.w2_min,
                w.w2_input_scale, w.w2_perm});
  }
  if (block) {
    const Tensor w13 = std::move(w.w13);
    const Tensor w2 = std::move(w.w2);
    quantise_blocks(w13, w.w13, w.w13_scale);
    quantise_blocks(w2, w.w2, w.w2_scale);
  }
  // Static activation scales for inputs of sd 1: the largest of some hundred is about 4.
  const OperandQuant& a = problem.quant.activation;
  if (a.granularity == ScaleGranularity::kTensor || a.outer_scale == OuterScale::kTensor) {
    const float levels = a.dtype == DType::kF4E2M1 ? 2688.0F : 448.0F;
    w.w13_input_scale = constant({experts, 1}, 4.0F / levels);
    w.w2_input_scale = constant({experts, 1}, 5.0F / levels);
    for (std::int64_t e = 0; e < experts; ++e)
      w.w2_input_scale.as<float>()[e] *= 1.0F + 0.1F * static_cast<float>(e);
  }
  if (problem.has_expert_bias) {
    w.w13_bias = random_normal(rng, DType::kF32, {experts, rows}, 0.5);
    w.w2_bias = random_normal(rng, DType::kBF16, {experts, hidden}, 0.5);
  }
  return w;
}

OwnedRouting random_routing(std::uint64_t seed, std::int64_t tokens, std::int64_t num_experts,
                            std::int64_t top_k, double invalid) {
  Rng rng(seed);
  OwnedRouting r{Tensor::zeros(DType::kI32, {tokens, top_k}).value(),
                 Tensor::zeros(DType::kF32, {tokens, top_k}).value()};
  std::vector<bool> used;
  for (std::int64_t t = 0; t < tokens; ++t) {
    used.assign(static_cast<std::size_t>(num_experts), false);
    for (std::int64_t j = 0; j < top_k; ++j) {
      const double u = rng.uniform();
      auto id = static_cast<std::int64_t>(u * u * static_cast<double>(num_experts));
      while (used[static_cast<std::size_t>(id)]) id = (id + 1) % num_experts;
      used[static_cast<std::size_t>(id)] = true;
      const bool drop = rng.uniform() < invalid;
      r.ids.as<std::int32_t>()[t * top_k + j] = drop ? -1 : static_cast<std::int32_t>(id);
      r.weights.as<float>()[t * top_k + j] =
          static_cast<float>((0.5 + rng.uniform()) / static_cast<double>(top_k));
    }
  }
  return r;
}

}  // namespace moesaic::test
