#include "support/moe_oracle.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <numbers>

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
    case DType::kF4E2M1: {  // two per byte, low nibble first
      constexpr double kMagnitude[8] = {0, 0.5, 1, 1.5, 2, 3, 4, 6};
      const int code = (t.as<std::uint8_t>()[i / 2] >> (i % 2 * 4)) & 15;
      return code < 8 ? kMagnitude[code] : -kMagnitude[code - 8];
    }
    default:
      std::abort();  // not a dtype of weights or activations
  }
}

// --- The scheme ----------------------------------------------------------------------------------

bool is_f32_scheme(const MoeProblem& p) {
  return p.quant.activation.dtype == DType::kF32 &&
         p.quant.activation.granularity == ScaleGranularity::kNone;
}
bool quantises_activations(const MoeProblem& p) {
  return p.quant.activation.dtype == DType::kF8E4M3;
}

// Rounds a GEMM operand as the scheme does: to activation_dtype, then per 128 columns to e4m3.
void round_operand(const MoeProblem& p, std::vector<double>& row) {
  if (is_f32_scheme(p)) return;
  for (double& v : row) v = round_to(p.activation_dtype, v);
  if (!quantises_activations(p)) return;
  for (std::size_t begin = 0; begin < row.size(); begin += 128) {
    const std::size_t end = std::min(begin + 128, row.size());
    float amax = 0;
    for (std::size_t i = begin; i < end; ++i) {
      amax = std::max(amax, static_cast<float>(std::abs(row[i])));
    }
    // The scale and the quotient are fp32 by definition of the format.
    float scale = std::max(amax, 1e-10F) / 448.0F;
    if (p.quant.activation.scale_format == ScaleFormat::kE8M0) {  // up to a power of two
      scale = std::exp2(std::ceil(std::log2(std::max(scale, 1e-10F))));
    }
    for (std::size_t i = begin; i < end; ++i) {
      row[i] = e4m3_round(static_cast<double>(static_cast<float>(row[i]) / scale)) *
               static_cast<double>(scale);
    }
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

// x [K] times slice e of w [E, rows, K] transposed, plus bias.
std::vector<double> linear(const ConstTensorView& w, const ConstTensorView& scale,
                           const ConstTensorView& bias, std::int64_t e, std::span<const double> x) {
  const std::int64_t rows = w.dim(1);
  const std::int64_t columns = w.dim(2);
  const bool mx = w.dtype == DType::kF4E2M1;
  const std::int64_t block_n = mx ? 1 : 128, block_k = mx ? 32 : 128;
  const std::int64_t scale_columns = (columns + block_k - 1) / block_k;
  const std::int64_t scale_rows = (rows + block_n - 1) / block_n;
  std::vector<double> y(static_cast<std::size_t>(rows));
  for (std::int64_t n = 0; n < rows; ++n) {
    double sum = 0;
    for (std::int64_t k = 0; k < columns; ++k) {
      double v = element(w, (e * rows + n) * columns + k);
      if (scale.present()) {
        v *= element(scale, (e * scale_rows + n / block_n) * scale_columns + k / block_k);
      }
      sum += v * x[static_cast<std::size_t>(k)];
    }
    if (bias.present()) sum += element(bias, e * rows + n);
    y[static_cast<std::size_t>(n)] = sum;
  }
  return y;
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
  if (round) round_operand(problem, x);
  const std::vector<double> g1 =
      linear(weights.w13, weights.w13_scale, weights.w13_bias, local_expert, x);
  const auto size = static_cast<std::size_t>(problem.intermediate_size);
  std::vector<double> y(size);
  for (std::size_t i = 0; i < size; ++i) {
    y[i] = activate(problem.activation, g1[i], gated(problem) ? g1[size + i] : 0.0);
  }
  if (round) round_operand(problem, y);
  return linear(weights.w2, weights.w2_scale, weights.w2_bias, local_expert, y);
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
  return {w13.view(), w13_scale.view(), w13_bias.view(),
          w2.view(),  w2_scale.view(),  w2_bias.view()};
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

// Random e2m1 codes and exponents that give a stacked tensor a standard deviation of about `sd`.
void draw_mxfp4(Rng& rng, const Shape& shape, double sd, Tensor& codes, Tensor& scales) {
  codes = Tensor::zeros(DType::kF4E2M1, shape).value();
  scales = Tensor::zeros(DType::kF8E8M0, {shape[0], shape[1], shape[2] / 32}).value();
  for (std::int64_t i = 0; i < codes.bytes(); ++i) {
    codes.as<std::uint8_t>()[i] = static_cast<std::uint8_t>(rng.uniform() * 256);
  }
  // All 16 codes alike: sd 2.7; exponents one below to one above what that asks for.
  const int middle = static_cast<int>(std::lround(std::log2(sd / 2.7)));
  for (std::int64_t i = 0; i < scales.bytes(); ++i) {
    const int exponent = middle - 1 + static_cast<int>(rng.uniform() * 3);
    scales.as<std::uint8_t>()[i] = static_cast<std::uint8_t>(127 + exponent);
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
  const DType drawn = stored == DType::kF8E4M3 ? DType::kF32 : stored;
  OwnedExpertWeights w;
  const double sd13 = 1.0 / std::sqrt(static_cast<double>(hidden));
  const double sd2 = 2.0 / std::sqrt(static_cast<double>(inner));
  if (stored == DType::kF4E2M1) {
    draw_mxfp4(rng, {experts, rows, hidden}, sd13, w.w13, w.w13_scale);
    draw_mxfp4(rng, {experts, hidden, inner}, sd2, w.w2, w.w2_scale);
  } else {
    w.w13 = random_normal(rng, drawn, {experts, rows, hidden}, sd13);
    w.w2 = random_normal(rng, drawn, {experts, hidden, inner}, sd2);
  }
  if (stored == DType::kF8E4M3) {
    const Tensor w13 = std::move(w.w13);
    const Tensor w2 = std::move(w.w2);
    quantise_blocks(w13, w.w13, w.w13_scale);
    quantise_blocks(w2, w.w2, w.w2_scale);
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
