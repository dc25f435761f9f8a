"""What the cluster itself costs: a job of one host beside its work, and 200 jobs that do nothing."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from desk import JOB_PROCESS, Desk, Result
from network import wait_until

pytestmark = pytest.mark.cluster
JOBS = 200


def test_one_host_alone(tidy_desk: Desk, expected: dict[str, Result], measured: Callable[..., None]) -> None:
    """Jobs one after another on a machine that does nothing else: what they take beside generating and scoring."""
    desk = tidy_desk
    for mac in desk.macs[1:]:
        mac.kill()
    wait_until(lambda: desk.workers() == {"mac1"}, 60, "only mac1 is left")
    experiment = f"one-host-{os.urandom(2).hex()}"
    sweep = desk.sweep(experiment)
    sweep.falls_ill(*desk.macs[1:])
    wait_until(lambda: desk.macs[0].pids(JOB_PROCESS), 240, "the first job")
    began = time.monotonic()
    wait_until(lambda: sweep.done() == len(expected), 300, "all jobs are done")
    each = (time.monotonic() - began) / len(expected)
    assert sweep.ends() == 0, sweep.output
    desk.check(experiment, expected)
    sweep.nobody_idled()
    times = [json.loads(path.read_text()) for path in desk.desk.outputs.glob("jobs/*/times.json")]
    assert len(times) == len(expected)
    work = sum(sum(stages.values()) for stages in times) / len(times)
    measured("small jobs of one host, one after another: each", each)
    measured("of that generating and scoring", work)


def test_200_empty_jobs(tidy_desk: Desk, measured: Callable[..., None]) -> None:
    desk = tidy_desk
    scheduler = psutil.Process(desk.scheduler())
    before = scheduler.memory_info().rss
    application = Path(__file__).with_name("empty_jobs.py")
    overrides = ("hydra/launcher=dask", f"number=range({JOBS})", "hydra.sweep.dir=outputs/hydra")
    started = time.monotonic()
    driver = desk.desk.python(str(application), "-m", *overrides, log="empty.log")
    peak = before
    while driver.poll() is None and time.monotonic() < started + 900:
        peak = max(peak, scheduler.memory_info().rss)
        time.sleep(0.5)
    took = time.monotonic() - started
    output = (desk.desk.logs / "empty.log").read_text()
    assert driver.poll() == 0 and f"[{JOBS}/{JOBS}]" in output, output[-3000:]
    measured(f"{JOBS} empty jobs on three hosts: the whole command", took)
    measured("of that for each job and host", took / JOBS * len(desk.macs))
    measured("scheduler's memory before them", before / 1e6, "MB")
    measured("scheduler's memory with them, at most", peak / 1e6, "MB")
    assert peak - before < 100e6
