// Hidden states of a call on a GPU, whose rows may lie apart: kernels read contiguous ones.
#pragma once

#include <string_view>

#include "cuda/stream_allocation.h"
#include "moesaic/status.h"
#include "moesaic/tensor.h"

namespace moesaic::cuda {

// --- Decided without a device: part of every build ---

// Whether the rows of a matrix can be read: the last axis dense, rows at least as far apart as they
// are long. kInvalidLayout.
Status expect_rows(std::string_view field, const ConstTensorView& x);
// From the first element of a matrix that expect_rows takes to its last, as a vector: for checks of
// overlap.
ConstTensorView rows_extent(const ConstTensorView& x);

// --- With one ---

class DenseRows {
 public:
  // Of a call on `stream`, for as long as it puts work there.
  explicit DenseRows(void* stream) : copy_(stream), stream_(stream) {}
  // x, or where its rows are apart a copy in memory of the device's pool, made on the stream.
  // `alignment` is asked of contiguous rows; of others that of their elements. Capturable. Errors:
  // those of check_device_pointer, kOutOfMemory.
  Result<ConstTensorView> of(std::string_view field, const ConstTensorView& x,
                             std::int64_t alignment);

 private:
  StreamAllocation copy_;
  void* stream_;
};

}  // namespace moesaic::cuda
