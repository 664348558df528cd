"""Filters: reading the rows that pass, compared with decoding all rows and filtering them.

    python -m benchmarks.filters
    python -m benchmarks.filters --rows 262144 --rounds 5 --json

Makes a table of 13 numbers, 26 integers and 5 lists a row in row groups of 65,536 rows, three times: in random order,
sorted by the column of the filter (`ingest.order_by`), and sorted but without statistics, as another engine may write
it. The filters keep all rows, 10 % and .1 %. `decode all` decodes all columns of all rows and then filters with
`Table.filter`, as the reader did before. Both read the same files from the page cache with one thread, in turns. A
ratio is the median of the ratios of the rounds.
"""

import argparse
import datetime
import json
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyiceberg.expressions import LessThan

from benchmarks.machine import describe_machine, machine, say
from storage import writer
from storage.config import WarehouseConfig
from storage.reader import SnapshotRef
from storage.snapshot.writing import replace_days
from storage.warehouse import Warehouse

DAY = datetime.date(2025, 1, 6)
NUMBERS, INTEGERS, LISTS = 13, 26, 5
LONGEST = 10
SHARES = (1.0, 0.1, 0.001)
ORDERS = ("random", "sorted", "sorted, no statistics")
PACKAGES = ("pyarrow", "numpy", "pyiceberg")


def main(words: Sequence[str]) -> None:
    """Measures and prints a table or JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=524_288)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    chosen = parser.parse_args(words)
    with tempfile.TemporaryDirectory(prefix="dlrm-benchmark-") as folder:
        found = [result for order in ORDERS for result in measure(order, chosen.rows, chosen.rounds, Path(folder))]
    figures = {"rows": chosen.rows, "rounds": chosen.rounds, "results": found, "machine": machine(PACKAGES)}
    print(json.dumps(figures) if chosen.json else as_text(figures))


def measure(order: str, rows: int, rounds: int, folder: Path) -> list[dict[str, Any]]:
    """Returns the figures of each share of a table in one order."""
    say(f"writing {rows:,} rows, {order}")
    warehouse, snapshot = write(order, rows, folder / order.replace(",", "").replace(" ", "-"))
    found = []
    for share in SHARES:
        say(f"reading {share:.1%}")
        kept, before = filtered(warehouse, snapshot, share), decoded(warehouse, snapshot, share)
        if kept()[0] != before()[0]:
            raise SystemExit(f"{order}, {share}: other rows than without the filter")
        times = [(_seconds(kept), _seconds(before)) for _ in range(rounds)]
        _, read, skipped = kept()
        found.append(
            {
                "order": order, "share": share, "seconds": median(ours for ours, _ in times),
                "decode_all_seconds": median(theirs for _, theirs in times),
                "ratio": median(theirs / ours for ours, theirs in times),
                "bytes_read": read / before()[1], "row_groups_skipped": skipped,
            }
        )  # fmt: skip
    return found


def write(order: str, count: int, home: Path) -> tuple[Warehouse, SnapshotRef]:
    """Writes the table. Each row has a number `u` in [0, 1) of its own."""
    draw = np.random.default_rng(1)
    ends = np.cumsum(draw.integers(0, LONGEST, count))
    columns: dict[str, Any] = {"day": pa.array([DAY] * count, pa.date32()), "u": draw.permutation(count) / count}
    columns |= {f"d{i}": pa.array(draw.normal(size=count), pa.float32()) for i in range(NUMBERS)}
    columns |= {f"s{i}": draw.zipf(1.5, count) % 100_000 for i in range(INTEGERS)}
    for i in range(LISTS):
        offsets = pa.array(np.concatenate([[0], ends]))
        columns[f"l{i}"] = pa.LargeListArray.from_arrays(offsets, pa.array(draw.zipf(1.5, ends[-1]) % 100_000))
    rows = pa.table(columns)
    if order != "random":
        rows = rows.sort_by("u")
    warehouse = Warehouse(WarehouseConfig(), home)
    measured, writer.MEASURED_COLUMNS = writer.MEASURED_COLUMNS, 1 if "no statistics" in order else 64
    snapshot = replace_days(warehouse, "rows", {DAY: "i"}, rows.schema, rows.to_batches(), count)
    writer.MEASURED_COLUMNS = measured
    return warehouse, snapshot


Reading = Callable[[], tuple[int, int, int]]
"""Reads the rows. Returns their number, the bytes read and the row groups skipped."""


def filtered(warehouse: Warehouse, snapshot: SnapshotRef, share: float) -> Reading:
    """Reads the rows as trainings do."""

    def read() -> tuple[int, int, int]:
        columns = _features(warehouse, snapshot)
        reader = warehouse.reader(snapshot, columns, LessThan("u", share))  # type: ignore[call-arg, arg-type]
        rows = sum(len(batch) for one in reader.fragments() for batch in reader.batches(one))
        return rows, reader.bytes_read, reader.row_groups_skipped

    return read


def decoded(warehouse: Warehouse, snapshot: SnapshotRef, share: float) -> Reading:
    """Decodes everything, then filters."""
    keep = pc.field("u") < share

    def read() -> tuple[int, int, int]:
        columns = _features(warehouse, snapshot)
        reader, rows = warehouse.reader(snapshot, [*columns, "u"]), 0
        for one in reader.fragments():
            for batch in reader.batches(one):
                rows += len(pa.Table.from_batches([batch]).filter(keep).select(columns).combine_chunks())
        return rows, reader.bytes_read, 0

    return read


def _features(warehouse: Warehouse, snapshot: SnapshotRef) -> list[str]:
    return [name for name in warehouse.schema(snapshot).names if name not in ("day", "u")]


def _seconds(read: Reading) -> float:
    begin = time.perf_counter()
    read()
    return time.perf_counter() - begin


def as_text(figures: dict[str, Any]) -> str:
    """Formats the figures as a Markdown table."""
    lines = ["| Order | Rows kept | Seconds | Decode all | Times as fast | Bytes read | Row groups skipped |"]
    lines.append("| --- | --: | --: | --: | --: | --: | --: |")
    for one in figures["results"]:
        lines.append(
            f"| {one['order']} | {one['share']:.1%} | {one['seconds']:.2f} | {one['decode_all_seconds']:.2f} | "
            f"{one['ratio']:.2f} | {one['bytes_read']:.0%} | {one['row_groups_skipped']} |"
        )
    return "\n".join([describe_machine(figures["machine"]), "", *lines])


if __name__ == "__main__":
    main(sys.argv[1:])
