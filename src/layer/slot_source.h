// The experts of a layer's slots, where load balancing says which expert is in which slot.
#pragma once

#include <fmt/format.h>

#include <cstdint>
#include <span>

#include "core/refusal.h"
#include "moesaic/experts.h"

namespace moesaic::layer {

// Slot i is expert ids[i] of `source`, whose experts are the layer's logical ones; an expert in
// several slots is read for each. Outlives neither.
class SlotSource final : public ExpertSource {
 public:
  SlotSource(ExpertSource& source, std::span<const std::int32_t> ids)
      : source_(source), ids_(ids) {}

  Result<ExpertWeightsView> expert(std::int64_t slot) override {
    if (slot < 0 || slot >= std::ssize(ids_)) {
      return invalid(fmt::format("slot: got {}, need 0 .. {}", slot, std::ssize(ids_) - 1));
    }
    return source_.expert(ids_[static_cast<std::size_t>(slot)]);
  }

 private:
  ExpertSource& source_;
  std::span<const std::int32_t> ids_;
};

}  // namespace moesaic::layer
