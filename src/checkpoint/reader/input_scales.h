// Static activation scales of a layer: which each expert gets, and what is said of those that are not
// what the checkpoint states.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "checkpoint/binding/layer_binding.h"
#include "checkpoint/config/linear_format.h"
#include "moesaic/checkpoint.h"
#include "moesaic/status.h"

namespace moesaic::checkpoint {

// Static activation scales of a layer's experts (dequantisation multipliers), on every rank those
// of all of them.
struct InputScales {
  std::vector<float> w13, w2;  // [E]; empty where the scheme has none
  std::string note;            // what was merged, in words; empty: nothing

  float w13_of(std::int64_t e) const { return of(w13, e); }
  float w2_of(std::int64_t e) const { return of(w2, e); }

 private:
  static float of(const std::vector<float>& scales, std::int64_t e) {
    return scales.empty() ? 0.0F : scales[static_cast<std::size_t>(e)];
  }
};
// `experts`: a set of tensors each, or one for all `num_experts`. Gate and up read one row, so they
// share a scale: the larger of the two, or kCorruptFile (naming both) where compressed-tensors has
// two that differ by more than 1e-5 of the larger. kCorruptFile also for a value that is not finite
// and > 0. Source: docs/spec/checkpoints.md section 6.6.
Result<InputScales> read_input_scales(const std::vector<MlpTensors>& experts,
                                      const LinearFormat& format, std::int64_t num_experts,
                                      InputScaleRule rule);

// MoeLayerSpec::quant_note of a layer: input scales that were merged, scales that are asked for per
// batch and computed per token, and experts that are plain although linears are quantised. Of routed
// and shared experts. Errors as read_input_scales.
Status note_input_scales(InputScaleRule rule, BoundLayer* layer);

}  // namespace moesaic::checkpoint
