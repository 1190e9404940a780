#include "layer_io.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <filesystem>

#include "core/refusal.h"
#include "gpu_bench.h"
#include "numerics/element.h"

namespace moesaic::tool {

std::pair<std::string, std::string> split_tensor_path(const std::string& text) {
  std::error_code ignored;
  std::size_t colon = text.rfind(':');
  if (colon == std::string::npos || std::filesystem::exists(text, ignored)) return {text, ""};
  // Names of tensors may have colons too, and so may files.
  for (std::size_t at = text.find(':'); at != std::string::npos; at = text.find(':', at + 1)) {
    if (!std::filesystem::is_regular_file(text.substr(0, at), ignored)) continue;
    colon = at;
    break;
  }
  return {text.substr(0, colon), text.substr(colon + 1)};
}

std::string name_of_path(const std::string& path) {
  const std::size_t end = path.find_last_not_of('/');
  return std::filesystem::path(path.substr(0, end + 1)).filename().string();
}

Result<Tensor> read_hidden_states(const TensorFile& file, const std::string& name,
                                  std::int64_t hidden_size) {
  MOESAIC_ASSIGN_OR_RETURN(Tensor tensor, file.read(name));
  const Shape& shape = tensor.shape();
  if (shape.rank() != 2 || shape[1] != hidden_size) {
    return Status(StatusCode::kInvalidShape, fmt::format("{}: got {}, need [tokens, {}]", name,
                                                         shape.to_string(), hidden_size));
  }
  MOESAIC_RETURN_IF_ERROR(expect_float_dtype(name, tensor.dtype()));
  return tensor;
}

Status check_routes_by_hidden_states(const MoeLayerSpec& spec) {
  if (spec.routing.method != RoutingMethod::kHash) return {};
  return {StatusCode::kUnsupported,
          "routing.method: got hash, which chooses experts by token id; the tool's files have no "
          "tokens, need FusedMoE::Args::input_ids"};
}

Result<LayerOutput> make_layer_output(const MoeLayerSpec& spec, std::int64_t tokens,
                                      DType output_dtype) {
  LayerOutput result;
  const std::int64_t top_k = spec.routing.top_k;
  MOESAIC_ASSIGN_OR_RETURN(result.output,
                           Tensor::uninitialized(output_dtype, {tokens, spec.hidden_size}));
  MOESAIC_ASSIGN_OR_RETURN(result.topk_ids, Tensor::uninitialized(DType::kI32, {tokens, top_k}));
  MOESAIC_ASSIGN_OR_RETURN(result.topk_weights,
                           Tensor::uninitialized(DType::kF32, {tokens, top_k}));
  return result;
}

Status write_layer_output(const ResultFile& file, const LayerOutput& result) {
  const std::vector<NamedTensor> tensors = {{"output", result.output.view()},
                                            {"topk_ids", result.topk_ids.view()},
                                            {"topk_weights", result.topk_weights.view()}};
  return write_result(file, tensors);
}

Status forward(const FusedMoE& layer, const Tensor& hidden_states, LayerOutput& result,
               std::span<RowNumerics> numerics, TensorView logits) {
  FusedMoE::Trace trace;
  trace.router_logits = logits;
  trace.topk_ids = result.topk_ids.view();
  trace.topk_weights = result.topk_weights.view();
  trace.numerics = numerics;
  return layer.forward(hidden_states.view(), result.output.view(), trace);
}

namespace {

Timing summary(std::vector<double> samples) {
  std::sort(samples.begin(), samples.end());
  const std::size_t n = samples.size();
  Timing timing;
  timing.median_us = n % 2 == 1 ? samples[n / 2] : 0.5 * (samples[n / 2 - 1] + samples[n / 2]);
  timing.min_us = samples.front();
  timing.samples = static_cast<int>(n);
  return timing;
}

// The first rows that fit one call, as bf16.
Result<Timing> time_on_gpu(const FusedMoE& layer, const Tensor& hidden_states, int repeat) {
  const std::int64_t tokens = std::min(hidden_states.shape()[0], kMaxTokensPerCall);
  const Shape shape{tokens, hidden_states.shape()[1]};
  MOESAIC_ASSIGN_OR_RETURN(Tensor x, Tensor::uninitialized(DType::kBF16, shape));
  MOESAIC_ASSIGN_OR_RETURN(Tensor y, Tensor::uninitialized(DType::kBF16, shape));
  for (std::int64_t i = 0; i < tokens * shape[1]; ++i) {
    store_from_f32(x.data(), DType::kBF16, i,
                   load_as_f32(hidden_states.data(), hidden_states.dtype(), i));
  }
  MOESAIC_ASSIGN_OR_RETURN(const std::unique_ptr<GpuStage> stage, make_gpu_layer(layer));
  MOESAIC_ASSIGN_OR_RETURN(const TimeFn time, stage->timer({{x.view()}}, {{y.view()}}));
  MOESAIC_ASSIGN_OR_RETURN(std::vector<double> samples, time(repeat > 0 ? 0.0 : 1.0));
  if (repeat > 0 && samples.size() > static_cast<std::size_t>(repeat)) {
    samples.resize(static_cast<std::size_t>(repeat));
  }
  return summary(std::move(samples));
}

}  // namespace

Result<Timing> time_forward(const FusedMoE& layer, const Tensor& hidden_states, LayerOutput& result,
                            int repeat) {
  if (layer.device().is_cuda() && hidden_states.shape()[0] > 0) {
    MOESAIC_RETURN_IF_ERROR(forward(layer, hidden_states, result));
    return time_on_gpu(layer, hidden_states, repeat);
  }
  using Clock = std::chrono::steady_clock;
  constexpr int kMinSamples = 3;
  constexpr int kMaxSamples = 1000;
  constexpr double kEnoughUs = 1e6;
  std::vector<double> samples;
  double spent_us = 0;
  const auto more = [&] {
    const int taken = static_cast<int>(samples.size());
    if (repeat > 0) return taken < repeat;
    return taken < kMinSamples || (spent_us < kEnoughUs && taken < kMaxSamples);
  };
  while (more()) {
    const auto begin = Clock::now();
    MOESAIC_RETURN_IF_ERROR(forward(layer, hidden_states, result));
    samples.push_back(std::chrono::duration<double, std::micro>(Clock::now() - begin).count());
    spent_us += samples.back();
  }
  return summary(std::move(samples));
}

std::vector<std::int64_t> expert_load(const LayerOutput& result, const MoeLayerSpec& spec) {
  std::vector<std::int64_t> load(static_cast<std::size_t>(spec.num_experts), 0);
  const auto slots = result.topk_ids.bytes() / static_cast<std::int64_t>(sizeof(std::int32_t));
  const auto* ids = result.topk_ids.as<std::int32_t>();
  const auto* weights = result.topk_weights.as<float>();
  const bool identity = spec.routing.num_zero_experts > 0;
  for (std::int64_t i = 0; i < slots; ++i) {
    if (ids[i] < 0 || ids[i] >= spec.num_experts) continue;
    if (identity && ids[i] == 0 && weights[i] == 0) continue;
    ++load[static_cast<std::size_t>(ids[i])];
  }
  return load;
}

double rounding_of(DType dtype) {
  return std::ldexp(1.0, dtype == DType::kF32 ? -24 : dtype == DType::kF16 ? -11 : -8);
}

std::vector<double> to_doubles(const ConstTensorView& tensor) {
  const Result<std::int64_t> count = tensor.shape.num_elements();
  if (!count.ok() || !is_loadable_float(tensor.dtype)) return {};
  std::vector<double> values(static_cast<std::size_t>(*count));
  for (std::int64_t i = 0; i < *count; ++i) {
    values[static_cast<std::size_t>(i)] =
        tensor.dtype == DType::kF64
            ? tensor.as<double>()[i]
            : static_cast<double>(load_as_f32(tensor.data, tensor.dtype, i));
  }
  return values;
}

}  // namespace moesaic::tool
