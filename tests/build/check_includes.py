#!/usr/bin/env python3
"""Checks the levels of the source tree: which folder may include which.

Each folder of src may include itself, any lower level and the public headers; a folder on the same
level is out of reach. Some folders have rooms, in an order of their own: a room may include itself
and any lower room. Public headers include only each other and the standard library, and name no
third-party type. Included files exist, and files do not include each other in a circle.

usage: check_includes.py SOURCE_DIR | check_includes.py --self-test
"""

import re
import sys
from pathlib import Path

sys.dont_write_bytecode = True  # nothing is written into the source folder
import planted  # noqa: E402

# Lowest level first.
LEVELS = [
    ["core"],
    ["numerics"],
    ["quant"],
    ["cpu", "cuda"],
    ["gate", "router", "permute", "activation"],
    ["parallel"],
    ["checkpoint", "prepare_finalize", "experts"],
    ["layer", "interop"],
]
# Rooms of a folder, lowest first. A folder listed here has no files outside its rooms.
ROOMS = {"checkpoint": ["container", "config", "binding", "reader", "convert"]}
LEVEL_OF = {folder: level for level, folders in enumerate(LEVELS) for folder in folders}

INCLUDE = re.compile(r'^\s*#\s*include\s*([<"])([^>"]+)[>"]', re.MULTILINE)
COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
# Namespaces, prefixes and macros of the dependencies and of SIMD, GPU and JSON interfaces.
THIRD_PARTY = re.compile(
    r"\b(fmt::|nlohmann\b|hwy::|HWY_\w+|CLI::|omp_\w+|testing::|benchmark::|__m(128|256|512)\w*|"
    r"cuda[A-Z]\w*|CU[a-z]+\w*|nccl[A-Z]\w*|MPI_\w+|_OPENMP)"
)


def includes_of(path):
    # Macro-driven includes (#include HWY_TARGET_INCLUDE) are invisible here, and include the file itself.
    return INCLUDE.findall(path.read_text(encoding="utf-8"))


def source_files(folder):
    return sorted(p for p in folder.rglob("*") if p.suffix in (".h", ".cc", ".cuh", ".cu"))


def check_public(root, problems):
    headers = root / "include" / "moesaic"
    for path in source_files(root / "include"):
        name = path.relative_to(root)
        for bracket, target in includes_of(path):
            if bracket == '"':
                if not (target.startswith("moesaic/") and (root / "include" / target).exists()):
                    problems.append(f"{name}: includes \"{target}\", need a public header moesaic/...")
            elif "/" in target or "." in target:
                problems.append(f"{name}: includes <{target}>, need a standard header")
        code = INCLUDE.sub("", COMMENT.sub("", path.read_text(encoding="utf-8")))
        for match in THIRD_PARTY.finditer(code):
            problems.append(f"{name}: names third-party '{match.group(0)}' in a public header")
    if not any(headers.glob("*.h")):
        problems.append("include/moesaic: no headers found")


def check_room(name, folder, source, other, target, problems):
    """source and other: parts of the paths of two files of one folder."""
    rooms = ROOMS[folder]
    if len(source) < 3 or source[1] not in rooms:
        problems.append(f"{name}: lies in no room of '{folder}', need one of {', '.join(rooms)}")
    elif other is not None and other[1] != source[1] and rooms.index(source[1]) < (
        rooms.index(other[1]) if other[1] in rooms else len(rooms)
    ):
        problems.append(
            f"{name}: room '{source[1]}' includes \"{target}\" of '{other[1]}', which is not below it"
        )


def check_source(root, problems):
    """Levels and existence; returns the graph of quoted includes inside src."""
    graph = {}
    for path in source_files(root / "src"):
        parts = path.relative_to(root / "src").parts
        folder = parts[0]
        name = path.relative_to(root)
        edges = graph.setdefault(path, [])
        if folder not in LEVEL_OF:
            problems.append(f"{name}: folder '{folder}' has no level; add it to {Path(__file__).name}")
            continue
        if folder in ROOMS:
            check_room(name, folder, parts, None, None, problems)
        for bracket, target in includes_of(path):
            if bracket == "<" or target.startswith("moesaic/"):
                if target.startswith("moesaic/") and not (root / "include" / target).exists():
                    problems.append(f"{name}: includes \"{target}\", which does not exist")
                continue
            resolved = next(
                (base / target for base in (path.parent, root / "src") if (base / target).exists()), None
            )
            if resolved is None:
                if not target.startswith("hwy/"):
                    problems.append(f"{name}: includes \"{target}\", which does not exist")
                continue
            resolved = resolved.resolve()
            edges.append(resolved)
            other_parts = resolved.relative_to((root / "src").resolve()).parts
            other = other_parts[0]
            if other == folder:
                if folder in ROOMS:
                    check_room(name, folder, parts, other_parts, target, problems)
                continue
            if LEVEL_OF.get(other, len(LEVELS)) >= LEVEL_OF[folder]:
                problems.append(
                    f"{name}: folder '{folder}' includes \"{target}\" of '{other}', which is not below it"
                )
    return graph


def check_circles(root, graph, problems):
    graph = {path.resolve(): edges for path, edges in graph.items()}
    state = {}

    def visit(path, trail):
        state[path] = "open"
        for target in graph.get(path, []):
            # Highway's foreach_target makes a source include itself on purpose.
            if target == path:
                continue
            if state.get(target) == "open":
                names = [p.name for p in trail[trail.index(target) :]] if target in trail else [target.name]
                problems.append(f"{path.relative_to(root.resolve())}: includes in a circle: {' -> '.join(names)}")
            elif target not in state:
                visit(target, trail + [target])
        state[path] = "done"

    for path in graph:
        if path not in state:
            visit(path, [path])


def check(root):
    problems = []
    check_public(root, problems)
    graph = check_source(root, problems)
    check_circles(root, graph, problems)
    return problems, len(graph)


def all_of_them(expected, problems):
    return bool(problems) and all(expected in problem for problem in problems)


def self_test():
    """Plants one violation of each kind in a small tree; each must be reported, and nothing else."""
    good = {
        "include/moesaic/a.h": "#include <vector>\n#include \"moesaic/b.h\"\n// fmt::format is fine here\n",
        "include/moesaic/b.h": "#pragma once\n",
        "src/core/low.h": '#include "moesaic/a.h"\n',
        "src/router/mid.cc": '#include <fmt/format.h>\n#include "core/low.h"\n#include "router/own.h"\n',
        "src/router/own.h": "#pragma once\n",
        "src/layer/top.cc": '#include "router/own.h"\n#include "checkpoint/config/mid.h"\n',
        "src/checkpoint/container/low.h": '#include "core/low.h"\n',
        "src/checkpoint/config/mid.h": '#include "checkpoint/container/low.h"\n',
    }
    faults = {
        "upward": ({"src/core/bad.cc": '#include "router/own.h"\n'}, "not below it"),
        "upward from device code": (
            {"src/quant/bad.cuh": '#include "cuda/ptx.cuh"\n', "src/cuda/ptx.cuh": "#pragma once\n"},
            "not below it",
        ),
        "upward between rooms": (
            {"src/checkpoint/container/bad.cc": '#include "checkpoint/config/mid.h"\n'},
            "room 'container' includes",
        ),
        "file outside the rooms": ({"src/checkpoint/bad.cc": "\n"}, "lies in no room"),
        "sideways": ({"src/gate/bad.cc": '#include "router/own.h"\n'}, "not below it"),
        "unknown folder": ({"src/attic/bad.cc": "\n"}, "has no level"),
        "missing file": ({"src/core/bad.cc": '#include "core/gone.h"\n'}, "does not exist"),
        "third-party include": ({"include/moesaic/bad.h": "#include <nlohmann/json.hpp>\n"}, "standard header"),
        "third-party name": ({"include/moesaic/bad.h": "void f(hwy::float16_t);\n"}, "third-party"),
        "private include": ({"include/moesaic/bad.h": '#include "core/low.h"\n'}, "need a public header"),
        "circle": (
            {"src/core/x.h": '#include "core/y.h"\n', "src/core/y.h": '#include "core/x.h"\n'},
            "circle",
        ),
    }
    return planted.self_test(good, faults, lambda root: check(root)[0], all_of_them)


if __name__ == "__main__":
    sys.exit(planted.main(__doc__, check, self_test, "source files"))
