#include "checkpoint/binding/stacked_tensors.h"

#include "quant/mx.h"
#include "quant/nvfp4.h"

namespace moesaic::checkpoint {
namespace {

using K = TensorKind;

struct Suffixes {
  std::string_view scale, global_scale, input_scale;
};
Suffixes suffixes(const LinearFormat& format, std::string_view weight_suffix) {
  if (!weight_suffix.empty()) return {".weight_scale", ".weight_scale_2", ".input_scale"};
  if (format.names == NameStyle::kFp8) return {"_scale_inv", "", "_activation_scale"};
  return {"_weight_scale", "_weight_scale_2", "_input_scale"};
}

}  // namespace

std::vector<Shape> numbers_of_experts(std::int64_t experts, bool gate_up) {
  std::vector<Shape> shapes = {{experts}, {}, {1}, {experts, 1}, {experts, 1, 1}};
  if (gate_up) shapes.insert(shapes.end(), {{experts, 2}, {experts, 2, 1}});
  return shapes;
}

bool is_stacked_format(const LinearFormat& format, ExpertStorage storage) {
  const bool transposed = is_columnwise(storage);
  if (!transposed && storage != ExpertStorage::kStacked && storage != ExpertStorage::kFusedNT) {
    return false;
  }
  switch (format.stored) {
    case StoredFormat::kFp8Tensor:
    case StoredFormat::kFp8Channel:
      return true;
    case StoredFormat::kNvfp4:
      return format.names == NameStyle::kModelOpt;
    case StoredFormat::kFp8Block:
    case StoredFormat::kMxfp8:
    case StoredFormat::kInt8Channel:
      return !transposed;
    default:
      return false;
  }
}

std::vector<LinearTensor> stacked_tensors(const LinearFormat& f, ExpertStorage storage,
                                          std::string_view weight_suffix, std::int64_t experts,
                                          std::int64_t n, std::int64_t k, bool gate_up) {
  const std::vector<DType> floats = {DType::kF32, DType::kBF16, DType::kF16};
  const bool transposed = is_columnwise(storage);
  // `columns` of something per row, as it lies in the file.
  const auto matrix = [&](std::int64_t columns) {
    return transposed ? Shape{experts, columns, n} : Shape{experts, n, columns};
  };
  const Suffixes names = suffixes(f, weight_suffix);
  const std::vector<Shape> numbers = numbers_of_experts(experts, gate_up);
  const std::vector<Shape> rows = {matrix(1), {experts, n}};
  std::vector<LinearTensor> list;
  switch (f.stored) {
    case StoredFormat::kFp8Tensor:
    case StoredFormat::kFp8Channel:
    case StoredFormat::kMxfp8:
      list.push_back({K::kWeight, weight_suffix, {matrix(k)}, {DType::kF8E4M3}});
      if (f.stored == StoredFormat::kMxfp8) {
        list.push_back({K::kScale,
                        names.scale,
                        {matrix(k / quant::kMxGroupSize)},
                        {DType::kU8, DType::kF8E8M0}});
      } else {
        list.push_back({K::kScale, names.scale,
                        f.stored == StoredFormat::kFp8Tensor ? numbers : rows, floats});
      }
      break;
    case StoredFormat::kInt8Channel:
      list.push_back({K::kWeight, weight_suffix, {matrix(k)}, {DType::kI8}});
      list.push_back({K::kScale, names.scale, f.one_scale ? numbers : rows, floats});
      break;
    case StoredFormat::kNvfp4:
      list.push_back({K::kWeight, weight_suffix, {matrix(k / 2)}, {DType::kU8}});
      list.push_back(
          {K::kScale, names.scale, {matrix(k / quant::kNvfp4GroupSize)}, {DType::kF8E4M3}});
      list.push_back({K::kGlobalScale, names.global_scale, numbers, {DType::kF32}});
      break;
    default:
      return list;  // refused by is_stacked_format
  }
  const bool static_input =
      f.activation == ActivationQuant::kStatic ||
      (f.stored == StoredFormat::kNvfp4 && f.activation != ActivationQuant::kNone);
  if (static_input) {
    list.push_back({K::kInputScale, names.input_scale, numbers, floats});
  }
  return list;
}

}  // namespace moesaic::checkpoint
