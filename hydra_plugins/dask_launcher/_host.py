"""What runs inside a Dask worker, on the host that does the jobs.

Its functions are sent by value with each call, so a worker that was started long ago never runs old ones: nothing here
may import from this project. They answer with plain values, for the same reason.
"""

import asyncio
import hashlib
import io
import json
import os
import pickle
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from distributed import get_worker

LAST_WORDS_S = 10.0  # between SIGINT and SIGKILL
LOOK_S = 0.2  # how often a job's process is looked at
TAIL_LINES = 40


def run_job(key: str, payload: bytes, folder: str | None) -> dict[str, Any]:
    """Run one job in a process of its own and say what came of it: `kind` is what _job says, "died" or "interrupted".

    key: of the Dask task that this is. folder: the job's own, relative to this host's project; it comes back packed.
    The process is interrupted when Dask lets go of the task, the worker closes, or interrupt_job was called.
    """
    try:
        return _run_job(key, payload, folder)
    except OSError as error:  # a full or read-only disk, no more processes: nothing of the job's doing
        return {"kind": "unfit", "reason": f"it cannot run jobs ({error})"}


def _run_job(key: str, payload: bytes, folder: str | None) -> dict[str, Any]:
    worker = get_worker()
    if _unwanted(worker, key):
        return {"kind": "interrupted", "attempt": None}
    with tempfile.TemporaryDirectory(prefix="job-", dir=worker.local_directory) as scratch:
        given, result = Path(scratch) / "in", Path(scratch) / "out"
        given.write_bytes(payload)
        log_file = Path(scratch) / "log"
        if folder is not None:
            Path(folder).mkdir(parents=True, exist_ok=True)
            log_file = Path(folder) / "job.log"
        started = time.time()
        with open(log_file, "ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "hydra_plugins.dask_launcher._job", str(given), str(result)],
                env=os.environ | {"PYTHONUNBUFFERED": "1"},
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        interrupted = False
        try:
            while process.poll() is None and not interrupted:
                time.sleep(LOOK_S)
                interrupted = _unwanted(worker, key)
            if interrupted:
                process.send_signal(signal.SIGINT)
                with suppress(subprocess.TimeoutExpired):
                    process.wait(LAST_WORDS_S)
        finally:
            with suppress(ProcessLookupError, PermissionError):  # macOS answers the second for a group of zombies
                os.killpg(process.pid, signal.SIGKILL)  # it, or what it left behind
            process.wait()
            process.stdin.close()  # type: ignore[union-attr]
        seconds = time.time() - started
        if result.is_file():
            answer = pickle.loads(result.read_bytes())
        else:
            (Path(scratch) / "probe").write_bytes(bytes(2**16))  # OSError: on a full disk a job dies without a word
            answer = {"kind": "interrupted" if interrupted else "died", "status": process.returncode}
            answer["attempt"] = _attempt(folder, started)
        answer["seconds"] = seconds
        if answer["kind"] in ("failed", "died"):
            lines = log_file.read_text(encoding="utf-8", errors="replace").splitlines()
            answer["log"] = "\n".join(lines[-TAIL_LINES:])
        if answer["kind"] == "completed" and folder is not None:
            answer["folder"] = _packed(Path(folder))
        return answer


def _unwanted(worker: Any, key: str) -> bool:
    task = worker.state.tasks.get(key)
    let_go = task is None or task.state in ("cancelled", "released", "forgotten")
    return let_go or worker.status.name not in ("running", "paused") or key in getattr(worker, "interrupted_jobs", ())


async def interrupt_job(key: str, dask_worker: Any) -> bool:
    """End the job that runs here as `key`; run_job then answers as soon as it is over. False: it does not run here."""
    task = dask_worker.state.tasks.get(key)
    dask_worker.interrupted_jobs = getattr(dask_worker, "interrupted_jobs", frozenset()) | {key}
    return task is not None and task.state == "executing"


def _attempt(folder: str | None, started: float) -> str | None:
    """The MLflow run that the job's process opened, if it came so far."""
    try:
        note = Path(folder or "") / "attempt.json"
        if note.stat().st_mtime < started - 1:
            return None
        return str(json.loads(note.read_text(encoding="utf-8"))["run_id"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _packed(folder: Path) -> bytes:
    """The files of a job's folder as one compressed tar, with their times; no locks, nothing half written."""
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w:gz", compresslevel=6, format=tarfile.PAX_FORMAT) as tar:
        for path in sorted(folder.iterdir()):
            if (
                path.is_file()
                and not path.is_symlink()
                and path.suffix not in (".lock", ".tmp")
                and path.name[0] != "."
            ):
                tar.add(path, path.name)
    return content.getvalue()


async def describe(outputs: str) -> dict[str, Any]:
    """What a fresh process on this host says of it, and the hash of the launcher's files there; {"error": why}."""
    answer = await _cluster_command("describe", "--outputs", outputs)
    if "error" in answer:
        return answer
    digest = hashlib.sha256()
    for path in sorted(Path("hydra_plugins/dask_launcher").glob("*.py")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    about: dict[str, Any] = answer["lines"][0]
    return about | {"launcher": digest.hexdigest()}


async def prefetch(outputs: str, wanted: str) -> dict[str, Any]:
    """Bring models and data of the jobs to this host's disk: {"lines": what was found, in order} or {"error": why}.

    wanted: a JSON list of {"model": ..., "task": ...}.
    """
    with tempfile.TemporaryDirectory(prefix="keyformer-") as scratch:
        path = Path(scratch) / "wanted.json"
        path.write_text(wanted, encoding="utf-8")
        return await _cluster_command("prefetch", str(path), "--outputs", outputs)


async def _cluster_command(*arguments: str) -> dict[str, Any]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "pipeline.cluster", *arguments),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    try:
        out, err = await process.communicate()
    except BaseException:
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()  # before its event loop closes
        raise
    if process.returncode == 0:
        return {"lines": [json.loads(line) for line in out.splitlines()]}
    said = err.decode(errors="replace").strip().splitlines() or [f"it ended with {process.returncode}"]
    return {"error": f"{said[-1].removeprefix('error: ')} (in {os.getcwd()})"}
