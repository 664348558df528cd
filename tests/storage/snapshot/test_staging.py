"""Data files that are written before anybody knows which of them become part of the table."""

import datetime
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from storage.errors import ConflictError, StorageError, UnknownCommitError
from storage.snapshot.writing import StagedDays, replace_days, stage_days
from storage.warehouse import Warehouse
from tests.homes import read_rows, rows_of, write_days

DAYS = [datetime.date(2024, 1, 1) + datetime.timedelta(days=i) for i in range(3)]


def table(**more: Any) -> pa.Table:
    """Two rows of each day."""
    parts = [rows_of(day, 2, id=[10 * i, 10 * i + 1]) for i, day in enumerate(DAYS)]
    whole = pa.concat_tables(parts)
    for name, value in more.items():
        whole = whole.append_column(name, pa.array([value] * 6))
    return whole


def write(staged: StagedDays | None, rows: pa.Table, count: int | None = None) -> StagedDays:
    assert staged is not None
    staged.write(rows.to_batches(), DAYS, rows.num_rows if count is None else count)
    return staged


def days(*numbers: int) -> dict[datetime.date, str]:
    return {DAYS[number]: f"identity {number}" for number in numbers}


def ids(warehouse: Warehouse, names: Sequence[str] = ("id",)) -> list[int]:
    return sorted(read_rows(warehouse, warehouse.current("events"), [*names])["id"].to_pylist())


def data_files(home: Path) -> int:
    return len([*home.rglob("*.parquet")])


def test_days_that_are_committed_stay_and_others_leave_no_file(warehouse: Warehouse, home: Path) -> None:
    rows = table()
    with stage_days(warehouse, "events", rows.schema) as staged:
        write(staged, rows)
        assert (data_files(home), warehouse.has_table("events")) == (3, False)
        write(staged, rows).commit(days(0, 2), {DAYS[0]: {"who": "we"}})
    assert (ids(warehouse), data_files(home)) == ([0, 1, 20, 21], 2)
    assert warehouse.written_days("events") == days(0, 2)
    assert warehouse.day_notes("events") == {DAYS[0]: {"who": "we"}}


def test_a_table_that_nothing_is_committed_to_is_not_created(warehouse: Warehouse, home: Path) -> None:
    def killed(staged: StagedDays | None) -> None:
        write(staged, table())
        assert data_files(home) == 3
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), stage_days(warehouse, "events", table().schema) as staged:
        killed(staged)
    assert (warehouse.has_table("events"), data_files(home)) == (False, 0)


def test_rows_that_are_missing_or_of_another_day_are_refused(warehouse: Warehouse, home: Path) -> None:
    with (
        pytest.raises(StorageError, match=r"^table 'events': expected 7 rows to write, got 6\."),
        stage_days(warehouse, "events", table().schema) as staged,
    ):
        write(staged, table(), 7)
    other = rows_of(DAYS[2] + datetime.timedelta(1), id=[1])
    with (
        pytest.raises(StorageError, match=r"expected rows of 2024-01-01 to 2024-01-03 only, got rows of 2024-01-04"),
        stage_days(warehouse, "events", other.schema) as staged,
    ):
        write(staged, other)
    assert data_files(home) == 0


def test_a_new_column_is_added_with_the_commit(warehouse: Warehouse, home: Path) -> None:
    write_days(warehouse, table())
    wide = table(price=0.5)
    with stage_days(warehouse, "events", wide.schema) as staged:
        write(staged, wide)
    assert "price" not in warehouse.schema(warehouse.current("events")).names
    before = data_files(home)
    with stage_days(warehouse, "events", wide.schema) as staged:
        write(staged, wide).commit(days(1), {})
    found = read_rows(warehouse, warehouse.current("events"), ["id", "price"]).sort_by("id")
    assert found["price"].to_pylist() == [None, None, 0.5, 0.5, None, None]
    assert data_files(home) == before + 1


def test_columns_that_the_table_cannot_have_are_told_by_the_write(warehouse: Warehouse) -> None:
    write_days(warehouse, table())
    text = table().set_column(1, "id", pa.array(["a"] * 6))
    with stage_days(warehouse, "events", text.schema) as staged:
        assert staged is None
    with pytest.raises(StorageError, match="A table's column keeps its type"):
        replace_days(warehouse, "events", days(0, 1, 2), text.schema, text.to_batches(), 6)


@pytest.mark.parametrize("new", [True, False])
def test_a_column_that_another_writer_adds_meanwhile_is_a_conflict(warehouse: Warehouse, home: Path, new: bool) -> None:
    """Both would have the number of the same column. If both writers added the same ones, nothing is in the way."""
    if not new:
        write_days(warehouse, table())
    wide, other = table(price=0.5), table(size=7)
    with stage_days(warehouse, "events", wide.schema) as staged:
        written = write(staged, wide)
        replace_days(warehouse, "events", days(2), other.schema, other.slice(4).to_batches(), 2)
        with pytest.raises(ConflictError, match=r"^schema of table 'events'"):
            written.commit(days(0), {})
        files = data_files(home) - 3
    assert data_files(home) == files
    with stage_days(warehouse, "events", wide.schema) as staged:
        write(staged, wide)
        replace_days(warehouse, "events", days(2), wide.schema, wide.slice(4).to_batches(), 2)
        write(staged, wide).commit(days(0), {})
    assert ids(warehouse) == [0, 1, *([] if new else [10, 11]), 20, 21]


@pytest.mark.parametrize("new", [True, False])
def test_rows_that_another_writer_gives_a_day_meanwhile_are_not_lost(warehouse: Warehouse, new: bool) -> None:
    if not new:
        write_days(warehouse, table())
    newer = rows_of(DAYS[0], 1, id=[7])
    with stage_days(warehouse, "events", table().schema) as staged:
        written = write(staged, table())
        replace_days(warehouse, "events", days(0), newer.schema, newer.to_batches(), 1)
        with pytest.raises(
            ConflictError, match=r"^table 'events': expected 2024-01-01 .*, got rows written in the mean"
        ):
            written.commit(days(0, 1), {})
        written.commit(days(1), {})
    assert ids(warehouse) == [7, 10, 11, *([] if new else [20, 21])]


def test_files_of_a_commit_without_an_answer_stay(
    warehouse: Warehouse, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_days(warehouse, table())
    late = list[Any]()
    commit = type(warehouse.catalog).commit_table

    def gives_up(*arguments: Any) -> None:
        late.append(arguments)
        raise TimeoutError("504 gateway timeout.")

    with monkeypatch.context() as patch:
        patch.setattr(type(warehouse.catalog), "commit_table", gives_up)
        with pytest.raises(UnknownCommitError), stage_days(warehouse, "events", table().schema) as staged:
            write(staged, table()).commit(days(1), {})
    [arguments] = late
    commit(*arguments)
    assert ids(warehouse) == [0, 1, 10, 11, 20, 21]
