// Which providers of peer windows a rank asks for, in order. Pure.
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

#include "moesaic/communicator.h"
#include "moesaic/status.h"

namespace moesaic::parallel {

enum class PeerProvider : std::uint8_t { kThreads, kCudaHandles, kNccl };
std::string_view peer_provider_name(PeerProvider provider);  // "threads", "cuda_handles", "nccl"

// Those to try until one succeeds on all ranks, where these are threads of one process, or a process
// each. kUnsupported: CUDA's handles for threads. kInvalidArgument: no such memory.
Result<std::vector<PeerProvider>> peer_providers(PeerMemory memory, bool threads);

}  // namespace moesaic::parallel
