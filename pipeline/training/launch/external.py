"""Follows ranks that someone else starts, such as torchrun or SLURM, through files in the run's folder."""

import errno
import json
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from pipeline.errors import TrainingError
from pipeline.training.launch.processes import (
    POLL_SECONDS,
    SPEC,
    Event,
    Limits,
    RankGroup,
    read_error,
    run_ranks,
)

BEGIN_SECONDS = 86_400.0
"""Ranks that someone else starts may wait in a queue of their cluster for this long."""
REMIND_SECONDS = 600.0
"""How often it is said that no rank has reported yet."""
EVENTS = "events.jsonl"
"""File in the run's folder to which rank 0 appends its events. It is there while a training follows the ranks."""


def follow_ranks(
    module: str,
    spec: BaseModel,
    folder: Path,
    world_size: int,
    threads_per_rank: int | None,
    limits: Limits,
    on_event: Callable[[Event], None],
    root: Path,
    hosts: int = 1,
) -> Event:
    """Waits for ranks as `run_ranks` does, but starts none. Its event `awaited` holds a command that does.

    Whoever started the ranks restarts them; `restart_limit` is not used. Their time counts from the first event.

    Args:
        folder: On storage that all hosts share.
        hosts: How many, if the config says so. 1: the command is for one rank on each host.
    Raises:
        ContractError: The error that a rank raised.
        TrainingError: If no rank begins within `BEGIN_SECONDS`, ranks hang, or the deadline passed. Ranks that still
            run end at their next event.
    """
    once = replace(limits, restart_limit=0)
    group = partial(ExternalGroup, hosts=hosts)
    return run_ranks(module, spec, folder, world_size, threads_per_rank, once, on_event, root, group)


@dataclass
class ExternalGroup(RankGroup):
    """Ranks that someone else has started."""

    hosts: int = 1
    """As in `follow_ranks`."""

    def run(self, module: str, world_size: int, threads: int, attempt: int, root: Path) -> Event:
        """See `RankGroup`."""
        path = self.folder / EVENTS
        for old in (path, *self.folder.glob("error-*.json")):
            old.unlink(missing_ok=True)
        path.touch(mode=0o600)
        place = (self.folder / SPEC).resolve()
        self.on_event({"event": "awaited", "command": _suggest(module, place, world_size, self.hosts)})
        try:
            return self.watch_file(path)
        finally:
            path.unlink(missing_ok=True)

    def watch_file(self, path: Path) -> Event:
        """Passes events to `on_event` until rank 0 reports a result."""
        began, read, since = False, 0, time.monotonic()
        reminded = since
        while True:
            lines = _complete_lines(path, read)
            for line in lines:
                result = self.handle_line(line.decode(errors="replace"))
                if result is not None:
                    return result
            for error in sorted(self.folder.glob("error-*.json")):
                raise read_error(error)
            began, read = began or bool(lines), read + sum(map(len, lines))
            if not began:  # a cluster may start them hours later
                self.last_progress = now = time.monotonic()
                missing = (
                    f"none in {(now - since) / 60:,.0f} minutes. One host without torchrun keeps all others waiting"
                )
                if now - since > BEGIN_SECONDS:
                    raise TrainingError(
                        "ranks that someone else starts", "an event of rank 0", missing,
                        "See the logs of torchrun on each host. Then run the command again, and start all ranks anew.",
                    )  # fmt: skip
                if now - reminded > REMIND_SECONDS:
                    self.on_event({"event": "warning", "text": f"events of ranks: {missing}"})
                    reminded = now
            self.check_time()
            time.sleep(POLL_SECONDS)


def append_events(folder: Path, rank: int) -> Callable[[dict[str, Any]], None]:
    """Returns a thread-safe function that appends events to the run's file. Only rank 0 does.

    The function raises BrokenPipeError once that training has ended, or a newer one follows other ranks.

    Raises:
        TrainingError: If no training follows the ranks.
    """
    if rank != 0:
        return lambda event: None
    path, lock = folder / EVENTS, threading.Lock()
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND)
    except FileNotFoundError:
        raise TrainingError(
            f"ranks of {folder}", "a training that follows them", "none",
            "Start the training first, then the ranks by the command that it prints.",
        ) from None  # fmt: skip

    def emit(event: dict[str, Any]) -> None:
        line = (json.dumps(event) + "\n").encode()
        with lock:
            if not _is_file(path, descriptor):
                raise BrokenPipeError(errno.EPIPE, "the training of these ranks has ended")
            os.write(descriptor, line)
            os.fsync(descriptor)  # other hosts of a network file system see it

    return emit


def _is_file(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _complete_lines(path: Path, read: int) -> list[bytes]:
    """Returns the lines after the first `read` bytes of a file. Leaves out one that is still being written."""
    with path.open("rb") as file:  # opened anew: else a network file system may show an old state
        file.seek(read)
        return [line for line in file.readlines() if line.endswith(b"\n")]


def _suggest(module: str, place: Path, world_size: int, hosts: int) -> str:
    """Returns a command that starts the ranks of a host.

    Args:
        place: Where the ranks find their specification.
        hosts: As in `follow_ranks`.
    """
    nodes = hosts if hosts > 1 else world_size
    return (
        f"torchrun --nnodes={nodes} --nproc-per-node={world_size // nodes} --node-rank=N --master-addr=ADDRESS "
        f"--master-port=29500 -m {module} {place}"
    )
