// Static activation scales that a call of a GPU's experts brings. Skipped, visibly, without a device.
#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "experts/gpu_call.h"
#include "moesaic/modular_kernel.h"
#include "support/cuda_device.h"
#include "support/expect_bits.h"
#include "support/refusal.h"

namespace moesaic {
namespace {

using test::expect_refusal;
using test::expect_same;
using test::GpuCall;
using test::kGpu;
using test::StandardCase;

constexpr std::int64_t kExperts = 6;

StandardCase scaled_case(std::int64_t tokens) {
  return test::make_case(91, test::small_problem("fp8-static"), tokens, DType::kBF16, 0.1);
}

using Scales = std::vector<float>;

DeviceTensor on_gpu(const Scales& scales) {
  const ConstTensorView host(reinterpret_cast<const std::byte*>(scales.data()), DType::kF32,
                             {static_cast<std::int64_t>(scales.size())});
  return DeviceTensor::copy_of(host, kGpu).value();
}

// Experts made with these instead of their own; empty: their own.
GpuCall made_with(std::int64_t tokens, std::int64_t local, const Scales& a1, const Scales& a2) {
  StandardCase c = scaled_case(tokens);
  const auto put = [](Tensor& to, const Scales& scales) {
    for (std::size_t e = 0; !scales.empty() && e < kExperts; ++e) {
      to.as<float>()[e] = scales[scales.size() == 1 ? 0 : e];
    }
  };
  put(c.weights.w13_input_scale, a1);
  put(c.weights.w2_input_scale, a2);
  return {std::move(c), local};
}

Scales each_times(const Tensor& own, float factor, float step) {
  Scales scales;
  for (std::int64_t e = 0; e < kExperts; ++e) {
    scales.push_back(own.as<float>()[e] * (factor + step * static_cast<float>(e)));
  }
  return scales;
}

TEST(DeviceCallScales, HaveTheBitsOfExpertsMadeWithThem) {
  REQUIRE_HOPPER();
  for (const std::int64_t tokens : {1, 5, 40, 200}) {
    for (const std::int64_t local : {kExperts, std::int64_t{4}, std::int64_t{1}}) {
      GpuCall call = made_with(tokens, local, {}, {});
      const Tensor own = call.run(call.args());
      const auto cut = [&](Scales s) {
        s.resize(static_cast<std::size_t>(local));
        return s;
      };
      const Scales a1 = each_times(call.c.weights.w13_input_scale, 1.5F, -0.1F);
      const Scales a2 = each_times(call.c.weights.w2_input_scale, 1.3F, 0.05F);
      const Scales same(kExperts, a1[0]);
      struct Case {
        const char* name;
        Scales made1, made2, call1, call2;
      };
      for (const Case& k : {Case{"each", a1, a2, cut(a1), cut(a2)},
                            Case{"first", a1, {}, cut(a1), {}}, Case{"second", {}, a2, {}, cut(a2)},
                            Case{"one for all", {a1[0]}, {a2[1]}, {a1[0]}, {a2[1]}},
                            Case{"equal", {a1[0]}, {}, cut(same), {}}}) {
        SCOPED_TRACE(std::string(k.name) + " " + std::to_string(tokens) + " " +
                     std::to_string(local));
        GpuCall made = made_with(tokens, local, k.made1, k.made2);
        const Tensor want = made.run(made.args());
        DeviceTensor d1, d2;
        ExpertsArgs a = call.args();
        if (!k.call1.empty()) a.a1_scale = (d1 = on_gpu(k.call1)).view();
        if (!k.call2.empty()) a.a2_scale = (d2 = on_gpu(k.call2)).view();
        expect_same(call.run(a), want, "result");
        if (tokens >= 40) {  // of fewer it may be that no expert here has any
          EXPECT_NE(std::memcmp(want.data(), own.data(), static_cast<std::size_t>(own.bytes())), 0);
        }
        // What rounding did is measured with these scales too.
        std::vector<RowNumerics> got_rows(static_cast<std::size_t>(tokens)), want_rows = got_rows;
        a.numerics = got_rows;
        ExpertsArgs b = made.args();
        b.numerics = want_rows;
        expect_same(call.run(a), want, "measured");
        expect_same(made.run(b), want, "made, measured");
        for (std::size_t t = 0; t < got_rows.size(); ++t) {
          EXPECT_TRUE(got_rows[t].size == want_rows[t].size &&
                      got_rows[t].noise == want_rows[t].noise)
              << t;
        }
      }
      expect_same(call.run(call.args()), own, "and nothing stays behind");
    }
  }
}

// Rows of experts with a scale that is none are NaN; others are what they were.
TEST(DeviceCallScales, WhatIsNoScaleMakesNanOfItsExpertsRows) {
  REQUIRE_HOPPER();
  constexpr std::int64_t kTokens = 60;
  GpuCall call(scaled_case(kTokens), kExperts);
  const Tensor own = call.run(call.args());
  const auto* ids = call.c.routing.ids.as<std::int32_t>();
  for (const bool second : {false, true}) {
    const Tensor& stored = second ? call.c.weights.w2_input_scale : call.c.weights.w13_input_scale;
    for (const float bad : {0.0F, -1.0F, std::nanf(""), std::numeric_limits<float>::infinity()}) {
      Scales scales = each_times(stored, 1.0F, 0.0F);
      scales[4] = bad;
      const DeviceTensor device = on_gpu(scales);
      ExpertsArgs a = call.args();
      (second ? a.a2_scale : a.a1_scale) = device.view();
      const Tensor got = call.run(a);
      const std::int64_t hidden = call.c.problem.hidden_size;
      for (std::int64_t t = 0; t < kTokens; ++t) {
        const bool hit = ids[2 * t] == 4 || ids[2 * t + 1] == 4;
        for (std::int64_t i = 0; i < hidden; ++i) {
          const float v = got.as<float>()[t * hidden + i];
          if (hit) {
            ASSERT_TRUE(std::isnan(v)) << bad << " token " << t << " column " << i << ": " << v;
          } else {
            ASSERT_EQ(v, own.as<float>()[t * hidden + i]) << bad << " token " << t;
          }
        }
      }
    }
  }
}

// A graph's replays read the scales that are there then; the kernel passes them on.
TEST(DeviceCallScales, AGraphReadsThemAnewAndTheModularKernelPassesThemOn) {
  REQUIRE_HOPPER();
  GpuCall call(scaled_case(6), kExperts);
  const auto kernel =
      ModularKernel::create(call.c.problem, make_local_prepare_finalize(call.c.problem).value(),
                            std::move(call.experts), {.max_tokens = 6})
          .value();
  DeviceTensor scales = on_gpu(each_times(call.c.weights.w13_input_scale, 1.0F, 0.0F));
  ModularKernel::Args a;
  a.hidden_states = call.x.view();
  a.topk_ids = call.ids.view();
  a.topk_weights = call.weights.view();
  a.output = call.output.view();
  a.a1_scale = scales.view();
  cudaStream_t stream = nullptr;
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t exec = nullptr;
  ASSERT_EQ(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), cudaSuccess);
  ASSERT_EQ(cudaStreamBeginCapture(stream, cudaStreamCaptureModeRelaxed), cudaSuccess);
  const Status captured = kernel.enqueue({stream}, a);
  ASSERT_EQ(cudaStreamEndCapture(stream, &graph), cudaSuccess);
  ASSERT_TRUE(captured.ok()) << captured.to_string();
  ASSERT_EQ(cudaGraphInstantiate(&exec, graph, 0), cudaSuccess);
  for (const float factor : {1.0F, 1.7F, 0.6F}) {
    const Scales fresh = each_times(call.c.weights.w13_input_scale, factor, 0.1F);
    const ConstTensorView host(reinterpret_cast<const std::byte*>(fresh.data()), DType::kF32,
                               {kExperts});
    ASSERT_TRUE(copy_tensor(host, scales.view()).ok());
    ASSERT_EQ(cudaGraphLaunch(exec, stream), cudaSuccess);
    ASSERT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
    GpuCall made = made_with(6, kExperts, fresh, {});
    expect_same(call.result(), made.run(made.args()), std::to_string(factor));
  }
  (void)cudaGraphExecDestroy(exec);
  (void)cudaGraphDestroy(graph);
  (void)cudaStreamDestroy(stream);
}

TEST(DeviceCallScales, RefusesWhatIsNoScaleOfACall) {
  REQUIRE_HOPPER();
  GpuCall call(scaled_case(3), kExperts);
  const DeviceTensor good = on_gpu(Scales(kExperts, 0.01F)), two = on_gpu({1.0F, 1.0F});
  const auto refused = [&](const ConstTensorView& a1, StatusCode code,
                           std::initializer_list<const char*> words) {
    ExpertsArgs a = call.args();
    a.a1_scale = a1;
    expect_refusal(call.experts->run(a), code, words);
  };
  refused(two.view(), StatusCode::kInvalidShape, {"a1_scale", "[2]", "[1] or [6]"});
  const Tensor host = Tensor::zeros(DType::kF32, {6}).value();
  refused(host.view(), StatusCode::kInvalidArgument, {"a1_scale: got memory of cpu"});
  refused({host.data(), DType::kF32, {6}, kGpu}, StatusCode::kInvalidArgument,
          {"a1_scale", "host memory"});
  refused({good.view().data, DType::kBF16, {6}, kGpu}, StatusCode::kInvalidDType,
          {"a1_scale: got BF16"});
  refused({good.view().data + 1, DType::kF32, {1}, kGpu}, StatusCode::kInvalidLayout,
          {"a1_scale", "4"});
  refused({call.output.view().data, DType::kF32, {6}, kGpu}, StatusCode::kAliasing,
          {"output", "a1_scale"});
  for (const char* quant : {"bf16", "fp8-block", "fp8-channel", "int8"}) {
    GpuCall other(quant, 3, kExperts);
    ExpertsArgs a = other.args();
    a.a2_scale = good.view();
    expect_refusal(other.experts->run(a), StatusCode::kUnsupported,
                   {"a2_scale", "no static activation scales"});
  }
  EXPECT_EQ(cudaGetLastError(), cudaSuccess);
}

}  // namespace
}  // namespace moesaic
