// moesaic.FusedMoE.
#include "layer.h"
#include "specs.h"
#include "weight_loader.h"

namespace nb = nanobind;

namespace moesaic::python {
namespace {

struct FusedLayer : Layer {
  using Layer::Layer;
};

nb::object call_fused(const FusedLayer& self, nb::handle x, nb::handle router_logits,
                      nb::handle topk_ids, nb::handle topk_weights, nb::handle input_ids,
                      nb::handle padding_mask, nb::handle out, nb::handle shared_out,
                      nb::handle stream, bool trace, bool numerics, bool copy) {
  return run(self,
             {x, router_logits, topk_ids, topk_weights, input_ids, padding_mask, out, shared_out},
             stream, {trace, numerics}, copy);
}

MoeLayerSpec spec_without_shared(MoeLayerSpec spec, const FusedMoE::Options& options) {
  if (!options.include_shared) spec.shared = SharedExpertSpec();
  return spec;
}

// The caller wants the shared experts elsewhere: nothing of them is kept.
Result<MoeLayerWeights> without_shared(Result<MoeLayerWeights> weights,
                                       const FusedMoE::Options& options) {
  if (weights.ok() && !options.include_shared) {
    weights->shared.reset();
    weights->spec = spec_without_shared(std::move(weights->spec), options);
    weights->tensors.shared_gate_weight = Tensor();
  }
  return weights;
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
  return new FusedLayer(create_guarded(
      without_shared(load_guarded(checkpoint, layer, options, &guard), options), options, &guard));
}

FusedLayer* fused_from_loader(LoaderObject& loader, const std::string& quant, nb::handle device,
                              std::int64_t max_tokens, nb::handle num_threads,
                              const std::optional<std::string>& backend, bool include_shared,
                              bool include_gate, const std::string& router_logits_dtype) {
  FusedMoE::Options options = options_of(quant, device, max_tokens, num_threads, backend);
  options.include_shared = include_shared;
  options.include_gate = include_gate;
  options.router_logits_dtype = dtype_of("router_logits_dtype", router_logits_dtype);
  options.parallel = loader.parallel;
  CallGuard guard{nb::none()};
  return new FusedLayer(create_guarded(
      without_shared(finish(&loader, options, spec_without_shared), options), options, &guard));
}

}  // namespace

void bind_fused_moe(nb::module_& m) {
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
      "Loads one layer. quant: \"as-is\" computes what is stored, or the name of a scheme. device: "
      "\"cpu\", \"cuda\" or \"cuda:N\". max_tokens: rows that the workspace allows at once. "
      "num_threads: None is PyTorch's number where it is imported, else one per core. backend: one "
      "by its name, or it is refused. include_shared, include_gate: False where the caller "
      "computes "
      "shared experts, or brings logits or ids with every call. router_logits_dtype: what the gate "
      "rounds its fp32 sums to (\"F32\", \"BF16\", \"F16\"). progress is called with the bytes "
      "done and in all. Raises NotFound, MissingTensor, CorruptFile, Unsupported and the like, "
      "with "
      "the tensor or option in the text.");
  fused.def_static(
      "from_loader", &fused_from_loader, nb::arg("loader"), nb::kw_only(),
      nb::arg("quant") = "as-is", nb::arg("device").none() = "cpu", nb::arg("max_tokens") = 512,
      nb::arg("num_threads").none() = nb::none(), nb::arg("backend") = nb::none(),
      nb::arg("include_shared") = true, nb::arg("include_gate") = true,
      nb::arg("router_logits_dtype") = "F32",
      nb::sig("def from_loader(loader: WeightLoader, *, quant: str = 'as-is', "
              "device: typing.Any = 'cpu', max_tokens: int = 512, num_threads: int | None = None, "
              "backend: str | None = None, include_shared: bool = True, include_gate: bool = True, "
              "router_logits_dtype: str = 'F32') -> FusedMoE"),
      "The layer of the weights that a WeightLoader was given; takes them out of it. MissingTensor "
      "says what it still lacks, and leaves it as it is.");
  fused.def(
      "__call__", &call_fused, nb::arg("hidden_states"), nb::kw_only(),
      nb::arg("router_logits").none() = nb::none(), nb::arg("topk_ids").none() = nb::none(),
      nb::arg("topk_weights").none() = nb::none(), nb::arg("input_ids").none() = nb::none(),
      nb::arg("padding_mask").none() = nb::none(), nb::arg("out").none() = nb::none(),
      nb::arg("shared_out").none() = nb::none(), nb::arg("stream").none() = nb::none(),
      nb::arg("trace") = false, nb::arg("numerics") = false, nb::arg("copy") = false,
      nb::sig(
          "def __call__(self, hidden_states: typing.Any, *, router_logits: typing.Any = None, "
          "topk_ids: typing.Any = None, topk_weights: typing.Any = None, "
          "input_ids: typing.Any = None, padding_mask: typing.Any = None, out: typing.Any = None, "
          "shared_out: typing.Any = None, stream: typing.Any = None, trace: bool = False, "
          "numerics: bool = False, copy: bool = False) -> typing.Any"),
      "Output of the same kind, dtype and shape as hidden_states; with trace=True a pair of it and "
      "a Trace. numerics=True: a Trace with what rounding did to the rows; of host tensors, and "
      "several times as long. hidden_states [..., H] F32, BF16 or F16, rows may be strided; all "
      "others are "
      "contiguous. Instead of the gate: router_logits [..., E] F32, BF16 or F16. Instead of gate "
      "and router: topk_ids [..., k] I32, I64 or U32, -1 for no expert, and topk_weights [..., k] "
      "F32 (on a CPU BF16 or F16 too). input_ids [...] I32 (on a CPU I64 and U32 too): tokens, "
      "needed by layers that route by them, not read by others. padding_mask [...] Bool or U8: "
      "True "
      "is a row without a token, whose output is zero. out: as hidden_states, F32, BF16 or F16, "
      "overlapping nothing. shared_out [..., H]: takes the shared experts' part, which the output "
      "then lacks. stream: of a call on a GPU, which without it is put on the framework's current "
      "one. copy: host tensors may go to a layer on a GPU and back. Raises InvalidShape, "
      "InvalidDType, InvalidLayout, InvalidArgument and Aliasing.");
  bind_common(fused);
}

}  // namespace moesaic::python
