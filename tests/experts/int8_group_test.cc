// int8 activations per group over integer weights, on numbers that are exact everywhere: every tier,
// with the 8-bit dot product and without, the reference and float64 agree by bits.
#include <gtest/gtest.h>

#include <bit>
#include <cstring>
#include <string>
#include <string_view>
#include <vector>

#include "support/experts_run.h"
#include "support/metrics.h"
#include "support/random.h"

namespace moesaic {
namespace {

constexpr std::int64_t kGroup = 32, kHidden = 64, kInner = 96, kExperts = 3, kTopK = 2;

// One projection, [experts, rows, columns] of small integers v, stored as v plus the group's zero.
struct Matrix {
  std::int64_t rows, columns;
  std::vector<int> values;
  int& at(std::int64_t e, std::int64_t n, std::int64_t k) {
    return values[static_cast<std::size_t>((e * rows + n) * columns + k)];
  }
};

Matrix zeros(std::int64_t rows, std::int64_t columns) {
  return {rows, columns, std::vector<int>(static_cast<std::size_t>(kExperts * rows * columns))};
}

// Codes, scales (1, or powers of two from 1/8 on) and what the zero point or minimum takes away.
void store(test::Rng& rng, const OperandQuant& q, Matrix& m, bool varied, Tensor& codes,
           Tensor& scale, Tensor& zero, Tensor& min) {
  const Shape shape{kExperts, m.rows, m.columns};
  const Shape groups{kExperts, m.rows, m.columns / kGroup};
  codes = Tensor::zeros(q.dtype, shape).value();
  scale = Tensor::zeros(DType::kF32, groups).value();
  const bool point = q.zero_point == ZeroPoint::kInteger, minimum = q.zero_point == ZeroPoint::kMin;
  if (point) zero = Tensor::zeros(DType::kU8, groups).value();
  if (minimum) min = Tensor::zeros(DType::kF32, groups).value();
  const bool four = dtype_bits(q.dtype) == 4;
  for (std::int64_t g = 0; g < groups.num_elements().value(); ++g) {
    const float s = varied ? 1.0F / static_cast<float>(1 << rng.integer(0, 3)) : 1.0F;
    const auto z = static_cast<int>(point || minimum ? rng.integer(7, 8) : 0);
    scale.as<float>()[g] = s;
    if (point) zero.as<std::uint8_t>()[g] = static_cast<std::uint8_t>(z);
    if (minimum) min.as<float>()[g] = s * static_cast<float>(z);
    for (std::int64_t i = g * kGroup; i < (g + 1) * kGroup; ++i) {
      const auto code = static_cast<unsigned>(m.values[static_cast<std::size_t>(i)] + z);
      auto* bytes = codes.as<std::uint8_t>();
      if (four) {
        bytes[i / 2] = static_cast<std::uint8_t>(bytes[i / 2] | (code & 15U) << (i % 2 * 4));
      } else {
        bytes[i] = static_cast<std::uint8_t>(code);
      }
    }
  }
}

// relu^2 of integers. In every group of hidden states a 127 makes the scale 1; in every group of the
// intermediate one row of w13 yields 1442, whose square is 127 * 2^14 in BF16, so that this scale is
// 2^14. All other rows yield less.
test::StandardCase exact_case(const Scheme& scheme, std::int64_t tokens) {
  test::Rng rng(static_cast<std::uint64_t>(tokens) + 5);
  test::StandardCase c;
  MoeProblem& p = c.problem;
  p.num_experts = p.num_local_experts = kExperts;
  p.top_k = kTopK;
  p.hidden_size = kHidden;
  p.intermediate_size = kInner;
  p.activation.kind = ActivationKind::kRelu2NoMul;
  p.quant = scheme;
  p.max_tokens = tokens;
  p.num_threads = 2;
  c.hidden_states = Tensor::zeros(DType::kBF16, {tokens, kHidden}).value();
  std::vector<float> x(static_cast<std::size_t>(tokens * kHidden));
  for (std::int64_t i = 0; i < tokens * kHidden; ++i) {
    const std::int64_t k = i % kHidden;
    x[static_cast<std::size_t>(i)] = k % kGroup == 0 ? 127.0F
                                     : k == 1        ? 9.0F
                                                     : static_cast<float>(rng.integer(-12, 12));
    const std::uint32_t bits = std::bit_cast<std::uint32_t>(x[static_cast<std::size_t>(i)]);
    c.hidden_states.as<std::uint16_t>()[i] = static_cast<std::uint16_t>(bits >> 16);
  }
  Matrix w13 = zeros(kInner, kHidden), w2 = zeros(kHidden, kInner);
  for (int& v : w2.values) v = static_cast<int>(rng.integer(-7, 7));
  for (std::int64_t e = 0; e < kExperts; ++e) {
    for (std::int64_t n = 0; n < kInner; ++n) {
      if (n % kGroup == 5) {
        w13.at(e, n, 0) = 7, w13.at(e, n, kGroup) = 4, w13.at(e, n, 1) = 5;
        continue;
      }
      for (std::int64_t k = 1; k < kHidden; ++k)
        if (k != kGroup) w13.at(e, n, k) = static_cast<int>(rng.integer(-7, 7));
    }
  }
  const OperandQuant& q = scheme.weight;
  store(rng, q, w13, false, c.weights.w13, c.weights.w13_scale, c.weights.w13_zero,
        c.weights.w13_min);
  store(rng, q, w2, true, c.weights.w2, c.weights.w2_scale, c.weights.w2_zero, c.weights.w2_min);
  c.routing = test::random_routing(9, tokens, kExperts, kTopK, 0.1);
  for (std::int64_t i = 0; i < tokens * kTopK; ++i)
    c.routing.weights.as<float>()[i] = static_cast<float>(1 + i % 3);
  return c;
}

Scheme with_groups(DType dtype, ZeroPoint zero) {
  OperandQuant w = quant_scheme_from_name("int4-g128").value().weight;
  w.dtype = dtype;
  w.block_k = kGroup;
  w.zero_point = zero;
  return with_stored_weight(quant_scheme_from_name(int8_group_scheme_of(w)).value(), w);
}

// Scales in super-blocks, codes of 6 bits.
Scheme held_as_in_files(DType dtype, ZeroPoint zero) {
  Scheme scheme = with_groups(dtype, zero);
  OperandQuant w = scheme.weight;
  w.super_bits = 8;
  if (dtype == DType::kI8) w.code_bits = 6;
  return with_weight(scheme, w);
}

TEST(Int8Groups, IntegerInputsAreExactOnEveryBackend) {
  for (const Scheme& scheme :
       {with_groups(DType::kI4, ZeroPoint::kNone), with_groups(DType::kU4, ZeroPoint::kInteger),
        with_groups(DType::kU4, ZeroPoint::kMin), with_groups(DType::kI8, ZeroPoint::kNone),
        with_groups(DType::kU8, ZeroPoint::kInteger), held_as_in_files(DType::kU4, ZeroPoint::kMin),
        held_as_in_files(DType::kI8, ZeroPoint::kNone),
        held_as_in_files(DType::kI8, ZeroPoint::kMin)}) {
    for (const std::int64_t tokens : {1, 4, 40}) {
      const test::StandardCase c = exact_case(scheme, tokens);
      const std::vector<double> want = c.oracle(true);
      double energy = 0;
      for (const double v : want) energy += v * v;
      ASSERT_GT(energy, 0);
      int backends = 0;
      for (const CandidateReport& report : explain_experts(c.problem)) {
        if (!report.accepted) continue;
        ++backends;
        const auto experts = test::make_backend(report.name, c);
        const Tensor y = test::run_standard(*experts, c, DType::kF32);
        for (std::size_t i = 0; i < want.size(); ++i) {
          ASSERT_EQ(static_cast<double>(y.as<float>()[i]), want[i])
              << report.name << " " << dtype_name(scheme.weight.dtype) << " tokens " << tokens
              << " element " << i;
        }
      }
      EXPECT_GE(backends, 2);
    }
  }
}

// The definition: no rounding of a group depends on its neighbours, and a row of zeros is zero.
TEST(Int8Groups, AnOutlierStaysInItsGroup) {
  const Scheme scheme = with_groups(DType::kI4, ZeroPoint::kNone);
  test::StandardCase c = exact_case(scheme, 4);
  // Group 1 of token 2 a thousand times as large: what w13 makes of group 0 keeps its last digits
  // where the weights of group 1 are zero.
  Tensor& w = c.weights.w13;
  for (std::int64_t row = 0; row < kExperts * kInner; ++row)
    std::memset(w.data() + (row * kHidden + kGroup) / 2, 0, kGroup / 2);
  const auto run = [&](std::string_view name) {
    return test::run_standard(*test::make_backend(name, c), c, DType::kF32);
  };
  for (const CandidateReport& report : explain_experts(c.problem)) {
    if (!report.accepted) continue;
    const Tensor before = run(report.name);
    for (std::int64_t k = kGroup; k < kHidden; ++k)
      c.hidden_states.as<std::uint16_t>()[2 * kHidden + k] += 10 << 7;
    const Tensor after = run(report.name);
    std::string why;
    EXPECT_TRUE(test::same_bits(after.view(), before.view(), &why)) << report.name << " " << why;
    for (std::int64_t k = kGroup; k < kHidden; ++k)
      c.hidden_states.as<std::uint16_t>()[2 * kHidden + k] -= 10 << 7;
  }
}

}  // namespace
}  // namespace moesaic
