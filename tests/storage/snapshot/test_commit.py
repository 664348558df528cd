"""The work of a commit, and of plans of one snapshot, does not grow with the manifests before it."""

import datetime
from typing import Any

import pytest
from pyiceberg import table as of_pyiceberg
from pyiceberg.expressions import EqualTo
from pyiceberg.manifest import ManifestFile
from pyiceberg.table.update import SetPropertiesUpdate

from storage.errors import StorageError
from storage.reader import SnapshotRef
from storage.snapshot.commit import CachedTransaction
from storage.snapshot.maintenance import expire
from storage.warehouse import Warehouse
from tests.homes import rows_of, write_days

FIRST = datetime.date(2024, 1, 1)


def write(warehouse: Warehouse, number: int) -> None:
    day = FIRST + datetime.timedelta(days=number)
    write_days(warehouse, rows_of(day, id=[number]))


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


def look(warehouse: Warehouse, snapshot: SnapshotRef, days: list[datetime.date]) -> list[Any]:
    reader = warehouse.reader(snapshot, ["id"])
    return [
        warehouse.day_rows(snapshot),
        warehouse.day_contents(snapshot),
        warehouse.day_notes("events"),
        warehouse.count_rows(snapshot, days),
        reader.fragments(days),
        reader.fragments(),
    ]


@pytest.mark.parametrize("most_bytes", [1, 1 << 20])
def test_the_files_of_a_snapshot_are_listed_once(
    warehouse: Warehouse, monkeypatch: pytest.MonkeyPatch, most_bytes: int
) -> None:
    """Compared with a warehouse that knows nothing yet. A long list is not kept."""
    for number in (0, 1, 2, 3, 1):
        write(warehouse, number)
    snapshot, days = warehouse.current("events"), [FIRST, FIRST + datetime.timedelta(days=1)]
    monkeypatch.setattr("storage.snapshot.files.MOST_KEPT_BYTES", most_bytes)
    fresh = Warehouse(warehouse.config, warehouse.home)
    expected = look(fresh, snapshot, days)
    fetched = count_fetched(monkeypatch)
    assert [look(warehouse, snapshot, days) for _ in range(3)] == [expected] * 3
    assert (len(fetched) == len(set(fetched))) == (most_bytes > 1)
    filtered = EqualTo("day", f"{days[0]}")
    assert [one.day for one in warehouse.reader(snapshot, ["id"], filtered).fragments()] == days[:1]


def test_days_are_asked_for_again_without_another_list(warehouse: Warehouse, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a table whose list of files is too long to be kept."""
    for number in (0, 1, 2):
        write(warehouse, number)
    monkeypatch.setattr("storage.snapshot.files.MOST_KEPT_BYTES", 1)
    snapshot, fetched = warehouse.current("events"), count_fetched(monkeypatch)
    first = warehouse.day_rows(snapshot)
    known = len(fetched)
    assert (known > 0, list(first.values())) == (True, [1, 1, 1])
    assert list(warehouse.day_contents(snapshot)) == list(warehouse.written_days("events")) == list(first)
    assert (warehouse.day_rows(snapshot), len(fetched)) == (first, known)


def test_an_expired_snapshot_is_refused_though_its_files_are_known(warehouse: Warehouse) -> None:
    write(warehouse, 0)
    old = warehouse.current("events")
    assert warehouse.day_rows(old) == {FIRST: 1}
    write(warehouse, 0)
    expire(warehouse, "events", datetime.timedelta(0))
    with pytest.raises(StorageError, match="It may have expired"):
        warehouse.day_rows(old)
    with pytest.raises(StorageError, match="It may have expired"):
        warehouse.reader(old, ["id"])
