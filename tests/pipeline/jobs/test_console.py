"""Progress of long work on a terminal."""

import io
import logging
import sys

import pytest

from pipeline.jobs.console import Progress


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
