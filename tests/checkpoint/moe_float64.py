"""The output of an MoE block in double precision, in plain Python."""

import math


def dot(a, b):
    return math.fsum(x * y for x, y in zip(a, b))


def silu(x):
    return x / (1 + math.exp(-x))


def mlp(x, gate, up, down):
    middle = [silu(dot(g, x)) * dot(u, x) for g, u in zip(gate, up)]
    return [dot(row, middle) for row in down]


def moe(x, router, experts, top_k=2, renormalize=True, shared=None):
    """x, router: rows of floats; experts: (gate, up, down). Softmax, top-k, renormalised or not."""
    logits = [dot(row, x) for row in router]
    largest = max(logits)
    scores = [math.exp(v - largest) for v in logits]
    total = sum(scores)
    chosen = sorted(range(len(scores)), key=lambda e: (-scores[e], e))[:top_k]
    weights = [scores[e] / (sum(scores[c] for c in chosen) if renormalize else total) for e in chosen]
    out = mlp(x, *shared) if shared else [0.0] * len(x)
    for e, w in zip(chosen, weights):
        out = [o + w * y for o, y in zip(out, mlp(x, *experts[e]))]
    return out, chosen


def llama4(x, router, experts, shared, top_k=1):
    """Top-k of the logits; the sigmoid of its logit multiplies each expert's input."""
    logits = [dot(row, x) for row in router]
    chosen = sorted(range(len(logits)), key=lambda e: (-logits[e], e))[:top_k]
    out = mlp(x, *shared)
    for e in chosen:
        weight = 1 / (1 + math.exp(-logits[e]))
        out = [a + b for a, b in zip(out, mlp([weight * v for v in x], *experts[e]))]
    return out, chosen


def swigluoai(gate, up, alpha=1.702, limit=7.0):
    gate, up = min(gate, limit), max(-limit, min(up, limit))
    return (up + 1) * gate / (1 + math.exp(-alpha * gate))


def gpt_oss(x, router, experts, bias, biases, top_k=2):
    """Softmax over the top-k of logits + bias; biases: per expert (of gate, of up, of down)."""
    logits = [dot(row, x) + b for row, b in zip(router, bias)]
    chosen = sorted(range(len(logits)), key=lambda e: (-logits[e], e))[:top_k]
    scores = [math.exp(logits[e] - logits[chosen[0]]) for e in chosen]
    out = [0.0] * len(x)
    for e, score in zip(chosen, scores):
        (gate, up, down), (bg, bu, bd) = experts[e], biases[e]
        middle = [swigluoai(dot(g, x) + i, dot(u, x) + j) for g, u, i, j in zip(gate, up, bg, bu)]
        out = [o + score / sum(scores) * (dot(row, middle) + b) for o, row, b in zip(out, down, bd)]
    return out, chosen
