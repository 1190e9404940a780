// Weighted sums of expert rows, back in token order.

#include <string>

#include "core/fault.h"
#include "core/refusal.h"
#include "moesaic/interop/permute.h"
#include "numerics/element.h"
#include "permute/sort_slots.h"

namespace moesaic {
namespace {

Status expect_float_rows(const char* field, const ConstTensorView& t) {
  MOESAIC_RETURN_IF_ERROR(expect_float_dtype(field, t.dtype));
  if (t.rank() != 2) {
    return Status(StatusCode::kInvalidShape,
                  std::string(field) + ": got " + t.shape.to_string() + ", need rank 2 [rows, H]");
  }
  MOESAIC_RETURN_IF_ERROR(expect_shape(field, t, t.shape));
  MOESAIC_RETURN_IF_ERROR(expect_device(field, t, Device::cpu()));
  return expect_contiguous(field, t);
}

Status check(const SlotRouting& routing, const ConstTensorView& y, std::span<const float> weights,
             std::span<const std::int32_t> inv_perm, const TensorView& out) {
  MOESAIC_RETURN_IF_ERROR(validate(routing));
  MOESAIC_RETURN_IF_ERROR(expect_float_rows("y", y));
  MOESAIC_RETURN_IF_ERROR(expect_float_rows("out", out));
  const std::size_t slots = routing.topk_ids.size();
  const auto tokens = static_cast<std::int64_t>(slots) / routing.top_k;
  MOESAIC_RETURN_IF_ERROR(expect_shape("out", out, {tokens, y.dim(1)}));
  MOESAIC_RETURN_IF_ERROR(expect_no_overlap("y", y, "out", out));
  if (!weights.empty() && weights.size() != slots) {
    return Status(StatusCode::kInvalidShape, "weights: got " + std::to_string(weights.size()) +
                                                 " entries, need " + std::to_string(slots) +
                                                 " or none");
  }
  if (inv_perm.size() != slots) {
    return Status(StatusCode::kInvalidShape, "inv_perm: got " + std::to_string(inv_perm.size()) +
                                                 " entries, need " + std::to_string(slots));
  }
  for (std::size_t s = 0; s < slots; ++s) {
    if (permute::local_expert_of(routing.topk_ids[s], routing.expert_map) < 0) continue;
    if (inv_perm[s] >= 0 && inv_perm[s] < y.dim(0)) continue;
    const auto k = static_cast<std::size_t>(routing.top_k);
    return Status(StatusCode::kInvalidArgument, "inv_perm: token " + std::to_string(s / k) +
                                                    ", slot " + std::to_string(s % k) +
                                                    ": got row " + std::to_string(inv_perm[s]) +
                                                    ", need 0 .. " + std::to_string(y.dim(0) - 1));
  }
  return {};
}

}  // namespace

Status unpermute_and_reduce(const SlotRouting& routing, ConstTensorView y,
                            std::span<const float> weights, std::span<const std::int32_t> inv_perm,
                            TensorView out) {
  MOESAIC_RETURN_IF_ERROR(check(routing, y, weights, inv_perm, out));
  const std::int64_t width = out.dim(1);
  const bool drop_last = MOESAIC_FAULT(permute_drop_last_slot);
  const bool ignore_weights = MOESAIC_FAULT(permute_ignore_weights);
  for (std::int64_t t = 0; t < out.dim(0); ++t) {
    for (std::int64_t h = 0; h < width; ++h) {
      float sum = 0.0F;
      for (std::int64_t j = 0; j < routing.top_k - (drop_last ? 1 : 0); ++j) {
        const auto s = static_cast<std::size_t>(t * routing.top_k + j);
        if (permute::local_expert_of(routing.topk_ids[s], routing.expert_map) < 0) continue;
        const float w = weights.empty() || ignore_weights ? 1.0F : weights[s];
        sum += w * load_as_f32(y.data, y.dtype, inv_perm[s] * width + h);
      }
      store_from_f32(out.data, out.dtype, t * width + h, sum);
    }
  }
  return {};
}

}  // namespace moesaic
