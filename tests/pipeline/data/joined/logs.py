"""Rows and logs of events, and what each row may know of them, by a loop."""

import datetime
from typing import Any

import numpy as np
import pyarrow as pa

START = datetime.datetime(2025, 3, 1, tzinfo=datetime.UTC)
DAYS = 3
USERS, SHOPS = 12, 3


def times_of(random: np.random.Generator, rows: int, step_seconds: int = 600) -> list[datetime.datetime]:
    """Times on a coarse grid: many are equal."""
    slots = DAYS * 86_400 // step_seconds
    return [START + datetime.timedelta(seconds=step_seconds * int(i)) for i in random.integers(0, slots, rows)]


def sample_rows(random: np.random.Generator, rows: int = 600) -> pa.Table:
    at = sorted(times_of(random, rows))
    return pa.table(
        {
            "day": pa.array([one.date() for one in at], pa.date32()),
            "row": np.arange(rows),
            "user": pa.array(random.integers(0, USERS + 2, rows), mask=random.random(rows) < 0.05),
            "shop": pa.array([f"s{i}" for i in random.integers(0, SHOPS, rows)]),
            "at": pa.array(at, pa.timestamp("us", "UTC"), mask=random.random(rows) < 0.05),
        }
    )


def events(random: np.random.Generator, rows: int = 900) -> pa.Table:
    """Events in no order, some without a user or a time."""
    return pa.table(
        {
            "user": pa.array(random.integers(0, USERS, rows), pa.int32(), mask=random.random(rows) < 0.05),
            "shop": pa.array([f"s{i}" for i in random.integers(0, SHOPS, rows)]),
            "time": pa.array(times_of(random, rows), pa.timestamp("ms", "UTC"), mask=random.random(rows) < 0.05),
            "item": pa.array(random.integers(0, 99, rows), pa.uint16(), mask=random.random(rows) < 0.1),
            "action": [["finish", "skip"][i] for i in random.integers(0, 2, rows)],
        }
    )


def cut(
    rows: pa.Table, log: pa.Table, on: list[str], delay: int, last: int | None = None, action: str | None = None
) -> list[Any]:
    """Items of each row, the newest first. Without `last`, the newest one until the time."""
    found, happened = [], log.to_pylist()
    for row in rows.to_pylist():
        known = []
        for number, event in enumerate(happened):
            keys = [(event[name], row[name]) for name in on]
            if event["time"] is None or row["at"] is None or any(a is None or a != b for a, b in keys):
                continue
            border = row["at"] - datetime.timedelta(seconds=delay)
            fits = event["time"] < border if last is not None else event["time"] <= border
            if fits and action in (None, event["action"]):
                known.append((event["time"], number, event["item"]))
        items = [item for _, _, item in sorted(known, reverse=True)]
        found.append(items[:last] if last is not None else items[0] if items else None)
    return found


def by_day(log: pa.Table) -> pa.Table:
    """Events with a time in table order: by day."""
    log = log.filter(log.column("time").is_valid())
    days = pa.array([time.date() for time in log.column("time").to_pylist()], pa.date32())
    return log.append_column("day", days).sort_by([("day", "ascending")])
