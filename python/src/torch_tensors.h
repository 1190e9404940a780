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

// Token ids of 64 bits on a GPU as int32, by PyTorch on its current stream: values that int32 does not
// have are -1 or its largest, which no table has. Everything else as it is.
nanobind::object torch_token_ids(nanobind::handle ids);

}  // namespace moesaic::python
