#!/usr/bin/env python3
"""Real processes move experts between them: one is killed, late or lying in the middle. The others report it
within the configured time, keep their old weights, and nothing hangs.

usage: rearrange_mpi_test.py MPIRUN REARRANGE_RANKS
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "parallel"))
from mpi_test import EVERYBODY, LATE, SURVIVORS, check  # noqa: E402

CASES = [
    ("ok", EVERYBODY, ["ok"]),
    ("kill", SURVIVORS, ["device: "]),
    ("delay", EVERYBODY, [LATE]),
    ("count", EVERYBODY, ["rank 1 sent 17 bytes", "is in another call", "sent 0 bytes, need 17", "bytes, need 17"]),
]


def main(mpirun, program):
    problems = []
    for mode, alive, expected in CASES:
        report, problem = check(mpirun, [program, mode], alive, expected)
        print(report, end="", flush=True)
        if problem:
            problems.append(problem)
    for problem in problems:
        print("problem:", problem)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
