"""The package with NumPy alone: layers, stages, files, refusals."""

from __future__ import annotations

import copy
import ctypes
import functools
import json
import os
import pathlib
import pickle
import signal
import subprocess
import sys
import threading
import types
from collections.abc import Callable

import ml_dtypes
import numpy as np
import pytest
from conftest import MODELS, OwnExperts, rel_l2

import moesaic


def layer_of(path: pathlib.Path, **options: object) -> tuple[moesaic.Checkpoint, int, moesaic.FusedMoE]:
    checkpoint = moesaic.Checkpoint(path)
    index = checkpoint.layers[0].layer
    return checkpoint, index, moesaic.FusedMoE.from_checkpoint(checkpoint, index, **options)


def hidden_states(layer: moesaic.FusedMoE, tokens: int = 9) -> np.ndarray:
    return np.random.default_rng(7).standard_normal((tokens, layer.spec.hidden_size)).astype(np.float32)


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


# --- Weights by tensor -------------------------------------------------------------------------------


@pytest.mark.parametrize("quant", ["as-is", "fp8-block", "mxfp4"])
def test_weights_come_tensor_by_tensor(qwen3: pathlib.Path, tmp_path: pathlib.Path, quant: str) -> None:
    folder = qwen3
    if quant != "as-is":
        moesaic.convert(qwen3, tmp_path / "model", quant=quant)
        folder = tmp_path / "model"
    checkpoint, index, want = layer_of(folder)
    loader = moesaic.WeightLoader.from_config((folder / "config.json").read_text(), index)
    names = loader.missing()
    assert loader.bytes == 0 and len(names) > 3 * want.spec.num_experts
    pairs = [(name, checkpoint.read_tensor(name)) for name in reversed(names)]
    with pytest.raises(moesaic.MissingTensor, match="experts"):
        moesaic.FusedMoE.from_loader(loader)
    assert loader.load_weights(iter(pairs)) == [name for name, _ in pairs]
    assert not loader.missing() and loader.bytes > 800_000
    with pytest.raises(moesaic.InvalidArgument, match=names[0]):
        loader.load(*pairs[-1])
    layer = moesaic.FusedMoE.from_loader(loader)
    x = hidden_states(layer)
    assert np.array_equal(layer(x), want(x))
    # Experts alone, under names of the caller's own, from a configuration that is parsed already.
    config = json.loads((folder / "config.json").read_text())
    alone = moesaic.WeightLoader.from_config(config, index, names={"wrapped.": ""}, experts_only=True)
    kept = [alone.load(f"wrapped.{name}", tensor) for name, tensor in pairs]
    assert kept == [".experts." in name for name, _ in pairs]
    _, trace = want(x, trace=True)
    same = moesaic.RoutedExperts.from_checkpoint(checkpoint, index)(x, trace.topk_ids, trace.topk_weights)
    assert np.array_equal(moesaic.RoutedExperts.from_loader(alone)(x, trace.topk_ids, trace.topk_weights), same)


def test_a_loader_refuses_with_the_reason(qwen3: pathlib.Path) -> None:
    checkpoint = moesaic.Checkpoint(qwen3)
    loader = moesaic.WeightLoader.from_checkpoint(checkpoint, 1, experts_only=True)
    name = loader.missing()[0]
    tensor = np.asarray(checkpoint.read_tensor(name).float32()).astype(ml_dtypes.bfloat16)
    with pytest.raises(moesaic.InvalidShape, match=name):
        loader.load(name, tensor[:-1].copy())
    with pytest.raises(moesaic.InvalidDType, match=name):
        loader.load(name, tensor.astype(np.int32))
    with pytest.raises(moesaic.InvalidLayout):
        loader.load(name, np.asfortranarray(tensor))
    with pytest.raises(moesaic.InvalidArgument, match="got None"):
        loader.load(name, None)
    assert loader.load("model.embed_tokens.weight", tensor) is False and loader.bytes == 0
    assert loader.load(name, tensor) and loader.bytes >= tensor.nbytes
    with pytest.raises(moesaic.NotFound):
        moesaic.WeightLoader.from_checkpoint(checkpoint, 77)


RANKS = [
    [moesaic.Parallel(ep_size=3, ep_rank=r) for r in range(3)],
    [moesaic.Parallel(ep_size=2, ep_rank=r, placement="round_robin") for r in range(2)],
    [moesaic.Parallel(tp_size=2, tp_rank=r) for r in range(2)],
]


@pytest.mark.parametrize("ranks", RANKS, ids=["ep", "round_robin", "tp"])
def test_parts_of_all_ranks_are_the_layer(qwen3: pathlib.Path, ranks: list[moesaic.Parallel]) -> None:
    checkpoint, index, whole = layer_of(qwen3, quant="f32")
    x = hidden_states(whole)
    want, trace = whole(x, trace=True)
    experts = whole.spec.num_experts
    total, bytes_held, owned = np.zeros(x.shape), 0, []
    for parallel in ranks:
        loader = moesaic.WeightLoader.from_checkpoint(checkpoint, index, experts_only=True, parallel=parallel)
        local = parallel.local_experts(experts)
        names = loader.missing()
        kept = loader.load_weights((name, checkpoint.read_tensor(name)) for name in names)
        # Slices are cut from every expert's tensors; whole experts are this rank's alone.
        mine = {int(name.split(".experts.")[1].split(".")[0]) for name in kept}
        assert mine == set(local) and len(local) == (experts if parallel.tp_size > 1 else len(mine))
        owned += local
        bytes_held += loader.bytes
        layer = moesaic.RoutedExperts.from_loader(loader, quant="f32")
        total += layer(x, trace.topk_ids, trace.topk_weights)
    assert rel_l2(total, want) <= 2e-6
    assert sorted(set(owned)) == list(range(experts))
    assert bytes_held == experts * 3 * 256 * 128 * 2, "each number of the experts once"
    # The whole layer's parts: what enters once is rank 0's.
    parts = []
    config = json.loads((qwen3 / "config.json").read_text())
    for parallel in ranks:
        loader = moesaic.WeightLoader.from_config(config, index, parallel=parallel)
        loader.load_weights((name, checkpoint.read_tensor(name)) for name in loader.missing())
        parts.append(moesaic.FusedMoE.from_loader(loader, quant="f32")(x).astype(np.float64))
    assert rel_l2(sum(parts), want) <= 2e-6


def test_ranks_that_contradict_are_refused(qwen3: pathlib.Path) -> None:
    for wrong, text in (
        ({"tp_size": 2, "ep_size": 2}, "tp_size"),
        ({"ep_size": 2, "ep_rank": 2}, "ep_rank"),
        ({"tp_size": 0}, "tp_size"),
        ({"placement": "zigzag"}, 'placement: got "zigzag", need linear or round_robin'),
    ):
        with pytest.raises(moesaic.InvalidArgument, match=text):
            moesaic.Parallel(**wrong)
    checkpoint = moesaic.Checkpoint(qwen3)
    with pytest.raises(TypeError, match=r"need a moesaic\.Parallel"):
        moesaic.WeightLoader.from_checkpoint(checkpoint, 1, parallel=(0, 2))
    # 128 columns are not five equal slices.
    uneven = moesaic.WeightLoader.from_checkpoint(checkpoint, 1, parallel=moesaic.Parallel(tp_size=5))
    with pytest.raises(moesaic.Error, match="intermediate_size"):
        for name in uneven.missing():
            uneven.load(name, checkpoint.read_tensor(name))
        moesaic.FusedMoE.from_loader(uneven)


def by_hand(own: OwnExperts, names: moesaic.ExpertNames, tensors: dict[str, np.ndarray], **options: object) -> object:
    """Experts of no known family: sizes by a spec, tensors under the names given."""
    spec = moesaic.LayerSpec(
        hidden_size=128,
        intermediate_size=128,
        num_experts=8,
        top_k=2,
        has_expert_bias=any("bias" in n for n in tensors),
    )
    loader = moesaic.WeightLoader.from_spec(spec, names, **options)
    assert loader.load_weights(tensors.items()) == list(tensors)
    return moesaic.RoutedExperts.from_loader(loader)(own.x, own.ids, own.weights)


@pytest.mark.parametrize("storage", ["per_expert", "stacked", "fused_nt", "fused_nn", "fused_nn_interleaved"])
def test_a_layer_is_described_by_hand(own: OwnExperts, storage: str) -> None:
    want = moesaic.RoutedExperts.from_tensors(own.w13, own.w2, own.top_k)(own.x, own.ids, own.weights)
    gate, up = (np.ascontiguousarray(w) for w in np.split(own.w13, 2, axis=1))
    block, down = "decoder.7.moe", own.w2
    if storage == "per_expert":
        names = moesaic.ExpertNames(block=block, gate="expert_{e}.w1", up="expert_{e}.w3", down="expert_{e}.w2")
        three = (("w1", gate), ("w3", up), ("w2", down))
        tensors = {f"{block}.expert_{e}.{leaf}.weight": w[e] for e in range(8) for leaf, w in three}
    elif storage == "stacked":
        names = moesaic.ExpertNames(
            block=block, storage=storage, gate="gate", up="up", down="down", weight_suffix=".kernel"
        )
        tensors = {f"{block}.{leaf}.kernel": w for leaf, w in (("gate", gate), ("up", up), ("down", down))}
    else:
        names = moesaic.ExpertNames(
            block=block, storage=storage, gate="gate_up", up=None, down="down", weight_suffix=""
        )
        both = np.stack([gate, up], axis=2).reshape(own.w13.shape) if "interleaved" in storage else own.w13
        if "nn" in storage:
            both, down = (np.ascontiguousarray(w.transpose(0, 2, 1)) for w in (both, down))
        tensors = {f"{block}.gate_up": both, f"{block}.down": down}
    assert names.storage == storage and names.block == block
    assert np.array_equal(by_hand(own, names, tensors), want)
    parts = [
        by_hand(own, names, tensors, parallel=moesaic.Parallel(tp_size=2, tp_rank=rank)).astype(np.float64)
        for rank in range(2)
    ]
    assert rel_l2(parts[0] + parts[1], want) <= 2e-6 < rel_l2(parts[0], want)


def test_biases_and_formats_of_a_layer_described_by_hand(own: OwnExperts) -> None:
    rng = np.random.default_rng(3)
    b13, b2 = (rng.standard_normal((8, n)).astype(np.float32) for n in (256, 128))
    names = moesaic.ExpertNames(storage="fused_nt", gate="gate_up", up=None, down="down", weight_suffix="")
    tensors = {"mlp.gate_up": own.w13, "mlp.down": own.w2, "mlp.gate_up_bias": b13, "mlp.down_bias": b2}
    want = moesaic.RoutedExperts.from_tensors(own.w13, own.w2, 2, w13_bias=b13, w2_bias=b2)
    assert np.array_equal(by_hand(own, names, tensors), want(own.x, own.ids, own.weights))
    codes = [rng.integers(0, 0x70, (8, n, 128), dtype=np.uint8).view(ml_dtypes.float8_e4m3fn) for n in (256, 128)]
    scales = [np.full((8, n, 1), 2.0**-9, np.float32) for n in (2, 1)]
    tensors = {}
    for e in range(8):
        for leaf, tensor, scale in (
            ("gate_proj", codes[0][e, :128], scales[0][e, :1]),
            ("up_proj", codes[0][e, 128:], scales[0][e, 1:]),
            ("down_proj", codes[1][e], scales[1][e]),
        ):
            tensors[f"mlp.experts.{e}.{leaf}.weight"] = tensor
            tensors[f"mlp.experts.{e}.{leaf}.weight_scale_inv"] = scale
    fp8 = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
    want = moesaic.RoutedExperts.from_tensors(*codes, 2, stored="fp8-block", w13_scale=scales[0], w2_scale=scales[1])(
        own.x, own.ids, own.weights
    )
    for stated in (fp8, json.dumps(fp8)):
        got = by_hand(own, moesaic.ExpertNames(), tensors, quantization_config=stated)
        assert np.array_equal(got, want)


def test_a_description_that_cannot_be_is_refused(own: OwnExperts) -> None:
    spec = moesaic.LayerSpec(hidden_size=128, intermediate_size=128, num_experts=8, top_k=2)
    with pytest.raises(moesaic.InvalidArgument, match='storage: got "loose", need one of per_expert, '):
        moesaic.ExpertNames(storage="loose")
    for wrong, text in (
        ({"storage": "fused_nt", "gate": "gate_up", "down": "down"}, "names.up"),
        ({"gate": "experts.gate"}, "names.gate"),
        ({"block": ""}, "names.block"),
    ):
        with pytest.raises(moesaic.InvalidArgument, match=text):
            moesaic.WeightLoader.from_spec(spec, moesaic.ExpertNames(**wrong))
    with pytest.raises(moesaic.CorruptFile, match="quantization_config"):
        moesaic.WeightLoader.from_spec(spec, moesaic.ExpertNames(), quantization_config="{")
    loader = moesaic.WeightLoader.from_spec(spec, moesaic.ExpertNames())
    with pytest.raises(moesaic.InvalidShape, match=r"mlp\.experts\.0\.gate_proj\.weight"):
        loader.load("mlp.experts.0.gate_proj.weight", own.x)


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


# --- Errors, warnings, signals, threads ----------------------------------------------------------------

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


# --- Package -----------------------------------------------------------------------------------------


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
