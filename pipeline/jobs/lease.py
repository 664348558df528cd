"""Leases in the database of a shared catalog: two machines do not do the same work at once."""

import logging
import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from sqlalchemy import Column, Double, MetaData, String, Table, delete, false, func, insert, select, update
from sqlalchemy.exc import IntegrityError, InternalError, OperationalError, ProgrammingError, SQLAlchemyError

if TYPE_CHECKING:
    from sqlalchemy import Connection, Engine

LEASE_SECONDS = 60.0
"""A lease that nobody has renewed for this long is free: its process or machine is gone."""
POLL_SECONDS = 2.0
LEASES = Table(
    "dlrm_leases", MetaData(),
    Column("work", String(255), primary_key=True),
    Column("token", String(32), nullable=False),
    Column("holder", String(255), nullable=False),
    Column("ends", Double, nullable=False),
)  # fmt: skip
log = logging.getLogger("dlrm")


@contextmanager
def lease(
    engine: "Engine",
    work: str,
    wait: Callable[[str], None] = lambda holder: None,
    seconds: float = LEASE_SECONDS,
    poll_seconds: float = POLL_SECONDS,
) -> Iterator[None]:
    """Waits until no other process has the lease of some work, and keeps it inside the block.

    A thread renews it. Times are those of the database, so that clocks of machines may differ. A process that was
    stopped for longer than the lease has lost it: the log says so, and commits still find what another writer did.

    Args:
        engine: The database.
        wait: Called once with the holder, if there is one.
        seconds: Time until a lease ends that is not renewed.
        poll_seconds: Time between two attempts.
    """
    token, told = uuid4().hex, False
    if (refusal := _create_table(engine)) is not None:
        log.warning("no lease of the %s, so other machines do not wait: %s", work, refusal)
        yield
        return
    while (holder := _take(engine, work, token, seconds)) is not None:
        if not told:
            wait(holder)
            told = True
        threading.Event().wait(poll_seconds)
    ended = threading.Event()
    keeper = threading.Thread(
        target=_keep, args=(engine, work, token, seconds, ended), name="dlrm lease", daemon=True
    )  # fmt: skip
    keeper.start()
    try:
        yield
    finally:
        ended.set()
        keeper.join()
        try:
            with engine.begin() as connection:
                connection.execute(delete(LEASES).where(_own(work, token)))
        except SQLAlchemyError as error:  # it ends by itself
            log.warning("the lease of the %s was not given back: %s", work, _reason(error))


def _create_table(engine: "Engine") -> str | None:
    """Makes the table where it is missing. Returns the database's reason if this user may only read."""
    try:
        with suppress(IntegrityError, OperationalError, ProgrammingError):  # another process makes it at the same time
            LEASES.metadata.create_all(engine)
        LEASES.metadata.create_all(engine)
        with engine.begin() as connection:
            connection.execute(delete(LEASES).where(false()))
    except (ProgrammingError, InternalError) as error:
        return _reason(error)
    return None


def _take(engine: "Engine", work: str, token: str, seconds: float) -> str | None:
    """Takes a lease that is free, and returns None. Otherwise returns its holder."""
    holder = f"process {os.getpid()} on {socket.gethostname()}"
    with engine.begin() as connection:
        now = _now(connection)
        row = {"token": token, "holder": holder, "ends": now + seconds}
        free = (LEASES.c.work == work) & (LEASES.c.ends < now)
        if connection.execute(update(LEASES).where(free).values(**row)).rowcount:
            return None
    try:
        with engine.begin() as connection:
            connection.execute(insert(LEASES).values(work=work, **row))
    except IntegrityError:
        with engine.begin() as connection:
            found = connection.execute(select(LEASES.c.holder).where(LEASES.c.work == work)).scalar()
        return str(found or "another process")
    return None


def _keep(engine: "Engine", work: str, token: str, seconds: float, ended: threading.Event) -> None:
    """Renews a lease until the work has ended. A database that does not answer is asked again."""
    while not ended.wait(seconds / 4):
        try:
            with engine.begin() as connection:
                renewed = connection.execute(
                    update(LEASES).where(_own(work, token)).values(ends=_now(connection) + seconds)
                ).rowcount
        except SQLAlchemyError as error:
            log.warning("the lease of the %s was not renewed: %s", work, _reason(error))
            continue
        if not renewed:
            log.warning("the lease of the %s ended while this process stood still; another may do the same work", work)
            return


def _reason(error: SQLAlchemyError) -> str:
    return str(error).split("\n")[0]


def _own(work: str, token: str) -> Any:
    return (LEASES.c.work == work) & (LEASES.c.token == token)


def _now(connection: "Connection") -> float:
    """Returns the database's time in seconds since 1970."""
    time = connection.execute(select(func.now())).scalar_one()
    return float((time if time.tzinfo else time.replace(tzinfo=UTC)).timestamp())
