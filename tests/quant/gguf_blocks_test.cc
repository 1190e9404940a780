#include "quant/gguf_blocks.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include "numerics/codec.h"
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
double half_at(const std::uint8_t* p) {
  return test::half_value(static_cast<std::uint16_t>(p[0] | p[1] << 8));
}

// --- One block of each type, decoded by the format's own words in double -------------------------

void oracle_q4_0(const std::uint8_t* b, double* y) {
  for (int j = 0; j < 16; ++j) {
    y[j] = ((b[2 + j] & 15) - 8) * half_at(b);
    y[j + 16] = ((b[2 + j] >> 4) - 8) * half_at(b);
  }
}
void oracle_q4_1(const std::uint8_t* b, double* y) {
  for (int j = 0; j < 16; ++j) {
    y[j] = (b[4 + j] & 15) * half_at(b) + half_at(b + 2);
    y[j + 16] = (b[4 + j] >> 4) * half_at(b) + half_at(b + 2);
  }
}
void oracle_q5_0(const std::uint8_t* b, double* y) {
  const std::uint32_t qh = b[2] | static_cast<std::uint32_t>(b[3]) << 8 |
                           static_cast<std::uint32_t>(b[4]) << 16 |
                           static_cast<std::uint32_t>(b[5]) << 24;
  for (unsigned j = 0; j < 16; ++j) {
    const int low = (b[6 + j] & 15) + 16 * static_cast<int>(qh >> j & 1U);
    const int high = (b[6 + j] >> 4) + 16 * static_cast<int>(qh >> (j + 16) & 1U);
    y[j] = (low - 16) * half_at(b);
    y[j + 16] = (high - 16) * half_at(b);
  }
}
void oracle_q8_0(const std::uint8_t* b, double* y) {
  for (int j = 0; j < 32; ++j) y[j] = static_cast<std::int8_t>(b[2 + j]) * half_at(b);
}
void oracle_q2_k(const std::uint8_t* b, double* y) {
  const double d = half_at(b + 80), dmin = half_at(b + 82);
  const std::uint8_t* q = b + 16;
  int sub = 0;
  for (int half = 0; half < 2; ++half, q += 32) {
    for (int shift = 0; shift < 8; shift += 2) {
      for (int part = 0; part < 2; ++part, ++sub) {
        for (int l = 0; l < 16; ++l) {
          *y++ = d * (b[sub] & 15) * (q[16 * part + l] >> shift & 3) - dmin * (b[sub] >> 4);
        }
      }
    }
  }
}
void oracle_k_pair(const std::uint8_t* s, int j, int* sc, int* m) {
  if (j < 4) {
    *sc = s[j] & 63;
    *m = s[j + 4] & 63;
  } else {
    *sc = (s[j + 4] & 15) | ((s[j - 4] >> 6) << 4);
    *m = (s[j + 4] >> 4) | ((s[j] >> 6) << 4);
  }
}
void oracle_q4_k(const std::uint8_t* b, double* y) {
  for (int c = 0; c < 4; ++c) {
    for (int nibble = 0; nibble < 2; ++nibble) {
      int sc = 0, m = 0;
      oracle_k_pair(b + 4, 2 * c + nibble, &sc, &m);
      for (int l = 0; l < 32; ++l) {
        const int q = b[16 + 32 * c + l] >> (4 * nibble) & 15;
        *y++ = half_at(b) * sc * q - half_at(b + 2) * m;
      }
    }
  }
}
void oracle_q5_k(const std::uint8_t* b, double* y) {
  for (int c = 0; c < 4; ++c) {
    for (int nibble = 0; nibble < 2; ++nibble) {
      int sc = 0, m = 0;
      oracle_k_pair(b + 4, 2 * c + nibble, &sc, &m);
      for (int l = 0; l < 32; ++l) {
        const int q =
            (b[48 + 32 * c + l] >> (4 * nibble) & 15) + 16 * (b[16 + l] >> (2 * c + nibble) & 1);
        *y++ = half_at(b) * sc * q - half_at(b + 2) * m;
      }
    }
  }
}
void oracle_q6_k(const std::uint8_t* b, double* y) {
  for (int h = 0; h < 2; ++h) {
    const std::uint8_t* ql = b + 64 * h;
    const std::uint8_t* qh = b + 128 + 32 * h;
    const auto* sc = reinterpret_cast<const std::int8_t*>(b + 192 + 8 * h);
    for (int l = 0; l < 32; ++l) {
      const int q[4] = {
          (ql[l] & 15) | ((qh[l] & 3) << 4), (ql[l + 32] & 15) | ((qh[l] >> 2 & 3) << 4),
          (ql[l] >> 4) | ((qh[l] >> 4 & 3) << 4), (ql[l + 32] >> 4) | ((qh[l] >> 6) << 4)};
      for (int i = 0; i < 4; ++i) {
        y[128 * h + 32 * i + l] = half_at(b + 208) * sc[l / 16 + 2 * i] * (q[i] - 32);
      }
    }
  }
}
constexpr double kE2m1[16] = {0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6};
void oracle_mxfp4(const std::uint8_t* b, double* y) {
  for (int j = 0; j < 16; ++j) {
    y[j] = std::ldexp(kE2m1[b[1 + j] & 15], b[0] - 127);
    y[j + 16] = std::ldexp(kE2m1[b[1 + j] >> 4], b[0] - 127);
  }
}
void oracle_nvfp4(const std::uint8_t* b, double* y) {
  for (int s = 0; s < 4; ++s) {
    const int e = b[s] >> 3 & 15, m = b[s] & 7;
    double d = e == 0 ? std::ldexp(m, -9) : std::ldexp(8 + m, e - 10);
    if ((b[s] & 0x7F) == 0x7F) d = 0;
    for (int j = 0; j < 8; ++j) {
      y[16 * s + j] = kE2m1[b[4 + 8 * s + j] & 15] * d;
      y[16 * s + j + 8] = kE2m1[b[4 + 8 * s + j] >> 4] * d;
    }
  }
}

struct Case {
  GgufType type;
  void (*oracle)(const std::uint8_t*, double*);
  std::vector<int> halves;  // offsets of f16 fields, kept finite
};
const std::vector<Case>& cases() {
  static const std::vector<Case> all = {
      {GgufType::kQ4_0, oracle_q4_0, {0}},      {GgufType::kQ4_1, oracle_q4_1, {0, 2}},
      {GgufType::kQ5_0, oracle_q5_0, {0}},      {GgufType::kQ8_0, oracle_q8_0, {0}},
      {GgufType::kQ2_K, oracle_q2_k, {80, 82}}, {GgufType::kQ4_K, oracle_q4_k, {0, 2}},
      {GgufType::kQ5_K, oracle_q5_k, {0, 2}},   {GgufType::kQ6_K, oracle_q6_k, {208}},
      {GgufType::kMXFP4, oracle_mxfp4, {}},     {GgufType::kNVFP4, oracle_nvfp4, {}},
  };
  return all;
}

// Random bytes with finite scales: every field takes every value.
Bytes random_blocks(test::Rng& rng, const Case& c, std::int64_t count) {
  const GgufTypeInfo& info = *gguf_type_info(static_cast<std::uint32_t>(c.type));
  Bytes bytes(static_cast<std::size_t>(count * info.block_bytes));
  for (auto& b : bytes) b = static_cast<std::uint8_t>(rng.next());
  for (std::int64_t i = 0; i < count; ++i) {
    std::uint8_t* block = bytes.data() + i * info.block_bytes;
    for (const int at : c.halves) {
      if ((block[at + 1] & 0x7C) == 0x7C) block[at + 1] ^= 0x40;
    }
    if (c.type == GgufType::kMXFP4 && block[0] == 0xFF) block[0] = 0;
  }
  return bytes;
}

TEST(GgufBlocks, EveryTypeFollowsItsDefinition) {
  for (const Case& c : cases()) {
    const GgufTypeInfo& info = *gguf_type_info(static_cast<std::uint32_t>(c.type));
    SCOPED_TRACE(std::string(info.name));
    test::Rng rng(static_cast<std::uint64_t>(c.type) + 1);
    constexpr std::int64_t kRows = 60, kPerRow = 3;
    const Bytes bytes = random_blocks(rng, c, kRows * kPerRow);
    const std::int64_t columns = kPerRow * info.block_elems;
    const Tensor blocks = tensor_of(bytes, kRows);
    Tensor out = Tensor::zeros(DType::kF32, {kRows, columns}).value();
    test::poison(out.view());
    const Status status = dequantize_gguf(c.type, blocks.view(), out.view());
    ASSERT_TRUE(status.ok()) << status.message();
    std::vector<double> want(static_cast<std::size_t>(kRows * columns));
    for (std::int64_t i = 0; i < kRows * kPerRow; ++i) {
      c.oracle(bytes.data() + i * info.block_bytes, want.data() + i * info.block_elems);
    }
    for (std::size_t i = 0; i < want.size(); ++i) {
      // scale*code and min are exact in fp32 (at most 11 + 8 + 8 bits), their difference is
      // rounded once: the double difference rounded once is the same number.
      ASSERT_EQ(out.as<float>()[i], static_cast<float>(want[i])) << i;
    }

    Tensor codes = Tensor::zeros(DType::kI8, {kRows, columns}).value();
    const Shape grid{kRows, columns / info.group};
    Tensor scale = Tensor::zeros(DType::kF32, grid).value();
    Tensor min = Tensor::zeros(DType::kF32, grid).value();
    test::poison(codes.view());
    test::poison(scale.view());
    const Status split = split_gguf(c.type, blocks.view(), codes.view(), scale.view(),
                                    info.has_min ? min.view() : TensorView());
    ASSERT_TRUE(split.ok()) << split.message();
    int smallest = 127, largest = -128;
    for (std::size_t i = 0; i < want.size(); ++i) {
      const int code = codes.as<std::int8_t>()[i];
      smallest = std::min(smallest, code);
      largest = std::max(largest, code);
      const std::size_t g = i / static_cast<std::size_t>(info.group);
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

TEST(GgufBlocks, PublishedBytes) {
  Tensor x = Tensor::zeros(DType::kF32, {1, 32}).value();
  for (int i = 0; i < 32; ++i) {
    x.as<float>()[i] = 0.25F * static_cast<float>(i % 2 == 0 ? i : -i);
  }
  Tensor block = Tensor::zeros(DType::kU8, {1, 18}).value();
  test::poison(block.view());
  ASSERT_TRUE(quantize_gguf(GgufType::kQ4_0, x.view(), block.view()).ok());
  const Bytes want = from_hex("c03bc848d937d937ea26ea26fb15fb15fc04");
  EXPECT_EQ(std::memcmp(block.data(), want.data(), 18), 0);
  EXPECT_EQ(test::half_value(0x3BC0), 0.96875);

  // The packed scale pairs of Q4_K, seen through blocks whose codes are all 1: value = sc - m.
  Bytes k(144, 0x11);
  const Bytes head = from_hex("003c003c4182c304854607c821436587");  // d = dmin = 1
  std::copy(head.begin(), head.end(), k.begin());
  Tensor codes = Tensor::zeros(DType::kI8, {1, 256}).value();
  Tensor scale = Tensor::zeros(DType::kF32, {1, 8}).value();
  Tensor min = Tensor::zeros(DType::kF32, {1, 8}).value();
  ASSERT_TRUE(
      split_gguf(GgufType::kQ4_K, tensor_of(k, 1).view(), codes.view(), scale.view(), min.view())
          .ok());
  const float sc[] = {1, 2, 3, 4, 17, 35, 53, 7};
  const float m[] = {5, 6, 7, 8, 34, 20, 6, 56};
  for (int j = 0; j < 8; ++j) {
    EXPECT_EQ(scale.as<float>()[j], sc[j]) << j;
    EXPECT_EQ(min.as<float>()[j], m[j]) << j;
  }
}

TEST(GgufBlocks, EncodersErrAsTheFormatsDo) {
  test::Rng rng(11);
  const Tensor x = test::random_normal(rng, DType::kF32, {256, 1024});
  const auto want = test::to_doubles(x.view());
  for (const auto& [type, bytes, error] :
       {std::tuple{GgufType::kQ4_0, 18, 0.0857}, std::tuple{GgufType::kQ8_0, 34, 0.0053}}) {
    Tensor blocks = Tensor::zeros(DType::kU8, {256, 32 * bytes}).value();
    ASSERT_TRUE(quantize_gguf(type, x.view(), blocks.view()).ok());
    Tensor out = Tensor::zeros(DType::kF32, {256, 1024}).value();
    ASSERT_TRUE(dequantize_gguf(type, blocks.view(), out.view()).ok());
    const double got = test::compare(test::to_doubles(out.view()), want).rel_l2;
    EXPECT_NEAR(got / error, 1.0, 0.03) << got;
    // What was decoded encodes to the same values.
    Tensor again = Tensor::zeros(DType::kU8, {256, 32 * bytes}).value();
    ASSERT_TRUE(quantize_gguf(type, out.view(), again.view()).ok());
    Tensor back = Tensor::zeros(DType::kF32, {256, 1024}).value();
    ASSERT_TRUE(dequantize_gguf(type, again.view(), back.view()).ok());
    std::string why;
    if (type == GgufType::kQ8_0) {
      // amax decodes to 127 d, and (127 d) / 127 rounds back to d.
      EXPECT_TRUE(test::same_bits(back.view(), out.view(), &why)) << why;
    } else {
      EXPECT_LT(test::compare(test::to_doubles(back.view()), test::to_doubles(out.view())).rel_l2,
                1e-3);
    }
  }
}

TEST(GgufBlocks, PlainTypesAndNarrowOutputs) {
  const Bytes values = {0x00, 0x3C, 0x00, 0xC0};  // f16 1, -2
  Tensor out = Tensor::zeros(DType::kBF16, {1, 2}).value();
  ASSERT_TRUE(dequantize_gguf(GgufType::kF16, tensor_of(values, 1).view(), out.view()).ok());
  EXPECT_EQ(out.as<std::uint16_t>()[0], bf16_from_f32(1.0F));
  EXPECT_EQ(out.as<std::uint16_t>()[1], bf16_from_f32(-2.0F));
  ASSERT_TRUE(
      dequantize_gguf(GgufType::kBF16, tensor_of({0x80, 0x3F, 0x00, 0xC0}, 1).view(), out.view())
          .ok());
  EXPECT_EQ(out.as<std::uint16_t>()[0], 0x3F80);
  Tensor one = Tensor::zeros(DType::kF32, {1, 1}).value();
  ASSERT_TRUE(
      dequantize_gguf(GgufType::kF32, tensor_of({0, 0, 0x80, 0xBF}, 1).view(), one.view()).ok());
  EXPECT_EQ(one.as<float>()[0], -1.0F);
}

TEST(GgufBlocks, Misuse) {
  EXPECT_EQ(gguf_type_info(4), nullptr);
  expect_refusal(gguf_row_bytes(4, 32).status(), StatusCode::kUnsupported,
                 {"GGUF type", "id 4", "Q4_K"});
  expect_refusal(gguf_row_bytes(12, 288).status(), StatusCode::kInvalidShape,
                 {"288", "multiple of 256", "Q4_K"});
  expect_refusal(gguf_row_bytes(0, std::int64_t{1} << 62).status(), StatusCode::kLimitExceeded,
                 {"columns"});
  EXPECT_EQ(gguf_row_bytes(14, 512).value(), 420);
  Tensor out = Tensor::zeros(DType::kF32, {2, 32}).value();
  Tensor blocks = Tensor::zeros(DType::kU8, {2, 19}).value();
  expect_refusal(dequantize_gguf(GgufType::kQ4_0, blocks.view(), out.view()),
                 StatusCode::kInvalidShape, {"blocks", "[2, 19]", "[2, 18]"});
  Tensor good = Tensor::zeros(DType::kU8, {2, 18}).value();
  good.as<std::uint8_t>()[19] = 0x7E;  // row 1: an f16 NaN
  expect_refusal(dequantize_gguf(GgufType::kQ4_0, good.view(), out.view()),
                 StatusCode::kInvalidArgument, {"row 1, block 0", "NaN", "finite"});
  Tensor mx = Tensor::zeros(DType::kU8, {2, 17}).value();
  mx.as<std::uint8_t>()[0] = 0xFF;
  expect_refusal(dequantize_gguf(GgufType::kMXFP4, mx.view(), out.view()),
                 StatusCode::kInvalidArgument, {"row 0, block 0", "NaN"});
  Tensor codes = Tensor::zeros(DType::kI8, {2, 32}).value();
  Tensor scale = Tensor::zeros(DType::kF32, {2, 1}).value();
  Tensor q41 = Tensor::zeros(DType::kU8, {2, 20}).value();
  expect_refusal(split_gguf(GgufType::kQ4_1, q41.view(), codes.view(), scale.view(), {}),
                 StatusCode::kInvalidShape, {"min", "[2, 1]"});
  Tensor f32 = Tensor::zeros(DType::kU8, {2, 128}).value();
  expect_refusal(split_gguf(GgufType::kF32, f32.view(), codes.view(), scale.view(), {}),
                 StatusCode::kUnsupported, {"F32", "no codes"});
  expect_refusal(quantize_gguf(GgufType::kQ6_K, out.view(), good.view()), StatusCode::kUnsupported,
                 {"Q6_K", "Q4_0 or Q8_0"});
  out.as<float>()[33] = INFINITY;
  expect_refusal(quantize_gguf(GgufType::kQ4_0, out.view(), good.view()),
                 StatusCode::kInvalidArgument, {"x", "row 1, column 1", "infinity"});
}

}  // namespace
}  // namespace moesaic
