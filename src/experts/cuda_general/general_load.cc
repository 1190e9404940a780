// Weights of the general experts from their source to the device, expert by expert.
#include <cstring>
#include <vector>

#include "core/checked.h"
#include "experts/cuda_general/general_experts_impl.h"
#include "experts/problem_checks.h"
#include "experts/weight_value.h"
#include "numerics/element.h"

namespace moesaic::cuda {
namespace {

using experts::ProjectionView;

// Rows of `stride` elements with zeros behind the columns, decoded to F32 where the kernel cannot
// read them as they are stored. act-order: the columns in the order of the activations, unless those
// follow the weights' (groups of quantised activations are groups of columns as they are stored).
void fill_general_rows(const GeneralPlan& plan, const OperandQuant& weight,
                       const ProjectionView& view, std::int64_t stride,
                       std::vector<std::byte>& to) {
  const std::int64_t rows = view.weight.dim(0), columns = view.weight.dim(1);
  const std::int64_t element = dtype_bits(plan.weight) / 8;
  to.assign(static_cast<std::size_t>(rows * stride * element), std::byte{0});
  for (std::int64_t n = 0; n < rows; ++n) {
    std::byte* const row = to.data() + n * stride * element;
    if (!plan.decodes) {
      std::memcpy(row, view.weight.data + n * columns * element,
                  static_cast<std::size_t>(columns * element));
      continue;
    }
    const bool ordered = view.perm.present() && !plan.reorders;
    const std::int32_t* const perm = ordered ? view.perm.as<std::int32_t>() : nullptr;
    for (std::int64_t k = 0; k < columns; ++k) {
      const auto value = static_cast<float>(experts::weight_value(weight, view, n, k));
      reinterpret_cast<float*>(row)[perm == nullptr ? k : perm[k]] = value;
    }
  }
}

}  // namespace

Status GeneralExperts::reserve(std::string_view name, std::int64_t rows, std::int64_t columns,
                               bool gated, Matrix& m) const {
  const std::int64_t local = problem_.num_local_experts;
  GeneralMatrix& v = m.view;
  v.dtype = plan_.weight;
  v.rows = static_cast<std::int32_t>(rows);
  v.columns = static_cast<std::int32_t>(columns);
  v.stride = plan_.stride(columns);
  const auto bytes = checked_mul(local * rows, v.stride * (dtype_bits(plan_.weight) / 8));
  if (!bytes) return {StatusCode::kOutOfMemory, "weights: more than 2^63 bytes"};
  MOESAIC_RETURN_IF_ERROR(m.data.reserve(name, *bytes));
  v.data = m.data.as<void>();
  if (plan_.quantizes) {
    const std::int64_t halves = gated ? 2 : 1;
    v.scale_rows = static_cast<std::int32_t>(halves * ceil_div(rows / halves, kGeneralChunk));
    v.scale_columns = static_cast<std::int32_t>(ceil_div(columns, kGeneralChunk));
    MOESAIC_RETURN_IF_ERROR(m.scale.reserve("scales", local * v.scale_rows * v.scale_columns * 4));
    v.scale = m.scale.as<float>();
  }
  if (problem_.has_expert_bias) {
    MOESAIC_RETURN_IF_ERROR(m.bias.reserve("biases", local * rows * 4));
    v.bias = m.bias.as<float>();
  }
  if (plan_.values && plan_.values->fixed) {
    MOESAIC_RETURN_IF_ERROR(m.input_scale.reserve("input scales", local * 4));
  }
  return plan_.reorders ? m.perm.reserve("permutation", local * columns * 4) : Status();
}

Status GeneralExperts::load(ExpertSource& source) {
  MOESAIC_RETURN_IF_ERROR(
      reserve("w13", plan_.w13_rows, plan_.hidden, is_gated(problem_.activation.kind), w13_));
  MOESAIC_RETURN_IF_ERROR(reserve("w2", plan_.hidden, plan_.inner, false, w2_));
  std::vector<std::byte> rows;
  std::vector<float> bias;
  const auto put = [&](std::int64_t e, const ProjectionView& view, const Matrix& m) -> Status {
    const GeneralMatrix& v = m.view;
    const std::int64_t bytes = v.rows * v.stride * (dtype_bits(v.dtype) / 8);
    const void* from = view.weight.data;
    if (plan_.decodes || v.stride != v.columns) {
      fill_general_rows(plan_, problem_.quant.weight, view, v.stride, rows);
      from = rows.data();
    }
    MOESAIC_RETURN_IF_ERROR(
        copy_to_device("upload of weights", m.data.as<std::byte>() + e * bytes, from, bytes));
    if (v.scale != nullptr) {
      const std::int64_t count = std::int64_t{v.scale_rows} * v.scale_columns;
      MOESAIC_RETURN_IF_ERROR(copy_to_device("upload of scales", m.scale.as<float>() + e * count,
                                             view.scale.data, count * 4));
    }
    if (m.input_scale.bytes() > 0) {
      MOESAIC_RETURN_IF_ERROR(copy_to_device("upload of scales", m.input_scale.as<float>() + e,
                                             view.input_scale.data, 4));
    }
    if (m.perm.bytes() > 0) {
      MOESAIC_RETURN_IF_ERROR(copy_to_device(
          "upload of a permutation", m.perm.as<std::int32_t>() + e * std::int64_t{v.columns},
          view.perm.data, std::int64_t{v.columns} * 4));
    }
    if (v.bias == nullptr) return {};
    bias.resize(static_cast<std::size_t>(v.rows));
    for (std::int32_t i = 0; i < v.rows; ++i) {
      bias[static_cast<std::size_t>(i)] = load_as_f32(view.bias.data, view.bias.dtype, i);
    }
    return copy_to_device("upload of biases", m.bias.as<float>() + e * v.rows, bias.data(),
                          std::int64_t{v.rows} * 4);
  };
  for (std::int64_t e = 0; e < problem_.num_local_experts; ++e) {
    MOESAIC_ASSIGN_OR_RETURN(const ExpertWeightsView view, source.expert(e));
    MOESAIC_RETURN_IF_ERROR(experts::check_expert_weights(problem_, view, e));
    ProjectionView w13 = experts::w13_of(view);
    w13.parts = experts::w13_parts(problem_);
    MOESAIC_RETURN_IF_ERROR(put(e, w13, w13_));
    MOESAIC_RETURN_IF_ERROR(put(e, experts::w2_of(view), w2_));
  }
  return {};
}

}  // namespace moesaic::cuda
