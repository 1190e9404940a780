#include "parallel/peer_memory.h"

#include <fmt/format.h>

#include "core/refusal.h"

namespace moesaic {

std::string_view peer_memory_name(PeerMemory memory) {
  switch (memory) {
    case PeerMemory::kAuto:
      return "auto";
    case PeerMemory::kCudaHandles:
      return "cuda_handles";
    case PeerMemory::kNccl:
      return "nccl";
  }
  return "unknown";
}

namespace parallel {

std::string_view peer_provider_name(PeerProvider provider) {
  switch (provider) {
    case PeerProvider::kThreads:
      return "threads";
    case PeerProvider::kCudaHandles:
      return peer_memory_name(PeerMemory::kCudaHandles);
    case PeerProvider::kNccl:
      return peer_memory_name(PeerMemory::kNccl);
  }
  return "unknown";
}

Result<std::vector<PeerProvider>> peer_providers(PeerMemory memory, bool threads) {
  using Providers = std::vector<PeerProvider>;
  switch (memory) {
    case PeerMemory::kAuto:
      return threads ? Providers{PeerProvider::kThreads}
                     : Providers{PeerProvider::kCudaHandles, PeerProvider::kNccl};
    case PeerMemory::kCudaHandles:
      if (!threads) return Providers{PeerProvider::kCudaHandles};
      return unsupported(
          "peer_memory: got cuda_handles for ranks that are threads of one process, need auto, or "
          "nccl");
    case PeerMemory::kNccl:
      return Providers{PeerProvider::kNccl};
  }
  return invalid(fmt::format("peer_memory: got {}, need auto, cuda_handles or nccl",
                             static_cast<int>(memory)));
}

}  // namespace parallel
}  // namespace moesaic
