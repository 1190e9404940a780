#include "exact_case.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <tuple>
#include <utility>

#include "case_on_device.h"
#include "numerics/element.h"
#include "numerics/float_codec.h"
#include "numerics/integer.h"
#include "quant/code_values.h"
#include "support/random.h"

namespace moesaic::test {
namespace {

void store(Tensor& t, std::int64_t i, float v) {
  switch (t.dtype()) {
    case DType::kF32:
      t.as<float>()[i] = v;
      return;
    case DType::kF8E4M3:
      t.as<std::uint8_t>()[i] = e4m3_from_f32(v);
      return;
    case DType::kI8:
      t.as<std::int8_t>()[i] = static_cast<std::int8_t>(v);
      return;
    case DType::kF4E2M1:
      set_nibble(t.as<std::uint8_t>(), i, e2m1_from_f32(v));
      return;
    case DType::kI4:
      set_nibble(t.as<std::uint8_t>(), i, static_cast<std::uint8_t>(static_cast<int>(v) & 15));
      return;
    case DType::kU4:
      set_nibble(t.as<std::uint8_t>(), i, static_cast<std::uint8_t>(v));
      return;
    case DType::kU8:
      t.as<std::uint8_t>()[i] = static_cast<std::uint8_t>(v);
      return;
    case DType::kF16:
      store_from_f32(t.data(), t.dtype(), i, v);
      return;
    default:
      t.as<std::uint16_t>()[i] = bf16_from_f32(v);
  }
}

// Where weights have minima, these are so many scales.
constexpr float kMinimum = 7;

// The code of v (-1, 0 or 1) as element i of weights with these zero points, if any.
float code_of(const OperandQuant& q, const Tensor& zero, std::int64_t columns, std::int64_t i,
              float v) {
  if (q.table != CodeTable::kNone) {
    const quant::CodeValues values = quant::code_values(q);
    return static_cast<float>(std::ranges::find(values, v) - values.begin());
  }
  if (q.zero_point == ZeroPoint::kMin) return v + kMinimum;
  if (!zero.present()) return v;
  const std::int64_t groups = q.block_k > 0 ? (columns + q.block_k - 1) / q.block_k : 1;
  const std::int64_t at = i / columns * groups + (q.block_k > 0 ? i % columns / q.block_k : 0);
  return v + static_cast<float>(zero.as<std::uint8_t>()[at]);
}

// Each row of [rows, columns] gets `count` units at random places, the rest zero.
void fill_sparse(Rng& rng, const OperandQuant& q, Tensor& t, const Tensor& zero,
                 std::int64_t columns, int count) {
  const std::int64_t rows = t.shape().num_elements().value() / columns;
  std::memset(t.data(), 0, static_cast<std::size_t>(t.bytes()));
  const bool zero_is_zero =
      q.table == CodeTable::kNone && !zero.present() && q.zero_point != ZeroPoint::kMin;
  for (std::int64_t i = 0; i < rows * columns && !zero_is_zero; ++i) {
    store(t, i, code_of(q, zero, columns, i, 0));
  }
  for (std::int64_t r = 0; r < rows; ++r) {
    for (int i = 0; i < count; ++i) {
      const std::int64_t at = r * columns + rng.integer(0, columns - 1);
      store(t, at, code_of(q, zero, columns, at, rng.integer(0, 1) == 0 ? 1.0F : -1.0F));
    }
  }
}

}  // namespace

StandardCase exact_case(std::string_view quant, std::string_view activation, std::int64_t hidden,
                        std::int64_t intermediate, std::int64_t tokens, std::int64_t top_k) {
  MoeProblem p = problem_of(quant, activation, hidden, intermediate, 6, top_k);
  p.has_expert_bias = true;
  StandardCase c = test::make_case(11, p, tokens, p.activation_dtype, top_k > 1 ? 0.1 : 0.0);
  Rng rng(12);
  const OperandQuant& weight = p.quant.weight;
  const MatrixForms forms = p.quant.forms.value_or(MatrixForms{weight, weight});
  fill_sparse(rng, forms.w13, c.weights.w13, c.weights.w13_zero, hidden, 5);
  fill_sparse(rng, forms.w2, c.weights.w2, c.weights.w2_zero, intermediate, 1);
  const bool gated = is_gated(p.activation.kind);
  const std::int64_t rows = gated ? 2 * intermediate : intermediate;
  for (std::int64_t i = 0; i < 6 * rows; ++i) {
    const bool gate = gated && i % rows < intermediate;
    // Squares: one large value of the row must not leave int8 codes of zero for all others.
    const bool squares = !gated && p.quant.weight.dtype == DType::kI8;
    c.weights.w13_bias.as<float>()[i] =
        gate ? 64.0F : static_cast<float>(rng.integer(-2, 2) + (squares ? 80 : 0));
  }
  std::memset(c.weights.w2_bias.data(), 0, static_cast<std::size_t>(c.weights.w2_bias.bytes()));
  for (auto [scale, form] :
       {std::pair{&c.weights.w13_scale, &forms.w13}, std::pair{&c.weights.w2_scale, &forms.w2}}) {
    if (!scale->present()) continue;
    const std::int64_t groups = scale->shape()[scale->shape().rank() - 1];
    const std::int64_t times = form->block_k > 0 ? form->block_k / p.quant.weight.block_k : 1;
    for (std::int64_t i = 0; i < scale->shape().num_elements().value(); ++i) {
      // Groups of a form have the scale of their first one.
      const std::int64_t first = i - i % groups % times;
      const auto doubled = static_cast<std::uint8_t>((first + first / 3) % 2);
      if (scale->dtype() == DType::kF8E8M0) {
        scale->as<std::uint8_t>()[i] = static_cast<std::uint8_t>(127 + doubled);
      } else {
        store(*scale, i, static_cast<float>(1 + doubled));
      }
    }
  }
  for (auto [min, scale, form] : {std::tuple{&c.weights.w13_min, &c.weights.w13_scale, &forms.w13},
                                  std::tuple{&c.weights.w2_min, &c.weights.w2_scale, &forms.w2}}) {
    const float scales = form->zero_point == ZeroPoint::kMin ? kMinimum : 0.0F;
    for (std::int64_t i = 0; min->present() && i < min->bytes() / 4; ++i) {
      min->as<float>()[i] = scales * scale->as<float>()[i];
    }
  }
  for (std::int64_t e = 0; e < 6 && c.weights.w13_input_scale.present(); ++e) {
    c.weights.w13_input_scale.as<float>()[e] = e % 2 == 0 ? 1.0F : 2.0F;
    c.weights.w2_input_scale.as<float>()[e] = e < 3 ? 16.0F : 0.5F;
  }
  const OperandQuant& a = p.quant.activation;
  const std::int64_t group = a.block_k > 0 ? a.block_k : 128;
  for (std::int64_t i = 0; i < tokens * hidden; ++i) {
    // The largest code in each group makes the activation scale 1.
    const float top = a.dtype == DType::kF8E4M3   ? 448.0F
                      : a.dtype == DType::kI8     ? 127.0F
                      : a.dtype == DType::kF4E2M1 ? 6.0F
                                                  : 0.0F;
    const bool here = top > 0 && i % group == 5;
    store(c.hidden_states, i, here ? top : static_cast<float>(rng.integer(-1, 1)));
  }
  for (std::int64_t i = 0; i < c.routing.weights.bytes() / 4; ++i) {
    c.routing.weights.as<float>()[i] = std::ldexp(1.0F, static_cast<int>(rng.integer(-2, 0)));
  }
  return c;
}

}  // namespace moesaic::test
