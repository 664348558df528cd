"""Restore: with which weights a training begins, and with which it ends."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from pipeline.training.learner import Learner
from pipeline.training.state.checkpoint import BEST, Identity
from pipeline.training.state.checkpoints import Checkpoints
from pipeline.training.state.progress import TrainingProgress, load_progress

Emit = Callable[[dict[str, Any]], None]
"""Takes events as JSON values, on rank 0 and possibly from another thread. They go to the launcher."""


@dataclass
class Restore:
    """Loads the checkpoints of a training into its learner. All ranks call each method together."""

    checkpoints: Checkpoints
    identity: Identity = field(default_factory=dict)
    """What the checkpoints belong to. Those of another identity are refused."""
    keeps_lost: bool = True
    """Whether to go on from a checkpoint that lacks quarantined rows."""
    otherwise: "Callable[[Restore, Learner], TrainingProgress] | None" = None
    """Called if there is no checkpoint, to start from another training's. None: start from the initial weights."""

    def begin(self, learner: Learner, emit: Emit) -> TrainingProgress:
        """Resumes from the newest intact checkpoint, which rank 0 looks for. Without one, calls `otherwise`.

        Raises:
            TrainingError: If the checkpoint lacks rows that it must not lack.
        """
        found = None
        if dist.get_rank() == 0:
            found = self.checkpoints.find_latest(lambda error: emit({"event": "damaged", "error": str(error)}))
        step = torch.tensor(-1 if found is None else int(found.removeprefix("step-")), device=learner.device)
        dist.broadcast(step, 0)
        if step < 0:
            return TrainingProgress() if self.otherwise is None else self.otherwise(self, learner)
        progress = self.load(learner, self.checkpoints.fetch(f"step-{int(step):010d}", known=True))
        self._require_rows(progress)
        lost = sum(one.rows for one in progress.position.lost)
        emit({"event": "resumed", "step": progress.steps, "rows": progress.rows, "lost": lost})
        return progress

    def load(self, learner: Learner, folder: Path) -> TrainingProgress:
        """Loads all tensors of a verified checkpoint. Returns its progress."""
        learner.load(folder, self.identity)
        return load_progress(folder)

    def start_from(self, learner: Learner, folder: Path) -> TrainingProgress:
        """Starts at step 0 with the exported weights and the optimizer state of another training.

        Args:
            folder: A verified checkpoint.
        """
        learner.load_served(folder, self.identity)
        before = load_progress(folder)
        return TrainingProgress(steps_before=before.steps_before + before.steps)

    def finish(self, learner: Learner, final: TrainingProgress) -> TrainingProgress:
        """Loads the best model of a finished training. Without validations, the model ends with the weights served.

        It may be one of an earlier attempt, saved after the checkpoint that this attempt resumed from.

        Args:
            final: The progress at the end. Returned with step and NE of the best model.
        """
        if final.best_step is None:
            learner.serve(final.averaged > 0)
            return final
        found = self.load(learner, self.checkpoints.fetch(BEST))
        self._require_rows(found)
        best = found.model_dump(include={"best_step", "best_ne"})
        return final.model_copy(update=best)

    def _require_rows(self, progress: TrainingProgress) -> None:
        if not self.keeps_lost:
            progress.require_rows(self.checkpoints.folder)


def take_over(learner: Learner, other: Learner, done: TrainingProgress) -> TrainingProgress:
    """Starts at step 0 with what a finished training has learned; see `Learner.copy`. `done` is its progress."""
    learner.copy(other)
    return TrainingProgress(steps_before=done.steps_before + (done.best_step or done.steps))
