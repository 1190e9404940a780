#!/usr/bin/env python3
"""The checkpoints of make_quant_checkpoints.py with an attention that is quantised as the experts are, and with the plain
tensors of a whole model: what `moesaic convert` must copy. Writes them below FOLDER, with FOLDER/manifest.json."""

import json
import os
import random
import struct
import sys

from make_quant_checkpoints import Cases, bitsandbytes, fp4, fp8, integers, stacked
from tiny_model import Tensor, matrix, safetensors, tensor, vector


def read(path):
    with open(path, "rb") as f:
        data = f.read()
    (size,) = struct.unpack("<Q", data[:8])
    out = {}
    for name, e in json.loads(data[8:8 + size]).items():
        begin, end = e["data_offsets"]
        out[name] = Tensor(e["dtype"], e["shape"], data[8 + size + begin:8 + size + end])
    return out


def with_attention(quant):
    """The description without the entries that leave the attention out."""
    quant = json.loads(json.dumps(quant))
    for key in ("ignore", "exclude_modules", "modules_to_not_convert", "ignored_layers"):
        if quant and key in quant:
            quant[key] = [entry for entry in quant[key] if "self_attn" not in entry]
    for key in ("dynamic", "extra_config"):
        if quant and key in quant:
            quant[key] = {name: value for name, value in quant[key].items() if "attn" not in name}
    return quant


class Whole(Cases):
    def _finish(self, name, path, golden, experts, router, manifest, shared=None, values=None, block_output=None, inputs=None):
        self.manifest.append({"name": name, "path": path})

    def _complete(self, name, linear, h):
        rng = random.Random(name + " attention")
        path = os.path.join(self.root, name, "model.safetensors")
        tensors = read(path)
        for leaf in ("q_proj", "o_proj"):
            files, _ = linear(rng, h, h, "down_proj")
            tensors.update({"model.layers.0.self_attn.%s%s" % (leaf, end): t for end, t in files.items()})
        tensors["model.layers.0.input_layernorm.weight"] = vector("BF16", matrix(rng, "BF16", 1, h)[0])
        tensors["model.embed_tokens.weight"] = tensor("BF16", matrix(rng, "BF16", 8, h))
        tensors["lm_head.weight"] = tensor("BF16", matrix(rng, "BF16", 8, h))
        with open(path, "wb") as f:
            f.write(safetensors(tensors))

    def add(self, name, quant, linear, h=64, **k):
        super().add(name, with_attention(quant), linear, h=h, **k)
        self._complete(name, linear, h)

    def add_stacked(self, name, quant, linear, h=64, **k):
        super().add_stacked(name, with_attention(quant), linear, h=h, **k)
        self._complete(name, linear, h)


def main():
    if len(sys.argv) != 2:
        sys.exit("usage: make_convert_sources.py FOLDER")
    os.makedirs(sys.argv[1], exist_ok=True)
    cases = Whole(sys.argv[1])
    for part in (fp8, integers, fp4, bitsandbytes, stacked):
        part(cases)
    with open(os.path.join(sys.argv[1], "manifest.json"), "w", encoding="utf-8") as f:
        json.dump(cases.manifest, f, indent=1)


if __name__ == "__main__":
    main()
