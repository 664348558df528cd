"""The catalogue of a table's features, put together from the warehouse, the ingest's profile and MLflow."""

import datetime
import getpass
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from pipeline.catalog.entries import Entry, build_entries
from pipeline.catalog.events import Event, build_event, newest_events, read_events, unknown_feature
from pipeline.catalog.retire import RetireCandidate, find_candidates
from pipeline.catalog.usage import Usage
from pipeline.config import RunConfig
from pipeline.data.profile import profiles
from pipeline.errors import ConfigError
from pipeline.jobs.console import Logger
from pipeline.jobs.tables.lineage import usage_of
from pipeline.jobs.training.job import roles_of, tracker_of, warehouse_of
from pipeline.preprocessing.dataset import DataSpec
from storage.layout.columns import Footers
from storage.reader import DAY, SnapshotRef
from storage.warehouse import Warehouse


class Catalogue(NamedTuple):
    """Features of a table at a snapshot, and who reads them."""

    snapshot: SnapshotRef
    entries: list[Entry]
    usage: Usage


def catalogue(config: RunConfig) -> Catalogue:
    """The catalogue of the newest snapshot.

    Raises:
        StorageError: If there is no such table.
        TrackingError: If MLflow does not answer.
    """
    warehouse = warehouse_of(config)
    snapshot = warehouse.current(config.name)
    schema, profile = warehouse.schema(snapshot), profiles(warehouse, config.name)
    footers = Footers(warehouse.table(config.name), snapshot)
    unmeasured = {*schema.names} - {*profile["column"].to_pylist()}
    found = build_entries(
        schema,
        (DAY, config.features.label),
        read_events(warehouse, config.name),
        usage := usage_of(tracker_of(config), config.model_name),
        footers.columns(),
        profile,
        footers.without_values(unmeasured).columns,
    )
    return Catalogue(snapshot, found, usage)


def entry_of(known: Catalogue, feature: str) -> Entry:
    """One feature's entry.

    Raises:
        ConfigError: If there is none; names the closest ones.
    """
    for entry in known.entries:
        if entry.name == feature:
            return entry
    raise unknown_feature(feature, [entry.name for entry in known.entries], "Correct the name.")


def proposed(config: RunConfig, known: Catalogue, unused_days: int) -> list[RetireCandidate]:
    """Features that could be retired."""
    now = datetime.datetime.now(datetime.UTC)
    return find_candidates(known.entries, known.usage, _not_features(config), unused_days, now)


def _not_features(config: RunConfig) -> set[str]:
    """Columns that the config reads for something else than features, in any flow."""
    source, sampling, joined = config.source, config.sampling, config.features.joined
    single = [source.day_column]
    single += [source.outcomes.on, source.outcomes.feature_time] if source.outcomes is not None else []
    several = [config.scoring.keep, config.ingest.order_by, *(side.on for side in joined)]
    several += [sampling.inputs] if sampling is not None else []
    words = re.findall(r"[A-Za-z_]\w*", config.filter or "")  # its columns among them
    named = {name for name in single if name is not None} | {name for names in (*several, words) for name in names}
    return named | {name for name, _ in roles_of(config)}


def declaration(config: RunConfig, log: list[Event], feature: str, by: str | None, changes: Mapping[str, Any]) -> Event:
    """The event that declares something of a feature; nothing is written.

    Args:
        log: All events of the table's features.
    Raises:
        ConfigError: If there is no such feature, or its state cannot change so.
    """
    warehouse = warehouse_of(config)
    names = warehouse.schema(warehouse.current(config.name)).names
    columns = [name for name in names if name not in (DAY, config.features.label)]
    _check_alternatives(feature, changes.get("alternatives", ()), {*columns, *newest_events(log)}, log)
    return build_event(log, columns, feature, by or _user(), changes)


def champion_warning(config: RunConfig, feature: str, only_unused: bool) -> str | None:
    """What to know before a feature is deprecated: which serving versions read it; None: none does.

    Raises:
        ConfigError: If there are some, and only an unused feature is meant.
    """
    served = usage_of(tracker_of(config), config.model_name).served(feature)
    if not served:
        return None
    names = ", ".join(f"{version}" for version in served)
    if only_unused:
        remedy = "Train a model without it first, or leave out only_unused=true."
        raise ConfigError(f"feature '{feature}'", "one that no serving version reads", names, remedy)
    return f"feature '{feature}' is read by {names}: new trainings on it are refused from now on"


def _check_alternatives(feature: str, named: Any, known: set[str], log: list[Event]) -> None:
    declared_now = newest_events(log)
    for name in named:
        if name not in known or name == feature:
            raise unknown_feature(name, sorted(known - {feature}), "Correct `instead`.")
        if name in declared_now and declared_now[name].state == "deprecated":
            raise ConfigError(f"instead '{name}'", "a feature that is not deprecated", "one that is", "Name another.")


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a user without a name, as in some containers
        return "unknown"


def warn_of_columns(spec: DataSpec, warehouse: Warehouse, logger: Logger) -> None:
    """Says which features a training reads without learning anything from them: absent columns, and empty ones."""
    plan, snapshot = spec.plan, spec.snapshot
    if plan.absent:
        names = ", ".join(plan.absent)
        logger.warning("table '%s' lacks %s: read as null (on_missing: default)", snapshot.table, names)
    stored = warehouse.schema(snapshot).names
    columns = [name for name in plan.columns if name in stored]
    search = Footers(warehouse.table(snapshot.table), snapshot).without_values(columns, spec.selection.days)
    if search.columns:
        some = "" if search.files_searched == search.files else f" in {search.files_searched} of {search.files} files"
        logger.warning("coverage 0%s on the training days: %s", some, ", ".join(search.columns))
