"""docs/python.md is executed, block by block, in one namespace."""

from __future__ import annotations

import pathlib
import re
import runpy
import sys

import pytest
from conftest import REPOSITORY


def test_the_page_on_python_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("numpy")
    monkeypatch.chdir(REPOSITORY)
    text = (REPOSITORY / "docs" / "python.md").read_text()
    namespace: dict[str, object] = {}
    blocks = list(re.finditer(r"^```python( torch)?\n(.*?)^```", text, re.M | re.S))
    assert len(blocks) >= 10
    for block in blocks:
        if block[1]:
            pytest.importorskip("torch")
            pytest.importorskip("transformers")
        line = text[: block.start(2)].count("\n")
        exec(compile("\n" * line + block[2], "docs/python.md", "exec"), namespace)


def test_the_example_says_the_same_tokens(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    script = pathlib.Path(__file__).resolve().parents[1] / "examples" / "generate.py"
    monkeypatch.setattr(sys, "argv", ["generate.py", "--tokens", "12"])
    runpy.run_path(str(script), run_name="__main__")
    assert "12 of 12 tokens are the same" in capsys.readouterr().out
