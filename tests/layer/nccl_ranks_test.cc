// The layer over ranks with a GPU each, whose rows NCCL moves: equal to one GPU however it is
// spread. Skipped, with the reason, where there are fewer than two GPUs or no NCCL.
#include <gtest/gtest.h>

#include <cstdlib>
#include <cstring>
#include <functional>
#include <thread>

#include "layer/cuda_rank_case.h"
#include "moesaic/device.h"
#include "moesaic/device_tensor.h"
#include "support/metrics.h"
#include "support/source_folder.h"

namespace moesaic {
namespace {

using test::gpu_problem;
using test::RankCombo;
using test::RankProblem;
using test::runs_on_gpus;
using test::two_engines;

// One thread, one device and one NCCL communicator per rank.
class NcclRanks : public testing::Test {
 protected:
  void SetUp() override {
    const Status available = nccl_available();
    if (!available.ok()) GTEST_SKIP() << "no NCCL: " << available.message();
    devices_ = test::usable_devices();
    if (devices_.size() < 2) GTEST_SKIP() << "one GPU only";
  }
  int size() const { return static_cast<int>(devices_.size()); }
  // What went wrong on any rank.
  std::string run(const std::function<std::string(const std::shared_ptr<Communicator>&)>& body,
                  int timeout_ms = 60'000) {
    auto controls = make_in_process_communicators(size(), {.timeout_ms = timeout_ms}).value();
    std::vector<std::string> wrong(devices_.size());
    std::vector<std::thread> threads;
    for (std::size_t r = 0; r < devices_.size(); ++r) {
      threads.emplace_back([&, r, control = std::shared_ptr<Communicator>(std::move(controls[r]))] {
        auto made = make_nccl_communicator(control, devices_[r], {.timeout_ms = timeout_ms});
        wrong[r] = made.ok() ? body(std::shared_ptr<Communicator>(std::move(made).value()))
                             : made.status().to_string();
      });
    }
    for (std::thread& t : threads) t.join();
    std::string all;
    for (const std::string& w : wrong) all += w;
    return all;
  }
  std::vector<int> devices_;
};

TEST_F(NcclRanks, EveryCombinationEqualsOneGpu) {
  for (const test::Feature& f : test::rank_features()) {
    const test::LayerTensors tensors = test::make_tensors(51, f.spec());
    const RankProblem problem = gpu_problem(tensors, 19);
    EXPECT_EQ(run([&](const std::shared_ptr<Communicator>& c) {
                std::string wrong;
                for (const RankCombo& combo : test::rank_combos(size())) {
                  if (!runs_on_gpus(combo, tensors.spec)) continue;
                  RankProblem mine;
                  mine.make = problem.make;
                  mine.options = problem.options;
                  mine.top_k = problem.top_k;
                  mine.bound = test::bound_on_gpus(combo);
                  const auto copy = [](const Tensor& t) {
                    Tensor to = Tensor::uninitialized(t.dtype(), t.shape()).value();
                    std::memcpy(to.data(), t.data(), static_cast<std::size_t>(t.bytes()));
                    return to;
                  };
                  mine.x = copy(problem.x);
                  mine.want = copy(problem.want);
                  mine.ids = copy(problem.ids);
                  mine.options.device = Device::cuda(c->device());
                  const auto tokens = test::uneven_tokens(5, 19, combo.dp * combo.pcp);
                  const std::string bad = test::run_rank(mine, combo, tokens, c);
                  if (!bad.empty()) wrong += combo.name() + ": " + bad + "\n";
                }
                return wrong;
              }),
              "")
        << f.name;
  }
}

TEST_F(NcclRanks, GoldenCheckpointsEqualOneGpu) {
  for (const char* model : {"mini-qwen3-moe", "mini-deepseek-v3", "mini-gpt-oss"}) {
    const std::string folder = test::bundled_model(model);
    const Checkpoint checkpoint = Checkpoint::open(folder).value();
    const MoeLayerSpec spec = checkpoint.layers().front();
    const Tensor x = TensorFile::open(folder + "/golden.safetensors")
                         .value()
                         .read(spec.prefix + ".input")
                         .value();
    FusedMoE::Options options;
    options.device = Device::cuda(devices_[0]);
    const test::LayerRun one =
        test::run_layer(FusedMoE::from_checkpoint(checkpoint, spec.layer, options).value(), x);
    EXPECT_EQ(run([&](const std::shared_ptr<Communicator>& c) -> std::string {
                FusedMoE::Options o;
                o.device = Device::cuda(c->device());
                o.ranks.communicator = c;
                o.ranks.reduction = RankReduction::kPerSlot;
                o.parallel.ep_size = o.parallel.dp_size = c->size();
                o.parallel.ep_rank = o.parallel.dp_rank = c->rank();
                const auto layer = FusedMoE::from_checkpoint(checkpoint, spec.layer, o);
                if (!layer.ok()) return layer.status().to_string();
                const test::LayerRun got = test::run_layer(*layer, x);  // the same rows on all
                std::string why;
                return test::same_bits(got.output.view(), one.output.view(), &why) ? "" : why;
              }),
              "")
        << model;
  }
}

TEST_F(NcclRanks, ADeviceThatIsNotTheCommunicatorsIsRefused) {
  const test::LayerTensors tensors = test::make_tensors(52, test::deepseek_like());
  EXPECT_EQ(run([&](const std::shared_ptr<Communicator>& c) -> std::string {
              FusedMoE::Options o = two_engines(c->rank(), c);
              o.parallel.ep_size = o.parallel.dp_size = c->size();
              // All ranks on the first GPU.
              const Status status = test::maker_of(tensors)(o).status();
              const bool mine = c->device() == 0;
              const char* want = mine ? "refused" : "messages lie on cuda:";
              return status.message().find(want) != std::string::npos ? "" : status.to_string();
            }),
            "");
}

// What stays a part: between devices, the bits of the sum through host memory.
TEST_F(NcclRanks, PartsAreAddedUpOnTheDevices) {
  const test::LayerTensors tensors = test::make_tensors(54, test::small_spec());
  EXPECT_EQ(run([&](const std::shared_ptr<Communicator>& c) -> std::string {
              FusedMoE::Options o = test::on_gpu(4);
              o.device = Device::cuda(c->device());
              o.ranks.communicator = c;
              o.ranks.reduce_results = false;
              o.parallel.tp_size = c->size();
              o.parallel.tp_rank = c->rank();
              const auto layer = test::maker_of(tensors)(o);
              if (!layer.ok()) return layer.status().to_string();
              for (const DType dtype : {DType::kF32, DType::kBF16}) {
                const auto seed = 55 + static_cast<std::uint64_t>(c->rank());
                Tensor host = test::random_hidden(seed, 11, 64, dtype);
                DeviceTensor x = DeviceTensor::copy_of(host.view(), o.device).value();
                const Status on_device = layer->maybe_all_reduce(x.view());
                if (!on_device.ok()) return on_device.to_string();
                const Status on_host = layer->maybe_all_reduce(host.view());
                if (!on_host.ok()) return on_host.to_string();
                Tensor got = Tensor::zeros(dtype, host.shape()).value();
                const Status copied = copy_tensor(x.view(), got.view());
                if (!copied.ok()) return copied.to_string();
                std::string why;
                if (!test::same_bits(got.view(), host.view(), &why)) return why;
              }
              return "";
            }),
            "");
}

TEST_F(NcclRanks, ALostRankIsReported) {
  const test::LayerTensors tensors = test::make_tensors(53, test::deepseek_like());
  EXPECT_EQ(run(
                [&](const std::shared_ptr<Communicator>& c) -> std::string {
                  FusedMoE::Options o = two_engines(c->rank(), c);
                  o.device = Device::cuda(c->device());
                  o.parallel.ep_size = o.parallel.dp_size = c->size();
                  const auto layer = test::maker_of(tensors)(o);
                  if (!layer.ok()) return layer.status().to_string();
                  const Tensor x = test::random_hidden(3, 4, 64);
                  Tensor y = Tensor::zeros(DType::kF32, x.shape()).value();
                  const Status first = layer->forward(x.view(), y.view());
                  if (!first.ok()) return first.to_string();
                  if (c->rank() == 1) return "";
                  const Status lost = layer->forward(x.view(), y.view());
                  return lost.code() == StatusCode::kDevice ? "" : "no error";
                },
                5000),
            "");
}

}  // namespace
}  // namespace moesaic
