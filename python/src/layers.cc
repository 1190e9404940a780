#include "layers.h"

#include <fmt/format.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>
#include <pthread.h>

#include <array>
#include <atomic>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "callbacks.h"
#include "errors.h"
#include "moesaic/checkpoint.h"
#include "moesaic/fused_moe.h"
#include "numerics/element.h"
#include "own_weights.h"
#include "specs.h"
#include "tensors.h"

namespace nb = nanobind;

namespace moesaic::python {
namespace {

std::atomic<std::int64_t> g_forks{0};

struct Layer {
  explicit Layer(FusedMoE made) : layer(std::move(made)) {}
  FusedMoE layer;
  std::int64_t made_at = fork_count();
  bool drop_beyond = false;  // ids from num_experts on are slots without an expert
};
struct FusedLayer : Layer {
  using Layer::Layer;
};
struct RoutedLayer : Layer {
  using Layer::Layer;
};

// What one call converts; grows to the largest call of this thread.
struct Scratch {
  std::vector<float> weights;
  std::vector<std::int32_t> ids, tokens;
};
Scratch& scratch() {
  thread_local Scratch s;
  return s;
}

// Small integer tensors as I32, with ids from `beyond` on (if positive) as -1.
ConstTensorView as_i32(std::string_view field, const ConstTensorView& t, std::int64_t beyond,
                       std::vector<std::int32_t>* buffer) {
  check(expect_contiguous(field, t));
  const std::int64_t count = unwrap(t.shape.num_elements());
  buffer->resize(static_cast<std::size_t>(count));
  for (std::int64_t i = 0; i < count; ++i) {
    const std::int64_t value =
        t.dtype == DType::kI64 ? t.as<std::int64_t>()[i] : t.as<std::int32_t>()[i];
    const bool fits = value >= -1 && value <= std::int64_t{0x7FFFFFFF};
    if (!fits) {
      raise(StatusCode::kInvalidArgument,
            fmt::format("{}: got {} at element {}, need -1 to 2^31-1", field, value, i));
    }
    (*buffer)[static_cast<std::size_t>(i)] =
        beyond > 0 && value >= beyond ? -1 : static_cast<std::int32_t>(value);
  }
  return {reinterpret_cast<const std::byte*>(buffer->data()), DType::kI32, t.shape};
}

ConstTensorView as_f32(std::string_view field, const ConstTensorView& t,
                       std::vector<float>* buffer) {
  check(expect_contiguous(field, t));
  const std::int64_t count = unwrap(t.shape.num_elements());
  buffer->resize(static_cast<std::size_t>(count));
  for (std::int64_t i = 0; i < count; ++i) {
    (*buffer)[static_cast<std::size_t>(i)] = load_as_f32(t.data, t.dtype, i);
  }
  return {reinterpret_cast<const std::byte*>(buffer->data()), DType::kF32, t.shape};
}

bool is_narrow(DType dtype) { return dtype == DType::kBF16 || dtype == DType::kF16; }

struct CallTensors {
  nb::handle x, router_logits, topk_ids, topk_weights, input_ids, padding_mask, out, shared_out;
};

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
    const bool host = !x.view().device.is_cuda();
    args.hidden_states = as_rows("hidden_states", x.view());
    if (logits.present()) args.router_logits = as_rows("router_logits", logits.view());
    if (ids.present()) {
      args.topk_ids = as_rows("topk_ids", ids.view());
      const bool integer = ids.view().dtype == DType::kI32 || ids.view().dtype == DType::kI64;
      if (host && self.drop_beyond && integer) {
        args.topk_ids =
            as_i32("topk_ids", args.topk_ids, self.layer.spec().num_experts, &scratch().ids);
      }
    }
    if (weights.present()) {
      args.topk_weights = as_rows("topk_weights", weights.view());
      if (host && is_narrow(weights.view().dtype)) {
        args.topk_weights = as_f32("topk_weights", args.topk_weights, &scratch().weights);
      }
    }
    if (tokens.present()) {
      args.input_ids = flat("input_ids", tokens.view());
      if (host && tokens.view().dtype == DType::kI64) {
        args.input_ids = as_i32("input_ids", args.input_ids, 0, &scratch().tokens);
      }
    }
    if (mask.present()) {
      args.padding_mask = flat("padding_mask", mask.view());
      if (mask.view().dtype == DType::kBool) args.padding_mask.dtype = DType::kU8;
    }
    if (shared.present()) {
      args.shared_output = as_rows("shared_out", shared.writable("shared_out"));
    }
  }

  static ConstTensorView flat(std::string_view field, const TensorView& t) {
    check(expect_contiguous(field, t));
    ConstTensorView v = t;
    v.shape = Shape{unwrap(t.shape.num_elements())};
    v.strides = {1};
    return v;
  }
};

class TraceTensors {
 public:
  nb::object router_logits = nb::none(), topk_ids = nb::none(), topk_weights = nb::none();
  void make(const Layer& self, Call* call, bool with_logits) {
    const RoutingSpec& r = self.layer.spec().routing;
    const std::int64_t rows = call->args.hidden_states.dim(0);
    const std::array<std::int64_t, 2> columns = {rows, r.num_experts + r.num_zero_experts};
    const std::array<std::int64_t, 2> slots = {rows, r.top_k};
    FusedMoE::Trace& trace = call->args.trace;
    if (with_logits) router_logits = call->x.like(DType::kF32, columns, &trace.router_logits);
    topk_ids = call->x.like(DType::kI32, slots, &trace.topk_ids);
    topk_weights = call->x.like(DType::kF32, slots, &trace.topk_weights);
  }
};

nb::object run(const Layer& self, const CallTensors& tensors, nb::handle stream, bool trace,
               bool copy) {
  check_not_forked(self.made_at);
  Call call(self, tensors);
  nb::object result;
  if (call.out.present()) {
    if (!(call.out.view().shape == call.x.view().shape)) {
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
  TraceTensors traced;
  if (trace) traced.make(self, &call, !call.ids.present());
  const Device here = call.x.view().device;
  const bool on_device = here.is_cuda();
  if (on_device && !self.layer.device().is_cuda()) {
    raise(StatusCode::kInvalidArgument,
          fmt::format("hidden_states: got a tensor on {}, need one on cpu, where the layer is",
                      here.to_string()));
  }
  if (!on_device && self.layer.device().is_cuda() && !copy) {
    raise(StatusCode::kInvalidArgument,
          fmt::format("hidden_states: got a tensor on cpu, need one on {}, where the layer is, or "
                      "copy=True to copy there and back",
                      self.layer.device().to_string()));
  }
  Status status;
  if (on_device) {
    const Stream where = stream_of(stream, call.x);
    const nb::gil_scoped_release released;
    status = self.layer.enqueue(where, call.args);
  } else {
    const nb::gil_scoped_release released;
    status = self.layer.forward(call.args);
  }
  check(status);
  drain_warnings();
  if (!trace) return result;
  return nb::make_tuple(result, traced);
}

nb::object call_fused(const FusedLayer& self, nb::handle x, nb::handle router_logits,
                      nb::handle topk_ids, nb::handle topk_weights, nb::handle input_ids,
                      nb::handle padding_mask, nb::handle out, nb::handle shared_out,
                      nb::handle stream, bool trace, bool copy) {
  return run(self,
             {x, router_logits, topk_ids, topk_weights, input_ids, padding_mask, out, shared_out},
             stream, trace, copy);
}

nb::object call_routed(const RoutedLayer& self, nb::handle x, nb::handle topk_ids,
                       nb::handle topk_weights, nb::handle out, nb::handle stream, bool copy) {
  const nb::handle none = Py_None;
  return run(self, {x, none, topk_ids, topk_weights, none, none, out, none}, stream, false, copy);
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
    const nb::gil_scoped_release released;
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

FusedLayer* fused_from_checkpoint(const Checkpoint& checkpoint, int layer, const std::string& quant,
                                  nb::handle device, std::int64_t max_tokens,
                                  nb::handle num_threads, const std::optional<std::string>& backend,
                                  bool include_shared, bool include_gate,
                                  const std::string& router_logits_dtype, nb::handle progress) {
  FusedMoE::Options options = options_of(quant, device, max_tokens, num_threads, backend);
  options.include_shared = include_shared;
  options.include_gate = include_gate;
  options.router_logits_dtype = dtype_of("router_logits_dtype", router_logits_dtype);
  CallGuard guard(progress);
  Result<MoeLayerWeights> weights = Status(StatusCode::kInternal, "not loaded");
  {
    const nb::gil_scoped_release released;
    weights = checkpoint.load_layer(layer, options.parallel, guard.progress());
  }
  if (guard.stopped()) throw nb::python_error();
  if (weights.ok() && !include_shared) {
    weights->shared.reset();
    weights->spec.shared = SharedExpertSpec();
    weights->tensors.shared_gate_weight = Tensor();
  }
  return new FusedLayer(create_guarded(std::move(weights), options, &guard));
}

RoutedLayer* routed_from_checkpoint(const Checkpoint& checkpoint, int layer,
                                    const std::string& quant, nb::handle device,
                                    std::int64_t max_tokens, nb::handle num_threads,
                                    const std::optional<std::string>& backend,
                                    nb::handle progress) {
  FusedMoE::Options options = options_of(quant, device, max_tokens, num_threads, backend);
  options.include_gate = false;
  options.include_shared = false;
  CallGuard guard(progress);
  Result<MoeLayerWeights> weights = Status(StatusCode::kInternal, "not loaded");
  {
    const nb::gil_scoped_release released;
    weights = checkpoint.load_layer(layer, options.parallel, guard.progress());
  }
  if (guard.stopped()) throw nb::python_error();
  if (weights.ok()) {
    // Routing is the caller's: nothing of it belongs to this object.
    MoeLayerSpec& spec = weights->spec;
    RoutingSpec routing;
    routing.num_experts = spec.routing.num_experts;
    routing.top_k = spec.routing.top_k;
    spec.routing = routing;
    spec.shared = SharedExpertSpec();
    spec.has_router_bias = false;
    weights->tensors = MoeLayerTensors();
    weights->shared.reset();
  }
  return new RoutedLayer(create_guarded(std::move(weights), options, &guard));
}

GateUpLayout layout_of(const std::string& name, bool gated) {
  if (name == "none" || (!gated && name == "gate_then_up")) return GateUpLayout::kNonGated;
  if (name == "gate_then_up") return GateUpLayout::kGateThenUp;
  if (name == "up_then_gate") return GateUpLayout::kUpThenGate;
  if (name == "interleaved") return GateUpLayout::kInterleaved;
  raise(StatusCode::kInvalidArgument,
        fmt::format(
            "gate_up: got \"{}\", need \"gate_then_up\", \"up_then_gate\", \"interleaved\" or "
            "\"none\"",
            name));
}

// Codes of fewer than 8 bits come as bytes, and one-byte types as bytes where a framework lacks
// them: `stored` says what they are.
void as_codes(const Scheme& stored, DType wanted, bool scale, ConstTensorView* t) {
  static_cast<void>(stored);
  if (!t->present() || t->dtype == wanted) return;
  const bool byte = t->dtype == DType::kU8 || (!scale && t->dtype == DType::kI8);
  if (!byte) return;
  const int bits = dtype_bits(wanted);
  if (bits == 8) {
    t->dtype = wanted;
  } else if (bits == 4 && t->rank() >= 1) {
    std::vector<std::int64_t> dims(t->shape.dims().begin(), t->shape.dims().end());
    dims.back() *= 2;
    for (std::size_t i = 0; i + 1 < dims.size(); ++i) t->strides[i] *= 2;
    t->shape = *Shape::from(dims);
    t->dtype = wanted;
  }
}

RoutedLayer* routed_from_tensors(nb::handle w13, nb::handle w2, std::int64_t top_k,
                                 const std::string& quant, const std::optional<std::string>& stored,
                                 nb::handle activation, const std::string& gate_up, bool transposed,
                                 bool apply_router_weight_on_input, bool drop_ids_beyond,
                                 nb::handle device, std::int64_t max_tokens, nb::handle num_threads,
                                 const std::optional<std::string>& backend, nb::handle progress,
                                 const nb::kwargs& fields) {
  struct Named {
    const char* name;
    ConstTensorView ExpertWeightsView::*member;
  };
  static constexpr std::array<Named, 16> kOptional = {{
      {"w13_scale", &ExpertWeightsView::w13_scale},
      {"w13_bias", &ExpertWeightsView::w13_bias},
      {"w2_scale", &ExpertWeightsView::w2_scale},
      {"w2_bias", &ExpertWeightsView::w2_bias},
      {"w13_global_scale", &ExpertWeightsView::w13_global_scale},
      {"w2_global_scale", &ExpertWeightsView::w2_global_scale},
      {"w13_channel_scale", &ExpertWeightsView::w13_channel_scale},
      {"w2_channel_scale", &ExpertWeightsView::w2_channel_scale},
      {"w13_zero", &ExpertWeightsView::w13_zero},
      {"w2_zero", &ExpertWeightsView::w2_zero},
      {"w13_min", &ExpertWeightsView::w13_min},
      {"w2_min", &ExpertWeightsView::w2_min},
      {"w13_input_scale", &ExpertWeightsView::w13_input_scale},
      {"w2_input_scale", &ExpertWeightsView::w2_input_scale},
      {"w13_perm", &ExpertWeightsView::w13_perm},
      {"w2_perm", &ExpertWeightsView::w2_perm},
  }};
  OwnWeights own;
  std::vector<TensorArg> keep;
  keep.reserve(2 + kOptional.size());
  own.tensors.w13 = keep.emplace_back("w13", w13).view();
  own.tensors.w2 = keep.emplace_back("w2", w2).view();
  for (const auto& [key, value] : fields) {
    const auto name = nb::cast<std::string>(key);
    const Named* found = nullptr;
    for (const Named& row : kOptional) {
      if (name == row.name) found = &row;
    }
    if (found == nullptr) {
      throw nb::type_error(
          fmt::format("from_tensors() got an unexpected keyword argument '{}'", name).c_str());
    }
    const TensorArg& tensor = keep.emplace_back(name, value);
    if (tensor.present()) own.tensors.*found->member = tensor.view();
  }
  if (!own.tensors.w13.present() || !own.tensors.w2.present()) {
    raise(StatusCode::kInvalidArgument, "w13, w2: got None, need a tensor each");
  }

  MoeLayerSpec spec;
  spec.activation = activation_of(activation);
  own.layout = layout_of(gate_up, is_gated(spec.activation.kind));
  if (is_gated(spec.activation.kind) == (own.layout == GateUpLayout::kNonGated)) {
    raise(StatusCode::kInvalidArgument,
          fmt::format("gate_up: got \"{}\" with activation {}, which is {}gated", gate_up,
                      activation_name(spec.activation.kind),
                      own.layout == GateUpLayout::kNonGated ? "" : "not "));
  }
  own.transposed = transposed;
  const DType dtype = own.tensors.w13.dtype;
  if (stored) {
    own.stored = scheme_of(*stored);
    const OperandQuant& weight = own.stored.weight;
    for (ConstTensorView ExpertWeightsView::*m :
         {&ExpertWeightsView::w13, &ExpertWeightsView::w2}) {
      as_codes(own.stored, weight.dtype, false, &(own.tensors.*m));
    }
    const DType scale = weight.scale_format == ScaleFormat::kE8M0   ? DType::kF8E8M0
                        : weight.scale_format == ScaleFormat::kE4M3 ? DType::kF8E4M3
                                                                    : DType::kF32;
    for (ConstTensorView ExpertWeightsView::*m :
         {&ExpertWeightsView::w13_scale, &ExpertWeightsView::w2_scale}) {
      if (scale != DType::kF32) as_codes(own.stored, scale, true, &(own.tensors.*m));
    }
  } else if (dtype == DType::kBF16 || dtype == DType::kF16 || dtype == DType::kF32) {
    own.stored = scheme_of(dtype == DType::kBF16 ? "bf16" : dtype == DType::kF16 ? "f16" : "f32");
  } else {
    raise(
        StatusCode::kAmbiguousFormat,
        fmt::format("w13: got {} and no stored=, need the name of the scheme that the weights are "
                    "stored in (moesaic.quant_schemes())",
                    dtype_name(dtype)));
  }
  const OwnSizes sizes = unwrap(own_sizes(own));
  spec.hidden_size = sizes.hidden_size;
  spec.intermediate_size = sizes.intermediate_size;
  spec.num_experts = spec.routing.num_experts = sizes.num_experts;
  spec.routing.top_k = top_k;
  spec.quant = own.stored;
  spec.activation_dtype = dtype == DType::kF16   ? DType::kF16
                          : dtype == DType::kF32 ? DType::kF32
                                                 : DType::kBF16;
  spec.has_expert_bias = own.tensors.w13_bias.present() || own.tensors.w2_bias.present();
  spec.apply_router_weight_on_input = apply_router_weight_on_input;

  FusedMoE::Options options = options_of(quant, device, max_tokens, num_threads, backend);
  options.include_gate = false;
  CallGuard guard(progress);
  MoeLayerWeights weights;
  weights.spec = spec;
  weights.shared_quant = spec.quant;
  weights.experts = unwrap(make_own_source(own));
  auto* const made = new RoutedLayer(create_guarded(std::move(weights), options, &guard));
  made->drop_beyond = drop_ids_beyond;
  return made;
}

template <class T>
void bind_common(nb::class_<T>& c) {
  c.def_prop_ro("spec", [](const T& l) { return l.layer.spec(); })
      .def_prop_ro("device", [](const T& l) { return l.layer.device().to_string(); })
      .def_prop_ro(
          "quant", [](const T& l) { return std::string(l.layer.quant().name); },
          "Name of the scheme in force.")
      .def_prop_ro(
          "bound", [](const T& l) { return l.layer.quant().output_bound; },
          "Upper bound of the relative L2 error against float64 on the same stored weights.")
      .def_prop_ro("experts_backend", [](const T& l) { return l.layer.experts_backend(); })
      .def_prop_ro("determinism", [](const T& l) { return l.layer.determinism(); })
      .def_prop_ro("weight_bytes", [](const T& l) { return l.layer.weight_bytes(); })
      .def_prop_ro("workspace_bytes", [](const T& l) { return l.layer.workspace_bytes(); })
      .def(
          "explain", [](const T& l) { return l.layer.explain(); },
          "Every row of the catalogue, with the reason where it was refused.")
      .def("__repr__", [](const T& l) {
        const MoeLayerSpec& s = l.layer.spec();
        return fmt::format("<moesaic layer: {} experts of {} x {}, top {}, {} by {} on {}>",
                           s.num_experts, s.hidden_size, s.intermediate_size, s.routing.top_k,
                           l.layer.quant().name, l.layer.experts_backend(),
                           l.layer.device().to_string());
      });
  c.def(
      "__reduce__",
      [](const T&) -> nb::object {
        throw nb::type_error(
            "a moesaic layer cannot be copied or pickled: its weights are packed for this "
            "machine; make it again from the checkpoint or the tensors");
      },
      nb::sig("def __reduce__(self) -> typing.NoReturn"));
}

}  // namespace

std::int64_t fork_count() { return g_forks.load(std::memory_order_relaxed); }

void check_not_forked(std::int64_t made_at) {
  if (made_at == fork_count()) return;
  raise(
      StatusCode::kDevice,
      "this object was made before fork(); its threads and device memory are the parent's: use the "
      "multiprocessing start method \"spawn\", or make the object in the child");
}

void bind_layers(nb::module_& m) {
  pthread_atfork(nullptr, nullptr, [] { ++g_forks; });

  nb::class_<TraceTensors>(m, "Trace", "What a call did besides its output.")
      .def_ro("router_logits", &TraceTensors::router_logits,
              nb::sig("def router_logits(self, /) -> typing.Any"))
      .def_ro("topk_ids", &TraceTensors::topk_ids, nb::sig("def topk_ids(self, /) -> typing.Any"))
      .def_ro("topk_weights", &TraceTensors::topk_weights,
              nb::sig("def topk_weights(self, /) -> typing.Any"));

  nb::class_<FusedLayer> fused(m, "FusedMoE",
                               "The whole layer: gate, router, experts, shared experts. Call it "
                               "with hidden states [..., H].");
  fused.def_static(
      "from_checkpoint", &fused_from_checkpoint, nb::arg("checkpoint"), nb::arg("layer"),
      nb::kw_only(), nb::arg("quant") = "as-is", nb::arg("device").none() = "cpu",
      nb::arg("max_tokens") = 512, nb::arg("num_threads").none() = nb::none(),
      nb::arg("backend") = nb::none(), nb::arg("include_shared") = true,
      nb::arg("include_gate") = true, nb::arg("router_logits_dtype") = "F32",
      nb::arg("progress").none() = nb::none(),
      nb::sig("def from_checkpoint(checkpoint: Checkpoint, layer: int, *, quant: str = 'as-is', "
              "device: typing.Any = 'cpu', max_tokens: int = 512, num_threads: int | None = None, "
              "backend: str | None = None, include_shared: bool = True, include_gate: bool = True, "
              "router_logits_dtype: str = 'F32', "
              "progress: collections.abc.Callable[[int, int], object] | None = None) -> FusedMoE"),
      "Loads one layer. quant: \"as-is\" computes what is stored, or the name of a scheme. "
      "progress is "
      "called with the bytes done and in all.");
  fused.def(
      "__call__", &call_fused, nb::arg("hidden_states"), nb::kw_only(),
      nb::arg("router_logits").none() = nb::none(), nb::arg("topk_ids").none() = nb::none(),
      nb::arg("topk_weights").none() = nb::none(), nb::arg("input_ids").none() = nb::none(),
      nb::arg("padding_mask").none() = nb::none(), nb::arg("out").none() = nb::none(),
      nb::arg("shared_out").none() = nb::none(), nb::arg("stream").none() = nb::none(),
      nb::arg("trace") = false, nb::arg("copy") = false,
      nb::sig(
          "def __call__(self, hidden_states: typing.Any, *, router_logits: typing.Any = None, "
          "topk_ids: typing.Any = None, topk_weights: typing.Any = None, "
          "input_ids: typing.Any = None, padding_mask: typing.Any = None, out: typing.Any = None, "
          "shared_out: typing.Any = None, stream: typing.Any = None, trace: bool = False, "
          "copy: bool = False) -> typing.Any"),
      "Output of the same kind, dtype and shape as hidden_states; with trace=True a pair of it and "
      "a "
      "Trace. Give router_logits, or topk_ids and topk_weights, to replace the gate or the "
      "router.");
  bind_common(fused);

  nb::class_<RoutedLayer> routed(
      m, "RoutedExperts",
      "The experts alone, for a caller that routes: called with hidden states [..., H], ids and "
      "weights [..., k].");
  routed.def_static(
      "from_tensors", &routed_from_tensors, nb::arg("w13"), nb::arg("w2"), nb::arg("top_k"),
      nb::kw_only(), nb::arg("quant") = "as-is", nb::arg("stored") = nb::none(),
      nb::arg("activation") = "silu", nb::arg("gate_up") = "gate_then_up",
      nb::arg("transposed") = false, nb::arg("apply_router_weight_on_input") = false,
      nb::arg("drop_ids_beyond") = false, nb::arg("device").none() = "cpu",
      nb::arg("max_tokens") = 512, nb::arg("num_threads").none() = nb::none(),
      nb::arg("backend") = nb::none(), nb::arg("progress").none() = nb::none(), nb::arg("fields"),
      nb::sig(
          "def from_tensors(w13: typing.Any, w2: typing.Any, top_k: int, *, quant: str = 'as-is', "
          "stored: str | None = None, activation: str | Activation = 'silu', "
          "gate_up: str = 'gate_then_up', transposed: bool = False, "
          "apply_router_weight_on_input: bool = False, drop_ids_beyond: bool = False, "
          "device: typing.Any = 'cpu', max_tokens: int = 512, num_threads: int | None = None, "
          "backend: str | None = None, "
          "progress: collections.abc.Callable[[int, int], object] | None = None, "
          "w13_scale: typing.Any = None, "
          "w13_bias: typing.Any = None, "
          "w2_scale: typing.Any = None, "
          "w2_bias: typing.Any = None, "
          "w13_global_scale: typing.Any = None, "
          "w2_global_scale: typing.Any = None, "
          "w13_channel_scale: typing.Any = None, "
          "w2_channel_scale: typing.Any = None, "
          "w13_zero: typing.Any = None, "
          "w2_zero: typing.Any = None, "
          "w13_min: typing.Any = None, "
          "w2_min: typing.Any = None, "
          "w13_input_scale: typing.Any = None, "
          "w2_input_scale: typing.Any = None, "
          "w13_perm: typing.Any = None, "
          "w2_perm: typing.Any = None"
          ") -> RoutedExperts"),
      "Packs the caller's weights, expert by expert, and keeps none of them: w13 [E, 2I, H] and w2 "
      "[E, H, I], or transposed. stored: the scheme that codes and scales are in; plain tensors "
      "say "
      "theirs. quant: what is computed. drop_ids_beyond: ids from E on are no expert.");
  routed.def_static(
      "from_checkpoint", &routed_from_checkpoint, nb::arg("checkpoint"), nb::arg("layer"),
      nb::kw_only(), nb::arg("quant") = "as-is", nb::arg("device").none() = "cpu",
      nb::arg("max_tokens") = 512, nb::arg("num_threads").none() = nb::none(),
      nb::arg("backend") = nb::none(), nb::arg("progress").none() = nb::none(),
      nb::sig(
          "def from_checkpoint(checkpoint: Checkpoint, layer: int, *, quant: str = 'as-is', "
          "device: typing.Any = 'cpu', max_tokens: int = 512, num_threads: int | None = None, "
          "backend: str | None = None, "
          "progress: collections.abc.Callable[[int, int], object] | None = None) -> RoutedExperts"),
      "The routed experts of one layer, without its gate, router and shared experts.");
  routed.def(
      "__call__", &call_routed, nb::arg("hidden_states"), nb::arg("topk_ids"),
      nb::arg("topk_weights"), nb::kw_only(), nb::arg("out").none() = nb::none(),
      nb::arg("stream").none() = nb::none(), nb::arg("copy") = false,
      nb::sig("def __call__(self, hidden_states: typing.Any, topk_ids: typing.Any, "
              "topk_weights: typing.Any, *, out: typing.Any = None, stream: typing.Any = None, "
              "copy: bool = False) -> typing.Any"),
      "ids I32 or I64, -1: no expert; weights F32, BF16 or F16, final: they multiply the expert "
      "rows "
      "as they are.");
  bind_common(routed);
}

}  // namespace moesaic::python
