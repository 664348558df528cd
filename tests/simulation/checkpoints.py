"""A training's checkpoints under faults: what is loaded was written in full and is the newest such.

The real trainer's order of steps, validations, saves and restores runs, and so does the real writing and reading. The
model is one tensor, and a step is a number added to it. The disk is simulated.
"""

import math
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn

from pipeline.data.batch import Batch
from pipeline.data.position import NO_TIMES, Position
from pipeline.errors import ContractError
from pipeline.training import trainer as trainer_module
from pipeline.training.config import TrainConfig
from pipeline.training.learner import Learner
from pipeline.training.restore import Restore
from pipeline.training.state import checkpoint
from pipeline.training.state.checkpoint import BEST, STEP
from pipeline.training.state.checkpoints import Checkpoints
from pipeline.training.state.progress import LossSums, TrainingProgress
from pipeline.training.step import TrainStep
from pipeline.training.trainer import Trainer, TrainingData
from tests.simulation import disk
from tests.simulation.disk import Disk, Killed
from tests.simulation.outcome import Outcome, scratch
from tests.simulation.world import World, require

ROT, DIFFERENT = "a checkpoint rots", "a replay differs"
FAULTS = (*disk.FAULTS, ROT, DIFFERENT)
IDENTITY = {"plan": "some plan"}
Written = tuple[int, tuple[float, ...]]
"""Steps and weights."""


@dataclass
class Truth:
    """What the run has done, noted beside the real code."""

    sealed: dict[str, list[Written]] = field(default_factory=dict)
    """Name of a checkpoint -> what was saved under it, the last one last."""
    begun: dict[str, list[Written]] = field(default_factory=dict)
    """The same, including saves that did not end."""


class SmallLearner(Learner):
    """A model of one tensor."""

    def __init__(self) -> None:
        self.model, self.average, self.device = nn.Module(), None, torch.device("cpu")  # type: ignore[assignment]
        self.weights = torch.zeros(3)

    def state(self) -> dict[str, Any]:
        return {"model/weights": self.weights}


class SmallStep(TrainStep):
    """Adds a number to the tensor.

    Args:
        variant: Attempts of another variant train differently, for example because other rows were lost.
    """

    learner: SmallLearner

    def __init__(self, run: "Run", variant: int) -> None:
        self.run, self.variant, self.learner, self.prefetcher = run, variant, SmallLearner(), None
        self.sums = torch.zeros(4, dtype=torch.float64)

    def train(self, batch: Batch, coming: Batch | None, progress: TrainingProgress) -> bool:
        return self.update(batch, progress)

    def update(self, batch: Batch, progress: TrainingProgress) -> bool:
        self.learner.weights += self.run.number("step", progress.steps, self.variant)
        return True


class SmallRestore(Restore):
    """Tells the run what is loaded."""

    def __init__(self, run: "Run") -> None:
        super().__init__(Checkpoints(run.folder), IDENTITY, otherwise=run.check_none)
        self.run = run

    def load(self, learner: Learner, folder: Path) -> TrainingProgress:
        progress = super().load(learner, folder)
        self.run.check_loaded(folder.name, (progress.steps, tuple(learner.state()["model/weights"].tolist())))
        return progress


class SmallTrainer(Trainer):
    """The real trainer of a model of one tensor."""

    learner: SmallLearner

    def __init__(self, run: "Run", variant: int) -> None:
        self.run, self.variant = run, variant
        with patch.object(trainer_module, "choose_step", lambda *_: SmallStep(run, variant)):
            data, model = TrainingData(self.make_batches, self.measure), nn.Module()
            super().__init__(model, run.config, data, SmallRestore(run), run.note, 0, torch.device("cpu"))  # type: ignore[arg-type]
        self.checkpointer.group = self.checkpointer.votes = dist.group.WORLD

    def make_batches(self, position: Position) -> Iterator[Batch]:
        for number in range(position.batches, self.run.steps):
            after = position.model_copy(update={"batches": number + 1})
            batch: Any = SimpleNamespace(position=after, global_rows=1, times=NO_TIMES)
            batch.to = lambda device, batch=batch: batch
            yield batch

    def measure(self, model: Any) -> LossSums:
        ne = self.run.number("ne", self.progress.steps, self.variant)
        return LossSums(rows=100.0, loss=100.0 * ne * math.log(2.0), labels=50.0, predictions=50.0)

    def save(self, name: str | None = None) -> None:
        label = name or f"step-{self.progress.steps:010d}"
        written = self.progress.steps, tuple(self.learner.weights.tolist())
        self.run.truth.begun.setdefault(label, []).append(written)
        if label in self.run.rotten:
            self.run.rotten[label] = False
        super().save(name)


class Run:
    """A training from its first command to its end."""

    def __init__(self, seed: int, root: Path) -> None:
        draw = random.Random(seed)
        self.numbers = draw.randrange(2**60)
        self.steps = draw.randint(2, 9)
        self.config = TrainConfig(
            batch_rows=1, world_size=1, epochs=1, checkpoint_every_steps=draw.choice([1, 2, 3]), log_every_steps=100,
            validate_every_steps=draw.choice([1, 2, None]), keep_checkpoints=draw.choice([1, 1, 2, 3]),
            checkpoint_async=draw.random() < 0.3, patience=draw.choice([None, None, 2]),
        )  # fmt: skip
        faults = {kind: (draw.choice([0, 1, 1, 3]), draw.choice([0.005, 0.02, 0.1])) for kind in disk.FAULTS}
        faults |= {ROT: (draw.choice([0, 0, 1]), 0.3), DIFFERENT: (draw.choice([0, 0, 1, 3]), 0.5)}
        self.world = World(draw.randrange(2**60), faults)
        self.disk = Disk(self.world, root / "disk")
        self.folder = self.disk.root / "checkpoints"
        self.truth = Truth()
        self.rotten: dict[str, bool] = {}
        """Damaged checkpoint -> whether that is sure. A save that did not end may have replaced it."""
        self.variant = self.attempts = self.most_hidden = 0
        self.states: set[Any] = set()

    def number(self, *words: object) -> float:
        """Returns a number in [0, 1) for some words, always the same one."""
        return random.Random(f"{self.numbers} {words}").random()

    def note(self, event: dict[str, Any]) -> None:
        """Takes the trainer's events."""
        if event["event"] in ("damaged", "resumed"):
            self.world.note(f"{event}")

    def play(self) -> None:
        """Runs the command until it ends well."""
        while True:
            self.attempts += 1
            require(self.attempts < 60, "the command never comes to its end")
            trainer = SmallTrainer(self, self.variant)
            try:
                self.watch(trainer)
                trainer.train()
            except BaseException as error:
                self.react(trainer, error)
                continue
            if not self.disk.dead:
                self.check_end(trainer)
                return
            self.react(trainer, Killed())

    def watch(self, trainer: SmallTrainer) -> None:
        """Notes checkpoints once they are complete."""
        real = trainer.checkpointer.save

        def save(name: str, tensors: Any, progress: Any, identity: Any, sealed: Any = lambda: None) -> None:
            written = progress["steps"], tuple(tensors["model/weights"].tolist())

            def complete() -> None:
                if not self.disk.dead:
                    self.truth.sealed.setdefault(name, []).append(written)
                    self.rotten.pop(name, None)
                    self.forget(name)
                    self.world.note(f"{name} is complete")
                sealed()

            real(name, tensors, progress, identity, complete)

        trainer.checkpointer.save = save  # type: ignore[method-assign]

    def forget(self, saved: str) -> None:
        """Leaves out the checkpoints that the trainer removes, or may have removed, after one was saved."""
        steps = sorted(name for name in self.truth.sealed if STEP.match(name))
        kept = [name for name in steps if name <= saved][-self.config.keep_checkpoints :]
        for name in steps if STEP.match(saved) else ():
            if name not in kept:
                del self.truth.sealed[name]

    def react(self, trainer: SmallTrainer, error: BaseException) -> None:
        """A person, or the launcher, runs the command again."""
        if not self.disk.dead:
            known = isinstance(error, OSError) or (
                isinstance(error, ContractError) and any(part in str(error) for part in ("to be written", "of step"))
            )
            if not known:
                raise error
        self.world.note(f"attempt {self.attempts} ends: {type(error).__name__}")
        if trainer.checkpointer.thread is not None:
            trainer.checkpointer.thread.join()
        hidden = list(self.folder.glob(".*")) if self.folder.exists() else []
        self.most_hidden = max(self.most_hidden, len(hidden))
        require(len(hidden) <= 2, f"{len(hidden)} temporary folders")
        self.states.add((self.attempts, len(hidden), tuple(sorted(path.name for path in self.folder.glob("[!.]*")))))
        self.disk.restart()
        if "of step" in str(error):  # the best model is of an attempt that went another way
            with self.disk.calm():
                self.disk.rmtree(self.folder)
            self.truth = Truth()
        if self.world.strikes(DIFFERENT):
            self.variant += 1
        steps = [path for path in sorted(self.folder.glob("step-*")) if path.is_dir()]
        if steps and self.world.strikes(ROT):
            self.rotten[steps[-1].name] = True
            self.disk.rot(self.world.random.choice(sorted(path for path in steps[-1].iterdir() if path.stat().st_size)))

    # -- what must hold -----------------------------------------------------------------------------------------------

    def check_loaded(self, name: str, found: Written) -> None:
        """What was loaded is what was last saved under that name, and nothing newer is whole."""
        saved = self.truth.sealed.get(name, [])
        allowed = saved[-1:] + [one for one in self.truth.begun.get(name, [])[-1:] if one not in saved]
        require(found in allowed, f"{name} was loaded as {found}, and was saved as {allowed}")
        require(not self.rotten.get(name), f"{name} is damaged and was loaded")
        if STEP.match(name):
            newer = [other for other in self.truth.sealed if STEP.match(other) and other > name]
            newer = [other for other in newer if other not in self.rotten]
            require(not newer, f"{name} was loaded, and {newer} are newer")
            for other in [other for other in self.truth.sealed if STEP.match(other) and other > name]:
                del self.truth.sealed[other]

    def check_none(self, restore: Restore, learner: Learner) -> TrainingProgress:
        """A training starts from nothing only if there is nothing whole."""
        whole = [name for name in self.truth.sealed if STEP.match(name) and name not in self.rotten]
        require(not whole, f"the training starts again, and {whole} are whole")
        self.truth.sealed = {name: saved for name, saved in self.truth.sealed.items() if not STEP.match(name)}
        return TrainingProgress()

    def check_end(self, trainer: SmallTrainer) -> None:
        """The best weights are served, old checkpoints are gone, and nothing is left over."""
        final = trainer.progress
        served = checkpoint.find_served(self.folder)
        assert served is not None
        require(final.best_step is not None and served.name == BEST, "the best model is not served")
        found = checkpoint.read_progress(served)["steps"], tuple(checkpoint.export(served)["weights"].tolist())
        require(found == (trainer.progress.best_step, tuple(trainer.learner.weights.tolist())), f"{found} is served")
        saved = [*self.truth.sealed.get(BEST, [])[-1:], self.truth.begun[BEST][-1]]
        require(found in saved, f"{found} is served, not one of {saved}")
        kept = [path.name for path in checkpoint.list_checkpoints(self.folder)]
        most = self.config.keep_checkpoints + 1  # one that the last save could not remove any more
        require(len(kept) <= most, f"{kept} are kept")
        hidden = [path.name for path in self.folder.rglob(".*") if path.name != ".metadata"]
        require(not hidden, f"{hidden} are left")


def play(seed: int) -> Outcome:
    """Runs the schedule of a seed.

    Raises:
        BrokenPromise: If something happens that must never happen. Its note holds the trace.
    """
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with scratch() as root:
        run = Run(seed, root)
        try:
            with run.disk.mounted():
                run.play()
        except BaseException as error:
            error.add_note("\n".join(["", *run.world.trace]))
            raise
    sums = Counter({"commands": run.attempts, "disk changes": run.disk.steps})
    return Outcome(run.world.struck, run.states, sums, run.world.trace)


__all__ = ["FAULTS", "play"]
