"""A tracking server that goes away for longer than anyone waits, and a network that loses its answers: real ones."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest
from mlflow.tracking import MlflowClient

from pipeline import embedded_server, tracking
from pipeline.tracking import Sweep
from tests.job_folders import SWEEP_KEY, fabricate

pytestmark = pytest.mark.hosts

PROJECT = Path(__file__).resolve().parents[2]


def sweep_whose_server_dies(
    server: Path, model: Path, outputs: Path, environment: dict[str, str], *overrides: str
) -> subprocess.Popen[str]:
    """A sweep of two jobs at work; the MLflow server in the folder `server` was killed when the first had begun."""
    line = [sys.executable, "-m", "pipeline", "-m", "policy=h2o,streaming", "task=fact", "task.tokens=250"]
    line += ["task.items=8", "task.max_gen_toks=32", "task.until=[]", "generate.batch_size=2", "model=local"]
    line += [f"model.path={model}", f"outputs={outputs}", "experiment_name=outage", *overrides]
    sweep = subprocess.Popen(
        line, cwd=PROJECT, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    while sweep.poll() is None and not any(p.stat().st_size for p in outputs.glob("jobs/*/responses.jsonl")):
        time.sleep(0.05)
    os.killpg(json.loads((server / "server.json").read_text())["pid"], signal.SIGKILL)
    return sweep


def taken(port: int) -> socket.socket:
    """The port, as soon as whoever had it has died."""
    deadline = time.monotonic() + 10
    while True:
        with suppress(OSError):
            return socket.create_server(("127.0.0.1", port))
        assert time.monotonic() < deadline
        time.sleep(0.05)


def finished_sweep(uri: str) -> None:
    client = MlflowClient(uri)
    found = client.get_experiment_by_name("outage")
    assert found is not None
    runs = client.search_runs([found.experiment_id])
    assert sorted(run.info.run_name for run in runs if run.data.tags["kind"] == "job") == [
        "h2o-25pct-fact", "streaming-25pct-fact",
    ]  # fmt: skip
    assert {run.info.status for run in runs} == {"FINISHED"}


def test_a_server_that_comes_back_in_time_gets_everything(tiny_model_folder: Path, tmp_path: Path) -> None:
    outputs, server = tmp_path / "outputs", tmp_path / "server" / "mlflow"
    uri = embedded_server.start(server, port=23150)
    environment = os.environ | {"MLFLOW_TRACKING_URI": uri, "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1"}
    try:
        sweep = sweep_whose_server_dies(server, tiny_model_folder, outputs, environment, "tracking.wait_s=120")
        assert sweep.stdout is not None
        said = ""
        while "waiting for it" not in said:
            said = sweep.stdout.readline()
            assert said
        assert embedded_server.start(server, port=23150) == uri
        rest = sweep.communicate(timeout=300)[0]
        assert sweep.returncode == 0 and rest.count("published ") == 2, rest
        finished_sweep(uri)
    finally:
        embedded_server.stop(server)


@pytest.mark.parametrize("thief", [False, True], ids=["its port is free", "its port is taken"])
def test_our_own_server_is_started_again_at_the_end(tiny_model_folder: Path, tmp_path: Path, thief: bool) -> None:
    server, port = tmp_path / "mlflow", 23350 if thief else 23250
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MLFLOW_")}
    environment |= {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1"}
    try:
        sweep = sweep_whose_server_dies(server, tiny_model_folder, tmp_path, environment, f"tracking.port={port}")
        with ExitStack() as held:
            if thief:
                held.enter_context(taken(port))
            said = sweep.communicate(timeout=300)[0]
        assert sweep.returncode == 0 and "waiting for it" not in said, said
        finished_sweep(str(embedded_server.running(server)))
    finally:
        embedded_server.stop(server)


def test_an_outage_longer_than_the_retries_costs_nothing_and_is_published_once(
    tiny_model_folder: Path, tmp_path: Path
) -> None:
    outputs, server = tmp_path / "outputs", tmp_path / "server" / "mlflow"
    uri = embedded_server.start(server, port=23050)
    environment = os.environ | {"MLFLOW_TRACKING_URI": uri, "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1"}
    try:
        sweep = sweep_whose_server_dies(server, tiny_model_folder, outputs, environment, "tracking.wait_s=2")
        said = sweep.communicate(timeout=300)[0]
        assert sweep.returncode == 0, said
        assert f"{uri} does not answer; waiting for it, 2 s at most" in said
        assert (
            f"pipeline.tracking publish --outputs {outputs}" in " ".join(said.split()) and said.count("accuracy") >= 2
        )
        assert len(list(outputs.glob("jobs/*/score.json"))) == 2 and not list(outputs.glob("jobs/*/published.json"))

        assert embedded_server.start(server, port=23050) == uri
        client = MlflowClient(uri)
        (experiment,) = [e.experiment_id for e in client.search_experiments() if e.name == "outage"]
        assert {run.info.status for run in client.search_runs([experiment])} == {"RUNNING"}  # nobody could end them
        copy = tmp_path / "the driver's copy"
        shutil.copytree(outputs, copy)
        publish = [sys.executable, "-m", "pipeline.tracking", "publish", "--outputs"]
        pipes = {"text": True, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        both = [
            subprocess.Popen([*publish, str(each)], cwd=PROJECT, env=environment, **pipes)  # type: ignore[call-overload]
            for each in (outputs, copy)
        ]
        printed = [each.communicate(timeout=300)[0] for each in both]
        assert [each.returncode for each in both] == [0, 0], printed
        finished = {}
        for run in client.search_runs([experiment]):
            assert run.info.status in ("FINISHED", "KILLED"), run
            if run.data.tags["kind"] == "job" and run.info.status == "FINISHED":
                assert run.info.run_name not in finished
                finished[run.info.run_name] = run.data.metrics["accuracy"]
        assert sorted(finished) == ["h2o-25pct-fact", "streaming-25pct-fact"]
        assert len(list(tmp_path.glob("*/jobs/*/published.json"))) == 4
        (parent,) = client.search_runs([experiment], "tags.kind = 'sweep'")
        assert parent.info.status == "FINISHED" and "summary.csv" in {
            f.path for f in client.list_artifacts(parent.info.run_id)
        }
    finally:
        embedded_server.stop(server)


@contextmanager
def wire_that_loses_an_answer(uri: str, request: bytes) -> Iterator[str]:
    """A TCP proxy that passes bytes on, but cuts the connection in place of the first answer to `request`."""
    host, _, port = uri.removeprefix("http://").rpartition(":")
    lost = threading.Event()

    def pass_on(caller: socket.socket) -> None:
        with caller, socket.create_connection((host, int(port))) as server:
            asked = threading.Event()

            def upstream() -> None:
                with suppress(OSError):
                    while data := caller.recv(65536):
                        if request in data and not lost.is_set():
                            asked.set()
                        server.sendall(data)
                    server.shutdown(socket.SHUT_WR)

            threading.Thread(target=upstream, daemon=True).start()
            with suppress(OSError):
                while data := server.recv(65536):
                    if asked.is_set() and not lost.is_set():
                        lost.set()
                        caller.shutdown(socket.SHUT_RDWR)
                        return
                    caller.sendall(data)

    def accept(listener: socket.socket) -> None:
        with suppress(OSError):
            while True:
                threading.Thread(target=pass_on, args=(listener.accept()[0],), daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=accept, args=(listener,), daemon=True).start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        listener.shutdown(socket.SHUT_RDWR)
    assert lost.is_set()


def test_a_create_whose_answer_is_lost_leaves_one_run(uri: str, tmp_path: Path) -> None:
    client = MlflowClient(uri)
    with wire_that_loses_an_answer(uri, b"experiments/create") as wire:
        opened = tracking.open_sweep(wire, "lost answers", "one", {})
    with wire_that_loses_an_answer(uri, b"runs/create") as wire:
        assert tracking.open_sweep(wire, "lost answers", SWEEP_KEY, {}).experiment_id == opened.experiment_id
    sweep = tracking.open_sweep(uri, "lost answers", SWEEP_KEY, {})
    parents = client.search_runs([sweep.experiment_id], f"tags.sweep_key = '{SWEEP_KEY}'")
    assert [run.info.run_id for run in parents] == [sweep.run_id]

    folder = fabricate(tmp_path, "k1", [1.0])
    with wire_that_loses_an_answer(uri, b"runs/create") as wire:
        begun = tracking.start_job(Sweep(wire, *list(vars(sweep).values())[1:]), folder)
        begun.close()
    everything = client.search_runs([sweep.experiment_id], "tags.key = 'k1'", run_view_type=3)
    assert [run.info.status for run in everything if run.info.lifecycle_stage == "deleted"] == ["KILLED"]  # the ghost
    with wire_that_loses_an_answer(uri, b"runs/update") as wire:  # of the one that says FINISHED
        assert tracking.publish_job(Sweep(wire, *list(vars(sweep).values())[1:]), folder) == begun.run_id
    jobs = client.search_runs([sweep.experiment_id], "tags.kind = 'job'")
    assert [(run.info.run_id, run.info.status) for run in jobs] == [(begun.run_id, "FINISHED")]
