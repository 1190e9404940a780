// The router's kernel, a warp per token, and its launch, for builds of several widths: those of many
// columns are compiled by themselves.
#pragma once

#include "cuda/experts_prologue.cuh"
#include "router/sm90/warp_router.cuh"

namespace moesaic::cuda {

inline constexpr int kRouteWarps = 4;

// A call: few formats need it, and inline it would lengthen every kernel here.
static __device__ __attribute__((noinline)) void run_prologue_of_any_form(
    const ExpertsPrologue& prologue, int lane, std::uint32_t block, std::uint32_t blocks) {
  run_prologue<RowForms::kAll>(prologue, lane, 32, block, blocks);
}

template <int kItems>
__global__ void __launch_bounds__(kRouteWarps * 32)
    route(const __grid_constant__ RouteParams p, const __grid_constant__ ExpertsPrologue prologue) {
  extern __shared__ std::uint32_t shared[];
  const int lane = static_cast<int>(threadIdx.x & 31U);
  const int warp = static_cast<int>(threadIdx.x >> 5);
  ptx::grid_dependency_wait();
  ptx::grid_launch_dependents();
  const std::int64_t token = static_cast<std::int64_t>(blockIdx.x) * (blockDim.x >> 5) + warp;
  if (token >= p.tokens) {
    // Calls with a prologue have blocks of one warp.
    if (prologue.zero != nullptr) {
      const auto first = static_cast<unsigned>(p.tokens);
      const std::uint32_t block = blockIdx.x - first, blocks = gridDim.x - first;
      if (forms_with(prologue.quant.form) == RowForms::kGroups) {
        run_prologue<RowForms::kGroups>(prologue, lane, 32, block, blocks);
      } else {
        run_prologue_of_any_form(prologue, lane, block, blocks);
      }
    }
    return;
  }
  std::uint32_t* const base = shared + warp * scratch_words(p);
  Scratch s;
  s.weights = reinterpret_cast<float*>(base);
  s.ids = reinterpret_cast<std::int32_t*>(base + p.top_k);
  s.keys = base + 2 * p.top_k;
  s.group_keys = s.keys + p.columns;
  WarpRouter<kItems> router(p, s, lane);
  if (p.padding != nullptr && p.padding[token] != 0) {
    router.erase(token);
  } else {
    router.run(token);
  }
}

// Up to 32 * kItems columns.
template <int kItems>
int launch_route_of(const RouteParams& p, const ExpertsPrologue* prologue, void* stream) {
  MOESAIC_ARM_CUDA_FAULTS();
  // One warp per block spreads few tokens over the multiprocessors. Without raising its limit a
  // block has 48 KB of shared memory; one warp needs at most 16.
  const int bytes = scratch_words(p) * 4;
  const int warps = p.tokens <= 512 || kRouteWarps * bytes > 48 * 1024 ? 1 : kRouteWarps;
  cudaLaunchAttribute attribute;
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  std::int64_t blocks = (p.tokens + warps - 1) / warps;
  if (prologue != nullptr) {
    const std::int64_t groups = prologue->quant.tokens * ((prologue->quant.columns + 127) / 128);
    blocks += groups > 0 ? (groups + 1) / 2 : 1;
  }
  config.gridDim = dim3(static_cast<unsigned>(blocks));
  config.blockDim = dim3(static_cast<unsigned>(warps) * 32);
  config.dynamicSmemBytes = static_cast<std::size_t>(warps) * static_cast<std::size_t>(bytes);
  config.stream = static_cast<cudaStream_t>(stream);
  config.attrs = &attribute;
  config.numAttrs = 1;
  return static_cast<int>(cudaLaunchKernelEx(&config, route<kItems>, p,
                                             prologue != nullptr ? *prologue : ExpertsPrologue()));
}

}  // namespace moesaic::cuda
