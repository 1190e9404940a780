"""The plugin for SGLang: routed experts by Moesaic as a runner of its own name.

    python -m sglang.launch_server --model-path MODEL --moe-runner-backend moesaic

SGLang finds `register` by its entry point (group `sglang.srt.plugins`) and calls it in every
process. It adds the name "moesaic" to the runners that may be asked for, registers the runner with
SGLang's own `register_moe_runner_core`, and lets the two methods that hold experts as checkpoints
store them (plain and FP8) make that runner where the name was asked for. Without the name nothing
changes.

Plain experts and FP8 in 128x128 blocks, on GPUs: on a CPU SGLang's methods don't ask a
runner. A layer that Moesaic does not take ends the start of the server with the reason: the name
was asked for. That is when the layer is made for its sizes, activation and method of quantisation
(of which all but these two have a runner of their own), and in the first call, which packs the
weights and which a server makes before it is ready, for the rest.
"""

from __future__ import annotations

import dataclasses
import importlib
import logging
from typing import Any

import moesaic

from ._errors import Unsupported
from ._released import check_not_released, release

__all__ = ["NAME", "register"]

NAME = "moesaic"

_log = logging.getLogger(__name__)

_registered = False

_RUNNER = "sglang.srt.layers.moe.moe_runner"
# Classes whose create_moe_runner is followed by ours.
_METHODS = (
    "sglang.srt.layers.quantization.unquant.UnquantizedFusedMoEMethod",
    "sglang.srt.layers.quantization.fp8.Fp8MoEMethod",
)
# The layer, of which one that chose another runner is refused: many methods don't ask which one is wanted.
_LAYER = "sglang.srt.layers.moe.fused_moe_triton.layer.FusedMoE"


def _activation(config: Any, fused_interleaved: bool) -> tuple[Any, str]:
    """Our activation and the arrangement of w13 for a configuration of SGLang's runner.

    SGLang says "silu" for several formulas and tells them apart by which constant is set. Raises
    `moesaic.Unsupported` for one that is not ours: with gemm1_clamp_limit alone, for instance, it
    clamps after the silu.
    """
    name, limit, alpha = config.activation, config.gemm1_clamp_limit, config.gemm1_alpha
    if not config.is_gated:
        if limit is not None or alpha is not None or config.swiglu_limit is not None:
            raise Unsupported(f"activation: got {name} without a gate and with constants, need none")
        return moesaic.Activation(f"{name}_no_mul"), "none"
    sides = "interleaved" if fused_interleaved else "gate_then_up"
    if name == "silu" and alpha is not None:
        if limit is None or config.gemm1_beta not in (None, 1.0):
            raise Unsupported(
                f"activation: got gemm1_alpha {alpha}, limit {limit}, beta {config.gemm1_beta}; need a limit and beta 1"
            )
        oai = moesaic.Activation("swigluoai_uninterleave", limit=limit, alpha=alpha, beta=1.0)
        return oai, "interleaved" if config.gate_up_interleaved else sides
    if name == "silu" and limit is None:
        return moesaic.Activation("silu", limit=config.swiglu_limit), sides
    if name in ("gelu", "gelu_tanh") and limit is None and alpha is None and config.swiglu_limit is None:
        return moesaic.Activation(name), sides
    raise Unsupported(
        f"activation: got {name} with gemm1_alpha {alpha}, gemm1_clamp_limit {limit}, swiglu_limit "
        f"{config.swiglu_limit}; need silu, gelu, gelu_tanh or the formula of gpt-oss"
    )


def _stored(quant_info: Any) -> str | None:
    """Name of the scheme that SGLang's description of weights means; None: plain, by its dtype."""
    for name in ("use_mxfp8", "use_int8_w8a8", "use_int8_w8a16", "use_int4_w4a16"):
        if getattr(quant_info, name):
            raise Unsupported(f"weights: got {name}, need plain or use_fp8_w8a8")
    if not quant_info.use_fp8_w8a8:
        return None
    if quant_info.a13_scale is not None or quant_info.a2_scale is not None:
        raise Unsupported("activations: got static scales, need scales made while running")
    if quant_info.block_shape is not None:
        if list(quant_info.block_shape) != [128, 128]:
            raise Unsupported(f"block_shape: got {quant_info.block_shape}, need [128, 128]")
        return "fp8-block"
    if quant_info.per_channel_quant:
        return "fp8-channel"
    raise Unsupported("activations: got one scale for a whole batch, need scales per row or group")


class Experts:
    """One layer: packs SGLang's weights at the first call and releases their storage."""

    def __init__(self, config: Any) -> None:
        for name in ("no_combine", "apply_router_weight_on_input"):
            if getattr(config, name):
                raise Unsupported(f"{name}: got True, need False")
        experts = getattr(config, "num_local_experts", None)
        if experts is not None and config.top_k is not None and config.top_k > experts:
            raise Unsupported(
                f"experts: got {experts} on this rank for {config.top_k} of a token, need at least as many"
            )
        _activation(config, False)  # what it can't compute is refused before weights are loaded
        self._config = config
        self._layer: Any = None

    def _pack(self, quant_info: Any) -> None:
        torch: Any = importlib.import_module("torch")
        w13, w2 = quant_info.w13_weight, quant_info.w2_weight
        for name, weight in (("w13_weight", w13), ("w2_weight", w2)):
            check_not_released(name, weight)
        on_gpu = w13.device.type == "cuda"
        if on_gpu and torch.cuda.is_current_stream_capturing():
            raise Unsupported("the first call of an experts layer cannot be captured: run it once before")
        stored = _stored(quant_info)
        activation, sides = _activation(self._config, quant_info.fuse_swiglu_interleaved)
        fields = {"w13_bias": quant_info.b13, "w2_bias": quant_info.b2}
        if stored is not None:
            fields |= {"w13_scale": quant_info.w13_scale, "w2_scale": quant_info.w2_scale}
        for name, value in fields.items():
            if stored == "fp8-channel" and name.endswith("scale") and value.dim() == 3:
                fields[name] = value.squeeze(-1)  # [E, N, 1]
        self._layer = moesaic.RoutedExperts.from_tensors(
            w13.data,
            w2.data,
            top_k=self._config.top_k,
            **{name: value for name, value in fields.items() if value is not None},
            stored=stored,
            activation=activation,
            gate_up=sides,
            device=str(w13.device),
        )
        release(w13, w2)
        if on_gpu:
            torch.cuda.empty_cache()
        _log.info("experts packed: %r", self._layer)

    def __call__(self, hidden_states: Any, topk_ids: Any, topk_weights: Any, quant_info: Any) -> Any:
        """Weighted sums [M, H] of a batch; ids are local, -1 is another rank's expert."""
        if self._layer is None:
            self._pack(quant_info)
        output = self._layer(hidden_states, topk_ids, topk_weights)
        factor = self._config.routed_scaling_factor
        return output if factor in (None, 1.0) else output.mul_(factor)


def _make_core(base: type[Any], backend: Any, combine_input: Any) -> type[Any]:
    """The runner core, a subclass of SGLang's `DispatchMoeRunnerCore`."""

    class MoesaicRunnerCore(base):  # type: ignore[misc]
        """Takes what the dispatcher gives, whole."""

        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self._experts = Experts(config)

        @property
        def runner_backend(self) -> Any:
            return backend

        def run_from_dispatch(
            self, dispatch_output: Any, quant_info: Any, runner_config: Any, hooks: Any = None
        ) -> Any:
            if hooks is not None:
                raise Unsupported("hooks: got LoRA, need none")
            if not dispatch_output.format.is_standard():
                raise Unsupported(f"dispatch: got {dispatch_output.format}, need the standard format")
            if dispatch_output.hidden_states_scale is not None:
                raise Unsupported("hidden_states: got rows that are quantised already, need plain ones")
            topk = dispatch_output.topk_output
            hidden = dispatch_output.hidden_states
            return combine_input(hidden_states=self._experts(hidden, topk.topk_ids, topk.topk_weights, quant_info))

    return MoesaicRunnerCore


def _make_backend(utils: Any) -> Any:
    """Our runner's name, which says that weights are as Triton has them."""

    @dataclasses.dataclass(frozen=True)
    class Backend(utils.RegisteredMoeRunnerBackend):  # type: ignore[misc]
        def is_triton(self) -> bool:
            return True

    return Backend(NAME)


def register() -> None:
    """SGLang's entry point, idempotent. Where SGLang lacks what it needs it warns, no more."""
    global _registered
    if _registered:
        return
    _registered = True
    try:
        runner: Any = importlib.import_module(_RUNNER)
        base: Any = importlib.import_module(f"{_RUNNER}.base")
        utils: Any = importlib.import_module("sglang.srt.layers.moe.utils")
        standard: Any = importlib.import_module("sglang.srt.layers.moe.token_dispatcher.standard")
        hooks: Any = importlib.import_module("sglang.srt.plugins.hook_registry")
        choices: Any = importlib.import_module("sglang.srt.arg_groups.choices")
        add_choices = choices.add_moe_runner_backend_choices
        plain_backend = utils.RegisteredMoeRunnerBackend(NAME)
        core = _make_core(base.DispatchMoeRunnerCore, plain_backend, standard.StandardCombineInput)
        triton_like = _make_backend(utils)
        after, register_hook = hooks.HookType.AFTER, hooks.HookRegistry.register
        runner.register_moe_runner_core(NAME, core)
    except (ImportError, AttributeError) as error:
        _log.warning("moesaic: the plugin for SGLang does nothing: %s", error)
        return
    add_choices([NAME])

    def use_ours(result: Any, method: Any, layer: Any, moe_runner_config: Any) -> Any:
        if utils.get_moe_runner_backend().value != NAME:
            return result
        fp8 = type(method).__name__ == "Fp8MoEMethod"
        theirs: Any = getattr(method, "runner", None)
        if not fp8 and not theirs.runner_backend.is_triton():
            raise Unsupported(f"weights: got the layout of {theirs.runner_backend}, need the one of triton")
        # FP8's method asks is_triton() for which description of its weights to hand over; the plain
        # method rearranges weights for one that says yes.
        method.runner = runner.MoeRunner(triton_like if fp8 else plain_backend, moe_runner_config)
        if fp8:
            method._owns_moe_runner = True
        return result

    def check_used(result: Any, layer: Any, *_: Any, **__: Any) -> Any:
        used = layer.runner_backend
        if utils.get_moe_runner_backend().value != NAME or getattr(used, "value", None) == NAME:
            return result
        raise Unsupported(
            f"quantization: got {type(layer.quant_method).__name__}, which computes experts by "
            f"{getattr(used, 'value', 'kernels of its own')} whatever runner is asked for; need plain or FP8 experts"
        )

    for target in _METHODS:
        register_hook(f"{target}.create_moe_runner", use_ours, after)
    register_hook(f"{_LAYER}.__init__", check_used, after)
