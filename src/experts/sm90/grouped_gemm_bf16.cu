// The bf16 builds of the grouped-GEMM kernel.
#include "experts/sm90/grouped_gemm_launch.cuh"

namespace moesaic::cuda {

int launch_grouped_bf16(const GroupedVariant& v, const GroupedParams& p, int num_sms,
                        void* stream) {
  if (v.paired)
    return launch_variant<ptx::BF16, 128, EpilogueKind::kSwiglu, true>(p, num_sms, stream);
  if (v.max_columns <= kSplitColumns)
    return launch_variant<ptx::BF16, kSplitColumns, EpilogueKind::kSwiglu, false>(p, num_sms,
                                                                                  stream);
  if (v.max_columns <= 32)
    return launch_variant<ptx::BF16, 32, EpilogueKind::kSwiglu, false>(p, num_sms, stream);
  if (v.max_columns <= 64)
    return launch_variant<ptx::BF16, 64, EpilogueKind::kSwiglu, false>(p, num_sms, stream);
  return launch_variant<ptx::BF16, 128, EpilogueKind::kSwiglu, false>(p, num_sms, stream);
}

}  // namespace moesaic::cuda
