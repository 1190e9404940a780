"""The package with NumPy alone: layers, their stages, own weights."""

from __future__ import annotations

import copy
import json
import pathlib
import pickle
import shutil
import struct
import subprocess
import sys
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


def test_numbers_of_a_routers_method() -> None:
    logits = np.random.default_rng(4).standard_normal((5, 8)).astype(np.float32)
    scores = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    chosen = -np.sort(-scores, axis=1)[:, :3]
    size = {"num_experts": 8, "top_k": 3}

    def weights(**options: object) -> np.ndarray:
        router = moesaic.Router(**size, **options)
        for name, value in options.items():
            assert name == "method" or getattr(router.routing, name) == value
        return router(logits)[0]

    norm = np.sqrt((chosen**2).sum(axis=1, keepdims=True))
    assert np.allclose(weights(method="p_norm", p_norm=2.0), chosen / norm, rtol=1e-5)
    total = chosen.sum(axis=1, keepdims=True)
    assert np.allclose(weights(renormalize=True, renorm_epsilon=0.5), chosen / (total + 0.5), rtol=1e-5)
    assert np.allclose(weights(renormalize=True, renorm_floor=2.0), chosen / 2, rtol=1e-5)
    best = weights(method="grouped_topk", num_expert_group=4, topk_group=2)
    two = weights(method="grouped_topk", num_expert_group=4, topk_group=2, group_by_best_two=True)
    assert not np.array_equal(best, two)
    mixer = {"num_experts": 8, "top_k": 2, "method": "sparse_mixer"}
    near, far = (moesaic.Router(**mixer, jitter_eps=eps)(logits)[0] for eps in (0.01, 0.3))
    assert not np.array_equal(near, far)
    for name, value in (("p_norm", 2.0), ("jitter_eps", 0.5), ("renorm_floor", 1.0), ("renorm_epsilon", 1.0)):
        with pytest.raises(moesaic.InvalidArgument, match=rf"routing\.{name}: got .* do not read it"):
            moesaic.Router(**size, **{name: value})


def test_experts_behind_the_routed_ones() -> None:
    rng = np.random.default_rng(6)
    logits = rng.standard_normal((5, 8)).astype(np.float32)
    weights, ids = moesaic.Router(num_experts=8, top_k=3)(logits)
    shared = moesaic.Router(num_experts=8, top_k=3, num_fused_shared_experts=2, shared_expert_weight=0.25)(logits)
    assert np.array_equal(shared[0][:, :3], weights) and np.array_equal(shared[1][:, :3], ids)
    assert np.all(shared[0][:, 3:] == 0.25) and np.all(shared[1][:, 3:] == [8, 9])

    identity = moesaic.Router(
        num_experts=6, num_zero_experts=2, top_k=3, method="zero_expert", correction_bias=np.zeros(8, np.float32)
    )
    assert identity.routing.num_zero_experts == 2
    x = rng.standard_normal((5, 4)).astype(np.float32)
    own_weights, own_ids, output = identity(logits, hidden_states=x)
    own = ids < 6
    assert np.array_equal(own_weights, np.where(own, weights, 0)) and np.array_equal(own_ids, np.where(own, ids, 0))
    share = np.where(own, 0, weights).sum(axis=1, keepdims=True)
    assert share.max() > 0 and np.allclose(output, x * share, rtol=1e-6)
    with pytest.raises(moesaic.InvalidArgument, match="num_zero_experts: got 2"):
        moesaic.Router(num_experts=6, num_zero_experts=2, top_k=3)
    with pytest.raises(moesaic.InvalidArgument, match="shared_expert_weight: got inf"):
        moesaic.Router(num_experts=6, top_k=3, num_fused_shared_experts=1, shared_expert_weight=float("inf"))


def test_tokens_of_images_choose_by_score() -> None:
    rng = np.random.default_rng(7)
    table = rng.integers(0, 8, (16, 2), dtype=np.int32)
    bias = rng.standard_normal(8).astype(np.float32)
    hashed = {"num_experts": 8, "top_k": 2, "method": "hash", "scoring": "sqrtsoftplus", "hash_table": table}
    router = moesaic.Router(**hashed, vision_bias=bias, vision_token_base=100)
    logits = rng.standard_normal((8, 8)).astype(np.float32)
    tokens = np.array([3, 100, 101, 102, 103, 104, 15, 0], np.int32)
    ids = router(logits, input_ids=tokens)[1]
    seen = (tokens >= 100) & (tokens < 105)
    assert np.array_equal(ids[~seen], table[tokens[~seen]])
    scores = np.sqrt(np.log1p(np.exp(logits))) + bias
    assert np.array_equal(ids[seen], np.argsort(-scores, axis=1)[seen, :2])
    with pytest.raises(moesaic.InvalidArgument, match=r"input_ids\[5\]: got 105"):
        router(logits, input_ids=np.where(tokens == 104, 105, tokens))
    for given in ({"vision_bias": bias}, {"vision_token_base": 100}):
        with pytest.raises(moesaic.InvalidArgument, match="vision_"):
            moesaic.Router(**hashed, **given)


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
