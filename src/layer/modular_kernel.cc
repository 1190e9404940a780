#include "moesaic/modular_kernel.h"

#include <fmt/format.h>

#include <algorithm>
#include <mutex>
#include <new>
#include <utility>

#include "core/arena.h"
#include "core/checked.h"
#include "core/fault.h"
#include "core/refusal.h"
#include "experts/problem_checks.h"
#include "moesaic/device_tensor.h"

namespace moesaic {

struct ModularKernel::Impl {
  MoeProblem problem;
  Options options;
  std::unique_ptr<PrepareAndFinalize> pf;
  std::unique_ptr<Experts> experts;
  DeviceTensor workspace;    // on the problem's device
  mutable std::mutex mutex;  // one call at a time uses the workspace

  // The three pieces of the workspace for M tokens. The experts' output gets a piece of its own
  // unless they can write straight into the caller's output.
  struct Pieces {
    std::span<std::byte> prepare, experts;
    std::byte* expert_output = nullptr;
  };
  bool writes_output_directly() const {
    return experts->reduction() == TopKWeightAndReduce::kNoOp && pf->keeps_rows() &&
           !options.inplace;
  }
  std::int64_t expert_tokens(std::int64_t tokens) const {
    return problem.format == ActivationFormat::kBatched ? problem.max_tokens
                                                        : pf->max_dispatched_tokens(tokens);
  }
  // Rows of the experts' output: M', M' * k, or all slab rows.
  Result<Shape> expert_output_shape(std::int64_t rows) const {
    if (problem.format == ActivationFormat::kBatched) {
      return Shape{problem.num_local_experts, problem.max_tokens, problem.hidden_size};
    }
    if (experts->reduction() == TopKWeightAndReduce::kNoOp) return Shape{rows, problem.hidden_size};
    const auto slots = checked_mul(rows, problem.top_k);
    if (!slots) return Status(StatusCode::kLimitExceeded, "max_tokens x top_k exceeds 2^63-1");
    return Shape{*slots, problem.hidden_size};
  }

  Result<Pieces> carve(Arena& arena, std::int64_t tokens) const {
    MOESAIC_ASSIGN_OR_RETURN(const std::int64_t prepare_bytes, pf->workspace_size(tokens));
    const std::int64_t rows = expert_tokens(tokens);
    MOESAIC_ASSIGN_OR_RETURN(const std::int64_t expert_bytes, experts->workspace_size(rows));
    Pieces p;
    p.prepare = {arena.take<std::byte>(prepare_bytes), static_cast<std::size_t>(prepare_bytes)};
    p.experts = {arena.take<std::byte>(expert_bytes), static_cast<std::size_t>(expert_bytes)};
    if (!writes_output_directly() && !pf->owns_expert_output()) {
      MOESAIC_ASSIGN_OR_RETURN(const Shape shape, expert_output_shape(rows));
      MOESAIC_ASSIGN_OR_RETURN(const std::int64_t bytes, contiguous_bytes(DType::kF32, shape));
      p.expert_output = arena.take<std::byte>(bytes);
    }
    MOESAIC_RETURN_IF_ERROR(arena.status());
    return p;
  }

  Status check(const Args& a) const;
  Status run_experts(const Args& a, const Prepared& prepared, const Pieces& pieces,
                     const TensorView& expert_output) const;
};

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
  if (options.inplace) {
    MOESAIC_RETURN_IF_ERROR(expect_cpu(problem.device).with_context("inplace"));
  }
  MOESAIC_RETURN_IF_ERROR(prepare_finalize->attach(*experts));
  std::unique_ptr<Impl> impl(new (std::nothrow) Impl);
  if (!impl) return Status(StatusCode::kOutOfMemory, "cannot allocate the kernel");
  impl->problem = problem;
  impl->options = options;
  impl->pf = std::move(prepare_finalize);
  impl->experts = std::move(experts);
  Arena arena = Arena::measure();
  MOESAIC_ASSIGN_OR_RETURN(const Impl::Pieces unused, impl->carve(arena, options.max_tokens));
  static_cast<void>(unused);
  MOESAIC_ASSIGN_OR_RETURN(impl->workspace,
                           DeviceTensor::uninitialized(problem.device, DType::kU8, {arena.used()}));
  return ModularKernel(std::move(impl));
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
  MOESAIC_RETURN_IF_ERROR(expect_no_overlap("output", a.output, "topk_ids", a.topk_ids));
  return expect_no_overlap("output", a.output, "topk_weights", a.topk_weights);
}

Status ModularKernel::Impl::run_experts(const Args& a, const Prepared& prepared,
                                        const Pieces& pieces,
                                        const TensorView& expert_output) const {
  ExpertsArgs e;
  e.hidden_states = prepared.hidden_states;
  e.hidden_scale = prepared.hidden_scale;
  if (problem.format == ActivationFormat::kStandard) {
    e.topk_ids = prepared.topk_ids.present() ? prepared.topk_ids : a.topk_ids;
    e.topk_weights = prepared.topk_weights.present() ? prepared.topk_weights : a.topk_weights;
    e.expert_map = a.expert_map;
  }
  e.expert_num_tokens = prepared.expert_num_tokens;
  e.workspace = pieces.experts;
  e.output = expert_output;
  e.numerics = a.numerics;
  e.a1_scale = a.a1_scale;
  e.a2_scale = a.a2_scale;
  e.stream = a.stream;
  return experts->run(e);
}

Status ModularKernel::run(const Args& args) const {
  const Impl& m = *impl_;
  const std::lock_guard<std::mutex> lock(m.mutex);
  if (const Status bad = m.check(args); !bad.ok()) return m.pf->withdraw(bad, false, {});
  Arena arena(m.workspace.span());
  MOESAIC_ASSIGN_OR_RETURN(const Impl::Pieces pieces, m.carve(arena, args.hidden_states.dim(0)));
  MOESAIC_ASSIGN_OR_RETURN(const Prepared prepared,
                           m.pf->prepare({args.hidden_states, args.topk_weights, args.topk_ids,
                                          args.expert_map, pieces.prepare, args.stream}));

  // Nothing dispatched: the experts have no work, but finalize may be a collective and runs.
  std::int64_t work = prepared.hidden_states.dim(0);
  if (m.problem.format == ActivationFormat::kBatched) {
    work = 0;
    for (const std::int32_t count : prepared.expert_num_tokens) work += count;
  }
  std::fill(args.numerics.begin(), args.numerics.end(), RowNumerics());
  TensorView expert_output(nullptr, args.hidden_states.dtype, Shape{0, m.problem.hidden_size});
  if (work > 0) {
    if (m.pf->owns_expert_output()) {
      expert_output = prepared.expert_output;
    } else if (m.writes_output_directly()) {
      expert_output = args.output;
    } else {
      MOESAIC_ASSIGN_OR_RETURN(const Shape shape,
                               m.expert_output_shape(prepared.hidden_states.dim(0)));
      expert_output = TensorView(pieces.expert_output, DType::kF32, shape);
    }
    if (!MOESAIC_FAULT(kernel_stale_output)) {
      const Status status = m.run_experts(args, prepared, pieces, expert_output);
      if (!status.ok()) return m.pf->withdraw(status, true, pieces.prepare);
    }
  }
  return m.pf->finalize({args.output, expert_output, args.topk_weights, args.topk_ids,
                         args.expert_map, m.experts->reduction(),
                         m.problem.apply_router_weight_on_input, pieces.prepare, args.stream});
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
std::span<std::byte> ModularKernel::workspace_for_test() { return impl_->workspace.span(); }

}  // namespace moesaic
