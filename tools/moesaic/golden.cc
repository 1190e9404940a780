#include "golden.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <limits>
#include <optional>

#include "golden_router.h"
#include "layer_io.h"
#include "layer_origin.h"
#include "moesaic/convert.h"
#include "moesaic/numerics.h"
#include "options.h"
#include "quant/quantize_weight.h"

namespace moesaic::tool {
namespace {

constexpr std::string_view kInput = ".input";
constexpr std::string_view kOutput = ".output";

bool ends_with(std::string_view text, std::string_view end) {
  return text.size() >= end.size() && text.substr(text.size() - end.size()) == end;
}

// The layer number in "....layers.<i>.<block>" (or "blocks"), or -1.
int layer_after(std::string_view prefix, std::string_view layers) {
  constexpr std::size_t kMaxDigits = 6;
  for (std::size_t at = prefix.find(layers); at != std::string_view::npos;
       at = prefix.find(layers, at + 1)) {
    if (at != 0 && prefix[at - 1] != '.') continue;
    const std::size_t begin = at + layers.size();
    const std::size_t end = prefix.find('.', begin);
    if (end == std::string_view::npos || end == begin || end - begin > kMaxDigits) continue;
    const std::string_view digits = prefix.substr(begin, end - begin);
    if (digits.find_first_not_of("0123456789") != std::string_view::npos) continue;
    int layer = 0;
    for (const char digit : digits) layer = 10 * layer + (digit - '0');
    return layer;
  }
  return -1;
}

int layer_of(std::string_view prefix) {
  const int layer = layer_after(prefix, "layers.");
  if (layer >= 0) return layer;
  const int block = layer_after(prefix, "blocks.");                             // DBRX
  return block >= 0 ? block : layer_after(fmt::format("{}.", prefix), "blk.");  // GGUF: "blk.3"
}

// The bound for rows like these.
void bound_output(const FusedMoE& layer, std::span<const RowNumerics> numerics,
                  std::span<const double> want, DType recorded, std::size_t width,
                  std::span<const char> excluded, LayerReport& report) {
  // Sums of squares differ a little where parts are neither alike nor opposite.
  constexpr double kCancels = 1.1;
  double want2 = 0;
  for (std::size_t token = 0; token < excluded.size(); ++token) {
    if (excluded[token] != 0) continue;
    report.numerics.add(numerics[token]);
    for (std::size_t i = token * width; i < (token + 1) * width; ++i) want2 += want[i] * want[i];
  }
  report.documented_bound = layer.quant().output_bound;
  report.activation_bound = layer.activation_bound();
  const double parts = std::sqrt(report.numerics.size / want2);
  if (want2 > 0 && parts > kCancels) report.cancellation = parts;
  report.bound = report.cancellation *
                 computed_bound(report.documented_bound, report.activation_bound, report.numerics);
  // What was recorded is rounded too.
  if (recorded != DType::kF32 && recorded != DType::kF64) {
    report.bound = std::hypot(report.bound, rounding_of(recorded));
  }
}

// Zeros are as alike as can be; beside anything else nothing of them is.
double cosine_of(double dot, double got2, double want2) {
  if (got2 == 0 && want2 == 0) return 1.0;
  return got2 == 0 || want2 == 0 ? 0.0 : dot / std::sqrt(got2 * want2);
}

void compare_output(std::span<const double> got, std::span<const double> want, std::size_t width,
                    std::span<const char> excluded, LayerReport& report) {
  double error = 0, got2 = 0, want2 = 0, dot = 0;
  for (std::size_t token = 0; token < excluded.size(); ++token) {
    if (excluded[token] != 0) continue;
    for (std::size_t i = token * width; i < (token + 1) * width; ++i) {
      const double difference = got[i] - want[i];
      error += difference * difference;
      got2 += got[i] * got[i];
      want2 += want[i] * want[i];
      dot += got[i] * want[i];
      keep_worst(report.max_abs, std::abs(difference));
    }
  }
  report.rel_l2 = error == 0 ? 0.0 : std::sqrt(error / want2);  // of nothing, nothing is right
  report.cosine = cosine_of(dot, got2, want2);
}

// Of the layer's logits, as its options say; 0 when they stay fp32 sums.
double rounding_of_logits(const FusedMoE::Options& options, DType gate_weight) {
  double rounding = 0;
  if (options.router_logits_dtype != DType::kF32) {
    rounding += rounding_of(options.router_logits_dtype);
  }
  if (!options.gate_force_fp32_compute && gate_weight != DType::kF32) {
    rounding += rounding_of(gate_weight);
  }
  return rounding;
}

}  // namespace

void keep_worst(double& worst, double value) {
  if (!(value <= worst) && !std::isnan(worst)) worst = value;
}

bool Comparison::pass() const { return rel_l2 <= bound && std::isfinite(bound); }

void LayerReport::judge() {
  pass = Comparison{rel_l2, bound}.pass() && topk_mismatches == 0 && compares_output() &&
         (!router_logits || router_logits->pass()) && (!topk_weights || topk_weights->pass());
}

std::string golden_beside(const std::string& model) {
  std::error_code ignored;
  const std::filesystem::path path(model);
  const bool file = std::filesystem::is_regular_file(path, ignored);
  return ((file ? path.parent_path() : path) / "golden.safetensors").string();
}

Result<std::vector<GoldenBlock>> golden_blocks(const TensorFile& file) {
  std::vector<GoldenBlock> blocks;
  for (const std::string& name : file.names()) {
    if (!ends_with(name, kInput)) continue;
    GoldenBlock block;
    block.prefix = name.substr(0, name.size() - kInput.size());
    block.layer = layer_of(block.prefix);
    if (block.layer < 0 || !file.contains(block.prefix + std::string(kOutput))) continue;
    blocks.push_back(std::move(block));
  }
  if (blocks.empty()) {
    return Status(
        StatusCode::kNotFound,
        "golden file: got no pair of tensors *.layers.<i>.<block>.input and .output (of GGUF "
        "blk.<i>.input and .output), need at least one");
  }
  std::stable_sort(blocks.begin(), blocks.end(),
                   [](const GoldenBlock& a, const GoldenBlock& b) { return a.layer < b.layer; });
  return blocks;
}

namespace {

Result<LayerReport> compare_block(const Checkpoint& checkpoint, const TensorFile& golden,
                                  const GoldenBlock& block, const FusedMoE::Options& options,
                                  Origin& origin, bool with_shared_beside) {
  origin = Origin::kFile;
  MOESAIC_ASSIGN_OR_RETURN(const MoeLayerSpec spec, checkpoint.layer(block.layer));
  const std::string input_name = block.prefix + std::string(kInput);
  MOESAIC_ASSIGN_OR_RETURN(const Tensor input,
                           read_hidden_states(golden, input_name, spec.hidden_size));
  LayerReport report;
  report.layer = block.layer;
  report.tokens = input.shape()[0];
  if (report.tokens == 0) {
    return Status(StatusCode::kInvalidShape,
                  input_name + ": got 0 tokens, need at least 1: nothing would be verified");
  }
  const std::string output_name = block.prefix + std::string(kOutput);
  MOESAIC_ASSIGN_OR_RETURN(const Tensor want_tensor, golden.read(output_name));
  MOESAIC_RETURN_IF_ERROR(expect_shape(output_name, want_tensor.view(), input.shape()));
  const std::vector<double> want = to_doubles(want_tensor.view());
  if (want.empty()) {
    return Status(StatusCode::kInvalidDType,
                  fmt::format("{}: got {}, need a floating dtype such as F32", output_name,
                              dtype_name(want_tensor.dtype())));
  }
  MOESAIC_ASSIGN_OR_RETURN(const GoldenRouter router,
                           read_golden_router(golden, block.prefix, report.tokens, spec));
  origin = Origin::kOption;
  MOESAIC_RETURN_IF_ERROR(check_routes_by_hidden_states(spec));
  origin = Origin::kFile;

  MOESAIC_ASSIGN_OR_RETURN(MoeLayerWeights loaded,
                           checkpoint.load_layer(block.layer, options.parallel, options.progress));
  if (spec.shared.beside_block && !with_shared_beside) {  // the output of the block alone
    loaded.spec.shared = {};
    loaded.shared = nullptr;
  }
  MOESAIC_ASSIGN_OR_RETURN(GateOracle gate, GateOracle::create(spec, loaded.tensors));
  const double logits_rounding = rounding_of_logits(options, loaded.tensors.gate_weight.dtype());
  std::optional<RoutingOracle> oracle;
  if (Result<RoutingOracle> made = RoutingOracle::create(spec, loaded.tensors); made.ok()) {
    oracle = std::move(made).value();
  } else if (made.status().code() != StatusCode::kUnsupported) {
    return made.status();
  }
  const Result<FusedMoE> made = FusedMoE::create(std::move(loaded), options);
  if (!made.ok()) {
    origin = layer_origin(made.status(), checkpoint, block.layer);
    return made.status();
  }
  const FusedMoE& layer = *made;
  origin = Origin::kOption;
  MOESAIC_ASSIGN_OR_RETURN(LayerOutput got, make_layer_output(spec, report.tokens, DType::kF32));
  std::vector<RowNumerics> numerics(static_cast<std::size_t>(report.tokens));
  Tensor logits;
  if (router.logits) {
    const std::int64_t columns = spec.num_experts + spec.routing.num_zero_experts;
    MOESAIC_ASSIGN_OR_RETURN(logits, Tensor::zeros(DType::kF32, {report.tokens, columns}));
  }
  MOESAIC_RETURN_IF_ERROR(forward(layer, input, got, numerics, logits.view()));

  const std::vector<double> hidden = to_doubles(input.view());
  const std::vector<char> excluded =
      compare_router(router, {spec, got, logits, hidden, logits_rounding}, gate, oracle, report);
  compare_output(to_doubles(got.output.view()), want, static_cast<std::size_t>(spec.hidden_size),
                 excluded, report);
  bound_output(layer, numerics, want, want_tensor.dtype(),
               static_cast<std::size_t>(spec.hidden_size), excluded, report);
  report.quant = std::string(layer.quant().name);
  report.device = layer.device().to_string();
  report.backend = layer.experts_backend();
  report.backend_note = slow_backend_note(layer);
  report.judge();
  return report;
}

}  // namespace

// A golden file that was recorded from the model before its experts were converted knows nothing of
// their rounding: the bound of a converted checkpoint's layer is widened by what its record says.
static Status allow_conversion(const std::string& model, LayerReport& report) {
  const Result<std::optional<double>> error = converted_weight_error(model, report.layer);
  if (!error.ok()) {
    return {error.status().code(),
            error.status().message() + "; remove the record if the weights are original"};
  }
  if (!*error) return {};
  const double own = report.bound / report.cancellation;
  const double wider = std::hypot(own, quant::kWeightErrorGain * **error);
  report.bound = wider <= std::max(own, kLargestUsefulBound)
                     ? report.cancellation * wider
                     : std::numeric_limits<double>::infinity();
  report.judge();
  return {};
}

// Where the shared expert lies beside the block, recorded outputs may have it or not: hooks on the
// block see it alone, implementations that fuse both see the sum.
Result<LayerReport> verify_block(const Checkpoint& checkpoint, const std::string& model,
                                 const TensorFile& golden, const GoldenBlock& block,
                                 const FusedMoE::Options& options, Origin& origin) {
  const auto compare = [&](bool with_shared_beside) -> Result<LayerReport> {
    MOESAIC_ASSIGN_OR_RETURN(LayerReport report, compare_block(checkpoint, golden, block, options,
                                                               origin, with_shared_beside));
    origin = Origin::kFile;
    MOESAIC_RETURN_IF_ERROR(allow_conversion(model, report));
    return report;
  };
  origin = Origin::kFile;
  MOESAIC_ASSIGN_OR_RETURN(const MoeLayerSpec spec, checkpoint.layer(block.layer));
  MOESAIC_ASSIGN_OR_RETURN(LayerReport alone, compare(false));
  if (alone.pass || !spec.shared.beside_block) return alone;
  MOESAIC_ASSIGN_OR_RETURN(LayerReport sum, compare(true));
  return sum.pass ? std::move(sum) : std::move(alone);
}

}  // namespace moesaic::tool
