"""Where a training stands: saved with every checkpoint, and what NE and calibration need of a stretch of rows."""

import math

from pydantic import BaseModel

from pipeline.data.batch import Batch, Position


class LossSums(BaseModel, frozen=True):
    """What NE and calibration need of a stretch of rows; each counts by its weight, where rows have weights."""

    rows: float = 0.0
    loss: float = 0.0
    labels: float = 0.0
    predictions: float = 0.0

    def plus(self, other: "LossSums") -> "LossSums":
        """Both stretches together."""
        return LossSums(**{name: getattr(self, name) + getattr(other, name) for name in LossSums.model_fields})

    @property
    def ne(self) -> float | None:
        """Log loss over the entropy of the base rate; None where the labels are all alike."""
        if not 0.0 < self.labels < self.rows:
            return None
        rate = self.labels / self.rows
        return self.loss / self.rows / -(rate * math.log(rate) + (1.0 - rate) * math.log(1.0 - rate))


class TrainingProgress(BaseModel, frozen=True):
    """Where training stands; saved with every checkpoint."""

    steps: int = 0
    rows: int = 0
    position: Position = Position()
    first_sight: LossSums = LossSums()
    """Rows predicted before they were ever trained on: the progressive NE."""
    best_ne: float | None = None
    best_step: int | None = None
    worse_validations: int = 0
    validated_step: int | None = None
    valid_ne: float | None = None
    """What the validation at that step found."""
    skipped_batches: int = 0
    """Left out because their loss was not finite."""
    skipped_in_a_row: int = 0
    averaged: int = 0
    """Weights in the running mean."""
    busy_seconds: float = 0.0
    """Time in steps and in waiting for batches, over all attempts."""
    wait_seconds: float = 0.0
    """The part of it spent waiting."""
    finished: bool = False
    steps_before: int = 0
    """Steps of the trainings that this one goes on from."""

    @property
    def speed(self) -> float:
        """Rows a second."""
        return self.rows / self.busy_seconds if self.busy_seconds else 0.0

    @property
    def stalled(self) -> float:
        """Share of the time spent waiting for batches."""
        return self.wait_seconds / self.busy_seconds if self.busy_seconds else 0.0

    def after(self, batch: Batch) -> "TrainingProgress":
        """Progress once the batch is trained."""
        return self.model_copy(
            update={"steps": self.steps + 1, "rows": self.rows + batch.global_rows, "position": batch.position}
        )
