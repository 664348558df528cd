"""Seconds of steps and batches against sums over made-up times."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from pipeline.data.batch import Batch
from pipeline.data.position import Position, Times
from pipeline.preprocessing.client import Client
from pipeline.training import trainer as trainer_module
from tests.pipeline.training.loops import STEPS, Cut, Maker, cut_after

STEP_SECONDS = 0.5
"""Duration of each step on the tests' clock."""


def times_of(epoch: int, batches: int) -> Times:
    """Returns made-up times of a batch. All differ, also between kinds."""
    return Times(extract=3.0 + epoch + batches / 8, transform=20.0 - batches / 4, wait=(7 * epoch + batches) % 5 / 4)


def timed(batches: Callable[[Position], Iterator[Batch]]) -> Callable[[Position], Iterator[Batch]]:
    def stream(position: Position) -> Iterator[Batch]:
        for batch in batches(position):
            yield replace(batch, times=times_of(batch.position.epoch, batch.position.batches))

    return stream


def times_by_step(steps: int) -> list[Times]:
    return [times_of(step // STEPS, step % STEPS + 1) for step in range(steps)]


@pytest.fixture
def steady_clock(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that advances only during steps."""
    if device.type == "cuda":
        pytest.skip("on CUDA the trainer times the wait for a batch itself")
    now = 0.0

    def tick() -> float:  # the trainer looks before a step and after it
        nonlocal now
        now += STEP_SECONDS
        return now

    monkeypatch.setattr(trainer_module, "time", SimpleNamespace(perf_counter=tick))


NAMES = {"extract": "batch_extract_seconds", "transform": "batch_transform_seconds", "wait": "batch_wait_seconds"}


@pytest.mark.parametrize("cut", [None, 3, 9, STEPS, 23])
@pytest.mark.usefixtures("steady_clock")
def test_each_window_reports_the_times_of_its_batches(
    make_trainer: Maker, train_client: Client, cut: int | None
) -> None:
    """Compares with sums over the made-up times. A resumed training reports the same as an uninterrupted one."""
    settings = {"epochs": 2, "log_every_steps": 4, "checkpoint_every_steps": 6}
    if cut is not None:
        first, _ = make_trainer(None, timed(cut_after(train_client, cut)), **settings)
        with pytest.raises(Cut):
            first.train()
    resumed = 0 if cut is None else cut - cut % 6
    trainer, events = make_trainer(None, timed(train_client.batches), **settings)
    progress = trainer.train()
    known = times_by_step(2 * STEPS)
    ends = [end for end in (4, 6, 8, 12, 14, 16, 18, 20, 24, 28) if end > resumed]  # logs, checkpoints, ends of epochs
    found = [event for event in events if event["event"] == "metrics"]
    assert [event["step"] for event in found] == ends
    for start, end, event in zip([resumed, *ends], ends, found, strict=False):
        window, so_far = known[start:end], known[:end]
        for kind, name in NAMES.items():
            assert event["metrics"][name] == pytest.approx(np.mean([getattr(times, kind) for times in window]))
        for name, stretch in (("stall_fraction_window", window), ("stall_fraction", so_far)):
            waited = sum(times.wait for times in stretch)
            assert event["metrics"][name] == pytest.approx(waited / (waited + STEP_SECONDS * len(stretch)))
    waited = sum(times.wait for times in known)
    assert progress.wait_seconds == pytest.approx(waited)
    assert progress.busy_seconds == pytest.approx(waited + STEP_SECONDS * 2 * STEPS)
    assert progress.stalled == pytest.approx(progress.wait_seconds / progress.busy_seconds)


@pytest.mark.usefixtures("steady_clock")
def test_batches_that_are_ready_do_not_stall(make_trainer: Maker, train_client: Client) -> None:
    at_once = (replace(batch, times=Times(extract=1.0)) for batch in train_client.batches())
    trainer, events = make_trainer(None, lambda position: at_once)
    assert trainer.train().stalled == 0.0
    assert {event["metrics"]["stall_fraction_window"] for event in events if "metrics" in event} == {0.0}
    assert {event["metrics"]["batch_extract_seconds"] for event in events if "metrics" in event} == {1.0}
