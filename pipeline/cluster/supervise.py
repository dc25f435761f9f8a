"""Processes that are started again when they end, and that end with the command that started them."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from pipeline.errors import BadInput

PROJECT = Path(__file__).parent.parent.parent
LONGEST_PAUSE_S = 15.0
_LIVED_S = 60.0  # a process that lived so long was well: the next pause is the shortest again
_STOP_S = 5.0  # from SIGTERM to SIGKILL
_JOB_STOP_S = 15.0  # for a job whose worker has gone, to close its run


class Supervised:
    """One process with all its descendants: started, looked after, ended as a whole.

    name: what people read. command: a module and its arguments. folder: where it runs. log: gets its output.
    """

    def __init__(self, name: str, command: Sequence[str], folder: Path, log: Path, environment: dict[str, str]) -> None:
        self.name = name
        self.command = command
        self.folder = folder
        self.log = log
        self.environment = environment
        self.pause = 0.0  # seconds until the next start, after an end
        self._process: subprocess.Popen[bytes] | None = None
        self._started = 0.0
        self._log_start = 0

    def start(self) -> None:
        """Start it. Raises OSError where the log cannot be written."""
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with open(self.log, "ab") as log:
            self._log_start = log.tell()
            self._process = subprocess.Popen(
                [sys.executable, "-m", "pipeline.cluster.child", str(self.folder.absolute()), *self.command],
                cwd=PROJECT,
                env=self.environment,
                stdin=subprocess.PIPE,  # closed by the system when we die: see child.py
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self._started = time.monotonic()

    def ended(self) -> str | None:
        """How it ended ("killed by SIGKILL", "exit code 1"), or None while it runs. The next pause is known then."""
        if self._process is None or (code := self._process.poll()) is None:
            return None
        self._kill_group()  # whatever it left behind holds ports and files
        lived = time.monotonic() - self._started
        self.pause = 1.0 if lived > _LIVED_S else min(max(1.0, 2 * self.pause), LONGEST_PAUSE_S)
        self._process = None
        return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"

    def stop(self) -> None:
        """End it: SIGTERM, and SIGKILL after a few seconds. A job that a worker runs has a little longer to say so."""
        if self._process is None:
            return
        descendants = []
        with suppress(psutil.Error):
            descendants = psutil.Process(self._process.pid).children(recursive=True)
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_STOP_S)
        self._kill_group()
        self._process.wait()
        self._process = None
        for process in psutil.wait_procs(descendants, timeout=_JOB_STOP_S)[1]:
            with suppress(psutil.Error):
                process.kill()

    def last_words(self, lines: int = 15) -> str:
        """The end of what it logged since its start."""
        with open(self.log, "rb") as log:
            log.seek(self._log_start)
            return "\n".join(log.read().decode(errors="replace").splitlines()[-lines:])

    def _kill_group(self) -> None:
        assert self._process is not None
        with suppress(ProcessLookupError, PermissionError):  # macOS: EPERM for a group of zombies
            os.killpg(self._process.pid, signal.SIGKILL)
        if self._process.stdin is not None:
            self._process.stdin.close()


@contextmanager
def until_told() -> Iterator[threading.Event]:
    """Set once this process is asked to end: SIGTERM, Ctrl-C, a closed terminal."""
    told = threading.Event()
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)}
    if before[signal.SIGHUP] == signal.SIG_IGN:
        del before[signal.SIGHUP]  # nohup
    for number in before:
        signal.signal(number, lambda *_: told.set())
    try:
        yield told
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def only_one(what: str, outputs: Path) -> Iterator[None]:
    """Held by one `what` (head, worker) of `outputs` at a time; the system lets go of it however that one ends.

    Raises BadInput when another one has it.
    """
    folder = outputs / "cluster"
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / f"{what}.lock", "a+", encoding="utf-8") as lock:
        deadline = time.monotonic() + 1  # somebody may be looking whether it is held
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError as error:
                if time.monotonic() > deadline:
                    lock.seek(0)
                    raise BadInput(
                        f"expected no other {what} on this machine for {outputs}, got one that runs (process "
                        f"{lock.read()}); stop it, or leave it be"
                    ) from error
                time.sleep(0.05)
        lock.truncate(0)
        lock.write(str(os.getpid()))
        lock.flush()
        yield


def say(text: str) -> None:
    """A line for a person, and for the log of a service: with the time, at once."""
    print(f"{time.strftime('%H:%M:%S')}  {text}", flush=True)
