"""The stages of a release: the rows to explore on, the trials of a stage, and the ranking of its candidates."""

from collections.abc import Sequence
from typing import Literal

from pydantic import BaseModel

from pipeline.errors import ConfigError
from pipeline.search.config import Dimension, PruneConfig, ReleaseSample, SweepConfig
from pipeline.search.study import TrialRecord
from pipeline.transforms.ops.sampling import Sampling

CANDIDATE = "candidate"
"""What the trials of a stage differ in."""
Stage = Literal["explore", "compare", "retrain"]
"""Exploratory, combo and release-candidate jobs in the words of arXiv:2108.09373, section 4."""


class CandidateStanding(BaseModel, frozen=True):
    """What became of a candidate in a stage."""

    name: str
    valid_ne: float | None = None
    """Best NE on the validation rows; none if it was stopped or failed."""
    stopped: bool = False
    """Whether it was given up, since another one did better."""
    failed: str | None = None
    """What was wrong with it."""
    mlflow_run_id: str | None = None


def sample_rows(sample: ReleaseSample, sampling: Sampling | None) -> Sampling:
    """Returns the filter of the rows to explore a candidate on: a part of the rows it is trained on later.

    Args:
        sampling: The candidate's own.
    Raises:
        ConfigError: If neither names key columns.
    """
    if sampling is not None:
        return sampling.model_copy(update={"rate": sampling.rate * sample.rate})
    if not sample.inputs:
        expected = "key columns of the rows to explore on"
        raise ConfigError("release.sample.inputs", expected, "none", "Name some, such as the user's.")
    return Sampling(inputs=sample.inputs, rate=sample.rate, seed=sample.seed)


def make_stage(names: Sequence[str], prune: PruneConfig | None) -> tuple[SweepConfig, list[dict[str, str]]]:
    """A stage as a study over one key, the candidate's name: (its settings, its trials in order)."""
    config = SweepConfig(
        strategy="grid", trials=len(names), space={CANDIDATE: Dimension(choices=tuple(names))}, prune=prune
    )
    return config, [{CANDIDATE: name} for name in names]


def make_standing(record: TrialRecord) -> CandidateStanding:
    """A trial of a stage as what it says of its candidate."""
    return CandidateStanding(
        name=record.params[CANDIDATE],
        valid_ne=record.valid_ne,
        stopped=record.state == "pruned",
        failed=record.notes.get("error"),
        mlflow_run_id=record.notes.get("mlflow_run_id"),
    )


def rank_candidates(standings: Sequence[CandidateStanding]) -> list[CandidateStanding]:
    """The best first; then those that were stopped, then those that failed, both as they came.

    Example:
        >>> failed, second = CandidateStanding(name="a", failed="no"), CandidateStanding(name="b", valid_ne=0.9)
        >>> [one.name for one in rank_candidates([failed, second, CandidateStanding(name="c", valid_ne=0.8)])]
        ['c', 'b', 'a']
    """

    def place(one: CandidateStanding) -> tuple[bool, bool, float]:
        return one.failed is not None, one.valid_ne is None, one.valid_ne or 0.0

    return sorted(standings, key=place)


def select_best(standings: Sequence[CandidateStanding], keep: int) -> tuple[str, ...]:
    """Names of the best, at most `keep`; those without an NE are not among them."""
    return tuple(one.name for one in rank_candidates(standings) if one.valid_ne is not None)[:keep]
