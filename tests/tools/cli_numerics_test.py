#!/usr/bin/env python3
"""Inputs outside what a scheme's bound is stated for: `run` and `verify` say so, --strict refuses, and the
bound of `verify` is that of these rows.

usage: cli_numerics_test.py TOOL SOURCE_DIR [unittest arguments]
"""

import json
import math
import random
import struct

from cli_support import (
    FAILED,
    MODELS,
    OK,
    UNSUPPORTED,
    ToolTest,
    golden_input,
    main,
    read_safetensors,
    run,
    tensor_of,
    write_safetensors,
)

MODEL, LAYER, HIDDEN, TOKENS = "mini-qwen3-moe", 1, 256, 256
PREFIX = "model.layers.1.mlp"


def f32_tensor(values, shape):
    return ("F32", shape, struct.pack(f"<{len(values)}f", *values))


class Numerics(ToolTest):
    def states(self, outlier=1.0, scale=1.0):
        """The recorded hidden states with channel 37 `outlier` times as large and everything times `scale`."""
        path, name = golden_input(MODEL)
        _, _, data = tensor_of(path, name)
        words = struct.unpack(f"<{TOKENS * HIDDEN}H", data)
        values = [struct.unpack("<f", struct.pack("<I", w << 16))[0] * scale for w in words]
        for i in range(37, len(values), HIDDEN):
            values[i] *= outlier
        file = self.folder / "states.safetensors"
        write_safetensors(file, {PREFIX + ".input": f32_tensor(values, [TOKENS, HIDDEN])})
        return file, values

    def golden(self, **change):
        """What fp32 arithmetic on the same weights makes of them, as a golden file."""
        file, values = self.states(**change)
        out = self.folder / "exact.safetensors"
        self.json_of("run", "--model", MODELS / MODEL, "--layer", LAYER, "--input", f"{file}:{PREFIX}.input",
                     "--quant", "f32", "--output", out)  # fmt: skip
        golden = self.folder / "golden.safetensors"
        write_safetensors(golden, {PREFIX + ".input": f32_tensor(values, [TOKENS, HIDDEN]), PREFIX + ".output": tensor_of(out, "output")})
        return golden

    def verify(self, golden, quant, *extra, code=OK):
        value = self.json_of("verify", "--model", MODELS / MODEL, "--golden", golden, "--quant", quant, *extra, code=code)
        return value["layers"][0]

    def test_recorded_rows_are_within_every_scheme(self):
        golden = MODELS / MODEL / "golden.safetensors"
        for quant in ("as-is", "f32", "fp8-block", "fp8-channel", "mxfp8", "int8", "mxfp4"):
            with self.subTest(quant):
                item = self.verify(golden, quant, "--strict")
                self.assertEqual(item["bound"], item["documented_bound"])
                self.assertEqual(item["numerics"]["rows"], TOKENS)
                self.assertEqual(item["numerics"]["outside"], 0)
                self.assertIs(item["numerics"]["within"], True)
                self.assertLessEqual(item["numerics"]["error_estimate"], item["numerics"]["bound"])

    def test_an_outlier_channel_is_said_and_its_bound_computed(self):
        golden = self.golden(outlier=100.0)
        item = self.verify(golden, "int8")
        self.assertIs(item["numerics"]["within"], False)
        self.assertGreater(item["numerics"]["beyond_bound"], 0)
        self.assertGreater(item["bound"], item["documented_bound"])
        self.assertLess(item["bound"], 0.3)
        self.assertLessEqual(item["rel_l2"], item["bound"])
        self.verify(golden, "int8", "--strict", code=FAILED)
        text = run("verify", "--model", MODELS / MODEL, "--golden", golden, "--quant", "int8")
        self.assertEqual(text.returncode, OK)
        self.assertIn("outside what the scheme's bound is stated for", text.stderr)
        # Weights alone are quantised: nothing to say.
        self.assertIs(self.verify(golden, "int8-bf16", "--strict")["numerics"]["within"], True)

    def test_rows_that_vanish_have_no_bound(self):
        item = self.verify(self.golden(scale=1e-5), "fp8-channel", code=FAILED)
        self.assertEqual(item["numerics"]["flushed"], TOKENS)
        self.assertIs(item["pass"], False)
        self.assertGreater(item["bound"], 1e300)

    def test_run_reports_and_strict_writes_nothing(self):
        file, _ = self.states(outlier=100.0)
        out = self.folder / "out.safetensors"
        arguments = ["run", "--model", MODELS / MODEL, "--layer", LAYER, "--input", f"{file}:{PREFIX}.input",
                     "--quant", "int8", "--output", out]  # fmt: skip
        self.fails(UNSUPPORTED, "--strict", "beyond the bound", arguments=[*arguments, "--strict"])
        self.assertFalse(out.exists())
        refusal = self.json_of(*arguments, "--strict", code=UNSUPPORTED)
        self.assertNotIn("\n", refusal["message"])
        self.assertNotIn("next:", refusal["message"])
        self.assertIn("--quant f32", refusal["next"])
        self.assertEqual(len(run(*arguments, "--strict").stderr.splitlines()), 2)
        value = self.json_of(*arguments)
        self.assertIs(value["numerics"]["within"], False)
        self.assertEqual(value["numerics"]["rows"], TOKENS)
        self.assertGreater(value["numerics"]["error_estimate"], value["numerics"]["bound"])
        measured = out.read_bytes()
        text = run(*arguments)
        self.assertIn("rounding beyond the bound", text.stdout)
        self.assertIn("next:", text.stderr)
        self.assertEqual(out.read_bytes(), measured)
        self.fails(UNSUPPORTED, "--strict", arguments=[*arguments, "--strict", "--ranks", 2])
        self.assertIsNone(self.json_of(*arguments, "--ranks", 2)["numerics"])

    def cancelling_model(self):
        """Two experts, both chosen with weight 1/2, whose outputs cancel but for a part in 4096."""
        hidden, inner, rng = 32, 32, random.Random(7)
        folder = self.folder / "cancelling"
        folder.mkdir()
        config = {"model_type": "mixtral", "hidden_size": hidden, "intermediate_size": inner, "num_local_experts": 2, "num_experts_per_tok": 2,
                  "num_hidden_layers": 1, "hidden_act": "silu", "torch_dtype": "float32"}  # fmt: skip
        (folder / "config.json").write_text(json.dumps(config))

        def matrix():
            values = [rng.gauss(0, 1) / math.sqrt(hidden) for _ in range(hidden * inner)]
            return list(struct.unpack(f"<{len(values)}f", struct.pack(f"<{len(values)}f", *values)))

        gate, up, down = matrix(), matrix(), matrix()
        tensors = {"model.layers.0.block_sparse_moe.gate.weight": f32_tensor([0.0] * 2 * hidden, [2, hidden])}
        for e, factor in ((0, 1.0), (1, -(1 - 2.0**-12))):
            # w1 and w3 differ in the order of columns of w2 only, so that rounding errors differ too.
            order = list(range(inner)) if e == 0 else list(reversed(range(inner)))
            rows = lambda m: [m[i * hidden + k] for i in order for k in range(hidden)]
            columns = [factor * down[h * inner + i] for h in range(hidden) for i in order]
            prefix = f"model.layers.0.block_sparse_moe.experts.{e}."
            tensors[prefix + "w1.weight"] = f32_tensor(rows(gate), [inner, hidden])
            tensors[prefix + "w3.weight"] = f32_tensor(rows(up), [inner, hidden])
            tensors[prefix + "w2.weight"] = f32_tensor(columns, [hidden, inner])
        write_safetensors(folder / "model.safetensors", tensors)
        x = [struct.unpack("<f", struct.pack("<f", rng.gauss(0, 1)))[0] for _ in range(8 * hidden)]
        y = []
        header, blob = read_safetensors(folder / "model.safetensors")
        down1 = tensor_of(folder / "model.safetensors", "model.layers.0.block_sparse_moe.experts.1.w2.weight")[2]
        down1 = struct.unpack(f"<{hidden * inner}f", down1)
        for t in range(8):
            row = x[t * hidden : (t + 1) * hidden]
            h = []
            for i in range(inner):
                g = math.fsum(row[k] * gate[i * hidden + k] for k in range(hidden))
                u = math.fsum(row[k] * up[i * hidden + k] for k in range(hidden))
                h.append(g / (1 + math.exp(-g)) * u)
            back = list(reversed(h))
            for n in range(hidden):
                parts = [h[i] * down[n * inner + i] for i in range(inner)]
                parts += [back[i] * down1[n * inner + i] for i in range(inner)]
                y.append(0.5 * math.fsum(parts))
        name = "model.layers.0.block_sparse_moe"
        write_safetensors(folder / "golden.safetensors", {name + ".input": f32_tensor(x, [8, hidden]), name + ".output": f32_tensor(y, [8, hidden])})
        return folder

    def test_errors_are_relative_to_the_parts_where_experts_cancel(self):
        model = self.cancelling_model()
        item = self.json_of("verify", "--model", model, "--quant", "f32")["layers"][0]
        self.assertIs(item["pass"], True)
        self.assertEqual(item["documented_bound"], 2e-6)
        self.assertGreater(item["cancellation"], 1000)
        self.assertLessEqual(item["rel_l2"], item["bound"])
        self.assertLess(item["rel_l2"] / item["cancellation"], 2e-6)
        self.assertGreater(item["rel_l2"], 2e-6, "nothing cancels: the case shows nothing")


if __name__ == "__main__":
    main()
