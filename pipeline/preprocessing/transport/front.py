"""The master's side of the network: ranks converse with it by Flight actions that may be repeated without harm."""

import json
import threading
import time
from collections.abc import Callable
from typing import Annotated, Any, Literal

import pyarrow.flight as flight
from pydantic import BaseModel, Field, NonNegativeInt, TypeAdapter, ValidationError

from pipeline.preprocessing.transport import framing
from pipeline.preprocessing.transport.access import address_of, listen
from pipeline.preprocessing.transport.addresses import NetworkSettings, ServiceAddress
from pipeline.preprocessing.transport.conversation import Connection, Incoming

POLL_SECONDS = 2.0
"""A call waits for its answer this long. Then the client calls again."""
SESSION_SECONDS = 120.0
"""A client that does not call for this long counts as gone."""


class _Call(BaseModel, frozen=True):
    """The body of an action."""

    session: Annotated[str, Field(min_length=16, max_length=64)]
    """Chosen by the client."""
    number: NonNegativeInt = 0
    """Number of the message in the session. A call that is repeated has the same."""
    message: dict[str, Any] = {}


KIND: TypeAdapter[Literal["open", "take", "close"]] = TypeAdapter(Literal["open", "take", "close"])


class _Session:
    """A client's connection, over many calls."""

    def __init__(self) -> None:
        self.connection = Connection(self)
        self.changed = threading.Condition()
        self.heard = time.monotonic()
        self.number = 0
        """Number of the last message that was passed to the master."""
        self.answer: framing.Message | None = None
        """The answer to it."""
        self.ended = False

    def put(self, answer: framing.Message | None) -> None:
        """Hands an answer to the waiting call. None: there is none any more."""
        with self.changed:
            self.answer, self.ended = answer or self.answer, self.ended or answer is None
            self.changed.notify_all()

    def close(self) -> None:
        """Does nothing: there is only memory."""

    def wait(self, seconds: float) -> framing.Message:
        """Returns the answer to the last message. Empty: call again."""
        with self.changed:
            self.changed.wait_for(lambda: self.answer is not None or self.ended, seconds)
            if self.answer is None and self.ended:
                raise flight.FlightServerError("the service has ended this conversation")
            return self.answer or {}


class NetworkFront(flight.FlightServerBase):
    """Receives the messages of ranks and sends the master's answers.

    Args:
        settings: Where and for whom it listens.
        put: Takes messages for the master.
    Attributes:
        address: Where ranks find it.
    """

    def __init__(self, settings: NetworkSettings, put: Callable[[Incoming], None]) -> None:
        arguments, certificate = listen(settings.host, settings.token)
        super().__init__(**arguments)
        found = address_of(settings.host, self.port, certificate)
        self.address = ServiceAddress(**found.model_dump(), token=settings.token)
        self.put = put
        self.sessions: dict[str, _Session] = {}
        self.lock = threading.Lock()

    def do_action(self, context: Any, action: flight.Action) -> list[bytes]:
        """Passes a message on and returns the answer, if it comes soon."""
        try:
            kind, call = KIND.validate_python(action.type), _Call.model_validate_json(action.body.to_pybytes())
        except ValidationError:
            raise flight.FlightServerError("expected a message of a rank") from None
        session = self._find(call.session, kind == "open")
        if session is None:
            raise flight.FlightServerError("expected a conversation that is open")
        answer: framing.Message = {}
        if kind == "close":
            self._end(call.session)
        else:
            self._pass_on(session, call)
            answer = session.wait(0.0 if kind == "open" else POLL_SECONDS)
        return [json.dumps(answer).encode()]

    def _find(self, name: str, new: bool) -> _Session | None:
        with self.lock:
            session = self.sessions.setdefault(name, _Session()) if new else self.sessions.get(name)
        if session is not None:
            session.heard = time.monotonic()
        return session

    def _pass_on(self, session: _Session, call: _Call) -> None:
        """Passes a message on, once."""
        with session.changed:
            if call.number != session.number + 1:
                return
            session.number, session.answer = call.number, None
        self.put(Incoming(session.connection, call.message))

    def _end(self, name: str) -> None:
        with self.lock:
            session = self.sessions.pop(name, None)
        if session is not None:
            session.put(None)
            self.put(Incoming(session.connection, None))

    def send(self, connection: Connection, message: framing.Message, descriptors: list[int]) -> None:
        """Sends a message of the master."""
        if connection.channel.ended:
            raise BrokenPipeError
        connection.channel.put(message)

    def hang_up(self, connection: Connection) -> None:
        """Ends a connection."""
        for name, session in list(self.sessions.items()):
            if session is connection.channel:
                self._end(name)

    def watch(self) -> None:
        """Ends the sessions of clients that are gone."""
        late = time.monotonic() - SESSION_SECONDS
        for name, session in list(self.sessions.items()):
            if session.heard < late:
                self._end(name)

    def close(self) -> None:
        """Ends all conversations, then the server."""
        for name in list(self.sessions):
            self._end(name)
        self.shutdown()
