// A quantised MLP as F32 matrices.
#include "checkpoint/reader/mlp_reader.h"
#include "core/fault.h"

namespace moesaic::checkpoint {
namespace {

// Half a w13 at a time: gate and up are read as the only projection of an MLP without a gate, so
// that each may have an order of columns and scales of its own.
MlpTensors with_gate_as_up(const MlpTensors& tensors) {
  MlpTensors half = tensors;
  for (std::size_t kind = 0; kind < kNumTensorKinds; ++kind) {
    MlpTensors::PerProjection& all = half.of(static_cast<TensorKind>(kind));
    all[static_cast<std::size_t>(Projection::kUp)] =
        all[static_cast<std::size_t>(Projection::kGate)];
  }
  return half;
}

}  // namespace

Status read_wide_mlp(const MlpTensors& tensors, const MlpSlice& slice, std::int64_t expert,
                     MlpBuffers* buffers) {
  const bool halves = slice.gated && slice.storage == ExpertStorage::kPerExpert;
  MlpSlice part = slice;
  MOESAIC_ASSIGN_OR_RETURN(part.scheme, linear_scheme(slice.format, slice.scheme.weight.dtype));
  part.gated = slice.gated && !halves;
  part.has_bias = false;
  const std::int64_t rows = (part.gated ? 2 : 1) * slice.count;
  MOESAIC_ASSIGN_OR_RETURN(MlpBuffers stored, MlpBuffers::make(part));
  const auto read = [&](const MlpTensors& from, std::int64_t first_row) -> Status {
    MOESAIC_RETURN_IF_ERROR(read_mlp(from, part, {}, expert, &stored));
    dequantize_matrix(part.scheme.weight, stored.w13, rows, slice.hidden,
                      buffers->w13.weight.as<float>() + first_row * slice.hidden);
    return {};
  };
  if (halves) {
    const bool same = MOESAIC_FAULT(checkpoint_wide_up_is_gate);
    MOESAIC_RETURN_IF_ERROR(read(with_gate_as_up(tensors), 0));
    MOESAIC_RETURN_IF_ERROR(read(same ? with_gate_as_up(tensors) : tensors, slice.count));
  } else {
    MOESAIC_RETURN_IF_ERROR(read(tensors, 0));
  }
  dequantize_matrix(part.scheme.weight, stored.w2, slice.hidden, slice.count,
                    buffers->w2.weight.as<float>());
  return {};
}

}  // namespace moesaic::checkpoint
