#include "experts/sm90/experts.h"

#include <fmt/format.h>

#include <algorithm>
#include <new>
#include <utility>

#include "core/fault.h"
#include "cuda/device_memory.h"
#include "experts/padded_source.h"
#include "experts/sm90/experts_impl.h"
#include "permute/sm90/combine.h"

namespace moesaic::cuda {

CudaExperts::CudaExperts(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
CudaExperts::~CudaExperts() {
  const DeviceScope scope(impl_->device);
  impl_.reset();
}

Result<std::unique_ptr<CudaExperts>> CudaExperts::create(const MoeProblem& problem,
                                                         ExpertSource& source, int device) {
  MOESAIC_RETURN_IF_ERROR(can_implement(problem));
  const DeviceScope scope(device);
  MOESAIC_RETURN_IF_ERROR(scope.status());
  MOESAIC_ASSIGN_OR_RETURN(const int sms, require_hopper(device));
  std::unique_ptr<Impl> impl(new (std::nothrow) Impl());
  if (!impl) return Status(StatusCode::kOutOfMemory, "cannot allocate the experts object");
  MOESAIC_ASSIGN_OR_RETURN(impl->problem, fitted_problem(problem));
  MOESAIC_ASSIGN_OR_RETURN(impl->plan, make_experts_plan(impl->problem));
  impl->device = device;
  impl->traits = hopper_traits(sms);
  const bool padded = impl->problem.intermediate_size != problem.intermediate_size;
  experts::PaddedSource with_zeros(problem, impl->problem, source);
  MOESAIC_RETURN_IF_ERROR(impl->load(padded ? with_zeros : source));
  std::unique_ptr<CudaExperts> experts(new (std::nothrow) CudaExperts(std::move(impl)));
  if (!experts) return Status(StatusCode::kOutOfMemory, "cannot allocate the experts object");
  return experts;
}

std::int64_t CudaExperts::weight_bytes() const {
  std::int64_t bytes = impl_->w13_bias.bytes() + impl_->w2_bias.bytes();
  for (const Allocation& part : impl_->parts) bytes += part.bytes();
  return bytes;
}
std::vector<ExpertPart> CudaExperts::expert_parts(std::int64_t count) const {
  std::vector<ExpertPart> list;
  const auto add = [&](std::string_view name, const Allocation& part) {
    if (part.bytes() == 0) return;
    list.push_back({name, TensorView(part.as<std::byte>(), DType::kU8,
                                     Shape{count, part.bytes() / impl_->problem.num_local_experts},
                                     Device::cuda(impl_->device))});
  };
  for (std::size_t i = 0; i < impl_->parts.size(); ++i) {
    add(impl_->plan.format->parts[i].name, impl_->parts[i]);
  }
  add("w13_bias", impl_->w13_bias);
  add("w2_bias", impl_->w2_bias);
  return list;
}
// Static scales that are alike now may not be then.
void CudaExperts::let_parts_change() {
  if (MOESAIC_FAULT(cuda_experts_scales_stay_alike)) return;
  impl_->own_scales_differ = impl_->plan.static_scales && impl_->problem.num_local_experts > 1;
}
std::optional<GpuExperts::KeptRows> CudaExperts::kept_rows() const {
  if (!impl_->quantizes_rows() || has_slabs(impl_->problem)) return std::nullopt;
  return KeptRows{impl_->plan.format->rows, impl_->problem.hidden_size,
                  impl_->plan.power_of_two_scales};
}
SlotsPlace CudaExperts::slots_place(const CudaExpertsArgs& a) const {
  if (!has_slots_place()) return {};
  MoeProblem problem = impl_->problem;
  if (a.top_k > 0) problem.top_k = a.top_k;
  Arena arena({static_cast<std::byte*>(a.workspace), static_cast<std::size_t>(a.workspace_bytes)});
  const ExpertsWorkspace w =
      ExpertsWorkspace::carve(problem, impl_->plan, a.tokens, a.pair_capacity, arena);
  if (a.pair_capacity == 0 || w.control == nullptr) return {w.y2};
  return {w.y2, w.row_of_pair, w.control + 2, a.pair_capacity};
}
bool CudaExperts::has_slots_place() const { return !impl_->plan.wide(); }
bool CudaExperts::takes_any_rows() const { return impl_->plan.wide(); }
std::string_view CudaExperts::name() const { return kCudaExpertsName; }
std::string_view CudaExperts::determinism() const { return kCudaExpertsDeterminism; }

std::optional<ExpertsPrologue> CudaExperts::prologue(const CudaExpertsArgs& a) const {
  const ExpertsPlan& plan = impl_->plan;
  MoeProblem problem = impl_->problem;
  if (a.top_k > 0) problem.top_k = a.top_k;
  const std::int64_t pairs = a.tokens * problem.top_k;
  const bool needs_routing = plan.weight_on_input || impl_->rows_per_pair(a) ||
                             plan.gathers_rows() || has_slabs(problem) || impl_->makes_half_rows(a);
  if (a.tokens < 1 || pairs > kListPairs || needs_routing) return std::nullopt;
  // The list that the GEMM kernel makes stays in its shared memory: the combine must be there too.
  if (a.tokens > kFoldCombineTokens && !MOESAIC_FAULT(cuda_list_apart_from_its_combine)) {
    return std::nullopt;
  }
  if (impl_->variant(a).max_columns > kListColumns) return std::nullopt;
  Arena arena({static_cast<std::byte*>(a.workspace), static_cast<std::size_t>(a.workspace_bytes)});
  const ExpertsWorkspace w = ExpertsWorkspace::carve(problem, plan, a.tokens, 0, arena);
  if (!arena.status().ok()) return std::nullopt;  // enqueue says why
  ExpertsPrologue prologue;
  if (plan.makes_rows() && a.rows.kind == CudaRows::Kind::kValues) {
    prologue.quant = impl_->quant_params(a, w);
  }
  prologue.zero = w.control;
  prologue.zero_words = w.counter_words;
  const int workers = impl_->traits.sms / (impl_->variant(a).max_columns <= kSplitColumns ? 2 : 1);
  prologue.starts_early = pairs * plan.w13.bands() >= workers;
  return prologue;
}

void CudaExperts::Impl::prefetch_ahead(AheadWeights& ahead) const {
  // What an H100 reads in about 4 us: DeepSeek-V3 at one token measured equal from 8 to 16 MB.
  constexpr std::int64_t kBytes = 12'000'000;
  const std::int64_t bands = plan.w13.bands(), chunks = plan.w13.chunks();
  ahead.bands = static_cast<std::int32_t>(bands);
  ahead.chunks =
      static_cast<std::int32_t>(std::min(chunks, kBytes / (bands * plan.w13.band_bytes())));
  ahead.weights = weights.w13 + (problem.num_local_experts - 1) * plan.w13.image_bytes();
}

bool CudaExperts::can_route(const RouteParams& r) const {
  const EpilogueKind epilogue = impl_->plan.epilogue;
  const bool routes = epilogue == EpilogueKind::kSwiglu || epilogue == EpilogueKind::kRelu2;
  return routes && r.tokens <= kRouteTokens && r.columns <= kRouteColumns && r.groups <= 32 &&
         r.top_k + r.num_shared <= 32;
}

Status CudaExperts::enqueue(void* stream, const CudaExpertsArgs& a) const {
  const ExpertsPlan& plan = impl_->plan;
  MOESAIC_RETURN_IF_ERROR(check_args(impl_->problem, plan, a));
  MoeProblem problem = problem_of_rows(impl_->problem);
  if (a.top_k > 0) problem.top_k = a.top_k;
  if (a.tokens == 0) return {};
  MOESAIC_ASSIGN_OR_RETURN(const std::int64_t rows, rows_of_tokens(problem, a.tokens));
  Arena arena({static_cast<std::byte*>(a.workspace), static_cast<std::size_t>(a.workspace_bytes)});
  const ExpertsWorkspace w = ExpertsWorkspace::carve(problem, plan, rows, a.pair_capacity, arena);
  MOESAIC_RETURN_IF_ERROR(arena.status());
  const DeviceScope scope(impl_->device);
  MOESAIC_RETURN_IF_ERROR(scope.status());

  const GroupedVariant variant = impl_->variant(a);
  const bool codes = a.rows.kind == CudaRows::Kind::kCodes;
  const bool slots = a.result.kind == CudaResult::Kind::kSlots;
  const bool makes_rows = plan.makes_rows() && !codes;  // in this call or the one before
  MOESAIC_RETURN_IF_ERROR(impl_->make_rows(stream, a, problem, w, rows_per_record(variant)));

  CombineParams c;
  c.y2 = slots ? a.result.data : w.y2;
  c.wide = plan.wide();
  c.output_f16 = a.result.dtype == DType::kF16;
  c.row_of_pair = w.row_of_pair;
  c.shared = static_cast<const std::uint16_t*>(a.result.shared_rows);
  c.tokens = a.tokens;
  c.top_k = static_cast<std::int32_t>(problem.top_k);
  c.hidden = static_cast<std::int32_t>(problem.hidden_size);
  c.output_f32 = a.result.dtype == DType::kF32;
  c.output = slots ? nullptr : a.result.data;

  GroupedParams g;
  g.weights = impl_->weights;
  const bool own_rows = makes_rows || plan.gathers_rows() || impl_->makes_half_rows(a);
  g.rows.x = own_rows ? w.rows : static_cast<const std::byte*>(a.rows.data);
  g.rows.x_scale = codes ? a.rows.scale : w.row_scale;
  g.rows.x_scale_stride = codes ? a.rows.scale_stride : w.row_scale_stride;
  g.rows.inner = w.inner;
  g.rows.inner_scale = w.inner_scale;
  g.rows.inner_scale_stride = w.inner_scale_stride;
  g.rows.y2 = slots ? a.result.data : w.y2;
  const bool weighs = !plan.weight_on_input && !has_slabs(problem);
  g.list = {w.groups,  w.pair_of_row, weighs ? w.weight_of_row : nullptr,
            w.control, w.control + 1, w.group_done};
  if (a.in_front) {
    g.own_list.pairs = static_cast<std::int32_t>(rows * problem.top_k);
    g.own_list.source = {a.topk_ids, a.topk_weights, a.expert_map,
                         static_cast<std::int32_t>(problem.num_experts),
                         static_cast<std::int32_t>(problem.num_local_experts)};
    const std::optional<RouteParams>& route = a.in_front->route;
    g.own_list.routes = route.has_value();
    if (route) g.own_list.route = *route;
    if (route && route->num_shared > 0) impl_->prefetch_ahead(g.ahead);
  }
  plan.fill_sizes(problem, g);
  g.place_of_row = w.pair_of_row + (a.pair_capacity > 0 ? w.listed_rows : 0);
  if (impl_->rows_per_pair(a) || plan.gathers_rows()) g.top_k = 1;  // a row is that of a pair
  if (plan.static_scales) {
    g.whole.x_static = impl_->x_static(a, w);
    g.whole.inner_static = impl_->inner_static(a, w);
  }
  if (row_has_values(plan.format->rows)) g.inner_values = plan.format->rows;
  g.whole.inner_bf16 = w.inner_bf16;
  g.whole.inner_amax = w.inner_amax;
  g.fold_combine = !slots && a.tokens <= kFoldCombineTokens && variant.max_columns <= 64;
  g.combine = c;
  g.band_done = w.band_done;
  g.power_of_two_scales = plan.power_of_two_scales;
  g.activation = grouped_activation(problem.activation);
  LaunchGrouped* const launch = launcher_of(*plan.format, variant);
  MOESAIC_RETURN_IF_ERROR(
      check_call("grouped GEMMs", launch(variant, g, impl_->traits.sms, stream)));

  if (g.fold_combine || slots) return {};
  return check_call("combine", launch_combine(c, stream));
}

}  // namespace moesaic::cuda
