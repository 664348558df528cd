"""Ray Train's ranks give the same weights and errors as processes, and leave nothing behind."""

import importlib.util
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from pipeline.errors import ConfigError, ContractError, TrainingError
from pipeline.jobs.training.rank.spec import RankSpec
from pipeline.preprocessing.service import Service
from pipeline.training.launch.processes import Event, Limits
from pipeline.training.launch.ray_train import run_ranks_on_ray
from tests.pipeline.conftest import SETTINGS, Run

ROOT = Path(__file__).resolve().parents[4]
needs_ray = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs Ray: make setup EXTRAS=ray")


def start(spec: RankSpec, on_event: Callable[[Event], object], restart_limit: int = 1) -> Event:
    limits = Limits(deadline_seconds=800, hang_seconds=400, restart_limit=restart_limit)
    ranks = spec.training.world_size
    return run_ranks_on_ray(
        "pipeline.jobs.training.rank.main", spec, Path(spec.folder), ranks, 1, limits, on_event, ROOT, None
    )


def children() -> list[psutil.Process]:
    """Returns the processes below this one, fork servers excepted: these stay for the next training."""
    found = []
    for one in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):  # it has ended meanwhile
            if one.name().startswith("dlrm") or "pipeline.processes.forkserver" not in one.cmdline():
                found.append(one)
    return found


def left(before: list[psutil.Process]) -> list[psutil.Process]:
    return psutil.wait_procs(set(children()) - set(before), timeout=30)[1]


@needs_ray
@pytest.mark.slow
@pytest.mark.cluster
def test_ranks_of_ray_train_like_processes(
    rank_spec: Callable[..., RankSpec], undisturbed: Run, tmp_path: Path
) -> None:
    """Bit for bit, from the preprocessing service, although a worker is killed and all of them restart."""
    before = children()
    spec = rank_spec(tmp_path / "ray", **SETTINGS, checkpoint_async=False)
    assert spec.valid is not None
    events: list[Event] = []

    def handle(event: Event) -> None:
        events.append(event)
        if event["event"] == "metrics" and event["step"] == 6 and not any(e["event"] == "restart" for e in events):
            workers = [process for process in children() if "RayTrainWorker" in "".join(process.cmdline())]
            assert [worker.nice() for worker in workers] == [psutil.Process().nice()] * 2
            workers[1].send_signal(signal.SIGKILL)

    with Service({"train": spec.train, "valid": spec.valid}, spec.preprocessing, tmp_path / "service") as service:
        found = start(spec.model_copy(update={"service": service.address}), handle)
    assert found["restarts"] == 1
    assert [event["step"] for event in events if event["event"] == "resumed"] == [4]
    for name in ("weights_sha256", "valid_ne", "steps", "rows"):
        assert found[name] == undisturbed.result[name]
    assert not left(before)
    assert not (Path(spec.folder) / "ray").exists()


@needs_ray
@pytest.mark.nightly
@pytest.mark.cluster
def test_ranks_end_with_the_process_that_has_their_connection(
    rank_spec: Callable[..., RankSpec], tmp_path: Path
) -> None:
    """Workers on Ray have this process's. Our errors arrive unchanged. tests/hosts has a training that ends well."""
    before = children()
    spec = rank_spec(tmp_path / "ray", **SETTINGS)
    assert spec.valid is not None

    killed: list[psutil.Process] = []

    def handle(event: Event) -> None:
        if event["event"] == "metrics" and not killed:
            killed.extend(one for one in children() if "pipeline.training.launch.ray_driver" in one.cmdline())
            killed[0].kill()

    preprocessing = spec.preprocessing.model_copy(update={"executor": "ray"})
    with Service({"train": spec.train, "valid": spec.valid}, preprocessing, tmp_path / "service") as service:
        with pytest.raises(TrainingError, match=r"the ranks' connection to Ray: .*, got SIGKILL"):
            start(spec.model_copy(update={"service": service.address}), handle, restart_limit=0)
        with pytest.raises(ContractError) as caught:
            start(rank_spec(tmp_path / "short", world_size=1, max_steps=100), print)
    assert str(caught.value) == (
        "training.max_steps: expected 100 steps, got rows for 14. Raise epochs, or lower max_steps."
    )
    assert not left(before)


def test_without_ray_the_error_names_the_remedy(
    rank_spec: Callable[..., RankSpec], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ray.train.torch", None)
    with pytest.raises(ConfigError) as caught:
        start(rank_spec(tmp_path, world_size=2), print)
    assert str(caught.value) == (
        "training.launcher 'ray': expected Ray with Ray Train, got import of ray.train.torch halted; None in sys.modules. "
        "Run `make setup EXTRAS=ray`."
    )
