"""Sends messages between the processes of the service: JSON together with descriptors of shared memory. No pickle."""

import contextlib
import json
import os
import socket
import struct
from collections.abc import Sequence
from typing import Any

Message = dict[str, Any]
HEADER = struct.Struct("!QI")
"""Bytes of JSON and number of descriptors."""
INT = struct.Struct("i")
MOST_BYTES = 1 << 30
"""A longer message is refused."""
DESCRIPTORS_AT_ONCE = 250
"""The kernel passes up to 253 in one call."""
SHORT_BYTES = 1 << 16
"""A longer message travels in a memory file, sent as the first descriptor. A socket's buffer is small, and a sender
must never wait for a receiver that does not read."""


def send(connection: socket.socket, message: Message, descriptors: Sequence[int] = ()) -> None:
    """Sends a message and copies of the descriptors.

    Raises:
        OSError: If the other side is gone.
    """
    body = json.dumps(message).encode()
    if len(body) <= SHORT_BYTES:
        _send(connection, len(body), descriptors, body)
        return
    with open(os.memfd_create("dlrm-message", os.MFD_CLOEXEC), "wb") as file:
        file.write(body)
        file.flush()
        _send(connection, len(body), [file.fileno(), *descriptors], b"")


def _send(connection: socket.socket, size: int, descriptors: Sequence[int], body: bytes) -> None:
    connection.sendall(HEADER.pack(size, len(descriptors)))
    for start in range(0, len(descriptors), DESCRIPTORS_AT_ONCE):
        socket.send_fds(connection, [b"\0"], list(descriptors[start : start + DESCRIPTORS_AT_ONCE]))
    connection.sendall(body)


def receive(connection: socket.socket) -> tuple[Message, list[int]] | None:
    """Returns the next message and its descriptors, which the caller closes.

    Returns None if the other side is gone or sends an invalid message.
    """
    header = _receive_exactly(connection, HEADER.size)
    if header is None:
        return None
    size, expected = HEADER.unpack(header)
    descriptors: list[int] = []
    message: Any = None
    try:
        while len(descriptors) < expected:
            wanted = min(expected - len(descriptors), DESCRIPTORS_AT_ONCE)
            before = len(descriptors)
            mark, found, _, _ = connection.recvmsg(1, socket.CMSG_SPACE(wanted * INT.size), socket.MSG_CMSG_CLOEXEC)
            for level, kind, data in found:
                if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                    descriptors += [descriptor for (descriptor,) in INT.iter_unpack(data)]
            if not mark or len(descriptors) < before + wanted:
                return None
        body = _receive_exactly(connection, size) if size <= SHORT_BYTES else _read_body(descriptors, size)
        message = None if body is None else json.loads(body)
    except (OSError, ValueError, RecursionError):
        return None
    finally:
        if not isinstance(message, dict):
            close(descriptors)
    return (message, descriptors) if isinstance(message, dict) else None


def _read_body(descriptors: list[int], size: int) -> bytes | None:
    """Reads a message from its memory file. Closes the descriptor and removes it from the list."""
    if not descriptors or size > MOST_BYTES:
        return None
    with open(descriptors[0], "rb", closefd=False) as file:
        if os.fstat(file.fileno()).st_size != size:
            return None
        file.seek(0)
        body = file.read()
    os.close(descriptors.pop(0))
    return body


def close(descriptors: Sequence[int]) -> None:
    """Closes descriptors. Ignores those that are closed already."""
    for descriptor in descriptors:
        with contextlib.suppress(OSError):
            os.close(descriptor)


def _receive_exactly(connection: socket.socket, size: int) -> bytes | None:
    parts = bytearray()
    while len(parts) < size:
        try:
            part = connection.recv(min(size - len(parts), 1 << 20))
        except OSError:
            return None
        if not part:
            return None
        parts += part
    return bytes(parts)
