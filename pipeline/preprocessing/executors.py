"""Executors run workers: in this process, or in separate processes on this machine."""

import os
import queue
import signal
import socket
import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from pydantic import BaseModel, NonNegativeInt, ValidationError, model_validator

from pipeline.errors import ContractError, DataError, from_wire, to_wire
from pipeline.preprocessing.dataset import DataSpec
from pipeline.preprocessing.epoch.batches import BatchWork
from pipeline.preprocessing.epoch.costs import Costs
from pipeline.preprocessing.epoch.memory import (
    Arrays,
    PrivateWriter,
    Segment,
    SegmentNote,
    Slabs,
    Writer,
    copy_to_segment,
    count_bytes,
)
from pipeline.preprocessing.epoch.splits import Split
from pipeline.preprocessing.transport import framing
from pipeline.preprocessing.transport.addresses import NetworkSettings, Place, UnreachableError
from pipeline.preprocessing.worker import Worker
from pipeline.processes.forkserver import ForkedProcess, start_process
from pipeline.processes.process import ROOT, limit_threads
from storage.compiled import load_compiler

if TYPE_CHECKING:
    from pipeline.preprocessing.transport.result_store import ResultStore

WORKER = "pipeline.preprocessing.executors"
"""Module that a worker's process runs."""
WORKER_ENVIRONMENT = limit_threads(1)


@dataclass(frozen=True)
class WorkerStarted:
    """A worker is ready for work."""

    worker: int
    pid: int
    location: str | None = None
    """Where it serves its results, if it keeps them."""


@dataclass(frozen=True)
class WorkDone:
    """A worker has finished its work."""

    worker: int
    memory: Any
    size: int
    """Bytes."""
    rows: int
    """Selected rows of a split. 0 for batches."""
    costs: Costs
    peak_rss_mb: int


@dataclass(frozen=True)
class WorkFailed:
    """A worker could not do its work."""

    worker: int
    error: ContractError
    unreachable: str | None = None
    """Location of a worker whose rows it could not fetch, if that was the reason."""


@dataclass(frozen=True)
class WorkerDied:
    """A worker is gone."""

    worker: int
    reason: str


Event = WorkerStarted | WorkDone | WorkFailed | WorkerDied


class Executor(ABC):
    """Runs workers, known by number, and puts their events into a queue.

    Args:
        data: The datasets that workers may read, by name.
        folder: Receives the workers' logs.
        events: Receives the events.
    """

    def __init__(self, data: Mapping[str, DataSpec], folder: Path, events: "queue.SimpleQueue[Any]") -> None:
        self.data, self.folder, self.events = data, folder, events

    @abstractmethod
    def start(self, worker: int) -> None:
        """Starts a worker. `WorkerStarted` or `WorkerDied` follows."""

    @abstractmethod
    def submit(self, worker: int, data: str, work: Split | BatchWork, inputs: Sequence[Any]) -> None:
        """Gives work to an idle worker. `WorkDone`, `WorkFailed` or `WorkerDied` follows."""

    @abstractmethod
    def kill(self, worker: int) -> None:
        """Ends a worker at once. Only events that are already on their way follow."""

    @abstractmethod
    def free(self, memory: Any) -> None:
        """Frees a result."""

    @abstractmethod
    def deliver(self, memory: Any) -> tuple[framing.Message, list[int]]:
        """Returns what a rank needs to get a result: fields of a message, and descriptors that the caller closes."""

    def keeper(self, memory: Any) -> int | None:
        """Returns the worker that keeps a result and takes it along when it ends. None: it outlives its worker."""
        return None

    @property
    def keeps_results(self) -> bool:
        """Whether results stay with their workers."""
        return False

    @property
    def cores(self) -> int | None:
        """Processor cores where workers may run. None: those of this machine."""
        return None

    def close(self) -> None:  # noqa: B027
        """Ends everything that the executor started."""


class InlineExecutor(Executor):
    """Does work in the calling thread. For debugging and for small data."""

    def __init__(self, data: Mapping[str, DataSpec], folder: Path, events: "queue.SimpleQueue[Any]") -> None:
        super().__init__(data, folder, events)
        self.slabs = Slabs()

    def start(self, worker: int) -> None:
        self.workers = {name: Worker(spec) for name, spec in self.data.items()}
        self.events.put(WorkerStarted(worker, os.getpid()))

    def submit(self, worker: int, data: str, work: Split | BatchWork, inputs: Sequence[Arrays]) -> None:
        self.events.put(_try_work(worker, self.workers[data], work, inputs))

    def kill(self, worker: int) -> None:
        pass

    def free(self, memory: Any) -> None:
        pass

    def deliver(self, memory: Arrays) -> tuple[framing.Message, list[int]]:
        return describe_segment(copy_to_segment(memory, self.slabs))

    def close(self) -> None:
        self.slabs.clear()


def describe_segment(segment: Segment) -> tuple[framing.Message, list[int]]:
    """Returns the fields and the descriptor with which a message carries a segment."""
    return {"shapes": segment.shapes, "size": segment.size}, [segment.fd]


def _try_work(number: int, worker: Worker, work: Split | BatchWork, inputs: Sequence[Arrays]) -> WorkDone | WorkFailed:
    writer = PrivateWriter()
    try:
        rows, costs = run_work(worker, work, inputs, writer)
    except Exception as error:  # the master decides what to do about it
        return WorkFailed(number, wrap_work_error(error, work))
    return WorkDone(number, writer.finish(), count_bytes(writer.finish()), rows, costs, peak_rss_mb())


def run_work(worker: Worker, work: Split | BatchWork, inputs: Sequence[Arrays], writer: Writer) -> tuple[int, Costs]:
    """Does a piece of work and returns the selected rows (0 for batches) and the costs."""
    if isinstance(work, Split):
        return worker.transform_split(work, writer)
    return 0, worker.make_batches(work, inputs, writer)


def wrap_work_error(error: Exception, work: Split | BatchWork) -> ContractError:
    """Returns any error as one that can be sent to another process. Names the work."""
    if isinstance(error, ContractError):
        return error
    where = str(work) if isinstance(work, Split) else "batches"
    reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
    return DataError(where, "to be processed", reason.rstrip("."), "See the workers' logs.")


def peak_rss_mb() -> int:
    """Returns the largest resident set of this process since it began to run this program, in MiB."""
    with open("/proc/self/status", encoding="ascii") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmHWM")) // 1024


@dataclass(frozen=True)
class KeptResult:
    """A result that its worker keeps."""

    worker: int
    place: Place


class ProcessExecutor(Executor):
    """Runs each worker as a process that dies with this one. Results are shared memory.

    A worker communicates over a socket pair. There is no address to bind and nothing to leave behind.
    """

    def __init__(self, data: Mapping[str, DataSpec], folder: Path, events: "queue.SimpleQueue[Any]") -> None:
        super().__init__(data, folder, events)
        self.processes: dict[int, ForkedProcess] = {}
        self.connections: dict[int, socket.socket] = {}
        self.readers: dict[int, threading.Thread] = {}

    def start(self, worker: int) -> None:
        ours, theirs = socket.socketpair()
        with theirs, (self.folder / f"worker-{worker}.log").open("wb") as log:
            given = {"DLRM_WORKER_FD": theirs.fileno()}
            environment = os.environ | WORKER_ENVIRONMENT
            self.processes[worker] = start_process(WORKER, f"dlrm worker {worker}", [], environment, ROOT, log, given)
        self.connections[worker] = ours
        specs = {name: spec.model_dump(mode="json") for name, spec in self.data.items()}
        with suppress(OSError):  # the worker is gone already, which the reader reports
            framing.send(ours, {"data": specs} | self.describe_start())
        self.readers[worker] = threading.Thread(
            target=self._read, args=(worker, ours), name=f"worker-{worker}", daemon=True
        )
        self.readers[worker].start()

    def describe_start(self) -> framing.Message:
        """Returns what a worker learns at its start beside the data."""
        return {}

    def submit(self, worker: int, data: str, work: Split | BatchWork, inputs: Sequence[Any]) -> None:
        notes = [{"shapes": segment.shapes, "size": segment.size} for segment in inputs]
        self.send(worker, describe_task(data, work, notes), [segment.fd for segment in inputs])

    def send(self, worker: int, message: framing.Message, descriptors: Sequence[int] = ()) -> None:
        """Sends a message to a worker. If it is gone, its reader reports that."""
        with suppress(OSError):
            framing.send(self.connections[worker], message, descriptors)

    def kill(self, worker: int) -> None:
        process = self.processes.pop(worker)
        process.kill()
        process.wait()
        with self.connections.pop(worker) as connection:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            self.readers.pop(worker).join()

    def free(self, memory: Any) -> None:
        memory.close()

    def deliver(self, memory: Any) -> tuple[framing.Message, list[int]]:
        return describe_segment(Segment(os.dup(memory.fd), memory.shapes, memory.size))

    def close(self) -> None:
        for worker in list(self.processes):
            self.kill(worker)

    def _read(self, worker: int, connection: socket.socket) -> None:
        while (received := framing.receive(connection)) is not None:
            self.events.put(parse_event(worker, *received))
        self.events.put(WorkerDied(worker, "its process ended"))


class ServingExecutor(ProcessExecutor):
    """Runs the same processes, which keep their results and serve them over the network.

    Args:
        network: Where and for whom they serve.
    """

    def __init__(
        self,
        data: Mapping[str, DataSpec],
        folder: Path,
        events: "queue.SimpleQueue[Any]",
        network: NetworkSettings,
    ) -> None:
        super().__init__(data, folder, events)
        self.network = network

    @property
    def keeps_results(self) -> bool:
        return True

    def keeper(self, memory: KeptResult) -> int | None:
        return memory.worker

    def describe_start(self) -> framing.Message:
        return {"network": self.network.model_dump()}

    def submit(self, worker: int, data: str, work: Split | BatchWork, inputs: Sequence[KeptResult]) -> None:
        self.send(worker, describe_task(data, work, [one.place.model_dump() for one in inputs]))

    def free(self, memory: KeptResult) -> None:
        if memory.worker in self.connections:
            self.send(memory.worker, {"drop": [memory.place.key]})

    def deliver(self, memory: KeptResult) -> tuple[framing.Message, list[int]]:
        return {"place": memory.place.model_dump()}, []


def describe_task(data: str, work: Split | BatchWork, inputs: Sequence[framing.Message]) -> framing.Message:
    """Returns the message that gives work to a worker; see `Task`."""
    return {"data": data, "work": work.model_dump(mode="json"), "inputs": inputs}


class _Started(BaseModel, frozen=True):
    """A worker's first message."""

    pid: NonNegativeInt
    location: str | None = None


class _Failed(BaseModel, frozen=True):
    """A worker's answer to work that failed."""

    error: Any
    unreachable: str | None = None


class _Done(SegmentNote, frozen=True):
    """A worker's result, which comes with the memory or stays with the worker."""

    rows: NonNegativeInt
    costs: Costs
    peak_rss_mb: NonNegativeInt
    place: Place | None = None
    """Where it is kept."""

    @model_validator(mode="after")
    def _check_rows(self) -> Self:
        """Compares the rows with the labels of a split's chunks. Those of batches have no number."""
        if self.rows != sum(shape[0] for name, (_, shape) in self.shapes.items() if name.endswith(".labels")):
            raise ValueError("arrays of other rows")
        return self


def parse_event(worker: int, message: framing.Message, descriptors: Sequence[int]) -> Event:
    """Returns what a worker reports. One that sends anything else counts as dead.

    Closes the descriptors, unless the event holds them.
    """
    event: Event
    try:
        if "pid" in message:
            started = _Started.model_validate(message)
            event = WorkerStarted(worker, started.pid, started.location)
        elif "error" in message:
            failed = _Failed.model_validate(message)
            event = WorkFailed(worker, from_wire(failed.error), failed.unreachable)
        else:
            note = _Done.model_validate(message)
            memory = note.open(descriptors) if note.place is None else KeptResult(worker, note.place)
            return WorkDone(worker, memory, note.size, note.rows, note.costs, note.peak_rss_mb)
    except (ValueError, IndexError):  # IndexError: labels without rows
        event = WorkerDied(worker, "it sent an invalid message")
    framing.close(descriptors)
    return event


class Task(BaseModel, frozen=True):
    """Work that the master sends to a worker, with the memory of its inputs or the places where they are kept."""

    data: str
    work: Split | BatchWork
    inputs: tuple[SegmentNote | Place, ...]


def parse_task(message: framing.Message, descriptors: Sequence[int]) -> tuple[Task, list[Segment]]:
    """Returns the work of a message and the memory of its inputs.

    Raises:
        DataError: If the message is invalid.
    """
    try:
        task = Task.model_validate(message)
        notes = [note for note in task.inputs if isinstance(note, SegmentNote)]
        inputs = [note.open([fd]) for note, fd in zip(notes, descriptors, strict=True)]
    except ValueError as error:
        reason = error.errors()[0]["msg"] if isinstance(error, ValidationError) else str(error)
        raise DataError("message of the master", "work", reason.rstrip("."), "See the service's log.") from None
    return task, inputs


class WorkerSlabs:
    """The shared memory that a worker writes to."""

    def __init__(self) -> None:
        self.splits, self.batches = Slabs(), Slabs()


def serve(connection: socket.socket) -> None:
    """Runs a worker: receives work and sends results until the other side is gone."""
    import pyarrow as pa

    pa.set_cpu_count(1)
    first = framing.receive(connection)
    if first is None:
        return
    workers = {name: Worker(DataSpec.model_validate(spec)) for name, spec in first[0]["data"].items()}
    for worker in workers.values():
        worker.warm_up()
    store = open_result_store(first[0].get("network"))
    location = None if store is None else store.address.location
    slabs = WorkerSlabs()
    framing.send(connection, {"pid": os.getpid(), "location": location})
    while (received := framing.receive(connection)) is not None:
        if store is not None and "drop" in received[0]:
            store.drop(received[0]["drop"])
            continue
        try:
            task, inputs = parse_task(*received)
            answer, segment = do_task(workers, task, inputs, slabs, store)
        finally:
            framing.close(received[1])
        if segment is None or store is not None:
            framing.send(connection, answer)
        else:
            framing.send(connection, answer, [segment.fd])
            segment.close()
    if store is not None:
        store.close()


def open_result_store(settings: Any) -> "ResultStore | None":
    """Returns what serves the results of this process, or None without settings: results go to the master then."""
    if settings is None:
        return None
    from pipeline.preprocessing.transport.result_store import (
        ResultStore,  # Flight takes a quarter of a second to import
    )

    return ResultStore(NetworkSettings.model_validate(settings))


def do_task(
    workers: Mapping[str, Worker],
    task: Task,
    inputs: Sequence[Segment],
    slabs: WorkerSlabs,
    store: "ResultStore | None",
) -> tuple[framing.Message, Segment | None]:
    """Does a piece of work. Returns the message for the master, and the result if there is one."""
    writer = (slabs.splits if isinstance(task.work, Split) else slabs.batches).writer()
    try:
        places = [place for place in task.inputs if isinstance(place, Place)]
        arrays = store.find(places) if store is not None else slabs.splits.read(inputs)
        rows, costs = run_work(workers[task.data], task.work, arrays, writer)
    except Exception as error:  # sent to the master, which decides
        if not isinstance(error, ContractError):
            sys.excepthook(type(error), error, error.__traceback__)
        unreachable = error.location if isinstance(error, UnreachableError) else None
        return {"error": to_wire(wrap_work_error(error, task.work)), "unreachable": unreachable}, None
    segment = writer.finish()
    answer = {"shapes": segment.shapes, "size": segment.size, "rows": rows, "peak_rss_mb": peak_rss_mb()}
    if store is not None:
        answer["place"] = store.keep(segment).model_dump()
    return answer | {"costs": vars(costs)}, segment


def preload() -> None:
    """Loads what the first split needs."""
    load_compiler()


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the command, which ends its workers
    with socket.socket(fileno=int(os.environ.pop("DLRM_WORKER_FD"))) as connection, suppress(BrokenPipeError):
        serve(connection)
