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

from transformers.models.auto.configuration_auto import CONFIG_MAPPING

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
# An activation of gate and up together that the library does not have.
OTHER_ACTIVATION = {"Inkling2Experts"}
# Their own computation widens everything to fp32, where every other's rounds the intermediate to bf16, as the
# scheme bf16 does. quant="f32" computes as they do.
WIDER_THAN_BF16 = {"OpenAIPrivacyFilterExperts"}


def rel_l2(a: Any, b: Any) -> float:
    assert b.norm() > 0.1, "the reference is far from zero"
    return float((a.double() - b.double()).norm() / b.double().norm())


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
    if class_name in OTHER_ACTIVATION:
        with pytest.raises(moesaic.Unsupported, match="activation: what"):
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


COMMON = {
    "vocab_size": 128,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
MODELS: dict[str, Any] = {
    "qwen3_moe": lambda t: t.Qwen3MoeConfig(
        **COMMON, head_dim=16, intermediate_size=96, moe_intermediate_size=64, num_experts=8, num_experts_per_tok=2
    ),
    "mixtral": lambda t: t.MixtralConfig(**COMMON, intermediate_size=96, num_local_experts=4, num_experts_per_tok=2),
    "olmoe": lambda t: t.OlmoeConfig(**COMMON, intermediate_size=48, num_experts=8, num_experts_per_tok=2),
    "qwen2_moe": lambda t: t.Qwen2MoeConfig(
        **COMMON,
        intermediate_size=96,
        moe_intermediate_size=48,
        shared_expert_intermediate_size=64,
        num_experts=8,
        num_experts_per_tok=2,
    ),
    "gpt_oss": lambda t: t.GptOssConfig(
        **COMMON,
        head_dim=16,
        intermediate_size=64,
        num_local_experts=4,
        num_experts_per_tok=2,
        layer_types=["full_attention", "sliding_attention"],
    ),
    "deepseek_v3": lambda t: t.DeepseekV3Config(
        **{**COMMON, "num_key_value_heads": 4},
        intermediate_size=96,
        moe_intermediate_size=48,
        n_routed_experts=8,
        num_experts_per_tok=2,
        n_group=2,
        topk_group=1,
        first_k_dense_replace=1,
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        v_head_dim=16,
    ),
    "granitemoe": lambda t: t.GraniteMoeConfig(
        **COMMON, intermediate_size=48, num_local_experts=4, num_experts_per_tok=2
    ),
    "phimoe": lambda t: t.PhimoeConfig(**COMMON, intermediate_size=96, num_local_experts=4, num_experts_per_tok=2),
}


# More families, by their own configuration class with these sizes where it has them.
SMALL = COMMON | {
    "head_dim": 16,
    "intermediate_size": 96,
    "moe_intermediate_size": 48,
    "expert_dim": 48,
    "num_experts": 8,
    "num_local_experts": 8,
    "n_routed_experts": 8,
    "moe_num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_topk": 2,
    "moe_k": 2,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 16,
    "shared_expert_intermediate_size": 64,
    "n_shared_experts": 1,
    "num_shared_experts": 1,
    "moe_num_shared_experts": 1,
    "pad_token_id": 0,
}
LATENT = {"num_key_value_heads": 4}  # latent attention has as many as heads
FAMILIES: dict[str, dict[str, int]] = {
    "afmoe": {},
    "aria_text": {},
    "axk2": LATENT,
    "cohere2_moe": {},
    "deepseek_v2": {},
    "deepseek_v32": LATENT,
    "deepseek_v4": {},
    "dots1": {},
    "ernie4_5_moe": {},
    "exaone_moe": {},
    "flex_olmo": {},
    "glm4_moe": {},
    "glm4_moe_lite": LATENT,
    "glm_moe_dsa": LATENT,
    "granitemoe_swa": {},
    "granitemoeshared": {},
    "hunyuan_v1_moe": {},
    "hy_v3": {},
    "hy_v4": {},
    "kolibri1": {},
    "laguna": {},
    "mellum": {},
    "mimo_v2_flash": {},
    "minimax": {},
    "minimax_m2": {},
    "nemotron_h": {},
    "solar_open": {},
}
KNOWN = [name for name in FAMILIES if name in CONFIG_MAPPING]  # to this version of transformers


def configuration_of(name: str) -> Any:
    if name in MODELS:
        return MODELS[name](transformers)
    cls = CONFIG_MAPPING[name]
    defaults = cls()
    return cls(**{field: value for field, value in (SMALL | FAMILIES[name]).items() if hasattr(defaults, field)})


def tiny(name: str, dtype: Any = torch.float32) -> Any:
    config = configuration_of(name)
    with torch.device("meta"):  # a size that is called otherwise would stay as large as it is
        model = transformers.AutoModelForCausalLM.from_config(config)
    assert sum(p.numel() for p in model.parameters()) < 5_000_000
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, experts_implementation="eager").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=parameter.shape[-1] ** -0.5)
    return model.to(dtype)


PROMPT = torch.arange(18).reshape(2, 9) * 7 % 128


def logits(model: Any) -> Any:
    with torch.no_grad():
        return model(PROMPT, use_cache=False).logits


def tokens_of(model: Any) -> Any:
    return model.generate(
        PROMPT, attention_mask=torch.ones_like(PROMPT), max_new_tokens=30, do_sample=False, pad_token_id=0
    )


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


def test_accelerate_reports_releases_and_quantises() -> None:
    model = tiny("qwen3_moe", torch.bfloat16)
    original = model.model.layers[0].mlp.experts
    before = sum(p.numel() * p.element_size() for p in original.parameters())
    seen: list[tuple[int, int]] = []
    report = mt.accelerate(model, quant="mxfp8", progress=lambda done, total: seen.append((done, total)))
    assert seen == [(0, 2), (1, 2), (2, 2)]
    row = report.rows[0]
    assert (
        row.scheme == "mxfp8"
        and row.bytes_before == before
        and 0 < row.bytes_after < before
        and row.bound > 0
        and row.backend in str(report)
    )
    assert sum(p.numel() for p in original.parameters()) == 0
    assert isinstance(model.model.layers[0].mlp.experts, mt.MoesaicExperts)
    assert logits(model).isfinite().all()
    assert_not_saved(model)
    assert model.to(torch.float32) is model and model.half() is model
    with pytest.raises(TypeError, match="cannot be copied"):
        copy.deepcopy(model)
    with pytest.raises(moesaic.DeviceError, match="packed for cpu"):
        model.to("meta")


def assert_not_saved(model: Any) -> None:
    """What was saved would lack the experts: each way refuses, and the first file is not written."""
    with pytest.raises(moesaic.Unsupported, match="save_pretrained: the experts of this model are packed"):
        model.save_pretrained("nowhere")
    assert not pathlib.Path("nowhere").exists()
    with pytest.raises(
        moesaic.Unsupported, match=r"state_dict: model\.layers\.0\.\w+\.experts are packed and can't be saved"
    ):
        model.state_dict()


def test_restore_puts_the_originals_back(tmp_path: pathlib.Path) -> None:
    model = tiny("mixtral")
    want, names = logits(model), list(model.state_dict())
    mt.accelerate(model, release=False, progress=False)
    assert any(isinstance(m, mt.MoesaicExperts) for m in model.modules())
    assert_not_saved(model)
    # A state of the whole model doesn't go in either: its experts would be left out.
    with pytest.raises(RuntimeError, match="Unexpected key"):
        model.load_state_dict(tiny("mixtral").state_dict())
    assert mt.restore(model) == 2 and torch.equal(logits(model), want)
    assert list(model.state_dict()) == names
    model.save_pretrained(tmp_path)
    assert torch.equal(
        logits(transformers.AutoModelForCausalLM.from_pretrained(tmp_path, experts_implementation="eager").eval()), want
    )


class Stop(Exception):
    pass


def test_what_fails_while_packing_is_undone_where_the_originals_are_kept() -> None:
    def stop(done: int, total: int) -> None:
        if done == 1:
            raise Stop

    model = tiny("qwen3_moe")
    want = logits(model)
    with pytest.raises(Stop):
        mt.accelerate(model, release=False, progress=stop)
    assert not any(isinstance(m, mt.MoesaicExperts) for m in model.modules()) and torch.equal(logits(model), want)
    assert mt.restore(model) == 0
    with pytest.raises(Stop):
        mt.accelerate(model, progress=stop)
    kinds = [isinstance(layer.mlp.experts, mt.MoesaicExperts) for layer in model.model.layers]
    assert kinds == [True, False], "as documented: released modules stay replaced"


def test_a_model_whose_modules_are_all_kept_is_as_it_was(tmp_path: pathlib.Path) -> None:
    model = tiny("mixtral")
    report = mt.accelerate(model, quant="no-such-scheme", on_unsupported="keep", progress=False)
    assert all("no-such-scheme" in row.reason for row in report.rows)
    assert "model.layers.0.mlp.experts.down_proj" in model.state_dict()
    model.save_pretrained(tmp_path)
    assert (tmp_path / "model.safetensors").exists()


def test_a_failure_after_the_first_release_refuses_saving_too() -> None:
    def stop(done: int, total: int) -> None:
        if done == 1:
            raise Stop

    model = tiny("qwen3_moe")
    with pytest.raises(Stop):
        mt.accelerate(model, progress=stop)
    assert_not_saved(model)
    kept = tiny("qwen3_moe")
    with pytest.raises(Stop):
        mt.accelerate(kept, release=False, progress=stop)
    assert "save_pretrained" not in vars(kept) and kept.state_dict()


@pytest.mark.parametrize("release", [True, False])
def test_a_module_in_several_places_is_replaced_in_all(release: bool) -> None:
    model = tiny("mixtral")
    first, second = (layer.mlp for layer in model.model.layers)
    second.experts = first.experts
    original, want = first.experts, logits(model)
    report = mt.accelerate(model, release=release, progress=False)
    assert len(report.rows) == 1 and isinstance(first.experts, mt.MoesaicExperts)
    assert second.experts is first.experts and rel_l2(logits(model), want) <= 1e-5
    if not release:
        assert mt.restore(model) == 1
        assert first.experts is original and second.experts is original and torch.equal(logits(model), want)
        with pytest.raises(Stop):
            mt.accelerate(model, release=False, progress=stop_at_the_end)
        assert first.experts is original and second.experts is original


def stop_at_the_end(done: int, total: int) -> None:
    if done == total:
        raise Stop


def test_an_experts_module_itself_is_refused_before_it_is_packed() -> None:
    experts = tiny("mixtral").model.layers[0].mlp.experts
    with pytest.raises(moesaic.InvalidArgument, match="got a MixtralExperts itself, need the model or the block"):
        mt.accelerate(experts, progress=False)
    assert experts.down_proj.numel() > 0


def test_hooks_and_their_handles_stay_with_the_place() -> None:
    model, calls = tiny("mixtral"), []
    original = model.model.layers[0].mlp.experts
    after = original.register_forward_hook(lambda module, _, out: calls.append(type(module).__name__))
    before = original.register_forward_pre_hook(lambda *_, **__: calls.append("before"), with_kwargs=True)
    mt.accelerate(model, progress=False)
    del original
    logits(model)
    assert calls == ["before", "MoesaicExperts"]
    before.remove()
    after.remove()
    logits(model)
    assert len(calls) == 2


def test_nothing_changes_when_one_module_is_refused() -> None:
    model = tiny("qwen3_moe")
    last = model.model.layers[1].mlp.experts
    last.act_fn = torch.nn.Tanh()
    with pytest.raises(
        moesaic.Unsupported, match=r"layers\.1\.mlp\.experts: activation: what Qwen3MoeExperts computes is none of"
    ):
        mt.accelerate(model, progress=False)
    assert not any(isinstance(m, mt.MoesaicExperts) for m in model.modules())
    # What the library refuses, and not only what a module looks like, is found before the first is packed.
    fine = tiny("qwen3_moe")
    fine.model.layers[1].mlp.experts.to(torch.float64)
    with pytest.raises(moesaic.Unsupported, match=r"layers\.1\.mlp\.experts: .*float64"):
        mt.accelerate(fine, progress=False)
    narrow = tiny("qwen3_moe")
    experts = narrow.model.layers[1].mlp.experts
    experts.gate_up_proj = torch.nn.Parameter(torch.randn(8, 80, 64))
    experts.down_proj = torch.nn.Parameter(torch.randn(8, 64, 40))
    with pytest.raises(moesaic.Unsupported, match=r"layers\.1\.mlp\.experts: .*multiple of 32"):
        mt.accelerate(narrow, quant="mxfp8", progress=False)
    # So is a value that the format does not have, where the first expert has it.
    large = tiny("qwen3_moe")
    with torch.no_grad():
        large.model.layers[1].mlp.experts.down_proj[0, 3, 5] = 1e30
    with pytest.raises(moesaic.Unsupported, match=r"layers\.1\.mlp\.experts: .*which F16 cannot hold"):
        mt.accelerate(large, quant="f16", progress=False)
    for other in (fine, narrow, large):
        assert not any(isinstance(m, mt.MoesaicExperts) for m in other.modules())
    with pytest.raises(moesaic.Error, match="cuda"):
        mt.accelerate(tiny("qwen3_moe"), device="cuda:63", progress=False)
    report = mt.accelerate(model, on_unsupported="keep", progress=False)
    assert [bool(row.reason) for row in report.rows] == [False, True] and "kept: " in str(report)
    with pytest.raises(moesaic.InvalidArgument, match="no experts modules"):
        mt.accelerate(torch.nn.Linear(2, 2))


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
