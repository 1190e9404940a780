#include "parallel/nccl_library.h"

#include <dlfcn.h>
#include <fmt/format.h>

#include <cstdlib>

namespace moesaic::parallel {
namespace {

struct Loaded {
  NcclLibrary table;
  Status status;
};

template <class F>
void find(void* library, const char* name, F*& function, Status& status) {
  function = reinterpret_cast<F*>(dlsym(library, name));
  if (function == nullptr && status.ok()) {
    status = Status(StatusCode::kUnsupported, fmt::format("libnccl.so.2 has no {}", name));
  }
}

template <class F>
void find_if_there(void* library, const char* name, F*& function) {
  function = reinterpret_cast<F*>(dlsym(library, name));
}

Loaded load() {
  Loaded l;
  setenv("NCCL_NVLS_ENABLE", "0", 1);
  void* library = dlopen("libnccl.so.2", RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    l.status = Status(StatusCode::kUnsupported,
                      "libnccl.so.2 is not on this machine (or not on its library path)");
    return l;
  }
  NcclLibrary& t = l.table;
  find(library, "ncclGetVersion", t.get_version, l.status);
  find(library, "ncclGetUniqueId", t.get_unique_id, l.status);
  find(library, "ncclCommInitRankConfig", t.comm_init_rank_config, l.status);
  find(library, "ncclCommGetAsyncError", t.comm_get_async_error, l.status);
  find(library, "ncclCommAbort", t.comm_abort, l.status);
  find(library, "ncclGroupStart", t.group_start, l.status);
  find(library, "ncclGroupEnd", t.group_end, l.status);
  find(library, "ncclSend", t.send, l.status);
  find(library, "ncclRecv", t.recv, l.status);
  find(library, "ncclGetErrorString", t.get_error_string, l.status);
  find_if_there(library, "ncclMemAlloc", t.mem_alloc);
  find_if_there(library, "ncclMemFree", t.mem_free);
  find_if_there(library, "ncclCommWindowRegister", t.comm_window_register);
  find_if_there(library, "ncclCommWindowDeregister", t.comm_window_deregister);
  find_if_there(library, "ncclGetLsaDevicePointer", t.get_lsa_device_pointer);
  find_if_there(library, "ncclTeamLsa", t.team_lsa);
  if (l.status.ok() && (t.get_version(&t.version) != NcclLibrary::kSuccess || t.version < 21800)) {
    l.status =
        Status(StatusCode::kUnsupported,
               fmt::format("libnccl.so.2: got version {}, need 2.18 or newer (21800)", t.version));
  }
  if (!l.status.ok()) dlclose(library);
  return l;
}

}  // namespace

Result<const NcclLibrary*> nccl_library() {
  static const Loaded kLoaded = load();
  if (!kLoaded.status.ok()) return kLoaded.status;
  return &kLoaded.table;
}

}  // namespace moesaic::parallel
