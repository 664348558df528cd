"""The messages of an epoch between a rank and the master, without a socket."""

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ValidationError

from pipeline.data.position import LostRows
from pipeline.errors import DataError, from_wire
from pipeline.preprocessing.epoch.memory import Arrays
from pipeline.preprocessing.epoch.request import BatchNote, Request
from pipeline.preprocessing.epoch.stream import Stream
from pipeline.preprocessing.transport import framing

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


class Conversation:
    """A rank's side of the messages of an epoch, without a socket.

    Attributes:
        lost: See `Position.lost`. Known at the end.
    """

    def __init__(self, request: Request, rank: int) -> None:
        self.request, self.rank = request, rank
        self.number = self.failures = 0
        self.lost: tuple[LostRows, ...] = ()

    def open(self) -> list[framing.Message]:
        """Returns the first messages: the request of the epoch and that for the first group of batches."""
        opening = {"open": self.request.model_dump(mode="json"), "rank": self.rank}
        return [opening, {"take": 0, "done": -2, "rows": 0, "waited": 0.0}]

    def follow(self, answer: framing.Message, waited: float) -> framing.Message | None:
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
                raise invalid_message("its end") from None
            return None
        rows = sum(note.rows for note in parse_notes(answer))
        waited = waited if self.number else 0.0  # leaves out the start of the workers
        self.number += 1
        return {"take": self.number, "done": self.number - 2, "rows": rows, "waited": waited}

    def ask_again(self) -> framing.Message:
        """Returns the request for the same group, which its worker did not deliver. Another answer follows."""
        self.number, self.failures = self.number - 1, self.failures + 1
        return {"take": self.number, "done": self.number - 2, "rows": 0, "waited": 0.0, "again": self.failures}


def check_delivery(request: Request, notes: Sequence[BatchNote], arrays: Arrays) -> None:
    """Checks the arrays of a delivery.

    Raises:
        DataError: If they are not those of these batches.
    """
    kinds = {name: (arrays[name].dtype.name, arrays[name].ndim) for name in DELIVERED if name in arrays}
    if kinds != DELIVERED or arrays["shares"].shape != (len(notes), len(request.ranks), 4):
        raise invalid_message("their arrays")
    if len({len(arrays[name]) for name in ("dense", "labels", "weights")}) > 1:
        raise invalid_message("their rows")


def parse_notes(message: framing.Message) -> Sequence[BatchNote]:
    """Returns the notes of the batches that a message delivers.

    Raises:
        DataError: If the message is invalid.
    """
    try:
        return _Notes.model_validate(message).notes
    except ValidationError:
        raise invalid_message("their notes") from None


def invalid_message(what: str) -> DataError:
    """Returns the error of a message of the service that makes no sense."""
    remedy = "Run the command again to resume from the last checkpoint."
    return DataError("preprocessing service", "batches", f"an invalid message about {what}", remedy)


@dataclass(eq=False)
class Connection:
    """A rank's connection, for one stream."""

    channel: Any
    """Belongs to the transport."""
    stream: Stream | None = None
    rank: int = 0
    wanted: int | None = None
    """Number of the group that the rank waits for."""
    next: int = 0
    """Number of the group that it may ask for next."""
    again: int = 0
    """How often it asked for a group again."""
    tries: int = 0
    """How often it asked for the last group again."""
    refused: bool = False
    """Whether it sent something that no rank sends. All further messages are ignored."""

    def close(self) -> None:
        """Closes what the transport holds open for it."""
        self.channel.close()


@dataclass(frozen=True)
class Incoming:
    """A message from a connection. None means that the connection was closed."""

    connection: Connection
    message: framing.Message | None
