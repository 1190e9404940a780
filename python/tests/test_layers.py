"""The package with NumPy alone: layers, their stages, own weights, tensors in and out."""

from __future__ import annotations

import copy
import functools
import json
import os
import pathlib
import pickle
import shutil
import struct
import subprocess
import sys
import threading
import time
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from conftest import OwnExperts, hidden_states, layer_of, rel_l2

import moesaic


def test_recorded_float64_outputs_are_met_within_the_bound(model_path: pathlib.Path) -> None:
    checkpoint, index, layer = layer_of(model_path, quant="f32")
    golden = moesaic.TensorFile(model_path / "golden.safetensors")
    prefix = checkpoint.layer(index).prefix
    x = np.asarray(golden.read(f"{prefix}.input").float32())
    want = np.asarray(golden.read(f"{prefix}.output"), dtype=np.float64)
    assert rel_l2(layer(x), want) <= layer.bound


def test_what_a_trace_reports_yields_the_same_bits(model_path: pathlib.Path) -> None:
    checkpoint, index, layer = layer_of(model_path)
    x = hidden_states(layer)
    y, trace = layer(x, trace=True)
    assert np.array_equal(layer(x), y)
    assert np.array_equal(layer(x, router_logits=trace.router_logits), y)
    ids, weights = trace.topk_ids, trace.topk_weights
    assert ids.dtype == np.int32 and weights.dtype == np.float32 and ids.shape == (9, layer.spec.top_k)
    assert np.array_equal(layer(x, topk_ids=ids.astype(np.int64), topk_weights=weights), y)
    gate = moesaic.GateLinear.from_checkpoint(checkpoint, index)
    router = moesaic.Router.from_checkpoint(checkpoint, index)
    assert np.array_equal(gate(x), trace.router_logits)
    router_weights, router_ids = router(trace.router_logits)
    assert np.array_equal(router_ids, ids) and np.array_equal(router_weights, weights)


def test_routed_experts_of_a_checkpoint_are_the_layer_without_its_shared_expert(qwen3: pathlib.Path) -> None:
    checkpoint, index, layer = layer_of(qwen3)
    x = hidden_states(layer)
    y, trace = layer(x, trace=True)
    routed = moesaic.RoutedExperts.from_checkpoint(checkpoint, index)
    del checkpoint  # may go before its layers
    assert np.array_equal(routed(x, trace.topk_ids, trace.topk_weights), y)


def test_a_gate_that_is_not_kept_need_not_be_there(qwen3: pathlib.Path, tmp_path: pathlib.Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(qwen3, folder)
    for path in folder.glob("model*.safetensors"):
        whole = path.read_bytes()
        (length,) = struct.unpack("<Q", whole[:8])
        header, data = json.loads(whole[8 : 8 + length]), b""
        kept = {name: entry for name, entry in header.items() if not name.endswith("mlp.gate.weight")}
        for name, entry in kept.items():
            if name != "__metadata__":
                start, end = entry["data_offsets"]
                entry["data_offsets"] = [len(data), len(data) + end - start]
                data += whole[8 + length + start : 8 + length + end]
        text = json.dumps(kept).encode()
        path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    for path in folder.glob("*.index.json"):
        path.unlink()
    full, without = moesaic.Checkpoint(qwen3), moesaic.Checkpoint(folder)
    with pytest.raises(moesaic.MissingTensor, match="gate.weight"):
        moesaic.FusedMoE.from_checkpoint(without, 1)
    layer = moesaic.FusedMoE.from_checkpoint(full, 1)
    x = hidden_states(layer)
    y, trace = layer(x, trace=True)
    experts = moesaic.RoutedExperts.from_checkpoint(without, 1)
    assert np.array_equal(experts(x, trace.topk_ids, trace.topk_weights), y)
    gateless = moesaic.FusedMoE.from_checkpoint(without, 1, include_gate=False)
    assert np.array_equal(gateless(x, router_logits=trace.router_logits), y)
    assert np.array_equal(moesaic.Router.from_checkpoint(without, 1)(trace.router_logits)[1], trace.topk_ids)


def test_bits_do_not_depend_on_the_batch(qwen3: pathlib.Path) -> None:
    _, _, layer = layer_of(qwen3, max_tokens=4)
    x = hidden_states(layer, 11)
    y = layer(x)
    assert np.array_equal(np.concatenate([layer(x[i : i + 1]) for i in range(11)]), y)
    assert np.array_equal(layer(x[::-1].copy())[::-1], y)


def test_the_tool_computes_the_same_bits(qwen3: pathlib.Path, tmp_path: pathlib.Path) -> None:
    checkpoint, index, layer = layer_of(qwen3)
    prefix = checkpoint.layer(index).prefix
    out = tmp_path / "out.safetensors"
    source = f"{qwen3}/golden.safetensors:{prefix}.input"
    command = [
        sys.executable,
        "-m",
        "moesaic",
        "run",
        "--device",
        "cpu",
        "--model",
        qwen3,
        "--layer",
        str(index),
        "--input",
        source,
        "--output",
        out,
    ]
    subprocess.run(list(map(str, command)), check=True, capture_output=True)
    x = moesaic.TensorFile(qwen3 / "golden.safetensors").read(f"{prefix}.input")
    theirs = moesaic.TensorFile(out)
    [name] = [n for n in theirs.names() if n == "output"]
    mine = np.empty(x.shape, np.float32)
    _, trace = layer(x, out=mine, trace=True)
    assert np.array_equal(np.asarray(theirs.read("topk_ids")), np.asarray(trace.topk_ids))
    assert np.array_equal(np.asarray(theirs.read(name)), mine)


# --- Own weights -------------------------------------------------------------------------------------


def test_own_weights_are_computed_within_the_bound(own: OwnExperts) -> None:
    layer = moesaic.RoutedExperts.from_tensors(own.w13, own.w2, own.top_k)
    assert layer.quant == "f32"
    assert rel_l2(layer(own.x, own.ids, own.weights), own.exact()) <= layer.bound
    own.ids[3, 0] = -1
    assert rel_l2(layer(own.x, own.ids, own.weights), own.exact()) <= layer.bound


@pytest.mark.parametrize("gate_up", ["gate_then_up", "up_then_gate", "interleaved"])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_arrangements_of_the_same_weights_have_the_same_bits(
    own: OwnExperts, gate_up: str, transposed: bool, dtype: type
) -> None:
    w13, w2 = own.w13.astype(dtype), own.w2.astype(dtype)
    want = moesaic.RoutedExperts.from_tensors(w13, w2, own.top_k)(own.x, own.ids, own.weights)
    gate, up = np.split(w13, 2, axis=1)
    if gate_up == "up_then_gate":
        w13 = np.concatenate([up, gate], axis=1)
    if gate_up == "interleaved":
        w13 = np.stack([gate, up], axis=2).reshape(w13.shape)
    if transposed:
        w13, w2 = (np.ascontiguousarray(w.transpose(0, 2, 1)) for w in (w13, w2))
    layer = moesaic.RoutedExperts.from_tensors(w13, w2, own.top_k, gate_up=gate_up, transposed=transposed)
    assert np.array_equal(layer(own.x, own.ids, own.weights), want)
    if transposed:  # and by strides alone
        views = (w.transpose(0, 2, 1) for w in (w13, w2))
        assert np.array_equal(
            moesaic.RoutedExperts.from_tensors(*views, own.top_k, gate_up=gate_up)(own.x, own.ids, own.weights), want
        )


@pytest.mark.parametrize("quant", ["bf16", "fp8-block", "mxfp4", "nvfp4", "mxfp8", "int4-g128", "int8"])
def test_weights_are_quantised_while_packing(own: OwnExperts, quant: str) -> None:
    layer = moesaic.RoutedExperts.from_tensors(own.w13, own.w2, own.top_k, quant=quant)
    assert layer.quant == quant
    assert rel_l2(layer(own.x, own.ids, own.weights), own.exact()) <= layer.bound
    assert layer.weight_bytes < own.w13.nbytes + own.w2.nbytes


def test_codes_with_scales_are_taken_as_stored(own: OwnExperts) -> None:
    def blocks(w: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        e, n, k = w.shape
        tiles = w.reshape(e, n // 128, 128, k // 128, 128)
        scale = (np.abs(tiles).max(axis=(2, 4)) / 448).astype(np.float32)
        codes = (tiles / scale[:, :, None, :, None]).astype(ml_dtypes.float8_e4m3fn)
        return codes.reshape(w.shape), scale

    (w13, s13), (w2, s2) = blocks(own.w13), blocks(own.w2)
    layer = moesaic.RoutedExperts.from_tensors(
        w13, w2, own.top_k, stored="fp8-block", quant="f32", w13_scale=s13, w2_scale=s2
    )
    own.w13 = w13.astype(np.float32) * np.repeat(np.repeat(s13, 128, 1), 128, 2)
    own.w2 = w2.astype(np.float32) * np.repeat(np.repeat(s2, 128, 1), 128, 2)
    assert rel_l2(layer(own.x, own.ids, own.weights), own.exact()) <= layer.bound
    same = moesaic.RoutedExperts.from_tensors(
        w13.view(np.uint8), w2.view(np.uint8), own.top_k, stored="fp8-block", quant="f32", w13_scale=s13, w2_scale=s2
    )
    assert np.array_equal(same(own.x, own.ids, own.weights), layer(own.x, own.ids, own.weights))
    with pytest.raises(moesaic.AmbiguousFormat, match="stored="):
        moesaic.RoutedExperts.from_tensors(w13, w2, own.top_k, w13_scale=s13, w2_scale=s2)


def test_ids_beyond_are_dropped_where_asked_for(own: OwnExperts) -> None:
    own.ids[0, 1] = 8
    layer = moesaic.RoutedExperts.from_tensors(own.w13, own.w2, own.top_k, drop_ids_beyond=True)
    result = layer(own.x, own.ids, own.weights)
    own.ids[0, 1] = -1
    assert rel_l2(result, own.exact()) <= layer.bound
    own.ids[0, 1] = 8
    strict = moesaic.RoutedExperts.from_tensors(own.w13, own.w2, own.top_k)
    with pytest.raises(moesaic.InvalidArgument, match=r"topk_ids: got 8 at \[0, 1\]"):
        strict(own.x, own.ids, own.weights)
    own.ids[0, 1] = 2**31 - 1
    assert np.array_equal(layer(own.x, own.ids, own.weights), result)
    for dtype in (np.int64, np.uint32):
        own.ids = own.ids.astype(dtype)
        own.ids[0, 1] = 2**31 - 1
        assert np.array_equal(layer(own.x, own.ids, own.weights), result)
        own.ids[0, 1] = 2**31
        with pytest.raises(moesaic.InvalidArgument, match=r"got 2147483648 .* need -1 to 2\^31-1"):
            layer(own.x, own.ids, own.weights)


def test_rows_are_those_of_the_hidden_states(own: OwnExperts) -> None:
    layer = moesaic.RoutedExperts.from_tensors(own.w13, own.w2, own.top_k)
    x, ids, weights = own.x[:6], own.ids[:6], own.weights[:6]
    want = layer(x, ids, weights)
    cube = [t.reshape(2, 3, -1) for t in (x, ids, weights)]
    assert np.array_equal(layer(*cube).reshape(6, -1), want)
    assert np.array_equal(layer(cube[0], ids, weights).reshape(6, -1), want)
    assert np.array_equal(layer(x, *cube[1:]), want)
    for name, at in (("topk_ids", 1), ("topk_weights", 2)):
        wrong = list(cube)
        wrong[at] = wrong[at].reshape(3, 2, -1)
        with pytest.raises(moesaic.InvalidShape, match=rf"^{name}: got \[3, 2, 2\], need \[2, 3, 2\], with the rows"):
            layer(*wrong)


@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.uint32])
def test_tokens_and_padding_have_any_shape(dtype: type) -> None:
    rng = np.random.default_rng(3)
    table = rng.integers(0, 8, (100, 2), dtype=np.int32)
    router = moesaic.Router(num_experts=8, top_k=2, method="hash", scoring="sqrtsoftplus", hash_table=table)
    logits = rng.standard_normal((2, 3, 8)).astype(np.float32)
    tokens = rng.integers(0, 100, (2, 3)).astype(dtype)
    padding = np.array([[False, True, False], [False, False, True]])
    weights, ids = router(logits, input_ids=tokens)
    assert np.array_equal(ids, table[tokens.reshape(-1)])
    for mask in (padding, padding.reshape(-1), padding.astype(np.uint8)):
        for given in (tokens, tokens.reshape(-1)):
            shown = router(logits, input_ids=given, padding_mask=mask)
            kept = ~padding.reshape(-1)
            assert np.array_equal(shown[0][kept], weights[kept]) and np.array_equal(shown[1][kept], ids[kept])
            assert np.all(shown[1][~kept] == -1)
    for value in (-5, 1234, 2**33):
        if not np.iinfo(dtype).min <= value <= np.iinfo(dtype).max:
            continue
        tokens[0, 1] = value
        with pytest.raises(moesaic.InvalidArgument, match=rf"^input_ids.*: got {value}\b.*, need 0 to"):
            router(logits, input_ids=tokens)
        router(logits, input_ids=tokens, padding_mask=padding)  # it is no token there


def test_the_cpu_has_two_names(own: OwnExperts) -> None:
    layer = moesaic.RoutedExperts.from_tensors(own.w13, own.w2, own.top_k, device="cpu:0")
    assert layer.device == "cpu"
    with pytest.raises(moesaic.InvalidArgument, match='got "cpu:1", need cpu'):
        moesaic.RoutedExperts.from_tensors(own.w13, own.w2, own.top_k, device="cpu:1")


def test_tensors_are_checked_without_packing(own: OwnExperts) -> None:
    found = moesaic.RoutedExperts.check_tensors(own.w13, own.w2, own.top_k, quant="int4-g128")
    assert (
        found.experts_backend
        == moesaic.RoutedExperts.from_tensors(own.w13, own.w2, own.top_k, quant="int4-g128").experts_backend
    )
    codes, scale = own.w13.astype(ml_dtypes.float8_e4m3fn), np.ones((8, 2, 1), np.float32)
    bias = np.zeros((8, 256), np.float32)
    for refused in (
        {"w13": own.w13[:, :-1]},
        {"quant": "int4-g128", "w13_bias": bias},
        {"quant": "no-such-scheme"},
        {"backend": "no-such-backend"},
        {"device": "cuda:63"},
        {
            "w13": codes,
            "w2": own.w2.astype(codes.dtype),
            "stored": "fp8-block",
            "w13_scale": scale[:, :1],
            "w2_scale": scale[:, :1],
        },
    ):
        arguments = {"w13": own.w13, "w2": own.w2, "top_k": own.top_k} | refused
        with pytest.raises(moesaic.Error) as packing:
            moesaic.RoutedExperts.from_tensors(**arguments)
        with pytest.raises(type(packing.value)) as checking:
            moesaic.RoutedExperts.check_tensors(**arguments)
        shared = str(packing.value).removeprefix("experts: ")
        assert shared in str(checking.value) or str(checking.value) in shared, (shared, str(checking.value))
    with pytest.raises(TypeError, match=r"check_tensors\(\) got an unexpected keyword argument 'w3'"):
        moesaic.RoutedExperts.check_tensors(own.w13, own.w2, own.top_k, w3=own.w2)
    # All that from_tensors takes, and infinities of the first expert.
    options = {"num_threads": 1, "drop_ids_beyond": True, "progress": print, "max_tokens": 7, "backend": None}
    moesaic.RoutedExperts.check_tensors(own.w13, own.w2, own.top_k, **options)
    with pytest.raises(moesaic.InvalidArgument, match="num_threads"):
        moesaic.RoutedExperts.check_tensors(own.w13, own.w2, own.top_k, num_threads=-1)


@pytest.mark.parametrize("check", [moesaic.RoutedExperts.from_tensors, moesaic.RoutedExperts.check_tensors])
def test_static_scales_are_those_of_schemes_that_have_them(own: OwnExperts, check: Any) -> None:
    """What a scheme does not use is refused: set aside it would be another computation than was meant."""
    ones = np.ones((8, 1), np.float32)
    codes = {"w13": own.w13.astype(ml_dtypes.float8_e4m3fn), "w2": own.w2.astype(ml_dtypes.float8_e4m3fn)}
    scales = {"w13_scale": ones, "w2_scale": ones}
    given = {"w13_input_scale": ones, "w2_input_scale": ones}
    for quant in ("as-is", "f32", "fp8-bf16"):
        for name, scale in given.items():
            with pytest.raises(
                moesaic.InvalidArgument,
                match=rf'^{name}: got \[8, 1\], but activations of stored "fp8-tensor" have no static scales',
            ):
                check(**codes, top_k=2, stored="fp8-tensor", quant=quant, **scales, **{name: scale})
        check(**codes, top_k=2, stored="fp8-static", quant=quant, **scales, **given)
    with pytest.raises(moesaic.InvalidArgument, match='stored "f32" have no static'):
        check(own.w13, own.w2, 2, **given)


def test_gate_up_of_an_activation(own: OwnExperts) -> None:
    x = np.ones((2, 4), np.float32)
    for activation in ("silu", "relu2"):
        with pytest.raises(moesaic.InvalidArgument, match='^gate_up: got "up_gate", need "gate_then_up"'):
            moesaic.apply_activation(activation, x, gate_up="up_gate")
    with pytest.raises(
        moesaic.InvalidArgument, match='^gate_up: got "none" with activation silu, which is gated, need'
    ):
        moesaic.apply_activation("silu", x, gate_up="none")
    with pytest.raises(moesaic.InvalidArgument, match='which is not gated, need "none"'):
        moesaic.apply_activation("relu2", x, gate_up="interleaved")
    assert np.array_equal(moesaic.apply_activation("relu2", x, gate_up="none"), x)


@pytest.mark.parametrize(
    ("quant", "value"),
    [("fp8-block", np.inf), ("int4-g128", np.nan), ("f16", 1e30), ("bf16", 3.4e38)],
)
def test_first_experts_are_checked_as_they_will_be_stored(own: OwnExperts, quant: str, value: float) -> None:
    """What a format does not have is found by the check where the first expert has it, and by packing anywhere."""
    for expert in (0, 3):
        w2 = own.w2.copy()
        w2[expert, 5, 7] = value
        with pytest.raises(moesaic.Error) as packing:
            moesaic.RoutedExperts.from_tensors(own.w13, w2, own.top_k, quant=quant)
        if expert == 0:
            with pytest.raises(type(packing.value)) as checking:
                moesaic.RoutedExperts.check_tensors(own.w13, w2, own.top_k, quant=quant)
            assert str(checking.value) == str(packing.value)
        else:
            moesaic.RoutedExperts.check_tensors(own.w13, w2, own.top_k, quant=quant)


def test_biases_of_half_precision_are_widened(own: OwnExperts) -> None:
    rng = np.random.default_rng(2)
    w13, w2 = own.w13.astype(np.float16), own.w2.astype(np.float16)
    both = {
        "w13_bias": rng.standard_normal((8, 512)).astype(np.float16)[:, ::2],  # strided
        "w2_bias": rng.standard_normal((8, 128)).astype(np.float16),
    }
    wide = {name: bias.astype(np.float32) for name, bias in both.items()}
    for gate_up in ("gate_then_up", "interleaved"):
        got, want = (
            moesaic.RoutedExperts.from_tensors(w13, w2, own.top_k, gate_up=gate_up, **biases)(
                own.x.astype(np.float16), own.ids, own.weights
            )
            for biases in (both, wide)
        )
        assert np.array_equal(got, want)
    moesaic.RoutedExperts.check_tensors(w13, w2, own.top_k, **both)
    with pytest.raises(moesaic.InvalidShape, match="w2_bias: got"):
        moesaic.RoutedExperts.from_tensors(w13, w2, own.top_k, w2_bias=both["w2_bias"][:, :, None])


@pytest.mark.parametrize("quant", ["as-is", "nvfp4"])
def test_progress_of_own_weights(own: OwnExperts, quant: str) -> None:
    seen: list[tuple[int, int]] = []
    moesaic.RoutedExperts.from_tensors(own.w13, own.w2, own.top_k, quant=quant, progress=lambda *at: seen.append(at))
    total = own.w13.nbytes + own.w2.nbytes
    assert seen == [(total // 8 * (e + 1), total) for e in range(8)]

    def fail(done: int, total: int) -> None:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        moesaic.RoutedExperts.from_tensors(own.w13, own.w2, own.top_k, quant=quant, progress=fail)


# --- Tensors -----------------------------------------------------------------------------------------


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


def test_an_activation_lets_other_threads_run() -> None:
    """It doesn't hold the interpreter's lock meanwhile."""
    x, counted, done = np.ones((4000, 2000), np.float32), 0, threading.Event()

    def work() -> None:
        moesaic.apply_activation("gelu", x, out=np.empty((4000, 1000), np.float32))
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


@pytest.mark.parametrize("what", ["read", "float32"])
def test_reading_a_tensor_lets_other_threads_run(tmp_path: pathlib.Path, what: str) -> None:
    size = 1 << 28 if what == "read" else 1 << 25
    header = json.dumps({"t": {"dtype": "F8_E4M3", "shape": [size], "data_offsets": [0, size]}}).encode()
    with (tmp_path / "file").open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        file.truncate(file.tell() + size)
    reader = moesaic.TensorFile(tmp_path / "file")
    call = functools.partial(reader.read, "t") if what == "read" else reader.read("t").float32
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


def test_misuse_is_refused_with_the_reason(own: OwnExperts) -> None:
    layer = moesaic.RoutedExperts.from_tensors(own.w13, own.w2, own.top_k)
    with pytest.raises(moesaic.InvalidArgument, match="hidden_states: got a list, need a tensor"):
        layer([1.0], own.ids, own.weights)
    with pytest.raises(moesaic.InvalidShape, match=r"hidden_states: got \[17, 127\], need \[M, 128\]"):
        layer(own.x[:, :-1], own.ids, own.weights)
    with pytest.raises(moesaic.InvalidLayout):
        layer(np.asfortranarray(own.x), own.ids, own.weights)
    with pytest.raises(moesaic.InvalidDType, match="topk_ids"):
        layer(own.x, own.ids.astype(np.float32), own.weights)
    with pytest.raises(moesaic.InvalidDType, match="hidden_states"):
        layer(own.x.astype(np.complex128), own.ids, own.weights)
    with pytest.raises(moesaic.Aliasing):
        layer(own.x, own.ids, own.weights, out=own.x)
    read_only = np.empty_like(own.x)
    read_only.flags.writeable = False
    with pytest.raises(moesaic.InvalidArgument, match="read-only"):
        layer(own.x, own.ids, own.weights, out=read_only)
    with pytest.raises(moesaic.InvalidShape, match=r"out: got \[16, 128\], need \[17, 128\]"):
        layer(own.x, own.ids, own.weights, out=np.empty_like(own.x[:16]))
    with pytest.raises(moesaic.InvalidShape, match=r"need \[E, 2I, H\] and \[E, H, I\]"):
        moesaic.RoutedExperts.from_tensors(own.w13[:, :-1], own.w2, 2)
    with pytest.raises(moesaic.InvalidArgument, match="gate_up"):
        moesaic.RoutedExperts.from_tensors(own.w13, own.w2, 2, activation="relu2", gate_up="interleaved")
    with pytest.raises(TypeError, match="w14_scale"):
        moesaic.RoutedExperts.from_tensors(own.w13, own.w2, 2, w14_scale=own.w2)
    for copied in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="cannot be copied or pickled"):
            copied(layer)
