"""Ranks that torchrun starts on two hosts train as processes of one."""

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file

from pipeline.errors import ConfigError, TrainingError
from pipeline.jobs.training.rank_spec import RankSpec
from pipeline.training.launch.external import EVENTS, follow_ranks
from pipeline.training.launch.processes import Event, Limits
from tests.hosts.rig import ROOT, Host, Network
from tests.hosts.test_ranks import LIST, MAKE_BUCKET
from tests.objects import SERVE, Store
from tests.pipeline.conftest import SETTINGS, Run
from tests.pipeline.preprocessing.reference import eventually

pytestmark = pytest.mark.slow


@pytest.fixture
def hosts(make_network: Callable[[], Network]) -> tuple[Host, Host]:
    network = make_network()
    return network.add("one"), network.add("two")


def follow(
    spec: RankSpec, start: Callable[[str], None], ranks: dict[str, list[int]] | None = None, **limits: int
) -> Event:
    """Follows the ranks of a spec. `start` gets the command that starts them, and `ranks` those of each table."""
    folder, limit = Path(spec.folder), Limits(deadline_seconds=550, **limits)

    def handle(event: Event) -> None:
        if event["event"] == "awaited":
            start(event["command"])
        if event["event"] == "start" and ranks is not None:
            ranks.update({row["table"]: row["ranks"] for row in event["plan"]})

    given = (spec.training.world_size, 1, limit, handle, ROOT, spec.training.hosts)
    return follow_ranks("pipeline.jobs.training.rank.main", spec, folder, *given)


def torchrun(hosts: Sequence[Host], command: str, folder: Path) -> None:
    """Starts ranks on each host, by the command that the training prints."""
    for number, host in enumerate(hosts):
        run_by_torchrun(host, number, command, hosts[0], folder / f"{host.name}.log")


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
    assert not (Path(spec.folder) / EVENTS).exists()


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


def run_by_torchrun(
    host: Host, number: int, command: str, master: Host, log: Path, env: dict[str, str] | None = None
) -> "subprocess.Popen[bytes]":
    """Runs the command that a training prints."""
    assert command.startswith("torchrun ")
    words = command.replace("=N ", f"={number} ").replace("ADDRESS", master.address).split()
    with log.open("wb") as file:
        return host.start(
            [sys.executable, "-m", "torch.distributed.run", "--max-restarts=3", *words[1:]],
            env,
            stdout=file,
            stderr=file,
        )


@pytest.fixture
def kept(hosts: tuple[Host, Host]) -> Iterator[tuple[Host, Store]]:
    """A third host with a store that has the bucket `kept`."""
    pytest.importorskip("moto", reason="the S3 server comes with `make setup EXTRAS=objects`")
    host = hosts[0].network.add("store")
    store = Store(f"http://{host.address}:5999", "kept")
    with host.start([sys.executable, "-c", SERVE, host.address, "5999"], stderr=subprocess.DEVNULL) as server:
        try:
            host.run([sys.executable, "-c", MAKE_BUCKET], store.variables)
            yield host, store
        finally:
            server.kill()


def test_ranks_of_torchrun_without_a_common_folder_train_as_processes_of_one_host(
    hosts: tuple[Host, Host],
    kept: tuple[Host, Store],
    rank_spec: Callable[..., RankSpec],
    undisturbed: Run,
    tmp_path: Path,
) -> None:
    """Although the store does not answer for 20 seconds, in which rank 0 dies and torchrun restarts both."""
    (place, store), training = kept, hosts[0].network.add("training")
    spec = rank_spec(tmp_path / "run", **SETTINGS, launcher="external")
    warehouse = spec.train.warehouse.model_copy(update={"catalog": store.properties})
    own = {"folder": f"/tmp/own-{tmp_path.name}/run", "store": f"s3://{store.bucket}/run"}
    spec = spec.model_copy(update={"train": spec.train.model_copy(update={"warehouse": warehouse}), **own})
    path, logs = tmp_path / "given.json", [tmp_path / f"{host.name}.log" for host in hosts]
    path.write_text(spec.model_dump_json())
    argv = [sys.executable, "-m", "tests.hosts.followed", str(path)]
    follower = training.start(argv, store.variables, stdout=subprocess.PIPE, text=True)
    assert follower.stdout is not None
    events = []
    for line in follower.stdout:
        events.append(json.loads(line))
        if events[-1]["event"] == "awaited":
            command = events[-1]["command"]
            assert command.endswith(" -m pipeline.jobs.training.rank.main s3://kept/run")
            agents = [
                run_by_torchrun(host, number, command, hosts[0], logs[number], store.variables)
                for number, host in enumerate(hosts)
            ]
            eventually((hosts[0].network.folder / "one" / spec.folder[1:]).exists, 120.0)  # it has its specification
            place.set_link(up=False)
            time.sleep(10.0)
            kill_ranks(agents[0])
            time.sleep(10.0)
            place.set_link(up=True)
    texts = "\n".join(log.read_text() for log in logs)
    assert follower.wait() == 0, texts
    for name in ("weights_sha256", "valid_ne", "steps", "rows"):
        assert events[-1][name] == undisturbed.result[name], texts
    assert "failed (exitcode: -9)" in texts
    names = json.loads(place.run([sys.executable, "-c", LIST], store.variables))
    assert [name for name in names if name.startswith("run/ranks/")] == []
    assert {"run/weights.safetensors", "run/probe.json"} <= set(names)


def kill_ranks(agent: "subprocess.Popen[bytes]") -> None:
    """Kills the ranks of one host, as the kernel does without memory."""
    for process in psutil.Process(agent.pid).children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            if "torch.distributed.run" not in process.cmdline():
                process.kill()


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
