#include "prepare_finalize/sm90/device_rows.h"

#include <fmt/format.h>

#include <string_view>

#include "cuda/device_memory.h"

namespace moesaic::cuda {

Status check_device_rows(const DeviceRows& need, const PrepareArgs& args) {
  if (args.hidden_states.rank() != 2) {
    return {StatusCode::kInvalidShape,
            fmt::format("hidden_states: got {}, need [M, {}]", args.hidden_states.shape.to_string(),
                        need.hidden)};
  }
  const std::int64_t rows = args.hidden_states.dim(0);
  if (rows > need.max_tokens) {
    return {StatusCode::kLimitExceeded,
            fmt::format("tokens: got {}, need at most {} per rank", rows, need.max_tokens)};
  }
  struct Field {
    std::string_view field;
    const ConstTensorView& view;
    DType dtype;
    std::int64_t columns, alignment;
  };
  for (const Field& t :
       {Field{"hidden_states", args.hidden_states, need.dtype, need.hidden, need.alignment},
        Field{"topk_ids", args.topk_ids, DType::kI32, need.top_k, 4},
        Field{"topk_weights", args.topk_weights, DType::kF32, need.top_k, 4}}) {
    MOESAIC_RETURN_IF_ERROR(expect_dtype(t.field, t.view, t.dtype));
    MOESAIC_RETURN_IF_ERROR(expect_shape(t.field, t.view, {rows, t.columns}));
    MOESAIC_RETURN_IF_ERROR(expect_contiguous(t.field, t.view));
    MOESAIC_RETURN_IF_ERROR(expect_device(t.field, t.view, need.device));
    if (rows == 0) continue;
    MOESAIC_RETURN_IF_ERROR(
        check_device_pointer(t.field, t.view.data, t.alignment, need.device.index()));
  }
  return {};
}

}  // namespace moesaic::cuda
