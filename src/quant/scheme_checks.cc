// What is wrong with a pair of operands, and what becomes of activations, for people.
#include <fmt/format.h>

#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "core/fault.h"
#include "core/refusal.h"
#include "quant/weight_rows.h"

namespace moesaic {
namespace {

using namespace quant::forms;

std::string listed(const std::vector<std::string_view>& texts, std::string_view separator) {
  return fmt::format("{}", fmt::join(texts, separator));
}
std::string weight_texts() {
  std::vector<std::string_view> texts;
  texts.reserve(kWeightRows.size());
  for (const WeightRow& row : kWeightRows) texts.push_back(row.text);
  return listed(texts, "; ");
}
// Names of the schemes that quantise activations.
std::vector<std::string_view> quantising_schemes() {
  std::vector<std::string_view> names;
  for (const Scheme& s : quant_schemes()) {
    if (!s.weight_only()) names.push_back(s.name);
  }
  return names;
}

}  // namespace

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
                    dtype_name(w.dtype), dtype_name(a.dtype), listed(quantising_schemes(), ", ")));
  }
  if (kind != scheme.kind && !MOESAIC_FAULT(quant_kind_of_other_operands)) {
    return invalid(fmt::format("quant.kind: got {}, these operands mean {}; make_scheme says so",
                               compute_scheme_name(scheme.kind), compute_scheme_name(kind)));
  }
  return scheme.forms ? validate_forms(w, *scheme.forms) : Status();
}

}  // namespace moesaic
