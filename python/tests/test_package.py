"""The package with NumPy alone: its import, its tool, conversion, its environment."""

from __future__ import annotations

import json
import os
import pathlib
import signal
import subprocess
import sys

import numpy as np
import pytest
from conftest import MODELS, layer_of, presses_until_it_ends

import moesaic


def test_import_needs_no_framework() -> None:
    code = "import sys, moesaic; print([m for m in ('numpy', 'torch') if m in sys.modules])"
    run = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert run.stdout == "[]\n"


def test_no_object_of_the_extension_is_leaked(qwen3: pathlib.Path) -> None:
    code = (
        "import moesaic, numpy as np\n"
        f"c = moesaic.Checkpoint({str(qwen3)!r})\n"
        "l = moesaic.FusedMoE.from_checkpoint(c, c.layers[0].layer)\n"
        "x = np.zeros((3, l.spec.hidden_size), np.float32)\n"
        "y, t = l(x, trace=True)\n"
        "try: l(x[:, 1:])\n"
        "except moesaic.Error: pass\n"
    )
    run = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert "leaked" not in run.stderr, run.stderr
    kept = code + "import ctypes\nctypes.pythonapi.Py_IncRef(ctypes.py_object(l))\n"
    run = subprocess.run([sys.executable, "-c", kept], check=True, capture_output=True, text=True)
    assert "leaked" in run.stderr, "nothing would be said"


@pytest.mark.parametrize("model", ["mini-qwen3-moe", "mini-deepseek-v3", "mini-gpt-oss"])
def test_the_tool_of_the_package_verifies_the_bundled_models(model: str) -> None:
    run = subprocess.run(
        [sys.executable, "-m", "moesaic", "verify", "--model", str(MODELS / model), "--json"],
        check=True,
        capture_output=True,
        text=True,
    )
    assert json.loads(run.stdout)


def test_conversion_writes_what_the_layer_then_reads(qwen3: pathlib.Path, tmp_path: pathlib.Path) -> None:
    report = moesaic.convert(qwen3, tmp_path / "out", quant="nvfp4")
    assert report.bytes_out < report.bytes_in and report.layers[0].rel_l2_weights < 0.15
    _, _, layer = layer_of(tmp_path / "out")
    assert "nvfp4" in layer.quant
    with pytest.raises(moesaic.Error):
        moesaic.convert(qwen3, qwen3, quant="nvfp4")

    def press(done: int, total: int) -> None:
        os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        moesaic.convert(qwen3, tmp_path / "second", quant="nvfp4", progress=press)
    assert not (tmp_path / "second").exists()
    pressed = presses_until_it_ends(
        lambda in_c: moesaic.convert(qwen3, tmp_path / "third", quant="nvfp4", progress=in_c)
    )
    assert pressed == 1 and not (tmp_path / "third").exists()


def test_environment_names_what_there_is() -> None:
    report = moesaic.env()
    assert report["version"] == moesaic.__version__ and report["threads"] >= 1
    assert len(report["openmp"]) == 1, "two OpenMP runtimes wait against each other"
    assert report["frameworks"]["numpy"] == np.__version__


def test_activation_is_what_its_formula_says() -> None:
    x = np.random.default_rng(3).standard_normal((5, 8)).astype(np.float32)
    gate, up = x[:, :4].astype(np.float64), x[:, 4:].astype(np.float64)
    assert np.allclose(moesaic.apply_activation("silu", x), gate / (1 + np.exp(-gate)) * up, rtol=1e-6, atol=1e-7)
    assert moesaic.Activation("silu", limit=7.0) == moesaic.Activation("silu", limit=7.0) != moesaic.Activation("silu")
    with pytest.raises(moesaic.InvalidArgument):
        moesaic.Activation("gelu", limit=1.0)
