"""Checks what a wheel asks of a machine without a GPU, and whether it has kernels for one.

    python audit_cuda.py WHEEL [--need-kernels]

The extension may name libraries of the C and C++ run time, and such as the wheel brings: CUDA's runtime is in it, the driver
(libcuda.so.1) and NCCL are opened at run time, where they are. Kernels are for sm_90a. Needs readelf (binutils).
"""

from __future__ import annotations

import pathlib
import re
import subprocess
import sys
import tempfile
import zipfile

ALLOWED = r"lib(c|m|dl|rt|pthread|gcc_s|stdc\+\+|gomp|nanobind_backend)[.-].*|ld-linux-x86-64\.so\.2"


def readelf(*arguments: object) -> str:
    """What readelf says, in English."""
    command = ["readelf", "-W", *map(str, arguments)]
    return subprocess.run(
        command, check=True, capture_output=True, text=True, env={"LC_ALL": "C", "PATH": "/usr/bin:/bin"}
    ).stdout


def main() -> None:
    """Exits with a text if something is wrong, and prints what there is."""
    wheel, need_kernels = sys.argv[1], "--need-kernels" in sys.argv[2:]
    with tempfile.TemporaryDirectory() as folder:
        with zipfile.ZipFile(wheel) as archive:
            names = [n for n in archive.namelist() if re.fullmatch(r"moesaic/_core\..*so", n)]
            shared = [n for n in archive.namelist() if ".so" in pathlib.Path(n).name]
            archive.extractall(folder, names)
        if len(names) != 1:
            sys.exit(f"audit: got {len(names)} extensions, need one")
        extension = pathlib.Path(folder) / names[0]
        needed = re.findall(r"\(NEEDED\).*\[(.*)\]", readelf("-d", extension))
        kernels = "nvFatBinSegment" in readelf("-S", extension) or ".nv_fatbin" in readelf("-S", extension)
        text = "TEXTREL" in readelf("-d", extension)
    beside = {pathlib.Path(n).name for n in shared}
    wrong = [n for n in needed if not re.fullmatch(ALLOWED, n) and n not in beside]
    brought = [n for n in shared if re.search("cuda|nccl|cublas", n)]
    if wrong or brought or text:
        sys.exit(f"audit: the extension needs {wrong}, the wheel brings {brought}, relocations in code: {text}")
    if need_kernels and not kernels:
        sys.exit("audit: got no GPU kernels, need those of sm_90a")
    print(f"audit: {'with' if kernels else 'without'} GPU kernels; needs {', '.join(sorted(needed))}")


if __name__ == "__main__":
    main()
