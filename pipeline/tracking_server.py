"""Reaching the tracking server: its address, whether it answers and can do its work, and what time it has."""

import errno
import http.client
import os
import re
import shlex
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any, NamedTuple

from mlflow.exceptions import MlflowException
from mlflow.tracking import MlflowClient
from mlflow.utils.credentials import get_default_host_creds
from mlflow.utils.rest_utils import http_request
from requests.exceptions import RequestException

from pipeline import embedded_server
from pipeline.errors import BadInput

OUTPUTS = Path("outputs")  # the default, also in conf/config.yaml
_NO_CERTIFICATE = ("CERTIFICATE_VERIFY_FAILED", "TLS CA certificate")  # not the right one, no such file
NO_PASSWORD = " (MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD must be set to a user of it)"
# Answers that say the server is ill, or not ours to use; MLflow has retried the first two kinds by then.
SERVER_FAULTS = {
    *("TEMPORARILY_UNAVAILABLE", "INTERNAL_ERROR", "REQUEST_LIMIT_EXCEEDED", "ENDPOINT_NOT_FOUND"),
    *("UNAUTHENTICATED", "PERMISSION_DENIED"),
}


class TrackingUnreachable(RuntimeError):
    """No MLflow server answers, or it cannot do its work. Nothing is lost: the message says how to publish later.

    reason: what is wrong with it, without the advice.
    """

    def __init__(self, reason: str, outputs: Path | None = None) -> None:
        self.reason = reason
        here = outputs is None or outputs.resolve() == OUTPUTS.resolve()
        where = "" if here else f" --outputs {shlex.quote(str(outputs))}"
        super().__init__(
            f"expected an MLflow server, got none: {reason}. Jobs can run without it: publish them later "
            f"with `.venv/bin/python -m pipeline.tracking publish{where}`, or set MLFLOW_TRACKING_URI to another server"
        )


def resolve_uri(tracking_cfg: Any, outputs: Path, *, start: bool = True) -> str:
    """The tracking address: MLFLOW_TRACKING_URI, else `tracking.uri`, else the embedded server of `outputs`.

    tracking_cfg: conf/tracking/*.yaml ({uri, host, port}). start=False only looks and raises TrackingUnreachable if the
    embedded server is down. Raises BadInput for an address, host, port or folder that cannot work, a server that does
    not let us in, and when neither an address nor a host to start a server on is given.
    """
    if given := os.environ.get("MLFLOW_TRACKING_URI"):
        return _admitting(_server_address("MLFLOW_TRACKING_URI", given))
    if tracking_cfg["uri"] not in (None, ""):
        return _admitting(_server_address("tracking.uri", tracking_cfg["uri"]))
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


def _admitting(uri: str) -> str:
    """`uri`, unless its server refuses us: no later try mends a certificate, a password or an address."""
    health = _health(uri, "/api/2.0/mlflow/experiments/get?experiment_id=0")  # a login is not asked for /health
    if health.refused:
        raise BadInput(f"expected an MLflow server that lets this machine in, got a refusal: {health.reason}")
    return uri


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
    return _health(uri).reason is None


def server_time(uri: str) -> float:
    """What time it is for the server, in UTC seconds; for one that does not say, what it is here.

    Raises TrackingUnreachable.
    """
    health = _health(uri)
    if health.reason:
        raise TrackingUnreachable(health.reason)
    return health.now


class _Health(NamedTuple):
    reason: str | None  # why the server cannot be used
    refused: bool  # it is well, and does not let us in
    now: float  # its time; ours where it does not say


def _health(uri: str, asking: str = "/health") -> _Health:
    """Asked as MLflow asks: with its certificate and password."""
    reason = ""
    for _ in range(2):
        try:
            answer = http_request(
                get_default_host_creds(uri), asking, "GET", max_retries=0, timeout=3, raise_on_status=False
            )
        except (MlflowException, OSError, ValueError, http.client.HTTPException) as error:
            reason = f"{uri} does not answer ({_cause(error)})"
            if any(sign in reason for sign in _NO_CERTIFICATE):
                reason += "; MLFLOW_TRACKING_SERVER_CERT_PATH must name the file with its certificate"
                return _Health(reason, True, time.time())
            continue
        if answer.status_code == 200:
            try:
                return _Health(None, False, parsedate_to_datetime(answer.headers["Date"]).timestamp())
            except (KeyError, ValueError):
                return _Health(None, False, time.time())
        hint = {401: NO_PASSWORD, 403: " (the server's --allowed-hosts must name this address)"}
        reason = f"{uri}{asking} answers {answer.status_code}{hint.get(answer.status_code, '')}"
        return _Health(reason, answer.status_code in hint, time.time())
    return _Health(reason, False, time.time())


def _cause(error: BaseException) -> str:
    """What went wrong in the end, without the calls on the way there."""
    while error.__cause__ or error.__context__:
        error = error.__cause__ or error.__context__ or error
    return " ".join(str(error).split())[:300] or type(error).__name__


@contextmanager
def talking_to(uri: str, outputs: Path | None = None) -> Iterator[MlflowClient]:
    """A client for `uri`; a server that is or goes away, or cannot do its work, becomes TrackingUnreachable.

    outputs: the folder of the jobs at hand, for the message.
    """
    if reason := _health(uri).reason:
        raise TrackingUnreachable(reason, outputs)
    try:
        yield MlflowClient(tracking_uri=uri)
    except (MlflowException, OSError, http.client.HTTPException) as error:  # requests' exceptions are OSErrors
        reason = _health(uri).reason
        if reason is None and _servers_fault(error):
            reason = f"{uri} answers, but cannot do its work ({' '.join(str(error).split())[:300]})"
            reason += NO_PASSWORD if "error code 401" in reason else ""
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
