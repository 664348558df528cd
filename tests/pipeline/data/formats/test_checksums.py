"""Checksums of Parquet's pages."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.data.formats.checksums import verify_pages
from pipeline.errors import DataError

ROWS = {"x": list(range(2_000)), "word": [f"w{number % 7}" for number in range(2_000)], "l": [[1, 2], []] * 1_000}


@pytest.mark.parametrize(
    "options", [{}, {"compression": "none", "use_dictionary": False}, {"data_page_version": "2.0"}]
)
def test_a_flipped_bit_in_any_page_is_found(tmp_path: Path, options: dict[str, Any]) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table(ROWS), path, write_page_checksum=True, row_group_size=700, **options)
    verify_pages(path, {})
    whole, metadata = path.read_bytes(), pq.read_metadata(path)
    chunks = [metadata.row_group(group).column(place) for group in range(3) for place in range(3)]
    for number, chunk in enumerate(chunks):
        end = (chunk.dictionary_page_offset or chunk.data_page_offset) + chunk.total_compressed_size
        content = bytearray(whole)
        content[end - 1 - int(np.random.default_rng(number).integers(0, 4))] ^= 16
        path.write_bytes(content)
        with pytest.raises(DataError, match=rf"^column '{chunk.path_in_schema}' of 'a\.parquet': expected pages as"):
            verify_pages(path, {})


def test_files_without_checksums_are_left_to_their_reader(tmp_path: Path) -> None:
    pq.write_table(pa.table(ROWS), tmp_path / "a.parquet", compression="none", use_dictionary=False)
    content = bytearray((tmp_path / "a.parquet").read_bytes())
    content[200] ^= 1  # in the first page's values
    (tmp_path / "a.parquet").write_bytes(content)
    verify_pages(tmp_path / "a.parquet", {})


def test_an_ingest_refuses_a_damaged_page(tmp_path: Path, ingest: Any, stored: Any) -> None:
    for name in "ab":
        table = pa.table(
            {"user": list(range(100)), "label": [0, 1] * 50, "at": [f"2024-01-0{'ab'.index(name) + 1}"] * 100}
        )
        pq.write_table(
            table, tmp_path / f"{name}.parquet", write_page_checksum=True, compression="none", use_dictionary=False
        )
    source = {"path": "*.parquet", "day_column": "at"}
    ingest({**source, "path": "a.parquet"})
    content = bytearray((tmp_path / "b.parquet").read_bytes())
    content[200] ^= 1  # a user's id
    (tmp_path / "b.parquet").write_bytes(content)
    with pytest.raises(DataError, match=r"^column 'user' of 'b\.parquet': expected pages as their checksums say"):
        ingest(source)
    assert len(stored()) == 100
