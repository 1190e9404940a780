#include "layer/quant_selection.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <string>

#include "core/fault.h"
#include "quant/compute_scheme.h"
#include "quant/quantize_weight.h"

namespace moesaic::layer {
namespace {

bool is_plain(const Scheme& stored) { return stored.weight.granularity == ScaleGranularity::kNone; }
bool is_fp8(const Scheme& stored) {
  return stored.weight.dtype == DType::kF8E4M3 &&
         stored.weight.granularity == ScaleGranularity::kBlock;
}

// A scheme's own weights of FP8 blocks with blocks of this size, and so its groups of activations.
Scheme with_blocks(const Scheme& scheme, const OperandQuant& blocks) {
  OperandQuant w = scheme.weight, a = scheme.activation;
  w.block_n = blocks.block_n;
  w.block_k = blocks.block_k;
  if (!scheme.weight_only()) a.block_k = blocks.block_k;
  return make_scheme(scheme.name, w, a, scheme.output_bound);
}

// The same codes with a scale for every row where one scale for all is possible.
OperandQuant by_rows(OperandQuant w) {
  if (w.outer_scale == OuterScale::kTensor) w.outer_scale = OuterScale::kChannel;
  if (w.granularity == ScaleGranularity::kTensor) w.granularity = ScaleGranularity::kChannel;
  return w;
}

// Whether weights stored like this run as `scheme` without touching them.
bool runs_as(const Scheme& stored, const Scheme& scheme) {
  const bool fp8 = stored.weight.dtype == DType::kF8E4M3;  // multipliers of any granularity
  if (fp8 && scheme.name == "fp8-bf16") return true;
  // Integers of any group.
  if (scheme.kind == ComputeScheme::kInt8Group)
    return int8_group_scheme_of(stored.weight) == scheme.name;
  if (is_fp8(stored) && is_fp8(scheme)) return true;
  return by_rows(scheme.weight) == by_rows(stored.weight) &&
         (!quant::has_static_scale(scheme.activation) ||
          quant::has_static_scale(stored.activation));
}

// How far weights may be from the numbers of the file: what the stored scheme's bound has beyond
// that of its name.
double conversion_bound(const Scheme& stored) {
  const Result<Scheme> named = quant_scheme_from_name(stored.name);
  if (!named.ok()) return 0;
  const double own = named->output_bound;
  return std::sqrt(std::max(0.0, stored.output_bound * stored.output_bound - own * own));
}

// `stored` are quantised weights.
Status no_such_pair(const Scheme& stored, std::string_view requested) {
  std::string names = "as-is, f32";
  for (const Scheme& scheme : quant_schemes()) {
    if (runs_as(stored, scheme)) names += fmt::format(", {}", scheme.name);
  }
  return {StatusCode::kUnsupported,
          fmt::format("quant: got {} for weights stored as {}, need {}; nearest is {}", requested,
                      stored.name, names, is_fp8(stored) ? "fp8-bf16" : "as-is")};
}

// The plain scheme that computes in a stored dtype.
std::string_view plain_name(DType dtype) {
  if (dtype == DType::kF32) return "f32";
  return dtype == DType::kF16 ? "f16" : "bf16";
}

// Stored in a quantised format other than FP8 blocks: as it is, in fp32, or with the activations of
// another scheme of the same weights.
Result<QuantPlan> plan_stored(const Scheme& stored, DType activation_dtype,
                              std::string_view requested) {
  QuantPlan plan;
  plan.scheme = stored;
  plan.activation_dtype = activation_dtype;
  if (requested != "as-is") {
    MOESAIC_ASSIGN_OR_RETURN(const Scheme named, quant_scheme_from_name(requested));
    if (requested == "f32" || runs_as(stored, named)) {
      plan.scheme = with_stored_weight(named, stored.weight, stored.forms);
      plan.scheme.output_bound = std::hypot(named.output_bound, conversion_bound(stored));
    } else if (requested != stored.name) {
      return no_such_pair(stored, requested);
    }
  }
  const bool weight_only = plan.scheme.weight_only() && requested != "f32";
  if (weight_only) plan.activation_dtype = DType::kBF16;
  return plan;
}

// With the error of rounding the stored numbers to the scheme's weights.
double bound_of_rounded(const Scheme& scheme) {
  return std::hypot(scheme.output_bound, quant::kWeightErrorGain * quant::kRoundingMargin *
                                             quant::rounding_error(scheme.weight));
}

}  // namespace

Result<QuantPlan> plan_quant(const Scheme& stored, DType activation_dtype,
                             std::string_view requested) {
  if (!is_plain(stored) && !is_fp8(stored)) {
    return plan_stored(stored, activation_dtype, requested);
  }
  std::string_view name = requested;
  if (name == "as-is") {
    name = !is_fp8(stored)        ? plain_name(stored.weight.dtype)
           : stored.weight_only() ? "fp8-bf16"
                                  : "fp8-block";
  }
  QuantPlan plan;
  MOESAIC_ASSIGN_OR_RETURN(plan.scheme, quant_scheme_from_name(name));
  plan.activation_dtype = activation_dtype;
  if (name == "f32") {  // any stored weights, exactly as they are
    plan.scheme = with_weight(plan.scheme, stored.weight);
    return plan;
  }
  if (is_fp8(stored)) {
    if (name != "fp8-block" && name != "fp8-bf16") return no_such_pair(stored, requested);
    if (name == "fp8-bf16") plan.activation_dtype = DType::kBF16;
    plan.scheme = with_blocks(plan.scheme, stored.weight);
    // The checkpoint says how its activations are to be quantised (scale format).
    if (name == "fp8-block" && !stored.weight_only())
      plan.scheme = with_activation(plan.scheme, stored.activation);
    return plan;
  }
  if (is_plain(plan.scheme)) {
    plan.activation_dtype = plan.scheme.weight.dtype;
    if (stored.weight.dtype != plan.scheme.weight.dtype) {
      plan.conversion = LoadConversion::kRound;
      plan.scheme.output_bound = bound_of_rounded(plan.scheme);
    }
    return plan;
  }
  plan.conversion = LoadConversion::kQuantize;
  if (plan.scheme.weight_only()) plan.activation_dtype = DType::kBF16;
  plan.scheme.output_bound = bound_of_rounded(plan.scheme);
  return plan;
}

Result<QuantPlan> plan_shared_quant(const Scheme& shared_stored, const Scheme& routed_stored,
                                    DType activation_dtype, std::string_view requested) {
  // Integers of another width have an int8 scheme of their own.
  if (int8_group_scheme_of(routed_stored.weight) == requested) {
    const std::string_view sibling = int8_group_scheme_of(shared_stored.weight);
    if (!sibling.empty()) requested = sibling;
  }
  const bool left_out = is_plain(shared_stored) && !is_plain(routed_stored);
  const bool keep = left_out && requested != "f32";
  Result<QuantPlan> plan = plan_quant(shared_stored, activation_dtype, keep ? "as-is" : requested);
  // A name that fits the routed experts' weights may mean nothing to those of another format.
  const bool other =
      !is_plain(shared_stored) && by_rows(shared_stored.weight) != by_rows(routed_stored.weight);
  if (plan.ok() || !other || plan.status().code() != StatusCode::kUnsupported ||
      MOESAIC_FAULT(layer_shared_must_follow)) {
    return plan;
  }
  return plan_quant(shared_stored, activation_dtype, "as-is");
}

}  // namespace moesaic::layer
