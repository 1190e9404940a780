// Launching the builds of the grouped-GEMM kernel.
#pragma once

#include <cuda_runtime.h>

#include "cuda/fault.cuh"
#include "cuda/once_per_device.h"
#include "experts/sm90/grouped_gemm.cuh"

namespace moesaic::cuda {

template <class Format, class Tile, class Epilogue>
int launch_tile(const GroupedParams& params, int num_sms, void* stream) {
  using L = Layout<Format, Tile>;
  auto* const kernel = &sm90_grouped_experts<Format, Tile, Epilogue>;
  MOESAIC_ARM_CUDA_FAULTS();
  static OncePerDevice once;
  const cudaError_t prepared = once([&] {
    return cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, L::kBytes);
  });
  if (prepared != cudaSuccess) return static_cast<int>(prepared);
  cudaLaunchAttribute attributes[2];
  attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[0].val.programmaticStreamSerializationAllowed = 1;
  attributes[1].id = cudaLaunchAttributeClusterDimension;
  attributes[1].val.clusterDim = {2, 1, 1};
  cudaLaunchConfig_t config = {};
  constexpr bool kCluster = Tile::kPaired || L::kSplit;
  config.gridDim = dim3{static_cast<unsigned>(kCluster ? num_sms / 2 * 2 : num_sms)};
  config.blockDim = dim3(L::kThreads);
  config.dynamicSmemBytes = L::kBytes;
  config.stream = static_cast<cudaStream_t>(stream);
  config.attrs = attributes;
  config.numAttrs = kCluster ? 2 : 1;
  return static_cast<int>(cudaLaunchKernelEx(&config, kernel, params));
}

// One build of a format.
template <class WithEpilogue, int kWidest, bool kShares = false>
struct GroupedBuild {
  using Epilogue = WithEpilogue;
  using Tile = TokenTile<kWidest, kShares, Epilogue::kRoutes>;
};

// The variant's among `Builds`, or of `otherwise` (null: there are no others).
template <class Format, class... Builds>
int launch_build(LaunchGrouped* otherwise, const GroupedVariant& v, const GroupedParams& params,
                 int num_sms, void* stream) {
  int error = static_cast<int>(cudaErrorInvalidConfiguration);
  const auto launched = [&]<class Build>() {
    using Tile = typename Build::Tile;
    using Epilogue = typename Build::Epilogue;
    if (v.epilogue != Epilogue::kKind || v.max_columns != Tile::kMaxColumns ||
        v.paired != Tile::kPaired) {
      return false;
    }
    error = launch_tile<Format, Tile, Epilogue>(params, num_sms, stream);
    return true;
  };
  if ((launched.template operator()<Builds>() || ...) || otherwise == nullptr) return error;
  return otherwise(v, params, num_sms, stream);
}

}  // namespace moesaic::cuda
