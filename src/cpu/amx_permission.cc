#include "cpu/amx_permission.h"

#include "core/fault.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif
#if defined(__linux__) && defined(__x86_64__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include <cerrno>

namespace moesaic::cpu {
namespace {

#if defined(__linux__) && defined(__x86_64__)

// cpuid 7.0, edx.
constexpr unsigned kAmxBf16 = 1U << 22, kAmxTile = 1U << 24, kAmxInt8 = 1U << 25;
constexpr unsigned kAll = kAmxBf16 | kAmxTile | kAmxInt8;
constexpr unsigned kOsXsave = 1U << 27;               // cpuid 1, ecx
constexpr unsigned kTileState = 1U << 17 | 1U << 18;  // of extended control register 0

bool machine_has_amx() {
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  if (__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) == 0) return false;
  return (edx & kAll) == kAll;
}

bool system_saves_tiles() {
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  if (__get_cpuid(1, &eax, &ebx, &ecx, &edx) == 0 || (ecx & kOsXsave) == 0) return false;
  unsigned low = 0, high = 0;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return (low & kTileState) == kTileState;
}

AmxMachine ask() {
  AmxMachine m;
  m.has_tiles = machine_has_amx();
  m.saves_tiles = m.has_tiles && system_saves_tiles();
  if (!m.saves_tiles) return m;
  constexpr long kRequestPermission = 0x1023;  // ARCH_REQ_XCOMP_PERM
  constexpr long kTileData = 18;
  if (::syscall(SYS_arch_prctl, kRequestPermission, kTileData) != 0) m.request_error = errno;
  return m;
}

#else
AmxMachine ask() { return {}; }
#endif

}  // namespace

std::string_view amx_refusal(const AmxMachine& m) {
#if !defined(__linux__) || !defined(__x86_64__)
  if (!m.has_tiles) return "tile registers are used on x86-64 Linux only";
#endif
  if (!m.has_tiles) return "this CPU lacks AMX_TILE, AMX_BF16 or AMX_INT8";
  if (!m.saves_tiles) return "the system does not save tile registers (XCR0)";
  if (m.request_error == 0 || MOESAIC_FAULT(cpu_amx_without_permission)) return {};
  if (m.request_error == EINVAL || m.request_error == EOPNOTSUPP)
    return "this kernel does not give tile registers to processes (Linux 5.16 and later do)";
  if (m.request_error == EPERM) return "the kernel refuses tile registers to this process (EPERM)";
  return "the kernel refuses tile registers to this process (a signal stack may be too small)";
}

std::string_view amx_refusal() {
  static const std::string_view refusal = amx_refusal(ask());
  return refusal;
}

}  // namespace moesaic::cpu
