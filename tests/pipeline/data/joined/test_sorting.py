"""Sorted files of a feature source: the rows that Python sorts, whatever their types, made once and never half."""

import datetime
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Collection, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from pipeline.data.joined import index as joined_index
from pipeline.data.joined import sorting
from pipeline.data.joined.index import TimedIndex
from pipeline.data.joined.sorting import CHECKED, MANIFEST, REPLACED_SECONDS, UNUSED_SECONDS, SortedLayout, open_sorted
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


def sort(rows: Callable[[], Iterator[SourceRows]], folder: Path, layout: SortedLayout = LAYOUT) -> TimedIndex:
    """The sorted rows of a source of one part."""
    parts = {"all": folder.name}
    return open_sorted(lambda wanted: (("all", part) for part in rows()), parts, layout, folder, "log")


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
    index = sort(lambda: parts(rows, 60), tmp_path / "a")
    kept = sorted((row for row in rows if None not in (row["shop"], row["user"], row["time"])), key=lambda r: r["time"])
    assert index.values[0].null_count > 0
    for border in (-9, 0, 9):
        for shop in ("", "a", "ä", "shop", "none"):
            for user in range(4):
                own = [row for row in kept if (row["shop"], row["user"]) == (shop, user) and row["time"] < border]
                assert read_key(index, shop, user, border) == [tuple(row[name] for name in VALUES) for row in own]


class Log:
    """A source of several parts that change. Remembers which ones were read."""

    def __init__(self, random: np.random.Generator) -> None:
        self.random, self.parts, self.read, self.versions = (
            random,
            dict[str, list[Row]](),
            list[str](),
            dict[str, str](),
        )

    def change(self) -> None:
        """Adds some parts, removes or rewrites others."""
        for number in self.random.permutation(9)[: self.random.integers(1, 4)]:
            name = f"part {number}"
            if name in self.parts and self.random.random() < 0.3:
                del self.parts[name]
            else:
                self.parts[name] = draw(int(self.random.integers(1 << 30)), int(self.random.integers(0, 60)))
                self.versions[name] = f"{self.random.integers(1 << 30)}"
        self.parts = dict(sorted(self.parts.items()))

    def open(self, folder: Path, layout: SortedLayout = LAYOUT) -> TimedIndex:
        def rows(wanted: Collection[str]) -> Iterator[tuple[str, SourceRows]]:
            for name in (name for name in self.parts if name in wanted):
                self.read.append(name)
                for part in parts(self.parts[name], 13):
                    yield name, part

        self.read.clear()
        return open_sorted(rows, {name: self.versions[name] for name in self.parts}, layout, folder, "log")


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != CHECKED}


@pytest.mark.parametrize("seed", range(6))
def test_files_that_were_merged_are_those_of_a_sort(seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Byte by byte, whatever parts came, went and changed between the two, and only new parts are read."""
    monkeypatch.setattr(sorting, "BATCH_ROWS", 7 + 20 * (seed % 2))
    log, merged = Log(np.random.default_rng(seed)), 0
    for step in range(8):
        before = dict(log.versions)
        log.change()
        log.open(tmp_path / "kept" / f"{step}")
        read, new = set(log.read), {name for name in log.parts if log.versions[name] != before.get(name)}
        assert new - {name for name in new if not log.parts[name]} <= read
        merged += read < set(log.parts)
        log.open(tmp_path / "anew" / f"{step}" / "a")
        assert contents(tmp_path / "kept" / f"{step}") == contents(tmp_path / "anew" / f"{step}" / "a")
    assert merged > 2


def test_one_more_part_is_the_only_one_that_is_read(tmp_path: Path) -> None:
    log = Log(np.random.default_rng(1))
    for day in range(12):
        log.parts[f"{day:02}"], log.versions[f"{day:02}"] = draw(day, 30), "1"
        log.open(tmp_path / f"{day}")
        assert log.read == [f"{day:02}"]
    log.versions["03"] = "2"
    log.open(tmp_path / "rewritten")
    assert log.read == ["03"]


def test_keys_that_share_a_hash_are_sorted_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if only the new rows have the second key."""
    for place in (sorting, joined_index):
        monkeypatch.setattr(place, "hash_keys", lambda keys: np.full(len(keys[0]), 7, np.uint64))
    log, row = Log(np.random.default_rng(1)), draw(3, 1)[0] | {"shop": "a", "user": 1, "time": 0}
    for number, user in enumerate((1, 1, 2, 2)):
        log.parts[f"{number}"], log.versions[f"{number}"] = [row | {"user": user, "item": number}] * 2, "1"
        index = log.open(tmp_path / f"{number}")
        assert log.read == [["0"], ["1"], ["2", "0", "1", "2"], ["3", "0", "1", "2", "3"]][number]
    assert [[one[0] for one in read_key(index, "a", user, 9)] for user in (1, 2)] == [[0, 0, 1, 1], [2, 2, 3, 3]]


def test_a_merge_refuses_a_time_twice_where_it_must_not_be(tmp_path: Path) -> None:
    log, row = Log(np.random.default_rng(1)), draw(3, 1)[0] | {"shop": "a", "user": 1, "time": 0}
    log.parts, log.versions = {"1": [row, row | {"time": 1}]}, {"1": "1", "2": "1"}
    log.open(tmp_path / "a", LAYOUT._replace(unique=True))
    log.parts["2"] = [row | {"user": 2}, row]
    with pytest.raises(DataError, match="key a, 1 more than once"):
        log.open(tmp_path / "b", LAYOUT._replace(unique=True))
    assert log.read == ["2"]
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


@pytest.mark.parametrize("name", [MANIFEST, "part.data", "value0.data"])
def test_damaged_files_are_not_merged_with(name: str, tmp_path: Path) -> None:
    log = Log(np.random.default_rng(1))
    for day in ("1", "2"):
        log.parts[day], log.versions[day] = draw(int(day), 60), "1"
        log.open(tmp_path / day)
        content = bytearray((tmp_path / "1" / name).read_bytes())
        content[len(content) // 2] ^= 1
        (tmp_path / "1" / name).write_bytes(content)
    assert log.read == ["1", "2"]


def test_a_source_without_rows_has_none(tmp_path: Path) -> None:
    for name, rows in (("none", []), ("keyless", [row | {"shop": None} for row in draw(1, 5)])):
        index = sort(partial(parts, rows, 9), tmp_path / name)
        assert read_key(index, "a", 1, 9) == []


def test_different_keys_with_equal_hashes_stay_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for place in (sorting, joined_index):
        monkeypatch.setattr(place, "hash_keys", lambda keys: np.full(len(keys[0]), 7, np.uint64))
    rows = [row for row in draw(2, 200) if None not in (row["shop"], row["user"], row["time"])]
    index = sort(lambda: parts(rows, 60), tmp_path / "a")
    for shop in ("", "a", "shop"):
        own = sorted((row for row in rows if (row["shop"], row["user"]) == (shop, 1)), key=lambda row: row["time"])
        assert [one[0] for one in read_key(index, shop, 1, 9)] == [row["item"] for row in own]


def test_a_time_twice_is_refused_where_it_must_not_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sorting, "BATCH_ROWS", 1)
    row = draw(3, 1)[0] | {"shop": "a", "user": 1, "time": 0}
    rows = [row, row | {"time": 1}, row | {"user": 2}, row]
    with pytest.raises(DataError) as caught:
        sort(lambda: parts(rows, 2), tmp_path / "a", LAYOUT._replace(unique=True))
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
        sort(broken, tmp_path / "all" / "a")
    assert not (tmp_path / "all").exists()


def _open(folder: Path, path: Path, slow: bool) -> None:
    def rows() -> Iterator[SourceRows]:
        for part in parts(draw(5, 100), 10):
            with path.open("a") as file:
                file.write("read\n")
            if slow:
                time.sleep(600)
            yield part

    index = sort(rows, folder)
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
    assert [one.name for one in folder.parent.iterdir()] == ["a"]


def test_a_truncated_file_is_refused(tmp_path: Path) -> None:
    sort(lambda: parts(draw(6, 50), 60), tmp_path / "a")
    path = tmp_path / "a" / "value0.data"
    os.truncate(path, path.stat().st_size - 4)
    with pytest.raises(StorageError, match=r"value0\.data: expected \d+ bytes, got \d+\. Delete .*a\. It is made anew"):
        sort(lambda: parts([], 1), tmp_path / "a")


def _files_of(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.stat().st_size and path.name != CHECKED)


@pytest.mark.parametrize("where", [0.0, 0.5, 0.999])
def test_a_flipped_bit_in_any_file_is_refused(where: float, tmp_path: Path) -> None:
    """Also if the process that opens them has compared checksums before, and size and time of the file stay."""
    folder = tmp_path / "a"
    sort(lambda: parts(draw(6, 50), 60), folder)
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
            sort(lambda: parts([], 1), folder)
        (folder / name).write_bytes(content)
        sort(lambda: parts([], 1), folder)


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
        sort(lambda: parts(draw(6, 50), 60), tmp_path / "a")
        counts.append(len(read))
    files = len(_files_of(tmp_path / "a")) - 1
    assert counts[0] >= 2 * files  # made and compared
    assert counts[3] >= files
    assert counts[1:3] + counts[4:] == [0, 0, 0]


def test_files_of_another_hash_of_keys_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sort(lambda: parts(draw(6, 50), 60), tmp_path / "a")
    own = sorting.hash_keys
    for place in (sorting, joined_index):
        monkeypatch.setattr(place, "hash_keys", lambda keys: own(keys) + np.uint64(1))
    with pytest.raises(StorageError, match=r"expected the hashes that keys have now, got others\. Delete"):
        sort(lambda: parts([], 1), tmp_path / "a")


def test_files_that_nobody_opens_go_after_a_week_and_replaced_ones_after_a_day(tmp_path: Path) -> None:
    rows = draw(7, 50)

    def age(name: str, seconds: float) -> None:
        past = time.time() - seconds - 60
        os.utime(tmp_path / name / MANIFEST, (past, past))

    for name in ("log/old", "log/used", "other/old", "other/newer", "gone/old", "of_an_earlier_version"):
        sort(lambda: parts(rows, 60), tmp_path / name)
        age(name, REPLACED_SECONDS if name in ("log/old", "log/used", "other/newer") else UNUSED_SECONDS)
    sort(lambda: parts(rows, 60), tmp_path / "log" / "used")
    sort(lambda: parts(rows, 60), tmp_path / "log" / "new")
    assert sorted(one.name for one in (tmp_path / "log").iterdir()) == ["new", "used"]
    assert sorted(one.name for one in (tmp_path / "other").iterdir()) == ["newer"]
    assert sorted(one.name for one in tmp_path.iterdir()) == ["lock", "log", "other"]


def test_files_to_merge_with_are_in_use(tmp_path: Path) -> None:
    """A training that runs each week finds those of the last one, which are a week old."""
    log = Log(np.random.default_rng(1))
    for week in range(3):
        log.parts[f"{week}"], log.versions[f"{week}"] = draw(week, 30), "1"
        log.open(tmp_path / "log" / f"{week}")
        assert log.read == [f"{week}"]
        past = time.time() - UNUSED_SECONDS - 60
        os.utime(tmp_path / "log" / f"{week}" / MANIFEST, (past, past))
