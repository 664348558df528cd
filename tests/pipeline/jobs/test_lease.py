"""A lease admits one holder at a time, also after a holder was killed or stood still."""

import logging
import multiprocessing
import threading
import time
from contextlib import ExitStack
from pathlib import Path

import pytest
from sqlalchemy import create_engine, delete, select, text

from pipeline.jobs.lease import LEASES, lease
from tests.postgres import serving_postgres

QUICK = {"seconds": 2.0, "poll_seconds": 0.05}


@pytest.fixture
def address(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/catalog.db"


def test_blocks_of_many_holders_never_overlap(address: str, tmp_path: Path) -> None:
    """Each adds 1 to a number in a file, with a pause between reading and writing."""
    number = tmp_path / "number"
    number.write_text("0")

    def add() -> None:
        with lease(create_engine(address, connect_args={"timeout": 60}), "count", poll_seconds=0.02):
            found = int(number.read_text())
            time.sleep(0.02)
            number.write_text(f"{found + 1}")

    threads = [threading.Thread(target=add) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert number.read_text() == "8"
    with create_engine(address).begin() as connection:
        assert connection.execute(select(LEASES)).all() == [], "a lease outlived its block"


def ends(address: str) -> float:
    with create_engine(address).begin() as connection:
        return float(connection.execute(select(LEASES.c.ends)).scalar_one())


def _hold(address: str, held: "multiprocessing.synchronize.Event") -> None:
    with lease(create_engine(address), "train", **QUICK):
        held.set()
        time.sleep(600)


def test_a_killed_holder_loses_its_lease_after_a_time_and_is_named_before(address: str) -> None:
    spawn = multiprocessing.get_context("spawn")
    held = spawn.Event()
    other = spawn.Process(target=_hold, args=(address, held))
    other.start()
    names: list[str] = []
    try:
        assert held.wait(120)
        first = ends(address)
        while ends(address) == first:  # until it is renewed
            time.sleep(0.05)
        waiting = threading.Thread(target=lambda: _take_and_leave(address, names))
        waiting.start()
        while not names:
            time.sleep(0.01)
        other.kill()
        waiting.join(60)
        assert not waiting.is_alive()
        assert names == [names[0], "mine"]
        assert f"process {other.pid} on " in names[0]
    finally:
        other.kill()


def _take_and_leave(address: str, names: list[str]) -> None:
    with lease(create_engine(address), "train", names.append, **QUICK):
        names.append("mine")


def test_other_work_does_not_wait(address: str) -> None:
    with ExitStack() as both:
        for work in ("training of model 'a'", "training of model 'b'"):
            both.enter_context(lease(create_engine(address), work, pytest.fail))


def test_a_lost_lease_is_said_and_not_taken_back(address: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "dlrm")
    engine = create_engine(address)
    with lease(engine, "train", seconds=0.4):
        with engine.begin() as connection:
            connection.execute(delete(LEASES))
        with lease(create_engine(address), "train", pytest.fail):
            limit = time.monotonic() + 240
            while "ended while this process stood still" not in caplog.text:
                assert time.monotonic() < limit
                time.sleep(0.01)
    with engine.begin() as connection:
        assert connection.execute(select(LEASES)).all() == []


def test_a_database_that_is_lost_at_the_end_does_not_fail_the_work(
    address: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with lease(create_engine(address), "train"):
        (tmp_path / "catalog.db").unlink()
    assert "the lease of the train was not given back" in caplog.text


@pytest.mark.slow
def test_a_user_who_may_only_read_works_without_a_lease(caplog: pytest.LogCaptureFixture) -> None:
    with serving_postgres() as owner:
        with create_engine(owner).begin() as connection:
            connection.execute(text("create role reader login"))
        reader = owner.replace("tester@", "reader@")
        with lease(create_engine(reader), "train", pytest.fail):
            assert "no lease of the train, so other machines do not wait: " in caplog.text
            assert "permission denied" in caplog.text
