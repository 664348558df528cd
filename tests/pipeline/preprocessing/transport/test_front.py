"""Calls of the master may be lost and repeated: each message counts once, and each answer comes."""

import json
import queue
from collections.abc import Iterator
from typing import Any

import pyarrow.flight as flight
import pytest

from pipeline.preprocessing.transport import front as module
from pipeline.preprocessing.transport.access import connect, make_options
from pipeline.preprocessing.transport.addresses import NetworkSettings
from pipeline.preprocessing.transport.front import NetworkFront

SESSION = "s" * 32


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> "queue.Queue[Any]":
    monkeypatch.setattr(module, "POLL_SECONDS", 0.2)
    return queue.Queue()


@pytest.fixture
def front(given: "queue.Queue[Any]") -> Iterator[NetworkFront]:
    made = NetworkFront(NetworkSettings(host="127.0.0.1", token="e" * 64, connections=1), given.put)
    yield made
    made.close()


def call(front: NetworkFront, kind: str, number: int = 0, message: Any = None, session: str = SESSION) -> Any:
    body = json.dumps({"session": session, "number": number, "message": message or {}}).encode()
    with connect(front.address) as client:
        (answer,) = client.do_action(flight.Action(kind, body), make_options("e" * 64)(timeout=60))
        return json.loads(answer.body.to_pybytes())


def test_a_repeated_call_passes_its_message_on_once(front: NetworkFront, given: "queue.Queue[Any]") -> None:
    call(front, "open", 1, {"open": 1})
    for _ in range(3):
        assert call(front, "take", 2, {"take": 0}) == {}
    first, second = given.get(timeout=60), given.get(timeout=60)
    assert (first.message, second.message, given.empty()) == ({"open": 1}, {"take": 0}, True)
    front.send(second.connection, {"answer": 7}, [])
    assert call(front, "take", 2, {"take": 0}) == call(front, "take", 2, {"take": 0}) == {"answer": 7}
    assert given.empty()


def test_a_client_that_falls_silent_counts_as_gone(
    front: NetworkFront, given: "queue.Queue[Any]", monkeypatch: pytest.MonkeyPatch
) -> None:
    call(front, "open", 1, {"open": 1})
    front.watch()
    given.get(timeout=60)
    assert given.empty()
    monkeypatch.setattr(module, "SESSION_SECONDS", -1.0)
    front.watch()
    assert given.get(timeout=60).message is None
    with pytest.raises(flight.FlightServerError, match="expected a conversation that is open"):
        call(front, "take", 2, {"take": 0})


@pytest.mark.parametrize(("kind", "session"), [("stop", SESSION), ("take", "short"), ("take", SESSION)])
def test_calls_of_strangers_are_refused(front: NetworkFront, kind: str, session: str) -> None:
    with pytest.raises(flight.FlightServerError, match="expected a "):
        call(front, kind, 1, {}, session)


def test_a_conversation_that_the_master_ends_says_so(front: NetworkFront, given: "queue.Queue[Any]") -> None:
    call(front, "open", 1, {"open": 1})
    front.hang_up(given.get(timeout=60).connection)
    assert given.get(timeout=60).message is None
