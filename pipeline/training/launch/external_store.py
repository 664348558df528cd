"""Follows ranks that torchrun or SLURM starts on hosts without a common folder, through an object store.

The training's folder in the store has a folder `ranks` while a training follows them:

    training                     the training's id, a new one each time: what belongs to others is never read
    ID/keys/RANK-PROCESS         public key of a rank's process. The training answers it and removes it
    ID/specs/RANK-PROCESS        the specification, sealed for that key. The rank removes it
    ID/events/PROCESS/NUMBER     lines of rank 0. The training reads them in order and removes them
    ID/error-RANK.json           the error that a rank raised

The specification holds the catalog's credentials and the token of the batches, so it is never there in the open. Keys
pass through the store and not over the process group, because its backend is part of the specification. Who may write
to the store is trusted: it holds the checkpoints that ranks load.
"""

import errno
import json
import queue
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pipeline.errors import ContractError, StorageError, to_wire
from pipeline.training.launch.external import suggest, unfollowed
from pipeline.training.launch.processes import GRACE_SECONDS, POLL_SECONDS, SPEC, Event, RankGroup, parse_error
from storage.objects import ObjectFolder

RANKS, TRAINING, KEYS, SPECS, EVENTS = "ranks", "training", "keys", "specs", "events"
PERIOD_SECONDS = 1.0
"""Pause between two looks into the store, and between two objects with events."""
ANSWER_SECONDS = 300.0
"""A rank waits this long for its specification. A training that was killed never answers."""


@dataclass
class StoreGroup(RankGroup):
    """Ranks that someone else has started on hosts without a common folder."""

    hosts: int = 1
    """As in `follow_ranks`."""
    store: ObjectFolder = field(kw_only=True)
    """The training's folder in the store."""

    def run(self, module: str, world_size: int, threads: int, attempt: int, root: Path) -> Event:
        """See `RankGroup`."""
        follower = _Follower(self.store.child(RANKS), (self.folder / SPEC).read_text(encoding="utf-8"))
        try:
            command = suggest(module, self.store.address, world_size, self.hosts)
            self.on_event({"event": "awaited", "command": command})
            return self.watch_lines(follower.lines)
        finally:
            follower.end()

    def watch_lines(self, lines: "queue.SimpleQueue[str | BaseException]") -> Event:
        """Passes events to `on_event` until rank 0 reports a result."""
        began = False
        while True:
            with suppress(queue.Empty):
                line = lines.get(timeout=POLL_SECONDS)
                if isinstance(line, BaseException):
                    raise line
                began = True
                result = self.handle_line(line)
                if result is not None:
                    return result
            if not began:  # a cluster may start them hours later
                self.last_progress = time.monotonic()
            self.check_time()


class _Follower:
    """Answers the ranks' keys and collects what they report, in a thread of its own: a store may be slow.

    Attributes:
        lines: Events of rank 0 as lines, or the error that ends the training.
    """

    def __init__(self, place: ObjectFolder, spec: str) -> None:
        self.place, self.spec, self.id = place, spec, secrets.token_hex(16)
        self.own = place.child(self.id).patient()
        self.lines: queue.SimpleQueue[str | BaseException] = queue.SimpleQueue()
        self.ended = threading.Event()
        place.remove()
        place.write(TRAINING, self.id.encode())
        self.thread = threading.Thread(target=self._run, name="follow-ranks", daemon=True)
        self.thread.start()

    def end(self) -> None:
        """Ends the thread and clears the place, unless a newer training has taken it."""
        self.ended.set()
        self.thread.join(GRACE_SECONDS)
        with suppress(StorageError):  # the next training clears it
            if self.place.read(TRAINING) == self.id.encode():
                self.place.remove()

    def _run(self) -> None:
        try:
            while not self.ended.wait(PERIOD_SECONDS):
                self._look()
        except BaseException as error:  # raised by the waiting thread
            self.lines.put(error)

    def _look(self) -> None:
        """Reads all that is there. Keys come last: torchrun has then ended the processes that the new ones replace."""
        names = self.own.names()
        for name in names:
            if name.startswith(f"{EVENTS}/"):
                for line in self._read(name).splitlines():
                    self.lines.put(line)
                self.own.remove(name)
        for name in names:
            if name.startswith("error-"):
                raise parse_error(self._read(name))
        for name in names:
            if name.startswith(f"{KEYS}/"):
                self._answer(name)

    def _read(self, name: str) -> str:
        return (self.own.read(name) or b"").decode(errors="replace")

    def _answer(self, name: str) -> None:
        from pipeline.sealed import seal  # cryptography is of no use to other launchers

        sealed = seal(self.spec, self._read(name).encode())
        self.own.write(name.replace(KEYS, SPECS, 1), b"".join(sealed))
        self.own.remove(name)


class FollowedRank:
    """A rank's side: gets the specification, and reports to the training.

    Args:
        address: The training's folder in the store. Access to it comes from the environment.
    Raises:
        TrainingError: If no training follows the ranks.
        StorageError: If the store does not answer.
    """

    def __init__(self, address: str, rank: int) -> None:
        self.rank, self.address = rank, address
        self.name = f"{rank}-{secrets.token_hex(8)}"
        self.place = ObjectFolder(address, {}).child(RANKS).patient()
        found = self.place.read(TRAINING)
        if found is None:
            raise unfollowed(address)
        self.training, self.own = found, self.place.child(found.decode())

    def fetch_spec(self) -> str:
        """Returns the specification as JSON. Nobody else can read the answer of the training.

        Raises:
            TrainingError: If no training answers.
        """
        from pipeline.sealed import KEY_BITS, Letterbox  # cryptography is of no use to other ranks

        letterbox, answer, limit = Letterbox(), f"{SPECS}/{self.name}", time.monotonic() + ANSWER_SECONDS
        self.own.write(f"{KEYS}/{self.name}", letterbox.public)
        while (sealed := self.own.read(answer)) is None:
            if time.monotonic() > limit or not self.is_followed():
                raise unfollowed(self.address)
            time.sleep(PERIOD_SECONDS)
        self.own.remove(answer)
        size = KEY_BITS // 8
        text: str = letterbox.open((sealed[:size], sealed[size:]))
        return text

    def is_followed(self) -> bool:
        """Returns whether the training follows its ranks still, and no newer one does."""
        return self.place.read(TRAINING) == self.training

    def report(self, error: ContractError) -> None:
        """Reports the error with which this rank ends."""
        if self.is_followed():
            self.own.write(f"error-{self.rank}.json", json.dumps(to_wire(error)).encode())

    @contextmanager
    def open_events(self) -> Iterator[Callable[[Event], None]]:
        """Yields a thread-safe function that sends events. Only rank 0 does. All have arrived at the end.

        The function raises BrokenPipeError once that training has ended, or a newer one follows other ranks.
        """
        if self.rank != 0:
            yield lambda event: None
            return
        writer = _Writer(self)
        try:
            yield writer.emit
        finally:
            writer.end()
        if writer.error is not None:
            raise writer.error


class _Writer:
    """Writes the events of about a second into one object, in a thread of its own."""

    def __init__(self, rank: FollowedRank) -> None:
        self.rank, self.number = rank, 0
        self.waiting: list[str] = []
        self.error: Exception | None = None
        self.lock, self.ended = threading.Lock(), threading.Event()
        self.thread = threading.Thread(target=self._run, name="events", daemon=True)
        self.thread.start()

    def emit(self, event: dict[str, Any]) -> None:
        """Takes an event. Raises the error that has ended the writer."""
        if self.error is not None:
            raise self.error
        line = json.dumps(event) + "\n"
        with self.lock:
            self.waiting.append(line)

    def end(self) -> None:
        """Writes what is left."""
        self.ended.set()
        self.thread.join()

    def _run(self) -> None:
        try:
            while not self.ended.wait(PERIOD_SECONDS):
                self._write()
            self._write()
        except Exception as error:  # raised by `emit`
            self.error = error

    def _write(self) -> None:
        with self.lock:
            lines, self.waiting = self.waiting, []
        if not lines:
            return
        if not self.rank.is_followed():
            raise BrokenPipeError(errno.EPIPE, "the training of these ranks has ended")
        self.rank.own.write(f"{EVENTS}/{self.rank.name}/{self.number:08}", "".join(lines).encode())
        self.number += 1
