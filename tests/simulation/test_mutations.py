"""The simulation finds bugs: each of these, put into the real code, breaks a promise in one of the first schedules.

`python -m tests.simulation.test_mutations` prints how soon.
"""

import logging
import time

import pytest

from pipeline.preprocessing.epoch import blocks
from pipeline.preprocessing.epoch.blocks import BlockReader
from pipeline.preprocessing.epoch.cutter import BatchCutter
from pipeline.preprocessing.epoch.groups import GroupBuffer
from pipeline.preprocessing.epoch.stream import Stream
from pipeline.preprocessing.master import Master
from pipeline.preprocessing.pool import WorkerPool
from pipeline.preprocessing.rank_protocol import RankProtocol
from pipeline.training.state.progress import TrainingProgress
from tests.simulation.mutation import Mutation, rebuilt
from tests.simulation.preprocessing import BrokenPromise, play

SCHEDULES = 150
BUGS: dict[str, Mutation] = {
    "a position forgets what was lost": (BatchCutter, "cut", "self.lost += ", "_ = "),
    "a resumed window has its lost rows again": (blocks, "_leave_out", "not in gone", "not in ()"),
    "the next epoch forgets what was lost": (TrainingProgress, "after_epoch", "lost=lost", "lost=()"),
    "a file that breaks among half trained rows is skipped": (
        Stream, "quarantine", "if self.request.position.row and", "if False and",
    ),
    "row groups of a divided split change places": (
        BlockReader, "divide", "block.parts[at : at + 1] = parts", "block.parts[at : at + 1] = parts[::-1]",
    ),
    "a second result counts, too": (Stream, "complete", "if item not in self.running:", "if False:"),
    "a group is dropped before it is taken": (GroupBuffer, "release", "group.number <= number", "group.number <= number + 2"),
    "a window is freed while a group still needs it": (BlockReader, "close_unused", "and not block.uses", ""),
    "a late result is never freed": (Master, "handle", "self.executor.free(event.memory)", "pass"),
    "work of a dead worker is not done again": (Master, "_replace", "if item is not None:", "if False:"),
    "a silent worker keeps its work": (Master, "watch_workers", "self.pool.overdue()", "()"),
    "work that hangs goes from one new worker to the next": (WorkerPool, "straggler", "item.doubled = True", "pass"),
    "a message that comes twice is answered twice": (
        RankProtocol, "_note_taken", "(message.take, message.again) != expected", "message.take > connection.next",
    ),
    "too little memory is waited for": (Master, "get_group", "and stream.is_stuck(number)", "and False"),
    "results of a worker that ended are waited for": (Master, "_end_worker", "if self.executor.keeps_results:", "if False:"),
    "work takes rows that are gone": (GroupBuffer, "next_group", "not group.is_ready or", ""),
    "a batch ends where its group ends": (BatchCutter, "_end_batch", "row=0 if whole else stop", "row=0"),
}  # fmt: skip


def find() -> int | None:
    """Returns the first seed whose schedule breaks a promise. Any other error means that the schedule itself failed."""
    for seed in range(SCHEDULES):
        try:
            play(seed)
        except BrokenPromise:
            return seed
    return None


@pytest.mark.slow
@pytest.mark.parametrize("bug", BUGS)
def test_the_simulation_finds(bug: str) -> None:
    with rebuilt([BUGS[bug]], broken=True):
        assert find() is not None, f"none of {SCHEDULES} schedules found it"


@pytest.mark.slow
def test_the_same_schedules_find_nothing_in_the_right_code() -> None:
    """Which is compiled again in the same way."""
    with rebuilt(BUGS.values(), broken=False):
        assert find() is None


def main() -> None:
    """Prints how soon each bug is found."""
    logging.disable(logging.CRITICAL)  # the service logs what the bugs do to it
    for bug in BUGS:
        begun = time.monotonic()
        with rebuilt([BUGS[bug]], broken=True):
            seed = find()
        found = "not found" if seed is None else f"found by seed {seed}"
        print(f"{bug}: {found}, {time.monotonic() - begun:.1f} s", flush=True)


if __name__ == "__main__":
    main()
