#include "quant/gguf_blocks.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <string>

#include "core/checked.h"
#include "numerics/codec.h"
#include "quant/arguments.h"
#include "quant/gguf_decoders.h"

namespace moesaic::quant {
namespace {

// Checks a matrix of blocks against `columns` values per row.
Result<const GgufFormat*> check_blocks(GgufType type, const ConstTensorView& blocks, bool written,
                                       const Argument& values) {
  const auto id = static_cast<std::uint32_t>(type);
  MOESAIC_RETURN_IF_ERROR(expect_matrix(values.field, values.view));
  MOESAIC_ASSIGN_OR_RETURN(const std::int64_t row_bytes, gguf_row_bytes(id, values.view.dim(1)));
  MOESAIC_RETURN_IF_ERROR(check_arguments({
      values,
      {"blocks", blocks, accept(DType::kU8), {values.view.dim(0), row_bytes}, written},
  }));
  return find_gguf_format(id);
}

Status bad_scale(std::int64_t row, std::int64_t block, float value) {
  return Status(StatusCode::kInvalidArgument, "blocks: row " + std::to_string(row) + ", block " +
                                                  std::to_string(block) + ": got a scale of " +
                                                  (std::isnan(value) ? "NaN" : "infinity") +
                                                  ", need a finite number");
}

// Calls visit(first element index, decoded) for every block.
template <class Visit>
Status for_decoded(const GgufFormat& format, const ConstTensorView& blocks, std::int64_t columns,
                   Visit&& visit) {
  if (columns == 0) return {};  // rows may then be any number
  const GgufTypeInfo& info = format.info;
  const std::int64_t per_row = columns / info.block_elems;
  const auto groups = static_cast<std::size_t>(info.block_elems / info.group);
  GgufBlock decoded{};
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
  const GgufFormat* format = find_gguf_format(type_id);
  return format != nullptr ? &format->info : nullptr;
}

Result<std::int64_t> gguf_row_bytes(std::uint32_t type_id, std::int64_t columns) {
  const GgufFormat* format = find_gguf_format(type_id);
  if (format == nullptr) {
    return Status(StatusCode::kUnsupported,
                  "GGUF type: got id " + std::to_string(type_id) + ", need " + gguf_type_names());
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
      const GgufFormat* format,
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
  return for_decoded(*format, blocks, out.dim(1), [&](std::int64_t first, const GgufBlock& d) {
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
      const GgufFormat* format,
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
  return for_decoded(*format, blocks, codes.dim(1), [&](std::int64_t first, const GgufBlock& d) {
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
  MOESAIC_ASSIGN_OR_RETURN(const GgufFormat* format,
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

}  // namespace moesaic::quant
