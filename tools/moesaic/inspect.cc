// moesaic inspect DIR: the MoE layers of a checkpoint and the problems found. Reads headers only.
#include <fmt/format.h>

#include <algorithm>
#include <memory>
#include <vector>

#include "core/fault.h"
#include "moesaic/checkpoint.h"
#include "moesaic/fused_moe.h"
#include "spec_text.h"
#include "verbs.h"

namespace moesaic::tool {
namespace {

struct InspectArguments {
  CommonOptions common;
  std::string directory;
};

Json layer_json(const MoeLayerSpec& spec, std::int64_t bytes) {
  return {{"layer", spec.layer},
          {"prefix", spec.prefix},
          {"num_experts", spec.num_experts},
          {"top_k", spec.routing.top_k},
          {"hidden_size", spec.hidden_size},
          {"intermediate_size", spec.intermediate_size},
          {"routing", routing_text(spec.routing)},
          {"activation", activation_name(spec.activation.kind)},
          {"quant", spec.quant.name},
          {"shared_experts", shared_experts(spec)},
          {"shared_intermediate_size", spec.shared.intermediate_size},
          {"bytes", bytes}};
}

// Everything about a layer that the table shows, as one row without the layer number; equal
// neighbours share a line.
std::string row_text(const MoeLayerSpec& spec, std::int64_t bytes) {
  return fmt::format("{:>7}  {:>5}  {:>6}  {:>12}  {:<34}  {:<12}  {:<9}  {:>6}  {:>8}",
                     spec.num_experts, spec.routing.top_k, spec.hidden_size, spec.intermediate_size,
                     routing_text(spec.routing), activation_name(spec.activation.kind),
                     spec.quant.name, shared_experts(spec), format_bytes(bytes));
}

void print_table(const Console& console, const Checkpoint& checkpoint) {
  console.print(
      fmt::format("{:>9}  {:>7}  {:>5}  {:>6}  {:>12}  {:<34}  {:<12}  {:<9}  {:>6}  {:>8}\n",
                  "layers", "experts", "top_k", "hidden", "intermediate", "routing", "activation",
                  "quant", "shared", "bytes"));
  const std::span<const MoeLayerSpec> layers = checkpoint.layers();
  for (std::size_t i = 0; i < layers.size();) {
    const std::string row = row_text(layers[i], checkpoint.layer_bytes(layers[i].layer));
    std::size_t end = i + 1;
    while (end < layers.size() && layers[end].layer == layers[end - 1].layer + 1 &&
           row_text(layers[end], checkpoint.layer_bytes(layers[end].layer)) == row) {
      ++end;
    }
    const std::string range = end == i + 1
                                  ? fmt::format("{}", layers[i].layer)
                                  : fmt::format("{}-{}", layers[i].layer, layers[end - 1].layer);
    console.print(fmt::format("{:>9}  {}\n", range, row));
    i = end;
  }
}

// Why the first layer that cannot be loaded or that nothing here can compute is refused. What the
// checkpoint itself does not call a problem is added to them; what is computed otherwise than it
// says becomes a note, each text once.
Status first_that_cannot_run(const Checkpoint& checkpoint, std::vector<std::string>* problems,
                             std::vector<std::string>* notes) {
  constexpr int kMostBroken = 16;  // as Checkpoint::problems: each costs a walk over its tensors
  Status first;
  int broken = 0;
  for (const MoeLayerSpec& spec : checkpoint.layers()) {
    if (broken == kMostBroken) break;
    const Result<MoeLayerFormat> format = checkpoint.check_layer(spec.layer);
    Status status = format.status();
    if (status.ok()) {
      const std::string& note = format->spec.quant_note;
      if (!note.empty() && std::find(notes->begin(), notes->end(), note) == notes->end()) {
        notes->push_back(note);
      }
      status =
          explain_layer(*format, {}).status().with_context(fmt::format("layer {}", spec.layer));
      if (!status.ok()) problems->push_back(status.message());
    }
    if (!status.ok()) ++broken;
    if (first.ok()) first = status;
  }
  return MOESAIC_FAULT(inspect_accepts_every_layer) ? Status() : first;
}

int run_inspect(const InspectArguments& state) {
  const Console console = state.common.console();
  Result<Checkpoint> opened = Checkpoint::open(state.directory);
  if (!opened.ok()) return console.fail(opened.status(), Origin::kFile);
  const Checkpoint& checkpoint = *opened;

  Json layers = Json::array();
  std::int64_t total = 0;
  for (const MoeLayerSpec& spec : checkpoint.layers()) {
    const std::int64_t bytes = checkpoint.layer_bytes(spec.layer);
    total += bytes;
    layers.push_back(layer_json(spec, bytes));
  }
  std::vector<std::string> problems = checkpoint.problems();
  std::vector<std::string> notes;
  const Status bad = first_that_cannot_run(checkpoint, &problems, &notes);
  Json report = {{"model_type", checkpoint.model_type()},
                 {"directory", state.directory},
                 {"layers", std::move(layers)},
                 {"total_bytes", total},
                 {"problems", problems},
                 {"notes", notes}};

  console.print(fmt::format("{}: model_type {}, {} MoE layer(s), {} in them\n",
                            checkpoint::escape_controls(state.directory), checkpoint.model_type(),
                            checkpoint.layers().size(), format_bytes(total)));
  print_table(console, checkpoint);
  if (problems.empty()) console.print("problems: none found in the headers\n");
  for (const std::string& problem : problems) {
    console.print(fmt::format("problem: {}\n", checkpoint::escape_controls(problem)));
  }
  for (const std::string& note : notes) {
    console.print(fmt::format("note: {}\n", checkpoint::escape_controls(note)));
  }
  if (!bad.ok()) {
    return console.fail(bad.with_context(state.directory), Origin::kFile, {}, std::move(report));
  }
  console.emit(report);
  return kExitOk;
}

}  // namespace

Verb make_inspect(CLI::App& root) {
  auto state = std::make_shared<InspectArguments>();
  CLI::App* app = add_verb(
      root, "inspect", "List the MoE layers of a checkpoint and its problems",
      "  moesaic inspect testdata/models/mini-deepseek-v3\n"
      "  moesaic inspect ~/models/Qwen3-30B-A3B --json | python3 -m json.tool\n"
      "\nReads headers. A layer that could not be loaded, or that no backend here computes, "
      "is an\nerror (3 or 4) after the report.\n");
  app->add_option("DIR", state->directory,
                  "Folder with config.json and safetensors, or a GGUF file")
      ->required();
  add_output_options(*app, state->common);
  return {app, [state] { return run_inspect(*state); }};
}

}  // namespace moesaic::tool
