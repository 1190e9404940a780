// The layer on a GPU against the CPU's, the golden outputs and itself. Skipped, visibly, without a
// device.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <filesystem>
#include <string>
#include <vector>

#include "layer/golden_case.h"
#include "layer/layer_case.h"
#include "moesaic/fused_moe.h"
#include "numerics/float_codec.h"
#include "support/cuda_device.h"
#include "support/experts_run.h"
#include "support/metrics.h"
#include "support/random.h"

namespace moesaic {
namespace {

using test::compare;
using test::deepseek_like;
using test::expect_same_choice;
using test::Feature;
using test::Golden;
using test::GoldenCase;
using test::LayerRun;
using test::LayerTensors;
using test::make_layer;
using test::make_tensors;
using test::on_gpu;
using test::random_hidden;
using test::read_golden;
using test::run_layer;
using test::same_bits;
using test::scaled_output;
using test::small_spec;
using test::to_doubles;
using test::with_shared;

// --- Golden outputs ------------------------------------------------------------------------------

TEST(CudaLayerGolden, MatchesFloat64WithTheBoundsOfTheCpu) {
  REQUIRE_HOPPER();
  std::vector<GoldenCase> cases;
  for (const char* model : {"mini-qwen3-moe", "mini-deepseek-v3", "mini-gpt-oss"}) {
    cases.push_back({model, "as-is", 6e-3});
    cases.push_back({model, "fp8-block", 8.5e-2});
    cases.push_back({model, "fp8-channel", 8.5e-2});
  }
  for (const char* model : {"tiny-qwen3-moe", "tiny-deepseek-v3", "tiny-gpt-oss"}) {
    cases.push_back({model, "bf16", 6e-3, true});
  }
  cases.push_back({"tiny-deepseek-v3-fp8", "as-is", 6e-2, true});
  for (const GoldenCase& c : cases) {
    const std::string folder = c.folder();
    if (!std::filesystem::exists(folder + "/golden.safetensors")) {
      EXPECT_TRUE(c.is_extra) << "no " << folder;
      continue;
    }
    SCOPED_TRACE(c.model + " " + c.quant);
    const Checkpoint checkpoint = Checkpoint::open(folder).value();
    for (const Golden& g : read_golden(checkpoint, folder)) {
      FusedMoE::Options options = on_gpu(100);  // 256 tokens: two full chunks and a part
      options.quant = c.quant;
      const auto layer = FusedMoE::from_checkpoint(checkpoint, g.layer, options);
      ASSERT_TRUE(layer.ok()) << layer.status().to_string();
      EXPECT_EQ(layer->experts_backend(), "cuda_sm90");
      const LayerRun run = run_layer(*layer, g.input);
      const auto result = compare(to_doubles(run.output.view()), to_doubles(g.output.view()));
      EXPECT_LE(result.rel_l2, c.bound) << "layer " << g.layer << ": " << result.describe;
      EXPECT_LE(c.bound, layer->quant().output_bound * 1.02);
      if (g.ids.present()) expect_same_choice(run.topk_ids, g.ids);
    }
  }
}

// --- Against the CPU, feature by feature ---------------------------------------------------------

// Like a routed expert: joins them.
MoeLayerSpec joined_shared() {
  MoeLayerSpec spec = deepseek_like();
  spec.shared.intermediate_size = spec.intermediate_size;
  return spec;
}
MoeLayerSpec zero_experts() {
  MoeLayerSpec spec = small_spec();
  spec.routing.method = RoutingMethod::kZeroExpert;
  spec.routing.num_zero_experts = 4;
  spec.routing.has_correction_bias = true;
  spec.routing.routed_scaling_factor = 3;
  return spec;
}
MoeLayerSpec biased() {
  MoeLayerSpec spec = small_spec();
  spec.has_router_bias = spec.has_expert_bias = true;
  return spec;
}

std::vector<Feature> features() {
  std::vector<Feature> all = test::common_features();
  all.push_back({"scaled output", scaled_output});
  all.push_back({"joined shared", joined_shared});
  all.push_back({"zero experts", zero_experts});
  all.push_back({"biases", biased});
  return all;
}

// Where there is no device this at least shows that the cases are layers that compute.
TEST(CudaLayer, FeaturesRunOnTheCpu) {
  for (const Feature& f : features()) {
    SCOPED_TRACE(f.name);
    const LayerTensors t = make_tensors(3, f.spec());
    FusedMoE::Options wide;
    wide.quant = "f32";
    const Tensor x = random_hidden(4, 3, t.spec.hidden_size);
    const FusedMoE layer = make_layer(t);
    const LayerRun run = run_layer(layer, x), truth = run_layer(make_layer(t, wide), x);
    const auto result = compare(to_doubles(run.output.view()), to_doubles(truth.output.view()));
    EXPECT_LE(result.rel_l2, layer.quant().output_bound) << result.describe;
    EXPECT_TRUE(explain_layer(t.spec, on_gpu()).ok())
        << explain_layer(t.spec, on_gpu()).status().to_string();
  }
}

TEST(CudaLayer, AgreesWithTheFloat64OracleFeatureByFeature) {
  REQUIRE_HOPPER();
  for (const Feature& f : features()) {
    SCOPED_TRACE(f.name);
    const LayerTensors t = make_tensors(3, f.spec());
    const FusedMoE gpu = make_layer(t, on_gpu(40)), cpu = make_layer(t);
    for (const DType dtype : {DType::kBF16, DType::kF32, DType::kF16}) {
      const Tensor x = random_hidden(4, 70, t.spec.hidden_size, dtype);
      const LayerRun got = run_layer(gpu, x), want = run_layer(cpu, x);
      std::string why;
      EXPECT_TRUE(same_bits(got.topk_ids.view(), want.topk_ids.view(), &why)) << why;
      EXPECT_LE(compare(to_doubles(got.logits.view()), to_doubles(want.logits.view())).rel_l2,
                1e-6);
      const auto result = compare(to_doubles(got.output.view()), to_doubles(want.output.view()));
      EXPECT_LE(result.rel_l2, 2 * gpu.quant().output_bound) << result.describe;
      EXPECT_GT(result.rel_l2, 0) << "the CPU's own output?";
      if (t.spec.routing.num_zero_experts > 0 || dtype != DType::kBF16) continue;
      const auto truth = test::layer_oracle(
          t, x, got, t.spec.routing.scale_on_output ? t.spec.routing.routed_scaling_factor : 1.0);
      EXPECT_LE(compare(to_doubles(got.output.view()), truth).rel_l2, gpu.quant().output_bound);
    }
  }
}

// What rounding did to rows: hidden states have the CPU's codes, the intermediate's error is taken
// from its codes.
TEST(CudaLayer, SaysOfRowsWhatTheCpuSays) {
  REQUIRE_HOPPER();
  for (const Feature& f : features()) {
    for (const char* quant : {"bf16", "fp8-block"}) {
      SCOPED_TRACE(f.name + std::string(" ") + quant);
      MoeLayerSpec spec = f.spec();
      if (quant == std::string("fp8-block")) {  // whole blocks
        spec.hidden_size = 256, spec.intermediate_size = 128;
        if (spec.shared.intermediate_size > 0) spec.shared.intermediate_size = 128;
      }
      const LayerTensors t = make_tensors(3, spec);
      FusedMoE::Options on_cpu, options = on_gpu(40);
      on_cpu.quant = options.quant = quant;
      const FusedMoE gpu = make_layer(t, options), cpu = make_layer(t, on_cpu);
      for (const double scale : {1.0, 100.0, 1e-6}) {
        const Tensor x = test::random_hidden(4, 70, t.spec.hidden_size);
        for (std::int64_t i = 0; i < x.bytes() / 2; ++i) {
          const float v = f32_from_bf16(x.as<std::uint16_t>()[i]);
          const bool outlier = i % t.spec.hidden_size == 5 && scale > 1;
          if (outlier || scale < 1) {
            const_cast<std::uint16_t*>(x.as<std::uint16_t>())[i] =
                bf16_from_f32(v * static_cast<float>(scale));
          }
        }
        const LayerRun plain = run_layer(gpu, x);
        std::vector<RowNumerics> got(70), want(70);
        FusedMoE::Trace trace;
        Tensor y = Tensor::zeros(DType::kF32, x.shape()).value();
        trace.numerics = got;
        const Status measured = gpu.forward(x.view(), y.view(), trace);
        ASSERT_TRUE(measured.ok()) << measured.to_string();
        std::string why;
        EXPECT_TRUE(same_bits(y.view(), plain.output.view(), &why)) << why;
        trace.numerics = want;
        ASSERT_TRUE(cpu.forward(x.view(), y.view(), trace).ok());
        const NumericsSummary of_gpu = summarize(got), of_cpu = summarize(want);
        EXPECT_EQ(of_gpu.rows, 70);
        // Where one outlier dominates, its code's step says less of its error: measured up to 0.23.
        EXPECT_NEAR(of_gpu.error_estimate(), of_cpu.error_estimate(),
                    0.3 * of_cpu.error_estimate());
        EXPECT_NEAR(std::sqrt(of_gpu.size), std::sqrt(of_cpu.size), 0.1 * std::sqrt(of_cpu.size));
        EXPECT_EQ(of_gpu.flushed, of_cpu.flushed) << scale;
        EXPECT_EQ(of_gpu.saturated, 0);
        EXPECT_NEAR(static_cast<double>(of_gpu.outside), static_cast<double>(of_cpu.outside), 4.0);
      }
    }
  }
}

// What a static scale cuts off is not in the workspace any more: it counts all the same.
TEST(CudaLayer, ValuesBeyondAStaticScaleAreSaid) {
  REQUIRE_HOPPER();
  for (const char* quant : {"fp8-static", "int4-fp8-static", "nvfp4"}) {
    for (const ActivationKind kind : {ActivationKind::kSilu, ActivationKind::kRelu2NoMul}) {
      MoeLayerSpec spec = test::small_spec();
      spec.hidden_size = 256;
      spec.intermediate_size = 512;
      spec.activation.kind = kind;
      spec.quant = test::scheme_called(quant);
      const LayerTensors t = make_tensors(41, spec);
      const FusedMoE gpu = make_layer(t, on_gpu(64));
      const FusedMoE cpu = make_layer(t, FusedMoE::Options());
      SCOPED_TRACE(testing::Message() << quant << ' ' << activation_name(kind));
      const Tensor x = test::random_hidden(42, 70, spec.hidden_size);
      for (std::int64_t i = 0; i < x.bytes() / 2; ++i) {  // twice what scales were made for
        const float v = f32_from_bf16(x.as<std::uint16_t>()[i]);
        const_cast<std::uint16_t*>(x.as<std::uint16_t>())[i] = bf16_from_f32(2 * v);
      }
      std::vector<RowNumerics> got(70), want(70);
      FusedMoE::Trace trace;
      Tensor y = Tensor::zeros(DType::kF32, x.shape()).value();
      trace.numerics = want;
      ASSERT_TRUE(cpu.forward(x.view(), y.view(), trace).ok());
      trace.numerics = got;
      ASSERT_TRUE(gpu.forward(x.view(), y.view(), trace).ok());
      const NumericsSummary of_gpu = summarize(got), of_cpu = summarize(want);
      EXPECT_GE(of_gpu.saturated, of_cpu.saturated);
      EXPECT_GE(of_gpu.error_estimate(), 0.5 * of_cpu.error_estimate());
      const auto off =
          test::compare(test::to_doubles(y.view()), test::layer_oracle(t, x, run_layer(gpu, x)));
      EXPECT_LE(off.rel_l2,
                1.1 * computed_bound(gpu.quant().output_bound, gpu.activation_bound(), of_gpu))
          << off.describe;
    }
  }
}

TEST(CudaLayer, ARowAloneHasTheBitsItHasInABatchAndBf16IsTheRoundedF32) {
  REQUIRE_HOPPER();
  for (const Feature& f : features()) {
    SCOPED_TRACE(f.name);
    const LayerTensors t = make_tensors(5, f.spec());
    const FusedMoE layer = make_layer(t, on_gpu(300));
    const std::int64_t hidden = t.spec.hidden_size;
    const Tensor x = random_hidden(6, 300, hidden);
    const LayerRun batch = run_layer(layer, x), rounded = run_layer(layer, x, DType::kBF16);
    for (std::int64_t i = 0; i < 300 * hidden; ++i) {
      ASSERT_EQ(rounded.output.as<std::uint16_t>()[i], bf16_from_f32(batch.output.as<float>()[i]))
          << i;
    }
    for (const std::int64_t row : {0, 17, 299}) {
      Tensor one = Tensor::zeros(DType::kBF16, {1, hidden}).value();
      std::memcpy(one.data(), x.data() + row * hidden * 2, static_cast<std::size_t>(hidden) * 2);
      const LayerRun alone = run_layer(layer, one);
      EXPECT_EQ(std::memcmp(alone.output.data(), batch.output.data() + row * hidden * 4,
                            static_cast<std::size_t>(hidden) * 4),
                0)
          << "row " << row;
    }
  }
}

// Up to 32 pairs the GEMM kernel makes the work list itself and the router's kernel quantises; one
// row's bands are halved between two multiprocessors. 384 rows of w2 are three slabs: one halved
// band has nothing for the second.
TEST(CudaLayer, FewRowsHaveTheBitsTheyHaveAmongMany) {
  REQUIRE_HOPPER();
  struct Kind {
    const char *quant, *activation;
  };
  for (const auto& [quant, activation] :
       {Kind{"bf16", "silu"}, Kind{"fp8-block", "silu"}, Kind{"fp8-block", "gelu_tanh"},
        Kind{"bf16", "relu2"}, Kind{"fp8-channel", "relu2"}}) {
    for (const bool shared : {false, true}) {
      MoeLayerSpec spec = small_spec();
      spec.hidden_size = spec.intermediate_size = 384;
      spec.activation = make_activation(activation).value();
      if (shared) spec.shared.intermediate_size = 384;
      const LayerTensors t = make_tensors(23, spec);
      FusedMoE::Options options = on_gpu(64);
      options.quant = quant;
      const FusedMoE layer = make_layer(t, options);
      const Tensor x = random_hidden(24, 64, 384);
      for (const DType dtype : {DType::kF32, DType::kBF16}) {
        const LayerRun many = run_layer(layer, x, dtype);
        const std::int64_t bytes = 384 * (dtype_bits(dtype) / 8);
        for (const std::int64_t rows : {1, 2, 3, 5, 10, 16}) {
          Tensor few = Tensor::zeros(DType::kBF16, {rows, 384}).value();
          std::memcpy(few.data(), x.data() + 20 * 768, static_cast<std::size_t>(few.bytes()));
          const LayerRun run = run_layer(layer, few, dtype);
          EXPECT_EQ(std::memcmp(run.output.data(), many.output.data() + 20 * bytes,
                                static_cast<std::size_t>(rows * bytes)),
                    0)
              << quant << ' ' << activation << (shared ? " shared " : " ") << rows << " rows";
        }
      }
    }
  }
}

// Up to four rows are routed inside the GEMM kernel: ids and weights have the bits that the
// router's kernel gives them among many rows.
TEST(CudaLayer, FewRowsAreRoutedAsManyAre) {
  REQUIRE_HOPPER();
  struct Case {
    std::int64_t experts, top_k, groups, topk_group;
    ScoringFunc scoring;
    bool bias, renormalize, shared;
  };
  constexpr ScoringFunc kSoftmax = ScoringFunc::kSoftmax, kSigmoid = ScoringFunc::kSigmoid;
  for (const Case& c : {Case{128, 8, 0, 0, kSoftmax, false, true, false},
                        Case{100, 6, 0, 0, kSoftmax, false, false, false},
                        Case{8, 8, 0, 0, kSigmoid, true, true, false},
                        Case{384, 7, 0, 0, kSigmoid, true, true, true},
                        Case{512, 10, 0, 0, kSoftmax, false, true, false},
                        Case{512, 9, 0, 0, kSigmoid, true, true, true},
                        Case{512, 8, 8, 4, kSigmoid, true, true, false},
                        Case{256, 8, 8, 4, kSigmoid, true, true, false},
                        Case{256, 7, 8, 4, kSigmoid, true, true, true},
                        Case{160, 6, 8, 3, kSoftmax, false, false, false}}) {
    MoeLayerSpec spec = small_spec();
    spec.num_experts = spec.routing.num_experts = c.experts;
    spec.routing.top_k = c.top_k;
    spec.routing.scoring_func = c.scoring;
    spec.routing.renormalize = c.renormalize;
    spec.routing.has_correction_bias = c.bias;
    if (c.groups > 0) {
      spec.routing.method = RoutingMethod::kGroupedTopK;
      spec.routing.num_expert_group = c.groups;
      spec.routing.topk_group = c.topk_group;
    }
    if (c.shared) spec.shared.intermediate_size = spec.intermediate_size;
    // Decoded weights have more warps, which three rows do not share evenly.
    for (const char* quant : {"as-is", "mxfp4-bf16"}) {
      FusedMoE::Options options = on_gpu(64);
      options.quant = quant;
      const FusedMoE layer = make_layer(make_tensors(25, spec), options);
      Tensor x = random_hidden(26, 64, spec.hidden_size);
      const auto row = [&](std::int64_t r) {
        return reinterpret_cast<std::uint16_t*>(x.data()) + r * spec.hidden_size;
      };
      std::fill_n(row(33), spec.hidden_size, std::uint16_t{0});  // all logits equal
      row(34)[3] = 0x7FC0;                                       // NaN
      row(35)[5] = 0x7F80;                                       // infinities of both signs
      const LayerRun many = run_layer(layer, x);
      for (const std::int64_t rows : {1, 2, 3, 4}) {
        for (std::int64_t first = 30; first < 38; ++first) {
          Tensor few = Tensor::zeros(DType::kBF16, {rows, spec.hidden_size}).value();
          std::memcpy(few.data(), row(first), static_cast<std::size_t>(few.bytes()));
          const LayerRun run = run_layer(layer, few);
          const auto expect_same = [&](const Tensor& got, const Tensor& all, const char* what) {
            const std::int64_t bytes = got.bytes() / rows;
            EXPECT_EQ(std::memcmp(got.data(), all.data() + first * bytes,
                                  static_cast<std::size_t>(got.bytes())),
                      0)
                << quant << ": " << what << ": " << c.experts << " experts, " << c.groups
                << " groups, rows " << first << " + " << rows;
          };
          expect_same(run.topk_ids, many.topk_ids, "ids");
          expect_same(run.topk_weights, many.topk_weights, "weights");
          if (first + rows <= 34 || first > 35) expect_same(run.output, many.output, "output");
        }
      }
    }
  }
}

// Few rows take the shared expert as one more slot, many run it by itself.
TEST(CudaLayer, AJoinedSharedExpertHasTheBitsOfASeparateOne) {
  REQUIRE_HOPPER();
  MoeLayerSpec spec = joined_shared();
  spec.hidden_size = 256;  // fp8-block needs multiples of 128
  spec.intermediate_size = spec.shared.intermediate_size = 128;
  const LayerTensors t = make_tensors(21, spec);
  constexpr std::int64_t kRows = 4100;
  for (const char* quant : {"bf16", "fp8-block"}) {
    SCOPED_TRACE(quant);
    FusedMoE::Options options = on_gpu(kRows);
    options.quant = quant;
    const FusedMoE layer = make_layer(t, options);
    const std::int64_t hidden = t.spec.hidden_size;
    const Tensor x = random_hidden(22, kRows, hidden);
    for (const DType dtype : {DType::kF32, DType::kBF16}) {
      const LayerRun many = run_layer(layer, x, dtype);
      const std::int64_t bytes = hidden * (dtype_bits(dtype) / 8);
      Tensor few = Tensor::zeros(DType::kBF16, {50, hidden}).value();
      std::memcpy(few.data(), x.data() + 4000 * hidden * 2, static_cast<std::size_t>(few.bytes()));
      const LayerRun joined = run_layer(layer, few, dtype);
      EXPECT_EQ(std::memcmp(joined.output.data(), many.output.data() + 4000 * bytes,
                            static_cast<std::size_t>(50 * bytes)),
                0);
      const std::int64_t k = t.spec.routing.top_k;
      EXPECT_EQ(std::memcmp(joined.topk_ids.data(), many.topk_ids.data() + 4000 * k * 4,
                            static_cast<std::size_t>(50 * k * 4)),
                0);
    }
  }
}

// A shared expert by itself writes its rows straight into the output (or beside it) and shares its
// quantised rows with the routed experts, in either order.
TEST(CudaLayer, ASharedExpertByItselfInFp8AgreesWithTheCpu) {
  REQUIRE_HOPPER();
  for (MoeLayerSpec spec : {with_shared(false), with_shared(true), scaled_output()}) {
    spec.hidden_size = spec.shared.intermediate_size = 256;
    spec.intermediate_size = 128;
    const LayerTensors t = make_tensors(25, spec);
    FusedMoE::Options options = on_gpu(300), on_cpu;
    options.quant = on_cpu.quant = "fp8-block";
    const FusedMoE gpu = make_layer(t, options), cpu = make_layer(t, on_cpu);
    for (const std::int64_t rows : {1, 20, 300}) {
      SCOPED_TRACE(rows);
      const Tensor x = random_hidden(26, rows, spec.hidden_size);
      const auto want = to_doubles(run_layer(cpu, x).output.view());
      const auto got = to_doubles(run_layer(gpu, x, DType::kF32).output.view());
      // The same codes; what is left is the rounding of rows to bf16 before they are added.
      EXPECT_LE(compare(got, want).rel_l2, 1e-2) << compare(got, want).describe;
      const auto rounded = to_doubles(run_layer(gpu, x, DType::kBF16).output.view());
      EXPECT_LE(compare(rounded, got).rel_l2, 4e-3) << compare(rounded, got).describe;
    }
  }
}

TEST(CudaLayer, PartialResultsOfRanksAddUp) {
  REQUIRE_HOPPER();
  const Checkpoint checkpoint = Checkpoint::open(test::bundled_model("mini-deepseek-v3")).value();
  const MoeLayerSpec spec = checkpoint.layers().front();
  const Tensor hidden = random_hidden(9, 20, spec.hidden_size);
  const auto whole = to_doubles(
      run_layer(FusedMoE::from_checkpoint(checkpoint, spec.layer, on_gpu()).value(), hidden)
          .output.view());
  std::vector<double> sum(whole.size());
  for (int rank = 0; rank < 3; ++rank) {
    FusedMoE::Options options = on_gpu();
    options.parallel.ep_size = 3;
    options.parallel.ep_rank = rank;
    const auto part = to_doubles(
        run_layer(FusedMoE::from_checkpoint(checkpoint, spec.layer, options).value(), hidden)
            .output.view());
    for (std::size_t i = 0; i < sum.size(); ++i) sum[i] += part[i];
  }
  EXPECT_LE(compare(sum, whole).rel_l2, 1e-6);
}

}  // namespace
}  // namespace moesaic
