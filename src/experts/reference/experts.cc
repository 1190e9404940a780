#include "experts/reference/experts.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <new>
#include <string>

#include "activation/reference/activation.h"
#include "core/arena.h"
#include "core/checked.h"
#include "core/fault.h"
#include "core/refusal.h"
#include "cpu/tiers.h"
#include "experts/problem_checks.h"
#include "experts/reference/matrix.h"
#include "experts/row_error.h"
#include "experts/static_scales.h"
#include "numerics/element.h"
#include "numerics/float_codec.h"
#include "permute/sort_slots.h"
#include "quant/block_scales.h"

namespace moesaic::experts {
namespace {

float round_to(DType dtype, float v) {
  if (dtype == DType::kBF16) return f32_from_bf16(bf16_from_f32(v));
  if (dtype == DType::kF16) return f32_from_f16(f16_from_f32(v));
  return v;
}

// --- The backend ---------------------------------------------------------------------------------

// Buffers for one row at a time.
struct Scratch {
  float *x, *x_scales, *scales, *input, *gate_up, *inner, *gathered, *result, *sum;
  std::uint8_t* codes;  // as wide as the wider of x and the intermediate
  StaticScales a1, a2;  // of this call; not in the arena
};

Scratch take_scratch(Arena& arena, const MoeProblem& p) {
  Scratch s{};
  const std::int64_t widest = std::max(p.hidden_size, p.intermediate_size);
  s.x = arena.take<float>(p.hidden_size);
  s.x_scales = arena.take<float>(ceil_div(p.hidden_size, quant::kFp8BlockSize));
  s.scales = arena.take<float>(ref_max_scales(p.quant.activation, widest));
  s.input = arena.take<float>(p.hidden_size);
  s.gate_up = arena.take<float>(w13_rows(p));
  s.inner = arena.take<float>(p.intermediate_size);
  s.gathered = arena.take<float>(widest);
  s.result = arena.take<float>(p.hidden_size);
  s.sum = arena.take<float>(p.hidden_size);
  s.codes = arena.take<std::uint8_t>(widest);
  return s;
}

class RefExperts final : public Experts {
 public:
  explicit RefExperts(const MoeProblem& problem)
      : p_(problem),
        operand_(quant::operand_dtype(problem.activation_dtype, problem.quant.kind)),
        layout_(is_gated(problem.activation.kind) ? GateUpLayout::kGateThenUp
                                                  : GateUpLayout::kNonGated),
        w13_(problem.quant, problem.num_local_experts, w13_parts(problem), w13_rows(problem),
             problem.hidden_size),
        w2_(problem.quant, problem.num_local_experts, 1, problem.hidden_size,
            problem.intermediate_size) {
    if (MOESAIC_FAULT(ref_experts_swap_gate_up) && layout_ == GateUpLayout::kGateThenUp) {
      layout_ = GateUpLayout::kUpThenGate;
    }
  }

  Status load(ExpertSource& source) {
    for (std::int64_t e = 0; e < p_.num_local_experts; ++e) {
      MOESAIC_ASSIGN_OR_RETURN(const ExpertWeightsView view, source.expert(e));
      MOESAIC_RETURN_IF_ERROR(check_expert_weights(p_, view, e));
      MOESAIC_RETURN_IF_ERROR(w13_.append(e, "w13", w13_of(view)));
      MOESAIC_RETURN_IF_ERROR(w2_.append(e, "w2", w2_of(view)));
    }
    return {};
  }

  std::string_view name() const override { return "cpu_reference"; }
  TopKWeightAndReduce reduction() const override {
    return p_.format == ActivationFormat::kStandard ? TopKWeightAndReduce::kNoOp
                                                    : TopKWeightAndReduce::kNaiveBatched;
  }
  ActivationFormat format() const override { return p_.format; }
  bool takes_quantized_rows() const override { return p_.quant.kind == ComputeScheme::kFp8Block; }
  std::int64_t weight_bytes() const override { return w13_.bytes() + w2_.bytes(); }
  std::vector<ExpertPart> expert_parts() override {
    std::vector<ExpertPart> parts;
    w13_.append_parts(false, parts);
    w2_.append_parts(true, parts);
    return parts;
  }
  std::string_view determinism() const override { return kRefExpertsDeterminism; }
  Result<std::int64_t> workspace_size(std::int64_t tokens) const override {
    return ref_experts_workspace_size(p_, tokens);
  }

  Status run(const ExpertsArgs& args) const override {
    const cpu::ScopedIeeeMode ieee;
    MOESAIC_ASSIGN_OR_RETURN(const std::int64_t needed, workspace_size(0));
    MOESAIC_RETURN_IF_ERROR(check_run_args(p_, args, needed));
    Arena arena(args.workspace);
    Scratch s = take_scratch(arena, p_);
    MOESAIC_RETURN_IF_ERROR(arena.status());
    s.a1 = StaticScales(w13_.input_scales(), args.a1_scale, p_.num_local_experts);
    s.a2 = StaticScales(w2_.input_scales(), args.a2_scale, p_.num_local_experts);
    if (p_.format == ActivationFormat::kStandard) {
      run_standard(args, s);
    } else {
      run_batched(args, s);
    }
    return {};
  }

 private:
  // What matrix m of expert e multiplies: values rounded to the operand dtype where they are not of
  // it yet, in the order of the weights' columns, quantised where the scheme does.
  // `error` gets what that does to them, and what was done to `exact` before; null: not measured.
  RefOperand make_operand(const RefMatrix& m, std::int64_t e, float input_scale, float* values,
                          std::int64_t count, const Scratch& s, RowError* error,
                          const float* exact = nullptr) const {
    if (error != nullptr) {
      RowErrorMeter meter(p_, operand_);
      *error = meter.measure(values, count, input_scale, exact);
    }
    for (std::int64_t i = 0; i < count; ++i) values[i] = round_to(operand_, values[i]);
    if (m.gather(e, values, s.gathered)) values = s.gathered;
    return ref_quantize_row(p_.quant.activation, input_scale, values, count, s.scales, s.codes);
  }

  // out[H] = expert e applied to s.input[H], which is consumed. `quantized`: those are codes
  // already, with s.x_scales.
  // `errors`: of both operands, or null. exact [H]: s.input before it was rounded, or null.
  void expert(std::int64_t e, const Scratch& s, bool quantized, float* out,
              std::array<RowError, 2>* errors, const float* exact = nullptr) const {
    RowError* const of_input = errors != nullptr ? errors->data() : nullptr;
    RowError* const of_inner = errors != nullptr ? errors->data() + 1 : nullptr;
    const RefOperand x =
        quantized ? RefOperand{s.input, s.x_scales, quant::kFp8BlockSize, 1.0F}
                  : make_operand(w13_, e, s.a1.of(e), s.input, p_.hidden_size, s, of_input, exact);
    w13_.multiply(e, x, s.gate_up);
    activation::ref_activation(p_.activation, layout_, s.gate_up, s.inner, p_.intermediate_size);
    const RefOperand inner =
        MOESAIC_FAULT(ref_experts_skip_requant)
            ? RefOperand{s.inner, nullptr, 0, 1.0F}
            : make_operand(w2_, e, s.a2.of(e), s.inner, p_.intermediate_size, s, of_inner);
    w2_.multiply(e, inner, out);
  }

  void load_row(const ConstTensorView& t, std::int64_t offset, float* row) const {
    for (std::int64_t i = 0; i < p_.hidden_size; ++i) {
      row[i] = load_as_f32(t.data, t.dtype, offset + i);
    }
  }
  // Scales of row `row` of rows that came quantised.
  void load_scales(const ExpertsArgs& a, std::int64_t row, const Scratch& s) const {
    if (!a.hidden_scale.present()) return;
    const std::int64_t groups = ceil_div(p_.hidden_size, quant::kFp8BlockSize);
    std::copy_n(a.hidden_scale.as<float>() + row * groups, groups, s.x_scales);
  }
  void store_row(const TensorView& t, std::int64_t offset, const float* row) const {
    for (std::int64_t i = 0; i < p_.hidden_size; ++i) {
      store_from_f32(t.data, t.dtype, offset + i, row[i]);
    }
  }

  void run_standard(const ExpertsArgs& a, const Scratch& s) const {
    const std::int64_t hidden = p_.hidden_size;
    const bool on_input = p_.apply_router_weight_on_input;
    const bool quantized = a.hidden_scale.present();
    const NoiseModel model(p_);
    std::vector<float> exact;
    for (std::int64_t t = 0; t < a.hidden_states.dim(0); ++t) {
      load_row(a.hidden_states, t * a.hidden_states.strides[0], s.x);
      load_scales(a, t, s);
      std::fill(s.sum, s.sum + hidden, 0.0F);
      RowNumerics numerics;
      std::array<RowError, 2> errors;
      for (std::int64_t j = 0; j < p_.top_k; ++j) {
        const std::int64_t slot = t * p_.top_k + j;
        const std::int32_t e =
            permute::local_expert_of(a.topk_ids.as<std::int32_t>()[slot], a.expert_map);
        if (e < 0) continue;
        if (MOESAIC_FAULT(ref_experts_drop_last_slot) && p_.top_k > 1 && j + 1 == p_.top_k)
          continue;
        const float weight = a.topk_weights.as<float>()[slot];
        const float factor = round_to(operand_, weight);
        for (std::int64_t i = 0; i < hidden; ++i) {
          s.input[i] = on_input && !quantized
                           ? round_to(operand_, round_to(operand_, s.x[i]) * factor)
                           : s.x[i];
        }
        if (!a.numerics.empty() && on_input && !quantized) {
          exact.resize(static_cast<std::size_t>(hidden));
          std::transform(s.x, s.x + hidden, exact.begin(), [=](float v) { return v * weight; });
        }
        expert(e, s, quantized, s.result, a.numerics.empty() ? nullptr : &errors,
               exact.empty() ? nullptr : exact.data());
        const bool weighted = !on_input || MOESAIC_FAULT(ref_experts_weight_twice);
        if (!a.numerics.empty()) {
          numerics.add(model.of(errors[0], errors[1], s.result, hidden, weighted ? weight : 1.0F));
        }
        for (std::int64_t i = 0; i < hidden; ++i) {
          s.sum[i] += weighted ? weight * s.result[i] : s.result[i];
        }
      }
      store_row(a.output, t * hidden, s.sum);
      if (!a.numerics.empty()) a.numerics[static_cast<std::size_t>(t)] = numerics;
    }
  }

  void run_batched(const ExpertsArgs& a, const Scratch& s) const {
    const std::int64_t rows = a.hidden_states.dim(1);
    const auto& strides = a.hidden_states.strides;
    for (std::int64_t e = 0; e < p_.num_local_experts; ++e) {
      for (std::int64_t r = 0; r < a.expert_num_tokens[static_cast<std::size_t>(e)]; ++r) {
        load_row(a.hidden_states, e * strides[0] + r * strides[1], s.input);
        load_scales(a, e * rows + r, s);
        expert(e, s, a.hidden_scale.present(), s.result, nullptr);
        store_row(a.output, (e * rows + r) * p_.hidden_size, s.result);
      }
    }
  }

  MoeProblem p_;
  DType operand_;
  GateUpLayout layout_;  // of GEMM1's columns, as the canonical w13 has it
  RefMatrix w13_, w2_;
};

}  // namespace

Status ref_experts_can_implement(const MoeProblem& problem) {
  MOESAIC_RETURN_IF_ERROR(check_problem(problem));
  return expect_cpu(problem.device);
}

Result<std::unique_ptr<Experts>> make_ref_experts(const MoeProblem& problem, ExpertSource& source) {
  MOESAIC_RETURN_IF_ERROR(ref_experts_can_implement(problem));
  std::unique_ptr<RefExperts> experts(new (std::nothrow) RefExperts(problem));
  if (!experts) return Status(StatusCode::kOutOfMemory, "cannot allocate the experts object");
  MOESAIC_RETURN_IF_ERROR(experts->load(source));
  return std::unique_ptr<Experts>(std::move(experts));
}

Result<std::int64_t> ref_experts_workspace_size(const MoeProblem& problem, std::int64_t tokens) {
  if (tokens < 0) {
    return Status(StatusCode::kInvalidArgument, fmt::format("tokens: got {}, need >= 0", tokens));
  }
  MOESAIC_RETURN_IF_ERROR(ref_experts_can_implement(problem));
  Arena arena = Arena::measure();
  take_scratch(arena, problem);
  MOESAIC_RETURN_IF_ERROR(arena.status());
  return arena.used();
}

}  // namespace moesaic::experts
