// Launching one build of the grouped-GEMM kernel.
#pragma once

#include <cuda_runtime.h>

#include "cuda/once_per_device.h"
#include "experts/sm90/grouped_gemm.cuh"

namespace moesaic::cuda {

template <class Operand, int kMaxColumns, EpilogueKind kEpilogue, bool kPaired>
int launch_variant(const GroupedParams& params, int num_sms, void* stream) {
  using L = Layout<Operand, kMaxColumns>;
  auto* const kernel = &sm90_grouped_experts<Operand, kMaxColumns, kEpilogue, kPaired>;
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
  constexpr bool kCluster = kPaired || L::kSplit;
  config.gridDim = dim3(static_cast<unsigned>(kCluster ? num_sms / 2 * 2 : num_sms));
  config.blockDim = dim3(L::kThreads);
  config.dynamicSmemBytes = L::kBytes;
  config.stream = static_cast<cudaStream_t>(stream);
  config.attrs = attributes;
  config.numAttrs = kCluster ? 2 : 1;
  return static_cast<int>(cudaLaunchKernelEx(&config, kernel, params));
}

}  // namespace moesaic::cuda
