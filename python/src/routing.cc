// moesaic.Router and moesaic.GateLinear.
#include "routing.h"

#include <fmt/format.h>
#include <nanobind/stl/string.h>

#include <array>
#include <string>
#include <utility>
#include <vector>

#include "core/fault.h"
#include "errors.h"
#include "fork.h"
#include "gil.h"
#include "layer.h"
#include "moesaic/checkpoint.h"
#include "moesaic/gate.h"
#include "moesaic/router.h"
#include "specs.h"
#include "tensors.h"
#include "torch_tensors.h"

namespace nb = nanobind;

namespace moesaic::python {
namespace {

struct RouterObject {
  Router router;
  std::int64_t made_at = fork_count();
};
struct GateObject {
  GateLinear gate;
  std::int64_t made_at = fork_count();
};

template <class Enum>
Enum enum_of(std::string_view field, const std::string& name, std::string_view (*name_of)(Enum),
             int count) {
  std::string all;
  for (int i = 0; i < count; ++i) {
    const auto value = static_cast<Enum>(i);
    if (name_of(value) == name) return value;
    all += fmt::format("{}\"{}\"", i == 0 ? "" : ", ", name_of(value));
  }
  raise(StatusCode::kInvalidArgument,
        fmt::format("{}: got \"{}\", need one of {}", field, name, all));
}

void init_router(RouterObject* self, std::int64_t num_experts, std::int64_t top_k,
                 std::int64_t num_zero_experts, const std::string& method,
                 const std::string& scoring, bool renormalize, std::int64_t num_expert_group,
                 std::int64_t topk_group, bool group_by_best_two, double routed_scaling_factor,
                 double p_norm, double jitter_eps, double renorm_floor, double renorm_epsilon,
                 nb::handle correction_bias, nb::handle expert_scale, nb::handle hash_table,
                 nb::handle vision_bias, std::int64_t vision_token_base,
                 std::int64_t num_fused_shared_experts, double shared_expert_weight,
                 nb::handle num_threads, nb::handle device) {
  const TensorArg bias("correction_bias", correction_bias), scale("expert_scale", expert_scale),
      table("hash_table", hash_table), vision("vision_bias", vision_bias);
  bias.check_not_negated("correction_bias");
  scale.check_not_negated("expert_scale");
  table.check_not_negated("hash_table");
  vision.check_not_negated("vision_bias");
  Router::Options options;
  RoutingSpec& spec = options.spec;
  spec.method = enum_of<RoutingMethod>("method", method, routing_method_name, 10);
  spec.scoring_func = enum_of<ScoringFunc>("scoring", scoring, scoring_func_name, 3);
  spec.num_experts = num_experts;
  spec.num_zero_experts = num_zero_experts;
  spec.top_k = top_k;
  spec.renormalize = renormalize;
  spec.num_expert_group = num_expert_group;
  spec.topk_group = topk_group;
  spec.group_by_best_two = group_by_best_two;
  spec.routed_scaling_factor = routed_scaling_factor;
  spec.p_norm = p_norm;
  spec.jitter_eps = jitter_eps;
  spec.renorm_floor = renorm_floor;
  spec.renorm_epsilon = renorm_epsilon;
  spec.has_correction_bias = bias.present();
  spec.has_expert_scale = scale.present();
  if (bias.present()) options.correction_bias = bias.view();
  if (scale.present()) options.expert_scale = scale.view();
  if (table.present()) options.hash_table = table.view();
  if (vision.present()) options.vision_bias = vision.view();
  options.vision_token_base = vision_token_base;
  options.num_fused_shared_experts = num_fused_shared_experts;
  options.shared_expert_weight = static_cast<float>(shared_expert_weight);
  options.num_threads = threads_of(num_threads);
  options.device = device_of(device);
  new (self) RouterObject{unwrap(Router::create(options))};
  drain_warnings();
}

RouterObject* router_from_checkpoint(const Checkpoint& checkpoint, int layer,
                                     nb::handle num_threads, nb::handle device) {
  const MoeLayerWeights weights = unwrap(checkpoint.load_layer(layer, {}, {}, false));
  Router::Options options;
  options.spec = weights.spec.routing;
  const MoeLayerTensors& t = weights.tensors;
  if (t.e_score_correction_bias.present())
    options.correction_bias = t.e_score_correction_bias.view();
  if (t.expert_scale.present()) options.expert_scale = t.expert_scale.view();
  if (t.hash_table.present()) options.hash_table = t.hash_table.view();
  options.num_threads = threads_of(num_threads);
  options.device = device_of(device);
  auto* const made = new RouterObject{unwrap(Router::create(options))};
  drain_warnings();
  return made;
}

nb::object route(const RouterObject& self, nb::handle router_logits, nb::handle hidden_states,
                 nb::handle input_ids, nb::handle padding_mask, nb::handle stream) {
  check_not_forked(self.made_at);
  const nb::object narrow_ids =
      stream.is_none() ? torch_token_ids(input_ids) : nb::borrow(input_ids);
  const TensorArg logits("router_logits", router_logits), x("hidden_states", hidden_states),
      tokens("input_ids", narrow_ids), mask("padding_mask", padding_mask);
  if (!logits.present())
    raise(StatusCode::kInvalidArgument, "router_logits: got None, need a tensor");
  Router::Args args;
  args.router_logits = as_rows("router_logits", logits.view());
  const std::int64_t rows = args.router_logits.dim(0);
  if (x.present()) args.hidden_states = as_rows("hidden_states", x.view());
  if (mask.present()) args.padding_mask = padding_of(mask.view());
  // Grows to the largest call of this thread.
  thread_local std::vector<std::int32_t> narrow;
  if (tokens.present()) {
    const bool used = self.router.spec().method == RoutingMethod::kHash;
    args.input_ids = token_ids(tokens.view(), args.padding_mask, used, &narrow);
  }
  const std::array<std::int64_t, 2> slots = {rows, self.router.slots()};
  const nb::object weights = logits.like(DType::kF32, slots, &args.topk_weights);
  const nb::object ids = logits.like(DType::kI32, slots, &args.topk_ids);
  nb::object zero = nb::none();
  if (self.router.spec().method == RoutingMethod::kZeroExpert && x.present()) {
    zero = logits.like(DType::kF32, args.hidden_states.shape.dims(), &args.zero_expert_output);
  }
  if (logits.view().device.is_cuda()) args.stream = stream_of(stream, logits);
  // On a GPU identity experts need some memory of it; the framework orders its reuse.
  nb::object scratch = nb::none();
  const std::int64_t needed = zero.is_none() ? 0 : unwrap(self.router.workspace_size(rows));
  if (needed > 0) {
    constexpr std::int64_t kAligned = 256;
    TensorView memory;
    scratch = logits.like(DType::kU8, std::array{needed + kAligned}, &memory);
    const auto from = reinterpret_cast<std::uintptr_t>(memory.data) % kAligned;
    args.workspace = {memory.data + (from == 0 ? 0 : kAligned - static_cast<std::int64_t>(from)),
                      static_cast<std::size_t>(needed)};
  }
  Status status;
  {
    const GilReleased released;
    status = self.router.select_experts(args);
  }
  check(status);
  return zero.is_none() ? nb::make_tuple(weights, ids) : nb::make_tuple(weights, ids, zero);
}

void init_gate(GateObject* self, nb::handle weight, nb::handle bias,
               const std::string& logits_dtype, bool force_fp32_compute, nb::handle num_threads,
               nb::handle device) {
  const TensorArg w("weight", weight), b("bias", bias);
  w.check_not_negated("weight");
  b.check_not_negated("bias");
  Tensor w_copy, b_copy;
  GateLinear::Options options;
  options.logits_dtype = dtype_of("logits_dtype", logits_dtype);
  options.force_fp32_compute = force_fp32_compute;
  options.num_threads = threads_of(num_threads);
  options.device = device_of(device);
  new (self) GateObject{unwrap(
      GateLinear::create(w.present() ? w.on_host("weight", &w_copy) : ConstTensorView(),
                         b.present() ? b.on_host("bias", &b_copy) : ConstTensorView(), options))};
}

GateObject* gate_from_checkpoint(const Checkpoint& checkpoint, int layer, nb::handle num_threads,
                                 nb::handle device) {
  const MoeLayerWeights weights = unwrap(checkpoint.load_layer(layer, {}));
  if (weights.spec.input_norm_eps > 0 && !MOESAIC_FAULT(python_gate_without_its_norm)) {
    raise(StatusCode::kUnsupported,
          fmt::format("gate of layer {} ({}): reads rows behind a norm of the layer's own, which a "
                      "GateLinear does not have, need moesaic.FusedMoE (trace=True has the logits)",
                      layer, weights.spec.model_type));
  }
  GateLinear::Options options;
  options.num_threads = threads_of(num_threads);
  options.device = device_of(device);
  const Tensor& bias = weights.tensors.gate_bias;
  return new GateObject{
      unwrap(GateLinear::create(weights.tensors.gate_weight.view(),
                                bias.present() ? bias.view() : ConstTensorView(), options))};
}

nb::object gate_forward(const GateObject& self, nb::handle hidden_states, nb::handle stream) {
  check_not_forked(self.made_at);
  const TensorArg x("hidden_states", hidden_states);
  if (!x.present()) raise(StatusCode::kInvalidArgument, "hidden_states: got None, need a tensor");
  const TensorView rows = as_rows("hidden_states", x.view());
  TensorView logits;
  const std::array<std::int64_t, 2> dims = {rows.dim(0), self.gate.num_experts()};
  nb::object result = x.like(self.gate.logits_dtype(), dims, &logits);
  Stream where;
  if (x.view().device.is_cuda()) where = stream_of(stream, x);
  Status status;
  {
    const GilReleased released;
    status = self.gate.forward(rows, logits, where);
  }
  check(status);
  return result;
}

}  // namespace

void bind_routing_stages(nb::module_& m) {
  const RoutingSpec usual;
  const Router::Options given;
  nb::class_<RouterObject>(
      m, "Router",
      "Router logits to weights and experts: router(logits) -> (topk_weights, topk_ids).")
      .def(
          "__init__", &init_router, nb::kw_only(), nb::arg("num_experts"), nb::arg("top_k"),
          nb::arg("num_zero_experts") = usual.num_zero_experts, nb::arg("method") = "topk",
          nb::arg("scoring") = "softmax", nb::arg("renormalize") = false,
          nb::arg("num_expert_group") = 1, nb::arg("topk_group") = 1,
          nb::arg("group_by_best_two") = usual.group_by_best_two,
          nb::arg("routed_scaling_factor") = usual.routed_scaling_factor,
          nb::arg("p_norm") = usual.p_norm, nb::arg("jitter_eps") = usual.jitter_eps,
          nb::arg("renorm_floor") = usual.renorm_floor,
          nb::arg("renorm_epsilon") = usual.renorm_epsilon,
          nb::arg("correction_bias").none() = nb::none(),
          nb::arg("expert_scale").none() = nb::none(), nb::arg("hash_table").none() = nb::none(),
          nb::arg("vision_bias").none() = nb::none(),
          nb::arg("vision_token_base") = given.vision_token_base,
          nb::arg("num_fused_shared_experts") = given.num_fused_shared_experts,
          nb::arg("shared_expert_weight") = given.shared_expert_weight,
          nb::arg("num_threads").none() = nb::none(), nb::arg("device").none() = "cpu",
          nb::sig("def __init__(self, *, num_experts: int, top_k: int, num_zero_experts: int = 0, "
                  "method: str = 'topk', scoring: str = 'softmax', renormalize: bool = False, "
                  "num_expert_group: int = 1, "
                  "topk_group: int = 1, group_by_best_two: bool = False, "
                  "routed_scaling_factor: float = 1.0, p_norm: float = 1.0, "
                  "jitter_eps: float = 0.01, renorm_floor: float = 0.0, "
                  "renorm_epsilon: float = 0.0, "
                  "correction_bias: typing.Any = None, expert_scale: typing.Any = None, "
                  "hash_table: typing.Any = None, vision_bias: typing.Any = None, "
                  "vision_token_base: int = 0, num_fused_shared_experts: int = 0, "
                  "shared_expert_weight: float = 1.0, num_threads: int | None = None, "
                  "device: typing.Any = 'cpu') -> None"),
          "method: topk, grouped_topk, topk_softmax, llama4, sparse_mixer, p_norm, hash or "
          "zero_expert, whose num_zero_experts identity experts are the last columns; custom and "
          "simulated routing are the C++ library's. "
          "scoring: softmax, sigmoid or sqrtsoftplus. group_by_best_two: groups are ranked by the "
          "sum of their two best experts, as with a correction_bias. p_norm and jitter_eps: of the "
          "methods p_norm and sparse_mixer. renormalize divides by max(sum + renorm_epsilon, "
          "renorm_floor). correction_bias [E] F32: of scores, in the "
          "choice alone. expert_scale [E] F32: the last factor of a weight. hash_table "
          "[vocabulary, k] I32: experts of a token. vision_bias [E] F32: the five tokens from "
          "vision_token_base on choose by score + vision_bias instead of the table. All are "
          "copied. num_fused_shared_experts: experts behind the others that every row gets in its "
          "last slots, with shared_expert_weight.")
      .def_static("from_checkpoint", &router_from_checkpoint, nb::arg("checkpoint"),
                  nb::arg("layer"), nb::kw_only(), nb::arg("num_threads").none() = nb::none(),
                  nb::arg("device").none() = "cpu",
                  nb::sig("def from_checkpoint(checkpoint: Checkpoint, layer: int, *, "
                          "num_threads: int | None = None, device: typing.Any = 'cpu') -> Router"))
      .def(
          "__call__", &route, nb::arg("router_logits"), nb::kw_only(),
          nb::arg("hidden_states").none() = nb::none(), nb::arg("input_ids").none() = nb::none(),
          nb::arg("padding_mask").none() = nb::none(), nb::arg("stream").none() = nb::none(),
          nb::sig(
              "def __call__(self, router_logits: typing.Any, *, hidden_states: typing.Any = None, "
              "input_ids: typing.Any = None, padding_mask: typing.Any = None, "
              "stream: typing.Any = None) -> tuple[typing.Any, ...]"),
          "Weights [M, k] F32 and ids [M, k] I32, slots in descending order of score, of logits "
          "[..., E] F32, BF16 or F16, whose rows are M. hidden_states [..., H]: of a router with "
          "identity experts, whose share of the output [M, H] F32 is then the third. input_ids "
          "[...]: needed by hash, not read by others. padding_mask [...] Bool or U8: True is a row "
          "with ids -1 and weights 0.")
      .def_prop_ro("name", [](const RouterObject& r) { return r.router.name(); })
      .def_prop_ro("routing", [](const RouterObject& r) { return r.router.spec(); });
  nb::class_<GateObject>(m, "GateLinear", "Hidden states to router logits, accumulated in fp32.")
      .def("__init__", &init_gate, nb::arg("weight"), nb::arg("bias").none() = nb::none(),
           nb::kw_only(), nb::arg("logits_dtype") = "F32", nb::arg("force_fp32_compute") = true,
           nb::arg("num_threads").none() = nb::none(), nb::arg("device").none() = "cpu",
           nb::sig("def __init__(self, weight: typing.Any, bias: typing.Any = None, *, "
                   "logits_dtype: str = 'F32', force_fp32_compute: bool = True, "
                   "num_threads: int | None = None, device: typing.Any = 'cpu') -> None"),
           "weight [E, H] and bias [E], F32, BF16 or F16, are copied. logits_dtype: \"F32\", "
           "\"BF16\" or \"F16\". force_fp32_compute: False rounds the sums to the weight's dtype "
           "first.")
      .def_static(
          "from_checkpoint", &gate_from_checkpoint, nb::arg("checkpoint"), nb::arg("layer"),
          nb::kw_only(), nb::arg("num_threads").none() = nb::none(),
          nb::arg("device").none() = "cpu",
          nb::sig("def from_checkpoint(checkpoint: Checkpoint, layer: int, *, "
                  "num_threads: int | None = None, device: typing.Any = 'cpu') -> GateLinear"))
      .def("__call__", &gate_forward, nb::arg("hidden_states"), nb::kw_only(),
           nb::arg("stream").none() = nb::none(),
           nb::sig("def __call__(self, hidden_states: typing.Any, *, stream: typing.Any = None) -> "
                   "typing.Any"),
           "Logits [M, E] of logits_dtype, of hidden states [..., H] F32, BF16 or F16.")
      .def_prop_ro("num_experts", [](const GateObject& g) { return g.gate.num_experts(); })
      .def_prop_ro("hidden_size", [](const GateObject& g) { return g.gate.hidden_size(); });
}

}  // namespace moesaic::python
