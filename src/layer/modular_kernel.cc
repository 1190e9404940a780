#include "moesaic/modular_kernel.h"

#include <fmt/format.h>

#include <mutex>
#include <new>
#include <utility>

#include "core/arena.h"
#include "core/checked.h"
#include "core/fault.h"
#include "core/refusal.h"
#include "experts/problem_checks.h"
#include "layer/kernel_impl.h"

namespace moesaic {
namespace {

Status check_formats(const MoeProblem& problem, const PrepareAndFinalize& pf,
                     const Experts& experts, const ModularKernel::Options& options) {
  const auto name = [](ActivationFormat f) {
    return f == ActivationFormat::kStandard ? "standard" : "batched";
  };
  if (pf.format() != experts.format()) {
    return {StatusCode::kUnsupported,
            fmt::format("activation format: prepare_finalize {} produces {}, experts {} need {}",
                        pf.name(), name(pf.format()), experts.name(), name(experts.format()))};
  }
  if (problem.format != experts.format()) {
    return {StatusCode::kUnsupported,
            fmt::format("activation format: the problem says {}, experts {} are {}",
                        name(problem.format), experts.name(), name(experts.format()))};
  }
  if (problem.format == ActivationFormat::kStandard && options.max_tokens_per_expert != 0) {
    return {StatusCode::kInvalidArgument,
            fmt::format("max_tokens_per_expert: got {}, the standard format needs 0",
                        options.max_tokens_per_expert)};
  }
  if (problem.format == ActivationFormat::kBatched &&
      (options.max_tokens_per_expert < 1 || options.max_tokens_per_expert != problem.max_tokens)) {
    return {StatusCode::kInvalidArgument,
            fmt::format("max_tokens_per_expert: got {}, the batched format needs T = {} of the "
                        "problem, at least 1",
                        options.max_tokens_per_expert, problem.max_tokens)};
  }
  return {};
}

// Memory that the call writes, against what it reads beside its rows and their routing, and against
// the numerics that it reports.
Status expect_apart(std::string_view field, const void* data, std::int64_t bytes,
                    const ModularKernel::Args& a) {
  if (MOESAIC_FAULT(kernel_small_inputs_may_overlap)) return {};
  MOESAIC_RETURN_IF_ERROR(
      experts::expect_disjoint(field, data, bytes, "expert_map", a.expert_map.data(),
                               static_cast<std::int64_t>(a.expert_map.size_bytes())));
  MOESAIC_RETURN_IF_ERROR(
      experts::expect_disjoint(field, data, bytes, "numerics", a.numerics.data(),
                               static_cast<std::int64_t>(a.numerics.size_bytes())));
  for (const auto& [name, scale] :
       {std::pair{"a1_scale", a.a1_scale}, std::pair{"a2_scale", a.a2_scale}}) {
    if (!scale.present()) continue;
    const auto n = contiguous_bytes(scale.dtype, scale.shape);
    if (!n.ok()) return n.status().with_context(name);
    MOESAIC_RETURN_IF_ERROR(experts::expect_disjoint(field, data, bytes, name, scale.data, *n));
  }
  return {};
}

}  // namespace

Result<ModularKernel> ModularKernel::create(const MoeProblem& problem,
                                            std::unique_ptr<PrepareAndFinalize> prepare_finalize,
                                            std::unique_ptr<Experts> experts,
                                            const Options& options) {
  if (!prepare_finalize || !experts) {
    return Status(StatusCode::kInvalidArgument, "prepare_finalize, experts: got null, need both");
  }
  MOESAIC_RETURN_IF_ERROR(check_problem(problem));
  MOESAIC_RETURN_IF_ERROR(check_formats(problem, *prepare_finalize, *experts, options));
  if (options.max_tokens < 1 || options.max_tokens > (std::int64_t{1} << 31) - 1) {
    return Status(StatusCode::kInvalidArgument,
                  fmt::format("max_tokens: got {}, need 1 .. 2^31-1", options.max_tokens));
  }
  if (options.inplace && options.has_shared_experts) {
    return Status(StatusCode::kInvalidArgument,
                  "inplace: got true, but shared experts read the same input; need false");
  }
  if (options.calls_in_flight < 1 || options.calls_in_flight > 16) {
    return Status(StatusCode::kInvalidArgument,
                  fmt::format("calls_in_flight: got {}, need 1 .. 16", options.calls_in_flight));
  }
  if (options.calls_in_flight > 1) {
    MOESAIC_RETURN_IF_ERROR(expect_cpu(problem.device).with_context("calls_in_flight"));
  }
  MOESAIC_RETURN_IF_ERROR(prepare_finalize->attach(*experts));
  std::unique_ptr<Impl> impl(new (std::nothrow) Impl);
  if (!impl) return Status(StatusCode::kOutOfMemory, "cannot allocate the kernel");
  impl->problem = problem;
  impl->options = options;
  impl->pf = std::move(prepare_finalize);
  impl->experts = std::move(experts);
  MOESAIC_ASSIGN_OR_RETURN(impl->slot_bytes, impl->workspace_size(options.max_tokens));
  if (options.own_workspace) {
    const auto bytes = checked_mul(impl->slot_bytes, options.calls_in_flight);
    if (!bytes) return Status(StatusCode::kLimitExceeded, "the kernel's workspace exceeds 2^63-1");
    MOESAIC_ASSIGN_OR_RETURN(impl->workspace,
                             DeviceTensor::uninitialized(problem.device, DType::kU8, {*bytes}));
  }
  return ModularKernel(std::move(impl));
}

Result<std::int64_t> ModularKernel::Impl::workspace_size(std::int64_t tokens) const {
  Arena arena = Arena::measure();
  MOESAIC_ASSIGN_OR_RETURN(const Pieces unused, carve(arena, tokens));
  static_cast<void>(unused);
  return arena.used();
}

Result<std::int64_t> ModularKernel::workspace_size(std::int64_t tokens) const {
  const std::int64_t most = impl_->options.max_tokens;
  if (tokens < 0 || tokens > most) {
    return Status(tokens < 0 ? StatusCode::kInvalidArgument : StatusCode::kLimitExceeded,
                  fmt::format("tokens: got {}, need 0 to max_tokens = {}", tokens, most));
  }
  return impl_->workspace_size(tokens);
}

Result<std::span<std::byte>> ModularKernel::Impl::workspace_of(const Args& a, int slot) const {
  if (a.workspace.empty()) {
    if (options.own_workspace) {
      return workspace.span().subspan(static_cast<std::size_t>(slot * slot_bytes),
                                      static_cast<std::size_t>(slot_bytes));
    }
    MOESAIC_ASSIGN_OR_RETURN(const std::int64_t needed, workspace_size(a.hidden_states.dim(0)));
    if (needed == 0) return a.workspace;
    return Status(
        StatusCode::kInvalidArgument,
        "workspace: got none, and the kernel has none of its own (own_workspace = false)");
  }
  if (a.workspace.data() == nullptr) {
    return Status(StatusCode::kInvalidArgument, "workspace: got bytes at null, need memory");
  }
  const std::int64_t alignment = problem.device.is_cuda() ? 256 : 64;
  if (reinterpret_cast<std::uintptr_t>(a.workspace.data()) %
          static_cast<std::uintptr_t>(alignment) !=
      0) {
    return Status(StatusCode::kInvalidLayout,
                  fmt::format("workspace: got an address that is not a multiple of {}", alignment));
  }
  MOESAIC_ASSIGN_OR_RETURN(const std::int64_t bytes, workspace_size(a.hidden_states.dim(0)));
  if (std::ssize(a.workspace) < bytes) {
    return Status(StatusCode::kWorkspaceTooSmall,
                  fmt::format("workspace: got {} bytes, need {}", a.workspace.size(), bytes));
  }
  const ConstTensorView view(a.workspace.data(), DType::kU8, {std::ssize(a.workspace)},
                             problem.device);
  for (const auto& [field, t] :
       {std::pair{"topk_ids", a.topk_ids}, std::pair{"topk_weights", a.topk_weights},
        std::pair{"output", ConstTensorView(a.output)}}) {
    MOESAIC_RETURN_IF_ERROR(expect_no_overlap("workspace", view, field, t));
  }
  // Rows that lie apart: from the first to the last, as everywhere.
  const ConstTensorView& x = a.hidden_states;
  MOESAIC_ASSIGN_OR_RETURN(const std::int64_t input_bytes,
                           MOESAIC_FAULT(kernel_rows_apart_taken_as_one_block)
                               ? contiguous_bytes(x.dtype, x.shape)
                               : experts::strided_extent_bytes("hidden_states", x));
  MOESAIC_RETURN_IF_ERROR(experts::expect_disjoint("workspace", a.workspace.data(),
                                                   std::ssize(a.workspace), "hidden_states", x.data,
                                                   input_bytes));
  MOESAIC_RETURN_IF_ERROR(
      expect_apart("workspace", a.workspace.data(), std::ssize(a.workspace), a));
  return a.workspace;
}

Status ModularKernel::Impl::check(const Args& a) const {
  const Shape hidden_shape{a.hidden_states.rank() == 2 ? a.hidden_states.dim(0) : -1,
                           problem.hidden_size};
  if (!(a.hidden_states.shape == hidden_shape)) {
    return {StatusCode::kInvalidShape,
            fmt::format("hidden_states: got {}, need [M, {}]", a.hidden_states.shape.to_string(),
                        problem.hidden_size)};
  }
  const std::int64_t tokens = hidden_shape[0];
  for (const auto& [field, view] :
       {std::pair{"hidden_states", a.hidden_states}, std::pair{"topk_ids", a.topk_ids},
        std::pair{"topk_weights", a.topk_weights},
        std::pair{"output", ConstTensorView(a.output)}}) {
    MOESAIC_RETURN_IF_ERROR(expect_device(field, view, problem.device));
  }
  if (tokens > options.max_tokens) {
    return {StatusCode::kLimitExceeded, fmt::format("tokens: got {}, need at most max_tokens = {}",
                                                    tokens, options.max_tokens)};
  }
  for (const auto& [field, view] : {std::pair{"hidden_states", a.hidden_states},
                                    std::pair{"output", ConstTensorView(a.output)}}) {
    MOESAIC_RETURN_IF_ERROR(expect_float_dtype(field, view.dtype));
  }
  MOESAIC_RETURN_IF_ERROR(expect_shape("output", a.output, hidden_shape));
  MOESAIC_RETURN_IF_ERROR(expect_contiguous("output", a.output));
  const Shape slots{tokens, problem.top_k};
  MOESAIC_RETURN_IF_ERROR(expect_dtype("topk_ids", a.topk_ids, DType::kI32));
  MOESAIC_RETURN_IF_ERROR(expect_shape("topk_ids", a.topk_ids, slots));
  MOESAIC_RETURN_IF_ERROR(expect_contiguous("topk_ids", a.topk_ids));
  MOESAIC_RETURN_IF_ERROR(expect_dtype("topk_weights", a.topk_weights, DType::kF32));
  MOESAIC_RETURN_IF_ERROR(expect_shape("topk_weights", a.topk_weights, slots));
  MOESAIC_RETURN_IF_ERROR(expect_contiguous("topk_weights", a.topk_weights));
  if (a.expert_map.empty()
          ? problem.num_local_experts != problem.num_experts
          : static_cast<std::int64_t>(a.expert_map.size()) != problem.num_experts) {
    return {StatusCode::kInvalidShape,
            fmt::format("expert_map: got [{}], need [{}] for {} local experts", a.expert_map.size(),
                        problem.num_experts, problem.num_local_experts)};
  }
  if (!a.numerics.empty() && !pf->keeps_rows()) {
    return {StatusCode::kUnsupported,
            fmt::format("numerics: {} gives the experts other rows than the caller's", pf->name())};
  }
  MOESAIC_ASSIGN_OR_RETURN(const std::int64_t input_bytes,
                           experts::strided_extent_bytes("hidden_states", a.hidden_states));
  MOESAIC_ASSIGN_OR_RETURN(const std::int64_t output_bytes,
                           contiguous_bytes(a.output.dtype, a.output.shape));
  const bool same = a.output.data == a.hidden_states.data &&
                    a.output.dtype == a.hidden_states.dtype && a.hidden_states.is_contiguous();
  if (!(options.inplace && same)) {
    MOESAIC_RETURN_IF_ERROR(experts::expect_disjoint(
        "output", a.output.data, output_bytes, "hidden_states", a.hidden_states.data, input_bytes));
  }
  MOESAIC_RETURN_IF_ERROR(expect_apart("output", a.output.data, output_bytes, a));
  MOESAIC_RETURN_IF_ERROR(expect_no_overlap("output", a.output, "topk_ids", a.topk_ids));
  return expect_no_overlap("output", a.output, "topk_weights", a.topk_weights);
}

ModularKernel::ModularKernel(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
ModularKernel::ModularKernel(ModularKernel&&) noexcept = default;
ModularKernel& ModularKernel::operator=(ModularKernel&&) noexcept = default;
ModularKernel::~ModularKernel() = default;

const MoeProblem& ModularKernel::problem() const { return impl_->problem; }
const Experts& ModularKernel::experts() const { return *impl_->experts; }
Experts& ModularKernel::experts() { return *impl_->experts; }
const PrepareAndFinalize& ModularKernel::prepare_finalize() const { return *impl_->pf; }
std::int64_t ModularKernel::workspace_bytes() const { return impl_->workspace.bytes(); }

}  // namespace moesaic
