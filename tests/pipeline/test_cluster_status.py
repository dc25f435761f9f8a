"""`make status`: the machines, what each runs, and how far the sweeps in progress are."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from distributed import Client
from mlflow.tracking import MlflowClient

from hydra_plugins.dask_launcher import _core
from pipeline import models, run, tracking
from pipeline.cluster import join
from pipeline.cluster.status import Progress, in_progress
from pipeline.errors import BadInput
from tests.cluster_processes import HOST, Head, ended, free_port, left_behind, running, started

pytestmark = pytest.mark.hosts


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Head]:
    head = started(tmp_path_factory.mktemp("status") / "outputs")
    yield head
    assert head.command.end() == 0
    assert left_behind(head.outputs) == []


def test_without_a_worker_and_without_a_sweep(head: Head) -> None:
    done = ended("status", outputs=head.outputs)
    assert done.returncode == 0, done.stderr
    assert f"scheduler {head.there.scheduler}   MLflow {head.there.mlflow}" in done.stdout
    assert "no worker has joined: `make worker` on each machine" in done.stdout
    assert "no sweep in progress" in done.stdout


def test_the_port_of_mlflow_instead_of_the_scheduler_is_told_within_seconds(head: Head) -> None:
    address = str(head.there.mlflow).removeprefix("https://")
    done = ended("status", "--head", address, outputs=head.outputs)
    assert done.returncode == 2
    assert done.stderr.startswith(f"error: expected a scheduler at tls://{address}, got something else")
    options = {"retries": 0, "poll_s": 1, "wait_for_hosts_s": 5, "head": address}
    with pytest.raises(BadInput, match=f"expected a scheduler at tls://{address}, got none that lets us in"):
        _core.preflight(options, str(head.outputs), [{"model": {}, "task": {}, "memory": 0}])


def test_machines_jobs_and_sweeps(head: Head, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in head.there.environment().items():
        monkeypatch.setenv(name, value)
    uri = str(head.there.mlflow)
    sweep = tracking.open_sweep(uri, "mine", "k" * 16, {"jobs": 7})
    client = MlflowClient(uri)
    for key, status in [
        ("a", "FINISHED"),
        ("b", "FINISHED"),
        ("c", "FAILED"),
        ("d", "KILLED"),
        ("d", "RUNNING"),
        ("b", "FAILED"),
    ]:
        tags = {"kind": "job", "key": key, "sweep_key": f"other {sweep.sweep_key}"}
        job = client.create_run(sweep.experiment_id, tags=tags)
        if status != "RUNNING":
            client.set_terminated(job.info.run_id, status)
    closed = tracking.open_sweep(uri, "mine", "z" * 16, {"jobs": 1})
    tracking.close_sweep(closed, "FINISHED")
    (progress,) = in_progress(head.there)
    name = client.get_run(sweep.run_id).info.run_name
    assert progress == Progress("mine", name, done=2, running=1, failed=1, left=3)

    with (
        running("worker", "--name", "mac1", outputs=head.outputs),
        Client(head.there.scheduler, security=head.there.security(), timeout=60) as scheduler,
    ):
        scheduler.wait_for_workers(1, timeout=60)
        job = scheduler.submit(time.sleep, 60, key="0123-4-keyformer-64-s0-fact", resources={"GPU": 1})
        done = ended("status", outputs=head.outputs)  # a machine that is busy answers too
        job.cancel()
    assert done.returncode == 0, done.stderr
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("mac1")]
    for part in (run.chip(), models.detect_backend(), "GiB", run.versions()["mlx"], run.git_commit()[:9]):
        assert part in line
    assert line.rstrip().endswith("keyformer-64-s0-fact")
    assert re.search(rf"{re.escape(name)} +2 +1 +3 +1 *\n", done.stdout)
    tracking.close_sweep(sweep, "KILLED")


def test_without_mlflow_the_machines_are_shown(head: Head, tmp_path: Path) -> None:
    pem = head.outputs / "cluster" / "join.pem"
    (tmp_path / "cluster").mkdir()
    (tmp_path / "cluster" / "join.pem").touch(0o600)
    moved = pem.read_text().replace(f":{head.mlflow_port}\n", f":{free_port(HOST)}\n")
    (tmp_path / "cluster" / "join.pem").write_text(moved)
    done = ended("status", outputs=tmp_path)
    assert done.returncode == 0
    assert "no worker has joined" in done.stdout and f"sweeps: unknown, https://{HOST}:" in done.stdout


def test_without_a_head(tmp_path: Path) -> None:
    join.make(tmp_path, HOST, free_port(HOST), 5050)
    begun = time.monotonic()
    done = ended("status", outputs=tmp_path)
    assert (done.returncode, done.stdout) == (2, "") and time.monotonic() - begun < 20
    assert f"error: expected a running head, got: no scheduler answers at tls://{HOST}:" in done.stderr
    assert "start it on that machine with `make head`" in done.stderr and done.stderr.count("\n") == 1
