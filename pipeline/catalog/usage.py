"""Which runs and model versions read a column, and how important it was to them."""

import datetime
from collections.abc import Mapping, Sequence

from pydantic import BaseModel

from pipeline.transforms.plan.plan import Plan


class ColumnImportance(BaseModel, frozen=True):
    """Importance of a column to a model: that of the most important feature computed from it."""

    ne_loss: float
    """How much NE rises without its values."""
    low: float
    high: float
    droppable: bool
    """Whether even the upper bound is too small to matter."""


class Run(BaseModel, frozen=True):
    """A training run and the raw columns that it read."""

    run_id: str
    name: str
    at: datetime.datetime
    """Start, UTC."""
    columns: frozenset[str]
    importance: Mapping[str, ColumnImportance] = {}
    """Column -> importance. Empty: not measured."""


class Version(BaseModel, frozen=True):
    """A registered model version and the raw columns that it reads."""

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
    """The newest ones, newest first."""
    versions: tuple[Version, ...] = ()

    def runs_of(self, column: str) -> list[Run]:
        """Returns the runs that read a column, newest first."""
        return [run for run in self.runs if column in run.columns]

    def versions_of(self, column: str) -> list[Version]:
        """Returns the versions that read a column."""
        return [version for version in self.versions if column in version.columns]

    def served(self, column: str) -> list[Version]:
        """Returns the versions with an alias, such as the champion, that read a column."""
        return [version for version in self.versions_of(column) if version.aliases]


def importance_by_column(plan: Plan, importance: Sequence[tuple[str, ColumnImportance]]) -> dict[str, ColumnImportance]:
    """Returns column -> importance of the most important feature computed from it.

    Args:
        importance: Features with their importance, as far as measured.
    """
    best: dict[str, ColumnImportance] = {}
    for name, measured in importance:
        for column in plan.columns_of(name):
            if column not in best or measured.ne_loss > best[column].ne_loss:
                best[column] = measured
    return best
