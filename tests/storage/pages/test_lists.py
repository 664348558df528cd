"""Files that no writer at hand makes. Every one is read as pyarrow reads it, or left to it."""

import gzip
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from storage.pages.columns import _open_lists, read_columns
from storage.pages.lists import ListChunk
from storage.snapshot.parquet import READ_OPTIONS
from tests.storage.pages import crafted
from tests.storage.pages.crafted import THREE_LEVELS, data_page, ids, parquet, runs

REPETITION, DEFINITION = runs([0, 1, 0]), runs((3, 3), width=2)
"""Levels of [[a, b], [c]]."""
SNAPPY, GZIP = 1, 2


def both(path: Path, content: bytes) -> tuple[list[list[int] | None], list[list[int] | None], bool]:
    """Returns the lists as they are read here and by pyarrow, and whether pyarrow was needed."""
    path.write_bytes(content)
    with pa.memory_map(str(path)) as data, pq.ParquetFile(str(path), **READ_OPTIONS) as file:
        ours = [row for batch in read_columns(file, data, 0, ["ids"], 1) for row in batch.column("ids").to_pylist()]
        left = not _open_lists(file, data, 0, ["ids"])
        return ours, file.read()["ids"].to_pylist(), left


READ = {
    "three levels": parquet([data_page(3, REPETITION, DEFINITION, ids(5, 6, 7))], 3, 2, THREE_LEVELS),
    "two levels, as Hive wrote": parquet(
        [data_page(3, REPETITION, runs((3, 2), width=2), ids(5, 6, 7))], 3, 2, crafted.TWO_LEVELS
    ),
    "repeated, as protocol buffers": parquet(
        [data_page(3, REPETITION, runs((3, 1)), ids(5, 6, 7))], 3, 2, crafted.REPEATED
    ),
    "an index page": parquet(
        [crafted.index_page(), data_page(3, REPETITION, DEFINITION, ids(5, 6, 7))], 3, 2, THREE_LEVELS
    ),
    "fields of a later format": parquet(
        [data_page(3, REPETITION, DEFINITION, ids(5, 6, 7), fields={9: {1: [1.5, 2.5], 2: b"x", 3: True}, 12: [b"y"]})],
        3, 2, THREE_LEVELS,
    ),
    "a dictionary without an offset": parquet(
        [
            crafted.dictionary_page(8, 9, encoding=2),
            data_page(3, REPETITION, DEFINITION, b"\1" + runs([1, 0, 1]), encoding=2),
        ],
        3, 2, THREE_LEVELS,
    ),
    "a page without levels": parquet(
        [
            data_page(2, runs([0, 1]), runs((2, 3), width=2), ids(5, 6)),
            data_page(0, b"", b"", b""),
            data_page(1, runs([0]), runs((1, 3), width=2), ids(7)),
        ],
        3, 2, THREE_LEVELS,
    ),
    "definition levels without their padding, as Polars cut them": parquet(
        [data_page(3, REPETITION, runs([3, 3, 3], width=2)[:-1], ids(5, 6, 7))], 3, 2, THREE_LEVELS
    ),
    "indices without their padding": parquet(
        [
            crafted.dictionary_page(*range(8)),
            data_page(3, REPETITION, DEFINITION, b"\3" + runs([5, 6, 7], width=3)[:-1], encoding=8),
        ],
        3, 2, THREE_LEVELS,
    ),
    "an uncompressed page of a compressed column": parquet(
        [crafted.second_page(3, 2, REPETITION, DEFINITION, ids(5, 6, 7), ids(5, 6, 7), compressed=False)],
        3, 2, THREE_LEVELS, SNAPPY,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", READ)
def test_odd_files_are_read(tmp_path: Path, name: str):
    ours, theirs, left = both(tmp_path / "x.parquet", READ[name])
    assert (ours, left) == (theirs, False)
    assert [len(row or ()) for row in ours] == [2, 1]


def test_pages_that_old_arrow_calls_uncompressed_are_left_to_pyarrow(tmp_path: Path):
    stored = pa.Codec("snappy").compress(ids(5, 6, 7), asbytes=True)
    page = crafted.second_page(3, 2, REPETITION, DEFINITION, ids(5, 6, 7), stored, compressed=False)
    by = b"parquet-cpp version 1.5.1-SNAPSHOT"
    ours, theirs, left = both(tmp_path / "x.parquet", parquet([page], 3, 2, THREE_LEVELS, SNAPPY, by))
    assert (ours, left) == (theirs, True)
    assert ours == [[5, 6], [7]]


def test_gzip_pages_of_several_members_are_left_to_pyarrow(tmp_path: Path):
    """They end with the length of the last member alone."""
    stored = gzip.compress(ids(5)) + gzip.compress(ids(6, 7))
    page = crafted.second_page(3, 2, REPETITION, DEFINITION, ids(5, 6, 7), stored, compressed=None)
    ours, theirs, left = both(tmp_path / "x.parquet", parquet([page], 3, 2, THREE_LEVELS, GZIP))
    assert (ours, left) == (theirs, True)
    assert ours == [[5, 6], [7]]


LEFT = {"two dictionaries", "fewer bytes than the header says"}
"""What is left to pyarrow, which refuses it."""
REFUSED = {
    "two dictionaries": parquet(
        [crafted.dictionary_page(8), crafted.dictionary_page(9), data_page(1, runs([0]), runs((1, 3), width=2), b"\0\2")],
        1, 1, THREE_LEVELS,
    ),
    "indices of 0 bits, and none of them": parquet(
        [crafted.dictionary_page(8), data_page(3, REPETITION, DEFINITION, b"\0", encoding=8)], 3, 2, THREE_LEVELS
    ),
    "an index beyond the dictionary": parquet(
        [crafted.dictionary_page(8), data_page(3, REPETITION, DEFINITION, b"\1" + runs([0, 1, 0]), encoding=8)],
        3, 2, THREE_LEVELS,
    ),
    "a page that ends within its indices": parquet(
        [crafted.dictionary_page(8, 9), data_page(3, REPETITION, DEFINITION, b"\7" + b"\3\1", encoding=8)],
        3, 2, THREE_LEVELS,
    ),
    "fewer bytes than the header says": parquet(
        [
            crafted.second_page(
                3, 2, REPETITION, DEFINITION, ids(5, 6, 7), pa.Codec("snappy").compress(ids(5), asbytes=True), None
            )
        ],
        3, 2, THREE_LEVELS, SNAPPY,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_damaged_files_are_errors(tmp_path: Path, name: str):
    path = tmp_path / "x.parquet"
    path.write_bytes(REFUSED[name])
    with pa.memory_map(str(path)) as data, pq.ParquetFile(str(path), **READ_OPTIONS) as file:
        chunk = _open_lists(file, data, 0, ["ids"]).get("ids")
        assert (chunk is None) == (name in LEFT)
        if chunk is not None:
            with pytest.raises(pa.ArrowInvalid, match="column 'ids': a page has"):
                chunk.read(2)
        with pytest.raises((pa.ArrowException, OSError)):
            list(read_columns(file, data, 0, ["ids"], 1))


def test_what_is_read_in_vain_is_left_to_pyarrow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Also in the middle of a row group."""
    path = tmp_path / "x.parquet"
    pq.write_table(pa.table({"ids": pa.array([[i, i] for i in range(9)], pa.list_(pa.int64()))}), path)
    read, calls = ListChunk.read, []

    def fail_at_the_third(chunk: ListChunk, rows: int) -> pa.Array:
        calls.append(rows)
        if len(calls) == 3:
            raise pa.ArrowInvalid("made up")
        return read(chunk, rows)

    monkeypatch.setattr(ListChunk, "read", fail_at_the_third)
    with pa.memory_map(str(path)) as data, pq.ParquetFile(str(path), **READ_OPTIONS) as file:
        rows = [row for batch in read_columns(file, data, 0, ["ids"], 2) for row in batch.column("ids").to_pylist()]
    assert rows == [[i, i] for i in range(9)]
    assert calls == [2, 2, 2]
