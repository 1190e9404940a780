// moesaic explain: the catalogue for a layer, what is chosen, and why not the others.
#include <fmt/format.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <vector>

#include "layer_io.h"
#include "layer_origin.h"
#include "rank_effects.h"
#include "shapes.h"
#include "spec_text.h"
#include "verbs.h"

namespace moesaic::tool {
namespace {

struct ExplainArguments {
  CommonOptions common;
  RankOptions ranks;
  std::string model, shape;
  std::optional<int> layer;  // the first MoE layer
  std::int64_t tokens = 512;
};

// What a run would choose: the explanation's backend for the experts, the first accepted row
// elsewhere.
Json chosen_json(const LayerExplanation& explanation) {
  Json chosen = Json::object();
  for (const CandidateReport& row : explanation.candidates) {
    if (!row.accepted || chosen.contains(row.stage)) continue;
    chosen[row.stage] = row.stage == "experts" ? explanation.experts_backend : row.name;
  }
  return chosen;
}

void print(const Console& console, const MoeLayerSpec& spec, const LayerExplanation& explanation,
           std::int64_t tokens) {
  console.print(describe(spec) + "\n");
  const Json chosen = chosen_json(explanation);
  std::string stage;
  for (const CandidateReport& row : explanation.candidates) {
    if (row.stage != stage) console.print(row.stage + "\n");
    stage = row.stage;
    const bool is_chosen = chosen.contains(row.stage) && chosen[row.stage] == row.name;
    console.print(fmt::format("  {} {:<33} {}\n", is_chosen ? "->" : "  ", row.name,
                              row.accepted ? "accepted" : "refused: " + row.reason));
  }
  console.print(fmt::format("workspace    {} for {} token(s)\n",
                            format_bytes(explanation.workspace_bytes), tokens));
  console.print(fmt::format("order        {}\n", explanation.stage_order));
  console.print(fmt::format("logits       {}\n", explanation.router_logits));
  console.print(fmt::format("determinism  {}\n", explanation.determinism));
  console.print(fmt::format("activations  {}\n", explanation.activations));
  const std::string slow = slow_backend_note(explanation.experts_backend, explanation.candidates);
  if (!slow.empty()) console.print(fmt::format("note         {}\n", slow));
  if (!explanation.quant_note.empty()) {
    console.print(
        fmt::format("note         {}\n", checkpoint::escape_controls(explanation.quant_note)));
  }
  if (!explanation.quant_choice.empty())
    console.print(fmt::format("choice       {}\n", explanation.quant_choice));
  std::string threads;
  for (const StageThreads& s : explanation.threads) {
    threads += fmt::format("{}{} {}", threads.empty() ? "" : ", ", s.stage, s.threads);
    if (s.threads > 1 && s.one_thread_tokens > 0)
      threads += fmt::format(" (1 up to {} token(s))", s.one_thread_tokens);
  }
  if (threads.empty()) return;
  console.print(
      fmt::format("threads      {}; a stage with less than 100 us of work runs on one\n", threads));
}

int run_explain(ExplainArguments state) {
  const Console console = state.common.console(/*results=*/speaks_for_all());
  if (const Status status = check_common_options(state.common, /*needs_device=*/false);
      !status.ok()) {
    return console.fail(status, Origin::kOption);
  }
  MoeLayerFormat format;
  std::optional<Checkpoint> checkpoint;
  if (!state.shape.empty()) {
    if (state.layer) return console.fail(layer_beside_shape(*state.layer), Origin::kOption);
    Result<MoeLayerSpec> named = layer_from_shape(state.shape);
    if (!named.ok()) return console.fail(named.status(), Origin::kOption);
    format.spec = std::move(named).value();
    format.shared_quant = format.spec.quant;
  } else {
    Result<Checkpoint> opened = Checkpoint::open(state.model);
    if (!opened.ok()) return console.fail(opened.status(), Origin::kFile);
    checkpoint = std::move(opened).value();
    if (checkpoint->layers().empty()) {
      return console.fail({StatusCode::kNotFound, state.model + ": has no MoE layers"},
                          Origin::kFile);
    }
    const int layer = state.layer.value_or(checkpoint->layers().front().layer);
    const Result<MoeLayerSpec> known = checkpoint->layer(layer);
    if (!known.ok()) return console.fail(known.status(), Origin::kOption);
    Result<MoeLayerFormat> found = checkpoint->check_layer(layer);
    if (!found.ok()) {
      return console.fail(found.status().with_context(state.model), Origin::kFile);
    }
    format = std::move(found).value();
  }
  const MoeLayerSpec& spec = format.spec;
  Result<FusedMoE::Options> asked = explained_options(state.ranks, state.common, state.tokens);
  if (!asked.ok()) return console.fail(asked.status(), Origin::kOption);
  FusedMoE::Options options = std::move(asked).value();
  if (const Status used = check_rank_effects(state.ranks, options.parallel, spec); !used.ok()) {
    return console.fail(used, Origin::kOption);
  }
  const Result<LayerExplanation> explained =
      on_chosen_device(state.common, console, options,
                       [&](const FusedMoE::Options& o) { return explain_layer(format, o); });
  if (!explained.ok()) {
    const Status& why = explained.status();
    return console.fail(why,
                        checkpoint ? layer_origin(why, *checkpoint, spec.layer) : Origin::kOption);
  }
  const LayerExplanation& explanation = *explained;

  Json candidates = Json::array();
  for (const CandidateReport& row : explanation.candidates) {
    candidates.push_back({{"stage", row.stage},
                          {"name", row.name},
                          {"accepted", row.accepted},
                          {"reason", row.reason}});
  }
  Json threads = Json::array();
  for (const StageThreads& s : explanation.threads) {
    threads.push_back(
        {{"stage", s.stage}, {"threads", s.threads}, {"one_thread_tokens", s.one_thread_tokens}});
  }
  console.emit(
      {{"layer", describe(spec)},
       {"tokens", state.tokens},
       {"ranks", std::max(state.ranks.ranks, 1)},
       {"peer_memory", peer_memory_name(options.ranks.peer_memory)},
       {"device", options.device.to_string()},
       {"candidates", std::move(candidates)},
       {"chosen", chosen_json(explanation)},
       {"workspace_bytes", explanation.workspace_bytes},
       {"stage_order", explanation.stage_order},
       {"router_logits", explanation.router_logits},
       {"determinism", explanation.determinism},
       {"activations", explanation.activations},
       {"quant_note", explanation.quant_note},
       {"quant_choice", explanation.quant_choice},
       {"backend_note", slow_backend_note(explanation.experts_backend, explanation.candidates)},
       {"threads", std::move(threads)}});
  print(console, spec, explanation, state.tokens);
  if (const PeerMemory memory = options.ranks.peer_memory; memory != PeerMemory::kAuto) {
    console.print(fmt::format("peers        memory of {}\n", peer_memory_name(memory)));
  }
  return kExitOk;
}

}  // namespace

Verb make_explain(CLI::App& root) {
  auto state = std::make_shared<ExplainArguments>();
  std::string names;
  for (const std::string_view name : shape_names()) names += fmt::format(" {}", name);
  CLI::App* app = add_verb(root, "explain",
                           "Show which backends accept a layer, which one runs, and why not others",
                           "  moesaic explain --model testdata/models/mini-gpt-oss\n"
                           "  moesaic explain --shape deepseek-v3 --quant fp8-block --tokens 64\n"
                           "  moesaic explain --shape 64,8,2048,1024,silu --json\n"
                           "  moesaic explain --shape deepseek-v3 --quant fp8-block --device cuda "
                           "--tokens 8192\n"
                           "  moesaic explain --shape deepseek-v3 --quant fp8-block --ranks 8\n"
                           "\nShapes:" +
                               names + "\n");
  CLI::Option_group* source = app->add_option_group("layer", "The layer to explain: one of");
  source
      ->add_option("--model", state->model,
                   "Folder with config.json and safetensors, or a GGUF file")
      ->check(not_empty());
  source->add_option("--shape", state->shape, "Shape name, or E,k,H,I[,activation]")
      ->check(not_empty());
  source->require_option(1);
  add_layer_number(*app, state->layer, "Layer of --model; default: the first MoE layer");
  app->add_option("--tokens", state->tokens, "Tokens per call that the workspace is for")
      ->check(whole_number(std::int64_t{1}, (std::int64_t{1} << 31) - 1))
      ->capture_default_str();
  add_rank_options(*app, state->ranks);
  add_layer_options(*app, state->common);
  add_common_options(*app, state->common);
  return {app, [state] { return run_explain(*state); }};
}

}  // namespace moesaic::tool
