"""A Postgres server on loopback, for tests of shared databases."""

import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.ports import free_port


def _find(program: str) -> str | None:
    places = sorted(Path("/usr/lib/postgresql").glob(f"*/bin/{program}"))
    return shutil.which(program) or (str(places[-1]) if places else None)


@contextmanager
def serving_postgres() -> Iterator[str]:
    """Yields the address of an empty database. Postgres does not run as root: then it runs as the user `postgres`."""
    pytest.importorskip("psycopg2", reason="its driver comes with `make setup EXTRAS=postgres`")
    initdb, server = _find("initdb"), _find("postgres")
    if initdb is None or server is None:
        pytest.skip("needs Postgres: on Debian, the package `postgresql`")
    user = "postgres" if os.geteuid() == 0 else None
    folder = Path(tempfile.mkdtemp(prefix="postgres-"))
    try:
        if user is not None:
            shutil.chown(folder, user)
        data, port = folder / "data", free_port()
        made = subprocess.run(
            [initdb, "-D", str(data), "-U", "tester", "-A", "trust", "-N"], cwd=folder, user=user, capture_output=True, text=True
        )  # fmt: skip
        assert made.returncode == 0, made.stderr
        with tempfile.TemporaryFile() as log:
            process = subprocess.Popen(
                [server, "-D", str(data), "-h", "127.0.0.1", "-p", str(port), "-k", str(folder), "-F", "-N", "300"],
                cwd=folder, user=user, stdout=log, stderr=log,
            )  # fmt: skip
            try:
                address = f"postgresql+psycopg2://tester@127.0.0.1:{port}/postgres"
                _wait(address, process)
                yield address
            finally:
                process.send_signal(signal.SIGINT)  # SIGKILL would leave its shared memory behind
                try:
                    process.wait(60)
                finally:
                    process.kill()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _wait(address: str, process: subprocess.Popen) -> None:
    from sqlalchemy import create_engine
    from sqlalchemy.exc import OperationalError

    limit = time.monotonic() + 300
    while True:
        try:
            create_engine(address).connect().close()
            return
        except OperationalError:
            if process.poll() is not None or time.monotonic() > limit:
                raise
            time.sleep(0.1)
