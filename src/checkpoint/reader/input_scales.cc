#include "checkpoint/reader/input_scales.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstddef>
#include <string_view>
#include <utility>

#include "checkpoint/container/names.h"
#include "checkpoint/reader/linear_numbers.h"
#include "core/fault.h"

namespace moesaic::checkpoint {
namespace {

constexpr std::string_view kBatchScaleNote =
    "activation scales are asked for as one of the whole batch, computed at run time; one per "
    "token "
    "is computed, because a row's result must not depend on the rows beside it";

constexpr std::string_view kLeftPlainNote =
    "quantization_config quantises linears, but the experts' weights are plain and read as they "
    "are";

// How far input scales of gate and up may be apart where they must agree.
constexpr float kSameInputScale = 1e-5F;

// One projection's input scales, a multiplier for each expert.
struct ProjectionScales {
  std::vector<const ShardSet::Located*> from;  // whose number it is; null: none
  std::vector<float> values;

  explicit ProjectionScales(std::int64_t experts)
      : from(static_cast<std::size_t>(experts)), values(static_cast<std::size_t>(experts)) {}
  bool is_from(std::size_t expert, const ShardSet::Located& tensor) const {
    return from[expert] != nullptr && from[expert]->info == tensor.info;
  }
  Status set(std::size_t expert, const ShardSet::Located& tensor, float stored, bool reciprocal) {
    const auto check = reciprocal ? &check_reciprocal : &check_positive;
    MOESAIC_RETURN_IF_ERROR(check(tensor, "input scale", stored));
    from[expert] = &tensor;
    values[expert] = reciprocal ? 1.0F / stored : stored;
    return {};
  }
};

// `up`: where gate's tensor may be up's too, with a number of its own in [E, 2] or the same one.
Status read_projection(const std::vector<MlpTensors>& experts, std::size_t projection,
                       bool reciprocal, ProjectionScales* to, ProjectionScales* up = nullptr) {
  const std::size_t count = to->values.size();
  for (std::size_t i = 0; i < experts.size(); ++i) {
    const auto& tensor = experts[i].of(TensorKind::kInputScale)[projection];
    if (!tensor || to->is_from(i, *tensor)) continue;
    MOESAIC_ASSIGN_OR_RETURN(const std::vector<float> all, read_floats(*tensor));
    const std::size_t each = all.size() / count;  // 0: one number for all, or this expert's own
    const bool whole = experts.size() == 1;
    for (std::size_t e = whole ? 0 : i; e < (whole ? count : i + 1); ++e) {
      MOESAIC_RETURN_IF_ERROR(to->set(e, *tensor, all[e * each], reciprocal));
      if (up == nullptr) continue;
      const std::size_t at = e * each + (each == 2 ? 1 : 0);
      MOESAIC_RETURN_IF_ERROR(up->set(e, *tensor, all[at], reciprocal));
    }
  }
  return {};
}

// The scale of the row that gate and up read.
Status merge_gate_up(const ProjectionScales& gate, const ProjectionScales& up, bool must_agree,
                     InputScales* scales) {
  std::size_t merged = 0, first = 0;
  for (std::size_t e = 0; e < up.values.size(); ++e) {
    const float a = gate.values[e], b = up.values[e], larger = std::max(a, b);
    scales->w13[e] = MOESAIC_FAULT(checkpoint_input_scale_of_up) ? b : larger;
    if (a == b || gate.from[e] == nullptr || up.from[e] == nullptr) continue;
    if (must_agree && larger - std::min(a, b) > kSameInputScale * larger &&
        !MOESAIC_FAULT(checkpoint_input_scales_may_differ)) {
      return {StatusCode::kCorruptFile,
              fmt::format("{} and {}: got input scales {} and {}, need the same: gate and up read "
                          "one row",
                          quote_name(gate.from[e]->info->name), quote_name(up.from[e]->info->name),
                          a, b)};
    }
    if (merged++ == 0) first = e;
  }
  if (merged == 0 || must_agree || MOESAIC_FAULT(checkpoint_merged_scales_unsaid)) return {};
  scales->note = fmt::format(
      "{}: gate and up of {} of {} experts have input scales of their own (expert {}: {} and {}); "
      "the larger is used for both, which read one row",
      quote_name(gate.from[first]->info->name), merged, up.values.size(), first, gate.values[first],
      up.values[first]);
  return {};
}

// All experts' become the largest.
void take_largest(std::vector<float>* scales) {
  if (scales->empty()) return;
  const float largest = *std::max_element(scales->begin(), scales->end());
  std::fill(scales->begin(), scales->end(), largest);
}

}  // namespace

Result<InputScales> read_input_scales(const std::vector<MlpTensors>& experts,
                                      const LinearFormat& format, std::int64_t num_experts,
                                      InputScaleRule rule) {
  InputScales scales;
  if (format.activation != ActivationQuant::kStatic) return scales;
  const bool compressed = format.names == NameStyle::kCompressed;
  const bool reciprocal = compressed && format.stored == StoredFormat::kNvfp4;
  ProjectionScales gate(num_experts), up(num_experts), down(num_experts);
  MOESAIC_RETURN_IF_ERROR(read_projection(experts, kW1, reciprocal, &gate, &up));
  MOESAIC_RETURN_IF_ERROR(read_projection(experts, kW3, reciprocal, &up));
  MOESAIC_RETURN_IF_ERROR(read_projection(experts, kW2, reciprocal, &down));
  scales.w13.resize(up.values.size());
  scales.w2 = std::move(down.values);
  MOESAIC_RETURN_IF_ERROR(merge_gate_up(gate, up, compressed, &scales));
  if (rule == InputScaleRule::kLargest) {
    take_largest(&scales.w13);
    take_largest(&scales.w2);
  }
  return scales;
}

Status note_input_scales(InputScaleRule rule, BoundLayer* layer) {
  const LayerSource& source = layer->source;
  std::vector<std::string> notes;
  const auto note = [&](const std::vector<MlpTensors>& experts, const LinearFormat& format,
                        std::int64_t count) -> Status {
    MOESAIC_ASSIGN_OR_RETURN(InputScales scales, read_input_scales(experts, format, count, rule));
    if (format.batch_scale) notes.emplace_back(kBatchScaleNote);
    if (!scales.note.empty()) notes.push_back(std::move(scales.note));
    return {};
  };
  MOESAIC_RETURN_IF_ERROR(note(layer->experts, source.experts, source.spec.num_experts));
  if (source.has_shared() && layer->shared.bytes() > 0)
    MOESAIC_RETURN_IF_ERROR(note({layer->shared}, source.shared, 1));
  // What routed and shared experts have in common is said once.
  notes.erase(std::unique(notes.begin(), notes.end()), notes.end());
  if (source.left_plain) notes.emplace_back(kLeftPlainNote);
  layer->source.spec.quant_note = fmt::format("{}", fmt::join(notes, "; "));
  return {};
}

}  // namespace moesaic::checkpoint
