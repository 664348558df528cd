"""The work of a commit does not grow with the manifests before it."""

import datetime
from typing import Any

import pyarrow as pa
import pytest
from pyiceberg import table as of_pyiceberg
from pyiceberg.manifest import ManifestFile
from pyiceberg.table.update import SetPropertiesUpdate

from storage.snapshot.commit import CachedTransaction
from storage.warehouse import Warehouse

FIRST = datetime.date(2024, 1, 1)


def write(warehouse: Warehouse, number: int) -> None:
    day = FIRST + datetime.timedelta(days=number)
    table = pa.table({"day": pa.array([day], pa.date32()), "id": pa.array([number])})
    warehouse.replace_days("events", {day: "i"}, table.schema, table.to_batches(), 1)


def count_fetched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    fetch, fetched = ManifestFile.fetch_manifest_entry, list[str]()

    def counted(manifest: Any, *arguments: Any, **more: Any) -> Any:
        fetched.append(manifest.manifest_path)
        return fetch(manifest, *arguments, **more)

    monkeypatch.setattr(ManifestFile, "fetch_manifest_entry", counted)
    return fetched


def test_a_commit_makes_metadata_once(warehouse: Warehouse, monkeypatch: pytest.MonkeyPatch) -> None:
    make, made = of_pyiceberg.update_table_metadata, list[int]()

    def counted(base: Any, updates: Any) -> Any:
        made[-1] += 1
        return make(base, updates)

    write(warehouse, 0)
    monkeypatch.setattr(of_pyiceberg, "update_table_metadata", counted)
    for number in (1, 2, 3, 4, 2):
        made.append(0)
        write(warehouse, number)
    assert made == [1] * 5


def test_the_check_of_a_commit_reads_the_manifests_of_its_days_alone(
    warehouse: Warehouse, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(4):
        write(warehouse, number)
    fetched = count_fetched(monkeypatch)
    write(warehouse, 4)
    assert len(fetched) == 1


def test_a_change_knows_its_updates_and_what_was_committed_meanwhile(warehouse: Warehouse) -> None:
    """Compared with pyiceberg's own transaction."""
    write(warehouse, 0)
    table = warehouse.table("events")
    change, own = CachedTransaction(table), table.transaction()
    assert change.table_metadata == own.table_metadata
    for one in (change, own):
        one._stage((SetPropertiesUpdate(updates={"a": "b"}),))
    assert change.table_metadata.properties == own.table_metadata.properties == {**table.properties, "a": "b"}
    assert "a" not in table.properties
    write(warehouse, 1)
    table.refresh()
    assert change.table_metadata.current_snapshot_id == warehouse.current("events").snapshot_id
    assert change.table_metadata.properties["a"] == "b"
