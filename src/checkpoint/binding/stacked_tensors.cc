#include "checkpoint/binding/stacked_tensors.h"

#include "checkpoint/config/stored_formats.h"

namespace moesaic::checkpoint {
namespace {

using K = TensorKind;

struct Suffixes {
  std::string_view scale, global_scale, input_scale;
};
Suffixes suffixes(const LinearFormat& format, std::string_view weight_suffix) {
  const bool inverse = format.names == NameStyle::kFp8Inverse;
  if (!weight_suffix.empty()) {
    return {inverse ? ".weight_scale_inv" : ".weight_scale", ".weight_scale_2", ".input_scale"};
  }
  if (inverse || format.names == NameStyle::kFp8) return {"_scale_inv", "", "_activation_scale"};
  return {"_weight_scale", "_weight_scale_2", "_input_scale"};
}

StackedForm stacked_form(const LinearFormat& format) {
  const auto stacked = stored_format_row(format.stored).stacked;
  return stacked != nullptr ? stacked(format) : StackedForm();
}

}  // namespace

std::vector<Shape> numbers_of_experts(std::int64_t experts, bool gate_up) {
  std::vector<Shape> shapes = {{experts}, {}, {1}, {experts, 1}, {experts, 1, 1}};
  if (gate_up) {
    shapes.push_back({experts, 2});
    shapes.push_back({experts, 2, 1});
  }
  return shapes;
}

bool is_stacked_format(const LinearFormat& format, ExpertStorage storage) {
  const bool transposed = is_columnwise(storage);
  if (!transposed && storage != ExpertStorage::kStacked && storage != ExpertStorage::kFusedNT) {
    return false;
  }
  const StackedForm form = stacked_form(format);
  return form.scale != StackedForm::Scale::kNone && (form.transposed || !transposed);
}

std::vector<LinearTensor> stacked_tensors(const LinearFormat& f, ExpertStorage storage,
                                          std::string_view weight_suffix, std::int64_t experts,
                                          std::int64_t n, std::int64_t k, bool gate_up) {
  using Scale = StackedForm::Scale;
  const StackedForm form = stacked_form(f);
  if (form.scale == Scale::kNone || form.scale == Scale::kOfLayout) return {};
  // `columns` of something per row, as it lies in the file.
  const auto matrix = [&](std::int64_t columns) {
    return is_columnwise(storage) ? Shape{experts, columns, n} : Shape{experts, n, columns};
  };
  const Suffixes names = suffixes(f, weight_suffix);
  const std::vector<Shape> numbers = numbers_of_experts(experts, gate_up);
  std::vector<Shape> scales = numbers;
  if (form.scale == Scale::kPerRow) scales = {matrix(1), {experts, n}};
  if (form.scale == Scale::kPerGroup) scales = {matrix(k / form.group)};
  std::vector<LinearTensor> list = {
      {K::kWeight, weight_suffix, {matrix(k / form.codes_per_element)}, {form.weight}},
      {K::kScale, names.scale, scales, form.scales}};
  if (form.global_scale) {
    list.push_back({K::kGlobalScale, names.global_scale, numbers, {DType::kF32}});
  }
  if (f.activation == ActivationQuant::kStatic ||
      (form.global_scale && f.activation != ActivationQuant::kNone)) {
    list.push_back(
        {K::kInputScale, names.input_scale, numbers, {DType::kF32, DType::kBF16, DType::kF16}});
  }
  return list;
}

}  // namespace moesaic::checkpoint
