"""Several machines with a head, workers and a driver: what the fault tests break, watch and check.

The head's and workers' commands are the ones that a person types. Jobs are real: a tiny random llama reads prose, its
results lie in job folders and in a real MLflow server on the head.
"""

from __future__ import annotations

import gzip
import json
import os
import re
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlflow.entities import Run
from mlflow.tracking import MlflowClient
from network import Gone, Host, Network, wait_until

MACS = ("mac1", "mac2", "mac3")
JOB_PROCESS = "hydra_plugins.dask_launcher._job"  # in the command line of a job's process
MLFLOW_PORT, SCHEDULER_PORT = 5050, 8786
IDLE_S = 12.0  # a host may be without a job for so long while jobs wait: two processes end and start in that time
_SMALL = (
    "model=local", "model.path=models/tiny", "task=perplexity", "task.tokens=250", "task.items=24",
    "generate.batch_size=1", "generate.prefill_step_size=64", "generate.share_prefill_gb=0",
)  # fmt: skip
GRID = ("policy=h2o,keyformer", "budget=0.25", "seed=0,1,2,3")  # five jobs: h2o has no use for a seed
_GONE = re.compile(r"host (\S+) is gone")
_PROGRESS = re.compile(r"\[\s*(\d+)/(\d+)\]")

Answers = dict[str, Any]  # response by request id


@dataclass(frozen=True)
class Result:
    """What must be the same whatever happened on the way."""

    name: str
    accuracy: float
    answers: Answers


class Desk:
    """The head, the driver's host `desk` and three more hosts, up and joined."""

    def __init__(self, network: Network, model: Path) -> None:
        self.network = network
        for name in ("head", "desk", *MACS):
            host = network.add(name)
            shutil.copytree(model, host.folder / "models" / "tiny")
        self.head, self.desk = network.hosts["head"], network.hosts["desk"]
        self.macs = [network.hosts[name] for name in MACS]
        self.uri = f"https://{self.head.address}:{MLFLOW_PORT}"
        self.pem = self.head.outputs / "cluster" / "join.pem"
        os.environ["MLFLOW_TRACKING_SERVER_CERT_PATH"] = str(self.pem)
        os.environ["MLFLOW_HTTP_REQUEST_MAX_RETRIES"] = "2"

    # -- head and workers --

    def start_head(self) -> None:
        arguments = ("--host", self.head.address, "--port", str(SCHEDULER_PORT), "--mlflow-port", str(MLFLOW_PORT))
        head = self.head.python("-m", "pipeline.cluster", "head", *arguments, "--outputs", "outputs", log="head.log")
        wait_until(lambda: head.poll() is not None or self.head.inside(self.is_up), 180, "the head answers")
        assert head.poll() is None, (self.head.logs / "head.log").read_text()

    def is_up(self) -> bool:
        """Whether scheduler and MLflow server are up."""
        try:
            socket.create_connection((self.head.address, SCHEDULER_PORT), timeout=2).close()
            trusted = ssl.create_default_context(cafile=str(self.pem))
            with urllib.request.urlopen(f"{self.uri}/health", timeout=2, context=trusted) as answer:
                return bool(answer.status == 200)
        except (OSError, ValueError):
            return False

    def fresh_store(self) -> None:
        """A head whose MLflow has never been used."""
        self.head.kill()
        shutil.rmtree(self.head.outputs / "mlflow", ignore_errors=True)
        self.start_head()

    def scheduler(self) -> int:
        """The process id of Dask's scheduler."""
        (pid,) = self.head.pids("distributed.cli.dask_scheduler")
        return pid

    def give_certificate(self, host: Host) -> None:
        """What a person does with scp."""
        (host.outputs / "cluster").mkdir(parents=True, exist_ok=True)
        shutil.copy2(self.pem, host.outputs / "cluster" / "join.pem")

    def start_worker(self, mac: Host, **environment: str) -> None:
        self.give_certificate(mac)
        mac.python("-m", "pipeline.cluster", "worker", "--outputs", "outputs", log="worker.log", **environment)

    def workers(self) -> set[str]:
        """Names of the hosts that the scheduler knows."""
        import asyncio

        from distributed import Security, rpc

        async def ask() -> set[str]:
            pem = str(self.pem)
            security = Security(tls_ca_file=pem, tls_client_cert=pem, tls_client_key=pem, require_encryption=True)
            address = f"tls://{self.head.address}:{SCHEDULER_PORT}"
            async with rpc(address, connection_args=security.get_connection_args("client")) as scheduler:
                return {str(worker["name"]) for worker in (await scheduler.identity(n_workers=-1))["workers"].values()}

        try:
            return set(self.head.inside(lambda: asyncio.run(asyncio.wait_for(ask(), 5))))
        except (OSError, TimeoutError):
            return set()

    def wait_for_workers(self, *names: str) -> None:
        wait_until(lambda: set(names or MACS) <= self.workers(), 90, f"{names or MACS} joined")

    def tidy(self) -> None:
        """Whatever a test left: hosts awake, linked, without jobs and files of jobs; head up; workers joined."""
        for host in self.network:
            host.wake()
            for pid in [*host.pids("-m pipeline -m"), *host.pids("-m pipeline.tracking"), *host.pids("lossy_proxy")]:
                os.kill(pid, signal.SIGKILL)
        if not self.head.inside(self.is_up):
            self.head.kill()
            self.start_head()
        for mac in self.macs:
            wait_until(lambda mac=mac: not mac.pids(JOB_PROCESS), 60, f"the jobs on {mac.name} have ended")
            if mac.clock_off_by_s or os.path.ismount(mac.outputs):
                mac.kill()
                mac.clock_off_by_s = 0
                if os.path.ismount(mac.outputs):
                    mac.large_disk()
            if not mac.pids("-m pipeline.cluster worker"):
                mac.kill()
                self.start_worker(mac)
        for host in self.network:
            shutil.rmtree(host.outputs / "jobs", ignore_errors=True)
        self.wait_for_workers()

    # -- sweeps --

    def sweep(self, experiment: str, *overrides: str, on: Host | None = None, **environment: str) -> Sweep:
        """Start the driver, as `make sweep LAUNCHER=dask` does."""
        return Sweep(self, on or self.desk, experiment, (*_SMALL, *(overrides or GRID)), environment)

    def undisturbed(self) -> dict[str, Result]:
        """Results by key of the same jobs, one after another in one process, without head and workers."""
        whole = ["outputs=undisturbed", "experiment_name=undisturbed", "stages=[load,generate,score]"]
        done = self.desk.run(sys.executable, "-m", "pipeline", "-m", *_SMALL, *GRID, *whole, timeout=300)
        assert done.returncode == 0, done.stdout
        return results_in(self.desk.folder / "undisturbed")

    # -- what MLflow says --

    def runs(self, experiment: str, kind: str = "job") -> list[Run]:
        def ask() -> list[Run]:
            client = MlflowClient(self.uri)
            found = client.get_experiment_by_name(experiment)
            return [] if found is None else list(client.search_runs([found.experiment_id], f"tags.kind = '{kind}'"))

        runs: list[Run] = self.head.inside(ask)
        return runs

    def tracking(self) -> dict[str, str]:
        """Environment of a command that talks to the head's MLflow."""
        return {"MLFLOW_TRACKING_URI": self.uri, "MLFLOW_TRACKING_SERVER_CERT_PATH": "outputs/cluster/join.pem"}

    def published_answers(self, run: Run) -> Answers:
        def fetch() -> Answers:
            with tempfile.TemporaryDirectory() as folder:
                packed = MlflowClient(self.uri).download_artifacts(run.info.run_id, "responses.jsonl.gz", folder)
                return _answers(gzip.decompress(Path(packed).read_bytes()).decode())

        answers: Answers = self.head.inside(fetch)
        return answers

    def check(
        self,
        experiment: str,
        expected: Mapping[str, Result],
        outputs: Path | None = None,
        failed: Mapping[str, str] | None = None,
    ) -> dict[str, Run]:
        """Everything that must hold at the end of a sweep, whatever happened; returns the FINISHED run of each key.

        outputs: the driver's folder; failed: a word of the reason, by key of the jobs that can only fail.
        """
        failed = failed or {}
        runs = self.runs(experiment)
        by_key: dict[str, list[Run]] = defaultdict(list)
        for run in runs:
            by_key[run.data.tags["key"]].append(run)
        told = "\n".join(f"{r.data.tags['key']} {r.info.status} {r.data.tags.get('host')}" for r in runs)
        assert by_key.keys() == expected.keys(), told
        assert not [r for r in runs if r.info.status == "RUNNING"], f"runs left RUNNING:\n{told}"
        finished = {}
        for key, attempts in by_key.items():
            done = [r for r in attempts if r.info.status == "FINISHED"]
            if key in failed:
                assert not done, told
                reasons = [r.data.tags.get("reason", "") for r in attempts if r.info.status == "FAILED"]
                assert len(reasons) == 1 and failed[key] in reasons[0], (reasons, told)
                continue
            assert len(done) == 1, f"{key} is FINISHED {len(done)} times:\n{told}"
            finished[key] = done[0]
            assert done[0].data.metrics["accuracy"] == expected[key].accuracy
            assert self.published_answers(done[0]) == expected[key].answers
        (parent,) = self.runs(experiment, "sweep")
        assert parent.info.status == ("FAILED" if failed else "FINISHED") and parent.info.end_time
        outputs = outputs or self.desk.outputs
        here = results_in(outputs)
        assert here == {k: r for k, r in expected.items() if k not in failed}
        for key in here:
            assert (
                json.loads((outputs / "jobs" / key / "published.json").read_text())["run_id"]
                == finished[key].info.run_id
            )
        return finished


class Sweep:
    """A driver at work. A thread looks every half second which hosts have a job and how many jobs are done."""

    def __init__(self, desk: Desk, on: Host, experiment: str, overrides: tuple[str, ...], environment: dict[str, str]):
        self.experiment = experiment
        self.macs = desk.macs
        self.log = on.logs / f"{experiment}.log"
        self._from = self.log.stat().st_size if self.log.exists() else 0  # an earlier command of the same experiment
        self.started = time.time()
        self.driver = on.python(
            "-m", "pipeline", "-m", "hydra/launcher=dask", f"experiment_name={experiment}", *overrides,
            log=self.log.name, **environment,
        )  # fmt: skip
        self.longest_idle = dict.fromkeys(MACS, 0.0)
        self.peak_jobs = dict.fromkeys(MACS, 0)
        self._earlier = {pid for mac in self.macs for pid in mac.pids(JOB_PROCESS)}  # jobs of a driver that was killed
        self._unwell: dict[str, set[int]] = {}  # by host, the processes of jobs that it had when it fell ill
        self._watch = threading.Thread(target=self._look, daemon=True)
        self._watch.start()

    @property
    def output(self) -> str:
        with open(self.log, "rb") as log:
            log.seek(self._from)
            return log.read().decode(errors="replace")

    def done(self) -> int:
        """Jobs that the driver has told of as ended."""
        return max((int(done) for done, _ in _PROGRESS.findall(self.output)), default=0)

    def job(self, *on: Host) -> Job:
        """A job that has begun to answer requests and has not ended, on one of these hosts or on any."""

        def at_work() -> Job | None:
            jobs = filter(None, map(job_at_work, on or self.macs))
            return next((job for job in jobs if job.pid not in self._earlier), None)

        try:
            job: Job = wait_until(at_work, 240, "a job at work")
        except Gone as error:
            raise Gone(f"{error}; the driver says:\n{self.output}") from None
        return job

    def ends(self, seconds: float = 600) -> int:
        """The driver's exit code."""
        try:
            self.driver.wait(seconds)
        except subprocess.TimeoutExpired:
            raise Gone(f"expected an end of the driver within {seconds:g} s; it says:\n{self.output}") from None
        self._watch.join()
        return self.driver.returncode

    def seconds(self) -> float:
        """From the start of the driver until its end was seen."""
        self._watch.join()
        return self._ended - self.started

    def falls_ill(self, *macs: Host) -> None:
        """From now on these hosts (all, if none is named) are not expected to work, until they begin another job."""
        for mac in macs or self.macs:
            self._unwell[mac.name] = set(mac.pids(JOB_PROCESS))

    def nobody_idled(self) -> None:
        assert max(self.longest_idle.values()) < IDLE_S, (self.longest_idle, self.output)

    def _look(self) -> None:
        idle_since: dict[str, float] = {}
        begun = float("inf")
        while self.driver.poll() is None:
            progress = _PROGRESS.findall(self.output)
            total = int(progress[-1][1]) if progress else 10**9
            jobs = {mac.name: set(mac.pids(JOB_PROCESS)) for mac in self.macs}
            # A job on a lost host does not wait before anybody can know of the loss: Dask needs half a minute.
            gone = set(_GONE.findall(self.output))
            held = sum(bool(pids or (self._unwell.get(name) and name not in gone)) for name, pids in jobs.items())
            waiting = total - max((int(done) for done, _ in progress), default=0) - held
            now = time.monotonic()
            if any(pids - self._earlier for pids in jobs.values()):
                begun = min(begun, now)
            for name, pids in jobs.items():
                self.peak_jobs[name] = max(self.peak_jobs[name], len(pids))
                if name in self._unwell and pids - self._unwell[name]:
                    del self._unwell[name]
                if pids or waiting <= 0 or name in self._unwell or now < begun:
                    idle_since.pop(name, None)
                else:
                    idle = now - idle_since.setdefault(name, now)
                    self.longest_idle[name] = max(self.longest_idle[name], idle)
            time.sleep(0.5)
        self._ended = time.time()


@dataclass(frozen=True)
class Job:
    host: Host
    key: str
    pid: int


def job_at_work(host: Host) -> Job | None:
    """The job of this host that has begun to answer requests and has not ended."""
    for folder in (host.outputs / "jobs").glob("*"):
        responses = folder / "responses.jsonl"
        if responses.is_file() and responses.stat().st_size and not (folder / "score.json").exists():
            for pid in host.pids(JOB_PROCESS):
                if _works_in(pid, folder):
                    return Job(host, folder.name, pid)
    return None


def _works_in(pid: int, folder: Path) -> bool:
    """Whether the process holds the lock of this job's folder open."""
    for descriptor in Path(f"/proc/{pid}/fd").glob("*"):
        try:
            if os.readlink(descriptor) == str(folder / ".lock"):
                return True
        except OSError:
            continue
    return False


def results_in(outputs: Path) -> dict[str, Result]:
    """Results by key of the whole job folders of `outputs`."""
    found = {}
    for folder in (outputs / "jobs").glob("*"):
        if (folder / "score.json").is_file():
            name = json.loads((folder / "job.json").read_text())["name"]
            accuracy = json.loads((folder / "score.json").read_text())["metrics"]["accuracy"]
            found[folder.name] = Result(name, accuracy, _answers((folder / "responses.jsonl").read_text()))
    return found


def _answers(lines: str) -> Answers:
    return {row["id"]: row["response"] for row in map(json.loads, lines.splitlines())}
