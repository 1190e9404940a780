// The commonest refusals.
#pragma once

#include <string>
#include <string_view>
#include <utility>

#include "moesaic/device.h"
#include "moesaic/dtype.h"
#include "moesaic/status.h"

namespace moesaic {

inline Status invalid(std::string text) { return {StatusCode::kInvalidArgument, std::move(text)}; }
inline Status unsupported(std::string text) { return {StatusCode::kUnsupported, std::move(text)}; }
// Of what runs on the host's memory only.
inline Status expect_cpu(Device device) {
  if (device == Device::cpu()) return {};
  return unsupported("device: " + device.to_string() + ", need cpu");
}

// More threads end the process where there cannot be so many: OpenMP has no other answer.
inline constexpr int kMaxThreads = 4096;
inline Status expect_threads(int got) {
  if (got >= 0 && got <= kMaxThreads) return {};
  return invalid("num_threads: got " + std::to_string(got) + ", need 0 (automatic) .. " +
                 std::to_string(kMaxThreads));
}

// "hidden_states: got I8, need F32, BF16 or F16".
inline Status expect_float_dtype(std::string_view field, DType got,
                                 StatusCode otherwise = StatusCode::kInvalidDType) {
  if (got == DType::kF32 || got == DType::kBF16 || got == DType::kF16) return {};
  return {otherwise,
          std::string(field) + ": got " + std::string(dtype_name(got)) + ", need F32, BF16 or F16"};
}

}  // namespace moesaic
