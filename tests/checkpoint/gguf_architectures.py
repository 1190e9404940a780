"""A tiny GGUF file of every architecture that carries a family's layer under names of its own, and what must be read."""

import random

from gguf_file import F32, metadata
from tiny_model import Layer

SIGMOID, SQRT_SOFTPLUS = 2, 4


def layer(seed, bias=True, s=0, gate=None, e=4):
    rng = random.Random(seed)
    x = Layer(rng, e, 16, 8).router()
    if bias:
        x.correction_bias(rng, "x")
    return x.shared(rng, "x", s, gate=gate) if s else x


def gguf_architectures(c):
    plain = {"routing": "topk", "scoring": "softmax", "renormalize": True, "scale": 1.0}
    sigmoid = dict(plain, scoring="sigmoid", bias=True)
    groups = {"expert_group_count": 2, "expert_group_used_count": 1}
    grouped = {"routing": "grouped_topk", "groups": [2, 1]}

    def add(arch, spec, make, name="", **keys):
        sizes = {"block_count": 3, "embedding_length": 16, "expert_feed_forward_length": 8, "feed_forward_length": 40, "expert_count": 4,
                 "expert_used_count": 2}
        keys = {k: v for k, v in dict(sizes, **keys).items() if v is not None}
        c.add_gguf("gguf_%s%s" % (arch, name), metadata(arch, **{k.replace("__", "."): v for k, v in keys.items()}), {1: make(1), 2: make(2)}, spec)

    said = {"expert_weights_norm": True, "expert_gating_func": SIGMOID}
    with_shared = lambda s: layer(s, s=16)
    routed = lambda s: layer(s)
    soft = lambda s: layer(s, bias=False)

    # Sigmoid scores and a selection bias, as DeepSeek-V3 has them.
    add("lfm2moe", dict(sigmoid, renorm_epsilon=1e-6), routed, expert_gating_func=SIGMOID, leading_dense_block_count=1)
    add("afmoe", dict(sigmoid, scale=2.5, shared=16), with_shared, expert_weights_norm=True, expert_weights_scale=2.5, expert_shared_count=2)
    exaone = dict(said, expert_weights_scale=2.5, expert_shared_count=2)
    add("exaone-moe", dict(sigmoid, scale=2.5, shared=16, **grouped), with_shared, expert_shared_feed_forward_length=16, **exaone, **groups)
    add("exaone-moe", dict(sigmoid, scale=2.5, shared=16, renormalize=False), with_shared, "_unsaid", **dict(exaone, expert_weights_norm=None))
    add("bailingmoe2", dict(sigmoid, scale=2.5, shared=8, **grouped), lambda s: layer(s, s=8), expert_weights_scale=2.5, expert_shared_count=1,
        expert_shared_feed_forward_length=8, **said, **groups)
    sparse = {"attention__indexer__top_k": 2048}
    add("glm-dsa", dict(sigmoid, scale=2.5, shared=8), lambda s: layer(s, s=8), expert_weights_norm=True, expert_weights_scale=2.5,
        expert_shared_count=1, **sparse)
    add("deepseek32", dict(sigmoid, scale=2.5, shared=8, **grouped), lambda s: layer(s, s=8), expert_weights_scale=2.5, expert_shared_count=1,
        **said, **groups, **sparse)
    add("kimi-linear", dict(sigmoid, scale=2.5, shared=8), lambda s: layer(s, s=8), expert_gating_func=SIGMOID, expert_weights_scale=2.5,
        expert_shared_count=1)
    add("mimo2", dict(sigmoid, **grouped), routed, **groups)
    add("laguna", dict(sigmoid, scale=2.5, scale_on_output=True, shared=12), lambda s: layer(s, s=12), expert_weights_scale=2.5,
        expert_shared_feed_forward_length=12, **said)
    add("hy_v3", dict(sigmoid, scale=2.5, shared=16), with_shared, expert_weights_scale=2.5, expert_shared_feed_forward_length=16, **said)
    add("dots3note", dict(sigmoid, scale=2.5, shared=16), with_shared, expert_weights_scale=2.5, expert_shared_count=2, **said)
    add("minimax-m3", dict(sigmoid, scale=2.0, scale_on_output=True, shared=8, activation="swigluoai", limit=7.0, alpha=1.702, beta=1.0),
        lambda s: layer(s, s=8), expert_weights_scale=2.0, expert_shared_count=1, **said)

    # Limits of the activation, of each block.
    step = dict(sigmoid, scale=3.0, scale_on_output=True, shared=12, beside_block=True)
    add("step35", dict(step, of_layer={"1": {"activation": "swiglustep", "limit": 2.5}, "2": {"shared_limit": 1.5}}), lambda s: layer(s, s=12),
        expert_weights_norm=True, expert_weights_scale=3.0, expert_shared_feed_forward_length=12, swiglu_clamp_exp=(F32, [0.0, 2.5, 0.0]),
        swiglu_clamp_shexp=(F32, [0.0, 0.0, 1.5]))
    limits = {"expert_weights_scale": 2.5, "expert_shared_count": 1}
    add("glm5-next", dict(sigmoid, scale=2.5, shared=8, limit=2.5), lambda s: layer(s, s=8), swiglu_clamp_exp=2.5,
        swiglu_clamp_shexp=(F32, [2.5] * 3), **said, **limits)
    add("hy_v4", dict(sigmoid, scale=2.5, shared=8, of_layer={"1": {"limit": 2.5}, "2": {"limit": 3.5}}), lambda s: layer(s, s=8),
        swiglu_clamp_exp=(F32, [0.0, 2.5, 3.5]), **said, **limits)
    v4 = dict(sigmoid, scoring="sqrtsoftplus", scale=2.5, shared=8, limit=2.5)
    v4_layer = lambda s: layer(s, s=8) if s == 2 else layer(s, bias=False, s=8).hash_table(random.Random(s), "x", 3, 2)
    add("deepseek4", dict(v4, of_layer={"1": {"routing": "hash", "bias": False}}), v4_layer, swiglu_clamp_exp=(F32, [2.5] * 3),
        hash_layer_count=2, expert_gating_func=SQRT_SOFTPLUS, expert_weights_norm=True, **limits)
    # A block for prediction is counted and is not there.
    add("deepseek4", dict(v4, of_layer={"1": {"routing": "hash", "bias": False}}), v4_layer, "_no_prediction", swiglu_clamp_exp=(F32, [2.5] * 3),
        hash_layer_count=2, expert_gating_func=SQRT_SOFTPLUS, expert_weights_norm=True, nextn_predict_layers=1, **limits)

    # GLM-4.7-Flash as it was first written, without the gating function; in another model that is softmax.
    flash = {"expert_weights_norm": True, "expert_weights_scale": 1.75, "expert_shared_count": 1, "expert_group_count": 1, "expert_group_used_count": 1}
    add("deepseek2", dict(sigmoid, scale=1.75, shared=8), lambda s: layer(s, s=8), "_glm_flash", block_count=47, vocab_size=154880, **flash)

    # Softmax.
    add("mistral4", dict(plain, shared=16, best_two=True, **grouped), lambda s: layer(s, bias=False, s=16), expert_weights_norm=True,
        expert_shared_count=2, **groups)
    large = dict(plain, scale=2.5, shared=16)
    add("deepseek2", large, lambda s: layer(s, bias=False, s=16), "_mistral_large", expert_weights_norm=True, expert_gating_func=1,
        expert_shared_count=2, expert_weights_scale=2.5)
    for name, norm in (("", False), ("_renormalised", True)):
        add("bailingmoe", dict(plain, renormalize=norm, shared=16), lambda s: layer(s, bias=False, s=16), name, expert_weights_norm=norm,
            expert_shared_count=2, expert_weights_scale=1.0)
    first = dict(plain, renormalize=False, shared=16)
    for arch in ("deepseek", "deepseek2-ocr"):
        add(arch, first, lambda s: layer(s, bias=False, s=16), expert_shared_count=2, expert_weights_scale=1.0)
    for arch in ("mellum", "rnd1"):
        add(arch, plain, soft)
    add("llada-moe", dict(plain, renormalize=False), soft)
    add("minimax-01", plain, soft, expert_feed_forward_length=None, feed_forward_length=8)
    add("qwen4exp", dict(plain, shared=12, shared_gated=True), lambda s: layer(s, bias=False, s=12, gate="g"), expert_shared_feed_forward_length=12)

    def fused(s):  # gate above up in one tensor, of the shared expert too
        x = layer(s, bias=False, s=12)
        x.together = True
        return x
    add("granite_swa", dict(plain, routing="topk_softmax", renormalize=False, shared=12, beside_block=True), fused,
        expert_feed_forward_length=None, feed_forward_length=8, expert_shared_feed_forward_length=12)

    alone = lambda s: layer(s, bias=False)
    add("granite_swa", dict(plain, routing="topk_softmax", renormalize=False), alone, "_alone",
        expert_feed_forward_length=None, feed_forward_length=8)
    step = dict(sigmoid, scale=3.0, scale_on_output=True, of_layer={"1": {"activation": "swiglustep", "limit": 2.5}})
    add("step35", step, routed, "_alone", expert_weights_norm=True, expert_weights_scale=3.0, swiglu_clamp_exp=(F32, [0.0, 2.5, 0.0]))

    def normed(s):
        x = Layer(random.Random(s), 4, 16, 8).normed_router(random.Random(s + 9))
        x.together = s == 2
        return x
    add("gemma4", dict(plain, activation="gelu_tanh", expert_scale=True, input_norm_eps=0.5), normed, attention__layer_norm_rms_epsilon=0.5)
