#include "parallel/nccl_window_path.h"

#include <fmt/format.h>

#include <string>

#include "core/fault.h"
#include "core/refusal.h"

namespace moesaic::parallel {
namespace {

// Before the first, windows are for NCCL's own kernels only; of versions behind the last the record
// is not read, they have a function for it.
constexpr int kFirstWithRecord = 22803, kLastWithRecord = 22809;

std::string version_text(int version) {
  return fmt::format("{}.{}.{}", version / 10000, version / 100 % 100, version % 100);
}

}  // namespace

Result<NcclWindowPath> nccl_window_path(const NcclLibrary& nccl) {
  if (nccl.version < kFirstWithRecord && !MOESAIC_FAULT(nccl_windows_of_every_version)) {
    return unsupported(fmt::format("libnccl.so.2: got version {}, need {} or newer for windows",
                                   version_text(nccl.version), version_text(kFirstWithRecord)));
  }
  const struct {
    bool there;
    const char* name;
  } needed[] = {{nccl.mem_alloc != nullptr, "ncclMemAlloc"},
                {nccl.mem_free != nullptr, "ncclMemFree"},
                {nccl.comm_window_register != nullptr, "ncclCommWindowRegister"},
                {nccl.comm_window_deregister != nullptr, "ncclCommWindowDeregister"}};
  for (const auto& function : needed) {
    if (function.there) continue;
    return unsupported(fmt::format("libnccl.so.2 (version {}) has no {}, which windows need",
                                   version_text(nccl.version), function.name));
  }
  if (nccl.get_lsa_device_pointer != nullptr) return NcclWindowPath::kApi;
  if (nccl.version <= kLastWithRecord) return NcclWindowPath::kRecord;
  return unsupported(
      fmt::format("libnccl.so.2 (version {}) has no ncclGetLsaDevicePointer, which windows need",
                  version_text(nccl.version)));
}

}  // namespace moesaic::parallel
