// Outputs of layers on a GPU that the caller puts together: shared experts apart, sums over ranks on
// device memory. Skipped, visibly, without a device.
#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <cstring>
#include <string>
#include <vector>

#include "layer/cuda_rank_case.h"
#include "layer/shared_part_case.h"
#include "moesaic/device_tensor.h"
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

constexpr Device kPartsGpu = Device::cuda(0);

Tensor zeros(DType dtype, const Shape& shape) { return Tensor::zeros(dtype, shape).value(); }
DeviceTensor parts_room(DType dtype, const Shape& shape) {
  DeviceTensor t = DeviceTensor::uninitialized(kPartsGpu, dtype, shape).value();
  EXPECT_EQ(cudaMemset(t.data(), 0xFF, static_cast<std::size_t>(t.bytes())), cudaSuccess);
  return t;
}
Tensor parts_on_host(const DeviceTensor& t) {
  Tensor host = zeros(t.view().dtype, t.view().shape);
  EXPECT_TRUE(copy_tensor(t.view(), host.view()).ok());
  return host;
}

// A shared expert that joins the routed ones, one apart, a gated one, a scaled sum, fp8.
std::vector<test::Feature> shared_layers() {
  const auto joined = [] {
    MoeLayerSpec spec = test::deepseek_like();
    spec.shared.intermediate_size = spec.intermediate_size;
    return spec;
  };
  return {{"joined", joined},
          {"apart", test::deepseek_like},
          {"gated", [] { return test::with_shared(true); }},
          {"scaled", test::scaled_output},
          {"joined fp8", [joined] {
             MoeLayerSpec spec = joined();
             spec.hidden_size = 256;
             spec.intermediate_size = spec.shared.intermediate_size = 128;
             spec.quant = quant_scheme_from_name("fp8-block").value();
             return spec;
           }}};
}

TEST(CudaOutputParts, TheSharedPartApartAddsUpToTheSum) {
  REQUIRE_HOPPER();
  for (const test::Feature& f : shared_layers()) {
    const LayerTensors t = make_tensors(47, f.spec());
    const std::int64_t hidden = t.spec.hidden_size;
    FusedMoE::Options options = on_gpu(24);
    const FusedMoE layer = test::make_layer(t, options);
    options.include_shared = false;
    const FusedMoE routed_only = test::make_layer(t, options);
    for (const std::int64_t rows : {1, 3, 24, 50}) {
      SCOPED_TRACE(f.name + " " + std::to_string(rows));
      const Tensor x = random_hidden(48, rows, hidden);
      Tensor mask = zeros(DType::kU8, {rows});
      if (rows > 1) mask.as<std::uint8_t>()[1] = 1;
      FusedMoE::Args args;
      args.hidden_states = x.view();
      args.padding_mask = mask.view();
      const Tensor want = must_run(layer, args).output;
      Tensor part = zeros(DType::kF32, x.shape());
      test::poison(part.view());
      args.shared_output = part.view();
      Tensor sum = must_run(layer, args).output;
      args.shared_output = {};
      expect_same(sum, must_run(routed_only, args).output, "the routed part");
      for (std::int64_t i = 0; i < rows * hidden; ++i) {
        sum.as<float>()[i] += part.as<float>()[i];
        if (rows > 1 && i / hidden == 1) {
          ASSERT_EQ(part.as<float>()[i], 0.0F) << "padding";
        }
      }
      EXPECT_EQ(compare(to_doubles(sum.view()), to_doubles(want.view())).rel_l2, 0.0);
      for (const DType dtype : {DType::kBF16, DType::kF16}) {
        Tensor narrow = zeros(dtype, x.shape());
        test::poison(narrow.view());
        args.shared_output = narrow.view();
        expect_same(must_run(layer, args, DType::kBF16).output,
                    must_run(
                        routed_only,
                        [&] {
                          FusedMoE::Args plain = args;
                          plain.shared_output = {};
                          return plain;
                        }(),
                        DType::kBF16)
                        .output,
                    "the routed part in bf16");
        EXPECT_LE(compare(to_doubles(narrow.view()), to_doubles(part.view())).rel_l2, 0x1p-8);
      }
      if (rows > 24) continue;
      // Device tensors.
      const DeviceTensor dx = DeviceTensor::copy_of(x.view(), kPartsGpu).value();
      const DeviceTensor d_mask = DeviceTensor::copy_of(mask.view(), kPartsGpu).value();
      DeviceTensor y = parts_room(DType::kF32, x.shape()), s = parts_room(DType::kF32, x.shape());
      FusedMoE::Args device;
      device.hidden_states = dx.view();
      device.padding_mask = d_mask.view();
      device.output = y.view();
      device.shared_output = s.view();
      const Status status = layer.enqueue({}, device);
      ASSERT_TRUE(status.ok()) << status.to_string();
      expect_same(parts_on_host(s), part, "device");
    }
  }
}

TEST(CudaOutputParts, MistakesAreRefused) {
  REQUIRE_HOPPER();
  const LayerTensors t = make_tensors(49, test::with_shared(false));
  const FusedMoE layer = test::make_layer(t, on_gpu(8));
  FusedMoE::Options options = on_gpu(8);
  options.include_shared = false;
  const FusedMoE routed_only = test::make_layer(t, options);
  const DeviceTensor x = parts_room(DType::kBF16, {4, 64});
  DeviceTensor y = parts_room(DType::kF32, {4, 64}), s = parts_room(DType::kF32, {4, 64});
  FusedMoE::Args good;
  good.hidden_states = x.view();
  good.output = y.view();
  good.shared_output = s.view();
  expect_refusal(routed_only.enqueue({}, good), StatusCode::kInvalidArgument,
                 {"shared_output", "no shared experts"});
  const auto refused = [&](auto&& change, StatusCode code,
                           std::initializer_list<const char*> words) {
    FusedMoE::Args args = good;
    change(args);
    expect_refusal(layer.enqueue({}, args), code, words);
  };
  Tensor host = zeros(DType::kF32, {4, 64});
  refused([&](auto& a) { a.shared_output = host.view(); }, StatusCode::kInvalidArgument,
          {"shared_output: got memory of cpu"});
  refused(
      [&](auto& a) {
        a.shared_output = host.view();
        a.shared_output.device = kPartsGpu;
      },
      StatusCode::kInvalidArgument, {"shared_output", "host memory"});
  refused([&](auto& a) { a.shared_output.dtype = DType::kF16; }, StatusCode::kInvalidDType,
          {"shared_output: got F16, need BF16 or F32"});
  refused(
      [&](auto& a) {
        a.shared_output.shape = {4, 32};
      },
      StatusCode::kInvalidShape, {"shared_output"});
  refused([&](auto& a) { a.shared_output = y.view(); }, StatusCode::kAliasing,
          {"shared_output", "output"});
  EXPECT_EQ(cudaGetLastError(), cudaSuccess);
}

FusedMoE::Options two_on_gpu(int rank, bool experts, const std::shared_ptr<Communicator>& c) {
  FusedMoE::Options o = on_gpu(4);
  o.ranks.communicator = c;
  (experts ? o.parallel.ep_size : o.parallel.tp_size) = 2;
  (experts ? o.parallel.ep_rank : o.parallel.tp_rank) = rank;
  return o;
}

TEST(CudaOutputParts, TheSharedPartIsCompleteOverRanks) {
  REQUIRE_HOPPER();
  const LayerTensors tensors = make_tensors(50, test::with_shared(true));
  test::expect_shared_part_over_ranks(test::maker_of(tensors), on_gpu(16), random_hidden(51, 7, 64),
                                      two_on_gpu,
                                      [](bool experts) { return experts ? 1e-6 : 6e-3; });
}

// What stays a part is completed where it is: the bits of a layer that adds up itself.
TEST(CudaOutputParts, PartsAreAddedUpOnTheDevice) {
  REQUIRE_HOPPER();
  const LayerTensors tensors = make_tensors(52, test::with_shared(true));
  const auto make = test::maker_of(tensors);
  const Tensor x = random_hidden(53, 4, 64);
  FusedMoE::Args args;
  args.hidden_states = x.view();
  for (const bool experts : {false, true}) {
    for (const Status& s :
         test::on_two_ranks([&](int rank, const std::shared_ptr<Communicator>&c) -> Status {
           FusedMoE::Options options = two_on_gpu(rank, experts, c);
           MOESAIC_ASSIGN_OR_RETURN(const FusedMoE whole, make(options));
           const Tensor want = std::move(must_run(whole, args).output);
           options.ranks.reduce_results = false;
           MOESAIC_ASSIGN_OR_RETURN(const FusedMoE part, make(options));
           EXPECT_FALSE(part.output_is_reduced());
           const DeviceTensor dx = DeviceTensor::copy_of(x.view(), kPartsGpu).value();
           DeviceTensor y = parts_room(DType::kF32, x.shape());
           cudaStream_t stream = nullptr;
           EXPECT_EQ(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), cudaSuccess);
           MOESAIC_RETURN_IF_ERROR(part.enqueue({stream}, dx.view(), y.view()));
           MOESAIC_RETURN_IF_ERROR(part.maybe_all_reduce(y.view(), {stream}));
           EXPECT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
           expect_same(parts_on_host(y), want, "F32");
           // More rows than one call has, and bf16: as on the host.
           Tensor many = random_hidden(54 + static_cast<std::uint64_t>(rank), 11, 64);
           DeviceTensor d_many = DeviceTensor::copy_of(many.view(), kPartsGpu).value();
           MOESAIC_RETURN_IF_ERROR(part.maybe_all_reduce(d_many.view(), {stream}));
           EXPECT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
           MOESAIC_RETURN_IF_ERROR(part.maybe_all_reduce(many.view()));
           expect_same(parts_on_host(d_many), many, "BF16");
           // Nothing is left to add of a whole one.
           MOESAIC_RETURN_IF_ERROR(whole.maybe_all_reduce(y.view(), {stream}));
           expect_same(parts_on_host(y), want, "whole");
           TensorView wrong = y.view();
           wrong.dtype = DType::kF16;
           expect_refusal(part.maybe_all_reduce(wrong), StatusCode::kInvalidDType, {"x", "BF16"});
           wrong = TensorView(many.data(), DType::kBF16, many.shape(), kPartsGpu);
           expect_refusal(part.maybe_all_reduce(wrong), StatusCode::kInvalidArgument,
                          {"x", "host memory"});
           cudaGraph_t graph = nullptr;
           EXPECT_EQ(cudaStreamBeginCapture(stream, cudaStreamCaptureModeRelaxed), cudaSuccess);
           expect_refusal(part.maybe_all_reduce(y.view(), {stream}), StatusCode::kUnsupported,
                          {"stream", "captured"});
           EXPECT_EQ(cudaStreamEndCapture(stream, &graph), cudaSuccess);
           if (graph != nullptr) (void)cudaGraphDestroy(graph);
           (void)cudaStreamDestroy(stream);
           return {};
         })) {
      EXPECT_TRUE(s.ok()) << s.to_string();
    }
  }
}

}  // namespace
}  // namespace moesaic
