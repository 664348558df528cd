"""Where the parts of the service find each other over the network. Without Arrow Flight, which configs do not need."""

import ipaddress
import os
import socket
from contextlib import suppress
from pathlib import Path

from pydantic import BaseModel, Field, NonNegativeInt, PositiveInt

from pipeline.errors import DataError


class Address(BaseModel, frozen=True):
    """Where a server listens."""

    location: str
    """Such as `grpc://127.0.0.1:4711`, or `grpc+tls://` beyond this machine."""
    certificate: str | None = None
    """The server's own certificate, in PEM. None: without TLS."""


class ServiceAddress(Address, frozen=True):
    """Where the master listens, and what its clients have to show."""

    token: str = Field(repr=False, pattern=r"^[0-9a-f]+$")


class NetworkSettings(BaseModel, frozen=True):
    """What a worker has to know to serve its results."""

    host: str
    """Its own address, to which others connect."""
    token: str = Field(repr=False, pattern=r"^[0-9a-f]+$")
    """What others have to show: a secret of this run."""
    connections: PositiveInt
    """Workers that it is connected to at a time."""


class Place(BaseModel, frozen=True, extra="forbid"):
    """Where a result is kept."""

    address: Address
    key: NonNegativeInt


class Ticket(BaseModel, frozen=True, extra="forbid"):
    """What a client asks a worker for."""

    key: NonNegativeInt
    share: NonNegativeInt | None = None
    """Place of a rank among those that the batches were made for. None: the rows of a split."""
    first: NonNegativeInt = 0
    """Batches that the rank has already."""


def is_loopback(host: str) -> bool:
    """Returns whether an address is of this machine alone.

    Example:
        >>> is_loopback("127.0.0.1"), is_loopback("10.0.0.2")
        (True, False)
    """
    return ipaddress.ip_address(host).is_loopback


class UnreachableError(DataError):
    """A worker does not serve what it keeps."""

    def __init__(self, location: str, reason: str) -> None:
        super().__init__(
            f"preprocessing worker at {location}", "to serve what it keeps", reason,
            "See whether the machines reach each other, and the workers' logs.",
        )  # fmt: skip
        self.location = location


CLUSTER_FILE = Path("/tmp/ray/ray_current_cluster")
"""Where Ray notes the address of the cluster that this machine is part of."""


def find_cluster(ray_address: str) -> tuple[str, int]:
    """Returns host and port of a Ray cluster.

    Raises:
        ValueError: If the address does not tell them.

    Example:
        >>> find_cluster("10.0.0.1:6379")
        ('10.0.0.1', 6379)
    """
    if ray_address == "auto":
        ray_address = os.environ.get("RAY_ADDRESS", "")
        with suppress(OSError):
            ray_address = ray_address or CLUSTER_FILE.read_text(encoding="ascii").strip()
    host, _, port = ray_address.rpartition("/")[2].rpartition(":")
    return host.strip("[]"), int(port)


def find_own_host(ray_address: str | None) -> str:
    """Returns the address of this machine from which it reaches a Ray cluster. Without a cluster: 127.0.0.1.

    Example:
        >>> find_own_host(None), find_own_host("127.0.0.1:6379")
        ('127.0.0.1', '127.0.0.1')
    """
    with suppress(OSError, ValueError):
        host, port = find_cluster(ray_address or "")
        found = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(found[0], socket.SOCK_DGRAM) as probe:  # sends nothing
            probe.connect(found[4])
            return str(probe.getsockname()[0])
    return "127.0.0.1"
