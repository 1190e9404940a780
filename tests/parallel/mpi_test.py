#!/usr/bin/env python3
"""Starts real processes under mpirun: messages arrive, layers are right; a killed, late or lying rank is
reported by all others, nothing hangs, and no result is wrong.

usage: mpi_test.py MPIRUN MPI_RANKS TRANSPORT_RANKS
"""

import os
import re
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor

RANKS = 4
EVERYBODY = list(range(RANKS))
SURVIVORS = [0, 2, 3]
LIMIT_S = 600  # against hangs only
AT_ONCE = 4
TRANSPORTS = ["all_to_all", "all_gather_reduce_scatter", "all_to_all_batched"]
# On a busy machine other ranks may be late, too.
LATE = re.compile(r"nothing within 5000 ms from rank\(s\)( 0)? 1\b")
ENVIRONMENT = {
    **os.environ,
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    # Reading another process's memory is forbidden in many containers.
    "OMPI_MCA_btl_vader_single_copy_mechanism": "none",
    "OMP_NUM_THREADS": "1",
}


def run(mpirun, command):
    """Lines that the ranks printed, the seconds it took, and all output."""
    begin = time.monotonic()
    # Open MPI programs that start at the same time race for the folder of their sessions.
    with tempfile.TemporaryDirectory(prefix="mpi-", ignore_cleanup_errors=True) as folder:
        result = subprocess.run(
            [mpirun, "--oversubscribe", "--enable-recovery", "-n", str(RANKS), *command],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=LIMIT_S,
            env={**ENVIRONMENT, "TMPDIR": folder, "MOESAIC_TEST_REPORTS": folder},
        )
    lines = {}
    for line in result.stdout.splitlines():
        head, _, tail = line.partition(": ")
        if head.startswith("rank "):
            lines[int(head[5:])] = tail
    return lines, time.monotonic() - begin, result.stdout + result.stderr


def check(mpirun, command, alive, expected):
    """(what happened, the problem or None); `expected`: words or patterns of which each rank says one. How long
    it took is printed and not judged: the programs wait for each other, not for a time."""
    name = " ".join(command[1:])
    try:
        lines, seconds, output = run(mpirun, command)
    except subprocess.TimeoutExpired:
        return name, f"{name}: hangs for more than {LIMIT_S} s"
    report = f"{name}: {seconds:.1f} s\n" + "".join(f"  rank {rank}: {lines[rank]}\n" for rank in sorted(lines))
    if sorted(lines) != alive:
        return report, f"{name}: ranks {sorted(lines)} spoke, need {alive}\n{output}"
    for rank in alive:
        said = (w.search(lines[rank]) if isinstance(w, re.Pattern) else w in lines[rank] for w in expected)
        if "WRONG" in lines[rank] or not any(said):
            return report, f"{name}: rank {rank} says '{lines[rank]}', need one of {expected}"
    return report, None


def cases(mpi_ranks, transport_ranks):
    yield [mpi_ranks, "ok"], EVERYBODY, ["ok"]
    yield [mpi_ranks, "two"], EVERYBODY, ["ok"]
    yield [mpi_ranks, "kill"], SURVIVORS, ["reported: device: "]
    yield [mpi_ranks, "delay"], EVERYBODY, [LATE]
    yield [mpi_ranks, "count"], EVERYBODY, ["rank 1 sent"]
    for transport in TRANSPORTS:
        yield [transport_ranks, transport, "dispatch", "ok"], EVERYBODY, ["ok"]
        for stage in ["dispatch", "combine"]:
            command = [transport_ranks, transport, stage]
            # What MPI says of a dead process differs; that it is the reason of every survivor does not.
            yield command + ["kill"], SURVIVORS, ["device: "]
            yield command + ["kill_inside"], SURVIVORS, ["device: "]
            yield command + ["delay"], EVERYBODY, [LATE]
            yield command + ["rows"], EVERYBODY, [stage]
            yield command + ["bytes"], EVERYBODY, [stage]


def run_cases(mpirun, cases_to_run, at_once):
    """Exit code: 0 when every (command, alive, expected) of the cases is as it should be."""
    problems = []
    with ThreadPoolExecutor(at_once) as pool:
        for report, problem in pool.map(lambda c: check(mpirun, *c), cases_to_run):
            print(report, end="", flush=True)
            if problem:
                problems.append(problem)
    for problem in problems:
        print("problem:", problem)
    return 1 if problems else 0


def main(mpirun, mpi_ranks, transport_ranks):
    return run_cases(mpirun, cases(mpi_ranks, transport_ranks), AT_ONCE)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
