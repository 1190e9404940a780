// Rows that come to the GPU experts as codes and scales, and rows that leave them slot by slot:
// what transports between ranks use. Skipped, visibly, without a device.
#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <cmath>
#include <string_view>

#include "cuda/quant_rows.h"
#include "experts/reference/operand.h"
#include "experts/sm90/experts.h"
#include "numerics/float_codec.h"
#include "permute/sm90/combine.h"
#include "support/cuda_device.h"
#include "support/experts_run.h"
#include "support/random.h"
#include "support/refusal.h"

namespace moesaic {
namespace {

using cuda::CudaExperts;
using cuda::CudaExpertsArgs;
using cuda::CudaResult;
using cuda::CudaRows;
using test::DeviceBytes;
using test::expect_refusal;
using test::StandardCase;

MoeProblem problem_of(std::string_view quant, std::int64_t top_k) {
  MoeProblem p = test::small_problem(quant);
  p.num_experts = p.num_local_experts = 6;
  p.top_k = top_k;
  p.hidden_size = 384;
  p.intermediate_size = 256;
  return p;
}

// A case on the device, and a poisoned output.
struct RowsOnDevice {
  std::int64_t tokens, hidden;
  DeviceBytes x, ids, weights, workspace, out;
  std::int64_t workspace_bytes;
  std::unique_ptr<CudaExperts> experts;

  explicit RowsOnDevice(const StandardCase& c)
      : tokens(c.hidden_states.shape()[0]),
        hidden(c.problem.hidden_size),
        x(c.hidden_states.data(), c.hidden_states.bytes()),
        ids(c.routing.ids.data(), c.routing.ids.bytes()),
        weights(c.routing.weights.data(), c.routing.weights.bytes()),
        workspace(CudaExperts::workspace_size(c.problem, tokens).value()),
        out(tokens * hidden * 4),
        workspace_bytes(CudaExperts::workspace_size(c.problem, tokens).value()) {
    const auto source = make_stacked_source(c.weights.view());
    experts = std::move(CudaExperts::create(c.problem, *source, 0)).value();
  }
  CudaExpertsArgs args() const {
    CudaExpertsArgs a;
    a.tokens = tokens;
    a.rows = CudaRows::bf16(x.as());
    a.topk_ids = ids.as<std::int32_t>();
    a.topk_weights = weights.as<float>();
    a.result = CudaResult::sum(out.as(), DType::kF32);
    a.workspace = workspace.as();
    a.workspace_bytes = workspace_bytes;
    return a;
  }
  std::vector<std::uint32_t> run(const CudaExpertsArgs& a) {
    workspace.poison();
    out.poison();
    const Status status = experts->enqueue(nullptr, a);
    EXPECT_TRUE(status.ok()) << status.to_string();
    EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    return out.values<std::uint32_t>();
  }
};

TEST(CudaQuantizedRows, GiveTheBitsOfTheRowsTheyWereMadeOf) {
  REQUIRE_HOPPER();
  struct Case {
    std::int64_t tokens, top_k;
    bool weight_on_input, power_of_two;
  };
  for (const Case& c :
       {Case{1, 2, false, false}, Case{7, 3, false, false}, Case{90, 2, false, true},
        Case{33, 1, true, false}, Case{1500, 2, false, false}}) {
    SCOPED_TRACE(c.tokens);
    MoeProblem p = problem_of("fp8-block", c.top_k);
    p.apply_router_weight_on_input = c.weight_on_input;
    if (c.power_of_two) p.quant.activation.scale_format = ScaleFormat::kE8M0;
    RowsOnDevice d(test::make_case(91, p, c.tokens, DType::kBF16, c.top_k > 1 ? 0.2 : 0.0));
    const auto want = d.run(d.args());

    const std::int64_t stride = c.tokens + 5;  // as where other rows lie behind
    const DeviceBytes codes(c.tokens * p.hidden_size), scale(p.hidden_size / 128 * stride * 4);
    cuda::QuantRowsParams q;
    q.x = d.x.as<std::uint16_t>();
    q.weights = c.weight_on_input ? d.weights.as<float>() : nullptr;
    q.tokens = c.tokens;
    q.columns = p.hidden_size;
    q.power_of_two_scales = c.power_of_two;
    q.q = codes.as();
    q.scale = scale.as<float>();
    q.scale_stride = stride;
    ASSERT_EQ(cuda::launch_quant_rows(q, {}, nullptr), 0);
    CudaExpertsArgs a = d.args();
    a.rows = CudaRows::codes(codes.as(), scale.as<float>(), stride);
    EXPECT_EQ(d.run(a), want);
  }
}

// Two calls on the same hidden states, as of a shared expert and the routed ones: the second takes
// the rows that the first quantised, whichever kernel and routing either has.
TEST(CudaQuantizedRows, AreKeptForTheNextCall) {
  REQUIRE_HOPPER();
  for (const auto& [quant, tokens] :
       std::vector<std::pair<const char*, std::int64_t>>{{"fp8-block", 3},
                                                         {"fp8-block", 200},
                                                         {"fp8-block", 1500},
                                                         {"fp8-channel", 3},
                                                         {"fp8-channel", 200},
                                                         {"int8", 200},
                                                         {"mxfp8", 3},
                                                         {"mxfp4", 200},
                                                         {"mxfp4-fp8", 200},
                                                         {"int4-fp8", 200}}) {
    SCOPED_TRACE(testing::Message() << quant << ' ' << tokens);
    const MoeProblem p = problem_of(quant, 3);
    RowsOnDevice d(test::make_case(94, p, tokens, DType::kBF16, 0.2));
    ASSERT_TRUE(d.experts->same_rows(*d.experts));
    const auto want = d.run(d.args());
    const DeviceBytes slots(tokens * p.hidden_size * 2);
    CudaExpertsArgs one = d.args();
    one.top_k = one.used_experts = 1;
    one.result = CudaResult::slots(slots.as());
    d.run(one);
    d.x.poison();  // nobody reads it again
    CudaExpertsArgs a = d.args();
    a.rows = CudaRows::kept(d.x.as());
    ASSERT_TRUE(d.experts->enqueue(nullptr, a).ok());
    ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    EXPECT_EQ(d.out.values<std::uint32_t>(), want);
  }
}

// Rows with one scale: the codes and scales of the reference, byte for byte.
TEST(CudaQuantizedRows, WithOneScaleAreTheReferences) {
  REQUIRE_HOPPER();
  constexpr std::int64_t kTokens = 41, kColumns = 1296, kTopK = 2, kExperts = 3;
  test::Rng rng(95);
  Tensor x = test::random_normal(rng, DType::kBF16, {kTokens, kColumns});
  auto* const values = x.as<std::uint16_t>();
  const auto set_row = [&](std::int64_t row, auto value) {
    for (std::int64_t i = 0; i < kColumns; ++i) {
      values[row * kColumns + i] = bf16_from_f32(static_cast<float>(value(i)));
    }
  };
  set_row(1, [](std::int64_t) { return 0.0F; });
  set_row(2, [](std::int64_t i) { return i == 700 ? 1e30F : 1.0F; });
  set_row(3, [](std::int64_t i) { return 1e-37F * static_cast<float>(i % 9); });  // tiny scales
  set_row(4, [](std::int64_t i) { return 0.5F * static_cast<float>(i % 255 - 127); });  // ties
  set_row(5, [](std::int64_t i) { return i % 2 == 0 ? 1e-40F : -1e-40F; });
  std::vector<float> weights(kTokens);
  for (float& w : weights) w = static_cast<float>(rng.uniform());
  std::vector<std::int32_t> ids(kTokens * kTopK);
  for (std::size_t i = 0; i < ids.size(); ++i) ids[i] = static_cast<std::int32_t>(i % 4) - 1;
  const std::vector<float> fixed = {0.01F, 0.3F, 7.0F};
  const DeviceBytes on_x(x.data(), x.bytes()), on_weights(weights.data(), kTokens * 4);
  const DeviceBytes on_ids(ids.data(), kTokens * kTopK * 4), on_fixed(fixed.data(), kExperts * 4);
  struct Case {
    const char* quant;
    bool weighted, per_pair;
  };
  for (const Case& c : {Case{"fp8-channel", false, false}, Case{"fp8-channel", true, false},
                        Case{"int8", false, false}, Case{"int8", true, false},
                        Case{"fp8-static", false, false}, Case{"fp8-static", true, true}}) {
    SCOPED_TRACE(testing::Message() << c.quant << ' ' << c.weighted << ' ' << c.per_pair);
    const OperandQuant activation = test::scheme_called(c.quant).activation;
    const bool int8 = activation.dtype == DType::kI8;
    const bool is_static = activation.granularity == ScaleGranularity::kTensor;
    const std::int64_t rows = kTokens * (c.per_pair ? kTopK : 1);
    const DeviceBytes codes(rows * kColumns), scale(rows * 4);
    cuda::QuantRowsParams q;
    q.x = on_x.as<std::uint16_t>();
    q.weights = c.weighted ? on_weights.as<float>() : nullptr;
    q.tokens = kTokens;
    q.columns = kColumns;
    q.form = int8 ? cuda::RowForm::kInt8Row : cuda::RowForm::kFp8Row;
    q.q = codes.as();
    q.scale = scale.as<float>();
    if (is_static) q.static_scales.of = on_fixed.as<float>();
    if (c.per_pair) {
      q.static_scales.topk_ids = on_ids.as<std::int32_t>();
      q.static_scales.num_experts = q.static_scales.num_local_experts = kExperts;
      q.static_scales.top_k = kTopK;
    }
    ASSERT_EQ(cuda::launch_quant_rows(q, {}, nullptr), 0);
    ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    const auto got = codes.values<std::uint8_t>();
    const auto got_scale = scale.values<float>();
    std::vector<float> row(kColumns), scales(kColumns / 16 + 1);
    std::vector<std::uint8_t> scratch(kColumns);
    for (std::int64_t r = 0; r < rows; ++r) {
      const std::int64_t t = c.per_pair ? r / kTopK : r;
      const std::int32_t expert = c.per_pair ? ids[static_cast<std::size_t>(r)] : 0;
      if (expert < 0) continue;
      const float w = f32_from_bf16(bf16_from_f32(weights[static_cast<std::size_t>(t)]));
      for (std::int64_t i = 0; i < kColumns; ++i) {
        const float v = f32_from_bf16(values[t * kColumns + i]);
        row[static_cast<std::size_t>(i)] = c.weighted ? f32_from_bf16(bf16_from_f32(v * w)) : v;
      }
      const experts::RefOperand want =
          experts::ref_quantize_row(activation, fixed[static_cast<std::size_t>(expert)], row.data(),
                                    kColumns, scales.data(), scratch.data());
      if (!is_static) {
        ASSERT_EQ(got_scale[static_cast<std::size_t>(r)], want.scales[0]) << r;
      }
      for (std::int64_t i = 0; i < kColumns; ++i) {
        const std::uint8_t code = got[static_cast<std::size_t>(r * kColumns + i)];
        const float value =
            int8 ? static_cast<float>(static_cast<std::int8_t>(code)) : f32_from_e4m3(code);
        ASSERT_EQ(value, want.values[i]) << r << ' ' << i;
      }
    }
  }
}

// Rows in small groups: the values of the reference's codes, bit for bit, tokens and pairs.
TEST(CudaQuantizedRows, AsValuesAreTheReferences) {
  REQUIRE_HOPPER();
  constexpr std::int64_t kTokens = 43, kColumns = 1056, kTopK = 2, kExperts = 3;
  test::Rng rng(96);
  Tensor x = test::random_normal(rng, DType::kBF16, {kTokens, kColumns});
  auto* const values = x.as<std::uint16_t>();
  for (std::int64_t i = 0; i < kColumns; ++i) {
    const auto set = [&](std::int64_t row, double v) {
      values[row * kColumns + i] = bf16_from_f32(static_cast<float>(v));
    };
    set(1, 0.0);
    set(2, i % 61 == 0 ? 1e30 : 1.0);
    set(3, 1e-37 * static_cast<double>(i % 9));
    set(4, 0.25 * static_cast<double>(i % 65 - 32));  // ties
    set(5, std::ldexp(1.75, static_cast<int>(i / 16 % 40) - 20));
  }
  std::vector<float> weights(kTokens);
  for (float& w : weights) w = static_cast<float>(rng.uniform());
  std::vector<std::int32_t> ids(kTokens * kTopK);
  for (std::size_t i = 0; i < ids.size(); ++i) ids[i] = static_cast<std::int32_t>(i % 4) - 1;
  const std::vector<float> fixed = {0.001F, 0.03F, 0.7F};
  const DeviceBytes on_x(x.data(), x.bytes()), on_weights(weights.data(), kTokens * 4);
  const DeviceBytes on_ids(ids.data(), kTokens * kTopK * 4), on_fixed(fixed.data(), kExperts * 4);
  struct Case {
    const char* quant;
    cuda::RowForm form;
    bool weighted, per_pair;
  };
  for (const Case& c : {Case{"mxfp8", cuda::RowForm::kMx8Values, false, false},
                        Case{"mxfp4", cuda::RowForm::kMx4Values, true, false},
                        Case{"mxfp4-fp8", cuda::RowForm::kFp8Values, false, false},
                        Case{"nvfp4", cuda::RowForm::kNv4Values, true, false},
                        Case{"nvfp4", cuda::RowForm::kNv4Values, false, true}}) {
    SCOPED_TRACE(testing::Message() << c.quant << ' ' << c.weighted << ' ' << c.per_pair);
    const OperandQuant activation = test::scheme_called(c.quant).activation;
    const std::int64_t rows = kTokens * (c.per_pair ? kTopK : 1);
    const DeviceBytes made(rows * kColumns * 2);
    cuda::QuantRowsParams q;
    q.x = on_x.as<std::uint16_t>();
    q.weights = c.weighted ? on_weights.as<float>() : nullptr;
    q.tokens = kTokens;
    q.columns = kColumns;
    q.form = c.form;
    q.q = made.as();
    if (c.form == cuda::RowForm::kNv4Values) q.static_scales.of = on_fixed.as<float>();
    if (c.per_pair) {
      q.static_scales.topk_ids = on_ids.as<std::int32_t>();
      q.static_scales.num_experts = q.static_scales.num_local_experts = kExperts;
      q.static_scales.top_k = kTopK;
    }
    ASSERT_EQ(cuda::launch_quant_rows(q, {}, nullptr), 0);
    ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    const auto got = made.values<std::uint16_t>();
    std::vector<float> row(kColumns), scales(kColumns / 16 + 1);
    std::vector<std::uint8_t> scratch(kColumns);
    for (std::int64_t r = 0; r < rows; ++r) {
      const std::int64_t t = c.per_pair ? r / kTopK : r;
      const std::int32_t expert = c.per_pair ? ids[static_cast<std::size_t>(r)] : 0;
      if (expert < 0) continue;
      const float w = f32_from_bf16(bf16_from_f32(weights[static_cast<std::size_t>(t)]));
      for (std::int64_t i = 0; i < kColumns; ++i) {
        const float v = f32_from_bf16(values[t * kColumns + i]);
        row[static_cast<std::size_t>(i)] = c.weighted ? f32_from_bf16(bf16_from_f32(v * w)) : v;
      }
      const experts::RefOperand want =
          experts::ref_quantize_row(activation, fixed[static_cast<std::size_t>(expert)], row.data(),
                                    kColumns, scales.data(), scratch.data());
      for (std::int64_t i = 0; i < kColumns; ++i) {
        ASSERT_EQ(f32_from_bf16(got[static_cast<std::size_t>(r * kColumns + i)]),
                  f32_from_bf16(bf16_from_f32(want.values[i] * want.scales[i / want.group])))
            << r << ' ' << i;
      }
    }
  }
}

TEST(CudaSlotRows, AddUpToTheOutputByBits) {
  REQUIRE_HOPPER();
  for (const char* quant : {"bf16", "fp8-block", "fp8-channel", "fp8-static", "int8", "mxfp8",
                            "mxfp4", "mxfp4-fp8", "nvfp4", "int4-fp8"}) {
    for (const std::int64_t tokens : {2, 40, 700}) {
      SCOPED_TRACE(quant);
      const MoeProblem p = problem_of(quant, 3);
      const StandardCase c = test::make_case(92, p, tokens, DType::kBF16, 0.2);
      RowsOnDevice d(c);
      const auto want = d.run(d.args());
      const DeviceBytes slots(tokens * 3 * p.hidden_size * 2);
      CudaExpertsArgs a = d.args();
      a.result = CudaResult::slots(slots.as());
      d.run(a);
      // A slot without an expert is left alone.
      const auto rows = slots.values<std::uint16_t>();
      for (std::int64_t s = 0; s < tokens * 3; ++s) {
        const bool dead = c.routing.ids.as<std::int32_t>()[s] < 0;
        ASSERT_EQ(rows[static_cast<std::size_t>(s * p.hidden_size)] == 0xFFFF, dead) << s;
      }
      cuda::CombineParams sum;
      sum.y2 = slots.as<std::uint16_t>();
      sum.row_of_pair = d.ids.as<std::int32_t>();
      sum.tokens = tokens;
      sum.top_k = 3;
      sum.hidden = static_cast<std::int32_t>(p.hidden_size);
      sum.output_f32 = true;
      sum.output = d.out.as();
      d.out.poison();
      ASSERT_EQ(cuda::launch_combine(sum, nullptr), 0);
      EXPECT_EQ(d.out.values<std::uint32_t>(), want);
    }
  }
}

TEST(CudaRowsRefusals, Arguments) {
  REQUIRE_HOPPER();
  const RowsOnDevice d(test::make_case(93, problem_of("fp8-block", 2), 4, DType::kBF16));
  const RowsOnDevice plain(test::make_case(93, problem_of("bf16", 2), 4, DType::kBF16));
  const DeviceBytes scale(3 * 4 * 4);
  CudaExpertsArgs a = plain.args();
  a.rows = CudaRows::codes(plain.x.as(), scale.as<float>(), 4);
  expect_refusal(plain.experts->enqueue(nullptr, a), StatusCode::kUnsupported,
                 {"hidden_scale", "fp8-block"});
  a = d.args();
  a.rows = CudaRows::codes(d.x.as(), scale.as<float>(), 3);
  expect_refusal(d.experts->enqueue(nullptr, a), StatusCode::kInvalidLayout,
                 {"hidden_scale stride: got 3, need at least 4"});
  a = plain.args();
  a.rows = CudaRows::kept(plain.x.as());
  expect_refusal(plain.experts->enqueue(nullptr, a), StatusCode::kUnsupported,
                 {"rows: got kept ones", "fp8-block"});
  EXPECT_FALSE(plain.experts->same_rows(*d.experts));
  a = d.args();
  a.result = CudaResult::slots(nullptr);
  expect_refusal(d.experts->enqueue(nullptr, a), StatusCode::kInvalidArgument,
                 {"slot_rows: got null"});
}

}  // namespace
}  // namespace moesaic
