// The fp8-block builds with activations other than the SwiGLU family: one width, all kinds.
#include "experts/sm90/grouped_gemm_launch.cuh"

namespace moesaic::cuda {

int launch_grouped_fp8_other(const GroupedVariant& v, const GroupedParams& p, int num_sms,
                             void* stream) {
  if (v.epilogue == EpilogueKind::kGeneral) {
    return launch_variant<ptx::E4M3, 32, EpilogueKind::kGeneral, false>(p, num_sms, stream);
  }
  return launch_variant<ptx::E4M3, 32, EpilogueKind::kPlain, false>(p, num_sms, stream);
}

}  // namespace moesaic::cuda
