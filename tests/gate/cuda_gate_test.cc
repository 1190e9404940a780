// The gate's kernel against the float64 reference. Skipped, visibly, without a device.
#include "gate/cuda_gate.h"

#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <vector>

#include "gate/ref_gate.h"
#include "moesaic/device.h"
#include "numerics/float_codec.h"
#include "support/random.h"

namespace moesaic {
namespace {

using test::Rng;

#define REQUIRE_HOPPER() \
  if (!query_cuda().available) GTEST_SKIP() << "no CUDA device: " << query_cuda().reason

struct Copy {
  explicit Copy(std::size_t bytes) { EXPECT_EQ(cudaMalloc(&data, bytes), cudaSuccess); }
  Copy(const void* host, std::size_t bytes) : Copy(bytes) {
    EXPECT_EQ(cudaMemcpy(data, host, bytes, cudaMemcpyHostToDevice), cudaSuccess);
  }
  Copy(const Copy&) = delete;
  Copy& operator=(const Copy&) = delete;
  ~Copy() { (void)cudaFree(data); }
  void* data = nullptr;
};

struct Case {
  std::int64_t tokens, experts, hidden;
  bool weight_f32, bias;
};

struct Data {
  std::vector<std::uint16_t> x, w16;
  std::vector<float> w32, bias;

  explicit Data(const Case& c) {
    Rng rng(7);
    const auto scale = static_cast<float>(1 / std::sqrt(static_cast<double>(c.hidden)));
    for (std::int64_t i = 0; i < c.tokens * c.hidden; ++i) {
      x.push_back(bf16_from_f32(static_cast<float>(rng.normal())));
    }
    for (std::int64_t i = 0; i < c.experts * c.hidden; ++i) {
      w32.push_back(static_cast<float>(rng.normal()) * scale);
      w16.push_back(bf16_from_f32(w32.back()));
    }
    for (std::int64_t i = 0; i < c.experts; ++i) bias.push_back(static_cast<float>(rng.normal()));
  }
  const void* weight(const Case& c) const {
    return c.weight_f32 ? static_cast<const void*>(w32.data()) : w16.data();
  }
};

// Logits of `count` tokens from `first` on, computed in one launch over poisoned memory.
std::vector<float> run(const Case& c, const Data& d, std::int64_t first, std::int64_t count) {
  const auto weights = static_cast<std::size_t>(c.experts * c.hidden);
  std::vector<float> logits(static_cast<std::size_t>(count * c.experts));
  const Copy x(d.x.data() + first * c.hidden, static_cast<std::size_t>(count * c.hidden) * 2);
  const Copy w(d.weight(c), weights * (c.weight_f32 ? 4 : 2));
  const Copy bias(d.bias.data(), d.bias.size() * 4);
  const Copy out(logits.size() * 4);
  EXPECT_EQ(cudaMemset(out.data, 0xFF, logits.size() * 4), cudaSuccess);
  cuda::GateParams p;
  p.x = x.data;
  p.weight = w.data;
  p.weight_f32 = c.weight_f32;
  p.bias = c.bias ? static_cast<const float*>(bias.data) : nullptr;
  p.tokens = count;
  p.experts = static_cast<std::int32_t>(c.experts);
  p.hidden = static_cast<std::int32_t>(c.hidden);
  p.logits = static_cast<float*>(out.data);
  EXPECT_EQ(cuda::launch_gate(p, nullptr), 0);
  EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  EXPECT_EQ(cudaMemcpy(logits.data(), out.data, logits.size() * 4, cudaMemcpyDeviceToHost),
            cudaSuccess);
  return logits;
}

const Case kCases[] = {
    {1, 256, 7168, false, false}, {16, 384, 7168, false, false}, {32, 256, 3072, true, false},
    {5, 128, 2048, false, true},  {7, 3, 40, false, false},      {9, 5, 33, true, true},
    {3, 1, 1, false, false},      {130, 60, 136, true, false},   {4, 8, 7, false, true},
};

TEST(CudaGate, WithinTheBoundOfTheReference) {
  REQUIRE_HOPPER();
  for (const Case& c : kCases) {
    const Data d(c);
    const std::vector<float> logits = run(c, d, 0, c.tokens);
    const auto bytes = [](const void* p) { return static_cast<const std::byte*>(p); };
    const ConstTensorView x(bytes(d.x.data()), DType::kBF16, {c.tokens, c.hidden});
    const ConstTensorView w(bytes(d.weight(c)), c.weight_f32 ? DType::kF32 : DType::kBF16,
                            {c.experts, c.hidden});
    const ConstTensorView bias =
        c.bias ? ConstTensorView(bytes(d.bias.data()), DType::kF32, {c.experts})
               : ConstTensorView();
    std::vector<double> want(logits.size()), magnitude(logits.size());
    ref_gate_logits(x, w, bias, want.data(), magnitude.data());
    const double bound = (static_cast<double>(c.hidden) / 32 + 16) * std::ldexp(1.0, -24);
    for (std::size_t i = 0; i < logits.size(); ++i) {
      ASSERT_LE(std::abs(logits[i] - want[i]), bound * magnitude[i])
          << c.tokens << "x" << c.experts << "x" << c.hidden << " at " << i;
    }
  }
}

TEST(CudaGate, ATokenAloneHasTheBitsItHasInABatch) {
  REQUIRE_HOPPER();
  for (const Case& c : kCases) {
    const Data d(c);
    const std::vector<float> batch = run(c, d, 0, c.tokens);
    const std::int64_t last = c.tokens - 1;
    for (const std::int64_t t : {std::int64_t{0}, c.tokens / 2, last}) {
      const std::vector<float> alone = run(c, d, t, 1);
      EXPECT_EQ(std::memcmp(alone.data(), batch.data() + t * c.experts, alone.size() * 4), 0)
          << "token " << t << " of " << c.tokens << "x" << c.experts << "x" << c.hidden;
    }
  }
}

}  // namespace
}  // namespace moesaic
