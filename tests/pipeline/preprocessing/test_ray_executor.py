"""Ray actors that die or fall silent: the order stays the same, and nothing of the cluster is left."""

import json
import os
import signal
from pathlib import Path

import psutil
import pytest

from pipeline.preprocessing.client import Connection
from pipeline.preprocessing.config import PreprocessingConfig
from pipeline.preprocessing.master import WORKERS_FILE
from pipeline.preprocessing.service import Service
from pipeline.preprocessing.worker import DataSpec
from tests.pipeline.preprocessing.reference import alone, client, eventually, order_hash

pytest.importorskip("ray", reason="needs Ray: make setup EXTRAS=ray")


@pytest.mark.slow
def test_fault_14_and_15_actors_are_killed_and_stopped(data: DataSpec, tmp_path: Path) -> None:
    """One actor gets SIGKILL after the first batch, another SIGSTOP after the second."""
    config = PreprocessingConfig(
        executor="ray", workers=2, split_rows=100, lease_seconds=3.0, memory_bytes=8 << 20, restart_limit=8
    )
    expected = order_hash(alone(data).batches())
    before = {process.pid for process in psutil.Process().children(recursive=True)}
    with Service({"days": data}, config, tmp_path) as service:
        pids = eventually(lambda: two_workers(tmp_path), 90.0)

        def batches():
            for number, batch in enumerate(client(Connection(service.address), data).batches()):
                if number == 0:
                    os.kill(pids[0], signal.SIGKILL)
                elif number == 1:
                    os.kill(pids[1], signal.SIGSTOP)
                yield batch

        assert order_hash(batches()) == expected
        gone = eventually(lambda: service.totals.restarts >= 1, 30.0)
        assert gone
    left = lambda: {p.pid for p in psutil.Process().children(recursive=True)} - before  # noqa: E731
    eventually(lambda: not left(), 90.0, "processes of Ray are left")


def two_workers(folder: Path) -> list[int]:
    file = folder / WORKERS_FILE
    pids = list(json.loads(file.read_text()).values()) if file.exists() else []
    return pids if len(pids) == 2 else []
