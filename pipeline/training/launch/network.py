"""Chooses the network interface over which a rank meets ranks of other hosts."""

import os
import socket

import psutil

from pipeline.errors import TrainingError

VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
"""Without these, gloo takes the interface of the host's name, which on Debian is loopback."""


def set_interface(address: str) -> None:
    """Makes gloo and NCCL of this process use the interface with an address. Variables that the user has set stay.

    Raises:
        TrainingError: If no interface of this host has the address.
    """
    if any(name not in os.environ for name in VARIABLES):
        interface = find_interface(address)
        for name in VARIABLES:
            os.environ.setdefault(name, interface)


def find_interface(address: str) -> str:
    """Returns the name of the network interface that has an address.

    Raises:
        TrainingError: If no interface of this host has it.
    Example:
        >>> find_interface("127.0.0.1")
        'lo'
    """
    addresses = {name: [one.address for one in found] for name, found in psutil.net_if_addrs().items()}
    for name, found in addresses.items():
        if address in found:
            return name
    raise TrainingError(
        f"network interface of {socket.gethostname()}", f"one with the address {address}",
        "; ".join(f"{name}: {', '.join(found)}" for name, found in addresses.items()),
        f"Set {' and '.join(VARIABLES)} on this host.",
    )  # fmt: skip


def find_address(master: str) -> str:
    """Returns the address of this host from which it reaches another one, or this one by its own address.

    Raises:
        TrainingError: If the other host's name is unknown or there is no way to it.
    Example:
        >>> find_address("127.0.0.1")
        '127.0.0.1'
    """
    try:
        family, kind, _, _, place = socket.getaddrinfo(master, 1, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(place)  # sends nothing
            return str(probe.getsockname()[0])
    except OSError as error:
        raise TrainingError(
            "MASTER_ADDR", "the address of rank 0's host", f"{master}: {error.strerror}",
            "Set it to an address that this host reaches.",
        ) from None  # fmt: skip
