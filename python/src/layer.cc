#include "layer.h"

#include <algorithm>
#include <array>
#include <vector>

#include "core/fault.h"
#include "errors.h"
#include "gil.h"
#include "numerics.h"
#include "numerics/element.h"
#include "specs.h"
#include "tensors.h"
#include "torch_tensors.h"

namespace nb = nanobind;

namespace moesaic::python {
namespace {

// What one call converts; grows to the largest call of this thread.
struct Scratch {
  std::vector<float> weights;
  std::vector<std::int32_t> ids, tokens;
};
Scratch& scratch() {
  thread_local Scratch s;
  return s;
}

std::int64_t integer_at(const ConstTensorView& t, std::int64_t i) {
  if (t.dtype == DType::kI64) return t.as<std::int64_t>()[i];
  return t.dtype == DType::kU32 ? std::int64_t{t.as<std::uint32_t>()[i]}
                                : std::int64_t{t.as<std::int32_t>()[i]};
}

bool is_integer(DType dtype) {
  return dtype == DType::kI32 || dtype == DType::kI64 || dtype == DType::kU32;
}

// Ids of experts as I32, with those from `beyond` on as -1.
ConstTensorView as_i32(std::string_view field, const ConstTensorView& t, std::int64_t beyond,
                       std::vector<std::int32_t>* buffer) {
  check(expect_contiguous(field, t));
  const std::int64_t count = unwrap(t.shape.num_elements());
  buffer->resize(static_cast<std::size_t>(count));
  for (std::int64_t i = 0; i < count; ++i) {
    const std::int64_t value = integer_at(t, i);
    const bool fits = value >= -1 && value <= std::int64_t{0x7FFFFFFF};
    if (!fits) {
      raise(StatusCode::kInvalidArgument,
            fmt::format("{}: got {} at element {}, need -1 to 2^31-1", field, value, i));
    }
    (*buffer)[static_cast<std::size_t>(i)] =
        value >= beyond && !MOESAIC_FAULT(python_ids_beyond_kept)
            ? -1
            : static_cast<std::int32_t>(value);
  }
  return {reinterpret_cast<const std::byte*>(buffer->data()), DType::kI32, t.shape};
}

ConstTensorView as_f32(std::string_view field, const ConstTensorView& t,
                       std::vector<float>* buffer) {
  check(expect_contiguous(field, t));
  if (MOESAIC_FAULT(python_scratch_of_each_call)) std::vector<float>().swap(*buffer);
  const std::int64_t count = unwrap(t.shape.num_elements());
  buffer->resize(static_cast<std::size_t>(count));
  for (std::int64_t i = 0; i < count; ++i) {
    (*buffer)[static_cast<std::size_t>(i)] =
        MOESAIC_FAULT(python_narrow_weights_lost) ? 1.0F : load_as_f32(t.data, t.dtype, i);
  }
  return {reinterpret_cast<const std::byte*>(buffer->data()), DType::kF32, t.shape};
}

bool is_narrow(DType dtype) { return dtype == DType::kBF16 || dtype == DType::kF16; }

ConstTensorView flat(std::string_view field, const TensorView& t) {
  check(expect_contiguous(field, t));
  ConstTensorView v = t;
  v.shape = Shape{unwrap(t.shape.num_elements())};
  v.strides = {1};
  return v;
}

// Fills the arguments from the caller's tensors; `keep` holds what views point into.
struct Call {
  TensorArg x, logits, ids, weights, tokens, mask, out, shared;
  FusedMoE::Args args;

  Call(const Layer& self, const CallTensors& t)
      : x("hidden_states", t.x),
        logits("router_logits", t.router_logits),
        ids("topk_ids", t.topk_ids),
        weights("topk_weights", t.topk_weights),
        tokens("input_ids", t.input_ids),
        mask("padding_mask", t.padding_mask),
        out("out", t.out),
        shared("shared_out", t.shared_out) {
    if (!x.present()) raise(StatusCode::kInvalidArgument, "hidden_states: got None, need a tensor");
    args.hidden_states = as_rows("hidden_states", x.view());
    if (logits.present()) args.router_logits = rows_of_x("router_logits", logits.view());
    if (ids.present()) {
      args.topk_ids = rows_of_x("topk_ids", ids.view());
      if (on_host(ids) && self.drop_beyond && is_integer(ids.view().dtype)) {
        args.topk_ids =
            as_i32("topk_ids", args.topk_ids, self.layer.spec().num_experts, &scratch().ids);
      }
    }
    if (weights.present()) {
      args.topk_weights = rows_of_x("topk_weights", weights.view());
      if (on_host(weights) && is_narrow(weights.view().dtype)) {
        args.topk_weights = as_f32("topk_weights", args.topk_weights, &scratch().weights);
      }
    }
    if (mask.present()) args.padding_mask = padding_of(mask.view());
    if (tokens.present()) {
      const bool used = self.layer.spec().routing.method == RoutingMethod::kHash && !ids.present();
      args.input_ids = token_ids(tokens.view(), args.padding_mask, used, &scratch().tokens);
    }
    if (shared.present()) {
      args.shared_output = rows_of_x("shared_out", shared.writable("shared_out"));
    }
  }

  static bool on_host(const TensorArg& t) { return !t.view().device.is_cuda(); }

  // as_rows of a tensor that has a row for each of the hidden states. Where both say more than their
  // number they say the same: the rows of [3, 2, ...] are not those of [2, 3, ...].
  TensorView rows_of_x(std::string_view field, const TensorView& t) const {
    const Shape& mine = t.shape;
    const Shape& theirs = x.view().shape;
    const std::size_t rank = mine.dims().size(), need = theirs.dims().size();
    if (rank > 2 && need > 2 && !MOESAIC_FAULT(python_leading_dims_unchecked)) {
      std::vector<std::int64_t> wanted(theirs.dims().begin(), theirs.dims().end());
      wanted.back() = mine.dims().back();
      if (!std::equal(wanted.begin(), wanted.end(), mine.dims().begin(), mine.dims().end())) {
        raise(StatusCode::kInvalidShape,
              fmt::format("{}: got {}, need {}, with the rows of hidden_states", field,
                          mine.to_string(), unwrap(Shape::from(wanted)).to_string()));
      }
    }
    return as_rows(field, t);
  }
};

class TraceTensors {
 public:
  nb::object router_logits = nb::none(), topk_ids = nb::none(), topk_weights = nb::none();
  nb::object numerics = nb::none();
  void make(const Layer& self, Call* call, bool with_logits) {
    const RoutingSpec& r = self.layer.spec().routing;
    const std::int64_t rows = call->args.hidden_states.dim(0);
    const std::array<std::int64_t, 2> columns = {rows, r.num_experts + r.num_zero_experts};
    const std::array<std::int64_t, 2> slots = {rows, r.top_k};
    FusedMoE::Trace& trace = call->args.trace;
    if (with_logits) router_logits = call->x.like(DType::kF32, columns, &trace.router_logits);
    topk_ids = call->x.like(DType::kI32, slots, &trace.topk_ids);
    topk_weights = call->x.like(DType::kF32, slots, &trace.topk_weights);
    if (MOESAIC_FAULT(python_trace_weights_unwritten)) trace.topk_weights = TensorView();
  }
};

}  // namespace

ConstTensorView padding_of(const TensorView& mask) {
  ConstTensorView rows = flat("padding_mask", mask);
  if (rows.dtype == DType::kBool) rows.dtype = DType::kU8;
  return rows;
}

ConstTensorView token_ids(const TensorView& tokens, const ConstTensorView& padding, bool used,
                          std::vector<std::int32_t>* buffer) {
  const ConstTensorView ids = flat("input_ids", tokens);
  if (ids.device.is_cuda() || (ids.dtype != DType::kI64 && ids.dtype != DType::kU32)) return ids;
  const std::int64_t count = ids.dim(0);
  const bool padded = padding.present() && !padding.device.is_cuda() &&
                      padding.dtype == DType::kU8 && padding.dim(0) == count;
  buffer->resize(static_cast<std::size_t>(count));
  for (std::int64_t i = 0; i < count; ++i) {
    const std::int64_t id = integer_at(ids, i);
    const bool fits = id == static_cast<std::int32_t>(id);
    if (!fits && used && !(padded && padding.as<std::uint8_t>()[i] != 0)) {
      raise(StatusCode::kInvalidArgument,
            fmt::format("input_ids: got {} at [{}], need 0 to 2^31-1", id, i));
    }
    (*buffer)[static_cast<std::size_t>(i)] = fits ? static_cast<std::int32_t>(id) : -1;
  }
  return {reinterpret_cast<const std::byte*>(buffer->data()), DType::kI32, ids.shape};
}

nb::object run(const Layer& self, const CallTensors& tensors, nb::handle stream, Traced traced,
               bool copy) {
  check_not_forked(self.made_at);
  CallTensors given = tensors;
  nb::object narrow_ids;
  // On another stream than PyTorch's nothing would order what PyTorch makes of them.
  if (!given.input_ids.is_none() && stream.is_none()) {
    narrow_ids = torch_token_ids(given.input_ids);
    given.input_ids = narrow_ids;
  }
  Call call(self, given);
  nb::object result;
  if (call.out.present()) {
    if (!(call.out.view().shape == call.x.view().shape) &&
        !MOESAIC_FAULT(python_out_shape_unchecked)) {
      raise(StatusCode::kInvalidShape,
            fmt::format("out: got {}, need {}, as hidden_states has it",
                        call.out.view().shape.to_string(), call.x.view().shape.to_string()));
    }
    result = nb::borrow(tensors.out);
    call.args.output = as_rows("out", call.out.writable("out"));
  } else {
    TensorView made;
    result = call.x.like(call.x.view().dtype, call.x.view().shape.dims(), &made);
    call.args.output = as_rows("out", made);
  }
  TraceTensors trace;
  if (traced.stages) trace.make(self, &call, !call.ids.present());
  std::vector<RowNumerics> rounding;
  if (traced.numerics) {
    rounding.resize(static_cast<std::size_t>(call.args.hidden_states.dim(0)));
    call.args.trace.numerics = rounding;
  }
  const Device here = call.x.view().device;
  const bool on_device = here.is_cuda();
  if (on_device && !self.layer.device().is_cuda()) {
    raise(StatusCode::kInvalidArgument,
          fmt::format("hidden_states: got a tensor on {}, need one on cpu, where the layer is",
                      here.to_string()));
  }
  if (!on_device && self.layer.device().is_cuda() && !copy &&
      !MOESAIC_FAULT(python_hidden_copy_to_device)) {
    raise(StatusCode::kInvalidArgument,
          fmt::format("hidden_states: got a tensor on cpu, need one on {}, where the layer is, or "
                      "copy=True to copy there and back",
                      self.layer.device().to_string()));
  }
  Status status;
  if (on_device) {
    const Stream where = stream_of(stream, call.x);
    const GilReleased released;
    status = self.layer.enqueue(where, call.args);
  } else {
    const GilReleased released;
    status = self.layer.forward(call.args);
  }
  check(status);
  drain_warnings();
  if (traced.numerics) {
    trace.numerics = numerics_of(self.layer, rounding, call.args.output.dtype, call.x);
  }
  if (!traced.stages && !traced.numerics) return result;
  return nb::make_tuple(result, trace);
}

Result<LayerExplanation> check_options(const MoeLayerFormat& format,
                                       const FusedMoE::Options& options) {
  MOESAIC_RETURN_IF_ERROR(check_device(options.device));
  MOESAIC_ASSIGN_OR_RETURN(LayerExplanation explanation, explain_layer(format, options));
  std::string reasons;
  for (const CandidateReport& row : explanation.candidates) {
    if (row.stage != "experts") continue;
    if (row.accepted) return explanation;
    reasons += (reasons.empty() ? "" : "; ") + row.name + ": " + row.reason;
  }
  if (!reasons.empty()) return Status(StatusCode::kUnsupported, "experts: " + reasons);
  return explanation;
}

FusedMoE::Options options_of(const std::string& quant, nb::handle device, std::int64_t max_tokens,
                             nb::handle num_threads, const std::optional<std::string>& backend) {
  FusedMoE::Options options;
  options.quant = quant;
  options.device = device_of(device);
  options.max_tokens = max_tokens;
  options.num_threads = threads_of(num_threads);
  options.backend = backend.value_or("");
  return options;
}

FusedMoE create_guarded(Result<MoeLayerWeights> weights, const FusedMoE::Options& options,
                        CallGuard* guard) {
  Result<FusedMoE> made = weights.status();
  {
    const GilReleased released;
    if (weights.ok()) {
      weights->experts = guard->guard(std::move(weights->experts));
      weights->shared = guard->guard(std::move(weights->shared));
      made = FusedMoE::create(std::move(weights).value(), options);
    }
  }
  drain_warnings();
  if (guard->stopped()) throw nb::python_error();
  return unwrap(std::move(made));
}

Result<MoeLayerWeights> load_guarded(const Checkpoint& checkpoint, int layer,
                                     const FusedMoE::Options& options, CallGuard* guard) {
  Result<MoeLayerWeights> weights = Status(StatusCode::kInternal, "not loaded");
  {
    const GilReleased released;
    weights =
        checkpoint.load_layer(layer, options.parallel, guard->progress(), options.include_gate);
  }
  if (guard->stopped()) throw nb::python_error();
  return weights;
}

void bind_trace(nb::module_& m) {
  nb::class_<TraceTensors>(m, "Trace", "What a call did besides its output.")
      .def_ro("router_logits", &TraceTensors::router_logits,
              nb::sig("def router_logits(self, /) -> typing.Any"))
      .def_ro("topk_ids", &TraceTensors::topk_ids, nb::sig("def topk_ids(self, /) -> typing.Any"))
      .def_ro("topk_weights", &TraceTensors::topk_weights,
              nb::sig("def topk_weights(self, /) -> typing.Any"))
      .def_ro("numerics", &TraceTensors::numerics, "Of a call with numerics=True.",
              nb::sig("def numerics(self, /) -> Numerics | None"));
}

}  // namespace moesaic::python
