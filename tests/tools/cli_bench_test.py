#!/usr/bin/env python3
"""`moesaic bench`: points, plots, routings, ranks.

usage: cli_bench_test.py TOOL SOURCE_DIR [unittest arguments]
"""

import json
import subprocess
import sys
import xml.etree.ElementTree
from pathlib import Path

from cli_support import BAD_INPUT, MODELS, OK, UNSUPPORTED, USAGE, ToolTest, main, run

class Bench(ToolTest):
    SHAPE = "64,4,128,64"
    KEYS = (
        "shape stage tokens device backend backend_note quant routing median_us min_us samples bytes flops gbps tflops floor_us "
        "floor_pct ceilings rel_l2 bound threads commit machine"
    ).split()

    def points(self, *arguments):
        result = run("bench", "--device", "cpu", "--shape", self.SHAPE, "--seconds", "0.05", *arguments, "--json")
        self.assertEqual(result.returncode, OK, result.stderr)
        points = [json.loads(line) for line in result.stdout.splitlines()]
        for point in points:
            self.finite(point)
            self.assertEqual([key for key in self.KEYS if key not in point], [])
            self.assertGreater(point["median_us"], 0)
            self.assertGreaterEqual(point["median_us"], point["min_us"])
            self.assertLessEqual(point["rel_l2"], point["bound"])
            self.assertGreater(point["ceilings"]["read_gbps"], 0)
            self.assertGreaterEqual(point["threads"], 1)
        return points

    def test_one_object_per_point(self):
        for stage in ("gate", "route", "experts", "kernel", "layer"):
            with self.subTest(stage=stage):
                points = self.points("--stage", stage, "--tokens", "1,3")
                self.assertEqual([(p["stage"], p["tokens"]) for p in points], [(stage, 1), (stage, 3)])
                # A word about the general kernel of a GPU: not on a CPU.
                self.assertEqual({p["backend_note"] for p in points}, {""})

    def test_nan_in_weights_is_data(self):
        model = self.copy_model("mini-qwen3-moe")
        self.edit_weights(model, "model.layers.1.mlp.gate.weight", lambda data: b"\xc0\x7f" + data[2:])  # BF16
        point = self.json_of("bench", "--model", model, "--stage", "gate", "--tokens", 1, "--seconds", 0.01)
        self.assertGreater(point["rel_l2"], 0)  # of the other experts' logits
        self.assertLessEqual(point["rel_l2"], point["bound"])

    def test_every_door_of_the_layer(self):
        """The same result (checked before it is timed), without the work in front of the door."""
        common = ("--stage", "layer", "--tokens", "5")
        hidden, logits, topk = (self.points(*common, "--door", door)[0] for door in ("hidden", "logits", "topk"))
        self.assertEqual([p["door"] for p in (hidden, logits, topk)], ["hidden", "logits", "topk"])
        self.assertEqual(self.points(*common)[0]["door"], "hidden")
        self.assertEqual({p["rel_l2"] for p in (hidden, logits, topk)}, {hidden["rel_l2"]})
        gate = 2 * 5 * 64 * 128  # tokens x E x H multiply-adds
        self.assertEqual([hidden["flops"] - p["flops"] for p in (logits, topk)], [gate, gate])
        self.assertNotIn("door", self.points("--tokens", "5")[0])

    def test_a_stage_without_experts_has_no_backend_of_theirs(self):
        for stage in ("gate", "route"):
            self.fails(UNSUPPORTED, "--backend cpu_avx2", "got --stage " + stage,
                       arguments=("bench", "--shape", self.SHAPE, "--stage", stage, "--backend", "cpu_avx2"))  # fmt: skip

    def test_blocks_of_gate_and_up_end_ragged(self):
        for stage, quant in (("experts", "fp8-block"), ("layer", "fp8-block-64x64")):
            common = ("--device", "cpu", "--seconds", "0", "--tokens", "3", "--json")
            result = run("bench", "--shape", "2,2,257,129", "--stage", stage, "--quant", quant, *common)
            self.assertEqual(result.returncode, OK, result.stderr)
            point = json.loads(result.stdout)
            self.assertLessEqual(point["rel_l2"], point["bound"])

    def test_plot_with_peers(self):
        rows = [
            {"impl": "other <one>", "format": "bf16", "E": 64, "top_k": 4, "hidden": 128, "intermediate": 64, "M": m,
             "gemm12_us": 40 + m} for m in (1, 3)
        ] + [{"impl": "of another layer", "format": "bf16", "E": 8, "top_k": 4, "hidden": 128, "intermediate": 64,
              "M": 1, "gemm12_us": 5},
             {"impl": "of another format", "format": "bf16-fp8", "E": 64, "top_k": 4, "hidden": 128, "intermediate": 64,
              "M": 1, "gemm12_us": 5},
             {"impl": "the same format", "format": "bf16x", "E": 64, "top_k": 4, "hidden": 128, "intermediate": 64,
              "M": 3, "gemm12_us": 50}]  # fmt: skip
        peers, picture = self.folder / "peers.jsonl", self.folder / "time.svg"
        peers.write_text("".join(json.dumps(row) + "\n" for row in rows))
        points = self.points("--tokens", "1,3", "--peers", peers, "--plot", picture)
        self.assertEqual([p["peer_us"] for p in points], [41, 43])
        svg = xml.etree.ElementTree.parse(picture).getroot()
        self.assertTrue(svg.tag.endswith("svg"))
        text = [t.text for t in svg.iter() if t.tag.endswith("text")]
        for word in ("moesaic experts", "other <one>", "floor", "tokens"):
            self.assertIn(word, text)
        self.assertNotIn("of another layer", text)
        self.assertNotIn("of another format", text)
        self.assertIn("the same format", text)
        # Names reach the picture as they reach a terminal: XML knows no control characters.
        rows[0]["impl"] = "bad\x1b[31m\u0001\u202e&name"
        peers.write_text(json.dumps(rows[0]) + "\n")
        self.points("--tokens", "1", "--peers", peers, "--plot", picture)
        text = [t.text for t in xml.etree.ElementTree.parse(picture).getroot().iter() if t.tag.endswith("text")]
        self.assertTrue(any(t.startswith("bad\\x1b[31m\\x01") and t.endswith("&name") for t in text), text)
        peers.write_text(json.dumps({**rows[0], "hidden": 256}) + "\n")
        result = run("bench", "--shape", self.SHAPE, "--tokens", 1, "--seconds", 0, "--device", "cpu", "--peers", peers)
        self.assertEqual(result.returncode, OK, result.stderr)
        self.assertIn("has no row of this layer: format bf16, E 64, top_k 4, hidden 128, intermediate 64", result.stderr)
        peers.write_text("".join(json.dumps(row) + "\n" for row in rows))
        lines = [t for t in svg.iter() if t.tag.endswith("polyline")]
        self.assertEqual([len(t.get("points").split()) for t in lines], [2, 1, 2, 2])
        bad = ["bench", "--shape", self.SHAPE, "--tokens", "1", "--seconds", "0.01", "--device", "cpu"]
        self.fails(BAD_INPUT, "cannot be opened", arguments=[*bad, "--peers", self.folder / "none"])
        self.fails(BAD_INPUT, "directory", arguments=[*bad, "--peers", self.folder])
        peers.write_text("[1, 2]\n")
        self.fails(BAD_INPUT, "line 1", arguments=[*bad, "--peers", peers])
        self.fails(USAGE, "cannot create", arguments=[*bad, "--plot", self.folder / "no" / "such.svg"])
        self.fails(USAGE, "--force requires --plot", arguments=[*bad, "--force"])

    def test_skewed_routing_touches_fewer_experts(self):
        for stage in ("experts", "layer"):
            with self.subTest(stage=stage):
                size = {
                    kind: self.points("--stage", stage, "--tokens", "32", "--routing", kind)[0]["bytes"]
                    for kind in ("uniform", "zipf:1.5", "one")
                }
                self.assertLess(size["zipf:1.5"], 0.95 * size["uniform"])
                self.assertLess(size["one"], 0.25 * size["uniform"])

    def test_shared_experts_count_as_they_are_kept(self):
        model = self.folder / "converted"
        self.json_of("convert", "--model", MODELS / "mini-deepseek-v3", "--quant", "mxfp4", "--output", model)
        layer = ["bench", "--stage", "layer", "--tokens", "64", "--seconds", "0", "--device", "cpu"]
        weights = 3 * 256 * 128  # of one expert: 16 in MXFP4, a shared one in bf16
        rest = 2 * 16 * 256 + 2 * 2 * 64 * 256  # the gate, rows in and out
        self.assertEqual(self.json_of(*layer, "--model", model)["bytes"], weights * (16 * 17 / 32 + 2) + rest)

    def test_schemes_that_only_checkpoints_have(self):
        for name in ("fp8-static", "fp8-block-64x64", "fp8-block-32x128", "uint4-g128", "int4-g128-act-order", "fp4-bf16", "q2_k", "q3_k", "q4_k", "q5_k", "q6_k", "q3_k_m", "q5_k_m", "q4_0-int8", "q4_k-int8"):
            with self.subTest(scheme=name):
                points = self.points("--quant", name, "--tokens", "1,9")
                self.assertEqual({p["quant"] for p in points}, {name})
        model = ["bench", "--model", MODELS / "mini-qwen3-moe", "--quant", "q4_k"]
        self.fails(USAGE, "--quant: got 'q4_k'", arguments=model)

    def test_routes_of_every_family(self):
        tiny = self.folder / "tiny"
        generator = Path(sys.argv[2]) / "tests" / "checkpoint" / "make_tiny_checkpoints.py"
        subprocess.run([sys.executable, generator, tiny], check=True, capture_output=True)
        for model in sorted(path for path in tiny.iterdir() if path.is_dir()):
            with self.subTest(model.name):
                result = run("bench", "--model", model, "--stage", "route", "--tokens", 3, "--seconds", 0)
                refused = {"phimoe": "sparse_mixer", "longcat": "zero_expert", "deepseek_v4_hash": "hash"}
                word = next((w for name, w in refused.items() if model.name.startswith(name)), "")
                if model.name.startswith("longcat_zero_"):  # have none
                    word = ""
                self.assertEqual(result.returncode, UNSUPPORTED if word else OK, result.stderr)
                self.assertIn(word, result.stderr)

    def test_refusals(self):
        point = ["bench", "--shape", self.SHAPE, "--tokens", "1"]
        self.fails(USAGE, "zipf", arguments=[*point, "--routing", "zipf:x"])
        self.fails(USAGE, "--stage", "nearest is 'layer'", arguments=[*point, "--stage", "Layer"])
        self.fails(USAGE, "--door", "nearest is 'logits'", arguments=[*point, "--door", "Logits"])
        self.fails(UNSUPPORTED, "--door topk: got --stage experts, need layer", arguments=[*point, "--door", "topk"])
        self.fails(USAGE, "'FP8'", "fp8-block", "q4_k", arguments=[*point, "--quant", "FP8"])
        model = ["bench", "--model", MODELS / "mini-qwen3-moe", "--stage", "layer", "--tokens", "1"]
        self.fails(UNSUPPORTED, "own gate", arguments=[*model, "--routing", "one"])


class BenchOverRanks(ToolTest):
    def test_layer_on_three_threads(self):
        common = ["bench", "--shape", "8,2,64,32", "--tokens", 4, "--seconds", 0, "--ranks", 3]
        value = self.json_of(*common, "--stage", "layer")
        self.assertEqual((value["ranks"], value["tokens_in_all"], value["transport"]), (3, 12, "all_to_all"))
        self.assertEqual([key for key in Bench.KEYS if key not in value], [])
        # Twelve rows through two of eight experts each, on every rank a gate of 8 x 64, all in BF16.
        expert, row = 3 * 64 * 32, 64
        self.assertEqual(value["flops"], 2 * 12 * (2 * expert + 8 * row))
        fixed = 3 * 2 * (8 * row + 2 * 4 * row)
        self.assertTrue(2 <= (value["bytes"] - fixed) / (2 * expert) <= 8)
        ceilings, us = value["ceilings"], value["median_us"]
        floor = max(value["bytes"] / ceilings["read_gbps"] * 1e-3, value["flops"] / ceilings["gflops"] * 1e-3)
        self.assertAlmostEqual(value["floor_us"] / floor, 1)
        self.assertAlmostEqual(value["floor_pct"] / (100 * floor / us), 1)
        self.assertAlmostEqual(value["gbps"] / (value["bytes"] / us * 1e-3), 1)
        self.assertAlmostEqual(value["tflops"] / (value["flops"] / us * 1e-6), 1)
        # Two ranks with the same rows choose no expert more, and each have a gate.
        pair = self.json_of("bench", "--shape", "8,2,64,32", "--tokens", 4, "--seconds", 0, "--ranks", 2, "--tp", 2, "--stage", "layer")
        self.assertEqual(pair["flops"], 2 * 4 * (2 * expert + 2 * 8 * row))
        # One row is compared, whose error may scatter (docs/accuracy.md) and is rounded to BF16.
        self.assertAlmostEqual(pair["bound"], 1.3 * 6e-3 + 2**-8)
        self.assertGreater(value["bytes_sent_per_rank"], 0)
        self.assertLessEqual(value["rel_l2"], value["bound"])
        self.assertEqual(len(value["per_rank"]["median_us"]), 3)
        self.fails(UNSUPPORTED, "--stage", arguments=common)
        self.fails(UNSUPPORTED, "--no-ep", arguments=[*common, "--stage", "layer", "--no-ep"])


if __name__ == "__main__":
    main()
