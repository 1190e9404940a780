// Which of the gate's kernels runs: host code, tested without a device.
#include <algorithm>

#include "core/checked.h"
#include "gate/sm90/gate.h"

namespace moesaic::cuda {
namespace {

constexpr std::int64_t kOneWaveTokens = 16;
constexpr std::int64_t kFp32RowsTokens = 32;  // of the specialised fp32 tier
constexpr std::int64_t kAnyTokens = std::numeric_limits<std::int64_t>::max();
constexpr std::int32_t kLongest = 1 << 20;  // elements of a row on tensor cores
constexpr std::int32_t kShortest = 64;      // of several parts: a chunk wraps once

bool fits_tensor_cores(const GateParams& p) {
  const bool alike = p.x_dtype == (p.weight_f16 ? DType::kF16 : DType::kBF16) && !p.weight_f32;
  return alike && p.hidden % 8 == 0 && p.hidden <= kLongest / p.parts &&
         (p.parts == 1 || p.hidden >= kShortest);
}

// Shapes whose whole weight row fits a warp's registers (MiniMax).
bool has_fp32_rows(const GateParams& p) {
  return p.weight_f32 && (p.x_dtype == DType::kBF16 || p.x_dtype == DType::kF32) &&
         ((p.hidden == 3072 && p.experts == 256) || (p.hidden == 6144 && p.experts == 128));
}

std::int64_t one_wave_tokens(const GateParams& p) {
  for (const std::int64_t tokens : {kOneWaveTokens, kOneWaveTokens / 2}) {
    if (one_wave_bytes(static_cast<int>(tokens), p.depth()) <= kGateSharedLimit) return tokens;
  }
  return 0;
}

// The most tokens, above `less`, up to which the kernel with resident weights is at least as fast
// as the pipeline; `less` where it is not or does not fit.
std::int64_t resident_tokens(GateParams p, std::int64_t less, const DeviceTraits& device) {
  if (resident_weights_bytes(p.depth()) > kGateSharedLimit) return less;
  // A block has 32 experts for all the tokens of its line: past so many bytes the tiles of the
  // pipeline read fewer and are as fast or faster.
  constexpr std::int64_t kMostBytes = 200 * 1024;
  const std::int64_t row_bytes = p.depth() / kGateGroups * 2;
  for (p.tokens = less + 1; p.tokens <= kResidentTokens; ++p.tokens) {
    const std::int64_t line = (p.tokens - 1) / resident_weights_lines(p, device) + 1;
    if ((kResidentExperts + line) * row_bytes > kMostBytes) break;
  }
  return p.tokens - 1;
}

}  // namespace

int one_wave_bytes(int tokens, int depth) {
  constexpr int kExperts = 16;
  const int operands =
      kGateSlicesOfGroup * (kExperts + tokens) * gate_row_pitch(gate_slice_steps(depth));
  const int sums = kGateSlicesOfGroup * tokens * (kExperts + 4) * 4;
  return tokens * kExperts * 4 + std::max(operands, sums);
}

int resident_weights_bytes(int depth) {
  return kResidentFixedBytes + (kResidentExperts + 2 * kResidentTileTokens) *
                                   gate_row_pitch(gate_slice_steps(depth) * kGateSlicesOfGroup);
}

int resident_weights_lines(const GateParams& p, const DeviceTraits& device) {
  const int at_once =
      device.sure_clusters_of_8 * (kGateSharedLimit / (resident_weights_bytes(p.depth()) + 1024));
  const auto clusters = static_cast<int>(ceil_div(p.experts, kResidentExperts));
  const int tiles = (static_cast<int>(p.tokens) + kResidentTileTokens - 1) / kResidentTileTokens;
  const int line_tiles = (tiles - 1) / std::clamp(at_once / clusters, 1, tiles) + 1;
  return (tiles - 1) / line_tiles + 1;
}

TiledPipelineGrid tiled_pipeline_grid(const GateParams& p, const DeviceTraits& device) {
  // Microseconds on an H100 SXM, measured: a block's start and end, and a chunk of 64 elements of
  // K. Only their ratios matter for the choice.
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
    const std::int64_t tiles = ceil_div(p.tokens, g.tokens) * ceil_div(p.experts, g.experts);
    const double bytes = static_cast<double>(tiles) * (g.tokens + g.experts) * p.depth() * 2;
    const int chunks = gate_slice_steps(p.depth()) * kGateGroups / g.cluster;
    const int at_once = device.clusters_at_once(g.cluster);
    if (at_once < 1) continue;
    const std::int64_t waves = (tiles - 1) / at_once + 1;
    const double time = std::max(static_cast<double>(waves) * (cost.start + chunks * cost.chunk),
                                 bytes / device.l2_bytes_per_us);
    if (least > 0 && time >= least) continue;
    least = time;
    best = g;
  }
  return best;
}

void GatePlan::add(std::int64_t last_tokens, GateKernel kernel) {
  const std::int64_t before = count_ > 0 ? ranges_[count_ - 1].last_tokens : 0;
  if (last_tokens > before) ranges_[count_++] = {last_tokens, kernel};
}

GatePlan::GatePlan(const GateParams& params, const DeviceTraits& device) : count_(0) {
  if (fits_tensor_cores(params)) {
    const std::int64_t one_wave = one_wave_tokens(params);
    add(one_wave, GateKernel::kOneWave);
    add(resident_tokens(params, one_wave, device), GateKernel::kResidentWeights);
    add(kAnyTokens, GateKernel::kTiledPipeline);
    return;
  }
  if (has_fp32_rows(params)) add(kFp32RowsTokens, GateKernel::kFp32Rows);
  add(kAnyTokens, GateKernel::kWarpPerLogit);
}

GateKernel GatePlan::of(std::int64_t tokens) const {
  std::size_t i = 0;
  while (tokens > ranges_[i].last_tokens) ++i;
  return ranges_[i].kernel;
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
