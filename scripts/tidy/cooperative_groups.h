// As cuda_runtime.h beside it: what of cooperative groups our kernels call.
#pragma once

#include <cuda_runtime.h>

namespace cooperative_groups {

struct ClusterGroup {
  __device__ void sync() const;
  __device__ unsigned block_rank() const;
  template <class T>
  __device__ T* map_shared_rank(T* address, unsigned rank) const;
};
__device__ ClusterGroup this_cluster();

}  // namespace cooperative_groups
