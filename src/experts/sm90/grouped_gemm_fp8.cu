// The fp8-block builds of the grouped-GEMM kernel.
#include "experts/sm90/grouped_gemm_launch.cuh"

namespace moesaic::cuda {

int launch_grouped_fp8(const GroupedVariant& v, const GroupedParams& p, int num_sms, void* stream) {
  if (v.max_columns <= kSplitColumns)
    return launch_variant<ptx::E4M3, kSplitColumns, EpilogueKind::kSwiglu, false>(p, num_sms,
                                                                                  stream);
  if (v.max_columns <= 32)
    return launch_variant<ptx::E4M3, 32, EpilogueKind::kSwiglu, false>(p, num_sms, stream);
  if (v.max_columns <= 64)
    return launch_variant<ptx::E4M3, 64, EpilogueKind::kSwiglu, false>(p, num_sms, stream);
  return launch_variant<ptx::E4M3, 128, EpilogueKind::kSwiglu, false>(p, num_sms, stream);
}

}  // namespace moesaic::cuda
