// The gate's kernel against the float64 reference. Skipped, visibly, without a device.
#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <set>
#include <tuple>
#include <vector>

#include "gate/reference/gate.h"
#include "gate/sm90/gate.h"
#include "numerics/float_codec.h"
#include "support/cuda_device.h"
#include "support/random.h"

namespace moesaic {
namespace {

using test::DeviceBytes;
using test::Rng;

struct Case {
  std::int64_t tokens, experts, hidden;
  bool weight_f32, bias;
  DType x_dtype = DType::kBF16;
  bool weight_f16 = false;

  DType weight_dtype() const {
    return weight_f32 ? DType::kF32 : weight_f16 ? DType::kF16 : DType::kBF16;
  }
};

struct Data {
  Tensor x;
  std::vector<std::uint16_t> w16;
  std::vector<float> w32, bias;

  explicit Data(const Case& c) {
    Rng rng(7);
    const auto scale = static_cast<float>(1 / std::sqrt(static_cast<double>(c.hidden)));
    x = test::random_normal(rng, c.x_dtype, {c.tokens, c.hidden});
    for (std::int64_t i = 0; i < c.experts * c.hidden; ++i) {
      w32.push_back(static_cast<float>(rng.normal()) * scale);
      w16.push_back(c.weight_f16 ? f16_from_f32(w32.back()) : bf16_from_f32(w32.back()));
    }
    for (std::int64_t i = 0; i < c.experts; ++i) bias.push_back(static_cast<float>(rng.normal()));
  }
  const void* weight(const Case& c) const {
    return c.weight_f32 ? static_cast<const void*>(w32.data()) : w16.data();
  }
};

// Logits of `count` tokens from `first` on, computed in one launch over poisoned memory.
std::vector<float> run(const Case& c, const Data& d, std::int64_t first, std::int64_t count) {
  const std::int64_t row_bytes = c.hidden * (dtype_bits(c.x_dtype) / 8);
  const DeviceBytes x(d.x.data() + first * row_bytes, count * row_bytes);
  const DeviceBytes w(d.weight(c), c.experts * c.hidden * (c.weight_f32 ? 4 : 2));
  const DeviceBytes bias(d.bias), out(count * c.experts * 4);
  cuda::GateParams p;
  p.x = x.as();
  p.x_dtype = c.x_dtype;
  p.weight = w.as();
  p.weight_f32 = c.weight_f32;
  p.weight_f16 = c.weight_f16;
  p.bias = c.bias ? bias.as<float>() : nullptr;
  p.tokens = count;
  p.experts = static_cast<std::int32_t>(c.experts);
  p.hidden = static_cast<std::int32_t>(c.hidden);
  p.logits = out.as<float>();
  EXPECT_EQ(cuda::launch_gate(p, choose_gate_kernel(p), cuda::DeviceTraits(), nullptr), 0);
  EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  EXPECT_TRUE(out.margin_is_intact());
  return out.values<float>();
}

const Case kCases[] = {
    {1, 256, 7168, false, false},
    {16, 384, 7168, false, false},
    {32, 256, 3072, true, false},
    {5, 128, 2048, false, true},
    {7, 3, 40, false, false},
    {9, 5, 33, true, true},
    {3, 1, 1, false, false},
    {130, 60, 136, true, false},
    {4, 8, 7, false, true},
    {17, 256, 7168, false, true},
    {64, 130, 520, false, false},
    {200, 128, 2048, false, false},
    {700, 1, 1032, false, false},
    {4100, 257, 264, false, true},
    {8200, 128, 256, false, false},
    {8, 256, 7168, false, false},
    {31, 100, 2880, false, true},
    {33, 256, 7168, false, false},
    {64, 384, 7168, false, false},
    {65, 128, 4096, false, true},
    {128, 256, 7168, false, false},
    {128, 384, 7168, false, true},
    {93, 240, 7168, false, false},
    {129, 256, 7168, false, false},
    {152, 8, 64, false, true},
    {152, 8, 520, false, false},
    {2101, 8, 64, false, true},
    {5019, 8, 64, false, false},
    {5019, 100, 64, false, true},
    {8459, 8, 520, false, false},
    {367, 130, 1032, false, true},
    {1483, 130, 1032, false, false},
    {1047, 8, 7168, false, false},
    {2101, 8, 7168, false, false},
    {140, 33, 2880, false, false},
    {20, 40, 16384, false, false},
    {100, 17, 32768, false, false},
    {1, 128, 6144, true, false},
    {32, 128, 6144, true, true},
    {33, 256, 3072, true, false},
    {7, 256, 3072, true, false, DType::kF32},
    {9, 16, 256, false, false, DType::kF32},
    {5, 7, 33, true, true, DType::kF32},
    {9, 16, 256, true, false, DType::kF16},
    {700, 101, 520, true, true},
    {1100, 66, 77, true, false, DType::kF16},
    {530, 130, 264, false, true, DType::kF16},
    {520, 128, 264, false, false, DType::kF32},
    {3, 5, 31, false, true, DType::kF16},
};

// All of them, those of bf16 in F16 too.
std::vector<Case> all_cases() {
  std::vector<Case> cases(std::begin(kCases), std::end(kCases));
  for (const Case& c : kCases) {
    if (c.weight_f32 || c.x_dtype != DType::kBF16 || c.hidden % 8 != 0) continue;
    cases.push_back({c.tokens, c.experts, c.hidden, false, c.bias, DType::kF16, true});
  }
  return cases;
}

TEST(CudaGate, WithinTheBoundOfTheReference) {
  REQUIRE_HOPPER();
  for (const Case& c : all_cases()) {
    const Data d(c);
    const std::vector<float> logits = run(c, d, 0, c.tokens);
    const auto bytes = [](const void* p) { return static_cast<const std::byte*>(p); };
    const ConstTensorView x = d.x.view();
    const ConstTensorView w(bytes(d.weight(c)), c.weight_dtype(), {c.experts, c.hidden});
    const ConstTensorView bias =
        c.bias ? ConstTensorView(bytes(d.bias.data()), DType::kF32, {c.experts})
               : ConstTensorView();
    std::vector<double> want(logits.size()), magnitude(logits.size());
    gate::ref_gate_logits(x, w, bias, want.data(), magnitude.data());
    const double bound = (static_cast<double>(c.hidden) / 32 + 64) * std::ldexp(1.0, -24);
    for (std::size_t i = 0; i < logits.size(); ++i) {
      ASSERT_LE(std::abs(logits[i] - want[i]), bound * magnitude[i])
          << c.tokens << "x" << c.experts << "x" << c.hidden << " at " << i;
    }
  }
}

// Sums of small integers are exact in any order, in every kernel.
TEST(CudaGate, ExactOnIntegers) {
  REQUIRE_HOPPER();
  for (const Case& c :
       {Case{1, 100, 1032, false, true}, Case{5, 100, 1032, false, false},
        Case{16, 100, 1032, false, true}, Case{40, 100, 1032, false, true},
        Case{128, 100, 1032, false, false}, Case{300, 100, 1032, false, true},
        Case{1100, 90, 264, false, true}, Case{1, 256, 3072, true, false},
        Case{20, 256, 3072, true, true}, Case{5, 100, 1032, false, true, DType::kF16, true},
        Case{40, 100, 1032, false, false, DType::kF16, true},
        Case{300, 100, 1032, false, true, DType::kF16, true}}) {
    Data d(c);
    Rng rng(3);
    const auto code = [&](float v) { return c.weight_f16 ? f16_from_f32(v) : bf16_from_f32(v); };
    auto* const x = reinterpret_cast<std::uint16_t*>(d.x.data());
    for (std::int64_t i = 0; i < c.tokens * c.hidden; ++i) {
      x[i] = code(static_cast<float>(rng.integer(-4, 4)));
    }
    for (std::size_t i = 0; i < d.w32.size(); ++i) {
      d.w32[i] = static_cast<float>(rng.integer(-4, 4));
      d.w16[i] = code(d.w32[i]);
    }
    for (auto& b : d.bias) b = static_cast<float>(rng.integer(-4, 4));
    const std::vector<float> got = run(c, d, 0, c.tokens);
    for (std::int64_t t = 0; t < c.tokens; ++t) {
      for (std::int64_t e = 0; e < c.experts; ++e) {
        float want = c.bias ? d.bias[static_cast<std::size_t>(e)] : 0.0F;
        for (std::int64_t h = 0; h < c.hidden; ++h) {
          const std::uint16_t row = x[t * c.hidden + h];
          want += (c.weight_f16 ? f32_from_f16(row) : f32_from_bf16(row)) *
                  d.w32[static_cast<std::size_t>(e * c.hidden + h)];
        }
        ASSERT_EQ(got[static_cast<std::size_t>(t * c.experts + e)], want)
            << c.tokens << "x" << c.experts << "x" << c.hidden << " at " << t << ' ' << e;
      }
    }
  }
}

cuda::GateParams shape_of(std::int64_t tokens, std::int32_t experts, std::int32_t hidden) {
  cuda::GateParams p;
  p.tokens = tokens;
  p.experts = experts;
  p.hidden = hidden;
  return p;
}

// Needs no device.
TEST(CudaGate, KernelsBySizeAndDType) {
  const auto choice = [](std::int64_t tokens, std::int32_t experts, std::int32_t hidden,
                         bool f32 = false, DType x_dtype = DType::kBF16) {
    cuda::GateParams p = shape_of(tokens, experts, hidden);
    p.weight_f32 = f32;
    p.x_dtype = x_dtype;
    return choose_gate_kernel(p);
  };
  using cuda::GateKernel;
  EXPECT_EQ(choice(1, 256, 7168), GateKernel::kOneWave);
  EXPECT_EQ(choice(16, 384, 7168), GateKernel::kOneWave);
  EXPECT_EQ(choice(17, 384, 7168), GateKernel::kResidentWeights);
  EXPECT_EQ(choice(64, 384, 7168), GateKernel::kResidentWeights);
  EXPECT_EQ(choice(128, 384, 7168), GateKernel::kTiledPipeline) << "290 KB for each block";
  EXPECT_EQ(choice(128, 128, 4096), GateKernel::kResidentWeights);
  EXPECT_EQ(choice(129, 128, 2048), GateKernel::kTiledPipeline);
  EXPECT_EQ(choice(64, 8, 32768), GateKernel::kTiledPipeline) << "rows too long for shared memory";
  EXPECT_EQ(choice(1, 8, 7163), GateKernel::kWarpPerLogit);
  EXPECT_EQ(choice(1, 256, 7168, false, DType::kF16), GateKernel::kWarpPerLogit);
  cuda::GateParams half = shape_of(1, 256, 7168);
  half.weight_f16 = true;
  EXPECT_EQ(choose_gate_kernel(half), GateKernel::kWarpPerLogit) << "rows of bf16";
  half.x_dtype = DType::kF16;
  EXPECT_EQ(choose_gate_kernel(half), GateKernel::kOneWave);
  EXPECT_EQ(choice(32, 256, 3072, true), GateKernel::kFp32Rows);
  EXPECT_EQ(choice(32, 128, 6144, true, DType::kF32), GateKernel::kFp32Rows);
  EXPECT_EQ(choice(33, 256, 3072, true), GateKernel::kWarpPerLogit);
  EXPECT_EQ(choice(32, 128, 3072, true), GateKernel::kWarpPerLogit);
  EXPECT_EQ(choice(1, 256, 3072, true, DType::kF16), GateKernel::kWarpPerLogit);
  EXPECT_EQ(gate_kernel_name(GateKernel::kOneWave), "sm90_gate_one_wave");
  EXPECT_EQ(gate_kernel_name(GateKernel::kResidentWeights), "sm90_gate_resident_weights");
  EXPECT_EQ(gate_kernel_name(GateKernel::kTiledPipeline), "sm90_gate_tiled_pipeline");
}

TEST(CudaGate, LinesOfResidentWeights) {
  EXPECT_EQ(resident_weights_lines(shape_of(17, 256, 7168)), 1);
  EXPECT_EQ(resident_weights_lines(shape_of(64, 256, 7168)), 1);
  EXPECT_EQ(resident_weights_lines(shape_of(128, 128, 4096)), 2);
  EXPECT_LE(cuda::resident_weights_bytes(7168), cuda::kGateSharedLimit);
}

TEST(CudaGate, TilesOfThePipeline) {
  const auto grid = [](std::int64_t tokens, std::int32_t experts, std::int32_t hidden) {
    const cuda::TiledPipelineGrid g = tiled_pipeline_grid(shape_of(tokens, experts, hidden));
    return std::tuple(g.tokens, g.experts, g.cluster);
  };
  using Grid = std::tuple<int, int, int>;
  // The fastest of all that were measured.
  EXPECT_EQ(grid(128, 256, 7168), Grid(64, 64, 8));
  EXPECT_EQ(grid(256, 256, 7168), Grid(64, 128, 8));
  EXPECT_EQ(grid(512, 256, 7168), Grid(128, 128, 8));
  EXPECT_EQ(grid(1024, 256, 7168), Grid(128, 128, 4));
  EXPECT_EQ(grid(2048, 256, 7168), Grid(64, 128, 2));
  EXPECT_EQ(grid(8192, 256, 7168), Grid(128, 128, 1));
  EXPECT_EQ(grid(8192, 128, 2048), Grid(64, 128, 1));
  // The cases above run each of them.
  std::set<Grid> all;
  for (const Case& c : kCases) {
    const auto p = shape_of(c.tokens, static_cast<std::int32_t>(c.experts),
                            static_cast<std::int32_t>(c.hidden));
    if (c.weight_f32 || c.x_dtype != DType::kBF16) continue;
    if (choose_gate_kernel(p) != cuda::GateKernel::kTiledPipeline) continue;
    all.insert(grid(c.tokens, p.experts, p.hidden));
  }
  EXPECT_EQ(all, (std::set<Grid>{{64, 64, 1},
                                 {64, 64, 2},
                                 {64, 64, 4},
                                 {64, 64, 8},
                                 {64, 128, 1},
                                 {64, 128, 2},
                                 {64, 128, 8},
                                 {128, 128, 1},
                                 {128, 128, 4},
                                 {128, 128, 8}}));
}

TEST(CudaGate, ATokenAloneHasTheBitsItHasInABatch) {
  REQUIRE_HOPPER();
  for (const Case& c : all_cases()) {
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
