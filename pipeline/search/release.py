"""The stages of a release: the rows to explore on, the trials of a stage, and the ranking of its candidates."""

from collections.abc import Sequence
from typing import Literal

from pydantic import BaseModel

from pipeline.errors import ConfigError
from pipeline.search.config import Dimension, PruneConfig, ReleaseSample, SweepConfig
from pipeline.search.study import TrialRecord
from pipeline.transforms.ops.sampling import Sampling

CANDIDATE = "candidate"
"""The one key of a stage's study: the name of the candidate."""
Stage = Literal["explore", "compare", "retrain"]
"""Exploratory, combo and release-candidate jobs in the words of arXiv:2108.09373, section 4."""


class CandidateStanding(BaseModel, frozen=True):
    """Result of a candidate in a stage."""

    name: str
    valid_ne: float | None = None
    """Best NE on the validation rows. None if the candidate was stopped or failed."""
    stopped: bool = False
    """Whether it was stopped because another one did better."""
    failed: str | None = None
    """Error message."""
    mlflow_run_id: str | None = None


def sample_rows(sample: ReleaseSample, sampling: Sampling | None) -> Sampling:
    """Returns the filter of the rows to explore a candidate on, a subset of its training rows.

    Args:
        sampling: The sampling of the candidate.
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
    """Returns a stage as a study over the candidate's name: (settings, trials in order)."""
    config = SweepConfig(
        strategy="grid", trials=len(names), space={CANDIDATE: Dimension(choices=tuple(names))}, prune=prune
    )
    return config, [{CANDIDATE: name} for name in names]


def make_standing(record: TrialRecord) -> CandidateStanding:
    """Converts a trial of a stage to the result of its candidate."""
    return CandidateStanding(
        name=record.params[CANDIDATE],
        valid_ne=record.valid_ne,
        stopped=record.state == "pruned",
        failed=record.notes.get("error"),
        mlflow_run_id=record.notes.get("mlflow_run_id"),
    )


def rank_candidates(standings: Sequence[CandidateStanding]) -> list[CandidateStanding]:
    """Sorts candidates: the best first, then the stopped, then the failed ones in their given order.

    Example:
        >>> failed, second = CandidateStanding(name="a", failed="no"), CandidateStanding(name="b", valid_ne=0.9)
        >>> [one.name for one in rank_candidates([failed, second, CandidateStanding(name="c", valid_ne=0.8)])]
        ['c', 'b', 'a']
    """

    def place(one: CandidateStanding) -> tuple[bool, bool, float]:
        return one.failed is not None, one.valid_ne is None, one.valid_ne or 0.0

    return sorted(standings, key=place)


def select_best(standings: Sequence[CandidateStanding], keep: int) -> tuple[str, ...]:
    """Returns the names of the best candidates, at most `keep`. Those without an NE are left out."""
    return tuple(one.name for one in rank_candidates(standings) if one.valid_ne is not None)[:keep]
