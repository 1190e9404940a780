// F16 layers in the fast kernel: rows and results of every dtype, slots in F32. Skipped, visibly, without
// a device.
#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "case_on_device.h"
#include "gpu_call.h"
#include "numerics/element.h"
#include "permute/sm90/combine.h"
#include "support/expect_bits.h"
#include "support/metrics.h"
#include "support/refusal.h"

namespace moesaic {
namespace {

using cuda::CudaExperts;
using cuda::CudaExpertsArgs;
using cuda::CudaResult;
using test::create_on_device;
using test::DeviceBytes;
using test::expect_refusal;
using test::expect_same;
using test::GpuCall;
using test::OnDevice;
using test::StandardCase;

StandardCase half_case(std::uint64_t seed, std::int64_t tokens, std::int64_t top_k, DType rows) {
  MoeProblem p = test::problem_of("f16", "silu", 384, 256, 6, top_k);
  p.apply_router_weight_on_input = top_k == 1;
  return test::make_case(seed, p, tokens, rows, 0.1);
}

Tensor as_dtype(const Tensor& t, DType dtype) {
  Tensor to = Tensor::zeros(dtype, t.shape()).value();
  for (std::int64_t i = 0; i < t.shape().num_elements().value(); ++i) {
    store_from_f32(to.data(), dtype, i, load_as_f32(t.data(), t.dtype(), i));
  }
  return to;
}

TEST(CudaHalf, RowsOfEveryDTypeHaveTheBitsOfTheirF16Values) {
  REQUIRE_HOPPER();
  for (const std::int64_t top_k : {1, 3}) {  // of one: with router weights on the input
    for (const std::int64_t tokens : {1, 20, 700}) {
      SCOPED_TRACE(testing::Message() << top_k << ' ' << tokens);
      StandardCase c = half_case(1, tokens, top_k, DType::kBF16);
      const Tensor of_bf16 = test::run_cuda(c);
      c.hidden_states = as_dtype(c.hidden_states, DType::kF32);
      expect_same(test::run_cuda(c), of_bf16, "F32");
      c.hidden_states = as_dtype(c.hidden_states, DType::kF16);
      expect_same(test::run_cuda(c), of_bf16, "F16");
      EXPECT_LT(test::compare(test::to_doubles(of_bf16.view()), c.oracle(true)).rel_l2, 0x1p-11);
    }
  }
}

TEST(CudaHalf, ResultsOfEveryDTypeAreTheSumRoundedOnce) {
  REQUIRE_HOPPER();
  for (const std::int64_t tokens : {1, 20, 700}) {
    const StandardCase c = half_case(2, tokens, 3, DType::kF16);
    const OnDevice d(c, create_on_device(c));
    const Tensor sum = d.run(DType::kF32);
    for (const DType dtype : {DType::kBF16, DType::kF16}) {
      expect_same(d.run(dtype), as_dtype(sum, dtype), std::string(dtype_name(dtype)));
    }
  }
}

TEST(CudaHalf, SlotsAreF32AndAddUpToTheOutputByBits) {
  REQUIRE_HOPPER();
  for (const std::int64_t tokens : {2, 40, 700}) {
    const StandardCase c = half_case(3, tokens, 3, DType::kF16);
    const OnDevice d(c, create_on_device(c));
    const Tensor want = d.run(DType::kF32);
    const DeviceBytes slots(tokens * 3 * 384 * 4), out(tokens * 384 * 4);
    CudaExpertsArgs a = d.args(out.as(), DType::kF32);
    a.result = CudaResult::slots(slots.as(), DType::kF32);
    ASSERT_TRUE(d.experts->enqueue(nullptr, a).ok());
    cuda::CombineParams sum;
    sum.y2 = slots.as();
    sum.wide = sum.output_f32 = true;
    sum.row_of_pair = d.ids.as<std::int32_t>();
    sum.tokens = tokens;
    sum.top_k = 3;
    sum.hidden = 384;
    sum.output = out.as();
    ASSERT_EQ(cuda::launch_combine(sum, nullptr), 0);
    Tensor got = Tensor::zeros(DType::kF32, want.shape()).value();
    out.download(got.data());
    expect_same(got, want, std::to_string(tokens));
    a.result = CudaResult::slots(slots.as());
    expect_refusal(d.experts->enqueue(nullptr, a), StatusCode::kInvalidDType,
                   {"slot_rows", "BF16", "need F32"});
    EXPECT_FALSE(d.experts->has_slots_place());
    EXPECT_EQ(d.experts->slots_place(a).rows, nullptr);
  }
}

// Rows of an expert beyond F16 are F32; what of the hidden states is beyond it spoils its own row alone.
TEST(CudaHalf, RowsBeyondTheRangeOfF16) {
  REQUIRE_HOPPER();
  StandardCase c = half_case(5, 30, 3, DType::kF32);
  const std::vector<double> w2 = test::to_doubles(c.weights.w2.view());
  double largest = 0;
  for (const double w : w2) largest = std::max(largest, std::abs(w));
  for (std::size_t i = 0; i < w2.size(); ++i) {
    store_from_f32(c.weights.w2.data(), DType::kF16, static_cast<std::int64_t>(i),
                   static_cast<float>(w2[i] / largest * 65000.0));
  }
  const Tensor large = test::run_cuda(c);
  double amax = 0;
  for (const double v : test::to_doubles(large.view())) amax = std::max(amax, std::abs(v));
  EXPECT_GT(amax, 65504.0);
  EXPECT_LT(test::compare(test::to_doubles(large.view()), c.oracle(true)).rel_l2, 0x1p-11);
  c.hidden_states.as<float>()[7 * 384 + 5] = 70000.0F;
  c.routing.ids.as<std::int32_t>()[7 * 3] = 2;
  const Tensor spoilt = test::run_cuda(c);
  for (std::int64_t i = 0; i < 30 * 384; ++i) {
    const float v = spoilt.as<float>()[i];
    if (i / 384 == 7) {
      ASSERT_FALSE(std::isfinite(v)) << i;
    } else {
      ASSERT_EQ(v, large.as<float>()[i]) << i;
    }
  }
}

TEST(CudaHalf, MeasureWhatTheReferenceMeasures) {
  REQUIRE_HOPPER();
  for (const DType rows : {DType::kF16, DType::kBF16, DType::kF32}) {
    GpuCall call(half_case(6, 30, 3, rows), 6);
    std::vector<RowNumerics> got(30);
    ExpertsArgs a = call.args();
    a.numerics = got;
    call.run(a);
    const std::vector<RowNumerics> want = test::reference_numerics(half_case(6, 30, 3, rows));
    const NumericsSummary of_gpu = summarize(got), of_cpu = summarize(want);
    EXPECT_EQ(of_gpu.rows, of_cpu.rows);
    EXPECT_NEAR(of_gpu.error_estimate(), of_cpu.error_estimate(), 0.3 * of_cpu.error_estimate());
    EXPECT_EQ(of_gpu.outside, of_cpu.outside);
  }
}

TEST(CudaHalf, TheBatchedFormatIsLeftToTheGeneralExperts) {
  MoeProblem p = test::problem_of("f16", "silu", 384, 256, 6, 1);
  EXPECT_EQ(CudaExperts::can_implement(p).to_string(), Status().to_string());
  EXPECT_TRUE(CudaExperts::takes_any_rows_of(p));
  EXPECT_FALSE(CudaExperts::takes_any_rows_of(test::problem_of("bf16", "silu", 384, 256, 6, 1)));
  p.format = ActivationFormat::kBatched;
  expect_refusal(CudaExperts::can_implement(p), StatusCode::kUnsupported,
                 {"format", "batched", "f16", "standard"});
}

}  // namespace
}  // namespace moesaic
