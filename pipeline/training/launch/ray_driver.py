"""Runs ranks on Ray from a process of its own: `python -m pipeline.training.launch.ray_driver PARENT`."""

import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from pipeline.errors import ContractError, to_wire
from pipeline.processes.process import die_with_parent
from pipeline.training.launch.processes import Event, Limits, RankLostError
from pipeline.training.launch.ray_order import Order
from pipeline.training.launch.ray_train import RayGroup


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
