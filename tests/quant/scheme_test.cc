#include <gtest/gtest.h>

#include <algorithm>
#include <initializer_list>
#include <set>

#include "moesaic/convert.h"
#include "moesaic/quant.h"
#include "support/refusal.h"

namespace moesaic {
namespace {

using test::expect_refusal;

TEST(QuantSchemes, TableInDocumentedOrder) {
  std::vector<std::string> names;
  for (const Scheme& s : quant_schemes()) names.emplace_back(s.name);
  EXPECT_EQ(names,
            (std::vector<std::string>{
                "f32",        "bf16",       "f16",         "fp8-block",      "fp8-bf16",
                "mxfp4-bf16", "fp8-tensor", "fp8-channel", "mxfp8",          "mxfp4-fp8",
                "mxfp4",      "nvfp4",      "int4-fp8",    "int8",           "int4-g128",
                "int8-bf16",  "nvfp4-bf16", "nf4-bf16",    "int4-g128-int8", "int8-g128-int8",
                "mxfp4-int8"}));
  for (const Scheme& s : quant_schemes()) {
    EXPECT_EQ(quant_scheme_from_name(s.name).value().name, s.name);
    EXPECT_GT(s.output_bound, 0);
    // Only activations of 4 bits cost more than those of 8.
    EXPECT_LE(s.output_bound, s.activation.dtype == DType::kF4E2M1 ? 0.3 : 6e-2);
  }
}

TEST(QuantSchemes, MeaningOfEach) {
  const Scheme block = quant_scheme_from_name("fp8-block").value();
  EXPECT_EQ(block.weight.dtype, DType::kF8E4M3);
  EXPECT_EQ(block.weight.granularity, ScaleGranularity::kBlock);
  EXPECT_EQ(block.weight.scale_format, ScaleFormat::kF32);
  EXPECT_EQ(block.weight.block_n, 128);
  EXPECT_EQ(block.weight.block_k, 128);
  EXPECT_FALSE(block.weight.dynamic);
  EXPECT_EQ(block.activation.dtype, DType::kF8E4M3);
  EXPECT_EQ(block.activation.granularity, ScaleGranularity::kGroup);
  EXPECT_EQ(block.activation.block_n, 1);
  EXPECT_EQ(block.activation.block_k, 128);
  EXPECT_TRUE(block.activation.dynamic);
  EXPECT_FALSE(block.weight_only());

  const Scheme weight_only = quant_scheme_from_name("fp8-bf16").value();
  EXPECT_EQ(weight_only.weight, block.weight);
  EXPECT_EQ(weight_only.activation.dtype, DType::kBF16);
  EXPECT_TRUE(weight_only.weight_only());

  const Scheme mx = quant_scheme_from_name("mxfp4-bf16").value();
  EXPECT_EQ(mx.weight.dtype, DType::kF4E2M1);
  EXPECT_EQ(mx.weight.granularity, ScaleGranularity::kGroup);
  EXPECT_EQ(mx.weight.scale_format, ScaleFormat::kE8M0);
  EXPECT_EQ(mx.weight.block_n, 1);
  EXPECT_EQ(mx.weight.block_k, 32);
  EXPECT_TRUE(mx.weight_only());

  EXPECT_EQ(quant_scheme_from_name("f16").value().weight.dtype, DType::kF16);
  EXPECT_EQ(quant_scheme_from_name("f32").value().activation.dtype, DType::kF32);
}

TEST(QuantSchemes, GroupsAndOuterScalesOfTheFourAndEightBitOnes) {
  struct Row {
    const char* name;
    DType weight, activation;
    std::int64_t weight_group, activation_group;
    OuterScale outer;
    ExponentRule rule;
  };
  using D = DType;
  for (const Row& row : std::vector<Row>{
           {"mxfp8", D::kF8E4M3, D::kF8E4M3, 32, 32, OuterScale::kNone, ExponentRule::kCeil},
           {"mxfp4-fp8", D::kF4E2M1, D::kF8E4M3, 32, 128, OuterScale::kNone, ExponentRule::kNone},
           {"mxfp4", D::kF4E2M1, D::kF4E2M1, 32, 32, OuterScale::kNone, ExponentRule::kRound175},
           {"nvfp4", D::kF4E2M1, D::kF4E2M1, 16, 16, OuterScale::kTensor, ExponentRule::kNone},
           {"int4-fp8", D::kI4, D::kF8E4M3, 128, 0, OuterScale::kChannel, ExponentRule::kNone},
           {"int8", D::kI8, D::kI8, 0, 0, OuterScale::kNone, ExponentRule::kNone},
           {"int4-g128", D::kI4, D::kBF16, 128, 0, OuterScale::kNone, ExponentRule::kNone},
           {"nf4-bf16", D::kU4, D::kBF16, 64, 0, OuterScale::kNone, ExponentRule::kNone},
           {"int4-g128-int8", D::kI4, D::kI8, 128, 128, OuterScale::kNone, ExponentRule::kNone},
           {"int8-g128-int8", D::kI8, D::kI8, 128, 128, OuterScale::kNone, ExponentRule::kNone},
           {"mxfp4-int8", D::kF4E2M1, D::kI8, 32, 32, OuterScale::kNone, ExponentRule::kNone}}) {
    const Scheme s = quant_scheme_from_name(row.name).value();
    EXPECT_EQ(s.weight.dtype, row.weight) << row.name;
    EXPECT_EQ(s.activation.dtype, row.activation) << row.name;
    EXPECT_EQ(s.weight.block_k, row.weight_group) << row.name;
    EXPECT_EQ(s.activation.block_k, row.activation_group) << row.name;
    EXPECT_EQ(s.weight.outer_scale, row.outer) << row.name;
    EXPECT_EQ(s.activation.rule, row.rule) << row.name;
    EXPECT_EQ(s.activation.dynamic, !s.weight_only()) << row.name;
  }
}

TEST(QuantSchemes, EveryNameOfBenchAndConvertIsOfThisTable) {
  std::set<std::string_view> names;
  for (const Scheme& s : quant_schemes()) names.insert(s.name);
  for (const std::string_view name : convert_schemes()) EXPECT_EQ(names.count(name), 1U) << name;
  for (const Scheme& s : stored_schemes()) {
    EXPECT_TRUE(names.insert(s.name).second) << s.name;
    EXPECT_TRUE(validate(s).ok()) << s.name;
    const Status refused = quant_scheme_from_name(s.name).status();
    EXPECT_EQ(refused.code(), StatusCode::kNotFound) << s.name;
    EXPECT_NE(refused.message().find("a format that only files have"), std::string::npos) << s.name;
  }
  EXPECT_EQ(names.size(), quant_schemes().size() + stored_schemes().size());
}

// Activations of int8 have the groups of the weights beside them, 16 to 128 columns.
TEST(QuantSchemes, Int8ActivationsFollowTheGroupsOfStoredWeights) {
  struct Row {
    DType dtype;
    std::int64_t weight_group, activation_group;  // 0: one scale per row
    const char* name;
  };
  for (const Row& row :
       {Row{DType::kI4, 32, 32, "int4-g128-int8"}, Row{DType::kU4, 64, 64, "int4-g128-int8"},
        Row{DType::kU4, 96, 32, "int4-g128-int8"}, Row{DType::kI4, 0, 128, "int4-g128-int8"},
        Row{DType::kI8, 16, 16, "int8-g128-int8"}, Row{DType::kI8, 8, 16, "int8-g128-int8"},
        Row{DType::kI8, 0, 128, "int8-g128-int8"}, Row{DType::kU8, 1024, 128, "int8-g128-int8"}}) {
    SCOPED_TRACE(row.weight_group);
    OperandQuant w;
    w.dtype = row.dtype;
    w.granularity = row.weight_group > 0 ? ScaleGranularity::kGroup : ScaleGranularity::kChannel;
    w.scale_format = ScaleFormat::kF32;
    w.block_n = row.weight_group > 0 ? 1 : 0;
    w.block_k = row.weight_group;
    if (row.dtype == DType::kU4 || row.dtype == DType::kU8) w.zero_point = ZeroPoint::kInteger;
    ASSERT_EQ(int8_group_scheme_of(w), row.name);
    const Scheme named = quant_scheme_from_name(row.name).value();
    const Scheme s = with_stored_weight(named, w);
    EXPECT_EQ(s.weight, w);
    EXPECT_EQ(s.kind, ComputeScheme::kInt8Group);
    EXPECT_EQ(s.output_bound, named.output_bound);
    EXPECT_EQ(s.activation.block_k, row.activation_group);
    EXPECT_EQ(activation_text(s),
              "I8, an F32 scale per " + std::to_string(row.activation_group) + " columns");
    EXPECT_TRUE(validate(s).ok());
  }
  EXPECT_EQ(int8_group_scheme_of(quant_scheme_from_name("mxfp4-bf16")->weight), "mxfp4-int8");
  EXPECT_EQ(int8_group_scheme_of(quant_scheme_from_name("nvfp4-bf16")->weight), "");
  EXPECT_EQ(int8_group_scheme_of(quant_scheme_from_name("nf4-bf16")->weight), "");
  EXPECT_EQ(int8_group_scheme_of(quant_scheme_from_name("int4-fp8")->weight), "");
  EXPECT_EQ(int8_group_scheme_of(quant_scheme_from_name("bf16")->weight), "");
  // Other schemes keep their activations.
  const Scheme int8 = quant_scheme_from_name("int8").value();
  EXPECT_EQ(with_stored_weight(int8, int8.weight).activation, int8.activation);
  // Groups that no weight asks for.
  for (const std::int64_t columns : {8, 256}) {
    const Scheme named = quant_scheme_from_name("int4-g128-int8").value();
    OperandQuant a = named.activation;
    a.block_k = columns;
    EXPECT_EQ(with_activation(named, a).kind, ComputeScheme::kNone) << columns;
  }
}

TEST(QuantSchemes, AnOperandThatNothingComputesIsDescribedAndRefused) {
  OperandQuant odd = quant_scheme_from_name("mxfp4").value().weight;
  odd.block_k = 48;
  const Scheme s = with_weight(quant_scheme_from_name("mxfp4").value(), odd);
  EXPECT_EQ(s.kind, ComputeScheme::kNone);
  EXPECT_EQ(s.weight.block_k, 48);
  // The text is made from the rows of the table.
  expect_refusal(validate(s), StatusCode::kUnsupported,
                 {"quant.weight: got F4 with block 1x48", "F4 with an F8_E8M0 scale per 1x32",
                  "I8 with an F32 scale per row"});
}

TEST(QuantSchemes, Fp8BlocksOfEverySize) {
  const Scheme named = quant_scheme_from_name("fp8-block").value();
  const auto made = [&](std::int64_t n, std::int64_t k, std::int64_t group) {
    OperandQuant w = named.weight, a = named.activation;
    w.block_n = n;
    w.block_k = k;
    a.block_k = group;
    return make_scheme(named.name, w, a, named.output_bound);
  };
  EXPECT_EQ(made(128, 128, 128).kind, ComputeScheme::kFp8Block);
  for (const auto& [n, k] : {std::pair{64, 64}, {32, 128}, {128, 64}, {1, 7}, {1 << 20, 1 << 20}}) {
    const Scheme s = made(n, k, k);
    EXPECT_EQ(s.kind, ComputeScheme::kFp8AnyBlock) << n << "x" << k;
    EXPECT_TRUE(validate(s).ok());
    EXPECT_EQ(with_activation(s, quant_scheme_from_name("bf16")->activation).kind,
              ComputeScheme::kWeightOnly);
    EXPECT_EQ(with_activation_scales(s, ScaleFormat::kE8M0)->kind, ComputeScheme::kFp8AnyBlock);
  }
  EXPECT_EQ(activation_text(made(64, 64, 64)), "F8_E4M3, an F32 scale per 64 columns");
  expect_refusal(
      validate(made(64, 64, 128)), StatusCode::kUnsupported,
      {"quant.activation: got groups of 128 columns", "blocks of 64x64", "groups of 64"});
  expect_refusal(validate(made(128, 128, 64)), StatusCode::kUnsupported,
                 {"got groups of 64 columns", "need groups of 128"});
  expect_refusal(validate(made(0, 64, 64)), StatusCode::kUnsupported,
                 {"F8_E4M3 with block 0x64", "per block of another size"});
}

// One scale of the whole batch would tie a row's result to the rows beside it.
TEST(QuantSchemes, AScaleOfTheWholeBatchIsRefused) {
  for (const char* name : {"fp8-tensor", "int4-fp8", "mxfp4-fp8"}) {
    const Scheme scheme = quant_scheme_from_name(name).value();
    OperandQuant a = scheme.activation;
    a.granularity = ScaleGranularity::kTensor;
    a.scale_format = ScaleFormat::kF32;
    a.block_n = a.block_k = 0;
    expect_refusal(validate(with_activation(scheme, a)), StatusCode::kUnsupported,
                   {"quant.activation", "whole batch", "a scale per token or a stored one"});
    a.dynamic = false;
    EXPECT_TRUE(validate(with_activation(scheme, a)).ok()) << name;
    EXPECT_EQ(activation_text(with_activation(scheme, a)), "F8_E4M3, each expert's stored scale");
  }
}

TEST(QuantSchemes, ActivationScalesOfAnotherFormat) {
  for (const char* name : {"fp8-block", "mxfp4-fp8"}) {
    const Scheme scheme = quant_scheme_from_name(name).value();
    const Scheme powers = with_activation_scales(scheme, ScaleFormat::kE8M0).value();
    const Scheme floats = with_activation_scales(powers, ScaleFormat::kF32).value();
    EXPECT_EQ(powers.activation.scale_format, ScaleFormat::kE8M0);
    EXPECT_EQ(floats.activation.scale_format, ScaleFormat::kF32);
    EXPECT_TRUE(validate(powers).ok() && validate(floats).ok());
    EXPECT_EQ(powers.kind, scheme.kind);
    EXPECT_EQ(activation_text(powers), "F8_E4M3, a power of two per 128 columns");
    EXPECT_EQ(activation_text(floats), "F8_E4M3, an F32 scale per 128 columns");
    expect_refusal(with_activation_scales(scheme, ScaleFormat::kE4M3).status(),
                   StatusCode::kUnsupported, {"activation_scales: got E4M3", "F32 or E8M0"});
  }
  for (const char* name : {"bf16", "fp8-bf16", "fp8-channel", "mxfp8", "nvfp4", "int8"}) {
    const Scheme scheme = quant_scheme_from_name(name).value();
    expect_refusal(with_activation_scales(scheme, ScaleFormat::kE8M0).status(),
                   StatusCode::kUnsupported, {"activation_scales", name, "fp8-block"});
  }
}

TEST(QuantSchemes, FormsMustFitTheWeights) {
  const auto schemes = stored_schemes();
  const auto mixed = std::find_if(schemes.begin(), schemes.end(),
                                  [](const Scheme& s) { return s.name == "q4_k_m"; });
  ASSERT_NE(mixed, schemes.end());
  ASSERT_TRUE(mixed->forms.has_value());
  EXPECT_TRUE(validate(*mixed).ok());
  const auto refused = [&](auto change, std::initializer_list<const char*> words) {
    Scheme s = *mixed;
    change(s);
    expect_refusal(validate(s), StatusCode::kInvalidArgument, words);
  };
  refused([](Scheme& s) { s.forms->w13.block_k = 24; }, {"quant.forms.w13", "groups of 24", "16"});
  refused([](Scheme& s) { s.forms->w2.dtype = DType::kU8; }, {"quant.forms.w2: got U8", "I8"});
  refused([](Scheme& s) { s.forms->w13.zero_point = ZeroPoint::kInteger; }, {"quant.forms.w13"});
  refused([](Scheme& s) { s.forms->w2.act_order = true; }, {"quant.forms.w2"});
  refused([](Scheme& s) { s.forms->w2 = quant_scheme_from_name("mxfp8").value().weight; },
          {"quant.forms.w2: got F8_E4M3"});
  // Minima where the weights have none.
  Scheme plain = quant_scheme_from_name("int8-g128-int8").value();
  plain.forms = MatrixForms{plain.weight, plain.weight};
  EXPECT_TRUE(validate(plain).ok());
  plain.forms->w2.zero_point = ZeroPoint::kMin;
  expect_refusal(validate(plain), StatusCode::kInvalidArgument, {"quant.forms.w2"});
  EXPECT_TRUE(with_activation(*mixed, mixed->activation).forms == mixed->forms);
  EXPECT_FALSE(with_weight(*mixed, mixed->weight).forms.has_value());
}

TEST(QuantSchemes, OtherNamesAreNotFound) {
  expect_refusal(quant_scheme_from_name("fp8-blok").status(), StatusCode::kNotFound,
                 {"fp8-blok", "nearest is \"fp8-block\""});
  expect_refusal(quant_scheme_from_name("BF16").status(), StatusCode::kNotFound, {"BF16", "bf16"});
  expect_refusal(quant_scheme_from_name("").status(), StatusCode::kNotFound, {"f32, bf16"});
}

}  // namespace
}  // namespace moesaic
