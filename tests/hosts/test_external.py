"""Ranks that torchrun starts on two hosts train as processes of one."""

import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file

from pipeline.errors import ConfigError, TrainingError
from pipeline.jobs.training.rank.spec import RankSpec
from pipeline.training.launch.external import EVENTS, follow_ranks
from pipeline.training.launch.processes import Event, Limits
from tests.hosts.rig import ROOT, Host, Network
from tests.pipeline.conftest import SETTINGS, Run


@pytest.fixture
def hosts(make_network: Callable[[], Network]) -> tuple[Host, Host]:
    network = make_network()
    return network.add("one"), network.add("two")


def follow(spec: RankSpec, handle: Callable[[Event], None], **limits: int) -> Event:
    folder, limit = Path(spec.folder), Limits(deadline_seconds=550, **limits)
    given = (spec.training.world_size, 1, limit, handle, ROOT, spec.training.hosts)
    return follow_ranks("pipeline.jobs.training.rank.main", spec, folder, *given)


def torchrun(hosts: Sequence[Host], command: str, folder: Path) -> "list[subprocess.Popen[bytes]]":
    """Starts ranks on each host, by the command that the training prints."""
    assert command.startswith("torchrun ")
    agents = []
    for number, host in enumerate(hosts):
        words = command.replace("=N ", f"={number} ").replace("ADDRESS", hosts[0].address).split()[1:]
        with (folder / f"{host.name}.log").open("wb") as file:
            given = [sys.executable, "-m", "torch.distributed.run", "--max-restarts=3", *words]
            agents.append(host.start(given, stdout=file, stderr=file))
    return agents


@pytest.mark.nightly
def test_tables_that_each_host_divides_among_its_ranks_train_as_whole_ones(
    hosts: tuple[Host, Host], rank_spec: Callable[..., RankSpec], undisturbed: Run, tmp_path: Path
) -> None:
    """Two ranks on each host. Only sums are made in another order."""
    settings = SETTINGS | {"world_size": 4, "hosts": 2, "sharding": "table_row_wise"}
    spec = rank_spec(tmp_path / "run", **settings, launcher="external")
    ranks: dict[str, list[int]] = {}

    def handle(event: Event) -> None:
        if event["event"] == "awaited":
            torchrun(hosts, event["command"], tmp_path)
        if event["event"] == "start":
            ranks.update({row["table"]: row["ranks"] for row in event["plan"]})

    found = follow(spec, handle, hang_seconds=60)
    assert sorted(ranks.values()) == [[0, 1], [2, 3]]
    assert (found["steps"], found["rows"]) == (undisturbed.result["steps"], undisturbed.result["rows"])
    assert found["valid_ne"] == pytest.approx(undisturbed.result["valid_ne"], abs=1e-5)
    for name, value in load_file(tmp_path / "run" / "weights.safetensors").items():
        torch.testing.assert_close(value, undisturbed.weights[name], atol=1e-4, rtol=0.0)
    assert not (Path(spec.folder) / EVENTS).exists()


@pytest.mark.nightly
def test_ranks_on_other_hosts_than_the_config_says_are_refused(
    hosts: tuple[Host, Host], rank_spec: Callable[..., RankSpec], tmp_path: Path
) -> None:
    """All four on one host."""
    settings = SETTINGS | {"world_size": 4, "hosts": 2, "sharding": "table_row_wise"}
    spec = rank_spec(tmp_path / "run", **settings, launcher="external")

    def handle(event: Event) -> None:
        if event["event"] == "awaited":
            command = event["command"].replace("--nnodes=2 --nproc-per-node=2", "--nnodes=1 --nproc-per-node=4")
            torchrun(hosts[:1], command, tmp_path)

    with pytest.raises(ConfigError) as caught:
        follow(spec, handle)
    assert str(caught.value) == (
        "training.hosts: expected 2 hosts with 2 consecutive ranks and LOCAL_WORLD_SIZE=2 on each, got 4 on one with "
        "LOCAL_WORLD_SIZE=4. Start as many ranks on each host (training.resources does that on Ray), or leave out "
        "training.hosts."
    )


@pytest.mark.nightly
def test_ranks_of_torchrun_that_die_are_restarted(
    hosts: tuple[Host, Host], rank_spec: Callable[..., RankSpec], undisturbed: Run, tmp_path: Path
) -> None:
    """Both: torchrun ends the rank of the other host and starts it again, too."""
    spec = rank_spec(tmp_path / "run", **SETTINGS, launcher="external")
    agents: list[subprocess.Popen[bytes]] = []
    killed: list[int] = []

    def handle(event: Event) -> None:
        if event["event"] == "awaited":
            agents.extend(torchrun(hosts, event["command"], tmp_path))
        if event["event"] == "saved" and not killed:
            killed.append(event["step"])
            kill_ranks(agents[0])

    found = follow(spec, handle, hang_seconds=120)
    for name in ("weights_sha256", "valid_ne", "steps", "rows"):
        assert found[name] == undisturbed.result[name]
    assert "failed (exitcode: -9)" in (tmp_path / "one.log").read_text()


def kill_ranks(agent: "subprocess.Popen[bytes]") -> None:
    """Kills the ranks of one host, as the kernel does without memory."""
    for process in psutil.Process(agent.pid).children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            if "torch.distributed.run" not in process.cmdline():
                process.kill()


@pytest.mark.nightly
def test_a_master_that_is_loopback_on_its_host_is_refused(
    hosts: tuple[Host, Host], rank_spec: Callable[..., RankSpec], tmp_path: Path
) -> None:
    place = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "one"}

    def handle(event: Event) -> None:
        if event["event"] == "awaited":
            words = event["command"].split()[-3:]
            hosts[0].start([sys.executable, *words], place | {"MASTER_PORT": "29500"})

    with pytest.raises(TrainingError) as caught:
        follow(rank_spec(tmp_path / "run", **SETTINGS, launcher="external"), handle)
    assert str(caught.value) == (
        "MASTER_ADDR: expected an address at which other hosts reach rank 0's, got one, which is loopback on one. "
        "Set it to the IP address, or set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME."
    )
