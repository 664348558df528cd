"""Runs ranks as Ray Train workers, on a given cluster or on a temporary local one."""

import importlib
import json
import os
import queue
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from pipeline.errors import ConfigError, ContractError, TrainingError, from_wire, to_wire
from pipeline.processes.process import LIBRARY_ENVIRONMENT, LOCAL_RAY, PACKAGES, PROMISED_BYTES
from pipeline.processes.ray_cluster import join_cluster, set_ray_environment
from pipeline.training.launch.processes import (
    POLL_SECONDS,
    Event,
    Limits,
    RankGroup,
    RankLostError,
    read_event,
    run_ranks,
)
from pipeline.training.launch.ray_order import Driver, Order
from storage.scratch import ScratchFolder

STORE_BYTES = 128 << 20
"""Object store of a temporary cluster. Ranks keep nothing there."""
MEETING_SECONDS = 1_800
ROOM_SECONDS = 60.0
"""Time for a lost node to be replaced. After it, a training with `least_ranks` continues with fewer."""
LESS_ROOM_SECONDS = 5.0
"""Time for Ray to find room for a smaller number of ranks. By then it has noticed that a node is gone."""


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
    resources: Mapping[str, float] | None = None,
    labels: Mapping[str, str] | None = None,
    fewer: Sequence[int] = (),
) -> Event:
    """Runs ranks as `run_ranks` does, but as Ray workers that rendezvous on rank 0's machine. Leaves no rank behind.

    Every machine needs this environment, and `folder` and the warehouse at the same paths.

    Args:
        folder: Holds checkpoints and the exported model, on storage that all machines share.
        root: Working directory of the ranks of this machine.
        address: Address of the cluster. None starts one on this machine.
        resources: What Ray reserves for each rank on its node, besides processors. With a GPU, ranks meet over nccl.
        labels: Labels of the nodes for ranks, as Ray selects them.
        fewer: Other numbers of ranks, the largest first, if a cluster has no room for `world_size` within ROOM_SECONDS.
    Raises:
        ConfigError: If Ray is not installed.
        ContractError: The error that a rank raised.
        TrainingError: If more ranks were lost than `restart_limit` allows, or the deadline passed.
    """
    require_ray()
    threads = threads_per_rank or (1 if address else None)
    group = partial(RayGroup, address=address, resources=resources or {}, labels=labels or {}, fewer=fewer)
    return run_ranks(module, spec, folder, world_size, threads, limits, on_event, root, group)


def require_ray() -> None:
    """Raises if Ray is not installed.

    Raises:
        ConfigError: Names the command that installs it.
    """
    try:
        importlib.import_module("ray.train.torch")
    except ImportError as error:
        raise ConfigError(
            "training.launcher 'ray'", "Ray with Ray Train", f"{error}", "Run `make setup EXTRAS=ray`."
        ) from None


@dataclass
class RayGroup(RankGroup):
    """One attempt of running the ranks as Ray Train workers."""

    address: str | None = None
    """Address of the cluster. None starts one on this machine."""
    resources: Mapping[str, float] = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)
    fewer: Sequence[int] = ()
    spec: str = ""
    letters: Any = None
    """Queue for the specification, sealed for each rank."""

    def run(self, module: str, world_size: int, threads: int, attempt: int, root: Path) -> Event:
        """See `RankGroup`. Each group opens its own connection to Ray, and hung ranks end with it."""
        import ray

        if not ray.is_initialized():
            return self.run_here(module, world_size, threads, attempt)
        order = Order(
            module=module, folder=str(self.folder), world_size=world_size, fewer=self.fewer, threads=threads,
            attempt=attempt, root=str(root), address=self.address, resources=self.resources, labels=self.labels,
        )  # fmt: skip
        driver = Driver(order)
        try:
            return self.watch_driver(driver)
        finally:
            driver.end()

    def watch_driver(self, driver: Driver) -> Event:
        """Passes events of ranks that another process runs to `on_event`, until they have ended."""
        result: Event | None = None
        while True:
            self.check_time()
            with suppress(queue.Empty):
                line = driver.next_line(POLL_SECONDS)
                if line is None:
                    return result if result is not None else driver.fail()
                result = self.handle_line(line) or result

    def run_here(self, module: str, world_size: int, threads: int, attempt: int) -> Event:
        """Runs the ranks over a connection to Ray that this process opens."""
        import ray

        spec = (self.folder / "spec.json").read_text(encoding="utf-8")
        with _cluster(self.address, world_size * threads):
            from ray.util.queue import Queue
            from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

            here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
            options = {"num_cpus": 0, "scheduling_strategy": here}  # elsewhere the queues could be lost with their node
            lines, self.letters = (Queue(actor_options=options) for _ in range(2))
            self.spec = spec
            body = {"module": module, "threads": threads, "attempt": attempt, "events": lines, "letters": self.letters}
            bundle = {"CPU": float(threads), **self.resources}
            fit = _Fit(body, self.folder, self.find_room(world_size, bundle), bundle, self.labels)
            fit.start()
            try:
                return self.watch_fit(fit, lines)
            finally:
                shutil.rmtree(self.folder / "ray", ignore_errors=True)

    def find_room(self, world_size: int, bundle: dict[str, float]) -> int:
        """Returns the largest allowed number of ranks that there is room for. Ray waits for room for the smallest."""
        *larger, least = (world_size, *self.fewer)
        for number in larger:
            if self._has_room(number, bundle, ROOM_SECONDS if number == world_size else LESS_ROOM_SECONDS):
                return number
        return least

    def _has_room(self, number: int, bundle: dict[str, float], seconds: float) -> bool:
        """Asks Ray for the ranks' processors and resources and gives them back."""
        from ray.util.placement_group import placement_group, remove_placement_group

        selectors = [dict(self.labels)] * number if self.labels else None
        group = placement_group([bundle] * number, bundle_label_selector=selectors)
        end = time.monotonic() + seconds
        try:
            while time.monotonic() < end:
                if group.wait(1):  # in whole seconds
                    return True
                self.check_time()
            return False
        finally:
            remove_placement_group(group)

    def handle_line(self, line: str | None) -> Event | None:
        """See `RankGroup`. Raises the error that an event holds."""
        with suppress(ValidationError):
            event, _ = read_event(line or "")
            if event["event"] == "error":
                raise from_wire(event.get("parts"))
        if line is not None and self.answer_keys(line):
            return None
        return super().handle_line(line)

    def answer_keys(self, line: str) -> bool:
        """Sends the ranks the specification, if this is the event with their keys. Returns whether it is."""
        with suppress(ValidationError):
            event, _ = read_event(line)
            if event["event"] == "keys":
                from pipeline.sealed import seal  # cryptography is of no use to other launchers

                self.letters.put([seal(self.spec, key.encode()) for key in event["keys"]])
                return True
        return False

    def watch_fit(self, fit: "_Fit", lines: Any) -> Event:
        """Passes events to `on_event` until Ray Train has ended."""
        from ray.util.queue import Empty

        result: Event | None = None
        while True:
            running = fit.is_alive()  # checked first: by then, all events of an ended rank are in the queue
            try:
                line: str = lines.get(timeout=POLL_SECONDS)
            except Empty:
                if not running:
                    break
            else:
                result = self.handle_line(line) or result
            self.check_time()
        if fit.error is not None:
            rank, reason = _find_cause(fit.error)
            raise RankLostError(
                f"rank {rank}", "to train to the end", reason,
                "Run the command again to resume from the last checkpoint. Ray keeps the logs of its workers.",
            )  # fmt: skip
        if result is None:
            raise TrainingError("training", "a result from rank 0", "none", "Ray keeps the logs of its workers.")
        return result


class _Fit(threading.Thread):
    """Runs Ray Train's blocking call and keeps its error."""

    def __init__(
        self,
        body: dict[str, Any],
        folder: Path,
        world_size: int,
        resources: Mapping[str, float],
        labels: Mapping[str, str],
    ) -> None:
        super().__init__(name="ray-train", daemon=True)
        self.body, self.folder, self.world_size = body, folder, world_size
        self.resources, self.labels = dict(resources), dict(labels)
        self.error: BaseException | None = None

    def run(self) -> None:
        from ray.train import FailureConfig, RunConfig, ScalingConfig
        from ray.train.torch import TorchTrainer

        from pipeline.training.launch.ray_group import NodeTorchConfig

        scaling = ScalingConfig(
            num_workers=self.world_size, resources_per_worker=self.resources, use_gpu="GPU" in self.resources,
            label_selector=self.labels or None,
        )  # fmt: skip
        try:
            TorchTrainer(
                _rank,
                train_loop_config=self.body,
                torch_config=NodeTorchConfig(timeout_s=MEETING_SECONDS),
                scaling_config=scaling,
                run_config=RunConfig(
                    name="ray", storage_path=str(self.folder.resolve()), failure_config=FailureConfig(max_failures=0)
                ),
            ).fit()
        except BaseException as error:  # raised by the waiting thread
            self.error = error


def _find_cause(error: BaseException) -> tuple[int | str, str]:
    """Returns the rank that failed, if it is known, and one line that says why."""
    failures = getattr(error, "worker_failures", {})
    if failures:
        rank, reason = min(failures.items(), key=lambda item: item[0])
        return rank, str(reason).strip().split("\n")[0].rstrip(".")
    reason = getattr(error, "controller_failure", error)
    return "?", str(reason).strip().split("\n")[-1].strip().rstrip(".")  # what comes before is a traceback


def _rank(body: dict[str, Any]) -> None:
    """Runs a rank inside a Ray worker, in the process group that Ray Train made."""
    import torch
    import torch.distributed as dist

    from pipeline.sealed import Letterbox  # cryptography is of no use to other ranks

    rank, letterbox = dist.get_rank(), Letterbox()
    os.environ |= {"RANK": str(rank), "OMP_NUM_THREADS": str(body["threads"])}
    os.environ["DLRM_ATTEMPT"] = str(body["attempt"])

    def emit(event: Event) -> None:
        if rank == 0:
            body["events"].put(json.dumps(event))

    # The specification holds the catalog's password and the token of the batches. Ray shows what it carries.
    if dist.get_backend() == "nccl":  # it exchanges objects over the current device
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    keys: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(keys, letterbox.public.decode())
    emit({"event": "keys", "keys": keys})
    letters = body["letters"].get(timeout=MEETING_SECONDS) if rank == 0 else keys
    dist.broadcast_object_list(letters)
    try:
        importlib.import_module(body["module"]).join(letterbox.open(letters[rank]), emit)
    except ContractError as error:
        body["events"].put(json.dumps({"event": "error", "parts": to_wire(error)}))
        raise


@contextmanager
def _cluster(address: str | None, processors: int) -> Iterator[None]:
    """Connects to the cluster or starts a local one. Our workers end with the connection."""
    import ray

    variables = LIBRARY_ENVIRONMENT | {"PYTHONWARNINGS": "ignore"}
    temporary = ScratchFolder("dlrm-ray-")
    try:
        if address is not None:
            join_cluster(address, variables)
        else:
            set_ray_environment()
            variables |= {"PYTHONPATH": str(PACKAGES)}
            ray.init(
                address="local", num_cpus=processors, include_dashboard=False, object_store_memory=STORE_BYTES,
                _memory=PROMISED_BYTES,
                runtime_env={"env_vars": variables}, _temp_dir=temporary.name, _node_ip_address="127.0.0.1",
                _system_config=dict(LOCAL_RAY), log_to_driver=False, logging_level="error",
            )  # fmt: skip
        yield
    finally:
        with suppress(Exception):  # an earlier error matters more
            ray.shutdown()
        temporary.cleanup()
