"""Stage 4 and everything written to MLflow: the parent run of a sweep, one run per job, exactly once by key.

`python -m pipeline.tracking uri|start|stop|publish [--outputs DIR]`

A job works in local files; its run is opened at the start (so that the UI shows it) and filled at the end from the job
folder alone, so a job whose server was down is published later with the same result. Three rules keep one result per
key: every attempt carries a uuid (a retried request may create a run twice: the ghost is removed); a lease is renewed
while it lives (a RUNNING run without one is dead: KILLED); FINISHED is looked up before and after it is set.

Always MlflowClient with explicit ids: the fluent API obeys MLFLOW_RUN_ID, and logs to the Default experiment after a
lost race. Times in tags are UTC seconds; metric timestamps are milliseconds taken from the folder, so that publishing
again changes nothing.
"""

import argparse
import csv
import errno
import fcntl
import gzip
import http.client
import json
import logging
import math
import os
import re
import shlex
import shutil
import socket
import ssl
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Before mlflow is imported: its defaults retry for four minutes and hold the GPU meanwhile. We can publish later.
os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "3")
os.environ.setdefault("MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR", "1")
os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "30")
os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")
os.environ.setdefault("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")
os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")

import psutil
from mlflow.entities import Dataset, DatasetInput, InputTag, Metric, Param, Run, RunTag
from mlflow.exceptions import MlflowException
from mlflow.tracking import MlflowClient
from omegaconf import OmegaConf
from requests.exceptions import RequestException

from pipeline import embedded_server
from pipeline.errors import BadInput

LEASE_S = 60.0  # a run whose lease is older than this is dead
BEAT_S = 10.0  # how often a living job renews it
PARAM_CHARS = 500
OUTPUTS = Path("outputs")  # the default, also in conf/config.yaml
# Answers that say the server is ill, or not ours to use; MLflow has retried the first two kinds by then.
SERVER_FAULTS = {
    *("TEMPORARILY_UNAVAILABLE", "INTERNAL_ERROR", "REQUEST_LIMIT_EXCEEDED", "ENDPOINT_NOT_FOUND"),
    *("UNAUTHENTICATED", "PERMISSION_DENIED"),
}
EMBEDDED_CONFIG = Path(__file__).parent.parent / "conf" / "tracking" / "embedded.yaml"

log = logging.getLogger(__name__)


class TrackingUnreachable(RuntimeError):
    """No MLflow server answers, or it cannot do its work. Nothing is lost: the message says how to publish later."""

    def __init__(self, reason: str, outputs: Path | None = None) -> None:
        here = outputs is None or outputs.resolve() == OUTPUTS.resolve()
        where = "" if here else f" --outputs {shlex.quote(str(outputs))}"
        super().__init__(
            f"expected an MLflow server, got none: {reason}. Jobs can run without it: publish them later "
            f"with `.venv/bin/python -m pipeline.tracking publish{where}`, or set MLFLOW_TRACKING_URI to another server"
        )


@dataclass(frozen=True)
class Sweep:
    """A parent run and where it lives; plain strings, so it can be sent to another machine."""

    uri: str
    experiment_id: str
    run_id: str
    experiment_name: str
    sweep_key: str


# --- the server -----------------------------------------------------------------------------------------------------


def resolve_uri(tracking_cfg: Any, outputs: Path, *, start: bool = True) -> str:
    """The tracking address: MLFLOW_TRACKING_URI, else `tracking.uri`, else the embedded server of `outputs`.

    tracking_cfg: conf/tracking/*.yaml ({uri, host, port}). start=False only looks and raises TrackingUnreachable if the
    embedded server is down. Raises BadInput for an address, host, port or folder that cannot work, and when neither an
    address nor a host to start a server on is given.
    """
    if given := os.environ.get("MLFLOW_TRACKING_URI"):
        return _server_address("MLFLOW_TRACKING_URI", given)
    if tracking_cfg["uri"] not in (None, ""):
        return _server_address("tracking.uri", tracking_cfg["uri"])
    if tracking_cfg["host"] in (None, ""):
        raise BadInput(
            "expected tracking.uri or MLFLOW_TRACKING_URI for tracking=server, got neither: "
            "add tracking.uri=http://host:port, or use tracking=embedded"
        )
    host, port = _own_host(tracking_cfg["host"]), tracking_cfg["port"]
    if type(port) is not int or not 1 <= port <= 65535:
        raise BadInput(f"tracking.port: expected a whole number from 1 to 65535, got {port!r}: set it to 5050, say")
    for name in ("no_proxy", "NO_PROXY"):  # a company proxy must not be asked for this machine
        os.environ[name] = ",".join(filter(None, [os.environ.get(name), host]))
    folder = outputs / "mlflow"
    if not start:
        if address := embedded_server.running(folder):
            return address
        raise TrackingUnreachable(
            f"the embedded server of {outputs} is not running (`.venv/bin/python -m pipeline.tracking start`)", outputs
        )
    try:
        return embedded_server.start(folder, host, port)
    except embedded_server.ServerFailed as error:
        raise TrackingUnreachable(str(error), outputs) from error
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise TrackingUnreachable(f"the MLflow server could not be started: {error}", outputs) from error
        raise BadInput(
            f"expected a folder that can be written for the MLflow server, got {folder} ({error.strerror or error}): "
            "choose another outputs folder, or set MLFLOW_TRACKING_URI to a running server"
        ) from error


def _server_address(setting: str, given: Any) -> str:
    """`given` without a slash at its end, if it is http(s)://host[:port]: health check, jobs and links go there."""
    if isinstance(given, str):
        form = re.fullmatch(r"(https?://(?:[\w.-]+|\[[\da-fA-F:.]+\])(?::(\d{1,5}))?)/*", given, re.ASCII)
        if form and 1 <= int(form[2] or 1) <= 65535:
            return form[1]
    shown = re.sub(r"//[^/@]*@", "//***@", given) if isinstance(given, str) else given
    raise BadInput(
        f"{setting}: expected the address of an MLflow server, http://host:port or https://host:port without anything "
        f"behind it, got {shown!r}: change it to such an address (user and password go to MLFLOW_TRACKING_USERNAME and "
        "MLFLOW_TRACKING_PASSWORD), or leave it out and use tracking=embedded"
    )


def _own_host(host: Any) -> str:
    """`host` if a server on this machine can listen there."""
    try:
        if not isinstance(host, str):
            raise ValueError("not a text")
        address = socket.getaddrinfo(host, None, socket.AF_INET)[0][4][0]
        with socket.socket() as listener:
            listener.bind((address, 0))
        return host
    except (OSError, ValueError) as error:
        raise BadInput(
            f"tracking.host: expected a name or an IPv4 address of this machine, got {host!r} ({error}): "
            "set it to 127.0.0.1, or give a server elsewhere as tracking=server tracking.uri=http://host:port"
        ) from error


def reachable(uri: str) -> bool:
    """True if an MLflow server answers at `uri` within a few seconds."""
    return _why_unreachable(uri) is None


def _why_unreachable(uri: str) -> str | None:
    reason = ""
    for _ in range(2):
        try:
            trusted = ssl.create_default_context(cafile=os.environ.get("MLFLOW_TRACKING_SERVER_CERT_PATH"))
            with urllib.request.urlopen(f"{uri}/health", timeout=3, context=trusted) as answer:
                return None if answer.status == 200 else f"{uri} answers {answer.status}"
        except urllib.error.HTTPError as error:
            hint = " (the server's --allowed-hosts must name this address)" if error.code == 403 else ""
            return f"{uri}/health answers {error.code}{hint}"
        except (OSError, ValueError, http.client.HTTPException) as error:
            reason = f"{uri} does not answer ({getattr(error, 'reason', error)})"
    return reason


@contextmanager
def talking_to(uri: str, outputs: Path | None = None) -> Iterator[MlflowClient]:
    """A client for `uri`; a server that is or goes away, or cannot do its work, becomes TrackingUnreachable.

    outputs: the folder of the jobs at hand, for the message.
    """
    if reason := _why_unreachable(uri):
        raise TrackingUnreachable(reason, outputs)
    try:
        yield MlflowClient(tracking_uri=uri)
    except (MlflowException, OSError, http.client.HTTPException) as error:  # requests' exceptions are OSErrors
        reason = _why_unreachable(uri)
        if reason is None and _servers_fault(error):
            reason = f"{uri} answers, but cannot do its work ({' '.join(str(error).split())[:300]})"
        if reason:
            raise TrackingUnreachable(reason, outputs) from error
        raise


def _servers_fault(error: Exception) -> bool:
    """Whether the server or the way to it failed, not what we asked for or a file of ours."""
    if isinstance(error, MlflowException):
        return error.error_code in SERVER_FAULTS
    if isinstance(error, RequestException):
        status = None if error.response is None else error.response.status_code
        return status is None or status >= 500 or status in (401, 403, 429)
    return isinstance(error, ConnectionError | TimeoutError | http.client.HTTPException)


# --- the parent run -------------------------------------------------------------------------------------------------


def open_sweep(uri: str, experiment_name: str, sweep_key: str, params: Mapping[str, Any]) -> Sweep:
    """Find the parent run of `sweep_key` again, or create it (and the experiment); it is RUNNING afterwards.

    It has a lease as jobs have, renewed by a thread of this process until close_sweep. Whatever else in the experiment
    is still RUNNING but dead becomes KILLED. params: what the sweep as a whole is (nested is fine); logged once. Raises
    TrackingUnreachable.
    """
    with talking_to(uri) as client:
        experiment_id = _experiment(client, experiment_name)
        ours = f"tags.kind = 'sweep' and tags.sweep_key = '{sweep_key}'"
        parents = _search(client, experiment_id, ours)
        if not parents:
            with _one_of_us_at_a_time():
                parents = _search(client, experiment_id, ours)
                if not parents:
                    name = f"sweep {experiment_name} {time.strftime('%Y-%m-%d %H:%M:%S', time.gmtime())}"
                    tags = {"kind": "sweep", "sweep_key": sweep_key} | _signs_of_life()
                    created = _create(client, experiment_id, name, tags)
                    parents = _search(client, experiment_id, ours)  # another machine may have done the same
                    if _first(parents).info.run_id != created.info.run_id:  # all take the first
                        client.delete_run(created.info.run_id)
        parent = _first(parents)
        run_id = parent.info.run_id
        client.log_batch(run_id, tags=[RunTag(*tag) for tag in _signs_of_life().items()])
        client.update_run(run_id, status="RUNNING")
        _log_params(client, parent, params)
        _bury_the_dead(client, experiment_id, run_id)
        if (uri, run_id) not in _leases or not _leases[uri, run_id].alive():
            _leases[uri, run_id] = JobRun(uri, run_id)
        return Sweep(uri, experiment_id, run_id, experiment_name, sweep_key)


_leases: dict[tuple[str, str], "JobRun"] = {}  # of the parents that this process has opened


@contextmanager
def _one_of_us_at_a_time() -> Iterator[None]:
    """A lock among the processes and threads of this user on this machine: MLflow has nothing that is unique by key."""
    with open(Path(tempfile.gettempdir()) / f"keyformer-{os.getuid()}.lock", "w", encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _bury_the_dead(client: MlflowClient, experiment_id: str, opened: str) -> None:
    """End the RUNNING jobs and sweeps of the experiment whose process is gone, except for the sweep just opened."""
    parents_at_work = {opened}
    for run in _search(client, experiment_id, "tags.kind = 'job' and attributes.status = 'RUNNING'"):
        if _dead(run, mine=False):
            _end(client, run.info.run_id, "KILLED", "the attempt died: its lease was not renewed")
        else:
            parents_at_work.add(run.data.tags.get("mlflow.parentRunId", ""))
    for run in _search(client, experiment_id, "tags.kind = 'sweep' and attributes.status = 'RUNNING'"):
        if run.info.run_id not in parents_at_work and _dead(run, mine=False):
            _end(client, run.info.run_id, "KILLED", "the command that ran the sweep died before it could close it")


def finished(sweep: Sweep, keys: Iterable[str]) -> dict[str, str]:
    """key -> run id of those jobs that are FINISHED in this experiment already, whichever sweep ran them.

    They count as part of this sweep from now on: its key is added to their `sweep_key` tag. Raises TrackingUnreachable.
    """
    wanted = set(keys)
    with talking_to(sweep.uri) as client:
        done: dict[str, str] = {}
        for run in _search(client, sweep.experiment_id, "tags.kind = 'job' and attributes.status = 'FINISHED'"):
            key = run.data.tags.get("key", "")
            if key in wanted and key not in done:
                _adopt(client, run, sweep.sweep_key)
                done[key] = run.info.run_id
        return done


def close_sweep(sweep: Sweep, status: str, files: Sequence[Path] | None = None) -> None:
    """End a sweep: dead children become KILLED, the parent gets `status`, the report's files and its curves as metrics.

    status: FINISHED, FAILED or KILLED. files: pictures go to `figures/`, all else to the root; `summary.csv` gives the
    metrics `accuracy_vs_budget/<task>/<policy>` with the budget (percent, or rows) as step. Job runs whose full-cache
    twin is known get `accuracy_vs_full`. Raises TrackingUnreachable.
    """
    if status not in ("FINISHED", "FAILED", "KILLED"):
        raise ValueError(f"expected status FINISHED, FAILED or KILLED, got {status!r}")
    if lease := _leases.pop((sweep.uri, sweep.run_id), None):
        lease.let_go()
    with talking_to(sweep.uri) as client:
        children = _search(
            client, sweep.experiment_id, f"tags.kind = 'job' and tags.sweep_key LIKE '%{sweep.sweep_key}%'"
        )
        counts: dict[str, int] = {}
        for run in children:
            state = run.info.status
            if state == "RUNNING" and _dead(run):
                _end(client, run.info.run_id, "KILLED", "the attempt died: its lease was not renewed")
                state = "KILLED"
            counts[state] = counts.get(state, 0) + 1
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
    """A RUNNING run (a job's, or its sweep's), kept alive by a background thread until it is ended or closed.

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
                    _end(client, self.run_id, status, reason)
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
                client.log_batch(self.run_id, metrics=metrics, tags=[RunTag("lease", str(int(time.time())))])
                self._posted = done
        except Exception as error:  # a server away for a while is no reason to stop generating
            log.debug("lease of %s not renewed: %s", self.run_id, error)
        return True


def start_job(sweep: Sweep, folder: Path) -> JobRun:
    """Open the RUNNING run of the job in `folder` (config.yaml and job.json are there) under its sweep.

    Dead attempts of the same key become KILLED; an attempt alive elsewhere is left alone. Raises TrackingUnreachable.
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
    config_ms, end_ms = (int((folder / name).stat().st_mtime * 1000) for name in ("job.json", "score.json"))
    lock_file = folder / "publish.lock"
    with talking_to(sweep.uri, _outputs_of(folder)) as client, open(lock_file, "w", encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        own = _own_attempt(client, folder)
        done = _finished_run(client, sweep, job["key"])
        if done is None:
            run = own or _open_job(client, sweep, folder, start_ms=min(config_ms, end_ms))
            _fill(client, run, folder, job, end_ms, started)
            client.set_terminated(run.info.run_id, "FINISHED", max(end_ms, run.info.start_time))
            done = _finished_run(client, sweep, job["key"]) or run
            own = run
        elif _scored_again(folder, done):
            _fill(client, done, folder, job, end_ms, started)
        if own is not None and own.info.run_id != done.info.run_id:
            _end(client, own.info.run_id, "KILLED", f"the same job finished as {done.info.run_id}")
        _adopt(client, done, sweep.sweep_key)
    run_id: str = done.info.run_id
    _write_json(folder / "published.json", {"uri": sweep.uri, "run_id": run_id})
    return run_id


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
    for earlier in _search(client, sweep.experiment_id, same_key):
        if _dead(earlier):
            _end(client, earlier.info.run_id, "KILLED", "the attempt died: its lease was not renewed")
    described = {name: str(job.get(name)) for name in ("host", "chip", "git_commit")}
    links = {"kind": "job", "key": job["key"], "sweep_key": sweep.sweep_key, "mlflow.parentRunId": sweep.run_id}
    run = _create(client, sweep.experiment_id, job["name"], described | links | _signs_of_life(), start_ms)
    _write_json(folder / "attempt.json", {"run_id": run.info.run_id, "attempt": run.data.tags["attempt"]})
    _log_params(client, run, _params(folder, job))
    return run


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
    done = _search(
        client, sweep.experiment_id, f"tags.kind = 'job' and tags.key = '{key}' and attributes.status = 'FINISHED'"
    )
    return _first(done) if done else None


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
    client.log_batch(run_id, tags=[RunTag(*tag) for tag in tags.items()])
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
    for ghost in _search(client, experiment_id, f"tags.attempt = '{attempt}'"):
        if ghost.info.run_id != run.info.run_id:
            _end(client, ghost.info.run_id, "KILLED", "created twice by a retried request")
            client.delete_run(ghost.info.run_id)
    return run


def _end(client: MlflowClient, run_id: str, status: str, reason: str) -> None:
    client.set_tag(run_id, "reason", reason[:5000])
    client.set_terminated(run_id, status)


def _signs_of_life() -> dict[str, str]:
    """The tags by which _dead judges a RUNNING run."""
    return {"lease": str(int(time.time())), "process": f"{socket.gethostname()}:{os.getpid()}"}


def _dead(run: Run, *, mine: bool = True) -> bool:
    """Whether a RUNNING run's attempt is gone: a process of this machine that ended, or no lease for LEASE_S.

    mine: an attempt that this very process left RUNNING is dead as well, as where a job begins: jobs run one at a time,
    and this one is not running. A sweep lives as long as its process on this machine does.
    """
    tags = run.data.tags
    try:
        lease = float(tags["lease"])
    except (KeyError, ValueError):
        lease = run.info.start_time / 1000
    host, _, pid = tags.get("process", "").rpartition(":")
    if host == socket.gethostname() and pid.isdigit():
        if int(pid) == os.getpid() and mine:
            return True
        try:
            if psutil.Process(int(pid)).create_time() > lease + 5:  # the number belongs to another process now
                return True
        except psutil.NoSuchProcess:
            return True
        except psutil.Error:
            pass  # it is there, and somebody else's
        if tags.get("kind") == "sweep":
            return False
    return time.time() - lease > LEASE_S


def _first(runs: Sequence[Run]) -> Run:
    return min(runs, key=lambda run: (run.info.start_time, run.info.run_id))


def _adopt(client: MlflowClient, run: Run, sweep_key: str) -> None:
    keys = run.data.tags.get("sweep_key", "").split()
    if sweep_key not in keys:
        client.set_tag(run.info.run_id, "sweep_key", " ".join([*keys, sweep_key]))


def _search(client: MlflowClient, experiment_id: str, where: str) -> list[Run]:
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


def publish_all(uri: str, outputs: Path) -> int:
    """Publish every finished, unpublished job folder under `outputs`/jobs; returns how many could not be.

    The parent is found by experiment name and sweep key, and gets its report anew. Raises TrackingUnreachable.
    """
    from pipeline.report import report  # the reader builds on this module; only this command needs both

    sweeps: dict[tuple[str, str], list[Path]] = {}
    failed = 0
    for scored in sorted((outputs / "jobs").glob("*/score.json")):
        if not _noted(scored.parent / "published.json").get("run_id"):
            try:
                job = _job(scored.parent)
                sweeps.setdefault((job["experiment_name"], job["sweep_key"]), []).append(scored.parent)
            except BadInput as error:
                print(f"not published: {error}", file=sys.stderr)
                failed += 1
    for (experiment, sweep_key), folders in sweeps.items():
        sweep = open_sweep(uri, experiment, sweep_key, {"experiment_name": experiment})
        broken = 0
        for folder in folders:
            try:
                print(f"published {folder.name} as {publish_job(sweep, folder)}")
            except (BadInput, MlflowException, OSError, ValueError, KeyError, TypeError, AttributeError) as error:
                print(f"not published: {folder}: {error}", file=sys.stderr)
                broken += 1
        result = report(sweep, outputs / "reports" / sweep_key)
        close_sweep(sweep, "FAILED" if broken or result.failed else "FINISHED", result.files)
        print(f"sweep {sweep_key} of {experiment}: {result.link}")
        failed += broken
    if not sweeps and not failed:
        print(f"nothing to publish in {outputs / 'jobs'}")
    return failed


def main(arguments: Sequence[str] | None = None) -> int:
    """The command `python -m pipeline.tracking`; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m pipeline.tracking", description="The MLflow server of this project."
    )
    parser.add_argument(
        "command", choices=["uri", "start", "stop", "publish"], help="publish: all finished jobs not there yet"
    )
    parser.add_argument("--outputs", type=Path, default=OUTPUTS, help="the folder of jobs and of the embedded server")
    options = parser.parse_args(arguments)
    try:
        if options.command == "stop":
            stopped = embedded_server.stop(options.outputs / "mlflow")
            print("stopped" if stopped else f"no embedded server of {options.outputs} was running")
            return 0
        if options.command == "publish" or (options.command == "start" and options.outputs != OUTPUTS):
            check_folder(options.outputs)
        uri = resolve_uri(embedded_config(), options.outputs, start=options.command != "uri")
        if options.command != "publish":
            print(uri)
            return 0
        return 1 if publish_all(uri, options.outputs) else 0
    except (BadInput, TrackingUnreachable) as error:
        print(f"error: {error}", file=sys.stderr)
    except OSError as error:
        print(f"error: {cannot_write(options.outputs, error)}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    from pipeline import tracking  # not __main__'s copy: report raises this one's exceptions

    sys.exit(tracking.main())
