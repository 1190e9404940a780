// Builds without CUDA: no GPU memory to move.
#include "moesaic/communicator.h"

namespace moesaic {

Status nccl_available() {
  return {StatusCode::kUnsupported, "this build has no CUDA backends (CMake option MOESAIC_CUDA)"};
}

Result<std::unique_ptr<Communicator>> make_nccl_communicator(std::shared_ptr<Communicator>, int,
                                                             const CommunicatorOptions&) {
  return nccl_available();
}

Status peer_windows_available() { return nccl_available(); }
Status nccl_windows_available() { return nccl_available(); }

}  // namespace moesaic
