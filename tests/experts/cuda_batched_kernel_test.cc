// ModularKernel in the batched format on a GPU: slabs made by prepare, experts, weighted sums by
// finalize; against the same kernel on the CPU.
#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "case_on_device.h"
#include "exact_case.h"
#include "moesaic/modular_kernel.h"
#include "slab_call.h"
#include "support/cuda_graph.h"
#include "support/metrics.h"
#include "support/random.h"
#include "support/refusal.h"

namespace moesaic {
namespace {

using test::exact_case;
using test::expect_refusal;
using test::kGpu;
using test::on_gpu;
using test::on_host;
using test::problem_of;
using test::StandardCase;

ModularKernel kernel_of(const StandardCase& c, const char* backend, const Device& device,
                        std::int64_t rows, std::int64_t tokens) {
  MoeProblem p = c.problem;
  p.format = ActivationFormat::kBatched;
  p.max_tokens = rows;
  p.device = device;
  ModularKernel::Options options;
  options.max_tokens = tokens;
  options.max_tokens_per_expert = rows;
  const auto source = make_stacked_source(c.weights.view());
  return ModularKernel::create(p, make_batched_prepare_finalize(p).value(),
                               choose_experts(p, backend).value()->create(p, *source).value(),
                               options)
      .value();
}

// The kernels of a case on the CPU and on the GPU.
struct Pair {
  StandardCase c;
  std::int64_t tokens;
  ModularKernel cpu, gpu;
  DeviceTensor x, ids, weights, map;

  Pair(StandardCase of, std::int64_t rows, const char* backend = "cuda_sm90")
      : c(std::move(of)),
        tokens(c.hidden_states.shape()[0]),
        cpu(kernel_of(c, "cpu_reference", Device::cpu(), rows, tokens)),
        gpu(kernel_of(c, backend, kGpu, rows, tokens)),
        x(on_gpu(c.hidden_states.view())),
        ids(on_gpu(c.routing.ids.view())),
        weights(on_gpu(c.routing.weights.view())) {
    if (c.expert_map.empty()) return;
    map = on_gpu(ConstTensorView(reinterpret_cast<const std::byte*>(c.expert_map.data()),
                                 DType::kI32, {std::ssize(c.expert_map)}));
  }
  Tensor of_cpu(DType dtype) const {
    Tensor y = Tensor::zeros(dtype, c.hidden_states.shape()).value();
    ModularKernel::Args a;
    a.hidden_states = c.hidden_states.view();
    a.topk_ids = c.routing.ids.view();
    a.topk_weights = c.routing.weights.view();
    a.expert_map = c.expert_map;
    a.output = y.view();
    const Status status = cpu.run(a);
    EXPECT_TRUE(status.ok()) << status.to_string();
    return y;
  }
  ModularKernel::Args args(DeviceTensor& y) const {
    ModularKernel::Args a;
    a.hidden_states = x.view();
    a.topk_ids = ids.view();
    a.topk_weights = weights.view();
    if (map.bytes() > 0) {
      a.expert_map = {reinterpret_cast<const std::int32_t*>(map.data()),
                      static_cast<std::size_t>(map.bytes() / 4)};
    }
    a.output = y.view();
    return a;
  }
  DeviceTensor poisoned(DType dtype) const {
    DeviceTensor y = DeviceTensor::uninitialized(kGpu, dtype, c.hidden_states.shape()).value();
    test::set_bytes(y, 0xFF);
    return y;
  }
  Tensor of_gpu(DType dtype) const {
    DeviceTensor y = poisoned(dtype);
    const Status status = gpu.run(args(y));
    EXPECT_TRUE(status.ok()) << status.to_string();
    EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    return on_host(y);
  }
};

void expect_same(const Tensor& got, const Tensor& want) {
  std::string why;
  EXPECT_TRUE(test::same_bits(got.view(), want.view(), &why)) << why;
}

// Rows are exact in bf16, weights powers of two, and slots are added in order.
TEST(CudaBatchedKernel, EqualsTheCpuOnIntegers) {
  REQUIRE_HOPPER();
  for (const char* backend : {"cuda_sm90", "cuda_general"}) {
    for (const std::int64_t tokens : {1, 9, 150}) {
      for (const bool part : {false, true}) {
        StandardCase c = exact_case("bf16", "relu2_no_mul", 272, 88, tokens, 3);
        if (part) c.expert_map = {0, 1, -1, 3, 4, 5};
        const Pair pair(std::move(c), tokens, backend);
        for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
          SCOPED_TRACE(testing::Message()
                       << backend << ' ' << tokens << ' ' << part << ' ' << dtype_name(dtype));
          expect_same(pair.of_gpu(dtype), pair.of_cpu(dtype));
        }
      }
    }
  }
}

TEST(CudaBatchedKernel, IsNearTheCpuInOtherSchemes) {
  REQUIRE_HOPPER();
  for (const char* quant :
       {"fp8-block", "fp8-static", "int8", "mxfp4-bf16", "int4-g128", "nvfp4"}) {
    const Pair pair(
        test::make_case(61, problem_of(quant, "silu", 384, 256, 6, 2), 60, DType::kBF16, 0.1), 60);
    const auto want = test::to_doubles(pair.of_cpu(DType::kF32).view());
    const auto got = test::compare(test::to_doubles(pair.of_gpu(DType::kF32).view()), want);
    EXPECT_LT(got.rel_l2, 0x1p-6) << quant << ' ' << got.describe;
  }
}

// Hidden states in another dtype than the slabs, with rows apart, and the weight on the input.
TEST(CudaBatchedKernel, RowsOfOtherDtypesAndWeightsOnTheInput) {
  REQUIRE_HOPPER();
  for (const DType dtype : {DType::kF32, DType::kF16, DType::kBF16}) {
    for (const bool on_input : {false, true}) {
      StandardCase c = exact_case("bf16", "relu2_no_mul", 272, 88, 40, 3);
      c.problem.apply_router_weight_on_input = on_input;
      Tensor wide = Tensor::zeros(dtype, {40, 272}).value();
      for (std::int64_t i = 0; i < 40 * 272; ++i) {
        store_from_f32(wide.data(), dtype, i, load_as_f32(c.hidden_states.data(), DType::kBF16, i));
      }
      c.hidden_states = std::move(wide);
      const Pair pair(std::move(c), 40);
      SCOPED_TRACE(testing::Message() << dtype_name(dtype) << ' ' << on_input);
      const Tensor want = pair.of_cpu(DType::kF32);
      expect_same(pair.of_gpu(DType::kF32), want);
      // Rows 280 elements apart.
      Tensor apart = Tensor::zeros(dtype, {40, 280}).value();
      const std::int64_t element = dtype_bits(dtype) / 8;
      test::poison(apart.view());
      for (std::int64_t t = 0; t < 40; ++t) {
        std::memcpy(apart.data() + t * 280 * element,
                    pair.c.hidden_states.data() + t * 272 * element,
                    static_cast<std::size_t>(272 * element));
      }
      const DeviceTensor rows = on_gpu(apart.view());
      DeviceTensor y = pair.poisoned(DType::kF32);
      ModularKernel::Args a = pair.args(y);
      a.hidden_states = ConstTensorView(rows.view().data, dtype, {40, 272}, kGpu);
      a.hidden_states.strides = {280, 1};
      ASSERT_TRUE(pair.gpu.run(a).ok());
      ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
      expect_same(on_host(y), want);
    }
  }
}

// The host cannot refuse what it does not see.
TEST(CudaBatchedKernel, IdsOutOfRangeAreNoExpertAndLostRowsAreNaN) {
  REQUIRE_HOPPER();
  StandardCase c = exact_case("bf16", "relu2_no_mul", 272, 88, 30, 2);
  for (std::int32_t t = 0; t < 30; ++t) {
    c.routing.ids.as<std::int32_t>()[2 * t] = t % 5;  // six rows each
    c.routing.ids.as<std::int32_t>()[2 * t + 1] = t % 3 == 0 ? 5 : -1;
  }
  const Pair full(std::move(c), 10);
  const Tensor want = full.of_cpu(DType::kF32);
  expect_same(full.of_gpu(DType::kF32), want);
  auto* const ids = full.c.routing.ids.as<std::int32_t>();
  Tensor beyond = Tensor::zeros(DType::kI32, {30, 2}).value();
  std::memcpy(beyond.data(), ids, 240);
  for (std::int32_t i = 0; i < 60; ++i) {
    if (ids[i] == -1) beyond.as<std::int32_t>()[i] = i % 4 == 1 ? 6 : -2 - i;
  }
  ASSERT_TRUE(copy_tensor(beyond.view(), const_cast<DeviceTensor&>(full.ids).view()).ok());
  expect_same(full.of_gpu(DType::kF32), want);
  // Slabs of eight rows: expert 5 has ten, and the tokens of its last two lose a row.
  StandardCase again = exact_case("bf16", "relu2_no_mul", 272, 88, 30, 2);
  std::memcpy(again.routing.ids.data(), ids, 240);
  const MoeProblem p = again.problem;
  const ModularKernel small = kernel_of(again, "cuda_sm90", kGpu, 8, 30);
  DeviceTensor y = full.poisoned(DType::kF32);
  ModularKernel::Args a = full.args(y);
  ASSERT_TRUE(small.run(a).ok());
  ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  const Tensor got = on_host(y);
  for (std::int64_t t = 0; t < 30; ++t) {
    for (std::int64_t i = 0; i < p.hidden_size; ++i) {
      const float v = got.as<float>()[t * p.hidden_size + i];
      const bool lost = t == 24 || t == 27;
      ASSERT_EQ(std::isnan(v), lost) << t << ' ' << i;
      if (lost) continue;
      ASSERT_EQ(v, want.as<float>()[t * p.hidden_size + i]) << t << ' ' << i;
    }
  }
}

TEST(CudaBatchedKernel, AGraphReplaysWithOtherIdsAndWeights) {
  REQUIRE_HOPPER();
  for (const char* quant : {"bf16", "fp8-block"}) {
    Pair pair(test::make_case(63, problem_of(quant, "silu", 256, 128, 6, 2), 40, DType::kBF16), 40);
    test::CudaGraph graph;
    DeviceTensor y = pair.poisoned(DType::kF32);
    const ModularKernel::Args a = pair.args(y);
    graph.capture([&] { return pair.gpu.enqueue(graph.of_call(), a); });
    Tensor last;
    for (std::uint64_t seed = 0; seed < 12; ++seed) {
      const test::OwnedRouting routing =
          test::random_routing(seed, 40, 6, 2, seed % 3 == 0 ? 0.5 : 0.0);
      ASSERT_TRUE(copy_tensor(routing.ids.view(), pair.ids.view()).ok());
      ASSERT_TRUE(copy_tensor(routing.weights.view(), pair.weights.view()).ok());
      test::set_bytes(y, 0xFF);
      ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
      graph.replay();
      graph.wait();
      const Tensor got = on_host(y);
      expect_same(got, pair.of_gpu(DType::kF32));
      if (seed > 0) {
        EXPECT_NE(std::memcmp(got.data(), last.data(), static_cast<std::size_t>(got.bytes())), 0);
      }
      last = on_host(y);
    }
  }
}

TEST(CudaBatchedKernel, NoTokensAndMistakes) {
  REQUIRE_HOPPER();
  const Pair pair(exact_case("bf16", "relu2_no_mul", 272, 88, 4, 2), 4);
  DeviceTensor y = pair.poisoned(DType::kF32);
  ModularKernel::Args a = pair.args(y);
  a.hidden_states.shape = a.output.shape = {0, 272};
  a.topk_ids.shape = a.topk_weights.shape = {0, 2};
  EXPECT_TRUE(pair.gpu.run(a).ok());
  a = pair.args(y);
  a.topk_ids.data = pair.c.routing.ids.data();
  expect_refusal(pair.gpu.run(a), StatusCode::kInvalidArgument, {"topk_ids", "host memory"});
  a = pair.args(y);
  std::vector<RowNumerics> rows(4);
  a.numerics = rows;
  expect_refusal(pair.gpu.run(a), StatusCode::kUnsupported, {"numerics"});
  const auto pf = make_batched_prepare_finalize(pair.gpu.problem()).value();
  EXPECT_EQ(pf->format(), ActivationFormat::kBatched);
  EXPECT_TRUE(pf->owns_expert_output());
  EXPECT_EQ(cudaGetLastError(), cudaSuccess);
}

}  // namespace
}  // namespace moesaic
