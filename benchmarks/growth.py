"""What a night costs after few days and after many: an ingest of one more day, and one with nothing to do.

    python -m benchmarks.growth [--days 8 1000] [--rows 2000] [--kinds logs samples csv json events] [--figure a.png]

Each kind is a source with one file a day: two logs (Parquet), samples with labels (Parquet, gzipped CSV, gzipped JSON
lines), and a log of events kept as a table. Figures are what `python -m flows.ingest` accounts for (`seconds`), from
its first look at the files to the last commit: its start differs by seconds. One more day is a new file of each log.
Rounds alternate between few and many days; each adds a day. Figures are medians, with the files that were opened.

With `--rewrite`: rewriting each day of a table, as `layout` does, a commit for each and small days together.

With `--history`: sorting a log of events for a history, whole and after one more day, of `--rows` events a day.

With `--commands`: a training that is done, `features`, `clean` with nothing to remove, `score` of one more day, and a
`recurring` that ingests and learns one more day, on samples with a small model. Whole commands, start included.
`--runs` copies a run and its version many times first, without the steps of its metrics.
"""

import argparse
import contextlib
import datetime
import json
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import duckdb
import matplotlib.pyplot as plt
import numpy as np
import pyarrow as pa

from benchmarks.machine import ROOT, as_table, describe_machine, machine, say
from pipeline.data.joined.sorting import SortedLayout, open_sorted
from pipeline.data.joined.source import SourceRows
from pipeline.registration.versions import IDENTITY
from storage.config import WarehouseConfig
from storage.layout.rewrite import rewrite_days
from storage.snapshot.writing import COMMIT_ROWS, in_commits, replace_days
from storage.warehouse import Warehouse

KINDS = {
    "logs": "parquet",
    "samples": "parquet",
    "csv": "csv.gz",
    "json": "json.gz",
    "avro": "avro",
    "events": "parquet",
}
"""Kind of a source -> ending of its files. Avro needs the extra of that name."""
OPTIONS = {
    "parquet": "(FORMAT parquet, COMPRESSION zstd)",
    "csv.gz": "(FORMAT csv, HEADER, COMPRESSION gzip)",
    "json.gz": "(FORMAT json, COMPRESSION gzip)",
}
START = datetime.date(2022, 1, 1)
PACKAGES = ("duckdb", "pyarrow", "pyiceberg")


def main(words: Sequence[str]) -> None:
    """Measures and prints a table or JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--days", type=int, nargs="+", default=[8, 1000])
    parser.add_argument("--rows", type=int, default=2_000, help="of a day")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=[kind for kind in KINDS if kind != "avro"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--history", action="store_true", help="sort a log of events")
    parser.add_argument("--rewrite", action="store_true", help="rewrite all days of a table")
    parser.add_argument("--commands", action="store_true", help="other commands than ingest")
    parser.add_argument("--runs", type=int, default=0, help="copies of a run in MLflow, where there are many days")
    parser.add_argument("--figure", type=Path, help="also draw the seconds by kind and days into this file")
    parser.add_argument("--json", action="store_true")
    chosen = parser.parse_args(words)
    if chosen.history or chosen.rewrite or chosen.commands:
        sizes = (chosen.days, chosen.rows, chosen.rounds)
        if chosen.commands:
            seconds = _compare_commands(*sizes, chosen.runs)
        else:
            seconds = (_compare_sorting if chosen.history else _compare_rewriting)(*sizes)
        figures = {"commands": seconds, "rows": chosen.rows, "rounds": chosen.rounds, "machine": machine(PACKAGES)}
        table = {
            name: {f"{count:,} days, s": round(value, 3 if chosen.rewrite else 2) for count, value in one.items()}
            for name, one in seconds.items()
        }
        print(json.dumps(figures) if chosen.json else as_table("command", table, figures))
        return
    found = {kind: _compare(kind, chosen.days, chosen.rows, chosen.rounds) for kind in chosen.kinds}
    figures = {"kinds": found, "rows": chosen.rows, "rounds": chosen.rounds, "machine": machine(PACKAGES)}
    if chosen.figure:
        _draw(found, chosen.rows, chosen.figure)
    print(json.dumps(figures) if chosen.json else _as_text(figures))


def _compare(kind: str, days: Sequence[int], rows: int, rounds: int) -> dict[str, Any]:
    """Returns number of days -> seconds of an ingest of one more day and of one with nothing to do."""
    with tempfile.TemporaryDirectory(prefix="dlrm-growth-") as folder:
        sources = {count: Source(Path(folder, f"{count}"), kind, rows) for count in days}
        for count, source in sources.items():
            source.write(count)
            say(f"{kind}: the first {count} days in {source.ingest()[0]:.1f} s")
        passes: dict[int, list[tuple[float, float, int]]] = {count: [] for count in days}
        for _ in range(rounds):
            for count in days:
                sources[count].write(1)
                one, opened = sources[count].ingest()
                nothing, none = sources[count].ingest()
                if none:
                    raise RuntimeError(f"{none} files were opened with nothing to do")
                passes[count].append((one, nothing, opened))
    figures = ("one_more_day_seconds", "nothing_to_do_seconds", "files_opened")
    medians = {
        count: {name: median(one[place] for one in several) for place, name in enumerate(figures)}
        for count, several in passes.items()
    }
    few, many = medians[min(days)], medians[max(days)]
    return {"days": medians, "growth": many["one_more_day_seconds"] / few["one_more_day_seconds"]}


def _compare_commands(days: Sequence[int], rows: int, rounds: int, runs: int) -> dict[str, dict[int, float]]:
    """Returns command -> number of days -> median seconds.

    Args:
        runs: As many runs and a tenth as many versions are in MLflow, where there are many days.
    """
    passes: dict[str, dict[int, list[float]]] = {}
    with tempfile.TemporaryDirectory(prefix="dlrm-growth-") as folder:
        sources = {count: Source(Path(folder, f"{count}"), "samples", rows) for count in days}
        for count, source in sources.items():
            source.write(count)
            source.ingest()
            for words in (["flows.train"], ["flows.promote", "version=1"], ["flows.score"]):
                source.command(*words)
            for words in (["flows.ingest"], ["flows.train"], ["flows.promote", "version=1"]):
                source.command(*words, *source.nightly())
            if count == max(days):
                _copy_runs(source.folder / "home" / "mlflow" / "mlflow.db", runs)
            say(f"the first {count} days")
        for _ in range(rounds):
            for count, source in sources.items():
                for words in (["flows.train"], ["flows.features"], ["flows.clean", "dry_run=false"]):
                    passes.setdefault(words[0], {}).setdefault(count, []).append(source.command(*words)[0])
                source.write(1)
                source.ingest()
                for words in (["flows.score"], ["flows.recurring", *source.nightly()]):
                    passes.setdefault(words[0], {}).setdefault(count, []).append(source.command(*words)[0])
    return {name: {count: median(seconds) for count, seconds in found.items()} for name, found in passes.items()}


def _copy_runs(database: Path, count: int) -> None:
    """Copies the newest run of a registry many times, and its version a tenth as many times, as of other trainings."""
    other = {"run_uuid": "printf('%032x', n)", "run_id": "printf('%032x', n)"}
    tables = {"runs": count, "latest_metrics": count, "params": count, "tags": count}
    with contextlib.closing(sqlite3.connect(database)) as connection, connection:
        (run,) = connection.execute("SELECT run_uuid FROM runs ORDER BY start_time DESC LIMIT 1").fetchone()
        (version,) = connection.execute("SELECT max(version) FROM model_versions").fetchone()
        for table, copies in (tables | {"model_versions": count // 10, "model_version_tags": count // 10}).items():
            names = [one[1] for one in connection.execute(f"PRAGMA table_info({table})")]
            own = other | ({"version": f"{version} + n"} if "version" in names else {})
            if table.endswith("tags"):
                own["value"] = f"CASE WHEN key = '{IDENTITY}' THEN printf('%064x', n) ELSE value END"
            values = ", ".join(own.get(name, name) for name in names)
            numbers = f"WITH RECURSIVE n(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM n WHERE n < {copies})"
            which = f"version = {version}" if "version" in names else f"run_uuid = '{run}'"
            connection.execute(
                f"{numbers} INSERT INTO {table} ({', '.join(names)}) SELECT {values} FROM {table}, n WHERE {which}"
            )


def _compare_sorting(days: Sequence[int], rows: int, rounds: int) -> dict[str, dict[int, float]]:
    """Returns what is sorted -> number of days -> median seconds."""
    layout = SortedLayout([pa.int64()], [pa.int64()], unique=False)
    passes: dict[str, dict[int, list[float]]] = {"the whole log": {}, "one more day": {}}
    for _ in range(rounds):
        for count in days:
            with tempfile.TemporaryDirectory(prefix="dlrm-growth-") as folder:
                for what, so_many in zip(passes, (count, count + 1), strict=True):
                    parts = {f"{_day(number)}": "" for number in range(so_many)}
                    begun = time.perf_counter()
                    open_sorted(lambda names: _events(names, rows), parts, layout, Path(folder, "log", what), "log")
                    passes[what].setdefault(count, []).append(time.perf_counter() - begun)
    return {what: {count: median(seconds) for count, seconds in found.items()} for what, found in passes.items()}


def _compare_rewriting(days: Sequence[int], rows: int, rounds: int) -> dict[str, dict[int, float]]:
    """Returns way -> number of days -> median seconds a day."""
    passes: dict[str, dict[int, list[float]]] = {"a commit for each day": {}, "small days together": {}}
    for _ in range(rounds):
        for count in days:
            with tempfile.TemporaryDirectory(prefix="dlrm-growth-") as folder:
                home, every = Path(folder), [_day(number) for number in range(count)]
                column = [day for day in every for _ in range(rows)]
                table = pa.table({"day": column, "x": np.arange(len(column)), "label": np.zeros(len(column), np.int32)})
                warehouse = Warehouse(WarehouseConfig(), home)
                replace_days(warehouse, "t", dict.fromkeys(every, ""), table.schema, table.to_batches(), len(table))
                for way, most in zip(passes, (1, COMMIT_ROWS), strict=True):
                    some = every[:40]
                    begun = time.perf_counter()
                    for group in in_commits(some, lambda day: rows, most):
                        rewrite_days(warehouse, "t", group, home / "tmp")
                    passes[way].setdefault(count, []).append((time.perf_counter() - begun) / len(some))
    return {way: {count: median(seconds) for count, seconds in found.items()} for way, found in passes.items()}


def _events(days: Iterable[str], rows: int) -> Iterator[tuple[str, SourceRows]]:
    """Yields events of 200,000 users, most of them of few."""
    for day in days:
        number = (datetime.date.fromisoformat(day) - START).days
        random = np.random.default_rng(number)
        users, items = random.zipf(1.2, rows) % 200_000, random.integers(0, 1_000_000, rows)
        times = np.sort(random.integers(0, 86_400_000_000, rows)) + number * 86_400_000_000
        yield day, SourceRows([pa.array(users)], pa.array(times), [pa.array(items)])


def _day(number: int) -> datetime.date:
    return START + datetime.timedelta(number)


class Source:
    """Files of one kind, and a home that ingests them.

    Args:
        rows: Of a day.
        columns: Half of them numbers, half of them ids.
        table_rows: Of the embedding table of each column of ids.
    """

    def __init__(self, folder: Path, kind: str, rows: int, columns: int = 16, table_rows: int = 100_000) -> None:
        self.folder, self.kind, self.rows, self.columns, self.days = folder, kind, rows, columns, 0
        self.table_rows, self.first = table_rows, ""
        (folder / "rows").mkdir(parents=True)
        (folder / "outcomes").mkdir()
        self.config = folder / "config.yaml"
        self.config.write_text(json.dumps(self._keys()), encoding="utf-8")

    def _keys(self) -> dict[str, Any]:
        path, sparse = f"rows/*.{KINDS[self.kind]}", [f"cat_{k}" for k in range(self.columns // 2)]
        source: dict[str, Any] = {"path": path, "day_column": "event_time"}
        events = {}
        if self.kind == "logs":
            source["outcomes"] = {"path": "outcomes/*", "outcome_time": "outcome_time", "window_seconds": 600}
        if self.kind == "events":
            source["path"] = "outcomes/*"  # one small file of samples
            events = {"seen": {"path": path, "key": ["cat_0"], "time": "event_time"}}
        return {
            "name": "growth",
            "home": str(self.folder / "home"),
            "source": source,
            "events": events,
            "split": {"days": {"train": [f"{START}..{_day(5)}"], "valid": [f"{_day(6)}"], "test": [f"{_day(7)}"]}},
            "model": {"embedding_width": 16, "bottom_mlp": [16], "top_mlp": [16]},
            "training": {"world_size": 1, "batch_rows": 512},
            "evaluation": {"baselines": []},
            "features": {
                "label": "label",
                "dense": [
                    {"columns": [f"num_{k}" for k in range(self.columns // 2)], "transforms": [{"kind": "fill_null"}]}
                ],
                "sparse": [{"columns": sparse, "transforms": [{"kind": "sigrid_hash", "size": self.table_rows}]}],
            },
        }

    def write(self, days: int) -> None:
        """Writes files of the next days."""
        ending = KINDS[self.kind]
        with duckdb.connect() as connection:
            for day in range(self.days, self.days + days):
                connection.execute(f"SELECT setseed({1 / (day + 2)})")
                first, moment = day * self.rows, f"TIMESTAMP '{_day(day)}'"
                moment += f" + to_microseconds(i * {86_000_000_000 // self.rows})"
                numbers = [f"random() * {k + 1} AS num_{k}" for k in range(self.columns // 2)]
                ids = [
                    f"hash(i * {k + 3} + {first}) % {10 ** (2 + k % 4)} AS cat_{k}" for k in range(self.columns // 2)
                ]
                label = [] if self.kind == "logs" else ["CAST(random() < .2 AS INTEGER) AS label"]
                columns = ", ".join([f"i + {first} AS impression_id, {moment} AS event_time", *label, *numbers, *ids])
                rows = f"SELECT {columns} FROM range({self.rows}) t(i)"
                self._copy(connection, rows, f"rows/{day:05}.{ending}", ending)
                if self.kind == "logs":
                    outcomes = (
                        f"SELECT i + {first} AS impression_id, {moment} + to_seconds(60) AS outcome_time"
                        f" FROM range({self.rows}) t(i) WHERE i % 5 = 0 OR i > {self.rows - 3}"
                    )
                    self._copy(connection, outcomes, f"outcomes/{day:05}.{ending}", ending)
                if self.kind == "events" and day == 0:
                    self._copy(connection, rows, f"outcomes/{day:05}.{ending}", ending)
        self.days += days

    def _copy(self, connection: duckdb.DuckDBPyConnection, rows: str, name: str, ending: str) -> None:
        if ending == "avro":
            _write_avro(connection.execute(rows).to_arrow_table(), self.folder / name)
        else:
            connection.execute(f"COPY ({rows}) TO '{self.folder / name}' {OPTIONS[ending]}")

    def ingest(self) -> tuple[float, int]:
        """Returns the seconds that the command accounts for, and the files that it opened."""
        _, result = self.command("flows.ingest")
        tables = [result, *result.get("events", {}).values()]
        opened = result["events"]["seen"] if self.kind == "events" else result
        return sum(sum(table["seconds"].values()) for table in tables), opened["files"]["opened"]

    def run(self) -> tuple[float, dict[str, Any]]:
        """Returns the seconds of the command, and what it says of the table of `rows`."""
        seconds, result = self.command("flows.ingest")
        return seconds, result["events"]["seen"] if self.kind == "events" else result

    def nightly(self) -> list[str]:
        """Returns the overrides of a config that learns each day after those that are there at the first call."""
        if not self.first:
            self.first = f"{_day(self.days - 8)}..{_day(self.days - 1)}"
        shares = {"train": 0.8, "valid": 0.1, "test": 0.1}
        split = {"days": None, "hash": {"key": ["impression_id"], "shares": shares, "days": [self.first]}}
        return ["name=nightly", f"split={json.dumps(split)}"]

    def command(self, module: str, *words: str) -> tuple[float, dict[str, Any]]:
        """Runs a command on the config. Returns its seconds, and its result if it prints one."""
        begun = time.perf_counter()
        command = [sys.executable, "-m", module, str(self.config), *words]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        seconds = time.perf_counter() - begun
        if done.returncode:
            raise RuntimeError(done.stderr[-2_000:])
        last = (done.stdout.strip().splitlines() or [""])[-1]
        return seconds, json.loads(last) if last.startswith("{") else {}


def _write_avro(rows: pa.Table, path: Path) -> None:
    import fastavro  # an extra

    kinds = {"double": "double", "timestamp[us]": {"type": "long", "logicalType": "timestamp-micros"}}
    fields = [{"name": one.name, "type": kinds.get(f"{one.type}", "long")} for one in rows.schema]
    schema = fastavro.parse_schema({"type": "record", "name": "row", "fields": fields})
    with path.open("wb") as stream:
        fastavro.writer(stream, schema, rows.to_pylist(), codec="deflate")


def _draw(found: dict[str, Any], rows: int, file: Path) -> None:
    """Draws the seconds of each kind by the number of days."""
    figure, both = plt.subplots(1, 2, figsize=(9, 3.2), sharey=True, layout="constrained")
    panels = {"one_more_day_seconds": "One more day", "nothing_to_do_seconds": "Nothing to do"}
    for axes, (name, title) in zip(both, panels.items(), strict=True):
        for kind, one in found.items():
            axes.plot(list(one["days"]), [seconds[name] for seconds in one["days"].values()], marker="o", label=kind)
        axes.set(title=title, xscale="log", xlabel=f"days in the table, {rows:,} rows each", ylim=(0, None))
        axes.grid(alpha=0.3)
    both[0].set_ylabel("seconds of an ingest")
    both[1].legend(frameon=False)
    figure.savefig(file, dpi=110)
    plt.close(figure)


def _as_text(figures: dict[str, Any]) -> str:
    lines = [
        "| kind | days | one more day, s | nothing to do, s | files opened | growth |",
        "|---|---|---|---|---|---|",
    ]
    for kind, found in figures["kinds"].items():
        for count, one in found["days"].items():
            values = (
                f"{one['one_more_day_seconds']:.2f} | {one['nothing_to_do_seconds']:.2f} | {one['files_opened']:.0f}"
            )
            lines.append(f"| {kind} | {count} | {values} | {found['growth']:.2f} |")
    return "\n".join([*lines, "", describe_machine(figures["machine"])])


if __name__ == "__main__":
    main(sys.argv[1:])
