// Which of the gate's kernels runs: host code, tested without a device.
#include <algorithm>

#include "gate/cuda_gate.h"

namespace moesaic::cuda {
namespace {

constexpr std::int64_t kFewTokens = 16;
constexpr std::int64_t kFp32RowsTokens = 32;  // of the specialised fp32 tier

bool fits_tensor_cores(const GateParams& p) {
  return p.x_dtype == DType::kBF16 && !p.weight_f32 && p.hidden % 8 == 0 &&
         p.tokens <= (std::int64_t{1} << 21);
}

// Shapes whose whole weight row fits a warp's registers (MiniMax).
bool has_fp32_rows(const GateParams& p) {
  return p.weight_f32 && (p.x_dtype == DType::kBF16 || p.x_dtype == DType::kF32) &&
         ((p.hidden == 3072 && p.experts == 256) || (p.hidden == 6144 && p.experts == 128));
}

}  // namespace

int few_tokens_bytes(int tokens, int hidden) {
  constexpr int kExperts = 16;
  const int operands =
      kGateSlicesOfGroup * (kExperts + tokens) * gate_row_pitch(gate_slice_steps(hidden));
  const int sums = kGateSlicesOfGroup * tokens * (kExperts + 4) * 4;
  return tokens * kExperts * 4 + std::max(operands, sums);
}

int some_tokens_bytes(SomeTokensTile tile, int hidden) {
  return some_tokens_fixed_bytes(tile) +
         (tile.experts + 2 * tile.tokens) *
             gate_row_pitch(gate_slice_steps(hidden) * kGateSlicesOfGroup);
}

SomeTokensGrid some_tokens_grid(const GateParams& p) {
  // Clusters of eight that find eight free multiprocessors of a GPC at once; an H100 has been seen
  // with room for 15.
  constexpr int kClusters = 12;
  SomeTokensGrid best;
  int fewest = 1 << 20;
  for (const SomeTokensTile tile : {kNarrowTile, kWideTile}) {
    const int bytes = some_tokens_bytes(tile, p.hidden);
    if (bytes > kGateSharedLimit) continue;
    const int at_once = kClusters * (kGateSharedLimit / (bytes + 1024));
    const int clusters = (p.experts + tile.experts - 1) / tile.experts;
    const int tiles = (static_cast<int>(p.tokens) + tile.tokens - 1) / tile.tokens;
    const int line_tiles = (tiles - 1) / std::clamp(at_once / clusters, 1, tiles) + 1;
    const int rows = tile.experts + line_tiles * tile.tokens;
    // The wide tile means more traffic of all blocks together: measured, it pays from a quarter on.
    if (4 * rows > 3 * fewest) continue;
    fewest = rows;
    best = {tile, (tiles - 1) / line_tiles + 1};
  }
  return best;
}

GateKernel choose_gate_kernel(const GateParams& p) {
  if (!fits_tensor_cores(p)) {
    return has_fp32_rows(p) && p.tokens <= kFp32RowsTokens ? GateKernel::kFp32Rows
                                                           : GateKernel::kWarpPerLogit;
  }
  // Longer rows do not fit shared memory all at once.
  constexpr std::int32_t kLongest = 1 << 20;
  if (p.hidden > kLongest) return GateKernel::kTensorCores;
  if (p.tokens <= kFewTokens &&
      few_tokens_bytes(p.tokens <= 8 ? 8 : 16, p.hidden) <= kGateSharedLimit) {
    return GateKernel::kFewTokens;
  }
  return p.tokens <= kSomeTokens && some_tokens_bytes(kNarrowTile, p.hidden) <= kGateSharedLimit
             ? GateKernel::kSomeTokens
             : GateKernel::kTensorCores;
}

std::string_view gate_kernel_name(GateKernel kernel) {
  switch (kernel) {
    case GateKernel::kFewTokens:
      return "sm90_gate_few";
    case GateKernel::kSomeTokens:
      return "sm90_gate_some";
    case GateKernel::kTensorCores:
      return "sm90_gate_mma";
    case GateKernel::kFp32Rows:
      return "sm90_gate_fp32_rows";
    case GateKernel::kWarpPerLogit:
      break;
  }
  return "sm90_gate_warp";
}

}  // namespace moesaic::cuda
