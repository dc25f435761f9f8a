"""A Dask scheduler and workers on this machine, as real processes; each worker stands for one host."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

PROJECT = Path(__file__).resolve().parent.parent.parent


def project_copy(folder: Path) -> Path:
    """A project folder as another machine has it, with outputs of its own."""
    for part in ("keyformer", "pipeline", "hydra_plugins", "conf"):
        shutil.copytree(PROJECT / part, folder / part, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(PROJECT / "requirements.lock", folder)
    return folder


class Cluster:
    """A scheduler on a port that stays the same when it is started again, and named workers."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.address = f"tcp://127.0.0.1:{self.port}"
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    def start_scheduler(self) -> None:
        self._start(
            "scheduler", PROJECT, "scheduler", "--host", "127.0.0.1", "--port", str(self.port), "--no-dashboard"
        )
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            with socket.socket() as caller:
                if caller.connect_ex(("127.0.0.1", self.port)) == 0:
                    return
            time.sleep(0.1)
        raise AssertionError(self.log("scheduler"))

    def start_worker(self, name: str, cwd: Path = PROJECT, **environment: str) -> None:
        """A worker `name` in the project folder `cwd`, with its own folder for temporary files and the GPU lock."""
        options = ["--nworkers", "1", "--nthreads", "1", "--memory-limit", "0", "--no-dashboard", "--no-nanny"]
        options += ["--name", name, "--resources", "GPU=1", "--local-directory", str(self.folder / name)]
        (self.folder / name).mkdir(exist_ok=True)
        own = {"TMPDIR": str(self.folder / name), "KEYFORMER_GPU_LOCK": str(self.folder / name / "gpu.lock")}
        self._start(name, cwd, "worker", self.address, *options, **(own | environment))

    def _start(self, name: str, cwd: Path, *command: str, **environment: str) -> None:
        assert name not in self.processes
        path = os.pathsep.join(filter(None, [str(cwd), os.environ.get("PYTHONPATH")]))
        with open(self.folder / f"{name}.log", "ab") as log:
            self.processes[name] = subprocess.Popen(
                [sys.executable, "-m", f"distributed.cli.dask_{command[0]}", *command[1:]],
                cwd=cwd,
                env=os.environ | {"PYTHONPATH": path, "DASK_DISTRIBUTED__ADMIN__TICK__LIMIT": "1m"} | environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text(errors="replace")

    def kill(self, name: str, how: signal.Signals = signal.SIGKILL) -> None:
        """End one process, and only it."""
        process = self.processes.pop(name)
        process.send_signal(how)
        process.wait(30)

    def jobs(self, name: str) -> list[psutil.Process]:
        """The processes of jobs that the worker `name` has started."""
        found = []
        for child in psutil.Process(self.processes[name].pid).children():
            with suppress(psutil.Error):
                if "hydra_plugins.dask_launcher._job" in child.cmdline():
                    found.append(child)
        return found

    def stop(self) -> None:
        for name in sorted(self.processes, key=lambda name: name == "scheduler"):
            children = psutil.Process(self.processes[name].pid).children(recursive=True)
            self.kill(name)
            for child in children:
                with suppress(psutil.NoSuchProcess):
                    child.kill()


def wait_for(condition: Callable[[], Any], seconds: float = 60) -> Any:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if found := condition():
            return found
        time.sleep(0.05)
    raise AssertionError("expected this to come true")
