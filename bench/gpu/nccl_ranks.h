// Ranks of the NCCL bench: one thread and one GPU each, and what all its parts share.
#pragma once

#include <cuda_runtime.h>
#include <fmt/format.h>

#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "moesaic/communicator.h"
#include "moesaic/experts.h"
#include "moesaic/status.h"

namespace moesaic::bench {

struct Settings {
  int ranks = 0;  // 0: all GPUs
  int experts = 256, check_tokens = 256, repeats = 30;
  bool no_check = false, no_messages = false, moves = false;
  std::vector<std::int64_t> tokens = {16, 128, 1024, 4096};  // per GPU
};
// DeepSeek-V3's layer.
inline constexpr std::int64_t kTopK = 8, kHidden = 7168, kInner = 2048;

struct Rank {
  std::shared_ptr<Communicator> control, nccl;
  int index = 0, device = 0;
};

using Clock = std::chrono::steady_clock;
inline double us_since(Clock::time_point begin) {
  return std::chrono::duration<double, std::micro>(Clock::now() - begin).count();
}

// Other ranks' threads go on: nothing may be torn down under them.
[[noreturn]] inline void end_of_bench() {
  std::fflush(stdout);
  std::_Exit(1);
}
// A bench ends at the first failure.
inline void must(const Status& status, const char* what) {
  if (status.ok()) return;
  fmt::print("FAILED {}: {}\n", what, status.to_string());
  end_of_bench();
}
template <class T>
T must(Result<T> result, const char* what) {
  must(result.status(), what);
  return std::move(result).value();
}
inline void must(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  fmt::print("FAILED {}: {}\n", what, cudaGetErrorString(error));
  end_of_bench();
}

// Device memory of the current device.
class DeviceArray {
 public:
  explicit DeviceArray(std::size_t bytes) { must(cudaMalloc(&data_, bytes + 16), "cudaMalloc"); }
  template <class T>
  explicit DeviceArray(const std::vector<T>& from) : DeviceArray(from.size() * sizeof(T)) {
    must(cudaMemcpy(data_, from.data(), from.size() * sizeof(T), cudaMemcpyHostToDevice), "upload");
  }
  DeviceArray(const DeviceArray&) = delete;
  DeviceArray& operator=(const DeviceArray&) = delete;
  ~DeviceArray() { (void)cudaFree(data_); }
  template <class T = std::byte>
  T* as() const {
    return static_cast<T*>(data_);
  }
  template <class T>
  std::vector<T> host(std::size_t count) const {
    std::vector<T> to(count);
    must(cudaMemcpy(to.data(), data_, count * sizeof(T), cudaMemcpyDeviceToHost), "download");
    return to;
  }

 private:
  void* data_ = nullptr;
};

// body on every rank's thread, with its device current.
void on_ranks(std::vector<Rank>& ranks, const std::function<void(Rank&)>& body);

// Times body `repeats` times, all ranks starting together. Per repetition what the slowest rank
// took counts; their median.
class Stopwatch {
 public:
  explicit Stopwatch(std::size_t ranks) : us_(ranks) {}
  void run(const Rank& rank, int repeats, const std::function<void()>& body);
  double median_us() const;

 private:
  std::vector<std::vector<double>> us_;
};

// Device 0 to device 1 by the copy engine, GB/s: one way, then both at once.
void copy_bandwidth(const std::vector<Rank>& ranks, double* one_way, double* both);
// Large device messages between all ranks through a Communicator, GB/s out of each.
double nccl_bandwidth(std::vector<Rank>& ranks);
// What a message costs that is almost empty: prints where the time goes.
void print_latency(std::vector<Rank>& ranks, int repeats);

// The layer over ranks against one GPU, for every transport; whether all are right. Prints errors
// and times.
bool check_layer(std::vector<Rank>& ranks, const Settings& settings);

// Uniform routing of `tokens` rows [tokens, k].
std::vector<std::int32_t> uniform_ids(std::int64_t tokens, int experts, std::uint64_t seed);
MoeProblem transport_problem(const Settings& settings, std::int64_t ranks, std::int64_t tokens,
                             Device device);
// Dispatch and combine by themselves; prints a table, % of `link` GB/s. By messages, which wait on the
// host; then through peer windows.
void time_transport(std::vector<Rank>& ranks, const Settings& settings, double link);
void time_peer_transport(std::vector<Rank>& ranks, const Settings& settings, double link);
// What steps pay for experts that move meanwhile; prints a table.
void time_moves(std::vector<Rank>& ranks, const Settings& settings);

}  // namespace moesaic::bench
