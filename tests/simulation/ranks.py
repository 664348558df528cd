"""Simulated ranks: they converse with the service like real ones, step together, save checkpoints and start again."""

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

from pipeline.data.position import LostRows, Position
from pipeline.errors import ContractError, DataError
from pipeline.preprocessing.epoch.memory import Arrays
from pipeline.preprocessing.epoch.request import BatchNote, Request
from pipeline.preprocessing.transport.conversation import Conversation, parse_notes
from pipeline.training.state.progress import TrainingProgress
from tests.simulation.network import Link, SimulatedService
from tests.simulation.workers import Memory
from tests.simulation.world import World, require

FAULTS = ("a rank dies", "a rank hangs", "a checkpoint is not finished")
HANG_SECONDS = 60.0
"""The launcher ends ranks that make no progress for this long."""
Trained = tuple[tuple[int, ...], Position]
"""Rows of a step, and the position after it."""


class Rank:
    """One rank's reading of one epoch."""

    def __init__(self, world: World, service: SimulatedService, request: Request, number: int, group: "Group") -> None:
        self.world, self.group, self.number = world, group, number
        self.talk = Conversation(request, number)
        self.inbox: list[tuple[Any, Memory | None]] = []
        self.notes: Sequence[BatchNote] = []
        self.arrays: Arrays = {}
        self.at = 0
        self.ended = False
        self.link = Link(world, service, self.receive)
        for message in self.talk.open():
            self.link.send(message)

    def receive(self, message: Any, memory: Any) -> None:
        """Takes an answer. None: the service is gone."""
        if message is None:
            self.group.fail(DataError("preprocessing service", "batches", "none: its process ended", "Run again."))
            return
        self.inbox.append((message, memory))
        self.pump()

    def pump(self) -> None:
        """Reads the next answer once the batches of the last one are trained."""
        if self.at < len(self.notes) or not self.inbox or self.ended:
            return
        message, memory = self.inbox.pop(0)
        try:
            following = self.talk.follow(message, 0.1)
        except ContractError as error:
            self.group.fail(error)
            return
        if following is None:
            self.ended = True
            self.link.close()
        elif memory is not None and memory.gone:
            self.link.send(self.talk.ask_again())
            return
        else:
            assert memory is not None
            self.notes, self.arrays, self.at = parse_notes(message), memory.arrays, 0
            self.link.send(following)
        self.group.step()

    def share(self, ranks: tuple[int, ...]) -> list[int]:
        """Returns this rank's rows of the current batch."""
        first, rows, _, _ = self.arrays["shares"][self.at, ranks.index(self.number)].tolist()
        dense, weights = (self.arrays[name][first : first + rows] for name in ("dense", "weights"))
        return [int(row) for row, weight in zip(dense[:, 0], weights, strict=True) if weight]


class Group:
    """All ranks of one attempt: they make each step together.

    Args:
        on_end: Called once, with None at the end of the training, an error that ends it, or "restart".
    """

    def __init__(
        self, world: World, service: SimulatedService, run: Any, attempt: int, on_end: Callable[[Any], None]
    ) -> None:
        self.world, self.service, self.run, self.attempt, self.on_end = world, service, run, attempt, on_end
        text = run.checkpoint
        self.progress = TrainingProgress() if text is None else TrainingProgress.model_validate_json(text)
        del run.trained[self.progress.steps :]
        self.alive, self.hangs, self.busy = True, False, False
        self.requests = 0
        self.ranks: list[Rank] = []
        if text is not None and run.config.on_corrupt == "fail":
            try:
                self.progress.require_rows(run.folder)
            except ContractError as error:
                self.fail(error)
                return
        self.begin_epoch()

    def begin_epoch(self) -> None:
        """Opens the stream of the current epoch, or ends the training."""
        if self.progress.position.epoch == self.run.epochs:
            self.save()
            self.run.finished = self.progress
            self.end(None)
            return
        everyone = tuple(range(self.run.world_size))
        request = Request(
            data="rows", number=self.requests, position=self.progress.position, batch_rows=self.run.batch_rows,
            seed=self.run.seed, window_rows=self.run.window_rows, world_size=self.run.world_size, ranks=everyone,
            attempt=self.attempt,
        )  # fmt: skip
        self.requests += 1
        self.ranks = [Rank(self.world, self.service, request, number, self) for number in everyone]

    def step(self) -> None:
        """Makes a step if all ranks have its batch, or ends the epoch if all are at its end."""
        if self.busy or not self.alive or self.hangs:
            return
        ready = [rank.at < len(rank.notes) for rank in self.ranks]
        if all(rank.ended for rank in self.ranks):
            self.end_epoch([rank.talk.lost for rank in self.ranks])
            return
        require(not (any(ready) and any(rank.ended for rank in self.ranks)), "ranks got different numbers of batches")
        if not all(ready):
            return
        if self.world.strikes("a rank dies"):
            self.end("restart")
            return
        if self.world.strikes("a rank hangs"):
            self.hangs = True
            self.world.later(HANG_SECONDS, lambda: self.end("restart"))
            return
        self.busy = True
        self.world.later(self.world.between(0.01, 0.3), self.finish_step)

    def finish_step(self) -> None:
        """Updates the progress after a step."""
        if not self.alive:
            return
        self.busy = False
        first = self.ranks[0]
        note = first.notes[first.at]
        require(all(rank.notes[rank.at] == note for rank in self.ranks), "ranks got different batches")
        rows = tuple(row for rank in self.ranks for row in rank.share(rank.talk.request.ranks))
        require(len(rows) == note.rows, f"a batch of {note.rows} rows has {len(rows)}")
        self.run.trained.append((rows, note.position))
        batch: Any = SimpleNamespace(global_rows=note.rows, position=note.position)
        self.progress = self.progress.after(batch)
        if self.progress.steps % self.run.checkpoint_steps == 0:
            self.save()
        for rank in self.ranks:
            rank.at += 1
        for rank in self.ranks:
            rank.pump()
        self.step()

    def end_epoch(self, lost: list[tuple[LostRows, ...]]) -> None:
        """Moves on to the next epoch."""
        require(len(set(lost)) == 1, "ranks lost different rows")
        self.progress = self.progress.after_epoch(lost[0])
        self.begin_epoch()

    def save(self) -> None:
        """Writes a checkpoint. It counts once it is complete, also after the ranks are gone."""
        if self.world.strikes("a checkpoint is not finished"):
            return
        text, steps = self.progress.model_dump_json(), self.progress.steps

        def seal() -> None:
            if self.alive and steps >= self.run.checkpoint_at:
                self.run.checkpoint, self.run.checkpoint_at = text, steps

        self.world.later(self.world.between(0.0, 0.5), seal)

    def fail(self, error: ContractError) -> None:
        """Ends the training with an error that a rank reports."""
        self.end(error)

    def end(self, how: Any) -> None:
        """Ends all ranks."""
        if self.alive:
            self.alive = False
            for rank in self.ranks:
                rank.link.close()
            self.on_end(how)
