"""The package with NumPy alone: error classes, Ctrl-C, fork, threads."""

from __future__ import annotations

import os
import pathlib
import signal
import subprocess
import sys
import threading

import ml_dtypes
import numpy as np
import pytest
from conftest import OwnExperts, layer_of, presses_until_it_ends

import moesaic

BUILTIN = {
    "invalid_argument": ValueError,
    "invalid_shape": ValueError,
    "invalid_layout": ValueError,
    "invalid_dtype": TypeError,
    "unsupported": NotImplementedError,
    "ambiguous_format": ValueError,
    "corrupt_file": ValueError,
    "missing_tensor": LookupError,
    "not_found": LookupError,
    "io": OSError,
    "limit_exceeded": ValueError,
    "aliasing": ValueError,
    "workspace_too_small": ValueError,
    "out_of_memory": MemoryError,
    "device": moesaic.DeviceError,
    "internal": moesaic.InternalError,
}


@pytest.mark.parametrize("code", BUILTIN)
def test_each_code_has_its_class(code: str) -> None:
    from moesaic import _core

    with pytest.raises(BUILTIN[code]) as caught:
        _core.raise_status(code, "field: got 1, need 2 \N{GREEK SMALL LETTER ALPHA}")
    assert isinstance(caught.value, moesaic.Error) and isinstance(caught.value, RuntimeError)
    assert caught.value.code == code and str(caught.value) == "field: got 1, need 2 \N{GREEK SMALL LETTER ALPHA}"


def test_refusals_of_the_catalogue_arrive_with_the_same_text(own: OwnExperts) -> None:
    spec = moesaic.LayerSpec(hidden_size=120, intermediate_size=96, num_experts=8, top_k=2, quant="mxfp4")
    with pytest.raises(moesaic.Unsupported) as refused:
        moesaic.explain(spec)
    assert "groups of weights of 32 need a multiple of 32" in str(refused.value)
    fine = moesaic.LayerSpec(hidden_size=128, intermediate_size=128, num_experts=8, top_k=2)
    tried = 0
    for candidate in moesaic.explain(fine).candidates:
        if candidate.stage != "experts" or candidate.accepted or not candidate.reason:
            continue
        with pytest.raises(moesaic.Unsupported) as forced:
            moesaic.RoutedExperts.from_tensors(
                own.w13.astype(ml_dtypes.bfloat16), own.w2.astype(ml_dtypes.bfloat16), 2, backend=candidate.name
            )
        assert candidate.reason in str(forced.value)
        tried += 1
    assert tried > 0


def test_missing_files_and_layers_are_not_found(qwen3: pathlib.Path, tmp_path: pathlib.Path) -> None:
    with pytest.raises(moesaic.NotFound):
        moesaic.Checkpoint(tmp_path / "nothing")
    with pytest.raises(moesaic.NotFound, match="need one of the MoE layers"):
        moesaic.FusedMoE.from_checkpoint(moesaic.Checkpoint(qwen3), 77)
    for read in (moesaic.Checkpoint(qwen3).layer, moesaic.Checkpoint(qwen3).layer_bytes):
        with pytest.raises(moesaic.NotFound, match="layer: got 0, need one of the MoE layers: 1"):
            read(0)


def test_formats_of_files_are_told_from_unknown_schemes(own: OwnExperts) -> None:
    with pytest.raises(moesaic.NotFound, match='"q4_k", a format that only files have, need "as-is" for'):
        moesaic.RoutedExperts.from_tensors(own.w13, own.w2, own.top_k, quant="q4_k")
    with pytest.raises(moesaic.NotFound, match='nearest is "fp8-block"'):
        moesaic.RoutedExperts.from_tensors(own.w13, own.w2, own.top_k, quant="fp8_block")


def test_progress_and_its_errors_and_ctrl_c(qwen3: pathlib.Path) -> None:
    seen: list[tuple[int, int]] = []
    layer_of(qwen3, progress=lambda done, total: seen.append((done, total)))
    assert seen and seen[-1][0] == seen[-1][1]

    def fail(done: int, total: int) -> None:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        layer_of(qwen3, progress=fail)

    def press(done: int, total: int) -> None:
        os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        layer_of(qwen3, progress=press)
    assert presses_until_it_ends(lambda in_c: layer_of(qwen3, progress=in_c)) == 1
    layer_of(qwen3)  # nothing is left behind


def test_a_pending_warning_is_told_after_the_callers_exception(
    own: OwnExperts, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(done: int, total: int) -> None:
        raise KeyError("mine")

    with pytest.raises(moesaic.Error):  # warns of the experts that are left over, then refuses
        moesaic.Router(num_experts=7, top_k=9, method="grouped_topk", num_expert_group=4, topk_group=2)
    with pytest.raises(KeyError, match="mine"):
        moesaic.RoutedExperts.from_tensors(own.w13, own.w2, own.top_k, progress=fail)
    moesaic.RoutedExperts.from_tensors(own.w13, own.w2, own.top_k)
    assert any(record.name == "moesaic" for record in caplog.records)


def test_a_forked_child_is_told_to_spawn(own: OwnExperts) -> None:
    layer = moesaic.RoutedExperts.from_tensors(own.w13, own.w2, own.top_k)
    layer(own.x, own.ids, own.weights)
    pid = os.fork()
    if pid == 0:
        try:
            layer(own.x, own.ids, own.weights)
            os._exit(1)
        except moesaic.DeviceError as error:
            os._exit(0 if "spawn" in str(error) else 2)
        except BaseException:
            os._exit(3)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


FORKED = """
import os, sys, time
import numpy as np
import moesaic

model, before, folder = sys.argv[1:]
w13, w2 = np.ones((4, 64, 32), np.float32) / 9, np.ones((4, 32, 32), np.float32) / 9
x, ids, weights = np.ones((64, 32), np.float32), np.zeros((64, 2), int), np.ones((64, 2), np.float32)


def make(num_threads):
    return moesaic.RoutedExperts.from_tensors(w13, w2, 2, num_threads=num_threads)(x, ids, weights)


if before != "nothing":
    wanted = make(1 if before == "one thread" else 3)
ways = {
    "make": lambda n: make(n),
    "load": lambda n: moesaic.FusedMoE.from_checkpoint(moesaic.Checkpoint(model), 1, num_threads=n),
    "router": lambda n: moesaic.Router(num_experts=16, top_k=2, num_threads=n)(np.ones((64, 16), np.float32)),
    "gate": lambda n: moesaic.GateLinear(w2[0], num_threads=n)(x),
    "convert": lambda n: moesaic.convert(model, f"{folder}/{n}", quant="mxfp8", num_threads=n),
}
for name, way in ways.items():
    for threads in (1, 3):
        pid = os.fork()
        if pid == 0:
            try:
                result = way(threads)
                os._exit(0 if name != "make" or before == "nothing" or np.array_equal(result, wanted) else 1)
            except moesaic.DeviceError as error:
                os._exit(2 if "spawn" in str(error) and "need num_threads=1" in str(error) else 3)
            except BaseException:
                os._exit(4)
        end = time.monotonic() + 20
        done = (0, 0)
        while done == (0, 0) and time.monotonic() < end:
            time.sleep(0.01)
            done = os.waitpid(pid, os.WNOHANG)
        if done == (0, 0):
            os.kill(pid, 9)
            os.waitpid(pid, 0)
        print(name, threads, "hangs" if done == (0, 0) else os.waitstatus_to_exitcode(done[1]), flush=True)
"""


@pytest.mark.parametrize("before", ["nothing", "one thread", "threads"])
def test_a_forked_child_makes_objects_or_is_told(qwen3: pathlib.Path, tmp_path: pathlib.Path, before: str) -> None:
    """OpenMP waits forever for threads that the parent had: several are refused there, and one works."""
    done = subprocess.run(
        [sys.executable, "-c", FORKED, str(qwen3), before, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    refused = before == "threads"
    names = ("make", "load", "router", "gate", "convert")
    want = [f"{name} {n} {2 if refused and n > 1 else 0}" for name in names for n in (1, 3)]
    assert done.stdout.split("\n")[:-1] == want


def test_a_call_lets_other_threads_run(own: OwnExperts) -> None:
    layer = moesaic.RoutedExperts.from_tensors(own.w13, own.w2, own.top_k, num_threads=1)
    rows = 1000
    x, ids, weights = (np.concatenate([a] * rows) for a in (own.x, own.ids, own.weights))
    before = sys.getswitchinterval()
    sys.setswitchinterval(1000)  # none but a thread that gives it up leaves the interpreter to another
    try:
        for _ in range(100):  # a busy machine may be late once
            steps: list[str] = []

            def work(steps: list[str] = steps) -> None:
                steps.append("in")
                layer(x, ids, weights)
                steps.append("out")

            thread = threading.Thread(target=work)
            thread.start()
            seen = list(steps)
            thread.join()
            if seen == ["in"]:
                break
        else:
            raise AssertionError("never between the call's begin and end")
    finally:
        sys.setswitchinterval(before)


def test_threads_share_a_layer(own: OwnExperts) -> None:
    layer = moesaic.RoutedExperts.from_tensors(own.w13, own.w2, own.top_k)
    want = layer(own.x, own.ids, own.weights)
    wrong: list[int] = []

    def work(number: int) -> None:
        for _ in range(20):
            if not np.array_equal(layer(own.x, own.ids, own.weights), want):
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong


@pytest.mark.parametrize("work", ["call", "load"])
def test_a_program_may_end_while_a_daemon_thread_computes(work: str) -> None:
    code = f"""
import threading, time, numpy as np, moesaic
w13, w2 = np.ones((4, 512, 256), np.float32), np.ones((4, 256, 256), np.float32)
layer = moesaic.RoutedExperts.from_tensors(w13, w2, 2)
x, ids, weights = np.ones((256, 256), np.float32), np.zeros((256, 2), np.int32), np.ones((256, 2), np.float32)
begun = threading.Event()
def call():
    while True:
        layer(x, ids, weights)
        begun.set()
def load():
    while True:
        moesaic.RoutedExperts.from_tensors(w13, w2, 2, progress=lambda done, total: begun.set())
threading.Thread(target={work}, daemon=True).start()
begun.wait()
time.sleep(0.05)
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert run.returncode == 0, run.stderr
