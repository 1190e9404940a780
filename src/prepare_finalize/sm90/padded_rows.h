// The sm_90 transports for rows that their kernels do not take as they are: hidden sizes that are no
// multiple of 8 travel with zeros behind them, FP8 blocks with a ragged last one as bf16 rows.
#pragma once

#include <cstdint>
#include <memory>

#include "moesaic/modular_kernel.h"
#include "moesaic/status.h"

namespace moesaic::cuda {

// The transport of carried_problem() (catalogue_row.h) with the calls, views and bits of one for `problem`. Rows are
// copied on the stream of the call, before they leave and after they have arrived.
class PaddedRows final : public PrepareAndFinalize {
 public:
  //   inner       made for carried_problem(problem)
  //   max_tokens  of a rank
  //   rows_for_a_token  that the experts leave: 1, or those of all slots
  // kOutOfMemory. Allocates everything it will use.
  static Result<std::unique_ptr<PaddedRows>> around(std::unique_ptr<PrepareAndFinalize> inner,
                                                    const MoeProblem& problem,
                                                    std::int64_t max_tokens,
                                                    std::int64_t rows_for_a_token);
  ~PaddedRows() override;
  PaddedRows(const PaddedRows&) = delete;
  PaddedRows& operator=(const PaddedRows&) = delete;

  std::string_view name() const override;
  ActivationFormat format() const override { return ActivationFormat::kStandard; }
  Status attach(const Experts& experts) override;
  bool output_is_reduced() const override { return true; }
  bool keeps_rows() const override { return false; }
  bool owns_expert_output() const override { return true; }
  std::int64_t max_dispatched_tokens(std::int64_t tokens) const override;
  Result<std::int64_t> workspace_size(std::int64_t tokens) const override;
  Result<Prepared> prepare(const PrepareArgs& args) const override;
  Status finalize(const FinalizeArgs& args) const override;
  Status withdraw(const Status& reason, bool prepared,
                  std::span<std::byte> workspace) const override;

  std::int64_t bytes() const;  // device memory, without the inner transport's

 private:
  struct Impl;
  explicit PaddedRows(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace moesaic::cuda
