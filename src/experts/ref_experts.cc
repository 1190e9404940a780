#include "experts/ref_experts.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <new>
#include <string>

#include "activation/ref_activation.h"
#include "core/arena.h"
#include "core/checked.h"
#include "core/fault.h"
#include "experts/problem_checks.h"
#include "numerics/element.h"
#include "numerics/float_codec.h"
#include "permute/sort_slots.h"
#include "quant/fp8_group.h"

namespace moesaic {
namespace {

// --- One dot product -----------------------------------------------------------------------------

// Eight interleaved partial sums, added pairwise at the end: a fixed order with an error that grows
// with K / 8, and independent additions that a CPU can overlap.
template <class Decode, class Element>
float dot(const float* x, const Element* w, std::int64_t count, Decode decode) {
  std::array<float, 8> lane{};
  std::int64_t i = 0;
  for (; i + 8 <= count; i += 8) {
    for (std::int64_t l = 0; l < 8; ++l) {
      lane[static_cast<std::size_t>(l)] += x[i + l] * decode(w[i + l]);
    }
  }
  for (; i < count; ++i) lane[static_cast<std::size_t>(i % 8)] += x[i] * decode(w[i]);
  return ((lane[0] + lane[1]) + (lane[2] + lane[3])) + ((lane[4] + lane[5]) + (lane[6] + lane[7]));
}

// e2m1, two per byte, low nibble first; the same order of additions.
float dot_packed(const float* x, const std::uint8_t* w, std::int64_t count) {
  std::array<float, 8> lane{};
  for (std::int64_t i = 0; i < count; ++i) {
    const bool high = i % 2 != 0 && !MOESAIC_FAULT(ref_experts_low_nibble_twice);
    const auto code = static_cast<std::uint8_t>(high ? w[i / 2] >> 4 : w[i / 2] & 0x0F);
    lane[static_cast<std::size_t>(i % 8)] += x[i] * f32_from_e2m1(code);
  }
  return ((lane[0] + lane[1]) + (lane[2] + lane[3])) + ((lane[4] + lane[5]) + (lane[6] + lane[7]));
}

float dot_stored(const float* x, const std::byte* w, DType dtype, std::int64_t count) {
  switch (dtype) {
    case DType::kF32:
      return dot(x, reinterpret_cast<const float*>(w), count, [](float v) { return v; });
    case DType::kBF16:
      return dot(x, reinterpret_cast<const std::uint16_t*>(w), count, f32_from_bf16);
    case DType::kF16:
      return dot(x, reinterpret_cast<const std::uint16_t*>(w), count, f32_from_f16);
    case DType::kF4E2M1:  // groups begin at whole bytes
      return dot_packed(x, reinterpret_cast<const std::uint8_t*>(w), count);
    default:  // check_expert_weights left only e4m3
      return dot(x, reinterpret_cast<const std::uint8_t*>(w), count, f32_from_e4m3);
  }
}

// --- Operands ------------------------------------------------------------------------------------

// A weight matrix of all local experts, stored as the checkpoint stores it.
struct Matrix {
  Tensor weight;  // [E_l, rows, columns]
  Tensor scale;   // e4m3: [E_l, ceil(rows / 128), ceil(columns / 128)] F32; e2m1: [E_l, rows,
                  // columns / 32] F8_E8M0
  Tensor bias;    // [E_l, rows] F32, widened
  std::int64_t rows = 0;
  std::int64_t columns = 0;
};

// A row that a GEMM reads: values, and one scale per 128 columns when it was quantised.
struct Operand {
  float* values = nullptr;
  float* scales = nullptr;  // nullptr: not quantised
};

// out[n] = x . w[e][n] + bias[e][n]
void linear(const Matrix& m, std::int64_t e, const Operand& x, float* out) {
  const DType dtype = m.weight.dtype();
  const std::int64_t bits = dtype_bits(dtype);
  const std::int64_t row_bytes = m.columns * bits / 8;
  const std::byte* weight = m.weight.data() + e * m.rows * row_bytes;
  const bool grouped = dtype == DType::kF4E2M1;
  const std::int64_t block_n = grouped ? 1 : kFp8Block;
  const std::int64_t block_k = grouped ? kMxGroup : kFp8Block;
  const std::int64_t scale_columns = ceil_div(m.columns, block_k);
  const std::int64_t first_scale = e * ceil_div(m.rows, block_n) * scale_columns;
  const float* bias = m.bias.present() ? m.bias.as<float>() + e * m.rows : nullptr;
  if (MOESAIC_FAULT(ref_experts_missing_bias)) bias = nullptr;
  const bool wrong_scale_row = MOESAIC_FAULT(ref_experts_scale_row_zero);
  for (std::int64_t n = 0; n < m.rows; ++n) {
    const std::byte* row = weight + n * row_bytes;
    float sum = 0;
    if (!m.scale.present()) {
      sum = dot_stored(x.values, row, dtype, m.columns);
    } else {
      // Scales act on each group's partial sum, inside the accumulation.
      const std::int64_t row_scale =
          first_scale + (wrong_scale_row ? 0 : n / block_n) * scale_columns;
      for (std::int64_t g = 0; g < scale_columns; ++g) {
        const std::int64_t begin = g * block_k;
        const std::int64_t count = std::min(block_k, m.columns - begin);
        const float partial = dot_stored(x.values + begin, row + begin * bits / 8, dtype, count);
        const float scale = load_as_f32(m.scale.data(), m.scale.dtype(), row_scale + g);
        sum += partial * (x.scales != nullptr ? x.scales[g] * scale : scale);
      }
    }
    out[n] = bias != nullptr ? sum + bias[n] : sum;
  }
}

float round_to(DType dtype, float v) {
  if (dtype == DType::kBF16) return f32_from_bf16(bf16_from_f32(v));
  if (dtype == DType::kF16) return f32_from_f16(f16_from_f32(v));
  return v;
}

// --- The backend ---------------------------------------------------------------------------------

// Buffers for one row at a time.
struct Scratch {
  float *x, *x_scales, *input, *gate_up, *inner, *inner_scales, *result, *sum;
  std::uint8_t* codes;  // as wide as the wider of x and the intermediate
};

Scratch take_scratch(Arena& arena, const MoeProblem& p) {
  Scratch s{};
  s.x = arena.take<float>(p.hidden_size);
  s.x_scales = arena.take<float>(ceil_div(p.hidden_size, kFp8Block));
  s.input = arena.take<float>(p.hidden_size);
  s.gate_up = arena.take<float>(w13_rows(p));
  s.inner = arena.take<float>(p.intermediate_size);
  s.inner_scales = arena.take<float>(ceil_div(p.intermediate_size, kFp8Block));
  s.result = arena.take<float>(p.hidden_size);
  s.sum = arena.take<float>(p.hidden_size);
  s.codes = arena.take<std::uint8_t>(std::max(p.hidden_size, p.intermediate_size));
  return s;
}

class RefExperts final : public Experts {
 public:
  RefExperts(const MoeProblem& problem, ComputeScheme scheme)
      : p_(problem),
        scheme_(scheme),
        operand_(operand_dtype(problem.activation_dtype, scheme)),
        layout_(is_gated(problem.activation.kind) ? GateUpLayout::kGateThenUp
                                                  : GateUpLayout::kNonGated) {
    if (MOESAIC_FAULT(ref_experts_swap_gate_up) && layout_ == GateUpLayout::kGateThenUp) {
      layout_ = GateUpLayout::kUpThenGate;
    }
    w13_.rows = w13_rows(p_);
    w13_.columns = p_.hidden_size;
    w2_.rows = p_.hidden_size;
    w2_.columns = p_.intermediate_size;
  }

  Status load(ExpertSource& source) {
    for (std::int64_t e = 0; e < p_.num_local_experts; ++e) {
      MOESAIC_ASSIGN_OR_RETURN(const ExpertWeightsView view, source.expert(e));
      MOESAIC_RETURN_IF_ERROR(check_expert_weights(p_, view, e));
      MOESAIC_RETURN_IF_ERROR(append(w13_, e, "w13", view.w13, view.w13_scale, view.w13_bias));
      MOESAIC_RETURN_IF_ERROR(append(w2_, e, "w2", view.w2, view.w2_scale, view.w2_bias));
    }
    return {};
  }

  std::string_view name() const override { return "cpu_reference"; }
  TopKWeightAndReduce reduction() const override {
    return p_.format == ActivationFormat::kStandard ? TopKWeightAndReduce::kNoOp
                                                    : TopKWeightAndReduce::kNaiveBatched;
  }
  ActivationFormat format() const override { return p_.format; }
  bool takes_quantized_rows() const override { return scheme_ == ComputeScheme::kFp8Block; }
  std::int64_t weight_bytes() const override {
    std::int64_t bytes = 0;
    for (const Matrix* m : {&w13_, &w2_}) {
      bytes += m->weight.bytes() + m->scale.bytes() + m->bias.bytes();
    }
    return bytes;
  }
  std::string_view determinism() const override { return kRefExpertsDeterminism; }
  Result<std::int64_t> workspace_size(std::int64_t tokens) const override {
    return ref_experts_workspace_size(p_, tokens);
  }

  Status run(const ExpertsArgs& args) const override {
    MOESAIC_ASSIGN_OR_RETURN(const std::int64_t needed, workspace_size(0));
    MOESAIC_RETURN_IF_ERROR(check_run_args(p_, args, needed));
    Arena arena(args.workspace);
    const Scratch s = take_scratch(arena, p_);
    MOESAIC_RETURN_IF_ERROR(arena.status());
    if (p_.format == ActivationFormat::kStandard) {
      run_standard(args, s);
    } else {
      run_batched(args, s);
    }
    return {};
  }

 private:
  // Copies one expert's matrix behind those of the experts before it.
  Status append(Matrix& m, std::int64_t e, std::string_view field, const ConstTensorView& weight,
                const ConstTensorView& scale, const ConstTensorView& bias) {
    const std::int64_t local = p_.num_local_experts;
    if (e == 0) {
      MOESAIC_ASSIGN_OR_RETURN(m.weight,
                               Tensor::uninitialized(weight.dtype, {local, m.rows, m.columns}));
      if (scale.present()) {
        MOESAIC_ASSIGN_OR_RETURN(
            m.scale, Tensor::uninitialized(scale.dtype, {local, scale.dim(0), scale.dim(1)}));
      }
      if (bias.present()) {
        MOESAIC_ASSIGN_OR_RETURN(m.bias, Tensor::uninitialized(DType::kF32, {local, m.rows}));
      }
    }
    if (weight.dtype != m.weight.dtype()) {
      return {StatusCode::kInvalidDType,
              fmt::format("expert {}: {}: got {}, need {} as in expert 0", e, field,
                          dtype_name(weight.dtype), dtype_name(m.weight.dtype()))};
    }
    const auto copy = [e](Tensor& to, const ConstTensorView& from, std::int64_t bytes) {
      std::memcpy(to.data() + e * bytes, from.data, static_cast<std::size_t>(bytes));
    };
    copy(m.weight, weight, m.rows * m.columns * dtype_bits(weight.dtype) / 8);
    if (scale.present()) {
      copy(m.scale, scale, scale.dim(0) * scale.dim(1) * dtype_bits(scale.dtype) / 8);
    }
    for (std::int64_t n = 0; bias.present() && n < m.rows; ++n) {
      m.bias.as<float>()[e * m.rows + n] = load_as_f32(bias.data, bias.dtype, n);
    }
    return {};
  }

  // Rounds to the operand dtype what is not of it yet, and quantises where the scheme does.
  Operand make_operand(float* values, float* scales, std::uint8_t* codes,
                       std::int64_t count) const {
    for (std::int64_t i = 0; i < count; ++i) values[i] = round_to(operand_, values[i]);
    if (scheme_ != ComputeScheme::kFp8Block) return {values, nullptr};
    // The codes are decoded again at once: products of e4m3 values are exact in fp32 either way.
    ref_quantize_fp8_row(values, count, kFp8Block,
                         p_.quant.activation.scale_format == ScaleFormat::kE8M0
                             ? ScaleRounding::kCeilPowerOfTwo
                             : ScaleRounding::kNone,
                         codes, scales);
    for (std::int64_t i = 0; i < count; ++i) values[i] = f32_from_e4m3(codes[i]);
    return {values, scales};
  }

  // out[H] = expert e applied to s.input[H], which is consumed. `quantized`: those are codes
  // already, with s.x_scales.
  void expert(std::int64_t e, const Scratch& s, bool quantized, float* out) const {
    const Operand x = quantized ? Operand{s.input, s.x_scales}
                                : make_operand(s.input, s.x_scales, s.codes, p_.hidden_size);
    linear(w13_, e, x, s.gate_up);
    ref_activation(p_.activation, layout_, s.gate_up, s.inner, p_.intermediate_size);
    const Operand inner =
        MOESAIC_FAULT(ref_experts_skip_requant)
            ? Operand{s.inner, nullptr}
            : make_operand(s.inner, s.inner_scales, s.codes, p_.intermediate_size);
    linear(w2_, e, inner, out);
  }

  void load_row(const ConstTensorView& t, std::int64_t offset, float* row) const {
    for (std::int64_t i = 0; i < p_.hidden_size; ++i) {
      row[i] = round_to(operand_, load_as_f32(t.data, t.dtype, offset + i));
    }
  }
  // Scales of row `row` of rows that came quantised.
  void load_scales(const ExpertsArgs& a, std::int64_t row, const Scratch& s) const {
    if (!a.hidden_scale.present()) return;
    const std::int64_t groups = p_.hidden_size / kFp8Block;
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
    for (std::int64_t t = 0; t < a.hidden_states.dim(0); ++t) {
      load_row(a.hidden_states, t * a.hidden_states.strides[0], s.x);
      load_scales(a, t, s);
      std::fill(s.sum, s.sum + hidden, 0.0F);
      for (std::int64_t j = 0; j < p_.top_k; ++j) {
        const std::int64_t slot = t * p_.top_k + j;
        const std::int32_t e = local_expert_of(a.topk_ids.as<std::int32_t>()[slot], a.expert_map);
        if (e < 0) continue;
        if (MOESAIC_FAULT(ref_experts_drop_last_slot) && p_.top_k > 1 && j + 1 == p_.top_k)
          continue;
        const float weight = a.topk_weights.as<float>()[slot];
        const float factor = round_to(operand_, weight);
        for (std::int64_t i = 0; i < hidden; ++i) {
          s.input[i] = on_input && !quantized ? round_to(operand_, s.x[i] * factor) : s.x[i];
        }
        expert(e, s, quantized, s.result);
        const bool weighted = !on_input || MOESAIC_FAULT(ref_experts_weight_twice);
        for (std::int64_t i = 0; i < hidden; ++i) {
          s.sum[i] += weighted ? weight * s.result[i] : s.result[i];
        }
      }
      store_row(a.output, t * hidden, s.sum);
    }
  }

  void run_batched(const ExpertsArgs& a, const Scratch& s) const {
    const std::int64_t rows = a.hidden_states.dim(1);
    const auto& strides = a.hidden_states.strides;
    for (std::int64_t e = 0; e < p_.num_local_experts; ++e) {
      for (std::int64_t r = 0; r < a.expert_num_tokens[static_cast<std::size_t>(e)]; ++r) {
        load_row(a.hidden_states, e * strides[0] + r * strides[1], s.input);
        load_scales(a, e * rows + r, s);
        expert(e, s, a.hidden_scale.present(), s.result);
        store_row(a.output, (e * rows + r) * p_.hidden_size, s.result);
      }
    }
  }

  MoeProblem p_;
  ComputeScheme scheme_;
  DType operand_;
  GateUpLayout layout_;  // of GEMM1's columns, as the canonical w13 has it
  Matrix w13_, w2_;
};

}  // namespace

Status ref_experts_can_implement(const MoeProblem& problem) { return check_problem(problem); }

Result<std::unique_ptr<Experts>> make_ref_experts(const MoeProblem& problem, ExpertSource& source) {
  MOESAIC_RETURN_IF_ERROR(ref_experts_can_implement(problem));
  MOESAIC_ASSIGN_OR_RETURN(const ComputeScheme scheme, compute_scheme(problem.quant));
  std::unique_ptr<RefExperts> experts(new (std::nothrow) RefExperts(problem, scheme));
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

}  // namespace moesaic
