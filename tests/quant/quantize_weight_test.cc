#include "quant/quantize_weight.h"

#include <gtest/gtest.h>

#include <cmath>
#include <map>
#include <string>

#include "support/refusal.h"
#include "tensors.h"

namespace moesaic {
namespace {

using test::expect_refusal;

// Relative errors on normal data of the weights of every scheme of the catalogue (within 3 % of
// what the formats are known to do): quantised, decoded, compared.
TEST(QuantizeWeight, EverySchemeOfTheCatalogueErrsAsItsFormatDoes) {
  const std::map<std::string, double> errors = {{"f32", 0.0},
                                                {"bf16", 0.00166},
                                                {"f16", 0.00021},
                                                {"fp8-block", 0.0262},
                                                {"fp8-bf16", 0.0262},
                                                {"mxfp4-bf16", 0.112},
                                                {"fp8-tensor", 0.0262},
                                                {"fp8-channel", 0.0262},
                                                {"mxfp8", 0.0266},
                                                {"mxfp4-fp8", 0.112},
                                                {"mxfp4", 0.112},
                                                {"nvfp4", 0.0952},
                                                {"int4-fp8", 0.1147},
                                                {"int8", 0.0078},
                                                {"int4-g128", 0.1103},
                                                {"int8-bf16", 0.0078},
                                                {"nvfp4-bf16", 0.0952},
                                                {"nf4-bf16", 0.0919},
                                                {"int4-g128-int8", 0.1103},
                                                {"int8-g128-int8", 0.0064},
                                                {"mxfp4-int8", 0.112}};
  const Tensor x = test::gaussian();
  for (const Scheme& scheme : quant_schemes()) {
    SCOPED_TRACE(std::string(scheme.name));
    const auto want = errors.find(std::string(scheme.name));
    ASSERT_NE(want, errors.end());
    auto stored = quant::quantize_weight(scheme.weight, x.view(), 128);
    ASSERT_TRUE(stored.ok()) << stored.status().message();
    Tensor back = test::poisoned(DType::kF32, x.shape());
    const Status status = quant::dequantize_weight(scheme.weight, stored->view(), 128, back.view());
    ASSERT_TRUE(status.ok()) << status.message();
    const double got = test::rel_l2(back, x);
    if (want->second == 0.0) {
      EXPECT_EQ(got, 0.0);
    } else {
      EXPECT_NEAR(got / want->second, 1.0, 0.03) << got;
    }
  }
}

// Scales follow the weights however small these are: multiplied with a power of two they err as
// before. F16 has no scale.
TEST(QuantizeWeight, SmallWeightsErrAsLargeOnes) {
  Tensor x = test::gaussian(5);
  for (std::int64_t i = 0; i < 256 * 1024; ++i) x.as<float>()[i] *= 0x1p-60F;
  for (const Scheme& scheme : quant_schemes()) {
    if (scheme.weight.dtype == DType::kF16) continue;
    SCOPED_TRACE(std::string(scheme.name));
    auto stored = quant::quantize_weight(scheme.weight, x.view(), 128);
    ASSERT_TRUE(stored.ok()) << stored.status().message();
    Tensor back = test::poisoned(DType::kF32, x.shape());
    ASSERT_TRUE(quant::dequantize_weight(scheme.weight, stored->view(), 128, back.view()).ok());
    EXPECT_LE(test::rel_l2(back, x), 1.03 * quant::rounding_error(scheme.weight));
  }
}

// A group of zeros (pruned or padded columns) costs the other groups of its row nothing.
TEST(QuantizeWeight, AGroupOfZerosLeavesTheErrorOfItsRow) {
  Tensor x = test::gaussian(4);
  for (std::int64_t i = 0; i < 256 * 1024; ++i) {
    x.as<float>()[i] *= 0x1p-14F;
    if (i % 1024 < 128 || i / 1024 == 7) x.as<float>()[i] = 0.0F;
  }
  for (const char* name : {"int4-fp8", "int4-g128"}) {
    SCOPED_TRACE(name);
    const OperandQuant quant = quant_scheme_from_name(name).value().weight;
    auto stored = quant::quantize_weight(quant, x.view(), 256);
    ASSERT_TRUE(stored.ok()) << stored.status().message();
    Tensor back = test::poisoned(DType::kF32, x.shape());
    ASSERT_TRUE(quant::dequantize_weight(quant, stored->view(), 256, back.view()).ok());
    EXPECT_NEAR(test::rel_l2(back, x) / quant::rounding_error(quant), 1.0, 0.03);
  }
}

TEST(QuantizeWeight, ZeroPointsAndTables) {
  const Tensor x = test::gaussian(3);
  OperandQuant quant;
  quant.dtype = DType::kU4;
  quant.granularity = ScaleGranularity::kGroup;
  quant.scale_format = ScaleFormat::kF32;
  quant.block_k = 128;
  quant.zero_point = ZeroPoint::kInteger;
  const auto error = [&] {
    auto stored = quant::quantize_weight(quant, x.view(), 256);
    EXPECT_TRUE(stored.ok()) << stored.status().message();
    Tensor back = test::poisoned(DType::kF32, x.shape());
    EXPECT_TRUE(quant::dequantize_weight(quant, stored->view(), 256, back.view()).ok());
    return test::rel_l2(back, x);
  };
  EXPECT_NEAR(error() / 0.1004, 1.0, 0.03);
  quant.dtype = DType::kU8;
  quant.granularity = ScaleGranularity::kChannel;
  quant.block_k = 0;
  EXPECT_LT(error(), 0.0078);
  quant.dtype = DType::kU4;
  quant.granularity = ScaleGranularity::kGroup;
  quant.block_k = 64;
  quant.zero_point = ZeroPoint::kNone;
  quant.table = CodeTable::kFp4;
  EXPECT_LT(error(), 0.15);
}

TEST(QuantizeWeight, Misuse) {
  const Tensor x = test::gaussian();
  OperandQuant quant;
  quant.dtype = DType::kU4;
  quant.granularity = ScaleGranularity::kGroup;
  quant.block_k = 32;
  quant.zero_point = ZeroPoint::kMin;
  expect_refusal(quant::quantize_weight(quant, x.view(), 256).status(), StatusCode::kUnsupported,
                 {"quant.weight", "U4", "x32"});
  quant.zero_point = ZeroPoint::kNone;
  quant.table = CodeTable::kIq4Nl;  // read, never written
  expect_refusal(quant::quantize_weight(quant, x.view(), 256).status(), StatusCode::kUnsupported,
                 {"quant.weight", "U4", "x32"});
  quant = {};
  quant.dtype = DType::kF8E5M2;
  expect_refusal(quant::quantize_weight(quant, x.view(), 256).status(), StatusCode::kUnsupported,
                 {"quant.weight", "F8_E5M2"});
  Tensor bad = test::gaussian();
  bad.as<float>()[1025] = INFINITY;
  expect_refusal(quant::quantize_weight(quant_schemes()[0].weight, bad.view(), 256).status(),
                 StatusCode::kInvalidArgument, {"w", "row 1, column 1", "infinity"});
}

}  // namespace
}  // namespace moesaic
