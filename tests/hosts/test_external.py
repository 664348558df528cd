"""Ranks that torchrun starts on two hosts train as processes of one."""

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from pipeline.errors import ConfigError, TrainingError
from pipeline.jobs.training.rank_spec import RankSpec
from pipeline.training.launch.external import EVENTS, follow_ranks
from pipeline.training.launch.processes import Event, Limits
from tests.hosts.rig import ROOT, Host, Network
from tests.pipeline.conftest import SETTINGS, Run

pytestmark = pytest.mark.slow


@pytest.fixture
def hosts(make_network: Callable[[], Network]) -> tuple[Host, Host]:
    network = make_network()
    return network.add("one"), network.add("two")


def follow(
    spec: RankSpec, start: Callable[[str], None], ranks: dict[str, list[int]] | None = None, **limits: int
) -> Event:
    """Follows the ranks of a spec. `start` gets the command that starts them, and `ranks` those of each table."""
    folder, limit = Path(spec.folder), Limits(deadline_seconds=280, **limits)

    def handle(event: Event) -> None:
        if event["event"] == "awaited":
            start(event["command"])
        if event["event"] == "start" and ranks is not None:
            ranks.update({row["table"]: row["ranks"] for row in event["plan"]})

    given = (spec.training.world_size, 1, limit, handle, ROOT, spec.training.hosts)
    return follow_ranks("pipeline.jobs.training.rank", spec, folder, *given)


def torchrun(hosts: Sequence[Host], command: str, folder: Path) -> None:
    """Starts ranks on each host, by the command that the training prints."""
    assert command.startswith("torchrun ")
    for number, host in enumerate(hosts):
        words = command.replace("=N ", f"={number} ").replace("ADDRESS", hosts[0].address).split()
        with (folder / f"{host.name}.log").open("wb") as log:
            host.start([sys.executable, "-m", "torch.distributed.run", *words[1:]], stdout=log, stderr=log)


def test_ranks_of_torchrun_on_two_hosts_train_as_processes_of_one(
    hosts: tuple[Host, Host], rank_spec: Callable[..., RankSpec], undisturbed: Run, tmp_path: Path
) -> None:
    spec = rank_spec(tmp_path / "run", **SETTINGS, launcher="external")
    found = follow(spec, lambda command: torchrun(hosts, command, tmp_path), hang_seconds=60)
    for name in ("weights_sha256", "valid_ne", "steps", "rows"):
        assert found[name] == undisturbed.result[name]
    assert not (Path(spec.folder) / EVENTS).exists()


def test_tables_that_each_host_divides_among_its_ranks_train_as_whole_ones(
    hosts: tuple[Host, Host], rank_spec: Callable[..., RankSpec], undisturbed: Run, tmp_path: Path
) -> None:
    """Two ranks on each host. Only sums are made in another order."""
    settings = SETTINGS | {"world_size": 4, "hosts": 2, "sharding": "table_row_wise"}
    spec = rank_spec(tmp_path / "run", **settings, launcher="external")
    ranks: dict[str, list[int]] = {}
    found = follow(spec, lambda command: torchrun(hosts, command, tmp_path), ranks=ranks, hang_seconds=60)
    assert sorted(ranks.values()) == [[0, 1], [2, 3]]
    assert (found["steps"], found["rows"]) == (undisturbed.result["steps"], undisturbed.result["rows"])
    assert found["valid_ne"] == pytest.approx(undisturbed.result["valid_ne"], abs=1e-5)
    for name, value in load_file(tmp_path / "run" / "weights.safetensors").items():
        torch.testing.assert_close(value, undisturbed.weights[name], atol=1e-4, rtol=0.0)


def test_ranks_on_other_hosts_than_the_config_says_are_refused(
    hosts: tuple[Host, Host], rank_spec: Callable[..., RankSpec], tmp_path: Path
) -> None:
    """All four on one host."""
    settings = SETTINGS | {"world_size": 4, "hosts": 2, "sharding": "table_row_wise"}
    spec = rank_spec(tmp_path / "run", **settings, launcher="external")

    def start(command: str) -> None:
        torchrun(hosts[:1], command.replace("--nnodes=2 --nproc-per-node=2", "--nnodes=1 --nproc-per-node=4"), tmp_path)

    with pytest.raises(ConfigError) as caught:
        follow(spec, start)
    assert str(caught.value) == (
        "training.hosts: expected 2 hosts with 2 consecutive ranks and LOCAL_WORLD_SIZE=2 on each, got 4 on one with "
        "LOCAL_WORLD_SIZE=4. Start as many ranks on each host (training.resources does that on Ray), or leave out "
        "training.hosts."
    )


def test_a_master_that_is_loopback_on_its_host_is_refused(
    hosts: tuple[Host, Host], rank_spec: Callable[..., RankSpec], tmp_path: Path
) -> None:
    place = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "one"}

    def start(command: str) -> None:
        words = command.split()[-3:]
        hosts[0].start([sys.executable, *words], place | {"MASTER_PORT": "29500"})

    with pytest.raises(TrainingError) as caught:
        follow(rank_spec(tmp_path / "run", **SETTINGS, launcher="external"), start)
    assert str(caught.value) == (
        "MASTER_ADDR: expected an address at which other hosts reach rank 0's, got one, which is loopback on one. "
        "Set it to the IP address, or set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME."
    )
