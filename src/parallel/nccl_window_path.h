// How kernels get at a window of another rank that NCCL has mapped, by version and functions of the
// library. Pure: no device, no NCCL.
#pragma once

#include <cstddef>
#include <cstdint>

#include "moesaic/status.h"
#include "parallel/nccl_library.h"

namespace moesaic::parallel {

enum class NcclWindowPath : std::uint8_t {
  kRecord,  // 2.28: from the record in device memory that a window's handle points to
  kApi,     // 2.29.2 and newer: ncclGetLsaDevicePointer
};

// What the record of 2.28.3 to 2.28.9 begins with. Windows of all ranks lie in one range of
// addresses, at the same distance from rank to rank.
struct NcclWindowRecord {
  void* host;
  std::byte* first;  // window of rank 0
  std::int32_t lsa_rank, world_rank;
  std::uint32_t stride_4g;  // from a rank to the next, units of 2^32 bytes
  std::uint32_t unused;

  std::byte* of(int rank) const {
    return first + (static_cast<std::size_t>(rank) * stride_4g << 32);
  }
};
static_assert(sizeof(NcclWindowRecord) == 32, "copied from the device as it is");

// kUnsupported: why kernels have no windows through this library.
Result<NcclWindowPath> nccl_window_path(const NcclLibrary& nccl);

}  // namespace moesaic::parallel
