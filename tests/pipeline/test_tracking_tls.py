"""A server behind https and a password, as `make head` starts it: a real one."""

from __future__ import annotations

import base64
import datetime
import http.client
import ipaddress
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from mlflow.tracking import MlflowClient

from pipeline import tracking, tracking_server
from pipeline.errors import BadInput
from pipeline.tracking import TrackingUnreachable
from tests.job_folders import SWEEP_KEY, fabricate


def write_pem(path: Path) -> Path:
    """A private key and its own certificate for 127.0.0.1."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "a test")])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), True)
        .sign(key, hashes.SHA256())
    )
    unlocked = serialization.NoEncryption()
    secret = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, unlocked)
    path.write_bytes(b"scheduler: none\n" + secret + certificate.public_bytes(serialization.Encoding.PEM))
    return path


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    """Its address and its certificate."""
    folder = tmp_path_factory.mktemp("secured")
    pem = write_pem(folder / "join.pem")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    (folder / "auth.ini").write_text(
        "[mlflow]\ndefault_permission = EDIT\ndatabase_uri = sqlite:///auth.db\nadmin_username = admin\n"
        "authorization_function = mlflow.server.auth:authenticate_request_basic_auth\n"
    )
    secrets = {"MLFLOW_FLASK_SERVER_SECRET_KEY": "a key", "MLFLOW_AUTH_ADMIN_PASSWORD": "a good password"}
    secrets |= {"MLFLOW_AUTH_CONFIG_PATH": str(folder / "auth.ini"), "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
    line = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port), "--workers", "1"]
    line += ["--backend-store-uri", "sqlite:///mlflow.db", "--artifacts-destination", "artifacts"]
    line += ["--uvicorn-opts", f"--ssl-keyfile {pem} --ssl-certfile {pem}"]
    line += ["--app-name", "basic-auth"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MLFLOW_")} | secrets
    with open(folder / "log", "wb") as log:
        server = subprocess.Popen(line, cwd=folder, env=environment, stdout=log, stderr=log, start_new_session=True)
    uri = f"https://127.0.0.1:{port}"
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("MLFLOW_TRACKING_SERVER_CERT_PATH", str(pem))
            for _ in range(600):
                if tracking_server.reachable(uri):
                    break
                assert server.poll() is None, (folder / "log").read_text()
                time.sleep(0.2)
        yield uri, pem
    finally:
        with suppress(ProcessLookupError):
            os.killpg(server.pid, 9)
        server.wait()


@pytest.fixture
def guarded(uri: str) -> Iterator[str]:
    """The tests' own server behind a proxy that wants a password for everything."""
    host, _, port = uri.removeprefix("http://").rpartition(":")
    wanted = "Basic " + base64.b64encode(b"admin:a good password").decode()

    class Proxy(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            status, content = 401, b"{}"
            if self.headers.get("Authorization") == wanted:
                backend = http.client.HTTPConnection(host, int(port))
                backend.request(self.command, self.path, body, {"Content-Type": "application/json"})
                answer = backend.getresponse()
                status, content = answer.status, answer.read()
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        do_POST = do_PUT = do_GET

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Proxy) as proxy:
        threading.Thread(target=proxy.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{proxy.server_port}"
        proxy.shutdown()


def test_a_certificate_and_a_password_are_used_for_all_that_is_asked(
    secured: tuple[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    uri, pem = secured
    monkeypatch.setenv("MLFLOW_TRACKING_SERVER_CERT_PATH", str(pem))
    monkeypatch.setenv("MLFLOW_TRACKING_USERNAME", "admin")
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", "a good password")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    assert tracking.resolve_uri({"uri": None, "host": "127.0.0.1", "port": 5050}, tmp_path) == uri
    assert tracking_server.reachable(uri) and abs(tracking_server.server_time(uri) - time.time()) < 60
    folder = fabricate(tmp_path, "k1", [1.0, 0.0], experiment="secured")
    sweep = tracking.open_sweep(uri, "secured", SWEEP_KEY, {})
    run_id = tracking.start_job(sweep, folder).run_id
    assert tracking.publish_job(sweep, folder) == run_id
    tracking.close_sweep(sweep, "FINISHED")
    (parent,) = MlflowClient(uri).search_runs([sweep.experiment_id], "tags.kind = 'sweep'")
    assert parent.info.status == "FINISHED"
    assert tracking.main(["doctor", "--outputs", str(tmp_path)]) == 0


def test_a_proxy_that_wants_a_password_gets_it(guarded: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TrackingUnreachable, match=r"401 .MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD must"):
        tracking.open_sweep(guarded, "guarded", SWEEP_KEY, {})
    monkeypatch.setenv("MLFLOW_TRACKING_USERNAME", "admin")
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", "a wrong password")
    assert not tracking_server.reachable(guarded)
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", "a good password")
    sweep = tracking.open_sweep(guarded, "guarded", SWEEP_KEY, {})
    assert tracking.publish_job(sweep, fabricate(tmp_path, "k1", [1.0]))
    tracking.close_sweep(sweep, "FINISHED")


@pytest.mark.parametrize(
    ("certificate", "said"),
    [
        (None, "MLFLOW_TRACKING_SERVER_CERT_PATH must name the file with its certificate"),
        ("no such file", "no such file"),
        ("its own", "MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD"),
    ],
    ids=["no certificate", "a wrong file", "no password"],
)
def test_what_is_missing_is_named_at_once(
    secured: tuple[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, certificate: str | None, said: str
) -> None:
    uri, pem = secured
    if certificate:
        monkeypatch.setenv("MLFLOW_TRACKING_SERVER_CERT_PATH", str(pem) if certificate == "its own" else certificate)
    started = time.monotonic()
    with pytest.raises(TrackingUnreachable, match=said):  # jobs at work go on without a server
        tracking.open_sweep(uri, "secured", SWEEP_KEY, {})
    with pytest.raises(BadInput, match=said):  # a sweep that begins does not
        tracking.resolve_uri({"uri": uri}, tmp_path)
    assert time.monotonic() - started < 20
