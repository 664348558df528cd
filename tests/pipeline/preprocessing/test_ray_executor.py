"""Ray actors die or fall silent: the order stays the same, and nothing of the cluster is left behind."""

import importlib
import json
import os
import signal
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from pipeline.errors import ConfigError
from pipeline.preprocessing.dataset import DataSpec
from pipeline.preprocessing.pool import WORKERS_FILE
from pipeline.preprocessing.service import Service
from pipeline.processes.build import read_build
from pipeline.processes.process import LOCAL_RAY
from pipeline.sealed import seal
from tests.pipeline.preprocessing.reference import CONFIG, alone, client, eventually, order_hash, source_of

pytest.importorskip("ray", reason="needs Ray: make setup EXTRAS=ray")
ray_executor = importlib.import_module("pipeline.preprocessing.ray_executor")


@pytest.mark.nightly
@pytest.mark.cluster
def test_actors_are_killed_and_stopped(data: DataSpec, tmp_path: Path, tight: dict[str, Any]) -> None:
    """One actor gets SIGKILL after the first batch, another SIGSTOP after the second."""
    bounds = {"lease_seconds": 3.0, "attempts": 9, "restart_limit": 8} | tight
    config = CONFIG.model_copy(update={"executor": "ray", "workers": 2} | bounds)
    expected = order_hash(alone(data).batches())
    before = {process.pid for process in psutil.Process().children(recursive=True)}
    with Service({"days": data}, config, tmp_path) as service:
        pids = eventually(lambda: two_workers(tmp_path), 90.0)
        assert [psutil.Process(pid).nice() for pid in pids] == [psutil.Process().nice()] * 2

        def batches():
            for number, batch in enumerate(client(source_of(service), data).batches()):
                if number == 0:
                    eventually(lambda: sent(signal.SIGKILL, two_workers(tmp_path)[:1]), 90.0)
                elif number == 1:
                    eventually(lambda: sent(signal.SIGSTOP, two_workers(tmp_path)[1:]), 90.0)
                yield batch

        assert order_hash(batches()) == expected
        eventually(lambda: service.totals.restarts >= 1)
    left = lambda: {p.pid for p in psutil.Process().children(recursive=True)} - before  # noqa: E731
    eventually(lambda: not left(), 90.0, "processes of Ray are left")


@pytest.mark.nightly
@pytest.mark.cluster
def test_a_process_starts_one_cluster_after_another(data: DataSpec, tmp_path: Path) -> None:
    """Ray writes the folder of a cluster into the settings that it is given, and the folder goes with the cluster."""
    config = CONFIG.model_copy(update={"executor": "ray", "workers": 1})
    hashes, settings = [], dict(LOCAL_RAY)
    for number in range(2):
        with Service({"days": data}, config, tmp_path / f"{number}") as service:
            hashes.append(order_hash(client(source_of(service), data).batches()))
    assert hashes == [order_hash(alone(data).batches())] * 2
    assert settings == LOCAL_RAY


def test_an_actor_with_other_code_or_packages_ends_the_run(data: DataSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its work could have other bits, so no other actor takes its place."""
    actor: Any = ray_executor._Actor.__ray_metadata__.modified_class.__new__(  # type: ignore[attr-defined]
        ray_executor._Actor.__ray_metadata__.modified_class  # type: ignore[attr-defined]
    )
    own = read_build()
    versions = {**own.versions, "numpy": "1.0"}
    given = {"data": {}, "network": None, "build": own.model_copy(update={"versions": versions}).model_dump()}
    with pytest.raises(ConfigError, match=r"^preprocessing worker on host .* the service on host .*, numpy 1\.0, got "):
        actor.begin(*seal(given, actor.make_key()))


def sent(number: int, pids: list[int]) -> bool:
    """Says whether a process got the signal. On a busy machine, a worker may have been replaced meanwhile."""
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)
            return True
    return False


def two_workers(folder: Path) -> list[int]:
    file = folder / WORKERS_FILE
    pids = list(json.loads(file.read_text()).values()) if file.exists() else []
    return pids if len(pids) == 2 else []
