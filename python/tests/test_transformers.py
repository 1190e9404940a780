"""transformers: every decorated experts module against its own eager computation, and whole tiny models."""

from __future__ import annotations

import copy
import importlib
import inspect
import logging
import pathlib
import re
import sys
from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from tiny_models import KNOWN, MODELS, PROMPT, logits, rel_l2, tiny, tokens_of

import moesaic
import moesaic.transformers as mt
from moesaic import _recognise

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 96,
    "expert_dim": 96,
    "num_experts": 8,
    "num_local_experts": 8,
    "n_routed_experts": 8,
    "moe_num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_topk": 2,
    "moe_latent_size": None,
}


def experts_classes() -> Iterator[tuple[str, str]]:
    """Modules and names of all classes with the decorator, found in the text: nothing is imported."""
    root = pathlib.Path(transformers.__file__).parent / "models"
    for path in sorted(root.glob("*/modeling_*.py")):
        for name in re.findall(r"^@use_experts_implementation(?:\([^)]*\))?\nclass (\w+)\(", path.read_text(), re.M):
            yield f"transformers.models.{path.parent.name}.{path.stem}", name


def configurations(module: Any) -> Iterator[Any]:
    """Configurations that a modeling file uses, with its sizes made small; those for texts first."""
    classes = {v for v in vars(module).values() if isinstance(v, type) and issubclass(v, transformers.PretrainedConfig)}
    source = importlib.import_module(module.__name__.replace("modeling_", "configuration_"))
    classes |= {
        v for v in vars(source).values() if isinstance(v, type) and issubclass(v, transformers.PretrainedConfig)
    }
    for cls in sorted(classes - {transformers.PretrainedConfig}, key=lambda c: ("Text" not in c.__name__, c.__name__)):
        try:
            config = cls()
        except Exception:
            continue
        for name, value in SIZES.items():
            if hasattr(config, name):
                vars(config)[name] = value  # past the checks of configurations whose sizes are lists
        yield config


def make_experts(module_name: str, class_name: str) -> Any:
    module = importlib.import_module(module_name)
    cls = getattr(module, class_name)
    reasons = []
    for config in configurations(module):
        config._experts_implementation = "eager"
        try:
            experts = cls(config)
        except (AttributeError, TypeError, KeyError) as error:
            reasons.append(repr(error))
            continue
        torch.manual_seed(0)
        with torch.no_grad():
            for parameter in experts.parameters():
                fan_in = parameter.shape[1 if experts.is_transposed else 2] if parameter.dim() == 3 else 4
                parameter.normal_(std=fan_in**-0.5)
        return experts
    raise AssertionError(f"no configuration makes a {class_name}: {reasons}")


CLASSES = list(experts_classes())
# Their own computation widens everything to fp32, where every other's rounds the intermediate to bf16, as the
# scheme bf16 does. quant="f32" computes as they do.
WIDER_THAN_BF16 = {"OpenAIPrivacyFilterExperts"}


def call(experts: Any, name: str, *arguments: Any) -> Any:
    experts.config._experts_implementation = name
    with torch.no_grad():
        return experts(*arguments)


@pytest.mark.parametrize(("module_name", "class_name"), CLASSES, ids=[c for _, c in CLASSES])
def test_experts_of_every_family_against_eager(module_name: str, class_name: str) -> None:
    experts = make_experts(module_name, class_name)
    tokens, top_k = 16, 2
    hidden = experts.down_proj.shape[2 if experts.is_transposed else 1]
    torch.manual_seed(1)
    x = torch.randn(tokens, hidden)
    ids = torch.stack([torch.randperm(experts.down_proj.shape[0])[:top_k] for _ in range(tokens)])
    weights = torch.rand(tokens, top_k)
    if getattr(experts, "has_post_expert_norm", False):
        with pytest.raises(moesaic.Unsupported, match="norm"):
            call(experts, "moesaic", x, ids, weights)
        return
    eager = call(experts, "eager", x, ids, weights)
    ours = call(experts, "moesaic", x, ids, weights)
    assert ours.dtype == x.dtype and rel_l2(ours, eager) <= 2e-6
    one = torch.cat([call(experts, "moesaic", x[i : i + 1], ids[i : i + 1], weights[i : i + 1]) for i in range(tokens)])
    assert torch.equal(one, ours)

    # bf16: the same numbers in float64 are the judge of both.
    experts = experts.to(torch.bfloat16)
    x16, weights16 = x.bfloat16(), weights.bfloat16()
    eager16 = call(experts, "eager", x16, ids, weights16)
    ours16 = call(experts, "moesaic", x16, ids, weights16)
    exact = call(experts.double(), "eager", x16.double(), ids, weights16.double())
    error = rel_l2(ours16, exact)
    assert ours16.dtype == torch.bfloat16 and error <= 6e-3
    if class_name in WIDER_THAN_BF16:
        assert error > rel_l2(eager16, exact), "no exception is needed"
        error = rel_l2(as_f32(experts.to(torch.bfloat16), top_k)(x16, ids, weights16), exact)
    assert error <= rel_l2(eager16, exact)


def as_f32(experts: Any, top_k: int) -> Any:
    return mt._pack(_recognise.describe(experts, top_k), quant="f32", device="cpu", max_tokens=64, num_threads=None)


@pytest.mark.parametrize("name", [*MODELS, *KNOWN])
def test_whole_models_say_the_same(name: str) -> None:
    model = tiny(name)
    if "use_experts_implementation" not in inspect.getsource(sys.modules[type(model).__module__]):
        # This version of transformers computes the family's experts in its own way (Aria in 5.17).
        with pytest.raises(moesaic.InvalidArgument, match="no experts modules"):
            mt.accelerate(model, progress=False)
        return
    eager_logits, eager_tokens = logits(model), tokens_of(model)
    model.set_experts_implementation("moesaic")
    named = logits(model)
    assert 0 < rel_l2(named, eager_logits) <= 1e-5, "and not eager's own"
    assert torch.equal(tokens_of(model), eager_tokens)
    model.set_experts_implementation("eager")
    assert torch.equal(logits(model), eager_logits), "and back"
    report = mt.accelerate(model, progress=False)
    assert report.rows and all(not row.reason for row in report.rows)
    assert torch.equal(logits(model), named), "both levels have the same bits"
    if name in MODELS:
        assert torch.equal(tokens_of(model), eager_tokens)


def test_edited_weights_are_packed_again(caplog: pytest.LogCaptureFixture) -> None:
    model = tiny("qwen3_moe")
    model.set_experts_implementation("moesaic")
    with caplog.at_level(logging.WARNING, "moesaic"):
        first = logits(model)
    assert caplog.text.count("accelerate(model) releases them") == 1
    with torch.no_grad():
        model.model.layers[0].mlp.experts.down_proj.mul_(2)
    second = logits(model)
    assert not torch.equal(first, second)
    model.set_experts_implementation("eager")
    assert rel_l2(second, logits(model)) <= 1e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_written_through_data_are_packed_again(dtype: Any) -> None:
    """As PEFT merges an adapter: neither the address nor PyTorch's count of changes shows it."""
    model, eager = tiny("qwen3_moe", dtype), tiny("qwen3_moe", dtype)
    model.set_experts_implementation("moesaic")
    first = logits(model)
    assert torch.equal(logits(model), first)
    packed = [vars(layer.mlp.experts)[mt._STATE] for layer in model.model.layers]
    torch.manual_seed(3)
    down = torch.randn(2, 8, 64, 4), torch.randn(2, 8, 4, 64)  # of rank four
    delta = (0.02 * down[0] @ down[1]).to(dtype)
    for both in (model, eager):
        weight = both.model.layers[1].mlp.experts.down_proj
        before = weight.data_ptr(), weight._version
        weight.data += delta[0]
        assert (weight.data_ptr(), weight._version) == before
    second = logits(model)
    assert not torch.equal(first, second) and rel_l2(second, logits(eager)) <= (1e-5 if dtype.itemsize == 4 else 2e-2)
    again = [vars(layer.mlp.experts)[mt._STATE] for layer in model.model.layers]
    assert again[0] is packed[0] and again[1] is not packed[1], "and no other layer"
    # A write to one expert alone is seen; to one element it need not be, and repack() is for that.
    experts = model.model.layers[0].mlp.experts
    experts.gate_up_proj.data[7] *= 2
    third = logits(model)
    assert not torch.equal(second, third)
    experts.gate_up_proj.data.view(-1)[1:3] += 5.0
    mt.repack(model)
    assert not torch.equal(logits(model), third)


def test_samples_of_weights_are_bits_from_every_expert() -> None:
    for shape in ((600, 8, 8), (4, 64, 128), (2, 3, 1), (0, 4, 4)):
        numbers = torch.arange(torch.Size(shape).numel(), dtype=torch.int64).view(shape)
        for tensor in (numbers, numbers.transpose(1, 2)):
            sample = mt._sample(tensor)
            assert sample.numel() >= min(tensor.numel(), 2700)
            assert not shape[0] or torch.unique(sample // numbers[0].numel()).numel() == shape[0]
    nan = torch.full((3, 4), float("nan"), dtype=torch.bfloat16)
    assert torch.equal(mt._sample(nan), mt._sample(nan))


def test_a_copied_module_packs_for_itself() -> None:
    model = tiny("qwen3_moe")
    model.set_experts_implementation("moesaic")
    mt.prepare(model)
    twin, eager = copy.deepcopy(model), copy.deepcopy(model)
    eager.set_experts_implementation("eager")
    for both in (twin, eager):
        both.model.layers[0].mlp.experts.down_proj.data *= 2
    with pytest.raises(Exception, match=r"call moesaic\.transformers\.prepare\(model\)"):
        torch.compile(twin, backend="eager", fullgraph=True)(PROMPT, use_cache=False)
    torch._dynamo.reset()
    mt.prepare(twin)
    compiled = torch.compile(twin, backend="eager", fullgraph=True)
    assert rel_l2(logits(compiled), logits(eager)) <= 1e-5
    # A compiled model doesn't look at its weights: repack() gives it the new ones, without compiling again.
    for both in (twin, eager):
        both.model.layers[0].mlp.experts.down_proj.data *= 2
    mt.repack(twin)
    with torch.compiler.set_stance("fail_on_recompile"):
        assert rel_l2(logits(compiled), logits(eager)) <= 1e-5


def test_a_model_of_inference_mode() -> None:
    """Its tensors have no count of changes."""
    with torch.inference_mode():
        model, eager = tiny("qwen3_moe"), tiny("qwen3_moe")
        model.set_experts_implementation("moesaic")
        for _ in range(2):
            assert rel_l2(model(PROMPT, use_cache=False).logits, eager(PROMPT, use_cache=False).logits) <= 1e-5
            for both in (model, eager):
                both.model.layers[0].mlp.experts.down_proj.mul_(2)


def test_experts_of_another_rank_are_left_out() -> None:
    """Under expert parallelism transformers writes the number of experts where a slot is not this rank's."""
    experts = tiny("qwen3_moe").model.layers[0].mlp.experts
    torch.manual_seed(1)
    x, ids, weights = torch.randn(5, 64), torch.randint(0, 8, (5, 2)), torch.rand(5, 2)
    ids[1, 0] = ids[4, 1] = 8
    kept = torch.where(ids < 8, weights, 0.0)
    want = call(experts, "eager", x, ids.clamp(max=7), kept)
    assert rel_l2(call(experts, "moesaic", x, ids, weights), want) <= 2e-6


def test_wrapped_and_missing_weights_are_refused() -> None:
    experts = tiny("qwen3_moe").model.layers[0].mlp.experts
    experts.config._experts_implementation = "moesaic"
    arguments = (torch.randn(3, 64), torch.zeros(3, 2, dtype=torch.int64), torch.ones(3, 2))
    for change, text in (
        (lambda m: m.to("meta"), "meta device"),
        (lambda m: setattr(m, "lora_A", torch.nn.Identity()), "adapter"),
        (
            lambda m: torch.nn.utils.parametrize.register_parametrization(m, "down_proj", torch.nn.Identity()),
            "computed at each call",
        ),
        (lambda m: m.to(torch.float64), "got weights of torch.float64"),
    ):
        changed = copy.deepcopy(experts)
        changed.config._experts_implementation = "moesaic"
        change(changed)
        with pytest.raises(moesaic.Unsupported, match=text):
            changed(*arguments)
