"""Facts from footers agree with pyarrow's own sums and with the rows."""

import datetime
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from storage.errors import CorruptFileError
from storage.layout.columns import Footers
from storage.reader import SnapshotRef
from storage.warehouse import Warehouse
from tests.homes import rows_of, write_days

DAYS = [datetime.date(2024, 1, 1) + datetime.timedelta(days=i) for i in range(4)]
LISTS = pa.list_(pa.int64())


def write(warehouse: Warehouse, day: datetime.date, count: int, **columns: Any) -> SnapshotRef:
    return write_days(warehouse, rows_of(day, count, id=range(count), **columns), chunk_rows=5)


def footers(warehouse: Warehouse, snapshot: SnapshotRef) -> Footers:
    return Footers(warehouse.table("events"), snapshot)


def test_bytes_are_the_sums_of_pyarrows_footers_over_the_files_of_the_snapshot(warehouse: Warehouse) -> None:
    write(warehouse, DAYS[0], 23, tags=pa.array([[1, 2, 3]] * 23), old=range(23))
    write(warehouse, DAYS[1], 12, tags=pa.array([[i] for i in range(12)]), late=["x"] * 12)
    snapshot = write(warehouse, DAYS[1], 7, tags=pa.array([[i] for i in range(7)]), late=["x"] * 7)
    write(warehouse, DAYS[2], 9, later=range(9))  # of another snapshot
    expected: Counter[str] = Counter()
    paths = [t.file.file_path for t in warehouse.table("events").scan(snapshot_id=snapshot.snapshot_id).plan_files()]
    assert len(paths) > 2
    for path in paths:
        metadata = pq.read_metadata(path.removeprefix("file://"))
        for group in (metadata.row_group(i) for i in range(metadata.num_row_groups)):
            for chunk in (group.column(i) for i in range(group.num_columns)):
                expected[chunk.path_in_schema.split(".")[0]] += chunk.total_compressed_size
    found = footers(warehouse, snapshot).columns()
    assert {name: column.bytes for name, column in found.items()} == expected
    assert {name: column.first_day for name, column in found.items()} == {
        "day": DAYS[0], "id": DAYS[0], "tags": DAYS[0], "old": DAYS[0], "late": DAYS[1],
    }  # fmt: skip


def test_the_size_of_a_column_is_estimated_from_some_of_many_files(warehouse: Warehouse) -> None:
    for day in DAYS:
        snapshot = write(warehouse, day, 5, text=[f"{day}"] * 5)
    every, some = (footers(warehouse, snapshot).columns(most_files=most) for most in (4, 2))
    assert {name: one.bytes for name, one in some.items()} == {name: one.bytes for name, one in every.items()}
    one_day = footers(warehouse, snapshot).columns(DAYS[2:3], 2)
    assert 4 * one_day["text"].bytes == every["text"].bytes


@pytest.mark.parametrize("statistics", [True, False])
def test_columns_without_values_are_found_with_and_without_statistics(
    warehouse: Warehouse, monkeypatch: pytest.MonkeyPatch, statistics: bool
) -> None:
    plain = pq.ParquetWriter
    monkeypatch.setattr(pq, "ParquetWriter", lambda *a, **k: plain(*a, **{**k, "write_statistics": statistics}))
    nulls, empty = pa.nulls(9, pa.float64()), pa.array([None, [], []] * 3, LISTS)
    first = {"null": nulls, "empty": empty, "holes": pa.array([[None], []] * 4 + [[]], LISTS)}
    last = {"null": nulls, "empty": empty, "holes": first["holes"]}
    write(warehouse, DAYS[0], 9, **first, late=nulls, text=pa.array([None] * 8 + ["a"]))
    snapshot = write(
        warehouse, DAYS[1], 9, **last, late=pa.array([None] * 8 + [1.0]), text=pa.nulls(9, pa.string()), new=empty
    )
    columns = ["id", "null", "empty", "holes", "late", "text", "new"]
    metadata = [pq.read_metadata(path) for path in warehouse.home.rglob("*.parquet")]
    assert {one.row_group(0).column(1).is_stats_set for one in metadata} == {statistics}
    assert footers(warehouse, snapshot).without_values(columns).columns == ["null", "empty", "holes", "new"]
    found = footers(warehouse, snapshot).without_values(columns, [DAYS[0]])
    assert found.columns == ["null", "empty", "holes", "late", "new"]
    assert found.files_searched == found.files
    assert footers(warehouse, snapshot).without_values(["id"]) == ([], 1, 2)  # the first file says it


def test_a_column_dropped_and_added_again_has_no_values_in_old_files(warehouse: Warehouse) -> None:
    write(warehouse, DAYS[0], 3, x=[1.0, 2.0, 3.0])
    with warehouse.table("events").update_schema() as update:
        update.delete_column("x")
    with warehouse.table("events").update_schema() as update:
        update.union_by_name(pa.schema([("x", pa.float64())]))
    snapshot = write(warehouse, DAYS[1], 2, x=[9.0, 9.0])
    assert footers(warehouse, snapshot).without_values(["x"], [DAYS[0]]).columns == ["x"]
    assert footers(warehouse, snapshot).without_values(["x"]).columns == []
    assert footers(warehouse, snapshot).columns()["x"].first_day == DAYS[1]


def test_few_of_many_files_are_searched(warehouse: Warehouse) -> None:
    for day in DAYS:
        snapshot = write(warehouse, day, 25, x=pa.nulls(25, pa.int64()))
    assert footers(warehouse, snapshot).without_values(["x"], most_files=3)[1:] == (3, 12)


def test_a_damaged_file_is_named_or_skipped(warehouse: Warehouse) -> None:
    write(warehouse, DAYS[0], 3, x=[1.0, 2.0, 3.0])
    [path] = Path(warehouse.home).rglob("*.parquet")
    snapshot = write(warehouse, DAYS[1], 3, x=pa.nulls(3, pa.float64()))
    path.write_bytes(b"")
    assert footers(warehouse, snapshot).without_values(["x"]).columns == ["x"]
    with pytest.raises(CorruptFileError, match=rf"^file '.*{path.name}' of snapshot {snapshot.snapshot_id} of table"):
        footers(warehouse, snapshot).columns()
