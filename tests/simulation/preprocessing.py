"""A training's preprocessing under faults: every row comes once, or is lost and counted, in the order of the plan.

The real master, streams, protocol, conversations, positions and progress run. Workers, ranks, network and clock are
simulated. A person is, too: after an error it restores files or raises a bound, and runs the command again.
"""

import datetime
import hashlib
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np

from pipeline.data.position import LostRows, Position
from pipeline.errors import ContractError
from pipeline.preprocessing.config import PreprocessingConfig
from pipeline.preprocessing.epoch import stream
from pipeline.preprocessing.quarantine import read_quarantine
from pipeline.training.state.progress import TrainingProgress
from storage.reader import Fragment
from tests.simulation import network, ranks, workers
from tests.simulation.network import Link, SimulatedService
from tests.simulation.outcome import scratch
from tests.simulation.ranks import Group, Trained
from tests.simulation.workers import Disk
from tests.simulation.world import BrokenPromise, World, require

FAULTS = (*workers.FAULTS, *network.FAULTS, *ranks.FAULTS, "the whole run is killed", "a file is damaged")
PATIENCE = 1000.0
"""Longest time without a step, in simulated seconds. Many workers may not start within 120 s each."""
JUNK: list[Any] = [{}, {"open": 3}, {"take": 0}, {"open": {"data": "rows"}, "rank": 0}, {"take": -1, "done": 10**9}]


@dataclass
class Outcome:
    """What a schedule did."""

    faults: Counter[str]
    states: set[tuple[int, ...]]
    order_hash: str
    lost_rows: int
    reruns: int
    trace: list[str]

    @property
    def sums(self) -> Counter[str]:
        """What can be added over schedules."""
        return Counter({"lost rows": self.lost_rows, "runs again": self.reruns})


class Run:
    """A training from its first command to its end."""

    def __init__(self, seed: int, folder: Path, calm: bool = False) -> None:
        draw = random.Random(seed)
        self.folder, self.seed = folder, draw.randrange(1000)
        sizes = [draw.randint(1, 30) for _ in range(draw.randint(1, 14))]
        files, fragments = 0, list[Fragment]()
        while sizes:
            count = draw.randint(1, 4)
            for row_group, rows in enumerate(sizes[:count]):
                path = f"file-{files}"
                fragments.append(Fragment(path=path, row_group=row_group, rows=rows, day=datetime.date(2025, 1, 1)))
            sizes, files = sizes[count:], files + 1
        self.epochs, self.world_size = draw.choice([1, 1, 2]), draw.choice([1, 1, 2, 3])
        self.batch_rows, self.window_rows = draw.choice([3, 10, 64]), draw.choice([1, 25, 60, 10**6])
        self.checkpoint_steps = draw.choice([1, 3, 8])
        self.group_rows = draw.choice([1, 20, 40])
        total = sum(one.rows for one in fragments)
        tight = draw.random() < 0.2
        self.config = PreprocessingConfig(
            workers=draw.choice(["auto", 1, 2, 3]), max_workers=4, split_rows=draw.choice([1, 15, 50]),
            memory_bytes=1 << 20, attempts=draw.choice([1, 2, 3]), lease_seconds=30.0,
            on_corrupt=draw.choice(["fail", "quarantine"]), restart_limit=draw.choice([2, 16, 10**6]),
            transport="memory" if seed % 3 else "network", connections=1 + seed % 4,
        ).model_copy(update={"memory_bytes": 1 + total * draw.choice([4, 12, 24]) if tight else 1 << 20})  # fmt: skip
        share = draw.choice([1.0, 1.0, 0.5])
        often = {"the whole run is killed": draw.choice([0, 1, 3])}
        faults = {kind: (often.get(kind, draw.choice([0, 0, 1, 3])), draw.choice([0.03, 0.2])) for kind in FAULTS}
        self.world = World(draw.randrange(2**60), {} if calm else faults)
        damaged: dict[Any, tuple[float, float]] = {}
        for one in fragments:
            if self.world.strikes("a file is damaged"):
                begin = draw.choice([0.0, draw.uniform(0.0, 20.0)])
                damaged[one.path, one.row_group] = begin, draw.choice([begin + draw.uniform(1.0, 10.0), 10.0**9])
        endless = {key for key in damaged if draw.random() < 0.3}
        self.disk = Disk(self.world, fragments, damaged, endless, share)
        self.was_damaged = set(damaged)
        self.trained: list[Trained] = []
        self.checkpoint: str | None = None
        self.checkpoint_at = 0
        self.finished: TrainingProgress | None = None
        self.reruns = self.attempts = 0
        self.states: set[tuple[int, ...]] = set()

    # -- what happens -------------------------------------------------------------------------------------------------

    def command(self) -> None:
        """A person runs the command."""
        self.attempts = 0
        self.world.note(f"command {self.reruns}: {self.config.on_corrupt}, checkpoint of step {self.checkpoint_at}")
        self.service = SimulatedService(self.world, self.disk, self.config, self.folder)
        self.start_ranks()
        service = self.service
        if self.world.strikes("a stranger connects"):
            self.world.later(self.world.between(0.0, 5.0), lambda: self.disturb(service))
        self.schedule_kill(service)

    def schedule_kill(self, service: SimulatedService) -> None:
        """Kills the whole run at some time, perhaps."""
        left, _ = self.world.faults.get("the whole run is killed", (0, 0.0))
        if left:
            self.world.later(self.world.between(0.0, 15.0), lambda: self.kill(service))

    def kill(self, service: SimulatedService) -> None:
        if service.running and self.world.faults["the whole run is killed"][0]:
            self.world.faults["the whole run is killed"] = (self.world.faults["the whole run is killed"][0], 1.0)
            self.world.strikes("the whole run is killed")
            self.group.on_end = lambda how: None
            self.group.end("killed")
            service.die()
            self.rerun()

    def disturb(self, service: SimulatedService) -> None:
        """A process that is no rank sends something."""
        link = Link(self.world, service, lambda message, arrays: None)
        for _ in range(self.world.random.randint(1, 3)):
            link.send(self.world.random.choice(JUNK))
        if self.world.random.random() < 0.5:
            link.close()

    def start_ranks(self) -> None:
        """Starts the ranks from the last checkpoint."""
        service = self.service
        done: list[Any] = []

        def on_end(how: Any) -> None:
            done.append(how)
            self.world.later(self.world.between(0.1, 2.0), lambda: self.after_ranks(service, how))

        self.group = Group(self.world, service, self, self.attempts, on_end)

    def after_ranks(self, service: SimulatedService, how: Any) -> None:
        """The launcher restarts ranks that died. Otherwise the command ends."""
        if not service.running:
            return
        if how == "restart":
            self.attempts += 1
            self.start_ranks()
            return
        self.states |= service.states
        service.end()
        if isinstance(how, ContractError):
            self.react(how)
            self.rerun()

    def react(self, error: ContractError) -> None:
        """Does what the error says."""
        text = str(error)
        self.world.note(f"error: {text}")
        require("expected to keep running" not in text, f"the service failed by itself: {text}")
        if "on_corrupt is fail, got a training without" in text:
            self.config = self.config.model_copy(update={"on_corrupt": "quarantine"})
        elif "preprocessing.memory_bytes" in text:
            require(self.config.memory < 1 << 20, f"enough memory is said to be too little: {text}")
            self.config = self.config.model_copy(update={"memory_bytes": 1 << 20})
        elif "damage" in text:
            require(self.was_damaged, f"nothing was damaged: {text}")
            self.disk.repair()
        else:
            self.disk.repair()  # if a file never ended
            known = ("a passing fault", "its process ended", "it was silent for", "it did not start within")
            require(any(part in text for part in known), f"an error without a cause: {text}")

    def rerun(self) -> None:
        """A person runs the command again."""
        self.states |= self.service.states
        self.reruns += 1
        require(self.reruns < 60, "the command never comes to its end")
        self.world.later(self.world.between(1.0, 10.0), self.command)

    # -- what must hold -----------------------------------------------------------------------------------------------

    def check(self) -> str:
        """Compares what was trained with the plan. Returns the hash of its order."""
        progress = self.finished
        assert progress is not None
        lost = progress.position.lost
        expected = [batch for epoch in range(self.epochs) for batch in self.plan(epoch, lost)]
        require(len(self.trained) == progress.steps, "the progress counts other steps than were made")
        for step, (found, planned) in enumerate(zip(self.trained, expected, strict=False)):
            require(found[0] == planned[0], f"step {step} has rows {found[0]}, and {planned[0]} are its rows")
            require(found[1] == planned[1], f"step {step} ends at {found[1]}, and {planned[1]} is its end")
        require(len(self.trained) == len(expected), f"{len(self.trained)} steps instead of {len(expected)}")
        for epoch in range(self.epochs):
            self.check_epoch(epoch, lost)
        listed = {(entry["epoch"], entry["path"], entry["row_group"]) for entry in read_quarantine(self.folder)}
        require({(one.epoch, one.path, one.row_group) for one in lost} <= listed, "lost rows are not listed")
        return hashlib.sha256(repr(self.trained).encode()).hexdigest()

    def check_epoch(self, epoch: int, lost: Sequence[LostRows]) -> None:
        """Every row was trained once, or it is lost."""
        gone = [(one.path, one.row_group) for one in lost if one.epoch == epoch]
        require(len(gone) == len(set(gone)), "a row group is counted as lost twice")
        rows = Counter(row for found, position in self.trained if position.epoch == epoch for row in found)
        for fragment in self.disk.fragments:
            times = 0 if (fragment.path, fragment.row_group) in gone else 1
            for row in self.disk.rows(fragment):
                require(rows[row] == times, f"row {row} was trained {rows[row]} times in epoch {epoch}")

    def plan(self, epoch: int, lost: Sequence[LostRows]) -> Iterator[Trained]:
        """Yields the batches of an undisturbed epoch without the lost rows. Written independently of the service."""
        gone = {(one.path, one.row_group): one for one in lost if one.epoch == epoch}
        so_far = tuple(one for one in lost if one.epoch < epoch)
        windows: list[list[Fragment]] = []
        window: list[Fragment] | int
        held = self.window_rows
        for i in self.draws(epoch, 0).permutation(len(self.disk.fragments)):
            if held >= self.window_rows:
                windows.append([])
                held = 0
            windows[-1].append(self.disk.fragments[i])
            held += self.disk.fragments[i].rows
        rows: list[tuple[int, int, bool, tuple[LostRows, ...]]] = []
        for number, window in enumerate(windows):
            so_far += tuple(gone[key] for one in window if (key := (one.path, one.row_group)) in gone)
            kept = [row for one in window if (one.path, one.row_group) not in gone for row in self.disk.rows(one)]
            order = self.draws(epoch, number + 1).permutation(len(kept))
            rows += [(kept[i], number, place + 1 == len(kept), so_far) for place, i in enumerate(order)]
        begun: dict[int, int] = {}
        for place, (_, number, _, _) in enumerate(rows):
            begun.setdefault(number, place)
        for batch, start in enumerate(range(0, len(rows), self.batch_rows)):
            chosen = rows[start : start + self.batch_rows]
            _, number, whole, until = chosen[-1]
            place = start + len(chosen) - begun[number]
            window, row = (number + 1, 0) if whole else (number, place)
            if len(chosen) < self.batch_rows:  # only the end of the epoch ends it
                window, row, until = len(windows), 0, so_far
            position = Position(epoch=epoch, batches=batch + 1, window=window, row=row, lost=until)
            yield tuple(row for row, _, _, _ in chosen), position

    def draws(self, epoch: int, number: int) -> np.random.Generator:
        return np.random.Generator(np.random.Philox(np.random.SeedSequence([self.seed, epoch, number])))


def play(seed: int, calm: bool = False) -> Outcome:
    """Runs the schedule of a seed.

    Args:
        calm: Leaves out all faults.
    Raises:
        BrokenPromise: If something happens that must never happen. Its note holds the trace.
    """
    with scratch() as folder:
        run = Run(seed, folder, calm)
        try:
            with patch.object(stream, "GROUP_ROWS", run.group_rows):
                run.command()
                run.world.run(
                    lambda: run.finished is not None and not run.service.running,
                    PATIENCE,
                    lambda: (len(run.trained), run.reruns, run.attempts),
                )
            order = run.check()
        except Exception as error:
            error.add_note("\n".join(["", *run.world.trace]))
            raise
    assert run.finished is not None
    lost = sum(one.rows for one in run.finished.position.lost)
    return Outcome(run.world.struck, run.states | run.service.states, order, lost, run.reruns, run.world.trace)


__all__ = ["FAULTS", "BrokenPromise", "Outcome", "play"]
