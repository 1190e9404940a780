#include "prepare_finalize/sm90/slot_sums.h"

#include <fmt/format.h>

#include <string_view>

#include "cuda/device_memory.h"

namespace moesaic::cuda {

Status reduce_slots(const MoeProblem& problem, const FinalizeArgs& a,
                    const std::int32_t* slot_rows) {
  const std::int64_t tokens = a.output.dim(0), hidden = a.output.dim(1), k = problem.top_k;
  if (tokens == 0) return {};
  const Shape& rows = a.expert_output.shape;
  if (slot_rows == nullptr && !(rows == Shape{tokens * k, hidden}) &&
      !(rows == Shape{tokens, k, hidden})) {
    return {StatusCode::kInvalidShape,
            fmt::format("expert_output: got {}, need [{}, {}] or [{}, {}, {}]", rows.to_string(),
                        tokens * k, hidden, tokens, k, hidden)};
  }
  const int device = problem.device.index();
  const DeviceScope scope(device);
  MOESAIC_RETURN_IF_ERROR(scope.status());
  struct Address {
    std::string_view field;
    const void* data;
    DType dtype;
  };
  for (const Address& at : {Address{"output", a.output.data, a.output.dtype},
                            Address{"expert_output", a.expert_output.data, a.expert_output.dtype},
                            Address{"topk_weights", a.topk_weights.data, DType::kF32},
                            Address{"topk_ids", a.topk_ids.data, DType::kI32},
                            Address{"expert_map", a.expert_map.data(), DType::kI32}}) {
    if (at.data == nullptr && at.field == "expert_map") continue;
    MOESAIC_RETURN_IF_ERROR(
        check_device_pointer(at.field, at.data, dtype_bits(at.dtype) / 8, device));
  }
  SlotSumsParams p;
  p.rows = a.expert_output.data;
  p.rows_dtype = a.expert_output.dtype;
  p.weights = a.apply_router_weight_on_input ? nullptr : a.topk_weights.as<float>();
  p.ids = a.topk_ids.as<std::int32_t>();
  p.slot_rows = slot_rows;
  p.expert_map = a.expert_map.data();
  p.tokens = tokens;
  p.hidden = hidden;
  p.top_k = static_cast<std::int32_t>(k);
  p.experts = static_cast<std::int32_t>(problem.num_experts);
  p.output = a.output.data;
  p.dtype = a.output.dtype;
  return check_call("finalize", launch_slot_sums(p, a.stream.handle));
}

}  // namespace moesaic::cuda
