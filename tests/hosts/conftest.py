"""A network of hosts and a Ray cluster for tests that need more than one. All hosts see the folder of the tests."""

import secrets
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.hosts.cluster import Cluster
from tests.hosts.rig import Network, why_no_hosts
from tests.pipeline.conftest import data, days, make_warehouse, rank_spec, undisturbed  # noqa: F401 - fixtures


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A cluster of hosts on one busy machine may be slow, and two starve each other."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.timeout(900))
            item.add_marker(pytest.mark.cluster)


@pytest.fixture(scope="module")
def make_network(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[], Network]]:
    """() -> a network, which ends with the file's tests: an idle Ray cluster takes a tenth of a processor for a node."""
    reason = why_no_hosts()
    if reason is not None:
        pytest.skip(reason)
    made: list[Network] = []

    def make() -> Network:
        made.append(Network(tmp_path_factory.mktemp("hosts"), (tmp_path_factory.getbasetemp(),)))
        return made[-1]

    yield make
    for network in made:
        network.close()


@pytest.fixture(scope="module")
def cluster(make_network: Callable[[], Network]) -> Cluster:
    """A Ray cluster of a head and two nodes. `one` has the resource `cpu_host`, `two` has `gpu_host`, both `place`."""
    pytest.importorskip("ray", reason="needs Ray: make setup EXTRAS=ray")
    return Cluster(
        make_network(), secrets.token_hex(16), {"one": {"cpu_host": 2, "place": 1}, "two": {"gpu_host": 2, "place": 1}}
    )
