"""Batches over Arrow Flight beside batches in shared memory, on one machine and the same cores.

    python -m benchmarks.transport --folder /data/wide --json

An epoch of the wide table goes through the whole service, to a consumer that does nothing with its batches; see
`benchmarks.service`. Both ways take turns. Flight runs over loopback, without TLS.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.machine import describe_machine, machine, say
from benchmarks.service import run_epochs
from benchmarks.wide_table import wide_table

WORKERS = (1, 2, 4)
PACKAGES = ("numpy", "pyarrow", "numba")


def main(words: Sequence[str]) -> None:
    """Measures and prints the figures."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.transport")
    parser.add_argument("--folder", type=Path, required=True, help="holds the table")
    parser.add_argument("--rows", type=int, default=400_000, help="rows of the table")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--workers", type=int, nargs="+", default=list(WORKERS))
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    options = parser.parse_args(words)
    figures = measure(options.folder.resolve(), options.rows, options.workers, options.rounds)
    print(as_text(figures))
    if options.json:
        print(json.dumps(figures))


def measure(folder: Path, rows: int, workers: Sequence[int], rounds: int) -> dict[str, Any]:
    """Returns the figures by number of workers."""
    table = wide_table(folder, rows)
    found: dict[str, Any] = {}
    for count in workers:
        passes: dict[str, list[dict[str, Any]]] = {"memory": [], "network": []}
        for number in range(rounds):
            for transport in ("memory", "network"):
                passes[transport] += run_epochs(table.spec, count, transport)[0]  # type: ignore[arg-type]
            say(f"{count} workers: round {number + 1} of {rounds}")
        found[str(count)] = compare(passes["memory"], passes["network"])
    return {"machine": machine(PACKAGES), "rows": rows, "rounds": rounds, "workers": found}


def compare(memory: Sequence[dict[str, Any]], network: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Returns the medians of both ways, and their ratio.

    Example:
        >>> one = {"seconds": 2.0, "rows": 8, "bytes": 10**9, "cpu_seconds": 3.0}
        >>> compare([one], [one | {"seconds": 2.5, "cpu_seconds": 3.5}])["network_speed"]
        0.8
    """
    medians = {
        name: {key: statistics.median(one[key] for one in passes) for key in ("seconds", "cpu_seconds")}
        for name, passes in (("memory", memory), ("network", network))
    }
    gigabytes = memory[0]["bytes"] / 1e9
    extra = medians["network"]["cpu_seconds"] - medians["memory"]["cpu_seconds"]
    return {
        "network_speed": round(medians["memory"]["seconds"] / medians["network"]["seconds"], 3),
        "memory_rows_per_second": round(memory[0]["rows"] / medians["memory"]["seconds"]),
        "network_rows_per_second": round(memory[0]["rows"] / medians["network"]["seconds"]),
        "gigabytes": round(gigabytes, 3),
        "network_cpu_seconds_per_gigabyte": round(extra / gigabytes, 2),
    } | medians


def as_text(figures: dict[str, Any]) -> str:
    """Formats the figures as a table."""
    lines = [describe_machine(figures["machine"]), "workers  memory rows/s  network rows/s  network/memory  CPU s/GB"]
    for workers, one in figures["workers"].items():
        lines.append(
            f"{workers:>7}  {one['memory_rows_per_second']:>13,}  {one['network_rows_per_second']:>14,}  "
            f"{one['network_speed']:>14.2f}  {one['network_cpu_seconds_per_gigabyte']:>8.2f}"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main(sys.argv[1:])
