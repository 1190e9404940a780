// Column-major and packed UE8M0 scales.

#include <bit>
#include <cstring>
#include <string>

#include "core/checked.h"
#include "core/fault.h"
#include "moesaic/interop/layouts.h"
#include "numerics/e8m0.h"
#include "quant/arguments.h"

namespace moesaic {
namespace {

constexpr quant::DTypeMask kExponents = quant::accept(DType::kF8E8M0, DType::kU8);
constexpr quant::DTypeMask kUe8m0Scales = kExponents | quant::accept(DType::kF32);

// A stack of matrices [E, M, G]; rank 2 has one.
struct Stack {
  std::int64_t experts, rows, cols;
};
Result<Stack> stack_of(std::string_view field, const Shape& shape) {
  const int r = shape.rank();
  if (r != 2 && r != 3) {
    return Status(StatusCode::kInvalidShape, std::string(field) + ": got " + shape.to_string() +
                                                 ", need rank 2 [M, G] or 3 [E, M, G]");
  }
  constexpr std::int64_t kLargest = std::int64_t{1} << 60;
  if (shape[r - 2] > kLargest || shape[r - 1] > kLargest) {
    return Status(StatusCode::kLimitExceeded, std::string(field) + ": got " + shape.to_string() +
                                                  ", need dimensions up to 2^60");
  }
  return Stack{r == 3 ? shape[0] : 1, shape[r - 2], shape[r - 1]};
}

// [E, columns, align(rows, 4)], or without E.
Result<Shape> storage_shape(const Shape& scales, std::int64_t columns, const Stack& s) {
  const std::int64_t aligned = tma_aligned_rows(s.rows, 4);
  const Shape shape =
      scales.rank() == 3 ? Shape({s.experts, columns, aligned}) : Shape({columns, aligned});
  MOESAIC_RETURN_IF_ERROR(shape.num_elements().status());
  return shape;
}

// Calls visit(e, m, g) for every scale.
template <class Visit>
Status for_stack(const Stack& s, Visit&& visit) {
  if (s.cols == 0 || s.rows == 0) return {};
  for (std::int64_t e = 0; e < s.experts; ++e) {
    for (std::int64_t m = 0; m < s.rows; ++m) {
      for (std::int64_t g = 0; g < s.cols; ++g) MOESAIC_RETURN_IF_ERROR(visit(e, m, g));
    }
  }
  return {};
}

std::string place(const Stack& s, int rank, std::int64_t e, std::int64_t m, std::int64_t g) {
  (void)s;
  return (rank == 3 ? Shape({e, m, g}) : Shape({m, g})).to_string();
}

Status check_row_blocks(const ConstTensorView& blocks, const ConstTensorView& rows,
                        std::int64_t block_n, bool to_rows, Stack* stack) {
  MOESAIC_RETURN_IF_ERROR(quant::expect_positive("block_n", block_n));
  const char* rows_field = to_rows ? "out" : "rows";
  const char* blocks_field = to_rows ? "scales" : "out";
  MOESAIC_ASSIGN_OR_RETURN(*stack, stack_of(rows_field, rows.shape));
  const std::int64_t count = stack->rows / block_n + (stack->rows % block_n != 0 ? 1 : 0);
  const Shape want =
      rows.rank() == 3 ? Shape({stack->experts, count, stack->cols}) : Shape({count, stack->cols});
  const quant::DTypeMask dtypes =
      kExponents | quant::accept(DType::kF8E4M3, DType::kF32, DType::kI32);
  return quant::check_arguments({
      {blocks_field, blocks, dtypes, want, !to_rows},
      {rows_field, rows, dtypes & quant::accept(blocks.dtype), rows.shape, to_rows},
  });
}

}  // namespace

Result<Shape> column_major_shape(const Shape& scales) {
  MOESAIC_ASSIGN_OR_RETURN(const Stack s, stack_of("scales", scales));
  return storage_shape(scales, s.cols, s);
}

Status to_column_major(ConstTensorView scales, TensorView storage) {
  MOESAIC_ASSIGN_OR_RETURN(const Shape shape, column_major_shape(scales.shape));
  MOESAIC_RETURN_IF_ERROR(quant::check_arguments({
      {"scales", scales, quant::accept(DType::kF32), scales.shape},
      {"storage", storage, quant::accept(DType::kF32), shape, true},
  }));
  MOESAIC_ASSIGN_OR_RETURN(const Stack s, stack_of("scales", scales.shape));
  MOESAIC_ASSIGN_OR_RETURN(const std::int64_t count, shape.num_elements());
  std::fill_n(storage.as<float>(), count, 0.0F);
  const std::int64_t aligned =
      MOESAIC_FAULT(quant_columns_not_aligned) ? s.rows : tma_aligned_rows(s.rows, 4);
  return for_stack(s, [&](std::int64_t e, std::int64_t m, std::int64_t g) -> Status {
    storage.as<float>()[(e * s.cols + g) * aligned + m] =
        scales.as<float>()[(e * s.rows + m) * s.cols + g];
    return {};
  });
}

Status from_column_major(ConstTensorView storage, TensorView scales) {
  MOESAIC_ASSIGN_OR_RETURN(const Shape shape, column_major_shape(scales.shape));
  MOESAIC_RETURN_IF_ERROR(quant::check_arguments({
      {"storage", storage, quant::accept(DType::kF32), shape},
      {"scales", scales, quant::accept(DType::kF32), scales.shape, true},
  }));
  MOESAIC_ASSIGN_OR_RETURN(const Stack s, stack_of("scales", scales.shape));
  const std::int64_t aligned = tma_aligned_rows(s.rows, 4);
  return for_stack(s, [&](std::int64_t e, std::int64_t m, std::int64_t g) -> Status {
    scales.as<float>()[(e * s.rows + m) * s.cols + g] =
        storage.as<float>()[(e * s.cols + g) * aligned + m];
    return {};
  });
}

Result<Shape> packed_ue8m0_shape(const Shape& scales) {
  MOESAIC_ASSIGN_OR_RETURN(const Stack s, stack_of("scales", scales));
  return storage_shape(scales, ceil_div(s.cols, 4), s);
}

Status pack_ue8m0(ConstTensorView scales, TensorView storage) {
  MOESAIC_ASSIGN_OR_RETURN(const Shape shape, packed_ue8m0_shape(scales.shape));
  MOESAIC_RETURN_IF_ERROR(quant::check_arguments({
      {"scales", scales, kUe8m0Scales, scales.shape},
      {"storage", storage, quant::accept(DType::kI32), shape, true},
  }));
  MOESAIC_ASSIGN_OR_RETURN(const Stack s, stack_of("scales", scales.shape));
  MOESAIC_ASSIGN_OR_RETURN(const std::int64_t count, shape.num_elements());
  std::fill_n(storage.as<std::uint32_t>(), count, 0U);
  const std::int64_t aligned = tma_aligned_rows(s.rows, 4);
  const std::int64_t words = ceil_div(s.cols, 4);
  return for_stack(s, [&](std::int64_t e, std::int64_t m, std::int64_t g) -> Status {
    const std::int64_t from = (e * s.rows + m) * s.cols + g;
    std::uint32_t exponent = 0;
    bool ok = true;
    if (scales.dtype == DType::kF32) {
      const std::uint32_t bits = scales.as<std::uint32_t>()[from];
      exponent = bits >> 23;
      ok = (bits & 0x007FFFFFU) == 0 && exponent >= 1 && exponent <= kE8m0Max;
    } else {
      exponent = scales.as<std::uint8_t>()[from];
      ok = exponent != kE8m0Nan;
    }
    if (!ok) {
      return Status(StatusCode::kInvalidArgument,
                    "scales" + place(s, scales.rank(), e, m, g) + ": got " +
                        (scales.dtype == DType::kF32 ? std::to_string(scales.as<float>()[from])
                                                     : std::string("NaN (0xFF)")) +
                        ", need a power of two");
    }
    const auto shift = static_cast<unsigned>(8 * (g % 4));
    storage.as<std::uint32_t>()[(e * words + g / 4) * aligned + m] |=
        exponent << (MOESAIC_FAULT(quant_ue8m0_big_endian) ? 24U - shift : shift);
    return {};
  });
}

Status unpack_ue8m0(ConstTensorView storage, TensorView scales) {
  MOESAIC_ASSIGN_OR_RETURN(const Shape shape, packed_ue8m0_shape(scales.shape));
  MOESAIC_RETURN_IF_ERROR(quant::check_arguments({
      {"storage", storage, quant::accept(DType::kI32), shape},
      {"scales", scales, kUe8m0Scales, scales.shape, true},
  }));
  MOESAIC_ASSIGN_OR_RETURN(const Stack s, stack_of("scales", scales.shape));
  const std::int64_t aligned = tma_aligned_rows(s.rows, 4);
  const std::int64_t words = ceil_div(s.cols, 4);
  return for_stack(s, [&](std::int64_t e, std::int64_t m, std::int64_t g) -> Status {
    const std::uint32_t word = storage.as<std::uint32_t>()[(e * words + g / 4) * aligned + m];
    const auto byte = static_cast<std::uint8_t>(word >> (8 * (g % 4)));
    const std::int64_t to = (e * s.rows + m) * s.cols + g;
    if (scales.dtype == DType::kF32) {
      scales.as<float>()[to] = f32_from_e8m0(byte);
    } else {
      scales.as<std::uint8_t>()[to] = byte;
    }
    return {};
  });
}

Status expand_row_blocks(ConstTensorView scales, std::int64_t block_n, TensorView out) {
  Stack s{};
  MOESAIC_RETURN_IF_ERROR(check_row_blocks(scales, out, block_n, true, &s));
  const auto bytes = static_cast<std::size_t>(s.cols * (dtype_bits(out.dtype) / 8));
  const std::int64_t blocks = s.rows / block_n + (s.rows % block_n != 0 ? 1 : 0);
  for (std::int64_t row = 0; row < s.experts * s.rows && bytes > 0; ++row) {
    const std::int64_t from = row / s.rows * blocks + row % s.rows / block_n;
    std::memcpy(out.data + static_cast<std::size_t>(row) * bytes,
                scales.data + static_cast<std::size_t>(from) * bytes, bytes);
  }
  return {};
}

Status collapse_row_blocks(ConstTensorView rows, std::int64_t block_n, TensorView out) {
  Stack s{};
  MOESAIC_RETURN_IF_ERROR(check_row_blocks(out, rows, block_n, false, &s));
  const auto bytes = static_cast<std::size_t>(s.cols * (dtype_bits(rows.dtype) / 8));
  const std::int64_t blocks = s.rows / block_n + (s.rows % block_n != 0 ? 1 : 0);
  for (std::int64_t row = 0; row < s.experts * s.rows && bytes > 0; ++row) {
    const std::int64_t in_block = row % s.rows % block_n;
    const std::byte* from = rows.data + static_cast<std::size_t>(row) * bytes;
    std::byte* to =
        out.data + static_cast<std::size_t>(row / s.rows * blocks + row % s.rows / block_n) * bytes;
    if (in_block == 0) {
      std::memcpy(to, from, bytes);
    } else if (std::memcmp(to, from, bytes) != 0) {
      return Status(StatusCode::kInvalidArgument,
                    "rows: row " + std::to_string(row % s.rows) +
                        ": got scales that differ from the first row of its block of " +
                        std::to_string(block_n) + ", need equal ones");
    }
  }
  return {};
}

}  // namespace moesaic
