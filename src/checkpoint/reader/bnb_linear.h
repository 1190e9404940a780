// bitsandbytes 4-bit scales of one linear: nested quantisation undone, everything that the file
// says about itself checked. Source: docs/spec/quantization.md section 12.
#pragma once

#include <cstdint>
#include <vector>

#include "checkpoint/binding/layer_binding.h"
#include "checkpoint/config/linear_format.h"
#include "moesaic/status.h"

namespace moesaic::checkpoint {

// absmax of every block of format.group_size elements of [rows, columns], row-major. kCorruptFile
// names the tensor: a quantisation state that is not JSON or contradicts the configuration or the
// tensors, a table that is not the type's, an absmax that is not finite and >= 0.
Result<std::vector<float>> read_bnb_absmax(const MlpTensors& tensors, Projection projection,
                                           const LinearFormat& format, std::int64_t rows,
                                           std::int64_t columns);

}  // namespace moesaic::checkpoint
