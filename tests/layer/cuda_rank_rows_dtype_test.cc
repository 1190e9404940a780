// Layers of models in F16 and F32 over ranks: hidden states and outputs on the device in the model's
// own dtype, whatever experts, functions or transports take. In two binaries: rows go by messages,
// or through peer windows where the process loads its kernels at the start. Skipped, visibly, without
// a device.
#include <cuda_runtime.h>
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <vector>

#include "layer/cuda_rank_case.h"
#include "moesaic/device_tensor.h"
#include "support/cuda_device.h"
#include "support/metrics.h"
#include "support/refusal.h"

namespace moesaic {
namespace {

using test::LayerTensors;
using test::model_in;

// Of one rank of two engines: a call on the device in `dtype` has the bits of one through the host,
// where results are rounded by the host. Empty, or what is wrong. Memory is made and freed while no
// rank is in a call.
std::string bits_of_forward(const FusedMoE& layer, int rank, DType dtype,
                            const std::shared_ptr<Communicator>& world) {
  // By messages the first rank takes two steps and the other one.
  const bool windows = layer.summary().find("through peer windows") != std::string::npos;
  const std::int64_t rows = windows ? 3 + rank : rank == 0 ? 11 : 3;
  const Tensor x = test::random_hidden(6 + static_cast<std::uint64_t>(rank), rows, 256, dtype);
  Tensor want = Tensor::zeros(dtype, x.shape()).value();
  Tensor got = Tensor::zeros(dtype, x.shape()).value();
  const DeviceTensor in = DeviceTensor::copy_of(x.view(), layer.device()).value();
  DeviceTensor out = DeviceTensor::uninitialized(layer.device(), dtype, x.shape()).value();
  cudaStream_t stream = nullptr;
  if (cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking) != cudaSuccess) return "stream";
  // A stream has its queue from its first use on.
  const auto bytes = static_cast<std::size_t>(got.bytes());
  bool done = cudaMemsetAsync(out.view().data, 0xFF, bytes, stream) == cudaSuccess &&
              cudaStreamSynchronize(stream) == cudaSuccess;
  Status status = world->barrier("forward");
  if (status.ok()) status = layer.forward(x.view(), want.view());
  if (status.ok()) status = world->barrier("enqueue");
  if (status.ok()) status = layer.enqueue({stream}, in.view(), out.view());
  done = cudaStreamSynchronize(stream) == cudaSuccess && done;
  if (status.ok()) status = world->barrier("done");
  (void)cudaStreamDestroy(stream);
  if (!status.ok()) return status.to_string();
  if (!done || !copy_tensor(out.view(), got.view()).ok()) return "the device failed";
  std::string why;
  if (test::same_bits(got.view(), want.view(), &why)) return "";
  return why.empty() ? "other bits" : why;
}

TEST(CudaRankRowsDType, EnqueueHasTheBitsOfForward) {
  REQUIRE_HOPPER();
  const bool windows = peer_windows_available().ok();
  int runs = 0;
  for (const MoeLayerSpec& spec :
       {test::scaled_output(), test::deepseek_like(), test::with_shared(true)}) {
    for (const char* quant : {"int4-g128", "fp8-bf16", "f16", "fp8-block"}) {
      for (const DType model : {DType::kF16, DType::kF32}) {
        const bool half = std::string_view(quant) == "f16";
        if (half && model != DType::kF16) continue;
        const LayerTensors t = model_in(model, quant, spec);
        const auto make = test::maker_of(t);
        for (const RankTransport transport : {RankTransport::kAllToAll, RankTransport::kGather}) {
          for (const Status& s :
               test::on_two_ranks([&](int rank,
                                      const std::shared_ptr<Communicator>&world) -> Status {
                 FusedMoE::Options o = test::two_engines(rank, world);
                 o.ranks.transport = transport;
                 if (windows) o.ranks.engine = RankEngine::kPeerWindows;
                 const auto layer = make(o);
                 if (!layer.ok()) return layer.status();
                 for (const DType dtype : {DType::kF16, DType::kF32, DType::kBF16}) {
                   const std::string wrong = bits_of_forward(*layer, rank, dtype, world);
                   MOESAIC_RETURN_IF_ERROR(world->barrier("next"));
                   if (wrong.empty()) continue;
                   return {StatusCode::kInternal, fmt::format("{}: {}", dtype_name(dtype), wrong)};
                 }
                 return {};
               })) {
            EXPECT_TRUE(s.ok()) << quant << " of " << dtype_name(model) << ": " << s.to_string();
            ++runs;
          }
        }
      }
    }
  }
  EXPECT_EQ(runs, 3 * 7 * 2 * 2);
}

TEST(CudaRankRowsDType, ModelsInBf16TakeBf16) {
  REQUIRE_HOPPER();
  const LayerTensors t = model_in(DType::kBF16, "int4-g128", test::small_spec());
  const auto make = test::maker_of(t);
  for (const Status& s :
       test::on_two_ranks([&](int rank, const std::shared_ptr<Communicator>&world) -> Status {
         const auto layer = make(test::two_engines(rank, world));
         if (!layer.ok()) return layer.status();
         const DeviceTensor x =
             DeviceTensor::copy_of(test::random_hidden(7, 2, 256, DType::kF16).view(),
                                   layer->device())
                 .value();
         DeviceTensor y =
             DeviceTensor::uninitialized(layer->device(), DType::kBF16, {2, 256}).value();
         return layer->enqueue({}, x.view(), y.view());
       })) {
    test::expect_refusal(s, StatusCode::kInvalidDType, {"hidden_states", "F16", "BF16"});
  }
}

}  // namespace
}  // namespace moesaic
