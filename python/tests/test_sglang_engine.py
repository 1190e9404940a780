"""The plugin for SGLang in SGLang itself: its own plugin loader, hooks, layers' methods, runner and descriptions.

Skipped where SGLang cannot be imported. Its server needs a GPU; these parts of it run on a CPU:

    MOESAIC_TEST_SGLANG=1 scripts/python-tests --set sglang-cpu -k sglang_engine
"""

from __future__ import annotations

import importlib
import importlib.util
import os
from types import SimpleNamespace
from typing import Any

import pytest

if not os.environ.get("MOESAIC_TEST_SGLANG"):
    pytest.skip("MOESAIC_TEST_SGLANG is not set", allow_module_level=True)

torch = pytest.importorskip("torch")
import moesaic

E, HIDDEN, WIDTH, TOP_K = 4, 256, 128, 2


def sglang(module: str) -> Any:
    return importlib.import_module(f"sglang.srt.{module}")


def loaded_combine() -> Any:
    return sglang("layers.moe.token_dispatcher.standard").StandardCombineInput


@pytest.fixture(scope="module")
def loaded() -> Any:
    """SGLang, whose own loader has found our entry point and applied our hooks."""
    sglang("plugins").load_plugins()
    return SimpleNamespace(
        utils=sglang("layers.moe.utils"),
        runner=sglang("layers.moe.moe_runner"),
        flags=sglang("runtime_context").get_flags().moe,
        unquant=sglang("layers.quantization.unquant"),
        fp8=sglang("layers.quantization.fp8"),
        dispatch=sglang("layers.moe.token_dispatcher.standard").StandardDispatchOutput,
        topk=sglang("layers.moe.topk").StandardTopKOutput,
    )


@pytest.fixture
def asked(loaded: Any) -> Any:
    """As `--moe-runner-backend moesaic` leaves it."""
    loaded.flags.runner_backend = loaded.utils.resolve_moe_runner_backend("moesaic")
    yield loaded
    loaded.flags.runner_backend = None


def a_layer(loaded: Any, **changes: Any) -> Any:
    layer = torch.nn.Module()
    layer.num_experts = layer.num_local_experts = E
    layer.intermediate_size_per_partition = WIDTH
    fields = {
        "num_experts": E,
        "num_local_experts": E,
        "hidden_size": HIDDEN,
        "intermediate_size_per_partition": WIDTH,
        "top_k": TOP_K,
        "params_dtype": torch.bfloat16,
    }
    layer.moe_runner_config = loaded.runner.MoeRunnerConfig(**(fields | changes))
    return layer


def a_batch(loaded: Any, tokens: int = 7) -> Any:
    torch.manual_seed(2)
    x = torch.randn(tokens, HIDDEN).bfloat16()
    ids = torch.stack([torch.randperm(E)[:TOP_K] for _ in range(tokens)]).int()
    return loaded.dispatch(x, None, loaded.topk(torch.rand(tokens, TOP_K), ids, torch.zeros(tokens, E)))


def exact(w13: Any, w2: Any, batch: Any) -> Any:
    x, out = batch.hidden_states.double(), torch.zeros(batch.hidden_states.shape, dtype=torch.float64)
    for row in range(x.shape[0]):
        for e, weight in zip(batch.topk_output.topk_ids[row], batch.topk_output.topk_weights[row], strict=True):
            gate, up = (w13[e].double() @ x[row]).chunk(2)
            out[row] += weight.double() * (w2[e].double() @ (torch.nn.functional.silu(gate) * up))
    return out


def error(got: Any, want: Any) -> float:
    return float((got.double() - want).norm() / want.norm())


def test_the_name_can_be_asked_for(loaded: Any) -> None:
    assert "moesaic" in sglang("arg_groups.choices").MOE_RUNNER_BACKEND_CHOICES
    parser = sglang("server_args").ServerArgs
    arguments = __import__("argparse").ArgumentParser()
    parser.add_cli_args(arguments)
    found = arguments.parse_args(["--model-path", "none", "--moe-runner-backend", "moesaic"])
    assert found.moe_runner_backend == "moesaic"


def test_nothing_changes_unless_it_is(loaded: Any) -> None:
    layer = a_layer(loaded)
    method = loaded.unquant.UnquantizedFusedMoEMethod()
    method.create_moe_runner(layer, layer.moe_runner_config)
    assert method.runner.runner_backend is loaded.utils.MoeRunnerBackend.TRITON


@pytest.mark.parametrize("factor", [None, 2.5])
def test_plain_experts(asked: Any, factor: float | None) -> None:
    layer = a_layer(asked, routed_scaling_factor=factor)
    method = asked.unquant.UnquantizedFusedMoEMethod()
    method.create_weights(layer, E, HIDDEN, WIDTH, torch.bfloat16)
    torch.manual_seed(1)
    for weight in (layer.w13_weight, layer.w2_weight):
        weight.data.normal_(std=weight.shape[-1] ** -0.5)
    method.create_moe_runner(layer, layer.moe_runner_config)
    assert method.runner.runner_backend.value == "moesaic"
    batch = a_batch(asked)
    want = exact(layer.w13_weight.data, layer.w2_weight.data, batch) * (factor or 1)
    if factor is None:
        # SGLang's own computation on a CPU, which its method for CPUs calls.
        native = sglang("layers.moe.fused_moe_native").moe_forward_native
        theirs = error(native(layer, batch.hidden_states, batch.topk_output, layer.moe_runner_config), want)
    else:
        theirs = 6e-3
    # What the method for GPUs does, whole: its description of the weights, the runner, what is combined.
    combined = method.forward_cuda(layer, batch)
    assert isinstance(combined, loaded_combine()) and combined.hidden_states.dtype == torch.bfloat16
    assert error(combined.hidden_states, want) <= max(theirs, 4e-3)
    assert layer.w13_weight.untyped_storage().nbytes() == 2, "SGLang's copy is released"
    one = [
        asked.dispatch(batch.hidden_states[i : i + 1], None, asked.topk(*(t[i : i + 1] for t in batch.topk_output)))
        for i in range(7)
    ]
    again = torch.cat([method.forward_cuda(layer, b).hidden_states for b in one])
    assert torch.equal(again, combined.hidden_states), "bits do not depend on the batch"


def test_fp8_blocks(asked: Any) -> None:
    layer = a_layer(asked)
    config = asked.fp8.Fp8Config(is_checkpoint_fp8_serialized=True, weight_block_size=[128, 128])
    method = asked.fp8.Fp8MoEMethod(config)
    torch.manual_seed(1)
    plain = torch.randn(E, 2 * WIDTH, HIDDEN) * HIDDEN**-0.5, torch.randn(E, HIDDEN, WIDTH) * WIDTH**-0.5
    for name, weight in zip(("w13", "w2"), plain, strict=True):
        tiles = weight.reshape(E, weight.shape[1] // 128, 128, weight.shape[2] // 128, 128)
        scale = tiles.abs().amax(dim=(2, 4)) / 448
        codes = (tiles / scale[:, :, None, :, None]).reshape(weight.shape).to(torch.float8_e4m3fn)
        layer.register_parameter(f"{name}_weight", torch.nn.Parameter(codes, requires_grad=False))
        layer.register_parameter(f"{name}_weight_scale_inv", torch.nn.Parameter(scale, requires_grad=False))
        setattr(layer, f"{name}_input_scale", None)
    method.create_moe_runner(layer, layer.moe_runner_config)
    assert method.runner.runner_backend.value == "moesaic"
    decoded = [
        getattr(layer, f"{n}_weight").double()
        * getattr(layer, f"{n}_weight_scale_inv").double().repeat_interleave(128, 1).repeat_interleave(128, 2)
        for n in ("w13", "w2")
    ]
    batch = a_batch(asked)
    want = exact(*decoded, batch)
    combined = method.apply(layer, batch)
    assert error(combined.hidden_states, want) <= 6e-2, "activations are quantised to e4m3 in groups of 128"
    assert error(combined.hidden_states, want) > 1e-3


def test_a_refusal_ends_the_start(asked: Any) -> None:
    layer = a_layer(asked, activation="situ")
    with pytest.raises(moesaic.Unsupported, match="got situ"):
        asked.unquant.UnquantizedFusedMoEMethod().create_moe_runner(layer, layer.moe_runner_config)


def test_a_method_that_chooses_its_own_runner_ends_the_start(asked: Any) -> None:
    where = "layers.moe.fused_moe_triton.layer"
    if importlib.util.find_spec("openai"):  # which that module imports
        assert hasattr(sglang(where).FusedMoE.__init__, "__wrapped__"), "it is followed by our look at the layer"
    registry = sglang("plugins.hook_registry").HookRegistry
    ((_, check, _),) = registry._hooks[f"sglang.srt.{where}.FusedMoE.__init__"]
    layer = a_layer(asked)
    for method, refused in (
        (sglang("layers.quantization.w8a8_int8").W8A8Int8MoEMethod(SimpleNamespace()), True),
        (asked.unquant.UnquantizedFusedMoEMethod(), False),
    ):
        method.create_moe_runner(layer, layer.moe_runner_config)
        layer.quant_method, layer.runner_backend = method, method.get_moe_runner_backend(layer)
        if refused:
            with pytest.raises(moesaic.Unsupported, match="got W8A8Int8MoEMethod, which computes experts by triton"):
                check(None, layer)
        else:
            check(None, layer)
