"""accelerate() and restore(): what is replaced, released, undone and refused, and that it is not saved."""

from __future__ import annotations

import copy
import pathlib
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from tiny_models import logits, rel_l2, tiny

import moesaic
import moesaic.transformers as mt


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
    for layer in model.model.layers:
        layer.mlp.experts.act_fn = torch.nn.Tanh()
    report = mt.accelerate(model, on_unsupported="keep", progress=False)
    assert len(report.rows) == 2 and all("activation: what" in row.reason for row in report.rows)
    assert "model.layers.0.mlp.experts.down_proj" in model.state_dict()
    model.save_pretrained(tmp_path)
    assert (tmp_path / "model.safetensors").exists()


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"quant": "int4-g12"}, moesaic.NotFound),
        ({"device": "gpu"}, moesaic.InvalidArgument),
        ({"device": "cuda:63"}, (moesaic.Unsupported, moesaic.DeviceError)),
        ({"max_tokens": 0}, moesaic.InvalidArgument),
    ],
)
def test_a_wrong_option_is_no_unsupported_module(options: dict[str, Any], error: Any) -> None:
    for how in ("raise", "keep"):
        with pytest.raises(error, match=str(next(iter(options.values())))):
            mt.accelerate(tiny("mixtral"), on_unsupported=how, progress=False, **options)


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
