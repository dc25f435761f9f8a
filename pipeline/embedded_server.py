"""The MLflow server of one outputs folder: started once, found again, stopped; never somebody else's.

Everything lives in one folder (`<outputs>/mlflow`): `mlflow.db`, `artifacts/`, `server.log`, `server.json` (pid, uri,
a random id, new at every start, and which database it opened) and `server.lock`. Every MLflow answers `/health` alike,
so a server counts as ours only if its process runs in our folder AND it serves our random id (a tag of its experiment
0). The server has its own session: it outlives the program that started it, and Ctrl-C there does not reach it. A
folder that is deleted leaves its server behind: start and stop find it by its working folder, and end it. Speaks HTTP
itself: importing mlflow takes seconds.
"""

import fcntl
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

ID_TAG = "keyformer.server_id"
START_DEADLINE_S = 180.0  # creating the schema on a loaded machine took 25 s
STOP_DEADLINE_S = 10.0
PORTS_TRIED = 50


class ServerFailed(RuntimeError):
    """The embedded server could not be started; the message holds the tail of its log."""


class _PortTaken(Exception):
    pass


def running(folder: Path) -> str | None:
    """The address of this folder's own server if it is up and answers from this folder's database, else None.

    Where this machine is the head of a cluster, that is the head's server; the environment then gets what its clients
    need (certificate, login).
    """
    if head := _head(folder):
        os.environ |= head["environment"]
        return str(head["mlflow"])
    state = _state(folder)
    if state is None or _process(state["pid"], folder) is None or state["store"] != _store(folder):
        return None
    return state["uri"] if _served_id(state["uri"]) == state["id"] else None


def start(folder: Path, host: str = "127.0.0.1", port: int = 5050) -> str:
    """The address of this folder's server, started unless it runs already.

    Two starts at once give one server (a file lock). The port is that of the last start, else `port`, else the next
    free. Raises ServerFailed when no server answers in time, OSError for a folder that cannot be written.
    """
    if uri := running(folder):
        return uri
    folder.mkdir(parents=True, exist_ok=True)
    with _locked(folder):
        if uri := running(folder):
            return uri
        state = _state(folder)
        if state and state["store"] is None and _process(state["pid"], folder):  # its starter died before it answered
            with suppress(ServerFailed, _PortTaken):
                return _wait(folder, state)
        _kill(folder)  # what hangs, lost its database, or was left behind by a folder or a starter that is gone
        last_port = [state["port"]] if state else []  # links printed earlier stay good
        for candidate in [*last_port, *range(port, min(port + PORTS_TRIED, 65536))]:
            if not _free(host, candidate):
                continue
            try:
                return _wait(folder, _spawn(folder, host, candidate))
            except _PortTaken:  # somebody took it between our look and our start
                continue
            except BaseException:
                _kill(folder)
                raise
    raise ServerFailed(
        f"expected a free port among {port}..{port + PORTS_TRIED - 1}, got none: set tracking.port to another one"
    )


def last_address(folder: Path) -> str | None:
    """Where this folder's own server is, or was when it last ran."""
    state = _state(folder)
    return state["uri"] if state else None


def stop(folder: Path) -> bool:
    """Stop this folder's server with all its workers, also if the folder is gone. True if one was running.

    Never touches any other process, nor the server of a cluster's head.
    """
    if _head(folder):
        return False
    if not folder.is_dir():
        return _kill(folder)
    with _locked(folder):
        return _kill(folder)


def _head(folder: Path) -> dict[str, Any] | None:
    """What the cluster head that serves this folder says of itself (pipeline/cluster/head.py), if one runs."""
    cluster = folder.parent / "cluster"
    try:
        with open(cluster / "head.lock", encoding="utf-8") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return None  # nobody holds it
    except BlockingIOError:
        pass
    except OSError:
        return None
    try:
        head: dict[str, Any] = json.loads((cluster / "head.json").read_text(encoding="utf-8"))
        return head
    except (OSError, ValueError):  # it is about to start, or about to end
        return None


def _state(folder: Path) -> dict[str, Any] | None:
    try:
        state = json.loads((folder / "server.json").read_text(encoding="utf-8"))
        numbers = {"pid": int(state["pid"]), "port": int(state["port"])}
        return numbers | {"uri": str(state["uri"]), "id": str(state["id"]), "store": state.get("store")}
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _write_state(folder: Path, state: dict[str, Any]) -> None:
    temporary = folder / "server.json.tmp"
    temporary.write_text(json.dumps(state), encoding="utf-8")
    os.replace(temporary, folder / "server.json")


def _store(folder: Path) -> list[Any] | None:
    """Which database the folder holds now: a server that opened another one still answers, from a file that is gone."""
    try:
        return [str(folder.resolve()), (folder / "mlflow.db").stat().st_ino]
    except OSError:
        return None


def _process(pid: int, folder: Path) -> psutil.Process | None:
    """The process `pid` if it is a server working in `folder`; a recycled pid or a copied folder is not ours."""
    try:
        process = psutil.Process(pid)
        ours = "mlflow" in process.cmdline() and os.path.samefile(process.cwd(), folder)
        return process if ours and process.status() != psutil.STATUS_ZOMBIE else None
    except (psutil.Error, OSError):
        return None


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    with open(folder / "server.lock", "w", encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _free(host: str, port: int) -> bool:
    # Both questions: BSD lets us bind 127.0.0.1 beside a listener on 0.0.0.0, and a listener may refuse connections.
    with socket.socket() as caller:
        caller.settimeout(1)
        if caller.connect_ex((host, port)) == 0:
            return False
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, port))
        except OSError:
            return False
    return True


def _spawn(folder: Path, host: str, port: int) -> dict[str, Any]:
    # Paths are relative to the working folder: no quoting of "?" or "%" in URLs, and the folder tells whose it is.
    command = [sys.executable, "-m", "mlflow", "server", "--host", host, "--port", str(port), "--workers", "1"]
    command += ["--backend-store-uri", "sqlite:///mlflow.db", "--artifacts-destination", "artifacts"]
    command += ["--uvicorn-opts", "--log-level warning"]  # no line per request
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("MLFLOW_")}
    quiet = {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false", "MLFLOW_DISABLE_TELEMETRY": "true"}  # else ten job workers
    with open(folder / "server.log", "wb") as log:
        process = subprocess.Popen(
            command,
            cwd=folder,
            env=inherited | quiet,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    state = {"pid": process.pid, "port": port, "uri": f"http://{host}:{port}", "id": uuid.uuid4().hex, "store": None}
    try:
        _write_state(folder, state)
    except BaseException:  # nobody would find it again
        process.kill()
        raise
    return state


def _wait(folder: Path, state: dict[str, Any]) -> str:
    """Wait until the process of `state` itself answers, then mark it as ours."""
    deadline = time.monotonic() + START_DEADLINE_S
    uri: str = state["uri"]
    while time.monotonic() < deadline:
        process = _process(state["pid"], folder)
        if process is None and not _starting(state["pid"]):
            if not _free(uri.removeprefix("http://").rpartition(":")[0], state["port"]):
                raise _PortTaken
            break
        if process and _get(f"{uri}/health") is not None and _listens(process, state["port"]):
            try:
                _mark(uri, state["id"])
            except (OSError, ValueError, http.client.HTTPException) as error:
                raise ServerFailed(f"the MLflow server answers, but not from its database: {error}") from error
            _write_state(folder, state | {"store": _store(folder)})
            return uri
        time.sleep(0.1)
    what = f"did not answer within {START_DEADLINE_S:.0f} s" if time.monotonic() >= deadline else "ended while starting"
    lines = (folder / "server.log").read_text(encoding="utf-8", errors="replace").splitlines()[-15:]
    raise ServerFailed(f"the MLflow server {what}; its log ({folder / 'server.log'}) ends with:\n" + "\n".join(lines))


def _starting(pid: int) -> bool:
    """True in the instant between fork and exec, when the child does not look like a server yet."""
    try:
        process = psutil.Process(pid)
        return process.status() != psutil.STATUS_ZOMBIE and time.time() - process.create_time() < 5
    except psutil.Error:
        return False


def _listens(process: psutil.Process, port: int) -> bool:
    try:
        for member in [process, *process.children(recursive=True)]:
            if any(c.status == psutil.CONN_LISTEN and c.laddr.port == port for c in member.net_connections(kind="tcp")):
                return True
        return False
    except psutil.AccessDenied:  # cannot see: trust the living process
        return True
    except psutil.Error:
        return False


def _kill(folder: Path) -> bool:
    """End the servers of `folder`, whatever server.json says (it stays: the next start asks for the same port)."""
    members = _members(folder)
    for how in (signal.SIGTERM, signal.SIGKILL):
        for process in members:
            with suppress(psutil.Error):
                process.send_signal(how)
        deadline = time.monotonic() + STOP_DEADLINE_S
        while any(map(_alive, members)) and time.monotonic() < deadline:
            time.sleep(0.05)
        if not any(map(_alive, members)):
            break
    return bool(members)


def _members(folder: Path) -> list[psutil.Process]:
    """The processes of this folder's servers: what _spawn started, and what works here in their groups."""
    here: list[psutil.Process] = []
    groups: set[int] = set()
    for process in psutil.process_iter():
        try:
            if process.uids().real != os.getuid() or not _works_in(process.cwd(), folder) or not _alive(process):
                continue
            here.append(process)
            line = process.cmdline()
            server = {"mlflow", "server", "sqlite:///mlflow.db"} <= set(line)
            if server or any(part.startswith("mlflow.server") for part in line):  # the second: a worker left alone
                groups.add(os.getpgid(process.pid))
        except (psutil.Error, OSError):
            continue
    members = []
    for process in here:
        with suppress(OSError):
            if os.getpgid(process.pid) in groups:
                members.append(process)
    return members


def _works_in(cwd: str, folder: Path) -> bool:
    if os.path.exists(cwd):
        return folder.is_dir() and os.path.samefile(cwd, folder)
    return cwd.removesuffix(" (deleted)") == str(folder.resolve())  # Linux says so of a folder removed under a process


def _alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE  # its starter may never look after it
    except psutil.Error:
        return False


def _request(url: str, body: dict[str, Any] | None = None) -> bytes:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data=data, headers={"Content-Type": "application/json"})
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # a proxy has no business on this machine
    with direct.open(request, timeout=5) as response:
        content: bytes = response.read()
        return content


def _get(url: str) -> bytes | None:
    try:
        return _request(url)
    except (OSError, ValueError, http.client.HTTPException):
        return None


def _served_id(uri: str) -> str | None:
    answer = _get(f"{uri}/api/2.0/mlflow/experiments/get?experiment_id=0")
    try:
        tags = json.loads(answer or b"{}").get("experiment", {}).get("tags", [])
        return next((tag["value"] for tag in tags if tag["key"] == ID_TAG), None)
    except (ValueError, AttributeError, KeyError):
        return None


def _mark(uri: str, server_id: str) -> None:
    tag = {"experiment_id": "0", "key": ID_TAG, "value": server_id}
    try:
        _request(f"{uri}/api/2.0/mlflow/experiments/set-experiment-tag", tag)
    except urllib.error.HTTPError:  # somebody deleted the Default experiment in the UI
        _request(f"{uri}/api/2.0/mlflow/experiments/restore", {"experiment_id": "0"})
        _request(f"{uri}/api/2.0/mlflow/experiments/set-experiment-tag", tag)
