// Elements of a tensor of any floating dtype, for reference loops and tests: convenient, not fast
// (one at a time branches on the dtype for every element).
#pragma once

#include <cstdint>

#include "moesaic/dtype.h"

namespace moesaic {

// F64, F32, BF16, F16, F8_E4M3, F8_E5M2, both fnuz forms, F8_E8M0, F4 (low nibble first).
bool is_loadable_float(DType dtype);
// F32, BF16, F16.
bool is_storable_float(DType dtype);

// Element `index` (counted in elements from `base`) widened to fp32; exact except F64, which is
// rounded to nearest. The caller has checked is_loadable_float(dtype).
float load_as_f32(const void* base, DType dtype, std::int64_t index);
// out[i] = element index + i, for i < count: the dtype is looked at once.
void load_as_f32(const void* base, DType dtype, std::int64_t index, std::int64_t count, float* out);

// Rounds once (nearest, ties to even) to the dtype. The caller has checked
// is_storable_float(dtype).
void store_from_f32(void* base, DType dtype, std::int64_t index, float value);

}  // namespace moesaic
