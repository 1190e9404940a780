// The tensors of each stored format's linears.
#include "checkpoint/config/linear_tensors.h"

#include <utility>

#include "checkpoint/config/stored_formats.h"
#include "core/checked.h"
#include "core/fault.h"
#include "quant/int_packing.h"
#include "quant/mx.h"
#include "quant/nvfp4.h"

namespace moesaic::checkpoint {
namespace {

using K = TensorKind;

const std::vector<DType> kFloats = {DType::kF32, DType::kBF16, DType::kF16};
const std::vector<DType> kF32 = {DType::kF32};
const std::vector<DType> kFp8 = {DType::kF8E4M3};
const std::vector<DType> kBytes = {DType::kU8};
const std::vector<DType> kWords = {DType::kI32};
const std::vector<DType> kExponents = {DType::kU8, DType::kF8E8M0};
const std::vector<DType> kI8 = {DType::kI8};
const std::vector<Shape> kScalar = {Shape{}, Shape{1}};

// FP8 codes with this scale, and the activations' if it is stored.
std::vector<LinearTensor> fp8_with(LinearTensor scale, const LinearFormat& f, std::int64_t n,
                                   std::int64_t k) {
  std::vector<LinearTensor> list = {{K::kWeight, ".weight", {{n, k}}, kFp8}, std::move(scale)};
  if (f.activation == ActivationQuant::kStatic) {
    const bool inverse = f.names == NameStyle::kFp8Inverse;
    list.push_back(
        {K::kInputScale, inverse ? ".activation_scale" : ".input_scale", kScalar, kFloats});
  }
  return list;
}

}  // namespace

std::vector<LinearTensor> fp8_tensor_tensors(const LinearFormat& f, std::int64_t n,
                                             std::int64_t k) {
  const bool inverse = f.names == NameStyle::kFp8Inverse;
  return fp8_with({K::kScale,
                   inverse ? ".weight_scale_inv" : ".weight_scale",
                   {Shape{}, Shape{1}, Shape{1, 1}},
                   kFloats},
                  f, n, k);
}

std::vector<LinearTensor> fp8_channel_tensors(const LinearFormat& f, std::int64_t n,
                                              std::int64_t k) {
  return fp8_with({K::kScale, ".weight_scale", {{n, 1}, {n}}, kFloats}, f, n, k);
}

std::vector<LinearTensor> mxfp8_tensors(const LinearFormat& f, std::int64_t n, std::int64_t k) {
  const bool inverse =
      f.names == NameStyle::kFp8Inverse && !MOESAIC_FAULT(checkpoint_mxfp8_one_name);
  return fp8_with({K::kScale,
                   inverse ? ".weight_scale_inv" : ".weight_scale",
                   {{n, k / quant::kMxGroupSize}},
                   kExponents},
                  f, n, k);
}

std::vector<LinearTensor> int8_tensors(const LinearFormat& f, std::int64_t n, std::int64_t k) {
  const std::vector<Shape> rows = {{n, 1}, {n}};
  return {{K::kWeight, ".weight", {{n, k}}, kI8},
          {K::kScale, ".weight_scale", f.one_scale ? kScalar : rows, kFloats}};
}

std::vector<LinearTensor> bnb8_tensors(const LinearFormat&, std::int64_t n, std::int64_t k) {
  return {{K::kWeight, ".weight", {{n, k}}, kI8},
          {K::kScale, ".SCB", {{n}}, kF32},
          {K::kRowFormat, ".weight_format", kScalar, kBytes, true}};
}

std::vector<LinearTensor> packed_tensors(const LinearFormat& f, std::int64_t n, std::int64_t k) {
  const std::int64_t groups = f.group_size > 0 ? ceil_div(k, f.group_size) : 1;
  const bool static_input = f.activation == ActivationQuant::kStatic;
  if (f.byte_codes) {
    std::vector<LinearTensor> list = {{K::kWeight, ".weight", {{n, k}}, kI8},
                                      {K::kScale, ".weight_scale", {{n, groups}}, kFloats}};
    if (static_input) list.push_back({K::kInputScale, ".input_scale", kScalar, kFloats});
    return list;
  }
  std::vector<LinearTensor> list = {
      {K::kWeight, ".weight_packed", {{n, quant::words_for_codes(k, f.bits)}}, kWords},
      {K::kScale, ".weight_scale", {{n, groups}}, kFloats},
      {K::kPackedShape, ".weight_shape", {{2}}, {DType::kI64, DType::kI32}}};
  if (f.zero_points) {
    list.push_back(
        {K::kZero, ".weight_zero_point", {{quant::words_for_codes(n, f.bits), groups}}, kWords});
  }
  if (f.act_order) list.push_back({K::kGroupIndex, ".weight_g_idx", {{k}}, kWords});
  if (static_input) list.push_back({K::kInputScale, ".input_scale", kScalar, kFloats});
  return list;
}

std::vector<LinearTensor> gptq_tensors(const LinearFormat& f, std::int64_t n, std::int64_t k) {
  const std::int64_t groups = f.group_size > 0 ? ceil_div(k, f.group_size) : 1;
  return {{K::kWeight, ".qweight", {{quant::words_for_codes(k, f.bits), n}}, kWords},
          {K::kZero, ".qzeros", {{groups, quant::words_for_codes(n, f.bits)}}, kWords},
          {K::kScale, ".scales", {{groups, n}}, kFloats},
          {K::kGroupIndex, ".g_idx", {{k}}, kWords, !f.act_order},
          {K::kZeroBias, ".bias", {{n}}, kFloats, true}};
}

std::vector<LinearTensor> awq_tensors(const LinearFormat& f, std::int64_t n, std::int64_t k) {
  const std::int64_t groups = f.group_size > 0 ? ceil_div(k, f.group_size) : 1;
  return {{K::kWeight, ".qweight", {{k, n / 8}}, kWords},
          {K::kZero, ".qzeros", {{groups, n / 8}}, kWords},
          {K::kScale, ".scales", {{groups, n}}, kFloats}};
}

std::vector<LinearTensor> nvfp4_tensors(const LinearFormat& f, std::int64_t n, std::int64_t k) {
  const bool ct = f.names == NameStyle::kCompressed;
  std::vector<LinearTensor> list = {
      {K::kWeight, ct ? ".weight_packed" : ".weight", {{n, k / 2}}, kBytes},
      {K::kScale, ".weight_scale", {{n, k / quant::kNvfp4GroupSize}}, kFp8},
      {K::kGlobalScale, ct ? ".weight_global_scale" : ".weight_scale_2", kScalar, kF32}};
  if (f.activation != ActivationQuant::kNone) {
    list.push_back({K::kInputScale, ct ? ".input_global_scale" : ".input_scale", kScalar, kF32});
  }
  return list;
}

std::vector<LinearTensor> mxfp4_tensors(const LinearFormat& f, std::int64_t n, std::int64_t k) {
  const bool ct = f.names == NameStyle::kCompressed;
  std::vector<LinearTensor> list = {
      {K::kWeight, ct ? ".weight_packed" : ".weight", {{n, k / 2}}, kBytes},
      {K::kScale, ".weight_scale", {{n, k / quant::kMxGroupSize}}, kExponents}};
  if (f.activation == ActivationQuant::kStatic) {
    list.push_back({K::kInputScale, ".input_scale", kScalar, kFloats});
  }
  return list;
}

std::vector<LinearTensor> bnb4_tensors(const LinearFormat& f, std::int64_t n, std::int64_t k) {
  const std::int64_t blocks = n * k / f.group_size;
  std::vector<LinearTensor> list = {
      {K::kWeight, ".weight", {{n * k / 2, 1}}, kBytes},
      {K::kScale, ".weight.absmax", {{blocks}}, f.nested ? kBytes : kF32},
      {K::kCodeTable, ".weight.quant_map", {{16}}, kF32},
      {K::kQuantState,
       f.table == CodeTable::kNf4 ? ".weight.quant_state.bitsandbytes__nf4"
                                  : ".weight.quant_state.bitsandbytes__fp4",
       {},
       kBytes}};
  if (f.nested) {
    list.push_back({K::kNestedScale, ".weight.nested_absmax", {}, kF32});
    list.push_back({K::kNestedTable, ".weight.nested_quant_map", {{256}}, kF32});
  }
  return list;
}

}  // namespace moesaic::checkpoint
