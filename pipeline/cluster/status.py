"""What a cluster is doing: its machines, what each runs, how far the sweeps in progress are."""

from __future__ import annotations

import asyncio
import http.client
import json
import subprocess
import sys
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cloudpickle
from distributed import Client
from rich.console import Console
from rich.table import Table

from pipeline.errors import BadInput

from .join import Joined, joined
from .reach import ask_mlflow, why_no_mlflow, why_no_scheduler

_CONNECT_S = 5.0
_ANSWER_S = 60.0  # a busy machine takes a while to start Python


@dataclass(frozen=True)
class Progress:
    """One sweep that is RUNNING in MLflow, in jobs."""

    experiment: str
    name: str
    done: int
    running: int
    failed: int
    left: int  # neither of these; also the ones whose attempt died and that are tried again


def status(outputs: Path, head: str | None) -> int:
    """Print it; raises BadInput when no scheduler answers."""
    there = joined(outputs, head)
    if reason := why_no_scheduler(there):
        raise BadInput(f"expected a running head, got: {reason}; start it on that machine with `make head`")
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 200)
    console.print(f"scheduler {there.scheduler}   MLflow {there.mlflow}")
    with console.status("asking the machines ..."):  # seen in a terminal only
        hosts = asyncio.run(_hosts(there, str(outputs)))
    console.print(_hosts_table(hosts) if hosts else "no worker has joined: `make worker` on each machine")
    if reason := why_no_mlflow(there) if there.mlflow else "this scheduler has no MLflow server":
        console.print(f"sweeps: unknown, {reason}")
        return 0
    try:
        sweeps = in_progress(there)
    except (OSError, ValueError, KeyError, http.client.HTTPException) as error:
        console.print(f"sweeps: unknown, MLflow answers, but not to this question ({error})")
        return 0
    console.print(_sweeps_table(sweeps) if sweeps else "no sweep in progress")
    return 0


async def _hosts(there: Joined, outputs: str) -> list[dict[str, Any]]:
    """One entry per worker: its name, the jobs that it runs, and what the machine says of itself or why it does not."""
    cloudpickle.register_pickle_by_value(sys.modules[__name__])  # a machine with other code must answer too
    client = Client(there.scheduler, security=there.security(), asynchronous=True, timeout=_CONNECT_S)
    try:  # the time is ours as well: Dask waits for ever for what answers TLS and is no scheduler
        await asyncio.wait_for(client, 2 * _CONNECT_S)
    except (OSError, ValueError) as error:
        with suppress(Exception):
            await asyncio.wait_for(client.close(), _CONNECT_S)
        raise BadInput(
            f"expected a scheduler at {there.scheduler}, got something else ({error or 'no answer'}); give the address "
            "that `make head` printed"
        ) from error
    async with client:
        workers = (await client.scheduler.identity(n_workers=-1))["workers"]
        running = await client.processing()

        async def host(address: str, worker: dict[str, Any]) -> dict[str, Any]:
            try:
                asked = client.run(_describe_here, outputs, workers=[address], on_error="return")
                about = (await asyncio.wait_for(asked, _ANSWER_S)).get(address, OSError("it has just left"))
            except (TimeoutError, OSError) as error:
                about = error
            answer = {"unknown": str(about) or "no answer"} if isinstance(about, BaseException) else about
            return answer | {"name": str(worker["id"]), "runs": list(running.get(address, ()))}

        return list(await asyncio.gather(*(host(address, worker) for address, worker in sorted(workers.items()))))


async def _describe_here(outputs: str) -> dict[str, Any]:
    """On a worker: what `describe` says in a fresh process, whose code is that on disk now."""
    command = [sys.executable, "-m", "pipeline.cluster", "describe", "--outputs", outputs]
    process = await asyncio.create_subprocess_exec(
        *command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    try:
        out, err = await process.communicate()
    except BaseException:
        process.kill()
        raise
    if process.returncode == 0:
        about: dict[str, Any] = json.loads(out)
        return about
    return {"unknown": (err.decode(errors="replace").strip().splitlines() or [f"exit code {process.returncode}"])[-1]}


def _hosts_table(hosts: Iterable[dict[str, Any]]) -> Table:
    table = Table(box=None, pad_edge=False)
    for column in ("worker", "chip", "GPU", "memory", "free disk", "python", "mlx", "mlx-lm", "commit", "runs"):
        table.add_column(column, overflow="fold")
    hosts = list(hosts)
    codes = {host["code"] for host in hosts if "code" in host}
    for host in hosts:
        runs = ", ".join(key.split("-", 2)[-1] for key in host["runs"]) or "nothing"
        if "unknown" in host:
            table.add_row(host["name"], f"does not say: {host['unknown']}", *[""] * 7, runs)
            continue
        code = f" (code {host['code'][:7]})" if len(codes) > 1 else ""  # they must not differ: show which does
        sizes = [f"{host[name] / 2**30:.0f} GiB" for name in ("memory_bytes", "free_disk_bytes")]
        commit = host["commit"].partition("-")
        versions = [host["python"], *(host["versions"].get(name, "?") for name in ("mlx", "mlx-lm"))]
        short = f"{commit[0][:9]}{commit[1]}{commit[2]}{code}"
        table.add_row(host["name"], host["chip"], host["backend"], *sizes, *versions, short, runs)
    return table


def _sweeps_table(sweeps: Iterable[Progress]) -> Table:
    table = Table(box=None, pad_edge=False)
    for column in ("sweep in progress", "done", "running", "left", "failed"):
        table.add_column(column)
    for sweep in sweeps:
        numbers = (sweep.done, sweep.running, sweep.left, sweep.failed)
        table.add_row(sweep.name, *map(str, numbers))
    return table


def in_progress(there: Joined) -> list[Progress]:
    """The sweeps that are RUNNING in MLflow. Raises OSError, ValueError, KeyError or HTTPException."""
    experiments = {each["experiment_id"]: each["name"] for each in _all(there, "experiments/search", {}, "experiments")}
    sweeps = []
    for experiment_id, name in experiments.items():
        for parent in _runs(there, experiment_id, "tags.kind = 'sweep' and attributes.status = 'RUNNING'"):
            tags, params = _pairs(parent, "tags"), _pairs(parent, "params")
            of_it = f"tags.kind = 'job' and tags.sweep_key LIKE '%{tags['sweep_key']}%'"
            keys: dict[str, set[str]] = {}
            for run in _runs(there, experiment_id, of_it):
                keys.setdefault(run["info"]["status"], set()).add(_pairs(run, "tags")["key"])
            done = keys.get("FINISHED", set())
            running = keys.get("RUNNING", set()) - done
            failed = keys.get("FAILED", set()) - done - running
            left = max(0, int(params.get("jobs", 0)) - len(done) - len(running) - len(failed))
            counts = [len(done), len(running), len(failed), left]
            sweeps.append(Progress(name, parent["info"]["run_name"], *counts))
    return sweeps


def _runs(there: Joined, experiment_id: str, where: str) -> list[dict[str, Any]]:
    return _all(there, "runs/search", {"experiment_ids": [experiment_id], "filter": where}, "runs")


def _all(there: Joined, what: str, question: dict[str, Any], name: str) -> list[dict[str, Any]]:
    """All pages of a search."""
    found: list[dict[str, Any]] = []
    token: str | None = None
    while True:
        page = {"page_token": token} if token else {}
        answer = ask_mlflow(there, what, question | {"max_results": 1000} | page)
        found += answer.get(name, [])
        token = answer.get("next_page_token")
        if not token:
            return found


def _pairs(run: dict[str, Any], name: str) -> dict[str, str]:
    return {pair["key"]: pair["value"] for pair in run["data"].get(name, [])}
