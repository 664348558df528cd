"""The log of a table's features: who declared what, and when; the newest word on each feature counts."""

import datetime
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal, get_args

import pyarrow as pa
from pydantic import BaseModel

from pipeline.errors import ConfigError, closest_names
from storage.warehouse import Warehouse

State = Literal["beta", "experimental", "active", "deprecated"]
"""Life of a feature: tried out, trained on by some, by all, no longer."""
MOVES: Mapping[State, tuple[State, ...]] = {
    "beta": ("experimental", "deprecated"),
    "experimental": ("beta", "active", "deprecated"),
    "active": ("deprecated",),
    "deprecated": ("active",),
}
"""State -> those that may follow it."""
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
    """What was declared of a feature; each event says all that holds from then on."""

    at: datetime.datetime
    """UTC."""
    feature: str
    state: State
    kind: str | None = None
    owner: str | None = None
    description: str | None = None
    alternatives: tuple[str, ...] = ()
    """What to read instead of a deprecated feature."""
    by: str
    reason: str | None = None


def log_name(table: str) -> str:
    """Name of the table that holds the events of a table's features."""
    return f"{table}_features"


def read_events(warehouse: Warehouse, table: str) -> list[Event]:
    """All events of a table's features, oldest first."""
    name = log_name(table)
    if not warehouse.has_table(name) or warehouse.table(name).current_snapshot() is None:
        return []
    reader = warehouse.reader(warehouse.current(name), [field for field in SCHEMA.names if field != "day"])
    rows = [row for fragment in reader.fragments() for row in reader.read(fragment).to_pylist()]
    found = [Event.model_validate(row | {"alternatives": row["alternatives"] or ()}) for row in rows]
    return sorted(found, key=lambda event: event.at)


def newest_events(log: Sequence[Event]) -> dict[str, Event]:
    """Feature -> its newest event."""
    return {event.feature: event for event in log}


def state_since(log: Sequence[Event], feature: str) -> datetime.date | None:
    """The day on which a feature came into its present state; None: nothing was ever declared."""
    found = None
    for event in (event for event in log if event.feature == feature):
        found = event if found is None or found.state != event.state else found
    return None if found is None else found.at.date()


def append_event(warehouse: Warehouse, table: str, event: Event) -> None:
    """Adds an event; of two at once both are kept, and the later one counts.

    Raises:
        ConflictError: If other writers were faster each time.
    """
    warehouse.append(log_name(table), SCHEMA, [event.model_dump() | {"day": event.at.date()}])


def build_event(
    log: Sequence[Event], columns: Collection[str], feature: str, by: str, changes: Mapping[str, Any]
) -> Event:
    """The event that changes something of a feature; nothing is written.

    Args:
        columns: Those of the table. One without events is active; a feature that is not among them can only be beta,
            or be deprecated.
        changes: Fields of the event that change; the others stay.
    Raises:
        ConfigError: If there is no such feature, or it cannot come into that state from its present one.
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
    return Event.model_validate(values | {"at": datetime.datetime.now(datetime.UTC)})


def unknown_feature(feature: str, known: Collection[str], remedy: str) -> ConfigError:
    """The complaint about a feature that is not there; names the closest ones."""
    close = closest_names(feature, list(known))
    return ConfigError(
        f"feature '{feature}'", "a feature of the table", "none of that name", f"Closest: {close}. {remedy}"
    )


def refuse_deprecated(log: Sequence[Event], where: str, columns: Collection[str]) -> None:
    """Refuses to train on deprecated features.

    Args:
        where: Snapshot and table, in words.
        columns: That the training reads.
    Raises:
        ConfigError: Names them, since when and why they are deprecated, and what to read instead.
    """
    found = [event for event in newest_events(log).values() if event.state == "deprecated" and event.feature in columns]
    if found:
        raise ConfigError(
            f"features at {where}",
            "none that is deprecated",
            "; ".join(_in_words(log, event) for event in sorted(found, key=lambda event: event.feature)),
            "Read the alternatives, or set features.allow_deprecated=true.",
        )


def _in_words(log: Sequence[Event], event: Event) -> str:
    instead = ", ".join(f"'{name}'" for name in event.alternatives) or "nothing"
    reason = f", {event.reason}" if event.reason else ""
    return f"'{event.feature}', deprecated since {state_since(log, event.feature)}{reason}; instead: {instead}"
