"""Keeps the processes of a server: starts them, replaces dead ones, and changes their version all at once.

A change has two phases. Each process loads the new version beside the old one and says so. Once all have said so, they
answer with it. If one cannot load it, all keep the old version.
"""

import json
import logging
import os
import selectors
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from pipeline.errors import ConfigError, RegistryError
from pipeline.serving.config import ServedVersion

if TYPE_CHECKING:
    from pipeline.serving.metrics import ServerMetrics

STOP_SECONDS = 15.0
"""How long the processes may take to answer what they have taken."""
LOOK_SECONDS = 0.2
LOAD_SECONDS = 300.0
"""Longest time for a process to load a version beside the present one, or its first one."""
ANSWER_SECONDS = 15.0
"""Longest time for a process to answer what needs no loading. One that does not answer is replaced."""
ATTEMPTS = 3
"""A process that dies so often before it answers ends the server."""
log = logging.getLogger("dlrm")


@dataclass(frozen=True)
class FetchedVersion:
    """A version whose files lie in a folder of ours."""

    number: int
    """Counts fetched versions: one that comes back has another number."""
    version: ServedVersion
    folder: Path


@dataclass
class ServerProcess:
    """A process that answers."""

    process: subprocess.Popen[bytes]
    channel: socket.socket
    serving: int | None = None
    """Number of the fetched version that it answers with."""
    received: bytes = b""
    owes: dict[str, float] = field(default_factory=dict)
    """What it has to say -> until when, in the seconds of `time.monotonic`."""


@dataclass
class Change:
    """A version that is being loaded beside the present one."""

    to: FetchedVersion
    waiting: set[int] = field(default_factory=set)
    """Process ids that have not loaded it yet."""
    deadline: float = field(default_factory=lambda: time.monotonic() + LOAD_SECONDS)


class Supervisor:
    """Runs the processes in the calling thread: `with` starts them, and leaves none.

    They load what each version needs while the first one is looked for.

    Args:
        command: Starts a process. Three words are added: our process id, and the descriptors of the listening socket
            and of its channel.
        environment: Of the processes.
        count: Number of processes.
        listener: The socket that all of them accept connections from.
        metrics: Counts of this process.
    """

    current: FetchedVersion

    def __init__(
        self,
        command: Sequence[str],
        environment: dict[str, str],
        count: int,
        listener: socket.socket,
        metrics: "ServerMetrics",
    ) -> None:
        self.command, self.environment, self.count, self.listener = command, environment, count, listener
        self.metrics = metrics
        self.change: Change | None = None
        self.old: list[FetchedVersion] = []
        """Versions that a process may still answer with."""
        self.processes: list[ServerProcess] = []
        self.started = False
        self.deaths = 0
        """Processes in a row that died before they answered."""
        self.rejected: int | None = None
        """Number of the last version that a process could not load."""
        self.stale: str | None = None
        """Why another version should be served, as far as is known. None: the present one is right."""
        self._told: str | None = None
        self._next: FetchedVersion | None = None
        self._failure: Exception | None = None
        self._lock = threading.Lock()
        self._selector = selectors.DefaultSelector()
        self._wake, self._woken = socket.socketpair()
        self._woken.setblocking(False)
        self._selector.register(self._woken, selectors.EVENT_READ, None)

    def __enter__(self) -> Self:
        try:
            for _ in range(self.count):
                self._start()
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self._stop()

    def begin(self, first: FetchedVersion, ready: Callable[[], None], remove: Callable[[FetchedVersion], None]) -> None:
        """Names the first version.

        Args:
            ready: Called when it answers in all processes.
            remove: Called with a version that no process needs any more.
        """
        self.current, self.ready, self.remove = first, ready, remove
        for server in self.processes:
            self._prepare(server)

    def offer(self, version: FetchedVersion) -> None:
        """Asks for a change, from any thread. The newest offer counts."""
        with self._lock:
            previous, self._next = self._next, version
        if previous is not None:
            self.remove(previous)
        self._wake.send(b"x")

    def fail(self, version: FetchedVersion, error: Exception) -> None:
        """Ends the server with an error if it still answers with this version, from any thread."""
        if self.current is version:
            self._failure = error
            self._wake.send(b"x")

    def run(self) -> None:
        """Runs until an exception, such as KeyboardInterrupt, ends it.

        Raises:
            ConfigError: If processes die before they answer.
            RegistryError: If the first version cannot be loaded, or what `fail` got.
        """
        while True:
            for key, _ in self._selector.select(LOOK_SECONDS):
                if key.data is None:
                    self._woken.recv(4096)
                else:
                    self._receive(key.data)
            if self._failure is not None:
                raise self._failure
            self._replace_dead()
            self._end_waits()
            self._begin_change()
            self._tell_stale()

    def _start(self) -> ServerProcess:
        ours, theirs = socket.socketpair()
        descriptors = (self.listener.fileno(), theirs.fileno())
        process = subprocess.Popen(
            [*self.command, *map(str, (os.getpid(), *descriptors))], env=self.environment, stdin=subprocess.DEVNULL,
            pass_fds=descriptors, start_new_session=True,
        )  # fmt: skip
        theirs.close()
        ours.setblocking(False)
        server = ServerProcess(process, ours)
        self.processes.append(server)
        self._selector.register(ours, selectors.EVENT_READ, server)
        return server

    def _prepare(self, server: ServerProcess) -> None:
        self._tell(server, "prepare", self.current)
        server.owes["prepared"] = time.monotonic() + LOAD_SECONDS
        self._send(server, {"do": "stale", "number": 0, "reason": self._told})
        if self.change is not None:
            self._tell(server, "prepare", self.change.to)
            self.change.waiting.add(server.process.pid)

    def _tell(self, server: ServerProcess, what: str, version: FetchedVersion) -> None:
        message: dict[str, Any] = {"do": what, "number": version.number}
        if what == "prepare":
            message |= {"folder": str(version.folder), "version": version.version.model_dump()}
        else:
            server.owes[{"swap": "swapped", "drop": "dropped"}[what]] = time.monotonic() + ANSWER_SECONDS
        self._send(server, message)

    def _send(self, server: ServerProcess, message: Mapping[str, Any]) -> None:
        with suppress(OSError):  # it is dead, and will be replaced
            server.channel.sendall(json.dumps(message).encode() + b"\n")

    def _receive(self, server: ServerProcess) -> None:
        try:
            data = server.channel.recv(1 << 16)
        except OSError:
            data = b""
        if not data:
            self._selector.unregister(server.channel)
            server.process.kill()  # without its channel it would never learn of another version
            return
        *lines, server.received = (server.received + data).split(b"\n")
        for line in lines:
            message = json.loads(line)
            getattr(self, f"_on_{message['is']}")(server, int(message["number"]), message.get("reason", ""))

    def _on_prepared(self, server: ServerProcess, number: int, reason: str) -> None:
        if number == self.current.number:
            server.owes.pop("prepared", None)
            self._tell(server, "swap", self.current)
        elif self.change is not None and number == self.change.to.number:
            self.change.waiting.discard(server.process.pid)
            self._finish_change()

    def _on_failed(self, server: ServerProcess, number: int, reason: str) -> None:
        if self.change is not None and number == self.change.to.number:
            self._give_up(reason)
        elif number == self.current.number and not self.started:
            one = self.current.version
            remedy = "Restore its files from a copy, or serve another version: version=N."
            raise RegistryError.of(f"model '{one.model}' version {one.version} cannot be loaded: {reason}", remedy)
        elif number == self.current.number:
            server.process.kill()  # it is replaced, which loads the version again

    def _on_dropped(self, server: ServerProcess, number: int, reason: str) -> None:
        server.owes.pop("dropped", None)

    def _on_swapped(self, server: ServerProcess, number: int, reason: str) -> None:
        server.serving = number
        server.owes.pop("swapped", None)
        server.owes.pop("prepared", None)  # of the version before, if it changed meanwhile
        self.deaths = 0
        if all(other.serving == self.current.number for other in self.processes):
            for version in self.old:
                self.remove(version)
            self.old = []
            if not self.started:
                self.started = True
                self.ready()

    def _begin_change(self) -> None:
        if self.change is not None or not self.started:
            return
        with self._lock:
            offered, self._next = self._next, None
        if offered is None:
            return
        self.change = Change(offered, {server.process.pid for server in self.processes})
        for server in self.processes:
            self._tell(server, "prepare", offered)

    def _finish_change(self) -> None:
        change = self.change
        if change is None or change.waiting:
            return
        self.change = None
        self.old.append(self.current)
        before, self.current = self.current.version, change.to
        for server in self.processes:
            self._tell(server, "swap", self.current)
        self.stale = None
        log.info("%s: version %s answers, version %s did", before.model, self.current.version.version, before.version)

    def _give_up(self, reason: str) -> None:
        assert self.change is not None, "only a change is given up"
        failed, self.change = self.change.to, None
        self.rejected = failed.number
        for server in self.processes:
            self._tell(server, "drop", failed)
        self.report_failure(f"{failed.version.version}", reason)
        self.remove(failed)

    def report_failure(self, version: str, reason: str) -> None:
        """Warns and counts that a version cannot be served. The old one goes on answering."""
        self.metrics.failures.inc()
        self.stale = f"version {version} cannot be served"
        one = self.current.version
        log.warning("%s: version %s cannot be served: %s Version %s goes on.", one.model, version, reason, one.version)

    def _end_waits(self) -> None:
        """Gives up a change that takes too long, and kills processes that do not answer: they are replaced."""
        now = time.monotonic()
        if self.change is not None and now > self.change.deadline:
            slow = ", ".join(map(str, sorted(self.change.waiting)))
            self._give_up(f"process {slow} has not loaded it within {LOAD_SECONDS:g} s.")
        for server in self.processes:
            late = [what for what, deadline in server.owes.items() if now > deadline]
            if late:
                log.warning("process %s has not %s in time and is killed", server.process.pid, late[0])
                server.owes.clear()
                server.process.kill()

    def _tell_stale(self) -> None:
        """Passes on whether another version should be served, from the thread that talks to the processes."""
        stale = self.stale
        self.metrics.stale.set(stale is not None)
        if stale != self._told:
            self._told = stale
            for server in self.processes:
                self._send(server, {"do": "stale", "number": 0, "reason": stale})

    def _replace_dead(self) -> None:
        for server in [server for server in self.processes if server.process.poll() is not None]:
            code = server.process.returncode
            self._forget(server)
            if server.serving is None:
                self.deaths += 1
                if self.deaths >= ATTEMPTS:
                    problem = f"a server process exited with code {code} before answering"
                    raise ConfigError.of(problem, "See its output above.")
            log.warning("process %s ended with code %s and is replaced", server.process.pid, code)
            self.metrics.restarts.inc()
            self._prepare(self._start())
            if self.change is not None:
                self.change.waiting.discard(server.process.pid)
                self._finish_change()

    def _forget(self, server: ServerProcess) -> None:
        self.processes.remove(server)
        if server.channel in self._selector.get_map():
            self._selector.unregister(server.channel)
        server.channel.close()
        self.metrics.forget(server.process.pid)

    def _stop(self) -> None:
        """Lets the processes answer what they have taken, then kills what is left."""
        for server in self.processes:
            with suppress(OSError):  # it ends without its channel, also if it misses the signal while it starts
                server.channel.shutdown(socket.SHUT_RDWR)
            server.process.terminate()
        limit = time.monotonic() + STOP_SECONDS
        for server in self.processes:
            try:
                server.process.wait(max(limit - time.monotonic(), 0.1))
            except subprocess.TimeoutExpired:
                server.process.send_signal(signal.SIGKILL)
                server.process.wait()
