// Discovery in a build without CUDA.
#include "moesaic/device.h"

namespace moesaic {

CudaInfo query_cuda() {
  CudaInfo info;
  info.reason = "this build has no CUDA backend";
  return info;
}

}  // namespace moesaic
