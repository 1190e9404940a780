// The experts of a rank in canonical form, which load balancing keeps to send them to other ranks
// and to build a backend's weights again. Slots with the same expert share memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "moesaic/experts.h"

namespace moesaic::layer {

// The tensors of one expert, in the order of ExpertWeightsView's members; absent ones are empty.
struct StoredExpert {
  std::vector<Tensor> tensors;

  static Result<std::shared_ptr<StoredExpert>> copy(const ExpertWeightsView& view);
  // Same shapes and dtypes as `like`, contents undefined.
  static Result<std::shared_ptr<StoredExpert>> allocate_like(const StoredExpert& like);
  ExpertWeightsView view() const;
  std::int64_t bytes() const;
  // All tensors one after the other, bytes() of them.
  void write_to(std::byte* to) const;
  void read_from(const std::byte* from);
};

// What each local slot holds.
class ExpertStore final : public ExpertSource {
 public:
  using Slots = std::vector<std::shared_ptr<StoredExpert>>;

  explicit ExpertStore(Slots slots) : slots_(std::move(slots)) {}
  // Slot i is expert ids[i] of `source`; an id that comes twice is read once.
  static Result<std::unique_ptr<ExpertStore>> load(ExpertSource& source,
                                                   std::span<const std::int32_t> ids);

  Result<ExpertWeightsView> expert(std::int64_t local_expert) override;
  const Slots& slots() const { return slots_; }
  std::int64_t bytes() const;  // each expert once

 private:
  Slots slots_;
};

}  // namespace moesaic::layer
