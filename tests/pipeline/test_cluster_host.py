"""`python -m pipeline.cluster describe|prefetch`: one machine, as the launcher sees it."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
from omegaconf import OmegaConf

from pipeline import models, run
from pipeline.cluster.host import prefetch
from pipeline.errors import BadInput
from pipeline.load import load
from tests.cluster_processes import PROJECT, ended


def test_describe_is_one_line_about_this_machine_now(tmp_path: Path) -> None:
    done = ended("describe", outputs=tmp_path / "not" / "made")
    assert done.returncode == 0, done.stderr
    about = json.loads(done.stdout)
    assert done.stdout.count("\n") == 1
    assert set(about) == {
        *("host", "chip", "backend", "memory_bytes", "free_disk_bytes", "python", "commit", "code", "lock", "versions")
    }
    assert about["host"] == os.uname().nodename and about["chip"]
    assert about["backend"] == models.detect_backend()
    if about["backend"] == "cpu":
        assert about["memory_bytes"] == psutil.virtual_memory().total
    assert 0 < about["free_disk_bytes"] <= psutil.disk_usage(str(tmp_path)).total
    assert about["code"] == run.code_hash() and about["commit"] == run.git_commit()
    assert about["lock"] == hashlib.sha256((PROJECT / "requirements.lock").read_bytes()).hexdigest()
    assert run.versions().items() <= about["versions"].items() and "distributed" in about["versions"]
    assert not (tmp_path / "not").exists()


def entry(model_folder: Path, *overrides: str) -> dict[str, Any]:
    model = {"name": "tiny", "source": "local", "path": str(model_folder), "dtype": "auto"}
    task = OmegaConf.merge(OmegaConf.load(PROJECT / "conf/task/fact.yaml"), OmegaConf.from_dotlist(list(overrides)))
    return {"model": model, "task": OmegaConf.to_container(task, resolve=True)}


def test_prefetch_gives_what_the_driver_computes(tmp_path: Path, tiny_model_folder: Path) -> None:
    entries = [entry(tiny_model_folder, "tokens=256", "items=2"), entry(tiny_model_folder, "tokens=300", "items=2")]
    config, outputs = tmp_path / "config.json", tmp_path / "outputs"
    config.write_text(json.dumps(entries))
    done = ended("prefetch", config, outputs=outputs)
    assert done.returncode == 0, done.stderr
    got = [json.loads(line) for line in done.stdout.splitlines()]
    folder = models.resolve(OmegaConf.create(entries[0]["model"]), tmp_path / "driver")
    tokenizer = models.load_tokenizer(folder)
    wanted = [load(OmegaConf.create(e["task"]), tokenizer, folder.context, tmp_path / "driver-data") for e in entries]
    same = {"revision": folder.revision, "dtype": folder.dtype, "backend": folder.backend}
    assert got == [same | {"data": data.hash} for data in wanted]
    assert got[0]["data"] != got[1]["data"]
    assert sorted(os.listdir(outputs / "data")) == sorted(line["data"] for line in got)


@pytest.mark.parametrize("text", ["", "{}x", "[1]", '[{"model": {}}]', '{"model": 1}', "null"])
def test_prefetch_of_something_else(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(BadInput, match=r"expected a JSON list of .*config\.json, got .*; correct the file"):
        list(prefetch(tmp_path / "config.json", tmp_path / "outputs"))


def test_prefetch_of_a_model_that_is_not_there(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps([entry(tmp_path / "nowhere")]))
    done = ended("prefetch", config, outputs=tmp_path / "outputs")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: expected a model folder at model.path") and "nowhere" in done.stderr
    assert done.stderr.count("\n") == 1


def test_nothing_but_results_on_stdout(tmp_path: Path) -> None:
    code = (
        "import os, sys, subprocess; from pipeline.cluster.__main__ import _only_results_on_stdout as only\n"
        "with only() as out:\n"
        "    print('python'); os.write(1, b'C\\n'); subprocess.run(['echo', 'child']); print('result', file=out)\n"
        "print('after')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=PROJECT)
    assert done.stdout == "result\nafter\n"
    assert sorted(done.stderr.split()) == ["C", "child", "python"]
