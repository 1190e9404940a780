"""Makes stand-ins for the CUDA libraries that PyTorch's wheel is linked with.

PyTorch's wheel from PyPI does not load without libcudart, libcublas, NCCL and others: gigabytes
that a test on a CPU never calls. This reads from the ELF files in torch/lib which libraries and
which of their symbols are missing, and compiles a small library for each, in which every function
does nothing. They are written beside torch's own libraries, where its run path looks first or last,
so that no environment variable is needed.

    python stub_cuda.py SITE_PACKAGES [--out FOLDER]

Needs binutils (objdump) and a C compiler. The stand-ins say that there is no device:
torch.cuda.is_available() is False, and nothing else of them is called.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

# cudaErrorNoDevice; every other function returns zero and leaves what it was given alone.
RETURN_VALUES = {"cudaGetDeviceCount": 100}

# Libraries that every machine has, and the driver's, which torch opens while running: a stand-in
# for it would tell other libraries of the process that there is a driver.
PRESENT_PREFIXES = (
    "ld-linux",
    "libc.so",
    "libm.so",
    "libdl.so",
    "librt.so",
    "libpthread.so",
    "libstdc++.so",
)
PRESENT_PREFIXES += ("libgcc_s.so", "libcuda.so")

# Symbols without a version that are none of CUDA's: Python's, the C runtime's, C++ names.
IGNORED_PREFIXES = ("_", "Py")


@dataclasses.dataclass
class Object:
    """What one ELF file asks for and offers."""

    needed: set[str] = dataclasses.field(default_factory=set)
    # library -> names of versions asked from it
    versions: dict[str, set[str]] = dataclasses.field(default_factory=dict)
    undefined: set[tuple[str, str]] = dataclasses.field(default_factory=set)  # (symbol, version or "")
    defined: set[str] = dataclasses.field(default_factory=set)


def parse_objdump(text: str) -> Object:
    """Reads the output of `objdump --private-headers --dynamic-syms`."""
    result = Object()
    library = None
    for line in text.splitlines():
        words = line.split()
        if not words:
            library = None
        elif words[0] == "NEEDED":
            result.needed.add(words[1])
        elif line.strip().startswith("required from "):
            library = words[2].rstrip(":")
            result.versions.setdefault(library, set())
        elif library is not None and words[0].startswith("0x"):
            result.versions[library].add(words[-1])
        # 0000000000000000      DF *UND*  0000000000000000 (libcudart.so.13) cudaMalloc
        elif match := re.match(r"[0-9a-f]{16} (.{7}) (\S+)\s+[0-9a-f]{16}\s+(.*)$", line):
            flags, section, rest = match.groups()
            name = rest.split()[-1]
            version = rest.split()[0].strip("()") if len(rest.split()) > 1 else ""
            version = "" if version == "Base" else version
            if section != "*UND*":
                result.defined.add(name)
            elif flags[1] != "w":
                result.undefined.add((name, version))
    return result


def read_object(path: Path) -> Object:
    """What `path` asks for and offers."""
    command = ["objdump", "--private-headers", "--dynamic-syms", "--wide", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env={**os.environ, "LC_ALL": "C"})
    return parse_objdump(done.stdout)


def missing_libraries(objects: dict[str, Object]) -> dict[str, dict[str, set[str]]]:
    """The libraries that `objects` (file name -> contents) need, that are not among them nor on
    every machine.

    Returns library -> version ("" for none) -> symbols. Symbols without a version do not say where
    they
    come from: those that no library of torch offers go into the first library asked for no version.
    """
    needed: set[str] = set().union(*(o.needed for o in objects.values()))
    absent = sorted(n for n in needed - set(objects) if not n.startswith(PRESENT_PREFIXES))
    stubs: dict[str, dict[str, set[str]]] = {n: {} for n in absent}
    offered: set[str] = set().union(*(o.defined for o in objects.values()))
    library_of: dict[str, str] = {}
    for item in objects.values():
        for library, versions in item.versions.items():
            library_of.update({v: library for v in versions if library in stubs})
    bare: set[str] = set()
    for item in objects.values():
        for symbol, version in item.undefined:
            if version in library_of:
                stubs[library_of[version]].setdefault(version, set()).add(symbol)
            elif not version and symbol not in offered and not symbol.startswith(IGNORED_PREFIXES):
                bare.add(symbol)
    unversioned = [n for n, versions in stubs.items() if not versions]
    if bare and unversioned:
        stubs[unversioned[0]][""] = bare
    return stubs


def compile_stub(library: str, versions: dict[str, set[str]], out: Path) -> None:
    """Writes `out`/`library`, a shared object with the symbols of `versions`."""
    source = [f"int {s}(void) {{ return {RETURN_VALUES.get(s, 0)}; }}" for v in versions.values() for s in sorted(v)]
    script = [
        f"{version} {{ global: {'; '.join(sorted(symbols))}; }};" for version, symbols in versions.items() if version
    ]
    with tempfile.TemporaryDirectory() as folder:
        code = Path(folder, "stub.c")
        code.write_text("\n".join(source) + "\n")
        command = [
            os.environ.get("CC", "cc"),
            "-shared",
            "-fPIC",
            "-nostdlib",
            "-w",
            "-fno-builtin",
            "-O1",
            "-o",
        ]
        command += [str(out / library), f"-Wl,-soname,{library}", str(code)]
        if script:
            versions_file = Path(folder, "versions")
            versions_file.write_text("\n".join(script) + "\n")
            command.append(f"-Wl,--version-script={versions_file}")
        subprocess.run(command, check=True)


def main() -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(description="Makes stand-ins for the CUDA libraries of PyTorch's wheel.")
    parser.add_argument("site_packages", type=Path)
    parser.add_argument("--out", type=Path, help="folder for them (default: torch/lib)")
    arguments = parser.parse_args()
    folder = arguments.site_packages / "torch" / "lib"
    out = arguments.out or folder
    out.mkdir(parents=True, exist_ok=True)
    marker = out / "moesaic-stubs.txt"
    earlier = set(marker.read_text().split()) if marker.is_file() else set()
    files = [p for p in sorted(folder.glob("*.so*")) if p.is_file() and p.name not in earlier]
    if not files:
        print(f"stub_cuda: no libraries in {folder}: is torch installed there?", file=sys.stderr)
        return 1
    stubs = missing_libraries({p.name: read_object(p) for p in files})
    for library, versions in stubs.items():
        compile_stub(library, versions, out)
    marker.write_text("\n".join(stubs) + "\n")
    symbols = sum(len(s) for versions in stubs.values() for s in versions.values())
    print(f"{len(stubs)} stand-ins with {symbols} functions in {out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
