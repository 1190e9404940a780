// Hidden states in, results out: what run, verify and demo share around one forward call.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "moesaic/checkpoint.h"
#include "moesaic/fused_moe.h"
#include "moesaic/status.h"
#include "moesaic/tensor.h"
#include "result_file.h"

namespace moesaic::tool {

// Tokens per forward call that the tool's layers allow in their workspace; longer inputs are split
// by the layer.
inline constexpr std::int64_t kMaxTokensPerCall = 4096;

// FILE[:TENSOR]; a file whose name has a colon wins over the split. The tensor's name is empty when
// it is not given.
std::pair<std::string, std::string> split_tensor_path(const std::string& text);

// What a table calls a model: the last part of its path.
std::string name_of_path(const std::string& path);

// Reads hidden states [M, H]: rank 2, F32, BF16 or F16, H as given. Errors name the tensor.
Result<Tensor> read_hidden_states(const TensorFile& file, const std::string& name,
                                  std::int64_t hidden_size);

// kUnsupported for a layer that routes by token id: no file of the tool's has tokens.
Status check_routes_by_hidden_states(const MoeLayerSpec& spec);

struct LayerOutput {
  Tensor output;        // [M, H]
  Tensor topk_ids;      // [M, k] I32
  Tensor topk_weights;  // [M, k] F32
};
Result<LayerOutput> make_layer_output(const MoeLayerSpec& spec, std::int64_t tokens,
                                      DType output_dtype);
// Writes output, topk_ids and topk_weights.
Status write_layer_output(const ResultFile& file, const LayerOutput& result);
//   numerics  empty, or one per row: FusedMoE::Trace::numerics
//   logits    absent, or [M, E + identity experts] F32: FusedMoE::Trace::router_logits
Status forward(const FusedMoE& layer, const Tensor& hidden_states, LayerOutput& result,
               std::span<RowNumerics> numerics = {}, TensorView logits = {});

struct Timing {
  double median_us = 0;
  double min_us = 0;
  int samples = 0;
};
// Repeats forward: `repeat` times, or when it is 0 at least 3 times and until a second has passed.
// `result` holds the output of the last call, which is that of every call. On a GPU one call fills
// `result`, and the time is that of the same work on device tensors, replayed as a CUDA graph.
Result<Timing> time_forward(const FusedMoE& layer, const Tensor& hidden_states, LayerOutput& result,
                            int repeat);

// How often each logical expert was chosen: neither slots without an expert nor identity experts,
// which a router with such reports as expert 0 with weight 0, are a load.
std::vector<std::int64_t> expert_load(const LayerOutput& result, const MoeLayerSpec& spec);

// The largest relative error of rounding to a floating dtype of 16 or 32 bits.
double rounding_of(DType dtype);

// F64, F32, BF16, F16 as they are, every other floating dtype through fp32; empty for integers.
std::vector<double> to_doubles(const ConstTensorView& tensor);

}  // namespace moesaic::tool
