// The tier state machine for devices that this machine does not have.
#include <gtest/gtest.h>

#include <string>

#include "moesaic/interop/routing.h"

namespace moesaic {
namespace {

constexpr GateDevice kCpu = GateDevice::cpu();
constexpr GateDevice kSm90 = GateDevice::cuda(9, 0);
constexpr GateDevice kSm100 = GateDevice::cuda(10, 0);
constexpr GateDevice kSm120 = GateDevice::cuda(12, 0);
using enum DType;

// DeepSeek-V3's gate unless a test changes something.
GateTierRules::Problem problem(GateDevice device, DType weight = kBF16, std::int64_t e = 256,
                               std::int64_t h = 7168) {
  GateTierRules::Problem p;
  p.device = device;
  p.weight_dtype = weight;
  p.num_experts = e;
  p.hidden_size = h;
  return p;
}

TEST(GateTierRules, DeviceDecides) {
  struct Row {
    GateDevice device;
    bool ok;
  };
  for (const Row& row :
       {Row{kCpu, false}, Row{kSm90, true}, Row{kSm100, true}, Row{GateDevice::cuda(10, 3), true},
        Row{kSm120, false}, Row{GateDevice::cuda(12, 1), false}, Row{GateDevice::cuda(8, 0), false},
        Row{GateDevice::cuda(8, 9), false}, Row{GateDevice::cuda(9, 1), false},
        Row{GateDevice::cuda(11, 0), false}}) {
    SCOPED_TRACE(std::to_string(row.device.sm_major) + "." + std::to_string(row.device.sm_minor));
    auto p = problem(row.device);
    p.out_dtype = kF32;
    const GateTierRules rules(p);
    EXPECT_EQ(rules.sm_ok(), row.ok);
    EXPECT_EQ(rules.special(), row.ok);
    EXPECT_EQ(rules.allow_dsv3(), row.ok);
    EXPECT_EQ(rules.allow_cublas(), row.ok);
    EXPECT_FALSE(rules.allow_fp32());
    EXPECT_EQ(rules.tier(1, kBF16), row.ok ? GateTier::kSmallBatch : GateTier::kFallback);
    EXPECT_EQ(rules.tier(17, kBF16), row.ok ? GateTier::kWideningGemm : GateTier::kFallback);
  }
}

TEST(GateTierRules, BiasTurnsEverythingSpecialOff) {
  for (const GateDevice device : {kSm90, kSm100}) {
    for (const DType weight : {kBF16, kF32}) {
      auto p = problem(device, weight, 256, 3072);
      p.has_bias = true;
      p.out_dtype = kF32;
      const GateTierRules rules(p);
      EXPECT_TRUE(rules.sm_ok());
      EXPECT_FALSE(rules.special());
      EXPECT_FALSE(rules.allow_fp32());
      EXPECT_FALSE(rules.allow_cublas());
    }
  }
}

TEST(GateTierRules, ForcedFp32AppliesOnlyWithoutSpecialTiers) {
  for (const GateDevice device : {kCpu, kSm90, kSm100, kSm120}) {
    for (const bool bias : {false, true}) {
      for (const DType weight : {kF32, kBF16, kF16}) {
        auto p = problem(device, weight);
        p.force_fp32_compute = true;
        p.has_bias = bias;
        const bool special = !bias && (device == kSm90 || device == kSm100);
        EXPECT_EQ(GateTierRules(p).compute_dtype(), special ? weight : kF32);
        p.force_fp32_compute = false;
        EXPECT_EQ(GateTierRules(p).compute_dtype(), weight);
      }
    }
  }
}

TEST(GateTierRules, SmallBatchShapes) {
  for (const std::int64_t e : {128, 256, 384, 512}) {
    for (const std::int64_t h : {3072, 7168}) {
      const GateTierRules rules(problem(kSm90, kBF16, e, h));
      EXPECT_EQ(rules.allow_dsv3(), (e == 256 || e == 384) && h == 7168) << e << " " << h;
    }
  }
}

TEST(GateTierRules, SmallBatchLooksAtTokensAndDTypesAtEveryCall) {
  auto p = problem(kSm90);
  p.out_dtype = kF32;
  const GateTierRules rules(p);
  EXPECT_EQ(rules.tier(0, kBF16), GateTier::kSmallBatch);
  EXPECT_EQ(rules.tier(16, kBF16), GateTier::kSmallBatch);
  EXPECT_EQ(rules.tier(17, kBF16), GateTier::kWideningGemm);
  EXPECT_EQ(rules.tier(16, kF32), GateTier::kFallback);
  EXPECT_EQ(rules.tier(16, kF16), GateTier::kFallback);
  // allow_dsv3 does not depend on dtypes, the tier does: an fp32 weight falls through.
  const GateTierRules fp32(problem(kSm90, kF32));
  EXPECT_TRUE(fp32.allow_dsv3());
  EXPECT_EQ(fp32.tier(1, kBF16), GateTier::kFallback);
  // The kernel writes bf16 or fp32 only.
  p.out_dtype = kF16;
  EXPECT_EQ(GateTierRules(p).tier(1, kBF16), GateTier::kFallback);
  p.out_dtype = kBF16;
  EXPECT_EQ(GateTierRules(p).tier(1, kBF16), GateTier::kSmallBatch);
  EXPECT_EQ(GateTierRules(p).tier(17, kBF16), GateTier::kFallback);  // tier 3 needs out F32
}

TEST(GateTierRules, Fp32TierShapesAndInputs) {
  for (const auto& [h, e, allowed] :
       {std::tuple{3072, 256, true}, std::tuple{6144, 128, true}, std::tuple{3072, 128, false},
        std::tuple{6144, 256, false}, std::tuple{7168, 256, false}}) {
    EXPECT_EQ(GateTierRules(problem(kSm90, kF32, e, h)).allow_fp32(), allowed) << h << " " << e;
    EXPECT_FALSE(GateTierRules(problem(kSm90, kBF16, e, h)).allow_fp32());
    EXPECT_FALSE(GateTierRules(problem(kCpu, kF32, e, h)).allow_fp32());
    EXPECT_FALSE(GateTierRules(problem(kSm120, kF32, e, h)).allow_fp32());
  }
  auto p = problem(kSm100, kF32, 256, 3072);
  p.out_dtype = kBF16;  // ignored by this tier
  const GateTierRules rules(p);
  for (const std::int64_t m : {1, 32, 33, 5000}) {
    EXPECT_EQ(rules.tier(m, kF32), GateTier::kFp32);
    EXPECT_EQ(rules.tier(m, kBF16), GateTier::kFp32);
    EXPECT_EQ(rules.tier(m, kF16), GateTier::kFallback);
    EXPECT_EQ(rules.output_dtype(m, kBF16).value(), kF32);
    EXPECT_EQ(rules.output_dtype(m, kF16).value(), kBF16);
  }
}

TEST(GateTierRules, WideningGemmNeedsBf16WeightsAndFp32Output) {
  for (const DType weight : {kF32, kBF16, kF16}) {
    for (const std::optional<DType> out :
         {std::optional<DType>{}, std::optional{kF32}, std::optional{kBF16}, std::optional{kF16}}) {
      auto p = problem(kSm90, weight, 64, 2048);
      p.out_dtype = out;
      EXPECT_EQ(GateTierRules(p).allow_cublas(), weight == kBF16 && out == kF32);
    }
  }
}

// Every cell of the output dtype column.
TEST(GateTierRules, OutputDTypes) {
  auto p = problem(kSm90);
  EXPECT_EQ(GateTierRules(p).output_dtype(4, kBF16).value(), kBF16);  // tier 1, unset
  p.out_dtype = kF32;
  EXPECT_EQ(GateTierRules(p).output_dtype(4, kBF16).value(), kF32);   // tier 1
  EXPECT_EQ(GateTierRules(p).output_dtype(40, kBF16).value(), kF32);  // tier 3
  EXPECT_EQ(GateTierRules(p).output_dtype(40, kF32).value(), kF32);   // tier 4, x is cast
  for (const DType weight : {kF32, kBF16, kF16}) {
    for (const DType x : {kF32, kBF16, kF16}) {
      auto cpu = problem(kCpu, weight);
      const auto unset = GateTierRules(cpu).output_dtype(4, x);
      EXPECT_EQ(unset.ok(), x == weight);
      if (unset.ok()) {
        EXPECT_EQ(unset.value(), weight);
      } else {
        EXPECT_EQ(unset.status().code(), StatusCode::kInvalidDType);
        EXPECT_NE(unset.status().message().find("no implicit cast"), std::string::npos);
      }
      for (const DType out : {kF32, kBF16, kF16}) {
        cpu.out_dtype = out;
        EXPECT_EQ(GateTierRules(cpu).output_dtype(4, x).value(), out);
      }
    }
  }
  const auto integer = GateTierRules(p).output_dtype(4, DType::kI32);
  ASSERT_FALSE(integer.ok());
  EXPECT_EQ(integer.status().code(), StatusCode::kInvalidDType);
}

TEST(GateTierRules, SetOutDTypeIsOneShot) {
  GateTierRules rules(problem(kSm90));
  EXPECT_FALSE(rules.allow_cublas());
  EXPECT_FALSE(rules.out_dtype().has_value());
  EXPECT_EQ(rules.set_out_dtype(DType::kI8).code(), StatusCode::kInvalidDType);
  EXPECT_FALSE(rules.out_dtype().has_value()) << "a refused dtype must not be stored";
  ASSERT_TRUE(rules.set_out_dtype(kF32).ok());
  EXPECT_TRUE(rules.allow_cublas()) << "fp32 output opens tier 3 for bf16 weights";
  EXPECT_EQ(rules.out_dtype(), kF32);
  for (const DType again : {kF32, kBF16}) {
    const Status s = rules.set_out_dtype(again);
    EXPECT_EQ(s.code(), StatusCode::kInvalidArgument);
    EXPECT_NE(s.message().find("already set"), std::string::npos) << s.message();
  }
  EXPECT_EQ(rules.out_dtype(), kF32);

  auto constructed = problem(kSm90);
  constructed.out_dtype = kBF16;
  GateTierRules from_constructor(constructed);
  EXPECT_EQ(from_constructor.set_out_dtype(kBF16).code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(from_constructor.set_out_dtype(kF32).code(), StatusCode::kInvalidArgument);
  EXPECT_FALSE(from_constructor.allow_cublas());
}

TEST(GateTierRules, SetOutDTypeRecomputesTierThreeOnly) {
  for (const GateDevice device : {kCpu, kSm90, kSm100, kSm120}) {
    for (const DType weight : {kF32, kBF16, kF16}) {
      for (const DType out : {kF32, kBF16, kF16}) {
        GateTierRules rules(problem(device, weight, 256, 3072));
        const bool dsv3 = rules.allow_dsv3(), fp32 = rules.allow_fp32();
        ASSERT_TRUE(rules.set_out_dtype(out).ok());
        EXPECT_EQ(rules.allow_dsv3(), dsv3);
        EXPECT_EQ(rules.allow_fp32(), fp32);
        EXPECT_EQ(rules.allow_cublas(),
                  (device == kSm90 || device == kSm100) && weight == kBF16 && out == kF32);
      }
    }
  }
}

TEST(GateTiers, Names) {
  EXPECT_EQ(gate_tier_name(GateTier::kSmallBatch), "small_batch");
  EXPECT_EQ(gate_tier_name(GateTier::kFp32), "fp32");
  EXPECT_EQ(gate_tier_name(GateTier::kWideningGemm), "widening_gemm");
  EXPECT_EQ(gate_tier_name(GateTier::kFallback), "fallback");
}

}  // namespace
}  // namespace moesaic
