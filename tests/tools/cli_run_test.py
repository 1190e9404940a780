#!/usr/bin/env python3
"""`moesaic run`: outputs, threads, ranks, refusals.

usage: cli_run_test.py TOOL SOURCE_DIR [unittest arguments]
"""

import json
import os
import shutil
import struct
import subprocess

from cli_support import (
    BAD_INPUT,
    BUNDLED,
    DEVICE,
    MODELS,
    OK,
    TOOL,
    UNSUPPORTED,
    USAGE,
    ToolTest,
    golden_input,
    main,
    run,
    tensor_of,
    write_safetensors,
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

    def test_logits_may_be_rounded(self):
        logits = {}
        for extra in ([], ["--router-logits-dtype", "bf16"]):
            _, out = self.run_layer("mini-deepseek-v3", *extra)
            logits[len(extra)] = out.read_bytes()
        self.assertNotEqual(logits[0], logits[2])

    def test_threads_do_not_change_a_bit(self):
        results = []
        for threads in (1, 3):
            _, out = self.run_layer("mini-deepseek-v3", "--threads", threads)
            results.append(out.read_bytes())
        self.assertEqual(results[0], results[1])

    def test_ranks_as_threads(self):
        _, out = self.run_layer("mini-deepseek-v3", "--quant", "f32")
        one = out.read_bytes()  # the next run writes to the same file
        for extra in (
            ["--ranks", 3, "--reduction", "per_slot"],
            ["--ranks", 4, "--tp", 2, "--transport", "batched"],
            ["--ranks", 2, "--reduction", "per_slot", "--dual-batch-tokens", 1],
            ["--ranks", 4, "--tp", 2, "--sp", "--placement", "round_robin", "--transport", "gather", "--reduction", "per_slot"],
        ):
            with self.subTest(extra):
                value, out = self.run_layer("mini-deepseek-v3", "--quant", "f32", *extra)
                self.assertEqual(out.read_bytes(), one)
                ranks = value["per_rank"]
                self.assertEqual([r["rank"] for r in ranks], list(range(extra[1])))
                self.assertEqual(value["parallel"]["ranks"], extra[1])
                self.assertEqual(sum(r["slots"] for r in ranks), sum(value["expert_load"]))
                self.assertTrue(all(r["bytes_sent"] > 0 for r in ranks))
        value, _ = self.run_layer("mini-deepseek-v3", "--ranks", 2, "--no-ep")
        self.assertEqual(value["parallel"]["transport"], "gather")

    def test_the_placement_in_force_is_reported(self):
        for model, placement in (("mini-deepseek-v3", "round_robin"), ("mini-qwen3-moe", "linear")):  # the one has groups
            value, _ = self.run_layer(model, "--ranks", 2, "--placement", "round_robin")
            self.assertEqual(value["parallel"]["placement"], placement, model)
            load = value["expert_load"]
            half = len(load) // 2
            owned = [load[::2], load[1::2]] if placement == "round_robin" else [load[:half], load[half:]]
            self.assertEqual([r["slots"] for r in value["per_rank"]], [sum(part) for part in owned], model)

    def test_experts_move_between_ranks(self):
        one, out = self.run_layer("mini-deepseek-v3", "--quant", "f32")
        want = out.read_bytes()
        value, out = self.run_layer("mini-deepseek-v3", "--quant", "f32", "--ranks", 2, "--eplb", "--redundant", 2)
        self.assertEqual(out.read_bytes(), want)
        eplb, experts = value["eplb"], len(one["expert_load"])
        self.assertEqual(len(eplb["physical_to_logical"]), experts + 2)
        self.assertEqual(sorted(set(eplb["physical_to_logical"])), list(range(experts)))
        self.assertGreaterEqual(eplb["balancedness_after"], eplb["balancedness_before"])
        self.assertGreater(eplb["calls_while_moving"], 0)
        self.assertEqual((value["parallel"]["reduction"], eplb["same_bits"]), ("per_slot", True))
        # Sums per rank change their order when experts move, and are asked for by name.
        value, _ = self.run_layer(
            "mini-deepseek-v3", "--quant", "f32", "--ranks", 2, "--eplb", "--redundant", 2, "--reduction", "per_rank"
        )
        self.assertEqual((value["parallel"]["reduction"], value["eplb"]["same_bits"]), ("per_rank", False))
        path, name = golden_input("mini-deepseek-v3")
        arguments = ["run", "--model", MODELS / "mini-deepseek-v3", "--layer", 1, "--input", f"{path}:{name}",
                     "--output", self.folder / "out", "--ranks", 2]  # fmt: skip
        self.fails(USAGE, "redundant", arguments=[*arguments, "--redundant", 2])
        self.fails(UNSUPPORTED, "enable_eplb", arguments=[*arguments, "--eplb", "--no-ep"])

    def test_ranks_on_a_gpu_need_one(self):
        path, name = golden_input("mini-deepseek-v3")
        arguments = ["run", "--model", MODELS / "mini-deepseek-v3", "--layer", 1, "--input", f"{path}:{name}",
                     "--output", self.folder / "out", "--ranks", 2]  # fmt: skip
        if self.json_of("env")["cuda"]["available"]:
            self.skipTest("there is a GPU")
        self.fails(UNSUPPORTED, "--device", arguments=[*arguments, "--device", "cuda"])

    def test_every_rank_logs_with_its_number(self):
        path, name = golden_input("mini-gpt-oss")
        arguments = ["run", "--model", MODELS / "mini-gpt-oss", "--layer", 0, "--input", f"{path}:{name}",
                     "--output", self.folder / "out", "--ranks", 2, "--repeat", 1]  # fmt: skip
        result = run(*arguments, "-v")
        self.assertEqual(result.returncode, OK, result.stderr)
        for rank in (0, 1):
            self.assertIn(f"moesaic[rank {rank}]: layer 0 ready", result.stderr)
        self.assertEqual(result.stdout.count("tokens/s"), 1)

    def test_a_failure_of_ranks_is_told_once(self):
        path, name = golden_input("mini-gpt-oss")

        def command(*more, layer=0, states=f"{path}:{name}"):
            return ["run", "--model", MODELS / "mini-gpt-oss", "--layer", layer, "--input", states,
                    "--output", self.folder / "out", "--repeat", 1, *more]  # fmt: skip

        for code, word, more in (
            (USAGE, "--tp", command("--ranks", 2, "--tp", 3)),
            (UNSUPPORTED, "slice", command("--ranks", 2, "--no-ep", "--transport", "batched")),
            (USAGE, "none_such", command("--ranks", 4, "--backend", "none_such")),
            (USAGE, "got 9", command("--ranks", 4, layer=9)),
            (BAD_INPUT, "gone", command("--ranks", 4, states=self.folder / "gone")),
        ):
            with self.subTest(word):
                self.fails(code, word, arguments=more)
                lines = run(*more).stderr.splitlines()
                self.assertEqual(len(lines), 2, lines)
                self.assertRegex(lines[0], r"^moesaic(\[rank [0-9]\])?: error: [a-z_]+: ")
                self.assertRegex(lines[1], r"^  next: ")

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

        tensor = self.folder / "c.safetensors"
        write_safetensors(tensor, {"x:0": ("F32", [1, 256], struct.pack("<256f", *([0.5] * 256)))})
        self.json_of("run", "--model", MODELS / "mini-qwen3-moe", "--layer", 1, "--input", f"{tensor}:x:0", "--output", out)

    def test_options_of_ranks_need_ranks(self):
        path, name = golden_input("mini-qwen3-moe")
        base = ["--model", MODELS / "mini-qwen3-moe", "--layer", 1, "--input", f"{path}:{name}", "--output", self.folder / "out"]
        for option, more in (("--tp", ["2"]), ("--transport", ["batched"]), ("--eplb", []), ("--pair-capacity", ["9"])):
            self.fails(USAGE, option, "without --ranks", arguments=["run", *base, option, *more])
        self.fails(USAGE, "--timeout", "without --ranks", arguments=["run", *base, "--timeout", 5])
        self.fails(USAGE, "--tp: got 2", arguments=["run", *base, "--ranks", 1, "--tp", 2])
        self.fails(USAGE, "--eplb: got it with 1 rank", arguments=["run", *base, "--ranks", 1, "--eplb"])
        self.json_of("run", *base, "--ranks", 1, "--transport", "batched", "--repeat", 1)
        shape = ["--shape", "8,2,64,32", "--tokens", 4]
        self.fails(USAGE, "--sp", arguments=["bench", *shape, "--stage", "layer", "--seconds", 0, "--sp"])
        self.fails(USAGE, "--tp", arguments=["explain", *shape, "--tp", 2])

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

    def test_other_formats_and_names_are_answered_with_what_there_is(self):
        path, name = golden_input("mini-qwen3-moe")
        base = ["run", "--model", MODELS / "mini-qwen3-moe", "--output", self.folder / "out"]
        states = self.folder / "x.npy"
        states.write_bytes(b"\x93NUMPY\x01\0v\0{'descr': '<f4', 'fortran_order': False, 'shape': (1, 256), }" + b" " * 2000)
        self.fails(UNSUPPORTED, "NumPy", "safetensors", arguments=[*base, "--layer", 1, "--input", states])
        self.fails(BAD_INPUT, "mlp.inputs", "need one of", "nearest", f'"{name}"',
                   arguments=[*base, "--layer", 1, "--input", f"{path}:model.layers.1.mlp.inputs"])  # fmt: skip
        for layer in (-1, 0, 7):
            self.fails(USAGE, f"got {layer}", "MoE layers: 1", arguments=[*base, "--layer", layer, "--input", f"{path}:{name}"])
        good = [*base, "--layer", 1, "--input", f"{path}:{name}"]
        self.fails(USAGE, "--quant", "'FP8'", "as-is", "nearest are", "fp8-block", arguments=[*good, "--quant", "FP8"])
        self.fails(USAGE, "--output-dtype", "'F32'", "f32, bf16", "nearest is 'f32'", arguments=[*good, "--output-dtype", "F32"])

    def test_ranks_have_a_limit(self):
        path, name = golden_input("mini-deepseek-v3")
        command = ["run", "--model", MODELS / "mini-deepseek-v3", "--layer", 1, "--input", f"{path}:{name}",
                   "--output", self.folder / "out", "--repeat", 1]  # fmt: skip
        if (os.cpu_count() or 1) < 250:
            self.fails(USAGE, "--ranks: got 1000", "need at most", arguments=[*command, "--ranks", 1000])
        # More ranks than experts.
        value = self.json_of(*command, "--ranks", 20)
        self.assertEqual(value["parallel"]["ranks"], 20)

    def test_control_characters_of_names_are_escaped(self):
        evil = "a\x1b]0;pwned\x07\nmoesaic: error: \u202e"
        states, tensor = self.folder / f"{evil}.safetensors", "t\x1b[31m\n\u202e"
        write_safetensors(states, {f"{tensor}{i}": ("F32", [1, 256], bytes(1024)) for i in range(3)})
        out = self.folder / f"{evil}.out"
        base = ["run", "--model", MODELS / "mini-qwen3-moe", "--repeat", 1, "--layer", 1]
        commands = [
            [*base, "--output", out, "--input", f"{states}:{tensor}1"],
            [*base, "--output", out, "--input", f"{states}:{tensor}"],
            [*base, "--output", out, "--input", self.folder / evil],
            [*base, "--output", out / "x", "--input", f"{states}:{tensor}1"],
            ["inspect", self.folder / evil],
            ["inspect", evil, evil],
            ["verify", "--model", MODELS / "mini-qwen3-moe", "--golden", states],
            ["explain", "--shape", evil],
            ["explain", "--shape", "8,2,64,64", f"--{evil}"],
            ["explain", "--shape", "8,2,64,64", "--quant", evil],
            ["explain", "--shape", "8,2,64,64", "--backend", evil],
            ["explain", "--shape", "8,2,64,64", "--device", evil],
            ["bench", "--shape", "8,2,64,64", "--stage", evil],
            ["bench", "--shape", "8,2,64,64", "--routing", evil],
            ["balance", "--load", self.folder / evil, "--ranks", 2],
            ["accuracy", "--model", self.folder / evil],
            ["demo", self.folder / evil],
            [evil],
        ]
        for command in commands:
            with self.subTest(command):
                for extra in ([], ["--json"]):
                    result = run(*command, *extra)
                    for text in (result.stdout, result.stderr):
                        bad = [c for c in text if (ord(c) < 32 and c != "\n") or 127 <= ord(c) < 160 or c == "\u202e"]
                        self.assertEqual(bad, [], text)
                        self.assertFalse(any(line.startswith("moesaic: error: \\xe2") for line in text.splitlines()), text)
                    if extra:
                        json.loads(result.stdout)

    def test_stdout_that_cannot_be_written(self):
        path, name = golden_input("mini-gpt-oss")
        for more in ([], ["--ranks", "2"]):
            with open("/dev/full", "w") as full:
                result = subprocess.run(
                    [TOOL, "run", "--model", MODELS / "mini-gpt-oss", "--layer", "0", "--input", f"{path}:{name}",
                     "--output", "-", "--repeat", "1", *more],
                    stdout=full, stderr=subprocess.PIPE, text=True)  # fmt: skip
            self.assertEqual(result.returncode, DEVICE, result.stderr)
            self.assertIn("error: io: ", result.stderr)
            self.assertIn("next: check the disk or pipe behind stdout", result.stderr)
        closed = subprocess.run(
            ["sh", "-c", 'exec "$@" >&-', "sh", TOOL, "run", "--model", MODELS / "mini-gpt-oss", "--layer", "0",
             "--input", f"{path}:{name}", "--output", "-", "--json", "--repeat", "1"],
            stderr=subprocess.PIPE, text=True)  # fmt: skip
        self.assertEqual(closed.returncode, DEVICE, closed.stderr)
        self.assertIn('"io"', closed.stderr)

    def test_an_output_that_cannot_be_written(self):
        path, name = golden_input("mini-qwen3-moe")
        self.fails(
            USAGE, "--output",
            arguments=["run", "--model", MODELS / "mini-qwen3-moe", "--layer", 1, "--input", f"{path}:{name}",
                       "--output", self.folder / "no" / "folder" / "out", "--repeat", 1],
        )  # fmt: skip


if __name__ == "__main__":
    main()
