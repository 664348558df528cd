"""Runs ranks as processes that die with their parent, and restarts them from the last checkpoint if one dies."""

import contextlib
import json
import os
import queue
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, Field, NonNegativeInt, ValidationError

from pipeline.errors import ContractError, TrainingError, from_wire
from pipeline.processes.forkserver import ForkedProcess, start_process
from pipeline.processes.process import limit_threads
from pipeline.training.launch.heartbeat import WAITING
from storage.artifacts import write_text

POLL_SECONDS = 0.2
GRACE_SECONDS = 5.0
"""Time between SIGTERM and SIGKILL."""
KILLED_EXIT_CODE = 137
"""Exit code that a shell or a container reports for SIGKILL."""

SPEC = "spec.json"
ANSWER, ERROR = "answer.json", "error.json"
"""Files that `run_alone`'s process writes next to the spec."""

DETERMINISTIC = ("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
"""Variable without which cuBLAS is not deterministic, and its value."""

Event = dict[str, Any]


class _Event(BaseModel, frozen=True):
    """What every event has."""

    event: str


class _Alive(_Event, frozen=True):
    """A sign of life; see `Heartbeat`."""

    count: int
    doing: str


class _Stepped(_Event, frozen=True):
    """There is a checkpoint of this step."""

    step: Annotated[NonNegativeInt, Field(lt=1 << 63)]


RECORDS: dict[str, type[_Event]] = {"alive": _Alive, "saved": _Stepped, "resumed": _Stepped}
"""Events that the launcher reads. Their other fields, and other events, are for `on_event`."""


class RankLostError(TrainingError):
    """A rank died or hangs. A restart may help."""


@dataclass(frozen=True)
class Limits:
    """Time limits and restart limit of the ranks. Fields as in `TrainConfig`."""

    deadline_seconds: int | None = None
    hang_seconds: int | None = None
    restart_limit: int = 0
    progress: Callable[[], object] = lambda: None
    """Returns the progress of preprocessing. While it changes, ranks that wait for a batch do not count as hung."""
    check: Callable[[], object] = lambda: None
    """Called several times a second. An exception that it raises ends the ranks."""


def run_ranks(
    module: str,
    spec: BaseModel,
    folder: Path,
    world_size: int,
    threads_per_rank: int | None,
    limits: Limits,
    on_event: Callable[[Event], None],
    root: Path,
    make_group: "Callable[..., RankGroup] | None" = None,
) -> Event:
    """Runs `python -m module SPEC` once per rank and returns the event named `result`, with `restarts` added.

    Restarts that the result names already, of whoever started the ranks, count too.

    Each rank gets RANK, WORLD_SIZE, the path of the spec and, in DLRM_ATTEMPT, the number of earlier attempts. Rank 0
    writes one JSON event per line into the pipe DLRM_EVENTS_FD. Its events `saved` and `resumed` name the step from
    which ranks would resume. If a rank dies or hangs, all ranks are ended and restarted. No rank is left when this
    returns, whatever happens.

    Args:
        folder: Holds the spec and the logs of the ranks. No other group uses it.
        on_event: Called with each event as it comes, and with `restart` before a restart. A `ValidationError` that it
            raises counts as an invalid event.
        root: Working directory of the ranks.
        make_group: Starts ranks in another way than as processes of this machine. Called like `RankGroup`.
    Raises:
        ContractError: The error that a rank raised. There is no restart, since it would be raised again.
        TrainingError: If more ranks were lost than `restart_limit` allows, or the deadline passed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    write_text(folder / SPEC, spec.model_dump_json(indent=2), mode=0o600)  # it holds the catalog's credentials
    threads = resolve_threads(threads_per_rank, world_size)
    deadline = None if limits.deadline_seconds is None else time.monotonic() + limits.deadline_seconds
    attempt = restarts = saved = began = 0
    while True:
        group = (make_group or RankGroup)(folder, limits, deadline, on_event, saved)
        try:
            result = group.run(module, world_size, threads, attempt, root)
        except RankLostError as lost:
            saved = group.saved
            restarts = restarts + 1 if saved <= began else 1
            if restarts > limits.restart_limit:
                tried = (
                    f", also after {limits.restart_limit} restarts from step {saved}" if limits.restart_limit else ""
                )
                raise RankLostError(lost.where, lost.expected, lost.actual + tried, lost.remedy) from None
            attempt, began = attempt + 1, saved
            on_event(
                {
                    "event": "restart", "step": saved, "number": restarts, "limit": limits.restart_limit,
                    "reason": f"{lost.where}: {lost.actual}",
                }
            )  # fmt: skip
        else:
            return result | {"restarts": attempt + result.get("restarts", 0)}


def run_alone(module: str, word: str, spec: BaseModel, folder: Path, threads: int, root: Path) -> Any:
    """Runs `python -m module WORD SPEC` as one process without a group. Returns the JSON that it writes.

    Args:
        word: The task.
        folder: Holds the spec, the log and the answer. No group may use it meanwhile.
    Raises:
        ContractError: The error that the process raised.
        TrainingError: If it died.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for name in (ANSWER, ERROR):
        (folder / name).unlink(missing_ok=True)
    write_text(folder / SPEC, spec.model_dump_json(indent=2), mode=0o600)
    path, arguments = folder / f"{word}.log", [word, str(folder / SPEC)]
    with path.open("wb") as log:
        process = start_process(module, f"dlrm {word}", arguments, rank_environment(threads), root, log)
    try:
        code = process.wait()
    finally:
        process.kill()
    if (folder / ERROR).exists():
        raise read_error(folder / ERROR)
    remedy = f"Run the command again. See {path}."
    if code != 0:
        raise TrainingError(f"process '{word}'", "to end with an answer", last_words(code, path), remedy)
    try:
        return json.loads((folder / ANSWER).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        raise TrainingError(f"process '{word}'", "to end with an answer", "a damaged one or none", remedy) from None


def read_error(path: Path) -> ContractError:
    """Returns the error that a process wrote to a file as JSON. A damaged one becomes an error that says so."""
    try:
        return from_wire(json.loads(path.read_text(encoding="utf-8", errors="replace")))
    except (ValueError, RecursionError):
        return from_wire("damaged text")


def resolve_threads(threads_per_rank: int | None, world_size: int) -> int:
    """Returns the threads of a rank: the given number, or an equal share of the cores."""
    return threads_per_rank or max((os.cpu_count() or 1) // world_size, 1)


@dataclass
class RankGroup:
    """One attempt of running the ranks, from start to end."""

    folder: Path
    limits: Limits
    deadline: float | None
    on_event: Callable[[Event], None]
    saved: int
    """Step of the newest checkpoint."""
    ranks: list[ForkedProcess] = field(default_factory=list)
    count: int = -1
    doing: str = "starting"
    progress: object = None
    last_progress: float = field(default_factory=time.monotonic)

    def run(self, module: str, world_size: int, threads: int, attempt: int, root: Path) -> Event:
        """Starts the ranks and returns the result when all have ended."""
        meeting = self.folder / ".meeting"
        shutil.rmtree(meeting, ignore_errors=True)  # a killed launcher may have left it
        meeting.mkdir()
        read_end, write_end = os.pipe()
        open_ends = {read_end, write_end}
        try:
            for rank in range(world_size):
                environment = rank_environment(threads) | _place_in_group(rank, world_size, attempt, meeting)
                self.ranks.append(_start(module, self.folder, rank, environment, write_end, root))
            os.close(write_end)
            open_ends.clear()  # the other end is closed by its reader
            return self.watch(read_end)
        finally:
            for end in open_ends:
                os.close(end)
            _end(self.ranks)
            shutil.rmtree(meeting, ignore_errors=True)

    def watch(self, read_end: int) -> Event:
        """Passes events to `on_event` until all ranks have ended."""
        lines = _lines(read_end)
        result: Event | None = None
        open_pipe = True
        try:
            while open_pipe or any(process.poll() is None for process in self.ranks):
                with contextlib.suppress(queue.Empty):
                    line = lines.get(timeout=POLL_SECONDS)
                    open_pipe = line is not None
                    result = self.handle_line(line) or result
                _raise_if_failed(self.ranks, self.folder)
                self.check_time()
            _raise_if_failed(self.ranks, self.folder)
        except RankLostError:
            _end(self.ranks)
            with contextlib.suppress(queue.Empty):  # the last event may say that a checkpoint is complete
                while (line := lines.get(timeout=GRACE_SECONDS)) is not None:
                    self.handle_line(line)
            raise
        if result is None:
            raise TrainingError("training", "a result from rank 0", "none", f"See {self.folder / 'rank-0.log'}.")
        return result

    def handle_line(self, line: str | None) -> Event | None:
        """Takes note of an event and hands it on, but for signs of life; returns a result.

        Raises:
            TrainingError: If the line holds no event.
        """
        if line is None:
            return None
        try:
            event, read = read_event(line)
            if isinstance(read, _Alive):
                if read.count != self.count:
                    self.last_progress = time.monotonic()
                self.count, self.doing = read.count, read.doing
                return None
            self.last_progress = time.monotonic()
            if isinstance(read, _Stepped):
                self.saved = read.step
            self.on_event(event)
        except ValidationError as error:
            place = ".".join(map(str, error.errors()[0]["loc"]))
            raise TrainingError(
                f"event of rank 0{f', {place}' if place else ''}", "what ranks report", line.strip()[:200] or "nothing",
                f"Run the command again to resume from the last checkpoint. See {self.folder / 'rank-0.log'}.",
            ) from error  # fmt: skip
        return event if event["event"] == "result" else None

    def check_time(self) -> None:
        """Raises if the deadline has passed, the ranks hang, or the caller's check fails."""
        self.limits.check()
        now = time.monotonic()
        if self.deadline is not None and now > self.deadline:
            raise TrainingError(
                "training", f"to finish within training.deadline_seconds={self.limits.deadline_seconds}",
                "ranks still running", "Raise it, or run the command again to resume from the last checkpoint.",
            )  # fmt: skip
        progress = self.limits.progress()
        if self.doing == WAITING and progress != self.progress:
            self.last_progress = now
        self.progress = progress
        limit = self.limits.hang_seconds
        if limit is not None and now - self.last_progress > limit:
            raise RankLostError(
                "ranks", f"progress within training.hang_seconds={limit}",
                f"none while rank 0 was {self.doing}",
                f"Raise it if a step may take longer. See {self.folder}/rank-*.log. The last checkpoint is kept.",
            )  # fmt: skip


def read_event(line: str) -> tuple[Event, BaseModel]:
    """Returns the event of a line, and what the launcher reads of it.

    Raises:
        ValidationError: If the line holds no event.
    """
    event: Any = None
    with contextlib.suppress(ValueError, RecursionError):
        event = json.loads(line)
    read = _Event.model_validate(event)
    return event, RECORDS.get(read.event, _Event).model_validate(event)


def _lines(read_end: int) -> "queue.Queue[str | None]":
    """Returns a queue of the lines of a pipe, with None at its end."""
    lines: queue.Queue[str | None] = queue.Queue()

    def read() -> None:
        with os.fdopen(read_end, encoding="utf-8", errors="replace") as pipe:
            for line in pipe:
                if line.endswith("\n"):  # a rank may be killed in the middle of a line
                    lines.put(line)
        lines.put(None)

    threading.Thread(target=read, daemon=True).start()
    return lines


def rank_environment(threads: int) -> dict[str, str]:
    """Returns the variables that all ranks of a group have, this process's own among them."""
    environment = os.environ | {
        **limit_threads(threads),
        **dict([DETERMINISTIC]),
        "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo"),
    }
    environment.pop("DLRM_EVENTS_FD", None)
    return environment


def _place_in_group(rank: int, world_size: int, attempt: int, meeting: Path) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "DLRM_ATTEMPT": str(attempt),
        "DLRM_MEETING": str(meeting / "store"),
    }


def _start(module: str, folder: Path, rank: int, environment: dict[str, str], events: int, root: Path) -> ForkedProcess:
    (folder / f"error-{rank}.json").unlink(missing_ok=True)
    mode = "wb" if environment["DLRM_ATTEMPT"] == "0" else "ab"  # keeps what earlier attempts logged
    given = {"DLRM_EVENTS_FD": events} if rank == 0 else {}
    with (folder / f"rank-{rank}.log").open(mode) as log:
        return start_process(module, f"dlrm rank {rank}", [str(folder / SPEC)], environment, root, log, given)


def _raise_if_failed(ranks: list[ForkedProcess], folder: Path) -> None:
    """Raises if a rank failed. An error that a rank raised itself comes before those of ranks that lost their peer."""
    failed = _failed(ranks)
    if not failed:
        return
    time.sleep(POLL_SECONDS)  # lets ranks that fail together write their errors
    for rank in range(len(ranks)):
        path = folder / f"error-{rank}.json"
        if path.exists():
            raise read_error(path)
    killed = [pair for pair in _failed(ranks) if pair[1] < 0 or pair[1] == KILLED_EXIT_CODE]
    rank, code = (killed or failed)[0]
    path = folder / f"rank-{rank}.log"
    raise RankLostError(
        f"rank {rank}", "to train to the end", last_words(code, path),
        f"Run the command again to resume from the last checkpoint. See {path}.",
    )  # fmt: skip


def last_words(code: int, log: Path) -> str:
    """Returns how a process ended and the last line of its log."""
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    name = signal.Signals(-code).name if code < 0 else f"exit code {code}"
    return f"{name}: {lines[-1][:200].rstrip('.') if lines else 'no output'}"


def _failed(ranks: list[ForkedProcess]) -> list[tuple[int, int]]:
    """Returns (rank, exit code) of the ranks that failed."""
    codes = [(rank, process.poll()) for rank, process in enumerate(ranks)]
    return [(rank, code) for rank, code in codes if code not in (None, 0)]


def _end(ranks: list[ForkedProcess]) -> None:
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
