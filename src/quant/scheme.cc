// The catalogue of schemes, and what pairs of operands mean: one row per stored weight format and
// one per name.
#include <fmt/format.h>

#include <array>
#include <string>
#include <utility>
#include <vector>

#include "core/fault.h"
#include "core/nearest_name.h"
#include "core/refusal.h"
#include "moesaic/quant.h"
#include "quant/block_scales.h"
#include "quant/bnb.h"
#include "quant/compute_scheme.h"
#include "quant/gguf_blocks.h"
#include "quant/int4_fp8.h"
#include "quant/int_group.h"
#include "quant/mx.h"
#include "quant/nvfp4.h"
#include "quant/operand_forms.h"

namespace moesaic {
namespace {

using Compute = ComputeScheme;
using G = ScaleGranularity;
using F = ScaleFormat;
using namespace quant::forms;

// --- what a pair of operands means ---------------------------------------------------------------

// A stored weight format. F32 activations go with all of them.
struct WeightRow {
  std::string_view text;  // for messages
  bool (*is)(const OperandQuant& weight);
  Compute with_bf16;  // activations that are BF16; kNone: not computed
  Compute (*with)(const OperandQuant& activation) = nullptr;  // any others; null: none
  bool same_groups = false;  // those have groups of as many columns as the weights' blocks
};

constexpr std::array<WeightRow, 13> kWeightRows = {{
    {"plain F32", [](const OperandQuant& w) { return is_bare(w) && is_plain(w, DType::kF32); },
     Compute::kNone},
    {"plain BF16", [](const OperandQuant& w) { return is_bare(w) && is_plain(w, DType::kBF16); },
     Compute::kBF16},
    {"plain F16", [](const OperandQuant& w) { return is_bare(w) && is_plain(w, DType::kF16); },
     Compute::kNone,
     [](const OperandQuant& a) {
       return is_plain(a, DType::kF16) ? Compute::kF16 : Compute::kNone;
     }},
    {"F8_E4M3 with an F32 scale per 128x128 block",
     [](const OperandQuant& w) {
       return is_fp8_blocks(w) && w.block_n == quant::kFp8BlockSize &&
              w.block_k == quant::kFp8BlockSize;
     },
     Compute::kFp8Bf16,
     [](const OperandQuant& a) { return is_fp8_group(a) ? Compute::kFp8Block : Compute::kNone; },
     true},
    {"F8_E4M3 with an F32 scale per block of another size", is_fp8_blocks, Compute::kWeightOnly,
     [](const OperandQuant& a) {
       return is_fp8_group(a, a.block_k) ? Compute::kFp8AnyBlock : Compute::kNone;
     },
     true},
    {"F8_E4M3 with an F32 scale per expert or row",
     [](const OperandQuant& w) {
       return is_bare(w) && (is_per(w, kE4M3, G::kTensor) || is_per(w, kE4M3, G::kChannel));
     },
     Compute::kWeightOnly,
     [](const OperandQuant& a) {
       return is_fp8_token(a) || is_fp8_static(a) ? Compute::kFp8Scaled : Compute::kNone;
     }},
    {"F8_E4M3 with an F8_E8M0 scale per 1x32",
     [](const OperandQuant& w) {
       return is_bare(w) && is_group(w, kE4M3, F::kE8M0, quant::kMxGroupSize);
     },
     Compute::kWeightOnly,
     [](const OperandQuant& a) {
       return is_mx_group(a, kE4M3, ExponentRule::kCeil) ? Compute::kMxfp8 : Compute::kNone;
     }},
    {"F4 with an F8_E8M0 scale per 1x32", is_mxfp4, Compute::kMxfp4Bf16,
     [](const OperandQuant& a) {
       if (is_int8_group(a)) return Compute::kInt8Group;
       if (is_fp8_group(a) || is_fp8_token(a) || is_fp8_static(a)) return Compute::kMxfp4Fp8;
       return is_mx_group(a, kE2M1, ExponentRule::kRound175) ? Compute::kMxfp4 : Compute::kNone;
     }},
    {"F4 with an F8_E4M3 scale per 1x16 and one per expert or row",
     [](const OperandQuant& w) {
       return is_bare(w) &&
              (is_group(w, kE2M1, F::kE4M3, quant::kNvfp4GroupSize, OuterScale::kTensor) ||
               is_group(w, kE2M1, F::kE4M3, quant::kNvfp4GroupSize, OuterScale::kChannel));
     },
     Compute::kWeightOnly,
     [](const OperandQuant& a) {
       const bool same = is_group(a, kE2M1, F::kE4M3, quant::kNvfp4GroupSize, OuterScale::kTensor);
       return same && a.dynamic ? Compute::kNvfp4 : Compute::kNone;
     }},
    {"I4 with an F8_E4M3 scale per 1x128 (or another multiple of 32) and one per row",
     [](const OperandQuant& w) {
       return is_bare(w) && w.block_k > 0 && w.block_k % quant::kInt4Fp8GroupUnit == 0 &&
              is_group(w, DType::kI4, F::kE4M3, w.block_k, OuterScale::kChannel);
     },
     Compute::kWeightOnly,
     [](const OperandQuant& a) {
       return is_fp8_token(a) || is_fp8_static(a) ? Compute::kInt4Fp8 : Compute::kNone;
     }},
    {"I8 with an F32 scale per row",
     [](const OperandQuant& w) { return is_bare(w) && is_per(w, DType::kI8, G::kChannel); },
     Compute::kWeightOnly,
     [](const OperandQuant& a) {
       if (is_int8_group(a)) return Compute::kInt8Group;
       return is_per(a, DType::kI8, G::kToken) && a.dynamic ? Compute::kInt8 : Compute::kNone;
     }},
    {"I4, U4, I8 or U8 with F32 scales per row or group", is_integer, Compute::kWeightOnly,
     [](const OperandQuant& a) { return is_int8_group(a) ? Compute::kInt8Group : Compute::kNone; }},
    {"U4 indices of a table with F32 scales per group", is_table, Compute::kWeightOnly},
}};

constexpr const WeightRow* weight_row(const OperandQuant& w) {
  if (w.dynamic) return nullptr;
  for (const WeightRow& row : kWeightRows) {
    if (row.is(w)) return &row;
  }
  return nullptr;
}

constexpr Compute kind_of(const OperandQuant& w, const OperandQuant& a) {
  const WeightRow* row = weight_row(w);
  if (row == nullptr) return Compute::kNone;
  if (is_plain(a, DType::kF32)) return Compute::kF32;
  if (is_plain(a, DType::kBF16)) return row->with_bf16;
  if (row->with == nullptr || (row->same_groups && a.block_k != w.block_k)) return Compute::kNone;
  return row->with(a);
}

constexpr Scheme made(std::string_view name, const OperandQuant& weight,
                      const OperandQuant& activation, double output_bound) {
  return {name, weight, activation, output_bound, kind_of(weight, activation), std::nullopt};
}

// --- the schemes that have names -----------------------------------------------------------------

constexpr OperandQuant kBF16 = plain(DType::kBF16);
// e4m3 with one F32 scale per 128x128 tile: the block format of DeepSeek-V3 checkpoints.
constexpr OperandQuant kFp8Block =
    scaled(kE4M3, G::kBlock, F::kF32, quant::kFp8BlockSize, quant::kFp8BlockSize);
constexpr OperandQuant kFp8Tensor = scaled(kE4M3, G::kTensor, F::kF32);
constexpr OperandQuant kFp8Channel = scaled(kE4M3, G::kChannel, F::kF32);
constexpr OperandQuant kInt8Channel = scaled(DType::kI8, G::kChannel, F::kF32);
constexpr OperandQuant kMxfp8 = group(kE4M3, F::kE8M0, quant::kMxGroupSize);  // OCP microscaling
constexpr OperandQuant kMxfp4 = group(kE2M1, F::kE8M0, quant::kMxGroupSize);
constexpr OperandQuant kNvfp4 =
    outer(group(kE2M1, F::kE4M3, quant::kNvfp4GroupSize), OuterScale::kTensor);
constexpr OperandQuant kInt4Fp8 =
    outer(group(DType::kI4, F::kE4M3, quant::kInt4Fp8GroupSize), OuterScale::kChannel);

// Bounds are for a whole expert MLP with shared experts, against float64 on the same stored
// weights. f32: accumulation order only. bf16, f16 and the weight-only schemes: the rounding of
// inputs, intermediate and output to 8 or 11 significand bits, twice over. Quantised activations,
// at both GEMMs: 2.6 % per rounding to e4m3, 0.8 % to int8 of a whole row, 11 % to e2m1 with
// power-of-two scales, 9.5 % with e4m3 scales per 16 (docs/spec/quantization.md section 15), and
// margin.
// int8 per group: 0.64 % of normal hidden states and 1.3 % of the intermediate (128 columns; less with
// fewer), hence 1.7 % of the output by the estimate of moesaic/numerics.h, and the margin that int8
// rows have, 1.4. The scale is that of a group, so it does not grow with the row.
constexpr double kWeightOnly = 6e-3, kFp8 = 6e-2, kInt8Groups = 2.4e-2;
constexpr OperandQuant kInt4Group = group(DType::kI4, F::kF32, quant::kIntGroupSize);
constexpr OperandQuant kInt8Group = group(DType::kI8, F::kF32, quant::kIntGroupSize);
constexpr std::array<Scheme, 21> kSchemes = {{
    made("f32", plain(DType::kF32), plain(DType::kF32), 2e-6),
    made("bf16", kBF16, kBF16, kWeightOnly),
    made("f16", plain(DType::kF16), plain(DType::kF16), 1e-3),
    made("fp8-block", kFp8Block, dynamic(group(kE4M3, F::kF32, quant::kFp8BlockSize)), kFp8),
    made("fp8-bf16", kFp8Block, kBF16, kWeightOnly),
    made("mxfp4-bf16", kMxfp4, kBF16, kWeightOnly),
    made("fp8-tensor", kFp8Tensor, token(kE4M3), kFp8),
    made("fp8-channel", kFp8Channel, token(kE4M3), kFp8),
    made("mxfp8", kMxfp8, dynamic(kMxfp8, ExponentRule::kCeil), kFp8),
    made("mxfp4-fp8", kMxfp4, dynamic(group(kE4M3, F::kE8M0, quant::kFp8BlockSize)), kFp8),
    made("mxfp4", kMxfp4, dynamic(kMxfp4, ExponentRule::kRound175), 0.3),
    made("nvfp4", kNvfp4, dynamic(kNvfp4), 0.25),
    made("int4-fp8", kInt4Fp8, token(kE4M3), kFp8),
    made("int8", kInt8Channel, token(DType::kI8), 3e-2),
    made("int4-g128", kInt4Group, kBF16, kWeightOnly),
    made("int8-bf16", kInt8Channel, kBF16, kWeightOnly),
    made("nvfp4-bf16", kNvfp4, kBF16, kWeightOnly),
    made("nf4-bf16", table(group(DType::kU4, F::kF32, quant::kBnbBlockSize), CodeTable::kNf4),
         kBF16, kWeightOnly),
    made("int4-g128-int8", kInt4Group, int8_rows(kInt4Group), kInt8Groups),
    made("int8-g128-int8", kInt8Group, int8_rows(kInt8Group), kInt8Groups),
    made("mxfp4-int8", kMxfp4, int8_rows(kMxfp4), kInt8Groups),
}};

constexpr OperandQuant integers(DType dtype, std::int64_t columns,
                                ZeroPoint zero_point = ZeroPoint::kNone, bool act_order = false) {
  OperandQuant q = group(dtype, F::kF32, columns);
  q.zero_point = zero_point;
  q.act_order = act_order;
  return q;
}
constexpr Scheme weight_only(std::string_view name, const OperandQuant& weight) {
  return made(name, weight, kBF16, kWeightOnly);
}
constexpr Scheme fp8_blocks(std::string_view name, std::int64_t rows, std::int64_t columns) {
  return made(name, scaled(kE4M3, G::kBlock, F::kF32, rows, columns),
              dynamic(group(kE4M3, F::kF32, columns)), kFp8);
}
constexpr Scheme int8_activations(std::string_view name, const OperandQuant& weight) {
  return made(name, weight, int8_rows(weight), kInt8Groups);
}
constexpr Scheme with_forms(Scheme scheme, const OperandQuant& w13, const OperandQuant& w2) {
  scheme.forms = MatrixForms{w13, w2};
  if (scheme.kind == Compute::kInt8Group)
    scheme.activation = int8_rows(scheme.weight, scheme.forms);
  return scheme;
}
constexpr OperandQuant kUint4 =
    integers(DType::kU4, quant::kIntGroupSize, ZeroPoint::kInteger);  // GPTQ and AWQ
// GGUF blocks as the loader leaves them.
constexpr OperandQuant kQ40 = with_scales_of(integers(DType::kI4, quant::kGgufBlock), DType::kF16);
constexpr OperandQuant kQ80 = with_scales_of(integers(DType::kI8, quant::kGgufBlock), DType::kF16);
constexpr OperandQuant kQ4K =
    compact(integers(DType::kU4, quant::kGgufBlock, ZeroPoint::kMin), 0, 6);
constexpr OperandQuant kQ6K = compact(integers(DType::kI8, quant::kGgufHalfBlock), 6, 8);
// Q4_K with Q6_K for w2, as half of the layers of most Q4_K_M files have them.
constexpr OperandQuant kQ4KM =
    compact(integers(DType::kI8, quant::kGgufHalfBlock, ZeroPoint::kMin), 6, 8);
static_assert(is_form_of(kQ4K, kQ4KM) && is_form_of(kQ6K, kQ4KM));
constexpr std::array<Scheme, 21> kStoredSchemes = {{
    // One input scale for all rows.
    made("fp8-static", kFp8Tensor, scaled(kE4M3, G::kTensor, F::kF32), kFp8),
    fp8_blocks("fp8-block-64x64", 64, 64),
    fp8_blocks("fp8-block-32x128", 32, 128),
    weight_only("int4-g32", integers(DType::kI4, 32)),
    weight_only("int8-g128", integers(DType::kI8, quant::kIntGroupSize)),
    weight_only("uint4-g128", kUint4),
    weight_only("uint8-g128", integers(DType::kU8, quant::kIntGroupSize, ZeroPoint::kInteger)),
    // Columns in an order of their own (GPTQ desc_act).
    weight_only("int4-g128-act-order",
                integers(DType::kI4, quant::kIntGroupSize, ZeroPoint::kNone, true)),
    // bitsandbytes fp4.
    weight_only("fp4-bf16", table(integers(DType::kU4, quant::kBnbBlockSize), CodeTable::kFp4)),
    weight_only("q4_0", kQ40),
    weight_only("q8_0", kQ80),
    weight_only("q4_k", kQ4K),
    weight_only("q6_k", kQ6K),
    with_forms(weight_only("q4_k_m", kQ4KM), kQ4K, kQ6K),
    int8_activations("int4-g32-int8", integers(DType::kI4, 32)),
    int8_activations("uint4-g128-int8", kUint4),
    int8_activations("q4_0-int8", kQ40),
    int8_activations("q8_0-int8", kQ80),
    int8_activations("q4_k-int8", kQ4K),
    int8_activations("q6_k-int8", kQ6K),
    with_forms(int8_activations("q4_k_m-int8", kQ4KM), kQ4K, kQ6K),
}};

template <std::size_t kCount>
constexpr bool all_computed(const std::array<Scheme, kCount>& schemes) {
  for (const Scheme& s : schemes) {
    if (s.kind == Compute::kNone) return false;
  }
  return true;
}
static_assert(all_computed(kSchemes) && all_computed(kStoredSchemes));

// --- messages ------------------------------------------------------------------------------------

std::string listed(const std::vector<std::string_view>& texts, std::string_view separator) {
  return fmt::format("{}", fmt::join(texts, separator));
}
std::string weight_texts() {
  std::vector<std::string_view> texts;
  texts.reserve(kWeightRows.size());
  for (const WeightRow& row : kWeightRows) texts.push_back(row.text);
  return listed(texts, "; ");
}
// Names of schemes, all of them or those that quantise activations.
std::vector<std::string_view> scheme_names(bool all) {
  std::vector<std::string_view> names;
  for (const Scheme& s : kSchemes) {
    if (all || !s.weight_only()) names.push_back(s.name);
  }
  return names;
}

}  // namespace

Scheme make_scheme(std::string_view name, const OperandQuant& weight,
                   const OperandQuant& activation, double output_bound) {
  return made(name, weight, activation, output_bound);
}
Scheme with_weight(const Scheme& s, const OperandQuant& weight) {
  return make_scheme(s.name, weight, s.activation, s.output_bound);
}
Scheme with_activation(const Scheme& s, const OperandQuant& activation) {
  Scheme with = make_scheme(s.name, s.weight, activation, s.output_bound);
  with.forms = s.forms;
  return with;
}

Scheme with_stored_weight(const Scheme& s, const OperandQuant& weight,
                          const std::optional<MatrixForms>& forms) {
  const bool follows = s.kind == Compute::kInt8Group && takes_int8_rows(weight) &&
                       !MOESAIC_FAULT(quant_int8_rows_of_the_named_group);
  Scheme with = make_scheme(s.name, weight, follows ? int8_rows(weight, forms) : s.activation,
                            s.output_bound);
  with.forms = forms;
  return with;
}

std::string_view int8_group_scheme_of(const OperandQuant& weight) {
  if (is_mxfp4(weight)) return "mxfp4-int8";
  if (!is_integer(weight)) return {};
  return dtype_bits(weight.dtype) == 4 ? "int4-g128-int8" : "int8-g128-int8";
}

Result<Scheme> with_activation_scales(const Scheme& s, ScaleFormat format) {
  if (!is_fp8_group(s.activation) && s.kind != Compute::kFp8AnyBlock) {
    return unsupported(
        fmt::format("activation_scales: got scheme {} ({}), need one that quantises activations to "
                    "e4m3 per group of {}: fp8-block or mxfp4-fp8",
                    s.name, activation_text(s), quant::kFp8BlockSize));
  }
  if (format != F::kF32 && format != F::kE8M0) {
    return unsupported(fmt::format("activation_scales: got {}, need F32 or E8M0",
                                   format == F::kE4M3 ? "E4M3" : "none"));
  }
  OperandQuant a = s.activation;
  a.scale_format = format;
  return with_activation(s, a);
}

std::string activation_text(const Scheme& scheme) {
  const OperandQuant& a = scheme.activation;
  std::string codes(dtype_name(a.dtype));
  switch (a.granularity) {
    case G::kToken:
      return codes + ", one scale per token";
    case G::kTensor:
      return codes + (a.dynamic ? ", one scale per batch" : ", each expert's stored scale");
    case G::kGroup:
      if (a.outer_scale == OuterScale::kTensor) {
        return fmt::format("{}, an E4M3 scale per {} columns over each expert's stored one", codes,
                           a.block_k);
      }
      return fmt::format("{}, {} per {} columns", codes,
                         a.scale_format == F::kE8M0 ? "a power of two" : "an F32 scale", a.block_k);
    default:
      return codes;
  }
}

namespace {

Status validate_forms(const OperandQuant& w, const MatrixForms& forms) {
  for (const auto& [field, form] : {std::pair{"w13", &forms.w13}, std::pair{"w2", &forms.w2}}) {
    if (is_form_of(*form, w)) continue;
    return invalid(fmt::format(
        "quant.forms.{}: got {} in groups of {}, need integers or indices that {} in groups of {} "
        "hold, in whole groups of these",
        field, dtype_name(form->dtype), form->block_k, dtype_name(w.dtype), w.block_k));
  }
  return {};
}

}  // namespace

Status validate(const Scheme& scheme) {
  const OperandQuant& w = scheme.weight;
  const OperandQuant& a = scheme.activation;
  const Compute kind = kind_of(w, a);
  if (kind == Compute::kNone && weight_row(w) == nullptr) {
    return unsupported(fmt::format("quant.weight: got {} with block {}x{}, need one of: {}",
                                   dtype_name(w.dtype), w.block_n, w.block_k, weight_texts()));
  }
  if (kind == Compute::kNone && a.granularity == G::kTensor && a.dynamic) {
    return unsupported(
        "quant.activation: got one scale of the whole batch computed at run time, which would make "
        "a row's result depend on the rows beside it; need a scale per token or a stored one");
  }
  if (kind == Compute::kNone && is_fp8_blocks(w) && is_fp8_group(a, a.block_k)) {
    return unsupported(fmt::format(
        "quant.activation: got groups of {} columns with weights in blocks of {}x{}, need groups "
        "of {}",
        a.block_k, w.block_n, w.block_k, w.block_k));
  }
  if (kind == Compute::kNone) {
    return unsupported(
        fmt::format("quant: got {} weights with {} activations, need F32 activations (any "
                    "weights), BF16 (any but F32 and F16), F16 (F16 weights), or the quantised "
                    "activations of {} with the weights of that scheme",
                    dtype_name(w.dtype), dtype_name(a.dtype), listed(scheme_names(false), ", ")));
  }
  if (kind != scheme.kind && !MOESAIC_FAULT(quant_kind_of_other_operands)) {
    return invalid(fmt::format("quant.kind: got {}, these operands mean {}; make_scheme says so",
                               compute_scheme_name(scheme.kind), compute_scheme_name(kind)));
  }
  return scheme.forms ? validate_forms(w, *scheme.forms) : Status();
}

std::span<const Scheme> quant_schemes() { return kSchemes; }
std::span<const Scheme> stored_schemes() { return kStoredSchemes; }

Result<Scheme> quant_scheme_from_name(std::string_view name) {
  for (const Scheme& scheme : kSchemes) {
    if (scheme.name == name) return scheme;
  }
  const std::vector<std::string_view> names = scheme_names(true);
  // The name comes from outside: quote a bounded part of it.
  return Status(StatusCode::kNotFound,
                fmt::format("quant scheme: got \"{}\", need one of {}; nearest is \"{}\"",
                            name.substr(0, 64), listed(names, ", "), nearest_name(name, names)));
}

}  // namespace moesaic
