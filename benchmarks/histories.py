"""Histories cut from a log of events beside the same lists stored in the rows.

    python -m benchmarks.histories [--rows 200000] [--events 2000000] [--users 20000] [--lengths 20 200] [--json]

One generated log of events, and samples at random times. `stored` has the list of each sample in its row, in the order
of time; `cut` has it cut from the log while rows are read. Both give the same features. Figures are bytes of all files,
seconds to open (also the first time, which sorts the log), rows per second of one worker in one thread (reading and
transforming), and the memory of its process: its peak, and its own at the end, without pages of files that processes
share. Every pass runs in its own process. A first pass of each way is not among the rounds, each of which runs both.
"""

import argparse
import datetime
import hashlib
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pyarrow as pa

from benchmarks.machine import ROOT, describe_machine, machine, say
from pipeline.data.joined.index import cut_lists
from pipeline.data.joined.reader import joined_schema
from pipeline.data.joined.sorting import SortedLayout, open_sorted
from pipeline.data.joined.source import SourceRows, pin_sources
from pipeline.data.selection import Selection
from pipeline.preprocessing.dataset import DataSpec
from pipeline.preprocessing.memory import PrivateWriter
from pipeline.preprocessing.splits import Split
from pipeline.preprocessing.worker import Worker
from pipeline.transforms.joins import History
from pipeline.transforms.plan.plan import build_plan
from pipeline.transforms.schema import FeatureSchema
from storage.config import WarehouseConfig
from storage.warehouse import Warehouse

START, DAYS = datetime.date(2025, 3, 1), 10
ITEMS = 1_000_000
PACKAGES = ("pyarrow", "numpy", "numba")
WAYS = ("stored", "cut")
FIGURES = ("open_seconds", "rows_per_second", "peak_megabytes", "own_megabytes")


def main(words: Sequence[str]) -> None:
    """Measures and prints a table or JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=200_000, help="samples")
    parser.add_argument("--events", type=int, default=2_000_000)
    parser.add_argument("--users", type=int, default=20_000)
    parser.add_argument("--lengths", type=int, nargs="+", default=[20, 200])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--spec", help=argparse.SUPPRESS)
    chosen = parser.parse_args(words)
    if chosen.spec:
        print(json.dumps(read_all(DataSpec.model_validate_json(Path(chosen.spec).read_text(encoding="utf-8")))))
        return
    found: dict[int, dict[str, Any]] = {}
    for length in chosen.lengths:
        with tempfile.TemporaryDirectory(prefix="dlrm-histories-") as folder:
            found[length] = compare(Path(folder), chosen.rows, chosen.events, chosen.users, length, chosen.rounds)
        say(f"{length}: {found[length]}")
    figures = {"lengths": found, "machine": machine(PACKAGES)}
    print(json.dumps(figures) if chosen.json else as_text(figures))


def compare(folder: Path, rows: int, events: int, users: int, length: int, rounds: int) -> dict[str, Any]:
    """Returns way -> medians of its figures."""
    specs = tables(folder, rows, events, users, length)
    passes: dict[str, list[dict[str, Any]]] = {way: [] for way in WAYS}
    for _ in range(rounds + 1):
        for way, spec in specs.items():
            path = folder / f"{way}.json"
            path.write_text(spec.model_dump_json(), encoding="utf-8")
            command = [sys.executable, "-m", "benchmarks.histories", "--spec", str(path)]
            done = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
            passes[way].append(json.loads(done.stdout))
    if len({one["digest"] for several in passes.values() for one in several}) > 1:
        raise RuntimeError("the ways give different features")
    return {
        way: {name: median(one[name] for one in several[1:]) for name in FIGURES}
        | {"first_open_seconds": several[0]["open_seconds"]}
        | {"megabytes": sum(file.stat().st_size for file in (folder / way).rglob("*.parquet")) / 1e6}
        for way, several in passes.items()
    }


def tables(folder: Path, rows: int, events: int, users: int, length: int) -> dict[str, DataSpec]:
    """Writes both tables of samples, and the log. Returns the way -> what a worker reads."""
    random = np.random.default_rng(1)
    span = DAYS * 86_400
    happened = np.sort(random.integers(0, span, events))
    log = pa.table(
        {
            "day": _days(happened),
            "time": _moments(happened),
            "user": random.integers(0, users, events),
            "item": (ITEMS * random.random(events) ** 3).astype(np.int64),
        }
    )
    at = np.sort(random.integers(0, span, rows))
    samples = pa.table(
        {
            "day": _days(at), "at": _moments(at), "user": random.integers(0, users, rows),
            "num": random.normal(size=rows), "label": random.integers(0, 2, rows),
        }
    )  # fmt: skip
    events = SourceRows(
        [log.column("user").combine_chunks()], _micros(log.column("time")), [log.column("item").combine_chunks()]
    )
    layout = SortedLayout([pa.int64()], [pa.int64()], unique=False)
    index = open_sorted(lambda: iter([events]), layout, folder / "sorted", "log")
    found = index.find([samples.column("user").combine_chunks()], _micros(samples.column("at")), 0, until=False)
    (lists,) = cut_lists(index.values, np.maximum(found.first, found.end - length), found.end)
    history = History(table="log", on="user", time="time", as_of="at", last=length, columns=["item"], prefix="seen_")
    return {
        "stored": _spec(folder / "stored", samples.append_column("seen_item", lists), None, None),
        "cut": _spec(folder / "cut", samples, log, history),
    }


def _spec(home: Path, samples: pa.Table, log: pa.Table | None, history: History | None) -> DataSpec:
    config = WarehouseConfig()
    warehouse = Warehouse(config, home)
    for name, rows in {"samples": samples, "log": log}.items():
        if rows is not None:
            days = dict.fromkeys(rows.column("day").unique().to_pylist(), "x")
            warehouse.replace_days(name, days, rows.schema, rows.to_batches(), rows.num_rows)
    joined = pin_sources([] if history is None else [history], home, warehouse)
    hashed = [{"kind": "sigrid_hash", "size": 100_000}]
    schema = FeatureSchema.model_validate(
        {"dense": [{"columns": ["num"]}], "sparse": [{"columns": ["user", "seen_item"], "transforms": hashed}]}
    )
    snapshot = warehouse.current("samples")
    days = tuple(START + datetime.timedelta(days=i) for i in range(DAYS))
    plan = build_plan(schema, joined_schema(warehouse, snapshot, joined))
    fitted = plan.fit(lambda: iter([samples.slice(0, 10_000).select(["num"])]))
    return DataSpec(
        warehouse=config, home=str(home), snapshot=snapshot, selection=Selection(days=days), plan=fitted,
        label="label", joined=joined,
    )  # fmt: skip


def read_all(spec: DataSpec) -> dict[str, Any]:
    """Reads and transforms all rows, after one row group that opens everything and compiles."""
    began = time.perf_counter()
    worker = Worker(spec)
    worker.warm_up()
    fragments = worker.fragments()
    warm = time.perf_counter()
    next(iter(worker._read_chunks(fragments[0])))
    opened = time.perf_counter()
    rows, digest = 0, hashlib.sha256()
    for fragment in fragments:
        writer = PrivateWriter()
        rows += worker.transform_split(Split(fragments=(fragment,)), writer)[0]
        for name, array in sorted(writer.finish().items()):
            digest.update(name.encode() + array.tobytes())
    seconds = time.perf_counter() - opened
    return {
        "open_seconds": opened - warm, "rows_per_second": rows / seconds, "digest": digest.hexdigest(),
        "peak_megabytes": _memory("VmHWM"), "own_megabytes": _memory("RssAnon"), "warm_seconds": warm - began,
    }  # fmt: skip


def _memory(name: str) -> float:
    """Returns a figure of this process in megabytes. The peak of getrusage would count its parent's, too."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return int(status.partition(f"{name}:")[2].split()[0]) / 1e3


def _moments(seconds: Any) -> pa.Array:
    start = int(datetime.datetime.combine(START, datetime.time(), datetime.UTC).timestamp())
    return pa.array((start + seconds) * 1_000_000, pa.int64()).cast(pa.timestamp("us"))


def _days(seconds: Any) -> pa.Array:
    """Returns the day of each time, in seconds since START."""
    return pa.array(((START - datetime.date(1970, 1, 1)).days + seconds // 86_400).astype(np.int32)).cast(pa.date32())


def _micros(times: pa.ChunkedArray) -> pa.Array:
    return times.combine_chunks().cast(pa.int64())


def as_text(figures: dict[str, Any]) -> str:
    """Formats the figures as a table."""
    header = f"{'events':>7} {'':8} {'MB':>9} {'first s':>8} {'open s':>8} {'rows/s':>10} {'peak MB':>8} {'own MB':>8}"
    lines = [describe_machine(figures["machine"]), header]
    for length, ways in figures["lengths"].items():
        for way, one in ways.items():
            lines.append(
                f"{length:>7} {way:8} {one['megabytes']:>9.1f} {one['first_open_seconds']:>8.2f}"
                f" {one['open_seconds']:>8.2f} {one['rows_per_second']:>10,.0f} {one['peak_megabytes']:>8.0f}"
                f" {one['own_megabytes']:>8.0f}"
            )
    return "\n".join(lines)


if __name__ == "__main__":
    main(sys.argv[1:])
