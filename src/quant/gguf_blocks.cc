#include "quant/gguf_blocks.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <string>

#include "core/checked.h"
#include "core/fault.h"
#include "numerics/codec.h"
#include "quant/arguments.h"

namespace moesaic {
namespace {

constexpr int kMaxBlock = 256;
constexpr int kMaxGroups = 16;

// One decoded block.
struct Decoded {
  std::array<std::int8_t, kMaxBlock> code;
  std::array<float, kMaxGroups> scale;
  std::array<float, kMaxGroups> min;
};
using DecodeFn = void (*)(const std::uint8_t* block, Decoded* out);

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
void decode_q4_0(const std::uint8_t* b, Decoded* out) {
  out->scale[0] = f16_at(b);
  split_halves(b + 2, 16, out->code.data(), [](int q, int) { return q - 8; });
}

// f16 d, f16 m; u8 qs[16]: q d + m.
void decode_q4_1(const std::uint8_t* b, Decoded* out) {
  out->scale[0] = f16_at(b);
  out->min[0] = -f16_at(b + 2);
  split_halves(b + 4, 16, out->code.data(), [](int q, int) { return q; });
}

// f16 d; u32 qh (fifth bits); u8 qs[16]: (q - 16) d.
void decode_q5_0(const std::uint8_t* b, Decoded* out) {
  out->scale[0] = f16_at(b);
  std::uint32_t qh = 0;
  std::memcpy(&qh, b + 2, sizeof qh);
  split_halves(b + 6, 16, out->code.data(),
               [qh](int q, int j) { return (q | static_cast<int>(qh >> j & 1U) << 4) - 16; });
}

// f16 d; i8 qs[32].
void decode_q8_0(const std::uint8_t* b, Decoded* out) {
  out->scale[0] = f16_at(b);
  std::memcpy(out->code.data(), b + 2, 32);
}

// u8 scales[16] (4-bit scale, 4-bit min); u8 qs[64]; f16 d, dmin. Each 32 bytes of qs hold 128
// values, two bits at a time: bits 2s of byte l are value 32 s + l.
void decode_q2_k(const std::uint8_t* b, Decoded* out) {
  const float d = f16_at(b + 80);
  const float dmin = f16_at(b + 82);
  for (std::size_t s = 0; s < 16; ++s) {
    out->scale[s] = d * static_cast<float>(b[s] & 15);
    out->min[s] = dmin * static_cast<float>(b[s] >> 4);
  }
  for (std::size_t i = 0; i < 256; ++i) {
    const std::size_t half = i / 128;
    const auto shift = static_cast<unsigned>(2 * (i % 128 / 32));
    out->code[i] = to_code(b[16 + 32 * half + i % 32] >> shift & 3);
  }
}

// The eight 6-bit (scale, min) pairs of Q4_K and Q5_K in 12 bytes: the first four plain, the high
// bits of the last four in the top bits of the first.
void k_scales(const std::uint8_t* s, float d, float dmin, Decoded* out) {
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
void decode_q4_k(const std::uint8_t* b, Decoded* out) {
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
void decode_q6_k(const std::uint8_t* b, Decoded* out) {
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
void decode_mxfp4(const std::uint8_t* b, Decoded* out) {
  out->scale[0] = 0.5F * f32_from_e8m0(b[0]);
  split_halves(b + 1, 16, out->code.data(), [](int q, int) { return twice_e2m1(q); });
}

// u8 d[4] (unsigned e4m3; 0 and 0x7F mean 0); u8 qs[32]: four sub-blocks of 16, the low nibbles of
// its eight bytes first.
void decode_nvfp4(const std::uint8_t* b, Decoded* out) {
  for (std::size_t s = 0; s < 4; ++s) {
    const auto d = static_cast<std::uint8_t>(b[s] & 0x7F);
    out->scale[s] = d == 0x7F ? 0.0F : 0.5F * f32_from_e4m3(d);
    split_halves(b + 4 + 8 * s, 8, out->code.data() + 16 * s,
                 [](int q, int) { return twice_e2m1(q); });
  }
}

struct Format {
  GgufTypeInfo info;
  DecodeFn decode;
};
constexpr std::array<Format, 13> kFormats = {{
    // type, name, elems, bytes, group, code bits, signed, min
    {{GgufType::kF32, "F32", 1, 4, 0, 0, false, false}, nullptr},
    {{GgufType::kF16, "F16", 1, 2, 0, 0, false, false}, nullptr},
    {{GgufType::kQ4_0, "Q4_0", 32, 18, 32, 4, true, false}, decode_q4_0},
    {{GgufType::kQ4_1, "Q4_1", 32, 20, 32, 4, false, true}, decode_q4_1},
    {{GgufType::kQ5_0, "Q5_0", 32, 22, 32, 8, true, false}, decode_q5_0},
    {{GgufType::kQ8_0, "Q8_0", 32, 34, 32, 8, true, false}, decode_q8_0},
    {{GgufType::kQ2_K, "Q2_K", 256, 84, 16, 4, false, true}, decode_q2_k},
    {{GgufType::kQ4_K, "Q4_K", 256, 144, 32, 4, false, true}, decode_q4_k<false>},
    {{GgufType::kQ5_K, "Q5_K", 256, 176, 32, 8, false, true}, decode_q4_k<true>},
    {{GgufType::kQ6_K, "Q6_K", 256, 210, 16, 8, true, false}, decode_q6_k},
    {{GgufType::kBF16, "BF16", 1, 2, 0, 0, false, false}, nullptr},
    // Doubled e2m1 values reach 12: bytes, although the stored codes are nibbles.
    {{GgufType::kMXFP4, "MXFP4", 32, 17, 32, 8, true, false}, decode_mxfp4},
    {{GgufType::kNVFP4, "NVFP4", 64, 36, 16, 8, true, false}, decode_nvfp4},
}};

const Format* find_format(std::uint32_t type_id) {
  for (const Format& f : kFormats) {
    if (static_cast<std::uint32_t>(f.info.type) == type_id) return &f;
  }
  return nullptr;
}

// Checks a matrix of blocks against `columns` values per row.
Result<const Format*> check_blocks(GgufType type, const ConstTensorView& blocks, bool written,
                                   const Argument& values) {
  const auto id = static_cast<std::uint32_t>(type);
  MOESAIC_RETURN_IF_ERROR(expect_matrix(values.field, values.view));
  MOESAIC_ASSIGN_OR_RETURN(const std::int64_t row_bytes, gguf_row_bytes(id, values.view.dim(1)));
  MOESAIC_RETURN_IF_ERROR(check_arguments({
      values,
      {"blocks", blocks, accept(DType::kU8), {values.view.dim(0), row_bytes}, written},
  }));
  return find_format(id);
}

Status bad_scale(std::int64_t row, std::int64_t block, float value) {
  return Status(StatusCode::kInvalidArgument, "blocks: row " + std::to_string(row) + ", block " +
                                                  std::to_string(block) + ": got a scale of " +
                                                  (std::isnan(value) ? "NaN" : "infinity") +
                                                  ", need a finite number");
}

// Calls visit(first element index, decoded) for every block.
template <class Visit>
Status for_decoded(const Format& format, const ConstTensorView& blocks, std::int64_t columns,
                   Visit&& visit) {
  if (columns == 0) return {};  // rows may then be any number
  const GgufTypeInfo& info = format.info;
  const std::int64_t per_row = columns / info.block_elems;
  const auto groups = static_cast<std::size_t>(info.block_elems / info.group);
  Decoded decoded{};
  const auto* bytes = blocks.as<std::uint8_t>();
  for (std::int64_t r = 0; r < blocks.dim(0); ++r) {
    for (std::int64_t i = 0; i < per_row; ++i, bytes += info.block_bytes) {
      format.decode(bytes, &decoded);
      for (std::size_t g = 0; g < groups; ++g) {
        if (!std::isfinite(decoded.scale[g])) return bad_scale(r, i, decoded.scale[g]);
        if (!std::isfinite(decoded.min[g])) return bad_scale(r, i, decoded.min[g]);
      }
      visit(r * columns + i * info.block_elems, decoded);
    }
  }
  return {};
}

void encode_q4_0(const std::array<float, 32>& x, std::uint8_t* block) {
  float extreme = 0.0F;  // the first value of largest magnitude, with its sign
  for (const float v : x) {
    if (std::abs(v) > std::abs(extreme)) extreme = v;
  }
  const float d = extreme / -8.0F;
  const float inverse = d != 0.0F ? 1.0F / d : 0.0F;
  const std::uint16_t stored = f16_from_f32(d);
  std::memcpy(block, &stored, sizeof stored);
  const auto code = [&](std::size_t i) {
    return std::min(15, static_cast<int>(x[i] * inverse + 8.5F));
  };
  for (std::size_t j = 0; j < 16; ++j) {
    block[2 + j] = static_cast<std::uint8_t>(code(j) | code(j + 16) << 4);
  }
}

void encode_q8_0(const std::array<float, 32>& x, std::uint8_t* block) {
  float amax = 0.0F;
  for (const float v : x) amax = std::max(amax, std::abs(v));
  const float d = amax / 127.0F;
  const float inverse = d != 0.0F ? 1.0F / d : 0.0F;
  const std::uint16_t stored = f16_from_f32(d);
  std::memcpy(block, &stored, sizeof stored);
  for (std::size_t j = 0; j < 32; ++j) {
    block[2 + j] = static_cast<std::uint8_t>(i8_from_f32(x[j] * inverse));
  }
}

}  // namespace

const GgufTypeInfo* gguf_type_info(std::uint32_t type_id) {
  const Format* format = find_format(type_id);
  return format != nullptr ? &format->info : nullptr;
}

Result<std::int64_t> gguf_row_bytes(std::uint32_t type_id, std::int64_t columns) {
  const Format* format = find_format(type_id);
  if (format == nullptr) {
    std::string names;
    for (const Format& f : kFormats)
      names += (names.empty() ? "" : ", ") + std::string(f.info.name);
    return Status(StatusCode::kUnsupported,
                  "GGUF type: got id " + std::to_string(type_id) + ", need one of " + names);
  }
  if (columns < 0 || columns % format->info.block_elems != 0) {
    return Status(StatusCode::kInvalidShape, "columns: got " + std::to_string(columns) +
                                                 ", need a multiple of " +
                                                 std::to_string(format->info.block_elems) +
                                                 " for " + std::string(format->info.name));
  }
  const auto bytes = checked_mul(columns / format->info.block_elems, format->info.block_bytes);
  if (bytes) return *bytes;
  return Status(StatusCode::kLimitExceeded,
                "columns: got " + std::to_string(columns) + ", need a row below 2^63 bytes");
}

Status dequantize_gguf(GgufType type, ConstTensorView blocks, TensorView out) {
  MOESAIC_ASSIGN_OR_RETURN(
      const Format* format,
      check_blocks(type, blocks, false, {"out", out, kPlainFloats, out.shape, true}));
  const GgufTypeInfo& info = format->info;
  if (format->decode == nullptr) {
    for (std::int64_t i = 0; i < out.dim(0) * out.dim(1); ++i) {
      const std::uint8_t* p = blocks.as<std::uint8_t>() + i * info.block_bytes;
      float value = 0;
      std::uint16_t half = 0;
      std::memcpy(&half, p, sizeof half);
      if (type == GgufType::kF32) std::memcpy(&value, p, sizeof value);
      if (type == GgufType::kF16) value = f32_from_f16(half);
      if (type == GgufType::kBF16) value = f32_from_bf16(half);
      store_from_f32(out.data, out.dtype, i, value);
    }
    return {};
  }
  return for_decoded(*format, blocks, out.dim(1), [&](std::int64_t first, const Decoded& d) {
    for (int i = 0; i < info.block_elems; ++i) {
      const auto g = static_cast<std::size_t>(i / info.group);
      const float product = d.scale[g] * static_cast<float>(d.code[static_cast<std::size_t>(i)]);
      store_from_f32(out.data, out.dtype, first + i, info.has_min ? product - d.min[g] : product);
    }
  });
}

Status split_gguf(GgufType type, ConstTensorView blocks, TensorView codes, TensorView scale,
                  TensorView min) {
  MOESAIC_ASSIGN_OR_RETURN(
      const Format* format,
      check_blocks(type, blocks, false, {"codes", codes, accept(DType::kI8), codes.shape, true}));
  const GgufTypeInfo& info = format->info;
  if (format->decode == nullptr) {
    return Status(StatusCode::kUnsupported, "GGUF type: got " + std::string(info.name) +
                                                ", which has no codes; use dequantize_gguf");
  }
  const Shape grid{codes.dim(0), codes.dim(1) / info.group};
  const Argument scale_argument{"scale", scale, accept(DType::kF32), grid, true};
  const Argument blocks_argument{"blocks", blocks, accept(DType::kU8), blocks.shape};
  const Argument codes_argument{"codes", codes, accept(DType::kI8), codes.shape, true};
  if (info.has_min) {
    MOESAIC_RETURN_IF_ERROR(check_arguments({blocks_argument,
                                             codes_argument,
                                             scale_argument,
                                             {"min", min, accept(DType::kF32), grid, true}}));
  } else {
    MOESAIC_RETURN_IF_ERROR(check_arguments({blocks_argument, codes_argument, scale_argument}));
  }
  return for_decoded(*format, blocks, codes.dim(1), [&](std::int64_t first, const Decoded& d) {
    std::memcpy(codes.data + first, d.code.data(), static_cast<std::size_t>(info.block_elems));
    for (int g = 0; g < info.block_elems / info.group; ++g) {
      const std::int64_t at = first / info.group + g;
      scale.as<float>()[at] = d.scale[static_cast<std::size_t>(g)];
      if (info.has_min) min.as<float>()[at] = d.min[static_cast<std::size_t>(g)];
    }
  });
}

Status quantize_gguf(GgufType type, ConstTensorView x, TensorView blocks) {
  if (type != GgufType::kQ4_0 && type != GgufType::kQ8_0) {
    const GgufTypeInfo* info = gguf_type_info(static_cast<std::uint32_t>(type));
    return Status(StatusCode::kUnsupported,
                  "GGUF type: got " +
                      (info != nullptr ? std::string(info->name)
                                       : std::to_string(static_cast<std::uint32_t>(type))) +
                      ", need Q4_0 or Q8_0 (others are read only)");
  }
  MOESAIC_ASSIGN_OR_RETURN(const Format* format,
                           check_blocks(type, blocks, true, {"x", x, kPlainFloats, x.shape}));
  MOESAIC_RETURN_IF_ERROR(expect_finite("x", x));
  std::array<float, 32> values{};
  auto* block = blocks.as<std::uint8_t>();
  for (std::int64_t first = 0; first < x.dim(0) * x.dim(1);
       first += 32, block += format->info.block_bytes) {
    for (std::size_t i = 0; i < 32; ++i) {
      values[i] = load_as_f32(x.data, x.dtype, first + static_cast<std::int64_t>(i));
    }
    if (type == GgufType::kQ4_0) {
      encode_q4_0(values, block);
    } else {
      encode_q8_0(values, block);
    }
  }
  return {};
}

}  // namespace moesaic
