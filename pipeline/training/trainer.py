"""The training loop."""

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch
from torchrec.distributed.model_parallel import DistributedModelParallel

from pipeline.data.batch import Batch
from pipeline.data.position import LostRows, Position
from pipeline.errors import NotFiniteError, TrainingError
from pipeline.training.asynchronous import SharedLearner, SharedStep
from pipeline.training.config import TrainConfig
from pipeline.training.graph import GraphStep, can_capture
from pipeline.training.lanes import LaneStep
from pipeline.training.learner import Learner
from pipeline.training.metrics import StepTimes
from pipeline.training.restore import Emit, Restore
from pipeline.training.staging import move_batches
from pipeline.training.state.async_checkpoint import AsyncCheckpointer
from pipeline.training.state.checkpoint import BEST, LOWER
from pipeline.training.state.progress import LossSums, TrainingProgress
from pipeline.training.step import TrainStep, WholeStep
from pipeline.training.threads import choose_threads, has_same_bits


@dataclass(frozen=True)
class TrainingData:
    """What a rank trains on."""

    batches: Callable[[Position], Iterator[Batch]]
    """Position -> the remaining batches of this rank in that epoch."""
    validate: Callable[[DistributedModelParallel], LossSums] | None = None
    """Model -> loss sums over the validation rows. None: no validation."""
    lost: Callable[[], tuple[LostRows, ...]] | None = None
    """Returns at the end of an epoch the row groups that were quarantined up to there. None: there are none."""


class Trainer:
    """Trains one model on the given batches.

    Args:
        restore: Where the training begins, and where its checkpoints are.
        emit: Takes events; see `Emit`.
    """

    def __init__(
        self,
        model: DistributedModelParallel,
        config: TrainConfig,
        data: TrainingData,
        restore: Restore,
        emit: Emit,
        seed: int,
        device: torch.device,
    ) -> None:
        self.model, self.config, self.device = model, config, device
        self.data, self.restore, self.emit = data, restore, emit
        self.step = choose_step(model, config, seed, device)
        self.learner = self.step.learner
        self.threads = choose_threads(model, config, device, self.report_threads)
        background = config.checkpoint_async and config.sync == "synchronous"  # else each rank would copy all tables
        self.checkpointer = AsyncCheckpointer(background, restore.checkpoints)
        self.progress, self.times = TrainingProgress(), StepTimes()
        self.hooks: list[tuple[Callable[[], None], int | None]] = [
            (self.take_average, config.average_every_steps),
            (self.log, config.log_every_steps),
            (self.validate, config.validate_every_steps),
            (self.save, config.checkpoint_every_steps),
            (self.save_by_clock, 1),
            (self.checkpointer.check, 1),
        ]
        """(what to do after a step, every so many steps), in this order. None: never."""

    def train(self) -> TrainingProgress:
        """Trains to the end of the plan, starting from the last checkpoint if there is one."""
        with self.checkpointer:
            self.progress = self.restore.begin(self.learner, self.emit)
            self.train_epochs()
            self.finish()
        self.require_steps()
        return self.progress

    def train_incremental(self, batches: Callable[[Position], Iterator[Batch]]) -> TrainingProgress:
        """Trains incrementally on other rows, from the current state. Ends with the mean weights if averaging is on."""
        self.data = replace(self.data, batches=batches)
        self.progress = TrainingProgress(steps_before=self.progress.steps_before + self.progress.steps)
        with self.checkpointer:
            self.train_epochs()
        self.require_steps()
        self.learner.serve(self.progress.averaged > 0)
        return self.progress

    def train_epochs(self) -> None:
        """Trains to the end of the plan."""
        while not self.done():
            self.train_epoch()
        if self.threads is not None:
            self.threads.restore()

    def train_epoch(self) -> None:
        """Trains the rest of the epoch, or to the end of the plan if that comes first."""
        for batch, coming in self.steps():
            self.train_step(batch, coming)
            self.progress = self.progress.after(batch)  # the batch trained, not the batch prefetched
            for hook, every in self.hooks:
                if self.due(every):
                    hook()
            if self.done():
                self.step.end()
                return
        self.end_epoch()

    def steps(self) -> Iterator[tuple[Batch, Batch | None]]:
        """Yields the remaining batches of the epoch, each with the next batch if its ids are prefetched."""
        return self.step.feed(move_batches(self.data.batches(self.progress.position), self.device, self.model))

    def train_step(self, batch: Batch, coming: Batch | None = None) -> None:
        """Makes a step and takes its time; see `TrainStep`."""
        if self.threads is not None:
            self.threads.begin(full=len(batch.labels) == self.config.batch_rows)
        start = time.perf_counter()
        trained = self.step.train(batch, coming, self.progress)
        seconds = time.perf_counter() - start
        self.progress = self.progress.after_try(skipped=not trained)
        self.times.add(seconds, batch.times)
        if self.threads is not None:
            check = partial(has_same_bits, self.model, self.config, self.learner.dense, batch, self.threads.most)
            self.threads.after_step(seconds, check)

    def due(self, every: int | None) -> bool:
        """Whether something with this period is due at this step."""
        return every is not None and self.progress.steps % every == 0

    def done(self) -> bool:
        """Whether training is complete or was stopped early."""
        config, progress = self.config, self.progress
        enough = config.max_steps is not None and progress.steps >= config.max_steps
        ended = progress.finished or progress.position.epoch >= config.epochs
        return ended or enough or progress.has_stopped(config.patience)

    def require_steps(self) -> None:
        """Checks that rows sufficed for `max_steps`.

        Raises:
            TrainingError: If fewer updates were made and training was not stopped early.
        """
        wanted, made = self.config.max_steps, self.progress.steps
        if wanted is not None and made < wanted and not self.progress.has_stopped(self.config.patience):
            raise TrainingError(
                "training.max_steps", f"{wanted} steps", f"rows for {made}", "Raise epochs, or lower max_steps."
            )

    def end_epoch(self) -> None:
        """Moves on to the next epoch."""
        if self.progress.position.batches == 0:
            raise TrainingError(
                "training rows", "at least one batch an epoch", "none", "Check the split and the filter."
            )
        self.learner.meet()
        self.log()
        if self.config.validate_every_steps is None:
            self.validate()
        lost = self.progress.position.lost if self.data.lost is None else self.data.lost()
        self.progress = self.progress.after_epoch(lost)
        self.learner.meet()  # keeps rows of the next epoch out of these sums

    def finish(self) -> None:
        """Saves the training as finished, so the same command does not continue it. Then loads the best model."""
        if not self.progress.finished:
            if self.progress.validated_step != self.progress.steps:
                self.validate()
            self.progress = self.progress.model_copy(update={"finished": True})
            self.save()
        self.checkpointer.wait()
        self.progress = self.restore.finish(self.learner, self.progress)

    # -- after a step -------------------------------------------------------------------------------------------------

    def take_average(self) -> None:
        """Adds the weights to their running mean, from `average_from_step` on."""
        first, average = self.config.average_from_step, self.learner.average
        if average is not None and first is not None and self.progress.steps >= first:
            self.progress = self.progress.model_copy(update={"averaged": self.progress.averaged + 1})
            average.take(self.progress.averaged)

    def log(self) -> None:
        """Reports the NE of the rows since the last report, and the progressive NE in the first epoch.

        Raises:
            TrainingError: If their loss is not finite.
        """
        self.times.await_device(self.device)
        window = self.step.take_sums()
        if not math.isfinite(window.loss):
            raise NotFiniteError(f"loss at step {self.progress.steps}", "a finite number", f"{window.loss}", LOWER)
        busy, waited, times = self.times.take()
        values: dict[str, float | None] = {"train_ne_window": window.ne, **times, **self.checkpointer.take_times()}
        if self.config.on_nonfinite == "skip":
            values["skipped_batches"] = self.progress.skipped_batches
        self.progress = self.progress.after_window(window, busy, waited)
        if self.progress.position.epoch == 0:
            values["train_ne_progressive"] = self.progress.first_sight.ne
        if window.rows:
            values["train_loss_window"] = window.loss / window.rows
            values["train_calibration_window"] = window.predictions / window.labels if window.labels else None
            self.report(values)

    def validate(self) -> None:
        """Validates the model, or its mean weights if there are any, and saves the best model so far."""
        if self.data.validate is None:
            return
        if self.threads is not None:
            self.threads.begin(full=False)
        with self.learner.serving(self.progress.averaged > 0):
            self.model.eval()
            with torch.no_grad():
                sums = self.data.validate(self.model)
            self.model.train()
            self.progress = self.progress.after_validation(sums)
            self.report({"valid_ne": sums.ne, "valid_calibration": sums.predictions / sums.labels})
            if self.progress.worse_validations == 0:
                self.save(BEST)

    def save(self, name: str | None = None) -> None:
        """Writes a checkpoint of this step, or one with the given name."""
        self.learner.meet()
        if name is None:
            self.log()  # raises on a non-finite loss before anything is saved
        own = name or f"step-{self.progress.steps:010d}"
        event = {"event": "saved", "step": self.progress.steps}

        def sealed() -> None:
            if name is None:
                self.restore.checkpoints.prune(self.config.keep_checkpoints, own)
                self.emit(event)

        self.checkpointer.save(own, self.learner.state(), self.progress.model_dump(), self.restore.identity, sealed)

    def save_by_clock(self) -> None:
        """Writes a checkpoint after `checkpoint_every_seconds` without one."""
        saved = self.due(self.config.checkpoint_every_steps)
        if not saved and self.checkpointer.due(self.config.checkpoint_every_seconds):
            self.save()

    def report(self, values: dict[str, float | None]) -> None:
        """Emits metrics of this step."""
        metrics = values | {"train_rows_per_second": self.progress.speed, "stall_fraction": self.progress.stalled}
        self.emit({"event": "metrics", "step": self.progress.steps, "rows": self.progress.rows, "metrics": metrics})

    def report_threads(self, threads: int, before: float, now: float) -> None:
        """Emits a change of the number of threads, with the seconds of a step before and now."""
        values = {"threads": threads, "milliseconds_before": 1e3 * before, "milliseconds": 1e3 * now}
        self.emit({"event": "threads", "step": self.progress.steps + 1, **values})


def choose_step(model: DistributedModelParallel, config: TrainConfig, seed: int, device: torch.device) -> TrainStep:
    """Returns the kind of step that a rank makes, with its learner."""
    if config.sync != "synchronous":
        return SharedStep(SharedLearner(model, config, device), seed)
    learner = Learner(model, config, device)
    if config.lanes is not None:
        return LaneStep(learner, seed)
    return GraphStep(learner, seed) if can_capture(learner) else WholeStep(learner, seed)
