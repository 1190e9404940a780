"""The plugin for vLLM: its routed experts run on Moesaic, where that is asked for.

vLLM finds `register` by its entry point (group `vllm.general_plugins`) and calls it in every
process. The plugin is off until somebody asks for it:

    vllm serve MODEL --additional-config '{"moesaic": true}'
    MOESAIC_VLLM=1 vllm serve MODEL

Instead of `true` a table of options may stand there: `{"moesaic": {"quant": "int4-g128"}}`; see
`Options`. For each MoE layer vLLM asks a list of its kernels in turn; the plugin puts Moesaic first
if the library takes the layer, and otherwise changes nothing: vLLM then chooses as it would without
us. A kernel that the user named himself (`--moe-backend`) stays.

The experts are packed once and vLLM's own copy of their weights is released, so weights can't be
updated while an engine runs, and neither sleep mode nor expert load balancing (EPLB) is possible.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import inspect
import logging
import os
import threading
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import moesaic

from ._errors import Error, InvalidArgument, Unsupported
from ._released import check_not_released, release

__all__ = ["Options", "register", "supported_versions"]

_log = logging.getLogger(__name__)

_ORACLES = "vllm.model_executor.layers.fused_moe.oracle"


@dataclasses.dataclass(frozen=True)
class _Oracle:
    """Where vLLM chooses a kernel for one kind of weights.

    `identity` names the backend whose conversion of weights leaves them as they were loaded, on
    GPUs and
    on CPUs: a class that vLLM believes to belong to it gets the weights that Moesaic expects.
    """

    module: str
    backends: str  # the enumeration
    identity: str
    identity_on_cpu: str


_UNQUANTIZED = _Oracle("unquantized", "UnquantizedMoeBackend", "TRITON", "CPU")
_FP8 = _Oracle("fp8", "Fp8MoeBackend", "TRITON", "TRITON")
_INT8 = _Oracle("int8", "Int8MoeBackend", "TRITON", "TRITON")

# vLLM's minor version -> what is hooked there. Only versions whose files were read.
_VERSIONS: dict[tuple[int, int], tuple[_Oracle, ...]] = {
    (0, 29): (_UNQUANTIZED, _FP8, _INT8),
    (0, 30): (_UNQUANTIZED, _FP8, _INT8),
    (0, 31): (_UNQUANTIZED, _FP8, _INT8),
    (0, 32): (_UNQUANTIZED, _FP8, _INT8),
    (0, 33): (_UNQUANTIZED, _FP8, _INT8),
}

# Names of vLLM's keys for weights and activations -> how the weights are stored, what is computed.
# Activations that vLLM scales by one value for a whole batch are not here: an output would depend
# on its neighbours in the batch, and Moesaic has no such scheme.
_SCHEMES: dict[tuple[str | None, str | None], tuple[str | None, str]] = {
    (None, None): (None, "as-is"),
    ("kFp8Static128BlockSym", "kFp8Dynamic128Sym"): ("fp8-block", "as-is"),
    ("kFp8Static128BlockSym", None): ("fp8-block", "fp8-bf16"),
    ("kFp8StaticChannelSym", "kFp8DynamicTokenSym"): ("fp8-channel", "as-is"),
    ("kFp8StaticChannelSym", None): ("fp8-channel", "fp8-bf16"),
    ("kInt8StaticChannelSym", "kInt8DynamicTokenSym"): ("int8", "as-is"),
}

# What a process has, and what its layers say when they are refused: once each.
_warned: set[str] = set()
_registered = False


class _Armed(threading.local):
    """What the list of backends announced to the look-up of its first entry, for one choice."""

    choice: tuple[object, type[Any]] | None = None


_armed = _Armed()


@dataclasses.dataclass(frozen=True)
class Options:
    """What a user may say under "moesaic" in vLLM's additional configuration.

    quant: "as-is" computes what the checkpoint states; another name of `moesaic.quant_schemes()`
        packs the experts into that scheme while loading.
    num_threads: threads of a layer on a CPU; unset: as many as torch uses.
    max_tokens: rows that a workspace allows in one piece; longer batches are split.
    """

    quant: str = "as-is"
    num_threads: int | None = None
    max_tokens: int = 512

    @classmethod
    def parse(cls, value: object) -> Options | None:
        """What `value` asks for, None for off. Raises `moesaic.InvalidArgument`.

        true, 1 or "on" and false, 0 or "off", as values or as text in any case; nothing (None, an empty text)
        is off. A table is on, an empty one with the defaults.
        """
        if isinstance(value, Mapping):
            return cls._of_table(value)
        word = "" if value is None else str(value).strip().lower()
        if word in ("1", "true", "on"):
            return cls()
        if word in ("", "0", "false", "off"):
            return None
        raise InvalidArgument(f"moesaic: got {value!r}, need true or 1 or on, false or 0 or off, or a table of options")

    @classmethod
    def _of_table(cls, table: Mapping[Any, Any]) -> Options:
        fields = {field.name for field in dataclasses.fields(cls)}
        for name in table:
            if name not in fields:
                raise InvalidArgument(f"moesaic: got option {name!r}, need one of {sorted(fields)}")
        made = cls(**table)
        if made.quant != "as-is" and made.quant not in moesaic.quant_schemes():
            raise InvalidArgument(f"moesaic: got quant {made.quant!r}, need as-is or one of {moesaic.quant_schemes()}")
        for name, unset in (("num_threads", True), ("max_tokens", False)):
            number = getattr(made, name)
            if unset and number is None:
                continue
            if not isinstance(number, int) or isinstance(number, bool) or number < 1:
                raise InvalidArgument(f"moesaic: got {name} {number!r}, need a whole number from 1 on")
        return made


def supported_versions() -> str:
    """The versions of vLLM that the plugin knows, as text."""
    first, last = min(_VERSIONS), max(_VERSIONS)
    return f"{first[0]}.{first[1]} to {last[0]}.{last[1]}"


def _warn_once(text: str) -> None:
    if text not in _warned:
        _warned.add(text)
        _log.warning("%s", text)


def _current_config() -> Any:
    """vLLM's configuration of the engine that is being built, None outside."""
    config = importlib.import_module("vllm.config")
    # get_current_vllm_config() makes a default one, or raises, where none is set.
    getter = getattr(config, "get_current_vllm_config_or_none", None) or config.get_current_vllm_config
    try:
        return getter()
    except (AssertionError, RuntimeError, LookupError):
        return None


def _options() -> Options | None:
    """What the user asked for: None if nothing."""
    config = _current_config()
    table = getattr(config, "additional_config", None)
    if isinstance(table, Mapping) and "moesaic" in table:
        return Options.parse(table["moesaic"])
    return Options.parse(os.environ.get("MOESAIC_VLLM"))


def _key_name(key: object) -> str | None:
    """The name of one of vLLM's quantisation keys in `_SCHEMES`; "?" for any other."""
    if key is None:
        return None
    utils = importlib.import_module("vllm.model_executor.layers.quantization.utils.quant_utils")
    for pair in _SCHEMES:
        for name in pair:
            if name is not None and getattr(utils, name, None) == key:
                return name
    return "?"


def _activation(kind: str, limit: float | None, alpha: float | None, beta: float | None, moe: Any) -> Any:
    """vLLM's activation `kind` (the value of its enumeration) as ours. Raises `moesaic.Error`."""
    if kind == "swigluoai":  # fixes its constants
        return moesaic.Activation(kind)
    if kind == "swigluoai_uninterleave":
        return moesaic.Activation(kind, limit=limit, alpha=alpha, beta=beta)
    if kind == "situ":
        situ_beta = getattr(moe, "activation_situ_beta", None)
        return moesaic.Activation(kind, beta=situ_beta, up_limit=getattr(moe, "activation_situ_linear_beta", None))
    if kind == "swiglustep":
        return moesaic.Activation(kind)
    if kind == "silu":
        if (alpha not in (None, 1.0)) or (beta not in (None, 0.0)):
            raise Unsupported(f"activation: got silu with alpha {alpha} and beta {beta}, need 1 and 0")
        return moesaic.Activation(kind, limit=limit)
    if limit is not None:
        raise Unsupported(f"activation: got {kind} with limit {limit}, need none")
    if kind == "relu2":  # gated in vLLM; ours of that name is not
        raise Unsupported("activation: got gated relu2, need relu2_no_mul")
    return moesaic.Activation(kind)


def _sides(kind: str) -> str:
    """How gate and up lie in w13 for an activation of vLLM's."""
    if kind.endswith("_no_mul"):
        return "none"
    return "interleaved" if kind == "swigluoai" else "gate_then_up"


def _device_of(moe_config: Any) -> str:
    device = str(getattr(moe_config, "device", "cpu"))
    if device == "cuda":
        torch = importlib.import_module("torch")
        return f"cuda:{torch.cuda.current_device()}"
    return device


def _refusal(moe_config: Any, stored: str | None, quant: str) -> str | None:
    """Why Moesaic does not take a layer of these sizes, None if it does."""
    for name in ("hidden_dim", "intermediate_size_per_partition"):
        plain = getattr(moe_config, f"{name}_unpadded", None)
        if plain is not None and plain != getattr(moe_config, name):
            return f"{name}: got {getattr(moe_config, name)} padded from {plain}, need no padding"
    dtype = str(getattr(moe_config, "in_dtype", "torch.bfloat16")).removeprefix("torch.")
    plain_names = {"bfloat16": "bf16", "float16": "f16", "float32": "f32"}
    if dtype not in plain_names:
        return f"in_dtype: got {dtype}, need one of {sorted(plain_names)}"
    limit, alpha, beta = (getattr(moe_config, f"swiglu_{n}", None) for n in ("limit", "alpha", "beta"))
    kind = moe_config.activation.value
    if kind == "swigluoai_uninterleave" and limit is None:
        limit = 7.0  # a layer's own, which is not known before its weights are
    experts, top_k = moe_config.num_local_experts, moe_config.experts_per_token
    if top_k > experts:  # expert parallelism with many ranks
        return f"experts: got {experts} on this rank for {top_k} of a token, need at least as many"
    try:
        spec = moesaic.LayerSpec(
            hidden_size=moe_config.hidden_dim,
            intermediate_size=moe_config.intermediate_size_per_partition,
            num_experts=experts,
            top_k=top_k,
            activation=_activation(kind, limit, alpha, beta, moe_config),
            quant=stored or plain_names[dtype],
            has_expert_bias=bool(getattr(moe_config, "has_bias", False)),
        )
        report = moesaic.explain(spec, quant=quant, device=_device_of(moe_config))
    except Error as error:
        return str(error)
    rows = [row for row in report.candidates if row.stage == "experts"]
    if any(row.accepted for row in rows):
        return None
    return "; ".join(f"{row.name}: {row.reason}" for row in rows) or "no backend"


def _make_class(stored: str | None, quant: str, options: Options) -> type[Any]:
    """The class that vLLM makes one object of for each layer.

    stored: scheme of the weights as vLLM holds them (None: by their dtype). quant: what to compute.
    """
    torch: Any = importlib.import_module("torch")
    mk: Any = importlib.import_module("vllm.model_executor.layers.fused_moe.modular_kernel")
    reduce: Any = importlib.import_module("vllm.model_executor.layers.fused_moe.topk_weight_and_reduce")
    platform: Any = importlib.import_module("vllm.platforms").current_platform
    operator: Any = importlib.import_module("moesaic.torch")
    base: Any = mk.FusedMoEExpertsModular

    class MoesaicExperts(base):  # type: ignore[misc]
        """Routed experts by Moesaic: hidden states as they are in, weighted sums out."""

        def __init__(self, moe_config: Any, quant_config: Any, **rest: Any) -> None:
            super().__init__(moe_config, quant_config, **rest)
            self._moesaic: Any = None
            self._handle: Any = None  # how the operator finds it; see moesaic.torch

        @staticmethod
        def activation_format() -> Any:
            return mk.FusedMoEActivationFormat.Standard

        @property
        def expects_unquantized_inputs(self) -> bool:
            return True  # activations are quantised inside, as the scheme says

        @staticmethod
        def _supports_current_device() -> bool:
            if platform.is_cpu():
                return True
            return bool(platform.is_cuda() and moesaic.env()["cuda"]["available"])

        @staticmethod
        def _supports_no_act_and_mul() -> bool:
            return True

        @staticmethod
        def _supports_quant_scheme(weight_key: Any, activation_key: Any) -> bool:
            return _SCHEMES.get((_key_name(weight_key), _key_name(activation_key)), ("", ""))[0] == stored

        @staticmethod
        def _supports_activation(activation: Any) -> bool:
            return bool(activation.value != "relu2")  # the rest is asked with its constants

        @staticmethod
        def _supports_parallel_config(moe_parallel_config: Any) -> bool:
            # Load balancing moves vLLM's weights, of which ours are a packed copy.
            return not moe_parallel_config.use_all2all_kernels and not moe_parallel_config.enable_eplb

        @staticmethod
        def _supports_batch_invariance() -> bool:
            return True

        @staticmethod
        def is_supported_config(cls: Any, moe_config: Any, weight_key: Any, activation_key: Any, form: Any) -> Any:
            taken, reason = base.is_supported_config(cls, moe_config, weight_key, activation_key, form)
            if not taken:
                return taken, reason
            why = _refusal(moe_config, stored, quant)
            return why is None, why

        @staticmethod
        def supports_expert_map() -> bool:
            return True

        def supports_chunking(self) -> bool:
            return False

        def workspace_shapes(
            self,
            M: int,
            N: int,
            K: int,
            topk: int,
            global_num_experts: int,
            local_num_experts: int,
            expert_tokens_meta: Any,
            activation: Any,
        ) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
            return (0,), (0,), (M, K)

        def finalize_weight_and_reduce_impl(self) -> Any:
            return reduce.TopKWeightAndReduceNoOP()

        def process_weights_after_loading(self, layer: Any) -> None:
            super().process_weights_after_loading(layer)
            self._pack(layer.w13_weight, layer.w2_weight, layer.activation)

        def _pack(self, w13: Any, w2: Any, activation: Any) -> None:
            """Packs the experts and releases vLLM's storage of them; shapes stay."""
            if self._moesaic is not None:
                raise Unsupported("the experts are packed already; their weights cannot be updated")
            for name, weight in (("w13_weight", w13), ("w2_weight", w2)):
                check_not_released(name, weight)
            on_gpu = w13.device.type == "cuda"
            if on_gpu and torch.cuda.is_current_stream_capturing():
                raise Unsupported("the first call of an experts layer cannot be captured: run it once before")
            q = self.quant_config
            moe = self.moe_config
            constants: dict[str, float | None] = {}
            for name in ("limit", "alpha", "beta"):
                value = getattr(q, f"gemm1_{'clamp_limit' if name == 'limit' else name}", None)
                constants[name] = getattr(moe, f"swiglu_{name}", None) if value is None else value
            fields: dict[str, Any] = {"w13_bias": q.w1_bias, "w2_bias": q.w2_bias}
            if stored is not None:
                fields |= {
                    "w13_scale": _scale(self.w1_scale, stored),
                    "w2_scale": _scale(self.w2_scale, stored),
                }
            self._moesaic = moesaic.RoutedExperts.from_tensors(
                w13.data,
                w2.data,
                top_k=moe.experts_per_token,
                **{name: value for name, value in fields.items() if value is not None},
                quant=quant,
                stored=stored,
                activation=_activation(activation.value, **constants, moe=moe),
                gate_up=_sides(activation.value),
                device=str(w13.device),
                max_tokens=options.max_tokens,
                num_threads=options.num_threads,
            )
            number = operator.keep(self._moesaic, literal=on_gpu)
            weakref.finalize(self, operator.drop, number)
            self._handle = number if on_gpu else torch.tensor(number, dtype=torch.int64, device="cpu")
            release(w13, w2)
            if on_gpu:
                torch.cuda.empty_cache()
            _log.info("experts packed: %r", self._moesaic)

        def apply(
            self,
            output: Any,
            hidden_states: Any,
            w1: Any,
            w2: Any,
            topk_weights: Any,
            topk_ids: Any,
            activation: Any,
            global_num_experts: int,
            expert_map: Any,
            a1q_scale: Any,
            a2_scale: Any,
            workspace13: Any,
            workspace2: Any,
            expert_tokens_meta: Any,
            apply_router_weight_on_input: bool,
        ) -> None:
            # On CPUs vLLM compiles a whole model, this method with it, and takes no break in the graph.
            compiling = torch.compiler.is_compiling()
            if self._handle is None:
                if compiling:
                    raise Unsupported(
                        "the first call of an experts layer cannot be compiled: its weights are not packed"
                    )
                self._pack(w1, w2, activation)
            ids = topk_ids if topk_ids.dtype in (torch.int32, torch.int64) else topk_ids.to(torch.int32)
            if expert_map is not None:  # global id -> local one, -1: another rank's
                known = ids >= 0
                ids = torch.where(known, expert_map[ids.clamp(min=0).long()], -1).to(torch.int32)
            if apply_router_weight_on_input:  # vLLM has multiplied the input by them
                topk_weights = torch.ones_like(topk_weights)
            if compiling:
                output.copy_(operator.experts(hidden_states, ids, topk_weights, self._handle))
            else:
                self._moesaic(hidden_states, ids, topk_weights, out=output)

    return MoesaicExperts


def _scale(scale: Any, stored: str) -> Any:
    """vLLM's scales in the shape of ours: [E, N, 1] of channels is [E, N]."""
    if stored in ("fp8-channel", "int8") and scale is not None and scale.dim() == 3:
        return scale.squeeze(-1)
    return scale


_classes: dict[tuple[str | None, str, Options], type[Any]] = {}


def _class_for(stored: str | None, quant: str, options: Options) -> type[Any]:
    key = (stored, quant, options)
    if key not in _classes:
        _classes[key] = _make_class(*key)
    return _classes[key]


def _candidate(moe_config: Any, weight_key: Any, activation_key: Any) -> type[Any] | None:
    """Our class for a layer, None if nobody asked or the library does not take it."""
    options = _options()
    if options is None or getattr(moe_config, "moe_backend", "auto") != "auto":
        return None
    config = _current_config()
    if getattr(getattr(config, "model_config", None), "enable_sleep_mode", False):
        _warn_once("moesaic: sleep mode moves weights, which are packed elsewhere; vLLM's own kernels are used")
        return None
    scheme = _SCHEMES.get((_key_name(weight_key), _key_name(activation_key)))
    if scheme is None:
        _warn_once(f"moesaic: no scheme for {weight_key} x {activation_key}; vLLM's own kernels are used")
        return None
    stored, quant = scheme
    cls = _class_for(stored, quant if options.quant == "as-is" else options.quant, options)
    mk: Any = importlib.import_module("vllm.model_executor.layers.fused_moe.modular_kernel")
    parallel = moe_config.moe_parallel_config
    form = mk.FusedMoEActivationFormat
    batched = getattr(parallel, "use_batched_activation_format", False)
    taken, reason = cls.is_supported_config(
        cls,
        moe_config,
        weight_key,
        activation_key,
        form.BatchedExperts if batched else form.Standard,
    )
    if not taken:
        _warn_once(f"moesaic: {reason}; vLLM's own kernels are used")
        return None
    return cls


# Methods that make a kernel after loading and, unlike vLLM's other methods, don't let it prepare its weights.
_SILENT_METHODS = ("Fp8MoEMethod", "CompressedTensorsW8A8Fp8MoEMethod")


def _prepare_after_loading() -> None:
    """Lets these methods end with the packing of their kernel where it is ours.

    Otherwise the first call packs, which cannot be compiled, as vLLM compiles whole models on CPUs. Called while
    a method chooses its kernel: its class is there by then. Idempotent.
    """
    try:
        base: Any = importlib.import_module("vllm.model_executor.layers.fused_moe.fused_moe_method_base")
        classes = [base.FusedMoEMethodBase]
    except (ImportError, AttributeError):
        return  # the first call packs
    for cls in classes:
        classes += cls.__subclasses__()
        method = vars(cls).get("process_weights_after_loading")
        if cls.__name__ in _SILENT_METHODS and method is not None and not hasattr(method, "_moesaic"):
            cls.process_weights_after_loading = _followed_by_packing(method)


def _followed_by_packing(method: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
    @functools.wraps(method)
    def process_weights_after_loading(self: Any, layer: Any) -> None:
        method(self, layer)
        experts: Any = getattr(getattr(self, "moe_kernel", None), "fused_experts", None)
        if type(experts) in _classes.values() and experts._moesaic is None:
            experts.process_weights_after_loading(layer)

    process_weights_after_loading._moesaic = True  # type: ignore[attr-defined]
    return process_weights_after_loading


def _hook(oracle: _Oracle) -> Callable[[], None]:
    """Checks one oracle and returns what hooks it.

    Raises `moesaic.Unsupported` if its functions take other arguments than in the known versions.
    """
    module: Any = importlib.import_module(f"{_ORACLES}.{oracle.module}")
    priority, classes = module._get_priority_backends, module.backend_to_kernel_cls
    if getattr(priority, "_moesaic", False):
        return lambda: None
    parameters = list(inspect.signature(priority).parameters)
    if parameters[:1] != ["moe_config"] or not set(parameters) <= {
        "moe_config",
        "weight_key",
        "activation_key",
    }:
        raise Unsupported(f"{module.__name__}._get_priority_backends takes {parameters}")
    if list(inspect.signature(classes).parameters) != ["backend"]:
        raise Unsupported(f"{module.__name__}.backend_to_kernel_cls takes another argument than backend")
    platform: Any = importlib.import_module("vllm.platforms").current_platform
    name = oracle.identity_on_cpu if platform.is_cpu() else oracle.identity
    identity = getattr(module, oracle.backends)[name]
    # int8's list does not say which keys it is asked for: there is one pair.
    keys = ("kInt8StaticChannelSym", "kInt8DynamicTokenSym") if oracle is _INT8 else (None, None)
    utils: Any = importlib.import_module("vllm.model_executor.layers.quantization.utils.quant_utils")
    defaults = tuple(getattr(utils, key) if key else None for key in keys)

    def priority_backends(moe_config: Any, *arguments: Any, **named: Any) -> Any:
        backends = priority(moe_config, *arguments, **named)
        _armed.choice = None
        asked = dict(zip(("weight_key", "activation_key"), arguments, strict=False)) | named
        cls = _candidate(
            moe_config,
            asked.get("weight_key", defaults[0]),
            asked.get("activation_key", defaults[1]),
        )
        if cls is None:
            return backends
        _armed.choice = (identity, cls)
        return [identity, *(b for b in backends if b is not identity)]

    def kernel_classes(backend: Any) -> Any:
        theirs = classes(backend)
        choice, _armed.choice = _armed.choice, None
        if choice is None or choice[0] is not backend:
            return theirs
        _prepare_after_loading()
        return [choice[1], *theirs]

    priority_backends._moesaic = kernel_classes._moesaic = True  # type: ignore[attr-defined]

    def install() -> None:
        module._get_priority_backends = priority_backends
        module.backend_to_kernel_cls = kernel_classes

    return install


def register() -> None:
    """vLLM's entry point: hooks the choice of kernels. Idempotent, and never raises.

    Where vLLM's version is not one of `supported_versions`, or a function there is not what it was,
    it warns once and vLLM stays as it is.
    """
    global _registered
    if _registered:
        return
    _registered = True
    try:
        version = str(importlib.import_module("vllm").__version__)
        numbers = tuple(int("".join(c for c in part if c.isdigit()) or 0) for part in version.split(".")[:2])
        oracles = _VERSIONS.get((numbers[0], numbers[1]) if len(numbers) == 2 else (0, 0))
        if oracles is None:
            raise Unsupported(f"got vLLM {version}, need {supported_versions()}")
        for install in [_hook(oracle) for oracle in oracles]:
            install()
    except (ImportError, AttributeError, KeyError, Unsupported) as error:
        with contextlib.suppress(Exception):
            _warn_once(f"moesaic: the plugin for vLLM does nothing: {error}")
