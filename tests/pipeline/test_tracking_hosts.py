"""Several machines under one sweep: hosts that die, freeze and come back, whatever their clocks say; real processes
against a real MLflow server. A host is a process that believes to be on a machine of its own.
"""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest
from mlflow.entities import Run
from mlflow.tracking import MlflowClient

from pipeline import leases, tracking
from pipeline.tracking import Sweep
from tests.job_folders import SWEEP_KEY, fabricate

pytestmark = pytest.mark.hosts

PROJECT = Path(__file__).resolve().parents[2]
LEASE_S, CONFIRM_S, BEAT_S = 8.0, 4.0, 1.0
HOST = """
import sys, time
from pathlib import Path
offset, machine, uri, experiment_id, run_id, name, key = float(sys.argv[1]), *sys.argv[2:]
real = time.time
time.time = lambda: real() + offset
from pipeline import leases, tracking
for module in (leases, tracking):
    module.BEAT_S = 1.0
leases._machine = lambda: machine
sweep = tracking.Sweep(uri, experiment_id, run_id, name, key)
for line in sys.stdin:
    what, folder = line.rstrip("\\n").split(" ", 1)
    if what == "start":
        job = tracking.start_job(sweep, Path(folder))
        print(job.run_id, flush=True)
    else:
        print(tracking.publish_job(sweep, Path(folder)), flush=True)
"""


class Host:
    """A process that works on the job in `folder`, or another one, for `sweep`."""

    def __init__(self, sweep: Sweep, folder: Path, clock_off: float = 0.0) -> None:
        self.folder = folder
        given = [sweep.uri, sweep.experiment_id, sweep.run_id, sweep.experiment_name, sweep.sweep_key]
        line = [sys.executable, "-c", HOST, str(clock_off), f"machine {id(self)}", *given]
        self.process = subprocess.Popen(line, cwd=PROJECT, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def tell(self, what: str, folder: Path | None = None) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{what} {folder or self.folder}\n")
        self.process.stdin.flush()

    def answer(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def ask(self, what: str, folder: Path | None = None) -> str:
        self.tell(what, folder)
        return self.answer()


@pytest.fixture
def host() -> Iterator[Callable[..., Host]]:
    hosts: list[Host] = []

    def start(*arguments: object) -> Host:
        hosts.append(Host(*arguments))  # type: ignore[arg-type]
        return hosts[-1]

    yield start
    for each in hosts:
        each.process.kill()
        each.process.communicate()


@pytest.fixture
def sweep(uri: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Sweep]:
    """A sweep whose leases last seconds."""
    for module in (leases, tracking):
        for name, value in (("LEASE_S", LEASE_S), ("BEAT_S", BEAT_S), ("CONFIRM_S", CONFIRM_S)):
            monkeypatch.setattr(module, name, value, raising=False)
    opened = tracking.open_sweep(uri, request.node.name, SWEEP_KEY, {"jobs": 2})
    yield opened
    if lease := tracking._leases.pop((uri, opened.run_id), None):
        lease.close()


def runs_of(sweep: Sweep, where: str = "tags.kind = 'job'") -> list[Run]:
    return list(MlflowClient(sweep.uri).search_runs([sweep.experiment_id], where, order_by=["start_time ASC"]))


def status(sweep: Sweep, run_id: str) -> str:
    return str(MlflowClient(sweep.uri).get_run(run_id).info.status)


def eventually(told: Callable[[], bool], within: float) -> float:
    """Seconds until it is so."""
    started = time.monotonic()
    while not told():
        assert time.monotonic() - started < within
        time.sleep(0.2)
    return time.monotonic() - started


@pytest.mark.parametrize("off", [-3600.0, 3600.0], ids=["an hour behind", "an hour ahead"])
def test_a_host_whose_clock_is_off_is_left_alone_while_it_lives_and_not_for_longer(
    sweep: Sweep, tmp_path: Path, host: Callable[..., Host], off: float
) -> None:
    other = host(sweep, fabricate(tmp_path / "mac", "k1", [1.0]), off)
    run_id = other.ask("start")
    until = time.monotonic() + 2.5 * LEASE_S
    while time.monotonic() < until:  # a second driver comes by, again and again
        tracking.open_sweep(sweep.uri, sweep.experiment_name, "another sweep", {})
        assert status(sweep, run_id) == "RUNNING"
        time.sleep(1)
    other.process.kill()
    took = eventually(lambda: status(sweep, run_id) == "KILLED", within=3 * LEASE_S)
    assert took > CONFIRM_S / 2
    assert "died" in MlflowClient(sweep.uri).get_run(run_id).data.tags["reason"]


def test_a_host_that_comes_back_finds_its_run_ended_and_the_job_done(
    sweep: Sweep, tmp_path: Path, host: Callable[..., Host]
) -> None:
    first = host(sweep, fabricate(tmp_path / "mac1", "k1", [1.0]))
    lost = first.ask("start")
    first.process.send_signal(signal.SIGSTOP)  # the lid is closed
    second = host(sweep, fabricate(tmp_path / "mac2", "k1", [1.0]))
    taken_over = second.ask("start")
    eventually(lambda: status(sweep, lost) == "KILLED", within=4 * LEASE_S)
    assert second.ask("publish") == taken_over
    first.process.send_signal(signal.SIGCONT)
    assert first.ask("publish") == taken_over
    assert {run.info.run_id: run.info.status for run in runs_of(sweep)} == {lost: "KILLED", taken_over: "FINISHED"}


def test_a_host_that_comes_back_publishes_what_nobody_else_has(
    sweep: Sweep, tmp_path: Path, host: Callable[..., Host]
) -> None:
    frozen = host(sweep, fabricate(tmp_path / "mac", "k1", [1.0]))
    lost = frozen.ask("start")
    frozen.process.send_signal(signal.SIGSTOP)
    eventually(lambda: status(sweep, lost) == "KILLED", within=4 * LEASE_S)
    frozen.process.send_signal(signal.SIGCONT)
    new = frozen.ask("publish")
    assert {run.info.run_id: run.info.status for run in runs_of(sweep)} == {lost: "KILLED", new: "FINISHED"}
    time.sleep(2 * BEAT_S)  # nor does its lease bring it back
    assert status(sweep, lost) == "KILLED"


def test_a_job_that_finishes_while_it_is_found_dead_stays_finished(
    sweep: Sweep, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = fabricate(tmp_path, "k1", [1.0])
    tracking.start_job(sweep, folder).let_go()
    published: list[str] = []

    class TooLate(leases.Watch):
        def look(self, runs: Iterable[Run], now: float) -> dict[str, bool | None]:
            verdicts: dict[str, bool | None] = {run.info.run_id: False for run in runs}
            published.append(tracking.publish_job(sweep, folder))  # after we read it as RUNNING
            return verdicts

    lease = tracking._leases[sweep.uri, sweep.run_id]
    monkeypatch.setattr(lease, "_watch", TooLate())
    lease.bury_the_dead(MlflowClient(sweep.uri))
    assert status(sweep, published[0]) == "FINISHED"


def test_a_run_that_is_ended_while_it_is_filled_stays_ended(
    sweep: Sweep, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = fabricate(tmp_path, "k1", [1.0])
    job, fill, filled = tracking.start_job(sweep, folder), tracking._fill, []

    def fill_slowly(client: MlflowClient, run: Run, *rest: object) -> None:
        fill(client, run, *rest)  # type: ignore[arg-type]
        filled.append(run.info.run_id)
        if len(filled) == 1:
            client.set_terminated(run.info.run_id, "KILLED")  # the driver took us for dead

    monkeypatch.setattr(tracking, "_fill", fill_slowly)
    done = tracking.publish_job(sweep, folder)
    assert filled == [job.run_id, done] and done != job.run_id
    assert {run.info.run_id: run.info.status for run in runs_of(sweep)} == {job.run_id: "KILLED", done: "FINISHED"}


def test_closing_a_sweep_waits_until_it_is_known_which_jobs_are_dead(
    sweep: Sweep, tmp_path: Path, host: Callable[..., Host]
) -> None:
    lost, other = host(sweep, fabricate(tmp_path / "1", "k1", None)), host(sweep, fabricate(tmp_path / "2", "k2", None))
    dead, alive = lost.ask("start"), other.ask("start")
    lost.process.kill()
    started = time.monotonic()
    tracking.close_sweep(sweep, "KILLED")  # Ctrl-C does not wait
    assert time.monotonic() - started < LEASE_S / 2 and status(sweep, dead) == "RUNNING"
    assert tracking.open_sweep(sweep.uri, sweep.experiment_name, SWEEP_KEY, {}) == sweep
    tracking.close_sweep(sweep, "FINISHED")
    assert status(sweep, dead) == "KILLED" and status(sweep, alive) == "RUNNING"
    assert status(sweep, sweep.run_id) == "FINISHED"


@pytest.mark.parametrize("attempt", ["one run, noted by both", "a run each"])
def test_a_key_that_many_publish_at_the_same_moment_is_finished_once(
    sweep: Sweep, tmp_path: Path, host: Callable[..., Host], attempt: str
) -> None:
    hosts = [host(sweep, tmp_path) for _ in range(3)]
    for number in range(3):
        key = f"k{number}"
        folder = fabricate(tmp_path / f"driver{number}", key, [1.0, 0.0])
        if attempt == "one run, noted by both":  # the driver has the host's folder, with the note of its attempt
            tracking.start_job(sweep, folder).close()
        copies = []
        for copy in range(3):
            copies.append(tmp_path / f"{number} {copy}" / "jobs" / key)
            shutil.copytree(folder, copies[-1])
        if attempt == "a run each":  # but for one that could not reach the server when it began
            for each, copied in zip(hosts[1:], copies[1:], strict=True):
                each.ask("start", copied)
        for each, copied in zip(hosts, copies, strict=True):
            each.tell("publish", copied)
        told = {each.answer() for each in hosts}
        mine = [run for run in runs_of(sweep) if run.data.tags["key"] == key]
        finished = [run.info.run_id for run in mine if run.info.status == "FINISHED"]
        assert len(finished) == 1 and told <= {run.info.run_id for run in mine} and finished[0] in told
        assert not [run for run in mine if run.info.status == "RUNNING"]
        points = MlflowClient(sweep.uri).get_metric_history(finished[0], "accuracy")
        assert [point.value for point in points] == [0.5]
        assert len(MlflowClient(sweep.uri).get_metric_history(finished[0], "kv/bytes")) == 1200
    assert len(tracking.finished(sweep, ["k0", "k1", "k2"])) == 3


def test_a_driver_killed_on_another_machine_is_closed_by_the_next_start(sweep: Sweep) -> None:
    client = MlflowClient(sweep.uri)
    tags = {"kind": "sweep", "sweep_key": "gone", "process": "mini-2:17:1", "lease": str(int(time.time() - 500))}
    gone = client.create_run(sweep.experiment_id, tags=tags).info.run_id
    eventually(lambda: status(sweep, gone) == "KILLED", within=3 * LEASE_S)
    tracking.close_sweep(sweep, "FINISHED")
    late = client.create_run(sweep.experiment_id, tags=tags).info.run_id
    again = tracking.open_sweep(sweep.uri, sweep.experiment_name, SWEEP_KEY, {})
    tracking.close_sweep(again, "FINISHED")  # a sweep that is over at once waits for it
    assert status(sweep, late) == "KILLED"


def test_publish_leaves_a_sweep_to_the_driver_that_is_at_work_on_it(
    sweep: Sweep, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = fabricate(tmp_path, "k1", [1.0], experiment=sweep.experiment_name)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", sweep.uri)
    assert tracking.main(["publish", "--outputs", str(tmp_path)]) == 0
    assert "published k1" in capsys.readouterr().out and not (tmp_path / "reports").exists()
    assert status(sweep, sweep.run_id) == "RUNNING"
    (folder / "published.json").unlink()
    tracking.close_sweep(sweep, "FINISHED")
    assert tracking.main(["publish", "--outputs", str(tmp_path)]) == 0
    assert "#/experiments/" in capsys.readouterr().out
    assert json.loads((folder / "published.json").read_text())["run_id"] == runs_of(sweep)[0].info.run_id
