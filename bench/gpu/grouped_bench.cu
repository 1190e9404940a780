// Correctness and time of the grouped-GEMM chain on one Hopper GPU: work list, activation
// quantisation, both GEMMs, combine. Weights are pseudo-random functions of their coordinates, so
// that sampled tokens can be checked against float64 at any size without a second copy.
//   grouped_bench [--shape NAME] [--format fp8|bf16] [--m LIST] [--check] [--variants] ...
#include <cuda_bf16.h>
#include <cuda_fp8.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <random>
#include <string>
#include <vector>

#include "cuda/ptx/sync.cuh"
#include "experts/cuda_epilogue.cuh"
#include "experts/cuda_grouped.h"
#include "experts/cuda_repack.h"
#include "permute/cuda_align.h"
#include "permute/cuda_combine.h"
#include "quant/cuda_quant_rows.h"

using namespace moesaic::cuda;
namespace ptx = moesaic::ptx;

#define CHECK(x)                                                                            \
  do {                                                                                      \
    const cudaError_t e_ = (cudaError_t)(x);                                                \
    if (e_ != cudaSuccess) {                                                                \
      std::printf("FAILED %s:%d %s: %s\n", __FILE__, __LINE__, #x, cudaGetErrorString(e_)); \
      std::exit(1);                                                                         \
    }                                                                                       \
  } while (0)

struct ShapeRow {
  const char* name;
  int E, k, H, I;
};
static const ShapeRow kShapes[] = {
    {"deepseek-v3", 256, 8, 7168, 2048}, {"qwen3-235b", 128, 8, 4096, 1536},
    {"qwen3-30b", 128, 8, 2048, 768},    {"tiny", 8, 2, 384, 256},
    {"tiny-ragged", 6, 3, 272, 384},     {"tiny-b", 16, 4, 136, 88},
};
// Best peer, two GEMMs alone, us (M = 1 4 16 64 128 256 512 1024 2048 4096 8192).
static const int kPeerM[] = {1, 4, 16, 64, 128, 256, 512, 1024, 2048, 4096, 8192};
static const std::map<std::string, std::vector<double>> kPeers = {
    {"deepseek-v3/fp8",
     {131.9, 490.3, 1543.3, 3353.2, 3842.7, 3964.1, 4009.0, 4036.7, 4476.1, 5976.2, 7914.4}},
    {"qwen3-235b/fp8",
     {63.0, 207.8, 539.4, 824.0, 855.2, 876.5, 889.0, 980.7, 1182.3, 1472.5, 2356.6}},
    {"qwen3-30b/fp8", {22.8, 56.7, 142.4, 216.3, 223.3, 231.3, 245.8, 275.2, 313.8, 418.8, 636.6}},
    {"qwen3-235b/bf16",
     {119.6, 418.6, 1107.3, 1717.8, 1753.7, 1755.4, 1769.2, 1804.1, 2401.1, 2725.9, 4177.2}},
    {"qwen3-30b/bf16",
     {35.6, 114.0, 303.6, 453.2, 460.9, 460.6, 462.4, 490.2, 588.6, 725.7, 1113.8}},
};

// --- Pseudo-random data
// -----------------------------------------------------------------------------
__host__ __device__ inline uint32_t mix(uint64_t x) {
  x ^= x >> 33;
  x *= 0xff51afd7ed558ccdULL;
  x ^= x >> 33;
  x *= 0xc4ceb9fe1a85ec53ULL;
  x ^= x >> 33;
  return (uint32_t)x;
}
// Roughly normal, sd 1; or integers when `exact`.
__host__ __device__ inline float noise(uint64_t key, bool exact, int sparse) {
  const uint32_t h = mix(key);
  if (exact) return (h % (uint32_t)sparse) == 0 ? ((h >> 16) & 1 ? 1.0f : -1.0f) : 0.0f;
  float s = 0;
  for (int i = 0; i < 4; ++i) s += (float)((h >> (8 * i)) & 255) * (1.0f / 255.0f);
  return (s - 2.0f) * 1.7320508f;
}
struct Data {
  bool exact;
  bool fp8;
  int H, I;
};
// Weight value before the block scale; e4m3 or bf16 representable.
__device__ inline float weight_value(const Data& d, int which, int64_t e, int64_t row,
                                     int64_t col) {
  const uint64_t key = (((uint64_t)(which * 1024 + e) * 16384 + row) * 16384 + col);
  float v = noise(key, d.exact, which == 1 ? d.H / 16 : d.I / 16);
  if (d.exact && which == 1 && row < d.I)
    v = fabsf(v) * 32.0f;  // gates: multiples of 32, not negative
  if (d.exact) return v;
  if (d.fp8) {
    __nv_fp8_e4m3 q(v * 64.0f);
    return (float)q;
  }
  return __bfloat162float(__float2bfloat16(v));
}
__device__ inline float weight_scale(const Data& d, int which, int64_t e, int64_t rb, int64_t cb) {
  if (d.exact) return 1.0f;
  const uint32_t h = mix((((uint64_t)(which * 1024 + e) * 512 + rb) * 512 + cb) ^ 0x5555);
  const float base = rsqrtf((float)(which == 1 ? d.H : d.I));
  return base * (d.fp8 ? 1.0f / 64.0f * (0.75f + (float)(h & 1023) / 2048.0f) : 1.0f);
}
__global__ void make_weights(Data d, int which, int e, int64_t rows, int64_t cols, void* out,
                             float* scale) {
  const int64_t step = (int64_t)gridDim.x * blockDim.x;
  for (int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; i < rows * cols; i += step) {
    const int64_t r = i / cols, c = i % cols;
    float v = weight_value(d, which, e, r, c);
    if (d.fp8)
      ((__nv_fp8_e4m3*)out)[i] = __nv_fp8_e4m3(v);
    else
      ((__nv_bfloat16*)out)[i] =
          __float2bfloat16(v * (d.exact ? 1.0f : weight_scale(d, which, e, 0, 0)));
    if (d.fp8 && r % 128 == 0 && c % 128 == 0)
      scale[(r / 128) * ((cols + 127) / 128) + c / 128] =
          weight_scale(d, which, e, r / 128, c / 128);
  }
}
__global__ void make_tokens(bool exact, int64_t count, __nv_bfloat16* x) {
  for (int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; i < count;
       i += (int64_t)gridDim.x * blockDim.x) {
    x[i] = __float2bfloat16(exact ? fabsf(noise(i ^ 0xABCDEF0000ULL, true, 2))
                                  : noise(i ^ 0xABCDEF0000ULL, false, 1));
  }
}

// --- Float64 reference of sampled tokens
// -------------------------------------------------------------
__device__ inline float operand(const Data& d, const void* x, const float* scale, int64_t stride,
                                int64_t row, int64_t c, int K) {
  if (d.fp8) return (float)((const __nv_fp8_e4m3*)x)[row * K + c];
  return __bfloat162float(((const __nv_bfloat16*)x)[row * K + c]);
}
__device__ double ref_dot(const Data& d, int which, int64_t e, int64_t row, const void* x,
                          const float* xs, int64_t stride, int64_t xrow, int K) {
  const int lane = threadIdx.x & 31;
  double sum = 0;
  for (int c0 = 0; c0 < K; c0 += 128) {
    double part = 0;
    for (int c = c0 + lane; c < min(c0 + 128, K); c += 32) {
      float w = weight_value(d, which, e, row, c);
      if (!d.fp8)
        w = __bfloat162float(
            __float2bfloat16(w * (d.exact ? 1.0f : weight_scale(d, which, e, 0, 0))));
      part += (double)w * operand(d, x, xs, stride, xrow, c, K);
    }
    if (d.fp8)
      part *=
          (double)weight_scale(d, which, e, row / 128, c0 / 128) * xs[(c0 / 128) * stride + xrow];
    sum += part;
  }
  for (int s = 1; s < 32; s <<= 1) sum += __shfl_xor_sync(~0u, sum, s);
  return sum;
}
// inner64 [sample*k][I] doubles
__global__ void ref_gemm1(Data d, const int32_t* tokens, int k, const int32_t* ids, const void* x,
                          const float* xs, int64_t stride, double* inner) {
  const int64_t pair = blockIdx.y;
  const int64_t t = tokens[pair / k];
  const int e = ids[t * k + pair % k];
  const int ch = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
  if (ch >= d.I || e < 0) return;
  const double g = ref_dot(d, 1, e, ch, x, xs, stride, t, d.H);
  const double u = ref_dot(d, 1, e, d.I + ch, x, xs, stride, t, d.H);
  if ((threadIdx.x & 31) == 0) inner[pair * d.I + ch] = g / (1.0 + exp(-g)) * u;
}
__global__ void ref_requant(Data d, const double* inner, int64_t rows, void* q, float* scale) {
  const int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
  const int groups = (d.I + 127) / 128;
  if (i >= rows * groups) return;
  const int64_t r = i / groups, g = i % groups;
  float a = 0;
  for (int c = g * 128; c < min((int)(g + 1) * 128, d.I); ++c) {
    const float v = __bfloat162float(__double2bfloat16(inner[r * d.I + c]));
    if (!d.fp8) ((__nv_bfloat16*)q)[r * d.I + c] = __float2bfloat16(v);
    a = fmaxf(a, fabsf(v));
  }
  if (!d.fp8) return;
  const float s = fmaxf(a, 1e-10f) / 448.0f;
  scale[g * rows + r] = s;
  for (int c = g * 128; c < min((int)(g + 1) * 128, d.I); ++c)
    ((__nv_fp8_e4m3*)q)[r * d.I + c] =
        __nv_fp8_e4m3(__bfloat162float(__double2bfloat16(inner[r * d.I + c])) / s);
}
__global__ void ref_gemm2(Data d, const int32_t* tokens, int k, const int32_t* ids,
                          const float* weights, const void* q, const float* qs, int64_t rows,
                          double* out) {
  const int64_t s = blockIdx.y;
  const int64_t t = tokens[s];
  const int h = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
  if (h >= d.H) return;
  double sum = 0;
  for (int j = 0; j < k; ++j) {
    const int e = ids[t * k + j];
    if (e < 0) continue;
    sum += (double)weights[t * k + j] * ref_dot(d, 2, e, h, q, qs, rows, s * k + j, d.I);
  }
  if ((threadIdx.x & 31) == 0) out[s * d.H + h] = sum;
}

// --- Read ceiling: bulk copies through a ring, or plain loads
// -----------------------------------------------
__global__ void read_plain(const uint4* p, int64_t n, uint32_t* sink) {
  uint32_t a = 0;
  const int64_t step = (int64_t)gridDim.x * blockDim.x;
  int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
  for (; i + 7 * step < n; i += 8 * step) {
    uint4 v[8];
#pragma unroll
    for (int j = 0; j < 8; ++j) v[j] = __ldcs(p + i + j * step);
#pragma unroll
    for (int j = 0; j < 8; ++j) a ^= v[j].x ^ v[j].y ^ v[j].z ^ v[j].w;
  }
  if (a == 0x12345678) *sink = a;
}

struct Options {
  std::string shape = "all", format = "all";
  std::vector<int> ms;
  bool check = false, exact = false, variants = false, profile = false;
  int columns = 0;
  int routings = 0;
  int sms = 0;
  double zipf = 0;
};

struct Layer {
  ShapeRow shape;
  bool fp8, exact;
  RepackShape s13, s2;
  std::byte *w13, *w2;
  float *sc13 = nullptr, *sc2 = nullptr;
  void make(ShapeRow s, bool f, bool ex) {
    shape = s;
    fp8 = f;
    exact = ex;
    const int b = fp8 ? 1 : 2;
    s13 = {2 * s.I, s.H, b, true};
    s2 = {s.H, s.I, b, false};
    CHECK(cudaMalloc(&w13, s.E * s13.image_bytes()));
    CHECK(cudaMalloc(&w2, s.E * s2.image_bytes()));
    CHECK(cudaMalloc(&sc13, s.E * s13.scale_bytes()));
    CHECK(cudaMalloc(&sc2, s.E * s2.scale_bytes()));
    void* stage;
    float* sstage;
    CHECK(cudaMalloc(&stage, (size_t)2 * s.I * s.H * b));
    CHECK(cudaMalloc(&sstage, 1 << 20));
    Data d{ex, fp8, s.H, s.I};
    for (int e = 0; e < s.E; ++e) {
      make_weights<<<2048, 256>>>(d, 1, e, 2 * s.I, s.H, stage, sstage);
      CHECK(repack_expert(s13, (std::byte*)stage, fp8 ? sstage : nullptr,
                          w13 + e * s13.image_bytes(), sc13 + e * s13.scale_bytes() / 4, nullptr));
      make_weights<<<2048, 256>>>(d, 2, e, s.H, s.I, stage, sstage);
      CHECK(repack_expert(s2, (std::byte*)stage, fp8 ? sstage : nullptr, w2 + e * s2.image_bytes(),
                          sc2 + e * s2.scale_bytes() / 4, nullptr));
    }
    CHECK(cudaDeviceSynchronize());
    cudaFree(stage);
    cudaFree(sstage);
  }
  void free() {
    cudaFree(w13);
    cudaFree(w2);
    cudaFree(sc13);
    cudaFree(sc2);
  }
};

struct Run {
  Layer& l;
  int M;
  int R;
  GroupedVariant v;
  int sms;
  int32_t *ids, *pair_of_row, *row_of_pair;
  int32_t* block_counts;
  uint32_t* band_done;
  float *weights, *weight_of_row;
  GroupRecord* groups;
  uint32_t *done, *control;
  __nv_bfloat16 *x, *out;
  uint8_t* xq = nullptr;
  float* xs = nullptr;
  std::byte* inner;
  float* inner_scale;
  uint16_t* y2;
  std::vector<int32_t> hids;
  std::vector<float> hw;
  int64_t P, xstride, istride;
  int max_groups;
  double touched = 0;
  std::vector<void*> owned;
  template <class T>
  T* alloc(size_t n) {
    void* p;
    CHECK(cudaMalloc(&p, std::max<size_t>(n, 1) * sizeof(T)));
    CHECK(cudaMemset(p, 0xFF, n * sizeof(T)));
    owned.push_back(p);
    return (T*)p;
  }
  Run(Layer& layer, int m, int r, double zipf) : l(layer), M(m), R(r) {
    const auto& s = l.shape;
    P = (int64_t)M * s.k;
    xstride = (M + 3) / 4 * 4;
    istride = (P + 3) / 4 * 4;
    hids.resize(P * R);
    hw.resize(P * R);
    std::mt19937 rng(1234 + M);
    std::vector<double> pop(s.E);
    for (int e = 0; e < s.E; ++e) pop[e] = zipf > 0 ? 1.0 / std::pow(e + 1, zipf) : 1.0;
    std::shuffle(pop.begin(), pop.end(), rng);
    for (int r2 = 0; r2 < R; ++r2) {
      std::vector<int> seen(s.E);
      for (int t = 0; t < M; ++t) {
        // Gumbel top-k: sampling without replacement in proportion to popularity.
        std::vector<std::pair<double, int>> key(s.E);
        for (int e = 0; e < s.E; ++e)
          key[e] = {std::log(pop[e]) - std::log(-std::log((rng() + 0.5) / 4294967296.0)), e};
        std::partial_sort(key.begin(), key.begin() + s.k, key.end(), std::greater<>());
        for (int j = 0; j < s.k; ++j) {
          hids[r2 * P + t * s.k + j] = key[j].second;
          seen[key[j].second] = 1;
          hw[r2 * P + t * s.k + j] =
              l.exact ? (j % 2 ? 0.5f : 1.0f) : (0.5f + (rng() & 255) / 256.0f) / s.k;
        }
      }
      for (int e : seen) touched += e;
    }
    touched /= R;
    ids = alloc<int32_t>(P * R);
    weights = alloc<float>(P * R);
    CHECK(cudaMemcpy(ids, hids.data(), P * R * 4, cudaMemcpyHostToDevice));
    CHECK(cudaMemcpy(weights, hw.data(), P * R * 4, cudaMemcpyHostToDevice));
    pair_of_row = alloc<int32_t>(P);
    row_of_pair = alloc<int32_t>(P);
    weight_of_row = alloc<float>(P);
    max_groups = (int)max_group_records(P, s.E, 32);
    groups = alloc<GroupRecord>(max_groups);
    done = alloc<uint32_t>(max_groups);
    control = alloc<uint32_t>(2);
    block_counts = alloc<int32_t>(kMaxAlignBlocks * s.E);
    band_done = alloc<uint32_t>(256);
    x = alloc<__nv_bfloat16>((size_t)M * s.H);
    out = alloc<__nv_bfloat16>((size_t)M * s.H);
    if (l.fp8) {
      xq = alloc<uint8_t>((size_t)M * s.H);
      xs = alloc<float>(xstride * ((s.H + 127) / 128));
    }
    inner = alloc<std::byte>(P * s.I * (l.fp8 ? 1 : 2));
    inner_scale = alloc<float>(istride * ((s.I + 127) / 128));
    y2 = alloc<uint16_t>(P * s.H);
    make_tokens<<<1024, 256>>>(l.exact, (int64_t)M * s.H, x);
  }
  ~Run() {
    for (void* p : owned) cudaFree(p);
  }
  GroupedParams params() {
    const auto& s = l.shape;
    GroupedParams p;
    p.w13 = l.w13;
    p.w2 = l.w2;
    p.w13_scale = l.sc13;
    p.w2_scale = l.sc2;
    p.x = l.fp8 ? (std::byte*)xq : (std::byte*)x;
    p.x_scale = xs;
    p.x_scale_stride = xstride;
    p.inner = inner;
    p.inner_scale = inner_scale;
    p.inner_scale_stride = istride;
    p.y2 = y2;
    p.groups = groups;
    p.pair_of_row = pair_of_row;
    p.weight_of_row = weight_of_row;
    p.next_item = control;
    p.num_groups = control + 1;
    p.group_done = done;
    p.top_k = s.k;
    p.hidden = s.H;
    p.intermediate = s.I;
    p.bands1 = l.s13.bands();
    p.bands2 = l.s2.bands();
    p.slabs1 = l.s13.slabs();
    p.slabs2 = l.s2.slabs();
    p.chunks1 = l.s13.chunks();
    p.chunks2 = l.s2.chunks();
    p.row_bytes1 = l.s13.row_bytes();
    p.row_bytes2 = l.s2.row_bytes();
    p.limit = INFINITY;
    p.alpha = 1;
    p.beta = 0;
    return p;
  }
  void chain(cudaStream_t st, int r, int stages = 15) {
    const auto& s = l.shape;
    QuantRowsParams q;
    q.x = reinterpret_cast<const std::uint16_t*>(x);
    q.tokens = M;
    q.columns = s.H;
    q.q = xq;
    q.scale = xs;
    q.scale_stride = xstride;
    if (stages & 2) {
      AlignParams a;
      a.topk_ids = ids + r * P;
      a.topk_weights = weights + r * P;
      a.pairs = P;
      a.num_experts = s.E;
      a.num_local_experts = s.E;
      a.rows_per_record = rows_per_record(v);
      a.max_groups = max_groups;
      a.pair_of_row = pair_of_row;
      a.weight_of_row = weight_of_row;
      a.row_of_pair = row_of_pair;
      a.groups = groups;
      a.group_done = done;
      a.next_item = control;
      a.num_groups = control + 1;
      a.block_counts = block_counts;
      a.band_done = band_done;
      a.bands = l.s2.bands();
      CHECK(launch_align(a, l.fp8 ? &q : nullptr, st));
    }
    CombineParams c;
    c.y2 = y2;
    c.row_of_pair = row_of_pair;
    c.tokens = M;
    c.top_k = s.k;
    c.hidden = s.H;
    c.output = out;
    GroupedParams g = params();
    g.fold_combine = M <= kFoldCombineTokens && v.max_columns <= 64;
    g.combine = c;
    g.band_done = band_done;
    if (stages & 4) CHECK(launch_grouped(v, g, sms, st));
    if ((stages & 8) && !g.fold_combine) CHECK(launch_combine(c, st));
  }
  // Returns relative L2 error against float64 (exact: number of different elements).
  double check(int r) {
    const auto& s = l.shape;
    CHECK(cudaMemset(out, 0xFF, (size_t)M * s.H * 2));
    CHECK(cudaMemset(y2, 0xFF, P * s.H * 2));
    CHECK(cudaMemset(inner, 0xFF, P * s.I * (l.fp8 ? 1 : 2)));
    chain(0, r);
    CHECK(cudaDeviceSynchronize());
    const int n = std::min(M, 8);
    std::vector<int32_t> sample(n);
    for (int i = 0; i < n; ++i) sample[i] = (int64_t)i * (M - 1) / std::max(1, n - 1);
    int32_t* dt;
    double *di, *dout;
    void* q;
    float* qs;
    const int64_t rows = (int64_t)n * s.k;
    CHECK(cudaMalloc(&dt, n * 4));
    CHECK(cudaMalloc(&di, rows * s.I * 8));
    CHECK(cudaMalloc(&dout, (int64_t)n * s.H * 8));
    CHECK(cudaMalloc(&q, rows * s.I * 2));
    CHECK(cudaMalloc(&qs, rows * ((s.I + 127) / 128) * 4));
    CHECK(cudaMemcpy(dt, sample.data(), n * 4, cudaMemcpyHostToDevice));
    Data d{l.exact, l.fp8, s.H, s.I};
    ref_gemm1<<<dim3((s.I + 7) / 8, rows), 256>>>(d, dt, s.k, ids + r * P,
                                                  l.fp8 ? (void*)xq : (void*)x, xs, xstride, di);
    ref_requant<<<(rows * ((s.I + 127) / 128) + 127) / 128, 128>>>(d, di, rows, q, qs);
    ref_gemm2<<<dim3((s.H + 7) / 8, n), 256>>>(d, dt, s.k, ids + r * P, weights + r * P, q, qs,
                                               rows, dout);
    std::vector<double> ref((size_t)n * s.H);
    std::vector<uint16_t> got((size_t)M * s.H);
    CHECK(cudaMemcpy(ref.data(), dout, ref.size() * 8, cudaMemcpyDeviceToHost));
    CHECK(cudaMemcpy(got.data(), out, got.size() * 2, cudaMemcpyDeviceToHost));
    cudaFree(dt);
    cudaFree(di);
    cudaFree(dout);
    cudaFree(q);
    cudaFree(qs);
    double num = 0, den = 0;
    int64_t wrong = 0;
    for (int i = 0; i < n; ++i)
      for (int h = 0; h < s.H; ++h) {
        uint32_t b = (uint32_t)got[(int64_t)sample[i] * s.H + h] << 16;
        float f;
        std::memcpy(&f, &b, 4);
        const double rr = ref[(int64_t)i * s.H + h];
        num += (f - rr) * (f - rr);
        den += rr * rr;
        wrong += !(f == (float)rr);
      }
    if (l.exact) {
      std::printf("[exact den %.3g wrong %lld rel %.2e] ", den, (long long)wrong,
                  std::sqrt(num / den));
      return (double)wrong;
    }
    return std::sqrt(num / den);
  }
  // us per routing, median of replays
  double time(int stages, double* spread = nullptr) {
    cudaStream_t st;
    CHECK(cudaStreamCreate(&st));
    cudaGraph_t g;
    cudaGraphExec_t ge;
    CHECK(cudaStreamBeginCapture(st, cudaStreamCaptureModeThreadLocal));
    for (int r = 0; r < R; ++r) chain(st, r, stages);
    CHECK(cudaStreamEndCapture(st, &g));
    CHECK(cudaGraphInstantiate(&ge, g, 0));
    cudaEvent_t a, b;
    cudaEventCreate(&a);
    cudaEventCreate(&b);
    for (int i = 0; i < 3; ++i) CHECK(cudaGraphLaunch(ge, st));
    std::vector<float> t;
    float spent = 0;
    for (int i = 0; i < 40 && (i < 7 || spent < 60); ++i) {
      cudaEventRecord(a, st);
      CHECK(cudaGraphLaunch(ge, st));
      cudaEventRecord(b, st);
      CHECK(cudaEventSynchronize(b));
      float ms;
      cudaEventElapsedTime(&ms, a, b);
      t.push_back(ms);
      spent += ms;
    }
    std::sort(t.begin(), t.end());
    if (spread) *spread = (t[t.size() * 3 / 4] - t[t.size() / 4]) / t[t.size() / 2];
    cudaGraphExecDestroy(ge);
    cudaGraphDestroy(g);
    cudaEventDestroy(a);
    cudaEventDestroy(b);
    cudaStreamDestroy(st);
    return t[t.size() / 2] * 1000.0 / R;
  }
};

int main(int argc, char** argv) {
  setvbuf(stdout, nullptr, _IOLBF, 0);
  Options o;
  for (int i = 1; i < argc; ++i) {
    const std::string a = argv[i];
    if (a == "--shape")
      o.shape = argv[++i];
    else if (a == "--format")
      o.format = argv[++i];
    else if (a == "--m") {
      for (char* t = strtok(argv[++i], ","); t; t = strtok(nullptr, ",")) o.ms.push_back(atoi(t));
    } else if (a == "--check")
      o.check = true;
    else if (a == "--exact")
      o.check = o.exact = true;
    else if (a == "--variants")
      o.variants = true;
    else if (a == "--profile")
      o.profile = true;
    else if (a == "--columns")
      o.columns = atoi(argv[++i]);
    else if (a == "--routings")
      o.routings = atoi(argv[++i]);
    else if (a == "--sms")
      o.sms = atoi(argv[++i]);
    else if (a == "--zipf")
      o.zipf = atof(argv[++i]);
  }
  cudaDeviceProp prop;
  CHECK(cudaGetDeviceProperties(&prop, 0));
  const int sms = o.sms ? o.sms : prop.multiProcessorCount;
  double bw = 3.14e6;
  {
    uint4* p;
    const int64_t n = (int64_t)4 << 30;
    CHECK(cudaMalloc(&p, n));
    CHECK(cudaMemset(p, 1, n));
    uint32_t* sink;
    CHECK(cudaMalloc(&sink, 4));
    cudaEvent_t a, b;
    cudaEventCreate(&a);
    cudaEventCreate(&b);
    float best = 1e9;
    for (int i = 0; i < 6; ++i) {
      cudaEventRecord(a);
      read_plain<<<132 * 4, 512>>>(p, n / 16, sink);
      cudaEventRecord(b);
      CHECK(cudaEventSynchronize(b));
      float ms;
      cudaEventElapsedTime(&ms, a, b);
      best = std::min(best, ms);
    }
    bw = n / (best * 1e3);
    cudaFree(p);
    cudaFree(sink);
    std::printf("%s, %d SMs, read-only %.3f TB/s\n", prop.name, prop.multiProcessorCount, bw / 1e6);
  }
  for (const auto& s : kShapes) {
    if (o.shape == "all" ? std::strncmp(s.name, "tiny", 4) == 0 : o.shape != s.name) continue;
    for (int f = 0; f < 2; ++f) {
      const bool fp8 = f == 0;
      if (o.format != "all" && o.format != (fp8 ? "fp8" : "bf16")) continue;
      if (!fp8 && o.format == "all" && std::string(s.name) == "deepseek-v3") continue;
      if (fp8 && (s.H % 16 || s.I % 128)) continue;
      Layer layer;
      layer.make(s, fp8, o.exact);
      const auto peers = kPeers.find(std::string(s.name) + (fp8 ? "/fp8" : "/bf16"));
      std::vector<int> ms =
          o.ms.empty() ? std::vector<int>(std::begin(kPeerM), std::end(kPeerM)) : o.ms;
      for (int M : ms) {
        Run run(layer, M,
                o.check      ? 1
                : o.routings ? o.routings
                : M <= 256   ? 8
                : M <= 1024  ? 4
                             : 2,
                o.zipf);
        run.sms = sms;
        const double bytes = run.touched * 3.0 * s.H * s.I * (fp8 ? 1 : 2),
                     flops = 6.0 * run.P * s.H * s.I;
        const double floor = std::max(bytes / bw, flops / (fp8 ? 1.43e9 : 0.75e9));
        double peer = 0;
        for (int i = 0; i < 11; ++i)
          if (kPeerM[i] == M && peers != kPeers.end()) peer = peers->second[i];
        std::printf("%-12s %-4s M %5d floor %7.1f peer %7.1f |", s.name, fp8 ? "fp8" : "bf16", M,
                    floor, peer);
        const double rpe = (double)run.P / s.E;
        struct {
          int cols;
          bool pair;
        } list[] = {{32, false}, {64, false}, {128, false}, {128, true}};
        double best = 1e18;
        for (auto& c : list) {
          if (!o.check && ((c.cols == 32 && rpe > 32) || (c.cols == 64 && rpe > 128) ||
                           (c.cols == 128 && rpe < 16) || (c.pair && rpe < 64)))
            continue;
          run.v = {fp8 ? GroupedFormat::kFp8Block : GroupedFormat::kBf16, EpilogueKind::kSwiglu,
                   c.cols, c.pair};
          if (o.columns != 0 && o.columns != c.cols + (c.pair ? 1 : 0)) continue;
          if (o.profile) {
            run.chain(0, 0);
            CHECK(cudaDeviceSynchronize());
            continue;
          }
          if (o.check) {
            std::printf(" %d%s: %.3g", c.cols, c.pair ? "p" : "", run.check(0));
            continue;
          }
          double spread;
          const double us = run.time(15, &spread);
          best = std::min(best, us);
          std::printf(" %d%s %.1f (%.1f%%, fl %.1f%%)", c.cols, c.pair ? "p" : "", us, 100 * spread,
                      100 * floor / us);
          if (o.variants) {
            run.time(15);
            std::printf(" [side %.1f]", run.time(11));
          }
        }
        if (!o.check && peer > 0) std::printf(" => %.2fx", peer / best);
        std::printf("\n");
      }
      layer.free();
    }
  }
  CHECK(cudaDeviceSynchronize());
  std::printf("done\n");
  return 0;
}
