"""ScoringConfig: what stands beside the scores, and how they are written."""

from typing import Annotated

from pydantic import AfterValidator, BaseModel, PositiveInt

from pipeline.errors import ConfigError

PROBABILITY, VERSION = "probability", "model_version"
WRITTEN = ("day", PROBABILITY, VERSION)
"""Columns that every table of scores has."""


def _handed_through(names: tuple[str, ...]) -> tuple[str, ...]:
    ours = [name for name in names if name in WRITTEN or names.count(name) > 1]
    if ours:
        expected = f"each column once, without day, {PROBABILITY} and {VERSION}, which are always there"
        raise ConfigError("scoring.keep", expected, ", ".join(dict.fromkeys(ours)), "Leave it out.")
    return names


class ScoringConfig(BaseModel, frozen=True, extra="forbid", use_attribute_docstrings=True):
    """What stands beside the scores of whole days, and how they are written."""

    keep: Annotated[tuple[str, ...], AfterValidator(_handed_through)] = ()
    """Columns handed through to the table of scores, such as the ids of user and item."""
    rows_per_commit: PositiveInt = 1_000_000
    """Days are written together until this many rows; each group is one commit."""
