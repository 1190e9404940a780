// Dispatch and combine through peer windows, in CUDA graphs, beside the bandwidth of the link.
#include <algorithm>
#include <cstring>
#include <random>

#include "moesaic/activation.h"
#include "moesaic/parallel.h"
#include "moesaic/quant.h"
#include "nccl_ranks.h"
#include "prepare_finalize/sm90/peer_all_to_all.h"

namespace moesaic::bench {
namespace {

using cuda::CudaAllToAll;
using cuda::CudaPeerAllToAll;

// Calls in a graph, of which the first ones wait for ranks that began later.
constexpr int kCalls = 24, kFirst = 4;

std::vector<std::uint16_t> random_rows(std::int64_t tokens, std::uint64_t seed) {
  std::mt19937_64 rng(seed);
  std::vector<std::uint16_t> rows(static_cast<std::size_t>(tokens * kHidden));
  // Numbers between 1/4 and 4, of both signs.
  for (std::uint16_t& v : rows) {
    v = static_cast<std::uint16_t>((rng() & 0x81FF) + 0x3E80);
  }
  return rows;
}

// One rank's part: calls that take turns in two graphs, with and without the events between.
class PeerRank {
 public:
  PeerRank(Rank& r, const Settings& s, std::int64_t ranks, std::int64_t tokens, bool fp8)
      : tokens_(tokens),
        device_(Device::cuda(r.device)),
        ids_host_(uniform_ids(tokens, s.experts, 7 + static_cast<std::uint64_t>(r.index))),
        x_(random_rows(tokens, 11 + static_cast<std::uint64_t>(r.index))),
        ids_(ids_host_),
        weights_(std::vector<float>(static_cast<std::size_t>(tokens * kTopK), 0.1F)),
        sum_(static_cast<std::size_t>(tokens * kHidden * 4)),
        rows_(random_rows(ranks * tokens * kTopK, 13 + static_cast<std::uint64_t>(r.index))) {
    AllToAllOptions o;
    o.parallel.ep_size = o.parallel.dp_size = static_cast<int>(ranks);
    o.parallel.ep_rank = o.parallel.dp_rank = r.index;
    o.max_tokens_per_rank = tokens;
    o.quantize_before_dispatch = fp8;
    const std::vector<std::int32_t> map = must(make_expert_map(s.experts, o.parallel), "experts");
    map_ = std::make_unique<DeviceArray>(map);
    transport_ =
        must(CudaPeerAllToAll::create(transport_problem(s, ranks, tokens, device_), r.control, o,
                                      {CudaAllToAll::Answer::Form::kPartial, DType::kBF16},
                                      /*brings_slots=*/true),
             "peer windows");
    must(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "stream");
    for (cudaEvent_t& e : events_) must(cudaEventCreate(&e), "event");
    must(cudaMemsetAsync(sum_.as(), 0, 16, stream_), "stream");
    must(cudaStreamSynchronize(stream_), "stream");
    must(r.control->barrier("made"), "barrier");
    call(false, 0);
    finish();
    must(r.control->barrier("first call"), "barrier");
    timed_ = capture(true);
    plain_ = capture(false);
    must(r.control->barrier("captured"), "barrier");
  }
  PeerRank(const PeerRank&) = delete;
  PeerRank& operator=(const PeerRank&) = delete;
  ~PeerRank() {
    (void)cudaGraphExecDestroy(timed_);
    (void)cudaGraphExecDestroy(plain_);
    for (cudaEvent_t e : events_) (void)cudaEventDestroy(e);
    (void)cudaStreamDestroy(stream_);
  }

  const std::vector<std::int32_t>& ids() const { return ids_host_; }
  // Microseconds of a call, of its dispatch and of its combine: medians of a replay.
  struct Times {
    double call = 0, dispatch = 0, answer = 0, finish = 0;
  };
  Times replay() {
    must(cudaGraphLaunch(plain_, stream_), "replay");
    must(cudaGraphLaunch(timed_, stream_), "replay");
    finish();
    std::vector<double> there, back, sum;
    for (std::size_t i = kFirst; i < kCalls; ++i) {
      there.push_back(us(3 * i, 3 * i + 1));
      back.push_back(us(3 * i + 1, 3 * i + 2));
      sum.push_back(us(3 * i + 2, 3 * i + 3));
    }
    return {us(kWhole, kWhole + 1) / (kCalls - kFirst), median(there), median(back), median(sum)};
  }
  static double median(std::vector<double>& of) {
    std::sort(of.begin(), of.end());
    return of[of.size() / 2];
  }

 private:
  static constexpr std::size_t kWhole = 3 * kCalls + 1;  // events of the graph without the others

  TensorView view(const DeviceArray& a, DType dtype, std::int64_t columns) const {
    return {a.as<std::byte>(), dtype, {tokens_, columns}, device_};
  }
  void mark(std::size_t event) {
    must(cudaEventRecordWithFlags(events_[event], stream_, cudaEventRecordExternal), "event");
  }
  double us(std::size_t from, std::size_t to) const {
    float ms = 0;
    must(cudaEventElapsedTime(&ms, events_[from], events_[to]), "event");
    return 1e3 * static_cast<double>(ms);
  }
  void call(bool timed, std::size_t i) {
    PrepareArgs rows;
    rows.hidden_states = view(x_, DType::kBF16, kHidden);
    rows.topk_ids = view(ids_, DType::kI32, kTopK);
    rows.topk_weights = view(weights_, DType::kF32, kTopK);
    rows.stream = {stream_};
    must(transport_->prepare(rows).status(), "dispatch");
    if (timed) mark(3 * i + 1);
    transport_->take_slots({rows_.as<void>()}, map_->as<std::int32_t>());
    must(transport_->answer({stream_}), "combine");
    if (timed) mark(3 * i + 2);
    cuda::SumEpilogue to;
    to.output = sum_.as<void>();
    to.output_f32 = false;  // as layers mostly do
    must(transport_->finish({stream_}, to), "combine");
    if (timed) mark(3 * i + 3);
  }
  cudaGraphExec_t capture(bool timed) {
    must(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeThreadLocal), "capture");
    if (timed) mark(0);
    for (std::size_t i = 0; i < kCalls; ++i) {
      if (!timed && i == kFirst) mark(kWhole);
      call(timed, i);
    }
    if (!timed) mark(kWhole + 1);
    cudaGraph_t graph = nullptr;
    must(cudaStreamEndCapture(stream_, &graph), "capture");
    cudaGraphExec_t exec = nullptr;
    must(cudaGraphInstantiate(&exec, graph, 0), "graph");
    must(cudaGraphUpload(exec, stream_), "graph");
    must(cudaGraphDestroy(graph), "graph");
    finish();
    return exec;
  }
  void finish() {
    must(cudaStreamSynchronize(stream_), "calls");
    must(transport_->health(), "calls");
  }

  std::int64_t tokens_;
  Device device_;
  std::vector<std::int32_t> ids_host_;
  DeviceArray x_, ids_, weights_, sum_, rows_;
  std::unique_ptr<DeviceArray> map_;
  std::unique_ptr<CudaPeerAllToAll> transport_;
  cudaStream_t stream_ = nullptr;
  cudaEvent_t events_[3 * kCalls + 3] = {};
  cudaGraphExec_t timed_ = nullptr, plain_ = nullptr;
};

// Rows that rank `from` sends to others.
std::int64_t rows_to_others(const Settings& s, const std::vector<std::int32_t>& ids,
                            std::int64_t ranks, int from) {
  std::int64_t rows = 0;
  for (std::size_t t = 0; t < ids.size(); t += kTopK) {
    std::vector<bool> to(static_cast<std::size_t>(ranks));
    for (std::size_t j = 0; j < kTopK; ++j) {
      to[static_cast<std::size_t>(ids[t + j] * ranks / s.experts)] = true;
    }
    to[static_cast<std::size_t>(from)] = false;
    rows += std::count(to.begin(), to.end(), true);
  }
  return rows;
}

void time_peer_one(std::vector<Rank>& ranks, const Settings& s, std::int64_t tokens, bool fp8,
                   double link) {
  const auto n = static_cast<std::int64_t>(ranks.size());
  std::vector<PeerRank::Times> times(ranks.size());
  std::vector<std::int64_t> rows(ranks.size());
  on_ranks(ranks, [&](Rank& r) {
    const auto i = static_cast<std::size_t>(r.index);
    PeerRank rank(r, s, n, tokens, fp8);
    rows[i] = rows_to_others(s, rank.ids(), n, r.index);
    std::vector<double> call, dispatch, answer, finish;
    for (int repeat = 0; repeat < s.repeats; ++repeat) {
      must(r.control->barrier("replay"), "barrier");
      const PeerRank::Times t = rank.replay();
      call.push_back(t.call);
      dispatch.push_back(t.dispatch);
      answer.push_back(t.answer);
      finish.push_back(t.finish);
    }
    times[i] = {PeerRank::median(call), PeerRank::median(dispatch), PeerRank::median(answer),
                PeerRank::median(finish)};
    must(r.control->barrier("done"), "barrier");
  });
  PeerRank::Times worst;
  for (const PeerRank::Times& t : times) {
    worst.call = std::max(worst.call, t.call);
    worst.dispatch = std::max(worst.dispatch, t.dispatch);
    worst.answer = std::max(worst.answer, t.answer);
    worst.finish = std::max(worst.finish, t.finish);
  }
  const auto most = static_cast<double>(*std::max_element(rows.begin(), rows.end()));
  const double all_ids = static_cast<double>((n - 1) * tokens * kTopK * 8);
  const double there = most * (fp8 ? kHidden + kHidden / 32 : 2 * kHidden) + all_ids;
  const double back = most * 2 * kHidden;
  const auto gbps = [](double bytes, double us) { return bytes / us * 1e-3; };
  fmt::print(
      "| {} | {} | {} | {:.2f} | {:.1f} | {:.0f} | {:.0f} % | {:.2f} | {:.1f} | {:.0f} | {:.0f} % "
      "| "
      "{:.1f} | {:.1f} |\n",
      n, tokens, fp8 ? "fp8" : "bf16", there * 1e-6, worst.dispatch, gbps(there, worst.dispatch),
      100 * gbps(there, worst.dispatch) / link, back * 1e-6, worst.answer, gbps(back, worst.answer),
      100 * gbps(back, worst.answer) / link, worst.finish, worst.call);
  std::fflush(stdout);
}

}  // namespace

void time_peer_transport(std::vector<Rank>& ranks, const Settings& s, double link) {
  fmt::print(
      "\nPeer windows, in graphs of {} calls; E {}, k {}, H {}, uniform routing; dispatch: "
      "quantisation, rows, words; answer: sums of slots in bf16 to where rows came from; sum: "
      "wait, "
      "sum in fp32, rounded to bf16; medians of {} replays, of the slowest rank; call: all, "
      "without events between; "
      "% "
      "of {:.0f} GB/s\n"
      "| GPUs | tokens per GPU | rows | dispatch MB out | us | GB/s | of the link | answer MB out "
      "| us | GB/s | of the link | sum us | call us |\n"
      "|--:|--:|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|\n",
      kCalls, s.experts, kTopK, kHidden, s.repeats, link);
  for (const std::int64_t tokens : s.tokens) {
    for (const bool fp8 : {true, false}) time_peer_one(ranks, s, tokens, fp8, link);
  }
}

}  // namespace moesaic::bench
