#include "quant/gguf_blocks.h"

#include <cmath>
#include <cstring>
#include <limits>
#include <string>

#include "core/checked.h"
#include "core/fault.h"
#include "quant/arguments.h"
#include "quant/gguf_decoders.h"

namespace moesaic::quant {
namespace {

// Checks a matrix of blocks against `columns` values per row.
Result<const GgufFormat*> check_blocks(GgufType type, const ConstTensorView& blocks,
                                       const Argument& values) {
  const auto id = static_cast<std::uint32_t>(type);
  MOESAIC_RETURN_IF_ERROR(expect_matrix(values.field, values.view));
  MOESAIC_ASSIGN_OR_RETURN(const std::int64_t row_bytes, gguf_row_bytes(id, values.view.dim(1)));
  MOESAIC_RETURN_IF_ERROR(check_arguments({
      values,
      {"blocks", blocks, accept(DType::kU8), {values.view.dim(0), row_bytes}},
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

Status split_gguf(GgufType type, ConstTensorView blocks, TensorView codes, TensorView scale,
                  TensorView min) {
  MOESAIC_ASSIGN_OR_RETURN(
      const GgufFormat* format,
      check_blocks(type, blocks, {"codes", codes, accept(DType::kI8), codes.shape, true}));
  const GgufTypeInfo& info = format->info;
  if (format->decode == nullptr) {
    return Status(StatusCode::kUnsupported, "GGUF type: got " + std::string(info.name) +
                                                ", which has no codes; need a type of blocks");
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

Status fp4_from_gguf(GgufType type, ConstTensorView blocks, TensorView codes, TensorView scale) {
  const Argument codes_argument{"codes", codes, accept(DType::kF4E2M1), codes.shape, true};
  MOESAIC_ASSIGN_OR_RETURN(const GgufFormat* format, check_blocks(type, blocks, codes_argument));
  const GgufTypeInfo& info = format->info;
  const bool mx = type == GgufType::kMXFP4;
  if (!mx && type != GgufType::kNVFP4) {
    return Status(StatusCode::kUnsupported,
                  "GGUF type: got " + std::string(info.name) + ", need MXFP4 or NVFP4");
  }
  const std::int64_t columns = codes.dim(1);
  MOESAIC_RETURN_IF_ERROR(check_arguments({{"blocks", blocks, accept(DType::kU8), blocks.shape},
                                           codes_argument,
                                           {"scale",
                                            scale,
                                            accept(mx ? DType::kF8E8M0 : DType::kF8E4M3),
                                            {codes.dim(0), columns / info.group},
                                            true}}));
  const std::int64_t per_row = columns / info.block_elems;
  const int groups = info.block_elems / info.group, half = info.group / 2;
  const auto* from = blocks.as<std::uint8_t>();
  auto* to = reinterpret_cast<std::uint8_t*>(codes.data);
  auto* scales = reinterpret_cast<std::uint8_t*>(scale.data);
  for (std::int64_t i = 0; i < codes.dim(0) * per_row; ++i, from += info.block_bytes) {
    const std::uint8_t* pairs = from + groups;
    for (int g = 0; g < groups; ++g, pairs += half, to += half) {
      std::uint8_t of = from[g];
      if (mx && of == 0xFF) {
        return bad_scale(i / per_row, i % per_row, std::numeric_limits<float>::quiet_NaN());
      }
      if (!mx) of = (of & 0x7F) == 0x7F ? 0 : of & 0x7F;
      *scales++ = of;
      // A byte of the block has columns j and j + half of the group.
      for (int j = 0; j < half; j += 2) {
        int low = pairs[j], high = pairs[j + 1];
        if (!mx && of == 0) low = high = 0;
        if (MOESAIC_FAULT(quant_gguf_fp4_pairs_in_turn)) high = low >> 4;
        to[j / 2] = static_cast<std::uint8_t>((low & 15) | (high & 15) << 4);
        to[(half + j) / 2] = static_cast<std::uint8_t>(low >> 4 | (high >> 4) << 4);
      }
    }
  }
  return {};
}

}  // namespace moesaic::quant
