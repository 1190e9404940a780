// Copying tensors out of a file.
#include "checkpoint/container/tensor_data_file.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <utility>
#include <vector>

#include "checkpoint/container/guard.h"
#include "checkpoint/container/names.h"
#include "core/checked.h"
#include "core/fault.h"

namespace moesaic::checkpoint {
namespace {

// Slices whose row piece is at least this long are read piece by piece; shorter ones through a
// buffer of whole rows, because a system call costs about as much as copying this many bytes.
constexpr std::uint64_t kMinPieceBytes = 8192;
constexpr std::uint64_t kBounceBytes = 1 << 20;

Status tensor_error(const TensorDataFile& file, const TensorInfo& info, StatusCode code,
                    std::string_view text) {
  return Status(code, fmt::format("{}: tensor {}: {}", file.path(), quote_name(info.name), text));
}

Status check_readable(const TensorDataFile& file, const TensorInfo& info) {
  if (info.rank <= kMaxRank) return {};
  return tensor_error(file, info, StatusCode::kLimitExceeded,
                      fmt::format("rank: got {}, need at most {}", info.rank, kMaxRank));
}

}  // namespace

TensorDataFile::TensorDataFile(MappedFile file, std::uint64_t data_offset)
    : file_(std::move(file)), data_offset_(data_offset) {}

Status TensorDataFile::read(const TensorInfo& info, std::span<std::byte> dst) const {
  if (dst.size() != info.bytes()) {
    return tensor_error(
        *this, info, StatusCode::kInvalidArgument,
        fmt::format("destination: got {} bytes, need {}", dst.size(), info.bytes()));
  }
  return read_range(info, 0, dst);
}

Status TensorDataFile::read_range(const TensorInfo& info, std::uint64_t offset,
                                  std::span<std::byte> dst) const {
  MOESAIC_RETURN_IF_ERROR(check_readable(*this, info));
  if (offset > info.bytes() || dst.size() > info.bytes() - offset) {
    return tensor_error(*this, info, StatusCode::kInvalidArgument,
                        fmt::format("range: got {} bytes at {}, need an end within {} bytes",
                                    dst.size(), offset, info.bytes()));
  }
  if (MOESAIC_FAULT(safetensors_read_wrong_offset)) offset -= std::min<std::uint64_t>(offset, 8);
  return file_.read_at(data_offset_ + info.begin + offset, dst);
}

Status TensorDataFile::read_rows(const TensorInfo& info, std::int64_t first_row,
                                 std::int64_t num_rows, std::int64_t first_col,
                                 std::int64_t num_cols, std::span<std::byte> dst) const {
  MOESAIC_RETURN_IF_ERROR(check_readable(*this, info));
  const int rank = info.shape.rank();
  const std::int64_t cols = rank == 0 ? 1 : info.shape[rank - 1];
  // Fits: with no zero dimension it divides the validated element count; with one, nothing is read.
  std::int64_t rows = 1;
  for (int i = 0; i + 1 < rank; ++i) rows = checked_mul(rows, info.shape[i]).value_or(0);

  const auto inside = [](std::int64_t first, std::int64_t count, std::int64_t size) {
    return first >= 0 && count >= 0 && first <= size && count <= size - first;
  };
  if (!inside(first_row, num_rows, rows) || !inside(first_col, num_cols, cols)) {
    return tensor_error(*this, info, StatusCode::kInvalidArgument,
                        fmt::format("slice: got rows {}+{}, columns {}+{}, need a part of [{}, {}]",
                                    first_row, num_rows, first_col, num_cols, rows, cols));
  }
  if (num_rows == 0 || num_cols == 0) {
    if (dst.empty()) return {};
    return tensor_error(*this, info, StatusCode::kInvalidArgument,
                        fmt::format("destination: got {} bytes, need 0", dst.size()));
  }
  // From here on the slice is a non-empty part of a tensor that lies in the file: bytes of a row,
  // of a piece and of the slice are below 2^63. Bits may not be (8 x 2^60), but rows * cols * bits
  // was checked to fit u64.
  const auto bits = static_cast<std::uint64_t>(dtype_bits(info.dtype));
  const std::uint64_t row_bits = static_cast<std::uint64_t>(cols) * bits;
  const std::uint64_t skip_bits = static_cast<std::uint64_t>(first_col) * bits;
  const std::uint64_t piece_bits = static_cast<std::uint64_t>(num_cols) * bits;
  const bool whole_rows = num_cols == cols;
  const std::uint64_t begin_bits = static_cast<std::uint64_t>(first_row) * row_bits + skip_bits;
  const std::uint64_t slice_bits = static_cast<std::uint64_t>(num_rows) * piece_bits;
  if (begin_bits % 8 != 0 || slice_bits % 8 != 0 ||
      (!whole_rows && num_rows > 1 && (row_bits % 8 != 0 || piece_bits % 8 != 0))) {
    return tensor_error(
        *this, info, StatusCode::kInvalidLayout,
        fmt::format("slice: columns {}+{} of {} {}-bit elements do not fall on bytes", first_col,
                    num_cols, cols, bits));
  }
  if (dst.size() != slice_bits / 8) {
    return tensor_error(
        *this, info, StatusCode::kInvalidArgument,
        fmt::format("destination: got {} bytes, need {}", dst.size(), slice_bits / 8));
  }
  std::uint64_t begin = begin_bits / 8;
  if (MOESAIC_FAULT(safetensors_slice_ignores_first_column)) begin -= skip_bits / 8;
  if (whole_rows || num_rows == 1) return read_range(info, begin, dst);

  const std::uint64_t row = row_bits / 8;
  const std::uint64_t piece = piece_bits / 8;
  const auto count = static_cast<std::uint64_t>(num_rows);
  if (piece >= kMinPieceBytes || row > kBounceBytes || !reads_whole_rows()) {
    for (std::uint64_t r = 0; r < count; ++r) {
      MOESAIC_RETURN_IF_ERROR(read_range(info, begin + r * row, dst.subspan(r * piece, piece)));
    }
    return {};
  }
  return guard_allocation(path(), [&]() -> Status {
    const std::uint64_t rows_at_once = std::min(count, kBounceBytes / row);
    std::vector<std::byte> bounce(rows_at_once * row);
    for (std::uint64_t r = 0; r < count; r += rows_at_once) {
      const std::uint64_t n = std::min(rows_at_once, count - r);
      // The last row ends with its piece: what follows may be outside the tensor.
      const auto part = std::span(bounce).first((n - 1) * row + piece);
      MOESAIC_RETURN_IF_ERROR(read_range(info, begin + r * row, part));
      for (std::uint64_t i = 0; i < n; ++i) {
        std::memcpy(dst.data() + (r + i) * piece, bounce.data() + i * row, piece);
      }
    }
    return {};
  });
}

Result<Tensor> TensorDataFile::read_tensor(const TensorInfo& info) const {
  MOESAIC_RETURN_IF_ERROR(check_readable(*this, info));
  MOESAIC_ASSIGN_OR_RETURN(Tensor tensor, Tensor::uninitialized(info.dtype, info.shape));
  MOESAIC_RETURN_IF_ERROR(read(info, {tensor.data(), static_cast<std::size_t>(tensor.bytes())}));
  return tensor;
}

Result<std::span<const std::byte>> TensorDataFile::view(const TensorInfo& info) const {
  MOESAIC_RETURN_IF_ERROR(check_readable(*this, info));
  if (file_.mapping().empty()) {
    return tensor_error(*this, info, StatusCode::kUnsupported,
                        "view: got a file opened for copying, need FileAccess::kMmap");
  }
  return file_.mapping().subspan(data_offset_ + info.begin, info.bytes());
}

void TensorDataFile::drop_residency(const TensorInfo& info) const {
  file_.drop_residency(data_offset_ + info.begin, info.bytes());
}

}  // namespace moesaic::checkpoint
