#include "rank_effects.h"

#include <fmt/format.h>

#include "core/fault.h"
#include "core/refusal.h"
#include "moesaic/parallel.h"
#include "quant/width_slice.h"

namespace moesaic::tool {

Status check_rank_effects(const RankOptions& o) {
  if (MOESAIC_FAULT(cli_rank_options_without_effect)) return {};
  if (o.sp && o.tp == 1) {
    return invalid("--sp: got it with --tp 1, need engines of 2 ranks or more that share rows");
  }
  if (!o.ep && o.placement != RankOptions().placement) {
    return invalid(fmt::format(
        "--placement: got {} with --no-ep, where no expert has an owner; need --ep", o.placement));
  }
  return {};
}

Status check_rank_effects(const RankOptions& o, const ParallelConfig& parallel,
                          const MoeLayerSpec& spec) {
  // In a world of one, options of ranks mean nothing.
  if (!o.cut_shared || parallel.flat_size() == 1) return {};
  if (MOESAIC_FAULT(cli_rank_options_without_effect)) return {};
  if (spec.shared.intermediate_size == 0) {
    return invalid("--cut-shared: got it for a layer without shared experts, need one with them");
  }
  if (quant::row_sharing(parallel).ranks > 1) return {};
  return invalid(fmt::format(
      "--cut-shared: got it where no two ranks have the same rows (--tp {}{}), need --tp 2 or "
      "more{}",
      o.tp, o.sp ? ", --sp" : "", o.sp ? " without --sp" : ""));
}

}  // namespace moesaic::tool
