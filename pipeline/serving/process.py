"""One process of a server: answers over a shared socket, and loads the versions that its supervisor names."""

import asyncio
import gc
import json
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar, cast

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
T = TypeVar("T")
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
    rows = None if config.log is None else RowLog(config.log, config.log_bytes, metrics.count_log)
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
    loader = VersionLoader(app, load, writer)
    listening = asyncio.create_task(_follow(reader, loader, server))
    await server.serve(sockets=[listener])
    listening.cancel()
    if loader.warming is not None:
        loader.warming.join()  # a process that ends within an import may crash


class VersionLoader:
    """Does what the supervisor says: prepare a version, swap to it, drop it, or report that it is stale."""

    def __init__(self, app: ScoringApp, load: Callable[[Path], RequestModel], writer: asyncio.StreamWriter) -> None:
        self.app, self.load, self.writer = app, load, writer
        self.prepared: dict[int, LoadedVersion] = {}
        self.loading: dict[int, asyncio.Task[None]] = {}
        self.warming: threading.Thread | None = None

    def handle(self, message: Mapping[str, Any]) -> None:
        """Handles a message at once. A load goes on beside the next ones: it may hang."""
        what, number = message["do"], int(message["number"])
        if what == "prepare":
            self.loading[number] = asyncio.create_task(self._prepare(number, message))
        elif what == "swap":
            self._swap(self.prepared.pop(number))
            for older in [other for other in (*self.prepared, *self.loading) if other < number]:
                self._drop(older)
            self._tell("swapped", number)
        elif what == "stale":
            self.app.stale = message["reason"]
        else:
            self._drop(number)
            self._tell("dropped", number)

    def _swap(self, loaded: LoadedVersion) -> None:
        self.app.swap(loaded)
        self.warming = threading.Thread(target=_warm_rest, args=(loaded.model,), name="warm", daemon=True)
        self.warming.start()

    def _drop(self, number: int) -> None:
        self.prepared.pop(number, None)
        if number in self.loading:
            self.loading.pop(number).cancel()

    def _tell(self, what: str, number: int, reason: str = "") -> None:
        self.writer.write(json.dumps({"is": what, "number": number, "reason": reason}).encode() + b"\n")

    async def _prepare(self, number: int, message: Mapping[str, Any]) -> None:
        folder = Path(message["folder"])
        try:
            version = ServedVersion.model_validate(message["version"])
            model = await _in_thread(lambda: _load(self.load, folder))
        except Exception as error:  # whatever is wrong with the version, the present one goes on
            log.debug("version of %s", folder, exc_info=True)
            self._tell("failed", number, f"{type(error).__name__}: {error}"[:500])
        else:
            self.prepared[number] = LoadedVersion(version, model)
            self._tell("prepared", number)
        self.loading.pop(number, None)


async def _follow(reader: asyncio.StreamReader, loader: VersionLoader, server: uvicorn.Server) -> None:
    try:
        while line := await reader.readline():
            loader.handle(json.loads(line))
    finally:
        server.should_exit = True  # the supervisor is gone, or has nothing to tell


async def _in_thread(function: Callable[[], T]) -> T:
    """Runs a function in a thread of its own, which does not keep the process from ending if it hangs."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def finish(result: T | None, error: BaseException | None) -> None:
        if future.done():  # cancelled
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(cast("T", result))

    def run() -> None:
        result, error = None, None
        try:
            result = function()
        except Exception as caught:
            error = caught
        with suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(finish, result, error)

    threading.Thread(target=run, name="load", daemon=True).start()
    return await future


def _load(load: Callable[[Path], RequestModel], folder: Path) -> RequestModel:
    model = load(folder)
    _freeze()
    return model


def _warm_rest(model: RequestModel) -> None:
    try:
        model.warm_rest()
    except Exception:  # the request that needs it tries again, and gets the error
        log.debug("warm", exc_info=True)
    _freeze()


def _freeze() -> None:
    """Takes all that is loaded out of the search for garbage, which would delay an answer by a tenth of a second."""
    gc.collect()
    gc.freeze()
