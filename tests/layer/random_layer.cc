#include "layer/random_layer.h"

#include <fmt/format.h>

#include <algorithm>
#include <string_view>
#include <vector>

#include "support/experts_run.h"
#include "support/random_cases.h"

namespace moesaic::test {
namespace {

using Sizes = std::vector<std::int64_t>;

// Of arithmetic that differs most there are several chances.
constexpr std::string_view kSchemes[] = {"f32",
                                         "bf16",
                                         "bf16",
                                         "f16",
                                         "fp8-block",
                                         "fp8-block",
                                         "fp8-bf16",
                                         "fp8-tensor",  //
                                         "fp8-channel",
                                         "fp8-channel",
                                         "fp8-static",
                                         "int8",
                                         "int8",
                                         "int8-bf16",  //
                                         "int4-g128",
                                         "int4-g32",
                                         "int4-channel",
                                         "gptq",
                                         "awq",
                                         "u8-zero",  //
                                         "int4-fp8",
                                         "int4-fp8",
                                         "int4-fp8-g32",
                                         "int4-fp8-static",  //
                                         "mxfp4-bf16",
                                         "mxfp4-bf16",
                                         "mxfp4",
                                         "mxfp4-static",
                                         "mxfp4-token",
                                         "mxfp4-fp8",  //
                                         "mxfp8",
                                         "mxfp8-bf16",
                                         "nvfp4",
                                         "nvfp4",
                                         "nvfp4-rows",
                                         "nvfp4-bf16",  //
                                         "nf4-bf16",
                                         "fp4-bf16",
                                         "iq4",
                                         "q2k",
                                         "q3k",
                                         "q4k",
                                         "q5k",
                                         "q6k",
                                         "q4k-m",  //
                                         "q4k-q6k",
                                         "q5k-q6k",
                                         "q40-q80",
                                         "fp8-block-64x64",
                                         "fp8-bf16-64x32",  //
                                         "int4-g128-int8",
                                         "int4-g32-int8",
                                         "int8-g128-int8",
                                         "mxfp4-int8",
                                         "gptq-int8",  //
                                         "awq-int8",
                                         "q4k-int8",
                                         "q6k-int8"};

void draw_sizes(Rng& rng, MoeLayerSpec& spec) {
  spec.hidden_size = chance(rng, 0.6)
                         ? pick<std::int64_t>(rng, {128, 256, 384, 512, 640, 768, 1024})
                         : pick<std::int64_t>(rng, {8, 24, 32, 48, 64, 72, 96, 136, 160, 192, 200,
                                                    288, 320, 416, 544});
  spec.intermediate_size =
      chance(rng, 0.6)
          ? pick<std::int64_t>(rng, {128, 256, 384, 512, 768})
          : pick<std::int64_t>(rng, {8, 16, 32, 40, 48, 64, 96, 104, 160, 192, 224, 288, 352});
  spec.num_experts = pick<std::int64_t>(rng, {1, 2, 3, 4, 5, 8, 12, 16, 17, 32, 40, 64, 96, 160});
  constexpr std::int64_t kMostWeights = 8'000'000;  // of a layer: seconds matter
  const std::int64_t each = 3 * spec.hidden_size * spec.intermediate_size;
  spec.num_experts = std::max<std::int64_t>(2, std::min(spec.num_experts, kMostWeights / each));
  spec.routing.num_experts = spec.num_experts;
  spec.routing.top_k =
      std::min(spec.num_experts, pick<std::int64_t>(rng, {1, 1, 2, 2, 3, 4, 6, 8, 8, 10, 16}));
}

void draw_routing(Rng& rng, MoeLayerSpec& spec) {
  RoutingSpec& routing = spec.routing;
  routing.renormalize = chance(rng, 0.5);
  routing.scoring_func = static_cast<ScoringFunc>(rng.integer(0, 2));
  if (chance(rng, 0.4)) {
    routing.routed_scaling_factor = chance(rng, 0.5) ? 2.5 : 0.7;
    routing.scale_on_output = chance(rng, 0.4);
  }
  using enum RoutingMethod;
  routing.method =
      pick<RoutingMethod>(rng, {kTopK, kTopK, kTopK, kGroupedTopK, kGroupedTopK, kTopKSoftmax,
                                kLlama4, kSparseMixer, kPNorm, kZeroExpert, kHash});
  if (routing.method != kTopK && routing.method != kGroupedTopK) {
    if (routing.method != kHash) routing.scoring_func = ScoringFunc::kSoftmax;
    routing.renormalize = routing.method == kTopKSoftmax && routing.renormalize;
  }
  switch (routing.method) {
    case kTopK:
      routing.has_correction_bias = chance(rng, 0.3);
      routing.has_expert_scale = chance(rng, 0.15);
      break;
    case kGroupedTopK: {
      routing.has_correction_bias = chance(rng, 0.6);
      routing.group_by_best_two = chance(rng, 0.3);
      Sizes groups;
      for (const std::int64_t n : {1, 2, 4, 8, 16}) {
        if (spec.num_experts % n == 0 && n < spec.num_experts) groups.push_back(n);
      }
      routing.num_expert_group = pick(rng, groups);
      routing.topk_group = rng.integer(1, routing.num_expert_group);
      break;
    }
    case kLlama4:
      routing.scoring_func = ScoringFunc::kSigmoid;
      spec.apply_router_weight_on_input = true;
      routing.scale_on_output = true;  // its router has no place for a factor
      if (chance(rng, 0.7)) routing.top_k = 1;
      break;
    case kSparseMixer:
      routing.top_k = 2;
      break;
    case kPNorm:
      routing.p_norm = chance(rng, 0.5) ? 1.0 : 2.0;
      break;
    case kZeroExpert:
      routing.num_zero_experts = rng.integer(1, 9);
      routing.has_correction_bias = true;
      break;
    case kHash:
      routing.renormalize = chance(rng, 0.5);
      spec.hash_vocabulary = rng.integer(1, 40);
      break;
    default:
      break;
  }
}

ActivationSpec draw_activation(Rng& rng) {
  using enum ActivationKind;
  ActivationSpec a;
  a.kind =
      pick<ActivationKind>(rng, {kSilu, kSilu, kSilu, kGelu, kGeluTanh, kSwigluOai, kSwigluStep,
                                 kSitu, kSiluNoMul, kGeluNoMul, kGeluTanhNoMul, kRelu2NoMul});
  switch (a.kind) {
    case kSilu:
      if (chance(rng, 0.2)) a.limit = 1.5F;
      break;
    case kSwigluOai:
      a.alpha = 1.702F;
      a.beta = 1.0F;
      a.limit = chance(rng, 0.5) ? 7.0F : 2.0F;
      break;
    case kSwigluStep:
      a.limit = 1.0F;
      break;
    case kSitu:
      a.beta = 4.0F;
      a.up_limit = chance(rng, 0.5) ? 3.0F : 0.0F;
      break;
    default:
      break;
  }
  return a;
}

void draw_options(Rng& rng, const MoeLayerSpec& spec, Device device, FusedMoE::Options& options) {
  options.device = device;
  options.max_tokens = pick<std::int64_t>(rng, {1, 3, 16, 64, 512});
  options.num_threads = static_cast<int>(rng.integer(1, 2));
  options.inplace = chance(rng, 0.2);
  const bool gpu = device.is_cuda();
  options.shared_stream = gpu && spec.shared.intermediate_size > 0 && chance(rng, 0.2);
  if (chance(rng, 0.15)) {
    options.quant =
        pick<std::string>(rng, {"f32", "bf16", "fp8-block", "fp8-bf16", "int4-g128-int8", "f16"});
  }
  if (gpu && chance(rng, 0.3)) options.backend = "cuda_general";
  if (!gpu && chance(rng, 0.1)) options.backend = "cpu_reference";
}

// Whether tensors of the format can be made in these sizes.
bool sizes_fit(const RandomLayer& c) {
  if (c.scheme == "fp8-block" || c.scheme == "fp8-bf16") return true;
  const std::int64_t need = c.scheme.starts_with('q')
                                ? kSuperBlockColumns
                                : std::max<std::int64_t>(c.spec.quant.weight.block_k, 2);
  return c.spec.hidden_size % need == 0 && c.spec.intermediate_size % need == 0 &&
         c.spec.shared.intermediate_size % need == 0;
}

RandomLayer draw(Rng& rng, Device device) {
  RandomLayer c;
  c.scheme = kSchemes[rng.integer(0, static_cast<std::int64_t>(std::size(kSchemes)) - 1)];
  c.spec.quant = scheme_called(c.scheme);
  draw_sizes(rng, c.spec);
  draw_routing(rng, c.spec);
  c.spec.has_router_bias = chance(rng, 0.2);
  c.spec.has_expert_bias = chance(rng, 0.25);
  if (chance(rng, 0.08)) c.spec.apply_router_weight_on_input = true;
  c.spec.activation = draw_activation(rng);
  if (chance(rng, 0.4)) {
    c.spec.shared.intermediate_size = chance(rng, 0.5)
                                          ? c.spec.intermediate_size
                                          : pick<std::int64_t>(rng, {32, 48, 64, 128, 256, 384});
    c.spec.shared.gated_output = chance(rng, 0.4);
  }
  c.spec.activation_dtype = pick<DType>(
      rng, {DType::kBF16, DType::kBF16, DType::kBF16, DType::kBF16, DType::kF16, DType::kF32});
  if (chance(rng, 0.07)) c.spec.input_norm_eps = 1e-6;
  draw_options(rng, c.spec, device, c.options);
  c.tokens = chance(rng, 0.5) ? rng.integer(1, 20) : rng.integer(1, 200);
  c.rows = chance(rng, 0.6) ? c.spec.activation_dtype
                            : pick<DType>(rng, {DType::kBF16, DType::kF32, DType::kF16});
  c.output = chance(rng, 0.5) ? DType::kF32 : c.spec.activation_dtype;
  if (c.options.inplace && chance(rng, 0.8)) c.output = c.rows;
  return c;
}

}  // namespace

RandomLayer draw_layer(std::uint64_t seed, Device device) {
  Rng rng(seed * 7919 + 13);
  for (;;) {
    RandomLayer c = draw(rng, device);
    c.seed = seed;
    if (sizes_fit(c) && validate(c.spec).ok()) return c;
  }
}

std::string RandomLayer::describe() const {
  const RoutingSpec& r = spec.routing;
  std::string text = fmt::format(
      "seed {}: {} as {}, {}, H {} I {} E {} k {}, {} {} bias {} scale {} groups {}/{} identity {} "
      "factor {} {}",
      seed, scheme, options.quant, activation_name(spec.activation.kind), spec.hidden_size,
      spec.intermediate_size, spec.num_experts, r.top_k, routing_method_name(r.method),
      scoring_func_name(r.scoring_func), r.has_correction_bias, r.has_expert_scale, r.topk_group,
      r.num_expert_group, r.num_zero_experts, r.routed_scaling_factor,
      r.scale_on_output ? "on output" : "on weights");
  text += fmt::format(
      ", renormalize {}, router bias {}, expert biases {}, weight on input {}, shared {}{}, norm "
      "{}",
      r.renormalize, spec.has_router_bias, spec.has_expert_bias, spec.apply_router_weight_on_input,
      spec.shared.intermediate_size, spec.shared.gated_output ? " gated" : "", spec.input_norm_eps);
  return text + fmt::format(
                    ", model {}, rows {}, output {}, tokens {} by {}, threads {}{}{} backend {}",
                    dtype_name(spec.activation_dtype), dtype_name(rows), dtype_name(output), tokens,
                    options.max_tokens, options.num_threads, options.inplace ? ", in place" : "",
                    options.shared_stream ? ", shared stream" : "",
                    options.backend.empty() ? "any" : options.backend);
}

}  // namespace moesaic::test
