// Hidden states of a GPU's experts that lie apart, or that the output takes the place of. Skipped,
// visibly, without a device.
#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "experts/gpu_call.h"
#include "moesaic/modular_kernel.h"
#include "support/cuda_device.h"
#include "support/expect_bits.h"
#include "support/refusal.h"

namespace moesaic {
namespace {

using test::expect_refusal;
using test::expect_same;
using test::GpuCall;
using test::kGpu;

struct Backend {
  const char* quant;
  const char* name;
};
constexpr Backend kBackends[] = {{"bf16", "cuda_sm90"},       {"fp8-block", "cuda_sm90"},
                                 {"fp8-static", "cuda_sm90"}, {"int8", "cuda_sm90"},
                                 {"f16", "cuda_sm90"},        {"bf16", "cuda_general"}};

TEST(DeviceRows, RowsApartHaveTheBitsOfRowsSideBySide) {
  REQUIRE_HOPPER();
  for (const Backend& b : kBackends) {
    for (const std::int64_t tokens : {1, 9, 130}) {
      SCOPED_TRACE(std::string(b.name) + " " + b.quant + " " + std::to_string(tokens));
      GpuCall call(b.quant, tokens, 6, b.name);
      const Tensor want = call.run(call.args());
      const std::int64_t hidden = call.c.problem.hidden_size, apart = hidden + 5;
      Tensor wide = Tensor::zeros(DType::kBF16, {tokens, apart}).value();
      std::memset(wide.data(), 0xFF, static_cast<std::size_t>(wide.bytes()));
      for (std::int64_t t = 0; t < tokens; ++t) {
        std::memcpy(wide.data() + (t * apart + 1) * 2, call.c.hidden_states.data() + t * hidden * 2,
                    static_cast<std::size_t>(hidden * 2));
      }
      const DeviceTensor x = DeviceTensor::copy_of(wide.view(), kGpu).value();
      ExpertsArgs a = call.args();
      a.hidden_states = {x.view().data + 2, DType::kBF16, {tokens, hidden}, kGpu};
      // One row has no distance to the next; it must still begin where rows may.
      if (tokens == 1) a.hidden_states.data = call.x.view().data;
      a.hidden_states.strides[0] = apart;
      expect_same(call.run(a), want, "apart");
      std::vector<RowNumerics> got(static_cast<std::size_t>(tokens)), rows = got;
      a.numerics = got;
      expect_same(call.run(a), want, "measured");
      ExpertsArgs dense = call.args();
      dense.numerics = rows;
      expect_same(call.run(dense), want, "dense, measured");
      for (std::size_t t = 0; t < rows.size(); ++t) EXPECT_EQ(got[t].noise, rows[t].noise) << t;
      if (tokens == 1) continue;
      a.numerics = {};
      a.hidden_states.strides[0] = hidden - 1;
      expect_refusal(call.experts->run(a), StatusCode::kInvalidLayout,
                     {"hidden_states", "strides"});
      // The last row reaches into the output though a contiguous tensor would not.
      const DeviceTensor both =
          DeviceTensor::uninitialized(kGpu, DType::kU8, {tokens * apart * 2 + tokens * hidden * 4})
              .value();
      a.hidden_states = {both.data(), DType::kBF16, {tokens, hidden}, kGpu};
      a.hidden_states.strides[0] = apart;
      a.output.data =
          const_cast<std::byte*>(both.data()) + ((tokens * hidden * 2 + 255) / 256 * 256);
      if ((tokens - 1) * apart * 2 > (tokens * hidden * 2 + 255) / 256 * 256) {
        expect_refusal(call.experts->run(a), StatusCode::kAliasing, {"output", "hidden_states"});
      }
    }
  }
}

TEST(DeviceRows, InPlaceHasTheBitsOfAnOutputElsewhere) {
  REQUIRE_HOPPER();
  for (const Backend& b : kBackends) {
    for (const std::int64_t tokens : {1, 2, 7, 33, 200, 1000}) {
      SCOPED_TRACE(std::string(b.name) + " " + b.quant + " " + std::to_string(tokens));
      GpuCall call(b.quant, tokens, 6, b.name);
      call.output =
          DeviceTensor::uninitialized(kGpu, DType::kBF16, call.c.hidden_states.shape()).value();
      ExpertsArgs a = call.args();
      const Tensor want = call.run(a);
      expect_refusal(
          [&] {
            a.output = call.x.view();
            return call.experts->run(a);
          }(),
          StatusCode::kAliasing, {"output", "hidden_states"});
      a.inplace = true;
      std::vector<RowNumerics> rows(static_cast<std::size_t>(tokens));
      a.numerics = rows;
      expect_refusal(call.experts->run(a), StatusCode::kUnsupported, {"numerics", "in place"});
      a.numerics = {};
      call.run(a);
      expect_same(test::on_host(call.x), want, "experts");

      ASSERT_TRUE(copy_tensor(call.c.hidden_states.view(), call.x.view()).ok());
      ModularKernel::Options options;
      options.max_tokens = tokens;
      options.inplace = true;
      const ModularKernel kernel =
          ModularKernel::create(call.c.problem, make_local_prepare_finalize(call.c.problem).value(),
                                std::move(call.experts), options)
              .value();
      ModularKernel::Args k;
      k.hidden_states = call.x.view();
      k.topk_ids = call.ids.view();
      k.topk_weights = call.weights.view();
      k.output = call.x.view();
      const Status status = kernel.run(k);
      ASSERT_TRUE(status.ok()) << status.to_string();
      expect_same(test::on_host(call.x), want, "kernel");
      k.output = call.output.view();  // the option only allows it
      ASSERT_TRUE(copy_tensor(call.c.hidden_states.view(), call.x.view()).ok());
      call.poison();
      ASSERT_TRUE(kernel.run(k).ok());
      expect_same(call.result(), want, "elsewhere");
    }
  }
}

}  // namespace
}  // namespace moesaic
