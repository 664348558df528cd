"""The master alone: leases and memory for a plan of a million splits and up to 512 workers.

    python -m benchmarks.control_plane --json

The real master, stream and protocol run. Workers finish at once, and a rank takes each group at once. Nothing
is read, and nothing goes through a socket, a process or shared memory. So the figures are the bookkeeping alone, all of
it in one thread. A lease is work given to a worker: a split to read, or a group of batches to make. Seconds are those
of the processor, because a shared machine stretches others.
"""

import argparse
import datetime
import gc
import json
import statistics
import sys
import tempfile
import time
from collections import Counter, deque
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil

from benchmarks.machine import describe_machine, machine, say
from pipeline.data.position import Position
from pipeline.preprocessing.config import PreprocessingConfig
from pipeline.preprocessing.epoch.batches import BatchWork
from pipeline.preprocessing.epoch.costs import Costs
from pipeline.preprocessing.epoch.memory import Segment
from pipeline.preprocessing.epoch.request import Request
from pipeline.preprocessing.epoch.splits import Split
from pipeline.preprocessing.executors import Executor, WorkDone, WorkerStarted
from pipeline.preprocessing.master import Master
from pipeline.preprocessing.rank_protocol import RankProtocol
from pipeline.preprocessing.transport.conversation import Connection, Incoming
from storage.reader import Fragment

WORKERS = (1, 8, 64, 512)
SPLIT_ROWS, WINDOW_ROWS, BATCH_ROWS = 65_536, 262_144, 4_096
"""Rows of a split, which is one row group, of a shuffle block and of a global batch."""
GROUPS_OF_FILE = 16
"""Row groups of a file."""
ROW_BYTES = 1_000
"""Claimed bytes of a row in memory."""
MEMORY_BYTES = 1 << 50
"""No bound: a full memory would measure waiting."""
DPP = {"RM1": (24.16, 11_623), "RM2": (9.44, 7_995), "RM3": (55.22, 36_921)}
"""Workers of a trainer and rows per second of a worker, as recalled from DPP (Zhao et al. 2022, arXiv:2108.09373)."""
ROWS = "rows"
PACKAGES = ("numpy", "pydantic")


class _Nothing(Segment):
    """Memory that holds nothing."""

    def close(self) -> None:
        """There is nothing to close."""


class InstantExecutor(Executor):
    """Workers that finish at once and make nothing. Counts their work."""

    def __init__(self, *given: Any) -> None:
        data, _, folder, events = given
        super().__init__(data, folder, events)
        self.leases, self.freed = 0, 0
        self.splits: Counter[tuple[str, int]] = Counter()
        """Leases by the first row group of a split."""

    def start(self, worker: int) -> None:
        self.events.put(WorkerStarted(worker, worker))

    def submit(self, worker: int, data: str, work: Split | BatchWork, inputs: Sequence[Any]) -> None:
        self.leases += 1
        rows = 0
        if isinstance(work, Split):
            first = work.fragments[0]
            self.splits[first.path, first.row_group] += 1
            rows = work.rows
        size = ROW_BYTES * (rows or BATCH_ROWS)
        self.events.put(WorkDone(worker, self, size, rows, Costs(read_seconds=0.1), peak_rss_mb=1))

    def kill(self, worker: int) -> None:
        """There is no process."""

    def free(self, memory: Any) -> None:
        self.freed += 1

    def deliver(self, memory: Any) -> Any:
        return {}, []

    def close(self) -> None:
        """There is nothing to close."""


class Rank:
    """Takes each group of batches at once, as a trainer that never waits for its own steps would."""

    def __init__(self, master: Master) -> None:
        self.connection = Connection(None)
        self.messages: deque[Incoming] = deque()
        self.batches = self.rows = 0
        self.ended = False
        self.protocol = RankProtocol(master, self.receive, lambda connection: None)

    def receive(self, connection: Connection, message: dict[str, Any], descriptors: list[int]) -> None:
        """Takes what the master sends, and asks for the next group."""
        if "error" in message:
            raise RuntimeError(message["error"])
        if "end" in message:
            self.ended = True
            return
        rows = sum(note["rows"] for note in message["notes"])
        self.batches, self.rows = self.batches + len(message["notes"]), self.rows + rows
        self.ask(rows)

    def ask(self, rows: int = 0) -> None:
        """Asks for the next group. It has trained on these rows."""
        following = self.connection.next
        message = {"take": following, "done": following - 1, "rows": rows, "waited": 0.0}
        self.messages.append(Incoming(self.connection, message))

    def turn(self, master: Master) -> None:
        """Lets the master handle one message or one event."""
        event = self.messages.popleft() if self.messages else master.next_event(0.0)
        self.protocol.turn(event)
        if master.failure is not None:
            raise master.failure


def make_fragments(splits: int) -> list[Fragment]:
    """Makes up the row groups of a table."""
    day, fragments = datetime.date(2025, 1, 1), list[Fragment]()
    for first in range(0, splits, GROUPS_OF_FILE):
        path = f"s3://warehouse/features/data/day=2025-01-01/{first:012}-0123456789abcdef.parquet"
        numbers = range(min(GROUPS_OF_FILE, splits - first))
        fragments += [Fragment(path=path, row_group=i, rows=SPLIT_ROWS, day=day) for i in numbers]
    return fragments


def make_master(fragments: list[Fragment], workers: int, folder: Path) -> Master:
    """Returns a master whose workers finish at once."""
    config = PreprocessingConfig(
        workers=workers, split_rows=SPLIT_ROWS, shuffle_window_rows=WINDOW_ROWS, memory_bytes=MEMORY_BYTES
    )
    data: Any = {ROWS: SimpleNamespace(rows=SPLIT_ROWS * len(fragments))}
    master = Master(data, config, folder, make=InstantExecutor)
    master.fragments[ROWS] = fragments
    return master


def make_request() -> Request:
    """Returns the only rank's request."""
    return Request(
        data=ROWS, number=0, position=Position(), batch_rows=BATCH_ROWS, seed=1,
        window_rows=WINDOW_ROWS, world_size=1, ranks=(0,),
    )  # fmt: skip


def run(fragments: list[Fragment], workers: int, leased: int) -> dict[str, Any]:
    """Opens an epoch and leases that many of its splits, or all. Returns the figures.

    The clock of the leases starts when all workers work, and the first group was delivered.
    """
    with tempfile.TemporaryDirectory(prefix="dlrm-benchmark-") as temporary:
        master = make_master(fragments, workers, Path(temporary))
        executor, rank = master.executor, Rank(master)
        assert isinstance(executor, InstantExecutor)
        while not all(one.ready for one in master.pool.workers.values()) or not master.pool.workers:
            rank.turn(master)
        start = time.thread_time()
        request = {"open": make_request().model_dump(mode="json"), "rank": 0}
        rank.protocol.turn(Incoming(rank.connection, request))
        opened = time.thread_time()
        rank.ask()
        while not rank.batches:
            rank.turn(master)
        first = time.thread_time()
        leases, splits = executor.leases, len(executor.splits)
        while len(executor.splits) < leased and not rank.ended:
            rank.turn(master)
        seconds = time.thread_time() - first
        leases, splits = executor.leases - leases, len(executor.splits) - splits
        while leased >= len(fragments) and not rank.ended:
            rank.turn(master)
        master.close()
    return {
        "leases_per_second": round(leases / seconds),
        "splits_per_second": round(splits / seconds),
        "microseconds_per_split": round(1e6 * seconds / splits, 1),
        "leases_per_split": round(leases / splits, 2),
        "plan_seconds": round(opened - start, 3),
        "first_batch_seconds": round(first - start, 3),
        "splits": len(executor.splits),
        "most_leases_of_a_split": max(executor.splits.values()),
        "rows": rank.rows,
        "ended": rank.ended,
    }


def measure_memory(splits: int) -> tuple[list[Fragment], dict[str, int]]:
    """Returns the row groups and what they and the plan add to the resident memory of this process, in bytes."""
    before = _resident()
    fragments = make_fragments(splits)
    listed = _resident()
    with tempfile.TemporaryDirectory(prefix="dlrm-benchmark-") as temporary:
        master = make_master(fragments, 1, Path(temporary))
        stream = master.open(make_request())
        planned = _resident()
        master.close_stream(stream)
        master.close()
    return fragments, {"row_groups_bytes": listed - before, "plan_bytes": planned - listed}


def _resident() -> int:
    gc.collect()
    return int(psutil.Process().memory_info().rss)


def measure(splits: int, leased: int, workers: Sequence[int], rounds: int) -> dict[str, Any]:
    """Returns all figures. Each round measures every number of workers."""
    facts = machine(PACKAGES)
    say(f"memory of {splits:,} splits")
    fragments, memory = measure_memory(splits)
    found: dict[int, list[dict[str, Any]]] = {number: [] for number in workers}
    for i in range(rounds):
        for number in workers:
            say(f"round {i + 1} of {rounds}: {number} workers")
            found[number].append(run(fragments, number, leased))
    medians = {number: _medians(each) for number, each in found.items()}
    pairs = zip(found[workers[0]], found[workers[-1]], strict=True)
    return {
        "most_to_one": round(statistics.median(m["leases_per_second"] / o["leases_per_second"] for o, m in pairs), 3),
        "workers": medians,
        "memory": memory | {f"{name}_per_split": round(size / splits) for name, size in memory.items()},
        "fleet": imagine_fleet(medians[workers[-1]]["splits_per_second"] * SPLIT_ROWS),
        "splits": splits,
        "leased": leased,
        "rounds": rounds,
        "config": {"split_rows": SPLIT_ROWS, "window_rows": WINDOW_ROWS, "batch_rows": BATCH_ROWS},
        "machine": facts,
    }


def _medians(rounds: Sequence[dict[str, Any]]) -> dict[str, Any]:
    names = [name for name, value in rounds[0].items() if not isinstance(value, bool)]
    return {name: statistics.median(one[name] for one in rounds) for name in names}


def imagine_fleet(rows_per_second: float) -> dict[str, dict[str, float]]:
    """Returns how many of DPP's trainers and workers take as many rows as one master can lease."""
    fleet = {"ours": {"rows_per_second": rows_per_second}}
    for model, (workers, rows) in DPP.items():
        trainers = rows_per_second / (workers * rows)
        fleet[model] = {
            "rows_per_second_of_trainer": round(workers * rows),
            "trainers": round(trainers),
            "workers": round(trainers * workers),
            "master_share_of_trainer": workers * rows / rows_per_second,
        }
    return fleet


def as_text(figures: dict[str, Any]) -> str:
    """Formats the figures as Markdown."""
    lines = ["| workers | leases/s | CPU us a split | plan s | first batch s |", "|---|---|---|---|---|"]
    for workers, one in figures["workers"].items():
        lines.append(
            f"| {workers} | {one['leases_per_second']:,.0f} | {one['microseconds_per_split']:.0f} "
            f"| {one['plan_seconds']:.2f} | {one['first_batch_seconds']:.2f} |"
        )
    memory, ours = figures["memory"], figures["fleet"]["ours"]["rows_per_second"]
    lines += [
        f"\nMost workers to fewest, leases/s: x {figures['most_to_one']}",
        f"Row groups: {memory['row_groups_bytes'] / 1e6:,.0f} MB, {memory['row_groups_bytes_per_split']} bytes a split",
        f"Plan: {memory['plan_bytes'] / 1e6:,.0f} MB, {memory['plan_bytes_per_split']} bytes a split",
        f"Leases for {ours / 1e6:,.0f} million rows/s\n",
        "| DPP's model | rows/s of a trainer | trainers | workers | share of the master for one trainer |",
        "|---|---|---|---|---|",
    ]
    for model in DPP:
        one = figures["fleet"][model]
        lines.append(
            f"| {model} | {one['rows_per_second_of_trainer']:,} | {one['trainers']:,} | {one['workers']:,} "
            f"| {100 * one['master_share_of_trainer']:.3f} % |"
        )
    return "\n".join([*lines, "\n" + describe_machine(figures["machine"])])


def main(words: Sequence[str]) -> None:
    """Measures, and prints tables or, on the last line, one JSON object."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.control_plane")
    parser.add_argument("--json", action="store_true", help="all figures as one JSON object on the last line")
    parser.add_argument("--splits", type=int, default=1_000_000, help="splits of the plan")
    parser.add_argument("--leased", type=int, default=20_000, help="splits to lease for a figure; the plan's: an epoch")
    parser.add_argument("--workers", type=int, nargs="+", default=WORKERS)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args(words)
    figures = measure(options.splits, options.leased, options.workers, options.rounds)
    print(json.dumps(figures) if options.json else as_text(figures))


if __name__ == "__main__":
    main(sys.argv[1:])
