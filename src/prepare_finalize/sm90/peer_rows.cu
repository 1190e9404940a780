#include <cuda_runtime.h>

#include "cuda/fault.cuh"
#include "cuda/ptx/system.cuh"
#include "permute/sm90/combine.cuh"
#include "prepare_finalize/sm90/peer_rows.h"

namespace moesaic::cuda {
namespace {

using parallel::PeerAnswerForm;
using parallel::PeerFailure;
using parallel::PeerKind;
using parallel::PeerOwnLine;
using parallel::PeerReport;
using parallel::PeerVerdict;

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr unsigned kAll = 0xFFFFFFFFU;
// Which of PeerPlace::tickets.
enum Ticket { kSendTicket, kAnswerTicket, kSumTicket };

__device__ __forceinline__ std::byte* own(const PeerPlace& p) { return p.base[p.rank]; }
__device__ __forceinline__ PeerReport* abort_line(const PeerPlace& p) {
  return reinterpret_cast<PeerReport*>(own(p) + p.layout.own_line(PeerOwnLine::kAbort));
}
// Whether a call ended with a report before this kernel began.
__device__ __forceinline__ bool has_ended(const PeerPlace& p) {
  return ptx::load_acquire_system(&abort_line(p)->code) != 0;
}
// The same for all threads of a block, though a report may come at any time. All of them call it.
__device__ __forceinline__ bool block_has_ended(const PeerPlace& p) {
  __shared__ bool ended;
  if (threadIdx.x == 0) ended = has_ended(p);
  __syncthreads();
  return ended;
}
__device__ __forceinline__ std::uint32_t* epoch_line(const PeerPlace& p) {
  return reinterpret_cast<std::uint32_t*>(own(p) + p.layout.own_line(PeerOwnLine::kEpoch));
}
__device__ __forceinline__ std::uint32_t epoch_of_call(const PeerPlace& p) {
  return *epoch_line(p) + 1;
}

__device__ __forceinline__ bool owns(const PeerRouting& r, std::int32_t id, std::int32_t rank) {
  return id >= 0 && id < r.num_experts && r.owner[id] == rank;
}
// A bit for each rank that has an expert of the token.
__device__ __forceinline__ unsigned ranks_of(const PeerPlace& p, const PeerRouting& r,
                                             const std::int32_t* ids) {
  if (r.owner == nullptr) return kAll >> (32 - static_cast<int>(p.layout.shape.ranks));
  unsigned ranks = 0;
  for (int j = 0; j < p.layout.shape.top_k; ++j) {
    const std::int32_t id = ids[j];
    if (id >= 0 && id < r.num_experts) ranks |= 1U << r.owner[id];
  }
  return ranks;
}

// The last block to come here, whose threads then see what all blocks have stored. All threads of
// all blocks call it.
__device__ __forceinline__ bool is_last_block(std::uint32_t* ticket) {
  __shared__ bool last;
  __syncthreads();
  if (threadIdx.x == 0) {
    __threadfence_system();
    last = atomicAdd(ticket, 1U) == gridDim.x - 1;
    if (last) *ticket = 0;
    __threadfence_system();
  }
  __syncthreads();
  return last;
}

// After everything that all blocks have stored, the word of this call at every rank.
__device__ __forceinline__ void publish(const PeerPlace& p, PeerKind kind, Ticket ticket,
                                        std::uint32_t live) {
  if (!is_last_block(p.tickets + ticket)) return;
  const auto r = static_cast<int>(threadIdx.x);
  if (r >= p.layout.shape.ranks) return;
  std::uint32_t epoch = epoch_of_call(p);
  MOESAIC_CUDA_FAULT(cuda_peer_word_has_the_epoch_before, --epoch;)
  MOESAIC_CUDA_FAULT(cuda_peer_word_of_one_reader_lost,
                     if (r == (p.rank + 1) % p.layout.shape.ranks) return;)
  MOESAIC_CUDA_FAULT(cuda_peer_live_rows_are_one_less, if (live > 0)-- live;)
  auto* const word = reinterpret_cast<std::uint64_t*>(p.base[r] + p.layout.word(kind, p.rank));
  ptx::store_release_system(word, parallel::pack_peer_word({epoch, live, p.signature}));
}

// Copies `count` pieces of 16 bytes, a warp together.
__device__ __forceinline__ void copy_by_warp(void* to, const void* from, std::int64_t count) {
  constexpr int kAtOnce = 4;
  const auto* const source = static_cast<const uint4*>(from);
  auto* const target = static_cast<uint4*>(to);
  for (std::int64_t i = threadIdx.x % 32; i < count; i += 32 * kAtOnce) {
    uint4 v[kAtOnce];
#pragma unroll
    for (int u = 0; u < kAtOnce; ++u) {
      if (i + u * 32 < count) v[u] = source[i + u * 32];
    }
#pragma unroll
    for (int u = 0; u < kAtOnce; ++u) {
      if (i + u * 32 < count) target[i + u * 32] = v[u];
    }
  }
}

// One block per token and pass.
__global__ void __launch_bounds__(kThreads) peer_send(const __grid_constant__ PeerSendParams p) {
  const PeerPlace& place = p.place;
  const parallel::PeerLayout& layout = place.layout;
  if (block_has_ended(place)) return;
  const auto ranks = static_cast<int>(layout.shape.ranks);
  const auto top_k = static_cast<int>(layout.shape.top_k);
  const auto thread = static_cast<int>(threadIdx.x);
  for (std::int64_t t = blockIdx.x; t < p.tokens; t += gridDim.x) {
    const std::int32_t* const ids = p.routing.ids + t * top_k;
    const unsigned needed = ranks_of(place, p.routing, ids);
    for (int i = thread; i < ranks * top_k; i += kThreads) {
      const int r = i / top_k, j = i % top_k;
      std::byte* const window = place.base[r];
      reinterpret_cast<std::int32_t*>(window + layout.id(place.rank, t))[j] = ids[j];
      float weight = p.weights[t * top_k + j];
      MOESAIC_CUDA_FAULT(cuda_peer_rows_lose_weights, weight = 1.0F;)
      reinterpret_cast<float*>(window + layout.weight(place.rank, t))[j] = weight;
    }
    std::int64_t slot = t;
    MOESAIC_CUDA_FAULT(cuda_peer_rows_go_to_another_slot, if (t > 0) slot = t - 1;)
    const std::int64_t to = layout.row(place.rank, slot);
    const auto* const row = reinterpret_cast<const uint4*>(p.rows + t * p.row_bytes);
    const auto pieces = static_cast<int>(p.row_bytes / 16);
    // The ranks behind this one first, so that no window is everybody's first.
    for (int i = thread; i < pieces; i += kThreads) {
      const uint4 v = row[i];
      for (int n = 1; n <= ranks; ++n) {
        const int r = (place.rank + n) % ranks;
        if ((needed >> r & 1) != 0) *reinterpret_cast<uint4*>(place.base[r] + to + i * 16) = v;
      }
    }
    for (int g = thread; g < p.groups; g += kThreads) {
      int from = g;
      MOESAIC_CUDA_FAULT(cuda_peer_rows_have_the_scale_of_a_neighbour, from = g > 0 ? g - 1 : g;)
      const float s = p.scale[from * p.scale_stride + t];
      for (int r = 0; r < ranks; ++r) {
        if ((needed >> r & 1) != 0) {
          reinterpret_cast<float*>(place.base[r] + to + p.row_bytes)[g] = s;
        }
      }
    }
  }
  publish(place, PeerKind::kRows, kSendTicket, static_cast<std::uint32_t>(p.tokens));
}

// `report` to this rank's abort line and the host.
__device__ __forceinline__ void end_here(const PeerPlace& p, PeerReport report) {
  const std::uint64_t code = report.code;
  for (PeerReport* const to : {abort_line(p), p.report}) {
    report.code = to->code;
    *to = report;
    __threadfence_system();
    ptx::store_release_system(&to->code, code);
  }
}
// The report of this rank to rank `r`.
__device__ __forceinline__ void tell(const PeerPlace& p, int r, PeerReport report) {
  const std::uint64_t code = report.code;
  auto* const to =
      reinterpret_cast<PeerReport*>(p.base[r] + p.layout.word(PeerKind::kRefuse, p.rank));
  report.code = 0;
  *to = report;
  __threadfence_system();
  ptx::store_release_system(&to->code, code);
}

// Lane r has the word of rank r.
__global__ void __launch_bounds__(32)
    peer_wait(const __grid_constant__ PeerPlace p, std::uint32_t kind_number) {
  if (__any_sync(kAll, has_ended(p)) != 0) return;
  const auto kind = static_cast<PeerKind>(kind_number);
  const auto lane = static_cast<int>(threadIdx.x);
  const bool has_rank = lane < p.layout.shape.ranks;
  const int r = has_rank ? lane : p.rank;  // the others read what is there, for nothing
  const auto* const word_at =
      reinterpret_cast<const std::uint64_t*>(own(p) + p.layout.word(kind, r));
  auto* const report_at =
      reinterpret_cast<PeerReport*>(own(p) + p.layout.word(PeerKind::kRefuse, r));
  const std::uint32_t epoch = epoch_of_call(p);
  const parallel::PeerExpected expected = {epoch, epoch - 1, p.signature,
                                           static_cast<std::uint32_t>(p.layout.shape.tokens)};
  const std::uint64_t limit =
      *reinterpret_cast<const std::uint64_t*>(own(p) + p.layout.own_line(PeerOwnLine::kLimits));
  const std::uint64_t begin = ptx::global_timer();
  PeerVerdict verdict = has_rank ? PeerVerdict::kNotYet : PeerVerdict::kReady;
  PeerReport report;
  report.reporter = static_cast<std::uint32_t>(p.rank);
  report.epoch = epoch;
  report.kind = kind_number;
  for (unsigned round = 1;; ++round) {
    if (verdict == PeerVerdict::kNotYet) {
      const parallel::PeerWord word = parallel::unpack_peer_word(ptx::load_acquire_system(word_at));
      verdict = parallel::judge_peer_word(word, expected);
      MOESAIC_CUDA_FAULT(cuda_peer_rows_read_before_the_wait, verdict = PeerVerdict::kReady;)
      if (verdict == PeerVerdict::kReady && kind == PeerKind::kRows) {
        p.live[r] = static_cast<std::int32_t>(word.live);
      }
    }
    const unsigned waiting = __ballot_sync(kAll, verdict == PeerVerdict::kNotYet);
    const unsigned wrong =
        __ballot_sync(kAll, verdict != PeerVerdict::kNotYet && verdict != PeerVerdict::kReady);
    if (wrong != 0) {
      report.code = static_cast<std::uint64_t>(PeerFailure::kBadWord);
      report.missing = wrong;
      report.verdict = __shfl_sync(kAll, static_cast<std::uint32_t>(verdict), __ffs(wrong) - 1);
      break;
    }
    if (waiting == 0) return;
    if (round % 16 != 0) continue;
    // Another rank's report says more than this one could find out.
    const unsigned told = __ballot_sync(kAll, ptx::load_acquire_system(&report_at->code) != 0);
    if (told != 0) {
      const auto* const line = reinterpret_cast<const PeerReport*>(
          own(p) + p.layout.word(PeerKind::kRefuse, __ffs(told) - 1));
      if (lane == 0) end_here(p, *line);
      return;
    }
    const bool late = ptx::global_timer() - begin > limit;
    if (__shfl_sync(kAll, late ? 1 : 0, 0) != 0) {
      report.code = static_cast<std::uint64_t>(PeerFailure::kLate);
      report.missing = waiting;
      MOESAIC_CUDA_FAULT(cuda_peer_report_names_one_rank,
                         report.missing = waiting & (0U - waiting);)
      break;
    }
    __nanosleep(50);
  }
  MOESAIC_CUDA_FAULT(cuda_peer_report_is_kept, if (lane == 0) end_here(p, report); return;)
  if (has_rank && lane != p.rank) tell(p, lane, report);
  if (lane == 0) end_here(p, report);
}

__global__ void __launch_bounds__(32) peer_refuse(const __grid_constant__ PeerPlace p) {
  if (__any_sync(kAll, has_ended(p)) != 0) return;
  const auto lane = static_cast<int>(threadIdx.x);
  PeerReport report;
  report.code = static_cast<std::uint64_t>(PeerFailure::kRefused);
  report.missing = std::uint64_t{1} << p.rank;
  report.reporter = static_cast<std::uint32_t>(p.rank);
  report.epoch = epoch_of_call(p);
  if (lane < p.layout.shape.ranks && lane != p.rank) tell(p, lane, report);
  __syncwarp();
  if (lane == 0) end_here(p, report);
}

// A row whose ids lie in the window or the arrays, by the warp that has it.
struct ArrivedRow {
  std::int64_t row, token;
  int source;
};
__device__ __forceinline__ ArrivedRow arrived_row(const PeerPlace& p, std::int64_t i) {
  // Another first source for every rank.
  const std::int64_t tokens = p.layout.shape.tokens;
  const auto turn = static_cast<int>(i / tokens);
  const auto source = static_cast<int>((turn + p.rank + 1) % p.layout.shape.ranks);
  const std::int64_t token = i - turn * tokens;
  return {source * tokens + token, token, source};
}

// One warp per row.
__global__ void __launch_bounds__(kThreads) peer_take(const __grid_constant__ PeerTakeParams p) {
  const PeerPlace& place = p.place;
  const parallel::PeerLayout& layout = place.layout;
  const bool ended = block_has_ended(place);
  const std::int64_t rows = layout.shape.ranks * layout.shape.tokens;
  const auto top_k = static_cast<int>(layout.shape.top_k);
  const auto lane = static_cast<int>(threadIdx.x % 32);
  for (std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32; i < rows;
       i += static_cast<std::int64_t>(gridDim.x) * kWarps) {
    const ArrivedRow at = arrived_row(place, i);
    std::int32_t* const to = p.ids + at.row * top_k;
    bool there = !ended && at.token < place.live[at.source];
    MOESAIC_CUDA_FAULT(cuda_peer_rows_of_the_call_before_stay, there = !ended;)
    if (!there) {
      for (int j = lane; j < top_k; j += 32) to[j] = -1;
      continue;
    }
    const auto* const ids =
        reinterpret_cast<const std::int32_t*>(own(place) + layout.id(at.source, at.token));
    const auto* const weights =
        reinterpret_cast<const float*>(own(place) + layout.weight(at.source, at.token));
    for (int j = lane; j < top_k; j += 32) {
      to[j] = ids[j];
      p.weights[at.row * top_k + j] = weights[j];
    }
    if (p.rows == nullptr || (ranks_of(place, p.routing, ids) >> place.rank & 1) == 0) continue;
    const std::byte* const row = own(place) + layout.row(at.source, at.token);
    copy_by_warp(p.rows + at.row * p.row_bytes, row, p.row_bytes / 16);
    const auto* const scales = reinterpret_cast<const float*>(row + p.row_bytes);
    for (int g = lane; g < p.groups; g += 32) p.scale[g * p.scale_stride + at.row] = scales[g];
  }
}

// The sum of a row's slots that have an expert here, by a warp.
__device__ __forceinline__ void add_slots(const PeerAnswerParams& p, std::int64_t row,
                                          const std::int32_t* ids, std::byte* to) {
  const auto top_k = static_cast<int>(p.place.layout.shape.top_k);
  std::uint64_t here = 0;
  for (int j = 0; j < top_k; ++j) {
    const std::int32_t id = ids[j];
    if (id < 0 || id >= p.routing.num_experts) continue;
    if (p.expert_map == nullptr || p.expert_map[id] >= 0) here |= std::uint64_t{1} << j;
  }
  MOESAIC_CUDA_FAULT(cuda_peer_answer_without_its_last_slot, here &= ~(1ULL << (top_k - 1));)
  const std::uint16_t* const slots = p.slot_rows + row * top_k * p.hidden;
  for (int h = static_cast<int>(threadIdx.x % 32) * 8; h < p.hidden; h += 32 * 8) {
    constexpr int kBatch = 4;
    float sum[8] = {};
    for (int j0 = 0; j0 < top_k; j0 += kBatch) {
      uint4 v[kBatch];
#pragma unroll
      for (int u = 0; u < kBatch; ++u) {
        if (j0 + u < top_k && (here >> (j0 + u) & 1) != 0) {
          v[u] = __ldcg(reinterpret_cast<const uint4*>(slots + (j0 + u) * p.hidden + h));
        }
      }
#pragma unroll
      for (int u = 0; u < kBatch; ++u) {
        if (j0 + u < top_k && (here >> (j0 + u) & 1) != 0) add_row(sum, v[u]);
      }
    }
    if (p.bf16) {
      *reinterpret_cast<uint4*>(to + h * 2) =
          make_uint4(ptx::bf16x2(sum[0], sum[1]), ptx::bf16x2(sum[2], sum[3]),
                     ptx::bf16x2(sum[4], sum[5]), ptx::bf16x2(sum[6], sum[7]));
    } else {
      auto* const columns = reinterpret_cast<float4*>(to + h * 4);
      columns[0] = make_float4(sum[0], sum[1], sum[2], sum[3]);
      columns[1] = make_float4(sum[4], sum[5], sum[6], sum[7]);
    }
  }
}

// One warp per row.
__global__ void __launch_bounds__(kThreads)
    peer_answer(const __grid_constant__ PeerAnswerParams p) {
  const PeerPlace& place = p.place;
  const parallel::PeerLayout& layout = place.layout;
  if (block_has_ended(place)) return;
  const std::int64_t rows = layout.shape.ranks * layout.shape.tokens;
  const std::int64_t bytes = layout.shape.answer_bytes;
  const auto top_k = static_cast<int>(layout.shape.top_k);
  for (std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32; i < rows;
       i += static_cast<std::int64_t>(gridDim.x) * kWarps) {
    const ArrivedRow at = arrived_row(place, i);
    if (at.token >= place.live[at.source]) continue;
    const std::int32_t* const ids = p.routing.ids + at.row * top_k;
    std::byte* const home = place.base[at.source];
    if (layout.shape.form == PeerAnswerForm::kSlot) {
      for (int j = 0; j < top_k; ++j) {
        if (!owns(p.routing, ids[j], place.rank)) continue;
        copy_by_warp(home + layout.slot(at.token, j), p.results + (at.row * top_k + j) * bytes,
                     bytes / 16);
      }
    } else if ((ranks_of(place, p.routing, ids) >> place.rank & 1) == 0) {
      continue;
    } else if (p.slot_rows != nullptr) {
      add_slots(p, at.row, ids, home + layout.partial(place.rank, at.token));
    } else {
      copy_by_warp(home + layout.partial(place.rank, at.token), p.results + at.row * bytes,
                   bytes / 16);
    }
  }
  publish(place, PeerKind::kAnswers, kAnswerTicket, 0);
}

// Four columns of a row, as launch_sum_answers adds them.
template <bool kBf16>
__device__ __forceinline__ void add_answer(float (&sum)[4], const std::byte* row, int column) {
  if constexpr (kBf16) {
    const uint2 v = *reinterpret_cast<const uint2*>(row + column * 2);
    sum[0] += __uint_as_float(v.x << 16);
    sum[1] += __uint_as_float(v.x & 0xFFFF0000U);
    sum[2] += __uint_as_float(v.y << 16);
    sum[3] += __uint_as_float(v.y & 0xFFFF0000U);
  } else {
    const float4 v = *reinterpret_cast<const float4*>(row + column * 4);
    sum[0] += v.x;
    sum[1] += v.y;
    sum[2] += v.z;
    sum[3] += v.w;
  }
}

// One block per token and pass.
template <bool kBf16>
__global__ void __launch_bounds__(kThreads) peer_sum(const __grid_constant__ PeerSumParams p) {
  const PeerPlace& place = p.place;
  const parallel::PeerLayout& layout = place.layout;
  const bool ended = block_has_ended(place);
  const auto top_k = static_cast<int>(layout.shape.top_k);
  auto ranks = static_cast<int>(layout.shape.ranks);
  MOESAIC_CUDA_FAULT(cuda_peer_sum_forgets_the_last_rank, --ranks;)
  const bool slots = layout.shape.form == PeerAnswerForm::kSlot;
  for (std::int64_t t = blockIdx.x; t < p.tokens; t += gridDim.x) {
    const std::int32_t* const ids = p.routing.ids + t * top_k;
    const unsigned answered = ranks_of(place, p.routing, ids);
    for (int h = static_cast<int>(threadIdx.x) * 4; h < p.hidden; h += kThreads * 4) {
      float sum[4] = {};
      if (ended) {
        for (float& s : sum) s = __uint_as_float(0x7FC00000U);
      } else if (slots) {
        for (int j = 0; j < top_k; ++j) {
          if (ids[j] < 0 || ids[j] >= p.routing.num_experts) continue;
          add_answer<kBf16>(sum, own(place) + layout.slot(t, j), h);
        }
      } else {
        for (int r = 0; r < ranks; ++r) {
          if ((answered >> r & 1) == 0) continue;
          add_answer<kBf16>(sum, own(place) + layout.partial(r, t), h);
        }
      }
      *reinterpret_cast<float4*>(p.sum + t * p.hidden + h) =
          make_float4(sum[0], sum[1], sum[2], sum[3]);
    }
  }
  if (is_last_block(place.tickets + kSumTicket) && threadIdx.x == 0 && !ended) {
    MOESAIC_CUDA_FAULT(cuda_peer_epoch_stands_still, return;)
    *epoch_line(place) += 1;
  }
}

// At least one block: words are published whatever there is to do.
unsigned blocks_of(const PeerPlace& p, std::int64_t count) {
  if (count < 1) return 1;
  return static_cast<unsigned>(count < p.max_blocks ? count : p.max_blocks);
}
unsigned row_blocks(const PeerPlace& p) {
  return blocks_of(p, (p.layout.shape.ranks * p.layout.shape.tokens + kWarps - 1) / kWarps);
}
cudaStream_t stream_of(void* stream) { return static_cast<cudaStream_t>(stream); }
int launched() { return static_cast<int>(cudaGetLastError()); }

}  // namespace

int launch_peer_send(const PeerSendParams& p, void* stream) {
  MOESAIC_ARM_CUDA_FAULTS();
  peer_send<<<blocks_of(p.place, p.tokens), kThreads, 0, stream_of(stream)>>>(p);
  return launched();
}

int launch_peer_wait(const PeerPlace& p, PeerKind kind, void* stream) {
  peer_wait<<<1, 32, 0, stream_of(stream)>>>(p, static_cast<std::uint32_t>(kind));
  return launched();
}

int launch_peer_take(const PeerTakeParams& p, void* stream) {
  peer_take<<<row_blocks(p.place), kThreads, 0, stream_of(stream)>>>(p);
  return launched();
}

int launch_peer_answer(const PeerAnswerParams& p, void* stream) {
  MOESAIC_ARM_CUDA_FAULTS();
  peer_answer<<<row_blocks(p.place), kThreads, 0, stream_of(stream)>>>(p);
  return launched();
}

int launch_peer_sum(const PeerSumParams& p, void* stream) {
  const unsigned blocks = blocks_of(p.place, p.tokens);
  if (p.bf16) {
    peer_sum<true><<<blocks, kThreads, 0, stream_of(stream)>>>(p);
  } else {
    peer_sum<false><<<blocks, kThreads, 0, stream_of(stream)>>>(p);
  }
  return launched();
}

int launch_peer_refuse(const PeerPlace& p, void* stream) {
  peer_refuse<<<1, 32, 0, stream_of(stream)>>>(p);
  return launched();
}

}  // namespace moesaic::cuda
