// moesaic demo: bundled checkpoints in one screen: what the layer is, how tokens spread over the
// experts, how far the result is from float64, how fast it is compared with what the machine
// allows.
#include <fmt/format.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <vector>

#include "chart.h"
#include "cpu/ceilings.h"
#include "cpu/tiers.h"
#include "golden.h"
#include "layer_io.h"
#include "spec_text.h"
#include "verbs.h"

namespace moesaic::tool {
namespace {

struct DemoArguments {
  CommonOptions common;
  std::vector<std::string> directories;
};

// What the layer must at least do for these tokens: read every weight once, and multiply.
struct Work {
  double bytes = 0, flops = 0;

  double floor_us(const cpu::Ceilings& ceilings) const {
    return std::max(bytes / (ceilings.read_gbps * 1e3), flops / (ceilings.gflops * 1e3));
  }
};

Work work_of(const FusedMoE& layer, std::int64_t tokens) {
  const MoeLayerSpec& spec = layer.spec();
  const auto hidden = static_cast<double>(spec.hidden_size);
  const double matrices = is_gated(spec.activation.kind) ? 3 : 2;
  const double columns_per_token =
      matrices * (static_cast<double>(spec.routing.top_k * spec.intermediate_size) +
                  static_cast<double>(spec.shared.intermediate_size)) +
      static_cast<double>(spec.num_experts);
  Work work;
  work.flops = 2 * static_cast<double>(tokens) * hidden * columns_per_token;
  // Hidden states are read as BF16 and written as F32.
  work.bytes = static_cast<double>(layer.weight_bytes()) + static_cast<double>(tokens) * hidden * 6;
  return work;
}

struct Shown {
  std::string name;
  MoeLayerSpec spec;
  LayerReport as_is, f32;
  std::vector<std::int64_t> load;
  Timing timing;
  Work work;

  double floor_pct(const cpu::Ceilings& ceilings) const {
    return 100 * work.floor_us(ceilings) / timing.median_us;
  }
};

Result<Shown> show(const std::string& directory, const DemoArguments& state, Origin& origin) {
  origin = Origin::kFile;
  Shown shown;
  shown.name = name_of_path(directory);
  MOESAIC_ASSIGN_OR_RETURN(const Checkpoint checkpoint, Checkpoint::open(directory));
  MOESAIC_ASSIGN_OR_RETURN(const TensorFile golden, TensorFile::open(golden_beside(directory)));
  MOESAIC_ASSIGN_OR_RETURN(const std::vector<GoldenBlock> blocks, golden_blocks(golden));
  const GoldenBlock& block = blocks.front();
  MOESAIC_ASSIGN_OR_RETURN(shown.spec, checkpoint.layer(block.layer));

  FusedMoE::Options options = layer_options(state.common, kMaxTokensPerCall);
  options.device = Device::cpu();  // check_cpu
  const std::optional<ScaleFormat> asked = options.activation_scales;
  MOESAIC_ASSIGN_OR_RETURN(shown.as_is,
                           verify_block(checkpoint, directory, golden, block, options, origin));
  options.quant = "f32";
  options.activation_scales.reset();  // f32 has none
  MOESAIC_ASSIGN_OR_RETURN(shown.f32,
                           verify_block(checkpoint, directory, golden, block, options, origin));

  options.quant = state.common.quant;
  options.activation_scales = asked;
  MOESAIC_ASSIGN_OR_RETURN(const FusedMoE layer,
                           FusedMoE::from_checkpoint(checkpoint, block.layer, options));
  MOESAIC_ASSIGN_OR_RETURN(const Tensor input, read_hidden_states(golden, block.prefix + ".input",
                                                                  shown.spec.hidden_size));
  MOESAIC_ASSIGN_OR_RETURN(LayerOutput output,
                           make_layer_output(shown.spec, input.shape()[0], DType::kF32));
  MOESAIC_ASSIGN_OR_RETURN(shown.timing, time_forward(layer, input, output, 0));
  shown.load = expert_load(output, shown.spec);
  shown.work = work_of(layer, input.shape()[0]);
  return shown;
}

std::string arithmetic(const LayerReport& report) {
  return fmt::format("{} {:.1e} (bound {:.0e}{})", report.quant, report.rel_l2, report.bound,
                     report.pass ? "" : ", FAILED");
}

void print(const Console& console, const Shown& shown, const cpu::Ceilings& ceilings) {
  const auto tokens = static_cast<double>(shown.as_is.tokens);
  console.print(fmt::format("{}: {}\n  layer  {}\n", shown.name, describe_name(shown.spec),
                            describe_sizes(shown.spec)));
  console.print(column_chart(shown.load, 3, "  load   "));
  console.print(fmt::format("  error  {}, {}; tokens misrouted: {} of {}\n",
                            arithmetic(shown.as_is), arithmetic(shown.f32),
                            shown.as_is.topk_mismatches, shown.as_is.tokens));
  console.print(fmt::format("  speed  {} per token, {:.0f} % of this machine's floor ({})\n\n",
                            format_us(shown.timing.median_us / tokens), shown.floor_pct(ceilings),
                            shown.as_is.backend));
}

Json shown_json(const Shown& shown, const cpu::Ceilings& ceilings) {
  return {
      {"name", shown.name},
      {"layer", describe(shown.spec)},
      {"tokens", shown.as_is.tokens},
      {"expert_load", shown.load},
      {"rel_l2", finite(shown.as_is.rel_l2)},
      {"bound", finite(shown.as_is.bound)},
      {"rel_l2_f32", finite(shown.f32.rel_l2)},
      {"topk_mismatches", shown.as_is.topk_mismatches},
      {"us_per_token", finite(shown.timing.median_us / static_cast<double>(shown.as_is.tokens))},
      {"floor_pct", finite(shown.floor_pct(ceilings))},
      {"backend", shown.as_is.backend},
      {"pass", shown.as_is.pass && shown.f32.pass}};
}

// The best of several measurements, at both ends of the demo: another program's load lowers each.
Status measure(const DemoArguments& state, cpu::Ceilings& best) {
  MOESAIC_ASSIGN_OR_RETURN(const cpu::CpuKernels* kernels, cpu::current_kernels());
  // The bundled checkpoints are BF16: their peak is that of the operand which the tier uses for it.
  MOESAIC_ASSIGN_OR_RETURN(
      const cpu::Ceilings now,
      cpu::measure_ceilings(*kernels, kernels->narrow_operand, state.common.threads));
  best.read_gbps = std::max(best.read_gbps, now.read_gbps);
  best.gflops = std::max(best.gflops, now.gflops);
  return {};
}

// The table quotes the CPU's ceilings.
Status check_cpu(const CommonOptions& options) {
  MOESAIC_RETURN_IF_ERROR(check_common_options(options, /*needs_device=*/false));
  if (options.device.empty() || !chosen_device(options).is_cuda()) return {};
  return {StatusCode::kUnsupported,
          fmt::format("--device: got {}, demo computes on the CPU; need cpu, or verify and bench",
                      options.device)};
}

int run_demo(const DemoArguments& state) {
  const Console console = state.common.console();
  Status status = check_cpu(state.common);
  cpu::Ceilings ceilings;
  if (status.ok()) status = measure(state, ceilings);
  if (!status.ok()) return console.fail(status, Origin::kOption);
  std::vector<Shown> all;
  for (const std::string& directory : state.directories) {
    Origin origin = Origin::kFile;
    Result<Shown> shown = show(directory, state, origin);
    if (!shown.ok()) return console.fail(shown.status().with_context(directory), origin);
    all.push_back(std::move(shown).value());
  }
  status = measure(state, ceilings);
  if (!status.ok()) return console.fail(status, Origin::kOption);

  bool pass = true;
  Json checkpoints = Json::array();
  console.print(fmt::format(
      "Trained mixture-of-experts layers on the real hidden states of a text.\n"
      "load: tokens per expert; error: relative L2 against float64, computed by another program;\n"
      "floor: the time to read the weights at {:.3g} GB/s or to compute at {:.3g} GFLOP/s, "
      "measured "
      "now.\n\n",
      ceilings.read_gbps, ceilings.gflops));
  for (const Shown& shown : all) {
    print(console, shown, ceilings);
    checkpoints.push_back(shown_json(shown, ceilings));
    pass = pass && shown.as_is.pass && shown.f32.pass;
  }
  console.emit({{"checkpoints", std::move(checkpoints)},
                {"ceilings",
                 {{"read_gbps", finite(ceilings.read_gbps)}, {"gflops", finite(ceilings.gflops)}}},
                {"pass", pass}});
  console.print(pass ? "Every layer is within its stated bound. Next: moesaic --help, README.md\n"
                     : "A layer is OUTSIDE its stated bound.\n");
  return pass ? kExitOk : kExitVerifyFailed;
}

}  // namespace

Verb make_demo(CLI::App& root) {
  auto state = std::make_shared<DemoArguments>();
  CLI::App* app =
      add_verb(root, "demo", "Show checkpoints that have a golden file in one screen",
               "  moesaic demo testdata/models/mini-deepseek-v3 testdata/models/mini-gpt-oss\n");
  app->add_option("DIR", state->directories, "Checkpoint folders with a golden.safetensors")
      ->required();
  add_layer_options(*app, state->common);
  add_common_options(*app, state->common);
  app->get_option("--device")->description("cpu, where demo computes");
  return {app, [state] { return run_demo(*state); }};
}

}  // namespace moesaic::tool
