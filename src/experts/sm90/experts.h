// The experts stage on a Hopper GPU (sm_90): work list, activation quantisation, both grouped GEMMs
// and the combine, over device memory. Only launches: nothing here synchronises once it is created.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "cuda/experts_prologue.h"
#include "moesaic/experts.h"
#include "moesaic/status.h"
#include "permute/sm90/slots_place.h"
#include "permute/sm90/some_rows.h"
#include "router/sm90/route.h"

namespace moesaic::cuda {

// How the hidden states [M, H] of a call come: contiguous, 16-byte aligned. The bits of the result
// are the same.
struct CudaRows {
  enum class Kind : std::uint8_t { kValues, kCodes, kKept };
  Kind kind = Kind::kValues;
  const void* data = nullptr;
  const float* scale = nullptr;  // kCodes: [ceil(H / 128)][scale_stride >= M]
  std::int64_t scale_stride = 0;
  DType dtype = DType::kBF16;  // kValues

  // bf16, quantised by the call where the scheme says so.
  static CudaRows bf16(const void* data) { return {Kind::kValues, data}; }
  // The same of F32, F16 or BF16: where GpuExperts::takes_any_rows.
  static CudaRows values(const void* data, DType dtype) {
    return {Kind::kValues, data, nullptr, 0, dtype};
  }
  // fp8-block only: quantised before they came here, weight on the input included, as
  // launch_quant_rows does it.
  static CudaRows codes(const void* data, const float* scale, std::int64_t scale_stride) {
    return {Kind::kCodes, data, scale, scale_stride};
  }
  // Scales per row or group, without weight on the input: bf16 that the call before this one in
  // this workspace (of experts with same_rows, with as many tokens) has quantised already.
  static CudaRows kept(const void* data) { return {Kind::kKept, data}; }
};

// Where the result of a call goes, 16-byte aligned.
struct CudaResult {
  enum class Kind : std::uint8_t { kSum, kSlots };
  Kind kind = Kind::kSum;
  void* data = nullptr;
  // BF16 or F32 (slots: BF16); where GpuExperts::takes_any_rows any float (slots: F32 at least).
  DType dtype = DType::kBF16;
  const void* shared_rows = nullptr;  // [M, H] bf16 added to the sum, or null; may be a BF16 `data`

  // The weighted sums [M, H].
  static CudaResult sum(void* data, DType dtype, const void* shared_rows = nullptr) {
    return {Kind::kSum, data, dtype, shared_rows};
  }
  // The weighted rows [M * k, H] of all slots; rows of slots without an expert here are not
  // written. The sum is what launch_combine makes of them. Batched format: the rows of the slabs
  // [num_local_experts, T, H], unweighted; those past the counts are not written.
  static CudaResult slots(void* data, DType dtype = DType::kBF16) {
    return {Kind::kSlots, data, dtype};
  }
};

// Static scales of operand rows that a call brings: [num_local_experts], or one for all; null: the
// experts' own.
struct CudaCallScales {
  const float* of = nullptr;
  bool one_for_all = false;
};

// What a kernel in front of a call has done for it: run its prologue (CudaExperts::prologue).
struct CudaInFront {
  // The GEMM kernel routes too (CudaExperts::can_route), without a kernel in front: topk_ids and
  // topk_weights are where it puts ids and weights, the last slots of a token those of fused shared
  // experts. Empty: ids and weights are there.
  std::optional<RouteParams> route;
};

// Device pointers of one call. Nothing may overlap except where said.
struct CudaExpertsArgs {
  std::int64_t tokens = 0;  // M, or batched T, <= problem.max_tokens; 0 is ordinary
  CudaRows rows;
  std::int64_t top_k = 0;  // k of this call, at most problem.top_k; 0: problem.top_k
  // How many experts topk_ids can name, for the choice of the kernel only; 0: problem.num_experts.
  std::int64_t used_experts = 0;
  // How many rows have experts here, for the choice of the kernel only; 0: `tokens`.
  std::int64_t likely_tokens = 0;
  // Of more than kComparedPairs pairs, for results that are slots: which rows are there. The others'
  // ids are not read and their slots not written.
  SomeRows some_rows;
  // For results that are slots in slots_place, of more than kComparedPairs pairs: how many pairs may
  // have an expert here; the workspace has room for so many. A call with more leaves all slots
  // unwritten, and says so in SlotsPlace::listed. 0: every pair.
  std::int64_t pair_capacity = 0;
  const std::int32_t* topk_ids = nullptr;    // [M, k] global ids; -1 or out of range: no expert
  const float* topk_weights = nullptr;       // [M, k]
  const std::int32_t* expert_map = nullptr;  // [E] -> local or -1; null: identity
  // Batched format (MoeProblem::format), in the place of the three above and of top_k: rows
  // [num_local_experts, T, H] (scales of codes: stride >= num_local_experts * T), how many of them
  // count in each slab ([num_local_experts]; below 0 counts as 0, above T as T), result slots.
  // Rows past the counts are neither read nor written.
  const std::int32_t* slab_counts = nullptr;
  CudaResult result;
  void* workspace = nullptr;  // 256-byte aligned, >= workspace_size(M)
  std::int64_t workspace_bytes = 0;
  std::optional<CudaInFront> in_front;  // empty: the call runs its own prologue
  // Of both GEMMs, for schemes with static scales, not with in_front. The result has the bits of
  // experts made with them; what is not finite and above 0 counts as NaN.
  CudaCallScales x_scales = {}, inner_scales = {};
  bool brings_scales() const { return x_scales.of != nullptr || inner_scales.of != nullptr; }
};

// The experts of one layer on a GPU, whichever kernels they have, as those call them who have
// device memory. Which there are: experts/cuda_general/gpu_backends.h.
class GpuExperts {
 public:
  // What tells quantised rows of one call from those of another.
  struct KeptRows {
    RowForm form;
    std::int64_t hidden;
    bool power_of_two_scales;
    bool operator==(const KeptRows&) const = default;
  };
  GpuExperts() = default;
  GpuExperts(const GpuExperts&) = delete;
  GpuExperts& operator=(const GpuExperts&) = delete;
  virtual ~GpuExperts() = default;

  virtual std::string_view name() const = 0;
  virtual std::string_view determinism() const = 0;
  virtual std::int64_t weight_bytes() const = 0;
  // As Experts::expert_parts, of the first `count` local experts: device memory.
  virtual std::vector<ExpertPart> expert_parts(std::int64_t count) const = 0;
  // Weights and scales will be replaced in place (expert_parts). Before a call is captured.
  virtual void let_parts_change() {}
  // Rows of F32, F16 and BF16 (CudaRows::values); results of these dtypes; F32 slots.
  virtual bool takes_any_rows() const { return false; }
  // Of hidden states and results, in bytes.
  virtual std::int64_t rows_alignment(DType) const { return 16; }
  // The rows that a call leaves in its workspace for CudaRows::kept; empty: none.
  virtual std::optional<KeptRows> kept_rows() const { return std::nullopt; }
  // Memory in the workspace of a call that CudaResult::slots may name: whoever adds the slots up
  // himself needs none of his own. Of `args` only tokens, top_k, pair_capacity, rows and workspace
  // are read.
  virtual SlotsPlace slots_place(const CudaExpertsArgs&) const { return {}; }
  // Whether there is.
  virtual bool has_slots_place() const { return false; }
  // Whether both quantise the same hidden states to the same codes, at the same place of a
  // workspace.
  bool same_rows(const GpuExperts& other) const {
    return kept_rows().has_value() && kept_rows() == other.kept_rows();
  }
  // Launches on `stream` (a cudaStream_t; null: the default stream) of the device it was created
  // on. Checks sizes, alignment and the workspace (kInvalidArgument, kInvalidLayout, kInvalidDType,
  // kLimitExceeded, kWorkspaceTooSmall; kUnsupported for rows that it does not take) before the
  // first launch; ids are checked on the device and those out of range dropped. Capturable; a
  // captured graph replays with other ids and weights. May be called from several threads with
  // distinct workspaces. kDevice when a launch fails.
  virtual Status enqueue(void* stream, const CudaExpertsArgs& args) const = 0;
  // The prologue of a call, for a kernel in front of enqueue to run; then args.in_front says so. Of
  // `args` only tokens, top_k, rows and workspace are read. Empty: the call runs its own; the bits
  // of the result are the same.
  virtual std::optional<ExpertsPrologue> prologue(const CudaExpertsArgs&) const {
    return std::nullopt;
  }
  // May in_front->route be this? Saves the router's kernel; same bits.
  virtual bool can_route(const RouteParams&) const { return false; }
  // After a call with these arguments, without in_front, has run and before its workspace is
  // used again: adds what rounding did to each row, [tokens], in the order of slots. Waits; copies
  // rows, codes and results to the host.
  virtual Status add_numerics(const CudaExpertsArgs& args, std::span<RowNumerics> rows) const = 0;
};

// Computes what experts/reference/experts.h defines for the schemes of formats.h with bf16
// activations (f16: with hidden states of any dtype), with these differences: products are summed by
// the tensor cores in chunks of 128 bytes of K (64 bf16 or F16, 128 e4m3 or int8 values) in ascending
// order (sums of e4m3 products with a scale per row are taken out every two chunks, int8 sums are
// exact); an expert's weighted output row is rounded to bf16 before the combine (f16: not); sigmoid
// and exp are the hardware's (activation.cuh). With integer operands whose sums and rounded rows are
// exact the result equals the reference bit for bit.
class CudaExperts final : public GpuExperts {
 public:
  // ok, or the reason for refusing, without looking at weights or a device: check_problem's, then
  // kUnsupported (scheme, activation_dtype, f16 in the batched format, a hidden size whose rows are
  // not whole 16 bytes, more than 1024 local experts, too many rows).
  static Status can_implement(const MoeProblem& problem);
  // Bytes for M tokens, monotone in tokens, without a device; capacity: that of the call.
  // kUnsupported as above, kInvalidArgument for negative tokens.
  static Result<std::int64_t> workspace_size(const MoeProblem& problem, std::int64_t tokens) {
    return workspace_size(problem, tokens, 0);
  }
  static Result<std::int64_t> workspace_size(const MoeProblem& problem, std::int64_t tokens,
                                             std::int64_t capacity);
  // takes_any_rows() of a problem that can_implement has passed.
  static bool takes_any_rows_of(const MoeProblem& problem);
  // Uploads and repacks expert by expert; besides the final weights one expert is on the device.
  // kDevice (no device, wrong architecture: the text says which), kOutOfMemory, and the source's.
  static Result<std::unique_ptr<CudaExperts>> create(const MoeProblem& problem,
                                                     ExpertSource& source, int device);
  ~CudaExperts() override;

  std::optional<KeptRows> kept_rows() const override;
  SlotsPlace slots_place(const CudaExpertsArgs& args) const override;
  bool has_slots_place() const override;
  bool takes_any_rows() const override;
  std::string_view name() const override;
  std::int64_t weight_bytes() const override;
  std::vector<ExpertPart> expert_parts(std::int64_t count) const override;
  void let_parts_change() override;
  std::string_view determinism() const override;
  // kUnsupported: quantised or kept rows of another scheme.
  Status enqueue(void* stream, const CudaExpertsArgs& args) const override;
  // Empty above kListPairs pairs or kFoldCombineTokens tokens, where the rows depend on the routing, and
  // where F16 rows are made of others.
  std::optional<ExpertsPrologue> prologue(const CudaExpertsArgs& args) const override;
  // The intermediate's own values are gone: its error is that of its codes' steps.
  Status add_numerics(const CudaExpertsArgs& args, std::span<RowNumerics> rows) const override;
  bool can_route(const RouteParams& route) const override;

 private:
  struct Impl;
  explicit CudaExperts(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

inline constexpr std::string_view kCudaExpertsName = "cuda_sm90";
inline constexpr std::string_view kCudaExpertsDeterminism =
    "bitwise repeatable on one GPU model: a row's result depends on that row, its ids and weights "
    "only, not on batch, neighbours, order or replay";

}  // namespace moesaic::cuda
