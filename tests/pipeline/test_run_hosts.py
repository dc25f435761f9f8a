"""A job on another machine: `run_job` in a process that has its configuration and a project folder, no more."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from mlflow.entities import Run
from mlflow.tracking import MlflowClient
from omegaconf import OmegaConf

from pipeline import tracking
from pipeline.__main__ import _compose, _composer, _Job, _prepare, main
from pipeline.tracking import Sweep
from tests.job_folders import SWEEP_KEY

PROJECT = Path(__file__).resolve().parents[2]
SMALL = ["task=fact", "task.tokens=250", "task.items=2", "task.max_gen_toks=4", "generate.prefill_step_size=64"]
CHILD = """
import pickle, sys
from hydra.core.hydra_config import HydraConfig
hydra, cfg = pickle.load(sys.stdin.buffer)
HydraConfig.instance().set_config(hydra)
from pipeline.run import StopSweep, run_job
try:
    print("returned", sorted(run_job(cfg)))
except (Exception, StopSweep) as error:
    print("raised", type(error).__name__, error)
"""
on_linux = pytest.mark.skipif(sys.platform != "linux", reason="/dev/full, a device without space, is Linux's")


class Drive:
    """A driver with one job, and hosts that it may run on."""

    def __init__(self, uri: str, model: Path, outputs: Path) -> None:
        given = [*SMALL, "policy=h2o", "model=local", f"model.path={model}", "outputs=outputs", "experiment_name=hosts"]
        with _composer():
            self.master, jobs = _compose(given, True)
        job: _Job = jobs[0]
        job.cfg.outputs = str(outputs)
        _prepare([job])
        job.cfg.outputs = "outputs"
        self.sweep: Sweep = tracking.open_sweep(uri, f"hosts {outputs.parent.name}", SWEEP_KEY, {})
        self.key = job.key
        told = {"key": SWEEP_KEY, "job": job.key, "data": job.data, "index": 0, "total": 1, "started": 0.0, "uri": uri}
        told |= {"experiment_id": self.sweep.experiment_id, "run_id": self.sweep.run_id}
        self.cfg = job.cfg
        OmegaConf.update(self.cfg, "sweep", told, force_add=True)

    def run_on(self, project: Path, *, launcher: str = "dask", **changes: Any) -> str:
        """What run_job returns or raises in a fresh process in `project`; changes: settings, __ for a dot."""
        project.mkdir(exist_ok=True)
        cfg = self.cfg.copy()
        for name, value in changes.items():
            OmegaConf.update(cfg, name.replace("__", "."), value)
        hydra = OmegaConf.masked_copy(self.master, "hydra")
        hydra.hydra.runtime.choices["hydra/launcher"] = launcher
        line = [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(PROJECT)!r})\n{CHILD}"]
        ended = subprocess.run(line, cwd=project, input=pickle.dumps((hydra, cfg)), capture_output=True, check=False)
        assert ended.returncode == 0, ended.stderr.decode()
        said = [line for line in ended.stdout.decode().splitlines() if line.startswith(("returned", "raised"))]
        return said[-1]

    def runs(self) -> list[Run]:
        found = MlflowClient(self.sweep.uri).search_runs([self.sweep.experiment_id], "tags.kind = 'job'")
        return sorted(found, key=lambda run: int(run.info.start_time))


@pytest.fixture
def drive(uri: str, tiny_model_folder: Path, tmp_path: Path) -> Drive:
    return Drive(uri, tiny_model_folder, tmp_path / "driver")


def test_a_job_runs_wherever_its_configuration_goes(drive: Drive, tmp_path: Path) -> None:
    assert "accuracy" in drive.run_on(tmp_path / "mac")
    folder = tmp_path / "mac" / "outputs" / "jobs" / drive.key
    assert json.loads((folder / "published.json").read_text())["uri"] == drive.sweep.uri
    (run,) = drive.runs()
    assert run.info.status == "FINISHED" and run.data.tags["mlflow.parentRunId"] == drive.sweep.run_id
    assert run.data.metrics["memory/peak_bytes"] > 0
    assert not (tmp_path / "driver" / "jobs").exists()


@on_linux
def test_a_full_disk_is_the_trouble_of_one_machine(drive: Drive, tmp_path: Path) -> None:
    full = tmp_path / "mac1" / "outputs" / "jobs" / drive.key / "score.json.draft"
    full.parent.mkdir(parents=True)
    full.symlink_to("/dev/full")
    assert drive.run_on(tmp_path / "mac1").startswith("raised HostUnfit no space left on the disk of ")
    assert "accuracy" in drive.run_on(tmp_path / "mac2")
    first, second = drive.runs()
    assert (first.info.status, second.info.status) == ("KILLED", "FINISHED")
    assert first.data.tags["reason"].startswith("left to another machine: No space left")
    full.symlink_to("/dev/full")
    assert drive.run_on(tmp_path / "mac1", launcher="basic").startswith("raised StopSweep No space left")


@on_linux
def test_a_full_disk_stops_a_sweep_on_one_machine(
    uri: str,
    tiny_model_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    line = ["-m", *SMALL, "policy=h2o,streaming", "model=local", f"model.path={tiny_model_folder}"]
    line += [f"outputs={tmp_path}", "experiment_name=full disk"]
    assert main([*line, "--dry-run"]) == 0
    first = capfd.readouterr().out.split()[0]
    full = tmp_path / "jobs" / first / "score.json.draft"
    full.parent.mkdir(parents=True)
    full.symlink_to("/dev/full")
    assert main(line) == 2
    assert "No space left on the disk" in capfd.readouterr().err
    assert len(list(tmp_path.glob("jobs/*/"))) == 1  # the second one was not begun
    assert main(line) == 0


def test_a_machine_with_other_data_or_without_the_model_is_refused(drive: Drive, tmp_path: Path) -> None:
    told = drive.run_on(tmp_path / "mac", sweep__data="0123456789abcdef")
    assert told.startswith("raised HostUnfit expected the requests of fact with hash 0123456789abcdef, got ")
    assert "make setup" in told
    nowhere = str(tmp_path / "no model")
    assert drive.run_on(tmp_path / "mac", model__path=nowhere).startswith("raised HostUnfit expected a model folder")
    assert drive.run_on(tmp_path / "mac", launcher="basic", model__path=nowhere).startswith("raised StopSweep expected")
    assert not drive.runs()


def test_a_machine_whose_code_changed_since_the_sweep_began_is_refused(drive: Drive, tmp_path: Path) -> None:
    told = drive.run_on(tmp_path / "mac", policy__window=7)  # as if a file that the job's key depends on were another
    assert told.startswith(f"raised HostUnfit expected the job {drive.key} as the sweep began, got another: ")
    assert not drive.runs()
    assert drive.run_on(tmp_path / "mac").startswith("returned")
