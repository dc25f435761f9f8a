"""Parts of the launcher that need no cluster: how a job's folder travels, and how two machines are told apart."""

from __future__ import annotations

import fcntl
import io
import math
import os
import re
import tarfile
from pathlib import Path
from typing import Any

import pytest

from hydra_plugins.dask_launcher import _core, _host
from pipeline.errors import BadInput


def job_folder(folder: Path) -> Path:
    folder.mkdir()
    for name in ("score.json", "responses.jsonl", "published.json", ".lock", "publish.lock", "half.tmp"):
        (folder / name).write_text(name)
    os.utime(folder / "score.json", (1_700_000_000.25, 1_700_000_000.25))
    (folder / "prefill").mkdir()
    return folder


def test_a_jobs_folder_arrives_with_its_times_and_without_locks(tmp_path: Path) -> None:
    packed = _host._packed(job_folder(tmp_path / "there"))
    here = tmp_path / "here"
    here.mkdir()
    (here / "score.json").write_text("of an earlier, longer attempt")
    (here / "mine").touch()
    _core._unpack(packed, here)
    assert {p.name for p in here.iterdir()} == {"score.json", "responses.jsonl", "published.json", ".lock", "mine"}
    assert (here / "score.json").read_text() == "score.json"
    assert (here / "score.json").stat().st_mtime == 1_700_000_000.25  # publishing compares it with published.json's


def test_a_folder_that_arrives_in_part_is_not_taken_for_a_finished_one(tmp_path: Path) -> None:
    there, here = job_folder(tmp_path / "there"), tmp_path / "here"
    (there / "telemetry.json").write_text("{}")
    (here / "telemetry.json").mkdir(parents=True)  # cannot be written, as on a full disk
    with pytest.raises(OSError):
        _core._unpack(_host._packed(there), here)
    assert {path.name for path in here.iterdir()} == {".lock", "responses.jsonl", "telemetry.json"}


def test_a_folder_somebody_works_in_is_left_alone(tmp_path: Path) -> None:
    packed = _host._packed(job_folder(tmp_path / "there"))
    (tmp_path / "here").mkdir()
    with open(tmp_path / "here" / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        _core._unpack(packed, tmp_path / "here")
    assert [p.name for p in (tmp_path / "here").iterdir()] == [".lock"]


@pytest.mark.parametrize("name", ["../outside", "/outside", "sub/inside"])
def test_nothing_is_written_outside_of_the_jobs_folder(name: str, tmp_path: Path) -> None:
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w:gz") as tar:
        tar.addfile(tarfile.TarInfo(name), io.BytesIO())
    with pytest.raises(OSError, match="plain file names"):
        _core._unpack(content.getvalue(), tmp_path / "here")
    assert {p.name for p in tmp_path.rglob("*")} == {"here", ".lock"}


OWN = {
    **{"host": "studio", "backend": "metal", "code": "c", "launcher": "l", "lock": "k", "commit": "abc"},
    "versions": {"mlx": "0.32.4"},
}


@pytest.mark.parametrize(
    ("there", "said"),
    [
        ({}, None),
        ({"commit": "def"}, None),  # a README edit
        ({"backend": "cpu"}, "its backend is cpu"),
        ({"code": "x", "commit": "def"}, r"expected that of commit abc, got def; run `git pull && make setup` on mac1"),
        ({"launcher": "x"}, "git pull"),
        ({"lock": "x"}, r"requirements\.lock; run `git pull && make setup`"),
        ({"versions": {"mlx": "0.31"}}, r"mlx 0\.32\.4 here, 0\.31 there\); run `make setup` on mac1"),
        ({"versions": {}}, "mlx 0.32.4 here, None there"),
    ],
)
def test_what_differs_is_named_with_what_mends_it(there: dict[str, Any], said: str | None) -> None:
    difference = _core._difference(OWN, OWN | {"host": "mac1"} | there)
    assert difference is None if said is None else re.search(said, difference or "")


@pytest.mark.parametrize(
    ("name", "value"),
    [("poll_s", 0), ("poll_s", math.nan), ("poll_s", math.inf), ("wait_for_hosts_s", math.nan), ("retries", -1)],
)
def test_options_that_would_let_a_sweep_hang_are_refused(name: str, value: float, tmp_path: Path) -> None:
    options = {"head": "tcp://127.0.0.1:1", "retries": 1, "poll_s": 1, "wait_for_hosts_s": 1} | {name: value}
    with pytest.raises(BadInput, match=rf"hydra.launcher.{name}: expected .*, got "):
        _core.preflight(options, str(tmp_path), [])


def test_another_model_or_other_data_is_named() -> None:
    own = {"revision": "r1", "dtype": "bfloat16", "backend": "metal", "data": "d1"}
    assert "other data (d1 here, d2 there); delete outputs/data" in _core._other_inputs(
        own, own | {"data": "d2"}, "outputs"
    )
    assert "other model revision (r1 here" in _core._other_inputs(own, own | {"revision": "r2"}, "outputs")
