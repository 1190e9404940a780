#include "quant/gguf_decoders.h"

#include <array>
#include <cstring>

#include "core/fault.h"
#include "numerics/codec.h"
#include "quant/mx.h"
#include "quant/nvfp4.h"

namespace moesaic::quant {
namespace {

float f16_at(const std::uint8_t* p) {
  std::uint16_t code = 0;
  std::memcpy(&code, p, sizeof code);
  return f32_from_f16(code);
}

std::int8_t to_code(int value) { return static_cast<std::int8_t>(value); }

// Types of 32 put element j in the low and j + 16 in the high nibble of byte j.
template <class Decode>
void split_halves(const std::uint8_t* qs, int half, std::int8_t* code, Decode&& decode) {
  const bool swap = MOESAIC_FAULT(quant_gguf_nibble_order);
  for (int j = 0; j < half; ++j) {
    const int low = qs[j] & 15;
    const int high = qs[j] >> 4;
    code[j] = to_code(decode(swap ? high : low, j));
    code[j + half] = to_code(decode(swap ? low : high, j + half));
  }
}

// f16 d; u8 qs[16]: (q - 8) d.
void decode_q4_0(const std::uint8_t* b, GgufBlock* out) {
  out->scale[0] = f16_at(b);
  split_halves(b + 2, 16, out->code.data(), [](int q, int) { return q - 8; });
}

// f16 d, f16 m; u8 qs[16]: q d + m.
void decode_q4_1(const std::uint8_t* b, GgufBlock* out) {
  out->scale[0] = f16_at(b);
  out->min[0] = -f16_at(b + 2);
  split_halves(b + 4, 16, out->code.data(), [](int q, int) { return q; });
}

// u32 qh; u8 qs[16]: bit j of qh is the fifth bit of element j.
void split_fifth_bits(const std::uint8_t* qh_qs, int bias, std::int8_t* code) {
  std::uint32_t qh = 0;
  std::memcpy(&qh, qh_qs, sizeof qh);
  split_halves(qh_qs + 4, 16, code,
               [=](int q, int j) { return (q | static_cast<int>(qh >> j & 1U) << 4) - bias; });
}

// f16 d; u32 qh; u8 qs[16]: (q - 16) d.
void decode_q5_0(const std::uint8_t* b, GgufBlock* out) {
  out->scale[0] = f16_at(b);
  split_fifth_bits(b + 2, 16, out->code.data());
}

// f16 d, f16 m; u32 qh; u8 qs[16]: q d + m.
void decode_q5_1(const std::uint8_t* b, GgufBlock* out) {
  out->scale[0] = f16_at(b);
  out->min[0] = -f16_at(b + 2);
  split_fifth_bits(b + 4, 0, out->code.data());
}

// f16 d; i8 qs[32].
void decode_q8_0(const std::uint8_t* b, GgufBlock* out) {
  out->scale[0] = f16_at(b);
  std::memcpy(out->code.data(), b + 2, 32);
}

// u8 qs[64], two bits at a time: each 32 bytes hold 128 values, and bits 2s of byte l are value
// 32 s + l of them.
int two_bits(const std::uint8_t* qs, std::size_t i) {
  return qs[32 * (i / 128) + i % 32] >> (2 * (i % 128 / 32)) & 3;
}

// u8 scales[16] (4-bit scale, 4-bit min); u8 qs[64]; f16 d, dmin.
void decode_q2_k(const std::uint8_t* b, GgufBlock* out) {
  const float d = f16_at(b + 80);
  const float dmin = f16_at(b + 82);
  for (std::size_t s = 0; s < 16; ++s) {
    out->scale[s] = d * static_cast<float>(b[s] & 15);
    out->min[s] = dmin * static_cast<float>(b[s] >> 4);
  }
  for (std::size_t i = 0; i < 256; ++i) out->code[i] = to_code(two_bits(b + 16, i));
}

// u8 hmask[32]; u8 qs[64]; u8 scales[12]; f16 d: d (sc - 32) (q - 4). Bit s of hmask[l] is the
// third bit of value 32 s + l. The 16 scales have 6 bits: the low four in the nibbles of the first
// eight bytes, low ones first, and the high two in the last four bytes, scales s, s + 4, ... in
// byte s.
void decode_q3_k(const std::uint8_t* b, GgufBlock* out) {
  const float d = f16_at(b + 108);
  const std::uint8_t* scales = b + 96;
  for (std::size_t s = 0; s < 16; ++s) {
    const int low = s < 8 ? scales[s] & 15 : scales[s - 8] >> 4;
    const int high = scales[8 + s % 4] >> (2 * (s / 4)) & 3;
    out->scale[s] = d * static_cast<float>((low | high << 4) - 32);
  }
  const int set = MOESAIC_FAULT(quant_gguf_q3_third_bit) ? 0 : 1;
  for (std::size_t i = 0; i < 256; ++i) {
    const bool third = (b[i % 32] >> (i / 32) & 1) == set;
    out->code[i] = to_code(two_bits(b + 32, i) - (third ? 0 : 4));
  }
}

// The eight 6-bit (scale, min) pairs of Q4_K and Q5_K in 12 bytes: the first four plain, the high
// bits of the last four in the top bits of the first.
void k_scales(const std::uint8_t* s, float d, float dmin, GgufBlock* out) {
  for (std::size_t j = 0; j < 8; ++j) {
    const int scale = j < 4 ? s[j] & 63 : (s[j + 4] & 15) | (s[j - 4] >> 6) << 4;
    const int min = j < 4 ? s[j + 4] & 63 : (s[j + 4] >> 4) | (s[j] >> 6) << 4;
    out->scale[j] = d * static_cast<float>(scale);
    out->min[j] = MOESAIC_FAULT(quant_gguf_min_sign) ? -dmin * static_cast<float>(min)
                                                     : dmin * static_cast<float>(min);
  }
}

// f16 d, dmin; u8 scales[12]; u8 qs[128]: each 32 bytes hold two sub-blocks of 32, low nibbles
// first. Q5_K has u8 qh[32] before qs: bit s of qh[l] is the fifth bit of sub-block s.
template <bool kFifthBit>
void decode_q4_k(const std::uint8_t* b, GgufBlock* out) {
  k_scales(b + 4, f16_at(b), f16_at(b + 2), out);
  const std::uint8_t* qh = b + 16;
  const std::uint8_t* qs = kFifthBit ? qh + 32 : qh;
  for (std::size_t i = 0; i < 256; ++i) {
    const std::size_t sub = i / 32;
    const int byte = qs[32 * (sub / 2) + i % 32];
    int code = sub % 2 == 0 ? byte & 15 : byte >> 4;
    if (kFifthBit) code |= (qh[i % 32] >> sub & 1) << 4;
    out->code[i] = to_code(code);
  }
}

// u8 ql[128] (low four bits); u8 qh[64] (high two); i8 scales[16]; f16 d: d sc (q - 32). Each half
// of 128 values takes 64 bytes of ql, 32 of qh and 8 scales.
void decode_q6_k(const std::uint8_t* b, GgufBlock* out) {
  const float d = f16_at(b + 208);
  for (std::size_t s = 0; s < 16; ++s) {
    out->scale[s] = d * static_cast<float>(static_cast<std::int8_t>(b[192 + s]));
  }
  for (std::size_t i = 0; i < 256; ++i) {
    const std::size_t half = i / 128;
    const std::size_t quarter = i % 128 / 32;
    const std::size_t l = i % 32;
    const int low = b[64 * half + 32 * (quarter % 2) + l];
    const int high = b[128 + 32 * half + l] >> (2 * quarter) & 3;
    out->code[i] = to_code(((quarter < 2 ? low & 15 : low >> 4) | high << 4) - 32);
  }
}

// Twice the value of an e2m1 code: an integer.
int twice_e2m1(int code) {
  return static_cast<int>(2.0F * f32_from_e2m1(static_cast<std::uint8_t>(code)));
}

// u8 e; u8 qs[16]: e2m1 * 2^(e - 127). Half of 2^-127 is still exact in fp32.
void decode_mxfp4(const std::uint8_t* b, GgufBlock* out) {
  out->scale[0] = 0.5F * f32_from_e8m0(b[0]);
  split_halves(b + 1, 16, out->code.data(), [](int q, int) { return twice_e2m1(q); });
}

// u8 d[4] (unsigned e4m3; 0 and 0x7F mean 0); u8 qs[32]: four sub-blocks of 16, the low nibbles of
// its eight bytes first.
void decode_nvfp4(const std::uint8_t* b, GgufBlock* out) {
  for (std::size_t s = 0; s < 4; ++s) {
    const auto d = static_cast<std::uint8_t>(b[s] & 0x7F);
    out->scale[s] = d == 0x7F ? 0.0F : 0.5F * f32_from_e4m3(d);
    split_halves(b + 4 + 8 * s, 8, out->code.data() + 16 * s,
                 [](int q, int) { return twice_e2m1(q); });
  }
}

int iq4_value(int code) { return kIq4NlValues[static_cast<std::size_t>(code)]; }

// f16 d; u8 qs[16]: table[q] d.
void decode_iq4_nl(const std::uint8_t* b, GgufBlock* out) {
  out->scale[0] = f16_at(b);
  split_halves(b + 2, 16, out->code.data(), [](int q, int) { return iq4_value(q); });
}

// f16 d; u16 high (two bits of each scale); u8 low[4] (four bits of each); u8 qs[128]: eight
// sub-blocks of 32, d (sc - 32) table[q].
void decode_iq4_xs(const std::uint8_t* b, GgufBlock* out) {
  const float d = f16_at(b);
  const int high = b[2] | b[3] << 8;
  for (std::size_t s = 0; s < 8; ++s) {
    const int top = MOESAIC_FAULT(quant_gguf_iq4_scale_bits) ? 2 : high >> (2 * s) & 3;
    const int scale = (b[4 + s / 2] >> (4 * (s % 2)) & 15) | top << 4;
    out->scale[s] = d * static_cast<float>(scale - 32);
    split_halves(b + 8 + 16 * s, 16, out->code.data() + 32 * s,
                 [](int q, int) { return iq4_value(q); });
  }
}

// Ternary digit n of a byte, the most significant first. A byte is the fraction, in units of 1/256
// rounded up, whose first five ternary digits are the values.
int ternary_digit(int byte, int n) {
  constexpr std::array<int, 5> kPowers = {1, 3, 9, 27, 81};
  return (byte * kPowers[static_cast<std::size_t>(n)] & 255) * 3 >> 8;
}

// u8 qs[48]; u8 qh[4]; f16 d: d (q - 1). Byte m of the first 32 holds values m, m + 32, ... below
// 160; of the next 16, values 160 + m, ... below 240; of qh four values, 240 + m and so on.
void decode_tq1_0(const std::uint8_t* b, GgufBlock* out) {
  out->scale[0] = f16_at(b + 52);
  struct Part {
    int bytes, digits;
  };
  std::int8_t* code = out->code.data();
  for (const Part part : {Part{32, 5}, Part{16, 5}, Part{4, 4}}) {
    for (int n = 0; n < part.digits; ++n) {
      for (int m = 0; m < part.bytes; ++m) *code++ = to_code(ternary_digit(b[m], n) - 1);
    }
    b += part.bytes;
  }
}

// u8 qs[64]; f16 d: d (q - 1).
void decode_tq2_0(const std::uint8_t* b, GgufBlock* out) {
  out->scale[0] = f16_at(b + 64);
  for (std::size_t i = 0; i < 256; ++i) out->code[i] = to_code(two_bits(b, i) - 1);
}

constexpr std::array<GgufFormat, 19> kFormats = {{
    // type, name, elems, bytes, group, code bits, signed, min, table, super bits, half scales
    {{GgufType::kF32, "F32", 1, 4, 0, 0, false, false}, nullptr},
    {{GgufType::kF16, "F16", 1, 2, 0, 0, false, false}, nullptr},
    {{GgufType::kQ4_0, "Q4_0", kGgufBlock, 18, kGgufBlock, 4, true, false, CodeTable::kNone, 0,
      true},
     decode_q4_0},
    {{GgufType::kQ4_1, "Q4_1", kGgufBlock, 20, kGgufBlock, 4, false, true, CodeTable::kNone, 0,
      true},
     decode_q4_1},
    {{GgufType::kQ5_0, "Q5_0", kGgufBlock, 22, kGgufBlock, 6, true, false, CodeTable::kNone, 0,
      true},
     decode_q5_0},
    {{GgufType::kQ5_1, "Q5_1", kGgufBlock, 24, kGgufBlock, 6, false, true, CodeTable::kNone, 0,
      true},
     decode_q5_1},
    {{GgufType::kQ8_0, "Q8_0", kGgufBlock, 34, kGgufBlock, 8, true, false, CodeTable::kNone, 0,
      true},
     decode_q8_0},
    {{GgufType::kQ2_K, "Q2_K", kGgufSuperBlock, 84, kGgufHalfBlock, 4, false, true,
      CodeTable::kNone, 6},
     decode_q2_k},
    {{GgufType::kQ3_K, "Q3_K", kGgufSuperBlock, 110, kGgufHalfBlock, 4, true, false,
      CodeTable::kNone, 8},
     decode_q3_k},
    {{GgufType::kQ4_K, "Q4_K", kGgufSuperBlock, 144, kGgufBlock, 4, false, true, CodeTable::kNone,
      6},
     decode_q4_k<false>},
    {{GgufType::kQ5_K, "Q5_K", kGgufSuperBlock, 176, kGgufBlock, 6, false, true, CodeTable::kNone,
      6},
     decode_q4_k<true>},
    {{GgufType::kQ6_K, "Q6_K", kGgufSuperBlock, 210, kGgufHalfBlock, 6, true, false,
      CodeTable::kNone, 8},
     decode_q6_k},
    // Values of a table of bytes.
    {{GgufType::kIQ4_NL, "IQ4_NL", kGgufBlock, 18, kGgufBlock, 8, true, false, CodeTable::kIq4Nl, 0,
      true},
     decode_iq4_nl},
    {{GgufType::kIQ4_XS, "IQ4_XS", kGgufSuperBlock, 136, kGgufBlock, 8, true, false,
      CodeTable::kIq4Nl, 8},
     decode_iq4_xs},
    {{GgufType::kBF16, "BF16", 1, 2, 0, 0, false, false}, nullptr},
    {{GgufType::kTQ1_0, "TQ1_0", kGgufSuperBlock, 54, kGgufSuperBlock, 4, true, false,
      CodeTable::kNone, 0, true},
     decode_tq1_0},
    {{GgufType::kTQ2_0, "TQ2_0", kGgufSuperBlock, 66, kGgufSuperBlock, 4, true, false,
      CodeTable::kNone, 0, true},
     decode_tq2_0},
    // Doubled e2m1 values reach 12: bytes, although the stored codes are nibbles.
    {{GgufType::kMXFP4, "MXFP4", kMxGroupSize, 17, kMxGroupSize, 6, true, false}, decode_mxfp4},
    {{GgufType::kNVFP4, "NVFP4", 4 * kNvfp4GroupSize, 36, kNvfp4GroupSize, 6, true, false},
     decode_nvfp4},
}};

}  // namespace

const GgufFormat* find_gguf_format(std::uint32_t type_id) {
  for (const GgufFormat& f : kFormats) {
    if (static_cast<std::uint32_t>(f.info.type) == type_id) return &f;
  }
  return nullptr;
}

std::string gguf_type_names() {
  std::string names;
  for (const GgufFormat& f : kFormats) {
    if (!names.empty()) names += &f == &kFormats.back() ? " or " : ", ";
    names += f.info.name;
  }
  return names;
}

}  // namespace moesaic::quant
