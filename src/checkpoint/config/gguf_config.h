// Metadata of a GGUF file -> the MoE layers of a model, by way of the same tables of families as
// config.json. Source: docs/spec/checkpoints.md section 3.1 (names), docs/spec/quantization.md
// section 13.
#pragma once

#include <string_view>

#include "checkpoint/config/config.h"
#include "checkpoint/config/families.h"
#include "checkpoint/container/gguf.h"

namespace moesaic::checkpoint {

inline constexpr std::string_view kGgufLayerPrefix = "blk.";

// The family of a model_type with GGUF names and storage; static storage, nullptr if unknown.
const Family* gguf_family(std::string_view model_type);

// Whether `name` ("blk.3.ffn_up_exps.weight") belongs to an MoE block: a GGUF block shares its name
// with attention, norms and dense layers.
bool is_gguf_moe_tensor(std::string_view name);
// "blk.3.ffn_up.7.weight": an expert by itself, as llama.cpp wrote them in its first months with experts.
bool is_gguf_single_expert(std::string_view name);

// Layers are those that hold MoE tensors in `headers` (the parts of one model, first part first), but
// for the last nextn_predict_layers blocks.
// Widths that old files leave out are those that llama.cpp takes: of Qwen's experts
// feed_forward_length / expert_used_count, of their shared expert feed_forward_length.
// `label` begins every message. kUnsupported: an architecture without MoE layers here (the nearest
// is named); kCorruptFile: missing or ill-typed keys; kInvalidArgument, kLimitExceeded: values
// outside their range; kAmbiguousFormat: a gating function other than the family's.
Result<ModelConfig> read_gguf_config(std::string_view label,
                                     std::span<const GgufHeader* const> headers);

}  // namespace moesaic::checkpoint
