"""The head: Dask's scheduler and the MLflow server, on one address of this machine, started again when they end."""

from __future__ import annotations

import errno
import json
import os
import secrets
import shlex
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event

from pipeline import embedded_server
from pipeline.errors import BadInput

from . import join
from .join import Joined
from .reach import own_address, split, why_no_mlflow, why_no_scheduler
from .supervise import PROJECT, Supervised, only_one, say, until_told
from .worker import tls

_START_S = 180.0  # creating MLflow's tables on a loaded machine took 25 s
_LOOK_S = 15.0  # how often the servers are asked whether they still answer
_SILENT_S = 120.0  # one that has not answered for so long hangs


def head(outputs: Path, host: str | None, port: int, mlflow_port: int, auth: bool) -> int:
    """Serve the cluster until told to end; returns 0, or 1 when a server could not be started.

    Raises BadInput for an address that is not this machine's, ports in use, a second head, a certificate of elsewhere.
    """
    os.umask(0o077)  # MLflow's users, with what their passwords hash to, are in a file
    with until_told() as told, only_one("head", outputs):
        (outputs / "cluster" / "head.json").unlink(missing_ok=True)  # of a head that was killed: it would be believed
        _check_no_sweep(outputs)
        if host is None:
            host = _usual_address(outputs)
            say(f"listening on {host}; HOST=<address> (--host) chooses another address of this machine")
        address = _own_address(host)
        if port == mlflow_port:
            raise BadInput(f"--mlflow-port: expected another port than the scheduler's, got {port} for both")
        _check_port("--port", address, port)
        local = embedded_server.running(outputs / "mlflow")
        if local is None or split(local)[1] != mlflow_port:  # else the port is free when that one has given way
            _check_port("--mlflow-port", address, mlflow_port)
        login = ("admin", secrets.token_urlsafe(16)) if auth else None
        there = join.make(outputs, host, port, mlflow_port, login)
        if embedded_server.stop(outputs / "mlflow"):
            say(f"the local MLflow server of {outputs} was stopped; its runs are at {there.mlflow} now")
        (outputs / "mlflow").mkdir(parents=True, exist_ok=True)
        scheduler = Supervised(
            "scheduler",
            _scheduler_command(there, address),
            PROJECT,
            outputs / "cluster" / "scheduler.log",
            dict(os.environ) | {"DASK_DISTRIBUTED__COMM__REQUIRE_ENCRYPTION": "True"},
        )
        mlflow = Supervised(
            "MLflow server",
            _mlflow_command(there, address, auth),
            outputs / "mlflow",
            outputs / "cluster" / "mlflow.log",
            _mlflow_environment(there, auth),
        )
        with _known_as_head(outputs, there):
            return _serve(there, outputs, scheduler, mlflow, told)


def _serve(there: Joined, outputs: Path, scheduler: Supervised, mlflow: Supervised, told: Event) -> int:
    checks: list[tuple[Supervised, Callable[[Joined], str | None]]] = [
        (scheduler, why_no_scheduler),
        (mlflow, why_no_mlflow),
    ]
    try:
        for process, _ in checks:
            process.log.unlink(missing_ok=True)
            process.start()
        for process, check in checks:
            if not _wait_for(process, check, there, told):
                return 0 if told.is_set() else 1
        _print_welcome(there, outputs)
        again: dict[str, float] = {}
        answered = {process.name: time.monotonic() for process, _ in checks}
        asked, pem = time.monotonic(), _content(there.pem)
        while not told.wait(0.2):
            look = time.monotonic() > asked + _LOOK_S
            asked = time.monotonic() if look else asked
            for process, check in checks:
                if how := process.ended():
                    say(f"the {process.name} ended ({how}); again in {process.pause:.0f} s (log: {process.log})")
                    again[process.name] = time.monotonic() + process.pause
                elif process.name in again:
                    if again[process.name] <= time.monotonic():
                        del again[process.name]
                        process.start()
                        answered[process.name] = time.monotonic() + _START_S
                elif look and (_content(there.pem) != pem or _answers(check, there)):  # without it we cannot ask
                    answered[process.name] = time.monotonic()
                elif time.monotonic() > answered[process.name] + _SILENT_S:
                    say(f"the {process.name} has not answered for {_SILENT_S:.0f} s; starting it again")
                    process.stop()
                    again[process.name] = time.monotonic()
        return 0
    finally:
        for process, _ in checks:
            process.stop()
        say("stopped")


def _answers(check: Callable[[Joined], str | None], there: Joined) -> bool:
    try:
        return check(there) is None
    except BadInput:  # a certificate that is no longer valid, or a clock that was set: it answers
        return True


def _content(pem: Path | None) -> bytes | None:
    try:
        return pem.read_bytes() if pem else None
    except OSError:
        return None


def _wait_for(process: Supervised, check: Callable[[Joined], str | None], there: Joined, told: Event) -> bool:
    """Whether `process` answered; says why if it ended or took too long."""
    deadline = time.monotonic() + _START_S
    while not told.is_set():
        how, reason = process.ended(), check(there)
        if how is None and reason is None:
            return True
        if how or time.monotonic() > deadline:
            say(f"the {process.name} does not start ({how or reason}); its log ({process.log}) ends with:")
            print(process.last_words(), flush=True)
            return False
        if reason and " answers 401" in reason:
            raise BadInput(
                f"expected MLflow to take the login of join.pem, got a refusal: {process.folder / 'basic_auth.db'} was "
                "made with another one. Delete that file (its users go with it), or write mlflow-user and "
                "mlflow-password of an administrator into join.pem"
            )
        told.wait(0.2)
    return False


def _print_welcome(there: Joined, outputs: Path) -> None:
    host, _ = split(there.scheduler)
    pem = shlex.quote(str(outputs.absolute() / "cluster" / "join.pem"))
    say(f"scheduler {there.scheduler}   MLflow {there.mlflow}")
    if there.user:
        say(f"MLflow asks for a user: {there.user}, with the password that join.pem holds")
    print(
        f"""
On every other machine, in its project folder, once and then to work:
    mkdir -p outputs/cluster && scp {host}:{pem} outputs/cluster/
    make worker
Here, or on any machine with join.pem:
    make status
    make sweep LAUNCHER=dask
Whoever has join.pem may run code on all these machines. Ctrl-C ends the head.
""",
        flush=True,
    )


@contextmanager
def _known_as_head(outputs: Path, there: Joined) -> Iterator[None]:
    """head.json, by which the commands of one machine find this MLflow server rather than start another one on its
    database (embedded_server.py)."""
    state = {"pid": os.getpid(), "scheduler": there.scheduler, "mlflow": there.mlflow}
    path = outputs / "cluster" / "head.json"
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
        json.dump(state | {"environment": there.environment()}, file)  # may hold the password
    try:
        yield
    finally:
        path.unlink(missing_ok=True)


def _check_no_sweep(outputs: Path) -> None:
    """BadInput while a sweep here uses the local MLflow server, which has to give way to the head's."""
    if address := embedded_server.running(outputs / "mlflow"):
        from pipeline.tracking import TrackingUnreachable, sweeps_at_work  # mlflow takes seconds to import

        try:
            sweeps = sweeps_at_work(address)
        except TrackingUnreachable:  # it has just ended, or is of no use to a sweep either
            return
        if sweeps:
            raise BadInput(
                f"expected no sweep at work with the local MLflow server of {outputs}, got {', '.join(sweeps)}; wait "
                "for its end, or interrupt it: the same command goes on later, with the head's server"
            )


def _usual_address(outputs: Path) -> str:
    """The address in join.pem, else the one on the way to everywhere else."""
    if join.pem_path(outputs).exists():
        return split(join.joined(outputs).scheduler)[0]
    if address := own_address("192.0.2.1"):  # an address for documentation: anything outside will do
        return address
    raise BadInput("expected a network for the head to listen on, got none; name an address: make head HOST=<address>")


def _own_address(host: str) -> str:
    """The IPv4 address of `host`, which must be one address of this machine."""
    advice = "give one address of this machine, as the other machines reach it: make head HOST=192.168.1.10"
    try:
        address = str(socket.getaddrinfo(host, None, socket.AF_INET)[0][4][0])
        if address == "0.0.0.0":
            raise BadInput(f"--host: expected one address, got {host!r}, which is all of them; {advice}")
        with socket.socket() as listener:
            listener.bind((address, 0))
        return address
    except (OSError, UnicodeError) as error:
        raise BadInput(
            f"--host: expected an IPv4 address or a name of this machine, got {host!r} ({error}); {advice}"
        ) from error


def _check_port(option: str, address: str, port: int) -> None:
    if not 1 <= port <= 65535:
        raise BadInput(f"{option}: expected a port from 1 to 65535, got {port}; leave it out for the usual one")
    deadline = time.monotonic() + 5  # what a killed head left ends within a moment
    while True:
        with socket.socket() as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                listener.bind((address, port))
                listener.listen()
                return
            except OSError as error:
                if error.errno == errno.EADDRINUSE and time.monotonic() < deadline:
                    time.sleep(0.2)
                    continue
                raise BadInput(
                    f"{option}: expected a free port at {address}, got {port} ({error.strerror}): another head or "
                    f"another program has it. Stop that one, or choose another port with {option}"
                ) from error


def _scheduler_command(there: Joined, address: str) -> list[str]:
    port = split(there.scheduler)[1]
    command = ["distributed.cli.dask_scheduler", "--host", address, "--port", str(port)]
    return [*command, "--dashboard-address", "127.0.0.1:8787", *tls(there)]


def _mlflow_command(there: Joined, address: str, auth: bool) -> list[str]:
    assert there.mlflow is not None and there.pem is not None
    port = split(there.mlflow)[1]
    known = join.names(there.pem)
    command = ["mlflow", "server", "--host", address, "--port", str(port), "--workers", "1"]
    command += ["--backend-store-uri", "sqlite:///mlflow.db", "--artifacts-destination", "artifacts"]
    command += ["--allowed-hosts", ",".join([*known, *(f"{name}:{port}" for name in known)])]
    command += ["--cors-allowed-origins", ",".join(f"https://{name}:{port}" for name in known)]
    if auth:
        command += ["--app-name", "basic-auth"]
    pem = shlex.quote(str(there.pem))  # MLflow splits these options as a shell does
    return [*command, "--uvicorn-opts", f"--log-level warning --ssl-keyfile {pem} --ssl-certfile {pem}"]


def _mlflow_environment(there: Joined, auth: bool) -> dict[str, str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MLFLOW_")}
    environment |= {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false", "MLFLOW_DISABLE_TELEMETRY": "true"}
    if auth:
        assert there.pem is not None and there.password is not None
        environment["MLFLOW_AUTH_ADMIN_PASSWORD"] = there.password
        environment["MLFLOW_FLASK_SERVER_SECRET_KEY"] = join.secret(there.pem, "mlflow session")
    return environment
