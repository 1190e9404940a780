#include <cuda_runtime.h>

#include "router/sm90/route_kernel.cuh"

namespace moesaic::cuda {

int launch_route_wide(const RouteParams& p, const ExpertsPrologue* prologue, void* stream) {
  return launch_route_of<32>(p, prologue, stream);
}

}  // namespace moesaic::cuda
