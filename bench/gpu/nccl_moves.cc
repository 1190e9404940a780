// What serving pays for experts that move: steps of many calls of a layer, as of a model's layers, with
// a rearrangement under way.
#include <algorithm>

#include "moesaic/fused_moe.h"
#include "nccl_layer.h"
#include "nccl_ranks.h"

namespace moesaic::bench {
namespace {

// DeepSeek-V3 has 58 layers with experts.
constexpr int kStepCalls = 58;
constexpr int kSteps = 30;  // alone, before and after the others

// The calls of a step on one rank: a graph where the host need not wait in them.
class Step {
 public:
  Step(Rank& r, const FusedMoE& layer, std::int64_t tokens, bool captured)
      : rank_(r), layer_(layer), call_(random_rows(tokens, kHidden, 1.0, 7)) {
    must(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "stream");
    enqueue();
    must(cudaStreamSynchronize(stream_), "first call");
    must(rank_.control->barrier("first call"), "barrier");
    if (!captured) return;
    must(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeThreadLocal), "capture");
    for (int i = 0; i < kStepCalls; ++i) enqueue();
    cudaGraph_t graph = nullptr;
    must(cudaStreamEndCapture(stream_, &graph), "capture");
    must(cudaGraphInstantiate(&exec_, graph, 0), "graph");
    must(cudaGraphUpload(exec_, stream_), "graph");
    must(cudaGraphDestroy(graph), "graph");
    must(cudaStreamSynchronize(stream_), "graph");
    must(rank_.control->barrier("captured"), "barrier");
  }
  Step(const Step&) = delete;
  Step& operator=(const Step&) = delete;
  ~Step() {
    if (exec_ != nullptr) (void)cudaGraphExecDestroy(exec_);
    (void)cudaStreamDestroy(stream_);
  }
  void run() {
    if (exec_ != nullptr) {
      must(cudaGraphLaunch(exec_, stream_), "step");
    } else {
      for (int i = 0; i < kStepCalls; ++i) enqueue();
    }
    must(cudaStreamSynchronize(stream_), "step");
    must(layer_.health(), "step");
  }

 private:
  void enqueue() { call_.enqueue(layer_, stream_); }

  Rank& rank_;
  const FusedMoE& layer_;
  LayerCall call_;
  cudaStream_t stream_ = nullptr;
  cudaGraphExec_t exec_ = nullptr;
};

// Of every pair of ranks, so many slots exchange their experts.
std::vector<std::int32_t> exchanged(std::vector<std::int32_t> map, std::size_t ranks,
                                    std::size_t slots) {
  const std::size_t each = map.size() / ranks;
  for (std::size_t r = 0; r + 1 < ranks; r += 2) {
    for (std::size_t s = 0; s < slots; ++s) std::swap(map[r * each + s], map[(r + 1) * each + s]);
  }
  return map;
}

double median(std::vector<double> values) {
  const auto middle = values.begin() + std::ssize(values) / 2;
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

struct Cost {
  double step = 0, begin = 0;  // us: a step by itself; the begin of the moves
  std::vector<double> extra;   // us of all moves, of each rearrangement
};

// There and back again, `times` times in all: steps by themselves differ so much from one time to the
// next that one rearrangement says little. Each is compared with the steps around it.
Cost time_one(Rank& r, const Settings& s, std::size_t ranks, RankEngine engine, std::int64_t tokens,
              std::size_t slots, int times) {
  FusedMoE::Options o;
  o.max_tokens = tokens;
  o.device = Device::cuda(r.device);
  o.parallel.ep_size = o.parallel.dp_size = static_cast<int>(ranks);
  o.parallel.ep_rank = o.parallel.dp_rank = r.index;
  o.ranks.communicator = r.nccl;
  o.ranks.engine = engine;
  o.ranks.reduction = RankReduction::kPerRank;
  o.ranks.combine_dtype = DType::kBF16;
  o.ranks.enable_eplb = true;
  o.ranks.num_redundant_experts = static_cast<std::int64_t>(ranks);
  FusedMoE layer = must(FusedMoE::create(layer_weights(s, {}), o), "layer");
  const bool captured = engine == RankEngine::kPeerWindows;
  Step step(r, layer, tokens, captured);
  Cost cost;
  const auto steps_alone = [&] {
    std::vector<double> alone;
    for (int i = 0; i < kSteps; ++i) {
      const auto begin = Clock::now();
      step.run();
      alone.push_back(us_since(begin));
    }
    must(r.control->barrier("steps"), "barrier");
    return alone;
  };
  std::vector<double> before = steps_alone();
  for (int time = 0; time < times; ++time) {
    const auto begin = Clock::now();
    must(layer.begin_rearrange(exchanged(layer.physical_to_logical(), ranks, slots)), "begin");
    cost.begin = us_since(begin);
    double steps = 0;
    for (bool done = false; !done; ++steps) {
      done = must(layer.continue_rearrange(1), "move");
      step.run();
    }
    const double all = us_since(begin);
    must(r.control->barrier("moved"), "barrier");
    const std::vector<double> after = steps_alone();
    std::vector<double> around = before;
    around.insert(around.end(), after.begin(), after.end());
    cost.step = median(around);
    cost.extra.push_back(all - steps * cost.step);
    before = after;
  }
  return cost;
}

}  // namespace

void time_moves(std::vector<Rank>& ranks, const Settings& s) {
  constexpr std::size_t kSlots = 8;
  prepare_layer_weights();
  constexpr int kTimes = 7;
  const auto moved = static_cast<double>(ranks.size() / 2 * 2 * kSlots);
  fmt::print(
      "\nExperts that move while a layer serves, one of all ranks a step of {} calls (DeepSeek-V3 "
      "in "
      "FP8 blocks, {} experts change their rank, {} times from GPU to GPU: median, least, most); "
      "host "
      "time of the slowest rank\n"
      "| GPUs | tokens per GPU | experts move | step us | begin us | in all, us an expert | of a "
      "step "
      "|\n|--:|--:|---|--:|--:|--:|--:|\n",
      kStepCalls, moved, kTimes);
  for (const std::int64_t tokens : s.tokens) {
    for (const RankEngine engine : {RankEngine::kPeerWindows, RankEngine::kMessages}) {
      const bool peers = engine == RankEngine::kPeerWindows;
      if (!peers && s.no_messages) continue;
      std::vector<Cost> costs(ranks.size());
      on_ranks(ranks, [&](Rank& r) {
        costs[static_cast<std::size_t>(r.index)] =
            time_one(r, s, ranks.size(), engine, tokens, kSlots, peers ? kTimes : 1);
      });
      Cost worst = costs[0];
      for (const Cost& c : costs) {
        worst.step = std::max(worst.step, c.step);
        worst.begin = std::max(worst.begin, c.begin);
        for (std::size_t i = 0; i < c.extra.size(); ++i) {
          worst.extra[i] = std::max(worst.extra[i], c.extra[i]);
        }
      }
      std::sort(worst.extra.begin(), worst.extra.end());
      const auto share = [&](double extra) { return 100 * extra / moved / worst.step; };
      const double middle = median(worst.extra);
      fmt::print("| {} | {} | {} | {:.0f} | {:.0f} | {:.0f} | {:.2f} % ({:.2f} to {:.2f}) |\n",
                 ranks.size(), tokens, peers ? "from GPU to GPU" : "through the host", worst.step,
                 worst.begin, middle / moved, share(middle), share(worst.extra.front()),
                 share(worst.extra.back()));
      std::fflush(stdout);
    }
  }
}

}  // namespace moesaic::bench
