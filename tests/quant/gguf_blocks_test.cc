#include "quant/gguf_blocks.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include "numerics/codec.h"
#include "quant/gguf_oracles.h"
#include "quant/gguf_values.h"
#include "support/half.h"
#include "support/metrics.h"
#include "support/random.h"
#include "support/refusal.h"

namespace moesaic {
namespace {

using test::expect_refusal;
using Bytes = std::vector<std::uint8_t>;

Tensor tensor_of(const Bytes& bytes, std::int64_t rows) {
  Tensor t =
      Tensor::zeros(DType::kU8, {rows, static_cast<std::int64_t>(bytes.size()) / rows}).value();
  std::memcpy(t.data(), bytes.data(), bytes.size());
  return t;
}
Bytes from_hex(const std::string& hex) {
  Bytes out;
  for (std::size_t i = 0; i < hex.size(); i += 2) {
    out.push_back(static_cast<std::uint8_t>(std::stoi(hex.substr(i, 2), nullptr, 16)));
  }
  return out;
}
Tensor values_of(quant::GgufType type, const Bytes& row, std::int64_t columns) {
  Result<Tensor> values = test::gguf_values(type, tensor_of(row, 1).view(), columns);
  EXPECT_TRUE(values.ok()) << values.status().message();
  return std::move(*values);
}
// Random bytes with finite scales: every field takes every value.
Bytes random_blocks(test::Rng& rng, const test::GgufCase& c, std::int64_t count) {
  const quant::GgufTypeInfo& info = *quant::gguf_type_info(static_cast<std::uint32_t>(c.type));
  Bytes bytes(static_cast<std::size_t>(count * info.block_bytes));
  for (auto& b : bytes) b = static_cast<std::uint8_t>(rng.next());
  for (std::int64_t i = 0; i < count; ++i) {
    std::uint8_t* block = bytes.data() + i * info.block_bytes;
    for (const int at : c.halves) {
      if ((block[at + 1] & 0x7C) == 0x7C) block[at + 1] ^= 0x40;
    }
    if (c.type == quant::GgufType::kMXFP4 && block[0] == 0xFF) block[0] = 0;
  }
  return bytes;
}

// Codes and scales of the fp4 types as these formats have them elsewhere are the same numbers.
TEST(GgufBlocks, Fp4HasItsValuesInTheOtherOrder) {
  constexpr std::int64_t kRows = 40, kColumns = 192;
  int cases = 0;
  for (const test::GgufCase& c : test::gguf_cases()) {
    const bool mx = c.type == quant::GgufType::kMXFP4;
    if (!mx && c.type != quant::GgufType::kNVFP4) continue;
    const quant::GgufTypeInfo& info = *quant::gguf_type_info(static_cast<std::uint32_t>(c.type));
    const std::int64_t count = kRows * kColumns / info.block_elems;
    test::Rng rng(8);
    const Tensor blocks = tensor_of(random_blocks(rng, c, count), kRows);
    Tensor codes = Tensor::zeros(DType::kF4E2M1, {kRows, kColumns}).value();
    const DType of_scale = mx ? DType::kF8E8M0 : DType::kF8E4M3;
    Tensor scale = Tensor::zeros(of_scale, {kRows, kColumns / info.group}).value();
    test::poison(codes.view());
    test::poison(scale.view());
    const Status made = quant::fp4_from_gguf(c.type, blocks.view(), codes.view(), scale.view());
    ASSERT_TRUE(made.ok()) << made.to_string();
    std::vector<double> want(static_cast<std::size_t>(kRows * kColumns));
    for (std::int64_t i = 0; i < count; ++i) {
      c.oracle(blocks.as<const std::uint8_t>() + i * info.block_bytes,
               want.data() + i * info.block_elems);
    }
    const auto* pairs = codes.as<const std::uint8_t>();
    for (std::int64_t i = 0; i < kRows * kColumns; ++i) {
      const int code = pairs[i / 2] >> (i % 2 * 4) & 15;
      const auto factor = static_cast<double>(load_as_f32(scale.data(), of_scale, i / info.group));
      const double got =
          static_cast<double>(f32_from_e2m1(static_cast<std::uint8_t>(code))) * factor;
      ASSERT_EQ(got, want[static_cast<std::size_t>(i)]) << info.name << ' ' << i;
      ASSERT_TRUE(factor != 0.0 || code == 0) << i;
    }
    ++cases;
  }
  EXPECT_EQ(cases, 2);
}

TEST(GgufBlocks, EveryTypeFollowsItsDefinition) {
  for (const test::GgufCase& c : test::gguf_cases()) {
    const quant::GgufTypeInfo& info = *quant::gguf_type_info(static_cast<std::uint32_t>(c.type));
    SCOPED_TRACE(std::string(info.name));
    test::Rng rng(static_cast<std::uint64_t>(c.type) + 1);
    constexpr std::int64_t kRows = 60, kPerRow = 3;
    const Bytes bytes = random_blocks(rng, c, kRows * kPerRow);
    const std::int64_t columns = kPerRow * info.block_elems;
    const Tensor blocks = tensor_of(bytes, kRows);
    std::vector<double> want(static_cast<std::size_t>(kRows * columns));
    for (std::int64_t i = 0; i < kRows * kPerRow; ++i) {
      c.oracle(bytes.data() + i * info.block_bytes, want.data() + i * info.block_elems);
    }
    Tensor codes = Tensor::zeros(DType::kI8, {kRows, columns}).value();
    const Shape grid{kRows, columns / info.group};
    Tensor scale = Tensor::zeros(DType::kF32, grid).value();
    Tensor min = Tensor::zeros(DType::kF32, grid).value();
    test::poison(codes.view());
    test::poison(scale.view());
    const Status split = quant::split_gguf(c.type, blocks.view(), codes.view(), scale.view(),
                                           info.has_min ? min.view() : TensorView());
    ASSERT_TRUE(split.ok()) << split.message();
    int smallest = 127, largest = -128;
    for (std::size_t i = 0; i < want.size(); ++i) {
      const int code = codes.as<std::int8_t>()[i];
      smallest = std::min(smallest, code);
      largest = std::max(largest, code);
      const std::size_t g = i / static_cast<std::size_t>(info.group);
      // scale*code and min are exact in fp32 (at most 11 + 6 + 7 bits), their difference is
      // rounded once: the double difference rounded once is the same number.
      ASSERT_EQ(scale.as<float>()[g] * static_cast<float>(code) - min.as<float>()[g],
                static_cast<float>(want[i]))
          << i;
    }
    // What the table promises about codes.
    EXPECT_EQ(smallest < 0, info.is_signed);
    if (info.code_bits == 4) {
      EXPECT_GE(smallest, info.is_signed ? -8 : 0);
      EXPECT_LE(largest, info.is_signed ? 7 : 15);
    }
  }
}

// Types that are read are those that have an oracle, and the plain ones.
TEST(GgufBlocks, EveryTypeHasAnOracle) {
  std::size_t with_codes = 0;
  for (std::uint32_t id = 0; id < 64; ++id) {
    const quant::GgufTypeInfo* info = quant::gguf_type_info(id);
    if (info == nullptr) continue;
    if (info->group != 0) ++with_codes;
    EXPECT_NE((", " + quant::gguf_type_names() + ", ").find(std::string(info->name)),
              std::string::npos);
  }
  EXPECT_EQ(with_codes, test::gguf_cases().size());
}

// Values of single codes, from the formats' descriptions.
TEST(GgufBlocks, HandMadeBlocks) {
  // Q3_K with d = 1, code 0 of every value (two bits 0, third bit 0: -4) and scale 33 of the first
  // group, 0 of the others: 4 bits 1 and, of 33 = 2 * 16 + 1, the bits 2.
  Bytes q3(110, 0);
  q3[96] = 0x01;
  q3[104] = 0x02;
  q3[109] = 0x3C;
  Tensor out = values_of(quant::GgufType::kQ3_K, q3, 256);
  EXPECT_EQ(out.as<float>()[15], (33 - 32) * -4.0F);
  EXPECT_EQ(out.as<float>()[16], (0 - 32) * -4.0F);
  q3[0] = 0x01;   // third bit of value 0
  q3[32] = 0x03;  // two bits of value 0
  out = values_of(quant::GgufType::kQ3_K, q3, 256);
  EXPECT_EQ(out.as<float>()[0], 3.0F);
  EXPECT_EQ(out.as<float>()[32], (0 - 32) * -4.0F);

  // IQ4_XS with d = 1: scale 33 of the last sub-block is low nibble 1 and high bits 2.
  Bytes iq4(136, 0);
  iq4[1] = 0x3C;
  iq4[3] = 0x80;
  iq4[7] = 0x10;
  iq4[8 + 16 * 7] = 0xF8;  // values 224 and 240: entries 8 and 15
  out = values_of(quant::GgufType::kIQ4_XS, iq4, 256);
  EXPECT_EQ(out.as<float>()[224], 1.0F);
  EXPECT_EQ(out.as<float>()[240], 113.0F);
  EXPECT_EQ(out.as<float>()[225], -127.0F);
  EXPECT_EQ(out.as<float>()[0], 32.0F * 127.0F);

  // TQ1_0 with d = 2: the digits 0, 1, 2, 1, 0 are 0*81 + 27 + 2*9 + 3 = 48 of 243, and the byte is
  // the next above 48 / 243 * 256.
  Bytes ternary(54, 0);
  ternary[53] = 0x40;
  ternary[3] = 51;
  out = values_of(quant::GgufType::kTQ1_0, ternary, 256);
  const float want[] = {-2, 0, 2, 0, -2};
  for (int n = 0; n < 5; ++n) EXPECT_EQ(out.as<float>()[32 * n + 3], want[n]) << n;
}

TEST(GgufBlocks, PublishedBytes) {
  // 0.25 times 0, -1, 2, -3 .. -31, as ggml's encoder of Q4_0 writes it: d = 31/32.
  const Tensor q4 =
      values_of(quant::GgufType::kQ4_0, from_hex("c03bc848d937d937ea26ea26fb15fb15fc04"), 32);
  EXPECT_EQ(test::half_value(0x3BC0), 0.96875);
  for (int i = 0; i < 32; ++i) {
    const float x = 0.25F * static_cast<float>(i % 2 == 0 ? i : -i);
    EXPECT_LE(std::abs(q4.as<float>()[i] - x), i == 30 ? 0.75F : 0.49F) << i;
  }

  // The packed scale pairs of Q4_K, seen through blocks whose codes are all 1: value = sc - m.
  Bytes k(144, 0x11);
  const Bytes head = from_hex("003c003c4182c304854607c821436587");  // d = dmin = 1
  std::copy(head.begin(), head.end(), k.begin());
  Tensor codes = Tensor::zeros(DType::kI8, {1, 256}).value();
  Tensor scale = Tensor::zeros(DType::kF32, {1, 8}).value();
  Tensor min = Tensor::zeros(DType::kF32, {1, 8}).value();
  ASSERT_TRUE(quant::split_gguf(quant::GgufType::kQ4_K, tensor_of(k, 1).view(), codes.view(),
                                scale.view(), min.view())
                  .ok());
  const float sc[] = {1, 2, 3, 4, 17, 35, 53, 7};
  const float m[] = {5, 6, 7, 8, 34, 20, 6, 56};
  for (int j = 0; j < 8; ++j) {
    EXPECT_EQ(scale.as<float>()[j], sc[j]) << j;
    EXPECT_EQ(min.as<float>()[j], m[j]) << j;
  }
}

TEST(GgufBlocks, Misuse) {
  EXPECT_EQ(quant::gguf_type_info(4), nullptr);
  expect_refusal(quant::gguf_row_bytes(4, 32).status(), StatusCode::kUnsupported,
                 {"GGUF type", "id 4", "Q4_K", "IQ4_XS", "or NVFP4"});
  for (const std::uint32_t grid : {16U, 17U, 18U, 19U, 21U, 22U, 29U}) {  // IQ1, IQ2, IQ3
    EXPECT_EQ(quant::gguf_type_info(grid), nullptr) << grid;
  }
  expect_refusal(quant::gguf_row_bytes(12, 288).status(), StatusCode::kInvalidShape,
                 {"288", "multiple of 256", "Q4_K"});
  expect_refusal(quant::gguf_row_bytes(0, std::int64_t{1} << 62).status(),
                 StatusCode::kLimitExceeded, {"columns"});
  EXPECT_EQ(quant::gguf_row_bytes(14, 512).value(), 420);
  Tensor codes = Tensor::zeros(DType::kI8, {2, 32}).value();
  Tensor scale = Tensor::zeros(DType::kF32, {2, 1}).value();
  const auto split = [&](quant::GgufType type, const Tensor& blocks) {
    return quant::split_gguf(type, blocks.view(), codes.view(), scale.view(), {});
  };
  Tensor blocks = Tensor::zeros(DType::kU8, {2, 19}).value();
  expect_refusal(split(quant::GgufType::kQ4_0, blocks), StatusCode::kInvalidShape,
                 {"blocks", "[2, 19]", "[2, 18]"});
  Tensor good = Tensor::zeros(DType::kU8, {2, 18}).value();
  good.as<std::uint8_t>()[19] = 0x7E;  // row 1: an f16 NaN
  expect_refusal(split(quant::GgufType::kQ4_0, good), StatusCode::kInvalidArgument,
                 {"row 1, block 0", "NaN", "finite"});
  Tensor mx = Tensor::zeros(DType::kU8, {2, 17}).value();
  mx.as<std::uint8_t>()[0] = 0xFF;
  expect_refusal(split(quant::GgufType::kMXFP4, mx), StatusCode::kInvalidArgument,
                 {"row 0, block 0", "NaN"});
  Tensor packed = Tensor::zeros(DType::kF4E2M1, {2, 32}).value();
  Tensor exponents = Tensor::zeros(DType::kF8E8M0, {2, 1}).value();
  mx.as<std::uint8_t>()[17] = 0xFF;
  mx.as<std::uint8_t>()[0] = 3;
  const auto fp4 = [&](quant::GgufType type, const Tensor& from, Tensor& to) {
    return quant::fp4_from_gguf(type, from.view(), packed.view(), to.view());
  };
  expect_refusal(fp4(quant::GgufType::kMXFP4, mx, exponents), StatusCode::kInvalidArgument,
                 {"row 1, block 0", "NaN"});
  expect_refusal(fp4(quant::GgufType::kMXFP4, mx, scale), StatusCode::kInvalidDType,
                 {"scale", "F8_E8M0"});
  expect_refusal(fp4(quant::GgufType::kQ4_0, Tensor::zeros(DType::kU8, {2, 18}).value(), exponents),
                 StatusCode::kUnsupported, {"Q4_0", "MXFP4 or NVFP4"});
  Tensor q41 = Tensor::zeros(DType::kU8, {2, 20}).value();
  expect_refusal(split(quant::GgufType::kQ4_1, q41), StatusCode::kInvalidShape, {"min", "[2, 1]"});
  Tensor q3 = Tensor::zeros(DType::kU8, {1, 110}).value();
  q3.as<std::uint8_t>()[109] = 0x7C;
  expect_refusal(test::gguf_values(quant::GgufType::kQ3_K, q3.view(), 256).status(),
                 StatusCode::kInvalidArgument, {"row 0, block 0", "infinity"});
  Tensor f32 = Tensor::zeros(DType::kU8, {2, 128}).value();
  expect_refusal(split(quant::GgufType::kF32, f32), StatusCode::kUnsupported,
                 {"F32", "no codes", "a type of blocks"});
}

}  // namespace
}  // namespace moesaic
