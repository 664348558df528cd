"""The trainer's resumable iterator over the batches of an epoch. Only the seed decides their order."""

import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import torch

from models.dlrm import SharedFeatures
from pipeline.data.batch import Batch, keyed_lists
from pipeline.data.position import LostRows, Position, Times
from pipeline.errors import ConfigError, DataError
from pipeline.preprocessing.config import PreprocessingConfig
from pipeline.preprocessing.dataset import DataSpec
from pipeline.preprocessing.epoch.memory import Arrays, SegmentNote
from pipeline.preprocessing.epoch.request import BatchNote, Request
from pipeline.preprocessing.master import Master
from pipeline.preprocessing.transport import framing
from pipeline.preprocessing.transport.addresses import ServiceAddress
from pipeline.preprocessing.transport.conversation import (
    Conversation,
    Deliveries,
    Delivery,
    check_delivery,
    invalid_message,
    parse_notes,
)
from storage.scratch import ScratchFolder


class BatchSource(Protocol):
    """Delivers batches."""

    def groups(self, request: Request, rank: int) -> Deliveries:
        """Yields the rest of an epoch, one group of batches at a time."""

    def ranks(self, rank: int, world_size: int) -> tuple[int, ...]:
        """Returns the ranks whose shares are made together with this rank's."""


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
                    framing.send(channel, message)
                while True:
                    begun = time.perf_counter()
                    received = framing.receive(channel)
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
                        framing.close(descriptors)
                    framing.send(channel, following)
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


def map_delivery(request: Request, message: framing.Message, descriptors: Sequence[int]) -> Delivery:
    """Maps the batches that a message delivers. The arrays stay valid when the descriptors are closed.

    Raises:
        DataError: If the message is invalid.
    """
    notes = parse_notes(message)
    try:
        arrays = SegmentNote.model_validate(message).open(descriptors).arrays()
    except (ValueError, OSError):
        raise invalid_message("their memory") from None
    check_delivery(request, notes, arrays)
    return notes, arrays


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
                            return stream.cutter.lost
                        self.master.step(timeout=0)
                    stream.groups.take(number)
                assert group.memory is not None
                yield group.notes, group.memory
                with self.lock:
                    stream.groups.release(rank, number)
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
