#include <cuda_runtime.h>

#include "cuda/fault.cuh"
#include "permute/sm90/combine.cuh"

namespace moesaic::cuda {
namespace {

constexpr int kThreads = 256;

template <bool kWide>
__global__ void __launch_bounds__(kThreads) combine_topk(const __grid_constant__ CombineParams p) {
  const std::int64_t vectors = p.hidden / 8;
  const std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  ptx::grid_dependency_wait();
  ptx::grid_launch_dependents();
  if (i >= p.tokens * vectors) return;
  combine_columns<kWide>(p, i / vectors, i % vectors * 8);
}

}  // namespace

int launch_combine(const CombineParams& params, void* stream) {
  MOESAIC_ARM_CUDA_FAULTS();
  const std::int64_t blocks = (params.tokens * (params.hidden / 8) + kThreads - 1) / kThreads;
  if (blocks == 0) return 0;
  cudaLaunchAttribute attribute;
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(blocks));
  config.blockDim = dim3(kThreads);
  config.stream = static_cast<cudaStream_t>(stream);
  config.attrs = &attribute;
  config.numAttrs = 1;
  auto* const kernel = params.wide ? &combine_topk<true> : &combine_topk<false>;
  return static_cast<int>(cudaLaunchKernelEx(&config, kernel, params));
}

}  // namespace moesaic::cuda
