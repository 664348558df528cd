"""Flow: the catalogue of a table's features, and what is declared of them."""

from collections.abc import Mapping
from typing import Any, Literal

from prefect import flow, get_run_logger
from pydantic import PositiveInt

from flows.runtime.pages import show_table
from pipeline.catalog import text
from pipeline.catalog.events import State, append_event, newest_events, read_events
from pipeline.config import RunConfig, load
from pipeline.errors import ConfigError
from pipeline.jobs.tables import catalog
from pipeline.jobs.tables.catalog import Catalogue
from pipeline.jobs.training.job import warehouse_of
from pipeline.jobs.training.summary import flow_run_name

Action = Literal["list", "show", "propose", "set", "deprecate", "history"]
DECLARED = ("state", "kind", "owner", "description", "reason")


@flow(name="features", flow_run_name=flow_run_name)
def features(
    config: RunConfig | str = "configs/demo.yaml",
    overrides: Mapping[str, Any] | None = None,
    action: Action = "list",
    name: str | None = None,
    state: State | None = None,
    kind: Literal["number", "id", "ids", "text", "other"] | None = None,
    owner: str | None = None,
    description: str | None = None,
    reason: str | None = None,
    instead: str | list[str] | None = None,
    by: str | None = None,
    unused_days: PositiveInt = 30,
    only_unused: bool = False,
    again: bool = False,
) -> dict[str, Any]:
    """The features of the warehouse table in; a list, one of them, what could be retired, or a declaration out.

    Args:
        config: The run's config, or the path of its YAML file.
        overrides: Dotted key -> value, put over the config.
        action: list; show, one feature day by day; propose, features to retire; set, what is declared of a feature;
            deprecate; history, what was declared.
        name: The feature that is shown, set or deprecated, or whose history is asked for.
        state: beta, experimental, active or deprecated.
        kind: Of a feature that is no column yet.
        owner: Who answers for the feature.
        description: What it holds.
        reason: Why it is deprecated.
        instead: Features to read instead of a deprecated one.
        by: Who declares it; None: the user.
        unused_days: Days without a run that reads a feature, after which it is proposed.
        only_unused: Refuses to deprecate what a serving version reads.
        again: Declares a feature deprecated that is so already, with other words.
    """
    settings = load(config, overrides)
    if action in ("show", "set", "deprecate") and name is None:
        raise ConfigError("argument 'name'", f"the feature to {action}", "none", "Add name=FEATURE.")
    words = {"state": state, "kind": kind, "owner": owner, "description": description, "reason": reason}
    changes: dict[str, Any] = {key: value for key, value in words.items() if value is not None}
    if instead is not None:
        changes["alternatives"] = (instead,) if isinstance(instead, str) else tuple(instead)
    if action == "history":
        return _history(settings, name)
    if action in ("set", "deprecate"):
        assert name is not None
        changes |= {"state": "deprecated"} if action == "deprecate" else {}
        return _declared(settings, name, by, changes, only_unused, again) | {"action": action}
    known = catalog.catalogue(settings)
    if name is not None and action == "show":
        made = _shown(known, name)
    else:
        made = _proposed(settings, known, unused_days) if action == "propose" else _listed(settings, known)
    return {"status": "ok", "action": action, "table": settings.name, "snapshot_id": known.snapshot.snapshot_id} | made


def _listed(config: RunConfig, known: Catalogue) -> dict[str, Any]:
    rows = text.feature_rows(known.entries)
    print(text.format_table(rows))
    total = sum(entry.bytes for entry in known.entries)
    line = f"{len(rows)} features of table {config.name}, {text.format_bytes(total)}"
    get_run_logger().info("%s", line)
    show_table("features", config.name, rows, line)
    listed = [entry.model_dump(mode="json", exclude={"days"}) for entry in known.entries]
    return {"features": listed, "bytes": total}


def _shown(known: Catalogue, name: str) -> dict[str, Any]:
    entry = catalog.entry_of(known, name)
    for key, value in entry.model_dump(mode="json", exclude={"days"}).items():
        print(f"{key:<12} {', '.join(value) if isinstance(value, list) else '' if value is None else value}".rstrip())
    if entry.days:
        print(text.format_table(text.day_rows(entry.days)))
    return {"feature": entry.model_dump(mode="json")}


def _proposed(config: RunConfig, known: Catalogue, unused_days: int) -> dict[str, Any]:
    found = catalog.proposed(config, known, unused_days)
    total = sum(one.bytes for one in found)
    if found:
        print(text.format_table(text.candidate_rows(found)))
    line = f"{len(found)} features of table {config.name} could be retired, {text.format_bytes(total)} of its files"
    get_run_logger().info("%s", line)
    show_table("features-to-retire", config.name, text.candidate_rows(found), line)
    return {"candidates": [one.model_dump(mode="json") for one in found], "bytes": total}


def _declared(
    config: RunConfig, name: str, by: str | None, changes: Mapping[str, Any], only_unused: bool, again: bool
) -> dict[str, Any]:
    if not changes:
        raise ConfigError("argument 'set'", f"one of {', '.join(DECLARED)}", "none", "Say what changes.")
    warehouse, warning = warehouse_of(config), None
    log = read_events(warehouse, config.name)
    before, deprecated = newest_events(log).get(name), changes.get("state") == "deprecated"
    if deprecated and before is not None and before.state == "deprecated" and not again:
        get_run_logger().info("skipped: '%s' is deprecated already; again=true changes the words", name)
        return {"status": "skipped", "event": before.model_dump(mode="json"), "warning": None}
    event = catalog.declaration(config, log, name, by, changes)
    if deprecated:
        warning = catalog.champion_warning(config, name, only_unused)
        if warning is not None:
            get_run_logger().warning("%s", warning)
    append_event(warehouse, config.name, event)
    get_run_logger().info("feature '%s' of table %s is %s", name, config.name, event.state)
    return {"status": "ok", "event": event.model_dump(mode="json"), "warning": warning}


def _history(config: RunConfig, name: str | None) -> dict[str, Any]:
    log = [event for event in read_events(warehouse_of(config), config.name) if name in (None, event.feature)]
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


if __name__ == "__main__":
    from flows.runtime import cli

    cli.main(features)
