"""moesaic.transformers.from_pretrained, over the bundled models and what `moesaic.convert` makes of
them.
"""

from __future__ import annotations

import importlib
import json
import shutil
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
moesaic = importlib.import_module("moesaic")  # a package that cannot be imported is no reason to skip
safetensors = pytest.importorskip("safetensors.torch")
from tiny_models import CONFIG_MAPPING, logits, tiny

level3 = importlib.import_module("moesaic._from_pretrained")
from_pretrained = level3.from_pretrained

MODELS = Path(__file__).resolve().parents[2] / "testdata" / "models"
NAMES = ["mini-qwen3-moe", "mini-deepseek-v3", "mini-gpt-oss"]
# The bundled models speak bytes.
PROMPT = b"First Citizen:\nBefore we proceed any further, hear me speak.\n\nAll:\n"

# Scheme of moesaic.convert -> upper bound of the relative L2 error of an experts module's output
# against float64 on the unquantised weights (docs/accuracy.md, "Gaussian data", column "output").
FORMATS = {
    "fp8-block": 9.3e-2,
    "fp8-channel": 9.3e-2,
    "mxfp8": 9.3e-2,
    "mxfp4": 4.2e-1,
    "nvfp4": 3.6e-1,
    "int4-g128": 2.9e-1,
}


def prompt():
    return torch.tensor([list(PROMPT)])


def original(name, dtype=torch.bfloat16):
    model = transformers.AutoModelForCausalLM.from_pretrained(MODELS / name, dtype=dtype)
    return model.eval()


def experts_of(model):
    return {n: m for n, m in model.named_modules() if n.endswith(".experts")}


def record(model, ids):
    """Inputs of every experts module in one pass."""
    calls = {}
    hooks = [
        module.register_forward_pre_hook(lambda _, arguments, name=name: calls.__setitem__(name, arguments))
        for name, module in experts_of(model).items()
    ]
    with torch.no_grad():
        model(ids)
    for hook in hooks:
        hook.remove()
    return calls


def relative(got, want):
    got, want = got.detach().double(), want.detach().double()
    return float((got - want).norm() / want.norm())


def check_modules(model, name, bound):
    """Every experts module against transformers' own in float64, on the original's inputs."""
    reference = original(name)
    reference.set_experts_implementation("eager")
    calls = record(reference, prompt())
    exact = experts_of(reference.double())
    ours = experts_of(model)
    assert set(ours) == set(exact) == set(calls)
    worst = 0.0
    with torch.no_grad():
        for module, (hidden, ids, weights) in calls.items():
            want = exact[module](hidden.double(), ids, weights.double())
            worst = max(worst, relative(ours[module](hidden, ids, weights), want))
    assert worst <= bound
    return worst


@pytest.mark.parametrize("name", NAMES)
def test_stored_as_bf16(name):
    model = from_pretrained(MODELS / name, progress=False)
    assert not model.training
    assert not [n for n, _ in model.named_parameters() if ".experts." in n]
    check_modules(model, name, 7.4e-3)
    reference = original(name)
    with torch.no_grad():
        assert relative(model(prompt()).logits, reference(prompt()).logits) <= 1e-2
    tokens = [m.generate(prompt(), max_new_tokens=16, do_sample=False) for m in (model, reference)]
    assert torch.equal(*tokens)


@pytest.mark.parametrize("quant", FORMATS)
def test_converted(quant, tmp_path):
    """What convert wrote is computed as stored, whatever transformers would do with it."""
    moesaic.convert(MODELS / "mini-qwen3-moe", tmp_path / "model", quant=quant)
    model = from_pretrained(tmp_path / "model", progress=False)
    (module,) = model.moesaic_report.rows
    assert module.module == "model.layers.1.mlp.experts"
    assert module.bytes_before < 1_700_000 and module.bytes_after <= 1.3 * module.bytes_before
    assert check_modules(model, "mini-qwen3-moe", FORMATS[quant]) > 1e-3
    assert getattr(model, "hf_quantizer", None) is None  # only experts were quantised
    # The layer that the library makes by itself of the same file: equal bits.
    alone = moesaic.RoutedExperts.from_checkpoint(moesaic.Checkpoint(tmp_path / "model"), 1)
    hidden = torch.randn(9, 256).bfloat16()
    ids, weights = torch.randint(0, 16, (9, 4)), torch.rand(9, 4)
    assert torch.equal(alone(hidden, ids, weights), experts_of(model)[module.module](hidden, ids, weights))


@pytest.mark.parametrize("name", [n for n in ("gemma4_text", "inkling2_text") if n in CONFIG_MAPPING])
def test_experts_behind_a_norm_or_with_soft_caps(name, tmp_path):
    """Of a layer that normalises its rows (Gemma 4) the experts alone read rows that are."""
    eager = tiny(name)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in eager.parameters():
            if parameter.dim() == 1:  # norms that do something
                parameter.mul_(1 + 0.3 * torch.randn_like(parameter))
    eager.save_pretrained(tmp_path)
    model = from_pretrained(tmp_path, dtype=torch.float32, progress=False)
    assert relative(logits(model), logits(eager)) <= 1e-5
    checkpoint = moesaic.Checkpoint(tmp_path)
    spec = checkpoint.layers[0]
    layer = moesaic.FusedMoE.from_checkpoint(checkpoint, spec.layer)
    x = 3 * torch.randn(5, spec.hidden_size)
    y, trace = layer(x, trace=True)
    weights, ids = moesaic.Router.from_checkpoint(checkpoint, spec.layer)(trace.router_logits)
    assert torch.equal(ids, trace.topk_ids) and torch.equal(weights, trace.topk_weights)
    if name == "gemma4_text":
        assert spec.input_norm_eps == 1e-6 and spec.routing.has_expert_scale
        with pytest.raises(moesaic.Unsupported, match=r"gate of layer 0 \(gemma4_text\): reads rows behind a norm"):
            moesaic.GateLinear.from_checkpoint(checkpoint, spec.layer)
        norm = eager.model.layers[0].pre_feedforward_layernorm_2
        with torch.no_grad():
            x = norm(x)
    else:
        assert spec.input_norm_eps == 0 and layer.spec.activation.name == "situ"
        assert torch.equal(moesaic.GateLinear.from_checkpoint(checkpoint, spec.layer)(x), trace.router_logits)
    loader = moesaic.WeightLoader.from_checkpoint(checkpoint, spec.layer, experts_only=True)
    loader.load_weights((tensor, checkpoint.read_tensor(tensor)) for tensor in loader.missing())
    factor = spec.routing.routed_scaling_factor if spec.routing.scale_on_output else 1.0
    for experts in (
        moesaic.RoutedExperts.from_checkpoint(checkpoint, spec.layer),
        moesaic.RoutedExperts.from_loader(loader),
    ):
        assert relative(factor * experts(x, ids, weights), y) <= 1e-5


@pytest.mark.parametrize("name", ["mini-deepseek-v3", "mini-gpt-oss"])
def test_other_families_converted(name, tmp_path):
    quant = "mxfp4" if name == "mini-gpt-oss" else "fp8-block"
    moesaic.convert(MODELS / name, tmp_path / "model", quant=quant)
    check_modules(from_pretrained(tmp_path / "model", progress=False), name, FORMATS[quant])


def test_quant_is_made_on_loading():
    model = from_pretrained(MODELS / "mini-qwen3-moe", quant="int4-g128", progress=False)
    (module,) = model.moesaic_report.rows
    assert module.scheme == "int4-g128" and module.bytes_after < module.bytes_before / 3
    check_modules(model, "mini-qwen3-moe", FORMATS["int4-g128"])


def test_float32_hidden_states():
    model = from_pretrained(MODELS / "mini-qwen3-moe", dtype=torch.float32, progress=False)
    reference = original("mini-qwen3-moe", torch.float32)
    with torch.no_grad():
        got = model(prompt()).logits
        assert got.dtype == torch.float32
        assert relative(got, reference(prompt()).logits) <= 6e-3


def block_quantise(weight):
    """E4M3 in blocks of 128x128 and their scales, as an FP8 checkpoint stores them."""
    blocks = weight.float().reshape(weight.shape[0] // 128, 128, weight.shape[1] // 128, 128)
    scale = blocks.abs().amax((1, 3)).clamp(min=1e-12) / 448
    codes = (blocks / scale[:, None, :, None]).reshape(weight.shape).to(torch.float8_e4m3fn)
    return codes, scale


def test_files_beside_the_model_are_no_part_of_it(tmp_path):
    """The golden file, which convert copies, holds ids: no weights that would need a quantizer."""
    folder = tmp_path / "model"
    moesaic.convert(MODELS / "mini-gpt-oss", folder, quant="mxfp4")
    index = folder / "model.safetensors.index.json"
    for name in (index, tmp_path / "elsewhere"):
        index.rename(name)
        assert "model.layers.0.mlp.router.out2" not in {tensor for tensor, *_ in level3._tensors(str(folder))}
        assert not level3._quantised_beside_experts(str(folder))
    name.rename(index)
    model = from_pretrained(folder, progress=False)
    assert getattr(model, "hf_quantizer", None) is None
    assert check_modules(model, "mini-gpt-oss", FORMATS["mxfp4"]) > 1e-3


def test_attention_stays_with_the_checkpoints_quantizer(tmp_path, monkeypatch):
    """FP8 linears beside FP8 experts: transformers widens the former, never sees the latter."""
    # Where it sees a GPU it keeps them as they are, for kernels that a model on the CPU has not.
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    folder = tmp_path / "model"
    moesaic.convert(MODELS / "mini-qwen3-moe", folder, quant="fp8-block")
    config = json.loads((folder / "config.json").read_text())
    quantised = set()
    for path in folder.glob("*.safetensors"):
        tensors = safetensors.load_file(path)
        for name in [n for n in tensors if n.endswith(("q_proj.weight", "o_proj.weight"))]:
            tensors[name], tensors[f"{name}_scale_inv"] = block_quantise(tensors[name])
            quantised.add(name.removesuffix(".weight"))
        safetensors.save_file(tensors, path)
    index = folder / "model.safetensors.index.json"
    if index.exists():
        table = json.loads(index.read_text())
        table["weight_map"] |= {f"{n}.weight_scale_inv": table["weight_map"][f"{n}.weight"] for n in quantised}
        index.write_text(json.dumps(table))
    kept = config["quantization_config"]["modules_to_not_convert"]
    config["quantization_config"]["modules_to_not_convert"] = [n for n in kept if n not in quantised]
    (folder / "config.json").write_text(json.dumps(config))
    assert level3._quantised_beside_experts(str(folder))
    model = from_pretrained(folder, progress=False)
    reference = original("mini-qwen3-moe")
    q_proj = "model.layers.0.self_attn.q_proj.weight"
    widened = dict(model.named_parameters())[q_proj]
    assert 1e-3 < relative(widened, dict(reference.named_parameters())[q_proj]) <= 3.1e-2
    check_modules(model, "mini-qwen3-moe", FORMATS["fp8-block"])
    with torch.no_grad():
        assert relative(model(prompt()).logits, reference(prompt()).logits) <= 9.3e-2


def names_of(path):
    with safetensors.safe_open(path, "pt") as file:
        return list(file.keys())


def test_no_expert_is_read_by_transformers(monkeypatch):
    """Counts what transformers loads: each of its tensors once, and none of the 48 of experts."""
    loading = importlib.import_module("transformers.core_model_loading")
    asked = []
    for name in ("spawn_materialize", "_materialize_copy"):
        if not hasattr(loading, name):
            continue
        function = getattr(loading, name)

        def counted(*arguments, function=function, **named):
            asked.extend(a for a in arguments if hasattr(a, "get_shape"))
            return function(*arguments, **named)

        monkeypatch.setattr(loading, name, counted)
    from_pretrained(MODELS / "mini-qwen3-moe", progress=False)
    stored = {name for path in (MODELS / "mini-qwen3-moe").glob("model*.safetensors") for name in names_of(path)}
    others = [name for name in stored if ".experts." not in name]
    assert asked and len({id(a) for a in asked}) <= len(others) <= len(stored) - 48


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("quant", ["as-is", "int4-g128"])
def test_three_levels_agree_bit_for_bit(name, quant):
    levels = importlib.import_module("moesaic.transformers")
    loaded = original(name)
    with torch.no_grad():
        want = from_pretrained(MODELS / name, quant=quant, progress=False)(prompt()).logits
        if quant == "as-is":
            loaded.set_experts_implementation("moesaic")
            assert torch.equal(loaded(prompt()).logits, want)
        levels.accelerate(loaded, quant=quant, progress=False)
        assert torch.equal(loaded(prompt()).logits, want)


def test_report_and_progress():
    said = []
    model = from_pretrained(MODELS / "mini-qwen3-moe", progress=lambda done, of: said.append((done, of)))
    done = [d for d, _ in said]
    assert done == sorted(done) and done[-1] == said[-1][1] > 3_000_000
    assert len({of for _, of in said}) == 1
    report = model.moesaic_report
    assert [m.scheme for m in report.rows] == ["bf16"]
    assert report.bytes_before == report.rows[0].bytes_before == 16 * 3 * 128 * 256 * 2
    assert report.rows[0].bound == 6e-3
    with pytest.raises(moesaic.Unsupported, match="are packed and can't be saved"):
        model.save_pretrained("never-written")
    assert not Path("never-written").exists()
    with pytest.raises(moesaic.Unsupported, match="state_dict: model.layers.1.mlp.experts"):
        model.state_dict()
    lines = str(report).splitlines()
    assert len(lines) == 3 and "model.layers.1.mlp.experts" in lines[1] and "bf16" in lines[1]


@pytest.mark.parametrize("name", ["granitemoeshared", "gemma4_text", "deepseek_v4"])
def test_the_report_counts_experts_whatever_their_tensors_are_called(name, tmp_path):
    eager = tiny(name)
    eager.save_pretrained(tmp_path)
    report = from_pretrained(tmp_path, progress=False).moesaic_report
    experts = [module for _, module in eager.named_modules() if hasattr(module, "_apply_gate")]
    assert report.bytes_before == sum(p.numel() * p.element_size() for m in experts for p in m.parameters())


def test_progress_bar(capsys):
    from_pretrained(MODELS / "mini-qwen3-moe", progress=True)
    assert "Packing experts: 100%" in capsys.readouterr().err
    from_pretrained(MODELS / "mini-qwen3-moe", progress=False)
    assert "Packing experts" not in capsys.readouterr().err


def test_an_interrupt_stops_loading():
    def stop(done, of):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        from_pretrained(MODELS / "mini-qwen3-moe", progress=stop)
    assert not level3._plans
    from_pretrained(MODELS / "mini-qwen3-moe", progress=False)  # and nothing is left behind


def copied(tmp_path, **changes):
    """The Qwen model with other entries in its configuration."""
    folder = tmp_path / "copy"
    shutil.copytree(MODELS / "mini-qwen3-moe", folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))
    return folder


def test_an_activation_that_differs_is_refused(monkeypatch):
    modeling = importlib.import_module("transformers.models.qwen3_moe.modeling_qwen3_moe")

    def clamped(self, gate_up):
        gate, up = gate_up.chunk(2, dim=-1)
        return self.act_fn(gate.clamp(max=19)) * up

    monkeypatch.setattr(modeling.Qwen3MoeExperts, "_apply_gate", clamped)
    with pytest.raises(moesaic.Unsupported, match="got an activation of Qwen3MoeExperts that is not"):
        from_pretrained(MODELS / "mini-qwen3-moe", progress=False)


def test_a_norm_after_experts_is_refused(monkeypatch):
    modeling = importlib.import_module("transformers.models.qwen3_moe.modeling_qwen3_moe")
    init = modeling.Qwen3MoeExperts.__init__

    def with_norm(self, *arguments):
        init(self, *arguments)
        self.has_post_expert_norm = True

    monkeypatch.setattr(modeling.Qwen3MoeExperts, "__init__", with_norm)
    with pytest.raises(moesaic.Unsupported, match="norm after each expert"):
        from_pretrained(MODELS / "mini-qwen3-moe", progress=False)


def test_sizes_that_differ_are_refused():
    config = transformers.AutoConfig.from_pretrained(MODELS / "mini-qwen3-moe")
    config.moe_intermediate_size = 64
    with pytest.raises(moesaic.Unsupported, match="got intermediate size 64, need 128 as layer 1"):
        from_pretrained(MODELS / "mini-qwen3-moe", config=config, progress=False)


def test_a_layer_without_a_module_is_refused():
    config = transformers.AutoConfig.from_pretrained(MODELS / "mini-qwen3-moe")
    config.mlp_only_layers = [1]
    with pytest.raises(moesaic.Unsupported, match="no experts module"):
        from_pretrained(MODELS / "mini-qwen3-moe", config=config, progress=False)


@pytest.mark.parametrize(
    "named",
    [{"device_map": "auto"}, {"tp_plan": "auto"}, {"quantization_config": {"quant_method": "fp8"}}],
)
def test_arguments_that_contradict_are_refused(named):
    with pytest.raises(moesaic.Unsupported, match=f"{next(iter(named))}: got"):
        from_pretrained(MODELS / "mini-qwen3-moe", **named)


def test_a_gguf_file_is_refused():
    with pytest.raises(moesaic.Unsupported, match="got a GGUF file"):
        from_pretrained("no-such-model.gguf")


def test_a_dense_model_is_refused(tmp_path):
    folder = copied(tmp_path, mlp_only_layers=[0, 1])
    with pytest.raises(moesaic.Unsupported, match="got no MoE layers of model type qwen3_moe"):
        from_pretrained(folder, progress=False)


@pytest.mark.parametrize(
    "wrong", [{"quant": "int5"}, {"device": "gpu"}, {"max_tokens": 0}, {"backend": "cpu_mmx"}, {"device": "cuda:63"}]
)
def test_a_wrong_option_is_refused_before_anything_is_read(wrong, monkeypatch):
    def read(*arguments, **named):
        raise AssertionError("transformers was asked first")

    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", read)
    with pytest.raises(moesaic.Error, match=str(next(iter(wrong.values())))):
        from_pretrained(MODELS / "mini-qwen3-moe", progress=False, **wrong)


def test_the_quantizer_is_for_us_alone(tmp_path):
    folder = copied(tmp_path, quantization_config={"quant_method": "moesaic"})
    with pytest.raises(moesaic.InvalidArgument, match="only moesaic.transformers.from_pretrained makes"):
        transformers.AutoModelForCausalLM.from_pretrained(folder)


def test_loading_info_comes_along():
    model, info = from_pretrained(MODELS / "mini-qwen3-moe", progress=False, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert model.moesaic_report.rows


def test_a_callers_configuration_stays_as_it_is(tmp_path):
    moesaic.convert(MODELS / "mini-qwen3-moe", tmp_path / "mxfp8", quant="mxfp8")
    for folder in (MODELS / "mini-qwen3-moe", tmp_path / "mxfp8"):
        config = transformers.AutoConfig.from_pretrained(folder)
        before = config.to_dict()
        with pytest.raises(moesaic.Error, match="zzz"):
            from_pretrained(folder, config=config, quant="zzz", progress=False)
        assert config.to_dict() == before
        models = [from_pretrained(folder, config=config, progress=False) for _ in range(2)]
        assert config.to_dict() == before
        with torch.no_grad():
            assert torch.equal(models[0](prompt()).logits, models[1](prompt()).logits)


@pytest.mark.parametrize(
    ("name", "value"),
    [("use_cache", False), ("output_hidden_states", True), ("pad_token_id", 3), ("tie_word_embeddings", True)],
)
def test_entries_of_the_configuration_are_arguments(name, value):
    """As in transformers: what the configuration has an entry for is that entry, the rest the model's."""
    model = from_pretrained(MODELS / "mini-qwen3-moe", progress=False, trust_remote_code=False, **{name: value})
    theirs = transformers.AutoModelForCausalLM.from_pretrained(MODELS / "mini-qwen3-moe", **{name: value})
    assert getattr(model.config, name) == getattr(theirs.config, name) == value
    assert model.dtype == theirs.dtype == torch.bfloat16
    with pytest.raises(TypeError, match="no_such_entry"):
        from_pretrained(MODELS / "mini-qwen3-moe", progress=False, no_such_entry=1)


@pytest.mark.parametrize("given", ["argument", "configuration"])
def test_another_number_of_experts_than_the_checkpoints(given):
    named = {"num_experts_per_tok": 2}
    if given == "configuration":
        config = transformers.AutoConfig.from_pretrained(MODELS / "mini-qwen3-moe")
        config.num_experts_per_tok = 2
        named = {"config": config}
    model = from_pretrained(MODELS / "mini-qwen3-moe", progress=False, dtype=torch.float32, quant="f32", **named)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        MODELS / "mini-qwen3-moe", dtype=torch.float32, num_experts_per_tok=2
    ).eval()
    with torch.no_grad():
        assert relative(model(prompt()).logits, theirs(prompt()).logits) <= 1e-5


def test_the_checkpoints_number_of_experts_where_the_model_says_none(monkeypatch):
    def silent(*_):
        raise moesaic.InvalidArgument("top_k: nothing says it")

    monkeypatch.setattr("moesaic._recognise.top_k_of", silent)
    model = from_pretrained(MODELS / "mini-qwen3-moe", progress=False)
    assert [module.layer.spec.top_k for module in experts_of(model).values()] == [4]


@pytest.mark.parametrize(
    ("named", "dtype"),
    [
        ({"torch_dtype": torch.float32}, torch.float32),
        ({"torch_dtype": "float16", "dtype": None}, torch.float16),
        ({"torch_dtype": torch.float16, "dtype": torch.float32}, torch.float32),
        ({"dtype": None}, torch.bfloat16),
    ],
)
def test_both_names_of_the_dtype(named, dtype):
    assert from_pretrained(MODELS / "mini-qwen3-moe", progress=False, **named).dtype == dtype


def test_a_missing_folder_is_not_looked_for_on_the_hub(monkeypatch, tmp_path):
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *_, **__: pytest.fail("asked the hub"))
    for path in (tmp_path / "no-such", "./no-such", "../no-such", "~/no-such"):
        with pytest.raises(moesaic.NotFound, match="no-such: no such folder"):
            from_pretrained(path, progress=False)
    monkeypatch.setenv("HOME", str(MODELS))
    assert from_pretrained("~/mini-qwen3-moe", progress=False).moesaic_report.rows


def test_the_hub_is_asked_with_what_transformers_would_ask_it(monkeypatch, tmp_path):
    asked = {}

    def download(name, **named):
        asked[name] = named
        return str(MODELS)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    options = {"token": "secret", "cache_dir": str(tmp_path), "force_download": True}
    model = from_pretrained("someone/models", revision="v2", subfolder="mini-qwen3-moe", progress=False, **options)
    assert [row.module for row in model.moesaic_report.rows] == ["model.layers.1.mlp.experts"]
    got = asked["someone/models"]
    assert {key: got[key] for key in (*options, "revision", "local_files_only")} == {
        **options,
        "revision": "v2",
        "local_files_only": False,
    }
    assert "*.safetensors" in got["allow_patterns"] and "*.py" not in got["allow_patterns"]
    from_pretrained("someone/models", subfolder="mini-qwen3-moe", trust_remote_code=True, progress=False)
    assert {"*.safetensors", "*.py"} <= set(asked["someone/models"]["allow_patterns"])
    assert not {"token", "cache_dir", "force_download"} & set(asked["someone/models"])
