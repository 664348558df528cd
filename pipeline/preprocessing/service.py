"""The preprocessing service: runs a master in its own thread and serves the clients of all ranks."""

import queue
import secrets
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

from pipeline.preprocessing.config import PreprocessingConfig
from pipeline.preprocessing.dataset import DataSpec
from pipeline.preprocessing.master import Master, Totals
from pipeline.preprocessing.rank_protocol import RankProtocol
from pipeline.preprocessing.transport import framing
from pipeline.preprocessing.transport.addresses import NetworkSettings, find_own_host
from pipeline.preprocessing.transport.conversation import Connection, Incoming
from pipeline.preprocessing.transport.unix import UnixFront


class Front(Protocol):
    """Carries the messages between ranks and the master."""

    @property
    def address(self) -> Any:
        """Where ranks find it: a name in the abstract namespace, or a `ServiceAddress`."""

    def send(self, connection: Connection, message: framing.Message, descriptors: list[int]) -> None:
        """Sends a message. Raises OSError if the other side is gone."""

    def hang_up(self, connection: Connection) -> None:
        """Ends a connection. An `Incoming` without message follows."""

    def watch(self) -> None:
        """Called now and then."""

    def close(self) -> None:
        """Ends all connections."""


class Service:
    """Runs workers and their master for the duration of a `with` block.

    Clients connect to `address`. In memory transport that is a Unix socket in the abstract namespace. It needs no port
    and no file, and admits only processes of the same user. In network transport it is a Flight server with a token.

    Args:
        data: The datasets that ranks can request, by name.
        folder: See `Master`.
        warn: See `Master`.
        reserved: Processors of the cluster that workers must leave to ranks.
    """

    def __init__(
        self,
        data: Mapping[str, DataSpec],
        config: PreprocessingConfig,
        folder: Path,
        warn: Callable[[str], None] = lambda text: None,
        reserved: int = 0,
    ) -> None:
        self.data, self.config, self.folder, self.warn, self.reserved = data, config, folder, warn, reserved
        self.totals = Totals()
        self.startup: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()

    @property
    def address(self) -> Any:
        """See `Front`."""
        return self.front.address

    def __enter__(self) -> Self:
        self.ending = threading.Event()
        # Workers die with the thread that starts them, so the whole master runs in one thread.
        self.thread = threading.Thread(target=self._run, name="preprocessing-master", daemon=True)
        self.thread.start()
        problem = self.startup.get()
        if problem is not None:
            self.thread.join()
            raise problem
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.ending.set()
        self.events.put(None)  # wakes the master
        self.thread.join()
        self.front.close()

    def _run(self) -> None:
        try:
            network = make_network(self.config) if self.config.uses_network else None
            master = Master(self.data, self.config, self.folder, self.warn, network=network, reserved=self.reserved)
            self.totals, self.events = master.totals, master.events
            try:
                self.front: Front = open_front(network, master.events.put)
            except BaseException:
                master.close()
                raise
        except BaseException as problem:  # `__enter__` raises it
            self.startup.put(problem)
            return
        self.startup.put(None)
        try:
            protocol = RankProtocol(master, self.front.send, self.front.hang_up)
            while not self.ending.is_set():
                event = master.next_event()
                protocol.turn(event)
                self.front.watch()
                if isinstance(event, Incoming) and event.message is None:
                    event.connection.close()
        finally:
            master.close()


def make_network(config: PreprocessingConfig) -> NetworkSettings:
    """Returns where and for whom the service and its workers listen: a new token for each service."""
    host = config.host or find_own_host(config.ray_address)
    return NetworkSettings(host=host, token=secrets.token_hex(32), connections=config.connections)


def open_front(network: NetworkSettings | None, put: Callable[[Incoming], None]) -> Front:
    """Opens what carries the messages: a Unix socket, or Flight with network settings."""
    if network is None:
        return UnixFront(put)
    from pipeline.preprocessing.transport.front import NetworkFront  # Flight takes a quarter of a second to import

    return NetworkFront(network, put)
