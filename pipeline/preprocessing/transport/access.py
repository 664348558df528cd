"""Who may speak with the service over the network: those who know the run's token, over TLS beyond this machine."""

import datetime
import hmac
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import pyarrow.flight as flight

from pipeline.preprocessing.transport.addresses import Address, is_loopback

NAME = "dlrm-preprocessing"
"""Name in every certificate. Clients trust one certificate for one address, so it names no host."""
VALID_DAYS = 365
"""A training may take this long."""
KEEPALIVE = [("grpc.keepalive_time_ms", 20_000), ("grpc.keepalive_timeout_ms", 60_000)]
"""A client notices that a machine is gone, and survives a link that is cut for up to a minute."""


class _Check(flight.ServerMiddlewareFactory):
    """Refuses calls without the token."""

    def __init__(self, token: str) -> None:
        super().__init__()
        self.expected = f"Bearer {token}".encode()

    def start_call(self, info: Any, headers: Mapping[str, Sequence[str | bytes]]) -> None:
        """Called before each call."""
        given = "".join(str(one) for one in headers.get("authorization", ()))
        if not hmac.compare_digest(given.encode(), self.expected):
            raise flight.FlightUnauthenticatedError("expected the token of this run, got another or none")


def listen(host: str, token: str) -> tuple[dict[str, Any], str | None]:
    """Returns the arguments with which a Flight server listens on a free port, and its certificate if it has one.

    Args:
        host: Address of this machine. Beyond loopback the server uses TLS.
    """
    arguments: dict[str, Any] = {"location": _locate("grpc", host, 0), "middleware": {"token": _Check(token)}}
    if is_loopback(host):
        return arguments, None
    certificate, key = make_certificate()
    return arguments | {"location": _locate("grpc+tls", host, 0), "tls_certificates": [(certificate, key)]}, certificate


def address_of(host: str, port: int, certificate: str | None) -> Address:
    """Returns the address under which clients reach a server."""
    return Address(location=_locate("grpc" if certificate is None else "grpc+tls", host, port), certificate=certificate)


def connect(address: Address) -> flight.FlightClient:
    """Returns a client of a server. It connects with its first call."""
    trust = {}
    if address.certificate is not None:
        trust = {"tls_root_certs": address.certificate, "override_hostname": NAME}
    return flight.FlightClient(address.location, generic_options=KEEPALIVE, **trust)


def make_options(token: str) -> "partial[flight.FlightCallOptions]":
    """Returns what makes the options of a call: it shows the token."""
    return partial(flight.FlightCallOptions, headers=[(b"authorization", f"Bearer {token}".encode())])


def make_certificate() -> tuple[str, str]:
    """Returns a new certificate and its key, in PEM. The key never leaves the process."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, NAME)])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))  # clocks of machines differ
        .not_valid_after(now + datetime.timedelta(days=VALID_DAYS))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(NAME)]), critical=False)
        .sign(key, hashes.SHA256())
    )
    text = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return certificate.public_bytes(serialization.Encoding.PEM).decode(), text.decode()


def _locate(scheme: str, host: str, port: int) -> str:
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"
