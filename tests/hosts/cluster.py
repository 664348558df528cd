"""A Ray cluster of several hosts, as its administrator would start it."""

import json
import sys
from collections.abc import Mapping

from pipeline.processes.process import LOCAL_RAY
from tests.hosts.rig import Host, Network

PORT = 6379
STORE_BYTES = 128 << 20
START = (
    sys.executable, "-m", "ray.scripts.scripts", "start", "--disable-usage-stats", f"--object-store-memory={STORE_BYTES}",
)  # fmt: skip


class Cluster:
    """A head without processors for work, and nodes with two each, which have their name as the label `host`.

    Args:
        token: What Ray demands of all that join or connect.
        resources: Node -> its resources besides processors.
    """

    def __init__(self, network: Network, token: str, resources: Mapping[str, Mapping[str, float]]) -> None:
        self.environment = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token, "RAY_USAGE_STATS_ENABLED": "0"}
        self.head = network.add("head")
        self.address = f"{self.head.address}:{PORT}"
        system = ["--include-dashboard=false", "--system-config", json.dumps(LOCAL_RAY)]
        self._start(self.head, ["--head", f"--port={PORT}", "--num-cpus=0", *system])
        self.nodes: dict[str, Host] = {}
        for name, own in resources.items():
            self.add(name, own)

    def add(self, name: str, resources: Mapping[str, float]) -> None:
        """Adds a node."""
        self.nodes[name] = self.head.network.add(name)
        words = ["--num-cpus=2", "--resources", json.dumps(resources), f"--labels=host={name}"]
        self._start(self.nodes[name], [f"--address={self.address}", *words])

    def run(self, module: str, *words: str, timeout: float = 600) -> str:
        """Runs a module of ours on the head, connected to the cluster, and returns what it printed."""
        return self.head.run([sys.executable, "-m", module, *words], self.environment, timeout)

    def close(self) -> None:
        """Ends it with its hosts."""
        self.head.network.close()

    def _start(self, host: Host, words: list[str]) -> None:
        host.run([*START, f"--node-ip-address={host.address}", *words], self.environment, timeout=240)
