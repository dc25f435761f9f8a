"""Whether an attempt that is RUNNING in MLflow still lives; no host's clock is trusted for it.

A living attempt renews two tags, `lease` and `process`. The lease is the tracking server's own time, so all hosts read
one clock; and an attempt counts as dead only once its lease was seen not to change while the server was answering.
A host that was away for so long finds its run KILLED and leaves it so.
"""

import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path

import psutil
from mlflow.entities import Run

BEAT_S = 10.0  # how often a living attempt renews its lease
LEASE_S = 60.0  # without a renewal for so long it is dead,
CONFIRM_S = 25.0  # of which this long must have been watched


def signs_of_life(now: float) -> dict[str, str]:
    """The tags of an attempt of this process; `now` is the tracking server's time (UTC seconds)."""
    return {"lease": str(int(now)), "process": f"{_machine()}:{os.getpid()}:{_started(os.getpid())}"}


def process_lives(run: Run) -> bool | None:
    """Whether the process that a run names is there; None if it is another machine's, or cannot be told."""
    machine, _, rest = run.data.tags.get("process", "").partition(":")
    pid, _, started = rest.partition(":")
    if machine != _machine() or not pid.isdigit():
        return None
    now = _started(int(pid))
    if now is None or now == started:
        return now is not None
    # elsewhere the start is told by a clock that may have been set since
    return False if now and sys.platform == "linux" else None


def is_mine(run: Run) -> bool:
    """Whether this very process is the one that a run names."""
    machine, _, rest = run.data.tags.get("process", "").partition(":")
    return (machine, rest.partition(":")[0]) == (_machine(), str(os.getpid()))


def looks_alive(run: Run, now: float) -> bool:
    """Whether one look says that a RUNNING run is at work; False also where only watching it could tell."""
    lives = process_lives(run)
    return lives is not False and (0 <= now - lease_of(run) < LEASE_S or (lives is True and _is_sweep(run)))


def lease_of(run: Run) -> float:
    """When the lease was last renewed, in the server's seconds; of a run without one, its start."""
    try:
        return float(run.data.tags["lease"])
    except (KeyError, ValueError):
        return float(run.info.start_time) / 1000


class Watch:
    """Looks at RUNNING runs again and again, and tells which are alive and which are dead."""

    def __init__(self) -> None:
        self._seen: dict[str, tuple[float, float, bool]] = {}  # run -> lease, since when, and whether it has moved
        self._looked = 0.0

    def look(self, runs: Iterable[Run], now: float) -> dict[str, bool | None]:
        """Run id -> True: alive, False: dead, None: not known yet, look again within 2 * BEAT_S.

        now: the server's time as the runs were read.
        """
        clock = time.monotonic()
        if clock - self._looked > 3 * BEAT_S:
            self._seen.clear()  # the server was away, for those we watch as well
        self._looked = clock
        return {run.info.run_id: self._verdict(run, now, clock) for run in runs}

    def _verdict(self, run: Run, now: float, clock: float) -> bool | None:
        lives = process_lives(run)
        if lives is False or (lives and _is_sweep(run)):  # a driver that was suspended (Ctrl-Z) goes on later
            return lives
        lease = lease_of(run)
        if lives and 0 <= now - lease < LEASE_S:
            return True
        seen, since, moved = self._seen.setdefault(run.info.run_id, (lease, clock, False))
        if lease != seen:
            self._seen[run.info.run_id] = lease, clock, True
            return True
        watched = clock - since
        if watched >= LEASE_S or (watched >= CONFIRM_S and now - lease >= LEASE_S):
            return False
        return True if moved else None


def _is_sweep(run: Run) -> bool:
    return bool(run.data.tags.get("kind") == "sweep")


@lru_cache
def _machine() -> str:
    """This boot of this machine, and the numbering of its processes: pids of the same one can be compared.

    A host's name does not do: two may have the same one, and it changes with the network.
    """
    if sys.platform == "linux":
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot}/{os.stat('/proc/self/ns/pid').st_ino}"
    if sys.platform == "darwin":
        command = ["/usr/sbin/sysctl", "-n", "kern.bootsessionuuid"]
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip() or platform.node()
    return platform.node()


def _started(pid: int) -> str | None:
    """When a process started, which tells it from a later one with its number; None if there is none, "" if unknown."""
    try:
        os.kill(pid, 0)
        if sys.platform == "linux":  # ticks since boot: psutil's answer moves when the clock is set
            state, *fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
            return None if state in "ZX" else fields[18]
        process = psutil.Process(pid)
        return None if process.status() == psutil.STATUS_ZOMBIE else f"{process.create_time():.0f}"
    except (ProcessLookupError, psutil.NoSuchProcess):
        return None
    except (OSError, psutil.Error):  # it is there, and somebody else's
        return ""
