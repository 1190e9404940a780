// Activations of whole tensors, as plain loops.
#include <string>

#include "activation/reference/activation.h"
#include "core/fault.h"
#include "core/refusal.h"
#include "moesaic/interop/own_layer.h"
#include "numerics/element.h"

namespace moesaic {
namespace {

// Shapes and layout; on success *width is the number of output columns.
Status check_shapes(const ActivationSpec& spec, GateUpLayout layout, const ConstTensorView& in,
                    const TensorView& out, std::int64_t* width) {
  const bool gated = is_gated(spec.kind);
  if (layout > GateUpLayout::kNonGated) {
    return Status(
        StatusCode::kInvalidArgument,
        "layout: got " + std::to_string(static_cast<int>(layout)) + ", need one of GateUpLayout");
  }
  if (gated == (layout == GateUpLayout::kNonGated)) {
    return Status(StatusCode::kInvalidArgument,
                  "layout: got " + std::string(gated ? "kNonGated" : "a gate/up arrangement") +
                      " for " + std::string(activation_name(spec.kind)) + ", need " +
                      (gated ? "a gate/up arrangement" : "kNonGated"));
  }
  if (in.rank() != 2 && in.rank() != 3) {
    return Status(StatusCode::kInvalidShape, "in: got " + in.shape.to_string() +
                                                 ", need rank 2 [rows, width] or rank 3 [E_l, "
                                                 "rows, width]");
  }
  const std::int64_t in_width = in.dim(in.rank() - 1);
  if (gated && in_width % 2 != 0) {
    return Status(StatusCode::kInvalidShape,
                  "in: got width " + std::to_string(in_width) + ", need an even number (gate, up)");
  }
  *width = gated ? in_width / 2 : in_width;
  const Shape want =
      in.rank() == 2 ? Shape({in.dim(0), *width}) : Shape({in.dim(0), in.dim(1), *width});
  MOESAIC_RETURN_IF_ERROR(expect_shape("in", in, in.shape));  // sizes fit, pointer present
  MOESAIC_RETURN_IF_ERROR(expect_shape("out", out, want));
  MOESAIC_RETURN_IF_ERROR(expect_contiguous("in", in));
  MOESAIC_RETURN_IF_ERROR(expect_contiguous("out", out));
  MOESAIC_RETURN_IF_ERROR(expect_device("in", in, Device::cpu()));
  MOESAIC_RETURN_IF_ERROR(expect_device("out", out, Device::cpu()));
  return expect_no_overlap("in", in, "out", out);
}

Status check_counts(std::span<const std::int32_t> counts, std::int64_t slabs, std::int64_t rows) {
  if (counts.empty()) return {};
  if (counts.size() != static_cast<std::size_t>(slabs)) {
    return Status(StatusCode::kInvalidShape, "expert_num_tokens: got " +
                                                 std::to_string(counts.size()) + " counts, need " +
                                                 std::to_string(slabs));
  }
  for (std::size_t e = 0; e < counts.size(); ++e) {
    if (counts[e] < 0 || counts[e] > rows) {
      return Status(StatusCode::kInvalidArgument, "expert_num_tokens[" + std::to_string(e) +
                                                      "]: got " + std::to_string(counts[e]) +
                                                      ", need 0 .. " + std::to_string(rows));
    }
  }
  return {};
}

}  // namespace

Status apply_activation(const ActivationSpec& spec, GateUpLayout layout, ConstTensorView in,
                        TensorView out, std::span<const std::int32_t> expert_num_tokens) {
  MOESAIC_RETURN_IF_ERROR(validate(spec));
  MOESAIC_RETURN_IF_ERROR(expect_float_dtype("in", in.dtype));
  MOESAIC_RETURN_IF_ERROR(expect_float_dtype("out", out.dtype));
  std::int64_t width = 0;
  MOESAIC_RETURN_IF_ERROR(check_shapes(spec, layout, in, out, &width));
  const std::int64_t slabs = in.rank() == 2 ? 1 : in.dim(0);
  const std::int64_t rows = in.dim(in.rank() - 2);
  const std::int64_t in_width = in.dim(in.rank() - 1);
  MOESAIC_RETURN_IF_ERROR(check_counts(expert_num_tokens, slabs, rows));
  if (rows == 0 || width == 0) return {};  // however many slabs or rows have none

  for (std::int64_t slab = 0; slab < slabs; ++slab) {
    std::int64_t count = rows;
    if (!expert_num_tokens.empty() && !MOESAIC_FAULT(activation_ignore_counts)) {
      count = expert_num_tokens[static_cast<std::size_t>(slab)];
    }
    for (std::int64_t r = slab * rows; r < slab * rows + count; ++r) {
      for (std::int64_t i = 0; i < width; ++i) {
        const activation::GateUpIndex at = activation::gate_up_index(layout, i, width);
        const float gate = load_as_f32(in.data, in.dtype, r * in_width + at.gate);
        const float up = load_as_f32(in.data, in.dtype, r * in_width + at.up);
        store_from_f32(out.data, out.dtype, r * width + i,
                       activation::ref_activate(spec, gate, up));
      }
    }
  }
  return {};
}

}  // namespace moesaic
