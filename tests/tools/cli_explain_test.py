#!/usr/bin/env python3
"""`moesaic explain`, `env`, and what every verb has: help, usage errors, what is not supported.

usage: cli_explain_test.py TOOL SOURCE_DIR [unittest arguments]
"""

import os
import subprocess
from pathlib import Path

from cli_support import BAD_INPUT, BUNDLED, DEVICE, MODELS, OK, TOOL, UNSUPPORTED, USAGE, ToolTest, main, run

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
        self.assertTrue(value["activations"])
        self.assertTrue(value["stage_order"].startswith("gate, router, "))
        self.assertEqual(value["ranks"], 1)
        self.assertEqual(value["quant_note"], "")

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
        self.assertEqual(value["activations"], "F32")

    def test_what_becomes_of_activations(self):
        for quant, text in (("fp8-block", "F8_E4M3, an F32 scale per 128 columns"), ("int8", "I8, one scale per token"), ("bf16", "BF16")):
            self.assertEqual(self.json_of("explain", "--shape", "qwen3-30b", "--quant", quant)["activations"], text)
        self.assertIn("activations  BF16", run("explain", "--shape", "qwen3-30b", "--quant", "bf16").stdout)

    def test_small_calls_run_on_one_thread(self):
        arguments = ["explain", "--device", "cpu", "--threads", 2, "--tokens", 1]
        small = self.json_of(*arguments, "--model", MODELS / "mini-qwen3-moe")
        self.assertEqual({row["stage"]: row["threads"] for row in small["threads"]}, {"gate": 1, "router": 1, "experts": 1})
        large = self.json_of(*arguments, "--shape", "qwen3-30b")
        experts = next(row for row in large["threads"] if row["stage"] == "experts")
        self.assertEqual((experts["threads"], experts["one_thread_tokens"]), (2, 0))

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
        for quant in ("nvfp4", "nvfp4-bf16", "mxfp8", "mxfp4", "mxfp4-fp8", "int4-fp8"):
            value = self.json_of("explain", "--shape", "qwen3-30b", "--quant", quant, "--device", "cuda")
            self.assertEqual(value["chosen"]["experts"], "cuda_sm90", quant)
        scales = ["explain", "--shape", "qwen3-30b", "--quant", "mxfp4-fp8", "--activation-scales", "f32", "--device", "cuda"]
        self.assertEqual(self.json_of(*scales)["chosen"]["experts"], "cuda_general")
        self.fails(UNSUPPORTED, "mxfp4-fp8", arguments=[*scales, "--backend", "cuda_sm90"])
        general = self.json_of("explain", "--shape", "qwen3-30b", "--quant", "f32", "--device", "cuda")
        self.assertEqual(general["chosen"]["experts"], "cuda_general")
        passed_over = {row["name"]: row["reason"] for row in general["candidates"] if row["stage"] == "experts"}
        self.assertIn("scheme: got f32", passed_over["cuda_sm90"])
        self.assertIn("scheme: got f32", general["backend_note"])
        self.assertEqual(value["backend_note"], "")
        self.assertIn("note         experts: cuda_general", run("explain", "--shape", "qwen3-30b", "--quant", "f32", "--device", "cuda").stdout)

    def test_the_order_of_the_stages_over_ranks(self):
        arguments = ["explain", "--device", "cpu", "--shape", "deepseek-v3", "--quant", "fp8-block", "--tokens", 16]
        self.assertEqual(self.json_of(*arguments)["stage_order"], "gate, router, experts, shared_experts")
        for transport, chosen in (("auto", "all_to_all"), ("gather", "all_gather_reduce_scatter"), ("batched", "all_to_all_batched")):
            value = self.json_of(*arguments, "--ranks", 8, "--transport", transport)
            self.assertEqual((value["ranks"], value["chosen"]["prepare_finalize"]), (8, chosen))
            self.assertEqual(value["stage_order"], "gate, router, dispatch, experts, combine (shared_experts meanwhile)")
        self.assertIn("order        gate, router, dispatch", run(*arguments, "--ranks", 8).stdout)
        self.assertIn("two batches", self.json_of(*arguments, "--ranks", 8, "--dual-batch-tokens", 4)["stage_order"])
        self.fails(USAGE, "--tp", arguments=[*arguments, "--ranks", 8, "--tp", 3])
        self.fails(UNSUPPORTED, "dual_batch_tokens", arguments=[*arguments, "--ranks", 8, "--tp", 8, "--dual-batch-tokens", 4])

    def test_threads_of_ranks_are_what_run_gives_them(self):
        arguments = ["explain", "--shape", "qwen3-30b", "--tokens", 64, "--ranks", 64]
        threads = {stage["threads"] for stage in self.json_of(*arguments)["threads"]}
        self.assertEqual(threads, {max(1, len(os.sched_getaffinity(0)) // 64)})

    def test_the_engine_between_gpus(self):
        arguments = ["explain", "--device", "cuda", "--shape", "deepseek-v3", "--quant", "fp8-block", "--ranks", 8]
        windows = "cuda_peer_all_to_all"
        for engine, chosen in (("messages", "cuda_all_to_all"), ("peer_windows", windows), ("auto", windows)):
            value = self.json_of(*arguments, "--rank-engine", engine)
            self.assertEqual(value["chosen"]["prepare_finalize"], chosen)
        self.fails(UNSUPPORTED, "2 ranks have the same rows", arguments=[*arguments, "--tp", 2, "--rank-engine", "peer_windows"])
        for memory in ("auto", "cuda_handles", "nccl"):
            value = self.json_of(*arguments, "--rank-engine", "peer_windows", "--peer-memory", memory)
            self.assertEqual((value["chosen"]["prepare_finalize"], value["peer_memory"]), (windows, memory))
        self.assertIn("memory of nccl", run(*arguments, "--rank-engine", "auto", "--peer-memory", "nccl").stdout)
        self.fails(UNSUPPORTED, "peer_memory: got nccl", "rank_engine: got messages", arguments=[*arguments, "--peer-memory", "nccl"])
        self.fails(USAGE, "--peer-memory", "auto, cuda_handles, nccl", arguments=[*arguments, "--peer-memory", "mpi"])

    def test_memory_for_fewer_pairs_than_there_may_be(self):
        arguments = ["explain", "--device", "cuda", "--shape", "deepseek-v3", "--ranks", 8, "--tokens", 4096]
        windows = [*arguments, "--rank-engine", "peer_windows"]
        block = [*windows, "--quant", "fp8-block"]
        all_pairs = 8 * 4096 * 8
        memory = {pairs: self.json_of(*block, "--pair-capacity", pairs)["workspace_bytes"] for pairs in (0, 65536, all_pairs - 1, all_pairs)}
        self.assertEqual(memory[0], memory[all_pairs])
        # A pair has an output row of 7168 bf16 numbers and an intermediate one of 2048 codes.
        self.assertGreater(memory[0] - memory[65536], (all_pairs - 65536) * (7168 * 2 + 2048))
        self.assertLess(abs(memory[all_pairs - 1] - memory[all_pairs]), 1 << 21)
        self.fails(UNSUPPORTED, "pair_capacity: got 65536: rank_engine: got messages", arguments=[*arguments, "--quant", "fp8-block", "--pair-capacity", 65536])
        self.fails(UNSUPPORTED, "pair_capacity: got 65536", "cuda_general", arguments=[*windows, "--quant", "f32", "--pair-capacity", 65536])
        self.fails(USAGE, "--pair-capacity", arguments=[*block, "--pair-capacity", -1])

    def test_options_of_the_layer(self):
        arguments = ["explain", "--device", "cpu", "--shape", "deepseek-v3", "--quant", "fp8-block"]
        value = self.json_of(*arguments)
        self.assertEqual((value["router_logits"], value["activations"]), ("fp32 sums", "F8_E4M3, an F32 scale per 128 columns"))
        value = self.json_of(*arguments, "--router-logits-dtype", "bf16", "--activation-scales", "e8m0")
        self.assertEqual((value["router_logits"], value["activations"]),
                         ("fp32 sums rounded to BF16", "F8_E4M3, a power of two per 128 columns"))  # fmt: skip
        self.assertIn("BF16", self.json_of(*arguments, "--no-gate-fp32")["router_logits"])
        self.fails(USAGE, "--router-logits-dtype", "f32, bf16, f16", arguments=[*arguments, "--router-logits-dtype", "fp32"])
        self.fails(UNSUPPORTED, "activation_scales",
                   arguments=["explain", "--shape", "qwen3-30b", "--activation-scales", "e8m0"])  # fmt: skip

    def test_any_number_of_experts_is_answered_at_once(self):
        """Nothing is listed, drawn or copied for an answer."""
        for more in ([], ["--ranks", "8"]):
            command = [TOOL, "explain", "--device", "cpu", "--shape", "2147483647,2,64,64", "--json", *more]
            result = subprocess.run(command, capture_output=True, text=True, timeout=10)
            self.assertEqual(result.returncode, OK, result.stderr)
            self.assertIn("2147483647 experts", result.stdout)

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


class Balance(ToolTest):
    def test_loads_that_are_none(self):
        load = self.folder / "load.json"
        command = ["balance", "--load", load, "--ranks", 2]
        self.fails(BAD_INPUT, "not_found", "load.json", arguments=command)
        self.fails(BAD_INPUT, "io:", "directory", arguments=["balance", "--load", self.folder, "--ranks", 2])
        for text in ("", "{}", "[]", "[[]]", '["x"]', "[1, -2]", "[[1, 2], [1]]", "[1e999]", "[" * 100000):
            load.write_text(text)
            self.fails(BAD_INPUT, "corrupt_file", "loads per expert", "run --json", arguments=command)
        load.write_text('{"expert_load": [1, 2], "expert_load": [3, 4]}')
        self.fails(BAD_INPUT, "corrupt_file", "duplicate key", arguments=command)
        load.write_text("[1, 1e999]")
        self.fails(BAD_INPUT, "1e999", arguments=command)
        load.write_text("[1, 2, 3, 4]")
        self.assertEqual(self.json_of(*command)["num_experts"], 4)
        self.fails(USAGE, arguments=["balance", "--load", load, "--ranks", 1000])
        for loads, found in (("[1e308, 1e308, 1, 1]", "inf"), ("[[1, 2], [1e301, 0]]", "1e+301")):
            load.write_text(loads)
            self.fails(BAD_INPUT, "limit_exceeded", f"a sum of {found}", "1e+300", arguments=command)
        load.write_text("[1e299, 1e299, 1, 1]")
        self.json_of(*command)


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
        for absent in ("nccl", "mpi", "peer_windows", "nccl_windows"):
            self.assertIs(value[absent]["available"], False)
            self.assertTrue(value[absent]["reason"])


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
        for verb in ("run", "verify", "explain", "bench", "convert"):
            self.fails(USAGE, "'--modle'", "nearest is '--model'", arguments=[verb, "--modle", model])
        self.fails(USAGE, "--quant: got 'bf16'", "fp8-block, ", "nearest is", arguments=["convert", "--model", model, "--quant", "bf16", "--output", self.folder / "o"])
        self.fails(USAGE, "'--rank'", "nearest is '--ranks'", arguments=["balance", "--rank", 2])
        self.fails(USAGE, "'--token'", "nearest is '--tokens'", arguments=["accuracy", "--token", 2])
        self.fails(USAGE, "'--thread'", "nearest is '--threads'", arguments=["demo", "--thread", 2])
        self.fails(USAGE, "'--jsno'", "nearest is '--json'", arguments=["env", "--jsno"])
        self.fails(USAGE, "before the verb", arguments=["--verbose", "env"])
        for verb in ("explain", "bench"):
            self.fails(USAGE, "got -1", "MoE layers: 1", arguments=[verb, "--model", model, "--layer", "-1"])
            self.fails(USAGE, "--layer: got 3 beside --shape", arguments=[verb, "--shape", "8,2,64,64", "--layer", 3])
        self.fails(USAGE, "got -1", "layers 1", arguments=["verify", "--model", model, "--layer", "-1"])
        self.fails(USAGE, "whole number", arguments=["explain", "--model", model, "--layer", "one"])
        self.fails(USAGE, arguments=["run", "--model", model])
        self.fails(USAGE, "threads", arguments=["verify", "--model", model, "--threads", "-1"])
        self.fails(USAGE, "threads", arguments=["verify", "--model", model, "--threads", "many"])
        self.fails(USAGE, "--device", arguments=["verify", "--model", model, "--device", "tpu"])
        self.fails(USAGE, "bf16", arguments=["verify", "--model", model, "--quant", "bf61"])
        self.fails(USAGE, arguments=["verify", "--model", model, "--backend", "no_such_backend"])

    def test_json_with_a_value_is_json_too(self):
        for flag, wanted in (("--json=true", True), ("--json=1", True), ("--json=false", False)):
            for arguments in (["run", flag], ["env", "--frobnicate", flag], ["inspect", "/nonexistent", flag]):
                result = run(*arguments)
                self.assertNotEqual(result.returncode, OK)
                self.assertEqual(result.stdout.count('"exit_code"'), int(wanted), arguments)

    def test_numbers_are_decimal_and_in_their_range(self):
        path, name = MODELS / "mini-gpt-oss" / "golden.safetensors", "model.layers.0.mlp.input"
        run_it = ["run", "--model", MODELS / "mini-gpt-oss", "--layer", 0, "--input", f"{path}:{name}", "--output", self.folder / "o"]
        bench = ["bench", "--shape", "8,2,64,64", "--seconds", 0.01]
        for command, option, values in (
            ([*run_it, "--ranks", 2], "--timeout", ("nan", "inf", "0x10", "1e999", "", "5s")),
            (bench[:-2] + ["--tokens", 1], "--seconds", ("nan", "-nan", "-1", "1e9")),
            (bench, "--seed", ("-1", "18446744073709551616", "0x1", "1.5", "+1", "007")),
            (bench, "--tokens", ("010", "0x10", "1,,4", ",1", "1,", "1, 4", "+3", "0", "2000000", "")),
            (bench, "--threads", ("0x1", "-1", "1e1", "99999999999999999999")),
            (run_it, "--repeat", ("0b1", "01", "1.0")),
        ):
            for value in values:
                with self.subTest(option=option, value=value):
                    self.fails(USAGE, option, f"'{value}'", "need", "number", arguments=[*command, f"{option}={value}" if value else option, *([] if value else [""])])
        for option in ("--shape", "--model"):
            self.fails(USAGE, option, "got ''", arguments=["bench", option, ""])
            self.fails(USAGE, option, "got ''", arguments=["explain", option, ""])
        point = self.json_of(*bench, "--tokens", 3, "--seed", 2**64 - 1)
        self.assertEqual(point["tokens"], 3)

    def test_unsupported_is_said(self):
        model = MODELS / "mini-qwen3-moe"
        # Without a device the text is the reason that env gives.
        cuda = self.json_of("env")["cuda"]
        for device in ("cuda:4095",) if cuda["available"] else ("cuda", "cuda:4095"):
            words = cuda["reason"] or "need an index below"
            self.fails(UNSUPPORTED, words, arguments=["verify", "--model", model, "--device", device])
        self.fails(UNSUPPORTED, "hidden_size: got 48", arguments=["explain", "--shape", "4,2,48,48", "--quant", "mxfp4"])
        # With a GPU as without one.
        self.fails(UNSUPPORTED, "--device: got cuda, demo computes on the CPU", arguments=["demo", model, "--device", "cuda"])

    def test_a_tier_that_is_none_is_refused(self):
        model = MODELS / "mini-qwen3-moe"
        bench = ["bench", "--shape", "8,2,64,32", "--tokens", "1", "--seconds", "0", "--stage"]
        for command in (["env"], ["inspect", model], ["explain", "--model", model], ["explain", "--model", model, "--backend", "cpu_reference"],
                        [*bench, "experts"], [*bench, "route"], ["bench", "--model", model], ["verify", "--model", model]):  # fmt: skip
            with self.subTest(command=command):
                result = run(*command, env={"MOESAIC_CPU_TIER": "avx1024"})
                self.assertEqual(result.returncode, USAGE, result.stderr)
                self.assertIn("MOESAIC_CPU_TIER: CPU tier: got 'avx1024'", result.stderr)

    def test_a_full_disk_behind_stdout_is_no_success(self):
        if not Path("/dev/full").exists():
            self.skipTest("no /dev/full here")
        with open("/dev/full", "w") as full:
            result = subprocess.run([TOOL, "env"], stdout=full, stderr=subprocess.PIPE, text=True)
        self.assertEqual(result.returncode, DEVICE)
        self.assertEqual(
            result.stderr, "moesaic: error: io: stdout could not be written\n  next: check the disk or pipe behind stdout\n"
        )


if __name__ == "__main__":
    main()
