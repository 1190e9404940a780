// The gate on the device: router logits [M, E] in fp32 from hidden states and the gate's weight.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <string_view>

#include "core/host_device.h"
#include "cuda/device_traits.h"
#include "cuda/experts_prologue.h"
#include "moesaic/dtype.h"

namespace moesaic::cuda {

inline constexpr int kMostGateParts = 3;

struct GateParams {
  const void* x = nullptr;       // [tokens, hidden] of x_dtype, contiguous, 16-byte aligned
  DType x_dtype = DType::kBF16;  // BF16, F16 or F32
  const void* weight = nullptr;  // [experts, hidden] f32, or [experts, parts, hidden] bf16, or
                                 // [experts, hidden] F16; contiguous, 16-byte aligned
  bool weight_f32 = false;
  bool weight_f16 = false;      // for rows of F16 on tensor cores only
  std::int32_t parts = 1;       // bf16 numbers that a weight is the sum of
  const float* bias = nullptr;  // [experts] or null
  std::int64_t tokens = 0;
  std::int32_t experts = 0;
  std::int32_t hidden = 0;   // any; rows that are not multiples of 16 bytes are read singly
  float* logits = nullptr;   // [tokens, experts], overlaps nothing
  ExpertsPrologue prologue;  // kOneWave: run by the same launch; others: must be empty

  // Elements of a row of the weight, and the one of x that is multiplied with element k.
  MOESAIC_HOST_DEVICE constexpr std::int32_t depth() const { return hidden * parts; }
  MOESAIC_HOST_DEVICE constexpr std::int32_t column(std::int32_t k) const {
    return k < hidden ? k : k < 2 * hidden ? k - hidden : k - 2 * hidden;
  }
};

enum class GateKernel : std::uint8_t {
  kOneWave,          // tensor cores, at most 16 tokens: all operands are requested at once
  kResidentWeights,  // tensor cores, at most 128 tokens: the weights stay, the tokens pass
  kTiledPipeline,    // tensor cores (wgmma), a pipeline of tiles
  kFp32Rows,      // F32 weights, without parts, of [256, 3072] and [128, 6144], at most 32 tokens
  kWarpPerLogit,  // anything
};
std::string_view gate_kernel_name(GateKernel kernel);

// The kernel for calls of so many tokens, from the last range's end on.
struct GateRange {
  std::int64_t last_tokens;
  GateKernel kernel;
};
// Which kernel computes the logits, for every number of tokens: a pure function of the device and
// of the shapes and dtypes of a gate's calls.
class GatePlan {
 public:
  GatePlan() = default;  // kWarpPerLogit, which takes anything
  // params.tokens and the pointers are not read.
  explicit GatePlan(const GateParams& params, const DeviceTraits& device = {});
  GateKernel of(std::int64_t tokens) const;
  // Ascending; each kernel has at most one, and the last has no end.
  std::span<const GateRange> ranges() const { return {ranges_.data(), count_}; }

 private:
  void add(std::int64_t last_tokens, GateKernel kernel);
  std::array<GateRange, 4> ranges_{
      {{std::numeric_limits<std::int64_t>::max(), GateKernel::kWarpPerLogit}}};
  std::size_t count_ = 1;
};
// The plan's kernel for params.tokens.
inline GateKernel choose_gate_kernel(const GateParams& params, const DeviceTraits& device = {}) {
  return GatePlan(params, device).of(params.tokens);
}

// bf16 rows and weights, or both of F16, with hidden a multiple of 8, of several parts at least 64,
// take the tensor cores (gate_mma.cuh), everything else one warp per logit: lane l adds the products
// of elements 8 (l + 32 i) .. + 7 in ascending order with fused multiply-adds, then the lanes are
// added by halving distances. Either way the bits of a logit depend on its two rows alone, not on tokens,
// neighbours, launch or which of the kernels ran. Error: <= (depth() / 32 + 64) * 2^-24 * sum|x w|,
// of several parts 1 + 2^-7 times that. Any shape is correct. An infinite x times parts of both
// signs is NaN. Capturable; a programmatic launch that reads the weight before the kernels in front
// have ended. `kernel`: the plan's. Returns a cudaError_t value.
int launch_gate(const GateParams& params, GateKernel kernel, const DeviceTraits& device,
                void* stream);

// The kernels behind it.
int launch_gate_one_wave(const GateParams& params, void* stream);
int launch_gate_resident_weights(const GateParams& params, const DeviceTraits& device,
                                 void* stream);
// More rows than kMostGateTokens, whose tiles a grid does not count, are several launches.
inline constexpr std::int64_t kMostGateTokens = std::int64_t{1} << 21;
int launch_gate_tiled_pipeline(const GateParams& params, const DeviceTraits& device, void* stream);

// How the tensor-core kernels cut K: eight groups of four slices of whole steps of 16 elements.
inline constexpr int kGateGroups = 8, kGateSlicesOfGroup = 4;
MOESAIC_HOST_DEVICE constexpr int gate_slice_steps(int depth) {
  constexpr int kSlices = kGateGroups * kGateSlicesOfGroup;
  return ((depth + 15) / 16 + kSlices - 1) / kSlices;
}
inline constexpr int kGateSteps7168 = 14;  // rows of 7168: DeepSeek-V3, Kimi-K2
// Bytes between rows of so many steps in shared memory: 16 more than they take, so that ldmatrix
// meets no bank twice.
MOESAIC_HOST_DEVICE constexpr int gate_row_pitch(int steps) { return steps * 32 + 16; }
// Shared memory that a block may take, and what a block of kOneWave and of kResidentWeights takes.
inline constexpr int kGateSharedLimit = kHopperSharedBytes;
int one_wave_bytes(int tokens, int depth);
// kResidentWeights: the most tokens, the experts of a block, whose rows stay, and the tokens of a
// tile that passes; two tiles are under way.
inline constexpr int kResidentTokens = 128, kResidentExperts = 32, kResidentTileTokens = 32;
inline constexpr int kResidentFixedBytes =
    64 + kResidentTokens * kResidentExperts * 4 +
    kGateSlicesOfGroup * kResidentTileTokens * (kResidentExperts + 4) * 4;
int resident_weights_bytes(int depth);
// Lines of its grid that share the tiles of tokens: as many as one wave of blocks has room for.
int resident_weights_lines(const GateParams& params, const DeviceTraits& device = {});
// Of kTiledPipeline: a tile of 128 x 128, 64 x 128 or 64 x 64, and 1, 2, 4 or 8 blocks that share
// its groups of K, by an estimate of the time.
struct TiledPipelineGrid {
  int tokens = 128, experts = 128, cluster = 1;
};
TiledPipelineGrid tiled_pipeline_grid(const GateParams& params, const DeviceTraits& device = {});

}  // namespace moesaic::cuda
