"""The hosts themselves: what the fault tests stand on."""

from __future__ import annotations

import signal
import socket
import subprocess
import time
from pathlib import Path

import pytest
from network import Gone, Network, wait_until

pytestmark = [pytest.mark.cluster, pytest.mark.cluster_quick]


@pytest.fixture
def network(tmp_path: Path):
    with Network(tmp_path) as made:
        made.add("head")
        made.add("mac1")
        yield made


def reaches(network: Network) -> bool:
    head = network.hosts["head"].address
    script = f"import socket; socket.create_connection(('{head}', 7000), timeout=1)"
    return network.hosts["mac1"].run("python3", "-c", script).returncode == 0


def test_hosts_differ_in_name_address_and_files_and_reach_each_other(network: Network) -> None:
    head, mac1 = network
    assert [host.run("hostname").stdout.strip() for host in network] == ["head", "mac1"]
    assert mac1.run("pwd").stdout.strip() == str(mac1.folder) and (mac1.folder / "pipeline" / "run.py").is_file()
    assert mac1.run("sh", "-c", "echo $TMPDIR").stdout.strip() == str(mac1.temporary)
    listen = f"import socket; s = socket.create_server(('{head.address}', 7000)); [s.accept() for _ in range(9)]"
    head.start("python3", "-c", listen, log="listen.log")
    wait_until(lambda: reaches(network), 10, "mac1 reaches head")
    mac1.inside(socket.create_connection, (head.address, 7000), 1).close()
    mac1.cut_link()
    assert not reaches(network)
    mac1.restore_link()
    wait_until(lambda: reaches(network), 10, "mac1 reaches head again")


def test_the_processes_of_a_host_are_its_own(network: Network) -> None:
    head, mac1 = network
    there = head.start("sleep", "1000", log="sleep.log")
    here = mac1.start("sleep", "1000", log="sleep.log")
    wait_until(lambda: mac1.pids("sleep 1000"), 5, "sleep runs")
    assert mac1.pids("sleep 1000") == [here.pid] and head.pids("sleep 1000") == [there.pid]
    mac1.sleep()
    state = Path(f"/proc/{here.pid}/stat")
    wait_until(lambda: state.read_text().split()[2] == "T", 5, "stopped")
    mac1.wake()
    wait_until(lambda: state.read_text().split()[2] != "T", 5, "goes on")
    mac1.kill()
    assert here.wait(5) == -signal.SIGKILL and there.poll() is None and not mac1.processes()


def test_a_clock_may_be_wrong_and_waits_are_not(network: Network) -> None:
    _, mac1 = network
    mac1.clock_off_by_s = -3600
    script = """
import datetime, queue, threading, time
started = time.monotonic()
time.sleep(0.1)
threading.Event().wait(0.1)
try: queue.Queue().get(timeout=0.1)
except queue.Empty: pass
print(time.time(), datetime.datetime.now().timestamp(), time.monotonic() - started)
"""
    told, also, waited = map(float, mac1.run("python3", "-c", script, timeout=20).stdout.split())
    assert abs(time.time() - 3600 - told) < 10 and abs(told - also) < 1 and 0.3 <= waited < 3


def test_a_disk_may_be_full(network: Network) -> None:
    _, mac1 = network
    mac1.small_disk(16)
    mac1.fill_disk()
    with pytest.raises(OSError, match="No space left"):
        (mac1.outputs / "more").write_bytes(bytes(2**20))
    mac1.large_disk()
    (mac1.outputs / "more").write_bytes(bytes(2**20))


def test_nothing_is_left_of_a_network_whatever_happens_in_it(tmp_path: Path) -> None:
    process = None
    with pytest.raises(Gone), Network(tmp_path) as network:
        host = network.add("head")
        host.small_disk(16)
        process = host.start("sleep", "1000", log="sleep.log")
        wait_until(lambda: False, 0.2, "never")
    assert process is not None and process.wait(5) == -signal.SIGKILL
    left = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout
    assert network.prefix not in left and str(tmp_path) not in Path("/proc/mounts").read_text()
