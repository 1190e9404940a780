"""The library's part of moesaic."""

from collections.abc import Callable, Iterable, Mapping, Sequence
import os
from typing import Any, NoReturn


class Tensor:
    """
    Memory of the library's own. numpy.asarray(t) and torch.from_dlpack(t) see it without copying.
    """

    def __dlpack__(self, *, stream: Any = None, max_version: Any = None, dl_device: Any = None, copy: bool | None = None) -> Any: ...

    def __dlpack_device__(self) -> tuple[int, int]: ...

    @property
    def __array_interface__(self) -> dict[str, Any]: ...

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        """InvalidDType for the types that NumPy does not have."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> str:
        """As safetensors files name it: "BF16", "F8_E4M3", ..."""

    def float32(self) -> Tensor:
        """A copy with F32 elements, for frameworks without BF16 or FP8."""

    @property
    def nbytes(self) -> int: ...

    def __repr__(self) -> str: ...

class Activation:
    """An activation function with all its constants."""

    def __init__(self, name: str, *, limit: float | None = None, alpha: float | None = None, beta: float | None = None, up_limit: float | None = None) -> None: ...

    @property
    def name(self) -> str: ...

    @property
    def limit(self) -> float: ...

    @property
    def alpha(self) -> float: ...

    @property
    def beta(self) -> float: ...

    @property
    def up_limit(self) -> float: ...

    @property
    def gated(self) -> bool: ...

    def __eq__(self, other: object, /) -> bool: ...

    def __hash__(self) -> int: ...

    def __repr__(self) -> str: ...

class Routing:
    """How router logits become experts and weights; read only."""

    @property
    def method(self) -> str: ...

    @property
    def scoring(self) -> str: ...

    @property
    def num_experts(self) -> int: ...

    @property
    def num_zero_experts(self) -> int: ...

    @property
    def top_k(self) -> int: ...

    @property
    def renormalize(self) -> bool: ...

    @property
    def num_expert_group(self) -> int: ...

    @property
    def topk_group(self) -> int: ...

    @property
    def group_by_best_two(self) -> bool: ...

    @property
    def has_correction_bias(self) -> bool: ...

    @property
    def has_expert_scale(self) -> bool: ...

    @property
    def routed_scaling_factor(self) -> float: ...

    @property
    def scale_on_output(self) -> bool:
        """
        Whether the layer multiplies the sum of its routed experts by the factor; else the router's weights have it.
        """

    @property
    def p_norm(self) -> float: ...

    @property
    def jitter_eps(self) -> float: ...

    @property
    def renorm_floor(self) -> float: ...

    @property
    def renorm_epsilon(self) -> float: ...

    def __repr__(self) -> str: ...

class LayerSpec:
    """One MoE layer as its configuration states it."""

    def __init__(self, *, hidden_size: int, intermediate_size: int, num_experts: int, top_k: int, activation: str | Activation = 'silu', quant: str = 'bf16', shared_intermediate_size: int = 0, has_expert_bias: bool = False) -> None:
        """
        A layer by its sizes, with softmax routing, for explain() and WeightLoader.from_spec().
        """

    @property
    def model_type(self) -> str: ...

    @property
    def layer(self) -> int: ...

    @property
    def prefix(self) -> str: ...

    @property
    def hidden_size(self) -> int: ...

    @property
    def intermediate_size(self) -> int: ...

    @property
    def num_experts(self) -> int: ...

    @property
    def top_k(self) -> int: ...

    @property
    def routing(self) -> Routing: ...

    @property
    def activation(self) -> Activation: ...

    @property
    def quant(self) -> str: ...

    @property
    def shared_intermediate_size(self) -> int: ...

    @property
    def shared_gated_output(self) -> bool: ...

    @property
    def shared_activation(self) -> Activation:
        """The layer's own unless the shared experts have another."""

    @property
    def activation_dtype(self) -> str: ...

    @property
    def quant_note(self) -> str:
        """
        What the checkpoint says of quantisation and is read or computed otherwise.
        """

    @property
    def has_expert_bias(self) -> bool: ...

    @property
    def has_router_bias(self) -> bool: ...

    @property
    def hash_vocabulary(self) -> int: ...

    @property
    def apply_router_weight_on_input(self) -> bool: ...

    @property
    def input_norm_eps(self) -> float:
        """
        Above 0: gate and routed experts read rows that the layer has normalised (Gemma 4).
        """

    def __repr__(self) -> str: ...

class Candidate:
    """A row of the catalogue: accepted, or why not."""

    @property
    def stage(self) -> str: ...

    @property
    def name(self) -> str: ...

    @property
    def accepted(self) -> bool: ...

    @property
    def reason(self) -> str: ...

    def __repr__(self) -> str: ...

class Explanation:
    """Which backends take a layer, and why not the others."""

    @property
    def candidates(self) -> list[Candidate]: ...

    @property
    def experts_backend(self) -> str: ...

    @property
    def workspace_bytes(self) -> int: ...

    @property
    def determinism(self) -> str: ...

    @property
    def activations(self) -> str: ...

    @property
    def quant_note(self) -> str: ...

    @property
    def quant_choice(self) -> str: ...

    @property
    def router_logits(self) -> str: ...

    def __str__(self) -> str: ...

class Checkpoint:
    """
    A folder with config.json and safetensors, or a .gguf file; reads headers only.
    """

    def __init__(self, path: str | os.PathLike[str], *, access: str = 'mmap') -> None: ...

    @property
    def model_type(self) -> str: ...

    @property
    def layers(self) -> list[LayerSpec]:
        """MoE layers in ascending order."""

    def layer(self, index: int) -> LayerSpec:
        """
        The MoE layer of that number in the model. NotFound lists those there are.
        """

    def layer_bytes(self, index: int) -> int:
        """Bytes of all tensors of the layer's block, as stored."""

    def problems(self) -> list[str]:
        """What is odd but stops not every layer, in words; empty: nothing."""

    def read_tensor(self, name: str) -> Tensor:
        """Any tensor of the files, copied. NotFound names the nearest."""

class TensorFile:
    """One safetensors file."""

    def __init__(self, path: str | os.PathLike[str]) -> None: ...

    def names(self) -> list[str]: ...

    def read(self, name: str) -> Tensor: ...

def explain(what: LayerSpec | Checkpoint, layer: int | None = None, *, quant: str = 'as-is', device: Any = 'cpu', max_tokens: int = 512, backend: str | None = None) -> Explanation:
    """
    Which backends take a layer and why not the others, without its weights.
    """

class ConvertedLayer:
    """What became of one layer's experts."""

    @property
    def layer(self) -> int: ...

    @property
    def rel_l2_weights(self) -> float: ...

    @property
    def bytes_in(self) -> int: ...

    @property
    def bytes_out(self) -> int: ...

class ConvertReport:
    """What a conversion did."""

    @property
    def layers(self) -> list[ConvertedLayer]: ...

    @property
    def bytes_in(self) -> int: ...

    @property
    def bytes_out(self) -> int: ...

    @property
    def notes(self) -> list[str]: ...

def convert(source: str | os.PathLike[str], target: str | os.PathLike[str], *, quant: str, num_threads: int | None = None, progress: Callable[[int, int], object] | None = None, replace: bool = False) -> ConvertReport:
    """
    Writes a checkpoint with the routed experts in another format; everything else as it is.
    """

def convert_schemes() -> list[str]: ...

class ExpertNames:
    """
    How the tensors of a layer's experts are called, for models of no known family.
    """

    def __init__(self, *, block: str = 'mlp', gate: str | None = 'experts.{e}.gate_proj', up: str | None = 'experts.{e}.up_proj', down: str = 'experts.{e}.down_proj', storage: str = 'per_expert', weight_suffix: str = '.weight', scale_suffix: str = '.weight_scale_inv', bias_suffix: str = '_bias') -> None:
        """
        block: what all names begin with; gate, up, down: modules in it, {e} is the expert's number. storage: per_expert, per_expert_up_first, stacked, flat, fused_nt, fused_nn, mxfp4_interleaved, fused_nn_interleaved or fused_nt_interleaved; where one tensor holds gate and up, gate names it and up is None. Suffixes: of plain weights, of the scales of FP8 blocks and of biases; other formats have names of their own.
        """

    @property
    def block(self) -> str: ...

    @property
    def gate(self) -> str: ...

    @property
    def up(self) -> str: ...

    @property
    def down(self) -> str: ...

    @property
    def storage(self) -> str: ...

    def __repr__(self) -> str: ...

class Parallel:
    """
    Where this process stands among its peers, and so which experts, or which slice of each, it has.
    """

    def __init__(self, *, tp_size: int = 1, tp_rank: int = 0, ep_size: int = 1, ep_rank: int = 0, placement: str = 'linear') -> None:
        """
        tp: each rank has a slice of every expert's width. ep: each rank has whole experts, one after the other (linear) or every ep-th (round_robin). One of them is 1.
        """

    @property
    def tp_size(self) -> int: ...

    @property
    def tp_rank(self) -> int: ...

    @property
    def ep_size(self) -> int: ...

    @property
    def ep_rank(self) -> int: ...

    @property
    def placement(self) -> str: ...

    def local_experts(self, num_experts: int) -> list[int]:
        """Ids of the experts of which this rank has weights, ascending."""

    def __repr__(self) -> str: ...

class WeightLoader:
    """
    One layer's weights on their way: each tensor whole, under its checkpoint's name, in any order. FusedMoE.from_loader and RoutedExperts.from_loader make the layer, with the bits that the files would give.
    """

    @staticmethod
    def from_config(config: str | Mapping[str, Any], layer: int, *, names: Mapping[str, str] | None = None, experts_only: bool = False, side_files: Mapping[str, str] | None = None, parallel: Parallel | None = None) -> WeightLoader:
        """
        Of a layer as config.json, its text or what it holds, describes it. names: what of the caller's names is to be replaced, and by what, in order. side_files: contents of hf_quant_config.json and the like, by name. parallel: the rank whose experts, or slices of them, are kept; the layer's output is then this rank's part, and the parts of all ranks add up to one rank's.
        """

    @staticmethod
    def from_checkpoint(checkpoint: Checkpoint, layer: int, *, names: Mapping[str, str] | None = None, experts_only: bool = False, parallel: Parallel | None = None) -> WeightLoader:
        """
        As the files of a checkpoint describe the layer; none of their tensors is read.
        """

    @staticmethod
    def from_spec(spec: LayerSpec, expert_names: ExpertNames, *, quantization_config: str | Mapping[str, Any] | None = None, names: Mapping[str, str] | None = None, parallel: Parallel | None = None) -> WeightLoader:
        """
        The experts of a layer that is described by hand: sizes, activation and biases by the spec, the format by a quantization_config as config.json has it (None: plain weights; spec.quant is not looked at).
        """

    def load(self, name: str, tensor: Any, *, ggml_type: int | None = None) -> bool:
        """
        Takes one tensor, copying what is needed of it; whether it was kept, or is not this layer's. After an error nothing has changed. ggml_type: of a tensor of a GGUF file.
        """

    def load_weights(self, pairs: Iterable[tuple[str, Any]]) -> list[str]:
        """
        All of them in order; the names that were kept. Stops at the first error.
        """

    def missing(self) -> list[str]:
        """Tensors that the layer still lacks."""

    @property
    def bytes(self) -> int:
        """That are held now."""

class Numerics:
    """
    What rounding did to the rows of one call, and whether they are those that the layer's bound is stated for.
    """

    @property
    def within(self) -> bool:
        """No row is outside, and the estimated error is within activation_bound."""

    @property
    def bound(self) -> float:
        """
        Of the relative L2 error of this call's output: the layer's, or a wider one that follows from the estimate; infinity where there is none. Relative to the parts (experts times weights) that are added into it.
        """

    @property
    def activation_bound(self) -> float:
        """The part of the layer's bound that is due to rounding activations."""

    @property
    def error_estimate(self) -> float:
        """
        Relative L2 error that rounding activations is estimated to leave, of all rows.
        """

    @property
    def rows(self) -> int: ...

    @property
    def outside(self) -> int:
        """Rows with any flag."""

    @property
    def saturated(self) -> int:
        """Rows with values outside what a static scale can express."""

    @property
    def flushed(self) -> int:
        """
        Rows that lost more below the smallest normal code than rounding takes.
        """

    @property
    def not_finite(self) -> int:
        """Rows with NaN or infinity on their way."""

    @property
    def beyond_bound(self) -> int:
        """
        Rows with an expert whose estimated error is above 1.5 times the bound.
        """

    @property
    def row_errors(self, /) -> Any:
        """[M] F32: error_estimate of each row."""

    @property
    def row_flags(self, /) -> Any:
        """
        [M] I32: the sum of SATURATED, FLUSHED, NOT_FINITE, BEYOND_BOUND where they are so.
        """

    def __repr__(self) -> str: ...

    SATURATED: int = 1

    FLUSHED: int = 2

    NOT_FINITE: int = 4

    BEYOND_BOUND: int = 8

class Trace:
    """What a call did besides its output."""

    @property
    def router_logits(self, /) -> Any: ...

    @property
    def topk_ids(self, /) -> Any: ...

    @property
    def topk_weights(self, /) -> Any: ...

    @property
    def numerics(self, /) -> Numerics | None:
        """Of a call with numerics=True."""

class FusedMoE:
    """
    The whole layer: gate, router, experts, shared experts. Call it with hidden states [..., H].
    """

    @staticmethod
    def from_checkpoint(checkpoint: Checkpoint, layer: int, *, quant: str = 'as-is', device: Any = 'cpu', max_tokens: int = 512, num_threads: int | None = None, backend: str | None = None, include_shared: bool = True, include_gate: bool = True, router_logits_dtype: str = 'F32', progress: Callable[[int, int], object] | None = None) -> FusedMoE:
        """
        Loads one layer. quant: "as-is" computes what is stored, or the name of a scheme. device: "cpu", "cuda" or "cuda:N". max_tokens: rows that the workspace allows at once. num_threads: None is PyTorch's number where it is imported, else one per core. backend: one by its name, or it is refused. include_shared, include_gate: False where the caller computes shared experts, or brings logits or ids with every call. router_logits_dtype: what the gate rounds its fp32 sums to ("F32", "BF16", "F16"). progress is called with the bytes done and in all. Raises NotFound, MissingTensor, CorruptFile, Unsupported and the like, with the tensor or option in the text.
        """

    @staticmethod
    def from_loader(loader: WeightLoader, *, quant: str = 'as-is', device: Any = 'cpu', max_tokens: int = 512, num_threads: int | None = None, backend: str | None = None, include_shared: bool = True, include_gate: bool = True, router_logits_dtype: str = 'F32') -> FusedMoE:
        """
        The layer of the weights that a WeightLoader was given; takes them out of it. MissingTensor says what it still lacks, and leaves it as it is.
        """

    def __call__(self, hidden_states: Any, *, router_logits: Any = None, topk_ids: Any = None, topk_weights: Any = None, input_ids: Any = None, padding_mask: Any = None, out: Any = None, shared_out: Any = None, stream: Any = None, trace: bool = False, numerics: bool = False, copy: bool = False) -> Any:
        """
        Output of the same kind, dtype and shape as hidden_states; with trace=True a pair of it and a Trace. numerics=True: a Trace with what rounding did to the rows; of host tensors, and several times as long. hidden_states [..., H] F32, BF16 or F16, rows may be strided; all others are contiguous. Instead of the gate: router_logits [..., E] F32, BF16 or F16. Instead of gate and router: topk_ids [..., k] I32, I64 or U32, -1 for no expert, and topk_weights [..., k] F32 (on a CPU BF16 or F16 too). input_ids [...] I32 (on a CPU I64 and U32 too): tokens, needed by layers that route by them, not read by others. padding_mask [...] Bool or U8: True is a row without a token, whose output is zero. out: as hidden_states, F32, BF16 or F16, overlapping nothing. shared_out [..., H]: takes the shared experts' part, which the output then lacks. stream: of a call on a GPU, which without it is put on the framework's current one. copy: host tensors may go to a layer on a GPU and back. Raises InvalidShape, InvalidDType, InvalidLayout, InvalidArgument and Aliasing.
        """

    @property
    def spec(self) -> LayerSpec: ...

    @property
    def device(self) -> str: ...

    @property
    def quant(self) -> str:
        """Name of the scheme in force."""

    @property
    def bound(self) -> float:
        """
        Upper bound of the relative L2 error against float64 on the same stored weights, of an output in F32: one in BF16 or F16 is rounded once more (docs/accuracy.md).
        """

    @property
    def experts_backend(self) -> str:
        """Name of the kernels that run."""

    @property
    def determinism(self) -> str:
        """What the bits of a result depend on, in words."""

    @property
    def weight_bytes(self) -> int:
        """Of packed weights."""

    @property
    def workspace_bytes(self) -> int:
        """Held for calls of max_tokens rows."""

    def explain(self) -> list[Candidate]:
        """Every row of the catalogue, with the reason where it was refused."""

    def __repr__(self) -> str: ...

    def __reduce__(self) -> NoReturn: ...

class RoutedExperts:
    """
    The experts alone, for a caller that routes: called with hidden states [..., H], ids and weights [..., k].
    """

    @staticmethod
    def from_tensors(w13: Any, w2: Any, top_k: int, *, quant: str = 'as-is', stored: str | None = None, activation: str | Activation = 'silu', gate_up: str = 'gate_then_up', transposed: bool = False, apply_router_weight_on_input: bool = False, drop_ids_beyond: bool = False, device: Any = 'cpu', max_tokens: int = 512, num_threads: int | None = None, backend: str | None = None, progress: Callable[[int, int], object] | None = None, w13_scale: Any = None, w13_bias: Any = None, w2_scale: Any = None, w2_bias: Any = None, w13_global_scale: Any = None, w2_global_scale: Any = None, w13_channel_scale: Any = None, w2_channel_scale: Any = None, w13_zero: Any = None, w2_zero: Any = None, w13_min: Any = None, w2_min: Any = None, w13_input_scale: Any = None, w2_input_scale: Any = None, w13_perm: Any = None, w2_perm: Any = None) -> RoutedExperts:
        """
        Packs the caller's weights, expert by expert, and keeps none of them: w13 [E, 2I, H] and w2 [E, H, I], or transposed. stored: the scheme that codes and scales are in; plain tensors say theirs. quant: what is computed. drop_ids_beyond: ids from E on are no expert. progress is called with the bytes of the experts read so far and of all.
        """

    @staticmethod
    def check_tensors(w13: Any, w2: Any, top_k: int, *, quant: str = 'as-is', stored: str | None = None, activation: str | Activation = 'silu', gate_up: str = 'gate_then_up', transposed: bool = False, apply_router_weight_on_input: bool = False, drop_ids_beyond: bool = False, device: Any = 'cpu', max_tokens: int = 512, num_threads: int | None = None, backend: str | None = None, progress: Callable[[int, int], object] | None = None, w13_scale: Any = None, w13_bias: Any = None, w2_scale: Any = None, w2_bias: Any = None, w13_global_scale: Any = None, w2_global_scale: Any = None, w13_channel_scale: Any = None, w2_channel_scale: Any = None, w13_zero: Any = None, w2_zero: Any = None, w13_min: Any = None, w2_min: Any = None, w13_input_scale: Any = None, w2_input_scale: Any = None, w13_perm: Any = None, w2_perm: Any = None) -> Explanation:
        """
        Raises what from_tensors would with these arguments, looking at sizes, formats, options, the device and the first expert's values, and packs nothing. Left for the packing: values of the other experts that the format does not have, memory.
        """

    @staticmethod
    def from_checkpoint(checkpoint: Checkpoint, layer: int, *, quant: str = 'as-is', device: Any = 'cpu', max_tokens: int = 512, num_threads: int | None = None, backend: str | None = None, progress: Callable[[int, int], object] | None = None, top_k: int | None = None) -> RoutedExperts:
        """
        The routed experts of one layer, without its gate, router and shared experts: their weighted sum, before the layer multiplies it (spec.routing.scale_on_output), of rows that are normalised where the layer does that (spec.input_norm_eps). top_k: of a caller who chooses another number of experts than the checkpoint does.
        """

    @staticmethod
    def from_loader(loader: WeightLoader, *, quant: str = 'as-is', device: Any = 'cpu', max_tokens: int = 512, num_threads: int | None = None, backend: str | None = None, drop_ids_beyond: bool = False) -> RoutedExperts:
        """
        The experts of the weights that a WeightLoader was given; takes them out of it. MissingTensor says what it still lacks, and leaves it as it is.
        """

    def __call__(self, hidden_states: Any, topk_ids: Any, topk_weights: Any, *, out: Any = None, stream: Any = None, numerics: bool = False, copy: bool = False) -> Any:
        """
        Output of the same kind, dtype and shape as hidden_states [..., H], F32, BF16 or F16, whose rows may be strided. numerics=True: as of a FusedMoE. topk_ids [..., k] I32, I64 or U32, -1: no expert; topk_weights [..., k] F32 (on a CPU BF16 or F16 too), final: they multiply the expert rows as they are. out: as hidden_states, F32, BF16 or F16, overlapping nothing. stream: of a call on a GPU, which without it is put on the framework's current one. copy: host tensors may go to a layer on a GPU and back. Raises InvalidShape, InvalidDType, InvalidLayout, InvalidArgument and Aliasing.
        """

    @property
    def spec(self) -> LayerSpec: ...

    @property
    def device(self) -> str: ...

    @property
    def quant(self) -> str:
        """Name of the scheme in force."""

    @property
    def bound(self) -> float:
        """
        Upper bound of the relative L2 error against float64 on the same stored weights, of an output in F32: one in BF16 or F16 is rounded once more (docs/accuracy.md).
        """

    @property
    def experts_backend(self) -> str:
        """Name of the kernels that run."""

    @property
    def determinism(self) -> str:
        """What the bits of a result depend on, in words."""

    @property
    def weight_bytes(self) -> int:
        """Of packed weights."""

    @property
    def workspace_bytes(self) -> int:
        """Held for calls of max_tokens rows."""

    def explain(self) -> list[Candidate]:
        """Every row of the catalogue, with the reason where it was refused."""

    def __repr__(self) -> str: ...

    def __reduce__(self) -> NoReturn: ...

class Router:
    """
    Router logits to weights and experts: router(logits) -> (topk_weights, topk_ids).
    """

    def __init__(self, *, num_experts: int, top_k: int, num_zero_experts: int = 0, method: str = 'topk', scoring: str = 'softmax', renormalize: bool = False, num_expert_group: int = 1, topk_group: int = 1, group_by_best_two: bool = False, routed_scaling_factor: float = 1.0, p_norm: float = 1.0, jitter_eps: float = 0.01, renorm_floor: float = 0.0, renorm_epsilon: float = 0.0, correction_bias: Any = None, expert_scale: Any = None, hash_table: Any = None, vision_bias: Any = None, vision_token_base: int = 0, num_fused_shared_experts: int = 0, shared_expert_weight: float = 1.0, num_threads: int | None = None, device: Any = 'cpu') -> None:
        """
        method: topk, grouped_topk, topk_softmax, llama4, sparse_mixer, p_norm, hash or zero_expert, whose num_zero_experts identity experts are the last columns; custom and simulated routing are the C++ library's. scoring: softmax, sigmoid or sqrtsoftplus. group_by_best_two: groups are ranked by the sum of their two best experts, as with a correction_bias. p_norm and jitter_eps: of the methods p_norm and sparse_mixer. renormalize divides by max(sum + renorm_epsilon, renorm_floor). correction_bias [E] F32: of scores, in the choice alone. expert_scale [E] F32: the last factor of a weight. hash_table [vocabulary, k] I32: experts of a token. vision_bias [E] F32: the five tokens from vision_token_base on choose by score + vision_bias instead of the table. All are copied. num_fused_shared_experts: experts behind the others that every row gets in its last slots, with shared_expert_weight.
        """

    @staticmethod
    def from_checkpoint(checkpoint: Checkpoint, layer: int, *, num_threads: int | None = None, device: Any = 'cpu') -> Router: ...

    def __call__(self, router_logits: Any, *, hidden_states: Any = None, input_ids: Any = None, padding_mask: Any = None, stream: Any = None) -> tuple[Any, ...]:
        """
        Weights [M, k] F32 and ids [M, k] I32, slots in descending order of score, of logits [..., E] F32, BF16 or F16, whose rows are M. hidden_states [..., H]: of a router with identity experts, whose share of the output [M, H] F32 is then the third. input_ids [...]: needed by hash, not read by others. padding_mask [...] Bool or U8: True is a row with ids -1 and weights 0.
        """

    @property
    def name(self) -> str: ...

    @property
    def routing(self) -> Routing: ...

class GateLinear:
    """Hidden states to router logits, accumulated in fp32."""

    def __init__(self, weight: Any, bias: Any = None, *, logits_dtype: str = 'F32', force_fp32_compute: bool = True, num_threads: int | None = None, device: Any = 'cpu') -> None:
        """
        weight [E, H] and bias [E], F32, BF16 or F16, are copied. logits_dtype: "F32", "BF16" or "F16". force_fp32_compute: False rounds the sums to the weight's dtype first.
        """

    @staticmethod
    def from_checkpoint(checkpoint: Checkpoint, layer: int, *, num_threads: int | None = None, device: Any = 'cpu') -> GateLinear: ...

    def __call__(self, hidden_states: Any, *, stream: Any = None) -> Any:
        """
        Logits [M, E] of logits_dtype, of hidden states [..., H] F32, BF16 or F16.
        """

    @property
    def num_experts(self) -> int: ...

    @property
    def hidden_size(self) -> int: ...

def environment() -> dict[str, Any]: ...

def note_openmp_threads() -> None:
    """
    Called before a fork where other code of this process may have made OpenMP's threads.
    """

def quant_schemes() -> list[str]:
    """Names of all schemes, those that only files have last."""

def apply_activation(activation: str | Activation, x: Any, *, gate_up: str = 'gate_then_up', out: Any = None) -> Any:
    """
    The activation of rows [rows, 2d] (gated, gate_up says how they lie) or [rows, d], F32, BF16 or F16, contiguous, in fp32, rounded once to out [rows, d].
    """

def run_tool(argv: Sequence[str]) -> int:
    """The command-line tool; returns its exit code."""

def raise_status(code: str, text: str) -> None:
    """For tests: raises as the library would."""
