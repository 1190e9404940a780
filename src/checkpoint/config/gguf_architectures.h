// Which family the architecture of a GGUF file is, and what its reference reader assumes where the
// file is silent. Adding an architecture of a known family is adding a row.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "checkpoint/config/gguf_metadata.h"
#include "moesaic/status.h"

namespace moesaic::checkpoint {

// Values of expert_gating_func; 0: the writer left it to the architecture.
inline constexpr std::int64_t kGatingSoftmax = 1;
inline constexpr std::int64_t kGatingSigmoid = 2;
inline constexpr std::int64_t kGatingSoftmaxOfSelected = 3;
inline constexpr std::int64_t kGatingSqrtSoftplus = 4;

struct GgufArchitecture {
  std::string_view name;
  std::string_view model_type;
  // What a file without expert_weights_norm means; in families that always renormalise false is
  // refused.
  bool unsaid_renorm = false;
  // The limits of the activation are in swiglu_clamp_exp and swiglu_clamp_shexp.
  bool states_limits = false;
  // Without widths of their own the experts that are used together have feed_forward_length, and
  // the shared expert has it too: Qwen's first files.
  bool divides_width = false;
};

// The row of general.architecture. kUnsupported: none; with the reason where it is known that the
// block is not what a layer here computes, else with the nearest name.
Result<const GgufArchitecture*> find_gguf_architecture(const GgufMetadata& metadata);

// The family where it depends on more than the name: deepseek2 stands for V2, V3, Kimi-K2 and
// Mistral Large 3, Granite's for models with and without a shared expert.
Result<std::string_view> gguf_model_type(const GgufMetadata& metadata,
                                         const GgufArchitecture& architecture,
                                         std::int64_t num_experts);

}  // namespace moesaic::checkpoint
