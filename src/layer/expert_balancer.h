// Expert load balancing of one layer: which physical slot holds which expert, what was measured,
// and a rearrangement on its way. Experts travel in canonical form into a second buffer while the
// layer serves from the first; a thread of its own builds the backend's weights from it; when all
// ranks are ready, all swap in the same step. Source: docs/spec/parallel.md sections 6 and 8.
#pragma once

#include <cstdint>
#include <functional>
#include <future>
#include <memory>
#include <span>
#include <vector>

#include "layer/expert_store.h"
#include "moesaic/communicator.h"
#include "moesaic/eplb.h"
#include "moesaic/router.h"

namespace moesaic::layer {

class ExpertBalancer {
 public:
  // Builds a backend's weights for a set of slots; called on another thread.
  using BuildFn = std::function<Result<std::unique_ptr<Experts>>(ExpertSource&)>;

  // kInvalidArgument unless num_physical >= num_logical is a multiple of the ranks.
  static Result<std::unique_ptr<ExpertBalancer>> create(std::int64_t num_logical,
                                                        std::int64_t num_physical, int ranks,
                                                        int rank, std::int64_t window);

  // Logical experts of this rank's slots.
  std::span<const std::int32_t> local_experts() const;
  void set_store(std::unique_ptr<ExpertStore> store) { store_ = std::move(store); }
  const ExpertStore& store() const { return *store_; }

  // ids [tokens, k]: logical to physical, in place; counts the load.
  Status map_ids(std::int32_t* ids, std::int64_t tokens, std::int64_t k);
  // Ends a step: its load enters the window.
  Status end_step();
  // Measured load of each expert on all ranks, in the window; each row counted once. Collective.
  Result<std::vector<double>> load(Communicator& world, int replicas) const;

  std::span<const std::int32_t> physical_to_logical() const { return maps_.physical_to_logical; }
  bool in_flight() const { return flight_ != nullptr; }
  void drop() { flight_.reset(); }
  std::int64_t expert_bytes() const { return store_->slots().front()->bytes(); }

  // Starts to move experts so that slot p holds wanted[p]. kInvalidArgument when one is in flight,
  // for another number of slots, or for an expert without a slot.
  Status begin(std::span<const std::int32_t> wanted);
  // Moves up to max_transfers experts (of all ranks together); collective. True when the new
  // weights are ready on all ranks. A failure ends the rearrangement; the layer
  // stays as it is.
  Result<bool> advance(Communicator& world, std::int64_t max_transfers, const BuildFn& build);
  // The new weights, once advance has said that they are ready; the old maps still hold.
  std::unique_ptr<Experts> take_built() { return std::move(flight_->built); }
  // From now on the new maps hold; ends the rearrangement.
  void switch_maps();

 private:
  struct Flight {
    ExpertMaps maps;
    std::vector<ExpertTransfer> plan;
    std::size_t next = 0;
    ExpertStore::Slots slots;  // null: still to come
    std::unique_ptr<ExpertStore> store;
    std::future<Result<std::unique_ptr<Experts>>> building;
    std::unique_ptr<Experts> built;
    ~Flight() {
      if (building.valid()) building.wait();
    }
  };
  ExpertBalancer() = default;
  Status move_some(Communicator& world, std::int64_t max_transfers);
  const StoredExpert& held(std::int32_t expert) const;

  std::int64_t num_logical_ = 0, slots_per_rank_ = 0;
  int rank_ = 0, ranks_ = 1;
  ExpertMaps maps_;
  std::vector<std::int32_t> step_load_;  // [P]
  std::unique_ptr<LoadWindow> window_;
  std::unique_ptr<ExpertStore> store_;
  std::unique_ptr<Flight> flight_;
};

}  // namespace moesaic::layer
