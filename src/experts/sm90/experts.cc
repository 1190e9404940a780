#include "experts/sm90/experts.h"

#include <fmt/format.h>

#include <algorithm>
#include <new>
#include <utility>
#include <vector>

#include "cuda/device_memory.h"
#include "cuda/quant_rows.h"
#include "experts/problem_checks.h"
#include "experts/sm90/experts_impl.h"
#include "numerics/element.h"
#include "permute/sm90/combine.h"

namespace moesaic::cuda {

Status CudaExperts::Impl::upload(const RepackShape& shape, const ConstTensorView& weight,
                                 const ConstTensorView& scale, const Allocation& staging,
                                 const Allocation& scale_staging, std::byte* image,
                                 float* image_scale) const {
  const std::int64_t bytes = shape.rows * shape.row_bytes();
  MOESAIC_RETURN_IF_ERROR(
      copy_to_device("upload of weights", staging.as<std::byte>(), weight.data, bytes));
  const float* scales = nullptr;
  if (scale.present()) {
    const std::int64_t scale_bytes = scale.dim(0) * scale.dim(1) * std::int64_t{sizeof(float)};
    MOESAIC_RETURN_IF_ERROR(
        copy_to_device("upload of scales", scale_staging.as<std::byte>(), scale.data, scale_bytes));
    scales = scale_staging.as<float>();
  }
  MOESAIC_RETURN_IF_ERROR(check_call("repack", repack_expert(shape, staging.as<std::byte>(), scales,
                                                             image, image_scale, nullptr)));
  // The staging buffer is used again by the next matrix.
  return synchronize(nullptr);
}

Status CudaExperts::Impl::upload_bias(const ConstTensorView& bias, float* to, std::int64_t count,
                                      std::vector<float>& row) const {
  row.resize(static_cast<std::size_t>(count));
  for (std::int64_t i = 0; i < count; ++i) {
    row[static_cast<std::size_t>(i)] = load_as_f32(bias.data, bias.dtype, i);
  }
  return copy_to_device("upload of biases", to, row.data(), count * std::int64_t{sizeof(float)});
}

Status CudaExperts::Impl::load(ExpertSource& source) {
  const std::int64_t local = problem.num_local_experts;
  const bool fp8 = plan.format == GroupedFormat::kFp8Block;
  MOESAIC_RETURN_IF_ERROR(w13.reserve("w13", local * plan.w13.image_bytes()));
  MOESAIC_RETURN_IF_ERROR(w2.reserve("w2", local * plan.w2.image_bytes()));
  if (fp8) {
    MOESAIC_RETURN_IF_ERROR(w13_scale.reserve("w13_scale", local * plan.w13.scale_bytes()));
    MOESAIC_RETURN_IF_ERROR(w2_scale.reserve("w2_scale", local * plan.w2.scale_bytes()));
  }
  if (problem.has_expert_bias) {
    MOESAIC_RETURN_IF_ERROR(w13_bias.reserve("w13_bias", local * plan.w13.rows * 4));
    MOESAIC_RETURN_IF_ERROR(w2_bias.reserve("w2_bias", local * plan.w2.rows * 4));
  }
  Allocation staging, scale_staging;
  const std::int64_t w13_bytes = plan.w13.rows * plan.w13.row_bytes();
  const std::int64_t w2_bytes = plan.w2.rows * plan.w2.row_bytes();
  MOESAIC_RETURN_IF_ERROR(staging.reserve("staging", w13_bytes > w2_bytes ? w13_bytes : w2_bytes));
  MOESAIC_RETURN_IF_ERROR(
      scale_staging.reserve("staging", plan.w13.scale_bytes() + plan.w2.scale_bytes()));
  std::vector<float> row;
  for (std::int64_t e = 0; e < local; ++e) {
    MOESAIC_ASSIGN_OR_RETURN(const ExpertWeightsView view, source.expert(e));
    MOESAIC_RETURN_IF_ERROR(check_expert_weights(problem, view, e));
    MOESAIC_RETURN_IF_ERROR(
        upload(plan.w13, view.w13, view.w13_scale, staging, scale_staging,
               w13.as<std::byte>() + e * plan.w13.image_bytes(),
               fp8 ? w13_scale.as<float>() + e * plan.w13.scale_bytes() / 4 : nullptr));
    MOESAIC_RETURN_IF_ERROR(
        upload(plan.w2, view.w2, view.w2_scale, staging, scale_staging,
               w2.as<std::byte>() + e * plan.w2.image_bytes(),
               fp8 ? w2_scale.as<float>() + e * plan.w2.scale_bytes() / 4 : nullptr));
    if (problem.has_expert_bias) {
      MOESAIC_RETURN_IF_ERROR(
          upload_bias(view.w13_bias, w13_bias.as<float>() + e * plan.w13.rows, plan.w13.rows, row));
      MOESAIC_RETURN_IF_ERROR(
          upload_bias(view.w2_bias, w2_bias.as<float>() + e * plan.w2.rows, plan.w2.rows, row));
    }
  }
  return {};
}

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
  impl->problem = problem;
  impl->plan = make_experts_plan(problem);
  impl->device = device;
  impl->num_sms = sms;
  MOESAIC_RETURN_IF_ERROR(impl->load(source));
  std::unique_ptr<CudaExperts> experts(new (std::nothrow) CudaExperts(std::move(impl)));
  if (!experts) return Status(StatusCode::kOutOfMemory, "cannot allocate the experts object");
  return experts;
}

std::int64_t CudaExperts::weight_bytes() const {
  std::int64_t bytes = 0;
  for (const Allocation* a : {&impl_->w13, &impl_->w2, &impl_->w13_scale, &impl_->w2_scale,
                              &impl_->w13_bias, &impl_->w2_bias}) {
    bytes += a->bytes();
  }
  return bytes;
}
bool CudaExperts::same_rows(const CudaExperts& other) const {
  const Impl &a = *impl_, &b = *other.impl_;
  return a.quantizes_rows() && b.quantizes_rows() &&
         a.problem.hidden_size == b.problem.hidden_size &&
         a.plan.power_of_two_scales == b.plan.power_of_two_scales;
}
std::string_view CudaExperts::name() const { return kCudaExpertsName; }
std::string_view CudaExperts::determinism() const { return kCudaExpertsDeterminism; }

QuantRowsParams CudaExperts::Impl::quant_params(const CudaExpertsArgs& a,
                                                const ExpertsWorkspace& w) const {
  QuantRowsParams q;
  q.x = static_cast<const std::uint16_t*>(a.hidden_states);
  q.weights = plan.weight_on_input ? a.topk_weights : nullptr;
  q.tokens = a.tokens;
  q.columns = problem.hidden_size;
  q.power_of_two_scales = plan.power_of_two_scales;
  q.fp8 = plan.format == GroupedFormat::kFp8Block;
  q.q = w.rows;
  q.scale = w.row_scale;
  q.scale_stride = w.row_scale_stride;
  return q;
}

std::optional<ExpertChores> CudaExperts::chores(const CudaExpertsArgs& a) const {
  const ExpertsPlan& plan = impl_->plan;
  MoeProblem problem = impl_->problem;
  if (a.top_k > 0) problem.top_k = a.top_k;
  const std::int64_t pairs = a.tokens * problem.top_k;
  if (a.tokens < 1 || pairs > kListPairs || plan.weight_on_input) return std::nullopt;
  if (impl_->variant(a).max_columns > kListColumns) return std::nullopt;
  Arena arena({static_cast<std::byte*>(a.workspace), static_cast<std::size_t>(a.workspace_bytes)});
  const ExpertsWorkspace w = ExpertsWorkspace::carve(problem, plan, a.tokens, arena);
  if (!arena.status().ok()) return std::nullopt;  // enqueue says why
  ExpertChores chores;
  if (plan.makes_rows() && a.hidden_scale == nullptr && !a.rows_kept) {
    chores.quant = impl_->quant_params(a, w);
  }
  chores.zero = w.control;
  chores.zero_words = w.counter_words;
  const int workers = impl_->num_sms / (impl_->variant(a).max_columns <= kSplitColumns ? 2 : 1);
  chores.starts_early = pairs * plan.w13.bands() >= workers;
  return chores;
}

void CudaExperts::Impl::ask_ahead(GroupedParams& g) const {
  // What a H100 reads in about 4 us: DeepSeek-V3 at one token measured equal from 8 to 16 MB.
  constexpr std::int64_t kBytes = 12'000'000;
  const std::int64_t bands = plan.w13.bands(), chunks = plan.w13.chunks();
  g.ahead_bands = static_cast<std::int32_t>(bands);
  g.ahead_chunks = static_cast<std::int32_t>(std::min(chunks, kBytes / (bands * kBandImageBytes)));
  g.ahead = w13.as<std::byte>() + (problem.num_local_experts - 1) * plan.w13.image_bytes();
}

bool CudaExperts::can_route(const RouteParams& r) const {
  return impl_->plan.epilogue == EpilogueKind::kSwiglu && r.tokens <= kRouteTokens &&
         r.columns <= kRouteColumns && r.groups <= 32 && r.top_k + r.num_shared <= 32;
}

Status CudaExperts::enqueue(void* stream, const CudaExpertsArgs& a) const {
  const ExpertsPlan& plan = impl_->plan;
  MOESAIC_RETURN_IF_ERROR(check_args(impl_->problem, plan, a));
  MoeProblem problem = impl_->problem;
  if (a.top_k > 0) problem.top_k = a.top_k;
  if (a.tokens == 0) return {};
  Arena arena({static_cast<std::byte*>(a.workspace), static_cast<std::size_t>(a.workspace_bytes)});
  const ExpertsWorkspace w = ExpertsWorkspace::carve(problem, plan, a.tokens, arena);
  MOESAIC_RETURN_IF_ERROR(arena.status());
  const DeviceScope scope(impl_->device);
  MOESAIC_RETURN_IF_ERROR(scope.status());

  const auto pairs = static_cast<std::int32_t>(a.tokens * problem.top_k);
  const QuantRowsParams q = impl_->quant_params(a, w);
  const GroupedVariant variant = impl_->variant(a);
  AlignParams align;
  align.topk_ids = a.topk_ids;
  align.topk_weights = a.topk_weights;
  align.expert_map = a.expert_map;
  align.pairs = pairs;
  align.num_experts = static_cast<std::int32_t>(problem.num_experts);
  align.num_local_experts = static_cast<std::int32_t>(problem.num_local_experts);
  align.rows_per_record = rows_per_record(variant);
  align.max_groups = static_cast<std::int32_t>(w.max_groups);
  align.pair_of_row = w.pair_of_row;
  align.weight_of_row = w.weight_of_row;
  align.row_of_pair = w.row_of_pair;
  align.groups = w.groups;
  align.group_done = w.group_done;
  align.next_item = w.control;
  align.num_groups = w.control + 1;
  align.band_done = w.band_done;
  align.bands = static_cast<std::int32_t>(2 * plan.w2.bands());
  const bool makes_rows = plan.makes_rows() && a.hidden_scale == nullptr;
  if (!a.chores_done) {
    const bool quantize = makes_rows && !a.rows_kept;
    MOESAIC_RETURN_IF_ERROR(
        check_call("align and quantize", launch_align(align, quantize ? &q : nullptr, stream)));
  }

  CombineParams c;
  c.y2 = a.slot_rows != nullptr ? static_cast<std::uint16_t*>(a.slot_rows) : w.y2;
  c.row_of_pair = w.row_of_pair;
  c.shared = static_cast<const std::uint16_t*>(a.shared_rows);
  c.tokens = a.tokens;
  c.top_k = static_cast<std::int32_t>(problem.top_k);
  c.hidden = static_cast<std::int32_t>(problem.hidden_size);
  c.output_f32 = a.output_dtype == DType::kF32;
  c.output = a.output;

  GroupedParams g;
  g.w13 = impl_->w13.as<std::byte>();
  g.w2 = impl_->w2.as<std::byte>();
  g.w13_scale = impl_->w13_scale.as<float>();
  g.w2_scale = impl_->w2_scale.as<float>();
  g.w13_bias = impl_->w13_bias.as<float>();
  g.w2_bias = impl_->w2_bias.as<float>();
  g.x = makes_rows ? w.rows : static_cast<const std::byte*>(a.hidden_states);
  g.x_scale = a.hidden_scale != nullptr ? a.hidden_scale : w.row_scale;
  g.x_scale_stride = a.hidden_scale != nullptr ? a.hidden_scale_stride : w.row_scale_stride;
  g.inner = w.inner;
  g.inner_scale = w.inner_scale;
  g.inner_scale_stride = w.inner_scale_stride;
  g.y2 = a.slot_rows != nullptr ? static_cast<std::uint16_t*>(a.slot_rows) : w.y2;
  g.groups = w.groups;
  g.pair_of_row = w.pair_of_row;
  g.weight_of_row = plan.weight_on_input ? nullptr : w.weight_of_row;
  g.next_item = w.control;
  g.num_groups = w.control + 1;
  g.group_done = w.group_done;
  if (a.chores_done) {
    g.list_pairs = pairs;
    g.list_source = {a.topk_ids, a.topk_weights, a.expert_map, align.num_experts,
                     align.num_local_experts};
    g.routes = a.route.has_value();
    if (g.routes) g.route = *a.route;
    if (g.routes && a.route->num_shared > 0) impl_->ask_ahead(g);
  }
  g.fold_combine =
      a.slot_rows == nullptr && a.tokens <= kFoldCombineTokens && variant.max_columns <= 64;
  g.combine = c;
  g.band_done = w.band_done;
  g.top_k = static_cast<std::int32_t>(problem.top_k);
  g.hidden = static_cast<std::int32_t>(problem.hidden_size);
  g.intermediate = static_cast<std::int32_t>(problem.intermediate_size);
  const auto narrow = [](std::int64_t v) { return static_cast<std::int32_t>(v); };
  g.bands1 = narrow(plan.w13.bands());
  g.bands2 = narrow(plan.w2.bands());
  g.slabs1 = narrow(plan.w13.slabs());
  g.slabs2 = narrow(plan.w2.slabs());
  g.chunks1 = narrow(plan.w13.chunks());
  g.chunks2 = narrow(plan.w2.chunks());
  g.row_bytes1 = narrow(plan.w13.row_bytes());
  g.row_bytes2 = narrow(plan.w2.row_bytes());
  g.power_of_two_scales = plan.power_of_two_scales;
  g.activation_kind = static_cast<int>(problem.activation.kind);
  g.limit = problem.activation.limit;
  g.alpha = problem.activation.alpha;
  g.beta = problem.activation.beta;
  g.up_limit = problem.activation.up_limit;
  MOESAIC_RETURN_IF_ERROR(
      check_call("grouped GEMMs", launch_grouped(variant, g, impl_->num_sms, stream)));

  if (g.fold_combine || a.slot_rows != nullptr) return {};
  return check_call("combine", launch_combine(c, stream));
}

}  // namespace moesaic::cuda
