"""Who is alive: told by what changes on the server and by processes, never by a host's clock."""

from __future__ import annotations

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
from mlflow.entities import Run, RunData, RunInfo, RunTag

from pipeline import leases
from pipeline.leases import BEAT_S, CONFIRM_S, LEASE_S, Watch, is_mine, looks_alive, process_lives, signs_of_life

NOW = 1_800_000_000.0


def running(lease: float | None = NOW, process: str = "another machine:1:1", kind: str = "job") -> Run:
    tags = {"kind": kind, "process": process} | ({} if lease is None else {"lease": str(int(lease))})
    info = RunInfo("r", "0", "u", "RUNNING", int(NOW * 1000), None, "active")
    return Run(info, RunData(tags=[RunTag(*tag) for tag in tags.items()]))


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The watcher's own clock, in clock[0]."""
    now = [500.0]
    monkeypatch.setattr(leases, "time", SimpleNamespace(monotonic=lambda: now[0]))
    return now


@pytest.mark.parametrize("off", [-3600.0, 0.0, 3600.0], ids=lambda off: f"{off:+.0f} s")
def test_a_lease_that_moves_is_alive_and_one_that_does_not_is_dead_whatever_it_says(
    clock: list[float], off: float
) -> None:
    watch = Watch()
    for beat in range(30):  # written by a clock that is off by an hour: an old version, or a server that does not tell
        verdict = watch.look([running(NOW + off + beat * BEAT_S)], NOW + beat * BEAT_S)["r"]
        assert verdict is not False and (verdict is True or beat == 0)
        clock[0] += BEAT_S
    last, died = NOW + off + 29 * BEAT_S, clock[0]
    while watch.look([running(last)], NOW + 290 + clock[0] - died)["r"] is not False:
        clock[0] += BEAT_S
        assert clock[0] - died <= LEASE_S + 2 * BEAT_S
    assert clock[0] - died >= CONFIRM_S - BEAT_S


def test_a_stale_lease_is_confirmed_before_it_counts(clock: list[float]) -> None:
    watch = Watch()
    for waited in (0, 10, 20):
        assert watch.look([running(NOW - 500)], NOW + waited)["r"] is None
        clock[0] += 10
    assert watch.look([running(NOW - 500)], NOW + 30)["r"] is False
    assert Watch().look([running(None)], NOW)["r"] is None  # it may be about to write its first one


def test_what_could_not_be_renewed_while_the_server_was_away_is_not_dead(clock: list[float]) -> None:
    watch = Watch()
    watch.look([running(NOW)], NOW)
    clock[0] += 10
    watch.look([running(NOW)], NOW + 10)
    clock[0] += 300  # the server was away: nobody could look, nobody could renew
    assert watch.look([running(NOW)], NOW + 310)["r"] is None
    clock[0] += 10
    assert watch.look([running(NOW)], NOW + 320)["r"] is None
    clock[0] += 10
    assert watch.look([running(NOW + 325)], NOW + 330)["r"] is True


def test_processes_of_this_machine_are_asked_themselves(clock: list[float]) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        started = leases._started(child.pid)
        machine = leases._machine()
        alive = f"{machine}:{child.pid}:{started}"
        assert process_lives(running(process=alive)) is True
        assert looks_alive(running(process=alive), NOW + 10) and not looks_alive(running(process=alive), NOW + 500)
        watch = Watch()
        assert watch.look([running(process=alive)], NOW + 10)["r"] is True
        assert watch.look([running(NOW - 500, alive)], NOW)["r"] is None  # a job that does not renew hangs, perhaps
        assert watch.look([running(NOW - 500, alive, "sweep")], NOW)["r"] is True  # a driver may be suspended
        if sys.platform == "linux":  # the number is another process's now
            assert process_lives(running(process=f"{machine}:{child.pid}:1")) is False
        child.kill()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert process_lives(running(process=alive)) is False  # dead, though nobody has looked after it yet
    assert process_lives(running(process=alive)) is False
    assert watch.look([running(NOW, alive)], NOW)["r"] is False
    for elsewhere in (f"{machine}x:{child.pid}:{started}", "mini-2:1", "", "nonsense"):
        assert process_lives(running(process=elsewhere)) is None
    ours = signs_of_life(NOW)
    assert ours["lease"] == str(int(NOW))
    assert process_lives(running(process=ours["process"])) is True and is_mine(running(process=ours["process"]))
    assert not is_mine(running(process=alive))
