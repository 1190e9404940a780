// Operand rows of GEMM1 from hidden states, on the device: 1x128 quantisation to e4m3 or a bf16
// copy, with the router weight multiplied in first where the model asks for it.
#pragma once

#include <cstdint>

#include "cuda/device_traits.h"

namespace moesaic::cuda {

// How operand rows are written down before a GEMM reads them.
enum class RowForm : std::uint8_t {
  kBf16,
  kFp8Group128,  // e4m3 codes and one F32 scale per row and 128 columns
};
constexpr int row_element_bytes(RowForm form) { return form == RowForm::kBf16 ? 2 : 1; }
constexpr bool row_has_scales(RowForm form) { return form == RowForm::kFp8Group128; }

struct QuantRowsParams {
  const std::uint16_t* x = nullptr;  // [tokens, columns] bf16, 16-byte aligned, columns % 8 == 0
  const float* weights = nullptr;    // [tokens]: x = bf16(x * bf16(weight)) first; null: not
  std::int64_t tokens = 0;
  std::int64_t columns = 0;
  bool power_of_two_scales = false;
  // q [tokens, columns] of that form; with scales: scale [ceil(columns/128)][scale_stride].
  RowForm form = RowForm::kFp8Group128;
  void* q = nullptr;
  float* scale = nullptr;
  std::int64_t scale_stride = 0;
};

// The codes and scales of ref_quantize_fp8_row, bit for bit. Returns a cudaError_t value.
int launch_quant_rows(const QuantRowsParams& params, const DeviceTraits& device, void* stream);

}  // namespace moesaic::cuda
