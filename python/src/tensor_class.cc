// moesaic.Tensor: memory of the library's own, for frameworks that it cannot make tensors of.
#include <fmt/format.h>
#include <nanobind/stl/string.h>

#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "errors.h"
#include "gil.h"
#include "numerics/element.h"
#include "tensors.h"

namespace nb = nanobind;

namespace moesaic::python {
namespace {

struct OwnedTensor {
  std::shared_ptr<Tensor> tensor;
};

// What an exported capsule keeps alive.
struct Exported {
  std::shared_ptr<Tensor> tensor;
  std::vector<std::int64_t> dims;
  DlManagedVersioned versioned;
  DlManaged managed;
};

struct Names {
  DType dtype;
  std::uint8_t code, bits;
  const char* numpy;  // typestr; null: NumPy has no such type
};
constexpr Names kNames[] = {
    {DType::kF32, 2, 32, "<f4"},      {DType::kF64, 2, 64, "<f8"},
    {DType::kF16, 2, 16, "<f2"},      {DType::kI32, 0, 32, "<i4"},
    {DType::kI64, 0, 64, "<i8"},      {DType::kI16, 0, 16, "<i2"},
    {DType::kI8, 0, 8, "|i1"},        {DType::kU8, 1, 8, "|u1"},
    {DType::kU16, 1, 16, "<u2"},      {DType::kU32, 1, 32, "<u4"},
    {DType::kU64, 1, 64, "<u8"},      {DType::kBool, 6, 8, "|b1"},
    {DType::kC64, 5, 64, "<c8"},      {DType::kBF16, 4, 16, nullptr},
    {DType::kF8E4M3, 10, 8, nullptr}, {DType::kF8E4M3Fnuz, 11, 8, nullptr},
    {DType::kF8E5M2, 12, 8, nullptr}, {DType::kF8E5M2Fnuz, 13, 8, nullptr},
    {DType::kF8E8M0, 14, 8, nullptr}, {DType::kF6E2M3, 15, 6, nullptr},
    {DType::kF6E3M2, 16, 6, nullptr}, {DType::kF4E2M1, 17, 4, nullptr},
};

const Names& names_of(DType dtype) {
  for (const Names& row : kNames) {
    if (row.dtype == dtype) return row;
  }
  raise(StatusCode::kUnsupported,
        fmt::format("dtype: {} has no counterpart in DLPack", dtype_name(dtype)));
}

void fill(Exported* e, DlTensor* t) {
  const Names& names = names_of(e->tensor->dtype());
  const bool pairs = names.bits == 4;  // as PyTorch has them: two in an element
  if (pairs && (e->dims.empty() || e->dims.back() % 2 != 0)) {
    raise(StatusCode::kUnsupported,
          fmt::format("__dlpack__: got {} {}, need an even number of codes in a row",
                      dtype_name(e->tensor->dtype()), e->tensor->shape().to_string()));
  }
  if (pairs) e->dims.back() /= 2;
  t->data = e->tensor->data();
  t->rank = static_cast<std::int32_t>(e->dims.size());
  t->dtype = {names.code, names.bits, static_cast<std::uint16_t>(pairs ? 2 : 1)};
  t->shape = e->dims.data();
}

int major_of(nb::handle version) {
  constexpr std::string_view kNeed = "a pair of whole numbers, or None";
  if (!nb::isinstance<nb::tuple>(version) || nb::len(version) != 2) {
    raise_not_cast("max_version", version, kNeed);
  }
  return cast_as<int>("max_version", version[0], kNeed);
}

nb::object dlpack(const OwnedTensor& self, nb::handle stream, nb::handle max_version,
                  nb::handle device, nb::handle copy) {
  static_cast<void>(stream);
  if (!device.is_none() && !device.equal(nb::make_tuple(kDlCpu, 0))) {
    PyErr_SetString(PyExc_BufferError,
                    "moesaic.Tensor is host memory; copy it to a device afterwards");
    throw nb::python_error();
  }
  if (!copy.is_none() && PyObject_IsTrue(copy.ptr()) != 0) {
    PyErr_SetString(PyExc_BufferError, "moesaic.Tensor exports its own memory; copy it afterwards");
    throw nb::python_error();
  }
  auto e = std::make_unique<Exported>();
  e->tensor = self.tensor;
  const auto dims = self.tensor->shape().dims();
  e->dims.assign(dims.begin(), dims.end());
  const bool versioned = !max_version.is_none() && major_of(max_version) >= 1;
  fill(e.get(), versioned ? &e->versioned.tensor : &e->managed.tensor);
  e->versioned.context = e->managed.context = e.get();
  e->versioned.deleter = [](DlManagedVersioned* t) { delete static_cast<Exported*>(t->context); };
  e->managed.deleter = [](DlManaged* t) { delete static_cast<Exported*>(t->context); };
  Exported* const raw = e.release();
  PyObject* const capsule =
      versioned ? PyCapsule_New(&raw->versioned, "dltensor_versioned",
                                [](PyObject* c) {
                                  if (PyCapsule_IsValid(c, "dltensor_versioned") == 0) return;
                                  auto* const t = static_cast<DlManagedVersioned*>(
                                      PyCapsule_GetPointer(c, "dltensor_versioned"));
                                  t->deleter(t);
                                })
                : PyCapsule_New(&raw->managed, "dltensor", [](PyObject* c) {
                    if (PyCapsule_IsValid(c, "dltensor") == 0) return;
                    auto* const t = static_cast<DlManaged*>(PyCapsule_GetPointer(c, "dltensor"));
                    t->deleter(t);
                  });
  if (capsule == nullptr) {
    delete raw;
    throw nb::python_error();
  }
  return nb::steal(capsule);
}

nb::tuple shape_of(const OwnedTensor& self) {
  nb::list dims;
  for (const std::int64_t d : self.tensor->shape().dims()) dims.append(d);
  return nb::tuple(dims);
}

nb::object widened(const OwnedTensor& self) {
  const Tensor& from = *self.tensor;
  if (!is_loadable_float(from.dtype())) {
    raise(StatusCode::kUnsupported,
          fmt::format("float32: got {}, need a floating-point type", dtype_name(from.dtype())));
  }
  Tensor to = unwrap(Tensor::uninitialized(DType::kF32, from.shape()));
  const std::int64_t count = unwrap(from.shape().num_elements());
  {
    const GilReleased released;
    for (std::int64_t i = 0; i < count; ++i) {
      to.as<float>()[i] = load_as_f32(from.data(), from.dtype(), i);
    }
  }
  return wrap_tensor(std::move(to));
}

nb::dict array_interface(const OwnedTensor& self) {
  const Names& names = names_of(self.tensor->dtype());
  if (names.numpy == nullptr) {
    PyErr_SetString(PyExc_AttributeError, "NumPy has no such element type; use __dlpack__");
    throw nb::python_error();
  }
  nb::dict d;
  d["version"] = 3;
  d["shape"] = shape_of(self);
  d["typestr"] = names.numpy;
  d["data"] = nb::make_tuple(reinterpret_cast<std::uintptr_t>(self.tensor->data()), false);
  d["strides"] = nb::none();
  return d;
}

// Who calls this is NumPy where it found no __array_interface__, or a caller by name.
nb::object as_array(nb::handle self, nb::handle dtype, nb::handle copy) {
  const DType own = nb::cast<const OwnedTensor&>(self).tensor->dtype();
  if (names_of(own).numpy == nullptr) {
    raise(StatusCode::kInvalidDType,
          fmt::format("__array__: got {}, which NumPy does not have, need float32() of it, or "
                      "torch.from_dlpack",
                      dtype_name(own)));
  }
  nb::object made = nb::module_::import_("numpy").attr("asarray")(self, dtype);
  if (!copy.is_none() && PyObject_IsTrue(copy.ptr()) == 1) return made.attr("copy")();
  return made;
}

}  // namespace

nb::object wrap_tensor(Tensor tensor) {
  return nb::cast(OwnedTensor{std::make_shared<Tensor>(std::move(tensor))});
}

void bind_tensor(nb::module_& m) {
  nb::class_<OwnedTensor>(
      m, "Tensor",
      "Memory of the library's own. numpy.asarray(t) and torch.from_dlpack(t) see it "
      "without copying.")
      .def("__dlpack__", &dlpack, nb::kw_only(), nb::arg("stream").none() = nb::none(),
           nb::arg("max_version").none() = nb::none(), nb::arg("dl_device").none() = nb::none(),
           nb::arg("copy").none() = nb::none(),
           nb::sig(
               "def __dlpack__(self, *, stream: typing.Any = None, max_version: typing.Any = None, "
               "dl_device: typing.Any = None, copy: bool | None = None) -> typing.Any"))
      .def(
          "__dlpack_device__", [](const OwnedTensor&) { return nb::make_tuple(kDlCpu, 0); },
          nb::sig("def __dlpack_device__(self) -> tuple[int, int]"))
      .def_prop_ro("__array_interface__", &array_interface,
                   nb::sig("def __array_interface__(self) -> dict[str, typing.Any]"))
      .def("__array__", &as_array, nb::arg("dtype").none() = nb::none(),
           nb::arg("copy").none() = nb::none(),
           nb::sig("def __array__(self, dtype: typing.Any = None, copy: bool | None = None) -> "
                   "typing.Any"),
           "InvalidDType for the types that NumPy does not have.")
      .def_prop_ro("shape", &shape_of, nb::sig("def shape(self) -> tuple[int, ...]"))
      .def_prop_ro(
          "dtype", [](const OwnedTensor& t) { return std::string(dtype_name(t.tensor->dtype())); },
          "As safetensors files name it: \"BF16\", \"F8_E4M3\", ...")
      .def("float32", &widened, nb::sig("def float32(self) -> Tensor"),
           "A copy with F32 elements, for frameworks without BF16 or FP8.")
      .def_prop_ro("nbytes", [](const OwnedTensor& t) { return t.tensor->bytes(); })
      .def("__repr__", [](const OwnedTensor& t) {
        return fmt::format("moesaic.Tensor({} {})", dtype_name(t.tensor->dtype()),
                           t.tensor->shape().to_string());
      });
}

}  // namespace moesaic::python
