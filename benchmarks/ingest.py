"""A first ingest beside DuckDB's own join and write of the same files, in turns.

    python -m benchmarks.ingest [--kinds logs samples csv json] [--days 8] [--rows 250000] [--columns 16] [--rounds 5]
    python -m benchmarks.ingest --kinds samples --days 120 --rows 10000 --columns 300 --rounds 3

Kinds are those of `benchmarks.growth`. Ours is what the command accounts for (`seconds`), from its first look at the
files to the last commit, with checks and statistics, less the same on a day of 1,000 rows. DuckDB reads the same files,
joins outcomes inside the window, and writes zstd Parquet by day, in row groups of 65,536, on as many threads; it checks
and measures nothing. `ratio` is ours over DuckDB's, medians. Avro, which DuckDB reads with an extension alone, stands
beside fastavro's reader, which makes a Python object of each row and keeps none.
"""

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median

import duckdb

from benchmarks.growth import KINDS, PACKAGES, Source
from benchmarks.machine import as_table, machine, say

READERS = {"parquet": "read_parquet", "csv.gz": "read_csv", "json.gz": "read_json_auto"}


def main(words: Sequence[str]) -> None:
    """Measures and prints a table or JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--kinds", nargs="+", choices=("logs", "samples", "csv", "json", "avro"), default=["logs", "csv", "json"]
    )
    parser.add_argument("--days", type=int, default=8)
    parser.add_argument("--rows", type=int, default=250_000, help="of a day")
    parser.add_argument("--columns", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    chosen = parser.parse_args(words)
    found = {kind: compare(kind, chosen.days, chosen.rows, chosen.columns, chosen.rounds) for kind in chosen.kinds}
    sizes = {name: getattr(chosen, name) for name in ("days", "rows", "columns", "rounds")}
    figures = {"kinds": found, "machine": machine(PACKAGES)} | sizes
    table = {kind: {name: round(value, 2) for name, value in one.items()} for kind, one in found.items()}
    print(json.dumps(figures) if chosen.json else as_table("kind", table, figures))


def compare(kind: str, days: int, rows: int, columns: int, rounds: int) -> dict[str, float]:
    """Returns the medians of both ways in seconds, and their ratio."""
    ours: list[float] = []
    theirs: list[float] = []
    with tempfile.TemporaryDirectory(prefix="dlrm-ingest-") as folder:
        small, source = (
            Source(Path(folder, "small"), kind, 1_000, columns),
            Source(Path(folder, "all"), kind, rows, columns),
        )
        small.write(1)
        source.write(days)
        for number in range(rounds):
            start = _first(small)
            ours.append(_first(source) - start)
            theirs.append((_fastavro if kind == "avro" else _duckdb)(source, days * rows))
            say(f"{kind}, round {number}: {ours[-1]:.2f} s and {theirs[-1]:.2f} s")
    return {"ours": median(ours), "theirs": median(theirs), "ratio": median(ours) / median(theirs)}


def _first(source: Source) -> float:
    """Returns the seconds of an ingest into a new home."""
    shutil.rmtree(source.folder / "home", ignore_errors=True)
    return float(sum(source.run()[1]["seconds"].values()))


def _fastavro(source: Source, rows: int) -> float:
    import fastavro  # an extra

    begun, read = time.perf_counter(), 0
    for path in (source.folder / "rows").glob("*.avro"):
        with path.open("rb") as stream:
            read += sum(1 for _ in fastavro.reader(stream))
    if read != rows:
        raise RuntimeError(f"fastavro read {read} rows of {rows}")
    return time.perf_counter() - begun


def _duckdb(source: Source, rows: int) -> float:
    ending, out = KINDS[source.kind], source.folder / "duckdb"
    files = f"{READERS[ending]}('{source.folder}/{{}}/*.{ending}')"
    shown = f"SELECT * REPLACE (event_time::TIMESTAMP AS event_time) FROM {files.format('rows')}"
    query = f"SELECT *, event_time::DATE AS day FROM ({shown})"
    if source.kind == "logs":
        inside = (
            f"SELECT DISTINCT s.impression_id AS key FROM {files.format('outcomes')} o JOIN ({shown}) s"
            " USING (impression_id) WHERE o.outcome_time >= s.event_time"
            " AND o.outcome_time < s.event_time + INTERVAL 600 SECOND"
        )
        query = (
            f"SELECT s.*, (f.key IS NOT NULL)::INTEGER AS label, event_time::DATE AS day FROM ({shown}) s"
            f" LEFT JOIN ({inside}) f ON f.key = s.impression_id"
        )
    options = "FORMAT parquet, COMPRESSION zstd, PARTITION_BY (day), ROW_GROUP_SIZE 65536"
    with duckdb.connect() as connection:
        connection.execute(f"SET threads = {len(os.sched_getaffinity(0))}")
        begun = time.perf_counter()
        connection.execute(f"COPY ({query}) TO '{out}' ({options})")
        seconds = time.perf_counter() - begun
        written = connection.execute(f"SELECT count(*) FROM '{out}/**/*.parquet'").fetchall()[0][0]
    shutil.rmtree(out)
    if written != rows:
        raise RuntimeError(f"DuckDB wrote {written} rows of {rows}")
    return seconds


if __name__ == "__main__":
    main(sys.argv[1:])
