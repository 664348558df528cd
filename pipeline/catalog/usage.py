"""Who reads which column: runs and versions of models, and what their features were worth."""

import datetime
from collections.abc import Mapping, Sequence

from pydantic import BaseModel

from pipeline.transforms.plan.plan import Plan


class FeatureImportance(BaseModel, frozen=True):
    """What a column was worth to a model: the most valuable of the features that are made of it."""

    ne_loss: float
    """By how much NE rises without its values."""
    low: float
    high: float
    droppable: bool
    """Whether even the upper bound is too small to matter."""


class Run(BaseModel, frozen=True):
    """A training and the raw columns that it read."""

    run_id: str
    name: str
    at: datetime.datetime
    """Its start, UTC."""
    columns: frozenset[str]
    importance: Mapping[str, FeatureImportance] = {}
    """Column -> worth; empty: not measured."""


class Version(BaseModel, frozen=True):
    """A registered version of a model and the raw columns that it reads."""

    model: str
    version: int
    aliases: tuple[str, ...] = ()
    columns: frozenset[str]

    def __str__(self) -> str:
        shown = f" ({', '.join(self.aliases)})" if self.aliases else ""
        return f"{self.model} version {self.version}{shown}"


class Usage(BaseModel, frozen=True):
    """Lineage of a table's columns."""

    runs: tuple[Run, ...] = ()
    """Newest first."""
    versions: tuple[Version, ...] = ()

    def runs_of(self, column: str) -> list[Run]:
        """Runs that read a column, newest first."""
        return [run for run in self.runs if column in run.columns]

    def versions_of(self, column: str) -> list[Version]:
        """Versions that read a column."""
        return [version for version in self.versions if column in version.columns]

    def served(self, column: str) -> list[Version]:
        """Versions with an alias, such as the champion, that read a column."""
        return [version for version in self.versions_of(column) if version.aliases]


def importance_by_column(
    plan: Plan, importance: Sequence[tuple[str, FeatureImportance]]
) -> dict[str, FeatureImportance]:
    """Column -> the worth of the best feature that is made of it.

    Args:
        importance: Feature -> what it was worth, as far as it was measured.
    """
    best: dict[str, FeatureImportance] = {}
    for name, worth in importance:
        for column in plan.columns_of(name):
            if column not in best or worth.ne_loss > best[column].ne_loss:
                best[column] = worth
    return best
