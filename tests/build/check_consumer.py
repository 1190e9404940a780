#!/usr/bin/env python3
"""Builds and runs a stranger's project against the library.

usage: check_consumer.py installed|subdirectory SOURCE_DIR BUILD_DIR COMPILER MODEL_DIR
"""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path


def run(*command, **options):
    print("+", " ".join(str(word) for word in command), flush=True)
    return subprocess.run([str(word) for word in command], check=True, **options)


def cuda_of(build):
    """What BUILD_DIR was told about CUDA: AUTO, ON or OFF."""
    for line in (build / "CMakeCache.txt").read_text(encoding="utf-8").splitlines():
        name, _, value = line.partition("=")
        if name.partition(":")[0] == "MOESAIC_CUDA":
            return value
    return "AUTO"


def check_cuda_subdirectory(source, folder, configure):
    """A project without CUDA of its own gets ours from a subdirectory: configured whole, one unit compiled.

    Compiling every kernel again takes minutes and shows no more.
    """
    run("cmake", "-S", source / "tests" / "build" / "consumer", "-B", folder, *configure)
    targets = subprocess.run(["ninja", "-C", folder, "-t", "targets", "all"], check=True, capture_output=True, text=True)
    objects = [line.partition(":")[0] for line in targets.stdout.splitlines() if ".cu.o:" in line]
    if not objects:
        print("no device code here: CUDA was not found, or is off")
        return
    run("ninja", "-C", folder, next(name for name in objects if name.endswith("/quant_rows.cu.o")))


def check_install_rules(source, folder, configure):
    """A shared library in folders of the packager's own: consumers find its headers, the tool finds it.

    From what CMake has written: building the library once more takes minutes and shows no more.
    """
    run("cmake", "-S", source, "-B", folder, *configure, "-DBUILD_SHARED_LIBS=ON", "-DMOESAIC_CUDA=OFF",
        "-DMOESAIC_BUILD_TESTS=OFF", "-DCMAKE_INSTALL_INCLUDEDIR=include/own", "-DCMAKE_INSTALL_LIBDIR=lib/own")  # fmt: skip
    exported = "".join(path.read_text() for path in (folder / "CMakeFiles" / "Export").rglob("MoesaicTargets.cmake"))
    for text, file in (
        ('${_IMPORT_PREFIX}/include/own"', exported),
        ("ORIGIN/../lib/own", (folder / "cmake_install.cmake").read_text()),
        ("libmoesaic.so.", (folder / "build.ninja").read_text()),
    ):
        if text not in file:
            sys.exit(f"the install rules of a shared library lack {text}")


def main(arguments):
    if len(arguments) != 5 or arguments[0] not in ("installed", "subdirectory"):
        print(__doc__)
        return 2
    kind, source, build, compiler, model = arguments
    source, build = Path(source).resolve(), Path(build).resolve()
    with tempfile.TemporaryDirectory(dir=build) as folder:
        work = Path(folder)
        configure = ["-G", "Ninja", f"-DCMAKE_CXX_COMPILER={compiler}"]
        launcher = os.environ.get("CMAKE_CXX_COMPILER_LAUNCHER")
        if launcher:
            configure.append(f"-DCMAKE_CXX_COMPILER_LAUNCHER={launcher}")
        if kind == "installed":
            check_install_rules(source, work / "shared", configure)
            run("cmake", "--install", build, "--prefix", work / "prefix")
            configure += [f"-DCMAKE_PREFIX_PATH={work / 'prefix'}", "-DCMAKE_BUILD_TYPE=Release"]
        else:
            # The library's code is tested elsewhere; here only that it builds this way: without optimisation
            # and by folder, which is the quickest build.
            configure.append(f"-DMOESAIC_SOURCE_DIR={source}")
            configure += ["-DCMAKE_BUILD_TYPE=Debug", "-DCMAKE_CXX_FLAGS_DEBUG=-O0", "-DCMAKE_UNITY_BUILD=ON"]
            check_cuda_subdirectory(source, work / "cuda", [*configure, f"-DMOESAIC_CUDA={cuda_of(build)}",
                                                            "-DCMAKE_UNITY_BUILD=OFF"])  # fmt: skip
            configure.append("-DMOESAIC_CUDA=OFF")
        run("cmake", "-S", source / "tests" / "build" / "consumer", "-B", work / "build", *configure)
        run("cmake", "--build", work / "build", "-j", os.cpu_count() or 1)
        run(work / "build" / "consumer", model)
        if kind == "installed":
            tool = work / "prefix" / "bin" / "moesaic"
            run(tool, "--version")
            # Private headers must not have been installed.
            public = {work / "prefix" / "include" / "moesaic", work / "prefix" / "include" / "moesaic" / "interop"}
            stray = [p for p in (work / "prefix" / "include").rglob("*.h") if p.parent not in public]
            if stray:
                print("private headers were installed:", *stray)
                return 1
            shutil.rmtree(work / "prefix")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
