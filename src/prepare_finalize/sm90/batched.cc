// The batched reference on a GPU: as batched.cc, in device memory, on a stream. Only launches.
#include <fmt/format.h>

#include <memory>
#include <new>

#include "core/arena.h"
#include "core/checked.h"
#include "core/refusal.h"
#include "cuda/dense_rows.h"
#include "cuda/device_memory.h"
#include "prepare_finalize/sm90/catalogue_row.h"
#include "prepare_finalize/sm90/slabs.h"
#include "prepare_finalize/sm90/slot_sums.h"
#include "quant/compute_scheme.h"

namespace moesaic::cuda {
namespace {

class CudaBatched final : public PrepareAndFinalize {
 public:
  CudaBatched(const MoeProblem& problem, DType slab_dtype, DType result_dtype, DeviceTraits traits)
      : p_(problem), slab_dtype_(slab_dtype), result_dtype_(result_dtype), traits_(traits) {}

  std::string_view name() const override { return "batched_reference"; }
  ActivationFormat format() const override { return ActivationFormat::kBatched; }
  Status attach(const Experts& experts) override {
    const TopKWeightAndReduce r = experts.reduction();
    if (r == TopKWeightAndReduce::kNaiveBatched || r == TopKWeightAndReduce::kDelegate) return {};
    return unsupported(
        fmt::format("prepare_finalize batched_reference: experts {} do not leave a batched or "
                    "delegated reduction",
                    experts.name()));
  }
  bool output_is_reduced() const override { return false; }
  bool keeps_rows() const override { return false; }
  bool owns_expert_output() const override { return true; }
  std::int64_t max_dispatched_tokens(std::int64_t) const override { return p_.max_tokens; }
  Result<std::int64_t> workspace_size(std::int64_t tokens) const override {
    if (tokens < 0) {
      return Status(StatusCode::kInvalidArgument, fmt::format("tokens: got {}, need >= 0", tokens));
    }
    Arena arena = Arena::measure();
    MOESAIC_ASSIGN_OR_RETURN(const Buffers unused, carve(arena, tokens));
    static_cast<void>(unused);
    // What lies behind it in a kernel's workspace is the experts'.
    return round_up(arena.used(), 256);
  }
  Result<Prepared> prepare(const PrepareArgs& args) const override;
  Status finalize(const FinalizeArgs& args) const override;

 private:
  struct Buffers {
    std::int32_t* counts = nullptr;     // [E_l]
    std::int32_t* slot_rows = nullptr;  // [M, k]
    std::byte* slabs = nullptr;         // [E_l, T, H] of slab_dtype_
    std::byte* results = nullptr;       // [E_l, T, H] of result_dtype_
    // Of the work list with one record per expert.
    std::int32_t *pair_of_row = nullptr, *row_of_pair = nullptr;
    float* weight_of_row = nullptr;
    GroupRecord* groups = nullptr;
    std::uint32_t *group_done = nullptr, *control = nullptr;
    std::int64_t max_groups = 0;
  };
  Shape slab_shape() const { return {p_.num_local_experts, p_.max_tokens, p_.hidden_size}; }
  Result<Buffers> carve(Arena& arena, std::int64_t tokens) const;
  Status check(const PrepareArgs& args) const;
  Status make_list(const PrepareArgs& args, const Buffers& b) const;

  MoeProblem p_;
  DType slab_dtype_, result_dtype_;
  DeviceTraits traits_;
};

// What finalize needs lies first, so that it is found again for any M.
Result<CudaBatched::Buffers> CudaBatched::carve(Arena& arena, std::int64_t tokens) const {
  const auto pairs = checked_mul(tokens, p_.top_k);
  if (!pairs || *pairs > std::int64_t{1} << 30) {
    return Status(StatusCode::kLimitExceeded,
                  fmt::format("tokens: got {} of {} experts each, need at most 2^30 pairs", tokens,
                              p_.top_k));
  }
  MOESAIC_ASSIGN_OR_RETURN(const std::int64_t slabs, contiguous_bytes(slab_dtype_, slab_shape()));
  MOESAIC_ASSIGN_OR_RETURN(const std::int64_t results,
                           contiguous_bytes(result_dtype_, slab_shape()));
  Buffers b;
  b.counts = arena.take<std::int32_t>(p_.num_local_experts);
  b.slot_rows = arena.take<std::int32_t>(*pairs);
  b.slabs = arena.take<std::byte>(slabs);
  b.results = arena.take<std::byte>(results);
  b.pair_of_row = arena.take<std::int32_t>(*pairs);
  b.row_of_pair = arena.take<std::int32_t>(*pairs);
  b.weight_of_row = arena.take<float>(*pairs);
  b.max_groups = max_group_records(*pairs, p_.num_local_experts, std::max<std::int64_t>(*pairs, 1));
  b.groups = arena.take<GroupRecord>(b.max_groups);
  b.group_done = arena.take<std::uint32_t>(b.max_groups);
  b.control = arena.take<std::uint32_t>(2);
  MOESAIC_RETURN_IF_ERROR(arena.status());
  return b;
}

Status CudaBatched::check(const PrepareArgs& a) const {
  if (a.hidden_states.rank() != 2) {
    return {StatusCode::kInvalidShape,
            fmt::format("hidden_states: got {}, need [M, {}]", a.hidden_states.shape.to_string(),
                        p_.hidden_size)};
  }
  const std::int64_t tokens = a.hidden_states.dim(0);
  MOESAIC_RETURN_IF_ERROR(expect_float_dtype("hidden_states", a.hidden_states.dtype));
  MOESAIC_RETURN_IF_ERROR(expect_rows("hidden_states", a.hidden_states));
  struct Field {
    std::string_view field;
    const ConstTensorView& view;
    DType dtype;
    std::int64_t columns;
  };
  for (const Field& t :
       {Field{"hidden_states", a.hidden_states, a.hidden_states.dtype, p_.hidden_size},
        Field{"topk_ids", a.topk_ids, DType::kI32, p_.top_k},
        Field{"topk_weights", a.topk_weights, DType::kF32, p_.top_k}}) {
    MOESAIC_RETURN_IF_ERROR(expect_dtype(t.field, t.view, t.dtype));
    MOESAIC_RETURN_IF_ERROR(expect_shape(t.field, t.view, {tokens, t.columns}));
    if (t.field != "hidden_states") MOESAIC_RETURN_IF_ERROR(expect_contiguous(t.field, t.view));
    MOESAIC_RETURN_IF_ERROR(expect_device(t.field, t.view, p_.device));
    if (tokens == 0) continue;
    MOESAIC_RETURN_IF_ERROR(
        check_device_pointer(t.field, t.view.data, dtype_bits(t.dtype) / 8, p_.device.index()));
  }
  const auto map = std::ssize(a.expert_map);
  if (map == 0 ? p_.num_local_experts != p_.num_experts : map != p_.num_experts) {
    return {StatusCode::kInvalidShape,
            fmt::format("expert_map: got [{}], need [{}]", map, p_.num_experts)};
  }
  if (map == 0) return {};
  return check_device_pointer("expert_map", a.expert_map.data(), 4, p_.device.index());
}

Status CudaBatched::make_list(const PrepareArgs& a, const Buffers& b) const {
  const auto narrow = [](std::int64_t v) { return static_cast<std::int32_t>(v); };
  AlignParams p;
  p.topk_ids = a.topk_ids.as<std::int32_t>();
  p.topk_weights = a.topk_weights.as<float>();
  p.expert_map = a.expert_map.data();
  p.pairs = narrow(a.hidden_states.dim(0) * p_.top_k);
  p.num_experts = narrow(p_.num_experts);
  p.num_local_experts = narrow(p_.num_local_experts);
  p.rows_per_record = p.pairs;
  p.max_groups = narrow(b.max_groups);
  p.pair_of_row = b.pair_of_row;
  p.weight_of_row = b.weight_of_row;
  p.row_of_pair = b.row_of_pair;
  p.groups = b.groups;
  p.group_done = b.group_done;
  p.next_item = b.control;
  p.num_groups = b.control + 1;
  return check_call("prepare: list", launch_align(p, nullptr, traits_, a.stream.handle));
}

Result<Prepared> CudaBatched::prepare(const PrepareArgs& a) const {
  MOESAIC_RETURN_IF_ERROR(check(a));
  const std::int64_t tokens = a.hidden_states.dim(0);
  Arena arena(a.workspace);
  MOESAIC_ASSIGN_OR_RETURN(const Buffers b, carve(arena, tokens));
  const DeviceScope scope(p_.device.index());
  MOESAIC_RETURN_IF_ERROR(scope.status());
  MOESAIC_RETURN_IF_ERROR(
      check_device_pointer("workspace", a.workspace.data(), 16, p_.device.index()));
  Prepared prepared;
  prepared.hidden_states = ConstTensorView(b.slabs, slab_dtype_, slab_shape(), p_.device);
  prepared.expert_num_tokens = {b.counts, static_cast<std::size_t>(p_.num_local_experts)};
  prepared.expert_output = TensorView(b.results, result_dtype_, slab_shape(), p_.device);
  if (tokens == 0) {
    MOESAIC_RETURN_IF_ERROR(
        fill_zero("prepare: counts", b.counts, p_.num_local_experts * 4, a.stream.handle));
    return prepared;
  }
  if (p_.num_local_experts > 0) MOESAIC_RETURN_IF_ERROR(make_list(a, b));
  const auto narrow = [](std::int64_t v) { return static_cast<std::int32_t>(v); };
  FillSlabsParams p;
  p.x = a.hidden_states.data;
  p.x_dtype = a.hidden_states.dtype;
  p.x_stride = tokens == 1 ? p_.hidden_size : a.hidden_states.strides[0];
  p.columns = p_.hidden_size;
  p.weights = p_.apply_router_weight_on_input ? a.topk_weights.as<float>() : nullptr;
  p.topk_ids = a.topk_ids.as<std::int32_t>();
  p.expert_map = a.expert_map.data();
  p.pairs = narrow(tokens * p_.top_k);
  p.top_k = narrow(p_.top_k);
  p.num_experts = narrow(p_.num_experts);
  p.num_local_experts = narrow(p_.num_local_experts);
  p.groups = b.groups;
  p.num_groups = b.control + 1;
  p.row_of_pair = b.row_of_pair;
  p.slab_rows = narrow(p_.max_tokens);
  p.counts = b.counts;
  p.slot_rows = b.slot_rows;
  p.slabs = b.slabs;
  p.dtype = slab_dtype_;
  MOESAIC_RETURN_IF_ERROR(check_call("prepare: slabs", launch_fill_slabs(p, a.stream.handle)));
  return prepared;
}

Status CudaBatched::finalize(const FinalizeArgs& a) const {
  if (a.reduction != TopKWeightAndReduce::kNaiveBatched &&
      a.reduction != TopKWeightAndReduce::kDelegate) {
    return unsupported("reduction: batched finalize needs naive batched or delegated");
  }
  const std::int64_t tokens = a.output.dim(0);
  if (tokens == 0) return {};
  MOESAIC_RETURN_IF_ERROR(expect_shape("expert_output", a.expert_output, slab_shape()));
  Arena arena(a.workspace);
  MOESAIC_ASSIGN_OR_RETURN(const Buffers b, carve(arena, tokens));
  return reduce_slots(p_, a, b.slot_rows);
}

}  // namespace

Result<std::unique_ptr<PrepareAndFinalize>> make_sm90_batched(const MoeProblem& problem) {
  MOESAIC_RETURN_IF_ERROR(sm90_batched_can_implement(problem));
  MOESAIC_RETURN_IF_ERROR(check_device(problem.device));
  const DeviceScope scope(problem.device.index());
  MOESAIC_RETURN_IF_ERROR(scope.status());
  MOESAIC_ASSIGN_OR_RETURN(const DeviceTraits traits, current_device_traits());
  const DType slabs = quant::operand_dtype(problem.activation_dtype, problem.quant.kind);
  // The fast experts leave bf16 rows.
  const DType results = choose_experts(problem, "cuda_sm90").ok() ? DType::kBF16 : DType::kF32;
  std::unique_ptr<PrepareAndFinalize> pf(new (std::nothrow)
                                             CudaBatched(problem, slabs, results, traits));
  if (!pf) return Status(StatusCode::kOutOfMemory, "cannot allocate prepare_finalize");
  return pf;
}

}  // namespace moesaic::cuda
