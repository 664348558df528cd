"""A rank's connection, as the master knows it, and the messages that come from it."""

from dataclasses import dataclass
from typing import Any

from pipeline.preprocessing.epoch.stream import Stream
from pipeline.preprocessing.transport import framing


@dataclass(eq=False)
class Connection:
    """A rank's connection, for one stream."""

    channel: Any
    """Belongs to the transport."""
    stream: Stream | None = None
    rank: int = 0
    wanted: int | None = None
    """Number of the group that the rank waits for."""
    next: int = 0
    """Number of the group that it may ask for next."""
    again: int = 0
    """How often it asked for a group again."""
    tries: int = 0
    """How often it asked for the last group again."""
    refused: bool = False
    """Whether it sent something that no rank sends. All further messages are ignored."""

    def close(self) -> None:
        """Closes what the transport holds open for it."""
        self.channel.close()


@dataclass(frozen=True)
class Incoming:
    """A message from a connection. None means that the connection was closed."""

    connection: Connection
    message: framing.Message | None
