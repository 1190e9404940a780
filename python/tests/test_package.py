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


@pytest.mark.parametrize(
    "kind", ["class Mine(np.ndarray): pass", "class Mine:\n    def __init__(self, a): self.__dlpack__ = a.__dlpack__"]
)
def test_a_callers_class_of_tensors_is_not_kept(kind: str) -> None:
    """Nor, with it, the module that it is from and what that has."""
    code = f"""
import moesaic, numpy as np, gc, weakref
gate = moesaic.GateLinear(np.ones((8, 16), np.float32))
{kind}
x = np.ones((3, 16), np.float32)
x = x.view(Mine) if issubclass(Mine, np.ndarray) else Mine(x)
gate(x)
def made():
    kept = type("Kept", (Mine,), {{}})
    gate(x.view(kept) if issubclass(kept, np.ndarray) else kept(np.ones((3, 16), np.float32)))
    return weakref.ref(kept)
types = [made() for _ in range(100)]
gc.collect()
assert not [one for one in types if one() is not None]
for _ in range(3):
    made()  # a new type where an old one was
    gate(x)
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert run.returncode == 0 and "leaked" not in run.stderr, run.stderr


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


WITHOUT_GPU = """
import json, numpy as np, moesaic
w13, w2 = np.ones((4, 256, 128), np.float32), np.ones((4, 128, 128), np.float32)
checkpoint = moesaic.Checkpoint(MODEL)
found = {}
for name, make in {
    "own experts": lambda: moesaic.RoutedExperts.from_tensors(w13, w2, 2, device="cuda"),
    "layer": lambda: moesaic.FusedMoE.from_checkpoint(checkpoint, 1, device="cuda:0"),
    "router": lambda: moesaic.Router(num_experts=4, top_k=2, device="cuda"),
    "gate": lambda: moesaic.GateLinear(np.ones((4, 128), np.float32), device="cuda"),
}.items():
    try:
        make()
    except moesaic.Error as error:
        found[name] = [type(error).__name__, str(error)]
layer = moesaic.FusedMoE.from_checkpoint(checkpoint, 1)
assert np.isfinite(layer(np.ones((2, layer.spec.hidden_size), np.float32))).all()
print(json.dumps([moesaic.env()["cuda"], found]))
"""


def test_a_gpu_that_is_not_there_is_refused_with_the_reason(qwen3: pathlib.Path) -> None:
    # With and without kernels in the package, and where there is a GPU too: it is hidden.
    run = subprocess.run(
        [sys.executable, "-c", WITHOUT_GPU.replace("MODEL", repr(str(qwen3)))],
        check=True,
        capture_output=True,
        text=True,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
    )
    cuda, found = json.loads(run.stdout)
    assert not cuda["available"] and cuda["reason"] and cuda["devices"] == []
    want = "DeviceError" if cuda["built"] else "Unsupported"
    assert {name: error[0] for name, error in found.items()} == dict.fromkeys(
        ("own experts", "layer", "router", "gate"), want
    )
    assert all(cuda["reason"] in error[1] for error in found.values())


def test_activation_is_what_its_formula_says() -> None:
    x = np.random.default_rng(3).standard_normal((5, 8)).astype(np.float32)
    gate, up = x[:, :4].astype(np.float64), x[:, 4:].astype(np.float64)
    assert np.allclose(moesaic.apply_activation("silu", x), gate / (1 + np.exp(-gate)) * up, rtol=1e-6, atol=1e-7)
    assert moesaic.Activation("silu", limit=7.0) == moesaic.Activation("silu", limit=7.0) != moesaic.Activation("silu")
    with pytest.raises(moesaic.InvalidArgument):
        moesaic.Activation("gelu", limit=1.0)
