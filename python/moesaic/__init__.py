"""Moesaic: the mixture-of-experts layer of language models.

It computes what was asked within a stated error bound, or refuses with a reason. Tensors of any framework
that speaks DLPack or NumPy's array interface are read and written in place; importing this package imports
none of them.
"""

from __future__ import annotations

import os as _os
import sys as _sys
import sysconfig as _sysconfig

if _sysconfig.get_config_var("Py_GIL_DISABLED"):
    raise ImportError("moesaic: this is a free-threaded Python, need one with the GIL")

from ._core import (
    Activation,
    Candidate,
    Checkpoint,
    ConvertedLayer,
    ConvertReport,
    ExpertNames,
    Explanation,
    FusedMoE,
    GateLinear,
    LayerSpec,
    Numerics,
    Parallel,
    RoutedExperts,
    Router,
    Routing,
    Tensor,
    TensorFile,
    Trace,
    WeightLoader,
    apply_activation,
    convert,
    convert_schemes,
    explain,
    quant_schemes,
)
from ._core import note_openmp_threads as _note_openmp_threads
from ._env import env
from ._errors import (
    Aliasing,
    AmbiguousFormat,
    CorruptFile,
    DeviceError,
    Error,
    InternalError,
    InvalidArgument,
    InvalidDType,
    InvalidLayout,
    InvalidShape,
    Io,
    LimitExceeded,
    MissingTensor,
    NotFound,
    OutOfMemory,
    Unsupported,
    WorkspaceTooSmall,
)

__version__ = "0.1.0"


def _before_fork() -> None:
    # PyTorch computes with the same OpenMP, whose threads a child would wait for.
    if getattr(_sys.modules.get("torch"), "get_num_threads", lambda: 1)() > 1:
        _note_openmp_threads()


_os.register_at_fork(before=_before_fork)

__all__ = [
    "Activation",
    "Aliasing",
    "AmbiguousFormat",
    "Candidate",
    "Checkpoint",
    "ConvertReport",
    "ConvertedLayer",
    "CorruptFile",
    "DeviceError",
    "Error",
    "ExpertNames",
    "Explanation",
    "FusedMoE",
    "GateLinear",
    "InternalError",
    "InvalidArgument",
    "InvalidDType",
    "InvalidLayout",
    "InvalidShape",
    "Io",
    "LayerSpec",
    "LimitExceeded",
    "MissingTensor",
    "NotFound",
    "Numerics",
    "OutOfMemory",
    "Parallel",
    "RoutedExperts",
    "Router",
    "Routing",
    "Tensor",
    "TensorFile",
    "Trace",
    "Unsupported",
    "WeightLoader",
    "WorkspaceTooSmall",
    "apply_activation",
    "convert",
    "convert_schemes",
    "env",
    "explain",
    "quant_schemes",
]
