"""The ladder of DSI's table 12: a table of the paper's shape, read as maps, as columns and in popular order.

    python -m benchmarks.layout --shape RM1 --scale 0.25 --rows 4096
    python -m benchmarks.layout --warehouse s3://bucket/ladder --json

Makes a log of a model's shape, ingests it, records the reads of other jobs, and runs `flows.layout action=ladder`. The
addresses and keys of an object store come from Amazon's variables, as everywhere.

Source:
    Zhao et al. 2022, arXiv:2108.09373: features stored and read, coverage, lengths of lists (tables 5 and 7).
"""

import argparse
import datetime
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
import yaml

from benchmarks.machine import ROOT, describe_machine, machine, say
from storage.layout.reads import ReadRecord, record_read


class TableShape(NamedTuple):
    """Features of a model's table, and those that the model reads."""

    dense: int
    sparse: int
    dense_read: int
    sparse_read: int
    coverage: float
    """Mean share of rows with a value of a feature."""
    length: float
    """Mean ids of a list that is there."""


SHAPES = {
    "RM1": TableShape(12_115, 1_763, 1_221, 298, 0.45, 25.97),
    "RM2": TableShape(12_596, 1_817, 1_113, 306, 0.41, 25.57),
    "RM3": TableShape(5_707, 188, 504, 42, 0.29, 19.64),
}
DAY = datetime.date(2025, 1, 6)
NEXT_DAY = DAY + datetime.timedelta(days=1)
JOBS = 20
"""Other models that read the table. Each reads as many features as this one."""
POPULARITY = 0.8
"""A model reads the feature of rank r with a chance proportional to r ** -POPULARITY."""
LONGEST = 300
"""Longest list."""
HASH_SIZE, KEPT_IDS = 100_000, 50
PACKAGES = ("pyarrow", "numpy", "pyiceberg", "duckdb")


def main(words: Sequence[str]) -> None:
    """Measures and prints a table or JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="RM1")
    parser.add_argument("--scale", type=float, default=0.25, help="share of the features, stored and read")
    parser.add_argument("--rows", type=int, default=4_096, help="rows of each of two days")
    parser.add_argument("--warehouse", help="address of the warehouse's files; default: the temporary folder")
    parser.add_argument("--json", action="store_true")
    chosen = parser.parse_args(words)
    with tempfile.TemporaryDirectory(prefix="dlrm-benchmark-") as folder:
        figures = measure(SHAPES[chosen.shape], chosen.scale, chosen.rows, chosen.warehouse, Path(folder))
    figures |= {"shape": chosen.shape, "scale": chosen.scale, "machine": machine(PACKAGES)}
    print(json.dumps(figures) if chosen.json else as_text(figures))


def measure(shape: TableShape, scale: float, rows: int, warehouse: str | None, folder: Path) -> dict[str, Any]:
    """Returns the result of the command, with the newest record of what was read."""
    draw = np.random.default_rng(1)
    dense, sparse = round(shape.dense * scale), round(shape.sparse * scale)
    names = draw.permutation([*(f"d{i}" for i in range(dense)), *(f"s{i}" for i in range(sparse))]).tolist()
    say(f"making {len(names):,} features of {rows:,} rows")
    pq.write_table(make_log(draw, shape, names, 2 * rows), folder / "log.parquet")
    reads = (round(shape.dense_read * scale), round(shape.sparse_read * scale))
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(make_config(choose_features(draw, names, reads), folder, warehouse)))
    os.environ["DLRM_HOME"] = str(folder / "home")
    _run("ingest", path)
    now = datetime.datetime.now(datetime.UTC)
    for _ in range(JOBS):
        columns = tuple(choose_features(draw, names, reads))
        record_read(
            folder / "home" / "reads",
            ReadRecord(table="ladder", by="train", at=now, columns=columns, rows=rows, bytes_read=1, bytes_stored=1,
                       reads=1, seconds=1.0),
        )  # fmt: skip
    _run("preprocess", path)
    newest = max((folder / "home" / "reads" / "ladder").glob("*.json"), key=lambda path: path.stat().st_mtime_ns)
    record = ReadRecord.model_validate_json(newest.read_text())
    kept = {"read_percentiles", "popularity", "bytes_read", "bytes_stored", "reads"}
    return _run("layout", path, "action=ladder") | {"record": record.model_dump(include=kept)}


def _run(command: str, *words: Path | str) -> dict[str, Any]:
    say(f"flows.{command}")
    done = subprocess.run(
        [sys.executable, "-m", f"flows.{command}", *map(str, words)],
        cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True,
    )  # fmt: skip
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def make_log(draw: np.random.Generator, shape: TableShape, names: Sequence[str], rows: int) -> pa.Table:
    """Makes a log with a label. Popular features, the first of `names`, have more values and longer lists."""
    coverages = _ranked(draw, draw.beta(2.0, 2.0 * (1 / shape.coverage - 1), len(names)))
    lengths = _ranked(draw, draw.lognormal(0.0, 1.0, len(names)))
    lengths *= shape.length / lengths.mean()
    columns = {}
    for name, coverage, length in zip(names, coverages, lengths, strict=True):
        columns[name] = _column(draw, name, coverage, length, rows)
    known = {
        "day": pa.array([DAY, NEXT_DAY] * (rows // 2), pa.date32()),
        "label": pa.array((draw.random(rows) < 0.1).astype(np.int64)),
    }
    return pa.table(known | {name: columns[name] for name in sorted(names)})


def _ranked(draw: np.random.Generator, values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Orders values downwards, but for noise as large as their spread."""
    values = np.sort(values)[::-1]
    return values[np.argsort(np.arange(len(values)) + draw.normal(0.0, len(values) / 4, len(values)))]


def _column(draw: np.random.Generator, name: str, coverage: float, length: float, rows: int) -> pa.Array:
    absent = draw.random(rows) >= coverage
    if name.startswith("d"):
        return pa.array(draw.random(rows).astype(np.float32), mask=absent)
    lengths = np.where(absent, 0, np.minimum(draw.geometric(min(1.0, 1 / length), rows), LONGEST))
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    ids = pa.array((draw.pareto(1.0, int(offsets[-1])) * 100).astype(np.int64) % 1_000_000)
    return pa.ListArray.from_arrays(pa.array(offsets), ids, mask=pa.array(absent))


def choose_features(draw: np.random.Generator, names: Sequence[str], reads: tuple[int, int]) -> list[str]:
    """Chooses the dense and sparse features of a model, popular ones more often."""
    found = []
    for kind, count in zip("ds", reads, strict=True):
        known = [name for name in names if name.startswith(kind)]
        chances = np.arange(1, len(known) + 1) ** -POPULARITY
        found += draw.choice(known, count, replace=False, p=chances / chances.sum()).tolist()
    return sorted(found)


def make_config(features: Sequence[str], folder: Path, warehouse: str | None) -> dict[str, Any]:
    """Returns the config of a model that reads the features."""
    catalog = {"type": "sql", "uri": f"sqlite:///{folder}/catalog.db", "warehouse": warehouse}
    hashed = [{"kind": "first_x", "limit": KEPT_IDS}, {"kind": "sigrid_hash", "size": HASH_SIZE}]
    return {
        "name": "ladder",
        "source": {"path": str(folder / "log.parquet"), "day_column": "day"},
        "features": {
            "dense": [{"columns": [name for name in features if name.startswith("d")]}],
            "sparse": [{"columns": [name for name in features if name.startswith("s")], "transforms": hashed}],
        },
        "split": {"days": {"train": [f"{DAY}"], "test": [f"{NEXT_DAY}"]}},
        "preprocessing": {"executor": "inline"},
    } | ({} if warehouse is None else {"warehouse": {"catalog": catalog}})


def as_text(figures: dict[str, Any]) -> str:
    """Formats the figures as a Markdown table, with those of the paper."""
    lines = [
        "| step | MB read | reads | kB a read | p5 / p50 / p95 below, kB | a read, ms | worker | paper | storage "
        "| a disk | paper |",
        "|---" * 11 + "|",
    ]
    for number, one in enumerate(figures["steps"], 1):
        sizes = " / ".join(f"{int(one['read_percentiles'][at]) / 1e3:,.1f}" for at in ("5", "50", "95"))
        lines.append(
            f"| {number}. {one['adds']} | {one['bytes_read'] / 1e6:.1f} | {one['reads']:,} "
            f"| {one['bytes_read'] / one['reads'] / 1e3:,.1f} | {sizes} | {one['request_milliseconds']['50']:.2f} "
            f"| {one['worker']:.2f} | {one['published'][0]:.2f} | {one['storage']:.2f} | {one['disk']:.2f} "
            f"| {one['published'][1]:.2f} |"
        )
    record = figures["record"]
    share, alone = figures["read"] / figures["columns"], figures["steps"][1]
    lines += [
        "",
        f"{figures['columns']:,} columns stored, {figures['read']:,} ({share:.0%}) read; "
        f"{alone['bytes_read'] / alone['bytes_stored']:.0%} of the bytes; {record['popularity']['0.8']:.0%} of the "
        f"bytes give 80 % of the traffic of {figures['runs']} runs. {describe_machine(figures['machine'])}",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    main(sys.argv[1:])
