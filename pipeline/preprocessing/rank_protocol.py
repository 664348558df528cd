"""Server side of the rank protocol, independent of the transport."""

from collections.abc import Callable
from typing import Self

from pydantic import BaseModel, NonNegativeFloat, NonNegativeInt, ValidationError, model_validator

from pipeline.errors import ContractError, to_wire
from pipeline.preprocessing.epoch.request import Request
from pipeline.preprocessing.epoch.stream import Stream
from pipeline.preprocessing.executors import Event
from pipeline.preprocessing.master import Master, wrap_service_error
from pipeline.preprocessing.transport import framing
from pipeline.preprocessing.transport.conversation import Connection, Incoming

TRIES = 2
"""A worker from which a rank could not fetch a group this many times is replaced."""


class _Open(BaseModel, frozen=True):
    """A rank's first message."""

    open: Request
    rank: int

    @model_validator(mode="after")
    def _check_rank(self) -> Self:
        if self.rank not in self.open.ranks or max(self.open.ranks) >= self.open.world_size:
            raise ValueError("a rank that the request does not have")
        return self


class _Take(BaseModel, frozen=True):
    """A rank's request for the next group of batches."""

    take: int
    done: int
    """The last group that the rank no longer needs."""
    rows: NonNegativeInt
    """Rows that it trained on since the last message."""
    waited: NonNegativeFloat
    """Seconds that it waited for the last group."""
    again: NonNegativeInt = 0
    """How often it did not get a group from the worker that keeps it, if it asks for the last one again."""


class RankProtocol:
    """Answers the ranks: opens their streams and sends them batches. Has no socket, no thread and no clock.

    Args:
        send: Sends a message with descriptors to a connection. Raises OSError if its other side is gone.
        hang_up: Ends a connection. An `Incoming` without message follows.
    """

    def __init__(
        self,
        master: Master,
        send: Callable[[Connection, framing.Message, list[int]], None],
        hang_up: Callable[[Connection], None],
    ) -> None:
        self.master, self.send, self.hang_up = master, send, hang_up
        self.connections: list[Connection] = []

    def turn(self, event: Event | Incoming | None) -> None:
        """Handles an event, assigns work, and sends finished batches to the ranks that wait for them.

        Args:
            event: None if nothing happened for a while.
        """
        master = self.master
        with master.guard():
            if isinstance(event, Incoming):
                self._receive(event)
            elif event is not None:
                master.handle(event)
            master.watch_workers()
            master.assign()
        with master.guard():
            for connection in list(self.connections):
                self._answer(connection)

    def _receive(self, incoming: Incoming) -> None:
        connection, message = incoming.connection, incoming.message
        stream = connection.stream
        if message is None:
            if connection in self.connections:
                self.connections.remove(connection)
            if stream is not None:
                self.master.leave(stream, connection.rank)
        elif not connection.refused:
            try:
                if stream is None:
                    self._open(connection, _Open.model_validate(message))
                else:
                    self._note_taken(connection, stream, _Take.model_validate(message))
            except ValidationError:  # not one of our ranks, or a damaged one: the others continue
                self._refuse(connection)

    def _open(self, connection: Connection, message: _Open) -> None:
        self.connections.append(connection)
        connection.rank = message.rank
        try:
            connection.stream = self.master.open(message.open, message.rank)
        except Exception as error:
            self._send(connection, {"error": to_wire(wrap_service_error(error))})
            connection.refused = True

    def _note_taken(self, connection: Connection, stream: Stream, message: _Take) -> None:
        expected = (connection.next - 1, connection.again + 1) if message.again else (connection.next, 0)
        if (message.take, message.again) != expected or message.done >= message.take or connection.wanted is not None:
            self._refuse(connection)
            return
        connection.wanted, connection.next = message.take, message.take + 1
        connection.again += message.again > 0
        connection.tries = connection.tries + 1 if message.again else 0
        if connection.tries >= TRIES:
            self.master.replace_keeper(stream, message.take)
        stream.groups.release(connection.rank, message.done)
        if connection.rank == stream.request.ranks[0]:
            self.master.note_consumed(message.rows, message.waited)

    def _refuse(self, connection: Connection) -> None:
        """Disconnects a client. Its reader reports that it is gone."""
        connection.refused, connection.wanted = True, None
        self.hang_up(connection)

    def _answer(self, connection: Connection) -> None:
        """Sends the group that a rank waits for, if it is made."""
        stream, number = connection.stream, connection.wanted
        if stream is None or number is None:
            return
        try:
            group = self.master.get_group(stream, number)
        except ContractError as error:
            connection.wanted = None
            self._send(connection, {"error": to_wire(error)})
            return
        if group is not None:
            fields, descriptors = self.master.executor.deliver(group.memory)
            connection.wanted = None
            stream.groups.take(number)
            notes = [vars(note) | {"position": note.position.model_dump()} for note in group.notes]
            self._send(connection, {"notes": notes} | fields, descriptors)
            framing.close(descriptors)
        elif stream.ended(number):
            connection.wanted = None
            self._send(connection, {"end": [one.model_dump() for one in stream.cutter.lost]})

    def _send(self, connection: Connection, message: framing.Message, descriptors: list[int] | None = None) -> None:
        try:
            self.send(connection, message, descriptors or [])
        except OSError:  # it is gone, or it does not read
            self._refuse(connection)
