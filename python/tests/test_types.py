"""The stubs are what the extension has, and the package passes a strict check of types."""

from __future__ import annotations

import pathlib
import subprocess
import sys

import pytest
from conftest import REPOSITORY

import moesaic

PACKAGE = pathlib.Path(moesaic.__file__).parent
# What a function or class of nanobind is beside a plain one, whatever its signature.
OF_NANOBIND = (
    "metaclass differs",
    "is not a function",
    "stub is a staticmethod but runtime is not",
    'stub does not have *args parameter "args"',
)
SOURCE = pathlib.Path(__file__).resolve().parents[1] / "moesaic"


def run(*arguments: str, cwd: pathlib.Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", *arguments], capture_output=True, text=True, cwd=cwd, check=False)


def test_stubs_are_those_that_the_extension_yields(tmp_path: pathlib.Path) -> None:
    pytest.importorskip("nanobind")
    made = run("nanobind.stubgen", "-m", "moesaic._core", "-o", str(tmp_path / "_core.pyi"), cwd=tmp_path)
    assert made.returncode == 0, made.stderr
    assert (tmp_path / "_core.pyi").read_text() == (SOURCE / "_core.pyi").read_text(), (
        "python -m nanobind.stubgen -m moesaic._core -o python/moesaic/_core.pyi"
    )


def test_stubtest(tmp_path: pathlib.Path) -> None:
    pytest.importorskip("mypy")
    (tmp_path / "mypy.ini").write_text("[mypy]\nstrict = True\n")
    found = run(
        *("mypy.stubtest", "--concise", "--ignore-disjoint-bases", "moesaic._core"),
        *("--mypy-config-file", "mypy.ini"),
        cwd=tmp_path,
    )
    differing = [
        line for line in found.stdout.splitlines() if line.startswith("moesaic.") and not line.endswith(OF_NANOBIND)
    ]
    assert not differing and "not checking stubs" not in found.stdout, found.stdout + found.stderr


def test_strict_types(tmp_path: pathlib.Path) -> None:
    """Every module of the package, as pyproject.toml sets mypy up."""
    pytest.importorskip("mypy")
    checked = run("mypy", "--strict", "--cache-dir", str(tmp_path), "-v", cwd=REPOSITORY)
    assert checked.returncode == 0, checked.stdout
    for path in SOURCE.glob("*.py"):
        name = "moesaic" if path.stem == "__init__" else f"moesaic.{path.stem}"
        assert f"module='{name}'" in checked.stderr, f"{name} was not looked at"
