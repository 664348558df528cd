"""Looks at a table or a source and writes a complete config for it."""

from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from pipeline.config import load
from pipeline.config.draft import Draft, load_draft
from pipeline.config.files import ROOT
from pipeline.data.profile import rows_of, stored_rows, types_of
from pipeline.errors import ConfigError
from pipeline.extraction.opening import SourceContext, open_samples
from pipeline.jobs.console import Console, step
from pipeline.suggestion.choose import Suggestion, suggest
from pipeline.suggestion.facts import TableFacts, observe
from pipeline.suggestion.write import render_config
from storage.artifacts import write_text
from storage.query import column_types, connect, quote
from storage.reader import DAY
from storage.scratch import ScratchFolder
from storage.warehouse import Warehouse

ONE_DAY = "2000-01-01"
"""Day of all rows of `path` if no column gives one."""
MEMORY = "512MB"


@dataclass(frozen=True)
class DraftJob:
    """What a suggestion starts from."""

    draft: Draft
    console: Console

    @cached_property
    def warehouse(self) -> Warehouse:
        """The warehouse of the draft."""
        return Warehouse(self.draft.warehouse, self.draft.home_path / "warehouse")


def given_source(draft: Draft, path: str | None, label: str | None, day_column: str | None) -> Draft:
    """Puts a source and a label that the command names over those of the draft.

    Raises:
        ConfigError: If neither the draft nor the parameters name a source.
    """
    changes: dict[str, Any] = {}
    if path is not None:
        changes["source"] = {"path": path, "day": None if day_column else ONE_DAY}
    elif draft.source is None:
        raise ConfigError("suggest", "a config with a source, or path=FILES", "neither", "Name one of them.")
    else:
        changes["source"] = draft.source.model_dump(mode="json")
    if day_column is not None:
        changes["source"] |= {"day": None, "day_column": day_column}
    if label is not None:
        changes["features"] = draft.features.model_dump() | {"label": label}
    return load_draft(draft.model_dump(mode="json") | changes)


def look(job: DraftJob, files: bool) -> tuple[TableFacts, str]:
    """Statistics of the table, or of the source where there is no such table, and what was looked at, in words.

    Args:
        files: Looks at the source even if there is a table.
    """
    draft, warehouse, label = job.draft, job.warehouse, job.draft.features.label
    with ExitStack() as stack:
        if warehouse.has_table(draft.name) and not files:
            snapshot = warehouse.current(draft.name)
            spill = stack.enter_context(ScratchFolder("suggest-", warehouse.home / "tmp"))
            connection = stack.enter_context(connect([], Path(spill), MEMORY))
            days = warehouse.day_rows(snapshot)
            types = types_of(connection, warehouse.reader(snapshot, warehouse.schema(snapshot).names).empty())
            rows = stored_rows(connection, warehouse, snapshot, days)
            return observe(connection, rows, types, days, label), f"table {draft.name}"
        assert draft.source is not None  # given_source refuses a draft without one
        logs = draft.home_path / "logs"
        context = SourceContext(draft.source, draft.features, warehouse, draft.name, ROOT, logs)
        connection, view = stack.enter_context(open_samples(context))
        days = rows_of(connection, view)
        types = column_types(connection, view)
        return observe(connection, lambda names: quote(view), types, days, label), "files of the source"


def write(draft: Draft, observed: TableFacts, source: str) -> tuple[Path, Suggestion]:
    """The suggested config, as a file below `home` that every flow takes."""
    apart: dict[str, str] = {}
    if draft.evaluation.true_probability:
        apart[draft.evaluation.true_probability] = "the true probability (evaluation.true_probability)"
    if draft.features.weight:
        apart[draft.features.weight] = "the rows' weight"
    if draft.source is not None and draft.source.day_column:
        apart[draft.source.day_column] = f"gives the column {DAY}"
    suggestion = suggest(observed, draft.features.label, apart)
    text = render_config(suggestion, draft.sections(), observed.rows, len(observed.days), source, draft.features.weight)
    path = draft.home_path / "suggested" / f"{draft.name}.yaml"
    write_text(path, text, 0o600)  # the catalog's properties may hold a password
    load(path)
    return path, suggestion


@step("suggest")
def write_suggestion(job: DraftJob, files: bool) -> dict[str, Any]:
    """Rows -> a config. Safe to repeat: it replaces its file."""
    observed, source = look(job, files)
    path, suggestion = write(job.draft, observed, source)
    logger = job.console.log
    counts = {use: len(suggestion.of(use)) for use in ("dense", "sparse", "ignored")}
    for choice in suggestion.of("ignored"):
        logger.info("left out: %s: %s", choice.fact.name, choice.why)
    logger.info("%s dense, %s sparse, %s left out: %s", *counts.values(), path)
    return {
        "status": "ok",
        "config_path": str(path),
        "looked_at": source,
        "rows": observed.rows,
        "days": len(observed.days),
        **counts,
        "embedding_width": suggestion.embedding_width,
        "columns": [
            {
                "column": choice.fact.name,
                "use": choice.use,
                "why": choice.why,
                "transforms": list(choice.transforms),
                "distinct": choice.fact.distinct,
                "coverage": round(choice.fact.coverage, 4),
            }
            for choice in suggestion.choices
        ],
    }
