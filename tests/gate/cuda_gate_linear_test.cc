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
#include "gate_on_gpu.h"
#include "moesaic/device_tensor.h"
#include "moesaic/gate.h"
#include "numerics/element.h"
#include "support/cuda_device.h"
#include "support/metrics.h"
#include "support/random.h"
#include "support/refusal.h"

namespace moesaic {
namespace {

using test::gate_on_gpu;
using test::kGateGpu;
using test::logits_of;

struct GateCase {
  std::int64_t tokens, experts, hidden;
  DType weight_dtype, x_dtype;
  bool bias;
};

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
