#include "router/router_checks.h"

#include <fmt/format.h>

#include <cmath>
#include <limits>

#include "core/checked.h"
#include "core/refusal.h"
#include "core/routing_spec.h"
#include "core/row_span.h"
#include "moesaic/log.h"

namespace moesaic::router {
namespace {

constexpr std::int64_t kMaxId = std::numeric_limits<std::int32_t>::max();

// Methods whose weights a router does not scale: a layer does it for them.
Status check_scaling(const RoutingSpec& r) {
  const bool unscalable = r.method == RoutingMethod::kLlama4 ||
                          r.method == RoutingMethod::kCustom ||
                          r.method == RoutingMethod::kSimulated;
  if (unscalable && r.routed_scaling_factor != 1.0 && !r.scale_on_output) {
    return invalid(
        fmt::format("routing.routed_scaling_factor: got {} with method {}, need 1 or "
                    "scale_on_output",
                    r.routed_scaling_factor, routing_method_name(r.method)));
  }
  return {};
}

// A vector of fp32 numbers, one per expert: shape, dtype, layout, host memory, every value finite.
Status check_bias(std::string_view field, const ConstTensorView& bias, std::int64_t columns) {
  MOESAIC_RETURN_IF_ERROR(expect_shape(field, bias, {columns}));
  MOESAIC_RETURN_IF_ERROR(expect_dtype(field, bias, DType::kF32));
  MOESAIC_RETURN_IF_ERROR(expect_contiguous(field, bias));
  MOESAIC_RETURN_IF_ERROR(expect_device(field, bias, Device::cpu()));
  for (std::int64_t e = 0; e < columns; ++e) {
    if (!std::isfinite(bias.as<float>()[e])) {
      return invalid(
          fmt::format("{}[{}]: got {}, need a finite number", field, e, bias.as<float>()[e]));
    }
  }
  return {};
}

Status present_iff(std::string_view field, bool present, bool needed, std::string_view reason) {
  if (present == needed) return {};
  return invalid(fmt::format("{}: {}, need {} with {}", field, present ? "given" : "absent",
                             needed ? "it" : "none", reason));
}

Status check_hash_table(const ConstTensorView& table, const RoutingSpec& r) {
  if (table.rank() != 2 || table.dim(0) < 1 || table.dim(1) != r.top_k) {
    return {StatusCode::kInvalidShape,
            fmt::format("hash_table: got {}, need [vocabulary, top_k {}]", table.shape.to_string(),
                        r.top_k)};
  }
  MOESAIC_RETURN_IF_ERROR(expect_dtype("hash_table", table, DType::kI32));
  MOESAIC_RETURN_IF_ERROR(expect_contiguous("hash_table", table));
  MOESAIC_RETURN_IF_ERROR(expect_device("hash_table", table, Device::cpu()));
  MOESAIC_ASSIGN_OR_RETURN(const std::int64_t n, table.shape.num_elements());
  for (std::int64_t i = 0; i < n; ++i) {
    const std::int32_t id = table.as<std::int32_t>()[i];
    if (id < 0 || id >= r.num_experts) {
      return invalid(fmt::format("hash_table[{}, {}]: got expert {}, need 0 to {}", i / r.top_k,
                                 i % r.top_k, id, r.num_experts - 1));
    }
  }
  return {};
}

Status check_input_ids(const Router::Args& args, std::int64_t num_tokens, std::int64_t vocab,
                       std::int64_t vision_base) {
  if (vocab == 0) return {};
  MOESAIC_RETURN_IF_ERROR(expect_shape("input_ids", args.input_ids, {num_tokens}));
  MOESAIC_RETURN_IF_ERROR(expect_dtype("input_ids", args.input_ids, DType::kI32));
  MOESAIC_RETURN_IF_ERROR(expect_contiguous("input_ids", args.input_ids));
  for (std::int64_t t = 0; t < num_tokens; ++t) {
    // Whatever stands in a padding row is not a token.
    if (args.padding_mask.present() && args.padding_mask.as<std::uint8_t>()[t] != 0) continue;
    const std::int64_t id = args.input_ids.as<std::int32_t>()[t];
    if (is_vision_token(id, vision_base)) continue;
    if (id < 0 || id >= vocab) {
      return invalid(fmt::format("input_ids[{}]: got {}, need 0 to {} (rows of the hash table - 1)",
                                 t, id, vocab - 1));
    }
  }
  return {};
}

Status check_zero_expert_tensors(const Router::Args& args, const RoutingSpec& spec,
                                 std::int64_t num_tokens) {
  const ConstTensorView& x = args.hidden_states;
  if (spec.num_zero_experts == 0) {
    if (args.zero_expert_output.present()) {
      return invalid("zero_expert_output: got one without zero experts, need none");
    }
    // What the function makes of the rows is its business.
    if (spec.method == RoutingMethod::kCustom && x.present() &&
        (x.rank() != 2 || x.dim(0) != num_tokens)) {
      return {StatusCode::kInvalidShape,
              fmt::format("hidden_states: got {}, need [{}, hidden_size] for custom routing",
                          x.shape.to_string(), num_tokens)};
    }
    return {};
  }
  if (x.rank() != 2 || x.dim(0) != num_tokens) {
    return {StatusCode::kInvalidShape,
            fmt::format("hidden_states: got {}, need [{}, hidden_size] for zero experts",
                        x.shape.to_string(), num_tokens)};
  }
  MOESAIC_RETURN_IF_ERROR(expect_shape("hidden_states", x, x.shape));
  MOESAIC_RETURN_IF_ERROR(expect_float_dtype("hidden_states", x.dtype));
  if (num_tokens > 0 && x.dim(1) > 1 && x.strides[1] != 1) {
    return {StatusCode::kInvalidLayout,
            fmt::format("hidden_states: got a stride of {} within rows, need 1", x.strides[1])};
  }
  MOESAIC_RETURN_IF_ERROR(expect_shape("zero_expert_output", args.zero_expert_output, x.shape));
  if (args.zero_expert_output.dtype != DType::kF32) {
    MOESAIC_RETURN_IF_ERROR(expect_dtype("zero_expert_output", args.zero_expert_output, x.dtype));
  }
  return expect_contiguous("zero_expert_output", args.zero_expert_output);
}

Status check_overlaps(const Router::Args& args, bool zero_experts) {
  struct Named {
    std::string_view name;
    ConstTensorView view;
  };
  const Named outputs[] = {
      {"topk_weights", args.topk_weights},
      {"topk_ids", args.topk_ids},
      {"zero_expert_output",
       zero_experts ? ConstTensorView(args.zero_expert_output) : ConstTensorView()}};
  const ConstTensorView& x = args.hidden_states;
  const bool has_rows = zero_experts && x.present() && x.dim(0) > 0;
  ConstTensorView rows = x;
  if (has_rows) {
    MOESAIC_ASSIGN_OR_RETURN(rows, row_span("hidden_states", x));
  }
  const Named inputs[] = {{"hidden_states", rows},
                          {"router_logits", args.router_logits},
                          {"input_ids", args.input_ids},
                          {"padding_mask", args.padding_mask}};
  for (std::size_t i = 0; i < std::size(outputs); ++i) {
    for (std::size_t j = i + 1; j < std::size(outputs); ++j) {
      MOESAIC_RETURN_IF_ERROR(
          expect_no_overlap(outputs[i].name, outputs[i].view, outputs[j].name, outputs[j].view));
    }
    for (const Named& input : inputs) {
      MOESAIC_RETURN_IF_ERROR(
          expect_no_overlap(input.name, input.view, outputs[i].name, outputs[i].view));
    }
  }
  return {};
}

}  // namespace

Result<RoutingSpec> effective_routing(const RoutingSpec& spec) {
  RoutingSpec effective = spec;
  const std::int64_t groups = spec.num_expert_group;
  if (spec.method == RoutingMethod::kGroupedTopK && spec.num_experts >= 1 && groups >= 1 &&
      (spec.num_experts <= groups || spec.num_experts % groups != 0)) {
    log_warning_once(
        fmt::format("routing.num_expert_group: {} groups of {} experts are impossible; "
                    "falling back to ungrouped top-k",
                    groups, spec.num_experts));
    effective.method = RoutingMethod::kTopK;
    effective.num_expert_group = 1;
    effective.topk_group = 1;
    effective.group_by_best_two = false;
  }
  MOESAIC_RETURN_IF_ERROR(validate_routing(effective));
  MOESAIC_RETURN_IF_ERROR(check_scaling(effective));
  if (effective.num_experts + effective.num_zero_experts > kMaxId) {
    return Status(
        StatusCode::kLimitExceeded,
        fmt::format("routing.num_experts: got {} (+ {} zero experts), need ids that fit 31 "
                    "bits",
                    effective.num_experts, effective.num_zero_experts));
  }
  return effective;
}

Status check_router_parts(const Router::Options& o, const RoutingSpec& r) {
  const std::int64_t columns = r.num_experts + r.num_zero_experts;
  const auto method = fmt::format("method {}", routing_method_name(r.method));
  MOESAIC_RETURN_IF_ERROR(
      present_iff("correction_bias", o.correction_bias.present(), r.has_correction_bias,
                  fmt::format("routing.has_correction_bias {}", r.has_correction_bias)));
  if (r.has_correction_bias) {
    MOESAIC_RETURN_IF_ERROR(check_bias("correction_bias", o.correction_bias, columns));
  }
  MOESAIC_RETURN_IF_ERROR(
      present_iff("expert_scale", o.expert_scale.present(), r.has_expert_scale,
                  fmt::format("routing.has_expert_scale {}", r.has_expert_scale)));
  if (r.has_expert_scale) {
    MOESAIC_RETURN_IF_ERROR(check_bias("expert_scale", o.expert_scale, columns));
  }
  const bool hash = r.method == RoutingMethod::kHash;
  MOESAIC_RETURN_IF_ERROR(present_iff("hash_table", o.hash_table.present(), hash, method));
  if (hash) MOESAIC_RETURN_IF_ERROR(check_hash_table(o.hash_table, r));
  const bool vision = o.vision_token_base > 0;
  if (vision && !hash) {
    return invalid(
        fmt::format("vision_token_base: got {}, need 0 with {}", o.vision_token_base, method));
  }
  if (o.vision_token_base < 0) {
    return invalid(
        fmt::format("vision_token_base: got {}, need 0 (none) or more", o.vision_token_base));
  }
  MOESAIC_RETURN_IF_ERROR(present_iff("vision_bias", o.vision_bias.present(), vision,
                                      fmt::format("vision_token_base {}", o.vision_token_base)));
  if (vision) MOESAIC_RETURN_IF_ERROR(check_bias("vision_bias", o.vision_bias, columns));
  const bool custom = r.method == RoutingMethod::kCustom;
  const bool gpu = o.device.is_cuda();
  if (gpu ? static_cast<bool>(o.custom) : static_cast<bool>(o.custom_on_device)) {
    return unsupported(fmt::format("{}: got one for a router on {}, need {}",
                                   gpu ? "custom" : "custom_on_device", o.device.to_string(),
                                   gpu ? "custom_on_device" : "custom"));
  }
  MOESAIC_RETURN_IF_ERROR(present_iff(gpu ? "custom_on_device" : "custom",
                                      o.custom || o.custom_on_device, custom, method));
  MOESAIC_RETURN_IF_ERROR(present_iff("simulation_strategy", !o.simulation_strategy.empty(),
                                      r.method == RoutingMethod::kSimulated, method));
  if (o.num_fused_shared_experts < 0 || o.num_fused_shared_experts > kMaxId - columns) {
    return invalid(fmt::format("num_fused_shared_experts: got {}, need 0 to {}",
                               o.num_fused_shared_experts, kMaxId - columns));
  }
  if (!std::isfinite(o.shared_expert_weight)) {
    return invalid(
        fmt::format("shared_expert_weight: got {}, need a finite number", o.shared_expert_weight));
  }
  return expect_threads(o.num_threads);
}

Status check_select_args(const Router::Args& args, const RoutingSpec& spec, std::int64_t slots,
                         std::int64_t vocab, std::int64_t vision_base) {
  const std::int64_t columns = spec.num_experts + spec.num_zero_experts;
  const ConstTensorView& logits = args.router_logits;
  if (logits.rank() != 2 || logits.dim(0) < 0 || logits.dim(1) != columns) {
    return {StatusCode::kInvalidShape, fmt::format("router_logits: got {}, need [num_tokens, {}]",
                                                   logits.shape.to_string(), columns)};
  }
  const std::int64_t num_tokens = logits.dim(0);
  MOESAIC_RETURN_IF_ERROR(expect_float_dtype("router_logits", logits.dtype));
  MOESAIC_RETURN_IF_ERROR(expect_contiguous("router_logits", logits));
  MOESAIC_RETURN_IF_ERROR(expect_shape("router_logits", logits, {num_tokens, columns}));
  MOESAIC_RETURN_IF_ERROR(expect_shape("topk_weights", args.topk_weights, {num_tokens, slots}));
  MOESAIC_RETURN_IF_ERROR(expect_dtype("topk_weights", args.topk_weights, DType::kF32));
  MOESAIC_RETURN_IF_ERROR(expect_contiguous("topk_weights", args.topk_weights));
  MOESAIC_RETURN_IF_ERROR(expect_shape("topk_ids", args.topk_ids, {num_tokens, slots}));
  MOESAIC_RETURN_IF_ERROR(expect_contiguous("topk_ids", args.topk_ids));
  const DType ids_dtype = args.topk_ids.dtype;
  if (ids_dtype != DType::kI32 && ids_dtype != DType::kI64 && ids_dtype != DType::kU32) {
    return {StatusCode::kInvalidDType,
            fmt::format("topk_ids: got {}, need I32, I64 or U32", dtype_name(ids_dtype))};
  }
  if (args.padding_mask.present()) {
    MOESAIC_RETURN_IF_ERROR(expect_shape("padding_mask", args.padding_mask, {num_tokens}));
    MOESAIC_RETURN_IF_ERROR(expect_dtype("padding_mask", args.padding_mask, DType::kU8));
    MOESAIC_RETURN_IF_ERROR(expect_contiguous("padding_mask", args.padding_mask));
  }
  MOESAIC_RETURN_IF_ERROR(check_input_ids(args, num_tokens, vocab, vision_base));
  MOESAIC_RETURN_IF_ERROR(check_zero_expert_tensors(args, spec, num_tokens));
  return check_overlaps(args, spec.num_zero_experts > 0);
}

std::string router_name(const RoutingSpec& r, const std::string& simulation_strategy) {
  const std::string scored =
      std::string(scoring_func_name(r.scoring_func)) + (r.has_correction_bias ? "_bias" : "");
  const std::string renorm = r.renormalize ? "_renorm" : "";
  switch (r.method) {
    case RoutingMethod::kTopK:
      return scored + "_topk" + renorm + (r.has_expert_scale ? "_expert_scale" : "");
    case RoutingMethod::kGroupedTopK:
      return scored + (r.group_by_best_two && !r.has_correction_bias ? "_best_two" : "") +
             "_grouped_topk" + renorm;
    case RoutingMethod::kTopKSoftmax:
      return "topk_softmax";
    case RoutingMethod::kLlama4:
      return "topk_sigmoid";
    case RoutingMethod::kSparseMixer:
      return "sparse_mixer";
    case RoutingMethod::kPNorm:
      return "softmax_topk_p_norm";
    case RoutingMethod::kZeroExpert:
      return scored + "_zero_expert_topk" + renorm;
    case RoutingMethod::kHash:
      return "hash_" + std::string(scoring_func_name(r.scoring_func)) + renorm;
    case RoutingMethod::kCustom:
      return "custom";
    case RoutingMethod::kSimulated:
      return "simulated_" + simulation_strategy;
  }
  return "unknown";
}

}  // namespace moesaic::router
