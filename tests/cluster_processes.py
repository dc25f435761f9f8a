"""Heads and workers as a person starts them: real processes on addresses of this machine, ended with the test."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from pipeline.cluster import Joined, joined
from pipeline.cluster.reach import why_no_mlflow, why_no_scheduler

PROJECT = Path(__file__).resolve().parent.parent
HOST = "127.0.0.2" if sys.platform == "linux" else "127.0.0.1"  # macOS answers to the second only
START_S = 180  # MLflow makes its tables; the machine may be busy


class Command:
    """`python -m pipeline.cluster ...`, running; what it prints goes to a file."""

    def __init__(self, *arguments: object, outputs: Path, environment: dict[str, str] | None = None) -> None:
        self.outputs = outputs
        self.printed = outputs.parent / f"{outputs.name}-{arguments[0]}-{time.monotonic_ns()}.txt"
        with open(self.printed, "wb") as out:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "pipeline.cluster", *map(str, arguments), "--outputs", str(outputs)],
                cwd=PROJECT,
                env=os.environ | (environment or {}),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
            )

    def text(self) -> str:
        return self.printed.read_text()

    def says(self, text: str, times: int = 1) -> None:
        """Wait until it has printed `text` so many times."""

        def there() -> bool:
            code = self.process.poll()
            assert self.text().count(text) >= times or code is None, f"it ended with {code}:\n{self.text()}"
            return self.text().count(text) >= times

        wait_until(there, f"{text!r} x{times}", self.text)

    def end(self, number: int = signal.SIGTERM) -> int:
        """Its exit code after this signal."""
        self.process.send_signal(number)
        return self.process.wait(60)

    def child(self, part: str) -> psutil.Process:
        """The descendant whose command line contains `part`, the outermost one."""
        found: list[psutil.Process] = []

        def there() -> bool:
            found[:] = [
                p for p in psutil.Process(self.process.pid).children(recursive=True) if part in " ".join(p.cmdline())
            ]
            return bool(found)

        wait_until(there, f"a child with {part}", self.text)
        return found[0]


@contextmanager
def running(*arguments: object, outputs: Path, environment: dict[str, str] | None = None) -> Iterator[Command]:
    command = Command(*arguments, outputs=outputs, environment=environment)
    try:
        yield command
    finally:
        if command.process.poll() is None:
            command.end()


def ended(*arguments: object, outputs: Path) -> subprocess.CompletedProcess[str]:
    """The same, for commands that end by themselves: with exit code, stdout and stderr."""
    command = [sys.executable, "-m", "pipeline.cluster", *map(str, arguments), "--outputs", str(outputs)]
    return subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, timeout=START_S)


def left_behind(outputs: Path) -> list[str]:
    """Command lines of processes that have to do with `outputs` (its certificate or its folders), after a moment."""

    def alive() -> list[str]:
        lines = []
        for process in psutil.process_iter():
            try:
                line = " ".join(process.cmdline())
                if f"{outputs}/" in line and process.status() != psutil.STATUS_ZOMBIE:
                    lines.append(line)
            except psutil.Error:
                continue
        return lines

    deadline = time.monotonic() + 10
    while (lines := alive()) and time.monotonic() < deadline:
        time.sleep(0.1)
    return lines


def wait_until(
    condition: Callable[[], bool], what: str, more: Callable[[], str] = lambda: "", seconds: float = START_S
) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"expected {what} within {seconds} s; {more()}"
        time.sleep(0.1)


def free_port(host: str) -> int:
    """A port of `host` that nobody listens on, another one each time, below those that the system gives out by itself.

    Test processes that run side by side look in different places: they start their servers a while later.
    """
    one_of_several = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    for port in range(22000 + 100 * one_of_several + os.getpid() % 100, 32000):
        with socket.socket() as listener:
            try:
                listener.bind((host, port))
            except OSError:
                continue
        if port not in _given:
            _given.add(port)
            return port
    raise AssertionError("no free port")


_given: set[int] = set()


@dataclass
class Head:
    command: Command
    outputs: Path
    port: int
    mlflow_port: int

    @property
    def there(self) -> Joined:
        return joined(self.outputs)

    def answers(self) -> bool:
        return why_no_scheduler(self.there) is None and why_no_mlflow(self.there) is None


def started(outputs: Path, *options: str) -> Head:
    """A head that answers; the test ends it."""
    port = free_port(HOST)
    mlflow_port = port + 1000
    arguments = ["head", "--host", HOST, "--port", port, "--mlflow-port", mlflow_port, *options]
    head = Head(Command(*arguments, outputs=outputs), outputs, port, mlflow_port)
    try:
        head.command.says("make worker")
    except BaseException:
        head.command.end()
        raise
    return head
