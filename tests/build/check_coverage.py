#!/usr/bin/env python3
"""Checks docs/coverage.md, the table of what the original layer offers and what does it here.

- Every row is there, once and in order (SIZES), with one of the known verdicts.
- The public names of a row are declared in the header that stands behind them, and so is every name in
  its note. A row that says that something is computed, in whole or in part, has a name.
- The numbers beside the verdicts, at the head of the page, are those of the rows.

usage: check_coverage.py SOURCE_DIR | check_coverage.py --self-test
"""

import re
import sys
from collections import Counter
from pathlib import Path

sys.dont_write_bytecode = True  # nothing is written into the source folder
import planted  # noqa: E402
from check_public_names import qualified_names  # noqa: E402

PAGE = "docs/coverage.md"
HEADERS = "include/moesaic"
# Rows of each part: "2a.1" to "2a.59".
SIZES = {"0": 24, "1": 55, "2a": 59, "2b": 35, "2c": 38, "3": 36, "4": 38}
VERDICTS = ("F", "P", "D", "S", "M", "–")
COMPUTED = {"F", "P", "D", "S"}

ROW = re.compile(r"^\|\s*(\w+\.\d+)\s*\|")
CODE = re.compile(r"`([^`]*)`")
# `A::b`, `c` (gate.h)
NAMES = re.compile(r"(`[\w:]+`(?:, `[\w:]+`)*) \(([\w/]+\.h)\)")


def cells_of(line):
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


def declared_in(root):
    """Qualified names of each header, and every name under which one of them may be mentioned."""
    headers, mentions = {}, set()
    for path in sorted((root / HEADERS).rglob("*.h")):
        names = {prefix + name for name, _, _, prefix in qualified_names(path)}
        headers[str(path.relative_to(root / HEADERS))] = names
        for name in names:
            parts = name.split("::")
            mentions.update("::".join(parts[i:]) for i in range(len(parts)))
    return headers, mentions


def check_names(cell, headers):
    """Problems of the cell with public names, and whether it has any."""
    if cell == "–":
        return [], False
    problems = []
    for group in cell.split("; "):
        match = NAMES.fullmatch(group)
        if not match:
            problems.append(f"got '{group}', need names as `A::b`, `c` (header.h), or –")
        elif match.group(2) not in headers:
            problems.append(f"the header {match.group(2)} does not exist")
        else:
            for name in CODE.findall(match.group(1)):
                if name not in headers[match.group(2)]:
                    problems.append(f"'{name}' is not declared in {match.group(2)}")
    return problems, True


def check_row(cells, headers, mentions):
    if len(cells) != 7:
        return [f"got {len(cells)} cells, need 7"]
    _, _, names, cpu, hopper, ranks, note = cells
    verdicts = [cpu, hopper, *ranks.split("/")]
    problems = [f"got the verdict '{v}', need one of {' '.join(VERDICTS)}" for v in verdicts if v not in VERDICTS]
    if len(verdicts) > 4:
        problems.append(f"got the ranks '{ranks}', need one verdict or CPU/GPU")
    found, named = check_names(names, headers)
    problems += found
    if not named and COMPUTED & set(verdicts):
        problems.append("something is computed, but by nothing that is named")
    if named and not COMPUTED & set(verdicts):
        problems.append("has a name, but nothing is computed")
    problems += [f"the note names '{name}', which no header declares"
                 for name in CODE.findall(note) if name not in mentions]
    return problems


def check(root, sizes=None):
    sizes = sizes or SIZES
    page = root / PAGE
    if not page.is_file():
        return [f"{PAGE}: does not exist"], 0
    headers, mentions = declared_in(root)
    problems, found = [], []
    counts = {"CPU": Counter(), "Hopper": Counter()}
    stated = {}
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1):
        cells = cells_of(line)
        if line.startswith("|") and cells[0] in VERDICTS and len(cells) == 4:
            stated[cells[0]] = (cells[2], cells[3])
        if not ROW.match(line):
            continue
        found.append(cells[0])
        problems += [f"{PAGE}:{number}: {cells[0]}: {p}" for p in check_row(cells, headers, mentions)]
        if len(cells) == 7:
            counts["CPU"][cells[3]] += 1
            counts["Hopper"][cells[4]] += 1
    expected = [f"{part}.{i}" for part, size in sizes.items() for i in range(1, size + 1)]
    for row in expected:
        if found.count(row) != 1:
            problems.append(f"{PAGE}: row {row} is there {found.count(row)} times, need 1")
    problems += [f"{PAGE}: row {row} is not one of the table" for row in found if row not in set(expected)]
    if not problems and found != expected:
        problems.append(f"{PAGE}: rows are not in order")
    for verdict in VERDICTS:
        numbers = (str(counts["CPU"][verdict]), str(counts["Hopper"][verdict]))
        if stated.get(verdict) != numbers:
            problems.append(f"{PAGE}: verdict {verdict}: says {stated.get(verdict)}, the rows have {numbers}")
    return problems, len(found)


GOOD_HEADERS = {
    "include/moesaic/gate.h": (
        "namespace moesaic {\nclass Gate {\n public:\n  static int create(int n);\n"
        "  struct Options {\n    int depth = 0, width = 0;\n  };\n\n private:\n  int hidden_ = 0;\n};\n"
        "enum class Kind { kOne, kTwo };\n}\n"
    ),
    "include/moesaic/interop/order.h": "namespace moesaic {\nint order(int n);\n}\n",
}
GOOD_PAGE = """# Coverage

| verdict | meaning | CPU | Hopper |
|---|---|---|---|
| F | full | 2 | 1 |
| P | partial | 0 | 0 |
| D | different | 0 | 0 |
| S | standalone | 1 | 1 |
| M | missing | 1 | 2 |
| – | not applicable | 0 | 0 |

| # | the original | here | CPU | Hopper | ranks | note |
|---|---|---|---|---|---|---|
| 0.1 | a `thing` of theirs | `Gate::create`, `Kind::kTwo` (gate.h) | F | F | F/M | see `Options::width` |
| 0.2 | b | `order` (interop/order.h); `Gate::Options::width` (gate.h) | S | S | – | |
| 1.1 | c | – | M | M | M | |
| 1.2 | d | `Gate` (gate.h) | F | M | – | |
"""


def self_test():
    replaced = {
        "a name is gone": ("`Gate::create`", "`Gate::make`", "'Gate::make' is not declared in gate.h"),
        "a private name": ("`Gate::create`", "`Gate::hidden_`", "'Gate::hidden_'"),
        "an enumerator is gone": ("kTwo", "kThree", "'Kind::kThree'"),
        "a name of another header": ("`order` (interop/order.h)", "`order` (gate.h)", "not declared in gate.h"),
        "a header is gone": ("interop/order.h", "interop/orders.h", "interop/orders.h does not exist"),
        "a note's name is gone": ("`Options::width`", "`Options::height`", "the note names 'Options::height'"),
        "a cell of another form": ("| `Gate` (gate.h) |", "| Gate, gate.h |", "need names as"),
        "an unknown verdict": ("| F | M | – | |", "| X | M | – | |", "the verdict 'X'"),
        "an unknown verdict of ranks": ("F/M", "F/O", "the verdict 'O'"),
        "a missing row": ("| 0.2 | b |", "| b | b |", "row 0.2 is there 0 times"),
        "a doubled row": ("| 1.1 | c |", "| 0.2 | c |", "row 0.2 is there 2 times"),
        "a row too many": ("| 1.2 | d |", "| 1.3 | d |", "row 1.3 is not one"),
        "a missing cell": ("| F | M | – | |", "| F | M | – |", "got 6 cells"),
        "computed by nothing": ("| `Gate` (gate.h) |", "| – |", "by nothing that is named"),
        "named for nothing": ("| c | – |", "| c | `Gate` (gate.h) |", "nothing is computed"),
        "a wrong number": ("| S | standalone | 1 | 1 |", "| S | standalone | 2 | 1 |", "verdict S"),
    }
    for name, (old, _, _) in replaced.items():
        assert old in GOOD_PAGE, name
    faults = {name: ({PAGE: GOOD_PAGE.replace(old, new, 1)}, expected) for name, (old, new, expected) in replaced.items()}
    return planted.self_test({**GOOD_HEADERS, PAGE: GOOD_PAGE}, faults, lambda root: check(root, {"0": 2, "1": 2})[0])


if __name__ == "__main__":
    sys.exit(planted.main(__doc__, check, self_test, "rows"))
