"""Files of a feature source are opened once to learn their columns and days, and a day opens its own files alone."""

import datetime
from pathlib import Path

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest

from pipeline.data.joined import known_files
from pipeline.data.joined.raw import RawRows
from pipeline.data.joined.source import FeatureSource, pin_sources
from pipeline.errors import DataError
from pipeline.transforms.joins import FeatureJoin
from storage.config import WarehouseConfig
from storage.warehouse import Warehouse

START = datetime.date(2025, 3, 1)


def day_of(number: int) -> datetime.date:
    return START + datetime.timedelta(number)


def write(folder: Path, number: int, days: tuple[int, ...], extra: int = 0) -> None:
    """A file with one user of each day; every third file has a column that the others lack."""
    rows = {"user": [10 * number + day for day in days], "on": [day_of(day) for day in days], "x": [extra] * len(days)}
    if number % 3 == 0:
        rows["y"] = [1.5] * len(days)
    folder.mkdir(exist_ok=True)
    pq.write_table(pa.table(rows), folder / f"{number:03}.parquet")


class Opened:
    """A source, pinned and opened as by a new process, and the files that this one opened."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, pattern: str = "files/*") -> None:
        self.files: list[str] = []
        whole = RawRows._open

        def opened(rows: RawRows, path: str) -> pa.NativeFile:
            self.files.append(Path(path).name)
            return whole(rows, path)

        monkeypatch.undo()
        monkeypatch.setattr(RawRows, "_open", opened)
        known_files._memory.clear()
        warehouse = Warehouse(WarehouseConfig(), folder / "home")
        source = FeatureJoin(path=pattern, on="user", day_column="on")
        self.source = FeatureSource(pin_sources([source], folder, warehouse)[0], warehouse)

    def users(self, day: int) -> list[int]:
        parts = self.source.rows(day_of(day), ["x"])
        return sorted(user for part in parts for user in part.keys[0].to_pylist())


def test_only_new_files_are_opened_and_a_day_opens_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(20):
        write(tmp_path / "files", number, (number, number + 1))
    first = Opened(tmp_path, monkeypatch)
    days = first.source.days()
    assert set(days) == {day_of(day) for day in range(21)}
    assert sorted(set(first.files)) == [f"{number:03}.parquet" for number in range(20)]
    again = Opened(tmp_path, monkeypatch)
    assert again.source.days() == days
    assert again.source.raw == first.source.raw
    assert again.files == []
    assert again.users(7) == [67, 77]
    assert again.files == ["006.parquet", "007.parquet"]
    assert again.users(99) == []
    write(tmp_path / "files", 20, (20,))
    write(tmp_path / "files", 3, (3,), extra=5)
    (tmp_path / "files" / "005.parquet").unlink()
    later = Opened(tmp_path, monkeypatch)
    found = later.source.days()
    assert sorted(set(later.files)) == ["003.parquet", "020.parquet"]
    assert [day for day in days if days[day] != found.get(day)] == [day_of(day) for day in (3, 4, 5, 6, 20)]
    assert [later.users(day) for day in (3, 4, 5, 20)] == [[23, 33], [44], [45], [210, 220]]


@pytest.mark.parametrize("damage", ["missing", "empty", "cut", "half", "other"])
def test_without_its_memory_a_source_is_the_same(damage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(6):
        write(tmp_path / "files", number, (number, 3))
    first = Opened(tmp_path, monkeypatch)
    days, users = first.source.days(), first.users(3)
    (path,) = (tmp_path / "home" / "inventory").glob("features-*")
    content = path.read_bytes()
    if damage == "missing":
        path.unlink()
    elif damage == "half":
        known = known_files._read(path)
        known_files._write(path, dict(list(known.items())[:3]))
    else:
        path.write_bytes({"empty": b"", "cut": content[:-9], "other": content[:12] + content[13:]}[damage])
    again = Opened(tmp_path, monkeypatch)
    assert (again.source.days(), again.users(3), again.source.raw) == (days, users, first.source.raw)
    assert len(set(again.files)) == 6


@pytest.mark.parametrize("damaged_before", [True, False])
def test_the_damaged_one_of_several_files_is_named(
    damaged_before: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether its footer is gone when the files are looked at, or a page when rows are read."""
    for number in range(3):
        write(tmp_path / "files", number, tuple(range(200)))
    path = tmp_path / "files" / "001.parquet"
    content = path.read_bytes()
    path.write_bytes(content[:-9] if damaged_before else content[:30] + bytes(300) + content[330:])
    told = "file '001.parquet'" if damaged_before else "column 'user' of '001.parquet'"
    with pytest.raises(DataError, match=rf"^{told}: expected Parquet that can be read, got .*Fetch or write the file"):
        Opened(tmp_path, monkeypatch).users(7)


def test_text_and_files_of_several_types_have_the_days_of_their_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "files").mkdir()
    for number in range(3):
        rows = pa.table({"user": [number], "on": [day_of(number)], "x": [number / 2]})
        pyarrow.csv.write_csv(rows, tmp_path / "files" / f"{number}.csv")
    write(tmp_path / "files", 9, (1,))  # x is whole here
    for _ in range(2):
        opened = Opened(tmp_path, monkeypatch)
        assert set(opened.source.days()) == {day_of(day) for day in range(3)}
        assert [opened.users(day) for day in range(4)] == [[0], [1, 91], [2], []]


def test_a_known_file_that_changes_is_refused_when_its_day_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(3):
        write(tmp_path / "files", number, (number,))
    Opened(tmp_path, monkeypatch).source.days()
    opened = Opened(tmp_path, monkeypatch)
    write(tmp_path / "files", 1, (1,), extra=77)
    assert opened.users(0) == [0]
    with pytest.raises(DataError, match=r"001\.parquet': expected the file unchanged since the run started"):
        opened.users(1)


def test_a_file_whose_days_are_not_known_is_refused_if_it_has_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(3):
        write(tmp_path / "files", number, (number,))
    opened = Opened(tmp_path, monkeypatch)  # knows the columns
    write(tmp_path / "files", 1, (2,))
    for _ in range(2):
        with pytest.raises(DataError, match=r"001\.parquet': expected the file unchanged since the run started"):
            opened.users(1)


def test_types_over_other_files_are_not_those_of_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "files", 1, (1,))
    (tmp_path / "files" / "2.csv").write_text(f"user,on,x\n1,{day_of(2)},text\n")
    assert Opened(tmp_path, monkeypatch).source.raw.field("x").type == pa.string()
    assert Opened(tmp_path, monkeypatch, "files/*.parquet").source.raw.field("x").type == pa.int64()
    (tmp_path / "files" / "2.csv").unlink()
    assert Opened(tmp_path, monkeypatch).source.raw.field("x").type == pa.int64()


def test_columns_keep_the_order_of_the_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever of them were known."""
    write(tmp_path / "files", 2, (2,))
    Opened(tmp_path, monkeypatch)
    rows = {"y": [2.5], "x": [1], "on": [day_of(1)], "user": [1]}
    pq.write_table(pa.table(rows), tmp_path / "files" / "001.parquet")
    for _ in range(2):
        assert Opened(tmp_path, monkeypatch).source.raw.names == ["y", "x", "on", "user"]


def test_files_may_lie_anywhere(tmp_path: Path) -> None:
    files = ["/a/1.parquet", "/2.parquet", "s3://bucket/3.parquet"]
    stamps = [(path.rpartition("/")[2], 1, 1) for path in files]
    known = known_files.KnownFiles(tmp_path, "source", files, stamps, None)
    known.add_schemas(dict.fromkeys(files, pa.schema([("x", pa.int64())])))
    known_files._memory.clear()
    assert list(known_files.KnownFiles(tmp_path, "source", files, stamps, None).files) == files
    assert not known_files.KnownFiles(tmp_path, "another source", files, stamps, None).files
