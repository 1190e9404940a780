#include "support/random_experts.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "core/checked.h"
#include "numerics/codec.h"
#include "numerics/element.h"
#include "quant/block_scales.h"
#include "support/moe_oracle.h"
#include "support/oracle_formats.h"
#include "support/random.h"

namespace moesaic::test {

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

// e4m3 codes and F32 scales of a stacked F32 tensor, per tile, ragged edges allowed.
void quantise_blocks(const Tensor& source, std::int64_t parts, quant::BlockShape block,
                     Tensor& codes, Tensor& scales) {
  // Gate and up rows share no block.
  const std::int64_t experts = source.shape()[0] * parts;
  const std::int64_t rows = source.shape()[1] / parts;
  const std::int64_t columns = source.shape()[2];
  const std::int64_t tile_rows = ceil_div(rows, block.n);
  const std::int64_t tile_columns = ceil_div(columns, block.k);
  codes = Tensor::zeros(DType::kF8E4M3, source.shape()).value();
  scales = Tensor::zeros(DType::kF32, {experts / parts, parts * tile_rows, tile_columns}).value();
  for (std::int64_t tile = 0; tile < experts * tile_rows * tile_columns; ++tile) {
    const std::int64_t e = tile / (tile_rows * tile_columns);
    const std::int64_t n0 = tile / tile_columns % tile_rows * block.n;
    const std::int64_t k0 = tile % tile_columns * block.k;
    const auto for_each = [&](auto&& use) {
      for (std::int64_t n = n0; n < std::min(n0 + block.n, rows); ++n) {
        for (std::int64_t k = k0; k < std::min(k0 + block.k, columns); ++k) {
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

// Magnitudes of the numbers of [experts, rows, groups] to the nearest that OperandQuant::super_bits
// allows: of every 256 columns one is the largest integer times an F16 number, and one in sixteen
// is 0. With 8 bits half of them become negative.
void to_super_blocks(Rng& rng, const OperandQuant& q, Tensor& numbers) {
  const std::int64_t across = numbers.shape()[2], each = kSuperBlockColumns / q.block_k;
  const float largest = q.super_bits == 6 ? 63 : 127;
  for (std::int64_t row = 0; row < numbers.shape()[0] * numbers.shape()[1]; ++row) {
    for (std::int64_t first = 0; first < across; first += each) {
      float* block = numbers.as<float>() + row * across + first;
      const std::int64_t count = std::min(each, across - first);
      for (float* x = block; x < block + count; ++x) *x = std::abs(*x);
      const float top = *std::max_element(block, block + count);
      const float unit = f32_from_f16(f16_from_f32(top / largest));
      for (float* x = block; x < block + count; ++x) {
        const float code = std::min(std::round(*x / unit), largest);
        const bool negative = q.super_bits == 8 && rng.uniform() < 0.5;
        *x = rng.integer(0, 15) == 0 ? 0.0F : (negative ? -code : code) * unit;
      }
    }
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
  if (q.code_bits == 6) code_sd = 18.5;
  if (q.dtype == DType::kF8E4M3) code_sd = 132;
  if (q.table != CodeTable::kNone) code_sd = q.table == CodeTable::kIq4Nl ? 69.0 : 0.55;
  for (std::int64_t i = 0; i < out.codes.bytes(); ++i) {
    auto code = static_cast<std::uint8_t>(rng.uniform() * 256);
    if (q.dtype == DType::kF8E4M3 && (code & 0x7F) == 0x7F) code ^= 1;  // no NaN
    if (q.code_bits == 6) code = static_cast<std::uint8_t>((code & 63) - 32);
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
      for (std::int64_t i = 0; i < count; ++i) {
        float held = 0;  // of q.scale_dtype
        store_from_f32(&held, q.scale_dtype, 0, static_cast<float>(random_scale()));
        held = load_as_f32(&held, q.scale_dtype, 0);
        store_from_f32(out.scale.data(), out.scale.dtype(), i, held);
      }
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
  if (q.super_bits != 0) {
    to_super_blocks(rng, q, out.scale);
    if (min) to_super_blocks(rng, q, out.min);
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

// Numbers of a form's groups [experts, rows, groups] for the groups of q.
Tensor of_finer_groups(const Tensor& t, const OperandQuant& form, const OperandQuant& q,
                       std::int64_t columns) {
  const std::int64_t times = form.block_k / q.block_k;
  const std::int64_t groups = (columns + q.block_k - 1) / q.block_k;
  Tensor fine = Tensor::zeros(DType::kF32, {t.shape()[0], t.shape()[1], groups}).value();
  for (std::int64_t i = 0; i < fine.bytes() / 4; ++i)
    fine.as<float>()[i] = t.as<float>()[i / groups * t.shape()[2] + i % groups / times];
  return fine;
}

// Weights that were drawn in a form as they are handed over (MatrixForms).
void widen(const OperandQuant& form, const OperandQuant& q, Drawn drawn) {
  if (form == q) return;
  const std::int64_t columns = drawn.codes.shape()[2];
  if (form.dtype != q.dtype) {
    Tensor bytes = Tensor::zeros(q.dtype, drawn.codes.shape()).value();
    for (std::int64_t i = 0; i < bytes.bytes(); ++i) {
      const int nibble = nibble_at(drawn.codes.as<std::uint8_t>(), i);
      const bool negative = form.dtype == DType::kI4 && nibble > 7;
      bytes.as<std::int8_t>()[i] = static_cast<std::int8_t>(negative ? nibble - 16 : nibble);
    }
    drawn.codes = std::move(bytes);
  }
  const bool min = q.zero_point == ZeroPoint::kMin;
  if (min && !drawn.min.present()) drawn.min = constant(drawn.scale.shape(), 0);
  drawn.scale = of_finer_groups(drawn.scale, form, q, columns);
  if (min) drawn.min = of_finer_groups(drawn.min, form, q, columns);
}

}  // namespace

OwnedExpertWeights random_expert_weights(std::uint64_t seed, const MoeProblem& problem) {
  Rng rng(seed);
  const std::int64_t experts = problem.num_local_experts;
  const std::int64_t hidden = problem.hidden_size;
  const std::int64_t inner = problem.intermediate_size;
  const std::int64_t rows = oracle_is_gated(problem) ? 2 * inner : inner;
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
    const MatrixForms forms = problem.quant.forms.value_or(MatrixForms{q, q});
    const Drawn w13 = {w.w13,      w.w13_scale, w.w13_global_scale, w.w13_channel_scale,
                       w.w13_zero, w.w13_min,   w.w13_input_scale,  w.w13_perm};
    const Drawn w2 = {w.w2,      w.w2_scale, w.w2_global_scale, w.w2_channel_scale,
                      w.w2_zero, w.w2_min,   w.w2_input_scale,  w.w2_perm};
    draw_codes(rng, forms.w13, {experts, rows, hidden}, sd13, w13);
    widen(forms.w13, q, w13);
    draw_codes(rng, forms.w2, {experts, hidden, inner}, sd2, w2);
    widen(forms.w2, q, w2);
  }
  if (block) {
    const Tensor w13 = std::move(w.w13);
    const Tensor w2 = std::move(w.w2);
    const quant::BlockShape shape{q.block_n, q.block_k};
    quantise_blocks(w13, rows / inner, shape, w.w13, w.w13_scale);
    quantise_blocks(w2, 1, shape, w.w2, w.w2_scale);
  }
  // Static activation scales for inputs of sd 1: the largest of some hundred is about 4.
  const OperandQuant& a = problem.quant.activation;
  if (a.granularity == ScaleGranularity::kTensor || a.outer_scale == OuterScale::kTensor) {
    const float levels = a.dtype == DType::kF4E2M1 ? 2688.0F : 448.0F;
    w.w13_input_scale = constant({experts, 1}, 4.0F / levels);
    // Powers of two around a size spread the intermediate further.
    const bool wide = a.dtype == DType::kF8E4M3 && q.scale_format == ScaleFormat::kE8M0;
    w.w2_input_scale = constant({experts, 1}, (wide ? 40.0F : 5.0F) / levels);
    for (std::int64_t e = 0; e < experts; ++e) {  // each expert its own
      w.w13_input_scale.as<float>()[e] *= 1.0F + 0.2F * static_cast<float>(e % 5);
      w.w2_input_scale.as<float>()[e] *= 1.0F + 0.1F * static_cast<float>(e);
    }
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
