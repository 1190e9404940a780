// The experts stage: both grouped GEMMs with the activation between them. Problem, weights source,
// backend interface and the ordered catalogue of backends. Symbols as in spec.h; E_l local experts,
// N = 2I (gated) or I.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "moesaic/activation.h"
#include "moesaic/device.h"
#include "moesaic/numerics.h"
#include "moesaic/quant.h"
#include "moesaic/status.h"
#include "moesaic/tensor.h"

namespace moesaic {

enum class ActivationFormat : std::uint8_t {
  kStandard,  // rows in token order, [M, H]
  kBatched,   // one slab per local expert, [E_l, T, H]; the first expert_num_tokens[e] rows of a
              // slab are defined
};

// What an experts backend leaves to finalize.
enum class TopKWeightAndReduce : std::uint8_t {
  kNoOp,          // output is [M, H], weighted and reduced
  kContiguous,    // output is [M*k, H], slot order, unweighted
  kNaiveBatched,  // output is [E_l, T, H], unweighted
  kDelegate,      // finalize decides
};

// What is to be computed; a value that never changes once a backend was made from it.
struct MoeProblem {
  std::int64_t num_experts = 0;        // global
  std::int64_t num_local_experts = 0;  // E_l
  std::int64_t top_k = 0;
  std::int64_t hidden_size = 0;        // H
  std::int64_t intermediate_size = 0;  // I of this rank
  ActivationSpec activation;
  Scheme quant;
  // Dtype of hidden states, to which the intermediate is rounded too (F32 scheme: nothing is).
  DType activation_dtype = DType::kBF16;
  ActivationFormat format = ActivationFormat::kStandard;
  bool has_expert_bias = false;
  bool apply_router_weight_on_input = false;  // each slot's weight multiplies its copy of the row
  std::int64_t max_tokens = 0;  // M (standard) or T (batched) that the workspace must allow
  int num_threads = 0;          // at most; 0: one per core this process may use
  // Where weights, workspace and the memory of a call are, and who computes.
  Device device = Device::cpu();
};

// Everything about a problem that no backend can compute, in this order: sizes and counts
// (kInvalidArgument, kLimitExceeded), activation constants (kInvalidArgument), the quantisation
// pair and activation_dtype (kUnsupported), block shapes (kUnsupported).
// Sizes are bounded so that every byte count of one expert fits 62 bits.
Status check_problem(const MoeProblem& problem);

// One expert's canonical weights. w13 is [N, H] with gate rows first (kGateThenUp), w2 is [H, I],
// both row-major; 4-bit codes two per byte, low nibble first. Biases F32 or BF16. Below, [N, K]
// stands for either matrix; what the scheme does not use is absent.
//   *_scale          per the weight's granularity: kTensor [1], kChannel [N], kBlock
//                    [ceil(N/block_n), ceil(K/block_k)] (rows counted within gate and up), kGroup
//                    [N, ceil(K/block_k)]; dtype per its format (kF32: F32, BF16 or F16)
//   *_global_scale   F32 [1], outer_scale kTensor of the weight (multiplier, not its reciprocal)
//   *_channel_scale  F32 [N], outer_scale kChannel of the weight
//   *_zero           zero_point kInteger: the scale's shape; U8 or I8, x = (q - zero) * scale
//   *_min            zero_point kMin: F32, the scale's shape; x = q * scale - min
//   *_input_scale    F32 [1], static activation scales: granularity kTensor, not dynamic, or
//                    outer_scale kTensor of the activation. Each expert's own: a row that goes to
//                    several experts is quantised for each of them.
//   *_perm           I32 [K], act_order: column k of the weights multiplies column perm[k] of the
//                    activations
struct ExpertWeightsView {
  ConstTensorView w13, w13_scale, w13_bias;
  ConstTensorView w2, w2_scale, w2_bias;
  ConstTensorView w13_global_scale = {}, w2_global_scale = {};
  ConstTensorView w13_channel_scale = {}, w2_channel_scale = {};
  ConstTensorView w13_zero = {}, w2_zero = {};
  ConstTensorView w13_min = {}, w2_min = {};
  ConstTensorView w13_input_scale = {}, w2_input_scale = {};
  ConstTensorView w13_perm = {}, w2_perm = {};
};

// Gives a backend the weights of one local expert at a time, so that it can repack them into its
// own layout without a second full copy in memory.
class ExpertSource {
 public:
  virtual ~ExpertSource() = default;
  // Views valid until the next call. kMissingTensor, kCorruptFile ... as the source finds.
  virtual Result<ExpertWeightsView> expert(std::int64_t local_expert) = 0;
};

// The same tensors of all local experts, stacked: w13 [E_l, N, H], w2 [E_l, H, I], everything else
// with a leading E_l before the shape it has for one expert. Not owned.
using StackedExpertWeights = ExpertWeightsView;
std::unique_ptr<ExpertSource> make_stacked_source(const StackedExpertWeights& weights);

// Everything that a call reads and writes is memory of the problem's device, expert_map,
// expert_num_tokens and workspace too; `numerics` are the host's.
struct ExpertsArgs {
  // Standard: [M, H]; batched: [E_l, T, H]. F32, BF16 or F16 raw activations, of cuda_sm90 BF16;
  // rows may be strided (last axis dense). On a GPU those are copied first, to memory of the
  // device's pool, and are at least H elements apart; slabs are contiguous there.
  ConstTensorView hidden_states;
  // Standard only: [M, k] global ids (I32, -1: no expert) and F32 weights. A GPU treats ids out of
  // range as -1; the CPU refuses them.
  ConstTensorView topk_ids;
  ConstTensorView topk_weights;
  std::span<const std::int32_t> expert_map;  // [E] -> local or -1; empty: identity
  // Batched only, [E_l]: how many rows of each slab count; the others are neither read nor
  // written. The CPU refuses numbers outside 0 .. T. A GPU, where a captured call reads them anew at
  // each replay, takes those below 0 as 0 and those above T as T.
  std::span<const std::int32_t> expert_num_tokens;
  // >= workspace_size(M) bytes, 64-byte aligned, on a GPU 256.
  std::span<std::byte> workspace;
  // Standard, kNoOp: [M, H] F32 or BF16 or F16 (cuda_sm90: not F16); batched: [E_l, T, H] (rows past
  // the counts are not written; cuda_sm90: BF16).
  TensorView output;
  // Rows that were quantised before they came here, as the scheme would (weight on the input
  // included): hidden_states holds F8_E4M3 codes, and this F32 scales per 128 columns, [M, H/128]
  // or [E_l, T, H/128], contiguous; on a GPU strides [1, >= M] or [T, 1, >= E_l T]. Only with
  // takes_quantized_rows().
  ConstTensorView hidden_scale = {};
  // Standard only, not with hidden_scale: what rounding did to each row, [M], overwritten. Measured
  // by scalar code beside the kernels, so such a call is slow, and it allocates; the output has the
  // bits that it has without. Empty: nothing is measured, at no cost.
  std::span<RowNumerics> numerics = {};
  // On a GPU: where run launches. It returns before the result is there (with numerics it waits),
  // can be captured into a graph; the caller orders calls that share a workspace.
  Stream stream = {};
  // In the place of w13_input_scale and w2_input_scale for this call: F32 [1] or [E_l], finite and
  // above 0; either may be absent. The result has the bits of experts that were made with them.
  // Other numbers are kInvalidArgument on the CPU; on a GPU, where a captured call reads them anew
  // at each replay, they make NaN of the rows of experts that have them. kUnsupported for schemes
  // without static activation scales, and for nvfp4 on cuda_sm90.
  ConstTensorView a1_scale = {}, a2_scale = {};
  // On a GPU, standard: output may be the very tensor hidden_states, contiguous and of one dtype.
  // Not with numerics (kUnsupported), which read hidden_states again.
  bool inplace = false;
};

// One array of what a backend keeps of its experts: row e is of local expert e and of no other.
struct ExpertPart {
  std::string_view name;  // "w13.weights", "w2.bias": for people
  TensorView rows;  // [E_l, bytes of one expert] U8, contiguous, memory of the problem's device
};

// One backend bound to one layer's weights. Immutable after construction, but for who writes to its
// expert_parts; run may be called from several threads with distinct workspaces.
class Experts {
 public:
  virtual ~Experts() = default;
  virtual std::string_view name() const = 0;  // as in the catalogue, for example "cpu_avx512_bf16"
  virtual TopKWeightAndReduce reduction() const = 0;
  virtual ActivationFormat format() const = 0;
  // Whether run takes rows as codes and scales (ExpertsArgs::hidden_scale). The result has the bits
  // that the rows they were made of would give.
  virtual bool takes_quantized_rows() const { return false; }
  // Bytes, monotone in tokens. kLimitExceeded when the size does not fit.
  virtual Result<std::int64_t> workspace_size(std::int64_t tokens) const = 0;
  virtual std::int64_t weight_bytes() const = 0;
  // Everything that it keeps of each local expert, in an order and layout of its own: what has to be
  // copied to move an expert. Rows e of all parts, copied over rows f of the same parts of an object
  // of the same name whose problem differs at most in num_experts, num_local_experts, max_tokens,
  // format, threads and device of one model, make f that expert, to the bit. Rows that come from
  // anywhere else make its results undefined. The views are valid while this object is, and must not
  // be written while run reads them. Empty: no local experts, or a backend that cannot.
  virtual std::vector<ExpertPart> expert_parts() { return {}; }
  // One sentence: what the result's bits do and do not depend on.
  virtual std::string_view determinism() const = 0;
  // sum[0 .. n) += weight * row[0 .. n), rounded as run adds up the slots of a token: for callers
  // that get a token's rows one by one. Host memory; backends of the CPU.
  virtual void accumulate(const float* row, float weight, std::int64_t n, float* sum) const {
    for (std::int64_t i = 0; i < n; ++i) sum[i] += weight * row[i];
  }
  // Checks shapes, dtypes, devices, workspace and aliasing; allocates nothing; zero tokens are
  // ordinary.
  virtual Status run(const ExpertsArgs& args) const = 0;
  // run on a GPU and this stream, in the place of args.stream. kUnsupported for host memory.
  Status enqueue(Stream stream, const ExpertsArgs& args) const;
};

// A row of the catalogue: how to ask and how to make.
struct ExpertsBackend {
  std::string_view name;
  std::string_view description;
  // ok, or the reason for refusing, tested in a fixed order without looking at weights.
  Status (*can_implement)(const MoeProblem& problem);
  Result<std::unique_ptr<Experts>> (*create)(const MoeProblem& problem, ExpertSource& source);
  // What Experts::workspace_size and determinism() of the made object will answer; needs no
  // weights. kUnsupported when the problem is not accepted.
  Result<std::int64_t> (*workspace_size)(const MoeProblem& problem, std::int64_t tokens);
  std::string_view determinism;
  // Threads of a call with that many tokens of an accepted problem: at most problem.num_threads, 1
  // where it is a matter of microseconds, and on a GPU.
  int (*threads)(const MoeProblem& problem, std::int64_t tokens);
};
// GPUs first, each kind of device fastest, the plain reference last.
std::span<const ExpertsBackend> experts_catalogue();

struct CandidateReport {
  std::string stage, name, reason;  // reason: empty when accepted
  bool accepted = false;
};
// All rows with acceptance or reason.
std::vector<CandidateReport> explain_experts(const MoeProblem& problem);
// The first accepted row, or the row called `forced` (kNotFound lists the names; kUnsupported gives
// its reason). Without `forced` the same errors of MOESAIC_CPU_TIER where the device is the CPU.
Result<const ExpertsBackend*> choose_experts(const MoeProblem& problem,
                                             std::string_view forced = {});

}  // namespace moesaic
