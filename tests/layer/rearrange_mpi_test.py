#!/usr/bin/env python3
"""Real processes move experts between them: one is killed, late or lying in the middle. The others report it,
keep their old weights, and nothing hangs.

usage: rearrange_mpi_test.py MPIRUN REARRANGE_RANKS
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "parallel"))
from mpi_test import EVERYBODY, LATE, SURVIVORS, run_cases  # noqa: E402

CASES = [
    ("ok", EVERYBODY, ["ok"]),
    ("kill", SURVIVORS, ["device: "]),
    ("delay", EVERYBODY, [LATE]),
    ("count", EVERYBODY, ["rank 1 sent 17 bytes", "is in another call", "sent 0 bytes, need 17", "bytes, need 17"]),
]


def main(mpirun, program):
    # One after the other: the ranks of each compute on all cores.
    return run_cases(mpirun, [([program, mode], alive, expected) for mode, alive, expected in CASES], at_once=1)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
