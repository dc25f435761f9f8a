"""`make head`: one address, TLS, nobody without the certificate; what dies comes back, and nothing is left behind."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from distributed import Client
from distributed.security import Security
from mlflow.tracking import MlflowClient

from pipeline import embedded_server, tracking
from pipeline.cluster import Joined, join, joined
from pipeline.cluster.reach import ask_mlflow, own_address, why_no_mlflow, why_no_scheduler
from tests.cluster_processes import (
    HOST,
    PROJECT,
    Command,
    Head,
    ended,
    free_port,
    left_behind,
    running,
    started,
    wait_until,
)

pytestmark = pytest.mark.hosts


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Head]:
    head = started(tmp_path_factory.mktemp("head") / "out puts")
    yield head
    assert head.command.end() == 0
    assert left_behind(head.outputs) == []


def test_it_prints_how_others_join(head: Head) -> None:
    text = head.command.text()
    pem = f"'{head.outputs}/cluster/join.pem'"
    assert f"mkdir -p outputs/cluster && scp {HOST}:{pem} outputs/cluster/\n    make worker\n" in text
    assert f"scheduler tls://{HOST}:{head.port}   MLflow https://{HOST}:{head.mlflow_port}" in text


def test_only_the_chosen_address_listens(head: Head) -> None:
    family = psutil.Process(head.command.process.pid).children(recursive=True)
    open_at = {c.laddr for p in family for c in p.net_connections("inet") if c.status == psutil.CONN_LISTEN}
    served = {(HOST, head.port), (HOST, head.mlflow_port)}
    assert served <= open_at
    assert {address.ip for address in open_at - served} == {"127.0.0.1"}  # Dask's dashboard


def test_the_certificate_lets_in(head: Head) -> None:
    with Client(head.there.scheduler, security=head.there.security(), timeout=30) as client:
        assert client.scheduler_info()["workers"] == {}


def test_others_are_refused(head: Head, tmp_path: Path) -> None:
    join.make(tmp_path, HOST, head.port, head.mlflow_port)  # another cluster's
    pem = str(join.pem_path(tmp_path))
    ends = {f"tls_client_{what}": pem for what in ("cert", "key")}
    own, theirs = (Security(require_encryption=True, tls_ca_file=ca, **ends) for ca in (pem, str(head.there.pem)))
    for security in (own, theirs):  # who does not trust the head, and whom the head does not trust
        with pytest.raises(OSError):
            Client(head.there.scheduler, security=security, timeout=5)
    with pytest.raises(OSError):
        Client(f"tcp://{HOST}:{head.port}", timeout=5)


def _raw(head: Head, method: str, what: str, headers: dict[str, str], body: str | None = None) -> tuple[int, str]:
    context = ssl.create_default_context(cafile=str(head.there.pem))
    connection = http.client.HTTPSConnection(HOST, head.mlflow_port, context=context, timeout=30)
    try:
        connection.request(method, f"/api/2.0/mlflow/{what}", body, headers)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()


def test_mlflow_answers_to_its_own_names_only(head: Head) -> None:
    what = "experiments/get?experiment_id=0"
    name = socket.gethostname().removesuffix(".local")
    for known in (HOST, f"{HOST}:{head.mlflow_port}", f"{name}.local:{head.mlflow_port}"):
        assert _raw(head, "GET", what, {"Host": known})[0] == 200
    for unknown in ("evil.example", f"evil.example:{head.mlflow_port}", "10.0.0.1", "localhost:5000"):
        assert _raw(head, "GET", what, {"Host": unknown})[0] == 403


def test_its_pages_may_ask_it_and_pages_of_others_may_not(head: Head) -> None:
    question = json.dumps({"experiment_ids": ["0"], "max_results": 1})
    for origin, status in ((f"https://{HOST}:{head.mlflow_port}", 200), ("https://evil.example", 403)):
        headers = {"Origin": origin, "Content-Type": "application/json"}
        assert _raw(head, "POST", "runs/search", headers, question)[0] == status


def test_mlflow_without_tls_or_without_trust(head: Head) -> None:
    with socket.create_connection((HOST, head.mlflow_port), 5) as plain:
        plain.sendall(b"GET /health HTTP/1.0\r\n\r\n")
        with suppress(ConnectionResetError):
            assert not plain.recv(100).startswith(b"HTTP")
    with pytest.raises(tracking.TrackingUnreachable, match="certificate"), tracking.talking_to(str(head.there.mlflow)):
        pass


def test_our_tracking_works_over_https(head: Head) -> None:
    code = (
        "import sys; from pipeline import tracking\n"
        "sweep = tracking.open_sweep(sys.argv[1], 'over https', 'k' * 16, {'jobs': 3})\n"
        "assert tracking.finished(sweep, ['x']) == {}\n"
        "with tracking.talking_to(sweep.uri) as client: client.log_text(sweep.run_id, 'hello', 'a.txt')\n"
        "tracking.close_sweep(sweep, 'FINISHED'); print(sweep.run_id)"
    )
    environment = os.environ | head.there.environment()
    done = subprocess.run(
        [sys.executable, "-c", code, str(head.there.mlflow)], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    run = ask_mlflow(head.there, f"runs/get?run_id={done.stdout.strip()}")["run"]
    assert run["info"]["status"] == "FINISHED"
    assert list((head.outputs / "mlflow" / "artifacts").rglob("a.txt"))


def test_the_local_commands_of_this_machine_find_its_server(head: Head, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_SERVER_CERT_PATH", raising=False)
    folder = head.outputs / "mlflow"
    assert embedded_server.start(folder, port=free_port("127.0.0.1")) == head.there.mlflow
    assert os.environ["MLFLOW_TRACKING_SERVER_CERT_PATH"] == str(head.there.pem)
    assert embedded_server.stop(folder) is False
    assert head.answers() and "ended" not in head.command.text()


def test_a_second_head_is_refused(head: Head) -> None:
    second = ended("head", "--host", HOST, outputs=head.outputs)
    assert second.returncode == 2
    assert second.stderr.startswith("error: expected no other head on this machine")
    assert f"(process {head.command.process.pid})" in second.stderr and head.answers()


def test_a_port_in_use_is_refused(head: Head, tmp_path: Path) -> None:
    second = ended("head", "--host", HOST, "--port", free_port(HOST), "--mlflow-port", head.port, outputs=tmp_path)
    assert second.returncode == 2
    assert f"error: --mlflow-port: expected a free port at {HOST}, got {head.port}" in second.stderr
    assert "choose another port with --mlflow-port" in second.stderr
    assert not join.pem_path(tmp_path).exists()


@pytest.mark.parametrize(
    ("child", "name"),
    [
        ("distributed.cli.dask_scheduler", "scheduler"),
        ("mlflow server --host", "MLflow server"),
        ("-m uvicorn", "MLflow server"),
    ],
)
def test_what_is_killed_comes_back_at_the_same_address(head: Head, child: str, name: str) -> None:
    told = f"the {name} ended"
    before = head.command.text().count(told)
    victim = head.command.child(child)
    victim.kill()
    head.command.says(told, before + 1)
    wait_until(head.answers, "the head's answer", head.command.text)
    assert not victim.is_running() or victim.status() == psutil.STATUS_ZOMBIE
    family = psutil.Process(head.command.process.pid).children(recursive=True)
    assert sum("dask_scheduler" in " ".join(p.cmdline()) for p in family) == 1
    assert sum("-m uvicorn" in " ".join(p.cmdline()) for p in family) == 1


def test_a_killed_head_leaves_nothing_and_the_next_one_serves_the_same_cluster(tmp_path: Path) -> None:
    outputs = tmp_path / "outputs"
    first = started(outputs)
    pem = join.pem_path(outputs).read_bytes()
    first.command.end(signal.SIGKILL)
    second = Command("head", "--port", first.port, "--mlflow-port", first.mlflow_port, outputs=outputs)
    try:
        second.says("make worker")
        assert f"listening on {HOST}; HOST=<address>" in second.text()  # as join.pem says
        assert join.pem_path(outputs).read_bytes() == pem
    finally:
        second.end(signal.SIGINT)
    assert second.process.returncode == 0
    assert left_behind(outputs) == []


def test_a_local_server_gives_way_with_its_runs(tmp_path: Path) -> None:
    outputs = tmp_path / "outputs"
    local = embedded_server.start(outputs / "mlflow", port=free_port("127.0.0.1"))
    sweep = tracking.open_sweep(local, "mine", "k" * 16, {})
    tracking.close_sweep(sweep, "FINISHED")
    head = started(outputs)
    try:
        assert "the local MLflow server of" in head.command.text()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", int(local.rpartition(":")[2])), 5)
        assert ask_mlflow(head.there, f"runs/get?run_id={sweep.run_id}")["run"]["info"]["status"] == "FINISHED"
    finally:
        head.command.end()


def test_a_local_server_that_a_sweep_uses_is_left_alone(tmp_path: Path) -> None:
    outputs = tmp_path / "outputs"
    local = embedded_server.start(outputs / "mlflow", port=free_port("127.0.0.1"))
    sweep = tracking.open_sweep(local, "mine", "k" * 16, {})
    done = ended("head", "--host", HOST, outputs=outputs)
    assert done.returncode == 2 and embedded_server.running(outputs / "mlflow") == local
    assert done.stderr.startswith("error: expected no sweep at work with the local MLflow server of")
    assert "got sweep mine " in done.stderr
    # one that works through the head that was here before is no reason: it waits for this one
    MlflowClient(local).set_tag(sweep.run_id, "tracking_uri", f"https://{HOST}:5050")
    head = started(outputs)
    assert head.command.end() == 0


def test_a_local_server_gives_way_at_the_same_address_too(tmp_path: Path) -> None:
    host, outputs = "127.0.0.1", tmp_path / "outputs"
    local = embedded_server.start(outputs / "mlflow", port=free_port(host))
    port = int(local.rpartition(":")[2])
    options = ["--host", host, "--port", free_port(host), "--mlflow-port", port]
    with running("head", *options, outputs=outputs) as command:
        command.says(f"MLflow https://{host}:{port}")


def test_after_a_killed_head_a_local_server_gives_way_as_well(tmp_path: Path) -> None:
    outputs = tmp_path / "outputs"
    started(outputs).command.end(signal.SIGKILL)
    wait_until(lambda: left_behind(outputs) == [], "the servers of the killed head to end")
    local = embedded_server.start(outputs / "mlflow", port=free_port("127.0.0.1"))
    head = started(outputs)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", int(local.rpartition(":")[2])), 5)
    assert head.command.end() == 0


HASTY = """
import sys
from pathlib import Path
from pipeline.cluster import head
head._LOOK_S, head._SILENT_S = 0.5, 3.0
sys.exit(head.head(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), False))
"""


@pytest.mark.parametrize(
    ("part", "name"), [("distributed.cli.dask_scheduler", "scheduler"), ("-m uvicorn", "MLflow server")]
)
def test_a_server_that_hangs_is_started_again(tmp_path: Path, part: str, name: str) -> None:
    outputs, port = tmp_path / "outputs", free_port(HOST)
    line = [sys.executable, "-c", HASTY, str(outputs), HOST, str(port), str(port + 1000)]
    with subprocess.Popen(line, cwd=PROJECT, text=True, stdout=subprocess.PIPE) as head:
        assert head.stdout is not None
        try:
            next(text for text in head.stdout if "make worker" in text)
            pem = join.pem_path(outputs)
            pem.rename(f"{pem}.old")  # somebody is about to make a new one: that is no hanging server
            time.sleep(5)
            Path(f"{pem}.old").rename(pem)
            family = psutil.Process(head.pid).children(recursive=True)
            victim = next(p for p in family if part in " ".join(p.cmdline()))
            victim.suspend()
            said = next(text for text in head.stdout if "answered" in text or "ended" in text)
            assert f"the {name} has not answered for 3 s; starting it again" in said
            wait_until(lambda: why_no_scheduler(joined(outputs)) is None, "the scheduler")
            wait_until(lambda: why_no_mlflow(joined(outputs)) is None, "MLflow")
            assert not victim.is_running()
        finally:
            head.send_signal(signal.SIGINT)
            head.stdout.read()
    assert head.returncode == 0 and left_behind(outputs) == []


def test_login(tmp_path: Path) -> None:
    outputs = tmp_path / "outputs"
    head = started(outputs, "--auth")
    try:
        assert why_no_mlflow(head.there) is None
        assert head.there.environment()["MLFLOW_TRACKING_USERNAME"] == "admin"
        assert _raw(head, "GET", "experiments/get?experiment_id=0", {})[0] == 401
        assert str(head.there.password) not in head.command.text()
        stranger = Joined(head.there.scheduler, head.there.mlflow, head.there.pem, "admin", "guessed")
        assert "answers 401: user or password" in str(why_no_mlflow(stranger))
    finally:
        head.command.end()
    pem = join.pem_path(outputs)
    pem.write_text(pem.read_text().replace("mlflow-password: ", "mlflow-password: not "))
    arguments = ["head", "--auth", "--port", head.port, "--mlflow-port", head.mlflow_port]
    other = ended(*arguments, outputs=outputs)
    assert other.returncode == 2 and "expected MLflow to take the login of join.pem" in other.stderr
    assert left_behind(outputs) == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--host", "203.0.113.7"], "--host: expected an IPv4 address or a name of this machine, got '203.0.113.7'"),
        (["--host", "0.0.0.0"], "--host: expected one address, got '0.0.0.0', which is all of them"),
        (["--host", "no such name"], "--host: expected an IPv4 address or a name of this machine, got 'no such name'"),
        (["--host", HOST, "--port", "70000"], "--port: expected a port from 1 to 65535, got 70000"),
        (["--host", HOST, "--port", "5999", "--mlflow-port", "5999"], "--mlflow-port: expected another port than the"),
        (["--host", HOST, "--mlflow-port", "0"], "--mlflow-port: expected a port from 1 to 65535, got 0"),
    ],
)
def test_what_cannot_work_is_said_before_anything_is_made(tmp_path: Path, options: list[str], message: str) -> None:
    done = ended("head", *options, outputs=tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith(f"error: {message}") and done.stderr.count("\n") == 1
    assert not join.pem_path(tmp_path).exists()


def test_an_address_is_chosen_and_said(tmp_path: Path) -> None:
    chosen = own_address("192.0.2.1")
    done = ended("head", "--port", "0", outputs=tmp_path)
    assert done.returncode == 2
    if chosen:
        assert f"listening on {chosen}; HOST=<address> (--host) chooses another" in done.stdout
    else:
        assert "expected a network for the head to listen on, got none" in done.stderr


def test_outputs_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    done = ended("head", "--host", HOST, outputs=tmp_path / "file")
    assert done.returncode == 2 and "choose another folder with --outputs" in done.stderr


def test_a_server_that_cannot_start_shows_its_log(tmp_path: Path) -> None:
    (tmp_path / "mlflow").mkdir()
    (tmp_path / "mlflow" / "mlflow.db").write_text("this is no database " * 100, encoding="utf-8")
    port = free_port(HOST)
    with running("head", "--host", HOST, "--port", port, "--mlflow-port", port + 1000, outputs=tmp_path) as command:
        assert command.process.wait(120) == 1
        assert "the MLflow server does not start (exit code 1); its log" in command.text()
        assert "file is not a database" in command.text()
    assert left_behind(tmp_path) == []
