// The standard transports between ranks, all-to-all and all-gather with reduce-scatter, for rows in
// device memory. The form of a row on the wire, the order of arrival and the order of every sum are
// those of the CPU's make_all_to_all_prepare_finalize; the sizes are agreed on the host.
#pragma once

#include <cstdint>
#include <memory>

#include "moesaic/communicator.h"
#include "moesaic/modular_kernel.h"
#include "moesaic/status.h"

namespace moesaic::cuda {

class CudaAllToAll final : public PrepareAndFinalize {
 public:
  // What the experts of a rank send back for each row that arrived.
  struct Answer {
    enum class Form : std::uint8_t {
      kPartial,  // the sum over its experts
      // The weighted rows of all k slots, as CudaResult::slots: the sum at home is in slot order, so
      // the bits are those of one GPU. With gather each rank is sent all slots by all, and among
      // them are all experts; the layer's experts make slots, those of the catalogue do not.
      kSlots,
    };
    Form form = Form::kPartial;
    DType dtype = DType::kF32;  // or BF16; of slots as the experts on one GPU hold them
    bool weighted = true;       // slots; else the router's weights are applied at home

    bool slots() const { return form == Form::kSlots; }
    bool bf16() const { return dtype == DType::kBF16; }
    std::int64_t element() const { return bf16() ? 2 : 4; }  // bytes
    std::string_view name() const;                           // in texts
  };

  //   problem  as for CudaExperts, on a GPU
  //   options  of max_tokens_per_rank rows; combine_dtype is not read, `answer` is
  // Errors: those of the options (as make_all_to_all_prepare_finalize), kInvalidArgument for a
  // communicator of another device, kOutOfMemory. Allocates everything it will use.
  static Result<std::unique_ptr<CudaAllToAll>> create(const MoeProblem& problem,
                                                      std::shared_ptr<Communicator> communicator,
                                                      const AllToAllOptions& options,
                                                      Answer answer);
  ~CudaAllToAll() override;
  CudaAllToAll(const CudaAllToAll&) = delete;
  CudaAllToAll& operator=(const CudaAllToAll&) = delete;

  std::string_view name() const override;
  ActivationFormat format() const override { return ActivationFormat::kStandard; }
  // Experts that leave weighted sums, and take codes where rows travel as such.
  Status attach(const Experts& experts) override;
  bool output_is_reduced() const override { return true; }
  bool keeps_rows() const override { return false; }
  bool owns_expert_output() const override { return true; }
  std::int64_t max_dispatched_tokens(std::int64_t tokens) const override;
  // Nothing: it has its own memory.
  Result<std::int64_t> workspace_size(std::int64_t tokens) const override;

  // Collective; waits for the other ranks on the host, then puts work on the stream. The caller's
  // rows [M, H] bf16, ids and weights stay as they are until finalize has returned. Prepared: the
  // rows of all ranks that have an expert here, by rank and token, and where the experts write:
  // [M', H] of the answer's dtype, or [M' * k, H] slots. Errors: those of the communicator,
  // kDevice, and for this rank alone kLimitExceeded (more tokens than agreed) and those of views
  // that are not as said here; these break the communicator.
  Result<Prepared> prepare(const PrepareArgs& args) const override;
  // Collective. output [M, H] F32, BF16 or F16: what the experts of all ranks made of the rows of
  // prepare, summed in fp32 and rounded once. Of the arguments only output and stream are read.
  Status finalize(const FinalizeArgs& args) const override;
  // Breaks the communicator, so that no rank waits for this one. Returns `reason`.
  Status withdraw(const Status& reason, bool prepared,
                  std::span<std::byte> workspace) const override;

  std::int64_t bytes() const;  // device memory

 private:
  struct Impl;
  explicit CudaAllToAll(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace moesaic::cuda
