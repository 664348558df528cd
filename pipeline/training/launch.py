"""Ranks as a process tree that dies with its parent."""

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from pipeline.errors import ContractError, TrainingError
from storage.artifacts import write_text

POLL_SECONDS = 0.2
GRACE_SECONDS = 5.0
"""How long ranks have to end themselves before they are killed."""

Event = dict[str, Any]


def run_ranks(
    module: str,
    spec: BaseModel,
    folder: Path,
    world_size: int,
    threads_per_rank: int | None,
    deadline_seconds: int | None,
    on_event: Callable[[Event], None],
    root: Path,
) -> Event:
    """Runs `python -m module SPEC` once per rank and returns the event named `result`.

    Ranks get RANK, WORLD_SIZE and the spec's path; rank 0 writes one JSON event a line into the pipe
    DLRM_EVENTS_FD. Whatever happens, no rank is left when this returns.

    Args:
        folder: Logs of the ranks and the spec are kept here.
        on_event: Called with each event as it comes.
        root: Working directory of the ranks.
    Raises:
        ContractError: What a rank raised, as it raised it.
        TrainingError: If a rank died, or the deadline passed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    write_text(folder / "spec.json", spec.model_dump_json(indent=2))
    (folder / "spec.json").chmod(0o600)  # it holds the catalog's credentials
    threads = threads_per_rank or max((os.cpu_count() or 1) // world_size, 1)
    read_end, write_end = os.pipe()
    open_ends = {read_end, write_end}
    ranks: list[subprocess.Popen[bytes]] = []
    with tempfile.TemporaryDirectory(prefix="dlrm-ranks-") as meeting:
        try:
            for rank in range(world_size):
                ranks.append(_start(module, folder, rank, world_size, threads, write_end, Path(meeting), root))
            os.close(write_end)
            open_ends.clear()  # the other end is closed by its reader
            return _watch(ranks, read_end, folder, deadline_seconds, on_event)
        finally:
            for end in open_ends:
                os.close(end)
            _end(ranks)


def _start(
    module: str, folder: Path, rank: int, world_size: int, threads: int, events: int, meeting: Path, root: Path
) -> subprocess.Popen[bytes]:
    environment = os.environ | {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "OMP_NUM_THREADS": str(threads),
        "DLRM_MEETING": str(meeting / "store"),
        "DLRM_PARENT": str(os.getpid()),
        "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo"),
        "PYTHONUNBUFFERED": "1",
    }
    environment.pop("DLRM_EVENTS_FD", None)
    if rank == 0:
        environment["DLRM_EVENTS_FD"] = str(events)
    (folder / f"error-{rank}.json").unlink(missing_ok=True)
    with (folder / f"rank-{rank}.log").open("wb") as log:
        return subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", module, str(folder / "spec.json")],
            env=environment, cwd=root, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
            pass_fds=(events,) if rank == 0 else (),
        )  # fmt: skip


def _watch(
    ranks: list[subprocess.Popen[bytes]],
    read_end: int,
    folder: Path,
    deadline_seconds: int | None,
    on_event: Callable[[Event], None],
) -> Event:
    lines: queue.Queue[str | None] = queue.Queue()

    def read() -> None:
        with os.fdopen(read_end, encoding="utf-8") as pipe:
            for line in pipe:
                if line.endswith("\n"):  # a rank may be killed in the middle of a line
                    lines.put(line)
        lines.put(None)

    threading.Thread(target=read, daemon=True).start()
    started = time.monotonic()
    result: Event | None = None
    open_pipe = True
    while open_pipe or any(process.poll() is None for process in ranks):
        with contextlib.suppress(queue.Empty):
            line = lines.get(timeout=POLL_SECONDS)
            if line is None:
                open_pipe = False
            else:
                event = json.loads(line)
                if event["event"] == "result":
                    result = event
                on_event(event)
        _raise_if_failed(ranks, folder)
        if deadline_seconds is not None and time.monotonic() - started > deadline_seconds:
            raise TrainingError(
                "training", f"an end within training.deadline_seconds={deadline_seconds}", "ranks still at work",
                "Raise it, or run the command again to go on from the last checkpoint.",
            )  # fmt: skip
    _raise_if_failed(ranks, folder)
    if result is None:
        raise TrainingError("training", "a result from rank 0", "none", f"See {folder / 'rank-0.log'}.")
    return result


def _raise_if_failed(ranks: list[subprocess.Popen[bytes]], folder: Path) -> None:
    """A rank's own error comes before the errors of those that lost their peer."""
    failed = [(rank, process.returncode) for rank, process in enumerate(ranks) if process.poll() not in (None, 0)]
    if not failed:
        return
    time.sleep(POLL_SECONDS)  # ranks that fail together all get to write down why
    for rank in range(len(ranks)):
        path = folder / f"error-{rank}.json"
        if path.exists():
            raise ContractError(*json.loads(path.read_text(encoding="utf-8")))
    rank, code = failed[0]
    log = (folder / f"rank-{rank}.log").read_text(encoding="utf-8", errors="replace").strip().splitlines()
    name = signal.Signals(-code).name if code < 0 else f"exit code {code}"
    raise TrainingError(
        f"rank {rank}", "to train to the end", f"{name}: {log[-1][:200].rstrip('.') if log else 'no output'}",
        f"Run the command again to go on from the last checkpoint; its log is {folder / f'rank-{rank}.log'}.",
    )  # fmt: skip


def _end(ranks: list[subprocess.Popen[bytes]]) -> None:
    alive = [process for process in ranks if process.poll() is None]
    for process in alive:
        process.terminate()
    limit = time.monotonic() + GRACE_SECONDS
    for process in alive:
        try:
            process.wait(max(limit - time.monotonic(), 0.1))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
