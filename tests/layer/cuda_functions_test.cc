// A layer on a GPU with functions of the caller's: routing, transforms, shared experts, all of them
// work on a stream. Skipped, visibly, without a device.
#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "layer/cuda_rank_case.h"
#include "moesaic/device_tensor.h"
#include "moesaic/gate.h"
#include "numerics/float_codec.h"
#include "support/cuda_device.h"
#include "support/expect_bits.h"
#include "support/metrics.h"
#include "support/random.h"
#include "support/refusal.h"

namespace moesaic {
namespace {

using test::compare;
using test::expect_refusal;
using test::expect_same;
using test::LayerTensors;
using test::make_tensors;
using test::must_run;
using test::on_gpu;
using test::random_hidden;
using test::to_doubles;

constexpr Device kFunctionsGpu = Device::cuda(0);
constexpr std::int64_t kMostRows = 40;

// out = in . weight^T, on either device: a linear map is what latent models transform by.
class LinearMap {
 public:
  LinearMap(std::uint64_t seed, std::int64_t from, std::int64_t to, DType out) {
    test::Rng rng(seed);
    const Tensor weight = test::random_normal(rng, DType::kF32, {to, from}, 0.15);
    GateLinear::Options o;
    o.logits_dtype = out;
    cpu_ = std::make_shared<GateLinear>(GateLinear::create(weight.view(), {}, o).value());
    o.device = kFunctionsGpu;
    gpu_ = std::make_shared<GateLinear>(GateLinear::create(weight.view(), {}, o).value());
    const std::int64_t bytes = gpu_->workspace_size(kMostRows).value();
    workspace_ = std::make_shared<DeviceTensor>(
        DeviceTensor::uninitialized(kFunctionsGpu, DType::kU8, {bytes}).value());
  }
  Status operator()(ConstTensorView in, TensorView out) const { return cpu_->forward(in, out); }
  Status operator()(Stream stream, ConstTensorView in, TensorView out) const {
    return gpu_->enqueue(stream, in, out, workspace_->span());
  }

 private:
  std::shared_ptr<GateLinear> cpu_, gpu_;
  std::shared_ptr<DeviceTensor> workspace_;
};

// Three functions of a layer of 64 columns, with 48 between the transforms.
struct Functions {
  LinearMap input{61, 64, 48, DType::kBF16}, output{62, 48, 64, DType::kF32},
      shared{63, 64, 64, DType::kF32};
  void set(FusedMoE::Options& o, bool transforms, bool shared_too) const {
    const bool gpu = o.device.is_cuda();
    if (transforms) {
      o.transform.hidden_size = 48;
      if (gpu) {
        o.on_device.routed_input = input;
        o.on_device.routed_output = output;
      } else {
        o.transform.input = input;
        o.transform.output = output;
      }
    }
    if (!shared_too) return;
    o.include_shared = false;
    if (gpu) {
      o.on_device.shared_experts = shared;
    } else {
      o.shared_experts = shared;
    }
  }
};

// Experts of `latent` columns in a layer of 64.
LayerTensors with_latent(std::uint64_t seed, const MoeLayerSpec& spec, std::int64_t latent) {
  LayerTensors t = make_tensors(seed, spec);
  MoeLayerSpec inner = spec;
  inner.hidden_size = latent;
  t.experts = std::move(make_tensors(seed, inner).experts);
  return t;
}

// What a layer's own routing would be, as a function of the caller's.
std::shared_ptr<Router> router_of(const RoutingSpec& routing) {
  Router::Options options;
  options.spec = routing;
  options.device = kFunctionsGpu;
  return std::make_shared<Router>(Router::create(options).value());
}
Status route_by(const Router& router, Stream stream, ConstTensorView logits, TensorView weights,
                TensorView ids) {
  Router::Args a;
  a.router_logits = logits;
  a.topk_weights = weights;
  a.topk_ids = ids;
  return router.enqueue(stream, a);
}

TEST(CudaFunctions, RoutingThatIsAnotherRoutersHasItsBits) {
  REQUIRE_HOPPER();
  for (const bool shared : {false, true}) {
    MoeLayerSpec spec = shared ? test::with_shared(true) : test::small_spec();
    const LayerTensors plain = make_tensors(71, spec);
    spec.routing.method = RoutingMethod::kCustom;
    const LayerTensors custom = make_tensors(71, spec);
    const auto router = router_of(plain.spec.routing);
    FusedMoE::Options o = on_gpu(kMostRows);
    const FusedMoE want_layer = test::make_layer(plain, o);
    o.on_device.custom_routing = [router](Stream stream, ConstTensorView x, ConstTensorView logits,
                                          bool renormalize, TensorView weights, TensorView ids) {
      EXPECT_EQ(x.dtype, DType::kBF16);
      EXPECT_TRUE(x.device == kFunctionsGpu && renormalize);
      return route_by(*router, stream, logits, weights, ids);
    };
    const FusedMoE layer = test::make_layer(custom, o);
    for (const std::int64_t rows : {1, 7, 70}) {
      for (const DType dtype : {DType::kBF16, DType::kF32}) {
        const Tensor x = random_hidden(72, rows, 64, dtype);
        const test::LayerRun want = test::run_layer(want_layer, x), got = test::run_layer(layer, x);
        expect_same(got.topk_ids, want.topk_ids, "ids");
        expect_same(got.topk_weights, want.topk_weights, "weights");
        expect_same(got.output, want.output, "output");
        FusedMoE::Args args;
        args.hidden_states = x.view();
        args.router_logits = want.logits.view();
        expect_same(must_run(layer, args).output, want.output, "by logits");
      }
    }
  }
}

// Routing sees BF16 rows whatever the layer has; experts see the rows.
TEST(CudaFunctions, RoutingOfALayerInF16SeesRoundedRows) {
  REQUIRE_HOPPER();
  MoeLayerSpec spec = test::small_spec();
  spec.quant = quant_scheme_from_name("f16").value();
  spec.activation_dtype = DType::kF16;
  const LayerTensors plain = make_tensors(75, spec);
  spec.routing.method = RoutingMethod::kCustom;
  const LayerTensors custom = make_tensors(75, spec);
  const auto router = router_of(plain.spec.routing);
  FusedMoE::Options o = on_gpu(kMostRows);
  const FusedMoE want_layer = test::make_layer(plain, o);
  std::vector<std::uint16_t> seen;
  o.on_device.custom_routing = [&](Stream stream, ConstTensorView x, ConstTensorView logits, bool,
                                   TensorView weights, TensorView ids) {
    EXPECT_EQ(x.dtype, DType::kBF16);
    seen.resize(static_cast<std::size_t>(x.dim(0) * x.dim(1)));
    EXPECT_EQ(cudaStreamSynchronize(static_cast<cudaStream_t>(stream.handle)), cudaSuccess);
    EXPECT_EQ(cudaMemcpy(seen.data(), x.data, 2 * seen.size(), cudaMemcpyDeviceToHost),
              cudaSuccess);
    return route_by(*router, stream, logits, weights, ids);
  };
  const FusedMoE layer = test::make_layer(custom, o);
  const Tensor x = random_hidden(76, 7, 64, DType::kF16);
  const test::LayerRun want = test::run_layer(want_layer, x);
  FusedMoE::Args args;
  args.hidden_states = x.view();
  args.router_logits = want.logits.view();
  expect_same(must_run(layer, args).output, want.output, "output");
  const std::vector<double> rows = to_doubles(x.view());
  ASSERT_EQ(seen.size(), rows.size());
  for (std::size_t i = 0; i < rows.size(); ++i) {
    EXPECT_EQ(seen[i], bf16_from_f32(static_cast<float>(rows[i]))) << i;
  }
}

TEST(CudaFunctions, IdsThatNameNobodyAndPaddingAreEmptySlots) {
  REQUIRE_HOPPER();
  MoeLayerSpec spec = test::small_spec();
  spec.routing.method = RoutingMethod::kCustom;
  const LayerTensors t = make_tensors(73, spec);
  const std::vector<std::int32_t> ids = {0, 99, -5, 3, 1, 1, INT32_MAX, INT32_MIN};
  const std::vector<float> weights = {0.5F, NAN, NAN, 0.25F, 0.5F, 0.5F, 1, 1};
  const test::DeviceBytes from_ids(ids), from_weights(weights);
  FusedMoE::Options o = on_gpu(4);
  o.on_device.custom_routing = [&](Stream s, ConstTensorView, ConstTensorView, bool, TensorView w,
                                   TensorView i) {
    const auto copy = [&](TensorView to, const void* from) {
      return cudaMemcpyAsync(to.data, from, 32, cudaMemcpyDeviceToDevice,
                             static_cast<cudaStream_t>(s.handle)) == cudaSuccess
                 ? Status()
                 : Status(StatusCode::kDevice, "copy");
    };
    MOESAIC_RETURN_IF_ERROR(copy(w, from_weights.as()));
    return copy(i, from_ids.as());
  };
  const FusedMoE layer = test::make_layer(t, o);
  const Tensor x = random_hidden(74, 4, 64);
  Tensor mask = Tensor::zeros(DType::kU8, {4}).value();
  mask.as<std::uint8_t>()[2] = 1;
  FusedMoE::Args args;
  args.hidden_states = x.view();
  args.padding_mask = mask.view();
  const test::LayerRun got = must_run(layer, args);
  const std::int32_t clean[8] = {0, -1, -1, 3, -1, -1, -1, -1};
  EXPECT_EQ(std::memcmp(got.topk_ids.data(), clean, 32), 0);
  // The same ids from the caller.
  Tensor given = Tensor::zeros(DType::kI32, {4, 2}).value();
  std::memcpy(given.data(), clean, 32);
  Tensor given_weights = Tensor::zeros(DType::kF32, {4, 2}).value();
  std::memcpy(given_weights.data(), weights.data(), 32);
  args.topk_ids = given.view();
  args.topk_weights = given_weights.view();
  expect_same(must_run(layer, args).output, got.output, "output");
}

TEST(CudaFunctions, TransformsAndSharedExpertsAreThoseOfTheCpu) {
  REQUIRE_HOPPER();
  const Functions functions;
  struct Case {
    const char* name;
    MoeLayerSpec spec;
    bool transforms, shared;
  };
  MoeLayerSpec scaled = test::small_spec();
  scaled.routing.routed_scaling_factor = 2.5;
  scaled.routing.scale_on_output = true;
  for (const Case& c : {Case{"transforms", test::small_spec(), true, false},
                        {"own shared experts", test::with_shared(true), true, false},
                        {"scaled", scaled, true, false},
                        {"shared", test::small_spec(), false, true},
                        {"scaled shared", scaled, false, true},
                        {"identity experts", test::with_identity_experts(), false, true},
                        {"all", test::deepseek_like(), true, true}}) {
    SCOPED_TRACE(c.name);
    const LayerTensors t = with_latent(75, c.spec, c.transforms ? 48 : 64);
    FusedMoE::Options gpu_options = on_gpu(kMostRows), cpu_options;
    functions.set(gpu_options, c.transforms, c.shared);
    functions.set(cpu_options, c.transforms, c.shared);
    const FusedMoE gpu = test::make_layer(t, gpu_options), cpu = test::make_layer(t, cpu_options);
    for (const std::int64_t rows : {1, 9, 70}) {
      const Tensor x = random_hidden(76, rows, 64);
      FusedMoE::Args args;
      args.hidden_states = x.view();
      const test::LayerRun got = must_run(gpu, args);
      args.topk_ids = got.topk_ids.view();  // near ties are not what this is about
      args.topk_weights = got.topk_weights.view();
      const bool identity = c.spec.routing.num_zero_experts > 0;  // whose weight ids do not carry
      if (identity) args.topk_ids = args.topk_weights = {};
      const Tensor want = must_run(cpu, args).output;
      const auto result = compare(to_doubles(got.output.view()), to_doubles(want.view()));
      EXPECT_LE(result.rel_l2, 2 * gpu.quant().output_bound) << rows << result.describe;
      // bf16 is the same sums, rounded.
      args.topk_ids = args.topk_weights = {};
      const Tensor narrow = must_run(gpu, args, DType::kBF16).output;
      EXPECT_LE(compare(to_doubles(narrow.view()), to_doubles(got.output.view())).rel_l2, 0x1p-8);
    }
  }
}

TEST(CudaFunctions, AGraphReplaysTheirWork) {
  REQUIRE_HOPPER();
  const Functions functions;
  const LayerTensors t = with_latent(77, test::small_spec(), 48);
  FusedMoE::Options o = on_gpu(5);
  functions.set(o, true, true);
  const FusedMoE layer = test::make_layer(t, o);
  DeviceTensor x = DeviceTensor::uninitialized(kFunctionsGpu, DType::kBF16, {5, 64}).value();
  DeviceTensor y = DeviceTensor::uninitialized(kFunctionsGpu, DType::kF32, {5, 64}).value();
  cudaStream_t stream = nullptr;
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t exec = nullptr;
  ASSERT_EQ(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), cudaSuccess);
  ASSERT_EQ(cudaStreamBeginCapture(stream, cudaStreamCaptureModeRelaxed), cudaSuccess);
  const Status captured = layer.enqueue({stream}, x.view(), y.view());
  ASSERT_EQ(cudaStreamEndCapture(stream, &graph), cudaSuccess);
  ASSERT_TRUE(captured.ok()) << captured.to_string();
  ASSERT_EQ(cudaGraphInstantiate(&exec, graph, 0), cudaSuccess);
  for (std::uint64_t replay = 0; replay < 3; ++replay) {
    const Tensor fresh = random_hidden(78 + replay, 5, 64);
    ASSERT_TRUE(copy_tensor(fresh.view(), x.view()).ok());
    ASSERT_EQ(cudaGraphLaunch(exec, stream), cudaSuccess);
    ASSERT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
    Tensor got = Tensor::zeros(DType::kF32, {5, 64}).value();
    ASSERT_TRUE(copy_tensor(y.view(), got.view()).ok());
    expect_same(got, test::run_layer(layer, fresh).output, "replay");
  }
  (void)cudaGraphExecDestroy(exec);
  (void)cudaGraphDestroy(graph);
  (void)cudaStreamDestroy(stream);
}

TEST(CudaFunctions, AFailureIsTheCallsAndNamesTheFunction) {
  REQUIRE_HOPPER();
  const LayerTensors t = make_tensors(79, test::small_spec());
  const Tensor x = random_hidden(80, 3, 64);
  FusedMoE::Args args;
  args.hidden_states = x.view();
  const DeviceFn fails = [](Stream, ConstTensorView, TensorView) {
    return Status(StatusCode::kOutOfMemory, "no room");
  };
  const DeviceFn throws = [](Stream, ConstTensorView, TensorView) -> Status {
    throw std::runtime_error("gone");
  };
  FusedMoE::Options o = on_gpu(8);
  o.on_device.shared_experts = fails;
  expect_refusal(test::run_args(test::make_layer(t, o), args).status(), StatusCode::kOutOfMemory,
                 {"on_device.shared_experts", "no room"});
  o = on_gpu(8);
  o.transform.hidden_size = 64;
  o.on_device.routed_input = throws;
  expect_refusal(test::run_args(test::make_layer(t, o), args).status(),
                 StatusCode::kInvalidArgument, {"on_device.routed_input: threw", "gone"});
  EXPECT_EQ(cudaGetLastError(), cudaSuccess);
}

TEST(CudaFunctions, OverRanksEachRowIsGivenOnce) {
  REQUIRE_HOPPER();
  const Functions functions;
  for (const bool transforms : {false, true}) {
    const LayerTensors t = with_latent(81, test::small_spec(), transforms ? 48 : 64);
    const auto make = test::maker_of(t);
    const Tensor x = random_hidden(82, 11, 64);
    FusedMoE::Args args;
    args.hidden_states = x.view();
    FusedMoE::Options one = on_gpu(16);
    functions.set(one, transforms, true);
    const Tensor want = must_run(make(one).value(), args).output;
    for (const bool experts : {false, true}) {
      if (transforms && !experts) continue;  // the part source cuts layers of one width only
      for (const RankTransport transport : {RankTransport::kNone, RankTransport::kAllToAll}) {
        if (transport == RankTransport::kAllToAll && !experts) continue;
        for (const Status& s :
             test::on_two_ranks([&](int rank, const std::shared_ptr<Communicator>&c) -> Status {
               // Each rank has its own: a workspace is one call's at a time.
               const Functions mine;
               FusedMoE::Options o = on_gpu(16);
               mine.set(o, transforms, true);
               o.ranks.communicator = c;
               o.ranks.transport = transport;
               (experts ? o.parallel.ep_size : o.parallel.tp_size) = 2;
               (experts ? o.parallel.ep_rank : o.parallel.tp_rank) = rank;
               MOESAIC_ASSIGN_OR_RETURN(const FusedMoE layer, make(o));
               const Tensor got = must_run(layer, args).output;
               const auto result = compare(to_doubles(got.view()), to_doubles(want.view()));
               EXPECT_LE(result.rel_l2, experts ? 1e-6 : 6e-3)
                   << rank_transport_name(transport) << result.describe;
               return {};
             })) {
          EXPECT_TRUE(s.ok()) << s.to_string();
        }
      }
    }
  }
}

}  // namespace
}  // namespace moesaic
