"""Shows that the Python tests notice when the package is wrong.

    python run_faults.py PACKAGE EXTENSION [--tested] [--gpu] [FAULT...]

PACKAGE: an installed `moesaic` folder. EXTENSION: the same extension with fault points (the target `_core_faults`).
For each fault of fault_list.py its tests must pass as they are (with --tested all tests just did, and these are not
run once more), must be at least one, and must fail with the fault:
a fault point of the binding is switched on by MOESAIC_FAULT, a fault of a Python file is an edit of a copy. Every
fault point in python/src must be listed, and every listed text must stand in its file once. --gpu: the faults that
only a GPU notices, and no others.

Each run is a fork of one process that has imported the frameworks already, but not the package.
"""

from __future__ import annotations

import importlib
import os
import pathlib
import re
import sys
import tempfile
from collections.abc import Iterator

from fault_list import BINDING, FILES, ON_GPU

HERE = pathlib.Path(__file__).resolve().parent
Tests = tuple[str, str]


def fault_points() -> set[str]:
    """Names of all MOESAIC_FAULT in the binding."""
    source = HERE.parent / "src"
    return {n for f in source.glob("*.[ch]*") for n in re.findall(r"MOESAIC_FAULT\((\w+)\)", f.read_text())}


def copied(
    package: pathlib.Path, extension: pathlib.Path | None, edit: tuple[str, str, str] | None, into: pathlib.Path
) -> pathlib.Path:
    """A folder to import `moesaic` from: the package, with another extension or with one edit."""
    folder = into / "moesaic"
    folder.mkdir(parents=True)
    # What the wheel brings along is found beside the package.
    libraries = package.parent / "moesaic.libs"
    if libraries.is_dir():
        (into / libraries.name).symlink_to(libraries)
    for path in package.iterdir():
        if path.is_dir():
            continue
        target = folder / path.name
        if path.name.startswith("_core.") and path.suffix == ".so":
            target.symlink_to(extension or path)
        elif extension and ".so" in path.suffixes:
            target.symlink_to(path)
        elif path.suffix in (".py", ".pyi", ".typed"):
            target.write_text(path.read_text())
        else:
            target.symlink_to(path)
    if edit:
        name, old, new = edit
        text = (folder / name).read_text()
        (folder / name).write_text(text.replace(old, new))
    return into


def in_child(site: pathlib.Path, tests: Tests, fault: str, output: pathlib.Path) -> int:
    """Runs the tests in a fork and returns its process id."""
    pid = os.fork()
    if pid:
        return pid
    code = 99
    try:
        with output.open("w") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        os.environ |= {"PYTHONPATH": str(site), "MOESAIC_FAULT": fault, "PYTHONDONTWRITEBYTECODE": "1"}
        sys.path[:0] = [str(site), str(HERE)]
        os.chdir(site)
        import pytest

        code = int(
            pytest.main(
                [
                    "-q",
                    "-x",
                    "-p",
                    "no:cacheprovider",
                    "--rootdir",
                    str(HERE),
                    "-c",
                    os.devnull,
                    str(HERE / tests[0]),
                    "-k",
                    tests[1],
                ]
            )
        )
    finally:
        os._exit(code)


def run(jobs: list[tuple[str, pathlib.Path, Tests, str]], scratch: pathlib.Path) -> Iterator[tuple[str, int, str]]:
    """(name, pytest's exit code, its output) of (name, site, tests, fault), as many at once as there are cores."""
    waiting, running = list(reversed(jobs)), {}
    while waiting or running:
        while waiting and len(running) < (os.cpu_count() or 1):
            name, site, tests, fault = waiting.pop()
            output = scratch / f"{len(waiting)}.log"
            running[in_child(site, tests, fault, output)] = (name, output)
        pid, status = os.wait()
        name, output = running.pop(pid)
        yield name, os.waitstatus_to_exitcode(status), output.read_text()


def main() -> int:
    """0 if every fault is caught."""
    package, extension = (pathlib.Path(a).resolve() for a in sys.argv[1:3])
    chosen = {argument for argument in sys.argv[3:] if argument not in ("--tested", "--gpu")}
    # A driver that this process initialised would not work in its forks.
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    problems = [f"{n}: a fault point in no list" for n in sorted(fault_points() - set(BINDING) - set(ON_GPU))]
    problems += [f"{n}: no fault point of that name" for n in sorted({*BINDING, *ON_GPU} - fault_points())]
    for name, (file, old, *_) in FILES.items():
        count = (package / file).read_text().count(old)
        if count != 1:
            problems.append(f"{name}: its text stands {count} times in {file}, need once")
    for name in (
        "numpy",
        "ml_dtypes",
        "pytest",
        "torch",
        "torch._dynamo.testing",
        "transformers",
        "transformers.models.auto.modeling_auto",
    ):
        importlib.import_module(name)
    with tempfile.TemporaryDirectory() as folder:
        scratch = pathlib.Path(folder)
        plain = copied(package, None, None, scratch / "plain")
        faulty = copied(package, extension, None, scratch / "binding")
        tests: dict[str, Tests] = dict(BINDING) | {n: (row[3], row[4]) for n, row in FILES.items()}
        if "--gpu" in sys.argv[3:]:
            tests = dict(ON_GPU)
        if chosen:
            tests = {n: t for n, t in tests.items() if n in chosen}
        baselines = [(f"{file} -k {words!r}", plain, (file, words), "") for file, words in sorted(set(tests.values()))]
        if "--tested" in sys.argv[3:]:
            baselines = []
        for name, code, output in run(baselines, scratch):
            if code != 0:
                problems.append(f"{name}: ends with {code} without a fault")
                print(output[-1500:])
        jobs = []
        for name in tests:
            point = name not in FILES
            site = faulty if point else copied(package, None, FILES[name][:3], scratch / name)
            jobs.append((name, site, tests[name], name if point else ""))
        caught = 0
        for name, code, output in run(jobs, scratch):
            caught += code == 1
            # The first line of the failure, so that a fault that is caught for another reason is seen.
            why = next((line[4:].strip() for line in output.splitlines() if line.startswith("E   ")), "")
            print(
                f"{name:<40} {f'caught: {why[:100]}' if code == 1 else f'PROBLEM: pytest ended with {code}'}",
                flush=True,
            )
            if code != 1:
                problems.append(f"{name}: {'SURVIVED' if code == 0 else f'ended with {code}'}")
                print(output[-1500:])
    print(f"\n{caught} of {len(tests)} faults caught")
    for problem in problems:
        print("problem:", problem)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
