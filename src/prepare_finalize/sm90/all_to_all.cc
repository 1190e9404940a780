#include "prepare_finalize/sm90/all_to_all.h"

#include <fmt/format.h>

#include <algorithm>
#include <new>
#include <span>
#include <utility>
#include <vector>

#include "core/checked.h"
#include "core/fault.h"
#include "core/refusal.h"
#include "cuda/device_memory.h"
#include "cuda/quant_rows.h"
#include "moesaic/parallel.h"
#include "prepare_finalize/rank_transport.h"
#include "prepare_finalize/sm90/catalogue_row.h"
#include "prepare_finalize/sm90/device_messages.h"
#include "prepare_finalize/sm90/device_rows.h"
#include "prepare_finalize/sm90/padded_rows.h"
#include "prepare_finalize/sm90/rank_rows.h"

namespace moesaic::cuda {

struct CudaAllToAll::Impl {
  explicit Impl(DeviceMessages m) : messages(std::move(m)) {}
  DeviceMessages messages;
  std::int64_t hidden = 0, top_k = 0, num_experts = 0;
  std::int64_t max_tokens = 0;  // T
  int ranks = 1;
  bool gather = false;
  Answer answer;
  bool weight_on_input = false, power_of_two_scales = false;
  Device device = Device::cpu();
  DeviceTraits traits;
  MessageRow row;
  DType row_dtype = DType::kBF16;
  std::string dispatch_name, combine_name;

  Allocation owner;                                     // [E]
  Allocation index, position, counts;                   // as SendPlanParams
  PinnedHost host_counts;                               // [R]
  Allocation codes, code_scale;                         // own rows, quantised
  Allocation outgoing, incoming;                        // messages
  Allocation arrived, row_scale, row_ids, row_weights;  // rows of all ranks
  Allocation results, answers;                          // made here, come back

  // Of the call between prepare and finalize.
  struct Rows {
    std::int64_t tokens = 0;
    const void* hidden_states = nullptr;
    const std::int32_t* topk_ids = nullptr;
    const float* topk_weights = nullptr;
  } mine;
  std::vector<std::int64_t> sent, received;  // [R] rows

  bool quantized() const { return row.groups > 0; }
  std::int64_t answer_bytes() const {  // for one row
    return (answer.slots() ? top_k : 1) * hidden * answer.element();
  }
  std::int64_t scale_stride(std::int64_t rows) const { return round_up(rows, std::int64_t{4}); }
  Status allocate(const std::vector<std::int32_t>& owners);
  Result<Prepared> prepare(const PrepareArgs& args);
  Status finalize(const FinalizeArgs& args) const;
  Status plan(void* stream);
  Status pack(void* stream);
  Status exchange_rows(void* stream);
  Result<Prepared> unpack(void* stream);
  DeviceRows own_rows() const { return {max_tokens, hidden, top_k, device, row_dtype, 16}; }
  Status give_up(const Status& reason) const {
    static_cast<void>(messages.communicator().abandon(reason.message()));
    return reason;
  }
};

Status CudaAllToAll::Impl::allocate(const std::vector<std::int32_t>& owners) {
  const std::int64_t all = ranks * max_tokens;
  // A row goes to as many ranks as it has experts.
  const std::int64_t copies = gather ? 1 : std::min<std::int64_t>(ranks, top_k);
  const std::int64_t answered = (gather ? ranks : copies) * max_tokens;
  struct Want {
    Allocation* to;
    const char* what;
    std::int64_t bytes;
  };
  std::vector<Want> wants = {
      {&outgoing, "rows to other ranks", copies * max_tokens * row.bytes()},
      {&incoming, "rows from other ranks", all * row.bytes()},
      {&arrived, "arrived rows", all * row.hidden_bytes},
      {&row_scale, "scales of arrived rows", scale_stride(all) * row.groups * 4},
      {&row_ids, "ids of arrived rows", all * top_k * 4},
      {&row_weights, "weights of arrived rows", all * top_k * 4},
      {&results, "results for other ranks", all * answer_bytes()},
      {&answers, "results of other ranks", answered * answer_bytes()}};
  if (quantized()) {
    wants.push_back({&codes, "quantised rows", max_tokens * row.hidden_bytes});
    wants.push_back({&code_scale, "scales of rows", scale_stride(max_tokens) * row.groups * 4});
  }
  if (!gather) {
    wants.push_back({&index, "rows of each rank", all * 4});
    wants.push_back({&position, "rows of each rank", all * 4});
    wants.push_back({&counts, "rows of each rank", ranks * std::int64_t{4}});
    MOESAIC_RETURN_IF_ERROR(host_counts.reserve("rows of each rank", ranks * std::int64_t{4}));
  }
  if (!owners.empty()) {
    MOESAIC_RETURN_IF_ERROR(
        upload("owners of experts", owners.data(), std::ssize(owners) * 4, owner));
  }
  for (const Want& w : wants) MOESAIC_RETURN_IF_ERROR(w.to->reserve(w.what, w.bytes));
  // Rows are padded to 16 bytes, always at the same places: no call writes there, but all are sent.
  MOESAIC_RETURN_IF_ERROR(
      fill_zero("rows to other ranks", outgoing.as<std::byte>(), outgoing.bytes(), nullptr));
  MOESAIC_RETURN_IF_ERROR(synchronize(nullptr));
  sent.resize(static_cast<std::size_t>(ranks));
  received.resize(static_cast<std::size_t>(ranks));
  return {};
}

CudaAllToAll::CudaAllToAll(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
CudaAllToAll::~CudaAllToAll() = default;

std::string_view CudaAllToAll::Answer::name() const {
  if (!weighted) return bf16() ? "rows of slots" : "fp32 rows of slots";
  return slots() ? (bf16() ? "slots" : "fp32 slots") : (bf16() ? "bf16" : "fp32");
}

Result<std::unique_ptr<CudaAllToAll>> CudaAllToAll::create(
    const MoeProblem& problem, std::shared_ptr<Communicator> communicator,
    const AllToAllOptions& options, Answer answer) {
  MOESAIC_RETURN_IF_ERROR(sm90_rows_can_travel(problem));
  MOESAIC_RETURN_IF_ERROR(
      prepare_finalize::RankTransport::check_options(communicator.get(), options));
  if (options.gather && answer.slots() && communicator->size() != options.parallel.ep_size) {
    return Status(unsupported(fmt::format(
        "answer: got slots with gather among {} of {} ranks, need all of them or partial sums",
        communicator->size(), options.parallel.ep_size)));
  }
  std::vector<std::int32_t> owners;
  if (!options.gather || answer.slots()) {
    MOESAIC_ASSIGN_OR_RETURN(owners, expert_owners(problem.num_experts, options.parallel));
  }
  MOESAIC_ASSIGN_OR_RETURN(DeviceMessages messages,
                           DeviceMessages::create(std::move(communicator), problem.device.index()));
  const DeviceScope scope(problem.device.index());
  MOESAIC_RETURN_IF_ERROR(scope.status());
  std::unique_ptr<Impl> impl(new (std::nothrow) Impl(std::move(messages)));
  if (!impl) return Status(StatusCode::kOutOfMemory, "cannot allocate the transport");
  const bool codes = options.quantize_before_dispatch && travels_as_codes(problem);
  impl->device = problem.device;
  MOESAIC_ASSIGN_OR_RETURN(impl->traits, current_device_traits());
  impl->hidden = problem.hidden_size;
  impl->top_k = problem.top_k;
  impl->num_experts = problem.num_experts;
  impl->max_tokens = options.max_tokens_per_rank;
  impl->ranks = impl->messages.size();
  impl->gather = options.gather;
  impl->answer = answer;
  impl->weight_on_input = problem.apply_router_weight_on_input;
  impl->power_of_two_scales = problem.quant.activation.scale_format == ScaleFormat::kE8M0;
  impl->row_dtype = row_dtype(problem);
  impl->row.hidden_bytes =
      codes ? problem.hidden_size : problem.hidden_size * dtype_bits(impl->row_dtype) / 8;
  impl->row.groups = codes ? static_cast<std::int32_t>(problem.hidden_size / 128) : 0;
  impl->row.top_k = static_cast<std::int32_t>(problem.top_k);
  // Ranks that disagree about the form of a row are in different calls.
  const char* const name = options.gather ? "gather" : "all_to_all";
  impl->dispatch_name =
      fmt::format("dispatch ({}, {})", name, codes ? "fp8" : row_name(impl->row_dtype));
  impl->combine_name = fmt::format("combine ({}, {})", name, answer.name());
  MOESAIC_RETURN_IF_ERROR(impl->allocate(owners));
  std::unique_ptr<CudaAllToAll> made(new (std::nothrow) CudaAllToAll(std::move(impl)));
  if (!made) return Status(StatusCode::kOutOfMemory, "cannot allocate the transport");
  return made;
}

// How many rows go to each rank; the lists stay on the device.
Status CudaAllToAll::Impl::plan(void* stream) {
  if (gather || mine.tokens == 0) {
    std::fill(sent.begin(), sent.end(), mine.tokens);
    return {};
  }
  SendPlanParams p;
  p.ids = mine.topk_ids;
  p.owner = owner.as<std::int32_t>();
  p.num_experts = static_cast<std::int32_t>(num_experts);
  p.ranks = ranks;
  p.top_k = static_cast<std::int32_t>(top_k);
  if (MOESAIC_FAULT(all_to_all_first_expert_only)) p.top_k = 1;
  p.tokens = static_cast<std::int32_t>(mine.tokens);
  p.capacity = static_cast<std::int32_t>(max_tokens);
  p.index = index.as<std::int32_t>();
  p.position = position.as<std::int32_t>();
  p.counts = counts.as<std::int32_t>();
  p.host_counts = host_counts.as<std::int32_t>();
  MOESAIC_RETURN_IF_ERROR(check_call("dispatch: plan", launch_send_plan(p, stream)));
  return {};
}

Status CudaAllToAll::Impl::pack(void* stream) {
  RowArrays from;
  from.hidden = static_cast<std::byte*>(const_cast<void*>(mine.hidden_states));
  from.ids = const_cast<std::int32_t*>(mine.topk_ids);
  from.weights = const_cast<float*>(mine.topk_weights);
  if (quantized() && mine.tokens > 0) {
    QuantRowsParams q;
    q.x = static_cast<const std::uint16_t*>(mine.hidden_states);
    q.weights = weight_on_input ? mine.topk_weights : nullptr;
    q.tokens = mine.tokens;
    q.columns = hidden;
    q.power_of_two_scales = power_of_two_scales;
    q.q = codes.as<void>();
    q.scale = code_scale.as<float>();
    q.scale_stride = scale_stride(max_tokens);
    MOESAIC_RETURN_IF_ERROR(check_call("dispatch: quantise", launch_quant_rows(q, traits, stream)));
    from.hidden = codes.as<std::byte>();
    from.scale = code_scale.as<float>();
    from.scale_stride = q.scale_stride;
  }
  // The quantisation runs while the host waits for the counts.
  if (!gather && mine.tokens > 0) {
    MOESAIC_RETURN_IF_ERROR(synchronize(stream));
    std::copy_n(host_counts.as<std::int32_t>(), ranks, sent.begin());
  }
  std::byte* to = outgoing.as<std::byte>();
  for (int r = 0; r < (gather ? 1 : ranks); ++r) {
    const std::int64_t count = sent[static_cast<std::size_t>(r)];
    const std::int32_t* list = gather ? nullptr : index.as<std::int32_t>() + r * max_tokens;
    MOESAIC_RETURN_IF_ERROR(
        check_call("dispatch: pack", launch_pack_rows(row, from, list, count, to, stream)));
    to += count * row.bytes();
  }
  return {};
}

Status CudaAllToAll::Impl::exchange_rows(void* stream) {
  std::vector<std::span<const std::byte>> send;
  std::vector<std::span<std::byte>> recv;
  const std::byte* from = outgoing.as<std::byte>();
  const std::int64_t most = max_tokens * row.bytes();
  for (std::size_t r = 0; r < sent.size(); ++r) {
    send.emplace_back(from, static_cast<std::size_t>(sent[r] * row.bytes()));
    recv.emplace_back(incoming.as<std::byte>() + static_cast<std::int64_t>(r) * most,
                      static_cast<std::size_t>(most));
    if (!gather) from += sent[r] * row.bytes();
  }
  MOESAIC_RETURN_IF_ERROR(messages.exchange(stream, dispatch_name, send, recv, received));
  for (std::size_t r = 0; r < received.size(); ++r) {
    if (received[r] % row.bytes() != 0) {
      return {StatusCode::kDevice, fmt::format("{}: rank {} sent {} bytes, need whole rows of {}",
                                               dispatch_name, r, received[r], row.bytes())};
    }
    received[r] /= row.bytes();
  }
  return {};
}

Result<Prepared> CudaAllToAll::Impl::unpack(void* stream) {
  std::int64_t all = 0;
  for (const std::int64_t n : received) all += n;
  RowArrays to;
  to.hidden = arrived.as<std::byte>();
  to.scale = row_scale.as<float>();
  to.scale_stride = scale_stride(all);
  to.ids = row_ids.as<std::int32_t>();
  to.weights = row_weights.as<float>();
  std::int64_t first = 0;
  for (std::size_t r = 0; r < received.size(); ++r) {
    const std::byte* from =
        incoming.as<std::byte>() + static_cast<std::int64_t>(r) * max_tokens * row.bytes();
    MOESAIC_RETURN_IF_ERROR(check_call(
        "dispatch: unpack", launch_unpack_rows(row, from, received[r], to, first, stream)));
    first += received[r];
  }
  Prepared p;
  p.hidden_states = {to.hidden, quantized() ? DType::kF8E4M3 : row_dtype, Shape{all, hidden},
                     device};
  if (quantized()) {
    p.hidden_scale = {row_scale.as<std::byte>(), DType::kF32, Shape{all, row.groups}, device};
    p.hidden_scale.strides = {1, to.scale_stride};
  }
  p.topk_ids = {row_ids.as<std::byte>(), DType::kI32, Shape{all, top_k}, device};
  p.topk_weights = {row_weights.as<std::byte>(), DType::kF32, Shape{all, top_k}, device};
  p.expert_output = {results.as<std::byte>(), answer.dtype,
                     Shape{answer.slots() ? all * top_k : all, hidden}, device};
  return p;
}

std::string_view CudaAllToAll::name() const {
  return impl_->gather ? "cuda_all_gather_reduce_scatter" : "cuda_all_to_all";
}

Status CudaAllToAll::attach(const Experts& experts) {
  if (experts.reduction() != TopKWeightAndReduce::kNoOp || impl_->answer.slots()) {
    return unsupported(fmt::format(
        "prepare_finalize {}: experts {}, need experts that leave one weighted sum per row", name(),
        experts.name()));
  }
  if (!impl_->quantized() || experts.takes_quantized_rows()) return {};
  return unsupported(
      fmt::format("prepare_finalize {}: experts {} take no quantised rows, need "
                  "quantize_before_dispatch = false",
                  name(), experts.name()));
}

std::int64_t CudaAllToAll::max_dispatched_tokens(std::int64_t) const {
  return impl_->ranks * impl_->max_tokens;
}

Result<std::int64_t> CudaAllToAll::workspace_size(std::int64_t tokens) const {
  if (tokens >= 0) return std::int64_t{0};
  return Status(StatusCode::kInvalidArgument, fmt::format("tokens: got {}, need >= 0", tokens));
}

Result<Prepared> CudaAllToAll::prepare(const PrepareArgs& args) const {
  // Whatever it is that fails: the others learn of it instead of waiting.
  Result<Prepared> prepared = impl_->prepare(args);
  return prepared.ok() ? std::move(prepared) : impl_->give_up(prepared.status());
}

Result<Prepared> CudaAllToAll::Impl::prepare(const PrepareArgs& args) {
  MOESAIC_RETURN_IF_ERROR(check_device_rows(own_rows(), args));
  mine = {args.hidden_states.dim(0), args.hidden_states.data, args.topk_ids.as<std::int32_t>(),
          args.topk_weights.as<float>()};
  const DeviceScope scope(device.index());
  MOESAIC_RETURN_IF_ERROR(scope.status());
  void* const stream = args.stream.handle;
  MOESAIC_RETURN_IF_ERROR(plan(stream));
  MOESAIC_RETURN_IF_ERROR(pack(stream));
  MOESAIC_RETURN_IF_ERROR(exchange_rows(stream));
  return unpack(stream);
}

Status CudaAllToAll::withdraw(const Status& reason, bool, std::span<std::byte>) const {
  return impl_->give_up(reason);
}

Status CudaAllToAll::finalize(const FinalizeArgs& args) const {
  const Status status = impl_->finalize(args);
  return status.ok() ? status : impl_->give_up(status);
}

Status CudaAllToAll::Impl::finalize(const FinalizeArgs& args) const {
  const Impl& m = *this;
  void* const stream = args.stream.handle;
  MOESAIC_RETURN_IF_ERROR(expect_float_dtype("output", args.output.dtype));
  MOESAIC_RETURN_IF_ERROR(expect_shape("output", args.output, {m.mine.tokens, m.hidden}));
  MOESAIC_RETURN_IF_ERROR(expect_contiguous("output", args.output));
  MOESAIC_RETURN_IF_ERROR(expect_device("output", args.output, m.device));
  if (m.mine.tokens > 0) {
    MOESAIC_RETURN_IF_ERROR(check_device_pointer("output", args.output.data, 16, m.device.index()));
  }
  const DeviceScope scope(m.device.index());
  MOESAIC_RETURN_IF_ERROR(scope.status());
  const std::int64_t bytes = m.answer_bytes();
  std::vector<std::span<const std::byte>> send;
  std::vector<std::span<std::byte>> recv;
  const std::byte* from = m.results.as<std::byte>();
  std::byte* to = m.answers.as<std::byte>();
  for (std::size_t r = 0; r < m.sent.size(); ++r) {
    send.emplace_back(from, static_cast<std::size_t>(m.received[r] * bytes));
    recv.emplace_back(to, static_cast<std::size_t>(m.sent[r] * bytes));
    from += m.received[r] * bytes;
    to += m.sent[r] * bytes;
  }
  MOESAIC_RETURN_IF_ERROR(m.messages.exchange(stream, m.combine_name, send, recv));
  AnswerParams p;
  p.answers = m.answers.as<void>();
  p.bf16 = m.answer.bf16();
  p.position = m.gather ? nullptr : m.position.as<std::int32_t>();
  p.counts = m.counts.as<std::int32_t>();
  p.ranks = MOESAIC_FAULT(all_to_all_forgets_last_rank) ? m.ranks - 1 : m.ranks;
  p.hidden = static_cast<std::int32_t>(m.hidden);
  p.tokens = m.mine.tokens;
  p.sum = args.output.data;
  p.dtype = args.output.dtype;
  if (MOESAIC_FAULT(cuda_ranks_output_in_f16) && p.dtype == DType::kBF16) p.dtype = DType::kF16;
  p.ids = m.mine.topk_ids;
  p.owner = m.owner.as<std::int32_t>();
  p.top_k = static_cast<std::int32_t>(m.top_k);
  p.num_experts = static_cast<std::int32_t>(m.num_experts);
  if (!m.answer.weighted && !m.weight_on_input) p.weights = m.mine.topk_weights;
  return check_call("combine: sum",
                    m.answer.slots() ? launch_sum_slots(p, stream) : launch_sum_answers(p, stream));
}

std::int64_t CudaAllToAll::bytes() const {
  std::int64_t bytes = 0;
  const Impl& m = *impl_;
  for (const Allocation* a : {&m.owner, &m.index, &m.position, &m.counts, &m.codes, &m.code_scale,
                              &m.outgoing, &m.incoming, &m.arrived, &m.row_scale, &m.row_ids,
                              &m.row_weights, &m.results, &m.answers}) {
    bytes += a->bytes();
  }
  return bytes;
}

Result<std::unique_ptr<PrepareAndFinalize>> make_sm90_all_to_all(
    const MoeProblem& problem, std::shared_ptr<Communicator> communicator,
    const AllToAllOptions& options) {
  MOESAIC_RETURN_IF_ERROR(sm90_transport_can_implement(problem));
  MOESAIC_RETURN_IF_ERROR(check_device(problem.device));
  MOESAIC_ASSIGN_OR_RETURN(
      std::unique_ptr<CudaAllToAll> made,
      CudaAllToAll::create(carried_problem(problem), std::move(communicator), options,
                           {CudaAllToAll::Answer::Form::kPartial, options.combine_dtype}));
  if (carried_problem(problem).hidden_size == problem.hidden_size) {
    return std::unique_ptr<PrepareAndFinalize>(std::move(made));
  }
  MOESAIC_ASSIGN_OR_RETURN(std::unique_ptr<PaddedRows> padded,
                           PaddedRows::around(std::move(made), problem, options.max_tokens_per_rank,
                                              /*rows_for_a_token=*/1));
  return std::unique_ptr<PrepareAndFinalize>(std::move(padded));
}

}  // namespace moesaic::cuda
