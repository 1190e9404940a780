// The loop of expert load balancing over all layers of a model, for an engine that wants it as one
// call in each of its steps. Read by: engines' step loops; a layer by itself is balanced with
// FusedMoE::begin_rebalance and continue_rearrange (fused_moe.h).
// Source: docs/spec/parallel.md section 6.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "moesaic/fused_moe.h"
#include "moesaic/interop/parallel.h"
#include "moesaic/status.h"

namespace moesaic {

// One schedule and one decision for many layers: after a number of steps all placements are computed
// together from the loads of that moment; then experts move a few in each step, layer after layer,
// and in a step at most one layer switches to its new weights and maps. The layers' forward calls
// may run between two steps and never wait for a move.
//
// All ranks make the same calls in the same order, with layers of the same options: every step is
// collective where the layers have a communicator. Not thread-safe; no forward call of the layers may
// run during one.
class EplbStepper {
 public:
  struct Options {
    EplbSchedule::Options schedule;
    int num_nodes = 1;               // as EplbShape
    std::int64_t max_transfers = 8;  // experts that may travel in one step
  };
  // The layers are not owned and outlive this object; a layer may serve without it, but is rearranged
  // and told whether to record by nobody else. kInvalidArgument: no layer or a null one, the values of
  // the schedule and of max_transfers, num_nodes that a layer's ranks do not divide by (EplbShape);
  // kUnsupported: a layer without load balancing, or on several ranks without a communicator (names it).
  static Result<EplbStepper> create(std::vector<FusedMoE*> layers, const Options& options);

  // What a step has done.
  struct Report {
    bool decided =
        false;  // new placements were computed, and `balancedness` (eplb.h) of all layers:
    double balancedness_before = 1,
           balancedness_after = 1;  // measured, and expected of the new ones
    std::ptrdiff_t switched = -1;   // index of the layer that has switched
    std::size_t left = 0;           // layers that still have to
  };
  // Once after each step of the model, also of a step in which this rank had no rows. A decision that
  // falls due while layers still move waits until they have. Layers whose placement stays, and those
  // without any measured load, are left alone. Errors: those of FusedMoE's functions, with the layer's
  // index; then no layer moves until the next decision, and every layer is whole, some in their new
  // placement and some in their old one.
  Result<Report> step();
  // Whether this step's forward calls record: what the layers have been told.
  bool recording() const { return schedule_.recording(); }

 private:
  EplbStepper(std::vector<FusedMoE*> layers, const Options& options, const EplbSchedule& schedule)
      : layers_(std::move(layers)), options_(options), schedule_(schedule) {}
  Status tell_recording();
  Status move(Report& report);
  Status decide(Report& report);

  struct Move {
    std::size_t layer = 0;
    std::vector<std::int32_t> wanted;
  };
  std::vector<FusedMoE*> layers_;
  Options options_;
  EplbSchedule schedule_;
  std::vector<Move> moves_;  // in reverse order: the last one is next
  bool begun_ = false;       // that one is in flight
};

}  // namespace moesaic
