"""`install-service`: files that launchd and systemd accept, with the options that were given."""

from __future__ import annotations

import os
import plistlib
import pwd
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.cluster import join, service
from pipeline.cluster.__main__ import main
from pipeline.cluster.supervise import PROJECT
from tests.cluster_processes import ended

OWNER = pwd.getpwuid(PROJECT.stat().st_uid).pw_name


@pytest.fixture
def outputs(tmp_path: Path) -> Path:
    join.make(tmp_path / "out %puts", "127.0.0.2", 8786, 5050)
    return tmp_path / "out %puts"


def test_systemd_unit(
    outputs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "platform", "linux")
    options = ["--head", "10.0.0.1", "--name", 'my "$mac"', "--outputs", str(outputs)]
    assert main(["install-service", "worker", *options, "--print"]) == 0
    unit = capsys.readouterr().out
    assert f"\nWorkingDirectory={PROJECT}\n" in unit and f"\nUser={OWNER}\n" in unit and "\nRestart=always\n" in unit
    line = next(line for line in unit.splitlines() if line.startswith("ExecStart="))
    assert line == (
        f'ExecStart={sys.executable} -m pipeline.cluster worker --outputs "{str(outputs).replace("%", "%%")}" '
        '--head 10.0.0.1 --name "my \\"$$mac\\""'
    )
    if shutil.which("systemd-analyze"):
        file = tmp_path / "keyformer-worker.service"
        file.write_text(unit)
        done = subprocess.run(["systemd-analyze", "verify", str(file)], capture_output=True, text=True)
        assert done.returncode == 0 and "keyformer" not in done.stderr, done.stderr


def test_launch_daemon(outputs: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    options = ["--host", "10.0.0.1", "--auth", "--outputs", str(outputs)]
    assert main(["install-service", "head", *options, "--print"]) == 0
    plist = plistlib.loads(capsys.readouterr().out.encode())
    assert plist["ProgramArguments"] == [
        *(sys.executable, "-m", "pipeline.cluster", "head", "--outputs", str(outputs)),
        *("--host", "10.0.0.1", "--port", "8786", "--mlflow-port", "5050", "--auth"),
    ]
    assert (plist["Label"], plist["WorkingDirectory"], plist["UserName"]) == ("keyformer.head", str(PROJECT), OWNER)
    assert plist["KeepAlive"] is plist["RunAtLoad"] is True
    assert Path(plist["StandardErrorPath"]).parent == outputs / "cluster"
    assert plist["EnvironmentVariables"] == {"PATH": os.environ["PATH"]}


@pytest.mark.parametrize(
    ("platform", "folder", "name", "command"),
    [
        ("linux", "SYSTEMD_UNITS", "keyformer-worker.service", "systemctl enable --now keyformer-worker"),
        ("darwin", "LAUNCH_DAEMONS", "keyformer.worker.plist", "sudo launchctl bootstrap system "),
    ],
)
def test_it_is_written_where_it_belongs_and_the_commands_are_said(
    outputs: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    platform: str,
    folder: str,
    name: str,
    command: str,
) -> None:
    monkeypatch.setattr(sys, "platform", platform)
    monkeypatch.setattr(service, folder, tmp_path)
    assert main(["install-service", "worker", "--outputs", str(outputs)]) == 0
    said = capsys.readouterr().out
    assert f"wrote {tmp_path / name}" in said and command in said
    assert main(["install-service", "worker", "--outputs", str(outputs), "--print"]) == 0
    assert (tmp_path / name).read_text() == capsys.readouterr().out

    monkeypatch.setattr(service, folder, tmp_path / "nowhere")  # as for somebody who is not root
    assert main(["install-service", "worker", "--name", "a b", "--outputs", str(outputs)]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: expected to write {tmp_path / 'nowhere' / name}, got ") and "--name 'a b'" in error


def test_a_worker_without_a_certificate_is_no_service(tmp_path: Path) -> None:
    done = ended("install-service", "worker", "--print", outputs=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert "expected this machine's certificate" in done.stderr


@pytest.mark.parametrize("arguments", [[], ["nonsense"], ["install-service"], ["head", "--port", "x"], ["prefetch"]])
def test_what_is_no_command(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 2
    assert "usage: python -m pipeline.cluster" in capsys.readouterr().err


def test_make_passes_the_addresses_on() -> None:
    def recipe(*words: str) -> str:
        outer = ("MAKEFLAGS", "MFLAGS", "ARGS")  # of the make that runs this test
        environment = {n: v for n, v in os.environ.items() if n not in outer} | {"HOST": "what-tcsh-exports"}
        done = subprocess.run(["make", "-n", *words], cwd=PROJECT, env=environment, capture_output=True, text=True)
        return next(line for line in done.stdout.splitlines() if "pipeline.cluster" in line)

    assert recipe("head").split()[2:] == ["-m", "pipeline.cluster", "head"]
    head = recipe("head", "HOST=10.0.0.1", "ARGS=--auth")
    assert head.split()[2:] == ["-m", "pipeline.cluster", "head", "--host", "10.0.0.1", "--auth"]
    worker = recipe("worker", "HEAD=10.0.0.1:99")
    assert worker.split()[2:] == ["-m", "pipeline.cluster", "worker", "--head", "10.0.0.1:99"]
    assert recipe("status").split()[1:] == ["-m", "pipeline.cluster", "status"]
