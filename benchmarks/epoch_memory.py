"""Memory of the preprocessing service over a long epoch and over one with a tenth of the rows.

    python -m benchmarks.epoch_memory --folder /data/narrow --json

Two worker processes deliver shuffled batches to this process, which hashes them. Samples the resident memory of each
process a hundred times per epoch, with and without shared pages. A worker's peak is the kernel's own mark, which misses
nothing.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib as mpl

mpl.use("Agg")

import matplotlib.pyplot as plt
import psutil

from benchmarks.machine import ROOT, describe_machine, machine, say
from benchmarks.wide_table import NARROW, wide_table
from pipeline.preprocessing.config import PreprocessingConfig
from pipeline.preprocessing.drain import DrainResult, drain
from pipeline.preprocessing.master import Totals
from pipeline.preprocessing.pool import WORKERS_FILE

BATCH_ROWS = 4_096
CONFIG = PreprocessingConfig(executor="process", workers=2, shuffle_window_rows=262_144, memory_bytes=1 << 30)
LOOKS = 100
"""Memory samples per epoch."""
MASTER = "master"
PACKAGES = ("numpy", "pyarrow", "numba", "torch")
MIB = 1 << 20


class MemorySample(NamedTuple):
    """Memory of a process after a number of rows, in MiB."""

    rows: int
    all: float
    own: float
    """Without shared pages, which hold files, rows and batches."""


class Watch:
    """Samples the memory of master and workers during an epoch.

    Args:
        folder: The master's folder, which lists the workers.
        rows: Rows of the epoch.
    """

    def __init__(self, folder: Path, rows: int) -> None:
        self.folder, self.rows = folder, rows
        self.due = 0.0
        self.looks: dict[str, list[MemorySample]] = {}

    def __call__(self, rows: int, totals: Totals) -> None:
        """Takes a sample when it is due. See `drain`."""
        if rows < self.due and rows < self.rows:
            return
        self.due = rows + self.rows / LOOKS
        workers = json.loads((self.folder / WORKERS_FILE).read_text(encoding="utf-8"))
        for name, pid in {**workers, MASTER: None}.items():
            try:
                memory = psutil.Process(pid).memory_info()
            except psutil.NoSuchProcess:
                continue  # this worker is being replaced
            look = MemorySample(rows, memory.rss / MIB, (memory.rss - memory.shared) / MIB)
            self.looks.setdefault(name, []).append(look)


def main(words: Sequence[str]) -> None:
    """Measures, plots, and prints a table or, on the last line, one JSON object."""
    options = _options(words)
    with tempfile.TemporaryDirectory(prefix="dlrm-benchmark-") as temporary:
        folder = (options.folder or Path(temporary)).resolve()
        figures, watch = measure(folder, options.rows)
    draw(watch, options.figure)
    print(json.dumps(figures) if options.json else as_text(figures))


def _options(words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.epoch_memory")
    parser.add_argument("--json", action="store_true", help="all figures as one JSON object on the last line")
    parser.add_argument("--rows", type=int, default=10_000_000, help="rows of the long epoch")
    parser.add_argument("--folder", type=Path, help="keeps the tables for the next run; default: a temporary one")
    parser.add_argument("--figure", type=Path, default=ROOT / "benchmarks" / "epoch_memory.png", help="file to plot to")
    return parser.parse_args(words)


def measure(folder: Path, rows: int) -> tuple[dict[str, Any], Watch]:
    """Returns the figures of both epochs and the samples of the long one."""
    facts = machine(PACKAGES)
    tenth, _ = epoch(folder, rows // 10)
    whole, watch = epoch(folder, rows)
    figures = {
        "growth": round(_largest(whole) / _largest(tenth), 3),
        "whole": whole,
        "tenth": tenth,
        "columns": {"lists": NARROW.lists, "numbers": NARROW.numbers},
        "config": CONFIG.model_dump(mode="json") | {"batch_rows": BATCH_ROWS},
        "machine": facts,
    }
    return figures, watch


def _largest(epoch: dict[str, Any]) -> float:
    return max(one["peak_mib"] for one in epoch["workers"].values())


def epoch(folder: Path, rows: int) -> tuple[dict[str, Any], Watch]:
    """Runs an epoch and returns its figures and samples."""
    say(f"table of {rows} rows in {folder}")
    table = wide_table(folder / str(rows), rows, NARROW)
    say(f"epoch of {rows} rows")
    with tempfile.TemporaryDirectory(prefix="dlrm-benchmark-") as temporary:
        watch = Watch(Path(temporary), rows)
        drained = drain(table.spec, CONFIG, BATCH_ROWS, seed=1, folder=Path(temporary), progress=watch)
    return summarize(drained, watch), watch


def summarize(drained: DrainResult, watch: Watch) -> dict[str, Any]:
    """Returns the figures of an epoch by process."""
    processes = {name: _process(looks, watch.rows) for name, looks in watch.looks.items()}
    for worker, peak in drained.peak_rss_mb.items():
        if str(worker) in processes:
            processes[str(worker)]["peak_mib"] = max(peak, processes[str(worker)]["peak_mib"])
    return {
        "rows": drained.rows,
        "rows_per_second": round(drained.rows_per_second),
        "peak_bytes": drained.peak_bytes,
        "restarts": drained.restarts,
        "workers": {name: one for name, one in processes.items() if name != MASTER},
        MASTER: processes[MASTER],
    }


def _process(looks: Sequence[MemorySample], rows: int) -> dict[str, int]:
    early = next(look for look in looks if look.rows >= rows / 10)
    return {
        "peak_mib": round(max(look.all for look in looks)),
        "mib_at_10_percent": round(early.all),
        "mib_at_100_percent": round(looks[-1].all),
        "own_peak_mib": round(max(look.own for look in looks)),
        "own_mib_at_10_percent": round(early.own),
        "own_mib_at_100_percent": round(looks[-1].own),
    }


def draw(watch: Watch, file: Path) -> None:
    """Plots the memory of each process against the rows delivered so far."""
    figure, axes = plt.subplots(figsize=(7, 3.5), layout="constrained")
    for i, (name, looks) in enumerate(sorted(watch.looks.items())):
        title = name if name == MASTER else f"worker {name}"
        millions = [look.rows / 1e6 for look in looks]
        axes.plot(millions, [look.all for look in looks], color=f"C{i}", label=title)
        axes.plot(millions, [look.own for look in looks], color=f"C{i}", ls=":", label=f"{title}, without shared pages")
    axes.set(xlabel="millions of rows", ylabel="resident memory, MiB")
    axes.set_xlim(0)
    axes.set_ylim(0)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=7, ncols=len(watch.looks))
    figure.savefig(file, dpi=120)
    plt.close(figure)


def as_text(figures: dict[str, Any]) -> str:
    """Formats the figures as a Markdown table. In brackets: memory that is not shared. MiB."""
    lines = ["| rows | process | peak | at 10 % | at 100 % |", "|---|---|---|---|---|"]
    for epoch in (figures["tenth"], figures["whole"]):
        named = {f"worker {name}": one for name, one in epoch["workers"].items()} | {MASTER: epoch[MASTER]}
        for name, one in named.items():
            cells = (f"{one[f'{key}']:,} ({one[f'own_{key}']:,})" for key in _KEYS)
            lines.append(f"| {epoch['rows']:,} | {name} | {' | '.join(cells)} |")
        lines.append(f"| {epoch['rows']:,} | rows and batches held | {epoch['peak_bytes'] / MIB:,.0f} | | |")
    lines.append("\n" + describe_machine(figures["machine"]))
    return "\n".join(lines)


_KEYS = ("peak_mib", "mib_at_10_percent", "mib_at_100_percent")


if __name__ == "__main__":
    main(sys.argv[1:])
