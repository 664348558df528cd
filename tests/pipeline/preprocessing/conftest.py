"""One shared service for each executor and module, and a check that other services leave nothing behind."""

import gc
import importlib.util
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from pipeline.preprocessing.client import BatchSource, InlineSource
from pipeline.preprocessing.dataset import DataSpec
from pipeline.preprocessing.epoch import stream as stream_module
from pipeline.preprocessing.service import Service
from tests.pipeline.preprocessing.fake_workers import Play
from tests.pipeline.preprocessing.reference import (
    CONFIG,
    EXECUTORS,
    SELECTIONS,
    TIGHT_BYTES,
    children,
    eventually,
    memory_descriptors,
    selected,
    source_of,
    transport_of,
)

QUICK = ("inline", "process")


@pytest.fixture(scope="module")
def sources(
    data: DataSpec, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[Callable[[str], BatchSource]]:
    """Name of an executor -> source of its batches. Services start at first use."""
    known: dict[str, BatchSource] = {}
    parts = {name: selected(data, name) for name in SELECTIONS} | {"valid": data}
    with ExitStack() as stack:

        def source(name: str) -> BatchSource:
            executor, workers = EXECUTORS[name]
            if executor == "ray" and importlib.util.find_spec("ray") is None:
                pytest.skip("needs Ray: make setup EXTRAS=ray")
            if name not in known:
                given = {"executor": executor, "workers": workers, "transport": transport_of(name)}
                config = CONFIG.model_copy(update=given)
                if executor == "inline":
                    known[name] = InlineSource(parts, config)
                else:
                    service = stack.enter_context(Service(parts, config, tmp_path_factory.mktemp("service")))
                    known[name] = source_of(service)
            return known[name]

        yield source


@pytest.fixture(params=[pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in EXECUTORS])
def executor(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture
def source(executor: str, sources: Callable[[str], BatchSource]) -> BatchSource:
    """A source of batches for each executor in turn."""
    return sources(executor)


@pytest.fixture(params=SELECTIONS)
def selection(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture
def tight(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A config that lets only a few batches run ahead of the consumer."""
    monkeypatch.setattr(stream_module, "GROUP_ROWS", 160)
    return {"memory_bytes": TIGHT_BYTES}


@pytest.fixture
def nothing_left() -> Iterator[None]:
    """Checks that no process, thread or descriptor of a test remains."""

    def threads() -> set[threading.Thread]:
        return {t for t in threading.enumerate() if t.name.startswith(("preprocessing-", "worker-"))}

    def descriptors() -> bool:
        if memory_descriptors() > before[2]:
            gc.collect()  # iterators that a caught exception holds on to
        return memory_descriptors() <= before[2]

    before = children(), threads(), memory_descriptors()
    yield
    eventually(lambda: children() <= before[0], 10.0, "processes are left")
    eventually(lambda: threads() <= before[1], 10.0, "threads are left")
    eventually(descriptors, 10.0, "descriptors are left")


@pytest.fixture
def transport() -> str:
    """How batches travel in `serve`. test_chaos.py has both ways."""
    return "memory"


@pytest.fixture
def serve(data: DataSpec, tmp_path: Path, nothing_left: None, transport: str) -> Iterator[Callable[..., Service]]:
    """(workers, data, **config) -> a separate service, for tests that disturb it."""
    with ExitStack() as stack:

        def start(workers: int = 2, spec: DataSpec | None = None, **config: object) -> Service:
            config = {"transport": "memory" if config.get("executor") == "inline" else transport} | config
            found = CONFIG.model_copy(update={"executor": "process", "workers": workers} | config)
            folder = tmp_path / f"service-{len(list(tmp_path.glob('service-*')))}"
            return stack.enter_context(Service({"days": spec or data}, found, folder))

        yield start


@pytest.fixture
def play(data: DataSpec, tmp_path: Path) -> Callable[..., Play]:
    return lambda **config: Play(data, tmp_path / "service", **config)
