"""SweepConfig and ReleaseConfig: what is searched and compared, how, and when a trial or a candidate is stopped."""

import json
import math
import re
from collections.abc import Mapping
from typing import Any, Literal, Self

from pydantic import (
    BaseModel,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    field_validator,
    model_validator,
)

from pipeline.errors import ConfigError

Strategy = Literal["tpe", "gp", "random", "grid"]
BASE = "base"
"""The candidate that is the config as it stands."""
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")


class Dimension(BaseModel, frozen=True, extra="forbid", use_attribute_docstrings=True):
    """Values that a config key may take: either `choices`, or all from `low` to `high`."""

    choices: tuple[Any, ...] | None = None
    """Numbers, texts, booleans, null, or lists of these."""
    low: int | float | None = None
    """Whole numbers are drawn where both bounds are whole."""
    high: int | float | None = None
    """Included, as `low` is."""
    log: bool = False
    """Draws alike from each order of magnitude, as a learning rate needs it."""
    step: PositiveInt | PositiveFloat | None = None
    """Values are `low` plus a multiple of this."""
    points: int | None = Field(default=None, ge=2)
    """How many values a grid takes of the range, evenly spaced; None: every step."""

    @property
    def whole(self) -> bool:
        """Whether its values are whole numbers."""
        return isinstance(self.low, int) and isinstance(self.high, int)

    def problem(self) -> tuple[str, str] | None:
        """(expected, actual) of what is wrong with it."""
        if self.choices is not None:
            named = {json.dumps(choice, sort_keys=True, default=str) for choice in self.choices}
            given = self.model_dump(exclude_defaults=True)
            if given.keys() != {"choices"} or len(named) < max(len(self.choices), 1):
                return "`choices` alone, each once", f"{given}"
            if any(isinstance(choice, dict) for choice in self.choices):
                return "`choices` without mappings: a file's mapping would be merged with them", "one"
            return None
        if self.low is None or self.high is None or not self.low < self.high:
            return "`choices`, or `low` below `high`", f"{self.low} and {self.high}"
        if self.log and (self.low <= 0 or self.step is not None):
            return "`low` above 0 and no `step` beside `log`", f"low={self.low}, step={self.step}"
        if self.step is not None and (self.points is not None or (self.whole and not isinstance(self.step, int))):
            return "`step` without `points`, and whole where the bounds are", f"{self.step}"
        return None

    def holds(self, value: Any) -> bool:
        """Whether it can take the value."""
        if self.choices is not None:
            return value in self.choices
        assert self.low is not None
        assert self.high is not None
        if isinstance(value, bool) or not isinstance(value, int | float) or not self.low <= value <= self.high:
            return False
        step = self.step or (1 if self.whole else None)
        steps = 0.0 if step is None else (value - self.low) / step
        return math.isclose(steps, round(steps), abs_tol=1e-9) and (isinstance(value, int) or not self.whole)

    @property
    def is_countable(self) -> bool:
        """Whether a grid can list its values."""
        return self.choices is not None or self.points is not None or self.spacing is not None

    @property
    def spacing(self) -> int | float | None:
        """Distance of the values of a range; None: the range is continuous, or drawn by order of magnitude."""
        return self.step or (1 if self.whole and not self.log else None)


class PruneConfig(BaseModel, frozen=True, extra="forbid", use_attribute_docstrings=True):
    """When a trial that falls behind is stopped. Trials are compared after equally many rows.

    Source:
        Golovin et al. 2017, Google Vizier, section 3.2.1 (median); Li et al. 2018, arXiv:1810.05934 (halving).
    """

    method: Literal["median", "halving", "leader"] = "median"
    """median: worse than half of those that are complete were by then; halving: not among the best 1 /
    `reduction_factor` after `every_rows`, after that many times as many, and so on; leader: worse by more than
    `tolerance` than one that is complete or still at work was after as many rows."""
    metric: Literal["train_ne_progressive", "valid_ne"] = "train_ne_progressive"
    """The progressive NE is known from the first rows on, in the first epoch alone; that of the validation rows as
    often as they are looked at."""
    every_rows: PositiveInt = 65_536
    """Rows between two comparisons; at least as many as lie between two reports (`training.log_every_steps`)."""
    warmup_rows: NonNegativeInt = 0
    """No trial is stopped before."""
    startup_trials: NonNegativeInt = 5
    """median: trials that are run to their end before any is stopped."""
    reduction_factor: int = Field(default=4, ge=2)
    """halving: one trial of so many goes on."""
    tolerance: NonNegativeFloat = 0.01
    """leader: as a share of the better one's NE."""


class SweepConfig(BaseModel, frozen=True, extra="forbid", use_attribute_docstrings=True):
    """The search for better settings. Trials are ranked by their best NE on the validation rows, never on test rows."""

    strategy: Strategy = "tpe"
    """tpe: Tree-structured Parzen estimator; gp: Gaussian process; both learn from the trials before. grid takes the
    combinations of all values in a seeded order."""
    trials: PositiveInt = 20
    """In all; a sweep that is done goes on where this is raised."""
    parallel: PositiveInt = 1
    """Trials at a time, each with `training.world_size` ranks and preprocessing workers of its own; 1 with Ray."""
    seed: NonNegativeInt = 1
    """Decides, with a trial's number, what is drawn; trainings keep the config's own seed."""
    startup_trials: NonNegativeInt = 5
    """Trials drawn at random before tpe and gp begin to learn."""
    begin_with_config: bool = True
    """The first trial takes the config's own values, as far as the space has them; a grid has its own order."""
    space: Mapping[str, Dimension] = {}
    """Dotted key -> its values; numbers name entries of lists: `features.sparse.0.transforms.0.size`. null
    takes out a key of the base file."""
    prune: PruneConfig | None = None
    trial_overrides: Mapping[str, Any] = {}
    """Dotted key -> value of all trials, not of the best config: limits such as `training.deadline_seconds: 600` (a
    trial that takes longer fails) or `training.max_steps: 2000`."""

    @field_validator("space", mode="before")
    @classmethod
    def _without_nulls(cls, space: Any) -> Any:
        return {key: value for key, value in space.items() if value is not None} if isinstance(space, dict) else space

    @model_validator(mode="after")
    def _possible(self) -> Self:
        for key, dimension in self.space.items():
            problem = dimension.problem()
            if problem is not None:
                raise ConfigError(f"sweep.space '{key}'", *problem, "Correct it.")
            if self.strategy == "grid" and not dimension.is_countable:
                raise ConfigError(f"sweep.space '{key}' with strategy=grid", "`step` or `points`", "none", "Add one.")
        return self

    def identity(self) -> dict[str, Any]:
        """What decides which trials there are; their number and how many run at a time do not."""
        return self.model_dump(mode="json", exclude={"trials", "parallel"})


class ReleaseSample(BaseModel, frozen=True, extra="forbid", use_attribute_docstrings=True):
    """The share of the training rows that candidates are explored on."""

    inputs: tuple[str, ...] = ()
    """Key columns: rows with equal keys are kept or left out together, such as those of a user. Where a candidate has
    `sampling` already, its keys and its seed are taken, and this is a share of what it keeps."""
    rate: float = Field(default=0.1, gt=0.0, le=1.0)
    """Share of the keys to keep."""
    seed: int = Field(default=0, ge=-(1 << 63), lt=1 << 63)
    """Another seed keeps other keys."""


class StopConfig(PruneConfig, frozen=True, extra="forbid", use_attribute_docstrings=True):
    """When a candidate that falls behind is stopped, while it is trained on all rows. Candidates are compared after
    equally many rows.
    """

    method: Literal["median", "halving", "leader"] = "leader"
    """As in `sweep.prune`. The leader is the one that makes sense for a few candidates side by side."""


class ReleaseConfig(BaseModel, frozen=True, extra="forbid", use_attribute_docstrings=True):
    """From several candidates to one release: all are explored on a sample of the rows, the best are compared on all
    of them, the winner is trained again and judged by the gate. Candidates are ranked by their NE on the validation
    rows, never on test rows.

    Source:
        Zhao et al. 2022, arXiv:2108.09373, section 4: exploratory, combo and release-candidate jobs.
    """

    candidates: Mapping[str, Mapping[str, Any]] = {}
    """Name -> {dotted key: value} put over the config; the config itself is a candidate, too, called `base`."""
    sample: ReleaseSample = ReleaseSample()
    explore: Mapping[str, Any] = {}
    """Dotted key -> value of explorations alone, such as `training.max_steps: 500`: a sample has fewer rows, so spans
    that are given in steps may have to be shorter."""
    keep: PositiveInt = 2
    """How many go on from the sample to all rows. Where there is but one, it is the winner without a comparison."""
    parallel: PositiveInt = 1
    """Candidates at a time, each with `training.world_size` ranks and preprocessing workers of its own; 1 with Ray."""
    prune: StopConfig | None = StopConfig()
    """None: all that are kept are trained to their end."""
    fresh: Mapping[str, Any] | None = None
    """Dotted key -> value put over the winner for its last training, such as `split.days.train` with the newest days;
    None: as the candidate is."""

    @model_validator(mode="after")
    def _named(self) -> Self:
        for name in self.candidates:
            where = f"release.candidates '{name}'"
            if name == BASE:
                raise ConfigError(where, "another name: that one is the config itself", f"'{name}'", "Rename it.")
            if not NAME.fullmatch(name):
                raise ConfigError(where, "letters, digits, _, . and -, at most 64", f"'{name}'", "Rename it.")
        return self

    @property
    def overrides(self) -> dict[str, Mapping[str, Any]]:
        """All candidates by name, the config itself first."""
        return {BASE: {}, **self.candidates}

    def identity(self) -> dict[str, Any]:
        """What decides the outcome; how many run at a time does not."""
        return self.model_dump(mode="json", exclude={"parallel"})
