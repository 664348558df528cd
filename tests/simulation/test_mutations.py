"""The simulation finds bugs: each of these, put into the real code, breaks a promise in one of the first schedules."""

import inspect
import sys
import textwrap
from typing import Any

import pytest

from pipeline.preprocessing import stream
from pipeline.preprocessing.master import Master
from pipeline.preprocessing.service import Desk
from pipeline.preprocessing.stream import Stream
from pipeline.training.state.progress import TrainingProgress
from tests.simulation.preprocessing import play

SCHEDULES = 300
BUGS: dict[str, tuple[Any, str, str, str]] = {
    "a position forgets what was lost": (Stream, "_note_lost", "self.lost += ", "_ = "),
    "a resumed window has its lost rows again": (stream, "_leave_out", "not in gone", "not in ()"),
    "the next epoch forgets what was lost": (TrainingProgress, "after_epoch", "lost=lost", "lost=()"),
    "a file that breaks among half trained rows is skipped": (
        Stream, "quarantine", "if self.request.position.row and", "if False and",
    ),
    "row groups of a divided split change places": (
        Stream, "divide", "window.parts[at : at + 1] = parts", "window.parts[at : at + 1] = parts[::-1]",
    ),
    "a second result counts, too": (Stream, "complete", "if item not in self.running:", "if False:"),
    "a group is dropped before it is taken": (Stream, "release", "group.number <= number", "group.number <= number + 2"),
    "a window is freed while a group still needs it": (Stream, "_free_windows", "and not window.uses", ""),
    "a late result is never freed": (Master, "handle", "self.executor.free(event.memory)", "pass"),
    "work of a dead worker is not done again": (Master, "_replace", "if item is not None and", "if False and"),
    "a silent worker keeps its work": (Master, "watch_workers", "self._check_leases()", "pass"),
    "work that hangs goes from one new worker to the next": (Master, "_straggler", "item.doubled = True", "pass"),
    "a message that comes twice is answered twice": (
        Desk, "_note_taken", "if message.take != connection.next", "if message.take > connection.next",
    ),
    "too little memory is waited for": (Master, "get_group", "and stream.is_stuck(number)", "and False"),
    "a batch ends where its group ends": (Stream, "_end_batch", "row=0 if whole else stop", "row=0"),
}  # fmt: skip


@pytest.mark.parametrize("bug", BUGS)
def test_the_simulation_finds(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, name, right, wrong = BUGS[bug]
    method = getattr(owner, name)
    source = textwrap.dedent(inspect.getsource(method))
    assert source.count(right) == 1
    names = dict(vars(sys.modules[method.__module__]))
    exec(source.replace(right, wrong), names)
    monkeypatch.setattr(owner, name, names[name])
    for seed in range(SCHEDULES):
        try:
            play(seed)
        except Exception:
            return
    pytest.fail(f"none of {SCHEDULES} schedules found it")
