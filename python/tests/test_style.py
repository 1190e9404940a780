"""The Python files of the package are formatted and pass the linter: ruff, as pyproject.toml sets it up.

python -m ruff format python bench/python_calls.py && python -m ruff check --fix python bench/python_calls.py
"""

from __future__ import annotations

import subprocess
import sys

import pytest
from conftest import REPOSITORY

FILES = ["python", "bench/python_calls.py"]


@pytest.mark.parametrize("command", [["check"], ["format", "--check", "--diff"]], ids=["check", "format"])
def test_ruff(command: list[str]) -> None:
    pytest.importorskip("ruff")
    arguments = [sys.executable, "-m", "ruff", *command, "--no-cache", *FILES]
    done = subprocess.run(arguments, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-1000:]
