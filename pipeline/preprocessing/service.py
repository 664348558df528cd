"""The preprocessing service: runs a master in its own thread and serves the clients of all ranks."""

import os
import queue
import secrets
import socket
import struct
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from pydantic import BaseModel, NonNegativeFloat, NonNegativeInt, ValidationError, model_validator

from pipeline.errors import ContractError, to_wire
from pipeline.preprocessing import wire
from pipeline.preprocessing.config import PreprocessingConfig
from pipeline.preprocessing.dataset import DataSpec
from pipeline.preprocessing.executors import Event
from pipeline.preprocessing.master import Master, Totals, wrap_service_error
from pipeline.preprocessing.stream import Request, Stream

CREDENTIALS = struct.Struct("3i")
"""Content of SO_PEERCRED: process, user and group."""
SEND_LIMIT = struct.pack("@ll", 5, 0)
"""Value of SO_SNDTIMEO, seconds and microseconds. A client that does not read for this long is disconnected."""


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
    refused: bool = False
    """Whether it sent something that no rank sends. All further messages are ignored."""


@dataclass(frozen=True)
class Incoming:
    """A message from a connection. None means that the connection was closed."""

    connection: Connection
    message: wire.Message | None


class Desk:
    """The master's side of the conversations with the ranks, without sockets, threads or a clock.

    Args:
        send: Sends a message with descriptors to a connection. Raises OSError if its other side is gone.
        hang_up: Ends a connection. An `Incoming` without message follows.
    """

    def __init__(
        self,
        master: Master,
        send: Callable[[Connection, wire.Message, list[int]], None],
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
        if message.take != connection.next or message.done >= message.take or connection.wanted is not None:
            self._refuse(connection)
            return
        connection.wanted, connection.next = message.take, message.take + 1
        stream.release(connection.rank, message.done)
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
            segment = self.master.executor.to_segment(group.memory)
            connection.wanted = None
            stream.take(number)
            notes = [asdict(note) | {"position": note.position.model_dump()} for note in group.notes]
            self._send(connection, {"notes": notes, "shapes": segment.shapes, "size": segment.size}, [segment.fd])
            segment.close()
        elif stream.ended(number):
            connection.wanted = None
            self._send(connection, {"end": [one.model_dump() for one in stream.lost]})

    def _send(self, connection: Connection, message: wire.Message, descriptors: list[int] | None = None) -> None:
        try:
            self.send(connection, message, descriptors or [])
        except OSError:  # it is gone, or it does not read
            self._refuse(connection)


class Service:
    """Runs workers and their master for the duration of a `with` block.

    Clients connect to `address`, a Unix socket in the abstract namespace. It needs no port and no file, and admits
    only processes of the same user.

    Args:
        data: The datasets that ranks can request, by name.
        folder: See `Master`.
        warn: See `Master`.
    """

    def __init__(
        self,
        data: Mapping[str, DataSpec],
        config: PreprocessingConfig,
        folder: Path,
        warn: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.data, self.config, self.folder, self.warn = data, config, folder, warn
        self.address = f"dlrm-preprocessing-{os.getpid()}-{secrets.token_hex(8)}"
        self.totals = Totals()
        self.readers: list[tuple[threading.Thread, socket.socket]] = []
        self.listening: threading.Thread | None = None
        self.startup: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()

    def __enter__(self) -> Self:
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.listener.bind(f"\0{self.address}")
        self.listener.listen()
        self.ending = threading.Event()
        # Workers die with the thread that starts them, so the whole master runs in one thread.
        self.thread = threading.Thread(target=self._run, name="preprocessing-master", daemon=True)
        self.thread.start()
        problem = self.startup.get()
        if problem is not None:
            self.__exit__(None, None, None)
            raise problem
        self.listening = threading.Thread(target=self._listen, name="preprocessing-listener", daemon=True)
        self.listening.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.ending.set()
        with suppress(OSError):
            self.listener.shutdown(socket.SHUT_RDWR)
        if self.listening is not None:
            self.listening.join()
        self.listener.close()
        if self.listening is not None:
            self.events.put(None)  # wakes the master
        self.thread.join()
        for reader, channel in self.readers:
            with suppress(OSError):  # closing alone neither wakes the reader nor reaches the client
                channel.shutdown(socket.SHUT_RDWR)
            reader.join()
            channel.close()

    def _run(self) -> None:
        try:
            master = Master(self.data, self.config, self.folder, self.warn)
            self.totals, self.events = master.totals, master.events
        except BaseException as problem:  # `__enter__` raises it
            self.startup.put(problem)
            return
        self.startup.put(None)
        try:
            desk = Desk(master, _send, _hang_up)
            while not self.ending.is_set():
                event = master.next_event()
                desk.turn(event)
                if isinstance(event, Incoming) and event.message is None:
                    event.connection.channel.close()
        finally:
            master.close()

    def _listen(self) -> None:
        while True:
            try:
                channel, _ = self.listener.accept()
            except OSError:
                if self.ending.wait(0.1):
                    return
                continue  # out of descriptors at the moment
            peer = channel.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size)
            if CREDENTIALS.unpack(peer)[1] != os.getuid():
                channel.close()
                continue
            channel.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, SEND_LIMIT)
            reader = threading.Thread(
                target=self._read, args=(Connection(channel),), name="preprocessing-client", daemon=True
            )
            self.readers = [pair for pair in self.readers if pair[0].is_alive()] + [(reader, channel)]
            reader.start()

    def _read(self, connection: Connection) -> None:
        while (received := wire.receive(connection.channel)) is not None:
            wire.close(received[1])
            self.events.put(Incoming(connection, received[0]))
        self.events.put(Incoming(connection, None))


def _send(connection: Connection, message: wire.Message, descriptors: list[int]) -> None:
    wire.send(connection.channel, message, descriptors)


def _hang_up(connection: Connection) -> None:
    with suppress(OSError):
        connection.channel.shutdown(socket.SHUT_RDWR)
