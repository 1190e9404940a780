// Rows of the standard format into the slabs of the batched one, in device memory: memory, the list of
// rows by expert, the copies.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/arena.h"
#include "cuda/device_traits.h"
#include "moesaic/experts.h"
#include "moesaic/status.h"
#include "moesaic/tensor.h"
#include "prepare_finalize/sm90/slabs.h"

namespace moesaic::cuda {

// Of a call.
struct SlabMemory {
  std::int32_t* counts = nullptr;     // [E_l]
  std::int32_t* slot_rows = nullptr;  // [M, k]
  std::byte* slabs = nullptr;         // [E_l, T, H]
  // Of the work list with one record per expert.
  std::int32_t *pair_of_row = nullptr, *row_of_pair = nullptr;
  float* weight_of_row = nullptr;
  GroupRecord* groups = nullptr;
  std::uint32_t *group_done = nullptr, *control = nullptr;
  std::int64_t max_groups = 0;
};

// Device memory: a row per token.
struct SlabSource {
  ConstTensorView hidden_states;  // [M, H], rows evenly spaced
  const std::int32_t* topk_ids = nullptr;
  const float* topk_weights = nullptr;
  const std::int32_t* expert_map = nullptr;  // [num_experts], or null: identity
};

class SlabFiller {
 public:
  //   problem  of the batched format: T is max_tokens
  //   dtype    of the slabs: F32, BF16 or F16
  SlabFiller(const MoeProblem& problem, DType dtype, const DeviceTraits& traits)
      : p_(problem), dtype_(dtype), traits_(traits) {}

  DType dtype() const { return dtype_; }
  Shape shape() const { return {p_.num_local_experts, p_.max_tokens, p_.hidden_size}; }
  // kLimitExceeded: more than 2^30 pairs.
  Result<SlabMemory> carve(Arena& arena, std::int64_t tokens) const;
  // Fills slabs, counts and slot_rows (see FillSlabsParams). Only launches; capturable.
  Status fill(const SlabSource& from, const SlabMemory& to, void* stream) const;

 private:
  Status make_list(const SlabSource& from, const SlabMemory& to, void* stream) const;

  MoeProblem p_;
  DType dtype_;
  DeviceTraits traits_;
};

}  // namespace moesaic::cuda
