// Calls of a layer whose ranks wait for each other on their GPUs, which they share where there are not
// enough, as threads or processes.
#pragma once

#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "layer/cuda_rank_case.h"
#include "support/cuda_device.h"
#include "support/random.h"

namespace moesaic::test {

inline constexpr std::int64_t kMostRows = 6;

// Ranks take the GPUs in turn.
int device_of_rank(int rank);
// Makes it the thread's current device.
void use_device_of_rank(int rank);
FusedMoE::Options options_of(const RankCombo& c, const std::shared_ptr<Communicator>& world);
// An engine for each rank, with whole experts, all_to_all.
RankCombo engines_of(int ranks, RankReduction reduction);

// A rank's rows on the current device, and a stream of its own. Memory is made and freed with it: while
// another rank's kernels wait for this one, neither may be done.
class RankCalls {
 public:
  RankCalls(std::uint64_t seed, std::int64_t hidden, int inputs)
      : hidden_(hidden),
        x_(test::random_hidden(seed, kMostRows * inputs, hidden)),
        in_(x_.data(), x_.bytes()),
        out_(x_.bytes() * 2),
        want_(static_cast<std::size_t>(x_.bytes() / 2)) {
    int current = 0;
    EXPECT_EQ(cudaGetDevice(&current), cudaSuccess);
    device_ = Device::cuda(current);
    EXPECT_EQ(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), cudaSuccess);
    // A stream has its queue from its first use on: now, not while another rank's kernel waits.
    poison();
    EXPECT_TRUE(finish());
  }
  RankCalls(const RankCalls&) = delete;
  RankCalls& operator=(const RankCalls&) = delete;
  ~RankCalls() {
    (void)cudaStreamSynchronize(stream_);
    for (cudaGraphExec_t exec : execs_) (void)cudaGraphExecDestroy(exec);
    (void)cudaStreamDestroy(stream_);
  }

  cudaStream_t stream() const { return stream_; }
  // Rows from those of an input on.
  FusedMoE::Args args_of(std::int64_t input, std::int64_t rows) const {
    const std::int64_t first = input * kMostRows * hidden_;
    FusedMoE::Args args;
    args.hidden_states = {in_.as<const std::byte>() + first * 2, DType::kBF16, Shape{rows, hidden_},
                          device_};
    args.output = {out_.as<std::byte>() + first * 4, DType::kF32, Shape{rows, hidden_}, device_};
    return args;
  }
  Status enqueue(const FusedMoE& layer, std::int64_t input, std::int64_t rows) {
    return layer.enqueue({stream_}, args_of(input, rows));
  }
  bool finish() const { return cudaStreamSynchronize(stream_) == cudaSuccess; }
  // A graph of that call.
  Status capture(const FusedMoE& layer, std::int64_t input, std::int64_t rows) {
    return capture(layer, args_of(input, rows));
  }
  Status capture(const FusedMoE& layer, const FusedMoE::Args& args) {
    EXPECT_EQ(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeThreadLocal), cudaSuccess);
    const Status status = layer.enqueue({stream_}, args);
    cudaGraph_t graph = nullptr;
    EXPECT_EQ(cudaStreamEndCapture(stream_, &graph), cudaSuccess);
    MOESAIC_RETURN_IF_ERROR(status);
    cudaGraphExec_t exec = nullptr;
    EXPECT_EQ(cudaGraphInstantiate(&exec, graph, 0), cudaSuccess);
    EXPECT_EQ(cudaGraphUpload(exec, stream_), cudaSuccess);
    EXPECT_TRUE(finish());
    (void)cudaGraphDestroy(graph);
    execs_.push_back(exec);
    return {};
  }
  void replay(std::size_t graph) {
    EXPECT_EQ(cudaGraphLaunch(execs_[graph], stream_), cudaSuccess);
  }
  void poison() {
    EXPECT_EQ(cudaMemsetAsync(out_.as<void>(), 0xFF, want_.size() * 4, stream_), cudaSuccess);
  }
  void keep() { out_.download(want_.data()); }
  // Whether the output of some rows of an input has the bits that were kept.
  bool same(std::int64_t input, std::int64_t rows) const {
    const auto first = static_cast<std::size_t>(input * kMostRows * hidden_);
    std::vector<float> got(want_.size());
    out_.download(got.data());
    return std::memcmp(got.data() + first, want_.data() + first,
                       static_cast<std::size_t>(rows * hidden_) * 4) == 0;
  }
  bool all_nan(std::int64_t input, std::int64_t rows) const {
    std::vector<float> got(want_.size());
    out_.download(got.data());
    const auto first = got.begin() + input * kMostRows * hidden_;
    return std::all_of(first, first + rows * hidden_, [](float v) { return std::isnan(v); });
  }

 private:
  std::int64_t hidden_;
  Device device_ = Device::cpu();
  Tensor x_;
  DeviceBytes in_, out_;
  std::vector<float> want_;
  cudaStream_t stream_ = nullptr;
  std::vector<cudaGraphExec_t> execs_;
};

// How many rows a rank has in a call: some none, all different from call to call.
std::int64_t rows_of(int rank, int call);

// Why ranks with a GPU each have no windows of NCCL here; empty: they have.
std::string why_no_nccl_windows();

// Some calls by both engines on the same rows; empty, or what is wrong. `fits`: whether the plan
// says so, which create() must too.
std::string compare_engines(const MakeRankLayer& make, FusedMoE::Options options, bool fits,
                            std::uint64_t seed, std::int64_t hidden);

// Graphs of three sizes on each rank, replayed in another order on each, with eager calls between
// and hosts that are up to sixteen calls ahead; then every result is what it was. Empty, or what is
// wrong.
std::string replay_in_any_order(const MakeRankLayer& make, FusedMoE::Options options,
                                std::int64_t hidden, int rounds);

}  // namespace moesaic::test
