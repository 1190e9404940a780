// The batched format between GPUs: rows arrive as with any transport of the standard format, once for each
// rank, and are laid into the slabs of their experts where these are.
#pragma once

#include <cstdint>
#include <memory>

#include "moesaic/communicator.h"
#include "moesaic/modular_kernel.h"
#include "moesaic/status.h"

namespace moesaic::cuda {

// By messages (CudaAllToAll, within PaddedRows where rows need them); the k results of a row come back as
// the experts left them and are weighted and added up at home in slot order. Bits: those of the batched
// format on one GPU. A token's experts must be distinct: of one that is named twice the sum is NaN where
// its slab has no room.
class SlabbedRows final : public PrepareAndFinalize {
 public:
  //   problem  of the batched format: slabs have max_tokens rows, those of all ranks
  //   options  of max_tokens_per_rank rows, which travel unquantised; combine_dtype BF16: results are
  //            rounded to it
  //   results  what the experts leave: F32 or BF16, alike on all ranks
  // Errors: those of CudaAllToAll::create and make_batched_all_to_all_prepare_finalize. Allocates
  // everything it will use.
  static Result<std::unique_ptr<SlabbedRows>> create(const MoeProblem& problem,
                                                     std::shared_ptr<Communicator> communicator,
                                                     const AllToAllOptions& options, DType results);
  ~SlabbedRows() override;
  SlabbedRows(const SlabbedRows&) = delete;
  SlabbedRows& operator=(const SlabbedRows&) = delete;

  std::string_view name() const override { return "cuda_all_to_all_batched"; }
  ActivationFormat format() const override { return ActivationFormat::kBatched; }
  // Experts that leave the rows of their slabs.
  Status attach(const Experts& experts) override;
  bool output_is_reduced() const override { return true; }
  bool keeps_rows() const override { return false; }
  bool owns_expert_output() const override { return true; }
  std::int64_t max_dispatched_tokens(std::int64_t tokens) const override;
  // Nothing: it has its own memory.
  Result<std::int64_t> workspace_size(std::int64_t tokens) const override;
  // Collective, as the inner transport's; waits for the others on the host.
  Result<Prepared> prepare(const PrepareArgs& args) const override;
  Status finalize(const FinalizeArgs& args) const override;
  Status withdraw(const Status& reason, bool prepared,
                  std::span<std::byte> workspace) const override;

  std::int64_t bytes() const;  // device memory

 private:
  struct Impl;
  explicit SlabbedRows(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace moesaic::cuda
