"""The hosts of these tests share what hosts of a cluster share, and nothing else."""

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests.hosts.rig import Host, Network

RESOLVE = "import socket; print(socket.gethostname(), socket.gethostbyname(socket.gethostname()))"
LISTEN = """
import socket, sys
listener = socket.create_server((sys.argv[1], 5000))
abstract = socket.socket(socket.AF_UNIX)
abstract.bind("\\0dlrm-test")
abstract.listen()
open("/tmp/mine", "w").close()
print("ready", flush=True)
while True:
    with listener.accept()[0] as connection:
        connection.sendall(b"hello")
"""
CONNECT = "import socket, sys; print(socket.create_connection((sys.argv[1], 5000), 2).recv(5).decode())"
ABSTRACT = "import socket; socket.socket(socket.AF_UNIX).connect('\\0dlrm-test')"


@pytest.fixture
def hosts(make_network: Callable[[], Network]) -> tuple[Host, Host]:
    """Two hosts, and a server on the first one's address."""
    network = make_network()
    one, two = network.add("one"), network.add("two")
    server = one.start([sys.executable, "-c", LISTEN, one.address], stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    assert server.stdout.readline() == "ready\n"
    return one, two


def python(host: Host, code: str, *words: str) -> str:
    return host.run([sys.executable, "-c", code, *words])


@pytest.mark.nightly
def test_the_name_of_a_host_resolves_to_its_loopback(hosts: tuple[Host, Host]) -> None:
    assert [python(host, RESOLVE).split() for host in hosts] == [["one", "127.0.1.1"], ["two", "127.0.1.1"]]


@pytest.mark.nightly
def test_hosts_reach_each_other_by_address_alone(hosts: tuple[Host, Host]) -> None:
    one, two = hosts
    assert python(two, CONNECT, one.address) == "hello\n"
    for refused in (lambda: python(two, CONNECT, "127.0.0.1"), lambda: python(two, ABSTRACT)):
        with pytest.raises(AssertionError, match="Connection refused"):
            refused()
    python(one, ABSTRACT)
    assert [host.run(["ls", "/tmp"]).split().count("mine") for host in hosts] == [1, 0]


@pytest.mark.nightly
def test_a_link_that_was_cut_carries_again(hosts: tuple[Host, Host]) -> None:
    one, two = hosts
    one.set_link(up=False)
    with pytest.raises(AssertionError, match=r"timed out|No route to host"):
        python(two, CONNECT, one.address)
    one.set_link(up=True)
    limit = time.monotonic() + 240
    while True:  # the kernel remembers for some seconds that nobody answered
        try:
            assert python(two, CONNECT, one.address) == "hello\n"
            break
        except AssertionError:
            if time.monotonic() > limit:
                raise


@pytest.mark.nightly
def test_killing_a_host_ends_all_its_processes_and_no_others(hosts: tuple[Host, Host]) -> None:
    one, two = hosts
    there = [psutil.Process(pid) for pid in _pids(one)]
    assert len(there) > 1
    one.kill()
    assert psutil.wait_procs(there, timeout=10)[1] == []
    two.run(["true"])


def _pids(host: Host) -> list[int]:
    """Returns the ids, seen from here, of a host's processes."""
    space = Path(f"/proc/{host.pid}/ns/pid").readlink()
    found = []
    for process in psutil.process_iter():
        try:
            if Path(f"/proc/{process.pid}/ns/pid").readlink() == space:
                found.append(process.pid)
        except OSError:
            continue
    return found
