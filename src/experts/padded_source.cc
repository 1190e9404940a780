#include "experts/padded_source.h"

#include <cstring>
#include <new>

#include "core/fault.h"
#include "experts/problem_checks.h"

namespace moesaic::experts {
namespace {

// `parts` equal parts of t's rows, each row and each part with zero bytes behind it.
ConstTensorView padded(const ConstTensorView& t, std::int64_t parts, std::int64_t rows,
                       std::int64_t columns, std::vector<std::byte>& to) {
  const std::int64_t element = dtype_bits(t.dtype) / 8;
  const std::int64_t had = t.dim(0) / parts, had_columns = t.rank() == 2 ? t.dim(1) : 1;
  // Zero is the zero of every dtype here.
  to.assign(static_cast<std::size_t>(parts * rows * columns * element), std::byte{0});
  for (std::int64_t p = 0; p < parts; ++p) {
    for (std::int64_t r = 0; r < had; ++r) {
      const std::int64_t row = MOESAIC_FAULT(experts_padding_between_rows_of_gate_and_up_lost)
                                   ? p * had + r
                                   : p * rows + r;
      std::memcpy(to.data() + row * columns * element,
                  t.data + (p * had + r) * had_columns * element,
                  static_cast<std::size_t>(had_columns * element));
    }
  }
  return t.rank() == 2 ? ConstTensorView(to.data(), t.dtype, {parts * rows, columns})
                       : ConstTensorView(to.data(), t.dtype, {parts * rows});
}

}  // namespace

Result<ExpertWeightsView> PaddedSource::expert(std::int64_t e) {
  MOESAIC_ASSIGN_OR_RETURN(ExpertWeightsView view, source_.expert(e));
  MOESAIC_RETURN_IF_ERROR(check_expert_weights(from_, view, e));
  const std::int64_t parts = is_gated(from_.activation.kind) ? 2 : 1;
  const std::int64_t hidden = from_.hidden_size, width = to_.intermediate_size;
  try {
    view.w13 = padded(view.w13, parts, width, hidden, w13_);
    view.w2 = padded(view.w2, 1, hidden, width, w2_);
    if (view.w13_bias.present()) view.w13_bias = padded(view.w13_bias, parts, width, 1, w13_bias_);
  } catch (const std::bad_alloc&) {
    return Status(StatusCode::kOutOfMemory, "cannot allocate an expert with padding");
  }
  return view;
}

}  // namespace moesaic::experts
