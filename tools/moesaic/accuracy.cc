// moesaic accuracy: the error of every scheme, measured; the tables of docs/accuracy.md.
#include <fmt/format.h>

#include <cmath>
#include <memory>

#include "accuracy_case.h"
#include "accuracy_sweep.h"
#include "numerics_report.h"
#include "verbs.h"

namespace moesaic::tool {
namespace {

struct AccuracyArguments {
  CommonOptions common;
  std::vector<std::string> models;
  std::int64_t tokens = 64;
  bool sweep = false;
};

std::string cell(double value, double bound) {
  return fmt::format("{:.1e} ({:.1e})", value, bound);
}

// What is said of a cell's rows: one letter per kind.
std::string kinds_of(const NumericsSummary& s) {
  std::string kinds;
  if (s.saturated > 0) kinds += 'S';
  if (s.flushed > 0) kinds += 'F';
  if (s.not_finite > 0) kinds += 'N';
  if (s.beyond_bound > 0) kinds += 'B';
  return kinds;
}

// One table: schemes down, inputs across. False when an error is outside its bound without a word.
Result<bool> run_sweep(const AccuracyCase& data, const AccuracyArguments& state,
                       const Console& console, Json& tables) {
  bool pass = true;
  Json rows = Json::array();
  std::string head = "| `--quant` |", rule = "|---|";
  for (const SweepInput& input : sweep_inputs()) {
    head += " " + input.name + " |";
    rule += "---|";
  }
  console.print(fmt::format("### {}, other inputs\n\n{}\n{}\n", data.name, head, rule));
  for (const SweepScheme& scheme : sweep_schemes()) {
    std::string line = fmt::format("| `{}` |", scheme.name);
    for (const SweepInput& input : sweep_inputs()) {
      MOESAIC_ASSIGN_OR_RETURN(const SweepCell cell,
                               measure_sweep(data, scheme, input, state.common.threads));
      pass = pass && cell.honest();
      const bool within = cell.numerics.within(cell.activation_bound);
      line +=
          fmt::format(" {:.1e} ({}){}{} |", cell.error,
                      cell.bound < 1 ? fmt::format("{:.1e}", cell.bound) : "none",
                      within ? "" : " !" + kinds_of(cell.numerics), cell.honest() ? "" : " WRONG");
      rows.push_back({{"quant", scheme.name},
                      {"input", input.name},
                      {"error", finite(cell.error)},
                      {"stated_bound", cell.stated},
                      {"bound", finite(cell.bound)},
                      {"numerics", numerics_json(cell.numerics, cell.activation_bound)}});
    }
    console.print(line + "\n");
  }
  console.print("\n");
  tables.push_back({{"data", data.name + ", other inputs"}, {"rows", std::move(rows)}});
  return pass;
}

int run_accuracy(const AccuracyArguments& state) {
  const Console console = state.common.console();
  std::vector<AccuracyCase> cases;
  Result<AccuracyCase> gaussian = gaussian_case(state.common.seed);
  if (!gaussian.ok()) return console.fail(gaussian.status(), Origin::kOption);
  cases.push_back(std::move(gaussian).value());
  for (const std::string& model : state.models) {
    Result<AccuracyCase> data = model_case(model, state.tokens);
    if (!data.ok()) return console.fail(data.status().with_context(model), Origin::kFile);
    cases.push_back(std::move(data).value());
  }
  bool pass = true;
  Json tables = Json::array();
  for (const AccuracyCase& data : cases) {
    Json rows = Json::array();
    console.print(
        fmt::format("### {}\n\n| `--quant` | weights | activations | output | arithmetic "
                    "|\n|---|---|---|---|---|\n",
                    data.name));
    for (const Scheme& scheme : quant_schemes()) {
      const Result<AccuracyRow> row = measure_accuracy(data, scheme, state.common.threads);
      if (!row.ok()) {
        if (row.status().code() != StatusCode::kUnsupported) {
          return console.fail(row.status().with_context(scheme.name), Origin::kOption);
        }
        console.note(1, fmt::format("{}: {}", scheme.name, row.status().message()));
        console.print(fmt::format("| `{}` | not in this build | | | |\n", scheme.name));
        continue;
      }
      console.print(fmt::format(
          "| `{}` | {} | {} | {} | {} |\n", row->scheme, cell(row->weights, row->weights_bound),
          cell(row->activations, row->activations_bound), cell(row->output, row->output_bound),
          cell(row->arithmetic, row->arithmetic_bound)));
      // Written so that a NaN fails. Weights of a trained model are not normal: no verdict on them.
      pass = pass && row->arithmetic <= row->arithmetic_bound && row->output <= row->output_bound;
      rows.push_back({{"quant", row->scheme},
                      {"backend", row->backend},
                      {"weights", finite(row->weights)},
                      {"weights_bound", row->weights_bound},
                      {"activations", finite(row->activations)},
                      {"activations_bound", row->activations_bound},
                      {"output", finite(row->output)},
                      {"output_bound", row->output_bound},
                      {"arithmetic", finite(row->arithmetic)},
                      {"arithmetic_bound", row->arithmetic_bound}});
    }
    console.print("\n");
    tables.push_back({{"data", data.name}, {"schemes", std::move(rows)}});
  }
  for (const AccuracyCase& data : cases) {
    if (!state.sweep) break;
    const Result<bool> honest = run_sweep(data, state, console, tables);
    if (!honest.ok()) return console.fail(honest.status().with_context(data.name), Origin::kOption);
    pass = pass && *honest;
  }
  console.emit({{"tables", std::move(tables)}, {"pass", pass}});
  if (pass) return kExitOk;
  console.warn("a scheme is outside its bound");
  return kExitVerifyFailed;
}

}  // namespace

Verb make_accuracy(CLI::App& root) {
  auto state = std::make_shared<AccuracyArguments>();
  CLI::App* app = add_verb(
      root, "accuracy", "Measure the error of every scheme: weights, activations, output",
      "  moesaic accuracy\n"
      "  moesaic accuracy --model testdata/models/mini-deepseek-v3\n"
      "\nEach cell is relative L2 error and, in brackets, its bound. output: against unquantised\n"
      "weights in fp32; arithmetic: against fp32 with the same stored weights.\n");
  CLI::Option* model = app->add_option(
      "--model", state->models,
      "Folder with a golden file; its first block is measured beside Gaussian data");
  app->add_flag("--sweep", state->sweep,
                "Also with one channel x10, x30, x100 and everything x1e-4 .. x1e4: error, bound "
                "in force, and after ! what run and verify would report (S saturated, F flushed, N "
                "not finite, B beyond the bound)");
  app->add_option("--tokens", state->tokens, "Rows of the golden file that are used")
      ->check(whole_number(1, 4096))
      ->needs(model)
      ->capture_default_str();
  app->add_option("--threads", state->common.threads, "Threads; 0 takes one per core")
      ->check(whole_number(0, 4096))
      ->capture_default_str();
  add_seed_option(*app, state->common, "Seed of the Gaussian data");
  add_output_options(*app, state->common);
  return {app, [state] { return run_accuracy(*state); }};
}

}  // namespace moesaic::tool
