#include "prepare_finalize/topk_weight_and_reduce.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstring>

#include "core/fault.h"
#include "numerics/element.h"
#include "permute/sort_slots.h"

namespace moesaic::prepare_finalize {
namespace {

// Columns summed at a time: a kilobyte of fp32 sums stays in the first cache level.
constexpr std::int64_t kColumns = 256;

Status bad_shape(const ConstTensorView& got, const std::string& need) {
  return {StatusCode::kInvalidShape,
          fmt::format("expert_output: got {}, need {}", got.shape.to_string(), need)};
}

// output[t] = sum over local slots of weight * row_of(slot, local expert), where row_of gives an
// element offset into expert_output.
template <class RowOf>
void weighted_sum(const TensorView& output, const ConstTensorView& expert_output,
                  const SlotWeights& s, RowOf row_of) {
  const std::int64_t hidden = output.dim(1);
  std::array<float, kColumns> sum{};
  for (std::int64_t t = 0; t < output.dim(0); ++t) {
    for (std::int64_t begin = 0; begin < hidden; begin += kColumns) {
      const std::int64_t count = std::min(kColumns, hidden - begin);
      sum.fill(0.0F);
      for (std::int64_t j = 0; j < s.top_k; ++j) {
        const std::int64_t slot = t * s.top_k + j;
        const std::int32_t e = permute::local_expert_of(s.ids[slot], s.expert_map);
        if (e < 0 && !MOESAIC_FAULT(reduce_reads_remote_rows)) continue;
        const bool weighted = !s.weight_on_input || MOESAIC_FAULT(reduce_weight_twice);
        const float weight = weighted ? s.weights[slot] : 1.0F;
        const std::int64_t offset = row_of(slot, std::max(e, 0)) + begin;
        for (std::int64_t i = 0; i < count; ++i) {
          const float value = load_as_f32(expert_output.data, expert_output.dtype, offset + i);
          sum[static_cast<std::size_t>(i)] += weight * value;
        }
      }
      for (std::int64_t i = 0; i < count; ++i) {
        store_from_f32(output.data, output.dtype, t * hidden + begin + i,
                       sum[static_cast<std::size_t>(i)]);
      }
    }
  }
}

}  // namespace

Status reduce_no_op(const TensorView& output, const ConstTensorView& expert_output) {
  if (!(output.shape == expert_output.shape)) {
    return bad_shape(expert_output, output.shape.to_string());
  }
  MOESAIC_ASSIGN_OR_RETURN(const std::int64_t count, output.shape.num_elements());
  if (output.data == expert_output.data || count == 0) return {};
  if (output.dtype == expert_output.dtype) {
    std::memcpy(output.data, expert_output.data,
                static_cast<std::size_t>(count * (dtype_bits(output.dtype) / 8)));
    return {};
  }
  for (std::int64_t i = 0; i < count; ++i) {
    store_from_f32(output.data, output.dtype, i,
                   load_as_f32(expert_output.data, expert_output.dtype, i));
  }
  return {};
}

Status reduce_contiguous(const TensorView& output, const ConstTensorView& expert_output,
                         const SlotWeights& slots) {
  const std::int64_t tokens = output.dim(0);
  const std::int64_t hidden = output.dim(1);
  if (!(expert_output.shape == Shape{tokens * slots.top_k, hidden}) &&
      !(expert_output.shape == Shape{tokens, slots.top_k, hidden})) {
    return bad_shape(expert_output, fmt::format("[{}, {}] or [{}, {}, {}]", tokens * slots.top_k,
                                                hidden, tokens, slots.top_k, hidden));
  }
  weighted_sum(output, expert_output, slots,
               [hidden](std::int64_t slot, std::int64_t) { return slot * hidden; });
  return {};
}

Status reduce_naive_batched(const TensorView& output, const ConstTensorView& expert_output,
                            const SlotWeights& slots, std::span<const std::int32_t> slot_rows) {
  const std::int64_t hidden = output.dim(1);
  if (expert_output.rank() != 3 || expert_output.dim(2) != hidden) {
    return bad_shape(expert_output, fmt::format("[E_l, T, {}]", hidden));
  }
  if (static_cast<std::int64_t>(slot_rows.size()) != output.dim(0) * slots.top_k) {
    return {StatusCode::kInvalidShape, fmt::format("slot_rows: got [{}], need [{}]",
                                                   slot_rows.size(), output.dim(0) * slots.top_k)};
  }
  const std::int64_t rows = expert_output.dim(1);
  weighted_sum(output, expert_output, slots, [&](std::int64_t slot, std::int64_t e) {
    return (e * rows + slot_rows[static_cast<std::size_t>(slot)]) * hidden;
  });
  return {};
}

}  // namespace moesaic::prepare_finalize
