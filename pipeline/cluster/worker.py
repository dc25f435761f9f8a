"""The worker of a machine: Dask's, one job at a time, started again whenever it ends."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from threading import Event

from pipeline.errors import BadInput

from .join import Joined, joined
from .reach import own_address, split, why_no_scheduler
from .supervise import LONGEST_PAUSE_S, PROJECT, Supervised, only_one, say, until_told


def worker(outputs: Path, head: str | None, name: str | None) -> int:
    """Work for the head until told to end. A lost link, a lost scheduler and a crash only interrupt it.

    Raises BadInput for what cannot work from the start: no or another certificate, a bad address, a second worker.
    """
    name = name or socket.gethostname()
    with until_told() as told, only_one("worker", outputs):
        there = joined(outputs, head)
        (outputs / "cluster" / "worker.log").unlink(missing_ok=True)
        missing = why_no_scheduler(there)  # another certificate ends the command here; later it may be replaced
        waited = 0.0
        while not told.is_set():
            try:
                if missing is None:
                    waited = 0.0
                    _work(there, outputs, name, told)
                else:
                    if not waited:
                        say(f"{missing}; is `make head` running there? Trying again until it answers.")
                    waited = min(max(1.0, 2 * waited), LONGEST_PAUSE_S)
                    told.wait(waited)
                there = joined(outputs, head)
                missing = why_no_scheduler(there)
            except BadInput as error:
                missing = str(error)
    say("stopped")
    return 0


def _work(there: Joined, outputs: Path, name: str, told: Event) -> None:
    """Run Dask's worker, again and again, until its scheduler does not answer or this command is told to end."""
    log = outputs / "cluster" / "worker.log"
    process = Supervised("worker", [], PROJECT, log, _environment(there))
    said = ""  # why it ended before it had joined: once is enough
    while not told.is_set():
        address = own_address(split(there.scheduler)[0])  # each time: the network may have given us another one
        if address is None or why_no_scheduler(there) is not None:
            return
        process.command = _command(there, address, outputs, name)
        process.start()
        registered = False
        while (how := process.ended()) is None:
            if not registered and "Registered to:" in process.last_words(100):
                registered, said = True, ""
                say(f"{name} works for {there.scheduler} (log: {log})")
            if told.wait(0.2):
                process.stop()
                return
        taken = "name taken" in process.last_words(100)
        why = f"the scheduler knows another worker called {name}: make worker ARGS='--name OTHER'" if taken else how
        if why != said:
            say(f"the worker ended ({why}); starting it again")
        said = "" if registered else why
        told.wait(process.pause)


def _command(there: Joined, address: str, outputs: Path, name: str) -> list[str]:
    # Without a nanny: this command restarts the worker, so that one process fewer can be left behind.
    command = ["distributed.cli.dask_worker", there.scheduler, "--name", name, "--no-nanny"]
    command += ["--nworkers", "1", "--nthreads", "1", "--resources", "GPU=1"]
    command += ["--memory-limit", "0"]  # unified memory would mislead Dask; a job's need is known before it starts
    command += ["--no-dashboard", "--dashboard-address", "127.0.0.1:0"]  # its status page is never encrypted
    command += ["--host", address]
    command += ["--local-directory", str((outputs / "cluster").absolute()), "--death-timeout", "30"]
    return command + tls(there)


def tls(there: Joined) -> list[str]:
    """Dask's options for the shared certificate."""
    if there.pem is None:
        return ["--protocol", "tcp"]
    pem = str(there.pem)
    return ["--protocol", "tls", "--tls-ca-file", pem, "--tls-cert", pem, "--tls-key", pem]


def _environment(there: Joined) -> dict[str, str]:
    encrypted = {"DASK_DISTRIBUTED__COMM__REQUIRE_ENCRYPTION": str(there.pem is not None)}
    return dict(os.environ) | encrypted | there.environment()
