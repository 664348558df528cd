"""Sorted files of a feature source: the rows that Python sorts, whatever their types, made once and never half."""

import datetime
import multiprocessing
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from pipeline.data.joined import index as joined_index
from pipeline.data.joined import sorting
from pipeline.data.joined.index import TimedIndex
from pipeline.data.joined.sorting import CHECKED, MANIFEST, UNUSED_SECONDS, SortedLayout, open_sorted
from pipeline.data.joined.source import SourceRows
from pipeline.errors import DataError, StorageError

KEYS = {"shop": pa.large_string(), "user": pa.int64()}
VALUES = {
    "item": pa.int32(), "price": pa.float64(), "liked": pa.bool_(), "text": pa.large_string(), "on": pa.date32(),
    "then": pa.timestamp("us", "UTC"), "ids": pa.large_list(pa.int64()), "words": pa.large_list(pa.large_string()),
}  # fmt: skip
LAYOUT = SortedLayout(list(KEYS.values()), list(VALUES.values()), unique=False)
Row = dict[str, Any]


def draw(seed: int, count: int) -> list[Row]:
    """Rows with few keys and times, so that many are equal, and nulls in each column."""
    random = np.random.default_rng(seed)

    def maybe(value: Any) -> Any:
        return None if random.random() < 0.1 else value

    def row() -> Row:
        number = int(random.integers(-50, 50))
        return {
            "shop": maybe(["", "a", "ä", "shop"][random.integers(4)]), "user": maybe(int(random.integers(3))),
            "time": maybe(int(random.integers(-5, 5))), "item": maybe(number), "price": maybe(number / 7),
            "liked": maybe(number > 0), "text": maybe("x" * (number % 5)),
            "on": maybe(datetime.date(2025, 3, 1) + datetime.timedelta(number)),
            "then": maybe(datetime.datetime(2025, 3, 1, tzinfo=datetime.UTC) + datetime.timedelta(seconds=number)),
            "ids": maybe([maybe(number)] * (number % 3)), "words": maybe([maybe("w"), "word"][: number % 3]),
        }  # fmt: skip

    return [row() for _ in range(count)]


def parts(rows: list[Row], size: int) -> Iterator[SourceRows]:
    for begin in range(0, len(rows), size):
        columns = {name: [row[name] for row in rows[begin : begin + size]] for name in rows[0]}
        keys, values = ([pa.array(columns[name], kind) for name, kind in kinds.items()] for kinds in (KEYS, VALUES))
        yield SourceRows(keys, pa.array(columns["time"], pa.int64()), values)


def read_key(index: TimedIndex, shop: str, user: int, border: int) -> list[tuple[Any, ...]]:
    """The values of a key's rows before a time."""
    key = [pa.array([shop], pa.large_string()), pa.array([user], pa.int64())]
    found = index.find(key, pa.array([border], pa.int64()), 0, until=False)
    places = slice(int(found.first[0]), int(found.end[0]))
    return list(zip(*(values.to_pylist()[places] for values in index.values), strict=True))


@pytest.mark.parametrize("seed", range(4))
def test_rows_are_those_that_python_sorts(seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches end in the middle of keys. Of equal times, rows stay in their order."""
    monkeypatch.setattr(sorting, "BATCH_ROWS", 7)
    monkeypatch.setattr(sorting, "PACKED_AT_ONCE", 8)
    rows = draw(seed, 400)
    index = open_sorted(lambda: parts(rows, 60), LAYOUT, tmp_path / "a", "log")
    kept = sorted((row for row in rows if None not in (row["shop"], row["user"], row["time"])), key=lambda r: r["time"])
    assert index.values[0].null_count > 0
    for border in (-9, 0, 9):
        for shop in ("", "a", "ä", "shop", "none"):
            for user in range(4):
                own = [row for row in kept if (row["shop"], row["user"]) == (shop, user) and row["time"] < border]
                assert read_key(index, shop, user, border) == [tuple(row[name] for name in VALUES) for row in own]


def test_a_source_without_rows_has_none(tmp_path: Path) -> None:
    for name, rows in (("none", []), ("keyless", [row | {"shop": None} for row in draw(1, 5)])):
        index = open_sorted(lambda rows=rows: parts(rows, 9), LAYOUT, tmp_path / name, "log")
        assert read_key(index, "a", 1, 9) == []


def test_different_keys_with_equal_hashes_stay_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for place in (sorting, joined_index):
        monkeypatch.setattr(place, "hash_keys", lambda keys: np.full(len(keys[0]), 7, np.uint64))
    rows = [row for row in draw(2, 200) if None not in (row["shop"], row["user"], row["time"])]
    index = open_sorted(lambda: parts(rows, 60), LAYOUT, tmp_path / "a", "log")
    for shop in ("", "a", "shop"):
        own = sorted((row for row in rows if (row["shop"], row["user"]) == (shop, 1)), key=lambda row: row["time"])
        assert [one[0] for one in read_key(index, shop, 1, 9)] == [row["item"] for row in own]


def test_a_time_twice_is_refused_where_it_must_not_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sorting, "BATCH_ROWS", 1)
    row = draw(3, 1)[0] | {"shop": "a", "user": 1, "time": 0}
    rows = [row, row | {"time": 1}, row | {"user": 2}, row]
    with pytest.raises(DataError) as caught:
        open_sorted(lambda: parts(rows, 2), LAYOUT._replace(unique=True), tmp_path / "a", "log")
    assert str(caught.value) == (
        "log: expected each key once in each microsecond, got key a, 1 more than once at 1970-01-01 00:00:00. "
        "Remove duplicates."
    )
    assert not (tmp_path / "a").exists()


def test_an_error_of_the_rows_arrives_as_it_is_and_nothing_stays(tmp_path: Path) -> None:
    def broken() -> Iterator[SourceRows]:
        yield from parts(draw(4, 10), 5)
        raise DataError("log", "rows", "rubbish", "Repair it.")

    with pytest.raises(DataError, match="log: expected rows, got rubbish"):
        open_sorted(broken, LAYOUT, tmp_path / "all" / "a", "log")
    assert [path.name for path in (tmp_path / "all").iterdir()] == ["lock"]


def _open(folder: Path, path: Path, slow: bool) -> None:
    def rows() -> Iterator[SourceRows]:
        for part in parts(draw(5, 100), 10):
            with path.open("a") as file:
                file.write("read\n")
            if slow:
                time.sleep(600)
            yield part

    index = open_sorted(rows, LAYOUT, folder, "log")
    assert len(read_key(index, "a", 1, 9)) > 0


@pytest.mark.slow
def test_files_are_made_once_although_a_process_that_makes_them_is_killed(tmp_path: Path) -> None:
    context, folder, path = multiprocessing.get_context("spawn"), tmp_path / "all" / "a", tmp_path / "reads"
    killed = context.Process(target=_open, args=(folder, path, True))
    killed.start()
    while not path.exists():
        time.sleep(0.05)
        assert killed.is_alive()
    assert killed.pid is not None
    os.kill(killed.pid, signal.SIGKILL)
    killed.join()
    path.unlink()
    other = context.Process(target=_open, args=(folder, path, False))
    other.start()
    _open(folder, path, slow=False)
    other.join()
    assert other.exitcode == 0
    assert path.read_text().count("read") == 10
    assert sorted(one.name for one in folder.parent.iterdir()) == ["a", "lock"]


def test_a_truncated_file_is_refused(tmp_path: Path) -> None:
    open_sorted(lambda: parts(draw(6, 50), 60), LAYOUT, tmp_path / "a", "log")
    path = tmp_path / "a" / "value0.data"
    os.truncate(path, path.stat().st_size - 4)
    with pytest.raises(StorageError, match=r"value0\.data: expected \d+ bytes, got \d+\. Delete .*a\. It is made anew"):
        open_sorted(lambda: parts([], 1), LAYOUT, tmp_path / "a", "log")


def _files_of(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.stat().st_size and path.name != CHECKED)


@pytest.mark.parametrize("where", [0.0, 0.5, 0.999])
def test_a_flipped_bit_in_any_file_is_refused(where: float, tmp_path: Path) -> None:
    """Also if the process that opens them has compared checksums before, and size and time of the file stay."""
    folder = tmp_path / "a"
    open_sorted(lambda: parts(draw(6, 50), 60), LAYOUT, folder, "log")
    names = _files_of(folder)
    assert MANIFEST in names
    assert len(names) > 20
    for name in names:
        content, status = (folder / name).read_bytes(), (folder / name).stat()
        changed = bytearray(content)
        changed[int(where * len(content))] ^= 1
        (folder / name).write_bytes(changed)
        os.utime(folder / name, ns=(status.st_atime_ns, status.st_mtime_ns))
        with pytest.raises(StorageError, match=rf"/{name}: expected .*, got .*\. Delete .*a\. It is made anew"):
            open_sorted(lambda: parts([], 1), LAYOUT, folder, "log")
        (folder / name).write_bytes(content)
        open_sorted(lambda: parts([], 1), LAYOUT, folder, "log")


def test_checksums_are_compared_once_while_nothing_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    whole = sorting._checksum
    monkeypatch.setattr(sorting, "_checksum", lambda path: read.append(path.name) or whole(path))
    counts = []
    for age in (0, 0, 0, sorting.CHECKED_SECONDS + 60, 0):
        if age:
            past = time.time() - age
            os.utime(tmp_path / "a" / CHECKED, (past, past))
        read.clear()
        open_sorted(lambda: parts(draw(6, 50), 60), LAYOUT, tmp_path / "a", "log")
        counts.append(len(read))
    files = len(_files_of(tmp_path / "a")) - 1
    assert counts[0] >= 2 * files  # made and compared
    assert counts[3] >= files
    assert counts[1:3] + counts[4:] == [0, 0, 0]


def test_files_of_another_hash_of_keys_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    open_sorted(lambda: parts(draw(6, 50), 60), LAYOUT, tmp_path / "a", "log")
    own = sorting.hash_keys
    for place in (sorting, joined_index):
        monkeypatch.setattr(place, "hash_keys", lambda keys: own(keys) + np.uint64(1))
    with pytest.raises(StorageError, match=r"expected the hashes that keys have now, got others\. Delete"):
        open_sorted(lambda: parts([], 1), LAYOUT, tmp_path / "a", "log")


def test_files_that_nobody_opens_for_a_week_go(tmp_path: Path) -> None:
    rows = draw(7, 50)
    for name in ("old", "used"):
        open_sorted(lambda: parts(rows, 60), LAYOUT, tmp_path / name, "log")
        past = time.time() - UNUSED_SECONDS - 60
        os.utime(tmp_path / name / MANIFEST, (past, past))
    open_sorted(lambda: parts(rows, 60), LAYOUT, tmp_path / "used", "log")
    open_sorted(lambda: parts(rows, 60), LAYOUT, tmp_path / "new", "log")
    assert sorted(one.name for one in tmp_path.iterdir()) == ["lock", "new", "used"]
