"""A bounded folder of entries that the processes of a machine share. The entries that were used last are kept."""

import fcntl
import hashlib
import os
import time
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple
from uuid import uuid4

from pipeline.preprocessing.cache.entries import (
    PREFIX_BYTES,
    CacheEntry,
    RowColumn,
    decode_header,
    encode,
    header_bytes,
)

COLUMNS = "cache"
"""Folder of the warehouse's home."""
LOCK = "lock"
"""File of the folder. It holds the bytes of all entries, and whoever changes them holds its lock."""
ENTRY, TEMPORARY = ".columns", ".tmp"
"""Endings of files: an entry, and one that is being written. Its writer holds the lock of the latter."""
KEPT_SHARE = 0.9
"""Share of the bound that an eviction leaves in use, so that not every write has to evict."""
LOCK_SECONDS = 30.0
"""Longest wait for another process that evicts."""
PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 60.0, 3_600.0
"""How long nothing is written after a write has failed. After each further failure, it is twice as long."""
TOTAL_DIGITS = 20


class CacheFile(NamedTuple):
    """A file of the folder. Files are ordered by their last use."""

    used_ns: int
    path: str
    size: int


class ColumnStore:
    """Keeps columns of row groups in files, up to a number of bytes over all processes.

    Each set of rows has a folder with a file for columns that were made together. A file is written under another name
    and renamed. Its header and each column have a checksum. Nothing here fails: a damaged entry is removed, and one
    that cannot be read or written is as good as none.

    Columns are read into memory and not mapped. They are copied once in either case, and a mapped file that a disk
    cannot read, or that somebody cuts off, would kill the process. The kernel keeps what was read last in memory, once
    for all processes.

    Args:
        folder: Shared by all processes of the machine.
        limit: Bytes of all files. If processes have different limits, the smallest one holds.
    Attributes:
        stats: Counts `bytes_read`, `bytes_written`, and entries that were `evicted`, `damaged` or `unwritten`.
    """

    def __init__(self, folder: Path, limit: int) -> None:
        self.folder, self.limit = folder, limit
        self.stats: Counter[str] = Counter()
        self._pause, self._resumes = 0.0, 0.0
        self._memory = bytearray()

    def load(self, rows: str, keys: Collection[str]) -> dict[str, RowColumn]:
        """Returns the columns that are there, by key. They are valid until the next call.

        Args:
            rows: Key of the rows.
            keys: Keys of the columns.
        """
        found: dict[str, RowColumn] = {}
        taken = 0
        for path in self._list_entries(rows):
            wanted = [key for key in keys if key not in found]
            if not wanted:
                break
            taken += self._read_file(path, wanted, taken, found)
        return found

    def save(self, rows: str, columns: Mapping[str, RowColumn]) -> None:
        """Writes columns of some rows as one entry, unless it is larger than the folder may be.

        Args:
            rows: Key of the rows.
            columns: By key.
        """
        if time.monotonic() < self._resumes:
            return
        entry = encode(columns)
        name = hashlib.sha256("\n".join(sorted(columns)).encode()).hexdigest()[:32]
        path = self.folder / rows / f"{name}{ENTRY}"
        try:
            if entry.size <= self.limit and not path.exists() and self._write(entry, path):
                self.stats["bytes_written"] += entry.size
                self._pause = 0.0
        except OSError:  # a full disk, a folder that is read only, a process that does not end its eviction
            self.stats["unwritten"] += 1
            self._pause = min(max(2 * self._pause, PAUSE_SECONDS), LONGEST_PAUSE_SECONDS)
            self._resumes = time.monotonic() + self._pause

    def take_stats(self) -> Counter[str]:
        """Returns what was counted since the last call."""
        taken, self.stats = self.stats, Counter()
        return taken

    # -- reading ------------------------------------------------------------------------------------------------

    def _list_entries(self, rows: str) -> list[str]:
        try:
            with os.scandir(self.folder / rows) as files:
                return sorted(one.path for one in files if one.name.endswith(ENTRY))
        except OSError:  # no entry yet
            return []

    def _read_file(self, path: str, keys: Collection[str], start: int, found: dict[str, RowColumn]) -> int:
        """Reads columns of a file into the memory from `start` on. Returns the bytes that they take there."""
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except FileNotFoundError:  # evicted
            return 0
        except OSError:
            self.stats["damaged"] += 1
            return 0
        try:
            return self._read_columns(descriptor, keys, start, found)
        except (OSError, ValueError):
            self.stats["damaged"] += 1
            with suppress(OSError):
                os.unlink(path)
            return 0
        finally:
            os.close(descriptor)

    def _read_columns(self, descriptor: int, keys: Collection[str], start: int, found: dict[str, RowColumn]) -> int:
        prefix = os.pread(descriptor, PREFIX_BYTES, 0)
        header = os.pread(descriptor, header_bytes(prefix), PREFIX_BYTES)
        entry = decode_header(prefix, header, os.fstat(descriptor).st_size)
        sizes = {key: entry.columns[key].count_bytes(entry.rows) for key in keys if key in entry.columns}
        if not sizes:
            return 0
        end = start + sum(sizes.values())
        if end > len(self._memory):  # columns that were read before keep the old memory
            self._memory = bytearray(max(end, 2 * len(self._memory)))
        memory, at, read = memoryview(self._memory), start, dict[str, RowColumn]()
        for key, size in sizes.items():
            note, content = entry.columns[key], memory[at : at + size]
            if size and os.preadv(descriptor, [content], PREFIX_BYTES + len(header) + note.begin) != size:
                raise ValueError("another size")
            read[key] = note.read(content, entry.rows)
            at += size
        with suppress(OSError):  # a folder that is read only
            os.utime(descriptor)
        found |= read
        self.stats["bytes_read"] += end - start
        return end - start

    # -- writing ------------------------------------------------------------------------------------------------

    def _write(self, entry: CacheEntry, path: Path) -> bool:
        """Writes an entry, unless others are writing too much. Returns whether it is there.

        Its bytes are counted before any of them is there, so those of a killed writer count, too.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.stem}.{uuid4().hex}{TEMPORARY}")
        try:
            with ExitStack() as opened:
                with _lock(self.folder) as ledger:
                    total = self._make_room(ledger.total, entry.size) + entry.size
                    if total > self.limit:
                        return False
                    ledger.note(total)
                    path.parent.mkdir(exist_ok=True)
                    file = opened.enter_context(temporary.open("xb"))
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    os.ftruncate(file.fileno(), entry.size)
                for part in entry.parts:
                    file.write(part)
                file.flush()
                with _lock(self.folder):  # who lists the files sees it under one name
                    os.replace(temporary, path)
        except OSError:
            _remove(f"{temporary}")
            raise
        return True

    def _make_room(self, total: int, size: int) -> int:
        """Evicts entries unless `size` more bytes fit. Returns the bytes that are left. The caller holds the lock."""
        if 0 <= total <= self.limit - size:
            return total
        files = sorted(list_files(self.folder))
        total = sum(file.size for file in files)
        if total + size <= self.limit:
            return total
        aim = max(int(KEPT_SHARE * self.limit) - size, 0)
        for file in files:
            if total <= aim:
                break
            if file.path.endswith(ENTRY):  # the writer of another one is still at it
                _remove(file.path)
                total -= file.size
                self.stats["evicted"] += 1
        return total


def list_files(folder: Path) -> Iterator[CacheFile]:
    """Yields the files of the cache. Removes those that killed writers have left. The caller holds the lock."""
    for rows in [one.path for one in os.scandir(folder) if one.is_dir(follow_symlinks=False)]:
        for one in list(os.scandir(rows)):
            if one.name.endswith(TEMPORARY) and _remove_dead(one.path):
                continue
            with suppress(FileNotFoundError):  # a reader has found it damaged
                status = one.stat(follow_symlinks=False)
                yield CacheFile(status.st_mtime_ns, one.path, status.st_size)
        with suppress(OSError):  # it is not empty
            os.rmdir(rows)


def remove_unused(folder: Path, before: float, dry_run: bool) -> list[CacheFile]:
    """Removes entries that nobody has used since a time. Returns them.

    Args:
        before: Seconds since 1970.
        dry_run: Only returns them.
    Raises:
        OSError: If another process keeps the lock.
    """
    if not folder.exists():
        return []
    with _lock(folder) as ledger:
        files = sorted(list_files(folder))
        old = [file for file in files if file.used_ns < 1e9 * before and file.path.endswith(ENTRY)]
        for file in () if dry_run else old:
            _remove(file.path)
        left = sum(file.size for file in files) - (0 if dry_run else sum(file.size for file in old))
        ledger.note(left)
    return old


@dataclass(frozen=True)
class _Ledger:
    """The number of bytes of all entries, while it is locked."""

    descriptor: int

    @property
    def total(self) -> int:
        """The bytes, -1 if they are not known."""
        noted = os.pread(self.descriptor, TOTAL_DIGITS, 0)
        return int(noted) if len(noted) == TOTAL_DIGITS and noted.isdigit() else -1

    def note(self, total: int) -> None:
        """Replaces the number."""
        os.pwrite(self.descriptor, b"%0*d" % (TOTAL_DIGITS, total), 0)


@contextmanager
def _lock(folder: Path) -> Iterator[_Ledger]:
    """Locks the folder against other writers.

    Raises:
        OSError: If another process keeps the lock.
    """
    descriptor = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        deadline = time.monotonic() + LOCK_SECONDS
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.001)
        yield _Ledger(descriptor)
    finally:
        os.close(descriptor)


def _remove(path: str) -> None:
    """Removes a file, and its folder if that was the last one there."""
    with suppress(FileNotFoundError):
        os.unlink(path)
    with suppress(OSError):
        os.rmdir(os.path.dirname(path))


def _remove_dead(path: str) -> bool:
    """Removes a temporary file unless its writer lives. Returns whether it is gone."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.unlink(path)
    except OSError:  # its writer holds the lock
        return False
    finally:
        os.close(descriptor)
    return True
