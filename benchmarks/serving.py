"""`dlrm serve` beside `mlflow models serve`: latency, many callers, the most queries per second, and reloads.

    python -m benchmarks.serving --json

Trains and registers a config in its own folder, unless `--folder` already has the model. Both servers then answer the
same evaluation rows, on loopback of this machine, one after the other. The callers run in a process of their own.

- `latency`: one caller, one request after the other over one connection, from the first byte sent to the last read.
- `callers`: 16 callers, each with a connection of its own, for `--seconds`.
- `queries`: the Server scenario of MLPerf LoadGen. Queries of 100 to 700 rows arrive as a Poisson process. A rate is
  valid if 99 % of the queries of a run are answered within 60 ms. `--trials` runs search for the highest valid rate.
  With the package `mlcommons-loadgen` on PYTHONPATH, LoadGen draws the arrivals and judges; without it a loop of the
  same definition does.
- `--reloads N`: moves the champion alias N times between two versions while 8 callers ask, and counts wrong answers.
"""

import argparse
import asyncio
import contextlib
import io
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import quantiles
from typing import Any

import numpy as np
import psutil
import pyarrow as pa

from benchmarks.machine import ROOT, describe_machine, machine, say

JSON, ARROW = "application/json", "application/vnd.apache.arrow.stream"
PACKAGES = ("mlflow", "uvicorn", "orjson", "torch", "torchrec", "numba", "numpy", "pyarrow", "mlcommons-loadgen")
LIMIT_SECONDS, SHARE = 0.060, 0.99
"""A rate is valid if this share of its queries is answered in this time."""
QUERY_ROWS = (100, 700)
BODIES = 64
"""Different queries."""
START_SECONDS = 120.0
MOST_CONNECTIONS = 512
PAUSE_SECONDS = 0.2
"""Between two requests of a caller while versions change: the processors are for loading, too."""


def main(words: Sequence[str]) -> None:
    """Measures and prints the figures or, on the last line, one JSON object."""
    options = _options(words)
    if options.load:
        print(json.dumps(run_load(json.loads(options.load))))
        return
    with contextlib.ExitStack() as stack:
        folder = options.folder or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="dlrm-benchmark-")))
        os.environ["DLRM_HOME"] = str(folder.resolve())
        os.environ["MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR"] = "false"
        figures = measure(options, stack)
    print(json.dumps(figures) if options.json else as_text(figures))


def _options(words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.serving")
    parser.add_argument("--json", action="store_true", help="all figures as one JSON object on the last line")
    parser.add_argument("--config", default="configs/generated.yaml", help="config of the model and the rows")
    parser.add_argument("--folder", type=Path, help="home with the model; default: a temporary one")
    parser.add_argument("--only", nargs="*", default=["latency", "callers", "queries"], help="parts to measure")
    parser.add_argument("--servers", nargs="*", default=["dlrm", "mlflow"])
    parser.add_argument("--processes", type=int, default=1, help="processes of dlrm serve")
    parser.add_argument("--requests", type=int, default=400, help="requests of one row")
    parser.add_argument("--large-requests", type=int, default=80, help="requests of 1,000 rows")
    parser.add_argument("--seconds", type=float, default=10.0, help="of each run with many callers or queries")
    parser.add_argument("--trials", type=int, default=6, help="rates to try")
    parser.add_argument("--rates", type=float, nargs=2, default=(4.0, 400.0), help="lowest and highest rate")
    parser.add_argument("--reloads", type=int, default=0, help="moves of the alias under load, instead of the rest")
    parser.add_argument("--load", help=argparse.SUPPRESS)
    return parser.parse_args(words)


def measure(options: argparse.Namespace, stack: contextlib.ExitStack) -> dict[str, Any]:
    """Returns all figures."""
    from benchmarks.scoring import raw_rows
    from pipeline.config import load
    from pipeline.inference.model import LoadedModel
    from pipeline.jobs.workspace import Workspace
    from pipeline.registration.aliases import choose_version, list_versions
    from pipeline.registration.versions import download_packed

    config = load(options.config)
    tracker, name = Workspace(config).tracking, config.model_name
    if not list_versions(tracker, name):
        say(f"training {options.config}")
        command = [sys.executable, "-m", "flows.end_to_end", options.config]
        subprocess.run(command, cwd=ROOT, stdout=subprocess.DEVNULL, check=True)
    figures: dict[str, Any] = {"machine": machine(PACKAGES), "processes": options.processes, "model": name}
    if options.reloads:
        return figures | {"reloads": reload_under_load(options, tracker, name, stack)}
    version, _ = choose_version(tracker, name, None)
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="dlrm-model-")))
    loaded = LoadedModel(download_packed(tracker, name, version, folder))
    rows = raw_rows(config, 20_000).select(list(loaded.columns))
    expected = loaded.score(rows.slice(0, 1_000))
    bodies = write_bodies(folder, rows, loaded.columns)
    for server in options.servers:
        with serving(server, name, version, tracker.uri, folder, options.processes) as (port, pid):
            check(port, bodies, expected)
            figures[server] = {"memory": memory_of(pid)}
            for part in options.only:
                say(f"{server}: {part}")
                figures[server][part] = PARTS[part](options, server, port, bodies)
            figures[server]["memory_at_end"] = memory_of(pid)
    return figures


def write_bodies(folder: Path, rows: pa.Table, columns: dict[str, str]) -> dict[str, Any]:
    """Writes requests to files and returns their paths by name."""
    from pipeline.registration.register import raw_frame

    draw, made = random.Random(3), {}

    def write(key: str, part: pa.Table, kind: str) -> str:
        path = folder / f"{key}.{'json' if kind == JSON else 'arrow'}"
        if kind == JSON:
            text = raw_frame(part, columns).to_json(orient="split", index=False, date_format="iso", double_precision=15)
            path.write_text(f'{{"dataframe_split": {text}}}', encoding="utf-8")
        else:
            sink = io.BytesIO()
            with pa.ipc.new_stream(sink, part.schema) as stream:
                stream.write_table(part)
            path.write_bytes(sink.getvalue())
        return str(path)

    for count in (1, 100, 1_000):
        for kind in (JSON, ARROW):
            made[f"{count} {kind}"] = write(f"rows-{count}", rows.slice(0, count), kind)
    sizes = [draw.randint(*QUERY_ROWS) for _ in range(BODIES)]
    starts = [draw.randrange(rows.num_rows - size) for size in sizes]
    for kind in (JSON, ARROW):
        made[f"queries {kind}"] = [
            write(f"query-{number}", rows.slice(start, size), kind)
            for number, (start, size) in enumerate(zip(starts, sizes, strict=True))
        ]
    return made


def check(port: int, bodies: dict[str, Any], expected: Any) -> None:
    """Raises if a server gives other probabilities than the model."""
    answer = asyncio.run(HttpConnection.ask_once(port, JSON, Path(bodies[f"1000 {JSON}"]).read_bytes()))
    found = np.array([row["probability"] for row in json.loads(answer)["predictions"]])
    if found.shape != expected.shape or np.abs(found - expected).max() > 1e-6:
        raise RuntimeError("the server gives other probabilities than the model")


def latency(options: argparse.Namespace, server: str, port: int, bodies: dict[str, Any]) -> dict[str, Any]:
    """One caller."""
    kinds = (JSON, ARROW) if server == "dlrm" else (JSON,)
    found = {}
    for count, requests in ((1, options.requests), (1_000, options.large_requests)):
        for kind in kinds:
            job = {"kind": kind, "port": port, "bodies": [bodies[f"{count} {kind}"]]}
            found[f"{count} rows, {'Arrow' if kind == ARROW else 'JSON'}"] = load_from_outside(
                job | {"callers": 1, "requests": requests, "warm": max(requests // 10, 5)}
            )
    return found


def many_callers(options: argparse.Namespace, server: str, port: int, bodies: dict[str, Any]) -> dict[str, Any]:
    """16 callers."""
    found = {}
    for count in (1, 100):
        job = {"kind": JSON, "port": port, "bodies": [bodies[f"{count} {JSON}"]], "callers": 16, "warm": 2}
        found[f"{count} rows"] = load_from_outside(job | {"seconds": options.seconds})
    return found


def most_queries(options: argparse.Namespace, server: str, port: int, bodies: dict[str, Any]) -> dict[str, Any]:
    """Searches for the highest valid rate, by halving the interval of logarithms."""
    found: dict[str, Any] = {}
    for kind in (JSON, ARROW) if server == "dlrm" else (JSON,):
        low, high = options.rates
        best, runs = None, []
        for _ in range(options.trials):
            rate = (low * high) ** 0.5
            job = {"kind": kind, "port": port, "bodies": bodies[f"queries {kind}"], "rate": rate}
            run = load_from_outside(job | {"seconds": options.seconds})
            say(f"{rate:.1f} queries/s: p99 {run['p99_ms']:.1f} ms, {'valid' if run['valid'] else 'not valid'}")
            runs.append(run)
            if run["valid"]:
                best, low = run, rate
            else:
                high = rate
        per_core = None if best is None else round(best["rate"] / (options.processes if server == "dlrm" else 1), 1)
        found["Arrow" if kind == ARROW else "JSON"] = {"best": best, "per_process": per_core, "runs": runs}
    return found


PARTS: dict[str, Callable[..., dict[str, Any]]] = {
    "latency": latency,
    "callers": many_callers,
    "queries": most_queries,
}


def load_from_outside(job: dict[str, Any]) -> dict[str, Any]:
    """Runs callers in a process of their own."""
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.serving", "--load", json.dumps(job)],
        cwd=ROOT, stdout=subprocess.PIPE, check=True, text=True,
    )  # fmt: skip
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def run_load(job: dict[str, Any]) -> dict[str, Any]:
    """Asks a server as a job says, and returns what callers saw."""
    bodies = [Path(path).read_bytes() for path in job["bodies"]]
    if "rate" not in job:
        return asyncio.run(_closed_loop(job, bodies))
    try:
        import mlperf_loadgen
    except ImportError:
        return asyncio.run(_poisson(job, bodies))
    return _loadgen(mlperf_loadgen, job, bodies)


class HttpConnection:
    """A connection that is kept open. It knows as much of HTTP as the servers here use."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def ask(self, kind: str, body: bytes) -> tuple[int, bytes, dict[str, str]]:
        """Returns status, answer and headers."""
        if self.streams is None:
            self.streams = await asyncio.open_connection("127.0.0.1", self.port, limit=1 << 24)
        reader, writer = self.streams
        lines = [
            "POST /invocations HTTP/1.1",
            "host: 127.0.0.1",
            f"content-type: {kind}",
            f"content-length: {len(body)}",
        ]
        writer.write("\r\n".join([*lines, "", ""]).encode() + body)
        first, *lines = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines if line)}
        answer = await reader.readexactly(int(headers["content-length"]))
        if headers.get("connection") == "close":
            writer.close()
            self.streams = None
        return int(first.split()[1]), answer, headers

    @classmethod
    async def ask_once(cls, port: int, kind: str, body: bytes) -> bytes:
        """Returns the answer to one request, whose status must be 200."""
        status, answer, _ = await cls(port).ask(kind, body)
        if status != 200:
            raise RuntimeError(f"expected status 200, got {status}: {answer[:500]!r}")
        return answer


async def _closed_loop(job: dict[str, Any], bodies: list[bytes]) -> dict[str, Any]:
    times: list[float] = []
    errors = 0
    limit = time.perf_counter() + job.get("seconds", 1e9)

    async def call() -> None:
        nonlocal errors
        connection = HttpConnection(job["port"])
        for number in range(job["warm"] + job.get("requests", 10**9)):
            began = time.perf_counter()
            if began > limit:
                return
            status, _, _ = await connection.ask(job["kind"], bodies[number % len(bodies)])
            if number >= job["warm"]:
                times.append(time.perf_counter() - began)
                errors += status != 200

    began = time.perf_counter()
    await asyncio.gather(*(call() for _ in range(job["callers"])))
    seconds = time.perf_counter() - began
    return _summary(times) | {"requests": len(times), "per_second": round(len(times) / seconds, 1), "errors": errors}


class Callers:
    """Sends queries when they arrive, each over an idle connection or a new one."""

    def __init__(self, job: dict[str, Any], bodies: list[bytes]) -> None:
        self.job, self.bodies = job, bodies
        self.idle: list[HttpConnection] = []
        self.open = 0
        self.errors = 0

    async def ask(self, index: int) -> None:
        """Sends a query. An error counts, and its time too."""
        if not self.idle and self.open >= MOST_CONNECTIONS:
            self.errors += 1
            return
        connection = self.idle.pop() if self.idle else HttpConnection(self.job["port"])
        self.open += 1
        try:
            status, _, _ = await connection.ask(self.job["kind"], self.bodies[index % len(self.bodies)])
            self.errors += status != 200
            self.idle.append(connection)
        except (OSError, asyncio.IncompleteReadError):
            self.errors += 1
        finally:
            self.open -= 1


async def _poisson(job: dict[str, Any], bodies: list[bytes]) -> dict[str, Any]:
    """Draws exponential gaps between queries. A query's time runs from when it was due."""
    draw, callers, times = random.Random(11), Callers(job, bodies), []
    tasks = []
    due = began = time.perf_counter()

    async def query(due: float, index: int) -> None:
        await callers.ask(index)
        times.append(time.perf_counter() - due)

    while due - began < job["seconds"]:
        due += draw.expovariate(job["rate"])
        await asyncio.sleep(max(due - time.perf_counter(), 0.0))
        tasks.append(asyncio.create_task(query(due, draw.randrange(len(bodies)))))
    await asyncio.gather(*tasks)
    summary = _summary(times)
    valid = callers.errors == 0 and sum(one <= LIMIT_SECONDS for one in times) >= SHARE * len(times)
    return summary | {
        "by": "Poisson loop",
        "rate": job["rate"],
        "queries": len(times),
        "errors": callers.errors,
        "valid": valid,
    }


def _loadgen(lg: Any, job: dict[str, Any], bodies: list[bytes]) -> dict[str, Any]:
    loop, callers, times = asyncio.new_event_loop(), Callers(job, bodies), []
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()

    async def query(sample: int, index: int, began: float) -> None:
        await callers.ask(index)
        times.append(time.perf_counter() - began)
        lg.QuerySamplesComplete([lg.QuerySampleResponse(sample, 0, 0)])

    asked: list[Any] = []  # nothing else refers to a query that waits for its answer, and it would be collected

    def issue(samples: Sequence[Any]) -> None:
        for sample in samples:
            asked.append(asyncio.run_coroutine_threadsafe(query(sample.id, sample.index, time.perf_counter()), loop))

    settings = lg.TestSettings()
    settings.scenario, settings.mode = lg.TestScenario.Server, lg.TestMode.PerformanceOnly
    settings.server_target_qps = job["rate"]
    settings.server_target_latency_ns = int(1e9 * LIMIT_SECONDS)
    settings.server_target_latency_percentile = SHARE
    settings.min_duration_ms = int(1e3 * job["seconds"])
    settings.min_query_count = 1_000  # LoadGen is not certain of the percentile of fewer
    with tempfile.TemporaryDirectory() as folder:
        output = lg.LogOutputSettings()
        output.outdir, output.copy_summary_to_stdout = folder, False
        log = lg.LogSettings()
        log.log_output, log.enable_trace = output, False
        sut = lg.ConstructSUT(issue, lambda: None)
        qsl = lg.ConstructQSL(len(bodies), len(bodies), lambda samples: None, lambda samples: None)
        lg.StartTestWithLogSettings(sut, qsl, settings, log)
        _end(loop, thread)  # LoadGen stops a run that cannot become valid, and takes no late answers
        lg.DestroyQSL(qsl)
        lg.DestroySUT(sut)
        text = (Path(folder) / "mlperf_log_summary.txt").read_text(encoding="utf-8")
    read = read_loadgen(text)
    return (
        _summary(times)
        | read
        | {
            "by": "MLPerf LoadGen",
            "rate": job["rate"],
            "queries": len(times),
            "errors": callers.errors,
            "valid": callers.errors == 0 and read["verdict"] == "VALID",
        }
    )


def read_loadgen(summary: str) -> dict[str, Any]:
    """Reads LoadGen's own summary: its verdict, which also asks for enough queries, and what it did not meet."""
    verdict = re.search(r"^Result is : (\w+)", summary, re.MULTILINE)
    percentile = re.search(r"99\.00 percentile latency \(ns\)\s*:\s*(\d+)", summary)
    done = re.search(r"Completed samples per second\s*:\s*([\d.]+)", summary)
    return {
        "verdict": "none" if verdict is None else verdict[1],
        "not_met": [name.strip() for name in re.findall(r"^  (.+?) satisfied ?: N", summary, re.MULTILINE)],
        "p99_ms": None if percentile is None else round(int(percentile[1]) / 1e6, 2),
        "completed_per_second": None if done is None else float(done[1]),
    }


def _end(loop: asyncio.AbstractEventLoop, thread: threading.Thread) -> None:
    async def cancel() -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        loop.stop()

    asyncio.run_coroutine_threadsafe(cancel(), loop)
    thread.join()


def _summary(times: list[float]) -> dict[str, Any]:
    cuts = quantiles(times, n=100, method="inclusive") if len(times) > 1 else [float("nan")] * 99
    return {"p50_ms": round(1e3 * cuts[49], 3), "p90_ms": round(1e3 * cuts[89], 3), "p99_ms": round(1e3 * cuts[98], 3)}


@contextlib.contextmanager
def serving(
    server: str, name: str, version: int, tracking_uri: str, folder: Path, processes: int, *more: str
) -> Iterator[tuple[int, int]]:
    """Runs a server for the block. Yields its port and its process id."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    programs = Path(sys.executable).parent
    environment = os.environ | {"MLFLOW_TRACKING_URI": tracking_uri, "PATH": f"{programs}:{os.environ['PATH']}"}
    if server == "dlrm":
        command = [sys.executable, "-m", "flows.serve", name, f"port={port}", f"processes={processes}", *more]
        command += [] if more else [f"version={version}"]
    else:
        command = [str(programs / "mlflow"), "models", "serve", "-m", f"models:/{name}/{version}"]
        command += ["--env-manager", "local", "--host", "127.0.0.1", "--port", str(port)]
    log = folder / f"{server}.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, env=environment, cwd=ROOT, stdout=output, stderr=output, start_new_session=True
        )
    try:
        limit = time.monotonic() + START_SECONDS
        while not _answers(port):
            if process.poll() is not None or time.monotonic() > limit:
                raise RuntimeError(f"the server did not start: {log.read_text(encoding='utf-8')[-2_000:]}")
            time.sleep(0.2)
        yield port, process.pid
    finally:
        if server == "dlrm":
            process.terminate()
            process.wait(60)
        else:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _answers(port: int) -> bool:
    import http.client

    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=2)
    try:
        connection.request("GET", "/ping")
        return connection.getresponse().status == 200
    except OSError:
        return False
    finally:
        connection.close()


def memory_of(pid: int) -> list[dict[str, Any]]:
    """Returns the memory in MB of a process and its children: resident, and its share if shared pages are divided."""
    found = []
    for process in [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]:
        full = process.memory_full_info()
        found.append(
            {
                "resident": round(full.rss / 1e6),
                "shared": round(full.shared / 1e6),
                "proportional": round(full.pss / 1e6),
                "own": round(full.uss / 1e6),
            }
        )
    return found


def reload_under_load(
    options: argparse.Namespace, tracker: Any, name: str, stack: contextlib.ExitStack
) -> dict[str, Any]:
    """Moves the champion between two versions under load, and compares every answer with that of its version."""
    from pipeline.inference.files import EXAMPLE
    from pipeline.inference.model import LoadedModel
    from pipeline.registration.aliases import list_versions
    from pipeline.registration.versions import download_packed, download_part

    folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="dlrm-model-")))
    versions = list_versions(tracker, name)[:2]
    if len(versions) < 2:
        raise RuntimeError(f"reloading needs two versions of {name}: train one more, with another seed")
    expected, body = {}, b""
    for version in versions:
        (folder / str(version)).mkdir()
        packed = download_packed(tracker, name, version, folder / str(version))
        loaded = LoadedModel(packed)
        download_part(tracker, name, version, EXAMPLE, folder / str(version))
        body = body or (folder / str(version) / EXAMPLE).read_bytes()
        split = json.loads(body)["dataframe_split"]
        columns = {key: [row[place] for row in split["data"]] for place, key in enumerate(split["columns"])}
        expected[str(version)] = loaded.probabilities(columns).tolist()
    if len({str(one) for one in expected.values()}) < 2:
        raise RuntimeError("both versions give the same probabilities: nothing would show")
    seen: dict[str, Any] = {"answers": 0, "wrong": 0, "failed": 0, "times": []}
    tracker.client.set_registered_model_alias(name, "champion", str(versions[0]))
    options_of_server = ("poll_seconds=0.02",)
    with serving("dlrm", name, versions[0], tracker.uri, folder, options.processes, *options_of_server) as (port, pid):
        before = memory_of(pid)
        began = time.perf_counter()
        moves = asyncio.run(_reload(options.reloads, tracker, name, versions, port, body, expected, seen))
        seconds = time.perf_counter() - began
        after = memory_of(pid)
    times = seen.pop("times")
    return (
        seen
        | _summary(times)
        | {"reloads": moves, "seconds": round(seconds, 1), "memory_before": before, "memory_after": after}
    )


async def _reload(
    count: int, tracker: Any, name: str, versions: list[int], port: int, body: bytes, expected: dict[str, Any],
    seen: dict[str, Any],
) -> int:  # fmt: skip
    done = asyncio.Event()
    current = {"version": str(versions[0])}

    async def call() -> None:
        connection = HttpConnection(port)
        while not done.is_set():
            began = time.perf_counter()
            try:
                status, answer, headers = await connection.ask(JSON, body)
            except (OSError, asyncio.IncompleteReadError):
                seen["failed"] += 1
                connection = HttpConnection(port)
                continue
            seen["times"].append(time.perf_counter() - began)
            seen["answers"] += 1
            current["version"] = headers.get("x-model-version", "")
            if status != 200:
                seen["failed"] += 1
            elif [row["probability"] for row in json.loads(answer)["predictions"]] != expected[current["version"]]:
                seen["wrong"] += 1
            await asyncio.sleep(PAUSE_SECONDS)

    async def move() -> int:
        for number in range(count):
            target = str(versions[(number + 1) % 2])
            await asyncio.to_thread(tracker.client.set_registered_model_alias, name, "champion", target)
            limit = time.monotonic() + 120
            while current["version"] != target:
                if time.monotonic() > limit:
                    done.set()
                    return number
                await asyncio.sleep(0.002)
            if number % 100 == 99:
                say(
                    f"{number + 1} reloads, {seen['answers']:,} answers, {seen['wrong']} wrong, {seen['failed']} failed"
                )
        done.set()
        return count

    moves, *_ = await asyncio.gather(move(), *(call() for _ in range(8)))
    return int(moves)


def as_text(figures: dict[str, Any]) -> str:
    """Formats the figures as Markdown tables."""
    if "reloads" in figures:
        return json.dumps(figures["reloads"], indent=2)
    lines = ["| server | what | p50 ms | p99 ms | per second |", "|---|---|---|---|---|"]
    for server in ("dlrm", "mlflow"):
        parts = figures.get(server, {})
        for part in ("latency", "callers"):
            for what, one in parts.get(part, {}).items():
                lines.append(f"| {server} | {part}, {what} | {one['p50_ms']} | {one['p99_ms']} | {one['per_second']} |")
        for kind, one in parts.get("queries", {}).items():
            best = one["best"] or {"p50_ms": "", "p99_ms": "", "rate": 0.0}
            lines.append(f"| {server} | queries, {kind} | {best['p50_ms']} | {best['p99_ms']} | {best['rate']:.1f} |")
    lines.append("\n" + describe_machine(figures["machine"]))
    return "\n".join(lines)


if __name__ == "__main__":
    main(sys.argv[1:])
