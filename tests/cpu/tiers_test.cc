// Choosing a tier by name, and independence of the caller's floating-point mode.
#include "cpu/tiers.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <fstream>
#include <string>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace moesaic::cpu {
namespace {

TEST(Tiers, BaselineIsAlwaysThereAndLast) {
  ASSERT_FALSE(cpu_tiers().empty());
  EXPECT_EQ(cpu_tiers().back().name, "baseline");
  EXPECT_TRUE(cpu_tiers().back().available);
  for (const TierInfo& t : cpu_tiers()) {
    EXPECT_EQ(t.available, t.reason.empty()) << t.name;
    const auto kernels = kernels_by_name(t.name);
    EXPECT_EQ(kernels.ok(), t.available) << t.name;
    if (kernels.ok()) {
      EXPECT_EQ((*kernels)->name, t.name);
    }
  }
}

TEST(Tiers, AnUnknownNameListsWhatThereIs) {
  const auto kernels = kernels_by_name("avx1024");
  ASSERT_FALSE(kernels.ok());
  EXPECT_EQ(kernels.status().code(), StatusCode::kNotFound);
  EXPECT_NE(kernels.status().message().find("avx1024"), std::string::npos);
  EXPECT_NE(kernels.status().message().find("baseline"), std::string::npos);
}

TEST(Tiers, TheEnvironmentForcesATier) {
  ASSERT_EQ(setenv("MOESAIC_CPU_TIER", "baseline", 1), 0);
  const auto forced = current_kernels();
  ASSERT_TRUE(forced.ok());
  EXPECT_STREQ((*forced)->name, "baseline");
  ASSERT_EQ(setenv("MOESAIC_CPU_TIER", "nonsense", 1), 0);
  EXPECT_EQ(current_kernels().status().code(), StatusCode::kNotFound);
  ASSERT_EQ(unsetenv("MOESAIC_CPU_TIER"), 0);
  EXPECT_TRUE(current_kernels().ok());
}

// What the kernel says the processor has, which the tier asks of the processor itself.
TEST(Tiers, TileRegistersAreUsedOnlyWhereTheyAre) {
  std::ifstream cpuinfo("/proc/cpuinfo");
  std::string flags;
  while (std::getline(cpuinfo, flags) && !flags.starts_with("flags")) {
  }
  if (flags.empty()) GTEST_SKIP() << "no flags in /proc/cpuinfo";
  flags += ' ';
  bool all = true;
  for (const char* flag : {" amx_tile ", " amx_bf16 ", " amx_int8 "})
    all = all && flags.find(flag) != std::string::npos;
  for (const TierInfo& t : cpu_tiers()) {
    if (t.name != "amx" || all) continue;
    EXPECT_FALSE(t.available);
    EXPECT_FALSE(t.reason.empty());
  }
  EXPECT_TRUE(kernels_by_name("amx").ok() ||
              kernels_by_name("amx").status().code() == StatusCode::kUnsupported);
}

TEST(Tiers, ThreadsDefaultToTheCoresOfThisProcess) {
  EXPECT_EQ(resolve_threads(3), 3);
  EXPECT_GE(resolve_threads(0), 1);
}

#if defined(__x86_64__)
TEST(Tiers, TheCallersFloatingPointModeIsSetAsideAndRestored) {
  const unsigned before = _mm_getcsr();
  _mm_setcsr(before | 0x8040U);  // flush to zero, denormals are zero
  {
    const ScopedIeeeMode ieee;
    volatile float tiny = 1e-39F;
    EXPECT_GT(tiny * 1.0F, 0.0F);
  }
  EXPECT_EQ(_mm_getcsr() & 0x8040U, 0x8040U);
  _mm_setcsr(before);
}
#endif

}  // namespace
}  // namespace moesaic::cpu
