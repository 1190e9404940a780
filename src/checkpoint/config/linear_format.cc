#include "checkpoint/config/linear_format.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <numeric>

#include "core/fault.h"
#include "quant/gguf_blocks.h"

namespace moesaic {
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

Scheme integer_scheme(const LinearFormat& f) {
  if (f.activation == ActivationQuant::kDynamic) {
    // The stored group scales are rounded to two levels and every product to e4m3: 3.1 % per
    // matrix, 2.31 times as much through all three.
    constexpr double kConversion = 7.2e-2;
    Scheme scheme = named("int4-fp8");
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
  return with_weight(named(four ? "int4-g128" : "int8-bf16"), w);
}

// Activations of 8 bits: one stored scale for all, or F32 scales as they come, of 128 columns
// (compressed-tensors) or of rows (ModelOpt).
Scheme mxfp4_scheme(const LinearFormat& f) {
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

// One form for both matrices: the finest group, 4-bit codes if all types have them and agree on
// their sign or their table. Else a byte each: every code is a small integer.
Scheme gguf_scheme(const LinearFormat& f) {
  bool four = true, any_min = false, all_signed = true, all_unsigned = true, tables = true;
  int group = 256;
  for (const GgufType type : f.blocks) {
    if (type == GgufType::kNone) continue;
    const GgufTypeInfo* info = gguf_type_info(static_cast<std::uint32_t>(type));
    if (info == nullptr) continue;  // refused when the layer was resolved
    four = four && info->code_bits == 4;
    tables = tables && info->table == CodeTable::kIq4Nl;
    any_min = any_min || info->has_min;
    (info->is_signed ? all_unsigned : all_signed) = false;
    group = std::min(group, info->group);
  }
  four = four && (all_signed || all_unsigned);
  OperandQuant w;
  w.dtype = !four ? DType::kI8 : all_signed ? DType::kI4 : DType::kU4;
  w.granularity = ScaleGranularity::kGroup;
  w.scale_format = ScaleFormat::kF32;
  w.block_n = 1;
  w.block_k = group;
  w.zero_point = any_min ? ZeroPoint::kMin : ZeroPoint::kNone;
  if (tables) {
    w.dtype = DType::kU4;
    w.table = CodeTable::kIq4Nl;
    return with_weight(named("nf4-bf16"), w);
  }
  return with_weight(named(four ? "int4-g128" : "int8-bf16"), w);
}

}  // namespace

std::string_view stored_format_name(StoredFormat format) {
  constexpr std::array<std::string_view, 15> kNames = {"plain",
                                                       "fp8-block",
                                                       "mxfp4",
                                                       "fp8-tensor",
                                                       "fp8-channel",
                                                       "mxfp8",
                                                       "int8",
                                                       "pack-quantized",
                                                       "gptq",
                                                       "awq",
                                                       "nvfp4",
                                                       "mxfp4-pack-quantized",
                                                       "bitsandbytes 4-bit",
                                                       "bitsandbytes 8-bit",
                                                       "GGUF"};
  return kNames[static_cast<std::size_t>(format)];
}

Result<Scheme> linear_scheme(const LinearFormat& f, DType dtype) {
  switch (f.stored) {
    case StoredFormat::kPlain:
      if (dtype == DType::kF32) return named("f32");
      if (dtype == DType::kF16) return named("f16");
      if (dtype == DType::kBF16) return named("bf16");
      return Status(StatusCode::kInvalidDType,
                    fmt::format("weight dtype: got {}, need BF16, F16 or F32", dtype_name(dtype)));
    case StoredFormat::kFp8Block: {
      const Scheme scheme =
          named(f.activation == ActivationQuant::kNone ? "fp8-bf16" : "fp8-block");
      OperandQuant a = scheme.activation;
      if (f.ue8m0) a.scale_format = ScaleFormat::kE8M0;
      return with_activation(scheme, a);
    }
    case StoredFormat::kFp8Tensor:
      return quantised_or_weight_only("fp8-tensor", "fp8-bf16", f.activation);
    case StoredFormat::kFp8Channel:
      return quantised_or_weight_only("fp8-channel", "fp8-bf16", f.activation);
    case StoredFormat::kMxfp8:
      return quantised_or_weight_only("mxfp8", "fp8-bf16", f.activation);
    case StoredFormat::kInt8Channel:
      return quantised_or_weight_only("int8", "int8-bf16", f.activation);
    case StoredFormat::kNvfp4:
      return quantised_or_weight_only("nvfp4", "nvfp4-bf16", f.activation);
    case StoredFormat::kMxfp4:
      return named("mxfp4-bf16");
    case StoredFormat::kMxfp4Linear:
      return mxfp4_scheme(f);
    case StoredFormat::kPacked:
    case StoredFormat::kGptq:
    case StoredFormat::kAwq:
      return integer_scheme(f);
    case StoredFormat::kBnb4: {
      const Scheme scheme = named("nf4-bf16");
      OperandQuant w = scheme.weight;
      w.table = f.table;
      w.block_k = f.group_size;
      return with_weight(scheme, w);
    }
    case StoredFormat::kBnb8:
      return named("int8-bf16");
    case StoredFormat::kGguf:
      return gguf_scheme(f);
  }
  return Status(StatusCode::kInternal, "a stored format without a scheme");
}

Status check_linear_sizes(const LinearFormat& f, std::string_view what, std::int64_t rows,
                          std::int64_t columns) {
  const auto multiple = [&](std::string_view axis, std::int64_t size, std::int64_t unit,
                            std::string_view why) -> Status {
    if (unit <= 1 || size % unit == 0) return {};
    return {StatusCode::kUnsupported,
            fmt::format("{}: got {} {} with {}, need a multiple of {}{}", what, size, axis,
                        stored_format_name(f.stored), unit, why)};
  };
  switch (f.stored) {
    case StoredFormat::kMxfp8:
    case StoredFormat::kMxfp4Linear:
    case StoredFormat::kMxfp4:
      return multiple("columns", columns, kMxfp4GroupSize, "");
    case StoredFormat::kNvfp4:
      return multiple("columns", columns, kNvfp4GroupSize, "");
    case StoredFormat::kAwq:
      MOESAIC_RETURN_IF_ERROR(multiple("rows", rows, 8, " (a word)"));
      return multiple("columns", columns, std::max<std::int64_t>(f.group_size, 2), " (group_size)");
    case StoredFormat::kPacked:
      return multiple("columns", columns, std::max<std::int64_t>(f.group_size, 2), " (group_size)");
    case StoredFormat::kGptq:  // the last group may be partial, words may not
      return multiple("columns", columns, 32 / f.bits, " (a word)");
    case StoredFormat::kBnb4:
      return multiple("columns", columns, f.group_size, " (the block)");
    default:
      return {};
  }
}

std::int64_t slice_unit(const LinearFormat& f) {
  switch (f.stored) {
    case StoredFormat::kFp8Block:
      return kFp8BlockSize;
    case StoredFormat::kMxfp4:
    case StoredFormat::kMxfp4Linear:
    case StoredFormat::kMxfp8:
      return kMxfp4GroupSize;
    case StoredFormat::kNvfp4:
      return kNvfp4GroupSize;
    case StoredFormat::kPacked:
    case StoredFormat::kGptq:
    case StoredFormat::kAwq:
      return f.group_size > 0 ? std::lcm<std::int64_t>(f.group_size, 2) : 2;
    case StoredFormat::kBnb4:
      return f.group_size;
    case StoredFormat::kGguf:
      return ggml_type_info(f.blocks[2]).block_elements;
    default:
      return 1;
  }
}

}  // namespace moesaic
