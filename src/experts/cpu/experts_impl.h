// The class behind experts.h; its parts are in three files: rows that become operands
// (expert_rows.cc), the two GEMMs (expert_gemms.cc), calls (experts.cc).
#pragma once

#include <omp.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "cpu/kernels.h"
#include "experts/cpu/expert_weights.h"
#include "experts/cpu/experts.h"
#include "experts/cpu/plan.h"
#include "experts/cpu/workspace.h"

namespace moesaic::experts {

// From this many rows of an expert on, multiply-adds and not memory limit 4-bit weights: the
// integer kernel has half of them.
constexpr int kE2M1MinRows = 7;

// What the kernels handle at once divides this, or nearly.
constexpr std::int64_t kRowsTogether = 32;

// Numbers beside a row, see CpuPlan; null where there are none.
struct RowNumbers {
  float* scales = nullptr;
  float* sums = nullptr;
};

class CpuExperts final : public Experts {
 public:
  CpuExperts(const MoeProblem& problem, const cpu::CpuKernels& kernels, const CpuPlan& plan,
             bool grouped, CpuExpertWeights weights)
      : problem_(problem),
        kernels_(kernels),
        plan_(plan),
        weights_(std::move(weights)),
        name_(std::string("cpu_") + kernels.name) {
    // A block is 128 columns where groups of them are quantised or summed, or where the padding
    // of K2 must be cleared; one panel where columns are independent.
    const bool padded = plan_.gemm2.k != round_up(plan_.intermediate, 4);
    panels_per_block_ =
        plan_.row_numbers() || plan_.scaled_operands || padded ? cpu::kGroup / panel_width() : 1;
    matrix13_ = matrix_of(weights_.w13, plan_.gemm1, grouped);
    matrix2_ = matrix_of(weights_.w2, plan_.gemm2, grouped);
  }

  std::string_view name() const override { return name_; }
  TopKWeightAndReduce reduction() const override {
    return plan_.standard ? TopKWeightAndReduce::kNoOp : TopKWeightAndReduce::kDelegate;
  }
  ActivationFormat format() const override { return problem_.format; }
  bool takes_quantized_rows() const override { return plan_.kind == ComputeScheme::kFp8Block; }
  std::int64_t weight_bytes() const override { return weights_.bytes(); }
  std::vector<ExpertPart> expert_parts() override {
    std::vector<ExpertPart> parts;
    weights_.w13.append_parts(false, problem_.num_local_experts, parts);
    weights_.w2.append_parts(true, problem_.num_local_experts, parts);
    return parts;
  }
  std::string_view determinism() const override { return kCpuExpertsDeterminism; }

  Result<std::int64_t> workspace_size(std::int64_t tokens) const override {
    return cpu_workspace_bytes(plan_, tokens);
  }

  void accumulate(const float* row, float weight, std::int64_t n, float* sum) const override;
  Status run(const ExpertsArgs& args) const override;

 private:
  // One of the two, with what multiplies it.
  struct Matrix {
    const CpuProjection* weights = nullptr;
    const CpuGemm* gemm = nullptr;
    cpu::PanelGemm product = nullptr;
    cpu::PanelGemm super_product = nullptr;  // for few rows; null: none
  };
  Matrix matrix_of(const CpuProjection& weights, const CpuGemm& gemm, bool grouped) const {
    const cpu::WeightKind kind = weights.shape().kind;
    Matrix m = {&weights, &gemm};
    if (plan_.operand == cpu::OperandKind::kI8) {
      m.product = kernels_.grouped_gemm_i8[kind];
      if (cpu::super_gemm_takes(kind, weights.super_form(), gemm.fold))
        m.super_product = kernels_.super_gemm_i8[kind];
      return m;
    }
    const bool bf16 = plan_.operand == cpu::OperandKind::kBF16;
    m.product = grouped ? (bf16 ? kernels_.grouped_gemm_bf16 : kernels_.grouped_gemm_f32)[kind]
                        : (bf16 ? kernels_.panel_gemm_bf16 : kernels_.panel_gemm_f32)[kind];
    return m;
  }
  void run_standard(const ExpertsArgs& args, const CpuWorkspace& w,
                    std::int64_t chunk_tokens) const;
  void run_batched(const ExpertsArgs& args, const CpuWorkspace& w, std::int64_t capacity) const;
  // expert_rows.cc
  void measure(const CpuWorkspace& w, const float* x, std::int64_t n, float input_scale,
               RowError& error, const float* exact = nullptr) const;
  void prepare_input(const CpuWorkspace& w, std::int64_t row, std::int64_t e, const std::byte* src,
                     DType dtype, float factor, bool e2m1_groups) const;
  void load_quantized(const CpuWorkspace& w, std::int64_t row, const std::byte* codes,
                      const float* scales) const;
  void copy_input(const CpuWorkspace& w, std::int64_t from, std::int64_t to) const;
  void store_operand(const CpuGemm& gemm, const float* row, std::int64_t n, std::byte* dst) const;
  // The numbers beside a row of a GEMM that belong to column `column` and those after it.
  RowNumbers numbers_from(const CpuGemm& gemm, float* numbers, std::int64_t column) const;
  void finish_row(const CpuGemm& gemm, float* x, std::int64_t n, float input_scale,
                  const RowNumbers& numbers, std::byte* operand, cpu::E2M1Group* groups) const;
  void finish_whole_row(const CpuWorkspace& w, std::int64_t r) const;
  // expert_gemms.cc
  void multiply(const CpuWorkspace& w, const Matrix& matrix, std::int64_t e, std::int64_t p,
                cpu::PanelArgs& args, const float* const* numbers, float static_scale) const;
  void multiply_super_blocks(const CpuWorkspace& w, const Matrix& matrix,
                             cpu::PanelArgs args) const;
  std::int64_t task_chunk(std::int64_t tasks, std::int64_t panels_per_task) const;
  void gemms(const CpuWorkspace& w, std::int64_t num_active) const;
  void block1(const CpuWorkspace& w, std::int64_t e, std::int64_t block) const;
  void panel2(const CpuWorkspace& w, std::int64_t e, std::int64_t p) const;
  // Operand row of GEMM1 that feeds row `r` of the chunk.
  std::int64_t input_of(const CpuWorkspace& w, std::int64_t r) const {
    return plan_.standard && !w.own_rows ? w.sorted_slots[r] / plan_.top_k : r;
  }
  // An expert's rows are cut into calls of the kernels of about equal size: of that many at most.
  std::int64_t rows_of_call(std::int64_t rows) const {
    const std::int64_t calls = std::max<std::int64_t>(1, ceil_div(rows, kernels_.rows_per_call));
    return std::max<std::int64_t>(kRowsTogether, round_up(ceil_div(rows, calls), kRowsTogether));
  }
  bool reads_e2m1_groups(std::int64_t rows) const {
    return plan_.e2m1_groups && rows >= kE2M1MinRows;
  }
  // Whether any expert of the chunk does; decides how the chunk's input rows are stored.
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
  std::int64_t num_blocks1() const {
    return ceil_div(weights_.w13.shape().num_panels(), panels_per_block_);
  }
  CpuRowErrors make_row_errors(std::int64_t chunk_tokens, bool own_rows) const;
  // What rounding did to the chunk's token t; read once both GEMMs are done.
  RowNumerics numerics_of(const CpuWorkspace& w, std::int64_t t, const float* weights) const;
  static std::int64_t active_experts(const CpuWorkspace& w, std::int64_t num_experts);

  // Intermediate columns that a panel of w13 yields.
  std::int64_t panel_width() const {
    return is_gated(problem_.activation.kind) ? cpu::kPanelColumns / 2 : cpu::kPanelColumns;
  }

  MoeProblem problem_;
  const cpu::CpuKernels& kernels_;
  CpuPlan plan_;
  CpuExpertWeights weights_;
  std::string name_;
  std::int64_t panels_per_block_ = 1;
  Matrix matrix13_, matrix2_;
};

}  // namespace moesaic::experts
