#!/usr/bin/env python3
"""GGUF files whose experts lie in blocks that are not read, hold no numbers, or do not fit, and the second scales of
NVFP4 beside them, with the refusal that each must get."""

import random
import struct

import quant_model as q
from corpus import main
from gguf_file import BLOCKS, metadata
from gguf_model import gguf_file
from tiny_model import Tensor, matrix, tensor

CORRUPT, MISSING, UNSUPPORTED, SHAPE, DTYPE = "corrupt_file", "missing_tensor", "unsupported", "invalid_shape", "invalid_dtype"
NAN, INF = struct.pack("<f", float("nan")), struct.pack("<f", float("inf"))


def fill(c):
    sizes = {"block_count": 1, "embedding_length": 256, "expert_feed_forward_length": 256, "expert_count": 2, "expert_used_count": 1}

    made = {}  # blocks of a projection and type: the same in every case

    def blocks(leaf, kind):
        if (leaf, kind) not in made:
            made[leaf, kind] = q.gguf_rows(random.Random(leaf + kind), kind, 512, 256)[0]
        return kind, [2, 256, 256], made[leaf, kind]

    def layer(name, kinds, spoil, code, keywords, changes=None):
        rng = random.Random(name)
        t = {"blk.0.ffn_gate_inp.weight": tensor("BF16", matrix(rng, "BF16", 2, 256))}
        for leaf, kind in zip(("gate", "up", "down"), kinds):
            t["blk.0.ffn_%s_exps.weight" % leaf] = blocks(leaf, kind)
        spoil(t)
        c.gguf("blocks_" + name, gguf_file(metadata("qwen3moe", **dict(sizes, **(changes or {}))), t), code, keywords, "layer")

    up = "blk.0.ffn_up_exps.weight"
    def poke(at, raw):
        def spoil(t):
            kind, shape, data = t[up]
            t[up] = (kind, shape, data[:at] + raw + data[at + len(raw):])
        return spoil
    layer("good", ("Q4_K", "Q4_K", "Q6_K"), lambda t: None, "ok", [])
    def retype(kind, block, at=0, raw=b""):
        """All blocks of `up` zero but for a few bytes of the last."""
        data = bytes(block) * (512 * 256 // BLOCKS[kind][1] - 1) + bytes(at) + raw + bytes(block - at - len(raw))
        return lambda t: t.update({up: (kind, [2, 256, 256], data)})
    for kind in ("IQ2_XXS", "IQ3_S", "IQ1_M"):
        layer("grid_" + kind, ("Q4_0",) * 3, retype(kind, BLOCKS[kind][2]), UNSUPPORTED, [up, kind, "grid", "Q3_K", "IQ4_XS"])
    layer("q8_k", ("Q4_0",) * 3, retype("Q8_K", 292), UNSUPPORTED, [up, "the type Q8_K is not supported", "Q3_K"])
    for kind, at in (("Q5_1", 0), ("Q5_1", 2), ("Q3_K", 108), ("IQ4_NL", 0), ("IQ4_XS", 0), ("TQ1_0", 52), ("TQ2_0", 64)):
        size = BLOCKS[kind][2]
        layer("mixed_%s_%d" % (kind, at), ("Q4_0",) * 3, retype(kind, size), "ok", [])
        layer("nan_%s_%d" % (kind, at), ("Q4_0",) * 3, retype(kind, size, at, b"\0\x7e"), CORRUPT, [up, "NaN"])
        layer("inf_%s_%d" % (kind, at), ("Q4_0",) * 3, retype(kind, size, at, b"\0\xfc"), CORRUPT, [up, "infinity"])
    number = lambda leaf, raw, shape=(2,), dtype="F32": lambda t: t.update({"blk.0.ffn_up_exps." + leaf: Tensor(dtype, list(shape), raw)})
    two = struct.pack("<2f", 0.5, 2)
    layer("outer_good", ("NVFP4",) * 3, number("scale", two), "ok", [])
    layer("outer_input_good", ("NVFP4",) * 3, number("input_scale", two), "ok", [])
    layer("outer_expert_more", ("NVFP4",) * 3, number("scale", two + two[:4], (3,)), SHAPE, ["ffn_up_exps.scale", "[3]", "[2]"])
    layer("outer_f16", ("NVFP4",) * 3, number("scale", bytes(4), dtype="F16"), DTYPE, ["ffn_up_exps.scale", "F16", "F32"])
    for label, raw in (("nan", NAN), ("inf", INF), ("zero", bytes(4)), ("negative", struct.pack("<f", -2))):
        layer("outer_" + label, ("NVFP4",) * 3, number("scale", two[:4] + raw), CORRUPT, ["ffn_up_exps.scale", "expert 1", "need a finite number > 0"])
    layer("outer_unknown", ("NVFP4",) * 3, number("scales", two), UNSUPPORTED, ["not recognised", "ffn_up_exps.scales"])
    layer("half_plain", ("Q4_0",) * 3, lambda t: t.update({up: ("F16", [2, 256, 256], bytes(2 * 2 * 256 * 256))}), UNSUPPORTED, [up, "blocks"])
    layer("missing", ("Q4_0",) * 3, lambda t: t.pop(up), MISSING, [up])
    layer("expert_less", ("Q4_0",) * 3, lambda t: t.update({up: ("Q4_0", [1, 256, 256], t[up][2][:len(t[up][2]) // 2])}), SHAPE, [up, "[1, 256, 144]", "[2, 256, 144]"])
    layer("half_row", ("Q4_0",) * 3, lambda t: t.update({up: ("Q4_0", [2, 512, 128], t[up][2])}), SHAPE, [up, "[2, 512, 72]"])
    layer("nan_q4_0", ("Q4_0",) * 3, poke(0, b"\0\x7e"), CORRUPT, [up])
    layer("inf_q8_0", ("Q8_0",) * 3, poke(34 * 9, b"\0\x7c"), CORRUPT, [up])
    layer("nan_q4_k", ("Q4_K",) * 3, poke(0, b"\xff\x7f"), CORRUPT, [up])
    layer("nan_min_q4_k", ("Q4_K",) * 3, poke(2, b"\0\x7e"), CORRUPT, [up])
    layer("inf_q6_k", ("Q6_K",) * 3, poke(208, b"\0\xfc"), CORRUPT, [up])
    layer("width_not_blocks", ("Q4_K",) * 3, lambda t: None, UNSUPPORTED, ["128 columns", "Q4_K", "256"], {"expert_feed_forward_length": 128})


main(fill)
