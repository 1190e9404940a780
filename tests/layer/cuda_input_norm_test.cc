// Layers with an input norm on a GPU: the router and the routed experts see normalised rows, the
// shared experts do not. Skipped, visibly, without a device.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "layer/layer_case.h"
#include "moesaic/device_tensor.h"
#include "moesaic/fused_moe.h"
#include "numerics/float_codec.h"
#include "support/cuda_device.h"
#include "support/expect_bits.h"
#include "support/metrics.h"

namespace moesaic {
namespace {

using test::LayerRun;
using test::LayerTensors;
using test::make_layer;
using test::model_in;
using test::on_gpu;
using test::random_hidden;
using test::run_layer;

constexpr std::int64_t kNormRows = 21;

// An eps that matters, weights of the norm that are none of them 1, and a shared expert that would
// join the routed ones if it saw the same rows.
MoeLayerSpec normed_spec() {
  MoeLayerSpec spec = test::with_shared(false);
  spec.activation.kind = ActivationKind::kGeluTanh;
  spec.routing.has_expert_scale = true;
  spec.input_norm_eps = 0.25;
  return spec;
}

// The CPU's layer is tested against float64 (input_norm_test.cc).
TEST(CudaInputNorm, HasTheCpusResult) {
  REQUIRE_HOPPER();
  for (const DType model : {DType::kBF16, DType::kF16, DType::kF32}) {
    for (const char* quant : {"bf16", "fp8-block", "int4-g128", "f16", "f32"}) {
      const LayerTensors t = model_in(model, quant, normed_spec());
      for (const char* backend : {"", "cuda_general"}) {
        FusedMoE::Options options = on_gpu(8);
        options.backend = backend;
        SCOPED_TRACE(testing::Message() << quant << " of " << dtype_name(model) << ' ' << backend);
        const FusedMoE gpu = make_layer(t, options);
        const FusedMoE cpu = make_layer(t, FusedMoE::Options());
        const Tensor x = random_hidden(7, kNormRows, t.spec.hidden_size, model);
        const LayerRun got = run_layer(gpu, x), want = run_layer(cpu, x);
        const auto logits = test::compare(test::to_doubles(got.logits.view()),
                                          test::to_doubles(want.logits.view()));
        EXPECT_LE(logits.rel_l2, 1e-6) << logits.describe;
        std::string why;
        EXPECT_TRUE(test::same_bits(got.topk_ids.view(), want.topk_ids.view(), &why)) << why;
        const auto result = test::compare(test::to_doubles(got.output.view()),
                                          test::to_doubles(want.output.view()));
        EXPECT_LE(result.rel_l2, 2 * gpu.quant().output_bound) << result.describe;
      }
    }
  }
}

// Rows around 2^-60 to 2^60, of zeros and with a NaN, and a bias of the gate's, which no norm divides:
// logits are the CPU's row by row.
TEST(CudaInputNorm, LogitsOfRowsOfAnySize) {
  REQUIRE_HOPPER();
  MoeLayerSpec spec = normed_spec();
  spec.has_router_bias = true;
  spec.input_norm_eps = 1e-6;
  for (const DType model : {DType::kBF16, DType::kF32}) {
    const LayerTensors t = model_in(model, "bf16", spec);
    const FusedMoE gpu = make_layer(t, on_gpu());
    const FusedMoE cpu = make_layer(t, FusedMoE::Options());
    Tensor x = random_hidden(9, kNormRows, t.spec.hidden_size);
    for (std::int64_t i = 0; i < kNormRows * t.spec.hidden_size; ++i) {
      const std::int64_t row = i / t.spec.hidden_size;
      std::uint16_t& code = x.as<std::uint16_t>()[i];
      const float scale = row == 0 ? 0.0F : std::ldexp(1.0F, static_cast<int>(6 * row - 60));
      code = bf16_from_f32(f32_from_bf16(code) * scale);
      if (i == 1 * t.spec.hidden_size) code = 0x7FC0;
    }
    const LayerRun got = run_layer(gpu, x), want = run_layer(cpu, x);
    const std::int64_t columns = t.spec.num_experts;
    for (std::int64_t row = 0; row < kNormRows; ++row) {
      SCOPED_TRACE(testing::Message() << dtype_name(model) << " row " << row);
      const std::span<const float> a(got.logits.as<float>() + row * columns, columns);
      const std::span<const float> b(want.logits.as<float>() + row * columns, columns);
      double off = 0, size = 0;
      for (std::size_t e = 0; e < a.size(); ++e) {
        EXPECT_EQ(std::isnan(a[e]), row == 1);
        EXPECT_EQ(std::isnan(b[e]), row == 1);
        off += std::pow(double{a[e]} - double{b[e]}, 2);
        size += std::pow(double{b[e]}, 2);
      }
      EXPECT_TRUE(row == 1 || std::sqrt(off) <= 1e-6 * std::sqrt(size)) << off << " of " << size;
    }
  }
}

// With shared experts before, behind and beside the routed ones, as their own part, in place, and
// with the caller's routing.
TEST(CudaInputNorm, EnqueueHasTheBitsOfForward) {
  REQUIRE_HOPPER();
  const Device device = Device::cuda(0);
  const LayerTensors t = model_in(DType::kBF16, "bf16", normed_spec());
  const Tensor x = random_hidden(8, kNormRows, t.spec.hidden_size);
  const DeviceTensor in = DeviceTensor::copy_of(x.view(), device).value();
  for (const bool beside : {false, true}) {
    FusedMoE::Options options = on_gpu(32);
    options.shared_stream = beside;
    options.inplace = true;
    const FusedMoE layer = make_layer(t, options);
    for (const DType dtype : {DType::kF32, DType::kBF16}) {
      SCOPED_TRACE(testing::Message() << beside << ' ' << dtype_name(dtype));
      const LayerRun want = run_layer(layer, x, dtype);
      DeviceTensor out = DeviceTensor::uninitialized(device, dtype, x.shape()).value();
      const auto expect_bits = [&](const FusedMoE::Args& args, const char* what) {
        const Status status = layer.enqueue({}, args);
        ASSERT_TRUE(status.ok()) << what << ": " << status.to_string();
        Tensor got = Tensor::zeros(dtype, x.shape()).value();
        ASSERT_TRUE(copy_tensor(args.output, got.view()).ok());
        test::expect_same(got, want.output, what);
      };
      FusedMoE::Args args;
      args.hidden_states = in.view();
      args.output = out.view();
      expect_bits(args, "enqueue");
      const DeviceTensor logits = DeviceTensor::copy_of(want.logits.view(), device).value();
      args.router_logits = logits.view();
      expect_bits(args, "given logits");
      const DeviceTensor ids = DeviceTensor::copy_of(want.topk_ids.view(), device).value();
      const DeviceTensor weights = DeviceTensor::copy_of(want.topk_weights.view(), device).value();
      args.router_logits = {};
      args.topk_ids = ids.view();
      args.topk_weights = weights.view();
      expect_bits(args, "given ids");
      if (dtype != DType::kBF16) continue;
      DeviceTensor both = DeviceTensor::copy_of(x.view(), device).value();
      args = {};
      args.hidden_states = both.view();
      args.output = both.view();
      expect_bits(args, "in place");
    }
  }
}

}  // namespace
}  // namespace moesaic
