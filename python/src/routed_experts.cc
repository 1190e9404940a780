// moesaic.RoutedExperts.
#include <memory>

#include "core/fault.h"
#include "errors.h"
#include "experts/problem_checks.h"
#include "gil.h"
#include "layer.h"
#include "layer/load_sources.h"
#include "layer/quant_selection.h"
#include "own_arguments.h"
#include "specs.h"
#include "weight_loader.h"

namespace nb = nanobind;

namespace moesaic::python {
namespace {

struct RoutedLayer : Layer {
  using Layer::Layer;
};

nb::object call_routed(const RoutedLayer& self, nb::handle x, nb::handle topk_ids,
                       nb::handle topk_weights, nb::handle out, nb::handle stream, bool numerics,
                       bool copy) {
  const nb::handle none = Py_None;
  return run(self, {x, none, topk_ids, topk_weights, none, none, out, none}, stream,
             {.numerics = numerics}, copy);
}

FusedMoE::Options experts_options(const std::string& quant, nb::handle device,
                                  std::int64_t max_tokens, nb::handle num_threads,
                                  const std::optional<std::string>& backend) {
  FusedMoE::Options options = options_of(quant, device, max_tokens, num_threads, backend);
  options.include_gate = false;
  options.include_shared = false;
  return options;
}

// Routing is the caller's: nothing of it, no norm in front and no shared expert, belongs to this object.
MoeLayerSpec spec_alone(MoeLayerSpec spec, const FusedMoE::Options& options) {
  static_cast<void>(options);
  RoutingSpec routing;
  routing.num_experts = spec.routing.num_experts;
  routing.top_k = spec.routing.top_k;
  spec.routing = routing;
  if (!MOESAIC_FAULT(python_experts_want_token_ids)) spec.hash_vocabulary = 0;
  spec.shared = SharedExpertSpec();
  spec.has_router_bias = false;
  if (!MOESAIC_FAULT(python_experts_want_a_norm)) spec.input_norm_eps = 0;
  return spec;
}

Result<MoeLayerWeights> experts_alone(Result<MoeLayerWeights> weights) {
  if (!weights.ok()) return weights;
  weights->spec = spec_alone(std::move(weights->spec), {});
  weights->tensors = MoeLayerTensors();
  weights->shared.reset();
  return weights;
}

RoutedLayer* routed_from_checkpoint(const Checkpoint& checkpoint, int layer,
                                    const std::string& quant, nb::handle device,
                                    std::int64_t max_tokens, nb::handle num_threads,
                                    const std::optional<std::string>& backend, nb::handle progress,
                                    std::optional<std::int64_t> top_k) {
  const FusedMoE::Options options =
      experts_options(quant, device, max_tokens, num_threads, backend);
  CallGuard guard(progress);
  Result<MoeLayerWeights> weights = experts_alone(load_guarded(checkpoint, layer, options, &guard));
  if (weights.ok() && top_k) weights->spec.routing.top_k = *top_k;
  return new RoutedLayer(create_guarded(std::move(weights), options, &guard));
}

RoutedLayer* routed_from_loader(LoaderObject& loader, const std::string& quant, nb::handle device,
                                std::int64_t max_tokens, nb::handle num_threads,
                                const std::optional<std::string>& backend, bool drop_ids_beyond) {
  FusedMoE::Options options = experts_options(quant, device, max_tokens, num_threads, backend);
  options.parallel = loader.parallel;
  CallGuard guard{nb::none()};
  auto* const made = new RoutedLayer(
      create_guarded(experts_alone(finish(&loader, options, spec_alone)), options, &guard));
  made->drop_beyond = drop_ids_beyond;
  return made;
}

// Tells the caller's progress of each expert that is asked for, the last of them too; a format whose
// experts are read twice goes from none to all once.
class ToldSource final : public ExpertSource {
 public:
  ToldSource(std::unique_ptr<ExpertSource> source, std::int64_t count, std::int64_t bytes,
             CallGuard* guard)
      : source_(std::move(source)), count_(count), bytes_(bytes), told_(guard->progress()) {}

  Result<ExpertWeightsView> expert(std::int64_t e) override {
    Result<ExpertWeightsView> found = source_->expert(e);
    if (told_ && e >= next_) {
      next_ = e + 1;
      told_(bytes_ / count_ * next_ + bytes_ % count_ * next_ / count_, bytes_);
    }
    return found;
  }

 private:
  std::unique_ptr<ExpertSource> source_;
  std::int64_t count_, bytes_, next_ = 0;
  ProgressFn told_;
};

RoutedLayer* routed_from_tensors(nb::handle w13, nb::handle w2, std::int64_t top_k,
                                 const std::string& quant, const std::optional<std::string>& stored,
                                 nb::handle activation, const std::string& gate_up, bool transposed,
                                 bool apply_router_weight_on_input, bool drop_ids_beyond,
                                 nb::handle device, std::int64_t max_tokens, nb::handle num_threads,
                                 const std::optional<std::string>& backend, nb::handle progress,
                                 const nb::kwargs& fields) {
  const OwnArguments own = own_arguments(w13, w2, top_k, stored, activation, gate_up, transposed,
                                         apply_router_weight_on_input, "from_tensors", fields);
  const FusedMoE::Options options =
      experts_options(quant, device, max_tokens, num_threads, backend);
  CallGuard guard(progress);
  MoeLayerWeights weights;
  weights.spec = own.spec;
  weights.shared_quant = own.spec.quant;
  weights.experts = std::make_unique<ToldSource>(
      unwrap(make_own_source(own.weights)), own.spec.num_experts, bytes_of(own.weights), &guard);
  auto* const made = new RoutedLayer(create_guarded(std::move(weights), options, &guard));
  made->drop_beyond = drop_ids_beyond;
  return made;
}

// What packing would find in the first expert: as it is given, and converted where `quant` says so.
Status check_first_expert(const OwnArguments& own, ExpertSource& given, const std::string& quant) {
  MoeProblem problem;
  problem.num_experts = problem.num_local_experts = own.spec.num_experts;
  problem.top_k = own.spec.routing.top_k;
  problem.hidden_size = own.spec.hidden_size;
  problem.intermediate_size = own.spec.intermediate_size;
  problem.activation = own.spec.activation;
  problem.quant = own.spec.quant;
  problem.activation_dtype = own.spec.activation_dtype;
  problem.has_expert_bias = own.spec.has_expert_bias;
  MOESAIC_ASSIGN_OR_RETURN(const ExpertWeightsView stored, given.expert(0));
  MOESAIC_RETURN_IF_ERROR(experts::check_expert_weights(problem, stored, 0));
  MOESAIC_ASSIGN_OR_RETURN(const layer::QuantPlan plan,
                           layer::plan_quant(problem.quant, problem.activation_dtype, quant));
  const bool as_given = plan.conversion == layer::LoadConversion::kNone;
  if (as_given || MOESAIC_FAULT(python_first_expert_not_converted)) return Status();
  problem.quant = plan.scheme;
  problem.activation_dtype = plan.activation_dtype;
  MOESAIC_ASSIGN_OR_RETURN(const std::unique_ptr<ExpertSource> source,
                           layer::make_converting_source(given, plan));
  MOESAIC_ASSIGN_OR_RETURN(const ExpertWeightsView converted, source->expert(0));
  return experts::check_expert_weights(problem, converted, 0);
}

LayerExplanation check_tensors(nb::handle w13, nb::handle w2, std::int64_t top_k,
                               const std::string& quant, const std::optional<std::string>& stored,
                               nb::handle activation, const std::string& gate_up, bool transposed,
                               bool apply_router_weight_on_input, bool drop_ids_beyond,
                               nb::handle device, std::int64_t max_tokens, nb::handle num_threads,
                               const std::optional<std::string>& backend, nb::handle progress,
                               const nb::kwargs& fields) {
  static_cast<void>(drop_ids_beyond);  // of calls alone
  static_cast<void>(progress);         // of one expert there is none

  const OwnArguments own = own_arguments(w13, w2, top_k, stored, activation, gate_up, transposed,
                                         apply_router_weight_on_input, "check_tensors", fields);
  const FusedMoE::Options options =
      experts_options(quant, device, max_tokens, num_threads, backend);
  LayerExplanation explanation = unwrap(check_options({own.spec, own.spec.quant}, options));
  const std::unique_ptr<ExpertSource> source = unwrap(make_own_source(own.weights));
  Status first;
  {
    const GilReleased released;
    first = check_first_expert(own, *source, quant);
  }
  check(first.with_context("experts"));
  return explanation;
}

}  // namespace

void bind_routed_experts(nb::module_& m) {
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
      "say theirs. quant: what is computed. drop_ids_beyond: ids from E on are no expert. progress "
      "is called with the bytes of the experts read so far and of all.");
  routed.def_static(
      "check_tensors", &check_tensors, nb::arg("w13"), nb::arg("w2"), nb::arg("top_k"),
      nb::kw_only(), nb::arg("quant") = "as-is", nb::arg("stored") = nb::none(),
      nb::arg("activation") = "silu", nb::arg("gate_up") = "gate_then_up",
      nb::arg("transposed") = false, nb::arg("apply_router_weight_on_input") = false,
      nb::arg("drop_ids_beyond") = false, nb::arg("device").none() = "cpu",
      nb::arg("max_tokens") = 512, nb::arg("num_threads").none() = nb::none(),
      nb::arg("backend") = nb::none(), nb::arg("progress").none() = nb::none(), nb::arg("fields"),
      nb::sig(
          "def check_tensors(w13: typing.Any, w2: typing.Any, top_k: int, *, quant: str = 'as-is', "
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
          ") -> Explanation"),
      "Raises what from_tensors would with these arguments, looking at sizes, formats, options, "
      "the "
      "device and the first expert's values, and packs nothing. Left for the packing: values of "
      "the "
      "other experts that the format does not have, memory.");
  routed.def_static(
      "from_checkpoint", &routed_from_checkpoint, nb::arg("checkpoint"), nb::arg("layer"),
      nb::kw_only(), nb::arg("quant") = "as-is", nb::arg("device").none() = "cpu",
      nb::arg("max_tokens") = 512, nb::arg("num_threads").none() = nb::none(),
      nb::arg("backend") = nb::none(), nb::arg("progress").none() = nb::none(),
      nb::arg("top_k") = nb::none(),
      nb::sig("def from_checkpoint(checkpoint: Checkpoint, layer: int, *, quant: str = 'as-is', "
              "device: typing.Any = 'cpu', max_tokens: int = 512, num_threads: int | None = None, "
              "backend: str | None = None, "
              "progress: collections.abc.Callable[[int, int], object] | None = None, "
              "top_k: int | None = None) -> RoutedExperts"),
      "The routed experts of one layer, without its gate, router and shared experts: their "
      "weighted "
      "sum, before the layer multiplies it (spec.routing.scale_on_output), of rows that are "
      "normalised where the layer does that (spec.input_norm_eps). top_k: of a caller who chooses "
      "another number of experts than the checkpoint does.");
  routed.def_static(
      "from_loader", &routed_from_loader, nb::arg("loader"), nb::kw_only(),
      nb::arg("quant") = "as-is", nb::arg("device").none() = "cpu", nb::arg("max_tokens") = 512,
      nb::arg("num_threads").none() = nb::none(), nb::arg("backend") = nb::none(),
      nb::arg("drop_ids_beyond") = false,
      nb::sig("def from_loader(loader: WeightLoader, *, quant: str = 'as-is', "
              "device: typing.Any = 'cpu', max_tokens: int = 512, num_threads: int | None = None, "
              "backend: str | None = None, drop_ids_beyond: bool = False) -> RoutedExperts"),
      "The experts of the weights that a WeightLoader was given; takes them out of it. "
      "MissingTensor says what it still lacks, and leaves it as it is.");
  routed.def(
      "__call__", &call_routed, nb::arg("hidden_states"), nb::arg("topk_ids"),
      nb::arg("topk_weights"), nb::kw_only(), nb::arg("out").none() = nb::none(),
      nb::arg("stream").none() = nb::none(), nb::arg("numerics") = false, nb::arg("copy") = false,
      nb::sig("def __call__(self, hidden_states: typing.Any, topk_ids: typing.Any, "
              "topk_weights: typing.Any, *, out: typing.Any = None, stream: typing.Any = None, "
              "numerics: bool = False, copy: bool = False) -> typing.Any"),
      "Output of the same kind, dtype and shape as hidden_states [..., H], F32, BF16 or F16, whose "
      "rows may be strided. numerics=True: as of a FusedMoE. topk_ids [..., k] I32, I64 or U32, "
      "-1: no expert; topk_weights [..., "
      "k] "
      "F32 (on a CPU BF16 or F16 too), final: they multiply the expert rows as they are. out: as "
      "hidden_states, F32, BF16 or F16, overlapping nothing. stream: of a call on a GPU, which "
      "without it is put on the framework's current one. copy: host tensors may go to a layer on a "
      "GPU and back. Raises InvalidShape, InvalidDType, InvalidLayout, InvalidArgument and "
      "Aliasing.");
  bind_common(routed);
}

}  // namespace moesaic::python
