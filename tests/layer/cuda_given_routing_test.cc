// Calls of a layer on a GPU that bring their routing: host and device tensors, graphs, mistakes.
// Skipped, visibly, without a device.
#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "layer/layer_case.h"
#include "support/cuda_device.h"
#include "support/expect_bits.h"
#include "support/metrics.h"
#include "support/random.h"
#include "support/refusal.h"

namespace moesaic {
namespace {

using test::DeviceBytes;
using test::expect_refusal;
using test::expect_same;
using test::Feature;
using test::LayerRun;
using test::LayerTensors;
using test::make_layer;
using test::make_tensors;
using test::must_run;
using test::on_gpu;
using test::random_hidden;
using test::run_args;

constexpr Device kFirstGpu = Device::cuda(0);

// What a GPU takes of them, a shared expert that joins the routed ones, and all of it in fp8.
std::vector<Feature> routed_layers() {
  std::vector<Feature> all = test::routing_features();
  const auto joined = [] {
    MoeLayerSpec spec = test::deepseek_like();
    spec.shared.intermediate_size = spec.intermediate_size;
    return spec;
  };
  all.push_back({"joined", joined});
  all.push_back({"joined fp8", [joined] {
                   MoeLayerSpec spec = joined();
                   spec.hidden_size = 256;
                   spec.intermediate_size = spec.shared.intermediate_size = 128;
                   spec.quant = quant_scheme_from_name("fp8-block").value();
                   return spec;
                 }});
  return all;
}

// A host tensor's copy on the device, and a view of it.
struct OnDevice {
  DeviceBytes bytes;
  DType dtype;
  Shape shape;
  explicit OnDevice(const Tensor& t)
      : bytes(t.data(), t.bytes()), dtype(t.dtype()), shape(t.shape()) {}
  ConstTensorView view() const { return {bytes.as<const std::byte>(), dtype, shape, kFirstGpu}; }
};
TensorView written(const DeviceBytes& d, const Shape& shape, DType dtype) {
  return {d.as<std::byte>(), dtype, shape, kFirstGpu};
}

Tensor copied(const DeviceBytes& d, const Shape& shape, DType dtype) {
  Tensor t = Tensor::zeros(dtype, shape).value();
  d.download(t.data());
  return t;
}

TEST(CudaGivenRouting, TheLayersOwnLogitsAndIdsGiveItsBits) {
  REQUIRE_HOPPER();
  for (const Feature& f : routed_layers()) {
    const LayerTensors t = make_tensors(81, f.spec());
    const FusedMoE layer = make_layer(t, on_gpu(40));
    for (const std::int64_t rows : {1, 2, 4, 5, 16, 33, 70}) {
      for (const DType dtype : {DType::kBF16, DType::kF32}) {
        const std::string what = f.name + " " + std::to_string(rows);
        const Tensor x = random_hidden(82, rows, t.spec.hidden_size, dtype);
        FusedMoE::Args args;
        args.hidden_states = x.view();
        const LayerRun own = must_run(layer, args, DType::kBF16);
        args.router_logits = own.logits.view();
        const LayerRun by_logits = must_run(layer, args, DType::kBF16);
        expect_same(by_logits.output, own.output, what + " by logits");
        expect_same(by_logits.topk_ids, own.topk_ids, what);
        expect_same(by_logits.topk_weights, own.topk_weights, what);
        expect_same(by_logits.logits, own.logits, what);
        if (t.spec.routing.num_zero_experts > 0) continue;  // whose weight ids do not carry
        args.router_logits = {};
        args.topk_weights = own.topk_weights.view();
        args.topk_ids = own.topk_ids.view();
        const LayerRun by_ids = must_run(layer, args, DType::kBF16);
        expect_same(by_ids.output, own.output, what + " by ids");
        expect_same(by_ids.topk_ids, own.topk_ids, what);
        expect_same(by_ids.topk_weights, own.topk_weights, what);
      }
    }
  }
}

// Device tensors of every dtype; ids that name nobody are empty slots, also the one that the joined
// shared expert has among the experts.
TEST(CudaGivenRouting, DeviceTensorsOfEveryTypeAreWhatHostTensorsAre) {
  REQUIRE_HOPPER();
  for (const Feature& f : routed_layers()) {
    const LayerTensors t = make_tensors(83, f.spec());
    const FusedMoE layer = make_layer(t, on_gpu(40));
    const std::int64_t hidden = t.spec.hidden_size, k = t.spec.routing.top_k;
    const std::int64_t columns = t.spec.num_experts + t.spec.routing.num_zero_experts;
    for (const std::int64_t rows : {3, 37}) {
      SCOPED_TRACE(f.name + " " + std::to_string(rows));
      test::Rng rng(84);
      const Tensor x = random_hidden(85, rows, hidden);
      const OnDevice dx(x);
      const DeviceBytes y(rows * hidden * 2);
      FusedMoE::Args host, device;
      host.hidden_states = x.view();
      device.hidden_states = dx.view();
      device.output = written(y, {rows, hidden}, DType::kBF16);
      for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
        for (const bool traced : {false, true}) {
          const Tensor logits = random_normal(rng, dtype, {rows, columns}, 2.0);
          const OnDevice d_logits(logits);
          const DeviceBytes trace(rows * columns * 4);
          host.router_logits = logits.view();
          device.router_logits = d_logits.view();
          device.trace.router_logits = {};
          if (traced) device.trace.router_logits = written(trace, {rows, columns}, DType::kF32);
          const LayerRun want = must_run(layer, host, DType::kBF16);
          const Status status = layer.enqueue({}, device);
          ASSERT_TRUE(status.ok()) << status.to_string();
          ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
          expect_same(copied(y, {rows, hidden}, DType::kBF16), want.output, "logits");
          if (traced) {
            expect_same(copied(trace, {rows, columns}, DType::kF32), want.logits, "trace");
          }
        }
      }
      host.router_logits = device.router_logits = {};
      device.trace.router_logits = {};
      for (const DType dtype : {DType::kI32, DType::kI64, DType::kU32}) {
        Tensor weights = random_normal(rng, DType::kF32, {rows, k});
        Tensor ids = Tensor::zeros(DType::kI32, {rows, k}).value();
        Tensor wild = Tensor::zeros(dtype, {rows, k}).value();
        for (std::int64_t i = 0; i < rows * k; ++i) {
          const std::int64_t id = rng.integer(-1, columns - 1);
          ids.as<std::int32_t>()[i] = static_cast<std::int32_t>(id);
          // What names nobody, in turn.
          const std::int64_t nobody[] = {-1, columns, -7, std::int64_t{1} << 30};
          const std::int64_t value = id < 0 ? nobody[i % 4] : id;
          if (id < 0) weights.as<float>()[i] = std::numeric_limits<float>::quiet_NaN();
          if (dtype == DType::kI64) {
            wild.as<std::int64_t>()[i] = id < 0 && i % 4 == 3 ? (std::int64_t{1} << 32) + 1 : value;
          } else {
            wild.as<std::int32_t>()[i] = static_cast<std::int32_t>(value);
          }
        }
        const OnDevice d_weights(weights), d_ids(wild);
        const DeviceBytes traced_ids(rows * k * 4), traced_weights(rows * k * 4);
        host.topk_weights = weights.view();
        host.topk_ids = ids.view();
        device.topk_weights = d_weights.view();
        device.topk_ids = d_ids.view();
        device.trace.topk_ids = written(traced_ids, {rows, k}, DType::kI32);
        device.trace.topk_weights = written(traced_weights, {rows, k}, DType::kF32);
        const LayerRun want = must_run(layer, host, DType::kBF16);
        const Status status = layer.enqueue({}, device);
        ASSERT_TRUE(status.ok()) << status.to_string();
        ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
        expect_same(copied(y, {rows, hidden}, DType::kBF16), want.output, "ids");
        expect_same(copied(traced_ids, {rows, k}, DType::kI32), want.topk_ids, "ids");
        expect_same(copied(traced_weights, {rows, k}, DType::kF32), want.topk_weights, "weights");
        EXPECT_TRUE(y.margin_is_intact() && traced_ids.margin_is_intact());
      }
    }
  }
}

// Given weights and ids against the CPU, which has its own tests against float64.
TEST(CudaGivenRouting, AgreesWithTheCpu) {
  REQUIRE_HOPPER();
  for (const Feature& f : routed_layers()) {
    SCOPED_TRACE(f.name);
    const LayerTensors t = make_tensors(86, f.spec());
    const FusedMoE gpu = make_layer(t, on_gpu(40)), cpu = make_layer(t);
    const std::int64_t k = t.spec.routing.top_k;
    const std::int64_t columns = t.spec.num_experts + t.spec.routing.num_zero_experts;
    test::Rng rng(87);
    const Tensor x = random_hidden(88, 21, t.spec.hidden_size);
    const Tensor weights = random_normal(rng, DType::kF32, {21, k});
    Tensor ids = Tensor::zeros(DType::kI64, {21, k}).value();
    for (std::int64_t i = 0; i < 21 * k; ++i) {
      ids.as<std::int64_t>()[i] = rng.integer(-1, columns - 1);
    }
    FusedMoE::Args args;
    args.hidden_states = x.view();
    args.topk_weights = weights.view();
    args.topk_ids = ids.view();
    const LayerRun got = must_run(gpu, args, DType::kF32), want = must_run(cpu, args, DType::kF32);
    expect_same(got.topk_ids, want.topk_ids, "ids");
    expect_same(got.topk_weights, want.topk_weights, "weights");
    const auto result =
        test::compare(test::to_doubles(got.output.view()), test::to_doubles(want.output.view()));
    EXPECT_LE(result.rel_l2, 2 * gpu.quant().output_bound) << result.describe;
  }
}

// NaN among given logits chooses as on the CPU; a NaN weight makes its row NaN and no other.
TEST(CudaGivenRouting, NanLogitsAreTheRoutersAndANanWeightStaysInItsRow) {
  REQUIRE_HOPPER();
  for (const Feature& f : routed_layers()) {
    SCOPED_TRACE(f.name);
    const LayerTensors t = make_tensors(103, f.spec());
    const FusedMoE gpu = make_layer(t, on_gpu(40)), cpu = make_layer(t);
    const std::int64_t k = t.spec.routing.top_k, hidden = t.spec.hidden_size;
    const std::int64_t columns = t.spec.num_experts + t.spec.routing.num_zero_experts;
    test::Rng rng(104);
    const Tensor x = random_hidden(105, 21, hidden);
    Tensor logits = random_normal(rng, DType::kF32, {21, columns});
    for (std::int64_t c = 0; c < columns; ++c) {
      logits.as<float>()[4 * columns + c] = std::numeric_limits<float>::quiet_NaN();
      if (c % 3 == 1) logits.as<float>()[9 * columns + c] = std::numeric_limits<float>::quiet_NaN();
    }
    FusedMoE::Args args;
    args.hidden_states = x.view();
    args.router_logits = logits.view();
    const LayerRun got = must_run(gpu, args, DType::kF32), want = must_run(cpu, args, DType::kF32);
    expect_same(got.topk_ids, want.topk_ids, "ids");
    expect_same(got.topk_weights, want.topk_weights, "weights");

    Tensor weights = random_normal(rng, DType::kF32, {21, k});
    Tensor ids = Tensor::zeros(DType::kI32, {21, k}).value();
    for (std::int64_t i = 0; i < 21 * k; ++i) {
      ids.as<std::int32_t>()[i] = static_cast<std::int32_t>(rng.integer(0, t.spec.num_experts - 1));
    }
    args.router_logits = {};
    args.topk_weights = weights.view();
    args.topk_ids = ids.view();
    const LayerRun clean = must_run(gpu, args, DType::kF32);
    weights.as<float>()[7 * k] = std::numeric_limits<float>::quiet_NaN();
    const LayerRun run = must_run(gpu, args, DType::kF32);
    for (std::int64_t i = 0; i < 21 * hidden; ++i) {
      const float v = run.output.as<float>()[i];
      if (i / hidden == 7) {
        ASSERT_TRUE(v != v) << i;
      } else {
        ASSERT_EQ(v, clean.output.as<float>()[i]) << i;
      }
    }
  }
}

TEST(CudaGivenRouting, PaddingReachesNoExpertAndIsZero) {
  REQUIRE_HOPPER();
  for (const Feature& f : routed_layers()) {
    const LayerTensors t = make_tensors(89, f.spec());
    const FusedMoE layer = make_layer(t, on_gpu(40));
    const std::int64_t hidden = t.spec.hidden_size, k = t.spec.routing.top_k;
    for (const std::int64_t rows : {2, 37}) {
      SCOPED_TRACE(f.name + " " + std::to_string(rows));
      Tensor x = random_hidden(90, rows, hidden);
      FusedMoE::Args args;
      args.hidden_states = x.view();
      const LayerRun own = must_run(layer, args, DType::kF32);
      for (std::int64_t h = 0; h < hidden; ++h) x.as<std::uint16_t>()[hidden + h] = 0x7FC0;  // NaN
      Tensor mask = Tensor::zeros(DType::kU8, {rows}).value();
      mask.as<std::uint8_t>()[1] = 200;
      args.padding_mask = mask.view();
      for (int way = 0; way < 3; ++way) {
        if (way == 1) args.router_logits = own.logits.view();
        if (way == 2) {
          if (t.spec.routing.num_zero_experts > 0) continue;
          args.router_logits = {};
          args.topk_weights = own.topk_weights.view();
          args.topk_ids = own.topk_ids.view();
        }
        const LayerRun run = must_run(layer, args, DType::kF32);
        for (std::int64_t i = 0; i < rows * hidden; ++i) {
          const float want = i / hidden == 1 ? 0.0F : own.output.as<float>()[i];
          ASSERT_EQ(run.output.as<float>()[i], want) << way << " element " << i;
        }
        EXPECT_EQ(run.topk_ids.as<std::int32_t>()[k], -1);
      }
    }
  }
}

TEST(CudaGivenRouting, HashLayersRouteByTokenId) {
  REQUIRE_HOPPER();
  for (const std::int64_t shared : {0, 32, 48}) {  // none, joined, apart
    MoeLayerSpec spec = test::hash_routed();
    spec.shared.intermediate_size = shared;
    const LayerTensors t = make_tensors(91, spec);
    const FusedMoE gpu = make_layer(t, on_gpu(16)), cpu = make_layer(t);
    const Tensor x = random_hidden(92, 19, spec.hidden_size);
    Tensor tokens = Tensor::zeros(DType::kI32, {19}).value();
    for (std::int32_t i = 0; i < 19; ++i) tokens.as<std::int32_t>()[i] = i * 7 % 11;
    FusedMoE::Args args;
    args.hidden_states = x.view();
    expect_refusal(run_args(gpu, args).status(), StatusCode::kInvalidArgument, {"input_ids"});
    args.input_ids = tokens.view();
    const LayerRun got = must_run(gpu, args, DType::kF32), want = must_run(cpu, args, DType::kF32);
    expect_same(got.topk_ids, want.topk_ids, "ids");
    const auto result =
        test::compare(test::to_doubles(got.output.view()), test::to_doubles(want.output.view()));
    EXPECT_LE(result.rel_l2, 2 * gpu.quant().output_bound) << result.describe;
    tokens.as<std::int32_t>()[3] = 11;
    expect_refusal(run_args(gpu, args).status(), StatusCode::kInvalidArgument,
                   {"input_ids: got 11 at [3]"});
    // In device memory nobody looks: such a row has no routed experts.
    const OnDevice dx(random_hidden(92, 16, spec.hidden_size));
    Tensor sixteen = Tensor::zeros(DType::kI32, {16}).value();
    std::memcpy(sixteen.data(), tokens.data(), 64);
    const OnDevice d_tokens(sixteen);
    const DeviceBytes y(16 * spec.hidden_size * 2), ids(16 * 2 * 4);
    FusedMoE::Args device;
    device.hidden_states = dx.view();
    device.input_ids = d_tokens.view();
    device.output = written(y, {16, spec.hidden_size}, DType::kBF16);
    device.trace.topk_ids = written(ids, {16, 2}, DType::kI32);
    ASSERT_TRUE(gpu.enqueue({}, device).ok());
    ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    EXPECT_EQ(ids.values<std::int32_t>()[6], -1);
    EXPECT_EQ(ids.values<std::int32_t>()[8], want.topk_ids.as<std::int32_t>()[8]);
  }
}

// One graph by logits, one by ids, one with neither; each replay finds other values.
TEST(CudaGivenRouting, AGraphReadsTheRoutingAnew) {
  REQUIRE_HOPPER();
  for (const Feature& f : routed_layers()) {
    const LayerTensors t = make_tensors(93, f.spec());
    const std::int64_t hidden = t.spec.hidden_size, k = t.spec.routing.top_k;
    const std::int64_t columns = t.spec.num_experts + t.spec.routing.num_zero_experts;
    for (const std::int64_t rows : {1, 8}) {
      SCOPED_TRACE(f.name + " " + std::to_string(rows));
      const FusedMoE layer = make_layer(t, on_gpu(rows));
      const OnDevice x(random_hidden(94, rows, hidden));
      const DeviceBytes logits(rows * columns * 4), weights(rows * k * 4), ids(rows * k * 8);
      const DeviceBytes y(rows * hidden * 2);
      for (const bool by_ids : {false, true}) {
        FusedMoE::Args args;
        args.hidden_states = x.view();
        args.output = written(y, {rows, hidden}, DType::kBF16);
        if (by_ids) {
          args.topk_weights = written(weights, {rows, k}, DType::kF32);
          args.topk_ids = written(ids, {rows, k}, DType::kI64);
        } else {
          args.router_logits = written(logits, {rows, columns}, DType::kF32);
        }
        cudaStream_t stream = nullptr;
        cudaGraph_t graph = nullptr;
        cudaGraphExec_t exec = nullptr;
        ASSERT_EQ(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), cudaSuccess);
        ASSERT_EQ(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal), cudaSuccess);
        const Status status = layer.enqueue({stream}, args);
        ASSERT_EQ(cudaStreamEndCapture(stream, &graph), cudaSuccess);
        ASSERT_TRUE(status.ok()) << status.to_string();
        ASSERT_EQ(cudaGraphInstantiate(&exec, graph, 0), cudaSuccess);
        test::Rng rng(95);
        for (int replay = 0; replay < 20; ++replay) {
          const Tensor l = random_normal(rng, DType::kF32, {rows, columns}, 2.0);
          const Tensor w = random_normal(rng, DType::kF32, {rows, k});
          std::vector<std::int64_t> chosen(static_cast<std::size_t>(rows * k));
          for (std::int64_t& id : chosen) id = rng.integer(-1, columns - 1);
          cudaMemcpy(logits.as(), l.data(), static_cast<std::size_t>(l.bytes()),
                     cudaMemcpyHostToDevice);
          cudaMemcpy(weights.as(), w.data(), static_cast<std::size_t>(w.bytes()),
                     cudaMemcpyHostToDevice);
          cudaMemcpy(ids.as(), chosen.data(), chosen.size() * 8, cudaMemcpyHostToDevice);
          ASSERT_EQ(cudaStreamSynchronize(nullptr), cudaSuccess);  // they may still be on their way
          ASSERT_EQ(cudaGraphLaunch(exec, stream), cudaSuccess);
          ASSERT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
          const auto replayed = y.values<std::uint16_t>();
          ASSERT_TRUE(layer.enqueue({}, args).ok());
          ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
          ASSERT_EQ(replayed, y.values<std::uint16_t>()) << "replay " << replay;
          const Tensor host_x = random_hidden(94, rows, hidden);
          FusedMoE::Args host;
          host.hidden_states = host_x.view();
          if (by_ids) {
            host.topk_weights = w.view();
            host.topk_ids = {
                reinterpret_cast<const std::byte*>(chosen.data()), DType::kI64, {rows, k}};
          } else {
            host.router_logits = l.view();
          }
          const LayerRun want = must_run(layer, host, DType::kBF16);
          ASSERT_EQ(std::memcmp(replayed.data(), want.output.data(), replayed.size() * 2), 0);
        }
        (void)cudaGraphExecDestroy(exec);
        (void)cudaGraphDestroy(graph);
        (void)cudaStreamDestroy(stream);
      }
    }
  }
}

TEST(CudaGivenRouting, ALayerWithoutAGateNeedsItWithEveryCall) {
  REQUIRE_HOPPER();
  for (const Feature& f : {Feature{"plain", test::small_spec}, routed_layers().back()}) {
    const LayerTensors t = make_tensors(96, f.spec());
    const FusedMoE whole = make_layer(t, on_gpu(16));
    FusedMoE::Options options = on_gpu(16);
    options.include_gate = false;
    MoeLayerWeights weights = t.weights();
    weights.tensors.gate_weight = Tensor();
    const FusedMoE layer = std::move(FusedMoE::create(std::move(weights), options)).value();
    EXPECT_LT(layer.weight_bytes(), whole.weight_bytes());
    for (const std::int64_t rows : {1, 16}) {
      const Tensor x = random_hidden(97, rows, t.spec.hidden_size);
      FusedMoE::Args args;
      args.hidden_states = x.view();
      const LayerRun own = must_run(whole, args, DType::kBF16);
      expect_refusal(run_args(layer, args).status(), StatusCode::kInvalidArgument,
                     {"router_logits: got none", "no gate"});
      const OnDevice dx(x);
      const DeviceBytes y(x.bytes());
      expect_refusal(layer.enqueue({}, dx.view(), written(y, x.shape(), DType::kBF16)),
                     StatusCode::kInvalidArgument, {"router_logits: got none", "no gate"});
      args.router_logits = own.logits.view();
      expect_same(must_run(layer, args, DType::kBF16).output, own.output, "by logits");
      args.router_logits = {};
      args.topk_weights = own.topk_weights.view();
      args.topk_ids = own.topk_ids.view();
      expect_same(must_run(layer, args, DType::kBF16).output, own.output, "by ids");
    }
  }
}

TEST(CudaGivenRouting, ThreeDimensionsAreRowsInOrder) {
  REQUIRE_HOPPER();
  const LayerTensors t = make_tensors(98, test::small_spec());
  const FusedMoE layer = make_layer(t, on_gpu(12));
  const Tensor x = random_hidden(99, 12, 64);
  const OnDevice dx(x);
  const DeviceBytes flat(12 * 64 * 2), deep(12 * 64 * 2);
  ASSERT_TRUE(layer.enqueue({}, dx.view(), written(flat, {12, 64}, DType::kBF16)).ok());
  FusedMoE::Args args;
  args.hidden_states = {dx.bytes.as<const std::byte>(), DType::kBF16, {3, 4, 64}, kFirstGpu};
  args.output = written(deep, {3, 4, 64}, DType::kBF16);
  ASSERT_TRUE(layer.enqueue({}, args).ok());
  ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  EXPECT_EQ(flat.values<std::uint16_t>(), deep.values<std::uint16_t>());
}

TEST(CudaGivenRouting, EveryMistakeIsAStatusAndLeavesNoError) {
  REQUIRE_HOPPER();
  const LayerTensors t = make_tensors(100, test::small_spec());
  const FusedMoE layer = make_layer(t, on_gpu(16));
  const OnDevice x(random_hidden(101, 6, 64));
  const OnDevice logits(Tensor::zeros(DType::kF32, {6, 8}).value());
  const OnDevice weights(Tensor::zeros(DType::kF32, {6, 2}).value());
  const OnDevice ids(Tensor::zeros(DType::kI64, {6, 2}).value());
  const Tensor host = Tensor::zeros(DType::kF32, {6, 8}).value();
  const DeviceBytes y(6 * 64 * 4);
  FusedMoE::Args good;
  good.hidden_states = x.view();
  good.output = written(y, {6, 64}, DType::kF32);
  using Args = FusedMoE::Args;
  const auto refused = [&](auto&& change, StatusCode code,
                           std::initializer_list<const char*> words) {
    Args args = good;
    change(args);
    expect_refusal(layer.enqueue({}, args), code, words);
  };
  refused([&](Args& a) { a.router_logits = host.view(); }, StatusCode::kInvalidArgument,
          {"router_logits: got memory of cpu"});
  refused(
      [&](Args& a) {
        a.router_logits = host.view();
        a.router_logits.device = kFirstGpu;
      },
      StatusCode::kInvalidArgument, {"router_logits", "host memory"});
  refused(
      [&](Args& a) {
        a.router_logits = logits.view();
        a.router_logits.shape = {6, 7};
        a.router_logits.data += 2;
      },
      StatusCode::kInvalidShape, {"router_logits", "[6, 8]"});
  refused(
      [&](Args& a) {
        a.router_logits = logits.view();
        a.router_logits.data += 2;
      },
      StatusCode::kInvalidLayout, {"router_logits", "4"});
  refused([&](Args& a) { a.topk_ids = ids.view(); }, StatusCode::kInvalidArgument,
          {"topk_weights: got none"});
  refused(
      [&](Args& a) {
        a.topk_weights = weights.view();
        a.topk_ids = ids.view();
        a.topk_ids.dtype = DType::kU8;
      },
      StatusCode::kInvalidDType, {"topk_ids: got U8", "I32, I64 or U32"});
  refused(
      [&](Args& a) {
        a.topk_weights = weights.view();
        a.topk_ids = ids.view();
        a.topk_ids.data += 4;
      },
      StatusCode::kInvalidLayout, {"topk_ids", "8"});
  refused(
      [&](Args& a) {
        a.topk_weights = written(y, {6, 2}, DType::kF32);
        a.topk_ids = ids.view();
      },
      StatusCode::kAliasing, {"output", "topk_weights"});
  refused(
      [&](Args& a) {
        a.router_logits = logits.view();
        a.topk_weights = weights.view();
        a.topk_ids = ids.view();
      },
      StatusCode::kInvalidArgument, {"one or the other"});
  EXPECT_EQ(cudaGetLastError(), cudaSuccess);
  EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  FusedMoE::Options options = on_gpu(16);
  options.capture = [](ConstTensorView) {};
  expect_refusal(FusedMoE::create(t.weights(), options).status(), StatusCode::kUnsupported,
                 {"capture", "on_device.capture"});
}

}  // namespace
}  // namespace moesaic
