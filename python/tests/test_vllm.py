"""The plugin for vLLM: its hooks in vLLM's real files, and vLLM's engine for CPUs.

Skipped unless MOESAIC_TEST_VLLM=1 and vLLM is installed:

    MOESAIC_TEST_VLLM=1 $(python/tests/make_venv.sh vllm)/bin/python -m pytest
    python/tests/test_vllm.py
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

if os.environ.get("MOESAIC_TEST_VLLM") != "1" or importlib.util.find_spec("vllm") is None:
    pytest.skip("MOESAIC_TEST_VLLM is not 1, or vLLM is not installed", allow_module_level=True)
os.environ.setdefault("VLLM_TARGET_DEVICE", "cpu")

torch = pytest.importorskip("torch")
moesaic = importlib.import_module("moesaic")
plugin = importlib.import_module("moesaic.vllm")

HERE = Path(__file__).resolve().parent
MODELS = HERE.parents[1] / "testdata" / "models"


@pytest.fixture
def oracles(monkeypatch):
    """The oracles' modules with the plugin in place, and as they were afterwards."""
    monkeypatch.delenv("MOESAIC_VLLM", raising=False)
    modules = {}
    for oracle in plugin._UNQUANTIZED, plugin._FP8, plugin._INT8:
        module = importlib.import_module(f"{plugin._ORACLES}.{oracle.module}")
        for name in "_get_priority_backends", "backend_to_kernel_cls":
            function = getattr(module, name)
            if getattr(function, "_moesaic", False):  # an entry point was there first
                function = inspect.getclosurevars(function).nonlocals
                function = function["priority" if name.startswith("_get") else "classes"]
            monkeypatch.setattr(module, name, function)
        modules[oracle.module] = module
    monkeypatch.setattr(plugin, "_registered", False)
    monkeypatch.setattr(plugin, "_warned", set())
    monkeypatch.setattr(plugin, "_classes", {})
    return modules


def make_config(**changes):
    """vLLM's real configuration of a layer of 8 experts."""
    config = importlib.import_module("vllm.model_executor.layers.fused_moe.config")
    activation = importlib.import_module("vllm.model_executor.layers.fused_moe.activation")
    fields = {
        "num_experts": 8,
        "experts_per_token": 2,
        "hidden_dim": 128,
        "intermediate_size": 128,
        "num_local_experts": 8,
        "num_logical_experts": 8,
        "activation": activation.MoEActivation(changes.pop("activation", "silu")),
        "device": "cpu",
        "routing_method": config.RoutingMethodType.Renormalize,
        "moe_parallel_config": config.FusedMoEParallelConfig.make_no_parallel(),
        "in_dtype": torch.bfloat16,
    }
    made = config.FusedMoEConfig(**(fields | changes))
    if made.intermediate_size_per_partition < 0:
        made.intermediate_size_per_partition = made.intermediate_size
    return made


def quant_key(name):
    return getattr(importlib.import_module("vllm.model_executor.layers.quantization.utils.quant_utils"), name)


def select(module, config, *keys):
    """vLLM's own choice, which asks the hooked functions."""
    name = {"unquantized": "unquantized", "fp8": "fp8", "int8": "int8"}[module.__name__.rsplit(".", 1)[-1]]
    return getattr(module, f"select_{name}_moe_backend")(config, *keys)


def test_version_is_known():
    version = importlib.import_module("vllm").__version__.split(".")
    assert (int(version[0]), int(version[1])) in plugin._VERSIONS


def test_off_unless_asked_for(oracles):
    before = {name: select(m, make_config()) for name, m in oracles.items() if name == "unquantized"}
    lists = {
        n: [m.backend_to_kernel_cls(b) for b in getattr(m, "UnquantizedMoeBackend", ()) if b.name in ("CPU", "TRITON")]
        for n, m in oracles.items()
    }
    plugin.register()
    assert not plugin._warned
    assert all(m.backend_to_kernel_cls._moesaic for m in oracles.values())
    for name, module in oracles.items():
        if name == "unquantized":
            assert select(module, make_config()) == before[name]
            backends = [b for b in module.UnquantizedMoeBackend if b.name in ("CPU", "TRITON")]
            assert [module.backend_to_kernel_cls(b) for b in backends] == lists[name]


@pytest.mark.parametrize("batch_invariant", ["0", "1"])
def test_chosen_when_asked_for(oracles, monkeypatch, batch_invariant):
    plugin.register()
    monkeypatch.setenv("MOESAIC_VLLM", "1")
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", batch_invariant)
    module = oracles["unquantized"]
    backend, cls = select(module, make_config())
    assert (backend.name, cls.__name__) == ("CPU", "MoesaicExperts")
    # What the choice announced is used up: the next look-up is vLLM's.
    assert all(c.__name__ != "MoesaicExperts" for c in module.backend_to_kernel_cls(backend))


@pytest.mark.parametrize(
    ("module", "keys", "stored"),
    [
        ("fp8", ("kFp8Static128BlockSym", "kFp8Dynamic128Sym"), "fp8-block"),
        ("fp8", ("kFp8StaticChannelSym", "kFp8DynamicTokenSym"), "fp8-channel"),
        ("int8", ("kInt8StaticChannelSym", "kInt8DynamicTokenSym"), "int8"),
    ],
)
def test_schemes(oracles, monkeypatch, module, keys, stored):
    plugin.register()
    monkeypatch.setenv("MOESAIC_VLLM", "1")
    backend, cls = select(oracles[module], make_config(), *(quant_key(k) for k in keys))
    assert (backend.name, cls.__name__) == ("TRITON", "MoesaicExperts")
    assert inspect.getclosurevars(cls._pack).nonlocals["stored"] == stored


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"moe_backend": "triton"}, None),  # named by the user
        ({"is_lora_enabled": True}, None),
        ({"activation": "relu2"}, "activation"),
        ({"in_dtype": torch.float64}, "in_dtype"),
    ],
)
def test_refused_layers_stay_with_vllm(oracles, monkeypatch, changes, word):
    plugin.register()
    module = oracles["unquantized"]
    theirs = module._get_priority_backends(make_config(**changes))
    monkeypatch.setenv("MOESAIC_VLLM", "1")
    assert module._get_priority_backends(make_config(**changes)) == theirs
    assert plugin._armed.choice is None
    assert word is None or any(word in text for text in plugin._warned)


def test_a_scheme_that_is_not_ours_is_left(oracles, monkeypatch):
    plugin.register()
    monkeypatch.setenv("MOESAIC_VLLM", "1")
    keys = quant_key("kFp8StaticTensorSym"), quant_key("kFp8DynamicTensorSym")
    theirs = inspect.getclosurevars(oracles["fp8"]._get_priority_backends).nonlocals["priority"]
    assert oracles["fp8"]._get_priority_backends(make_config(), *keys) == theirs(make_config(), *keys)
    assert any("no scheme for" in text for text in plugin._warned)


def test_another_version_warns_once_and_changes_nothing(oracles, monkeypatch, caplog):
    monkeypatch.setattr(importlib.import_module("vllm"), "__version__", "0.99.0")
    plugin.register()
    plugin.register()
    monkeypatch.setattr(plugin, "_registered", False)
    plugin.register()
    said = [r.getMessage() for r in caplog.records if "does nothing" in r.getMessage()]
    assert said == [f"moesaic: the plugin for vLLM does nothing: got vLLM 0.99.0, need {plugin.supported_versions()}"]
    assert not any(getattr(m.backend_to_kernel_cls, "_moesaic", False) for m in oracles.values())


def test_a_changed_function_changes_nothing(oracles, monkeypatch):
    monkeypatch.setattr(oracles["int8"], "backend_to_kernel_cls", lambda backend, more: None)
    plugin.register()
    assert any("int8.backend_to_kernel_cls" in text for text in plugin._warned)
    assert not any(getattr(m._get_priority_backends, "_moesaic", False) for m in oracles.values())


def test_signatures():
    """What our class overrides has vLLM's arguments, by position and by name; nothing abstract is
    left.
    """
    mk = importlib.import_module("vllm.model_executor.layers.fused_moe.modular_kernel")
    cls = plugin._make_class(None, "as-is", plugin.Options())
    assert not inspect.isabstract(cls)
    for name in (
        "apply",
        "workspace_shapes",
        "process_weights_after_loading",
        "_supports_quant_scheme",
        "_supports_activation",
        "_supports_parallel_config",
        "finalize_weight_and_reduce_impl",
    ):
        theirs = list(inspect.signature(getattr(mk.FusedMoEExpertsModular, name)).parameters)
        assert list(inspect.signature(getattr(cls, name)).parameters) == theirs, name


def reference(x, w13, w2, ids, weights):
    """Experts in float64."""
    out = torch.zeros(x.shape, dtype=torch.float64)
    half = w13.shape[1] // 2
    for row in range(x.shape[0]):
        for slot in range(ids.shape[1]):
            expert = int(ids[row, slot])
            if expert >= 0:
                h = w13[expert].double() @ x[row].double()
                gate = torch.nn.functional.silu(h[:half]) * h[half:]
                out[row] += float(weights[row, slot]) * (w2[expert].double() @ gate)
    return out


@pytest.mark.parametrize("mapped", [False, True])
def test_apply(mapped):
    """A call as vLLM makes it: within the bound of bf16, the weights' storage gone, ids mapped."""
    torch.manual_seed(0)
    config = make_config()
    quant = importlib.import_module("vllm.model_executor.layers.fused_moe.config").FusedMoEQuantConfig.make()
    experts = plugin._make_class(None, "as-is", plugin.Options())(config, quant)
    w13 = torch.randn(8, 256, 128).mul_(128**-0.5).bfloat16()
    w2 = torch.randn(8, 128, 128).mul_(128**-0.5).bfloat16()
    x = torch.randn(5, 128).bfloat16()
    ids = torch.randint(0, 8, (5, 2), dtype=torch.int32)
    weights = torch.rand(5, 2)
    expert_map = torch.tensor([3, -1, 0, 1, 2, -1, 7, 5], dtype=torch.int32) if mapped else None
    local = expert_map[ids.long()] if mapped else ids
    want = reference(x, w13, w2, local, weights)
    first, second = torch.nn.Parameter(w13, requires_grad=False), torch.nn.Parameter(w2, requires_grad=False)
    layer = SimpleNamespace(w13_weight=first, w2_weight=second, activation=config.activation)
    experts.process_weights_after_loading(layer)
    assert first.shape == (8, 256, 128) and first.untyped_storage().nbytes() == 2
    output = torch.full((5, 128), float("nan"), dtype=torch.bfloat16)
    experts.apply(
        output,
        x,
        first,
        second,
        weights,
        ids,
        config.activation,
        8,
        expert_map,
        None,
        None,
        None,
        None,
        None,
        False,
    )
    assert (output.double() - want).norm() <= 6e-3 * want.norm()
    with pytest.raises(moesaic.Unsupported, match="packed already"):
        experts.process_weights_after_loading(layer)


def generate(folder, options, tmp_path):
    """Runs vllm_generate.py with the plugin's entry point on the path."""
    info = tmp_path / "moesaic_entry_point-0.dist-info"
    info.mkdir(exist_ok=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: moesaic-entry-point\nVersion: 0\n")
    (info / "entry_points.txt").write_text("[vllm.general_plugins]\nmoesaic = moesaic.vllm:register\n")
    package = str(Path(moesaic.__file__).parents[1])
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join((str(tmp_path), package)),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_TARGET_DEVICE": "cpu",
        "HF_HUB_OFFLINE": "1",
    }
    environment.pop("MOESAIC_VLLM", None)
    command = [sys.executable, str(HERE / "vllm_generate.py"), str(folder), json.dumps(options)]
    done = subprocess.run(command, check=False, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    found = {
        line.split()[0]: json.loads(line.split(" ", 1)[1])
        for line in done.stdout.splitlines()
        if line.startswith(("TOKENS ", "STORAGE "))
    }
    return found, done.stdout + done.stderr


def test_engine_generates_the_same_tokens(tmp_path):
    model = MODELS / "mini-qwen3-moe"
    theirs, said = generate(model, {}, tmp_path)
    assert "MoesaicExperts" not in said
    ours, said = generate(model, {"additional_config": {"moesaic": True}}, tmp_path)
    assert "Using MoesaicExperts" in said
    assert ours["TOKENS"] == theirs["TOKENS"]
    assert sum(theirs["STORAGE"]) > 1_000_000 and sum(ours["STORAGE"]) <= 8


def test_engine_compiles_the_model(tmp_path):
    """Without --enforce-eager: one graph, in which the experts are an operator."""
    model, ours = MODELS / "mini-qwen3-moe", {"additional_config": {"moesaic": True}}
    want, _ = generate(model, ours, tmp_path)
    got, said = generate(model, ours | {"enforce_eager": False}, tmp_path)
    assert "Using MoesaicExperts" in said and got["TOKENS"] == want["TOKENS"]


def test_engine_with_fp8_experts(tmp_path):
    """FP8 blocks, which vLLM's own kernels compute on CPUs with AMX only: bf16's tokens."""
    model = tmp_path / "fp8"
    moesaic.convert(MODELS / "mini-qwen3-moe", model, quant="fp8-block")
    want, _ = generate(MODELS / "mini-qwen3-moe", {}, tmp_path)
    ours, said = generate(model, {"additional_config": {"moesaic": True}}, tmp_path)
    assert "'TRITON', 'CPU_W8A8'" in said  # the plugin's order
    assert sum(ours["STORAGE"]) <= 4
    compiled, _ = generate(model, {"additional_config": {"moesaic": True}, "enforce_eager": False}, tmp_path)
    assert compiled["STORAGE"] == ours["STORAGE"]
    for got in (ours, compiled):  # a rounded model may turn off later, and a compiled one rounds elsewhere
        assert sum(a[:4] == b[:4] for a, b in zip(got["TOKENS"], want["TOKENS"], strict=True)) >= 3
