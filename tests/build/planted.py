"""What the checks of the tree share: a main program, and self-tests that plant faults in a small tree."""

import sys
import tempfile
from pathlib import Path


def write_tree(root, files):
    for path, text in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text, encoding="utf-8")


def one_of_them(expected, problems):
    return any(expected in problem for problem in problems)


def self_test(good, planted, problems_of, found=one_of_them):
    """Exit status: 0 where `good` alone has no problem and each planted fault is found.

    good: path -> text. planted: name -> (path -> text, written over `good`; what found(expected, problems) looks
    for). problems_of(root): the list that the check makes.
    """
    cases = {"nothing planted": ({}, None), **planted}
    failures = []
    for name, (changes, expected) in cases.items():
        with tempfile.TemporaryDirectory() as folder:
            write_tree(Path(folder), {**good, **changes})
            problems = problems_of(Path(folder))
        if problems != [] if expected is None else not found(expected, problems):
            failures.append(f"{name}: expected {expected!r}, got {problems}")
    for failure in failures:
        print("self-test:", failure)
    print(f"self-test: {len(cases) - len(failures)} of {len(cases)} cases as expected")
    return 1 if failures else 0


def main(usage, check, check_itself, counted):
    """Runs check(root) -> (problems, how many were looked at), or check_itself() -> exit status."""
    arguments = sys.argv[1:]
    if arguments == ["--self-test"]:
        return check_itself()
    if len(arguments) != 1:
        print(usage)
        return 2
    problems, number = check(Path(arguments[0]).resolve())
    for problem in problems:
        print(problem)
    print(f"{number} {counted}, {len(problems)} problem(s)")
    return 1 if problems or number == 0 else 0
