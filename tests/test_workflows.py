"""The workflows of .github, which run elsewhere: what they name exists here."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

PROJECT = Path(__file__).resolve().parent.parent
FILES = sorted((PROJECT / ".github" / "workflows").glob("*.yml"))


def read(path: Path) -> dict[str, Any]:
    content = yaml.load(path.read_text(encoding="utf-8"), Loader=yaml.BaseLoader)  # which leaves "on" a word
    assert isinstance(content, dict)
    return content


def steps(path: Path) -> list[dict[str, Any]]:
    return [step for job in read(path)["jobs"].values() for step in job["steps"]]


def commands(path: Path) -> str:
    return "\n".join(step.get("run", "") for step in steps(path))


def test_there_is_one_for_macos() -> None:
    (path,) = (file for file in FILES if file.name == "macos.yml")
    content = read(path)
    assert set(content["on"]) == {"push", "pull_request", "workflow_dispatch"}
    (job,) = content["jobs"].values()
    assert job["strategy"]["matrix"] == {"os": ["macos-15", "macos-latest"], "python": ["3.11", "3.13"]}
    assert "make test\n" in commands(path) + "\n" and "python -m keyformer.selftest" in commands(path)
    assert any("upload-artifact" in step.get("uses", "") for step in steps(path))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_what_it_names_exists(path: Path) -> None:
    targets = set(re.findall(r"^([a-z-]+):.*## ", (PROJECT / "Makefile").read_text(), re.MULTILINE))
    named = re.findall(r"\bmake ([a-z-]+)", commands(path))
    assert named and set(named) <= targets
    modules = re.findall(r"python -m ([a-z_.]+) ?(.*?)(?: \|\||$)", commands(path), re.MULTILINE)
    assert modules
    for module, arguments in modules:
        done = subprocess.run([sys.executable, "-m", module, "--help"], capture_output=True, text=True, cwd=PROJECT)
        assert done.returncode == 0, done.stderr
        assert all(option in done.stdout for option in re.findall(r"--[a-z-]+", arguments))
    for step in steps(path):
        assert ("uses" in step) != ("run" in step)
        assert "uses" not in step or re.fullmatch(r"[a-z-]+/[a-z-]+@v\d+", step["uses"])


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_its_scripts_are_a_shells(path: Path) -> None:
    for step in steps(path):
        if "run" in step:
            done = subprocess.run(["bash", "-n"], input=step["run"], capture_output=True, text=True)
            assert done.returncode == 0, done.stderr
