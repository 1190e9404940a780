#include <cuda_runtime.h>

#include "router/sm90/route_kernel.cuh"

namespace moesaic::cuda {

int launch_route(const RouteParams& p, const ExpertsPrologue* prologue, void* stream) {
  if (p.tokens == 0) return 0;
  if (p.columns <= 128) return launch_route_of<4>(p, prologue, stream);
  if (p.columns <= 256) return launch_route_of<8>(p, prologue, stream);
  if (p.columns <= 384) return launch_route_of<12>(p, prologue, stream);
  if (p.columns <= 512) return launch_route_of<16>(p, prologue, stream);
  return launch_route_wide(p, prologue, stream);
}

}  // namespace moesaic::cuda
