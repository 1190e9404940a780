#include "layer/near_ties.h"

#include <algorithm>
#include <vector>

#include "numerics/codec.h"

namespace moesaic::test {

LayerTensors near_ties(DType gate_dtype, const MoeLayerSpec& like) {
  MoeLayerSpec spec = like;
  spec.routing.top_k = 1;
  LayerTensors t = make_tensors(61, spec);
  const std::int64_t hidden = spec.hidden_size, count = t.gate_weight.bytes() / 2;
  const auto* const from = t.gate_weight.as<std::uint16_t>();
  std::vector<std::uint16_t> codes(from, from + count);
  for (auto row = codes.begin(); row != codes.end(); row += 2 * hidden) {
    std::copy_n(row, hidden, row + hidden);
    row[hidden] ^= 1U;
  }
  t.gate_weight = Tensor::zeros(gate_dtype, {count / hidden, hidden}).value();
  for (std::int64_t i = 0; i < count; ++i) {
    store_from_f32(t.gate_weight.data(), gate_dtype, i,
                   f32_from_bf16(codes[static_cast<std::size_t>(i)]));
  }
  return t;
}

Tensor rounded_logits(const Tensor& logits, const gate::LogitRounding& rounding) {
  Tensor rounded = Tensor::zeros(DType::kF32, logits.shape()).value();
  for (std::int64_t i = 0; i < logits.bytes() / 4; ++i) {
    rounded.as<float>()[i] = rounding.of(logits.as<float>()[i]);
  }
  return rounded;
}

}  // namespace moesaic::test
