"""What a call from Python costs, and one layer of experts against transformers' own.

    OMP_NUM_THREADS=1 python bench/python_calls.py [--calls N] [--layer] [--tokens 1,4,16] [--quant bf16,int4-g128]

The first table: microseconds of a call without rows, smallest of several rounds: reading four tensors, checks,
and the library's own empty call. The second (--layer): CPU milliseconds of one layer of Qwen3-30B's shape in
bf16, alternating rounds, median: transformers' default (grouped_mm), eager, and Moesaic through the operator.
Needs torch and transformers and 4 GB.
"""

from __future__ import annotations

import argparse
import statistics
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


def overhead(calls: int) -> None:
    """Prints the first table."""
    w13, w2 = torch.randn(4, 256, 128), torch.randn(4, 128, 128)
    layer = moesaic.RoutedExperts.from_tensors(w13, w2, 2)
    module = moesaic.torch.MoesaicExperts(layer)
    x, ids, weights, out = torch.empty(0, 128), torch.empty(0, 2, dtype=torch.int64), torch.empty(0, 2), torch.empty(0, 128)
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
        for name, call in rows:
            print(f"{name:<24} {microseconds(call, calls):7.2f} us")


def one_layer(tokens: list[int], quants: list[str]) -> None:
    """Prints the second table."""
    from transformers import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

    config = Qwen3MoeConfig(hidden_size=2048, moe_intermediate_size=768, num_experts=128, num_experts_per_tok=8)
    config._experts_implementation = "grouped_mm"
    with torch.device("cpu"):
        experts = Qwen3MoeExperts(config).to(torch.bfloat16)
    with torch.no_grad():
        for parameter in experts.parameters():
            parameter.normal_(std=parameter.shape[-1] ** -0.5)
    layers = {q: moesaic.torch.MoesaicExperts(moesaic.RoutedExperts.from_tensors(experts.gate_up_proj.data, experts.down_proj.data, 8, quant=q)) for q in quants}

    def theirs(name: str) -> Callable[..., object]:
        def call(*arguments: torch.Tensor) -> object:
            config._experts_implementation = name
            return experts(*arguments)

        return call

    contenders: dict[str, Callable[..., object]] = {"grouped_mm": theirs("grouped_mm"), "eager": theirs("eager")}
    contenders |= {f"moesaic {q}": layers[q] for q in quants}
    for rows in tokens:
        x = torch.randn(rows, 2048).bfloat16()
        ids = torch.stack([torch.randperm(128)[:8] for _ in range(rows)])
        weights = torch.rand(rows, 8).bfloat16()
        samples: dict[str, list[float]] = {name: [] for name in contenders}
        with torch.inference_mode():
            for _ in range(6):
                for name, call in contenders.items():
                    begin = time.process_time()
                    call(x, ids, weights)
                    samples[name].append(time.process_time() - begin)
        for name, values in samples.items():
            print(f"M = {rows:<4} {name:<20} {statistics.median(values[1:]) * 1e3:9.2f} ms  ({min(values[1:]) * 1e3:.2f} at best)")


def main() -> None:
    """Runs what the arguments ask for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--calls", type=int, default=20000)
    parser.add_argument("--layer", action="store_true")
    parser.add_argument("--tokens", default="1,4,16")
    parser.add_argument("--quant", default="bf16,int4-g128")
    arguments = parser.parse_args()
    overhead(arguments.calls)
    if arguments.layer:
        one_layer([int(t) for t in arguments.tokens.split(",")], arguments.quant.split(","))


if __name__ == "__main__":
    main()
