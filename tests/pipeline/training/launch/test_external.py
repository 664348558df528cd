"""Ranks that someone else started report through a file in the run's folder. tests/hosts runs real ones."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pipeline.errors import DataError, TrainingError, to_wire
from pipeline.training.config import TrainConfig
from pipeline.training.launch import external
from pipeline.training.launch.external import EVENTS, append_events, follow_ranks
from pipeline.training.launch.processes import Event, Limits

Emit = Callable[[dict[str, Any]], None]


def follow(folder: Path, play: Callable[[Emit], object], **limits: int) -> tuple[Event, list[Event]]:
    """Follows ranks that `play` plays. Returns result and events."""
    events: list[Event] = []

    def handle(event: Event) -> None:
        events.append(event)
        if event["event"] == "awaited":
            play(append_events(folder, 0))

    given = (2, 1, Limits(**{"deadline_seconds": 60, **limits}), handle, folder)
    return follow_ranks("module", TrainConfig(), folder, *given), events


def test_events_of_rank_0_arrive_and_the_file_goes(tmp_path: Path) -> None:
    reported = [{"event": "saved", "step": 3}, {"event": "metrics", "text": "ä"}, {"event": "result", "rows": 7}]

    def play(emit: Emit) -> None:
        append_events(tmp_path, 1)({"event": "of another rank"})
        for event in reported:
            emit(event)

    result, events = follow(tmp_path, play)
    assert result == {"event": "result", "rows": 7, "restarts": 0}
    assert [event["event"] for event in events] == ["awaited", "saved", "metrics", "result"]
    assert events[0]["command"] == (
        "torchrun --nnodes=2 --nproc-per-node=1 --node-rank=N --master-addr=ADDRESS --master-port=29500 "
        f"-m module {tmp_path / 'spec.json'}"
    )
    assert not (tmp_path / EVENTS).exists()


def test_restarts_by_whoever_started_the_ranks_are_counted(tmp_path: Path) -> None:
    """torchrun tells each rank how often it has restarted them."""
    result, _ = follow(tmp_path, lambda emit: emit({"event": "result", "restarts": 2}))
    assert result == {"event": "result", "restarts": 2}


def test_the_command_starts_as_many_ranks_on_each_host(tmp_path: Path) -> None:
    commands = []

    def handle(event: Event) -> None:
        if event["event"] == "awaited":
            commands.append(event["command"])
            append_events(tmp_path, 0)({"event": "result"})

    follow_ranks("module", TrainConfig(), tmp_path, 6, 1, Limits(deadline_seconds=60), handle, tmp_path, hosts=2)
    assert commands[0].startswith("torchrun --nnodes=2 --nproc-per-node=3 --node-rank=N ")


def test_a_line_counts_once_it_is_complete(tmp_path: Path) -> None:
    def play(emit: Emit) -> None:
        with (tmp_path / EVENTS).open("a") as file:
            file.write('{"event": "metrics"}\n{"event": "res')

    with pytest.raises(TrainingError, match=r"training.deadline_seconds=1,"):
        follow(tmp_path, play, deadline_seconds=1)


def test_the_error_of_a_rank_arrives_and_an_old_one_does_not(tmp_path: Path) -> None:
    error = DataError("t", "rows", "none", "Write some.")
    (tmp_path / "error-0.json").write_text("of an earlier start")

    def play(emit: Emit) -> None:
        (tmp_path / "error-1.json").write_text(json.dumps(to_wire(error)))

    with pytest.raises(DataError) as caught:
        follow(tmp_path, play)
    assert str(caught.value) == str(error)


def test_ranks_that_have_not_begun_do_not_hang_and_others_do(tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match=r"training.deadline_seconds=2,"):
        follow(tmp_path, lambda emit: None, deadline_seconds=2, hang_seconds=1)
    with pytest.raises(TrainingError, match=r"training.hang_seconds=1,"):
        follow(tmp_path, lambda emit: emit({"event": "start"}), deadline_seconds=60, hang_seconds=1)


def test_ranks_that_never_begin_are_told_of_and_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where torchrun of one host has ended: all others wait for it."""
    monkeypatch.setattr(external, "REMIND_SECONDS", 0.1)
    monkeypatch.setattr(external, "BEGIN_SECONDS", 1.0)
    events: list[Event] = []
    with pytest.raises(
        TrainingError, match=r"an event of rank 0, got none in 0 minutes. One host without torchrun keeps"
    ):
        follow_ranks("module", TrainConfig(), tmp_path, 2, 1, Limits(), events.append, tmp_path)
    assert [event["event"] for event in events[:3]] == ["awaited", "warning", "warning"]
    assert not (tmp_path / EVENTS).exists()


def test_ranks_end_when_the_training_that_follows_them_has_ended_or_a_newer_one_follows_others(tmp_path: Path) -> None:
    with pytest.raises(TrainingError) as caught:
        append_events(tmp_path, 0)
    assert str(caught.value) == (
        f"ranks of {tmp_path}: expected a training that follows them, got none. Start the training first, then the "
        "ranks by the command that it prints."
    )
    path = tmp_path / EVENTS
    path.touch()
    emit = append_events(tmp_path, 0)
    emit({"event": "metrics"})
    path.unlink()
    for _ in range(2):
        with pytest.raises(BrokenPipeError):
            emit({"event": "metrics"})
        path.touch()
