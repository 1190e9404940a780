// Every model_type of transformers 5.24 that has experts and whose block is not what a layer here
// computes. docs/limits.md has the same list. Source: the modelling code of transformers 5.24.
#include "checkpoint/config/refused_families.h"

#include <algorithm>
#include <array>

namespace moesaic::checkpoint {
namespace {

constexpr std::string_view kEncoderDecoder =
    "an encoder-decoder, whose experts lie under encoder and decoder and are not gated";
constexpr std::string_view kTwoModalities =
    "text and image tokens have experts of their own, chosen by the kind of the token, which a "
    "layer is not told";
constexpr std::string_view kTwoStacks =
    "layers of the same number lie under an encoder and under a decoder";
constexpr std::string_view kSharedInRouter =
    "the router weighs the shared experts together with the routed ones";
constexpr std::string_view kLatent =
    "the experts work in a narrower space, between two projections, and each expert's output is "
    "normalised";

constexpr auto kRefused = std::to_array<RefusedFamily>({
    {"diffusion_gemma", kTwoStacks},
    {"diffusion_gemma_text", kTwoStacks},
    {"doge", "experts are pairs of vectors that product keys retrieve, not matrices"},
    {"ernie4_5_vl_moe", kTwoModalities},
    {"ernie4_5_vl_moe_text", kTwoModalities},
    {"inkling_mm_model", kSharedInRouter},
    {"inkling_text", kSharedInRouter},
    {"jetmoe", "the block adds a bias to the sum of the experts, and attention has experts too"},
    {"kolibri1", "the selection bias is added to the logits, not to the scores"},
    {"muse_spark", kLatent},
    {"muse_spark_text", kLatent},
    {"nllb-moe", kEncoderDecoder},
    {"qwen3_omni_moe_talker_text",
     "what speaks has layers beside the thinker's, of the same numbers; the thinker's are read"},
    {"switch_transformers", kEncoderDecoder},
    {"vitpose_backbone", "experts are chosen by the data set an image is from, not by a router"},
    {"zaya", "the router is an MLP that carries its state from layer to layer"},
});

}  // namespace

std::span<const RefusedFamily> refused_families() { return kRefused; }

const RefusedFamily* find_refused_family(std::string_view model_type) {
  const auto* const found =
      std::find_if(kRefused.begin(), kRefused.end(),
                   [&](const RefusedFamily& family) { return family.model_type == model_type; });
  return found == kRefused.end() ? nullptr : found;
}

}  // namespace moesaic::checkpoint
