// What a gate on a GPU makes of its weights' dtype. Skipped, visibly, without a device.
#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <string>
#include <utility>

#include "gate/sm90/gate_linear.h"
#include "gate_on_gpu.h"
#include "numerics/element.h"
#include "support/cuda_device.h"
#include "support/metrics.h"
#include "support/random.h"

namespace moesaic {
namespace {

using test::gate_on_gpu;
using test::kGateGpu;
using test::logits_of;

// As in GGUF files of bf16 models; one value that is none, and all are kept as they are.
TEST(CudaGateLinear, WeightsThatAreBf16NumbersHaveTheBitsOfBf16) {
  REQUIRE_HOPPER();
  using enum DType;
  for (const std::int64_t tokens : {1, 40, 700}) {
    test::Rng rng(9);
    Tensor narrow = Tensor::zeros(kBF16, {60, 1032}).value();
    for (std::int64_t i = 0; i < 60 * 1032; ++i) {
      store_from_f32(narrow.data(), kBF16, i, static_cast<float>(rng.integer(-127, 127)) / 64);
    }
    const DeviceTensor x =
        DeviceTensor::copy_of(test::random_normal(rng, kBF16, {tokens, 1032}).view(), kGateGpu)
            .value();
    const auto logits = [&](const Tensor& weight) {
      return logits_of(gate_on_gpu(weight, Tensor(), kF32, true), x);
    };
    const Tensor want = logits(narrow);
    for (const DType dtype : {kF32, kF16}) {
      Tensor wide = Tensor::zeros(dtype, narrow.shape()).value();
      for (std::int64_t i = 0; i < 60 * 1032; ++i) {
        store_from_f32(wide.data(), dtype, i, load_as_f32(narrow.data(), kBF16, i));
      }
      std::string why;
      EXPECT_TRUE(test::same_bits(logits(wide).view(), want.view(), &why)) << tokens << ": " << why;
      store_from_f32(wide.data(), dtype, 5, 1.0F + 0x1p-9F);
      Tensor rounded = Tensor::zeros(kBF16, narrow.shape()).value();
      std::memcpy(rounded.data(), narrow.data(), static_cast<std::size_t>(narrow.bytes()));
      store_from_f32(rounded.data(), kBF16, 5, 1.0F);
      const Tensor got = logits(wide), of_rounded = logits(rounded);
      std::int64_t differs = 0;
      for (std::int64_t t = 0; t < tokens; ++t) {
        const float step = got.as<float>()[t * 60] - of_rounded.as<float>()[t * 60];
        differs += std::abs(step) > 0x1p-14F ? 1 : 0;  // 2^-9 times a hidden state
      }
      EXPECT_GT(differs, tokens / 2) << dtype_name(dtype);
    }
  }
}

Tensor first_rows(const Tensor& x, std::int64_t rows) {
  Tensor some = Tensor::zeros(x.dtype(), {rows, x.shape()[1]}).value();
  std::memcpy(some.data(), x.data(), static_cast<std::size_t>(some.bytes()));
  return some;
}

// Weights of F32, and F16, in three and two parts, and F16 as it is: rows with a one choose a weight,
// which the sum of its parts is.
TEST(CudaGateLinear, PartsOfAWeightAddUpToIt) {
  REQUIRE_HOPPER();
  using enum DType;
  constexpr std::int64_t kExperts = 9, kHidden = 72;
  test::Rng rng(10);
  for (const auto& [dtype, rows] : {std::pair{kF32, kBF16}, {kF16, kBF16}, {kF16, kF16}}) {
    const Tensor w = test::random_normal(rng, dtype, {kExperts, kHidden});
    const GateLinear gate = gate_on_gpu(w, Tensor(), kF32, true);
    for (const std::int64_t tokens : {1, 16, 72, 200}) {
      Tensor x = Tensor::zeros(rows, {tokens, kHidden}).value();
      const auto chosen = [&](std::int64_t t) { return (t * 5 + 71) % kHidden; };
      for (std::int64_t t = 0; t < tokens; ++t) {
        store_from_f32(x.data(), rows, t * kHidden + chosen(t), 1.0F);
      }
      const Tensor got = logits_of(gate, DeviceTensor::copy_of(x.view(), kGateGpu).value());
      for (std::int64_t i = 0; i < tokens * kExperts; ++i) {
        const std::int64_t at = i % kExperts * kHidden + chosen(i / kExperts);
        ASSERT_EQ(got.as<float>()[i], load_as_f32(w.data(), dtype, at)) << tokens << ' ' << i;
      }
    }
  }
}

// F16 weights in F32, as in GGUF files, meet F16 rows as they are; one value that F16 has not, and all
// are F32.
TEST(CudaGateLinear, RowsInF16MeetWeightsInF16WhereNoneIsRounded) {
  REQUIRE_HOPPER();
  using enum DType;
  constexpr std::int64_t kExperts = 60, kHidden = 1032;
  test::Rng rng(12);
  const Tensor half = test::random_normal(rng, kF16, {kExperts, kHidden});
  Tensor wide = Tensor::zeros(kF32, half.shape()).value();
  for (std::int64_t i = 0; i < kExperts * kHidden; ++i)
    wide.as<float>()[i] = load_as_f32(half.data(), kF16, i);
  for (const std::int64_t tokens : {1, 40, 700}) {
    const Tensor x = test::random_normal(rng, kF16, {tokens, kHidden});
    const DeviceTensor on = DeviceTensor::copy_of(x.view(), kGateGpu).value();
    const auto logits = [&](const Tensor& weight, DType rows_dtype) {
      const cuda::CudaGate gate = cuda::CudaGate::create(weight.view(), {}, {}, rows_dtype).value();
      DeviceTensor out = DeviceTensor::uninitialized(kGateGpu, kF32, {tokens, kExperts}).value();
      EXPECT_TRUE(gate.enqueue(nullptr, on.view().data, kF16, tokens,
                               reinterpret_cast<float*>(out.view().data))
                      .ok());
      EXPECT_TRUE(synchronize(kGateGpu).ok());
      Tensor host = Tensor::zeros(kF32, out.view().shape).value();
      EXPECT_TRUE(copy_tensor(out.view(), host.view()).ok());
      return host;
    };
    std::string why;
    EXPECT_TRUE(test::same_bits(logits(wide, kF16).view(), logits(half, kBF16).view(), &why))
        << why;
    const float had = wide.as<float>()[5];
    wide.as<float>()[5] = 1.0F + 0x1p-15F;
    EXPECT_TRUE(test::same_bits(logits(wide, kF16).view(), logits(wide, kBF16).view(), &why))
        << why;
    wide.as<float>()[5] = had;
  }
}

// All kernels, and every number of tokens the same bits.
TEST(CudaGateLinear, PartsAreWithinTheBound) {
  REQUIRE_HOPPER();
  using enum DType;
  for (const auto& [experts, hidden] : {std::pair{60, 64}, {130, 1032}, {256, 3072}, {16, 7168}}) {
    test::Rng rng(11);
    const Tensor w = test::random_normal(rng, kF32, {experts, hidden},
                                         1 / std::sqrt(static_cast<double>(hidden)));
    const Tensor x = test::random_normal(rng, kBF16, {700, hidden});
    const GateLinear gate = gate_on_gpu(w, Tensor(), kF32, true);
    const auto logits = [&](std::int64_t rows) {
      return logits_of(gate, DeviceTensor::copy_of(first_rows(x, rows).view(), kGateGpu).value());
    };
    const Tensor all = logits(700);
    for (const std::int64_t rows : {1, 8, 16, 17, 33, 100, 128, 129, 300}) {
      const Tensor some = logits(rows);
      EXPECT_EQ(std::memcmp(some.data(), all.data(), static_cast<std::size_t>(some.bytes())), 0)
          << rows << ' ' << hidden;
    }
    for (std::int64_t i = 0; i < 700 * experts; i += 7) {
      double sum = 0, magnitude = 0;
      for (std::int64_t k = 0; k < hidden; ++k) {
        const double product =
            static_cast<double>(load_as_f32(x.data(), kBF16, i / experts * hidden + k)) *
            w.as<float>()[i % experts * hidden + k];
        sum += product;
        magnitude += std::abs(product);
      }
      const double bound = (3.0 * hidden / 32 + 64) * 0x1p-24 * (1 + 0x1p-7) * magnitude;
      ASSERT_LE(std::abs(all.as<float>()[i] - sum), bound) << i << ' ' << hidden;
    }
  }
}

// More rows than one launch takes: the same rows over and over have the same logits.
TEST(CudaGateLinear, MoreRowsThanALaunchTakesHaveTheirBits) {
  REQUIRE_HOPPER();
  using enum DType;
  constexpr std::int64_t kExperts = 3, kHidden = 64, kPeriod = 4095;
  constexpr std::int64_t kRows = (std::int64_t{1} << 21) + 3 * 64 + 5;
  test::Rng rng(13);
  const Tensor few = test::random_normal(rng, kBF16, {kPeriod, kHidden});
  Tensor many = Tensor::zeros(kBF16, {kRows, kHidden}).value();
  for (std::int64_t first = 0; first < kRows; first += kPeriod) {
    std::memcpy(many.data() + first * kHidden * 2, few.data(),
                static_cast<std::size_t>(std::min(kPeriod, kRows - first) * kHidden * 2));
  }
  const DeviceTensor there = DeviceTensor::copy_of(many.view(), kGateGpu).value();
  for (const DType dtype : {kF32, kBF16}) {  // of three parts, of one
    const Tensor w = test::random_normal(rng, dtype, {kExperts, kHidden});
    const GateLinear gate = gate_on_gpu(w, Tensor(), kF32, true);
    const Tensor want = logits_of(gate, DeviceTensor::copy_of(few.view(), kGateGpu).value());
    const Tensor got = logits_of(gate, there);
    std::int64_t wrong = 0;
    for (std::int64_t t = 0; t < kRows; ++t) {
      wrong += std::memcmp(got.as<float>() + t * kExperts,
                           want.as<float>() + t % kPeriod * kExperts, kExperts * 4) != 0;
    }
    EXPECT_EQ(wrong, 0) << dtype_name(dtype);
  }
}

// An error that the caller has left behind is not that of a call of ours.
TEST(CudaGateLinear, AnErrorOfTheCallerIsNotReported) {
  REQUIRE_HOPPER();
  using enum DType;
  test::Rng rng(14);
  const Tensor w = test::random_normal(rng, kBF16, {9, 72});
  const DeviceTensor x =
      DeviceTensor::copy_of(test::random_normal(rng, kBF16, {5, 72}).view(), kGateGpu).value();
  // Logits of BF16 are rounded by a kernel of their own.
  const GateLinear gate = gate_on_gpu(w, Tensor(), kBF16, true);
  DeviceTensor out = DeviceTensor::uninitialized(kGateGpu, kBF16, {5, 9}).value();
  void* none = nullptr;
  ASSERT_NE(cudaMalloc(&none, std::size_t{1} << 50), cudaSuccess);
  const Status status = gate.forward(x.view(), out.view());
  EXPECT_TRUE(status.ok()) << status.to_string();
  static_cast<void>(cudaGetLastError());
}

}  // namespace
}  // namespace moesaic
