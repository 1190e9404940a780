"""Pictures of which experts a text uses. Needs matplotlib (`pip install moesaic[plot]`).

    load = moesaic.plot.record(model, input_ids)  # a model of transformers, whoever computes it
    moesaic.plot.expert_load(load, labels=tokens).savefig("load.png")

or, for a checkpoint that is loaded with its experts on Moesaic:

    python -m moesaic.plot path/to/model --text "First Citizen:" --out load.png
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import math
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ._errors import Error, InvalidArgument, InvalidShape, NotFound, Unsupported

__all__ = ["ExpertLoad", "LayerLoad", "expert_load", "main", "record"]


@dataclasses.dataclass(frozen=True)
class LayerLoad:
    """Where one layer sent the tokens of a text.

    ids: [T, k] experts of each token, -1 or anything from num_experts on: none. weights: [T, k],
    what each slot's output is multiplied by. Both are lists of rows.
    """

    num_experts: int
    ids: list[list[int]]
    weights: list[list[float]]

    def counts(self) -> list[int]:
        """[E]: slots that each expert got."""
        counted = [0] * self.num_experts
        for row in self.ids:
            for expert in row:
                if 0 <= expert < self.num_experts:
                    counted[expert] += 1
        return counted

    def imbalance(self) -> float:
        """The busiest expert's slots over the mean: 1 is even, num_experts is one expert for all. 0
        without slots.
        """
        counted = self.counts()
        return max(counted) * self.num_experts / sum(counted) if sum(counted) else 0.0

    def shares(self) -> list[list[float]]:
        """[E, T]: an expert's part of the absolute weights of a token; a token's parts add up to 1,
        or 0.
        """
        table = [[0.0] * len(self.ids) for _ in range(self.num_experts)]
        for token, (row, factors) in enumerate(zip(self.ids, self.weights, strict=True)):
            used = [(e, abs(w)) for e, w in zip(row, factors, strict=True) if 0 <= e < self.num_experts]
            total = sum(w for _, w in used)
            for expert, weight in used:
                table[expert][token] += weight / total if total else 0.0
        return table


@dataclasses.dataclass(frozen=True)
class ExpertLoad:
    """The layers of one pass over a text, by their numbers."""

    layers: dict[int, LayerLoad]

    @classmethod
    def from_ids(cls, ids: Mapping[int, Any], num_experts: int, weights: Mapping[int, Any] | None = None) -> ExpertLoad:
        """From arrays [T, k] of any framework, such as a `moesaic.Trace` has.

        Without weights all slots count alike. Raises `moesaic.InvalidShape` for arrays of another
        rank, or ids and weights that differ in shape.
        """
        layers = {}
        for layer, array in ids.items():
            rows = _rows(f"ids of layer {layer}", array)
            factors = [[1.0] * len(row) for row in rows]
            if weights is not None:
                factors = _rows(f"weights of layer {layer}", weights[layer])
            if [len(r) for r in rows] != [len(r) for r in factors]:
                raise InvalidShape(f"weights of layer {layer}: got another shape than ids, need the same")
            layers[layer] = LayerLoad(num_experts, [[int(e) for e in row] for row in rows], factors)
        return cls(layers)


def _rows(name: str, array: Any) -> list[list[Any]]:
    """An array [T, k] as lists."""
    if hasattr(array, "detach"):  # bf16 has no list form in numpy
        array = array.detach().cpu()
        array = array.float() if array.is_floating_point() else array
    rows = array.tolist() if hasattr(array, "tolist") else [list(row) for row in array]
    if any(not isinstance(row, list) or any(isinstance(value, list) for value in row) for row in rows):
        raise InvalidShape(f"{name}: got another rank than 2, need [T, k]")
    return list(rows)


def record(model: Any, input_ids: Any) -> ExpertLoad:
    """Runs a model of transformers over one text and returns where its layers sent the tokens.

    input_ids: [T] or [1, T]. Every experts module that is called with hidden states, ids [T, k] and
    weights is listened to, so the model's own experts and Moesaic's give the same picture. Raises
    `moesaic.InvalidArgument` for a batch of several texts or an empty one, and `moesaic.Unsupported`
    for a model in which no such module is called.
    """
    torch: Any = importlib.import_module("torch")
    if input_ids.dim() == 1:
        input_ids = input_ids[None]
    if input_ids.shape[0] != 1:
        raise InvalidArgument(f"input_ids: got a batch of {input_ids.shape[0]} texts, need one")
    if input_ids.shape[1] == 0:
        raise InvalidArgument("input_ids: got no tokens, need at least one")
    layers: dict[int, LayerLoad] = {}

    def listen(name: str) -> Any:
        numbers = re.findall(r"\.(\d+)\.", name)
        number = int(numbers[-1]) if numbers else len(layers)

        def before(module: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
            _, ids, weights = (*arguments, *named.values())[:3]
            layers[number] = LayerLoad(_num_experts(module), _rows(name, ids), _rows(name, weights))

        return before

    hooks = [
        module.register_forward_pre_hook(listen(name), with_kwargs=True)
        for name, module in model.named_modules()
        if name.rsplit(".", 1)[-1] == "experts"
    ]
    try:
        with torch.no_grad():
            model(input_ids)
    finally:
        for hook in hooks:
            hook.remove()
    if not layers:
        raise Unsupported(f"{type(model).__name__}: got no call of a module named experts")
    return ExpertLoad(dict(sorted(layers.items())))


def _num_experts(module: Any) -> int:
    """How many experts a module has: one of Moesaic's says it in its layer."""
    if hasattr(module, "layer"):
        return int(module.layer.spec.num_experts)
    return int(module.num_experts)


def expert_load(
    load: ExpertLoad,
    *,
    labels: Sequence[str] | None = None,
    layers: Sequence[int] | None = None,
    title: str = "",
) -> Any:
    """Draws a load and returns matplotlib's figure, to be shown or saved.

    A row for each layer: on the left the text from left to right against the experts, darker where
    an expert has more of a token; on the right how many slots each expert got, with a line at the
    even load.

    labels: what is written below the tokens, one each. layers: which ones and in what order, all if
    None. Raises `moesaic.NotFound` for a layer that was not recorded, `moesaic.InvalidArgument` for
    no layer at all and `ImportError` without matplotlib.
    """
    # Not pyplot: it would choose a window system, and keep every figure.
    figures: Any = importlib.import_module("matplotlib.figure")
    chosen = list(load.layers) if layers is None else list(layers)
    if not chosen:
        raise InvalidArgument(f"layers: got none, need some of {sorted(load.layers)}")
    for number in chosen:
        if number not in load.layers:
            raise NotFound(f"layers: got {number}, need some of {sorted(load.layers)}")
    parts = [load.layers[number] for number in chosen]
    tokens = max(len(part.ids) for part in parts)
    if labels is not None and len(labels) != tokens:
        raise InvalidShape(f"labels: got {len(labels)}, need {tokens}, one for each token")
    heights = [max(1.6, 0.11 * part.num_experts) for part in parts]
    width = min(20.0, max(8.0, 2.5 + 0.14 * tokens))
    figure = figures.Figure(figsize=(width, sum(heights) + 0.9 * len(parts) + 0.3), layout="constrained")
    axes = figure.subplots(len(parts), 2, squeeze=False, width_ratios=(5, 1), height_ratios=heights)
    for number, part, (left, right) in zip(chosen, parts, axes, strict=True):
        image = left.imshow(part.shares(), aspect="auto", cmap="Blues", vmin=0, vmax=1, interpolation="nearest")
        left.set(title=f"layer {number}", ylabel="expert")
        left.yaxis.get_major_locator().set_params(integer=True)
        if labels is None:
            left.set_xlabel("token")
        else:
            step = math.ceil(tokens / 140)  # beyond that letters would overlap
            left.set_xticks(range(0, tokens, step), [_printable(labels[i]) for i in range(0, tokens, step)])
            longest = max((len(text) for text in labels), default=0)
            left.tick_params(axis="x", length=0, labelsize=7, labelrotation=90 if longest > 1 else 0)
        counted = part.counts()
        even = sum(counted) / part.num_experts
        right.barh(range(part.num_experts), counted, color="#4a7ab5", height=0.8)
        right.axvline(even, color="#333333", linewidth=1, linestyle="--")
        right.set(xlabel="slots", ylim=left.get_ylim(), yticks=[])
        right.set_title(f"busiest: {part.imbalance():.1f} x even", fontsize="small")
        for side in ("top", "right"):
            right.spines[side].set_visible(False)
    figure.colorbar(
        image,
        ax=axes[:, 0],
        location="left",
        fraction=0.02,
        pad=0.01,
        label="part of a token's weights",
    )
    if title:
        figure.suptitle(title)
    return figure


def _printable(label: str) -> str:
    """A label without what a font has no picture for, and that no formula is made of."""
    shown = {" ": "\u2423", "\n": "\u21b5", "\t": "\u21e5"}
    return "".join(shown.get(c, c if c.isprintable() else "\u00b7") for c in label).replace("$", r"\$")


def main(arguments: Sequence[str] | None = None) -> int:
    """`python -m moesaic.plot`: loads a model, reads a text, writes a picture."""
    parser = argparse.ArgumentParser(prog="python -m moesaic.plot", description="Which experts a text uses.")
    parser.add_argument("model", help="folder with config.json and safetensors")
    parser.add_argument("--text", default="First Citizen:\nBefore we proceed any further, hear me speak.\n")
    parser.add_argument("--out", type=Path, default=Path("expert-load.png"), help=".png, .svg or .pdf")
    parser.add_argument("--layers", type=int, nargs="+", help="which ones; all")
    parser.add_argument("--quant", default="as-is", help="scheme of the experts")
    options = parser.parse_args(arguments)
    try:
        _check_options(options)
        _draw(options)
    except (Error, OSError, ValueError, ImportError) as error:  # the user's, and transformers' words for it
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 1
    return 0


def _check_options(options: argparse.Namespace) -> None:
    """Raises for what would be found only when the model has been read."""
    canvas: Any = importlib.import_module("matplotlib.backend_bases").FigureCanvasBase
    kinds = sorted(canvas.get_supported_filetypes())
    if options.out.suffix.removeprefix(".").lower() not in kinds:
        raise InvalidArgument(f"--out: got {options.out}, need a name that ends in one of .{', .'.join(kinds)}")
    if not options.out.absolute().parent.is_dir():
        raise NotFound(f"--out: got {options.out}, whose folder does not exist")
    if options.out.is_dir():
        raise InvalidArgument(f"--out: got {options.out}, which is a folder, need the name of a file")
    if not options.text:
        raise InvalidArgument("--text: got an empty text, need at least one token")


def _draw(options: argparse.Namespace) -> None:
    torch: Any = importlib.import_module("torch")
    load_model: Any = importlib.import_module("moesaic._from_pretrained").from_pretrained
    model = load_model(options.model, quant=options.quant)
    ids, labels = _tokens(options.model, options.text, model.config.get_text_config().vocab_size)
    load = record(model, torch.tensor([ids]))
    expert_load(load, labels=labels, layers=options.layers, title=Path(options.model).name).savefig(
        options.out, dpi=150
    )
    for number, part in load.layers.items():
        print(f"layer {number}: {len(part.ids)} tokens, busiest expert {part.imbalance():.2f} times the even load")
    print(f"written: {options.out}")


def _tokens(folder: str, text: str, vocabulary: int) -> tuple[list[int], list[str]]:
    """Ids of a text and what they stand for; a vocabulary of 256 without a tokenizer is bytes."""
    if vocabulary == 256 and not list(Path(folder).glob("tokenizer*")):
        data = text.encode()
        return list(data), [chr(b) for b in data]
    tokenizer: Any = importlib.import_module("transformers").AutoTokenizer.from_pretrained(folder)
    ids = list(tokenizer(text)["input_ids"])
    return ids, [tokenizer.decode([i]) for i in ids]


if __name__ == "__main__":
    sys.exit(main())
