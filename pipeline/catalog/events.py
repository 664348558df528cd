"""The event log of a table's features: who declared what, and when. The newest event of each feature counts."""

import datetime
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal, get_args

import pyarrow as pa
from pydantic import BaseModel

from pipeline.errors import ConfigError, closest_names
from storage.snapshot.writing import append_rows
from storage.warehouse import Warehouse

State = Literal["beta", "experimental", "active", "deprecated"]
"""Life cycle of a feature: tried out, used by some trainings, used by all, no longer used."""
MOVES: Mapping[State, tuple[State, ...]] = {
    "beta": ("experimental", "deprecated"),
    "experimental": ("beta", "active", "deprecated"),
    "active": ("deprecated",),
    "deprecated": ("active",),
}
"""State -> states that may follow it."""
SCHEMA = pa.schema(
    [
        ("day", pa.date32()),
        ("at", pa.timestamp("us", tz="UTC")),
        ("feature", pa.string()),
        ("state", pa.string()),
        ("kind", pa.string()),
        ("owner", pa.string()),
        ("description", pa.string()),
        ("alternatives", pa.list_(pa.string())),
        ("by", pa.string()),
        ("reason", pa.string()),
    ]
)


class Event(BaseModel, frozen=True):
    """A declaration about a feature. Each event is complete: it replaces the one before."""

    at: datetime.datetime
    """UTC."""
    feature: str
    state: State
    kind: str | None = None
    owner: str | None = None
    description: str | None = None
    alternatives: tuple[str, ...] = ()
    """Features to read instead of a deprecated one."""
    by: str
    reason: str | None = None


def log_name(table: str) -> str:
    """Returns the name of the table with the events of a table's features."""
    return f"{table}_features"


def read_events(warehouse: Warehouse, table: str) -> list[Event]:
    """Reads all events of a table's features, oldest first."""
    name = log_name(table)
    if not warehouse.has_table(name) or warehouse.table(name).current_snapshot() is None:
        return []
    reader = warehouse.reader(warehouse.current(name), [field for field in SCHEMA.names if field != "day"])
    rows = [row for fragment in reader.fragments() for row in reader.read(fragment).to_pylist()]
    found = [Event.model_validate(row | {"alternatives": row["alternatives"] or ()}) for row in rows]
    return sorted(found, key=lambda event: event.at)


def newest_events(log: Sequence[Event]) -> dict[str, Event]:
    """Returns feature -> its newest event."""
    return {event.feature: event for event in log}


def state_since(log: Sequence[Event], feature: str) -> datetime.date | None:
    """Returns the day on which a feature entered its current state. None: it was never declared."""
    found = None
    for event in (event for event in log if event.feature == feature):
        found = event if found is None or found.state != event.state else found
    return None if found is None else found.at.date()


def append_event(warehouse: Warehouse, table: str, event: Event) -> None:
    """Appends an event. If two writers append at once, both events are kept and the later one counts.

    Raises:
        ConflictError: If other writers were faster each time.
    """
    append_rows(warehouse, log_name(table), SCHEMA, [event.model_dump() | {"day": event.at.date()}])


def build_event(
    log: Sequence[Event], columns: Collection[str], feature: str, by: str, changes: Mapping[str, Any]
) -> Event:
    """Builds the event that changes a feature, later than the one before it. Nothing is written.

    Args:
        columns: Columns of the table. A column without events is active. A feature without a column can only be beta
            or deprecated.
        changes: Fields of the event to change. The others stay.
    Raises:
        ConfigError: If there is no such feature, or its state may not change that way.
    """
    before = newest_events(log).get(feature)
    state = changes.get("state")
    if before is None and feature not in columns and state != "beta":
        raise unknown_feature(feature, columns, "Correct the name, or declare it with state=beta.")
    present: State | None = before.state if before is not None else "active" if feature in columns else None
    wanted: State = state or present or "beta"
    if wanted not in get_args(State):
        raise ConfigError("argument 'state'", ", ".join(get_args(State)), f"'{wanted}'", "Correct it.")
    if present is not None and wanted != present and wanted not in MOVES[present]:
        allowed = " or ".join(MOVES[present])
        raise ConfigError(
            f"feature '{feature}', which is {present}", f"{allowed} as the next state", wanted, "Name one of them."
        )
    kept = {} if before is None else before.model_dump(exclude={"at", "by", "reason"})
    if wanted != "deprecated":
        kept.pop("alternatives", None)
    values = kept | dict(changes) | {"feature": feature, "state": wanted, "by": by}
    now = datetime.datetime.now(datetime.UTC)
    if before is not None:  # the clock of its writer may have been ahead
        now = max(now, before.at + datetime.timedelta(microseconds=1))
    return Event.model_validate(values | {"at": now})


def unknown_feature(feature: str, known: Collection[str], remedy: str) -> ConfigError:
    """Makes the error for an unknown feature, with the closest names."""
    close = closest_names(feature, list(known))
    return ConfigError(
        f"feature '{feature}'", "a feature of the table", "none of that name", f"Closest: {close}. {remedy}"
    )


def refuse_deprecated(log: Sequence[Event], where: str, columns: Collection[str]) -> None:
    """Refuses to train on deprecated features.

    Args:
        where: Snapshot and table, for the error message.
        columns: Columns that the training reads.
    Raises:
        ConfigError: With the deprecated features, since when and why they are, and what to read instead.
    """
    found = [event for event in newest_events(log).values() if event.state == "deprecated" and event.feature in columns]
    if found:
        raise ConfigError(
            f"features at {where}",
            "none that is deprecated",
            "; ".join(_describe(log, event) for event in sorted(found, key=lambda event: event.feature)),
            "Read the alternatives, or set features.allow_deprecated=true.",
        )


def _describe(log: Sequence[Event], event: Event) -> str:
    instead = ", ".join(f"'{name}'" for name in event.alternatives) or "nothing"
    reason = f", {event.reason}" if event.reason else ""
    return f"'{event.feature}', deprecated since {state_since(log, event.feature)}{reason}; instead: {instead}"
