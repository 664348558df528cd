"""Reads of merged byte ranges give the same columns in fewer requests."""

import datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from pyiceberg.expressions import LessThan

from storage import reader as reader_module
from storage.config import WarehouseConfig
from storage.layout.reads import ReadRecord, load_reads, record_read
from storage.layout.rewrite import set_layout
from storage.layout.spec import Layout
from storage.pages.ranges import MOST_BYTES, Range, merge_ranges
from storage.snapshot.row_filter import RowChoice
from storage.snapshot.writing import replace_days
from storage.warehouse import Warehouse

DAY = datetime.date(2024, 1, 1)


def test_ranges_are_merged_over_gaps_up_to_a_limit() -> None:
    parts = [Range(50, 60), Range(0, 10), Range(10, 20), Range(25, 30)]
    assert merge_ranges(parts, 0) == [Range(0, 20), Range(25, 30), Range(50, 60)]
    assert merge_ranges(parts, 5) == [Range(0, 30), Range(50, 60)]
    assert merge_ranges(parts, 20) == [Range(0, 60)]
    assert merge_ranges([], 5) == []
    large = [Range(0, MOST_BYTES), Range(MOST_BYTES, MOST_BYTES + 1)]
    assert merge_ranges(large, 0) == large


@pytest.mark.parametrize("gap_bytes", [0, 1_000_000])
def test_reads_of_an_object_store_are_counted(home: Path, gap_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A local file replaces the object store, and every read is recorded."""
    warehouse = Warehouse(WarehouseConfig(row_group_rows=500), home)
    columns = {f"c{i}": pa.array([i * j % 97 for j in range(1_000)]) for i in range(12)}
    rows = pa.table(
        {"day": pa.array([DAY] * 1_000, pa.date32()), **columns, "tags": [[i, i + 1] for i in range(1_000)]}
    )
    snapshot = replace_days(warehouse, "events", {DAY: "i"}, rows.schema, rows.to_batches(), 1_000)
    set_layout(warehouse.table("events"), Layout(row_group_rows=500, gap_bytes=gap_bytes))
    names = ["c1", "tags", "c2", "c7"]
    local = warehouse.reader(snapshot, names)
    expected = pa.concat_tables([local.read(fragment) for fragment in local.fragments()])
    assert local.reads == 2 * 3  # c1 and c2 are adjacent
    seen: list[int] = []
    fetched = reader_module.RangeFile

    class Seen(fetched):  # type: ignore[misc, valid-type]
        def __init__(self, file: Any, ranges: Any) -> None:
            super().__init__(
                type("File", (), {"size": file.size, "close": file.close, "read_at": self.one(file)})(), ranges
            )

        def one(self, file: Any) -> Any:
            def read_at(self: Any, size: int, offset: int) -> bytes:
                seen.append(size)
                return file.read_at(size, offset)

            return read_at

    monkeypatch.setattr(reader_module, "local_path", lambda path: None)
    monkeypatch.setattr(reader_module, "RangeFile", Seen)
    remote = warehouse.reader(snapshot, names)
    got = pa.concat_tables([remote.read(fragment) for fragment in remote.fragments()])
    assert got.equals(expected)
    assert len(seen) == remote.reads == (6 if gap_bytes == 0 else 2)
    assert sum(seen) == remote.bytes_read >= local.bytes_read
    assert (remote.bytes_read == local.bytes_read) == (gap_bytes == 0)
    seen.clear()
    keyed = warehouse.reader(snapshot, names)
    half = RowChoice(["c7"], lambda rows, first: rows["c7"].to_numpy() < 50)
    chosen = pa.concat_tables([keyed.read(fragment, half) for fragment in keyed.fragments()])
    assert chosen.to_pylist() == expected.filter(pc.field("c7") < 50).to_pylist()
    assert (len(seen), keyed.reads, keyed.bytes_read) == (remote.reads, remote.reads, remote.bytes_read)
    seen.clear()
    kept, none = (warehouse.reader(snapshot, names, LessThan("c3", limit)) for limit in (5, 0))  # type: ignore[call-arg]
    some = pa.concat_tables([kept.read(fragment) for fragment in kept.fragments()])
    assert some.to_pylist() == expected.filter(pa.array([3 * i % 97 < 5 for i in range(1_000)])).to_pylist()
    assert len(seen) == kept.reads  # the column of the filter by itself, and the others as without it
    assert (kept.reads, kept.bytes_read > remote.bytes_read) == (remote.reads + 2, True)
    assert pa.concat_tables([none.read(fragment) for fragment in none.fragments()]).num_rows == 0
    assert (len(seen), none.reads, none.bytes_read, none.row_groups_skipped) == (kept.reads, 0, 0, 2)


def test_reads_are_found_by_table_and_time(tmp_path: Path) -> None:
    def read(day: int, table: str = "events") -> ReadRecord:
        at = datetime.datetime(2024, 1, day, tzinfo=datetime.UTC)
        return ReadRecord(table=table, by="train", at=at, columns=("a",), rows=1, bytes_read=1, bytes_stored=2, reads=1, seconds=1.0)  # fmt: skip

    for one in (read(3), read(1), read(2, "other")):
        record_read(tmp_path, one)
    (tmp_path / "events" / "20240102-torn.json").write_text('{"table": ')
    assert load_reads(tmp_path, "events", read(1).at) == [read(1), read(3)]
    assert load_reads(tmp_path, "events", read(2).at) == [read(3)]
    assert load_reads(tmp_path, "none", read(1).at) == []
