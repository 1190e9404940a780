// moesaic explain: the catalogue for a layer, what is chosen, and why not the others.
#include <fmt/format.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <vector>

#include "layer_io.h"
#include "shapes.h"
#include "spec_text.h"
#include "verbs.h"

namespace moesaic::tool {
namespace {

struct State {
  CommonOptions common;
  std::string model, shape;
  int layer = -1;
  std::int64_t tokens = 512;
};

struct Explanation {
  MoeLayerSpec spec;
  std::vector<CandidateReport> candidates;
  std::int64_t workspace_bytes = 0;
  std::string determinism;
};

// What a run would choose: the forced backend for the experts, the first accepted row elsewhere.
Json chosen_json(const std::vector<CandidateReport>& candidates, const std::string& forced) {
  Json chosen = Json::object();
  for (const CandidateReport& row : candidates) {
    if (!row.accepted || chosen.contains(row.stage)) continue;
    if (row.stage == "experts" && !forced.empty() && row.name != forced) continue;
    chosen[row.stage] = row.name;
  }
  return chosen;
}

void print(const Console& console, const Explanation& explanation, const State& state) {
  console.print(describe(explanation.spec) + "\n");
  const Json chosen = chosen_json(explanation.candidates, state.common.backend);
  std::string stage;
  for (const CandidateReport& row : explanation.candidates) {
    if (row.stage != stage) console.print(row.stage + "\n");
    stage = row.stage;
    const bool is_chosen = chosen.contains(row.stage) && chosen[row.stage] == row.name;
    console.print(fmt::format("  {} {:<28} {}\n", is_chosen ? "->" : "  ", row.name,
                              row.accepted ? "accepted" : "refused: " + row.reason));
  }
  console.print(fmt::format("workspace    {} for {} token(s)\n",
                            format_bytes(explanation.workspace_bytes), state.tokens));
  console.print(fmt::format("determinism  {}\n", explanation.determinism));
}

int run_explain(const State& state) {
  const Console console = state.common.console();
  if (const Status status = check_common_options(state.common); !status.ok()) {
    return console.fail(status, Origin::kOption);
  }
  Explanation explanation;
  if (!state.shape.empty()) {
    Result<MoeLayerSpec> spec = layer_from_shape(state.shape);
    if (!spec.ok()) return console.fail(spec.status(), Origin::kOption);
    explanation.spec = std::move(spec).value();
  } else {
    const Result<Checkpoint> checkpoint = Checkpoint::open(state.model);
    if (!checkpoint.ok()) return console.fail(checkpoint.status(), Origin::kFile);
    if (checkpoint->layers().empty()) {
      return console.fail({StatusCode::kNotFound, state.model + ": has no MoE layers"},
                          Origin::kFile);
    }
    const int layer = state.layer >= 0 ? state.layer : checkpoint->layers().front().layer;
    Result<MoeLayerSpec> spec = checkpoint->layer(layer);
    if (!spec.ok()) return console.fail(spec.status(), Origin::kOption);
    explanation.spec = std::move(spec).value();
  }
  const FusedMoE::Options options = layer_options(state.common, state.tokens);
  Result<std::vector<CandidateReport>> rows = explain_layer(explanation.spec, options);
  if (!rows.ok()) return console.fail(rows.status(), Origin::kOption);
  explanation.candidates = std::move(rows).value();

  Json candidates = Json::array();
  for (const CandidateReport& row : explanation.candidates) {
    candidates.push_back({{"stage", row.stage},
                          {"name", row.name},
                          {"accepted", row.accepted},
                          {"reason", row.reason}});
  }
  console.emit({{"layer", describe(explanation.spec)},
                {"tokens", state.tokens},
                {"device", "cpu"},
                {"candidates", std::move(candidates)},
                {"chosen", chosen_json(explanation.candidates, state.common.backend)},
                {"workspace_bytes", explanation.workspace_bytes},
                {"determinism", explanation.determinism}});
  print(console, explanation, state);
  return kExitOk;
}

}  // namespace

Verb make_explain(CLI::App& root) {
  auto state = std::make_shared<State>();
  std::string names;
  for (const std::string_view name : shape_names()) names += fmt::format(" {}", name);
  CLI::App* app = add_verb(root, "explain",
                           "Show which backends accept a layer, which one runs, and why not others",
                           "  moesaic explain --model testdata/models/mini-gpt-oss\n"
                           "  moesaic explain --shape deepseek-v3 --quant fp8-block --tokens 64\n"
                           "  moesaic explain --shape 64,8,2048,1024,silu --json\n"
                           "\nShapes:" +
                               names + "\n");
  CLI::Option_group* source = app->add_option_group("layer", "The layer to explain: one of");
  source->add_option("--model", state->model, "Folder with config.json and safetensors");
  source->add_option("--shape", state->shape, "Shape name, or E,k,H,I[,activation]");
  source->require_option(1);
  app->add_option("--layer", state->layer, "Layer of --model; default: the first MoE layer")
      ->check(CLI::NonNegativeNumber);
  app->add_option("--tokens", state->tokens, "Tokens per call that the workspace is for")
      ->check(CLI::Range(std::int64_t{1}, std::int64_t{1} << 31))
      ->capture_default_str();
  add_common_options(*app, state->common);
  return {app, [state] { return run_explain(*state); }};
}

}  // namespace moesaic::tool
