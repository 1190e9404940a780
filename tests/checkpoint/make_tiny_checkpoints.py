#!/usr/bin/env python3
"""Writes one tiny checkpoint per family and storage below FOLDER, and FOLDER/manifest.json: for each its MoE
layers, what the configuration must be read as, and the file of expected canonical tensors."""

import json
import os
import random
import sys

from gguf_architectures import gguf_architectures
from gguf_file import I32, U16, U32, metadata
from gguf_model import gguf_file, layer_tensors
from tiny_model import Layer, Mxfp4Layer, safetensors, tensor, matrix, write_model

FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}


class Cases:
    def __init__(self, root):
        self.root, self.manifest = root, []

    def add(self, name, config, layers, spec, prefix="model.layers.%d.mlp", extra=None, shards=1, common="model."):
        """layers: {index: Layer}; spec: what must be read from the configuration."""
        rng = random.Random(name)
        tensors = {common + "norm.weight": tensor("BF16", matrix(rng, "BF16", 1, 8))}
        for i, layer in layers.items():
            tensors.update(layer.named(prefix % i))
        tensors.update(extra or {})
        write_model(os.path.join(self.root, name), config, tensors, rng, shards)
        self._finish(name, name, layers, prefix, spec)

    def add_gguf(self, name, metadata, layers, spec, parts=1, alignment=32, extra=None):
        """The same in GGUF; with `parts` the tensors are dealt out to so many files."""
        tensors = {"token_embd.weight": tensor("F16", [[b"\0\0"] * 8])}
        tensors.update(extra or {})
        for i, layer in layers.items():
            tensors.update(layer_tensors(layer, i))
        path = name + ".gguf"
        items = list(tensors.items())
        for part in range(parts):
            head = list(metadata) if part == 0 else []
            if parts > 1:
                path = name + "-00001-of-%05d.gguf" % parts
                head += [("split.no", U16, part), ("split.count", U16, parts), ("split.tensors.count", I32, len(items))]
            if alignment != 32:
                head.append(("general.alignment", U32, alignment))
            with open(os.path.join(self.root, path.replace("-00001-of", "-%05d-of" % (part + 1))), "wb") as f:
                f.write(gguf_file(head, dict(items[part::parts]), alignment))
        self._finish(name, path, layers, "blk.%d", spec)

    def _finish(self, name, path, layers, prefix, spec):
        expected = {"%d.%s" % (i, n): t for i, layer in layers.items() for n, t in layer.expected.items()}
        with open(os.path.join(self.root, name + ".expected.safetensors"), "wb") as f:
            f.write(safetensors(expected))
        self.manifest.append({"name": name, "path": path, "layers": sorted(layers), "prefix": prefix, "spec": spec})


def qwen3(**more):
    return dict({"model_type": "qwen3_moe", "hidden_size": 16, "moe_intermediate_size": 8, "intermediate_size": 40,
                 "num_hidden_layers": 2, "num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": True,
                 "hidden_act": "silu", "dtype": "bfloat16"}, **more)


def unsaid(**more):
    """For families that have no norm_topk_prob."""
    return {k: v for k, v in qwen3(**more).items() if k != "norm_topk_prob"}


def deepseek(model_type="deepseek_v3", h=16, i=8, **more):
    return dict({"model_type": model_type, "hidden_size": h, "moe_intermediate_size": i, "intermediate_size": 40,
                 "num_hidden_layers": 3, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1,
                 "n_shared_experts": 2, "first_k_dense_replace": 1, "torch_dtype": "bfloat16"}, **more)


def flat_moe(model_type, h=16, i=8, **more):
    return dict({"model_type": model_type, "hidden_size": h, "intermediate_size": i, "num_hidden_layers": 2,
                 "num_local_experts": 4, "num_experts_per_tok": 2, "torch_dtype": "bfloat16"}, **more)


def deepseek_layer(seed, h=16, i=8, s=16, storage="per_expert", bias="F32", **kinds):
    rng = random.Random(seed)
    shared_dtype = kinds.pop("shared_dtype", None)
    layer = Layer(rng, 4, h, i, **kinds)
    getattr(layer, storage)()
    layer.router().shared(rng, "shared_experts", s, shared_dtype)
    if bias:
        layer.correction_bias(rng, "gate.e_score_correction_bias", bias)
    return layer


def mixtral(c):
    spec = {"routing": "topk", "scoring": "softmax", "renormalize": True, "scale": 1.0}
    sizes = {"h": 16, "i": 8}
    new = lambda seed: Layer(random.Random(seed), 4, **sizes).router()
    both = {0: 1, 1: 2}
    bsm = "model.layers.%d.block_sparse_moe"
    c.add("mixtral", flat_moe("mixtral"), {i: new(s).w123() for i, s in both.items()}, spec, bsm)
    c.add("mixtral_fused", flat_moe("mixtral"), {i: new(s).fused_nt() for i, s in both.items()}, spec)
    c.add("mixtral_fused_weight", flat_moe("mixtral"), {i: new(s).fused_nt(".weight") for i, s in both.items()}, spec)
    c.add("mixtral_fused_block", flat_moe("mixtral"), {i: new(s).fused_nt() for i, s in both.items()}, spec, bsm)
    # 2I == H: the shapes of fused-NT and fused-NN coincide, only the family tells them apart.
    square = lambda seed: Layer(random.Random(seed), 4, 16, 8).router()
    c.add("mixtral_square", flat_moe("mixtral"), {0: square(3).fused_nt(), 1: square(4).w123()}, spec,
          "model.layers.%d.block_sparse_moe")


def qwen(c):
    spec = {"routing": "topk", "scoring": "softmax", "renormalize": True, "scale": 1.0}
    layer = lambda seed, **k: Layer(random.Random(seed), 4, 16, 8, **k).per_expert().router()
    c.add("qwen3_moe", qwen3(), {0: layer(1), 1: layer(2)}, spec, shards=3)
    mixed = lambda *picks: Layer(random.Random(11), 4, 16, 8).mixed(random.Random(12), picks).router()
    c.add("qwen3_moe_mixed", qwen3(num_hidden_layers=3),
          {0: mixed((2, "up", "F32")), 1: mixed((0, "gate", "F16")), 2: mixed((3, "down", "F16"), (1, "down", "F32"))}, dict(spec, quant="f32"))
    c.add("qwen3_moe_fused", qwen3(), {0: Layer(random.Random(1), 4, 16, 8).fused_nt().router(),
                                       1: Layer(random.Random(2), 4, 16, 8).fused_nt().router()}, spec)
    c.add("qwen3_moe_step", qwen3(num_hidden_layers=6, decoder_sparse_step=2, mlp_only_layers=[3]),
          {1: layer(1), 5: layer(2)}, spec)
    alias = qwen3(num_hidden_layers=1, num_local_experts=4)
    del alias["num_experts"], alias["dtype"], alias["norm_topk_prob"]
    no_renorm = dict(spec, renormalize=False)
    c.add("qwen3_moe_f32", alias, {0: layer(1, dtype="F32", gate_dtype="F32")}, dict(no_renorm, quant="f32", activation_dtype="F32"))
    c.add("qwen3_moe_f16", dict(alias, dtype="float16"), {0: layer(1, dtype="F16", gate_dtype="F16")},
          dict(no_renorm, quant="f16", activation_dtype="F16"))
    rng = random.Random(5)
    shared = lambda storage: getattr(Layer(random.Random(9), 4, 16, 8), storage)().router().shared(
        random.Random(8), "shared_expert", 24, gate="shared_expert_gate.weight")
    q2 = qwen3(model_type="qwen2_moe", num_hidden_layers=1, shared_expert_intermediate_size=24, norm_topk_prob=False)
    q2_spec = dict(no_renorm, shared=24, shared_gated=True)
    c.add("qwen2_moe", q2, {0: shared("per_expert")}, q2_spec)
    c.add("qwen2_moe_fused", q2, {0: shared("fused_nt")}, q2_spec)
    olmoe = qwen3(model_type="olmoe", num_hidden_layers=1, intermediate_size=8)
    del olmoe["moe_intermediate_size"], olmoe["norm_topk_prob"]
    c.add("olmoe", olmoe, {0: layer(7)}, no_renorm)


def deepseeks(c):
    v3 = {"routing": "grouped_topk", "scoring": "sigmoid", "renormalize": True, "scale": 2.5, "bias": True, "groups": [2, 1], "shared": 16}
    both = lambda **k: {1: deepseek_layer(1, **k), 2: deepseek_layer(2, **k)}
    dense = {"model.layers.0.mlp.%s.weight" % p: tensor("BF16", matrix(random.Random(3), "BF16", 2, 2)) for p in ("gate_proj", "up_proj", "down_proj")}
    mtp = deepseek_layer(77).named("model.layers.3.mlp")  # a prediction layer behind the last one: skipped
    c.add("deepseek_v3", deepseek(num_nextn_predict_layers=1), both(), v3, extra=dict(dense, **mtp), shards=2)
    c.add("deepseek_v3_fused", deepseek(), both(storage="fused_nt"), v3, extra=dense)
    c.add("deepseek_v3_bf16_bias", deepseek(model_type="deepseek_v32"), both(bias="BF16"), v3)
    v2 = {"routing": "topk", "scoring": "softmax", "renormalize": False, "scale": 16.0, "groups": [1, 1], "shared": 16}
    c.add("deepseek_v2", deepseek("deepseek_v2", topk_method="greedy", routed_scaling_factor=16), both(bias=None), v2)
    c.add("deepseek_v2_grouped", deepseek("deepseek_v2", topk_method="group_limited_greedy", routed_scaling_factor=16.0, moe_layer_freq=2),
          {2: deepseek_layer(2, bias=None)}, dict(v2, routing="grouped_topk", groups=[2, 1]))
    c.add("deepseek_v2_no_shared", deepseek("deepseek_v2", n_shared_experts=None, num_hidden_layers=2),
          {1: Layer(random.Random(6), 4, 16, 8).per_expert().router()}, dict(v2, shared=0, scale=1.0))
    k2 = deepseek("kimi_k2")
    del k2["n_group"], k2["topk_group"], k2["first_k_dense_replace"]
    k2_spec = dict(v3, routing="topk", groups=[1, 1], scale=2.827)
    c.add("kimi_k2", k2, both(), k2_spec)
    dtype = k2.pop("torch_dtype")
    c.add("kimi_nested", {"model_type": "kimi_k25", "torch_dtype": dtype, "text_config": k2, "vision_config": {"hidden_size": 7}}, both(),
          k2_spec, prefix="language_model.model.layers.%d.mlp", common="language_model.model.")
    c.add("glm4_moe", deepseek("glm4_moe", n_group=1, topk_group=1, routed_scaling_factor=1.5, num_nextn_predict_layers=1), both(),
          dict(v3, routing="topk", groups=[1, 1], scale=1.5))
    glm = deepseek("glm4_moe_lite", mlp_layer_types=["dense", "dense", "sparse"])
    del glm["n_group"], glm["topk_group"]
    c.add("glm4_moe_lite_layer_types", glm, {2: deepseek_layer(5)}, dict(v3, routing="topk", groups=[1, 1], scale=1.8))


def fp8(c):
    v3 = {"routing": "grouped_topk", "scoring": "sigmoid", "renormalize": True, "scale": 2.5, "bias": True, "groups": [2, 1],
          "shared": 256, "quant": "fp8-block", "shared_quant": "fp8-block"}
    config = lambda **q: deepseek(h=200, i=256, n_shared_experts=1, num_hidden_layers=2, quantization_config=dict(FP8, **q))
    layer = lambda seed, **k: deepseek_layer(seed, h=200, i=256, s=256, dtype="F8_E4M3", **k)
    c.add("fp8", config(), {1: layer(1)}, v3, shards=2)
    c.add("fp8_bf16_scales", config(modules_to_not_convert=["gate", "lm_head", "model.layers.0.mlp"]), {1: layer(1, scale_dtype="BF16")}, v3)
    c.add("fp8_e8m0_scales", config(scale_fmt="ue8m0"), {1: layer(1, scale_dtype="F8_E8M0")}, dict(v3, ue8m0=True))
    c.add("fp8_scales_stacked", config(scale_fmt="ue8m0"), {1: layer(1, scale_dtype="F8_E8M0", storage="scales_stacked")}, dict(v3, ue8m0=True))
    c.add("fp8_scales_stacked_f32", config(), {1: layer(1, storage="scales_stacked")}, v3)
    c.add("fp8_fused", config(scale_fmt="ue8m0"), {1: layer(1, storage="fused_nt")}, dict(v3, ue8m0=True))
    c.add("fp8_shared_skipped", config(ignored_layers=["model.layers.1.mlp.shared_experts.%s_proj" % p for p in ("gate", "up", "down")]),
          {1: layer(1, shared_dtype="BF16")}, dict(v3, shared_quant="bf16"))
    every = ["model.layers.1.mlp.experts.%d.%s_proj" % (e, p) for e in range(4) for p in ("gate", "up", "down")]
    c.add("fp8_experts_skipped", config(modules_to_not_convert=every),
          {1: deepseek_layer(1, h=200, i=256, s=256, dtype="BF16", shared_dtype="F8_E4M3")}, dict(v3, quant="bf16"))
    c.add("fp8_block_skipped", config(modules_to_not_convert=["layers.*.mlp"]), {1: deepseek_layer(1, h=200, i=256, s=256)},
          dict(v3, quant="bf16", shared_quant="bf16"))


def others(c):
    bsm = "model.layers.%d.block_sparse_moe"
    m2 = {"routing": "topk", "scoring": "sigmoid", "renormalize": True, "scale": 1.0, "bias": True}
    def layer(seed, bias="e_score_correction_bias"):
        rng = random.Random(seed)
        x = Layer(rng, 4, 16, 8, gate_dtype="F32").w123().router()
        return x.correction_bias(rng, bias) if bias else x
    c.add("minimax_m2", flat_moe("minimax_m2", use_routing_bias=True, scoring_func="sigmoid"), {0: layer(1), 1: layer(2)}, m2, bsm)
    c.add("minimax_m2_unsaid", flat_moe("minimax_m2"), {0: layer(1), 1: layer(2, "gate.e_score_correction_bias")}, m2, bsm)
    c.add("minimax_m2_no_bias", flat_moe("minimax_m2"), {0: layer(1, None), 1: layer(2, None)}, dict(m2, bias=False), bsm)
    c.add("minimax_m2_bias_off", flat_moe("minimax_m2", use_routing_bias=False), {0: layer(1, None), 1: layer(2, None)}, dict(m2, bias=False), bsm)
    oss_spec = {"routing": "topk_softmax", "scoring": "softmax", "renormalize": False, "scale": 1.0, "activation": "swigluoai",
                "limit": 7.0, "alpha": 1.702, "beta": 1.0, "expert_bias": True, "router_bias": True}
    def oss(seed, h=16, i=8, bias="BF16"):
        rng = random.Random(seed)
        return (Layer(rng, 4, h, i, expert_bias=bias).fused_nn_interleaved().router("router.weight")
                .router_bias(rng, "router.bias"))
    c.add("gpt_oss", flat_moe("gpt_oss", hidden_act="silu", experts_per_token=2), {0: oss(1), 1: oss(2)}, oss_spec)
    c.add("gpt_oss_square", flat_moe("gpt_oss", h=16, i=16, swiglu_limit=5.5, swiglu_alpha=1.25),
          {0: oss(1, i=16, bias="F32"), 1: oss(2, i=16, bias="F16")}, dict(oss_spec, limit=5.5, alpha=1.25))
    mxfp4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router", "lm_head"]}
    c.add("gpt_oss_mxfp4", flat_moe("gpt_oss", h=64, i=128, num_hidden_layers=1, quantization_config=mxfp4),
          {0: Mxfp4Layer(random.Random(4), 4, 64, 128)}, dict(oss_spec, quant="mxfp4-bf16"))
    limited = flat_moe("mixtral", hidden_act="gelu_pytorch_tanh", num_hidden_layers=1)
    c.add("mixtral_gelu", limited, {0: Layer(random.Random(1), 4, 16, 8).w123().router()},
          {"routing": "topk", "scoring": "softmax", "renormalize": True, "scale": 1.0, "activation": "gelu_tanh"}, bsm)


def more_families(c):
    """The families whose names, storage or routing have a twist of their own."""
    plain = {"routing": "topk", "scoring": "softmax", "renormalize": False, "scale": 1.0}
    bsm, ff = "model.layers.%d.block_sparse_moe", "model.layers.%d.feed_forward"
    def two(make):
        return {0: make(1), 1: make(2)}
    def layer(seed, storage, gate="gate.weight", **kinds):
        return getattr(Layer(random.Random(seed), 4, 16, 8, **kinds), storage)().router(gate)
    c.add("granite", flat_moe("granitemoe"), two(lambda s: layer(s, "granite", "router.layer.weight")),
          dict(plain, routing="topk_softmax"), bsm)
    c.add("granite_modules", flat_moe("granitemoe"), two(lambda s: layer(s, "fused_nt", "router.weight")), dict(plain, routing="topk_softmax"), bsm)
    c.add("phimoe_modules", flat_moe("phimoe"), two(lambda s: layer(s, "fused_nt", "router.weight")), dict(plain, routing="sparse_mixer"))
    c.add("granite_shared", flat_moe("granitemoeshared", shared_intermediate_size=12),
          two(lambda s: layer(s, "granite", "router.layer.weight").shared(random.Random(s), "^shared_mlp", 12, fused=True)),
          dict(plain, routing="topk_softmax", shared=12, beside_block=True), bsm)
    c.add("granite_no_shared", flat_moe("granitemoeshared", shared_intermediate_size=0),
          two(lambda s: layer(s, "granite", "router.layer.weight")), dict(plain, routing="topk_softmax"), bsm)
    c.add("llama4_top_2", flat_moe("llama4_text", num_experts_per_tok=2, interleave_moe_layer_step=1),
          two(lambda s: layer(s, "fused_nn", "router.weight").shared(random.Random(s), "shared_expert", 8)),
          dict(plain, routing="llama4", top_k=2, shared=8, weight_on_input=True), ff)
    c.add("llama4", flat_moe("llama4_text", num_experts_per_tok=1, interleave_moe_layer_step=1),
          two(lambda s: layer(s, "fused_nn", "router.weight").shared(random.Random(s), "shared_expert", 8)),
          dict(plain, routing="llama4", top_k=1, shared=8, weight_on_input=True), ff)
    c.add("dbrx", {"model_type": "dbrx", "d_model": 16, "n_layers": 2, "torch_dtype": "bfloat16",
                   "ffn_config": {"ffn_hidden_size": 8, "moe_num_experts": 4, "moe_top_k": 2, "moe_normalize_expert_weights": 2,
                                  "ffn_act_fn": {"name": "silu"}}},
          two(lambda s: layer(s, "flat", "router.layer.weight")), dict(plain, routing="p_norm", p_norm=2.0),
          "transformer.blocks.%d.ffn", common="transformer.")
    c.add("step3", unsaid(model_type="step3", moe_layers_enum="0,1", norm_expert_weight=True, share_expert_dim=12),
          two(lambda s: layer(s, "stacked").shared(random.Random(s), "^share_expert", 12)),
          dict(plain, renormalize=True, shared=12, beside_block=True), "model.layers.%d.moe")
    step = Layer(random.Random(3), 4, 200, 256, dtype="F8_E4M3").stacked().router().shared(random.Random(4), "^share_expert", 128)
    c.add("step3_fp8", dict(unsaid(model_type="step3", moe_layers_enum="1", norm_expert_weight=True, share_expert_dim=128, quantization_config=FP8),
                            hidden_size=200, moe_intermediate_size=256),
          {1: step}, dict(plain, renormalize=True, shared=128, beside_block=True, quant="fp8-block", shared_quant="fp8-block"), "model.layers.%d.moe")
    c.add("jamba", unsaid(model_type="jamba", intermediate_size=8, num_hidden_layers=4),
          {1: layer(1, "per_expert", "router.weight"), 3: layer(2, "per_expert", "router.weight")}, plain, ff)
    c.add("phimoe", flat_moe("phimoe", router_jitter_noise=0.02), two(lambda s: layer(s, "w123")),
          dict(plain, routing="sparse_mixer", jitter=0.02), bsm)
    c.add("minimax_m1", flat_moe("minimax_m1"), two(lambda s: layer(s, "w123")), dict(plain, renormalize=True), bsm)
    c.add("hunyuan", flat_moe("hunyuan_v1_moe", moe_topk=[2, 2], num_shared_expert=[2, 2]),
          two(lambda s: layer(s, "per_expert", "gate.wg.weight").shared(random.Random(s), "shared_mlp", 16)),
          dict(plain, renormalize=True, shared=16))
    c.add("hunyuan_up_first", flat_moe("hunyuan_v1_moe", moe_topk=2, num_shared_expert=2),
          two(lambda s: layer(s, "up_first", "gate.wg.weight").shared(random.Random(s), "shared_mlp", 16, up_first=True)),
          dict(plain, renormalize=True, shared=16))
    vl = {"text_config": qwen3(model_type="qwen3_vl_moe_text"), "model_type": "qwen3_vl_moe", "vision_config": {"hidden_size": 8}}
    c.add("qwen3_vl_moe", vl, two(lambda s: layer(s, "fused_nn")), dict(plain, renormalize=True), "model.language_model.layers.%d.mlp",
          common="model.language_model.")
    # As transformers saves it: [E, out, in]. 2I == H and I == H, where one of the two tensors alone says nothing.
    rows = lambda h, i: {s - 1: Layer(random.Random(s), 4, h, i).fused_nt().router() for s in (1, 2)}
    for name, h, i in (("", 16, 8), ("_square", 8, 8), ("_wide", 8, 16)):
        c.add("qwen3_vl_moe_rows" + name, dict(vl, text_config=dict(vl["text_config"], hidden_size=h, moe_intermediate_size=i)), rows(h, i),
              dict(plain, renormalize=True), "model.language_model.layers.%d.mlp", common="model.language_model.")
    c.add("ernie4_5", qwen3(model_type="ernie4_5_moe", moe_num_shared_experts=2, moe_layer_start_index=0, moe_norm_min=1e-10),
          two(lambda s: layer(s, "per_expert", gate_dtype="F32").shared(random.Random(s), "shared_experts", 16).correction_bias(
              random.Random(s), "moe_statics.e_score_correction_bias", as_matrix=True)),
          dict(plain, renormalize=True, renorm_floor=1e-10, bias=True, shared=16))
    c.add("qwen3_next", qwen3(model_type="qwen3_next", shared_expert_intermediate_size=24),
          two(lambda s: layer(s, "per_expert").shared(random.Random(s), "shared_expert", 24, gate="shared_expert_gate.weight")),
          dict(plain, renormalize=True, shared=24, shared_gated=True))
    longcat = {"model_type": "longcat_flash", "hidden_size": 16, "expert_ffn_hidden_size": 8, "ffn_hidden_size": 40, "num_layers": 2,
               "n_routed_experts": 4, "moe_topk": 2, "zero_expert_num": 2, "zero_expert_type": "identity", "torch_dtype": "bfloat16"}
    cat = lambda s, storage: layer(s, storage, "router.classifier.weight", gate_dtype="F32", columns=6).correction_bias(
        random.Random(s), "router.e_score_correction_bias")
    cat_spec = dict(plain, routing="zero_expert", zero_experts=2, scale=6.0, bias=True)
    c.add("longcat", longcat, two(lambda s: cat(s, "per_expert")), cat_spec)
    no_identity = lambda s: layer(s, "per_expert", "router.classifier.weight", gate_dtype="F32").correction_bias(
        random.Random(s), "router.e_score_correction_bias")
    for name, count in (("none", 0), ("null", None)):
        c.add("longcat_zero_" + name, dict(longcat, zero_expert_num=count), two(no_identity),
              dict(plain, scale=6.0, bias=True))
    for storage in ("per_expert", "fused_nt"):  # with the rows that transformers gives zero experts
        c.add("longcat_spare_" + storage, longcat, two(lambda s: cat(s, storage).spare(random.Random(s), 2)), cat_spec)
    c.add("nemotron_h", deepseek("nemotron_h", num_hidden_layers=2, hybrid_override_pattern="EE", n_shared_experts=1, mlp_hidden_act="relu2",
                                 moe_shared_expert_intermediate_size=12, routed_scaling_factor=2.0),
          two(lambda s: layer(s, "per_expert", gated=False).shared(random.Random(s), "shared_experts", 12).correction_bias(
              random.Random(s), "gate.e_score_correction_bias")),
          dict(plain, routing="grouped_topk", groups=[2, 1], scoring="sigmoid", renormalize=True, scale=2.0, scale_on_output=True, bias=True,
               shared=12, activation="relu2_no_mul"), "backbone.layers.%d.mixer", common="backbone.")


def transformers_families(c):
    """The further families of transformers 5.23: each with the names of its released files and its defaults."""
    sizes = {"hidden_size": 16, "moe_intermediate_size": 8, "intermediate_size": 40, "num_hidden_layers": 2, "num_experts": 4,
             "num_experts_per_tok": 2, "torch_dtype": "bfloat16"}
    config = lambda model_type, **more: dict(sizes, model_type=model_type, **more)
    nested = lambda model_type, text: {"model_type": model_type, "text_config": text, "vision_config": {"hidden_size": 7}}
    v3 = {"routing": "topk", "scoring": "sigmoid", "renormalize": True, "scale": 1.0, "bias": True, "shared": 8}
    soft = {"routing": "topk", "scoring": "softmax", "renormalize": True, "scale": 1.0}
    def layer(seed, bias="gate.e_score_correction_bias", shared="shared_experts", s=8, storage="per_expert", gate="gate.weight", up=False, **kinds):
        rng = random.Random(seed)
        x = getattr(Layer(rng, 4, 16, 8, **kinds), storage)().router(gate)
        if bias:
            x.correction_bias(rng, bias)
        return x.shared(rng, shared, s, fused=up) if shared else x
    one, both = lambda **k: {1: layer(1, **k)}, lambda **k: {0: layer(1, **k), 1: layer(2, **k)}
    c.add("afmoe", config("afmoe", num_shared_experts=2, route_scale=2.5, score_func="sigmoid", route_norm=True),
          one(bias="expert_bias", s=16, gate="router.gate.weight"), dict(v3, scale=2.5, shared=16))
    c.add("axk1", config("axk1", n_group=2, topk_group=1), one(), dict(v3, routing="grouped_topk", groups=[2, 1], scale=2.5),
          extra={"model.layers.1.post_mlp_layernorm.weight": tensor("BF16", matrix(random.Random(3), "BF16", 1, 16))})
    c.add("axk2", config("axk2", n_group=None, topk_group=None), one(), dict(v3, scale=2.5))
    c.add("bailing_hybrid", config("bailing_hybrid", num_expert_group=2, topk_group=1, moe_renormalize=True, num_shared_experts=1,
                                   first_k_dense_replace=1),
          one(bias="gate.expert_bias"), dict(v3, routing="grouped_topk", groups=[2, 1], scale=2.5))
    c.add("beam", config("beam", n_group=2, topk_group=1, mlp_layer_types=["dense", "sparse"]), one(shared=None),
          dict(v3, routing="grouped_topk", groups=[2, 1], scale=2.5, scale_on_output=True, shared=0))
    c.add("dots3", nested("dots3_note", config("dots3_note_text", shared_experts_intermediate_size=12, n_shared_experts=2)), one(s=24),
          dict(v3, shared=24))
    c.add("exaone_moe", config("exaone_moe", num_shared_experts=2), one(bias="e_score_correction_bias", s=16), dict(v3, scale=2.5, shared=16))
    c.add("glm5_next", nested("glm5_next", config("glm5_next_text", first_k_dense_replace=1)), one(), dict(v3, scale=2.5, limit=10.0),
          prefix="model.language_model.layers.%d.mlp", common="model.language_model.")
    c.add("hy_v3", config("hy_v3"), one(bias="expert_bias", shared="shared_mlp", gate="router.gate.weight"), dict(v3, scale=2.826))
    c.add("hy_v3_modules", config("hy_v3"), one(bias="e_score_correction_bias", storage="fused_nt"), dict(v3, scale=2.826))
    c.add("laguna", config("laguna", shared_expert_intermediate_size=12, moe_routed_scaling_factor=1.5, moe_router_logit_softcapping=0.0,
                           moe_apply_router_weight_on_input=False),
          one(bias="experts.e_score_correction_bias", shared="shared_expert", s=12), dict(v3, scale=1.5, scale_on_output=True, shared=12))
    c.add("laguna_modules", config("laguna", shared_expert_intermediate_size=12), one(storage="fused_nt", s=12),
          dict(v3, scale_on_output=True, shared=12))
    c.add("lfm2_moe", config("lfm2_moe", num_dense_layers=1, use_expert_bias=True), one(bias="expert_bias", shared=None, storage="w123"),
          dict(v3, renorm_epsilon=1e-6, shared=0), "model.layers.%d.feed_forward")
    m3 = dict(v3, scale=2.0, scale_on_output=True, shared=12, activation="swigluoai", limit=5.0, alpha=1.5, beta=1.0)
    m3_text = dict(config("minimax_m3_vl_text", shared_intermediate_size=12, swiglu_alpha=1.5, swiglu_limit=5.0, hidden_act="swigluoai",
                          mlp_layer_types=["dense", "sparse"]), intermediate_size=8)
    c.add("minimax_m3", nested("minimax_m3_vl", m3_text), one(bias="e_score_correction_bias", storage="w123", s=12), m3,
          prefix="language_model.model.layers.%d.block_sparse_moe", common="language_model.model.")
    fused = layer(1, storage="fused_nt", s=12, up=True)
    for leaf, old in (("gate_up_proj", "input_linear"), ("down_proj", "output_linear")):
        fused.files["shared_experts.%s.weight" % leaf] = fused.files.pop("shared_experts.%s.weight" % old)
    c.add("minimax_m3_modules", nested("minimax_m3_vl", m3_text), {1: fused}, m3, prefix="model.language_model.layers.%d.mlp",
          common="model.language_model.")
    c.add("solar_open", config("solar_open"), both(), v3)
    for kind in ("moe", "mla"):
        c.add("sarvam_" + kind, config("sarvam_" + kind, num_shared_experts=2, score_function="sigmoid", moe_router_enable_expert_bias=True),
              one(bias="gate.expert_bias", s=16), dict(v3, scale=2.5, shared=16))
    c.add("flint", config("flint", shared_expert_intermediate_size=12, mlp_only_layers=[0]), one(bias=None, shared="shared_expert", s=12),
          dict(v3, bias=False, shared=12))
    c.add("lara_mini", config("lara_mini", shared_expert_intermediate_size=12), both(bias=None, shared="shared_expert", s=12, storage="fused_nt"),
          dict(soft, shared=12))
    cohere = lambda **more: dict(config("cohere2_moe", **more), intermediate_size=8)
    c.add("cohere2_moe", cohere(num_shared_experts=2, shared_expert_combination_strategy="sum", norm_topk_prob=False), both(bias=None, s=16),
          dict(soft, shared=16))
    c.add("cohere2_moe_sigmoid", cohere(expert_selection_fn="sigmoid", norm_topk_prob=False), both(bias=None, shared=None),
          dict(soft, scoring="sigmoid", renormalize=False))
    aria = dict(config("aria_text"), intermediate_size=8)
    c.add("aria", nested("aria", aria), both(bias=None, s=16, storage="fused_nn_fc", gate="router.weight"),
          dict(soft, routing="topk_softmax", renormalize=False, shared=16), prefix="language_model.model.layers.%d.mlp",
          common="language_model.model.")
    c.add("granite_swa", dict(config("granitemoe_swa", shared_intermediate_size=12), intermediate_size=8),
          both(bias=None, shared="^shared_mlp", s=12, storage="fused_nt", gate="router.weight", up=True),
          dict(soft, routing="topk_softmax", renormalize=False, shared=12, beside_block=True), "model.layers.%d.block_sparse_moe")
    def filtered(seed):
        rng = random.Random(seed)
        return Layer(rng, 4, 16, 8, expert_bias="BF16").fused_nn_halves().router("router.weight").router_bias(rng, "router.bias")
    c.add("privacy_filter", dict(config("openai_privacy_filter", swiglu_alpha=1.5, swiglu_limit=5.0), intermediate_size=8),
          {0: filtered(1), 1: filtered(2)},
          dict(soft, routing="topk_softmax", renormalize=False, activation="swigluoai", limit=5.0, alpha=1.5, beta=1.0, expert_bias=True,
               router_bias=True))
    c.add("qwen3_omni", {"model_type": "qwen3_omni_moe", "thinker_config": nested("qwen3_omni_moe_thinker", config("qwen3_omni_moe_text"))},
          both(bias=None, shared=None), soft, prefix="thinker.model.layers.%d.mlp", common="thinker.model.")
    qwen4 = both(bias=None, shared=None)
    for seed, x in qwen4.items():
        x.shared(random.Random(seed), "shared_expert", 12, gate="shared_expert_gate.weight")
    c.add("qwen4_exp", nested("qwen4_exp", config("qwen4_exp_text", shared_expert_intermediate_size=12)), qwen4,
          dict(soft, shared=12, shared_gated=True))
    c.add("inkling2", nested("inkling2", config("inkling2_text", mlp_gate_softcap=3.0)),
          both(bias="gate.bias", shared=None, storage="fused_nt_interleaved"),
          dict(v3, scale=8.0, shared=0, activation="situ", beta=3.0, up_limit=25.0), prefix="model.llm.layers.%d.mlp", common="model.llm.")
    large = layer(1, bias=None, storage="w123", s=16)
    for leaf, old in (("w1", "gate_proj"), ("w3", "up_proj"), ("w2", "down_proj")):
        large.files["shared_experts.%s.weight" % leaf] = large.files.pop("shared_experts.%s.weight" % old)
    rest = {"layers.1.attention.%s.weight" % n: tensor("BF16", matrix(random.Random(3), "BF16", 2, 2)) for n in ("gate", "wo")}
    c.add("mistral_large4", nested("mistral_large4", config("mistral_large4_text", n_shared_experts=2)), {1: large}, dict(soft, shared=16),
          prefix="layers.%d", extra=rest, common="")
    c.add("deepseek_ocr2", nested("deepseek_ocr2", config("deepseek_ocr2_text", topk_method="greedy", n_shared_experts=2,
                                                          mlp_layer_types=["dense", "sparse"])),
          one(bias=None, s=16), dict(soft, renormalize=False, shared=16))


def families_of_2026(c):
    plain = {"routing": "topk", "scoring": "sigmoid", "renormalize": True, "scale": 1.0, "bias": True}
    bsm, ffn = "model.layers.%d.block_sparse_moe", "model.layers.%d.ffn"
    two = lambda make: {0: make(1), 1: make(2)}

    def layer(seed, storage, bias=None, shared="shared_experts", s=8, **names):
        rng = random.Random(seed)
        x = getattr(Layer(rng, 4, 16, 8), storage)().router()
        if bias:
            x.correction_bias(rng, bias)
        return x.shared(rng, shared, s, **names) if shared else x

    v4 = deepseek("deepseek_v4", num_hidden_layers=2, n_shared_experts=1, num_hash_layers=0, vocab_size=3, swiglu_limit=2.5)
    for field in ("n_group", "topk_group", "first_k_dense_replace"):
        del v4[field]
    v4_spec = dict(plain, scoring="sqrtsoftplus", scale=1.5, shared=8, limit=2.5)
    w123 = {"names": ("w1", "w3", "w2")}
    c.add("deepseek_v4", v4, two(lambda s: layer(s, "w123", "gate.bias", **w123)), v4_spec, ffn)
    c.add("deepseek_v4_memory", dict(v4, mlp_layer_types=["moe", "moe"], num_hash_layers=2),
          two(lambda s: layer(s, "fused_nt", "gate.e_score_correction_bias")), v4_spec)
    c.add("deepseek_v4_hash", dict(v4, mlp_layer_types=["hash_moe", "hash_moe"]),
          two(lambda s: layer(s, "w123", **w123).hash_table(random.Random(s), "gate.tid2eid", 3, 2)),
          dict(v4_spec, routing="hash", bias=False), ffn)
    mistral = deepseek("mistral4", num_hidden_layers=2, first_k_dense_replace=0)
    c.add("mistral4", {"model_type": "mistral3", "text_config": mistral}, two(lambda s: layer(s, "fused_nt", s=16)),
          dict(plain, routing="grouped_topk", scoring="softmax", groups=[2, 1], bias=False, shared=16, best_two=True),
          prefix="language_model.model.layers.%d.mlp", common="language_model.model.")
    kimi = qwen3(model_type="kimi_linear", first_k_dense_replace=0, num_expert_group=2, topk_group=1, moe_renormalize=True, num_shared_experts=2,
                 routed_scaling_factor=2.446)
    c.add("kimi_linear", kimi, two(lambda s: layer(s, "w123", "gate.e_score_correction_bias", s=16)),
          dict(plain, routing="grouped_topk", groups=[2, 1], scale=2.446, shared=16), bsm)
    mimo = deepseek("mimo_v2_flash", num_hidden_layers=2, n_shared_experts=None, moe_layer_freq=[1, 1], routed_scaling_factor=None)
    c.add("mimo_v2_flash", mimo, two(lambda s: layer(s, "per_expert", "gate.e_score_correction_bias", shared=None)),
          dict(plain, routing="grouped_topk", groups=[2, 1]))
    step = qwen3(model_type="step3p5", moe_layers_enum="0,1", share_expert_dim=12, moe_router_scaling_factor=3.0,
                 swiglu_limits=[2.5, 2.5, 0], swiglu_limits_shared=[1.5, 1.5])
    step_spec = dict(plain, scale=3.0, scale_on_output=True, shared=12, beside_block=True, activation="swiglustep", limit=2.5, shared_limit=1.5)
    c.add("step3p5", step, two(lambda s: layer(s, "stacked", "router_bias", "^share_expert", 12)), step_spec, "model.layers.%d.moe")
    c.add("step3p5_memory", step, two(lambda s: layer(s, "fused_nt", "gate.e_score_correction_bias", "^mlp.shared_experts", 12)), step_spec)
    gemma = qwen3(model_type="gemma4_text", enable_moe_block=True, top_k_experts=2, hidden_activation="gelu_pytorch_tanh", rms_norm_eps=0.5)
    del gemma["num_experts_per_tok"], gemma["hidden_act"], gemma["norm_topk_prob"]
    for name, experts in (("gemma4", Layer.fused_nt), ("gemma4_split", Layer.per_expert)):  # split: as quantisers do
        c.add(name, {"model_type": "gemma4", "text_config": gemma},
              two(lambda s: experts(Layer(random.Random(s), 4, 16, 8), module="").normed_router(random.Random(s + 9))),
              dict(plain, scoring="softmax", bias=False, activation="gelu_tanh", expert_scale=True, input_norm_eps=0.5),
              prefix="model.language_model.layers.%d.experts", common="model.language_model.")


def gguf(c):
    plain = {"routing": "topk", "scoring": "softmax", "renormalize": True, "scale": 1.0}
    sizes = lambda **more: dict({"block_count": 3, "embedding_length": 16, "expert_feed_forward_length": 8, "feed_forward_length": 40,
                                 "expert_count": 4, "expert_used_count": 2}, **more)
    def two(make):
        return {1: make(1), 2: make(2)}
    def layer(seed, bias=None, **kinds):
        rng = random.Random(seed)
        x = Layer(rng, 4, 16, 8, **kinds).router()
        return x.correction_bias(rng, "x", bias) if bias else x
    c.add_gguf("gguf_qwen3moe", metadata("qwen3moe", **sizes()), two(layer), plain, extra={"blk.0.ffn_up.weight": ("Q5_K", [2, 256], bytes(352))})
    c.add_gguf("gguf_split", metadata("qwen3moe", **sizes()), two(layer), plain, parts=3)
    c.add_gguf("gguf_alignment", metadata("qwen3moe", **sizes()), two(lambda s: layer(s, dtype="F16", gate_dtype="F32")),
               dict(plain, quant="f16", activation_dtype="F16"), alignment=64)
    c.add_gguf("gguf_mixtral", metadata("llama", **dict(sizes(), feed_forward_length=8)), two(lambda s: layer(s, dtype="F32", gate_dtype="F32")),
               dict(plain, quant="f32", activation_dtype="F32"))
    c.add_gguf("gguf_qwen2moe", metadata("qwen2moe", **sizes(expert_shared_feed_forward_length=24)),
               two(lambda s: layer(s).shared(random.Random(s), "x", 24, gate="g")), dict(plain, renormalize=False, shared=24, shared_gated=True))
    c.add_gguf("gguf_qwen3vlmoe", metadata("qwen3vlmoe", **sizes(n_deepstack_layers=3)), two(layer), plain)
    beside = {"expert_shared_feed_forward_length": 24}
    c.add_gguf("gguf_qwen35moe", metadata("qwen35moe", **sizes(full_attention_interval=4, **beside)),
               two(lambda s: layer(s).shared(random.Random(s), "x", 24, gate="g")), dict(plain, shared=24, shared_gated=True))
    granite = dict(plain, routing="topk_softmax", renormalize=False)
    c.add_gguf("gguf_granitehybrid", metadata("granitehybrid", **sizes(**beside)), two(lambda s: layer(s).shared(random.Random(s), "x", 24)),
               dict(granite, shared=24, beside_block=True))
    c.add_gguf("gguf_granitehybrid_alone", metadata("granitehybrid", **sizes(expert_shared_feed_forward_length=0)), two(layer), granite)
    v3 = sizes(expert_gating_func=2, expert_shared_count=2, expert_weights_scale=2.5, expert_weights_norm=True, leading_dense_block_count=1,
               expert_group_count=2, expert_group_used_count=1)
    c.add_gguf("gguf_deepseek_v3", metadata("deepseek2", **v3), two(lambda s: layer(s, "F32").shared(random.Random(s), "x", 16)),
               dict(plain, routing="grouped_topk", scoring="sigmoid", scale=2.5, bias=True, groups=[2, 1], shared=16))
    v2 = sizes(expert_shared_count=2, expert_weights_scale=16.0, feed_forward_length=(4, [40, 0, 0]))
    c.add_gguf("gguf_deepseek_v2", metadata("deepseek2", **v2), two(lambda s: layer(s).shared(random.Random(s), "x", 16)),
               dict(plain, renormalize=False, scale=16.0, shared=16))
    oss = {"routing": "topk_softmax", "scoring": "softmax", "renormalize": False, "scale": 1.0, "activation": "swigluoai",
           "limit": 7.0, "alpha": 1.702, "beta": 1.0, "expert_bias": True, "router_bias": True}
    c.add_gguf("gguf_gpt_oss", metadata("gpt-oss", **sizes(expert_gating_func=3)),
               two(lambda s: layer(s, expert_bias="F32").router_bias(random.Random(s), "x", "F32")), oss)
    nemotron = dict(plain, scoring="sigmoid", scale=2.0, scale_on_output=True, bias=True, activation="relu2_no_mul")
    for name, said in (("", {"expert_weights_norm": True}), ("_unsaid", {})):
        c.add_gguf("gguf_nemotron" + name, metadata("nemotron_h_moe", **sizes(expert_gating_func=2, expert_weights_scale=2.0, **said)),
                   two(lambda s: layer(s, "F32", gated=False)), dict(nemotron, renormalize=bool(said)))
    for arch in ("glm4moe", "dots1"):  # llama.cpp renormalises where the file says so
        c.add_gguf("gguf_%s_unsaid" % arch, metadata(arch, **sizes(expert_gating_func=2)), two(lambda s: layer(s, "F32")),
                   dict(plain, scoring="sigmoid", renormalize=False, bias=True))
    # Two layers and one that predicts a further token: skipped.
    predict = dict(layer_tensors(layer(9, "F32"), 3), **{"blk.3.nextn.eh_proj.weight": tensor("BF16", matrix(random.Random(9), "BF16", 16, 32))})
    c.add_gguf("gguf_nextn", metadata("glm4moe", **sizes(block_count=4, nextn_predict_layers=1, expert_gating_func=2, expert_weights_norm=True)),
               two(lambda s: layer(s, "F32")), dict(plain, scoring="sigmoid", bias=True), extra=predict)


def main():
    if len(sys.argv) != 2:
        sys.exit("usage: make_tiny_checkpoints.py FOLDER")
    os.makedirs(sys.argv[1], exist_ok=True)
    cases = Cases(sys.argv[1])
    for part in (mixtral, qwen, deepseeks, fp8, others, more_families, transformers_families, families_of_2026, gguf, gguf_architectures):
        part(cases)
    with open(os.path.join(sys.argv[1], "manifest.json"), "w", encoding="utf-8") as f:
        json.dump(cases.manifest, f, indent=1)
    print("%d checkpoints" % len(cases.manifest))


main()
