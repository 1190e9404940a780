#include "specs.h"

#include <fmt/format.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <limits>
#include <optional>
#include <utility>
#include <vector>

#include "core/fault.h"
#include "errors.h"
#include "fork.h"

namespace nb = nanobind;

namespace moesaic::python {
namespace {

std::string text(std::string_view view) { return std::string(view); }

std::string describe(const ActivationSpec& a) {
  std::string s = text(activation_name(a.kind));
  if (a.limit != std::numeric_limits<float>::infinity()) s += fmt::format(", limit={}", a.limit);
  if (a.alpha != 1.0F) s += fmt::format(", alpha={}", a.alpha);
  if (a.beta != 0.0F) s += fmt::format(", beta={}", a.beta);
  if (a.up_limit != 0.0F) s += fmt::format(", up_limit={}", a.up_limit);
  return s;
}

std::string describe(const MoeLayerSpec& s) {
  return fmt::format(
      "LayerSpec(layer={}, hidden_size={}, intermediate_size={}, num_experts={}, top_k={}, "
      "quant={}, "
      "activation={}, routing={})",
      s.layer, s.hidden_size, s.intermediate_size, s.num_experts, s.routing.top_k, s.quant.name,
      activation_name(s.activation.kind), routing_method_name(s.routing.method));
}

std::string describe(const LayerExplanation& x) {
  std::string s, stage;
  for (const CandidateReport& row : x.candidates) {
    if (row.stage != stage) s += row.stage + "\n";
    stage = row.stage;
    s += fmt::format("  {} {:<33} {}\n",
                     row.stage == "experts" && row.name == x.experts_backend ? "->" : "  ",
                     row.name, row.accepted ? "accepted" : "refused: " + row.reason);
  }
  return s + fmt::format("workspace    {} bytes\ndeterminism  {}\nactivations  {}\n",
                         x.workspace_bytes, x.determinism, x.activations);
}

void bind_routing(nb::module_& m) {
  nb::class_<RoutingSpec>(m, "Routing", "How router logits become experts and weights; read only.")
      .def_prop_ro("method",
                   [](const RoutingSpec& r) { return text(routing_method_name(r.method)); })
      .def_prop_ro("scoring",
                   [](const RoutingSpec& r) { return text(scoring_func_name(r.scoring_func)); })
      .def_ro("num_experts", &RoutingSpec::num_experts)
      .def_ro("num_zero_experts", &RoutingSpec::num_zero_experts)
      .def_ro("top_k", &RoutingSpec::top_k)
      .def_ro("renormalize", &RoutingSpec::renormalize)
      .def_ro("num_expert_group", &RoutingSpec::num_expert_group)
      .def_ro("topk_group", &RoutingSpec::topk_group)
      .def_ro("group_by_best_two", &RoutingSpec::group_by_best_two)
      .def_ro("has_correction_bias", &RoutingSpec::has_correction_bias)
      .def_ro("has_expert_scale", &RoutingSpec::has_expert_scale)
      .def_ro("routed_scaling_factor", &RoutingSpec::routed_scaling_factor)
      .def_ro("scale_on_output", &RoutingSpec::scale_on_output,
              "Whether the layer multiplies the sum of its routed experts by the factor; else the "
              "router's weights have it.")
      .def_ro("p_norm", &RoutingSpec::p_norm)
      .def_ro("jitter_eps", &RoutingSpec::jitter_eps)
      .def_ro("renorm_floor", &RoutingSpec::renorm_floor)
      .def_ro("renorm_epsilon", &RoutingSpec::renorm_epsilon)
      .def("__repr__", [](const RoutingSpec& r) {
        return fmt::format(
            "Routing({}, {}, top_k={} of {}, renormalize={}, groups={}/{}, factor={})",
            routing_method_name(r.method), scoring_func_name(r.scoring_func), r.top_k,
            r.num_experts, r.renormalize, r.topk_group, r.num_expert_group,
            r.routed_scaling_factor);
      });
}

void bind_layer_spec(nb::module_& m) {
  nb::class_<MoeLayerSpec>(m, "LayerSpec", "One MoE layer as its configuration states it.")
      .def(
          "__init__",
          [](MoeLayerSpec* self, std::int64_t hidden_size, std::int64_t intermediate_size,
             std::int64_t num_experts, std::int64_t top_k, nb::handle activation,
             const std::string& quant, std::int64_t shared_intermediate_size,
             bool has_expert_bias) {
            new (self) MoeLayerSpec;
            self->hidden_size = hidden_size;
            self->intermediate_size = intermediate_size;
            self->num_experts = self->routing.num_experts = num_experts;
            self->routing.top_k = top_k;
            self->shared.intermediate_size = shared_intermediate_size;
            self->activation = activation_of(activation);
            self->has_expert_bias = has_expert_bias;
            self->quant = scheme_of(quant);
            check(validate(*self));
          },
          nb::kw_only(), nb::arg("hidden_size"), nb::arg("intermediate_size"),
          nb::arg("num_experts"), nb::arg("top_k"), nb::arg("activation") = "silu",
          nb::arg("quant") = "bf16", nb::arg("shared_intermediate_size") = 0,
          nb::arg("has_expert_bias") = false,
          nb::sig(
              "def __init__(self, *, hidden_size: int, intermediate_size: int, num_experts: int, "
              "top_k: int, activation: str | Activation = 'silu', quant: str = 'bf16', "
              "shared_intermediate_size: int = 0, has_expert_bias: bool = False) -> None"),
          "A layer by its sizes, with softmax routing, for explain() and WeightLoader.from_spec().")
      .def_ro("model_type", &MoeLayerSpec::model_type)
      .def_ro("layer", &MoeLayerSpec::layer)
      .def_ro("prefix", &MoeLayerSpec::prefix)
      .def_ro("hidden_size", &MoeLayerSpec::hidden_size)
      .def_ro("intermediate_size", &MoeLayerSpec::intermediate_size)
      .def_ro("num_experts", &MoeLayerSpec::num_experts)
      .def_prop_ro("top_k", [](const MoeLayerSpec& s) { return s.routing.top_k; })
      .def_ro("routing", &MoeLayerSpec::routing)
      .def_ro("activation", &MoeLayerSpec::activation)
      .def_prop_ro("quant", [](const MoeLayerSpec& s) { return text(s.quant.name); })
      .def_prop_ro("shared_intermediate_size",
                   [](const MoeLayerSpec& s) { return s.shared.intermediate_size; })
      .def_prop_ro("shared_gated_output",
                   [](const MoeLayerSpec& s) { return s.shared.gated_output; })
      .def_prop_ro(
          "shared_activation",
          [](const MoeLayerSpec& s) { return s.shared.activation.value_or(s.activation); },
          "The layer's own unless the shared experts have another.")
      .def_prop_ro("activation_dtype",
                   [](const MoeLayerSpec& s) { return text(dtype_name(s.activation_dtype)); })
      .def_ro("quant_note", &MoeLayerSpec::quant_note,
              "What the checkpoint says of quantisation and is read or computed otherwise.")
      .def_ro("has_expert_bias", &MoeLayerSpec::has_expert_bias)
      .def_ro("has_router_bias", &MoeLayerSpec::has_router_bias)
      .def_ro("hash_vocabulary", &MoeLayerSpec::hash_vocabulary)
      .def_ro("apply_router_weight_on_input", &MoeLayerSpec::apply_router_weight_on_input)
      .def_ro("input_norm_eps", &MoeLayerSpec::input_norm_eps,
              "Above 0: gate and routed experts read rows that the layer has normalised (Gemma 4).")
      .def("__repr__", [](const MoeLayerSpec& s) { return describe(s); });
}

void bind_explanation(nb::module_& m) {
  nb::class_<CandidateReport>(m, "Candidate", "A row of the catalogue: accepted, or why not.")
      .def_ro("stage", &CandidateReport::stage)
      .def_ro("name", &CandidateReport::name)
      .def_ro("accepted", &CandidateReport::accepted)
      .def_ro("reason", &CandidateReport::reason)
      .def("__repr__", [](const CandidateReport& c) {
        return fmt::format("{}: {} {}", c.stage, c.name,
                           c.accepted ? "accepted" : "refused: " + c.reason);
      });
  nb::class_<LayerExplanation>(m, "Explanation",
                               "Which backends take a layer, and why not the others.")
      .def_ro("candidates", &LayerExplanation::candidates)
      .def_ro("experts_backend", &LayerExplanation::experts_backend)
      .def_ro("workspace_bytes", &LayerExplanation::workspace_bytes)
      .def_ro("determinism", &LayerExplanation::determinism)
      .def_ro("activations", &LayerExplanation::activations)
      .def_ro("quant_note", &LayerExplanation::quant_note)
      .def_ro("quant_choice", &LayerExplanation::quant_choice)
      .def_ro("router_logits", &LayerExplanation::router_logits)
      .def("__str__", [](const LayerExplanation& x) { return describe(x); });
}

}  // namespace

ActivationSpec activation_of(nb::handle activation) {
  if (nb::isinstance<nb::str>(activation)) {
    return unwrap(make_activation(nb::cast<std::string>(activation)));
  }
  if (!nb::isinstance<ActivationSpec>(activation)) {
    throw nb::type_error("activation: need a name or a moesaic.Activation");
  }
  return nb::cast<ActivationSpec>(activation);
}

Scheme scheme_of(const std::string& name) {
  for (const Scheme& scheme : stored_schemes()) {
    if (scheme.name == name) return scheme;
  }
  return unwrap(quant_scheme_from_name(name));
}

DType dtype_of(std::string_view field, const std::string& name) {
  const std::optional<DType> dtype = dtype_from_name(name);
  if (dtype) return *dtype;
  raise(StatusCode::kInvalidDType,
        fmt::format("{}: got \"{}\", need a safetensors name such as \"F32\" or \"BF16\"", field,
                    name));
}

namespace {

int wanted_threads(nb::handle num_threads) {
  if (!num_threads.is_none()) {
    return cast_as<int>("num_threads", num_threads, "a whole number, or None");
  }
  const nb::dict modules = nb::module_::import_("sys").attr("modules");
  if (!modules.contains("torch") || MOESAIC_FAULT(python_threads_not_torchs)) return 0;
  const nb::object torch = modules["torch"];
  // A module that is being imported has no functions yet.
  return nb::hasattr(torch, "get_num_threads") ? nb::cast<int>(torch.attr("get_num_threads")()) : 0;
}

}  // namespace

int threads_of(nb::handle num_threads) {
  const int threads = wanted_threads(num_threads);
  check_threads_after_fork(threads);
  return threads;
}

Device device_of(nb::handle device) {
  if (device.is_none()) return Device::cpu();
  const auto text = nb::cast<std::string>(nb::str(device));  // torch.device says "cuda:0" too
  return text == "cpu:0" ? Device::cpu() : unwrap(parse_device(text));
}

void bind_specs(nb::module_& m) {
  nb::class_<ActivationSpec>(m, "Activation", "An activation function with all its constants.")
      .def(
          "__init__",
          [](ActivationSpec* self, const std::string& name, std::optional<float> limit,
             std::optional<float> alpha, std::optional<float> beta, std::optional<float> up_limit) {
            new (self)
                ActivationSpec(unwrap(make_activation(name, {limit, alpha, beta, up_limit})));
          },
          nb::arg("name"), nb::kw_only(), nb::arg("limit") = nb::none(),
          nb::arg("alpha") = nb::none(), nb::arg("beta") = nb::none(),
          nb::arg("up_limit") = nb::none())
      .def_prop_ro("name", [](const ActivationSpec& a) { return text(activation_name(a.kind)); })
      .def_ro("limit", &ActivationSpec::limit)
      .def_ro("alpha", &ActivationSpec::alpha)
      .def_ro("beta", &ActivationSpec::beta)
      .def_ro("up_limit", &ActivationSpec::up_limit)
      .def_prop_ro("gated", [](const ActivationSpec& a) { return is_gated(a.kind); })
      .def(
          "__eq__",
          [](const ActivationSpec& a, nb::handle b) {
            return nb::isinstance<ActivationSpec>(b) && a == nb::cast<const ActivationSpec&>(b);
          },
          nb::sig("def __eq__(self, other: object, /) -> bool"))
      .def("__hash__",
           [](const ActivationSpec& a) { return std::hash<std::string>()(describe(a)); })
      .def("__repr__", [](const ActivationSpec& a) { return "Activation(" + describe(a) + ")"; });
  bind_routing(m);
  bind_layer_spec(m);
  bind_explanation(m);
}

}  // namespace moesaic::python
