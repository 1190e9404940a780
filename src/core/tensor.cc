#include "moesaic/tensor.h"

#if defined(__linux__)
#include <sys/mman.h>
#endif

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <new>

#include "core/available_memory.h"
#include "core/checked.h"
#include "core/fault.h"

namespace moesaic {

Shape::Shape(std::initializer_list<std::int64_t> dims) {
  if (dims.size() > static_cast<std::size_t>(kMaxRank)) {
    dims_[0] = -1;
    rank_ = 1;
    return;
  }
  for (const std::int64_t d : dims) dims_[static_cast<std::size_t>(rank_++)] = d;
}

Result<Shape> Shape::from(std::span<const std::int64_t> dims) {
  if (dims.size() > static_cast<std::size_t>(kMaxRank)) {
    return Status(StatusCode::kInvalidShape, "rank: got " + std::to_string(dims.size()) +
                                                 ", need at most " + std::to_string(kMaxRank));
  }
  Shape shape;
  for (const std::int64_t d : dims) {
    if (d < 0) {
      return Status(StatusCode::kInvalidShape,
                    "dimension: got " + std::to_string(d) + ", need a non-negative number");
    }
    shape.dims_[static_cast<std::size_t>(shape.rank_++)] = d;
  }
  return shape;
}

Result<std::int64_t> Shape::num_elements() const {
  std::int64_t n = 1;
  for (const std::int64_t d : dims()) {
    if (d < 0) {
      return Status(StatusCode::kInvalidShape,
                    "shape: got " + to_string() + ", need dimensions >= 0");
    }
    const auto next = checked_mul(n, d);
    if (!next) {
      return Status(StatusCode::kLimitExceeded,
                    "shape: the number of elements of " + to_string() + " exceeds 2^63-1");
    }
    n = *next;
  }
  return n;
}

bool Shape::operator==(const Shape& other) const {
  if (rank_ != other.rank_) return false;
  for (int i = 0; i < rank_; ++i) {
    if ((*this)[i] != other[i]) return false;
  }
  return true;
}

std::string Shape::to_string() const {
  std::string text = "[";
  for (int i = 0; i < rank_; ++i) {
    if (i > 0) text += ", ";
    text += std::to_string((*this)[i]);
  }
  text += "]";
  return text;
}

Result<std::int64_t> contiguous_bytes(DType dtype, const Shape& shape) {
  MOESAIC_ASSIGN_OR_RETURN(const std::int64_t n, shape.num_elements());
  if (dtype_bits(dtype) == 0) {
    return Status(StatusCode::kInvalidDType,
                  "dtype: got " + std::to_string(static_cast<int>(dtype)) + ", need one of DType");
  }
  const auto bits = checked_mul(n, dtype_bits(dtype));
  if (!bits) {
    return Status(StatusCode::kLimitExceeded,
                  "shape: the size in bits of " + shape.to_string() + " exceeds 2^63-1");
  }
  if (*bits % 8 != 0) {
    return Status(StatusCode::kInvalidShape, "shape: " + shape.to_string() + " of " +
                                                 std::string(dtype_name(dtype)) +
                                                 " does not fill whole bytes");
  }
  return *bits / 8;
}

template <class Byte>
BasicTensorView<Byte>::BasicTensorView(Byte* data_in, DType dtype_in, const Shape& shape_in,
                                       Device device_in)
    : data(data_in), dtype(dtype_in), shape(shape_in), device(device_in) {
  std::int64_t stride = 1;
  for (int i = shape.rank() - 1; i >= 0; --i) {
    strides[static_cast<std::size_t>(i)] = stride;
    // A product past 63 bits cannot describe memory; num_elements() reports it, here it must only
    // not be undefined.
    stride = checked_mul(stride, shape[i]).value_or(0);
  }
}

template <class Byte>
bool BasicTensorView<Byte>::is_contiguous() const {
  // Without elements there is nothing that strides could lead to; NumPy leaves them zero.
  const auto dims = shape.dims();
  const bool empty = std::find(dims.begin(), dims.end(), 0) != dims.end();
  if (empty && !MOESAIC_FAULT(tensor_empty_is_strided)) return true;
  std::int64_t stride = 1;
  for (int i = shape.rank() - 1; i >= 0; --i) {
    if (shape[i] != 1 && strides[static_cast<std::size_t>(i)] != stride) return false;
    stride = checked_mul(stride, shape[i]).value_or(0);
  }
  return true;
}

template struct BasicTensorView<std::byte>;
template struct BasicTensorView<const std::byte>;

namespace {
constexpr std::size_t kAlignment = 64;  // one cache line, one AVX-512 register

// Large ones ask for huge pages: through 4 KiB ones, rows that lie apart cost a page walk each.
constexpr std::size_t kHugePage = std::size_t{2} << 20;
constexpr std::size_t kLarge = 2 * kHugePage;

std::byte* allocate(std::size_t bytes) {
  const std::size_t alignment = bytes >= kLarge ? kHugePage : kAlignment;
  const std::size_t size = (bytes + alignment) / alignment * alignment;
  void* p = std::aligned_alloc(alignment, size);
#if defined(__linux__)
  // Whole ones only, so that the last takes no more memory than it needs.
  if (p != nullptr && alignment == kHugePage)
    madvise(p, bytes / kHugePage * kHugePage, MADV_HUGEPAGE);
#endif
  return static_cast<std::byte*>(p);
}
}  // namespace

void Tensor::Free::operator()(std::byte* p) const { std::free(p); }

Result<Tensor> Tensor::uninitialized(DType dtype, const Shape& shape) {
  MOESAIC_ASSIGN_OR_RETURN(const std::int64_t bytes, contiguous_bytes(dtype, shape));
  if (const Status there = check_available_memory("a tensor", bytes); !there.ok()) {
    return there.with_context("shape " + shape.to_string());
  }
  Tensor t;
  t.dtype_ = dtype;
  t.shape_ = shape;
  t.bytes_ = bytes;
  t.data_.reset(allocate(static_cast<std::size_t>(bytes)));
  if (!t.data_) {
    return Status(StatusCode::kOutOfMemory, "cannot allocate " + std::to_string(bytes) +
                                                " bytes for a tensor of shape " +
                                                shape.to_string());
  }
  return t;
}

Result<Tensor> Tensor::zeros(DType dtype, const Shape& shape) {
  MOESAIC_ASSIGN_OR_RETURN(Tensor t, uninitialized(dtype, shape));
  std::memset(t.data(), 0, static_cast<std::size_t>(t.bytes()));
  return t;
}

Status expect_dtype(std::string_view field, const ConstTensorView& t, DType want) {
  if (t.dtype == want) return {};
  return Status(StatusCode::kInvalidDType, std::string(field) + ": got " +
                                               std::string(dtype_name(t.dtype)) + ", need " +
                                               std::string(dtype_name(want)));
}

Status expect_shape(std::string_view field, const ConstTensorView& t, const Shape& want) {
  if (t.shape == want) {
    MOESAIC_ASSIGN_OR_RETURN(const std::int64_t n, want.num_elements());
    if (n > 0 && !t.present()) {
      return Status(
          StatusCode::kInvalidArgument,
          std::string(field) + ": got a null pointer, need " + want.to_string() + " elements");
    }
    return {};
  }
  return Status(StatusCode::kInvalidShape,
                std::string(field) + ": got " + t.shape.to_string() + ", need " + want.to_string());
}

Status expect_contiguous(std::string_view field, const ConstTensorView& t) {
  if (t.is_contiguous()) return {};
  return Status(StatusCode::kInvalidLayout,
                std::string(field) + ": got a strided tensor, need contiguous row-major");
}

Status expect_device(std::string_view field, const ConstTensorView& t, Device want) {
  if (!t.present() || t.device == want || MOESAIC_FAULT(tensor_any_device)) return {};
  return Status(StatusCode::kInvalidArgument, std::string(field) + ": got memory of " +
                                                  t.device.to_string() + ", need memory of " +
                                                  want.to_string());
}

Status expect_no_overlap(std::string_view field_a, const ConstTensorView& a,
                         std::string_view field_b, const ConstTensorView& b) {
  if (!a.present() || !b.present() || !(a.device == b.device)) return {};
  MOESAIC_ASSIGN_OR_RETURN(const std::int64_t bytes_a, contiguous_bytes(a.dtype, a.shape));
  MOESAIC_ASSIGN_OR_RETURN(const std::int64_t bytes_b, contiguous_bytes(b.dtype, b.shape));
  const auto begin_a = reinterpret_cast<std::uintptr_t>(a.data);
  const auto begin_b = reinterpret_cast<std::uintptr_t>(b.data);
  if (begin_a + static_cast<std::uintptr_t>(bytes_a) <= begin_b ||
      begin_b + static_cast<std::uintptr_t>(bytes_b) <= begin_a || bytes_a == 0 || bytes_b == 0) {
    return {};
  }
  return Status(StatusCode::kAliasing, std::string(field_a) + " overlaps " + std::string(field_b) +
                                           ", need disjoint memory");
}

}  // namespace moesaic
