#include <cuda_runtime.h>

#include <algorithm>

#include "cuda/fault.cuh"
#include "cuda/quant_rows.cuh"

namespace moesaic::cuda {
namespace {

template <RowForms kForms>
__global__ void __launch_bounds__(256, kForms == RowForms::kGroups ? 8 : 4)
    quant_rows(const __grid_constant__ QuantRowsParams p) {
  ptx::grid_dependency_wait();
  ptx::grid_launch_dependents();
  quantize_groups<kForms>(p, blockIdx.x * 16 + (threadIdx.x >> 4), gridDim.x * 16, count_groups(p));
}

}  // namespace

int launch_quant_rows(const QuantRowsParams& params, const DeviceTraits& device, void* stream) {
  MOESAIC_ARM_CUDA_FAULTS();
  const std::int64_t groups = quant_parts(params);
  const std::int64_t most_blocks = std::int64_t{16} * device.sms;  // twice what all run at once
  cudaLaunchAttribute attribute;
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim =
      dim3(static_cast<unsigned>(std::clamp<std::int64_t>((groups + 15) / 16, 1, most_blocks)));
  config.blockDim = dim3(256);
  config.stream = static_cast<cudaStream_t>(stream);
  config.attrs = &attribute;
  config.numAttrs = 1;
  const auto kernel = forms_with(params.form) == RowForms::kGroups ? quant_rows<RowForms::kGroups>
                                                                   : quant_rows<RowForms::kAll>;
  return static_cast<int>(cudaLaunchKernelEx(&config, kernel, params));
}

}  // namespace moesaic::cuda
