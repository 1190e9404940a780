// Marks inline functions that CPU code and CUDA kernels share.
#pragma once

#ifdef __CUDACC__
#define MOESAIC_HOST_DEVICE __host__ __device__
#else
#define MOESAIC_HOST_DEVICE
#endif
