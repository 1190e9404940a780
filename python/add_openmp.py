"""Puts libgomp.so.1 beside the extension, under its own name, into a wheel that auditwheel left without.

A renamed copy would be a second OpenMP runtime in a process that has PyTorch's: two pools of threads that wait
against each other. Under the same name the dynamic linker takes the one that came first for both.

    python add_openmp.py WHEEL FOLDER
"""

from __future__ import annotations

import base64
import hashlib
import pathlib
import subprocess
import sys
import zipfile


def libgomp() -> pathlib.Path:
    """The runtime that the compiler links with."""
    found = subprocess.run(["c++", "-print-file-name=libgomp.so.1"], check=True, capture_output=True, text=True)
    path = pathlib.Path(found.stdout.strip()).resolve()
    if not path.is_file():
        raise SystemExit("add_openmp: the compiler has no libgomp.so.1")
    return path


def main(wheel: str, folder: str) -> None:
    """Writes the wheel with the runtime in it, and its RECORD, into the folder."""
    source = pathlib.Path(wheel)
    target = pathlib.Path(folder) / source.name
    name, data = "moesaic/libgomp.so.1", libgomp().read_bytes()
    digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as new:
        for entry in old.infolist():
            content = old.read(entry)
            if entry.filename.endswith(".dist-info/RECORD"):
                content = f"{name},sha256={digest},{len(data)}\n".encode() + content
            new.writestr(entry, content, zipfile.ZIP_DEFLATED)
        entry = zipfile.ZipInfo(name, date_time=(2026, 1, 1, 0, 0, 0))
        entry.external_attr = 0o755 << 16
        new.writestr(entry, data, zipfile.ZIP_DEFLATED)


if __name__ == "__main__":
    main(*sys.argv[1:])
