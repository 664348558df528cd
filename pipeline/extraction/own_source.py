"""A table remembers the source of its rows: those of another source do not enter it unasked."""

import glob
import json
import os
import re
from pathlib import Path

from pipeline.errors import DataError
from pipeline.extraction.opening import SourceContext
from storage.objects import is_address

SOURCES = "dlrm.sources"
"""Property of a table: a JSON list of the patterns that its rows came from."""
GENERATED = "the generator"
_DATE = re.compile(r"\d{4}([-_/]?)(0\d|1[0-2])(\1([0-2]\d|3[01]))?(?!\d)")
"""Dates and months in a path. Files of other days are of the same source."""


def patterns_of(context: SourceContext) -> list[str]:
    """Returns the absolute patterns of a source's files."""
    source = context.source
    if source.path is None:
        return [GENERATED]
    given = [source.path] if isinstance(source.path, str) else list(source.path)
    found = [text if is_address(text) else os.path.abspath(context.root / Path(text).expanduser()) for text in given]
    return sorted({GENERATED if text.startswith(f"{context.logs}/") else text for text in found})


def remembered(context: SourceContext) -> list[str]:
    """Returns the patterns that the table remembers. Empty: there is no table, or nobody has noted any."""
    if not context.warehouse.has_table(context.table):
        return []
    found: list[str] = json.loads(context.warehouse.table(context.table).properties.get(SOURCES, "[]"))
    return found


def find_strangers(context: SourceContext) -> list[str]:
    """Returns the patterns of a source that the table does not know. Empty if it remembers none at all."""
    known = remembered(context)
    return [one for one in patterns_of(context) if known and not any(_same(one, other) for other in known)]


def refuse_strangers(context: SourceContext) -> None:
    """Refuses a source that is not the table's.

    Raises:
        DataError: Names both, and how to go on.
    """
    if strangers := find_strangers(context):
        raise DataError(
            f"table '{context.table}'", f"rows of its own source, {', '.join(remembered(context))}",
            ", ".join(strangers),
            "Give these rows a table of their own: name=NAME; or let them into this one: ingest.other_sources=true.",
        )  # fmt: skip


def remember(context: SourceContext) -> None:
    """Notes the source at its table, if that is new."""
    known = remembered(context)
    if new := [one for one in patterns_of(context) if one not in known]:
        context.warehouse.set_properties(context.table, {SOURCES: json.dumps([*known, *new])})


def _same(one: str, other: str) -> bool:
    """Whether two patterns are equal apart from dates, or one of them covers the other.

    Example:
        >>> _same("/logs/2025-01-08.csv", "/logs/2025-01-07.csv"), _same("/logs/*.csv", "/logs/2025-01-07.csv")
        (True, True)
        >>> _same("/logs/b.csv", "/logs/a.csv"), _same("/logs/x/a.csv", "/logs/*.csv")
        (False, False)
    """
    one, other = _DATE.sub("DATE", one), _DATE.sub("DATE", other)
    return one == other or _covers(one, other) or _covers(other, one)


def _covers(pattern: str, path: str) -> bool:
    """Whether a glob matches a path, each folder by itself."""
    if not glob.has_magic(pattern):
        return False
    parts = [".*" if part == "**" else _translate(part) for part in pattern.split("/")]
    return re.fullmatch("/".join(parts).replace(".*/", "(.*/)?"), path) is not None


def _translate(part: str) -> str:
    found = re.split(r"(\*|\?|\[[^\]]+\])", part)
    return "".join(
        {"*": "[^/]*", "?": "[^/]"}.get(one, one if one.startswith("[") else re.escape(one)) for one in found
    )
