"""Runs workers as Ray actors, here or on a cluster. Ray places them and keeps results in its object store."""

import os
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError

from pipeline.errors import ContractError, from_wire, to_wire
from pipeline.preprocessing.config import PreprocessingConfig
from pipeline.preprocessing.dataset import DataSpec
from pipeline.preprocessing.epoch.batches import BatchWork
from pipeline.preprocessing.epoch.costs import Costs
from pipeline.preprocessing.epoch.memory import Arrays, PrivateWriter, Slabs, copy_to_segment, count_bytes
from pipeline.preprocessing.epoch.splits import Split
from pipeline.preprocessing.executors import (
    WORKER_ENVIRONMENT,
    Executor,
    KeptResult,
    WorkDone,
    WorkerDied,
    WorkerSlabs,
    WorkerStarted,
    WorkFailed,
    describe_segment,
    describe_task,
    do_task,
    open_result_store,
    parse_event,
    parse_task,
    peak_rss_mb,
    run_work,
    wrap_work_error,
)
from pipeline.preprocessing.transport import framing
from pipeline.preprocessing.transport.addresses import NetworkSettings, is_loopback
from pipeline.preprocessing.worker import Worker
from pipeline.processes.build import Build, read_build, require_same
from pipeline.processes.process import LOCAL_RAY, PACKAGES, PROMISED_BYTES, kill_process, process_start
from pipeline.processes.ray_cluster import join_cluster, set_ray_environment
from pipeline.sealed import Letterbox, seal
from storage.scratch import ScratchFolder

OBJECT_STORE_SHARE = 2
"""The object store has this many times the memory bound, because freed objects are not gone at once."""
SMALLEST_STORE_BYTES = 256 << 20


class RayExecutor(Executor):
    """Runs each worker as an actor. Ray does not restart a killed actor, because the master decides.

    On a cluster an actor takes a processor. On this machine it claims none: the config limits the workers, and two
    services of one process share its Ray and must not wait for each other's processors.

    Results are numpy arrays in the object store. Ray maps and moves them without pickling their data. With network
    settings, actors keep their results and serve them, and nothing passes through this machine.
    """

    def __init__(
        self,
        data: Mapping[str, DataSpec],
        folder: Path,
        events: "queue.SimpleQueue[Any]",
        config: PreprocessingConfig,
        network: NetworkSettings | None = None,
    ) -> None:
        super().__init__(data, folder, events)
        self.network = network
        self.connected = not ray.is_initialized()
        self.temporary = ScratchFolder("dlrm-ray-")
        if self.connected:
            _connect(config, self.temporary.name)
        self.processors = 1 if config.ray_address is not None else 0
        self.resources, self.labels = dict(config.resources), dict(config.labels)
        self.known_cores: int | None = None
        self.here = ray.get_runtime_context().get_node_id()
        self.actors: dict[int, Any] = {}
        self.slabs = Slabs()
        self.processes: dict[int, tuple[int, int]] = {}
        """Worker -> id and start of its process, if that runs on this machine."""
        specs = {name: spec.model_dump(mode="json") for name, spec in data.items()}
        self.secrets = {"data": specs, "network": None if network is None else network.model_dump()}
        self.secrets["build"] = read_build().model_dump()

    @property
    def keeps_results(self) -> bool:
        return self.network is not None

    @property
    def cores(self) -> int | None:
        if not self.processors:
            return None
        with suppress(RayError):  # the head may not answer for a while: nothing is known to have changed
            self.known_cores = count_room({"CPU": 1.0, **self.resources})
        return self.known_cores

    def keeper(self, memory: Any) -> int | None:
        return memory.worker if isinstance(memory, KeptResult) else None

    def start(self, worker: int) -> None:
        actor = _Actor.options(  # type: ignore[attr-defined]
            num_cpus=self.processors, resources=self.resources, label_selector=self.labels or None, max_restarts=0,
            max_task_retries=0,
        ).remote()  # fmt: skip
        self.actors[worker] = actor

        def begin() -> Any:
            """The catalog's password and the token are not for those who see Ray's messages."""
            return actor.begin.remote(*seal(self.secrets, ray.get(actor.make_key.remote())))

        self._wait(worker, begin, self._note_started)

    def submit(self, worker: int, data: str, work: Split | BatchWork, inputs: Sequence[Any]) -> None:
        actor = self.actors[worker]
        if self.network is not None:
            task = describe_task(data, work, [one.place.model_dump() for one in inputs])
            message = actor.do_and_keep.remote(task)
            self._wait(worker, lambda: message, lambda number, answer: parse_event(number, answer, ()))
            return
        kind = "split" if isinstance(work, Split) else "batches"
        note, memory = actor.do.options(num_returns=2).remote(data, kind, work.model_dump(mode="json"), *inputs)
        self._wait(worker, lambda: note, lambda number, answer: _parse_answer(number, answer, memory))

    def kill(self, worker: int) -> None:
        actor = self.actors.pop(worker)
        with suppress(RayError):
            ray.kill(actor, no_restart=True)
        if worker in self.processes:  # Ray only asks the process to end, and a hanging one does not
            kill_process(*self.processes.pop(worker))

    def free(self, memory: Any) -> None:
        """Tells the actor that keeps a result. An object of Ray's store is freed with its last reference."""
        if isinstance(memory, KeptResult) and memory.worker in self.actors:
            self.actors[memory.worker].drop.remote([memory.place.key])

    def deliver(self, memory: Any) -> tuple[framing.Message, list[int]]:
        if isinstance(memory, KeptResult):
            return {"place": memory.place.model_dump()}, []
        return describe_segment(copy_to_segment(ray.get(memory), self.slabs))

    def close(self) -> None:
        self.slabs.clear()
        if self.connected:
            ray.shutdown()
        self.temporary.cleanup()

    def _note_started(self, worker: int, answer: tuple[int, int, str]) -> WorkerStarted:
        pid, began, node = answer
        if node == self.here:
            self.processes[worker] = pid, began
        return WorkerStarted(worker, pid)

    def _wait(self, worker: int, call: Callable[[], Any], event: Any) -> None:
        """Waits for the answer to a call in a thread and puts its event into the queue."""

        def wait() -> None:
            try:
                self.events.put(event(worker, ray.get(call())))
            except RayTaskError as error:
                if isinstance(error.cause, ContractError):
                    self.events.put(WorkFailed(worker, error.cause))
                    return
                self.events.put(WorkerDied(worker, f"it failed: {' '.join(str(error.cause).split())}"))
            except RayError as error:
                self.events.put(WorkerDied(worker, f"its actor ended: {type(error).__name__}"))
            except Exception as error:  # Ray was shut down in the meantime
                self.events.put(WorkerDied(worker, f"{type(error).__name__}: {error}"))

        threading.Thread(target=wait, name=f"worker-{worker}", daemon=True).start()


def _parse_answer(worker: int, answer: Mapping[str, Any], memory: Any) -> WorkDone | WorkFailed:
    if "error" in answer:
        return WorkFailed(worker, from_wire(answer["error"]))
    return WorkDone(
        worker, memory, answer["size"], answer["rows"], Costs.from_json(answer["costs"]), answer["peak_rss_mb"]
    )


VARIABLES = WORKER_ENVIRONMENT | {"PYTHONWARNINGS": "ignore"}
"""Environment of actors, which run on one thread each."""


def count_room(needed: Mapping[str, float]) -> int:
    """Returns how many actors the cluster has room for, if each needs these resources."""
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    return sum(int(min(node.get(name, 0.0) // amount for name, amount in needed.items())) for node in nodes)


def _connect(config: PreprocessingConfig, temporary: str) -> None:
    """Joins the configured cluster, or starts one on this machine for the lifetime of this process."""
    if config.ray_address is not None:
        join_cluster(config.ray_address, VARIABLES)
        return
    set_ray_environment()
    ray.init(
        address="local",
        num_cpus=config.most_workers,
        include_dashboard=False,
        object_store_memory=max(OBJECT_STORE_SHARE * config.memory, SMALLEST_STORE_BYTES),
        _memory=PROMISED_BYTES,
        runtime_env={"env_vars": VARIABLES | {"PYTHONPATH": str(PACKAGES)}},
        _temp_dir=temporary,
        _system_config=dict(LOCAL_RAY),  # Ray writes into it
        log_to_driver=False,
        logging_level="error",
    )


@ray.remote
class _Actor:
    """One worker."""

    def make_key(self) -> bytes:
        """Returns the key to seal secrets with."""
        self.letterbox = Letterbox()
        return self.letterbox.public

    def begin(self, key: bytes, content: bytes) -> tuple[int, int, str]:
        """Opens the datasets. Returns id and start of the process, and the node.

        Raises:
            ConfigError: If this process computes with other code or packages than the service.
        """
        import pyarrow as pa

        pa.set_cpu_count(1)
        given = self.letterbox.open((key, content))
        require_same("the service", Build.model_validate(given["build"]), {"preprocessing worker": read_build()})
        self.workers = {name: Worker(DataSpec.model_validate(spec)) for name, spec in given["data"].items()}
        if given["network"] is not None:
            here = ray.util.get_node_ip_address()
            host = given["network"]["host"] if is_loopback(given["network"]["host"]) else here
            self.store = open_result_store(given["network"] | {"host": host})
            self.slabs = WorkerSlabs()
        began = process_start()
        assert began is not None
        return os.getpid(), began, ray.get_runtime_context().get_node_id()

    def do(self, data: str, kind: str, content: Mapping[str, Any], *inputs: Arrays) -> tuple[dict[str, Any], Any]:
        """Does a piece of work. Returns a note for the master and the arrays."""
        work: Split | BatchWork = (Split if kind == "split" else BatchWork).model_validate(content)
        writer = PrivateWriter()
        try:
            rows, costs = run_work(self.workers[data], work, inputs, writer)
        except Exception as error:  # sent to the master, which decides
            return {"error": to_wire(wrap_work_error(error, work))}, None
        arrays = writer.finish()
        note = {"size": count_bytes(arrays), "rows": rows, "costs": vars(costs), "peak_rss_mb": peak_rss_mb()}
        return note, arrays

    def do_and_keep(self, message: dict[str, Any]) -> dict[str, Any]:
        """Does a piece of work and keeps the result. Returns a message as processes send it; see `parse_event`."""
        task, _ = parse_task(message, ())
        return do_task(self.workers, task, (), self.slabs, self.store)[0]

    def drop(self, keys: Sequence[int]) -> None:
        """Frees results."""
        assert self.store is not None
        self.store.drop(keys)
