// Non-owning tensor views, on any device, and one owning, 64-byte aligned buffer of this machine's
// memory. No arithmetic here.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <memory>
#include <span>
#include <string>
#include <type_traits>

#include "moesaic/device.h"
#include "moesaic/dtype.h"
#include "moesaic/status.h"

namespace moesaic {

inline constexpr int kMaxRank = 5;

// Dimensions, outermost first. Rank 0 is a scalar with one element.
class Shape {
 public:
  Shape() = default;
  // More than kMaxRank of them make [-1], which num_elements() and every check of a tensor refuses.
  Shape(std::initializer_list<std::int64_t> dims);
  // Fails with kInvalidShape when rank > kMaxRank or a dimension is negative.
  static Result<Shape> from(std::span<const std::int64_t> dims);

  int rank() const { return rank_; }
  std::int64_t operator[](int i) const { return dims_[static_cast<std::size_t>(i)]; }
  std::span<const std::int64_t> dims() const {
    return {dims_.data(), static_cast<std::size_t>(rank_)};
  }
  // Product of the dimensions, or kLimitExceeded when it does not fit 63 bits.
  Result<std::int64_t> num_elements() const;
  bool operator==(const Shape& other) const;
  std::string to_string() const;  // "[8, 7, 14]"

 private:
  std::array<std::int64_t, kMaxRank> dims_{};
  int rank_ = 0;
};

// Bytes of a contiguous tensor; kLimitExceeded on overflow, kInvalidShape when a sub-byte type does
// not fill whole bytes, kInvalidDType for a value outside the enumeration.
Result<std::int64_t> contiguous_bytes(DType dtype, const Shape& shape);

// A view of memory that somebody else owns. `data` may be null only when the shape has no elements.
// Strides are in elements; for sub-byte types only contiguous views exist. `device` says where the
// memory is; nobody looks at the pointer to find out.
template <class Byte>
struct BasicTensorView {
  Byte* data = nullptr;
  DType dtype = DType::kF32;
  Shape shape;
  std::array<std::int64_t, kMaxRank> strides{};
  Device device = Device::cpu();

  BasicTensorView() = default;
  // Contiguous row-major view.
  BasicTensorView(Byte* data_in, DType dtype_in, const Shape& shape_in,
                  Device device_in = Device::cpu());
  // A mutable view converts to a const one.
  template <class Other>
  requires(std::is_const_v<Byte> && !std::is_const_v<Other>)
      BasicTensorView(const BasicTensorView<Other>& other)  // NOLINT(google-explicit-constructor)
      : data(other.data),
        dtype(other.dtype),
        shape(other.shape),
        strides(other.strides),
        device(other.device) {}

  bool present() const { return data != nullptr; }
  int rank() const { return shape.rank(); }
  std::int64_t dim(int i) const { return shape[i]; }
  bool is_contiguous() const;
  template <class T>
  auto* as() const {
    if constexpr (std::is_const_v<Byte>) {
      return reinterpret_cast<const T*>(data);
    } else {
      return reinterpret_cast<T*>(data);
    }
  }
};
using TensorView = BasicTensorView<std::byte>;
using ConstTensorView = BasicTensorView<const std::byte>;
extern template struct BasicTensorView<std::byte>;
extern template struct BasicTensorView<const std::byte>;

// An owning, contiguous, 64-byte aligned tensor. Movable, not copyable.
class Tensor {
 public:
  Tensor() = default;
  // Zero-filled. kLimitExceeded on size overflow, kOutOfMemory when the allocator refuses.
  static Result<Tensor> zeros(DType dtype, const Shape& shape);
  // Contents undefined; for buffers that are written in full.
  static Result<Tensor> uninitialized(DType dtype, const Shape& shape);

  DType dtype() const { return dtype_; }
  const Shape& shape() const { return shape_; }
  std::int64_t bytes() const { return bytes_; }
  std::byte* data() { return data_.get(); }
  const std::byte* data() const { return data_.get(); }
  bool present() const { return data_ != nullptr; }
  TensorView view() { return {data_.get(), dtype_, shape_}; }
  ConstTensorView view() const { return {data_.get(), dtype_, shape_}; }
  template <class T>
  T* as() {
    return reinterpret_cast<T*>(data_.get());
  }
  template <class T>
  const T* as() const {
    return reinterpret_cast<const T*>(data_.get());
  }

 private:
  struct Free {
    void operator()(std::byte* p) const;
  };
  std::unique_ptr<std::byte[], Free> data_;
  DType dtype_ = DType::kF32;
  Shape shape_;
  std::int64_t bytes_ = 0;
};

// Checks used at the API boundary; `field` names the argument in the message.
Status expect_dtype(std::string_view field, const ConstTensorView& t, DType want);
Status expect_shape(std::string_view field, const ConstTensorView& t, const Shape& want);
Status expect_contiguous(std::string_view field, const ConstTensorView& t);
// kInvalidArgument when a tensor that is there is elsewhere.
Status expect_device(std::string_view field, const ConstTensorView& t, Device want);
// kAliasing (names both fields) when the byte ranges of two tensors of one device intersect.
Status expect_no_overlap(std::string_view field_a, const ConstTensorView& a,
                         std::string_view field_b, const ConstTensorView& b);

}  // namespace moesaic
