"""The trainer's resumable iterator over the batches of an epoch. Only the seed decides their order."""

import socket
import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import torch
from pydantic import BaseModel, ValidationError

from models.dlrm import SharedFeatures
from pipeline.data.batch import Batch, keyed_lists
from pipeline.data.position import LostRows, Position, Times
from pipeline.errors import ConfigError, DataError, from_wire
from pipeline.preprocessing.config import PreprocessingConfig
from pipeline.preprocessing.dataset import DataSpec
from pipeline.preprocessing.master import Master
from pipeline.preprocessing.memory import Arrays, SegmentNote
from pipeline.preprocessing.stream import BatchNote, Request
from pipeline.preprocessing.transport import wire
from pipeline.preprocessing.transport.places import ServiceAddress
from storage.scratch import ScratchFolder

Delivery = tuple[Sequence[BatchNote], Arrays]
"""A group of batches as a worker made it: one note for each batch, and the arrays of all."""
Deliveries = Generator[Delivery, None, tuple[LostRows, ...]]
"""Yields the groups of an epoch. Returns the row groups that were lost up to its end. See `Position.lost`."""


DELIVERED = {
    "shares": ("int64", 3), "dense": ("float32", 2), "labels": ("float32", 1), "weights": ("float32", 1),
    "lengths": ("int32", 1), "values": ("int64", 1),
}  # fmt: skip
"""Data types and numbers of dimensions of a delivery's arrays; see `Worker.make_batches`."""


class _Notes(BaseModel, frozen=True):
    """An answer that delivers batches."""

    notes: tuple[BatchNote, ...]


class _End(BaseModel, frozen=True):
    """An answer at the end of an epoch."""

    end: tuple[LostRows, ...]


class BatchSource(Protocol):
    """Delivers batches."""

    def groups(self, request: Request, rank: int) -> Deliveries:
        """Yields the rest of an epoch, one group of batches at a time."""

    def ranks(self, rank: int, world_size: int) -> tuple[int, ...]:
        """Returns the ranks whose shares are made together with this rank's."""


class Conversation:
    """A rank's side of the messages of an epoch, without a socket.

    Attributes:
        lost: See `Position.lost`. Known at the end.
    """

    def __init__(self, request: Request, rank: int) -> None:
        self.request, self.rank = request, rank
        self.number = self.failures = 0
        self.lost: tuple[LostRows, ...] = ()

    def open(self) -> list[wire.Message]:
        """Returns the first messages: the request of the epoch and that for the first group of batches."""
        opening = {"open": self.request.model_dump(mode="json"), "rank": self.rank}
        return [opening, {"take": 0, "done": -2, "rows": 0, "waited": 0.0}]

    def follow(self, answer: wire.Message, waited: float) -> wire.Message | None:
        """Returns the request for the next group. Send it before you use this group. Returns None at the end.

        Args:
            waited: Seconds until the answer came.
        Raises:
            ContractError: The error that stopped the service, or that the answer is invalid.
        """
        if "error" in answer:
            raise from_wire(answer["error"])
        if "end" in answer:
            try:
                self.lost = _End.model_validate(answer).end
            except ValidationError:
                raise _invalid("its end") from None
            return None
        rows = sum(note.rows for note in parse_notes(answer))
        waited = waited if self.number else 0.0  # leaves out the start of the workers
        self.number += 1
        return {"take": self.number, "done": self.number - 2, "rows": rows, "waited": waited}

    def ask_again(self) -> wire.Message:
        """Returns the request for the same group, which its worker did not deliver. Another answer follows."""
        self.number, self.failures = self.number - 1, self.failures + 1
        return {"take": self.number, "done": self.number - 2, "rows": 0, "waited": 0.0, "again": self.failures}


class ServiceSource:
    """Delivers the batches of a service, which runs in another process or in a thread of this one.

    Args:
        address: `Service.address`.
    """

    def __init__(self, address: str) -> None:
        self.address = address

    def ranks(self, rank: int, world_size: int) -> tuple[int, ...]:
        """Returns all ranks."""
        return tuple(range(world_size))

    def groups(self, request: Request, rank: int) -> Deliveries:
        """See `BatchSource`. Requests the next group before yielding one, to overlap its transfer with training.

        Raises:
            ContractError: The error that stopped the service.
        """
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as channel:
            talk = Conversation(request, rank)
            try:
                channel.connect(f"\0{self.address}")
                for message in talk.open():
                    wire.send(channel, message)
                while True:
                    begun = time.perf_counter()
                    received = wire.receive(channel)
                    waited = time.perf_counter() - begun
                    if received is None:
                        raise ConnectionError
                    answer, descriptors = received
                    try:
                        following = talk.follow(answer, waited)
                        if following is None:
                            return talk.lost
                        delivery = map_delivery(request, answer, descriptors)
                    finally:
                        wire.close(descriptors)
                    wire.send(channel, following)
                    yield delivery
            except OSError:
                raise DataError(
                    "preprocessing service", "batches", "none: its process ended",
                    "Run the command again to resume from the last checkpoint.",
                ) from None  # fmt: skip


def open_remote_source(address: str | ServiceAddress, connections: int) -> BatchSource:
    """Returns the source of the batches of a service.

    Args:
        address: `Service.address`.
        connections: Workers to be connected to at a time, if they serve over the network.
    """
    if isinstance(address, str):
        return ServiceSource(address)
    from pipeline.preprocessing.transport.source import NetworkSource  # Flight takes a quarter of a second to import

    return NetworkSource(address, connections)


def map_delivery(request: Request, message: wire.Message, descriptors: Sequence[int]) -> Delivery:
    """Maps the batches that a message delivers. The arrays stay valid when the descriptors are closed.

    Raises:
        DataError: If the message is invalid.
    """
    notes = parse_notes(message)
    try:
        arrays = SegmentNote.model_validate(message).open(descriptors).arrays()
    except (ValueError, OSError):
        raise _invalid("their memory") from None
    check_delivery(request, notes, arrays)
    return notes, arrays


def check_delivery(request: Request, notes: Sequence[BatchNote], arrays: Arrays) -> None:
    """Checks the arrays of a delivery.

    Raises:
        DataError: If they are not those of these batches.
    """
    kinds = {name: (arrays[name].dtype.name, arrays[name].ndim) for name in DELIVERED if name in arrays}
    if kinds != DELIVERED or arrays["shares"].shape != (len(notes), len(request.ranks), 4):
        raise _invalid("their arrays")
    if len({len(arrays[name]) for name in ("dense", "labels", "weights")}) > 1:
        raise _invalid("their rows")


def parse_notes(message: wire.Message) -> Sequence[BatchNote]:
    """Returns the notes of the batches that a message delivers.

    Raises:
        DataError: If the message is invalid.
    """
    try:
        return _Notes.model_validate(message).notes
    except ValidationError:
        raise _invalid("their notes") from None


def _invalid(what: str) -> DataError:
    remedy = "Run the command again to resume from the last checkpoint."
    return DataError("preprocessing service", "batches", f"an invalid message about {what}", remedy)


class InlineSource:
    """Makes batches in this process, in the thread that asks for them.

    Args:
        data: The datasets it can deliver, by name.
        folder: See `Master`. None: a temporary one.
        warn: See `Master`.
    """

    def __init__(
        self,
        data: Mapping[str, DataSpec],
        config: PreprocessingConfig,
        folder: Path | None = None,
        warn: Callable[[str], None] = lambda text: None,
    ) -> None:
        config = config.model_copy(update={"executor": "inline", "workers": 1})
        if folder is None:
            self.temporary = ScratchFolder("dlrm-inline-")
            folder = Path(self.temporary.name)
        self.master = Master(data, config, folder, warn)
        self.lock = threading.Lock()
        """Held while the master works: a rank on CUDA reads training batches ahead in a thread while it validates."""

    def ranks(self, rank: int, world_size: int) -> tuple[int, ...]:
        """Returns this rank alone.

        Raises:
            ConfigError: If ranks could lose different rows. They would cut different batches.
        """
        if world_size > 1 and self.master.config.on_corrupt == "quarantine":
            raise ConfigError(
                "preprocessing.on_corrupt 'quarantine'", "one rank if each rank reads for itself", f"{world_size}",
                "Set training.world_size=1, or preprocessing.on_corrupt=fail.",
            )  # fmt: skip
        return (rank,)

    def groups(self, request: Request, rank: int) -> Deliveries:
        """See `BatchSource`."""
        with self.lock:
            stream = self.master.open(request)
        number = 0
        try:
            while True:
                with self.lock:
                    while (group := self.master.get_group(stream, number)) is None:
                        if stream.ended(number):
                            return stream.lost
                        self.master.step(timeout=0)
                    stream.take(number)
                assert group.memory is not None
                yield group.notes, group.memory
                with self.lock:
                    stream.release(rank, number)
                number += 1
        finally:
            with self.lock:
                self.master.close_stream(stream)


class Client:
    """Iterates over one rank's share of the batches of a dataset.

    Args:
        data: Name of the dataset at the source, and its spec.
        batch_rows: Rows of the GLOBAL batch. This rank gets its share of each.
        window_rows: Rows that are shuffled together. None keeps the order of the table.
        attempt: See `Request`.
    Attributes:
        lost: At the end of an epoch, the row groups that were quarantined up to there; see `Position.lost`.
    """

    def __init__(
        self,
        source: BatchSource,
        data: tuple[str, DataSpec],
        batch_rows: int,
        seed: int = 0,
        window_rows: int | None = None,
        rank: int = 0,
        world_size: int = 1,
        attempt: int = 0,
    ) -> None:
        self.attempt = attempt
        self.source, self.batch_rows, self.seed, self.window_rows = source, batch_rows, seed, window_rows
        self.name, spec = data
        self.keys = [feature.name for feature in spec.plan.sparse]
        self.weighted = [i for i, feature in enumerate(spec.plan.sparse) if feature.weighted]
        self.shared = spec.shared
        self.rank, self.world_size = rank, world_size
        self.requests = 0
        self.lost: tuple[LostRows, ...] = ()

    def batches(self, position: Position | None = None) -> Iterator[Batch]:
        """Yields the rest of the epoch that a position lies in.

        Args:
            position: From a batch of the same dataset, seed and batch size. None starts the first epoch.
        """
        request = Request(
            data=self.name,
            number=self.requests,
            position=Position() if position is None else position,
            batch_rows=self.batch_rows,
            seed=self.seed,
            window_rows=self.window_rows,
            world_size=self.world_size,
            ranks=self.source.ranks(self.rank, self.world_size),
            attempt=self.attempt,
        )
        self.requests += 1
        groups = self.source.groups(request, self.rank)
        while True:
            begun = time.perf_counter()
            try:
                notes, arrays = next(groups)
            except StopIteration as end:
                self.lost = end.value
                return
            waited = time.perf_counter() - begun
            for i, note in enumerate(notes):
                yield self._batch(note, i, arrays, request.ranks, waited if i == 0 else 0.0)

    def _batch(self, note: BatchNote, i: int, arrays: Arrays, ranks: tuple[int, ...], waited: float) -> Batch:
        row, rows, first, ids = arrays["shares"][i, ranks.index(self.rank)].tolist()
        features = len(self.keys)
        dense, labels, weights = (
            torch.from_numpy(arrays[name][row : row + rows]) for name in ("dense", "labels", "weights")
        )
        return Batch(
            dense=dense,
            sparse=keyed_lists(
                self.keys,
                arrays["values"][first : first + ids],
                arrays["lengths"][row * features : (row + rows) * features],
                self.weighted,
            ),
            labels=labels,
            weights=weights,
            position=note.position,
            global_rows=note.rows,
            times=Times(extract=note.extract_seconds, transform=note.transform_seconds, wait=waited),
            global_weight=float(arrays["totals"][i]) if "totals" in arrays else None,
            shared=SharedFeatures(torch.from_numpy(arrays["inverse"][row : row + rows]), self.shared)
            if self.shared
            else None,
        )
