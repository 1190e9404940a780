"""The layers of tiny_model.py under the names and in the storage of GGUF files."""

from gguf_file import gguf
from tiny_model import stack, tensor, vector

GEMMA = {"router.scale": "ffn_gate_inp.scale", "pre_feedforward_layernorm_2.weight": "pre_ffw_norm_2.weight",
         "router.per_expert_scale": "ffn_down_exps.scale"}


def layer_tensors(layer, i):
    """name -> tiny_model.Tensor."""
    p = "blk.%d." % i
    out = {p + "attn_norm.weight": vector("F32", [b"\0\0\x80\x3f"] * layer.h), p + "ffn_norm.weight": vector("F32", [b"\0\0\x80\x3f"] * layer.h)}
    out[p + "ffn_gate_inp.weight"] = tensor(layer.gate_dtype, layer.gate)
    if "gate_bias" in layer.expected:
        out[p + "ffn_gate_inp.bias"] = layer.expected["gate_bias"]
    if "e_score_correction_bias" in layer.expected:
        out[p + "exp_probs_b.bias"] = layer.expected["e_score_correction_bias"]
    if "hash_table" in layer.expected:
        out[p + "ffn_gate_tid2eid.weight"] = layer.expected["hash_table"]
    for name, other in GEMMA.items():
        if "^" + name in layer.files:
            out[p + other] = layer.files["^" + name]
    together = getattr(layer, "together", False)  # gate above up in one tensor
    for leaf in ("gate", "up", "down")[0 if layer.gated else 1:]:
        out[p + "ffn_%s_exps.weight" % leaf] = stack(layer.dtype, [getattr(x, leaf) for x in layer.experts])
    if together:
        del out[p + "ffn_gate_exps.weight"], out[p + "ffn_up_exps.weight"]
        out[p + "ffn_gate_up_exps.weight"] = layer.expected["w13"]
    if layer.expert_bias:
        half = lambda rows: tensor(layer.expert_bias, rows)
        out[p + "ffn_gate_exps.bias"] = half([r[:layer.i] for r in layer.bias13])
        out[p + "ffn_up_exps.bias"] = half([r[layer.i:] for r in layer.bias13])
        out[p + "ffn_down_exps.bias"] = half(layer.bias2)
    if layer.shared_mlp:
        for leaf in ("gate", "up", "down")[0 if layer.gated else 1:]:
            out[p + "ffn_%s_shexp.weight" % leaf] = tensor(layer.shared_dtype, getattr(layer.shared_mlp, leaf))
        if together:
            del out[p + "ffn_gate_shexp.weight"]
            out[p + "ffn_up_shexp.weight"] = tensor(layer.shared_dtype, layer.shared_mlp.w13())
    if "shared_gate" in layer.expected:
        gate = layer.expected["shared_gate"]  # [1, H]; writers drop axes of one
        out[p + "ffn_gate_inp_shexp.weight"] = (gate.dtype, gate.shape[1:], gate.data)
    return out


def gguf_file(metadata, tensors, alignment=32):
    """tensors: name -> tiny_model.Tensor of a plain type, or a (type name, shape, bytes) triple."""
    return gguf(metadata, {n: t if isinstance(t, tuple) else (t.dtype, t.shape, t.data) for n, t in tensors.items()}, alignment)
