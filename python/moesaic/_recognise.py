"""What an experts module of transformers computes, found out from the module itself.

Layout comes from the flags that transformers' decorator sets; the activation from evaluating it: a class
name says nothing about clamps and constants.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any

import torch

from ._core import Activation, apply_activation
from ._errors import AmbiguousFormat, Error, InvalidArgument, Unsupported

__all__ = ["Described", "activation_of", "describe", "is_experts"]


@dataclasses.dataclass
class Described:
    """An experts module as the arguments of moesaic.RoutedExperts.from_tensors."""

    tensors: dict[str, torch.Tensor]
    activation: Activation
    gate_up: str
    transposed: bool
    stored: str | None
    top_k: int
    num_experts: int

    @property
    def nbytes(self) -> int:
        """Bytes of the module's parameters."""
        return sum(t.numel() * t.element_size() for t in self.tensors.values())


def is_experts(module: torch.nn.Module) -> bool:
    """Whether transformers' decorator for experts made this module's class."""
    return hasattr(module, "_apply_gate") and hasattr(module, "is_transposed") and hasattr(module, "has_bias")


def _constants(module: Any, *words: str) -> list[float]:
    """Numbers that the module and its configuration call by one of these words, largest set first."""
    found: list[float] = []
    for source in (
        vars(module),
        vars(getattr(module, "config", None) or object) if getattr(module, "config", None) else {},
    ):
        for name, value in source.items():
            usable = isinstance(value, (int, float)) and not isinstance(value, bool) and value > 0
            if usable and any(w in name for w in words) and float(value) not in found:
                found.append(float(value))
    return found


def _make(found: list[Activation], name: str, **constants: float) -> None:
    try:
        candidate = Activation(name, **constants)
    except Error:
        return
    if candidate not in found:
        found.append(candidate)


def _candidates(module: Any, gated: bool) -> list[Activation]:
    found: list[Activation] = []
    if not gated:
        for name in ("silu_no_mul", "gelu_no_mul", "gelu_tanh_no_mul", "relu2"):
            _make(found, name)
        return found
    for name in ("silu", "gelu", "gelu_tanh", "swigluoai"):
        _make(found, name)
    limits = _constants(module, "limit", "clamp")
    alphas = _constants(module, "alpha")
    betas = _constants(module, "beta")
    for limit in limits:
        _make(found, "silu", limit=limit)
        _make(found, "swiglustep", limit=limit)
        for alpha, beta in itertools.product([*alphas, 1.0], [0.0, 1.0, *betas]):
            if (alpha, beta) != (1.0, 0.0):  # that is silu with a limit
                _make(found, "swigluoai_uninterleave", limit=limit, alpha=alpha, beta=beta)
    for beta in [*betas, *_constants(module, "gate_softcap")]:
        _make(found, "situ", beta=beta)
        for limit in [*limits, *_constants(module, "up_softcap")]:
            _make(found, "situ", beta=beta, up_limit=limit)
    return found


def _grid(module: Any) -> torch.Tensor:
    """Values inside and beyond every limit, and far enough apart that no two functions agree."""
    edges = [
        limit * f
        for limit in _constants(module, "limit", "clamp", "beta", "softcap")
        if limit < 1e4
        for f in (0.9, 1.1, 1.6)
    ]
    inner = torch.linspace(-9.0, 9.0, 37).tolist()
    return torch.tensor(sorted({*inner, *edges, *(-e for e in edges), 0.1, -0.1, 20.0, -20.0}), dtype=torch.float32)


def activation_of(module: Any) -> Activation:
    """The one activation of the library that is what the module computes, to 1e-6.

    Raises Unsupported where none is, and where candidates that differ elsewhere can't be told apart.
    """
    values = _grid(module)
    gated = bool(getattr(module, "has_gate", True))
    with torch.no_grad(), torch.device("cpu"):
        if gated:
            gate, up = (t.reshape(-1, 1).contiguous() for t in torch.meshgrid(values, values, indexing="ij"))
            ours_in = torch.cat([gate, up], dim=1)  # width 2: both arrangements are the same
            theirs, size = module._apply_gate(ours_in), (gate * up).abs()
        else:
            ours_in = values.reshape(-1, 1)
            theirs, size = module.act_fn(ours_in), ours_in.abs()
    if theirs.shape != (ours_in.shape[0], 1):
        raise Unsupported(
            f"activation: {type(module).__name__} maps {tuple(ours_in.shape)} to {tuple(theirs.shape)}, need one value for each gate and up"
        )
    theirs = theirs.to(torch.float32)
    # Both round in fp32: where a result is the small rest of large numbers (gelu far below zero), by theirs.
    tolerance = 1e-6 * (1.0 + theirs.abs() + size)
    matches = []
    for candidate in _candidates(module, gated):
        ours = torch.empty_like(theirs)
        apply_activation(candidate, ours_in, out=ours)
        if bool(((ours - theirs).abs() <= tolerance).all()):
            matches.append(candidate)
    if len(matches) == 1:
        return matches[0]
    if matches:
        raise Unsupported(
            f"activation: {type(module).__name__} computes what {' and '.join(map(repr, matches))} do, need exactly one"
        )
    tried = ", ".join(repr(c) for c in _candidates(module, gated))
    raise Unsupported(f"activation: what {type(module).__name__} computes is none of {tried}")


def _numbers_named(holder: Any, names: tuple[str, ...]) -> Iterator[int]:
    for name in names:
        value = getattr(holder, name, None)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            yield value


def top_k_of(module: torch.nn.Module, parent: torch.nn.Module | None) -> int:
    """Experts of a token: as the block or its router says, else the configuration."""
    names = (
        "top_k",
        "num_experts_per_tok",
        "num_selected_experts",
        "moe_top_k",
        "moe_topk",
        "moe_k",
        "num_experts_per_token",
        "top_k_experts",
    )
    for holders in ([parent, *parent.children()] if parent is not None else [], [getattr(module, "config", None)]):
        found = {
            value
            for holder in holders
            if holder is not None and holder is not module
            for value in _numbers_named(holder, names)
        }
        if len(found) > 1:
            raise AmbiguousFormat(f"top_k: got {sorted(found)} around {type(module).__name__}, need one value")
        if found:
            return found.pop()
    raise InvalidArgument(f"top_k: neither the block nor the configuration of {type(module).__name__} says it")


def describe(module: Any, top_k: int) -> Described:
    """Layout, activation and format of an experts module. Raises Unsupported with the reason."""
    name = type(module).__name__
    if getattr(module, "has_post_expert_norm", False):
        raise Unsupported(f"{name}: got a norm after each expert, need none")
    if hasattr(module, "parametrizations"):  # PEFT's, while its model runs, or the caller's own
        raise Unsupported(f"{name}: got weights that are computed at each call (an adapter of PEFT), merge it first")
    gated = bool(getattr(module, "has_gate", True))
    first = "gate_up_proj" if gated else "up_proj"
    tensors: dict[str, torch.Tensor] = {}
    for ours, theirs in (("w13", first), ("w2", "down_proj")):
        for suffix, theirs_suffix in (("", ""), ("_bias", "_bias"), ("_scale", "_scale_inv")):
            value = getattr(module, theirs + theirs_suffix, None)
            if value is None:
                continue
            if not isinstance(value, torch.Tensor) or type(value.data) is not torch.Tensor:
                raise Unsupported(
                    f"{name}.{theirs}: got a {type(value).__name__}, need a plain tensor (DTensor and wrapped weights are not)"
                )
            if value.device.type == "meta":
                raise Unsupported(
                    f"{name}.{theirs}: got a tensor on the meta device, need its values (offloaded weights are not supported)"
                )
            # Scales that are powers of two in a byte are the same numbers in fp32.
            scale = suffix == "_scale" and value.dtype == getattr(torch, "float8_e8m0fnu", None)
            tensors[ours + suffix] = value.data.to(torch.float32) if scale else value.data
    if "w13" not in tensors or "w2" not in tensors:
        raise Unsupported(f"{name}: has no {first} and down_proj, need stacked experts")
    if any(hasattr(child, "lora_A") for child in module.modules()):
        raise Unsupported(f"{name}: got an adapter (PEFT) on its experts, merge it first")
    stored = None
    if tensors["w13"].dtype == torch.float8_e4m3fn:
        block = tuple(getattr(module, "block_size", None) or ())
        if block != (128, 128) or getattr(module, "activation_scheme", None) != "dynamic":
            raise Unsupported(
                f"{name}: got FP8 blocks {block or None} with {getattr(module, 'activation_scheme', None)} activations, need (128, 128) and dynamic"
            )
        stored = "fp8-block"
    elif tensors["w13"].dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise Unsupported(
            f"{name}: got weights of {tensors['w13'].dtype}, need plain ones or FP8 blocks; a checkpoint in this format is read by moesaic.Checkpoint"
        )
    gate_up = "none" if not gated else "gate_then_up" if getattr(module, "is_concatenated", True) else "interleaved"
    return Described(
        tensors=tensors,
        activation=activation_of(module),
        gate_up=gate_up,
        transposed=bool(module.is_transposed),
        stored=stored,
        top_k=top_k,
        num_experts=tensors["w13"].shape[0],
    )
