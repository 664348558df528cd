"""Ports for servers that tests start."""

import socket


def free_port() -> int:
    """Returns a port of loopback that nothing listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
