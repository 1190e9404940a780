"""What became of the experts of a model, module by module."""

from __future__ import annotations

import dataclasses

__all__ = ["ModuleReport", "Report"]


@dataclasses.dataclass(frozen=True)
class ModuleReport:
    """One experts module.

    name: its name in the model. layer: number of the decoder layer, -1 if it has none. backend: who computes
    it. scheme: name of the scheme in force. bytes_before: of its tensors as the model or the file held
    them. bytes_after: packed. bound: upper bound of the relative L2 error of an output against float64 on
    the same stored weights. refused: why it was kept as it was; empty for modules that run on Moesaic.
    """

    name: str
    layer: int
    backend: str
    scheme: str
    bytes_before: int
    bytes_after: int
    bound: float
    refused: str = ""


@dataclasses.dataclass
class Report:
    """All experts modules of a model, in its order. `str()` is a table."""

    modules: list[ModuleReport] = dataclasses.field(default_factory=list)

    @property
    def bytes_before(self) -> int:
        """Bytes of the experts that were packed, as the model or the file held them."""
        return sum(m.bytes_before for m in self.modules if not m.refused)

    @property
    def bytes_after(self) -> int:
        """Bytes of the packed experts."""
        return sum(m.bytes_after for m in self.modules if not m.refused)

    def __str__(self) -> str:
        """A line for each module and one for the sum."""
        rows = [("module", "scheme", "backend", "before", "after", "bound")]
        rows += [
            (m.name, m.scheme, m.backend, format_bytes(m.bytes_before), format_bytes(m.bytes_after), f"{m.bound:.1e}")
            if not m.refused
            else (m.name, "kept", m.refused, format_bytes(m.bytes_before), "", "")
            for m in self.modules
        ]
        rows.append(("total", "", "", format_bytes(self.bytes_before), format_bytes(self.bytes_after), ""))
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        return "\n".join(
            "  ".join(
                cell.ljust(width) if i < 3 else cell.rjust(width)
                for i, (cell, width) in enumerate(zip(row, widths, strict=True))
            ).rstrip()
            for row in rows
        )


def format_bytes(count: int) -> str:
    """`count` bytes as a person reads them: 12.3 MB."""
    value = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1000:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1000
    return f"{value:.1f} TB"
