"""Hosts on one machine: Linux network namespaces on a bridge, each with its own address, name, files and clock.

A process of a host is an ordinary process in the host's namespaces: it can be killed alone, the host's whole set of
processes can be killed at once, its cable can be pulled (packets vanish, nobody is told) and its clock can be wrong.
Needs root on Linux. Names begin with the process id and a number, so that two networks do not meet.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import IO, Any

PROJECT = Path(__file__).resolve().parents[2]
COPIED = ("keyformer", "pipeline", "hydra_plugins", "conf", "requirements.lock", "pyproject.toml")
_SUBNET = "10.77.0"
_CLONE_NEWNET = 0x40000000
_networks = itertools.count()
_CLOCK = Path(__file__).with_name("wrong_clock.c")


class Gone(AssertionError):
    """What a test waited for did not happen in time."""


def wait_until(happened: Callable[[], Any], seconds: float, what: str) -> Any:
    """The first true value of `happened`, asked ten times a second; Gone when it stays false for `seconds`."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if value := happened():
            return value
        time.sleep(0.1)
    raise Gone(f"expected within {seconds:g} s: {what}")


class Host:
    """One machine: `folder` is its project folder, where its processes run and its outputs lie."""

    def __init__(self, network: Network, name: str, number: int) -> None:
        self.name = name
        self.address = f"{_SUBNET}.{number}"
        self.space = f"{network.prefix}-{name}"
        self.folder = network.folder / name / "project"
        self.temporary = network.folder / name / "tmp"
        self.outputs = self.folder / "outputs"
        self.logs = network.folder / name / "logs"
        self.clock_off_by_s = 0
        self._network = network
        self._port = f"v{name}"
        for folder in (self.folder, self.temporary, self.logs):
            folder.mkdir(parents=True)
        self.copy_code()
        _ip("netns", "add", self.space)
        _ip("link", "add", self._port, "netns", network.switch, "type", "veth", "peer", "eth0", "netns", self.space)
        _ip("-n", network.switch, "link", "set", self._port, "master", "br0", "up")
        _ip("-n", self.space, "link", "set", "lo", "up")
        _ip("-n", self.space, "address", "add", f"{self.address}/24", "dev", "eth0")
        _ip("-n", self.space, "link", "set", "eth0", "up")

    def copy_code(self) -> None:
        """The project's code as it is now, whatever lay there."""
        for part in COPIED:
            if (PROJECT / part).is_dir():
                shutil.rmtree(self.folder / part, ignore_errors=True)
                shutil.copytree(PROJECT / part, self.folder / part, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy2(PROJECT / part, self.folder / part)

    # -- processes --

    def start(self, *arguments: str, log: str, **environment: str) -> subprocess.Popen[bytes]:
        """Start `arguments` on this host, its output appended to the file `log`; the pid is the program's own."""
        with open(self.logs / log, "ab") as output:
            return self._popen(arguments, environment, stdout=output, stderr=subprocess.STDOUT)

    def python(self, *arguments: str, log: str, **environment: str) -> subprocess.Popen[bytes]:
        return self.start(sys.executable, *arguments, log=log, **environment)

    def run(self, *arguments: str, timeout: float = 60, **environment: str) -> subprocess.CompletedProcess[str]:
        """Run `arguments` to their end; output and errors together as text."""
        process = self._popen(arguments, environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        try:
            output, _ = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            process.kill()
            output, _ = process.communicate()
            raise Gone(
                f"expected an end of {arguments} within {timeout:g} s: {output.decode(errors='replace')}"
            ) from None
        return subprocess.CompletedProcess(arguments, process.returncode, output.decode(errors="replace"))

    def _popen(
        self, arguments: tuple[str, ...], environment: dict[str, str], stdout: IO[bytes] | int, stderr: int
    ) -> subprocess.Popen[bytes]:
        named = ["unshare", "--uts", "sh", "-c", f'hostname {self.name}; exec "$@"', "sh"]
        return subprocess.Popen(
            ["ip", "netns", "exec", self.space, *named, *arguments],
            cwd=self.folder, env=self._environment() | environment, stdin=subprocess.DEVNULL, stdout=stdout,
            stderr=stderr, start_new_session=True,
        )  # fmt: skip

    def _environment(self) -> dict[str, str]:
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("MLFLOW_", "DASK_", "PYTEST_", "HYDRA_"))}
        # Each host has its own environment in truth: a PYTHONPATH stands for its own editable install.
        own = {"PYTHONPATH": str(self.folder), "TMPDIR": str(self.temporary), "PYTHONUNBUFFERED": "1"}
        own["KEYFORMER_GPU_LOCK"] = str(self.temporary / "gpu.lock")
        if self.clock_off_by_s:
            own |= {"LD_PRELOAD": str(self._network.wrong_clock()), "CLOCK_OFF_BY_S": str(self.clock_off_by_s)}
        return kept | own

    def inside(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call `function` in a thread of this process whose sockets are on this host's network."""

        def enter() -> None:
            with open(f"/run/netns/{self.space}") as space:
                if ctypes.CDLL(None, use_errno=True).setns(space.fileno(), _CLONE_NEWNET):
                    raise OSError(ctypes.get_errno(), "setns")

        with ThreadPoolExecutor(1, initializer=enter) as thread:
            return thread.submit(function, *arguments).result()

    def processes(self) -> dict[int, str]:
        """Command line by pid of everything that runs on this host."""
        found = {}
        for pid in _ip("netns", "pids", self.space).split():
            try:
                found[int(pid)] = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
            except OSError:
                continue
        return found

    def pids(self, part: str) -> list[int]:
        """Processes of this host whose command line holds `part`."""
        return [pid for pid, command in self.processes().items() if part in command]

    def signal_all(self, number: signal.Signals) -> None:
        for pid in self.processes():
            try:
                os.kill(pid, number)
            except ProcessLookupError:
                continue

    # -- faults --

    def kill(self) -> None:
        """Everything on the host dies at once; its kernel still tells its peers, as when all programs crash."""
        _kill(self.space)

    def power_off(self) -> None:
        """The host is gone from one moment to the next, and nobody is told."""
        self.cut_link()
        self.kill()

    def cut_link(self) -> None:
        """No packet comes in or goes out; open connections are not closed."""
        _ip("-n", self._network.switch, "link", "set", self._port, "down")

    def restore_link(self) -> None:
        _ip("-n", self._network.switch, "link", "set", self._port, "up")

    def sleep(self) -> None:
        """As a closed laptop: processes stand still and the network is silent."""
        self.signal_all(signal.SIGSTOP)
        self.cut_link()

    def wake(self) -> None:
        self.restore_link()
        self.signal_all(signal.SIGCONT)

    def small_disk(self, megabytes: int) -> None:
        """From now on the outputs folder, empty again, is a disk of this size."""
        self.outputs.mkdir(exist_ok=True)
        _run("mount", "-t", "tmpfs", "-o", f"size={megabytes}m", self.space, str(self.outputs))

    def fill_disk(self) -> None:
        """Not a byte more fits on the outputs folder."""
        with open(self.outputs / "other-peoples-film", "wb", buffering=0) as film:
            try:
                while True:
                    film.write(bytes(2**16))
            except OSError:
                pass

    def large_disk(self) -> None:
        """Undo small_disk; what lay on it is gone."""
        _run("umount", "--lazy", str(self.outputs))


class Network:
    """A bridge and the hosts on it; as a context manager, everything is taken down however the block ends."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.prefix = f"kf{os.getpid()}.{next(_networks)}"
        self.switch = f"{self.prefix}-switch"
        self.hosts: dict[str, Host] = {}

    def __enter__(self) -> Network:
        _take_down_the_dead()
        try:
            _ip("netns", "add", self.switch)
            _ip("-n", self.switch, "link", "add", "br0", "type", "bridge")
            _ip("-n", self.switch, "link", "set", "br0", "up")
        except BaseException:
            self._take_down()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, at: TracebackType | None) -> None:
        self._take_down()

    def add(self, name: str) -> Host:
        self.hosts[name] = Host(self, name, 10 + len(self.hosts))
        return self.hosts[name]

    def __iter__(self) -> Iterator[Host]:
        return iter(self.hosts.values())

    def wrong_clock(self) -> Path:
        """The library that shifts a process's wall clock; compiled once."""
        library = self.folder / "wrong_clock.so"
        if not library.exists():
            compiler = next(c for c in ("cc", "clang-19", "clang") if shutil.which(c))
            _run(compiler, "-shared", "-fPIC", "-O1", "-o", str(library), str(_CLOCK))
        return library

    def _take_down(self) -> None:
        for host in self:
            _kill(host.space)
            while os.path.ismount(host.outputs):
                host.large_disk()
        for space in _spaces():
            if space.startswith(f"{self.prefix}-"):
                _ip("netns", "delete", space)


def _spaces() -> list[str]:
    return [line.split()[0] for line in _ip("netns", "list").splitlines() if line.strip()]


def _kill(space: str) -> None:
    while pids := _ip("netns", "pids", space).split():
        for pid in pids:
            try:
                os.kill(int(pid), signal.SIGKILL)
            except ProcessLookupError:
                continue
        time.sleep(0.05)


def _take_down_the_dead() -> None:
    """What a test run left that was killed itself."""
    for space in _spaces():
        owner = re.fullmatch(r"kf(\d+)\.\d+-\w+", space)
        if owner and not Path(f"/proc/{owner[1]}").exists():
            _kill(space)
            _ip("netns", "delete", space)


def _ip(*arguments: str) -> str:
    return _run("ip", *arguments)


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout
