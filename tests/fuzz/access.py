"""Damaged addresses, authentication strings and answers of Prefect's server."""

import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random

from flows.runtime.access import HOST, VARIABLE, answers, check_access, find_secret, header, serving
from tests.fuzz.harness import Case, require
from tests.fuzz.mutate import mutate_bytes

ANSWER = (
    b'HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 7\r\nWWW-Authenticate: Basic\r\n\r\n"3.6.0"'
)
VARIABLES = (VARIABLE, "PREFECT_SERVER_API_AUTH_STRING", "PREFECT_API_KEY", "PREFECT_CLIENT_CUSTOM_HEADERS")


@contextmanager
def access(folder: Path) -> Iterator[Case]:
    """Addresses, authentication strings and answers."""
    before = {name: os.environ.pop(name, None) for name in (*VARIABLES, "PREFECT_HOME")}
    os.environ["PREFECT_HOME"] = str(folder)
    home = folder / "prefect"
    home.mkdir()
    with socket.create_server((HOST, 0)) as server:
        port = server.getsockname()[1]
        sent: list[bytes] = []
        threading.Thread(target=_serve, args=(server, sent), daemon=True).start()
        address = f"http://{HOST}:{port}/api"
        with serving(home, port):

            def case(random: Random) -> None:
                secret = b"dlrm:secret"
                (home / "auth").write_bytes(mutate_bytes(random, secret) if random.random() < 0.5 else secret)
                os.environ.pop(VARIABLE, None)
                if random.random() < 0.3:
                    given = mutate_bytes(random, secret)[:1_000].replace(b"\0", b"")
                    os.environb[VARIABLE.encode()] = given
                place = address
                if random.random() < 0.3:
                    place = mutate_bytes(random, address.encode())[:200].decode(errors="surrogateescape")
                found = find_secret(place, folder)
                require(found is None or isinstance(found, str), "a text")
                require(all(value.isascii() and value.isprintable() for value in header(found).values()), "a header")
                if place == address:
                    status = random.choice([b"200 OK", b"401 Unauthorized", b"302 Found\r\nLocation: /", b"500 No"])
                    sent[:] = [mutate_bytes(random, ANSWER.replace(b"200 OK", status))]
                    check_access(place, found)
                    require(answers(place) in (True, False), "an answer")

            yield case
    for name, value in before.items():
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value


def _serve(server: socket.socket, sent: list[bytes]) -> None:
    while True:
        try:
            channel, _ = server.accept()
        except OSError:
            return
        with channel:
            try:
                channel.recv(1 << 16)
                channel.sendall(sent[0])
            except OSError:
                continue
