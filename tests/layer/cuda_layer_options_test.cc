// What options make of a layer on a GPU: the output in place of the hidden states, rows that lie
// apart, the caller's view of the ids, shared experts on a second stream. Skipped, visibly, without a
// device.
#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <cstring>
#include <functional>
#include <string>
#include <vector>

#include "cuda/device_memory.h"
#include "layer/layer_case.h"
#include "layer/sm90/layer.h"
#include "moesaic/device_tensor.h"
#include "support/cuda_device.h"
#include "support/expect_bits.h"
#include "support/refusal.h"

namespace moesaic {
namespace {

using test::expect_refusal;
using test::expect_same;
using test::Feature;
using test::LayerTensors;
using test::make_layer;
using test::make_tensors;
using test::on_gpu;
using test::random_hidden;

constexpr Device kOptionsGpu = Device::cuda(0);

std::vector<Feature> option_features() {
  std::vector<Feature> list = test::common_features();
  list.push_back({"identity experts", &test::with_identity_experts});
  list.push_back({"joined", [] {
                    MoeLayerSpec spec = test::with_shared(false);
                    spec.shared.intermediate_size = spec.intermediate_size;
                    return spec;
                  }});
  list.push_back({"fp8-block", [] {
                    MoeLayerSpec spec = test::with_shared(true);
                    spec.hidden_size = 256;
                    spec.intermediate_size = spec.shared.intermediate_size = 128;
                    spec.quant = quant_scheme_from_name("fp8-block").value();
                    return spec;
                  }});
  return list;
}

DeviceTensor gpu_copy(const Tensor& t) {
  return DeviceTensor::copy_of(t.view(), kOptionsGpu).value();
}
DeviceTensor poisoned(DType dtype, const Shape& shape) {
  DeviceTensor t = DeviceTensor::uninitialized(kOptionsGpu, dtype, shape).value();
  EXPECT_EQ(cudaMemset(t.data(), 0xFF, static_cast<std::size_t>(t.bytes())), cudaSuccess);
  return t;
}
Tensor host_copy(const DeviceTensor& t) {
  Tensor host = Tensor::zeros(t.view().dtype, t.view().shape).value();
  EXPECT_TRUE(copy_tensor(t.view(), host.view()).ok());
  return host;
}

// enqueue, and the output when it is there.
Tensor run(const FusedMoE& layer, FusedMoE::Args args, const DeviceTensor& out) {
  const Status status = layer.enqueue({}, args);
  EXPECT_TRUE(status.ok()) << status.to_string();
  EXPECT_TRUE(synchronize(kOptionsGpu).ok());
  return host_copy(out);
}

TEST(CudaLayerOptions, InPlaceHasTheBitsOfAnOutputElsewhere) {
  REQUIRE_HOPPER();
  for (const Feature& f : option_features()) {
    const LayerTensors t = make_tensors(31, f.spec());
    FusedMoE::Options options = on_gpu(300);
    const FusedMoE plain = make_layer(t, options);
    options.inplace = true;
    const FusedMoE layer = make_layer(t, options);
    for (const std::int64_t rows : {1, 2, 6, 40, 300}) {
      const std::string what = f.name + " " + std::to_string(rows);
      const Tensor x = random_hidden(32, rows, t.spec.hidden_size);
      DeviceTensor both = gpu_copy(x), out = poisoned(DType::kBF16, x.shape());
      FusedMoE::Args args;
      args.hidden_states = both.view();
      args.output = out.view();
      const Tensor want = run(plain, args, out);
      expect_same(run(layer, args, out), want, what + " elsewhere");
      args.output = both.view();
      expect_refusal(plain.enqueue({}, args), StatusCode::kAliasing, {"output", "hidden_states"});
      expect_same(run(layer, args, both), want, what);
      Tensor host = Tensor::zeros(DType::kBF16, x.shape()).value();
      std::memcpy(host.data(), x.data(), static_cast<std::size_t>(x.bytes()));
      ASSERT_TRUE(layer.forward(host.view(), host.view()).ok());
      expect_same(host, want, what + " in host memory");
      if (t.spec.shared.intermediate_size == 0) continue;
      // The shared part apart reads the hidden states after the routed sum is there.
      DeviceTensor part = poisoned(DType::kF32, x.shape());
      args.shared_output = part.view();
      args.output = out.view();
      DeviceTensor again = gpu_copy(x);
      args.hidden_states = again.view();
      const Tensor routed = run(plain, args, out), shared = host_copy(part);
      args.output = again.view();
      expect_same(run(layer, args, again), routed, what + " routed");
      expect_same(host_copy(part), shared, what + " shared");
    }
    DeviceTensor x = gpu_copy(random_hidden(33, 3, t.spec.hidden_size));
    FusedMoE::Args args;
    args.hidden_states = x.view();
    args.output = {x.data(), DType::kF32, x.view().shape, kOptionsGpu};  // another dtype
    expect_refusal(layer.enqueue({}, args), StatusCode::kAliasing, {"output"});
  }
}

TEST(CudaLayerOptions, RowsMayLieApart) {
  REQUIRE_HOPPER();
  for (const Feature& f : option_features()) {
    const LayerTensors t = make_tensors(34, f.spec());
    const FusedMoE layer = make_layer(t, on_gpu(64));
    const std::int64_t hidden = t.spec.hidden_size, apart = hidden + 3;
    for (const std::int64_t rows : {2, 64}) {
      const Tensor wide = random_hidden(35, rows, apart);
      Tensor dense = Tensor::zeros(DType::kBF16, {rows, hidden}).value();
      for (std::int64_t r = 0; r < rows; ++r) {
        std::memcpy(dense.data() + r * hidden * 2, wide.data() + (r * apart + 1) * 2,
                    static_cast<std::size_t>(hidden * 2));
      }
      const DeviceTensor x = gpu_copy(dense), in = gpu_copy(wide);
      DeviceTensor out = poisoned(DType::kF32, dense.shape());
      FusedMoE::Args args;
      args.hidden_states = x.view();
      args.output = out.view();
      const Tensor want = run(layer, args, out);
      args.hidden_states = {in.view().data + 2, DType::kBF16, {rows, hidden}, kOptionsGpu};
      args.hidden_states.strides[0] = apart;
      ASSERT_EQ(cudaMemset(out.data(), 0xFF, static_cast<std::size_t>(out.bytes())), cudaSuccess);
      expect_same(run(layer, args, out), want, f.name);
      args.hidden_states.strides[0] = hidden - 1;
      expect_refusal(layer.enqueue({}, args), StatusCode::kInvalidLayout,
                     {"hidden_states: got strides"});
    }
  }
}

TEST(CudaLayerOptions, TheCallersFunctionSeesTheIdsOfATrace) {
  REQUIRE_HOPPER();
  for (const Feature& f : option_features()) {
    const LayerTensors t = make_tensors(36, f.spec());
    const std::int64_t k = t.spec.routing.top_k;
    const DeviceTensor seen = poisoned(DType::kI32, {40, k});
    int calls = 0;
    FusedMoE::Options options = on_gpu(40);
    options.on_device.capture = [&](Stream stream, ConstTensorView ids) {
      ++calls;
      EXPECT_TRUE(ids.device == kOptionsGpu && ids.dtype == DType::kI32 && ids.dim(1) == k);
      return cuda::copy_rows_on_device("ids", const_cast<std::byte*>(seen.data()), k * 4, ids.data,
                                       ids.strides[0] * 4, k * 4, ids.dim(0), stream.handle);
    };
    const FusedMoE layer = make_layer(t, options);
    for (const std::int64_t rows : {1, 3, 40}) {
      const Tensor x = random_hidden(37, rows, t.spec.hidden_size);
      const DeviceTensor in = gpu_copy(x);
      DeviceTensor out = poisoned(DType::kBF16, x.shape());
      FusedMoE::Args args;
      args.hidden_states = in.view();
      args.output = out.view();
      DeviceTensor ids = poisoned(DType::kI32, {rows, k});
      for (const bool traced : {false, true}) {
        if (traced) args.trace.topk_ids = ids.view();
        calls = 0;
        ASSERT_EQ(cudaMemset(const_cast<std::byte*>(seen.data()), 0xFF,
                             static_cast<std::size_t>(seen.bytes())),
                  cudaSuccess);
        run(layer, args, out);
        EXPECT_EQ(calls, 1);
        const Tensor got = host_copy(seen);  // before the next call, which is captured too
        const Tensor want = test::run_layer(layer, x).topk_ids;
        EXPECT_EQ(std::memcmp(got.data(), want.data(), static_cast<std::size_t>(want.bytes())), 0)
            << f.name << " " << rows << " " << traced;
      }
    }
    options.on_device.capture = [](Stream, ConstTensorView) {
      return Status(StatusCode::kDevice, "no room");
    };
    const FusedMoE failing = make_layer(t, options);
    const Tensor x = random_hidden(38, 2, t.spec.hidden_size);
    Tensor y = Tensor::zeros(DType::kF32, x.shape()).value();
    expect_refusal(failing.forward(x.view(), y.view()), StatusCode::kDevice,
                   {"on_device.capture", "no room"});
  }
}

// Whichever stream is faster, and from a graph: the bits are those of one stream.
TEST(CudaLayerOptions, SharedExpertsOnASecondStreamHaveTheSameBits) {
  REQUIRE_HOPPER();
  for (const Feature& f : option_features()) {
    MoeLayerSpec spec = f.spec();
    if (spec.shared.intermediate_size == 0) continue;
    const LayerTensors t = make_tensors(39, spec);
    // Rows beyond kJoinedTokens: a shared expert that joins is then computed by itself.
    const std::int64_t most = f.name == "joined" ? cuda::kJoinedTokens + 40 : 700;
    FusedMoE::Options options = on_gpu(most);
    const FusedMoE plain = make_layer(t, options);
    options.shared_stream = true;
    const FusedMoE layer = make_layer(t, options);
    EXPECT_GE(layer.workspace_bytes(), plain.workspace_bytes());
    for (const std::int64_t rows : {std::int64_t{1}, std::int64_t{4}, std::int64_t{70}, most}) {
      const std::string what = f.name + " " + std::to_string(rows);
      const Tensor x = random_hidden(40, rows, spec.hidden_size);
      DeviceTensor in = gpu_copy(x), out = poisoned(DType::kBF16, x.shape());
      DeviceTensor part = poisoned(DType::kF32, x.shape());
      for (const bool by_itself : {false, true}) {
        FusedMoE::Args args;
        args.hidden_states = in.view();
        args.output = out.view();
        if (by_itself) args.shared_output = part.view();
        const Tensor want = run(plain, args, out), want_part = host_copy(part);
        cudaStream_t stream = nullptr;
        cudaGraph_t graph = nullptr;
        cudaGraphExec_t exec = nullptr;
        ASSERT_EQ(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), cudaSuccess);
        const auto clear = [&] {
          for (DeviceTensor* d : {&out, &part}) {
            ASSERT_EQ(cudaMemset(d->data(), 0xFF, static_cast<std::size_t>(d->bytes())),
                      cudaSuccess);
          }
          ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
        };
        for (int i = 0; i < 20; ++i) {
          clear();
          const Status status = layer.enqueue({stream}, args);
          ASSERT_TRUE(status.ok()) << status.to_string();
          ASSERT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
          expect_same(host_copy(out), want, what);
          if (by_itself) expect_same(host_copy(part), want_part, what + " part");
        }
        ASSERT_EQ(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal), cudaSuccess);
        const Status captured = layer.enqueue({stream}, args);
        ASSERT_EQ(cudaStreamEndCapture(stream, &graph), cudaSuccess);
        ASSERT_TRUE(captured.ok()) << captured.to_string();
        ASSERT_EQ(cudaGraphInstantiate(&exec, graph, 0), cudaSuccess);
        for (int replay = 0; replay < 3; ++replay) {
          clear();
          ASSERT_EQ(cudaGraphLaunch(exec, stream), cudaSuccess);
          ASSERT_EQ(cudaGraphLaunch(exec, stream), cudaSuccess);  // one right behind the other
          ASSERT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
          expect_same(host_copy(out), want, what + " replayed");
        }
        (void)cudaGraphExecDestroy(exec);
        (void)cudaGraphDestroy(graph);
        (void)cudaStreamDestroy(stream);
      }
    }
  }
}

}  // namespace
}  // namespace moesaic
