#include "quant/width_slice.h"

#include <fmt/format.h>

#include <algorithm>
#include <vector>

#include "core/checked.h"
#include "core/fault.h"

namespace moesaic::quant {

bool is_cut_unevenly(const Scheme& stored) {
  constexpr std::int64_t kGroup = 32;
  const OperandQuant& w = stored.weight;
  return w.dtype == DType::kF4E2M1 && w.granularity == ScaleGranularity::kGroup &&
         w.block_k == kGroup && w.scale_format == ScaleFormat::kE8M0;
}

Result<WidthSlice> slice_width(std::string_view field, std::int64_t width, std::int64_t parts,
                               std::int64_t rank, std::int64_t unit, bool uneven) {
  if (uneven) {
    if (width % unit != 0) {
      return Status(StatusCode::kInvalidArgument,
                    fmt::format("{}: got {}, need a multiple of the group {}", field, width, unit));
    }
    const std::int64_t groups = width / unit;
    // Neither product leaves the width by more than one group for each rank.
    const std::int64_t each =
        (MOESAIC_FAULT(quant_uneven_slices_lose_groups) ? groups / parts : ceil_div(groups, parts));
    const std::int64_t first = std::min(each * rank, groups);
    return WidthSlice{first * unit, std::min(each, groups - first) * unit, each * unit};
  }
  if (width % parts != 0) {
    return Status(
        StatusCode::kInvalidArgument,
        fmt::format("{}: got {} with tp_size {}, need a multiple of tp_size", field, width, parts));
  }
  const std::int64_t each = width / parts;
  // A cut may not fall into a block; where there is none the last block may end ragged.
  if (parts > 1 && each % unit != 0) {
    return Status(StatusCode::kInvalidArgument,
                  fmt::format("{}: got {} of {} on a rank with tp_size {}, need a multiple of the "
                              "weight block {}",
                              field, each, width, parts, unit));
  }
  return WidthSlice{each * rank, each, each};
}

RowSharing row_sharing(const ParallelConfig& parallel) {
  const std::vector<int> group = parallel.replica_group();
  const auto at = std::find(group.begin(), group.end(), parallel.flat_rank());
  return {static_cast<int>(group.size()), static_cast<int>(at - group.begin())};
}

}  // namespace moesaic::quant
