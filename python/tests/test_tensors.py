"""Tensors into calls and out of them, with NumPy alone: kinds, dtypes, layouts, lifetimes."""

from __future__ import annotations

import functools
import json
import os
import pathlib
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from conftest import OwnExperts, rel_l2

import moesaic


def test_out_is_written_in_place_and_rows_may_be_strided(own: OwnExperts) -> None:
    layer = moesaic.RoutedExperts.from_tensors(own.w13, own.w2, own.top_k)
    want = layer(own.x, own.ids, own.weights)
    out = np.full_like(own.x, np.nan)
    assert layer(own.x, own.ids, own.weights, out=out) is out
    assert np.array_equal(out, want)
    wide = np.zeros((own.x.shape[0], 3 * own.x.shape[1]), np.float32)
    wide[:, : own.x.shape[1]] = own.x
    assert np.array_equal(layer(wide[:, : own.x.shape[1]], own.ids, own.weights), want)
    batched = own.x[:16].reshape(4, 4, -1)
    assert np.array_equal(layer(batched, own.ids[:16], own.weights[:16]).reshape(16, -1), want[:16])


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_output_has_the_dtype_of_the_input(own: OwnExperts, dtype: type) -> None:
    layer = moesaic.RoutedExperts.from_tensors(own.w13, own.w2, own.top_k)
    x, weights = own.x.astype(dtype), own.weights.astype(dtype)
    y = layer(x, own.ids, weights)
    assert type(y) is np.ndarray and y.dtype == dtype
    wide = layer(x.astype(np.float32), own.ids, weights.astype(np.float32))
    assert np.array_equal(y, wide.astype(dtype)), "rounded once"


class OnlyDlpack:
    def __init__(self, array: np.ndarray) -> None:
        self._array = array

    def __dlpack__(self, **options: object) -> object:
        return self._array.__dlpack__()

    def __dlpack_device__(self) -> tuple[int, int]:
        return (1, 0)


def test_any_dlpack_producer_goes_in_and_a_tensor_comes_out(own: OwnExperts) -> None:
    layer = moesaic.RoutedExperts.from_tensors(OnlyDlpack(own.w13), OnlyDlpack(own.w2), own.top_k)
    y = layer(OnlyDlpack(own.x), own.ids, own.weights)
    assert isinstance(y, moesaic.Tensor) and y.dtype == "F32" and y.shape == own.x.shape
    seen = np.from_dlpack(y)
    del y
    assert rel_l2(seen, own.exact()) <= layer.bound


def test_a_tensor_exports_what_it_can(own: OwnExperts) -> None:
    layer = moesaic.RoutedExperts.from_tensors(own.w13, own.w2, own.top_k)
    y = layer(OnlyDlpack(own.x), own.ids, own.weights)
    assert y.__dlpack__(dl_device=(1, 0), max_version=(1, 1)) is not None
    with pytest.raises(BufferError, match="host memory"):
        y.__dlpack__(dl_device=(2, 0))
    with pytest.raises(BufferError, match="exports its own memory"):
        y.__dlpack__(copy=True)
    for version in ("a", ("a", 0), (1,), 1):
        with pytest.raises(moesaic.InvalidArgument, match="max_version: got .* need a pair of whole numbers"):
            y.__dlpack__(max_version=version)


def test_logits_in_a_type_that_numpy_lacks() -> None:
    code = """
import numpy as np, moesaic
x, weight = np.ones((3, 16), np.float32), np.full((8, 16), 0.5, np.float32)
logits = moesaic.GateLinear(weight, logits_dtype="BF16")(x)
assert type(logits) is moesaic.Tensor and logits.dtype == "BF16" and logits.shape == (3, 8), logits
assert np.all(np.asarray(logits.float32()) == 8.0)
weights, ids = moesaic.Router(num_experts=8, top_k=2)(logits)
assert np.asarray(ids).tolist() == [[0, 1]] * 3
import ml_dtypes
logits = moesaic.GateLinear(weight, logits_dtype="BF16")(x)
assert type(logits) is np.ndarray and logits.dtype == ml_dtypes.bfloat16
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr


def test_numpy_has_no_array_of_bfloat16(qwen3: pathlib.Path) -> None:
    tensor = moesaic.Checkpoint(qwen3).read_tensor("model.embed_tokens.weight")
    for read in (np.asarray, np.array, type(tensor).__array__):
        with pytest.raises(moesaic.InvalidDType, match=r"got BF16, which NumPy does not have, need float32\(\)"):
            read(tensor)
    wide = tensor.float32()
    seen = np.asarray(wide)
    assert seen.dtype == np.float32 and seen.flags.writeable and np.shares_memory(seen, wide.__array__())
    assert wide.__array__(np.float64).dtype == np.float64
    assert not np.shares_memory(seen, wide.__array__(copy=True))


@pytest.mark.parametrize(
    ("dtype", "bits", "numpys"),
    [
        *(("F8_E4M3FNUZ", 8, None), ("F8_E5M2FNUZ", 8, None), ("F6_E2M3", 6, None), ("F6_E3M2", 6, None)),
        *(("F4", 4, None), ("C64", 64, np.complex64), ("U16", 16, np.uint16), ("BOOL", 8, np.bool_)),
    ],
)
def test_tensors_of_every_type_of_files_go_on(tmp_path: pathlib.Path, dtype: str, bits: int, numpys: Any) -> None:
    """What read() returns has the type that the file says, for NumPy and where it is handed over."""
    data = bytes(range(8 * bits // 8))
    header = json.dumps({"t": {"dtype": dtype, "shape": [2, 4], "data_offsets": [0, len(data)]}}).encode()
    (tmp_path / "file").write_bytes(struct.pack("<Q", len(header)) + header + data)
    tensor = moesaic.TensorFile(tmp_path / "file").read("t")
    with pytest.raises(moesaic.InvalidDType, match=f"got {dtype}, need F32"):  # it has arrived as what it is
        moesaic.apply_activation("silu", tensor)
    if numpys is not None:
        assert (
            np.asarray(tensor).dtype == numpys and np.asarray(tensor).tobytes() == np.frombuffer(data, numpys).tobytes()
        )
        return
    with pytest.raises(moesaic.InvalidDType, match=f"got {dtype}, which NumPy does not have"):
        np.asarray(tensor)


class Subclass(np.ndarray):
    pass


def test_subclasses_of_numpys_arrays(own: OwnExperts) -> None:
    layer = moesaic.RoutedExperts.from_tensors(own.w13, own.w2, own.top_k)
    want = layer(own.x, own.ids, own.weights)
    for kind in (Subclass, np.memmap):
        result = layer(own.x.view(kind), own.ids.view(kind), own.weights)
        assert type(result) is np.ndarray and np.array_equal(result, want)
    masked = np.ma.masked_less(own.x, 0)
    with pytest.raises(moesaic.InvalidArgument, match="hidden_states: got a numpy.ma.*, whose mask would be ignored"):
        layer(masked, own.ids, own.weights)
    assert np.isfinite(layer(masked.filled(0), own.ids, own.weights)).all()
    with pytest.raises(moesaic.InvalidArgument, match="topk_ids: got a numpy.ma"):
        layer(own.x, np.ma.array(own.ids), own.weights)


class LikeScalar:
    """As NumPy's scalars before 2.5: a copy for each question, which only the answer keeps alive."""

    def __init__(self, value: np.ndarray) -> None:
        self.value, self.dtype = value, value.dtype

    @property
    def __array_interface__(self) -> dict[str, Any]:
        copied = self.value.copy()
        answer = {**copied.__array_interface__, "__ref": SpoiledAtTheEnd(copied)}
        kept.append(copied)  # the memory itself stays
        return answer


kept: list[np.ndarray] = []


class SpoiledAtTheEnd:
    def __init__(self, array: np.ndarray) -> None:
        self.array = array

    def __del__(self) -> None:
        self.array.fill(77)


def test_memory_that_only_the_array_interface_keeps_lives_as_long_as_the_call(own: OwnExperts) -> None:
    layer = moesaic.RoutedExperts.from_tensors(own.w13, own.w2, own.top_k)
    want = layer(own.x, own.ids, own.weights)
    kept.clear()
    assert np.array_equal(layer(LikeScalar(own.x), LikeScalar(own.ids), LikeScalar(own.weights)), want)
    own_layer = moesaic.RoutedExperts.from_tensors(LikeScalar(own.w13), LikeScalar(own.w2), own.top_k)
    assert np.array_equal(own_layer(own.x, own.ids, own.weights), want)
    assert all((array == 77).all() for array in kept)  # and not longer


class OnDevice:
    """Device memory, as far as nobody looks at it."""

    dtype = np.dtype("float32")

    def __init__(self, shape: tuple[int, ...], stream: Any) -> None:
        self.__cuda_array_interface__ = {"shape": shape, "data": (4096, False), "stream": stream, "version": 3}


def test_a_stream_in_an_interface_is_one(own: OwnExperts) -> None:
    layer = moesaic.RoutedExperts.from_tensors(own.w13, own.w2, own.top_k)
    out = np.empty_like(own.x)
    for stream, message in (
        (0, "^hidden_states: got stream 0 in the array interface"),
        ("a", "^hidden_states: got .*, need a stream"),
        (None, "^hidden_states: got a tensor on cuda:0, need one on cpu"),
        (1, "^hidden_states: got a tensor on cuda:0, need one on cpu"),
    ):
        with pytest.raises(moesaic.InvalidArgument, match=message):
            layer(OnDevice(own.x.shape, stream), own.ids, own.weights, out=out)


class WithStrides:
    def __init__(self, array: np.ndarray, dtype: str, strides: Any) -> None:
        self.array, self.dtype = array, dtype
        self.__array_interface__ = {**array.__array_interface__, "strides": strides}


def test_strides_that_are_none_are_refused(own: OwnExperts) -> None:
    layer = moesaic.RoutedExperts.from_tensors(own.w13, own.w2, own.top_k)
    for dtype, strides, message in (
        ("F4", (4, 4), "^hidden_states: got strides in bytes, need none for F4"),
        ("F32", ("a", 4), "^hidden_states: got a malformed array interface"),
        ("F32", (2**70, 4), "^hidden_states: got a malformed array interface"),
    ):
        with pytest.raises(moesaic.Error, match=message):
            layer(WithStrides(own.x, dtype, strides), own.ids, own.weights)


def test_values_of_other_types_are_named(own: OwnExperts) -> None:
    for wrong in ("5", 1.5, 2**40, "x" * 1000, [1]):
        with pytest.raises(moesaic.InvalidArgument, match="^num_threads: got .*, need a whole number") as caught:
            moesaic.RoutedExperts.from_tensors(own.w13, own.w2, own.top_k, num_threads=wrong)
        assert len(str(caught.value)) < 160
    moesaic.RoutedExperts.from_tensors(own.w13, own.w2, own.top_k, num_threads=np.int64(1))
    spec = moesaic.LayerSpec(hidden_size=128, intermediate_size=128, num_experts=8, top_k=2)
    with pytest.raises(moesaic.InvalidArgument, match="^names: got 5, need a mapping of texts"):
        moesaic.WeightLoader.from_spec(spec, moesaic.ExpertNames(), names={"a": 5})
    loader = moesaic.WeightLoader.from_spec(spec, moesaic.ExpertNames())
    with pytest.raises(moesaic.InvalidArgument, match="^pairs: got 5, need a text"):
        loader.load_weights([(5, own.w2)])
    need = r"need pairs of a name and a tensor: of a dict, its items\(\)$"
    for pairs, found in (
        ({"a.weight": own.w2}, "'a.weight'"),
        ([("a",)], r"\('a',\)"),
        ([("a", 1, 2)], r"\('a', 1, 2\)"),
    ):
        with pytest.raises(moesaic.InvalidArgument, match=f"^pairs: got {found}, {need}"):
            loader.load_weights(pairs)
    with pytest.raises(moesaic.InvalidArgument, match=r"^names: got \['a'\], need a mapping of texts"):
        moesaic.WeightLoader.from_spec(spec, moesaic.ExpertNames(), names=["a"])
    with pytest.raises(moesaic.InvalidArgument, match="^layer: got 3 with the LayerSpec of layer -1, need none"):
        moesaic.explain(spec, 3)


def test_paths_need_not_be_text(qwen3: pathlib.Path, tmp_path: pathlib.Path) -> None:
    folder = os.fsencode(tmp_path) + b"/n\xff"
    os.symlink(os.fsencode(qwen3), folder)
    for path in (os.fsdecode(folder), folder, pathlib.Path(os.fsdecode(folder))):
        assert len(moesaic.Checkpoint(path).layers) > 0
    with pytest.raises(moesaic.NotFound):
        moesaic.Checkpoint(os.fsdecode(folder + b"\xfe"))


def assert_lets_others_run(call: Callable[[], object]) -> None:
    """It doesn't hold the interpreter's lock meanwhile."""
    counted, done = 0, threading.Event()

    def work() -> None:
        call()
        done.set()

    before = sys.getswitchinterval()
    sys.setswitchinterval(10)  # nobody is interrupted: a thread runs when another one lets it
    try:
        thread = threading.Thread(target=work)
        thread.start()
        while not done.is_set():
            counted += 1
            time.sleep(0)
        thread.join()
    finally:
        sys.setswitchinterval(before)
    assert counted > 3


def test_an_activation_lets_other_threads_run() -> None:
    x = np.ones((4000, 2000), np.float32)
    assert_lets_others_run(lambda: moesaic.apply_activation("gelu", x, out=np.empty((4000, 1000), np.float32)))


@pytest.mark.parametrize("what", ["read", "float32"])
def test_reading_a_tensor_lets_other_threads_run(tmp_path: pathlib.Path, what: str) -> None:
    size = 1 << 28 if what == "read" else 1 << 25
    header = json.dumps({"t": {"dtype": "F8_E4M3", "shape": [size], "data_offsets": [0, size]}}).encode()
    with (tmp_path / "file").open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        file.truncate(file.tell() + size)
    reader = moesaic.TensorFile(tmp_path / "file")
    call = functools.partial(reader.read, "t") if what == "read" else reader.read("t").float32
    assert_lets_others_run(call)
