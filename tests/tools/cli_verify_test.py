#!/usr/bin/env python3
"""`moesaic verify`: bounds, wrong outputs, hostile golden files.

usage: cli_verify_test.py TOOL SOURCE_DIR [unittest arguments]
"""

import math
import shutil
import struct
import subprocess
import sys
from pathlib import Path

from cli_support import (
    BAD_INPUT,
    BUNDLED,
    FAILED,
    MODELS,
    OK,
    ToolTest,
    golden_input,
    main,
    read_safetensors,
    run,
    tensor_of,
    write_safetensors,
)

class Verify(ToolTest):
    KEYS = {"layer", "tokens", "rel_l2", "cosine", "max_abs", "topk_mismatches", "bound", "pass", "backend_note"}

    def test_every_bundled_checkpoint_within_its_bound(self):
        for model, layer in BUNDLED.items():
            for quant, limit in (("as-is", 6e-3), ("f32", 2e-6)):
                with self.subTest(model=model, quant=quant):
                    golden = MODELS / model / "golden.safetensors"
                    value = self.json_of("verify", "--model", MODELS / model, "--golden", golden, "--quant", quant)
                    self.assertIs(value["pass"], True)
                    self.assertEqual([item["layer"] for item in value["layers"]], [layer])
                    item = value["layers"][0]
                    self.assertLessEqual(self.KEYS, item.keys())
                    self.assertEqual(item["tokens"], 256)
                    self.assertEqual(item["topk_mismatches"], 0)
                    self.assertEqual(item["topk_source"], "golden")
                    self.assertGreater(item["rel_l2"], 0)
                    self.assertLessEqual(item["rel_l2"], limit)
                    self.assertLessEqual(item["rel_l2"], item["bound"])
                    self.assertGreater(item["cosine"], 0.9999)
                    self.assertEqual(value["worst_rel_l2"], item["rel_l2"])
                    for key in ("router_logits", "topk_weights"):
                        self.assertGreater(item[key]["rel_l2"], 0)
                        self.assertLess(item[key]["bound"], 1e-4)
                        self.assertLess(item[key]["rel_l2"], 0.1 * item[key]["bound"])
                    if quant == "f32":
                        self.assertLess(item["topk_weight_max_abs"], 1e-5)

    def test_a_plain_checkpoint_in_every_scheme(self):
        """Weights are quantised while they are loaded; the golden outputs are of the plain ones."""
        model = MODELS / "mini-qwen3-moe"
        for quant, least in (("fp8-tensor", 1e-2), ("mxfp8", 1e-2), ("int8", 5e-3), ("int4-g128", 4e-2), ("int4-g128-int8", 4e-2), ("nvfp4", 5e-2), ("mxfp4", 7e-2)):
            with self.subTest(quant=quant):
                item = self.json_of("verify", "--model", model, "--quant", quant)["layers"][0]
                self.assertIs(item["pass"], True)
                self.assertEqual(item["quant"], quant)
                self.assertGreater(item["rel_l2"], least)

    def edited_golden(self, model, edit):
        path, name = golden_input(model)
        header, blob = read_safetensors(path)
        tensors = {}
        for key, entry in header.items():
            begin, end = entry["data_offsets"]
            tensors[key] = (entry["dtype"], entry["shape"], blob[begin:end])
        edit(tensors, name[: -len(".input")])
        out = self.folder / "golden.safetensors"
        write_safetensors(out, tensors)
        return out

    def test_a_wrong_output_fails(self):
        def edit(tensors, prefix):
            dtype, shape, data = tensors[prefix + ".output"]
            values = list(struct.unpack(f"<{len(data) // 4}f", data))
            values[7] += 100.0
            tensors[prefix + ".output"] = (dtype, shape, struct.pack(f"<{len(values)}f", *values))

        golden = self.edited_golden("mini-qwen3-moe", edit)
        value = self.json_of("verify", "--model", MODELS / "mini-qwen3-moe", "--golden", golden, code=FAILED)
        self.assertIs(value["pass"], False)
        self.assertGreater(value["layers"][0]["max_abs"], 50)
        text = run("verify", "--model", MODELS / "mini-qwen3-moe", "--golden", golden)
        self.assertEqual(text.returncode, FAILED)
        self.assertIn("FAIL", text.stdout)
        self.assertIn("next:", text.stderr)

    def test_outputs_of_zeros(self):
        """A model whose down projections are zero computes zeros: 0 / 0 is no cosine."""
        model = self.folder / "zeros"
        shutil.copytree(MODELS / "mini-qwen3-moe", model)
        for shard in model.glob("model*.safetensors"):
            header, blob = read_safetensors(shard)
            tensors = {}
            for key, entry in header.items():
                begin, end = entry["data_offsets"]
                data = bytes(end - begin) if ".down_proj." in key else blob[begin:end]
                tensors[key] = (entry["dtype"], entry["shape"], data)
            write_safetensors(shard, tensors)

        def edit(tensors, prefix):
            dtype, shape, data = tensors[prefix + ".output"]
            tensors[prefix + ".output"] = (dtype, shape, bytes(len(data)))

        golden = self.edited_golden("mini-qwen3-moe", edit)
        item = self.json_of("verify", "--model", model, "--golden", golden)["layers"][0]
        self.assertEqual((item["rel_l2"], item["cosine"], item["pass"]), (0, 1, True))
        self.assertNotIn("nan", run("verify", "--model", model, "--golden", golden).stdout)
        value = self.json_of("verify", "--model", MODELS / "mini-qwen3-moe", "--golden", golden, code=FAILED)
        self.assertEqual(value["layers"][0]["cosine"], 0)

    def test_a_nan_in_the_golden_fails(self):
        def edit(tensors, prefix):
            dtype, shape, data = tensors[prefix + ".output"]
            tensors[prefix + ".output"] = (dtype, shape, data[:40] + struct.pack("<f", math.nan) + data[44:])

        golden = self.edited_golden("mini-qwen3-moe", edit)
        self.json_of("verify", "--model", MODELS / "mini-qwen3-moe", "--golden", golden, code=FAILED)

    def test_a_wrong_expert_is_a_mismatch(self):
        def edit(tensors, prefix):
            dtype, shape, data = tensors[prefix + ".gate.out2"]
            ids = list(struct.unpack(f"<{len(data) // 4}i", data))
            # The second token claims the first expert that it did not choose.
            ids[4] = next(e for e in range(16) if e not in ids[4:8])
            tensors[prefix + ".gate.out2"] = (dtype, shape, struct.pack(f"<{len(ids)}i", *ids))

        golden = self.edited_golden("mini-qwen3-moe", edit)
        value = self.json_of("verify", "--model", MODELS / "mini-qwen3-moe", "--golden", golden, code=FAILED)
        self.assertEqual(value["layers"][0]["topk_mismatches"], 1)

    def edited_floats(self, name, change, dtype="F32"):
        """The golden file of mini-qwen3-moe with change(list of a router tensor's floats), written as dtype."""

        def edit(tensors, prefix):
            _, shape, data = tensors[prefix + name]
            values = change(list(struct.unpack(f"<{len(data) // 4}f", data)))
            packed = struct.pack(f"<{len(values)}f", *values)
            if dtype == "BF16":  # to nearest
                words = struct.unpack(f"<{len(values)}I", packed)
                packed = struct.pack(f"<{len(values)}H", *((w + 0x7FFF + (w >> 16 & 1)) >> 16 for w in words))
            if dtype == "F16":
                packed = struct.pack(f"<{len(values)}e", *values)
            tensors[prefix + name] = (dtype, shape, packed)

        return self.edited_golden("mini-qwen3-moe", edit)

    def test_router_weights_and_logits_count(self):
        model = MODELS / "mini-qwen3-moe"

        def softmax(logits):
            scores = []
            for i in range(0, len(logits), 16):
                e = [math.exp(x) for x in logits[i : i + 16]]
                scores += [x / sum(e) for x in e]
            return scores

        def one(values, by):
            return values[:9] + [values[9] * by] + values[10:]

        cases = (
            (".gate.out1", "topk_weights", lambda v: v, OK),
            (".gate.out1", "topk_weights", lambda v: [math.nan] * len(v), FAILED),
            (".gate.out1", "topk_weights", lambda v: one(v, math.nan), FAILED),
            (".gate.out1", "topk_weights", lambda v: one(v, math.inf), FAILED),
            (".gate.out1", "topk_weights", lambda v: [2 * x for x in v], FAILED),
            (".gate.out1", "topk_weights", lambda v: one(v, 1.01), FAILED),
            (".gate.out0", "router_logits", lambda v: one(v, math.nan), FAILED),
            (".gate.out0", "router_logits", lambda v: [1.001 * x for x in v], FAILED),
            (".gate.out0", "router_logits", softmax, OK),  # what some routers return by that name
        )
        for name, key, change, code in cases:
            with self.subTest(name=name, code=code):
                golden = self.edited_floats(name, change)
                value = self.json_of("verify", "--model", model, "--golden", golden, code=code)
                self.assertIs(value["pass"], code == OK)
                item = value["layers"][0]
                self.assertEqual(item["topk_mismatches"], 0)
                self.assertIs(item[key]["rel_l2"] <= item[key]["bound"], code == OK)
        # The first NaN stays the worst, and no number hides it.
        golden = self.edited_floats(".gate.out1", lambda v: one(v, math.nan))
        item = self.json_of("verify", "--model", model, "--golden", golden, code=FAILED)["layers"][0]
        self.assertEqual((item["topk_weight_max_abs"], item["topk_weights"]["rel_l2"]), (sys.float_info.max,) * 2)
        self.assertIn("topk_weights: rel_l2 nan", run("verify", "--model", model, "--golden", golden).stdout)

    def test_router_tensors_may_be_rounded(self):
        model = MODELS / "mini-qwen3-moe"
        for name, key in ((".gate.out1", "topk_weights"), (".gate.out0", "router_logits")):
            with self.subTest(name):
                golden = self.edited_floats(name, lambda v: v, "BF16")
                item = self.json_of("verify", "--model", model, "--golden", golden)["layers"][0]
                self.assertGreater(item[key]["rel_l2"], 1e-4)
                golden = self.edited_floats(name, lambda v: [1.02 * x for x in v], "BF16")
                self.json_of("verify", "--model", model, "--golden", golden, code=FAILED)

    def test_outputs_may_be_rounded(self):
        model = MODELS / "mini-qwen3-moe"
        for dtype, low in (("BF16", 1e-3), ("F16", 1e-4)):
            golden = self.edited_floats(".output", lambda v: v, dtype)
            item = self.json_of("verify", "--model", model, "--golden", golden, "--quant", "f32")["layers"][0]
            self.assertGreater(item["rel_l2"], low)
            golden = self.edited_floats(".output", lambda v: [1.02 * x for x in v], dtype)
            self.json_of("verify", "--model", model, "--golden", golden, "--quant", "f32", code=FAILED)

    def test_without_router_tensors_float64_decides(self):
        def edit(tensors, prefix):
            for key in [key for key in tensors if ".gate." in key]:
                del tensors[key]

        golden = self.edited_golden("mini-deepseek-v3", edit)
        value = self.json_of("verify", "--model", MODELS / "mini-deepseek-v3", "--golden", golden)
        self.assertEqual(value["layers"][0]["topk_source"], "float64")
        self.assertEqual(value["layers"][0]["topk_mismatches"], 0)

    def test_hostile_golden_files(self):
        model = MODELS / "mini-qwen3-moe"

        def reshape(name, dtype, shape, data):
            def edit(tensors, prefix):
                tensors[prefix + name] = (dtype, shape, data)

            return edit

        def drop(tensors, prefix):
            del tensors[prefix + ".output"]

        def drop_ids(tensors, prefix):
            del tensors[prefix + ".gate.out2"]

        cases = {
            "input of another width": (reshape(".input", "F32", [2, 3], bytes(24)), ".input"),
            "input of rank 1": (reshape(".input", "F32", [256], bytes(1024)), ".input"),
            "integer input": (reshape(".input", "I32", [1, 256], bytes(1024)), "I32"),
            "no tokens": (reshape(".input", "F32", [0, 256], b""), "0 tokens"),
            "output of another shape": (reshape(".output", "F32", [255, 256], bytes(4 * 255 * 256)), ".output"),
            "integer output": (reshape(".output", "I32", [256, 256], bytes(4 * 256 * 256)), ".output"),
            "ids of another shape": (reshape(".gate.out2", "I32", [256, 3], bytes(4 * 256 * 3)), ".gate.out2"),
            "float ids": (reshape(".gate.out2", "F32", [256, 4], bytes(4 * 256 * 4)), ".gate.out2"),
            "weights of another shape": (reshape(".gate.out1", "F32", [255, 4], bytes(4 * 255 * 4)), ".gate.out1"),
            "integer weights": (reshape(".gate.out1", "I32", [256, 4], bytes(4 * 256 * 4)), "floating"),
            "weights without ids": (drop_ids, ".gate.out1"),
            "logits of another shape": (reshape(".gate.out0", "F32", [256, 4], bytes(4 * 256 * 4)), ".gate.out0"),
            "no pair": (drop, "need at least one"),
        }
        for name, (edit, word) in cases.items():
            with self.subTest(name):
                golden = self.edited_golden("mini-qwen3-moe", edit)
                self.fails(BAD_INPUT, word, arguments=["verify", "--model", model, "--golden", golden])

    def test_near_ties_prove_nothing(self):
        """Where only the chosen experts are recorded a gate that chooses nothing is no gate that may choose."""
        def only_ids(tensors, prefix):
            for name in list(tensors):
                if not name.endswith((".input", ".output", ".out2")):
                    del tensors[name]

        golden = self.edited_golden("mini-qwen3-moe", only_ids)
        verify = ["verify", "--golden", golden, "--model"]
        self.assertIs(self.json_of(*verify, MODELS / "mini-qwen3-moe")["pass"], True)
        model = self.folder / "model"
        gate = "model.layers.1.mlp.gate.weight"
        for name, edit, mismatches in (("zeros", lambda data: bytes(len(data)), 0),
                                       ("a NaN", lambda data: b"\xc0\x7f" + data[2:], 256)):  # fmt: skip
            with self.subTest(name):
                shutil.rmtree(model, ignore_errors=True)
                shutil.copytree(MODELS / "mini-qwen3-moe", model)
                self.edit_weights(model, gate, edit)
                item = self.json_of(*verify, model, code=FAILED)["layers"][0]
                self.assertEqual((item["topk_mismatches"], item["near_ties"]), (mismatches, 256 - mismatches))
        shutil.rmtree(model)
        shutil.copytree(MODELS / "mini-qwen3-moe", model)
        self.edit_weights(model, gate, lambda data: bytes(len(data)))
        self.assertIn("no output was compared", run(*verify, model).stdout)

    def test_logits_that_the_options_round_may_tie(self):
        for more in (["--router-logits-dtype", "bf16"], ["--no-gate-fp32"]):
            for model in ("mini-qwen3-moe", "mini-deepseek-v3"):
                with self.subTest(model=model, more=more):
                    value = self.json_of("verify", "--model", MODELS / model, *more)
                    self.assertEqual(value["layers"][0]["topk_mismatches"], 0)

    def test_a_layer_that_is_not_moe_is_refused(self):
        def edit(tensors, prefix):
            for name in (".input", ".output"):
                tensors["model.layers.0.mlp" + name] = tensors[prefix + name]

        golden = self.edited_golden("mini-qwen3-moe", edit)
        self.fails(BAD_INPUT, "model.layers.0.mlp", arguments=["verify", "--model", MODELS / "mini-qwen3-moe", "--golden", golden])
        value = self.json_of("verify", "--model", MODELS / "mini-qwen3-moe", "--golden", golden, "--layer", 1)
        self.assertIs(value["pass"], True)

    def test_a_shared_expert_beside_the_block_may_be_in_the_output_or_not(self):
        """Hooks on the block record it alone, implementations that fuse both their sum: either is right, nothing else."""
        tiny = self.folder / "tiny"
        generator = Path(sys.argv[2]) / "tests" / "checkpoint" / "make_tiny_checkpoints.py"
        subprocess.run([sys.executable, generator, tiny], check=True, capture_output=True)
        model, name = tiny / "granite_shared", "model.layers.0.block_sparse_moe"
        without = self.folder / "without"
        shutil.copytree(model, without)
        for path in without.glob("*.safetensors"):
            header, blob = read_safetensors(path)
            tensors = {}
            for key, entry in header.items():
                begin, end = entry["data_offsets"]
                data = bytes(end - begin) if ".shared_mlp." in key else blob[begin:end]
                tensors[key] = (entry["dtype"], entry["shape"], data)
            write_safetensors(path, tensors)
        rows = [math.sin(0.37 * i) for i in range(5 * 16)]
        states = self.folder / "states.safetensors"
        write_safetensors(states, {name + ".input": ("F32", [5, 16], struct.pack("<80f", *rows))})

        def output_of(folder):
            out = self.folder / "out.safetensors"
            self.json_of("run", "--model", folder, "--layer", 0, "--input", f"{states}:{name}.input", "--quant", "f32", "--output", out)
            return struct.unpack("<80f", tensor_of(out, "output")[2])

        both, alone = output_of(model), output_of(without)
        self.assertNotEqual(both, alone)
        neither = [b + (b - a) for b, a in zip(both, alone)]  # the shared expert twice
        for values, code in ((both, OK), (alone, OK), (neither, FAILED)):
            golden = self.folder / "golden.safetensors"
            write_safetensors(golden, {name + ".input": ("F32", [5, 16], struct.pack("<80f", *rows)),
                                       name + ".output": ("F32", [5, 16], struct.pack("<80f", *values))})  # fmt: skip
            value = self.json_of("verify", "--model", model, "--golden", golden, "--quant", "f32", code=code)
            self.assertIs(value["pass"], code == OK)

    def test_identity_experts_are_no_load_and_are_compared(self):
        tiny = self.folder / "tiny"
        generator = Path(sys.argv[2]) / "tests" / "checkpoint" / "make_tiny_checkpoints.py"
        subprocess.run([sys.executable, generator, tiny], check=True, capture_output=True)
        model, name, tokens = tiny / "longcat", "model.layers.0.mlp", 40
        rows = ("F32", [tokens, 16], struct.pack(f"<{tokens * 16}f", *(3 * math.sin(0.37 * i) for i in range(tokens * 16))))
        states, out = self.folder / "states.safetensors", self.folder / "out.safetensors"
        write_safetensors(states, {name + ".input": rows})
        self.edit_weights(model, name + ".router.e_score_correction_bias", lambda data: bytes(len(data)))
        for more in ([], ["--ranks", 2], ["--ranks", 2, "--eplb"]):
            value = self.json_of("run", "--model", model, "--layer", 0, "--input", f"{states}:{name}.input", "--quant", "f32",
                                 "--output", out, "--repeat", 1, "--force", *more)  # fmt: skip
            ids = struct.unpack(f"<{2 * tokens}i", tensor_of(out, "topk_ids")[2])
            weights = struct.unpack(f"<{2 * tokens}f", tensor_of(out, "topk_weights")[2])
            real = [e for e, w in zip(ids, weights) if e >= 0 and w != 0]
            self.assertTrue(0 < len(real) < 2 * tokens)  # some chose an identity expert
            self.assertEqual(value["expert_load"], [real.count(e) for e in range(4)])
        # Recorded as they are, or by number and with the weight that they had: the same choice.
        named = [e if w != 0 else 4 for e, w in zip(ids, weights)]
        for recorded, code in ((ids, OK), (named, OK), ([1 - e if e in (0, 1) else e for e in named], FAILED)):
            golden = self.folder / "golden.safetensors"
            write_safetensors(golden, {
                name + ".input": rows,
                name + ".output": tensor_of(out, "output"),
                name + ".router.out1": tensor_of(out, "topk_weights"),
                name + ".router.out2": ("I32", [tokens, 2], struct.pack(f"<{2 * tokens}i", *recorded)),
            })  # fmt: skip
            item = self.json_of("verify", "--model", model, "--golden", golden, "--quant", "f32", code=code)["layers"][0]
            self.assertIs(item["topk_mismatches"] == 0, code == OK)

    def test_missing_golden(self):
        self.fails(
            BAD_INPUT, "not_found", arguments=["verify", "--model", MODELS / "mini-qwen3-moe", "--golden", "/nonexistent"]
        )


if __name__ == "__main__":
    main()
