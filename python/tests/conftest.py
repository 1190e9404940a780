"""What the tests share: the bundled models, and a plain computation in float64."""

from __future__ import annotations

import ctypes
import functools
import os
import pathlib
import signal
import types
from collections.abc import Callable

import numpy as np
import pytest

import moesaic

# Imports that may fail: scripts/python-tests, whose environment has all others, sets this. A test that is
# skipped because its framework is broken would pass for a reason that has nothing to do with what it tests.
ABSENT = os.environ.get("MOESAIC_MAY_BE_ABSENT")


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]):
    outcome = yield
    report = outcome.get_result()
    report.longrepr = _not_skipped(report)


@pytest.hookimpl(hookwrapper=True)
def pytest_make_collect_report(collector: pytest.Collector):
    outcome = yield
    report = outcome.get_result()
    report.longrepr = _not_skipped(report)


def _not_skipped(report: pytest.CollectReport | pytest.TestReport) -> object:
    """What the report says; of one that was skipped for want of a module it makes a failure."""
    if ABSENT is None or report.outcome != "skipped" or not isinstance(report.longrepr, tuple):
        return report.longrepr
    reason = report.longrepr[2]
    if "could not import" not in reason or any(f"'{name}'" in reason for name in ABSENT.split(",")):
        return report.longrepr
    report.outcome = "failed"
    return f"{report.longrepr[0]}:{report.longrepr[1]}: {reason}"


REPOSITORY = pathlib.Path(__file__).resolve().parents[2]
MODELS = REPOSITORY / "testdata" / "models"


@pytest.fixture(params=["mini-qwen3-moe", "mini-deepseek-v3", "mini-gpt-oss"])
def model_path(request: pytest.FixtureRequest) -> pathlib.Path:
    return MODELS / request.param


@pytest.fixture
def qwen3() -> pathlib.Path:
    return MODELS / "mini-qwen3-moe"


class OwnExperts:
    """Random experts and a routing, as NumPy arrays, with their result in float64."""

    def __init__(self, tokens: int = 17, experts: int = 8, hidden: int = 128, width: int = 128, top_k: int = 2) -> None:
        rng = np.random.default_rng(1)
        self.top_k = top_k
        self.w13 = (rng.standard_normal((experts, 2 * width, hidden)) / hidden**0.5).astype(np.float32)
        self.w2 = (rng.standard_normal((experts, hidden, width)) / width**0.5).astype(np.float32)
        self.x = rng.standard_normal((tokens, hidden)).astype(np.float32)
        self.ids = np.argsort(rng.random((tokens, experts)), axis=1)[:, :top_k].copy()
        self.weights = rng.random((tokens, top_k)).astype(np.float32)

    def exact(self) -> np.ndarray:
        width = self.w2.shape[2]
        out = np.zeros(self.x.shape)
        for t, (ids, weights) in enumerate(zip(self.ids, self.weights, strict=True)):
            for e, weight in zip(ids, weights, strict=True):
                if e < 0:
                    continue
                both = self.w13[e].astype(np.float64) @ self.x[t].astype(np.float64)
                gate, up = both[:width], both[width:]
                out[t] += float(weight) * (self.w2[e].astype(np.float64) @ (gate / (1 + np.exp(-gate)) * up))
        return out


def layer_of(path: pathlib.Path, **options: object) -> tuple[moesaic.Checkpoint, int, moesaic.FusedMoE]:
    checkpoint = moesaic.Checkpoint(path)
    index = checkpoint.layers[0].layer
    return checkpoint, index, moesaic.FusedMoE.from_checkpoint(checkpoint, index, **options)


def hidden_states(layer: moesaic.FusedMoE, tokens: int = 9) -> np.ndarray:
    return np.random.default_rng(7).standard_normal((tokens, layer.spec.hidden_size)).astype(np.float32)


def presses_until_it_ends(work: Callable[[Callable[..., object]], object]) -> int:
    """How often Ctrl-C is noticed in a call that its progress presses it in, and that it must end.

    Pressed while no Python code runs that would notice: by C's raise, as C's functions ignore arguments left over.
    """
    in_c = functools.partial(getattr(ctypes.CDLL(None), "raise"), signal.SIGINT)
    noticed: list[int] = []

    def notice(number: int, frame: types.FrameType | None) -> None:
        noticed.append(number)
        if len(noticed) == 1:
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, notice)
    try:
        with pytest.raises(KeyboardInterrupt):
            work(in_c)
    finally:
        signal.signal(signal.SIGINT, before)
    return len(noticed)


def rel_l2(a: np.ndarray, b: np.ndarray) -> float:
    assert np.linalg.norm(b) > 0.1, "the reference is far from zero"
    return float(np.linalg.norm(np.asarray(a, dtype=np.float64) - b) / np.linalg.norm(b))


@pytest.fixture
def own() -> OwnExperts:
    return OwnExperts()
