// The formats that checkpoints are converted to: which tensors one linear becomes, their values,
// and the quantization_config that describes them. Nothing here touches files.
#pragma once

#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "moesaic/status.h"
#include "moesaic/tensor.h"

namespace moesaic::checkpoint {

// The last two are fp8-block as well, for experts beside linears that stay FP8 blocks with scales
// that are powers of two (scale_fmt "ue8m0"), and beside linears of compressed-tensors, whose name
// for such scales is weight_scale.
enum class ConvertFormat : std::uint8_t {
  kFp8Block,
  kFp8Channel,
  kMxfp8,
  kMxfp4,
  kNvfp4,
  kInt4,
  kFp8BlockPowers,
  kFp8BlockCompressed,
};
constexpr bool is_fp8_block(ConvertFormat format) {
  return format == ConvertFormat::kFp8Block || format == ConvertFormat::kFp8BlockPowers ||
         format == ConvertFormat::kFp8BlockCompressed;
}

// kNotFound with the nearest name.
Result<ConvertFormat> convert_format_from_name(std::string_view name);
std::string_view convert_format_name(ConvertFormat format);

// One tensor of a linear [N, K]: "<module><suffix>".
struct ConvertedTensor {
  std::string_view suffix;  // ".weight", ".weight_scale" ...
  DType dtype;
  Shape shape;
};
std::vector<ConvertedTensor> linear_tensors(ConvertFormat format, std::int64_t n, std::int64_t k);

// kUnsupported naming the dimension when the format cannot cut [N, K] into its groups.
Status check_linear(ConvertFormat format, std::string_view what, std::int64_t n, std::int64_t k);

// Quantises one linear.
//   w        [N, K]  in, F32, contiguous
//   gscale   quantisation multiplier of nvfp4 (quant/nvfp4.h), not read otherwise
//   tensors  out, as linear_tensors(format, N, K) says, replaced
//   decoded  [N, K]  out, F32: the values that the new tensors stand for
// kInvalidArgument for NaN and infinite weights. Rows are spread over threads (0: all cores); the
// result does not depend on their number.
Status encode_linear(ConvertFormat format, ConstTensorView w, float gscale, int num_threads,
                     std::vector<Tensor>* tensors, TensorView decoded);

// The configuration's entry; `ignored` are the full names of the linears that stay as they are.
// own_mxfp4: MXFP4 in gpt-oss's own layout instead of compressed-tensors.
nlohmann::ordered_json quantization_config(ConvertFormat format,
                                           const std::vector<std::string>& ignored, bool own_mxfp4);

// Whether quantization_config() of this format is one of compressed-tensors.
bool is_compressed_tensors(ConvertFormat format, bool own_mxfp4);

}  // namespace moesaic::checkpoint
