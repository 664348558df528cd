"""The feature catalog of a table, built from the warehouse, the ingest's profile and MLflow."""

import datetime
import getpass
import re
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import pyarrow as pa

from pipeline.catalog import text
from pipeline.catalog.entries import Entry, build_entries, measured_keys
from pipeline.catalog.events import Event, append_event, build_event, newest_events, read_events, unknown_feature
from pipeline.catalog.events import State as State
from pipeline.catalog.retire import RetireCandidate, find_candidates
from pipeline.catalog.usage import Usage
from pipeline.data.profile import profiles
from pipeline.errors import ConfigError
from pipeline.jobs.features.lineage import load_usage
from pipeline.jobs.training.job import list_roles
from pipeline.jobs.workspace import Workspace
from pipeline.transforms.joins import FeatureJoin
from storage.keys import map_names
from storage.layout.columns import Footers
from storage.reader import DAY, SnapshotRef

MEASURED_DAYS = 90
"""Newest days whose statistics are shown."""
DECLARED = ("state", "kind", "owner", "description", "reason")
Action = Literal["list", "show", "propose", "set", "deprecate", "history"]


class FeatureCatalog(NamedTuple):
    """Features of a table at a snapshot, and the runs and versions that read them."""

    snapshot: SnapshotRef
    entries: list[Entry]
    usage: Usage


def _newest_profiles(workspace: Workspace, snapshot: SnapshotRef) -> pa.Table:
    warehouse = workspace.warehouse
    return profiles(warehouse, snapshot.table, [*warehouse.day_rows(snapshot)][-MEASURED_DAYS:])


def load_features(workspace: Workspace) -> FeatureCatalog:
    """Loads the feature catalog of the newest snapshot.

    Raises:
        StorageError: If there is no such table.
        TrackingError: If MLflow does not answer.
    """
    config = workspace.config
    warehouse = workspace.warehouse
    snapshot = warehouse.current(config.name)
    schema, profile = warehouse.schema(snapshot), _newest_profiles(workspace, snapshot)
    footers = Footers(warehouse.table(config.name), snapshot)
    unmeasured = {*schema.names} - {*profile["column"].to_pylist()}
    found = build_entries(
        schema,
        (DAY, config.features.label),
        read_events(warehouse, config.name),
        usage := load_usage(workspace.tracking, config.model_name),
        footers.columns(),
        profile,
        footers.without_values(unmeasured).columns,
    )
    return FeatureCatalog(snapshot, found, usage)


def find_entry(known: FeatureCatalog, feature: str) -> Entry:
    """Returns the entry of a feature.

    Raises:
        ConfigError: If there is none. Names similar features.
    """
    for entry in known.entries:
        if entry.name == feature:
            return entry
    raise unknown_feature(feature, [entry.name for entry in known.entries], "Correct the name.")


def list_retirable(workspace: Workspace, known: FeatureCatalog, unused_days: int) -> list[RetireCandidate]:
    """Returns features that could be retired."""
    now = datetime.datetime.now(datetime.UTC)
    return find_candidates(known.entries, known.usage, _list_other_columns(workspace), unused_days, now)


def _list_other_columns(workspace: Workspace) -> set[str]:
    """Returns the columns that any flow reads for another purpose than features."""
    config = workspace.config
    source, sampling, joined = config.source, config.sampling, config.features.sources
    single = [source.day_column, *(side.as_of for side in joined)]
    single += [source.outcomes.on, source.outcomes.feature_time] if source.outcomes is not None else []
    several = [config.scoring.keep, config.ingest.order_by, *(side.on for side in joined)]
    several += [sampling.inputs] if sampling is not None else []
    own = [side for side in joined if side.table == config.name]
    single += [side.time for side in own]
    several += [side.columns for side in own]
    filters = [config.filter, *(side.where for side in own if not isinstance(side, FeatureJoin))]
    words = re.findall(r"[A-Za-z_]\w*", " ".join(one or "" for one in filters))  # may include more than columns
    named = {name for name in single if name is not None} | {name for names in (*several, words) for name in names}
    return named | {name for name, _ in list_roles(workspace)}


def build_declaration(
    workspace: Workspace, log: list[Event], feature: str, by: str | None, changes: Mapping[str, Any]
) -> Event:
    """Builds the event of a declaration. Writes nothing.

    Args:
        log: All events of the table's features.
    Raises:
        ConfigError: If there is no such feature, or its state cannot change like this.
    """
    config = workspace.config
    snapshot = workspace.warehouse.current(config.name)
    schema = workspace.warehouse.schema(snapshot)
    keys = measured_keys(schema, _newest_profiles(workspace, snapshot)) if map_names(schema) else []
    columns = [name for name in [*schema.names, *keys] if name not in (DAY, config.features.label)]
    _check_alternatives(feature, changes.get("alternatives", ()), {*columns, *newest_events(log)}, log)
    return build_event(log, columns, feature, by or _user(), changes)


def check_serving(workspace: Workspace, feature: str, only_unused: bool) -> str | None:
    """Returns a warning if serving versions read a feature that is to be deprecated, else None.

    Args:
        only_unused: Raises instead of returning a warning.
    Raises:
        ConfigError: If a serving version reads the feature and `only_unused` is set.
    """
    served = load_usage(workspace.tracking, workspace.config.model_name).served(feature)
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
            raise ConfigError(f"instead '{name}'", "a feature in use", "a deprecated one", "Name another.")


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a user without a name, as in some containers
        return "unknown"


def list_features(workspace: Workspace, known: FeatureCatalog) -> dict[str, Any]:
    config = workspace.config
    rows = text.feature_rows(known.entries)
    print(text.format_table(rows))
    total = sum(entry.bytes for entry in known.entries)
    line = f"{len(rows)} features of table {config.name}, {text.format_bytes(total)}"
    workspace.console.log.info("%s", line)
    workspace.console.show_table("features", config.name, rows, line)
    listed = [entry.model_dump(mode="json", exclude={"days"}) for entry in known.entries]
    return {"features": listed, "bytes": total}


def show_feature(known: FeatureCatalog, name: str) -> dict[str, Any]:
    entry = find_entry(known, name)
    for key, value in entry.model_dump(mode="json", exclude={"days"}).items():
        print(f"{key:<12} {', '.join(value) if isinstance(value, list) else '' if value is None else value}".rstrip())
    if entry.days:
        print(text.format_table(text.day_rows(entry.days)))
    return {"feature": entry.model_dump(mode="json")}


def propose_retirement(workspace: Workspace, known: FeatureCatalog, unused_days: int) -> dict[str, Any]:
    config = workspace.config
    found = list_retirable(workspace, known, unused_days)
    total = sum(one.bytes for one in found)
    if found:
        print(text.format_table(text.candidate_rows(found)))
    line = f"{len(found)} features of table {config.name} could be retired, {text.format_bytes(total)} of its files"
    workspace.console.log.info("%s", line)
    workspace.console.show_table("features-to-retire", config.name, text.candidate_rows(found), line)
    return {"candidates": [one.model_dump(mode="json") for one in found], "bytes": total}


def declare_feature(
    workspace: Workspace, name: str, by: str | None, changes: Mapping[str, Any], only_unused: bool, force: bool
) -> dict[str, Any]:
    config = workspace.config
    if not changes:
        raise ConfigError("argument 'set'", f"one of {', '.join(DECLARED)}", "none", "Say what changes.")
    warehouse, warning = workspace.warehouse, None
    log = read_events(warehouse, config.name)
    before, deprecated = newest_events(log).get(name), changes.get("state") == "deprecated"
    if deprecated and before is not None and before.state == "deprecated" and not force:
        workspace.console.log.info("skipped: '%s' is already deprecated; force=true changes the declaration", name)
        return {"status": "skipped", "event": before.model_dump(mode="json"), "warning": None}
    event = build_declaration(workspace, log, name, by, changes)
    if deprecated:
        warning = check_serving(workspace, name, only_unused)
        if warning is not None:
            workspace.console.log.warning("%s", warning)
    append_event(warehouse, config.name, event)
    workspace.console.log.info("feature '%s' of table %s is %s", name, config.name, event.state)
    return {"status": "ok", "event": event.model_dump(mode="json"), "warning": warning}


def show_history(workspace: Workspace, name: str | None) -> dict[str, Any]:
    config = workspace.config
    log = [event for event in read_events(workspace.warehouse, config.name) if name in (None, event.feature)]
    found = [event.model_dump(mode="json") for event in log]
    shown = [
        {
            "at": f"{event.at:%Y-%m-%d %H:%M}",
            "feature": event.feature,
            "state": event.state,
            "by": event.by,
            "instead": ", ".join(event.alternatives),
            "reason": event.reason or "",
            "owner": event.owner or "",
            "description": event.description or "",
        }
        for event in log
    ]
    if shown:
        print(text.format_table(shown))
    return {"status": "ok", "action": "history", "table": config.name, "events": found}


def run_action(
    workspace: Workspace, action: Action, name: str | None, changes: dict[str, Any], options: Mapping[str, Any]
) -> dict[str, Any]:
    """Runs one action of `flows.features`.

    Args:
        name: The feature, for actions on a single one.
        changes: Field of the event -> declared value.
        options: The flow's parameters by, only_unused, force and unused_days.
    Raises:
        ConfigError: If the action needs a feature and none is named.
    """
    if action in ("show", "set", "deprecate") and name is None:
        raise ConfigError("argument 'name'", f"the feature to {action}", "none", "Add name=FEATURE.")
    if action == "history":
        return show_history(workspace, name)
    if name is not None and action in ("set", "deprecate"):
        changes = changes | ({"state": "deprecated"} if action == "deprecate" else {})
        done = declare_feature(workspace, name, options["by"], changes, options["only_unused"], options["force"])
        return done | {"action": action}
    known = load_features(workspace)
    if name is not None and action == "show":
        made = show_feature(known, name)
    elif action == "propose":
        made = propose_retirement(workspace, known, options["unused_days"])
    else:
        made = list_features(workspace, known)
    table, snapshot = workspace.config.name, known.snapshot.snapshot_id
    return {"status": "ok", "action": action, "table": table, "snapshot_id": snapshot} | made
