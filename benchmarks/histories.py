"""Histories cut from a log of events beside the same lists stored in the rows.

    python -m benchmarks.histories [--rows 200000] [--events 2000000] [--users 20000] [--lengths 20 200] [--json]
    python -m benchmarks.histories --lengths 20 200 2000 --rows 20000 --users 500 --session-rows 10 --order session

One generated log of events, and samples at random times, or in sessions of samples a minute apart. `stored` has the
list of each sample in its row; `cut` has it cut from the log while rows are read. Rows are in the order of time, or
those of a session follow one another. `stored, short` and `cut, short` are a second model, which reads the newest
events from the same files. Both ways give the same features.

Figures are bytes of all Parquet files and of the sorted files, bytes of columns that an epoch reads, seconds to open
(also the first time, which sorts the log), rows per second of one worker in one thread (reading and transforming), and
the memory of its process: its peak, and its own at the end, without pages of files that processes share. Every pass
runs in its own process. A first pass of each way is not among the rounds, each of which runs all.
"""

import argparse
import datetime
import hashlib
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pyarrow as pa

from benchmarks.machine import ROOT, describe_machine, machine, say
from pipeline.data.joined.index import cut_lists
from pipeline.data.joined.reader import SORTED, joined_schema
from pipeline.data.joined.sorting import SortedLayout, open_sorted
from pipeline.data.joined.source import SourceRows, pin_sources
from pipeline.data.selection import Selection
from pipeline.preprocessing.dataset import DataSpec
from pipeline.preprocessing.epoch.memory import PrivateWriter
from pipeline.preprocessing.epoch.splits import Split
from pipeline.preprocessing.worker import Worker
from pipeline.transforms.joins import History
from pipeline.transforms.plan.plan import build_plan
from pipeline.transforms.schema import FeatureSchema
from storage.config import WarehouseConfig
from storage.snapshot.writing import replace_days
from storage.warehouse import Warehouse

START, DAYS, DAY_SECONDS = datetime.date(2025, 3, 1), 10, 86_400
ITEMS = 1_000_000
PACKAGES = ("pyarrow", "numpy", "numba")
FIGURES = ("read_megabytes", "open_seconds", "rows_per_second", "peak_megabytes", "own_megabytes")


def main(words: Sequence[str]) -> None:
    """Measures and prints a table or JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=200_000, help="samples")
    parser.add_argument("--events", type=int, default=2_000_000)
    parser.add_argument("--users", type=int, default=20_000)
    parser.add_argument("--lengths", type=int, nargs="+", default=[20, 200])
    parser.add_argument("--short", type=int, default=20, help="events of a second model that reads the same files")
    parser.add_argument("--session-rows", type=int, default=1, help="samples of a session")
    parser.add_argument("--order", choices=("time", "session"), default="time", help="of the samples in a day")
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
            found[length] = compare(Path(folder), chosen, length)
        say(f"{length}: {found[length]}")
    sizes = {name: getattr(chosen, name) for name in ("rows", "events", "users", "session_rows", "order", "rounds")}
    figures = {"lengths": found, "machine": machine(PACKAGES)} | sizes
    print(json.dumps(figures) if chosen.json else as_text(figures))


def compare(folder: Path, chosen: argparse.Namespace, length: int) -> dict[str, Any]:
    """Returns way -> its bytes and the medians of its other figures."""
    samples, log = generate(chosen.rows, chosen.events, chosen.users, chosen.session_rows, chosen.order)
    specs = tables(folder, samples, log, length, chosen.short)
    passes: dict[str, list[dict[str, Any]]] = {way: [] for way in specs}
    for _ in range(chosen.rounds + 1):
        for way, spec in specs.items():
            path = folder / "spec.json"
            path.write_text(spec.model_dump_json(), encoding="utf-8")
            command = [sys.executable, "-m", "benchmarks.histories", "--spec", str(path)]
            done = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
            passes[way].append(json.loads(done.stdout))
    for way, several in passes.items():
        if len({one["digest"] for one in [*several, *passes[way.replace("stored", "cut")]]}) > 1:
            raise RuntimeError("the ways give different features")
    return {
        way: {name: median(one[name] for one in several[1:]) for name in FIGURES}
        | {"first_open_seconds": several[0]["open_seconds"]}
        | {"megabytes": _megabytes(Path(specs[way].home).rglob("*.parquet"))}
        | {"sorted_megabytes": _megabytes((Path(specs[way].home) / SORTED).rglob("*"))}
        for way, several in passes.items()
    }


def _megabytes(files: Iterable[Path]) -> float:
    return sum(file.stat().st_size for file in files if file.is_file()) / 1e6


def generate(rows: int, events: int, users: int, session_rows: int = 1, order: str = "time") -> tuple[pa.Table, ...]:
    """Returns the samples, in the order of time or a day's sessions one after the other, and the log."""
    random = np.random.default_rng(1)
    span = DAYS * DAY_SECONDS
    happened = np.sort(random.integers(0, span, events))
    log = pa.table(
        {
            "day": _days(happened),
            "time": _moments(happened),
            "user": random.integers(0, users, events),
            "item": (ITEMS * random.random(events) ** 3).astype(np.int64),
        }
    )
    row = np.arange(rows)
    session = row // session_rows
    at = random.integers(0, span - 60 * session_rows, session[-1] + 1)[session] + 60 * (row % session_rows)
    user = random.integers(0, users, session[-1] + 1)[session]
    keys = (at,) if order == "time" else (at, session, user, at // DAY_SECONDS)
    place = np.lexsort(keys)
    samples = pa.table(
        {
            "day": _days(at[place]), "at": _moments(at[place]), "user": user[place],
            "num": random.normal(size=rows), "label": random.integers(0, 2, rows),
        }
    )  # fmt: skip
    return samples, log


def tables(
    folder: Path, samples: pa.Table, log: pa.Table, length: int, short: int | None = None
) -> dict[str, DataSpec]:
    """Writes both tables of samples, and the log. Returns the way -> what a worker reads.

    Args:
        short: Events of a second model that reads the same files. None, or not below `length`: there is none.
    """
    events = SourceRows(
        [log.column("user").combine_chunks()], _micros(log.column("time")), [log.column("item").combine_chunks()]
    )
    layout = SortedLayout([pa.int64()], [pa.int64()], unique=False)
    index = open_sorted(lambda _: iter([("all", events)]), {"all": "1"}, layout, folder / "lists", "log")
    found = index.find([samples.column("user").combine_chunks()], _micros(samples.column("at")), 0, until=False)
    (lists,) = cut_lists(index.values, np.maximum(found.first, found.end - length), found.end)
    _write(folder / "stored", {"samples": samples.append_column("seen_item", lists)})
    _write(folder / "cut", {"samples": samples, "log": log})
    lengths = {"": length} | ({", short": short} if short is not None and short < length else {})
    return {
        f"{way}{name}": _spec(folder / way, samples, events, cut=way == "cut")
        for name, events in lengths.items()
        for way in ("stored", "cut")
    }


def _write(home: Path, tables: Mapping[str, pa.Table]) -> None:
    warehouse = Warehouse(WarehouseConfig(), home)
    for name, rows in tables.items():
        days = dict.fromkeys(rows.column("day").unique().to_pylist(), "x")
        replace_days(warehouse, name, days, rows.schema, rows.to_batches(), rows.num_rows)


def _spec(home: Path, samples: pa.Table, length: int, cut: bool) -> DataSpec:
    """Returns the dataset of a model that reads lists of `length` events."""
    config = WarehouseConfig()
    warehouse = Warehouse(config, home)
    history = History(table="log", on="user", time="time", as_of="at", last=length, columns=["item"], prefix="seen_")
    joined = pin_sources([history] if cut else [], home, warehouse)
    hashed = {"kind": "sigrid_hash", "size": 100_000}
    seen = [hashed] if cut else [{"kind": "first_x", "limit": length}, hashed]
    sparse = [{"columns": ["user"], "transforms": [hashed]}, {"columns": ["seen_item"], "transforms": seen}]
    schema = FeatureSchema.model_validate({"dense": [{"columns": ["num"]}], "sparse": sparse})
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
    next(iter(worker._read_chunks(fragments[0], worker.reader)))  # noqa: SLF001
    opened = time.perf_counter()
    rows, read, digest = 0, 0, hashlib.sha256()
    for fragment in fragments:
        writer = PrivateWriter()
        some, costs = worker.transform_split(Split(fragments=(fragment,)), writer)
        rows, read = rows + some, read + costs.bytes_read
        for name, array in sorted(writer.finish().items()):
            digest.update(name.encode() + array.tobytes())
    seconds = time.perf_counter() - opened
    return {
        "open_seconds": opened - warm, "rows_per_second": rows / seconds, "digest": digest.hexdigest(),
        "read_megabytes": read / 1e6,
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
    return pa.array(((START - datetime.date(1970, 1, 1)).days + seconds // DAY_SECONDS).astype(np.int32)).cast(
        pa.date32()
    )


def _micros(times: pa.ChunkedArray) -> pa.Array:
    return times.combine_chunks().cast(pa.int64())


def as_text(figures: dict[str, Any]) -> str:
    """Formats the figures as a table."""
    header = f"{'events':>7} {'':14} {'MB':>9} {'sorted':>9} {'read MB':>8} {'first s':>8} {'open s':>8} {'rows/s':>10}"
    lines = [describe_machine(figures["machine"]), f"{header} {'peak MB':>8} {'own MB':>8}"]
    for length, ways in figures["lengths"].items():
        for way, one in ways.items():
            lines.append(
                f"{length:>7} {way:14} {one['megabytes']:>9.1f} {one['sorted_megabytes']:>9.1f}"
                f" {one['read_megabytes']:>8.1f} {one['first_open_seconds']:>8.2f} {one['open_seconds']:>8.2f}"
                f" {one['rows_per_second']:>10,.0f} {one['peak_megabytes']:>8.0f} {one['own_megabytes']:>8.0f}"
            )
    return "\n".join(lines)


if __name__ == "__main__":
    main(sys.argv[1:])
