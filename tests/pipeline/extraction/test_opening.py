"""Logs in an object store are ingested like the same files on a disk."""

import gzip
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest

from pipeline.data.formats.files import find_files
from pipeline.data.formats.reading import readable_files
from pipeline.data.joined.source import FeatureSource, pin_sources
from pipeline.errors import DataError
from pipeline.jobs.transient import is_transient
from pipeline.transforms.joins import FeatureJoin
from storage.config import WarehouseConfig
from storage.errors import StorageError
from storage.objects import find_objects
from storage.warehouse import Warehouse
from tests.objects import Store, serving_objects

BASE = pd.Timestamp("2024-01-01 08:00")


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    with serving_objects(tmp_path_factory.mktemp("store")) as one:
        yield one


@pytest.fixture
def logs(store: Store, tmp_path: Path) -> Path:
    """Two days of impressions, their outcomes and a side table: on a disk and, under the same names, in the store."""
    random, root = np.random.default_rng(5), tmp_path / "logs"
    for day in range(2):
        (root / f"shown/day={day}").mkdir(parents=True)
        (root / "clicks").mkdir(exist_ok=True)
        times = BASE + pd.Timedelta(days=day) + pd.to_timedelta(np.sort(random.integers(0, 3_600, 500)), unit="s")
        shown = pd.DataFrame({"impression_id": np.arange(500) + 1_000 * day, "event_time": times})
        shown["user"], shown["price"] = random.integers(0, 40, 500), random.random(500)
        shown.to_parquet(root / f"shown/day={day}/a.parquet", index=False)
        clicks = shown.iloc[::7][["impression_id"]].assign(outcome_time=times[::7] + pd.Timedelta(seconds=60))
        clicks.to_csv(root / f"clicks/{day}.csv.gz", index=False)
    pd.DataFrame({"user": np.arange(40), "age": np.arange(40) * 1.5}).to_csv(root / "users.csv", index=False)
    store.upload(root)
    return root


def make_source(root: str) -> dict[str, Any]:
    return {
        "path": f"{root}/shown/*/*.parquet",
        "day_column": "event_time",
        "outcomes": {"path": f"{root}/clicks/*.csv.gz", "window_seconds": 3_600},
        "lookups": [{"path": f"{root}/users.csv", "on": ["user"]}],
    }


@pytest.mark.slow
def test_rows_days_and_a_second_ingest_are_as_from_a_disk(
    store: Store, logs: Path, ingest: Any, stored: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    remote = Warehouse(WarehouseConfig(catalog={"warehouse": "s3://logs/tables"}), tmp_path / "remote")
    for name, value in store.variables.items():  # for the logs and for the tables' files
        monkeypatch.setenv(name, value)
    local = ingest(make_source(f"{logs}"), dense=["price", "age"])
    done = ingest(make_source("s3://logs"), dense=["price", "age"], into=remote)
    assert (done.rows, done.days_written) == (local.rows, local.days_written)
    pd.testing.assert_frame_equal(stored(into=remote), stored())
    assert stored()["label"].sum() == 2 * 72
    again = ingest(make_source("s3://logs"), dense=["price", "age"], into=remote)
    assert again.days_written == ()
    assert not list((tmp_path / "remote").rglob("*.parquet"))


@pytest.mark.nightly
def test_a_joined_source_is_read_from_the_store_and_may_not_change_meanwhile(
    store: Store, logs: Path, tmp_path: Path
) -> None:
    warehouse = Warehouse(WarehouseConfig(catalog=store.properties), tmp_path / "home")
    (there,) = pin_sources([FeatureJoin(path="s3://logs/users.csv", on="user")], tmp_path, warehouse)
    (here,) = pin_sources([FeatureJoin(path=f"{logs}/users.csv", on="user")], tmp_path, warehouse)
    both = [list(FeatureSource(one, warehouse).rows(None, ["age"])) for one in (there, here)]
    assert [[value.to_pylist() for value in part.values] for part in both[0]] == [[(np.arange(40) * 1.5).tolist()]]
    assert both[0] == both[1]
    source = FeatureSource(there, warehouse)
    store.client().put_object(Bucket=store.bucket, Key="users.csv", Body=b"user,age\n1,2\n")
    with pytest.raises(DataError, match="the file unchanged since the run started"):
        list(source.rows(None, ["age"]))


@pytest.mark.slow
def test_text_of_any_name_is_read_from_a_store(store: Store, tmp_path: Path) -> None:
    lines = b"user,age\n1,2\n"
    contents = {"rows": lines, "a.csv": lines, "b.csv.gz": gzip.compress(lines), ".gz.csv": lines}
    for name, content in contents.items():
        store.client().put_object(Bucket=store.bucket, Key=f"text/{name}", Body=content)
    files = find_objects("s3://logs/text/*", store.properties)
    with readable_files(dict.fromkeys(files, "csv"), tmp_path, store.properties) as read:
        assert [pq.read_table(read[file].read).to_pylist() for file in files] == [[{"user": "1", "age": "2"}]] * 4
    assert not [*tmp_path.rglob("*.csv")]


@pytest.mark.nightly
def test_a_store_that_is_lost_meanwhile_is_named_and_the_run_may_try_again(
    logs: Path, ingest: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ends after its files are listed, before DuckDB reads them."""
    with serving_objects(tmp_path) as other:
        other.upload(logs)
        remote = Warehouse(WarehouseConfig(catalog=other.properties), tmp_path / "remote")
        listed = find_files("s3://logs/shown/*/*.parquet", tmp_path, "source.path", other.properties)
        text = find_files("s3://logs/clicks/*", tmp_path, "source.path", other.properties)
    reading = readable_files(dict.fromkeys(text, "auto"), tmp_path, other.properties)
    with pytest.raises(StorageError, match="object store of the source: expected a store that answers, got") as lost:
        reading.__enter__()
    assert is_transient(lost.value)
    monkeypatch.setattr("pipeline.extraction.opening.find_files", lambda *_: listed)
    with pytest.raises(StorageError, match="object store of the source: expected a store that answers, got") as lost:
        ingest({"path": "s3://logs/shown/*/*.parquet", "day_column": "event_time"}, into=remote)
    assert "Could not connect" in str(lost.value)
    assert is_transient(lost.value)
