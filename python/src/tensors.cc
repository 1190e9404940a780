#include "tensors.h"

#include <fmt/format.h>
#include <nanobind/stl/string.h>

#include <array>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>

#include "core/fault.h"
#include "errors.h"
#include "moesaic/device_tensor.h"
#include "torch_tensors.h"

namespace nb = nanobind;

namespace moesaic::python {
namespace {

struct TypeRow {
  DType dtype;
  std::uint8_t code, bits;
  const char* name;  // NumPy's and ml_dtypes'; empty: none
};
// The first row of a dtype is the one that new tensors get.
constexpr std::array<TypeRow, 22> kTypes = {{
    {DType::kF32, 2, 32, "float32"},
    {DType::kBF16, 4, 16, "bfloat16"},
    {DType::kF16, 2, 16, "float16"},
    {DType::kF64, 2, 64, "float64"},
    {DType::kI32, 0, 32, "int32"},
    {DType::kI64, 0, 64, "int64"},
    {DType::kI16, 0, 16, "int16"},
    {DType::kI8, 0, 8, "int8"},
    {DType::kU8, 1, 8, "uint8"},
    {DType::kU16, 1, 16, "uint16"},
    {DType::kU32, 1, 32, "uint32"},
    {DType::kU64, 1, 64, "uint64"},
    {DType::kBool, 6, 8, "bool"},
    {DType::kF8E4M3, 10, 8, "float8_e4m3fn"},
    {DType::kF8E4M3Fnuz, 11, 8, "float8_e4m3fnuz"},
    {DType::kF8E5M2, 12, 8, "float8_e5m2"},
    {DType::kF8E5M2Fnuz, 13, 8, "float8_e5m2fnuz"},
    {DType::kF8E8M0, 14, 8, "float8_e8m0fnu"},
    {DType::kF6E2M3, 15, 6, ""},
    {DType::kF6E3M2, 16, 6, ""},
    {DType::kF4E2M1, 17, 4, ""},
    {DType::kC64, 5, 64, "complex64"},
}};

const TypeRow* row_of(DType dtype) {
  for (const TypeRow& row : kTypes) {
    if (row.dtype == dtype) return &row;
  }
  return nullptr;
}

// The exchange tables of types, null where there is none. A type that dies is forgotten: one that was
// kept would keep its module, and what that has.
struct KnownType {
  const DlExchange* table;
  PyObject* watch;  // a weak reference
};
std::unordered_map<PyTypeObject*, KnownType>& known_types() {
  static auto* const types = new std::unordered_map<PyTypeObject*, KnownType>;
  return *types;
}

PyObject* forget_type(PyObject* /*module*/, PyObject* watch) {
  for (auto at = known_types().begin(); at != known_types().end(); ++at) {
    if (at->second.watch != watch) continue;
    known_types().erase(at);
    Py_DECREF(watch);
    break;
  }
  Py_RETURN_NONE;
}

const DlExchange* table_of(nb::handle object) {
  PyTypeObject* const type = Py_TYPE(object.ptr());
  if (const auto found = known_types().find(type); found != known_types().end()) {
    return found->second.table;
  }
  const DlExchange* table = nullptr;
  const nb::handle type_object(reinterpret_cast<PyObject*>(type));
  if (nb::hasattr(type_object, "__dlpack_c_exchange_api__")) {
    const nb::object capsule = type_object.attr("__dlpack_c_exchange_api__");
    void* const p = PyCapsule_GetPointer(capsule.ptr(), "dlpack_exchange_api");
    if (p == nullptr) PyErr_Clear();
    table = static_cast<const DlExchange*>(p);
    while (table != nullptr && table->version.major != 1) table = table->previous;
  }
  static PyMethodDef forget = {"forget_type", forget_type, METH_O, nullptr};
  const nb::object forgets = nb::steal(PyCFunction_NewEx(&forget, nullptr, nullptr));
  PyObject* const watch = PyWeakref_NewRef(type_object.ptr(), forgets.ptr());
  if (watch == nullptr) throw nb::python_error();
  if (MOESAIC_FAULT(python_types_kept)) Py_INCREF(type_object.ptr());
  known_types().emplace(type, KnownType{table, watch});
  return table;
}

bool is_negated(nb::handle object) {
  return nb::hasattr(object, "is_neg") && PyObject_IsTrue(object.attr("is_neg")().ptr()) == 1;
}

std::string class_name(nb::handle object) { return nb::type_name(object.type()).c_str(); }

// str(object): nb::str of an attribute would only be a cast.
std::string text_of(const nb::object& object) {
  return nb::str(static_cast<const nb::handle&>(object)).c_str();
}

// By the name of object.dtype, set when it is none that is known. NumPy's own dtypes are single
// objects, whose names take it microseconds to say: they are remembered, and kept.
const TypeRow* row_of_dtype_attribute(nb::handle object, std::string* name) {
  static auto* const known = new std::unordered_map<PyObject*, const TypeRow*>;
  PyObject* const dtype = PyObject_GetAttrString(object.ptr(), "dtype");
  if (dtype == nullptr) {
    PyErr_Clear();
    return nullptr;
  }
  const nb::object held = nb::steal(dtype);
  if (const auto found = known->find(dtype); found != known->end()) return found->second;
  *name = text_of(held);
  for (const TypeRow& row : kTypes) {
    if (*row.name == '\0' || *name != row.name) continue;
    if (MOESAIC_FAULT(python_bf16_read_as_f16) && row.dtype == DType::kBF16) return &kTypes[2];
    if (known->size() < 64) {
      Py_INCREF(dtype);
      known->emplace(dtype, &row);
    }
    return &row;
  }
  // A moesaic.Tensor says it as files do.
  const std::optional<DType> own = dtype_from_name(*name);
  return own ? row_of(*own) : nullptr;
}

bool is_numpy(nb::handle object) {
  const std::string name = class_name(object);
  if (name.starts_with("numpy.") || name == "ndarray") return true;
  const nb::dict modules = nb::module_::import_("sys").attr("modules");
  if (!modules.contains("numpy")) return false;
  const nb::object numpy = modules["numpy"];
  return nb::hasattr(numpy, "ndarray") &&
         PyObject_IsInstance(object.ptr(), nb::object(numpy.attr("ndarray")).ptr()) == 1;
}

// An array of numpy.ma hands over its values and not which of them count.
void check_not_masked(std::string_view field, nb::handle object) {
  static PyTypeObject* plain = nullptr;  // numpy.ndarray itself, once seen: it is asked nothing
  PyTypeObject* const type = Py_TYPE(object.ptr());
  if (type == plain) return;
  if (nb::hasattr(object, "mask") && nb::hasattr(object, "filled")) {
    raise(StatusCode::kInvalidArgument,
          fmt::format("{}: got a {}, whose mask would be ignored, need filled() of it", field,
                      class_name(object)));
  }
  if (plain != nullptr || !is_numpy(object)) return;
  const nb::object array = nb::module_::import_("numpy").attr("ndarray");
  if (reinterpret_cast<PyObject*>(type) == array.ptr()) {
    Py_INCREF(reinterpret_cast<PyObject*>(type));
    plain = type;
  }
}

[[noreturn]] void raise_dtype(std::string_view field, const std::string& found) {
  raise(StatusCode::kInvalidDType,
        fmt::format("{}: got elements of {}, need a type that files have (docs/python.md)", field,
                    found));
}

// A framework that does not hand over this tensor's memory (meta, sparse ...) says why, at length.
[[noreturn]] void raise_not_handed_over(std::string_view field, nb::handle object,
                                        const nb::python_error& error) {
  const bool refused = error.matches(PyExc_Exception) && !error.matches(PyExc_MemoryError);
  if (!refused || MOESAIC_FAULT(python_export_error_as_is)) throw nb::python_error(error);
  const std::string said = text_of(nb::borrow(error.value()));
  raise(StatusCode::kInvalidArgument,
        fmt::format("{}: got a {} that its framework does not hand over: {}", field,
                    class_name(object), said.substr(0, said.find('\n'))));
}

void set_error(void* context, const char* kind, const char* text) {
  *static_cast<std::string*>(context) = fmt::format("{}: {}", kind, text);
}

// None where it has no such type: BF16 without ml_dtypes.
nb::object new_numpy(nb::handle like, DType dtype, std::span<const std::int64_t> dims) {
  nb::list shape;
  for (const std::int64_t d : dims) shape.append(d);
  const TypeRow* const row = row_of(dtype);
  nb::object type = like.attr("dtype");
  if (row != nullptr && row->name != text_of(type.attr("name"))) {
    type = nb::str(row->name);
  }
  try {
    return nb::module_::import_("numpy").attr("empty")(nb::tuple(shape), type);
  } catch (const nb::python_error& error) {
    if (!error.matches(PyExc_TypeError)) throw;
    return nb::none();
  }
}

}  // namespace

TensorArg::TensorArg(std::string_view field, nb::handle object) : object_(object) {
  if (object.is_none()) return;
  api_ = table_of(object);
  if (api_ != nullptr) {
    from_table(field, object);
  } else if (is_torch_tensor(object)) {
    from_dlpack(field, object);
  } else if (nb::hasattr(object, "__array_interface__")) {
    check_not_masked(field, object);
    from_array_interface(field, object.attr("__array_interface__"), false);
  } else if (nb::hasattr(object, "__dlpack__")) {
    from_dlpack(field, object);
  } else if (nb::hasattr(object, "__cuda_array_interface__")) {
    from_array_interface(field, object.attr("__cuda_array_interface__"), true);
  } else {
    raise(StatusCode::kInvalidArgument,
          fmt::format("{}: got a {}, need a tensor (__dlpack__ or __array_interface__)", field,
                      class_name(object)));
  }
  present_ = true;
  std::int64_t elements = 1;
  for (const std::int64_t d : view_.shape.dims()) elements *= d != 0 ? 1 : 0;
  if (elements != 0 && view_.data == nullptr && !MOESAIC_FAULT(python_freed_storage_read)) {
    raise(StatusCode::kInvalidArgument,
          fmt::format(
              "{}: got {} without memory (its storage was freed, or it is on the meta device)",
              field, view_.shape.to_string()));
  }
}

void TensorArg::take(std::string_view field, const DlTensor& t) {
  DType dtype = DType::kF32;
  bool known = false;
  const bool pairs = t.dtype.bits == 4 && t.dtype.lanes == 2;
  for (const TypeRow& row : kTypes) {
    if (row.code != t.dtype.code || row.bits != t.dtype.bits) continue;
    dtype = row.dtype;
    known = t.dtype.lanes == 1 || pairs;
    break;
  }
  if (!known) {
    raise_dtype(field, fmt::format("DLPack type {}, {} bits, {} lane(s)", t.dtype.code,
                                   t.dtype.bits, t.dtype.lanes));
  }
  Device device = Device::cpu();
  if (t.device.type == kDlCuda || t.device.type == kDlCudaManaged) {
    device = Device::cuda(t.device.index);
  } else if (t.device.type != kDlCpu && t.device.type != kDlCudaHost) {
    raise(StatusCode::kUnsupported,
          fmt::format("{}: got a tensor on DLPack device {}, need one on a "
                      "CPU or a CUDA device",
                      field, t.device.type));
  }
  if (t.rank > kMaxRank) {
    raise(StatusCode::kInvalidShape,
          fmt::format("{}: got rank {}, need at most {}", field, t.rank, kMaxRank));
  }
  const auto rank = static_cast<std::size_t>(t.rank);
  std::array<std::int64_t, kMaxRank> dims{};
  for (std::size_t i = 0; i < rank; ++i) dims[i] = t.shape[i];
  if (pairs && rank > 0 && !MOESAIC_FAULT(python_fp4_pairs_halved)) dims[rank - 1] *= 2;
  const Shape shape = unwrap(Shape::from({dims.data(), rank}));
  auto* const data = static_cast<std::byte*>(t.data);
  view_ = TensorView(data == nullptr ? nullptr : data + t.byte_offset, dtype, shape, device);
  if (t.strides == nullptr) return;
  for (std::size_t i = 0; i < rank; ++i) {
    // Strides of dimensions with one element mean nothing; the library's contiguous ones stand.
    if (dims[i] > 1 && !MOESAIC_FAULT(python_dlpack_strides_ignored)) {
      view_.strides[i] = t.strides[i] * (pairs && i + 1 < rank ? 2 : 1);
    }
  }
}

void TensorArg::check_not_negated(std::string_view field) const {
  if (api_ == nullptr || !is_negated(object_)) return;
  raise(StatusCode::kInvalidLayout,
        fmt::format("{}: got a view that negates its memory, need resolve_neg() of it", field));
}

void TensorArg::from_table(std::string_view field, nb::handle object) {
  const auto check_done = [&](int result) {
    if (result != 0) raise_not_handed_over(field, object, nb::python_error());
  };
  DlTensor t;
  if (api_->tensor_from_object != nullptr) {
    check_done(api_->tensor_from_object(object.ptr(), &t));
    take(field, t);
    return;
  }
  DlManagedVersioned* managed = nullptr;
  check_done(api_->managed_from_object(object.ptr(), &managed));
  versioned_.reset(managed);
  take(field, managed->tensor);
}

void TensorArg::from_dlpack(std::string_view field, nb::handle object) {
  nb::object source = nb::borrow(object);
  if (nb::hasattr(source, "requires_grad") && nb::hasattr(source, "detach")) {
    source = source.attr("detach")();  // PyTorch without an exchange table
  }
  const nb::object method = source.attr("__dlpack__");
  nb::object capsule;
  try {
    try {
      capsule = method(nb::arg("max_version") = nb::make_tuple(1, 1));
    } catch (nb::python_error& error) {
      if (!error.matches(PyExc_TypeError)) throw;
      capsule = method();  // a producer from before DLPack 1
    }
  } catch (const nb::python_error& error) {
    raise_not_handed_over(field, object, error);
  }
  if (PyCapsule_IsValid(capsule.ptr(), "dltensor_versioned") != 0) {
    auto* const t =
        static_cast<DlManagedVersioned*>(PyCapsule_GetPointer(capsule.ptr(), "dltensor_versioned"));
    PyCapsule_SetName(capsule.ptr(), "used_dltensor_versioned");
    versioned_.reset(t);
    if (t->version.major != 1) {
      raise(StatusCode::kUnsupported,
            fmt::format("{}: got DLPack version {}, need 1", field, t->version.major));
    }
    read_only_ = (t->flags & kDlReadOnly) != 0;
    take(field, t->tensor);
    return;
  }
  auto* const t = static_cast<DlManaged*>(PyCapsule_GetPointer(capsule.ptr(), "dltensor"));
  if (t == nullptr) throw nb::python_error();
  PyCapsule_SetName(capsule.ptr(), "used_dltensor");
  managed_.reset(t);
  take(field, t->tensor);
}

void TensorArg::from_array_interface(std::string_view field, nb::object held, bool cuda) {
  const auto item = [&](const char* key) -> PyObject* {
    return PyDict_GetItemString(held.ptr(), key);  // borrowed
  };
  const auto malformed = [&] {
    PyErr_Clear();
    raise(StatusCode::kInvalidArgument, fmt::format("{}: got a malformed array interface", field));
  };
  std::string name;
  const TypeRow* const row = row_of_dtype_attribute(object_, &name);
  if (row == nullptr) raise_dtype(field, name.empty() ? "no dtype attribute" : name);
  PyObject* const shape = item("shape");
  PyObject* const data = item("data");
  if (shape == nullptr || data == nullptr || !PyTuple_Check(shape) || !PyTuple_Check(data) ||
      PyTuple_Size(data) != 2) {
    malformed();
  }
  const auto rank = static_cast<std::size_t>(PyTuple_Size(shape));
  if (rank > static_cast<std::size_t>(kMaxRank)) {
    raise(StatusCode::kInvalidShape,
          fmt::format("{}: got rank {}, need at most {}", field, rank, kMaxRank));
  }
  std::array<std::int64_t, kMaxRank> dims{};
  for (std::size_t i = 0; i < rank; ++i) {
    dims[i] = PyLong_AsLongLong(PyTuple_GetItem(shape, static_cast<Py_ssize_t>(i)));
  }
  void* const address = PyLong_AsVoidPtr(PyTuple_GetItem(data, 0));
  read_only_ = PyObject_IsTrue(PyTuple_GetItem(data, 1)) == 1;
  if (PyErr_Occurred()) malformed();
  if (!MOESAIC_FAULT(python_interface_dropped)) interface_ = held;
  view_ =
      TensorView(static_cast<std::byte*>(address), row->dtype,
                 unwrap(Shape::from({dims.data(), rank})), cuda ? Device::cuda(0) : Device::cpu());
  if (cuda) take_stream(field, item("stream"));
  if (cuda && nb::hasattr(object_, "device")) {
    const nb::object device = object_.attr("device");
    if (nb::hasattr(device, "id")) view_.device = Device::cuda(nb::cast<int>(device.attr("id")));
  }
  PyObject* const strides = item("strides");
  if (strides == nullptr || strides == Py_None) return;
  if (!PyTuple_Check(strides) || PyTuple_Size(strides) != PyTuple_Size(shape)) malformed();
  const std::int64_t size = row->bits / 8;
  if (size == 0) {
    raise(StatusCode::kInvalidLayout,
          fmt::format("{}: got strides in bytes, need none for {}", field, dtype_name(row->dtype)));
  }
  for (std::size_t i = 0; i < rank; ++i) {
    if (dims[i] <= 1) continue;
    const std::int64_t bytes =
        PyLong_AsLongLong(PyTuple_GetItem(strides, static_cast<Py_ssize_t>(i)));
    if (PyErr_Occurred()) malformed();
    if (bytes % size != 0) {
      raise(StatusCode::kInvalidLayout,
            fmt::format("{}: got a stride of {} bytes, need a multiple of {}", field, bytes, size));
    }
    if (!MOESAIC_FAULT(python_array_strides_ignored)) view_.strides[i] = bytes / size;
  }
}

// On which the memory is written: an address, or 1 and 2 for the default streams. None (or none) says
// that it has been.
void TensorArg::take_stream(std::string_view field, PyObject* stream) {
  if (stream == nullptr || stream == Py_None) return;
  const auto handle =
      cast_as<std::uintptr_t>(field, nb::borrow(stream), "a stream in the interface");
  if (handle == 0) {
    raise(StatusCode::kInvalidArgument,
          fmt::format("{}: got stream 0 in the array interface, which could be any default stream, "
                      "need 1, 2 or an address",
                      field));
  }
  if (!MOESAIC_FAULT(python_interface_stream_ignored)) {
    written_on_.handle = reinterpret_cast<void*>(handle);
  }
}

const TensorView& TensorArg::writable(std::string_view field) const {
  if (read_only_ && !MOESAIC_FAULT(python_read_only_written)) {
    raise(StatusCode::kInvalidArgument,
          fmt::format("{}: got read-only memory, need a tensor that may be written", field));
  }
  return view_;
}

bool TensorArg::knows_stream() const {
  return view_.device.is_cuda() && (api_ != nullptr || is_torch_tensor(object_));
}

Stream TensorArg::current_stream() const {
  if (!knows_stream() || MOESAIC_FAULT(python_default_stream)) return {};
  if (api_ == nullptr) return torch_stream(object_);
  Stream stream;
  if (api_->current_stream(kDlCuda, view_.device.index(), &stream.handle) != 0) {
    throw nb::python_error();
  }
  return stream;
}

void TensorArg::wait_until_written() const {
  if (!view_.device.is_cuda() || MOESAIC_FAULT(python_weights_read_before_written)) return;
  check(synchronize(view_.device, knows_stream() ? current_stream() : written_on_));
}

ConstTensorView TensorArg::on_host(std::string_view field, Tensor* copy) const {
  wait_until_written();
  return host_copy(field, view_, copy);
}

ConstTensorView host_copy(std::string_view field, const ConstTensorView& t, Tensor* copy) {
  if (!t.device.is_cuda()) return t;
  check(expect_contiguous(field, t));
  *copy = unwrap(Tensor::uninitialized(t.dtype, t.shape));
  check(copy_tensor(t, copy->view()));
  return copy->view();
}

nb::object TensorArg::like(DType dtype, std::span<const std::int64_t> dims,
                           TensorView* view) const {
  const TypeRow* const row = row_of(dtype);
  if (api_ != nullptr && row != nullptr) {
    std::array<std::int64_t, kMaxRank> shape{};
    for (std::size_t i = 0; i < dims.size(); ++i) shape[i] = dims[i];
    DlTensor wanted;
    wanted.device.type = view_.device.is_cuda() ? kDlCuda : kDlCpu;
    wanted.device.index = view_.device.index();
    wanted.rank = static_cast<std::int32_t>(dims.size());
    wanted.dtype = {row->code, row->bits, 1};
    wanted.shape = shape.data();
    DlManagedVersioned* made = nullptr;
    std::string error;
    if (api_->allocate(&wanted, &made, &error, set_error) != 0) {
      raise(StatusCode::kOutOfMemory, error);
    }
    *view = TensorView(static_cast<std::byte*>(made->tensor.data) + made->tensor.byte_offset, dtype,
                       unwrap(Shape::from(dims)), view_.device);
    void* object = nullptr;
    if (api_->managed_to_object(made, &object) != 0) throw nb::python_error();
    return nb::steal(static_cast<PyObject*>(object));
  }
  if (row != nullptr && *row->name != '\0' && is_torch_tensor(object_)) {
    nb::object made = torch_empty(object_, row->name, dims);
    *view = TensorArg("out", made).view();
    return made;
  }
  if (view_.device.is_cuda()) {
    raise(StatusCode::kInvalidArgument,
          "out: got none for device memory whose framework has no "
          "DLPack exchange table, need out=");
  }
  if (row != nullptr && is_numpy(object_)) {
    nb::object made = new_numpy(object_, dtype, dims);
    if (!made.is_none()) {
      *view = TensorArg("out", made).view();
      return made;
    }
  }
  Tensor tensor = unwrap(Tensor::uninitialized(dtype, unwrap(Shape::from(dims))));
  *view = tensor.view();
  return wrap_tensor(std::move(tensor));
}

Stream stream_of(nb::handle stream, const TensorArg& tensor) {
  if (stream.is_none()) {
    if (!tensor.knows_stream()) {
      raise(StatusCode::kInvalidArgument,
            "stream: got none, and the tensors' framework does not say on which one it works; need "
            "stream=");
    }
    return tensor.current_stream();
  }
  constexpr std::string_view kNeed = "the address of a stream, or an object that has one";
  std::uintptr_t handle = 0;
  if (nb::hasattr(stream, "__cuda_stream__")) {
    handle = cast_as<std::uintptr_t>("stream", stream.attr("__cuda_stream__")()[1], kNeed);
  } else if (nb::hasattr(stream, "cuda_stream")) {
    handle = cast_as<std::uintptr_t>("stream", stream.attr("cuda_stream"), kNeed);
  } else if (nb::hasattr(stream, "ptr")) {
    handle = cast_as<std::uintptr_t>("stream", stream.attr("ptr"), kNeed);
  } else {
    handle = cast_as<std::uintptr_t>("stream", stream, kNeed);
  }
  return {reinterpret_cast<void*>(handle)};
}

TensorView as_rows(std::string_view field, const TensorView& t) {
  const int rank = t.rank();
  if (rank == 0) {
    raise(StatusCode::kInvalidShape, fmt::format("{}: got a scalar, need [..., H]", field));
  }
  std::int64_t rows = 1, apart = 0;
  bool uniform = true;
  // From the innermost leading axis outwards: where a step of it lands.
  for (int i = rank - 2; i >= 0; --i) {
    const auto at = static_cast<std::size_t>(i);
    if (t.dim(i) == 1) continue;
    if (rows == 1) apart = t.strides[at];
    uniform = uniform && (rows == 1 || t.strides[at] == rows * apart);
    rows *= t.dim(i);
  }
  if (!uniform && rows > 0 && !MOESAIC_FAULT(python_uneven_rows_taken)) {
    raise(StatusCode::kInvalidLayout,
          fmt::format("{}: got {} whose rows are not equally far apart, need a tensor that can be "
                      "seen as [rows, H] (contiguous())",
                      field, t.shape.to_string()));
  }
  TensorView matrix = t;
  matrix.shape = Shape{rows, t.dim(rank - 1)};
  const std::int64_t inner = t.strides[static_cast<std::size_t>(rank - 1)];
  matrix.strides = {rows > 1 ? apart : t.dim(rank - 1), inner};
  return matrix;
}

}  // namespace moesaic::python
