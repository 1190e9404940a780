// quantization_config of a model: which scheme its linear layers are stored in, and which modules
// are left out. Source: spec checkpoints.md sections 4 and 4.3. What this version cannot read is
// refused by name, never read as something else.
#pragma once

#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "moesaic/status.h"

namespace moesaic {

enum class StoredFormat : std::uint8_t {
  kPlain,     // BF16, F16 or F32, as the tensors say
  kFp8Block,  // F8_E4M3 weights, one multiplier per 128x128 tile (weight_scale_inv)
  kMxfp4,     // e2m1 blocks and E8M0 scales of 32, as gpt-oss stores its experts
};
inline constexpr std::int64_t kFp8BlockSize = 128;
inline constexpr std::int64_t kMxfp4GroupSize = 32;

struct QuantConfig {
  StoredFormat format = StoredFormat::kPlain;
  bool ue8m0 = false;              // scale_fmt: run-time activation scales are powers of two
  std::vector<std::string> skips;  // entries of modules_to_not_convert and ignored_layers
};

// `top` is the whole config.json; `nested` its text_config or null. Looks at quantization_config,
// then compression_config, in both; two that differ are kAmbiguousFormat. kUnsupported names the
// method, kCorruptFile and kInvalidArgument the field.
Result<QuantConfig> parse_quant_config(const nlohmann::json& top, const nlohmann::json* nested);

// Does a skip entry name this module or one that contains it? An entry matches when its dotted
// parts appear side by side in the module's name ("mlp.gate" is in "model.layers.3.mlp.gate", but
// "gate" is not in "...gate_proj"); a part "*" stands for any one part.
bool skips_module(const QuantConfig& quant, std::string_view module);

// Are the routed experts `<experts>.<e>.<projection>` left out? All of them or none: a part of them
// is kUnsupported and names both groups. `experts` is the module's full name,
// `projections` the last parts of its members' names ("gate_proj" ...).
Result<bool> skips_experts(const QuantConfig& quant, std::string_view experts,
                           std::int64_t num_experts, std::span<const std::string_view> projections);

}  // namespace moesaic
