"""Compares rows as they were served, or with sources as a training pinned them, with the same rows computed now."""

import datetime
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from pydantic import BaseModel

from pipeline.data.differences import ColumnDifferences, common_form, to_form
from pipeline.data.formats.files import address_of, find_files, form_of, stamp
from pipeline.data.joined.raw import RawRows
from pipeline.data.joined.reader import FeatureJoinReader, Reader, joined_schema, open_reader
from pipeline.data.joined.source import PinnedSource
from pipeline.errors import ConfigError, DataError, StorageError
from pipeline.transforms.schema import unknown_column
from storage.objects import is_address
from storage.query import connect, stream
from storage.reader import SnapshotRef
from storage.scratch import ScratchFolder
from storage.snapshot.row_filter import RowChoice
from storage.warehouse import Warehouse

if TYPE_CHECKING:
    import duckdb

SERVED = "argument 'served'"
MEMORY = "25%"
"""Memory of DuckDB while it matches rows, of the machine's. It spills to disk."""
BATCH_ROWS = 8_192
PATH = ("/", "*", "?", ".parquet")
"""What a path has and a table's name has not."""
GROUP = "group_number"
"""Column with the number of the set of columns that a served row has."""
Report = Callable[[int, int], None]
Columns = Mapping[str, pa.Array]
"""Some rows: a column by its name."""


class ConsistencyResult(BaseModel, frozen=True):
    """How values of the same rows differ."""

    rows: int
    """Rows that were compared."""
    only_then: int
    """Rows that were served and are not in the table's days."""
    only_now: int
    """Rows of the table's days that were not served."""
    features: tuple[Mapping[str, Any], ...]
    """As `ColumnDifferences.summary`, the largest share first."""


def open_served(warehouse: Warehouse, served: str, root: Path) -> list[RawRows]:
    """Opens rows as they were served: each file, or a table of the warehouse.

    Args:
        served: A table's name, or a path or glob of files of any format. Of a folder, its Parquet files.
        root: Folder that relative paths start from.
    Raises:
        ConfigError: If there is no such file.
        DataError: If a file is unreadable.
        StorageError: If there is no such table.
    """
    where = f"{SERVED} '{served}'"
    folder = not is_address(served) and (root / Path(served).expanduser()).is_dir()
    if not folder and form_of(Path(served), "auto") == "parquet" and not any(part in served for part in PATH):
        return [RawRows(warehouse, where, (), (), warehouse.current(served))]
    files = find_files(f"{served}/*.parquet" if folder else served, root, SERVED, warehouse.config.catalog)
    return [RawRows(warehouse, where, (address_of(file),), (stamp(file),)) for file in files]


def compare_served(
    warehouse: Warehouse,
    served: Sequence[RawRows],
    source: SnapshotRef,
    joined: Sequence[PinnedSource],
    columns: Sequence[str],
    on: Sequence[str],
    days: Mapping[datetime.date, int],
    tolerance: float,
    report: Report = lambda done, total: None,
) -> ConsistencyResult:
    """Compares served rows with the rows of a table, and of the sources joined to it, that have the same keys.

    It needs no more memory than DuckDB may have: rows are matched on disk if they are many.

    Args:
        columns: Columns that a model reads. Those that were served are compared.
        on: Columns that tell which row is which.
        days: Day of the table -> its rows.
        tolerance: As in `compare`.
        report: Called with (done, total) while rows of the table are read.
    Raises:
        ConfigError: If a key is missing, none of the columns was served, or one was with a type of another kind.
        DataError: If several rows have the same key.
    """
    table = joined_schema(warehouse, source, joined, [*on, *columns])
    for name in on:
        for names in (table.names, *(part.raw.names for part in served)):
            if name not in names:
                raise unknown_column("argument 'on'", name, names)
    groups = list(dict.fromkeys(frozenset(part.raw.names) for part in served))
    compared = [name for name in columns if name not in on and any(name in group for group in groups)]
    if not compared:
        raise ConfigError(
            served[0].where, f"some of {', '.join(name for name in columns if name not in on)}",
            f"{', '.join(served[0].raw.names)}", "Log the columns that the model reads under their own names.",
        )  # fmt: skip

    def served_rows() -> Iterator[Columns]:
        for part in served:
            number = groups.index(frozenset(part.raw.names))
            for batch in part.batches([name for name in forms if name in part.raw.names]):
                group = {GROUP: pa.array(np.full(len(batch), number, np.int32))}
                absent = dict.fromkeys(forms, pa.nulls(len(batch)))
                yield absent | group | {name: batch.column(name) for name in batch.schema.names}

    def table_rows() -> Iterator[Columns]:
        done = 0
        for batch in _read(open_reader(warehouse, source, [*forms], None, joined), days):
            yield {name: batch.column(name) for name in forms}
            done += len(batch)
            report(done, sum(days.values()))

    forms = {name: _form_of(name, table, served) for name in [*on, *compared]}
    differences = {name: ColumnDifferences(name, tolerance) for name in compared}
    rows = 0
    with _open_matching(warehouse, on, forms) as matching:
        before = matching.load("before", served_rows(), served[0].where)
        now = matching.load("after", table_rows(), f"table '{source.table}'")
        for batch in matching.match():
            rows += len(batch)
            number, *arrays = batch.columns
            keys, values = arrays[: len(on)], arrays[len(on) :]
            for i, (name, one) in enumerate(differences.items()):
                having = pa.array([j for j, group in enumerate(groups) if name in group], pa.int32())
                mask = pc.is_in(number, having)
                then, after, *named = (array.filter(mask) for array in [*values[i :: len(compared)], *keys])
                one.add(then, after, named)
    return _make_result(rows, differences, before - rows, now - rows)


def compare_pinned(
    warehouse: Warehouse,
    source: SnapshotRef,
    then: Sequence[PinnedSource],
    now: Sequence[PinnedSource],
    columns: Mapping[str, tuple[str, str]],
    on: Sequence[str],
    days: Mapping[datetime.date, int],
    tolerance: float,
    report: Report = lambda done, total: None,
    say: Callable[[str], object] = lambda sentence: None,
    step: int = 1,
) -> ConsistencyResult:
    """Compares the columns that sources add to the same rows in two states of the sources.

    Args:
        then, now: The same sources, pinned at two times. A column that none of `then` adds is read from the table.
        columns: Feature -> its column with the sources of then, and with those of now.
        on: Columns of the table that name a row in the report.
        days: Day of the table -> its rows.
        tolerance: As in `compare`.
        report: Called with (done, total).
        say: Gets a line before a source is sorted, and one after it.
        step: 1 compares all rows, 2 every second one of a row group, and so on.
    """
    names = [list(dict.fromkeys([*(pair[i] for pair in columns.values()), *on])) for i in range(2)]
    readers = [open_reader(warehouse, source, names[i], None, (then, now)[i]) for i in range(2)]
    for reader in readers:
        if isinstance(reader, FeatureJoinReader):
            reader.sort_sources(say)
    kinds = [readers[i].empty().schema for i in range(2)]
    forms = {
        name: common_form(_column(name), *(kinds[i].field(pair[i]).type for i in range(2)))
        for name, pair in columns.items()
    }
    differences = {name: ColumnDifferences(name, tolerance) for name in columns}
    done, total = 0, sum(days.values()) // step
    for both in zip(*(_read(reader, days, step) for reader in readers), strict=True):
        keys = [both[1].column(name) for name in on]
        for name, form in forms.items():
            before, after = (to_form(_column(name), both[i].column(columns[name][i]), form) for i in range(2))
            differences[name].add(before, after, keys)
        done += len(both[1])
        report(min(done, total), total)
    return _make_result(done, differences)


def _make_result(
    rows: int, differences: Mapping[str, ColumnDifferences], only_then: int = 0, only_now: int = 0
) -> ConsistencyResult:
    features = sorted((one.summary() for one in differences.values()), key=lambda one: -one["share"])
    return ConsistencyResult(rows=rows, only_then=only_then, only_now=only_now, features=tuple(features))


class _Matching:
    """Finds the rows of two streams that have the same key. Rows without a key match none.

    Args:
        on: Columns of the key.
        forms: Column -> type in which it is compared.
    """

    def __init__(self, connection: "duckdb.DuckDBPyConnection", on: Sequence[str], forms: Mapping[str, pa.DataType]):
        self.connection, self.forms = connection, forms
        self.keys = {name: f"key{i}" for i, name in enumerate(on)}
        self.failed: Exception | None = None

    def load(self, side: str, rows: Iterator[Columns], where: str) -> int:
        """Reads the rows of one side, `before` or `after`. Returns their number.

        Raises:
            DataError: If a key occurs twice.
        """
        compared = [name for name in self.forms if name not in self.keys]
        names = {GROUP: GROUP} if side == "before" else {}
        names |= self.keys | {name: f"{side}{i}" for i, name in enumerate(compared)}
        kinds = {**self.forms, GROUP: pa.int32()}
        schema = pa.schema([(short, kinds[name]) for name, short in names.items()])

        def batches() -> Iterator[pa.RecordBatch]:
            try:
                for one in rows:
                    columns = [to_form(_column(name), one[name], kinds[name]) for name in names]
                    yield pa.RecordBatch.from_arrays(columns, schema=schema)
            except Exception as error:
                self.failed = error
                raise

        self.connection.register("incoming", pa.RecordBatchReader.from_batches(schema, batches()))
        self.connection.execute(f"CREATE TABLE {side} AS FROM incoming")
        keys, present = ", ".join(self.keys.values()), " AND ".join(f"{key} IS NOT NULL" for key in self.keys.values())
        query = f"SELECT {keys} FROM {side} WHERE {present} GROUP BY ALL HAVING count(*) > 1 LIMIT 1"
        repeated = self.connection.execute(query).fetchone()
        if repeated is not None:
            found = (
                f"several of {', '.join(f'{name} {value}' for name, value in zip(self.keys, repeated, strict=True))}"
            )
            raise DataError(where, f"one row for each {', '.join(self.keys)}", found, "Name more columns: on=[...].")
        return int(self.connection.table(side).shape[0])

    def match(self) -> Iterator[pa.RecordBatch]:
        """Yields the number of the set of columns, the keys, all compared columns as they were, and all as they are."""
        query = f"SELECT * FROM before JOIN after USING ({', '.join(self.keys.values())})"
        yield from stream(self.connection.sql(query), rows=BATCH_ROWS)[1]


@contextmanager
def _open_matching(warehouse: Warehouse, on: Sequence[str], forms: Mapping[str, pa.DataType]) -> Iterator[_Matching]:
    """Opens DuckDB. Its errors become ours."""
    import duckdb

    cores = len(os.sched_getaffinity(0))
    with (
        ScratchFolder("served-", warehouse.home / "tmp") as folder,
        connect([], Path(folder), MEMORY, cores) as connection,
    ):
        matching = _Matching(connection, on, forms)
        try:
            yield matching
        except (duckdb.Error, pa.ArrowException) as error:
            if matching.failed is not None:  # DuckDB would only repeat its text
                raise matching.failed from None
            reason, remedy = f"{error}".split("\n")[0].rstrip("."), "Make room in memory and on disk."
            raise StorageError(SERVED, "rows that DuckDB can match", reason, remedy) from error


def _form_of(name: str, table: pa.Schema, served: Sequence[RawRows]) -> pa.DataType:
    """Returns the form in which a column of all parts is compared."""
    form = table.field(name).type
    for part in served:
        if name in part.raw.names:
            form = common_form(f"{SERVED}, {_column(name)}", part.raw.field(name).type, form)
    return form


def _column(name: str) -> str:
    return f"column '{name}'"


def _read(reader: Reader, days: Iterable[datetime.date], step: int = 1) -> Iterator[pa.RecordBatch]:
    """Yields the rows of days, or only each `step`-th one of a row group."""

    def choose(rows: pa.RecordBatch, before: int) -> npt.NDArray[np.bool_]:
        return (before + np.arange(len(rows))) % step == 0

    for fragment in reader.fragments(days):
        yield from reader.batches(fragment, None if step == 1 else RowChoice((), choose))
