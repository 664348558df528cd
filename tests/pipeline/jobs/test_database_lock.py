"""A lock admits one holder at a time, also after a holder was killed or has lost its connection."""

import logging
import multiprocessing
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import create_engine, event, text

from pipeline.jobs.database_lock import database_lock
from tests.postgres import serving_postgres


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with serving_postgres() as found:
        yield found


@pytest.mark.slow
def test_blocks_of_many_holders_never_overlap(address: str, tmp_path: Path) -> None:
    """Each adds 1 to a number in a file, with a pause between reading and writing."""
    number = tmp_path / "number"
    number.write_text("0")

    def add() -> None:
        with database_lock(create_engine(address), "count", poll_seconds=0.02):
            found = int(number.read_text())
            time.sleep(0.02)
            number.write_text(f"{found + 1}")

    threads = [threading.Thread(target=add) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert number.read_text() == "8"
    with create_engine(address).connect() as connection:
        left = "select count(*) from pg_locks where locktype = 'advisory'"
        assert connection.execute(text(left)).scalar() == 0, "a lock outlived its block"


def _hold(address: str, held: "multiprocessing.synchronize.Event") -> None:
    with database_lock(create_engine(address), "train"):
        held.set()
        time.sleep(600)


@pytest.mark.slow
def test_a_killed_holder_loses_its_lock_and_is_named_before(address: str) -> None:
    spawn = multiprocessing.get_context("spawn")
    held = spawn.Event()
    other = spawn.Process(target=_hold, args=(address, held))
    other.start()
    names: list[str] = []
    try:
        assert held.wait(120)
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
    with database_lock(create_engine(address), "train", names.append, poll_seconds=0.05):
        names.append("mine")


@pytest.mark.nightly
def test_other_work_does_not_wait(address: str) -> None:
    engine = create_engine(address)
    with ExitStack() as both:
        for work in ("training of model 'a'", "training of model 'b'"):
            both.enter_context(database_lock(engine, work, pytest.fail))
    with engine.connect() as connection:  # one of the pool is as it was
        assert connection.execute(text("show application_name")).scalar() == ""


@pytest.mark.nightly
def test_postgres_asks_within_a_minute_whether_the_machine_is_there(address: str) -> None:
    engine, opened = create_engine(address), list[Any]()
    event.listen(engine, "connect", lambda connection, record: opened.append(connection))
    with database_lock(engine, "train"):
        cursor = opened[0].cursor()
        idle, interval, count = (
            f"current_setting('tcp_keepalives_{name}')::int" for name in ("idle", "interval", "count")
        )
        cursor.execute(f"select {idle} + {interval} * {count}")
        assert cursor.fetchone() == (60,)


@pytest.mark.slow
def test_a_lost_lock_is_said(address: str, caplog: pytest.LogCaptureFixture) -> None:
    """With its connection, or without, as behind a pool of connections."""
    caplog.set_level(logging.WARNING, "dlrm")
    engine, opened = create_engine(address), list[Any]()
    event.listen(engine, "connect", lambda connection, record: opened.append(connection))
    with database_lock(engine, "ingest"):
        opened[0].cursor().execute("select pg_advisory_unlock_all()")
    assert "the lock of the ingest was lost, and another may have done the same work: it was not held" in caplog.text
    caplog.clear()
    with database_lock(engine, "train"):
        with engine.connect() as connection:
            end = "select pg_terminate_backend(pid) from pg_locks where locktype = 'advisory'"
            assert connection.execute(text(end)).tuples().all() == [(True,)]
        with database_lock(create_engine(address), "train", poll_seconds=0.05):
            assert not caplog.messages
    assert "the lock of the train was lost, and another may have done the same work: " in caplog.text


@pytest.mark.nightly
def test_an_error_of_the_work_matters_more_than_a_lost_lock(address: str) -> None:
    engine = create_engine(address)

    def fail() -> None:
        with engine.connect() as connection:
            connection.execute(text("select pg_terminate_backend(pid) from pg_locks where locktype = 'advisory'"))
        raise KeyError

    with pytest.raises(KeyError), database_lock(engine, "train"):
        fail()


@pytest.mark.nightly
def test_a_user_who_may_only_read_has_locks_as_well(address: str) -> None:
    with create_engine(address).begin() as connection:
        connection.execute(text("create role reader login"))
    reader, names = address.replace("tester@", "reader@"), list[str]()
    with database_lock(create_engine(address), "train"):
        waiting = threading.Thread(target=lambda: _take_and_leave(reader, names))
        waiting.start()
        while not names:
            time.sleep(0.01)
        assert names == [f"process {os.getpid()} on {socket.gethostname()}"]
    waiting.join(60)
    assert names[1:] == ["mine"]
