// moesaic run: one MoE layer on hidden states from a file.
#include <fmt/format.h>

#include <memory>
#include <vector>

#include "layer_io.h"
#include "layer_origin.h"
#include "numerics_report.h"
#include "run_ranks.h"
#include "spec_text.h"
#include "verbs.h"

namespace moesaic::tool {
namespace {

struct RunArguments {
  CommonOptions common;
  RankOptions ranks;
  std::string model, input, output, output_dtype = "f32";
  int layer = 0;
  int repeat = 0;
  bool strict = false;
  bool force = false;

  ResultFile result_file() const {
    return {"--output", output, ResultFile::Content::kLayerOutput,
            force,      model,  {split_tensor_path(input).first}};
  }
};

void report(const Console& console, const RunArguments& state, const FusedMoE& layer,
            const LayerOutput& result, const Timing& timing, const NumericsSummary& numerics,
            double bound) {
  const std::int64_t tokens = result.output.shape()[0];
  const std::vector<std::int64_t> load = expert_load(result, layer.spec());
  const double per_second =
      timing.median_us > 0 ? 1e6 * static_cast<double>(tokens) / timing.median_us : 0;
  console.emit({{"layer", state.layer},
                {"tokens", tokens},
                {"device", layer.device().to_string()},
                {"backend", layer.experts_backend()},
                {"backend_note", slow_backend_note(layer)},
                {"quant", layer.quant().name},
                {"time_us",
                 {{"median", finite(timing.median_us)},
                  {"min", finite(timing.min_us)},
                  {"samples", timing.samples}}},
                {"tokens_per_s", finite(per_second)},
                {"expert_load", load},
                {"numerics", numerics_json(numerics, bound)},
                {"output", state.output}});
  console.print(describe(layer.spec()) + "\n");
  console.print(fmt::format("{} token(s) on {}, backend {}, arithmetic {}\n", tokens,
                            layer.device().to_string(), layer.experts_backend(),
                            layer.quant().name));
  console.print(fmt::format("time     median {}, min {} of {} call(s), {:.4g} tokens/s\n",
                            format_us(timing.median_us), format_us(timing.min_us), timing.samples,
                            per_second));
  console.print(fmt::format("load     {}\n", fmt::join(load, " ")));
  console.print(fmt::format("rounding {}\n", numerics_text(numerics, bound)));
  console.print(fmt::format("written  {} (output, topk_ids, topk_weights)\n",
                            checkpoint::escape_controls(state.output)));
}

int run_layer(RunArguments state) {
  const ResultFile written = state.result_file();
  state.common.report_on_stderr = goes_to_stdout(written);
  const Console console = state.common.console();
  if (const Status status = check_common_options(state.common); !status.ok()) {
    return console.fail(status, Origin::kOption);
  }
  if (const Status alone = check_rank_options(state.ranks); !alone.ok()) {
    return console.fail(alone, Origin::kOption);
  }
  if (state.strict && wants_ranks(state.ranks)) {
    return console.fail(
        {StatusCode::kUnsupported,
         "--strict: got ranks, need one: rounding is measured where a row's experts "
         "are added up"},
        Origin::kOption);
  }
  // Of processes only rank 0 looks; threads see the same files.
  if (!launched_by_mpi() || !wants_ranks(state.ranks)) {
    if (const Status status = check_result_file(written); !status.ok()) {
      return console.fail(status, origin_of_refusal(written, status));
    }
  }
  if (wants_ranks(state.ranks)) {
    const RunRequest request{state.model, state.input, state.output_dtype,
                             written,     state.layer, state.repeat};
    return run_on_ranks(state.ranks, state.common,
                        [&](const RankContext& c) { return run_layer_on_rank(request, c); });
  }
  const auto [path, named] = split_tensor_path(state.input);
  const std::string tensor = named.empty() ? "hidden_states" : named;
  const Result<Checkpoint> checkpoint = Checkpoint::open(state.model);
  if (!checkpoint.ok()) return console.fail(checkpoint.status(), Origin::kFile);
  const Result<MoeLayerSpec> spec = checkpoint->layer(state.layer);
  if (!spec.ok()) return console.fail(spec.status(), Origin::kOption);
  if (const Status status = check_routes_by_hidden_states(*spec); !status.ok()) {
    return console.fail(status, Origin::kOption);
  }
  const Result<TensorFile> file = TensorFile::open(path);
  if (!file.ok()) return console.fail(file.status().with_context(path), Origin::kFile);
  const Result<Tensor> input = read_hidden_states(*file, tensor, spec->hidden_size);
  if (!input.ok()) {
    return console.fail(input.status().with_context(path), Origin::kFile,
                        "name another tensor with --input FILE:TENSOR");
  }

  const std::int64_t tokens = input->shape()[0];
  FusedMoE::Options options =
      layer_options(state.common, std::clamp<std::int64_t>(tokens, 1, kMaxTokensPerCall));
  options.progress = console.progress(fmt::format("loading layer {}", state.layer));
  Result<FusedMoE> layer =
      on_chosen_device(state.common, console, options, [&](const FusedMoE::Options& o) {
        return FusedMoE::from_checkpoint(*checkpoint, state.layer, o);
      });
  console.finish_progress();
  if (!layer.ok()) {
    return console.fail(layer.status(), layer_origin(layer.status(), *checkpoint, state.layer));
  }
  tell_backend_note(state.common, console, slow_backend_note(*layer));

  const DType dtype = state.output_dtype == "bf16" ? DType::kBF16 : DType::kF32;
  Result<LayerOutput> result = make_layer_output(*spec, tokens, dtype);
  if (!result.ok()) return console.fail(result.status(), Origin::kFile);
  const Result<Timing> timing = time_forward(*layer, *input, *result, state.repeat);
  if (!timing.ok()) return console.fail(timing.status(), Origin::kFile);
  // One more call, not timed, with the rows measured; its output has the same bits.
  std::vector<RowNumerics> rows(static_cast<std::size_t>(tokens));
  if (const Status status = forward(*layer, *input, *result, rows); !status.ok()) {
    return console.fail(status, Origin::kFile);
  }
  const NumericsSummary numerics = summarize(rows);
  const double bound = with_output_rounding(layer->activation_bound(), dtype);
  if (const std::string outside = numerics_warning(numerics, bound); !outside.empty()) {
    if (state.strict) {
      return console.fail({StatusCode::kUnsupported, "--strict: " + outside}, Origin::kFile,
                          fmt::format("nothing was written; without --strict the result is, with "
                                      "a warning; {}",
                                      kNumericsNextStep));
    }
    console.warn(fmt::format("{}\n  next: {}", outside, kNumericsNextStep));
  }
  if (const Status status = write_layer_output(written, *result); !status.ok()) {
    return console.fail(status, origin_of(written));
  }
  report(console, state, *layer, *result, *timing, numerics, bound);
  return kExitOk;
}

}  // namespace

Verb make_run(CLI::App& root) {
  auto state = std::make_shared<RunArguments>();
  CLI::App* app = add_verb(
      root, "run", "Run one MoE layer on hidden states from a file",
      "  moesaic run --model DIR --layer 3 --input states.safetensors --output out.safetensors\n"
      "  moesaic run --model testdata/models/mini-qwen3-moe --layer 1 \\\n"
      "      --input testdata/models/mini-qwen3-moe/golden.safetensors:model.layers.1.mlp.input "
      "\\\n"
      "      --output /tmp/out.safetensors --json\n"
      "  moesaic run ... --output - 2>report.txt | consumer\n"
      "  moesaic run ... --ranks 4                 four threads, experts and rows shared out\n"
      "  mpirun -n 4 moesaic run ... --tp 2        four processes, two engines of two ranks\n");
  app->add_option("--model", state->model,
                  "Folder with config.json and safetensors, or a GGUF file")
      ->required();
  add_layer_number(*app, state->layer, "Layer number, from 0 (see inspect)")->required();
  app->add_option("--input", state->input,
                  "FILE[:TENSOR] with hidden states [tokens, hidden], F32, BF16 or F16; the tensor "
                  "is hidden_states unless named")
      ->required();
  app->add_option("--output", state->output,
                  "File to write: output, topk_ids (I32), topk_weights (F32). - is stdout (the "
                  "report then goes to stderr); devices and pipes are written through, links "
                  "followed; an input or a file of the model is never overwritten")
      ->required();
  app->add_flag("--force", state->force,
                "Replace an existing file that is no result of run; write to a terminal");
  app->add_option("--output-dtype", state->output_dtype, "dtype of output")
      ->check(one_of({"f32", "bf16"}))
      ->capture_default_str();
  app->add_option("--repeat", state->repeat, "Timed calls; 0: at least 3 and about a second")
      ->check(whole_number(0, 1000000))
      ->capture_default_str();
  app->add_flag(
      "--strict", state->strict,
      "Refuse (exit 4, nothing written) when rows saturate, are flushed, are not finite or leave a "
      "larger rounding error than the scheme's bound is stated for");
  add_layer_options(*app, state->common);
  add_common_options(*app, state->common);
  add_rank_options(*app, state->ranks);
  add_balance_options(*app, state->ranks);
  return {app, [state] { return run_layer(*state); }};
}

}  // namespace moesaic::tool
