// Thousands of replays of a captured call, each with another routing, each compared with what the
// same routing gave outside a graph: whatever a replay leaves behind for the next one is a defect.
#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "case_on_device.h"
#include "slab_call.h"
#include "support/cuda_graph.h"
#include "support/random.h"

namespace moesaic {
namespace {

using test::Counts;
using test::CudaGraph;
using test::GpuCall;
using test::kGpu;
using test::on_gpu;
using test::on_host;
using test::problem_of;
using test::Rng;
using test::SlabCall;

// A scheme of each inner loop and each way of handing over GEMM1's rows.
constexpr const char* kReplayed[] = {"bf16",       "fp8-block", "fp8-channel", "int8",
                                     "mxfp4-bf16", "mxfp8",     "int4-g128",   "int4-fp8"};

// Replays of each scheme; MOESAIC_REPLAYS is another number.
std::int64_t replays() {
  const char* const text = std::getenv("MOESAIC_REPLAYS");
  return text != nullptr ? std::strtoll(text, nullptr, 10) : 10'000;
}

// Copies of outputs on their way to the host, compared when the ring is full.
class OutputRing {
 public:
  OutputRing(const CudaGraph& graph, std::int64_t bytes) : graph_(graph), bytes_(bytes) {
    EXPECT_EQ(cudaMallocHost(&host_, static_cast<std::size_t>(kSlots * bytes)), cudaSuccess);
  }
  OutputRing(const OutputRing&) = delete;
  OutputRing& operator=(const OutputRing&) = delete;
  ~OutputRing() { (void)cudaFreeHost(host_); }

  void take(const DeviceTensor& output, const Tensor& want) {
    EXPECT_EQ(cudaMemcpyAsync(static_cast<std::byte*>(host_) + std::ssize(wanted_) * bytes_,
                              output.data(), static_cast<std::size_t>(bytes_),
                              cudaMemcpyDeviceToHost, graph_.stream()),
              cudaSuccess);
    wanted_.push_back(&want);
    if (std::ssize(wanted_) == kSlots) compare();
  }
  std::int64_t compare() {
    graph_.wait();
    for (std::size_t i = 0; i < wanted_.size(); ++i) {
      const auto bytes = static_cast<std::size_t>(bytes_);
      const auto* const got = static_cast<const std::byte*>(host_) + i * bytes;
      wrong_ += std::memcmp(got, wanted_[i]->data(), bytes) == 0 ? 0 : 1;
    }
    wanted_.clear();
    return wrong_;
  }

 private:
  static constexpr std::int64_t kSlots = 32;
  const CudaGraph& graph_;
  std::int64_t bytes_, wrong_ = 0;
  void* host_ = nullptr;
  std::vector<const Tensor*> wanted_;
};

void copy_async(const CudaGraph& graph, DeviceTensor& to, const DeviceTensor& from) {
  EXPECT_EQ(cudaMemcpyAsync(to.data(), from.data(), static_cast<std::size_t>(to.bytes()),
                            cudaMemcpyDeviceToDevice, graph.stream()),
            cudaSuccess);
}
void poison_async(const CudaGraph& graph, DeviceTensor& t) {
  EXPECT_EQ(cudaMemsetAsync(t.data(), 0xFF, static_cast<std::size_t>(t.bytes()), graph.stream()),
            cudaSuccess);
}
void expect_all_different(const std::vector<Tensor>& outputs) {
  for (std::size_t i = 1; i < outputs.size(); ++i) {
    const auto bytes = static_cast<std::size_t>(outputs[i].bytes());
    EXPECT_NE(std::memcmp(outputs[i].data(), outputs[i - 1].data(), bytes), 0) << i;
  }
}

class CudaReplays : public testing::TestWithParam<const char*> {};
std::string name_of_replayed(const testing::TestParamInfo<const char*>& info) {
  std::string name = info.param;
  std::ranges::replace(name, '-', '_');
  return name;
}
INSTANTIATE_TEST_SUITE_P(Each, CudaReplays, testing::ValuesIn(kReplayed), name_of_replayed);

TEST_P(CudaReplays, OtherIdsAndWeights) {
  REQUIRE_HOPPER();
  constexpr std::uint64_t kRoutings = 16;
  // Halved bands, groups of 32 and of 128 rows.
  for (const std::int64_t tokens : {1, 12, 250}) {
    GpuCall call(
        test::make_case(81, problem_of(GetParam(), "silu", 256, 128, 6, 2), tokens, DType::kBF16),
        6);
    call.output = DeviceTensor::uninitialized(kGpu, DType::kBF16, {tokens, 256}).value();
    struct Routing {
      DeviceTensor ids, weights;
    };
    std::vector<Routing> routings;
    std::vector<Tensor> wanted;
    for (std::uint64_t seed = 0; seed < kRoutings; ++seed) {
      const test::OwnedRouting r =
          test::random_routing(seed, tokens, 6, 2, seed % 4 == 3 && tokens > 1 ? 0.6 : 0.0);
      routings.push_back({on_gpu(r.ids.view()), on_gpu(r.weights.view())});
      ASSERT_TRUE(copy_tensor(r.ids.view(), call.ids.view()).ok());
      ASSERT_TRUE(copy_tensor(r.weights.view(), call.weights.view()).ok());
      wanted.push_back(call.run(call.args()));
    }
    expect_all_different(wanted);
    CudaGraph graph;
    const ExpertsArgs a = call.args();
    graph.capture([&] { return call.experts->enqueue(graph.of_call(), a); });
    OutputRing ring(graph, call.output.bytes());
    Rng rng(82);
    for (std::int64_t i = 0; i < (replays() + 2) / 3; ++i) {
      const auto r = static_cast<std::size_t>(rng.integer(0, kRoutings - 1));
      copy_async(graph, call.ids, routings[r].ids);
      copy_async(graph, call.weights, routings[r].weights);
      poison_async(graph, call.output);
      graph.replay();
      ring.take(call.output, wanted[r]);
    }
    EXPECT_EQ(ring.compare(), 0) << "of " << (replays() + 2) / 3 << " with " << tokens;
  }
}

TEST_P(CudaReplays, OtherCountsOfSlabs) {
  REQUIRE_HOPPER();
  constexpr std::int32_t kSets = 16, kRows = 40;
  SlabCall call(
      test::make_case(83, problem_of(GetParam(), "silu", 256, 128, 6, 1), 6 * kRows, DType::kBF16),
      kRows);
  Rng rng(84);
  std::vector<DeviceTensor> sets;
  std::vector<Tensor> wanted;
  for (std::int32_t s = 0; s < kSets; ++s) {
    Counts n;
    for (std::int32_t e = 0; e < 6; ++e) {
      n.push_back(static_cast<std::int32_t>(rng.integer(s % 2 == 0 ? -20 : 0, kRows + 5)));
    }
    wanted.push_back(call.run(n));
    sets.push_back(on_gpu(call.counts.view()));
  }
  expect_all_different(wanted);
  CudaGraph graph;
  const ExpertsArgs a = call.args();
  graph.capture([&] { return call.batched->enqueue(graph.of_call(), a); });
  OutputRing ring(graph, call.output.bytes());
  for (std::int64_t i = 0; i < replays() / 2; ++i) {
    const auto s = static_cast<std::size_t>(rng.integer(0, kSets - 1));
    copy_async(graph, call.counts, sets[s]);
    poison_async(graph, call.output);
    graph.replay();
    ring.take(call.output, wanted[s]);
  }
  EXPECT_EQ(ring.compare(), 0) << "of " << replays() / 2;
}

}  // namespace
}  // namespace moesaic
