"""Reports how features differ: as they were served, or with the sources of a training, from those computed now."""

import datetime
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from pipeline.config.files import ROOT
from pipeline.data.joined.raw import find_changed
from pipeline.data.joined.reader import joined_schema
from pipeline.data.joined.source import FeatureSource, PinnedSource, pin_sources
from pipeline.data.selection import days_between
from pipeline.errors import ConfigError, RegistryError
from pipeline.jobs.console import format_rows, step
from pipeline.jobs.training.job import PLAN
from pipeline.jobs.training.provenance import Record, fetch_record
from pipeline.jobs.workspace import Workspace
from pipeline.registration.aliases import list_versions
from pipeline.scoring.consistency import ConsistencyResult, compare_pinned, compare_served, open_served
from pipeline.transforms.plan.plan import Plan, build_plan
from pipeline.transforms.schema import unknown_column
from storage.artifacts import write_json
from storage.warehouse import Warehouse

Days = Mapping[datetime.date, int]


def check_consistency(
    workspace: Workspace,
    served: str | None,
    on: Sequence[str],
    start: datetime.date | None,
    end: datetime.date | None,
    version: int | None,
    tolerance: float,
) -> dict[str, Any]:
    """Compares features and reports the differences.

    Args:
        served: Rows as they were served. None: compares with the sources as the version's training read them.
        on: Columns that tell which row is which.
        version: None: the newest one.
    """
    if served is not None and version is not None:
        raise ConfigError("arguments", "`served` or `version`", "both", "Leave out one: served rows need no version.")
    if served is not None:
        days, found = check_served(workspace, served, tuple(dict.fromkeys(on)), start, end, tolerance)
        then: dict[str, Any] = {"served": served}
    else:
        version = version or _newest_version(workspace)
        days, found = check_pinned(workspace, version, tuple(dict.fromkeys(on)), start, end, tolerance)
        then = {"version": version}
    return _report(workspace, found, days, then)


@step("compare served rows")
def check_served(
    workspace: Workspace,
    served: str,
    on: tuple[str, ...],
    start: datetime.date | None,
    end: datetime.date | None,
    tolerance: float,
) -> tuple[list[datetime.date], ConsistencyResult]:
    """Served rows -> their differences from the rows computed now. Safe to repeat: it only reads."""
    if not on:
        raise ConfigError("argument 'on'", "columns that tell which row is which", "none", "Add on=[user_id, time].")
    config, warehouse = workspace.config, workspace.warehouse
    source = warehouse.current(config.name)
    days = days_between(warehouse.day_rows(source), start, end, "days to compare")
    plan = build_plan(config.features, workspace.columns(source, config.features.named_columns()))
    rows, joined = open_served(warehouse, served, Path.cwd()), workspace.feature_joins()
    with workspace.console.progress() as progress:
        report = partial(progress, "compare")
        found = compare_served(warehouse, rows, source, joined, plan.columns, on, days, tolerance, report)
    return list(days), found


@step("compare sources")
def check_pinned(
    workspace: Workspace,
    version: int,
    on: tuple[str, ...],
    start: datetime.date | None,
    end: datetime.date | None,
    tolerance: float,
) -> tuple[list[datetime.date], ConsistencyResult]:
    """A version -> differences of its joined features from those with the sources as they are now. It only reads.

    Raises:
        ConfigError: If a file that the training read has changed.
        RegistryError: If the version's record names no sources.
    """
    tracker, warehouse, name = workspace.tracking, workspace.warehouse, workspace.config.model_name
    record = fetch_record(tracker, name, version)
    model = tracker.get_version(name, str(version))
    assert model is not None  # it has a record
    plan = tracker.read_record(str(model.run_id), PLAN, Plan)
    then = [one for one in record.joined if any(one.source.may_add(column) for column in plan.columns)]
    if not then:
        raise RegistryError(
            f"record of model '{name}', version {version}", "features that were joined while rows were read", "none",
            "Name a version that reads histories, windows or feature sources, trained by this release: version=N.",
        )  # fmt: skip
    for one in then:
        _refuse_changed(one, warehouse, version)
    added = {column for one in then for column in FeatureSource(one, warehouse).schema.names}
    columns = {column: (column, column) for column in plan.columns if column in added}
    named = on or tuple(dict.fromkeys(column for one in then for column in row_columns(one)))
    table = joined_schema(warehouse, record.snapshot, then, named)
    for column in named:
        if column not in table.names:
            raise unknown_column("argument 'on'", column, table.names)
    now = pin_sources([one.source for one in then], ROOT, warehouse)
    days = days_between(_recorded_days(record, warehouse), start, end, f"days of version {version}")
    with workspace.console.progress() as progress:
        report = partial(progress, "compare")
        say = workspace.console.log.info
        found = compare_pinned(warehouse, record.snapshot, then, now, columns, named, days, tolerance, report, say)
    return list(days), found


def row_columns(pinned: PinnedSource) -> tuple[str, ...]:
    """Returns the columns of a row by which a source is looked up."""
    return pinned.source.on if pinned.source.as_of is None else (*pinned.source.on, pinned.source.as_of)


def _recorded_days(record: Record, warehouse: Warehouse) -> Days:
    """Returns the days that a version was trained and judged on, with their rows."""
    rows = warehouse.day_rows(record.snapshot)
    read = {day for selection in record.rows.values() for day in selection.days}
    return {day: rows[day] for day in rows if day in read}


def _refuse_changed(pinned: PinnedSource, warehouse: Warehouse, version: int) -> None:
    changed = find_changed(pinned.files, pinned.stamps, warehouse.config.catalog)
    if changed is not None:
        raise ConfigError(
            f"{pinned.where}, file '{changed}'", f"the file that version {version} was trained with",
            "a changed or missing one, so the old values are lost",
            "Write new events to new files, or take a table of the warehouse as source: its snapshots are kept.",
        )  # fmt: skip


def _newest_version(workspace: Workspace) -> int:
    name = workspace.config.model_name
    versions = list_versions(workspace.tracking, name)
    if not versions:
        raise RegistryError(f"model '{name}'", "a version", "none", "Train one, or compare served rows: served=PATH.")
    return versions[-1]


def _report(
    workspace: Workspace, found: ConsistencyResult, days: Sequence[datetime.date], then: Mapping[str, Any]
) -> dict[str, Any]:
    """Prints the differences, shows them on the run's page, and writes them below `home/reports`."""
    name, kind = workspace.config.name, next(iter(then))
    result = {**then, "table": name, "days": [str(day) for day in days], **found.model_dump(mode="json")}
    print(format_rows([describe_differences(one) for one in found.features]))
    path = show_differences(workspace, days, kind, result, f"features of {found.rows:,} rows of {name} differ")
    if found.only_then or found.only_now:
        workspace.console.log.warning(
            "%s served rows are not in these days of the table, and %s of its rows were not served",
            f"{found.only_then:,}",
            f"{found.only_now:,}",
        )
    return {"status": "ok", "report": str(path)} | result


def show_differences(
    workspace: Workspace, days: Sequence[datetime.date], kind: str, result: Mapping[str, Any], line: str
) -> Path:
    """Writes the result of a comparison below `home/reports`, and shows its features on the run's page.

    Args:
        kind: Another comparison of the same days and kind replaces the file.
        line: What the differing features do.
    Returns:
        The file.
    """
    name, features = workspace.config.model_key, result["features"]
    path = workspace.home / "reports" / f"consistency-{name}-{days[0]}-{days[-1]}" / f"{kind}.json"
    write_json(path, result)
    line = f"{sum(one['differing'] > 0 for one in features)} of {len(features)} {line}"
    workspace.console.log.info("%s: %s", line, path)
    workspace.console.show_table(f"consistency-{kind}", name, [describe_differences(one) for one in features], line)
    return path


def describe_differences(feature: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the differences of one feature as a row of a table.

    Args:
        feature: As `ColumnDifferences.summary`.
    """
    return {
        "feature": feature["feature"],
        "rows": feature["rows"],
        "differing": f"{100 * feature['share']:.2f} %",
        "largest difference": "" if feature["largest_difference"] is None else f"{feature['largest_difference']:.4g}",
        "reasons": ", ".join(f"{reason}: {rows:,}" for reason, rows in feature["reasons"].items()),
    }
