#!/usr/bin/env python3
"""Writes one tiny checkpoint per quantised format below FOLDER, with FOLDER/manifest.json: for each the path to open, the
file of values (w13, w2, w13 as stored where loading changes it), the golden file and what must be read from it.

Golden outputs are computed in double precision from the numbers that the files hold."""

import json
import os
import random
import struct
import sys

import quant_model as q
from gguf_file import metadata
from gguf_model import gguf_file
from functools import partial

from moe_float64 import gpt_oss, llama4, moe
from stacked_model import FUSED, HF_FP8, fused, separate, split_weights
from tiny_model import Tensor, matrix, safetensors, tensor

EXPERTS = 4


def bf16_values(m):
    return [[struct.unpack("<f", b"\0\0" + e)[0] for e in row] for row in m]


class Cases:
    def __init__(self, root):
        self.root, self.manifest = root, []

    def _finish(self, name, path, golden, experts, router, manifest, shared=None, values=None, block_output=None, inputs=None):
        """experts: (gate, up, down) values as stored; values: as loaded, where that differs (the golden output is then theirs:
        the scheme's bound is about arithmetic). inputs: input scales of w13 and w2 of each expert."""
        experts = values or experts
        # Errors of quantised activations scatter from token to token; those of weight-only formats do not.
        tokens = 4 if path.endswith(".gguf") else 16
        rng = random.Random(name + "input")
        h = len(experts[0][2])
        x = bf16_values([[_bf16(rng.gauss(0, 1)) for _ in range(h)] for _ in range(tokens)])
        block_output = block_output or moe
        out, chosen = zip(*(block_output(row, router, experts, shared=shared) for row in x))
        k = len(chosen[0])
        flat = lambda rows: [v for row in rows for v in row]
        block = "model.layers.0.mlp"
        with open(golden, "wb") as f:
            f.write(safetensors({block + ".input": q.floats("F32", [tokens, h], flat(x)),
                                 block + ".output": Tensor("F64", [tokens, h], struct.pack("<%dd" % (tokens * h), *flat(out))),
                                 block + ".gate.out2": Tensor("I32", [tokens, k], struct.pack("<%di" % (k * tokens), *flat(chosen)))}))
        i = len(experts[0][0])
        expected = {"w13": q.floats("F32", [len(experts), 2 * i, h], [v for g, u, _ in experts for v in flat(g) + flat(u)]),
                    "w2": q.floats("F32", [len(experts), h, i], [v for _, _, d in experts for v in flat(d)])}
        if inputs and inputs[0]:
            expected["w13_input"], expected["w2_input"] = (q.floats("F32", [len(inputs)], xs) for xs in zip(*inputs))
        if shared:
            s = len(shared[0])
            expected["shared_w13"] = q.floats("F32", [1, 2 * s, h], flat(shared[0]) + flat(shared[1]))
            expected["shared_w2"] = q.floats("F32", [1, h, s], flat(shared[2]))
        with open(os.path.join(self.root, name + ".values.safetensors"), "wb") as f:
            f.write(safetensors(expected))
        self.manifest.append(dict(manifest, name=name, path=path, golden=os.path.relpath(golden, self.root)))

    def add(self, name, quant, linear, h=64, i=64, scheme="", tp=(2,), shared=0, values=None, side=None):
        """linear(rng, n, k, projection) -> (files, values)."""
        rng = random.Random(name)
        p = "model.layers.0.mlp."
        router = matrix(rng, "BF16", EXPERTS, h)
        tensors, experts, inputs = {p + "gate.weight": tensor("BF16", router)}, [], []

        def mlp(module, width):
            made, parts = [], []
            for leaf, n, k in (("gate_proj", width, h), ("up_proj", width, h), ("down_proj", h, width)):
                files, v = linear(rng, n, k, leaf)
                parts.append(files)
                tensors.update({"%s%s.%s%s" % (p, module, leaf, end): t for end, t in files.items()})
                made.append(v)
            inputs.append(input_scales(parts))
            return tuple(made)

        for e in range(EXPERTS):
            experts.append(mlp("experts.%d" % e, i))
        config = {"model_type": "qwen3_moe", "hidden_size": h, "moe_intermediate_size": i, "num_hidden_layers": 1, "num_experts": EXPERTS,
                  "num_experts_per_tok": 2, "norm_topk_prob": True, "torch_dtype": "bfloat16"}
        beside = None
        if shared:
            config = {"model_type": "ernie4_5_moe", "hidden_size": h, "moe_intermediate_size": shared, "num_hidden_layers": 1,
                      "moe_num_experts": EXPERTS, "moe_k": 2, "moe_num_shared_experts": 1, "moe_layer_start_index": 0,
                      "torch_dtype": "bfloat16"}
            beside = mlp("shared_experts", shared)
        if quant:
            config["quantization_config"] = quant
        folder = os.path.join(self.root, name)
        os.makedirs(folder)
        files = {"config.json": json.dumps(config), "model.safetensors": safetensors(tensors)}
        files.update({n: json.dumps(x) for n, x in (side or {}).items()})
        for file_name, content in files.items():
            with open(os.path.join(folder, file_name), "wb") as f:
                f.write(content.encode() if isinstance(content, str) else content)
        self._finish(name, name, os.path.join(folder, "golden.safetensors"), experts, bf16_values(router),
                     {"quant": scheme, "tp": list(tp)}, beside, values and [values(x) for x in experts], inputs=inputs[:EXPERTS])

    def add_stacked(self, name, quant, linear, family="qwen3_moe", h=64, i=64, scheme="", tp=(2,), storage=fused, ends=FUSED, top_k=None, **kinds):
        """All experts in one tensor. linear(rng, n, k, projection) -> (files, values)."""
        rng = random.Random(name)
        common = {"hidden_size": h, "num_hidden_layers": 1, "torch_dtype": "bfloat16", "quantization_config": quant}
        block, gate, beside, config, output = {
            "qwen3_moe": ("mlp", "mlp.gate", None, {"moe_intermediate_size": i, "num_experts": EXPERTS, "num_experts_per_tok": 2, "norm_topk_prob": True}, moe),
            "llama4_text": ("feed_forward", "feed_forward.router", "feed_forward.shared_expert.",
                            {"intermediate_size": i, "num_local_experts": EXPERTS, "num_experts_per_tok": top_k or 1, "interleave_moe_layer_step": 1},
                            partial(llama4, top_k=top_k or 1)),
            "mixtral": ("block_sparse_moe", "block_sparse_moe.gate", None, {"intermediate_size": i, "num_local_experts": EXPERTS, "num_experts_per_tok": 2}, moe),
            "granitemoe": ("block_sparse_moe", "block_sparse_moe.router.layer", None,
                           {"intermediate_size": i, "num_local_experts": EXPERTS, "num_experts_per_tok": 2}, moe),
            "gpt_oss": ("mlp", "mlp.router", None, {"intermediate_size": i, "num_local_experts": EXPERTS, "num_experts_per_tok": 2, "swiglu_limit": 7.0}, None),
            "step3": ("moe", "moe.gate", "share_expert.",
                      {"moe_intermediate_size": i, "moe_num_experts": EXPERTS, "moe_top_k": 2, "norm_expert_weight": True, "share_expert_dim": i,
                       "moe_layers_enum": "0"}, moe)}[family]
        p = "model.layers.0."
        router = matrix(rng, "BF16", EXPERTS, h)
        tensors = {p + gate + ".weight": tensor("BF16", router)}
        if family == "gpt_oss":
            dyadics = lambda n: [rng.randrange(-64, 65) / 64 for _ in range(n)]
            bias, biases = dyadics(EXPERTS), [(dyadics(i), dyadics(i), dyadics(h)) for _ in range(EXPERTS)]
            tensors[p + gate + ".bias"] = q.floats("BF16", [EXPERTS], bias)
            if storage is None:
                tensors.update({"%smlp.experts.%d.%s.bias" % (p, e, leaf): q.floats("BF16", [len(b)], b)
                                for e, x in enumerate(biases) for leaf, b in zip(("gate_proj", "up_proj", "down_proj"), x)})
            else:
                turns = [v for g, u, _ in biases for pair in zip(g, u) for v in pair]
                tensors[p + "mlp.experts.gate_up_proj_bias"] = q.floats("BF16", [EXPERTS, 2 * i], turns)
                tensors[p + "mlp.experts.down_proj_bias"] = q.floats("BF16", [EXPERTS, h], [v for _, _, d in biases for v in d])
            output = lambda x, rows, experts, shared: gpt_oss(x, rows, experts, bias, biases)
        leaves = (("gate_proj", i, h), ("up_proj", i, h), ("down_proj", h, i))
        made = [{leaf: linear(rng, n, k, leaf) for leaf, n, k in leaves} for _ in range(EXPERTS)]
        files = [{leaf: one[0] for leaf, one in expert.items()} for expert in made]
        inside = p + block + ("." if storage is separate else ".experts.")
        if storage is None:  # one by one after all
            tensors.update({"%s%d.%s%s" % (inside, e, leaf, end): t for e, x in enumerate(files) for leaf, ends in x.items() for end, t in ends.items()})
        else:
            stacked = separate(files) if storage is separate else split_weights(files, **kinds) if storage is split_weights else fused(files, ends=ends, **kinds)
            tensors.update({inside + n: t for n, t in stacked.items()})
        shared = None
        if beside:
            values = []
            for leaf, n, k in leaves:
                one, v = linear(rng, n, k, leaf)
                tensors.update({p + beside + leaf + end: t for end, t in one.items()})
                values.append(v)
            shared = tuple(values)
        folder = os.path.join(self.root, name)
        os.makedirs(folder)
        with open(os.path.join(folder, "config.json"), "w", encoding="utf-8") as f:
            json.dump(dict(common, model_type=family, **config), f)
        with open(os.path.join(folder, "model.safetensors"), "wb") as f:
            f.write(safetensors(tensors))
        experts = [tuple(x[leaf][1] for leaf, _, _ in leaves) for x in made]
        up = "up_proj" if storage is separate or kinds.get("pairs") else "gate_proj"  # whose number is in the file
        inputs = [input_scales([x[leaf] for leaf in ("gate_proj", up, "down_proj")]) for x in files]
        self._finish(name, name, os.path.join(folder, "golden.safetensors"), experts, bf16_values(router), {"quant": scheme, "tp": list(tp)},
                     shared, None, output, inputs)

    def add_gguf(self, name, kinds, h=256, i=256, tp=(), shared=None, outer=False, scheme="", together=False, single=False):
        """kinds: of gate, up and down. together: gate above up in one tensor. single: every expert by itself, as in the first files with experts. outer: a second level of scales beside the blocks, and scales of activations, as the
        converter writes them for NVFP4; or of one of the three alone."""
        rng = random.Random(name)
        router = matrix(rng, "BF16", EXPERTS, h)
        tensors, parts = {"blk.0.ffn_gate_inp.weight": tensor("BF16", router), "blk.0.attn_norm.weight": tensor("F32", [[b"\0\0\x80\x3f"] * h])}, []
        for leaf, kind, n, k in (("gate", kinds[0], i, h), ("up", kinds[1], i, h), ("down", kinds[2], h, i)):
            raw, values = b"", []
            for _ in range(EXPERTS):
                one, v = q.gguf_rows(rng, kind, n, k)
                raw += one
                values.append(v)
            tensors["blk.0.ffn_%s_exps.weight" % leaf] = (kind, [EXPERTS, n, k], raw)
            if outer is True or outer == leaf:
                values = scaled(rng, tensors, "blk.0.ffn_%s_exps" % leaf, values, k)
            parts.append(values)
        if together:
            gate, up = (tensors.pop("blk.0.ffn_%s_exps.weight" % leaf)[2] for leaf in ("gate", "up"))
            of_one = len(gate) // EXPERTS
            both = b"".join(x[e * of_one:(e + 1) * of_one] for e in range(EXPERTS) for x in (gate, up))
            tensors["blk.0.ffn_gate_up_exps.weight"] = (kinds[0], [EXPERTS, 2 * i, h], both)
        if single:
            for leaf in ("gate", "up", "down"):
                kind, (_, n, k), raw = tensors.pop("blk.0.ffn_%s_exps.weight" % leaf)
                of_one = len(raw) // EXPERTS
                tensors.update({"blk.0.ffn_%s.%d.weight" % (leaf, e): (kind, [n, k], raw[e * of_one:(e + 1) * of_one]) for e in range(EXPERTS)})
        keys = {"block_count": 1, "embedding_length": h, "expert_feed_forward_length": i, "expert_count": EXPERTS, "expert_used_count": 2}
        beside, arch = None, "qwen3moe"
        if shared:
            arch, beside = "ernie4_5-moe", []
            keys.update(expert_shared_count=1, expert_weights_norm=True)
            for leaf, n, k in (("gate", i, h), ("up", i, h), ("down", h, i)):
                raw, v = q.gguf_rows(rng, shared, n, k)
                tensors["blk.0.ffn_%s_shexp.weight" % leaf] = (shared, [n, k], raw)
                beside.append(scaled(rng, tensors, "blk.0.ffn_%s_shexp" % leaf, [v], k)[0] if outer else v)
        with open(os.path.join(self.root, name + ".gguf"), "wb") as f:
            f.write(gguf_file(metadata(arch, **keys), tensors))
        self._finish(name, name + ".gguf", os.path.join(self.root, name + ".golden.safetensors"), list(zip(*parts)), bf16_values(router),
                     {"quant": scheme, "tp": list(tp)}, beside and tuple(beside))


def scaled(rng, tensors, module, matrices, k):
    """Adds a number per matrix to the file, and multiplies the values by it."""
    numbers = [q.dyadic(rng, 1 / q.RMS_E2M1 / 1.5 / k**0.5) for _ in matrices]
    tensors[module + ".scale"] = q.floats("F32", [len(numbers)], numbers)
    tensors[module + ".input_scale"] = q.floats("F32", [len(numbers)], [0.125] * len(numbers))
    return [[[v * s for v in row] for row in m] for m, s in zip(matrices, numbers)]


def _bf16(x):
    return struct.pack("<f", x)[2:]


def compressed(form, weights, inputs=None):
    g = {"targets": ["Linear"], "weights": weights, "input_activations": inputs, "output_activations": None}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": g}, "quantization_status": "compressed",
            "ignore": ["lm_head", "re:.*mlp\\.gate$", "re:.*self_attn.*"], "kv_cache_scheme": None}


def fp8(c):
    def own_scales(**k):  # of gate and up, as exporters that know of linears only write them
        return lambda rng, n, m, leaf: q.fp8_tensor(rng, n, m, scale=q.dyadic(rng, 1 / q.RMS8 / m**0.5), scalar=False, **k)
    c.add("fp8_dynamic", {"quant_method": "fp8", "activation_scheme": "dynamic"}, one_scale(q.fp8_tensor), scheme="fp8-tensor", tp=(2, 4))
    c.add("fp8_static", {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]},
          one_scale(q.fp8_tensor, static=True), scheme="fp8-tensor", shared=64)
    c.add("fp8_own_scales", {"quant_method": "fp8"}, own_scales(), scheme="fp8-tensor", tp=(2,), shared=64)
    c.add("fp8_own_scales_static", {"quant_method": "fp8", "activation_scheme": "static"}, own_scales(static=True), scheme="fp8-tensor")
    # As transformers writes them without blocks.
    null = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": None, "scale_fmt": "float", "expert_dtype": "fp8"}
    c.add("fp8_null_block", null, plain_linear(q.inverse_names(q.fp8_tensor)), scheme="fp8-tensor", shared=64)
    c.add("fp8_null_block_static", dict(null, activation_scheme="static"), one_scale(q.inverse_names(q.fp8_tensor, static=True, scalar=False)), scheme="fp8-tensor",
          tp=(2, 4))
    for name, pairs in (("fp8_null_block_split", False), ("fp8_null_block_split_pairs", True)):
        make = plain_linear(q.fp8_tensor) if pairs else one_scale(q.fp8_tensor)
        c.add_stacked(name, null, make, scheme="fp8-tensor", storage=split_weights, numbers="column", pairs=pairs)
    c.add_stacked("fp8_null_block_split_static", dict(null, activation_scheme="static"), one_scale(q.fp8_tensor, static=True), scheme="fp8-tensor",
                  storage=split_weights, numbers="column")
    float8 = lambda strategy, **k: dict({"num_bits": 8, "type": "float", "symmetric": True, "strategy": strategy, "dynamic": False}, **k)
    token = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "token", "dynamic": True}
    c.add("ct_fp8_channel", compressed("float-quantized", float8("channel"), token), plain_linear(q.fp8_channel, dtype="BF16"), scheme="fp8-channel", tp=(2, 4))
    c.add("ct_fp8_channel_wo", compressed("naive-quantized", float8("channel")), plain_linear(q.fp8_channel), scheme="fp8-bf16")
    c.add("ct_fp8_tensor", compressed("float-quantized", float8("tensor"), float8("tensor")), one_scale(q.fp8_tensor, True, static=True, scalar=False),
          scheme="fp8-tensor")
    c.add("ct_fp8_batch_scale", compressed("float-quantized", float8("tensor"), float8("tensor", dynamic=True)), one_scale(q.fp8_tensor, scalar=False),
          scheme="fp8-tensor")
    c.add("ct_fp8_tensor_wo", compressed("float-quantized", float8("tensor")), own_scales(), scheme="fp8-bf16")
    c.add("ct_fp8_block", compressed("float-quantized", float8("block", block_structure="128x128"),
                                     dict(token, strategy="group", group_size=128)), plain_linear(q.fp8_block), h=128, i=256, scheme="fp8-block")
    # Blocks of other sizes: whole, flat, ragged in every direction, and of rows that are fused.
    blocks = lambda n, k, **more: dict({"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [n, k]}, **more)
    other = lambda *block, name=".weight_scale_inv": plain_linear(q.fp8_block, name=name, block=block)
    c.add("fp8_block_64x64", blocks(64, 64), other(64, 64), h=128, i=192, scheme="fp8-block", tp=(3,), shared=192)
    c.add("fp8_block_32x128", blocks(32, 128, scale_fmt="ue8m0"), other(32, 128), h=192, i=256, scheme="fp8-block")
    c.add("fp8_block_ragged", blocks(48, 80), other(48, 80), h=100, i=120, scheme="fp8-block", tp=(), shared=120)
    c.add_stacked("fp8_block_stacked", blocks(32, 48), other(32, 48, name=".weight_scale"), h=112, i=96, scheme="fp8-block", tp=(), ends=HF_FP8)
    c.add_stacked("fp8_block_split", blocks(40, 16), other(40, 16, name=".weight_scale"), h=104, i=160, scheme="fp8-block", tp=(2,), storage=split_weights)
    c.add("ct_fp8_block_64", compressed("float-quantized", float8("block", block_structure=[64, 32]), dict(token, strategy="group", group_size=32)),
          other(64, 32, name=".weight_scale"), h=96, i=128, scheme="fp8-block")
    c.add("ct_fp8_block_wo", compressed("float-quantized", float8("block", block_structure=[16, 64])), other(16, 64, name=".weight_scale"), h=96, i=128,
          scheme="fp8-bf16")
    c.add("ct_mxfp8", compressed("mxfp8-quantized", float8("group", group_size=32), float8("group", group_size=32, dynamic=True)),
          plain_linear(q.mxfp8), scheme="mxfp8")
    # As MiniMax-M3 is published, and as transformers holds its experts.
    mxfp8 = {"quant_method": "mxfp8", "activation_scheme": "dynamic", "fmt": "e4m3", "scale_fmt": "ue8m0", "weight_block_size": [1, 32],
             "ignored_layers": ["lm_head", "model.layers.0.mlp.gate"]}
    c.add("mxfp8", mxfp8, plain_linear(q.inverse_names(q.mxfp8)), scheme="mxfp8", shared=64)
    c.add_stacked("mxfp8_stacked", mxfp8, plain_linear(q.mxfp8), scheme="mxfp8", ends=HF_FP8)
    opt = lambda algo, **k: dict({"quant_method": "modelopt", "quant_algo": algo, "ignore": ["lm_head", "*.mlp.gate", "model.layers.*.self_attn*"]}, **k)
    c.add("modelopt_fp8", opt("FP8"), one_scale(q.fp8_tensor, static=True), scheme="fp8-tensor")
    c.add("modelopt_channel", opt("FP8_PER_CHANNEL_PER_TOKEN"), plain_linear(q.fp8_channel, column=False), scheme="fp8-channel")
    c.add("modelopt_block", opt("fp8_pb_wo"), plain_linear(q.fp8_block, four_axes=True), h=128, i=256, scheme="fp8-bf16")
    c.add("modelopt_mxfp8", opt("MXFP8"), plain_linear(q.mxfp8), scheme="mxfp8")
    side = {"producer": {"name": "modelopt", "version": "0.29"}, "quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": None, "exclude_modules": ["lm_head", "*.mlp.gate"]}}
    c.add("modelopt_side_file", None, one_scale(q.fp8_tensor, static=True), scheme="fp8-tensor", side={"hf_quant_config.json": side})


def plain_linear(make, **k):
    return lambda rng, n, m, leaf: make(rng, n, m, **k)


def one_scale(make, shared_input=False, **k):
    """gate and up with the same scale, as exporters that know of fused layers write them. shared_input: that of their one input too."""
    state = {}
    def linear(rng, n, m, leaf):
        if leaf == "gate_proj":
            state["s"] = {"scale": q.dyadic(rng, 1 / q.RMS8 / m**0.5)}
            if shared_input:
                state["s"]["input_scale"] = q.fp8_input_scale(rng)
        return make(rng, n, m, **({} if leaf == "down_proj" else state["s"]), **k)
    return linear


def input_scales(made):
    """Of w13 and w2, from the files of gate, up and down; None: computed at run time."""
    def number(files):
        for end in (".input_scale", ".input_global_scale", "_input_scale", ".activation_scale"):
            if end in files:
                x = struct.unpack("<f", files[end].data[:4])[0]
                return 1 / x if "global" in end else x
    gate, up, down = (number(files) for files in made)
    return gate and (max(gate, up), down)


def integers(c):
    int8 = lambda strategy: {"num_bits": 8, "type": "int", "symmetric": True, "strategy": strategy, "dynamic": False}
    token = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
    c.add("ct_int8", compressed("int-quantized", int8("channel"), token), plain_linear(q.int8), scheme="int8", tp=(2, 4))
    c.add("ct_int8_wo", compressed("int-quantized", int8("tensor")), plain_linear(q.int8, one_scale=True, dtype="F32"), scheme="int8-bf16")
    pack = lambda bits, group, symmetric=True, **k: dict({"num_bits": bits, "type": "int", "symmetric": symmetric, "dynamic": False,
                                                          "strategy": "channel" if group < 0 else "group", "group_size": group}, **k)
    def packed(name, bits, group, zeros=False, scheme="int4-g128", **k):
        c.add(name, compressed("pack-quantized", pack(bits, group, not zeros)), plain_linear(q.packed, bits=bits, group=group, zeros=zeros, **k),
              scheme=scheme, h=64, i=128, tp=(2,))
    packed("ct_int4", 4, 32)
    packed("ct_int4_f16_scales", 4, 32, dtype="F16")
    packed("ct_int4_channel", 4, -1)
    packed("ct_int4_zeros", 4, 32, True)
    packed("ct_int4_signed", 4, 32, signed=True)
    packed("ct_int8_packed", 8, 64, scheme="int8-bf16")
    packed("ct_int8_signed", 8, 64, scheme="int8-bf16", signed=True)
    packed("ct_int8_zeros", 8, 64, True, scheme="int8-bf16")
    c.add("ct_int4_actorder", compressed("pack-quantized", pack(4, 32, actorder="group")), ordered(q.packed, group=32), h=64, i=128,
          scheme="int4-g128", tp=(2, 4))
    c.add("ct_w4a8", compressed("pack-quantized", pack(4, 128), {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "token", "dynamic": True}),
          plain_linear(q.packed, group=128), h=128, i=256, scheme="int4-fp8", tp=())
    for group in (32, 64):
        c.add(f"ct_w4a8_g{group}", compressed("pack-quantized", pack(4, group), {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "token", "dynamic": True}),
              plain_linear(q.packed, group=group), h=128, i=192, scheme="int4-fp8", tp=())
    float8 = lambda dynamic: {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "tensor", "dynamic": dynamic}
    c.add("ct_w4a8_batch_scale", compressed("pack-quantized", pack(4, 128), float8(True)), plain_linear(q.packed, group=128), h=128, i=256,
          scheme="int4-fp8", tp=())
    c.add("ct_w4a8_static", compressed("pack-quantized", pack(4, 128), float8(False)), static_input(q.packed, group=128), h=128, i=256,
          scheme="int4-fp8", tp=())
    c.add("ct_w4afp8_static", compressed("int-quantized", pack(4, 128), float8(False)), static_input(q.byte_codes), h=128, i=256,
          scheme="int4-fp8", tp=())
    c.add("ct_w4afp8", compressed("int-quantized", pack(4, 128), {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "token", "dynamic": True}),
          plain_linear(q.byte_codes), h=128, i=256, scheme="int4-fp8", tp=())
    gptq = lambda **k: dict({"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True, "lm_head": False}, **k)
    c.add("gptq", gptq(), plain_linear(q.gptq), scheme="int4-g128", h=64, i=128, tp=(2, 4), shared=128)
    c.add("gptq_asymmetric", gptq(sym=False, checkpoint_format="gptq"), plain_linear(q.gptq, zeros=True), scheme="int4-g128")
    c.add("gptq_v2", gptq(sym=False, checkpoint_format="gptq_v2"), plain_linear(q.gptq, zeros=True, v2=True, bias=True), scheme="int4-g128")
    c.add("gptq_8bit", gptq(bits=8, group_size=-1), plain_linear(q.gptq, bits=8, group=-1), scheme="int8-bf16")
    c.add("gptq_8bit_zeros", gptq(bits=8, sym=False), plain_linear(q.gptq, bits=8, zeros=True), scheme="int8-bf16")
    c.add("gptq_desc_act", gptq(desc_act=True), ordered(q.gptq), scheme="int4-g128", h=64, i=128, tp=(2, 4))
    c.add("gptq_signed", gptq(), plain_linear(q.gptq, signed=True), scheme="int4-g128", h=64, i=128, tp=(2,))
    # Where the empty group's columns are is known from the index alone.
    c.add("gptq_desc_act_empty", gptq(desc_act=True), ordered(lambda *a, **k: q.gptq(*a, empty=True, **k)), scheme="int4-g128", h=64, i=128, tp=(2,))
    c.add("gptq_two_orders", gptq(desc_act=True, sym=False), ordered(lambda *a, **k: q.gptq(*a, zeros=True, **k), shared=False), scheme="f32", h=64, i=128,
          tp=(2, 4))
    c.add("gptq_shared_two_orders", gptq(desc_act=True), ordered(q.gptq, shared=False), scheme="f32", shared=64, tp=())
    c.add("gptq_no_index", gptq(), plain_linear(q.gptq, with_index=False), scheme="int4-g128")
    c.add("gptq_partial_group", gptq(group_size=64), plain_linear(q.gptq, group=64), scheme="int4-g128", h=96, i=64, tp=())
    c.add("gptq_side_file", None, plain_linear(q.gptq), scheme="int4-g128", side={"quantize_config.json": {"bits": 4, "group_size": 32, "desc_act": False, "sym": True}})
    c.add("gptq_dynamic", gptq(dynamic={"-:.*lm_head": {}, "-:.*self_attn.*": {}}), plain_linear(q.gptq), scheme="int4-g128")
    # As Qwen3.5 is published, with entries that change nothing and entries for other modules.
    c.add("gptq_dynamic_without_effect", gptq(dynamic={"lm_head": {}, "model.language_model.embed_tokens": {}, "-:.*attn.*": {}, "+:.*lm_head$": {"bits": 8},
                                                       "+:.*experts.*": {"bits": 4}}), plain_linear(q.gptq), scheme="int4-g128", shared=64)
    awq = lambda **k: dict({"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm", "modules_to_not_convert": ["gate"]}, **k)
    c.add("awq", awq(), plain_linear(q.awq), scheme="int4-g128", tp=(2,), shared=64)
    c.add("awq_signed", awq(), plain_linear(q.awq, signed=True), scheme="int4-g128", tp=(2,))
    rounded = {"quant_method": "auto-round", "packing_format": "auto_round:auto_gptq", "bits": 4, "group_size": 32, "data_type": "int", "sym": True,
               "block_name_to_quantize": "model.layers", "autoround_version": "0.9",
               "extra_config": {"lm_head": {"bits": 16, "data_type": "fp"}, "model.layers.0.mlp.gate": {"bits": 16}, ".*self_attn.*": {"bits": 8}}}
    c.add("auto_round", rounded, plain_linear(q.gptq, signed=True), scheme="int4-g128", shared=64)
    # As AutoRound and GPTQModel write them: zero points that say nothing.
    c.add("awq_symmetric", awq(zero_point=False), plain_linear(q.awq, zeros=False), scheme="int4-g128", tp=(2,))
    c.add("awq_old", None, plain_linear(q.awq), scheme="int4-g128", tp=(2,),
          side={"quant_config.json": {"w_bit": 4, "q_group_size": 32, "zero_point": True, "version": "GEMM"}})


def static_input(make, **k):
    """A linear with a stored scale of its input, which gate and up share."""
    state = {}
    def linear(rng, n, m, leaf):
        if leaf != "up_proj":
            state["x"] = q.fp8_input_scale(rng)
        files, values = make(rng, n, m, **k)
        return dict(files, **{".input_scale": q.floats("F32", [1], [state["x"]])}), values
    return linear


def ordered(make, group=32, shared=True):
    """Act-order: one random index per input, which gate and up share, or one of each."""
    state = {}
    def linear(rng, n, k, leaf):
        if leaf != "up_proj" or not shared:
            state["index"] = q.group_index(rng, k, group, True)
        return make(rng, n, k, group=group, index=state["index"])
    return linear


def fp4(c):
    f4 = lambda group, **k: dict({"num_bits": 4, "type": "float", "symmetric": True, "strategy": "tensor_group" if group == 16 else "group",
                                  "group_size": group, "dynamic": False}, **k)
    def nvfp4(name, quant, scheme, **k):
        state = {}
        def linear(rng, n, m, leaf):
            if leaf == "gate_proj":
                state["g"] = {"global_scale": 2.0**-(5 + rng.randrange(2))}
                if k.get("compressed", True):
                    state["g"]["input_scale"] = q.nvfp4_input_scale(rng)
            return q.nvfp4(rng, n, m, **({} if leaf == "down_proj" else state["g"]), **k)
        c.add(name, quant, linear, scheme=scheme, tp=(2, 4))
    nvfp4("ct_nvfp4", compressed("nvfp4-pack-quantized", f4(16), f4(16, dynamic="local")), "nvfp4")
    nvfp4("ct_nvfp4_wo", compressed("nvfp4-pack-quantized", f4(16)), "nvfp4-bf16", static=False)
    c.add("ct_nvfp4_scales_differ", compressed("nvfp4-pack-quantized", f4(16), f4(16, dynamic="local")),
          lambda rng, n, m, leaf: q.nvfp4(rng, n, m, global_scale=2.0**-6 * rng.choice([1, 2]), input_scale=2.0**-7), scheme="nvfp4", tp=(2,), shared=64)
    nvfp4("modelopt_nvfp4", {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16, "ignore": ["lm_head", "model.layers.0.mlp.gate"]}, "nvfp4",
          compressed=False)
    mixed_precision(c, nvfp4)
    nvfp4("modelopt_nvfp4_wo", {"quant_method": "modelopt_fp4", "quant_algo": "W4A16_NVFP4"}, "nvfp4-bf16", compressed=False, static=False)
    c.add("ct_mxfp4_wo", compressed("mxfp4-pack-quantized", f4(32)), plain_linear(q.mxfp4), scheme="mxfp4-bf16", tp=(2,))
    c.add("ct_mxfp4_fp8", compressed("mxfp4-pack-quantized", f4(32), dict(f4(128, dynamic=True), num_bits=8)), plain_linear(q.mxfp4), h=128, i=256,
          scheme="mxfp4-fp8", tp=(2,))
    opt = {"quant_method": "modelopt", "quant_algo": "W4A8_MXFP4_FP8", "group_size": 32, "ignore": ["lm_head", "model.layers.0.mlp.gate"]}
    c.add("modelopt_mxfp4_fp8", opt, plain_linear(q.mxfp4, compressed=False), scheme="mxfp4-fp8", tp=(2,))
    c.add("modelopt_mxfp4_fp8_dynamic", opt, plain_linear(q.mxfp4, compressed=False, static=False), scheme="mxfp4-fp8", tp=(2,), shared=64)
    c.add("ct_mxfp4", compressed("mxfp4-pack-quantized", f4(32), f4(32, dynamic=True)), plain_linear(q.mxfp4), scheme="mxfp4", tp=(2,))


def mixed_precision(c, nvfp4):
    """ModelOpt's algorithm of each linear, or of all experts, in config.json or beside it."""
    mlp, leaves = "model.layers.0.mlp.", ("gate_proj", "up_proj", "down_proj")
    attention = lambda algo: {"model.layers.0.self_attn.%s_proj" % x: algo for x in "qo"}
    layers = attention({"quant_algo": "NVFP4"})
    layers.update({"%sexperts.%d.%s" % (mlp, e, leaf): {"quant_algo": "NVFP4", "group_size": 16} for e in range(EXPERTS) for leaf in leaves})
    mixed = lambda lists, **k: dict({"quant_algo": "MIXED_PRECISION", "quantized_layers": lists}, **k)
    nvfp4("modelopt_mixed", mixed(layers, quant_method="modelopt", ignore=["lm_head", "mtp*"], config_groups={}), "nvfp4", compressed=False)
    seen = []
    def experts_then_shared(rng, n, m, leaf):
        seen.append(leaf)
        if len(seen) <= len(leaves) * EXPERTS:
            return q.nvfp4(rng, n, m, compressed=False, static=False, global_scale=2.0**-5)
        return q.fp8_block(rng, n, m, four_axes=True, block=(32, 32))
    blocks = {"quant_algo": "FP8_PB_WO", "group_size": 32}
    beside = dict(attention(blocks), **{mlp + "experts": {"quant_algo": "W4A16_NVFP4", "group_size": 16}})
    beside.update({mlp + "shared_experts." + leaf: blocks for leaf in leaves})
    c.add("modelopt_mixed_shared", None, experts_then_shared, scheme="nvfp4-bf16", shared=64,
          side={"hf_quant_config.json": {"producer": {"name": "modelopt"}, "quantization": mixed(beside, kv_cache_quant_algo="FP8", exclude_modules=["mtp*"])}})


def bitsandbytes(c):
    four = lambda **k: dict({"quant_method": "bitsandbytes", "load_in_4bit": True, "load_in_8bit": False, "bnb_4bit_quant_type": "nf4",
                             "bnb_4bit_use_double_quant": False, "bnb_4bit_compute_dtype": "bfloat16", "bnb_4bit_quant_storage": "uint8",
                             "llm_int8_skip_modules": ["gate", "lm_head"]}, **k)
    c.add("bnb_nf4", four(), plain_linear(q.bnb4), scheme="nf4-bf16", h=64, i=128, tp=(2,), shared=128)
    c.add("bnb_nf4_nested", four(bnb_4bit_use_double_quant=True), plain_linear(q.bnb4, nested=True), scheme="nf4-bf16", h=64, i=128, tp=(2,))
    c.add("bnb_nf4_nested_below", four(bnb_4bit_use_double_quant=True), plain_linear(q.bnb4, nested=True, below=True), scheme="nf4-bf16", tp=())
    c.add("bnb_fp4", four(bnb_4bit_quant_type="fp4"), plain_linear(q.bnb4, table="fp4"), scheme="nf4-bf16", tp=())
    c.add("bnb_nf4_blocks_of_128", four(), plain_linear(q.bnb4, block=128), scheme="nf4-bf16", h=128, i=128, tp=())
    c.add("bnb_int8", {"quant_method": "bitsandbytes", "load_in_8bit": True, "load_in_4bit": False}, plain_linear(q.bnb8), scheme="int8-bf16", tp=(2, 4))


def stacked(c):
    """Every format that may hold all experts in one tensor, in every storage it may have."""
    opt = lambda algo: {"quant_method": "modelopt", "quant_algo": algo, "ignore": ["lm_head", "*.gate", "*.router"]}
    float8 = lambda strategy, **k: dict({"num_bits": 8, "type": "float", "symmetric": True, "strategy": strategy, "dynamic": False}, **k)
    token = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "token", "dynamic": True}
    channel = compressed("float-quantized", float8("channel"), token)
    channel["ignore"].append("re:.*router$")
    int8 = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel", "dynamic": False}
    constant = lambda rng, n, m, leaf: q.fp8_tensor(rng, n, m, scale=2.0**-10)
    c.add_stacked("stacked_fp8_static", {"quant_method": "fp8", "activation_scheme": "static"}, one_scale(q.fp8_tensor, static=True),
                  scheme="fp8-tensor", ends=HF_FP8, numbers="column", tp=(2, 4))
    c.add_stacked("stacked_fp8_dynamic", {"quant_method": "fp8", "activation_scheme": "dynamic"}, one_scale(q.fp8_tensor), scheme="fp8-tensor", ends=HF_FP8)
    c.add_stacked("stacked_fp8_channel", channel, plain_linear(q.fp8_channel, dtype="BF16"), scheme="fp8-channel")
    c.add_stacked("stacked_fp8_channel_weight", channel, plain_linear(q.fp8_channel), scheme="fp8-channel", ends={e: e for e in FUSED})
    c.add_stacked("stacked_int8", compressed("int-quantized", int8, dict(int8, strategy="token", dynamic=True)), plain_linear(q.int8), scheme="int8", tp=(2, 4))
    c.add_stacked("stacked_mxfp8", opt("MXFP8"), plain_linear(q.mxfp8), scheme="mxfp8")
    fp4 = lambda scale: lambda rng, n, m, leaf: q.nvfp4(rng, n, m, compressed=False, global_scale=scale(rng, leaf))
    state = {}
    def same(rng, leaf):
        if leaf != "up_proj":
            state["g"] = 2.0**-(5 + rng.randrange(2))
        return state["g"]
    c.add_stacked("stacked_nvfp4", opt("NVFP4"), fp4(same), scheme="nvfp4", tp=(2, 4))
    c.add_stacked("stacked_nvfp4_pairs", opt("NVFP4"), fp4(lambda rng, leaf: 2.0**-6 * rng.choice([1, 2])), scheme="nvfp4", pairs=True)
    wo = lambda scale: lambda rng, n, m, leaf: q.nvfp4(rng, n, m, compressed=False, static=False, global_scale=scale)
    l4 = {"family": "llama4_text", "transpose": True}
    c.add_stacked("llama4_fp8_tensor", dict(opt("FP8")), one_scale(q.fp8_tensor, static=True), scheme="fp8-tensor", tp=(2, 4), **l4)
    c.add_stacked("llama4_top_2", dict(opt("FP8")), one_scale(q.fp8_tensor, static=True), scheme="fp8-tensor", tp=(2, 4), top_k=2, **l4)
    oss = {"family": "gpt_oss", "transpose": True, "turns": True}
    c.add_stacked("gpt_oss_fp8", dict(opt("FP8")), one_scale(q.fp8_tensor, static=True), scheme="fp8-tensor", tp=(2, 4), i=32, **oss)
    c.add_stacked("gpt_oss_fp8_one_number", dict(opt("FP8")), lambda rng, n, m, leaf: q.fp8_tensor(rng, n, m, scale=2.0**-10, static=True, input_scale=2.0**-4),
                  scheme="fp8-tensor", numbers="all", i=96, **oss)
    c.add_stacked("gpt_oss_nvfp4", opt("NVFP4"), fp4(same), scheme="nvfp4", h=96, tp=(2, 4), **oss)
    c.add_stacked("gpt_oss_fp8_channel", channel, plain_linear(q.fp8_channel), scheme="fp8-channel", i=32, **oss)
    c.add_stacked("llama4_fp8_one_number", {"quant_method": "fp8", "ignored_layers": ["router"]}, constant, scheme="fp8-tensor", ends=HF_FP8, numbers="all", **l4)
    c.add_stacked("llama4_fp8_channel", channel, plain_linear(q.fp8_channel), scheme="fp8-channel", i=32, **l4)
    c.add_stacked("llama4_nvfp4", opt("W4A16_NVFP4"), wo(2.0**-6), scheme="nvfp4-bf16", numbers="all", h=96, tp=(2, 4), **l4)
    c.add_stacked("llama4_per_expert", compressed("pack-quantized", {"num_bits": 4, "type": "int", "symmetric": True, "dynamic": False, "strategy": "group",
                                                                     "group_size": 32}) | {"ignore": ["re:.*router"]},
                  plain_linear(q.packed), family="llama4_text", scheme="int4-g128", storage=None)
    # Split by quantisers of transformers' modules, under names that the families' own files do not have.
    for family in ("mixtral", "granitemoe", "gpt_oss"):
        c.add_stacked(family + "_split", channel, plain_linear(q.fp8_channel), family=family, scheme="fp8-channel", i=32, storage=None)
    c.add_stacked("gpt_oss_split_gptq", {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True}, plain_linear(q.gptq),
                  family="gpt_oss", scheme="int4-g128", storage=None)
    c.add_stacked("step3_fp8_channel", channel, plain_linear(q.fp8_channel), family="step3", scheme="fp8-channel", storage=separate)
    c.add_stacked("step3_nvfp4", opt("NVFP4"), fp4(lambda rng, leaf: 2.0**-6 * rng.choice([1, 2])), family="step3", scheme="nvfp4", storage=separate)


def gguf(c):
    c.add_gguf("gguf_q4_0", ("Q4_0",) * 3, h=64, i=64, tp=(2,))
    c.add_gguf("gguf_q8_0", ("Q8_0",) * 3, h=64, i=64, tp=(2,), shared="Q8_0")
    c.add_gguf("gguf_q4_k", ("Q4_K",) * 3, i=256)
    c.add_gguf("gguf_q4_0_together", ("Q4_0",) * 3, h=64, i=64, tp=(2,), together=True)
    c.add_gguf("gguf_q4_k_m_together", ("Q4_K", "Q4_K", "Q6_K"), i=256, together=True)
    c.add_gguf("gguf_q8_0_single", ("Q8_0",) * 3, h=64, i=64, tp=(2,), single=True, shared="Q8_0")
    c.add_gguf("gguf_q4_k_m_single", ("Q4_K", "Q4_K", "Q6_K"), i=256, single=True)
    c.add_gguf("gguf_q6_k", ("Q6_K",) * 3, i=256)
    c.add_gguf("gguf_q6_k_outer", ("Q6_K",) * 3, i=256, outer=True)
    c.add_gguf("gguf_q4_k_m", ("Q4_K", "Q4_K", "Q6_K"), i=256, shared="Q6_K")
    c.add_gguf("gguf_q3_k", ("Q3_K",) * 3, i=256)
    c.add_gguf("gguf_q3_k_m", ("Q3_K", "Q3_K", "Q5_1"), i=64, tp=(2,))
    c.add_gguf("gguf_q5_1", ("Q5_1",) * 3, h=64, i=64, tp=(2,), shared="Q5_1")
    c.add_gguf("gguf_iq4", ("IQ4_XS", "IQ4_XS", "IQ4_NL"), i=64, tp=(2,))  # one table
    c.add_gguf("gguf_iq4_xs", ("IQ4_XS",) * 3, i=256)
    c.add_gguf("gguf_iq4_shared", ("IQ4_NL",) * 3, h=64, i=64, tp=(2,), shared="IQ4_NL")
    c.add_gguf("gguf_iq4_slices", ("IQ4_NL", "IQ4_NL", "IQ4_XS"), h=64, i=512, tp=(2,))
    c.add_gguf("gguf_iq4_q3_k", ("IQ4_NL", "Q5_1", "Q3_K"), h=64, i=512, tp=(2,))
    c.add_gguf("gguf_tq2_0", ("TQ2_0",) * 3, i=256)
    c.add_gguf("gguf_ternary", ("TQ1_0", "TQ2_0", "Q8_0"), i=64, tp=(2,))
    c.add_gguf("gguf_ternary_slices", ("IQ4_NL", "Q8_0", "TQ1_0"), h=64, i=512, tp=(2,))
    c.add_gguf("gguf_nvfp4", ("NVFP4",) * 3, h=64, i=128, tp=(2,), outer=True, shared="NVFP4", scheme="nvfp4-bf16")
    c.add_gguf("gguf_nvfp4_up", ("NVFP4",) * 3, h=64, i=128, tp=(2,), outer="up", scheme="nvfp4-bf16")
    c.add_gguf("gguf_nvfp4_plain", ("NVFP4",) * 3, h=64, i=128, tp=(2,), scheme="nvfp4-bf16")
    c.add_gguf("gguf_mxfp4", ("MXFP4",) * 3, h=64, i=64, tp=(2,), shared="MXFP4", scheme="mxfp4-bf16")
    c.add_gguf("gguf_mxfp4_uneven", ("MXFP4",) * 3, h=64, i=96, tp=(2,), scheme="mxfp4-bf16")
    c.add_gguf("gguf_mxfp4_q8_0", ("MXFP4", "MXFP4", "Q8_0"), h=64, i=64, tp=(2,), shared="MXFP4")
    c.add_gguf("gguf_mixed", ("Q4_0", "Q8_0", "Q8_0"), h=64, i=64, tp=(2,))


def main():
    if len(sys.argv) != 2:
        sys.exit("usage: make_quant_checkpoints.py FOLDER")
    os.makedirs(sys.argv[1], exist_ok=True)
    cases = Cases(sys.argv[1])
    for part in (fp8, integers, fp4, bitsandbytes, stacked, gguf):
        part(cases)
    with open(os.path.join(sys.argv[1], "manifest.json"), "w", encoding="utf-8") as f:
        json.dump(cases.manifest, f, indent=1)
    print("%d checkpoints" % len(cases.manifest))


if __name__ == "__main__":
    main()
