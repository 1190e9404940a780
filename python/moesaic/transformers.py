"""Hugging Face transformers: its experts run on Moesaic, at three levels.

Importing this module registers the name ``"moesaic"``::

    import moesaic.transformers
    model = AutoModelForCausalLM.from_pretrained(path, experts_implementation="moesaic")

packs each layer's experts at its first call, and again once they changed, and keeps the originals beside them. ::

    report = moesaic.transformers.accelerate(model, quant="int4-g128")

packs all of them now, layer by layer, and releases the originals. ::

    model = moesaic.transformers.from_pretrained(path)

loads a model whose experts transformers never reads: they stay in the format of the files. Inference only.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from transformers.integrations.moe import ExpertsInterface

from . import _recognise
from ._core import LayerSpec, RoutedExperts, explain
from ._env import check_device
from ._errors import Error, InvalidArgument, Unsupported
from ._from_pretrained import from_pretrained
from .torch import MoesaicExperts, drop, experts, keep, leaves_this_process, refuse_saving

__all__ = ["Report", "Row", "accelerate", "from_pretrained", "prepare", "repack", "restore"]

_log = logging.getLogger("moesaic")
_STATE = "_moesaic_state"

# Address and count of changes of each tensor of a module.
_Stamp = tuple[tuple[int, int], ...]


def _pack(
    described: _recognise.Described, *, quant: str, device: Any, max_tokens: int, num_threads: int | None
) -> RoutedExperts:
    return RoutedExperts.from_tensors(
        **_arguments(described, quant, device, max_tokens),
        drop_ids_beyond=True,  # transformers' name for "an expert of another rank"
        num_threads=num_threads,
    )


def _arguments(described: _recognise.Described, quant: str, device: Any, max_tokens: int) -> dict[str, Any]:
    return {
        "top_k": described.top_k,
        "quant": quant,
        "stored": described.stored,
        "activation": described.activation,
        "gate_up": described.gate_up,
        "transposed": described.transposed,
        "device": device,
        "max_tokens": max_tokens,
        **described.tensors,
    }


def _device_of(described: _recognise.Described) -> str:
    device = described.tensors["w13"].device
    return "cpu" if device.type == "cpu" else f"{device.type}:{device.index or 0}"


# --- Level 1: the name -------------------------------------------------------------------------------


class _Packed:
    """The packed experts of a module that keeps its originals, and what they were packed from."""

    def __init__(self, layer: RoutedExperts, stamp: _Stamp, samples: list[torch.Tensor]) -> None:
        self.layer = layer
        self.stamp = stamp
        self.samples = samples
        # In the forms that the operator takes; see moesaic.torch.
        self.literal, number = keep(layer, literal=True), keep(layer)
        self.numbers = (self.literal, number)
        self.handle = torch.tensor(number, dtype=torch.int64, device="cpu")
        self.on_cpu = layer.device == "cpu"

    def __del__(self) -> None:
        for number in self.numbers:
            drop(number)

    def __deepcopy__(self, memo: Any) -> None:
        return None  # a copied module packs for itself

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()  # and so does one from another process


_warned: set[int] = set()

# Elements of a tensor that each call compares with what they were when it was packed. A merged adapter adds to
# nearly all elements, of which rounding to bf16 may swallow most: if one in 500 changes, 4096 miss that three
# times in 10000. Each is a line of memory: some 100 us for a tensor of 800 MB.
_SAMPLES = 4096
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _tensors(module: torch.nn.Module) -> list[torch.Tensor]:
    return [t for t in (*module._parameters.values(), *module._buffers.values()) if t is not None]


def _stamp(module: torch.nn.Module) -> _Stamp:
    """Where the weights are, and PyTorch's count of changes: tensors of inference mode have none."""
    return tuple((t.data_ptr(), -1 if t.is_inference() else t._version) for t in _tensors(module))


def _sample(tensor: torch.Tensor) -> torch.Tensor:
    """Evenly spread elements, at least eight of each expert, as bits: a NaN is equal to itself."""
    bits = tensor.detach().view(_BITS[tensor.element_size()])
    experts = bits.shape[0] if bits.dim() > 0 else 1
    step = bits.numel() // max(_SAMPLES, 8 * experts) | 1  # odd: not the same column of each row
    if bits.is_contiguous():
        return bits.view(-1)[::step]
    return bits[torch.unravel_index(torch.arange(0, bits.numel(), step, device=bits.device), bits.shape)]


def _unchanged(module: torch.nn.Module, state: _Packed) -> bool:
    """Whether a module's weights are those that were packed.

    Writing through ``.data``, as PEFT merges an adapter, changes neither the address nor the count: a sample of
    the values shows it. What it can miss is such a write to few elements; repack() is for those.
    """
    if state.stamp != _stamp(module):
        return False
    tensors = _tensors(module)
    if any(t.is_cuda for t in tensors) and torch.cuda.is_current_stream_capturing():
        return True  # comparing would wait for the GPU
    return all(torch.equal(_sample(t), sample) for t, sample in zip(tensors, state.samples, strict=True))


def _packed(module: Any, top_k: int) -> _Packed:
    state: _Packed | None = module.__dict__.get(_STATE)
    if state is None or not _unchanged(module, state):
        described = _recognise.describe(module, top_k)
        stamp, samples = _stamp(module), [_sample(t).clone() for t in _tensors(module)]
        layer = _pack(described, quant="as-is", device=_device_of(described), max_tokens=512, num_threads=None)
        if id(module.config) not in _warned:  # once for a model, whose layers share it
            _warned.add(id(module.config))
            _log.warning(
                'experts_implementation="moesaic" keeps the model\'s own experts beside the packed ones: %d bytes more '
                "for each layer; moesaic.transformers.accelerate(model) releases them",
                layer.weight_bytes,
            )
        state = _Packed(layer, stamp, samples)
        object.__setattr__(module, _STATE, state)
    return state


def _experts_forward(
    self: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    if not torch.compiler.is_compiling():
        _packed(self, top_k_index.shape[-1])
    state: _Packed | None = getattr(self, _STATE, None)
    if state is None:
        raise RuntimeError(
            "moesaic: these experts are not packed yet; call moesaic.transformers.prepare(model) before compiling"
        )
    handle = state.handle if state.on_cpu or leaves_this_process() else state.literal
    result: torch.Tensor = experts(hidden_states, top_k_index, top_k_weights, handle)
    return result


ExpertsInterface.register("moesaic", _experts_forward)
try:  # transformers 5.5 and later
    from transformers.integrations.finegrained_fp8 import FP8ExpertsInterface

    FP8ExpertsInterface.register("moesaic", _experts_forward)
except ImportError:
    pass


# Hooks of a module around its forward(). The replacement shares these, so that their handles stay valid.
_HOOKS = (
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
)


def _modules(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module, torch.nn.Module | None]]:
    for name, module in model.named_modules():
        if _recognise.is_experts(module):
            parent = model.get_submodule(name.rpartition(".")[0]) if name else None
            yield name, module, parent


def prepare(model: torch.nn.Module) -> None:
    """Packs all experts of a model with ``experts_implementation="moesaic"`` now, as compiling needs."""
    for _, module, parent in _modules(model):
        _packed(module, _recognise.top_k_of(module, parent))


def repack(model: torch.nn.Module) -> None:
    """Packs all experts of a model with ``experts_implementation="moesaic"`` again, whatever they look like.

    For weights that were changed where calls don't see it: few elements through ``.data``, or in a compiled model,
    whose calls don't look. A compiled model uses the new weights from then on; a captured CUDA graph doesn't.
    """
    for _, module, parent in _modules(model):
        vars(module).pop(_STATE, None)
        _packed(module, _recognise.top_k_of(module, parent))


# --- Level 2: a model that is loaded ------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Row:
    """What became of one experts module. ``reason`` is empty where it was replaced."""

    module: str
    backend: str = ""
    scheme: str = ""
    bytes_before: int = 0
    bytes_after: int = 0
    bound: float = 0.0
    reason: str = ""


@dataclasses.dataclass(frozen=True)
class Report:
    """What accelerate() did, module by module."""

    rows: tuple[Row, ...]

    @property
    def bytes_before(self) -> int:
        """Of the modules that were replaced."""
        return sum(row.bytes_before for row in self.rows if not row.reason)

    @property
    def bytes_after(self) -> int:
        """Packed."""
        return sum(row.bytes_after for row in self.rows)

    def __str__(self) -> str:
        lines = [f"{'module':<40} {'scheme':<12} {'before':>14} {'after':>14} {'bound':>9}  backend"]
        for row in self.rows:
            if row.reason:
                lines.append(f"{row.module:<40} kept: {row.reason}")
            else:
                lines.append(
                    f"{row.module:<40} {row.scheme:<12} {row.bytes_before:>14} {row.bytes_after:>14} {row.bound:>9.1e}  {row.backend}"
                )
        lines.append(f"{'all':<40} {'':<12} {self.bytes_before:>14} {self.bytes_after:>14}")
        return "\n".join(lines)


def _bar(progress: bool | Callable[[int, int], object] | None) -> Callable[[int, int], object]:
    if callable(progress):
        return progress
    if not (sys.stderr.isatty() if progress is None else progress):
        return lambda done, total: None

    def show(done: int, total: int) -> None:
        width = 30
        filled = width * done // max(total, 1)
        end = "\n" if done >= total else ""
        print(
            f"\rmoesaic: packing experts [{'#' * filled:<{width}}] {done}/{total}{end}",
            end="",
            file=sys.stderr,
            flush=True,
        )

    return show


_SOME_LAYER = LayerSpec(hidden_size=128, intermediate_size=128, num_experts=1, top_k=1)


def _plan(
    model: torch.nn.Module, quant: str, device: Any, max_tokens: int, keep_refused: bool
) -> dict[str, _recognise.Described | str]:
    """What each experts module is, or, if refused modules are kept, why it isn't taken. Changes nothing."""
    if _recognise.is_experts(model):
        raise InvalidArgument(
            f"model: got a {type(model).__name__} itself, need the model or the block that holds it, to put another there"
        )
    # An option that cannot be is no module's fault. What it asks of each of them is found below.
    check_device(device)
    with contextlib.suppress(Unsupported):
        explain(_SOME_LAYER, quant=quant, device="cpu" if device is None else device, max_tokens=max_tokens)
    plans: dict[str, _recognise.Described | str] = {}
    for name, module, parent in _modules(model):
        try:
            described = _recognise.describe(module, _recognise.top_k_of(module, parent))
            there = device if device is not None else _device_of(described)
            RoutedExperts.check_tensors(**_arguments(described, quant, there, max_tokens))
            plans[name] = described
        except Error as error:
            if not keep_refused:
                raise type(error)(f"{name}: {error}") from error
            plans[name] = str(error)
    if not plans:
        raise InvalidArgument(f"model: {type(model).__name__} has no experts modules of transformers' (docs/python.md)")
    return plans


def accelerate(
    model: torch.nn.Module,
    *,
    quant: str = "as-is",
    device: Any = None,
    max_tokens: int = 512,
    num_threads: int | None = None,
    release: bool = True,
    on_unsupported: str = "raise",
    progress: bool | Callable[[int, int], object] | None = None,
) -> Report:
    """Replaces the experts of a loaded model, one layer after the other.

    quant: "as-is", or the scheme to convert to while packing ("int4-g128", "fp8-block", ...).
    device: where the packed experts are; None: where the model's are.
    release: whether the originals' memory is given up. With False restore() brings them back.
    on_unsupported: "raise", or "keep" such modules as they are. A scheme, device or number of tokens that there is
    not raises either way.
    progress: True, False, or a function of (modules done, in all); None: a bar if stderr is a terminal.

    Above the model's own memory it needs one packed layer and one expert. Raises Unsupported and the like with
    the reason and the name of the module, InvalidArgument for a model without experts modules: all modules are
    checked before the first is packed, and nothing has changed then. What only the packing finds (values that
    are not finite, memory, Ctrl-C) leaves the modules before it replaced if their originals are released, and
    none with ``release=False``.

    Forward hooks of a module are its replacement's from then on; other attributes are not carried over. A module
    that is in several places is packed once and replaced in all.

    From then on ``state_dict()`` and ``save_pretrained()`` of the model raise Unsupported: they would lack the
    experts. restore() ends that. ``save_pretrained()`` of a larger model, of which this one is a part, refuses too,
    but may have written its configuration by then.
    """
    if on_unsupported not in ("raise", "keep"):
        raise InvalidArgument(f'on_unsupported: got {on_unsupported!r}, need "raise" or "keep"')
    plans = _plan(model, quant, device, max_tokens, on_unsupported == "keep")
    kept: dict[str, torch.nn.Module] = getattr(model, "_moesaic_originals", {})
    rows: list[Row] = []
    replaced: list[str] = []
    released = False
    report_progress = _bar(progress)
    try:
        report_progress(0, len(plans))
        for i, name in enumerate(plans):
            found, plans[name] = plans[name], ""  # the last reference to the originals is the model's
            if isinstance(found, str):
                rows.append(Row(name, reason=found))
            else:
                there = device if device is not None else _device_of(found)
                layer = _pack(found, quant=quant, device=there, max_tokens=max_tokens, num_threads=num_threads)
                rows.append(
                    Row(name, layer.experts_backend, layer.quant, found.nbytes, layer.weight_bytes, layer.bound)
                )
                original = _replace(model, name, layer, found.num_experts)
                del found
                if release:
                    released = True
                    _release(original, layer)
                else:
                    kept[name] = original
                    replaced.append(name)
                del original
            report_progress(i + 1, len(plans))
    except BaseException:
        for name in replaced:
            _put_back(model, name, kept.pop(name))
        if released:
            refuse_saving(model)
        raise
    object.__setattr__(model, "_moesaic_originals", kept)
    if any(not row.reason for row in rows):
        refuse_saving(model)
    return Report(tuple(rows))


def _replace(model: torch.nn.Module, name: str, layer: RoutedExperts, num_experts: int) -> torch.nn.Module:
    """Puts packed experts in all places of a module, which it returns."""
    original = model.get_submodule(name)
    module = MoesaicExperts(layer)
    module.num_experts = num_experts  # some models look at it
    module.train(original.training)
    for hooks in _HOOKS:
        if hooks in vars(original):
            object.__setattr__(module, hooks, vars(original)[hooks])
    for place in _places(model, original):
        model.set_submodule(place, module)
    return original


def _places(model: torch.nn.Module, module: torch.nn.Module) -> list[str]:
    """All names of a module: layers may share it."""
    return [name for name, found in model.named_modules(remove_duplicate=False) if found is module]


def _release(module: torch.nn.Module, layer: RoutedExperts) -> None:
    for parameter in list(module.parameters()):
        parameter.data = torch.empty(0, dtype=parameter.dtype, device=parameter.device)
    if layer.device != "cpu":
        torch.cuda.empty_cache()


def _put_back(model: torch.nn.Module, name: str, original: torch.nn.Module) -> None:
    for place in _places(model, model.get_submodule(name)):
        model.set_submodule(place, original)


def restore(model: torch.nn.Module) -> int:
    """Puts back what ``accelerate(model, release=False)`` replaced; returns how many modules that were.

    They are as they were: what changed the dtype or the device of the model in between (``model.to()``,
    ``model.half()``) did not reach them, and is to be done again.
    """
    kept: dict[str, torch.nn.Module] = getattr(model, "_moesaic_originals", {})
    for name, module in kept.items():
        module.train(model.get_submodule(name).training)
        _put_back(model, name, module)
    count = len(kept)
    kept.clear()
    if not any(isinstance(module, MoesaicExperts) for module in model.modules()):
        vars(model).pop("save_pretrained", None)  # the class's own again
    return count
