// The GPU experts stage against the CPU reference and the float64 oracle. Everything that needs a
// device is skipped, visibly, without one.
#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <numeric>
#include <utility>
#include <vector>

#include "case_on_device.h"
#include "exact_case.h"
#include "experts/sm90/weight_codes.h"
#include "numerics/element.h"
#include "numerics/float_codec.h"
#include "support/metrics.h"

namespace moesaic {
namespace {

using cuda::CudaExperts;
using cuda::CudaExpertsArgs;
using test::create_on_device;
using test::DeviceBytes;
using test::exact_case;
using test::OnDevice;
using test::problem_of;
using test::run_cuda;
using test::StandardCase;

// A scheme of every format that the kernel computes; fp8-static has input scales that differ.
constexpr const char* kQuants[] = {
    "bf16",       "f16",        "mxfp4-bf16", "fp8-block", "fp8-tensor",      "fp8-channel",
    "fp8-static", "int8",       "mxfp8",      "mxfp4",     "mxfp4-fp8",       "nvfp4",
    "nvfp4-rows", "nvfp4-bf16", "mxfp8-bf16", "int4-fp8",  "int4-fp8-static", "int4-g128",
    "nf4-bf16",   "int8-bf16",  "fp8-bf16",   "q4k"};
// Other weights of the same formats.
constexpr const char* kMoreQuants[] = {
    "int4-channel", "int4-g32",  "awq",     "gptq",      "fp4-bf16", "u8-zero",
    "q2k",          "q2k-super", "q3k",     "q3k-super", "q5k",      "q5k-super",
    "q6k",          "q6k-super", "q4k-m",   "q4k-q6k",   "q4k-q5k",  "q4k-q50",
    "q4k-q80",      "q5k-q6k",   "q2k-q3k", "q3k-q4k",   "q3k-q5k"};
std::vector<const char*> all_quants() {
  std::vector<const char*> all(std::begin(kQuants), std::end(kQuants));
  all.insert(all.end(), std::begin(kMoreQuants), std::end(kMoreQuants));
  return all;
}

class CudaExpertsExact : public testing::TestWithParam<const char*> {};
class CudaExpertsBound : public testing::TestWithParam<const char*> {};
class CudaExpertsRows : public testing::TestWithParam<const char*> {};
std::string name_of(const testing::TestParamInfo<const char*>& info) {
  std::string name = info.param;
  std::ranges::replace(name, '-', '_');
  return name;
}
INSTANTIATE_TEST_SUITE_P(Each, CudaExpertsExact, testing::ValuesIn(all_quants()), name_of);
INSTANTIATE_TEST_SUITE_P(Each, CudaExpertsBound, testing::ValuesIn(kQuants), name_of);
INSTANTIATE_TEST_SUITE_P(Each, CudaExpertsRows, testing::ValuesIn(kQuants), name_of);

bool is_fp8_block(std::string_view quant) { return quant == "fp8-block"; }
bool keeps_bf16_rows(std::string_view quant) {
  return test::scheme_called(quant).activation.granularity == ScaleGranularity::kNone;
}
// Weights that are decoded when they are multiplied; all but 4-bit integers in groups of 32 columns or
// more have the family of SwiGLU and squared ReLU alone, as have those with minima. They are rounded to bf16 where a row has
// more scales than one in 64 columns, or a minimum.
bool has_strips(std::string_view quant) {
  const OperandQuant w = test::scheme_called(quant).weight;
  return keeps_bf16_rows(quant) && w.scale_format == ScaleFormat::kF32;
}
bool has_rounded_weights(std::string_view quant) {
  return has_strips(quant) && !cuda::has_scales_of_sums(test::scheme_called(quant).weight);
}
bool has_activation(std::string_view quant, std::string_view activation) {
  const OperandQuant w = test::scheme_called(quant).weight;
  const bool quarters = cuda::has_int4_codes(w) && w.block_k == 16;
  const bool int4 = cuda::has_int4_codes(w) && !cuda::has_minima(w) && !quarters;
  if (!has_strips(quant) || int4) return true;
  return activation == "silu" || activation == "swigluoai" || activation == "swiglustep" ||
         activation == "gelu_tanh" || activation == "relu2_no_mul";
}
// bf16 rows: each expert's row is rounded once more, 2^-8. Quantised: a sum that lands on the other
// side of a rounding boundary moves an element of the intermediate by one code. Weights that are
// rounded to bf16: that is one more rounding of each operand, which the CPU does not have. Its
// relative size is 1.7e-3 (root mean square), independent from weight to weight: gate, up and w2
// together 1.7e-3 * sqrt(3) = 2.9e-3, with 1.7e-3 of the row 3.4e-3. 2^-8 + 2^-9 is within the
// scheme's 6e-3.
// F16: rows are not rounded, and elements of the intermediate on the other side of a boundary move by
// 2^-11 of them at most.
double bound_of(std::string_view quant) {
  if (quant == "f16") return 0x1p-11;
  if (has_rounded_weights(quant)) return 0x1p-8 + 0x1p-9;
  return keeps_bf16_rows(quant) ? 0x1p-8 : 0x1p-6;
}

// --- Exact ---

// The device's rows are the reference's, rounded to bf16 (f16: as they are).
void expect_reference_bits(const StandardCase& c) {
  const Tensor want = run_standard(*test::make_backend("cpu_reference", c), c);
  const Tensor got = run_cuda(c);
  const std::int64_t elements = c.hidden_states.shape()[0] * c.problem.hidden_size;
  const bool rounds = c.problem.activation_dtype == DType::kBF16;
  std::int64_t wrong = 0, live = 0;
  for (std::int64_t i = 0; i < elements; ++i) {
    const float sum = want.as<float>()[i];
    const float rounded = rounds ? f32_from_bf16(bf16_from_f32(sum)) : sum;
    wrong += got.as<float>()[i] == rounded ? 0 : 1;
    live += rounded == 0.0F ? 0 : 1;
  }
  EXPECT_EQ(wrong, 0);
  // e2m1 leaves little of a row with one large value.
  const bool coarse = c.problem.quant.activation.dtype == DType::kF4E2M1;
  EXPECT_GT(live, coarse ? 0 : elements / 4);
}

// One expert per token.
TEST_P(CudaExpertsExact, OneExpertEqualsReferenceByBits) {
  REQUIRE_HOPPER();
  const char* const quant = GetParam();
  for (const char* activation : {"silu", "relu2_no_mul"}) {
    if (!has_activation(quant, activation)) continue;
    for (const std::int64_t tokens : {1, 37, 260, 700}) {
      SCOPED_TRACE(testing::Message() << activation << ' ' << tokens);
      expect_reference_bits(exact_case(quant, activation, 512, 384, tokens, 1));
    }
  }
}

// Groups of every width that builds for 17 rows an expert and more compute, and what several groups of
// an expert leave, with the epilogues of the wide builds.
TEST_P(CudaExpertsExact, WideGroupsEqualReferenceByBits) {
  REQUIRE_HOPPER();
  const std::vector<std::vector<int>> rows_of_experts = {{8, 17, 32, 33, 48, 49},
                                                         {16, 48, 49, 80, 81, 97},
                                                         {112, 113, 128, 129, 136, 137},
                                                         {144, 145, 160, 161, 273, 321}};
  for (const char* activation : {"silu", "relu2_no_mul"}) {
    if (!has_activation(GetParam(), activation)) continue;
    for (const std::vector<int>& rows : rows_of_experts) {
      SCOPED_TRACE(testing::Message()
                   << activation << ' ' << rows.front() << " to " << rows.back());
      const std::int64_t tokens = std::accumulate(rows.begin(), rows.end(), std::int64_t{0});
      StandardCase c = exact_case(GetParam(), activation, 256, 128, tokens, 1);
      ASSERT_EQ(c.problem.num_experts, static_cast<std::int64_t>(rows.size()));
      std::int32_t* id = c.routing.ids.as<std::int32_t>();
      for (std::size_t e = 0; e < rows.size(); ++e) {
        id = std::fill_n(id, rows[e], static_cast<std::int32_t>(e));
      }
      expect_reference_bits(c);
    }
  }
}

// Several experts per token: rows are exact in bf16, so the whole layer is.
class CudaExpertsSums : public testing::TestWithParam<const char*> {};
INSTANTIATE_TEST_SUITE_P(Each, CudaExpertsSums, testing::Values("bf16", "f16"), name_of);
TEST_P(CudaExpertsSums, SeveralExpertsEqualReferenceByBits) {
  REQUIRE_HOPPER();
  for (const std::int64_t tokens : {1, 9, 150}) {
    for (const std::int64_t intermediate : {88, 91}) {  // with padding too
      StandardCase c = exact_case(GetParam(), "relu2_no_mul", 272, intermediate, tokens, 3);
      c.expert_map = {0, 1, -1, 3, 4, 5};
      const Tensor want = run_standard(*test::make_backend("cpu_reference", c), c);
      std::string why;
      EXPECT_TRUE(test::same_bits(run_cuda(c).view(), want.view(), &why)) << tokens << ": " << why;
    }
  }
}

// --- Bounds ---

double worst_error(const StandardCase& c) {
  const auto want = c.oracle(true);
  return test::compare(test::to_doubles(run_cuda(c).view()), want).rel_l2;
}

// Against float64 sums over the same rounded operands. bf16: each expert's row is rounded once more
// (2^-9 per element at most). fp8: a sum that lands on the other side of a rounding boundary moves
// an element of the intermediate by one code, 2^-4 of it at most, rarely.
TEST_P(CudaExpertsBound, EveryActivation) {
  REQUIRE_HOPPER();
  const char* const quant = GetParam();
  for (const char* activation :
       {"silu", "gelu", "gelu_tanh", "swigluoai", "swiglustep", "situ", "silu_no_mul",
        "gelu_no_mul", "gelu_tanh_no_mul", "relu2_no_mul"}) {
    if (!has_activation(quant, activation)) continue;
    SCOPED_TRACE(activation);
    MoeProblem p = problem_of(quant, activation, 384, 256, 6, 2);
    p.has_expert_bias = true;
    const StandardCase c = test::make_case(21, p, 50, p.activation_dtype);
    EXPECT_LT(worst_error(c), bound_of(quant));
  }
}

TEST_P(CudaExpertsBound, ShapesAndTokens) {
  REQUIRE_HOPPER();
  struct Sizes {
    std::int64_t hidden, intermediate;
  };
  const char* const quant = GetParam();
  const bool plain = std::string_view(quant) == "bf16" || std::string_view(quant) == "f16";
  const bool is_table = test::scheme_called(quant).weight.table != CodeTable::kNone;
  const std::int64_t columns = test::scheme_called(quant).weight.block_k;
  for (const Sizes s :
       is_fp8_block(quant) ? std::vector<Sizes>{{128, 128}, {384, 640}, {1024, 200}, {256, 72}}
       : plain             ? std::vector<Sizes>{{8, 8}, {72, 203}, {136, 328}, {1024, 255}, {64, 1}}
       : has_strips(quant)
           ? std::vector<Sizes>{{is_table ? 64 : 72, is_table ? 64 : 200}, {384, 640}, {1024, 192}}
       : columns == 128 ? std::vector<Sizes>{{128, 128}, {384, 640}, {1024, 256}}
       : columns == 32  ? std::vector<Sizes>{{32, 32}, {96, 160}, {384, 640}, {1024, 288}}
                        : std::vector<Sizes>{{16, 16}, {144, 208}, {384, 640}, {1024, 272}}) {
    for (const std::int64_t tokens : {1, 17, 129}) {
      // One code of a short row is more than this bound: CudaExpertsRequantised has these.
      const std::string_view name = quant;
      const bool own_scales =
          name == "fp8-tensor" || name == "fp8-channel" || name == "int8" || name == "int4-fp8";
      if (tokens == 1 && own_scales) continue;
      SCOPED_TRACE(testing::Message()
                   << quant << ' ' << s.hidden << 'x' << s.intermediate << ' ' << tokens);
      MoeProblem p = problem_of(quant, "silu", s.hidden, s.intermediate, 6, 2);
      const StandardCase c = test::make_case(31, p, tokens, p.activation_dtype, 0.1);
      EXPECT_LT(worst_error(c), bound_of(quant));
    }
  }
}

// Formats that share their builds with those of kQuants.
TEST(CudaExpertsBound, OtherGroupsAndTables) {
  REQUIRE_HOPPER();
  std::vector<const char*> quants(std::begin(kMoreQuants), std::end(kMoreQuants));
  quants.push_back("iq4");
  for (const char* quant : quants) {
    for (const std::int64_t tokens : {1, 40, 300}) {
      const MoeProblem p = problem_of(quant, "silu", 448, 320, 6, 2);
      const StandardCase c = test::make_case(23, p, tokens, DType::kBF16, 0.1);
      EXPECT_LT(worst_error(c), bound_of(quant)) << quant << ' ' << tokens;
    }
  }
}

// Scales that are stored in BF16 need no further bits, and are multiplied by code of their own.
TEST(CudaExperts, Bf16ScalesHaveTheBitsOfTheSameScalesInF32) {
  REQUIRE_HOPPER();
  for (const char* quant : {"int4-g32", "int4-g128", "awq", "int8-bf16"}) {
    for (const std::int64_t tokens : {1, 30, 400}) {
      StandardCase c =
          test::make_case(25, problem_of(quant, "silu", 384, 256, 6, 2), tokens, DType::kBF16);
      Tensor narrow[2], wide[2];
      for (int i = 0; i < 2; ++i) {
        Tensor& scale = i == 0 ? c.weights.w13_scale : c.weights.w2_scale;
        narrow[i] = Tensor::zeros(DType::kBF16, scale.shape()).value();
        wide[i] = Tensor::zeros(DType::kF32, scale.shape()).value();
        for (std::int64_t s = 0; s < scale.shape().num_elements().value(); ++s) {
          const float v = load_as_f32(scale.data(), scale.dtype(), s);
          narrow[i].as<std::uint16_t>()[s] = bf16_from_f32(v);
          wide[i].as<float>()[s] = f32_from_bf16(bf16_from_f32(v));
        }
        scale = std::move(wide[i]);
      }
      const Tensor want = run_cuda(c);
      wide[0] = std::move(c.weights.w13_scale);
      wide[1] = std::move(c.weights.w2_scale);
      c.weights.w13_scale = std::move(narrow[0]);
      c.weights.w2_scale = std::move(narrow[1]);
      EXPECT_LT(worst_error(c), bound_of(quant)) << quant << ' ' << tokens;
      std::string why;
      EXPECT_TRUE(test::same_bits(run_cuda(c).view(), want.view(), &why))
          << quant << ' ' << tokens << ": " << why;
      if (c.problem.quant.weight.granularity != ScaleGranularity::kGroup) continue;
      // In F32, and known to be BF16.
      c.weights.w13_scale = std::move(wide[0]);
      c.weights.w2_scale = std::move(wide[1]);
      OperandQuant weight = c.problem.quant.weight;
      weight.scale_dtype = DType::kBF16;
      c.problem.quant = with_weight(c.problem.quant, weight);
      EXPECT_TRUE(test::same_bits(run_cuda(c).view(), want.view(), &why))
          << quant << ' ' << tokens << ", known: " << why;
    }
  }
}

// The sizes of gpt-oss: 45 slabs and 22.5, a last band of one slab.
TEST(CudaExpertsBound, GptOss) {
  REQUIRE_HOPPER();
  for (const std::int64_t tokens : {1, 5, 20}) {
    MoeProblem p = problem_of("mxfp4-bf16", "swigluoai", 2880, 2880, 3, 2);
    p.has_expert_bias = true;
    const StandardCase c = test::make_case(39, p, tokens, DType::kBF16);
    EXPECT_LT(worst_error(c), 0x1p-8) << tokens;
  }
}

// Scales that have no bf16 factor: the row is shifted, and its sums are shifted back.
TEST(CudaExpertsExact, ScalesOfAnySizeMultiplyExactly) {
  REQUIRE_HOPPER();
  for (const char* quant : {"mxfp4-bf16", "mxfp4", "mxfp8"}) {
    StandardCase c = test::make_case(1, problem_of(quant, "silu", 64, 64, 6, 2), 9, DType::kBF16);
    const Tensor small = run_cuda(c);
    for (std::int64_t i = 0; i < c.weights.w2_scale.bytes(); ++i) {
      c.weights.w2_scale.as<std::uint8_t>()[i] += 30;
    }
    const Tensor large = run_cuda(c);
    for (std::int64_t i = 0; i < 9 * 64; ++i) {
      ASSERT_EQ(large.as<float>()[i], small.as<float>()[i] * 0x1p30F) << quant << ' ' << i;
    }
    ASSERT_NE(large.as<float>()[0], 0.0F);
    // Too far apart for one row: [1, 0] and [1, 1].
    c.weights.w2.as<std::uint8_t>()[64 * dtype_bits(c.weights.w2.dtype()) / 8] = 0x11;
    c.weights.w2_scale.as<std::uint8_t>()[2] = 1;
    c.weights.w2_scale.as<std::uint8_t>()[3] = 254;
    const auto source = make_stacked_source(c.weights.view());
    const Status status = CudaExperts::create(c.problem, *source, 0).status();
    EXPECT_EQ(status.code(), StatusCode::kUnsupported);
    EXPECT_NE(status.message().find("w2_scale: got 2^-126 and 2^127 in row 1"), std::string::npos)
        << status.to_string();
  }
}

// Groups of more than 96 rows, with the tokens as the multiply's M operand: 800 tokens give each
// expert about 266 rows.
TEST_P(CudaExpertsBound, FullGroups) {
  REQUIRE_HOPPER();
  const char* const quant = GetParam();
  for (const char* activation : {"silu", "gelu_tanh", "relu2_no_mul"}) {
    if (!has_activation(quant, activation)) continue;
    const MoeProblem p = problem_of(quant, activation, 384, 256, 6, 2);
    const StandardCase c = test::make_case(33, p, 800, p.activation_dtype, 0.1);
    EXPECT_LT(worst_error(c), bound_of(quant)) << quant << ' ' << activation;
  }
}

// One token: bands are halved, and 384 rows of w2 leave the second half of the last band empty. The
// second case has one expert twice.
TEST_P(CudaExpertsBound, OneToken) {
  REQUIRE_HOPPER();
  const char* const quant = GetParam();
  for (const bool twice : {false, true}) {
    const MoeProblem p = problem_of(quant, "silu", 384, 384, 6, 3);
    StandardCase c = test::make_case(35, p, 1, p.activation_dtype);
    if (twice) c.routing.ids.as<std::int32_t>()[2] = c.routing.ids.as<std::int32_t>()[0];
    EXPECT_LT(worst_error(c), bound_of(quant)) << quant << ' ' << twice;
  }
}

// Two CTAs with one expert's rows: one group each, none for the second, and several of both.
TEST_P(CudaExpertsSums, PairedGroups) {
  REQUIRE_HOPPER();
  for (const std::int64_t tokens : {300, 800, 1900}) {
    const MoeProblem p = problem_of(GetParam(), "silu", 136, 72, 6, 2);
    StandardCase c = test::make_case(37, p, tokens, p.activation_dtype, 0.1);
    // Expert 5 keeps five rows.
    std::int64_t kept = 0;
    for (std::int64_t i = 0; i < 2 * tokens; ++i) {
      std::int32_t& id = c.routing.ids.as<std::int32_t>()[i];
      if (id == 5 && ++kept > 5) id = -1;
    }
    EXPECT_LT(worst_error(c), bound_of(GetParam())) << tokens;
  }
}

TEST_P(CudaExpertsBound, RouterWeightOnInputAndPowerOfTwoScales) {
  REQUIRE_HOPPER();
  const char* const quant = GetParam();
  for (const bool on_input : {false, true}) {
    MoeProblem p = problem_of(quant, "silu", 256, 256, 6, 1);
    p.apply_router_weight_on_input = on_input;
    if (is_fp8_block(quant)) {
      p.quant.activation.scale_format = ScaleFormat::kE8M0;
    }
    const StandardCase c = test::make_case(41, p, 40, p.activation_dtype);
    EXPECT_LT(worst_error(c), std::string_view(quant) == "f16" ? 0x1p-11 : 0x1p-6)
        << quant << ' ' << on_input;
  }
}

// --- Metamorphic ---

TEST_P(CudaExpertsRows, TokenAloneEqualsTokenInBatchByBits) {
  REQUIRE_HOPPER();
  const char* const quant = GetParam();
  // Full groups are computed with the tokens as rows; once with limits and constants.
  for (const auto& [tokens, activation] : std::vector<std::pair<std::int64_t, const char*>>{
           {5, "silu"}, {60, "silu"}, {200, "silu"}, {900, "silu"}, {900, "swigluoai"}}) {
    const MoeProblem p = problem_of(quant, activation, 384, 384, 6, 2);
    const StandardCase c = test::make_case(51, p, tokens, p.activation_dtype);
    const Tensor batch = run_cuda(c);
    for (const std::int64_t t : {std::int64_t{0}, tokens / 2, tokens - 1}) {
      StandardCase one = test::make_case(51, p, 1, p.activation_dtype);
      std::memcpy(one.hidden_states.data(), c.hidden_states.data() + t * 384 * 2, 384 * 2);
      std::memcpy(one.routing.ids.data(), c.routing.ids.data() + t * 8, 8);
      std::memcpy(one.routing.weights.data(), c.routing.weights.data() + t * 8, 8);
      const Tensor alone = run_cuda(one);
      EXPECT_EQ(std::memcmp(alone.data(), batch.data() + t * 384 * 4, 384 * 4), 0)
          << quant << ' ' << activation << " token " << t << " of " << tokens;
    }
  }
}

// Few groups take w2 by slabs, more of them by bands.
TEST_P(CudaExpertsRows, SlabsOfW2HaveTheBitsOfBands) {
  REQUIRE_HOPPER();
  constexpr std::int64_t kHidden = 1280, kRow = kHidden * 4;
  const MoeProblem p = problem_of(GetParam(), "silu", kHidden, 256, 16, 2);
  const StandardCase many = test::make_case(53, p, 32, p.activation_dtype);
  const Tensor batch = run_cuda(many);
  for (const std::int64_t first : {0, 9, 30}) {
    StandardCase few = test::make_case(53, p, 2, p.activation_dtype);
    const auto bytes = static_cast<std::size_t>(few.hidden_states.bytes());
    std::memcpy(few.hidden_states.data(), many.hidden_states.data() + first * kHidden * 2, bytes);
    std::memcpy(few.routing.ids.data(), many.routing.ids.data() + first * 8, 16);
    std::memcpy(few.routing.weights.data(), many.routing.weights.data() + first * 8, 16);
    const Tensor alone = run_cuda(few);
    EXPECT_EQ(std::memcmp(alone.data(), batch.data() + first * kRow, 2 * kRow), 0)
        << GetParam() << " tokens from " << first;
  }
}

// Experts that were alike when they were loaded, then others in their place.
TEST(CudaExperts, StaticScalesMayDifferOnceExpertsMove) {
  REQUIRE_HOPPER();
  for (const char* quant : {"fp8-static", "int4-fp8-static"}) {
    SCOPED_TRACE(quant);
    const MoeProblem p = problem_of(quant, "silu", 256, 256, 6, 2);
    const StandardCase c = test::make_case(55, p, 9, p.activation_dtype);
    StandardCase alike = test::make_case(55, p, 9, p.activation_dtype);
    for (Tensor* scales : {&alike.weights.w13_input_scale, &alike.weights.w2_input_scale}) {
      std::fill_n(scales->as<float>(), 6, scales->as<float>()[0]);
    }
    OnDevice there(c, create_on_device(c)), here(c, create_on_device(alike));
    here.experts->let_parts_change();
    const auto from = there.experts->expert_parts(6), to = here.experts->expert_parts(6);
    ASSERT_EQ(from.size(), to.size());
    for (std::size_t i = 0; i < from.size(); ++i) {
      ASSERT_EQ(from[i].name, to[i].name);
      const auto bytes = static_cast<std::size_t>(from[i].rows.dim(0) * from[i].rows.dim(1));
      ASSERT_EQ(cudaMemcpy(to[i].rows.data, from[i].rows.data, bytes, cudaMemcpyDeviceToDevice),
                cudaSuccess);
    }
    const Tensor want = there.run(), got = here.run();
    EXPECT_EQ(std::memcmp(got.data(), want.data(), static_cast<std::size_t>(got.bytes())), 0);
  }
}

void replay_graph(const char* quant) {
  SCOPED_TRACE(quant);
  const MoeProblem p = problem_of(quant, "silu", 256, 256, 6, 2);
  StandardCase c = test::make_case(61, p, 48, p.activation_dtype);
  OnDevice d(c, create_on_device(c));
  const DeviceBytes out(48 * 256 * 4);
  cudaStream_t stream = nullptr;
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t exec = nullptr;
  ASSERT_EQ(cudaStreamCreate(&stream), cudaSuccess);
  // The first launch outside a capture may load the module.
  ASSERT_TRUE(d.experts->enqueue(stream, d.args(out.as(), DType::kF32)).ok());
  ASSERT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
  ASSERT_EQ(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), cudaSuccess);
  ASSERT_TRUE(d.experts->enqueue(stream, d.args(out.as(), DType::kF32)).ok());
  ASSERT_EQ(cudaStreamEndCapture(stream, &graph), cudaSuccess);
  ASSERT_EQ(cudaGraphInstantiate(&exec, graph, 0), cudaSuccess);
  for (std::uint64_t seed = 0; seed < 20; ++seed) {
    c.routing = test::random_routing(seed, 48, 6, 2, seed % 3 == 0 ? 0.5 : 0.0);
    if (seed == 7)
      std::memset(c.routing.ids.data(), 0xFF, static_cast<std::size_t>(c.routing.ids.bytes()));
    d.ids.upload(c.routing.ids.data());
    d.weights.upload(c.routing.weights.data());
    ASSERT_EQ(cudaGraphLaunch(exec, stream), cudaSuccess);
    ASSERT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
    std::vector<float> got(48 * 256);
    out.download(got.data());
    const Tensor want = run_cuda(c);
    EXPECT_EQ(std::memcmp(got.data(), want.data(), got.size() * 4), 0) << seed;
    if (seed == 7) {
      EXPECT_EQ(got, std::vector<float>(48 * 256, 0.0F));
    }
  }
  (void)cudaGraphExecDestroy(exec);
  (void)cudaGraphDestroy(graph);
  (void)cudaStreamDestroy(stream);
}

TEST(CudaExperts, GraphReplaysWithOtherRoutingAndTokensWithoutExperts) {
  REQUIRE_HOPPER();
  for (const char* quant : {"fp8-block", "fp8-channel", "fp8-static", "int8", "mxfp4-bf16", "mxfp8",
                            "mxfp4-fp8", "nvfp4", "int4-fp8", "int4-g128", "int8-bf16", "f16"}) {
    replay_graph(quant);
  }
}

TEST_P(CudaExpertsSums, SharedRowsAreAddedOnce) {
  REQUIRE_HOPPER();
  const MoeProblem p = problem_of(GetParam(), "silu", 64, 64, 6, 2);
  const StandardCase c = test::make_case(71, p, 5, DType::kBF16, 1.0);
  const OnDevice d(c, create_on_device(c));
  const DeviceBytes out(5 * 64 * 2);
  CudaExpertsArgs a = d.args(out.as(), DType::kBF16);
  a.result.shared_rows = d.x.as();
  ASSERT_TRUE(d.experts->enqueue(nullptr, a).ok());
  std::vector<std::uint16_t> got(5 * 64);
  out.download(got.data());
  EXPECT_EQ(std::memcmp(got.data(), c.hidden_states.data(), got.size() * 2), 0);
}

}  // namespace
}  // namespace moesaic
