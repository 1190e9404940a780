#!/usr/bin/env python3
"""Starts real processes under mpirun: messages arrive; a killed, late or lying rank is reported by all
others, and nothing hangs.

usage: mpi_test.py MPIRUN MPI_RANKS
"""

import os
import subprocess
import sys
import time

RANKS = 4
LIMIT_S = 30
ENVIRONMENT = {
    **os.environ,
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    # Reading another process's memory is forbidden in many containers.
    "OMPI_MCA_btl_vader_single_copy_mechanism": "none",
    "OMP_NUM_THREADS": "1",
}


def run(mpirun, program, mode):
    """Lines that the ranks printed, and the seconds it took."""
    begin = time.monotonic()
    result = subprocess.run(
        [mpirun, "--oversubscribe", "--enable-recovery", "-n", str(RANKS), program, mode],
        capture_output=True,
        text=True,
        errors="replace",
        timeout=LIMIT_S,
        env=ENVIRONMENT,
    )
    lines = {}
    for line in result.stdout.splitlines():
        head, _, tail = line.partition(": ")
        if head.startswith("rank "):
            lines[int(head[5:])] = tail
    return lines, time.monotonic() - begin, result.stdout + result.stderr


def check(mpirun, program, mode, alive, expected):
    try:
        lines, seconds, output = run(mpirun, program, mode)
    except subprocess.TimeoutExpired:
        return f"{mode}: hangs for more than {LIMIT_S} s"
    print(f"{mode}: {seconds:.1f} s")
    for rank in sorted(lines):
        print(f"  rank {rank}: {lines[rank]}")
    if sorted(lines) != alive:
        return f"{mode}: ranks {sorted(lines)} spoke, need {alive}\n{output}"
    for rank in alive:
        if not any(word in lines[rank] for word in expected):
            return f"{mode}: rank {rank} says '{lines[rank]}', need one of {expected}"
    return None


def main(mpirun, program):
    everybody = list(range(RANKS))
    problems = [
        check(mpirun, program, "ok", everybody, ["ok"]),
        check(mpirun, program, "kill", [0, 2, 3], ["reported: device: "]),
        check(mpirun, program, "delay", everybody, ["nothing within 3000 ms from rank(s) 1"]),
        check(mpirun, program, "count", everybody, ["rank 1 sent"]),
    ]
    for problem in filter(None, problems):
        print("problem:", problem)
    return 1 if any(problems) else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
