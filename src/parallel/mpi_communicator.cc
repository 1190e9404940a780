// MPI as a Transport: non-blocking point-to-point messages only, so that no call waits for a peer.
// Also the answers about what is available, in builds with and without it.
#include <fmt/format.h>

#include <cstdlib>

#include "parallel/transport.h"

#ifdef MOESAIC_HAVE_MPI
#include <mpi.h>

#include <list>
#include <map>
#include <mutex>
#include <new>
#include <utility>
#endif

namespace moesaic {

bool launched_by_mpi() {
  for (const char* name : {"OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "PMIX_RANK"}) {
    if (std::getenv(name) != nullptr) return true;
  }
  return false;
}

#ifndef MOESAIC_HAVE_MPI

Status mpi_available() {
  return {StatusCode::kUnsupported, "this build has no MPI (CMake option MOESAIC_MPI)"};
}
Result<std::unique_ptr<Communicator>> make_mpi_communicator(const CommunicatorOptions&) {
  return mpi_available();
}

#else

namespace {

Status mpi_error(const char* call, int code) {
  char text[MPI_MAX_ERROR_STRING] = {};
  int length = 0;
  MPI_Error_string(code, text, &length);
  return {StatusCode::kDevice, fmt::format("{}: {}", call, text)};
}

// A message as MPI counts it: ints reach 2^31 - 1 bytes, so long ones are blocks and a rest.
class MessageType {
 public:
  explicit MessageType(std::size_t bytes) : bytes_(bytes) {
    if (bytes <= kPlain) return;
    constexpr std::size_t kBlock = std::size_t{1} << 20;
    const int lengths[] = {static_cast<int>(bytes / kBlock), static_cast<int>(bytes % kBlock)};
    const MPI_Aint places[] = {0, static_cast<MPI_Aint>(bytes / kBlock * kBlock)};
    MPI_Datatype block = MPI_DATATYPE_NULL;
    code_ = MPI_Type_contiguous(static_cast<int>(kBlock), MPI_BYTE, &block);
    if (code_ != MPI_SUCCESS) return;
    const MPI_Datatype parts[] = {block, MPI_BYTE};
    code_ = MPI_Type_create_struct(2, lengths, places, parts, &type_);
    if (code_ == MPI_SUCCESS) code_ = MPI_Type_commit(&type_);
    MPI_Type_free(&block);
  }
  MessageType(const MessageType&) = delete;
  MessageType& operator=(const MessageType&) = delete;
  // What is under way with it stays.
  ~MessageType() {
    if (bytes_ > kPlain && type_ != MPI_DATATYPE_NULL && type_ != MPI_BYTE) MPI_Type_free(&type_);
  }
  int code() const { return code_; }
  int count() const { return bytes_ > kPlain ? 1 : static_cast<int>(bytes_); }
  MPI_Datatype type() const { return type_; }

 private:
  static constexpr std::size_t kPlain = std::size_t{1} << 24;
  std::size_t bytes_;
  int code_ = MPI_SUCCESS;
  MPI_Datatype type_ = MPI_BYTE;
};

// Who uses MPI in this process. The last one finalises it, if this library has initialised it and
// none of them broke.
class MpiUsers {
 public:
  void initialised_here() {
    const std::lock_guard<std::mutex> lock(mutex_);
    ours_ = true;
  }
  void add() {
    const std::lock_guard<std::mutex> lock(mutex_);
    ++users_;
  }
  void broke() {
    const std::lock_guard<std::mutex> lock(mutex_);
    broken_ = true;
  }
  void remove() {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (--users_ == 0 && ours_ && !broken_) MPI_Finalize();
  }

 private:
  std::mutex mutex_;
  int users_ = 0;
  bool ours_ = false, broken_ = false;
};
MpiUsers& mpi_users() {
  static MpiUsers users;
  return users;
}

class MpiTransport final : public parallel::Transport {
 public:
  MpiTransport() { mpi_users().add(); }
  MpiTransport(const MpiTransport&) = delete;
  MpiTransport& operator=(const MpiTransport&) = delete;
  ~MpiTransport() override {
    if (abandoned_) {
      // MPI may still read what is on its way: those buffers are leaked, not freed.
      static_cast<void>(new (std::nothrow) std::list<Pending>(std::move(pending_)));
    }
    mpi_users().remove();
  }

  Status start() {
    int code = MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN);
    if (code == MPI_SUCCESS) code = MPI_Comm_rank(MPI_COMM_WORLD, &rank_);
    if (code == MPI_SUCCESS) code = MPI_Comm_size(MPI_COMM_WORLD, &size_);
    return code == MPI_SUCCESS ? Status() : mpi_error("MPI_Comm_rank", code);
  }

  std::string_view name() const override { return "mpi"; }
  int rank() const override { return rank_; }
  int size() const override { return size_; }

  Status post(int to, int tag, parallel::Message message) override {
    const MessageType as(message.size());
    if (as.code() != MPI_SUCCESS) return mpi_error("MPI_Type_create_struct", as.code());
    Pending& p = pending_.emplace_back();
    p.message = std::move(message);
    const int code =
        MPI_Isend(p.message.data(), as.count(), as.type(), to, tag, MPI_COMM_WORLD, &p.request);
    return code == MPI_SUCCESS ? Status() : mpi_error("MPI_Isend", code);
  }

  Result<std::optional<parallel::Message>> poll(int from, int tag) override {
    // A message that was announced may still be arriving; only its buffer waits, not this call.
    const auto key = std::pair(from, tag);
    if (arriving_.find(key) == arriving_.end()) {
      int there = 0;
      MPI_Message handle = MPI_MESSAGE_NULL;
      MPI_Status status;
      int code = MPI_Improbe(from, tag, MPI_COMM_WORLD, &there, &handle, &status);
      if (code != MPI_SUCCESS) return mpi_error("MPI_Improbe", code);
      if (there == 0) return std::optional<parallel::Message>();
      MPI_Count bytes = 0;
      code = MPI_Get_elements_x(&status, MPI_BYTE, &bytes);
      if (code != MPI_SUCCESS) return mpi_error("MPI_Get_elements_x", code);
      const MessageType as(static_cast<std::size_t>(bytes));
      if (as.code() != MPI_SUCCESS) return mpi_error("MPI_Type_create_struct", as.code());
      Pending& p = arriving_[key];
      p.message = pool().take(static_cast<std::size_t>(bytes));
      code = MPI_Imrecv(p.message.data(), as.count(), as.type(), &handle, &p.request);
      if (code != MPI_SUCCESS) return mpi_error("MPI_Imrecv", code);
    }
    const auto entry = arriving_.find(key);
    int done = 0;
    const int code = MPI_Test(&entry->second.request, &done, MPI_STATUS_IGNORE);
    if (code != MPI_SUCCESS) return mpi_error("MPI_Test", code);
    if (done == 0) return std::optional<parallel::Message>();
    std::optional<parallel::Message> m = std::move(entry->second.message);
    arriving_.erase(entry);
    return m;
  }

  Result<bool> all_sent() override {
    for (auto p = pending_.begin(); p != pending_.end();) {
      int done = 0;
      const int code = MPI_Test(&p->request, &done, MPI_STATUS_IGNORE);
      if (code != MPI_SUCCESS) return mpi_error("MPI_Test", code);
      if (done != 0) pool().give(std::move(p->message));
      p = done != 0 ? pending_.erase(p) : std::next(p);
    }
    return pending_.empty();
  }

  void abandon() override {
    abandoned_ = true;
    mpi_users().broke();
    static_cast<void>(new std::map<std::pair<int, int>, Pending>(std::move(arriving_)));
    arriving_.clear();
  }

 private:
  struct Pending {
    parallel::Message message;
    MPI_Request request = MPI_REQUEST_NULL;
  };
  std::list<Pending> pending_;
  std::map<std::pair<int, int>, Pending> arriving_;
  int rank_ = 0, size_ = 1;
  bool abandoned_ = false;
};

}  // namespace

Status mpi_available() {
  if (launched_by_mpi()) return {};
  return {StatusCode::kUnsupported, "this process was not started by mpirun"};
}

Result<std::unique_ptr<Communicator>> make_mpi_communicator(const CommunicatorOptions& options) {
  int finalized = 0;
  MPI_Finalized(&finalized);
  if (finalized != 0) {
    return Status(StatusCode::kDevice, "mpi: already finalised in this process");
  }
  int initialized = 0;
  MPI_Initialized(&initialized);
  if (initialized == 0) {
    int provided = 0;
    const int code = MPI_Init_thread(nullptr, nullptr, MPI_THREAD_SERIALIZED, &provided);
    if (code != MPI_SUCCESS) return mpi_error("MPI_Init_thread", code);
    if (provided < MPI_THREAD_SERIALIZED) {
      return Status(StatusCode::kDevice, "mpi: it lacks MPI_THREAD_SERIALIZED");
    }
    mpi_users().initialised_here();
  }
  auto transport = std::make_unique<MpiTransport>();
  MOESAIC_RETURN_IF_ERROR(transport->start());
  return parallel::make_group_communicator(std::move(transport), options);
}

#endif

}  // namespace moesaic
