// Small integers: every product, sum and rounding is exact, so results are equal bit by bit.
#include <gtest/gtest.h>

#include "support/experts_run.h"
#include "support/metrics.h"
#include "support/random.h"

namespace moesaic {
namespace {

using test::make_backend;
using test::Rng;
using test::run_standard;
using test::StandardCase;

// -1, 0 or 1 in a format that has them.
void store_unit(Tensor& t, std::int64_t i, std::int64_t v) {
  const auto pick = [v](unsigned one, unsigned sign) {
    return v == 0 ? 0U : v > 0 ? one : one | sign;
  };
  switch (t.dtype()) {
    case DType::kF32:
      t.as<float>()[i] = static_cast<float>(v);
      return;
    case DType::kF8E4M3:
      t.as<std::uint8_t>()[i] = static_cast<std::uint8_t>(pick(0x38, 0x80));
      return;
    case DType::kF16:
      t.as<std::uint16_t>()[i] = static_cast<std::uint16_t>(pick(0x3C00, 0x8000));
      return;
    default:
      t.as<std::uint16_t>()[i] = static_cast<std::uint16_t>(pick(0x3F80, 0x8000));
  }
}

void fill_units(Rng& rng, Tensor& t) {
  const std::int64_t n = t.shape().num_elements().value();
  for (std::int64_t i = 0; i < n; ++i) store_unit(t, i, rng.integer(-1, 1));
}

void integer_weights(Rng& rng, StandardCase& c) {
  for (std::int64_t i = 0; i < c.routing.weights.bytes() / 4; ++i) {
    c.routing.weights.as<float>()[i] = static_cast<float>(rng.integer(1, 4)) * 0.25F;
  }
}

// H 12, I 16, units everywhere: |g| <= 13, relu2 <= 169 fits bf16's eight bits.
StandardCase plain_case(std::string_view quant, std::string_view activation) {
  MoeProblem p = test::small_problem(quant);
  p.hidden_size = 12;
  p.intermediate_size = 16;
  p.activation = make_activation(activation).value();
  p.has_expert_bias = true;
  StandardCase c = test::make_case(5, p, 7, DType::kBF16);
  Rng rng(6);
  for (Tensor* t : {&c.weights.w13, &c.weights.w2, &c.weights.w13_bias, &c.weights.w2_bias}) {
    fill_units(rng, *t);
  }
  c.hidden_states = random_integers(rng, DType::kBF16, c.hidden_states.shape(), 1);
  integer_weights(rng, c);
  return c;
}

// Exact even where activations are quantised. Every group of x and of the intermediate holds a 448,
// so all activation scales are 1; x is otherwise -8, 0 or 8. Rows of w13 have two or three units,
// block scales are 1 and 2, the bias is 80: g is a multiple of 8 in [32, 128], where silu(g) == g
// in fp32 and e4m3 has every such value.
StandardCase fp8_case(std::string_view quant) {
  MoeProblem p = test::small_problem(quant);
  p.activation = make_activation("silu_no_mul").value();
  p.has_expert_bias = true;
  StandardCase c = test::make_case(7, p, 7, DType::kF32);
  Rng rng(8);
  const std::int64_t group = p.quant.weight.block_k;
  for (std::int64_t i = 0; i < 7 * 256; ++i) {
    c.hidden_states.as<float>()[i] =
        i % 256 % group == 0 ? 448.0F : 8.0F * static_cast<float>(rng.integer(-1, 1));
  }
  fill_units(rng, c.weights.w2);
  fill_units(rng, c.weights.w2_bias);
  for (std::int64_t row = 0; row < 6 * 128; ++row) {
    const bool top = row % 128 == 127 || row % 128 % group == group - 1;
    c.weights.w13_bias.as<float>()[row] = top ? 448.0F : 80.0F;
    for (std::int64_t k = 0; k < 256; ++k) store_unit(c.weights.w13, row * 256 + k, 0);
    // Three where blocks of 128 columns have the scales 1 and 2, of which any other two may be 2.
    const int units = group == 128 ? 3 : 2;
    for (int unit = 0; unit < units && !top; ++unit) {
      std::int64_t k = 128 * (unit / (units - 1)) + rng.integer(1, 127);
      if (k % group == 0) ++k;  // not where x is 448
      store_unit(c.weights.w13, row * 256 + k, 2 * rng.integer(0, 1) - 1);
    }
  }
  for (Tensor* scale : {&c.weights.w13_scale, &c.weights.w2_scale}) {
    for (std::int64_t i = 0; i < scale->bytes() / 4; ++i) {
      scale->as<float>()[i] = static_cast<float>(1 + (i + i / 2) % 2);
    }
  }
  integer_weights(rng, c);
  return c;
}

void expect_exact(const StandardCase& c) {
  const auto want = c.oracle(false);
  ASSERT_EQ(want, c.oracle(true)) << "the case is not exact: nothing is tested";
  for (const CandidateReport& row : explain_experts(c.problem)) {
    if (!row.accepted) continue;
    const auto got = test::to_doubles(run_standard(*make_backend(row.name, c), c).view());
    EXPECT_EQ(got, want) << row.name;
  }
}

TEST(ExpertsExact, PlainWeights) {
  for (const char* quant : {"f32", "bf16", "f16"}) {
    SCOPED_TRACE(quant);
    expect_exact(plain_case(quant, "relu2_no_mul"));
  }
}

// silu(g) == g in fp32 once exp(-g) vanishes beside 1; a gate bias of 64 puts every gate there, so
// gate * up is an exact integer and a swap of the halves cannot hide.
TEST(ExpertsExact, GatedActivation) {
  StandardCase c = plain_case("f32", "silu");
  for (std::int64_t e = 0; e < 6; ++e) {
    for (std::int64_t i = 0; i < 16; ++i) c.weights.w13_bias.as<float>()[e * 32 + i] = 64.0F;
  }
  expect_exact(c);
}

TEST(ExpertsExact, Fp8Weights) {
  for (const char* quant :
       {"fp8-block", "fp8-bf16", "fp8-block-64x64", "fp8-block-32x128", "fp8-block-48x80",
        "fp8-block-10x256", "fp8-block-64x6", "fp8-bf16-32x48"}) {
    SCOPED_TRACE(quant);
    expect_exact(fp8_case(quant));
  }
}

}  // namespace
}  // namespace moesaic
