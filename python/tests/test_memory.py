"""Peaks of memory: no expert is ever widened to bf16 (level 3), and accelerate() needs one layer more (level 2).

Each load runs in a process of its own, so that its peak is that of the load. The figures:

    scripts/python-tests -k peak -s
"""

from __future__ import annotations

import json
import os
import pathlib
import shutil
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
safetensors = pytest.importorskip("safetensors.torch")

import moesaic

EXPERTS, HIDDEN, WIDTH = 48, 1024, 512
EXPERT_BYTES = 3 * HIDDEN * WIDTH * 2  # of one, in bf16
CONVERTED = ["fp8-block", "mxfp4", "mxfp8", "nvfp4", "int4-g128"]


def configuration(layers: int) -> Any:
    return transformers.Qwen3MoeConfig(
        vocab_size=256,
        hidden_size=HIDDEN,
        intermediate_size=WIDTH,
        moe_intermediate_size=WIDTH,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        num_experts=EXPERTS,
        num_experts_per_tok=4,
        decoder_sparse_step=1,
        tie_word_embeddings=True,
    )


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A model of three layers whose experts are 450 MB in bf16; one file of experts and one of the rest."""
    folder = tmp_path_factory.mktemp("model") / "bf16"
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(configuration(3), dtype=torch.bfloat16)
    model = model.to_empty(device="cpu")
    block = torch.randn(1 << 16).mul_(0.02).bfloat16()
    with torch.no_grad():
        for parameter in model.parameters():
            flat = parameter.view(-1)
            for start in range(0, flat.numel(), block.numel()):
                flat[start : start + block.numel()] = block[: flat.numel() - start]
    model.save_pretrained(folder)
    return folder


def gptq(n: int, k: int) -> dict[str, Any]:
    """Random codes in GPTQ's layout, 4 bits, groups of 128, zero points of 8."""
    return {
        "qweight": torch.randint(-(2**31), 2**31 - 1, (k // 8, n), dtype=torch.int32),
        "qzeros": torch.full((k // 128, n // 8), 0x77777777, dtype=torch.int32),
        "scales": torch.full((k // 128, n), 0.005, dtype=torch.float16),
        "g_idx": torch.arange(k, dtype=torch.int32) // 128,
    }


def awq(n: int, k: int) -> dict[str, Any]:
    """The same in AWQ's."""
    return {
        "qweight": torch.randint(-(2**31), 2**31 - 1, (k, n // 8), dtype=torch.int32),
        "qzeros": torch.full((k // 128, n // 8), 0x77777777, dtype=torch.int32),
        "scales": torch.full((k // 128, n), 0.005, dtype=torch.float16),
    }


NF4 = (-1.0, -0.6961928, -0.52507305, -0.39491749, -0.28444138, -0.18477343, -0.09105004, 0.0)
NF4 += (0.0795803, 0.1609302, 0.2461123, 0.33791524, 0.44070983, 0.562617, 0.72295684, 1.0)


def nf4(n: int, k: int) -> dict[str, Any]:
    """Random codes as bitsandbytes stores them."""
    state = {"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": [n, k]}
    return {
        "weight": torch.randint(0, 256, (n * k // 2, 1), dtype=torch.uint8),
        "weight.absmax": torch.full((n * k // 64,), 0.05),
        "weight.quant_map": torch.tensor(NF4),
        "weight.quant_state.bitsandbytes__nf4": torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8),
    }


WRITTEN: dict[str, tuple[Callable[[int, int], dict[str, Any]], dict[str, Any]]] = {
    "gptq": (gptq, {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True}),
    "awq": (awq, {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}),
    "bnb-nf4": (
        nf4,
        {
            "quant_method": "bitsandbytes",
            "load_in_4bit": True,
            "load_in_8bit": False,
            "bnb_4bit_quant_type": "nf4",
            "bnb_4bit_use_double_quant": False,
            "bnb_4bit_compute_dtype": "bfloat16",
            "bnb_4bit_quant_storage": "uint8",
        },
    ),
}


def write(plain: pathlib.Path, folder: pathlib.Path, name: str) -> None:
    """The plain model with experts of a format that other tools write; all else as it is."""
    make, quantization = WRITTEN[name]
    folder.mkdir()
    shutil.copy(plain / "config.json", folder)
    config = json.loads((folder / "config.json").read_text())
    rest, modules = {}, []
    for path in plain.glob("*.safetensors"):
        with safetensors.safe_open(path, "pt") as file:
            rest |= {key: file.get_tensor(key) for key in file.keys() if ".experts." not in key}  # noqa: SIM118
    for layer in range(config["num_hidden_layers"]):
        for leaf, n, k in (("gate_proj", WIDTH, HIDDEN), ("up_proj", WIDTH, HIDDEN), ("down_proj", HIDDEN, WIDTH)):
            one = make(n, k)
            for e in range(EXPERTS):
                module = f"model.layers.{layer}.mlp.experts.{e}.{leaf}"
                modules.append(module)
                rest |= {f"{module}.{key}": value.clone() for key, value in one.items()}
    plains = sorted(
        {key.removesuffix(".weight") for key in rest if key.endswith("proj.weight") and ".experts." not in key}
    )
    skips = {"bitsandbytes": "llm_int8_skip_modules"}.get(quantization["quant_method"], "modules_to_not_convert")
    config["quantization_config"] = quantization | {skips: [*plains, "gate", "lm_head"]}
    (folder / "config.json").write_text(json.dumps(config))
    safetensors.save_file(rest, folder / "model.safetensors", metadata={"format": "pt"})


PEAK = """
def from_here_on():
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")
    return peak()

def peak():
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("VmHWM"))
"""

LEVEL_3 = (
    PEAK
    + """
import sys, torch, transformers, moesaic.transformers
torch.zeros(8) @ torch.zeros(8)
before = from_here_on()
model = moesaic.transformers.from_pretrained(sys.argv[1], progress=False)
print(model.moesaic_report.rows[0].scheme)
print(peak() - before, model.moesaic_report.bytes_after, sum(p.nbytes for p in model.parameters()))
"""
)

LEVEL_2 = (
    PEAK
    + """
import sys, torch, transformers, moesaic.transformers
sys.path.insert(0, sys.argv[1])
import test_memory
with torch.device("meta"):
    model = transformers.AutoModelForCausalLM.from_config(test_memory.configuration(4), dtype=torch.bfloat16)
model = model.to_empty(device="cpu")
with torch.no_grad():
    for parameter in model.parameters():
        parameter.fill_(0.01)
before = from_here_on()
report = moesaic.transformers.accelerate(model, quant=sys.argv[2], progress=False)
print(peak() - before, max(row.bytes_after for row in report.rows))
"""
)


def run(code: str, *arguments: object) -> list[str]:
    environment = os.environ | {"PYTHONPATH": str(pathlib.Path(moesaic.__file__).parents[1])}
    command = [sys.executable, "-c", code, *map(str, arguments)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.split()


def say(name: str, peak: int, allowed: int, rest: str) -> None:
    print(f"{name:<20} peak {peak / 1e6:5.0f} MB, at most {allowed / 1e6:5.0f} ({rest})")


@pytest.mark.parametrize("quant", [*CONVERTED, *WRITTEN])
def test_peak_of_loading(plain: pathlib.Path, tmp_path: pathlib.Path, quant: str) -> None:
    """At most the packed experts, the other weights, two experts and 200 MB.

    The file is mapped, and its pages count while they are in use.
    """
    if quant in WRITTEN:
        write(plain, tmp_path / quant, quant)
    else:
        moesaic.convert(plain, tmp_path / quant, quant=quant)
    scheme, *numbers = run(LEVEL_3, tmp_path / quant)
    shutil.rmtree(tmp_path / quant)
    peak, packed, others = map(int, numbers)
    allowed = packed + others + 2 * EXPERT_BYTES + 200_000_000
    widened = 3 * EXPERTS * EXPERT_BYTES
    say(f"level 3, {quant}", peak, allowed, f"packed {packed / 1e6:.0f}, in bf16 {widened / 1e6:.0f}")
    assert scheme != "bf16" and packed <= 0.6 * widened
    assert peak <= allowed
    assert widened > packed + 2 * EXPERT_BYTES + 200_000_000, "the bound would not tell"


@pytest.mark.parametrize("quant", ["as-is", "int4-g128"])
def test_peak_of_accelerating(quant: str) -> None:
    """At most one packed layer, one expert and 64 MB above the model."""
    peak, layer = map(int, run(LEVEL_2, pathlib.Path(__file__).parent, quant))
    allowed = layer + EXPERT_BYTES + 64_000_000
    say(f"level 2, {quant}", peak, allowed, f"one packed layer {layer / 1e6:.0f}")
    assert peak <= allowed
    assert 4 * layer > allowed, "the bound would not tell"
