#!/usr/bin/env python3
"""Shows that the tests notice when the library computes wrongly.

Every tests/faults/<folder>.list names faults, one a line: FAULT TEST_BINARY GTEST_FILTER. For each, the
filtered tests must pass as they are (those of a binary run together), must be at least one, and must fail when the environment variable
MOESAIC_FAULT is the fault's name. A line that ends in `may_skip` is about code that not every machine can
run: there the tests may be skipped. One that ends in `needs FLAG` is about code of a tier that only processors with
that flag of /proc/cpuinfo choose: elsewhere its tests pass, and it is skipped. Every fault point in the source must be listed, and every listed
fault must exist in the source.

Faults in kernels (MOESAIC_CUDA_FAULT, tests/faults/cuda.list) are run with --gpu, and then no others; without a
Hopper GPU all of them are skipped, with the tests' reason. BUILD_DIR may then be a folder made by
`scripts/gpu package`, which has the lists (as SOURCE_DIR/tests/faults) but no source.

usage: run_faults.py [--gpu] SOURCE_DIR BUILD_DIR [FAULT...]
"""

import os
import re
import subprocess
import sys
import tempfile
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

MIN_FAULTS = 20
TIMEOUT_S = 300
SKIPPED = "skipped: this machine cannot run what the fault is in"
FAULT_POINT = re.compile(r"MOESAIC_(?:CUDA_)?FAULT\(\s*(\w+)[,)]")
GPU_LIST = "cuda.list"
GPU_TIMEOUT_S = 120
# Each takes a few GB of an 80 GB device at most, and one CPU.
GPU_WORKERS = 8
COMMENT = re.compile(r"//[^\n]*")


def fault_points(source):
    points = {}
    for path in sorted(path for folder in ("src", "tools") for path in (source / folder).rglob("*")):
        # fault.h defines the macro; its parameter is no fault.
        if path.suffix not in (".h", ".cc", ".cuh", ".cu") or path.name in ("fault.h", "fault.cuh"):
            continue
        for name in FAULT_POINT.findall(COMMENT.sub("", path.read_text(encoding="utf-8"))):
            points.setdefault(name, path.relative_to(source))
    return points


def read_lists(source, problems):
    """Fault -> (test binary, filter, whether its tests may be skipped, processor flag, whether it is in a kernel)."""
    faults = {}
    for path in sorted((source / "tests" / "faults").glob("*.list")):
        on_gpu = path.name == GPU_LIST
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            words = line.split("#")[0].split()
            if not words:
                continue
            may_skip = words[3:] == ["may_skip"]
            flag = words[4] if len(words) == 5 and words[3] == "needs" else None
            if len(words) != 3 and not may_skip and flag is None:
                problems.append(
                    f"{path.name}:{number}: need FAULT TEST_BINARY GTEST_FILTER [may_skip | needs FLAG], got: {line}"
                )
            elif words[0] in faults:
                problems.append(f"{path.name}:{number}: {words[0]} is listed twice")
            else:
                faults[words[0]] = (words[1], words[2], may_skip or on_gpu, flag, on_gpu)
    return faults


def find_binary(build, name):
    # A package has its programs side by side.
    folder = build / "tests" if (build / "tests").is_dir() and not (build / name).is_file() else build
    found = sorted(p for p in folder.rglob(name) if p.is_file() and os.access(p, os.X_OK))
    return found[0] if found else None


# Of every test: where files that scripts write for tests are kept (tests/checkpoint/generated_files.h).
shared = {}


def run_tests(binary, gtest_filter, fault, cwd, timeout=TIMEOUT_S):
    """(tests run, whether they passed, end of the output)"""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("GTEST_")}
    environment.pop("MOESAIC_FAULT", None)
    # Small teams: two faults run side by side.
    environment.setdefault("OMP_NUM_THREADS", "2")
    environment.update(shared)
    command = [str(binary), f"--gtest_filter={gtest_filter}", "--gtest_brief=1"]
    if fault:
        environment["MOESAIC_FAULT"] = fault
        # The first failure is enough.
        command.append("--gtest_throw_on_failure")
    try:
        result = subprocess.run(
            command, env=environment, cwd=cwd, capture_output=True, text=True, errors="replace", timeout=timeout
        )
    except subprocess.TimeoutExpired:
        return 0, False, f"no end within {timeout} s"
    ran = re.search(r"\[==========\] (\d+) tests? from", result.stdout)
    skipped = re.search(r"\[  SKIPPED \] (\d+) test", result.stdout)
    count = (int(ran.group(1)) if ran else 0) - (int(skipped.group(1)) if skipped else 0)
    return count, result.returncode == 0, (result.stdout + result.stderr)[-1500:]


def count_tests(binary, gtest_filter, cwd):
    """run_tests' answer for tests that have passed."""
    command = [str(binary), f"--gtest_filter={gtest_filter}", "--gtest_list_tests"]
    result = subprocess.run(command, cwd=cwd, capture_output=True, text=True, errors="replace", timeout=TIMEOUT_S)
    # Suites stand at the margin, their tests are indented.
    return sum(line.startswith("  ") for line in result.stdout.splitlines()), result.returncode == 0, result.stdout[-1500:]


class Baselines:
    """Tests without a fault, each once, however many workers ask for it."""

    def __init__(self, build, faults):
        self.build, self.cache, self.lock = build, {}, threading.Lock()
        self.together = {}  # binary name -> filters that can be joined and cannot be skipped
        for binary_name, gtest_filter, may_skip, _ in faults:
            if not may_skip and "-" not in gtest_filter:
                self.together.setdefault(binary_name, set()).add(gtest_filter)

    def once(self, key, run):
        with self.lock:
            first = key not in self.cache
            future = self.cache.setdefault(key, Future())
        if first:
            future.set_result(run())
        return future.result()

    def __call__(self, binary, gtest_filter):
        filters = self.together.get(binary.name, set())
        if gtest_filter in filters:
            joined = ":".join(sorted(filters))
            _, passed, _ = self.once((binary,), lambda: run_tests(binary, joined, None, self.build, 2 * TIMEOUT_S))
            if passed:
                return self.once((binary, gtest_filter), lambda: count_tests(binary, gtest_filter, self.build))
        return self.once((binary, gtest_filter), lambda: run_tests(binary, gtest_filter, None, self.build))


def processor_flags():
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return set()
    found = re.search(r"^flags\s*:(.*)$", text, re.MULTILINE)
    return set(found.group(1).split()) if found else set()


def check_fault(build, name, binary_name, gtest_filter, may_skip, flag, baseline, timeout):
    if flag is not None and flag not in processor_flags():
        return name, SKIPPED, f"needs {flag}"
    binary = find_binary(build, binary_name)
    if binary is None:
        return name, f"no test binary {binary_name} in the build", ""
    count, passed, output = baseline(binary, gtest_filter)
    if may_skip and passed and count == 0 and "[  SKIPPED ]" in output:
        reason = re.search(r"needs a Hopper GPU: .*", output)
        return name, SKIPPED, reason.group() if reason else ""
    if count < 1:
        return name, f"the filter {gtest_filter} runs no test", output
    if not passed:
        return name, "the tests fail without the fault", output
    _, passed, output = run_tests(binary, gtest_filter, name, build, timeout)
    if passed:
        return name, f"SURVIVED {count} test(s) of {binary_name} {gtest_filter}", output
    return name, None, f"{count} test(s) of {binary_name}"


def main(arguments):
    gpu = "--gpu" in arguments
    arguments = [argument for argument in arguments if argument != "--gpu"]
    if len(arguments) < 2:
        print(__doc__)
        return 2
    source, build = Path(arguments[0]).resolve(), Path(arguments[1]).resolve()
    problems = []
    faults = read_lists(source, problems)
    # A package has no source.
    points = fault_points(source) if (source / "src").is_dir() else faults
    for name in sorted(points.keys() - faults.keys()):
        problems.append(f"{points[name]}: fault point {name} is in no list of tests/faults")
    for name in sorted(faults.keys() - points.keys()):
        problems.append(f"{name} is listed, but no fault point of that name is in src or tools")
    if len(faults) < MIN_FAULTS:
        problems.append(f"{len(faults)} faults are listed, need at least {MIN_FAULTS}")

    runnable = {name: fault[:4] for name, fault in faults.items() if fault[4] == gpu}
    chosen = {name: runnable[name] for name in arguments[2:] if name in runnable} or runnable
    timeout = GPU_TIMEOUT_S if gpu else TIMEOUT_S
    baseline = Baselines(build, chosen.values())

    caught = skipped = 0
    with (
        tempfile.TemporaryDirectory() as kept,
        ThreadPoolExecutor(GPU_WORKERS if gpu else os.cpu_count()) as pool,
    ):
        shared["MOESAIC_GENERATED_FILES"] = kept
        results = pool.map(
            lambda item: check_fault(build, item[0], *item[1], baseline, timeout), sorted(chosen.items())
        )
        for name, problem, detail in results:
            if problem == SKIPPED:
                print(f"{name:<52} {SKIPPED}{': ' + detail if detail else ''}", flush=True)
                skipped += 1
                continue
            print(f"{name:<52} {'caught by ' + detail if problem is None else 'PROBLEM: ' + problem}", flush=True)
            if problem is None:
                caught += 1
            else:
                problems.append(f"{name}: {problem}")
                print(detail)
    print(f"\n{caught} of {len(chosen)} faults caught, {skipped} skipped, {len(points)} fault points in the source")
    for problem in problems:
        print("problem:", problem)
    return 1 if problems or caught + skipped != len(chosen) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
