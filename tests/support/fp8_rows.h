// Rows of activations quantised by groups, for tests that hand them on or compare with them.
#pragma once

#include <cstdint>
#include <vector>

#include "numerics/element.h"
#include "quant/fp8_group.h"
#include "support/random.h"

namespace moesaic::test {

struct Fp8Rows {
  Tensor codes, scales;  // [M, K] F8_E4M3, [M, K / group] F32
};
// x [M, K] F32, BF16 or F16.
inline Fp8Rows fp8_rows(const Tensor& x, quant::ScaleRounding rounding,
                        std::int64_t group = quant::kFp8BlockSize) {
  const std::int64_t rows = x.shape()[0], k = x.shape()[1];
  Fp8Rows r{Tensor::zeros(DType::kF8E4M3, x.shape()).value(),
            Tensor::zeros(DType::kF32, {rows, (k + group - 1) / group}).value()};
  poison(r.codes.view());
  poison(r.scales.view());
  std::vector<float> row(static_cast<std::size_t>(k));
  for (std::int64_t m = 0; m < rows; ++m) {
    for (std::int64_t i = 0; i < k; ++i) {
      row[static_cast<std::size_t>(i)] = load_as_f32(x.data(), x.dtype(), m * k + i);
    }
    quant::ref_quantize_fp8_row(row.data(), k, group, rounding, r.codes.as<std::uint8_t>() + m * k,
                                r.scales.as<float>() + m * ((k + group - 1) / group));
  }
  return r;
}

}  // namespace moesaic::test
