#!/usr/bin/env python3
"""The doors of a layer beside each other: what a call costs with hidden states alone (the closed layer: gate, router
and experts are its own), with router logits, and with experts and weights, and the experts by themselves and in a
ModularKernel.

    python3 bench/doors.py build/release/bin/moesaic --device cpu --shape 64,8,1024,512 --tokens 1,64 --threads 1
    python3 bench/doors.py build/gpu/bin/moesaic --device cuda --shape qwen3-30b --quant fp8-block --tokens 1,64,1024

Each is timed by `moesaic bench`, in turn and several times over, so that a busy or a warmer machine meets all of them;
of every round the median, and of the rounds the smallest. A table per number of tokens: microseconds, and how much of
the closed layer's time that is. The stages together are the layer: gate + route + kernel (+ shared experts).
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys

DOORS = {
    "layer, hidden states": ("--stage", "layer", "--door", "hidden"),
    "layer, logits": ("--stage", "layer", "--door", "logits"),
    "layer, experts and weights": ("--stage", "layer", "--door", "topk"),
    "gate": ("--stage", "gate"),
    "route": ("--stage", "route"),
    "kernel": ("--stage", "kernel"),
    "experts": ("--stage", "experts"),
}


def points(tool: str, words: list[str]) -> dict[int, float]:
    """Median microseconds by tokens."""
    run = subprocess.run([tool, "bench", *words, "--json"], capture_output=True, text=True)
    if run.returncode != 0:
        sys.exit(f"{' '.join([tool, 'bench', *words])}: {run.stderr.strip()}")
    rows = [json.loads(line) for line in run.stdout.splitlines() if line.startswith("{")]
    return {row["tokens"]: row["median_us"] for row in rows if "median_us" in row}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tool")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--shape", default="64,8,1024,512")
    parser.add_argument("--tokens", default="1,64")
    parser.add_argument("--seconds", default="0.3")
    own, others = parser.parse_known_args()
    common = ["--shape", own.shape, "--tokens", own.tokens, "--seconds", own.seconds, *others]
    best: dict[tuple[str, int], float] = {}
    for _ in range(own.rounds):
        for name, words in DOORS.items():
            for tokens, us in points(own.tool, [*words, *common]).items():
                best[name, tokens] = min(us, best.get((name, tokens), us))
    for tokens in (int(t) for t in own.tokens.split(",")):
        whole = best["layer, hidden states", tokens]
        print(f"{own.shape} {' '.join(others)}: {tokens} tokens")
        for name in DOORS:
            print(f"  {name:28} {best[name, tokens]:10.1f} us {best[name, tokens] / whole:6.2f}")


if __name__ == "__main__":
    main()
