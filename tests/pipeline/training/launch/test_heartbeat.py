"""A heartbeat names the current activity and counts its changes."""

import queue
from typing import Any

from pipeline.training.launch.heartbeat import WAITING, Heartbeat


def test_waiting_differs_from_work() -> None:
    heard: queue.Queue[dict[str, Any]] = queue.Queue()
    heartbeat = Heartbeat(heard.put, seconds=0.01)

    def items() -> Any:
        assert heartbeat.doing == WAITING
        yield "a"
        assert heartbeat.doing == WAITING
        yield "b"
        assert heartbeat.doing == WAITING

    assert heard.get(timeout=60)["doing"] == "starting"
    counts = [heartbeat.count for _ in heartbeat.track(items(), "training") if heartbeat.doing == "training"]
    assert counts == [2, 4]
    while (beat := heard.get(timeout=60))["doing"] != "training":
        pass
    assert beat == {"event": "alive", "count": 6, "doing": "training"}


def test_it_ends_with_the_launcher() -> None:
    calls: list[dict[str, Any]] = []

    def broken(event: dict[str, Any]) -> None:
        calls.append(event)
        raise BrokenPipeError

    heartbeat = Heartbeat(broken, seconds=0.001)
    heartbeat.thread.join(5)
    assert not heartbeat.thread.is_alive()
    assert len(calls) == 1
