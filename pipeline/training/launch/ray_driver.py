"""Runs ranks on Ray from a process of its own: `python -m pipeline.training.launch.ray_driver PARENT`.

A process has one connection to Ray. Where preprocessing has that of the training's process, the ranks get another.
"""

import json
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from pydantic import BaseModel

from pipeline.errors import ContractError, from_wire, to_wire
from pipeline.process import PACKAGES, die_with_parent
from pipeline.training.launch.processes import Event, Limits, RankLostError, last_words

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


def main() -> None:
    """Runs the ranks of the order and writes their events, or the error that ends them."""
    signal.signal(signal.SIGTERM, _leave)
    die_with_parent(int(sys.argv[1]), signal.SIGTERM)
    order = Order.model_validate_json(sys.stdin.read())
    write = _take_output()
    try:
        _run(order, lambda line: write({"line": line}))
    except RankLostError as error:
        write({"lost": to_wire(error)[1:]})
    except ContractError as error:
        write({"error": to_wire(error)})


def _run(order: Order, pass_on: Callable[[str], None]) -> None:
    from pipeline.training.launch.ray_train import RayGroup

    class Passing(RayGroup):
        """Passes all lines on but those with the keys of the ranks."""

        def handle_line(self, line: str | None) -> Event | None:
            if line is None or self.answer_keys(line):
                return None
            pass_on(line)
            event = json.loads(line)
            return event if event.get("event") == "result" else None

    group = Passing(
        Path(order.folder), Limits(), None, lambda event: None, 0, address=order.address, resources=order.resources,
        labels=order.labels, fewer=order.fewer,
    )  # fmt: skip
    group.run_here(order.module, order.world_size, order.threads, order.attempt)


def _take_output() -> Callable[[dict[str, Any]], None]:
    """Returns a function that writes messages to the training. What libraries print goes to standard error."""
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def write(message: dict[str, Any]) -> None:
        print(json.dumps(message), file=out, flush=True)

    return write


def _leave(number: int, frame: object) -> NoReturn:
    raise SystemExit(128 + number)


if __name__ == "__main__":
    main()
