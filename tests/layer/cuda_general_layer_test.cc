// Layers that only the general experts of a GPU take: F16, F32, odd sizes. Skipped, visibly,
// without a device.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "layer/layer_case.h"
#include "moesaic/device_tensor.h"
#include "moesaic/fused_moe.h"
#include "numerics/element.h"
#include "support/cuda_device.h"
#include "support/metrics.h"

namespace moesaic {
namespace {

using test::compare;
using test::deepseek_like;
using test::LayerRun;
using test::LayerTensors;
using test::make_layer;
using test::make_tensors;
using test::on_gpu;
using test::random_hidden;
using test::run_layer;
using test::small_spec;
using test::to_doubles;
using test::with_shared;

struct WideCase {
  const char* name;
  MoeLayerSpec spec;
  std::string quant;
};

MoeLayerSpec odd_sizes(MoeLayerSpec spec) {
  spec.hidden_size = 77;
  spec.intermediate_size = 51;
  if (spec.shared.intermediate_size > 0) spec.shared.intermediate_size = 45;
  return spec;
}

std::vector<WideCase> wide_cases() {
  std::vector<WideCase> cases;
  for (const char* quant : {"f32", "f16"}) {
    cases.push_back({"small", small_spec(), quant});
    cases.push_back({"shared", with_shared(true), quant});
    cases.push_back({"deepseek", deepseek_like(), quant});
    cases.push_back({"odd", odd_sizes(deepseek_like()), quant});
  }
  cases.push_back({"odd", odd_sizes(small_spec()), "bf16"});
  cases.push_back({"odd with shared", odd_sizes(with_shared(false)), "bf16"});
  MoeLayerSpec padded = with_shared(true);  // the fast kernel with zeros
  padded.intermediate_size = 37;
  padded.shared.intermediate_size = 36;
  cases.push_back({"padded", padded, "bf16"});
  return cases;
}

TEST(CudaGeneralLayer, AgreesWithTheCpuWithinTheSchemesBound) {
  REQUIRE_HOPPER();
  for (const WideCase& c : wide_cases()) {
    SCOPED_TRACE(c.name + (" " + c.quant));
    const LayerTensors t = make_tensors(3, c.spec);
    FusedMoE::Options options = on_gpu(40), on_cpu;
    options.quant = on_cpu.quant = c.quant;
    const FusedMoE gpu = make_layer(t, options), cpu = make_layer(t, on_cpu);
    for (const DType dtype : {DType::kBF16, DType::kF32, DType::kF16}) {
      const Tensor x = random_hidden(4, 70, t.spec.hidden_size, dtype);
      const LayerRun got = run_layer(gpu, x), want = run_layer(cpu, x);
      std::string why;
      EXPECT_TRUE(test::same_bits(got.topk_ids.view(), want.topk_ids.view(), &why)) << why;
      const auto result = compare(to_doubles(got.output.view()), to_doubles(want.output.view()));
      EXPECT_LE(result.rel_l2, 2 * gpu.quant().output_bound) << result.describe;
      for (const DType out : {DType::kBF16, DType::kF16}) {
        const LayerRun rounded = run_layer(gpu, x, out);
        Tensor expected = Tensor::zeros(out, x.shape()).value();
        for (std::int64_t i = 0; i < 70 * t.spec.hidden_size; ++i) {
          store_from_f32(expected.data(), out, i, got.output.as<float>()[i]);
        }
        EXPECT_TRUE(test::same_bits(rounded.output.view(), expected.view(), &why)) << why;
      }
    }
  }
}

// Tensors of the device in the layer's own dtype, in and out, and rows of padding.
TEST(CudaGeneralLayer, EnqueueTakesTheDTypeOfTheLayer) {
  REQUIRE_HOPPER();
  const Device device = Device::cuda(0);
  for (const char* quant : {"f16", "f32"}) {
    const LayerTensors t = make_tensors(5, odd_sizes(deepseek_like()));
    FusedMoE::Options options = on_gpu(40);
    options.quant = quant;
    const FusedMoE layer = make_layer(t, options);
    for (const DType dtype : {DType::kF16, DType::kF32, DType::kBF16}) {
      const Tensor x = random_hidden(6, 33, t.spec.hidden_size, dtype);
      const LayerRun want = run_layer(layer, x, dtype);
      const DeviceTensor on = DeviceTensor::copy_of(x.view(), device).value();
      DeviceTensor out = DeviceTensor::uninitialized(device, dtype, x.shape()).value();
      const Status status = layer.enqueue({}, on.view(), out.view());
      ASSERT_TRUE(status.ok()) << status.to_string();
      Tensor got = Tensor::zeros(dtype, x.shape()).value();
      ASSERT_TRUE(copy_tensor(out.view(), got.view()).ok());
      std::string why;
      EXPECT_TRUE(test::same_bits(got.view(), want.output.view(), &why)) << why;
      FusedMoE::Args args;
      args.hidden_states = x.view();
      Tensor mask = Tensor::zeros(DType::kU8, {33}).value();
      mask.as<std::uint8_t>()[5] = 1;
      args.padding_mask = mask.view();
      const LayerRun masked = test::must_run(layer, args, dtype);
      for (std::int64_t i = 0; i < 33 * t.spec.hidden_size; ++i) {
        const float v = load_as_f32(masked.output.data(), dtype, i);
        const float all = load_as_f32(want.output.data(), dtype, i);
        ASSERT_EQ(v, i / t.spec.hidden_size == 5 ? 0.0F : all) << quant << ' ' << i;
      }
    }
  }
}

TEST(CudaGeneralLayer, MeasuresWhatTheCpuMeasures) {
  REQUIRE_HOPPER();
  for (const char* quant : {"f32", "f16", "bf16", "fp8-block"}) {
    MoeLayerSpec spec = deepseek_like();
    spec.hidden_size = 256, spec.intermediate_size = spec.shared.intermediate_size = 128;
    const LayerTensors t = make_tensors(7, spec);
    FusedMoE::Options options = on_gpu(40), on_cpu;
    options.backend = "cuda_general";
    options.quant = on_cpu.quant = quant;
    const FusedMoE gpu = make_layer(t, options), cpu = make_layer(t, on_cpu);
    EXPECT_EQ(gpu.experts_backend(), "cuda_general");
    const Tensor x = random_hidden(8, 70, spec.hidden_size);
    Tensor y = Tensor::zeros(DType::kF32, x.shape()).value();
    std::vector<RowNumerics> got(70), want(70);
    FusedMoE::Trace trace;
    trace.numerics = got;
    ASSERT_TRUE(gpu.forward(x.view(), y.view(), trace).ok());
    trace.numerics = want;
    ASSERT_TRUE(cpu.forward(x.view(), y.view(), trace).ok());
    const NumericsSummary of_gpu = summarize(got), of_cpu = summarize(want);
    EXPECT_EQ(of_gpu.rows, 70);
    EXPECT_NEAR(of_gpu.error_estimate(), of_cpu.error_estimate(), 0.3 * of_cpu.error_estimate())
        << quant;
    EXPECT_EQ(of_gpu.outside, of_cpu.outside);
  }
}

}  // namespace
}  // namespace moesaic
