"""The master's side of a Unix socket, for ranks of this machine and user."""

import os
import secrets
import socket
import struct
import threading
from collections.abc import Callable
from contextlib import suppress

from pipeline.preprocessing.transport import framing
from pipeline.preprocessing.transport.conversation import Connection, Incoming

CREDENTIALS = struct.Struct("3i")
"""Content of SO_PEERCRED: process, user and group."""
SEND_LIMIT = struct.pack("@ll", 5, 0)
"""Value of SO_SNDTIMEO, seconds and microseconds. A client that does not read for this long is disconnected."""


class UnixFront:
    """Carries messages and descriptors of shared memory over a socket in the abstract namespace.

    Args:
        put: Takes messages for the master.
    Attributes:
        address: The socket's name.
    """

    def __init__(self, put: Callable[[Incoming], None]) -> None:
        self.put = put
        self.address = f"dlrm-preprocessing-{os.getpid()}-{secrets.token_hex(8)}"
        self.readers: list[tuple[threading.Thread, socket.socket]] = []
        self.ending = threading.Event()
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.listener.bind(f"\0{self.address}")
        self.listener.listen()
        self.listening = threading.Thread(target=self._listen, name="preprocessing-listener", daemon=True)
        self.listening.start()

    def send(self, connection: Connection, message: framing.Message, descriptors: list[int]) -> None:
        """Sends a message and copies of the descriptors."""
        framing.send(connection.channel, message, descriptors)

    def hang_up(self, connection: Connection) -> None:
        """Ends a connection. Its reader reports that."""
        with suppress(OSError):
            connection.channel.shutdown(socket.SHUT_RDWR)

    def watch(self) -> None:
        """Does nothing: the kernel reports clients that are gone."""

    def close(self) -> None:
        """Ends all connections."""
        self.ending.set()
        with suppress(OSError):
            self.listener.shutdown(socket.SHUT_RDWR)
        self.listening.join()
        self.listener.close()
        for reader, channel in self.readers:
            with suppress(OSError):  # closing alone neither wakes the reader nor reaches the client
                channel.shutdown(socket.SHUT_RDWR)
            reader.join()
            channel.close()

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
        while (received := framing.receive(connection.channel)) is not None:
            framing.close(received[1])
            self.put(Incoming(connection, received[0]))
        self.put(Incoming(connection, None))
