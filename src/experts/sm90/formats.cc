#include "experts/sm90/formats.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <vector>

#include "core/refusal.h"
#include "experts/padded_source.h"
#include "experts/sm90/format_rows.h"

namespace moesaic::cuda {

EpilogueKind epilogue_of(const FormatRow& row, ActivationKind kind) {
  if (kind == ActivationKind::kRelu2NoMul && row.has_relu2) return EpilogueKind::kRelu2;
  if (!is_gated(kind)) return EpilogueKind::kPlain;
  if (kind == ActivationKind::kSwigluStep && !row.has_step) return EpilogueKind::kGeneral;
  const bool swiglu = kind == ActivationKind::kSilu || kind == ActivationKind::kSwigluOai ||
                      kind == ActivationKind::kSwigluStep || kind == ActivationKind::kGeluTanh;
  return swiglu ? EpilogueKind::kSwiglu : EpilogueKind::kGeneral;
}

Status check_activation(const FormatRow& row, const MoeProblem& problem) {
  const ActivationKind kind = problem.activation.kind;
  const EpilogueKind epilogue = epilogue_of(row, kind);
  const bool switched = epilogue == EpilogueKind::kGeneral || epilogue == EpilogueKind::kPlain;
  if (!switched || row.has_any) return {};
  return unsupported(
      fmt::format("activation: got {} with {} weights, need silu, swigluoai, swiglustep{}",
                  activation_name(kind), dtype_name(problem.quant.weight.dtype),
                  row.has_relu2 ? ", gelu_tanh or relu2_no_mul" : " or gelu_tanh"));
}

Result<MoeProblem> fitted_problem(const MoeProblem& problem) {
  MOESAIC_ASSIGN_OR_RETURN(const FormatRow* const format, format_of(problem));
  return experts::with_padded_width(problem, format->inner_multiple);
}

std::array<std::span<const FormatRow>, 2> grouped_formats() {
  return {formats_of_schemes(), formats_of_strips()};
}

LaunchGrouped* launcher_of(const FormatRow& row, const GroupedVariant& variant) {
  const GroupedUnits& units = row.units;
  if (variant.epilogue == EpilogueKind::kRelu2) return units.relu2;
  if (variant.epilogue != EpilogueKind::kSwiglu) return units.any;
  return units.swiglu;
}

std::string names_of_formats(bool (*has)(const FormatRow& row)) {
  std::vector<std::string_view> names;
  for (const std::span<const FormatRow> rows : grouped_formats()) {
    for (const FormatRow& row : rows) {
      if (has != nullptr && !has(row)) continue;
      const std::string_view name = row.name.empty() ? compute_scheme_name(row.scheme) : row.name;
      if (names.empty() || names.back() != name) names.push_back(name);
    }
  }
  if (names.size() == 1) return std::string(names[0]);
  const std::span<const std::string_view> but_last(names.data(), names.size() - 1);
  return fmt::format("{} or {}", fmt::join(but_last, ", "), names.back());
}

namespace {

bool has_weights(const FormatRow& row, const MoeProblem& problem) {
  const Scheme& scheme = problem.quant;
  if (row.takes == nullptr) return true;
  if (row.takes_w2 == nullptr) return row.takes(scheme.weight);
  return scheme.forms && row.takes(scheme.forms->w13) && row.takes_w2(scheme.forms->w2) &&
         check_activation(row, problem).ok();  // the rows of one form for both have more builds
}

}  // namespace

Result<const FormatRow*> format_of(const MoeProblem& problem) {
  const Scheme& scheme = problem.quant;
  for (const std::span<const FormatRow> rows : grouped_formats()) {
    for (const FormatRow& row : rows) {
      if (row.scheme == scheme.kind && has_weights(row, problem)) return &row;
    }
  }
  const std::string_view kind = compute_scheme_name(scheme.kind);
  const bool named = scheme.kind == ComputeScheme::kWeightOnly && !scheme.name.empty();
  return unsupported(
      fmt::format("scheme: got {}, need {}", named ? scheme.name : kind, names_of_formats()));
}

}  // namespace moesaic::cuda
