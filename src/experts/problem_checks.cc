#include "experts/problem_checks.h"

#include <fmt/format.h>

#include <array>
#include <cmath>
#include <limits>
#include <numeric>
#include <string>

#include "core/arena.h"
#include "core/checked.h"
#include "core/fault.h"
#include "core/refusal.h"
#include "permute/sort_slots.h"
#include "quant/block_scales.h"

namespace moesaic {
namespace {

constexpr std::int64_t kMaxInt32 = std::numeric_limits<std::int32_t>::max();
// One expert's matrix must stay far below 2^63 bytes; real ones are below 2^30.
constexpr std::int64_t kMaxMatrixElements = std::int64_t{1} << 58;

Status check_sizes(const MoeProblem& p) {
  struct Field {
    const char* name;
    std::int64_t value, low, high;
  };
  const std::array<Field, 6> fields = {{
      {"num_experts", p.num_experts, 1, kMaxInt32},
      {"num_local_experts", p.num_local_experts, 0, p.num_experts},
      {"top_k", p.top_k, 1, p.num_experts},
      {"hidden_size", p.hidden_size, 1, kMaxInt32},
      {"intermediate_size", p.intermediate_size, 1, kMaxInt32 / 2},
      {"max_tokens", p.max_tokens, 0, kMaxInt32},
  }};
  for (const Field& f : fields) {
    if (f.value < f.low || f.value > f.high) {
      return invalid(fmt::format("{}: got {}, need {} .. {}", f.name, f.value, f.low, f.high));
    }
  }
  MOESAIC_RETURN_IF_ERROR(expect_threads(p.num_threads));
  if (p.format != ActivationFormat::kStandard && p.format != ActivationFormat::kBatched) {
    return invalid(
        fmt::format("format: got {}, need one of ActivationFormat", static_cast<int>(p.format)));
  }
  const auto elements = checked_mul(experts::w13_rows(p), p.hidden_size);
  if (!elements || *elements > kMaxMatrixElements) {
    return {StatusCode::kLimitExceeded,
            fmt::format("hidden_size: {} x intermediate_size {} exceeds 2^58 elements",
                        p.hidden_size, p.intermediate_size)};
  }
  return {};
}

Status check_activation_dtype(const MoeProblem& p) {
  const DType got = p.activation_dtype;
  MOESAIC_RETURN_IF_ERROR(expect_float_dtype("activation_dtype", got, StatusCode::kUnsupported));
  const DType want = quant::needed_activation_dtype(p.quant.kind).value_or(got);
  if (got == want) return {};
  return unsupported(fmt::format("activation_dtype: got {}, scheme {} needs {}", dtype_name(got),
                                 compute_scheme_name(p.quant.kind), dtype_name(want)));
}

Status needs_multiple(std::string_view field, std::int64_t size, std::int64_t multiple,
                      std::string_view what) {
  if (size % multiple == 0) return {};
  return unsupported(fmt::format("{}: got {} on this rank, {} of {} need a multiple of {}", field,
                                 size, what, multiple, multiple));
}

// A group of weights or activations is whole in every row that is cut for tensor parallelism.
// Integer groups, weight blocks (whose rows are counted within gate and up) and groups of e4m3 or
// int8 activations with a scale of their own range may end ragged.
Status check_block_shapes(const MoeProblem& p) {
  const OperandQuant& w = p.quant.weight;
  const OperandQuant& a = p.quant.activation;
  const std::int64_t h = p.hidden_size, i = p.intermediate_size;
  const bool ragged = w.scale_format == ScaleFormat::kF32 && w.table == CodeTable::kNone;
  if (w.granularity == ScaleGranularity::kGroup && !ragged) {
    MOESAIC_RETURN_IF_ERROR(needs_multiple("hidden_size", h, w.block_k, "groups of weights"));
    MOESAIC_RETURN_IF_ERROR(needs_multiple("intermediate_size", i, w.block_k, "groups of weights"));
  }
  // Elements that fill whole bytes, also of the forms in which the matrices are held.
  const auto per_bytes = [](const OperandQuant& form) {
    return 8 / std::gcd(dtype_bits(form.dtype), 8);
  };
  const bool forms = p.quant.forms && !MOESAIC_FAULT(experts_forms_of_odd_rows);
  const OperandQuant &w13 = forms ? p.quant.forms->w13 : w, &w2 = forms ? p.quant.forms->w2 : w;
  MOESAIC_RETURN_IF_ERROR(
      needs_multiple("hidden_size", h, std::lcm(per_bytes(w), per_bytes(w13)), "bytes"));
  MOESAIC_RETURN_IF_ERROR(
      needs_multiple("intermediate_size", i, std::lcm(per_bytes(w), per_bytes(w2)), "bytes"));
  const bool ragged_rows =
      (a.dtype == DType::kF8E4M3 && a.rule == ExponentRule::kNone) || a.dtype == DType::kI8;
  if (a.granularity == ScaleGranularity::kGroup && !ragged_rows) {
    MOESAIC_RETURN_IF_ERROR(needs_multiple("hidden_size", h, a.block_k, "groups of activations"));
    return needs_multiple("intermediate_size", i, a.block_k, "groups of activations");
  }
  return {};
}

}  // namespace

Status check_problem(const MoeProblem& problem) {
  MOESAIC_RETURN_IF_ERROR(check_sizes(problem));
  MOESAIC_RETURN_IF_ERROR(validate(problem.activation));
  MOESAIC_RETURN_IF_ERROR(validate(problem.quant));
  MOESAIC_RETURN_IF_ERROR(check_activation_dtype(problem));
  return check_block_shapes(problem);
}

}  // namespace moesaic

namespace moesaic::experts {

namespace {

// The shape in words is only put together when it is needed: run allocates nothing.
Status check_activation_view(std::string_view field, const ConstTensorView& t, const MoeProblem& p,
                             bool quantized = false) {
  const bool standard = p.format == ActivationFormat::kStandard;
  if (t.rank() != (standard ? 2 : 3)) {
    const std::string need = standard
                                 ? fmt::format("[M, {}]", p.hidden_size)
                                 : fmt::format("[{}, T, {}]", p.num_local_experts, p.hidden_size);
    return {StatusCode::kInvalidShape,
            fmt::format("{}: got {}, need {}", field, t.shape.to_string(), need)};
  }
  return quantized ? Status() : expect_float_dtype(field, t.dtype);
}

// Codes and scales in the place of values.
Status check_quantized_rows(const MoeProblem& p, const ExpertsArgs& a) {
  if (p.quant.kind != ComputeScheme::kFp8Block) {
    return unsupported(fmt::format("hidden_scale: got {}, scheme {} takes no quantised rows",
                                   a.hidden_scale.shape.to_string(),
                                   compute_scheme_name(p.quant.kind)));
  }
  MOESAIC_RETURN_IF_ERROR(expect_dtype("hidden_states", a.hidden_states, DType::kF8E4M3));
  MOESAIC_RETURN_IF_ERROR(expect_dtype("hidden_scale", a.hidden_scale, DType::kF32));
  const std::int64_t groups = ceil_div(p.hidden_size, quant::kFp8BlockSize);
  MOESAIC_RETURN_IF_ERROR(
      expect_shape("hidden_scale", a.hidden_scale,
                   p.format == ActivationFormat::kStandard
                       ? Shape{a.hidden_states.dim(0), groups}
                       : Shape{a.hidden_states.dim(0), a.hidden_states.dim(1), groups}));
  return expect_contiguous("hidden_scale", a.hidden_scale);
}

Status check_map(std::span<const std::int32_t> map, const MoeProblem& p) {
  if (map.empty()) {
    if (p.num_local_experts == p.num_experts) return {};
    return {StatusCode::kInvalidShape,
            fmt::format("expert_map: got none, {} local of {} experts need one of [{}]",
                        p.num_local_experts, p.num_experts, p.num_experts)};
  }
  if (static_cast<std::int64_t>(map.size()) != p.num_experts) {
    return {StatusCode::kInvalidShape,
            fmt::format("expert_map: got [{}], need [{}]", map.size(), p.num_experts)};
  }
  return {};
}

Status check_routing(const MoeProblem& p, const ExpertsArgs& a, std::int64_t tokens) {
  const Shape want{tokens, p.top_k};
  MOESAIC_RETURN_IF_ERROR(expect_dtype("topk_ids", a.topk_ids, DType::kI32));
  MOESAIC_RETURN_IF_ERROR(expect_shape("topk_ids", a.topk_ids, want));
  MOESAIC_RETURN_IF_ERROR(expect_contiguous("topk_ids", a.topk_ids));
  MOESAIC_RETURN_IF_ERROR(expect_dtype("topk_weights", a.topk_weights, DType::kF32));
  MOESAIC_RETURN_IF_ERROR(expect_shape("topk_weights", a.topk_weights, want));
  MOESAIC_RETURN_IF_ERROR(expect_contiguous("topk_weights", a.topk_weights));
  MOESAIC_RETURN_IF_ERROR(check_map(a.expert_map, p));
  return permute::validate_topk_ids(
      {a.topk_ids.as<std::int32_t>(), static_cast<std::size_t>(tokens * p.top_k)}, a.expert_map,
      p.num_experts, p.num_local_experts, p.top_k);
}

Status check_counts(const MoeProblem& p, const ExpertsArgs& a, std::int64_t tokens) {
  if (static_cast<std::int64_t>(a.expert_num_tokens.size()) != p.num_local_experts) {
    return {StatusCode::kInvalidShape,
            fmt::format("expert_num_tokens: got [{}], need [{}]", a.expert_num_tokens.size(),
                        p.num_local_experts)};
  }
  for (std::size_t e = 0; e < a.expert_num_tokens.size(); ++e) {
    if (a.expert_num_tokens[e] < 0 || a.expert_num_tokens[e] > tokens) {
      return invalid(fmt::format("expert_num_tokens[{}]: got {}, need 0 .. {}", e,
                                 a.expert_num_tokens[e], tokens));
    }
  }
  return {};
}

Status check_call_scale(std::string_view field, const ConstTensorView& scale, const MoeProblem& p) {
  if (!scale.present()) return {};
  if (!quant::has_static_scale(p.quant.activation)) {
    return unsupported(fmt::format("{}: got {}, scheme {} has no static activation scales ({})",
                                   field, scale.shape.to_string(), p.quant.name,
                                   activation_text(p.quant)));
  }
  MOESAIC_RETURN_IF_ERROR(expect_device(field, scale, p.device));
  MOESAIC_RETURN_IF_ERROR(expect_dtype(field, scale, DType::kF32));
  const bool one = scale.shape == Shape{1};
  if (!one && !(scale.shape == Shape{p.num_local_experts})) {
    return {StatusCode::kInvalidShape,
            fmt::format("{}: got {}, need [1] or [{}] for each local expert", field,
                        scale.shape.to_string(), p.num_local_experts)};
  }
  MOESAIC_RETURN_IF_ERROR(expect_contiguous(field, scale));
  if (p.device.is_cuda()) return {};  // looked at there
  for (std::int64_t e = 0; e < scale.dim(0); ++e) {
    const float v = scale.as<float>()[e];
    if (v > 0 && std::isfinite(v)) continue;
    return invalid(fmt::format("{}: got {} at [{}], need finite numbers above 0", field, v, e));
  }
  return {};
}

Status check_overlaps(const ExpertsArgs& a, std::int64_t input_bytes, std::int64_t output_bytes) {
  struct Range {
    const char* name;
    const void* data;
    std::int64_t bytes;
  };
  const auto ids_bytes = contiguous_bytes(a.topk_ids.dtype, a.topk_ids.shape);
  const auto weights_bytes = contiguous_bytes(a.topk_weights.dtype, a.topk_weights.shape);
  const auto scale_bytes = contiguous_bytes(a.hidden_scale.dtype, a.hidden_scale.shape);
  const auto floats_of = [](const ConstTensorView& t) {
    return t.present() ? t.dim(0) * std::int64_t{sizeof(float)} : 0;  // checked: [n], contiguous
  };
  const std::array<Range, 8> inputs = {{
      {"hidden_states", a.hidden_states.data, input_bytes},
      {"hidden_scale", a.hidden_scale.data,
       a.hidden_scale.present() && scale_bytes.ok() ? *scale_bytes : 0},
      {"topk_ids", a.topk_ids.data, ids_bytes.ok() ? *ids_bytes : 0},
      {"topk_weights", a.topk_weights.data, weights_bytes.ok() ? *weights_bytes : 0},
      {"expert_map", a.expert_map.data(), static_cast<std::int64_t>(a.expert_map.size_bytes())},
      {"expert_num_tokens", a.expert_num_tokens.data(),
       static_cast<std::int64_t>(a.expert_num_tokens.size_bytes())},
      {"a1_scale", a.a1_scale.data, floats_of(a.a1_scale)},
      {"a2_scale", a.a2_scale.data, floats_of(a.a2_scale)},
  }};
  const auto workspace_bytes = static_cast<std::int64_t>(a.workspace.size());
  for (const Range& in : inputs) {
    MOESAIC_RETURN_IF_ERROR(
        expect_disjoint("output", a.output.data, output_bytes, in.name, in.data, in.bytes));
    MOESAIC_RETURN_IF_ERROR(expect_disjoint("workspace", a.workspace.data(), workspace_bytes,
                                            in.name, in.data, in.bytes));
  }
  return expect_disjoint("workspace", a.workspace.data(), workspace_bytes, "output", a.output.data,
                         output_bytes);
}

}  // namespace

Status check_call_scales(const MoeProblem& problem, const ConstTensorView& a1_scale,
                         const ConstTensorView& a2_scale) {
  MOESAIC_RETURN_IF_ERROR(check_call_scale("a1_scale", a1_scale, problem));
  return check_call_scale("a2_scale", a2_scale, problem);
}

Result<std::int64_t> strided_extent_bytes(std::string_view field, const ConstTensorView& t) {
  MOESAIC_ASSIGN_OR_RETURN(const std::int64_t elements, t.shape.num_elements());
  if (elements == 0) return std::int64_t{0};
  if (!t.present()) {
    return invalid(
        fmt::format("{}: got a null pointer, need {} elements", field, t.shape.to_string()));
  }
  std::int64_t last = 0;
  for (int d = 0; d < t.rank(); ++d) {
    const std::int64_t stride = t.strides[static_cast<std::size_t>(d)];
    const bool dense_last = d + 1 < t.rank() || t.dim(d) == 1 || stride == 1;
    if ((stride < 0 && t.dim(d) > 1) || !dense_last) {
      return Status(StatusCode::kInvalidLayout,
                    fmt::format("{}: got stride {} on axis {}, need {}", field, stride, d,
                                dense_last ? ">= 0" : "1 (dense rows)"));
    }
    const auto step = checked_mul(t.dim(d) - 1, stride);
    const auto next = step ? checked_add(last, *step) : std::nullopt;
    if (!next || *next > kMaxMatrixElements) {
      return Status(StatusCode::kLimitExceeded,
                    fmt::format("{}: strides reach beyond 2^58 elements", field));
    }
    last = *next;
  }
  return (last + 1) * (dtype_bits(t.dtype) / 8);
}

Status expect_disjoint(std::string_view field_a, const void* a, std::int64_t bytes_a,
                       std::string_view field_b, const void* b, std::int64_t bytes_b) {
  if (bytes_a == 0 || bytes_b == 0) return {};
  const auto begin_a = reinterpret_cast<std::uintptr_t>(a);
  const auto begin_b = reinterpret_cast<std::uintptr_t>(b);
  if (begin_a + static_cast<std::uintptr_t>(bytes_a) <= begin_b ||
      begin_b + static_cast<std::uintptr_t>(bytes_b) <= begin_a) {
    return {};
  }
  return {StatusCode::kAliasing,
          fmt::format("{} overlaps {}, need disjoint memory", field_a, field_b)};
}

// Rows that a trace wants measured.
static Status check_numerics(const MoeProblem& p, const ExpertsArgs& a, std::int64_t tokens) {
  if (a.numerics.empty()) return {};
  if (p.format != ActivationFormat::kStandard || a.hidden_scale.present()) {
    return {StatusCode::kUnsupported,
            "numerics: got rows in the batched format or rows that were quantised elsewhere, need "
            "rows [M, H] that are quantised here"};
  }
  if (static_cast<std::int64_t>(a.numerics.size()) != tokens) {
    return {StatusCode::kInvalidShape,
            fmt::format("numerics: got [{}], need [{}], one per row", a.numerics.size(), tokens)};
  }
  return {};
}

Status check_run_args(const MoeProblem& p, const ExpertsArgs& a, std::int64_t workspace_needed) {
  const bool standard = p.format == ActivationFormat::kStandard;
  const bool quantized = a.hidden_scale.present();
  for (const auto& [field, view] :
       {std::pair{"hidden_states", a.hidden_states}, std::pair{"hidden_scale", a.hidden_scale},
        std::pair{"topk_ids", a.topk_ids}, std::pair{"topk_weights", a.topk_weights},
        std::pair{"output", ConstTensorView(a.output)}}) {
    MOESAIC_RETURN_IF_ERROR(expect_device(field, view, p.device));
  }
  MOESAIC_RETURN_IF_ERROR(check_activation_view("hidden_states", a.hidden_states, p, quantized));
  if (quantized) MOESAIC_RETURN_IF_ERROR(check_quantized_rows(p, a));
  MOESAIC_RETURN_IF_ERROR(check_activation_view("output", a.output, p));
  const std::int64_t tokens = tokens_of(p, a);
  const Shape want =
      standard ? Shape{tokens, p.hidden_size} : Shape{p.num_local_experts, tokens, p.hidden_size};
  MOESAIC_RETURN_IF_ERROR(expect_shape("hidden_states", a.hidden_states, want));
  MOESAIC_RETURN_IF_ERROR(expect_shape("output", a.output, want));
  MOESAIC_ASSIGN_OR_RETURN(const std::int64_t input_bytes,
                           strided_extent_bytes("hidden_states", a.hidden_states));
  MOESAIC_RETURN_IF_ERROR(expect_contiguous("output", a.output));
  MOESAIC_ASSIGN_OR_RETURN(const std::int64_t output_bytes,
                           contiguous_bytes(a.output.dtype, a.output.shape));
  if (standard) {
    MOESAIC_RETURN_IF_ERROR(check_routing(p, a, tokens));
  } else {
    MOESAIC_RETURN_IF_ERROR(check_counts(p, a, tokens));
  }
  MOESAIC_RETURN_IF_ERROR(check_numerics(p, a, tokens));
  if (!MOESAIC_FAULT(call_scales_not_checked)) {
    MOESAIC_RETURN_IF_ERROR(check_call_scales(p, a.a1_scale, a.a2_scale));
  }
  if (static_cast<std::int64_t>(a.workspace.size()) < workspace_needed) {
    return {StatusCode::kWorkspaceTooSmall,
            fmt::format("workspace: got {} bytes, need {}", a.workspace.size(), workspace_needed)};
  }
  if (workspace_needed > 0 && a.workspace.data() == nullptr) {
    return {StatusCode::kInvalidArgument,
            fmt::format("workspace: got null, need {} bytes of memory", workspace_needed)};
  }
  if (reinterpret_cast<std::uintptr_t>(a.workspace.data()) % kArenaAlignment != 0) {
    return {StatusCode::kInvalidLayout, "workspace: got an unaligned pointer, need 64 bytes"};
  }
  return check_overlaps(a, input_bytes, output_bytes);
}

}  // namespace moesaic::experts
