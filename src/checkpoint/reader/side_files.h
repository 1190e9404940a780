// Descriptions of the quantisation that other programs keep in files beside config.json.
#pragma once

#include <array>
#include <string>
#include <string_view>

#include "checkpoint/config/quant_config.h"
#include "moesaic/status.h"

namespace moesaic::checkpoint {

inline constexpr std::array<std::string_view, 3> kSideFiles = {
    "hf_quant_config.json", "quantize_config.json", "quant_config.json"};

// Two descriptions must say the same: kAmbiguousFormat names both.
class SideFiles {
 public:
  // `quant`: what config.json says; changed where it says nothing.
  explicit SideFiles(QuantConfig* quant)
      : quant_(*quant), from_(quant->quantized() ? "quantization_config of config.json" : "") {}
  Status add(std::string_view name, std::string_view json);

 private:
  QuantConfig& quant_;
  std::string from_;
};

}  // namespace moesaic::checkpoint
