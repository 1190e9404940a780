// The static activation scales of one projection in one call: the experts' own, or the caller's.
#pragma once

#include <cstdint>

#include "core/fault.h"
#include "moesaic/tensor.h"

namespace moesaic::experts {

class StaticScales {
 public:
  StaticScales() = default;
  // own [num_experts], or null where the scheme has none; given: ExpertsArgs::a1_scale or a2_scale,
  // checked. Neither is copied.
  StaticScales(const float* own, const ConstTensorView& given, std::int64_t num_experts)
      : values_(given.present() && !MOESAIC_FAULT(call_scales_ignored) ? given.as<float>() : own),
        one_for_all_(given.present() && given.dim(0) != num_experts),
        num_experts_(num_experts) {}

  float of(std::int64_t e) const {
    if (values_ == nullptr) return 1.0F;
    return values_[one_for_all_ ? 0 : e];
  }
  // Then one quantised row serves all experts.
  bool all_equal() const {
    for (std::int64_t e = 1; e < num_experts_; ++e) {
      if (of(e) != of(0)) return false;
    }
    return true;
  }

 private:
  const float* values_ = nullptr;
  bool one_for_all_ = false;
  std::int64_t num_experts_ = 0;
};

}  // namespace moesaic::experts
