"""Ranks as workers of Ray Train: on a cluster, or on one that is started on this machine for the time of a training."""

import importlib
import json
import os
import secrets
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from pipeline.errors import ConfigError, ContractError, TrainingError
from pipeline.training.launch.processes import (
    POLL_SECONDS,
    RANK_ENVIRONMENT,
    Event,
    Limits,
    RankGroup,
    RankLostError,
    run_ranks,
)

STORE_BYTES = 128 << 20
"""Object store of a cluster of our own: ranks keep nothing there."""
MEETING_SECONDS = 1_800


def run_ranks_on_ray(
    module: str,
    spec: BaseModel,
    folder: Path,
    world_size: int,
    threads_per_rank: int | None,
    limits: Limits,
    on_event: Callable[[Event], None],
    root: Path,
    address: str | None,
) -> Event:
    """As `run_ranks`, with ranks that Ray places and that meet on the machine of rank 0. None is left when it returns.

    Every machine needs this environment, and `folder` and the warehouse at the same paths.

    Args:
        folder: Checkpoints and the exported model; on storage that all machines share.
        root: Where the code lies; a cluster's machines are sent it.
        address: Of the cluster; None starts one on this machine.
    Raises:
        ConfigError: If Ray is not installed.
        ContractError: What a rank raised, as it raised it.
        TrainingError: If ranks were lost more often than they may be, or the deadline passed.
    """
    require_ray()
    threads = threads_per_rank or (1 if address else None)
    group = partial(RayGroup, address=address)
    return run_ranks(module, spec, folder, world_size, threads, limits, on_event, root, group)


def require_ray() -> None:
    """Refuses to go on without Ray.

    Raises:
        ConfigError: With the command that installs it.
    """
    try:
        importlib.import_module("ray.train.torch")
    except ImportError as error:
        raise ConfigError(
            "training.launcher 'ray'", "Ray with Ray Train", f"{error}", "Run `make setup EXTRAS=ray`."
        ) from None


@dataclass
class RayGroup(RankGroup):
    """Workers of Ray Train from their start to their end."""

    address: str | None = None
    """Of the cluster; None starts one on this machine."""

    def run(self, module: str, world_size: int, threads: int, attempt: int, root: Path) -> Event:
        """See `RankGroup`. The connection is this group's own, so that ranks that hang end with it."""
        spec = (self.folder / "spec.json").read_text(encoding="utf-8")
        with _cluster(self.address, world_size * threads, root):
            from ray.util.queue import Queue

            lines = Queue(actor_options={"num_cpus": 0})
            body = {"module": module, "spec": spec, "threads": threads, "attempt": attempt, "events": lines}
            fit = _Fit(body, self.folder, world_size, threads)
            fit.start()
            try:
                return self.watch_fit(fit, lines)
            finally:
                shutil.rmtree(self.folder / "ray", ignore_errors=True)

    def watch_fit(self, fit: "_Fit", lines: Any) -> Event:
        """Hands events on until Ray Train has ended."""
        from ray.util.queue import Empty

        result: Event | None = None
        while True:
            running = fit.is_alive()  # asked first: what a rank said before its end is in the queue by then
            try:
                line: str = lines.get(timeout=POLL_SECONDS)
            except Empty:
                if not running:
                    break
            else:
                if (event := json.loads(line))["event"] == "error":
                    raise ContractError(*event["parts"])
                result = self.hear(line) or result
            self.look_at_the_clock()
        if fit.error is not None:
            failures = getattr(fit.error, "worker_failures", {})
            rank, reason = min(failures.items(), default=("?", fit.error), key=lambda item: item[0])
            raise RankLostError(
                f"rank {rank}", "to train to the end", str(reason).strip().split("\n")[0].rstrip("."),
                "Run the command again to go on from the last checkpoint; Ray keeps the logs of its workers.",
            )  # fmt: skip
        if result is None:
            raise TrainingError("training", "a result from rank 0", "none", "Ray keeps the logs of its workers.")
        return result


class _Fit(threading.Thread):
    """Ray Train's blocking call, and what came of it."""

    def __init__(self, body: dict[str, Any], folder: Path, world_size: int, threads: int) -> None:
        super().__init__(name="ray-train", daemon=True)
        self.body, self.folder, self.world_size, self.threads = body, folder, world_size, threads
        self.error: BaseException | None = None

    def run(self) -> None:
        from ray.train import FailureConfig, RunConfig, ScalingConfig
        from ray.train.torch import TorchConfig, TorchTrainer

        try:
            TorchTrainer(
                _rank,
                train_loop_config=self.body,
                torch_config=TorchConfig(backend="gloo", timeout_s=MEETING_SECONDS),
                scaling_config=ScalingConfig(num_workers=self.world_size, resources_per_worker={"CPU": self.threads}),
                run_config=RunConfig(
                    name="ray", storage_path=str(self.folder.resolve()), failure_config=FailureConfig(max_failures=0)
                ),
            ).fit()
        except BaseException as error:  # told by the thread that waits
            self.error = error


def _rank(body: dict[str, Any]) -> None:
    """What a worker does: the body of a rank, in the group that Ray Train has made."""
    import torch.distributed as dist

    rank = dist.get_rank()
    os.environ |= {"RANK": str(rank), "OMP_NUM_THREADS": str(body["threads"])}
    os.environ["DLRM_ATTEMPT"] = str(body["attempt"])

    def emit(event: Event) -> None:
        if rank == 0:
            body["events"].put(json.dumps(event))

    try:
        importlib.import_module(body["module"]).join(body["spec"], emit)
    except ContractError as error:
        parts = [error.where, error.expected, error.actual, error.remedy]
        body["events"].put(json.dumps({"event": "error", "parts": parts}))
        raise


@contextmanager
def _cluster(address: str | None, processors: int, root: Path) -> Iterator[None]:
    """Connected with the cluster, or with one of our own; whatever runs there for us ends with the connection."""
    import ray

    if ray.is_initialized():
        raise ConfigError(
            "training.launcher 'ray'", "a process that is not connected with a cluster", "one that is",
            "Train in a process of its own, or call ray.shutdown() first.",
        )  # fmt: skip
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(16))  # else Ray keeps one in the user's home
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": "error"}
    variables = RANK_ENVIRONMENT | {"PYTHONWARNINGS": "ignore"}
    temporary = tempfile.mkdtemp(prefix="dlrm-ray-")
    try:
        if address is not None:
            code = [str(root / package) for package in ("pipeline", "storage", "models")]
            ray.init(address=address, runtime_env={"env_vars": variables, "py_modules": code}, **quiet)
        else:
            variables |= {"PYTHONPATH": str(root), "GLOO_SOCKET_IFNAME": "lo"}
            ray.init(
                address="local", num_cpus=processors, include_dashboard=False, object_store_memory=STORE_BYTES,
                runtime_env={"env_vars": variables}, _temp_dir=temporary, _node_ip_address="127.0.0.1",
                _system_config={"worker_niceness": 0}, **quiet,  # Ray's 15 would starve ranks beside other work
            )  # fmt: skip
        yield
    finally:
        with suppress(Exception):  # an error on the way is the one to be told
            ray.shutdown()
        shutil.rmtree(temporary, ignore_errors=True)
