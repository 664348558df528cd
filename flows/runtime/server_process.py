"""The process of the temporary Prefect server: `python -m flows.runtime.server_process`.

It loads libraries at once. Then it reads one line from standard input, which says how to serve: JSON with `log`,
`environment`, `address` of the API and `options`, those of uvicorn. It ends if there is no such line.
"""

import importlib
import json
import os
import sys
import threading
import time
import urllib.request
from contextlib import suppress

from flows.runtime.access import SERVERS, header
from pipeline.processes.process import loading

TRIES, SECONDS_BETWEEN_TRIES = 200, 0.02
LIBRARIES = ("docket", "fastapi", "httpx", "jsonschema", "pydantic_settings", "sqlalchemy.ext.asyncio", "uvicorn")
"""What Prefect's server imports and what reads none of Prefect's settings."""


def main() -> None:
    """Serves until it is terminated."""
    with loading():
        for name in LIBRARIES:
            with suppress(ImportError):  # the server imports it again, and its log has the error
                importlib.import_module(name)
        line = sys.stdin.readline()
        if not line:
            return
        given = json.loads(line)
        with open(given["log"], "wb") as log:
            os.dup2(log.fileno(), sys.stdout.fileno())
            os.dup2(log.fileno(), sys.stderr.fileno())
        os.environ.update(given["environment"])
        importlib.import_module("prefect.server.api.server")
        uvicorn = importlib.import_module("uvicorn")
    threading.Thread(target=ask_first, args=(given["address"], given["environment"][SERVERS]), daemon=True).start()
    uvicorn.main(given["options"])


def ask_first(address: str, secret: str) -> None:
    """Asks the server for its version. FastAPI prepares all routes at the first request that it looks up.

    This takes 0.3 s, in which the command may still import.

    Args:
        address: The API's.
    """
    request = urllib.request.Request(f"{address}/admin/version", headers=header(secret))
    with loading():
        for _ in range(TRIES):
            with suppress(OSError), urllib.request.urlopen(request, timeout=60):
                return
            time.sleep(SECONDS_BETWEEN_TRIES)


if __name__ == "__main__":
    main()
