#include "experts/weight_value.h"

#include "core/checked.h"
#include "numerics/codec.h"
#include "quant/code_values.h"

namespace moesaic::experts {
namespace {

double stored_code(const OperandQuant& w, const ConstTensorView& t, std::int64_t i) {
  if (dtype_bits(w.dtype) == 4) {
    const quant::CodeValues values = quant::code_values(w);
    return static_cast<double>(values[nibble_at(t.as<std::uint8_t>(), i)]);
  }
  if (w.dtype == DType::kI8) return t.as<std::int8_t>()[i];
  if (w.dtype == DType::kU8) return t.as<std::uint8_t>()[i];
  return static_cast<double>(load_as_f32(t.data, t.dtype, i));
}

double number(const ConstTensorView& t, std::int64_t i) {
  if (t.dtype == DType::kI8) return t.as<std::int8_t>()[i];
  if (t.dtype == DType::kU8) return t.as<std::uint8_t>()[i];
  return static_cast<double>(load_as_f32(t.data, t.dtype, i));
}

}  // namespace

double weight_value(const OperandQuant& w, const ProjectionView& v, std::int64_t n,
                    std::int64_t k) {
  double value = stored_code(w, v.weight, n * v.weight.dim(1) + k);
  std::int64_t at = 0;  // of the scale
  if (w.granularity == ScaleGranularity::kChannel) at = n;
  if (v.scale.present() && v.scale.rank() == 2) {
    const std::int64_t part_rows = v.weight.dim(0) / v.parts;
    const std::int64_t block =
        n / part_rows * ceil_div(part_rows, w.block_n) + n % part_rows / w.block_n;
    at = block * v.scale.dim(1) + k / w.block_k;
  }
  if (quant::rounds_scaled_codes(w)) {
    const auto scale = static_cast<float>(number(v.scale, at));
    return static_cast<double>(quant::int4_fp8_value(static_cast<int>(value), scale)) *
           number(v.channel_scale, n);
  }
  if (v.zero.present()) value -= number(v.zero, at);
  if (v.scale.present()) value *= number(v.scale, at);
  if (v.min.present()) value -= number(v.min, at);
  if (v.global_scale.present()) value *= number(v.global_scale, 0);
  if (v.channel_scale.present()) value *= number(v.channel_scale, n);
  return value;
}

}  // namespace moesaic::experts
