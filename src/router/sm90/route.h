// The router's kernel: logits -> ids and weights, one warp per token.
#pragma once

#include <cstdint>

#include "cuda/experts_prologue.h"
#include "moesaic/kinds.h"

namespace moesaic::cuda {

// Columns (experts and zero experts) that a warp holds in its registers.
inline constexpr std::int64_t kMaxRouteColumns = 1024;

// Device pointers and the rule of a call. slots = top_k + num_shared.
struct RouteParams {
  const float* logits = nullptr;             // [tokens, columns], or null and ...
  const void* narrow_logits = nullptr;       // ... the same of narrow_dtype, widened exactly
  const float* bias = nullptr;               // [columns] added for selection, or null
  const float* expert_scale = nullptr;       // kTopK: [columns], last factor of a weight, or null
  const float* vision_bias = nullptr;        // kHash: [columns] or null
  const std::int32_t* hash_table = nullptr;  // kHash: [vocab, top_k]
  const std::int32_t* input_ids = nullptr;   // kHash: [tokens]
  const std::uint8_t* padding = nullptr;     // [tokens], non-zero: no experts; or null
  float* weights = nullptr;                  // [tokens, slots]
  std::int32_t* ids = nullptr;               // [tokens, slots], or null and ...
  std::int64_t* wide_ids = nullptr;          // ... the same in 64 bits
  float* zero_weight = nullptr;              // kZeroExpert: [tokens], weight of identity experts
  std::int64_t tokens = 0;
  std::int32_t columns = 0, num_experts = 0, top_k = 0, num_shared = 0;
  std::int32_t groups = 1, topk_group = 1;
  std::int32_t vocab = 0, vision_base = 0;
  RoutingMethod method = RoutingMethod::kTopK;
  ScoringFunc scoring = ScoringFunc::kSoftmax;
  DType narrow_dtype = DType::kBF16;  // or F16
  bool renormalize = false;
  bool keeps_nan = false;           // kLlama4: the weight of a NaN is NaN, not zero
  bool groups_by_best_two = false;  // a group's rank is the sum of its two best candidates
  float renorm_floor = 0, renorm_epsilon = 0, scale = 1, p_norm = 1, jitter_eps = 0,
        shared_weight = 1;
};

// Selects and weighs as RowRouter::route does, with the same operations in the same order: ids and
// weights have the CPU's bits. A token id outside the table gives a row of -1 and zeros, as padding
// does. Capturable; a programmatic launch. Returns a cudaError_t value.
// `prologue`: of an experts stage that follows, run by further blocks of the kernel; null: none.
int launch_route(const RouteParams& params, const ExpertsPrologue* prologue, void* stream);
// Of more than 512 columns; launch_route calls it.
int launch_route_wide(const RouteParams& params, const ExpertsPrologue* prologue, void* stream);

}  // namespace moesaic::cuda
