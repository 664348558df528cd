"""A full disk leaves earlier files unchanged and nothing half-written.

The kernel limits the size of files, which gives the same error at the same places as a full disk.
"""

import datetime
import resource
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from pyarrow import fs
from torch.distributed.checkpoint.api import CheckpointException

from pipeline.extraction.config import IngestConfig, SourceConfig
from pipeline.extraction.extract import extract
from pipeline.extraction.opening import SourceContext
from pipeline.registration.config import RegistrationConfig
from pipeline.registration.journal import POINTS, Journal
from pipeline.registration.tracking import Tracker
from pipeline.training.state import checkpoint, checkpoints
from pipeline.training.state.checkpoint import CheckpointError
from pipeline.training.state.checkpoints import StoredCheckpoints
from pipeline.transforms.schema import FeatureSchema
from storage import objects
from storage.artifacts import sha256, write_json
from storage.config import WarehouseConfig
from storage.objects import ObjectFolder
from storage.reader import SnapshotRef
from storage.warehouse import Warehouse
from tests.homes import read_rows

DAYS = [datetime.date(2025, 3, 1), datetime.date(2025, 3, 2)]


@contextmanager
def full_beyond(size: int) -> Iterator[None]:
    """Limits the size of this process's files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def day_of(number: int, rows: int = 60_000) -> pa.Table:
    random = np.random.default_rng(number)
    values = {
        "num": random.normal(size=rows),
        "user": random.integers(0, 99, rows),
        "label": random.integers(0, 2, rows),
    }
    return pa.table({"day": pa.array([DAYS[number]] * rows, pa.date32()), **values})


def everything(home: Path) -> dict[str, str]:
    """Hashes all data and metadata files. Files of SQLite and DuckDB are temporary."""
    return {
        str(path): sha256(path) for path in home.rglob("*") if path.suffix in (".parquet", ".json", ".avro", ".tmp")
    }


@pytest.mark.parametrize("size", [400_000, 3_000], ids=["data file", "metadata"])
def test_an_ingest_on_a_full_disk_leaves_the_table_as_it_was(tmp_path: Path, size: int) -> None:
    warehouse = Warehouse(WarehouseConfig(), tmp_path / "home")
    features = FeatureSchema.model_validate(
        {"sparse": [{"columns": ["user"], "transforms": [{"kind": "sigrid_hash", "size": 9}]}]}
    )
    source = SourceConfig.model_validate({"path": "*.parquet", "day_column": "day"})

    def ingest() -> SnapshotRef:
        return extract(
            SourceContext(source, features, warehouse, "t", tmp_path, tmp_path / "logs"), IngestConfig()
        ).snapshot

    pq.write_table(day_of(0), tmp_path / "0.parquet")
    before = ingest()
    rows = read_rows(warehouse, before, ["user", "num"])
    pq.write_table(day_of(1), tmp_path / "1.parquet")
    files = everything(tmp_path / "home")
    with full_beyond(size), pytest.raises(OSError, match="File too large"):
        ingest()
    assert everything(tmp_path / "home") == files
    assert not list((tmp_path / "home" / "tmp").iterdir())
    assert (warehouse.current("t"), warehouse.day_rows(before)) == (before, {DAYS[0]: 60_000})
    assert read_rows(warehouse, before, ["user", "num"]).equals(rows)
    assert warehouse.day_rows(ingest()) == dict.fromkeys(DAYS, 60_000)  # once there is room


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize(
    ("lacking", "got"),
    [(100_000, "a truncated file, as on a full disk"), (50, "File too large")],
    ids=["middle", "end"],
)
def test_a_checkpoint_on_a_full_disk_leaves_the_earlier_ones(tmp_path: Path, lacking: int, got: str) -> None:
    def save(step: int) -> None:
        tensors: dict[str, Any] = {"model/table": torch.full((1_000, 64), float(step))}
        checkpoint.save(tmp_path / f"step-{step:010d}", tensors, {"steps": step})

    save(1)
    size = max(path.stat().st_size for path in (tmp_path / "step-0000000001").iterdir())
    with full_beyond(size - lacking), pytest.raises(CheckpointError) as caught:
        save(2)
    assert str(caught.value) == (
        f"checkpoint 'step-0000000002': expected to be written, got {got}. "
        f"Free disk space or repair '{tmp_path}'. Earlier checkpoints are kept."
    )
    assert [path.name for path in tmp_path.iterdir()] == ["step-0000000001"]
    checkpoint.verify(tmp_path / "step-0000000001")
    save(2)
    newest = checkpoint.find_latest(tmp_path)
    assert newest is not None
    assert newest.name == "step-0000000002"


@pytest.mark.usefixtures("device")
def test_a_full_disk_of_a_host_is_not_taken_for_the_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything is sent, and while a file is copied from the store. Of two ranks, the error is of the full one."""
    away = {"s3.endpoint": "http://127.0.0.1:9", "s3.connect-timeout": "1", "s3.region": "x"}
    kept = StoredCheckpoints(tmp_path, ObjectFolder("s3://away/one", away))
    tensors: dict[str, Any] = {"model/table": torch.ones(1_000, 64)}
    where = f"checkpoint 'one' of rank 0 on host '{socket.gethostname()}': expected to be written to '{tmp_path}', got "
    with full_beyond(50_000), pytest.raises(CheckpointError) as caught:
        kept.save("one", tensors, {"steps": 1}, {})
    assert str(caught.value).startswith(where), caught.value
    assert str(caught.value).endswith("Free disk space there, or repair the folder. Earlier checkpoints are kept.")
    local = fs.LocalFileSystem()
    (tmp_path / "there").write_bytes(bytes(100_000))
    monkeypatch.setattr(objects, "_open_store", lambda *given: SimpleNamespace(fs=local))
    monkeypatch.setattr(objects, "_path_in", lambda address: f"{tmp_path}")
    with full_beyond(50_000), pytest.raises(OSError, match=f"File too large: '{tmp_path}/here'"):
        kept.store.fetch("there", tmp_path / "here")

    def other_fails() -> None:
        raise CheckpointException("", {1: (OSError(28, "No space left on device"), None)})  # type: ignore[dict-item]

    theirs = CheckpointError("checkpoint 'one' of rank 1 on host 'b'", "to be written", "a full disk", "Free space.")
    monkeypatch.setattr(checkpoints, "gather_objects", lambda own, group: [own, (None, theirs, True)])
    with pytest.raises(CheckpointError, match="of rank 1 on host 'b'"):
        kept._on_all_ranks("one", None, other_fails)


def test_a_log_on_a_full_disk_ends_in_a_whole_line(tmp_path: Path) -> None:
    """Metrics on their way to MLflow, and a file of the run's record."""
    tracker = Tracker(RegistrationConfig(tracking_uri=f"sqlite:///{tmp_path}/mlflow.db"), tmp_path, "full")
    run_id = tracker.start("run", {}, {}, None)
    journal = Journal(tracker, run_id, tmp_path, print)
    journal.log(5, {"ne": 0.5})
    write_json(tmp_path / "record.json", {"a": 1})
    whole = (tmp_path / POINTS).read_bytes()
    with full_beyond(len(whole) + 20):
        with pytest.raises(OSError, match="File too large"):
            journal.log(10, {"ne": 0.4})
        with pytest.raises(OSError, match="File too large"):
            write_json(tmp_path / "record.json", {"a": "x" * 500})
    assert (tmp_path / POINTS).read_bytes() == whole
    assert (tmp_path / "record.json").read_text() == '{\n  "a": 1\n}\n'
    assert not list(tmp_path.glob(".*"))
    journal.log(10, {"ne": 0.4})
    Journal(tracker, run_id, tmp_path, print).deliver()
    points = tracker.client.get_metric_history(run_id, "ne")
    assert [(point.step, point.value) for point in points] == [(5, 0.5), (10, 0.4)]
