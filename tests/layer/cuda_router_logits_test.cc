// A layer on a GPU that rounds its gate's logits before the router. Skipped, visibly, without a
// device.
#include <gtest/gtest.h>

#include <cstring>

#include "gate/rounding.h"
#include "layer/near_ties.h"
#include "support/cuda_device.h"
#include "support/metrics.h"
#include "support/refusal.h"

namespace moesaic {
namespace {

using test::LayerRun;
using test::LayerTensors;
using test::make_layer;
using test::near_ties;
using test::on_gpu;
using test::random_hidden;
using test::run_layer;
using test::same_bits;

Tensor first_rows(const Tensor& t, std::int64_t rows) {
  Tensor part = Tensor::zeros(t.dtype(), {rows, t.shape()[1]}).value();
  std::memcpy(part.data(), t.data(), static_cast<std::size_t>(part.bytes()));
  return part;
}

MoeLayerSpec joined() {
  MoeLayerSpec spec = test::small_spec();
  spec.shared.intermediate_size = spec.intermediate_size;
  return spec;
}

// Few rows would be routed in the experts' kernel, whose launch in front is the gate's: with a
// rounding the stages are apart, and the bits of a row are those it has among many.
TEST(CudaRouterLogits, AreRoundedForEveryNumberOfTokens) {
  REQUIRE_HOPPER();
  for (const MoeLayerSpec& spec : {test::small_spec(), joined(), test::deepseek_like()}) {
    for (const DType gate_dtype : {DType::kBF16, DType::kF16, DType::kF32}) {
      const LayerTensors t = near_ties(gate_dtype, spec);
      const DType x_dtype = gate_dtype == DType::kF16 ? DType::kF16 : DType::kBF16;
      const Tensor x = random_hidden(62, 70, spec.hidden_size, x_dtype);
      FusedMoE::Options options = on_gpu(70);
      const LayerRun plain = run_layer(make_layer(t, options), x);
      for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
        for (const bool fp32 : {true, false}) {
          SCOPED_TRACE(std::string(dtype_name(gate_dtype)) + " " + std::string(dtype_name(dtype)) +
                       (fp32 ? "" : ", linear of the weight's"));
          options.router_logits_dtype = dtype;
          options.gate_force_fp32_compute = fp32;
          const FusedMoE layer = make_layer(t, options);
          const LayerRun many = run_layer(layer, x);
          const gate::LogitRounding rounding = {fp32 ? DType::kF32 : gate_dtype, dtype};
          std::string why;
          EXPECT_TRUE(same_bits(many.logits.view(),
                                test::rounded_logits(plain.logits, rounding).view(), &why))
              << why;
          if (!spec.routing.has_correction_bias) {  // a bias decides ties before the id does
            EXPECT_EQ(same_bits(many.topk_ids.view(), plain.topk_ids.view(), &why),
                      rounding.none());
          }
          for (const std::int64_t rows : {1, 3, 4, 5, 16, 17, 64}) {
            const LayerRun few = run_layer(layer, first_rows(x, rows));
            for (const auto& [got, all] :
                 {std::pair{&few.logits, &many.logits}, std::pair{&few.topk_ids, &many.topk_ids},
                  std::pair{&few.topk_weights, &many.topk_weights},
                  std::pair{&few.output, &many.output}}) {
              EXPECT_TRUE(same_bits(got->view(), first_rows(*all, rows).view(), &why))
                  << rows << " rows: " << why;
            }
          }
        }
      }
    }
  }
}

// The CPU's layer with the same options chooses the same experts where logits are not within fp32's
// own error of a rounding's edge.
TEST(CudaRouterLogits, TheCpuChoosesAlike) {
  REQUIRE_HOPPER();
  const LayerTensors t = near_ties(DType::kBF16);
  const Tensor x = random_hidden(64, 200, t.spec.hidden_size);
  FusedMoE::Options gpu = on_gpu(200), cpu;
  gpu.router_logits_dtype = cpu.router_logits_dtype = DType::kBF16;
  const LayerRun a = run_layer(make_layer(t, gpu), x), b = run_layer(make_layer(t, cpu), x);
  int same = 0, odd = 0;
  for (std::int64_t i = 0; i < 200; ++i) {
    same += a.topk_ids.as<std::int32_t>()[i] == b.topk_ids.as<std::int32_t>()[i] ? 1 : 0;
    odd += a.topk_ids.as<std::int32_t>()[i] % 2;
  }
  EXPECT_GE(same, 198);
  EXPECT_LT(odd, 60) << "ties go to the even id";
}

TEST(CudaRouterLogits, RowsOfAnotherDTypeThanALinearIn16BitsAreRefused) {
  REQUIRE_HOPPER();
  FusedMoE::Options options = on_gpu(8);
  options.gate_force_fp32_compute = false;
  const LayerTensors t = near_ties(DType::kF16);
  const FusedMoE layer = make_layer(t, options);
  const test::DeviceBytes x(4 * t.spec.hidden_size * 2), y(4 * t.spec.hidden_size * 2);
  const Shape shape{4, t.spec.hidden_size};
  test::expect_refusal(
      layer.enqueue({}, {x.as<const std::byte>(), DType::kBF16, shape, Device::cuda(0)},
                    {y.as<std::byte>(), DType::kBF16, shape, Device::cuda(0)}),
      StatusCode::kUnsupported, {"hidden_states: got BF16, need F16"});
}

}  // namespace
}  // namespace moesaic
