// The catalogue of schemes: one row per name. What pairs of operands mean is in weight_rows.h, what is
// wrong with one in scheme_checks.cc.
#include <fmt/format.h>

#include <array>
#include <string_view>
#include <vector>

#include "core/fault.h"
#include "core/nearest_name.h"
#include "moesaic/quant.h"
#include "quant/bnb.h"
#include "quant/gguf_blocks.h"
#include "quant/int_group.h"
#include "quant/weight_rows.h"

namespace moesaic {
namespace {

using namespace quant::forms;

constexpr Scheme made(std::string_view name, const OperandQuant& weight,
                      const OperandQuant& activation, double output_bound) {
  return {name, weight, activation, output_bound, kind_of(weight, activation), std::nullopt};
}

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
constexpr OperandQuant kQ2K =
    compact(integers(DType::kU4, quant::kGgufHalfBlock, ZeroPoint::kMin), 0, 6);
constexpr OperandQuant kQ3K = compact(integers(DType::kI4, quant::kGgufHalfBlock), 0, 8);
constexpr OperandQuant kQ4K =
    compact(integers(DType::kU4, quant::kGgufBlock, ZeroPoint::kMin), 0, 6);
constexpr OperandQuant kQ5K =
    compact(integers(DType::kI8, quant::kGgufBlock, ZeroPoint::kMin), 6, 6);
constexpr OperandQuant kQ6K = compact(integers(DType::kI8, quant::kGgufHalfBlock), 6, 8);
// Any two of these. Q4_K or Q5_K with Q6_K for w2, as half of the layers of most Q4_K_M and Q5_K_M files
// have them, and Q3_K with Q4_K, as most layers of Q3_K_M files.
constexpr OperandQuant kTwoKTypes =
    compact(integers(DType::kI8, quant::kGgufHalfBlock, ZeroPoint::kMin), 6, 8);
static_assert(is_form_of(kQ3K, kTwoKTypes) && is_form_of(kQ4K, kTwoKTypes) &&
              is_form_of(kQ5K, kTwoKTypes) && is_form_of(kQ6K, kTwoKTypes));
constexpr std::array<Scheme, 26> kStoredSchemes = {{
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
    weight_only("q2_k", kQ2K),
    weight_only("q3_k", kQ3K),
    weight_only("q4_k", kQ4K),
    weight_only("q5_k", kQ5K),
    weight_only("q6_k", kQ6K),
    with_forms(weight_only("q3_k_m", kTwoKTypes), kQ3K, kQ4K),
    with_forms(weight_only("q4_k_m", kTwoKTypes), kQ4K, kQ6K),
    with_forms(weight_only("q5_k_m", kTwoKTypes), kQ5K, kQ6K),
    int8_activations("int4-g32-int8", integers(DType::kI4, 32)),
    int8_activations("uint4-g128-int8", kUint4),
    int8_activations("q4_0-int8", kQ40),
    int8_activations("q8_0-int8", kQ80),
    int8_activations("q4_k-int8", kQ4K),
    int8_activations("q6_k-int8", kQ6K),
    with_forms(int8_activations("q4_k_m-int8", kTwoKTypes), kQ4K, kQ6K),
}};

template <std::size_t kCount>
constexpr bool all_computed(const std::array<Scheme, kCount>& schemes) {
  for (const Scheme& s : schemes) {
    if (s.kind == Compute::kNone) return false;
  }
  return true;
}
static_assert(all_computed(kSchemes) && all_computed(kStoredSchemes));

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

std::span<const Scheme> quant_schemes() { return kSchemes; }
std::span<const Scheme> stored_schemes() { return kStoredSchemes; }

Result<Scheme> quant_scheme_from_name(std::string_view name) {
  for (const Scheme& scheme : kSchemes) {
    if (scheme.name == name) return scheme;
  }
  std::vector<std::string_view> names;
  names.reserve(kSchemes.size());
  for (const Scheme& scheme : kSchemes) names.push_back(scheme.name);
  for (const Scheme& scheme : kStoredSchemes) {
    if (scheme.name != name) continue;
    return Status(StatusCode::kNotFound,
                  fmt::format("quant scheme: got \"{}\", a format that only files have, need "
                              "\"as-is\" for such a file, or one of {}",
                              name, fmt::join(names, ", ")));
  }
  // The name comes from outside: quote a bounded part of it.
  return Status(StatusCode::kNotFound,
                fmt::format("quant scheme: got \"{}\", need one of {}; nearest is \"{}\"",
                            name.substr(0, 64), fmt::join(names, ", "), nearest_name(name, names)));
}

}  // namespace moesaic
