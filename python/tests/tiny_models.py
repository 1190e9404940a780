"""Tiny models of transformers' own classes, and what they answer."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

COMMON = {
    "vocab_size": 128,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
MODELS: dict[str, Any] = {
    "qwen3_moe": lambda t: t.Qwen3MoeConfig(
        **COMMON, head_dim=16, intermediate_size=96, moe_intermediate_size=64, num_experts=8, num_experts_per_tok=2
    ),
    "mixtral": lambda t: t.MixtralConfig(**COMMON, intermediate_size=96, num_local_experts=4, num_experts_per_tok=2),
    "olmoe": lambda t: t.OlmoeConfig(**COMMON, intermediate_size=48, num_experts=8, num_experts_per_tok=2),
    "qwen2_moe": lambda t: t.Qwen2MoeConfig(
        **COMMON,
        intermediate_size=96,
        moe_intermediate_size=48,
        shared_expert_intermediate_size=64,
        num_experts=8,
        num_experts_per_tok=2,
    ),
    "gpt_oss": lambda t: t.GptOssConfig(
        **COMMON,
        head_dim=16,
        intermediate_size=64,
        num_local_experts=4,
        num_experts_per_tok=2,
        layer_types=["full_attention", "sliding_attention"],
    ),
    "deepseek_v3": lambda t: t.DeepseekV3Config(
        **{**COMMON, "num_key_value_heads": 4},
        intermediate_size=96,
        moe_intermediate_size=48,
        n_routed_experts=8,
        num_experts_per_tok=2,
        n_group=2,
        topk_group=1,
        first_k_dense_replace=1,
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        v_head_dim=16,
    ),
    "granitemoe": lambda t: t.GraniteMoeConfig(
        **COMMON, intermediate_size=48, num_local_experts=4, num_experts_per_tok=2
    ),
    "phimoe": lambda t: t.PhimoeConfig(**COMMON, intermediate_size=96, num_local_experts=4, num_experts_per_tok=2),
}


# More families, by their own configuration class with these sizes where it has them.
SMALL = COMMON | {
    "head_dim": 16,
    "intermediate_size": 96,
    "moe_intermediate_size": 48,
    "expert_dim": 48,
    "num_experts": 8,
    "num_local_experts": 8,
    "n_routed_experts": 8,
    "moe_num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_topk": 2,
    "moe_k": 2,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 16,
    "shared_expert_intermediate_size": 64,
    "n_shared_experts": 1,
    "num_shared_experts": 1,
    "moe_num_shared_experts": 1,
    "pad_token_id": 0,
}
LATENT = {"num_key_value_heads": 4}  # latent attention has as many as heads
FAMILIES: dict[str, dict[str, int]] = {
    "afmoe": {},
    "aria_text": {},
    "axk2": LATENT,
    "cohere2_moe": {},
    "deepseek_v2": {},
    "deepseek_v32": LATENT,
    "deepseek_v4": {},
    "dots1": {},
    "ernie4_5_moe": {},
    "exaone_moe": {},
    "flex_olmo": {},
    "glm4_moe": {},
    "glm4_moe_lite": LATENT,
    "glm_moe_dsa": LATENT,
    "granitemoe_swa": {},
    "granitemoeshared": {},
    "hunyuan_v1_moe": {},
    "hy_v3": {},
    "hy_v4": {},
    "inkling2_text": {},
    "kolibri1": {},
    "laguna": {},
    "mellum": {},
    "mimo_v2_flash": {},
    "minimax": {},
    "minimax_m2": {},
    "nemotron_h": {},
    "solar_open": {},
}
KNOWN = [name for name in FAMILIES if name in CONFIG_MAPPING]  # to this version of transformers


def gemma4() -> Any:
    """Its configuration does not say of which sizes it has defaults."""
    sizes = {
        key: SMALL[key] for key in (*COMMON, "head_dim", "intermediate_size", "moe_intermediate_size", "num_experts")
    }
    per_layer = {"vocab_size_per_layer_input": 128, "hidden_size_per_layer_input": 16}
    return transformers.Gemma4TextConfig(**sizes, **per_layer, enable_moe_block=True, top_k_experts=2, pad_token_id=0)


def configuration_of(name: str) -> Any:
    if name == "gemma4_text":
        return gemma4()
    if name in MODELS:
        return MODELS[name](transformers)
    cls = CONFIG_MAPPING[name]
    defaults = cls()
    return cls(**{field: value for field, value in (SMALL | FAMILIES[name]).items() if hasattr(defaults, field)})


def tiny(name: str, dtype: Any = torch.float32) -> Any:
    config = configuration_of(name)
    with torch.device("meta"):  # a size that is called otherwise would stay as large as it is
        model = transformers.AutoModelForCausalLM.from_config(config)
    assert sum(p.numel() for p in model.parameters()) < 5_000_000
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, experts_implementation="eager").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=parameter.shape[-1] ** -0.5)
    return model.to(dtype)


PROMPT = torch.arange(18).reshape(2, 9) * 7 % 128


def logits(model: Any) -> Any:
    with torch.no_grad():
        return model(PROMPT, use_cache=False).logits


def tokens_of(model: Any) -> Any:
    return model.generate(
        PROMPT, attention_mask=torch.ones_like(PROMPT), max_new_tokens=30, do_sample=False, pad_token_id=0
    )


def rel_l2(a: Any, b: Any) -> float:
    assert b.norm() > 0.1, "the reference is far from zero"
    return float((a.double() - b.double()).norm() / b.double().norm())
