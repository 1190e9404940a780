// What the GPU experts stage refuses, and the words. What needs a device is skipped, visibly, without
// one.
#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <memory>
#include <string>

#include "case_on_device.h"
#include "support/refusal.h"

namespace moesaic {
namespace {

using cuda::CudaExperts;
using cuda::CudaExpertsArgs;
using test::create_on_device;
using test::DeviceBytes;
using test::OnDevice;
using test::problem_of;
using test::StandardCase;

TEST(CudaExpertsRefusals, ProblemsOutsideTheBackend) {
  const auto text = [](const MoeProblem& p) { return CudaExperts::can_implement(p).to_string(); };
  // An odd intermediate size is padded when the experts are loaded.
  EXPECT_EQ(text(problem_of("bf16", "silu", 64, 61, 6, 2)), Status().to_string());
  EXPECT_EQ(CudaExperts::workspace_size(problem_of("bf16", "silu", 64, 61, 6, 2), 5).value(),
            CudaExperts::workspace_size(problem_of("bf16", "silu", 64, 64, 6, 2), 5).value());
  EXPECT_NE(text(test::small_problem("f32")).find("unsupported: scheme: got f32"),
            std::string::npos);
  MoeProblem p = problem_of("bf16", "silu", 100, 64, 6, 2);
  EXPECT_NE(text(p).find("hidden_size: got 100, need a multiple of 8"), std::string::npos);
  p = problem_of("fp8-channel", "silu", 128, 72, 6, 2);
  EXPECT_NE(text(p).find("intermediate_size: got 72, need a multiple of 16"), std::string::npos);
  p = problem_of("int4-fp8-g32", "silu", 128, 64, 6, 2);
  EXPECT_NE(text(p).find("groups of int4-fp8 weights: got 32 columns, need a multiple of 128"),
            std::string::npos);
  p = problem_of("mxfp4-token", "silu", 128, 64, 6, 2);
  EXPECT_NE(text(p).find("activation of mxfp4-fp8: got F8_E4M3, one scale per token"),
            std::string::npos);
  p = problem_of("int8", "silu", 131072, 64, 6, 2);
  EXPECT_NE(text(p).find("hidden_size: got 131072, need at most 131071"), std::string::npos);
  p = problem_of("bf16", "silu", 64, 64, 2048, 2);
  EXPECT_NE(text(p).find("num_local_experts: got 2048, need at most 1024"), std::string::npos);
  EXPECT_EQ(
      CudaExperts::workspace_size(problem_of("bf16", "silu", 64, 64, 6, 2), -1).status().code(),
      StatusCode::kInvalidArgument);
}

TEST(CudaExpertsRefusals, WorkspaceOfTheLargestLayerFits) {
  MoeProblem p = problem_of("fp8-block", "silu", 7168, 2048, 256, 8);
  p.max_tokens = 8192;
  const std::int64_t bytes = CudaExperts::workspace_size(p, 8192).value();
  EXPECT_LT(bytes, 1'200'000'000);
  EXPECT_GT(bytes, 65536LL * 7168 * 2);
  EXPECT_LE(CudaExperts::workspace_size(p, 8191).value(), bytes);
}

// Rows are gathered by offsets of 32 bits, each of 16 bytes.
TEST(CudaExpertsRefusals, RowsBehind64GiB) {
  const auto status_of = [](const MoeProblem& p, std::int64_t tokens) {
    return CudaExperts::workspace_size(p, tokens).status();
  };
  const MoeProblem wide = problem_of("bf16", "silu", 64, 1 << 20, 2, 2);
  EXPECT_TRUE(status_of(wide, 1 << 14).ok()) << status_of(wide, 1 << 14).to_string();
  test::expect_refusal(status_of(wide, (1 << 14) + 1), StatusCode::kUnsupported,
                       {"max_tokens: got 32770 rows of the intermediate of 2097152 bytes each",
                        "need at most 2^36 bytes"});
  const MoeProblem high = problem_of("bf16", "silu", 1 << 20, 64, 2, 2);
  EXPECT_TRUE(status_of(high, 1 << 15).ok()) << status_of(high, 1 << 15).to_string();
  test::expect_refusal(status_of(high, (1 << 15) + 1), StatusCode::kUnsupported,
                       {"max_tokens: got 32769 rows of hidden states of 2097152 bytes each"});
}

TEST(CudaExpertsRefusals, WithoutASuitableDevice) {
  if (query_cuda().available) GTEST_SKIP() << "there is one";
  const StandardCase c =
      test::make_case(1, problem_of("bf16", "silu", 64, 64, 6, 2), 1, DType::kBF16);
  const auto source = make_stacked_source(c.weights.view());
  EXPECT_EQ(CudaExperts::create(c.problem, *source, 0).status().code(), StatusCode::kDevice);
}

TEST(CudaExpertsRefusals, Arguments) {
  REQUIRE_HOPPER();
  const StandardCase c =
      test::make_case(81, problem_of("bf16", "silu", 64, 64, 6, 2), 8, DType::kBF16);
  const OnDevice d(c, create_on_device(c));
  const DeviceBytes out(8 * 64 * 4);
  const auto refused = [&](auto change, StatusCode code, const char* words) {
    CudaExpertsArgs a = d.args(out.as(), DType::kF32);
    change(a);
    const Status status = d.experts->enqueue(nullptr, a);
    EXPECT_EQ(status.code(), code) << status.to_string();
    EXPECT_NE(status.message().find(words), std::string::npos) << status.to_string();
    EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  };
  refused([](auto& a) { a.tokens = 9; }, StatusCode::kLimitExceeded,
          "tokens: got 9, planned for 0 .. 8");
  refused([](auto& a) { a.tokens = -1; }, StatusCode::kInvalidArgument, "tokens: got -1");
  refused([](auto& a) { a.result.dtype = DType::kF16; }, StatusCode::kInvalidDType, "output");
  refused([](auto& a) { a.result.data = nullptr; }, StatusCode::kInvalidArgument,
          "output: got null");
  refused([](auto& a) { a.rows.data = static_cast<const char*>(a.rows.data) + 2; },
          StatusCode::kInvalidLayout, "hidden_states");
  refused([](auto& a) { a.workspace_bytes -= 1; }, StatusCode::kWorkspaceTooSmall, "workspace");
  refused([](auto& a) { a.workspace = static_cast<char*>(a.workspace) + 64; },
          StatusCode::kInvalidLayout, "workspace");
  CudaExpertsArgs none;
  EXPECT_TRUE(d.experts->enqueue(nullptr, none).ok()) << "no tokens: nothing to do";
  std::unique_ptr<ExpertSource> source = make_stacked_source(c.weights.view());
  EXPECT_EQ(CudaExperts::create(c.problem, *source, 1000).status().code(), StatusCode::kDevice);
}

TEST(CudaExpertsRefusals, NegativeScalesOfInt4Fp8) {
  REQUIRE_HOPPER();
  StandardCase c =
      test::make_case(82, problem_of("int4-fp8", "silu", 128, 128, 6, 2), 1, DType::kBF16);
  const auto source = make_stacked_source(c.weights.view());
  EXPECT_TRUE(CudaExperts::create(c.problem, *source, 0).ok());
  c.weights.w2_scale.as<std::uint8_t>()[5] = 0x80;  // -0
  EXPECT_TRUE(CudaExperts::create(c.problem, *source, 0).ok());
  c.weights.w2_scale.as<std::uint8_t>()[5] = 0xB8;
  const Status status = CudaExperts::create(c.problem, *source, 0).status();
  EXPECT_EQ(status.code(), StatusCode::kUnsupported);
  EXPECT_NE(status.message().find("w2_scale: got -1 in row 5, need none that is negative on a GPU"),
            std::string::npos)
      << status.to_string();
}

}  // namespace
}  // namespace moesaic
