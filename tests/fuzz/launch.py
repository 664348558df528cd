"""Damaged events and errors of ranks.

Only our own processes hold these pipes, so a message may be damaged, but nobody attacks.
"""

import json
import logging
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from random import Random
from typing import Any, cast

from pipeline.jobs.code_version import CodeVersion
from pipeline.jobs.console import Progress
from pipeline.jobs.recurring.backtest import read_day
from pipeline.jobs.training.events import EventReport
from pipeline.registration.journal import Journal
from pipeline.study.measure.group import read_point
from pipeline.study.plans import read_loss
from pipeline.training.launch.processes import Event, Limits, RankGroup, read_error
from tests.fuzz.harness import Case, require
from tests.fuzz.mutate import mutate_bytes, mutate_json

TABLE = {
    "table": "user", "rows": 40, "width": 4, "sharding": "row_wise", "kernel": "fused", "ranks": [0, 1],
    "bytes": [320, 320], "milliseconds": [0.1, 0.2],
}  # fmt: skip
SUMMARY = {
    "rows": 96, "steps": 3, "epochs": 1, "world_size": 2, "valid_ne": 0.9, "best_step": 3, "device": "cpu",
    "weights_sha256": "w", "table_bytes": [640, 640], "step_milliseconds": [1.0, 2.0],
}  # fmt: skip
VERSION = CodeVersion(commit="c", sources="s", lock_hash="l")
EVENTS: list[Event] = [
    {"event": "alive", "count": 1, "doing": "starting"},
    {"event": "start", "plan": [TABLE], "device": "cpu", "code": VERSION.model_dump()},
    {"event": "resumed", "step": 2, "rows": 64, "lost": 3},
    {"event": "grown", "new": ["a"], "larger": ["b"]},
    {"event": "damaged", "error": "a flipped bit"},
    {"event": "warning", "text": "replaced a worker"},
    {"event": "metrics", "step": 3, "rows": 96, "metrics": {"train_ne_window": 0.9, "valid_ne": None, "train_loss_window": 0.6}},
    {"event": "saved", "step": 3},
    {"event": "day", "day": "2024-01-02", "sums": {"rows": 9.0, "loss": 3.0, "labels": 2.0, "predictions": 2.1},
     "decision": {"training": "incremental", "reason": "r"}, "cost": {"rows": 9, "seconds": 0.5}},
    {"event": "point_begins", "key": "p1"},
    {"event": "point_failed", "key": "p1", "reason": "no memory"},
    SUMMARY | {"event": "result", "lost": [{"epoch": 0, "path": "p", "row_group": 1, "rows": 3}]},
]  # fmt: skip


@contextmanager
def events(folder: Path) -> Iterator[Case]:
    """Lines in the pipe of the ranks."""
    log = logging.getLogger("tests.fuzz.launch")
    log.addHandler(logging.NullHandler())
    log.propagate = False

    def consumers() -> list[Callable[[Event], object]]:
        (folder / "metrics.jsonl").unlink(missing_ok=True)
        journal = Journal(cast(Any, None), "run", folder, log.warning)  # it is not asked to send
        return [
            EventReport(journal, Progress(None), 1_000, log),
            read_day,
            lambda event: read_point(event, ["p1"]),
            read_loss,
        ]

    def case(random: Random) -> None:
        lines = [json.dumps(event).encode() for event in random.choices(EVENTS, k=random.choice([1, 1, 3]))]
        if random.random() < 0.8:
            lines.append(mutate_json(random, random.choice(EVENTS)).replace(b"\n", b" "))
        content = b"".join(line + b"\n" for line in lines)
        if random.random() < 0.2:
            content = mutate_bytes(random, content)
        read_end, write_end = os.pipe()
        writer = threading.Thread(target=_write, args=(write_end, content))
        writer.start()
        group = RankGroup(folder, Limits(), None, random.choice(consumers()), 0)
        try:
            result = group.watch(read_end)
            require(isinstance(result, dict) and result["event"] == "result", "no result")
        finally:
            writer.join()
        require(0 <= group.saved < 1 << 63, "a step")

    yield case


def _write(descriptor: int, content: bytes) -> None:
    with os.fdopen(descriptor, "wb") as pipe, suppress(BrokenPipeError):
        pipe.write(content)


@contextmanager
def error_file(folder: Path) -> Iterator[Case]:
    """Files in which processes leave their errors."""

    def case(random: Random) -> None:
        (folder / "error.json").write_bytes(mutate_json(random, ["DataError", "a", "b", "c", "D."]))
        str(read_error(folder / "error.json"))

    yield case
