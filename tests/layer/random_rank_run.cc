#include "layer/random_rank_run.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <stdexcept>
#include <utility>
#include <vector>

#include "layer/eplb_case.h"
#include "layer/random_rank_gpu.h"
#include "layer/rank_case.h"
#include "support/metrics.h"
#include "support/random_cases.h"

namespace moesaic::test {
namespace {

double rounding_of(DType dtype) {
  return dtype == DType::kBF16 ? 4e-3 : dtype == DType::kF16 ? 5e-4 : 0;
}

// One rank of a case.
class RankRun {
 public:
  RankRun(const RandomRanks& c, std::shared_ptr<Communicator> communicator)
      : c_(c),
        rank_(communicator->rank()),
        comm_(std::move(communicator)),
        rng_(c.seed),
        own_(c.seed * 64 + static_cast<std::uint64_t>(rank_)) {}

  // What is wrong, or empty. `refused`: the layer is one that ranks cannot have.
  std::string run(bool& refused) {
    FusedMoE::Options options = c_.options;
    const RandomWorld& world = c_.eras.front().world;
    options.parallel = world.parallel(rank_);
    options.ranks.communicator = comm_;
    options.device = c_.device_of(rank_);
    // The last function of a call that is the caller's.
    if (c_.options.transform.output) {
      options.transform.output = [this](ConstTensorView from, TensorView to) {
        return fails_ ? kFailure : c_.options.transform.output(from, to);
      };
    } else if (c_.failing >= 0) {
      options.capture = [this](ConstTensorView) {
        if (fails_) throw std::runtime_error(kFailure.message());
      };
    }
    Result<FusedMoE> made = FusedMoE::create(weights(options.parallel), options);
    // explain says what create does.
    const Result<LayerExplanation> explained = explain_layer(c_.tensors.spec, options);
    if (explained.ok() != made.ok()) {
      return fmt::format("explain: {}, create: {}", explained.status().to_string(),
                         made.status().to_string());
    }
    refused = made.status().code() == StatusCode::kUnsupported ||
              made.status().code() == StatusCode::kInvalidArgument;
    if (refused) return "";
    if (!made.ok()) return "create: " + made.status().to_string();
    FusedMoE layer = std::move(made).value();
    // Nobody makes or ends a layer while another's kernels wait.
    const Status all_made = comm_->barrier("made");
    if (!all_made.ok()) return "made: " + all_made.to_string();
    for (std::size_t i = 0; i < c_.eras.size(); ++i) {
      world_ = &c_.eras[i].world;
      if (i > 0 && !enter(layer)) return wrong_;
      for (const RankCall& call : c_.eras[i].calls) {
        step(layer, call);
        if (!wrong_.empty()) {
          static_cast<void>(comm_->abandon("a rank of the test ends here"));
          return wrong_;
        }
      }
    }
    if (c_.failing >= 0) {
      fail(layer, c_.eras.back().calls.back());
    } else if (const Status done = comm_->barrier("done"); !done.ok()) {
      wrong("done: " + done.to_string());
    }
    return wrong_;
  }

 private:
  MoeLayerWeights weights(const ParallelConfig& parallel) const {
    return c_.options.ranks.enable_eplb
               ? c_.tensors.weights()
               : rank_weights(c_.tensors, parallel, c_.options.ranks.cut_shared);
  }
  void wrong(std::string text) {
    if (wrong_.empty()) wrong_ = std::move(text);
  }

  // The layer in the next world. False: it cannot be in it, which all ranks say.
  bool enter(FusedMoE& layer) {
    const ParallelConfig parallel = world_->parallel(rank_);
    MoeLayerWeights w = weights(parallel);
    const Status status = layer.update_expert_map(
        {parallel, comm_, c_.options.ranks.num_redundant_experts}, *w.experts);
    past_.clear();
    if (status.ok()) return true;
    if (status.code() != StatusCode::kUnsupported &&
        status.code() != StatusCode::kInvalidArgument) {
      wrong("update_expert_map: " + status.to_string());
    }
    return false;
  }

  void step(FusedMoE& layer, const RankCall& call) {
    if (call.refusal != RankRefusal::kNone) refuse(layer, call);
    serve(layer, call);
    if (wrong_.empty() && enqueue_takes(c_, call)) enqueue(layer, call);
    if (!c_.options.ranks.enable_eplb || !wrong_.empty()) return;
    check_load(layer);
    if (!chance(rng_, 0.5)) return;
    const auto slots = std::ssize(layer.physical_to_logical());
    const auto wanted = random_map(rng_.next(), c_.tensors.spec.num_experts, slots);
    const bool measured = chance(rng_, 0.4);
    const Status begun = measured ? layer.begin_rebalance() : layer.begin_rearrange(wanted);
    if (!begun.ok()) return wrong("rearrange: " + begun.to_string());
    const std::int64_t most = rng_.integer(0, 4);
    for (bool done = false; !done && wrong_.empty();) {
      const Result<bool> moved = layer.continue_rearrange(most);
      if (!moved.ok()) return wrong("rearrange: " + moved.status().to_string());
      done = *moved;
      serve(layer, call);
    }
    if (!measured && layer.physical_to_logical() != wanted) wrong("not the map that was wanted");
    check_load(layer);
  }

  // A call with arguments of which one rank's are wrong.
  void refuse(const FusedMoE& layer, const RankCall& call) {
    const RankRows& rows = call.sets[static_cast<std::size_t>(world_->set_of(rank_))];
    Tensor output = Tensor::uninitialized(rows.output, rows.want.shape()).value();
    Tensor shared = Tensor::uninitialized(rows.output, rows.want.shape()).value();
    FusedMoE::Args a = rows.args(output.view(), shared.view());
    const Tensor ids = Tensor::zeros(DType::kF32, {3, 3}).value();
    if (rank_ == call.refuser) {
      switch (call.refusal) {
        case RankRefusal::kWidth:
          a.hidden_states.shape = Shape{rows.x.dim(0), rows.x.dim(1) + 1};
          break;
        case RankRefusal::kDType:
          a.output.dtype = DType::kI32;
          break;
        case RankRefusal::kNoMemory:
          a.hidden_states.shape = Shape{3, rows.x.dim(1)};
          a.hidden_states.data = nullptr;
          break;
        case RankRefusal::kIds:
          a.topk_ids = ids.view();
          break;
        case RankRefusal::kPadding:
          a.padding_mask = ids.view();
          break;
        default: {  // other rows than the ranks beside it
          const std::int64_t more = rows.x.dim(0) + 1;
          other_ = random_hidden(1, more, rows.x.dim(1), rows.x.dtype);
          other_output_ = Tensor::zeros(DType::kF32, {more, rows.x.dim(1)}).value();
          other_ids_ = Tensor::zeros(DType::kI32, {more}).value();
          a = {};
          a.hidden_states = other_.view();
          a.output = other_output_.view();
          a.input_ids = other_ids_.view();
        }
      }
    }
    const Status status = layer.forward(a);
    if (status.ok()) return wrong(fmt::format("rank {} was to refuse", call.refuser));
    if (!comm_->state().ok()) wrong("broken by a refusal: " + status.to_string());
  }

  // A failure in the middle of a call.
  void fail(const FusedMoE& layer, const RankCall& call) {
    const bool any = std::any_of(call.sets.begin(), call.sets.end(),
                                 [](const RankRows& r) { return r.x.dim(0) > 0; });
    if (!any) return;  // nobody calls a function
    const RankRows& rows = call.sets[static_cast<std::size_t>(world_->set_of(rank_))];
    Tensor output = Tensor::uninitialized(rows.output, rows.want.shape()).value();
    Tensor shared = Tensor::uninitialized(rows.output, rows.want.shape()).value();
    // It would end what others are still about.
    if (!comm_->barrier("before a failure").ok()) return wrong("not all came to the last call");
    fails_ = rank_ == c_.failing;
    const auto told = [&](const Status& status) {
      return status.message().find(kFailure.message()) != std::string::npos;
    };
    const Status status = layer.forward(rows.args(output.view(), shared.view()));
    // Whose own rows are complete learns of it in the next call.
    if (!told(status) && (fails_ || !status.ok())) wrong("fails: " + status.to_string());
    const Status next = layer.forward(rows.args(output.view(), shared.view()));
    if (!told(next)) wrong("after a failure: " + next.to_string());
  }

  void serve(const FusedMoE& layer, const RankCall& call) {
    const RankRows& rows = call.sets[static_cast<std::size_t>(world_->set_of(rank_))];
    Tensor output = Tensor::uninitialized(rows.output, rows.want.shape()).value();
    Tensor shared = Tensor::uninitialized(rows.output, rows.want.shape()).value();
    poison(output.view());
    poison(shared.view());
    FusedMoE::Args args = rows.args(output.view(), shared.view());
    if (c_.options.inplace && rows.output == rows.x.dtype && rows.x.is_contiguous()) {
      std::memcpy(output.data(), rows.x.data, static_cast<std::size_t>(output.bytes()));
      args.hidden_states = output.view();
    }
    Status status = layer.forward(args);
    if (status.ok()) status = layer.maybe_all_reduce(output.view());
    if (!status.ok()) return wrong("forward: " + status.to_string());
    look(layer, call, rows, output, shared);
  }

  // The same with memory of a GPU.
  void enqueue(const FusedMoE& layer, const RankCall& call) {
    const RankRows& rows = call.sets[static_cast<std::size_t>(world_->set_of(rank_))];
    const std::string why = enqueue_rows(layer, rows, c_.options.inplace, *comm_, rng_, own_,
                                         [&](const Tensor& output, const Tensor& shared) {
                                           look(layer, call, rows, output, shared);
                                         });
    if (!why.empty()) wrong("enqueue: " + why);
  }

  // At what a call wrote.
  void look(const FusedMoE& layer, const RankCall& call, const RankRows& rows, const Tensor& output,
            const Tensor& shared) {
    // Parts of rows are rounded by themselves.
    const bool parts = !layer.output_is_reduced();
    compare("output", output, rows.want, parts);
    if (rows.apart) compare("shared output", shared, rows.want_shared, false);
    past_.push_back(call.load);
  }

  void compare(const char* what, const Tensor& got, const Tensor& want, bool parts) {
    std::string why;
    const bool bits = c_.tolerance == 0 && (!parts || got.dtype() == DType::kF32);
    if (same_bits(got.view(), want.view(), &why)) return;
    // Identity experts of parts are added before the sum is.
    const bool identity = parts && c_.tensors.spec.routing.num_zero_experts > 0;
    if (bits && !identity) return wrong(fmt::format("{}: other bits: {}", what, why));
    const std::vector<double> a = to_doubles(got.view()), b = to_doubles(want.view());
    double size = 0;
    for (const double v : b) size += v * v;
    double apart = 0;
    for (std::size_t i = 0; i < a.size(); ++i) apart += (a[i] - b[i]) * (a[i] - b[i]);
    const double most = std::max(c_.tolerance, 1e-5) + (parts ? 2 : 1) * rounding_of(got.dtype());
    if (!(apart <= most * most * size)) {
      wrong(fmt::format("{}: relative error {} above {}: {}", what, std::sqrt(apart / size), most,
                        why));
    }
  }

  void check_load(const FusedMoE& layer) {
    const Result<std::vector<double>> load = layer.measured_load();
    if (!load.ok()) return wrong("measured_load: " + load.status().to_string());
    std::vector<double> want(load->size(), 0.0);
    const auto window = static_cast<std::size_t>(c_.options.ranks.eplb_window);
    for (std::size_t i = past_.size() - std::min(window, past_.size()); i < past_.size(); ++i) {
      for (std::size_t e = 0; e < want.size(); ++e) want[e] += past_[i][e];
    }
    if (*load != want) {
      wrong(fmt::format("load: got {}, need {}", fmt::join(*load, " "), fmt::join(want, " ")));
    }
  }

  const Status kFailure = Status(StatusCode::kInvalidArgument, "not today");
  bool fails_ = false;
  const RandomRanks& c_;
  int rank_;
  std::shared_ptr<Communicator> comm_;
  Rng rng_;  // the same on all ranks
  Rng own_;  // another on each
  const RandomWorld* world_ = nullptr;
  std::vector<std::vector<double>> past_;  // loads of calls that count
  Tensor other_, other_output_, other_ids_;
  std::string wrong_;
};

}  // namespace

std::string run_rank(const RandomRanks& c, std::shared_ptr<Communicator> communicator,
                     bool& refused) {
  return RankRun(c, std::move(communicator)).run(refused);
}

}  // namespace moesaic::test
