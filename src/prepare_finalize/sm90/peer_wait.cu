#include <cuda_runtime.h>

#include "prepare_finalize/sm90/peer_await.cuh"

namespace moesaic::cuda {
namespace {

using parallel::PeerFailure;
using parallel::PeerKind;
using parallel::PeerReport;

constexpr unsigned kWaitThreads = 256;

// One block, for kernels behind it of which many blocks would wait.
__global__ void __launch_bounds__(kWaitThreads)
    peer_wait(const __grid_constant__ PeerPlace p, std::uint32_t kind_number) {
  __shared__ std::int32_t live[parallel::kPeerWindowRanks];
  begin_peer_kernel();
  const auto kind = static_cast<PeerKind>(kind_number);
  await_words(p, kind, kind == PeerKind::kRows ? epoch_of_rows(p) : epoch_of_answers(p), live);
}

__global__ void __launch_bounds__(32) peer_refuse(const __grid_constant__ PeerPlace p) {
  begin_peer_kernel();
  if (__any_sync(kWholeWarp, has_ended(p)) != 0) return;
  const auto lane = static_cast<int>(threadIdx.x);
  PeerReport report;
  report.code = static_cast<std::uint64_t>(PeerFailure::kRefused);
  report.missing = std::uint64_t{1} << p.rank;
  report.reporter = static_cast<std::uint32_t>(p.rank);
  report.epoch = epoch_of_rows(p);
  if (lane < p.layout.shape.ranks && lane != p.rank) tell(p, lane, report);
  __syncwarp();
  if (lane == 0) end_here(p, report);
}

}  // namespace

int launch_peer_wait(const PeerPlace& p, PeerKind kind, void* stream) {
  MOESAIC_ARM_CUDA_FAULTS();
  return launch_peer_kernel(p, peer_wait, 1, kWaitThreads, 0, stream, p,
                            static_cast<std::uint32_t>(kind));
}

int launch_peer_refuse(const PeerPlace& p, void* stream) {
  return launch_peer_kernel(p, peer_refuse, 1, 32, 0, stream, p);
}

}  // namespace moesaic::cuda
