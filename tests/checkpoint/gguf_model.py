"""The layers of tiny_model.py under the names and in the storage of GGUF files."""

from gguf_file import gguf
from tiny_model import stack, tensor, vector


def layer_tensors(layer, i):
    """name -> tiny_model.Tensor."""
    p = "blk.%d." % i
    out = {p + "attn_norm.weight": vector("F32", [b"\0\0\x80\x3f"] * layer.h), p + "ffn_norm.weight": vector("F32", [b"\0\0\x80\x3f"] * layer.h)}
    out[p + "ffn_gate_inp.weight"] = tensor(layer.gate_dtype, layer.gate)
    if "gate_bias" in layer.expected:
        out[p + "ffn_gate_inp.bias"] = layer.expected["gate_bias"]
    if "e_score_correction_bias" in layer.expected:
        out[p + "exp_probs_b.bias"] = layer.expected["e_score_correction_bias"]
    for leaf in ("gate", "up", "down")[0 if layer.gated else 1:]:
        out[p + "ffn_%s_exps.weight" % leaf] = stack(layer.dtype, [getattr(x, leaf) for x in layer.experts])
    if layer.expert_bias:
        half = lambda rows: tensor(layer.expert_bias, rows)
        out[p + "ffn_gate_exps.bias"] = half([r[:layer.i] for r in layer.bias13])
        out[p + "ffn_up_exps.bias"] = half([r[layer.i:] for r in layer.bias13])
        out[p + "ffn_down_exps.bias"] = half(layer.bias2)
    if layer.shared_mlp:
        for leaf in ("gate", "up", "down")[0 if layer.gated else 1:]:
            out[p + "ffn_%s_shexp.weight" % leaf] = tensor(layer.shared_dtype, getattr(layer.shared_mlp, leaf))
    if "shared_gate" in layer.expected:
        gate = layer.expected["shared_gate"]  # [1, H]; writers drop axes of one
        out[p + "ffn_gate_inp_shexp.weight"] = (gate.dtype, gate.shape[1:], gate.data)
    return out


def gguf_file(metadata, tensors, alignment=32):
    """tensors: name -> tiny_model.Tensor of a plain type, or a (type name, shape, bytes) triple."""
    return gguf(metadata, {n: t if isinstance(t, tuple) else (t.dtype, t.shape, t.data) for n, t in tensors.items()}, alignment)
