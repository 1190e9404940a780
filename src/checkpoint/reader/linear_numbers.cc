#include "checkpoint/reader/linear_numbers.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstring>

#include "checkpoint/container/names.h"
#include "numerics/element.h"

namespace moesaic::checkpoint {

Result<std::vector<float>> read_floats(const ShardSet::Located& from) {
  MOESAIC_ASSIGN_OR_RETURN(const Tensor stored, from.file->read_tensor(*from.info));
  MOESAIC_ASSIGN_OR_RETURN(const std::int64_t count, stored.shape().num_elements());
  std::vector<float> values(static_cast<std::size_t>(count));
  for (std::size_t i = 0; i < values.size(); ++i) {
    values[i] = load_as_f32(stored.data(), stored.dtype(), static_cast<std::int64_t>(i));
  }
  return values;
}

Status check_positive(const ShardSet::Located& from, std::string_view what, float value) {
  if (value > 0 && std::isfinite(value)) return {};
  return {StatusCode::kCorruptFile, fmt::format("{}: got {} {}, need a finite number > 0",
                                                quote_name(from.info->name), what, value)};
}

Status check_reciprocal(const ShardSet::Located& from, std::string_view what, float value) {
  MOESAIC_RETURN_IF_ERROR(check_positive(from, what, value));
  if (std::isfinite(1.0F / value)) return {};
  return {StatusCode::kCorruptFile,
          fmt::format("{}: got {} {}, need a number whose reciprocal is finite",
                      quote_name(from.info->name), what, value)};
}

// Whether numbers of this kind differ between gate and up of any expert.
static Result<bool> numbers_differ(const std::vector<MlpTensors>& experts, TensorKind kind) {
  for (const MlpTensors& expert : experts) {
    const auto& scales = expert.of(kind);
    if (!scales[kW1]) continue;
    const TensorInfo& info = *scales[kW1]->info;
    MOESAIC_ASSIGN_OR_RETURN(const Tensor gate, scales[kW1]->file->read_tensor(info));
    if (scales[kW3] && scales[kW3]->info != &info) {
      MOESAIC_ASSIGN_OR_RETURN(const Tensor up, scales[kW3]->file->read_tensor(*scales[kW3]->info));
      const auto same = [&] {
        return std::memcmp(gate.data(), up.data(), static_cast<std::size_t>(gate.bytes())) == 0;
      };
      if (gate.dtype() != up.dtype() || gate.bytes() != up.bytes() || !same()) return true;
    } else if (info.rank >= 2 && info.shape[1] == 2) {
      for (std::int64_t i = 0; i < info.shape[0]; ++i) {  // [E, 2(, 1)], gate and up of each expert
        const std::int64_t at = 2 * i;
        if (load_as_f32(gate.data(), gate.dtype(), at) !=
            load_as_f32(gate.data(), gate.dtype(), at + 1)) {
          return true;
        }
      }
    }
  }
  return false;
}

// GGUF files may leave a number out, which is then 1.
static bool one_is_left_out(const std::vector<MlpTensors>& experts, TensorKind kind) {
  return std::ranges::any_of(experts, [&](const MlpTensors& expert) {
    const auto& scales = expert.of(kind);
    return scales[kW1].has_value() != scales[kW3].has_value();
  });
}

Status scheme_of_values(const std::vector<MlpTensors>& experts, const LinearFormat& format,
                        Scheme* scheme) {
  OperandQuant weight = scheme->weight;
  const bool gguf = format.stored == StoredFormat::kGguf && weight.outer_scale != OuterScale::kNone;
  if (format.stored == StoredFormat::kNvfp4 || gguf) {
    constexpr TensorKind kKind = TensorKind::kGlobalScale;
    MOESAIC_ASSIGN_OR_RETURN(const bool differ, numbers_differ(experts, kKind));
    if (differ || (gguf && one_is_left_out(experts, kKind)))
      weight.outer_scale = OuterScale::kChannel;
  }
  if (format.stored == StoredFormat::kFp8Tensor) {
    MOESAIC_ASSIGN_OR_RETURN(const bool differ, numbers_differ(experts, TensorKind::kScale));
    if (differ) weight.granularity = ScaleGranularity::kChannel;
  }
  if (!(weight == scheme->weight)) *scheme = with_weight(*scheme, weight);
  if (format.act_order) {
    MOESAIC_ASSIGN_OR_RETURN(const bool differ, numbers_differ(experts, TensorKind::kGroupIndex));
    if (differ) {
      MOESAIC_ASSIGN_OR_RETURN(*scheme, linear_scheme({}, DType::kF32));
    }
  }
  return {};
}

}  // namespace moesaic::checkpoint
