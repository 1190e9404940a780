"""Exceptions: one class for each status code of the library, which is also the builtin one expects."""

from __future__ import annotations

__all__ = [
    "Aliasing",
    "AmbiguousFormat",
    "CorruptFile",
    "DeviceError",
    "Error",
    "InternalError",
    "InvalidArgument",
    "InvalidDType",
    "InvalidLayout",
    "InvalidShape",
    "Io",
    "LimitExceeded",
    "MissingTensor",
    "NotFound",
    "OutOfMemory",
    "Unsupported",
    "WorkspaceTooSmall",
]


class Error(RuntimeError):
    """A refusal or failure of the library. ``code`` is the name that the command-line tool prints."""

    code: str = "internal"


class InvalidArgument(Error, ValueError):
    """A value outside its documented range."""

    code = "invalid_argument"


class InvalidShape(Error, ValueError):
    """A tensor's rank or dimensions."""

    code = "invalid_shape"


class InvalidLayout(Error, ValueError):
    """Strides, alignment or arrangement."""

    code = "invalid_layout"


class InvalidDType(Error, TypeError):
    """An element type that the call does not take."""

    code = "invalid_dtype"


class Unsupported(Error, NotImplementedError):
    """Meaningful, but not implemented by what was asked to do it."""

    code = "unsupported"


class AmbiguousFormat(Error, ValueError):
    """The input admits two readings and nothing says which is meant."""

    code = "ambiguous_format"


class CorruptFile(Error, ValueError):
    """A file contradicts its format or itself."""

    code = "corrupt_file"


class MissingTensor(Error, LookupError):
    """A checkpoint lacks tensors that its configuration promises."""

    code = "missing_tensor"


class NotFound(Error, LookupError):
    """No such file, layer, tensor or backend."""

    code = "not_found"


class Io(Error, OSError):
    """The operating system refused."""

    code = "io"


class LimitExceeded(Error, ValueError):
    """A documented cap or a 64-bit size was exceeded."""

    code = "limit_exceeded"


class Aliasing(Error, ValueError):
    """Buffers overlap that must not."""

    code = "aliasing"


class WorkspaceTooSmall(Error, ValueError):
    """Names bytes given and needed."""

    code = "workspace_too_small"


class OutOfMemory(Error, MemoryError):
    """The allocator refused."""

    code = "out_of_memory"


class DeviceError(Error):
    """Accelerator or communicator."""

    code = "device"


class InternalError(Error):
    """An invariant of the library failed; always a bug."""

    code = "internal"


_BY_CODE: dict[str, type[Error]] = {
    cls.code: cls
    for cls in (
        InvalidArgument,
        InvalidShape,
        InvalidLayout,
        InvalidDType,
        Unsupported,
        AmbiguousFormat,
        CorruptFile,
        MissingTensor,
        NotFound,
        Io,
        LimitExceeded,
        Aliasing,
        WorkspaceTooSmall,
        OutOfMemory,
        DeviceError,
        InternalError,
    )
}


def make(code: str, text: str) -> Error:
    """The exception of a status code, for the extension."""
    return _BY_CODE[code](text)
