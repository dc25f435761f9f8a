"""Whatever happens to a sweep over several machines: each job FINISHED exactly once, nothing left RUNNING, no healthy
host idle while jobs wait, and the same results as of the undisturbed run.

`make test-cluster` runs all of it, each test several times; those marked cluster_quick are short, and what the
launcher's own tests, with processes on one address, cannot do.
"""

from __future__ import annotations

import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from desk import JOB_PROCESS, MACS, MLFLOW_PORT, Desk, Job, Result, job_at_work
from network import Host, wait_until

pytestmark = pytest.mark.cluster
quick = pytest.mark.cluster_quick

Expected = dict[str, Result]
Measured = Callable[..., None]


@pytest.fixture
def experiment(request: pytest.FixtureRequest) -> str:
    """A name of its own for each test and each time that it is run."""
    return re.sub(r"\W+", "-", request.node.name.removeprefix("test_")) + f"-{os.urandom(2).hex()}"


def began_again(desk: Desk, experiment: str, job: Job, since: float) -> float:
    """Seconds from `since` until another attempt of the job began."""
    starts = [r.info.start_time / 1000 for r in desk.runs(experiment) if r.data.tags["key"] == job.key]
    return min(start for start in starts if start > since) - since


def statuses(desk: Desk, experiment: str) -> list[str]:
    return [r.info.status for r in desk.runs(experiment)]


def no_jobs(desk: Desk) -> None:
    wait_until(lambda: not any(mac.pids(JOB_PROCESS) for mac in desk.macs), 60, "no job is at work on any host")


@quick
def test_two_sweeps_started_together_on_a_fresh_store(tidy_desk: Desk, expected: Expected, experiment: str) -> None:
    desk = tidy_desk
    desk.fresh_store()
    desk.wait_for_workers()
    first = desk.sweep(experiment)
    second = desk.sweep(experiment, on=desk.head)
    assert first.ends() == 0, first.output
    assert second.ends() == 0, second.output
    desk.check(experiment, expected)
    assert max(first.peak_jobs.values()) <= 2  # one at work, and one that waits for the GPU


@quick
def test_nothing_happens(tidy_desk: Desk, expected: Expected, experiment: str, measured: Measured) -> None:
    desk = tidy_desk
    sweep = desk.sweep(experiment)
    assert sweep.ends() == 0, sweep.output
    finished = desk.check(experiment, expected)
    sweep.nobody_idled()
    assert {run.data.tags["host"] for run in finished.values()} == set(MACS)
    assert sweep.output.count("perplexity 3") >= 4 and sweep.output.count("starts on mac") == len(expected)
    assert set(sweep.peak_jobs.values()) == {1}
    measured("five small jobs on three hosts, start to end of the command", sweep.seconds())
    again = desk.sweep(experiment)
    assert again.ends() == 0 and f"{len(expected)} already finished" in again.output, again.output
    assert len(desk.runs(experiment)) == len(expected)


def test_kill_9_of_a_job(tidy_desk: Desk, expected: Expected, experiment: str, measured: Measured) -> None:
    desk = tidy_desk
    sweep = desk.sweep(experiment)
    job = sweep.job()
    since = time.time()
    os.kill(job.pid, signal.SIGKILL)
    assert sweep.ends() == 0, sweep.output
    desk.check(experiment, expected)
    sweep.nobody_idled()
    measured("kill -9 of a job: until it begins again", began_again(desk, experiment, job, since))


def test_kill_9_of_a_worker(tidy_desk: Desk, expected: Expected, experiment: str, measured: Measured) -> None:
    """The worker process dies, its job ends with it, and the worker command starts another."""
    desk = tidy_desk
    sweep = desk.sweep(experiment)
    job = sweep.job()
    sweep.falls_ill(job.host)
    since = time.time()
    (worker,) = job.host.pids("distributed.cli.dask_worker")
    os.kill(worker, signal.SIGKILL)
    wait_until(lambda: not Path(f"/proc/{job.pid}").exists(), 15, "the job ends with its worker")
    assert sweep.ends() == 0, sweep.output
    desk.check(experiment, expected)
    sweep.nobody_idled()
    measured("kill -9 of a worker: until its job begins again", began_again(desk, experiment, job, since))
    desk.wait_for_workers()


@quick
def test_a_host_loses_its_power(tidy_desk: Desk, expected: Expected, experiment: str, measured: Measured) -> None:
    desk = tidy_desk
    sweep = desk.sweep(experiment)
    job = sweep.job()
    sweep.falls_ill(job.host)
    since = time.time()
    job.host.power_off()
    assert sweep.ends() == 0, sweep.output
    desk.check(experiment, expected)
    sweep.nobody_idled()
    measured("power lost: until its job begins again", began_again(desk, experiment, job, since))


def test_all_processes_of_a_host_are_killed(
    tidy_desk: Desk, expected: Expected, experiment: str, measured: Measured
) -> None:
    """As a reboot: its worker comes back within the sweep and works on."""
    desk = tidy_desk
    sweep = desk.sweep(experiment)
    job = sweep.job()
    sweep.falls_ill(job.host)
    since = time.time()
    job.host.kill()
    desk.start_worker(job.host)
    assert sweep.ends() == 0, sweep.output
    desk.check(experiment, expected)
    sweep.nobody_idled()
    measured("all of a host killed: until its job begins again", began_again(desk, experiment, job, since))


@pytest.mark.parametrize("seconds", [60, 150])
def test_a_link_is_cut_and_comes_back(
    tidy_desk: Desk, expected: Expected, experiment: str, measured: Measured, seconds: int
) -> None:
    desk = tidy_desk
    sweep = desk.sweep(experiment)
    job = sweep.job()
    sweep.falls_ill(job.host)
    since = time.time()
    job.host.cut_link()
    time.sleep(seconds)  # the fault itself
    job.host.restore_link()
    back = time.time()
    assert sweep.ends() == 0, sweep.output
    no_jobs(desk)
    desk.check(experiment, expected)
    sweep.nobody_idled()
    desk.wait_for_workers()
    measured(f"link cut for {seconds} s: until its job begins elsewhere", began_again(desk, experiment, job, since))
    measured(f"link back after {seconds} s: until the sweep is over and its worker has joined", time.time() - back)


@pytest.mark.parametrize("seconds", [60])
def test_a_laptop_sleeps(
    tidy_desk: Desk, expected: Expected, experiment: str, measured: Measured, seconds: int
) -> None:
    """Unlike with a cut link the job stands still, and goes on when it wakes: it was taken over by then."""
    desk = tidy_desk
    sweep = desk.sweep(experiment)
    job = sweep.job()
    sweep.falls_ill(job.host)
    since = time.time()
    job.host.sleep()
    time.sleep(seconds)  # the fault itself
    job.host.wake()
    assert sweep.ends() == 0, sweep.output
    no_jobs(desk)
    desk.check(experiment, expected)
    sweep.nobody_idled()
    desk.wait_for_workers()
    measured(f"asleep for {seconds} s: until its job begins elsewhere", began_again(desk, experiment, job, since))


def test_a_host_is_added(tidy_desk: Desk, expected: Expected, experiment: str, measured: Measured) -> None:
    desk = tidy_desk
    for mac in desk.macs[1:]:
        mac.kill()
    wait_until(lambda: desk.workers() == {"mac1"}, 60, "only mac1 is left")
    sweep = desk.sweep(experiment)
    sweep.falls_ill(*desk.macs[1:])
    sweep.job()
    since = time.time()
    desk.start_worker(desk.macs[1])
    wait_until(lambda: desk.macs[1].pids(JOB_PROCESS), 150, f"the new host gets a job; {sweep.output}")
    measured("a host is added: from its start until it has a job", time.time() - since)
    assert sweep.ends() == 0, sweep.output
    finished = desk.check(experiment, expected)
    sweep.nobody_idled()
    assert {run.data.tags["host"] for run in finished.values()} == {"mac1", "mac2"}


@quick
def test_the_scheduler_is_killed(tidy_desk: Desk, expected: Expected, experiment: str, measured: Measured) -> None:
    """The head command starts another one; driver and workers find it."""
    desk = tidy_desk
    sweep = desk.sweep(experiment)
    job = sweep.job()
    sweep.falls_ill()
    since = time.time()
    os.kill(desk.scheduler(), signal.SIGKILL)
    assert sweep.ends() == 0, sweep.output
    no_jobs(desk)
    desk.check(experiment, expected)
    sweep.nobody_idled()
    measured("scheduler killed: until a job that ran begins again", began_again(desk, experiment, job, since))


def test_the_head_loses_its_power(tidy_desk: Desk, expected: Expected, experiment: str, measured: Measured) -> None:
    desk = tidy_desk
    sweep = desk.sweep(experiment)
    job = sweep.job()
    sweep.falls_ill()
    since = time.time()
    desk.head.power_off()
    time.sleep(20)  # the fault itself
    desk.head.restore_link()
    desk.start_head()
    code = sweep.ends()
    no_jobs(desk)
    if code != 0:  # results that could not be published then are now
        again = desk.sweep(experiment)
        assert again.ends() == 0, again.output
    desk.check(experiment, expected)
    measured(
        "head without power for 20 s: until a job that ran begins again", began_again(desk, experiment, job, since)
    )


@contextmanager
def mlflow_down(desk: Desk) -> Iterator[None]:
    """The MLflow server is killed, and the head command cannot start another before the block ends."""
    (head,) = desk.head.pids("-m pipeline.cluster head")
    (mlflow,) = desk.head.pids("mlflow server --host")
    os.kill(head, signal.SIGSTOP)
    try:
        os.killpg(mlflow, signal.SIGKILL)
        yield
    finally:
        os.kill(head, signal.SIGCONT)


def test_mlflow_is_killed_for_10_s(tidy_desk: Desk, expected: Expected, experiment: str, measured: Measured) -> None:
    desk = tidy_desk
    sweep = desk.sweep(experiment)
    sweep.job()
    with mlflow_down(desk):
        since = time.time()
        time.sleep(10)  # the fault itself
    assert sweep.ends() == 0, sweep.output
    desk.check(experiment, expected)
    sweep.nobody_idled()
    measured("MLflow killed for 10 s: until the sweep is over, all published", time.time() - since)


@pytest.mark.parametrize("least_s", [pytest.param(0, marks=quick), 300])
def test_mlflow_is_down_until_all_jobs_are_done(
    tidy_desk: Desk, expected: Expected, experiment: str, least_s: int
) -> None:
    """No generation is lost or waits for it; what was not published then is published later, once."""
    desk = tidy_desk
    sweep = desk.sweep(experiment)
    sweep.job()
    with mlflow_down(desk):
        since = time.time()
        sweep.ends()
        assert sweep.done() == len(expected), sweep.output
        sweep.nobody_idled()
        time.sleep(max(0.0, least_s - (time.time() - since)))  # the fault itself
    wait_until(lambda: desk.head.inside(desk.is_up), 120, "MLflow is back")
    publish = ("-m", "pipeline.tracking", "publish", "--outputs", "outputs")
    done = desk.desk.run(sys.executable, *publish, timeout=120, **desk.tracking())
    assert done.returncode == 0, done.stdout
    again = desk.sweep(experiment)
    assert again.ends() == 0 and f"{len(expected)} already finished" in again.output, again.output
    desk.check(experiment, expected)


@quick
def test_answers_to_creates_are_lost(tidy_desk: Desk, expected: Expected, experiment: str) -> None:
    desk = tidy_desk
    proxy = Path(__file__).with_name("lossy_proxy.py")
    port = 5999
    lossy = desk.head.python(
        str(proxy), str(desk.pem), desk.head.address, str(port), str(MLFLOW_PORT), "3", log=f"{experiment}-proxy.log"
    )
    through = desk.tracking() | {"MLFLOW_TRACKING_URI": f"https://{desk.head.address}:{port}"}
    sweep = desk.sweep(experiment, **through)
    assert sweep.ends() == 0, sweep.output
    lossy.kill()
    lost = (desk.head.logs / f"{experiment}-proxy.log").read_text()
    assert "experiments/create" in lost and lost.count("runs/create") == 3, lost
    desk.check(experiment, expected)
    sweep.nobody_idled()


def test_ctrl_c_and_the_same_command_again(
    tidy_desk: Desk, expected: Expected, experiment: str, measured: Measured
) -> None:
    desk = tidy_desk
    sweep = desk.sweep(experiment)
    sweep.job()
    since = time.time()
    os.killpg(sweep.driver.pid, signal.SIGINT)
    assert sweep.ends(20) == 130, sweep.output
    measured("Ctrl-C: until the command has ended", time.time() - since)
    no_jobs(desk)
    assert "RUNNING" not in statuses(desk, experiment) and "KILLED" in statuses(desk, experiment)
    (parent,) = desk.runs(experiment, "sweep")
    assert parent.info.status == "KILLED"
    again = desk.sweep(experiment)
    assert again.ends() == 0, again.output
    desk.check(experiment, expected)
    again.nobody_idled()


def test_kill_9_of_the_driver_and_the_same_command_again(
    tidy_desk: Desk, expected: Expected, experiment: str, measured: Measured
) -> None:
    desk = tidy_desk
    sweep = desk.sweep(experiment)
    sweep.job()
    sweep.driver.kill()
    since = time.time()
    sweep.driver.wait()
    again = desk.sweep(experiment)
    again.job()
    measured("kill -9 of the driver: from there until the same command has a job at work", time.time() - since)
    assert again.ends() == 0, again.output
    desk.check(experiment, expected)
    again.nobody_idled()


@contextmanager
def killed_wherever_it_runs(desk: Desk, key: str) -> Iterator[list[Job]]:
    """As a job that the GPU driver aborts: its process dies each time that it has begun to answer."""
    killed: list[Job] = []
    over = threading.Event()

    def kill() -> None:
        while not over.wait(0.1):
            for mac in desk.macs:
                if (job := job_at_work(mac)) and job.key == key:
                    os.kill(job.pid, signal.SIGKILL)
                    killed.append(job)

    thread = threading.Thread(target=kill)
    thread.start()
    try:
        yield killed
    finally:
        over.set()
        thread.join()


def test_a_poison_job(tidy_desk: Desk, expected: Expected, experiment: str) -> None:
    desk = tidy_desk
    poison = min(expected)
    with killed_wherever_it_runs(desk, poison) as killed:
        sweep = desk.sweep(experiment)
        assert sweep.ends() == 1, sweep.output
    assert len({job.pid for job in killed}) == 3, killed  # the first time and two more
    desk.check(experiment, expected, failed={poison: "its process died on mac"})
    sweep.nobody_idled()
    assert desk.workers() == set(MACS)


@quick
def test_a_disk_is_full(tidy_desk: Desk, expected: Expected, experiment: str) -> None:
    """One host's full disk costs that host, not the sweep."""
    desk = tidy_desk
    mac = desk.macs[0]
    mac.kill()
    mac.small_disk(400)
    desk.start_worker(mac)
    wait_until(lambda: set(MACS) <= desk.workers(), 60, "all joined")
    sweep = desk.sweep(experiment)
    sweep.job(mac)
    sweep.falls_ill(mac)
    mac.fill_disk()
    assert sweep.ends() == 0, sweep.output
    finished = desk.check(experiment, expected)
    sweep.nobody_idled()
    assert "host mac1 gets no more jobs" in sweep.output and "o space left" in sweep.output, sweep.output
    assert "mac1" not in {run.data.tags["host"] for run in finished.values()}


@quick
def test_clocks_are_off_by_an_hour(tidy_desk: Desk, expected: Expected, experiment: str, measured: Measured) -> None:
    """One host an hour ahead, one behind; the job of the first is killed, so that its attempt must be judged."""
    desk = tidy_desk
    for mac, off in zip(desk.macs, (3600, -3600), strict=False):
        mac.kill()
        mac.clock_off_by_s = off
        desk.start_worker(mac)
    wait_until(lambda: set(MACS) <= desk.workers(), 60, "all joined, also with a wrong clock")
    sweep = desk.sweep(experiment)
    job = sweep.job(desk.macs[0])
    os.kill(job.pid, signal.SIGKILL)
    assert sweep.ends() == 0, sweep.output
    finished = desk.check(experiment, expected)
    sweep.nobody_idled()
    assert {run.data.tags["host"] for run in finished.values()} == set(MACS)
    others = [r for r in desk.runs(experiment) if r.info.status != "FINISHED"]
    assert [r.data.tags["key"] for r in others] == [job.key], "no living attempt was taken for a dead one"


def replaced(host: Host, path: str, old: str, new: str) -> None:
    file = host.folder / path
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new))


@pytest.fixture
def editable(tidy_desk: Desk) -> Iterator[Desk]:
    """Code that a test changes is the old code again afterwards."""
    yield tidy_desk
    for host in tidy_desk.network:
        host.copy_code()


def test_code_is_changed_between_two_sweeps(editable: Desk, expected: Expected, experiment: str) -> None:
    """Workers that stay up run the new code; a host that has the old code is refused."""
    desk = editable
    two = ("policy=h2o", "budget=0.25,0.5")
    first = desk.sweep(experiment, *two)
    assert first.ends() == 0, first.output
    old = '"host": socket.gethostname()'
    for host in (desk.desk, *desk.macs[:2]):
        replaced(host, "pipeline/run.py", old, old + ' + ", new code"')
    second = desk.sweep(experiment, *two)
    assert second.ends() == 0, second.output
    hosts = sorted(run.data.tags["host"].partition(",")[2] for run in desk.runs(experiment))
    assert hosts == ["", "", " new code", " new code"]
    refused = next(line for line in second.output.splitlines() if "mac3" in line and "code" in line)
    assert "git pull" in second.output or "make setup" in second.output, refused
    assert {run.info.status for run in desk.runs(experiment)} == {"FINISHED"}
