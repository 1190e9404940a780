// All-to-all and gather through peer windows: ranks write rows and answers into each other's memory
// and wait on the device, so that the host waits for nobody and a call can be captured. Which bits
// come out is CudaAllToAll's. Protocol: docs/design/peer-windows.md.
#pragma once

#include <cstdint>
#include <memory>
#include <string_view>

#include "cuda/sum_epilogue.h"
#include "moesaic/communicator.h"
#include "moesaic/modular_kernel.h"
#include "moesaic/status.h"
#include "permute/sm90/slots_place.h"
#include "permute/sm90/some_rows.h"
#include "prepare_finalize/sm90/all_to_all.h"

namespace moesaic::cuda {

class CudaPeerAllToAll final : public PrepareAndFinalize {
 public:
  // Collective. Arguments and errors of CudaAllToAll::create, and kUnsupported on all ranks where
  // there are no windows (parallel/peer_window.h). Allocates everything it will use.
  //   brings_slots  answers are slots that the experts leave elsewhere (take_slots), bf16, or sums of
  //                 them: there is no memory for results here; this rank's own choice
  //   memory        of the windows
  static Result<std::unique_ptr<CudaPeerAllToAll>> create(
      const MoeProblem& problem, const std::shared_ptr<Communicator>& communicator,
      const AllToAllOptions& options, CudaAllToAll::Answer answer, bool brings_slots = false,
      PeerMemory memory = PeerMemory::kAuto);
  ~CudaPeerAllToAll() override;
  CudaPeerAllToAll(const CudaPeerAllToAll&) = delete;
  CudaPeerAllToAll& operator=(const CudaPeerAllToAll&) = delete;

  std::string_view name() const override;
  ActivationFormat format() const override { return ActivationFormat::kStandard; }
  Status attach(const Experts& experts) override;
  bool output_is_reduced() const override { return true; }
  bool keeps_rows() const override { return false; }
  bool owns_expert_output() const override { return true; }
  std::int64_t max_dispatched_tokens(std::int64_t tokens) const override;
  Result<std::int64_t> workspace_size(std::int64_t tokens) const override;

  // Collective, but for the host: puts work on the stream and waits for nobody; capturable. On a
  // device with several ranks each has a stream of its own that does not order itself with the
  // default one. The caller's rows, ids and weights stay as they are until the work of finalize is
  // done. Prepared: R * T rows, those of rank s from s * T on, the ids of rows that are not there
  // -1 unless some_rows() names them; expert_output as CudaAllToAll. Errors are this rank's own; the others learn of them on the
  // device.
  Result<Prepared> prepare(const PrepareArgs& args) const override;
  // output [M, H] F32 as CudaAllToAll::finalize; NaN when the call ended with a failure.
  Status finalize(const FinalizeArgs& args) const override;
  // The two halves of finalize, with work of the caller's between them: what the experts left is read
  // by the first. `to`: what becomes of the sums, 16-byte aligned.
  Status answer(Stream stream) const;
  Status finish(Stream stream, const SumEpilogue& to) const;
  // Whether answers are made of slots that are elsewhere.
  bool wants_slots() const;
  // Between prepare and finalize: where the slots of the rows that prepare returned are, those without
  // an expert of `expert_map` not read. Nowhere (rows null) where no expert is here. With more pairs
  // than `slots` has room for the call ends on all ranks: health() says kLimitExceeded.
  void take_slots(const SlotsPlace& slots, const std::int32_t* expert_map) const;
  // As refuse() on a stream of its own. Returns `reason`.
  Status withdraw(const Status& reason, bool prepared,
                  std::span<std::byte> workspace) const override;
  // Tells the other ranks, on the device and behind what is on the stream, that this one takes part
  // in no more calls.
  void refuse(void* stream) const;

  // ok, or why a call ended that has come that far on the device: all ranks that were late, or
  // what was wrong. Stays. No CUDA call.
  Status health() const;
  // Of those that prepare() returned, how many are there if all ranks have as many as this one.
  std::int64_t likely_rows() const;
  // Which of the arrived rows are there, for the list of them; with `live` null ids say it. Only where
  // wants_slots().
  SomeRows some_rows() const;
  // Whether another rank has the same default stream.
  bool shares_streams() const;
  // Where the windows' memory is from: "threads", "cuda_handles", "nccl".
  std::string_view memory() const;
  // For calls that bring no stream; of this rank only.
  void* stream() const;
  std::int64_t bytes() const;  // device memory, the window included

 private:
  struct Impl;
  explicit CudaPeerAllToAll(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace moesaic::cuda
