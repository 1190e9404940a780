#include "layer/quant_selection.h"

#include <gtest/gtest.h>

namespace moesaic {
namespace {

Scheme scheme(std::string_view name) { return quant_scheme_from_name(name).value(); }

struct Row {
  const char *stored, *requested;
  const char* in_force;  // nullptr: refused
  DType weight, activation_dtype;
  layer::LoadConversion conversion;
};

TEST(QuantSelection, EveryPairOfStoredAndRequested) {
  using C = layer::LoadConversion;
  constexpr DType f32 = DType::kF32, bf16 = DType::kBF16, f16 = DType::kF16, fp8 = DType::kF8E4M3;
  const Row rows[] = {
      {"bf16", "as-is", "bf16", bf16, bf16, C::kNone},
      {"bf16", "f32", "f32", bf16, bf16, C::kNone},
      {"bf16", "bf16", "bf16", bf16, bf16, C::kNone},
      {"bf16", "f16", "f16", f16, f16, C::kRound},
      {"bf16", "fp8-block", "fp8-block", fp8, bf16, C::kQuantize},
      {"bf16", "fp8-bf16", "fp8-bf16", fp8, bf16, C::kQuantize},
      {"f32", "as-is", "f32", f32, bf16, C::kNone},
      {"f32", "bf16", "bf16", bf16, bf16, C::kRound},
      {"f16", "as-is", "f16", f16, f16, C::kNone},
      {"f16", "f32", "f32", f16, bf16, C::kNone},
      {"fp8-block", "as-is", "fp8-block", fp8, bf16, C::kNone},
      {"fp8-block", "f32", "f32", fp8, bf16, C::kNone},
      {"fp8-block", "fp8-block", "fp8-block", fp8, bf16, C::kNone},
      {"fp8-block", "fp8-bf16", "fp8-bf16", fp8, bf16, C::kNone},
      {"fp8-block", "bf16", nullptr, {}, {}, {}},
      {"fp8-block", "f16", nullptr, {}, {}, {}},
      {"bf16", "mxfp4", "mxfp4", DType::kF4E2M1, bf16, C::kQuantize},
      {"f32", "nvfp4", "nvfp4", DType::kF4E2M1, bf16, C::kQuantize},
      {"bf16", "int8", "int8", DType::kI8, bf16, C::kQuantize},
      {"f16", "nf4-bf16", "nf4-bf16", DType::kU4, bf16, C::kQuantize},
      {"mxfp4-bf16", "as-is", "mxfp4-bf16", DType::kF4E2M1, bf16, C::kNone},
      {"mxfp4-bf16", "mxfp4-fp8", "mxfp4-fp8", DType::kF4E2M1, bf16, C::kNone},
      {"mxfp4", "as-is", "mxfp4", DType::kF4E2M1, bf16, C::kNone},
      {"mxfp4", "fp8-block", nullptr, {}, {}, {}},
      {"nvfp4", "nvfp4-bf16", "nvfp4-bf16", DType::kF4E2M1, bf16, C::kNone},
      {"nvfp4-bf16", "nvfp4", nullptr, {}, {}, {}},  // has no input scales
      {"nvfp4", "mxfp4", nullptr, {}, {}, {}},
      {"int8", "f32", "f32", DType::kI8, bf16, C::kNone},
      {"int8", "int8-bf16", "int8-bf16", DType::kI8, bf16, C::kNone},
      {"fp8-channel", "as-is", "fp8-channel", fp8, bf16, C::kNone},
      {"fp8-channel", "fp8-block", nullptr, {}, {}, {}},
      {"int4-g128", "as-is", "int4-g128", DType::kI4, bf16, C::kNone},
      {"int4-g128", "int4-g128-int8", "int4-g128-int8", DType::kI4, bf16, C::kNone},
      {"int4-g128", "int8-g128-int8", nullptr, {}, {}, {}},  // the weights have 4 bits
      {"int8-bf16", "int8-g128-int8", "int8-g128-int8", DType::kI8, bf16, C::kNone},
      {"int8", "int8-g128-int8", "int8-g128-int8", DType::kI8, bf16, C::kNone},
      {"int4-g128-int8", "int4-g128", "int4-g128", DType::kI4, bf16, C::kNone},
      {"bf16", "int4-g128-int8", "int4-g128-int8", DType::kI4, bf16, C::kQuantize},
      {"nf4-bf16", "int4-g128-int8", nullptr, {}, {}, {}},
      {"int4-fp8", "int4-g128-int8", nullptr, {}, {}, {}},
      {"mxfp4-bf16", "mxfp4-int8", "mxfp4-int8", DType::kF4E2M1, bf16, C::kNone},
      {"mxfp4-int8", "as-is", "mxfp4-int8", DType::kF4E2M1, bf16, C::kNone},
      {"bf16", "mxfp4-int8", "mxfp4-int8", DType::kF4E2M1, bf16, C::kQuantize},
      {"nvfp4-bf16", "mxfp4-int8", nullptr, {}, {}, {}},
      {"mxfp4-bf16", "int4-g128-int8", nullptr, {}, {}, {}},
      {"bf16", "nonsense", nullptr, {}, {}, {}},
  };
  for (const Row& row : rows) {
    SCOPED_TRACE(std::string(row.stored) + " as " + row.requested);
    const auto plan = layer::plan_quant(scheme(row.stored), DType::kBF16, row.requested);
    ASSERT_EQ(plan.ok(), row.in_force != nullptr);
    if (!plan.ok()) continue;
    EXPECT_EQ(plan->scheme.name, row.in_force);
    EXPECT_EQ(plan->scheme.weight.dtype, row.weight);
    EXPECT_EQ(plan->activation_dtype, row.activation_dtype);
    EXPECT_EQ(plan->conversion, row.conversion);
  }
}

TEST(QuantSelection, RefusalsSayWhatIsStoredAndTheNearestLegalName) {
  const Status status = layer::plan_quant(scheme("fp8-block"), DType::kBF16, "bf16").status();
  EXPECT_EQ(status.code(), StatusCode::kUnsupported);
  EXPECT_NE(status.message().find("got bf16 for weights stored as fp8-block"), std::string::npos)
      << status.message();
  EXPECT_NE(status.message().find("nearest is fp8-bf16"), std::string::npos);
  EXPECT_EQ(layer::plan_quant(scheme("mxfp4"), DType::kBF16, "nvfp4").status().code(),
            StatusCode::kUnsupported);
  EXPECT_EQ(layer::plan_quant(scheme("bf16"), DType::kBF16, "bf61").status().code(),
            StatusCode::kNotFound);
}

TEST(QuantSelection, TheBoundCoversAQuantisationAtLoad) {
  const auto stored = layer::plan_quant(scheme("fp8-block"), DType::kBF16, "fp8-bf16").value();
  const auto at_load = layer::plan_quant(scheme("bf16"), DType::kBF16, "fp8-bf16").value();
  EXPECT_EQ(stored.scheme.output_bound, scheme("fp8-bf16").output_bound);
  EXPECT_GT(at_load.scheme.output_bound, 5e-2);
  // One plain dtype to another: as docs/accuracy.md has it.
  const auto rounded = layer::plan_quant(scheme("f32"), DType::kF32, "bf16").value();
  EXPECT_NEAR(rounded.scheme.output_bound, 7.4e-3, 5e-5);
  const auto halves = layer::plan_quant(scheme("f32"), DType::kF32, "f16").value();
  EXPECT_NEAR(halves.scheme.output_bound, 1.15e-3, 5e-5);
}

TEST(QuantSelection, PlainWeightsBecomeEveryScheme) {
  for (const char* stored : {"f32", "bf16", "f16"}) {
    for (const Scheme& wanted : quant_schemes()) {
      const auto plan = layer::plan_quant(scheme(stored), DType::kBF16, wanted.name);
      ASSERT_TRUE(plan.ok()) << plan.status().to_string();
      EXPECT_EQ(plan->scheme.name, wanted.name);
      EXPECT_EQ(plan->scheme.activation, wanted.activation);
      if (wanted.name != "f32") {
        EXPECT_EQ(plan->scheme.weight, wanted.weight);
      }
      // Only weights that are rounded widen the bound.
      const bool widened = plan->conversion != layer::LoadConversion::kNone;
      EXPECT_EQ(plan->scheme.output_bound > wanted.output_bound, widened) << wanted.name;
      EXPECT_EQ(widened, wanted.name != "f32" && wanted.name != stored) << wanted.name;
    }
  }
}

TEST(QuantSelection, StoredActivationScaleFormatIsKept) {
  Scheme stored = scheme("fp8-block");
  stored.activation.scale_format = ScaleFormat::kE8M0;
  for (const char* requested : {"as-is", "fp8-block"}) {
    EXPECT_EQ(layer::plan_quant(stored, DType::kBF16, requested)->scheme.activation.scale_format,
              ScaleFormat::kE8M0);
  }
}

// GGUF, GPTQ ...: whatever integers a file holds, their groups decide.
TEST(QuantSelection, Int8ActivationsOverStoredIntegers) {
  Scheme q4k = scheme("int4-g128");
  q4k.weight.dtype = DType::kU4;
  q4k.weight.block_k = 32;
  q4k.weight.zero_point = ZeroPoint::kMin;
  const auto plan = layer::plan_quant(q4k, DType::kF16, "int4-g128-int8").value();
  EXPECT_EQ(plan.scheme.weight, q4k.weight);
  EXPECT_EQ(plan.scheme.activation.block_k, 32);
  EXPECT_EQ(plan.scheme.kind, ComputeScheme::kInt8Group);
  EXPECT_EQ(plan.scheme.output_bound, scheme("int4-g128-int8").output_bound);
  EXPECT_EQ(plan.activation_dtype, DType::kF16) << "rounded to the model's dtype first";
  EXPECT_EQ(layer::plan_quant(q4k, DType::kF16, "as-is")->activation_dtype, DType::kBF16);
  const Status status = layer::plan_quant(q4k, DType::kBF16, "int8").status();
  EXPECT_EQ(status.code(), StatusCode::kUnsupported);
  EXPECT_NE(status.message().find("int4-g128-int8"), std::string::npos) << status.message();
  // A shared expert of the other width has a scheme of that width.
  const Scheme int8 = scheme("int8-bf16");
  EXPECT_EQ(layer::plan_shared_quant(int8, q4k, DType::kBF16, "int4-g128-int8")->scheme.name,
            "int8-g128-int8");
  EXPECT_EQ(layer::plan_shared_quant(int8, q4k, DType::kBF16, "as-is")->scheme.name, "int8-bf16");
  EXPECT_EQ(
      layer::plan_shared_quant(scheme("bf16"), q4k, DType::kBF16, "int4-g128-int8")->scheme.name,
      "bf16");
}

// Blocks of other sizes keep them, and groups of activations follow.
TEST(QuantSelection, BlocksOfOtherSizesAreKept) {
  Scheme stored = scheme("fp8-block");
  stored.weight.block_n = 32;
  stored.weight.block_k = stored.activation.block_k = 64;
  stored = make_scheme(stored.name, stored.weight, stored.activation, stored.output_bound);
  const auto kind = [&](const Scheme& from, const char* requested) {
    const auto plan = layer::plan_quant(from, DType::kBF16, requested);
    EXPECT_TRUE(plan.ok()) << plan.status().to_string();
    EXPECT_EQ(plan->scheme.weight, stored.weight);
    EXPECT_EQ(plan->conversion, layer::LoadConversion::kNone);
    return plan->scheme.kind;
  };
  EXPECT_EQ(kind(stored, "as-is"), ComputeScheme::kFp8AnyBlock);
  EXPECT_EQ(kind(stored, "fp8-block"), ComputeScheme::kFp8AnyBlock);
  EXPECT_EQ(kind(stored, "fp8-bf16"), ComputeScheme::kWeightOnly);
  EXPECT_EQ(kind(stored, "f32"), ComputeScheme::kF32);
  const Scheme weights = with_activation(stored, scheme("bf16").activation);
  EXPECT_EQ(kind(weights, "as-is"), ComputeScheme::kWeightOnly);
  EXPECT_EQ(kind(weights, "fp8-block"), ComputeScheme::kFp8AnyBlock);
  const Status status = layer::plan_quant(stored, DType::kBF16, "bf16").status();
  EXPECT_NE(status.message().find("fp8-block, fp8-bf16"), std::string::npos) << status.message();
}

TEST(QuantSelection, ASharedExpertLeftUnquantisedStaysSo) {
  const Scheme fp8 = scheme("fp8-block"), bf16 = scheme("bf16");
  EXPECT_EQ(layer::plan_shared_quant(bf16, fp8, DType::kBF16, "as-is")->scheme.name, "bf16");
  EXPECT_EQ(layer::plan_shared_quant(bf16, fp8, DType::kBF16, "fp8-bf16")->scheme.name, "bf16");
  EXPECT_EQ(layer::plan_shared_quant(bf16, fp8, DType::kBF16, "f32")->scheme.name, "f32");
  EXPECT_EQ(layer::plan_shared_quant(fp8, fp8, DType::kBF16, "fp8-bf16")->scheme.name, "fp8-bf16");
  EXPECT_EQ(layer::plan_shared_quant(bf16, bf16, DType::kBF16, "fp8-block")->conversion,
            layer::LoadConversion::kQuantize);
  // A name for the routed experts that says nothing of another format's weights.
  const Scheme int4 = quant_scheme_from_name("int4-g128").value();
  EXPECT_EQ(layer::plan_shared_quant(int4, fp8, DType::kBF16, "fp8-bf16")->scheme.name,
            "int4-g128");
  EXPECT_EQ(layer::plan_shared_quant(int4, fp8, DType::kBF16, "f32")->scheme.name, "f32");
  EXPECT_EQ(layer::plan_shared_quant(int4, int4, DType::kBF16, "fp8-bf16").status().code(),
            StatusCode::kUnsupported);
  EXPECT_EQ(layer::plan_shared_quant(int4, fp8, DType::kBF16, "mxfp5").status().code(),
            StatusCode::kNotFound);
}

}  // namespace
}  // namespace moesaic
