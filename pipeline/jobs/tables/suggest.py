"""A table or source looked at, and the config that comes of it."""

from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from pipeline.config import RunConfig, load
from pipeline.config.files import ROOT, read_yaml
from pipeline.data.profile import rows_of, stored_rows, types_of
from pipeline.errors import ConfigError
from pipeline.extraction.opening import SourceContext, open_samples
from pipeline.jobs.console import step
from pipeline.jobs.workspace import Workspace
from pipeline.suggestion.choose import Suggestion, suggest
from pipeline.suggestion.facts import TableFacts, observe
from pipeline.suggestion.write import render_config
from storage.artifacts import write_text
from storage.query import column_types, connect, quote
from storage.reader import DAY

NOWHERE = "no path yet"
"""Path of a source that a draft does not name."""
OWN = {"features", "split", "sweep", "release", "recurring"}
"""Sections that are suggested anew, or speak of columns."""
MEMORY = "512MB"


def draft(config: str | Path | RunConfig | Mapping[str, Any], overrides: Mapping[str, Any] | None = None) -> RunConfig:
    """A config that may lack all but its source; what it says of features and split is passed over.

    Args:
        config: As for any flow; an empty path stands for an empty file.
    """
    if isinstance(config, RunConfig):
        values = config.model_dump(mode="json", exclude_defaults=True)
    else:
        values = {} if config == "" else read_yaml(Path(config)) if isinstance(config, str | Path) else dict(config)
    given = values.get("features") or {}
    features = {key: given[key] for key in ("label", "weight") if given.get(key)}
    label = features.get("label", "label")
    outcomes = (values.get("source") or {}).get("outcomes")
    features["sparse"] = _some("*" if outcomes is None else outcomes.get("on", "impression_id"))
    values |= {"features": features, "split": {"hash": {"key": label, "shares": {"train": 0.5, "test": 0.5}}}}
    values = {"name": "mine", "source": {"path": NOWHERE, "day": "2000-01-01"}} | values
    return load({key: value for key, value in values.items() if key not in OWN - {"features", "split"}}, overrides)


def _some(columns: str) -> list[dict[str, Any]]:
    """Stands for the features of a draft; names columns that are there and are no outcomes."""
    return [{"columns": columns, "transforms": [{"kind": "sigrid_hash", "size": 2}]}]


def given_source(config: RunConfig, path: str | None, label: str | None, day_column: str | None) -> RunConfig:
    """The draft with a source and a label given as parameters of the flow.

    Raises:
        ConfigError: If neither the config nor the parameters name a source.
    """
    changes: dict[str, Any] = {"features": config.features.model_dump(mode="json")}
    if path is not None:
        changes["source"] = {"path": path, "day": None if day_column else "2000-01-01"}
        changes["features"]["sparse"] = _some("*")
    elif config.source.path == NOWHERE:
        raise ConfigError("suggest", "a config with a source, or path=FILES", "neither", "Name one of them.")
    if day_column is not None:
        changes.setdefault("source", config.source.model_dump(mode="json"))
        changes["source"] |= {"day": None, "day_column": day_column}
    if label is not None:
        changes["features"] |= {"label": label}
    return load(config.model_dump(mode="json", exclude_defaults=True) | changes)


def look(workspace: Workspace, files: bool) -> tuple[TableFacts, str]:
    """Statistics of the table, or of the source where there is no such table, and what was looked at, in words.

    Args:
        files: Looks at the source even if there is a table.
    """
    config = workspace.config
    warehouse = workspace.warehouse
    label = config.features.label
    with ExitStack() as stack:
        if warehouse.has_table(config.name) and not files:
            snapshot = warehouse.current(config.name)
            folder = warehouse.home / "tmp"
            folder.mkdir(parents=True, exist_ok=True)
            spill = stack.enter_context(TemporaryDirectory(prefix="suggest-", dir=folder))
            connection = stack.enter_context(connect([], Path(spill), MEMORY))
            days = warehouse.day_rows(snapshot)
            types = types_of(connection, warehouse.reader(snapshot, warehouse.schema(snapshot).names).empty())
            rows = stored_rows(connection, warehouse, snapshot, days)
            return observe(connection, rows, types, days, label), f"table {config.name}"
        logs = workspace.home / "logs"
        source, features = config.source, config.features
        context = SourceContext(source, features, warehouse, config.name, ROOT, logs)
        connection, view = stack.enter_context(open_samples(context))
        days = rows_of(connection, view)
        types = column_types(connection, view)
        return observe(connection, lambda names: quote(view), types, days, label), "files of the source"


def write(workspace: Workspace, observed: TableFacts, source: str) -> tuple[Path, Suggestion]:
    """The suggested config, as a file below `home` that every flow takes."""
    config = workspace.config
    apart: dict[str, str] = {}
    if config.evaluation.true_probability:
        apart[config.evaluation.true_probability] = "the true probability (evaluation.true_probability)"
    if config.features.weight:
        apart[config.features.weight] = "the rows' weight"
    if config.source.day_column:
        apart[config.source.day_column] = f"gives the column {DAY}"
    suggestion = suggest(observed, config.features.label, apart)
    kept = {"name": config.name} | config.model_dump(mode="json", exclude_defaults=True, exclude=OWN)
    text = render_config(suggestion, kept, observed.rows, len(observed.days), source, config.features.weight)
    path = workspace.home / "suggested" / f"{config.name}.yaml"
    write_text(path, text, 0o600)  # the catalog's properties may hold a password
    load(path)
    return path, suggestion


@step("suggest")
def write_suggestion(workspace: Workspace, files: bool) -> dict[str, Any]:
    """Rows -> a config. Safe to repeat: it replaces its file."""
    observed, source = look(workspace, files)
    path, suggestion = write(workspace, observed, source)
    logger = workspace.console.log
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
