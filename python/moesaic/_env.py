"""What this process computes with."""

from __future__ import annotations

import sys
from typing import Any

from . import _core
from ._errors import DeviceError, Unsupported

__all__ = ["env"]


def _openmp_runtimes() -> list[str]:
    """Files of the OpenMP runtimes in this process. More than one wait against each other."""
    found: set[str] = set()
    try:
        with open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
            for line in maps:
                path = line.split(maxsplit=5)[-1].strip()
                if path.startswith("/") and path.rsplit("/", 1)[-1].startswith(("libgomp", "libomp", "libiomp")):
                    found.add(path)
    except OSError:
        pass
    return sorted(found)


def env() -> dict[str, Any]:
    """Version, processor and its tier, threads, GPUs, OpenMP runtimes, and the frameworks imported so far."""
    report = _core.environment()
    report["openmp"] = _openmp_runtimes()
    report["python"] = sys.version.split()[0]
    report["frameworks"] = {
        name: str(getattr(sys.modules[name], "__version__", "?"))
        for name in ("numpy", "torch", "transformers", "jax", "cupy", "vllm")
        if name in sys.modules
    }
    return report


def check_device(device: Any) -> None:
    """Raises Unsupported or DeviceError with the reason for a GPU where there is none of that number."""
    name, _, number = str(device).partition(":")
    if name != "cuda":
        return
    cuda = _core.environment()["cuda"]
    if not cuda["available"]:
        raise Unsupported(f"{device}: {cuda['reason']}")
    count = len(cuda["devices"])
    if number.isdecimal() and int(number) >= count:
        raise DeviceError(f"{device}: got {number}, need 0 to {count - 1}, the GPUs of this machine")
