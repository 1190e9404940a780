// Weights of a gate as sums of bf16 numbers (GateParams::parts): host code, tested without a device.
#pragma once

#include <cstdint>
#include <span>

namespace moesaic::cuda {

// The fewest bf16 numbers whose sum is exactly v, for every value v: 1 for the gates of bf16 models,
// which GGUF files hold as F32, 2 for F16 and 3 for nearly all F32 ones. 0: three are too few for some
// value: one below about 2^-110 or above what bf16 has, or NaN.
int count_bf16_parts(std::span<const float> values);

// Those numbers, the largest first: from values [rows, columns] to parts [rows, count, columns].
void split_into_bf16_parts(std::span<const float> values, std::int64_t columns, int count,
                           std::span<std::uint16_t> parts);

}  // namespace moesaic::cuda
