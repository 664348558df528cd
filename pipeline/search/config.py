"""SweepConfig and ReleaseConfig: what a sweep searches, what a release compares, and when a trial is stopped."""

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
"""Name of the candidate that is the unchanged config."""
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")


class Dimension(BaseModel, frozen=True, extra="forbid", use_attribute_docstrings=True):
    """Values that a config key may take: either `choices`, or a range from `low` to `high`."""

    choices: tuple[Any, ...] | None = None
    """Numbers, strings, booleans, null, or lists of these."""
    low: int | float | None = None
    """Lower bound, included. If both bounds are integers, integers are drawn."""
    high: int | float | None = None
    """Upper bound, included."""
    log: bool = False
    """Draws evenly on a logarithmic scale, as suits a learning rate."""
    step: PositiveInt | PositiveFloat | None = None
    """Distance between values, counted from `low`."""
    points: int | None = Field(default=None, ge=2)
    """Number of evenly spaced values that a grid takes from the range. None: every step."""

    @property
    def is_whole(self) -> bool:
        """Whether the values are integers."""
        return isinstance(self.low, int) and isinstance(self.high, int)

    def find_problem(self) -> tuple[str, str] | None:
        """Returns (expected, actual) of the first mistake, or None."""
        if self.choices is not None:
            named = {json.dumps(choice, sort_keys=True, default=str) for choice in self.choices}
            given = self.model_dump(exclude_defaults=True)
            if given.keys() != {"choices"} or len(named) < max(len(self.choices), 1):
                return "`choices` alone, each once", f"{given}"
            if any(isinstance(choice, dict) for choice in self.choices):
                return "`choices` without mappings, because a mapping in a file would be merged with them", "a mapping"
            return None
        if self.low is None or self.high is None or not self.low < self.high:
            return "`choices`, or `low` below `high`", f"{self.low} and {self.high}"
        if self.log and (self.low <= 0 or self.step is not None):
            return "`low` above 0 and no `step` with `log`", f"low={self.low}, step={self.step}"
        if self.step is not None and (self.points is not None or (self.is_whole and not isinstance(self.step, int))):
            return "`step` without `points`, and whole where the bounds are", f"{self.step}"
        return None

    def holds(self, value: Any) -> bool:
        """Whether the value lies in this dimension."""
        if self.choices is not None:
            return value in self.choices
        assert self.low is not None
        assert self.high is not None
        if isinstance(value, bool) or not isinstance(value, int | float) or not self.low <= value <= self.high:
            return False
        step = self.step or (1 if self.is_whole else None)
        steps = 0.0 if step is None else (value - self.low) / step
        return math.isclose(steps, round(steps), abs_tol=1e-9) and (isinstance(value, int) or not self.is_whole)

    @property
    def is_countable(self) -> bool:
        """Whether a grid can list the values."""
        return self.choices is not None or self.points is not None or self.spacing is not None

    @property
    def spacing(self) -> int | float | None:
        """Distance between the values of a range. None: the range is continuous or logarithmic."""
        return self.step or (1 if self.is_whole and not self.log else None)


class PruneConfig(BaseModel, frozen=True, extra="forbid", use_attribute_docstrings=True):
    """When a trial is stopped early. Trials are compared after equal numbers of rows.

    Source:
        Golovin et al. 2017, Google Vizier, section 3.2.1 (median); Li et al. 2018, arXiv:1810.05934 (halving).
    """

    method: Literal["median", "halving", "leader"] = "median"
    """Which trials are stopped. median: a trial worse than half of the complete ones were after as many rows.
    halving: a trial outside the best 1 / `reduction_factor` after `every_rows`, after `reduction_factor` times as many,
    and so on. leader: a trial worse by more than `tolerance` than a complete or running one was after as many rows."""
    metric: Literal["train_ne_progressive", "valid_ne"] = "train_ne_progressive"
    """NE to compare. The progressive NE is known from the first rows on, but only in the first epoch. The NE of the
    validation rows is known after each validation."""
    every_rows: PositiveInt = 65_536
    """Rows between two comparisons. At least the rows between two log lines (`training.log_every_steps`)."""
    warmup_rows: NonNegativeInt = 0
    """No trial is stopped before this many rows."""
    startup_trials: NonNegativeInt = 5
    """median: number of complete trials before any is stopped."""
    reduction_factor: int = Field(default=4, ge=2)
    """halving: one in this many trials continues."""
    tolerance: NonNegativeFloat = 0.01
    """leader: allowed difference, as a share of the better NE."""


class SweepConfig(BaseModel, frozen=True, extra="forbid", use_attribute_docstrings=True):
    """Search for better settings. Trials are ranked by their best NE on the validation rows, never on test rows."""

    strategy: Strategy = "tpe"
    """tpe: Tree-structured Parzen estimator. gp: Gaussian process. Both learn from earlier trials. random: independent
    draws. grid: all combinations of the values, in a seeded order."""
    trials: PositiveInt = 20
    """Total number of trials. Raise it to continue a finished sweep."""
    parallel: PositiveInt = 1
    """Trials at a time, each with its own `training.world_size` ranks and preprocessing workers. 1 with Ray."""
    seed: NonNegativeInt = 1
    """With the trial number, determines what is drawn. Trainings keep the seed of the config."""
    startup_trials: NonNegativeInt = 5
    """Random trials before tpe and gp start to learn."""
    begin_with_config: bool = True
    """The first trial takes the values of the config, where the space contains them. Does not apply to a grid."""
    space: Mapping[str, Dimension] = {}
    """Dotted key -> its values. Numbers address list entries: `features.sparse.0.transforms.0.size`. null removes a key
    of the base file."""
    prune: PruneConfig | None = None
    trial_overrides: Mapping[str, Any] = {}
    """Dotted key -> value for all trials, but not for the best config. For limits such as `training.max_steps: 2000` or
    `training.deadline_seconds: 600`, after which a trial fails."""

    @field_validator("space", mode="before")
    @classmethod
    def _without_nulls(cls, space: Any) -> Any:
        return {key: value for key, value in space.items() if value is not None} if isinstance(space, dict) else space

    @model_validator(mode="after")
    def _possible(self) -> Self:
        for key, dimension in self.space.items():
            problem = dimension.find_problem()
            if problem is not None:
                raise ConfigError(f"sweep.space '{key}'", *problem, "Correct it.")
            if self.strategy == "grid" and not dimension.is_countable:
                raise ConfigError(f"sweep.space '{key}' with strategy=grid", "`step` or `points`", "none", "Add one.")
        return self

    def identity(self) -> dict[str, Any]:
        """Returns the settings that determine the trials. Their number and `parallel` do not."""
        return self.model_dump(mode="json", exclude={"trials", "parallel"})


class ReleaseSample(BaseModel, frozen=True, extra="forbid", use_attribute_docstrings=True):
    """Share of the training rows that candidates are explored on."""

    inputs: tuple[str, ...] = ()
    """Key columns. Rows with equal keys, such as those of one user, are kept or dropped together. A candidate with its
    own `sampling` keeps its keys and seed, and `rate` applies to the rows it keeps."""
    rate: float = Field(default=0.1, gt=0.0, le=1.0)
    """Share of the keys to keep."""
    seed: int = Field(default=0, ge=-(1 << 63), lt=1 << 63)
    """Another seed keeps other keys."""


class StopConfig(PruneConfig, frozen=True, extra="forbid", use_attribute_docstrings=True):
    """When a candidate is stopped early on all rows. Candidates are compared after equal numbers of rows."""

    method: Literal["median", "halving", "leader"] = "leader"
    """As in `sweep.prune`. leader suits a few candidates that train side by side."""


class ReleaseConfig(BaseModel, frozen=True, extra="forbid", use_attribute_docstrings=True):
    """Choice of one release among several candidates. All are explored on a sample of the rows. The best are compared
    on all rows. The winner is retrained and passes the gate or not. Candidates are ranked by their NE on the validation
    rows, never on test rows.

    Source:
        Zhao et al. 2022, arXiv:2108.09373, section 4: exploratory, combo and release-candidate jobs.
    """

    candidates: Mapping[str, Mapping[str, Any]] = {}
    """Name -> {dotted key: value} over the config. The config itself is a candidate, too, called `base`."""
    sample: ReleaseSample = ReleaseSample()
    explore: Mapping[str, Any] = {}
    """Dotted key -> value for exploration only, such as `training.max_steps: 500`. A sample has fewer rows, so
    intervals in steps may have to be shorter."""
    keep: PositiveInt = 2
    """Number of candidates that are compared on all rows. A single one wins without a comparison."""
    parallel: PositiveInt = 1
    """Candidates that train at a time, each with its own `training.world_size` ranks and preprocessing workers. 1 with
    Ray."""
    prune: StopConfig | None = StopConfig()
    """None: all compared candidates are trained to the end."""
    fresh: Mapping[str, Any] | None = None
    """Dotted key -> value over the winner for its retraining, such as `split.days.train` with the newest days. None:
    the candidate unchanged."""

    @model_validator(mode="after")
    def _named(self) -> Self:
        for name in self.candidates:
            where = f"release.candidates '{name}'"
            if name == BASE:
                raise ConfigError(
                    where, "a name other than `base`, which is the config itself", f"'{name}'", "Rename it."
                )
            if not NAME.fullmatch(name):
                raise ConfigError(where, "at most 64 letters, digits, _, . and -", f"'{name}'", "Rename it.")
        return self

    @property
    def overrides(self) -> dict[str, Mapping[str, Any]]:
        """All candidates by name, `base` first."""
        return {BASE: {}, **self.candidates}

    def identity(self) -> dict[str, Any]:
        """Returns the settings that determine the outcome. `parallel` does not."""
        return self.model_dump(mode="json", exclude={"parallel"})
