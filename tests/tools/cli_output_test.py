#!/usr/bin/env python3
"""Where results go: `run --output` and `bench --plot` on devices, pipes, links, and on what must not be lost.

usage: cli_output_test.py TOOL SOURCE_DIR [unittest arguments]
"""

import json
import os
import resource
import shutil
import stat
import struct
import subprocess
import threading

from cli_support import BUNDLED, MODELS, OK, TOOL, USAGE, ToolTest, golden_input, main, run, tensor_of

MODEL = "mini-qwen3-moe"


class Output(ToolTest):
    def command(self, output, *extra, model=None):
        path, name = golden_input(MODEL)
        return [
            "run", "--model", model or MODELS / MODEL, "--layer", BUNDLED[MODEL], "--input", f"{path}:{name}",
            "--output", output, "--repeat", 1, *extra
        ]  # fmt: skip

    def written(self):
        out = self.folder / "reference.safetensors"
        self.json_of(*self.command(out))
        return out.read_bytes()

    def test_a_pipe_behind_stdout(self):
        want = self.written()
        for path in ("-", "/dev/stdout", "/dev/fd/1"):
            for extra in ([], ["--json"], ["--ranks", "2", "--reduction", "per_slot"]):
                with self.subTest(path=path, extra=extra):
                    result = subprocess.run(
                        [TOOL, *(str(a) for a in self.command(path, *extra))], capture_output=True, timeout=300
                    )
                    self.assertEqual(result.returncode, OK, result.stderr)
                    self.assertEqual(result.stdout, want, "the payload and nothing else")
                    self.assertIn(b'"tokens":256' if extra == ["--json"] else b"256 token(s)", result.stderr)

    def test_an_error_of_the_command_line_is_no_payload(self):
        for output in (["--output", "-"], ["--output=-"], ["--output", "/dev/stdout"]):
            result = run("run", "--model", MODELS / MODEL, "--layer", "x", "--input", "x", *output, "--json")
            self.assertEqual((result.returncode, result.stdout), (USAGE, ""))
            self.assertIn('"exit_code":2', result.stderr)
        self.assertIn('"exit_code":2', run("run", "--layer", "x", "--output", "file", "--json").stdout)

    def test_a_redirected_stdout_is_written_where_it_stands(self):
        want = self.written()
        path = self.folder / "file"
        with open(path, "wb") as out:
            out.write(b"head")
            out.flush()
            result = subprocess.run([TOOL, *(str(a) for a in self.command("-"))], stdout=out, stderr=subprocess.PIPE)
            self.assertEqual(result.returncode, OK, result.stderr)
            out.seek(0, os.SEEK_END)
            out.write(b"tail")
        self.assertEqual(path.read_bytes(), b"head" + want + b"tail")
        # The same file by its name would be replaced under the report.
        with open(path, "wb") as out:
            out.write(b"")
            command = [TOOL, *(str(a) for a in self.command(path))]
            result = subprocess.run(command, stdout=out, stderr=subprocess.PIPE, text=True)
        self.assertEqual(result.returncode, USAGE)
        self.assertIn("behind stdout", result.stderr)

    def test_messages_never_mix_with_the_payload(self):
        command = [TOOL, *(str(a) for a in self.command("-"))]
        result = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        self.assertEqual(result.returncode, USAGE)
        self.assertIn("same place", result.stdout)
        self.fails(USAGE, "messages", arguments=self.command("/dev/stderr"))
        # A failure with the payload on stdout leaves stdout empty, also with --json.
        result = run(*self.command("-", "--quant", "bf61", "--json"))
        self.assertEqual((result.returncode, result.stdout), (USAGE, ""))
        self.assertEqual(json.loads(result.stderr.splitlines()[-1])["exit_code"], USAGE)

    def test_a_named_pipe(self):
        want = self.written()
        path = self.folder / "pipe"
        os.mkfifo(path)
        got = []
        reader = threading.Thread(target=lambda: got.append(path.read_bytes()))
        reader.start()
        value = self.json_of(*self.command(path))
        reader.join(60)
        self.assertEqual(got, [want])
        self.assertEqual(value["output"], str(path))
        self.assertTrue(stat.S_ISFIFO(path.stat().st_mode))

    def test_devices_stay_devices(self):
        self.json_of(*self.command("/dev/null"))
        self.assertTrue(stat.S_ISCHR(os.stat("/dev/null").st_mode))
        if os.path.exists("/dev/full"):
            self.fails(USAGE, "--output", "/dev/full", arguments=self.command("/dev/full"))
            self.assertTrue(stat.S_ISCHR(os.stat("/dev/full").st_mode))

    def test_a_limit_of_file_sizes_is_a_full_disk(self):
        limit = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (1024, 1024))  # noqa: E731
        convert = ["convert", "--model", MODELS / MODEL, "--quant", "mxfp8", "--output", self.folder / "model"]
        for command in (self.command(self.folder / "out"), convert):
            result = subprocess.run(
                [TOOL, *(str(a) for a in command)], capture_output=True, text=True, preexec_fn=limit, timeout=300
            )
            self.assertEqual(result.returncode, USAGE, result.stderr)
            self.assertIn("File too large", result.stderr)
        self.assertEqual(list(self.folder.iterdir()), [])

    def test_a_terminal_needs_force(self):
        control, terminal = os.openpty()
        self.addCleanup(os.close, control)
        self.addCleanup(os.close, terminal)
        command = [TOOL, *(str(a) for a in self.command("-"))]
        result = subprocess.run(command, stdout=terminal, stderr=subprocess.PIPE, text=True, timeout=300)
        self.assertEqual(result.returncode, USAGE)
        self.assertIn("terminal", result.stderr)

    def test_links_are_followed(self):
        want = self.written()
        target = self.folder / "target"
        for link, first in (("relative", "target"), ("absolute", target)):
            path = self.folder / link
            path.symlink_to(first)
            target.unlink(missing_ok=True)
            for _ in range(2):  # dangling, then with a result of ours behind it
                self.json_of(*self.command(path))
                self.assertTrue(path.is_symlink())
                self.assertEqual(target.read_bytes(), want)

    def test_what_is_no_result_is_kept(self):
        path = self.folder / "thesis.txt"
        path.write_text("months of work")
        for extra in ([], ["--ranks", 2]):
            self.fails(USAGE, "thesis.txt", "--force", arguments=self.command(path, *extra))
        self.assertEqual(path.read_text(), "months of work")
        self.json_of(*self.command(path, "--force"))
        self.assertEqual(tensor_of(path, "output")[0], "F32")
        self.json_of(*self.command(path))  # now it is one of ours
        header = json.loads(path.read_bytes()[8 : 8 + struct.unpack("<Q", path.read_bytes()[:8])[0]])
        self.assertEqual(header["__metadata__"], {"content": "layer_output", "producer": "moesaic run"})
        self.assertEqual(sorted(p.name for p in self.folder.iterdir()), ["thesis.txt"])

    def test_inputs_and_the_model_are_kept(self):
        model = self.copy_model(MODEL)
        states = self.folder / "states.safetensors"
        shutil.copy(golden_input(MODEL)[0], states)
        os.link(next(model.glob("model*.safetensors")), self.folder / "hard")
        (self.folder / "link").symlink_to(model / "config.json")
        before = {p: p.read_bytes() for p in model.iterdir()}
        _, name = golden_input(MODEL)
        base = ["run", "--model", model, "--layer", 1, "--input", f"{states}:{name}", "--repeat", 1, "--force"]
        for output in [*before, self.folder / "hard", self.folder / "link"]:
            self.fails(USAGE, "file of the model", arguments=[*base, "--output", output])
        self.fails(USAGE, "read by this command", arguments=[*base, "--output", states])
        self.fails(USAGE, "become a file of the model", arguments=[*base, "--output", model / "model.safetensors"])
        self.assertEqual({p: p.read_bytes() for p in model.iterdir()}, before)
        self.json_of(*base, "--output", model / "states-out.safetensors")

    def test_the_output_is_checked_before_the_work(self):
        for output, words in ((self.folder, "folder"), (self.folder / "no" / "out", "create"), ("", "empty")):
            result = run(*self.command(output, "-v", model=self.folder / "no such model"))
            self.assertEqual(result.returncode, USAGE, result.stderr)
            self.assertIn(words, result.stderr)


class Plot(ToolTest):
    BASE = ["bench", "--shape", "8,2,64,32", "--tokens", "1", "--seconds", "0.01", "--device", "cpu"]

    def test_plots(self):
        picture = self.folder / "time.svg"
        for _ in range(2):
            self.assertEqual(run(*self.BASE, "--plot", picture).returncode, OK)
        self.assertIn('data-producer="moesaic bench"', picture.read_text())
        other = self.folder / "drawn.svg"
        other.write_text('<svg xmlns="http://www.w3.org/2000/svg"/>')
        self.fails(USAGE, "--plot", "--force", arguments=[*self.BASE, "--plot", other])
        self.assertEqual(other.read_text(), '<svg xmlns="http://www.w3.org/2000/svg"/>')
        self.assertEqual(run(*self.BASE, "--plot", other, "--force").returncode, OK)
        peers = self.folder / "peers.jsonl"
        peers.write_text("\n")
        self.fails(USAGE, "read by this", arguments=[*self.BASE, "--peers", peers, "--plot", peers, "--force"])
        config = MODELS / MODEL / "config.json"
        model = ["bench", "--model", MODELS / MODEL, "--tokens", "1", "--seconds", "0.01", "--force"]
        self.fails(USAGE, "file of the model", arguments=[*model, "--plot", config])

    def test_stdout(self):
        for extra in ([], ["--json"]):
            result = run(*self.BASE, "--plot", "-", *extra)
            self.assertEqual(result.returncode, OK, result.stderr)
            self.assertTrue(result.stdout.startswith("<svg ") and result.stdout.endswith("</svg>\n"))
            self.assertIn('"median_us":' if extra else "median us", result.stderr)

    def test_over_ranks_there_is_none(self):
        result = run(*self.BASE, "--stage", "layer", "--ranks", 2, "--plot", self.folder / "time.svg")
        self.assertEqual(result.returncode, 4)
        self.assertIn("--plot", result.stderr)


if __name__ == "__main__":
    main()
