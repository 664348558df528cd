"""How commits, plans and reads of the warehouse grow with columns and days.

python -m benchmarks.warehouse [--columns 200 1000 3000] [--days 10 100] [--rows 2000] [--json]
python -m benchmarks.warehouse --both 3000 1000 [--rows 20]
python -m benchmarks.warehouse --files 150000
"""

import argparse
import datetime
import json
import resource
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from pyiceberg.conversions import to_bytes
from pyiceberg.manifest import DataFile, DataFileContent, FileFormat
from pyiceberg.table import Table
from pyiceberg.typedef import Record
from pyiceberg.types import DateType

from benchmarks.machine import as_table, describe_machine, machine, say
from pipeline.data.measurement import measure_days
from pipeline.data.profile import store
from storage.config import WarehouseConfig
from storage.snapshot.writing import replace_days
from storage.warehouse import Warehouse

FIRST = datetime.date(2024, 1, 1)
PACKAGES = ("pyarrow", "pyiceberg")
TABLE = "measured"
FILES_A_DAY = 191
"""Of a day of 50 M rows."""
DAYS_AT_ONCE = 20
"""Days in a commit that only fills the table."""
SAMPLE_SECONDS = 0.002


def main(words: Sequence[str]) -> None:
    """Measures and prints a table or JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--columns", type=int, nargs="+", default=[200, 1_000, 3_000])
    parser.add_argument("--days", type=int, nargs="+", default=[10, 100])
    parser.add_argument("--both", type=int, nargs=2, metavar=("COLUMNS", "DAYS"), help="only one table of this size")
    parser.add_argument("--files", type=int, help="only one table of this many data files, made from metadata")
    parser.add_argument("--rows", type=int, default=2_000, help="rows of a day")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    chosen = parser.parse_args(words)
    if chosen.files:
        seconds = {what: {"seconds": value} for what, value in of_files(chosen.files, chosen.rounds).items()}
        figures = {"files": chosen.files, "seconds": seconds, "machine": machine(PACKAGES)}
        print(json.dumps(figures) if chosen.json else as_table(f"{chosen.files:,} files", seconds, figures))
        return
    if chosen.both:
        columns, days = chosen.both
        size = at_size(columns, days, chosen.rows, chosen.rounds)
        figures = {"both": chosen.both, "rows": chosen.rows, "seconds": size, "machine": machine(PACKAGES)}
        print(json.dumps(figures) if chosen.json else as_size_table(figures))
        return
    figures = {
        "columns": {n: by_columns(n, chosen.rows, chosen.rounds) for n in chosen.columns},
        "days": by_days(sorted(chosen.days), chosen.rounds),
        "rows": chosen.rows,
        "machine": machine(PACKAGES),
    }
    print(json.dumps(figures) if chosen.json else as_text(figures))


def by_columns(columns: int, rows: int, rounds: int) -> dict[str, float]:
    """Times the operations on one day in tables with different numbers of columns."""
    with _warehouse() as warehouse:
        write = _writer(warehouse, columns, rows)
        write(0)
        figures = {"commit_new_day": _median(rounds, lambda i: write(i + 1))}
        figures["commit_same_day"] = _median(rounds, lambda _: write(0))
        figures |= _reading(warehouse, [f"c{i}" for i in range(0, columns, 10)], rounds)
    say(f"{columns} columns: {figures}")
    return figures


def by_days(days: Sequence[int], rounds: int) -> dict[int, dict[str, float]]:
    """The same for a table of 20 columns with many days of 20 rows, each a commit."""
    found: dict[int, dict[str, float]] = {}
    with _warehouse() as warehouse:
        write = _writer(warehouse, 20, 20)
        done = 0
        for count in days:
            for day in range(done, count - rounds):
                write(day)
                if day % 50 == 49:
                    say(f"{day + 1} days")
            filled, done = max(done, count - rounds), count
            figures = {"commit_new_day": _median(count - filled, lambda i, first=filled: write(first + i))}  # type: ignore[misc]
            figures["commit_same_day"] = _median(rounds, lambda i, last=count: write(last - 1 - i))  # type: ignore[misc]
            found[count] = figures | _reading(warehouse, ["c0", "c10"], rounds)
            say(f"{count} days: {found[count]}")
    return found


def at_size(columns: int, days: int, rows: int, rounds: int) -> dict[str, dict[str, float]]:
    """Times the operations on a table of many columns and many days, and pyiceberg's part of them.

    Returns:
        Operation -> median seconds, and the share of them with a frame of pyiceberg on the stack.
    """
    with _warehouse() as warehouse:
        write = _writer(warehouse, columns, rows)
        for first in range(0, days, DAYS_AT_ONCE):
            write(first, done := min(DAYS_AT_ONCE, days - first))
            say(f"{first + done} days")
        reference = warehouse.current(TABLE)
        names = [f"c{i}" for i in range(0, columns, 10)]

        def measure(day: int) -> None:
            one = FIRST + datetime.timedelta(days=day)
            store(warehouse, TABLE, measure_days(warehouse, reference, [one]), {one: "i"})

        operations: dict[str, Callable[[int], object]] = {
            "commit of a new day": lambda i: write(days + i),
            "commit of the same day": write,
            "open the table": lambda _: warehouse.current(TABLE),
            "plan of all days": lambda _: warehouse.reader(reference, names).fragments(None),
            "plan of one day": lambda _: warehouse.reader(reference, names).fragments([FIRST]),
            "list of written days": lambda _: warehouse.written_days(TABLE),
            "statistics of a day": measure,
        }
        found = {}
        for what, work in operations.items():
            with _pyiceberg_share() as share:
                seconds = _median(rounds, work)
            found[what] = {"seconds": seconds, "pyiceberg": share()}
            say(f"{what}: {found[what]}")
    return found


def of_files(files: int, rounds: int) -> dict[str, float]:
    """Times questions and commits in a table with many data files, `FILES_A_DAY` a day.

    Returns:
        What -> median seconds, and the peak of this process's memory in MiB.
    """
    with _warehouse() as warehouse:
        write, days = _writer(warehouse, 20, 20), files // FILES_A_DAY
        write(days)
        for first in range(0, days, DAYS_AT_ONCE):
            _add_entries(warehouse.writable(TABLE), range(first, min(first + DAYS_AT_ONCE, days)))
        say(f"{days} days of {FILES_A_DAY} files")

        def fresh() -> Warehouse:
            return Warehouse(WarehouseConfig(), warehouse.home)

        def ask(asked: Warehouse) -> None:
            reference = asked.current(TABLE)
            if len(asked.day_rows(reference)) != len(asked.day_contents(reference)) or asked.day_notes(TABLE):
                raise RuntimeError("other days than were written")

        found = {"open the table": _median(rounds, lambda _: fresh().current(TABLE))}
        found["rows, contents and notes of all days"] = _median(rounds, lambda _: ask(fresh()))
        asked = fresh()
        ask(asked)
        found["the same again"] = _median(rounds, lambda _: ask(asked))
        reference = warehouse.current(TABLE)
        found["rows of one day"] = _median(rounds, lambda i: fresh().count_rows(reference, [_day(i)]))
        found["commit of a new day"] = _median(rounds, lambda i: write(days + 1 + i))
    return found | {"peak, MiB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024}


def _day(number: int) -> datetime.date:
    return FIRST + datetime.timedelta(days=number)


def _add_entries(table: Table, days: Iterable[int]) -> None:
    """Commits entries of files that are not there, as a writer of ours would have written them."""
    with table.transaction() as transaction, transaction.update_snapshot().fast_append() as commit:
        for number in days:
            value = (_day(number) - datetime.date(1970, 1, 1)).days
            bound = {1: to_bytes(DateType(), value)}
            for file in range(FILES_A_DAY):
                commit.append_data_file(
                    DataFile.from_args(
                        content=DataFileContent.DATA,
                        file_path=f"{table.location()}/data/day={_day(number)}/{file:05}-0-{number:036}.parquet",
                        file_format=FileFormat.PARQUET,
                        partition=Record(value),
                        record_count=262_144,
                        file_size_in_bytes=100_000_000,
                        value_counts={1: 262_144},
                        null_value_counts={1: 0},
                        lower_bounds=bound,
                        upper_bounds=bound,
                        split_offsets=[4],
                        spec_id=table.spec().spec_id,
                    )
                )


@contextmanager
def _pyiceberg_share() -> Iterator[Callable[[], float]]:
    """Samples this thread's stack. Yields a function that returns in what share of the samples pyiceberg was on it."""
    counts, done, thread = [0, 0], threading.Event(), threading.get_ident()

    def sample() -> None:
        while not done.wait(SAMPLE_SECONDS):
            frame = sys._current_frames().get(thread)  # noqa: SLF001
            counts[0] += 1
            while frame is not None:
                if "/pyiceberg/" in frame.f_code.co_filename:
                    counts[1] += 1
                    break
                frame = frame.f_back

    sampler = threading.Thread(target=sample)
    sampler.start()
    try:
        yield lambda: round(counts[1] / max(1, counts[0]), 2)
    finally:
        done.set()
        sampler.join()


def _reading(warehouse: Warehouse, names: list[str], rounds: int) -> dict[str, float]:
    """Times a plan of all days, a plan of one, a read of a tenth of a day's columns, and a list of written days.

    The first plan of the snapshot lists its files. Those that are timed read the footers alone.
    """
    reference = warehouse.current(TABLE)

    def fragments(days: list[datetime.date] | None = None) -> Any:
        return warehouse.reader(reference, names).fragments(days)

    reader = warehouse.reader(reference, names)
    [fragment, *_] = reader.fragments([FIRST])
    return {
        "plan_all_days": _median(rounds, lambda _: fragments()),
        "plan_one_day": _median(rounds, lambda _: fragments([FIRST])),
        "read_a_day": _median(rounds, lambda _: reader.read(fragment)),
        "days_written": _median(rounds, lambda _: warehouse.written_days(TABLE)),
    }


@contextmanager
def _warehouse() -> Iterator[Warehouse]:
    with tempfile.TemporaryDirectory(prefix="dlrm-warehouse-") as folder:
        yield Warehouse(WarehouseConfig(), Path(folder))


def _writer(warehouse: Warehouse, columns: int, rows: int) -> Callable[..., object]:
    """Returns a function that writes a day by number, or several from there: half numbers, half lists of three ids."""
    draw = np.random.default_rng(1)
    offsets = pa.array(np.arange(rows + 1, dtype=np.int32) * 3)
    arrays: dict[str, pa.Array] = {}
    for i in range(columns):
        ids = pa.array(draw.integers(0, 1_000, 3 * rows))
        arrays[f"c{i}"] = pa.array(draw.random(rows).round(2)) if i % 2 else pa.ListArray.from_arrays(offsets, ids)

    def write(number: int, days: int = 1) -> object:
        written = [FIRST + datetime.timedelta(days=number + i) for i in range(days)]
        batches = [pa.record_batch({"day": pa.array([day] * rows, pa.date32()), **arrays}) for day in written]
        return replace_days(warehouse, TABLE, dict.fromkeys(written, "i"), batches[0].schema, batches, rows * days)

    return write


def _median(rounds: int, work: Callable[[int], object]) -> float:
    seconds = []
    for i in range(rounds):
        began = time.perf_counter()
        work(i)
        seconds.append(time.perf_counter() - began)
    return round(statistics.median(seconds), 4)


def as_size_table(figures: dict[str, Any]) -> str:
    """Formats the figures of `at_size` as a Markdown table."""
    columns, days = figures["both"]
    rows = [f"| {what} | {one['seconds']:.3f} | {one['pyiceberg']:.0%} |" for what, one in figures["seconds"].items()]
    head = f"| {columns:,} columns, {days:,} days | seconds | in pyiceberg |"
    return "\n".join([head, "|---|---|---|", *rows, "", describe_machine(figures["machine"])])


def as_text(figures: dict[str, Any]) -> str:
    """Formats the figures as Markdown tables."""
    lines = []
    for what in ("columns", "days"):
        names = list(next(iter(figures[what].values())))
        lines += [
            f"| {what} | {' | '.join(name.replace('_', ' ') for name in names)} |",
            "|---" * (len(names) + 1) + "|",
        ]
        lines += [
            f"| {size} | {' | '.join(f'{one[name]:.3f}' for name in names)} |" for size, one in figures[what].items()
        ]
        lines.append("")
    return "\n".join([*lines, describe_machine(figures["machine"])])


if __name__ == "__main__":
    main(sys.argv[1:])
