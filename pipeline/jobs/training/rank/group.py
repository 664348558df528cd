"""How the process of a rank joins its group, and how it speaks with the launcher."""

import datetime
import json
import logging
import os
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from pydantic import BaseModel

from pipeline.errors import ConfigError, ContractError, to_wire
from pipeline.processes.build import Build, read_build, require_same
from pipeline.training.config import TrainConfig
from pipeline.training.launch.network import find_meeting, require_hosts, require_place
from pipeline.training.launch.processes import DETERMINISTIC
from pipeline.training.support import supports
from storage.artifacts import write_json

Work = Callable[[Any, int, torch.device], None]
"""Called with spec, rank and device. A spec has the settings of the ranks in `training`."""


def run_rank(path: str, kind: type[BaseModel], run: Work) -> None:
    """Does the work of one rank of a group, between joining and leaving it. An error is written for the launcher.

    Args:
        path: File with the spec as JSON.
        kind: Of the spec.
    Raises:
        ConfigError: If this host does not have the file.
    """
    if not Path(path).exists():
        raise ConfigError(
            f"ranks of '{path}'", "a folder that their hosts share with the training", "no such file on this host",
            "Share `home` among the hosts, or set training.launcher=ray, which needs no common folder.",
        )  # fmt: skip
    spec: Any = kind.model_validate_json(Path(path).read_text(encoding="utf-8"))
    rank = int(os.environ.get("RANK", "0"))
    logging.disable(logging.WARNING)  # TorchRec's planner warns of intended settings at every start
    try:
        require_place(spec.training.world_size)
        run(spec, rank, start_group(spec.training, rank))
        dist.destroy_process_group()
    except ContractError as error:
        write_json(Path(path).parent / f"error-{rank}.json", to_wire(error))
        raise


def takes_cuda(config: TrainConfig) -> bool:
    """Whether each rank runs on a CUDA device."""
    fitting = config.launcher == "processes" and supports(config, "device", "cuda")
    enough = fitting and torch.cuda.device_count() >= config.world_size
    return config.device == "cuda" or (config.device == "auto" and enough)


def start_group(config: TrainConfig, rank: int) -> torch.device:
    """Joins the group unless it exists already. Uses nccl if every rank has a CUDA device, else gloo.

    Raises:
        ConfigError: If the ranks are not on the hosts that the config names, or run other code or packages.
    """
    cuda = takes_cuda(config)
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", rank))) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
        os.environ.setdefault(*DETERMINISTIC)
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS") or config.threads_per_rank or 1))
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # takes time
    if not dist.is_initialized():
        place, limit = (rank, config.world_size), datetime.timedelta(minutes=30)
        store = next(dist.rendezvous(find_meeting(), *place, timeout=limit))[0]
        # torchrun keeps its store when it restarts ranks, and the addresses of the dead ones are in it
        store = dist.PrefixStore(f"start-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
        dist.init_process_group(
            "nccl" if cuda else "gloo", store=store, rank=rank, world_size=config.world_size, timeout=limit
        )
    if config.hosts > 1:
        places: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(places, (socket.gethostname(), int(os.environ["LOCAL_WORLD_SIZE"])))
        require_hosts(places, config.hosts)
    builds = gather_builds()
    require_same("rank 0", builds[0], {f"rank {rank}": build for rank, build in enumerate(builds)})
    return device


def gather_builds() -> list[Build]:
    """Returns what each rank computes with, in the order of the ranks. All ranks call it together."""
    builds: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(builds, read_build())
    return builds


def open_event_writer() -> Any:
    """Returns a thread-safe function that sends events to the launcher as JSON lines. Only rank 0 sends."""
    number = os.environ.get("DLRM_EVENTS_FD")
    if number is None:
        return lambda event: None
    pipe = os.fdopen(int(number), "w", buffering=1, encoding="utf-8")
    lock = threading.Lock()

    def emit(event: dict[str, Any]) -> None:
        line = json.dumps(event) + "\n"
        with lock:
            pipe.write(line)

    return emit
