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


def llama4(x, router, experts, shared):
    """Top-1 of the logits; the sigmoid of the logit multiplies the expert's input."""
    logits = [dot(row, x) for row in router]
    best = max(range(len(logits)), key=lambda e: (logits[e], -e))
    weight = 1 / (1 + math.exp(-logits[best]))
    routed = mlp([weight * v for v in x], *experts[best])
    return [a + b for a, b in zip(routed, mlp(x, *shared))], [best]
