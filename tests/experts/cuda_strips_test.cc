// Codes, scales and zero points of the weights that a GPU decodes in registers: every code at every
// place, as the kernel computes it. Needs neither CUDA nor a device.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <memory>
#include <tuple>
#include <utility>
#include <vector>

#include "experts/sm90/codes_bytes.h"
#include "experts/sm90/codes_e4m3.h"
#include "experts/sm90/codes_int4.h"
#include "experts/sm90/codes_int6.h"
#include "experts/sm90/codes_integer.h"
#include "experts/sm90/codes_table.h"
#include "experts/sm90/experts.h"
#include "experts/sm90/experts_plan.h"
#include "experts/sm90/weight_codes.h"
#include "experts/weight_value.h"
#include "numerics/float_codec.h"
#include "numerics/integer.h"
#include "quant/code_values.h"
#include "support/experts_run.h"
#include "support/refusal.h"

namespace moesaic::cuda {
namespace {

using test::expect_refusal;

float half_of(std::uint32_t word, int element) {
  return f32_from_bf16(static_cast<std::uint16_t>(word >> (16 * element)));
}
float rounded(double v) { return f32_from_bf16(bf16_from_f32(static_cast<float>(v))); }

// What a fused multiply-add makes of the bits of a code, times kIntegerUnit.
float integer_of(std::uint32_t bits, float addend, std::uint32_t twice = kIntegerFactor) {
  const auto factor = static_cast<double>(half_of(twice, 0));
  const double exact = static_cast<double>(half_of(bits, 0)) * factor + static_cast<double>(addend);
  EXPECT_EQ(static_cast<double>(rounded(exact)), exact);
  return rounded(exact) * kIntegerUnit;
}
// What it makes of a zero point's byte.
float zero_addend(std::int32_t zero) {
  return half_of(static_cast<std::uint32_t>(zero), 0) * half_of(kZeroFactor, 0);
}

TEST(CudaStrips, Int4CodesLessEveryZeroPoint) {
  for (std::uint32_t code = 0; code < 16; ++code) {
    for (int place = 0; place < 8; ++place) {
      std::uint32_t word = 0;
      for (int n = 0; n < 8; ++n) word |= place_int4(n == place ? code : 15 - code, n / 2, n % 2);
      std::uint32_t a[4];
      int4_fragment(word, a);
      const std::uint32_t bits = a[place / 2] >> (16 * (place % 2)) & 0xFFFF;
      const bool odd = place / 2 % 2 != 0;
      EXPECT_EQ(a[place / 2] >> (16 * (1 - place % 2)) & 0xFFFF, (15 - code) * (odd ? 16 : 1));
      for (std::int32_t zero = 0; zero <= kLargestInt4Zero; ++zero) {
        const float want = static_cast<float>(static_cast<std::int32_t>(code) - zero);
        ASSERT_EQ(integer_of(bits, zero_addend(zero), odd ? kSixteenthsFactor : kIntegerFactor),
                  want)
            << code << ' ' << zero;
      }
    }
  }
}

TEST(CudaStrips, Int6CodesLessEveryZeroPoint) {
  for (std::uint32_t code = 0; code < 64; ++code) {
    for (int place = 0; place < 16; ++place) {  // of two steps
      std::uint32_t words[kInt6Words] = {};
      for (int n = 0; n < 16; ++n) {
        place_int6(n == place ? code : 63 - code, n / 2, n % 2, words);
      }
      for (int n = 0; n < 16; ++n) {
        std::uint32_t a[4];
        int6_fragment(words, n / 8, a);
        const std::uint32_t bits = a[n / 2 % 4] >> (16 * (n % 2)) & 0xFFFF;
        ASSERT_EQ(bits, n == place ? code : 63 - code) << code << ' ' << place << ' ' << n;
        for (std::int32_t zero = 0; n == place && zero < 256; ++zero) {
          const float want = static_cast<float>(static_cast<std::int32_t>(code) - zero);
          ASSERT_EQ(integer_of(bits, zero_addend(zero)), want) << code << ' ' << zero;
        }
      }
    }
  }
}

TEST(CudaStrips, TableIndicesBecomeTheirEntries) {
  std::array<std::uint16_t, 16> entries{};
  for (std::size_t c = 0; c < 16; ++c) {
    entries[c] = static_cast<std::uint16_t>(0x3F00 + 0x1137 * c);
  }
  const WordsOfTable words = words_of_table(entries);
  std::uint32_t table[8];
  for (std::size_t i = 0; i < 8; ++i) table[i] = words[i];
  for (std::uint32_t code = 0; code < 16; ++code) {
    for (int place = 0; place < 8; ++place) {
      std::uint32_t word = 0;
      for (int n = 0; n < 8; ++n) word |= place_index(n == place ? code : 15 - code, n / 2, n % 2);
      for (int n = 0; n < 8; ++n) {
        const std::uint32_t at = table_offset(word, n / 2);
        ASSERT_EQ(at % kTablePairBytes, 0U);
        const std::uint32_t pair = pair_of_table(table, static_cast<int>(at / kTablePairBytes));
        ASSERT_EQ(pair >> (16 * (n % 2)) & 0xFFFF, entries[n == place ? code : 15 - code])
            << code << ' ' << place << ' ' << n;
      }
    }
  }
}

TEST(CudaStrips, BytesBecomeIntegersAndE4m3Numbers) {
  for (std::uint32_t code = 0; code < 256; ++code) {
    for (int place = 0; place < 4; ++place) {
      const int index = place / 2, element = place % 2;
      std::uint32_t word = 0;
      for (int n = 0; n < 4; ++n) word |= place_byte(n == place ? code : 255 - code, n / 2, n % 2);
      const std::uint32_t bits = byte_pair(word, index) >> (16 * element) & 0xFFFF;
      for (int zero = 0; zero < 256; ++zero) {
        const float want = static_cast<float>(static_cast<int>(code) - zero);
        ASSERT_EQ(integer_of(bits, zero_addend(zero)), want) << code << ' ' << zero;
      }
      if ((code & 0x7F) == 0x7F || ((255 - code) & 0x7F) == 0x7F) continue;
      word = 0;
      for (int n = 0; n < 4; ++n) word |= place_e4m3(n == place ? code : 255 - code, n / 2, n % 2);
      std::uint32_t pairs[2];
      e4m3_pairs(word, pairs);
      const float value = half_of(pairs[index], element);
      const float factor = f32_from_bf16(static_cast<std::uint16_t>(kE4m3Factor));
      ASSERT_EQ(value * factor, f32_from_e4m3(static_cast<std::uint8_t>(code)));
      ASSERT_EQ(rounded(static_cast<double>(value * factor)), value * factor);
    }
  }
}

// A code of a byte as the image has it.
int stored_byte(const OperandQuant& weight, std::uint8_t code) {
  if (weight.dtype == DType::kU8) return code;
  return image_bits(weight) == 6 ? (code & 63) ^ 32 : code ^ 128;
}

// The strips of the second expert's w13.
struct Strips {
  explicit Strips(const char* quant) : problem(test::small_problem(quant)) {
    view.parts = 2;
    status = make_strips(plan.weight, plan.codes, "w13", view, plan.w13, nullptr, strips);
  }
  const MoeProblem problem;
  const test::StandardCase c = test::make_case(3, problem, 1, DType::kBF16);
  const std::unique_ptr<ExpertSource> source = make_stacked_source(c.weights.view());
  const ExpertWeightsView expert = source->expert(1).value();
  const ExpertsPlan plan = make_experts_plan(problem).value();
  experts::ProjectionView view = experts::w13_of(expert);
  CodeStrips strips;
  Status status;
};

// What the kernel makes of scale `at`: a bf16 number, and what that leaves.
struct ScaleParts {
  double upper, lower;
};
ScaleParts scale_parts(const ExpertsPlan& plan, const CodeStrips& strips, std::size_t at) {
  const auto unit = static_cast<double>(strip_unit(plan.weight));
  if (has_super_scales(plan.weight)) {
    const float number =
        f32_from_f16(strips.super[at / static_cast<std::size_t>(plan.codes.units)]);
    const double whole = static_cast<double>(number) * unit * unit;
    const auto bits = std::bit_cast<std::uint32_t>(static_cast<float>(whole)) & 0xFFFF0000U;
    const auto first = static_cast<double>(std::bit_cast<float>(bits)), second = whole - first;
    EXPECT_EQ(static_cast<double>(rounded(second)), second) << "a bf16 number";
    const auto code =
        static_cast<double>(integer_of(strips.codes[at], -128.0F / kIntegerUnit) / kIntegerUnit);
    const auto upper =
        static_cast<double>(rounded(first * code + static_cast<double>(rounded(second * code))));
    const auto rest = static_cast<double>(rounded(first * code - upper));
    return {upper / unit, static_cast<double>(rounded(second * code + rest)) / unit};
  }
  const auto upper = static_cast<double>(f32_from_bf16(strips.upper[at]));
  if (has_rests(plan.weight)) {
    return {upper / unit, static_cast<double>(f32_from_bf16(strips.lower[at])) / unit};
  }
  const auto bits = static_cast<std::uint32_t>(strips.upper[at]) << 16 |
                    static_cast<std::uint32_t>(strips.lower[at]) << 8;
  return {upper / unit, (static_cast<double>(std::bit_cast<float>(bits)) - upper) / unit};
}

// What the kernel makes of a scale: a factor of sums, to the last bits that are kept, or v * s in one
// rounding.
TEST(CudaStrips, ScalesOfEveryDtypeAreOneRounding) {
  for (const char* quant :
       {"int4-g128", "int4-g32", "awq", "gptq", "int4-channel", "int8-bf16", "u8-zero", "q3k",
        "q3k-super", "q6k", "q6k-super", "fp8-bf16", "nf4-bf16"}) {
    SCOPED_TRACE(quant);
    const Strips made(quant);
    ASSERT_TRUE(made.status.ok());
    const auto& [plan, view, strips] = std::tie(made.plan, made.view, made.strips);
    const std::int64_t units = plan.w13.chunks() * plan.codes.units, unit = 64 / plan.codes.units;
    const bool zeros = plan.codes.zero_at != 0, fp8 = plan.weight.dtype == DType::kF8E4M3;
    const bool sums = has_scales_of_sums(plan.weight);
    ASSERT_EQ(sums, plan.codes.units == 1);
    ASSERT_EQ(strips.zero.empty(), !zeros);
    const quant::CodeValues values = quant::code_values_bf16(plan.weight);
    for (std::int64_t n = 0; n < plan.w13.rows; ++n) {
      for (std::int64_t k = 0; k < plan.w13.columns; ++k) {
        const auto at = static_cast<std::size_t>(n * units + k / unit);
        const auto [upper, lower] = scale_parts(plan, strips, at);
        const double whole = upper + lower;
        ASSERT_EQ(static_cast<double>(rounded(lower)), lower) << "a bf16 number";
        double v = 0;
        const std::int64_t i = n * plan.w13.columns + k;
        const auto* const codes = view.weight.as<std::uint8_t>();
        if (plan.weight.table != CodeTable::kNone) {
          v = static_cast<double>(values[nibble_at(codes, i)]);
        } else if (dtype_bits(plan.weight.dtype) == 4) {
          const bool is_signed = plan.weight.dtype == DType::kI4;
          v = (is_signed ? nibble_at(codes, i) ^ 8 : nibble_at(codes, i)) - (zeros ? strips.zero[at]
                                                                             : is_signed ? 8
                                                                                         : 0);
        } else if (fp8) {
          v = static_cast<double>(f32_from_e4m3(codes[i]));
        } else {
          v = stored_byte(plan.weight, codes[i]) -
              (zeros ? strips.zero[at] : 1 << (image_bits(plan.weight) - 1));
        }
        ASSERT_EQ(static_cast<double>(rounded(v)), v) << "an operand";
        const double got =
            sums
                ? v * whole
                : static_cast<double>(rounded(v * upper + static_cast<double>(rounded(v * lower))));
        OperandQuant exact = plan.weight;
        double want = experts::weight_value(exact, view, n, k);
        if (plan.weight.table != CodeTable::kNone) {  // the entry is rounded first, by the scheme
          const auto stored =
              static_cast<double>(quant::code_values(plan.weight)[nibble_at(codes, i)]);
          want = stored == 0 ? 0 : want / stored * v;
        }
        ASSERT_LE(std::abs(got - want), std::abs(want) * ((sums ? 0 : 0x1p-8) + 0x1p-15))
            << n << ' ' << k;
      }
    }
  }
}

// What the kernel makes of code q beside a scale and a minimum: fma(v, upper, fma(v, lower, offset)).
struct WithMinimum {
  double weight, offset;
};
WithMinimum with_minimum(const ExpertsPlan& plan, const CodeStrips& strips, std::size_t at,
                         int code) {
  const auto [upper, lower] = scale_parts(plan, strips, at);
  const double v = code - strips.zero[at];
  EXPECT_EQ(static_cast<double>(rounded(v)), v) << "an operand";
  const auto offset = static_cast<double>(f32_from_bf16(strips.offset[at]));
  const auto inner = static_cast<double>(rounded(v * lower + offset));
  return {static_cast<double>(rounded(v * upper + inner)), offset};
}

// A minimum is a zero point and at most half a scale, so that it is rounded as little as that is.
TEST(CudaStrips, MinimaAreZeroPointsAndOffsets) {
  for (const char* quant : {"q2k", "q2k-super", "q4k", "q5k", "q5k-super", "q4k-m"}) {
    SCOPED_TRACE(quant);
    const Strips made(quant);
    ASSERT_TRUE(made.status.ok());
    const auto& [plan, view, strips] = std::tie(made.plan, made.view, made.strips);
    const std::int64_t units = plan.w13.chunks() * plan.codes.units, unit = 64 / plan.codes.units;
    double largest_offset = 0;
    for (std::int64_t n = 0; n < plan.w13.rows; ++n) {
      for (std::int64_t k = 0; k < plan.w13.columns; ++k) {
        const auto at = static_cast<std::size_t>(n * units + k / unit);
        const std::int64_t i = n * plan.w13.columns + k;
        const auto* const codes = view.weight.as<std::uint8_t>();
        const bool four = dtype_bits(plan.weight.dtype) == 4;
        const int code = four ? int{nibble_at(codes, i)} : stored_byte(plan.weight, codes[i]);
        const auto [got, offset] = with_minimum(plan, strips, at, code);
        const std::int64_t group = n * view.scale.dim(1) + k / plan.weight.block_k;
        const auto scale = static_cast<double>(view.scale.as<float>()[group]);
        const double want = experts::weight_value(plan.weight, view, n, k);
        if (scale != 0) {  // else the offset is the minimum
          ASSERT_LE(std::abs(offset), scale * (0.5 + 0x1p-8));
          largest_offset = std::max(largest_offset, std::abs(offset) / scale);
        }
        // One rounding of the weight, one of the offset, one of the inner product, 2^-8 each.
        ASSERT_LE(std::abs(got - want), std::abs(want) * 0x1.02p-8 + scale * 0x1.1p-8)
            << n << ' ' << k;
      }
    }
    EXPECT_GT(largest_offset, 0.4);
  }
}

TEST(CudaStrips, ImagesHaveRoomForWhatTheStripHas) {
  const auto image = [](const char* quant, bool exact) {
    return code_image(test::scheme_called(quant).weight, exact);
  };
  EXPECT_EQ(image("int4-g128", true).slab_bytes, 128 * (32 + 2));
  EXPECT_EQ(image("int4-g128", false).slab_bytes, 128 * (32 + 3));
  EXPECT_EQ(image("int4-g32", true).slab_bytes, 128 * (32 + 4));
  EXPECT_EQ(image("awq", false).slab_bytes, 128 * (32 + 4));
  EXPECT_EQ(image("awq", false).low_at, 128 * 34);
  EXPECT_EQ(image("awq", false).zero_at, 128 * 35);
  EXPECT_EQ(image("awq", true).zero_at, 128 * 34);
  EXPECT_EQ(image("int8-bf16", false).slab_bytes, 128 * (64 + 3));
  EXPECT_EQ(image("q6k", false).slab_bytes, 128 * (64 + 4 * 3));
  EXPECT_EQ(image("int4-g32", true).units, 2);
  EXPECT_EQ(image("q6k", true).units, 4);
  EXPECT_EQ(image("q4k", false).slab_bytes, 128 * (32 + 2 * 7));
  EXPECT_EQ(image("q4k", false).zero_at, 128 * (32 + 2 * 4));
  EXPECT_EQ(image("q4k", false).offset_at, 128 * (32 + 2 * 5));
  EXPECT_EQ(image("q4k-m", false).slab_bytes, 128 * (64 + 4 * 6));
  EXPECT_EQ(image("q3k", false).slab_bytes, 128 * (48 + 4 * 3)) << "4-bit codes in 6 bits";
  EXPECT_EQ(image("q3k-super", false).slab_bytes, 128 * (32 + 4 + 2));
  EXPECT_EQ(image("q2k-super", false).slab_bytes, 128 * (32 + 4 * 4 + 2));
  EXPECT_EQ(image("q2k-super", false).zero_at, 128 * (32 + 4 + 2));
  EXPECT_EQ(image("q6k-super", false).slab_bytes, 128 * (48 + 4 + 2));
  EXPECT_EQ(image("q6k-super", true).low_at, 128 * (48 + 4));
  EXPECT_EQ(image("q5k-super", false).slab_bytes, 128 * (48 + 2 * 4 + 2));
  for (const char* quant :
       {"int4-g32", "awq", "q6k", "u8-zero", "fp8-bf16", "nf4-bf16", "q2k", "q3k", "q4k", "q5k",
        "q4k-m", "q2k-super", "q3k-super", "q5k-super", "q6k-super"}) {
    for (const bool exact : {false, true}) {
      MoeProblem p = test::small_problem(quant);
      const FormatRow& row = *format_of(p).value();
      EXPECT_LE(image(quant, exact).slab_bytes, row.slab_bytes) << quant;
      EXPECT_EQ(image(quant, exact).slab_bytes % 16, 0) << quant << ": a bulk copy";
    }
  }
}

// Sums of two chunks would mix groups of 64.
TEST(CudaStrips, ChunksOfSumsHaveOneScale) {
  const auto chunks = [](const char* quant, std::int64_t columns) {
    OperandQuant w = test::scheme_called(quant).weight;
    if (columns >= 0) w.block_k = columns;
    return int{chunks_of_sums(w)};
  };
  EXPECT_EQ(chunks("int4-g128", -1), 2);
  EXPECT_EQ(chunks("fp8-bf16", -1), 2);
  EXPECT_EQ(chunks("int8-bf16", -1), 2) << "a scale per row";
  EXPECT_EQ(chunks("awq", -1), 1) << "groups of 64";
  EXPECT_EQ(chunks("int4-g128", 192), 1);
  EXPECT_EQ(chunks("int4-g128", 256), 2);
}

// Strips of the first expert's w2 when its weights have been changed.
Status strips_of(const char* quant, bool exact_scales, const auto& change,
                 CodeStrips* made = nullptr) {
  const MoeProblem p = test::small_problem(quant);
  test::StandardCase c = test::make_case(5, p, 1, DType::kBF16);
  change(c);
  const auto source = make_stacked_source(c.weights.view());
  const ExpertWeightsView expert = source->expert(0).value();
  ExpertsPlan plan = make_experts_plan(p).value();
  plan.set_image(exact_scales);
  CodeStrips strips;
  return make_strips(plan.weight, plan.codes, "w2", experts::w2_of(expert), plan.w2, nullptr,
                     made != nullptr ? *made : strips);
}

// Minima far outside of the codes, beside scales of zero, and of the other sign.
TEST(CudaStrips, AnyMinimumHasASmallOffsetOrALargeWeight) {
  struct Case {
    float scale, minimum;
    int zero;
    double most;  // |offset|
  };
  const ExpertsPlan plan = make_experts_plan(test::small_problem("q4k")).value();
  for (const Case& c :
       {Case{0.25F, 1.875F, 8, 0.125}, Case{0.25F, -3.0F, 0, 3.0}, Case{-0.25F, -1.0F, 4, 0.0},
        Case{0.25F, 100.0F, kLargestInt4Zero, 68.5}, Case{0.0F, 0.75F, 0, 0.75},
        Case{0.0F, 0.0F, 0, 0.0}, Case{1e-38F, 1e30F, kLargestInt4Zero, 1.004e30}}) {
    SCOPED_TRACE(testing::Message() << c.scale << ' ' << c.minimum);
    CodeStrips strips;
    const auto set = [&](auto& to) {
      to.weights.w2_scale.template as<float>()[0] = c.scale;
      to.weights.w2_min.template as<float>()[0] = c.minimum;
    };
    ASSERT_TRUE(strips_of("q4k", false, set, &strips).ok());
    EXPECT_EQ(strips.zero[0], c.zero);
    for (int code = 0; code < 16; ++code) {
      const auto [got, offset] = with_minimum(plan, strips, 0, code);
      const double want = static_cast<double>(c.scale) * code - static_cast<double>(c.minimum);
      ASSERT_LE(std::abs(offset), c.most);
      ASSERT_LE(std::abs(got - want),
                0x1.04p-8 * (2 * std::abs(want) + 0.5 * std::abs(static_cast<double>(c.scale))))
          << code;
    }
  }
  const auto huge = [](auto& to) {
    to.weights.w2_min.template as<float>()[0] = std::numeric_limits<float>::max();
  };
  expect_refusal(strips_of("q4k", false, huge), StatusCode::kUnsupported,
                 {"w2_min: got 3.40", "row 0", "BF16"});
}

TEST(CudaStrips, ScalesWithoutAPlaceForLowBitsAreBf16) {
  const auto third = [](auto& c) { c.weights.w2_scale.template as<float>()[3] = 0.3F; };
  EXPECT_TRUE(strips_of("int4-g32-bf16s", true, [](auto&) {}).ok());
  expect_refusal(strips_of("int4-g32-bf16s", true, third), StatusCode::kInvalidArgument,
                 {"w2_scale: got 0.3 for row 1", "BF16 (quant.weight.scale_dtype)"});
  expect_refusal(strips_of("int4-g32", true, third), StatusCode::kUnsupported,
                 {"w2_scale: got", "BF16 (as in the first expert)"});
  EXPECT_TRUE(strips_of("int4-g32", false, third).ok());
}

TEST(CudaStrips, ScalesThatAreTooLargeInTheImageAreRefused) {
  const auto set = [](float to) {
    return [to](auto& c) { c.weights.w2_scale.template as<float>()[3] = to; };
  };
  for (const char* quant : {"int4-g32", "q6k"}) {
    EXPECT_TRUE(strips_of(quant, false, set(0x1p121F)).ok());
    expect_refusal(strips_of(quant, false, set(0x1p122F)), StatusCode::kUnsupported,
                   {"w2_scale: got 5.316", "row", "at most 5.316"});
  }
  EXPECT_TRUE(strips_of("nf4-bf16", false, set(0x1p122F)).ok()) << "as they are";
}

TEST(CudaStrips, ScalesThatAreNoIntegersTimesANumberAreRefused) {
  const auto set = [](float to) {
    return [to](auto& c) { c.weights.w2_scale.template as<float>()[4 * 5 + 2] = to; };
  };
  EXPECT_TRUE(strips_of("q6k-super", false, set(0)).ok());
  EXPECT_TRUE(strips_of("q6k", false, set(0x1.234566p-5F)).ok());
  expect_refusal(strips_of("q6k-super", false, set(0x1.234566p-5F)), StatusCode::kInvalidArgument,
                 {"w2_scale: got numbers at row 5, columns from 0 on", "integers of 8 bits",
                  "one number of F16", "(quant.weight.super_bits)"});
}

TEST(CudaStrips, CodesOfMoreThanSixBitsAreRefused) {
  const auto set = [](int code) {
    return [code](auto& c) {
      c.weights.w2.template as<std::int8_t>()[64 * 5 + 7] = static_cast<std::int8_t>(code);
    };
  };
  for (const int code : {-32, 31}) EXPECT_TRUE(strips_of("q6k-super", false, set(code)).ok());
  for (const int code : {-33, 32}) {
    EXPECT_TRUE(strips_of("q6k", false, set(code)).ok());
    expect_refusal(strips_of("q6k-super", false, set(code)), StatusCode::kInvalidArgument,
                   {"w2: got code", code < 0 ? " -33 " : " 32 ", "row 5, column 7",
                    "need -32 to 31 (quant.weight.code_bits)"});
  }
}

TEST(CudaStrips, WhatHasNoPlaceIsRefused) {
  const auto refused = [](const char* quant, auto change, const char* words) {
    expect_refusal(strips_of(quant, false, change), StatusCode::kUnsupported, {words});
  };
  refused(
      "awq", [](auto& c) { c.weights.w2_zero.template as<std::uint8_t>()[3] = 128; },
      "w2_zero: got 128 for row 1, need 0 .. 127 on a GPU");
  refused(
      "fp8-bf16", [](auto& c) { c.weights.w2.template as<std::uint8_t>()[128 * 7 + 1] = 0xFF; },
      "w2: got NaN in row 7");
  const auto text = [](const MoeProblem& p) { return CudaExperts::can_implement(p).message(); };
  MoeProblem p = test::small_problem("int4-g32");
  p.quant = with_weight(p.quant, [&] {
    OperandQuant w = p.quant.weight;
    w.block_k = 24;
    return w;
  }());
  EXPECT_EQ(text(p), "block_k: got 24, need a multiple of 16");
  EXPECT_EQ(text(test::small_problem("fp8-bf16-64x64")),
            "weight: got blocks of 64x64, need 128x128");
  p = test::small_problem("gptq");
  p.top_k = 1;
  EXPECT_EQ(text(p), "");
  p.apply_router_weight_on_input = true;
  EXPECT_EQ(text(p), "apply_router_weight_on_input: got act-order weights, need others");
  p = test::small_problem("int8-bf16");
  p.activation = make_activation("gelu_tanh", {}).value();
  EXPECT_EQ(text(p), "");
  p.activation = make_activation("gelu", {}).value();
  EXPECT_EQ(text(p),
            "activation: got gelu with I8 weights, need silu, swigluoai, swiglustep, gelu_tanh or "
            "relu2_no_mul");
}

}  // namespace
}  // namespace moesaic::cuda
