"""What the cluster itself costs: 200 jobs that do nothing."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from desk import Desk

pytestmark = pytest.mark.cluster
JOBS = 200


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
