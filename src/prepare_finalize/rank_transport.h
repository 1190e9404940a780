// What the transports between ranks have in common: options, the form of rows on the wire, partial
// results on the way back, and failing together.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "core/arena.h"
#include "moesaic/communicator.h"
#include "moesaic/modular_kernel.h"
#include "prepare_finalize/rank_exchange.h"
#include "prepare_finalize/row_wire.h"

namespace moesaic::prepare_finalize {

// Who owns which expert and at which local index, for all ranks.
struct ExpertDirectory {
  std::vector<std::int32_t> owner;       // [E]
  std::vector<std::int32_t> local;       // [E]
  std::vector<std::int32_t> num_local;   // [R]
  std::vector<std::int32_t> by_rank;     // [E] global ids, rank by rank in local order
  std::vector<std::int64_t> first_rank;  // [R + 1] where a rank's ids begin there
};

class RankTransport : public PrepareAndFinalize {
 public:
  // What every transport needs: a communicator, row limits that fit 31 bits, ep rank and size of
  // the communicator (unless options.gather), a combine dtype that can be summed.
  static Status check_options(const Communicator* communicator, const AllToAllOptions& options);
  // What slabs need besides: no gather, room for the rows of all ranks.
  static Status check_slabs(const MoeProblem& problem, const AllToAllOptions& options, int ranks);
  static Result<ExpertDirectory> make_directory(const MoeProblem& problem,
                                                const ParallelConfig& parallel, int ranks);
  // That the problem has as many local experts as the directory gives `rank`.
  static Status check_owned(const MoeProblem& problem, const ExpertDirectory& directory, int rank);

  bool output_is_reduced() const override { return true; }
  bool keeps_rows() const override { return false; }
  Status attach(const Experts& experts) override;
  Result<std::int64_t> workspace_size(std::int64_t tokens) const override;
  bool supports_async() const override { return comm_->overlaps(); }
  Result<Prepared> prepare(const PrepareArgs& args) const override;
  Result<std::unique_ptr<PrepareReceiver>> prepare_async(const PrepareArgs& args) const override;
  Status finalize(const FinalizeArgs& args) const override;
  Result<std::unique_ptr<FinalizeReceiver>> finalize_async(const FinalizeArgs& args) const override;
  Status withdraw(const Status& reason, bool prepared,
                  std::span<std::byte> workspace) const override;

 protected:
  RankTransport(const MoeProblem& problem, std::shared_ptr<Communicator> communicator,
                const AllToAllOptions& options, std::string_view name, RowWire wire,
                ExpertDirectory directory);

  virtual Status attach_reduction(const Experts& experts) const = 0;
  // Lays out (or measures) this call's buffers.
  virtual void carve_all(Arena& arena) const = 0;
  // The most that any rank may send in each of the two steps.
  virtual void expect_dispatch(RankExchange& exchange) const = 0;
  virtual void expect_combine(RankExchange& exchange) const = 0;
  // The steps themselves, each in two halves: the first sends in `exchange`, or refuses there what
  // is wrong before it; the second reads what was received. All may throw std::bad_alloc.
  virtual Status send_rows(const PrepareArgs& args, RankExchange& exchange) const = 0;
  virtual Result<Prepared> take_rows(const PrepareArgs& args,
                                     const RankExchange& exchange) const = 0;
  virtual Status send_results(const FinalizeArgs& args, RankExchange& exchange) const = 0;
  virtual Status take_results(const FinalizeArgs& args, const RankExchange& exchange) const = 0;

  // M <= T.
  Status check_tokens(std::int64_t tokens) const;
  // What check_prepare_args checks, that M <= T, that ids are in range, and that an expert_map is the
  // directory's, if any.
  Status check_rows(const PrepareArgs& args) const;
  // Abandons the communicator: a rank's message does not have the form that all ranks expect.
  Status broken(std::string_view step, std::string_view what) const;
  // Results on the way back: fp32 rounded to the combine dtype.
  std::int64_t result_bytes() const { return p_.hidden_size * dtype_bits(combine_dtype_) / 8; }
  void pack_result(const float* row, std::byte* to) const;
  // sum += weight * row, fused, as the experts add up the slots of a token.
  void add_result(const std::byte* row, float weight, float* scratch, float* sum) const;

  MoeProblem p_;
  std::shared_ptr<Communicator> comm_;
  std::int64_t max_tokens_;  // T: rows that a rank may have
  int ranks_;
  DType combine_dtype_;
  RowWire wire_;
  ExpertDirectory directory_;
  const cpu::CpuKernels* kernels_;

 private:
  class Step;
  class DispatchReceiver;
  class CombineReceiver;
  // Buffers of steps that are over, for the next ones. The communicator is used by one thread at a
  // time, and so are these.
  struct StepKind {
    std::string name;  // for the communicator
    const char* step;  // for errors
    std::vector<std::unique_ptr<ExchangeBuffers>> spare;
  };
  Status out_of_memory(const char* step, const char* why) const;
  mutable StepKind dispatch_, combine_;
};

}  // namespace moesaic::prepare_finalize
