// FusedMoE: the whole layer, from hidden states to output, on one process or spread over ranks.
// Gate, router, modular kernel, shared experts.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "moesaic/checkpoint.h"
#include "moesaic/device.h"
#include "moesaic/device_functions.h"
#include "moesaic/experts.h"
#include "moesaic/numerics.h"
#include "moesaic/parallel.h"
#include "moesaic/router.h"
#include "moesaic/spec.h"
#include "moesaic/status.h"

namespace moesaic {

class Communicator;                    // communicator.h
enum class PeerMemory : std::uint8_t;  // communicator.h

// How rows reach experts of other ranks. Results are the same within the bound of RankReduction.
enum class RankTransport : std::uint8_t {
  // kNone where all ranks have the same rows; else kAllToAll with expert parallelism, kGather
  // without.
  kAuto,
  kNone,      // nothing travels before the experts: every rank has every row
  kGather,    // all rows to all ranks whose rows differ, partial sums back (reduce-scatter)
  kAllToAll,  // a row goes once to each rank that owns one of its experts; expert parallelism only
  // Low latency: a row goes once for each of its experts into slabs of fixed capacity; expert
  // parallelism only. Has the order of kPerSlot. On a GPU a row goes once to each rank, by messages,
  // and slabs hold rows of bf16 before they are weighted (fp32 with the general experts): the bits of
  // the batched format on one GPU.
  kBatched,
};
std::string_view rank_transport_name(RankTransport transport);  // "auto", "none", "gather", ...

// In which order a row's expert results are added.
enum class RankReduction : std::uint8_t {
  // Each rank adds up its part, the parts are added in rank order: fewest bytes. Bit for bit one
  // rank's result where a row's experts are whole on one rank (top_k 1, say); else within
  // (k + R) * 2^-24 * sum |w * row| of it before the final rounding, R the number of ranks. On a
  // GPU slices of experts are rounded to bf16 before that (2^-9 relative each). Slices whose scheme
  // has a scale per row of activations, or whose weights are quantised on loading, are quantised by
  // themselves: they differ from one rank's result as both do from exact arithmetic, within the
  // scheme's bound.
  kPerRank,
  // Every slot's row comes back by itself and is added in slot order, as on one rank: the bits are
  // those of one rank, wherever the experts are. Up to k times the bytes. Needs whole experts
  // (tp_size 1).
  kPerSlot,
};
std::string_view rank_reduction_name(RankReduction reduction);  // "per_rank", "per_slot"

// Latent MoE: maps hidden states [M, H] to what the routed experts see, [M, latent] of the same
// dtype; the gate and shared experts keep the original.
using RoutedInputTransform =
    std::function<Status(ConstTensorView hidden_states, TensorView routed_input)>;
// Maps the routed experts' scaled result [M, latent] back to [M, H], both F32.
using RoutedOutputTransform =
    std::function<Status(ConstTensorView routed_output, TensorView output)>;

struct LatentTransform {
  // H of the routed experts when `input` is set. Without `output` it must be the layer's hidden
  // size.
  std::int64_t hidden_size = 0;
  RoutedInputTransform input;
  RoutedOutputTransform output;
};

// Shared experts of the caller's own: writes what is added to the routed result of hidden_states
// [M, H], whose rows may be strided, to output [M, H] F32.
using SharedExpertsFn = std::function<Status(ConstTensorView hidden_states, TensorView output)>;

// The caller's functions of a layer on a GPU. Rows [M, H] are contiguous and BF16 there, also those
// that forward was given in another dtype. Over ranks they are called for the rows that are this
// rank's to compute, between exchanges.
struct LayerDeviceFunctions {
  DeviceRoutingFn custom_routing;  // RoutingMethod::kCustom
  // As LatentTransform's, which says the hidden size: rows to [M, latent] BF16, and the routed
  // experts' scaled result [M, latent] F32 to [M, H] F32.
  DeviceFn routed_input, routed_output;
  // As Options::shared_experts: rows to [M, H] F32.
  DeviceFn shared_experts;
  // As Options::capture: topk_ids [M, k] I32 of the rows of a call, which may lie apart (strides),
  // until the work that this puts on the stream has read them. A captured graph's replays read those
  // of their own.
  DeviceViewFn capture;
};

// How rows travel between GPUs with kAllToAll and kGather. The bits are the same.
enum class RankEngine : std::uint8_t {
  // Messages of the communicator: the host waits for the other ranks several times in each call, and
  // every rank returns what became of the call.
  kMessages,
  // Ranks write into each other's memory and wait on the device: enqueue waits for nobody, may be
  // captured into a graph, and what becomes of a call is told by health(). kUnsupported where that
  // cannot be, with the reason.
  kPeerWindows,
  // kPeerWindows where it can be on all ranks, else kMessages; summary() says which and why.
  kAuto,
};
std::string_view rank_engine_name(RankEngine engine);  // "messages", "peer_windows", "auto"

// How the ranks of a layer work together.
struct RankOptions {
  // Not null: has Options::parallel.flat_size() ranks, of which this one is flat_rank(); create and
  // forward are collective, and the output is the complete sum for the rows of this rank. Layers
  // that share a communicator are used in the same order on all ranks. Without one, or of one rank,
  // nothing travels, and what says how is not looked at.
  std::shared_ptr<Communicator> communicator;
  RankTransport transport = RankTransport::kAuto;
  // kPeerWindows: ranks that are threads of one process, or have a process each on one host, at most
  // 32, each with rows of its own (no tensor parallelism), on GPUs with access to each other or on
  // one, and CUDA_MODULE_LOADING=EAGER in the environment before CUDA starts. A process may see its
  // own GPU only (CUDA_VISIBLE_DEVICES). Threads that share a GPU, at most 8, call enqueue with
  // streams of their own, made with cudaStreamNonBlocking, on which a kernel has run before (a
  // stream's first may wait for the kernels of others), and with CUDA_DEVICE_MAX_CONNECTIONS=32 in
  // the environment. While a call is under way no rank creates or destroys layers, allocates or
  // frees device memory: that may wait for a kernel that waits for this rank.
  RankEngine engine = RankEngine::kMessages;
  // With peer windows: where their memory is from; empty is PeerMemory::kAuto. The same on all ranks.
  // kUnsupported where rows do not go through peer windows, or where it cannot be had; with
  // RankEngine::kAuto rows go by messages then.
  PeerMemory peer_memory = {};
  // Empty: kPerRank, with enable_eplb kPerSlot.
  std::optional<RankReduction> reduction;
  RankReduction reduction_in_force() const {
    return reduction.value_or(enable_eplb ? RankReduction::kPerSlot : RankReduction::kPerRank);
  }
  // Dtype of partial sums on their way back with kGather and kAllToAll, kPerRank: F32, or BF16 for
  // half the bytes and one more rounding of each (2^-9 relative).
  DType combine_dtype = DType::kF32;
  // With peer windows: how many pairs of a row and an expert a rank may compute in one call. Its
  // experts have memory for so many rows then (at least 1024), instead of for all rows of all ranks
  // with all their experts on this one. A call in which some rank has more is refused on all ranks;
  // no pair is ever dropped: the output is NaN, health() says kLimitExceeded with the rank, what it
  // had and what there is room for, and, as after every failure on the device, the layer takes no
  // more calls. 0: room for every pair. The same on all ranks. kUnsupported where rows do not go
  // through peer windows, and for cuda_general, hidden sizes that are padded and top_k above 64.
  std::int64_t pair_capacity = 0;
  // false: where ranks with the same rows hold parts of each row (kNone, or kGather with tensor
  // parallelism), forward leaves their sum to the caller, who may join it with another. Each
  // rank's output is then its part, shared and identity experts of some rows in it, and
  // maybe_all_reduce completes it. output_is_reduced() says whether that is so: not per slot, with
  // an output transform or where the transport brings complete rows anyway.
  bool reduce_results = true;
  // Shared experts cut for tensor parallelism: each rank has a slice of their intermediate columns,
  // as many slices as ranks have the same rows (ParallelConfig::replica_group), computes it for all
  // rows, and the slices are added with the parts of the routed experts, each rounded as those are;
  // so the order of a row's sum is no longer one rank's, whatever kPerRank says of whole experts.
  // MoeLayerWeights::shared then yields the slice (Checkpoint::load_layer). false: they are whole on
  // every rank, which computes them for its share of the rows. kUnsupported where no parts are added
  // (kAllToAll, kBatched, kPerSlot, an output transform), with load balancing and for shared experts
  // that are the caller's function. Nothing is cut where no other rank has the same rows.
  bool cut_shared = false;
  // Two batches of a call under way at once: a call in which some rank has at least this many rows
  // is cut in two, and the rows (and results) of the one half travel while the experts work on the
  // other. 0: never. Bits and the workspace's size stay as they are. kUnsupported with kNone, where
  // no rows travel, and on a GPU.
  std::int64_t dual_batch_tokens = 0;
  // Expert load balancing: experts live in num_experts + num_redundant_experts slots, as many on
  // each rank, and may move between slots while the layer serves: by the layer (begin_rearrange,
  // which needs a communicator where there are several ranks), or by the caller (set_eplb_state).
  // Needs whole experts and linear placement. With kPerSlot no move changes a bit; with kPerRank a
  // row's parts are added up in another order after one, and a row's place in a call (on a GPU: in
  // its chunk of max_tokens) decides which copy of an expert it goes to, all within that reduction's
  // bound. The source given to create()
  // must yield all experts of the layer; it is not kept. On a GPU it needs a communicator, a captured
  // call goes by the maps of the day that it is replayed on, and calls of streams count when they run.
  bool enable_eplb = false;
  std::int64_t num_redundant_experts = 0;
  std::int64_t eplb_window = 1000;  // forward calls whose load is remembered
};

// Threads of one stage of a layer on a CPU. A stage with less than 100 us of work for one thread
// runs on one, so that a call of microseconds does not wait for a thread that other processes keep
// from running; everything else runs on Options::num_threads. Bits do not depend on it.
struct StageThreads {
  std::string stage;                   // "gate", "router", "experts", "shared_experts"
  int threads = 1;                     // of a call with Options::max_tokens tokens
  std::int64_t one_thread_tokens = 0;  // calls of up to this many run on one thread
};

// What explain shows of a layer.
struct LayerExplanation {
  std::vector<CandidateReport> candidates;  // every stage, in order
  std::string experts_backend;              // the one that would run
  // As FusedMoE::workspace_bytes; over ranks without the buffers of messages.
  std::int64_t workspace_bytes = 0;
  std::string determinism;
  std::string activations;  // what the routed experts' become: activation_text
  std::string quant_note;   // as MoeLayerSpec has it
  // On a CPU, of integer weights: the scheme that quantises activations to int8 per group
  // (int8_group_scheme_of), what it costs and gains. Empty for all others.
  std::string quant_choice;
  std::string router_logits;  // what the router sees: "fp32 sums", "fp32 sums rounded to BF16", ...
  // The stages in the order in which they run, and what runs while rows travel: "gate, router,
  // dispatch, experts, combine (shared_experts meanwhile)".
  std::string stage_order;
  std::vector<StageThreads> threads;  // every stage that may have several; empty on a GPU
};

class FusedMoE {
 public:
  struct Options {
    // --quant name. "as-is": the scheme the weights are stored in. Unquantised weights also run as
    // f32, bf16, f16 (rounded at load) and fp8-block or fp8-bf16 (quantised at load, one expert at
    // a time); fp8 weights also as f32, fp8-block and fp8-bf16; integers of 4 or 8 bits also with
    // activations in int8 per group (int8_group_scheme_of). Anything else is kUnsupported with
    // the nearest legal name. A shared expert that was left unquantised where routed
    // experts are quantised stays as it is stored, and so does one in another quantised format that cannot run as
    // this name says (f32: computed in fp32).
    std::string quant = "as-is";
    // Scales of activations that are quantised to e4m3 per group of columns, instead of those the
    // checkpoint names: kF32, or kE8M0 for powers of two (with_activation_scales). Applies to the
    // routed experts, and to shared ones where they are quantised so. kUnsupported for others.
    std::optional<ScaleFormat> activation_scales;
    std::string backend;  // force one experts backend by name
    // Where weights, workspace and arithmetic are. On a GPU: every scheme and routing method (but
    // simulated ones), functions of the caller's as on_device has them; docs/limits.md lists what
    // is kUnsupported there, explain says it of a layer with the stage and the reason.
    Device device = Device::cpu();
    // Tokens that the workspace allows at once; larger calls are split.
    std::int64_t max_tokens = 512;
    int num_threads = 0;  // at most (see StageThreads); 0: one per core this process may use
    // Sizes and ranks. Without a communicator the output is this rank's partial sum, and the sum
    // over all ranks is the single-rank result (slices of experts: see kPerRank): rank 0 adds what
    // must enter once, shared experts and the zero experts' share.
    ParallelConfig parallel;
    RankOptions ranks;
    LatentTransform transform;  // on a GPU its functions are on_device's
    // Allows output to be the very tensor hidden_states, contiguous and of one dtype: every row is
    // written when nothing reads it any more, shared experts included. Keeps the routed result in
    // the workspace, where it else might go straight into the output (on a GPU: of layers with
    // shared experts only).
    bool inplace = false;
    // On a GPU: shared experts that are not computed as one more of the routed ones run on a stream of
    // the layer's own, of the priority of the call's, beside gate, router and routed experts, with a
    // workspace of their own. Events order it within the stream of the call, so that a graph captures
    // both. The bits stay; explain shows it (stage_order). kUnsupported on the CPU and over ranks.
    bool shared_stream = false;
    // false: the caller computes shared experts itself; their weights need not be there.
    bool include_shared = true;
    // In the place of the layer's own (it has none, or include_shared is false): called in every
    // forward for the rows whose shared experts are this rank's to add. On the CPU; a GPU's is
    // on_device.shared_experts.
    SharedExpertsFn shared_experts;
    // false: every call brings its routing (Args); gate weights need not be there and are not kept.
    bool include_gate = true;
    CustomRoutingFn custom_routing;  // RoutingMethod::kCustom, on the CPU
    LayerDeviceFunctions on_device;  // of a layer on a GPU; kUnsupported on the CPU
    // Called in every forward with the logical ids of up to max_tokens rows, as Trace reports them,
    // whoever chose them. On the CPU; a GPU's is on_device.capture. It must not call the layer.
    RoutingCaptureFn capture;
    // How the layer's gate rounds its fp32 sums before the router sees them (a trace does too), as
    // GateLinear's options of these names say. Experts that fp32 logits keep apart may tie: another
    // engine's choice near ties is that of its own roundings. F32, BF16 or F16; the gate of shared
    // experts stays fp32, and logits that a call brings are taken as they are. Without
    // gate_force_fp32_compute hidden states have the gate weight's dtype, unless that is F32.
    DType router_logits_dtype = DType::kF32;
    bool gate_force_fp32_compute = true;
    ProgressFn progress;
  };

  // Of a file: without include_gate the gate's tensors need not be in it. A round-robin placement
  // becomes linear, with a warning, where it gains nothing or may not be (resolve_placement: no
  // expert groups, load balancing, one rank); create() does what the placement says, because its
  // weights are cut already.
  static Result<FusedMoE> from_checkpoint(const Checkpoint& checkpoint, int layer,
                                          const Options& options);
  // From loaded weights; consumes the source. Errors of every stage, prefixed with its name;
  // kUnsupported for simulated routing, which is no function of the input.
  static Result<FusedMoE> create(MoeLayerWeights weights, const Options& options);

  // What a forward call may report besides its output. All views optional.
  struct Trace {
    TensorView router_logits;  // [M, E] F32, as the router sees them
    TensorView topk_weights;   // [M, k] F32
    TensorView topk_ids;       // [M, k] I32, logical, global
    // [M]: what rounding activations did to each row, and whether the scheme's bound holds for it
    // (numerics.h). Measured beside the kernels where rows are quantised: such a call takes several
    // times as long and allocates, and its output has the bits of one without; a call without pays
    // nothing. forward only, on one rank (kUnsupported else).
    std::span<RowNumerics> numerics = {};
  };
  // One call. hidden_states and output alone: the layer computes logits with its gate and chooses
  // experts with its router. A caller that has the logits, or weights and ids, gives them instead
  // (never both, kInvalidArgument), and the stages in front of them do not run. What Trace reported
  // of a call, given to the next one on the same device, yields the bits of that call; one
  // exception: ids as reported do not carry the weight of identity experts.
  // hidden_states and output may be [B, T, H], rows in that order; then M = B * T in the others.
  // All tensors but hidden_states are contiguous; no input overlaps an output or a trace, and these
  // do not overlap each other (kAliasing).
  struct Args {
    ConstTensorView hidden_states;  // [M, H]
    // [M, E + zero experts] F32, BF16 or F16, widened exactly; non-finite values as in router.h.
    ConstTensorView router_logits;
    // [M, k] F32 and [M, k] I32, I64 or U32, both or neither. Final: no renormalisation, no expert
    // scale and no routed_scaling_factor act on the weights (where the layer scales its routed sum,
    // it still does). Ids are logical and global, whichever rank owns them; -1 is a slot without an
    // expert, whose weight is not read; from num_experts on they name identity experts, which add
    // weight * x. The same id twice in a row counts twice (kInvalidArgument with kBatched). Any
    // other id is kInvalidArgument in host memory (the text says where); in device memory it is
    // read as -1. A NaN weight makes its row NaN.
    ConstTensorView topk_weights, topk_ids;
    // [M] I32, tokens of RoutingMethod::kHash, needed there unless ids are given, not read
    // elsewhere. Outside the table: kInvalidArgument in host memory; in device memory the row has
    // no routed experts, and no shared ones where those run as one more of them.
    ConstTensorView input_ids;
    // [M] U8: rows with non-zero are padding. They reach no expert, count for no load, and their
    // output is zero.
    ConstTensorView padding_mask;
    TensorView output;  // [M, H]
    // [M, H] F32, BF16 or F16, or absent. Takes the shared experts' part, complete over all ranks,
    // which output then lacks. On one rank both in F32 add up to the bits of the sum, but for
    // identity experts. kInvalidArgument when this rank adds no shared experts, or ranks with the
    // same rows do not all give one. enqueue: F32 or BF16; slices (cut_shared) on a GPU: not BF16.
    TensorView shared_output;
    Trace trace;  // router_logits: kInvalidArgument with given ids, which have none
  };
  // hidden_states [M, H] F32, BF16 or F16; output [M, H] F32, BF16 or F16, must not alias
  // hidden_states (but see Options::inplace). Rows of hidden_states may lie apart, all equally far and
  // not backwards, those of [B, T, H] too (kInvalidLayout). M = 0 is ordinary. The result of a row
  // depends on that row and its routing alone: bit-identical for any batch, split, order or thread
  // count.
  //   r = experts(route(x)), times routed_scaling_factor exactly once (in the router's weights, or
  //       here when the model scales the output), through the output transform
  //       (with input_norm_eps both see x normalised in fp32, as MoeLayerSpec says)
  //   y = r + [sigmoid(x . shared_gate)] shared(x) + zero-expert share, in fp32, rounded once
  // f16 layers with shared experts scale r like all others: sums are fp32, so vLLM's division of
  // the shared output by the factor, a guard against f16 overflow, is not needed.
  // Calls on one layer exclude each other by a lock on its workspace.
  // Over ranks: M may differ between ranks and be zero, but ranks of one tensor-parallel group
  // without sequence parallelism pass the same rows. A rank that refuses its arguments makes the
  // call fail on all (kInvalidArgument names it, and its reason); a lost or late rank is the
  // communicator's kDevice.
  // On a GPU, over ranks: gate, router and experts are the device's; a communicator that moves
  // memory of that device (NCCL) moves rows directly, any other through host memory. kUnsupported:
  // kPerSlot with kGather where ranks have the same rows.
  // On a GPU the tensors are still host memory: they are copied there and back, and the call waits.
  // Hidden states that are not bf16 reach the gate as they are and the experts rounded to bf16.
  // Over ranks each gives its own rows' routing, or none, independently of the others.
  Status forward(const Args& args) const;
  Status forward(ConstTensorView hidden_states, TensorView output, const Trace& trace) const;
  Status forward(ConstTensorView hidden_states, TensorView output) const {
    return forward(hidden_states, output, Trace{});
  }

  // The GPU's forward: all tensors are memory of the layer's device, the work is put on `stream`
  // and the call returns. hidden_states [M, H] BF16, output [M, H] BF16 or F32, both contiguous and
  // 16-byte aligned. Either may have any float dtype in layers of a model in F16 or F32 (experts
  // that take bf16, functions, and what travels between ranks for them, see the rows rounded), and
  // where cuda_general computes all experts, over ranks in F32, without functions on bf16 rows.
  // More than max_tokens rows are several steps, one behind the other, with the same bits. Hidden
  // states whose rows are further apart than H are copied first, to memory of the device's
  // stream-ordered pool; else it allocates nothing. Waits for nothing, reads nothing back: may be
  // captured into a CUDA graph, whose replays route anew. Over ranks it is collective and waits on
  // the host for the other ranks, so a stream that is being captured is kUnsupported; with
  // RankEngine::kPeerWindows neither: the device waits, at most the communicator's time for each of
  // two waits, and where that ends in a failure the output is NaN, health() says why on all ranks,
  // and the layer's later calls fail. A rank whose own arguments are refused ends the call of all
  // in the same way. Ranks may replay graphs of different sizes in one call, of at most max_tokens
  // rows. Calls use one workspace: order them by a stream or events. Errors, all before the first
  // launch: kUnsupported (a CPU layer), kInvalidShape, kInvalidDType, kInvalidLayout (alignment,
  // not contiguous), kInvalidArgument (null, host memory, another device's), kAliasing,
  // kLimitExceeded (more than max_tokens rows, of which a step would not begin on 16 bytes, or
  // through peer windows); then kDevice when a launch fails. The caller's routing is memory of the
  // device too, aligned as its elements are; a captured graph reads it anew at each replay.
  Status enqueue(Stream stream, const Args& args) const;
  Status enqueue(Stream stream, ConstTensorView hidden_states, TensorView output,
                 const Trace& trace) const;
  Status enqueue(Stream stream, ConstTensorView hidden_states, TensorView output) const {
    return enqueue(stream, hidden_states, output, Trace{});
  }

  // Over ranks: ok, or the failure that ended a call, as far as this rank has heard of it; of a call
  // through peer windows it is told once its work is done. Stays. Waits for nothing.
  Status health() const;

  // What the layer is, in one line for a log: sizes, this rank's share, routing, activation, scheme,
  // backend, and how it is spread.
  std::string summary() const;
  const MoeLayerSpec& spec() const;
  Device device() const;
  const Scheme& quant() const;  // the scheme in force, its bound for this layer's sizes
  // The part of quant().output_bound that rounding activations causes: what
  // NumericsSummary::within takes.
  double activation_bound() const;
  std::string experts_backend() const;
  std::int64_t workspace_bytes() const;          // on the layer's device
  std::int64_t weight_bytes() const;             // resident, all stages
  std::vector<CandidateReport> explain() const;  // every stage, in order
  std::string determinism() const;
  RankTransport transport() const;  // in force; kNone on one rank
  // Whether forward's output is the sum over all ranks. False without a communicator for several
  // ranks, and where RankOptions::reduce_results leaves a sum to the caller.
  bool output_is_reduced() const;
  // Completes an output of forward: x [M, H] F32, BF16 or F16, contiguous, becomes the
  // sum over the ranks that have the same rows, in rank order in fp32, rounded once; of F32 outputs
  // without identity experts that is, bit for bit, what reduce_results yields. Nothing happens where
  // output_is_reduced(). Collective; all pass the same M. kUnsupported without a communicator.
  // x is host memory or, of a layer on a GPU, F32 or BF16 memory of its device, written by work on
  // `stream`: the call waits for the other ranks on the host, the sums are on the stream when it
  // returns. A stream that is being captured is kUnsupported.
  Status maybe_all_reduce(TensorView x, Stream stream = {}) const;
  // Payload bytes that this layer's ranks exchange: sent by this rank so far, other layers on the
  // same communicator included.
  std::int64_t bytes_sent() const;

  // --- Where experts are ---
  //
  // Sizes and ranks in force: Options::parallel, or what update_expert_map was given last.
  ParallelConfig parallel() const;
  // Slots of the layer: its experts and the redundant ones; and those that are this rank's.
  std::int64_t global_num_experts() const;
  std::int64_t local_num_experts() const;
  // [global_num_experts()]: local index of each slot, -1 for those of other ranks; empty where all
  // are local. Slot e is expert e; with load balancing what physical_to_logical() says.
  std::vector<std::int32_t> expert_map() const;
  // What the backend keeps of this rank's routed experts (not router, gate, shared experts), one row
  // per local slot, as Experts::expert_parts says: moving experts is copying rows, between layers of
  // one model with the same backend. The arrays are the layer's own, on its device: what is written
  // is in force at once, and must not be written while a forward call, or what enqueue has put on a
  // stream, reads. Valid until update_expert_map or the end of the layer. Empty on a rank without
  // experts. kUnsupported from a backend that hands out none.
  Result<std::vector<ExpertPart>> get_expert_weights() const;

  // Another world for a layer that lives: ranks that come or go.
  struct World {
    ParallelConfig parallel;                     // as Options::parallel
    std::shared_ptr<Communicator> communicator;  // as RankOptions::communicator; null: none
    std::int64_t num_redundant_experts = 0;      // as RankOptions; 0 without enable_eplb
  };
  // From now on this layer is what create() would make in that world, to the bit, with its gate,
  // router and shared experts, which it keeps. `experts` yields what create() would want there: the
  // local experts (or slices) of world.parallel, with enable_eplb all of the layer's. It is read in
  // this call; until the end the old experts are in memory too. With load balancing experts are in
  // their first places again, nothing has been measured, and a caller's maps and load view are gone.
  // No other function of this layer may run meanwhile. With a communicator it is collective over the
  // new world; ranks that are new there call create() instead, with the same options, and ranks
  // that are not in it do nothing. After an error, which all ranks of the new world get, the layer is
  // as it was. Errors: those of create(); kInvalidArgument during a rearrangement; kUnsupported on a
  // GPU, and where this rank would have to add shared experts that it has not loaded (without a
  // communicator rank 0 does).
  Status update_expert_map(const World& world, ExpertSource& experts);

  // --- Expert load balancing (Options::enable_eplb, else kUnsupported) ---
  // All ranks call these alike, between forward calls. On a GPU they wait for what enqueue has put on
  // streams; replays of captured calls are done before one of them is called.
  //
  // Expert of each slot; empty without load balancing.
  std::vector<std::int32_t> physical_to_logical() const;
  // [num_experts] rows that chose each expert, on all ranks, in the window. Padding counts for none,
  // neither do slots without an expert. kUnsupported on several ranks without a communicator.
  Result<std::vector<double>> measured_load() const;
  // Whether forward calls count (they do at first). A call that does not count takes no place in
  // the window.
  Status set_eplb_recording(bool record);
  // Maps of the caller's, who balances experts itself: `state` as Router takes it. Its maps are
  // checked and copied in this call, and hold for every later one until the next maps: by this
  // function, a rearrangement's end or update_expert_map. To change them, call again.
  //   logical_to_physical, replica_count  slots of each expert that rows go to; not all that hold it
  //                        need be there
  //   load                 [global_num_experts()] or empty; the caller's memory, to which each
  //                        forward call that records adds how many of this rank's rows went to
  //                        each slot (saturating; ranks with the same rows all count them). In use
  //                        until the next set_eplb_state, update_expert_map or the layer's end. On a
  //                        GPU calls of streams are added by the next forward or measured_load
  //   record               as set_eplb_recording
  //   physical_to_logical  [global_num_experts()]: what the slots hold, for a caller who has moved
  //                        experts by get_expert_weights; empty: what physical_to_logical() says
  // With a communicator it is collective. Errors, after which nothing has changed: kInvalidArgument
  // (names the entry) for sizes, counts outside [1, max_replicas], slots out of range, a slot that
  // comes twice, a slot that holds another expert (a stale map), ranks with different maps, or a
  // rearrangement in flight.
  Status set_eplb_state(const EplbState& state,
                        std::span<const std::int32_t> physical_to_logical = {});
  // The placement that rebalance_experts computes for `load` [num_experts], with slots kept where
  // they can be: what begin_rearrange takes; without any load the current one. Ranks of one node are
  // consecutive. Errors of rebalance_experts.
  Result<std::vector<std::int32_t>> plan_rebalance(std::span<const double> load,
                                                   int num_nodes = 1) const;
  // Begins to move experts until slot p holds wanted[p]; every expert needs a slot. Nothing
  // changes yet. kInvalidArgument (on all ranks) also when ranks want different things or one
  // rearrangement is in flight; kUnsupported on several ranks without a communicator.
  Status begin_rearrange(std::span<const std::int32_t> wanted);
  // The same towards plan_rebalance of measured_load().
  Status begin_rebalance(int num_nodes = 1);
  // Moves up to max_transfers experts between ranks into a buffer, which has room for the slots that
  // change and goes at the end; forward may be called before and after, and serves from the slots.
  // True once all ranks have copied the buffer into the slots and switched to the new maps, in this
  // very call; false: call again. After an error the rearrangement is over and the layer is as it
  // was. Between GPUs that write into each other's memory (RankEngine::kPeerWindows), and on one GPU,
  // the buffer is device memory, unless it would take more than a quarter of what is free: copies run
  // beside what is enqueued, the call that begins the last ones returns false, and the next one waits
  // for them; ranks wait for each other in the first call and from that one on. max_transfers (below
  // 1: 1) is the same on all ranks; kInvalidArgument, on all, where it is not in the first call.
  Result<bool> continue_rearrange(std::int64_t max_transfers = 8);

  FusedMoE(FusedMoE&&) noexcept;
  FusedMoE& operator=(FusedMoE&&) noexcept;
  ~FusedMoE();

 private:
  friend Result<LayerExplanation> explain_layer(const MoeLayerFormat& format,
                                                const Options& options);
  struct Impl;
  explicit FusedMoE(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

// The catalogue for a layer without its weights: of a checkpoint (Checkpoint::check_layer), or of a
// shape, whose gate is BF16 and whose shared expert is stored as the others. Refuses with the code
// and reason of FusedMoE::create.
Result<LayerExplanation> explain_layer(const MoeLayerFormat& format,
                                       const FusedMoE::Options& options);
Result<LayerExplanation> explain_layer(const MoeLayerSpec& spec, const FusedMoE::Options& options);

}  // namespace moesaic
