"""`make worker`: joins, and joins again after whatever ended it; leaves nothing behind."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from distributed import Client

from pipeline.cluster import join, joined
from pipeline.cluster.reach import split, why_no_scheduler
from pipeline.cluster.supervise import PROJECT, Supervised
from pipeline.cluster.worker import tls
from tests.cluster_processes import HOST, Command, ended, free_port, left_behind, running, wait_until

pytestmark = pytest.mark.hosts

TELLS = "import os, sys, time; print(os.getpid(), flush=True); sys.stdin.read(); time.sleep(2)"


def scheduler(outputs: Path) -> Supervised:
    """A scheduler alone, as the head starts it; MLflow has no part in these tests."""
    there = joined(outputs)
    host, _, port = there.scheduler.removeprefix("tls://").partition(":")
    command = ["distributed.cli.dask_scheduler", "--host", host, "--port", port, *tls(there)]
    process = Supervised(
        "scheduler", [*command, "--no-dashboard"], PROJECT, outputs / "scheduler.log", dict(os.environ)
    )
    process.start()
    return process


@pytest.fixture
def outputs(tmp_path: Path) -> Path:
    """A folder with a certificate for a scheduler that does not run yet."""
    join.make(tmp_path / "out puts", HOST, free_port(HOST), free_port(HOST))
    return tmp_path / "out puts"


@pytest.fixture
def serving(outputs: Path) -> Iterator[Path]:
    process = scheduler(outputs)
    wait_until(lambda: why_no_scheduler(joined(outputs)) is None, "a scheduler", process.last_words)
    yield outputs
    process.stop()
    assert left_behind(outputs) == []


@contextmanager
def connected(outputs: Path) -> Iterator[Client]:
    there = joined(outputs)
    with Client(there.scheduler, security=there.security(), timeout=60) as client:
        yield client


def workers(client: Client) -> dict[str, Any]:
    return {str(w["id"]): w for w in client.scheduler_info(n_workers=-1)["workers"].values()}


def test_it_joins_with_one_job_at_a_time_and_what_jobs_need(serving: Path) -> None:
    with running("worker", outputs=serving) as command, connected(serving) as client:
        client.wait_for_workers(1, timeout=60)
        (name, worker), *none = workers(client).items()
        assert none == [] and name == socket.gethostname()
        assert (worker["nthreads"], worker["resources"], worker["memory_limit"]) == (1, {"GPU": 1.0}, 0)

        def about() -> tuple[str, str | None]:
            import os

            return os.getcwd(), os.environ.get("MLFLOW_TRACKING_SERVER_CERT_PATH")

        assert client.submit(about, resources={"GPU": 1}).result(30) == (str(PROJECT), str(joined(serving).pem))
        family = psutil.Process(command.process.pid).children(recursive=True)
        assert len(family) == 1
        connections = [c for p in family for c in p.net_connections("inet") if c.status == psutil.CONN_LISTEN]
        assert {c.laddr.ip for c in connections} == {"127.0.0.1"}  # with which it reaches 127.0.0.2
        started = time.monotonic()
        assert command.end() == 0 and time.monotonic() - started < 10


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_it_stops_when_told_while_it_waits_for_a_head(outputs: Path, number: int) -> None:
    with running("worker", outputs=outputs) as command:
        command.says(f"no scheduler answers at tls://{HOST}:")
        command.says("is `make head` running there? Trying again until it answers.")
        started = time.monotonic()
        assert command.end(number) == 0 and time.monotonic() - started < 5
    assert left_behind(outputs) == []


def test_it_joins_again_after_its_process_and_after_the_scheduler_died(outputs: Path) -> None:
    first = scheduler(outputs)
    with running("worker", "--name", "mac1", outputs=outputs) as command:
        with connected(outputs) as client:
            client.wait_for_workers(1, timeout=60)
            command.child("dask_worker").kill()
            command.says("the worker ended (killed by SIGKILL); starting it again")
            command.says("mac1 works for", 2)
            wait_until(lambda: "mac1" in workers(client), "mac1 back")
        first._kill_group()
        command.says("no scheduler answers")
        second = scheduler(outputs)
        with connected(outputs) as client:
            client.wait_for_workers(1, timeout=60)
            assert set(workers(client)) == {"mac1"}
        command.end()
        second.stop()
    assert first.ended() == "killed by SIGKILL"
    assert left_behind(outputs) == []


def test_it_starts_before_the_head_and_finds_it(outputs: Path) -> None:
    with running("worker", outputs=outputs) as command:
        command.says("Trying again until it answers.")
        process = scheduler(outputs)
        command.says("works for")
        with connected(outputs) as client:
            client.wait_for_workers(1, timeout=60)
        assert command.text().count("Trying again") == 1  # said once
        command.end()
        process.stop()


def test_killed_it_leaves_neither_a_worker_nor_what_that_one_runs(serving: Path) -> None:
    with connected(serving) as client:
        command = Command("worker", outputs=serving)
        client.wait_for_workers(1, timeout=60)

        def job(code: str) -> int:
            """A job as the launcher runs it: a process of its own session, that ends when stdin does."""
            import subprocess
            import sys

            process = subprocess.Popen(
                [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
            )
            assert process.stdout is not None
            pid = int(process.stdout.readline())
            sys.modules["__main__"].kept = process  # type: ignore[attr-defined]
            return pid

        pid = client.submit(job, TELLS, resources={"GPU": 1}).result(30)
        worker = command.child("dask_worker")
        command.end(signal.SIGKILL)
        wait_until(lambda: not worker.is_running() or worker.status() == psutil.STATUS_ZOMBIE, "no worker", seconds=10)
        wait_until(lambda: not psutil.pid_exists(pid) or psutil.Process(pid).status() == "zombie", "no job", seconds=10)

        again = Command("worker", outputs=serving)  # its lock and its name are free
        again.says("works for")
        client.wait_for_workers(1, timeout=60)
        pid = client.submit(job, TELLS, resources={"GPU": 1}).result(30)
        assert again.end() == 0
        assert not psutil.pid_exists(pid)  # told to end, it waits for the job to close its run


def test_a_second_worker_of_one_machine_is_refused(serving: Path) -> None:
    with running("worker", outputs=serving) as command:
        command.says("works for")
        second = ended("worker", "--name", "other", outputs=serving)
        assert second.returncode == 2
        assert f"expected no other worker on this machine for {serving}, got one that runs" in second.stderr
        assert f"(process {command.process.pid})" in second.stderr


def test_two_machines_of_one_name_are_told(serving: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    (other / "cluster").mkdir(parents=True)
    (other / "cluster" / "join.pem").touch(0o600)
    join.pem_path(other).write_bytes(join.pem_path(serving).read_bytes())
    with running("worker", "--name", "mac", outputs=serving), connected(serving) as client:
        client.wait_for_workers(1, timeout=60)
        with running("worker", "--name", "mac", outputs=other) as second:
            second.says("the scheduler knows another worker called mac: make worker ARGS='--name OTHER'")
            first = second.child("distributed.cli.dask_worker")
            wait_until(lambda: not first.is_running(), "the first try is over")
            second.child("distributed.cli.dask_worker")  # it goes on trying: after a lost link the other one is itself
            first_try = second.text()
            assert first_try.count("another worker called") == 1 and "works for" not in first_try


def test_a_certificate_of_another_cluster(serving: Path, tmp_path: Path) -> None:
    port = int(joined(serving).scheduler.rpartition(":")[2])
    join.make(tmp_path / "other", HOST, port, 5050)
    started = time.monotonic()
    done = ended("worker", outputs=tmp_path / "other")
    assert done.returncode == 2 and time.monotonic() - started < 20
    assert f"got one with another certificate; copy it again: scp {HOST}:<project folder>" in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_head_with_a_new_certificate_is_waited_for(outputs: Path, tmp_path: Path) -> None:
    first = scheduler(outputs)
    with running("worker", "--name", "mac1", outputs=outputs) as command:
        command.says("mac1 works for")
        first.stop()
        port = int(joined(outputs).scheduler.rpartition(":")[2])
        join.make(tmp_path / "head", HOST, port, 5050)
        second = scheduler(tmp_path / "head")
        command.says("got one with another certificate; copy it again")
        join.pem_path(outputs).write_bytes(join.pem_path(tmp_path / "head").read_bytes())
        command.says("mac1 works for", 2)
        command.end()
        second.stop()
    assert left_behind(outputs) == []


def test_a_certificate_that_is_no_longer_valid(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(join, "_VALID_DAYS", -1)
    join.make(tmp_path, HOST, free_port(HOST), 5050)
    process = scheduler(tmp_path)
    with socket.socket() as caller:
        wait_until(lambda: caller.connect_ex(split(joined(tmp_path).scheduler)) == 0, "the scheduler")
    done = ended("worker", outputs=tmp_path)
    process.stop()
    assert done.returncode == 2
    assert "expected a certificate that is valid today" in done.stderr and "certificate has expired" in done.stderr


def test_without_a_certificate(tmp_path: Path) -> None:
    done = ended("worker", outputs=tmp_path / "none")
    assert done.returncode == 2
    assert "expected this machine's certificate" in done.stderr and "scp" in done.stderr


def test_a_head_that_is_no_address(outputs: Path) -> None:
    done = ended("worker", "--head", "a b", outputs=outputs)
    assert done.returncode == 2
    assert done.stderr.startswith(
        "error: head: expected a host name or an IPv4 address, with :port or without, got 'a b'"
    )


def test_something_else_at_the_address(outputs: Path) -> None:
    with socket.create_server((HOST, 0)) as other:
        other.listen()
        with running("worker", "--head", f"{HOST}:{other.getsockname()[1]}", outputs=outputs) as command:
            connection, _ = other.accept()
            connection.sendall(b"SSH-2.0-OpenSSH_9.9\r\n")
            command.says(f"something answers at tls://{HOST}:")
            connection.close()
