#include "cpu/tiers.h"

#include <omp.h>

#include <cstdlib>
#include <string>

#include "core/fault.h"
#include "cpu/amx_permission.h"
#include "hwy/targets.h"

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#endif
#if defined(__linux__)
#include <sched.h>
#endif
#if defined(__linux__) && defined(__aarch64__)
#include <sys/auxv.h>
#endif

namespace moesaic::cpu {
namespace {

// Empty: none. The only place that reads the variable.
std::string_view forced_tier() {
  const char* name = std::getenv("MOESAIC_CPU_TIER");
  const bool unset = name == nullptr || MOESAIC_FAULT(cpu_forced_tier_ignored);
  return unset ? std::string_view() : std::string_view(name);
}

bool machine_has(std::int64_t hwy_target) { return (hwy::SupportedTargets() & hwy_target) != 0; }

bool machine_has_bf16() {
#if defined(__x86_64__)
  return __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vbmi") &&
         __builtin_cpu_supports("avx512vnni");
#else
  return false;
#endif
}

// The 8-bit dot product of 256-bit registers. (Not every compiler's __builtin_cpu_supports knows
// it.)
bool machine_has_avx_vnni() {
#if defined(__x86_64__)
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  return __get_cpuid_count(7, 1, &eax, &ebx, &ecx, &edx) != 0 && (eax & 1U << 4) != 0;
#else
  return false;
#endif
}
bool machine_has_avx512_vnni() {
#if defined(__x86_64__)
  return __builtin_cpu_supports("avx512vnni");
#else
  return false;
#endif
}

bool machine_has_i8mm() {
#if defined(__linux__) && defined(__aarch64__)
  return (getauxval(AT_HWCAP2) & HWCAP2_I8MM) != 0;
#else
  return false;
#endif
}

// A tier's table, or `own`: that with the integer kernels of `others`, because the machine lacks the
// tier's instruction for them.
const CpuKernels* with_integers_if(bool machine_ok, const CpuKernels* kernels,
                                   const CpuKernels& others, CpuKernels& own) {
  if (kernels == nullptr || machine_ok) return kernels;
  own = *kernels;
  own.grouped_gemm_i8 = others.grouped_gemm_i8;
  own.super_gemm_i8 = others.super_gemm_i8;
  own.store_i8 = others.store_i8;
  own.multiply_add_loop_i8 = others.multiply_add_loop_i8;
  return &own;
}

TierInfo tier(std::string_view name, const CpuKernels* kernels, bool machine_ok,
              std::string_view reason) {
  if (kernels == nullptr) return {name, false, "not in this build", nullptr};
  if (!machine_ok) return {name, false, reason, kernels};
  return {name, true, {}, kernels};
}

std::string names(bool only_available) {
  std::string text;
  for (const TierInfo& t : cpu_tiers()) {
    if (only_available && !t.available) continue;
    if (!text.empty()) text += ", ";
    text += t.name;
  }
  return text;
}

}  // namespace

const CpuKernels* avx2_with_byte_pairs() {
  if (kernels_avx2_pairs() == nullptr) return nullptr;
  static CpuKernels own{};
  static const CpuKernels* const table =
      with_integers_if(false, kernels_avx2(), *kernels_avx2_pairs(), own);
  return machine_has(HWY_AVX2) ? table : nullptr;
}

const std::vector<TierInfo>& cpu_tiers() {
  static CpuKernels own_avx512{}, own_avx2{}, own_neon{};
  static constexpr CpuKernels kNone{};
  const CpuKernels& pairs = kernels_avx2_pairs() != nullptr ? *kernels_avx2_pairs() : kNone;
  const bool bf16 = machine_has(HWY_AVX3) && machine_has_bf16();
  static constexpr std::string_view kNoBf16 =
      "this CPU lacks AVX512_BF16, AVX512_VBMI or AVX512_VNNI";
  static const std::vector<TierInfo> tiers = {
      tier("amx", kernels_amx(), bf16 && amx_refusal().empty(), bf16 ? amx_refusal() : kNoBf16),
      tier("avx512_bf16", kernels_avx512_bf16(), bf16, kNoBf16),
      tier("avx512",
           with_integers_if(machine_has_avx512_vnni(), kernels_avx512(), pairs, own_avx512),
           machine_has(HWY_AVX3), "this CPU lacks AVX-512 F/VL/DQ/BW"),
      tier("avx2", with_integers_if(machine_has_avx_vnni(), kernels_avx2(), pairs, own_avx2),
           machine_has(HWY_AVX2), "this CPU lacks AVX2, FMA or F16C"),
      tier("neon", with_integers_if(machine_has_i8mm(), kernels_neon(), kNone, own_neon),
           machine_has(HWY_NEON), "this CPU lacks AES, which Highway's NEON target includes"),
      tier("baseline", kernels_baseline(), true, {}),
  };
  return tiers;
}

Result<const CpuKernels*> kernels_by_name(std::string_view name) {
  for (const TierInfo& t : cpu_tiers()) {
    if (t.name != name) continue;
    if (!t.available) {
      return Status(StatusCode::kUnsupported, "CPU tier '" + std::string(name) +
                                                  "': " + std::string(t.reason) +
                                                  "; available: " + names(true));
    }
    return t.kernels;
  }
  return Status(StatusCode::kNotFound,
                "CPU tier: got '" + std::string(name) + "', need one of " + names(false));
}

Result<const CpuKernels*> usable_kernels(std::string_view name) {
  const std::string_view forced = forced_tier();
  if (!forced.empty() && forced != name) {
    return Status(StatusCode::kUnsupported,
                  "MOESAIC_CPU_TIER forces tier '" + std::string(forced) + "'");
  }
  return kernels_by_name(name);
}

Result<const CpuKernels*> current_kernels() {
  const std::string_view forced = forced_tier();
  if (!forced.empty()) {
    Result<const CpuKernels*> named = kernels_by_name(forced);
    if (!named.ok()) return named.status().with_context("MOESAIC_CPU_TIER");
    return named;
  }
  for (const TierInfo& t : cpu_tiers()) {
    if (t.available) return t.kernels;
  }
  return Status(StatusCode::kInternal, "no CPU tier is available");
}

int resolve_threads(int requested) {
  if (requested > 0) return requested;
#if defined(__linux__)
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof(set), &set) == 0)
    return CPU_COUNT(&set) > 0 ? CPU_COUNT(&set) : 1;
#endif
  return omp_get_num_procs();
}

namespace {
// The floating-point mode of this thread, and that of IEEE 754: nearest even, subnormals as they
// are, no exception traps.
#if defined(__x86_64__)
constexpr unsigned kIeeeDefault = 0x1F80;  // all exceptions masked
unsigned float_mode() { return _mm_getcsr(); }
void set_float_mode(unsigned mode) { _mm_setcsr(mode); }
#elif defined(__aarch64__)
constexpr unsigned kIeeeDefault = 0;
unsigned float_mode() {
  std::uint64_t mode;
  __asm__ volatile("mrs %0, fpcr" : "=r"(mode));
  return static_cast<unsigned>(mode);  // the upper half is reserved, zero
}
void set_float_mode(unsigned mode) {
  __asm__ volatile("msr fpcr, %0" : : "r"(std::uint64_t{mode}) : "memory");
}
#else
constexpr unsigned kIeeeDefault = 0;
unsigned float_mode() { return 0; }
void set_float_mode(unsigned) {}
#endif
}  // namespace

ScopedIeeeMode::ScopedIeeeMode() : saved_(float_mode()) {
  if (!MOESAIC_FAULT(cpu_callers_float_mode_kept)) set_float_mode(kIeeeDefault);
}
ScopedIeeeMode::~ScopedIeeeMode() { set_float_mode(saved_); }

}  // namespace moesaic::cpu
