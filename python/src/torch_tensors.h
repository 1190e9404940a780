// PyTorch before its tensors had an exchange table (2.9): the same by calls of its Python functions.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <span>

#include "moesaic/device.h"

namespace moesaic::python {

// Whether PyTorch is imported and this is a tensor of its. It is never imported here.
bool is_torch_tensor(nanobind::handle object);
// Its current stream on that tensor's device.
Stream torch_stream(nanobind::handle tensor);
// A new tensor on the device of `like`; `dtype` is the name of torch's: "bfloat16". Contents undefined.
nanobind::object torch_empty(nanobind::handle like, const char* dtype,
                             std::span<const std::int64_t> dims);

}  // namespace moesaic::python
