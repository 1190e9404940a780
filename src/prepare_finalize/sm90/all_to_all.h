// The standard transports between ranks, all-to-all and all-gather with reduce-scatter, for rows in
// device memory. The form of a row on the wire, the order of arrival and the order of every sum are
// those of make_all_to_all_prepare_finalize; the sizes are agreed on the host.
#pragma once

#include <cstdint>
#include <memory>

#include "moesaic/communicator.h"
#include "moesaic/modular_kernel.h"
#include "moesaic/status.h"

namespace moesaic::cuda {

class CudaAllToAll {
 public:
  // What the experts of a rank send back for each row that arrived.
  enum class Answer : std::uint8_t {
    kPartialF32,   // the sum over its experts
    kPartialBf16,  // the same, rounded: half the bytes
    // The weighted rows of all k slots in bf16, as the experts make them: the sum at home is in
    // slot order, so the bits are those of one GPU. Not with gather.
    kSlots,
  };

  //   problem  as for CudaExperts
  //   options  of max_tokens_per_rank rows; combine_dtype is not read, `answer` is
  // Errors: those of the options (as make_all_to_all_prepare_finalize), kInvalidArgument for a
  // communicator of another device, kOutOfMemory. Allocates everything it will use.
  static Result<std::unique_ptr<CudaAllToAll>> create(const MoeProblem& problem,
                                                      std::shared_ptr<Communicator> communicator,
                                                      const AllToAllOptions& options, Answer answer,
                                                      int device);
  ~CudaAllToAll();
  CudaAllToAll(const CudaAllToAll&) = delete;
  CudaAllToAll& operator=(const CudaAllToAll&) = delete;

  // Rows of this rank, device pointers: hidden_states [tokens, H] bf16, ids (global, -1: no expert)
  // and weights [tokens, k]. They stay as they are until combine has returned.
  struct Rows {
    std::int64_t tokens = 0;
    const void* hidden_states = nullptr;
    const std::int32_t* topk_ids = nullptr;
    const float* topk_weights = nullptr;
  };
  // Rows of all ranks that have an expert here, by rank and token, as CudaExpertsArgs wants them.
  struct Arrived {
    std::int64_t rows = 0;
    const void* hidden_states = nullptr;
    const float* hidden_scale = nullptr;  // null: bf16 rows
    std::int64_t hidden_scale_stride = 0;
    const std::int32_t* topk_ids = nullptr;
    const float* topk_weights = nullptr;
    void* answers = nullptr;  // where the experts put theirs: [rows, H], or [rows * k, H] slots
  };
  // Collective; waits for the other ranks on the host, then puts work on `stream`. Errors: those of
  // the communicator, kDevice, kLimitExceeded for more tokens than agreed (this rank alone: it must
  // tell the others).
  Result<Arrived> dispatch(void* stream, const Rows& rows) const;
  // Collective. sum [tokens, H] fp32: what the experts of all ranks made of the rows of dispatch.
  Status combine(void* stream, float* sum) const;

  std::int64_t bytes() const;  // device memory

 private:
  struct Impl;
  explicit CudaAllToAll(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace moesaic::cuda
