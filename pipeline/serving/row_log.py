"""The log of scored rows: Parquet files, written by a thread. A slow or full disk drops rows and delays no answer."""

import datetime
import logging
import os
import queue
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.serving.bodies import PROBABILITY, Scores
from pipeline.serving.config import ServedVersion

WAITING_BYTES = 64 << 20
"""Rows that wait for the disk. Further ones are dropped."""
FILE_ROWS, FILE_SECONDS = 50_000, 30.0
"""A file is written when it has so many rows, or is so old."""
VERSION, TIME = "model_version", "time"
log = logging.getLogger("dlrm")


class RowLog:
    """Writes scored rows to files of one folder, which are complete when they have their name.

    Args:
        folder: Is created.
        limit: Bytes of the folder's files at which rows are dropped, until files are removed.
        count: Called with (rows written, rows dropped).
        waiting: Bytes of rows that may wait.
    """

    def __init__(
        self, folder: Path, limit: int, count: Callable[[int, int], None], waiting: int = WAITING_BYTES
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)  # a folder that cannot be is said at once
        self.folder, self.limit, self.count, self.waiting = folder, limit, count, waiting
        self._lock, self._held = threading.Lock(), 0
        self._rows: queue.SimpleQueue[tuple[ServedVersion, pa.Table, int] | None] = queue.SimpleQueue()
        self._failing = False
        self._files = 0
        self._thread = threading.Thread(target=self._work, name="row-log", daemon=True)
        self._thread.start()

    def add(self, version: ServedVersion, rows: pa.Table, scores: Scores) -> None:
        """Hands rows to the thread, or drops them if too many wait. Never waits."""
        size = rows.nbytes
        with self._lock:
            taken = self._held + size <= self.waiting
            self._held += size if taken else 0
        if not taken:
            self.count(0, rows.num_rows)
            return
        now = datetime.datetime.now(datetime.UTC).replace(tzinfo=None)
        times = pa.repeat(pa.scalar(now, pa.timestamp("us")), rows.num_rows)
        versions = pa.repeat(pa.scalar(version.version, pa.int64()), rows.num_rows)
        for name, values in ((PROBABILITY, pa.array(scores)), (VERSION, versions), (TIME, times)):
            if name not in rows.column_names:  # the model's own column of that name stays
                rows = rows.append_column(name, values)
        self._rows.put((version, rows, size))

    def close(self) -> None:
        """Writes what waits and ends the thread."""
        self._rows.put(None)
        self._thread.join()

    def _work(self) -> None:
        parts: list[pa.Table] = []
        size = 0
        began, of, running = time.monotonic(), None, True
        while running:
            left = FILE_SECONDS - (time.monotonic() - began) if parts else None
            try:
                item = self._rows.get(timeout=None if left is None else max(left, 0.0))
            except queue.Empty:
                item, due = None, True
            else:
                due, running = item is None, item is not None
            if parts and (due or (item is not None and item[0] != of)):  # versions may read different columns
                self._write(parts, size)
                parts, size = [], 0
            if item is not None:
                if not parts:
                    began = time.monotonic()
                of = item[0]
                parts.append(item[1])
                size += item[2]
                if sum(part.num_rows for part in parts) >= FILE_ROWS:
                    self._write(parts, size)
                    parts, size = [], 0

    def _write(self, parts: list[pa.Table], size: int) -> None:
        count, problem = sum(part.num_rows for part in parts), None
        try:
            if self._count_bytes() >= self.limit:
                problem = f"it has {self.limit:,} bytes, its limit"
            else:
                self._write_file(pa.concat_tables(parts, promote_options="default"))  # /rank has another order
        except Exception as error:  # the next rows may be written again
            problem = getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"
        if problem is not None and not self._failing:
            log.warning("log %s: %s: further rows are dropped until that changes", self.folder, problem)
        elif problem is None and self._failing:
            log.warning("log %s: rows are written again", self.folder)
        self._failing = problem is not None
        with self._lock:
            self._held -= size
        self.count(0 if problem else count, count if problem else 0)

    def _count_bytes(self) -> int:
        size = 0
        for file in self.folder.glob("*.parquet"):
            with suppress(FileNotFoundError):  # it has just been removed
                size += file.stat().st_size
        return size

    def _write_file(self, rows: pa.Table) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)  # it may have been removed with its files
        name = f"{datetime.datetime.now(datetime.UTC):%Y%m%dT%H%M%S}-{os.getpid()}-{self._files}"
        self._files += 1
        draft = self.folder / f".{name}.part"
        try:
            pq.write_table(rows, draft, compression="zstd")
            draft.rename(self.folder / f"{name}.parquet")
        except BaseException:
            with suppress(OSError):
                draft.unlink(missing_ok=True)  # of a full disk
            raise
