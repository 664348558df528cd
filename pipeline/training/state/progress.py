"""Progress of a training, which every checkpoint contains, and loss sums for NE and calibration."""

import math
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel, ValidationError

from pipeline.data.batch import Batch
from pipeline.data.position import LostRows, Position
from pipeline.errors import NotFiniteError, TrainingError
from pipeline.training.state import checkpoint
from pipeline.training.state.checkpoint import LOWER

SKIPPED_IN_A_ROW = 10
"""Abort after this many consecutive batches with a non-finite loss."""


class LossSums(BaseModel, frozen=True):
    """Sums over some rows from which NE and calibration follow. Rows count by their weights."""

    rows: float = 0.0
    loss: float = 0.0
    labels: float = 0.0
    predictions: float = 0.0

    @classmethod
    def of(cls, sums: torch.Tensor) -> "LossSums":
        """Takes them from a tensor in this order, [4]."""
        return cls(**dict(zip(cls.model_fields, sums.tolist(), strict=True)))

    def plus(self, other: "LossSums") -> "LossSums":
        """Adds the sums of other rows."""
        return LossSums(**{name: getattr(self, name) + getattr(other, name) for name in LossSums.model_fields})

    @property
    def ne(self) -> float | None:
        """Log loss divided by the entropy of the base rate. None if all labels are equal."""
        if not 0.0 < self.labels < self.rows:
            return None
        rate = self.labels / self.rows
        # `base_entropy` of the evaluation takes log1p, which differs in the last bit for a third of the rates.
        return self.loss / self.rows / -(rate * math.log(rate) + (1.0 - rate) * math.log(1.0 - rate))


class TrainingProgress(BaseModel, frozen=True):
    """Progress of a training. Every checkpoint contains it."""

    steps: int = 0
    rows: int = 0
    position: Position = Position()
    first_sight: LossSums = LossSums()
    """Sums over rows predicted before they were trained on, for the progressive NE."""
    best_ne: float | None = None
    best_step: int | None = None
    worse_validations: int = 0
    validated_step: int | None = None
    valid_ne: float | None = None
    """NE of the validation at that step."""
    skipped_batches: int = 0
    """Batches left out because their loss was not finite."""
    skipped_in_a_row: int = 0
    averaged: int = 0
    """Number of samples in the running mean of the weights."""
    busy_seconds: float = 0.0
    """Time spent in steps and waiting for batches, over all attempts."""
    wait_seconds: float = 0.0
    """Time spent waiting for batches, part of `busy_seconds`."""
    finished: bool = False
    steps_before: int = 0
    """Steps of the earlier trainings that this one continues."""

    @property
    def speed(self) -> float:
        """Rows per second."""
        return self.rows / self.busy_seconds if self.busy_seconds else 0.0

    @property
    def stalled(self) -> float:
        """Share of `busy_seconds` spent waiting for batches."""
        return self.wait_seconds / self.busy_seconds if self.busy_seconds else 0.0

    def after_epoch(self, lost: tuple[LostRows, ...]) -> "TrainingProgress":
        """Returns the progress at the start of the next epoch.

        Args:
            lost: Row groups that were quarantined before that.
        """
        return self.model_copy(update={"position": Position(epoch=self.position.epoch + 1, lost=lost)})

    def require_rows(self, folder: Path) -> None:
        """Checks that no rows were lost.

        Args:
            folder: Folder of the checkpoints.
        Raises:
            TrainingError: If some were.
        """
        lost = self.position.lost
        if lost:
            rows, first = sum(one.rows for one in lost), lost[0]
            raise TrainingError(
                f"checkpoint of step {self.steps}", "all rows, because preprocessing.on_corrupt is fail",
                f"a training without {rows:,} rows that were quarantined, the first in row group {first.row_group} of "
                f"file '{first.path}'",
                "Set preprocessing.on_corrupt=quarantine to go on without these rows, or delete the folder "
                f"'{folder}' to train from the start.",
            )  # fmt: skip

    def after(self, batch: Batch) -> "TrainingProgress":
        """Returns the progress after this batch was trained."""
        return self.model_copy(
            update={"steps": self.steps + 1, "rows": self.rows + batch.global_rows, "position": batch.position}
        )

    def after_try(self, skipped: bool) -> "TrainingProgress":
        """Returns the progress with the next batch counted, if it was left out, among those that were.

        Raises:
            TrainingError: After too many such batches in a row.
        """
        if not skipped:
            return self.model_copy(update={"skipped_in_a_row": 0}) if self.skipped_in_a_row else self
        if self.skipped_in_a_row + 1 == SKIPPED_IN_A_ROW:
            raise NotFiniteError(
                f"loss at step {self.steps + 1}", "a finite number", f"none in {SKIPPED_IN_A_ROW} batches in a row",
                LOWER,
            )  # fmt: skip
        counts = {"skipped_batches": self.skipped_batches + 1, "skipped_in_a_row": self.skipped_in_a_row + 1}
        return self.model_copy(update=counts)

    def after_window(self, sums: LossSums, busy_seconds: float, wait_seconds: float) -> "TrainingProgress":
        """Returns the progress with the losses and the seconds of the steps since the last report."""
        first = self.first_sight.plus(sums) if self.position.epoch == 0 else self.first_sight
        busy, waited = self.busy_seconds + busy_seconds, self.wait_seconds + wait_seconds
        return self.model_copy(update={"first_sight": first, "busy_seconds": busy, "wait_seconds": waited})

    def after_validation(self, sums: LossSums) -> "TrainingProgress":
        """Returns the progress with a validation of this step. `worse_validations` is 0 if it is the best so far.

        Raises:
            TrainingError: If the loss is not finite or NE is undefined.
        """
        ne = sums.ne
        if not math.isfinite(sums.loss):
            raise NotFiniteError(f"validation loss at step {self.steps}", "a finite number", f"{sums.loss}", LOWER)
        if ne is None:
            raise TrainingError("validation rows", "both labels", "only one", "Choose other validation rows.")
        update: dict[str, Any] = {"validated_step": self.steps, "valid_ne": ne}
        if self.best_ne is None or ne < self.best_ne:
            update |= {"worse_validations": 0, "best_ne": ne, "best_step": self.steps}
        else:
            update["worse_validations"] = self.worse_validations + 1
        return self.model_copy(update=update)

    def has_stopped(self, patience: int | None) -> bool:
        """Whether training ends because of so many validations without a better NE."""
        return patience is not None and self.worse_validations >= patience


def load_progress(folder: Path) -> TrainingProgress:
    """Returns the progress saved with a verified checkpoint.

    Raises:
        CheckpointError: If it is not that of a training.
    """
    try:
        return TrainingProgress.model_validate(checkpoint.read_progress(folder))
    except ValidationError as error:
        key = ".".join(map(str, error.errors()[0]["loc"]))
        raise checkpoint.CheckpointError(
            f"checkpoint '{folder.name}', key '{key}' of {checkpoint.PROGRESS}", "the progress of a training",
            "another value", "Use another checkpoint.",
        ) from None  # fmt: skip
