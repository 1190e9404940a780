// Weights from their source to the device, repacked expert by expert.
#include <algorithm>
#include <vector>

#include "core/checked.h"
#include "experts/problem_checks.h"
#include "experts/sm90/experts_impl.h"
#include "experts/sm90/weight_codes.h"
#include "numerics/element.h"

namespace moesaic::cuda {
namespace {

Status grow(Allocation& memory, std::int64_t bytes) {
  return memory.bytes() >= bytes ? Status() : memory.reserve("staging", bytes);
}

// order: of each part of the rows, as their weights have it; may be null.
Status upload_bias(const ConstTensorView& bias, const std::int32_t* order, std::int64_t part_rows,
                   float* to, std::int64_t count, std::vector<float>& row) {
  row.resize(static_cast<std::size_t>(count));
  for (std::int64_t i = 0; i < count; ++i) {
    row[static_cast<std::size_t>(i)] =
        load_as_f32(bias.data, bias.dtype, stored_row(order, part_rows, i));
  }
  return copy_to_device("upload of biases", to, row.data(), count * std::int64_t{sizeof(float)});
}

Status repack_matrix(const RepackShape& shape, const ConstTensorView& weight,
                     const ConstTensorView& scale, Allocation& staging, std::byte* image,
                     std::byte* image_scale) {
  const std::int64_t bytes = shape.rows * shape.row_bytes();
  const std::int64_t scale_at = round_up(bytes, 256);
  const std::int64_t scale_bytes =
      scale.present() ? scale.dim(0) * scale.dim(1) * std::int64_t{sizeof(float)} : 0;
  MOESAIC_RETURN_IF_ERROR(grow(staging, scale_at + scale_bytes));
  auto* const at = staging.as<std::byte>();
  MOESAIC_RETURN_IF_ERROR(copy_to_device("upload of weights", at, weight.data, bytes));
  const float* scales = nullptr;
  if (scale.present()) {
    MOESAIC_RETURN_IF_ERROR(
        copy_to_device("upload of scales", at + scale_at, scale.data, scale_bytes));
    scales = reinterpret_cast<const float*>(at + scale_at);
  }
  MOESAIC_RETURN_IF_ERROR(check_call(
      "repack",
      repack_expert(shape, at, scales, image, reinterpret_cast<float*>(image_scale), nullptr)));
  // The staging memory is used again by the next matrix.
  return synchronize(nullptr);
}

bool has_bf16_scales(const ExpertWeightsView& view) {
  return view.w13_scale.dtype == DType::kBF16 && view.w2_scale.dtype == DType::kBF16;
}

}  // namespace

Status repack_tiles(const RepackCall& call) {
  const bool scaled = call.parts.size() == 4;
  MOESAIC_RETURN_IF_ERROR(repack_matrix(call.plan.w13, call.weights.w13, call.weights.w13_scale,
                                        call.staging, call.parts[0],
                                        scaled ? call.parts[2] : nullptr));
  return repack_matrix(call.plan.w2, call.weights.w2, call.weights.w2_scale, call.staging,
                       call.parts[1], scaled ? call.parts[3] : nullptr);
}

Status repack_row_scaled(const RepackCall& call) {
  const ExpertWeightsView& v = call.weights;
  const auto matrix = [&](const RepackShape& shape, const ConstTensorView& weight,
                          const ConstTensorView& scale, const ConstTensorView& input,
                          std::size_t part) {
    const auto at = [&](std::size_t i) { return call.parts[part + i]; };
    MOESAIC_RETURN_IF_ERROR(repack_matrix(shape, weight, {}, call.staging, at(0), nullptr));
    std::vector<float> scales(static_cast<std::size_t>(shape.rows));
    for (std::int64_t i = 0; i < shape.rows; ++i) {
      scales[static_cast<std::size_t>(i)] =
          load_as_f32(scale.data, scale.dtype, scale.dim(0) == 1 ? 0 : i);
    }
    MOESAIC_RETURN_IF_ERROR(
        copy_to_device("upload of scales", at(2), scales.data(), shape.rows * 4));
    const float of_rows = input.present() ? input.as<float>()[0] : 1.0F;
    return copy_to_device("upload of scales", at(4), &of_rows, 4);
  };
  MOESAIC_RETURN_IF_ERROR(matrix(call.plan.w13, v.w13, v.w13_scale, v.w13_input_scale, 0));
  return matrix(call.plan.w2, v.w2, v.w2_scale, v.w2_input_scale, 1);
}

Status CudaExperts::Impl::load(ExpertSource& source) {
  const std::int64_t local = problem.num_local_experts;
  if (plan.format->image != nullptr && local > 0) {
    // What the scales are is with the weights.
    MOESAIC_ASSIGN_OR_RETURN(const ExpertWeightsView view, source.expert(0));
    MOESAIC_RETURN_IF_ERROR(experts::check_expert_weights(problem, view, 0));
    plan.set_image(has_bf16_scales(view) || problem.quant.weight.scale_dtype == DType::kBF16);
  }
  const std::span<const WeightPart> rows = plan.format->parts;
  parts.resize(rows.size());
  for (std::size_t i = 0; i < rows.size(); ++i) {
    MOESAIC_RETURN_IF_ERROR(parts[i].reserve(rows[i].name, local * rows[i].bytes(plan)));
    rows[i].bind(weights, parts[i].as<std::byte>());
  }
  if (problem.has_expert_bias) {
    MOESAIC_RETURN_IF_ERROR(w13_bias.reserve("w13_bias", local * plan.w13.rows * 4));
    MOESAIC_RETURN_IF_ERROR(w2_bias.reserve("w2_bias", local * plan.w2.rows * 4));
    weights.w13_bias = w13_bias.as<float>();
    weights.w2_bias = w2_bias.as<float>();
  }
  Allocation staging;
  std::vector<float> row;
  std::vector<std::byte*> to(rows.size());
  float first_scale = 0;
  for (std::int64_t e = 0; e < local; ++e) {
    MOESAIC_ASSIGN_OR_RETURN(const ExpertWeightsView view, source.expert(e));
    MOESAIC_RETURN_IF_ERROR(experts::check_expert_weights(problem, view, e));
    for (std::size_t i = 0; i < rows.size(); ++i) {
      to[i] = parts[i].as<std::byte>() + e * rows[i].bytes(plan);
    }
    MOESAIC_RETURN_IF_ERROR(plan.format->repack({plan, view, staging, to, e}));
    if (plan.static_scales) {
      const float scale = view.w13_input_scale.as<float>()[0];
      if (e == 0) first_scale = scale;
      own_scales_differ = own_scales_differ || scale != first_scale;
    }
    if (problem.has_expert_bias) {
      const std::int32_t* const order =
          view.w2_perm.present() ? view.w2_perm.as<std::int32_t>() : nullptr;
      MOESAIC_RETURN_IF_ERROR(upload_bias(view.w13_bias, order, problem.intermediate_size,
                                          w13_bias.as<float>() + e * plan.w13.rows, plan.w13.rows,
                                          row));
      MOESAIC_RETURN_IF_ERROR(upload_bias(view.w2_bias, nullptr, plan.w2.rows,
                                          w2_bias.as<float>() + e * plan.w2.rows, plan.w2.rows,
                                          row));
    }
  }
  return {};
}

}  // namespace moesaic::cuda
