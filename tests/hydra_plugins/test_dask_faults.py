"""What becomes of plain jobs when processes die, with a real scheduler and real workers on this machine."""

from __future__ import annotations

import fcntl
import itertools
import os
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from dask_processes import PROJECT, Cluster, wait_for
from hydra import initialize
from hydra._internal.callbacks import Callbacks
from hydra.core.global_hydra import GlobalHydra
from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn, JobStatus
from hydra.types import HydraContext, RunMode

from hydra_plugins.dask_launcher import _core
from pipeline.__main__ import _compose, _composer, _wanted
from pipeline.errors import BadInput

pytestmark = pytest.mark.hosts

Task = Callable[[Any], Any]


@pytest.fixture
def marks(tmp_path: Path) -> Path:
    """A folder where tasks leave `<job>.<attempt's pid>`."""
    (tmp_path / "marks").mkdir()
    return tmp_path / "marks"


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hydra_restore_singletons: None) -> None:
    monkeypatch.chdir(tmp_path)


def slow(marks: Path, seconds: float = 1.0) -> Task:
    def task(cfg: Any) -> Any:
        import os
        import time

        (marks / f"{cfg.n}.{os.getpid()}").touch()
        time.sleep(seconds)
        return cfg.n

    return task


def sweep(cluster: Cluster, task: Task, jobs: int, *options: str) -> list[JobReturn]:
    """Launch jobs n=0.. and return what they returned."""
    with initialize(config_path=None, version_base="1.3", job_name="plain"):
        loader = GlobalHydra.instance().config_loader()
        choice = ["hydra/launcher=dask", f"hydra.launcher.head='{cluster.address}'", "hydra.launcher.poll_s=0.2"]
        config = loader.load_configuration(None, [*choice, *options], run_mode=RunMode.MULTIRUN)
        context = HydraContext(config_loader=loader, callbacks=Callbacks(config))
        launcher = Plugins.instance().instantiate_launcher(hydra_context=context, task_function=task, config=config)
        return list(launcher.launch([[f"+n={n}"] for n in range(jobs)], 0))


def started(cluster: Cluster, task: Task, jobs: int, *options: str) -> Future[list[JobReturn]]:
    """The same, in a thread, so that the test can do harm meanwhile."""
    future: Future[list[JobReturn]] = Future()

    def run() -> None:
        try:
            future.set_result(sweep(cluster, task, jobs, *options))
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


def attempts(marks: Path) -> dict[int, int]:
    """How often each job was started."""
    counts: dict[int, int] = {}
    for mark in marks.iterdir():
        n = int(mark.name.partition(".")[0])
        counts[n] = counts.get(n, 0) + 1
    return counts


def values(returns: list[JobReturn]) -> list[Any]:
    return [r.return_value for r in returns]


def test_jobs_run_one_at_a_time_on_each_host(two_hosts: Cluster, tmp_path: Path, capfd: Any) -> None:
    log = tmp_path / "times"

    def task(cfg: Any) -> Any:
        import os
        import time

        begin = time.time()
        time.sleep(0.7)
        with open(log, "a") as file:
            file.write(f"{os.environ['TMPDIR']} {begin} {time.time()}\n")
        return cfg.n

    assert values(sweep(two_hosts, task, 6)) == list(range(6))
    rows = [line.split() for line in log.read_text().splitlines()]
    hosts = {row[0] for row in rows}
    assert len(hosts) == 2 and len(rows) == 6
    for host in hosts:
        spans = sorted((float(row[1]), float(row[2])) for row in rows if row[0] == host)
        assert all(one[1] <= next_[0] for one, next_ in itertools.pairwise(spans))
    said = capfd.readouterr().out
    assert "[6/6]" in said and "about" in said
    assert sum(said.count(f"starts on {name}") for name in ("mac1", "mac2")) == 6


def test_a_killed_job_runs_again_and_others_only_once(two_hosts: Cluster, marks: Path, capfd: Any) -> None:
    running = started(two_hosts, slow(marks), 4)
    os.kill(int(wait_for(lambda: list(marks.glob("1.*")))[0].name.partition(".")[2]), signal.SIGKILL)
    assert values(running.result(60)) == [0, 1, 2, 3]
    assert attempts(marks) == {0: 1, 1: 2, 2: 1, 3: 1}
    assert "its process died on mac" in capfd.readouterr().out


def test_a_job_whose_process_dies_each_time_fails_alone(two_hosts: Cluster, marks: Path) -> None:
    def task(cfg: Any) -> Any:
        import os
        import signal

        (marks / f"{cfg.n}.{os.getpid()}").touch()
        if cfg.n == 1:
            print("about to die")
            os.kill(os.getpid(), signal.SIGKILL)
        return cfg.n

    returns = sweep(two_hosts, task, 4, "hydra.launcher.retries=1")
    assert [r.status == JobStatus.COMPLETED for r in returns] == [True, False, True, True]
    assert attempts(marks) == {0: 1, 1: 2, 2: 1, 3: 1}
    with pytest.raises(RuntimeError, match="SIGKILL") as failed:
        returns[1].return_value  # noqa: B018
    assert "about to die" in str(failed.value)


def test_a_job_that_raises_is_not_tried_again_and_tells_why(two_hosts: Cluster, marks: Path) -> None:
    def task(cfg: Any) -> Any:
        import os
        import threading

        class Unpicklable(Exception):
            def __init__(self) -> None:
                super().__init__("no such thing")
                self.lock = threading.Lock()

        (marks / f"{cfg.n}.{os.getpid()}").touch()
        print("looking for it")
        raise Unpicklable

    returns = sweep(two_hosts, task, 1)
    assert attempts(marks) == {0: 1}
    with pytest.raises(RuntimeError, match="Unpicklable: no such thing") as failed:
        returns[0].return_value  # noqa: B018
    assert ", in task\n" in str(failed.value) and "looking for it" in str(failed.value)


def test_a_result_that_cannot_be_sent_fails_the_job(two_hosts: Cluster) -> None:
    def task(cfg: Any) -> Any:
        import threading

        return threading.Lock()

    with pytest.raises(RuntimeError, match="pickle"):
        sweep(two_hosts, task, 1)[0].return_value  # noqa: B018


def test_what_cannot_be_pickled_is_said_at_once(two_hosts: Cluster) -> None:
    lock = threading.Lock()
    with pytest.raises(BadInput, match="cannot be pickled"):
        sweep(two_hosts, lambda cfg: lock, 1)


def test_a_job_does_not_outlive_its_worker(cluster: Cluster, marks: Path) -> None:
    cluster.start_scheduler()
    cluster.start_worker("mac1")
    cluster.start_worker("mac2")
    running = started(cluster, slow(marks, 3), 4)
    wait_for(lambda: len(attempts(marks)) == 2)
    orphan = cluster.jobs("mac1")[0]
    cluster.kill("mac1")
    wait_for(lambda: not orphan.is_running(), 12)
    assert values(running.result(60)) == [0, 1, 2, 3]
    assert sorted(attempts(marks).values()) == [1, 1, 1, 2]


def test_a_host_that_joins_gets_jobs_and_one_that_comes_back_too(cluster: Cluster, marks: Path, capfd: Any) -> None:
    cluster.start_scheduler()
    cluster.start_worker("mac1")
    running = started(cluster, slow(marks, 2), 6)
    wait_for(lambda: attempts(marks))
    cluster.start_worker("mac2")
    wait_for(lambda: cluster.jobs("mac2"))
    cluster.kill("mac1")
    cluster.start_worker("mac1")
    wait_for(lambda: cluster.jobs("mac1"))
    assert values(running.result(90)) == list(range(6))
    said = capfd.readouterr().out
    assert "host mac2 joined" in said and "host mac1 is gone" in said


def test_a_scheduler_that_comes_back_goes_on(cluster: Cluster, marks: Path, capfd: Any) -> None:
    cluster.start_scheduler()
    cluster.start_worker("mac1")
    running = started(cluster, slow(marks, 2), 4)
    wait_for(lambda: len(attempts(marks)) == 2)
    cluster.kill("scheduler")
    time.sleep(3)
    cluster.start_scheduler()
    cluster.processes.pop("mac1").wait(60)  # ends by itself; `make worker` starts it again
    cluster.start_worker("mac1")
    assert values(running.result(90)) == [0, 1, 2, 3]
    assert attempts(marks)[0] == 1
    assert "the scheduler is lost" in capfd.readouterr().out


def test_no_host_for_too_long_fails_the_rest(cluster: Cluster, marks: Path) -> None:
    cluster.start_scheduler()
    cluster.start_worker("mac1")
    running = started(cluster, slow(marks, 1), 3, "hydra.launcher.wait_for_hosts_s=2")
    wait_for(lambda: len(attempts(marks)) == 2)
    cluster.kill("mac1")
    returns = running.result(60)
    assert [r.status == JobStatus.COMPLETED for r in returns] == [True, False, False]
    with pytest.raises(RuntimeError, match="no host"):
        returns[2].return_value  # noqa: B018


def test_a_long_way_of_models_and_data_is_told(
    two_hosts: Cluster, tiny_model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    monkeypatch.chdir(PROJECT)  # as the two workers
    monkeypatch.setattr(_core, "PREFETCH_TOLD_S", 0.2)  # importing takes longer
    with _composer():
        given = ["model=local", f"model.path={tiny_model_folder}", "task=fact", "task.tokens=250", "task.items=2"]
        _, (job,) = _compose(["policy=h2o", *given], True)
    options = {"head": two_hosts.address, "retries": 0, "wait_for_hosts_s": 60, "poll_s": 0.2}
    _core.preflight(options, str(tmp_path / "outputs"), [_wanted(job)])
    said = capfd.readouterr().out
    for name in ("mac1", "mac2"):
        assert f"host {name} is still getting models and data (0 s)" in said
        assert f"host {name} has the code, models and data" in said


def test_no_scheduler_is_said_within_seconds(cluster: Cluster, marks: Path) -> None:
    begin = time.monotonic()
    with pytest.raises(BadInput, match=f"expected a scheduler at {cluster.address}.*make head"):
        sweep(cluster, slow(marks), 1)
    assert time.monotonic() - begin < 15


def test_another_process_on_the_gpu_is_waited_for(two_hosts: Cluster, marks: Path) -> None:
    with ExitStack() as held:
        for name in ("mac1", "mac2"):
            lock = held.enter_context(open(two_hosts.folder / name / "gpu.lock", "w"))
            fcntl.flock(lock, fcntl.LOCK_EX)
        running = started(two_hosts, slow(marks, 0.1), 2)
        wait_for(lambda: two_hosts.jobs("mac1") and two_hosts.jobs("mac2"))
        time.sleep(2)
        assert not attempts(marks)
    assert values(running.result(30)) == [0, 1]


def test_a_host_that_cannot_do_a_job_is_left_alone_and_another_does_it(
    two_hosts: Cluster, marks: Path, capfd: Any
) -> None:
    def task(cfg: Any) -> Any:
        import os
        import time

        from pipeline.errors import HostUnfit

        if os.environ["TMPDIR"].endswith("mac1"):
            (marks / f"{cfg.n}.{os.getpid()}").touch()
            raise HostUnfit("its disk is full")
        time.sleep(0.5)
        return cfg.n

    assert values(sweep(two_hosts, task, 4)) == [0, 1, 2, 3]
    assert len(list(marks.iterdir())) == 1
    assert "host mac1 gets no more jobs: its disk is full" in capfd.readouterr().out


def test_a_host_with_a_wrong_gpu_lock_is_left_alone(cluster: Cluster, marks: Path, capfd: Any) -> None:
    cluster.start_scheduler()
    cluster.start_worker("mac1", KEYFORMER_GPU_LOCK=str(marks))  # a folder
    cluster.start_worker("mac2")
    assert values(sweep(cluster, slow(marks, 0.1), 3)) == [0, 1, 2]
    said = capfd.readouterr().out
    assert "host mac1 gets no more jobs: KEYFORMER_GPU_LOCK: expected a file that can be written" in said


def test_a_stop_of_the_sweep_ends_the_other_jobs(two_hosts: Cluster, marks: Path) -> None:
    def task(cfg: Any) -> Any:
        import os
        import time

        from pipeline.run import StopSweep

        (marks / f"{cfg.n}.{os.getpid()}").touch()
        time.sleep(2)
        if cfg.n == 1:
            raise StopSweep("the model is broken")
        time.sleep(60)

    with pytest.raises(BaseException, match="the model is broken") as stopped:
        sweep(two_hosts, task, 3)
    assert type(stopped.value).__name__ == "StopSweep"
    assert not two_hosts.jobs("mac1") and not two_hosts.jobs("mac2")
    assert attempts(marks).keys() == {0, 1}
