"""Locks in the Postgres database of a shared catalog: two machines do not do the same work at once."""

import logging
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from sqlalchemy import text
from sqlalchemy.exc import SQLAlchemyError

if TYPE_CHECKING:
    from sqlalchemy import Engine

SETTINGS = (
    "select set_config('application_name', :holder, false), set_config('tcp_keepalives_idle', '15', false), "
    "set_config('tcp_keepalives_interval', '15', false), set_config('tcp_keepalives_count', '3', false)"
)
"""The server ends the connection of a machine that has not answered for a minute. Its default is two hours."""
TAKE = "select pg_try_advisory_lock(hashtextextended(:work, 0))"
GIVE_BACK = "select pg_advisory_unlock(hashtextextended(:work, 0))"
HOLDER = (
    "select application_name from pg_locks join pg_stat_activity using (pid) where locktype = 'advisory' and granted "
    "and database = datid and datname = current_database() "
    "and (classid::bigint << 32 | objid::bigint) = hashtextextended(:work, 0)"
)
log = logging.getLogger("dlrm")


@contextmanager
def database_lock(
    engine: "Engine", work: str, wait: Callable[[str], None] = lambda holder: None, poll_seconds: float = 2.0
) -> Iterator[None]:
    """Waits until no other process has the lock of some work, and keeps it inside the block.

    The lock ends with its connection, and that with its process or machine. If the connection was lost before the work
    has ended, the log says so, and commits still find what another writer did.

    Args:
        wait: Called once with the holder, if there is one.
        poll_seconds: Time between two attempts.
    """
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.detach()  # from the pool: it is closed at the end
        connection.execute(text(SETTINGS), {"holder": f"process {os.getpid()} on {socket.gethostname()}"})
        told, given = False, {"work": work}
        while not connection.execute(text(TAKE), given).scalar():
            if not told:
                wait(connection.execute(text(HOLDER), given).scalar() or "another process")
                told = True
            time.sleep(poll_seconds)
        try:
            yield
        finally:
            try:
                reason = "" if connection.execute(text(GIVE_BACK), given).scalar() else "it was not held"
            except SQLAlchemyError as error:
                reason = str(error).split("\n")[0]
            if reason:
                log.warning("the lock of the %s was lost, and another may have done the same work: %s", work, reason)
