#include "moesaic/interop/eplb_stepper.h"

#include <fmt/format.h>

#include <algorithm>
#include <new>

#include "core/fault.h"
#include "core/refusal.h"
#include "moesaic/eplb.h"

namespace moesaic {

Result<EplbStepper> EplbStepper::create(std::vector<FusedMoE*> layers, const Options& options) {
  MOESAIC_ASSIGN_OR_RETURN(const EplbSchedule schedule, EplbSchedule::create(options.schedule));
  if (options.max_transfers < 1) {
    return invalid(fmt::format("max_transfers: got {}, need a number >= 1", options.max_transfers));
  }
  if (options.num_nodes < 1) {
    return invalid(fmt::format("num_nodes: got {}, need a number >= 1", options.num_nodes));
  }
  if (layers.empty()) return invalid("layers: got none, need one or more");
  for (std::size_t i = 0; i < layers.size(); ++i) {
    if (layers[i] == nullptr) return invalid(fmt::format("layers[{}]: got null, need a layer", i));
  }
  EplbStepper stepper(std::move(layers), options, schedule);
  MOESAIC_RETURN_IF_ERROR(stepper.tell_recording());
  for (std::size_t i = 0; i < stepper.layers_.size(); ++i) {
    const Result<std::vector<double>> load = stepper.layers_[i]->measured_load();
    if (!load.ok()) return load.status().with_context(fmt::format("layers[{}]", i));
    if (MOESAIC_FAULT(eplb_stepper_finds_bad_nodes_late)) continue;
    // Not thousands of steps later, at the first decision.
    const auto planned = stepper.layers_[i]->plan_rebalance(*load, options.num_nodes);
    if (!planned.ok()) return planned.status().with_context(fmt::format("layers[{}]", i));
  }
  return stepper;
}

Status EplbStepper::tell_recording() {
  for (std::size_t i = 0; i < layers_.size(); ++i) {
    MOESAIC_RETURN_IF_ERROR(layers_[i]
                                ->set_eplb_recording(schedule_.recording())
                                .with_context(fmt::format("layers[{}]", i)));
  }
  return {};
}

Status EplbStepper::decide(Report& report) {
  std::vector<double> before, after;
  std::vector<Move> moves;
  for (std::size_t i = 0; i < layers_.size(); ++i) {
    const FusedMoE& layer = *layers_[i];
    const int ranks = layer.parallel().ep_size;
    MOESAIC_ASSIGN_OR_RETURN(const std::vector<double> load, layer.measured_load());
    MOESAIC_ASSIGN_OR_RETURN(std::vector<std::int32_t> wanted,
                             layer.plan_rebalance(load, options_.num_nodes));
    const std::vector<std::int32_t> current = layer.physical_to_logical();
    MOESAIC_ASSIGN_OR_RETURN(const std::vector<double> now, rank_loads(load, current, ranks));
    MOESAIC_ASSIGN_OR_RETURN(const std::vector<double> then, rank_loads(load, wanted, ranks));
    before.insert(before.end(), now.begin(), now.end());
    after.insert(after.end(), then.begin(), then.end());
    if (wanted != current) moves.push_back({i, std::move(wanted)});
  }
  const int ranks = layers_.front()->parallel().ep_size;
  report.decided = true;
  report.balancedness_before = balancedness(before, ranks);
  report.balancedness_after = balancedness(after, ranks);
  moves_.assign(std::make_move_iterator(moves.rbegin()), std::make_move_iterator(moves.rend()));
  if (MOESAIC_FAULT(eplb_stepper_moves_first_layer_only) && !moves_.empty()) {
    moves_.erase(moves_.begin(), moves_.end() - 1);
  }
  return {};
}

Status EplbStepper::move(Report& report) {
  if (moves_.empty()) return {};
  Move& next = moves_.back();
  FusedMoE& layer = *layers_[next.layer];
  const auto in_layer = [&](const Status& status) {
    return status.with_context(fmt::format("layers[{}]", next.layer));
  };
  if (!begun_) MOESAIC_RETURN_IF_ERROR(in_layer(layer.begin_rearrange(next.wanted)));
  begun_ = true;
  const Result<bool> done = layer.continue_rearrange(options_.max_transfers);
  if (!done.ok()) return in_layer(done.status());
  if (!*done) return {};
  report.switched = static_cast<std::ptrdiff_t>(next.layer);
  moves_.pop_back();
  begun_ = false;
  return {};
}

Result<EplbStepper::Report> EplbStepper::step() {
  try {
    Report report;
    Status status = move(report);
    // What has moved in this step was in flight during it.
    if (status.ok() && schedule_.advance(!moves_.empty())) status = decide(report);
    if (!status.ok()) {
      moves_.clear();
      begun_ = false;
      return status;
    }
    report.left = moves_.size();
    MOESAIC_RETURN_IF_ERROR(tell_recording());
    return report;
  } catch (const std::bad_alloc&) {
    return Status(StatusCode::kOutOfMemory, "eplb: cannot allocate the placements");
  }
}

}  // namespace moesaic
