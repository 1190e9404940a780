#!/usr/bin/env python3
"""Compiles snippets: headers that must stand alone, code that must be refused.

usage: check_compile.py headers COMPILER SOURCE_DIR include|src
       check_compile.py refused COMPILER SOURCE_DIR

refused: every file of must_not_compile must fail to compile with the error that its line
"// EXPECT: regular expression" states; the same file with -DCONTROL must compile, which shows that it
fails for that reason and not for a missing include.
"""

import os
import platform
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

FLAGS = ["-std=c++20", "-Wall", "-Wextra", "-Wconversion", "-Wshadow", "-Werror"]

# The library's floor, and all that the bf16 tier asks for.
X86_TIERS = [
    ["-march=x86-64-v2"],
    ["-march=icelake-server", "-mavx512bf16", "-mavxvnni", "-DHWY_WANT_AVX3_DL"],
]
SIMD_FLAGS = X86_TIERS if platform.machine() in ("x86_64", "AMD64") else [[]]


def compile_text(compiler, text, root, with_src, extra=()):
    command = [compiler, *FLAGS, f"-I{root / 'include'}"]
    if with_src:
        command += [f"-I{root / 'src'}", "-fopenmp", "-DFMT_HEADER_ONLY"]
    command += ["-fsyntax-only", "-x", "c++", *extra, "-"]
    result = subprocess.run(command, input=text, capture_output=True, text=True)
    return result.returncode, result.stderr


def compile_header(compiler, name, root, with_src, extra=()):
    """The header alone, as a file that a compiler cache (CMAKE_CXX_COMPILER_LAUNCHER) knows again."""
    stem = "_".join([*name.with_suffix("").parts, *(word.strip("-=") for word in extra[-1:])])
    path = Path("headers_alone") / f"{stem}.cc"
    path.parent.mkdir(exist_ok=True)
    # Twice: a header without an include guard redefines itself.
    path.write_text(f'#include "{name}"\n#include "{name}"\n', encoding="utf-8")
    launcher = os.environ.get("CMAKE_CXX_COMPILER_LAUNCHER")
    command = [*([launcher] if launcher else []), compiler, *FLAGS, f"-I{root / 'include'}"]
    if with_src:
        command += [f"-I{root / 'src'}", "-fopenmp", "-DFMT_HEADER_ONLY"]
    command += [*extra, "-O0", "-c", str(path), "-o", str(path.with_suffix(".o"))]
    result = subprocess.run(command, capture_output=True, text=True)
    return result.returncode, result.stderr


def check_headers(compiler, root, area):
    base = root / area
    # tier-inl.h is the body of the tier files and includes itself; all others open alone.
    headers = sorted(p for p in base.rglob("*.h") if p.name != "tier-inl.h")

    def one(header):
        name = header.relative_to(base)
        if not name.name.endswith("-inl.h"):
            return name, compile_header(compiler, name, root, area == "src")
        # SIMD files: for the build's floor, and where the compiler knows it for the tier that has more
        # in them. They are there for others to call.
        for flags in SIMD_FLAGS:
            result = compile_header(compiler, name, root, True, ["-Wno-unused-function", *flags])
            if result[0] != 0:
                break
        return name, result

    failed = 0
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for name, (code, errors) in pool.map(one, headers):
            if code != 0:
                failed += 1
                print(f"{name} does not compile alone:\n{errors}")
    print(f"{len(headers)} headers of {area}, {failed} do not compile alone")
    return 1 if failed or not headers else 0


def check_refused(compiler, root):
    files = sorted((root / "tests" / "build" / "must_not_compile").glob("*.cc"))
    failed = 0
    for path in files:
        text = path.read_text(encoding="utf-8")
        expected = re.search(r"^// EXPECT: (.+)$", text, re.MULTILINE)
        control, control_errors = compile_text(compiler, text, root, False, ["-DCONTROL"])
        code, errors = compile_text(compiler, text, root, False)
        if expected is None:
            problem = "has no line // EXPECT: ..."
        elif control != 0:
            problem = f"does not compile with -DCONTROL:\n{control_errors}"
        elif code == 0:
            problem = "compiles, and must not"
        elif not re.search(expected.group(1), errors):
            problem = f"is refused for another reason than '{expected.group(1)}':\n{errors}"
        else:
            continue
        failed += 1
        print(f"{path.name} {problem}")
    print(f"{len(files)} snippets that must not compile, {failed} problem(s)")
    return 1 if failed or not files else 0


def main(arguments):
    if len(arguments) == 4 and arguments[0] == "headers" and arguments[3] in ("include", "src"):
        return check_headers(arguments[1], Path(arguments[2]), arguments[3])
    if len(arguments) == 3 and arguments[0] == "refused":
        return check_refused(arguments[1], Path(arguments[2]))
    print(__doc__)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
