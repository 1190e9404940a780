"""What descriptions of quantisation are made of, and the words of refusals."""

import struct

CORRUPT, LIMIT, MISSING, ARGUMENT = "corrupt_file", "limit_exceeded", "missing_tensor", "invalid_argument"
UNSUPPORTED, AMBIGUOUS, SHAPE, DTYPE = "unsupported", "ambiguous_format", "invalid_shape", "invalid_dtype"
EXPERTS, P = 2, "model.layers.0.mlp."
UP = P + "experts.1.up_proj"
NAN, INF = struct.pack("<f", float("nan")), struct.pack("<f", float("inf"))


def base(h, i):
    return {"model_type": "qwen3_moe", "hidden_size": h, "moe_intermediate_size": i, "num_hidden_layers": 1, "num_experts": EXPERTS,
            "num_experts_per_tok": 1, "torch_dtype": "bfloat16"}


def ct(form, weights, inputs=None, **more):
    g = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    return dict({"quant_method": "compressed-tensors", "format": form, "config_groups": {"g": g}, "ignore": ["lm_head", "re:.*mlp.gate$"]}, **more)


def floats8(strategy="channel", **k):
    return dict({"num_bits": 8, "type": "float", "symmetric": True, "strategy": strategy, "dynamic": False}, **k)


def ints(bits=4, group=32, strategy="group", **k):
    groups = {"group_size": group} if strategy.lower() in ("group", "tensor_group") else {}
    return dict({"num_bits": bits, "type": "int", "symmetric": True, "strategy": strategy, "dynamic": False}, **dict(groups, **k))


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
BNB = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
FP8 = {"quant_method": "fp8", "activation_scheme": "static"}
OPT = {"quant_method": "modelopt", "quant_algo": "NVFP4"}
