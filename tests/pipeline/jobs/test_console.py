"""Progress of long work on a terminal and in a log."""

import io
import logging
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from pipeline.jobs import console
from pipeline.jobs.console import Progress
from pipeline.jobs.training.events import EventReport


class Terminal(io.StringIO):
    """Takes what a terminal would show."""

    def isatty(self) -> bool:
        return True


def test_a_terminal_shows_one_bar_for_each_kind_of_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    with Progress(logging.getLogger("test")) as progress:
        for done in range(0, 1_000, 10):
            progress("train", done, 1_000, "NE 0.9")
            progress("valid", done, 1_000)
    shown = terminal.getvalue()
    assert shown.count("train:   0%") <= 1
    assert shown.count("\n") <= 4


def test_long_work_writes_few_lines_with_percent_speed_and_time_to_go(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Ten hours at a hundred rows a second, resumed at half, reported each second."""
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(console, "time", SimpleNamespace(monotonic=lambda: clock.now))
    caplog.set_level(logging.INFO)
    half = 5 * 3600 * 100
    with Progress(logging.getLogger("test")) as progress:
        for clock.now in range(5 * 3600 + 1):
            progress("train", half + 100 * int(clock.now), 2 * half, "NE 0.9")
    assert caplog.messages[0] == "train: 50 %, 1,800,500 of 3,600,000 rows, 100 rows/s, 4:59:55 to go, NE 0.9"
    assert caplog.messages[-1] == "train: 3,600,000 of 3,600,000 rows, 100 rows/s, NE 0.9"
    assert {f"{percent} %" for percent in (60, 70, 80, 90)} <= {line[7:11] for line in caplog.messages}
    assert len(caplog.messages) < 60


def test_a_training_that_gets_worse_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    journal: Any = SimpleNamespace(log=lambda step, metrics: None)
    report = EventReport(journal, Progress(None), 1_000, logging.getLogger("test"))
    for step, ne in enumerate([0.8, 0.79, *(0.8 + 0.01 * worse for worse in range(20))], 1):
        report({"event": "metrics", "step": step, "rows": step, "metrics": {"valid_ne": ne}})
    assert caplog.messages == [
        "valid NE is 0.8400 after 5 validations without a better one; the best was 0.7900 at step 2, and that "
        "model is kept. training.patience ends a training that gets worse"
    ]


def test_each_kind_of_work_is_counted_in_its_unit(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    with Progress(logging.getLogger("test")) as progress:
        for what in ("decode", "check", "ingest"):
            progress(what, 2, 2)
    assert caplog.messages == ["decode: 2 of 2 files", "check: 2 of 2 days", "ingest: 2 of 2 rows"]
