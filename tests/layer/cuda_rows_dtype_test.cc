// Layers of models in F16 and F32 whose experts take bf16 rows: hidden states and outputs on the
// device in the model's own dtype. Skipped, visibly, without a device.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "layer/layer_case.h"
#include "moesaic/device_tensor.h"
#include "moesaic/fused_moe.h"
#include "support/cuda_device.h"
#include "support/metrics.h"
#include "support/refusal.h"

namespace moesaic {
namespace {

using test::LayerRun;
using test::LayerTensors;
using test::make_layer;
using test::model_in;
using test::on_gpu;
using test::random_hidden;
using test::run_layer;

// On the device as through the host, where rows are rounded by the call and results on the host.
TEST(CudaRowsDType, EnqueueHasTheBitsOfForward) {
  REQUIRE_HOPPER();
  const Device device = Device::cuda(0);
  for (const MoeLayerSpec& spec : {test::small_spec(), test::scaled_output(), test::deepseek_like(),
                                   test::with_shared(true)}) {
    for (const char* quant : {"int4-g128", "nvfp4-bf16"}) {
      for (const DType model : {DType::kF16, DType::kF32}) {
        const LayerTensors t = model_in(model, quant, spec);
        FusedMoE::Options options = on_gpu(40);
        options.inplace = true;
        const FusedMoE layer = make_layer(t, options);
        EXPECT_EQ(layer.experts_backend(), "cuda_sm90");
        for (const DType dtype : {DType::kF16, DType::kF32, DType::kBF16}) {
          for (const std::int64_t tokens : {1, 33}) {
            SCOPED_TRACE(testing::Message() << quant << ' ' << dtype_name(model) << ' '
                                            << dtype_name(dtype) << ' ' << tokens);
            const Tensor x = random_hidden(6, tokens, t.spec.hidden_size, dtype);
            const LayerRun want = run_layer(layer, x, dtype);
            const auto expect_bits = [&](const DeviceTensor& in, TensorView out) {
              const Status status = layer.enqueue({}, in.view(), out);
              ASSERT_TRUE(status.ok()) << status.to_string();
              Tensor got = Tensor::zeros(dtype, x.shape()).value();
              ASSERT_TRUE(copy_tensor(out, got.view()).ok());
              std::string why;
              EXPECT_TRUE(test::same_bits(got.view(), want.output.view(), &why)) << why;
            };
            DeviceTensor in = DeviceTensor::copy_of(x.view(), device).value();
            DeviceTensor out = DeviceTensor::uninitialized(device, dtype, x.shape()).value();
            expect_bits(in, out.view());
            expect_bits(in, in.view());  // in place
          }
        }
      }
    }
  }
}

TEST(CudaRowsDType, ModelsInBf16TakeBf16) {
  REQUIRE_HOPPER();
  const LayerTensors t = model_in(DType::kBF16, "int4-g128", test::small_spec());
  const FusedMoE layer = make_layer(t, on_gpu(8));
  const Device device = Device::cuda(0);
  for (const DType dtype : {DType::kF16, DType::kF32}) {
    const DeviceTensor x =
        DeviceTensor::copy_of(random_hidden(7, 2, 256, dtype).view(), device).value();
    DeviceTensor y = DeviceTensor::uninitialized(device, DType::kBF16, {2, 256}).value();
    test::expect_refusal(layer.enqueue({}, x.view(), y.view()), StatusCode::kInvalidDType,
                         {"hidden_states", dtype_name(dtype).data(), "BF16"});
  }
}

}  // namespace
}  // namespace moesaic
