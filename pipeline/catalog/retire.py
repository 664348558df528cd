"""Which features could be retired, why, and what that would save."""

import datetime
from collections.abc import Collection, Sequence

from pydantic import BaseModel

from pipeline.catalog.entries import Entry
from pipeline.catalog.usage import Usage

LEAST_COVERAGE = 0.01
LAST_RUNS = 3
"""Newest measured runs of a feature in which it has to be droppable to count as worth nothing."""


class RetireCandidate(BaseModel, frozen=True):
    """A feature that could be retired."""

    name: str
    state: str
    bytes: int
    reasons: tuple[str, ...]
    models: tuple[str, ...]


def find_candidates(
    found: Sequence[Entry], usage: Usage, roles: Collection[str], unused_days: int, now: datetime.datetime
) -> list[RetireCandidate]:
    """Features that nobody reads, that hold next to nothing or that no model gains from; the largest first.

    Features in state beta are left alone, for they are tried out, and so are columns that the config reads for
    something else. Without any run in the last `unused_days` nothing is called unused: nobody may have trained at all.

    Args:
        roles: Columns that the config reads for something else.
        now: UTC.
    """
    start = now - datetime.timedelta(days=unused_days)
    trained = any(run.at >= start for run in usage.runs)
    kept = [one for one in found if one.stored and one.state in ("experimental", "active") and one.name not in roles]
    proposed = []
    for entry in kept:
        reasons = [_unused(entry, start, unused_days) if trained else None, _empty(entry), _worthless(entry, usage)]
        if any(reasons):
            said = tuple(reason for reason in reasons if reason)
            proposed.append(
                RetireCandidate(
                    name=entry.name, state=entry.state, bytes=entry.bytes, reasons=said, models=entry.models
                )
            )
    return sorted(proposed, key=lambda one: (-one.bytes, one.name))


def _unused(entry: Entry, start: datetime.datetime, days: int) -> str | None:
    new = entry.since is not None and entry.since >= start.date()
    if entry.served or new or (entry.last_read is not None and entry.last_read >= start):
        return None
    last = "never read" if entry.last_read is None else f"last read on {entry.last_read.date()}"
    return f"no run of the last {days} days reads it: {last}"


def _empty(entry: Entry) -> str | None:
    if entry.coverage is None or entry.coverage >= LEAST_COVERAGE:
        return None
    return f"{entry.coverage:.2%} of the rows have a value"


def _worthless(entry: Entry, usage: Usage) -> str | None:
    runs = [run for run in usage.runs_of(entry.name) if entry.name in run.importance][:LAST_RUNS]
    importance = [run.importance[entry.name] for run in runs]
    if not importance or not all(worth.droppable for worth in importance):
        return None
    return f"NE rises by at most {max(worth.high for worth in importance):.5f} without it in {len(importance)} run(s)"
