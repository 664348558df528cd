"""The simulation of the storage side finds bugs: each of these, put back, breaks a promise in one of its schedules."""

from collections.abc import Callable
from typing import Any

import pytest

from pipeline.jobs.training import finish
from pipeline.jobs.upkeep import clean
from pipeline.registration import aliases, register
from pipeline.training.restore import Restore
from pipeline.training.state import checkpoint
from storage.durable import _SyncedFile
from storage.snapshot import writing
from tests.simulation import checkpoints, registry, tables
from tests.simulation.mutation import rebuilt
from tests.simulation.world import BrokenPromise

SCHEDULES = 1500
CLEAR = "shutil.rmtree(folder, ignore_errors=True)  # a killed attempt may have left a part of the weights"
Bug = tuple[Callable[[int], Any], Any, str, str, str]
BUGS: dict[str, Bug] = {
    "a commit of unknown outcome deletes its files": (
        tables.play, writing, "committing", "isinstance(error, CommitFailedException | ValidationException)", "True",
    ),
    "staged files go although a snapshot may name them": (
        tables.play, writing.StagedDays, "commit", "reference = replace_files(self.warehouse, table, days, lambda writer: files, notes, io=self._hand_over(files))",
        "theirs = self._hand_over(files); before = list(theirs.written); self.io.written += before; reference = replace_files(self.warehouse, table, days, lambda writer: files, notes, io=theirs); self.io.written = [one for one in self.io.written if one not in before]",
    ),
    "tagged snapshots expire": (tables.play, tables, "expire", "gone = old - needed", "gone = old - {table.metadata.current_snapshot_id}"),
    "a power failure empties committed files": (
        tables.play, _SyncedFile, "close", "os.fsync(self.file.fileno())", "pass",
    ),
    "a damaged checkpoint is loaded": (checkpoints.play, checkpoint, "verify", "!= digest", "!= digest and False"),
    "a power failure takes back a checkpoint": (checkpoints.play, checkpoint, "seal_folder", "_sync(path.parent)", "pass"),
    "a checkpoint that was being replaced is deleted": (
        checkpoints.play, checkpoint, "remove_partial", "name is not None", "False",
    ),
    "leftovers of interrupted saves stay": (
        checkpoints.play, checkpoint, "remove_partial", "shutil.rmtree(folder, ignore_errors=True)", "pass",
    ),
    "a damaged checkpoint counts among those that are kept": (
        checkpoints.play, checkpoint, "prune", "if folder.name <= newest.name", "",
    ),
    "the best model of another attempt counts for that of this one": (
        checkpoints.play, Restore, "finish", "update=best", "update={}",
    ),
    "a repeated registration makes a second version": (
        registry.play, finish, "register", "if made is not None:", "if False:",
    ),
    "rollbacks go to and fro": (
        registry.play, aliases, "_list_champions", 'if move.by == "rollback" and', "if False and",
    ),
    "a clock that was ahead changes the order of moves": (
        registry.play, aliases, "_next_time", "if moves and", "if False and",
    ),
    "a killed attempt leaves its files in the model": (
        registry.play, register, "pack", f"{CLEAR}\n    folder.mkdir(parents=True)",
        "folder.mkdir(parents=True, exist_ok=True)",
    ),
    "the champions before the present one are removed": (
        registry.play, clean, "list_spared", "champions[-1 - ROLLBACKS :]", "champions[-1:]",
    ),
}  # fmt: skip


FIRST = {
    "tagged snapshots expire": 79,
    "a damaged checkpoint is loaded": 69,
    "a power failure takes back a checkpoint": 122,
    "a checkpoint that was being replaced is deleted": 126,
    "a damaged checkpoint counts among those that are kept": 382,
    "the best model of another attempt counts for that of this one": 466,
    "a clock that was ahead changes the order of moves": 178,
}
"""The seed to begin with, for bugs that take a hundred schedules to find. Where a change of the simulation has moved the
schedule that finds one, the search goes on from there."""


def find(bug: str) -> int | None:
    """Returns the first seed whose schedule breaks a promise. Any other error means that the schedule itself failed."""
    play, first = BUGS[bug][0], FIRST.get(bug, 0)
    for seed in range(first, first + SCHEDULES):
        try:
            play(seed)
        except BrokenPromise:
            return seed
    return None


@pytest.mark.slow
@pytest.mark.parametrize("bug", BUGS)
def test_the_simulation_finds(bug: str) -> None:
    """The schedule that finds a bug finds nothing in the right code, which is compiled again in the same way."""
    play, owner, name, right, wrong = BUGS[bug]
    mutation = (owner, name, right, wrong)
    with rebuilt([mutation], broken=True):
        seed = find(bug)
    assert seed is not None, f"none of {SCHEDULES} schedules found it"
    with rebuilt([mutation], broken=False):
        play(seed)
