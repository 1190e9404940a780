// Tensors of Python as views, and new tensors of the same framework. Nothing is copied.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <memory>
#include <span>
#include <string_view>

#include "dlpack_abi.h"
#include "moesaic/device.h"
#include "moesaic/dtype.h"
#include "moesaic/tensor.h"

namespace moesaic::python {

// A tensor of the caller's, for the duration of a call. Read by the first of these that there is:
//   1. its type's DLPack exchange table (PyTorch from 2.10 on), cached by type; __dlpack__ of older ones
//   2. __array_interface__ (NumPy; ml_dtypes by the dtype's name)
//   3. __dlpack__
//   4. __cuda_array_interface__
// Strides are kept. kInvalidArgument for anything else and for a tensor whose storage was freed;
// kInvalidDType for element types that the library does not know; kUnsupported for devices.
class TensorArg {
 public:
  TensorArg() = default;
  // `object` must outlive this. None gives an argument that is not present.
  TensorArg(std::string_view field, nanobind::handle object);
  TensorArg(TensorArg&&) noexcept = default;
  TensorArg& operator=(TensorArg&&) noexcept = default;

  bool present() const { return present_; }
  const TensorView& view() const { return view_; }
  TensorView& view() { return view_; }
  // kInvalidArgument for memory that may not be written.
  const TensorView& writable(std::string_view field) const;
  // kInvalidLayout for PyTorch's views that negate when they are read: its table hands over their
  // memory. For weights; a call's tensors are not asked, which would cost 0.1 us for each.
  void check_not_negated(std::string_view field) const;
  // The stream on which its framework works now; null where that is not known.
  Stream current_stream() const;
  bool knows_stream() const;
  // What the framework has put on that stream (of __cuda_array_interface__: on the one that it names) is
  // done: for memory that is read on another one. kDevice.
  void wait_until_written() const;
  // host_copy of it after wait_until_written().
  ConstTensorView on_host(std::string_view field, Tensor* copy) const;

  // A new tensor of the same framework and device, contents undefined: by the exchange table, by
  // PyTorch's or NumPy's function, or a moesaic.Tensor. `view` is set to its memory.
  nanobind::object like(DType dtype, std::span<const std::int64_t> dims, TensorView* view) const;

 private:
  void from_table(std::string_view field, nanobind::handle object);
  void from_array_interface(std::string_view field, nanobind::object held, bool cuda);
  void take_stream(std::string_view field, PyObject* stream);
  void from_dlpack(std::string_view field, nanobind::handle object);
  void take(std::string_view field, const DlTensor& t);

  struct Release {
    void operator()(DlManagedVersioned* t) const {
      if (t->deleter != nullptr) t->deleter(t);
    }
    void operator()(DlManaged* t) const {
      if (t->deleter != nullptr) t->deleter(t);
    }
  };

  bool present_ = false, read_only_ = false;
  TensorView view_;
  nanobind::handle object_;
  nanobind::object interface_;  // NumPy's scalars (before 2.5) make memory that it keeps
  const DlExchange* api_ = nullptr;
  Stream written_on_;  // of a __cuda_array_interface__
  std::unique_ptr<DlManagedVersioned, Release> versioned_;
  std::unique_ptr<DlManaged, Release> managed_;
};

// The numbers of a tensor in host memory: its own, or those of a contiguous one on a device in `copy`.
ConstTensorView host_copy(std::string_view field, const ConstTensorView& t, Tensor* copy);

// stream= of a device call: an integer, an object with cuda_stream (PyTorch), ptr (CuPy) or
// __cuda_stream__; None: the one of the tensor's framework, kInvalidArgument where that is unknown.
Stream stream_of(nanobind::handle stream, const TensorArg& tensor);

// All leading dimensions as one: rows of the last axis, equally far apart (kInvalidLayout else).
TensorView as_rows(std::string_view field, const TensorView& t);

void bind_tensor(nanobind::module_& m);
// A moesaic.Tensor that owns `tensor`.
nanobind::object wrap_tensor(Tensor tensor);

}  // namespace moesaic::python
