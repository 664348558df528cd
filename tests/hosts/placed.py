"""Where Ray puts workers and ranks: `python -m tests.hosts.placed FOLDER ADDRESS` prints their hosts as JSON."""

import json
import queue
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray
import torch.distributed as dist

from pipeline.preprocessing.config import PreprocessingConfig
from pipeline.preprocessing.executors import WorkerStarted
from pipeline.preprocessing.ray_executor import RayExecutor
from pipeline.training.config import TrainConfig
from pipeline.training.launch.processes import Limits
from pipeline.training.launch.ray_train import run_ranks_on_ray
from tests.hosts.rig import ROOT


def join(text: str, emit: Callable[[dict[str, Any]], None]) -> None:
    """What a rank does in place of training, in the group that Ray made: rank 0 reports the hosts of all."""
    hosts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(hosts, socket.gethostname())
    emit({"event": "result", "hosts": hosts})


def hosts_of_workers(folder: Path, address: str, **places: Any) -> list[str]:
    config = PreprocessingConfig(executor="ray", ray_address=address, **places)
    events: queue.SimpleQueue[Any] = queue.SimpleQueue()
    executor = RayExecutor({}, folder, events, config)
    try:
        for worker in range(2):
            executor.start(worker)
        for _ in range(2):
            event = events.get(timeout=240)
            assert isinstance(event, WorkerStarted), event
        names = {node["NodeID"]: node["NodeManagerHostname"] for node in ray.nodes()}
        placed = ray._private.state.actors()
        return [names[placed[actor._actor_id.hex()]["Address"]["NodeID"]] for actor in executor.actors.values()]
    finally:
        executor.close()


def hosts_of_ranks(folder: Path, address: str, world_size: int = 2, **places: Any) -> list[str]:
    config = TrainConfig(world_size=world_size, launcher="ray", **places)
    limits = Limits(deadline_seconds=500, hang_seconds=None)
    found = run_ranks_on_ray(
        "tests.hosts.placed", config, folder, world_size, 1, limits, print, ROOT, address, config.ray_resources,
        config.labels,
    )  # fmt: skip
    hosts: list[str] = found["hosts"]
    return hosts


if __name__ == "__main__":
    place = Path(sys.argv[1]), sys.argv[2]
    found = {
        "workers": hosts_of_workers(*place, resources={"cpu_host": 1}),
        "ranks": hosts_of_ranks(*place, resources={"gpu_host": 1}),
        "workers by label": hosts_of_workers(*place, labels={"host": "!one"}),
        "ranks by label": hosts_of_ranks(*place, labels={"host": "in(one, three)"}),
        "two ranks on each": hosts_of_ranks(*place, world_size=4, hosts=2),
    }
    print(json.dumps(found))
