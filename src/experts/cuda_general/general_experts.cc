#include "experts/cuda_general/general_experts.h"

#include <memory>
#include <new>
#include <utility>
#include <vector>

#include "experts/cuda_general/general_experts_impl.h"
#include "experts/sm90/call_lists.h"
#include "experts/sm90/call_scales.h"

namespace moesaic::cuda {

GeneralExperts::~GeneralExperts() {
  const DeviceScope scope(device_);
  w13_ = {};
  w2_ = {};
}

std::int64_t GeneralExperts::weight_bytes() const { return w13_.bytes() + w2_.bytes(); }

std::vector<ExpertPart> GeneralExperts::expert_parts(std::int64_t count) const {
  std::vector<ExpertPart> list;
  const auto add = [&](std::string_view name, const Allocation& part) {
    if (part.bytes() == 0) return;
    list.push_back({name, TensorView(part.as<std::byte>(), DType::kU8,
                                     Shape{count, part.bytes() / problem_.num_local_experts},
                                     Device::cuda(device_))});
  };
  add("w13", w13_.data);
  add("w2", w2_.data);
  add("w13_scale", w13_.scale);
  add("w2_scale", w2_.scale);
  add("w13_bias", w13_.bias);
  add("w2_bias", w2_.bias);
  add("w13_input_scale", w13_.input_scale);
  add("w2_input_scale", w2_.input_scale);
  add("w13_perm", w13_.perm);
  add("w2_perm", w2_.perm);
  return list;
}

MoeProblem GeneralExperts::of_call(const CudaExpertsArgs& a) const {
  MoeProblem problem = problem_of_rows(problem_);
  if (a.top_k > 0) problem.top_k = a.top_k;
  return problem;
}

const float* GeneralExperts::static_scales(const CudaExpertsArgs& a, const GeneralWorkspace& w,
                                           bool of_w2) const {
  if (!plan_.values || !plan_.values->fixed) return nullptr;
  const CudaCallScales& given = of_w2 ? a.inner_scales : a.x_scales;
  if (given.of != nullptr) return w.call_scales + (of_w2 ? problem_.num_local_experts : 0);
  return (of_w2 ? w2_ : w13_).input_scale.as<float>();
}

GeneralValues GeneralExperts::values_of(const MoeProblem& problem, const CudaExpertsArgs& a,
                                        const GeneralWorkspace& w, bool of_w2) const {
  GeneralValues v;
  v.rule = *plan_.values;
  v.round = plan_.operand;
  v.fixed = static_scales(a, w, of_w2);
  if (plan_.reorders) v.perm = (of_w2 ? w2_ : w13_).perm.as<std::int32_t>();
  v.topk_ids = a.topk_ids;
  v.expert_map = a.expert_map;
  const bool slabs = has_slabs(problem);
  if (slabs) {
    v.num_rows = w.num_rows();
    v.row_of = w.pair_of_row;
    v.slab_rows = a.tokens;
  }
  if (of_w2) {
    v.x = w.inner;
    v.x_dtype = plan_.operand;
    v.items = w.pairs;
    v.columns = plan_.inner;
    if (!slabs) v.row_of_pair = w.row_of_pair;
    v.by_place = true;
    v.values = w.inner_values;
    return v;
  }
  v.x = a.rows.data;
  v.x_dtype = a.rows.dtype;
  if (problem.apply_router_weight_on_input && !slabs) v.factor = a.topk_weights;
  v.items = w.rows;
  v.columns = plan_.hidden;
  if (plan_.rows_by_pair) {
    v.share = problem.top_k;
    v.row_of_pair = w.row_of_pair;
  }
  v.values = w.values;
  return v;
}

Status GeneralExperts::enqueue(void* stream, const CudaExpertsArgs& a) const {
  MOESAIC_RETURN_IF_ERROR(check_general_args(problem_, a));
  if (a.tokens == 0) return {};
  const MoeProblem problem = of_call(a);
  Arena arena({static_cast<std::byte*>(a.workspace), static_cast<std::size_t>(a.workspace_bytes)});
  MOESAIC_ASSIGN_OR_RETURN(const std::int64_t rows, rows_of_tokens(problem, a.tokens));
  const GeneralWorkspace w = GeneralWorkspace::carve(problem, plan_, rows, arena);
  MOESAIC_RETURN_IF_ERROR(arena.status());
  const DeviceScope scope(device_);
  MOESAIC_RETURN_IF_ERROR(scope.status());

  const auto narrow = [](std::int64_t v) { return static_cast<std::int32_t>(v); };
  const bool slabs = has_slabs(problem);
  // Of slabs how many rows count is not known here: as many as uniform routing gives.
  const std::int32_t rows_per_record =
      slabs ? GeneralPlan::rows_per_record(a.tokens * problem_.top_k, problem.num_experts)
            : GeneralPlan::rows_per_record(
                  w.pairs, a.used_experts > 0 ? a.used_experts : problem.num_local_experts);
  std::uint32_t* const num_rows = slabs ? w.num_rows() : nullptr;
  if (slabs) {
    BatchedListParams list = list_of_slabs(problem, a, w, rows_per_record);
    list.num_rows = num_rows;
    list.bands = 1;
    MOESAIC_RETURN_IF_ERROR(
        check_call("list", launch_batched_list(list, nullptr, traits_, stream)));
  } else {
    AlignParams list = list_of_pairs(problem, a, w, rows_per_record);
    list.bands = 1;
    MOESAIC_RETURN_IF_ERROR(check_call("align", launch_align(list, nullptr, traits_, stream)));
  }
  const bool on_input = problem.apply_router_weight_on_input;
  const bool codes = a.rows.kind == CudaRows::Kind::kCodes;
  if (plan_.quantizes && !codes) {
    GeneralQuant q;
    q.x = a.rows.data;
    q.x_dtype = a.rows.dtype;
    q.round = plan_.operand;
    q.factor = on_input ? a.topk_weights : nullptr;
    q.rows = w.rows;
    q.num_rows = num_rows;
    if (slabs) q.row_of = w.pair_of_row;
    q.columns = plan_.hidden;
    q.share = plan_.rows_by_pair ? problem.top_k : 1;
    q.power_of_two_scales = problem.quant.activation.scale_format == ScaleFormat::kE8M0;
    q.codes = w.codes;
    q.scale = w.scale;
    q.scale_stride = w.rows;
    MOESAIC_RETURN_IF_ERROR(check_call("quantize", launch_general_quant(q, stream)));
  }

  if (a.brings_scales()) {
    CallScalesParams s;
    s.given[0] = a.x_scales;
    s.given[1] = a.inner_scales;
    s.experts = problem.num_local_experts;
    s.to = w.call_scales;
    MOESAIC_RETURN_IF_ERROR(check_call("static scales", launch_call_scales(s, stream)));
  }
  if (plan_.values) {
    MOESAIC_RETURN_IF_ERROR(check_call(
        "quantize", launch_general_values(values_of(problem, a, w, /*of_w2=*/false), stream)));
  }

  GeneralGemm g;
  g.weights = w13_.view;
  g.groups = w.groups;
  g.num_groups = w.control + 1;
  g.pair_of_row = w.pair_of_row;
  g.rows_per_record = rows_per_record;
  g.max_groups = narrow(max_group_records(w.pairs, problem.num_local_experts, rows_per_record));
  g.top_k = narrow(problem.top_k);
  g.x = a.rows.data;
  g.x_dtype = a.rows.dtype;
  g.round = plan_.operand;
  if (plan_.quantizes) {
    g.x = codes ? a.rows.data : w.codes;
    g.x_dtype = DType::kF8E4M3;
    g.round = DType::kF32;
    g.x_scale = codes ? a.rows.scale : w.scale;
    g.x_scale_stride = codes ? a.rows.scale_stride : w.rows;
    if (plan_.rows_by_pair && !codes) g.from = GeneralGemm::From::kPair;
  } else if (plan_.values) {
    g.x = w.values;
    g.x_dtype = g.round = DType::kF32;
    if (plan_.rows_by_pair) g.from = GeneralGemm::From::kPair;
  } else if (on_input) {
    g.factor = w.weight_of_row;
  }
  g.activates = true;
  g.gated = is_gated(problem.activation.kind);
  g.activation = grouped_activation(problem.activation);
  g.out = w.inner;
  g.out_dtype = plan_.operand;
  MOESAIC_RETURN_IF_ERROR(check_call("gate and up GEMM", launch_general_gemm(g, stream)));

  const bool slots = a.result.kind == CudaResult::Kind::kSlots;
  g.weights = w2_.view;
  g.from = GeneralGemm::From::kList;
  g.x = w.inner;
  g.x_dtype = plan_.operand;
  g.round = DType::kF32;  // it has been rounded
  g.factor = nullptr;
  if (plan_.quantizes) {
    GeneralQuant q;
    q.x = w.inner;
    q.x_dtype = plan_.operand;
    q.round = plan_.operand;
    q.rows = w.pairs;
    q.num_rows = num_rows;
    q.columns = plan_.inner;
    q.power_of_two_scales = problem.quant.activation.scale_format == ScaleFormat::kE8M0;
    q.codes = w.inner_codes;
    q.scale = w.inner_scale;
    q.scale_stride = w.pairs;
    MOESAIC_RETURN_IF_ERROR(check_call("quantize", launch_general_quant(q, stream)));
    g.x = w.inner_codes;
    g.x_dtype = DType::kF8E4M3;
    g.x_scale = w.inner_scale;
    g.x_scale_stride = w.pairs;
  } else if (plan_.values) {
    MOESAIC_RETURN_IF_ERROR(check_call(
        "quantize", launch_general_values(values_of(problem, a, w, /*of_w2=*/true), stream)));
    g.x = w.inner_values;
    g.x_dtype = DType::kF32;
  }
  g.activates = g.gated = false;
  g.weight = on_input || slabs ? nullptr : w.weight_of_row;
  g.out = slots ? a.result.data : w.y;
  g.out_dtype = slots ? a.result.dtype : DType::kF32;
  MOESAIC_RETURN_IF_ERROR(check_call("down GEMM", launch_general_gemm(g, stream)));
  if (slots) return {};

  GeneralCombine c;
  c.y = w.y;
  c.row_of_pair = w.row_of_pair;
  c.shared = static_cast<const std::uint16_t*>(a.result.shared_rows);
  c.tokens = a.tokens;
  c.hidden = plan_.hidden;
  c.top_k = narrow(problem.top_k);
  c.output = a.result.data;
  c.dtype = a.result.dtype;
  return check_call("combine", launch_general_combine(c, stream));
}

Result<std::unique_ptr<GpuExperts>> make_general_gpu_experts(const MoeProblem& problem,
                                                             ExpertSource& source, int device) {
  MOESAIC_RETURN_IF_ERROR(general_experts_take(problem));
  const DeviceScope scope(device);
  MOESAIC_RETURN_IF_ERROR(scope.status());
  MOESAIC_ASSIGN_OR_RETURN(const int sms, require_hopper(device));
  std::unique_ptr<GeneralExperts> made(new (std::nothrow)
                                           GeneralExperts(problem, device, hopper_traits(sms)));
  if (!made) return Status(StatusCode::kOutOfMemory, "cannot allocate the experts object");
  MOESAIC_RETURN_IF_ERROR(made->load(source));
  return std::unique_ptr<GpuExperts>(std::move(made));
}

}  // namespace moesaic::cuda
