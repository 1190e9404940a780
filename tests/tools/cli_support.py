"""What the tests of the command line share: they run the tool as a user does, on the bundled checkpoints, and
look at output, JSON, exit codes and messages. Every cli_*_test.py takes TOOL SOURCE_DIR [unittest arguments].
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
from pathlib import Path

TOOL = sys.argv[1]
MODELS = Path(sys.argv[2]) / "testdata" / "models"
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

    def edit_weights(self, model, name, edit):
        """Replaces the bytes of one tensor of a copied model."""
        for shard in model.glob("model*.safetensors"):
            header, blob = read_safetensors(shard)
            if name not in header:
                continue
            begin, end = header[name]["data_offsets"]
            data = edit(blob[begin:end])
            assert len(data) == end - begin
            text = shard.read_bytes()
            start = len(text) - len(blob) + begin
            shard.write_bytes(text[:start] + data + text[start + len(data) :])
            return
        raise AssertionError(f"{model} has no {name}")


def main():
    unittest.main(argv=[sys.argv[0], *sys.argv[3:]])
