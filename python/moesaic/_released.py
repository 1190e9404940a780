"""An engine's parameters whose weights were packed: they keep their shape and give up their memory."""

from __future__ import annotations

from typing import Any

from ._errors import Unsupported


def release(*parameters: Any) -> None:
    """Leaves each parameter one element, which is no weight: NaN in a type that has it."""
    for parameter in parameters:
        one = parameter.data.new_empty(1)
        one.fill_(float("nan") if one.is_floating_point() else 127)
        parameter.data = one.expand(parameter.shape)


def check_not_released(name: str, parameter: Any) -> None:
    """Raises Unsupported for a parameter that is one element in all places, as release() leaves it."""
    if parameter.numel() > 1 and not any(parameter.stride()):
        raise Unsupported(
            f"{name}: got weights that were released when they were packed, need those of the checkpoint: load the model anew"
        )
