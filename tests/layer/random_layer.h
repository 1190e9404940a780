// A layer, how it is made and a call, all drawn from one seed: combinations that nobody wrote down.
#pragma once

#include <cstdint>
#include <string>

#include "moesaic/fused_moe.h"

namespace moesaic::test {

struct RandomLayer {
  std::uint64_t seed = 0;
  std::string scheme;  // what scheme_called knows
  MoeLayerSpec spec;
  FusedMoE::Options options;
  std::int64_t tokens = 1;
  DType rows = DType::kBF16, output = DType::kF32;

  // Everything that was drawn, in one line.
  std::string describe() const;
};

// A valid spec, in sizes that its format has. Options may still ask for what is refused with
// kUnsupported, which is no fault.
RandomLayer draw_layer(std::uint64_t seed, Device device);

}  // namespace moesaic::test
