"""One process of a server: answers over a shared socket, and loads the versions that its supervisor names."""

import asyncio
import gc
import json
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import uvicorn

from pipeline.processes.process import set_process_name
from pipeline.serving.app import LoadedVersion, RequestModel, ScoringApp
from pipeline.serving.config import ServedVersion, ServingConfig
from pipeline.serving.metrics import FOLDER, ServerMetrics
from pipeline.serving.row_log import RowLog

KEEP_ALIVE_SECONDS = 60
GRACE_SECONDS = 10
SWITCH_SECONDS = 0.001
"""How long the scoring thread may keep the interpreter while other requests wait to be read."""
log = logging.getLogger("dlrm")


def run_process(
    config: ServingConfig, name: str, load: Callable[[Path], RequestModel], listener: int, channel: int
) -> None:
    """Answers until SIGTERM, or until the supervisor is gone.

    Args:
        name: The model's name.
        load: Loads a version from its folder, ready to answer.
        listener: Descriptor of the listening socket.
        channel: Descriptor of the socket to the supervisor.
    """
    set_process_name("dlrm serve")
    signal.signal(signal.SIGTERM, lambda number, frame: None)  # uvicorn raises the signal again when it has stopped
    sys.setswitchinterval(SWITCH_SECONDS)
    folder = os.environ.get(FOLDER)
    metrics = ServerMetrics(None if folder is None else Path(folder))

    def count(written: int, dropped: int) -> None:
        metrics.logged.inc(written)
        metrics.dropped.inc(dropped)

    rows = None if config.log is None else RowLog(config.log, config.log_bytes, count)
    app = ScoringApp(config, name, metrics, rows)
    settings = uvicorn.Config(
        app, loop="asyncio", http="h11", ws="none", lifespan="off", log_config=None, log_level="warning",
        access_log=False, server_header=False, proxy_headers=False, timeout_keep_alive=KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=GRACE_SECONDS,
    )  # fmt: skip
    asyncio.run(_serve(uvicorn.Server(settings), app, load, socket.socket(fileno=listener), channel))
    if rows is not None:
        rows.close()


async def _serve(
    server: uvicorn.Server, app: ScoringApp, load: Callable[[Path], RequestModel], listener: socket.socket, channel: int
) -> None:
    reader, writer = await asyncio.open_connection(sock=socket.socket(fileno=channel))
    listening = asyncio.create_task(_follow(reader, writer, app, load, server))
    await server.serve(sockets=[listener])
    listening.cancel()


async def _follow(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    app: ScoringApp,
    load: Callable[[Path], RequestModel],
    server: uvicorn.Server,
) -> None:
    """Does what the supervisor says: prepare a version, swap to it, or drop it."""
    prepared: dict[int, LoadedVersion] = {}

    def tell(what: str, number: int, reason: str = "") -> None:
        writer.write(json.dumps({"is": what, "number": number, "reason": reason}).encode() + b"\n")

    try:
        while line := await reader.readline():
            message: dict[str, Any] = json.loads(line)
            number = int(message["number"])
            if message["do"] == "prepare":
                try:
                    model = await asyncio.to_thread(_load, load, Path(message["folder"]))
                except Exception as error:  # whatever is wrong with the version, the present one goes on
                    log.debug("version of %s", message["folder"], exc_info=True)
                    tell("failed", number, f"{type(error).__name__}: {error}"[:500])
                else:
                    prepared[number] = LoadedVersion(ServedVersion.model_validate(message["version"]), model)
                    del model
                    tell("prepared", number)
            elif message["do"] == "swap":
                app.swap(prepared.pop(number))
                tell("swapped", number)
            else:
                prepared.pop(number, None)
    finally:
        server.should_exit = True  # the supervisor is gone, or has nothing to tell


def _load(load: Callable[[Path], RequestModel], folder: Path) -> RequestModel:
    model = load(folder)
    gc.collect()
    gc.freeze()  # a search through all modules would delay an answer by a tenth of a second
    return model
