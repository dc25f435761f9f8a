"""tracking against real MLflow servers: one per key whatever is retried, killed, raced or unreachable."""

from __future__ import annotations

import gzip
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import psutil
import pytest
from mlflow.entities import Run
from mlflow.tracking import MlflowClient
from omegaconf import OmegaConf

from pipeline import embedded_server, leases, tracking, tracking_server
from pipeline.errors import BadInput
from pipeline.report import report
from pipeline.tracking import Sweep, TrackingUnreachable
from tests.job_folders import SWEEP_KEY, fabricate

PROJECT = Path(__file__).resolve().parents[2]


@pytest.fixture
def sweep(uri: str, request: pytest.FixtureRequest) -> Sweep:
    """A new sweep in an experiment of the test's own."""
    return tracking.open_sweep(uri, request.node.name, SWEEP_KEY, {"experiment_name": request.node.name, "jobs": 2})


def runs_of(sweep: Sweep, where: str = "tags.kind = 'job'") -> list[Run]:
    return list(MlflowClient(sweep.uri).search_runs([sweep.experiment_id], where, order_by=["start_time ASC"]))


def closed_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def command(*arguments: object) -> subprocess.Popen[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MLFLOW_")}
    line = [sys.executable, "-m", "pipeline.tracking", *map(str, arguments)]
    return subprocess.Popen(
        line, cwd=PROJECT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


# --- the embedded server ---


def test_two_starts_at_once_make_one_server_that_outlives_them_and_is_found_after_a_crash(tmp_path: Path) -> None:
    folder = tmp_path / "mlflow"
    both = [command("start", "--outputs", tmp_path) for _ in range(2)]
    try:
        outputs = [process.communicate(timeout=300) for process in both]
        assert [process.returncode for process in both] == [0, 0], outputs
        uri = outputs[0][0].strip()
        assert outputs[1][0].strip() == uri
        pid = json.loads((folder / "server.json").read_text(encoding="utf-8"))["pid"]
        servers = [p for p in psutil.process_iter(["cwd"]) if p.info["cwd"] == str(folder)]
        assert {os.getpgid(p.pid) for p in servers} == {pid}  # one server with its workers
        assert os.getsid(pid) == pid != os.getsid(0)  # its own session: Ctrl-C here does not reach it
        assert not any("huey" in " ".join(p.cmdline()) for p in servers)  # no job runners
        assert tracking_server.reachable(uri)

        # A job begins, the server crashes, the job cannot publish; the next start finds its port and the job's run.
        sweep = tracking.open_sweep(uri, "crash", SWEEP_KEY, {})
        job_folder = fabricate(tmp_path, "k1", [1.0])
        job = tracking.start_job(sweep, job_folder)
        os.killpg(pid, signal.SIGKILL)
        psutil.wait_procs(servers, timeout=60)
        assert embedded_server.running(folder) is None  # a stale server.json
        job.progress(1)
        job.close()  # never raises
        with pytest.raises(TrackingUnreachable, match=r"pipeline\.tracking publish"):
            tracking.publish_job(sweep, job_folder)
        assert not (job_folder / "published.json").exists()
        config = OmegaConf.create({"uri": None, "host": "127.0.0.1", "port": 5050})
        assert tracking.resolve_uri(config, tmp_path) == uri
        assert tracking.publish_job(sweep, job_folder) == job.run_id

        stopping = command("stop", "--outputs", tmp_path)
        assert stopping.communicate(timeout=60)[0].strip() == "stopped"
        assert not tracking_server.reachable(uri)
        assert not [p for p in psutil.process_iter(["cwd"]) if p.info["cwd"] == str(folder)]
        again = command("stop", "--outputs", tmp_path)
        assert "no local MLflow server" in again.communicate(timeout=60)[0] and again.returncode == 0
        with pytest.raises(TrackingUnreachable, match="not running"):
            tracking.resolve_uri(config, tmp_path, start=False)
    finally:
        embedded_server.stop(folder)


def test_a_server_of_another_folder_is_neither_used_nor_stopped(uri: str, server_outputs: Path, tmp_path: Path) -> None:
    folder = tmp_path / "mlflow"
    port = int(uri.rpartition(":")[2])
    assert embedded_server.start(server_outputs / "mlflow", port=port) == uri  # its own folder: reused
    folder.mkdir()
    copied = (server_outputs / "mlflow" / "server.json").read_text(encoding="utf-8")
    (folder / "server.json").write_text(
        copied, encoding="utf-8"
    )  # as a copied outputs folder has it: pid alive, id served
    assert embedded_server.running(folder) is None
    assert not embedded_server.stop(folder)
    try:
        other = embedded_server.start(folder, port=port)
        assert other != uri
        assert tracking_server.reachable(other) and tracking_server.reachable(uri)
    finally:
        assert embedded_server.stop(folder)
    assert embedded_server.running(server_outputs / "mlflow") == uri


def test_a_server_whose_folder_or_state_went_away_is_ended_and_replaced(tmp_path: Path, server_outputs: Path) -> None:
    outputs, folder = tmp_path / "outputs", tmp_path / "outputs" / "mlflow"
    port = closed_port()

    def servers() -> set[int]:
        return {process.pid for process in embedded_server._members(folder)}

    try:
        uri = embedded_server.start(folder, port=port)
        first = servers()
        (folder / "server.json").unlink()  # as after kill -9 between the start and the note of it
        assert embedded_server.start(folder, port=port) == uri
        second = servers()
        assert second and not first & second

        moved = (folder / "mlflow.db").rename(tmp_path / "moved.db")  # it would answer on, from the file it has open
        assert embedded_server.running(folder) is None
        assert embedded_server.start(folder, port=port) == uri and moved.exists()
        third = servers()
        assert third and not second & third

        shutil.rmtree(outputs)
        assert servers() == third
        assert embedded_server.start(folder, port=port) == uri
        assert servers() and not servers() & third
        shutil.rmtree(outputs)
        assert embedded_server.stop(folder) and not outputs.exists()
        assert not tracking_server.reachable(uri)
        (tmp_path / "elsewhere").mkdir()
        assert not embedded_server.stop(tmp_path / "elsewhere")
        assert embedded_server.running(server_outputs / "mlflow") is not None  # another folder's: untouched
    finally:
        embedded_server.stop(folder)


def test_a_pid_that_belongs_to_something_else_now_is_left_alone(tmp_path: Path) -> None:
    stale = {"pid": os.getpid(), "port": 5050, "uri": "http://127.0.0.1:5050", "id": "0"}
    (tmp_path / "server.json").write_text(json.dumps(stale), encoding="utf-8")
    assert embedded_server.running(tmp_path) is None
    assert not embedded_server.stop(tmp_path)  # and we are still here
    (tmp_path / "server.json").write_text('{"pid": ', encoding="utf-8")
    assert embedded_server.running(tmp_path) is None


def test_a_server_that_cannot_start_shows_its_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    (tmp_path / "mlflow").mkdir()
    (tmp_path / "mlflow" / "mlflow.db").write_text("this is no database " * 100, encoding="utf-8")
    config = OmegaConf.create({"uri": None, "host": "127.0.0.1", "port": closed_port()})
    with pytest.raises(TrackingUnreachable, match="file is not a database"):
        tracking.resolve_uri(config, tmp_path)


def test_addresses_given_win_over_the_embedded_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    configs = {name: OmegaConf.load(PROJECT / "conf" / "tracking" / f"{name}.yaml") for name in ("embedded", "server")}
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://studio:5050/")
    assert tracking.resolve_uri(configs["embedded"], tmp_path) == "http://studio:5050"
    monkeypatch.delenv("MLFLOW_TRACKING_URI")
    with pytest.raises(BadInput, match=r"tracking\.uri"):
        tracking.resolve_uri(configs["server"], tmp_path)
    configs["server"].uri = "http://mini:1"
    assert tracking.resolve_uri(configs["server"], tmp_path) == "http://mini:1"


@pytest.mark.parametrize(
    "address",
    [
        *("garbage", "", "studio:5050", "http://", "http://studio:99999", "http://studio:0", "http://studio:port"),
        *("http://studio:5050/#/experiments/1", "http://me:secret@studio", "http://a b", "sqlite:///mlflow.db"),
        *(5050, True),
    ],
)
def test_an_address_that_cannot_work_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], address: object
) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    with pytest.raises(BadInput, match=r"expected.*tracking\.uri|tracking\.uri: expected") as refused:
        tracking.resolve_uri({"uri": address, "host": None, "port": None}, tmp_path)
    assert "secret" not in str(refused.value)
    if address:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", str(address))
        assert tracking.main(["publish", "--outputs", str(tmp_path)]) == 2
        assert "MLFLOW_TRACKING_URI: expected" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "value"),
    [("host", value) for value in (17, "no such host", "192.0.2.1", "a" * 70, "::1")]
    + [("port", value) for value in (None, 0, 65536, "5050", True, 5050.0)],
)
def test_a_server_of_ours_needs_a_host_and_port_of_this_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: object
) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    with pytest.raises(BadInput, match=rf"tracking\.{name}: expected"):
        tracking.resolve_uri({"uri": None, "host": "localhost", "port": 5050} | {name: value}, tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_folder_that_is_missing_or_cannot_be_written_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    for name in ("start", "publish"):
        assert tracking.main([name, "--outputs", str(tmp_path / "nope")]) == 2
        assert "no folder: correct --outputs" in capsys.readouterr().err
    assert not (tmp_path / "nope").exists()
    (tmp_path / "mlflow").write_text("a file where a folder should be", encoding="utf-8")
    assert tracking.main(["start", "--outputs", str(tmp_path)]) == 2
    assert "expected a folder that can be written" in capsys.readouterr().err


# --- the parent ---


def test_the_parent_is_found_again_by_its_key_even_by_four_at_once(uri: str) -> None:
    def opened(_: int) -> Sweep:
        return tracking.open_sweep(uri, "raced", SWEEP_KEY, {"policy": {"name": ["full", "h2o"]}})

    with ThreadPoolExecutor(4) as pool:
        sweeps = list(pool.map(opened, range(4)))
    assert len({sweep.run_id for sweep in sweeps}) == 1
    tracking.close_sweep(sweeps[0], "KILLED")
    again = tracking.open_sweep(uri, "raced", SWEEP_KEY, {"policy": {"name": "changed"}, "jobs": 3})
    assert again == sweeps[0]
    assert tracking.open_sweep(uri, "raced", "another", {}).run_id != again.run_id
    (parent,) = runs_of(again, f"tags.kind = 'sweep' and tags.sweep_key = '{SWEEP_KEY}'")
    assert parent.info.status == "RUNNING"
    assert parent.info.run_name.startswith("sweep raced 20")
    assert parent.data.params == {"policy.name": '["full", "h2o"]', "jobs": "3"}


def test_an_experiment_deleted_in_the_ui_gives_its_name_back(sweep: Sweep) -> None:
    MlflowClient(sweep.uri).delete_experiment(sweep.experiment_id)
    again = tracking.open_sweep(sweep.uri, sweep.experiment_name, SWEEP_KEY, {})
    assert again.experiment_id != sweep.experiment_id
    assert MlflowClient(sweep.uri).get_experiment(sweep.experiment_id).lifecycle_stage == "deleted"


def test_closing_writes_report_curves_and_differences_and_ends_dead_children(sweep: Sweep, tmp_path: Path) -> None:
    full = fabricate(tmp_path, "k-full", [1.0, 1.0], policy="full", budget=None)
    cut = fabricate(tmp_path, "k-cut", [1.0, 0.0])
    dead = fabricate(tmp_path, "k-dead", None, budget=0.1)
    for folder in (full, cut):
        tracking.publish_job(sweep, folder)
    tracking.start_job(sweep, dead).close()
    tracking.close_sweep(sweep, "FAILED", report(sweep, tmp_path / "report").files)

    client = MlflowClient(sweep.uri)
    by_key = {run.data.tags["key"]: run for run in runs_of(sweep)}
    assert by_key["k-cut"].data.metrics["accuracy_vs_full"] == -0.5
    assert "accuracy_vs_full" not in by_key["k-full"].data.metrics
    assert by_key["k-dead"].info.status == "KILLED" and "died" in by_key["k-dead"].data.tags["reason"]
    parent = client.get_run(sweep.run_id)
    assert parent.info.status == "FAILED"
    assert parent.data.tags["reason"] == "2 jobs FINISHED, 1 jobs KILLED"
    found = {file.path for folder in (None, "figures") for file in client.list_artifacts(sweep.run_id, folder)}
    pictures = {"figures/accuracy_vs_budget.png", "figures/accuracy_vs_memory.png"}
    assert found == {"summary.csv", "report.md", "figures"} | pictures
    curves = {name: client.get_metric_history(sweep.run_id, name) for name in parent.data.metrics}
    steps = {name: [(point.step, point.value) for point in points] for name, points in curves.items()}
    assert steps == {"accuracy_vs_budget/fact/full": [(25, 1.0)], "accuracy_vs_budget/fact/keyformer": [(25, 0.5)]}
    with pytest.raises(ValueError, match="FINISHED, FAILED or KILLED"):
        tracking.close_sweep(sweep, "done")


def test_opening_a_sweep_ends_what_died_in_the_experiment_and_nothing_else(sweep: Sweep) -> None:
    client = MlflowClient(sweep.uri)
    script = (
        "import sys; from pipeline import tracking; from pathlib import Path; from tests.job_folders import fabricate\n"
        "uri, name, folder = sys.argv[1:]; sweep = tracking.open_sweep(uri, name, 'died', {})\n"
        "tracking.start_job(sweep, fabricate(Path(folder), 'k1', None)); print(sweep.run_id, flush=True); input()\n"
    )
    now, machine = time.time(), leases._machine()
    pid1 = f"{machine}:1:{leases._started(1)}"
    sweeps = {  # what only watching can tell is left RUNNING by one look: test_tracking_hosts.py
        "alive elsewhere": ("mini-2:1:1", now, "RUNNING"),
        "silent elsewhere": ("mini-2:1:1", now - 61, "RUNNING"),
        "alive here, however silent": (pid1, now - 61, "RUNNING"),
        "its number is another process's now": (f"{machine}:{os.getpid()}:1", now, "KILLED"),
        "the same, but with a living job": (f"{machine}:{os.getpid()}:1", now, "RUNNING"),
    }
    for name, (process, lease, _) in sweeps.items():
        tags = {"kind": "sweep", "sweep_key": name, "process": process, "lease": str(int(lease))}
        run = client.create_run(sweep.experiment_id, tags=tags, run_name=name)
        if "job" in name:
            tags |= {
                "kind": "job",
                "mlflow.parentRunId": run.info.run_id,
                "process": "mini-2:1:1",
                "lease": str(int(now)),
            }
            living = client.create_run(sweep.experiment_id, tags=tags, run_name="its job")
    with tempfile.TemporaryDirectory() as folder:
        line = [sys.executable, "-c", script, sweep.uri, sweep.experiment_name, folder]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        with subprocess.Popen(line, cwd=PROJECT, text=True, **pipes) as driver:  # type: ignore[call-overload]
            other = driver.stdout.readline().strip()
            tracking.open_sweep(sweep.uri, sweep.experiment_name, "next", {})
            assert client.get_run(other).info.status == "RUNNING"  # a live one is left alone
            driver.kill()
    tracking.open_sweep(sweep.uri, sweep.experiment_name, "next", {})
    states = {run.info.run_name: run.info.status for run in runs_of(sweep, "tags.kind = 'sweep'")}
    assert {name: states[name] for name in sweeps} == {name: state for name, (_, _, state) in sweeps.items()}
    died = client.get_run(other)
    assert died.info.status == "KILLED" and "died" in died.data.tags["reason"]
    jobs = {run.info.run_id: run.info.status for run in runs_of(sweep)}
    assert jobs.pop(living.info.run_id) == "RUNNING" and list(jobs.values()) == ["KILLED"]
    assert client.get_run(sweep.run_id).info.status == "RUNNING"


# --- a job ---


def test_a_job_is_published_whole_and_once(sweep: Sweep, tmp_path: Path) -> None:
    folder = fabricate(tmp_path, "k1", [1.0, 0.0, 1.0, 0.0], settings={"policy.tau_init": 1.0, "prefill": "chunked"})
    job = tracking.start_job(sweep, folder)
    (begun,) = runs_of(sweep)
    assert (begun.info.status, begun.info.run_id) == ("RUNNING", job.run_id)
    job.progress(2)
    job.close()
    assert tracking.publish_job(sweep, folder) == job.run_id
    assert json.loads((folder / "published.json").read_text(encoding="utf-8")) == {
        "uri": sweep.uri,
        "run_id": job.run_id,
    }
    client = MlflowClient(sweep.uri)
    before = client.get_run(job.run_id).to_dictionary()
    (folder / "published.json").unlink()  # as after a crash right before it was written
    (folder / "attempt.json").unlink()
    assert tracking.publish_job(sweep, folder) == job.run_id
    assert client.get_run(job.run_id).to_dictionary() == before

    (run,) = runs_of(sweep)
    assert run.info.status == "FINISHED" and run.info.run_name == "keyformer-0.25-s0-fact"
    assert run.info.end_time >= run.info.start_time
    tags = run.data.tags
    assert {name: tags[name] for name in ("kind", "key", "sweep_key", "mlflow.parentRunId")} == {
        "kind": "job",
        "key": "k1",
        "sweep_key": SWEEP_KEY,
        "mlflow.parentRunId": sweep.run_id,
    }
    assert (tags["host"], tags["chip"], tags["git_commit"]) == ("studio-1", "Apple M4 Max", "0123abc")
    assert len(tags["attempt"]) == 32 and abs(time.time() - int(tags["lease"])) < 600
    params = run.data.params
    expected = {"budget": "0.25", "budget_rows": "128", "seed": "0", "policy.tau_init": "1.0", "prefill": "chunked"}
    expected |= {"policy.name": "keyformer", "policy.sinks": "null", "policy.noise": "true", "model.name": "smollm2"}
    expected |= {"model.revision": "sha256:feed", "data.hash": "data-of-fact", "task.name": "fact"}
    assert {name: params[name] for name in expected} == expected
    assert params["task.description"] == "x" * 497 + "..."
    metrics = run.data.metrics
    assert metrics["accuracy"] == metrics["task/contains"] == 0.5
    assert metrics["kv/saved_fraction"] == 0.75 and metrics["kv/bytes_decode_peak"] == 5.9e6
    assert metrics["time/publish_s"] > 0
    steps = client.get_metric_history(job.run_id, "kv/bytes")
    assert [(point.step, point.value) for point in steps] == [(step, 46080.0 * step) for step in range(1, 1201)]
    done = client.get_metric_history(job.run_id, "progress/items")
    assert sorted((point.step, point.value) for point in done) == [(2, 2.0), (4, 4.0)]
    (data,) = run.inputs.dataset_inputs
    assert (data.dataset.name, data.dataset.digest) == ("fact", "data-of-fact")

    local = Path(client.download_artifacts(job.run_id, "", str(tmp_path)))
    assert {path.name for path in local.iterdir() if path.is_file()} == {
        "config.yaml",
        "responses.jsonl.gz",
        "samples.json",
        "environment.json",
    }
    assert (local / "config.yaml").read_text(encoding="utf-8") == (folder / "config.yaml").read_text(encoding="utf-8")
    unpacked = gzip.decompress((local / "responses.jsonl.gz").read_bytes())
    assert unpacked == (folder / "responses.jsonl").read_bytes()
    table = json.loads((local / "samples.json").read_text(encoding="utf-8"))
    assert table["columns"] == ["doc_id", "prompt_head", "prompt_tail", "target", "response", "accuracy"]
    assert table["data"][1] == [1, "Alice lives in", "Where?", "Paris", "Paris é", 0.0]
    assert json.loads(tags["mlflow.loggedArtifacts"]) == [{"path": "samples.json", "type": "table"}]
    environment = json.loads((local / "environment.json").read_text(encoding="utf-8"))
    assert environment["versions"] == {"mlx": "0.32.4", "mlx-lm": "0.32.2"} and environment["chip"] == "Apple M4 Max"


def test_resume_finds_finished_jobs_of_any_sweep_and_counts_them_in(sweep: Sweep, tmp_path: Path) -> None:
    run_id = tracking.publish_job(sweep, fabricate(tmp_path, "k1", [1.0]))
    tracking.start_job(sweep, fabricate(tmp_path, "k2", None)).fail("RuntimeError: out of memory")
    wider = tracking.open_sweep(sweep.uri, sweep.experiment_name, "wider", {})
    assert tracking.finished(wider, ["k1", "k2", "k3"]) == {"k1": run_id}
    assert [(row["policy"], row["accuracy"]) for row in report(wider, tmp_path / "r").rows] == [("keyformer", 1.0)]
    assert tracking.finished(sweep, ["k1"]) == {"k1": run_id}
    failed = next(run for run in runs_of(sweep) if run.data.tags["key"] == "k2")
    assert (failed.info.status, failed.data.tags["reason"]) == ("FAILED", "RuntimeError: out of memory")


def test_only_attempts_known_to_be_dead_are_killed(sweep: Sweep, tmp_path: Path) -> None:
    client = MlflowClient(sweep.uri)
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    now, machine = time.time(), leases._machine()
    attempts = {
        "silent elsewhere": ("mini-2:1:1", now - 61, "RUNNING"),
        "alive elsewhere": ("mini-2:1:1", now - 30, "RUNNING"),
        "its process ended": (f"{machine}:{ended.pid}:1", now, "KILLED"),
        "alive here": (f"{machine}:{os.getppid()}:{leases._started(os.getppid())}", now, "RUNNING"),
        "this process, earlier": (leases.signs_of_life(now)["process"], now, "KILLED"),
    }
    for name, (process, lease, _) in attempts.items():
        tags = {"kind": "job", "key": "k1", "sweep_key": SWEEP_KEY, "process": process, "lease": str(int(lease))}
        client.create_run(sweep.experiment_id, tags=tags, run_name=name)
    folder = fabricate(tmp_path, "k1", [1.0])
    job = tracking.start_job(sweep, folder)
    states = {run.info.run_name: run.info.status for run in runs_of(sweep) if run.info.run_id != job.run_id}
    assert states == {name: state for name, (_, _, state) in attempts.items()}
    job.kill()
    assert client.get_run(job.run_id).info.status == "KILLED"


def test_an_attempt_killed_by_another_driver_publishes_as_a_new_run(sweep: Sweep, tmp_path: Path) -> None:
    folder = fabricate(tmp_path, "k1", [1.0])
    job = tracking.start_job(sweep, folder)
    MlflowClient(sweep.uri).set_terminated(job.run_id, "KILLED")
    job.fail("too late")  # it is ended already: left as it is
    second = tracking.publish_job(sweep, folder)
    assert {run.info.run_id: run.info.status for run in runs_of(sweep)} == {job.run_id: "KILLED", second: "FINISHED"}

    late = fabricate(tmp_path / "other host", "k1", [1.0])  # the same job, begun elsewhere, comes in second
    late_job = tracking.start_job(sweep, late)
    assert tracking.publish_job(sweep, late) == second
    assert second in MlflowClient(sweep.uri).get_run(late_job.run_id).data.tags["reason"]
    assert [run.info.run_id for run in runs_of(sweep) if run.info.status == "FINISHED"] == [second]


def test_values_that_are_no_numbers_are_flagged_and_never_logged(sweep: Sweep, tmp_path: Path) -> None:
    folder = fabricate(tmp_path, "k1", [1.0], metrics={"speed/ttft_s": float("nan"), "memory/peak_bytes": float("inf")})
    score = {"metrics": {"accuracy": float("nan"), "task/f1": 0.5}}
    (folder / "score.json").write_text(json.dumps(score), encoding="utf-8")
    run = MlflowClient(sweep.uri).get_run(tracking.publish_job(sweep, folder))
    assert run.data.tags["nonfinite"] == "accuracy, memory/peak_bytes, speed/ttft_s"
    assert run.data.metrics["task/f1"] == 0.5
    assert not run.data.metrics.keys() & {"accuracy", "memory/peak_bytes", "speed/ttft_s"}


@pytest.mark.parametrize("name", ["contains,none", "a//b", "/a", "", "a@0.5", "../a"])
def test_illegal_metric_names_are_refused(sweep: Sweep, tmp_path: Path, name: str) -> None:
    folder = fabricate(tmp_path, "k1", [1.0], metrics={name: 1.0})
    with pytest.raises(BadInput, match="metric names"):
        tracking.publish_job(sweep, folder)


def test_an_unfinished_or_broken_folder_is_refused(sweep: Sweep, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"score\.json"):
        tracking.publish_job(sweep, fabricate(tmp_path, "k1", None))
    broken = fabricate(tmp_path, "k2", [1.0])
    (broken / "job.json").write_text('{"key": "k2"', encoding="utf-8")
    with pytest.raises(BadInput, match=r"job\.json"):
        tracking.publish_job(sweep, broken)


# --- a network that misbehaves ---


def test_a_server_that_is_not_there_is_said_quickly_and_with_the_way_out(uri: str, tmp_path: Path) -> None:
    nowhere = f"http://127.0.0.1:{closed_port()}"
    lost = Sweep(nowhere, "1", "0" * 32, "trial", SWEEP_KEY)
    assert not tracking_server.reachable(nowhere) and tracking_server.reachable(uri)
    folder = fabricate(tmp_path, "k1", [1.0])
    for call in (
        lambda: tracking.open_sweep(nowhere, "trial", SWEEP_KEY, {}),
        lambda: tracking.start_job(lost, folder),
        lambda: tracking.publish_job(lost, folder),
        lambda: tracking.close_sweep(lost, "FINISHED"),
    ):
        with pytest.raises(TrackingUnreachable, match=r"python -m pipeline\.tracking publish"):
            call()


def test_a_server_that_is_there_but_cannot_work_is_unreachable_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    folder = fabricate(tmp_path, "k1", [1.0])
    answers = [
        b"HTTP/1.1 503 Service Unavailable\r\n",
        b"HTTP/1.1 500 Oops\r\n",
        b"HTTP/1.1 200 OK\r\n",
        b"garbage\r\n",
    ]
    for answer in answers:

        class Ill(BaseHTTPRequestHandler):
            def do_GET(self, answer: bytes = answer) -> None:
                good = b"HTTP/1.1 200 OK\r\n" if self.path == "/health" and answer != b"garbage\r\n" else answer
                self.wfile.write(good + b"Content-Length: 2\r\nConnection: close\r\n\r\nOK")
                self.close_connection = True

            do_POST = do_GET

            def log_message(self, *_: object) -> None:
                pass

        with ThreadingHTTPServer(("127.0.0.1", 0), Ill) as server:
            threading.Thread(target=server.serve_forever, daemon=True).start()
            ill = f"http://127.0.0.1:{server.server_port}"
            with pytest.raises(TrackingUnreachable, match="publish them later"):
                tracking.open_sweep(ill, "trial", SWEEP_KEY, {})
            with pytest.raises(TrackingUnreachable, match=f"publish --outputs {tmp_path}"):
                tracking.publish_job(Sweep(ill, "1", "0" * 32, "trial", SWEEP_KEY), folder)
            server.shutdown()
    assert not tracking_server.reachable("http://127.0.0.1:port")


# --- publish later ---


@pytest.mark.parametrize("note", ["", "[]", "null", '{"run_id"', "{}"])
def test_empty_and_broken_notes_count_as_absent(
    sweep: Sweep, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, note: str
) -> None:
    folder = fabricate(tmp_path, "k1", [1.0], experiment=sweep.experiment_name)
    for name in ("published.json", "attempt.json"):
        (folder / name).write_text(note, encoding="utf-8")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", sweep.uri)
    assert tracking.main(["publish", "--outputs", str(tmp_path)]) == 0
    (run,) = runs_of(sweep)
    assert json.loads((folder / "published.json").read_text(encoding="utf-8"))["run_id"] == run.info.run_id


def test_publish_later_finds_the_sweep_and_makes_its_report(
    uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    for key, policy, budget in (("k1", "full", None), ("k2", "h2o", 0.25)):
        fabricate(tmp_path, key, [1.0, 0.0], policy=policy, budget=budget, experiment="later", sweep_key="late")
    fabricate(tmp_path, "k3", None, experiment="later", sweep_key="late")  # not finished: not published
    (fabricate(tmp_path, "k4", [1.0]) / "job.json").write_text("{}", encoding="utf-8")
    assert tracking.main(["publish", "--outputs", str(tmp_path)]) == 1
    said = capsys.readouterr()
    assert (
        "k4" in said.err and "published k1" in said.out and "published k2" in said.out and "#/experiments/" in said.out
    )
    sweep = tracking.open_sweep(uri, "later", "late", {})
    assert sorted(run.data.tags["key"] for run in runs_of(sweep)) == ["k1", "k2"]
    assert {file.path for file in MlflowClient(uri).list_artifacts(sweep.run_id)} >= {"summary.csv", "figures"}
    (tmp_path / "jobs" / "k4" / "score.json").unlink()
    assert tracking.main(["publish", "--outputs", str(tmp_path)]) == 0
    assert "nothing to publish" in capsys.readouterr().out
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{closed_port()}")
    (tmp_path / "jobs" / "k1" / "published.json").unlink()
    assert tracking.main(["publish", "--outputs", str(tmp_path)]) == 2
    assert "expected an MLflow server" in capsys.readouterr().err
