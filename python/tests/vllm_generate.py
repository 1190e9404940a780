"""Generates greedily with vLLM's engine in this process; test_vllm.py runs it, with the plugin and
without.

    python vllm_generate.py FOLDER '{"additional_config": {"moesaic": true}}'

Prints a line "TOKENS" with a JSON list of lists, and a line "STORAGE" with the bytes that vLLM's
experts
still hold.
"""

from __future__ import annotations

import json
import sys

from vllm import LLM, SamplingParams

PROMPTS = (
    b"First Citizen:\nBefore we proceed",
    b"KING RICHARD III:\nWhy, ",
    b"JULIET:\nO Romeo, ",
    b"What, my lord",
)


def storage(model) -> int:
    """Bytes of memory behind the weights of routed experts."""
    total = 0
    for name, parameter in model.named_parameters():
        if name.endswith(("w13_weight", "w2_weight")):
            total += parameter.untyped_storage().nbytes()
    return total


def main() -> None:
    options = json.loads(sys.argv[2])
    llm = LLM(
        model=sys.argv[1],
        skip_tokenizer_init=True,
        max_model_len=128,
        **({"enforce_eager": True} | options),
    )
    # The bundled models speak bytes.
    prompts = [{"prompt_token_ids": list(text)} for text in PROMPTS]
    sampling = SamplingParams(temperature=0, max_tokens=16, detokenize=False, ignore_eos=True)
    print(
        "TOKENS",
        json.dumps([list(o.outputs[0].token_ids) for o in llm.generate(prompts, sampling)]),
    )
    print("STORAGE", json.dumps(llm.apply_model(storage)))


if __name__ == "__main__":
    main()
