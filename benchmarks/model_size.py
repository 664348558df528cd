"""What a model's bytes cost after its training: seconds, disk, memory of the flow, and the start of its server.

    python -m benchmarks.model_size [--rows 100000 10000000] [--rounds 3]

Each model has four tables of `--rows` rows x 16 numbers and learns the same 12,000 rows of generated data. `finish` is
what `python -m flows.train` takes beside the steps: start, last checkpoint, export, evaluation and registration.
`again` is the same command with nothing to do. `anonymous` is the most memory of the flow's own process that is not a
mapped file, which the system can drop; ranks are processes of their own. `serve` is the time from the command to the
first answer of `dlrm serve`. Figures are medians.
"""

import argparse
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import psutil

from benchmarks.growth import Source
from benchmarks.machine import ROOT, as_table, machine, say

PACKAGES = ("torch", "safetensors", "mlflow", "uvicorn")
DAYS, ROWS, TABLES = 8, 2_000, 4
LOOK_SECONDS = 0.02
START_SECONDS = 300.0


def main(words: Sequence[str]) -> None:
    """Measures and prints a table or JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[100_000, 10_000_000], help="of each table")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    chosen = parser.parse_args(words)
    passes: dict[int, list[dict[str, float]]] = {rows: [] for rows in chosen.rows}
    for number in range(chosen.rounds):
        for rows in chosen.rows:
            passes[rows].append(measure(rows))
            say(f"round {number}, {rows:,} rows: {passes[rows][-1]}")
    found = {rows: {name: median(one[name] for one in many) for name in many[0]} for rows, many in passes.items()}
    figures = {"models": found, "rounds": chosen.rounds, "machine": machine(PACKAGES)}
    table = {f"{rows:,}": {name: round(value, 2) for name, value in one.items()} for rows, one in found.items()}
    print(json.dumps(figures) if chosen.json else as_table("rows of a table", table, figures))


def measure(rows: int) -> dict[str, float]:
    """Trains, trains again and serves a model in a new home."""
    with tempfile.TemporaryDirectory(prefix="dlrm-model-size-") as place:
        source = Source(Path(place, "source"), "samples", ROWS, 2 * TABLES, rows)
        source.write(DAYS)
        source.ingest()
        seconds, anonymous, result = _train(source.config)
        again, _, skipped = _train(source.config)
        if skipped["status"] != "skipped":
            raise RuntimeError("the same training ran again")
        home = source.folder / "home"
        return {
            "model_gb": 4 * 16 * rows * TABLES / 1e9,
            "finish": seconds - result["train"]["seconds"],
            "again": again,
            "anonymous_gb": anonymous / 1e9,
            "disk_gb": sum(bytes_by_file(home).values()) / 1e9,
            "serve": _serve(home, result["model"]["name"]),
        }


def _train(config: Path) -> tuple[float, int, dict[str, Any]]:
    """Returns the seconds of the command, the most anonymous memory of its process, and its result."""
    begun = time.perf_counter()
    command = [sys.executable, "-m", "flows.train", str(config)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        most, ended = [0], threading.Event()

        def watch() -> None:
            one = psutil.Process(process.pid)
            while not ended.wait(LOOK_SECONDS):
                with contextlib.suppress(psutil.Error):
                    memory = one.memory_info()
                    most[0] = max(most[0], memory.rss - memory.shared)

        thread = threading.Thread(target=watch)
        thread.start()
        try:
            out, errors = process.communicate()
        finally:
            ended.set()
            thread.join()
    if process.returncode:
        raise RuntimeError(errors[-2_000:])
    return time.perf_counter() - begun, most[0], json.loads(out.strip().splitlines()[-1])


def bytes_by_file(folder: Path) -> dict[int, int]:
    """Returns inode -> bytes on disk, so that a linked file counts once."""
    found = (path.stat() for path in folder.rglob("*") if path.is_file())
    return {one.st_ino: one.st_blocks * 512 for one in found}


def _serve(home: Path, name: str) -> float:
    with _started(home, name) as (process, port):
        begun = time.perf_counter()
        while True:
            with (
                contextlib.suppress(OSError),
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5) as answer,
            ):
                if answer.status == 200:
                    return time.perf_counter() - begun
            if process.poll() is not None or time.perf_counter() - begun > START_SECONDS:
                raise TimeoutError(f"the server has ended or not answered within {START_SECONDS:g} s")
            time.sleep(LOOK_SECONDS)


@contextlib.contextmanager
def _started(home: Path, name: str) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "flows.serve", name, f"port={port}", "version=1"]
    environment = os.environ | {"DLRM_HOME": str(home)}
    process = subprocess.Popen(command, cwd=ROOT, env=environment, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    try:
        yield process, port
    finally:
        process.send_signal(signal.SIGINT)
        process.wait()


if __name__ == "__main__":
    main(sys.argv[1:])
