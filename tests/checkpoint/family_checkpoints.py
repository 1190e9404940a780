#!/usr/bin/env python3
"""Small checkpoints of model families, made and computed by the package transformers: its configuration, its names and its own
MoE block in float64. Needs torch and transformers; python_oracles_test.py runs every row against the tool.

usage: family_checkpoints.py FOLDER [NAME...]    writes FOLDER/NAME for each row (default: all)
       family_checkpoints.py --list

Each folder holds config.json, the layers with an MoE block as save_pretrained writes them (BF16; in `NAME.memory` the names
and the shapes of the modules, where they differ), and golden.safetensors: `<prefix>.input` (exact in BF16) and
`<prefix>.output`, F32 rounded from float64. Weights have a standard deviation of 1/sqrt(inputs), so that pre-activations are
about 1; biases of every kind are not zero, so that a reader that leaves one out is found."""

import contextlib
import json
import os
import re
import sys

HIDDEN, INNER, EXPERTS, TOP_K, TOKENS = 64, 48, 8, 2, 32

# What every configuration gets that has such a field; a row's own fields come after.
TINY = {
    "hidden_size": HIDDEN, "moe_intermediate_size": INNER, "intermediate_size": INNER, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 64, "max_position_embeddings": 128,
    "num_experts": EXPERTS, "num_local_experts": EXPERTS, "n_routed_experts": EXPERTS, "moe_num_experts": EXPERTS,
    "num_experts_per_tok": TOP_K, "num_experts_per_token": TOP_K, "moe_k": TOP_K, "moe_topk": TOP_K, "moe_top_k": TOP_K,
    "first_k_dense_replace": 1, "shared_expert_intermediate_size": 40, "num_nextn_predict_layers": 0, "pad_token_id": 0,
}


class Row:
    """One checkpoint. `fields` override TINY in the configuration, or in its text_config for a wrapper; `outer` are the
    wrapper's own. `call`: how the block is run on x [1, T, H], where block(x) is not enough. `memory`: also as the modules
    lie in memory (False where no file outside is written so). `block`: names of modules that hold experts in another way than as a child called "experts".
    `recorded`: the layers of the golden file, where it is not all."""

    def __init__(self, name, model_type=None, fields=None, outer=None, call=None, memory=True, block=None, auto=None, edit=None,
                 recorded=None):
        self.name, self.model_type, self.fields, self.outer = name, model_type or name, fields or {}, outer or {}
        self.call, self.memory, self.block, self.auto, self.edit = call, memory, block, auto, edit
        self.recorded = recorded


def groups(**more):
    return {"n_group": 4, "topk_group": 2, **more}


def before_the_norm(torch, block, x):
    """A.X-K1's block without the norm behind it, which lies beside the block in its files."""
    block.post_mlp_layernorm = torch.nn.Identity()
    return block(x)


ROWS = [
    Row("mixtral"),
    Row("minimax", fields={"layer_types": ["full_attention"] * 2}),
    Row("phimoe"),
    Row("qwen2_moe"),
    Row("qwen2_moe_renormalised", "qwen2_moe", {"norm_topk_prob": True}),
    Row("qwen3_moe"),
    Row("qwen3_moe_renormalised", "qwen3_moe", {"norm_topk_prob": True}),
    Row("qwen3_next", fields={"norm_topk_prob": True}),
    Row("qwen3_5_moe", fields={"layer_types": ["full_attention"] * 2}),
    Row("qwen3_5_moe_text", fields={"layer_types": ["full_attention"] * 2}),
    Row("mellum", fields={"mlp_layer_types": ["dense", "sparse"]}),
    Row("olmoe"),
    Row("flex_olmo"),
    Row("flex_olmo_renormalised", "flex_olmo", {"norm_topk_prob": True}),
    Row("deepseek_v2", fields={"topk_method": "greedy", "n_shared_experts": 2}),
    Row("deepseek_v2_groups", "deepseek_v2", groups(topk_method="group_limited_greedy", n_shared_experts=1, routed_scaling_factor=4.0)),
    Row("deepseek_v3", fields=groups(n_shared_experts=1)),
    Row("deepseek_v32", fields=groups(n_shared_experts=1)),
    Row("glm4_moe", fields={"n_shared_experts": 1, "routed_scaling_factor": 2.5}),
    Row("glm4v_moe", fields={"n_shared_experts": 1}),
    Row("glm4_moe_lite", fields=groups(n_shared_experts=1)),
    Row("glm_moe_dsa", fields={"n_shared_experts": 2, "first_k_dense_replace": 1}),
    Row("dots1", fields=groups(n_shared_experts=2, norm_topk_prob=True)),
    Row("minimax_m2"),
    Row("gpt_oss"),
    Row("gpt_oss_constants", "gpt_oss", {"swiglu_alpha": 1.0, "swiglu_limit": 2.5}),
    Row("llama4_text", fields={"num_experts_per_tok": 1, "intermediate_size_mlp": 72}),
    Row("granitemoe"),
    Row("granitemoeshared", fields={"shared_intermediate_size": 40}),
    Row("granitemoehybrid", fields={"shared_intermediate_size": 40, "layer_types": ["attention"] * 2}),
    Row("jamba", fields={"expert_layer_period": 2, "expert_layer_offset": 1, "mamba_dt_rank": 4}),
    Row("dbrx", fields={"d_model": HIDDEN, "n_heads": 4, "n_layers": 2,
                        "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0},
                        "ffn_config": {"ffn_hidden_size": INNER, "moe_num_experts": EXPERTS, "moe_top_k": TOP_K, "hidden_size": HIDDEN}}),
    Row("hunyuan_v1_moe", fields={"moe_topk": [TOP_K] * 2, "moe_intermediate_size": [INNER] * 2, "num_shared_expert": [1, 1]}),
    Row("ernie4_5_moe", fields={"moe_num_shared_experts": 2}),
    Row("nemotron_h", fields=groups(n_shared_experts=1, moe_shared_expert_intermediate_size=40, layers_block_type=["mamba", "moe"])),
]

ROWS += [
    Row("afmoe", fields={"num_dense_layers": 1, "num_shared_experts": 2, "route_scale": 2.5}),
    Row("aria"),
    Row("axk1", fields=groups(n_shared_experts=1), call=before_the_norm, memory=False),
    Row("axk2", fields={"n_shared_experts": 1}),
    Row("bailing_hybrid", fields=groups(n_shared_experts=1)),
    Row("beam", fields=groups(mlp_layer_types=["dense", "sparse"])),
    Row("cohere2_moe", fields={"num_shared_experts": 2, "shared_expert_combination_strategy": "sum"}),
    Row("cohere2_moe_sigmoid", "cohere2_moe", {"expert_selection_fn": "sigmoid", "norm_topk_prob": False}),
    Row("cohere2_moe_renormalised", "cohere2_moe", {"expert_selection_fn": "sigmoid", "norm_topk_prob": True}),
    Row("deepseek_ocr2", fields={"n_shared_experts": 2, "num_experts_per_tok": TOP_K, "mlp_layer_types": ["dense", "sparse"]}),
    Row("dots3_note", fields=groups(n_shared_experts=2, shared_experts_intermediate_size=40, num_key_value_heads=4),
        outer={"vision_config": {"adapter_out_dim": HIDDEN}, "audio_config": {"adapter_out_dim": HIDDEN}}),
    Row("exaone_moe", fields=groups(num_shared_experts=2)),
    Row("flint", fields={"mlp_only_layers": [0]}),
    Row("glm5_next", fields={"swiglu_limit": 1.5, "mlp_layer_types": ["dense", "sparse"], "num_key_value_heads": 4}),
    Row("granitemoe_swa", fields={"shared_intermediate_size": 40}),
    Row("hy_v3"),
    Row("inkling2", fields={"mlp_gate_softcap": 1.5, "mlp_up_softcap": 2.5}, outer={"vision_config": {"text_hidden_size": HIDDEN}}),
    Row("kimi_k25", fields={"n_group": 1, "topk_group": 1}),
    Row("laguna", fields={"moe_routed_scaling_factor": 2.5}),
    Row("lfm2_moe", fields={"num_dense_layers": 1, "layer_types": ["full_attention"] * 2}),
    Row("lfm2_moe_unbiased", "lfm2_moe", {"num_dense_layers": 1, "layer_types": ["full_attention"] * 2, "use_expert_bias": False,
                                          "norm_topk_prob": False, "routed_scaling_factor": 1.5}),
    Row("minimax_m3_vl", fields={"shared_intermediate_size": 40, "swiglu_alpha": 1.3, "swiglu_limit": 1.5}),
    Row("mistral_large4", fields={"n_shared_experts": 2}),
    Row("openai_privacy_filter", fields={"swiglu_alpha": 1.3, "swiglu_limit": 1.5}, auto="AutoModelForTokenClassification"),
    Row("qwen3_omni_moe", outer={"enable_audio_output": False}, auto="Qwen3OmniMoeForConditionalGeneration"),
    Row("qwen3_omni_moe_thinker"),
    Row("qwen4_exp"),
    Row("solar_open"),
    Row("unlimited_ocr", fields={"n_shared_experts": 2}),
]

# --- models of 2026 ---

V4 = {"layer_types": ["sliding_attention"] * 2, "q_lora_rank": 16, "o_lora_rank": 16, "o_groups": 2, "swiglu_limit": 0.7}
STEP = {"share_expert_dim": 40, "moe_router_scaling_factor": 1.5}
KIMI = {"routed_scaling_factor": 2.446, "first_k_dense_replace": 1}
GEMMA4 = {"hidden_size_per_layer_input": 0, "global_head_dim": 16, "rms_norm_eps": 0.25}


def gemma4_block(torch, layer, x):
    """From the residual stream to what post_feedforward_layernorm_2 receives; Gemma4TextDecoderLayer.forward."""
    flat = x.reshape(-1, HIDDEN)
    _, weights, ids = layer.router(flat)
    return layer.experts(layer.pre_feedforward_layernorm_2(flat), ids, weights).reshape(x.shape)


ROWS += [
    Row("deepseek_v4", fields={"mlp_layer_types": ["moe"] * 2, **V4}),
    Row("deepseek_v4_hash", "deepseek_v4", {"mlp_layer_types": ["hash_moe", "moe"], **V4}, recorded={1}),
    Row("deepseek_v4_sigmoid", "deepseek_v4", {"mlp_layer_types": ["moe"] * 2, "scoring_func": "sigmoid", **V4}),
    Row("mistral4", fields={"n_shared_experts": 2, "norm_topk_prob": False}),
    Row("mistral4_groups", "mistral4", groups(n_shared_experts=1, routed_scaling_factor=2.5)),
    Row("kimi_linear", fields=dict(KIMI, n_shared_experts=2)),
    Row("kimi_linear_groups", "kimi_linear", groups(n_shared_experts=1, moe_renormalize=False, **KIMI)),
    Row("mimo_v2_flash", fields={"routed_scaling_factor": 2.5}),
    Row("mimo_v2_flash_groups", "mimo_v2_flash", groups(norm_topk_prob=False)),
    Row("hy_v4", fields={"n_shared_experts": 2, "swiglu_limit": 0.7}),
    Row("step3p7", fields={"mlp_layer_types": ["sparse"] * 2, **STEP}),
    Row("step3p7_limits", "step3p7", {"mlp_layer_types": ["sparse"] * 2, "swiglu_limits": [0.0, 0.5],
                                      "swiglu_limits_shared": [0.3, None], **STEP}),
    Row("gemma4_text", fields={"enable_moe_block": True, "top_k_experts": TOP_K, **GEMMA4}, call=gemma4_block),
    Row("gemma4", fields={"enable_moe_block": True, "top_k_experts": 3, "hidden_activation": "silu", **GEMMA4},
        call=gemma4_block),
]

# --- of transformers 5.24, left out with an older one ---

SINCE_5_24 = {"hy_v4_vl", "inkling2_loop", "lara_mini", "sarvam_mla", "sarvam_moe"}

ROWS += [
    Row("hy_v4_vl", fields={"n_shared_experts": 1, "swiglu_limit": 0.7}),
    Row("inkling2_loop", fields={"mlp_gate_softcap": 1.5, "mlp_up_softcap": 2.5, "loop_layer_index_start": 6, "loop_layer_index_end": 12},
        outer={"vision_config": {"text_hidden_size": HIDDEN}}),
    Row("lara_mini", fields={"layer_types": ["full_attention"] * 2}),
    Row("sarvam_mla", fields={"n_shared_experts": 1}),
    Row("sarvam_moe", fields={"n_shared_experts": 2}),
]


# --- float64 ---

@contextlib.contextmanager
def float64(torch):
    """Modules say float32 where they want more than the weights have; here that is double."""
    kept = torch.float32, torch.float, torch.Tensor.float
    torch.float32 = torch.float = torch.float64
    torch.Tensor.float = lambda self, *_, **__: self.double()
    try:
        yield
    finally:
        torch.float32, torch.float, torch.Tensor.float = kept


# --- the model ---

def has_field(config, name):
    try:
        return hasattr(config, name)
    except RuntimeError:  # it has one per layer
        return True


def make_config(transformers, row):
    outer = transformers.AutoConfig.for_model(row.model_type)
    parts = getattr(outer, "sub_configs", {})
    tiny = lambda config, own: {**{k: v for k, v in TINY.items() if has_field(config, k)}, **own}
    inside = lambda wrapper: {"text_config": tiny(wrapper.text_config, {"model_type": wrapper.text_config.model_type, **row.fields})}
    if "thinker_config" in parts:
        config = type(outer)(thinker_config=inside(outer.thinker_config), **row.outer)
    elif "text_config" in parts:
        config = type(outer)(**inside(outer), **row.outer)
    else:
        config = type(outer)(**tiny(outer, row.fields))
    if row.edit:
        row.edit(config)
    return config


def set_experts(config):
    config._experts_implementation = config._attn_implementation = "eager"
    for name in getattr(config, "sub_configs", {}):
        if getattr(config, name, None) is not None:
            set_experts(getattr(config, name))


def make_model(torch, transformers, row, config):
    """The model on no device: only what is needed gets memory."""
    set_experts(config)
    autos = [row.auto] if row.auto else ["AutoModelForCausalLM", "AutoModelForImageTextToText", "AutoModel"]
    with torch.device("meta"):
        for name in autos:
            auto = getattr(transformers, name)
            if not name.startswith("Auto"):
                return auto._from_config(config, dtype=torch.bfloat16).eval()
            if type(config) in auto._model_mapping.keys() or name == autos[-1]:
                return auto.from_config(config, dtype=torch.bfloat16).eval()


def moe_blocks(row, model):
    """[(layer, name of the layer, name of the block, block)]"""
    found = []
    for name, module in model.named_modules():
        at = re.match(r"(.*?\b(?:layers|blocks)\.(\d+))(?:\.(\w+))?$", name)
        inside = hasattr(module, "experts") if row.block is None else at and at[3] == row.block
        if at and inside and not re.search("vision|visual|talker", name):
            found.append((int(at[2]), at[1], name, module))
    if not found:
        sys.exit("%s: no MoE block in %s" % (row.name, type(model).__name__))
    return found


def fill(torch, rng, layer):
    """Random numbers that are exact in BF16, whatever the dtype."""
    tensors = {**dict(layer.named_parameters()), **dict(layer.named_buffers())}
    for name, tensor in tensors.items():
        if not tensor.is_floating_point():
            tensor.zero_()
            continue
        values = torch.randn(tensor.shape, generator=rng)
        if "norm" in name.rsplit(".", 2)[-2:][0] and tensor.dim() == 1:
            values = 1 + 0.1 * values
        elif tensor.dim() < 2 or "bias" in name:
            values *= 0.2
        elif tensor.dim() == 2:
            values /= tensor.shape[1]**0.5
        else:  # stacked, in either direction: the width that the name reads
            reads = HIDDEN if "gate" in name or "up" in name else INNER
            values /= (reads if reads in tensor.shape[1:] else tensor.shape[-1])**0.5
        tensor.copy_(values.bfloat16())


def output_of(torch, row, block, x):
    with torch.no_grad(), float64(torch):
        y = row.call(torch, block, x) if row.call else block(x)
    y = y[0] if isinstance(y, tuple) else y
    if y.dtype != torch.float64:
        sys.exit("%s: the block answers in %s, not in float64" % (row.name, y.dtype))
    return y.reshape(x.shape[1], -1)


def write(torch, transformers, row, folder):
    """Folders written."""
    import copy
    from safetensors.torch import load_file, save_file
    rng = torch.Generator().manual_seed(7)
    config = make_config(transformers, row)
    model = make_model(torch, transformers, row, config)
    state, golden = {}, {}
    for number, layer_name, block_name, block in moe_blocks(row, model):
        layer = model.get_submodule(layer_name)
        layer.to_empty(device="cpu")
        with torch.no_grad():
            fill(torch, rng, layer)
        state.update({layer_name + "." + k: v for k, v in layer.state_dict().items()})
        if row.recorded is not None and number not in row.recorded:
            continue
        x = torch.randn((1, TOKENS, HIDDEN), generator=rng).bfloat16()
        y = output_of(torch, row, copy.deepcopy(block).double(), x.double())
        if not 0.02 < float(y.std()) < 50:
            sys.exit("%s: outputs of %g test nothing" % (row.name, float(y.std())))
        prefix = "model.layers.%d.block" % number
        golden[prefix + ".input"], golden[prefix + ".output"] = x[0].to(torch.float32), y.to(torch.float32)
    folders, names = [], set()
    for form, original in (("", True), (".memory", False))[:2 if row.memory else 1]:
        to = os.path.join(folder, row.name + form)
        model.save_pretrained(to, state_dict=dict(state), save_original_format=original)
        saved = load_file(os.path.join(to, "model.safetensors"))
        shapes = {(k, tuple(v.shape)) for k, v in saved.items()}
        if shapes == names:
            for file in os.listdir(to):
                os.unlink(os.path.join(to, file))
            os.rmdir(to)
            continue
        names = shapes
        save_file(golden, os.path.join(to, "golden.safetensors"))
        folders.append(to)
    return folders


def write_all(torch, transformers, folder, names=()):
    """Yields (row, folders)."""
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    known = transformers.models.auto.configuration_auto.CONFIG_MAPPING
    for row in ROWS:
        if row.model_type in SINCE_5_24 and row.model_type not in known:
            continue
        if not names or row.name in names:
            yield row, write(torch, transformers, row, folder)


def main():
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    if sys.argv[1] == "--list":
        print("\n".join(row.name for row in ROWS))
        return
    unknown = set(sys.argv[2:]) - {row.name for row in ROWS}
    if unknown:
        sys.exit("no such rows: %s" % ", ".join(sorted(unknown)))
    import torch
    import transformers
    for row, folders in write_all(torch, transformers, sys.argv[1], sys.argv[2:]):
        print(row.name, *folders)


if __name__ == "__main__":
    main()
