// Canonical quantised matrices as fp32 values.
#include <array>

#include "checkpoint/reader/mlp_reader.h"
#include "numerics/element.h"
#include "numerics/integer.h"
#include "quant/code_values.h"

namespace moesaic::checkpoint {
namespace {

float code_value(const OperandQuant& w, const quant::CodeValues& table, const Tensor& codes,
                 std::int64_t i) {
  if (dtype_bits(w.dtype) == 4) return table[nibble_at(codes.as<std::uint8_t>(), i)];
  if (w.dtype == DType::kI8) return codes.as<std::int8_t>()[i];
  if (w.dtype == DType::kU8) return codes.as<std::uint8_t>()[i];
  return load_as_f32(codes.data(), w.dtype, i);
}

}  // namespace

void dequantize_matrix(const OperandQuant& w, const MatrixBuffers& m, std::int64_t rows,
                       std::int64_t columns, float* out) {
  const quant::CodeValues table =
      dtype_bits(w.dtype) == 4 ? quant::code_values(w) : quant::CodeValues{};
  const std::int64_t group = w.granularity == ScaleGranularity::kGroup ? w.block_k : columns;
  const std::int64_t groups = (columns + group - 1) / group;
  const bool int4_fp8 = w.dtype == DType::kI4 && w.scale_format == ScaleFormat::kE4M3;
  for (std::int64_t r = 0; r < rows; ++r) {
    const float outer = m.global_scale.present()    ? m.global_scale.as<float>()[0]
                        : m.channel_scale.present() ? m.channel_scale.as<float>()[r]
                                                    : 1.0F;
    for (std::int64_t c = 0; c < columns; ++c) {
      const std::int64_t at =
          w.granularity == ScaleGranularity::kTensor ? 0 : r * groups + c / group;
      const float scale = load_as_f32(m.scale.data(), m.scale.dtype(), at);
      float q = code_value(w, table, m.weight, r * columns + c);
      if (m.zero.present()) q -= static_cast<float>(m.zero.as<std::uint8_t>()[at]);
      float value = int4_fp8 ? quant::int4_fp8_value(static_cast<int>(q), scale) : q * scale;
      if (m.min.present()) value -= m.min.as<float>()[at];
      const std::int64_t to = m.perm.present() ? m.perm.as<std::int32_t>()[c] : c;
      out[r * columns + to] = value * outer;
    }
  }
}

}  // namespace moesaic::checkpoint
