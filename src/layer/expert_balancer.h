// Expert load balancing of one layer: which physical slot holds which expert, what was measured,
// and a rearrangement on its way. Experts travel as rows of the backend's own arrays
// (Experts::expert_parts) into a buffer with room for the slots that change, while the layer serves;
// when every rank has all of its own, all write them into their slots and take the new maps in the
// same step. Source: docs/spec/parallel.md sections 6 and 8.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <vector>

#include "layer/slot_memory.h"
#include "moesaic/communicator.h"
#include "moesaic/eplb.h"
#include "moesaic/experts.h"
#include "moesaic/router.h"

namespace moesaic::layer {

// Where slots are: rank r has slots r * num_physical / ranks to (r + 1) * num_physical / ranks - 1.
struct SlotShape {
  std::int64_t num_logical = 0, num_physical = 0;
  int ranks = 1, rank = 0;
};

// What a layer is refused for before it has any weights: kInvalidArgument unless the slots are a
// multiple of the ranks and the window has a step, kLimitExceeded for more than 2^32 loads in it.
Status check_slots(const SlotShape& shape, std::int64_t window);

class ExpertBalancer {
 public:
  // Experts are in their first places (initial_physical_to_logical). Errors of check_slots.
  //   memory  where slots are not in the host's: it maps and counts in the calls
  static Result<std::unique_ptr<ExpertBalancer>> create(
      const SlotShape& shape, std::int64_t window, std::unique_ptr<SlotMemory> memory = nullptr);

  // Logical experts of this rank's slots.
  std::span<const std::int32_t> local_experts() const;
  std::span<const std::int32_t> physical_to_logical() const { return maps_.physical_to_logical; }

  // A step of the layer on the host's tensors: begin, map every chunk of rows, end. What a call that
  // failed has counted is forgotten (with a `memory` it is not, and the layer takes no more calls).
  void begin_step();
  // ids [tokens, k] of the step's next rows: logical to physical, in place; counts the load. -1 stays
  // and counts nowhere.
  Status map_ids(std::int32_t* ids, std::int64_t tokens, std::int64_t k);
  Status end_step();
  Status set_recording(bool record);
  bool recording() const { return record_; }
  // Measured load of each expert in the window, on all ranks of `world` (null: this one); each row
  // counted once. Collective. The caller's counters are those of now.
  Result<std::vector<double>> load(Communicator* world, int replicas);

  // Maps of the caller's making: the checks of FusedMoE::set_eplb_state, which change nothing, then
  // the copy, which on the host cannot fail.
  Result<ExpertMaps> check_state(const EplbState& state,
                                 std::span<const std::int32_t> physical_to_logical) const;
  Status set_state(ExpertMaps maps, const EplbState& state);

  bool in_flight() const { return flight_ != nullptr; }
  void drop() { end_flight(); }
  // Starts to move experts so that slot p holds wanted[p]. kInvalidArgument when one is in flight,
  // for another number of slots, or for an expert without a slot.
  Status begin(std::span<const std::int32_t> wanted);
  // After begin() on all ranks; collective where there is a `world`. Finds the experts that move a place
  // on the way: in device memory, if all ranks can have it there, else on the host.
  Status make_room(Communicator* world, std::span<const ExpertPart> parts);
  // Moves up to max_transfers experts (of all ranks together) between the slots' rows `parts`, which
  // are those of begin's day; collective where there is a `world`, though ranks do not wait for each
  // other in calls behind the first that leave experts in the plan of a stage. True when in this very
  // call the new weights and maps have come into force on all ranks. A failure ends the rearrangement;
  // weights and maps stay as they are.
  Result<bool> advance(Communicator* world, std::int64_t max_transfers,
                       std::span<const ExpertPart> parts);

 private:
  struct Flight {
    ExpertMaps maps;
    std::vector<ExpertTransfer> plan;
    std::size_t next = 0;
    bool agreed = false;  // ranks move as many experts in a call
    bool staged = false;
    // Of each rank, the experts that its slots are to change to, each once, by slot: their places.
    std::vector<std::vector<std::int32_t>> arriving;
    // Where experts wait for the switch: there, or their rows, one after the other, here.
    std::unique_ptr<SlotStage> stage;
    std::map<std::int32_t, std::vector<std::byte>> images;
  };
  ExpertBalancer() = default;
  std::span<const std::int32_t> local_part(std::span<const std::int32_t> map) const;
  // The next transfers, through the stage or by messages. The end of what is moved now.
  std::size_t next_end(std::int64_t max_transfers) const;
  Status send_some(std::int64_t max_transfers, std::span<const ExpertPart> parts);
  Status move_some(Communicator& world, std::int64_t max_transfers,
                   std::span<const ExpertPart> parts);
  // What only changes its slot on this rank.
  Status stage_local(std::span<const ExpertPart> parts);
  // In the first call: that all ranks move as many.
  Status agree_on_transfers(Communicator& world, std::int64_t max_transfers);
  // Whether this rank has all that it needs for the switch, as far as it goes without waiting for
  // more of the plan: -1 failed, 0 not yet, 1 ready.
  std::int64_t get_ready(std::span<const ExpertPart> parts, Status& failed);
  // Without a switch. Its stage stays until all ranks are here again: to let go of device memory waits
  // for calls, of which another rank may have begun one that waits for this rank's.
  void end_flight() {
    if (flight_ && flight_->stage) retired_ = std::move(flight_->stage);
    flight_.reset();
  }
  // On the host it cannot fail. Where it does, weights are of both: the layer takes no more calls.
  Status switch_over(std::span<const ExpertPart> parts);
  // The rows of one slot, one after the other, to or from `image`.
  Status read_slot(std::span<const ExpertPart> parts, std::int64_t slot, std::byte* image) const;
  Status write_slot(std::span<const ExpertPart> parts, std::int64_t slot, const std::byte* image);
  // What the memory has counted since the last time, to the caller's counters.
  Status update_view();
  // The slot of this rank that holds the expert, which is there.
  std::int64_t slot_of(std::int32_t expert) const;

  SlotShape shape_;
  ExpertMaps maps_;
  bool record_ = true;
  std::vector<std::int32_t> step_load_;  // [P]
  std::int64_t step_slots_ = 0;          // mapped since begin_step
  std::span<std::int32_t> load_view_;    // [P], the caller's, or empty
  std::unique_ptr<LoadWindow> window_;
  std::unique_ptr<Flight> flight_;
  std::unique_ptr<SlotStage> retired_;
  std::unique_ptr<SlotMemory> memory_;
  std::vector<std::uint32_t> seen_;  // [P], of memory_->total_load
};

}  // namespace moesaic::layer
