#include "experts/cpu_experts.h"

#include <fmt/format.h>
#include <omp.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <cstring>
#include <string>
#include <utility>

#include "activation/ref_activation.h"
#include "core/fault.h"
#include "cpu/tiers.h"
#include "experts/cpu_expert_weights.h"
#include "experts/cpu_workspace.h"
#include "numerics/element.h"
#include "numerics/float_codec.h"
#include "permute/sort_slots.h"

namespace moesaic {
namespace {

using cpu::kMaxRows;
using cpu::kPanelColumns;
using cpu::OperandKind;

// What rows carry beside their values, see CpuPlan.
void plan_rows(const MoeProblem& problem, const CpuWeightFormat& format, CpuPlan& plan) {
  using cpu::RowQuantRule;
  plan.row_rule = cpu_row_rule(problem.quant.activation);
  plan.power_of_two_scales = problem.quant.activation.scale_format == ScaleFormat::kE8M0;
  plan.row_sums = format.group_offsets;
  const bool token =
      plan.row_rule == RowQuantRule::kFp8Token || plan.row_rule == RowQuantRule::kInt8Token;
  const bool group = problem.quant.activation.granularity == ScaleGranularity::kGroup;
  plan.scaled_operands =
      group && format.grouped && problem.quant.activation.scale_format != ScaleFormat::kF32;
  if (plan.scaled_operands && plan.row_rule == RowQuantRule::kFp8Group)
    plan.row_rule = RowQuantRule::kFp8GroupPow2;
  plan.row_numbers = token || (group && !plan.scaled_operands) || plan.row_sums;
  if (group) plan.row_step = problem.quant.activation.block_k;
  if (plan.row_sums) plan.row_step = format.fold;
  if (group && format.grouped)
    plan.folds_per_row_scale = static_cast<int>(plan.row_step / format.fold);
  plan.permuted = problem.quant.weight.act_order;
  plan.whole_rows = token || plan.permuted;
}

// From this many rows of an expert on, multiply-adds and not memory limit 4-bit weights: the
// integer kernel has half of them.
constexpr int kE2M1MinRows = 7;

bool has_e2m1_groups(const CpuPlan& plan, const CpuWeightFormat& format,
                     const cpu::CpuKernels& kernels) {
  return kernels.grouped_gemm_e2m1 != nullptr && plan.scheme == ComputeScheme::kNvfp4 &&
         plan.row_rule == cpu::RowQuantRule::kNvfp4 && plan.scaled_operands && !plan.whole_rows &&
         format.kind == cpu::WeightKind::kCode4 && format.fold == cpu::kE2M1GroupSteps &&
         format.group_scales == ScaleFormat::kE4M3 && !format.group_offsets;
}

CpuPlan make_plan(const MoeProblem& problem, ComputeScheme scheme, const CpuWeightFormat& format,
                  const cpu::CpuKernels& kernels) {
  CpuPlan plan;
  plan.scheme = scheme;
  plan.standard = problem.format == ActivationFormat::kStandard;
  plan_rows(problem, format, plan);
  plan.round_dtype = scheme == ComputeScheme::kFp8Bf16
                         ? DType::kBF16
                         : operand_dtype(problem.activation_dtype, scheme);
  // Every code of 8 bits or less and every bf16 value is exact as a bf16 operand.
  const bool narrow = plan.row_rule != cpu::RowQuantRule::kNone || plan.round_dtype == DType::kBF16;
  plan.operand = narrow ? kernels.narrow_operand : OperandKind::kF32;
  plan.e2m1_groups = plan.operand == OperandKind::kBF16 && has_e2m1_groups(plan, format, kernels);
  plan.top_k = problem.top_k;
  plan.num_local_experts = problem.num_local_experts;
  plan.hidden = problem.hidden_size;
  plan.intermediate = problem.intermediate_size;
  plan.k1 = format.shape(cpu::RowOrder::kPlain, 1, problem.hidden_size).padded_k();
  plan.k2 = format.shape(cpu::RowOrder::kPlain, 1, problem.intermediate_size).padded_k();
  plan.n2 = round_up(problem.hidden_size, kPanelColumns);
  plan.num_threads = cpu::resolve_threads(problem.num_threads);
  return plan;
}

Result<std::int64_t> workspace_bytes(const CpuPlan& plan, std::int64_t tokens) {
  const std::int64_t rows = plan.standard ? tokens : tokens * plan.num_local_experts;
  Arena arena = Arena::measure();
  CpuWorkspace::carve(plan, rows, arena);
  MOESAIC_RETURN_IF_ERROR(arena.status());
  return arena.used();
}

class CpuExperts final : public Experts {
 public:
  CpuExperts(const MoeProblem& problem, const cpu::CpuKernels& kernels, const CpuPlan& plan,
             bool grouped, CpuExpertWeights weights)
      : problem_(problem),
        kernels_(kernels),
        plan_(plan),
        weights_(std::move(weights)),
        name_(std::string("cpu_") + kernels.name) {
    const auto kind = static_cast<std::size_t>(weights_.w13.shape().kind);
    // A block is 128 columns where groups of them are quantised or summed, or where the padding
    // of K2 must be cleared; one panel where columns are independent.
    const bool padded = plan_.k2 != round_up(plan_.intermediate, 4);
    panels_per_block_ =
        plan_.row_numbers || plan_.scaled_operands || padded ? cpu::kGroup / panel_width() : 1;
    const bool bf16 = plan_.operand == OperandKind::kBF16;
    gemm_ = grouped ? (bf16 ? kernels_.grouped_gemm_bf16 : kernels_.grouped_gemm_f32)[kind]
                    : (bf16 ? kernels_.panel_gemm_bf16 : kernels_.panel_gemm_f32)[kind];
  }

  std::string_view name() const override { return name_; }
  TopKWeightAndReduce reduction() const override {
    return plan_.standard ? TopKWeightAndReduce::kNoOp : TopKWeightAndReduce::kDelegate;
  }
  ActivationFormat format() const override { return problem_.format; }
  bool takes_quantized_rows() const override { return plan_.scheme == ComputeScheme::kFp8Block; }
  std::int64_t weight_bytes() const override { return weights_.bytes(); }
  std::string_view determinism() const override { return kCpuExpertsDeterminism; }

  Result<std::int64_t> workspace_size(std::int64_t tokens) const override {
    return workspace_bytes(plan_, tokens);
  }

  Status run(const ExpertsArgs& args) const override;

 private:
  void run_standard(const ExpertsArgs& args, const CpuWorkspace& w,
                    std::int64_t chunk_tokens) const;
  void run_batched(const ExpertsArgs& args, const CpuWorkspace& w, std::int64_t capacity) const;
  void prepare_input(const CpuWorkspace& w, std::int64_t row, std::int64_t e, const std::byte* src,
                     DType dtype, float factor) const;
  void load_quantized(const CpuWorkspace& w, std::int64_t row, const std::byte* codes,
                      const float* scales) const;
  void store_operand(const float* row, std::int64_t n, std::byte* dst) const;
  void finish_row(float* x, std::int64_t n, float input_scale, float* numbers, std::byte* operand,
                  cpu::E2M1Group* groups) const;
  void finish_whole_row(const CpuWorkspace& w, std::int64_t r) const;
  void multiply(const CpuProjection& projection, std::int64_t e, std::int64_t p,
                cpu::PanelArgs& args, const float* const* numbers) const;
  std::int64_t task_chunk(std::int64_t tasks, std::int64_t panels_per_task) const;
  void gemms(const CpuWorkspace& w, std::int64_t num_active) const;
  void block1(const CpuWorkspace& w, std::int64_t e, std::int64_t block) const;
  void panel2(const CpuWorkspace& w, std::int64_t e, std::int64_t p) const;
  // Operand row of GEMM1 that feeds row `r` of the chunk.
  std::int64_t input_of(const CpuWorkspace& w, std::int64_t r) const {
    return plan_.standard && !plan_.permuted ? w.sorted_slots[r] / plan_.top_k : r;
  }
  bool reads_e2m1_groups(std::int64_t rows) const {
    return plan_.e2m1_groups && rows >= kE2M1MinRows;
  }
  // Of any expert; decides what input rows are stored as.
  bool any_reads_e2m1_groups(const CpuWorkspace& w) const {
    for (std::int64_t e = 0; plan_.e2m1_groups && e < problem_.num_local_experts; ++e) {
      if (reads_e2m1_groups(w.first_row[e + 1] - w.first_row[e])) return true;
    }
    return false;
  }
  std::int64_t expert_of_row(const CpuWorkspace& w, std::int64_t r) const {
    return std::upper_bound(w.first_row, w.first_row + problem_.num_local_experts + 1, r) -
           w.first_row - 1;
  }
  float* scratch(const CpuWorkspace& w) const {
    return w.scratch + 2 * omp_get_thread_num() * w.scratch_stride;
  }
  static std::int64_t active_experts(const CpuWorkspace& w, std::int64_t num_experts);

  // Intermediate columns that a panel of w13 yields.
  std::int64_t panel_width() const {
    return is_gated(problem_.activation.kind) ? kPanelColumns / 2 : kPanelColumns;
  }

  MoeProblem problem_;
  const cpu::CpuKernels& kernels_;
  CpuPlan plan_;
  CpuExpertWeights weights_;
  std::string name_;
  std::int64_t panels_per_block_ = 1;
  void (*gemm_)(const cpu::PanelArgs& args) = nullptr;
};

void CpuExperts::store_operand(const float* row, std::int64_t n, std::byte* dst) const {
  if (plan_.operand == OperandKind::kBF16) {
    kernels_.store_bf16(row, n, reinterpret_cast<std::uint16_t*>(dst));
  } else if (reinterpret_cast<const std::byte*>(row) != dst) {
    std::memcpy(dst, row, static_cast<std::size_t>(n) * sizeof(float));
  }
}

// A row (or a block of 128 columns of it), rounded to round_dtype, to its operand and the numbers
// beside it.
void CpuExperts::finish_row(float* x, std::int64_t n, float input_scale, float* numbers,
                            std::byte* operand, cpu::E2M1Group* groups) const {
  if (plan_.row_rule == cpu::RowQuantRule::kFp8Group) {
    kernels_.quantize_row_e4m3(x, n, plan_.round_dtype, plan_.power_of_two_scales, numbers,
                               operand);
    return;
  }
  kernels_.round_row(x, n, plan_.round_dtype);
  if (groups != nullptr) {
    float scales[cpu::kGroup / cpu::kE2M1GroupSteps];
    for (std::int64_t k = 0; k < n; k += cpu::kGroup) {
      const std::int64_t count = std::min<std::int64_t>(cpu::kGroup, n - k);
      kernels_.quantize_row(plan_.row_rule, input_scale, x + k, count, scales);
      kernels_.store_e2m1(x + k, count, scales, groups + k / cpu::kE2M1GroupSteps);
    }
  } else if (plan_.row_rule != cpu::RowQuantRule::kNone) {
    kernels_.quantize_row(plan_.row_rule, input_scale, x, n, numbers);
  }
  if (plan_.row_sums) kernels_.group_sums(x, n, plan_.row_step, numbers);
  store_operand(x, n, operand);
}

// An intermediate row that GEMM1 left complete: into the order of w2's columns, then as above.
void CpuExperts::finish_whole_row(const CpuWorkspace& w, std::int64_t r) const {
  const std::int64_t e = expert_of_row(w, r);
  float* x = w.a2_raw + r * plan_.k2;
  const std::int32_t* perm = weights_.w2.perm(e);
  if (perm != nullptr && !MOESAIC_FAULT(cpu_intermediate_not_permuted)) {
    float* gathered = scratch(w);
    for (std::int64_t k = 0; k < plan_.intermediate; ++k) gathered[k] = x[perm[k]];
    std::memcpy(x, gathered, static_cast<std::size_t>(plan_.intermediate) * sizeof(float));
  }
  std::fill(x + plan_.intermediate, x + plan_.k2, 0.0F);
  finish_row(x, plan_.k2, weights_.w2.input_scale(e),
             plan_.row_numbers ? w.a2_scales + r * plan_.groups2() : nullptr,
             w.a2 + r * plan_.k2 * plan_.operand_bytes(), nullptr);
}

// x rounded to the operand dtype, times the rounded weight (weight on input), in the order of the
// columns of expert e's w13, quantised, stored as an operand.
void CpuExperts::prepare_input(const CpuWorkspace& w, std::int64_t row, std::int64_t e,
                               const std::byte* src, DType dtype, float factor) const {
  float* x = scratch(w);
  kernels_.load_row(src, dtype, plan_.hidden, plan_.k1, x);
  if (problem_.apply_router_weight_on_input && plan_.standard) {
    kernels_.round_row(x, plan_.hidden, plan_.round_dtype);
    kernels_.round_row(&factor, 1, plan_.round_dtype);
    kernels_.scale_row(x, plan_.hidden, factor);
  }
  if (plan_.permuted) {
    const std::int32_t* perm = weights_.w13.perm(e);
    float* gathered = x + w.scratch_stride;
    for (std::int64_t k = 0; k < plan_.hidden; ++k) gathered[k] = x[perm[k]];
    std::fill(gathered + plan_.hidden, gathered + plan_.k1, 0.0F);
    x = gathered;
  }
  finish_row(x, plan_.k1, weights_.w13.input_scale(0),
             plan_.row_numbers ? w.a1_scales + row * plan_.groups1() : nullptr,
             w.a1 + row * plan_.k1 * plan_.operand_bytes(),
             any_reads_e2m1_groups(w) ? w.a1_groups + row * plan_.e2m1_groups1() : nullptr);
}

// result = rows times panel p of expert e, all scales included.
void CpuExperts::multiply(const CpuProjection& projection, std::int64_t e, std::int64_t p,
                          cpu::PanelArgs& args, const float* const* numbers) const {
  const cpu::PanelArgs weights = projection.panel(e, p);
  const bool whole_row_scales = plan_.row_numbers && plan_.row_step == 0;
  cpu::PanelArgs all = weights;
  all.rows = args.rows;
  all.num_rows = args.num_rows;
  all.result = args.result;
  all.folds_per_row_scale = plan_.folds_per_row_scale;
  if (plan_.row_sums) all.row_sums = numbers;
  if (plan_.row_numbers && !plan_.row_sums && !whole_row_scales) all.row_scales = numbers;
  if (reads_e2m1_groups(args.num_rows)) {
    kernels_.grouped_gemm_e2m1(all);
  } else {
    gemm_(all);
  }
  const float* factors = projection.column_factors(e, p);
  if (factors == nullptr) return;
  kernels_.scale_result(args.result, args.num_rows, factors, whole_row_scales ? numbers : nullptr);
}

// A row that was quantised elsewhere: its codes become the operand, its scales are kept. Widths are
// multiples of 128 here, so nothing is padded.
void CpuExperts::load_quantized(const CpuWorkspace& w, std::int64_t row, const std::byte* codes,
                                const float* scales) const {
  static const auto kValues = [] {
    std::array<float, 256> values{};
    for (std::size_t i = 0; i < values.size(); ++i) {
      values[i] = f32_from_e4m3(static_cast<std::uint8_t>(i));
    }
    return values;
  }();
  float* x = scratch(w);
  for (std::int64_t i = 0; i < plan_.k1; ++i) {
    x[i] = kValues[std::to_integer<std::size_t>(codes[i])];
  }
  if (!MOESAIC_FAULT(cpu_quantized_rows_keep_old_scales)) {
    std::memcpy(w.a1_scales + row * plan_.groups1(), scales,
                static_cast<std::size_t>(plan_.groups1()) * sizeof(float));
  }
  store_operand(x, plan_.k1, w.a1 + row * plan_.k1 * plan_.operand_bytes());
}

// GEMM1 for one block of intermediate columns of one expert: gate and up, bias, activation,
// rounding, and for quantised activations the e4m3 codes of one group of 128. The block's fp32
// values never leave the cache.
void CpuExperts::block1(const CpuWorkspace& w, std::int64_t e, std::int64_t block) const {
  alignas(64) float result[kMaxRows * kPanelColumns];
  alignas(64) float act[kMaxRows * cpu::kGroup];
  const void* rows[kMaxRows];
  const float* numbers[kMaxRows];
  const std::int64_t width = panel_width();
  const std::int64_t first_panel = block * panels_per_block_;
  const std::int64_t last_panel =
      std::min(first_panel + panels_per_block_, weights_.w13.shape().num_panels());
  const std::int64_t column = first_panel * width;
  // Columns beyond I (zero weights) up to the padded width hold act(0), which need not be 0:
  // cleared, not multiplied.
  const std::int64_t valid = std::min(panels_per_block_ * width, plan_.k2 - column);
  const std::int64_t real = std::min(valid, plan_.intermediate - column);
  std::int64_t end = w.first_row[e + 1];
  if (MOESAIC_FAULT(cpu_last_row_of_expert_dropped)) --end;
  for (std::int64_t begin = w.first_row[e]; begin < end; begin += kMaxRows) {
    const int count = static_cast<int>(std::min<std::int64_t>(kMaxRows, end - begin));
    for (int r = 0; r < count; ++r) {
      const std::int64_t in = input_of(w, begin + r);
      rows[r] = w.a1 + in * plan_.k1 * plan_.operand_bytes();
      if (reads_e2m1_groups(count)) rows[r] = w.a1_groups + in * plan_.e2m1_groups1();
      numbers[r] = plan_.row_numbers ? w.a1_scales + in * plan_.groups1() : nullptr;
    }
    cpu::PanelArgs args;
    args.rows = rows;
    args.num_rows = count;
    args.result = result;
    for (std::int64_t p = first_panel; p < last_panel; ++p) {
      multiply(weights_.w13, e, p, args, numbers);
      kernels_.activate({.c = result,
                         .num_rows = count,
                         .bias = weights_.w13.panel_bias(e, p),
                         .activation = problem_.activation,
                         .scalar_activation = &ref_activation,
                         .out = act + (p - first_panel) * width,
                         .out_stride = cpu::kGroup});
    }
    for (int r = 0; r < count; ++r) {
      float* y = act + r * cpu::kGroup;
      for (std::int64_t c = real; c < valid; ++c) y[c] = 0.0F;
      if (plan_.whole_rows) {
        kernels_.round_row(y, valid, plan_.round_dtype);
        std::memcpy(w.a2_raw + (begin + r) * plan_.k2 + column, y,
                    static_cast<std::size_t>(valid) * sizeof(float));
        continue;
      }
      const std::int64_t first = plan_.row_step > 0 ? column / plan_.row_step : 0;
      float* kept =
          plan_.row_numbers ? w.a2_scales + (begin + r) * plan_.groups2() + first : nullptr;
      std::byte* operand = w.a2 + ((begin + r) * plan_.k2 + column) * plan_.operand_bytes();
      if (MOESAIC_FAULT(cpu_intermediate_not_requantised)) {
        kernels_.round_row(y, valid, plan_.round_dtype);
        store_operand(y, valid, operand);
        for (std::int64_t c = 0; plan_.row_numbers && c < valid; c += plan_.row_step)
          kept[c / plan_.row_step] = 1.0F;
        continue;
      }
      finish_row(y, valid, weights_.w2.input_scale(e), kept, operand,
                 reads_e2m1_groups(count) ? w.a2_groups + (begin + r) * plan_.e2m1_groups2() +
                                                column / cpu::kE2M1GroupSteps
                                          : nullptr);
    }
  }
}

// GEMM2 for one panel of one expert: 64 columns of the unweighted output.
void CpuExperts::panel2(const CpuWorkspace& w, std::int64_t e, std::int64_t p) const {
  alignas(64) float result[kMaxRows * kPanelColumns];
  const void* rows[kMaxRows];
  const float* numbers[kMaxRows];
  const float* bias = weights_.w2.panel_bias(e, p);
  const std::int64_t end = w.first_row[e + 1];
  for (std::int64_t begin = w.first_row[e]; begin < end; begin += kMaxRows) {
    const int count = static_cast<int>(std::min<std::int64_t>(kMaxRows, end - begin));
    for (int r = 0; r < count; ++r) {
      rows[r] = w.a2 + (begin + r) * plan_.k2 * plan_.operand_bytes();
      if (reads_e2m1_groups(count)) rows[r] = w.a2_groups + (begin + r) * plan_.e2m1_groups2();
      numbers[r] = plan_.row_numbers ? w.a2_scales + (begin + r) * plan_.groups2() : nullptr;
    }
    cpu::PanelArgs args;
    args.rows = rows;
    args.num_rows = count;
    args.result = result;
    multiply(weights_.w2, e, p, args, numbers);
    for (int r = 0; r < count; ++r) {
      float* out = w.out + (begin + r) * plan_.n2 + p * kPanelColumns;
      std::memcpy(out, result + r * kPanelColumns, kPanelColumns * sizeof(float));
      if (bias != nullptr) kernels_.accumulate_row(bias, 1.0F, kPanelColumns, out);
    }
  }
}

std::int64_t CpuExperts::active_experts(const CpuWorkspace& w, std::int64_t num_experts) {
  std::int64_t count = 0;
  for (std::int64_t e = 0; e < num_experts; ++e) {
    if (w.first_row[e + 1] > w.first_row[e]) w.active[count++] = static_cast<std::int32_t>(e);
  }
  return count;
}

// Neighbouring panels are neighbours in memory: a thread keeps a run of them, so that one stream is
// not cut into pieces, as long as every thread still gets a dozen turns to even out the load. At
// most 16 panels: what one thread still works on when the others are done is lost time.
std::int64_t CpuExperts::task_chunk(std::int64_t tasks, std::int64_t panels_per_task) const {
  return std::clamp<std::int64_t>(tasks / (12 * plan_.num_threads), 1, 16 / panels_per_task);
}

// Both GEMMs of a chunk; called by all threads of a team, ends with a barrier. Tasks are panels in
// the order of memory, handed out as threads become free: which thread computes a panel does not
// change its bits.
void CpuExperts::gemms(const CpuWorkspace& w, std::int64_t num_active) const {
  const std::int64_t blocks1 = ceil_div(weights_.w13.shape().num_panels(), panels_per_block_);
  const std::int64_t panels2 = weights_.w2.shape().num_panels();
  const std::int64_t chunk1 = task_chunk(num_active * blocks1, panels_per_block_);
  const std::int64_t chunk2 = task_chunk(num_active * panels2, 1);
#pragma omp for schedule(dynamic, chunk1)
  for (std::int64_t t = 0; t < num_active * blocks1; ++t)
    block1(w, w.active[t / blocks1], t % blocks1);
  if (plan_.whole_rows) {
#pragma omp for schedule(static)
    for (std::int64_t r = 0; r < w.first_row[problem_.num_local_experts]; ++r)
      finish_whole_row(w, r);
  }
#pragma omp for schedule(dynamic, chunk2)
  for (std::int64_t t = 0; t < num_active * panels2; ++t)
    panel2(w, w.active[t / panels2], t % panels2);
}

void CpuExperts::run_standard(const ExpertsArgs& args, const CpuWorkspace& w,
                              std::int64_t chunk_tokens) const {
  const std::int64_t tokens = args.hidden_states.dim(0);
  const std::int64_t k = plan_.top_k;
  const std::int64_t in_elem = dtype_bits(args.hidden_states.dtype) / 8;
  const std::int64_t out_elem = dtype_bits(args.output.dtype) / 8;
  const float* in_scales = args.hidden_scale.as<float>();  // null: rows are not quantised
  const bool weight_on_output =
      !problem_.apply_router_weight_on_input || MOESAIC_FAULT(cpu_weight_applied_twice);
  for (std::int64_t t0 = 0; t0 < tokens; t0 += chunk_tokens) {
    const std::int64_t count = std::min(chunk_tokens, tokens - t0);
    const std::int64_t slots = count * k;
    const std::int32_t* ids = args.topk_ids.as<std::int32_t>() + t0 * k;
    const float* weights = args.topk_weights.as<float>() + t0 * k;
    // Ids were checked for the whole call, so sorting cannot fail here.
    const Status sorted = sort_slots_by_expert(
        {ids, static_cast<std::size_t>(slots)}, args.expert_map, problem_.num_experts,
        problem_.num_local_experts,
        {w.first_row, static_cast<std::size_t>(problem_.num_local_experts + 1)},
        {w.sorted_slots, static_cast<std::size_t>(slots)}, k);
    assert(sorted.ok());
    static_cast<void>(sorted);
    const std::int64_t rows = w.first_row[problem_.num_local_experts];
    for (std::int64_t i = 0; i < slots; ++i)
      w.position[w.sorted_slots[i]] = i < rows ? static_cast<std::int32_t>(i) : -1;
    const std::int64_t num_active = active_experts(w, problem_.num_local_experts);
#pragma omp parallel num_threads(plan_.num_threads)
    {
      const cpu::ScopedIeeeMode ieee;
      // No local slot: nothing reads the inputs (and there may be no expert to prepare them for).
      const std::int64_t inputs = rows == 0 || plan_.permuted ? rows : count;
#pragma omp for schedule(static)
      for (std::int64_t i = 0; i < inputs; ++i) {
        const std::int64_t t = plan_.permuted ? w.sorted_slots[i] / k : i;
        const std::int64_t e = plan_.permuted ? expert_of_row(w, i) : 0;
        const std::byte* x =
            args.hidden_states.data + (t0 + t) * args.hidden_states.strides[0] * in_elem;
        if (in_scales != nullptr) {
          load_quantized(w, t, x, in_scales + (t0 + t) * plan_.groups1());
        } else {
          prepare_input(w, i, e, x, args.hidden_states.dtype, weights[t * k]);
        }
      }
      gemms(w, num_active);
#pragma omp for schedule(static)
      for (std::int64_t t = 0; t < count; ++t) {
        float* y = scratch(w);
        std::memset(y, 0, static_cast<std::size_t>(plan_.n2) * sizeof(float));
        for (std::int64_t j = 0; j < k; ++j) {
          const std::int64_t r = w.position[t * k + j];
          if (r < 0) continue;
          kernels_.accumulate_row(w.out + r * plan_.n2,
                                  weight_on_output ? weights[t * k + j] : 1.0F, plan_.hidden, y);
        }
        kernels_.store_row(y, plan_.hidden, args.output.dtype,
                           args.output.data + (t0 + t) * args.output.strides[0] * out_elem);
      }
    }
  }
}

// Slabs are cut into chunks of at most `capacity` rows that end anywhere, also inside an expert.
void CpuExperts::run_batched(const ExpertsArgs& args, const CpuWorkspace& w,
                             std::int64_t capacity) const {
  const std::int64_t num_experts = problem_.num_local_experts;
  const std::int64_t in_elem = dtype_bits(args.hidden_states.dtype) / 8;
  const std::int64_t out_elem = dtype_bits(args.output.dtype) / 8;
  std::int64_t e0 = 0, i0 = 0;  // next expert and row inside its slab
  while (e0 < num_experts) {
    std::int64_t rows = 0;
    const std::int64_t e_begin = e0, i_begin = i0;
    w.first_row[0] = 0;
    for (std::int64_t e = 0; e < num_experts; ++e) {
      const std::int64_t skip = e == e_begin ? i_begin : 0;
      const std::int64_t have =
          e < e_begin ? 0 : args.expert_num_tokens[static_cast<std::size_t>(e)] - skip;
      const std::int64_t take = e < e0 ? 0 : std::min(have, capacity - rows);
      if (e == e0 && take == have) e0 = e + 1, i0 = 0;
      if (e == e0 && take < have) i0 = skip + take;
      rows += take;
      w.first_row[e + 1] = rows;
    }
    const std::int64_t num_active = active_experts(w, num_experts);
#pragma omp parallel num_threads(plan_.num_threads)
    {
      const cpu::ScopedIeeeMode ieee;
      const auto offset = [&](std::int64_t e, std::int64_t r, const auto& view) {
        const std::int64_t row = r - w.first_row[e] + (e == e_begin ? i_begin : 0);
        return e * view.strides[0] + row * view.strides[1];
      };
#pragma omp for schedule(static)
      for (std::int64_t a = 0; a < num_active; ++a) {
        const std::int64_t e = w.active[a];
        for (std::int64_t r = w.first_row[e]; r < w.first_row[e + 1]; ++r) {
          const std::byte* x = args.hidden_states.data + offset(e, r, args.hidden_states) * in_elem;
          if (args.hidden_scale.present()) {
            load_quantized(w, r, x,
                           args.hidden_scale.as<float>() + offset(e, r, args.hidden_scale));
          } else {
            prepare_input(w, r, e, x, args.hidden_states.dtype, 1.0F);
          }
        }
      }
      gemms(w, num_active);
#pragma omp for schedule(static)
      for (std::int64_t a = 0; a < num_active; ++a) {
        const std::int64_t e = w.active[a];
        for (std::int64_t r = w.first_row[e]; r < w.first_row[e + 1]; ++r) {
          kernels_.store_row(w.out + r * plan_.n2, plan_.hidden, args.output.dtype,
                             args.output.data + offset(e, r, args.output) * out_elem);
        }
      }
    }
  }
}

Status CpuExperts::run(const ExpertsArgs& args) const {
  if (args.hidden_states.rank() != (plan_.standard ? 2 : 3))
    return check_run_args(problem_, args, 0);
  const std::int64_t tokens = tokens_of(problem_, args);
  MOESAIC_ASSIGN_OR_RETURN(const std::int64_t needed, workspace_size(tokens));
  MOESAIC_RETURN_IF_ERROR(check_run_args(problem_, args, tokens == 0 ? 0 : needed));
  if (tokens == 0) return {};
  const std::int64_t rows = plan_.standard ? tokens : tokens * problem_.num_local_experts;
  Arena arena(args.workspace);
  const CpuWorkspace w = CpuWorkspace::carve(plan_, rows, arena);
  MOESAIC_RETURN_IF_ERROR(arena.status());
  if (plan_.standard) {
    run_standard(args, w, plan_.chunk_tokens(rows));
  } else {
    run_batched(args, w, plan_.chunk_tokens(rows));
  }
  return {};
}

}  // namespace

Status cpu_experts_can_implement(std::string_view tier, const MoeProblem& problem) {
  MOESAIC_RETURN_IF_ERROR(check_problem(problem));
  const char* forced = std::getenv("MOESAIC_CPU_TIER");
  if (forced != nullptr && *forced != '\0' && tier != forced) {
    return Status(StatusCode::kUnsupported,
                  fmt::format("MOESAIC_CPU_TIER forces tier '{}'", forced));
  }
  MOESAIC_ASSIGN_OR_RETURN(const cpu::CpuKernels* kernels, cpu::kernels_by_name(tier));
  static_cast<void>(kernels);
  MOESAIC_ASSIGN_OR_RETURN(const ComputeScheme scheme, compute_scheme(problem.quant));
  return cpu_weight_format(problem.quant, scheme).status();
}

Result<std::unique_ptr<Experts>> make_cpu_experts(std::string_view tier, const MoeProblem& problem,
                                                  ExpertSource& source) {
  MOESAIC_RETURN_IF_ERROR(cpu_experts_can_implement(tier, problem));
  MOESAIC_ASSIGN_OR_RETURN(const cpu::CpuKernels* kernels, cpu::kernels_by_name(tier));
  MOESAIC_ASSIGN_OR_RETURN(const ComputeScheme scheme, compute_scheme(problem.quant));
  MOESAIC_ASSIGN_OR_RETURN(const CpuWeightFormat format, cpu_weight_format(problem.quant, scheme));
  const CpuPlan plan = make_plan(problem, scheme, format, *kernels);
  MOESAIC_ASSIGN_OR_RETURN(CpuExpertWeights weights,
                           CpuExpertWeights::load(problem, format, source, plan.num_threads));
  return std::unique_ptr<Experts>(
      std::make_unique<CpuExperts>(problem, *kernels, plan, format.grouped, std::move(weights)));
}

Result<std::int64_t> cpu_experts_workspace_size(std::string_view tier, const MoeProblem& problem,
                                                std::int64_t tokens) {
  MOESAIC_RETURN_IF_ERROR(cpu_experts_can_implement(tier, problem));
  MOESAIC_ASSIGN_OR_RETURN(const cpu::CpuKernels* kernels, cpu::kernels_by_name(tier));
  MOESAIC_ASSIGN_OR_RETURN(const ComputeScheme scheme, compute_scheme(problem.quant));
  MOESAIC_ASSIGN_OR_RETURN(const CpuWeightFormat format, cpu_weight_format(problem.quant, scheme));
  return workspace_bytes(make_plan(problem, scheme, format, *kernels), tokens);
}

}  // namespace moesaic
