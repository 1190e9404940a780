// Device kernels of the transport through peer windows (docs/design/peer-windows.md): rows to the
// ranks that need them, waits, rows out of the window, answers back, and their sums. Nothing is
// counted on the host, nothing waits but one warp, and every wait ends in time. Launches return a
// cudaError_t value and are capturable.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cuda/sum_epilogue.h"
#include "parallel/peer_control.h"
#include "parallel/peer_window.h"
#include "permute/sm90/slots_place.h"

namespace moesaic::cuda {

// Where a rank stands: the same for all kernels of a call.
struct PeerPlace {
  parallel::PeerLayout layout;
  std::byte* base[parallel::kPeerWindowRanks] = {};  // the ranks' windows
  std::int32_t rank = 0;
  std::uint32_t signature = 0;             // of 12 bits
  std::uint32_t* tickets = nullptr;        // [2] zeros: blocks of a kernel that are through
  std::int32_t* live = nullptr;            // [R] rows of each rank in this call, by take
  std::uint32_t* sent_to = nullptr;        // [T] a bit for each rank that has an own row, by send
  parallel::PeerReport* report = nullptr;  // pinned host memory: the report that ended a call here
  std::int32_t ranks() const { return static_cast<std::int32_t>(layout.shape.ranks); }
  std::int32_t max_blocks = 0;    // of a kernel, if they have 512 threads
  std::int32_t most_waiting = 0;  // blocks of a kernel that wait for other ranks by themselves
  bool shares_device = true;      // with another rank
};

// What a rank needs to know of a row to send it, and of its answers to add them.
struct PeerRouting {
  const std::int32_t* ids = nullptr;    // [tokens, top_k]; -1 or out of range: no expert
  const std::int32_t* owner = nullptr;  // [num_experts] rank; null: every rank has all rows
  std::int32_t num_experts = 0;
};

// Rows, ids and weights of `tokens` own rows to the ranks that have an expert of theirs, ids and
// weights to all; then the words.
struct PeerSendParams {
  PeerPlace place;
  PeerRouting routing;
  std::int64_t tokens = 0;
  // [tokens, row_bytes], a multiple of 16; or, with groups, [tokens, 128 * groups] bf16 that travel as
  // the codes and scales of launch_quant_rows.
  const std::byte* rows = nullptr;
  std::int64_t row_bytes = 0;
  std::int32_t groups = 0;
  bool power_of_two_scales = false;
  bool weight_on_input = false;  // one expert a token: multiplied before rows are quantised
  const float* weights = nullptr;
};
int launch_peer_send(const PeerSendParams& params, void* stream);

// One block waits for the words of all ranks, or reports. For tests: the kernels below wait by
// themselves, or launch it.
int launch_peer_wait(const PeerPlace& place, parallel::PeerKind kind, void* stream);

// When all have sent: arrays of R * T rows, row source * T + token: ids of rows that are not there are -1 and their
// other values stay as they were, as do rows without an expert here.
struct PeerTakeParams {
  PeerPlace place;
  PeerRouting routing;  // ids is not read
  std::int64_t row_bytes = 0;
  std::int32_t groups = 0;    // at most kPeerMostGroups
  std::byte* rows = nullptr;  // [R * T, row_bytes]; null: they are read in the window
  float* scale = nullptr;     // [groups][scale_stride]
  std::int64_t scale_stride = 0;
  std::int32_t* ids = nullptr;
  float* weights = nullptr;
  bool all_ids = true;             // false: also ids of rows that are not there stay as they were
  std::int64_t likely_tokens = 0;  // of a rank, for the number of blocks only
};
// Whose scales of a tile of rows fit shared memory.
inline constexpr std::int64_t kPeerMostGroups = 640;
int launch_peer_take(const PeerTakeParams& params, void* stream);

// What the experts here made of those rows, to where they came from; then the words.
struct PeerAnswerParams {
  PeerPlace place;
  PeerRouting routing;                 // ids as taken
  const std::byte* results = nullptr;  // a row for each, or (slots) for each slot
  // Not null: bf16 rows of all slots instead: the answers, or what partial answers are the fp32 sums
  // of, in slot order, rounded once, as launch_combine makes them. With more pairs than their capacity the call
  // ends with a report on all ranks.
  SlotsPlace slots;
  const std::int32_t* expert_map = nullptr;  // [num_experts] -> local or -1; null: all are here
  std::int32_t hidden = 0;                   // a multiple of 8
  bool bf16 = false;                         // the partial answers
  std::int64_t likely_tokens = 0;            // of a rank, for the number and size of blocks only
};
// top_k of `slots`.
inline constexpr int kPeerMostSlots = 64;
int launch_peer_answer(const PeerAnswerParams& params, void* stream);

// When all have answered: the answers in rank order, or (slots) in slot order, added up in fp32, and what the layer makes of
// that; NaN where the call has ended with a report. The last kernel of a call.
struct PeerSumParams {
  PeerPlace place;
  PeerRouting routing;  // of the own rows
  std::int64_t tokens = 0;
  std::int32_t hidden = 0;  // a multiple of 4
  bool bf16 = false;        // the answers
  SumEpilogue to;
};
int launch_peer_sum(const PeerSumParams& params, void* stream);

// Tells all ranks that this one does not take part.
int launch_peer_refuse(const PeerPlace& place, void* stream);

}  // namespace moesaic::cuda
