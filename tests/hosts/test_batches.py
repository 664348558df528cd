"""Workers on two hosts and ranks on two others: the batches are those of one host, whatever happens to hosts and links."""

import json
import secrets
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from pipeline.preprocessing.client import InlineSource
from pipeline.preprocessing.dataset import DataSpec
from tests.hosts.cluster import Cluster
from tests.hosts.rig import Host, Network
from tests.hosts.served import hashes
from tests.pipeline.preprocessing.reference import CONFIG, eventually

RANKS = 2
SERVED = (sys.executable, "-W", "ignore", "-m", "tests.hosts.served")


@pytest.fixture
def cluster(make_network: Callable[[], Network]) -> Iterator[Cluster]:
    """A cluster for one test: a host of it is lost."""
    pytest.importorskip("ray", reason="needs Ray: make setup EXTRAS=ray")
    with closing(Cluster(make_network(), secrets.token_hex(16), {"one": {"place": 2}, "two": {"place": 1}})) as made:
        yield made


@pytest.fixture
def expected(data: DataSpec) -> list[list[str]]:
    """The batches of each rank that reads for itself on one host."""
    return [list(hashes(InlineSource({"days": data}, CONFIG), data, rank, RANKS)) for rank in range(RANKS)]


def start(host: Host, cluster: Cluster, *words: str) -> "subprocess.Popen[str]":
    return host.start([*SERVED, *words], cluster.environment, stdout=subprocess.PIPE, text=True)


def lines(process: "subprocess.Popen[str]") -> Iterator[str]:
    assert process.stdout is not None
    for line in process.stdout:
        yield line.strip()


@pytest.mark.nightly
def test_batches_survive_a_cut_link_and_the_loss_of_a_host(
    cluster: Cluster, data: DataSpec, expected: list[list[str]], tmp_path: Path
) -> None:
    folder = tmp_path / "shared"
    folder.mkdir()
    (folder / "spec.json").write_text(data.model_dump_json(), encoding="utf-8")
    service = start(cluster.head, cluster, "cluster", str(folder), cluster.address)
    eventually(lambda: (folder / "address.json").exists() or service.poll() is not None, 120.0)
    address = json.loads((folder / "address.json").read_text(encoding="utf-8"))
    assert address["location"].startswith(f"grpc+tls://{cluster.head.address}:")
    hosts = [cluster.head.network.add(f"rank-{rank}") for rank in range(RANKS)]
    ranks = [start(host, cluster, "rank", str(folder), str(rank), str(RANKS)) for rank, host in enumerate(hosts)]
    found: list[list[str]] = [[] for _ in ranks]
    steps: dict[int, Callable[[], Any]] = {
        3: lambda: hosts[0].cut_link(5.0),
        8: lambda: cluster.nodes["one"].cut_link(20.0),
        20: cluster.nodes["two"].kill,
    }
    for count, batches in enumerate(zip(*map(lines, ranks), strict=False), start=1):
        for rank, batch in enumerate(batches):
            found[rank].append(batch)
        steps.get(count, lambda: None)()
    (folder / "done").touch()
    assert found == expected
    assert json.loads(list(lines(service))[-1])["restarts"] >= 1


@pytest.mark.nightly
def test_a_rank_of_another_host_with_a_wrong_token_is_refused(
    make_network: Callable[[], Network], data: DataSpec, expected: list[list[str]], tmp_path: Path
) -> None:
    """Those with the right one get their batches meanwhile."""
    network = make_network()
    one, two = network.add("one"), network.add("two")
    right, wrong = tmp_path / "right", tmp_path / "wrong"
    for folder in (right, wrong):
        folder.mkdir()
        (folder / "spec.json").write_text(data.model_dump_json(), encoding="utf-8")
    with one.start([*SERVED, "host", str(right), one.address]) as service:
        try:
            eventually(lambda: (right / "address.json").exists() or service.poll() is not None, 120.0)
            address = json.loads((right / "address.json").read_text(encoding="utf-8"))
            assert address["location"].startswith(f"grpc+tls://{one.address}:")
            (wrong / "address.json").write_text(json.dumps(address | {"token": secrets.token_hex(32)}))
            ranks = [start_rank(two, right, rank) for rank in range(RANKS)]
            with pytest.raises(AssertionError) as refused:
                two.run([*SERVED, "rank", str(wrong), "0", str(RANKS)])
            found = [list(lines(rank)) for rank in ranks]
            (right / "done").touch()
            assert service.wait(60) == 0
        finally:
            service.kill()
    assert str(refused.value).strip().splitlines()[-1] == (
        f"pipeline.errors.DataError: preprocessing service at {address['location']}: expected the token of its run, got "
        "another. Start the ranks of the training that runs now: it gives them the token."
    )
    assert found == expected


def start_rank(host: Host, folder: Path, rank: int) -> "subprocess.Popen[str]":
    return host.start([*SERVED, "rank", str(folder), str(rank), str(RANKS)], stdout=subprocess.PIPE, text=True)
