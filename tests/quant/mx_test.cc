#include "quant/mx.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "numerics/codec.h"
#include "support/refusal.h"
#include "tensors.h"

namespace moesaic {
namespace {

using test::expect_refusal;
using test::poisoned;

struct MxGroups {
  Tensor q, scale;
};
MxGroups quantize(const Tensor& x, DType element, ExponentRule rule) {
  MxGroups r{poisoned(element, x.shape()),
             poisoned(DType::kF8E8M0, {x.shape()[0], x.shape()[1] / quant::kMxGroupSize})};
  const Status s = quant::quantize_mx(x.view(), rule, r.q.view(), r.scale.view());
  EXPECT_TRUE(s.ok()) << s.message();
  return r;
}
Tensor dequantize(const MxGroups& r) {
  Tensor out = poisoned(DType::kF32, r.q.shape());
  const Status s = quant::dequantize_mx(r.q.view(), r.scale.view(), out.view());
  EXPECT_TRUE(s.ok()) << s.message();
  return out;
}

TEST(Mx, ScaleBytesByRule) {
  struct Row {
    float amax;
    int round175, ceil6, ceil448;
  };
  for (const Row& r : {Row{7, 128, 128, 121}, Row{6.99F, 127, 128, 121}, Row{6, 127, 127, 121},
                       Row{3.5F, 127, 127, 120}, Row{1, 125, 125, 119}, Row{448, 134, 134, 127},
                       Row{0, 0, 0, 0}}) {
    SCOPED_TRACE(r.amax);
    EXPECT_EQ(quant::mx_scale(r.amax, DType::kF4E2M1, ExponentRule::kRound175), r.round175);
    EXPECT_EQ(quant::mx_scale(r.amax, DType::kF4E2M1, ExponentRule::kCeil), r.ceil6);
    EXPECT_EQ(quant::mx_scale(r.amax, DType::kF8E4M3, ExponentRule::kCeil), r.ceil448);
  }
  EXPECT_EQ(quant::mx_scale(7.0F, DType::kF4E2M1, ExponentRule::kOcpFloor), 127);
  EXPECT_EQ(quant::mx_scale(448.0F, DType::kF8E4M3, ExponentRule::kOcpFloor), 127);
}

TEST(Mx, PublishedBytes) {
  // The values of the published examples, with one more element that fixes the scale.
  std::vector<float> x(32, 0.0F);
  const float head[] = {0, 0.5F, -1, 1.5F, 2, -3, 4, 6};
  std::copy(std::begin(head), std::end(head), x.begin());
  MxGroups r = quantize(test::f32_of({1, 32}, x), DType::kF4E2M1, ExponentRule::kCeil);
  EXPECT_EQ(r.scale.as<std::uint8_t>()[0], 127);
  const std::uint8_t want[] = {0x10, 0x3A, 0xD4, 0x76, 0x00};
  for (int i = 0; i < 5; ++i) EXPECT_EQ(r.q.as<std::uint8_t>()[i], want[i]) << i;

  std::fill(x.begin(), x.end(), 0.0F);
  const float second[] = {0.3F, -0.9F, 2.6F, -5.2F};
  std::copy(std::begin(second), std::end(second), x.begin());
  // Exponent 126 is what OCP-floor gives for 2.6..3.9 (here: the codes of x at that scale).
  std::uint8_t q[16], scale = 0;
  x[4] = 3.0F;
  x[3] = -3.4F;
  quant::ref_quantize_mx_row(x.data(), 32, DType::kF4E2M1, ExponentRule::kOcpFloor, q, &scale);
  EXPECT_EQ(scale, 126);
  EXPECT_EQ(q[0], 0xC1);
  EXPECT_EQ(q[1], 0xF7);  // 2.6 / 0.5 -> 6 is 7; -3.4 / 0.5 saturates at -6
}

TEST(Mx, FollowsTheDefinition) {
  for (const DType element : {DType::kF8E4M3, DType::kF4E2M1}) {
    for (const ExponentRule rule :
         {ExponentRule::kCeil, ExponentRule::kOcpFloor, ExponentRule::kRound175}) {
      test::Rng rng(3);
      const Tensor x = test::random_normal(rng, DType::kBF16, {7, 96}, 5.0);
      const auto values = test::to_doubles(x.view());
      const MxGroups r = quantize(x, element, rule);
      const Tensor back = dequantize(r);
      const bool fp4 = element == DType::kF4E2M1;
      for (std::size_t g = 0; g < 21; ++g) {
        double amax = 0;
        for (std::size_t i = 0; i < 32; ++i) amax = std::max(amax, std::abs(values[g * 32 + i]));
        // The three rules in exact arithmetic.
        const double qmax = fp4 ? 6 : 448;
        const int emax = fp4 ? 2 : 8;
        int exponent = static_cast<int>(std::floor(std::log2(amax))) - emax;
        if (rule == ExponentRule::kCeil)
          exponent = static_cast<int>(std::ceil(std::log2(amax / qmax)));
        if (rule == ExponentRule::kRound175 && amax >= 1.75 * std::exp2(exponent + emax))
          ++exponent;
        ASSERT_EQ(r.scale.as<std::uint8_t>()[g], exponent + 127) << amax;
        for (std::size_t i = g * 32; i < g * 32 + 32; ++i) {
          const auto scaled = static_cast<float>(std::ldexp(values[i], -exponent));
          const float want =
              fp4 ? f32_from_e2m1(e2m1_from_f32(scaled)) : f32_from_e4m3(e4m3_from_f32(scaled));
          ASSERT_EQ(back.as<float>()[i], std::ldexp(want, exponent)) << i;
          if (rule == ExponentRule::kCeil) {
            ASSERT_LE(std::abs(std::ldexp(values[i], -exponent)), qmax);
          }
        }
      }
    }
  }
}

TEST(Mx, ErrorOnNormalDataIsTheFormats) {
  const Tensor x = test::gaussian();
  struct Row {
    DType element;
    ExponentRule rule;
    double error;
  };
  for (const Row& row : {Row{DType::kF8E4M3, ExponentRule::kCeil, 0.0266},
                         Row{DType::kF8E4M3, ExponentRule::kOcpFloor, 0.0292},
                         Row{DType::kF4E2M1, ExponentRule::kRound175, 0.1119},
                         Row{DType::kF4E2M1, ExponentRule::kOcpFloor, 0.1149},
                         Row{DType::kF4E2M1, ExponentRule::kCeil, 0.1154}}) {
    const Tensor back = dequantize(quantize(x, row.element, row.rule));
    EXPECT_NEAR(test::rel_l2(back, x) / row.error, 1.0, 0.02);
    // What was decoded encodes to the same values (the scale may halve, the values stay).
    if (row.rule != ExponentRule::kRound175) {
      std::string why;
      EXPECT_TRUE(test::same_bits(dequantize(quantize(back, row.element, row.rule)).view(),
                                  back.view(), &why))
          << why;
    }
  }
}

TEST(Mx, EdgesOfAGroup) {
  std::vector<float> x(64, 0.0F);
  x[32] = std::numeric_limits<float>::max();
  x[33] = -1e30F;
  Tensor t = test::f32_of({1, 64}, x);
  for (const DType element : {DType::kF8E4M3, DType::kF4E2M1}) {
    const MxGroups r = quantize(t, element, ExponentRule::kCeil);
    EXPECT_EQ(r.scale.as<std::uint8_t>()[0], 0);
    const Tensor back = dequantize(r);
    for (int i = 0; i < 32; ++i) EXPECT_EQ(back.as<float>()[i], 0.0F);
    EXPECT_GT(back.as<float>()[32], 3e38F);
  }
  // So small that the scale byte is 0: the group is zeros, whichever way byte 0 is read.
  std::fill(x.begin(), x.end(), 1e-44F);
  const MxGroups tiny = quantize(test::f32_of({1, 64}, x), DType::kF4E2M1, ExponentRule::kRound175);
  EXPECT_EQ(tiny.scale.as<std::uint8_t>()[0], 0);
  for (const std::uint8_t b : test::bytes_of(tiny.q)) EXPECT_EQ(b, 0);
}

TEST(Mx, Misuse) {
  Tensor x = Tensor::zeros(DType::kF32, {2, 64}).value();
  Tensor q = Tensor::zeros(DType::kF4E2M1, {2, 64}).value();
  Tensor scale = Tensor::zeros(DType::kU8, {2, 2}).value();
  const auto rule = ExponentRule::kCeil;
  EXPECT_TRUE(quant::quantize_mx(x.view(), rule, q.view(), scale.view()).ok());
  Tensor odd = Tensor::zeros(DType::kF32, {2, 48}).value();
  expect_refusal(quant::quantize_mx(odd.view(), rule, q.view(), scale.view()),
                 StatusCode::kInvalidShape, {"x", "[2, 48]", "multiple of 32"});
  expect_refusal(quant::quantize_mx(x.view(), rule, q.view(), poisoned(DType::kU8, {2, 3}).view()),
                 StatusCode::kInvalidShape, {"scale", "[2, 3]", "[2, 2]"});
  expect_refusal(quant::quantize_mx(x.view(), rule, q.view(), poisoned(DType::kF32, {2, 2}).view()),
                 StatusCode::kInvalidDType, {"scale", "F32", "U8"});
  x.as<float>()[65] = std::numeric_limits<float>::infinity();
  expect_refusal(quant::quantize_mx(x.view(), rule, q.view(), scale.view()),
                 StatusCode::kInvalidArgument, {"x", "row 1, column 1", "infinity"});
  scale.as<std::uint8_t>()[3] = 0xFF;
  expect_refusal(quant::dequantize_mx(q.view(), scale.view(), x.view()),
                 StatusCode::kInvalidArgument, {"scale", "row 1, group 1", "NaN"});
}

}  // namespace
}  // namespace moesaic
