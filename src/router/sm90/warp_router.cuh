// The router of one token by one warp: scores, choice, weights, as router/route_row.cc has them.
// Compiled with --fmad=false: products and sums round separately, as on the CPU.
#pragma once

#include <cuda_runtime.h>

#include "cuda/element.cuh"
#include "cuda/fault.cuh"
#include "cuda/ptx/sync.cuh"
#include "router/scoring.h"
#include "router/sm90/route.h"
#include "router/sm90/route_keys.cuh"

namespace moesaic::cuda {

// A warp's part of the block's dynamic shared memory.
struct Scratch {
  float* weights;             // [top_k]
  std::int32_t* ids;          // [top_k]
  std::uint32_t* keys;        // grouped: [columns]
  std::uint32_t* group_keys;  // grouped: [groups]
};
__host__ __device__ inline int scratch_words(const RouteParams& p) {
  const bool grouped = p.method == RoutingMethod::kGroupedTopK;
  return 2 * p.top_k + (grouped ? p.columns + p.groups : 0);
}

// One token. Lane l holds the columns l, l + 32 ...; all indices into its arrays are constants.
template <int kItems>
class WarpRouter {
 public:
  __device__ WarpRouter(const RouteParams& p, const Scratch& s, int lane)
      : p_(p), s_(s), lane_(lane) {}

  __device__ void run(std::int64_t token) {
    load_row(token);
    float zero_weight = 0;
    switch (p_.method) {
      case RoutingMethod::kTopK:
        score();
        select_with(p_.bias);
        renormalize_and_scale(0.0F);
        if (p_.expert_scale != nullptr) scale_by_expert();
        break;
      case RoutingMethod::kGroupedTopK:
        if (grouped()) renormalize_and_scale(1e-20F);
        break;
      case RoutingMethod::kHash:
        score();
        if (!take_from_table(token)) return;
        renormalize_and_scale(0.0F);
        break;
      case RoutingMethod::kTopKSoftmax:
        softmax_of_selected();
        break;
      case RoutingMethod::kLlama4:
        select_raw();
        for (int j = lane_; j < p_.top_k; j += 32) {
          const float logit = s_.weights[j];
          s_.weights[j] = logit == logit ? router::sigmoid(logit) : p_.keeps_nan ? logit : 0.0F;
          MOESAIC_CUDA_FAULT(cuda_router_sigmoid_of_the_selected_missing, s_.weights[j] = 1.0F;)
        }
        break;
      case RoutingMethod::kSparseMixer:
        sparse_mixer();
        break;
      case RoutingMethod::kPNorm:
        score();
        select_with(p_.bias);
        divide_by_p_norm();
        break;
      case RoutingMethod::kZeroExpert:
        score();
        select_with(p_.bias);
        renormalize_and_scale(0.0F);
        zero_weight = drop_zero_experts();
        break;
      default:
        break;  // refused on the host
    }
    store(token, zero_weight);
  }

  // A row without experts.
  __device__ void erase(std::int64_t token) {
    const int slots = p_.top_k + p_.num_shared;
    for (int j = lane_; j < slots; j += 32) {
      put_id(token * slots + j, -1);
      p_.weights[token * slots + j] = 0;
    }
    if (p_.zero_weight != nullptr && lane_ == 0) p_.zero_weight[token] = 0;
  }

 private:
  __device__ int column(int i) const { return i * 32 + lane_; }
  __device__ bool live(int i) const { return column(i) < p_.columns; }

  __device__ void load_row(std::int64_t token) {
    const std::int64_t first = token * p_.columns;
    if (p_.logits != nullptr) {
      const float* const row = p_.logits + first;
#pragma unroll
      for (int i = 0; i < kItems; ++i) logit_[i] = live(i) ? row[column(i)] : 0.0F;
      return;
    }
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      logit_[i] =
          live(i) ? load_element(p_.narrow_logits, p_.narrow_dtype, first + column(i)) : 0.0F;
      MOESAIC_CUDA_FAULT(
          cuda_router_narrow_logits_of_the_first_row,
          logit_[i] = live(i) ? load_element(p_.narrow_logits, p_.narrow_dtype, column(i)) : 0.0F;)
    }
  }
  __device__ void put_id(std::int64_t at, std::int32_t id) const {
    if (p_.wide_ids != nullptr) {
      p_.wide_ids[at] = id;
    } else {
      p_.ids[at] = id;
    }
  }

  __device__ void score() {
    if (p_.scoring == ScoringFunc::kSoftmax) {
      softmax();
      return;
    }
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      const float x = logit_[i];
      const float s = p_.scoring == ScoringFunc::kSigmoid ? router::sigmoid(x)
                                                          : __fsqrt_rn(portable_softplus(x));
      score_[i] = x != x ? 0.0F : s;
    }
  }

  __device__ void softmax() {
    bool has_nan = false;
    std::uint32_t top = kTaken;
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      has_nan = has_nan || (live(i) && logit_[i] != logit_[i]);
      const std::uint32_t key = live(i) ? key_of(logit_[i]) : kTaken;
      top = key > top ? key : top;
    }
    has_nan = __any_sync(kAllLanes, has_nan) != 0;
    const float max = value_of(__reduce_max_sync(kAllLanes, top));
    if (has_nan || max - max != 0) {  // infinite
#pragma unroll
      for (int i = 0; i < kItems; ++i) score_[i] = 0;
      return;
    }
    float sum = 0;
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      score_[i] = live(i) ? portable_exp(logit_[i] - max) : 0.0F;
      sum += score_[i];
    }
    sum = add_lanes(sum);
#pragma unroll
    for (int i = 0; i < kItems; ++i) score_[i] = __fdiv_rn(score_[i], sum);
  }

  // The largest remaining key and its column, the smallest of equals; taken away.
  __device__ std::uint32_t pick(int& column_out) {
    std::uint32_t best = kTaken;
    int item = 0;
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      if (key_[i] > best) {
        best = key_[i];
        item = i;
      }
    }
    const std::uint32_t top = __reduce_max_sync(kAllLanes, best);
    const unsigned mine = best == top ? static_cast<unsigned>(column(item)) : kAllLanes;
    column_out = static_cast<int>(__reduce_min_sync(kAllLanes, mine));
    MOESAIC_CUDA_FAULT(cuda_router_ties_take_the_larger_column,
                       const unsigned last = best == top ? static_cast<unsigned>(column(item)) : 0;
                       column_out = static_cast<int>(__reduce_max_sync(kAllLanes, last));)
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      if (column(i) == column_out) key_[i] = kTaken;
    }
    return top;
  }

  // top_k picks by key_, each with its entry of `value`.
  __device__ void select(const float (&value)[kItems]) {
    for (int j = 0; j < p_.top_k; ++j) {
      int best = 0;
      pick(best);
#pragma unroll
      for (int i = 0; i < kItems; ++i) {
        if (column(i) == best) {
          s_.ids[j] = best;
          s_.weights[j] = value[i];
        }
      }
    }
    __syncwarp();
  }
  __device__ void select_with(const float* bias) {
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      const float b = bias != nullptr && live(i) ? bias[column(i)] : 0.0F;
      key_[i] = live(i) ? key_of(bias != nullptr ? score_[i] + b : score_[i]) : kTaken;
      MOESAIC_CUDA_FAULT(cuda_router_ignores_the_bias,
                         key_[i] = live(i) ? key_of(score_[i]) : kTaken;)
    }
    select(score_);
  }
  __device__ void select_raw() {
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      const bool nan = logit_[i] != logit_[i];
      key_[i] = !live(i) ? kTaken : nan ? kMinusInfinityKey : key_of(logit_[i]);
    }
    select(logit_);
  }

  __device__ float sum_of_weights(float start) const {
    float sum = start;
    for (int j = 0; j < p_.top_k; ++j) sum += s_.weights[j];
    return sum;
  }
  __device__ void divide_and_scale(float divisor) {
    __syncwarp();  // everyone has read the weights
    for (int j = lane_; j < p_.top_k; j += 32) {
      s_.weights[j] = __fdiv_rn(s_.weights[j], divisor) * p_.scale;
    }
    __syncwarp();
  }
  __device__ void renormalize_and_scale(float start) {
    float sum = 1;
    if (p_.renormalize) {
      sum = sum_of_weights(start + p_.renorm_epsilon);
      if (p_.renorm_floor > 0) {
        sum = sum < p_.renorm_floor ? p_.renorm_floor : sum;
      } else if (sum <= 0) {
        sum = 1;
      }
    }
    MOESAIC_CUDA_FAULT(cuda_router_does_not_renormalise, sum = 1;)
    divide_and_scale(sum);  // dividing by 1 changes nothing
  }

  __device__ void scale_by_expert() {
    MOESAIC_CUDA_FAULT(cuda_router_forgets_the_expert_scale, return;)
    for (int j = lane_; j < p_.top_k; j += 32) s_.weights[j] *= p_.expert_scale[s_.ids[j]];
    __syncwarp();
  }

  __device__ void softmax_of_selected() {
    select_raw();
    const float max = s_.weights[0];
    __syncwarp();
    for (int j = lane_; j < p_.top_k; j += 32) {
      const float e = portable_exp(s_.weights[j] - max);
      s_.weights[j] = e != e ? 0.0F : e;
    }
    __syncwarp();
    const float sum = sum_of_weights(0.0F);
    divide_and_scale(sum <= 0 ? 1.0F : sum);
  }

  __device__ void divide_by_p_norm() {
    float norm = 0;
    if (p_.p_norm == 1.0F) {
      norm = sum_of_weights(0.0F);
    } else {
      float max = s_.weights[0];
      for (int j = 1; j < p_.top_k; ++j) max = max < s_.weights[j] ? s_.weights[j] : max;
      if (max > 0) {
        float sum = 0;
        for (int j = 0; j < p_.top_k; ++j) {
          sum += portable_pow(__fdiv_rn(s_.weights[j], max), p_.p_norm);
        }
        norm = max * portable_pow(sum, __fdiv_rn(1.0F, p_.p_norm));
      }
    }
    divide_and_scale(norm <= 0 ? 1.0F : norm);
  }

  __device__ float drop_zero_experts() {
    float zero_weight = 0;
    for (int j = 0; j < p_.top_k; ++j) {
      if (s_.ids[j] >= p_.num_experts) zero_weight += s_.weights[j];
    }
    __syncwarp();
    for (int j = lane_; j < p_.top_k; j += 32) {
      if (s_.ids[j] < p_.num_experts) continue;
      s_.ids[j] = 0;
      s_.weights[j] = 0;
    }
    __syncwarp();
    MOESAIC_CUDA_FAULT(cuda_router_loses_the_weight_of_zero_experts, zero_weight = 0;)
    return zero_weight;
  }

  // False: the row is written, without experts.
  __device__ bool take_from_table(std::int64_t token) {
    const std::int32_t id = p_.input_ids[token];
    if (p_.vision_base > 0 && id >= p_.vision_base && id - p_.vision_base < 5) {
      select_with(p_.vision_bias);
      return true;
    }
    if (id < 0 || id >= p_.vocab) {
      erase(token);
      return false;
    }
    for (int j = 0; j < p_.top_k; ++j) {
      const std::int32_t e = p_.hash_table[static_cast<std::int64_t>(id) * p_.top_k + j];
#pragma unroll
      for (int i = 0; i < kItems; ++i) {
        if (column(i) == e) {
          s_.ids[j] = e;
          s_.weights[j] = score_[i];
        }
      }
    }
    __syncwarp();
    return true;
  }

  __device__ void sparse_mixer() {
    int first = -1;
    for (int turn = 0; turn < 2; ++turn) {
      int best = 0;
#pragma unroll
      for (int i = 0; i < kItems; ++i) {
        const bool nan = logit_[i] != logit_[i];
        const bool candidate = live(i) && column(i) != first;
        key_[i] = !candidate ? kTaken : nan ? kNanKey : key_of(logit_[i]);
      }
      const std::uint32_t top = pick(best);
      const float max = value_of(top);
      float weight = 0;
      if (top != kNanKey && max - max == 0) {
        float sum = 0;
#pragma unroll
        for (int i = 0; i < kItems; ++i) {
          const float x = logit_[i];
          const float size = fabsf(x);
          const float divisor = size < max ? max : size;
          const bool too_far = __fdiv_rn(max - x, divisor) > 2 * p_.jitter_eps;
          if (live(i) && column(i) != first && x == x && !too_far) sum += portable_exp(x - max);
        }
        weight = __fdiv_rn(1.0F, add_lanes(sum));
      }
      if (lane_ == 0) {
        s_.ids[turn] = best;
        s_.weights[turn] = weight * p_.scale;
      }
      first = best;
    }
    __syncwarp();
  }

  // False when too few groups have candidates: the weights are final then.
  __device__ bool grouped() {
    score();
    bool positive = false;
#pragma unroll
    for (int i = 0; i < kItems; ++i) positive = positive || (live(i) && score_[i] > 0);
    const bool spoiled =
        p_.scoring == ScoringFunc::kSoftmax && __any_sync(kAllLanes, positive) == 0;
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      if (!live(i)) {
        key_[i] = kTaken;
        continue;
      }
      const bool candidate = !spoiled && logit_[i] - logit_[i] == 0;
      const float b = p_.bias != nullptr ? p_.bias[column(i)] : 0.0F;
      key_[i] = candidate ? key_of(score_[i] + b) : kMinusInfinityKey;
      if (!candidate) score_[i] = 0;
      s_.keys[column(i)] = key_[i];
    }
    __syncwarp();
    const int size = p_.columns / p_.groups;
    for (int g = 0; g < p_.groups; ++g) rank_group(g, size);
    __syncwarp();
    std::uint32_t last = kTaken;
    for (int i = 0; i < p_.topk_group; ++i) last = keep_best_group();
    if (last == kMinusInfinityKey) {
      for (int j = lane_; j < p_.top_k; j += 32) {
        s_.ids[j] = j;
        s_.weights[j] = __fdiv_rn(1.0F, static_cast<float>(p_.top_k));
      }
      __syncwarp();
      return false;
    }
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      if (live(i) && s_.group_keys[column(i) / size] != kTaken) key_[i] = kTaken;
    }
    select(score_);
    return true;
  }

  // A group's rank: its best candidate, or the sum of its two best.
  __device__ void rank_group(int g, int size) {
    std::uint32_t first = kTaken, second = kTaken;
    for (int m = lane_; m < size; m += 32) {
      const std::uint32_t key = s_.keys[g * size + m];
      if (key > first) {
        second = first;
        first = key;
      } else if (key > second) {
        second = key;
      }
    }
    std::uint32_t rank = __reduce_max_sync(kAllLanes, first);
    if (p_.groups_by_best_two) {
      const int owner = __ffs(static_cast<int>(__ballot_sync(kAllLanes, first == rank))) - 1;
      const std::uint32_t next = __reduce_max_sync(kAllLanes, lane_ == owner ? second : first);
      const float other = next == kTaken ? minus_infinity() : value_of(next);
      rank = key_of(value_of(rank) + other);
    }
    if (lane_ == 0) s_.group_keys[g] = rank;
  }

  // Marks the best group that is left (the smaller of equals) and returns its rank.
  __device__ std::uint32_t keep_best_group() {
    std::uint32_t best = kTaken;
    int at = 0;
    for (int g = lane_; g < p_.groups; g += 32) {
      if (s_.group_keys[g] > best) {
        best = s_.group_keys[g];
        at = g;
      }
    }
    const std::uint32_t top = __reduce_max_sync(kAllLanes, best);
    const auto winner = static_cast<int>(
        __reduce_min_sync(kAllLanes, best == top ? static_cast<unsigned>(at) : kAllLanes));
    if (lane_ == winner % 32) s_.group_keys[winner] = kTaken;
    __syncwarp();
    return top;
  }

  __device__ void store(std::int64_t token, float zero_weight) {
    const int slots = p_.top_k + p_.num_shared;
    for (int j = lane_; j < slots; j += 32) {
      const bool shared = j >= p_.top_k;
      put_id(token * slots + j, shared ? p_.num_experts + j - p_.top_k : s_.ids[j]);
      p_.weights[token * slots + j] = shared ? p_.shared_weight : s_.weights[j];
      MOESAIC_CUDA_FAULT(cuda_router_loses_the_joined_expert,
                         if (shared) p_.weights[token * slots + j] = 0;)
    }
    if (p_.zero_weight != nullptr && lane_ == 0) p_.zero_weight[token] = zero_weight;
  }

  const RouteParams& p_;
  const Scratch s_;
  const int lane_;
  float logit_[kItems], score_[kItems];
  std::uint32_t key_[kItems];
};

}  // namespace moesaic::cuda
