"""Damaged messages of sockets and pipes."""

import gc
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

from pipeline.errors import ContractError, TrainingError, from_wire, to_wire
from pipeline.preprocessing.transport import framing
from tests.fuzz.harness import Case, require
from tests.fuzz.mutate import mutate_bytes, mutate_json, mutate_value, odd_value

MESSAGE = {"take": 3, "done": 1, "rows": 512, "waited": 0.25, "shapes": {"dense": ["float32", [2, 3]]}}


def open_descriptors() -> int:
    """Returns the number of open descriptors of this process."""
    return len(os.listdir("/proc/self/fd"))


def require_closed(before: int) -> None:
    """Checks that no more descriptors are open than before. Earlier inputs may have left garbage that is closed now."""
    if open_descriptors() > before:
        gc.collect()
    require(open_descriptors() <= before, "descriptors stay open")


@contextmanager
def wire_bytes(folder: Path) -> Iterator[Case]:
    """Bytes of the preprocessing service's sockets. Whatever arrives, no descriptor stays open."""

    def case(random: Random) -> None:
        open_before = open_descriptors()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        with ours, theirs:
            body = mutate_json(random, MESSAGE)[:60_000]
            if random.random() < 0.2:
                _send_in_file(random, theirs, body)
                body = b""
            size = random.choice([len(body)] * 6 + [0, 1, len(body) - 1, len(body) + 1, 1 << 30, 1 << 63])
            count = random.choice([0, 0, 0, 1, 2, 7, 1 << 20])
            head = framing.HEADER.pack(max(size, 0), count)
            given = [os.open("/dev/null", os.O_RDONLY) for _ in range(random.choice([0, min(count, 7), 3]))]
            theirs.settimeout(5)
            theirs.sendall(head if random.random() < 0.9 else mutate_bytes(random, head)[:100])
            if given:
                socket.send_fds(theirs, [b"\0"], given)
            framing.close(given)
            theirs.sendall(body)
            theirs.shutdown(socket.SHUT_WR)
            ours.settimeout(5)
            received = framing.receive(ours)
            if received is not None:
                message, descriptors = received
                require(isinstance(message, dict), "no message")
                framing.close(descriptors)
        require_closed(open_before)
        if received is None:
            raise ContractError("message", "a whole one", "another", "Send it again.")

    yield case


def _send_in_file(random: Random, channel: socket.socket, body: bytes) -> None:
    """Sends a long message: in a file of memory, or in what is none."""
    body += b" " * framing.SHORT_BYTES
    file = os.memfd_create("fuzz", os.MFD_CLOEXEC)
    others = [os.open(path, os.O_RDONLY) for path in ("/", "/dev/zero")]
    with open(file, "wb", closefd=False) as writer:
        writer.write(body)
    size = random.choice([len(body)] * 4 + [len(body) - 1, len(body) + 1, os.fstat(others[0]).st_size, 1 << 40])
    channel.sendall(framing.HEADER.pack(max(size, framing.SHORT_BYTES + 1), 1))
    socket.send_fds(channel, [b"\0"], [random.choice([file, file, file, *others])])
    framing.close([file, *others])


@contextmanager
def errors(folder: Path) -> Iterator[Case]:
    """Errors of other processes."""
    error = to_wire(TrainingError("rank 1", "a number", "none", "Lower it."))

    def case(random: Random) -> None:
        found: Any = from_wire(odd_value(random) if random.random() < 0.3 else mutate_value(random, error))
        str(found)

    yield case
