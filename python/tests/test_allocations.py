"""A call into preallocated outputs allocates nothing: malloc and its kin are counted, on all threads.

    scripts/python-tests -k allocates -s

Counted in a process of its own, with count_allocations.c before libc; this file is its program too. Not counted is
what the OpenMP runtime asks for its teams.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import pathlib
import shutil
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from conftest import MODELS, OwnExperts

import moesaic

HERE = pathlib.Path(__file__).resolve()
CALLS = 20


def counted(call: Callable[[], object]) -> int:
    """What CALLS calls allocate, twice, the smaller number: Python asks for another arena once in many rounds."""
    return min(counted_once(call), counted_once(call))


def counted_once(call: Callable[[], object]) -> int:
    """After two calls that may grow what is kept; without what counting itself needs."""
    library = ctypes.CDLL(None)
    read, on = library.allocations, library.count_allocations
    call()
    call()
    gc.collect()
    gc.disable()
    on(1)
    before = read()
    between = read()
    for _ in range(CALLS):
        call()
    after = read()
    on(0)
    gc.enable()
    return (after - between) - (between - before)


def layers(found: dict[str, int]) -> None:
    """The layer with all its stages, of every family of the bundled models."""
    for model in ("mini-qwen3-moe", "mini-deepseek-v3", "mini-gpt-oss"):
        checkpoint = moesaic.Checkpoint(MODELS / model)
        index = checkpoint.layers[-1].layer
        for threads in (1, 2):
            layer = moesaic.FusedMoE.from_checkpoint(checkpoint, index, num_threads=threads)
            gate = moesaic.GateLinear.from_checkpoint(checkpoint, index, num_threads=threads)
            router = moesaic.Router.from_checkpoint(checkpoint, index, num_threads=threads)
            for tokens in (1, 5, 40):
                x = np.random.default_rng(0).standard_normal((tokens, layer.spec.hidden_size)).astype(np.float32)
                out = np.empty_like(x)
                logits = gate(x)
                where = f"{model}, {threads} threads, {tokens} tokens"
                found[f"FusedMoE: {where}"] = counted(lambda x=x, out=out, layer=layer: layer(x, out=out))
                # These return new arrays: what NumPy needs for them is subtracted.
                weights, ids = router(logits)
                ours = counted(lambda x=x, gate=gate: gate(x))
                found[f"GateLinear: {where}"] = ours - counted(lambda like=logits: np.empty(like.shape, like.dtype))
                ours = counted(lambda logits=logits, router=router: router(logits))
                theirs = sum(counted(lambda like=like: np.empty(like.shape, like.dtype)) for like in (weights, ids))
                found[f"Router: {where}"] = ours - theirs
    table = np.arange(32, dtype=np.int32).reshape(16, 2) % 8
    router = moesaic.Router(num_experts=8, top_k=2, method="hash", scoring="sqrtsoftplus", hash_table=table)
    logits, tokens = np.zeros((5, 8), np.float32), np.arange(5)
    found["Router: ids of tokens"] = counted(lambda: router(logits, input_ids=tokens))


def own_experts(found: dict[str, int]) -> None:
    """Experts of own weights in every scheme, with ids of 64 bits; and with weights that a call widens."""
    import ml_dtypes

    own = OwnExperts(tokens=17, experts=8, hidden=256, width=128, top_k=2)
    out = np.empty_like(own.x)
    for scheme in moesaic.quant_schemes():
        for threads in (1, 2):
            try:
                layer = moesaic.RoutedExperts.from_tensors(own.w13, own.w2, 2, quant=scheme, num_threads=threads)
            except moesaic.Error:  # not from plain weights, or not of this shape
                continue
            for tokens in (1, 17):
                arguments = own.x[:tokens], own.ids[:tokens], own.weights[:tokens]
                found[f"RoutedExperts: {scheme}, {threads} threads, {tokens} tokens"] = counted(
                    lambda a=arguments, o=out[:tokens], layer=layer: layer(*a, out=o)
                )
    layer = moesaic.RoutedExperts.from_tensors(own.w13, own.w2, 2, drop_ids_beyond=True)
    narrow = own.weights.astype(ml_dtypes.bfloat16)
    found["RoutedExperts: bf16 weights, ids beyond"] = counted(lambda: layer(own.x, own.ids, narrow, out=out))
    # Shows that the counter counts: a new output of 17 KB.
    found["control"] = counted(lambda: layer(own.x, own.ids, own.weights))


def operator(found: dict[str, int]) -> None:
    """The operator: beyond the same call without rows, what PyTorch needs for the output and nothing else."""
    import torch

    import moesaic.torch

    own = OwnExperts(tokens=17, experts=8, hidden=256, width=128, top_k=2)
    for threads in (1, 2):
        layer = moesaic.RoutedExperts.from_tensors(own.w13, own.w2, 2, num_threads=threads)
        module = moesaic.torch.MoesaicExperts(layer)
        rows = {n: [torch.from_numpy(a[:n].copy()) for a in (own.x, own.ids, own.weights)] for n in (0, 17)}
        out = torch.empty_like(rows[17][0])
        found[f"RoutedExperts of torch tensors, {threads} threads"] = counted(
            lambda rows=rows, layer=layer, out=out: layer(*rows[17], out=out)
        )
        with torch.inference_mode():
            calls = {n: counted(lambda n=n, rows=rows, module=module: module(*rows[n])) for n in rows}
            empty = {n: counted(lambda n=n, rows=rows: torch.empty_like(rows[n][0])) for n in rows}
        found[f"torch operator, {threads} threads"] = (calls[17] - calls[0]) - (empty[17] - empty[0])
        found["control of the operator"] = empty[17] - empty[0]


def in_process(tmp_path: pathlib.Path, *parts: str) -> dict[str, int]:
    """The counts of a process with the counter in it."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("needs a C compiler for the counter")
    library = tmp_path / "count_allocations.so"
    source = HERE.with_name("count_allocations.c")
    subprocess.run([compiler, "-O1", "-shared", "-fPIC", "-o", library, source], check=True)
    run = subprocess.run(
        [sys.executable, HERE, *parts],
        check=True,
        capture_output=True,
        text=True,
        env={**os.environ, "LD_PRELOAD": str(library)},
    )
    counts: dict[str, int] = json.loads(run.stdout)
    print(f"\n{len(counts)} calls counted, {CALLS} times each")
    return counts


def test_a_call_allocates_nothing(tmp_path: pathlib.Path) -> None:
    counts = in_process(tmp_path, "layers", "own_experts")
    assert counts.pop("control") >= CALLS, "the counter counts"
    assert len(counts) > 100 and {name: n for name, n in counts.items() if n != 0} == {}


def test_the_operator_allocates_its_output_alone(tmp_path: pathlib.Path) -> None:
    pytest.importorskip("torch")
    counts: dict[str, Any] = in_process(tmp_path, "operator")
    assert counts.pop("control of the operator") >= CALLS
    assert len(counts) == 4 and {name: n for name, n in counts.items() if n != 0} == {}


if __name__ == "__main__":
    result: dict[str, int] = {}
    for part in sys.argv[1:]:
        {"layers": layers, "own_experts": own_experts, "operator": operator}[part](result)
    print(json.dumps(result))
