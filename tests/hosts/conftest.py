"""A network of hosts for tests that need more than one."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.hosts.rig import Network, why_no_hosts


@pytest.fixture(scope="session")
def make_network() -> Iterator[Callable[..., Network]]:
    """(folder, shared) -> a network, which ends with the tests. `shared` are folders that all hosts see."""
    reason = why_no_hosts()
    if reason is not None:
        pytest.skip(reason)
    made: list[Network] = []

    def make(folder: Path, shared: tuple[Path, ...] = ()) -> Network:
        made.append(Network(folder, shared))
        return made[-1]

    yield make
    for network in made:
        network.close()
