#!/usr/bin/env python3
"""Runs the tool as a user does, on the bundled checkpoints: output, JSON, exit codes, messages.

usage: cli_test.py TOOL SOURCE_DIR [unittest arguments]
"""

import json
import math
import os
import shutil
import struct
import subprocess
import sys
import tempfile
import unittest
import xml.etree.ElementTree
from pathlib import Path

TOOL = ""
MODELS = Path()
BUNDLED = {"mini-deepseek-v3": 1, "mini-qwen3-moe": 1, "mini-gpt-oss": 0}  # with the layer of the golden file
OK, FAILED, USAGE, BAD_INPUT, UNSUPPORTED, DEVICE, INTERNAL = range(7)


def run(*arguments, env=None):
    """Standard input is empty and stderr is no terminal, as in a script."""
    return subprocess.run(
        [TOOL, *(str(a) for a in arguments)],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, **(env or {})},
    )


def read_safetensors(path):
    data = Path(path).read_bytes()
    (size,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + size])
    header.pop("__metadata__", None)
    return header, data[8 + size :]


def write_safetensors(path, tensors):
    """tensors: name -> (dtype, shape, bytes)"""
    header, blob = {}, b""
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(blob), len(blob) + len(data)]}
        blob += data
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    Path(path).write_bytes(struct.pack("<Q", len(text)) + text + blob)


def tensor_of(path, name):
    header, blob = read_safetensors(path)
    entry = header[name]
    begin, end = entry["data_offsets"]
    return entry["dtype"], entry["shape"], blob[begin:end]


def golden_input(model):
    return MODELS / model / "golden.safetensors", f"model.layers.{BUNDLED[model]}.mlp.input"


class ToolTest(unittest.TestCase):
    maxDiff = None

    def setUp(self):
        self.folder = Path(tempfile.mkdtemp())
        self.addCleanup(shutil.rmtree, self.folder)

    def finite(self, value, where="$"):
        if isinstance(value, dict):
            for key, item in value.items():
                self.finite(item, f"{where}.{key}")
        elif isinstance(value, list):
            for item in value:
                self.finite(item, where)
        elif isinstance(value, float):
            self.assertTrue(math.isfinite(value), where)

    def json_of(self, *arguments, code=OK):
        """Runs with --json: stdout is one object on one line, all numbers finite."""
        result = run(*arguments, "--json")
        self.assertEqual(result.returncode, code, result.stdout + result.stderr)
        self.assertEqual(result.stdout.count("\n"), 1, result.stdout)

        def refuse(text):
            raise AssertionError(f"{text} is not JSON")

        value = json.loads(result.stdout, parse_constant=refuse)
        self.finite(value)
        return value

    def fails(self, code, *words, arguments):
        """Fails with this code, in words that include these and a next step, with nothing on stdout;
        the same as JSON."""
        result = run(*arguments)
        self.assertEqual(result.returncode, code, result.stdout + result.stderr)
        self.assertEqual(result.stdout, "")
        for word in (*words, "error:", "next:"):
            self.assertIn(word, result.stderr)
        value = self.json_of(*arguments, code=code)
        self.assertEqual(value["exit_code"], code)
        self.assertTrue(value["error"] and value["message"] and value["next"])

    def copy_model(self, model):
        target = self.folder / model
        shutil.copytree(MODELS / model, target)
        for path in target.iterdir():
            path.chmod(0o644)
        return target


class Inspect(ToolTest):
    def test_every_bundled_checkpoint(self):
        for model, layer in BUNDLED.items():
            with self.subTest(model):
                value = self.json_of("inspect", MODELS / model)
                config = json.loads((MODELS / model / "config.json").read_text())
                self.assertEqual(value["model_type"], config["model_type"])
                self.assertEqual([item["layer"] for item in value["layers"]], [layer])
                item = value["layers"][0]
                experts = config.get("n_routed_experts") or config.get("num_experts") or config["num_local_experts"]
                self.assertEqual(item["num_experts"], experts)
                self.assertEqual(item["top_k"], config["num_experts_per_tok"])
                self.assertEqual(item["hidden_size"], config["hidden_size"])
                self.assertEqual(
                    item["intermediate_size"], config.get("moe_intermediate_size", config["intermediate_size"])
                )
                self.assertEqual(item["shared_experts"], config.get("n_shared_experts", 0))
                self.assertEqual(item["quant"], "bf16")
                self.assertTrue(item["routing"] and item["activation"])
                self.assertGreater(item["bytes"], 1_000_000)
                self.assertEqual(value["problems"], [])

    def test_text_names_the_layer(self):
        result = run("inspect", MODELS / "mini-gpt-oss")
        self.assertEqual(result.returncode, OK)
        self.assertIn("gpt_oss", result.stdout)
        self.assertIn("swigluoai", result.stdout)
        self.assertEqual(result.stderr, "")

    def test_missing_folder(self):
        self.fails(BAD_INPUT, "not_found", arguments=["inspect", self.folder / "nothing-here"])

    def test_file_instead_of_folder(self):
        path = self.folder / "file"
        path.write_text("x")
        self.fails(BAD_INPUT, arguments=["inspect", path])

    def test_unknown_family_names_the_nearest(self):
        target = self.copy_model("mini-qwen3-moe")
        config = json.loads((target / "config.json").read_text())
        config["model_type"] = "qwen3_mo"
        (target / "config.json").write_text(json.dumps(config))
        self.fails(UNSUPPORTED, "qwen3_moe", arguments=["inspect", target])

    def test_config_that_is_not_json(self):
        target = self.copy_model("mini-qwen3-moe")
        (target / "config.json").write_text("{")
        self.fails(BAD_INPUT, "config.json", arguments=["inspect", target])

    def test_shard_with_a_damaged_header(self):
        target = self.copy_model("mini-qwen3-moe")
        shard = sorted(target.glob("model-*.safetensors"))[0]
        data = bytearray(shard.read_bytes())
        data[8] = ord("[")
        shard.write_bytes(data)
        self.fails(BAD_INPUT, "corrupt_file", shard.name, arguments=["inspect", target])

    def test_truncated_shard(self):
        target = self.copy_model("mini-qwen3-moe")
        shard = sorted(target.glob("model-*.safetensors"))[-1]
        shard.write_bytes(shard.read_bytes()[:-1])
        self.fails(BAD_INPUT, "corrupt_file", arguments=["inspect", target])


class Verify(ToolTest):
    KEYS = {"layer", "tokens", "rel_l2", "cosine", "max_abs", "topk_mismatches", "bound", "pass"}

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
                    if quant == "f32":
                        self.assertLess(item["topk_weight_max_abs"], 1e-5)

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

        cases = {
            "input of another width": (reshape(".input", "F32", [2, 3], bytes(24)), ".input"),
            "input of rank 1": (reshape(".input", "F32", [256], bytes(1024)), ".input"),
            "integer input": (reshape(".input", "I32", [1, 256], bytes(1024)), "I32"),
            "no tokens": (reshape(".input", "F32", [0, 256], b""), "0 tokens"),
            "output of another shape": (reshape(".output", "F32", [255, 256], bytes(4 * 255 * 256)), ".output"),
            "integer output": (reshape(".output", "I32", [256, 256], bytes(4 * 256 * 256)), ".output"),
            "ids of another shape": (reshape(".gate.out2", "I32", [256, 3], bytes(4 * 256 * 3)), ".gate.out2"),
            "float ids": (reshape(".gate.out2", "F32", [256, 4], bytes(4 * 256 * 4)), ".gate.out2"),
            "no pair": (drop, "need at least one"),
        }
        for name, (edit, word) in cases.items():
            with self.subTest(name):
                golden = self.edited_golden("mini-qwen3-moe", edit)
                self.fails(BAD_INPUT, word, arguments=["verify", "--model", model, "--golden", golden])

    def test_a_layer_that_is_not_moe_is_refused(self):
        def edit(tensors, prefix):
            for name in (".input", ".output"):
                tensors["model.layers.0.mlp" + name] = tensors[prefix + name]

        golden = self.edited_golden("mini-qwen3-moe", edit)
        self.fails(BAD_INPUT, "model.layers.0.mlp", arguments=["verify", "--model", MODELS / "mini-qwen3-moe", "--golden", golden])
        value = self.json_of("verify", "--model", MODELS / "mini-qwen3-moe", "--golden", golden, "--layer", 1)
        self.assertIs(value["pass"], True)

    def test_missing_golden(self):
        self.fails(
            BAD_INPUT, "not_found", arguments=["verify", "--model", MODELS / "mini-qwen3-moe", "--golden", "/nonexistent"]
        )


class Run(ToolTest):
    def run_layer(self, model, *extra):
        path, name = golden_input(model)
        out = self.folder / "out.safetensors"
        value = self.json_of(
            "run", "--model", MODELS / model, "--layer", BUNDLED[model], "--input", f"{path}:{name}",
            "--output", out, "--repeat", 2, *extra
        )  # fmt: skip
        return value, out

    def test_every_bundled_checkpoint(self):
        for model, layer in BUNDLED.items():
            with self.subTest(model):
                value, out = self.run_layer(model)
                self.assertEqual((value["layer"], value["tokens"]), (layer, 256))
                self.assertIn(value["device"], ("cpu", "cuda:0"))
                self.assertGreater(value["time_us"]["median"], 0)
                self.assertGreaterEqual(value["time_us"]["median"], value["time_us"]["min"])
                self.assertGreater(value["tokens_per_s"], 0)
                dtype, shape, data = tensor_of(out, "topk_ids")
                top_k = shape[1]
                self.assertEqual((dtype, shape[0]), ("I32", 256))
                ids = struct.unpack(f"<{256 * top_k}i", data)
                load = [ids.count(e) for e in range(len(value["expert_load"]))]
                self.assertEqual(value["expert_load"], load)
                self.assertEqual(tensor_of(out, "topk_weights")[:2], ("F32", [256, top_k]))
                self.assertEqual(tensor_of(out, "output")[:2], ("F32", [256, 256]))

    def test_output_dtype(self):
        _, out = self.run_layer("mini-qwen3-moe", "--output-dtype", "bf16")
        self.assertEqual(tensor_of(out, "output")[:2], ("BF16", [256, 256]))

    def test_threads_do_not_change_a_bit(self):
        results = []
        for threads in (1, 3):
            _, out = self.run_layer("mini-deepseek-v3", "--threads", threads)
            results.append(out.read_bytes())
        self.assertEqual(results[0], results[1])

    def test_ranks_as_threads(self):
        _, one = self.run_layer("mini-deepseek-v3", "--quant", "f32")
        for extra in (
            ["--ranks", 3, "--reduction", "per_slot"],
            ["--ranks", 4, "--tp", 2, "--transport", "batched"],
            ["--ranks", 4, "--tp", 2, "--sp", "--placement", "round_robin", "--transport", "gather", "--reduction", "per_slot"],
        ):
            with self.subTest(extra):
                value, out = self.run_layer("mini-deepseek-v3", "--quant", "f32", *extra)
                self.assertEqual(out.read_bytes(), one.read_bytes())
                ranks = value["per_rank"]
                self.assertEqual([r["rank"] for r in ranks], list(range(extra[1])))
                self.assertEqual(value["parallel"]["ranks"], extra[1])
                self.assertEqual(sum(r["slots"] for r in ranks), sum(value["expert_load"]))
                self.assertTrue(all(r["bytes_sent"] > 0 for r in ranks))
        value, _ = self.run_layer("mini-deepseek-v3", "--ranks", 2, "--no-ep")
        self.assertEqual(value["parallel"]["transport"], "gather")

    def test_every_rank_logs_with_its_number(self):
        path, name = golden_input("mini-gpt-oss")
        arguments = ["run", "--model", MODELS / "mini-gpt-oss", "--layer", 0, "--input", f"{path}:{name}",
                     "--output", self.folder / "out", "--ranks", 2, "--repeat", 1]  # fmt: skip
        result = run(*arguments, "-v")
        self.assertEqual(result.returncode, OK, result.stderr)
        for rank in (0, 1):
            self.assertIn(f"moesaic[rank {rank}]: layer 0 ready", result.stderr)
        self.assertEqual(result.stdout.count("tokens/s"), 1)
        self.fails(USAGE, "[rank 1]", "--tp", arguments=[*arguments, "--tp", 3])
        self.fails(UNSUPPORTED, "[rank 0]", "slice", arguments=[*arguments, "--no-ep", "--transport", "batched"])

    def test_ranks_as_processes(self):
        mpirun = shutil.which("mpirun")
        if mpirun is None or "mpirun" not in self.json_of("env")["mpi"]["reason"]:
            self.skipTest("no mpirun, or a build without MPI")
        _, one = self.run_layer("mini-deepseek-v3", "--quant", "f32")
        path, name = golden_input("mini-deepseek-v3")
        out = self.folder / "processes.safetensors"
        result = subprocess.run(
            [mpirun, "--oversubscribe", "-n", "4", TOOL, "run", "--model", MODELS / "mini-deepseek-v3", "--layer", "1",
             "--input", f"{path}:{name}", "--output", out, "--quant", "f32", "--tp", "2", "--reduction", "per_slot",
             "--repeat", "1", "--json"],
            capture_output=True, text=True, timeout=120,
            env={**os.environ, "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
                 "OMPI_MCA_btl_vader_single_copy_mechanism": "none",
                 # Open MPI keeps memory until the process ends; LeakSanitizer would call it lost.
                 "ASAN_OPTIONS": ":".join(filter(None, [os.environ.get("ASAN_OPTIONS"), "detect_leaks=0"]))},
        )  # fmt: skip
        self.assertEqual(result.returncode, OK, result.stdout + result.stderr)
        value = json.loads(result.stdout)
        self.assertEqual((value["parallel"]["communicator"], value["parallel"]["ranks"]), ("mpi", 4))
        self.assertEqual(out.read_bytes(), one.read_bytes())

    def test_default_tensor_name_and_no_tokens(self):
        states = self.folder / "states.safetensors"
        out = self.folder / "out.safetensors"
        write_safetensors(states, {"hidden_states": ("F32", [0, 256], b"")})
        arguments = ["run", "--model", MODELS / "mini-qwen3-moe", "--layer", 1, "--input", states, "--output", out]
        value = self.json_of(*arguments)
        self.assertEqual(value["tokens"], 0)
        self.assertEqual(tensor_of(out, "output")[1], [0, 256])

    def test_a_name_with_a_colon(self):
        states = self.folder / "a:b.safetensors"
        write_safetensors(states, {"hidden_states": ("F32", [1, 256], struct.pack("<256f", *([0.5] * 256)))})
        out = self.folder / "out.safetensors"
        self.json_of("run", "--model", MODELS / "mini-qwen3-moe", "--layer", 1, "--input", states, "--output", out)

    def test_refusals_leave_no_output(self):
        path, name = golden_input("mini-qwen3-moe")
        out = self.folder / "out.safetensors"
        base = ["run", "--model", MODELS / "mini-qwen3-moe", "--output", out]
        self.fails(USAGE, "layer", arguments=[*base, "--layer", 0, "--input", f"{path}:{name}"])
        self.fails(BAD_INPUT, "hidden_states", arguments=[*base, "--layer", 1, "--input", path])
        self.fails(BAD_INPUT, "[tokens, 256]", arguments=[*base, "--layer", 1, "--input", f"{path}:model.layers.1.mlp.gate.out0"])
        self.fails(BAD_INPUT, arguments=[*base, "--layer", 1, "--input", self.folder / "gone"])
        self.assertFalse(out.exists())
        self.assertEqual(list(self.folder.iterdir()), [])

    def test_an_output_that_cannot_be_written(self):
        path, name = golden_input("mini-qwen3-moe")
        self.fails(
            USAGE, "--output",
            arguments=["run", "--model", MODELS / "mini-qwen3-moe", "--layer", 1, "--input", f"{path}:{name}",
                       "--output", self.folder / "no" / "folder" / "out", "--repeat", 1],
        )  # fmt: skip


class Explain(ToolTest):
    def check(self, value, stages=("gate", "router", "experts")):
        for row in value["candidates"]:
            self.assertEqual({"stage", "name", "accepted", "reason"}, row.keys())
            self.assertEqual(row["accepted"], row["reason"] == "")
        for stage in stages:
            names = [row["name"] for row in value["candidates"] if row["stage"] == stage and row["accepted"]]
            self.assertIn(value["chosen"][stage], names)
        self.assertGreater(value["workspace_bytes"], 0)
        self.assertTrue(value["determinism"])

    def test_checkpoints(self):
        for model in BUNDLED:
            with self.subTest(model):
                self.check(self.json_of("explain", "--model", MODELS / model))

    def test_named_shapes(self):
        for shape in ("deepseek-v3", "kimi-k2", "qwen3-235b", "qwen3-30b", "mixtral-8x7b", "gpt-oss-120b", "minimax-m2"):
            with self.subTest(shape):
                self.check(self.json_of("explain", "--shape", shape, "--tokens", 16))

    def test_a_shape_as_a_list(self):
        value = self.json_of("explain", "--shape", "64,8,2048,1024,gelu", "--quant", "f32")
        self.check(value)
        self.assertIn("gelu", value["layer"])

    def test_a_gpu_is_explained_without_one(self):
        value = self.json_of(
            "explain", "--shape", "deepseek-v3", "--quant", "fp8-block", "--device", "cuda", "--tokens", 8192
        )
        self.check(value)
        self.assertEqual((value["device"], value["chosen"]["experts"]), ("cuda:0", "cuda_sm90"))
        self.assertLess(value["workspace_bytes"], 1.2e9)
        cpu = self.json_of("explain", "--shape", "qwen3-30b", "--device", "cpu")
        reasons = {row["name"]: row["reason"] for row in cpu["candidates"]}
        self.assertIn("device: cpu", reasons["cuda_sm90"])
        self.fails(UNSUPPORTED, "f32", arguments=["explain", "--shape", "qwen3-30b", "--quant", "f32", "--device", "cuda"])

    def test_forced_backend(self):
        value = self.json_of("explain", "--shape", "qwen3-30b")
        accepted = [row["name"] for row in value["candidates"] if row["stage"] == "experts" and row["accepted"]]
        for name in accepted:
            value = self.json_of("explain", "--shape", "qwen3-30b", "--backend", name)
            self.assertEqual(value["chosen"]["experts"], name)

    def test_refusals(self):
        self.fails(USAGE, "qwen3-30b", arguments=["explain", "--shape", "qwen3-30"])
        self.fails(USAGE, "E,k,H,I", arguments=["explain", "--shape", "1,2,3"])
        self.fails(USAGE, "whole number", arguments=["explain", "--shape", "8,2,64,-1"])
        self.fails(USAGE, "top_k", arguments=["explain", "--shape", "2,8,64,64"])
        self.fails(USAGE, arguments=["explain"])
        self.fails(USAGE, arguments=["explain", "--shape", "qwen3-30b", "--model", MODELS / "mini-gpt-oss"])


class Bench(ToolTest):
    SHAPE = "64,4,128,64"
    KEYS = (
        "shape stage tokens device backend quant routing median_us min_us samples bytes flops gbps tflops floor_us "
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
        for stage in ("gate", "route", "experts", "layer"):
            with self.subTest(stage=stage):
                points = self.points("--stage", stage, "--tokens", "1,3")
                self.assertEqual([(p["stage"], p["tokens"]) for p in points], [(stage, 1), (stage, 3)])

    def test_plot_with_peers(self):
        rows = [
            {"impl": "other <one>", "format": "bf16", "E": 64, "top_k": 4, "hidden": 128, "intermediate": 64, "M": m,
             "gemm12_us": 40 + m} for m in (1, 3)
        ] + [{"impl": "of another layer", "format": "bf16", "E": 8, "top_k": 4, "hidden": 128, "intermediate": 64,
              "M": 1, "gemm12_us": 5}]  # fmt: skip
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
        lines = [t for t in svg.iter() if t.tag.endswith("polyline")]
        self.assertEqual([len(t.get("points").split()) for t in lines], [2, 2, 2])
        bad = ["bench", "--shape", self.SHAPE, "--tokens", "1", "--seconds", "0.01", "--device", "cpu"]
        self.fails(BAD_INPUT, "cannot be opened", arguments=[*bad, "--peers", self.folder / "none"])
        peers.write_text("[1, 2]\n")
        self.fails(BAD_INPUT, "line 1", arguments=[*bad, "--peers", peers])
        self.fails(USAGE, "cannot be written", arguments=[*bad, "--plot", self.folder / "no" / "such.svg"])

    def test_skewed_routing_touches_fewer_experts(self):
        for stage in ("experts", "layer"):
            with self.subTest(stage=stage):
                size = {
                    kind: self.points("--stage", stage, "--tokens", "32", "--routing", kind)[0]["bytes"]
                    for kind in ("uniform", "zipf:1.5", "one")
                }
                self.assertLess(size["zipf:1.5"], 0.95 * size["uniform"])
                self.assertLess(size["one"], 0.25 * size["uniform"])

    def test_refusals(self):
        point = ["bench", "--shape", self.SHAPE, "--tokens", "1"]
        self.fails(USAGE, "zipf", arguments=[*point, "--routing", "zipf:x"])
        self.fails(USAGE, "--stage", arguments=[*point, "--stage", "all"])
        model = ["bench", "--model", MODELS / "mini-qwen3-moe", "--stage", "layer", "--tokens", "1"]
        self.fails(UNSUPPORTED, "own gate", arguments=[*model, "--routing", "one"])


class BenchOverRanks(ToolTest):
    def test_layer_on_three_threads(self):
        common = ["bench", "--shape", "8,2,64,32", "--tokens", 4, "--seconds", 0, "--ranks", 3]
        value = self.json_of(*common, "--stage", "layer")
        self.assertEqual((value["ranks"], value["tokens_in_all"], value["transport"]), (3, 12, "auto"))
        self.assertGreater(value["bytes_sent_per_rank"], 0)
        self.assertLessEqual(value["rel_l2"], value["bound"])
        self.assertEqual(len(value["per_rank"]["median_us"]), 3)
        self.fails(UNSUPPORTED, "--stage", arguments=common)
        self.fails(UNSUPPORTED, "--no-ep", arguments=[*common, "--stage", "layer", "--no-ep"])


class Env(ToolTest):
    def test_env(self):
        value = self.json_of("env")
        self.assertRegex(value["version"], r"^\d+\.\d+\.\d+$")
        self.assertTrue(value["cpu"]["model"])
        self.assertGreaterEqual(value["cpu"]["threads"], 1)
        self.assertTrue(any(tier["available"] for tier in value["cpu"]["tiers"]))
        for tier in value["cpu"]["tiers"]:
            self.assertEqual(tier["available"], tier["reason"] == "")
        self.assertEqual(value["cuda"]["available"], value["cuda"]["reason"] == "")
        self.assertEqual(value["cuda"]["available"], any(d["available"] for d in value["cuda"]["devices"]))
        for device in value["cuda"]["devices"]:
            self.assertEqual(device["available"], device["reason"] == "")
        for absent in ("nccl", "mpi"):
            self.assertIs(value[absent]["available"], False)
            self.assertTrue(value[absent]["reason"])


class Balance(ToolTest):
    # The published example of the balancing algorithm.
    LOAD = [90, 132, 40, 61, 104, 165, 39, 4, 73, 56, 183, 86]
    PLACES = [5, 6, 5, 7, 8, 4, 3, 4, 10, 9, 10, 2, 0, 1, 11, 1]

    def balance(self, load, *arguments):
        path = self.folder / "load.json"
        path.write_text(load if isinstance(load, str) else json.dumps(load))
        return run("balance", "--load", path, *arguments)

    def test_published_placement(self):
        shape = ("--ranks", 8, "--redundant", 4, "--nodes", 2, "--groups", 4)
        for load in (self.LOAD, [self.LOAD], {"expert_load": self.LOAD}):
            result = self.balance(load, *shape, "--json")
            self.assertEqual(result.returncode, OK, result.stderr)
            value = json.loads(result.stdout)
            self.assertEqual(value["physical_to_logical"], [self.PLACES])
            mean = sum(self.LOAD) / 8
            self.assertAlmostEqual(value["balancedness_after"], mean / 156)
            self.assertLess(value["balancedness_before"], value["balancedness_after"])
        text = self.balance(self.LOAD, *shape)
        self.assertEqual(text.returncode, OK)
        for word in ("before", "after", "balancedness", "█"):
            self.assertIn(word, text.stdout)

    def test_refusals(self):
        for bad in ("", "{}", "[]", "[1, \"x\"]", "[[1, 2], [3]]"):
            self.assertEqual(self.balance(bad, "--ranks", 1).returncode, BAD_INPUT, bad)
        self.assertEqual(self.balance([1, 2, 3], "--ranks", 2).returncode, USAGE)
        self.assertEqual(self.balance([1, -2], "--ranks", 2).returncode, USAGE)
        self.assertEqual(run("balance", "--load", self.folder / "none", "--ranks", 2).returncode, BAD_INPUT)


class Convert(ToolTest):
    def test_result_verifies(self):
        for model, scheme in (("mini-qwen3-moe", "fp8-block"), ("mini-deepseek-v3", "fp8-block"), ("mini-gpt-oss", "mxfp4")):
            output = self.folder / f"{model}-{scheme}"
            value = self.json_of("convert", "--model", MODELS / model, "--quant", scheme, "--output", output)
            self.assertEqual([layer["layer"] for layer in value["layers"]], [BUNDLED[model]])
            error = value["layers"][0]["rel_l2_weights"]
            low, high = (0.024, 0.028) if scheme == "fp8-block" else (0.10, 0.13)
            self.assertTrue(low < error < high, error)
            self.assertLess(value["bytes_out"], value["bytes_in"])
            report = self.json_of("verify", "--model", output)
            self.assertTrue(report["pass"], report)
            # The rounding of the weights is really in the output.
            self.assertGreater(report["worst_rel_l2"], 0.5 * error)
            # Of the original weights the bound is the scheme's own.
            plain = self.json_of("verify", "--model", MODELS / model)
            self.assertLess(plain["layers"][0]["bound"], report["layers"][0]["bound"])
            self.assertEqual(sorted(self.folder.iterdir())[-1].name.count(".tmp"), 0)

    def test_everything_else_is_copied(self):
        model = MODELS / "mini-qwen3-moe"
        output = self.folder / "out"
        run("convert", "--model", model, "--quant", "int4-g128", "--output", output)
        read = lambda folder: {  # noqa: E731
            name: tensor_of(path, name)
            for path in sorted(folder.glob("model-*.safetensors"))
            for name in read_safetensors(path)[0]
        }
        before, after = read(model), read(output)
        kept = {name for name in before if ".experts." not in name}
        self.assertTrue(kept)
        for name in kept:
            self.assertEqual(before[name], after[name], name)
        self.assertEqual(kept, {name for name in after if ".experts." not in name})
        index = json.loads((output / "model.safetensors.index.json").read_text())
        self.assertEqual(set(index["weight_map"]), set(after))
        self.assertEqual(index["metadata"]["total_size"], sum(len(data) for _, _, data in after.values()))
        self.assertEqual((model / "golden.safetensors").read_bytes(), (output / "golden.safetensors").read_bytes())
        config = json.loads((output / "config.json").read_text())
        quant = config.pop("quantization_config")
        self.assertEqual(config, json.loads((model / "config.json").read_text()))
        self.assertEqual(quant["format"], "pack-quantized")
        # Every linear that stays as it is, and no expert, is named.
        self.assertIn("model.layers.1.mlp.gate", quant["ignore"])
        self.assertFalse([name for name in quant["ignore"] if "experts" in name])

    def test_refusals_leave_nothing(self):
        model = MODELS / "mini-qwen3-moe"
        output = self.folder / "out"
        convert = ["convert", "--model", model, "--output", output, "--quant"]
        self.fails(USAGE, "fp8-block", arguments=[*convert, "fp9"])
        self.fails(UNSUPPORTED, "stacked", "mxfp4", arguments=["convert", "--model", MODELS / "mini-gpt-oss", "--output", output, "--quant", "nvfp4"])
        self.fails(BAD_INPUT, arguments=["convert", "--model", self.folder / "none", "--output", output, "--quant", "mxfp8"])
        self.assertEqual(list(self.folder.iterdir()), [])
        # A NaN in the last expert is found when most is written.
        broken = self.copy_model("mini-qwen3-moe")
        shard = next(p for p in sorted(broken.glob("model-*.safetensors"))
                     if "model.layers.1.mlp.experts.15.down_proj.weight" in read_safetensors(p)[0])
        header, _ = read_safetensors(shard)
        data = bytearray(shard.read_bytes())
        begin = header["model.layers.1.mlp.experts.15.down_proj.weight"]["data_offsets"][0]
        (size,) = struct.unpack("<Q", data[:8])
        data[8 + size + begin : 8 + size + begin + 2] = b"\xc0\x7f"
        shard.write_bytes(data)
        self.fails(USAGE, "layer 1", "expert 15", "NaN", arguments=["convert", "--model", broken, "--output", output, "--quant", "mxfp8"])
        self.assertEqual(list(self.folder.iterdir()), [broken])
        # What exists is never overwritten.
        output.mkdir()
        (output / "mine").write_text("x")
        self.fails(USAGE, "exists", arguments=[*convert, "mxfp8"])
        self.assertEqual([p.name for p in output.iterdir()], ["mine"])
        self.fails(USAGE, "inside", arguments=["convert", "--model", broken, "--output", broken / "sub", "--quant", "mxfp8"])


class Accuracy(ToolTest):
    def test_every_scheme_is_within_its_bounds(self):
        value = self.json_of("accuracy")
        self.assertTrue(value["pass"])
        rows = {row["quant"]: row for row in value["tables"][0]["schemes"]}
        self.assertIn("nvfp4", rows)
        for row in rows.values():
            for error in ("weights", "activations", "output", "arithmetic"):
                self.assertLessEqual(row[error], row[f"{error}_bound"], row)
        # The measurement is not blind: coarser formats err more, in the right places.
        self.assertGreater(rows["mxfp4"]["weights"], 3 * rows["fp8-block"]["weights"])
        self.assertGreater(rows["mxfp4"]["arithmetic"], 3 * rows["mxfp4-fp8"]["arithmetic"])
        self.assertEqual(rows["int4-g128"]["activations"], 0)


class CommandLine(ToolTest):
    VERBS = ("inspect", "run", "verify", "explain", "env", "convert", "balance", "accuracy")

    def test_help_teaches(self):
        result = run("--help")
        self.assertEqual(result.returncode, OK)
        for verb in self.VERBS:
            self.assertIn(verb, result.stdout)
            text = run(verb, "--help")
            self.assertEqual(text.returncode, OK)
            self.assertIn("Examples:", text.stdout)
            self.assertIn(f"moesaic {verb}", text.stdout)
            self.assertIn("Exit codes:", text.stdout)

    def test_version(self):
        result = run("--version")
        self.assertEqual(result.returncode, OK)
        self.assertRegex(result.stdout, r"^moesaic \d+\.\d+\.\d+")

    def test_usage_errors(self):
        model = MODELS / "mini-qwen3-moe"
        self.fails(USAGE, arguments=[])
        self.fails(USAGE, "inspect", arguments=["inspekt"])
        self.fails(USAGE, "moesaic inspect --help", arguments=["inspect"])
        self.fails(USAGE, "--frobnicate", arguments=["inspect", model, "--frobnicate"])
        self.fails(USAGE, arguments=["run", "--model", model])
        self.fails(USAGE, "threads", arguments=["verify", "--model", model, "--threads", "-1"])
        self.fails(USAGE, "threads", arguments=["verify", "--model", model, "--threads", "many"])
        self.fails(USAGE, "--device", arguments=["verify", "--model", model, "--device", "tpu"])
        self.fails(USAGE, "bf16", arguments=["verify", "--model", model, "--quant", "bf61"])
        self.fails(USAGE, arguments=["verify", "--model", model, "--backend", "no_such_backend"])

    def test_unsupported_is_said(self):
        model = MODELS / "mini-qwen3-moe"
        # Without a device the text is the reason that env gives.
        cuda = self.json_of("env")["cuda"]
        for device in ("cuda:4095",) if cuda["available"] else ("cuda", "cuda:4095"):
            words = cuda["reason"] or "need an index below"
            self.fails(UNSUPPORTED, words, arguments=["verify", "--model", model, "--device", device])
        self.fails(UNSUPPORTED, "nvfp4", arguments=["verify", "--model", model, "--quant", "nvfp4"])

    def test_a_full_disk_behind_stdout_is_no_success(self):
        if not Path("/dev/full").exists():
            self.skipTest("no /dev/full here")
        with open("/dev/full", "w") as full:
            result = subprocess.run([TOOL, "env"], stdout=full, stderr=subprocess.PIPE, text=True)
        self.assertEqual(result.returncode, DEVICE)
        self.assertIn("stdout", result.stderr)


if __name__ == "__main__":
    TOOL = sys.argv[1]
    MODELS = Path(sys.argv[2]) / "testdata" / "models"
    unittest.main(argv=[sys.argv[0], *sys.argv[3:]])
