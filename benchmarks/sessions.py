"""Effect of sessions and deduplicated lists on bytes, preprocessing and training.

    python -m benchmarks.sessions --json

Stores and reads one generated log in three ways. `plain` stores rows by time and shuffles them one by one. `ordered`
stores and shuffles whole sessions (`ingest.order_by`, `preprocessing.session_column`). `deduplicated` also makes, keeps
and looks up shared lists of a session once (`preprocessing.deduplicate`). Preprocessing is an epoch of batches in one
thread, including the reads. Training is one rank with batches in memory, by its median step. Every pass runs in its own
process. A round runs each way once.
"""

import argparse
import io
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import pyarrow.parquet as pq

from benchmarks.machine import ROOT, as_table, machine, say
from models.config import DLRMConfig
from pipeline.data.selection import Selection
from pipeline.extraction.config import IngestConfig, SourceConfig
from pipeline.extraction.extract import extract
from pipeline.extraction.opening import SourceContext
from pipeline.jobs.training.rank.spec import RankSpec
from pipeline.preprocessing.client import Client, InlineSource
from pipeline.preprocessing.config import PreprocessingConfig
from pipeline.preprocessing.dataset import DataSpec
from pipeline.training.config import TrainConfig
from pipeline.training.launch.processes import Limits, run_ranks
from pipeline.transforms.plan.plan import build_plan
from pipeline.transforms.schema import FeatureSchema
from storage.config import WarehouseConfig
from storage.layout.spec import Layout
from storage.warehouse import Warehouse

LISTS = (
    "list_interests", "list_recent_items", "list_recent_categories", "list_recent_advertisers", "list_search_terms",
)  # fmt: skip
GAINS = (
    "megabytes", "list_megabytes", "list_megabytes_without_dictionary", "preprocessing_seconds", "step_milliseconds",
)  # fmt: skip
"""Figures that should be small."""
WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "ordered": {"session": "session_id"},
    "deduplicated": {"session": "session_id", "deduplicate": LISTS},
}
"""Name -> its changes to the DataSpec."""
PARTS = ("preprocessing", "training")
BATCH_ROWS, WINDOW_ROWS, WIDTH = 4_096, 65_536, 64
PACKAGES = ("torch", "torchrec", "fbgemm-gpu-cpu", "pyarrow", "numba", "numpy", "duckdb")


def main(words: Sequence[str]) -> None:
    """Measures and prints a table or, on the last line, one JSON object."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.sessions")
    parser.add_argument("--json", action="store_true", help="all figures as one JSON object on the last line")
    parser.add_argument("--rows", type=int, default=400_000, help="rows of the log")
    parser.add_argument("--session-rows", type=float, default=10.0, help="mean rows of a session")
    parser.add_argument("--list-ids", type=int, default=100, help="longest list; no list is cut")
    parser.add_argument("--rounds", type=int, default=5, help="passes of each way; the median counts")
    parser.add_argument("--steps", type=int, default=24, help="steps of a pass of training")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="what is timed")
    parser.add_argument("--folder", type=Path, help="keeps the tables for the next run; default: a temporary one")
    parser.add_argument("--way", choices=WAYS, help="runs one preprocessing pass of this way only")
    options = parser.parse_args(words)
    with tempfile.TemporaryDirectory(prefix="dlrm-benchmark-") as temporary:
        folder = (options.folder or Path(temporary)).resolve()
        specs = tables(folder, options.rows, options.session_rows, options.list_ids)
        if options.way:
            print(json.dumps(run_preprocessing(specs[options.way])))
            return
        figures = measure(specs, folder, options)
    print(json.dumps(figures) if options.json else as_table("way", figures["ways"], figures, "_gain"))


def features(list_ids: int) -> FeatureSchema:
    """Returns a feature schema of all columns, with lists cut to `list_ids`."""
    hashed = {"kind": "sigrid_hash", "size": 100_000}
    cut = {"kind": "first_x", "limit": list_ids}
    groups = {
        "dense": [{"columns": ["num_*"], "transforms": [{"kind": "log"}, {"kind": "fill_null"}]}],
        "sparse": [
            {"columns": ["cat_*"], "transforms": [hashed]},
            {"columns": ["list_*"], "pooling": "mean", "transforms": [cut, hashed]},
        ],
    }
    return FeatureSchema.model_validate(groups)


def tables(folder: Path, rows: int, session_rows: float, list_ids: int) -> dict[str, DataSpec]:
    """Returns the table that each way reads. Writes the log in both orders if the folder lacks it."""
    source = SourceConfig.model_validate(
        {
            "generator": {
                "days": 1, "rows_per_day": rows, "session_mean_rows": session_rows, "lists_per": "session",
                "list_length_exponent": 1.0, "list_limit_ids": list_ids,
            },
            "outcomes": {"window_seconds": 3_600},
            "day_column": "event_time",
        }
    )  # fmt: skip
    schema = features(list_ids)
    found: dict[str, DataSpec] = {}
    for name, more in WAYS.items():
        order = ("session_id", "event_time") if more else ()
        home = folder / ("by_session" if order else "by_time")
        warehouse = Warehouse(WarehouseConfig(), home)
        config = IngestConfig(order_by=order)
        made = extract(SourceContext(source, schema, warehouse, "events", folder, folder / "logs"), config)
        found[name] = DataSpec(
            warehouse=warehouse.config, home=str(home), snapshot=made.snapshot, label=schema.label,
            selection=Selection(days=tuple(warehouse.day_rows(made.snapshot))),
            plan=build_plan(schema, warehouse.schema(made.snapshot)), **more,
        )  # fmt: skip
    return found


def measure(specs: dict[str, DataSpec], folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Measures all ways, round by round, and returns the figures."""
    facts = machine(PACKAGES)
    ways: dict[str, dict[str, Any]] = {name: dict(measure_bytes(spec)) for name, spec in specs.items()}
    passes: dict[tuple[str, str], list[dict[str, float]]] = {
        (part, name): [] for part in options.parts for name in WAYS
    }
    for number in range(options.rounds):
        for (part, name), done in passes.items():
            say(f"round {number + 1} of {options.rounds}: {part}, {name}")
            if part == "training":
                done.append(run_training(specs[name], options.steps))
            else:
                done.append(run_in_process(name, folder, options))
    for (_, name), done in passes.items():
        ways[name] |= {key: round(median(one[key] for one in done), 4) for key in done[0]}
    names = [key for key in GAINS if key in ways["plain"]]
    gains = {f"{key}_gain": round(ways["plain"][key] / ways["deduplicated"][key], 3) for key in names}
    sizes = {name: getattr(options, name) for name in ("rows", "session_rows", "list_ids", "rounds", "steps")}
    return gains | {"ways": ways, "machine": facts} | sizes


def measure_bytes(spec: DataSpec) -> dict[str, float]:
    """Returns megabytes of the data files, of their lists, and of these lists without dictionaries."""
    warehouse = Warehouse(spec.warehouse, Path(spec.home))
    fragments = warehouse.reader(spec.snapshot, [spec.label]).fragments()
    paths = [path.removeprefix("file://") for path in dict.fromkeys(fragment.path for fragment in fragments)]
    groups = [file.row_group(i) for file in map(pq.read_metadata, paths) for i in range(file.num_row_groups)]
    columns = [group.column(i) for group in groups for i in range(group.num_columns)]
    lists = sum(one.total_compressed_size for one in columns if one.path_in_schema.startswith("list_"))
    without = 0
    for path in paths:
        table = pq.ParquetFile(path).read(columns=list(LISTS))
        layout = Layout(plain=LISTS)
        memory = io.BytesIO()
        pq.write_table(table, memory, row_group_size=layout.row_group_rows, **layout.parquet(table.schema))
        without += memory.tell()
    sizes = sum(Path(path).stat().st_size for path in paths), lists, without
    return dict(zip(GAINS[:3], [round(size / 1e6, 2) for size in sizes], strict=True))


def run_in_process(name: str, folder: Path, options: argparse.Namespace) -> dict[str, float]:
    """Runs one pass of preprocessing in its own process."""
    command = [sys.executable, "-m", "benchmarks.sessions", "--way", name, "--folder", str(folder)]
    command += ["--rows", str(options.rows), "--session-rows", str(options.session_rows)]
    command += ["--list-ids", str(options.list_ids)]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, check=True)
    figures: dict[str, float] = json.loads(done.stdout)
    return figures


def run_preprocessing(spec: DataSpec) -> dict[str, float]:
    """Runs an epoch in this process. Returns its seconds, the worker's times, and the number of ids."""
    epoch(spec, WINDOW_ROWS)  # loads compiled loops, and files into the page cache
    begun = time.perf_counter()
    ids, source = epoch(spec, WINDOW_ROWS)
    seconds = time.perf_counter() - begun
    costs = source.master.totals.costs
    return {
        "preprocessing_seconds": seconds, "read_seconds": costs.read_seconds,
        "transform_seconds": costs.transform_seconds, "batch_seconds": costs.batch_seconds, "ids": ids,
    }  # fmt: skip


def epoch(spec: DataSpec, window_rows: int) -> tuple[int, InlineSource]:
    """Returns the number of ids of an epoch's batches, and their source."""
    source = InlineSource({"rows": spec}, PreprocessingConfig(executor="inline", workers=1))
    client = Client(source, ("rows", spec), BATCH_ROWS, window_rows=window_rows)
    return sum(len(batch.sparse.values()) for batch in client.batches()), source


def run_training(spec: DataSpec, steps: int) -> dict[str, float]:
    """Returns the median step of a short training on all cores with batches in memory."""
    training = TrainConfig(
        world_size=1, batch_rows=BATCH_ROWS, threads_per_rank=len(os.sched_getaffinity(0)), device="cpu",
        checkpoint_every_steps=None, max_steps=steps,
    )  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="dlrm-benchmark-") as temporary:
        rank_spec = RankSpec(
            train=spec, valid=None, probe=spec, training=training, seed=1, folder=temporary,
            preprocessing=PreprocessingConfig(workers=1, shuffle_window_rows=WINDOW_ROWS),
            model=DLRMConfig(embedding_width=WIDTH, bottom_mlp=(64,), top_mlp=(128, 64)),
        )  # fmt: skip
        result = run_ranks(
            "benchmarks.memory_rank", rank_spec, Path(temporary), 1, 1, Limits(), lambda event: None, ROOT
        )
    milliseconds = result["step_milliseconds"][0]
    return {"step_milliseconds": milliseconds, "training_rows_per_second": round(1e3 * BATCH_ROWS / milliseconds)}


if __name__ == "__main__":
    main(sys.argv[1:])
