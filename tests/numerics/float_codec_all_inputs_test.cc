// fp32 -> bf16, f16, e4m3, e5m2, e2m1 against a search for the nearest value (grid.h): every run
// takes a strided sample and all inputs near a rounding boundary. All 2^32 inputs of all formats,
// about two minutes on two cores:
//   MOESAIC_EXHAUSTIVE=1 build/dev/tests/numerics/numerics_test --gtest_filter='AllInputs.*'
#include <gtest/gtest.h>

#include <atomic>
#include <bit>
#include <cstdlib>

#include "numerics/float_codec.h"
#include "numerics/grid.h"

namespace moesaic {
namespace {

using test::Format;
using test::NearestCode;

constexpr std::int64_t kFiniteMagnitudes = 0x7F800000;  // bit patterns 0 .. infinity (exclusive)
constexpr std::int64_t kChunk = std::int64_t{1} << 20;

bool exhaustive() {
  const char* value = std::getenv("MOESAIC_EXHAUSTIVE");
  return value != nullptr && std::string(value) == "1";
}

// Checks both signs of one magnitude. Returns the code as a hint for the next, larger one.
template <class Encode>
std::uint32_t check_one(const Format& f, const NearestCode& nearest, const Encode& encode,
                        std::uint32_t bits, std::uint32_t hint, std::atomic<std::int64_t>& wrong,
                        std::atomic<std::uint32_t>& example) {
  const std::uint32_t sign = 1U << (f.exponent_bits + f.mantissa_bits);
  const auto x = std::bit_cast<float>(bits);
  const std::uint32_t want = nearest.encode(static_cast<double>(x), hint);
  if (encode(x) != want || encode(-x) != (want | sign)) {
    ++wrong;
    example = bits;
  }
  return want;
}

template <class Encode>
void check_format(const Format& f, const Encode& encode) {
  SCOPED_TRACE(f.name);
  const NearestCode nearest(f);
  // 251 is prime: the sample visits every residue of the low bits.
  const std::int64_t stride = exhaustive() ? 1 : 251;
  std::atomic<std::int64_t> wrong = 0;
  std::atomic<std::uint32_t> example = 0;
#pragma omp parallel for schedule(dynamic)
  for (std::int64_t begin = 0; begin < kFiniteMagnitudes; begin += kChunk) {
    const std::int64_t end = std::min(begin + kChunk, kFiniteMagnitudes);
    std::uint32_t hint = nearest.encode(
        static_cast<double>(std::bit_cast<float>(static_cast<std::uint32_t>(begin))));
    for (std::int64_t bits = begin + begin % stride; bits < end; bits += stride) {
      hint = check_one(f, nearest, encode, static_cast<std::uint32_t>(bits), hint, wrong, example);
    }
  }
  // Every rounding boundary with the eight inputs around it.
  for (const double midpoint : nearest.midpoints()) {
    const auto at = std::bit_cast<std::uint32_t>(static_cast<float>(midpoint));
    for (std::uint32_t bits = at < 4 ? 0 : at - 4; bits <= at + 4; ++bits) {
      if (bits >= kFiniteMagnitudes) continue;
      check_one(f, nearest, encode, bits,
                nearest.encode(static_cast<double>(std::bit_cast<float>(bits))), wrong, example);
    }
  }
  EXPECT_EQ(wrong, 0) << "for example fp32 bits " << example;

  // Infinities and NaNs: 2^24 more inputs.
  const std::uint32_t sign = 1U << (f.exponent_bits + f.mantissa_bits);
  const std::uint32_t over = f.saturates ? f.max_code : f.max_code + 1;
  EXPECT_EQ(encode(std::bit_cast<float>(0x7F800000U)), over);
  EXPECT_EQ(encode(std::bit_cast<float>(0xFF800000U)), over | sign);
  std::int64_t bad_nans = 0;
  for (std::uint32_t payload = 1; payload < 0x00800000U;
       payload += static_cast<std::uint32_t>(stride)) {
    for (const std::uint32_t s : {0U, 0x80000000U}) {
      const std::uint32_t code = encode(std::bit_cast<float>(s | 0x7F800000U | payload));
      const bool is_nan = (code & (sign - 1)) > f.max_code + 1;
      if (f.saturates ? code != f.max_code : !is_nan) ++bad_nans;
    }
  }
  EXPECT_EQ(bad_nans, 0);
}

TEST(AllInputs, Bf16) { check_format(test::formats()[0], bf16_from_f32); }
TEST(AllInputs, F16) { check_format(test::formats()[1], f16_from_f32); }
TEST(AllInputs, E4m3) { check_format(test::formats()[2], e4m3_from_f32); }
TEST(AllInputs, E2m1) { check_format(test::formats()[4], e2m1_from_f32); }

// A second oracle where the compiler has the type: its own conversion.
#if defined(__aarch64__)
#define MOESAIC_HALF __fp16
#elif defined(__FLT16_MAX__)
#define MOESAIC_HALF _Float16
#endif
#ifdef MOESAIC_HALF
TEST(AllInputs, F16EqualsTheCompilersConversion) {
  const std::int64_t stride = exhaustive() ? 1 : 4093;
  std::atomic<std::int64_t> wrong = 0;
#pragma omp parallel for schedule(dynamic, 4096)
  for (std::int64_t bits = 0; bits < kFiniteMagnitudes; bits += stride) {
    const auto x = std::bit_cast<float>(static_cast<std::uint32_t>(bits));
    if (f16_from_f32(x) != std::bit_cast<std::uint16_t>(static_cast<MOESAIC_HALF>(x))) ++wrong;
  }
  EXPECT_EQ(wrong, 0);
}
#endif

}  // namespace
}  // namespace moesaic
