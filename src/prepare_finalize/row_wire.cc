#include "prepare_finalize/row_wire.h"

#include <omp.h>

#include <algorithm>
#include <bit>
#include <cstring>

#include "core/checked.h"
#include "core/fault.h"
#include "cpu/team.h"
#include "cpu/tiers.h"
#include "quant/block_scales.h"
#include "quant/compute_scheme.h"

namespace moesaic::prepare_finalize {
namespace {

// The code of a value that is exact in e4m3; NaN gives NaN. From 2^-6 on the fp32 exponent and the
// top three bits of the significand are the code, up to the bias; below, codes count steps of 2^-9.
std::uint8_t code_of_exact(float value) {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  const std::uint32_t magnitude = bits & 0x7FFFFFFFU;
  const std::uint32_t code =
      magnitude >= 0x3C800000U
          ? std::min((magnitude >> 20) - ((127U - 7U) << 3), 0x7FU)
          : static_cast<std::uint32_t>(std::bit_cast<float>(magnitude) * 512.0F);
  return static_cast<std::uint8_t>(code | (bits >> 31 << 7));
}

}  // namespace

Result<RowWire> RowWire::create(const MoeProblem& problem, bool quantize) {
  MOESAIC_RETURN_IF_ERROR(validate(problem.quant));
  RowWire w;
  MOESAIC_ASSIGN_OR_RETURN(w.kernels_, cpu::current_kernels());
  w.round_dtype_ = quant::operand_dtype(problem.activation_dtype, problem.quant.kind);
  w.dtype_ = w.round_dtype_;
  w.hidden_ = problem.hidden_size;
  w.top_k_ = problem.top_k;
  w.num_threads_ = cpu::resolve_threads(problem.num_threads);
  const bool batched = problem.format == ActivationFormat::kBatched;
  const bool several = problem.apply_router_weight_on_input && problem.top_k > 1;
  if (several && batched && !MOESAIC_FAULT(row_wire_one_weight_for_all_experts)) {
    w.rows_per_token_ = problem.top_k;
  }
  const bool one_row_for_all = several && !batched && !MOESAIC_FAULT(row_wire_codes_of_one_weight);
  if (quantize && !one_row_for_all && problem.quant.kind == ComputeScheme::kFp8Block) {
    w.dtype_ = DType::kF8E4M3;
    w.groups_ = ceil_div(problem.hidden_size, quant::kFp8BlockSize);
    w.power_of_two_ = problem.quant.activation.scale_format == ScaleFormat::kE8M0;
  }
  w.hidden_bytes_ = problem.hidden_size * dtype_bits(w.dtype_) / 8;
  w.weight_on_input_ = problem.apply_router_weight_on_input && (w.quantized() || batched);
  return w;
}

void RowWire::pack_row(const std::byte* x, DType dtype, float weight, float* scratch,
                       std::byte* to) const {
  if (dtype == dtype_ && !weight_on_input_) {
    std::memcpy(to, x, static_cast<std::size_t>(hidden_bytes_));
    return;
  }
  // The same steps in the same order as the experts' own.
  kernels_->load_row(x, dtype, hidden_, hidden_, scratch);
  if (weight_on_input_ && !MOESAIC_FAULT(row_wire_skips_weight)) {
    kernels_->round_row(scratch, hidden_, round_dtype_);
    kernels_->round_row(&weight, 1, round_dtype_);
    kernels_->scale_row(scratch, hidden_, weight);
  }
  if (!quantized()) {
    kernels_->round_row(scratch, hidden_, round_dtype_);
    kernels_->store_row(scratch, hidden_, dtype_, to);
    return;
  }
  // Rows lie at any address on the wire, scales need not be aligned there: through the scratch's
  // second part.
  float* scales = scratch + hidden_;
  kernels_->quantize_row_e4m3(scratch, hidden_, round_dtype_, power_of_two_, scales, scratch);
  const bool narrow = kernels_->narrow_operand == cpu::OperandKind::kBF16;
  auto* codes = reinterpret_cast<std::uint8_t*>(to);
  if (narrow) {
    const auto* values = reinterpret_cast<const std::byte*>(scratch);
    for (std::int64_t i = 0; i < hidden_; ++i) {
      std::uint16_t bf16 = 0;
      std::memcpy(&bf16, values + 2 * i, sizeof(bf16));
      codes[i] = code_of_exact(std::bit_cast<float>(static_cast<std::uint32_t>(bf16) << 16));
    }
  } else {
    for (std::int64_t i = 0; i < hidden_; ++i) codes[i] = code_of_exact(scratch[i]);
  }
  if (MOESAIC_FAULT(row_wire_first_scale_only)) std::fill(scales, scales + groups_, scales[0]);
  std::memcpy(to + hidden_bytes_, scales, static_cast<std::size_t>(groups_) * sizeof(float));
}

void RowWire::pack(const ConstTensorView& x, const float* weights, float* scratch, std::byte* to,
                   std::int64_t stride) const {
  const std::int64_t step = x.strides[0] * dtype_bits(x.dtype) / 8;
  const std::int64_t rows = x.dim(0) * rows_per_token_;
  const std::int64_t slots = top_k_ / rows_per_token_;  // of a row
  // About a nanosecond an element, copied or quantised.
  const double us = static_cast<double>(rows) * static_cast<double>(hidden_) * 1e-3;
#pragma omp parallel num_threads(rows > 1 ? cpu::team_size(us, num_threads_) : 1)
  {
    const cpu::ScopedIeeeMode ieee;
    float* mine = scratch + omp_get_thread_num() * (hidden_ + groups_);
#pragma omp for schedule(static)
    for (std::int64_t r = 0; r < rows; ++r) {
      pack_row(x.data + r / rows_per_token_ * step, x.dtype, weights[r * slots], mine,
               to + r * stride);
    }
  }
}

}  // namespace moesaic::prepare_finalize
