// Experts of a caller's on a GPU that leave their rows unweighted: finalize adds them up. Skipped,
// visibly, without a device.
#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "moesaic/device_tensor.h"
#include "moesaic/modular_kernel.h"
#include "support/cuda_device.h"
#include "support/expect_bits.h"
#include "support/experts_run.h"
#include "support/random.h"
#include "support/refusal.h"

namespace moesaic {
namespace {

using test::expect_same;

constexpr Device kSumsGpu = Device::cuda(0);

// Leaves rows that it was given, of either device.
class GivenRows final : public Experts {
 public:
  GivenRows(ConstTensorView rows, TopKWeightAndReduce reduction)
      : rows_(rows), reduction_(reduction) {}
  std::string_view name() const override { return "given_rows"; }
  TopKWeightAndReduce reduction() const override { return reduction_; }
  ActivationFormat format() const override { return ActivationFormat::kStandard; }
  Result<std::int64_t> workspace_size(std::int64_t) const override { return std::int64_t{0}; }
  std::int64_t weight_bytes() const override { return 0; }
  std::string_view determinism() const override { return "fixed"; }
  Status run(const ExpertsArgs& a) const override {
    EXPECT_EQ(a.output.shape, rows_.shape);
    EXPECT_TRUE(a.output.device == rows_.device);
    const auto bytes = static_cast<std::size_t>(a.output.dim(0) * a.output.dim(1) * 4);
    if (!rows_.device.is_cuda()) {
      std::memcpy(a.output.data, rows_.data, bytes);
      return {};
    }
    return cudaMemcpyAsync(a.output.data, rows_.data, bytes, cudaMemcpyDeviceToDevice,
                           static_cast<cudaStream_t>(a.stream.handle)) == cudaSuccess
               ? Status()
               : Status(StatusCode::kDevice, "copy");
  }

 private:
  ConstTensorView rows_;
  TopKWeightAndReduce reduction_;
};

TEST(CudaSlotSums, HaveTheBitsOfTheCpu) {
  REQUIRE_HOPPER();
  using enum TopKWeightAndReduce;
  for (const std::int64_t tokens : {1, 5, 300}) {
    for (const bool on_input : {false, true}) {
      for (const bool mapped : {false, true}) {
        MoeProblem p = test::small_problem("bf16");
        p.hidden_size = 264;
        p.top_k = on_input ? 1 : 3;
        p.apply_router_weight_on_input = on_input;
        p.max_tokens = tokens;
        if (mapped) p.num_local_experts = 4;
        const std::vector<std::int32_t> map = {0, -1, 1, 2, -1, 3};
        test::Rng rng(17);
        const Tensor x = test::random_normal(rng, DType::kBF16, {tokens, p.hidden_size});
        Tensor rows = test::random_normal(rng, DType::kF32, {tokens * p.top_k, p.hidden_size});
        const test::OwnedRouting routing =
            test::random_routing(18, tokens, p.num_experts, p.top_k, 0.2);
        for (std::int64_t s = 0; s < tokens * p.top_k; ++s) {  // rows that nobody may read
          const std::int32_t id = routing.ids.as<std::int32_t>()[s];
          if (id >= 0 && (!mapped || map[static_cast<std::size_t>(id)] >= 0)) continue;
          std::memset(rows.data() + s * p.hidden_size * 4, 0xFF,
                      static_cast<std::size_t>(p.hidden_size * 4));
        }
        for (const auto reduction : {kContiguous, kDelegate}) {
          for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
            const auto kernel_of = [&](Device device, const ConstTensorView& given) {
              p.device = device;
              return ModularKernel::create(p, make_local_prepare_finalize(p).value(),
                                           std::make_unique<GivenRows>(given, reduction),
                                           {.max_tokens = tokens})
                  .value();
            };
            ModularKernel::Args a;
            Tensor want = Tensor::zeros(dtype, x.shape()).value();
            a.hidden_states = x.view();
            a.topk_ids = routing.ids.view();
            a.topk_weights = routing.weights.view();
            if (mapped) a.expert_map = map;
            a.output = want.view();
            ASSERT_TRUE(kernel_of(Device::cpu(), rows.view()).run(a).ok());

            const auto copy = [](const Tensor& t) {
              return DeviceTensor::copy_of(t.view(), kSumsGpu).value();
            };
            const DeviceTensor dx = copy(x), drows = copy(rows), dids = copy(routing.ids);
            const DeviceTensor dweights = copy(routing.weights);
            const test::DeviceBytes dmap(map);
            DeviceTensor out = DeviceTensor::uninitialized(kSumsGpu, dtype, x.shape()).value();
            a.hidden_states = dx.view();
            a.topk_ids = dids.view();
            a.topk_weights = dweights.view();
            if (mapped) a.expert_map = {dmap.as<const std::int32_t>(), map.size()};
            a.output = out.view();
            const ModularKernel kernel = kernel_of(kSumsGpu, drows.view());
            const Status status = kernel.enqueue({}, a);
            ASSERT_TRUE(status.ok()) << status.to_string();
            ASSERT_TRUE(synchronize(kSumsGpu).ok());
            Tensor got = Tensor::zeros(dtype, x.shape()).value();
            ASSERT_TRUE(copy_tensor(out.view(), got.view()).ok());
            expect_same(got, want, std::to_string(tokens) + (mapped ? " mapped" : ""));
          }
        }
      }
    }
  }
}

TEST(CudaSlotSums, HostMemoryIsRefused) {
  REQUIRE_HOPPER();
  MoeProblem p = test::small_problem("bf16");
  p.device = kSumsGpu;
  Tensor rows = Tensor::zeros(DType::kF32, {4, p.hidden_size}).value();
  Tensor output = Tensor::zeros(DType::kF32, {2, p.hidden_size}).value();
  const test::OwnedRouting routing = test::random_routing(19, 2, p.num_experts, p.top_k, 0.0);
  FinalizeArgs a;
  a.output = output.view();
  a.expert_output = rows.view();
  a.topk_weights = routing.weights.view();
  a.topk_ids = routing.ids.view();
  a.reduction = TopKWeightAndReduce::kContiguous;
  test::expect_refusal(make_local_prepare_finalize(p).value()->finalize(a),
                       StatusCode::kInvalidArgument, {"output", "host memory"});
}

}  // namespace
}  // namespace moesaic
