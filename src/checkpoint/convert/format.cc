#include "checkpoint/convert/format.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <nlohmann/json.hpp>

#include "core/checked.h"
#include "core/enum_rows.h"
#include "core/fault.h"
#include "core/nearest_name.h"
#include "cpu/tiers.h"
#include "moesaic/convert.h"
#include "quant/fp8_block.h"
#include "quant/fp8_scaled.h"
#include "quant/int_group.h"
#include "quant/int_packing.h"
#include "quant/mx.h"
#include "quant/nvfp4.h"

namespace moesaic {
namespace {

// The scheme that each format stores, by the name it has everywhere (quant_schemes()).
struct FormatRow {
  checkpoint::ConvertFormat format;
  std::string_view scheme;
};
constexpr std::array<FormatRow, 8> kFormatRows = {{
    {checkpoint::ConvertFormat::kFp8Block, "fp8-block"},
    {checkpoint::ConvertFormat::kFp8Channel, "fp8-channel"},
    {checkpoint::ConvertFormat::kMxfp8, "mxfp8"},
    {checkpoint::ConvertFormat::kMxfp4, "mxfp4"},
    {checkpoint::ConvertFormat::kNvfp4, "nvfp4"},
    {checkpoint::ConvertFormat::kInt4, "int4-g128"},
    {checkpoint::ConvertFormat::kFp8BlockPowers, "fp8-block"},
    {checkpoint::ConvertFormat::kFp8BlockCompressed, "fp8-block"},
}};
static_assert(rows_follow_enum(kFormatRows, &FormatRow::format,
                               checkpoint::ConvertFormat::kFp8BlockCompressed));
// The names that a caller may give: the rows before kFp8BlockPowers.
constexpr auto kNames = [] {
  std::array<std::string_view, static_cast<std::size_t>(checkpoint::ConvertFormat::kFp8BlockPowers)>
      names;
  for (std::size_t i = 0; i < names.size(); ++i) names[i] = kFormatRows[i].scheme;
  return names;
}();
// Rows per piece of work. FP8 tiles are whole inside one; every other format works row by row.
constexpr std::int64_t kRowsPerPiece = quant::kFp8BlockSize;

// Rows [first, first + count) of `rows` share rows of `t` in proportion (tensors of scales per
// block have fewer).
TensorView rows_of(Tensor& t, std::int64_t rows, std::int64_t first, std::int64_t count) {
  const std::int64_t per_row_bytes = t.shape()[0] > 0 ? t.bytes() / t.shape()[0] : 0;
  const bool per_block = t.shape()[0] != rows;
  const std::int64_t begin = per_block ? first / quant::kFp8BlockSize : first;
  const std::int64_t size = per_block ? ceil_div(count, quant::kFp8BlockSize) : count;
  return {t.data() + begin * per_row_bytes, t.dtype(), {size, t.shape()[1]}};
}
template <class View>
View matrix_rows(const View& m, std::int64_t first, std::int64_t count) {
  return {m.data + first * m.dim(1) * 4, DType::kF32, {count, m.dim(1)}};
}

// The same bytes as another type: codes of one byte each, or packed ones.
TensorView as_type(const TensorView& t, DType dtype, const Shape& shape) {
  return {t.data, dtype, shape};
}

// int4 codes pass through one byte each on their way into words.
Status encode_int4(const ConstTensorView& w, const TensorView& packed, const TensorView& scale,
                   const TensorView& decoded) {
  MOESAIC_ASSIGN_OR_RETURN(Tensor codes, Tensor::uninitialized(DType::kI8, w.shape));
  MOESAIC_RETURN_IF_ERROR(quant::quantize_int_group(
      w, {4, quant::kIntGroupSize, quant::IntScaleRule::kFullRange}, codes.view(), scale));
  MOESAIC_RETURN_IF_ERROR(quant::refit_int_scales(w, codes.view(), quant::kIntGroupSize, scale));
  MOESAIC_RETURN_IF_ERROR(
      quant::dequantize_int_group(codes.view(), scale, {}, quant::kIntGroupSize, decoded));
  auto* bytes = codes.as<std::uint8_t>();
  const int bias = MOESAIC_FAULT(convert_int4_without_bias) ? 0 : 8;
  for (std::int64_t i = 0; i < codes.bytes(); ++i) {
    bytes[i] = static_cast<std::uint8_t>((codes.as<std::int8_t>()[i] + bias) & 15);
  }
  return quant::pack_ct_weight(as_type(codes.view(), DType::kU8, w.shape), 4, packed);
}

// One piece of rows; `t` are its rows of the linear's tensors.
Status encode_rows(checkpoint::ConvertFormat format, const ConstTensorView& w, float gscale,
                   std::vector<TensorView> t, const TensorView& decoded) {
  switch (format) {
    case checkpoint::ConvertFormat::kFp8Block:
    case checkpoint::ConvertFormat::kFp8BlockCompressed:
      MOESAIC_RETURN_IF_ERROR(
          quant::quantize_fp8_block(w, {}, quant::ScaleRounding::kNone, t[0], t[1]));
      return quant::dequantize_fp8_block(t[0], t[1], {}, decoded);
    case checkpoint::ConvertFormat::kFp8BlockPowers:
      MOESAIC_RETURN_IF_ERROR(
          quant::quantize_fp8_block(w, {}, quant::ScaleRounding::kCeilPowerOfTwo, t[0], t[1]));
      return quant::dequantize_fp8_block(t[0], t[1], {}, decoded);
    case checkpoint::ConvertFormat::kFp8Channel: {
      const TensorView scale = as_type(t[1], DType::kF32, {w.dim(0)});  // [N, 1] in the file
      MOESAIC_RETURN_IF_ERROR(quant::quantize_fp8_rows(w, t[0], scale));
      return quant::dequantize_scaled(t[0], scale, decoded);
    }
    case checkpoint::ConvertFormat::kMxfp8:
      MOESAIC_RETURN_IF_ERROR(quant::quantize_mx(w, ExponentRule::kCeil, t[0], t[1]));
      return quant::dequantize_mx(t[0], t[1], decoded);
    case checkpoint::ConvertFormat::kMxfp4: {
      const TensorView codes = as_type(t[0], DType::kF4E2M1, w.shape);
      MOESAIC_RETURN_IF_ERROR(quant::quantize_mx(w, ExponentRule::kRound175, codes, t[1]));
      return quant::dequantize_mx(codes, t[1], decoded);
    }
    case checkpoint::ConvertFormat::kNvfp4: {
      const TensorView codes = as_type(t[0], DType::kF4E2M1, w.shape);
      MOESAIC_RETURN_IF_ERROR(quant::quantize_nvfp4(w, gscale, codes, t[1]));
      return quant::dequantize_nvfp4(codes, t[1], 1.0F / gscale, decoded);
    }
    case checkpoint::ConvertFormat::kInt4:
      return encode_int4(w, t[0], t[1], decoded);
  }
  return {StatusCode::kInternal, "convert: unknown format"};
}

using Json = nlohmann::ordered_json;

// Quantisation arguments of one operand as compressed-tensors writes them.
Json operand(int bits, const char* type, const char* strategy, std::int64_t group, bool dynamic) {
  return {{"num_bits", bits},
          {"type", type},
          {"symmetric", true},
          {"strategy", strategy},
          {"group_size", group > 0 ? Json(group) : Json()},
          {"block_structure", nullptr},
          {"dynamic", dynamic},
          {"actorder", nullptr},
          {"observer", dynamic ? Json() : Json("minmax")},
          {"observer_kwargs", Json::object()}};
}

struct CompressedFormat {
  const char* name;
  Json weights, activations;
};
CompressedFormat compressed_format(checkpoint::ConvertFormat format) {
  switch (format) {
    case checkpoint::ConvertFormat::kFp8Channel:
      return {"float-quantized", operand(8, "float", "channel", 0, false),
              operand(8, "float", "token", 0, true)};
    case checkpoint::ConvertFormat::kMxfp8:
      return {"mxfp8-quantized", operand(8, "float", "group", quant::kMxGroupSize, false),
              operand(8, "float", "group", quant::kMxGroupSize, true)};
    case checkpoint::ConvertFormat::kMxfp4:
      return {"mxfp4-pack-quantized", operand(4, "float", "group", quant::kMxGroupSize, false),
              operand(4, "float", "group", quant::kMxGroupSize, true)};
    case checkpoint::ConvertFormat::kNvfp4:
      return {"nvfp4-pack-quantized",
              operand(4, "float", "tensor_group", quant::kNvfp4GroupSize, false), nullptr};
    case checkpoint::ConvertFormat::kFp8BlockCompressed: {
      CompressedFormat f = {"float-quantized", operand(8, "float", "block", 0, false),
                            operand(8, "float", "group", quant::kFp8BlockSize, true)};
      f.weights["block_structure"] = Json::array({quant::kFp8BlockSize, quant::kFp8BlockSize});
      return f;
    }
    case checkpoint::ConvertFormat::kInt4:
    case checkpoint::ConvertFormat::kFp8Block:
    case checkpoint::ConvertFormat::kFp8BlockPowers:
      break;
  }
  return {"pack-quantized", operand(4, "int", "group", quant::kIntGroupSize, false), nullptr};
}

}  // namespace

std::span<const std::string_view> convert_schemes() { return kNames; }

}  // namespace moesaic

namespace moesaic::checkpoint {

std::string_view convert_format_name(ConvertFormat format) {
  return kFormatRows[static_cast<std::size_t>(format)].scheme;
}

Result<ConvertFormat> convert_format_from_name(std::string_view name) {
  for (std::size_t i = 0; i < kNames.size(); ++i) {
    if (kNames[i] == name) return static_cast<ConvertFormat>(i);
  }
  return Status(
      StatusCode::kNotFound,
      fmt::format("convert: got \"{}\", need one of {}; nearest is \"{}\"", name.substr(0, 64),
                  fmt::join(kNames, ", "), nearest_name(name, kNames)));
}

std::vector<ConvertedTensor> linear_tensors(ConvertFormat format, std::int64_t n, std::int64_t k) {
  switch (format) {
    case ConvertFormat::kFp8Block:
    case ConvertFormat::kFp8BlockPowers:
    case ConvertFormat::kFp8BlockCompressed:
      return {{".weight", DType::kF8E4M3, {n, k}},
              {format == ConvertFormat::kFp8BlockCompressed ? ".weight_scale" : ".weight_scale_inv",
               DType::kF32,
               {ceil_div(n, quant::kFp8BlockSize), ceil_div(k, quant::kFp8BlockSize)}}};
    case ConvertFormat::kFp8Channel:
      return {{".weight", DType::kF8E4M3, {n, k}}, {".weight_scale", DType::kF32, {n, 1}}};
    case ConvertFormat::kMxfp8:
      return {{".weight", DType::kF8E4M3, {n, k}},
              {".weight_scale", DType::kU8, {n, k / quant::kMxGroupSize}}};
    case ConvertFormat::kMxfp4:
      return {{".weight_packed", DType::kU8, {n, k / 2}},
              {".weight_scale", DType::kU8, {n, k / quant::kMxGroupSize}}};
    case ConvertFormat::kNvfp4:
      return {{".weight_packed", DType::kU8, {n, k / 2}},
              {".weight_scale", DType::kF8E4M3, {n, k / quant::kNvfp4GroupSize}},
              {".weight_global_scale", DType::kF32, {1}}};
    case ConvertFormat::kInt4:
      return {{".weight_packed", DType::kI32, {n, quant::words_for_codes(k, 4)}},
              {".weight_scale", DType::kBF16, {n, k / quant::kIntGroupSize}},
              {".weight_shape", DType::kI64, {2}}};
  }
  return {};
}

Status check_linear(ConvertFormat format, std::string_view what, std::int64_t n, std::int64_t k) {
  std::int64_t step = 1;
  if (format == ConvertFormat::kMxfp8 || format == ConvertFormat::kMxfp4)
    step = quant::kMxGroupSize;
  if (format == ConvertFormat::kNvfp4) step = quant::kNvfp4GroupSize;
  if (format == ConvertFormat::kInt4) step = quant::kIntGroupSize;
  if (k % step != 0) {
    return {StatusCode::kUnsupported,
            fmt::format("{}: got [{}, {}], need a multiple of {} columns for {}", what, n, k, step,
                        convert_format_name(format))};
  }
  return {};
}

Status encode_linear(ConvertFormat format, ConstTensorView w, float gscale, int num_threads,
                     std::vector<Tensor>* tensors, TensorView decoded) {
  const std::int64_t n = w.dim(0);
  const std::int64_t k = w.dim(1);
  tensors->clear();
  for (const ConvertedTensor& t : linear_tensors(format, n, k)) {
    MOESAIC_ASSIGN_OR_RETURN(Tensor tensor, Tensor::zeros(t.dtype, t.shape));
    tensors->push_back(std::move(tensor));
  }
  const std::int64_t pieces = ceil_div(n, kRowsPerPiece);
  // The failure with the lowest row is reported, so that messages repeat.
  std::int64_t failed = pieces;
  Status failure;
  const int team = cpu::resolve_threads(num_threads);
#pragma omp parallel for num_threads(team) schedule(dynamic)
  for (std::int64_t p = 0; p < pieces; ++p) {
    const std::int64_t first = p * kRowsPerPiece;
    const std::int64_t count = std::min(kRowsPerPiece, n - first);
    Status status;
    try {
      const std::vector<TensorView> views = {rows_of((*tensors)[0], n, first, count),
                                             rows_of((*tensors)[1], n, first, count)};
      status = encode_rows(format, matrix_rows(w, first, count), gscale, views,
                           matrix_rows(decoded, first, count));
    } catch (const std::bad_alloc&) {
      status = {StatusCode::kOutOfMemory, "convert: the allocator refused"};
    }
    if (status.ok()) continue;
#pragma omp critical(moesaic_convert_failure)
    if (p < failed) {
      failed = p;
      failure = status.with_context(fmt::format("rows from {} on", first));
    }
  }
  MOESAIC_RETURN_IF_ERROR(failure);
  if (format == ConvertFormat::kNvfp4) (*tensors)[2].as<float>()[0] = gscale;
  if (format == ConvertFormat::kInt4) {
    (*tensors)[2].as<std::int64_t>()[0] = n;
    (*tensors)[2].as<std::int64_t>()[1] = k;
  }
  return {};
}

bool is_compressed_tensors(ConvertFormat format, bool own_mxfp4) {
  return !own_mxfp4 && (!is_fp8_block(format) || format == ConvertFormat::kFp8BlockCompressed);
}

Json quantization_config(ConvertFormat format, const std::vector<std::string>& ignored,
                         bool own_mxfp4) {
  if (own_mxfp4) return {{"quant_method", "mxfp4"}, {"modules_to_not_convert", ignored}};
  if (!is_compressed_tensors(format, own_mxfp4)) {
    return {{"quant_method", "fp8"},
            {"fmt", "e4m3"},
            {"activation_scheme", "dynamic"},
            {"weight_block_size", Json::array({quant::kFp8BlockSize, quant::kFp8BlockSize})},
            {"modules_to_not_convert", ignored}};
  }
  const CompressedFormat f = compressed_format(format);
  const Json group = {{"targets", Json::array({"Linear"})},
                      {"weights", f.weights},
                      {"input_activations", f.activations},
                      {"output_activations", nullptr},
                      {"format", f.name}};
  return {{"quant_method", "compressed-tensors"},
          {"format", f.name},
          {"quantization_status", "compressed"},
          {"config_groups", {{"group_0", group}}},
          {"ignore", ignored},
          {"kv_cache_scheme", nullptr}};
}

}  // namespace moesaic::checkpoint
