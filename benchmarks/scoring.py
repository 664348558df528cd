"""Cost of scoring: latency of the HTTP server, speed in one process, and where the time goes.

    python -m benchmarks.scoring --json

Trains and registers a config in its own folder, unless `--folder` already has the model. Then starts `mlflow models
serve` and requests probabilities of evaluation rows, one request after the other over one connection. `p50_ms` and
`p99_ms` run from the first byte sent to the last byte read.

The same rows then pass through the same model in this process, step by step. `shares` are the medians of these steps
over `p50_ms`. `rows` turns JSON values into columns, `transforms` is the preprocessing plan, and `model` is tables and
layers. `server` is the rest: HTTP, JSON, data frames and MLflow's checks. `batch` scores columns as the warehouse holds
them, as batch scoring does between reading and writing.
"""

import argparse
import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from benchmarks.machine import ROOT, describe_machine, machine, say
from pipeline.config import RunConfig, load
from pipeline.inference.model import LoadedModel
from pipeline.jobs.training.job import resolve_dataset
from pipeline.jobs.workspace import Workspace
from pipeline.preprocessing.worker import Worker
from pipeline.registration.aliases import list_versions
from pipeline.registration.register import raw_frame
from pipeline.registration.versions import download_packed

PACKAGES = (
    "mlflow",
    "uvicorn",
    "fastapi",
    "torch",
    "torchrec",
    "fbgemm-gpu-cpu",
    "numba",
    "numpy",
    "pandas",
    "pyarrow",
)
WARM_UP = 20
"""Untimed requests of each size at the start."""
START_SECONDS = 120.0


def main(words: Sequence[str]) -> None:
    """Measures and prints the figures or, on the last line, one JSON object."""
    options = _options(words)
    with contextlib.ExitStack() as stack:
        folder = options.folder or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="dlrm-benchmark-")))
        os.environ["DLRM_HOME"] = str(folder.resolve())
        config = load(options.config)
        if not list_versions(Workspace(config).tracking, config.model_name):
            say(f"training {options.config} in {folder}")
            command = [sys.executable, "-m", "flows.end_to_end", options.config]
            subprocess.run(command, cwd=ROOT, stdout=subprocess.DEVNULL, check=True)
        requests = {1: options.requests, 1_000: options.large_requests}
        figures = measure(config, requests, options.batch_rows, options.rounds, stack)
    print(json.dumps(figures) if options.json else as_text(figures))


def _options(words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scoring")
    parser.add_argument("--json", action="store_true", help="all figures as one JSON object on the last line")
    parser.add_argument("--config", default="configs/generated.yaml", help="config of the model and the rows")
    parser.add_argument("--folder", type=Path, help="keeps the run for the next time; default: a temporary one")
    parser.add_argument("--requests", type=int, default=500, help="requests of one row")
    parser.add_argument("--large-requests", type=int, default=100, help="requests of 1,000 rows")
    parser.add_argument("--batch-rows", type=int, default=100_000, help="rows scored in one process")
    parser.add_argument("--rounds", type=int, default=5, help="passes of batch scoring; the median counts")
    return parser.parse_args(words)


def measure(
    config: RunConfig, requests: dict[int, int], batch_rows: int, rounds: int, stack: contextlib.ExitStack
) -> dict[str, Any]:
    """Returns all figures.

    Args:
        requests: Rows per request -> number of requests.
    Raises:
        RuntimeError: If the server's probabilities differ from the model's in this process.
    """
    facts = machine(PACKAGES)
    tracker, name = Workspace(config).tracking, config.model_name
    version = list_versions(tracker, name)[-1]
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="dlrm-model-")))
    loaded = LoadedModel(download_packed(tracker, name, version, folder))
    rows = raw_rows(config, batch_rows).select(list(loaded.columns))
    say(f"scoring {rows.num_rows:,} rows, {rounds} times")
    batch = score_in_batches(loaded, rows, rounds)
    served: dict[str, Any] = {}
    with server(f"models:/{name}/{version}", tracker.uri, folder / "server.log") as port:
        for size, count in requests.items():
            say(f"{count} requests of {size:,} rows")
            served[str(size)] = over_http(loaded, rows.slice(0, size), port, count)
    return {
        "http": served,
        "batch": batch,
        "model": {"name": name, "columns": len(loaded.columns), "bytes": _bytes(folder)},
        "threads": torch.get_num_threads(),
        "config": config.shareable(),
        "machine": facts,
    }


def raw_rows(config: RunConfig, count: int) -> pa.Table:
    """Returns evaluation rows, repeated from the first one if there are too few."""
    worker = Worker(resolve_dataset(Workspace(config), None)[1]["test"], Workspace(config).warehouse)
    parts: list[pa.Table] = []
    for fragment in worker.fragments():
        parts.append(worker.read_selected(fragment))
        if sum(part.num_rows for part in parts) >= count:
            break
    table = pa.concat_tables(parts)
    return pa.concat_tables([table] * -(-count // table.num_rows)).slice(0, count)


def score_in_batches(loaded: LoadedModel, rows: pa.Table, rounds: int) -> dict[str, Any]:
    """Returns the speed of scoring in this process and the share of transforms."""
    whole = seconds_of(lambda: loaded.score(rows), rounds)
    transforms = seconds_of(
        lambda: [loaded.plan.apply(rows.slice(at, 8_192)) for at in range(0, len(rows), 8_192)], rounds
    )
    return {
        "rows": rows.num_rows,
        "rounds": rounds,
        "rows_per_second": round(rows.num_rows / whole),
        "seconds": round(whole, 4),
        "shares": _shares({"transforms": transforms, "model": whole - transforms}, whole),
    }


def over_http(loaded: LoadedModel, rows: pa.Table, port: int, count: int) -> dict[str, Any]:
    """Returns the latency of requests for the same rows and each step's share."""
    frame = raw_frame(rows, loaded.columns)
    text = frame.to_json(orient="split", index=False, date_format="iso", double_precision=15)
    body = f'{{"dataframe_split": {text}}}'.encode()
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    found = np.array([row["probability"] for row in json.loads(ask(connection, body))["predictions"]])
    expected = loaded.score(rows)
    if found.shape != expected.shape or np.abs(found - expected).max() > 1e-6:
        raise RuntimeError("the server gives other probabilities than the model")
    for _ in range(WARM_UP):
        ask(connection, body)
    times = []
    for _ in range(count):
        began = time.perf_counter()
        ask(connection, body)
        times.append(time.perf_counter() - began)
    connection.close()
    table = loaded.table_of(frame)
    steps = {"rows": seconds_of(lambda: loaded.table_of(frame), count)}
    steps["transforms"] = seconds_of(lambda: loaded.plan.apply(table), count)
    steps["model"] = seconds_of(lambda: loaded.score(table), count) - steps["transforms"]
    middle = median(times)
    steps["server"] = middle - sum(steps.values())
    return {
        "requests": count,
        "bytes": len(body),
        "p50_ms": round(1e3 * middle, 3),
        "p99_ms": round(1e3 * quantiles(times, n=100, method="inclusive")[-1], 3),
        "requests_per_second": round(count / sum(times), 1),
        "shares": _shares(steps, middle),
    }


def ask(connection: http.client.HTTPConnection, body: bytes) -> bytes:
    """Returns the server's answer.

    Raises:
        RuntimeError: If its status is not 200.
    """
    connection.request("POST", "/invocations", body, {"Content-Type": "application/json"})
    response = connection.getresponse()
    answer = response.read()
    if response.status != 200:
        raise RuntimeError(f"expected status 200, got {response.status}: {answer[:1_000]!r}")
    return answer


@contextlib.contextmanager
def server(model: str, tracking_uri: str, log: Path) -> Iterator[int]:
    """Runs `mlflow models serve` on a free loopback port for the block."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    programs = Path(sys.executable).parent
    environment = os.environ | {"MLFLOW_TRACKING_URI": tracking_uri, "PATH": f"{programs}:{os.environ['PATH']}"}
    command = [str(programs / "mlflow"), "models", "serve", "-m", model, "--env-manager", "local"]
    command += ["--host", "127.0.0.1", "--port", str(port)]
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, env=environment, cwd=log.parent, stdout=output, stderr=output, start_new_session=True
        )
    try:
        limit = time.monotonic() + START_SECONDS
        while not _answers(port):
            if process.poll() is not None or time.monotonic() > limit:
                raise RuntimeError(f"the server did not start: {log.read_text(encoding='utf-8')[-2_000:]}")
            time.sleep(0.2)
        yield port
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _answers(port: int) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=2)
    try:
        connection.request("GET", "/ping")
        return connection.getresponse().status == 200
    except OSError:
        return False
    finally:
        connection.close()


def seconds_of(step: Callable[[], object], rounds: int) -> float:
    """Returns the median time of a step, after one run to warm up."""
    step()
    times = []
    for _ in range(rounds):
        began = time.perf_counter()
        step()
        times.append(time.perf_counter() - began)
    return median(times)


def _shares(steps: dict[str, float], whole: float) -> dict[str, float]:
    return {name: round(seconds / whole, 3) for name, seconds in steps.items()}


def _bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*.safetensors"))


def as_text(figures: dict[str, Any]) -> str:
    """Formats the figures as Markdown tables."""
    names = ("rows", "transforms", "model", "server")
    lines = [f"| rows of a request | p50 ms | p99 ms | {' | '.join(names)} |", "|---|---|---|---|---|---|---|"]
    for size, one in figures["http"].items():
        shares = " | ".join(f"{one['shares'][name]:.1%}" for name in names)
        lines.append(f"| {int(size):,} | {one['p50_ms']:.2f} | {one['p99_ms']:.2f} | {shares} |")
    batch = figures["batch"]
    lines.append(
        f"\nIn one process: {batch['rows_per_second']:,} rows/s, {batch['shares']['transforms']:.1%} of it transforms."
    )
    lines.append("\n" + describe_machine(figures["machine"]))
    return "\n".join(lines)


if __name__ == "__main__":
    main(sys.argv[1:])
