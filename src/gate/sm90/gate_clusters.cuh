// Launching the gate's kernels whose blocks come in clusters that share the groups of slices.
#pragma once

#include <cuda_runtime.h>

#include "gate/sm90/gate.h"

namespace moesaic::cuda {

inline cudaError_t allow_all_shared_memory(void (*kernel)(GateParams)) {
  return cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                              kGateSharedLimit);
}

// `columns` clusters of `cluster` blocks side by side, each for its own experts, in `lines` lines.
inline cudaError_t launch_gate_clusters(void (*kernel)(GateParams), const GateParams& p,
                                        int cluster, int columns, int lines, int threads,
                                        int shared_bytes, void* stream) {
  cudaLaunchAttribute attributes[2];
  attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[0].val.programmaticStreamSerializationAllowed = 1;
  attributes[1].id = cudaLaunchAttributeClusterDimension;
  attributes[1].val.clusterDim = {static_cast<unsigned>(cluster), 1, 1};
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(columns * cluster), static_cast<unsigned>(lines));
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.dynamicSmemBytes = static_cast<std::size_t>(shared_bytes);
  config.stream = static_cast<cudaStream_t>(stream);
  config.attrs = attributes;
  config.numAttrs = cluster > 1 ? 2 : 1;
  return cudaLaunchKernelEx(&config, kernel, p);
}

}  // namespace moesaic::cuda
