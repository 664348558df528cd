"""What is known of the files of a feature source: their columns and days. Only new files are opened to learn it."""

import base64
import datetime
from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa

from pipeline.data.cache_file import UNREADABLE, read_cache, write_cache
from pipeline.data.formats.files import Stamp, fingerprint

FAMILY = "features"
VERSION = 1
"""Changes with how columns and days are read."""
_memory: dict[Path, dict[str, "KnownFile"]] = {}


class KnownFile(NamedTuple):
    """A file as it was at its stamp."""

    stamp: Stamp
    schema: pa.Schema
    days: tuple[datetime.date, ...] | None
    """Those of its rows. None: they were not asked for."""


class KnownFiles:
    """The Parquet files of a source, remembered in a file of the home and in the process.

    Args:
        home: Of the warehouse.
        where: Tells the source from others in the same folder.
        day_column: Column with the days. Another column makes other days.
    Attributes:
        files: Path -> what is known, in the order of the files.
    """

    def __init__(
        self, home: Path, where: str, files: Sequence[str], stamps: Sequence[Stamp], day_column: str | None
    ) -> None:
        source = [VERSION, pa.__version__, where, min(path.rpartition("/")[0] for path in files), day_column]
        self.path = home / "inventory" / f"{FAMILY}-{fingerprint(source)}.json.gz"
        self.stamps = dict(zip(files, stamps, strict=True))
        known = _memory.get(self.path, {})
        if any(not self._is_known(path, known) for path in files):
            known = _read(self.path)
        self.files = {path: known[path] for path in files if self._is_known(path, known)}
        self._others = {path: one for path, one in known.items() if path not in self.stamps}

    def _is_known(self, path: str, known: Mapping[str, KnownFile]) -> bool:
        return path in known and known[path].stamp == tuple(self.stamps[path])

    def add_schemas(self, found: Mapping[str, pa.Schema]) -> list[pa.Schema]:
        """Adds the schemas of all new files. Returns each that files have, once, in the order of the files."""
        new = {path: KnownFile(self.stamps[path], one.remove_metadata(), None) for path, one in found.items()}
        self.files = {path: new[path] if path in new else self.files[path] for path in self.stamps}
        self._remember(found)
        return list({_text(one.schema): one.schema for one in self.files.values()}.values())

    def add_days(self, found: Mapping[str, tuple[datetime.date, ...]]) -> dict[str, tuple[datetime.date, ...]]:
        """Adds the days of all files that lacked them. Returns those of each file."""
        self.files |= {path: self.files[path]._replace(days=days) for path, days in found.items()}
        self._remember(found)
        return {path: one.days or () for path, one in self.files.items()}

    def _remember(self, new: Collection[str]) -> None:
        if new:
            others = self._others if len(self._others) <= len(self.files) else {}  # else most are gone
            _memory[self.path] = known = {**others, **self.files}
            _write(self.path, known)


def _read(path: Path) -> dict[str, KnownFile]:
    try:
        found = read_cache(path)
        schemas = [pa.ipc.read_schema(pa.py_buffer(base64.b64decode(one))) for one in found["schemas"]]
        return {
            path: KnownFile((name, size, changed), schemas[number], None if days is None else tuple(map(_day, days)))
            for path, ((name, size, changed), number, days) in found["files"].items()
        }
    except (*UNREADABLE, pa.ArrowException):
        return {}


_day = datetime.date.fromisoformat


@lru_cache
def _text(schema: pa.Schema) -> str:
    return base64.b64encode(schema.serialize()).decode()


def _write(path: Path, known: Mapping[str, KnownFile]) -> None:
    numbers: dict[str, int] = {}
    files = {}
    for name, one in known.items():
        days = None if one.days is None else [f"{day}" for day in one.days]
        files[name] = one.stamp, numbers.setdefault(_text(one.schema), len(numbers)), days
    write_cache(path, {"schemas": list(numbers), "files": files}, FAMILY)
