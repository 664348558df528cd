"""Finds features that could be retired, why, and how many bytes that would save."""

import datetime
from collections.abc import Collection, Sequence

from pydantic import BaseModel

from pipeline.catalog.entries import Entry
from pipeline.catalog.usage import Usage

LEAST_COVERAGE = 0.01
LAST_RUNS = 3
"""A feature counts as useless if it was droppable in this many newest runs that measured it."""


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
    """Returns features that nobody reads, that are nearly empty, or that no model gains from; the largest first.

    Features in state beta are skipped because they are being tried out. Columns that the config reads for something
    else are skipped too. Without any run in the last `unused_days` no feature counts as unused: perhaps nobody trained.

    Args:
        roles: Columns that the config reads for something other than features.
        now: UTC.
    """
    start = now - datetime.timedelta(days=unused_days)
    trained = any(run.at >= start for run in usage.runs)
    eligible = [
        one for one in found if one.stored and one.state in ("experimental", "active") and one.name not in roles
    ]
    proposed = []
    for entry in eligible:
        reasons = [_unused(entry, start, unused_days) if trained else None, _empty(entry), _useless(entry, usage)]
        if any(reasons):
            reasons_found = tuple(reason for reason in reasons if reason)
            proposed.append(
                RetireCandidate(
                    name=entry.name, state=entry.state, bytes=entry.bytes, reasons=reasons_found, models=entry.models
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


def _useless(entry: Entry, usage: Usage) -> str | None:
    runs = [run for run in usage.runs_of(entry.name) if entry.name in run.importance][:LAST_RUNS]
    importance = [run.importance[entry.name] for run in runs]
    if not importance or not all(one.droppable for one in importance):
        return None
    return f"NE rises by at most {max(one.high for one in importance):.5f} without it in {len(importance)} run(s)"
