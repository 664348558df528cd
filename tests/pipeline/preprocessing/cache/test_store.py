"""The folder keeps its bound, loses nothing but time to kills and damage, and gives back what was saved."""

import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from pipeline.preprocessing.cache import store as store_module
from pipeline.preprocessing.cache.entries import RowColumn
from pipeline.preprocessing.cache.store import ENTRY, PAUSE_SECONDS, TEMPORARY, ColumnStore, list_files, remove_unused

ROOT = Path(__file__).resolve().parents[4]
LIMIT = 1 << 20
ROWS = 5_000
"""Of an entry of about 85 KB."""


def columns(seed: int, rows: int = ROWS) -> dict[str, RowColumn]:
    """Returns columns that follow from a seed: numbers, lists, and lists of one id."""
    random = np.random.default_rng(seed)
    lengths = random.integers(0, 3, rows).astype(np.uint8)
    ids = random.integers(0, 1 << 31, int(lengths.sum())).astype(np.int32)
    return {
        f"numbers {seed}": RowColumn(random.normal(size=rows).astype(np.float32), None, {"clamp x": seed}),
        f"lists {seed}": RowColumn(ids, lengths, {}),
        f"ids {seed}": RowColumn(random.integers(0, 1 << 62, rows), None, {}),
    }


def same(found: dict[str, RowColumn], expected: dict[str, RowColumn]) -> bool:
    def content(column: RowColumn) -> tuple[object, ...]:
        lengths = None if column.lengths is None else (column.lengths.dtype, column.lengths.tobytes())
        return column.values.dtype, column.values.tobytes(), lengths, dict(column.counts)

    return found.keys() == expected.keys() and all(content(found[key]) == content(expected[key]) for key in found)


def load(store: ColumnStore, seed: int) -> dict[str, RowColumn]:
    return store.load(f"rows {seed}", columns(seed).keys())


def files_of(folder: Path, ending: str = ENTRY) -> list[Path]:
    return sorted(folder.rglob(f"*{ending}"))


def used(folder: Path) -> int:
    """Bytes of all files, while nobody writes."""
    with store_module._lock(folder):
        return sum(file.size for file in list_files(folder))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def store(folder: Path) -> ColumnStore:
    return ColumnStore(folder, LIMIT)


@pytest.mark.parametrize("rows", [0, 1, 7, ROWS])
def test_what_is_saved_is_loaded(store: ColumnStore, folder: Path, rows: int) -> None:
    saved = columns(1, rows)
    store.save("a", saved)
    assert same(store.load("a", saved.keys()), saved)
    assert same(ColumnStore(folder, LIMIT).load("a", saved.keys()), saved)
    (path,) = files_of(folder)
    assert store.take_stats()["bytes_written"] == path.stat().st_size
    assert store.load("b", saved.keys()) == {}
    assert store.load("a", ["another"]) == {}


def test_columns_come_from_several_entries(store: ColumnStore) -> None:
    first, second = columns(1), columns(2)
    store.save("a", first)
    store.save("a", second)
    wanted = {key: column for key, column in (first | second).items() if not key.startswith("ids")}
    assert same(store.load("a", wanted.keys()), wanted)


def test_the_entry_used_longest_ago_goes_first(store: ColumnStore, folder: Path) -> None:
    store.save("rows 0", columns(0))
    size = used(folder)
    store = ColumnStore(folder, 4 * size)
    for seed in range(1, 4):
        store.save(f"rows {seed}", columns(seed))
    for seed in range(4):
        os.utime(next((folder / f"rows {seed}").iterdir()), (seed, seed))
    assert same(load(store, 0), columns(0))  # the oldest one is used
    store.save("rows 4", columns(4))
    left = [seed for seed in range(5) if load(store, seed)]
    assert 0 in left
    assert 4 in left
    assert 1 not in left
    assert not (folder / "rows 1").exists()
    assert store.take_stats()["evicted"] == 5 - len(left)


def test_the_bound_holds_after_every_write(store: ColumnStore, folder: Path) -> None:
    for seed in range(60):
        store.save(f"rows {seed}", columns(seed))
        assert used(folder) <= LIMIT
        assert same(load(store, seed), columns(seed))
    assert used(folder) > LIMIT // 2
    assert store.take_stats()["evicted"] > 0


def test_an_entry_larger_than_the_bound_is_not_written(folder: Path) -> None:
    store = ColumnStore(folder, 10_000)
    store.save("a", columns(1))
    assert files_of(folder) == []
    assert store.take_stats()["unwritten"] == 0


@pytest.mark.parametrize("noted", [b"", b"garbage", b"9" * 20])
def test_a_wrong_total_is_counted_again(store: ColumnStore, folder: Path, noted: bytes) -> None:
    for seed in range(10):
        store.save(f"rows {seed}", columns(seed))
    (folder / "lock").write_bytes(noted)
    for seed in range(10, 40):
        store.save(f"rows {seed}", columns(seed))
        assert used(folder) <= LIMIT


def damages() -> dict[str, Callable[[bytes], bytes]]:
    def flip(place: float) -> Callable[[bytes], bytes]:
        def damage(content: bytes) -> bytes:
            at = int(place * (len(content) - 1))
            return content[:at] + bytes([content[at] ^ 4]) + content[at + 1 :]

        return damage

    flips: dict[str, Callable[[bytes], bytes]] = {f"flip at {place}": flip(place) for place in (0, 0.001, 0.3, 0.9)}
    return flips | {
        "empty": lambda content: b"",
        "cut in the header": lambda content: content[:60],
        "cut in the values": lambda content: content[: len(content) // 2],
        "longer": lambda content: content + bytes(8),
        "zeros": lambda content: bytes(len(content)),
        "zeros at the end": lambda content: content[: len(content) // 3] + bytes(len(content) - len(content) // 3),
    }


@pytest.mark.parametrize("damage", damages())
def test_a_damaged_entry_is_dropped(store: ColumnStore, folder: Path, damage: str) -> None:
    store.save("rows 1", columns(1))
    (path,) = files_of(folder)
    path.write_bytes(damages()[damage](path.read_bytes()))
    assert load(store, 1) == {}
    assert store.take_stats()["damaged"] == 1
    assert files_of(folder) == []
    store.save("rows 1", columns(1))
    assert same(load(store, 1), columns(1))
    assert store.take_stats()["damaged"] == 0


def test_no_flipped_bit_is_believed(store: ColumnStore, folder: Path) -> None:
    """Each byte of a small entry in turn: the prefix, the header, the values and what fills the gaps."""
    store.save("rows 1", columns(1, 5))
    (path,) = files_of(folder)
    content, random = path.read_bytes(), np.random.default_rng(2)
    for at in range(len(content)):
        damaged = bytearray(content)
        damaged[at] ^= 1 << int(random.integers(8))
        path.write_bytes(damaged)
        assert store.load("rows 1", columns(1).keys()) == {}, at
    assert store.take_stats()["damaged"] == len(content)
    path.write_bytes(content)
    assert same(store.load("rows 1", columns(1).keys()), columns(1, 5))


def test_columns_outlive_their_file_and_the_growth_of_memory(store: ColumnStore, folder: Path) -> None:
    """Several entries of one load, the first of which is read into smaller memory."""
    small, large = columns(1), {f"large {i}": next(iter(columns(i).values())) for i in range(8)}
    store.save("a", small)
    store.save("a", large)
    found = store.load("a", [*small, *large])
    for path in files_of(folder):
        path.unlink()
    assert same(found, small | large)


@contextmanager
def file_limit(size: int) -> Iterator[None]:
    """Lets no file of this process grow beyond a size, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_ends_writing_and_leaves_nothing(store: ColumnStore, folder: Path) -> None:
    store.save("rows 1", columns(1))
    before = used(folder)
    with file_limit(20_000):
        store.save("rows 2", columns(2))
    store.save("rows 3", columns(3))
    assert store.take_stats()["unwritten"] == 1
    assert len(files_of(folder)) == 1
    assert files_of(folder, TEMPORARY) == []
    assert used(folder) == before
    assert same(load(store, 1), columns(1))  # reading goes on


def test_writing_goes_on_some_time_after_a_failure(
    store: ColumnStore, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [1_000.0]
    monkeypatch.setattr("pipeline.preprocessing.cache.store.time.monotonic", lambda: now[0])
    with file_limit(20_000):
        for pause in (PAUSE_SECONDS, 2 * PAUSE_SECONDS, 4 * PAUSE_SECONDS):  # a disk that stays full costs little
            store.save("rows 2", columns(2))
            assert store.take_stats()["unwritten"] == 1
            now[0] += pause - 1
            store.save("rows 2", columns(2))
            assert store.take_stats()["unwritten"] == 0
            now[0] += 2
    store.save("rows 2", columns(2))
    assert same(load(store, 2), columns(2))
    with file_limit(20_000):
        store.save("rows 3", columns(3))
    now[0] += PAUSE_SECONDS + 1
    store.save("rows 3", columns(3))
    assert same(load(store, 3), columns(3))


def test_a_folder_that_cannot_be_made_is_as_good_as_none(folder: Path) -> None:
    folder.write_text("a file")
    store = ColumnStore(folder, LIMIT)
    assert load(store, 1) == {}
    store.save("rows 1", columns(1))
    assert load(store, 1) == {}
    assert store.take_stats()["unwritten"] == 1


CHILD = """
import os, sys, time
from pathlib import Path
from pipeline.preprocessing.cache import store as module
from pipeline.preprocessing.cache.entries import CacheEntry
from tests.pipeline.preprocessing.cache.test_store import columns
folder, limit, where = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]

def stop(*given):
    print("stopped", flush=True)
    time.sleep(600)

def half(columns, encode=module.encode):
    entry = encode(columns)
    def parts():
        yield from entry.parts[: len(entry.parts) // 2]
        stop()
    return CacheEntry(parts(), entry.size)

if where == "written":
    os.replace = stop
elif where == "begun":
    os.ftruncate = stop
else:
    module.encode = half
module.ColumnStore(folder, limit).save("rows 9", columns(9))
"""


@pytest.mark.parametrize("where", ["begun", "half", "written"])
def test_a_writer_that_is_killed_leaves_nothing_for_long(store: ColumnStore, folder: Path, where: str) -> None:
    store.save("rows 1", columns(1))
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, str(folder), str(LIMIT), where], stdout=subprocess.PIPE, text=True, cwd=ROOT
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "stopped\n"
    assert len(files_of(folder, TEMPORARY)) == 1
    if where == "half":  # it lives, so what it writes is counted and stays
        tight = ColumnStore(folder, store_module.encode(columns(2)).size + 1)
        tight.save("rows 2", columns(2))
        assert tight.take_stats() == {"evicted": 1}  # what the other one writes leaves no room
        store.save("rows 1", columns(1))
        assert used(folder) == files_of(folder)[0].stat().st_size + store_module.encode(columns(9)).size
        assert len(files_of(folder, TEMPORARY)) == 1
    child.send_signal(signal.SIGKILL)
    child.wait()
    child.stdout.close()
    assert load(store, 9) == {}
    assert len(files_of(folder, TEMPORARY)) == 1
    for seed in range(20, 60):
        store.save(f"rows {seed}", columns(seed))
        assert sum(path.stat().st_size for path in files_of(folder)) <= LIMIT
    assert files_of(folder, TEMPORARY) == []
    assert store.take_stats()["unwritten"] == 0


BUSY = """
import sys
from pathlib import Path
import numpy as np
from pipeline.preprocessing.cache.store import ColumnStore
from tests.pipeline.preprocessing.cache.test_store import LIMIT, columns, load, same
store = ColumnStore(Path(sys.argv[1]), LIMIT)
hits = 0
for seed in np.random.default_rng(int(sys.argv[2])).integers(0, 40, 300).tolist():
    found = load(store, seed)
    if found:
        hits += 1
        assert same(found, columns(seed)), seed
    else:
        store.save(f"rows {seed}", columns(seed))
stats = store.take_stats()
assert hits > 20 and stats["evicted"] > 5 and not stats["damaged"] and not stats["unwritten"], (hits, stats)
"""


@pytest.mark.nightly
def test_processes_share_the_bound(folder: Path) -> None:
    folder.mkdir()
    children = [subprocess.Popen([sys.executable, "-c", BUSY, str(folder), f"{seed}"], cwd=ROOT) for seed in range(3)]
    most = 0
    while any(child.poll() is None for child in children):
        most = max(most, used(folder))
    assert [child.returncode for child in children] == [0, 0, 0]
    assert LIMIT // 2 < most <= LIMIT
    assert files_of(folder, TEMPORARY) == []


def test_unused_entries_are_removed(store: ColumnStore, folder: Path) -> None:
    assert remove_unused(folder, 50.0, dry_run=False) == []
    for seed in range(3):
        store.save(f"rows {seed}", columns(seed))
        os.utime(next((folder / f"rows {seed}").iterdir()), (100 * seed, 100 * seed))
    assert len(remove_unused(folder, 150.0, dry_run=True)) == 2
    assert len(files_of(folder)) == 3
    assert len(remove_unused(folder, 150.0, dry_run=False)) == 2
    assert [path.parent.name for path in files_of(folder)] == ["rows 2"]
    assert int((folder / "lock").read_bytes()) == files_of(folder)[0].stat().st_size
