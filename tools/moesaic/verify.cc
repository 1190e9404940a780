// moesaic verify: every MoE block of a golden file against the layer that this library builds.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <optional>
#include <set>
#include <utility>
#include <vector>

#include "golden.h"
#include "layer_io.h"
#include "numerics_report.h"
#include "verbs.h"

namespace moesaic::tool {
namespace {

struct VerifyArguments {
  CommonOptions common;
  std::string model, golden;
  std::optional<int> only_layer;
  bool strict = false;
};

// What was compared of the router but the choice itself.
std::vector<std::pair<const char*, Comparison>> router_comparisons(const LayerReport& report) {
  std::vector<std::pair<const char*, Comparison>> all;
  if (report.router_logits) all.emplace_back("router_logits", *report.router_logits);
  if (report.topk_weights) all.emplace_back("topk_weights", *report.topk_weights);
  return all;
}

Json report_json(const LayerReport& report) {
  Json json = {{"layer", report.layer},
               {"tokens", report.tokens},
               {"rel_l2", finite(report.rel_l2)},
               {"cosine", finite(report.cosine)},
               {"max_abs", finite(report.max_abs)},
               {"topk_mismatches", report.topk_mismatches},
               {"near_ties", report.near_ties},
               {"topk_source", report.topk_source},
               {"topk_weight_max_abs", finite(report.topk_weight_max_abs)},
               {"bound", finite(report.bound)},
               {"documented_bound", finite(report.documented_bound)},
               {"cancellation", finite(report.cancellation)},
               {"numerics", numerics_json(report.numerics, report.activation_bound)},
               {"pass", report.pass},
               {"quant", report.quant},
               {"device", report.device},
               {"backend", report.backend},
               {"backend_note", report.backend_note}};
  for (const auto& [key, compared] : router_comparisons(report)) {
    json[key] = {{"rel_l2", finite(compared.rel_l2)}, {"bound", finite(compared.bound)}};
  }
  return json;
}

void print_reports(const Console& console, const std::vector<LayerReport>& reports) {
  console.print(fmt::format("{:>5}  {:>6}  {:>9}  {:>9}  {:>12}  {:>9}  {:>10}  {:>9}  {}\n",
                            "layer", "tokens", "rel_l2", "bound", "cosine", "max_abs", "mismatches",
                            "near_ties", "result"));
  for (const LayerReport& r : reports) {
    console.print(fmt::format(
        "{:>5}  {:>6}  {:>9.2e}  {:>9.2e}  {:>12.10f}  {:>9.2e}  {:>10}  {:>9}  {} ({}, {})\n",
        r.layer, r.tokens, r.rel_l2, r.bound, r.cosine, r.max_abs, r.topk_mismatches, r.near_ties,
        r.pass ? "pass" : "FAIL", r.quant, r.backend));
    if (!r.compares_output()) {
      console.print(fmt::format("{:>5}  every token is a near tie: no output was compared\n", ""));
    }
    for (const auto& [key, compared] : router_comparisons(r)) {
      if (compared.pass()) continue;
      console.print(fmt::format("{:>5}  {}: rel_l2 {:.2e}, bound {:.2e}: FAIL\n", "", key,
                                compared.rel_l2, compared.bound));
    }
  }
}

int run_verify(const VerifyArguments& state) {
  const Console console = state.common.console();
  if (const Status status = check_common_options(state.common); !status.ok()) {
    return console.fail(status, Origin::kOption);
  }
  const std::string golden_path = state.golden.empty() ? golden_beside(state.model) : state.golden;
  const Result<Checkpoint> checkpoint = Checkpoint::open(state.model);
  if (!checkpoint.ok()) return console.fail(checkpoint.status(), Origin::kFile);
  const Result<TensorFile> golden = TensorFile::open(golden_path);
  if (!golden.ok()) return console.fail(golden.status().with_context(golden_path), Origin::kFile);
  Result<std::vector<GoldenBlock>> blocks = golden_blocks(*golden);
  if (!blocks.ok()) {
    return console.fail(blocks.status().with_context(golden_path), Origin::kFile,
                        "record the hidden states before and after an MoE block under such names");
  }
  if (state.only_layer) {
    std::vector<int> known;
    for (const GoldenBlock& b : *blocks) known.push_back(b.layer);
    std::erase_if(*blocks, [&](const GoldenBlock& b) { return b.layer != state.only_layer; });
    if (blocks->empty()) {
      return console.fail({StatusCode::kNotFound,
                           fmt::format("--layer: got {}, {} has blocks of the layers {}",
                                       *state.only_layer, golden_path, fmt::join(known, ", "))},
                          Origin::kOption, "leave --layer out to verify all blocks");
    }
  }

  std::vector<LayerReport> reports;
  std::set<std::string> told;  // once, not for every layer
  for (const GoldenBlock& block : *blocks) {
    FusedMoE::Options options = layer_options(state.common, kMaxTokensPerCall);
    options.progress = console.progress(fmt::format("loading layer {}", block.layer));
    Origin origin = Origin::kFile;
    Result<LayerReport> report =
        on_chosen_device(state.common, console, options, [&](const FusedMoE::Options& o) {
          return verify_block(*checkpoint, state.model, *golden, block, o, origin);
        });
    console.finish_progress();
    if (!report.ok()) return console.fail(report.status().with_context(block.prefix), origin);
    reports.push_back(std::move(report).value());
    LayerReport& last = reports.back();
    console.note(1, fmt::format("layer {}: rel_l2 {:.3e}", block.layer, last.rel_l2));
    if (told.insert(last.backend_note).second) {
      tell_backend_note(state.common, console, last.backend_note);
    }
    const std::string outside = numerics_warning(last.numerics, last.activation_bound);
    if (outside.empty()) continue;
    console.warn(fmt::format("layer {}: {}\n  next: {}", last.layer, outside, kNumericsNextStep));
    if (state.strict) last.pass = false;
  }

  double worst = 0;
  bool pass = true;
  Json layers = Json::array();
  for (const LayerReport& report : reports) {
    keep_worst(worst, report.rel_l2);
    pass = pass && report.pass;
    layers.push_back(report_json(report));
  }
  console.emit({{"model", state.model},
                {"golden", golden_path},
                {"layers", std::move(layers)},
                {"worst_rel_l2", finite(worst)},
                {"pass", pass}});
  print_reports(console, reports);
  console.print(fmt::format("worst relative L2 {:.3e}: {}\n", worst, pass ? "pass" : "FAIL"));
  if (pass) return kExitOk;
  console.warn(
      "verification failed\n  next: compare with --quant f32 and with the reference backend "
      "(moesaic explain names it) to tell arithmetic from weights or routing");
  return kExitVerifyFailed;
}

}  // namespace

Verb make_verify(CLI::App& root) {
  auto state = std::make_shared<VerifyArguments>();
  CLI::App* app = add_verb(
      root, "verify", "Compare layers with recorded inputs and outputs (a golden file)",
      "  moesaic verify --model testdata/models/mini-deepseek-v3\n"
      "  moesaic verify --model DIR --golden golden.safetensors --quant f32 --json\n"
      "\nThe golden file holds, per MoE block, <prefix>.input and <prefix>.output, where "
      "<prefix> is\n"
      "like model.layers.3.mlp; optionally, of its gate or router, <prefix>.gate.out0 (or "
      ".router.out0),\n"
      "the router logits, .out1, the weights, and .out2, the chosen experts. What is there is "
      "compared.\n"
      "A difference in the choice counts as a mismatch unless the scores, computed in "
      "float64, are\n"
      "closer than rounding explains. For a converted checkpoint the bound includes the rounding "
      "of its weights.\n");
  app->add_option("--model", state->model,
                  "Folder with config.json and safetensors, or a GGUF file")
      ->required();
  app->add_option("--golden", state->golden, "Golden file; default: golden.safetensors in --model")
      ->check(not_empty());
  add_layer_number(*app, state->only_layer, "Verify this layer only");
  app->add_flag("--strict", state->strict,
                "Fail a layer whose inputs are outside what its scheme's bound is stated for, even "
                "when the error is within the bound computed for them");
  add_layer_options(*app, state->common);
  add_common_options(*app, state->common);
  return {app, [state] { return run_verify(*state); }};
}

}  // namespace moesaic::tool
