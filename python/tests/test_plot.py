"""Pictures of expert load: what they count, and that they are drawn."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

moesaic = importlib.import_module("moesaic")
plot = importlib.import_module("moesaic.plot")

MODELS = Path(__file__).resolve().parents[2] / "testdata" / "models"


def make_load():
    ids = {3: [[0, 1], [1, 2], [1, -1]], 1: [[2, 0], [2, 0], [2, 4]]}
    weights = {3: [[0.75, 0.25], [1.0, 1.0], [2.0, 5.0]], 1: [[1, 1], [1, 1], [0, 7]]}
    return plot.ExpertLoad.from_ids(ids, 4, weights)


def test_counts():
    load = make_load()
    assert load.layers[3].counts() == [1, 3, 1, 0]  # -1 is no expert
    assert load.layers[1].counts() == [2, 0, 3, 0]  # nor is 4 of 4
    assert load.layers[3].imbalance() == 3 * 4 / 5
    assert plot.LayerLoad(2, [[-1]], [[1.0]]).imbalance() == 0


def test_shares():
    shares = make_load().layers[3].shares()
    assert shares == [[0.75, 0, 0], [0.25, 0.5, 1.0], [0, 0.5, 0], [0, 0, 0]]
    assert make_load().layers[1].shares()[2] == [0.5, 0.5, 0]  # a token of weight 0 has no parts


def test_bad_arrays():
    with pytest.raises(moesaic.InvalidShape, match="ids of layer 0: got another rank than 2"):
        plot.ExpertLoad.from_ids({0: [[[1]]]}, 2)
    with pytest.raises(moesaic.InvalidShape, match="need the same"):
        plot.ExpertLoad.from_ids({0: [[1, 2]]}, 3, {0: [[1.0]]})


def test_importing_needs_no_matplotlib():
    script = "import sys; sys.modules['matplotlib'] = None; import moesaic.plot"
    script += "; assert 'numpy' not in sys.modules"
    subprocess.run([sys.executable, "-c", script], check=True)


def test_picture(tmp_path):
    pytest.importorskip("matplotlib")
    figure = plot.expert_load(make_load(), labels=["a", "$", "\n"], layers=[1, 3], title="two layers")
    grids = [axes for axes in figure.axes if axes.images]
    assert [axes.get_title() for axes in grids] == ["layer 1", "layer 3"]
    assert grids[1].images[0].get_array().tolist() == make_load().layers[3].shares()
    assert [label.get_text() for label in grids[0].get_xticklabels()] == ["a", r"\$", "\u21b5"]
    bars = [axes for axes in figure.axes if axes.patches]
    assert [patch.get_width() for patch in bars[1].patches] == [1, 3, 1, 0]
    assert bars[1].lines[0].get_xdata()[0] == 5 / 4
    figure.savefig(tmp_path / "load.png")
    assert (tmp_path / "load.png").read_bytes()[:4] == b"\x89PNG"


def test_bad_pictures():
    pytest.importorskip("matplotlib")
    with pytest.raises(moesaic.NotFound, match=r"got 2, need some of \[1, 3\]"):
        plot.expert_load(make_load(), layers=[2])
    with pytest.raises(moesaic.InvalidShape, match="got 2, need 3"):
        plot.expert_load(make_load(), labels=["a", "b"])
    with pytest.raises(moesaic.InvalidArgument, match=r"layers: got none, need some of \[1, 3\]"):
        plot.expert_load(make_load(), layers=[])


def test_record_is_the_same_whoever_computes():
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    from_pretrained = importlib.import_module("moesaic._from_pretrained").from_pretrained
    ids = torch.tensor(list(b"JULIET:\nO Romeo"))
    theirs = plot.record(transformers.AutoModelForCausalLM.from_pretrained(MODELS / "mini-qwen3-moe"), ids)
    ours = plot.record(from_pretrained(MODELS / "mini-qwen3-moe", progress=False), ids)
    assert theirs == ours and set(ours.layers) == {1}
    assert sum(ours.layers[1].counts()) == 15 * 4 and ours.layers[1].num_experts == 16
    with pytest.raises(moesaic.InvalidArgument, match="got a batch of 2 texts"):
        plot.record(None, ids.repeat(2, 1))
    with pytest.raises(moesaic.InvalidArgument, match="got no tokens"):
        plot.record(None, ids[:0])
    with pytest.raises(moesaic.Unsupported, match="no call of a module named experts"):
        plot.record(torch.nn.Identity(), ids)


def test_command(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    pytest.importorskip("transformers")
    out = tmp_path / "load.svg"
    assert plot.main([str(MODELS / "mini-qwen3-moe"), "--text", "What, my lord", "--out", str(out)]) == 0
    assert "<svg" in out.read_text()[:1000]
    said = capsys.readouterr().out
    assert "layer 1: 13 tokens, busiest expert" in said and f"written: {out}" in said


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--out", "load.xyz"], "--out: got load.xyz, need a name that ends in one of"),
        (["--out", "load"], "--out: got load, need a name that ends in one of"),
        (["--out", "no-such-folder/load.png"], "whose folder does not exist"),
        (["--text", ""], "--text: got an empty text"),
        (["--quant", "int5"], 'quant scheme: got "int5", need one of'),
        (["--layers", "0"], r"layers: got 0, need some of [1]"),
    ],
)
def test_command_says_in_a_line_what_is_wrong(arguments, said, tmp_path, capsys, monkeypatch):
    pytest.importorskip("matplotlib")
    pytest.importorskip("transformers")
    monkeypatch.chdir(tmp_path)
    assert plot.main([str(MODELS / "mini-qwen3-moe"), *arguments]) == 1
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("python -m moesaic.plot: ")]
    assert len(lines) == 1 and said in lines[0]
    assert plot.main(["./no-such-model"]) == 1
    assert "./no-such-model: no such folder" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
