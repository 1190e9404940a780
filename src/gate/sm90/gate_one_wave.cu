// The gate for up to 16 tokens (gate_mma.cuh has the arithmetic). A gate's weight is a few MB, so
// what takes time is waiting, not copying: a block requests all its bytes at once, in one wave, and
// no block has more than a slice of 16 experts per warp. Blocks come in clusters of eight, one per
// group of four slices; rank r adds up the groups for the tokens that it owns.
#include <cuda_runtime.h>

#include "cuda/experts_prologue.cuh"
#include "cuda/fault.cuh"
#include "cuda/once_per_device.h"
#include "gate/sm90/gate_clusters.cuh"
#include "gate/sm90/gate_mma.cuh"

namespace moesaic::cuda {
namespace {

// One block. Tokens: 8 or 16; Steps of 16 elements per slice, 0: known at run time; kHalf: of F16.
template <int Tokens, int Steps, bool kHalf>
class OneWaveGate {
 public:
  static constexpr int kExperts = 16;
  static constexpr int kThreads = 128;
  // With a prologue there is one more warp, which runs it.
  static constexpr int kMostThreads = kThreads + 32;
  static constexpr int kRankTokens = Tokens / kGateGroups;  // of each block of the cluster

  // `shared`: one_wave_bytes of 16-byte aligned memory.
  __device__ OneWaveGate(const GateParams& p, char* shared)
      : p_(p),
        received_(reinterpret_cast<float*>(shared)),
        sums_(reinterpret_cast<float*>(shared + Tokens * kExperts * 4)),
        steps_(Steps > 0 ? Steps : gate_slice_steps(p.depth())),
        pitch_(static_cast<std::uint32_t>(gate_row_pitch(steps_))),
        lane_(static_cast<int>(threadIdx.x) & 31),
        slice_(static_cast<int>(threadIdx.x) >> 5),
        rank_(static_cast<int>(ptx::cluster_cta_rank())),
        k_((rank_ * kGateSlicesOfGroup + slice_) * steps_ * 16),
        first_expert_(static_cast<std::int64_t>(blockIdx.x / kGateGroups) * kExperts),
        left_(p.tokens < Tokens ? static_cast<int>(p.tokens) : Tokens) {
    experts_ = ptx::shared_address(sums_) +
               static_cast<std::uint32_t>(slice_ * (kExperts + Tokens)) * pitch_;
    tokens_ = experts_ + kExperts * pitch_;
  }

  // Before the kernel in front has ended: weights never change.
  __device__ __forceinline__ void request_weights() const {
    ptx::cluster_arrive_relaxed();
    const auto* const w = static_cast<const std::uint16_t*>(p_.weight);
#pragma unroll
    for (int r = 0; r < 16; r += 4) {
      request_row<false>(w, first_expert_, p_.experts, r + lane_ / 8, experts_);
    }
  }
  __device__ __forceinline__ void request_rows() const {
    const auto* const x = static_cast<const std::uint16_t*>(p_.x);
    for (int r = 0; r < (left_ + kFetched - 1) / kFetched * kFetched; r += 4)
      request_row<true>(x, 0, p_.tokens, r + lane_ / 8, tokens_);
    ptx::async_commit();
  }

  // Multiplies this warp's slice and sends the block's sums to the blocks that own their tokens.
  // For all threads.
  __device__ __forceinline__ void multiply_and_exchange() {
    ptx::async_wait<0>();
    sync();
    float part[Tokens / 8][4];
    multiply_slice<kHalf, Tokens>(experts_, tokens_, pitch_, steps_, left_, part);
    sync();  // operands have been read, the sums take their place
    constexpr int kPitch = kExperts + 4;
    store_part<Tokens>(sums_ + slice_ * Tokens * kPitch, kPitch, 0, part);
    sync();
    ptx::cluster_wait();  // every block of the cluster runs, so its memory may be written
    for (int i = static_cast<int>(threadIdx.x); i < left_ * (kExperts / 4); i += kThreads) {
      const int t = i / (kExperts / 4), e = i % (kExperts / 4) * 4;
      float sum[4];
      sum_of_slices(sums_ + t * kPitch + e, Tokens * kPitch, sum);
      const float* const to = received_ + (rank_ * kRankTokens + t % kRankTokens) * kExperts + e;
      ptx::store_remote(ptx::shared_address(to), static_cast<std::uint32_t>(t / kRankTokens), sum);
    }
    ptx::cluster_sync();
  }
  // Stores the logits of this block's tokens; thread kExperts * t + e has token t, expert e.
  __device__ __forceinline__ void store() const {
    for (int i = static_cast<int>(threadIdx.x); i < kRankTokens * kExperts; i += kThreads) {
      const float sum = sum_of_groups(received_ + i, kRankTokens * kExperts);
      store_logit(p_, first_expert_ + i % kExperts, rank_ * kRankTokens + i / kExperts, sum);
    }
  }

 private:
  static __device__ __forceinline__ void sync() { ptx::named_barrier_sync(1, kThreads); }
  static constexpr int kFetched = Tokens < 16 ? 8 : 16;  // tokens that one ldmatrix fetches

  // Eight lanes per row, whole lines of L2 at a time; zeros where the matrix ends. kAgain: the row is
  // read again for each part of the weights.
  template <bool kAgain>
  __device__ __forceinline__ void request_row(const std::uint16_t* matrix, std::int64_t first,
                                              std::int64_t rows, int row, std::uint32_t to) const {
    const bool real = first + row < rows;
    const std::uint16_t* const from =
        matrix + (real ? first + row : 0) * (kAgain ? p_.hidden : p_.depth());
    to += static_cast<std::uint32_t>(row) * pitch_;
#pragma unroll
    for (int c = lane_ & 7; c < 2 * steps_; c += 8) {
      const int k = k_ + c * 8;
      ptx::async_load_16_line(to + static_cast<std::uint32_t>(c) * 16,
                              from + (kAgain ? p_.column(k) : k), real && k < p_.depth());
    }
  }

  const GateParams& p_;
  float* const received_;  // [groups][kRankTokens][kExperts]
  float* const sums_;      // [slices of the group][Tokens][kExperts + 4], over the operands
  const int steps_;
  const std::uint32_t pitch_;
  const int lane_, slice_, rank_;
  const int k_;  // first element of this warp's slice
  const std::int64_t first_expert_;
  const int left_;                          // tokens
  std::uint32_t experts_ = 0, tokens_ = 0;  // shared addresses of this warp's operands
};

// kForms: of the prologue's rows.
template <class Gate, RowForms kForms>
__global__ void __launch_bounds__(Gate::kMostThreads)
    gate_one_wave(const __grid_constant__ GateParams p) {
  extern __shared__ __align__(16) char shared[];
  const int prologue_thread = static_cast<int>(threadIdx.x) - Gate::kThreads;
  if (prologue_thread >= 0) {
    // All threads of the cluster take part in its barriers.
    ptx::cluster_arrive_relaxed();
    if (p.prologue.starts_early) ptx::grid_launch_dependents();
    ptx::grid_dependency_wait();
    ptx::grid_launch_dependents();
    run_prologue<kForms>(p.prologue, prologue_thread, 32, blockIdx.x, gridDim.x);
    ptx::cluster_wait();
    ptx::cluster_sync();
    return;
  }
  Gate gate(p, shared);
  gate.request_weights();
  if (p.prologue.starts_early) ptx::grid_launch_dependents();
  ptx::grid_dependency_wait();
  ptx::grid_launch_dependents();
  gate.request_rows();
  gate.multiply_and_exchange();
  gate.store();
}

template <int Tokens, int Steps, bool kHalf, RowForms kForms>
cudaError_t launch(const GateParams& p, void* stream) {
  using Gate = OneWaveGate<Tokens, Steps, kHalf>;
  static OncePerDevice once;
  const cudaError_t prepared =
      once([] { return allow_all_shared_memory(gate_one_wave<Gate, kForms>); });
  if (prepared != cudaSuccess) return prepared;
  return launch_gate_clusters(gate_one_wave<Gate, kForms>, p, kGateGroups,
                              (p.experts + Gate::kExperts - 1) / Gate::kExperts, 1,
                              p.prologue.zero != nullptr ? Gate::kMostThreads : Gate::kThreads,
                              one_wave_bytes(Tokens, p.depth()), stream);
}

template <int Steps, bool kHalf, RowForms kForms>
cudaError_t launch_forms(const GateParams& p, void* stream) {
  return p.tokens <= 8 ? launch<8, Steps, kHalf, kForms>(p, stream)
                       : launch<16, Steps, kHalf, kForms>(p, stream);
}
template <int Steps>
cudaError_t launch_steps(const GateParams& p, void* stream) {
  return forms_with(p.prologue.quant.form) == RowForms::kGroups
             ? launch_forms<Steps, false, RowForms::kGroups>(p, stream)
             : launch_forms<Steps, false, RowForms::kAll>(p, stream);
}

}  // namespace

int launch_gate_one_wave(const GateParams& p, void* stream) {
  MOESAIC_ARM_CUDA_FAULTS();
  if (p.weight_f16) return static_cast<int>(launch_forms<0, true, RowForms::kAll>(p, stream));
  return static_cast<int>(gate_slice_steps(p.depth()) == kGateSteps7168
                              ? launch_steps<kGateSteps7168>(p, stream)
                              : launch_steps<0>(p, stream));
}

}  // namespace moesaic::cuda
