"""ScoringConfig: which columns to keep with the scores, and how scores are written."""

from typing import Annotated

from pydantic import AfterValidator, BaseModel, PositiveInt

from pipeline.errors import ConfigError

PROBABILITY, VERSION = "probability", "model_version"
WRITTEN = ("day", PROBABILITY, VERSION)
"""Columns that every table of scores has."""


def _check_kept(names: tuple[str, ...]) -> tuple[str, ...]:
    ours = [name for name in names if name in WRITTEN or names.count(name) > 1]
    if ours:
        expected = f"each column once, without day, {PROBABILITY} and {VERSION}, which are always there"
        raise ConfigError("scoring.keep", expected, ", ".join(dict.fromkeys(ours)), "Leave it out.")
    return names


class ScoringConfig(BaseModel, frozen=True, extra="forbid", use_attribute_docstrings=True):
    """Which columns to keep with the scores of whole days, and how scores are written."""

    keep: Annotated[tuple[str, ...], AfterValidator(_check_kept)] = ()
    """Columns to copy to the table of scores, such as the ids of user and item."""
    rows_per_commit: PositiveInt = 1_000_000
    """Rows after which written days are committed. Each group of days is one commit."""
