"""ReleaseConfig: the candidates of a release, and which of them go on from stage to stage."""

import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Self

from pydantic import BaseModel, Field, PositiveInt, model_validator

from pipeline.errors import ConfigError
from pipeline.search.config import Dimension, PruneConfig, SweepConfig
from pipeline.search.study import TrialRecord
from pipeline.transforms.ops.op import Id
from pipeline.transforms.ops.sampling import Sampling

BASE = "base"
"""The candidate that is the config as it stands."""
CANDIDATE = "candidate"
"""What the trials of a stage differ in."""
Stage = Literal["explore", "compare", "retrain"]
"""Exploratory, combo and release-candidate jobs in the words of arXiv:2108.09373, section 4."""
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")


class Sample(BaseModel, frozen=True, extra="forbid", use_attribute_docstrings=True):
    """The share of the training rows that candidates are explored on."""

    inputs: tuple[str, ...] = ()
    """Key columns: rows with equal keys are kept or left out together, such as those of a user. Where a candidate has
    `sampling` already, its keys and its seed are taken, and this is a share of what it keeps."""
    rate: float = Field(default=0.1, gt=0.0, le=1.0)
    """Share of the keys to keep."""
    seed: Id = 0
    """Another seed keeps other keys."""

    def of(self, sampling: Sampling | None) -> Sampling:
        """The rows to explore a candidate on: a part of those that it is trained on later.

        Args:
            sampling: The candidate's own.
        Raises:
            ConfigError: If neither names key columns.
        """
        if sampling is not None:
            return sampling.model_copy(update={"rate": sampling.rate * self.rate})
        if not self.inputs:
            expected = "key columns of the rows to explore on"
            raise ConfigError("release.sample.inputs", expected, "none", "Name some, such as the user's.")
        return Sampling(inputs=self.inputs, rate=self.rate, seed=self.seed)


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
    sample: Sample = Sample()
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


class Standing(BaseModel, frozen=True):
    """What became of a candidate in a stage."""

    name: str
    valid_ne: float | None = None
    """Best NE on the validation rows; none if it was stopped or failed."""
    stopped: bool = False
    """Whether it was given up, since another one did better."""
    failed: str | None = None
    """What was wrong with it."""
    mlflow_run_id: str | None = None


def stage_space(names: Sequence[str], prune: PruneConfig | None) -> tuple[SweepConfig, list[dict[str, str]]]:
    """A stage as a study over one key, the candidate's name: (its settings, its trials in order)."""
    config = SweepConfig(
        strategy="grid", trials=len(names), space={CANDIDATE: Dimension(choices=tuple(names))}, prune=prune
    )
    return config, [{CANDIDATE: name} for name in names]


def standing(record: TrialRecord) -> Standing:
    """A trial of a stage as what it says of its candidate."""
    return Standing(
        name=record.params[CANDIDATE],
        valid_ne=record.valid_ne,
        stopped=record.state == "pruned",
        failed=record.notes.get("error"),
        mlflow_run_id=record.notes.get("mlflow_run_id"),
    )


def ranked(standings: Sequence[Standing]) -> list[Standing]:
    """The best first; then those that were stopped, then those that failed, both as they came.

    Example:
        >>> some = [Standing(name="a", failed="no"), Standing(name="b", valid_ne=0.9), Standing(name="c", valid_ne=0.8)]
        >>> [one.name for one in ranked(some)]
        ['c', 'b', 'a']
    """

    def place(one: Standing) -> tuple[bool, bool, float]:
        return one.failed is not None, one.valid_ne is None, one.valid_ne or 0.0

    return sorted(standings, key=place)


def kept(standings: Sequence[Standing], keep: int) -> tuple[str, ...]:
    """Names of the best, at most `keep`; those without an NE are not among them."""
    return tuple(one.name for one in ranked(standings) if one.valid_ne is not None)[:keep]
