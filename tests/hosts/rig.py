"""Hosts in miniature: namespaces of this machine that have nothing in common but its cores and the folders given.

A host has its own loopback, an address on a common network, a name that resolves to 127.0.1.1 as on every Debian, /tmp,
/dev/shm, abstract sockets and process tree. All of them live in processes: when those end, nothing is left of them, also
if the tests are killed. Needs root, and Debian's iproute2 and util-linux.
"""

import os
import shutil
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parents[2]
NETWORK = "10.77.0"
UNSHARE = ("setpriv", "--pdeathsig", "KILL", "unshare", "--fork", "--kill-child", "--net")
SETTLE = """
set -e
name=$1 own=$2
shift 2
hostname "$name"
printf '127.0.0.1 localhost\\n127.0.1.1 %s\\n' "$name" > "$own/hosts"
mount --bind "$own/hosts" /etc/hosts
mount -t tmpfs tmpfs /dev/shm
for path; do
  case $path in /tmp/*)
    mkdir -p "$own/tmp/${path#/tmp/}"
    mount --bind "$path" "$own/tmp/${path#/tmp/}"
  esac
done
mount --rbind "$own/tmp" /tmp
ip link set lo up
trap '' CHLD  # the kernel then reaps orphans
echo ready
exec sleep infinity
"""
"""What the first process of a host does: `sh -c SETTLE sh NAME FOLDER SHARED...`."""


def why_no_hosts() -> str | None:
    """Returns why this machine cannot make hosts, or None if it can."""
    missing = [tool for tool in ("ip", "unshare", "nsenter", "setpriv") if shutil.which(tool) is None]
    if missing:
        return f"needs {', '.join(missing)}: apt-get install iproute2 util-linux"
    tried = subprocess.run(
        [*UNSHARE, "--pid", "--mount-proc", "--uts", "--ipc", "true"], capture_output=True, text=True
    )
    return f"needs namespaces: {tried.stderr.strip()}" if tried.returncode else None


class Host:
    """A host of a network. Its processes run in the project's folder, with the variables of the tests."""

    def __init__(self, network: "Network", name: str, address: str, folder: Path, shared: Sequence[Path]) -> None:
        self.network, self.name, self.address = network, name, address
        (folder / "tmp").mkdir(parents=True, exist_ok=True)
        settle = ["sh", "-c", SETTLE, "sh", name, str(folder), *map(str, shared)]
        self._first = _start_first([*UNSHARE, "--pid", "--mount-proc", "--uts", "--ipc", *settle])
        self.pid = _only_child(self._first)
        """The first process, seen from here."""
        self._inside = psutil.Process(self.pid)

    def run(self, argv: Sequence[str], env: Mapping[str, str] | None = None, timeout: float = 60) -> str:
        """Runs a command and returns what it printed. If it fails, the error shows that."""
        process = self.start(argv, env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        try:
            output: str = process.communicate(timeout=timeout)[0]
        finally:
            process.kill()
        assert process.returncode == 0, f"{self.name}: {' '.join(argv)} exited {process.returncode}:\n{output}"
        return output

    def start(self, argv: Sequence[str], env: Mapping[str, str] | None = None, **options: Any) -> subprocess.Popen[Any]:
        """Starts a command. It ends with the host at the latest.

        Args:
            options: Of `subprocess.Popen`.
        """
        enter = ["nsenter", f"--target={self.pid}", "--net", "--pid", "--mount", "--uts", "--ipc"]
        command = [*enter, "env", f"--chdir={ROOT}", *argv]
        return subprocess.Popen(command, env=os.environ | dict(env or {}), stdin=subprocess.DEVNULL, **options)

    def kill(self) -> None:
        """Ends all processes of the host at once, as a power failure does."""
        with suppress(psutil.NoSuchProcess):  # or another process, which has its number by now
            self._inside.kill()
        self._first.wait()

    def set_link(self, up: bool) -> None:
        """Plugs the network cable in or pulls it. Connections stay open and carry nothing meanwhile."""
        self.network.run(["ip", "link", "set", self.name, "up" if up else "down"])

    def cut_link(self, seconds: float) -> None:
        """Pulls the network cable for so long."""
        self.set_link(up=False)
        time.sleep(seconds)
        self.set_link(up=True)


class Network:
    """A network without hosts at first: a bridge in a namespace of its own."""

    def __init__(self, folder: Path, shared: Sequence[Path] = ()) -> None:
        self.folder, self.shared = folder, shared
        self.hosts: list[Host] = []
        self._first = _start_first([*UNSHARE, "sh", "-c", "echo ready; exec sleep infinity"])
        self.pid = _only_child(self._first)
        self.run(["ip", "link", "add", "bridge", "up", "type", "bridge"])

    def add(self, name: str) -> Host:
        """Adds a host. Its address is the next one."""
        address = f"{NETWORK}.{len(self.hosts) + 1}"
        host = Host(self, name, address, self.folder / name, (ROOT, *self.shared))
        self.hosts.append(host)
        self.run(
            [
                "ip",
                "link",
                "add",
                name,
                "up",
                "master",
                "bridge",
                "type",
                "veth",
                "peer",
                "eth0",
                "netns",
                f"{host.pid}",
            ]
        )
        host.run(["ip", "address", "add", f"{address}/24", "dev", "eth0"])
        host.run(["ip", "link", "set", "eth0", "up"])
        return host

    def run(self, argv: Sequence[str]) -> None:
        """Runs a command where the bridge is."""
        subprocess.run(["nsenter", f"--target={self.pid}", "--net", *argv], check=True)

    def close(self) -> None:
        """Ends all hosts and the network."""
        for host in self.hosts:
            host.kill()
        self._first.kill()
        self._first.wait()


def _start_first(argv: Sequence[str]) -> subprocess.Popen[str]:
    process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    with process.stdout as output:
        assert output.readline() == "ready\n", f"{' '.join(argv)} failed"
    return process


def _only_child(process: subprocess.Popen[str]) -> int:
    (child,) = psutil.Process(process.pid).children()
    return int(child.pid)
