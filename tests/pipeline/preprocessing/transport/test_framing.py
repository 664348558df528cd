"""Messages and descriptors arrive whole or not at all, and no descriptor is leaked."""

import os
import random
import socket
import threading
from collections.abc import Iterator
from contextlib import suppress

import pytest

from pipeline.preprocessing.transport import framing
from tests.pipeline.preprocessing.reference import eventually

Pair = tuple[socket.socket, socket.socket]


@pytest.fixture
def pair() -> Iterator[Pair]:
    ours, theirs = socket.socketpair()
    before = set(os.listdir("/proc/self/fd"))
    with ours, theirs:
        yield ours, theirs
        left = set(os.listdir("/proc/self/fd")) - before
        assert not {name for name in left if os.path.exists(f"/proc/self/fd/{name}")}


def memory(text: bytes) -> int:
    descriptor = os.memfd_create("dlrm-test")
    os.write(descriptor, text)
    return descriptor


def content(descriptor: int) -> bytes:
    return os.pread(descriptor, 100, 0)


@pytest.mark.parametrize("body", [b"[" * 60_000, b'{"a":' * 10_000, b"\xff{}", b"[]", b"nan"])
def test_text_that_is_no_message_ends_the_connection(pair: Pair, body: bytes) -> None:
    pair[0].sendall(framing.HEADER.pack(len(body), 0) + body)
    assert framing.receive(pair[1]) is None


@pytest.mark.parametrize("count", [0, 1, 249, 250, 251, 253, 254, 500, 1000])
@pytest.mark.parametrize("size", [0, framing.SHORT_BYTES, 10 * framing.SHORT_BYTES])
def test_messages_arrive_whole_and_in_order(pair: Pair, count: int, size: int) -> None:
    """Even with more descriptors than the kernel takes at once."""
    ours, theirs = pair
    sent = [memory(b"%d" % i) for i in range(count)]
    messages = [{"n": n, "text": "x" * size} for n in range(2)]
    sender = threading.Thread(target=lambda: [framing.send(ours, message, sent) for message in messages])
    sender.start()
    for message in messages:
        received = framing.receive(theirs)
        assert received is not None
        found, descriptors = received
        assert found == message
        assert [content(descriptor) for descriptor in descriptors] == [b"%d" % i for i in range(count)]
        assert not any(os.get_inheritable(descriptor) for descriptor in descriptors)
        framing.close(descriptors)
    sender.join()
    framing.close(sent)


@pytest.mark.parametrize("size", [framing.SHORT_BYTES, 50 << 20])
def test_sending_does_not_wait_for_the_reader(pair: Pair, size: int) -> None:
    """A stopped worker or a busy rank reads nothing, and the master has others to serve."""
    ours, theirs = pair
    ours.setblocking(False)
    descriptor = memory(b"here")
    framing.send(ours, {"text": "x" * (size - 20)}, [descriptor] * 500)
    received = framing.receive(theirs)
    assert received is not None
    assert len(received[0]["text"]) == size - 20
    framing.close([descriptor, *received[1]])


@pytest.mark.parametrize("size", [10, 3 * framing.SHORT_BYTES])
@pytest.mark.parametrize("count", [0, 3, 300])
def test_a_truncated_message_is_none(pair: Pair, size: int, count: int) -> None:
    """The sender dies in the middle of it, at any byte."""
    ours, theirs = pair
    descriptor = memory(b"here")
    marks = -(-count // framing.DESCRIPTORS_AT_ONCE)
    whole = framing.HEADER.size + max(marks, 1 if size > framing.SHORT_BYTES else 0)
    if size <= framing.SHORT_BYTES:
        whole += len('{"t": ""}') + size
    for stop in range(whole):
        a, b = socket.socketpair()
        with b:
            with a:
                _send_part(a, {"t": "x" * size}, [descriptor] * count, stop)
            assert framing.receive(b) is None
    framing.close([descriptor])
    framing.send(ours, {})
    assert framing.receive(theirs) == ({}, [])


class _Cut(Exception):
    pass


def _send_part(channel: socket.socket, message: framing.Message, descriptors: list[int], stop: int) -> None:
    """Sends the first `stop` bytes of a message and their descriptors."""
    left = [stop]

    class Part(socket.socket):
        def sendall(self, data: bytes, flags: int = 0) -> None:  # type: ignore[override]
            super().sendall(data[: left[0]])
            left[0] -= len(data)
            if left[0] < 0:
                raise _Cut

        def sendmsg(self, *arguments: object) -> int:
            if left[0] < 1:
                raise _Cut
            left[0] -= 1
            return super().sendmsg(*arguments)  # type: ignore[arg-type]

    part = Part(fileno=os.dup(channel.fileno()))
    with part, suppress(_Cut):
        framing.send(part, message, descriptors)


def test_an_invalid_message_is_none(pair: Pair) -> None:
    chance = random.Random(3)
    descriptor = memory(b"[1]" * 100)
    for _ in range(300):
        a, b = socket.socketpair()
        with b:
            with a:
                body = chance.randbytes(chance.randrange(40))
                size = chance.choice([len(body), 0, 5, 10**6, 2**63])
                count = chance.choice([0, 0, 1, 2, 300, 2**31])
                a.sendall(framing.HEADER.pack(size, count)[: chance.choice([12, 12, 12, 5])])
                if chance.random() < 0.7:
                    socket.send_fds(a, [b"\0"], [descriptor] * chance.choice([1, 2, 250]))
                a.sendall(body)
            assert framing.receive(b) is None
    framing.close([descriptor])


@pytest.mark.parametrize("body", [b"", b"{", b"[1]", b"1", b"null", b"\xff\xfe"])
def test_what_is_no_json_object_is_none(pair: Pair, body: bytes) -> None:
    ours, theirs = pair
    descriptor = memory(b"here")
    ours.sendall(framing.HEADER.pack(len(body), 1))
    socket.send_fds(ours, [b"\0"], [descriptor])
    ours.sendall(body)
    assert framing.receive(theirs) is None
    framing.close([descriptor])


def test_fewer_descriptors_than_promised_are_none(pair: Pair) -> None:
    """The kernel drops descriptors if a process may open no more."""
    ours, theirs = pair
    descriptor = memory(b"here")
    ours.sendall(framing.HEADER.pack(2, 2))
    socket.send_fds(ours, [b"\0"], [descriptor])
    ours.sendall(b"{}")
    assert framing.receive(theirs) is None
    framing.close([descriptor])


def test_a_dead_peer_is_none_to_receive_and_an_error_to_send(pair: Pair) -> None:
    ours, theirs = pair
    theirs.close()
    assert framing.receive(ours) is None
    with pytest.raises(OSError):
        framing.send(ours, {"n": 1}, [0])


def test_shutting_down_wakes_the_reader(pair: Pair) -> None:
    ours, _ = pair
    found: list[object] = []
    reader = threading.Thread(target=lambda: found.append(framing.receive(ours)))
    reader.start()
    ours.shutdown(socket.SHUT_RDWR)
    eventually(lambda: found == [None])
    reader.join()


def test_closing_twice_is_no_error() -> None:
    descriptor = os.memfd_create("dlrm-test")
    framing.close([descriptor])
    framing.close([descriptor])
