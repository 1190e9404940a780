// One process, no transport: the experts see the caller's own tensors.
#include <fmt/format.h>

#include <memory>
#include <new>

#include "core/fault.h"
#include "core/refusal.h"
#include "moesaic/modular_kernel.h"
#include "prepare_finalize/call_checks.h"
#include "prepare_finalize/predicates.h"
#include "prepare_finalize/sm90/slot_sums.h"
#include "prepare_finalize/topk_weight_and_reduce.h"

namespace moesaic::prepare_finalize {
namespace {

class LocalPrepareFinalize final : public PrepareAndFinalize {
 public:
  explicit LocalPrepareFinalize(const MoeProblem& problem) : problem_(problem) {}

  std::string_view name() const override { return "local"; }
  ActivationFormat format() const override { return ActivationFormat::kStandard; }
  Status attach(const Experts& experts) override {
    const TopKWeightAndReduce left = experts.reduction();
    if (left != TopKWeightAndReduce::kNaiveBatched) return {};
    return unsupported(
        fmt::format("prepare_finalize local: experts {} leave a batched reduction, need none, "
                    "contiguous or delegated",
                    experts.name()));
  }
  bool output_is_reduced() const override { return false; }
  bool keeps_rows() const override { return true; }
  std::int64_t max_dispatched_tokens(std::int64_t tokens) const override { return tokens; }
  Result<std::int64_t> workspace_size(std::int64_t) const override { return std::int64_t{0}; }

  // Quantisation of the input and a weight on it are left to the experts, which read each row once
  // anyway; so nothing is copied here.
  Result<Prepared> prepare(const PrepareArgs& args) const override {
    Prepared prepared;
    prepared.hidden_states = args.hidden_states;
    return prepared;
  }

  Status finalize(const FinalizeArgs& a) const override {
    if (!problem_.device.is_cuda()) MOESAIC_RETURN_IF_ERROR(check_finalize_args(problem_, a));
    switch (a.reduction) {
      case TopKWeightAndReduce::kNoOp:
        return reduce_no_op(a.output, a.expert_output);
      case TopKWeightAndReduce::kContiguous:
      case TopKWeightAndReduce::kDelegate:
        // Nothing was dispatched: the experts did not run and there are no rows to write.
        if (a.output.dim(0) == 0) return {};
        if (problem_.device.is_cuda() && !MOESAIC_FAULT(local_adds_rows_of_a_gpu)) {
          return cuda::reduce_slots(problem_, a);
        }
        return reduce_contiguous(a.output, a.expert_output,
                                 {a.topk_weights.as<float>(), a.topk_ids.as<std::int32_t>(),
                                  a.expert_map, problem_.top_k, a.apply_router_weight_on_input});
      case TopKWeightAndReduce::kNaiveBatched:
        break;
    }
    return {StatusCode::kUnsupported, "reduction: got naive batched, local finalize has no slabs"};
  }

 private:
  MoeProblem problem_;
};

}  // namespace

Status local_can_implement(const MoeProblem& problem) {
  if (problem.format == ActivationFormat::kStandard) return {};
  return {StatusCode::kUnsupported,
          "format: the experts want batched activations, local yields the standard format"};
}

}  // namespace moesaic::prepare_finalize

namespace moesaic {

Result<std::unique_ptr<PrepareAndFinalize>> make_local_prepare_finalize(const MoeProblem& problem) {
  MOESAIC_RETURN_IF_ERROR(prepare_finalize::local_can_implement(problem));
  std::unique_ptr<PrepareAndFinalize> pf(new (std::nothrow)
                                             prepare_finalize::LocalPrepareFinalize(problem));
  if (!pf) return Status(StatusCode::kOutOfMemory, "cannot allocate prepare_finalize");
  return pf;
}

}  // namespace moesaic
