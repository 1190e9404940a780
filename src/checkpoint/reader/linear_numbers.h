// Numbers that count for a whole linear, and the part of the scheme that follows from the numbers of
// all experts.
#pragma once

#include <cstddef>
#include <string_view>
#include <vector>

#include "checkpoint/binding/layer_binding.h"
#include "checkpoint/config/linear_format.h"
#include "moesaic/quant.h"
#include "moesaic/status.h"

namespace moesaic::checkpoint {

inline constexpr std::size_t kW1 = 0, kW3 = 1, kW2 = 2;  // Projection

// All elements of a small tensor.
Result<std::vector<float>> read_floats(const ShardSet::Located& from);

// kCorruptFile naming the tensor, unless `value` is finite and > 0.
Status check_positive(const ShardSet::Located& from, std::string_view what, float value);
// Of one that stands for its reciprocal.
Status check_reciprocal(const ShardSet::Located& from, std::string_view what, float value);

// The part of a layer's scheme that only the stored numbers tell. Where scales of any expert's gate
// and up differ, w13 has a scale per row: FP8 with a scale per tensor becomes kChannel, the global
// scale of NVFP4 OuterScale::kChannel. Nothing is requantised. Where any expert's gate has another
// group index than its up, w13 has no one order of columns: the layer becomes F32 (read_wide_mlp).
Status scheme_of_values(const std::vector<MlpTensors>& experts, const LinearFormat& format,
                        Scheme* scheme);

}  // namespace moesaic::checkpoint
