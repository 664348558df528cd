"""The catalog as a table for the terminal, one line a feature."""

from collections.abc import Mapping, Sequence

from pipeline.catalog.entries import Entry, FeatureDay
from pipeline.catalog.retire import RetireCandidate

NUMBERS = {"since", "cover", "length", "distinct", "drift", "size", "rows", "runs", "read", "importance"}
"""Columns that are aligned to the right."""


def feature_rows(entries: Sequence[Entry]) -> list[dict[str, str]]:
    """Returns the rows of the feature list."""
    return [
        {
            "feature": one.name,
            "kind": one.kind,
            "state": one.state if one.stored else f"{one.state}, no column",
            "since": f"{one.since or ''}",
            "cover": "" if one.coverage is None else f"{one.coverage:.1%}",
            "length": "" if one.mean_length is None else f"{one.mean_length:.1f}",
            "distinct": "" if one.distinct is None else f"{one.distinct:,}",
            "drift": "" if one.drift is None else f"{one.drift:.3f}",
            "size": format_bytes(one.bytes),
            "runs": f"{one.runs}",
            "read": "" if one.last_read is None else f"{one.last_read.date()}",
            "importance": "" if one.importance is None else f"{one.importance.ne_loss:.5f}",
            "models": shorten_names(one.models),
            "owner": one.owner or "",
        }
        for one in entries
    ]


def candidate_rows(candidates: Sequence[RetireCandidate]) -> list[dict[str, str]]:
    """Returns the rows of the retirement proposal."""
    return [
        {
            "feature": one.name,
            "state": one.state,
            "size": format_bytes(one.bytes),
            "why": "; ".join(one.reasons),
            "models": shorten_names(one.models),
        }
        for one in candidates
    ]


def day_rows(days: Sequence[FeatureDay]) -> list[dict[str, str]]:
    """Returns the statistics of a feature day by day."""
    return [
        {
            "day": f"{one.day}",
            "rows": f"{one.rows:,}",
            "cover": f"{one.present / one.rows:.1%}" if one.rows else "",
            "length": "" if one.mean_length is None else f"{one.mean_length:.1f}",
            "distinct": "" if one.distinct is None else f"{one.distinct:,}",
            "drift": "" if one.drift is None else f"{one.drift:.3f}",
        }
        for one in days
    ]


def format_table(rows: Sequence[Mapping[str, str]]) -> str:
    """Formats rows with equal keys as aligned lines, one column a key. Empty columns are left out.

    Example:
        >>> print(format_table([{"feature": "age", "size": "9 B"}, {"feature": "city", "size": "1.2 kB"}]))
        feature    size
        age         9 B
        city     1.2 kB
    """
    keys = [key for key in (rows[0] if rows else ()) if any(row[key] for row in rows)]
    widths = {key: max(len(key), *(len(row[key]) for row in rows)) for key in keys}
    lines = [{key: key for key in keys}, *rows]
    return "\n".join("  ".join(_align(key, line[key], widths[key]) for key in keys).rstrip() for line in lines)


def format_bytes(count: int) -> str:
    """Formats a number of bytes for people.

    Example:
        >>> format_bytes(999), format_bytes(1_500), format_bytes(12_340_000)
        ('999 B', '1.5 kB', '12.3 MB')
    """
    value, units = float(count), ["B", "kB", "MB", "GB", "TB"]
    while value >= 1_000 and len(units) > 1:
        value, units = value / 1_000, units[1:]
    return f"{count} B" if units[0] == "B" else f"{value:,.1f} {units[0]}"


def shorten_names(names: Sequence[str]) -> str:
    """Shortens names to those with an alias, else the last one, and the number of the others."""
    ordered = [name for name in names if name.endswith(")")] or list(names[-1:])
    more = len(names) - len(ordered)
    return ", ".join(ordered) + (f" and {more} more" if more else "")


def _align(key: str, text: str, width: int) -> str:
    return text.rjust(width) if key in NUMBERS else text.ljust(width)
