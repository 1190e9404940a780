// The batched format of a GPU's experts: against the CPU's on integers, against the standard format
// row by row, with counts that the host never sees.
#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "case_on_device.h"
#include "exact_case.h"
#include "experts/sm90/formats.h"
#include "slab_call.h"
#include "support/cuda_graph.h"
#include "support/fp8_rows.h"
#include "support/refusal.h"

namespace moesaic {
namespace {

using test::Counts;
using test::exact_case;
using test::expect_refusal;
using test::kGpu;
using test::problem_of;
using test::SlabCall;
using test::StandardCase;

// Of every way in which operand rows come: as they are, gathered by expert, quantised by groups, by
// rows, with the experts' scales, to values; and of every inner loop.
constexpr const char* kBatchedQuants[] = {
    "bf16",      "fp8-block",  "fp8-channel", "fp8-static",      "int8",       "mxfp4-bf16",
    "mxfp8",     "mxfp4",      "mxfp4-fp8",   "nvfp4",           "nvfp4-bf16", "int4-fp8",
    "int4-g128", "int8-bf16",  "fp8-bf16",    "int4-fp8-static", "nf4-bf16",   "gptq",
    "awq",       "nvfp4-rows", "int4-g32"};
std::string name_of_batched(const testing::TestParamInfo<const char*>& info) {
  std::string name = info.param;
  std::ranges::replace(name, '-', '_');
  return name;
}
class CudaBatched : public testing::TestWithParam<const char*> {};
INSTANTIATE_TEST_SUITE_P(Each, CudaBatched, testing::ValuesIn(kBatchedQuants), name_of_batched);

// Counts of six experts: none, one, all, and uneven ones.
std::vector<Counts> counts_of(std::int32_t t) {
  return {{0, 1, t, t / 2, t - 1, t / 3}, {t, t, t, t, t, t}, {0, 0, 0, 0, 0, t}};
}

TEST_P(CudaBatched, EqualsTheCpuOnIntegers) {
  REQUIRE_HOPPER();
  for (const std::int32_t t : {1, 23, 110}) {
    SlabCall call(exact_case(GetParam(), "silu", 512, 384, 6 * t, 1), t);
    EXPECT_EQ(call.batched->format(), ActivationFormat::kBatched);
    EXPECT_EQ(call.batched->reduction(), TopKWeightAndReduce::kNaiveBatched);
    const Counts n = t == 110 ? Counts{0, 0, 110, 0, 1, 0} : counts_of(t)[0];
    SCOPED_TRACE(t);
    call.expect_rows(call.run(n), call.of_cpu(n), n);
  }
}

TEST_P(CudaBatched, RowsHaveTheBitsOfTheStandardFormat) {
  REQUIRE_HOPPER();
  for (const std::int32_t t : {1, 9, 150}) {
    const MoeProblem p = problem_of(GetParam(), "silu", 384, 256, 6, 1);
    SlabCall call(test::make_case(41, p, 6 * t, DType::kBF16), t);
    const Tensor want = call.of_standard();
    for (const Counts& n : counts_of(t)) {
      SCOPED_TRACE(testing::Message() << t << ' ' << testing::PrintToString(n));
      call.expect_rows(call.run(n), want, n);
    }
  }
}

// Rows past the counts are memory that nobody has written: compute-sanitizer's initcheck says whether
// they are read.
TEST_P(CudaBatched, RowsPastTheCountsNeedNotExist) {
  REQUIRE_HOPPER();
  const MoeProblem p = problem_of(GetParam(), "silu", 256, 128, 6, 1);
  SlabCall call(test::make_case(42, p, 6 * 5, DType::kBF16), 5);
  const Counts n = {0, 1, 5, 2, 4, 1};
  const Tensor want = call.of_standard();
  call.x = DeviceTensor::uninitialized(kGpu, DType::kBF16, call.shape()).value();
  const std::int64_t slab = 5 * 256 * 2;
  for (std::int64_t e = 0; e < 6; ++e) {
    ASSERT_EQ(cudaMemcpy(call.x.data() + e * slab, call.c.hidden_states.data() + e * slab,
                         static_cast<std::size_t>(n[static_cast<std::size_t>(e)] * 256 * 2),
                         cudaMemcpyHostToDevice),
              cudaSuccess);
  }
  test::set_bytes(call.output, 0xFF);
  call.set_counts(n);
  const Status status = call.batched->run(call.args());
  ASSERT_TRUE(status.ok()) << status.to_string();
  ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  call.expect_rows(test::on_host(call.output), want, n);
}

// Full groups, pairs of CTAs, and many small groups.
TEST(CudaBatchedExperts, ManyRows) {
  REQUIRE_HOPPER();
  for (const char* quant : {"bf16", "fp8-block", "fp8-channel"}) {
    const MoeProblem p = problem_of(quant, "silu", 256, 128, 6, 1);
    SlabCall call(test::make_case(43, p, 6 * 900, DType::kBF16), 900);
    const Tensor want = call.of_standard();
    for (const Counts& n : {Counts{900, 0, 513, 700, 129, 1}, Counts{3, 2, 0, 1, 5, 4}}) {
      SCOPED_TRACE(testing::Message() << quant << ' ' << testing::PrintToString(n));
      call.expect_rows(call.run(n), want, n);
    }
  }
}

// No multiples of 128, more experts than a warp has lanes, and an activation without a gate.
TEST(CudaBatchedExperts, OtherSizes) {
  REQUIRE_HOPPER();
  for (const char* activation : {"silu", "relu2_no_mul", "gelu"}) {
    const MoeProblem p = problem_of("bf16", activation, 72, 91, 70, 1);
    SlabCall call(test::make_case(44, p, 70 * 5, DType::kBF16), 5);
    Counts n;
    for (std::int32_t e = 0; e < 70; ++e) n.push_back(e * 7 % 11 % 6);
    call.expect_rows(call.run(n), call.of_standard(), n);
  }
}

TEST(CudaBatchedExperts, CountsOutOfRangeAreClamped) {
  REQUIRE_HOPPER();
  for (const char* quant : {"bf16", "fp8-block", "int8", "gptq", "nvfp4"}) {
    const MoeProblem p = problem_of(quant, "silu", 256, 128, 6, 1);
    SlabCall call(test::make_case(45, p, 6 * 12, DType::kBF16), 12);
    constexpr std::int32_t kLeast = std::numeric_limits<std::int32_t>::min();
    constexpr std::int32_t kMost = std::numeric_limits<std::int32_t>::max();
    const Counts n = {-1, 13, kLeast, kMost, 5, 1000};
    SCOPED_TRACE(quant);
    call.expect_rows(call.run(n), call.of_standard(), n);
    const Counts none = {0, 0, -7, 0, kLeast, 0};
    call.expect_rows(call.run(none), call.of_standard(), none);
  }
}

TEST(CudaBatchedExperts, AGraphReplaysWithOtherCounts) {
  REQUIRE_HOPPER();
  for (const char* quant : {"bf16", "fp8-block", "fp8-static", "int8", "mxfp4", "gptq"}) {
    const MoeProblem p = problem_of(quant, "silu", 256, 128, 6, 1);
    SlabCall call(test::make_case(46, p, 6 * 40, DType::kBF16), 40);
    const Tensor want = call.of_standard();
    call.poison({0, 0, 0, 0, 0, 0});
    call.x = test::on_gpu(call.c.hidden_states.view());
    call.set_counts({1, 2, 3, 4, 5, 6});
    test::CudaGraph graph;
    ExpertsArgs a = call.args();
    graph.capture([&] { return call.batched->enqueue(graph.of_call(), a); });
    for (std::int32_t turn = 0; turn < 40; ++turn) {
      Counts n;
      for (std::int32_t e = 0; e < 6; ++e) n.push_back((turn * 17 + e * 29) % 53 - 6);
      test::set_bytes(call.output, 0xFF);
      call.set_counts(n);
      ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
      graph.replay();
      graph.wait();
      SCOPED_TRACE(testing::Message() << quant << ' ' << testing::PrintToString(n));
      call.expect_rows(test::on_host(call.output), want, n);
      if (testing::Test::HasFailure()) return;
    }
  }
}

TEST(CudaBatchedExperts, CodesHaveTheBitsOfTheRowsTheyWereMadeOf) {
  REQUIRE_HOPPER();
  for (const char* backend : {"cuda_sm90", "cuda_general"}) {
    SlabCall call(
        test::make_case(47, problem_of("fp8-block", "silu", 256, 128, 6, 1), 6 * 21, DType::kBF16),
        21, backend);
    ASSERT_TRUE(call.batched->takes_quantized_rows());
    const Counts n = {0, 1, 21, 10, 7, 20};
    const Tensor want = call.run(n);
    const test::Fp8Rows rows = test::fp8_rows(call.c.hidden_states, quant::ScaleRounding::kNone);
    const std::int64_t all = 6 * 21, stride = all + 3;
    Tensor apart = Tensor::zeros(DType::kF32, {2, stride}).value();
    for (std::int64_t r = 0; r < all; ++r) {
      for (std::int64_t g = 0; g < 2; ++g) {
        apart.as<float>()[g * stride + r] = rows.scales.as<float>()[r * 2 + g];
      }
    }
    call.x = test::on_gpu(rows.codes.view());
    const DeviceTensor scales = test::on_gpu(apart.view());
    call.poison(n);
    ExpertsArgs a = call.args();
    a.hidden_scale = {scales.view().data, DType::kF32, {6, 21, 2}, kGpu};
    a.hidden_scale.strides = {21, 1, stride};
    const Status status = call.batched->run(a);
    ASSERT_TRUE(status.ok()) << status.to_string();
    ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    call.expect_rows(test::on_host(call.output), want, n);
  }
}

TEST(CudaBatchedExperts, ScalesOfTheCall) {
  REQUIRE_HOPPER();
  SlabCall call(
      test::make_case(48, problem_of("fp8-static", "silu", 256, 128, 6, 1), 6 * 9, DType::kBF16),
      9);
  const Counts n = {9, 0, 3, 1, 8, 2};
  const Tensor want = call.run(n);
  // The experts' own scales, brought by the call, and one of them changed.
  const DeviceTensor own =
      test::on_gpu(ConstTensorView(call.c.weights.w13_input_scale.data(), DType::kF32, Shape{6}));
  Tensor other = Tensor::zeros(DType::kF32, {6}).value();
  std::memcpy(other.data(), call.c.weights.w13_input_scale.data(), 24);
  other.as<float>()[5] *= 64;
  const DeviceTensor changed = test::on_gpu(other.view());
  ExpertsArgs a = call.args();
  for (const bool same : {true, false}) {
    call.poison(n);
    a.a1_scale = same ? own.view() : changed.view();
    ASSERT_TRUE(call.batched->run(a).ok());
    ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    const Tensor got = test::on_host(call.output);
    for (std::int64_t e = 0; e < 6; ++e) {
      const auto bytes = static_cast<std::size_t>(9 * 256 * 2);
      const bool equal =
          std::memcmp(got.data() + e * 9 * 256 * 2, want.data() + e * 9 * 256 * 2, bytes) == 0;
      EXPECT_EQ(equal, same || e != 5) << e;
    }
  }
}

// The general experts: any sizes and dtypes, rows quantised by a kernel of their own.
TEST(CudaBatchedGeneral, EqualsTheCpuOnIntegersAndTheStandardFormat) {
  REQUIRE_HOPPER();
  for (const char* quant : {"bf16", "fp8-block", "int4-g128", "mxfp4-bf16"}) {
    for (const std::int32_t t : {1, 23, 140}) {
      SlabCall call(exact_case(quant, "silu", 512, 384, 6 * t, 1), t, "cuda_general", DType::kF32);
      const Tensor standard = call.of_standard("cuda_general");
      for (const Counts& n : counts_of(t)) {
        SCOPED_TRACE(testing::Message() << quant << ' ' << testing::PrintToString(n));
        call.expect_rows(call.run(n), standard, n);
      }
      const Counts few = t == 1 ? Counts{1, 0, 1, 0, 0, 1} : Counts{0, 1, 23, 0, 2, 0};
      call.expect_rows(call.run(few), call.of_cpu(few), few);
    }
  }
  MoeProblem p = problem_of("bf16", "silu", 77, 31, 6, 1);
  SlabCall odd(test::make_case(49, p, 6 * 11, DType::kF32), 11, "cuda_general", DType::kF16);
  const Counts n = {11, -3, 12, 4, 0, 1};
  odd.expect_rows(odd.run(n), odd.of_standard("cuda_general"), n);
}

TEST(CudaBatchedExperts, MistakesAreRefusedBeforeALaunch) {
  REQUIRE_HOPPER();
  SlabCall call(test::make_case(50, problem_of("bf16", "silu", 64, 64, 6, 1), 6 * 3, DType::kBF16),
                3);
  const Counts host = {1, 1, 1, 1, 1, 1};
  ExpertsArgs a = call.args();
  a.expert_num_tokens = host;
  expect_refusal(call.batched->run(a), StatusCode::kInvalidArgument,
                 {"expert_num_tokens", "host memory"});
  a = call.args();
  a.workspace = a.workspace.first(256);
  expect_refusal(call.batched->run(a), StatusCode::kWorkspaceTooSmall, {"workspace"});
  a = call.args();
  a.hidden_states = ConstTensorView(call.x.data(), DType::kBF16, {6, 0, 64}, kGpu);
  a.output = TensorView(call.output.data(), DType::kBF16, {6, 0, 64}, kGpu);
  EXPECT_TRUE(call.batched->run(a).ok());
  EXPECT_EQ(cudaGetLastError(), cudaSuccess);
}

}  // namespace
}  // namespace moesaic
