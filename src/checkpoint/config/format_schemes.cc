// The scheme that a stored format means.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <span>
#include <string_view>

#include "checkpoint/config/stored_formats.h"
#include "core/fault.h"
#include "quant/gguf_blocks.h"

namespace moesaic::checkpoint {
namespace {

Scheme named(std::string_view name) { return quant_scheme_from_name(name).value(); }

// The named scheme, or its weights with BF16 activations.
Scheme quantised_or_weight_only(std::string_view name, std::string_view weight_only,
                                ActivationQuant activation) {
  const Scheme scheme = named(name);
  if (activation == ActivationQuant::kNone) return with_weight(named(weight_only), scheme.weight);
  if (activation == ActivationQuant::kStatic &&
      scheme.activation.granularity == ScaleGranularity::kToken) {
    OperandQuant fixed = scheme.activation;
    fixed.granularity = ScaleGranularity::kTensor;
    fixed.dynamic = false;
    return with_activation(scheme, fixed);
  }
  return scheme;
}

}  // namespace

Result<Scheme> plain_scheme(const LinearFormat&, DType dtype) {
  if (dtype == DType::kF32) return named("f32");
  if (dtype == DType::kF16) return named("f16");
  if (dtype == DType::kBF16) return named("bf16");
  return Status(StatusCode::kInvalidDType,
                fmt::format("weight dtype: got {}, need BF16, F16 or F32", dtype_name(dtype)));
}

Result<Scheme> fp8_block_scheme(const LinearFormat& f, DType) {
  const Scheme scheme = named(f.activation == ActivationQuant::kNone ? "fp8-bf16" : "fp8-block");
  OperandQuant w = scheme.weight, a = scheme.activation;
  w.block_n = f.block.n;
  w.block_k = f.block.k;
  if (!scheme.weight_only()) a.block_k = f.block.k;
  if (f.ue8m0) a.scale_format = ScaleFormat::kE8M0;
  return make_scheme(scheme.name, w, a, scheme.output_bound);
}

Result<Scheme> fp8_tensor_scheme(const LinearFormat& f, DType) {
  return quantised_or_weight_only("fp8-tensor", "fp8-bf16", f.activation);
}

Result<Scheme> fp8_channel_scheme(const LinearFormat& f, DType) {
  return quantised_or_weight_only("fp8-channel", "fp8-bf16", f.activation);
}

Result<Scheme> mxfp8_scheme(const LinearFormat& f, DType) {
  return quantised_or_weight_only("mxfp8", "fp8-bf16", f.activation);
}

Result<Scheme> int8_scheme(const LinearFormat& f, DType) {
  return quantised_or_weight_only("int8", "int8-bf16", f.activation);
}

Result<Scheme> nvfp4_scheme(const LinearFormat& f, DType) {
  return quantised_or_weight_only("nvfp4", "nvfp4-bf16", f.activation);
}

Result<Scheme> mxfp4_blocks_scheme(const LinearFormat&, DType) { return named("mxfp4-bf16"); }

Result<Scheme> bnb4_scheme(const LinearFormat& f, DType) {
  const Scheme scheme = named("nf4-bf16");
  OperandQuant w = scheme.weight;
  w.table = f.table;
  w.block_k = f.group_size;
  return with_weight(scheme, w);
}

Result<Scheme> bnb8_scheme(const LinearFormat&, DType) { return named("int8-bf16"); }

Result<Scheme> integer_scheme(const LinearFormat& f, DType) {
  if (f.activation != ActivationQuant::kNone) {
    // The stored group scales are rounded to two levels and every product to e4m3: 3.1 % per
    // matrix, 2.31 times as much through all three.
    constexpr double kConversion = 7.2e-2;
    Scheme scheme = quantised_or_weight_only("int4-fp8", "int4-g128", f.activation);
    OperandQuant weight = scheme.weight;
    if (!MOESAIC_FAULT(checkpoint_w4a8_group_of_the_name)) weight.block_k = f.group_size;
    scheme = with_weight(scheme, weight);
    scheme.output_bound = std::hypot(scheme.output_bound, kConversion);
    return scheme;
  }
  OperandQuant w;
  const bool four = f.bits <= 4;
  w.dtype = f.zero_points ? (four ? DType::kU4 : DType::kU8) : (four ? DType::kI4 : DType::kI8);
  w.granularity = f.group_size > 0 ? ScaleGranularity::kGroup : ScaleGranularity::kChannel;
  w.scale_format = ScaleFormat::kF32;
  w.block_n = f.group_size > 0 ? 1 : 0;
  w.block_k = std::max<std::int64_t>(f.group_size, 0);
  w.zero_point = f.zero_points ? ZeroPoint::kInteger : ZeroPoint::kNone;
  w.act_order = f.act_order;
  if (f.group_size > 0) w.scale_dtype = f.scale_dtype;
  return with_weight(named(four ? "int4-g128" : "int8-bf16"), w);
}

// Activations of 8 bits: one stored scale for all, or F32 scales as they come, of 128 columns
// (compressed-tensors) or of rows (ModelOpt).
Result<Scheme> mxfp4_scheme(const LinearFormat& f, DType) {
  if (f.activation == ActivationQuant::kNone) return named("mxfp4-bf16");
  if (f.bits != 8) return named("mxfp4");
  const Scheme scheme = named("mxfp4-fp8");
  OperandQuant a = scheme.activation;
  a.scale_format = ScaleFormat::kF32;
  if (f.names == NameStyle::kModelOpt) {
    a.dynamic = f.activation == ActivationQuant::kDynamic;
    a.granularity = a.dynamic ? ScaleGranularity::kToken : ScaleGranularity::kTensor;
    a.block_n = a.block_k = 0;
  }
  return with_activation(scheme, a);
}

namespace {

// A form that holds blocks of all these types: the finest group, 4-bit codes if all have them with
// the same sign or table. Else a byte each: every code is a small integer, in most types of 6 bits.
// Scales of k types then stay what they are in the file unless something else is multiplied into
// them.
OperandQuant blocks_form(std::span<const quant::GgufType> types, bool outer_scale) {
  bool any_min = false, all_signed = true, all_unsigned = true, tables = true;
  bool super = !outer_scale, half = !outer_scale;
  int group = 256, bits = 4, super_bits = 0;
  for (const quant::GgufType type : types) {
    if (type == quant::GgufType::kNone) continue;
    const quant::GgufTypeInfo* info = quant::gguf_type_info(static_cast<std::uint32_t>(type));
    if (info == nullptr) continue;  // refused when the layer was resolved
    bits = std::max(bits, info->code_bits);
    super = super && info->super_bits != 0;
    super_bits = std::max(super_bits, info->super_bits);
    half = half && info->half_scales;
    tables = tables && info->table == CodeTable::kIq4Nl;
    any_min = any_min || info->has_min;
    (info->is_signed ? all_unsigned : all_signed) = false;
    group = std::min(group, info->group);
  }
  const bool four = bits == 4 && (all_signed || all_unsigned);
  OperandQuant w;
  w.dtype = !four ? DType::kI8 : all_signed ? DType::kI4 : DType::kU4;
  w.granularity = ScaleGranularity::kGroup;
  w.scale_format = ScaleFormat::kF32;
  w.block_n = 1;
  w.block_k = group;
  w.zero_point = any_min ? ZeroPoint::kMin : ZeroPoint::kNone;
  if (super && (tables || bits <= 6)) w.super_bits = static_cast<std::uint8_t>(super_bits);
  if (half && w.super_bits == 0) w.scale_dtype = DType::kF16;
  if (tables) {
    w.dtype = DType::kU4;
    w.table = CodeTable::kIq4Nl;
  } else if (!four && bits <= 6) {
    w.code_bits = 6;
  }
  return w;
}

}  // namespace

// One form for both matrices, and what is known of each. MXFP4 or NVFP4 throughout are those formats.
Result<Scheme> gguf_scheme(const LinearFormat& f, DType) {
  const std::span<const quant::GgufType> all = f.blocks;
  const auto all_are = [&](quant::GgufType type) {
    return std::ranges::all_of(all, [&](quant::GgufType of) { return of == type; });
  };
  if (all_are(quant::GgufType::kMXFP4) && !f.outer_scale) return named("mxfp4-bf16");
  if (all_are(quant::GgufType::kNVFP4)) return named("nvfp4-bf16");
  const OperandQuant w = blocks_form(all, f.outer_scale);
  const std::string_view nearest = w.table != CodeTable::kNone ? "nf4-bf16"
                                   : w.dtype == DType::kI8     ? "int8-bf16"
                                                               : "int4-g128";
  Scheme scheme = with_weight(named(nearest), w);
  // A table's indices are handed over as its entries, beside integers.
  const auto of = [&](std::span<const quant::GgufType> types) {
    const OperandQuant form = blocks_form(types, f.outer_scale);
    return form.table == w.table ? form : w;
  };
  const MatrixForms forms = {of(all.first(2)), of(all.last(1))};
  const bool differ = !(forms.w13 == w && forms.w2 == w);
  if (differ && !MOESAIC_FAULT(checkpoint_forms_forgotten)) scheme.forms = forms;
  return scheme;
}

}  // namespace moesaic::checkpoint
