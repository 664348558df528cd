"""Sorts a feature source by key and time into files, which the processes of a machine map into memory.

The source may be larger than memory: DuckDB sorts it and spills to disk. After one more day only that day is sorted,
and merged with the files of before. A process that reads histories holds no log of its own; pages of the files that it
needs are in the system's cache, once for all processes.
"""

import json
import os
import shutil
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from filelock import FileLock
from isal.isal_zlib import crc32

from pipeline.data.joined.index import KeyIndex, TimedIndex, hash_keys, present
from pipeline.data.joined.merging import SortedRows, may_merge, merge
from pipeline.data.joined.source import SourceRows
from pipeline.errors import DataError, StorageError
from pipeline.processes.code import hash_code
from storage.arrow import is_list, is_text
from storage.artifacts import write_text
from storage.query import connect, stream
from storage.scratch import ScratchFolder

MANIFEST = "sorted.json"
CHECKED = "checked.json"
"""Sizes and times of the files when their checksums were compared."""
CHECKED_SECONDS = 3_600
"""Checksums are compared again after so long, when a process opens the files."""
CHECKED_AT_ONCE = 1 << 24
CODE = hash_code(("pipeline/data", "pipeline/transforms", "storage"), ("duckdb", "numba", "numpy", "pyarrow"))
"""Version of the code that makes the files. It belongs into the names of their folders."""
MEMORY = "25%"
"""Memory of DuckDB while it sorts, of the machine's."""
UNUSED_SECONDS = 7 * 86_400
"""Sorted files that no process has opened for so long are deleted when others are made."""
REPLACED_SECONDS = 86_400
"""The same, where others of the same source were made since."""
BATCH_ROWS = 1 << 20
PACKED_AT_ONCE = 1 << 26
"""Bits that are packed at once. A multiple of 8."""
HASH, TIME, PART, PLACE, STARTS = "hash", "time", "part", "place", "starts"


class SortedLayout(NamedTuple):
    """What sorted files hold."""

    keys: list[pa.DataType]
    values: list[pa.DataType]
    unique: bool
    """Whether a key may have each time only once."""

    @property
    def columns(self) -> dict[str, pa.DataType]:
        """Name of a column's files -> its type, keys first."""
        keys = {f"key{i}": kind for i, kind in enumerate(self.keys)}
        return keys | {f"value{i}": kind for i, kind in enumerate(self.values)}


Rows = Callable[[Collection[str]], Iterator[tuple[str, SourceRows]]]
"""Yields the rows of some parts of a source in their order, with the name of the part."""


def open_sorted(rows: Rows, parts: Mapping[str, str], layout: SortedLayout, folder: Path, where: str) -> TimedIndex:
    """Maps sorted files. The first process to need them makes them from the rows, and others wait for it.

    Where files beside the folder have most of their rows from these parts, only the others are sorted, then merged.

    Args:
        parts: Those of the source in their order: name -> a hash that changes with its rows.
        folder: Of these parts in this layout alone. Folders beside it are of the same source in the same layout.
        where: The source as an error names it.
    Raises:
        DataError: If a key that must not has a time twice.
        StorageError: If the rows cannot be sorted, or the files are not as they were made.
    """
    if not (folder / MANIFEST).exists():
        root = folder.parents[1]
        root.mkdir(parents=True, exist_ok=True)
        with FileLock(root / "lock"):  # of all sources: a sort takes a quarter of the memory
            if not (folder / MANIFEST).exists():
                start = find_start(folder, parts)
                if start.known is not None:
                    with suppress(OSError):  # another user's
                        os.utime(start.known / MANIFEST)
                _remove_unused(folder, UNUSED_SECONDS)
                with ScratchFolder("making-", root) as partial:
                    made = _make(rows, parts, layout, start, Path(partial), where)
                    shutil.rmtree(folder, ignore_errors=True)  # without a manifest: a rest
                    folder.parent.mkdir(exist_ok=True)
                    made.rename(folder)
                _remove_unused(folder, REPLACED_SECONDS)
    with suppress(PermissionError):  # another user's
        os.utime(folder / MANIFEST)  # it is in use
    return _map(folder, layout).timed


class SortingStart(NamedTuple):
    """Where sorting begins."""

    known: Path | None
    """Folder of sorted files to merge with."""
    parts: list[str]
    """Its parts."""
    new: list[str]
    """The parts to sort."""


def find_start(folder: Path, parts: Mapping[str, str]) -> SortingStart:
    """Finds the sorted files beside a folder that have the most rows of the parts, if these are most of their rows."""
    found, most = SortingStart(None, [], list(parts)), 0
    for manifest in folder.parent.glob(f"*/{MANIFEST}"):
        with suppress(OSError, StorageError):  # damaged: its rows are sorted again
            facts = _read_manifest(manifest.parent)
            kept = {name: rows for name, (content, rows) in facts["parts"].items() if parts.get(name) == content}
            if sum(kept.values()) > max(most, facts["rows"] // 2):
                new, most = [name for name in parts if name not in kept], sum(kept.values())
                found = SortingStart(manifest.parent, list(facts["parts"]), new)
    return found


def _make(
    rows: Rows, parts: Mapping[str, str], layout: SortedLayout, start: SortingStart, partial: Path, where: str
) -> Path:
    """Writes the files of a source's rows, and returns their folder."""
    made, known = partial / "sorted", None
    if start.known is not None:
        with suppress(OSError, StorageError):  # damaged
            known = _map(start.known, layout)
    if known is not None:
        _sort(rows, start.new, parts, layout, partial / "new", where)
        others, new = _map(partial / "new", layout), set(start.new)
        if may_merge(known, others):
            places = {name: place for place, name in enumerate(parts) if name not in new}
            numbers = np.array([places.get(name, -1) for name in start.parts], np.int64)
            with _Files(made, parts, layout, where) as files:
                for batch in merge(known, numbers, others, _schema(layout, PART), BATCH_ROWS):
                    files.add(batch)
            return made
    _sort(rows, list(parts), parts, layout, made, where)
    return made


def _schema(layout: SortedLayout, *numbers: str) -> pa.Schema:
    kinds = {HASH: pa.uint64(), TIME: pa.int64(), PART: pa.uint32(), PLACE: pa.int64()}
    return pa.schema({HASH: kinds[HASH], TIME: kinds[TIME]} | {name: kinds[name] for name in numbers} | layout.columns)


def _sort(
    rows: Rows, wanted: Collection[str], parts: Mapping[str, str], layout: SortedLayout, made: Path, where: str
) -> None:
    """Writes the files of the rows of some parts."""
    import duckdb  # imported here because processes that only map the files need no DuckDB

    schema, numbers = _schema(layout, PART, PLACE), {name: number for number, name in enumerate(parts)}
    failed: list[Exception] = []

    def batches() -> Iterator[pa.RecordBatch]:
        try:
            place = 0
            for name, part in rows(wanted):
                yield _numbered(part, numbers[name], place, schema)
                place += len(part.keys[0])
        except Exception as error:  # DuckDB would only repeat its text
            failed.append(error)
            raise

    keys = list(layout.columns)[: len(layout.keys)]
    selected, order = ", ".join([HASH, TIME, PART, *layout.columns]), ", ".join([HASH, *keys, TIME, PLACE])
    query = f"SELECT {selected} FROM events ORDER BY {order}"
    with connect([], made.parent / "spill", MEMORY, len(os.sched_getaffinity(0))) as connection:
        connection.register("events", pa.RecordBatchReader.from_batches(schema, batches()))
        try:
            with _Files(made, parts, layout, where) as files:
                for batch in stream(connection.sql(query), rows=BATCH_ROWS)[1]:
                    files.add(batch)
        except duckdb.Error as error:
            if failed:
                raise failed[0] from None
            reason = f"{error}".split("\n")[0].rstrip(".")
            remedy = f"Repair them, or make room in memory and below {made.parent.parent}."
            raise StorageError(where, "rows that DuckDB can sort", reason, remedy) from error


def _numbered(rows: SourceRows, part: int, place: int, schema: pa.Schema) -> pa.RecordBatch:
    """Returns the rows that have a key and a time: others are never found."""
    assert rows.times is not None
    count = len(rows.times)
    numbers = [np.full(count, part, np.uint32), np.arange(place, place + count)]
    columns = [pa.array(hash_keys(rows.keys)), rows.times, *map(pa.array, numbers)]
    batch = pa.RecordBatch.from_arrays([*columns, *rows.keys, *rows.values], schema=schema)
    kept = present([*rows.keys, rows.times])
    return batch if pc.all(kept).as_py() else batch.filter(kept)


class _Files:
    """Files of sorted rows, written from start to end.

    Args:
        parts: As in `open_sorted`.
        where: The source as an error names it.
    """

    def __init__(self, folder: Path, parts: Mapping[str, str], layout: SortedLayout, where: str) -> None:
        folder.mkdir()
        self.folder, self.where, self.unique = folder, where, layout.unique
        self.parts, self.of_parts = parts, np.zeros(len(parts), np.int64)
        self.keys = list(layout.columns)[: len(layout.keys)]
        self.columns = {name: _Column(folder / name, kind) for name, kind in layout.columns.items()}
        numbers = {HASH: pa.uint64(), TIME: pa.int64(), PART: pa.uint32(), STARTS: pa.int64()}
        self.numbers = {name: _Column(folder / name, kind) for name, kind in numbers.items()}
        self.rows = self.distinct = self.equal = 0
        self.last: pa.RecordBatch | None = None

    def add(self, batch: pa.RecordBatch) -> None:
        """Appends rows. They come after those that are there."""
        if not batch.num_rows:
            return
        own = batch.select([HASH, TIME, *self.keys])
        begins = self._begins(own if self.last is None else pa.concat_batches([self.last, own]))
        places = np.flatnonzero(begins if self.last is None else begins[1:])
        first = own.take(pa.array(places))
        self.last = own.slice(len(own) - 1)
        self.numbers[HASH].append(first.column(HASH))
        for name, column in self.columns.items():
            column.append((first if name in self.keys else batch).column(name))
        self.numbers[TIME].append(batch.column(TIME))
        self.numbers[PART].append(batch.column(PART))
        self.of_parts += np.bincount(batch.column(PART).to_numpy(), minlength=len(self.parts))
        self.numbers[STARTS].append(pa.array(places + self.rows))
        self.rows += len(batch)
        self.distinct += len(places)

    def _begins(self, rows: pa.RecordBatch) -> npt.NDArray[np.bool_]:
        """Tells of each row whether it has another key than the one before. The first one has."""
        hashes, times = (rows.column(name).to_numpy() for name in (HASH, TIME))
        other = np.ones(len(rows), bool)
        equal = hashes[1:] == hashes[:-1]
        same = equal.copy()
        for name in self.keys:
            keys = rows.column(name)
            same &= pc.equal(keys[1:], keys[:-1]).to_numpy(zero_copy_only=False)
        other[1:] = ~same
        self.equal += int((equal & ~same).sum())
        if self.unique:
            for row in np.flatnonzero(same & (times[1:] == times[:-1]))[:1]:
                key = ", ".join(f"{rows.column(name)[int(row)].as_py()}" for name in self.keys)
                found = f"key {key} more than once at {pa.scalar(int(times[row])).cast(pa.timestamp('us')).as_py()}"
                raise DataError(self.where, "each key once in each microsecond", found, "Remove duplicates.")
        return other

    def __enter__(self) -> "_Files":
        return self

    def __exit__(self, kind: object, *error: object) -> None:
        self.numbers[STARTS].append(pa.array([self.rows]))
        for column in [*self.columns.values(), *self.numbers.values()]:
            column.close()
        if kind is None:
            files = {path.name: (path.stat().st_size, _checksum(path)) for path in sorted(self.folder.iterdir())}
            # Keys with equal hashes follow each other. This bounds how many a look-up may meet.
            facts = {"rows": self.rows, "distinct": self.distinct, "most": self.equal + 1, "files": files}
            counts = zip(self.parts.items(), self.of_parts.tolist(), strict=True)
            facts["parts"] = {name: (content, rows) for (name, content), rows in counts}
            content = json.dumps(facts).encode()
            with (self.folder / MANIFEST).open("wb") as file:
                file.write(b"%08x\n" % crc32(content) + content)
                _keep(file)


class _Column:
    """Files of one column: its values or their ends, and nulls if it has them."""

    def __init__(self, path: Path, kind: pa.DataType) -> None:
        self.path, self.kind, self.nulls, self.end = path, kind, 0, 0
        self.items = _Column(_part(path, "items"), kind.value_type) if is_list(kind) else None
        parts = ["data", "valid"] if not is_list(kind) else ["valid"]
        self.files = {part: _part(path, part).open("wb") for part in parts}
        if self.items is not None or is_text(kind):
            self.files["ends"] = _part(path, "ends").open("wb")
            self.files["ends"].write(bytes(8))

    def append(self, array: pa.Array) -> None:
        self.nulls += array.null_count
        self.files["valid"].write(array.is_valid().cast(pa.uint8()).to_numpy().tobytes())
        if "ends" not in self.files:
            self.files["data"].write(_plain(array).tobytes())
            return
        length = pc.list_value_length(array) if self.items is not None else pc.binary_length(array)
        ends = np.cumsum(pc.fill_null(length, 0).to_numpy().astype(np.int64)) + self.end
        self.files["ends"].write(ends.tobytes())
        self.end = int(ends[-1]) if len(ends) else self.end
        if self.items is not None:
            self.items.append(array.flatten())  # without nulls
        else:
            self.files["data"].write(_bytes(array))

    def close(self) -> None:
        for file in self.files.values():
            _keep(file)
            file.close()
        if self.items is not None:
            self.items.close()
        if pa.types.is_boolean(self.kind):
            _pack(_part(self.path, "data"))
        if self.nulls:
            _pack(_part(self.path, "valid"))
        else:
            _part(self.path, "valid").unlink()


def _bytes(array: pa.Array) -> memoryview:
    """Returns the bytes of texts one after the other, nulls as empty texts."""
    filled = pc.fill_null(array.cast(pa.large_string()), "")
    _, offsets, data = filled.buffers()
    ends = np.frombuffer(offsets, np.int64) if offsets is not None and offsets.size else np.zeros(1, np.int64)
    begin, end = int(ends[filled.offset]), int(ends[filled.offset + len(filled)])
    return memoryview(data if data is not None else b"")[begin:end]


def _plain(array: pa.Array) -> npt.NDArray[np.generic]:
    """Returns the values as numbers of the same width, those of booleans in 8 bits. Nulls are 0."""
    kind = array.type
    if pa.types.is_boolean(kind):
        array = array.cast(pa.uint8())
    elif pa.types.is_date32(kind):
        array = array.cast(pa.int32())
    elif pa.types.is_timestamp(kind):
        array = array.cast(pa.int64())
    filled: npt.NDArray[np.generic] = pc.fill_null(array, pa.scalar(0, array.type)).to_numpy(zero_copy_only=False)
    return filled


def _pack(path: Path) -> None:
    """Replaces a file of bytes by one of bits."""
    values = np.memmap(path, np.uint8, "r") if path.stat().st_size else np.zeros(0, np.uint8)
    packed = path.with_suffix(".packed")
    with packed.open("wb") as file:
        for begin in range(0, len(values), PACKED_AT_ONCE):
            file.write(np.packbits(values[begin : begin + PACKED_AT_ONCE], bitorder="little").tobytes())
        _keep(file)
    packed.rename(path)


def _part(path: Path, part: str) -> Path:
    return path.with_name(f"{path.name}.{part}")


def _keep(file: BinaryIO) -> None:
    """Waits until the disk has the file."""
    file.flush()
    os.fsync(file.fileno())


def _map(folder: Path, layout: SortedLayout) -> SortedRows:
    """Returns the rows in the files of a folder."""
    facts = _read_manifest(folder)
    _check_files(folder, facts["files"])
    keys = len(layout.keys)
    counts = [facts["distinct"]] * keys + [facts["rows"]] * len(layout.values)
    columns = [
        _open(folder / name, kind, count) for (name, kind), count in zip(layout.columns.items(), counts, strict=True)
    ]
    of_keys, times, starts, parts = (_buffer(_part(folder / name, "data")) for name in (HASH, TIME, STARTS, PART))
    hashes = np.frombuffer(of_keys, np.uint64)
    if len(hashes) and hash_keys([column[:1] for column in columns[:keys]])[0] != hashes[0]:
        raise _damaged(folder, f"{HASH}.data", "the hashes that keys have now", "others")
    index = KeyIndex.of_sorted(hashes, columns[:keys], facts["most"])
    of_times, firsts = (np.frombuffer(one, np.int64) for one in (times, starts))
    return SortedRows(TimedIndex(index, of_times, firsts, columns[keys:]), np.frombuffer(parts, np.uint32))


def _read_manifest(folder: Path) -> Any:
    checksum, _, content = (folder / MANIFEST).read_bytes().partition(b"\n")
    if checksum != b"%08x" % crc32(content):
        raise _damaged(folder, MANIFEST, "what was written", "other content")
    return json.loads(content)


def _check_files(folder: Path, files: Mapping[str, tuple[int, int]]) -> None:
    """Compares sizes, and checksums unless a process did so shortly before and no file has changed since."""
    stamps = {}
    for name, (size, _) in files.items():
        status = (folder / name).stat() if (folder / name).exists() else None
        if status is None or status.st_size != size:
            raise _damaged(folder, name, f"{size} bytes", "no file" if status is None else f"{status.st_size}")
        stamps[name] = [status.st_size, status.st_mtime_ns, status.st_ctime_ns]
    note, content = folder / CHECKED, json.dumps(stamps)
    with suppress(OSError):
        if time.time() - note.stat().st_mtime < CHECKED_SECONDS and note.read_bytes() == content.encode():
            return
    for name, (_, checksum) in files.items():
        if (found := _checksum(folder / name)) != checksum:
            raise _damaged(folder, name, f"checksum {checksum:08x}", f"{found:08x}")
    with suppress(OSError):  # another user's folder, or a full disk: the next process compares, too
        write_text(note, content)


def _checksum(path: Path) -> int:
    found = 0
    with path.open("rb") as file:
        while part := file.read(CHECKED_AT_ONCE):
            found = crc32(part, found)
    return found


def _damaged(folder: Path, name: str, expected: str, actual: str) -> StorageError:
    return StorageError(f"{folder / name}", expected, actual, f"Delete {folder}. It is made anew.")


def _open(path: Path, kind: pa.DataType, count: int) -> pa.Array:
    valid = _buffer(_part(path, "valid")) if _part(path, "valid").exists() else None
    ends = [_buffer(_part(path, "ends"))] if is_list(kind) or is_text(kind) else []
    if is_list(kind):
        items = _open(_part(path, "items"), kind.value_type, int(np.frombuffer(ends[0], np.int64)[-1]))
        return pa.Array.from_buffers(kind, count, [valid, *ends], children=[items])
    return pa.Array.from_buffers(kind, count, [valid, *ends, _buffer(_part(path, "data"))])


def _buffer(path: Path) -> pa.Buffer:
    if not path.stat().st_size:  # nothing to map
        return pa.py_buffer(b"")
    with pa.memory_map(str(path)) as file:
        return file.read_buffer()


def _remove_unused(folder: Path, seconds: float) -> None:
    """Deletes what no process has opened for long. Processes that still map it keep it until they end.

    Args:
        folder: Of a source. Those of other sources are looked at, too.
        seconds: How long those of this source may be unused. Those of others may be for UNUSED_SECONDS.
    """
    root = folder.parents[1]
    for manifest in [*root.glob(f"*/*/{MANIFEST}"), *root.glob(f"*/{MANIFEST}")]:  # of earlier versions
        with suppress(OSError):  # another user's
            own = manifest.parent.parent == folder.parent
            if time.time() - manifest.stat().st_mtime > (seconds if own else UNUSED_SECONDS):
                manifest.unlink()  # first, so that no process takes the rest for whole
                shutil.rmtree(manifest.parent, ignore_errors=True)
                manifest.parent.parent.rmdir()  # fails if it has others
