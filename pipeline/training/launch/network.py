"""Where ranks meet, and the network interface over which they reach ranks of other hosts."""

import ipaddress
import itertools
import os
import socket
from collections.abc import Sequence

import psutil

from pipeline.errors import ConfigError, TrainingError

VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
"""Without these, gloo takes the interface of the host's name, which on Debian is loopback."""


PLACE = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""Variables of a rank that torchrun sets, and that a script must set where another tool starts the ranks."""


def require_place(world_size: int) -> None:
    """Refuses an environment that does not say which rank this process is, and where ranks meet.

    Args:
        world_size: Number of ranks in the config.
    Raises:
        ConfigError: If a variable is absent, or there are more or fewer ranks.
    """
    missing = [name for name in PLACE if name not in os.environ]
    if "DLRM_MEETING" not in os.environ and missing:
        raise ConfigError(
            "variables of a rank", ", ".join(PLACE), f"no {', '.join(missing)}",
            "Start ranks with torchrun, or set them.",
        )  # fmt: skip
    if int(os.environ["WORLD_SIZE"]) != world_size:
        raise ConfigError(
            "WORLD_SIZE", f"training.world_size={world_size}", os.environ["WORLD_SIZE"], "Start as many ranks."
        )


def require_hosts(places: Sequence[tuple[str, int]], hosts: int) -> None:
    """Refuses ranks that are not on so many hosts, as many on each, and those of a host one after another.

    TorchRec takes it for granted where it divides a table among the ranks of one host.

    Args:
        places: Name of each rank's host and its LOCAL_WORLD_SIZE, in the order of the ranks.
    Raises:
        ConfigError: Names what is on which host.
    Example:
        >>> require_hosts([("a", 2), ("a", 2), ("b", 2), ("b", 2)], 2)
    """
    share = len(places) // hosts
    found = [(name, size, len(list(ranks))) for (name, size), ranks in itertools.groupby(places)]
    even = all(size == count == share for _, size, count in found)
    if not even or len({name for name, _ in places}) != len(found):
        raise ConfigError(
            "training.hosts", f"{hosts} hosts with {share} consecutive ranks and LOCAL_WORLD_SIZE={share} on each",
            ", ".join(f"{count} on {name} with LOCAL_WORLD_SIZE={size}" for name, size, count in found),
            "Start as many ranks on each host (training.resources does that on Ray), or leave out training.hosts.",
        )  # fmt: skip


def find_meeting() -> str:
    """Returns where the ranks meet, in PyTorch's form: at the file that their launcher names, or at MASTER_ADDR.

    In the second case sets the network interface, too.

    Raises:
        TrainingError: If ranks of other hosts could not reach this one at its address.
    """
    if "DLRM_MEETING" in os.environ:
        return f"file://{os.environ['DLRM_MEETING']}"
    master = os.environ["MASTER_ADDR"]
    address = find_address(master)
    alone = os.environ["LOCAL_WORLD_SIZE"] == os.environ["WORLD_SIZE"]
    chosen = all(name in os.environ for name in VARIABLES)
    if ipaddress.ip_address(address).is_loopback and not alone and not chosen:
        raise TrainingError(
            "MASTER_ADDR", "an address at which other hosts reach rank 0's",
            f"{master}, which is loopback on {socket.gethostname()}",
            f"Set it to the IP address, or set {' and '.join(VARIABLES)}.",
        )  # fmt: skip
    set_interface(address)
    return "env://"


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
