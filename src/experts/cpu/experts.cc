#include "experts/cpu/experts.h"

#include <fmt/format.h>

#include <algorithm>
#include <cassert>
#include <cstring>
#include <new>

#include "core/fault.h"
#include "core/refusal.h"
#include "cpu/tiers.h"
#include "experts/cpu/experts_impl.h"
#include "permute/sort_slots.h"

namespace moesaic::experts {
namespace {

// Of an expert, on average: rows that enough of its panels would copy.
constexpr std::int64_t kSpacedRows = 8;

// Bytes of GEMM2's output that are not expected to stay in a cache until they are added up.
constexpr std::int64_t kPastCaches = 32 << 20;

}  // namespace

CpuRowErrors CpuExperts::make_row_errors(std::int64_t chunk_tokens, bool own_rows) const {
  CpuRowErrors errors;
  const auto rows = static_cast<std::size_t>(chunk_tokens * plan_.top_k);
  errors.meters.assign(static_cast<std::size_t>(plan_.num_threads),
                       RowErrorMeter(problem_, plan_.round_dtype));
  if (problem_.apply_router_weight_on_input) {
    errors.exact.assign(errors.meters.size(),
                        std::vector<float>(static_cast<std::size_t>(plan_.hidden)));
  }
  errors.blocks = num_blocks1();
  errors.input.resize(own_rows ? rows : static_cast<std::size_t>(chunk_tokens));
  errors.inner.resize(rows * static_cast<std::size_t>(errors.blocks));
  return errors;
}

RowNumerics CpuExperts::numerics_of(const CpuWorkspace& w, std::int64_t t,
                                    const float* weights) const {
  const NoiseModel model(problem_);
  RowNumerics sum;
  for (std::int64_t j = 0; j < plan_.top_k; ++j) {
    const std::int64_t r = w.position[t * plan_.top_k + j];
    if (r < 0) continue;
    RowError inner;
    for (std::int64_t b = 0; b < w.errors->blocks; ++b) {
      inner.add(w.errors->inner[static_cast<std::size_t>(r * w.errors->blocks + b)]);
    }
    const float weight = problem_.apply_router_weight_on_input ? 1.0F : weights[j];
    sum.add(model.of(w.errors->input[static_cast<std::size_t>(w.own_rows ? r : t)], inner,
                     w.out + r * plan_.n2, plan_.hidden, weight));
  }
  return sum;
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
    const Status sorted = permute::sort_slots_by_expert(
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
    const bool e2m1_groups = any_reads_e2m1_groups(w);
#pragma omp parallel num_threads(plan_.team_of_tokens(count))
    {
      const cpu::ScopedIeeeMode ieee;
      const auto load = [&](std::int64_t row, std::int64_t slot, std::int64_t e) {
        const std::int64_t t = slot / k;
        const std::byte* x =
            args.hidden_states.data + (t0 + t) * args.hidden_states.strides[0] * in_elem;
        if (in_scales != nullptr) {
          load_quantized(w, row, x, in_scales + (t0 + t) * plan_.scales(plan_.gemm1.k));
        } else {
          const float factor = weights[MOESAIC_FAULT(cpu_first_weight_on_input) ? t * k : slot];
          prepare_input(w, row, e, x, args.hidden_states.dtype, factor, e2m1_groups);
        }
      };
      // No local slot: nothing reads the inputs (and there may be no expert to prepare them for).
      const std::int64_t inputs = rows == 0 || w.own_rows ? rows : count;
      if (w.copied_rows) {
#pragma omp for schedule(static)
        for (std::int64_t t = 0; t < count; ++t) {
          std::int64_t first = -1;
          for (std::int64_t slot = t * k; slot < (t + 1) * k; ++slot) {
            const bool by_slot = MOESAIC_FAULT(cpu_own_rows_in_order_of_slots);
            const std::int64_t row = by_slot ? slot : w.position[slot];
            if (row >= 0 && first < 0) load(row, slot, 0);
            if (row >= 0 && first >= 0) copy_input(w, first, row);
            if (first < 0) first = row;
          }
        }
      } else {
#pragma omp for schedule(static)
        for (std::int64_t i = 0; i < inputs; ++i) {
          const std::int64_t slot = w.own_rows ? w.sorted_slots[i] : i * k;
          load(i, slot, w.own_rows ? expert_of_row(w, i) : 0);
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
        if (w.errors != nullptr) {
          args.numerics[static_cast<std::size_t>(t0 + t)] = numerics_of(w, t, weights + t * k);
        }
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
    const bool e2m1_groups = any_reads_e2m1_groups(w);
#pragma omp parallel num_threads(plan_.team(rows, num_active))
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
            prepare_input(w, r, e, x, args.hidden_states.dtype, 1.0F, e2m1_groups);
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
  CpuWorkspace w = CpuWorkspace::carve(plan_, rows, arena);
  MOESAIC_RETURN_IF_ERROR(arena.status());
  const std::int64_t num_experts = problem_.num_local_experts;
  w.a1_static = StaticScales(weights_.w13.input_scales(), args.a1_scale, num_experts);
  w.a2_static = StaticScales(weights_.w2.input_scales(), args.a2_scale, num_experts);
  const bool scales_differ = plan_.static_rows && !w.a1_static.all_equal() &&
                             !MOESAIC_FAULT(cpu_static_scale_of_first_expert);
  const bool spaced = plan_.spaced_rows && plan_.chunk_rows(rows) >= kSpacedRows * num_experts;
  w.own_rows = plan_.own_rows || scales_differ || spaced;
  w.copied_rows = w.own_rows && !plan_.own_rows && !scales_differ;
  w.past_caches = plan_.chunk_rows(rows) * plan_.n2 * std::int64_t{sizeof(float)} >= kPastCaches;
  CpuRowErrors errors;
  if (!args.numerics.empty()) {
    try {
      errors = make_row_errors(plan_.chunk_tokens(rows), w.own_rows);
    } catch (const std::bad_alloc&) {
      return {StatusCode::kOutOfMemory, "numerics: cannot allocate the errors of a call's rows"};
    }
    w.errors = &errors;
  }
  if (plan_.standard) {
    run_standard(args, w, plan_.chunk_tokens(rows));
  } else {
    run_batched(args, w, plan_.chunk_tokens(rows));
  }
  return {};
}

Status cpu_experts_can_implement(std::string_view tier, const MoeProblem& problem) {
  MOESAIC_RETURN_IF_ERROR(check_problem(problem));
  MOESAIC_ASSIGN_OR_RETURN(const cpu::CpuKernels* kernels, cpu::usable_kernels(tier));
  MOESAIC_RETURN_IF_ERROR(cpu_weight_formats(problem.quant, *kernels).status());
  return expect_cpu(problem.device);
}

Result<std::unique_ptr<Experts>> make_cpu_experts(std::string_view tier, const MoeProblem& problem,
                                                  ExpertSource& source) {
  MOESAIC_RETURN_IF_ERROR(cpu_experts_can_implement(tier, problem));
  MOESAIC_ASSIGN_OR_RETURN(const cpu::CpuKernels* kernels, cpu::kernels_by_name(tier));
  return make_cpu_experts(*kernels, problem, source);
}

Result<std::unique_ptr<Experts>> make_cpu_experts(const cpu::CpuKernels& kernels,
                                                  const MoeProblem& problem, ExpertSource& source) {
  MOESAIC_ASSIGN_OR_RETURN(const CpuWeightFormats formats,
                           cpu_weight_formats(problem.quant, kernels));
  const CpuPlan plan = make_cpu_plan(problem, formats, kernels);
  MOESAIC_ASSIGN_OR_RETURN(CpuExpertWeights weights,
                           CpuExpertWeights::load(problem, formats, source, plan.num_threads));
  return std::unique_ptr<Experts>(std::make_unique<CpuExperts>(
      problem, kernels, plan, formats.w13.grouped, std::move(weights)));
}

void CpuExperts::accumulate(const float* row, float weight, std::int64_t n, float* sum) const {
  kernels_.accumulate_row(row, weight, n, sum);
}

Result<int> cpu_experts_threads(std::string_view tier, const MoeProblem& problem,
                                std::int64_t tokens) {
  MOESAIC_RETURN_IF_ERROR(cpu_experts_can_implement(tier, problem));
  MOESAIC_ASSIGN_OR_RETURN(const cpu::CpuKernels* kernels, cpu::kernels_by_name(tier));
  MOESAIC_ASSIGN_OR_RETURN(const CpuWeightFormats formats,
                           cpu_weight_formats(problem.quant, *kernels));
  return make_cpu_plan(problem, formats, *kernels).team_of_tokens(tokens);
}

Result<std::int64_t> cpu_experts_workspace_size(std::string_view tier, const MoeProblem& problem,
                                                std::int64_t tokens) {
  MOESAIC_RETURN_IF_ERROR(cpu_experts_can_implement(tier, problem));
  MOESAIC_ASSIGN_OR_RETURN(const cpu::CpuKernels* kernels, cpu::kernels_by_name(tier));
  MOESAIC_ASSIGN_OR_RETURN(const CpuWeightFormats formats,
                           cpu_weight_formats(problem.quant, *kernels));
  return cpu_workspace_bytes(make_cpu_plan(problem, formats, *kernels), tokens);
}

}  // namespace moesaic::experts
