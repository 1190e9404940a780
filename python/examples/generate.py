"""A tiny model continues a text through transformers, with its own experts and with Moesaic's.

    python python/examples/generate.py                       # a random Qwen3-MoE of two layers
    python python/examples/generate.py PATH [--quant int4-g128] [--dtype bfloat16] [--tokens 64]

Prints the tokens of both, the time and the bytes of the experts. In fp32 the tokens are the same.
"""

from __future__ import annotations

import argparse
import time

import torch
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

import moesaic.transformers


def tiny_model(dtype: torch.dtype) -> torch.nn.Module:
    """Random weights whose logits are far enough apart for greedy decoding."""
    config = Qwen3MoeConfig(
        vocab_size=256,
        hidden_size=256,
        intermediate_size=512,
        moe_intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        num_experts=16,
        num_experts_per_tok=4,
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=parameter.shape[-1] ** -0.5)
    return model.to(dtype)


def speak(model: torch.nn.Module, prompt: torch.Tensor, tokens: int) -> tuple[list[int], float]:
    """The continuation and the seconds it took."""
    begin = time.perf_counter()
    out = model.generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=tokens, do_sample=False, pad_token_id=0
    )
    return out[0, prompt.shape[1] :].tolist(), time.perf_counter() - begin


def main() -> None:
    """Runs the comparison."""
    parser = argparse.ArgumentParser(description="Greedy text with and without Moesaic")
    parser.add_argument("model", nargs="?", help="folder of a model; a random one of two layers if left out")
    parser.add_argument("--quant", default="as-is", help="scheme of the packed experts")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--tokens", type=int, default=32)
    arguments = parser.parse_args()
    dtype = getattr(torch, arguments.dtype)
    if arguments.model:
        model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=dtype, local_files_only=True).eval()
    else:
        model = tiny_model(dtype)
    prompt = torch.tensor([list(b"First Citizen:")]) % model.config.get_text_config().vocab_size
    speak(model, prompt, 2)  # warm
    theirs, their_seconds = speak(model, prompt, arguments.tokens)
    report = moesaic.transformers.accelerate(model, quant=arguments.quant)
    speak(model, prompt, 2)
    ours, our_seconds = speak(model, prompt, arguments.tokens)
    print(report)
    print(f"transformers  {their_seconds:6.2f} s  {theirs}")
    print(f"moesaic       {our_seconds:6.2f} s  {ours}")
    same = sum(a == b for a, b in zip(theirs, ours, strict=True))
    print(
        f"{same} of {len(theirs)} tokens are the same; experts: {report.bytes_after} bytes instead of {report.bytes_before}"
    )


if __name__ == "__main__":
    main()
