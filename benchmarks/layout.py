"""Cost of reading a tenth of a wide table, by layout. Each step adds one change to the steps before it.

    python -m benchmarks.layout [--features 2000] [--rows 8192] [--rounds 3] [--json]

Source:
    Zhao et al. 2022, arXiv:2108.09373, the table of co-designed optimisations: map column -> flat columns -> coalesced
    reads -> popular features side by side -> large stripes (row groups).
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from benchmarks.machine import describe_machine, machine, say
from storage.layout.spec import Layout
from storage.ranges import RangeFile, find_chunks, merge_ranges
from storage.reader import READ_OPTIONS
from storage.writer import write_parquet

COVERAGE, LENGTH = 0.45, 3
"""Share of rows with a value of a feature, and ids of a list that is not empty."""
PACKAGES = ("pyarrow", "numpy")
SMALL_GROUPS = 8
"""Row groups of the table. The last step has one."""
DISK_SECONDS, DISK_BYTES = 0.008, 150e6
"""The disk model: seconds until a read starts, then bytes per second."""


def main(words: Sequence[str]) -> None:
    """Measures and prints a table or JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--features", type=int, default=2_000)
    parser.add_argument("--rows", type=int, default=8_192)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--gap-bytes", type=int, default=65_536)
    parser.add_argument("--json", action="store_true")
    chosen = parser.parse_args(words)
    figures = {
        "steps": ladder(chosen.features, chosen.rows, chosen.rounds, chosen.gap_bytes),
        "features": chosen.features,
        "rows": chosen.rows,
        "gap_bytes": chosen.gap_bytes,
        "machine": machine(PACKAGES),
    }
    print(json.dumps(figures) if chosen.json else as_text(figures))


def ladder(features: int, rows: int, rounds: int, gap_bytes: int) -> dict[str, dict[str, float]]:
    """Returns the figures of each step."""
    draw = np.random.default_rng(1)
    flat = flat_table(draw, features, rows)
    wanted = sorted(draw.choice(flat.column_names, features // 10, replace=False).tolist())
    groups = max(1, rows // SMALL_GROUPS)
    plain = Layout(row_group_rows=groups, file_rows=rows)
    popular = plain.model_copy(update={"first": tuple(wanted)})
    large = popular.model_copy(update={"row_group_rows": rows})
    steps = (
        ("map column", as_maps(flat), plain, ["numbers", "lists"], 0),
        ("flat columns", flat, plain, wanted, 0),
        ("coalesced reads", flat, plain, wanted, gap_bytes),
        ("popular first", flat, popular, wanted, gap_bytes),
        ("large row groups", flat, large, wanted, gap_bytes),
    )
    found: dict[str, dict[str, float]] = {}
    needed = 0
    with tempfile.TemporaryDirectory(prefix="dlrm-layout-") as folder:
        for name, table, layout, columns, gap in steps:
            path = Path(folder) / "table.parquet"
            with pa.OSFile(str(path), "wb") as stream:
                write_parquet(stream, table.select(layout.in_order(table.column_names)), layout)
            one = read(path, columns, gap, set(wanted), rounds)
            needed = needed or rows * len(wanted)
            modelled = one["reads"] * DISK_SECONDS + one["bytes_read"] / DISK_BYTES
            found[name] = one | {"rows_per_second": rows / one["seconds"], "disk_rows_per_second": rows / modelled}
            say(f"{name}: {found[name]}")
    first = next(iter(found.values()))
    return {
        name: one | {f"{what}_x": one[what] / first[what] for what in ("rows_per_second", "disk_rows_per_second")}
        for name, one in found.items()
    }


def read(path: Path, columns: list[str], gap: int, wanted: set[str], rounds: int) -> dict[str, float]:
    """Reads features as Arrow columns on one thread, with the file in the page cache, and returns the figures."""
    seconds = []
    for _ in range(rounds):
        began = time.perf_counter()
        reads = size = 0
        metadata = pq.read_metadata(path)
        for number in range(metadata.num_row_groups):
            ranges = merge_ranges(list(find_chunks(metadata.row_group(number), set(columns))), gap)
            reads, size = reads + len(ranges), size + sum(part.end - part.begin for part in ranges)
            source = pa.PythonFile(RangeFile(pa.OSFile(str(path)), ranges), "r")
            file = pq.ParquetFile(source, metadata=metadata, pre_buffer=False, **READ_OPTIONS)
            rows = file.read_row_group(number, columns, use_threads=False)
            if columns == ["numbers", "lists"]:
                for column in columns:
                    features_of(rows[column], wanted)
            del rows
        seconds.append(time.perf_counter() - began)
    return {"seconds": statistics.median(seconds), "bytes_read": size, "reads": reads, "mean_read_bytes": size / reads}


def flat_table(draw: np.random.Generator, features: int, rows: int) -> pa.Table:
    """Makes alternating columns of numbers and lists of ids, with nulls. A feature's name ends in its number."""
    columns: dict[str, pa.Array] = {}
    for i in range(features):
        absent = draw.random(rows) >= COVERAGE
        if i % 2:
            columns[f"f{i}"] = pa.array(draw.random(rows).astype(np.float32), mask=absent)
            continue
        lengths = np.where(absent, 0, draw.integers(1, 2 * LENGTH, rows))
        offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
        ids = pa.array((draw.pareto(1.0, int(offsets[-1])) * 100).astype(np.int64) % 1_000_000)
        columns[f"f{i}"] = pa.LargeListArray.from_arrays(pa.array(offsets), ids, mask=pa.array(absent))
    return pa.table(columns)


def as_maps(flat: pa.Table) -> pa.Table:
    """Converts the rows to two map columns: feature -> number and feature -> list."""
    parts = {"numbers": flat.column_names[1::2], "lists": flat.column_names[::2]}
    return pa.table({name: _map(flat.select(columns)) for name, columns in parts.items()})


def _map(flat: pa.Table) -> pa.Array:
    rows = flat.num_rows
    present = np.stack([pc.is_valid(column).combine_chunks().to_numpy(zero_copy_only=False) for column in flat.columns])
    offsets = np.concatenate([[0], np.cumsum(present.sum(axis=0))]).astype(np.int32)
    row, feature = np.nonzero(present.T)
    kind = pa.large_list(pa.int64()) if pa.types.is_large_list(flat.schema.types[0]) else pa.float32()
    values = pa.concat_arrays([column.combine_chunks().cast(kind) for column in flat.columns])
    keys = np.array([int(name[1:]) for name in flat.column_names], np.int32)[feature]
    return pa.MapArray.from_arrays(pa.array(offsets), pa.array(keys), values.take(pa.array(feature * rows + row)))


def features_of(column: pa.ChunkedArray, wanted: set[str]) -> dict[str, tuple[npt.NDArray[Any], pa.Array]]:
    """Reads features from a map column. Returns, for each, the rows that have it and its values."""
    found = {}
    for chunk in column.chunks:
        offsets = chunk.offsets.to_numpy()
        keys = chunk.keys.to_numpy()[offsets[0] : offsets[-1]]
        rows = np.repeat(np.arange(len(chunk)), np.diff(offsets))
        numbers = np.array(sorted(int(name[1:]) for name in wanted), np.int32)
        mine = np.flatnonzero(np.isin(keys, numbers))
        mine = mine[np.argsort(keys[mine], kind="stable")]
        items = chunk.items.slice(offsets[0]).take(pa.array(mine))
        bounds = np.searchsorted(keys[mine], [*numbers, np.iinfo(np.int32).max])
        for number, begin, end in zip(numbers, bounds[:-1], bounds[1:], strict=True):
            found[f"f{number}"] = (rows[mine[begin:end]], items.slice(begin, end - begin))
    return found


def as_text(figures: dict[str, Any]) -> str:
    """Formats the figures as a Markdown table."""
    lines = [
        "| step | MB read | reads | mean read KB | worker rows/s | x | modelled disk rows/s | x |",
        "|---" * 8 + "|",
    ]
    lines += [
        f"| {name} | {one['bytes_read'] / 1e6:.1f} | {one['reads']:,} | {one['mean_read_bytes'] / 1e3:,.1f} "
        f"| {one['rows_per_second']:,.0f} | {one['rows_per_second_x']:.2f} "
        f"| {one['disk_rows_per_second']:,.0f} | {one['disk_rows_per_second_x']:.2f} |"
        for name, one in figures["steps"].items()
    ]
    return "\n".join([*lines, "", describe_machine(figures["machine"])])


if __name__ == "__main__":
    main(sys.argv[1:])
