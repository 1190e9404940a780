#include "cuda/dense_rows.h"

#include "core/fault.h"
#include "cuda/device_memory.h"

namespace moesaic::cuda {

Result<ConstTensorView> DenseRows::of(std::string_view field, const ConstTensorView& x,
                                      std::int64_t alignment) {
  const std::int64_t element = dtype_bits(x.dtype) / 8;
  const bool dense = x.is_contiguous();
  MOESAIC_RETURN_IF_ERROR(
      check_device_pointer(field, x.data, dense ? alignment : element, x.device.index()));
  if (dense || MOESAIC_FAULT(cuda_rows_apart_taken_as_dense)) return x;
  MOESAIC_ASSIGN_OR_RETURN(const std::int64_t bytes, contiguous_bytes(x.dtype, x.shape));
  MOESAIC_RETURN_IF_ERROR(copy_.reserve(field, bytes));
  const std::int64_t row_bytes = x.dim(1) * element;
  MOESAIC_RETURN_IF_ERROR(copy_rows_on_device(field, copy_.as<void>(), row_bytes, x.data,
                                              x.strides[0] * element, row_bytes, x.dim(0),
                                              stream_));
  return ConstTensorView(copy_.as<std::byte>(), x.dtype, x.shape, x.device);
}

}  // namespace moesaic::cuda
