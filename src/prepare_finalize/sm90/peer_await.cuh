// How a block waits for the words of a phase, and what it reports when they do not come.
#pragma once

#include "prepare_finalize/sm90/peer_rows.cuh"

namespace moesaic::cuda {

// `report` to this rank's abort line and the host.
__device__ __forceinline__ void end_here(const PeerPlace& p, parallel::PeerReport report) {
  const std::uint64_t code = report.code;
  for (parallel::PeerReport* const to : {abort_line(p), p.report}) {
    report.code = to->code;
    *to = report;
    __threadfence_system();
    ptx::store_release_system(&to->code, code);
  }
}
__device__ __forceinline__ parallel::PeerReport* report_line(const PeerPlace& p, int window,
                                                             int reporter) {
  return reinterpret_cast<parallel::PeerReport*>(
      p.base[window] + p.layout.word(parallel::PeerKind::kRefuse, reporter));
}
// The report of this rank to rank `r`.
__device__ __forceinline__ void tell(const PeerPlace& p, int r, parallel::PeerReport report) {
  const std::uint64_t code = report.code;
  parallel::PeerReport* const to = report_line(p, r, p.rank);
  report.code = 0;
  *to = report;
  __threadfence_system();
  ptx::store_release_system(&to->code, code);
}

// What a block that waits finds when it looks up.
struct PeerFound {
  unsigned told, late, missing, wrong;  // a bit for each rank, but `late`
  std::uint32_t verdict;                // of the first that is wrong
};

// The first block looks whether the wait is over without the words, and reports it then. All its
// threads; verdict: of the word of rank `of` that a thread waits for, kReady where it waits for none.
__attribute__((noinline)) inline __device__ bool ends_with_report(const PeerPlace& p,
                                                                  parallel::PeerKind kind,
                                                                  std::uint32_t epoch, bool late,
                                                                  parallel::PeerVerdict verdict,
                                                                  int of) {
  using parallel::PeerVerdict;
  __shared__ PeerFound found;
  const auto thread = static_cast<int>(threadIdx.x);
  const auto ranks = static_cast<int>(p.layout.shape.ranks);
  if (thread == 0) found = {0, late ? 1U : 0U, 0, 0, 0};
  __syncthreads();
  if (thread < ranks && ptx::load_acquire_system(&report_line(p, p.rank, thread)->code) != 0) {
    atomicOr(&found.told, 1U << thread);
  }
  if (verdict != PeerVerdict::kReady) {
    atomicOr(verdict == PeerVerdict::kNotYet ? &found.missing : &found.wrong, 1U << of);
  }
  __syncthreads();
  if (found.wrong != 0 && verdict != PeerVerdict::kReady && verdict != PeerVerdict::kNotYet &&
      of == __ffs(static_cast<int>(found.wrong)) - 1) {
    found.verdict = static_cast<std::uint32_t>(verdict);
  }
  __syncthreads();
  if (found.wrong == 0 && found.told == 0 && found.late == 0) return false;
  if (found.wrong == 0 && found.told != 0) {
    // Another rank's report says more than this one could find out.
    if (thread == 0) {
      end_here(p, *report_line(p, p.rank, __ffs(static_cast<int>(found.told)) - 1));
    }
  } else if (thread < 32) {
    parallel::PeerReport report;
    report.reporter = static_cast<std::uint32_t>(p.rank);
    report.epoch = epoch;
    report.kind = static_cast<std::uint32_t>(kind);
    report.code = static_cast<std::uint64_t>(found.wrong != 0 ? parallel::PeerFailure::kBadWord
                                                              : parallel::PeerFailure::kLate);
    report.missing = found.wrong != 0 ? found.wrong : found.missing;
    report.verdict = found.verdict;
    MOESAIC_CUDA_FAULT(cuda_peer_report_names_one_rank,
                       report.missing &= std::uint64_t{0} - report.missing;)
    bool tells = thread < ranks && thread != p.rank;
    MOESAIC_CUDA_FAULT(cuda_peer_report_is_kept, tells = false;)
    if (tells) tell(p, thread, report);
    if (thread == 0) end_here(p, report);
  }
  __syncthreads();
  return true;
}

// True when the words of all ranks are there: what they stand for may be read, and `live` [R], in shared
// memory, has the rows of each. False when the call has ended with a report, which the first block
// makes. All threads of a block call it.
__device__ __forceinline__ bool await_words(const PeerPlace& p, parallel::PeerKind kind,
                                            std::uint32_t epoch, std::int32_t* live) {
  using parallel::PeerVerdict;
  constexpr int kCopies = parallel::kPeerWordCopies;
  const int words = static_cast<int>(p.layout.shape.ranks) * kCopies;
  const parallel::PeerExpected expected = {epoch, epoch - 1, p.signature,
                                           static_cast<std::uint32_t>(p.layout.shape.tokens)};
  const std::uint64_t limit = *reinterpret_cast<const std::uint64_t*>(
      own(p) + p.layout.own_line(parallel::PeerOwnLine::kLimits));
  // After a report no wait ends well, though all words may be there: of a call that this rank has left
  // others may have answered, and of one that was not begun here the words are those of the last.
  bool told = threadIdx.x == 0 && has_ended(p);
  MOESAIC_CUDA_FAULT(cuda_peer_words_count_after_the_end, told = false;)
  const std::uint64_t begin = ptx::global_timer();
  const auto threads = static_cast<int>(blockDim.x);
  const auto load = [&](int i) {
    return ptx::load_acquire_system(
        reinterpret_cast<std::uint64_t*>(own(p) + p.layout.word(kind, i / kCopies, i % kCopies)));
  };
  int next = static_cast<int>(threadIdx.x);  // the word that this thread waits for
  for (unsigned round = 1;; ++round) {
    PeerVerdict verdict = PeerVerdict::kReady;
    while (next < words) {
      // Two at once.
      const std::uint64_t bits = load(next),
                          more = next + threads < words ? load(next + threads) : 0;
      const parallel::PeerWord word = parallel::unpack_peer_word(bits);
      verdict = parallel::judge_peer_word(word, expected);
      MOESAIC_CUDA_FAULT(cuda_peer_rows_read_before_the_wait, verdict = PeerVerdict::kReady;)
      if (verdict != PeerVerdict::kReady) break;
      if (next % kCopies == 0) live[next / kCopies] = static_cast<std::int32_t>(word.live);
      next += threads;
      const parallel::PeerWord after = parallel::unpack_peer_word(more);
      if (next >= words || parallel::judge_peer_word(after, expected) != PeerVerdict::kReady) {
        continue;
      }
      if (next % kCopies == 0) live[next / kCopies] = static_cast<std::int32_t>(after.live);
      next += threads;
    }
    if (__syncthreads_or((next < words || told) ? 1 : 0) == 0) return true;
    if (round % 16 != 0) continue;
    if (__syncthreads_or(threadIdx.x == 0 && has_ended(p) ? 1 : 0) != 0) return false;
    if (blockIdx.x == 0) {
      const bool late = ptx::global_timer() - begin > limit;
      if (ends_with_report(p, kind, epoch, late, verdict, next / kCopies)) return false;
    }
    __nanosleep(50);
  }
}

}  // namespace moesaic::cuda
