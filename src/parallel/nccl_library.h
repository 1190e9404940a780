// The entry points of NCCL that are used here, found at run time: no header and no library is
// needed to build. Declared after NCCL's C interface, versions 2.18 and newer.
#pragma once

#include <cstddef>

#include "moesaic/status.h"

namespace moesaic::parallel {

struct NcclUniqueId {
  char internal[128];
};
// The members that every version since 2.18 begins with; NCCL reads `size` bytes and takes its
// defaults for the rest.
struct NcclConfig {
  std::size_t size = sizeof(NcclConfig);
  unsigned magic = 0xCAFEBEEF;
  unsigned version = 21800;
  int blocking = 1;
  int cga_cluster_size = kUndefined;
  int min_ctas = kUndefined, max_ctas = kUndefined;
  const char* net_name = nullptr;
  int split_share = kUndefined;
  static constexpr int kUndefined = -2147483647 - 1;
};

// Of some ranks of a communicator.
struct NcclTeam {
  int ranks, rank, stride;
};

struct NcclLibrary {
  static constexpr int kSuccess = 0, kInProgress = 7;
  static constexpr int kBytes = 0;      // ncclInt8
  static constexpr int kSymmetric = 1;  // NCCL_WIN_COLL_SYMMETRIC
  int version = 0;                      // major * 10000 + minor * 100 + patch
  int (*get_version)(int* version) = nullptr;
  int (*get_unique_id)(NcclUniqueId* id) = nullptr;
  int (*comm_init_rank_config)(void** comm, int ranks, NcclUniqueId id, int rank,
                               NcclConfig* config) = nullptr;
  int (*comm_get_async_error)(void* comm, int* error) = nullptr;
  int (*comm_abort)(void* comm) = nullptr;
  int (*group_start)() = nullptr;
  int (*group_end)() = nullptr;
  int (*send)(const void* data, std::size_t count, int dtype, int peer, void* comm,
              void* stream) = nullptr;
  int (*recv)(void* data, std::size_t count, int dtype, int peer, void* comm,
              void* stream) = nullptr;
  const char* (*get_error_string)(int error) = nullptr;

  // Windows; null in libraries that lack them (parallel/nccl_window_path.h).
  int (*mem_alloc)(void** data, std::size_t bytes) = nullptr;
  int (*mem_free)(void* data) = nullptr;
  int (*comm_window_register)(void* comm, void* data, std::size_t bytes, void** window,
                              int flags) = nullptr;
  int (*comm_window_deregister)(void* comm, void* window) = nullptr;
  int (*get_lsa_device_pointer)(void* window, std::size_t offset, int rank,
                                void** pointer) = nullptr;
  NcclTeam (*team_lsa)(void* comm) = nullptr;  // the ranks whose memory this one can address
};

// Loads libnccl.so.2 on the first call and keeps it. NVLink multicast is switched off for it
// (NCCL_NVLS_ENABLE=0), whatever the environment says: rows go from one rank to one rank.
// kUnsupported: not there, too old, or without one of the functions that messages need.
Result<const NcclLibrary*> nccl_library();

}  // namespace moesaic::parallel
