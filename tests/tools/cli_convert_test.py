#!/usr/bin/env python3
"""`moesaic convert`, `accuracy` and `balance`.

usage: cli_convert_test.py TOOL SOURCE_DIR [unittest arguments]
"""

import json
import math
import resource
import shutil
import signal
import struct
import subprocess

from cli_support import (
    BAD_INPUT,
    BUNDLED,
    MODELS,
    OK,
    TOOL,
    UNSUPPORTED,
    USAGE,
    ToolTest,
    golden_input,
    main,
    read_safetensors,
    run,
    tensor_of,
    write_safetensors,
)

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
            # Of the scheme alone, not of the f32 beside which demo shows it.
            scales = ["--activation-scales", "f32"] if scheme == "fp8-block" else []
            shown = self.json_of("demo", output, *scales)["checkpoints"][0]
            self.assertIs(shown["pass"], True)
            self.assertEqual(shown["bound"], report["layers"][0]["bound"])
            # The rounding of the weights is really in the output.
            self.assertGreater(report["worst_rel_l2"], 0.5 * error)
            # Of the original weights the bound is the scheme's own.
            plain = self.json_of("verify", "--model", MODELS / model)
            self.assertLess(plain["layers"][0]["bound"], report["layers"][0]["bound"])
            self.assertEqual(sorted(self.folder.iterdir())[-1].name.count(".tmp"), 0)

    def test_twice_converted_weights_verify(self):
        first, second = self.folder / "first", self.folder / "second"
        self.json_of("convert", "--model", MODELS / "mini-deepseek-v3", "--quant", "mxfp4", "--output", first)
        value = self.json_of("convert", "--model", first, "--quant", "fp8-block", "--output", second)
        self.assertLess(value["layers"][0]["rel_l2_weights"], 0.04)  # of this step
        record = json.loads((second / "moesaic_conversion.json").read_text())
        self.assertGreater(record["layers"][0]["rel_l2_weights"], 0.1)  # of both
        self.assertTrue(self.json_of("verify", "--model", second)["pass"])

    def test_a_record_excuses_no_output_without_a_bound(self):
        output = self.folder / "out"
        self.json_of("convert", "--model", MODELS / "mini-qwen3-moe", "--quant", "fp8-block", "--output", output)
        path = output / "moesaic_conversion.json"
        record = json.loads(path.read_text())
        for error, code in ((0.2, OK), (0.21, BAD_INPUT)):
            record["layers"][0]["rel_l2_weights"] = error
            path.write_text(json.dumps(record))
            result = run("verify", "--model", output, "--json")
            self.assertEqual(result.returncode, code, result.stderr)
            if code == OK:
                self.assertLess(json.loads(result.stdout)["layers"][0]["bound"], 0.5)
                self.fails(UNSUPPORTED, "earlier conversions", "convert the original",
                           arguments=["convert", "--model", output, "--quant", "mxfp4", "--output", self.folder / "more"])
                self.assertFalse((self.folder / "more").exists())

    def test_weights_that_a_format_would_lose_are_refused(self):
        for number, quant, said in ((b"\x6d\x00", "nvfp4", "too small for nvfp4"), (b"\x7f\x7f", "mxfp4", "too large for mxfp4")):
            model = self.folder / quant
            shutil.copytree(MODELS / "mini-qwen3-moe", model)
            for path in model.glob("model*.safetensors"):
                header, _ = read_safetensors(path)
                tensors = {name: tensor_of(path, name) for name in header}
                write_safetensors(path, {name: (t[0], t[1], number * (len(t[2]) // 2)) if ".experts." in name else t
                                         for name, t in tensors.items()})
            self.fails(UNSUPPORTED, "layer 1", said, arguments=["convert", "--model", model, "--quant", quant, "--output", self.folder / "out"])
            self.assertFalse((self.folder / "out").exists())

    def test_an_output_in_no_folder_is_told_what_to_do(self):
        result = run("convert", "--model", MODELS / "mini-qwen3-moe", "--quant", "mxfp8", "--output", self.folder / "none" / "out")
        self.assertEqual(result.returncode, 2, result.stderr)
        self.assertIn("next: make that folder", result.stderr)

    def test_experts_that_lie_as_in_memory_are_refused_with_where_they_should(self):
        model = self.folder / "mixtral"
        model.mkdir()
        (model / "config.json").write_text(json.dumps({
            "model_type": "mixtral", "hidden_size": 16, "intermediate_size": 8, "num_hidden_layers": 1, "num_local_experts": 2,
            "num_experts_per_tok": 1}))
        block = "model.layers.0.mlp."
        write_safetensors(model / "model.safetensors", {
            block + name: ("F32", shape, bytes(4 * math.prod(shape)))
            for name, shape in (("gate.weight", [2, 16]), ("experts.gate_up_proj", [2, 16, 16]), ("experts.down_proj", [2, 16, 8]))})
        self.fails(UNSUPPORTED, "layer 0", "stacked tensors under \"model.layers.0.mlp\"", "block_sparse_moe",
                   arguments=["convert", "--model", model, "--quant", "fp8-channel", "--output", self.folder / "out"])

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

    def test_integers_also_run_with_int8_activations(self):
        model = self.folder / "out"
        run("convert", "--model", MODELS / "mini-qwen3-moe", "--quant", "int4-g128", "--output", model)
        stored = self.json_of("verify", "--model", model)
        value = self.json_of("verify", "--model", model, "--quant", "int4-g128-int8")
        self.assertTrue(value["pass"], value)
        self.assertEqual((stored["layers"][0]["quant"], value["layers"][0]["quant"]), ("int4-g128", "int4-g128-int8"))
        self.assertGreater(value["layers"][0]["bound"], stored["layers"][0]["bound"])
        self.fails(UNSUPPORTED, "int8-g128-int8", "stored as int4-g128", "int4-g128-int8", arguments=["verify", "--model", model, "--quant", "int8-g128-int8"])
        for quant, words in (("as-is", ("--quant int4-g128-int8", "would be in the place of 6.0e-03")), ("int4-g128-int8", ("in the place of 6.0e-03",))):
            explained = self.json_of("explain", "--model", model, "--device", "cpu", "--quant", quant)
            for word in (*words, "I8, an F32 scale per 128 columns", "bound 2.4e-02"):
                self.assertIn(word, explained["quant_choice"])
        self.assertEqual(self.json_of("explain", "--model", MODELS / "mini-qwen3-moe", "--device", "cpu")["quant_choice"], "")

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
        self.fails(BAD_INPUT, "layer 1", "expert 15", "NaN", arguments=["convert", "--model", broken, "--output", output, "--quant", "mxfp8"])
        self.assertEqual(list(self.folder.iterdir()), [broken])
        # What others wrote is not overwritten, unless asked for.
        output.mkdir()
        (output / "mine").write_text("x")
        self.fails(USAGE, "exists", "mine", "--force", arguments=[*convert, "mxfp8"])
        self.assertEqual([p.name for p in output.iterdir()], ["mine"])
        self.assertEqual(run(*convert, "mxfp8", "--force").returncode, OK)
        self.assertFalse((output / "mine").exists())
        self.assertEqual(run(*convert, "mxfp4").returncode, OK)  # a result of convert
        self.fails(USAGE, "inside", arguments=["convert", "--model", broken, "--output", broken / "sub", "--quant", "mxfp8"])
        self.fails(USAGE, "own folder", arguments=["convert", "--model", broken, "--output", broken, "--quant", "mxfp8", "--force"])
        for place in (self.folder / "none" / "out", "/proc/out", broken / "config.json"):
            self.fails(USAGE, arguments=["convert", "--model", model, "--output", place, "--quant", "mxfp8"])
        self.assertEqual(sorted(p.name for p in self.folder.iterdir()), [broken.name, "out"])
        gguf = self.folder / "model.gguf"
        gguf.write_bytes(b"GGUF")
        self.fails(UNSUPPORTED, "GGUF", arguments=["convert", "--model", gguf, "--output", self.folder / "x", "--quant", "mxfp8"])

    def test_a_full_disk_is_the_outputs_fault(self):
        # Files of more than 100 kB fail, as on a full disk; the signal for it stays ignored.
        limit = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (100000, 100000))  # noqa: E731
        result = subprocess.run([TOOL, "convert", "--model", MODELS / "mini-qwen3-moe", "--quant", "mxfp8", "--output", self.folder / "out"],
                                capture_output=True, text=True, restore_signals=False, preexec_fn=limit)
        self.assertEqual(result.returncode, USAGE, result.stderr)
        self.assertIn("io: ", result.stderr)
        self.assertEqual(list(self.folder.iterdir()), [])

    def interrupted(self, number, megabytes=256):
        """A conversion that got this signal while it wrote: the process, its temporary folder and what it said. The
        model has a big tensor of zeros, which the file system need not store, so that writing takes a while."""
        model = self.copy_model("mini-qwen3-moe")
        header = json.dumps({"big.weight": {"dtype": "BF16", "shape": [megabytes << 19], "data_offsets": [0, megabytes << 20]}}).encode()
        with open(model / "model-00009.safetensors", "wb") as f:
            f.write(struct.pack("<Q", len(header)) + header)
            f.truncate(8 + len(header) + (megabytes << 20))
        index = json.loads((model / "model.safetensors.index.json").read_text())
        index["weight_map"]["big.weight"] = "model-00009.safetensors"
        (model / "model.safetensors.index.json").write_text(json.dumps(index))
        process = subprocess.Popen([TOOL, "convert", "--model", model, "--quant", "mxfp8", "--output", self.folder / "out", "--json"],
                                   stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        temporary = self.folder / f"out.tmp-{process.pid}"
        while process.poll() is None and not list(temporary.glob("model-*")):
            pass
        process.send_signal(number)
        output, errors = process.communicate()
        shutil.rmtree(model)
        if process.returncode == 0 and megabytes < 4096:  # it was faster than this test
            shutil.rmtree(self.folder / "out")
            return self.interrupted(number, 4 * megabytes)
        return process, temporary, output, errors

    def test_signals_end_in_order(self):
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            process, temporary, output, errors = self.interrupted(number)
            self.assertEqual(process.returncode, 128 + number, errors)
            self.assertEqual(json.loads(output)["exit_code"], 128 + number)
            self.assertIn("interrupted", errors)
            self.assertEqual(list(self.folder.iterdir()), [])

    def test_left_over_of_a_killed_run_goes(self):
        process, temporary, _, _ = self.interrupted(signal.SIGKILL)
        self.assertEqual(process.returncode, -signal.SIGKILL)
        self.assertTrue(temporary.is_dir())
        value = self.json_of("convert", "--model", MODELS / "mini-qwen3-moe", "--quant", "mxfp8", "--output", self.folder / "out")
        self.assertIn(str(temporary.name), " ".join(value["notes"]))
        self.assertEqual([p.name for p in self.folder.iterdir()], ["out"])


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
        # A scale per group errs less than one per row, and costs more than none.
        self.assertLess(rows["int8-g128-int8"]["activations"], rows["int8"]["activations"])
        self.assertGreater(rows["int4-g128-int8"]["arithmetic"], 3 * rows["int4-g128"]["arithmetic"])

    def test_rows_that_measure_nothing_are_the_files_fault(self):
        model = self.copy_model("mini-qwen3-moe")
        golden, name = golden_input("mini-qwen3-moe")
        _, (_, width), _ = tensor_of(golden, name)
        for tokens, value, found in ((0, 0.0, "0 tokens"), (2, 0.0, "zeros alone"), (2, float("nan"), "NaN")):
            rows = ("F32", [tokens, width], struct.pack("<f", value) * (tokens * width))
            output = name.replace(".input", ".output")
            write_safetensors(model / "golden.safetensors", {name: rows, output: rows})
            self.fails(BAD_INPUT, f"{name}: got {found}", arguments=["accuracy", "--model", model])

    def test_of_checkpoints_with_scales_of_scales(self):
        model = self.folder / "model"
        self.json_of("convert", "--model", MODELS / "mini-qwen3-moe", "--quant", "nvfp4", "--output", model)
        value = self.json_of("accuracy", "--model", f"{model}/", "--tokens", 32)
        names = [table["data"] for table in value["tables"]]
        self.assertIn("model", names)
        self.assertTrue(value["pass"])


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
        # Hosts without whole groups: both are set aside, which is said.
        for shape, policy in ((("--nodes", 3, "--groups", 4), "global"), (("--nodes", 2), "global"), ((), "hierarchical")):
            result = self.balance(self.LOAD, "--ranks", 2, "--json", *shape)
            self.assertEqual(json.loads(result.stdout)["policy"], policy)
            text = self.balance(self.LOAD, "--ranks", 2, *shape).stdout
            self.assertEqual("is no multiple of --nodes" in text, policy == "global")
        self.assertEqual(self.balance([1, -2], "--ranks", 2).returncode, BAD_INPUT)
        self.assertEqual(run("balance", "--load", self.folder / "none", "--ranks", 2).returncode, BAD_INPUT)

    def test_what_would_fill_memory_is_refused(self):
        def told(code, load, *arguments):
            result = self.balance(load, "--ranks", 1, *arguments)
            self.assertEqual(result.returncode, code, result.stderr[:500])
            return result.stderr

        # A small file and an option: 300 layers of a million slots each.
        self.assertIn("need at most 55924", told(USAGE, [[1]] * 300, "--redundant", 1 << 20))
        self.assertIn("need at most 1048576", told(BAD_INPUT, "[" + "0," * (1 << 20) + "0]"))
        self.assertIn("got 4097 layers", told(BAD_INPUT, [[1]] * 4097))
        self.assertIn("text", told(BAD_INPUT, " " * 64_000_001 + "[1]"))
        self.assertEqual(self.balance([[1]] * 4096, "--ranks", 1, "--redundant", 7).returncode, OK)


if __name__ == "__main__":
    main()
