"""Malformed and unsupported quantisation of experts that are stored as one tensor of all."""

import json
import random

import quant_model as q
from bad_quant_parts import CORRUPT, MISSING, UNSUPPORTED, SHAPE, EXPERTS, P, NAN, INF, base, ct, floats8, ints, BNB, OPT
from stacked_model import HF_FP8, fused
from tiny_model import Tensor, matrix, safetensors, tensor


def stacked(c):
    """Experts in one tensor: [2, 2 * 64, 64] and [2, 64, 64], transposed for Llama 4."""
    FUSED = "model.layers.0.mlp.experts."
    def layer(name, quant, make, spoil, code, keywords, family="qwen3_moe", **kinds):
        rng = random.Random(name)
        files = [{leaf: make(rng, 64, 64)[0] for leaf in ("gate_proj", "up_proj", "down_proj")} for _ in range(EXPERTS)]
        prefix, config = FUSED, base(64, 64)
        t = {P + "gate.weight": tensor("BF16", matrix(rng, "BF16", EXPERTS, 64))}
        if family == "llama4_text":
            prefix = "model.layers.0.feed_forward.experts."
            config = dict(config, model_type=family, num_local_experts=EXPERTS, intermediate_size=64, interleave_moe_layer_step=1)
            t = {"model.layers.0.feed_forward.router.weight": t.pop(P + "gate.weight")}
            for leaf in ("gate_proj", "up_proj", "down_proj"):
                t["model.layers.0.feed_forward.shared_expert.%s.weight" % leaf] = tensor("BF16", matrix(rng, "BF16", 64, 64))
        t.update({prefix + n: x for n, x in fused(files, **kinds).items()})
        spoil(t, prefix)
        c.folder("stacked_" + name, {"config.json": json.dumps(dict(config, quantization_config=quant)), "model.safetensors": safetensors(t)}, code, keywords,
                 door="layer")

    def poke(end, at, raw):
        def spoil(t, prefix):
            x = t[prefix + end]
            t[prefix + end] = Tensor(x.dtype, x.shape, x.data[:at] + raw + x.data[at + len(raw):])
        return spoil
    def shape(end, dims):
        def spoil(t, prefix):
            x = t[prefix + end]
            size = len(x.data)
            for d in x.shape:
                size //= d
            n = size
            for d in dims:
                n *= d
            t[prefix + end] = Tensor(x.dtype, dims, (x.data * (n // len(x.data) + 1))[:n])
        return spoil
    gone = lambda end: lambda t, prefix: t.pop(prefix + end)
    good = lambda t, prefix: None
    s8 = dict({"quant_method": "fp8", "activation_scheme": "static"})
    tensor8 = lambda rng, n, k: q.fp8_tensor(rng, n, k, static=True)
    a = lambda name, spoil, code, keys: layer("fp8_" + name, s8, tensor8, spoil, code, keys, ends=HF_FP8, numbers="column")
    a("good", good, "ok", [])
    a("no_scale", gone("gate_up_proj_scale_inv"), MISSING, ["gate_up_proj_scale_inv"])
    a("no_activation_scale", gone("down_proj_activation_scale"), MISSING, ["down_proj_activation_scale"])
    a("scale_expert_more", shape("gate_up_proj_scale_inv", [3, 1, 1]), SHAPE, ["gate_up_proj_scale_inv", "[3, 1, 1]", "[2]"])
    a("scale_pair_of_down", shape("down_proj_scale_inv", [2, 2]), SHAPE, ["down_proj_scale_inv", "[2, 2]"])
    a("scale_nan", poke("gate_up_proj_scale_inv", 4, NAN), CORRUPT, ["gate_up_proj_scale_inv", "nan", "expert 1"])
    a("activation_scale_zero", poke("gate_up_proj_activation_scale", 4, bytes(4)), CORRUPT, ["gate_up_proj_activation_scale", "0"])
    a("weight_nan", poke("down_proj", 64 * 64 + 7, b"\xff"), CORRUPT, ["down_proj", "expert 1"])
    a("weight_expert_less", shape("gate_up_proj", [1, 128, 64]), SHAPE, ["gate_up_proj", "[1, 128, 64]", "[2, 128, 64]"])
    a("weight_half", shape("gate_up_proj", [2, 64, 64]), SHAPE, ["gate_up_proj", "[2, 64, 64]"])
    a("extra_scale", lambda t, p: t.update({p + "gate_up_proj_weight_scale": t[p + "gate_up_proj_scale_inv"]}), UNSUPPORTED, ["not recognised", "gate_up_proj_weight_scale"])
    rows = ct("float-quantized", floats8(), floats8("token", dynamic=True))
    b = lambda name, spoil, code, keys: layer("channel_" + name, rows, lambda rng, n, k: q.fp8_channel(rng, n, k), spoil, code, keys)
    b("good", good, "ok", [])
    b("row_less", shape("gate_up_proj_weight_scale", [2, 127, 1]), SHAPE, ["gate_up_proj_weight_scale", "[2, 127, 1]", "[2, 128, 1]"])
    b("along_columns", shape("gate_up_proj_weight_scale", [2, 1, 64]), SHAPE, ["gate_up_proj_weight_scale", "[2, 1, 64]"])
    b("negative", poke("down_proj_weight_scale", 4 * 70 + 3, b"\xbf"), CORRUPT, ["down_proj_weight_scale", "[6, 0]", "expert 1"])
    f4 = lambda rng, n, k: q.nvfp4(rng, n, k, compressed=False)
    d = lambda name, spoil, code, keys, **k: layer("nvfp4_" + name, OPT, f4, spoil, code, keys, **k)
    d("good", good, "ok", [])
    d("pairs_good", good, "ok", [], pairs=True)
    d("no_global", gone("down_proj_weight_scale_2"), MISSING, ["down_proj_weight_scale_2"])
    d("global_triple", shape("gate_up_proj_weight_scale_2", [2, 3]), SHAPE, ["gate_up_proj_weight_scale_2", "[2, 3]"])
    d("global_infinite", poke("down_proj_weight_scale_2", 4, INF), CORRUPT, ["down_proj_weight_scale_2", "inf", "expert 1"])
    d("codes_unpacked", shape("down_proj", [2, 64, 64]), SHAPE, ["down_proj", "[2, 64, 64]", "[2, 64, 32]"])
    d("scale_nan", poke("gate_up_proj_weight_scale", 5, b"\x7f"), CORRUPT, ["gate_up_proj_weight_scale"])
    e = lambda name, spoil, code, keys, quant=OPT, make=f4: layer("transposed_" + name, dict(quant, ignore=["*.shared_expert.*"]), make, spoil, code, keys,
                                                                  family="llama4_text", transpose=True)
    e("good", good, "ok", [])
    e("row_major", shape("gate_up_proj", [2, 128, 32]), SHAPE, ["gate_up_proj", "[2, 128, 32]", "[2, 32, 128]"])
    e("scale_row_major", shape("gate_up_proj_weight_scale", [2, 128, 4]), SHAPE, ["gate_up_proj_weight_scale", "[2, 128, 4]", "[2, 4, 128]"])
    e("scale_nan", poke("gate_up_proj_weight_scale", 4 * 128 + 9, b"\xff"), CORRUPT, ["gate_up_proj_weight_scale", "expert 1"])
    e("mxfp8", good, UNSUPPORTED, ["mxfp8", "Llama 4", "fused", "axis"], dict(OPT, quant_algo="MXFP8"), lambda rng, n, k: q.mxfp8(rng, n, k))

    # Plain experts of a model whose linears are quantised, which they are none of
    plain = lambda rng, n, k: ({".weight": tensor("BF16", matrix(rng, "BF16", n, k))},)
    p = lambda name, quant, code, keys, spoil=good, make=plain, **k: layer("plain_" + name, quant, make, spoil, code, keys, **k)
    by_name = ct("float-quantized", None, config_groups={"g": {"targets": ["re:.*experts.*"], "weights": floats8()}})
    put = lambda name, x: lambda t, prefix: t.update({prefix + name: x})
    eight = {"quant_method": "bitsandbytes", "load_in_8bit": True}
    p("bnb4", BNB, "ok", [])
    p("bnb8", dict(eight, llm_int8_skip_modules=None), "ok", [])
    p("bnb_transposed", dict(BNB, llm_int8_skip_modules=["shared_expert"]), "ok", [], family="llama4_text", transpose=True)
    p("class", rows, "ok", [])
    p("packed", ct("pack-quantized", ints()), "ok", [])
    p("by_name", by_name, MISSING, ["gate_up_proj_weight_scale"])
    p("fp8", {"quant_method": "fp8"}, MISSING, ["gate_up_proj_scale_inv"])
    p("one_scale", rows, MISSING, ["gate_up_proj_weight_scale"], put("down_proj_weight_scale", Tensor("F32", [2, 64, 1], bytes(512))))
    p("state", BNB, UNSUPPORTED, ["bitsandbytes", "fused"], put("down_proj.absmax", Tensor("F32", [2], bytes(8))))
    p("half", rows, MISSING, ["gate_up_proj_weight_scale", "down_proj_weight_scale"], lambda t, prefix: t.update({prefix + "down_proj": Tensor("F8_E4M3", [2, 64, 64], bytes(8192))}))
