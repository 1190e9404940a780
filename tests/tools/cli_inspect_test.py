#!/usr/bin/env python3
"""`moesaic inspect` on good and damaged checkpoints.

usage: cli_inspect_test.py TOOL SOURCE_DIR [unittest arguments]
"""

import json
import sys
from pathlib import Path

from cli_support import BAD_INPUT, BUNDLED, MODELS, OK, UNSUPPORTED, USAGE, ToolTest, golden_input, main, run

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "checkpoint"))
from gguf_file import metadata
from gguf_model import gguf_file
from tiny_model import vector

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
                self.assertEqual((value["problems"], value["notes"]), ([], []))

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

    def test_gguf_file_without_experts(self):
        target = self.folder / "dense.gguf"
        norm = {"blk.0.attn_norm.weight": vector("F32", [b"\0\0\x80\x3f"] * 16)}
        keys = metadata("qwen3moe", block_count=1, embedding_length=16)
        target.write_bytes(gguf_file(keys, norm))
        value = self.json_of("inspect", target)
        self.assertEqual((value["layers"], value["problems"]), ([], ["the file holds no MoE layer"]))
        norm["blk.0.ffn_up_exps.weight"] = ("F32", [1, 1, 4], bytes(16))
        target.write_bytes(gguf_file(keys, norm))
        self.fails(BAD_INPUT, "qwen3moe.expert_count", arguments=["inspect", target])

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

    def broken(self, **fields):
        target = self.copy_model("mini-qwen3-moe")
        config = json.loads((target / "config.json").read_text())
        config.update(fields)
        (target / "config.json").write_text(json.dumps(config))
        return target

    def test_a_layer_that_cannot_be_loaded_is_an_error_after_the_report(self):
        target = self.broken(moe_intermediate_size=64)
        for command in (["inspect", target], ["explain", "--model", target], ["explain", "--model", target, "--layer", 1]):
            result = run(*command)
            self.assertEqual(result.returncode, BAD_INPUT, result.stdout)
            for word in ("error: invalid_shape", "layers.1.mlp", "got [128, 256], need [64, 256]", "next:"):
                self.assertIn(word, result.stderr)
        self.assertIn("problem: ", run("inspect", target).stdout)
        value = self.json_of("inspect", target, code=BAD_INPUT)
        self.assertEqual((value["exit_code"], value["error"]), (BAD_INPUT, "invalid_shape"))
        self.assertEqual([item["layer"] for item in value["layers"]], [1])
        self.assertEqual(len(value["problems"]), 1)

    def test_families_that_are_not_read(self):
        target = self.broken(model_type="llama")
        self.fails(UNSUPPORTED, "nearest is llama4_text", "docs/limits.md", arguments=["inspect", target])
        self.fails(BAD_INPUT, "config.json\": is not a folder", arguments=["inspect", target / "config.json"])

    def test_a_path_is_said_once(self):
        result = run("verify", "--model", MODELS / "mini-qwen3-moe", "--golden", "/dev/null")
        self.assertIn("error: io: /dev/null: got a pipe or device", result.stderr)

    def test_missing_and_unknown_tensors(self):
        target = self.copy_model("mini-qwen3-moe")
        for change, code, error in ((lambda name: name.replace("experts.3.up_proj", "experts.3.pu_proj"), BAD_INPUT, "missing_tensor"),
                              (lambda name: name.replace("post_attention_layernorm", "mlp.odd"), UNSUPPORTED, "unsupported")):  # fmt: skip
            index = json.loads((MODELS / "mini-qwen3-moe" / "model.safetensors.index.json").read_text())
            for shard in {*index["weight_map"].values()}:
                data = (MODELS / "mini-qwen3-moe" / shard).read_bytes()
                size = int.from_bytes(data[:8], "little")
                header = json.loads(data[8 : 8 + size])
                text = json.dumps({change(name): entry for name, entry in header.items()}).encode()
                (target / shard).write_bytes(len(text).to_bytes(8, "little") + text + data[8 + size :])
            index["weight_map"] = {change(name): shard for name, shard in index["weight_map"].items()}
            (target / "model.safetensors.index.json").write_text(json.dumps(index))
            for command in (["inspect", target], ["explain", "--model", target], ["bench", "--model", target]):
                result = run(*command)
                self.assertEqual(result.returncode, code, result.stdout)
                self.assertIn(f"error: {error}", result.stderr)

    def test_what_nothing_computes_is_unsupported(self):
        target = self.broken(quantization_config={"quant_method": "quip"})
        self.assertEqual(run("inspect", target).returncode, UNSUPPORTED)
        self.assertEqual(run("explain", "--model", target).returncode, UNSUPPORTED)

    def test_truncated_shard(self):
        target = self.copy_model("mini-qwen3-moe")
        shard = sorted(target.glob("model-*.safetensors"))[-1]
        shard.write_bytes(shard.read_bytes()[:-1])
        self.fails(BAD_INPUT, "corrupt_file", arguments=["inspect", target])

    def test_a_value_in_a_file_is_no_option(self):
        """What a layer refuses with no option at all is the files' fault, for every verb."""
        path, name = golden_input("mini-deepseek-v3")
        out = self.folder / "out.safetensors"

        def commands(model):
            yield ["run", "--model", model, "--layer", 1, "--input", f"{path}:{name}", "--output", out]
            yield ["run", "--model", model, "--layer", 1, "--input", f"{path}:{name}", "--output", out, "--ranks", 2]
            yield ["verify", "--model", model]
            yield ["bench", "--model", model, "--stage", "layer", "--tokens", 1]
            yield ["demo", model]

        model = self.copy_model("mini-deepseek-v3")
        config = json.loads((model / "config.json").read_text())
        (model / "config.json").write_text(json.dumps({**config, "routed_scaling_factor": 1e300}))
        self.fails(BAD_INPUT, "routed_scaling_factor", "docs/limits.md", arguments=["explain", "--model", model])
        for command in commands(model):
            with self.subTest(verb=command[0], field="routed_scaling_factor"):
                self.fails(BAD_INPUT, "routed_scaling_factor", "1e+300", arguments=command)

        (model / "config.json").write_text(json.dumps(config))
        self.edit_weights(model, "model.layers.1.mlp.gate.e_score_correction_bias", lambda data: b"\xff" * len(data))
        for command in commands(model):
            with self.subTest(verb=command[0], field="e_score_correction_bias"):
                self.fails(BAD_INPUT, "bias", "nan", arguments=command)
        # An option's value stays the option's, whatever the files hold.
        for option in (["--backend", "none_such"], ["--quant", "none_such"]):
            for command in commands(MODELS / "mini-deepseek-v3"):
                with self.subTest(verb=command[0], option=option):
                    self.fails(USAGE, "none_such", arguments=[*command, *option])


if __name__ == "__main__":
    main()
