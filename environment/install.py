"""Fills .venv from requirements.lock. Standard library only: it runs before anything is installed.

The stamp `.venv/ready` is written last and holds the folder it was made in: a set-up that was interrupted, or a project
folder that was moved afterwards, has no valid stamp and starts from nothing.
"""

from __future__ import annotations

import fcntl
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PROJECT = Path.cwd()
VENV = PROJECT / ".venv"
STAMP = VENV / "ready"
LOCK = PROJECT / "requirements.lock"
SOURCES = [LOCK, *(PROJECT / "environment").glob("*.*")]
VENV_PYTHON = VENV / "bin" / "python"
ROOT = os.geteuid() == 0
HELD: list[int] = []  # the lock's file descriptor, while this set-up holds it


def say(line: str) -> None:
    print(f"set-up: {line}", flush=True)


def stop(message: str) -> None:
    print(f"set-up: {message}", file=sys.stderr)
    raise SystemExit(2)


@contextmanager
def locked() -> Iterator[None]:
    """One set-up at a time: a second `make` waits here and then finds the work done.

    The steps inherit the lock (`run`): when this process is killed, the next one waits until its last step has ended.
    """
    with open(PROJECT / ".venv.lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("waiting for another set-up of this folder, or for the last step of one that was killed, to end")
            fcntl.flock(lock, fcntl.LOCK_EX)
        HELD.append(lock.fileno())
        try:
            yield
        finally:
            HELD.clear()


def run(*command: str | Path, hint: str = "The next call starts anew.") -> None:
    """Run one set-up step, which holds the lock as long as it lives; a failing one has told why itself."""
    if subprocess.run([str(part) for part in command], cwd=PROJECT, pass_fds=HELD).returncode != 0:
        stop(f"this step failed, its message is above: {' '.join(map(str, command[:4]))} ... {hint}")


def check_machine() -> None:
    """MLX exists for these machines only; pip's own words for it are "no matching distribution"."""
    machine = (platform.system(), platform.machine())
    if machine not in {("Darwin", "arm64"), ("Linux", "x86_64"), ("Linux", "aarch64")}:
        stop(
            "expected macOS on Apple silicon or Linux on x86-64 or arm64, got "
            f"{' '.join(machine)} ({sys.executable}). On a Mac take an arm64 Python, not one under Rosetta."
        )
    if machine[0] == "Darwin" and int(platform.mac_ver()[0].split(".")[0]) < 14:
        stop(f"expected macOS 14 or newer (MLX needs it), got {platform.mac_ver()[0]}.")


def finished_here() -> bool:
    return STAMP.is_file() and STAMP.read_text().strip() == str(PROJECT)


def install_packages() -> None:
    """Exactly what the lock names, hashes checked, then the project itself from its folder.

    uv is in the lock like everything else; pip installs it from there first: uv takes seconds where pip takes minutes.
    """
    entry = re.search(r"^uv==.*(?:\n[ ]+--hash=.*)+", LOCK.read_text(), re.MULTILINE)
    if entry is None:
        stop("expected uv in requirements.lock, found none. Make the lock again from a working environment: make lock")
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as uv_only:
        uv_only.write(entry.group() + "\n")
        uv_only.flush()
        run(VENV_PYTHON, "-m", "pip", "install", "--quiet", "--no-deps", "--require-hashes", "-r", uv_only.name)
    uv = VENV / "bin" / "uv"
    into = ("--quiet", "--python", VENV_PYTHON)
    run(uv, "pip", "sync", *into, "--require-hashes", "--compile-bytecode", LOCK)
    # The build back-end is in the lock, so nothing is fetched here that no hash covers.
    run(uv, "pip", "install", *into, "--no-deps", "--no-build-isolation", "--editable", PROJECT)


def loads(libraries: list[Path]) -> bool:
    """Whether these libraries load, in this order, in a fresh process and end with an OpenBLAS."""
    code = "import ctypes, sys; [ctypes.CDLL(p, mode=ctypes.RTLD_GLOBAL) for p in sys.argv[1:]][-1].cblas_sgemm"
    return subprocess.run([VENV_PYTHON, "-c", code, *libraries], capture_output=True).returncode == 0


def installed_openblas() -> list[Path]:
    """An OpenBLAS that the system has: the threaded build first, then whatever the loader knows."""
    found = sorted(Path("/usr/lib").glob("*/openblas-pthread/libopenblas.so.0"))
    ldconfig = shutil.which("ldconfig", path=f"{os.environ.get('PATH', '')}:/sbin:/usr/sbin")
    if ldconfig:
        known = subprocess.run([ldconfig, "-p"], capture_output=True, text=True).stdout
        for name in ("libopenblasp.so.0", "libopenblas.so.0"):  # Fedora's threaded build has a name of its own
            found += [Path(path) for path in re.findall(rf"^\s*{re.escape(name)} .*=> (\S+)$", known, re.MULTILINE)]
    return next(([path] for path in found if loads([path])), [])


def unpacked_openblas() -> list[Path]:
    """Debian's OpenBLAS unpacked into .venv/openblas: no root needed, the system is left as it is."""
    if not (shutil.which("apt-get") and shutil.which("dpkg-deb")):
        return []
    # Without this, root is warned that apt's own user cannot write to the temporary folder.
    options = ["-o", "APT::Sandbox::User=root"] if ROOT else []

    def fetch(folder: str, *packages: str) -> bool:
        command = ["apt-get", *options, "download", *packages]
        return subprocess.run(command, cwd=folder, capture_output=True).returncode == 0

    target = VENV / "openblas"
    with tempfile.TemporaryDirectory() as folder:
        needed = ("libopenblas0-pthread", "libgfortran5")
        if not fetch(folder, *needed):
            if not ROOT:
                return []
            subprocess.run(["apt-get", "update"], capture_output=True)  # a bare image has empty package lists
            if not fetch(folder, *needed):
                return []
        fetch(folder, "libquadmath0")  # exists only where the architecture needs it
        shutil.rmtree(target, ignore_errors=True)
        for package in Path(folder).glob("*.deb"):
            command = ["dpkg-deb", "-x", package, target]
            if subprocess.run(command, capture_output=True, pass_fds=HELD).returncode != 0:
                return []
    # In the order of their dependence: each finds the ones before it already loaded.
    names = ("libquadmath.so.0", "libgfortran.so.5", "libopenblas.so.0")
    libraries = [path for name in names for path in sorted(target.glob(f"**/{name}"))[:1]]
    return libraries if loads(libraries) else []


def install_openblas() -> None:
    """Make every Python of this environment load OpenBLAS before MLX (openblas_preload.py says how), or say why not."""
    if platform.system() != "Linux":
        return  # MLX has Metal and Accelerate there
    libraries = installed_openblas() or unpacked_openblas()
    (VENV / "openblas.txt").write_text("".join(f"{path}\n" for path in libraries))
    if not libraries:
        say("found no OpenBLAS and could fetch none: all works, but generation on the CPU is about 35 times slower.")
        say(
            "Install libopenblas0-pthread (Debian, Ubuntu) or openblas (Fedora, Arch), then: rm .venv/ready; make setup"
        )
        return
    code = "import sysconfig; print(sysconfig.get_path('purelib'))"
    site = Path(subprocess.run([VENV_PYTHON, "-c", code], check=True, capture_output=True, text=True).stdout.strip())
    shutil.copy(PROJECT / "environment" / "openblas_preload.py", site)
    (site / "openblas_preload.pth").write_text("import openblas_preload\n")
    say(f"OpenBLAS is preloaded from {libraries[-1]}")


def main() -> None:
    check_machine()
    started = time.monotonic()
    with locked():
        if finished_here():
            if all(source.stat().st_mtime <= STAMP.stat().st_mtime for source in SOURCES):
                return
            STAMP.unlink()
        else:
            say(f"making .venv with Python {platform.python_version()} ({sys.executable})")
            # A step like the others: what it cannot clear or make, it says in a line, and it holds the lock.
            hint = f"Can {VENV} be written, and does nothing else use it? Delete it and call again."
            run(sys.executable, "-I", "-m", "venv", "--clear", "--symlinks", VENV, hint=hint)
        say("installing the packages of requirements.lock (about 0.7 GB; a minute, the first time)")
        install_packages()
        install_openblas()
        STAMP.write_text(f"{PROJECT}\n")
    say(f"done in {time.monotonic() - started:.0f} s")


if __name__ == "__main__":
    main()
