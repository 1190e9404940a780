"""transformers: what the plugin reads off an experts module - FP8 blocks, and which activation it computes."""

from __future__ import annotations

import importlib
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import moesaic
import moesaic.transformers as mt
from moesaic import _recognise


def fp8_experts(scale_fmt: str = "float", **options: Any) -> Any:
    """transformers' own module of FP8 experts, as its loader leaves it; its kernels need a GPU, ours don't."""
    fp8 = pytest.importorskip("transformers.integrations.finegrained_fp8")
    config = transformers.Qwen3MoeConfig(
        hidden_size=256, moe_intermediate_size=128, num_experts=8, num_experts_per_tok=2
    )
    config._experts_implementation = "moesaic"
    # As its loader does it, for each module that it replaces.
    cls = importlib.import_module("transformers.integrations.moe").use_experts_implementation(
        experts_class=fp8.FP8Experts, experts_interface=fp8.ALL_FP8_EXPERTS_FUNCTIONS, has_bias=False, has_gate=True
    )
    arguments = {"block_size": (128, 128), "activation_scheme": "dynamic"} | options
    if scale_fmt != "float":
        arguments["scale_fmt"] = scale_fmt
    return cls(config, **arguments)


@pytest.mark.parametrize("scale_fmt", ["float", "ue8m0"])
def test_fp8_experts_are_computed_as_stored(scale_fmt: str) -> None:
    try:
        experts = fp8_experts(scale_fmt)
    except TypeError:
        if scale_fmt == "float":
            raise
        pytest.skip(f"this version of transformers has no scale_fmt={scale_fmt}")
    wide = {}
    torch.manual_seed(0)
    for name in ("gate_up_proj", "down_proj"):
        codes, scale = getattr(experts, name), getattr(experts, f"{name}_scale_inv")
        e, n, k = codes.shape
        weight = torch.randn(e, n, k) * k**-0.5
        blocks = weight.reshape(e, n // 128, 128, k // 128, 128)
        s = blocks.abs().amax((2, 4)) / 448
        s = torch.exp2(torch.ceil(torch.log2(s)))  # a power of two, so that either format of scales holds it
        codes.data = (blocks / s[:, :, None, :, None]).reshape(e, n, k).to(torch.float8_e4m3fn)
        scale.data = s.to(scale.dtype)
        wide[name] = (codes.data.double().reshape(blocks.shape) * s.double()[:, :, None, :, None]).reshape(e, n, k)
    x, ids = torch.randn(16, 256).bfloat16(), torch.stack([torch.randperm(8)[:2] for _ in range(16)])
    weights = torch.rand(16, 2)
    want = torch.zeros(16, 256, dtype=torch.float64)
    for t in range(16):
        for e, weight in zip(ids[t], weights[t], strict=True):
            gate, up = (wide["gate_up_proj"][e] @ x[t].double()).chunk(2)
            want[t] += weight.double() * (wide["down_proj"][e] @ (torch.nn.functional.silu(gate) * up))
    with torch.no_grad():
        got = experts(x, ids, weights)
    state = vars(experts)[mt._STATE].layer
    assert state.quant == "fp8-block" and got.dtype == x.dtype
    error = float((got.double() - want).norm() / want.norm())
    assert 1e-4 < error <= state.bound
    model = torch.nn.ModuleDict({"experts": experts})
    report = mt.accelerate(model, progress=False)
    with torch.no_grad():
        assert torch.equal(model["experts"](x, ids, weights), got) and report.rows[0].scheme == "fp8-block"


def test_fp8_experts_of_other_kinds_are_refused() -> None:
    arguments = (torch.randn(3, 256), torch.zeros(3, 2, dtype=torch.int64), torch.ones(3, 2))
    for options, text in (
        ({"block_size": (64, 128)}, r"got FP8 blocks \(64, 128\)"),
        ({"activation_scheme": "static"}, "with static activations"),
        ({"expert_dtype": "fp4"}, "got weights of torch.int8"),
    ):
        try:
            experts = fp8_experts(**options)
        except TypeError:  # this version does not know the kind
            assert "expert_dtype" in options
            continue
        with pytest.raises(moesaic.Unsupported, match=text):
            experts(*arguments)


class Gates(torch.nn.Module):
    """A stand-in for an experts module: only what its activation is."""

    has_gate = True
    has_bias = is_transposed = False

    def __init__(self, function: Any, **constants: float) -> None:
        super().__init__()
        self.function = function
        for name, value in constants.items():
            setattr(self, name, value)

    def _apply_gate(self, gate_up: Any) -> Any:
        return self.function(*gate_up.chunk(2, dim=-1))


SIGMOID = torch.sigmoid
ACTIVATIONS = [
    (Gates(lambda g, u: torch.nn.functional.silu(g) * u), "silu", {}),
    (Gates(lambda g, u: torch.nn.functional.gelu(g) * u), "gelu", {}),
    (Gates(lambda g, u: torch.nn.functional.gelu(g, approximate="tanh") * u), "gelu_tanh", {}),
    (
        Gates(lambda g, u: torch.nn.functional.silu(g.clamp(max=5.0)) * u.clamp(-5.0, 5.0), swiglu_limit=5.0),
        "silu",
        {"limit": 5.0},
    ),
    (
        Gates(lambda g, u: torch.nn.functional.silu(g).clamp(max=5.0) * u.clamp(-5.0, 5.0), limit=5.0),
        "swiglustep",
        {"limit": 5.0},
    ),
    (
        Gates(
            lambda g, u: (u.clamp(-7, 7) + 1) * g.clamp(max=7) * SIGMOID(1.702 * g.clamp(max=7)), limit=7.0, alpha=1.702
        ),
        "swigluoai",
        {},
    ),
]


@pytest.mark.parametrize(("module", "name", "constants"), ACTIVATIONS, ids=[f"{n}{c or ''}" for _, n, c in ACTIVATIONS])
def test_activations_are_recognised_by_what_they_compute(module: Any, name: str, constants: dict[str, float]) -> None:
    assert _recognise.activation_of(module) == moesaic.Activation(name, **constants)


@pytest.mark.parametrize(
    "function",
    [
        lambda g, u: torch.nn.functional.silu(u) * g,  # gate and up changed places
        lambda g, u: torch.nn.functional.silu(g) * (u + 1e-4),
        lambda g, u: torch.nn.functional.silu(g.clamp(max=19.0)) * u,  # a limit that nobody states
        lambda g, u: torch.tanh(g) * u,
    ],
)
def test_near_misses_are_refused(function: Any) -> None:
    with pytest.raises(moesaic.Unsupported, match="activation: what Gates computes is none of"):
        _recognise.activation_of(Gates(function))
