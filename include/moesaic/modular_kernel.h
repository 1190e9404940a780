// ModularKernel: prepare -> experts -> finalize for tokens that were already routed. The two halves
// are interfaces, so that a transport or a backend can be exchanged without the other knowing.
// Symbols: M tokens, H hidden_size, k top_k, E_l local experts, T rows per expert slab.
// Source: docs/spec/modular-kernel.md sections 1, 2, 6.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "moesaic/device.h"
#include "moesaic/experts.h"
#include "moesaic/parallel.h"
#include "moesaic/status.h"
#include "moesaic/tensor.h"

namespace moesaic {

class Communicator;  // communicator.h

// --- Prepare and finalize ------------------------------------------------------------------------

struct PrepareArgs {
  ConstTensorView hidden_states;             // [M, H] F32, BF16 or F16; rows may be strided
  ConstTensorView topk_weights;              // [M, k] F32
  ConstTensorView topk_ids;                  // [M, k] I32, global ids, -1: no expert
  std::span<const std::int32_t> expert_map;  // [E] -> local or -1; empty: identity
  // >= workspace_size(M) bytes, 64-byte aligned; belongs to this call until finalize returned.
  std::span<std::byte> workspace;
  Stream stream = {};  // on a GPU: where work is launched
};

// What the experts will see.
struct Prepared {
  ConstTensorView hidden_states;                    // standard [M', H], batched [E_l, T, H]
  ConstTensorView topk_weights, topk_ids;           // absent: the caller's stay in force
  std::span<const std::int32_t> expert_num_tokens;  // batched: [E_l], memory of the device
  ConstTensorView hidden_scale = {};  // present: hidden_states are codes, as ExpertsArgs says
  TensorView expert_output = {};      // present: where the experts must write (owns_expert_output)
};

struct FinalizeArgs {
  TensorView output;              // [M, H] F32, BF16 or F16; every element is written
  ConstTensorView expert_output;  // as the reduction says; empty when no token was dispatched
  ConstTensorView topk_weights, topk_ids;    // as given to prepare
  std::span<const std::int32_t> expert_map;  // as given to prepare
  TopKWeightAndReduce reduction = TopKWeightAndReduce::kNoOp;
  bool apply_router_weight_on_input = false;  // then weights are 1 from here on
  std::span<std::byte> workspace;             // the one prepare filled
  Stream stream = {};                         // on a GPU: the one of prepare
};

// The second half of a prepare or a finalize that was started. receive() is called once; a receiver
// that is destroyed without it makes the communicator unusable on all ranks.
class PrepareReceiver {
 public:
  virtual ~PrepareReceiver() = default;
  virtual Result<Prepared> receive() = 0;
};
class FinalizeReceiver {
 public:
  virtual ~FinalizeReceiver() = default;
  virtual Status receive() = 0;
};

// Brings rows to the experts in the format they want and results back to the rows. Immutable; calls
// with distinct workspaces may run at the same time. Never writes to its inputs. Those made below check
// what they read as ModularKernel::run does (local's prepare reads nothing), but not that a finalize
// goes with the prepare that filled its workspace.
class PrepareAndFinalize {
 public:
  virtual ~PrepareAndFinalize() = default;
  virtual std::string_view name() const = 0;
  virtual ActivationFormat format() const = 0;
  // Called once when the kernel is built: what must fit beyond the format (kUnsupported).
  virtual Status attach(const Experts& experts) = 0;
  // True when finalize returns the sum over all ranks, so that nobody reduces again.
  virtual bool output_is_reduced() const = 0;
  // True when the experts see exactly the caller's rows (M' == M), which lets them write the result
  // in place of finalize.
  virtual bool keeps_rows() const = 0;
  // True when prepare says where the experts write: the kernel then holds no memory for it.
  virtual bool owns_expert_output() const { return false; }
  // Upper bound of M' for M tokens (standard format).
  virtual std::int64_t max_dispatched_tokens(std::int64_t tokens) const = 0;
  // Bytes, monotone in tokens.
  virtual Result<std::int64_t> workspace_size(std::int64_t tokens) const = 0;
  virtual Result<Prepared> prepare(const PrepareArgs& args) const = 0;
  virtual Status finalize(const FinalizeArgs& args) const = 0;
  // prepare() and finalize() in two halves: these send, and return without waiting for other ranks;
  // receive() does the rest, with the same result to the bit. All that args point to lives until
  // then. A failure of the first half is the step's, on all ranks. Several calls with workspaces of
  // their own may be under way; all ranks make their first halves in the same order. Here, and
  // wherever supports_async() is false, the first half does everything.
  virtual Result<std::unique_ptr<PrepareReceiver>> prepare_async(const PrepareArgs& args) const;
  virtual Result<std::unique_ptr<FinalizeReceiver>> finalize_async(const FinalizeArgs& args) const;
  // Whether this rank can do something else between the halves.
  virtual bool supports_async() const { return false; }
  // To be called when this rank fails outside prepare and finalize while others may be in them:
  // takes part, with its reason only, in the collective that they wait in, so that all return it at
  // once. Returns it: `reason`, or that of a lower rank.
  //   prepared   prepare has returned ok, finalize was not called
  //   workspace  the one prepare filled, if prepared
  virtual Status withdraw(const Status& reason, bool prepared,
                          std::span<std::byte> workspace) const {
    static_cast<void>(prepared);
    static_cast<void>(workspace);
    return reason;
  }
};

// No data or expert parallelism: rows, ids and weights pass through untouched; a delegated
// reduction becomes kContiguous, with the same bits on the host and on a GPU. attach: kUnsupported for
// experts with kNaiveBatched. kUnsupported for a batched problem.
Result<std::unique_ptr<PrepareAndFinalize>> make_local_prepare_finalize(const MoeProblem& problem);
// The batched reference: one slab of T = problem.max_tokens rows per local expert, rows in
// ascending (token, slot) order, a weight on the input applied while copying (rounded as the
// experts would); a delegated reduction becomes kNaiveBatched. More than T rows for one expert are
// kLimitExceeded. kUnsupported for a standard problem, kInvalidArgument for T < 1.
//
// On a GPU: only launches, and can be captured; at most 1024 local experts and 2^30 rows of slabs.
// Ids out of range are no expert. A row that finds no room in its slab, which is not known on the
// host, makes the whole output row of its token NaN. Experts write BF16 where cuda_sm90 computes the
// problem, else F32.
Result<std::unique_ptr<PrepareAndFinalize>> make_batched_prepare_finalize(
    const MoeProblem& problem);

struct AllToAllOptions {
  // Who owns which expert. Without gather its ep rank and size are those of the communicator, and on
  // the CPU it gives this rank num_local_experts and the expert_map of each call (kInvalidArgument).
  ParallelConfig parallel;
  std::int64_t max_tokens_per_rank = 0;  // T, that any rank may have in one call; the same on all
  // Every row goes to every rank (all-gather, reduce-scatter) instead of once to each rank that
  // owns one of its experts.
  bool gather = false;
  // Where the scheme quantises a row by itself (fp8-block), rows travel as codes and scales: half
  // the bytes of bf16, the same bits in the experts. Other schemes, rows that the weights of several
  // experts multiply on the input (but in slabs), and false: rows travel in the dtype to which the
  // scheme rounds hidden states and are quantised where they arrive.
  bool quantize_before_dispatch = true;
  // Results on their way back: kF32, or kBF16 for half the bytes and one more rounding of each
  // partial result (2^-9 relative).
  DType combine_dtype = DType::kF32;
};
// Transports between ranks with rows of their own. Row counts may differ between ranks and be zero.
// prepare and finalize are collective, one thread at a time; a rank that cannot take part (too many
// rows, a bad id) says so in its message, and all return its reason, with "dispatch: rank N:" in
// front, without waiting. They allocate buffers for messages, and keep them. Errors: those of the
// communicator, kLimitExceeded above max_tokens_per_rank; making them: kUnsupported for another
// format, kInvalidArgument and kInvalidDType for options, kLimitExceeded for slabs beyond 2^61 bytes. attach: kUnsupported for experts that
// take no quantised rows.
//
// Each rank owns some experts (or, with gather, a slice of each): a row travels once to each of its
// ranks, with ids and weights, and each rank sends one partial sum per row back. A row's result is
// the sum of those in rank order, rounded once: repeatable, equal to one rank's where a row's
// experts are on one rank, else within (k + R) * 2^-24 * sum |w * row| of it.
// Payload that a rank sends, S being the ranks other than itself to which a row goes:
//   dispatch  8 (R - 1) + sum over its rows of S * (row + 8 k),  row = H + 4 ceil(H / 128) (codes)
//             or H * element size
//   combine   8 (R - 1) + rows received from others * H * size of combine_dtype
//
// On a GPU (rows "cuda_all_to_all" and "cuda_all_gather_reduce_scatter"): rows of the operand's dtype
// (with H % 8 != 0 they travel with zeros behind them, codes with H % 128 != 0 as values) and an output
// of any float dtype, in device memory, where messages lie too, all of it allocated here; experts write sums of the combine dtype. The communicator is NCCL's for this
// device, or any whose messages go through host memory. prepare and finalize wait for the others on
// the host, then launch on the stream of the call. Ids out of range go nowhere. What a rank refuses
// by itself breaks the communicator: the others return kDevice with its reason.
Result<std::unique_ptr<PrepareAndFinalize>> make_all_to_all_prepare_finalize(
    const MoeProblem& problem, std::shared_ptr<Communicator> communicator,
    const AllToAllOptions& options);
// Low latency, batched format: a row travels once for each of its experts into the slabs [E_l, T *
// R, H] of the ranks that own them (problem.max_tokens is T * R), its k results come back, and are
// weighted and added up at home in fp32 in slot order, rounded once. With kF32 the bits are those
// of a CPU backend on one rank, however experts are placed. A token's experts must be distinct
// (kInvalidArgument). Rows in a slab: by source rank, then token.
//   dispatch  8 (R - 1) + 4 * experts of others + slots with an expert elsewhere * row
//   combine   8 (R - 1) + slots received from others * H * size of combine_dtype
// On a GPU (row "cuda_all_to_all_batched"): rows travel unquantised, once to each rank, and are laid into
// slabs there; all else is as for cuda_all_to_all. The bits are those of make_batched_prepare_finalize on
// one GPU; combine_dtype kBF16 loses nothing where experts leave bf16 rows. Nothing looks at ids on the
// host: a token with an expert named twice counts it twice, or becomes NaN where the slab is full.
Result<std::unique_ptr<PrepareAndFinalize>> make_batched_all_to_all_prepare_finalize(
    const MoeProblem& problem, std::shared_ptr<Communicator> communicator,
    const AllToAllOptions& options);

// A row of the list of prepare/finalize objects, as for experts: what it asks of the problem and of
// the ranks, whose configuration must be valid. Rows without transport ignore communicator and
// options; `gather` is set by the row.
struct PrepareFinalizeBackend {
  std::string_view name;
  std::string_view description;
  Status (*can_implement)(const MoeProblem& problem, const ParallelConfig& parallel);
  Result<std::unique_ptr<PrepareAndFinalize>> (*create)(const MoeProblem& problem,
                                                        std::shared_ptr<Communicator> communicator,
                                                        const AllToAllOptions& options);
};
std::span<const PrepareFinalizeBackend> prepare_finalize_catalogue();
std::vector<CandidateReport> explain_prepare_finalize(const MoeProblem& problem,
                                                      const ParallelConfig& parallel = {});

// --- The kernel ----------------------------------------------------------------------------------

class ModularKernel {
 public:
  struct Options {
    std::int64_t max_tokens = 0;  // M that one call may have
    // T of the batched format; must be problem.max_tokens there and 0 in the standard format.
    std::int64_t max_tokens_per_expert = 0;
    // Allows output to be the very tensor hidden_states, on a GPU not in a call with numerics.
    // Refused with shared experts: they read the same input later.
    bool inplace = false;
    bool has_shared_experts = false;
    // Calls that may be under way at once, 1 to 16: each has a workspace of its own. More than one
    // on the CPU only.
    int calls_in_flight = 1;
    // false: no memory is allocated, and every call brings its workspace (Args).
    bool own_workspace = true;
  };
  // kUnsupported when the formats of problem, halves and options differ or the halves do not fit
  // each other; kInvalidArgument for option values. Allocates the one workspace, if it is to have one.
  static Result<ModularKernel> create(const MoeProblem& problem,
                                      std::unique_ptr<PrepareAndFinalize> prepare_finalize,
                                      std::unique_ptr<Experts> experts, const Options& options);

  // Memory of the problem's device, expert_map too, as ExpertsArgs says.
  struct Args {
    ConstTensorView hidden_states;  // [M, H]
    ConstTensorView topk_weights;   // [M, k] F32
    ConstTensorView topk_ids;       // [M, k] I32
    std::span<const std::int32_t> expert_map;
    // [M, H] F32, BF16 or F16, contiguous, rounded once; overlaps no input (but see inplace).
    TensorView output;
    // As ExpertsArgs::numerics, [M]. kUnsupported where rows travel.
    std::span<RowNumerics> numerics = {};
    // On a GPU: where the work is launched; run then returns before it is done. Calls use one
    // workspace: order them by a stream or events.
    Stream stream = {};
    // As ExpertsArgs: static activation scales of this call, [1] or [E_l].
    ConstTensorView a1_scale = {}, a2_scale = {};
    // In the place of the kernel's own: at least workspace_size(M) bytes of the problem's device,
    // 64-byte aligned, on a GPU 256; the call's until its work is done. Overlaps nothing.
    std::span<std::byte> workspace = {};
  };
  // Prepare, experts, finalize. Allocates nothing. When no token was dispatched the experts are not
  // called, finalize is. Calls exclude each other by a lock on the workspace; those that bring one run
  // at the same time where rows do not travel. Errors:
  // kInvalidShape, kInvalidDType, kInvalidLayout, kInvalidArgument (ids), kAliasing, kLimitExceeded
  // (M above max_tokens; an overflowing slab), kWorkspaceTooSmall. The output is unspecified after an
  // error.
  Status run(const Args& args) const;
  // run on a GPU and this stream, in the place of args.stream: launches and returns; may be captured
  // where rows do not travel. kUnsupported for a kernel on the CPU.
  Status enqueue(Stream stream, const Args& args) const;

  // run() in steps, with its result to the bit, so that the caller can do something else while rows
  // travel (PrepareAndFinalize::supports_async). The kernel, and what the arguments point to, live
  // until the call is over. Destroyed before finish(), it makes the communicator unusable on all
  // ranks; after a failure there is nothing left to do.
  class Call {
   public:
    // Waits for rows of other ranks, runs the experts, and sends what they computed on its way back.
    Status run_experts();
    // Waits for what other ranks computed, and writes the output. Runs the experts first where
    // nobody has.
    Status finish();

    Call(Call&&) noexcept;
    Call& operator=(Call&&) noexcept;
    ~Call();

   private:
    friend class ModularKernel;
    struct State;
    explicit Call(std::unique_ptr<State> state);
    std::unique_ptr<State> state_;
  };
  // Rows are on their way to the experts. Ranks start, and run the experts of, their calls in the
  // same order. Errors: those of run(); kLimitExceeded when calls_in_flight calls are under way,
  // which holds for run() too.
  Result<Call> start(const Args& args) const;

  const MoeProblem& problem() const;
  const Experts& experts() const;
  Experts& experts();  // for who moves experts between two calls (Experts::expert_parts)
  const PrepareAndFinalize& prepare_finalize() const;
  std::int64_t workspace_bytes() const;  // of its own
  // Bytes of Args::workspace for M tokens, monotone in M. kInvalidArgument for negative numbers,
  // kLimitExceeded above max_tokens.
  Result<std::int64_t> workspace_size(std::int64_t tokens) const;

  ModularKernel(ModularKernel&&) noexcept;
  ModularKernel& operator=(ModularKernel&&) noexcept;
  ~ModularKernel();

 private:
  struct Impl;
  explicit ModularKernel(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace moesaic
