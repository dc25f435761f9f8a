"""Real sweeps over "hosts" on this machine: each worker has a project folder and outputs of its own."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from dask_processes import Cluster, project_copy, wait_for
from mlflow.tracking import MlflowClient

from pipeline.__main__ import main

pytestmark = pytest.mark.hosts

FIVE = ["policy=full,h2o,keyformer", "budget=0.25,0.5"]
TWO = ["policy=h2o", "budget=0.25,0.5"]
ONE = ["policy=h2o", "budget=0.25"]
SMALL = ["task=fact", "task.tokens=250", "task.items=4", "generate.batch_size=2", "generate.prefill_step_size=64"]
QUICK = [*SMALL, "task.max_gen_toks=4"]
SLOW = [*SMALL, "task.max_gen_toks=200", "task.until=[]"]


class Desk:
    """A driver, two hosts, a tracking server and an experiment."""

    def __init__(self, cluster: Cluster, folder: Path, model: Path, uri: str) -> None:
        self.cluster, self.folder, self.model = cluster, folder, model
        self.experiment = folder.name
        self.client = MlflowClient(uri)
        self.drivers: list[subprocess.Popen[str]] = []
        self.environment = os.environ | {"MLFLOW_TRACKING_URI": uri}
        cluster.start_scheduler()
        for name in ("mac1", "mac2"):
            cluster.start_worker(name, project_copy(folder / name))
        project_copy(folder / "driver")

    def start(self, *overrides: str, launcher: str = "dask") -> subprocess.Popen[str]:
        """`python -m pipeline` on the driver."""
        head = (
            []
            if launcher == "basic"
            else [f"hydra/launcher={launcher}", f"hydra.launcher.head='{self.cluster.address}'"]
        )
        model = ["model=local", f"model.path={self.model}", f"experiment_name={self.experiment}"]
        driver = subprocess.Popen(
            [sys.executable, "-m", "pipeline", "-m", *model, *head, *overrides],
            cwd=self.folder / "driver",
            env=self.environment | {"PYTHONPATH": str(self.folder / "driver")},
            text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        self.drivers.append(driver)
        return driver

    def run(self, *overrides: str, launcher: str = "dask") -> tuple[int, str]:
        driver = self.start(*overrides, launcher=launcher)
        said = driver.communicate(timeout=240)[0]
        print(said)
        return driver.returncode, said

    def runs(self, kind: str = "job") -> list[Any]:
        found = self.client.get_experiment_by_name(self.experiment)
        return [] if found is None else list(self.client.search_runs([found.experiment_id], f"tags.kind = '{kind}'"))

    def statuses(self) -> dict[str, list[str]]:
        """Run name -> how its runs ended, sorted."""
        names: dict[str, list[str]] = {}
        for run in self.runs():
            names.setdefault(run.info.run_name, []).append(run.info.status)
        return {name: sorted(each) for name, each in names.items()}

    def jobs_of(self, host: str) -> set[str]:
        return {folder.name for folder in (self.folder / host / "outputs" / "jobs").glob("*")}

    def responses(self, host: str) -> dict[str, dict[str, Any]]:
        found = {}
        for path in (self.folder / host / "outputs" / "jobs").glob("*/responses.jsonl"):
            lines = [json.loads(line) for line in path.read_text().splitlines()]
            found[path.parent.name] = {line["id"]: line["response"] for line in lines}
        return found


@pytest.fixture
def desk(cluster: Cluster, tmp_path: Path, tiny_model_folder: Path, mlflow_uri: str) -> Iterator[Desk]:
    desk = Desk(cluster, tmp_path, tiny_model_folder, mlflow_uri)
    yield desk
    for driver in desk.drivers:
        driver.kill()


def test_a_sweep_over_two_hosts_leaves_what_one_on_this_machine_leaves(desk: Desk) -> None:
    code, said = desk.run(*QUICK, *FIVE)
    assert code == 0 and "[5/5]" in said
    assert list(desk.statuses().values()) == [["FINISHED"]] * 5
    assert [run.info.status for run in desk.runs("sweep")] == ["FINISHED"]
    assert desk.jobs_of("mac1") and desk.jobs_of("mac2") and not desk.jobs_of("mac1") & desk.jobs_of("mac2")

    over_two = desk.responses("driver")
    assert over_two.keys() == desk.jobs_of("mac1") | desk.jobs_of("mac2") and len(over_two) == 5
    one = next(folder for folder in (desk.folder / "driver" / "outputs" / "jobs").iterdir())
    assert {path.name for path in one.iterdir()} >= {"config.yaml", "score.json", "published.json", "job.log"}

    code, said = desk.run(*QUICK, *FIVE)
    assert code == 0 and "5 already finished" in said and len(desk.runs()) == 5
    code, said = desk.run(*QUICK, *FIVE, "outputs=basic", "experiment_name=basic", launcher="basic")
    assert code == 0, said
    basic = {p.parent.name for p in (desk.folder / "driver" / "basic" / "jobs").glob("*/responses.jsonl")}
    assert basic == over_two.keys()  # the same keys, so the same configuration, data and code
    for key in basic:
        lines = (desk.folder / "driver" / "basic" / "jobs" / key / "responses.jsonl").read_text().splitlines()
        assert {line["id"]: line["response"] for line in map(json.loads, lines)} == over_two[key]


def test_ctrl_c_ends_the_jobs_as_killed_and_the_same_command_finishes_them(desk: Desk) -> None:
    driver = desk.start(*SLOW, *TWO)
    wait_for(lambda: len([run for run in desk.runs() if run.info.status == "RUNNING"]) == 2, 240)
    begin = time.monotonic()
    driver.send_signal(signal.SIGINT)
    said = driver.communicate(timeout=60)[0]
    assert driver.returncode == 130, said
    assert time.monotonic() - begin < 30
    assert not desk.cluster.jobs("mac1") and not desk.cluster.jobs("mac2")
    assert {run.info.status for run in desk.runs()} <= {"KILLED", "FINISHED"}
    assert {run.data.tags["reason"] for run in desk.runs() if run.info.status == "KILLED"} == {"interrupted"}
    assert [run.info.status for run in desk.runs("sweep")] == ["KILLED"]

    code, said = desk.run(*SLOW, *TWO)
    assert code == 0, said
    assert all(each.count("FINISHED") == 1 and "RUNNING" not in each for each in desk.statuses().values())


def test_a_host_that_comes_back_is_compared_again_and_soon_at_work(desk: Desk) -> None:
    driver = desk.start(*SLOW, *TWO)
    wait_for(lambda: desk.cluster.jobs("mac1") and desk.cluster.jobs("mac2"), 240)
    desk.cluster.kill("mac1")
    desk.cluster.start_worker("mac1", desk.folder / "mac1")
    said = driver.communicate(timeout=240)[0]
    assert driver.returncode == 0, said
    asked = desk.cluster.log("mac1")
    assert asked.count("out-of-band function 'describe'") == 2, asked
    assert asked.count("out-of-band function 'prefetch'") == 1  # its models and data are still there


def test_a_driver_killed_outright_leaves_nothing_running(desk: Desk) -> None:
    driver = desk.start(*SLOW, *TWO)
    wait_for(lambda: desk.cluster.jobs("mac1") and desk.cluster.jobs("mac2"), 240)
    driver.kill()
    driver.communicate()
    wait_for(lambda: not desk.cluster.jobs("mac1") and not desk.cluster.jobs("mac2"))
    code, said = desk.run(*SLOW, *TWO)
    assert code == 0, said
    assert all(each.count("FINISHED") == 1 and "RUNNING" not in each for each in desk.statuses().values())


def test_a_job_that_kills_its_process_each_time_is_failed_with_the_reason(desk: Desk) -> None:
    driver = desk.start(*SLOW, *ONE, "hydra.launcher.retries=1")
    for _ in range(2):
        job = wait_for(lambda: desk.cluster.jobs("mac1") or desk.cluster.jobs("mac2"), 240)[0]
        wait_for(lambda: [run for run in desk.runs() if run.info.status == "RUNNING"], 60)
        job.kill()
        wait_for(lambda job=job: not job.is_running())
    said = driver.communicate(timeout=120)[0]
    assert driver.returncode == 1, said
    assert desk.statuses() == {"h2o-25pct-fact": ["FAILED", "KILLED"]}
    (failed,) = (run for run in desk.runs() if run.info.status == "FAILED")
    assert "its process died on mac" in failed.data.tags["reason"] and "SIGKILL" in failed.data.tags["reason"]


def test_a_job_that_dies_before_it_has_a_run_is_seen_in_mlflow_all_the_same(desk: Desk) -> None:
    driver = desk.start(*QUICK, *ONE, "hydra.launcher.retries=0")
    wait_for(lambda: desk.cluster.jobs("mac1") or desk.cluster.jobs("mac2"), 240)[0].kill()  # it imports, no more
    said = driver.communicate(timeout=120)[0]
    assert driver.returncode == 1, said
    (failed,) = desk.runs()
    assert failed.info.run_name == "h2o-25pct-fact" and failed.info.status == "FAILED"
    assert re.match(r"its process died on mac\d \(SIGKILL\)", failed.data.tags["reason"])
    (parent,) = desk.runs("sweep")
    assert failed.data.tags["mlflow.parentRunId"] == parent.info.run_id and parent.info.status == "FAILED"
    assert desk.run(*QUICK, *ONE)[0] == 0
    (finished,) = (run for run in desk.runs() if run.info.status == "FINISHED")
    assert finished.data.tags["key"] == failed.data.tags["key"]
    known_later = {"budget_rows", *(name for name in finished.data.params if name.startswith("data."))}
    assert failed.data.params == {n: v for n, v in finished.data.params.items() if n not in known_later}


def test_results_that_a_host_could_not_publish_are_published_from_here(desk: Desk) -> None:
    for name in ("mac1", "mac2"):  # they cannot reach the tracking server: their proxy is dead
        desk.cluster.kill(name)
        dead = dict.fromkeys(("http_proxy", "HTTP_PROXY"), "http://127.0.0.1:9")
        desk.cluster.start_worker(name, desk.folder / name, **dead, no_proxy="", NO_PROXY="")
    code, said = desk.run(*QUICK, *TWO)
    assert code == 0 and said.count("published ") == 2, said
    assert list(desk.statuses().values()) == [["FINISHED"]] * 2


def test_a_host_with_other_code_gets_no_jobs(desk: Desk) -> None:
    (desk.folder / "mac1" / "pipeline" / "run.py").open("a").write("\n# a line of another version\n")
    code, said = desk.run(*QUICK, *TWO)
    assert code == 0, said
    assert "host mac1 gets no jobs: other code" in said and "git pull && make setup" in said
    assert not desk.jobs_of("mac1") and len(desk.jobs_of("mac2")) == 2


def test_no_host_that_can_do_it_stops_before_anything_starts(desk: Desk, tmp_path: Path) -> None:
    (desk.folder / "driver" / "hydra_plugins" / "dask_launcher" / "_job.py").open("a").write("\n# newer\n")
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "pipeline.py").touch()  # hides the package
    desk.cluster.kill("mac2")
    desk.cluster.start_worker("mac2", tmp_path / "empty", PYTHONPATH="")  # no project there
    code, said = desk.run(*QUICK, *ONE)
    assert code == 2 and "Traceback" not in said, said
    assert re.search(r"^error: expected a host that can do this sweep, got 2 that cannot:$", said, re.M)
    assert re.search(r"^  mac1: other code.*git pull && make setup", said, re.M)
    assert re.search(r"^  mac2: .*pipeline.cluster.*in .*empty", said, re.M)
    for name in ("mac1", "mac2"):
        desk.cluster.kill(name)
    code, said = desk.run(*QUICK, *ONE)
    assert code == 2 and re.search(r"^error: expected a worker at .*make worker$", said, re.M), said
    assert not desk.runs() and not desk.runs("sweep") and not desk.jobs_of("mac1")


def test_a_job_goes_only_where_it_fits(desk: Desk) -> None:
    shim = desk.folder / "shim"
    shim.mkdir()
    (shim / "sitecustomize.py").write_text(
        "import sys\n"
        "if 'pipeline.cluster' in sys.orig_argv:\n"
        "    import types, psutil\n"
        "    psutil.virtual_memory = lambda: types.SimpleNamespace(total=1000)\n"
    )
    desk.cluster.kill("mac1")  # and comes back with 1000 bytes of memory
    desk.cluster.start_worker("mac1", desk.folder / "mac1", PYTHONPATH=f"{desk.folder / 'mac1'}{os.pathsep}{shim}")
    code, said = desk.run(*QUICK, *TWO)
    assert code == 0 and not desk.jobs_of("mac1") and len(desk.jobs_of("mac2")) == 2, said
    desk.cluster.kill("mac2")
    code, said = desk.run(*QUICK, *ONE, "task.tokens=200")
    assert code == 2 and "expected a host that can hold some job" in said


def test_many_processes_on_one_gpu_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["-m", *TWO, "hydra/launcher=joblib"]) == 2
    assert "expected basic or dask, got 'joblib': jobs run one at a time on each GPU" in capsys.readouterr().err
