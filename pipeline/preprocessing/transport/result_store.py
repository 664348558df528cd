"""The results of a worker that others fetch from it over Arrow Flight: ranks their batches, workers their rows."""

import itertools
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.flight as flight
from pydantic import ValidationError

from pipeline.preprocessing.epoch.batches import cut_share
from pipeline.preprocessing.epoch.memory import Arrays, Segment
from pipeline.preprocessing.transport.access import address_of, connect, listen, make_options
from pipeline.preprocessing.transport.addresses import Address, NetworkSettings, Place, Ticket, UnreachableError
from pipeline.preprocessing.transport.records import EMPTY, chunk_records, join_chunks, to_record

FETCH_SECONDS = 30.0
"""A worker tries for this long to get rows from another one. Then its work fails and is given out again."""
PAUSE_SECONDS = 0.2
"""Pause after the first failed attempt. It doubles up to `LONGEST_PAUSE_SECONDS`."""
LONGEST_PAUSE_SECONDS = 3.0


class Connections:
    """A bounded number of connections to workers. The one that was not used for longest is closed for a new one."""

    def __init__(self, most: int, token: str) -> None:
        self.most, self.options = most, make_options(token)
        self.open: OrderedDict[str, flight.FlightClient] = OrderedDict()

    def get(self, address: Address, ticket: Ticket, seconds: float) -> Iterator[pa.RecordBatch]:
        """Yields the records of a ticket.

        Args:
            seconds: Time limit of the whole transfer.
        Raises:
            pyarrow.ArrowException: If the worker is unreachable, or does not have the result.
        """
        client = self.open.pop(address.location, None) or connect(address)
        self.open[address.location] = client
        while len(self.open) > self.most:
            self.open.popitem(last=False)[1].close()
        reader = client.do_get(flight.Ticket(ticket.model_dump_json().encode()), self.options(timeout=seconds))
        try:
            while True:
                yield reader.read_chunk().data
        except StopIteration:
            return
        finally:
            reader.cancel()

    def drop(self, address: Address) -> None:
        """Closes the connection to a worker. The next call makes a new one."""
        if (client := self.open.pop(address.location, None)) is not None:
            client.close()

    def close(self) -> None:
        """Closes all connections."""
        while self.open:
            self.open.popitem()[1].close()


class ResultStore(flight.FlightServerBase):
    """Keeps what a worker has made until the master says that nobody needs it.

    Attributes:
        address: Where it listens.
    """

    def __init__(self, settings: NetworkSettings) -> None:
        token = settings.token
        arguments, certificate = listen(settings.host, token)
        super().__init__(**arguments)
        self.address = address_of(settings.host, self.port, certificate)
        self.connections = Connections(settings.connections, token)
        self.results: dict[int, tuple[Segment, Arrays]] = {}
        self.numbers = itertools.count()
        self.fetched: dict[tuple[str, int], Arrays] = {}
        self.lock = threading.Lock()

    def keep(self, segment: Segment) -> Place:
        """Keeps a result. Returns its place."""
        key = next(self.numbers)
        with self.lock:
            self.results[key] = segment, segment.arrays()
        return Place(address=self.address, key=key)

    def drop(self, keys: Sequence[int]) -> None:
        """Frees results. Those that are being sent are freed afterwards."""
        with self.lock:
            dropped = [self.results.pop(key) for key in keys if key in self.results]
        for segment, _ in dropped:
            segment.close()

    def find(self, places: Sequence[Place]) -> list[Arrays]:
        """Returns the rows of splits, from here or from other workers.

        Rows of other workers stay until the next call: the next group of batches often needs them, too.

        Raises:
            UnreachableError: If another worker cannot be reached.
        """
        before, self.fetched = self.fetched, {}
        found = []
        for place in places:
            if place.address.location == self.address.location:
                found.append(self.results[place.key][1])
                continue
            key = place.address.location, place.key
            self.fetched[key] = before[key] if key in before else self._fetch(place)
            found.append(self.fetched[key])
        return found

    def _fetch(self, place: Place) -> Arrays:
        end = time.monotonic() + FETCH_SECONDS
        pause = PAUSE_SECONDS
        while True:
            try:
                rows = self.connections.get(place.address, Ticket(key=place.key), FETCH_SECONDS)
                return join_chunks(rows)
            except (pa.ArrowException, ValueError) as error:
                self.connections.drop(place.address)
                if isinstance(error, flight.FlightServerError) or time.monotonic() + pause > end:
                    raise UnreachableError(place.address.location, first_line(error)) from None
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE_SECONDS)

    def do_get(self, context: Any, ticket: flight.Ticket) -> flight.FlightDataStream:
        """Sends a rank's shares of a group of batches, one record a batch, or the rows of a split."""
        try:
            wanted = Ticket.model_validate_json(ticket.ticket)
        except ValidationError:
            raise flight.FlightServerError("expected the ticket of a result") from None
        with self.lock:
            kept = self.results.get(wanted.key)
        if kept is None:
            raise flight.FlightServerError(f"expected the key of a result, got {wanted.key}, which was freed")
        records = chunk_records(kept[1]) if wanted.share is None else _share_records(kept[1], wanted)
        first = next(records, None)
        if first is None:
            return flight.GeneratorStream(EMPTY, iter(()))
        return flight.GeneratorStream(first.schema, itertools.chain([first], records))

    def close(self) -> None:
        """Ends the server and frees everything."""
        self.shutdown()
        self.connections.close()
        self.drop(list(self.results))


def _share_records(group: Arrays, wanted: Ticket) -> Iterator[pa.RecordBatch]:
    """Yields a rank's share of each batch of a group."""
    batches, ranks, _ = group["shares"].shape if "shares" in group else (0, 0, 0)
    if wanted.share is None or wanted.share >= ranks:
        raise flight.FlightServerError(f"expected a rank of these batches, got {wanted.share} of {ranks}")
    for batch in range(wanted.first, batches):
        yield to_record(cut_share(group, batch, wanted.share))


def first_line(error: BaseException) -> str:
    """Returns the first line of an error's text, without gRPC's details."""
    text = str(error).strip().split("\n")[0]
    return (text.split(". Detail:")[0] or type(error).__name__).rstrip(".")
