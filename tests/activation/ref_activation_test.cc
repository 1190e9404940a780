#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "activation/reference/activation.h"
#include "support/metrics.h"
#include "support/random.h"
#include "support/special_values.h"

namespace moesaic {
namespace {

using test::kInf;

ActivationSpec spec(ActivationKind kind, float limit = kInf, float alpha = 1, float beta = 0,
                    float up_limit = 0) {
  return {kind, limit, alpha, beta, up_limit};
}
const ActivationSpec kOai = spec(ActivationKind::kSwigluOai, 7, 1.702F, 1);

// Every spec that the tests below sweep: each kind, with and without its constants.
std::vector<ActivationSpec> all_specs() {
  return {
      spec(ActivationKind::kSilu),
      spec(ActivationKind::kSilu, 1.5F),
      spec(ActivationKind::kGelu),
      spec(ActivationKind::kGeluTanh),
      spec(ActivationKind::kSwigluOai, 1.5F, 1.702F, 1),
      spec(ActivationKind::kSwigluStep, 1.0F),
      spec(ActivationKind::kSitu, kInf, 1, 4),
      spec(ActivationKind::kSitu, kInf, 1, 4, 25),
      spec(ActivationKind::kSiluNoMul),
      spec(ActivationKind::kGeluNoMul),
      spec(ActivationKind::kGeluTanhNoMul),
      spec(ActivationKind::kRelu2NoMul),
  };
}

// Printed with six decimals: half a unit of the last one.
constexpr double kPrinted = 0.5e-6;

TEST(RefActivation, WorkedTable) {
  const double points[4][2] = {{1, 2}, {-1, 2}, {8, -9}, {10, 3}};
  struct Column {
    ActivationSpec s;
    double want[4];
  };
  const Column columns[] = {
      {spec(ActivationKind::kSilu), {1.462117, -0.537883, -71.975855, 29.998638}},
      {spec(ActivationKind::kGelu), {1.682689, -0.317311, -72.0, 30.0}},
      {spec(ActivationKind::kGeluTanh), {1.682384, -0.317616, -72.0, 30.0}},
      {kOai, {2.537387, -0.462613, -41.999719, 27.999813}},
      {spec(ActivationKind::kSilu, 7), {1.462117, -0.537883, -48.955358, 20.980868}},
      {spec(ActivationKind::kSwigluStep, 7), {1.462117, -0.537883, -49.0, 21.0}},
      {spec(ActivationKind::kSitu, kInf, 1, 4), {1.432399, -0.526950, -34.693355, 11.838834}},
      {spec(ActivationKind::kSitu, kInf, 1, 4, 25), {1.429351, -0.525829, -33.268425, 11.782333}},
  };
  for (const Column& column : columns) {
    for (int i = 0; i < 4; ++i) {
      SCOPED_TRACE(std::string(activation_name(column.s.kind)) + " point " + std::to_string(i));
      const double want = column.want[i];
      EXPECT_NEAR(activation::ref_activate<double>(column.s, points[i][0], points[i][1]), want,
                  kPrinted);
      const auto got = activation::ref_activate(column.s, static_cast<float>(points[i][0]),
                                                static_cast<float>(points[i][1]));
      EXPECT_NEAR(got, want, kPrinted + 4e-7 * std::abs(want));
    }
  }
}

TEST(RefActivation, WorkedPointwise) {
  const double x[] = {-2, 0.5, 3};
  const double silu[] = {-0.238406, 0.311230, 2.857722};
  const double gelu[] = {-0.045500, 0.345731, 2.995950};
  const double gelu_tanh[] = {-0.045402, 0.345714, 2.996363};
  const double relu2[] = {0, 0.25, 9};
  for (int i = 0; i < 3; ++i) {
    EXPECT_NEAR(activation::ref_activate(spec(ActivationKind::kSiluNoMul), x[i], 0.0), silu[i],
                kPrinted);
    EXPECT_NEAR(activation::ref_activate(spec(ActivationKind::kGeluNoMul), x[i], 0.0), gelu[i],
                kPrinted);
    EXPECT_NEAR(activation::ref_activate(spec(ActivationKind::kGeluTanhNoMul), x[i], 0.0),
                gelu_tanh[i], kPrinted);
    EXPECT_EQ(activation::ref_activate(spec(ActivationKind::kRelu2NoMul), x[i], 0.0), relu2[i]);
  }
}

TEST(RefActivation, PublishedVectors) {
  EXPECT_NEAR(activation::ref_activate(spec(ActivationKind::kSilu), 2.0, 3.0), 5.284782, kPrinted);
  // The fp32 constant 1.702 differs from the decimal one by 7e-9.
  EXPECT_NEAR(activation::ref_activate(kOai, 2.0, 3.0), 7.742634, kPrinted + 1e-8);
  EXPECT_NEAR(activation::ref_activate(kOai, 9.0, -9.0), -41.999719, kPrinted);
  EXPECT_NEAR(activation::ref_activate(spec(ActivationKind::kSilu, 7), 9.0, -9.0), -48.955358,
              kPrinted);
  EXPECT_EQ(activation::ref_activate(spec(ActivationKind::kSwigluStep, 7), 9.0, -9.0), -49.0);
  EXPECT_EQ(activation::ref_activate(spec(ActivationKind::kSwigluStep, 7), 9.0F, -9.0F), -49.0F);
  EXPECT_NEAR(activation::ref_activate(spec(ActivationKind::kSwigluStep, 7), 7.005, 1.0), 6.998650,
              kPrinted);
  EXPECT_NEAR(activation::ref_activate(spec(ActivationKind::kSilu, 7), 7.005, 1.0), 6.993623,
              kPrinted);
}

TEST(RefActivation, LayoutsReadTheirColumns) {
  const float row[] = {1, 2, -1, 2};
  float out[2];
  activation::ref_activation(kOai, GateUpLayout::kInterleaved, row, out, 2);
  EXPECT_NEAR(out[0], 2.537387, 1e-6);
  EXPECT_NEAR(out[1], -0.462613, 1e-6);
  activation::ref_activation(kOai, GateUpLayout::kGateThenUp, row, out, 2);
  EXPECT_EQ(out[0], 0.0F);
  EXPECT_NEAR(out[1], 5.806976, 2e-6);
  // Halves swapped in data and in layout: the same bits.
  const float swapped[] = {-1, 2, 1, 2};
  float other[2];
  activation::ref_activation(kOai, GateUpLayout::kUpThenGate, swapped, other, 2);
  EXPECT_EQ(out[0], other[0]);
  EXPECT_EQ(out[1], other[1]);
}

TEST(RefActivation, GateIsClampedFromAboveOnly) {
  const ActivationSpec silu7 = spec(ActivationKind::kSilu, 7);
  EXPECT_EQ(activation::ref_activate(silu7, -20.0, 1.0),
            activation::ref_activate(spec(ActivationKind::kSilu), -20.0, 1.0));
  EXPECT_NE(activation::ref_activate(silu7, -20.0, 1.0),
            activation::ref_activate(silu7, -7.0, 1.0));
  EXPECT_EQ(activation::ref_activate(silu7, 20.0, 1.0), activation::ref_activate(silu7, 7.0, 1.0));
  EXPECT_EQ(activation::ref_activate(silu7, 1.0, -20.0),
            activation::ref_activate(silu7, 1.0, -7.0));
  EXPECT_EQ(activation::ref_activate(silu7, 1.0, 20.0), activation::ref_activate(silu7, 1.0, 7.0));
}

TEST(RefActivation, GenericGateContainsSilu) {
  test::Rng rng(5);
  const ActivationSpec generic = spec(ActivationKind::kSwigluOai, kInf, 1, 0);
  for (int i = 0; i < 1000; ++i) {
    const double g = 3 * rng.normal();
    const double u = 3 * rng.normal();
    EXPECT_DOUBLE_EQ(activation::ref_activate(generic, g, u),
                     activation::ref_activate(spec(ActivationKind::kSilu), g, u));
  }
}

// Against the formulas written as published, in float64 (the code uses forms that do not cancel).
TEST(RefActivation, GeluEqualsThePublishedForms) {
  for (double x = -6; x <= 6; x += 0.01) {
    const double erf_form = 0.5 * x * (1 + std::erf(x / std::sqrt(2.0)));
    const double y = std::sqrt(2 / std::acos(-1.0)) * (x + 0.044715 * x * x * x);
    const double tanh_form = 0.5 * x * (1 + std::tanh(y));
    EXPECT_NEAR(activation::ref_activate(spec(ActivationKind::kGeluNoMul), x, 0.0), erf_form,
                1e-15);
    EXPECT_NEAR(activation::ref_activate(spec(ActivationKind::kGeluTanhNoMul), x, 0.0), tanh_form,
                1e-15);
  }
}

TEST(RefActivation, Fp32FollowsFloat64) {
  constexpr std::int64_t kWidth = 4096;
  for (const ActivationSpec& s : all_specs()) {
    SCOPED_TRACE(activation_name(s.kind));
    test::Rng rng(17);
    const bool gated = is_gated(s.kind);
    const auto layout = gated ? GateUpLayout::kGateThenUp : GateUpLayout::kNonGated;
    std::vector<float> in(static_cast<std::size_t>(gated ? 2 * kWidth : kWidth));
    for (float& x : in) x = static_cast<float>(rng.normal());
    const std::vector<double> in64(in.begin(), in.end());
    std::vector<float> out(kWidth);
    std::vector<double> want(kWidth);
    test::poison(out.data(), kWidth * 4);
    activation::ref_activation(s, layout, in.data(), out.data(), kWidth);
    activation::ref_activation_f64(s, layout, in64.data(), want.data(), kWidth);
    const std::vector<double> got(out.begin(), out.end());
    const test::Comparison c = test::compare(got, want);
    EXPECT_LE(c.rel_l2, 2e-7) << c.describe;  // about three fp32 roundings
  }
}

TEST(RefActivation, InPlaceGivesTheSameBits) {
  for (const ActivationSpec& s : all_specs()) {
    for (const GateUpLayout layout : {GateUpLayout::kGateThenUp, GateUpLayout::kUpThenGate,
                                      GateUpLayout::kInterleaved, GateUpLayout::kNonGated}) {
      if (is_gated(s.kind) == (layout == GateUpLayout::kNonGated)) continue;
      test::Rng rng(23);
      std::vector<float> row(66);
      for (float& x : row) x = static_cast<float>(rng.normal());
      std::vector<float> out(33);
      activation::ref_activation(s, layout, row.data(), out.data(), 33);
      activation::ref_activation(s, layout, row.data(), row.data(), 33);
      for (std::size_t i = 0; i < 33; ++i) EXPECT_EQ(row[i], out[i]);
    }
  }
}

TEST(RefActivation, NanAndLargeInputs) {
  const double nan = std::nan("");
  for (const ActivationSpec& s : all_specs()) {
    SCOPED_TRACE(activation_name(s.kind));
    EXPECT_TRUE(std::isnan(activation::ref_activate(s, nan, 1.0)));
    if (is_gated(s.kind)) {
      EXPECT_TRUE(std::isnan(activation::ref_activate(s, 1.0, nan)));
    }
    // exp overflows on the way, the result must not.
    EXPECT_TRUE(std::isfinite(activation::ref_activate(s, -1e4F, 2.0F)));
    EXPECT_TRUE(std::isfinite(activation::ref_activate(s, 1e4F, 2.0F)));
  }
}

}  // namespace
}  // namespace moesaic
