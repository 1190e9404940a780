// What a layer on a GPU says of its experts, and what it refuses while it lives. Skipped, visibly,
// without a device.
#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <string>

#include "layer/layer_case.h"
#include "support/cuda_device.h"
#include "support/metrics.h"
#include "support/refusal.h"

namespace moesaic {
namespace {

using test::expect_refusal;

TEST(CudaLiveLayer, CopiedRowsAreTheExpertsToTheBit) {
  if (!check_device(Device::cuda(0)).ok())
    GTEST_SKIP() << check_device(Device::cuda(0)).to_string();
  for (const bool joins : {false, true}) {
    MoeLayerSpec spec = test::small_spec();
    // A shared expert like a routed one joins them, and is none of them here.
    if (joins) spec.shared.intermediate_size = spec.intermediate_size;
    const test::LayerTensors tensors = test::make_tensors(91, spec);
    test::LayerTensors other = test::make_tensors(91, spec);
    other.experts = test::make_tensors(92, spec).experts;
    const FusedMoE a = test::make_layer(tensors, test::on_gpu(32));
    const FusedMoE b = test::make_layer(other, test::on_gpu(32));
    const Tensor x = test::random_hidden(93, 17, spec.hidden_size);
    const test::LayerRun want = test::run_layer(a, x);
    std::string why;
    EXPECT_FALSE(test::same_bits(test::run_layer(b, x).output.view(), want.output.view(), &why));
    const auto from = a.get_expert_weights().value(), to = b.get_expert_weights().value();
    ASSERT_EQ(from.size(), to.size());
    ASSERT_FALSE(from.empty());
    for (std::size_t i = 0; i < from.size(); ++i) {
      EXPECT_EQ(from[i].rows.dim(0), spec.num_experts);
      EXPECT_EQ(from[i].rows.device, Device::cuda(0));
      ASSERT_EQ(from[i].rows.dim(1), to[i].rows.dim(1));
      ASSERT_EQ(cudaMemcpy(to[i].rows.data, from[i].rows.data,
                           static_cast<std::size_t>(from[i].rows.dim(0) * from[i].rows.dim(1)),
                           cudaMemcpyDeviceToDevice),
                cudaSuccess);
    }
    EXPECT_TRUE(test::same_bits(test::run_layer(b, x).output.view(), want.output.view(), &why))
        << why;
  }
}

TEST(CudaLiveLayer, RefusesByName) {
  if (!check_device(Device::cuda(0)).ok())
    GTEST_SKIP() << check_device(Device::cuda(0)).to_string();
  const test::LayerTensors tensors = test::make_tensors(94, test::small_spec());
  FusedMoE layer = test::make_layer(tensors, test::on_gpu(8));
  EXPECT_EQ(layer.global_num_experts(), 8);
  EXPECT_EQ(layer.local_num_experts(), 8);
  EXPECT_TRUE(layer.expert_map().empty());
  EXPECT_EQ(layer.parallel().ep_size, 1);
  const auto all = make_stacked_source(tensors.experts.view());
  expect_refusal(layer.update_expert_map({}, *all), StatusCode::kUnsupported,
                 {"update_expert_map: got a layer on cuda:0", "a new layer of the new world"});
  expect_refusal(layer.set_eplb_state({}), StatusCode::kUnsupported, {"enable_eplb: got false"});
  FusedMoE::Options balanced = test::on_gpu(8);
  balanced.ranks.enable_eplb = true;
  expect_refusal(FusedMoE::create(tensors.weights(), balanced).status(), StatusCode::kUnsupported,
                 {"enable_eplb: got true on a GPU"});
}

}  // namespace
}  // namespace moesaic
