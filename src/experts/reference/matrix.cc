#include "experts/reference/matrix.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <numeric>
#include <span>

#include "core/checked.h"
#include "core/fault.h"
#include "numerics/codec.h"

namespace moesaic::experts {

ProjectionView w13_of(const ExpertWeightsView& v) {
  return {v.w13,      v.w13_scale, v.w13_bias,        v.w13_global_scale, v.w13_channel_scale,
          v.w13_zero, v.w13_min,   v.w13_input_scale, v.w13_perm,         1};
}
ProjectionView w2_of(const ExpertWeightsView& v) {
  return {v.w2,      v.w2_scale, v.w2_bias,        v.w2_global_scale, v.w2_channel_scale,
          v.w2_zero, v.w2_min,   v.w2_input_scale, v.w2_perm,         1};
}

RefMatrix::RefMatrix(const Scheme& quant, std::int64_t num_experts, std::int64_t parts,
                     std::int64_t rows, std::int64_t columns)
    : quant_(quant.weight),
      values_(quant.kind == ComputeScheme::kF32 ? quant::code_values(quant.weight)
                                                : quant::code_values_bf16(quant.weight)),
      four_bits_(dtype_bits(quant.weight.dtype) == 4),
      num_experts_(num_experts),
      rows_(rows),
      columns_(columns),
      part_rows_(rows / parts) {}

Status RefMatrix::append(std::int64_t e, std::string_view field, const ProjectionView& v) {
  struct Part {
    Tensor& to;
    const ConstTensorView& from;
  };
  const std::array<Part, 8> parts = {{{weight_, v.weight},
                                      {scale_, v.scale},
                                      {global_scale_, v.global_scale},
                                      {channel_scale_, v.channel_scale},
                                      {zero_, v.zero},
                                      {min_, v.min},
                                      {input_scale_, v.input_scale},
                                      {perm_, v.perm}}};
  for (const Part& part : parts) {
    if (!part.from.present()) continue;
    MOESAIC_ASSIGN_OR_RETURN(const std::int64_t bytes,
                             contiguous_bytes(part.from.dtype, part.from.shape));
    if (e == 0) {
      const Shape& s = part.from.shape;
      MOESAIC_ASSIGN_OR_RETURN(
          part.to,
          Tensor::uninitialized(part.from.dtype, s.rank() == 2 ? Shape{num_experts_, s[0], s[1]}
                                                               : Shape{num_experts_, s[0]}));
    }
    if (part.from.dtype != part.to.dtype()) {
      return {StatusCode::kInvalidDType,
              fmt::format("expert {}: {}: got {}, need {} as in expert 0", e, field,
                          dtype_name(part.from.dtype), dtype_name(part.to.dtype()))};
    }
    std::memcpy(part.to.data() + e * bytes, part.from.data, static_cast<std::size_t>(bytes));
  }
  if (v.bias.present() && e == 0) {
    MOESAIC_ASSIGN_OR_RETURN(bias_, Tensor::uninitialized(DType::kF32, {num_experts_, rows_}));
  }
  for (std::int64_t n = 0; v.bias.present() && n < rows_; ++n) {
    bias_.as<float>()[e * rows_ + n] = load_as_f32(v.bias.data, v.bias.dtype, n);
  }
  scale_columns_ = v.scale.present() && v.scale.rank() == 2 ? v.scale.dim(1) : 1;
  scales_per_expert_ = scale_columns_ * (v.scale.present() ? v.scale.dim(0) : 0);
  return {};
}

std::int64_t RefMatrix::bytes() const {
  std::int64_t sum = 0;
  for (const Tensor* t : {&weight_, &scale_, &bias_, &global_scale_, &channel_scale_, &zero_, &min_,
                          &input_scale_, &perm_})
    sum += t->bytes();
  return sum;
}

void RefMatrix::append_parts(bool second, std::vector<ExpertPart>& to) {
  struct Part {
    std::string_view w13, w2;
    Tensor& tensor;
  };
  for (const Part& part :
       {Part{"w13.weights", "w2.weights", weight_}, Part{"w13.scale", "w2.scale", scale_},
        Part{"w13.bias", "w2.bias", bias_},
        Part{"w13.global_scale", "w2.global_scale", global_scale_},
        Part{"w13.channel_scale", "w2.channel_scale", channel_scale_},
        Part{"w13.zero", "w2.zero", zero_}, Part{"w13.min", "w2.min", min_},
        Part{"w13.input_scale", "w2.input_scale", input_scale_},
        Part{"w13.perm", "w2.perm", perm_}}) {
    if (part.tensor.bytes() == 0) continue;
    to.push_back({second ? part.w2 : part.w13,
                  TensorView(part.tensor.data(), DType::kU8,
                             Shape{num_experts_, part.tensor.bytes() / num_experts_})});
  }
}

bool RefMatrix::gather(std::int64_t e, const float* from, float* to) const {
  if (!perm_.present() || MOESAIC_FAULT(ref_experts_ignores_permutation)) return false;
  const std::int32_t* perm = perm_.as<std::int32_t>() + e * columns_;
  for (std::int64_t k = 0; k < columns_; ++k) to[k] = from[perm[k]];
  return true;
}

// The numbers that stored codes are, before scale and zero point.
void RefMatrix::codes(std::int64_t index, std::span<float> out) const {
  const auto each = [&](auto&& code) {
    for (std::size_t i = 0; i < out.size(); ++i)
      out[i] = code(index + static_cast<std::int64_t>(i));
  };
  if (four_bits_) {
    const std::int64_t all = MOESAIC_FAULT(ref_experts_low_nibble_twice) ? ~std::int64_t{1} : -1;
    const auto* packed = weight_.as<std::uint8_t>();
    return each([&](std::int64_t i) { return values_[nibble_at(packed, i & all)]; });
  }
  if (quant_.dtype == DType::kI8) {
    const auto* stored = weight_.as<std::int8_t>();
    return each([&](std::int64_t i) { return static_cast<float>(stored[i]); });
  }
  if (quant_.dtype == DType::kU8) {
    const auto* stored = weight_.as<std::uint8_t>();
    return each([&](std::int64_t i) { return static_cast<float>(stored[i]); });
  }
  load_as_f32(weight_.data(), weight_.dtype(), index, static_cast<std::int64_t>(out.size()),
              out.data());
}

// Columns [begin, begin + count) of row n, which share a scale. Eight interleaved partial sums,
// added pairwise at the end: a fixed order with an error that grows with count / 8.
float RefMatrix::dot(std::int64_t e, std::int64_t n, const float* x, std::int64_t begin,
                     std::int64_t count, std::int64_t scale_index) const {
  const std::int64_t first = (e * rows_ + n) * columns_ + begin;
  float zero = 0;
  if (zero_.present()) {
    zero = zero_.dtype() == DType::kI8 ? static_cast<float>(zero_.as<std::int8_t>()[scale_index])
                                       : static_cast<float>(zero_.as<std::uint8_t>()[scale_index]);
    if (MOESAIC_FAULT(ref_experts_zero_point_added)) zero = -zero;
  }
  const bool rounded_product = quant::rounds_scaled_codes(quant_);
  const float group_scale =
      rounded_product ? f32_from_e4m3(scale_.as<std::uint8_t>()[scale_index]) : 1.0F;
  std::array<float, 8> lane{};
  std::array<float, 256> values;  // a multiple of the lanes
  for (std::int64_t at = 0; at < count; at += std::int64_t{values.size()}) {
    const std::span<float> w(values.data(),
                             std::min(values.size(), static_cast<std::size_t>(count - at)));
    codes(first + at, w);
    for (std::size_t i = 0; i < w.size(); ++i) {
      float value = w[i] - zero;
      if (rounded_product) value = quant::int4_fp8_value(static_cast<int>(value), group_scale);
      lane[i % 8] += x[at + static_cast<std::int64_t>(i)] * value;
    }
  }
  return ((lane[0] + lane[1]) + (lane[2] + lane[3])) + ((lane[4] + lane[5]) + (lane[6] + lane[7]));
}

void RefMatrix::multiply(std::int64_t e, const RefOperand& x, float* out) const {
  const bool grouped = quant_.granularity == ScaleGranularity::kGroup ||
                       quant_.granularity == ScaleGranularity::kBlock;
  const std::int64_t block_n = grouped ? quant_.block_n : 1;
  const std::int64_t block_k = grouped ? quant_.block_k : columns_;
  // Columns that share the scales of both sides.
  std::int64_t step = block_k;
  if (x.scales != nullptr && x.group > 0) step = grouped ? std::gcd(block_k, x.group) : x.group;
  const bool per_tensor = quant_.granularity == ScaleGranularity::kTensor;
  const std::int64_t part_blocks = ceil_div(part_rows_, block_n);
  const bool outside = !grouped && !zero_.present() && !min_.present();
  const float* bias = bias_.present() ? bias_.as<float>() + e * rows_ : nullptr;
  if (MOESAIC_FAULT(ref_experts_missing_bias)) bias = nullptr;
  const bool wrong_scale_row = MOESAIC_FAULT(ref_experts_scale_row_zero);
  float alpha = x.outer;
  if (global_scale_.present()) alpha *= global_scale_.as<float>()[e];
  if (MOESAIC_FAULT(ref_experts_alpha_of_expert_zero) && global_scale_.present())
    alpha = x.outer * global_scale_.as<float>()[0];
  for (std::int64_t n = 0; n < rows_; ++n) {
    const std::int64_t block = n / part_rows_ * part_blocks + n % part_rows_ / block_n;
    const std::int64_t scale_row =
        e * scales_per_expert_ + (wrong_scale_row || per_tensor ? 0 : block) * scale_columns_;
    float sum = 0;
    for (std::int64_t begin = 0; begin < columns_; begin += step) {
      const std::int64_t g = begin / block_k;
      const std::int64_t count = std::min(step, columns_ - begin);
      const float* values = x.values + begin;
      const float partial = dot(e, n, values, begin, count, scale_row + g);
      float factor = 1.0F;
      if (scale_.present() && !outside && !quant::rounds_scaled_codes(quant_))
        factor = load_as_f32(scale_.data(), scale_.dtype(), scale_row + g);
      if (x.scales != nullptr && x.group > 0) factor = x.scales[begin / x.group] * factor;
      sum += partial * factor;
      if (min_.present()) {
        float total = 0;
        for (std::int64_t i = 0; i < count; ++i) total += values[i];
        if (x.scales != nullptr && x.group > 0) total *= x.scales[begin / x.group];
        sum -= min_.as<float>()[scale_row + g] * total;
      }
    }
    float whole = 1.0F;
    if (scale_.present() && outside) whole = load_as_f32(scale_.data(), scale_.dtype(), scale_row);
    if (channel_scale_.present()) whole = channel_scale_.as<float>()[e * rows_ + n];
    if (x.scales != nullptr && x.group == 0) whole = x.scales[0] * whole;
    sum *= whole * alpha;
    out[n] = bias != nullptr ? sum + bias[n] : sum;
  }
}

}  // namespace moesaic::experts
