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


def build_settings(build):
    """What decides the flags that BUILD_DIR compiles the library with."""
    cache = {}
    for line in (build / "CMakeCache.txt").read_text(encoding="utf-8").splitlines():
        name, _, value = line.partition("=")
        cache[name.partition(":")[0]] = value
    kind = cache["CMAKE_BUILD_TYPE"].upper()
    wanted = ("CMAKE_BUILD_TYPE", "MOESAIC_WERROR", "MOESAIC_FAULT_INJECTION", "MOESAIC_CUDA", "CMAKE_CXX_FLAGS",
              f"CMAKE_CXX_FLAGS_{kind}", f"CMAKE_CUDA_FLAGS_{kind}")  # fmt: skip
    return {name: cache[name] for name in wanted if cache.get(name)}


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
            run("cmake", "--install", build, "--prefix", work / "prefix")
            configure += [f"-DCMAKE_PREFIX_PATH={work / 'prefix'}", "-DCMAKE_BUILD_TYPE=Release"]
        else:
            # The library's code is tested elsewhere; here only that it builds this way: with a compiler
            # cache by the flags of the build under test, whose objects are in the cache; else without
            # optimisation, which is the quicker build.
            configure.append(f"-DMOESAIC_SOURCE_DIR={source}")
            if launcher:
                configure += [f"-D{name}={value}" for name, value in build_settings(build).items()]
            else:
                configure += ["-DCMAKE_BUILD_TYPE=Debug", "-DCMAKE_CXX_FLAGS_DEBUG=-O0", "-DCMAKE_UNITY_BUILD=ON"]
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
