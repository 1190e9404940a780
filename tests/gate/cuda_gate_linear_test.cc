// GateLinear on a GPU: what its options do to the kernels' logits. Skipped, visibly, without a
// device.
#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <optional>
#include <string>
#include <utility>

#include "gate/rounding.h"
#include "gate/sm90/gate_linear.h"
#include "moesaic/device_tensor.h"
#include "moesaic/gate.h"
#include "numerics/element.h"
#include "support/cuda_device.h"
#include "support/metrics.h"
#include "support/random.h"
#include "support/refusal.h"

namespace moesaic {
namespace {

constexpr Device kGateGpu = Device::cuda(0);

struct GateCase {
  std::int64_t tokens, experts, hidden;
  DType weight_dtype, x_dtype;
  bool bias;
};

GateLinear gate_on_gpu(const Tensor& weight, const Tensor& bias, std::optional<DType> logits_dtype,
                       bool fp32) {
  GateLinear::Options options;
  options.device = kGateGpu;
  options.logits_dtype = logits_dtype;
  options.force_fp32_compute = fp32;
  return GateLinear::create(weight.view(), bias.view(), options).value();
}

Tensor logits_of(const GateLinear& gate, const DeviceTensor& x) {
  const Shape shape{x.view().dim(0), gate.num_experts()};
  DeviceTensor out = DeviceTensor::uninitialized(kGateGpu, gate.logits_dtype(), shape).value();
  const Status status = gate.forward(x.view(), out.view());
  EXPECT_TRUE(status.ok()) << status.to_string();
  EXPECT_TRUE(synchronize(kGateGpu).ok());
  Tensor host = Tensor::zeros(gate.logits_dtype(), shape).value();
  EXPECT_TRUE(copy_tensor(out.view(), host.view()).ok());
  return host;
}

Tensor rounded_as(const Tensor& logits, DType linear, DType dtype) {
  Tensor to = Tensor::zeros(dtype, logits.shape()).value();
  for (std::int64_t i = 0; i < logits.bytes() / 4; ++i) {
    store_from_f32(to.data(), dtype, i, gate::rounded_to(logits.as<float>()[i], linear));
  }
  return to;
}

// The fp32 logits of the same kernels, rounded by the CPU's codecs.
TEST(CudaGateLinear, LogitsAreThoseOfF32Rounded) {
  REQUIRE_HOPPER();
  using enum DType;
  for (const GateCase& c :
       {GateCase{1, 256, 7168, kBF16, kBF16, false}, GateCase{16, 128, 2048, kBF16, kBF16, true},
        GateCase{70, 130, 520, kBF16, kBF16, true}, GateCase{700, 60, 1032, kBF16, kBF16, false},
        GateCase{5, 7, 33, kBF16, kBF16, true}, GateCase{9, 16, 256, kF16, kF16, true},
        GateCase{20, 256, 3072, kF32, kBF16, false}, GateCase{7, 9, 40, kF32, kF32, true}}) {
    test::Rng rng(5);
    const Tensor w = test::random_normal(rng, c.weight_dtype, {c.experts, c.hidden},
                                         1 / std::sqrt(static_cast<double>(c.hidden)));
    const Tensor bias = c.bias ? test::random_normal(rng, kF32, {c.experts}) : Tensor();
    const DeviceTensor x =
        DeviceTensor::copy_of(test::random_normal(rng, c.x_dtype, {c.tokens, c.hidden}).view(),
                              kGateGpu)
            .value();
    const Tensor sums = logits_of(gate_on_gpu(w, bias, kF32, true), x);
    for (const bool fp32 : {true, false}) {
      const DType linear = fp32 ? kF32 : c.weight_dtype;
      for (const DType dtype : {kF32, kBF16, kF16}) {
        const Tensor got = logits_of(gate_on_gpu(w, bias, dtype, fp32), x);
        std::string why;
        EXPECT_TRUE(test::same_bits(got.view(), rounded_as(sums, linear, dtype).view(), &why))
            << c.tokens << "x" << c.experts << "x" << c.hidden << " " << dtype_name(linear) << " "
            << dtype_name(dtype) << ": " << why;
      }
    }
  }
}

TEST(CudaGateLinear, TheLogitsDTypeMayBeSetOnceAndLater) {
  REQUIRE_HOPPER();
  test::Rng rng(6);
  const Tensor w = test::random_normal(rng, DType::kBF16, {8, 64});
  const DeviceTensor x =
      DeviceTensor::copy_of(test::random_normal(rng, DType::kBF16, {3, 64}).view(), kGateGpu)
          .value();
  const Tensor sums = logits_of(gate_on_gpu(w, Tensor(), DType::kF32, true), x);
  GateLinear gate = gate_on_gpu(w, Tensor(), std::nullopt, false);
  std::string why;
  for (const DType dtype : {DType::kBF16, DType::kF32}) {
    EXPECT_EQ(gate.logits_dtype(), dtype);
    EXPECT_TRUE(test::same_bits(logits_of(gate, x).view(),
                                rounded_as(sums, DType::kBF16, dtype).view(), &why))
        << why;
    EXPECT_EQ(gate.set_logits_dtype(DType::kF32).ok(), dtype == DType::kBF16);
  }
}

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

// Rows that lie apart, in every kernel: the bits of the same rows side by side, with the caller's
// workspace too and from a graph.
TEST(CudaGateLinear, RowsMayLieApart) {
  REQUIRE_HOPPER();
  using enum DType;
  for (const GateCase& c :
       {GateCase{1, 256, 7168, kBF16, kBF16, false}, GateCase{16, 128, 2048, kBF16, kBF16, true},
        GateCase{70, 130, 520, kBF16, kBF16, true}, GateCase{700, 60, 1032, kBF16, kBF16, false},
        GateCase{9, 16, 256, kF16, kF16, true}, GateCase{20, 256, 3072, kF32, kBF16, false},
        GateCase{7, 9, 33, kF32, kF32, true}}) {
    test::Rng rng(8);
    const Tensor w = test::random_normal(rng, c.weight_dtype, {c.experts, c.hidden}, 0.05);
    const std::int64_t apart = c.hidden + 7, size = dtype_bits(c.x_dtype) / 8;
    const std::int64_t first = c.tokens > 1 ? 3 : 0;  // a single row is contiguous, and aligned
    const Tensor wide = test::random_normal(rng, c.x_dtype, {c.tokens, apart});
    Tensor dense = Tensor::zeros(c.x_dtype, {c.tokens, c.hidden}).value();
    for (std::int64_t t = 0; t < c.tokens; ++t) {
      std::memcpy(dense.data() + t * c.hidden * size, wide.data() + (t * apart + first) * size,
                  static_cast<std::size_t>(c.hidden * size));
    }
    const GateLinear gate = gate_on_gpu(w, Tensor(), kF16, true);
    const Tensor want = logits_of(gate, DeviceTensor::copy_of(dense.view(), kGateGpu).value());
    const DeviceTensor x = DeviceTensor::copy_of(wide.view(), kGateGpu).value();
    ConstTensorView rows(x.view().data + first * size, c.x_dtype, {c.tokens, c.hidden}, kGateGpu);
    rows.strides[0] = apart;
    DeviceTensor out = DeviceTensor::uninitialized(kGateGpu, kF16, want.shape()).value();
    const DeviceTensor workspace =
        DeviceTensor::uninitialized(kGateGpu, kU8, {gate.workspace_size(c.tokens).value()}).value();
    cudaStream_t stream = nullptr;
    cudaGraph_t graph = nullptr;
    cudaGraphExec_t exec = nullptr;
    ASSERT_EQ(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), cudaSuccess);
    const auto expect_result = [&](const char* how) {
      ASSERT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
      Tensor got = Tensor::zeros(kF16, want.shape()).value();
      ASSERT_TRUE(copy_tensor(out.view(), got.view()).ok());
      std::string why;
      EXPECT_TRUE(test::same_bits(got.view(), want.view(), &why))
          << how << " " << c.tokens << "x" << c.experts << "x" << c.hidden << ": " << why;
      ASSERT_EQ(cudaMemset(out.data(), 0xFF, static_cast<std::size_t>(out.bytes())), cudaSuccess);
    };
    for (const bool given : {false, true}) {
      const Status status = given ? gate.enqueue({stream}, rows, out.view(), workspace.span())
                                  : gate.forward(rows, out.view(), {stream});
      ASSERT_TRUE(status.ok()) << status.to_string();
      expect_result(given ? "enqueue" : "forward");
    }
    ASSERT_EQ(cudaStreamBeginCapture(stream, cudaStreamCaptureModeRelaxed), cudaSuccess);
    const Status captured = gate.enqueue({stream}, rows, out.view(), workspace.span());
    ASSERT_EQ(cudaStreamEndCapture(stream, &graph), cudaSuccess);
    ASSERT_TRUE(captured.ok()) << captured.to_string();
    ASSERT_EQ(cudaGraphInstantiate(&exec, graph, 0), cudaSuccess);
    for (int replay = 0; replay < 2; ++replay) {
      ASSERT_EQ(cudaGraphLaunch(exec, stream), cudaSuccess);
      expect_result("graph");
    }
    if (c.tokens > 1) {
      rows.strides[0] = c.hidden - 1;
      test::expect_refusal(gate.forward(rows, out.view()), StatusCode::kInvalidLayout,
                           {"hidden_states: got strides", "or more, 1]"});
    }
    (void)cudaGraphExecDestroy(exec);
    (void)cudaGraphDestroy(graph);
    (void)cudaStreamDestroy(stream);
  }
}

// With the caller's workspace nothing is taken from the device, and the bits are the same.
TEST(CudaGateLinear, EnqueueUsesTheCallersWorkspace) {
  REQUIRE_HOPPER();
  test::Rng rng(7);
  const Tensor w = test::random_normal(rng, DType::kBF16, {24, 128});
  const DeviceTensor x =
      DeviceTensor::copy_of(test::random_normal(rng, DType::kBF16, {9, 128}).view(), kGateGpu)
          .value();
  for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
    const GateLinear gate = gate_on_gpu(w, Tensor(), dtype, true);
    const std::int64_t bytes = gate.workspace_size(9).value();
    EXPECT_EQ(bytes, dtype == DType::kF32 ? 0 : 9 * 24 * 4);
    const Tensor want = logits_of(gate, x);
    const test::DeviceBytes workspace(bytes), out(want.bytes());
    const TensorView to(out.as<std::byte>(), dtype, want.shape(), kGateGpu);
    const std::span<std::byte> room(workspace.as<std::byte>(), static_cast<std::size_t>(bytes));
    const Status status = gate.enqueue({}, x.view(), to, room);
    ASSERT_TRUE(status.ok()) << status.to_string();
    ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    Tensor got = Tensor::zeros(dtype, want.shape()).value();
    out.download(got.data());
    std::string why;
    EXPECT_TRUE(test::same_bits(got.view(), want.view(), &why)) << why;
    EXPECT_TRUE(workspace.margin_is_intact() && out.margin_is_intact());
    if (bytes == 0) continue;
    test::expect_refusal(gate.enqueue({}, x.view(), to, room.first(room.size() - 1)),
                         StatusCode::kWorkspaceTooSmall, {"workspace: got 863 bytes, need 864"});
    alignas(256) static std::byte host[9 * 24 * 4];
    test::expect_refusal(gate.enqueue({}, x.view(), to, host), StatusCode::kInvalidArgument,
                         {"workspace", "host memory"});
    test::expect_refusal(gate.enqueue({}, x.view(), to, {x.data(), room.size()}),
                         StatusCode::kAliasing, {"workspace", "hidden_states"});
  }
  const GateLinear cpu = GateLinear::create(w.view(), {}, {}).value();
  EXPECT_EQ(cpu.workspace_size(9).value(), 0);
  EXPECT_FALSE(cpu.workspace_size(-1).ok());
  test::expect_refusal(cpu.enqueue({}, x.view(), {}, {}), StatusCode::kUnsupported,
                       {"enqueue", "CPU"});
}

// Rounded logits of 16 bits pass through memory that the graph holds.
TEST(CudaGateLinear, ACapturedCallComputesAnew) {
  REQUIRE_HOPPER();
  constexpr std::int64_t kTokens = 20, kExperts = 16, kHidden = 256;
  test::Rng rng(7);
  const Tensor w = test::random_normal(rng, DType::kBF16, {kExperts, kHidden});
  const GateLinear gate = gate_on_gpu(w, Tensor(), DType::kBF16, true);
  DeviceTensor x = DeviceTensor::uninitialized(kGateGpu, DType::kBF16, {kTokens, kHidden}).value();
  DeviceTensor out =
      DeviceTensor::uninitialized(kGateGpu, DType::kBF16, {kTokens, kExperts}).value();
  cudaStream_t stream = nullptr;
  ASSERT_EQ(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), cudaSuccess);
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t exec = nullptr;
  ASSERT_EQ(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal), cudaSuccess);
  const Status status = gate.forward(x.view(), out.view(), {stream});
  ASSERT_EQ(cudaStreamEndCapture(stream, &graph), cudaSuccess);
  ASSERT_TRUE(status.ok()) << status.to_string();
  ASSERT_EQ(cudaGraphInstantiate(&exec, graph, 0), cudaSuccess);
  for (int replay = 0; replay < 5; ++replay) {
    const Tensor rows = test::random_normal(rng, DType::kBF16, {kTokens, kHidden});
    ASSERT_TRUE(copy_tensor(rows.view(), x.view()).ok());
    const Tensor want = logits_of(gate, x);
    ASSERT_EQ(cudaGraphLaunch(exec, stream), cudaSuccess);
    ASSERT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
    Tensor got = Tensor::zeros(DType::kBF16, {kTokens, kExperts}).value();
    ASSERT_TRUE(copy_tensor(out.view(), got.view()).ok());
    std::string why;
    EXPECT_TRUE(test::same_bits(got.view(), want.view(), &why)) << why;
  }
  (void)cudaGraphExecDestroy(exec);
  (void)cudaGraphDestroy(graph);
  (void)cudaStreamDestroy(stream);
}

TEST(CudaGateLinear, RowsOfAnotherDTypeThanALinearIn16BitsAreRefused) {
  REQUIRE_HOPPER();
  test::Rng rng(8);
  const Tensor w = test::random_normal(rng, DType::kBF16, {8, 64});
  const GateLinear gate = gate_on_gpu(w, Tensor(), DType::kF32, false);
  const DeviceTensor x = DeviceTensor::uninitialized(kGateGpu, DType::kF32, {3, 64}).value();
  DeviceTensor out = DeviceTensor::uninitialized(kGateGpu, DType::kF32, {3, 8}).value();
  test::expect_refusal(gate.forward(x.view(), out.view()), StatusCode::kUnsupported,
                       {"hidden_states: got F32, need BF16"});
}

}  // namespace
}  // namespace moesaic
