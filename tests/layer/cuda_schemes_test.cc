// A bf16 layer that a GPU quantises when it is made, to every scheme there is: as on the CPU, and
// over ranks as on one. Skipped, visibly, without a device.
#include <gtest/gtest.h>

#include <optional>
#include <string>
#include <vector>

#include "layer/cuda_rank_case.h"
#include "support/cuda_device.h"
#include "support/metrics.h"

namespace moesaic::test {
namespace {

struct SchemeChoice {
  std::string quant;
  std::optional<ScaleFormat> activation_scales;
};

// All schemes; of those whose activation scales can be chosen, the other choice too.
std::vector<SchemeChoice> every_scheme() {
  std::vector<SchemeChoice> all;
  for (const Scheme& s : quant_schemes()) {
    all.push_back({std::string(s.name), {}});
    for (const ScaleFormat format : {ScaleFormat::kF32, ScaleFormat::kE8M0}) {
      const auto other = with_activation_scales(s, format);
      if (other.ok() && other->activation.scale_format != s.activation.scale_format) {
        all.push_back({std::string(s.name), format});
      }
    }
  }
  return all;
}

MoeLayerSpec spec_for_schemes() {
  MoeLayerSpec spec = deepseek_like();
  spec.hidden_size = 256;
  spec.intermediate_size = spec.shared.intermediate_size = 128;
  return spec;
}

TEST(CudaSchemes, QuantisedWhenLoadedAsOnTheCpuAndOverRanks) {
  REQUIRE_HOPPER();
  const LayerTensors tensors = make_tensors(81, spec_for_schemes());
  int spread = 0;
  for (const SchemeChoice& choice : every_scheme()) {
    SCOPED_TRACE(choice.quant + (choice.activation_scales ? ", other activation scales" : ""));
    RankProblem problem;
    problem.make = maker_of(tensors);
    problem.options = on_gpu(7);
    problem.options.quant = choice.quant;
    problem.options.activation_scales = choice.activation_scales;
    problem.x = random_hidden(82, 19, tensors.spec.hidden_size);
    solve_on_one_rank(problem);
    FusedMoE::Options on_cpu = problem.options;
    on_cpu.device = Device::cpu();
    on_cpu.num_threads = 1;
    const FusedMoE cpu = problem.make(on_cpu).value();
    const Comparison one = compare(to_doubles(problem.want.view()),
                                   to_doubles(run_layer(cpu, problem.x).output.view()));
    EXPECT_LE(one.rel_l2, 2 * cpu.quant().output_bound) << one.describe;
    // Rows of other dtypes than bf16 do not travel between GPUs.
    if (choice.quant == "f32" || choice.quant == "f16") continue;
    problem.bound = 1e-6;
    for (const RankTransport transport :
         {RankTransport::kNone, RankTransport::kGather, RankTransport::kAllToAll}) {
      RankCombo combo;
      combo.ep = true;
      combo.transport = transport;
      (transport == RankTransport::kNone ? combo.tp : combo.dp) = 2;
      const std::vector<std::int64_t> tokens =
          combo.dp == 2 ? std::vector<std::int64_t>{15, 4} : std::vector<std::int64_t>{19};
      EXPECT_EQ(run_ranks(problem, combo, tokens), "") << combo.name();
      ++spread;
    }
  }
  EXPECT_GE(spread, 60);
}

}  // namespace
}  // namespace moesaic::test
