// Routing inside the grouped-GEMM kernel (grouped_gemm.cuh), up to kRouteTokens tokens: every CTA
// routes for itself with all its warps, which saves the router's kernel and a way through memory.
// The same operations in the same order as router/sm90/warp_router.cuh, so the same bits; what differs is
// how the largest keys are found. Compiled with --fmad=false, as that file is.
#pragma once

#include <cstdint>

#include "cuda/fault.cuh"
#include "cuda/ptx/copy.cuh"
#include "experts/sm90/gemm_layout.cuh"
#include "numerics/portable_math.h"
#include "router/sm90/route_keys.cuh"

namespace moesaic::cuda {

// A thread's share of a token: the columns first, first + step ...
struct RouteShare {
  int token, part, warps;  // part: which of the token's warps
  int lane, first, step;
};

// 1 where (a, i) comes before (b, j): larger keys first, of equals the smaller position.
__device__ __forceinline__ int comes_before(std::uint32_t a, int i, std::uint32_t b, int j) {
  return (a > b || (a == b && i < j)) ? 1 : 0;
}

// Scores of the token's columns into t.scores and keys into t.keys. All threads of the CTA.
__device__ __forceinline__ void score_columns(const RouteParams& r, const RouteShare& s,
                                              const float* biases, RoutedToken& t) {
  constexpr std::uint32_t kSpoiled = 0xFFFFFFFFU;  // above every number
  constexpr int kMostItems = (kRouteColumns + 95) / 96;
  const bool softmax = r.scoring == ScoringFunc::kSoftmax;
  const bool grouped = r.method == RoutingMethod::kGroupedTopK;
  const float* const row = r.logits + s.token * r.columns;
  std::uint32_t top = kTaken;
#pragma unroll
  for (int i = 0; i < kMostItems; ++i) {
    const int c = s.first + i * s.step;
    if (c >= r.columns) continue;
    const float x = row[c];
    t.scores[c] = x;
    const std::uint32_t key = x != x ? kSpoiled : key_of(x);
    top = key > top ? key : top;
  }
  float max = 0, sum = 1;
  bool spoiled = false;
  if (softmax) {
    top = __reduce_max_sync(kAllLanes, top);
    if (s.lane == 0) t.tops[s.part] = top;
    __syncthreads();
    top = __reduce_max_sync(kAllLanes, s.lane < s.warps ? t.tops[s.lane] : kTaken);
    max = value_of(top);
    spoiled = top == kSpoiled || max - max != 0;
  }
#pragma unroll 1
  for (int c = s.first; c < r.columns; c += s.step) {
    const float x = t.scores[c];
    const float e = portable_exp(softmax ? x - max : x < 0 ? x : -x);
    float score = e;
    if (!softmax) score = x != x ? 0.0F : __fdiv_rn(x >= 0 ? 1.0F : e, 1.0F + e);
    t.scores[c] = spoiled ? 0.0F : score;
    t.keys[c] = x - x == 0 ? 1 : 0;  // until the keys are made: whether it is finite
  }
  if (softmax) {
    __syncthreads();
    sum = 0;
    for (int c = s.lane; c < r.columns; c += 32) sum += t.scores[c];
    sum = add_lanes(sum);
    __syncthreads();
  }
#pragma unroll 1
  for (int c = s.first; c < r.columns; c += s.step) {
    float score = t.scores[c];
    if (softmax && !spoiled) score = __fdiv_rn(score, sum);
    std::uint32_t key = key_of(r.bias != nullptr ? score + biases[c] : score);
    MOESAIC_CUDA_FAULT(cuda_routing_in_the_kernel_ignores_the_bias, key = key_of(score);)
    if (grouped && (spoiled || t.keys[c] == 0)) {
      key = kMinusInfinityKey;
      score = 0;
    }
    t.scores[c] = score;
    t.keys[c] = key;
  }
  __syncthreads();
}

// A group's rank: its best key, or with a bias the sum of its two best. One warp.
__device__ __forceinline__ std::uint32_t rank_of_group(const RouteParams& r, const RouteShare& s,
                                                       const std::uint32_t* keys, int size) {
  std::uint32_t first = kTaken, second = kTaken;
  for (int m = s.lane; m < size; m += 32) {
    const std::uint32_t key = keys[m];
    if (key > first) {
      second = first;
      first = key;
    } else if (key > second) {
      second = key;
    }
  }
  const std::uint32_t rank = __reduce_max_sync(kAllLanes, first);
  if (r.bias == nullptr) return rank;
  const int owner = __ffs(static_cast<int>(__ballot_sync(kAllLanes, first == rank))) - 1;
  const std::uint32_t next = __reduce_max_sync(kAllLanes, s.lane == owner ? second : first);
  const float other = next == kTaken ? minus_infinity() : value_of(next);
  return key_of(value_of(rank) + other);
}

// Takes away the keys of columns outside the best groups. False: these have no candidates. All
// threads of the CTA.
__device__ __forceinline__ bool keep_best_groups(const RouteParams& r, const RouteShare& s,
                                                 RoutedToken& t) {
  const int size = r.columns / r.groups;
  for (int g = s.part; g < r.groups; g += s.warps) {
    const std::uint32_t rank = rank_of_group(r, s, t.keys + g * size, size);
    if (s.lane == 0) t.group_keys[g] = rank;
  }
  __syncthreads();
  const bool is_group = s.lane < r.groups;
  const std::uint32_t mine = is_group ? t.group_keys[s.lane] : kTaken;
  int before = is_group ? 0 : r.groups;
  for (int g = 0; g < r.groups; ++g)
    before += comes_before(__shfl_sync(kAllLanes, mine, g), g, mine, s.lane);
  const unsigned kept = __ballot_sync(kAllLanes, before < r.topk_group);
  const bool last = before == r.topk_group - 1;
  const bool any = __any_sync(kAllLanes, last && mine != kMinusInfinityKey) != 0;
  for (int c = s.first; c < r.columns; c += s.step) {
    if ((kept >> (c / size) & 1) == 0) t.keys[c] = kTaken;
  }
  __syncthreads();
  return any;
}

// The top_k largest keys, in order, of equals the smaller column: ids and weights. One warp.
__device__ __forceinline__ void select_columns(const RouteParams& r, int lane, RoutedToken& t,
                                               std::int32_t* ids, float* weights) {
  std::uint32_t best = kTaken;
#pragma unroll 4
  for (int c = lane; c < r.columns; c += 32) {
    const std::uint32_t key = t.keys[c];
    best = key > best ? key : best;
  }
  // Of the lanes' best keys the top_k-th bounds the top_k-th of all.
  t.candidates[lane] = best;
  __syncwarp();
  int at_least = 0;
#pragma unroll
  for (int j = 0; j < 32; j += 4) {
    const uint4 four = *reinterpret_cast<const uint4*>(t.candidates + j);
    at_least += (four.x >= best ? 1 : 0) + (four.y >= best ? 1 : 0) + (four.z >= best ? 1 : 0) +
                (four.w >= best ? 1 : 0);
  }
  const std::uint32_t bound = __reduce_max_sync(kAllLanes, at_least >= r.top_k ? best : kTaken);
  __syncwarp();
  t.candidates[lane] = kTaken;
  __syncwarp();
  int count = 0;
#pragma unroll 4
  for (int c0 = 0; c0 < r.columns; c0 += 32) {
    const int c = c0 + lane;
    const std::uint32_t key = c < r.columns ? t.keys[c] : kTaken;
    const bool candidate = c < r.columns && key >= bound;
    const unsigned all = __ballot_sync(kAllLanes, candidate);
    const int at = count + __popc(all & ((1U << lane) - 1));
    if (candidate && at < 32) {
      t.candidates[at] = key;
      t.columns[at] = c;
    }
    count += __popc(all);
  }
  __syncwarp();
  if (count <= 32) {
    const std::uint32_t mine = t.candidates[lane];
    int at = 0;
#pragma unroll 1
    for (int j = 0; j < count; j += 8) {
      const uint4 a = *reinterpret_cast<const uint4*>(t.candidates + j);
      const uint4 b = *reinterpret_cast<const uint4*>(t.candidates + j + 4);
      at += comes_before(a.x, j, mine, lane) + comes_before(a.y, j + 1, mine, lane) +
            comes_before(a.z, j + 2, mine, lane) + comes_before(a.w, j + 3, mine, lane) +
            comes_before(b.x, j + 4, mine, lane) + comes_before(b.y, j + 5, mine, lane) +
            comes_before(b.z, j + 6, mine, lane) + comes_before(b.w, j + 7, mine, lane);
    }
    if (lane < count && at < r.top_k) {
      ids[at] = t.columns[lane];
      weights[at] = t.scores[t.columns[lane]];
    }
    __syncwarp();
    return;
  }
  // Many equals: one after the other.
  for (int j = 0; j < r.top_k; ++j) {
    std::uint32_t key = kTaken;
    int column = lane;
    for (int c = lane; c < r.columns; c += 32) {
      if (t.keys[c] > key) {
        key = t.keys[c];
        column = c;
      }
    }
    const std::uint32_t top = __reduce_max_sync(kAllLanes, key);
    const auto chosen = static_cast<int>(
        __reduce_min_sync(kAllLanes, key == top ? static_cast<unsigned>(column) : 0xFFFFFFFFU));
    if (lane == chosen % 32) {
      t.keys[chosen] = kTaken;
      ids[j] = chosen;
      weights[j] = t.scores[chosen];
    }
    __syncwarp();
  }
}

// Weights that the kernel will read whatever the routing, into L2. One thread of each CTA.
__device__ __forceinline__ void prefetch_ahead(const GroupedParams& p, int band_bytes) {
  for (int i = static_cast<int>(blockIdx.x); i < p.ahead.bands * p.ahead.chunks;
       i += static_cast<int>(gridDim.x)) {
    const int band = i / p.ahead.chunks, chunk = i - band * p.ahead.chunks;
    const std::int64_t image = static_cast<std::int64_t>(band) * p.chunks1 + chunk;
    ptx::bulk_prefetch(p.ahead.weights + image * band_bytes, band_bytes);
  }
}

// The part that may run before the kernels in front have ended. All threads of the CTA.
template <int kThreads>
__device__ __forceinline__ void prepare_routing(const GroupedParams& p, SharedList& list) {
  if (p.own_list.route.bias == nullptr) return;
  for (int c = static_cast<int>(threadIdx.x); c < p.own_list.route.columns; c += kThreads)
    list.biases[c] = p.own_list.route.bias[c];
  __syncthreads();
}

// Ids and weights of all tokens into the list; the first CTA also into memory, for others. All
// threads of the CTA, whose warps the tokens share evenly: 20 warps of three tokens leave two that
// have no columns, but pass the barriers.
template <int kThreads>
__device__ __forceinline__ void route_tokens(const GroupedParams& p, SharedList& list) {
  const RouteParams& r = p.own_list.route;
  const int warp = static_cast<int>(threadIdx.x) >> 5;
  RouteShare s;
  s.lane = static_cast<int>(threadIdx.x) & 31;
  s.warps = kThreads / 32 / static_cast<int>(r.tokens);
  s.token = warp / s.warps;
  s.part = warp - s.token * s.warps;
  s.first = s.part * 32 + s.lane;
  s.step = s.warps * 32;
  static_assert((kThreads / 32 - 1) / (kThreads / 32 / 3) < kRouteTokens);
  bool spare = s.token >= static_cast<int>(r.tokens);
  MOESAIC_CUDA_FAULT(cuda_routing_in_the_kernel_routes_a_token_more, spare = false;)
  if (spare) s.part = s.warps, s.first = r.columns;
  RoutedToken& t = list.routed[s.token];
  score_columns(r, s, list.biases, t);
  const bool grouped = r.method == RoutingMethod::kGroupedTopK;
  const bool usual = !grouped || keep_best_groups(r, s, t);
  if (s.part != 0) return;
  std::int32_t* const ids = list.ids + s.token * p.top_k;
  float* const weights = list.weights + s.token * p.top_k;
  const int j = s.lane;
  float weight = 0;
  if (usual) {
    select_columns(r, s.lane, t, ids, weights);
    float sum = 1;
    if (r.renormalize) {
      sum = (grouped ? 1e-20F : 0.0F) + r.renorm_epsilon;
      for (int i = 0; i < r.top_k; ++i) sum += weights[i];
      if (r.renorm_floor > 0) {
        sum = sum < r.renorm_floor ? r.renorm_floor : sum;
      } else if (sum <= 0) {
        sum = 1;
      }
    }
    MOESAIC_CUDA_FAULT(cuda_routing_in_the_kernel_does_not_renormalise, sum = 1;)
    weight = j < r.top_k ? __fdiv_rn(weights[j], sum) * r.scale : 0.0F;
  } else {
    if (j < r.top_k) ids[j] = j;
    weight = __fdiv_rn(1.0F, static_cast<float>(r.top_k));
  }
  __syncwarp();
  if (j >= r.top_k + r.num_shared) return;
  if (j >= r.top_k) {
    ids[j] = r.num_experts + j - r.top_k;
    weight = r.shared_weight;
    MOESAIC_CUDA_FAULT(cuda_routing_in_the_kernel_loses_the_joined_expert, weight = 0;)
  }
  weights[j] = weight;
  if (blockIdx.x != 0) return;
  r.ids[s.token * p.top_k + j] = ids[j];
  r.weights[s.token * p.top_k + j] = weight;
}

}  // namespace moesaic::cuda
