#include "own_arguments.h"

#include <fmt/format.h>
#include <nanobind/stl/string.h>

#include <array>

#include "errors.h"
#include "moesaic/device_tensor.h"
#include "numerics/element.h"
#include "quant/compute_scheme.h"
#include "specs.h"

namespace nb = nanobind;

namespace moesaic::python {
namespace {

struct Named {
  const char* name;
  ConstTensorView ExpertWeightsView::*member;
};
constexpr std::array<Named, 16> kOptional = {{
    {"w13_scale", &ExpertWeightsView::w13_scale},
    {"w13_bias", &ExpertWeightsView::w13_bias},
    {"w2_scale", &ExpertWeightsView::w2_scale},
    {"w2_bias", &ExpertWeightsView::w2_bias},
    {"w13_global_scale", &ExpertWeightsView::w13_global_scale},
    {"w2_global_scale", &ExpertWeightsView::w2_global_scale},
    {"w13_channel_scale", &ExpertWeightsView::w13_channel_scale},
    {"w2_channel_scale", &ExpertWeightsView::w2_channel_scale},
    {"w13_zero", &ExpertWeightsView::w13_zero},
    {"w2_zero", &ExpertWeightsView::w2_zero},
    {"w13_min", &ExpertWeightsView::w13_min},
    {"w2_min", &ExpertWeightsView::w2_min},
    {"w13_input_scale", &ExpertWeightsView::w13_input_scale},
    {"w2_input_scale", &ExpertWeightsView::w2_input_scale},
    {"w13_perm", &ExpertWeightsView::w13_perm},
    {"w2_perm", &ExpertWeightsView::w2_perm},
}};

GateUpLayout layout_named(const std::string& name, bool gated) {
  if (name == "none" || (!gated && name == "gate_then_up")) return GateUpLayout::kNonGated;
  if (name == "gate_then_up") return GateUpLayout::kGateThenUp;
  if (name == "up_then_gate") return GateUpLayout::kUpThenGate;
  if (name == "interleaved") return GateUpLayout::kInterleaved;
  raise(StatusCode::kInvalidArgument,
        fmt::format(
            "gate_up: got \"{}\", need \"gate_then_up\", \"up_then_gate\", \"interleaved\" or "
            "\"none\"",
            name));
}

// Codes of fewer than 8 bits come as bytes, and one-byte types as bytes where a framework lacks
// them: `stored` says what they are.
void as_codes(DType wanted, bool scale, ConstTensorView* t) {
  if (!t->present() || t->dtype == wanted) return;
  const bool byte = t->dtype == DType::kU8 || (!scale && t->dtype == DType::kI8);
  if (!byte) return;
  const int bits = dtype_bits(wanted);
  if (bits == 8) {
    t->dtype = wanted;
  } else if (bits == 4 && t->rank() >= 1) {
    std::vector<std::int64_t> dims(t->shape.dims().begin(), t->shape.dims().end());
    dims.back() *= 2;
    for (std::size_t i = 0; i + 1 < dims.size(); ++i) t->strides[i] *= 2;
    t->shape = *Shape::from(dims);
    t->dtype = wanted;
  }
}

// The same numbers, contiguous and in host memory.
Tensor wide_bias(std::string_view field, ConstTensorView t) {
  Tensor host;
  t = host_copy(field, t, &host);
  if (t.rank() != 2) {
    raise(StatusCode::kInvalidShape,
          fmt::format("{}: got {}, need a row for each expert", field, t.shape.to_string()));
  }
  Tensor wide = unwrap(Tensor::uninitialized(DType::kF32, t.shape));
  float* to = wide.as<float>();
  for (std::int64_t e = 0; e < t.dim(0); ++e) {
    for (std::int64_t n = 0; n < t.dim(1); ++n) {
      *to++ = load_as_f32(t.data, t.dtype, e * t.strides[0] + n * t.strides[1]);
    }
  }
  return wide;
}

}  // namespace

GateUpLayout layout_of(const std::string& gate_up, ActivationKind activation) {
  const bool gated = is_gated(activation);
  const GateUpLayout layout = layout_named(gate_up, gated);
  if (gated != (layout == GateUpLayout::kNonGated)) return layout;
  raise(StatusCode::kInvalidArgument,
        fmt::format("gate_up: got \"{}\" with activation {}, which is {}", gate_up,
                    activation_name(activation),
                    gated ? "gated, need \"gate_then_up\", \"up_then_gate\" or \"interleaved\""
                          : "not gated, need \"none\""));
}

OwnArguments own_arguments(nb::handle w13, nb::handle w2, std::int64_t top_k,
                           const std::optional<std::string>& stored, nb::handle activation,
                           const std::string& gate_up, bool transposed,
                           bool apply_router_weight_on_input, std::string_view function,
                           const nb::kwargs& fields) {
  OwnArguments made;
  OwnWeights& own = made.weights;
  std::vector<TensorArg>& keep = made.keep;
  keep.reserve(2 + kOptional.size());
  own.tensors.w13 = keep.emplace_back("w13", w13).view();
  own.tensors.w2 = keep.emplace_back("w2", w2).view();
  for (const auto& [key, value] : fields) {
    const auto name = nb::cast<std::string>(key);
    const Named* found = nullptr;
    for (const Named& row : kOptional) {
      if (name == row.name) found = &row;
    }
    if (found == nullptr) {
      throw nb::type_error(
          fmt::format("{}() got an unexpected keyword argument '{}'", function, name).c_str());
    }
    const TensorArg& tensor = keep.emplace_back(name, value);
    tensor.check_not_negated(name);
    if (!tensor.present()) continue;
    tensor.wait_until_written();
    own.tensors.*found->member = tensor.view();
    if (!tensor.view().present()) {  // without memory it would pass for a tensor that was not given
      raise(StatusCode::kInvalidShape,
            fmt::format("{}: got {}, need elements", name, tensor.view().shape.to_string()));
    }
  }
  keep[0].check_not_negated("w13");
  keep[1].check_not_negated("w2");
  if (!keep[0].present() || !keep[1].present()) {
    raise(StatusCode::kInvalidArgument, "w13, w2: got None, need a tensor each");
  }
  keep[0].wait_until_written();
  keep[1].wait_until_written();

  for (const auto& [name, member] : {Named{"w13_bias", &ExpertWeightsView::w13_bias},
                                     Named{"w2_bias", &ExpertWeightsView::w2_bias}}) {
    ConstTensorView& bias = own.tensors.*member;
    if (!bias.present() || bias.dtype != DType::kF16) continue;
    bias = made.widened.emplace_back(wide_bias(name, bias)).view();
  }

  MoeLayerSpec& spec = made.spec;
  spec.activation = activation_of(activation);
  own.layout = layout_of(gate_up, spec.activation.kind);
  own.transposed = transposed;
  const DType dtype = own.tensors.w13.dtype;
  if (stored) {
    own.stored = scheme_of(*stored);
    const OperandQuant& weight = own.stored.weight;
    for (ConstTensorView ExpertWeightsView::*m :
         {&ExpertWeightsView::w13, &ExpertWeightsView::w2}) {
      as_codes(weight.dtype, false, &(own.tensors.*m));
    }
    const DType scale = weight.scale_format == ScaleFormat::kE8M0   ? DType::kF8E8M0
                        : weight.scale_format == ScaleFormat::kE4M3 ? DType::kF8E4M3
                                                                    : DType::kF32;
    for (ConstTensorView ExpertWeightsView::*m :
         {&ExpertWeightsView::w13_scale, &ExpertWeightsView::w2_scale}) {
      if (scale != DType::kF32) as_codes(scale, true, &(own.tensors.*m));
    }
  } else if (dtype == DType::kBF16 || dtype == DType::kF16 || dtype == DType::kF32) {
    own.stored = scheme_of(dtype == DType::kBF16 ? "bf16" : dtype == DType::kF16 ? "f16" : "f32");
  } else {
    raise(
        StatusCode::kAmbiguousFormat,
        fmt::format("w13: got {} and no stored=, need the name of the scheme that the weights are "
                    "stored in (moesaic.quant_schemes())",
                    dtype_name(dtype)));
  }
  for (const auto& [name, member] : {Named{"w13_input_scale", &ExpertWeightsView::w13_input_scale},
                                     Named{"w2_input_scale", &ExpertWeightsView::w2_input_scale}}) {
    const ConstTensorView& scale = own.tensors.*member;
    if (!scale.present() || quant::has_static_scale(own.stored.activation)) continue;
    raise(
        StatusCode::kInvalidArgument,
        fmt::format("{}: got {}, but activations of stored \"{}\" have no static scales, need none",
                    name, scale.shape.to_string(), own.stored.name));
  }
  const OwnSizes sizes = unwrap(own_sizes(own));
  spec.hidden_size = sizes.hidden_size;
  spec.intermediate_size = sizes.intermediate_size;
  spec.num_experts = spec.routing.num_experts = sizes.num_experts;
  spec.routing.top_k = top_k;
  spec.quant = own.stored;
  // Scales of integers have the dtype of the model.
  const bool half = own.stored.weight_only() && own.tensors.w13_scale.present() &&
                    own.tensors.w13_scale.dtype == DType::kF16;
  spec.activation_dtype = dtype == DType::kF16 || half ? DType::kF16
                          : dtype == DType::kF32       ? DType::kF32
                                                       : DType::kBF16;
  spec.has_expert_bias = own.tensors.w13_bias.present() || own.tensors.w2_bias.present();
  spec.apply_router_weight_on_input = apply_router_weight_on_input;
  return made;
}

}  // namespace moesaic::python
