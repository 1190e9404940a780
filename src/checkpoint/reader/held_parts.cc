#include "checkpoint/reader/held_parts.h"

#include <algorithm>

#include "core/fault.h"

namespace moesaic::checkpoint {
namespace {

ByteRuns runs_of(const StoredPart& stored, std::int64_t element_bytes) {
  const Rectangle& r = stored.part;
  ByteRuns runs;
  runs.first = (r.first_row * stored.row_elements + r.first_col) * element_bytes;
  runs.bytes = r.cols * element_bytes;
  runs.pitch = stored.row_elements * element_bytes;
  runs.count = r.rows;
  if (r.cols != stored.row_elements) return runs;
  runs.bytes *= runs.count;
  runs.pitch = runs.bytes;
  runs.count = 1;
  return runs;
}

}  // namespace

bool counts_for_all_ranks(const LinearFormat& format, TensorKind kind) {
  if (MOESAIC_FAULT(pushed_numbers_of_local_experts)) return false;
  switch (kind) {
    case TensorKind::kInputScale:
      return format.activation == ActivationQuant::kStatic;
    case TensorKind::kScale:
      return format.stored == StoredFormat::kFp8Tensor;
    case TensorKind::kGlobalScale:
      return format.stored == StoredFormat::kNvfp4 || format.stored == StoredFormat::kGguf;
    case TensorKind::kGroupIndex:
      return format.act_order;
    default:
      return false;
  }
}

bool has_twin(const LayerSource& source) {
  const ExpertLayout& layout = *source.layout;
  return std::any_of(source.family->layouts.begin(), source.family->layouts.end(),
                     [&](const ExpertLayout& other) {
                       return other.present() && other.storage != layout.storage &&
                              other.block == layout.block && other.down == layout.down;
                     });
}

std::vector<ByteRuns> held_runs(const PlannedTensor& planned, const TensorInfo& info,
                                const MlpSlice& slice, std::span<const std::int64_t> experts,
                                bool settled) {
  const std::int64_t element_bits = dtype_bits(info.dtype);
  const auto bytes = static_cast<std::int64_t>(info.bytes());
  const auto unit = columns_per_element(slice.format.stored, planned.kind);
  const bool stacked = !is_per_expert(slice.storage);
  if (bytes == 0 || element_bits % 8 != 0 || planned.of_all_experts) return {whole_tensor(info)};
  if (!unit || !settled) {
    // Weights of all experts, one after the other: this rank's.
    const bool shares = stacked && planned.kind == TensorKind::kWeight && info.rank > 1 &&
                        info.shape[0] == slice.experts;
    if (!shares) return {whole_tensor(info)};
    std::vector<ByteRuns> runs;
    const std::int64_t each = bytes / slice.experts;
    for (const std::int64_t e : experts) runs.push_back({e * each, each, each, 1});
    return runs;
  }
  std::vector<ByteRuns> runs;
  if (slice.count == 0) return runs;
  const MlpWindows windows = windows_of(slice);
  const std::int64_t holders = stacked ? std::ssize(experts) : 1;
  for (std::int64_t i = 0; i < holders; ++i) {
    const std::int64_t before = stacked ? experts[static_cast<std::size_t>(i)] : 0;
    for (const Window* w : {&windows.gate, &windows.up, &windows.down}) {
      if (w->projection != planned.projection || (w == &windows.gate && !slice.gated)) continue;
      const ByteRuns part = runs_of(part_of(*w, *unit, before), element_bits / 8);
      // Rows of gate and up that take turns come together.
      if (runs.empty() || runs.back() != part) runs.push_back(part);
    }
  }
  return runs;
}

}  // namespace moesaic::checkpoint
