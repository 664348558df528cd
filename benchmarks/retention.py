"""Disk after a year of daily runs: simulates days of tiny data through the real functions, and cleans after each.

A simulated day takes `--seconds`, and `retention` is scaled by it. Each day writes its rows and yesterday's once more,
tags the snapshot, leaves a run folder, an MLflow run with files, a model version and the notes of a night, and moves
the champion.

    python -m benchmarks.retention --days 365
"""

import argparse
import datetime
import json
import os
import tempfile
import time
from pathlib import Path

import pyarrow as pa

from pipeline.config import load
from pipeline.jobs.reads import READS
from pipeline.jobs.training.job import tag_inputs
from pipeline.jobs.upkeep.clean import clean
from pipeline.jobs.workspace import Workspace
from pipeline.registration.aliases import CHAMPION, move_alias
from pipeline.registration.tracking import RESULT
from storage.layout.reads import ReadRecord, record_read
from storage.reader import SnapshotRef
from storage.snapshot.writing import replace_days

KEPT = {
    "runs_days": 7,
    "versions_days": 14,
    "versions_kept": 7,
    "mlflow_days": 30,
    "snapshots_days": 7,
    "leftovers_days": 2,
}
"""Retention in simulated days. Shorter than the defaults, so that the level shows early in the year."""
FIRST = datetime.date(2025, 1, 1)
NOTE_BYTES = 20_000
TAGS = {"mlflow.source.name": "flows.recurring"}
"""Only runs of our commands are cleaned."""
FOLDERS = (
    "runs",
    "reports",
    "reads",
    "judged",
    "mlflow/artifacts",
    "mlflow/mlflow.db",
    "warehouse/dlrm",
    "warehouse/catalog.db",
)


def write(workspace: Workspace, day: datetime.date, rows: int) -> SnapshotRef:
    """Writes a day of the table."""
    table = pa.table({"day": pa.array([day] * rows, pa.date32()), "user": list(range(rows))})
    return replace_days(workspace.warehouse, "year", {day: f"{rows}"}, table.schema, table.to_batches(), rows)


def simulate(workspace: Workspace, number: int, rows: int, model_bytes: int) -> float:
    """Leaves what one daily run does. Returns the seconds of a commit."""
    day, tracker = FIRST + datetime.timedelta(days=number), workspace.tracking
    identity = f"{number:012x}"
    began = time.perf_counter()
    snapshot = write(workspace, day, rows)
    commit = time.perf_counter() - began
    if number:
        snapshot = write(workspace, day - datetime.timedelta(days=1), rows + 1)
    tag_inputs(workspace.warehouse, identity, snapshot, ())
    folder = workspace.home / "runs" / f"year-{day}-{identity}-{'0' * 8}-0"
    for part in ("checkpoints/step-1/data", "weights.safetensors", "model/weights.safetensors"):
        (folder / part).parent.mkdir(parents=True, exist_ok=True)
        (folder / part).write_bytes(os.urandom(model_bytes))
    run_id = tracker.start(f"{day}", {"day": day}, TAGS | {"dlrm.day": f"{day}"}, None)
    tracker.log(run_id, 1, {f"metric_{i}": i / 7 for i in range(40)})
    tracker.log_json(run_id, {"text": "x" * 100_000}, RESULT)
    tracker.log_file(run_id, folder / "weights.safetensors")
    tracker.end(run_id, "FINISHED")
    client = tracker.client
    if not number:
        client.create_registered_model("year")
    tags = {"identity": identity, "run_folder": folder.name, "snapshot_id": f"{snapshot.snapshot_id}"}
    version = client.create_model_version("year", f"{folder}", run_id, tags=tags)
    move_alias(tracker, "year", CHAMPION, int(version.version), "gate", "simulated")
    leave_notes(workspace, day)
    spill = workspace.home / "warehouse" / "tmp" / f"ingest-{number}"  # of a killed ingest
    spill.mkdir(parents=True)
    (spill / "spill").write_bytes(bytes(model_bytes))
    return commit


def leave_notes(workspace: Workspace, day: datetime.date) -> None:
    """Leaves the report of the day's ingest, the verdict on its model, and the records of what two epochs read."""
    home = workspace.home
    for path in (home / "reports" / f"ingest-year-{day}-{day}" / "checks.png", home / "judged" / f"year-{day}.json"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(os.urandom(NOTE_BYTES))
    now = datetime.datetime.now(datetime.UTC)
    columns = tuple(f"column_{number}" for number in range(100))
    read = ReadRecord(
        table="year", by="train", at=now, columns=columns, rows=1, bytes_read=1, bytes_stored=1, reads=1, seconds=1.0
    )
    for _ in range(2):
        record_read(home / READS, read)


def measure(home: Path) -> dict[str, float]:
    """Returns folder -> MB."""
    found = {}
    for name in FOLDERS:
        path = home / name
        files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
        found[name] = round(sum(file.stat().st_size for file in files) / 1e6, 2)
    return found


def main() -> None:
    """Simulates the days and prints a JSON line for every thirtieth."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--days", type=int, default=365)
    parser.add_argument("--seconds", type=float, default=1.0, help="length of a simulated day")
    parser.add_argument("--rows", type=int, default=1_000)
    parser.add_argument("--model_bytes", type=int, default=100_000)
    parser.add_argument("--clean_every", type=int, default=1, help="days from one cleaning to the next")
    parser.add_argument("--keep", action="store_true", help="never cleans, for comparison")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as home:
        scale = arguments.seconds / 86_400
        kept = {f"retention.{key}": value if key == "versions_kept" else value * scale for key, value in KEPT.items()}
        workspace = Workspace(load("configs/smoke.yaml", {"name": "year", "home": home, **kept}))
        for number in range(arguments.days):
            began = time.perf_counter()
            commit = simulate(workspace, number, arguments.rows, arguments.model_bytes)
            cleaned = time.perf_counter()
            if not arguments.keep and number % arguments.clean_every == 0:
                clean(workspace, dry_run=False)
            now = time.perf_counter()
            if number % 30 == 0 or number == arguments.days - 1:
                sizes = measure(Path(home))
                snapshots = len(workspace.warehouse.table("year").snapshots())
                line = {"day": number + 1, "mb": round(sum(sizes.values()), 1), **sizes, "snapshots": snapshots}
                line |= {"commit_s": round(commit, 3), "clean_s": round(now - cleaned, 3)}
                print(json.dumps(line), flush=True)
            time.sleep(max(0.0, arguments.seconds - (now - began)))


if __name__ == "__main__":
    main()
