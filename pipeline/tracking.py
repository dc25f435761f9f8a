"""Stage 4 and everything written to MLflow: the parent run of a sweep, one run per job, exactly once by key.

`python -m pipeline.tracking uri|start|stop|publish|doctor [--outputs DIR]`

A job works in local files; its run is opened at the start (so that the UI shows it) and filled at the end from the job
folder alone, so a job whose server was down is published later with the same result. Three rules keep one result per
key: every attempt carries a uuid (a retried request may create a run twice: the ghost is removed); a lease is renewed
while it lives (a RUNNING run without one is dead: KILLED, see leases.py); FINISHED is looked up before and after it is
set, and of several the first stays.

Always MlflowClient with explicit ids: the fluent API obeys MLFLOW_RUN_ID, and logs to the Default experiment after a
lost race. Times in tags are the server's, in UTC seconds; metric timestamps are milliseconds taken from the folder, so
that publishing again changes nothing.
"""

import argparse
import csv
import fcntl
import gzip
import json
import logging
import math
import os
import re
import shutil
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlflow.entities import Dataset, DatasetInput, InputTag, Metric, Param, Run, RunTag
from mlflow.exceptions import MlflowException
from mlflow.tracking import MlflowClient
from omegaconf import OmegaConf

from pipeline import embedded_server
from pipeline.errors import BadInput
from pipeline.leases import BEAT_S, LEASE_S, Watch, is_mine, lease_of, looks_alive, process_lives, signs_of_life
from pipeline.tracking_server import OUTPUTS, TrackingUnreachable, resolve_uri, server_time, talking_to

PARAM_CHARS = 500
PUBLISH_TRIES = 6
DEAD_JOB = "the attempt died: its lease was not renewed"
DEAD_SWEEP = "the command that ran the sweep died before it could close it"
EMBEDDED_CONFIG = Path(__file__).parent.parent / "conf" / "tracking" / "embedded.yaml"

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Sweep:
    """A parent run and where it lives; plain strings, so it can be sent to another machine."""

    uri: str
    experiment_id: str
    run_id: str
    experiment_name: str
    sweep_key: str


# --- the parent run -------------------------------------------------------------------------------------------------


def open_sweep(uri: str, experiment_name: str, sweep_key: str, params: Mapping[str, Any]) -> Sweep:
    """Find the parent run of `sweep_key` again, or create it (and the experiment); it is RUNNING afterwards.

    It has a lease as jobs have, renewed by a thread of this process until close_sweep. Whatever else in the experiment
    is RUNNING but dead becomes KILLED: at once where its process is known to be gone, else when that thread has watched
    it for long enough. params: what the sweep as a whole is (nested is fine); logged once. Raises TrackingUnreachable.
    """
    with talking_to(uri) as client:
        experiment_id = _experiment(client, experiment_name)
        ours = f"tags.kind = 'sweep' and tags.sweep_key = '{sweep_key}'"
        parents = search(client, experiment_id, ours)
        if not parents:
            with _one_of_us_at_a_time():
                parents = search(client, experiment_id, ours)
                if not parents:
                    name = f"sweep {experiment_name} {time.strftime('%Y-%m-%d %H:%M:%S', time.gmtime())}"
                    tags = {"kind": "sweep", "sweep_key": sweep_key} | signs_of_life(server_time(uri))
                    created = _create(client, experiment_id, name, tags)
                    parents = search(client, experiment_id, ours)  # another machine may have done the same
                    if first(parents).info.run_id != created.info.run_id:  # all take the first
                        client.delete_run(created.info.run_id)
        parent = first(parents)
        run_id = parent.info.run_id
        client.log_batch(run_id, tags=_tags(signs_of_life(server_time(uri)) | {"tracking_uri": uri}))
        client.update_run(run_id, status="RUNNING")
        _log_params(client, parent, params)
        lease = _leases.get((uri, run_id))
        if lease is None or not lease.alive():
            lease = _leases[uri, run_id] = _SweepRun(uri, run_id, experiment_id)
        lease.bury_the_dead(client)
        return Sweep(uri, experiment_id, run_id, experiment_name, sweep_key)


_leases: dict[tuple[str, str], "_SweepRun"] = {}  # of the parents that this process has opened


@contextmanager
def _one_of_us_at_a_time() -> Iterator[None]:
    """A lock among the processes and threads of this user on this machine: MLflow has nothing that is unique by key."""
    with open(Path(tempfile.gettempdir()) / f"keyformer-{os.getuid()}.lock", "w", encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def finished(sweep: Sweep, keys: Iterable[str]) -> dict[str, str]:
    """key -> run id of those jobs that are FINISHED in this experiment already, whichever sweep ran them.

    They count as part of this sweep from now on: its key is added to their `sweep_key` tag. Raises TrackingUnreachable.
    """
    wanted = set(keys)
    with talking_to(sweep.uri) as client:
        done: dict[str, str] = {}
        for run in search(client, sweep.experiment_id, "tags.kind = 'job' and attributes.status = 'FINISHED'"):
            key = run.data.tags.get("key", "")
            if key in wanted and key not in done:
                _adopt(client, run, sweep.sweep_key)
                done[key] = run.info.run_id
        return done


def failed(sweep: Sweep) -> dict[str, str]:
    """Run id -> key of the FAILED jobs of this sweep. Raises TrackingUnreachable."""
    with talking_to(sweep.uri) as client:
        ours = f"tags.kind = 'job' and attributes.status = 'FAILED' and tags.sweep_key LIKE '%{sweep.sweep_key}%'"
        return {run.info.run_id: run.data.tags.get("key", "") for run in search(client, sweep.experiment_id, ours)}


def record_failure(sweep: Sweep, key: str, name: str, params: Mapping[str, Any], reason: str) -> None:
    """A FAILED run for a job of which no attempt came so far as to open one: it fitted no host, or died importing.

    params: the job's, as its run would have them (nested is fine). Raises TrackingUnreachable.
    """
    with talking_to(sweep.uri) as client:
        tags = _links(sweep, key) | signs_of_life(server_time(sweep.uri))
        run = _create(client, sweep.experiment_id, name, tags)
        _log_params(client, run, params)
        end(client, run.info.run_id, "FAILED", reason)


def close_sweep(sweep: Sweep, status: str, files: Sequence[Path] | None = None) -> None:
    """End a sweep: dead children become KILLED, the parent gets `status`, the report's files and its curves as metrics.

    Where only watching tells whether a child is dead, this takes up to a lease; a sweep that is KILLED does not wait.

    status: FINISHED, FAILED or KILLED. files: pictures go to `figures/`, all else to the root; `summary.csv` gives the
    metrics `accuracy_vs_budget/<task>/<policy>` with the budget (percent, or rows) as step. Job runs whose full-cache
    twin is known get `accuracy_vs_full`. Raises TrackingUnreachable.
    """
    if status not in ("FINISHED", "FAILED", "KILLED"):
        raise ValueError(f"expected status FINISHED, FAILED or KILLED, got {status!r}")
    lease = _leases.pop((sweep.uri, sweep.run_id), None) or _SweepRun(sweep.uri, sweep.run_id, sweep.experiment_id)
    lease.let_go()
    with talking_to(sweep.uri) as client:
        lease.settle(client, wait=status != "KILLED")
        children = search(
            client, sweep.experiment_id, f"tags.kind = 'job' and tags.sweep_key LIKE '%{sweep.sweep_key}%'"
        )
        counts: dict[str, int] = {}
        for run in children:
            counts[run.info.status] = counts.get(run.info.status, 0) + 1
        _log_accuracy_vs_full(client, children)
        for file in files or []:
            client.log_artifact(sweep.run_id, str(file), "figures" if file.suffix == ".png" else None)
            if file.name == "summary.csv" and status != "KILLED":
                _log_metrics(client, sweep.run_id, _curves(file, client.get_run(sweep.run_id).info.start_time))
        reason = (
            ", ".join(f"{count} jobs {state}" for state, count in sorted(counts.items())) if status == "FAILED" else ""
        )
        if reason or "reason" in client.get_run(sweep.run_id).data.tags:
            client.set_tag(sweep.run_id, "reason", reason)
        client.set_terminated(sweep.run_id, status)


def _experiment(client: MlflowClient, name: str) -> str:
    """The id of the experiment `name`, created if need be; safe against others doing the same now."""
    found = client.get_experiment_by_name(name)
    if (
        found is not None and found.lifecycle_stage == "deleted"
    ):  # its name is taken until it is renamed; keep it deleted
        client.restore_experiment(found.experiment_id)
        client.rename_experiment(
            found.experiment_id, f"{name} (deleted {time.strftime('%Y-%m-%d %H:%M:%S', time.gmtime())})"
        )
        client.delete_experiment(found.experiment_id)
        found = None
    if found is None:
        try:
            return str(client.create_experiment(name))
        except MlflowException as error:
            if error.error_code != "RESOURCE_ALREADY_EXISTS":
                raise
            found = client.get_experiment_by_name(name)
            if found is None:
                raise
    return str(found.experiment_id)


def _curves(summary: Path, timestamp: int) -> list[Metric]:
    """Accuracy over budget as step metrics: the UI's default chart draws the lines; `full` runs along all steps."""
    with open(summary, newline="", encoding="utf-8") as lines:
        rows = [row for row in csv.DictReader(lines) if row["accuracy"]]
    steps: dict[str, set[int]] = {}
    for row in rows:
        steps.setdefault(row["task"], set()).update([] if row["budget"] in ("", "full") else [_step(row["budget"])])
    metrics = []
    for row in rows:
        name = "/".join(["accuracy_vs_budget", *(re.sub(r"[^\w.\- ]", "_", row[part]) for part in ("task", "policy"))])
        at = sorted(steps[row["task"]]) or [100] if row["budget"] in ("", "full") else [_step(row["budget"])]
        metrics += [Metric(name, float(row["accuracy"]), timestamp, step) for step in at]
    return metrics


def _step(budget: str) -> int:
    return round(float(budget) * 100) if is_fraction(budget) else int(budget)


def is_fraction(budget: str) -> bool:
    """Whether a budget written as text is a fraction of the prompt ("0.25", "1.0"), not a number of rows ("256")."""
    return not budget.isdigit()


def _log_accuracy_vs_full(client: MlflowClient, runs: Sequence[Run]) -> None:
    def twin(run: Run) -> tuple[str | None, ...]:  # the same items read by the same weights
        return tuple(run.data.params.get(name) for name in ("data.hash", "model.name", "model.revision", "model.dtype"))

    done = [run for run in runs if run.info.status == "FINISHED" and "accuracy" in run.data.metrics]
    full = {twin(run): run.data.metrics["accuracy"] for run in done if run.data.params.get("policy.name") == "full"}
    for run in done:
        if (
            run.data.params.get("policy.name") != "full"
            and twin(run) in full
            and "accuracy_vs_full" not in run.data.metrics
        ):
            difference = run.data.metrics["accuracy"] - full[twin(run)]
            _log_metrics(client, run.info.run_id, [Metric("accuracy_vs_full", difference, run.info.end_time, 0)])


# --- a job's run ----------------------------------------------------------------------------------------------------


class JobRun:
    """A RUNNING run, kept alive by a background thread until it is ended or closed.

    The thread renews the lease every BEAT_S (one request may take longer than a lease) and posts the last `progress`,
    so the job itself never waits for the server. It stops by itself once the run is no longer RUNNING.
    """

    def __init__(self, uri: str, run_id: str) -> None:
        self.uri = uri
        self.run_id = run_id
        self._done: int | None = None
        self._posted: int | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._live, name=f"lease {run_id}", daemon=True)
        self._thread.start()

    def progress(self, done: int) -> None:
        """`done` requests are answered: the step metric progress/items at the next beat. Never raises or waits."""
        self._done = done

    def fail(self, reason: str) -> None:
        """End as FAILED with `reason`. Never raises: the failure itself matters more than telling the server."""
        self._end("FAILED", reason)

    def kill(self, reason: str = "interrupted") -> None:
        """End as KILLED. Never raises."""
        self._end("KILLED", reason)

    def close(self) -> None:
        """Post the last progress and stop renewing the lease; the run stays as it is. Never raises."""
        if not self._stop.is_set():
            self._stop.set()
            self._thread.join()
            self._beat()

    def let_go(self) -> None:
        """Stop renewing the lease, without waiting for the server."""
        self._stop.set()

    def alive(self) -> bool:
        """Whether the lease is still being renewed."""
        return self._thread.is_alive() and not self._stop.is_set()

    def _end(self, status: str, reason: str) -> None:
        self.close()
        try:
            with talking_to(self.uri) as client:
                if client.get_run(self.run_id).info.status == "RUNNING":  # else somebody ended it for us: leave it
                    end(client, self.run_id, status, reason)
        except Exception as error:
            log.warning("the run %s could not be set %s: %s", self.run_id, status, error)

    def _live(self) -> None:
        while not self._stop.wait(BEAT_S) and self._beat():
            pass

    def _beat(self) -> bool:
        """Renew the lease; False once the run has ended."""
        try:
            with talking_to(self.uri) as client:
                if client.get_run(self.run_id).info.status != "RUNNING":
                    return False
                done, metrics = self._done, []
                if done is not None and done != self._posted:
                    metrics = [Metric("progress/items", done, _now_ms(), done)]
                client.log_batch(self.run_id, metrics=metrics, tags=_tags(signs_of_life(server_time(self.uri))))
                self._posted = done
                self._look_around(client)
        except Exception as error:  # a server away for a while is no reason to stop generating
            log.debug("lease of %s not renewed: %s", self.run_id, error)
        return True

    def _look_around(self, client: MlflowClient) -> None:
        """What else there is to do at each beat."""


class _SweepRun(JobRun):
    """The parent of a sweep; its thread also ends what has died in the experiment, whichever machine it was on."""

    def __init__(self, uri: str, run_id: str, experiment_id: str) -> None:
        self.experiment_id = experiment_id
        self._watch = Watch()
        self._looking = threading.Lock()
        super().__init__(uri, run_id)

    def _look_around(self, client: MlflowClient) -> None:
        self.bury_the_dead(client)

    def bury_the_dead(self, client: MlflowClient, *, ours_too: bool = False) -> list[Run]:
        """End as KILLED the RUNNING jobs and sweeps whose process is gone; returns the runs nothing is known of yet.

        ours_too: an attempt that this very process left RUNNING is dead as well.
        """
        with self._looking:
            now = server_time(self.uri)
            running = search(client, self.experiment_id, "attributes.status = 'RUNNING'")
            running = [run for run in running if run.info.run_id != self.run_id and "kind" in run.data.tags]
            known = self._watch.look(running, now)
            jobs = [run for run in running if run.data.tags["kind"] == "job"]
            if ours_too:
                known |= {run.info.run_id: False for run in jobs if is_mine(run)}
            at_work = {run.data.tags.get("mlflow.parentRunId") for run in jobs if known[run.info.run_id] is not False}
            for run in running:
                job = run.data.tags["kind"] == "job"
                if known[run.info.run_id] is not False or (not job and run.info.run_id in at_work):
                    continue
                now_there = client.get_run(run.info.run_id)  # it may have come back since the search, and finished
                if now_there.info.status == "RUNNING" and lease_of(now_there) == lease_of(run):
                    end(client, run.info.run_id, "KILLED", DEAD_JOB if job else DEAD_SWEEP)
            return [run for run in running if known[run.info.run_id] is None]

    def settle(self, client: MlflowClient, *, wait: bool) -> None:
        """End what is dead now that this sweep's jobs are over; with `wait`, look until it is known of each."""
        deadline = time.monotonic() + LEASE_S + 2 * BEAT_S
        while unsure := self.bury_the_dead(client, ours_too=True):
            now = server_time(self.uri)
            ours = [run for run in unsure if run.data.tags.get("mlflow.parentRunId") == self.run_id]
            if not wait or time.monotonic() > deadline or not (ours or any(not looks_alive(r, now) for r in unsure)):
                return
            time.sleep(BEAT_S / 2)


def start_job(sweep: Sweep, folder: Path) -> JobRun:
    """Open the RUNNING run of the job in `folder` (config.yaml and job.json are there) under its sweep.

    Attempts of the same key whose process is gone become KILLED; one of another machine is left to the sweep's own
    watch. Raises TrackingUnreachable.
    """
    with talking_to(sweep.uri, _outputs_of(folder)) as client:
        run = _open_job(client, sweep, folder, start_ms=None)
        return JobRun(sweep.uri, run.info.run_id)


def publish_job(sweep: Sweep, folder: Path) -> str:
    """Publish a finished job folder and return its run id: one FINISHED run per key, however often this is called.

    Continues the run of start_job if it is still RUNNING, else opens one; a folder that was scored again since it was
    published renews its run's metrics and artifacts. Writes published.json last. Raises BadInput
    for a folder that is not finished or holds illegal metric names, TrackingUnreachable when the server goes away.
    """
    started = time.monotonic()
    job = _job(folder)
    if not (folder / "score.json").is_file():
        raise BadInput(f"expected a scored job in {folder}, got no score.json: run the job's stages up to score first")
    lock_file = folder / "publish.lock"
    with talking_to(sweep.uri, _outputs_of(folder)) as client, open(lock_file, "w", encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for tries_left in reversed(range(PUBLISH_TRIES)):
            try:
                run_id = _publish(client, sweep, folder, job, started)
                break
            except MlflowException as error:  # another machine writes the same now, and the database refuses one of us
                if error.error_code != "BAD_REQUEST" or not tries_left:
                    raise
    _write_json(folder / "published.json", {"uri": sweep.uri, "run_id": run_id})
    return run_id


def _publish(client: MlflowClient, sweep: Sweep, folder: Path, job: dict[str, Any], started: float) -> str:
    config_ms, end_ms = (int((folder / name).stat().st_mtime * 1000) for name in ("job.json", "score.json"))
    own = _own_attempt(client, folder)
    done = _finished_run(client, sweep, job["key"])
    if done is not None and _scored_again(folder, done):
        _fill(client, done, folder, job, end_ms, started)
    while done is None:
        own = _own_attempt(client, folder) or _open_job(client, sweep, folder, start_ms=min(config_ms, end_ms))
        with _kept_alive(sweep.uri, own):
            _fill(client, own, folder, job, end_ms, started)
        done = _finish(client, sweep, own, job["key"], end_ms)
    other = own if own is not None and own.info.run_id != done.info.run_id else None
    if other is not None and client.get_run(other.info.run_id).info.status == "RUNNING":
        end(client, other.info.run_id, "KILLED", f"the same job finished as {done.info.run_id}")
    _adopt(client, done, sweep.sweep_key)
    run_id: str = done.info.run_id
    return run_id


@contextmanager
def _kept_alive(uri: str, run: Run) -> Iterator[None]:
    """Large artifacts on a slow link may take longer than a lease."""
    lease = JobRun(uri, run.info.run_id)
    try:
        yield
    finally:
        lease.let_go()


def _finish(client: MlflowClient, sweep: Sweep, run: Run, key: str, end_ms: int) -> Run | None:
    """Set a filled run FINISHED unless its key is already, and return the one that is.

    None if the run is no longer RUNNING: it was taken for dead meanwhile, and stays KILLED. MLflow has no transactions:
    two may be set at the same moment. All look afterwards and keep the first.
    """
    run_id = run.info.run_id
    if _finished_run(client, sweep, key) is None and client.get_run(run_id).info.status == "RUNNING":
        client.set_terminated(run_id, "FINISHED", max(end_ms, run.info.start_time))
    finished = _finished_runs(client, sweep, key)
    for other in finished:
        if other.info.run_id != first(finished).info.run_id:
            end(client, other.info.run_id, "KILLED", f"the same job finished as {first(finished).info.run_id}")
    return first(finished) if finished else None


def _outputs_of(job_folder: Path) -> Path:
    return job_folder.parent.parent


def _scored_again(folder: Path, done: Run) -> bool:
    """Whether this folder, which is what `done` shows, was scored again after it was published."""
    note = folder / "published.json"
    if _noted(note).get("run_id") != done.info.run_id:
        return False
    return note.stat().st_mtime_ns < (folder / "score.json").stat().st_mtime_ns


def _job(folder: Path) -> dict[str, Any]:
    try:
        job: dict[str, Any] = json.loads((folder / "job.json").read_text(encoding="utf-8"))
        for name in ("key", "name", "experiment_name", "sweep_key"):
            if not isinstance(job[name], str):
                raise TypeError(name)
        return job
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BadInput(
            f"expected a job folder with a job.json (key, name, experiment_name, sweep_key), got {folder} "
            f"({type(error).__name__}: {error}): delete the folder and run the job again"
        ) from error


def _open_job(client: MlflowClient, sweep: Sweep, folder: Path, start_ms: int | None) -> Run:
    job = _job(folder)
    same_key = f"tags.kind = 'job' and tags.key = '{job['key']}' and attributes.status = 'RUNNING'"
    for earlier in search(client, sweep.experiment_id, same_key):
        if process_lives(earlier) is False or is_mine(earlier):  # jobs run one at a time: ours is not running
            end(client, earlier.info.run_id, "KILLED", DEAD_JOB)
    described = {name: str(job.get(name)) for name in ("host", "chip", "git_commit")}
    tags = described | _links(sweep, job["key"]) | signs_of_life(server_time(sweep.uri))
    run = _create(client, sweep.experiment_id, job["name"], tags, start_ms)
    _write_json(folder / "attempt.json", {"run_id": run.info.run_id, "attempt": run.data.tags["attempt"]})
    _log_params(client, run, _params(folder, job))
    return run


def _links(sweep: Sweep, key: str) -> dict[str, str]:
    """The tags by which a job's run is found."""
    return {"kind": "job", "key": key, "sweep_key": sweep.sweep_key, "mlflow.parentRunId": sweep.run_id}


def _own_attempt(client: MlflowClient, folder: Path) -> Run | None:
    """The run that start_job opened for this folder, if it still is RUNNING there."""
    noted = _noted(folder / "attempt.json")
    if not isinstance(noted.get("run_id"), str):
        return None
    try:
        run = client.get_run(noted["run_id"])
    except MlflowException as error:
        if error.error_code not in ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE"):
            raise
        return None  # opened on another server
    alive = run.info.status == "RUNNING" and run.info.lifecycle_stage == "active"
    return run if alive and run.data.tags.get("attempt") == noted.get("attempt") else None


def _finished_run(client: MlflowClient, sweep: Sweep, key: str) -> Run | None:
    done = _finished_runs(client, sweep, key)
    return first(done) if done else None


def _finished_runs(client: MlflowClient, sweep: Sweep, key: str) -> list[Run]:
    finished = f"tags.kind = 'job' and tags.key = '{key}' and attributes.status = 'FINISHED'"
    return search(client, sweep.experiment_id, finished)


def _fill(client: MlflowClient, run: Run, folder: Path, job: dict[str, Any], time_ms: int, started: float) -> None:
    """Everything the folder says, into the run; doing it twice leaves the same run."""
    run_id = run.info.run_id
    telemetry = _read_json(folder / "telemetry.json", {})
    score: dict[str, Any] = _read_json(folder / "score.json", {})["metrics"]
    measured: dict[str, Any] = telemetry.get("metrics", {})
    if twice := sorted(score.keys() & measured.keys()):
        raise BadInput(f"expected each metric once in {folder}, got {twice} in score.json and telemetry.json")
    values = score | measured
    if illegal := sorted(name for name in [*values, *telemetry.get("series", {})] if not _legal(name)):
        raise BadInput(
            f"expected metric names of letters, digits and _ - . : / or space, got {illegal}: rename the task's metrics"
        )
    metrics = [Metric(name, float(value), time_ms, 0) for name, value in values.items() if _finite(value)]
    for name, points in telemetry.get("series", {}).items():
        metrics += [Metric(name, float(value), time_ms, int(step)) for step, value in points if _finite(value)]
    answered = _count_lines(folder / "responses.jsonl")
    metrics.append(Metric("progress/items", answered, time_ms, answered))
    broken = [name for name, value in values.items() if not _finite(value)]
    broken += [name for name, points in telemetry.get("series", {}).items() if not all(_finite(v) for _, v in points)]

    _log_params(client, run, _params(folder, job))  # job.json may say more now than when the run was opened
    _log_metrics(client, run_id, metrics)
    tags = {"mlflow.loggedArtifacts": json.dumps([{"path": "samples.json", "type": "table"}])}  # shown as a table
    if broken:
        tags["nonfinite"] = ", ".join(sorted(broken))[:5000]
    client.log_batch(run_id, tags=_tags(tags))
    _log_dataset(client, run_id, job)
    with tempfile.TemporaryDirectory() as temporary:
        _write_artifacts(folder, job, Path(temporary))
        client.log_artifacts(run_id, temporary)
    _log_metrics(client, run_id, [Metric("time/publish_s", time.monotonic() - started, time_ms, 0)])


def _write_artifacts(folder: Path, job: dict[str, Any], into: Path) -> None:
    shutil.copyfile(folder / "config.yaml", into / "config.yaml")
    packed = gzip.compress((folder / "responses.jsonl").read_bytes(), mtime=0)  # no time inside: same bytes each time
    (into / "responses.jsonl.gz").write_bytes(packed)
    with open(folder / "samples.jsonl", encoding="utf-8") as lines:
        samples = [json.loads(line) for line in lines if line.strip()]
    columns = list(dict.fromkeys(name for sample in samples for name in sample))
    table = [[_cell(sample.get(name)) for name in columns] for sample in samples]
    # The format of MLflow's log_table, which itself would append to the table when a publish is repeated.
    _write_json(into / "samples.json", {"columns": columns, "data": table})
    _write_json(into / "environment.json", {name: job.get(name) for name in ("host", "chip", "git_commit", "versions")})


def _cell(value: Any) -> str | float | int | bool | None:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if value is None or isinstance(value, str | float | int):
        return value
    return json.dumps(value, ensure_ascii=False)


def _log_dataset(client: MlflowClient, run_id: str, job: dict[str, Any]) -> None:
    data = job.get("data") or {}
    if not data.get("hash"):
        return
    profile = {name: data[name] for name in ("items", "prompt_tokens") if name in data}
    dataset = Dataset(
        name=str(job.get("task") or data.get("task") or job["name"].rpartition("-")[2]),
        digest=str(data["hash"])[:36],
        source_type="local",
        source=json.dumps({"uri": str(job.get("dataset_path") or "")}),
        profile=json.dumps(profile),
    )
    client.log_inputs(run_id, [DatasetInput(dataset, [InputTag("mlflow.data.context", "evaluation")])])


def _params(folder: Path, job: dict[str, Any]) -> dict[str, Any]:
    """The resolved config, with what only a running job knows (resolved revision, dtype, data hash, rows) over it."""
    config = OmegaConf.to_container(OmegaConf.load(folder / "config.yaml"))
    known = {name: job[name] for name in ("model", "data") if isinstance(job.get(name), Mapping)}
    rows = {} if job.get("budget_rows") is None else {"budget_rows": job["budget_rows"]}
    return flatten(config) | flatten(known) | rows


def flatten(config: Any, prefix: str = "") -> dict[str, Any]:
    """Nested mappings as one, with dotted names; lists and empty mappings stay values."""
    if OmegaConf.is_config(config):
        config = OmegaConf.to_container(config, resolve=True)
    flat: dict[str, Any] = {}
    for name, value in config.items():
        if isinstance(value, Mapping) and value:
            flat |= flatten(value, f"{prefix}{name}.")
        else:
            flat[f"{prefix}{name}"] = value
    return flat


# --- shared by parent and job ---------------------------------------------------------------------------------------


def _create(
    client: MlflowClient, experiment_id: str, name: str, tags: dict[str, str], start_ms: int | None = None
) -> Run:
    """One new RUNNING run. After a cut connection the client asks again and the server has two: the other goes."""
    attempt = uuid.uuid4().hex
    run = client.create_run(experiment_id, start_ms or _now_ms(), tags | {"attempt": attempt}, name)
    for ghost in search(client, experiment_id, f"tags.attempt = '{attempt}'"):
        if ghost.info.run_id != run.info.run_id:
            end(client, ghost.info.run_id, "KILLED", "created twice by a retried request")
            client.delete_run(ghost.info.run_id)
    return run


def end(client: MlflowClient, run_id: str, status: str, reason: str) -> None:
    try:
        client.set_tag(run_id, "reason", reason[:5000])
    except MlflowException as error:
        if error.error_code != "BAD_REQUEST":  # else somebody sets it at the same moment
            raise
    client.set_terminated(run_id, status)


def _tags(tags: Mapping[str, str]) -> list[RunTag]:
    return [RunTag(*tag) for tag in tags.items()]


def first(runs: Sequence[Run]) -> Run:
    return min(runs, key=lambda run: (run.info.start_time, run.info.run_id))


def _adopt(client: MlflowClient, run: Run, sweep_key: str) -> None:
    keys = run.data.tags.get("sweep_key", "").split()
    if sweep_key not in keys:
        client.set_tag(run.info.run_id, "sweep_key", " ".join([*keys, sweep_key]))


def search(client: MlflowClient, experiment_id: str, where: str) -> list[Run]:
    runs: list[Run] = []
    token: str | None = None
    while True:
        page = client.search_runs(
            [experiment_id], where, max_results=1000, order_by=["start_time ASC"], page_token=token
        )
        runs += page
        token = page.token
        if not token:
            return runs


def _log_params(client: MlflowClient, run: Run, params: Mapping[str, Any]) -> None:
    """Log those params the run does not have yet (a param can never change)."""
    wanted = {re.sub(r"[^\w.\- :/]", "_", name): _param(value) for name, value in flatten(params).items()}
    for last_try in (False, False, True):
        new = [Param(name, value) for name, value in wanted.items() if name not in run.data.params]
        try:
            for at in range(0, len(new), 100):
                client.log_batch(run.info.run_id, params=new[at : at + 100])
            return
        except MlflowException:  # somebody else logs the same ones right now: the server refuses one of us
            if last_try:
                raise
            run = client.get_run(run.info.run_id)


def _param(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= PARAM_CHARS else text[: PARAM_CHARS - 3] + "..."


def _log_metrics(client: MlflowClient, run_id: str, metrics: Sequence[Metric]) -> None:
    for at in range(0, len(metrics), 1000):
        client.log_batch(run_id, metrics=metrics[at : at + 1000])


def _legal(name: str) -> bool:
    return bool(re.fullmatch(r"[\w.\- :/]{1,250}", name)) and os.path.normpath(name) == name and name[0] not in "/."


def _finite(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _now_ms() -> int:
    return int(time.time() * 1000)


def _count_lines(path: Path) -> int:
    with open(path, "rb") as lines:
        return sum(1 for line in lines if line.strip())


def _read_json(path: Path, default: Any) -> Any:
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else default


def _noted(path: Path) -> dict[str, Any]:
    """What we noted in a file; nothing if it is absent, empty (a crash of the machine) or not ours."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def _write_json(path: Path, content: Any) -> None:
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(json.dumps(content, ensure_ascii=False, indent=1), encoding="utf-8")
    os.replace(temporary, path)


# --- the command ----------------------------------------------------------------------------------------------------


def embedded_config() -> Any:
    """conf/tracking/embedded.yaml, for commands that run without Hydra."""
    return OmegaConf.load(EMBEDDED_CONFIG)


def check_folder(outputs: Path) -> None:
    """Raises BadInput unless `outputs` is a folder: a mistyped one must not come into being."""
    if not outputs.is_dir():
        raise BadInput(
            f"expected the outputs folder of a sweep, got {outputs}, which is no folder: correct --outputs, or run "
            "`make sweep` first"
        )


def cannot_write(outputs: Path, error: OSError) -> BadInput:
    """The message for a folder that is read-only, full or no folder."""
    return BadInput(f"expected to read and write files in {outputs}, got {error}: choose another folder with --outputs")


def unpublished(outputs: Path) -> list[Path]:
    """The folders of finished jobs under `outputs` that no server is known to have."""
    scored = sorted((outputs / "jobs").glob("*/score.json"))
    return [path.parent for path in scored if not _noted(path.parent / "published.json").get("run_id")]


def _at_work(uri: str, experiment: str, sweep_key: str) -> Sweep | None:
    """The sweep of that key, if a driver is at work on it now."""
    with talking_to(uri) as client:
        found = client.get_experiment_by_name(experiment)
        if found is None:
            return None
        ours = f"tags.kind = 'sweep' and tags.sweep_key = '{sweep_key}' and attributes.status = 'RUNNING'"
        now = server_time(uri)
        alive = [run for run in search(client, found.experiment_id, ours) if looks_alive(run, now)]
        return Sweep(uri, found.experiment_id, first(alive).info.run_id, experiment, sweep_key) if alive else None


def sweeps_at_work(uri: str) -> list[str]:
    """The names of the sweeps that a driver is at work on now through `uri`, in all experiments.

    Another server may have the same database after this one, or had it before. Raises TrackingUnreachable.
    """
    running = "tags.kind = 'sweep' and attributes.status = 'RUNNING'"
    with talking_to(uri) as client:
        now = server_time(uri)
        experiments = [each.experiment_id for each in client.search_experiments()]
        runs = [run for each in experiments for run in search(client, each, running)]
        through_here = [run for run in runs if run.data.tags.get("tracking_uri") == uri]
        return [str(run.info.run_name) for run in through_here if looks_alive(run, now)]


def publish_all(uri: str, outputs: Path) -> int:
    """Publish every finished, unpublished job folder under `outputs`/jobs; returns how many could not be.

    The parent is found by experiment name and sweep key, and gets its report anew; one whose driver is at work is left
    to it. Raises TrackingUnreachable.
    """
    from pipeline.report import report  # the reader builds on this module; only this command needs both

    sweeps: dict[tuple[str, str], list[Path]] = {}
    failed = 0
    for folder in unpublished(outputs):
        try:
            job = _job(folder)
            sweeps.setdefault((job["experiment_name"], job["sweep_key"]), []).append(folder)
        except BadInput as error:
            print(f"not published: {error}", file=sys.stderr)
            failed += 1
    for (experiment, sweep_key), folders in sweeps.items():
        at_work = _at_work(uri, experiment, sweep_key)
        sweep = at_work or open_sweep(uri, experiment, sweep_key, {"experiment_name": experiment})
        broken = 0
        try:
            for folder in folders:
                try:
                    print(f"published {folder.name} as {publish_job(sweep, folder)}")
                except (BadInput, MlflowException, OSError, ValueError, KeyError, TypeError, AttributeError) as error:
                    print(f"not published: {folder}: {error}", file=sys.stderr)
                    broken += 1
        except KeyboardInterrupt:  # the parent must not stay RUNNING
            if not at_work:
                close_sweep(sweep, "KILLED")
            raise
        failed += broken
        if at_work:
            continue
        result = report(sweep, outputs / "reports" / sweep_key)
        close_sweep(sweep, "FAILED" if broken or result.failed else "FINISHED", result.files)
        print(f"sweep {sweep_key} of {experiment}: {result.link}")
    if not sweeps and not failed:
        print(f"nothing to publish in {outputs / 'jobs'}")
    return failed


def main(arguments: Sequence[str] | None = None) -> int:
    """The command `python -m pipeline.tracking`; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m pipeline.tracking", description="The MLflow server of this project."
    )
    parser.add_argument(
        "command",
        choices=["uri", "start", "stop", "publish", "doctor"],
        help="uri: print the server's address; start: start or find it; stop: stop the local one; publish: all "
        "finished jobs not there yet; doctor: mend what a crash left",
    )
    parser.add_argument("--outputs", type=Path, default=OUTPUTS, help="the folder of jobs and of the embedded server")
    parser.add_argument(
        "--dry-run", action="store_true", help="doctor: list what is wrong, mend nothing; exit code 1 if there is any"
    )
    options = parser.parse_args(arguments)
    if options.dry_run and options.command != "doctor":
        parser.error("--dry-run: only doctor can do that")
    try:
        if options.command == "stop":
            stopped = embedded_server.stop(options.outputs / "mlflow")
            print("stopped" if stopped else f"no local MLflow server of {options.outputs} was running")
            if head := embedded_server.running(options.outputs / "mlflow"):
                print(f"the head's server at {head} goes on; Ctrl-C of `make head` ends it")
            return 0
        if options.command == "publish" or (options.command in ("start", "doctor") and options.outputs != OUTPUTS):
            check_folder(options.outputs)
        uri = resolve_uri(embedded_config(), options.outputs, start=options.command != "uri")
        if options.command == "doctor":
            from pipeline.doctor import doctor  # it builds on this module

            return 1 if doctor(uri, options.outputs, dry_run=options.dry_run) else 0
        if options.command == "publish":
            return 1 if publish_all(uri, options.outputs) else 0
        print(uri)
        return 0
    except (BadInput, TrackingUnreachable) as error:
        print(f"error: {error}", file=sys.stderr)
    except OSError as error:
        print(f"error: {cannot_write(options.outputs, error)}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    from pipeline import tracking  # not __main__'s copy: report raises this one's exceptions

    sys.exit(tracking.main())
