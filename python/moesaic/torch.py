"""PyTorch: the operator ``moesaic::experts`` and the module ``MoesaicExperts``. For inference only.

The operator has two overloads that differ in how they name the experts: by a 0-dimensional CPU tensor, and
(``.int``) by a plain integer. With an integer a compiler that sees one decoder layer at a time makes code
for each of them; with a tensor one for all. But a CPU tensor among its inputs keeps inductor from using
CUDA graphs: modules on a CPU take the first, on a GPU the second.
"""

from __future__ import annotations

import itertools
import secrets
import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import forward_ad

from ._core import RoutedExperts
from ._errors import DeviceError, InvalidArgument, Unsupported

__all__ = ["MoesaicExperts", "drop", "experts", "keep"]

# drop() may run within keep(): in a finalizer, whenever the garbage collector does.
_lock = threading.RLock()
_layers: dict[int, RoutedExperts] = {}
# torch.export and torch.jit.trace keep the tensor with the number in their programs: one that is loaded in another
# process must not find that process's layer of the same number. So each process starts somewhere else.
_numbers = itertools.count((1 << 62) + secrets.randbits(61))
# An integer is part of the compiled code, which torch finds again on disk only if it is the same in each process.
_literals = itertools.count(1)


def keep(layer: RoutedExperts, *, literal: bool = False) -> int:
    """A number under which the operator finds these experts until drop().

    literal: one for the overload ``.int`` in compiled code, which stays in this process. Programs that may leave it
    (torch.export) get none of these.
    """
    with _lock:
        number = next(_literals if literal else _numbers)
        _layers[number] = layer
    return number


def drop(number: int) -> None:
    """Forgets the experts of keep(). Unknown numbers are ignored."""
    with _lock:
        _layers.pop(number, None)


def leaves_this_process() -> bool:
    """Whether what is traced now may be loaded in another process: by torch.export or torch.jit.trace."""
    return bool(torch.compiler.is_exporting() or torch.jit.is_tracing())


def _run(hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, number: int) -> torch.Tensor:
    layer = _layers.get(number)
    if layer is None:
        raise InvalidArgument(
            f"layer: got {number}, which no experts have (they were dropped, or belong to another process)"
        )
    if hidden.is_cuda and weights.dtype != torch.float32:
        weights = weights.float()
    out = torch.empty_like(hidden, memory_format=torch.contiguous_format)
    layer(hidden, ids, weights, out=out)
    return out


def _run_tensor(hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, layer: torch.Tensor) -> torch.Tensor:
    return _run(hidden, ids, weights, int(layer.item()))


def _fake(hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, layer: object) -> torch.Tensor:
    if hidden.device.type != "meta":
        for name, tensor in (("topk_ids", ids), ("topk_weights", weights), ("layer", layer)):
            if isinstance(tensor, torch.Tensor) and tensor.device.type == "meta":
                raise InvalidArgument(f"{name}: got a tensor on meta, need one on {hidden.device}, as hidden_states is")
    return torch.empty_like(hidden, memory_format=torch.contiguous_format)


class _NoGradient(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, run: Callable[[], torch.Tensor], *inputs: torch.Tensor) -> torch.Tensor:
        return run()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> None:
        raise Unsupported(
            "moesaic::experts is for inference only: it has no gradient (use torch.no_grad(), or the model's own experts for training)"
        )


def _above_autograd(operator: Any) -> Callable[..., torch.Tensor]:
    """What torch.library.register_autograd() would register, which lets tangents of forward mode become zeros."""

    def kernel(keyset: Any, *arguments: Any) -> torch.Tensor:
        tensors = [a for a in arguments if isinstance(a, torch.Tensor)]
        # Without a level, as nearly always, none has a tangent.
        if forward_ad._current_level >= 0 and any(forward_ad.unpack_dual(t).tangent is not None for t in tensors):
            raise Unsupported(
                "moesaic::experts is for inference only: it has no derivative in forward mode (use the model's own experts)"
            )

        def run() -> torch.Tensor:
            with torch._C._AutoDispatchBelowAutograd():
                result: torch.Tensor = operator.redispatch(keyset & torch._C._after_autograd_keyset, *arguments)
                return result

        if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
            made: torch.Tensor = _NoGradient.apply(run, *tensors)
            return made
        return run()

    return kernel


_library = torch.library.Library("moesaic", "DEF")
_tags = (torch.Tag.needs_fixed_stride_order, torch.Tag.pt2_compliant_tag)
_library.define("experts(Tensor hidden, Tensor ids, Tensor weights, Tensor layer) -> Tensor", tags=_tags)
_library.define("experts.int(Tensor hidden, Tensor ids, Tensor weights, int layer) -> Tensor", tags=_tags)
_implementations: tuple[tuple[str, Callable[..., torch.Tensor]], ...] = (
    ("experts", _run_tensor),
    ("experts.int", _run),
)
for _name, _function in _implementations:
    for _key in ("CPU", "CUDA"):
        _library.impl(_name, _function, _key)
    torch.library.register_fake(f"moesaic::{_name}", _fake, lib=_library)

experts: Any = torch.ops.moesaic.experts
for _operator in (experts.default, experts.int):
    _library.impl(_operator, _above_autograd(_operator), "Autograd", with_keyset=True)


_UNSAVED = "are packed and can't be saved; keep what the model was made from, or restore() what accelerate(release=False) replaced"


def refuse_saving(model: Any) -> None:
    """save_pretrained() of this model raises Unsupported before it writes its first file, as state_dict() does."""

    def save_pretrained(*_: Any, **__: Any) -> None:
        raise Unsupported(f"save_pretrained: the experts of this model {_UNSAVED}")

    if hasattr(model, "save_pretrained"):
        object.__setattr__(model, "save_pretrained", save_pretrained)


class MoesaicExperts(torch.nn.Module):  # type: ignore[misc]
    """The experts of one layer in the place of a model's own module.

    It has no parameters: the packed weights are the library's, and ``.to(dtype)`` does not see them. It can't be
    moved to another device, copied, pickled or saved: ``state_dict()`` of a model with it raises ``Unsupported``,
    because what it returned would lack the experts without a word.
    """

    def __init__(self, layer: RoutedExperts) -> None:
        super().__init__()
        self.layer = layer
        self._number = keep(layer, literal=True)
        weakref.finalize(self, drop, self._number)
        number = keep(layer)
        weakref.finalize(self, drop, number)
        self._handle = torch.tensor(number, dtype=torch.int64, device="cpu")
        self._on_cpu = layer.device == "cpu"

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """[..., H], [..., k] and [..., k] to [..., H], of the dtype of the hidden states."""
        handle = self._handle if self._on_cpu or leaves_this_process() else self._number
        result: torch.Tensor = experts(hidden_states, top_k_index, top_k_weights, handle)
        return result

    def extra_repr(self) -> str:
        """The layer's own description."""
        return repr(self.layer)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> MoesaicExperts:
        # .to(device) and the like call this with the function that moves a tensor.
        here = torch.empty(0, device=self.layer.device)
        there = fn(here)
        if there.device != here.device:
            raise DeviceError(
                f"these experts are packed for {self.layer.device} and cannot be moved to {there.device}; make them there"
            )
        return self

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        raise Unsupported(f"state_dict: {prefix.rstrip('.') or 'these experts'} {_UNSAVED}")

    def __deepcopy__(self, memo: Any) -> MoesaicExperts:
        raise TypeError("the experts of a moesaic layer cannot be copied; make them again")

    def __reduce__(self) -> str:
        raise TypeError("the experts of a moesaic layer cannot be pickled; save the checkpoint they came from")
