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
#include "prepare_finalize/sm90/slab_filler.h"
#include "prepare_finalize/sm90/slot_sums.h"
#include "quant/compute_scheme.h"

namespace moesaic::cuda {
namespace {

class CudaBatched final : public PrepareAndFinalize {
 public:
  CudaBatched(const MoeProblem& problem, DType slab_dtype, DType result_dtype, DeviceTraits traits)
      : p_(problem), filler_(problem, slab_dtype, traits), result_dtype_(result_dtype) {}

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
    SlabMemory rows;
    std::byte* results = nullptr;  // [E_l, T, H] of result_dtype_
  };
  Result<Buffers> carve(Arena& arena, std::int64_t tokens) const;
  Status check(const PrepareArgs& args) const;

  MoeProblem p_;
  SlabFiller filler_;
  DType result_dtype_;
};

Result<CudaBatched::Buffers> CudaBatched::carve(Arena& arena, std::int64_t tokens) const {
  Buffers b;
  MOESAIC_ASSIGN_OR_RETURN(b.rows, filler_.carve(arena, tokens));
  MOESAIC_ASSIGN_OR_RETURN(const std::int64_t results,
                           contiguous_bytes(result_dtype_, filler_.shape()));
  b.results = arena.take<std::byte>(results);
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
  // Without rows nothing is to be done, and the slabs have none.
  const Shape shape{p_.num_local_experts, tokens == 0 ? 0 : p_.max_tokens, p_.hidden_size};
  prepared.hidden_states = ConstTensorView(b.rows.slabs, filler_.dtype(), shape, p_.device);
  prepared.expert_num_tokens = {b.rows.counts, static_cast<std::size_t>(p_.num_local_experts)};
  prepared.expert_output = TensorView(b.results, result_dtype_, shape, p_.device);
  MOESAIC_RETURN_IF_ERROR(filler_.fill({a.hidden_states, a.topk_ids.as<std::int32_t>(),
                                        a.topk_weights.as<float>(), a.expert_map.data()},
                                       b.rows, a.stream.handle));
  return prepared;
}

Status CudaBatched::finalize(const FinalizeArgs& a) const {
  if (a.reduction != TopKWeightAndReduce::kNaiveBatched &&
      a.reduction != TopKWeightAndReduce::kDelegate) {
    return unsupported("reduction: batched finalize needs naive batched or delegated");
  }
  const std::int64_t tokens = a.output.dim(0);
  if (tokens == 0) return {};
  MOESAIC_RETURN_IF_ERROR(expect_shape("expert_output", a.expert_output, filler_.shape()));
  Arena arena(a.workspace);
  MOESAIC_ASSIGN_OR_RETURN(const Buffers b, carve(arena, tokens));
  return reduce_slots(p_, a, b.rows.slot_rows);
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
