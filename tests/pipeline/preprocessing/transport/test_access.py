"""Only those who know the run's token are served, and beyond this machine only over TLS with the right certificate."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.flight as flight
import pytest

from pipeline.preprocessing.epoch.memory import PrivateWriter, Slabs, copy_to_segment
from pipeline.preprocessing.transport import result_store as module
from pipeline.preprocessing.transport.access import address_of, listen, make_certificate
from pipeline.preprocessing.transport.addresses import Address, NetworkSettings, Place, Ticket, UnreachableError
from pipeline.preprocessing.transport.result_store import Connections, ResultStore

TOKEN = "0123456789abcdef" * 4


@pytest.fixture
def store() -> Iterator[ResultStore]:
    made = ResultStore(NetworkSettings(host="127.0.0.1", token=TOKEN, connections=2))
    yield made
    made.close()


def kept(store: ResultStore) -> Place:
    writer = PrivateWriter()
    writer.add({"0.labels": ("float32", (2,)), "0.starts": ("int64", (1,)), "0.ids": ("int32", (0,))})
    writer.finish()["0.labels"][:] = 0.0, 1.0
    return store.keep(copy_to_segment(writer.finish(), Slabs()))


def fetch(place: Place, token: str = TOKEN, address: Address | None = None) -> Any:
    connections = Connections(1, token)
    try:
        return list(connections.get(address or place.address, Ticket(key=place.key), 10.0))
    finally:
        connections.close()


def test_a_result_is_served_until_it_is_dropped(store: ResultStore) -> None:
    place = kept(store)
    assert fetch(place)[0].column("labels").to_pylist() == [[0.0, 1.0]]
    store.drop([place.key])
    with pytest.raises(flight.FlightServerError, match="which was freed"):
        fetch(place)


def test_a_rank_whose_transfer_broke_gets_the_batches_that_it_lacks(store: ResultStore) -> None:
    """Two batches of three and two rows for two ranks."""
    writer = PrivateWriter()
    rows: dict[str, Any] = {"labels": ("float32", (5,)), "lengths": ("int32", (5,)), "values": ("int64", (5,))}
    writer.add({"shares": ("int64", (2, 2, 4)), **rows})
    group = writer.finish()
    group["shares"][:] = [[[0, 2, 0, 2], [2, 1, 2, 1]], [[3, 1, 3, 1], [4, 1, 4, 1]]]
    group["labels"][:], group["lengths"][:], group["values"][:] = range(5), 1, range(5)
    place = store.keep(copy_to_segment(group, Slabs()))
    connections = Connections(1, TOKEN)
    try:
        for has, lacks in enumerate([[2.0, 4.0], [4.0], []]):
            ticket = Ticket(key=place.key, share=1, first=has)
            found = [record.column("labels")[0].as_py() for record in connections.get(place.address, ticket, 10.0)]
            assert found == [[label] for label in lacks]
    finally:
        connections.close()


@pytest.mark.parametrize("token", ["", TOKEN[:-1], TOKEN[:-1] + "0"])
def test_a_wrong_token_is_refused(store: ResultStore, token: str) -> None:
    with pytest.raises(flight.FlightUnauthenticatedError):
        fetch(kept(store), token)


def test_beyond_loopback_a_server_has_a_certificate_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeline.preprocessing.transport.access.is_loopback", lambda host: False)
    server = ResultStore(NetworkSettings(host="127.0.0.1", token=TOKEN, connections=2))
    try:
        place = kept(server)
        assert server.address.location.startswith("grpc+tls://")
        assert "PRIVATE" not in str(server.address.certificate)
        assert len(fetch(place)) == 1
        stranger = Address(location=server.address.location, certificate=make_certificate()[0])
        plain = Address(location=server.address.location.replace("+tls", ""))
        for address in (stranger, plain):
            with pytest.raises(pa.ArrowException):
                fetch(place, address=address)
    finally:
        server.close()


def test_rows_of_a_worker_that_is_gone_are_named_with_its_place(
    store: ResultStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "FETCH_SECONDS", 0.5)
    other = ResultStore(NetworkSettings(host="127.0.0.1", token=TOKEN, connections=2))
    place, location = kept(other), other.address.location
    assert np.array_equal(store.find([place])[0]["0.labels"], [0.0, 1.0])
    store.fetched.clear()
    other.close()
    with pytest.raises(UnreachableError) as caught:
        store.find([place])
    assert caught.value.location == location
    assert str(caught.value).startswith(f"preprocessing worker at {location}: expected to serve what it keeps, got ")


def test_connections_are_bounded(store: ResultStore) -> None:
    others = [ResultStore(NetworkSettings(host="127.0.0.1", token=TOKEN, connections=2)) for _ in range(3)]
    connections = Connections(2, TOKEN)
    try:
        for other in others:
            list(connections.get(other.address, Ticket(key=kept(other).key), 10.0))
        assert list(connections.open) == [other.address.location for other in others[1:]]
    finally:
        connections.close()
        for other in others:
            other.close()


def test_addresses_of_ipv6_are_in_brackets() -> None:
    assert address_of("fe80::1", 80, None).location == "grpc://[fe80::1]:80"
    assert listen("::1", TOKEN)[0]["location"] == "grpc://[::1]:0"
