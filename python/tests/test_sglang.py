"""The plugin for SGLang with stand-ins for the few modules of it that the plugin calls.

SGLang itself runs on GPUs only; test_plugin_files.py compares the stand-ins' surface with its
files.
"""

from __future__ import annotations

import dataclasses
import enum
import importlib
import sys
from types import ModuleType, SimpleNamespace

import pytest

torch = pytest.importorskip("torch")
moesaic = importlib.import_module("moesaic")


@dataclasses.dataclass(frozen=True)
class Backend:
    value: str

    def is_triton(self):
        return self.value == "triton"


class HookType(enum.Enum):
    AFTER = "after"


class Core:
    def __init__(self, config):
        self.config = config


@dataclasses.dataclass
class Combine:
    hidden_states: object


@pytest.fixture
def engine(monkeypatch):
    """Stand-ins in sys.modules; .asked is the runner's name on the command line."""
    state = SimpleNamespace(asked="auto", cores={}, choices=[], hooks={})

    class Runner:
        def __init__(self, runner_backend, config):
            self.runner_backend = runner_backend
            self.core = state.cores[runner_backend.value](config)

    def register_hook(target, hook, hook_type):
        state.hooks[target] = (hook, hook_type)

    contents = {
        "sglang.srt.layers.moe.moe_runner": {
            "register_moe_runner_core": state.cores.__setitem__,
            "MoeRunner": Runner,
        },
        "sglang.srt.layers.moe.moe_runner.base": {"DispatchMoeRunnerCore": Core},
        "sglang.srt.layers.moe.utils": {
            "RegisteredMoeRunnerBackend": Backend,
            "get_moe_runner_backend": lambda: Backend(state.asked),
        },
        "sglang.srt.layers.moe.token_dispatcher.standard": {"StandardCombineInput": Combine},
        "sglang.srt.plugins.hook_registry": {
            "HookType": HookType,
            "HookRegistry": SimpleNamespace(register=register_hook),
        },
        "sglang.srt.arg_groups.choices": {"add_moe_runner_backend_choices": state.choices.extend},
    }
    for name, values in contents.items():
        parts = name.split(".")
        for i in range(1, len(parts) + 1):
            module = sys.modules.get(".".join(parts[:i])) or ModuleType(".".join(parts[:i]))
            monkeypatch.setitem(sys.modules, ".".join(parts[:i]), module)
        sys.modules[name].__dict__.update(values)
    state.plugin = importlib.import_module("moesaic.sglang")
    monkeypatch.setattr(state.plugin, "_registered", False)
    return state


def make_config(**changes):
    fields = {
        "activation": "silu",
        "is_gated": True,
        "gemm1_alpha": None,
        "gemm1_beta": None,
        "gemm1_clamp_limit": None,
        "swiglu_limit": None,
        "gate_up_interleaved": True,
        "top_k": 2,
        "no_combine": False,
        "apply_router_weight_on_input": False,
        "routed_scaling_factor": None,
    }
    return SimpleNamespace(**(fields | changes))


def make_quant_info(w13, w2, **changes):
    fields = {
        "w13_weight": torch.nn.Parameter(w13, requires_grad=False),
        "w2_weight": torch.nn.Parameter(w2, requires_grad=False),
        "b13": None,
        "b2": None,
        "w13_scale": None,
        "w2_scale": None,
        "a13_scale": None,
        "a2_scale": None,
        "block_shape": None,
        "use_fp8_w8a8": False,
        "use_mxfp8": False,
        "use_int8_w8a8": False,
        "use_int8_w8a16": False,
        "use_int4_w4a16": False,
        "per_channel_quant": False,
        "fuse_swiglu_interleaved": False,
    }
    return SimpleNamespace(**(fields | changes))


def dispatch(x, ids, weights, standard=True):
    kind = SimpleNamespace(is_standard=lambda: standard)
    topk = SimpleNamespace(topk_ids=ids, topk_weights=weights)
    return SimpleNamespace(hidden_states=x, hidden_states_scale=None, topk_output=topk, format=kind)


class PlainMethod:
    def __init__(self):
        self.runner = SimpleNamespace(runner_backend=Backend("triton"))


class Fp8MoEMethod:
    runner = None


def test_register(engine):
    engine.plugin.register()
    engine.plugin.register()
    assert engine.choices == ["moesaic"] and set(engine.cores) == {"moesaic"}
    assert {".".join(t.rsplit(".", 2)[1:]) for t in engine.hooks} == {
        "UnquantizedFusedMoEMethod.create_moe_runner",
        "Fp8MoEMethod.create_moe_runner",
        "FusedMoE.__init__",
    }
    assert all(kind is HookType.AFTER for _, kind in engine.hooks.values())


def test_off_unless_named(engine):
    engine.plugin.register()
    hook = next(iter(engine.hooks.values()))[0]
    method = PlainMethod()
    before = method.runner
    assert hook("result", method, None, make_config()) == "result"
    assert method.runner is before
    engine.asked = "moesaic"
    hook(None, method, None, make_config())
    assert method.runner.runner_backend == Backend("moesaic") and not method.runner.runner_backend.is_triton()
    fp8 = Fp8MoEMethod()
    hook(None, fp8, None, make_config())
    assert fp8.runner.runner_backend.value == "moesaic" and fp8.runner.runner_backend.is_triton()


@pytest.mark.parametrize("theirs", ["triton", "marlin", None])
def test_a_method_with_a_runner_of_its_own_is_refused(engine, theirs):
    engine.plugin.register()
    check = next(hook for target, (hook, _) in engine.hooks.items() if target.endswith("FusedMoE.__init__"))
    layer = SimpleNamespace(quant_method=PlainMethod(), runner_backend=Backend(theirs) if theirs else None)
    assert check(None, layer, num_experts=4) is None, "another runner is asked for"
    engine.asked = "moesaic"
    with pytest.raises(
        moesaic.Unsupported, match=f"quantization: got PlainMethod, .* by {theirs or 'kernels of its own'}"
    ):
        check(None, layer, num_experts=4)
    layer.runner_backend = Backend("moesaic")
    assert check(None, layer, num_experts=4) is None


def test_missing_parts_warn(engine, monkeypatch, caplog):
    monkeypatch.delattr(sys.modules["sglang.srt.arg_groups.choices"], "add_moe_runner_backend_choices")
    engine.plugin.register()
    assert "does nothing" in caplog.text and not engine.cores and not engine.hooks


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("factor", [None, 2.5])
def test_run(engine, interleaved, factor):
    torch.manual_seed(1)
    engine.plugin.register()
    core = engine.cores["moesaic"](make_config(routed_scaling_factor=factor))
    gate, up = (torch.randn(4, 64, 128).mul_(128**-0.5).bfloat16() for _ in range(2))
    w2 = torch.randn(4, 128, 64).mul_(64**-0.5).bfloat16()
    w13 = torch.stack((gate, up), 2).flatten(1, 2) if interleaved else torch.cat((gate, up), 1)
    x = torch.randn(6, 128).bfloat16()
    ids = torch.randint(-1, 4, (6, 2), dtype=torch.int32)
    weights = torch.rand(6, 2)
    want = torch.zeros(6, 128, dtype=torch.float64)
    for row, slot in ((r, s) for r in range(6) for s in range(2)):
        e = int(ids[row, slot])
        if e >= 0:
            g, u = gate[e].double() @ x[row].double(), up[e].double() @ x[row].double()
            want[row] += float(weights[row, slot]) * (w2[e].double() @ (torch.nn.functional.silu(g) * u))
    want *= factor or 1
    info = make_quant_info(w13, w2, fuse_swiglu_interleaved=interleaved)
    out = core.run_from_dispatch(dispatch(x, ids, weights), info, core.config).hidden_states
    assert (out.double() - want).norm() <= 6e-3 * want.norm()
    assert info.w13_weight.shape == (4, 128, 128) and info.w13_weight.untyped_storage().nbytes() == 2
    again = core.run_from_dispatch(dispatch(x, ids, weights), info, core.config).hidden_states
    assert torch.equal(out, again)
    second = engine.cores["moesaic"](make_config(routed_scaling_factor=factor))
    with pytest.raises(moesaic.Unsupported, match="w13_weight: got weights that were released"):
        second.run_from_dispatch(dispatch(x, ids, weights), info, second.config)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"no_combine": True}, "no_combine: got True"),
        ({"apply_router_weight_on_input": True}, "apply_router_weight_on_input: got True"),
        ({"gemm1_clamp_limit": 7.0}, "gemm1_clamp_limit 7.0"),  # clamps after the silu
        ({"gemm1_alpha": 1.7}, "need a limit"),
        ({"activation": "situ"}, "got situ"),
        ({"num_local_experts": 1}, "got 1 on this rank for 2 of a token"),
    ],
)
def test_refusals_before_loading(engine, changes, text):
    engine.plugin.register()
    with pytest.raises(moesaic.Unsupported, match=text):
        engine.cores["moesaic"](make_config(**changes))


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({}, None),
        ({"use_int8_w8a8": True}, "use_int8_w8a8"),
        ({"block_shape": None}, "one scale for a whole batch"),
        ({"block_shape": [64, 64]}, "block_shape"),
        ({"a13_scale": torch.ones(4)}, "static scales"),
    ],
)
def test_refused_weights(engine, changes, text):
    """FP8 blocks that are computed, unless something is said of them."""
    engine.plugin.register()
    core = engine.cores["moesaic"](make_config())
    torch.manual_seed(1)
    codes = (torch.randn(4, n, 128).to(torch.float8_e4m3fn) for n in (256, 128))
    scales = {"w13_scale": torch.full((4, 2, 1), 2.0**-4), "w2_scale": torch.full((4, 1, 1), 2.0**-4)}
    info = make_quant_info(*codes, **({"use_fp8_w8a8": True, "block_shape": [128, 128]} | scales | changes))
    call = dispatch(torch.randn(3, 128).bfloat16(), torch.randint(0, 4, (3, 2), dtype=torch.int32), torch.ones(3, 2))
    if text is None:
        out = core.run_from_dispatch(call, info, core.config).hidden_states
        assert out.isfinite().all() and out.float().norm() > 0.1
        return
    with pytest.raises(moesaic.Unsupported, match=text):
        core.run_from_dispatch(call, info, core.config)


def test_refused_calls(engine):
    engine.plugin.register()
    core = engine.cores["moesaic"](make_config())
    with pytest.raises(moesaic.Unsupported, match="LoRA"):
        core.run_from_dispatch(None, None, None, hooks=object())
    with pytest.raises(moesaic.Unsupported, match="standard format"):
        core.run_from_dispatch(dispatch(None, None, None, standard=False), None, None)
