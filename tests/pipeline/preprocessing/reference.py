"""A plain reader of the written tables, one row at a time, and comparisons of batches with it."""

import hashlib
import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from pipeline.data.batch import Batch
from pipeline.data.position import LostRows, Position
from pipeline.data.selection import HASH_STEPS
from pipeline.preprocessing.client import BatchSource, Client, InlineSource, open_remote_source
from pipeline.preprocessing.config import PreprocessingConfig
from pipeline.preprocessing.dataset import DataSpec
from pipeline.preprocessing.service import Service
from pipeline.processes import forkserver

SELECTIONS: dict[str, dict[str, Any]] = {
    "days": {},
    "filter": {"filter": "num_b >= 1.5"},
    "hash": {"hash_keys": ("cat_user",), "hash_range": (0, HASH_STEPS // 2)},
    "empty": {"filter": "num_b > 1000000"},
}
ROOT = Path(__file__).resolve().parents[3]
SEED, BATCH_ROWS, WINDOW_ROWS = 7, 160, 250
SPLIT_ROWS = 150
"""Row groups have 100 rows and fewer: some splits are one of them, some are two."""
EXECUTORS: dict[str, tuple[str, int]] = {
    "inline": ("inline", 1),
    "process": ("process", 2),
    "process x1": ("process", 1),
    "process x4": ("process", 4),
    "ray": ("ray", 2),
    "network": ("process", 3),
    "ray network": ("ray", 2),
}
"""Name in the tests -> (executor, workers)."""


def transport_of(name: str) -> str:
    """The transport of an executor's name in the tests."""
    return "network" if "network" in name else "memory"


CONFIG = PreprocessingConfig(shuffle_window_rows=WINDOW_ROWS, split_rows=SPLIT_ROWS, workers=1)
TIGHT_BYTES = 60_000
"""About three shuffle blocks of the small warehouse: most of the work is still to do while batches are taken."""


def selected(data: DataSpec, name: str) -> DataSpec:
    return data.model_copy(update={"selection": data.selection.model_copy(update=SELECTIONS[name])})


def client(source: BatchSource, spec: DataSpec, name: str = "days", **settings: Any) -> Client:
    given = {"batch_rows": BATCH_ROWS, "seed": SEED, "window_rows": WINDOW_ROWS} | settings
    return Client(source, (name, spec), **given)


def alone(spec: DataSpec, **settings: Any) -> Client:
    """Returns a client that reads in this process."""
    return client(InlineSource({"days": spec}, CONFIG), spec, **settings)


class Reference:
    """Reads row by row from the written tables and the layout of the files. Shares only the plan's arithmetic with
    the service.

    Args:
        lost: (file name, row group) of quarantined row groups.
    """

    def __init__(self, spec: DataSpec, days: Sequence[pa.Table], lost: Iterable[tuple[str, int]] = ()) -> None:
        table = pa.concat_tables(days)
        keep = np.ones(table.num_rows, bool)
        if spec.selection.filter is not None:
            keep = table["num_b"].to_numpy() >= {"num_b >= 1.5": 1.5, "num_b > 1000000": np.inf}[spec.selection.filter]
        if spec.selection.hash_keys:
            keep = np.isin(table["row"].to_numpy(), spec.selection.keep(table)["row"].to_numpy())
        applied = spec.plan.apply(table)
        self.dense, self.labels = applied.dense, table["label"].to_numpy().astype(np.float32)
        self.keys = [feature.name for feature in spec.plan.sparse]
        self.lists = [
            [column.values[a:b].tolist() for a, b in pairwise(column.offsets.tolist())] for column in applied.sparse
        ]
        groups = [group for path in Path(spec.home).rglob("*.parquet") for group in layout(path)]
        self.lost = set(lost)
        self.lost_until: defaultdict[int, tuple[LostRows, ...]] = defaultdict(tuple)
        """Row groups lost in the windows up to each one, as `windows` was called last."""
        self.names = [name for _, _, name in sorted(groups)]
        self.paths = {path.name: f"file://{path}" for path in Path(spec.home).rglob("*.parquet")}
        self.groups = [
            (rows, [i for i in range(first, first + rows) if keep[i] and name not in self.lost])
            for first, rows, name in sorted(groups)
        ]

    def windows(self, seed: int, epoch: int, window_rows: int | None, split_rows: int) -> list[list[int]]:
        """Row numbers of each window in order of delivery."""
        windows: list[list[int]] = []
        gone: tuple[LostRows, ...] = ()
        held = None
        order: Iterable[int] = range(len(self.groups))
        if window_rows is not None:
            order = draws(seed, epoch, 0).permutation(len(self.groups))
        for group in order:
            rows, chosen = self.groups[group]
            full = held is None or (held + rows > split_rows if window_rows is None else held >= window_rows)
            if full:
                windows.append([])
                self.lost_until[len(windows) - 1] = gone
                held = 0
            if (name := self.names[group]) in self.lost:
                gone += (LostRows(epoch=epoch, path=self.paths[name[0]], row_group=name[1], rows=rows),)
                self.lost_until[len(windows) - 1] = gone
            windows[-1] += chosen
            held += rows
        if window_rows is None:
            return windows
        return [
            [window[i] for i in draws(seed, epoch, number + 1).permutation(len(window))]
            for number, window in enumerate(windows)
        ]

    def batches(
        self,
        epoch: int = 0,
        seed: int = SEED,
        batch_rows: int = BATCH_ROWS,
        window_rows: int | None = WINDOW_ROWS,
        split_rows: int = SPLIT_ROWS,
    ) -> list[Batch]:
        """All global batches of an epoch."""
        windows = self.windows(seed, epoch, window_rows, split_rows)
        rows = [(row, number, place) for number, window in enumerate(windows) for place, row in enumerate(window)]
        batches: list[Batch] = []
        for start in range(0, len(rows), batch_rows):
            chosen = rows[start : start + batch_rows]
            _, window, place = chosen[-1]
            whole = place + 1 == len(windows[window])
            position = Position(
                epoch=epoch,
                batches=len(batches) + 1,
                window=window + 1 if whole else window,
                row=0 if whole else place + 1,
                lost=self.lost_until[window],
            )
            batches.append(self.batch([row for row, _, _ in chosen], position))
        return batches

    def batch(self, rows: list[int], position: Position) -> Batch:
        lists = [column[row] for column in self.lists for row in rows]
        return Batch(
            dense=torch.from_numpy(self.dense[rows]),
            sparse=KeyedJaggedTensor(
                keys=self.keys,
                values=torch.tensor([x for values in lists for x in values], dtype=torch.int64),
                lengths=torch.tensor([len(values) for values in lists], dtype=torch.int32),
            ),
            labels=torch.from_numpy(self.labels[rows]),
            weights=torch.ones(len(rows)),
            position=position,
            global_rows=len(rows),
        )


@cache
def layout(path: Path) -> list[tuple[int, int, tuple[str, int]]]:
    """Returns (number of the first row, rows, name) of each row group, as of the first call."""
    file = pq.ParquetFile(path)
    groups = [file.read_row_group(i, ["row"])["row"].to_pylist() for i in range(file.num_row_groups)]
    return [(min(rows), len(rows), (path.name, i)) for i, rows in enumerate(groups)]


def draws(seed: int, epoch: int, stream: int) -> np.random.Generator:
    return np.random.Generator(np.random.Philox(np.random.SeedSequence([seed, epoch, stream])))


def numbers(batches: Iterable[Batch]) -> list[int]:
    """Returns the row numbers in order of delivery, without padding."""
    return [int(share * 4096) for batch in batches for share in batch.dense[batch.weights > 0, 0].tolist()]


def expected_numbers(spec: DataSpec, days: Sequence[pa.Table]) -> list[int]:
    """Returns the rows that a selection should have, in table order."""
    return sorted(row for _, rows in Reference(spec, days).groups for row in rows)


def bags(batch: Batch) -> list[list[list[int]]]:
    """Per row, per feature: its ids."""
    columns = []
    for name in list(batch.sparse.keys()):
        ids = batch.sparse[name]
        values, offsets = ids.values().tolist(), ids.offsets().tolist()
        columns.append([values[a:b] for a, b in pairwise(offsets)])
    return [list(row) for row in zip(*columns, strict=True)]


def tensors(batch: Batch) -> list[torch.Tensor]:
    return [batch.dense, batch.labels, batch.weights, batch.sparse.lengths(), batch.sparse.values()]


def equal(a: Batch, b: Batch) -> bool:
    return (
        a.position == b.position
        and a.global_rows == b.global_rows
        and list(a.sparse.keys()) == list(b.sparse.keys())
        and all(x.dtype == y.dtype and x.equal(y) for x, y in zip(tensors(a), tensors(b), strict=True))
    )


def all_equal(a: Iterable[Batch], b: Iterable[Batch]) -> bool:
    return all(equal(x, y) for x, y in zip(a, b, strict=True))


def order_hash(batches: Iterable[Batch]) -> str:
    """Over the tensor bytes and positions of global batches in order."""
    digest = hashlib.sha256()
    for batch in batches:
        digest.update(batch.position.model_dump_json().encode())
        for tensor in tensors(batch):
            digest.update(str((tensor.dtype, tuple(tensor.shape))).encode())
            digest.update(tensor.contiguous().numpy().tobytes())
    return digest.hexdigest()


def joined(shares: Sequence[Batch]) -> Batch:
    """Joins the shares of all ranks into the global batch, without padding."""
    kept = [share.weights > 0 for share in shares]
    rows = [
        bag for share, keep in zip(shares, kept, strict=True) for bag in np.array(bags(share), object)[keep.numpy()]
    ]
    lists = [row[f] for f in range(len(shares[0].sparse.keys())) for row in rows]
    return Batch(
        dense=torch.cat([share.dense[keep] for share, keep in zip(shares, kept, strict=True)]),
        sparse=KeyedJaggedTensor(
            keys=list(shares[0].sparse.keys()),
            values=torch.tensor([x for values in lists for x in values], dtype=torch.int64),
            lengths=torch.tensor([len(values) for values in lists], dtype=torch.int32),
        ),
        labels=torch.cat([share.labels[keep] for share, keep in zip(shares, kept, strict=True)]),
        weights=torch.cat([share.weights[keep] for share, keep in zip(shares, kept, strict=True)]),
        position=shares[0].position,
        global_rows=shares[0].global_rows,
    )


def eventually(true: Callable[[], Any], seconds: float = 90.0, what: str = "") -> Any:
    """Waits until a condition is true and returns its value."""
    end = time.monotonic() + seconds
    while not (value := true()):
        assert time.monotonic() < end, what or true
        time.sleep(0.01)
    return value


def memory_descriptors() -> int:
    """Counts the open descriptors of shared memory and sockets of this process, but for those to fork servers."""
    count = -len(forkserver._servers)
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except OSError:
            continue
        count += "memfd:dlrm" in target or target.startswith("socket:")
    return count


def children() -> set[int]:
    """Returns the worker processes of the services of this process."""
    found = set()
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            if process.name().startswith("dlrm worker "):
                found.add(process.pid)
    return found


def column_of(table: pa.Table, name: str, row: int, value: object) -> pa.Table:
    """Returns the table with one value changed."""
    values = table.column(name).to_pylist()
    values[row] = value
    return table.set_column(table.schema.get_field_index(name), name, pa.array(values, table.schema.field(name).type))


def files_of(spec: DataSpec) -> list[Path]:
    """Returns the data files in table order."""
    return sorted(Path(spec.home).rglob("*.parquet"), key=lambda path: layout(path)[0])


def corrupt(path: Path) -> None:
    """Overwrites the pages of the first row group. The footer stays readable, and the file's `layout` is cached."""
    layout(path)
    content = bytearray(path.read_bytes())
    content[4:2000] = bytes(1996)
    path.write_bytes(bytes(content))


@contextmanager
def stepping(*iterators: Iterator[Batch]) -> Iterator[None]:
    """Closes iterators that were not taken to their end."""
    try:
        yield
    finally:
        for iterator in iterators:
            iterator.close()  # type: ignore[attr-defined]


def source_of(service: Service) -> BatchSource:
    """The source of a service's batches, for a rank."""
    return open_remote_source(service.address, service.config.connections)


def in_sessions(day: pa.Table, seed: int) -> pa.Table:
    """Groups the rows into sessions of three on average. Most rows keep the list of the row before."""
    random = np.random.default_rng(seed)
    begins = random.random(len(day)) < 1 / 3
    begins[0] = True
    first = np.maximum.accumulate(np.where(begins | (random.random(len(day)) < 0.1), np.arange(len(day)), 0))
    lists = day["list_items"].take(pa.array(first))
    names = pa.array([f"s{number // 2}" if number % 7 else None for number in np.cumsum(begins).tolist()])
    return day.set_column(day.schema.get_field_index("list_items"), "list_items", lists).append_column("session", names)
