// Choosing a tier by name, and independence of the caller's floating-point mode.
#include "cpu/tiers.h"

#include <gtest/gtest.h>

#include <cerrno>
#include <cstdint>
#include <cstdlib>
#include <fstream>
#include <set>
#include <string>
#include <string_view>

#include "cpu/amx_permission.h"

#if defined(__x86_64__)
#include <cpuid.h>
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

// By the compiler's own questions.
bool processor_has(std::string_view tier) {
#if defined(__x86_64__)
  const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512bw");
  const bool bf16 = avx512 && __builtin_cpu_supports("avx512bf16") &&
                    __builtin_cpu_supports("avx512vbmi") && __builtin_cpu_supports("avx512vnni");
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  constexpr unsigned kTiles = 1U << 22 | 1U << 24 | 1U << 25;
  if (tier == "amx") {
    return bf16 && __get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) != 0 && (edx & kTiles) == kTiles;
  }
  if (tier == "avx512_bf16") return bf16;
  if (tier == "avx512") return avx512;
  if (tier == "avx2") return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
#endif
  return tier == "baseline" || tier == "neon";
}

// Every name is known everywhere; which tiers are in the build is a matter of its processors.
TEST(Tiers, TheBuildHasThoseOfItsArchitecture) {
#if defined(__x86_64__)
  const std::set<std::string_view> own = {"amx", "avx512_bf16", "avx512", "avx2", "baseline"};
#elif defined(__aarch64__)
  const std::set<std::string_view> own = {"neon", "baseline"};
#else
  const std::set<std::string_view> own = {"baseline"};
#endif
  std::set<std::string_view> found;
  for (const TierInfo& t : cpu_tiers()) {
    // A build for this machine's processor lacks what it cannot run.
    if (t.kernels != nullptr ||
        (MOESAIC_ONLY_TIERS_OF_HOST && own.contains(t.name) && !processor_has(t.name))) {
      found.insert(t.name);
    }
    if (t.kernels != nullptr) continue;
    const Status refusal = kernels_by_name(t.name).status();
    EXPECT_EQ(refusal.code(), StatusCode::kUnsupported) << t.name;
    EXPECT_NE(refusal.message().find("not in this build"), std::string::npos) << t.name;
  }
  EXPECT_EQ(found, own);
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

// Whatever machine the test runs on.
TEST(Tiers, TileRegistersNeedProcessorSystemAndPermission) {
  EXPECT_EQ(amx_refusal({true, true, 0}), "");
  std::set<std::string_view> reasons;
  for (const AmxMachine& m :
       {AmxMachine{}, AmxMachine{true, false, 0}, AmxMachine{true, true, EINVAL},
        AmxMachine{true, true, EPERM}, AmxMachine{true, true, ENOSPC}}) {
    EXPECT_FALSE(amx_refusal(m).empty());
    reasons.insert(amx_refusal(m));
  }
  EXPECT_EQ(reasons.size(), 5U);
  EXPECT_EQ(amx_refusal({true, true, EOPNOTSUPP}), amx_refusal({true, true, EINVAL}));
}

TEST(Tiers, ThreadsDefaultToTheCoresOfThisProcess) {
  EXPECT_EQ(resolve_threads(3), 3);
  EXPECT_GE(resolve_threads(0), 1);
}

#if defined(__x86_64__)
constexpr unsigned kFlush = 0x8040U;  // flush to zero, denormals are zero
unsigned float_mode() { return _mm_getcsr(); }
void set_float_mode(unsigned mode) { _mm_setcsr(mode); }
#define MOESAIC_HAS_FLOAT_MODE 1
#elif defined(__aarch64__)
constexpr unsigned kFlush = 1U << 24;  // FPCR.FZ
unsigned float_mode() {
  std::uint64_t mode;
  __asm__ volatile("mrs %0, fpcr" : "=r"(mode));
  return static_cast<unsigned>(mode);
}
void set_float_mode(unsigned mode) {
  __asm__ volatile("msr fpcr, %0" : : "r"(std::uint64_t{mode}) : "memory");
}
#define MOESAIC_HAS_FLOAT_MODE 1
#endif

#if defined(MOESAIC_HAS_FLOAT_MODE)
TEST(Tiers, TheCallersFloatingPointModeIsSetAsideAndRestored) {
  const unsigned before = float_mode();
  set_float_mode(before | kFlush);
  volatile float least = 0x1p-126F, half = 0.5F;  // of which a product is subnormal
  volatile float product = least * half;
  const bool flushes = product == 0.0F;
  {
    const ScopedIeeeMode ieee;
    product = least * half;
  }
  const unsigned after = float_mode();
  set_float_mode(before);
  EXPECT_TRUE(flushes);
  EXPECT_GT(product, 0.0F);
  EXPECT_EQ(after & kFlush, kFlush);
}
#endif

}  // namespace
}  // namespace moesaic::cpu
