"""The package with NumPy alone: weights by tensor, shares of ranks, layers described by hand."""

from __future__ import annotations

import collections
import json
import pathlib
import types

import ml_dtypes
import numpy as np
import pytest
from conftest import MODELS, OwnExperts, hidden_states, layer_of, rel_l2

import moesaic


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
    # Of other layers, what cannot be looked at either.
    others = {"lm_head.weight": np.zeros(3, "c16"), "model.layers.0.mlp.up_proj.weight": "no tensor"}
    assert loader.load_weights(others.items()) == []
    with pytest.raises(moesaic.InvalidArgument, match="need a tensor"):
        loader.load(name, "no tensor")
    assert loader.load(name, tensor) and loader.bytes >= tensor.nbytes
    with pytest.raises(moesaic.NotFound):
        moesaic.WeightLoader.from_checkpoint(checkpoint, 77)


@pytest.mark.parametrize("kind", [moesaic.FusedMoE, moesaic.RoutedExperts])
def test_a_loader_keeps_its_weights_where_options_are_refused(qwen3: pathlib.Path, kind: type) -> None:
    checkpoint = moesaic.Checkpoint(qwen3)
    loader = moesaic.WeightLoader.from_checkpoint(checkpoint, 1)
    loader.load_weights((name, checkpoint.read_tensor(name)) for name in loader.missing())
    held = loader.bytes
    for options in (
        {"quant": "no-such-scheme"},
        {"backend": "no-such-backend"},
        {"device": "cuda:63"},
        {"max_tokens": 0},
        {"num_threads": "2"},
    ):
        with pytest.raises(moesaic.Error):
            kind.from_loader(loader, **options)
        assert loader.bytes == held and loader.missing() == []
    assert np.array_equal(
        *(
            made(*inputs)
            for inputs in [_inputs(checkpoint)[: 1 if kind is moesaic.FusedMoE else 3]]
            for made in (kind.from_loader(loader), kind.from_checkpoint(checkpoint, 1))
        )
    )
    assert loader.missing() != [] and loader.bytes == 0


@pytest.mark.parametrize("model", ["mini-qwen3-moe", "mini-deepseek-v3"])
def test_a_loader_of_experts_alone_stays_for_routed_experts(model: str) -> None:
    checkpoint = moesaic.Checkpoint(MODELS / model)
    loader = moesaic.WeightLoader.from_checkpoint(checkpoint, 1, experts_only=True)
    loader.load_weights((name, checkpoint.read_tensor(name)) for name in loader.missing())
    with pytest.raises(moesaic.InvalidArgument, match="^include_gate: got True, but the loader has experts alone"):
        moesaic.FusedMoE.from_loader(loader)
    if checkpoint.layer(1).shared_intermediate_size > 0:
        with pytest.raises(
            moesaic.InvalidArgument, match="^include_shared: got True, but the loader has experts alone"
        ):
            moesaic.FusedMoE.from_loader(loader, include_gate=False)
    held = loader.bytes
    assert held > 0 and loader.missing() == []
    x, ids, weights = _inputs(checkpoint)
    made = moesaic.RoutedExperts.from_loader(loader)(x, ids, weights)
    assert np.array_equal(made, moesaic.RoutedExperts.from_checkpoint(checkpoint, 1)(x, ids, weights))


def test_experts_that_are_chosen_by_token_ids_are_experts_like_others() -> None:
    """DeepSeek-V4's first layers: the routing is the caller's, and so is its table."""
    config = {"model_type": "deepseek_v4", "hidden_size": 16, "moe_intermediate_size": 8, "num_hidden_layers": 1}
    config |= {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1, "vocab_size": 3}
    rng = np.random.default_rng(8)
    shapes = {"w1": (8, 16), "w3": (8, 16), "w2": (16, 8)}
    tensors = {
        f"layers.0.ffn.experts.{e}.{leaf}.weight": rng.standard_normal(shape).astype(np.float32)
        for e in range(4)
        for leaf, shape in shapes.items()
    }
    x = rng.standard_normal((3, 16)).astype(np.float32)
    ids, weights = np.array([[0, 1], [3, 2], [1, 3]]), np.full((3, 2), 0.5, np.float32)
    made = []
    for kind in ("hash_moe", "moe"):
        loader = moesaic.WeightLoader.from_config(config | {"mlp_layer_types": [kind]}, 0, experts_only=True)
        loader.load_weights(tensors.items())
        made.append(moesaic.RoutedExperts.from_loader(loader)(x, ids, weights))
    assert np.array_equal(*made) and np.abs(made[0]).max() > 0.1


def _inputs(checkpoint: moesaic.Checkpoint) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    spec = checkpoint.layer(1)
    rng = np.random.default_rng(5)
    ids = np.tile(np.arange(spec.top_k), (4, 1))
    return rng.standard_normal((4, spec.hidden_size)).astype(np.float32), ids, np.full(ids.shape, 0.25, np.float32)


def test_configurations_may_have_numbers_that_json_lacks(qwen3: pathlib.Path) -> None:
    """NemotronH's time_step_limit ends at infinity."""
    config = json.loads((qwen3 / "config.json").read_text())
    names = moesaic.WeightLoader.from_config(config, 1).missing()
    limits = {"time_step_limit": (0.0, float("inf")), "more": {"nested": [float("-inf"), float("nan")]}}
    assert moesaic.WeightLoader.from_config(config | limits, 1).missing() == names


def test_configurations_are_any_mapping(qwen3: pathlib.Path) -> None:
    config = json.loads((qwen3 / "config.json").read_text())
    names = moesaic.WeightLoader.from_config(config, 1).missing()
    nested = config | {"more": types.MappingProxyType({"limit": float("inf")})}
    for mapping in (types.MappingProxyType(config), collections.UserDict(config), types.MappingProxyType(nested)):
        assert moesaic.WeightLoader.from_config(mapping, 1).missing() == names
    for wrong, text in ((json.dumps(config).encode(), "bytes"), (object(), "object"), (config | {"x": {1}}, "set")):
        with pytest.raises(moesaic.InvalidArgument, match=f"^config: got .*{text}.*, need text, or what it holds"):
            moesaic.WeightLoader.from_config(wrong, 1)
    spec = moesaic.LayerSpec(hidden_size=128, intermediate_size=128, num_experts=8, top_k=2)
    with pytest.raises(moesaic.InvalidArgument, match="^quantization_config: got .*bytes"):
        moesaic.WeightLoader.from_spec(spec, moesaic.ExpertNames(), quantization_config=b"{}")
    config["itself"] = config
    with pytest.raises(RecursionError):
        moesaic.WeightLoader.from_config(config, 1)


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
