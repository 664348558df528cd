"""A part of files is whole rows of theirs, spread over all, and about as many as were asked for."""

import gzip
import json
from pathlib import Path

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.data.formats import csv as formats
from pipeline.data.formats import sample
from pipeline.data.formats.files import SourceFile
from pipeline.data.formats.reading import Decoder
from pipeline.data.formats.sample import Sample, choose_sample, copy_groups
from storage.names import Format

PACK = {"gz": gzip.compress, "zst": lambda content: pa.compress(content, "zstd", asbytes=True)}
"""Ending of a compressed file's name -> what compresses it."""


def read(files: dict[SourceFile, Format], chosen: Sample, place: Path) -> dict[str, list[int]]:
    """Returns file -> the numbers in the column `n` of its part."""
    with Decoder(files, place, parts=chosen.parts) as decoder:
        copies = decoder.read(chosen.parts)
        return {file.name: [int(n) for n in pq.read_table(one.read)["n"].to_pylist()] for file, one in copies.items()}


def test_rows_of_parquet_are_spread_over_all_row_groups(tmp_path, monkeypatch):
    monkeypatch.setattr(sample, "FEWEST_ROWS", 10)
    files: dict[SourceFile, Format] = {tmp_path / f"{day}.parquet": "parquet" for day in range(10)}
    for day, path in enumerate(files):
        pq.write_table(pa.table({"n": np.arange(day * 1_000, (day + 1) * 1_000)}), path, row_group_size=100)
    assert choose_sample(files, 10_000) is None
    few = choose_sample(files, 500)
    assert few is not None
    found = read(files, few, tmp_path / "home")
    assert list(found) == [path.name for path in files]
    whole = [n for numbers in found.values() for n in numbers]
    assert (len(set(whole)), len(whole)) == (len(whole), 500)
    assert whole == sorted(whole)
    assert few.scale == 20.0
    assert {n // 1_000 for n in whole} == set(range(10))
    assert len({n % 1_000 // 100 for n in whole}) > 5, "row groups of all places"
    fewest = choose_sample(files, 20)
    assert fewest is not None
    assert sum(len(numbers) for numbers in read(files, fewest, tmp_path / "home").values()) == pytest.approx(20, abs=6)


def test_times_of_spark_keep_the_type_that_duckdb_reads(tmp_path):
    """It writes them in 96 bits, which Arrow takes for nanoseconds."""
    path, times = tmp_path / "a.parquet", pa.array(np.arange(300_000), pa.timestamp("us"))
    pq.write_table(pa.table({"n": times}), path, use_deprecated_int96_timestamps=True, row_group_size=50_000)
    chosen = choose_sample({path: "parquet"}, 100)
    assert chosen is not None
    copy_groups(path, chosen.parts[path], tmp_path / "copy.parquet", {})
    kinds = [duckdb.sql(f"SELECT n FROM '{tmp_path}/{name}.parquet'").types for name in ("a", "copy")]
    assert kinds[0] == kinds[1]


@pytest.mark.parametrize("content", [b"", b"PAR1", b"label,n\n1,2\n"])
def test_a_file_without_a_footer_is_left_to_who_reads_it(tmp_path, content):
    files: dict[SourceFile, Format] = {tmp_path / "a.parquet": "parquet", tmp_path / "b.parquet": "parquet"}
    (tmp_path / "a.parquet").write_bytes(content)
    pq.write_table(pa.table({"n": np.arange(300_000)}), tmp_path / "b.parquet")
    assert choose_sample(files, 1) is None


def text_of(form: str, rows: int) -> str:
    words = np.random.default_rng(rows).bytes(8 * rows).hex()
    every = [(n, words[16 * n : 16 * n + 16]) for n in range(rows)]
    if form == "csv":
        return "".join(["n,word\n", *(f'{n},"a ""line""\nand {word},\n"\n' for n, word in every)])
    return "".join(json.dumps({"n": n, "word": f'a "line" {{{word}'}) + "\n" for n, word in every)


@pytest.mark.parametrize("ending", ["csv", "csv.gz", "csv.zst", "json", "json.gz", "json.zst"])
def test_of_text_the_start_is_read_up_to_the_end_of_a_row(tmp_path, monkeypatch, ending):
    monkeypatch.setattr(formats, "START_BYTES", 1_001)  # ends within rows, quotes and numbers
    form: Format = "csv" if "csv" in ending else "json"
    content, files = text_of(form, 20_000).encode(), dict[SourceFile, Format]()
    for number in range(3):
        path = tmp_path / f"{number}.{ending}"
        path.write_bytes(PACK.get(ending.rpartition(".")[2], bytes)(content))
        files[path] = form
    size = sum(path.stat().st_size for path in tmp_path.iterdir()) * (4 if "." in ending else 1)
    assert choose_sample(files, size) is None
    chosen = choose_sample(files, size // 12)  # of six bytes each: half of the files
    assert chosen is not None
    assert chosen.scale == pytest.approx(2.0, abs=0.01)
    for numbers in read(files, chosen, tmp_path / "home").values():
        assert numbers == list(range(len(numbers)))
        # Zstandard is unpacked up to 128 kB ahead, which is much of so small a file.
        assert len(numbers) == pytest.approx(10_000, rel=0.4 if ending.endswith("zst") else 0.15)


def test_of_avro_some_files_are_read_whole(tmp_path):
    fastavro = pytest.importorskip("fastavro", reason="needs `make setup EXTRAS=avro`")
    schema = fastavro.parse_schema({"type": "record", "name": "r", "fields": [{"name": "n", "type": "long"}]})
    files = dict[SourceFile, Format]()
    for number in range(6):
        path = tmp_path / f"{number}.avro"
        with path.open("wb") as stream:
            fastavro.writer(stream, schema, [{"n": n} for n in range(500)])
        files[path] = "avro"
    size = sum(path.stat().st_size for path in tmp_path.iterdir())
    chosen = choose_sample(files, size // 17)
    assert chosen is not None
    found = read(files, chosen, tmp_path / "home")
    assert list(found) == ["0.avro", "5.avro"]
    assert [len(numbers) for numbers in found.values()] == [500, 500]
    assert chosen.scale == pytest.approx(3.0, abs=0.1)


def test_files_of_several_formats_are_read_whole(tmp_path):
    files: dict[SourceFile, Format] = {tmp_path / "a.csv": "csv", tmp_path / "b.parquet": "parquet"}
    assert choose_sample(files, 1) is None
