// Forms of operand rows: how activations are written down before a GEMM reads them.
#pragma once

#include <cstdint>

namespace moesaic::cuda {

enum class RowForm : std::uint8_t {
  kBf16,
  kFp8Group128,  // e4m3 codes and one F32 scale per row and 128 columns
};
constexpr int row_element_bytes(RowForm form) { return form == RowForm::kBf16 ? 2 : 1; }
constexpr bool row_has_scales(RowForm form) { return form == RowForm::kFp8Group128; }

}  // namespace moesaic::cuda
