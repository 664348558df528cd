"""What is known of the files of a feature source: their columns and days. Only new files are opened to learn it."""

import base64
import datetime
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa

from pipeline.data.cache_file import UNREADABLE, read_cache, write_cache
from pipeline.data.formats.files import Stamp, fingerprint

FAMILY = "features"
_memory: dict[Path, dict[str, "KnownFile"]] = {}


class KnownFile(NamedTuple):
    """A file as it was at its stamp."""

    stamp: Stamp
    schema: pa.Schema
    days: tuple[datetime.date, ...] | None
    """Those of its rows. None: they were not asked for."""


class KnownFiles:
    """The files of a source, remembered in a file of the home and in the process.

    Args:
        home: Of the warehouse.
        day_column: Column with the days. Another column makes other days.
    Attributes:
        files: Path -> what is known.
    """

    def __init__(self, home: Path, files: Sequence[str], stamps: Sequence[Stamp], day_column: str | None) -> None:
        folders = {path.rpartition("/")[0] for path in files}
        source = [os.path.commonpath(folders), day_column]
        self.path = home / "inventory" / f"{FAMILY}-{fingerprint(source)}.json.gz"
        self.stamps = dict(zip(files, stamps, strict=True))
        known = _memory.get(self.path, {})
        if any(not self._is_known(path, known) for path in files):
            known = _read(self.path)
        self.files = {path: known[path] for path in files if self._is_known(path, known)}
        self._others = {path: one for path, one in known.items() if path not in self.stamps}

    def _is_known(self, path: str, known: Mapping[str, KnownFile]) -> bool:
        return path in known and known[path].stamp == tuple(self.stamps[path])

    def learn_schemas(self, learn: Callable[[str], pa.Schema]) -> list[pa.Schema]:
        """Returns each schema that files have, once.

        Args:
            learn: Opens a file.
        """
        new = [path for path in self.stamps if path not in self.files]
        for path in new:
            self.files[path] = KnownFile(self.stamps[path], learn(path).remove_metadata(), None)
        self._remember(new)
        return list({_text(one.schema): one.schema for one in self.files.values()}.values())

    def learn_days(self, learn: Callable[[str], Iterable[datetime.date]]) -> dict[datetime.date, list[str]]:
        """Returns day -> the files with rows of it, in their order, once their schemas are known.

        Args:
            learn: Reads the days of a file.
        """
        new = [path for path, one in self.files.items() if one.days is None]
        for path in new:
            self.files[path] = self.files[path]._replace(days=tuple(sorted(learn(path))))
        self._remember(new)
        found: dict[datetime.date, list[str]] = {}
        for path in self.stamps:
            for day in self.files[path].days or ():
                found.setdefault(day, []).append(path)
        return dict(sorted(found.items()))

    def _remember(self, new: Sequence[str]) -> None:
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
