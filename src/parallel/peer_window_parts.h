// What the providers of peer windows share, and the providers (parallel/peer_window.h chooses).
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string_view>
#include <type_traits>
#include <vector>

#include "parallel/peer_window.h"

namespace moesaic::parallel {

inline constexpr std::string_view kPeerWindows = "peer windows";

// ok when `mine` is ok on all ranks; else the own refusal, or which rank has one. Collective.
Status peer_vote(Communicator& communicator, const Status& mine);

// all[r] = what rank r says. Collective.
template <class Told>
Status peer_tell(Communicator& communicator, const Told& mine, std::vector<Told>& all) {
  static_assert(std::is_trivially_copyable_v<Told>, "goes as bytes");
  const std::vector<std::span<const std::byte>> send(
      all.size(), std::as_bytes(std::span<const Told>(&mine, 1)));
  std::vector<std::span<std::byte>> recv;
  recv.reserve(all.size());
  for (Told& told : all) recv.push_back(std::as_writable_bytes(std::span<Told>(&told, 1)));
  return communicator.control().exchange(kPeerWindows, send, recv);
}

// Collective, after a vote that this rank is ready. All ranks succeed or none.
// Threads of one process: windows are memory of one object, which the last rank frees.
Result<std::unique_ptr<PeerWindow>> make_thread_window(Communicator& communicator, int device,
                                                       std::int64_t bytes);
// A process each, all on one host: windows are opened through CUDA's handles for other processes.
Result<std::unique_ptr<PeerWindow>> make_process_window(Communicator& communicator, int device,
                                                        std::int64_t bytes);
// A device of its own for each rank, on one host: memory that NCCL allocates and maps.
Result<std::unique_ptr<PeerWindow>> make_nccl_window(Communicator& communicator, int device,
                                                     std::int64_t bytes);

}  // namespace moesaic::parallel
