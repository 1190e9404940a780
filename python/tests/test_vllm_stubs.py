"""The plugin for vLLM without vLLM: the class that it gives, over stand-ins for vLLM's, and its options."""

from __future__ import annotations

import enum
import importlib
import sys
import types
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")


import moesaic

plugin = importlib.import_module("moesaic.vllm")

HIDDEN, WIDTH = 64, 96


class Format(enum.Enum):
    Standard = 1
    BatchedExperts = 2


class Base:
    """What of vLLM's FusedMoEExpertsModular the class uses."""

    def __init__(self, moe_config: Any, quant_config: Any) -> None:
        self.moe_config, self.quant_config = moe_config, quant_config
        self.w1_scale, self.w2_scale = quant_config.w1_scale, quant_config.w2_scale

    def process_weights_after_loading(self, layer: Any) -> None:
        pass


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> None:
    layers = "vllm.model_executor.layers"
    contents: dict[str, dict[str, Any]] = {
        "vllm": {},
        "vllm.model_executor": {},
        layers: {},
        f"{layers}.fused_moe": {},
        f"{layers}.fused_moe.modular_kernel": {"FusedMoEExpertsModular": Base, "FusedMoEActivationFormat": Format},
        f"{layers}.fused_moe.topk_weight_and_reduce": {"TopKWeightAndReduceNoOP": object},
        "vllm.config": {"get_current_vllm_config_or_none": lambda: None},
        "vllm.platforms": {"current_platform": SimpleNamespace(is_cpu=lambda: True, is_cuda=lambda: False)},
    }
    for name, values in contents.items():
        module = types.ModuleType(name)
        vars(module).update(values)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delenv("MOESAIC_VLLM", raising=False)


class Layer:
    """Experts as vLLM hands them over, and the object that the plugin's class makes of them."""

    def __init__(
        self,
        experts: int = 8,
        top_k: int = 2,
        dtype: Any = torch.bfloat16,
        activation: str = "silu",
        bias: bool = False,
    ) -> None:
        torch.manual_seed(0)
        self.config = SimpleNamespace(
            hidden_dim=HIDDEN,
            intermediate_size_per_partition=WIDTH,
            num_local_experts=experts,
            experts_per_token=top_k,
            activation=SimpleNamespace(value=activation),
            in_dtype=dtype,
            device="cpu",
            has_bias=bias,
        )
        self.biases = [torch.randn(experts, n).to(dtype) if bias else None for n in (2 * WIDTH, HIDDEN)]
        quant = SimpleNamespace(w1_bias=self.biases[0], w2_bias=self.biases[1], w1_scale=None, w2_scale=None)
        self.w13 = torch.randn(experts, 2 * WIDTH, HIDDEN).mul_(HIDDEN**-0.5).to(dtype)
        self.w2 = torch.randn(experts, HIDDEN, WIDTH).mul_(WIDTH**-0.5).to(dtype)
        self.held = SimpleNamespace(
            w13_weight=torch.nn.Parameter(self.w13, requires_grad=False),
            w2_weight=torch.nn.Parameter(self.w2, requires_grad=False),
            activation=self.config.activation,
        )
        self.kernel = plugin._make_class(None, "as-is", plugin.Options())(self.config, quant)
        self.refusal = plugin._refusal(self.config, None, "as-is")

    def pack(self) -> None:
        self.kernel.process_weights_after_loading(self.held)

    def __call__(self, x: Any, weights: Any, ids: Any, expert_map: Any = None, on_input: bool = False) -> Any:
        output = torch.empty_like(x)
        self.kernel.apply(
            output, x, self.held.w13_weight, self.held.w2_weight, weights, ids, self.config.activation,
            8, expert_map, None, None, None, None, None, on_input,
        )  # fmt: skip
        return output

    def exact(self, x: Any, weights: Any, ids: Any) -> Any:
        """In float64; silu only."""
        out = torch.zeros(x.shape, dtype=torch.float64)
        for row in range(x.shape[0]):
            for expert, weight in zip(ids[row].tolist(), weights[row].tolist(), strict=True):
                if expert >= 0:
                    gate, up = (self.w13[expert].double() @ x[row].double()).chunk(2)
                    out[row] += weight * (self.w2[expert].double() @ (torch.nn.functional.silu(gate) * up))
        return out


def batch(tokens: int, dtype: Any = torch.bfloat16) -> tuple[Any, Any, Any]:
    torch.manual_seed(tokens)
    return (
        torch.randn(tokens, HIDDEN).to(dtype),
        torch.rand(tokens, 2),
        torch.randint(0, 8, (tokens, 2), dtype=torch.int32),
    )


def test_a_model_is_compiled_in_one_graph(engine: None) -> None:
    """As vLLM does on CPUs unless it is told --enforce-eager."""
    first, second = Layer(), Layer()
    first.pack(), second.pack()
    expert_map = torch.tensor([3, -1, 0, 1, 2, -1, 7, 5], dtype=torch.int32)

    def model(x: Any, weights: Any, ids: Any) -> Any:
        y = first(x, weights, ids)
        return second(y + x, weights, ids, expert_map) + second(x, weights, ids, None, True)

    for tokens in (5, 1):
        eager = model(*batch(tokens))
        for backend in ("eager", "aot_eager", "inductor"):
            torch._dynamo.reset()
            compiled = torch.compile(model, fullgraph=True, backend=backend)
            assert torch.equal(compiled(*batch(tokens)), eager), backend
    x, weights, ids = batch(5)
    want = first.exact(x, weights, ids)
    assert (first(x, weights, ids).double() - want).norm() <= 6e-3 * want.norm()
    torch._dynamo.reset()
    with pytest.raises(Exception, match="cannot be compiled: its weights are not packed"):
        torch.compile(Layer(), fullgraph=True, backend="eager")(x, weights, ids)


def test_experts_go_with_their_layer(engine: None) -> None:
    operator = importlib.import_module("moesaic.torch")
    layer = Layer()
    layer.pack()
    number = int(layer.kernel._handle)
    assert number in operator._layers
    del layer
    assert number not in operator._layers


class MethodBase:
    """vLLM's base of the methods that hold experts, and below two of them."""

    def __init__(self, kernel: Any) -> None:
        self.moe_kernel = SimpleNamespace(fused_experts=kernel)
        self.loaded = 0

    def process_weights_after_loading(self, layer: Any) -> None:
        self.loaded += 1


class Fp8MoEMethod(MethodBase):
    def process_weights_after_loading(self, layer: Any) -> None:
        self.loaded += 1


class OtherMethod(Fp8MoEMethod):
    def process_weights_after_loading(self, layer: Any) -> None:
        super().process_weights_after_loading(layer)


def test_methods_that_leave_kernels_alone_pack_ours(engine: None, monkeypatch: pytest.MonkeyPatch) -> None:
    name = "vllm.model_executor.layers.fused_moe.fused_moe_method_base"
    module = types.ModuleType(name)
    vars(module).update(FusedMoEMethodBase=MethodBase)
    monkeypatch.setitem(sys.modules, name, module)
    for cls in (MethodBase, Fp8MoEMethod, OtherMethod):
        monkeypatch.setattr(cls, "process_weights_after_loading", vars(cls)["process_weights_after_loading"])
    ours = type(Layer().kernel)
    monkeypatch.setattr(plugin, "_make_class", lambda *_: ours)
    monkeypatch.setattr(plugin, "_classes", {})
    plugin._class_for(None, "as-is", plugin.Options())
    for _ in range(2):
        plugin._prepare_after_loading()
    for method, packs in ((Fp8MoEMethod, True), (OtherMethod, True), (MethodBase, False)):
        layer = Layer()
        layer.kernel = ours(layer.config, layer.kernel.quant_config)
        made = method(layer.kernel)
        made.process_weights_after_loading(layer.held)
        assert made.loaded == 1 and (layer.kernel._handle is not None) == packs
        if packs:
            torch._dynamo.reset()
            x, weights, ids = batch(3)
            assert torch.equal(
                torch.compile(layer, fullgraph=True, backend="eager")(x, weights, ids), layer(x, weights, ids)
            )
    theirs = Fp8MoEMethod(object())
    theirs.process_weights_after_loading(None)
    assert theirs.loaded == 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.int8])
def test_released_weights_are_not_packed(engine: None, dtype: Any) -> None:
    """A second kernel on the same parameters, as for an engine that imports them from another."""
    first, second = Layer(), Layer()
    first.pack()
    held = first.held.w13_weight
    assert held.shape == second.held.w13_weight.shape and held.untyped_storage().nbytes() == 2 and held.isnan().all()
    second.held = first.held
    x, weights, ids = batch(4)
    for pack in (second.pack, lambda: second(x, weights, ids)):
        with pytest.raises(moesaic.Unsupported, match="w13_weight: got weights that were released"):
            pack()
    first.held.w13_weight = torch.nn.Parameter(first.w13, requires_grad=False)
    with pytest.raises(moesaic.Unsupported, match="w2_weight: got weights that were released"):
        second.pack()
    released = importlib.import_module("moesaic._released")
    codes = torch.nn.Parameter(torch.ones(2, 3).to(dtype), requires_grad=False)
    released.release(codes)
    assert codes.dtype == dtype and codes.shape == (2, 3) and codes.untyped_storage().nbytes() == codes.element_size()


def test_a_rank_with_fewer_experts_than_a_token_has_is_left_to_vllm(engine: None) -> None:
    """Expert parallelism with many ranks: what is not refused is packed."""
    assert "got 1 on this rank for 2 of a token" in Layer(experts=1).refusal
    layer = Layer(experts=2)
    assert layer.refusal is None
    layer.pack()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("activation", ["silu", "swigluoai"])
def test_biases_of_the_models_dtype(engine: None, dtype: Any, activation: str) -> None:
    layer = Layer(dtype=dtype, activation=activation, bias=True)
    assert layer.refusal is None
    layer.pack()
    assert layer(*batch(3, dtype)).isfinite().all()


def test_biases_that_a_scheme_does_not_take_are_left_to_vllm(engine: None) -> None:
    config = Layer(bias=True).config
    for quant in ("as-is", "int8", "fp8-block", "int4-g128"):
        refusal = plugin._refusal(config, None, quant)
        layer = Layer(bias=True)
        layer.kernel = plugin._make_class(None, quant, plugin.Options(quant=quant))(config, layer.kernel.quant_config)
        if refusal is None:
            layer.pack()
        else:
            with pytest.raises(moesaic.Error):
                layer.pack()


ON, OFF = plugin.Options(), None


@pytest.mark.parametrize(
    ("value", "want"),
    [
        (None, OFF),
        (False, OFF),
        (0, OFF),
        ("", OFF),
        ("0", OFF),
        ("false", OFF),
        ("Off", OFF),
        (True, ON),
        (1, ON),
        ("1", ON),
        ("TRUE", ON),
        (" on ", ON),
        ({}, ON),  # a table is asked for, if only with what stands there anyway
        ({"quant": "int4-g128"}, plugin.Options(quant="int4-g128")),
        ({"num_threads": 3, "max_tokens": 64}, plugin.Options(num_threads=3, max_tokens=64)),
    ],
)
def test_options(engine: None, monkeypatch: pytest.MonkeyPatch, value: Any, want: Any) -> None:
    assert plugin.Options.parse(value) == want
    if isinstance(value, str):
        monkeypatch.setenv("MOESAIC_VLLM", value)
        assert plugin._options() == want


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("maybe", "got 'maybe', need true or 1 or on, false or 0 or off, or a table"),
        ("00", "got '00', need true"),
        (10, "got 10, need true"),
        ({"quants": "int8"}, "got option 'quants', need one of"),
        ({"quant": "foo"}, "got quant 'foo', need as-is or one of"),
        ({"quant": None}, "got quant None"),
        ({"num_threads": "3"}, "got num_threads '3', need a whole number"),
        ({"max_tokens": 0}, "got max_tokens 0, need a whole number"),
        ({"max_tokens": None}, "got max_tokens None"),
    ],
)
def test_bad_options(value: Any, text: str) -> None:
    with pytest.raises(moesaic.InvalidArgument, match=text):
        plugin.Options.parse(value)
