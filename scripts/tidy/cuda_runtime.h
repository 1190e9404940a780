// What clang's static checks need to read a .cu file: attributes, built-in variables and the device
// functions that our kernels call, declared and no more. nvcc's own header is for nvcc alone.
// scripts/tidy.sh puts this folder before the toolkit's; nothing is compiled with it.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <cstring>

#define __host__ __attribute__((host))
#define __device__ __attribute__((device))
#define __global__ __attribute__((global))
#define __shared__ __attribute__((shared))
#define __constant__ __attribute__((constant))
#define __forceinline__ __inline__ __attribute__((always_inline))
#define __launch_bounds__(...) __attribute__((launch_bounds(__VA_ARGS__)))
#define __grid_constant__
#define __cluster_dims__(...)
#define MOESAIC_HD __host__ __device__

#include <cuda_runtime_api.h>
#include <vector_types.h>

// Headers for host and device ask for this.
#define __CUDACC__

extern const __device__ uint3 threadIdx, blockIdx;
extern const __device__ dim3 blockDim, gridDim;

// Launches.
MOESAIC_HD unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, std::size_t shared = 0,
                                                void* stream = nullptr);
// With a body: parameters may have types that other units do not know.
template <class... Parameters, class... Arguments>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* /*config*/,
                               void (* /*kernel*/)(Parameters...), Arguments&&... /*arguments*/) {
  return cudaSuccess;
}
template <class T>
cudaError_t cudaFuncSetAttribute(T* kernel, cudaFuncAttribute attribute, int value);
template <class T>
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, T kernel, int threads,
                                                          std::size_t shared);
template <class T>
cudaError_t cudaOccupancyMaxActiveClusters(int* clusters, T* kernel,
                                           const cudaLaunchConfig_t* config);
template <class T>
cudaError_t cudaMalloc(T** pointer, std::size_t bytes);

// Vectors.
MOESAIC_HD float2 make_float2(float x, float y);
MOESAIC_HD float4 make_float4(float x, float y, float z, float w);
MOESAIC_HD uint2 make_uint2(unsigned x, unsigned y);
MOESAIC_HD uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w);
MOESAIC_HD int2 make_int2(int x, int y);
MOESAIC_HD int4 make_int4(int x, int y, int z, int w);

// Bits and arithmetic.
MOESAIC_HD unsigned __float_as_uint(float x);
MOESAIC_HD int __float_as_int(float x);
MOESAIC_HD float __uint_as_float(unsigned x);
MOESAIC_HD float __int_as_float(int x);
MOESAIC_HD int __popc(unsigned x);
MOESAIC_HD int __ffs(int x);
MOESAIC_HD int __ffsll(long long x);
MOESAIC_HD int __clz(int x);
MOESAIC_HD unsigned __byte_perm(unsigned x, unsigned y, unsigned selector);
MOESAIC_HD float fmaf(float x, float y, float z);
MOESAIC_HD float fmaxf(float x, float y);
MOESAIC_HD float fminf(float x, float y);
MOESAIC_HD float fabsf(float x);
MOESAIC_HD float tanhf(float x);
MOESAIC_HD float erff(float x);
MOESAIC_HD float erfcf(float x);
MOESAIC_HD float expf(float x);
MOESAIC_HD float logf(float x);
MOESAIC_HD float log1pf(float x);
MOESAIC_HD float sqrtf(float x);
MOESAIC_HD float ldexpf(float x, int exponent);
MOESAIC_HD double sqrt(double x);
MOESAIC_HD double ldexp(double x, int exponent);
MOESAIC_HD int ilogb(double x);
MOESAIC_HD bool isfinite(double x);
MOESAIC_HD float __fmaf_rn(float x, float y, float z);
MOESAIC_HD float __fadd_rn(float x, float y);
MOESAIC_HD float __fsub_rn(float x, float y);
MOESAIC_HD float __fmul_rn(float x, float y);
MOESAIC_HD float __fdiv_rn(float x, float y);
MOESAIC_HD float __fsqrt_rn(float x);
MOESAIC_HD float __frcp_rn(float x);
MOESAIC_HD float __expf(float x);
MOESAIC_HD float __fdividef(float x, float y);
template <class T>
MOESAIC_HD T min(T x, T y);
template <class T>
MOESAIC_HD T max(T x, T y);

// Warps, blocks, memory.
extern "C" __device__ void __syncthreads();
MOESAIC_HD int __syncthreads_or(int predicate);
MOESAIC_HD void __syncwarp(unsigned mask = 0xffffffffU);
MOESAIC_HD void __threadfence();
MOESAIC_HD void __threadfence_system();
MOESAIC_HD void __nanosleep(unsigned ns);
MOESAIC_HD unsigned __activemask();
MOESAIC_HD int __any_sync(unsigned mask, int predicate);
MOESAIC_HD int __all_sync(unsigned mask, int predicate);
MOESAIC_HD unsigned __ballot_sync(unsigned mask, int predicate);
MOESAIC_HD unsigned __reduce_or_sync(unsigned mask, unsigned value);
template <class T>
MOESAIC_HD unsigned __match_any_sync(unsigned mask, T value);
template <class T>
MOESAIC_HD T __reduce_max_sync(unsigned mask, T value);
template <class T>
MOESAIC_HD T __reduce_min_sync(unsigned mask, T value);
template <class T>
MOESAIC_HD T __reduce_add_sync(unsigned mask, T value);
template <class T>
MOESAIC_HD T __shfl_sync(unsigned mask, T value, int lane, int width = 32);
template <class T>
MOESAIC_HD T __shfl_xor_sync(unsigned mask, T value, int lanes, int width = 32);
template <class T>
MOESAIC_HD T __shfl_up_sync(unsigned mask, T value, unsigned lanes, int width = 32);
template <class T>
MOESAIC_HD T __shfl_down_sync(unsigned mask, T value, unsigned lanes, int width = 32);
template <class T>
MOESAIC_HD T atomicAdd(T* address, T value);
template <class T>
MOESAIC_HD T atomicOr(T* address, T value);
template <class T>
MOESAIC_HD T atomicMax(T* address, T value);
template <class T>
MOESAIC_HD T atomicCAS(T* address, T compare, T value);
template <class T>
MOESAIC_HD T __ldg(const T* address);
template <class T>
MOESAIC_HD T __ldcg(const T* address);
template <class T>
MOESAIC_HD T __ldcs(const T* address);
template <class T>
MOESAIC_HD void __stcs(T* address, T value);
MOESAIC_HD std::size_t __cvta_generic_to_shared(const void* pointer);

#undef MOESAIC_HD

// From here on our own headers mark what a kernel may call.
#define __CUDACC__ 1
