// Which tensors a quantised linear consists of when those of all experts lie in one, with a leading
// axis E: the counterpart of linear_tensors.h. The router's and shared linears are never stacked.
// Source: docs/spec/checkpoints.md sections 3.4 (fused FP8), 5 and 6.4; for transposed weights the
// exports of Llama 4.
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

#include "checkpoint/config/families.h"
#include "checkpoint/config/linear_format.h"
#include "checkpoint/config/linear_tensors.h"

namespace moesaic::checkpoint {

// Whether it is known how the scales of this format lie in this storage. Rows and scales one expert
// after the other (kStacked, kFusedNT): FP8 with any scales, int8, ModelOpt's NVFP4. Transposed
// (kFusedNN, kFusedNNInterleaved): FP8 with one scale per expert or output feature, ModelOpt's
// NVFP4. Never: words of packed integers, flat storages.
bool is_stacked_format(const LinearFormat& format, ExpertStorage storage);

// Modules that transformers gives all experts' tensors, relative to the block.
inline constexpr std::string_view kStackedGateUp = "experts.gate_up_proj";
inline constexpr std::string_view kStackedDown = "experts.down_proj";

// Shapes in which files hold one number per tensor; `gate_up`: also one for each half of it.
std::vector<Shape> numbers_of_experts(std::int64_t experts, bool gate_up);

// Tensors of E linears [rows, columns] (out, in); `gate_up`: rows are gate's, then up's, numbers of
// whole tensors may come in pairs [E, 2]. FP8 blocks are not here (layer_plan.cc).
//   weight_suffix  of the weight's name; "" makes the others "_weight_scale" (FP8: "_scale_inv",
//                  "_activation_scale"), ".weight" makes them ".weight_scale" and so on
// Numbers of whole tensors: one for all experts, or one for each.
std::vector<LinearTensor> stacked_tensors(const LinearFormat& format, ExpertStorage storage,
                                          std::string_view weight_suffix, std::int64_t experts,
                                          std::int64_t rows, std::int64_t columns, bool gate_up);

}  // namespace moesaic::checkpoint
