"""The set-up, as far as it goes without a network: when `make` does it, which Python it takes, what is locked."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

PROJECT = Path(__file__).resolve().parent.parent
LOCK = (PROJECT / "requirements.lock").read_text()
PYPROJECT = tomllib.loads((PROJECT / "pyproject.toml").read_text())
# `make test` itself hands these to the makes that run in here.
ENVIRONMENT = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MAKELEVEL", "PYTHON")}


def make(*arguments: str, folder: Path = PROJECT) -> subprocess.CompletedProcess:
    return subprocess.run(["make", *arguments], cwd=folder, env=ENVIRONMENT, capture_output=True, text=True)


def test_help_is_the_default_and_lists_every_target() -> None:
    makefile = (PROJECT / "Makefile").read_text()
    targets = set(re.findall(r"^([a-z-]+):", makefile, re.MULTILINE))
    assert {"setup", "sweep", "stop", "ui", "report", "test", "test-browser", "lint", "lock"} <= targets
    listed = re.findall(r"^  make ([a-z-]+) +\S", make().stdout, re.MULTILINE)
    assert sorted(listed) == sorted(targets)


def is_set_up(folder: Path) -> bool:
    """Whether `make setup` would do nothing there."""
    code = make("--question", "setup", folder=folder).returncode
    assert code in (0, 1)
    return code == 0


def test_make_trusts_only_a_finished_and_current_environment(tmp_path: Path) -> None:
    folder = tmp_path / "project"
    shutil.copytree(PROJECT / "environment", folder / "environment")
    for name in ("Makefile", "requirements.lock"):
        shutil.copy(PROJECT / name, folder)
    assert not is_set_up(folder)
    (folder / ".venv" / "bin").mkdir(parents=True)  # what an interrupted set-up leaves
    assert not is_set_up(folder)
    stamp = folder / ".venv" / "ready"
    stamp.write_text(f"{folder}\n")
    assert is_set_up(folder)
    later = stamp.stat().st_mtime_ns + 1_000_000_000
    for changed in (folder / "requirements.lock", folder / "environment" / "install.py"):
        before = changed.stat().st_mtime_ns
        os.utime(changed, ns=(later, later))
        assert not is_set_up(folder)
        os.utime(changed, ns=(before, before))
    assert is_set_up(folder)
    folder.rename(tmp_path / "elsewhere")
    assert not is_set_up(tmp_path / "elsewhere")


def fake_python(path: Path, version: str, works: bool) -> None:
    """Answers as a Python would to `-c <check>` and `--version`; as an interpreter it says its own name."""
    path.write_text(
        f'#!/bin/sh\ncase "$1" in -c) exit {0 if works else 1};; --version) {version};; *) echo "$0 runs $1";; esac\n'
    )
    path.chmod(0o755)


@pytest.fixture
def programs(tmp_path: Path) -> Path:
    """A folder to be all of PATH: what setup.sh itself needs, and no Python yet."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("dirname", "head"):
        found = shutil.which(name)
        assert found
        (folder / name).symlink_to(found)
    return folder


def set_up(path: Path, **variables: str) -> subprocess.CompletedProcess:
    bash = shutil.which("bash")
    assert bash
    command = [bash, str(PROJECT / "environment" / "setup.sh")]
    return subprocess.run(command, env={"PATH": str(path)} | variables, capture_output=True, text=True)


def test_a_python_that_works_is_found_behind_ones_that_do_not(programs: Path) -> None:
    fake_python(programs / "python3.13", "exit 127", works=False)  # a pyenv shim without its version
    fake_python(programs / "python3.11", "echo Python 3.11.9", works=True)
    fake_python(programs / "python3", "echo Python 3.14.0", works=False)
    assert set_up(programs).stdout == f"{programs / 'python3.11'} runs environment/install.py\n"
    assert set_up(programs, PYTHON=str(programs / "python3.11")).stdout.endswith("runs environment/install.py\n")


def test_no_fitting_python_is_one_clear_message(programs: Path) -> None:
    done = set_up(programs)
    assert done.returncode == 2
    assert "expected Python 3.11, 3.12 or 3.13 with its venv module, got: no python at all." in done.stderr
    fake_python(programs / "python3.13", "exit 127", works=False)
    fake_python(programs / "python3", "echo Python 3.9.2", works=False)
    done = set_up(programs)
    assert done.returncode == 2
    assert f"{programs / 'python3.13'} (does not start) {programs / 'python3'} (Python 3.9.2)" in done.stderr
    done = set_up(programs, PYTHON="/no/such/python")
    assert done.returncode == 2
    assert "/no/such/python (does not start)" in done.stderr
    assert "make setup PYTHON=" in done.stderr


def test_the_check_knows_the_versions() -> None:
    check = re.search(r"-c '(.*)'", (PROJECT / "environment" / "setup.sh").read_text())
    assert check
    for version, fits in (((3, 10), False), ((3, 11), True), ((3, 12), True), ((3, 13), True), ((3, 14), False)):
        code = f"import sys; sys.version_info = {version}; {check.group(1)}"
        assert (subprocess.run([sys.executable, "-c", code]).returncode == 0) == fits


def test_the_lock_pins_everything_by_hash_and_names_no_host() -> None:
    assert "://" not in LOCK
    entries = re.split(r"^(?=[^\s#])", LOCK, flags=re.MULTILINE)[1:]
    for entry in entries:
        assert re.match(r"[a-z0-9-]+==\S+", entry), entry
        assert "--hash=sha256:" in entry, entry
    names = {entry.split("==")[0] for entry in entries}
    assert not names & {"torch", "tensorflow", "jax"}
    project = PYPROJECT["project"]
    extras = [requirement for extra in project["optional-dependencies"].values() for requirement in extra]
    for requirement in [*project["dependencies"], *extras]:
        name, pin = re.match(r"([A-Za-z0-9-]+)[^=;]*(==[^;]+)?", requirement).groups()
        assert name.lower() in names, requirement
        assert pin is None or f"\n{name.lower()}{pin} " in f"\n{LOCK}", requirement
    assert PYPROJECT["build-system"]["requires"][0] in LOCK  # so that nothing unhashed is fetched to build with


def install(folder: Path, code: str) -> subprocess.Popen:
    """Python code over environment/install.py (as `install`) with `folder` as the project."""
    code = f"import sys\nsys.path.insert(0, sys.argv[1])\nimport install\n{code}"
    command = [sys.executable, "-c", code, str(PROJECT / "environment")]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, cwd=folder, stdin=pipe, stdout=pipe, stderr=pipe, text=True)


def test_the_step_of_a_killed_set_up_still_holds_the_lock(tmp_path: Path) -> None:
    step = "import sys; print('at work', flush=True); sys.stdin.read()"
    first = install(tmp_path, f"with install.locked(): install.run(sys.executable, '-c', {step!r})")
    assert first.stdin and first.stdout
    assert first.stdout.readline() == "at work\n"
    first.kill()
    first.wait()
    second = install(tmp_path, "with install.locked(): print('mine')")
    assert second.stdout
    assert second.stdout.readline().startswith("set-up: waiting for another set-up")
    first.stdin.close()  # the orphaned step ends
    assert second.communicate()[0] == "mine\n"


def test_a_venv_that_cannot_be_made_is_one_clear_message(tmp_path: Path) -> None:
    (tmp_path / ".venv").write_text("a file where the folder should be")
    process = install(tmp_path, "install.main()")
    errors = process.communicate()[1]
    assert process.returncode == 2
    assert "Traceback" not in errors and f"Can {tmp_path / '.venv'} be written" in errors


has_openblas = pytest.mark.skipif(
    not (Path(sys.prefix) / "openblas.txt").is_file() or not (Path(sys.prefix) / "openblas.txt").read_text(),
    reason="no OpenBLAS in this environment (macOS needs none)",
)


@has_openblas
def test_every_python_of_the_environment_multiplies_with_openblas() -> None:
    code = """
import ctypes, sys
import mlx.core as mx, numpy as np
a, b = (np.random.default_rng(seed).normal(size=(1024, 1024)).astype(np.float32) for seed in (1, 2))
product = np.array(mx.matmul(mx.array(a), mx.array(b), stream=mx.cpu))
assert np.allclose(product, a.astype(np.float64) @ b, atol=1e-3)
# MLX binds to the first cblas_sgemm of the global scope; that one must be OpenBLAS's.
path = (open(sys.prefix + "/openblas.txt").read().splitlines())[-1]
address = lambda library: ctypes.cast(library.cblas_sgemm, ctypes.c_void_p).value
assert address(ctypes.CDLL(None)) == address(ctypes.CDLL(path))
print(sum("openblas" in line for line in open("/proc/self/maps")))
"""
    done = subprocess.run([sys.executable, "-c", code], cwd="/", capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 0
    assert done.stderr == ""


def test_an_openblas_that_went_away_is_said_and_does_no_harm(tmp_path: Path) -> None:
    (tmp_path / "openblas.txt").write_text("/no/such/libopenblas.so.0\n")
    code = "import runpy, sys; sys.prefix = sys.argv[1]; runpy.run_path(sys.argv[2])"
    preload = PROJECT / "environment" / "openblas_preload.py"
    done = subprocess.run([sys.executable, "-c", code, tmp_path, preload], capture_output=True, text=True)
    assert done.returncode == 0
    assert done.stderr.startswith("OpenBLAS is gone") and "make setup" in done.stderr
    assert len(done.stderr.splitlines()) == 1
