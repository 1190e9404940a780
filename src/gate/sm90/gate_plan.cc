// Which of the gate's kernels runs: host code, tested without a device.
#include <algorithm>

#include "gate/sm90/gate.h"

namespace moesaic::cuda {
namespace {

constexpr std::int64_t kOneWaveTokens = 16;
constexpr std::int64_t kFp32RowsTokens = 32;  // of the specialised fp32 tier
constexpr std::int32_t kLongest = 1 << 20;    // elements of a row on tensor cores

bool fits_tensor_cores(const GateParams& p) {
  return p.x_dtype == DType::kBF16 && !p.weight_f32 && p.hidden % 8 == 0 && p.hidden <= kLongest &&
         p.tokens <= (std::int64_t{1} << 21);
}

// Shapes whose whole weight row fits a warp's registers (MiniMax).
bool has_fp32_rows(const GateParams& p) {
  return p.weight_f32 && (p.x_dtype == DType::kBF16 || p.x_dtype == DType::kF32) &&
         ((p.hidden == 3072 && p.experts == 256) || (p.hidden == 6144 && p.experts == 128));
}

}  // namespace

int one_wave_bytes(int tokens, int hidden) {
  constexpr int kExperts = 16;
  const int operands =
      kGateSlicesOfGroup * (kExperts + tokens) * gate_row_pitch(gate_slice_steps(hidden));
  const int sums = kGateSlicesOfGroup * tokens * (kExperts + 4) * 4;
  return tokens * kExperts * 4 + std::max(operands, sums);
}

int resident_weights_bytes(int hidden) {
  return kResidentFixedBytes + (kResidentExperts + 2 * kResidentTileTokens) *
                                   gate_row_pitch(gate_slice_steps(hidden) * kGateSlicesOfGroup);
}

int resident_weights_lines(const GateParams& p, const DeviceTraits& device) {
  const int at_once =
      device.sure_clusters_of_8 * (kGateSharedLimit / (resident_weights_bytes(p.hidden) + 1024));
  const int clusters = (p.experts + kResidentExperts - 1) / kResidentExperts;
  const int tiles = (static_cast<int>(p.tokens) + kResidentTileTokens - 1) / kResidentTileTokens;
  const int line_tiles = (tiles - 1) / std::clamp(at_once / clusters, 1, tiles) + 1;
  return (tiles - 1) / line_tiles + 1;
}

TiledPipelineGrid tiled_pipeline_grid(const GateParams& p, const DeviceTraits& device) {
  // Microseconds on an H100 SXM, measured: a block's start and end, and a chunk of 64 elements of K.
  // The choice asks for their ratios only.
  struct Cost {
    TiledPipelineGrid grid;
    double start, chunk;
  };
  constexpr Cost kCosts[] = {{{128, 128, 1}, 8.5, 0.32}, {{128, 128, 4}, 7.8, 0.32},
                             {{128, 128, 8}, 5.8, 0.32}, {{64, 128, 1}, 5.7, 0.29},
                             {{64, 128, 2}, 5.5, 0.29},  {{64, 128, 8}, 4.6, 0.29},
                             {{64, 64, 1}, 3.2, 0.25},   {{64, 64, 2}, 3.6, 0.25},
                             {{64, 64, 4}, 4.0, 0.25},   {{64, 64, 8}, 4.4, 0.25}};
  TiledPipelineGrid best;
  double least = 0;
  for (const Cost& cost : kCosts) {
    const TiledPipelineGrid& g = cost.grid;
    const std::int64_t tiles =
        ((p.tokens + g.tokens - 1) / g.tokens) * ((p.experts + g.experts - 1) / g.experts);
    const double bytes = static_cast<double>(tiles) * (g.tokens + g.experts) * p.hidden * 2;
    const int chunks = gate_slice_steps(p.hidden) * kGateGroups / g.cluster;
    const std::int64_t waves = (tiles - 1) / device.clusters_at_once(g.cluster) + 1;
    const double time = std::max(static_cast<double>(waves) * (cost.start + chunks * cost.chunk),
                                 bytes / device.l2_bytes_per_us);
    if (least > 0 && time >= least) continue;
    least = time;
    best = g;
  }
  return best;
}

GateKernel choose_gate_kernel(const GateParams& p, const DeviceTraits& device) {
  if (!fits_tensor_cores(p)) {
    return has_fp32_rows(p) && p.tokens <= kFp32RowsTokens ? GateKernel::kFp32Rows
                                                           : GateKernel::kWarpPerLogit;
  }
  if (p.tokens <= kOneWaveTokens &&
      one_wave_bytes(p.tokens <= 8 ? 8 : 16, p.hidden) <= kGateSharedLimit) {
    return GateKernel::kOneWave;
  }
  if (p.tokens > kResidentTokens || resident_weights_bytes(p.hidden) > kGateSharedLimit) {
    return GateKernel::kTiledPipeline;
  }
  // A block has 32 experts for all the tokens of its line: past so many bytes the tiles of the
  // other kernel read fewer and are as fast or faster.
  constexpr std::int64_t kMostBytes = 200 * 1024;
  const std::int64_t line = (p.tokens - 1) / resident_weights_lines(p, device) + 1;
  const std::int64_t row_bytes = p.hidden / kGateGroups * 2;
  return (kResidentExperts + line) * row_bytes <= kMostBytes ? GateKernel::kResidentWeights
                                                             : GateKernel::kTiledPipeline;
}

std::string_view gate_kernel_name(GateKernel kernel) {
  switch (kernel) {
    case GateKernel::kOneWave:
      return "sm90_gate_one_wave";
    case GateKernel::kResidentWeights:
      return "sm90_gate_resident_weights";
    case GateKernel::kTiledPipeline:
      return "sm90_gate_tiled_pipeline";
    case GateKernel::kFp32Rows:
      return "sm90_gate_fp32_rows";
    case GateKernel::kWarpPerLogit:
      break;
  }
  return "sm90_gate_warp";
}

}  // namespace moesaic::cuda
