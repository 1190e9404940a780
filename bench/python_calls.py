"""What a call from Python costs, and one layer of experts against transformers' own.

    OMP_NUM_THREADS=1 python bench/python_calls.py [--calls N] [--layer] [--tokens 1,4,16,256] [--quant bf16,int4-g128]
    OMP_NUM_THREADS=1 python bench/python_calls.py --layer --tokens 1,4,16 --need bf16=1.2,int4-g128=2.5
    python bench/python_calls.py --layer --device cuda --quant bf16,fp8-block
    python bench/python_calls.py --library build/release/bench/empty_call_bench [--need-overhead 1.0,6.0]

The first table: microseconds of a call without rows, smallest of several rounds: reading four tensors, checks,
and the library's own empty call; and of importing the package in a new process. --library (a program of -DMOESAIC_BUILD_BENCHMARKS=ON): how much of a
call is not the library's own, the two measured in turn; --need-overhead: ends with 1 where four tensors or the
operator take more microseconds than that beyond it. The second (--layer): milliseconds
of one layer of Qwen3-30B's shape in bf16, alternating rounds, median: transformers' default (grouped_mm), eager, and
Moesaic through the operator; CPU time on a CPU, events on a GPU (where batched_mm is what `generate` takes for a few
tokens). Needs torch and transformers and 4 GB. --need: ends with 1 where a median is less than so many times as fast
as grouped_mm's.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

import torch

import moesaic
import moesaic.torch


def microseconds(call: Callable[[], object], calls: int) -> float:
    """Of one call, in the fastest of 7 rounds; the thread's own time, which neighbours do not lengthen."""
    best = float("inf")
    for _ in range(7):
        begin = time.thread_time()
        for _ in range(calls):
            call()
        best = min(best, time.thread_time() - begin)
    return best / calls * 1e6


def import_milliseconds() -> float:
    """Of `import moesaic` in a new interpreter, the fastest of 10."""
    code = "import time; t = time.perf_counter(); import moesaic; print(time.perf_counter() - t)"
    runs = [subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True) for _ in range(10)]
    return min(float(run.stdout) for run in runs) * 1e3


def library_microseconds(program: str, calls: int) -> float:
    """Of the library's own call of the same layer, from C++."""
    run = subprocess.run([program, str(calls)], check=True, capture_output=True, text=True)
    return float(run.stdout.split()[0])


def overhead(calls: int, library: str, most: tuple[float, float]) -> bool:
    """Prints the first table; whether what is beyond the library's own call is at most so much."""
    print(f"{'import moesaic':<24} {import_milliseconds():7.1f} ms")
    w13, w2 = torch.randn(4, 256, 128), torch.randn(4, 128, 128)
    layer = moesaic.RoutedExperts.from_tensors(w13, w2, 2)
    module = moesaic.torch.MoesaicExperts(layer)
    x, ids, weights, out = (
        torch.empty(0, 128),
        torch.empty(0, 2, dtype=torch.int64),
        torch.empty(0, 2),
        torch.empty(0, 128),
    )
    arrays = [t.numpy() for t in (x, ids, weights, out)]
    operator = torch.ops.moesaic.experts
    with torch.inference_mode():
        rows = [
            ("four torch tensors", lambda: layer(x, ids, weights, out=out)),
            ("the same, new output", lambda: layer(x, ids, weights)),
            ("four NumPy arrays", lambda: layer(arrays[0], arrays[1], arrays[2], out=arrays[3])),
            ("torch operator", lambda: operator(x, ids, weights, module._handle)),
            ("torch.empty_like alone", lambda: torch.empty_like(x)),
        ]
        took: dict[str, float] = {}
        own = float("inf")
        for name, call in rows:
            if library:
                own = min(own, library_microseconds(library, calls))
            took[name] = microseconds(call, calls)
            print(f"{name:<24} {took[name]:7.2f} us")
    if not library:
        return True
    print(f"{'the library from C++':<24} {own:7.2f} us")
    enough = True
    for name, limit in zip(("four torch tensors", "torch operator"), most, strict=True):
        beyond = took[name] - own
        print(f"{name + ', beyond it':<34} {beyond:7.2f} us")
        enough &= beyond <= limit
    return enough


def milliseconds(call: Callable[[], object], device: str) -> float:
    """Of one call: CPU time of the process, or what a GPU took for it."""
    if device == "cpu":
        begin = time.process_time()
        call()
        return (time.process_time() - begin) * 1e3
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    # Some work in front, so that launching is not what is measured.
    torch.cuda._sleep(3_000_000)
    begin.record()
    call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end)


def one_layer(tokens: list[int], quants: list[str], device: str, need: dict[str, float]) -> bool:
    """Prints the second table; whether every scheme is as fast as it needs to be."""
    from transformers import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

    config = Qwen3MoeConfig(hidden_size=2048, moe_intermediate_size=768, num_experts=128, num_experts_per_tok=8)
    config._experts_implementation = "grouped_mm"
    with torch.device(device):
        experts = Qwen3MoeExperts(config).to(torch.bfloat16)
    with torch.no_grad():
        for parameter in experts.parameters():
            parameter.normal_(std=parameter.shape[-1] ** -0.5)

    def pack(quant: str) -> moesaic.torch.MoesaicExperts:
        weights = experts.gate_up_proj.data, experts.down_proj.data
        where = "cpu" if device == "cpu" else "cuda:0"
        return moesaic.torch.MoesaicExperts(moesaic.RoutedExperts.from_tensors(*weights, 8, quant=quant, device=where))

    def theirs(name: str) -> Callable[..., object]:
        def call(*arguments: torch.Tensor) -> object:
            config._experts_implementation = name
            return experts(*arguments)

        return call

    names = ["grouped_mm", "eager"] if device == "cpu" else ["grouped_mm", "batched_mm"]
    contenders: dict[str, Callable[..., object]] = {name: theirs(name) for name in names}
    contenders |= {f"moesaic {quant}": pack(quant) for quant in quants}
    enough = True
    for rows in tokens:
        x = torch.randn(rows, 2048, device=device).bfloat16()
        ids = torch.stack([torch.randperm(128, device=device)[:8] for _ in range(rows)])
        weights = torch.rand(rows, 8, device=device).bfloat16()
        samples: dict[str, list[float]] = {name: [] for name in contenders}
        with torch.inference_mode():
            for _ in range(6 if device == "cpu" else 20):
                for name, call in contenders.items():
                    if name != "batched_mm" or rows <= 16:  # it copies the weights of every slot
                        samples[name].append(milliseconds(functools.partial(call, x, ids, weights), device))
        base = statistics.median(samples["grouped_mm"][1:])
        for quant, factor in need.items():
            enough &= base >= factor * statistics.median(samples[f"moesaic {quant}"][1:])
        for name, values in samples.items():
            if values:
                median, best = statistics.median(values[1:]), min(values[1:])
                print(
                    f"M = {rows:<4} {name:<20} {median:9.3f} ms  ({best:.3f} at best), {base / median:5.2f} x grouped_mm"
                )
    return enough


def main() -> None:
    """Runs what the arguments ask for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--calls", type=int, default=20000)
    parser.add_argument("--layer", action="store_true")
    parser.add_argument("--tokens", default="1,4,16,256")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--quant", default="bf16,int4-g128")
    parser.add_argument("--need", default="")
    parser.add_argument("--library", default="")
    parser.add_argument("--need-overhead", default="inf,inf")
    arguments = parser.parse_args()
    four, operator = (float(limit) for limit in arguments.need_overhead.split(","))
    if not overhead(arguments.calls, arguments.library, (four, operator)):
        sys.exit(f"need at most {arguments.need_overhead} us beyond the library's own call")
    need = {name: float(factor) for name, _, factor in (n.partition("=") for n in arguments.need.split(",") if n)}
    if arguments.layer:
        tokens, quants = [int(t) for t in arguments.tokens.split(",")], arguments.quant.split(",")
        if not one_layer(tokens, quants, arguments.device, need):
            sys.exit(f"need at least {arguments.need} times grouped_mm")


if __name__ == "__main__":
    main()
