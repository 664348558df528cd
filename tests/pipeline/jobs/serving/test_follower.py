"""Following an alias: the served version is stale by what the registry says, whatever goes wrong on the way."""

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import requests

from pipeline.errors import RegistryError
from pipeline.jobs.serving import follower as module
from pipeline.jobs.serving.follower import RegistryFollower
from pipeline.serving.config import ServedVersion, ServingConfig
from pipeline.serving.supervisor import FetchedVersion


class Registry:
    """What the alias names, and how the registry behaves."""

    def __init__(self) -> None:
        self.version: int | None = 1
        self.error: Exception | None = None
        self.hangs: threading.Event | None = None
        self.damaged: set[int] = set()


class Follower(RegistryFollower):
    """Asks a registry in memory."""

    def __init__(self, registry: Registry, folder: Path) -> None:
        config: Any = ServingConfig().model_copy(update={"poll_seconds": 0.01})
        tracker: Any = None
        super().__init__(config, tracker, "m", folder)
        self.registry, self.served, self.number = registry, "files of 1", 1

    def find(self) -> tuple[int, str]:
        if self.registry.error is not None:
            raise self.registry.error
        if self.registry.version is None:
            raise RegistryError("alias 'champion' of model 'm'", "a version", "none", "Set it.")
        return self.registry.version, f"files of {self.registry.version}"

    def fetch(self, version: int) -> tuple[FetchedVersion, Callable[[], None]]:
        self.number += 1
        number, hangs = self.number, self.registry.hangs
        if hangs is not None:
            hangs.wait(60)
        folder = self.folder / f"{number}"
        folder.mkdir()
        served = ServedVersion(model="m", version=version, run_id="r", snapshot=None)
        return FetchedVersion(number, served, folder), lambda: self.check(version)

    def check(self, version: int) -> None:
        if version in self.registry.damaged:
            raise RegistryError(
                "model 'm'", "the files that were registered", "another weights.safetensors", "Restore."
            )


class Served:
    """Stands for the supervisor. It serves what is offered, unless it is told to wait."""

    def __init__(self, folder: Path) -> None:
        self.stale: str | None = None
        self.rejected: int | None = None
        self.current = FetchedVersion(1, ServedVersion(model="m", version=1, run_id="r", snapshot=None), folder)
        self.waits = False

    def offer(self, version: FetchedVersion) -> None:
        if not self.waits:
            self.current, self.stale = version, None

    def report_failure(self, version: str, reason: str) -> None:
        self.stale = f"version {version} cannot be served"


def until(holds: Callable[[], bool]) -> None:
    limit = time.monotonic() + 30
    while not holds():
        assert time.monotonic() < limit
        time.sleep(0.002)


@pytest.fixture
def following(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    for name, seconds in (("LOOK_SECONDS", 0.3), ("LOOK_STEP_SECONDS", 0.01), ("UNKNOWN_SECONDS", 0.1)):
        monkeypatch.setattr(module, name, seconds)
    registry, served, stopped = Registry(), Served(tmp_path), threading.Event()
    follower: Any = Follower(registry, tmp_path)
    thread = threading.Thread(target=follower.follow, args=(served, stopped), daemon=True)
    thread.start()
    yield SimpleNamespace(registry=registry, served=served, follower=follower, thread=thread)
    assert thread.is_alive()
    stopped.set()
    thread.join(30)


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (RegistryError("model 'm'", "a version", "none", "Train one."), "expected a version"),
        (requests.ConnectionError("refused"), "the registry does not answer"),
        (OSError("no route"), "the registry does not answer"),
        (AttributeError("odd"), "odd"),
        (KeyError("odd"), "odd"),
    ],
)
def test_trouble_makes_the_version_stale_until_it_is_over(following: SimpleNamespace, error: Any, reason: str) -> None:
    following.registry.error = error
    until(lambda: following.served.stale is not None)
    assert reason in following.served.stale
    following.registry.error = None
    until(lambda: following.served.stale is None)


def test_a_removed_alias_is_stale_and_may_come_back(following: SimpleNamespace) -> None:
    following.registry.version = None
    until(lambda: following.served.stale is not None)
    following.registry.version = 1
    until(lambda: following.served.stale is None)
    following.registry.version = 2
    until(lambda: following.served.current.version.version == 2 and following.served.stale is None)


def test_a_version_that_is_not_yet_served_is_stale(following: SimpleNamespace) -> None:
    following.served.waits = True
    following.registry.version = 2
    until(lambda: following.served.stale == "version 2 is being loaded")
    following.served.waits = False
    following.registry.version = 3
    until(lambda: following.served.current.version.version == 3 and following.served.stale is None)


def test_a_damaged_version_is_never_offered_and_its_files_go(following: SimpleNamespace) -> None:
    following.registry.damaged.add(2)
    following.registry.version = 2
    until(lambda: following.served.stale == "version 2 cannot be served")
    assert following.served.current.version.version == 1
    assert not (following.follower.folder / "2").exists()
    following.registry.version = 3
    until(lambda: following.served.current.version.version == 3 and following.served.stale is None)


def test_a_download_that_hangs_is_given_up(following: SimpleNamespace) -> None:
    go = threading.Event()
    following.registry.hangs = go
    following.registry.version = 2
    until(lambda: following.served.stale is not None)
    until(lambda: following.follower.number == 2)
    following.registry.hangs = None
    following.follower.again = 0.0
    until(lambda: following.follower.turn > 1 and following.served.current.version.version == 2)
    until(lambda: following.served.stale is None)
    assert following.served.current.number > 2
    go.set()
    until(lambda: not (following.follower.folder / "2").exists())
    assert following.served.current.number > 2
