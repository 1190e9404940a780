// How a row of hidden states travels between ranks: in the dtype to which the experts round it, or
// as the codes and scales they would make of it. Either way the experts' result has the bits of
// rows that never travelled.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "cpu/kernels.h"
#include "moesaic/experts.h"
#include "moesaic/status.h"

namespace moesaic::prepare_finalize {

class RowWire {
 public:
  // quantize: rows travel quantised where the scheme has a form that needs nothing but the row
  // (fp8-block) and a row that travels once is not multiplied by the weights of several experts;
  // else it changes nothing. Errors: those of compute_scheme and of the CPU tier in force.
  static Result<RowWire> create(const MoeProblem& problem, bool quantize);

  bool quantized() const { return groups_ > 0; }
  DType dtype() const { return dtype_; }
  std::int64_t groups() const { return groups_; }  // F32 scales per row
  std::int64_t hidden_bytes() const { return hidden_bytes_; }
  // hidden_bytes() of elements, then the scales.
  std::int64_t row_bytes() const {
    return hidden_bytes_ + groups_ * static_cast<std::int64_t>(sizeof(float));
  }

  // 1, or top_k where each of a token's experts gets a row times its own weight: in the batched
  // format with apply_router_weight_on_input.
  std::int64_t rows_per_token() const { return rows_per_token_; }
  // All rows of x [M, H] (F32, BF16 or F16, rows may be strided) to `to` [M, rows_per_token()] of
  // `stride` bytes.
  //   weights  [M, top_k]; used where the weight acts before the experts: in the batched format,
  //            and when rows are quantised, with apply_router_weight_on_input
  //   scratch  [scratch_floats()]
  // A row's bits depend on that row and its weight alone.
  void pack(const ConstTensorView& x, const float* weights, float* scratch, std::byte* to,
            std::int64_t stride) const;
  std::int64_t scratch_floats() const { return num_threads_ * (hidden_ + groups_); }

 private:
  void pack_row(const std::byte* x, DType dtype, float weight, float* scratch, std::byte* to) const;

  const cpu::CpuKernels* kernels_ = nullptr;
  DType dtype_ = DType::kF32;        // on the wire
  DType round_dtype_ = DType::kF32;  // before it is quantised, and of the weight
  std::int64_t hidden_ = 0, hidden_bytes_ = 0, groups_ = 0, top_k_ = 1;
  std::int64_t rows_per_token_ = 1;
  bool power_of_two_ = false;
  bool weight_on_input_ = false;  // the weight is applied here
  int num_threads_ = 1;
};

}  // namespace moesaic::prepare_finalize
