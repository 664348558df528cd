"""A rank uses the interface of the address by which others know its host."""

import os
import socket

import psutil
import pytest

from pipeline.errors import TrainingError
from pipeline.training.launch.network import VARIABLES, find_address, set_interface


@pytest.fixture(autouse=True)
def unset(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


def test_a_host_that_reaches_itself_has_the_address_that_others_know() -> None:
    addresses = {
        one.address for found in psutil.net_if_addrs().values() for one in found if one.family == socket.AF_INET
    }
    assert {find_address(address) for address in addresses} == addresses


def test_the_interface_is_that_of_the_address_unless_the_user_has_set_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(os.environ, VARIABLES[0], "mine")
    set_interface("127.0.0.1")
    assert [os.environ[name] for name in VARIABLES] == ["mine", "lo"]


def test_an_address_that_the_host_lacks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "node")
    known = {"lo": [psutil._common.snicaddr(socket.AF_INET, "127.0.0.1", None, None, None)]}
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: known)
    with pytest.raises(TrainingError) as caught:
        set_interface("192.0.2.1")
    assert str(caught.value) == (
        "network interface of node: expected one with the address 192.0.2.1, got lo: 127.0.0.1. "
        "Set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME on this host."
    )


def test_a_master_without_an_address_is_refused() -> None:
    with pytest.raises(TrainingError) as caught:
        find_address("nowhere.invalid")
    assert str(caught.value).startswith("MASTER_ADDR: expected the address of rank 0's host, got nowhere.invalid: ")
