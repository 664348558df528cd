"""A rewritten day has the same rows, in the layout of its table."""

import datetime
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyiceberg.types import DoubleType, StringType

from storage.config import WarehouseConfig
from storage.errors import ConflictError, StorageError
from storage.layout.rewrite import (
    RewriteResult,
    days_in_other_layouts,
    days_to_compact,
    layout_of,
    rewrite_days,
    set_layout,
)
from storage.layout.spec import Layout
from storage.snapshot import writing
from storage.warehouse import Warehouse
from tests.homes import read_rows, write_days

DAY1, DAY2, DAY3 = (datetime.date(2024, 1, day) for day in (1, 2, 3))
LAYOUT = Layout(codec="lz4", first=("tags", "x"), row_group_rows=16, file_rows=96, order_by=("session",))


def table(day: datetime.date, count: int, seed: int = 1) -> pa.Table:
    """Unordered rows, some of them twice, with nulls and NaN."""
    draw = np.random.default_rng(seed)
    half = pa.table(
        {
            "day": pa.array([day] * (count // 2), pa.date32()),
            "session": pa.array(draw.integers(0, 5, count // 2)),
            "x": pa.array([None if i % 5 == 0 else float("nan") if i % 7 == 0 else i / 3 for i in range(count // 2)]),
            "text": pa.array([f"t{i % 3}" if i % 4 else None for i in range(count // 2)]),
            "tags": pa.array([list(range(i % 4)) if i % 6 else None for i in range(count // 2)], pa.list_(pa.int64())),
        }
    )
    return pa.concat_tables([half, half])


write = partial(write_days, chunk_rows=7)


def read(warehouse: Warehouse) -> pa.Table:
    return read_rows(warehouse, "events", table(DAY1, 40).column_names).cast(table(DAY1, 40).schema)


def in_order(rows: pa.Table, *columns: str) -> list[str]:
    """Returns rows as texts, sorted by day and columns. Equal rows keep their order."""
    return [str(row) for row in sorted(rows.to_pylist(), key=lambda row: (row["day"], *(row[c] for c in columns)))]


def test_rewritten_days_have_their_rows_their_order_and_their_identity(warehouse: Warehouse, tmp_path: Path) -> None:
    write(warehouse, table(DAY1, 90), table(DAY2, 40))
    old = write(warehouse, table(DAY3, 40, 2), identity="third")
    rows = read(warehouse)
    set_layout(warehouse.table("events"), LAYOUT)
    assert layout_of(warehouse, "events") == LAYOUT
    assert days_in_other_layouts(warehouse, warehouse.current("events")) == [DAY1, DAY2, DAY3]
    (done,) = rewrite_days(warehouse, "events", [DAY1], tmp_path)
    assert (done.rows, done.files[1]) == (90, 1)
    assert done.files[0] > 5
    assert days_in_other_layouts(warehouse, warehouse.current("events")) == [DAY2, DAY3]
    rewrite_days(warehouse, "events", [DAY2], tmp_path)
    rewrite_days(warehouse, "events", [DAY3], tmp_path)
    assert days_in_other_layouts(warehouse, warehouse.current("events")) == []
    assert [str(row) for row in read(warehouse).to_pylist()] == in_order(rows, "session")
    assert warehouse.written_days("events") == {DAY1: "i", DAY2: "i", DAY3: "third"}
    assert warehouse.day_rows(old) == warehouse.day_rows(warehouse.current("events"))
    assert warehouse.schema(warehouse.current("events")).names == table(DAY1, 40).column_names  # models refer to it


def test_files_have_the_popular_columns_first(warehouse: Warehouse, tmp_path: Path, home: Path) -> None:
    write(warehouse, table(DAY1, 90))
    before = set(home.rglob("*.parquet"))
    set_layout(warehouse.table("events"), LAYOUT)
    rewrite_days(warehouse, "events", [DAY1], tmp_path)
    for path in set(home.rglob("*.parquet")) - before:
        file = pq.ParquetFile(path)
        assert file.schema_arrow.names == ["tags", "x", "day", "session", "text"]
        assert file.metadata.row_group(0).num_rows == 16
        assert file.metadata.row_group(0).column(0).compression == "LZ4"


def test_a_rewrite_has_the_columns_of_today(warehouse: Warehouse, tmp_path: Path) -> None:
    write(warehouse, table(DAY1, 40))
    events = warehouse.table("events")
    with events.update_schema() as update:
        update.delete_column("x").rename_column("text", "words")
    with events.update_schema() as update:
        update.add_column("x", DoubleType()).add_column("late", StringType())
    set_layout(warehouse.table("events"), LAYOUT)
    rewrite_days(warehouse, "events", [DAY1], tmp_path)
    names = ["words", "x", "late"]
    rows = warehouse.table("events").scan(selected_fields=("session", *names)).to_arrow()
    assert rows["x"].null_count == rows["late"].null_count == 40  # never the values of the dropped column
    assert sorted(map(str, rows["words"].to_pylist())) == sorted(map(str, table(DAY1, 40)["text"].to_pylist()))


def test_a_table_that_gains_a_column_keeps_its_layout(warehouse: Warehouse, tmp_path: Path) -> None:
    write(warehouse, table(DAY1, 40))
    set_layout(warehouse.table("events"), LAYOUT.model_copy(update={"order_by": ("session", "gone")}))
    rewrite_days(warehouse, "events", [DAY1], tmp_path)  # not a column
    wider = table(DAY2, 20).append_column("new", pa.array(range(20)))
    write(warehouse, wider)
    assert days_in_other_layouts(warehouse, warehouse.current("events")) == []
    sessions = warehouse.table("events").scan(row_filter="day = '2024-01-02'").to_arrow()["session"].to_pylist()
    assert sessions == sorted(sessions)  # also later days


def test_small_files_become_few(tmp_path: Path, home: Path) -> None:
    small, large = Warehouse(WarehouseConfig(file_rows=7), home), WarehouseConfig(file_rows=50)
    write(small, table(DAY1, 90), table(DAY2, 4))
    warehouse, rows = Warehouse(large, home), read(small)
    set_layout(warehouse.table("events"), warehouse.default_layout)
    assert days_to_compact(warehouse, warehouse.current("events")) == [DAY1]
    (done,) = rewrite_days(warehouse, "events", [DAY1], tmp_path)
    assert (done.files[0] > 10, done.files[1]) == (True, 2)
    assert days_to_compact(warehouse, warehouse.current("events")) == []
    assert str(read(warehouse).to_pylist()) == str(rows.to_pylist())  # in their order


def test_rows_that_come_out_differently_stop_the_commit(
    warehouse: Warehouse, tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = write(warehouse, table(DAY1, 90))
    before = set(home.rglob("*.parquet"))
    from storage.layout import rewrite

    plain = rewrite.DataFileWriter.write

    def altered(self: Any, rows: pa.Table) -> Any:
        return plain(self, rows.set_column(1, "session", pa.array([0] * len(rows), pa.int64())))

    monkeypatch.setattr(rewrite.DataFileWriter, "write", altered)
    with pytest.raises(
        StorageError, match=r"^day 2024-01-01 of table 'events': expected the same 90 rows after rewriting, got"
    ):
        rewrite_days(warehouse, "events", [DAY1], tmp_path)
    assert warehouse.current("events") == old
    assert set(home.rglob("*.parquet")) == before


def test_a_day_that_another_writer_changes_is_left_alone(
    warehouse: Warehouse, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(warehouse, table(DAY1, 20))
    from storage.layout import rewrite

    rows, late = rewrite._rows, [table(DAY1, 30, 3)]

    def then_theirs(*arguments: Any) -> Any:
        yield from rows(*arguments)
        if late:
            write(Warehouse(WarehouseConfig(), warehouse.home), late.pop(), identity="theirs")

    monkeypatch.setattr(rewrite, "_rows", then_theirs)
    with pytest.raises(ConflictError):
        rewrite_days(warehouse, "events", [DAY1], tmp_path)
    assert warehouse.written_days("events") == {DAY1: "theirs"}
    assert read(warehouse).num_rows == 30


@pytest.mark.parametrize(("most", "commits"), [(10**6, 1), (60, 5), (1, 9)])
def test_small_days_share_a_commit(
    most: int, commits: int, warehouse: Warehouse, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    days = [DAY1 + datetime.timedelta(number) for number in range(9)]
    write(warehouse, *(table(day, 30, number) for number, day in enumerate(days)))
    set_layout(warehouse.table("events"), LAYOUT)
    rows, before = read(warehouse).to_pylist(), len(warehouse.table("events").snapshots())
    monkeypatch.setattr(writing, "COMMIT_ROWS", most)
    done: list[RewriteResult] = []
    writing.write_in_commits(
        days, lambda day: 30, lambda group: done.extend(rewrite_days(warehouse, "events", group, tmp_path))
    )
    assert [(one.day, one.rows, one.files[1]) for one in done] == [(day, 30, 1) for day in days]
    assert len(warehouse.table("events").snapshots()) == before + commits
    assert days_in_other_layouts(warehouse, warehouse.current("events")) == []
    assert sorted(map(str, read(warehouse).to_pylist())) == sorted(map(str, rows))
    assert warehouse.written_days("events") == dict.fromkeys(days, "i")


def test_days_before_one_that_fails_are_done(warehouse: Warehouse, tmp_path: Path) -> None:
    days = [DAY1 + datetime.timedelta(number) for number in range(6)]
    write(warehouse, *(table(day, 30, number) for number, day in enumerate(days)))
    set_layout(warehouse.table("events"), LAYOUT)
    (file,) = warehouse.day_files(warehouse.current("events"))[days[4]][:1]
    path = Path(file.file_path.removeprefix("file://"))
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])
    with pytest.raises(StorageError, match=path.name):
        writing.write_in_commits(days, lambda day: 30, lambda group: rewrite_days(warehouse, "events", group, tmp_path))
    path.write_bytes(content)
    assert days_in_other_layouts(warehouse, warehouse.current("events")) == days[4:]
