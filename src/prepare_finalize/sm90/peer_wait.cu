#include <cuda_runtime.h>

#include "prepare_finalize/sm90/peer_rows.cuh"

namespace moesaic::cuda {
namespace {

using parallel::PeerFailure;
using parallel::PeerKind;
using parallel::PeerOwnLine;
using parallel::PeerReport;
using parallel::PeerVerdict;

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
  begin_peer_kernel();
  const bool ended = has_ended(p);
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
  if (__any_sync(kWholeWarp, ended) != 0) return;
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
    const unsigned waiting = __ballot_sync(kWholeWarp, verdict == PeerVerdict::kNotYet);
    const unsigned wrong = __ballot_sync(
        kWholeWarp, verdict != PeerVerdict::kNotYet && verdict != PeerVerdict::kReady);
    if (wrong != 0) {
      report.code = static_cast<std::uint64_t>(PeerFailure::kBadWord);
      report.missing = wrong;
      report.verdict =
          __shfl_sync(kWholeWarp, static_cast<std::uint32_t>(verdict), __ffs(wrong) - 1);
      break;
    }
    if (waiting == 0) return;
    if (round % 16 != 0) continue;
    // Another rank's report says more than this one could find out.
    const unsigned told =
        __ballot_sync(kWholeWarp, ptx::load_acquire_system(&report_at->code) != 0);
    if (told != 0) {
      const auto* const line = reinterpret_cast<const PeerReport*>(
          own(p) + p.layout.word(PeerKind::kRefuse, __ffs(told) - 1));
      if (lane == 0) end_here(p, *line);
      return;
    }
    const bool late = ptx::global_timer() - begin > limit;
    if (__shfl_sync(kWholeWarp, late ? 1 : 0, 0) != 0) {
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
  begin_peer_kernel();
  if (__any_sync(kWholeWarp, has_ended(p)) != 0) return;
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

}  // namespace

int launch_peer_wait(const PeerPlace& p, PeerKind kind, void* stream) {
  MOESAIC_ARM_CUDA_FAULTS();
  return launch_peer_kernel(p, peer_wait, 1, 32, 0, stream, p, static_cast<std::uint32_t>(kind));
}

int launch_peer_refuse(const PeerPlace& p, void* stream) {
  return launch_peer_kernel(p, peer_refuse, 1, 32, 0, stream, p);
}

}  // namespace moesaic::cuda
