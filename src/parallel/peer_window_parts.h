// What the providers of peer windows share, and the providers (parallel/peer_window.h chooses).
#pragma once

#include <cstdint>
#include <memory>
#include <string_view>

#include "parallel/peer_window.h"

namespace moesaic::parallel {

inline constexpr std::string_view kPeerWindows = "peer windows";

// ok when `mine` is ok on all ranks; else the own refusal, or which rank has one. Collective.
Status peer_vote(Communicator& communicator, const Status& mine);

// Collective, after a vote that this rank is ready. All ranks succeed or none.
// Threads of one process: windows are memory of one object, which the last rank frees.
Result<std::unique_ptr<PeerWindow>> make_thread_window(Communicator& communicator, int device,
                                                       std::int64_t bytes);
// A process each, all on one host: windows are opened through CUDA's handles for other processes.
Result<std::unique_ptr<PeerWindow>> make_process_window(Communicator& communicator, int device,
                                                        std::int64_t bytes);

}  // namespace moesaic::parallel
