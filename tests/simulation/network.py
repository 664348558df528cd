"""The service's protocol behind a simulated network, and the connections of ranks to it."""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from pipeline.preprocessing.config import PreprocessingConfig
from pipeline.preprocessing.master import TICK_SECONDS, Master
from pipeline.preprocessing.rank_protocol import RankProtocol
from pipeline.preprocessing.transport import framing
from pipeline.preprocessing.transport.conversation import Connection, Incoming
from tests.simulation.workers import Disk, SimulatedExecutor, make_executor
from tests.simulation.world import World

FAULTS = ("a message comes twice", "a stranger connects")
ROWS = "rows"
"""Name of the dataset."""


class Link:
    """A connection of a rank. Each direction keeps its order; connections overtake each other.

    Args:
        on_message: Called with each message for the rank and the result that it names, and with None at the end.
    """

    def __init__(
        self, world: World, service: "SimulatedService", on_message: Callable[[framing.Message | None, Any], None]
    ) -> None:
        self.world, self.service, self.on_message = world, service, on_message
        self.connection = Connection(self)
        self.open = True
        self.arrivals = [0.0, 0.0]

    def send(self, message: framing.Message) -> None:
        """Sends a message of the rank."""
        copy = json.loads(json.dumps(message))
        for _ in range(1 + self.world.strikes("a message comes twice")):
            self._after(0, lambda: self.service.put(Incoming(self.connection, copy)))

    def close(self) -> None:
        """Ends the connection from the rank's side."""
        if self.open:
            self.open = False
            self._after(0, lambda: self.service.put(Incoming(self.connection, None)))

    def answer(self, message: framing.Message, memory: Any) -> None:
        """Sends a message of the service."""
        if not self.open:
            raise BrokenPipeError
        copy = json.loads(json.dumps(message))
        self._after(1, lambda: self.on_message(copy, memory) if self.open else None)

    def hang_up(self) -> None:
        """Ends the connection from the service's side."""

        def end() -> None:
            if self.open:
                self.close()
                self.on_message(None, None)

        self._after(1, end)

    def _after(self, direction: int, action: Callable[[], None]) -> None:
        self.arrivals[direction] = max(self.arrivals[direction], self.world.now + self.world.between(0.0, 0.05))
        self.world.later(self.arrivals[direction] - self.world.now, action)


class SimulatedService:
    """The real master and its real rank protocol. Only workers, network and clock are simulated."""

    def __init__(self, world: World, disk: Disk, config: PreprocessingConfig, folder: Path) -> None:
        self.world = world
        make = make_executor(world, disk, self.wake, config.transport == "network")
        data: Any = {ROWS: SimpleNamespace(rows=sum(len(disk.rows(one)) for one in disk.fragments))}
        self.master = Master(data, config, folder, world.note, lambda: world.now, make)
        self.master.fragments[ROWS] = list(disk.fragments)
        executor = self.master.executor
        assert isinstance(executor, SimulatedExecutor)
        self.executor = executor
        self.protocol = RankProtocol(self.master, self._send, lambda connection: connection.channel.hang_up())
        self.running, self.awake, self.turns = True, False, 0
        self.states: set[tuple[int, ...]] = set()
        self.tick(0)

    def put(self, event: Incoming) -> None:
        """Delivers a message."""
        if self.running:
            self.master.events.put(event)
            self.wake()

    def wake(self) -> None:
        """Lets the service's thread run soon. Meanwhile more may arrive."""
        if not self.awake:
            self.awake = True
            self.world.later(self.world.between(0.0, 0.01), self._work)

    def tick(self, turns: int) -> None:
        """Takes a turn without event if nothing happened since."""
        if self.running and not self.awake and self.turns == turns:
            self._turn(None)

    def _work(self) -> None:
        self.awake = False
        while self.running and not self.master.events.empty():
            self._turn(self.master.next_event(0))

    def _turn(self, event: Any) -> None:
        self.turns += 1
        self.protocol.turn(event)
        self.states.add(self._state())
        turns = self.turns
        self.world.later(TICK_SECONDS, lambda: self.tick(turns))

    def _state(self) -> tuple[int, ...]:
        master = self.master
        workers = master.pool.workers.values()
        found = [len(workers), sum(worker.item is not None for worker in workers)]
        found += [len(self.protocol.connections), master.failure is not None]
        for stream in master.streams:
            found += [len(stream.reader.open), len(stream.running), len(stream.retries), len(stream.groups.to_make)]
            found += [len(stream.groups.groups), len(stream.missing), len(stream.left), len(stream.cutter.lost)]
        return tuple(found)

    def _send(self, connection: Connection, message: framing.Message, descriptors: list[int]) -> None:
        memory = self.executor.loans.pop(message["loan"]) if "loan" in message else None
        connection.channel.answer(message, memory)

    def end(self) -> None:
        """Ends in good order."""
        self.running = False
        self.master.close()
        self.executor.require_all_freed()

    def die(self) -> None:
        """Ends like a killed process."""
        self.running = False
        self.executor.close()
