#include "torch_tensors.h"

namespace nb = nanobind;

namespace moesaic::python {
namespace {

// None where nobody imported it.
nb::object torch_module() {
  const nb::dict modules = nb::module_::import_("sys").attr("modules");
  return modules.contains("torch") ? nb::object(modules["torch"]) : nb::none();
}

}  // namespace

bool is_torch_tensor(nb::handle object) {
  const nb::object torch = torch_module();
  return nb::hasattr(torch, "Tensor") &&
         PyObject_IsInstance(object.ptr(), torch.attr("Tensor").ptr()) == 1;
}

Stream torch_stream(nb::handle tensor) {
  const nb::object stream =
      torch_module().attr("cuda").attr("current_stream")(tensor.attr("device"));
  return {reinterpret_cast<void*>(nb::cast<std::uintptr_t>(stream.attr("cuda_stream")))};
}

nb::object torch_empty(nb::handle like, const char* dtype, std::span<const std::int64_t> dims) {
  nb::list shape;
  for (const std::int64_t d : dims) shape.append(d);
  const nb::object torch = torch_module();
  return torch.attr("empty")(nb::tuple(shape), nb::arg("dtype") = torch.attr(dtype),
                             nb::arg("device") = like.attr("device"));
}

nb::object torch_token_ids(nb::handle ids) {
  if (!is_torch_tensor(ids) || !nb::cast<bool>(ids.attr("is_cuda"))) {
    return nb::borrow<nb::object>(ids);
  }
  const nb::object torch = torch_module();
  if (!ids.attr("dtype").equal(torch.attr("int64"))) return nb::borrow<nb::object>(ids);
  return torch.attr("clamp")(ids, -1, INT32_MAX).attr("to")(torch.attr("int32"));
}

}  // namespace moesaic::python
