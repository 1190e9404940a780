// Values of GateLinear: worked example, bounds against float64, and what must not change a bit.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdlib>
#include <optional>
#include <string>
#include <vector>

#include "cpu/tiers.h"
#include "gate/reference/gate.h"
#include "moesaic/gate.h"
#include "numerics/codec.h"
#include "support/metrics.h"
#include "support/random.h"

namespace moesaic {
namespace {

using enum DType;

Tensor make(DType dtype, const Shape& shape, const std::vector<float>& values) {
  Tensor t = Tensor::zeros(dtype, shape).value();
  for (std::size_t i = 0; i < values.size(); ++i) {
    store_from_f32(t.data(), dtype, static_cast<std::int64_t>(i), values[i]);
  }
  return t;
}

GateLinear gate(const Tensor& weight, GateLinear::Options options = {}, ConstTensorView bias = {}) {
  return GateLinear::create(weight.view(), bias, options).value();
}

GateLinear::Options in_threads(int threads) {
  GateLinear::Options o;
  o.num_threads = threads;
  return o;
}

GateLinear::Options rounded_to(DType dtype) {
  GateLinear::Options o;
  o.logits_dtype = dtype;
  return o;
}

// Runs forward into a poisoned tensor of logits_dtype.
Tensor run(const GateLinear& g, ConstTensorView x) {
  Tensor logits = Tensor::uninitialized(g.logits_dtype(), {x.dim(0), g.num_experts()}).value();
  test::poison(logits.view());
  const Status s = g.forward(x, logits.view());
  EXPECT_TRUE(s.ok()) << s.to_string();
  return logits;
}

// Runs the body once per instruction-set tier of this machine. The gate takes the tier when it is
// made, so gates are made inside.
template <class Body>
void for_each_tier(Body&& body) {
  for (const cpu::TierInfo& tier : cpu::cpu_tiers()) {
    if (!tier.available) continue;
    ASSERT_EQ(setenv("MOESAIC_CPU_TIER", std::string(tier.name).c_str(), 1), 0);
    SCOPED_TRACE(tier.name);
    body();
  }
  ASSERT_EQ(unsetenv("MOESAIC_CPU_TIER"), 0);
}

// The kernel table that the environment names for the experts is the gate's too.
TEST(GateLinear, RunsOnTheTierThatTheEnvironmentNames) {
  test::Rng rng(21);
  const std::int64_t m = 5, e = 7, h = 4099;
  const Tensor x = test::random_normal(rng, kF32, {m, h});
  const Tensor w = test::random_normal(rng, kF32, {e, h});
  std::vector<Tensor> results;
  for_each_tier([&] {
    Tensor want = Tensor::zeros(kF32, {m, e}).value();
    cpu::GateOperands op;
    op.x = x.data();
    op.weight = w.data();
    op.x_row_bytes = h * 4;
    op.hidden_size = h;
    const char* name = std::getenv("MOESAIC_CPU_TIER");
    const cpu::CpuKernels* kernels = cpu::kernels_by_name(name).value();
    kernels->gate_logits(op, {0, m, 0, e, want.as<float>(), e});
    const Tensor got = run(gate(w), x.view());
    std::string why;
    EXPECT_TRUE(test::same_bits(got.view(), want.view(), &why)) << why;
    results.push_back(std::move(want));
  });
  ASSERT_EQ(setenv("MOESAIC_CPU_TIER", "nonsense", 1), 0);
  EXPECT_EQ(GateLinear::create(w.view(), {}, {}).status().code(), StatusCode::kNotFound);
  ASSERT_EQ(unsetenv("MOESAIC_CPU_TIER"), 0);
  if (results.size() < 2) GTEST_SKIP() << "one tier on this machine";
#if defined(__aarch64__)
  GTEST_SKIP() << "the tiers have the same vectors here";
#endif
  std::string why;
  EXPECT_FALSE(test::same_bits(results.front().view(), results.back().view(), &why))
      << "the tiers' vectors have different lengths, so the check above would notice another tier";
}

// Worked example W1: rounding logits to bf16 makes a near-tie a tie, fp32 keeps them apart.
TEST(GateLinear, WorkedExampleNearTie) {
  const Tensor x = make(kBF16, {1, 2}, {1.0F, 0.0625F});
  const Tensor w = make(kBF16, {2, 2}, {1.0F, 0.091796875F, 1.0F, 0.09375F});
  const auto logits = [&](const GateLinear::Options& options) {
    return test::to_doubles(run(gate(w, options), x.view()).view());
  };
  EXPECT_EQ(logits({}), (std::vector<double>{1.0057373046875, 1.005859375}));
  EXPECT_EQ(logits(rounded_to(kBF16)), (std::vector<double>{1.0078125, 1.0078125}));
}

// Integers: every partial sum is exact, so every tier, dtype and order must agree by bits.
TEST(GateLinear, ExactIntegersInEveryDTypeAndTier) {
  test::Rng rng(11);
  for (const DType xt : {kF32, kBF16, kF16}) {
    for (const DType wt : {kF32, kBF16, kF16}) {
      for (const std::int64_t h : {1, 3, 15, 16, 17, 40, 67}) {
        const Tensor x = test::random_integers(rng, xt, {6, h}, 8);
        const Tensor w = test::random_integers(rng, wt, {7, h}, 8);
        std::vector<double> want(42);
        gate::ref_gate_logits(x.view(), w.view(), {}, want.data(), nullptr);
        for_each_tier([&] {
          EXPECT_EQ(test::to_doubles(run(gate(w), x.view()).view()), want)
              << dtype_name(xt) << " " << dtype_name(wt) << " H=" << h;
        });
      }
    }
  }
}

TEST(GateLinear, StaysInsideTheBoundOnEveryTier) {
  test::Rng rng(12);
  double worst = 0;
  for (const DType xt : {kF32, kBF16, kF16}) {
    for (const DType wt : {kF32, kBF16, kF16}) {
      const std::int64_t m = 9, e = 37, h = 1037;
      const Tensor x = test::random_normal(rng, xt, {m, h});
      const Tensor w = test::random_normal(rng, wt, {e, h}, 1 / std::sqrt(1037.0));
      const Tensor bias = test::random_normal(rng, kF32, {e});
      std::vector<double> want(static_cast<std::size_t>(m * e)), magnitude(want.size());
      gate::ref_gate_logits(x.view(), w.view(), bias.view(), want.data(), magnitude.data());
      for_each_tier([&] {
        const auto got = test::to_doubles(run(gate(w, {}, bias.view()), x.view()).view());
        for (std::size_t i = 0; i < want.size(); ++i) {
          const double bound = static_cast<double>(h + 1) * 0x1p-24 * magnitude[i];
          ASSERT_LE(std::abs(got[i] - want[i]), bound) << i;
          worst = std::max(worst, std::abs(got[i] - want[i]) / bound);
        }
        EXPECT_LT(test::compare(got, want).rel_l2, 1e-6) << test::compare(got, want).describe;
      });
    }
  }
  RecordProperty("worst_ratio", std::to_string(worst));
}

// Special values: what f16 and bf16 codes mean is decided by the scalar codecs.
TEST(GateLinear, EverySixteenBitCodeIsReadAsTheCodecSays) {
  for (const DType dtype : {kBF16, kF16}) {
    Tensor x = Tensor::zeros(dtype, {65536, 1}).value();
    for (std::int64_t i = 0; i < 65536; ++i) {
      x.as<std::uint16_t>()[i] = static_cast<std::uint16_t>(i);
    }
    Tensor row = Tensor::zeros(dtype, {1, 64}).value();  // long enough for the vector path
    const Tensor one = make(kF32, {1, 1}, {1.0F});
    const Tensor ones = make(kF32, {1, 64}, std::vector<float>(64, 1.0F));
    for_each_tier([&] {
      const Tensor tail = run(gate(one), x.view());
      const GateLinear wide = gate(ones);
      int mismatches = 0;
      for (std::int64_t i = 0; i < 65536; ++i) {
        const float want = load_as_f32(x.data(), dtype, i);
        const float got = tail.as<float>()[i];
        mismatches += std::isnan(want) ? !std::isnan(got) : got != want;
        if (i % 37 != 0) continue;
        row.as<std::uint16_t>()[5] = static_cast<std::uint16_t>(i);
        const float vector = run(wide, row.view()).as<float>()[0];
        mismatches += std::isnan(want) ? !std::isnan(vector) : vector != want;
      }
      EXPECT_EQ(mismatches, 0) << dtype_name(dtype);
    });
  }
}

// The bits of a row may depend on that row alone.
TEST(GateLinear, RowsDoNotDependOnBatchStrideOrThreads) {
  test::Rng rng(13);
  const std::int64_t m = 70, e = 45, h = 519;
  const Tensor x = test::random_normal(rng, kBF16, {m, h});
  const Tensor w = test::random_normal(rng, kBF16, {e, h});
  const Tensor all = run(gate(w, in_threads(1)), x.view());
  std::string why;
  for (const int threads : {2, 3, 7}) {
    const Tensor again = run(gate(w, in_threads(threads)), x.view());
    EXPECT_TRUE(test::same_bits(again.view(), all.view(), &why)) << why;
  }
  const GateLinear g = gate(w);
  for (std::int64_t begin = 0; begin < m;) {
    const std::int64_t rows = std::min<std::int64_t>(1 + begin % 6, m - begin);
    const ConstTensorView part(x.data() + begin * h * 2, kBF16, {rows, h});
    const Tensor got = run(g, part);
    const ConstTensorView want(all.data() + begin * e * 4, kF32, {rows, e});
    ASSERT_TRUE(test::same_bits(got.view(), want, &why)) << "rows from " << begin << ": " << why;
    begin += rows;
  }
  // Rows 3 elements further apart than they are long, and an odd start address.
  Tensor wide = Tensor::zeros(kBF16, {m, h + 3}).value();
  test::poison(wide.view());
  for (std::int64_t t = 0; t < m; ++t) {
    std::copy_n(x.as<std::uint16_t>() + t * h, h, wide.as<std::uint16_t>() + t * (h + 3) + 1);
  }
  ConstTensorView strided(wide.data() + 2, kBF16, {m, h});
  strided.strides[0] = h + 3;
  const Tensor got = run(g, strided);
  EXPECT_TRUE(test::same_bits(got.view(), all.view(), &why)) << why;
}

// Each expert is its own column: relabelling experts relabels logits, nothing else.
TEST(GateLinear, PermutingExpertsPermutesLogits) {
  test::Rng rng(14);
  const std::int64_t e = 21, h = 133;
  const Tensor x = test::random_normal(rng, kF32, {5, h});
  const Tensor w = test::random_normal(rng, kF32, {e, h});
  Tensor reversed = Tensor::zeros(kF32, {e, h}).value();
  for (std::int64_t i = 0; i < e; ++i) {
    std::copy_n(w.as<float>() + i * h, h, reversed.as<float>() + (e - 1 - i) * h);
  }
  const Tensor a = run(gate(w), x.view());
  const Tensor b = run(gate(reversed), x.view());
  for (std::int64_t t = 0; t < 5; ++t) {
    for (std::int64_t i = 0; i < e; ++i) {
      ASSERT_EQ(a.as<float>()[t * e + i], b.as<float>()[t * e + (e - 1 - i)]);
    }
  }
}

// Rounded logits are the fp32 ones rounded once, whatever the operands' dtypes.
TEST(GateLinear, LogitsAreRoundedOnce) {
  test::Rng rng(15);
  const std::int64_t m = 40, e = 24, h = 512;
  for (const DType xt : {kF32, kBF16}) {
    for (const DType wt : {kF32, kF16}) {
      const Tensor x = test::random_normal(rng, xt, {m, h});
      const Tensor w = test::random_normal(rng, wt, {e, h}, 0.04);
      const Tensor exact = run(gate(w), x.view());
      for (const DType out : {kBF16, kF16}) {
        const Tensor got = run(gate(w, rounded_to(out)), x.view());
        int different = 0;
        for (std::int64_t i = 0; i < m * e; ++i) {
          const Tensor one = make(out, {1}, {exact.as<float>()[i]});
          ASSERT_EQ(load_as_f32(got.data(), out, i), load_as_f32(one.data(), out, 0)) << i;
          different += load_as_f32(got.data(), out, i) != exact.as<float>()[i];
        }
        EXPECT_GT(different, m * e / 2);
      }
    }
  }
}

GateLinear::Options in_the_weights_dtype(std::optional<DType> logits_dtype) {
  GateLinear::Options o;
  o.logits_dtype = logits_dtype;
  o.force_fp32_compute = false;
  return o;
}

// The linear of a framework that returns its weight's dtype: F32 logits that are bf16 numbers.
TEST(GateLinear, ALinearInTheWeightsDTypeIsRoundedToItFirst) {
  const Tensor x = make(kBF16, {1, 2}, {1.0F, 0.0625F});
  const Tensor w = make(kBF16, {2, 2}, {1.0F, 0.091796875F, 1.0F, 0.09375F});
  const auto logits = [&](const GateLinear::Options& options) {
    return test::to_doubles(run(gate(w, options), x.view()).view());
  };
  const std::vector<double> tie{1.0078125, 1.0078125};
  EXPECT_EQ(logits(in_the_weights_dtype(kF32)), tie);
  EXPECT_EQ(logits(in_the_weights_dtype(kBF16)), tie);
  EXPECT_EQ(logits(in_the_weights_dtype(kF16)), tie);

  // 1 + 2^-8 + 2^-20: to bf16 it rounds up, but by way of f16 it is 1 + 2^-8, a tie that goes down.
  const Tensor ones = make(kF16, {1, 2}, {1.0F, 1.0F});
  const Tensor sum = make(kF16, {1, 2}, {1.0F + 0x1p-8F, 0x1p-20F});
  const auto one = [&](const GateLinear::Options& options) {
    return test::to_doubles(run(gate(sum, options), ones.view()).view()).front();
  };
  EXPECT_EQ(one(rounded_to(kBF16)), 1 + 0x1p-7);
  EXPECT_EQ(one(in_the_weights_dtype(kBF16)), 1.0);
  EXPECT_EQ(one(in_the_weights_dtype(kF32)), 1 + 0x1p-8);
  // The bias is in the sum that is rounded: 1 + 2^-8 alone would have gone to 1.
  const Tensor bias = make(kF32, {1}, {0x1p-12F});
  const Tensor narrow = make(kBF16, {1, 2}, {1.0F, 0x1p-8F}), units = make(kBF16, {1, 2}, {1, 1});
  const GateLinear biased = gate(narrow, in_the_weights_dtype(kF32), bias.view());
  EXPECT_EQ(test::to_doubles(run(biased, units.view()).view()).front(), 1 + 0x1p-7);

  // An F32 weight has nothing to be rounded to, and takes rows of every dtype.
  test::Rng rng(31);
  const Tensor wide = test::random_normal(rng, kF32, {5, 40});
  for (const DType dtype : {kF32, kBF16, kF16}) {
    const Tensor rows = test::random_normal(rng, dtype, {3, 40});
    std::string why;
    EXPECT_TRUE(test::same_bits(run(gate(wide, in_the_weights_dtype(kF32)), rows.view()).view(),
                                run(gate(wide), rows.view()).view(), &why))
        << why;
  }
}

TEST(GateLinear, TheLogitsDTypeMayBeSetOnceAndLater) {
  const Tensor w = make(kBF16, {1, 2}, {1.0F, 0.0625F});
  const Tensor x = make(kBF16, {1, 2}, {1.0F, 0.091796875F});
  GateLinear::Options unset;
  unset.logits_dtype = std::nullopt;
  GateLinear g = gate(w, unset);
  EXPECT_EQ(g.logits_dtype(), kF32);
  ASSERT_TRUE(g.set_logits_dtype(kBF16).ok());
  EXPECT_EQ(g.logits_dtype(), kBF16);
  EXPECT_EQ(test::to_doubles(run(g, x.view()).view()).front(), 1.0078125);
  EXPECT_EQ(g.set_logits_dtype(kBF16).code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(gate(w).set_logits_dtype(kF32).code(), StatusCode::kInvalidArgument);

  GateLinear own = gate(w, in_the_weights_dtype(std::nullopt));
  EXPECT_EQ(own.logits_dtype(), kBF16) << "the linear's";
  EXPECT_EQ(test::to_doubles(run(own, x.view()).view()).front(), 1.0078125);
  ASSERT_TRUE(own.set_logits_dtype(kF32).ok());
  EXPECT_EQ(test::to_doubles(run(own, x.view()).view()).front(), 1.0078125);
}

TEST(GateLinear, BiasOfAnyDTypeEntersBeforeRounding) {
  const Tensor x = make(kBF16, {1, 1}, {1.0F});
  const Tensor w = make(kBF16, {2, 1}, {1.0F, 2.0F});
  for (const DType bias_dtype : {kF32, kBF16, kF16}) {
    const Tensor bias = make(bias_dtype, {2}, {0.25F, -4.0F});
    const auto got = test::to_doubles(run(gate(w, {}, bias.view()), x.view()).view());
    EXPECT_EQ(got, (std::vector<double>{1.25, -2.0}));
  }
  // 1 + 2^-8 + 2^-9 rounds up in bf16; rounding 1 first and the bias on its own would lose it.
  const Tensor bias = make(kF32, {2}, {0x1p-8F + 0x1p-9F, 0.0F});
  const auto got = test::to_doubles(run(gate(w, rounded_to(kBF16), bias.view()), x.view()).view());
  EXPECT_EQ(got[0], 1.0 + 0x1p-7);
}

TEST(GateLinear, ZeroTokens) {
  const Tensor w = make(kBF16, {3, 4}, std::vector<float>(12, 1.0F));
  const GateLinear g = gate(w);
  const ConstTensorView x(nullptr, kBF16, {0, 4});
  EXPECT_TRUE(g.forward(x, TensorView(nullptr, kF32, {0, 3})).ok());
  EXPECT_EQ(g.forward(x, TensorView(nullptr, kBF16, {0, 3})).code(), StatusCode::kInvalidDType);
  EXPECT_EQ(g.forward(x, TensorView(nullptr, kF32, {0, 4})).code(), StatusCode::kInvalidShape);
}

TEST(GateLinear, NonFiniteInputsPropagate) {
  const float inf = std::numeric_limits<float>::infinity();
  const Tensor x = make(kF32, {2, 2}, {std::nanf(""), 1.0F, inf, 1.0F});
  const Tensor w = make(kF32, {2, 2}, {1.0F, 1.0F, -1.0F, 1.0F});
  const Tensor got = run(gate(w), x.view());
  EXPECT_TRUE(std::isnan(got.as<float>()[0]));
  EXPECT_TRUE(std::isnan(got.as<float>()[1]));
  EXPECT_EQ(got.as<float>()[2], inf);
  EXPECT_EQ(got.as<float>()[3], -inf);
}

}  // namespace
}  // namespace moesaic
