#!/usr/bin/env python3
"""`moesaic run` over processes with a GPU each, by messages and through peer windows: the output of one GPU, and
a killed rank is reported in time.

usage: gpu_ranks_test.py TOOL SOURCE_DIR MPIEXEC

Exit code 77, with the reason, where there is no NCCL, fewer than two GPUs or a build without MPI.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

SKIPPED = 77
TIMEOUT_S = 4
HANG_GUARD_S = 600
LAYER = 1
# Values of --rank-engine and --peer-memory.
ENGINES = ("messages", "auto"), ("peer_windows", "auto"), ("peer_windows", "nccl")
ENVIRONMENT = {
    **os.environ,
    "CUDA_MODULE_LOADING": "EAGER",
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMPI_MCA_btl_vader_single_copy_mechanism": "none",
}


def environment(tool):
    text = subprocess.run([tool, "env", "--json"], capture_output=True, text=True, check=True).stdout
    return json.loads(text)


def usable_gpus(env):
    return sum(d["available"] for d in env["cuda"]["devices"])


def reason_to_skip(env):
    if not env["nccl"]["available"]:
        return "no NCCL: " + env["nccl"]["reason"]
    if "mpirun" not in env["mpi"]["reason"]:
        return "no MPI: " + env["mpi"]["reason"]
    usable = usable_gpus(env)
    return "" if usable >= 2 else f"{usable} usable GPU(s), need two"


def processes_of_rank(tool, rank):
    """Ids of this tool's processes that mpirun started as this rank."""
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            command = Path("/proc", pid, "cmdline").read_bytes().split(b"\0")[0].decode()
            variables = Path("/proc", pid, "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        if command == tool and f"OMPI_COMM_WORLD_RANK={rank}".encode() in variables:
            found.append(int(pid))
    return found


def options_of(engine):
    return ["--rank-engine", engine[0], "--peer-memory", engine[1]]


class Case:
    def __init__(self, tool, source, mpiexec, folder):
        model = Path(source, "testdata", "models", "mini-deepseek-v3")
        states = f"{model}/golden.safetensors:model.layers.{LAYER}.mlp.input"
        self.tool, self.folder = tool, folder
        self.run = [tool, "run", "--model", str(model), "--layer", str(LAYER), "--input", states, "--quant", "bf16"]
        self.mpirun = [mpiexec, "--oversubscribe", "--enable-recovery", "-n"]

    def output(self, command, name, *extra):
        path = Path(self.folder, name)
        subprocess.run([*command, "--output", path, *extra], check=True, timeout=HANG_GUARD_S, env=ENVIRONMENT,
                       stdout=subprocess.DEVNULL)  # fmt: skip
        return path.read_bytes()

    def same_as_one_gpu(self, engine, ranks):
        one = self.output(self.run, "one", "--device", "cuda:0", "--repeat", "1")
        command = [*self.mpirun, str(ranks), *self.run, "--device", "cuda", *options_of(engine)]
        several = self.output(command, "several", "--reduction", "per_slot", "--repeat", "5")
        if one != several:
            return f"{ranks} processes with a GPU each ({engine}) gave another file than one GPU"
        print(f"{ranks} processes, {engine}: the file of one GPU")
        return ""

    def killed_rank_is_reported(self, engine):
        command = [*self.mpirun, "2", *self.run, "--output", str(Path(self.folder, "never")), "--device", "cuda",
                   *options_of(engine), "--repeat", "1000000", "--timeout", str(TIMEOUT_S), "-v"]  # fmt: skip
        job = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=ENVIRONMENT,
                               start_new_session=True)  # fmt: skip
        time.sleep(7)  # both have connected and are computing
        victims = processes_of_rank(self.tool, 1)
        for pid in victims:
            os.kill(pid, signal.SIGKILL)
        begin = time.monotonic()
        try:
            text = job.communicate(timeout=HANG_GUARD_S)[0]
        except subprocess.TimeoutExpired:
            os.killpg(job.pid, signal.SIGKILL)
            return "the other rank hangs: " + job.communicate()[0]
        if len(victims) != 1:
            return f"found {len(victims)} processes of rank 1: {text}"
        print(f"{engine}: reported {time.monotonic() - begin:.1f} s after the kill")
        return "" if "[rank 0]: error: device:" in text else "rank 0 reports no error: " + text


def main(tool, source, mpiexec):
    env = environment(tool)
    reason = reason_to_skip(env)
    if reason:
        print("SKIPPED:", reason)
        return SKIPPED
    with tempfile.TemporaryDirectory() as folder:
        case = Case(tool, source, mpiexec, folder)
        numbers = [n for n in (2, 4) if n <= usable_gpus(env)]
        engines = [e for e in ENGINES if e[1] != "nccl" or env["nccl_windows"]["available"]]
        results = [case.same_as_one_gpu(engine, n) for engine in engines for n in numbers]
        results += [case.killed_rank_is_reported(engine) for engine in engines]
    wrong = [w for w in results if w]
    print("\n".join(wrong) or "passed")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
