"""The feature log joined with its outcomes inside a time window."""

from pathlib import Path
from typing import Self

import duckdb
from pydantic import BaseModel, PositiveInt, model_validator

from pipeline.errors import ConfigError
from pipeline.extraction.sources import FILE, ROW, create_view
from storage.query import quoted


class Outcomes(BaseModel, frozen=True, extra="forbid", use_attribute_docstrings=True):
    """A log of outcomes; a feature row with one inside the window gets label 1, the others 0."""

    path: str | tuple[str, ...] | None = None
    """Files of the outcome log; None where the generator writes it."""
    on: str = "impression_id"
    """Column that names the impression in both logs."""
    feature_time: str = "event_time"
    """Timestamp column of the feature log."""
    outcome_time: str = "outcome_time"
    """Timestamp column of the outcome log."""
    window_seconds: PositiveInt = 3_600
    """Attribution window: an outcome counts from the feature row's time on, until this much later."""

    @model_validator(mode="after")
    def _apart(self) -> Self:
        if self.feature_time == self.outcome_time == self.on:
            raise ConfigError(
                "source.outcomes", "key and time in different columns", f"'{self.on}' for all", "Correct them."
            )
        return self


def add_labels(
    connection: duckdb.DuckDBPyConnection, source: str, outcomes: Outcomes, files: list[Path], label: str
) -> str:
    """A view of the feature log with a label column; returns its name.

    An outcome logged twice counts once: each feature row stays exactly one row.

    Raises:
        ConfigError: If a key or time column is absent, or the feature log has the label already.
    """
    create_view(connection, "outcomes", files, "auto", "source.outcomes.path")
    for view, names in {
        source: (outcomes.on, outcomes.feature_time),
        "outcomes": (outcomes.on, outcomes.outcome_time),
    }.items():
        known = dict(zip(connection.view(view).columns, map(str, connection.view(view).types), strict=True))
        where = f"source.outcomes, {'feature log' if view == source else 'outcome log'}"
        absent = [name for name in names if name not in known]
        if absent:
            columns = ", ".join([name for name in known if name not in (FILE, ROW)][:8])
            raise ConfigError(where, f"column '{absent[0]}'", columns, "Correct the names.")
        if not known[names[1]].startswith(("TIMESTAMP", "DATE")):
            kind = known[names[1]]
            raise ConfigError(where, f"timestamps in column '{names[1]}'", kind, "Convert it, or name another column.")
    if label in connection.view(source).columns:
        raise ConfigError(
            "source.outcomes", f"a feature log without '{label}'", "one that has it", "Leave out source.outcomes."
        )
    key = quoted(outcomes.on)
    shown, happened = quoted(outcomes.feature_time), quoted(outcomes.outcome_time)
    window = f"to_seconds({int(outcomes.window_seconds)})"
    connection.execute(
        f"CREATE VIEW labelled AS SELECT s.*, CAST(EXISTS (SELECT 1 FROM outcomes o WHERE o.{key} = s.{key}"
        f" AND o.{happened} >= s.{shown} AND o.{happened} < s.{shown} + {window}) AS INTEGER) AS {quoted(label)}"
        f" FROM {source} s"
    )
    return "labelled"
