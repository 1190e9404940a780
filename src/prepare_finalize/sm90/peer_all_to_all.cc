#include "prepare_finalize/sm90/peer_all_to_all.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <new>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "core/checked.h"
#include "core/fault.h"
#include "core/hash.h"
#include "core/refusal.h"
#include "cuda/device_memory.h"
#include "cuda/side_stream.h"
#include "moesaic/parallel.h"
#include "parallel/peer_window.h"
#include "permute/sm90/align.h"
#include "prepare_finalize/rank_transport.h"
#include "prepare_finalize/sm90/catalogue_row.h"
#include "prepare_finalize/sm90/device_rows.h"
#include "prepare_finalize/sm90/peer_report.h"
#include "prepare_finalize/sm90/peer_rows.h"

namespace moesaic::cuda {

using parallel::PeerAnswerForm;

struct CudaPeerAllToAll::Impl {
  std::int64_t hidden = 0, top_k = 0, num_experts = 0;
  std::int64_t max_tokens = 0;  // T
  int ranks = 1, timeout_ms = 0;
  bool gather = false;
  bool takes_slots = false;  // experts leave them elsewhere
  CudaAllToAll::Answer answer;
  bool weight_on_input = false, power_of_two_scales = false;
  Device device = Device::cpu();
  DeviceTraits traits;
  std::int64_t row_bytes = 0;  // without scales
  DType row_dtype = DType::kBF16;
  std::int32_t groups = 0;
  bool in_place = false;  // rows without gaps are read in the window
  std::string name;

  std::unique_ptr<parallel::PeerWindow> window;
  PeerPlace place;
  Allocation owner;                                     // [E]
  Allocation state;                                     // tickets, live rows
  PinnedHost report;                                    // PeerReport
  Allocation arrived, row_scale, row_ids, row_weights;  // R * T rows
  Allocation results;
  SideStream side;

  // Of the call between prepare and finalize.
  std::int64_t tokens = 0;
  PeerRouting mine;
  SlotsPlace slots;
  const std::int32_t* expert_map = nullptr;

  bool quantized() const { return groups > 0; }
  std::int64_t all() const { return ranks * max_tokens; }
  std::int64_t scale_stride(std::int64_t rows) const { return round_up(rows, std::int64_t{4}); }
  // Whether whoever lists the arrived rows leaves out those that are not there.
  bool lists_some_rows() const { return takes_slots && all() * top_k > kOneBlockPairs; }
  PeerRouting routing(const std::int32_t* ids) const {
    return {ids, owner.as<std::int32_t>(), static_cast<std::int32_t>(num_experts)};
  }
  Result<parallel::PeerLayout> layout() const;
  std::byte* rows() const {
    return in_place ? window->base(place.rank) + place.layout.rows : arrived.as<std::byte>();
  }
  Status allocate(const std::vector<std::int32_t>& owners);
  Status stand(const parallel::PeerLayout& layout);
  DeviceRows own_rows() const { return {max_tokens, hidden, top_k, device, row_dtype, 16}; }
  Status send(void* stream, const PrepareArgs& args) const;
  Status take(void* stream) const;
};

Result<parallel::PeerLayout> CudaPeerAllToAll::Impl::layout() const {
  parallel::PeerShape shape;
  shape.ranks = ranks;
  shape.tokens = max_tokens;
  shape.top_k = top_k;
  shape.row_bytes = row_bytes;
  shape.scale_bytes = groups * std::int64_t{4};
  shape.answer_bytes = hidden * answer.element();
  shape.form = answer.slots() ? PeerAnswerForm::kSlot : PeerAnswerForm::kPartial;
  return parallel::make_peer_layout(shape);
}

Status CudaPeerAllToAll::Impl::allocate(const std::vector<std::int32_t>& owners) {
  struct Want {
    Allocation* to;
    const char* what;
    std::int64_t bytes;
  };
  const std::array<Want, 6> wants = {
      {{&state, "state of the transport", (16 + parallel::kPeerWindowRanks + max_tokens) * 4},
       {&arrived, "arrived rows", in_place ? 0 : all() * row_bytes},
       {&row_scale, "scales of arrived rows", scale_stride(all()) * groups * 4},
       {&row_ids, "ids of arrived rows", all() * top_k * 4},
       {&row_weights, "weights of arrived rows", all() * top_k * 4},
       {&results, "results for other ranks",
        takes_slots ? 0 : all() * (answer.slots() ? top_k : 1) * hidden * answer.element()}}};
  for (const Want& w : wants) {
    MOESAIC_RETURN_IF_ERROR(w.to->reserve(w.what, w.bytes));
    // Rows that are not there are read by kernels that go over all rows, for nothing.
    if (w.bytes > 0) {
      MOESAIC_RETURN_IF_ERROR(fill_zero(w.what, w.to->as<std::byte>(), w.bytes, nullptr));
    }
  }
  MOESAIC_RETURN_IF_ERROR(report.reserve("report of the transport", parallel::kPeerLine));
  *report.as<parallel::PeerReport>() = {};
  if (!gather) {
    MOESAIC_RETURN_IF_ERROR(
        upload("owners of experts", owners.data(), std::ssize(owners) * 4, owner));
  }
  MOESAIC_RETURN_IF_ERROR(side.create());
  return synchronize(nullptr);
}

// With the windows there: what kernels are told.
Status CudaPeerAllToAll::Impl::stand(const parallel::PeerLayout& layout) {
  place.layout = layout;
  place.rank = window->rank();
  for (int r = 0; r < ranks; ++r) place.base[r] = window->base(r);
  place.signature = parallel::peer_signature(fnv1a(
      fmt::format("{} {} {} {} {} {} {} {} {}", name, ranks, max_tokens, top_k, num_experts, hidden,
                  layout.shape.row_bytes, layout.shape.scale_bytes, layout.shape.answer_bytes)));
  place.tickets = state.as<std::uint32_t>();
  place.live = state.as<std::int32_t>() + 16;
  place.sent_to = state.as<std::uint32_t>() + 16 + parallel::kPeerWindowRanks;
  place.report = report.as<parallel::PeerReport>();
  place.max_blocks = 4 * traits.sms;
  place.most_waiting = traits.sms / 2;
  place.shares_device = window->shares_device();
  const std::uint64_t limit = static_cast<std::uint64_t>(timeout_ms) * 1'000'000;
  return copy_to_device("limit of a wait",
                        window->base(place.rank) + layout.own_line(parallel::PeerOwnLine::kLimits),
                        &limit, sizeof(limit));
}

CudaPeerAllToAll::CudaPeerAllToAll(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
CudaPeerAllToAll::~CudaPeerAllToAll() {
  const DeviceScope scope(impl_->device.index());
  impl_.reset();
}

Result<std::unique_ptr<CudaPeerAllToAll>> CudaPeerAllToAll::create(
    const MoeProblem& problem, const std::shared_ptr<Communicator>& communicator,
    const AllToAllOptions& options, CudaAllToAll::Answer answer, bool brings_slots,
    PeerMemory memory) {
  // Refusals of the options are those of all ranks, and come before anybody waits.
  MOESAIC_RETURN_IF_ERROR(sm90_rows_can_travel(problem));
  MOESAIC_RETURN_IF_ERROR(
      prepare_finalize::RankTransport::check_options(communicator.get(), options));
  if (options.gather && answer.slots()) {
    return Status(StatusCode::kUnsupported, "answer: got slots with gather, need partial sums");
  }
  std::vector<std::int32_t> owners;
  if (!options.gather) {
    MOESAIC_ASSIGN_OR_RETURN(owners, expert_owners(problem.num_experts, options.parallel));
  }
  std::unique_ptr<Impl> impl(new (std::nothrow) Impl());
  if (!impl) return Status(StatusCode::kOutOfMemory, "cannot allocate the transport");
  const bool codes = options.quantize_before_dispatch && travels_as_codes(problem);
  impl->device = problem.device;
  impl->hidden = problem.hidden_size;
  impl->top_k = problem.top_k;
  impl->num_experts = problem.num_experts;
  impl->max_tokens = options.max_tokens_per_rank;
  impl->ranks = communicator->size();
  impl->timeout_ms = std::max(communicator->timeout_ms(), 1);
  impl->gather = options.gather;
  impl->answer = answer;
  impl->takes_slots = brings_slots && problem.top_k <= kPeerMostSlots;
  impl->weight_on_input = problem.apply_router_weight_on_input;
  impl->power_of_two_scales = problem.quant.activation.scale_format == ScaleFormat::kE8M0;
  impl->row_dtype = row_dtype(problem);
  impl->row_bytes =
      codes ? problem.hidden_size : problem.hidden_size * dtype_bits(impl->row_dtype) / 8;
  if (codes && problem.hidden_size > kPeerMostGroups * 128) {
    return unsupported(fmt::format("hidden_size: got {}, need at most {} for rows of fp8-block",
                                   problem.hidden_size, kPeerMostGroups * 128));
  }
  impl->groups = codes ? static_cast<std::int32_t>(problem.hidden_size / 128) : 0;
  impl->name = fmt::format("{}, {}, {} back", options.gather ? "gather" : "all_to_all",
                           codes ? "fp8" : row_name(impl->row_dtype), answer.name());
  MOESAIC_ASSIGN_OR_RETURN(const parallel::PeerLayout layout, impl->layout());
  impl->in_place = layout.row_pitch == impl->row_bytes;
  // What fails here may fail on this rank only: the others learn of it where the windows are made.
  const auto own_part = [&]() -> Status {
    const DeviceScope scope(problem.device.index());
    MOESAIC_RETURN_IF_ERROR(scope.status());
    MOESAIC_ASSIGN_OR_RETURN(impl->traits, current_device_traits());
    return impl->allocate(owners);
  };
  MOESAIC_ASSIGN_OR_RETURN(
      impl->window, parallel::make_peer_window(*communicator, problem.device.index(), layout.bytes,
                                               own_part(), memory));
  const DeviceScope scope(problem.device.index());
  MOESAIC_RETURN_IF_ERROR(impl->stand(layout));
  std::unique_ptr<CudaPeerAllToAll> made(new (std::nothrow) CudaPeerAllToAll(std::move(impl)));
  if (!made) return Status(StatusCode::kOutOfMemory, "cannot allocate the transport");
  return made;
}

std::string_view CudaPeerAllToAll::name() const {
  return impl_->gather ? "cuda_peer_gather" : "cuda_peer_all_to_all";
}

Status CudaPeerAllToAll::attach(const Experts& experts) {
  return unsupported(fmt::format("prepare_finalize {}: experts {}, need those of a layer", name(),
                                 experts.name()));
}

std::int64_t CudaPeerAllToAll::max_dispatched_tokens(std::int64_t) const { return impl_->all(); }

Result<std::int64_t> CudaPeerAllToAll::workspace_size(std::int64_t tokens) const {
  if (tokens >= 0) return std::int64_t{0};
  return Status(StatusCode::kInvalidArgument, fmt::format("tokens: got {}, need >= 0", tokens));
}

Status CudaPeerAllToAll::Impl::send(void* stream, const PrepareArgs& a) const {
  PeerSendParams s;
  s.place = place;
  s.routing = mine;
  s.tokens = tokens;
  s.rows = static_cast<const std::byte*>(a.hidden_states.data);
  s.row_bytes = row_bytes;
  s.groups = groups;
  s.power_of_two_scales = power_of_two_scales;
  s.weight_on_input = weight_on_input;
  s.weights = a.topk_weights.as<float>();
  return check_call("dispatch: send", launch_peer_send(s, stream));
}

Status CudaPeerAllToAll::Impl::take(void* stream) const {
  PeerTakeParams t;
  t.place = place;
  t.routing = routing(nullptr);
  t.row_bytes = row_bytes;
  t.groups = groups;
  t.rows = in_place ? nullptr : arrived.as<std::byte>();
  t.scale = row_scale.as<float>();
  t.scale_stride = scale_stride(all());
  t.ids = row_ids.as<std::int32_t>();
  t.weights = row_weights.as<float>();
  t.all_ids = !lists_some_rows();
  t.likely_tokens = std::max<std::int64_t>(tokens, 1);
  return check_call("dispatch: take", launch_peer_take(t, stream));
}

Result<Prepared> CudaPeerAllToAll::prepare(const PrepareArgs& args) const {
  Impl& m = *impl_;
  MOESAIC_RETURN_IF_ERROR(check_device_rows(m.own_rows(), args));
  m.tokens = args.hidden_states.dim(0);
  m.mine = m.routing(args.topk_ids.as<std::int32_t>());
  const DeviceScope scope(m.device.index());
  MOESAIC_RETURN_IF_ERROR(scope.status());
  void* const stream = args.stream.handle;
  MOESAIC_RETURN_IF_ERROR(m.send(stream, args));
  MOESAIC_RETURN_IF_ERROR(m.take(stream));
  const std::int64_t all = m.all();
  Prepared p;
  p.hidden_states = {m.rows(), m.quantized() ? DType::kF8E4M3 : m.row_dtype, Shape{all, m.hidden},
                     m.device};
  if (m.quantized()) {
    p.hidden_scale = {m.row_scale.as<std::byte>(), DType::kF32, Shape{all, m.groups}, m.device};
    p.hidden_scale.strides = {1, m.scale_stride(all)};
  }
  p.topk_ids = {m.row_ids.as<std::byte>(), DType::kI32, Shape{all, m.top_k}, m.device};
  p.topk_weights = {m.row_weights.as<std::byte>(), DType::kF32, Shape{all, m.top_k}, m.device};
  p.expert_output = {m.results.as<std::byte>(), m.answer.dtype,
                     Shape{m.answer.slots() ? all * m.top_k : all, m.hidden}, m.device};
  return p;
}

Status CudaPeerAllToAll::finalize(const FinalizeArgs& args) const {
  const Impl& m = *impl_;
  MOESAIC_RETURN_IF_ERROR(expect_dtype("output", args.output, DType::kF32));
  MOESAIC_RETURN_IF_ERROR(expect_shape("output", args.output, {m.tokens, m.hidden}));
  MOESAIC_RETURN_IF_ERROR(expect_contiguous("output", args.output));
  MOESAIC_RETURN_IF_ERROR(expect_device("output", args.output, m.device));
  MOESAIC_RETURN_IF_ERROR(answer(args.stream));
  SumEpilogue to;
  to.output = args.output.data;
  return finish(args.stream, to);
}

Status CudaPeerAllToAll::answer(Stream stream) const {
  const Impl& m = *impl_;
  const DeviceScope scope(m.device.index());
  MOESAIC_RETURN_IF_ERROR(scope.status());
  PeerAnswerParams a;
  a.place = m.place;
  a.routing = m.routing(m.row_ids.as<std::int32_t>());
  a.results = m.results.as<std::byte>();
  a.slots = m.slots;
  a.expert_map = m.expert_map;
  a.hidden = static_cast<std::int32_t>(m.hidden);
  a.bf16 = m.answer.bf16();
  a.likely_tokens = std::max<std::int64_t>(m.tokens, 1);
  return check_call("combine: send", launch_peer_answer(a, stream.handle));
}

Status CudaPeerAllToAll::finish(Stream stream, const SumEpilogue& to) const {
  const Impl& m = *impl_;
  const DeviceScope scope(m.device.index());
  MOESAIC_RETURN_IF_ERROR(scope.status());
  PeerSumParams s;
  s.place = m.place;
  s.routing = m.mine;
  s.tokens = m.tokens;
  s.hidden = static_cast<std::int32_t>(m.hidden);
  s.bf16 = m.answer.bf16();
  s.to = to;
  return check_call("combine: sum", launch_peer_sum(s, stream.handle));
}

Status CudaPeerAllToAll::withdraw(const Status& reason, bool, std::span<std::byte>) const {
  refuse(stream());
  return reason;
}

void CudaPeerAllToAll::refuse(void* stream) const {
  if (MOESAIC_FAULT(cuda_peer_refusal_is_not_told)) return;
  const DeviceScope scope(impl_->device.index());
  // The own error says more than a failure to tell it, which ends in the others' time-out.
  static_cast<void>(check_call("refuse", launch_peer_refuse(impl_->place, stream)));
}

Status CudaPeerAllToAll::health() const {
  return peer_report_status(impl_->report.as<parallel::PeerReport>(), impl_->name,
                            impl_->timeout_ms);
}

bool CudaPeerAllToAll::wants_slots() const { return impl_->takes_slots; }
void CudaPeerAllToAll::take_slots(const SlotsPlace& slots, const std::int32_t* expert_map) const {
  impl_->slots = slots;
  impl_->expert_map = expert_map;
}

std::int64_t CudaPeerAllToAll::likely_rows() const {
  return impl_->ranks * std::max<std::int64_t>(impl_->tokens, 1);
}
SomeRows CudaPeerAllToAll::some_rows() const {
  const Impl& m = *impl_;
  SomeRows rows;
  if (!m.lists_some_rows()) return rows;
  rows.live = m.place.live;
  rows.sources = m.ranks;
  rows.places = static_cast<std::int32_t>(m.max_tokens);
  rows.top_k = static_cast<std::int32_t>(m.top_k);
  return rows;
}
bool CudaPeerAllToAll::shares_streams() const { return impl_->window->shares_streams(); }
std::string_view CudaPeerAllToAll::memory() const {
  return parallel::peer_provider_name(impl_->window->provider());
}
void* CudaPeerAllToAll::stream() const { return impl_->side.handle(); }

std::int64_t CudaPeerAllToAll::bytes() const {
  const Impl& m = *impl_;
  std::int64_t bytes = m.window->bytes();
  for (const Allocation* a :
       {&m.owner, &m.state, &m.arrived, &m.row_scale, &m.row_ids, &m.row_weights, &m.results}) {
    bytes += a->bytes();
  }
  return bytes;
}

}  // namespace moesaic::cuda
