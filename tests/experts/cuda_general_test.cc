// The experts of a GPU that take every size, against the CPU reference and the float64 oracle. What
// needs a device is skipped, visibly, without one.
#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <utility>
#include <vector>

#include "experts/cuda_general/gpu_backends.h"
#include "numerics/element.h"
#include "support/cuda_device.h"
#include "support/experts_run.h"
#include "support/metrics.h"
#include "support/random.h"

namespace moesaic {
namespace {

using cuda::CudaExpertsArgs;
using cuda::CudaResult;
using cuda::CudaRows;
using cuda::GpuExperts;
using test::DeviceBytes;
using test::Rng;
using test::StandardCase;

constexpr const char* kGeneralName = "cuda_general";

std::unique_ptr<GpuExperts> create_general(const StandardCase& c,
                                           std::string_view name = kGeneralName) {
  const auto source = make_stacked_source(c.weights.view());
  auto made = cuda::choose_gpu_backend(c.problem, name).value()->create(c.problem, *source, 0);
  EXPECT_TRUE(made.ok()) << made.status().to_string();
  return std::move(made).value();
}

// A call with its tensors on the device; nothing is written outside of the workspace.
Tensor run_general_on(const GpuExperts& experts, const StandardCase& c, DType dtype = DType::kF32,
                      bool slots = false) {
  const std::int64_t tokens = c.hidden_states.shape()[0];
  const std::int64_t bytes = cuda::choose_gpu_backend(c.problem, experts.name())
                                 .value()
                                 ->workspace_size(c.problem, tokens)
                                 .value();
  const DeviceBytes x(c.hidden_states.data(), c.hidden_states.bytes());
  const DeviceBytes ids(c.routing.ids.data(), c.routing.ids.bytes());
  const DeviceBytes weights(c.routing.weights.data(), c.routing.weights.bytes());
  const DeviceBytes map(c.expert_map.data(), static_cast<std::int64_t>(c.expert_map.size() * 4));
  const DeviceBytes workspace(bytes);
  const std::int64_t rows = slots ? tokens * c.problem.top_k : tokens;
  Tensor host = Tensor::uninitialized(dtype, {rows, c.problem.hidden_size}).value();
  const DeviceBytes out(host.bytes());
  CudaExpertsArgs a;
  a.tokens = tokens;
  a.rows = CudaRows::values(x.as(), c.hidden_states.dtype());
  a.topk_ids = ids.as<std::int32_t>();
  a.topk_weights = weights.as<float>();
  a.expert_map = c.expert_map.empty() ? nullptr : map.as<std::int32_t>();
  a.result = slots ? CudaResult::slots(out.as(), dtype) : CudaResult::sum(out.as(), dtype);
  a.workspace = workspace.as();
  a.workspace_bytes = bytes;
  const Status status = experts.enqueue(nullptr, a);
  EXPECT_TRUE(status.ok()) << status.to_string();
  EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  EXPECT_TRUE(workspace.margin_is_intact() && out.margin_is_intact());
  out.download(host.data());
  return host;
}
Tensor run_general(const StandardCase& c, DType dtype = DType::kF32) {
  return run_general_on(*create_general(c), c, dtype);
}

MoeProblem general_problem(std::string_view quant, std::string_view activation, std::int64_t hidden,
                           std::int64_t intermediate, std::int64_t top_k) {
  MoeProblem p = test::small_problem(quant);
  p.top_k = top_k;
  p.hidden_size = hidden;
  p.intermediate_size = intermediate;
  ActivationParams params;
  if (activation == "situ") params.beta = 4.0F;
  p.activation = make_activation(activation, params).value();
  return p;
}

DType rows_of(std::string_view quant) {
  return quant == "f32" ? DType::kF32 : quant == "f16" ? DType::kF16 : DType::kBF16;
}

// --- Exact ----------------------------------------------------------------------------------------

void fill_units(Rng& rng, Tensor& t, std::int64_t columns, int count) {
  const std::int64_t rows = t.shape().num_elements().value() / columns;
  std::memset(t.data(), 0, static_cast<std::size_t>(t.bytes()));
  for (std::int64_t i = 0; i < rows * count; ++i) {
    store_from_f32(t.data(), t.dtype(), i / count * columns + rng.integer(0, columns - 1),
                   rng.integer(0, 1) == 0 ? 1.0F : -1.0F);
  }
}

// Small integers throughout, and powers of two as router weights: no sum or product rounds.
StandardCase odd_exact_case(std::string_view quant, std::int64_t hidden, std::int64_t intermediate,
                            std::int64_t tokens, std::int64_t top_k) {
  MoeProblem p = general_problem(quant, "relu2_no_mul", hidden, intermediate, top_k);
  p.has_expert_bias = true;
  StandardCase c = test::make_case(11, p, tokens, rows_of(quant), 0.1);
  Rng rng(12);
  fill_units(rng, c.weights.w13, hidden, 5);
  fill_units(rng, c.weights.w2, intermediate, 3);
  for (Tensor* bias : {&c.weights.w13_bias, &c.weights.w2_bias}) {
    for (std::int64_t i = 0; i < bias->bytes() / 4; ++i) {
      bias->as<float>()[i] = static_cast<float>(rng.integer(-2, 2));
    }
  }
  for (std::int64_t i = 0; i < tokens * hidden; ++i) {
    store_from_f32(c.hidden_states.data(), c.hidden_states.dtype(), i,
                   static_cast<float>(rng.integer(-1, 1)));
  }
  for (std::int64_t i = 0; i < c.routing.weights.bytes() / 4; ++i) {
    c.routing.weights.as<float>()[i] = std::ldexp(1.0F, static_cast<int>(rng.integer(-2, 0)));
  }
  return c;
}

// Odd sizes in every direction, one row to many, experts that are elsewhere.
TEST(CudaGeneralExact, EqualsTheReferenceByBits) {
  REQUIRE_HOPPER();
  for (const char* quant : {"bf16", "f16", "f32"}) {
    for (const auto& [hidden, inner] : std::vector<std::pair<std::int64_t, std::int64_t>>{
             {97, 61}, {100, 180}, {1, 1}, {261, 129}}) {
      for (const std::int64_t tokens : {1, 9, 150, 300}) {
        SCOPED_TRACE(testing::Message() << quant << ' ' << hidden << 'x' << inner << ' ' << tokens);
        StandardCase c = odd_exact_case(quant, hidden, inner, tokens, 3);
        c.expert_map = {0, 1, -1, 3, 4, 5};
        const Tensor want = run_standard(*test::make_backend("cpu_reference", c), c);
        std::string why;
        EXPECT_TRUE(test::same_bits(run_general(c).view(), want.view(), &why)) << why;
      }
    }
  }
}

TEST(CudaGeneralExact, EveryOutputDTypeIsTheRoundedSum) {
  REQUIRE_HOPPER();
  const StandardCase c =
      test::make_case(13, general_problem("f16", "silu", 75, 33, 2), 20, DType::kF16);
  const auto experts = create_general(c);
  const Tensor wide = run_general_on(*experts, c);
  for (const DType dtype : {DType::kBF16, DType::kF16}) {
    const Tensor got = run_general_on(*experts, c, dtype);
    Tensor want = Tensor::zeros(dtype, wide.shape()).value();
    for (std::int64_t i = 0; i < 20 * 75; ++i) {
      store_from_f32(want.data(), dtype, i, wide.as<float>()[i]);
    }
    std::string why;
    EXPECT_TRUE(test::same_bits(got.view(), want.view(), &why)) << dtype_name(dtype) << why;
  }
}

// --- Bounds ---------------------------------------------------------------------------------------

double error_of_general(const StandardCase& c) {
  return test::compare(test::to_doubles(run_general(c).view()), c.oracle(true)).rel_l2;
}
// Against float64 sums over the same rounded operands: fp32 sums, and an intermediate that lands on
// the other side of a rounding boundary now and then.
double bound_of_general(std::string_view quant) {
  return quant == "f32" ? 1e-6 : quant == "f16" ? 0x1p-11 : quant == "fp8-block" ? 0x1p-6 : 0x1p-9;
}

TEST(CudaGeneralBound, EveryActivation) {
  REQUIRE_HOPPER();
  for (const char* quant : {"f32", "f16", "bf16", "fp8-block"}) {
    const bool fp8 = std::string_view(quant) == "fp8-block";
    for (const char* activation :
         {"silu", "gelu", "gelu_tanh", "swigluoai", "swiglustep", "situ", "silu_no_mul",
          "gelu_no_mul", "gelu_tanh_no_mul", "relu2_no_mul"}) {
      SCOPED_TRACE(testing::Message() << quant << ' ' << activation);
      MoeProblem p = general_problem(quant, activation, fp8 ? 200 : 101, fp8 ? 130 : 77, 2);
      p.has_expert_bias = true;
      EXPECT_LT(error_of_general(test::make_case(21, p, 20, rows_of(quant))),
                bound_of_general(quant));
    }
  }
}

TEST(CudaGeneralBound, LongRowsAndManyTokens) {
  REQUIRE_HOPPER();
  for (const char* quant : {"f32", "f16", "bf16", "fp8-block"}) {
    for (const std::int64_t tokens : {1, 200}) {  // groups of few rows and of many
      SCOPED_TRACE(testing::Message() << quant << ' ' << tokens);
      const MoeProblem p = general_problem(quant, "silu", 1100, 140, 2);
      EXPECT_LT(error_of_general(test::make_case(31, p, tokens, rows_of(quant), 0.1)),
                bound_of_general(quant));
    }
  }
}

// Blocks of which the last is a part of one, also of gate and up.
TEST(CudaGeneralBound, RaggedBlocks) {
  REQUIRE_HOPPER();
  for (const auto& [hidden, inner] : std::vector<std::pair<std::int64_t, std::int64_t>>{
           {200, 72}, {256, 192}, {50, 300}, {97, 61}}) {
    for (const char* activation : {"silu", "relu2_no_mul"}) {
      SCOPED_TRACE(testing::Message() << hidden << 'x' << inner << ' ' << activation);
      const MoeProblem p = general_problem("fp8-block", activation, hidden, inner, 2);
      EXPECT_LT(error_of_general(test::make_case(43, p, 40, DType::kBF16)),
                bound_of_general("fp8-block"));
      const MoeProblem weights = general_problem("fp8-bf16", activation, hidden, inner, 2);
      EXPECT_LT(error_of_general(test::make_case(44, weights, 40, DType::kBF16)), 0x1p-8);
    }
  }
}

// A router weight on the input with several experts per token, which the fast kernel refuses.
TEST(CudaGeneralBound, RouterWeightOnTheInput) {
  REQUIRE_HOPPER();
  for (const char* quant : {"f32", "f16", "bf16", "fp8-block"}) {
    for (const std::int64_t top_k : {1, 3}) {
      MoeProblem p = general_problem(quant, "silu", 256, 128, top_k);
      p.apply_router_weight_on_input = true;
      EXPECT_LT(error_of_general(test::make_case(41, p, 40, rows_of(quant))),
                bound_of_general(quant))
          << quant << ' ' << top_k;
    }
  }
}

// Weights of other formats are decoded when they are loaded.
TEST(CudaGeneralBound, WeightsOfEveryFormatWithActivationsThatAreNotQuantised) {
  REQUIRE_HOPPER();
  for (const char* quant : {"fp8-bf16", "mxfp4-bf16", "int4-g128", "int8-bf16", "nvfp4-bf16",
                            "nf4-bf16", "gptq", "q4k", "q6k", "u8-zero", "int4-channel", "iq4"}) {
    SCOPED_TRACE(quant);
    const StandardCase c = test::make_case(45, test::small_problem(quant), 40, DType::kBF16);
    EXPECT_LT(error_of_general(c), 0x1p-8);
  }
}

// --- Metamorphic ----------------------------------------------------------------------------------

TEST(CudaGeneral, TokenAloneEqualsTokenInBatchByBits) {
  REQUIRE_HOPPER();
  for (const char* quant : {"f32", "f16", "bf16", "fp8-block"}) {
    const bool fp8 = std::string_view(quant) == "fp8-block";
    const std::int64_t hidden = fp8 ? 384 : 331;
    const MoeProblem p = general_problem(quant, "silu", hidden, fp8 ? 256 : 201, 2);
    const DType dtype = rows_of(quant);
    const std::int64_t row = hidden * (dtype_bits(dtype) / 8);
    for (const std::int64_t tokens : {5, 60, 300}) {
      const StandardCase c = test::make_case(51, p, tokens, dtype);
      const Tensor batch = run_general(c);
      for (const std::int64_t t : {std::int64_t{0}, tokens / 2, tokens - 1}) {
        StandardCase one = test::make_case(51, p, 1, dtype);
        std::memcpy(one.hidden_states.data(), c.hidden_states.data() + t * row,
                    static_cast<std::size_t>(row));
        std::memcpy(one.routing.ids.data(), c.routing.ids.data() + t * 8, 8);
        std::memcpy(one.routing.weights.data(), c.routing.weights.data() + t * 8, 8);
        EXPECT_EQ(std::memcmp(run_general(one).data(), batch.data() + t * hidden * 4,
                              static_cast<std::size_t>(hidden) * 4),
                  0)
            << quant << " token " << t << " of " << tokens;
      }
    }
  }
}

// Both kernels on the same problem: what the fast one rounds to bf16 is all that differs.
TEST(CudaGeneral, AgreesWithTheFastKernel) {
  REQUIRE_HOPPER();
  for (const char* quant : {"bf16", "fp8-block"}) {
    const StandardCase c =
        test::make_case(55, general_problem(quant, "silu", 384, 256, 2), 70, DType::kBF16, 0.1);
    const Tensor slow = run_general(c), fast = run_general_on(*create_general(c, "cuda_sm90"), c);
    EXPECT_LT(test::compare(test::to_doubles(slow.view()), test::to_doubles(fast.view())).rel_l2,
              0x1p-7)
        << quant;
  }
}

TEST(CudaGeneral, SlotsAreTheWeightedRows) {
  REQUIRE_HOPPER();
  const StandardCase c =
      test::make_case(61, general_problem("f32", "silu", 45, 31, 2), 30, DType::kF32);
  const auto experts = create_general(c);
  const Tensor sum = run_general_on(*experts, c),
               slots = run_general_on(*experts, c, DType::kF32, true);
  for (std::int64_t i = 0; i < 30 * 45; ++i) {
    const std::int64_t t = i / 45, h = i % 45;
    const float* const s = slots.as<float>() + t * 90 + h;
    ASSERT_EQ(sum.as<float>()[i], s[0] + s[45]) << i;
  }
}

}  // namespace
}  // namespace moesaic
