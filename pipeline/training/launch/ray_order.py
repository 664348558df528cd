"""Starts a process of its own that runs ranks on Ray, `ray_driver`, and reads its events.

A process has one connection to Ray. Where preprocessing has that of the training's process, the ranks get another.
"""

import json
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from pydantic import BaseModel

from pipeline.errors import from_wire
from pipeline.processes.process import PACKAGES
from pipeline.training.launch.processes import RankLostError, last_words

GRACE_SECONDS = 20.0
"""Time for the process to leave Ray, which ends the ranks."""


class Order(BaseModel, frozen=True):
    """The ranks to run. The process reads it from its standard input."""

    module: str
    folder: str
    world_size: int
    fewer: tuple[int, ...]
    threads: int
    attempt: int
    root: str
    address: str | None
    resources: Mapping[str, float]
    labels: Mapping[str, str]


class Driver:
    """The process, and the events that it passes on."""

    def __init__(self, order: Order) -> None:
        self.log = Path(order.folder) / "ray-driver.log"
        words = [sys.executable, "-m", "pipeline.training.launch.ray_driver", str(os.getpid())]
        path = os.pathsep.join(filter(None, (str(PACKAGES), os.environ.get("PYTHONPATH"))))
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                words, cwd=order.root, env=os.environ | {"PYTHONPATH": path}, stdin=subprocess.PIPE,
                stdout=subprocess.PIPE, stderr=log, text=True,
                start_new_session=True,  # an interrupt from the keyboard is for the training, which ends this
            )  # fmt: skip
        assert self.process.stdin is not None
        with suppress(BrokenPipeError), self.process.stdin as given:  # if it has ended, `next_line` says so
            given.write(order.model_dump_json())
        self.lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()

    def next_line(self, seconds: float) -> str | None:
        """Returns the next event as its line, or None at the end.

        Raises:
            queue.Empty: If there is none in this time.
            ContractError: The error with which the ranks ended.
        """
        text = self.lines.get(timeout=seconds)
        if text is None:
            return None
        message = json.loads(text)
        if "lost" in message:
            raise RankLostError(*message["lost"])
        if "error" in message:
            raise from_wire(message["error"])
        line: str = message["line"]
        return line

    def fail(self) -> NoReturn:
        """Raises the error of a process that ended without a result."""
        raise RankLostError(
            "the ranks' connection to Ray", "to last until they have ended", last_words(self.process.wait(), self.log),
            f"Run the command again to resume from the last checkpoint. See {self.log}.",
        )  # fmt: skip

    def end(self) -> None:
        """Ends the process, and the ranks with it."""
        self.process.terminate()
        try:
            self.process.wait(GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.endswith("\n"):  # it may be killed in the middle of a line
                self.lines.put(line)
        self.lines.put(None)
