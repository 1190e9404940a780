#include "parallel/nccl_channel.h"

#include <fmt/format.h>

#include <memory>
#include <mutex>
#include <thread>
#include <utility>

#include "cuda/device_memory.h"
#include "parallel/helper_thread.h"

namespace moesaic::parallel {
namespace {

using Clock = NcclChannel::Clock;

Status late(const char* what) {
  return {StatusCode::kDevice, fmt::format("{}: not done within the time", what)};
}

// What the connecting thread and its maker share; either may be the last to go.
struct Start {
  std::mutex mutex;
  void* comm = nullptr;   // there once the rank has joined
  bool given_up = false;  // the maker no longer waits
  int code = 0;
  const char* call = "ncclCommInitRankConfig";
};

// A byte from every rank to every other: NCCL connects two ranks at their first message.
int connect_to_all(const NcclLibrary& nccl, void* comm, int ranks, int rank, cudaStream_t stream) {
  cuda::Allocation bytes;
  if (!bytes.reserve("nccl: first messages", ranks + 1).ok()) return 1;
  int code = nccl.group_start();
  for (int peer = 0; peer < ranks && code == NcclLibrary::kSuccess; ++peer) {
    if (peer == rank) continue;
    code = nccl.send(bytes.as<std::byte>() + ranks, 1, NcclLibrary::kBytes, peer, comm, stream);
    if (code != NcclLibrary::kSuccess) break;
    code = nccl.recv(bytes.as<std::byte>() + peer, 1, NcclLibrary::kBytes, peer, comm, stream);
  }
  const int ended = nccl.group_end();
  if (code == NcclLibrary::kSuccess) code = ended;
  if (cudaStreamSynchronize(stream) != cudaSuccess && code == NcclLibrary::kSuccess) code = 1;
  return code;
}

struct Joining {
  int ranks, rank;
  NcclUniqueId id;
  cudaStream_t stream;
  NcclChannel::Messages messages;
};

void run_start(const NcclLibrary& nccl, const Joining& joining, Start& start) {
  NcclConfig config;
  config.blocking = 1;
  void* comm = nullptr;
  int code = nccl.comm_init_rank_config(&comm, joining.ranks, joining.id, joining.rank, &config);
  {
    const std::lock_guard<std::mutex> lock(start.mutex);
    start.code = code;
    if (start.given_up) {
      if (comm != nullptr) static_cast<void>(nccl.comm_abort(comm));
      return;
    }
    start.comm = comm;
    if (code != NcclLibrary::kSuccess || joining.ranks == 1 ||
        joining.messages == NcclChannel::Messages::kNone) {
      return;
    }
    start.call = "nccl: first messages";
  }
  // From here on the maker can end a wait by aborting the communicator.
  code = connect_to_all(nccl, comm, joining.ranks, joining.rank, joining.stream);
  const std::lock_guard<std::mutex> lock(start.mutex);
  start.code = code;
}

}  // namespace

NcclChannel::~NcclChannel() {
  const cuda::DeviceScope scope(device_);
  // Every call has ended by now, so there is nothing to flush.
  abort();
  if (event_ != nullptr) static_cast<void>(cudaEventDestroy(event_));
  if (stream_ != nullptr) static_cast<void>(cudaStreamDestroy(stream_));
}

Status NcclChannel::start(int ranks, const NcclUniqueId& id, int rank, Clock::time_point deadline,
                          Messages messages) {
  MOESAIC_RETURN_IF_ERROR(
      cuda::check_call("nccl: stream", cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking)));
  MOESAIC_RETURN_IF_ERROR(
      cuda::check_call("nccl: event", cudaEventCreateWithFlags(&event_, cudaEventDisableTiming)));
  const auto start = std::make_shared<Start>();
  HelperThread thread;
  MOESAIC_RETURN_IF_ERROR(
      thread.start(device_, [&nccl = nccl_, joining = Joining{ranks, rank, id, stream_, messages},
                             start] { run_start(nccl, joining, *start); }));
  const bool done = thread.done_by(deadline);
  std::unique_lock<std::mutex> lock(start->mutex);
  comm_ = std::exchange(start->comm, nullptr);
  const int code = start->code;
  const char* const call = start->call;
  start->given_up = true;
  lock.unlock();
  if (done) {
    if (code == NcclLibrary::kSuccess) return {};
    return {StatusCode::kDevice, fmt::format("{}: {}", call, nccl_.get_error_string(code))};
  }
  // Joined but not connected: aborting ends the thread's wait. If it has not even joined,
  // it is left running and cleans up if it ever continues.
  if (comm_ != nullptr) {
    abort();
    thread.join();
  } else {
    stream_ = nullptr;
  }
  return late(call);
}

Status NcclChannel::wait(const char* what, Clock::time_point deadline) {
  MOESAIC_RETURN_IF_ERROR(cuda::check_call(what, cudaEventRecord(event_, stream_)));
  constexpr int kPatience = 1000;  // some milliseconds of polling before the first sleep: latency
  for (int round = 0;; ++round) {
    const cudaError_t done = cudaEventQuery(event_);
    if (done != cudaErrorNotReady) return cuda::check_call(what, done);
    if (round % 16 != 0) continue;
    int code = NcclLibrary::kSuccess;
    if (nccl_.comm_get_async_error(comm_, &code) != NcclLibrary::kSuccess ||
        (code != NcclLibrary::kSuccess && code != NcclLibrary::kInProgress)) {
      return {StatusCode::kDevice, fmt::format("{}: {}", what, nccl_.get_error_string(code))};
    }
    if (Clock::now() > deadline) return late(what);
    if (round < 16 * kPatience) continue;
    std::this_thread::sleep_for(std::chrono::microseconds(round < 16 * 4000 ? 10 : 200));
  }
}

void NcclChannel::abort() {
  if (comm_ != nullptr) static_cast<void>(nccl_.comm_abort(std::exchange(comm_, nullptr)));
}

}  // namespace moesaic::parallel
