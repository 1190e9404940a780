// A checkpoint with one layer as gpt-oss stores it: MXFP4 experts, biases, gate and up in turn.
#pragma once

#include <cstdint>

#include "checkpoint/container_support.h"

namespace moesaic::test {

inline constexpr std::int64_t kGptOssExperts = 3, kGptOssHidden = 64;

// Experts of this intermediate width, random codes and scales.
void write_gpt_oss(const TempDir& dir, std::int64_t width);

}  // namespace moesaic::test
