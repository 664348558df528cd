"""A rank uses the interface of the address by which others know its host."""

import os
import socket
from types import SimpleNamespace

import psutil
import pytest

from pipeline.errors import ConfigError, TrainingError
from pipeline.training.launch.network import (
    PLACE,
    VARIABLES,
    find_address,
    find_meeting,
    require_hosts,
    require_place,
    set_interface,
)


@pytest.fixture(autouse=True)
def own_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = {name: value for name, value in os.environ.items() if name not in {*VARIABLES, *PLACE, "DLRM_MEETING"}}
    monkeypatch.setattr(os, "environ", kept)


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
    known = {"lo": [SimpleNamespace(address="127.0.0.1")]}
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


def test_a_rank_that_does_not_know_its_place_is_refused() -> None:
    os.environ |= dict.fromkeys(PLACE[:4], "1")
    with pytest.raises(ConfigError) as caught:
        require_place(1)
    assert str(caught.value) == (
        "variables of a rank: expected RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT, "
        "got no MASTER_ADDR, MASTER_PORT. Start ranks with torchrun, or set them."
    )
    os.environ |= dict.fromkeys(PLACE, "4")
    with pytest.raises(ConfigError) as caught:
        require_place(2)
    assert str(caught.value) == "WORLD_SIZE: expected training.world_size=2, got 4. Start as many ranks."


ELSEWHERE = {
    "one host": ([("a", 4)] * 4, "4 on a with LOCAL_WORLD_SIZE=4"),
    "uneven": ([("a", 3)] * 3 + [("b", 1)], "3 on a with LOCAL_WORLD_SIZE=3, 1 on b with LOCAL_WORLD_SIZE=1"),
    "in turn": (
        [("a", 2), ("b", 2)] * 2,
        ", ".join(f"1 on {host} with LOCAL_WORLD_SIZE=2" for host in "abab"),
    ),
    "four hosts": (
        [(host, 1) for host in "abcd"],
        ", ".join(f"1 on {host} with LOCAL_WORLD_SIZE=1" for host in "abcd"),
    ),
    "a wrong variable": (
        [("a", 2)] * 2 + [("b", 4)] * 2,
        "2 on a with LOCAL_WORLD_SIZE=2, 2 on b with LOCAL_WORLD_SIZE=4",
    ),
    "a name twice": ([("a", 2)] * 4, "4 on a with LOCAL_WORLD_SIZE=2"),
}


@pytest.mark.parametrize("case", ELSEWHERE)
def test_ranks_that_are_not_on_the_hosts_of_the_config_are_refused(case: str) -> None:
    places, got = ELSEWHERE[case]
    with pytest.raises(ConfigError) as caught:
        require_hosts(places, 2)
    assert str(caught.value) == (
        "training.hosts: expected 2 hosts with 2 consecutive ranks and LOCAL_WORLD_SIZE=2 on each, "
        f"got {got}. Start as many ranks on each host (training.resources does that on Ray), or leave out training.hosts."
    )


def test_ranks_meet_at_the_file_of_their_launcher_or_else_at_the_master() -> None:
    os.environ |= dict.fromkeys(PLACE, "1") | {"MASTER_ADDR": "127.0.0.1"}
    assert find_meeting() == "env://"
    assert [os.environ[name] for name in VARIABLES] == ["lo", "lo"]
    os.environ["DLRM_MEETING"] = "/run/store"
    assert find_meeting() == "file:///run/store"
