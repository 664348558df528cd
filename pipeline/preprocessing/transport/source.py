"""Batches from workers of other machines: asks the master which worker has them, and fetches them there."""

import json
import queue
import secrets
import threading
import time
from contextlib import suppress

import pyarrow as pa
import pyarrow.flight as flight
from pydantic import BaseModel, ValidationError

from pipeline.data.position import LostRows
from pipeline.errors import ContractError, DataError
from pipeline.preprocessing.epoch.batches import join_share
from pipeline.preprocessing.epoch.memory import Arrays
from pipeline.preprocessing.epoch.request import GROUP_ROWS, BatchNote, Request
from pipeline.preprocessing.transport import framing
from pipeline.preprocessing.transport.access import connect, make_options
from pipeline.preprocessing.transport.addresses import Place, ServiceAddress, Ticket, UnreachableError
from pipeline.preprocessing.transport.conversation import (
    Conversation,
    Deliveries,
    Delivery,
    check_delivery,
    parse_notes,
)
from pipeline.preprocessing.transport.records import from_record
from pipeline.preprocessing.transport.result_store import LONGEST_PAUSE_SECONDS, PAUSE_SECONDS, Connections, first_line

PATIENCE_SECONDS = 120.0
"""A rank tries for this long to reach the master, or a worker that has its batches."""
TRANSFER_SECONDS = 10.0
"""Time limit of the first transfer of a group. It doubles with each attempt, which begins with the first batch that
is still missing."""
CALL_SECONDS = 30.0
"""Longest time of one call of the master."""


class _Kept(BaseModel, frozen=True):
    """An answer that says where batches are."""

    place: Place


class NetworkSource:
    """Delivers the batches of a service of any machine.

    Args:
        address: `Service.address`.
        connections: Workers to be connected to at a time.
    """

    def __init__(self, address: ServiceAddress, connections: int) -> None:
        self.address, self.connections = address, connections

    def ranks(self, rank: int, world_size: int) -> tuple[int, ...]:
        """Returns all ranks."""
        return tuple(range(world_size))

    def groups(self, request: Request, rank: int) -> Deliveries:
        """See `BatchSource`. A thread fetches the next batches while the last ones are trained.

        Raises:
            ContractError: The error that stopped the service, or that master or worker cannot be reached.
        """
        fetcher = _Fetcher(self.address, self.connections, request, rank)
        fetcher.start()
        try:
            while (delivery := fetcher.next()) is not None:
                yield delivery
            return fetcher.lost
        finally:
            fetcher.end()


class _Fetcher(threading.Thread):
    """Converses with the master and fetches what it names.

    Attributes:
        lost: See `Position.lost`. Known at the end.
    """

    def __init__(self, address: ServiceAddress, connections: int, request: Request, rank: int) -> None:
        super().__init__(name="preprocessing-fetch", daemon=True)
        token = address.token
        self.request, self.place = request, request.ranks.index(rank)
        self.talk = Conversation(request, rank)
        self.master, self.options = connect(address), make_options(token)
        self.location = address.location
        self.session, self.number = secrets.token_hex(16), 0
        self.workers = Connections(connections, token)
        self.ready: queue.Queue[Delivery | BaseException | None] = queue.Queue(max(2, GROUP_ROWS // request.batch_rows))
        self.waited = 0.0
        self.lost: tuple[LostRows, ...] = ()
        self.ending = threading.Event()

    # -- the trainer's side -------------------------------------------------------------------------------------

    def next(self) -> Delivery | None:
        """Returns the next batch, or None at the end."""
        begun = time.perf_counter()
        found = self.ready.get()
        self.waited += time.perf_counter() - begun
        if isinstance(found, BaseException):
            raise found
        return found

    def end(self) -> None:
        """Ends the thread."""
        self.ending.set()
        while self.is_alive():
            try:
                self.ready.get_nowait()  # it may wait for room
            except queue.Empty:
                self.join(0.05)

    # -- the thread ---------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Fetches all batches of the epoch."""
        result: BaseException | None = None
        try:
            self._fetch_all()
        except BaseException as error:  # raised where batches are taken
            result = error
        self._close()
        self.ready.put(result)

    def _fetch_all(self) -> None:
        opening, asking = self.talk.open()
        self._call("open", opening)
        message: framing.Message | None = asking
        while message is not None and not self.ending.is_set():
            answer = self._ask(message)
            if answer is None:
                return
            waited, self.waited = self.waited, 0.0
            message = self.talk.follow(answer, waited)
            if message is not None and not self._fetch_group(answer):
                return
        self.lost = self.talk.lost

    def _ask(self, message: framing.Message) -> framing.Message | None:
        """Returns the master's answer to a message. None: the trainer takes no more."""
        answer = self._call("take", message)
        while not answer and not self.ending.is_set():
            answer = self._call("take", message, repeated=True)
        return answer or None

    def _fetch_group(self, answer: framing.Message) -> bool:
        """Fetches a group of batches, and asks for it again where its worker fails. Returns whether it is complete."""
        notes = parse_notes(answer)
        end, pause, limit = time.monotonic() + PATIENCE_SECONDS, PAUSE_SECONDS, TRANSFER_SECONDS
        shares: list[Arrays] = []
        while True:
            try:
                place = _Kept.model_validate(answer).place
                ticket = Ticket(key=place.key, share=self.place, first=len(shares))
                for record in self.workers.get(place.address, ticket, limit):
                    shares.append(from_record(record))
                if len(shares) != len(notes):
                    raise ValueError(f"{len(shares)} of {len(notes)} batches")
                return all(self._deliver(note, share) for note, share in zip(notes, shares, strict=True))
            except ValidationError:
                raise DataError(
                    "preprocessing service", "the worker that has the batches", "another message",
                    "Run the command again to resume from the last checkpoint.",
                ) from None  # fmt: skip
            except (pa.ArrowException, ValueError) as error:
                self.workers.drop(place.address)
                if time.monotonic() > end:
                    raise UnreachableError(place.address.location, first_line(error)) from None
            if self.ending.wait(pause):
                return False
            pause, limit = min(2 * pause, LONGEST_PAUSE_SECONDS), 2 * limit
            again = self._ask(self.talk.ask_again())
            if again is None:
                return False
            answer = again
            self.talk.follow(answer, 0.0)

    def _deliver(self, note: BatchNote, share: Arrays) -> bool:
        """Hands a batch to the trainer. Returns False if it takes no more."""
        delivery = [note], join_share(share, self.place, len(self.request.ranks))
        check_delivery(self.request, *delivery)
        while not self.ending.is_set():
            try:
                self.ready.put(delivery, timeout=CALL_SECONDS)
                return True
            except queue.Full:
                self._call("take", {}, repeated=True)  # tells the master that this rank is alive
        return False

    def _call(self, kind: str, message: framing.Message, repeated: bool = False) -> framing.Message:
        """Calls the master. A call that fails is repeated; the master takes each message once.

        Raises:
            DataError: If the master cannot be reached.
        """
        self.number += not repeated and kind != "close"
        body = json.dumps({"session": self.session, "number": self.number, "message": message}).encode()
        end, pause = time.monotonic() + PATIENCE_SECONDS, PAUSE_SECONDS
        while True:
            try:
                (found,) = self.master.do_action(flight.Action(kind, body), self.options(timeout=CALL_SECONDS))
                answer: framing.Message = json.loads(found.body.to_pybytes())
                return answer
            except flight.FlightUnauthenticatedError:
                raise DataError(
                    f"preprocessing service at {self.location}", "the token of its run", "another",
                    "Start the ranks of the training that runs now: it gives them the token.",
                ) from None  # fmt: skip
            except (flight.FlightServerError, ValueError, RecursionError) as error:
                raise _unreachable(f"preprocessing service at {self.location}", error) from None
            except pa.ArrowException as error:
                if time.monotonic() > end or kind == "close":
                    raise _unreachable(f"preprocessing service at {self.location}", error) from None
            self.ending.wait(pause)
            pause = min(2 * pause, LONGEST_PAUSE_SECONDS)

    def _close(self) -> None:
        with suppress(ContractError, pa.ArrowException):  # the other side may be gone
            self._call("close", {})
        self.workers.close()
        self.master.close()


def _unreachable(where: str, error: BaseException) -> DataError:
    return DataError(
        where, "an answer", first_line(error),
        "See whether the machines reach each other. Then run the command again to resume from the last checkpoint.",
    )  # fmt: skip
