"""Ranks that torchrun starts on two hosts train as processes of one."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from pipeline.errors import TrainingError
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


def follow(spec: RankSpec, start: Callable[[str], None], **limits: int) -> Event:
    """Follows the ranks of a spec. `start` gets the command that starts them."""
    folder, limit = Path(spec.folder), Limits(deadline_seconds=280, **limits)

    def handle(event: Event) -> None:
        if event["event"] == "awaited":
            start(event["command"])

    return follow_ranks("pipeline.jobs.training.rank", spec, folder, spec.training.world_size, 1, limit, handle, ROOT)


def test_ranks_of_torchrun_on_two_hosts_train_as_processes_of_one(
    hosts: tuple[Host, Host], rank_spec: Callable[..., RankSpec], undisturbed: Run, tmp_path: Path
) -> None:
    """By the command that the training prints."""
    spec = rank_spec(tmp_path / "run", **SETTINGS, launcher="external")

    def start(command: str) -> None:
        assert command.startswith("torchrun ")
        for number, host in enumerate(hosts):
            words = command.replace("=N ", f"={number} ").replace("ADDRESS", hosts[0].address).split()
            with (tmp_path / f"{host.name}.log").open("wb") as log:
                host.start([sys.executable, "-m", "torch.distributed.run", *words[1:]], stdout=log, stderr=log)

    found = follow(spec, start, hang_seconds=60)
    for name in ("weights_sha256", "valid_ne", "steps", "rows"):
        assert found[name] == undisturbed.result[name]
    assert not (Path(spec.folder) / EVENTS).exists()


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
