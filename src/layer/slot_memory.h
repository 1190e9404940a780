// A rank's slots and the maps of its calls where the host does not reach them: on a GPU.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "moesaic/communicator.h"
#include "moesaic/eplb.h"
#include "moesaic/experts.h"
#include "moesaic/status.h"

namespace moesaic::layer {

// Where experts that move wait for the switch, in the memory of the ranks that will have them. For one
// caller at a time; calls of the layer may be under way, of which none writes slots. Errors: kDevice.
class SlotStage {
 public:
  virtual ~SlotStage() = default;
  // Begins to copy the rows of a slot of this rank, one part after the other, to `place` of rank `to`,
  // which may be this one.
  virtual Status send(std::span<const ExpertPart> parts, std::int64_t slot, int to,
                      std::int64_t place) = 0;
  // Returns when all that this rank has sent and taken is there.
  virtual Status settle() = 0;
  // Begins to copy a place here into a slot, when the ranks that sent it have settled; after the calls
  // before, of which none is captured.
  virtual Status take(std::span<const ExpertPart> parts, std::int64_t place, std::int64_t slot) = 0;
};

// For one caller at a time. What it says it does, it has done when it returns. Errors: kDevice.
class SlotMemory {
 public:
  virtual ~SlotMemory() = default;
  // A slot's row of one array, while calls may be under way.
  virtual Status read(const ExpertPart& part, std::int64_t slot, std::byte* to) = 0;
  // After the calls before, of which none is captured.
  virtual Status write(const ExpertPart& part, std::int64_t slot, const std::byte* from) = 0;
  // For the calls that begin from now on, replays included.
  virtual Status set_maps(const ExpertMaps& maps) = 0;
  virtual Status set_recording(bool record) = 0;
  // A step of host tensors has ended. Those of streams end there.
  virtual Status end_step() = 0;
  // [L] load of the steps in the window, as LoadWindow::load().
  virtual Status window_load(std::span<double> load) = 0;
  // [P] load of all steps that were recorded, modulo 2^32.
  virtual Status total_load(std::span<std::uint32_t> load) = 0;
  virtual std::int64_t bytes() const = 0;
  // Collective over `world` (null: this rank is alone): `places` for slots of `bytes` on every rank.
  // kUnsupported, kOutOfMemory, of all ranks: there is none, and experts go through the host.
  virtual Result<std::unique_ptr<SlotStage>> make_stage(Communicator* world, std::int64_t places,
                                                        std::int64_t bytes) = 0;
};

}  // namespace moesaic::layer
