#!/usr/bin/env python3
"""Checks tests/build/coverage_tests.txt: which tests show the rows of docs/coverage.md whose verdict is another than in
the first audit of the library (CHANGED).

- Every row that is named is one of the page's, every test is in the sources (TEST, TEST_F or TEST_P), and no line
  names the same test twice.
- Every row of CHANGED has a line with at least one test.

usage: check_coverage_tests.py SOURCE_DIR | check_coverage_tests.py --self-test
"""

import re
import sys
from pathlib import Path

sys.dont_write_bytecode = True  # nothing is written into the source folder
import planted  # noqa: E402

LIST = "tests/build/coverage_tests.txt"
PAGE = "docs/coverage.md"
CHANGED = {
    "0": "1-5 9-18 21 24",
    "1": "1-2 12 15 17-20 25-26 34-35 38 41-42 44-50 52 54-55",
    "2a": "1 3-4 7 10 12 19 26-27 29-31 33 36 40 44-48 50-52 55 57 59",
    "2b": "1-3 6-8 10 16-17 24-25 27-29 32 34-35",
    "2c": "1-3 5 15-29 31-33 36 38",
    "3": "1-4 6-9 11-18 20-34 36",
    "4": "1-15 17 20-21 24-25 27 29-31 33-35 37",
}
ROW = re.compile(r"^\|\s*(\w+\.\d+)\s*\|", re.MULTILINE)
TEST = re.compile(r"^TEST(?:_[FP])?\((\w+), (\w+)\)", re.MULTILINE)


def changed_rows(parts):
    rows = []
    for part, ranges in parts.items():
        for item in ranges.split():
            first, _, last = item.partition("-")
            rows += [f"{part}.{i}" for i in range(int(first), int(last or first) + 1)]
    return rows


def check(root, changed=None):
    changed = changed_rows(CHANGED) if changed is None else changed
    rows = set(ROW.findall((root / PAGE).read_text(encoding="utf-8")))
    tests = {".".join(name) for path in sorted((root / "tests").rglob("*.cc"))
             for name in TEST.findall(path.read_text(encoding="utf-8"))}
    problems, shown = [], set()
    for number, line in enumerate((root / LIST).read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip() or line.startswith("#"):
            continue
        left, colon, right = line.partition(":")
        named, listed = left.split(), right.split()
        where = f"{LIST}:{number}"
        if not colon or not named or not listed:
            problems.append(f"{where}: got '{line}', need 'rows: tests'")
            continue
        problems += [f"{where}: {PAGE} has no row {row}" for row in named if row not in rows]
        problems += [f"{where}: no source has the test {test}" for test in listed if test not in tests]
        if len(set(listed)) != len(listed):
            problems.append(f"{where}: names a test twice")
        shown.update(named)
    problems += [f"{LIST}: row {row} has no test" for row in changed if row not in shown]
    return problems, len(shown)


def self_test():
    good = {LIST: "# a\n0.1 0.2: Gate.Works Gate.Runs\n", PAGE: "| 0.1 | x |\n| 0.2 | y |\n| 0.3 | z |\n",
            "tests/gate/a_test.cc": "TEST(Gate, Works) {}\nTEST_P(Gate, Runs) {}\n"}
    faults = {
        "a test is gone": ({"tests/gate/a_test.cc": "TEST(Gate, Works) {}\n"}, "no source has the test Gate.Runs"),
        "a row is gone": ({PAGE: "| 0.1 | x |\n"}, "has no row 0.2"),
        "a row without a test": ({LIST: "0.1: Gate.Works\n"}, "row 0.2 has no test"),
        "no tests": ({LIST: "0.1 0.2:\n"}, "need 'rows: tests'"),
        "a test twice": ({LIST: "0.1 0.2: Gate.Works Gate.Works\n"}, "twice"),
    }
    return planted.self_test(good, faults, lambda root: check(root, changed_rows({"0": "1-2"}))[0])


if __name__ == "__main__":
    sys.exit(planted.main(__doc__, check, self_test, "rows with tests"))
