// Which memory peer windows are made of: what is asked for, and what a libnccl.so.2 offers, told from
// tables of its functions as versions have them.
#include "parallel/peer_memory.h"

#include <gtest/gtest.h>

#include "parallel/nccl_window_path.h"
#include "support/refusal.h"

namespace moesaic::parallel {
namespace {

using test::expect_refusal;
using Providers = std::vector<PeerProvider>;

TEST(PeerMemory, ProvidersAreTriedInOrder) {
  EXPECT_EQ(peer_providers(PeerMemory::kAuto, true).value(), Providers{PeerProvider::kThreads});
  EXPECT_EQ(peer_providers(PeerMemory::kAuto, false).value(),
            (Providers{PeerProvider::kCudaHandles, PeerProvider::kNccl}));
  EXPECT_EQ(peer_providers(PeerMemory::kCudaHandles, false).value(),
            Providers{PeerProvider::kCudaHandles});
  expect_refusal(peer_providers(PeerMemory::kCudaHandles, true).status(), StatusCode::kUnsupported,
                 {"peer_memory: got cuda_handles", "threads of one process", "auto", "nccl"});
  for (const bool threads : {false, true}) {
    EXPECT_EQ(peer_providers(PeerMemory::kNccl, threads).value(), Providers{PeerProvider::kNccl});
    expect_refusal(peer_providers(static_cast<PeerMemory>(7), threads).status(),
                   StatusCode::kInvalidArgument, {"peer_memory: got 7"});
  }
}

TEST(PeerMemory, Names) {
  EXPECT_EQ(peer_memory_name(PeerMemory{}), "auto");
  EXPECT_EQ(peer_memory_name(PeerMemory::kCudaHandles), "cuda_handles");
  EXPECT_EQ(peer_memory_name(PeerMemory::kNccl), "nccl");
  EXPECT_EQ(peer_provider_name(PeerProvider::kThreads), "threads");
  EXPECT_EQ(peer_provider_name(PeerProvider::kNccl), "nccl");
}

// What a version's library has of the functions for windows.
NcclLibrary library_of(int version) {
  NcclLibrary nccl;
  nccl.version = version;
  if (version >= 21900) {
    nccl.mem_alloc = [](void**, std::size_t) { return 0; };
    nccl.mem_free = [](void*) { return 0; };
  }
  if (version >= 22700) {
    nccl.comm_window_register = [](void*, void*, std::size_t, void**, int) { return 0; };
    nccl.comm_window_deregister = [](void*, void*) { return 0; };
  }
  if (version >= 22803) nccl.team_lsa = [](void*) { return NcclTeam{2, 0, 1}; };
  if (version >= 22902) {
    nccl.get_lsa_device_pointer = [](void*, std::size_t, int, void**) { return 0; };
  }
  return nccl;
}

TEST(NcclWindowPath, FollowsTheVersion) {
  expect_refusal(nccl_window_path(library_of(21800)).status(), StatusCode::kUnsupported,
                 {"got version 2.18.0", "need 2.28.3 or newer"});
  expect_refusal(nccl_window_path(library_of(22707)).status(), StatusCode::kUnsupported,
                 {"got version 2.27.7", "need 2.28.3 or newer"});
  for (const int version : {22803, 22807, 22809}) {
    EXPECT_EQ(nccl_window_path(library_of(version)).value(), NcclWindowPath::kRecord) << version;
  }
  for (const int version : {22902, 23007, 23203, 30000}) {
    EXPECT_EQ(nccl_window_path(library_of(version)).value(), NcclWindowPath::kApi) << version;
  }
}

// The record is read of versions that are known to have it, and of no other.
TEST(NcclWindowPath, NeedsItsFunctions) {
  for (const int version : {22810, 22900, 23203}) {
    NcclLibrary nccl = library_of(version);
    nccl.get_lsa_device_pointer = nullptr;
    expect_refusal(nccl_window_path(nccl).status(), StatusCode::kUnsupported,
                   {"has no ncclGetLsaDevicePointer"});
  }
  for (const int version : {22803, 22809, 23203}) {
    const auto without = [&](auto member, const char* name) {
      NcclLibrary nccl = library_of(version);
      nccl.*member = nullptr;
      expect_refusal(nccl_window_path(nccl).status(), StatusCode::kUnsupported, {"has no", name});
    };
    without(&NcclLibrary::mem_alloc, "ncclMemAlloc");
    without(&NcclLibrary::mem_free, "ncclMemFree");
    without(&NcclLibrary::comm_window_register, "ncclCommWindowRegister");
    without(&NcclLibrary::comm_window_deregister, "ncclCommWindowDeregister");
  }
}

TEST(NcclWindowPath, ARecordSaysWhereWindowsAre) {
  NcclWindowRecord record = {};
  record.first = reinterpret_cast<std::byte*>(std::uintptr_t{0x7000'0020'0000});
  record.stride_4g = 35;
  EXPECT_EQ(record.of(0), record.first);
  EXPECT_EQ(reinterpret_cast<std::uintptr_t>(record.of(3)),
            0x7000'0020'0000 + (std::uintptr_t{3} * 35 << 32));
}

}  // namespace
}  // namespace moesaic::parallel
