// The general experts of a GPU with activations that are quantised, in every format: against the
// float64 oracle, the fast kernel, and experts that were made with a call's scales. Skipped, visibly,
// without a device.
#include <gtest/gtest.h>

#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "experts/exact_case.h"
#include "experts/gpu_call.h"
#include "experts/slab_call.h"
#include "numerics/float_codec.h"
#include "support/cuda_device.h"
#include "support/expect_bits.h"
#include "support/metrics.h"
#include "support/refusal.h"

namespace moesaic {
namespace {

using test::GpuCall;
using test::StandardCase;

constexpr const char* kGeneralExperts = "cuda_general";

// All that the fast kernel has too, and what it has not.
constexpr const char* kQuantisedRows[] = {"fp8-tensor",      "fp8-channel",
                                          "fp8-static",      "int8",
                                          "mxfp8",           "mxfp4",
                                          "mxfp4-fp8",       "nvfp4",
                                          "nvfp4-rows",      "int4-fp8",
                                          "int4-fp8-static", "int4-fp8-g32",
                                          "int4-fp8-g96",    "mxfp4-token",
                                          "mxfp4-static",    "mxfp4-f32-groups",
                                          "fp8-block-64x64", "fp8-block-32x128",
                                          "fp8-block-48x80", "int4-g128-int8",
                                          "int8-g128-int8",  "awq-int8",
                                          "gptq-int8",       "q4k-int8",
                                          "q6k-int8"};

class CudaGeneralFormats : public testing::TestWithParam<const char*> {};
std::string name_of_format(const testing::TestParamInfo<const char*>& info) {
  std::string name = info.param;
  for (char& c : name) c = c == '-' ? '_' : c;
  return name;
}
INSTANTIATE_TEST_SUITE_P(Each, CudaGeneralFormats, testing::ValuesIn(kQuantisedRows),
                         name_of_format);

double error_of_format(GpuCall& call) {
  const Tensor got = call.run(call.args());
  return test::compare(test::to_doubles(got.view()), call.c.oracle(true)).rel_l2;
}

// A sum that lands on the other side of a rounding boundary moves an element of the intermediate by
// one code, 2^-2 (e2m1) or 2^-4 of it at most, rarely; nothing else is rounded.
constexpr double kFormatBound = 0x1p-6;

// An intermediate size in whole groups, of which some rows have a part only where they may.
std::int64_t inner_of(std::string_view quant) {
  const OperandQuant w = test::scheme_called(quant).weight;
  return w.scale_format == ScaleFormat::kE4M3 && w.block_k == 128 ? 256 : 192;
}

MoeProblem problem_of_size(std::string_view quant, std::int64_t hidden, std::int64_t inner) {
  MoeProblem p = test::small_problem(quant);
  p.hidden_size = hidden;
  p.intermediate_size = inner;
  return p;
}

// Small integers and one expert per token: what is not a power of two is one product, of which the
// last bit may be another by the order of its factors.
TEST_P(CudaGeneralFormats, EqualTheReferenceOnIntegersButForTheLastBits) {
  REQUIRE_HOPPER();
  if (test::scheme_called(GetParam()).weight.zero_point == ZeroPoint::kMin) return;  // not integers
  for (const char* activation : {"silu", "relu2_no_mul"}) {
    for (const std::int64_t tokens : {1, 37, 260}) {
      GpuCall call(test::exact_case(GetParam(), activation, 384, inner_of(GetParam()), tokens, 1),
                   6, kGeneralExperts);
      const Tensor got = call.run(call.args());
      StandardCase on_cpu =
          test::exact_case(GetParam(), activation, 384, inner_of(GetParam()), tokens, 1);
      const Tensor want = test::run_standard(*test::make_backend("cpu_reference", on_cpu), on_cpu);
      std::int64_t wrong = 0;
      for (std::int64_t i = 0; i < tokens * 384; ++i) {
        wrong += bf16_from_f32(got.as<float>()[i]) == bf16_from_f32(want.as<float>()[i]) ? 0 : 1;
      }
      EXPECT_EQ(wrong, 0) << activation << ' ' << tokens;
    }
  }
}

// The rows of slabs that count have the bits of the standard format, the others are left alone.
TEST_P(CudaGeneralFormats, SlabsHaveTheBitsOfTheStandardFormat) {
  REQUIRE_HOPPER();
  for (const std::int32_t t : {1, 23, 140}) {
    MoeProblem p = problem_of_size(GetParam(), 384, inner_of(GetParam()));
    p.top_k = 1;
    test::SlabCall call(test::make_case(71, p, std::int64_t{6} * t, DType::kBF16), t,
                        kGeneralExperts, DType::kF32);
    const Tensor want = call.of_standard(kGeneralExperts);
    for (const test::Counts& n : {test::Counts{0, 1, t, t / 2, t - 1, t / 3},
                                  test::Counts{0, 0, 0, 0, 0, t}, test::Counts{t, t, t, t, t, t}}) {
      SCOPED_TRACE(testing::Message() << t << ' ' << testing::PrintToString(n));
      call.expect_rows(call.run(n), want, n);
    }
  }
}

TEST_P(CudaGeneralFormats, AgreeWithTheOracle) {
  REQUIRE_HOPPER();
  for (const std::int64_t tokens : {9, 150}) {
    for (const std::int64_t local : {6, 4}) {
      for (const bool gated : {true, false}) {
        MoeProblem p = problem_of_size(GetParam(), 384, inner_of(GetParam()));
        p.activation = make_activation(gated ? "silu" : "relu2_no_mul", {}).value();
        p.has_expert_bias = gated;
        GpuCall call(test::make_case(61, p, tokens, DType::kBF16, 0.1), local, kGeneralExperts);
        EXPECT_LT(error_of_format(call), kFormatBound) << tokens << ' ' << local << ' ' << gated;
      }
    }
  }
}

TEST_P(CudaGeneralFormats, AgreeWithTheOracleWithRouterWeightsOnTheInput) {
  REQUIRE_HOPPER();
  MoeProblem p = problem_of_size(GetParam(), 384, inner_of(GetParam()));
  p.apply_router_weight_on_input = true;
  GpuCall call(test::make_case(62, p, 60, DType::kBF16, 0.1), 6, kGeneralExperts);
  EXPECT_LT(error_of_format(call), kFormatBound);
}

// Rows of other dtypes than bf16, rounded to the activations' own first.
TEST_P(CudaGeneralFormats, TakeRowsOfEveryDType) {
  REQUIRE_HOPPER();
  for (const DType rounded : {DType::kF16, DType::kF32}) {
    MoeProblem p = problem_of_size(GetParam(), 384, inner_of(GetParam()));
    p.activation_dtype = rounded;
    ASSERT_TRUE(check_problem(p).ok()) << check_problem(p).to_string();
    for (const DType rows : {DType::kF16, DType::kF32}) {
      GpuCall call(test::make_case(63, p, 40, rows), 6, kGeneralExperts);
      EXPECT_LT(error_of_format(call), kFormatBound)
          << dtype_name(rounded) << ' ' << dtype_name(rows);
    }
  }
}

TEST_P(CudaGeneralFormats, ATokenAloneHasTheBitsThatItHasInABatch) {
  REQUIRE_HOPPER();
  const MoeProblem p = problem_of_size(GetParam(), 384, inner_of(GetParam()));
  GpuCall batch(test::make_case(64, p, 140, DType::kBF16), 6, kGeneralExperts);
  const Tensor all = batch.run(batch.args());
  for (const std::int64_t t : {0, 77, 139}) {
    StandardCase one = test::make_case(64, p, 1, DType::kBF16);
    std::memcpy(one.hidden_states.data(), batch.c.hidden_states.data() + t * 768, 768);
    std::memcpy(one.routing.ids.data(), batch.c.routing.ids.data() + t * 8, 8);
    std::memcpy(one.routing.weights.data(), batch.c.routing.weights.data() + t * 8, 8);
    GpuCall alone(std::move(one), 6, kGeneralExperts);
    const Tensor row = alone.run(alone.args());
    EXPECT_EQ(std::memcmp(row.data(), all.data() + t * 384 * 4, 384 * 4), 0) << t;
  }
}

// What is measured is what the reference measures on the same rows.
TEST_P(CudaGeneralFormats, MeasureWhatTheReferenceMeasures) {
  REQUIRE_HOPPER();
  const MoeProblem p = problem_of_size(GetParam(), 384, inner_of(GetParam()));
  GpuCall call(test::make_case(65, p, 30, DType::kBF16), 6, kGeneralExperts);
  std::vector<RowNumerics> got(30);
  ExpertsArgs a = call.args();
  a.numerics = got;
  call.run(a);
  const std::vector<RowNumerics> want =
      test::reference_numerics(test::make_case(65, p, 30, DType::kBF16));
  const double of_gpu = summarize(got).error_estimate(), of_cpu = summarize(want).error_estimate();
  EXPECT_GT(of_cpu, 0);
  EXPECT_NEAR(of_gpu, of_cpu, 0.05 * of_cpu);
}

// Both kernels on the same problem: what the fast one rounds to bf16, and a code now and then.
TEST(CudaGeneralFormats, AgreeWithTheFastKernel) {
  REQUIRE_HOPPER();
  for (const char* quant :
       {"fp8-channel", "fp8-static", "int8", "mxfp8", "mxfp4", "mxfp4-fp8", "nvfp4", "int4-fp8"}) {
    const auto run = [&](const char* backend) {
      GpuCall call(test::make_case(66, problem_of_size(quant, 384, 256), 70, DType::kBF16, 0.1), 6,
                   backend);
      return test::to_doubles(call.run(call.args()).view());
    };
    EXPECT_LT(test::compare(run(kGeneralExperts), run("cuda_sm90")).rel_l2, kFormatBound) << quant;
  }
}

// Sizes that are no multiple of anything.
TEST(CudaGeneralFormats, RaggedGroupsAndRows) {
  REQUIRE_HOPPER();
  for (const char* quant :
       {"fp8-channel", "int8", "fp8-block-48x80", "int4-g128-int8", "q4k-int8"}) {
    for (const auto& [hidden, inner] :
         std::vector<std::pair<std::int64_t, std::int64_t>>{{202, 70}, {50, 302}}) {
      GpuCall call(test::make_case(67, problem_of_size(quant, hidden, inner), 40, DType::kBF16), 6,
                   kGeneralExperts);
      EXPECT_LT(error_of_format(call), kFormatBound) << quant << ' ' << hidden << ' ' << inner;
    }
  }
}

// Stored scales that a call brings have the bits of experts made with them.
TEST(CudaGeneralFormats, ScalesOfACall) {
  REQUIRE_HOPPER();
  for (const char* quant : {"fp8-static", "nvfp4", "mxfp4-static"}) {
    for (const int which : {1, 2, 3}) {
      StandardCase other =
          test::make_case(68, problem_of_size(quant, 384, 192), 50, DType::kBF16, 0.1);
      std::vector<float> scales[2];
      for (int i = 0; i < 2; ++i) {
        Tensor& stored = i == 0 ? other.weights.w13_input_scale : other.weights.w2_input_scale;
        for (std::int64_t e = 0; e < 6; ++e) {
          float& v = stored.as<float>()[e];
          if ((which & (1 << i)) != 0) v *= 0.7F + 0.2F * static_cast<float>(e);
          scales[i].push_back(v);
        }
      }
      GpuCall made(std::move(other), 6, kGeneralExperts);
      GpuCall call(test::make_case(68, problem_of_size(quant, 384, 192), 50, DType::kBF16, 0.1), 6,
                   kGeneralExperts);
      const Tensor own = call.run(call.args());
      DeviceTensor on[2];
      ExpertsArgs a = call.args();
      for (int i = 0; i < 2; ++i) {
        if ((which & (1 << i)) == 0) continue;
        on[i] = DeviceTensor::copy_of(
                    ConstTensorView(reinterpret_cast<const std::byte*>(scales[i].data()),
                                    DType::kF32, {6}),
                    test::kGpu)
                    .value();
        (i == 0 ? a.a1_scale : a.a2_scale) = on[i].view();
      }
      const Tensor got = call.run(a), want = made.run(made.args());
      test::expect_same(got, want, std::string(quant) + " " + std::to_string(which));
      EXPECT_NE(std::memcmp(got.data(), own.data(), static_cast<std::size_t>(own.bytes())), 0);
    }
  }
  // In the fast kernel the scale of nvfp4 is in the weights' factors.
  GpuCall factors(test::make_case(68, problem_of_size("nvfp4", 384, 256), 5, DType::kBF16, 0.1), 6,
                  "cuda_sm90");
  const std::vector<float> ones(6, 1.0F);
  const DeviceTensor other =
      DeviceTensor::copy_of(
          ConstTensorView(reinterpret_cast<const std::byte*>(ones.data()), DType::kF32, {6}),
          test::kGpu)
          .value();
  ExpertsArgs with = factors.args();
  with.a2_scale = other.view();
  test::expect_refusal(factors.experts->run(with), StatusCode::kUnsupported,
                       {"a1_scale, a2_scale: got scales of a call for nvfp4"});
  GpuCall dynamic(test::make_case(69, problem_of_size("mxfp8", 384, 192), 2, DType::kBF16), 6,
                  kGeneralExperts);
  const DeviceTensor scale =
      DeviceTensor::copy_of(Tensor::zeros(DType::kF32, {6}).value().view(), test::kGpu).value();
  ExpertsArgs a = dynamic.args();
  a.a1_scale = scale.view();
  test::expect_refusal(dynamic.experts->run(a), StatusCode::kUnsupported, {"a1_scale"});
}

// One value of row 7 is `bits`, as bf16; the row's result is NaN, that of the others as without.
void expect_it_stays_in_its_row(const char* name, const char* quant, std::uint16_t bits) {
  const auto problem = [&] { return problem_of_size(quant, 384, 256); };
  StandardCase c = test::make_case(70, problem(), 20, DType::kBF16);
  GpuCall clean(test::make_case(70, problem(), 20, DType::kBF16), 6, name);
  const Tensor want = clean.run(clean.args());
  c.hidden_states.as<std::uint16_t>()[7 * 384 + 11] = bits;
  GpuCall call(std::move(c), 6, name);
  const Tensor got = call.run(call.args());
  for (std::int64_t i = 0; i < 20 * 384; ++i) {
    const float v = got.as<float>()[i];
    if (i / 384 == 7) {
      ASSERT_TRUE(v != v) << name << ' ' << quant << ' ' << i;
    } else {
      ASSERT_EQ(v, want.as<float>()[i]) << name << ' ' << quant << ' ' << i;
    }
  }
}
TEST(CudaGeneralFormats, NanStaysInItsRow) {
  REQUIRE_HOPPER();
  for (const char* quant : {"fp8-channel", "int8", "nvfp4", "mxfp4", "mxfp8", "fp8-block-64x64",
                            "int4-g128-int8", "mxfp4-int8"}) {
    expect_it_stays_in_its_row(kGeneralExperts, quant, 0x7FC0);
  }
  for (const char* quant : {"bf16", "fp8-block", "fp8-channel", "int8", "nvfp4", "mxfp4", "mxfp8",
                            "mxfp4-fp8", "int4-fp8"}) {
    expect_it_stays_in_its_row("cuda_sm90", quant, 0x7FC0);
  }
  for (const char* name : {kGeneralExperts, "cuda_sm90"}) {
    expect_it_stays_in_its_row(name, "int8", 0x7F80);  // infinity
  }
}

}  // namespace
}  // namespace moesaic
