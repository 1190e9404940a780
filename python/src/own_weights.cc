#include "own_weights.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <string_view>
#include <utility>

#include "core/fault.h"
#include "moesaic/device_tensor.h"

namespace moesaic::python {
namespace {

// Which rows of a [N, K] matrix of w13 lie where.
enum class RowOrder { kAsStored, kSwapHalves, kDeinterleave };

struct Field {
  std::string_view name;
  ConstTensorView ExpertWeightsView::*member;
  bool first;       // of w13: follows the arrangement of gate and up
  bool per_expert;  // one value (or one per row) for the whole matrix: nothing to transpose
};
constexpr std::array<Field, 18> kFields = {{
    {"w13", &ExpertWeightsView::w13, true, false},
    {"w13_scale", &ExpertWeightsView::w13_scale, true, false},
    {"w13_bias", &ExpertWeightsView::w13_bias, true, true},
    {"w2", &ExpertWeightsView::w2, false, false},
    {"w2_scale", &ExpertWeightsView::w2_scale, false, false},
    {"w2_bias", &ExpertWeightsView::w2_bias, false, true},
    {"w13_global_scale", &ExpertWeightsView::w13_global_scale, false, true},
    {"w2_global_scale", &ExpertWeightsView::w2_global_scale, false, true},
    {"w13_channel_scale", &ExpertWeightsView::w13_channel_scale, true, true},
    {"w2_channel_scale", &ExpertWeightsView::w2_channel_scale, false, true},
    {"w13_zero", &ExpertWeightsView::w13_zero, true, false},
    {"w2_zero", &ExpertWeightsView::w2_zero, false, false},
    {"w13_min", &ExpertWeightsView::w13_min, true, false},
    {"w2_min", &ExpertWeightsView::w2_min, false, false},
    {"w13_input_scale", &ExpertWeightsView::w13_input_scale, false, true},
    {"w2_input_scale", &ExpertWeightsView::w2_input_scale, false, true},
    {"w13_perm", &ExpertWeightsView::w13_perm, false, true},
    {"w2_perm", &ExpertWeightsView::w2_perm, false, true},
}};

RowOrder order_of(GateUpLayout layout) {
  if (layout == GateUpLayout::kUpThenGate) return RowOrder::kSwapHalves;
  return layout == GateUpLayout::kInterleaved ? RowOrder::kDeinterleave : RowOrder::kAsStored;
}

// Where canonical row `row` of `rows` is stored.
std::int64_t stored_row(RowOrder order, std::int64_t row, std::int64_t rows) {
  const std::int64_t half = rows / 2;
  if (MOESAIC_FAULT(python_gate_up_as_stored)) return row;
  if (order == RowOrder::kSwapHalves) return row < half ? row + half : row - half;
  if (order == RowOrder::kDeinterleave) return row < half ? 2 * row : 2 * (row - half) + 1;
  return row;
}

// Columns in tiles, so that a transposed source is read line by line.
template <class T>
void gather(const std::byte* from, std::int64_t row_stride, std::int64_t column_stride,
            std::int64_t rows, std::int64_t columns, RowOrder order, std::byte* to) {
  constexpr std::int64_t kTile = 32;
  const T* const source = reinterpret_cast<const T*>(from);
  T* const target = reinterpret_cast<T*>(to);
  for (std::int64_t r0 = 0; r0 < rows; r0 += kTile) {
    for (std::int64_t c0 = 0; c0 < columns; c0 += kTile) {
      for (std::int64_t r = r0; r < std::min(r0 + kTile, rows); ++r) {
        const T* const line = source + stored_row(order, r, rows) * row_stride;
        for (std::int64_t c = c0; c < std::min(c0 + kTile, columns); ++c) {
          target[r * columns + c] = line[c * column_stride];
        }
      }
    }
  }
}

class OwnSource final : public ExpertSource {
 public:
  explicit OwnSource(const OwnWeights& weights) : weights_(weights) {}

  Result<ExpertWeightsView> expert(std::int64_t e) override {
    ExpertWeightsView view;
    for (std::size_t i = 0; i < kFields.size(); ++i) {
      const Field& field = kFields[i];
      const ConstTensorView& all = weights_.tensors.*field.member;
      if (!all.present()) continue;
      Result<ConstTensorView> one = canonical(field, all, e, buffers_[i], host_[i]);
      if (!one.ok())
        return one.status().with_context(fmt::format("{} of expert {}", field.name, e));
      view.*field.member = *one;
    }
    return view;
  }

 private:
  Result<ConstTensorView> canonical(const Field& field, const ConstTensorView& all, std::int64_t e,
                                    Tensor& buffer, Tensor& host) const {
    ConstTensorView one = all;
    std::array<std::int64_t, kMaxRank> strides{};
    for (int i = 1; i < all.rank(); ++i)
      strides[static_cast<std::size_t>(i - 1)] = all.strides[static_cast<std::size_t>(i)];
    one.shape = *Shape::from(all.shape.dims().subspan(1));
    one.strides = strides;
    // Bits, for sub-byte types; the product of a stride in elements is whole bytes there.
    one.data = all.data + e * all.strides[0] * dtype_bits(all.dtype) / 8;
    if (one.rank() == 0) {  // [E]: one value for each expert
      one.shape = Shape{1};
      one.strides = {1};
    }
    if (one.device.is_cuda()) {
      if (!one.is_contiguous()) {
        return Status(StatusCode::kInvalidLayout,
                      "got device memory with strides, need each expert contiguous");
      }
      if (!host.present()) {
        MOESAIC_ASSIGN_OR_RETURN(host, Tensor::uninitialized(one.dtype, one.shape));
      }
      MOESAIC_RETURN_IF_ERROR(copy_tensor(one, host.view()));
      one = host.view();
    }
    const bool scale_of_all = field.member != &ExpertWeightsView::w13 && one.shape == Shape{1};
    const RowOrder order =
        field.first && !scale_of_all ? order_of(weights_.layout) : RowOrder::kAsStored;
    if (weights_.transposed && !field.per_expert && one.rank() == 2 &&
        !MOESAIC_FAULT(python_own_weights_not_transposed)) {
      one.shape = Shape{one.dim(1), one.dim(0)};
      std::swap(one.strides[0], one.strides[1]);
    }
    if (order == RowOrder::kAsStored && one.is_contiguous()) return one;
    const int bits = dtype_bits(one.dtype);
    const std::int64_t rows = one.dim(0), columns = one.rank() == 2 ? one.dim(1) : 1;
    if (!buffer.present()) {
      MOESAIC_ASSIGN_OR_RETURN(buffer, Tensor::uninitialized(one.dtype, one.shape));
    }
    const std::int64_t column_stride = one.rank() == 2 ? one.strides[1] : 1;
    if (bits == 4) {
      if (one.rank() != 2 || column_stride != 1) {
        return Status(StatusCode::kUnsupported, "got transposed 4-bit codes, need rows of codes");
      }
      gather<std::uint8_t>(one.data, one.strides[0] / 2, 1, rows, columns / 2, order,
                           buffer.data());
    } else if (bits == 8) {
      gather<std::uint8_t>(one.data, one.strides[0], column_stride, rows, columns, order,
                           buffer.data());
    } else if (bits == 16) {
      gather<std::uint16_t>(one.data, one.strides[0], column_stride, rows, columns, order,
                            buffer.data());
    } else if (bits == 32) {
      gather<std::uint32_t>(one.data, one.strides[0], column_stride, rows, columns, order,
                            buffer.data());
    } else {
      return Status(StatusCode::kInvalidDType, fmt::format("got {}", dtype_name(one.dtype)));
    }
    return ConstTensorView(buffer.view());
  }

  OwnWeights weights_;
  std::array<Tensor, kFields.size()> buffers_, host_;  // one expert's
};

}  // namespace

Result<OwnSizes> own_sizes(const OwnWeights& weights) {
  const ConstTensorView& w13 = weights.tensors.w13;
  const ConstTensorView& w2 = weights.tensors.w2;
  const auto refuse = [&](std::string_view need) {
    return Status(StatusCode::kInvalidShape,
                  fmt::format("w13, w2: got {} and {}, need {}", w13.shape.to_string(),
                              w2.shape.to_string(), need));
  };
  const bool gated = weights.layout != GateUpLayout::kNonGated;
  const std::string_view need =
      weights.transposed ? (gated ? "[E, H, 2I] and [E, I, H]" : "[E, H, I] and [E, I, H]")
                         : (gated ? "[E, 2I, H] and [E, H, I]" : "[E, I, H] and [E, H, I]");
  if (w13.rank() != 3 || w2.rank() != 3 || w13.dim(0) != w2.dim(0)) return refuse(need);
  const int in = weights.transposed ? 1 : 2, out = weights.transposed ? 2 : 1;
  OwnSizes sizes{w13.dim(0), w13.dim(in), w2.dim(in)};
  if (w2.dim(out) != sizes.hidden_size ||
      w13.dim(out) != (gated ? 2 : 1) * sizes.intermediate_size) {
    return refuse(need);
  }
  for (const Field& field : kFields) {
    const ConstTensorView& t = weights.tensors.*field.member;
    if (!t.present() || (t.rank() >= 1 && t.dim(0) == sizes.num_experts)) continue;
    return Status(StatusCode::kInvalidShape,
                  fmt::format("{}: got {}, need {} experts in the first axis", field.name,
                              t.shape.to_string(), sizes.num_experts));
  }
  return sizes;
}

std::int64_t bytes_of(const OwnWeights& weights) {
  std::int64_t bits = 0;
  for (const Field& field : kFields) {
    const ConstTensorView& t = weights.tensors.*field.member;
    std::int64_t elements = t.present() ? 1 : 0;
    for (const std::int64_t d : t.shape.dims()) elements *= d;
    bits += elements * dtype_bits(t.dtype);
  }
  return bits / 8;
}

Result<std::unique_ptr<ExpertSource>> make_own_source(const OwnWeights& weights) {
  const bool blocks = weights.stored.weight.granularity == ScaleGranularity::kBlock;
  if (weights.layout == GateUpLayout::kInterleaved && blocks) {
    return Status(StatusCode::kUnsupported,
                  "gate_up: got interleaved rows with scales of blocks, need \"gate_then_up\" or "
                  "\"up_then_gate\"");
  }
  return std::unique_ptr<ExpertSource>(std::make_unique<OwnSource>(weights));
}

}  // namespace moesaic::python
