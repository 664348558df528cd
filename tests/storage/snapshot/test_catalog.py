"""Tables share what was parsed of their metadata, and every writer and reader sees the newest state."""

import datetime
import socket
from pathlib import Path
from typing import Any

import pytest
from pyiceberg.catalog.sql import SqlCatalog
from pyiceberg.serializers import FromInputFile

from storage.config import WarehouseConfig
from storage.errors import StorageError
from storage.reader import SnapshotRef
from storage.snapshot.catalog import KEPT_STATES, ParsedOnceCatalog
from storage.snapshot.maintenance import expire
from storage.warehouse import Warehouse
from tests.homes import rows_of, write_days

DAY1, DAY2 = (datetime.date(2024, 1, day) for day in (1, 2))


def write(warehouse: Warehouse, day: datetime.date, count: int = 3, name: str = "events") -> SnapshotRef:
    return write_days(warehouse, rows_of(day, count, id=range(count)), name=name, notes={day: {"note": count}})


def count_parsed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    parse, parsed = FromInputFile.table_metadata, list[str]()

    def counted(file: Any, *more: Any) -> Any:
        parsed.append(file.location)
        return parse(file, *more)

    monkeypatch.setattr(FromInputFile, "table_metadata", counted)
    return parsed


def test_each_state_of_a_table_is_parsed_once(warehouse: Warehouse, monkeypatch: pytest.MonkeyPatch) -> None:
    write(warehouse, DAY1)
    parsed = count_parsed(monkeypatch)
    for count in (4, 5, 6):
        snapshot = write(warehouse, DAY2, count)
        warehouse.written_days("events")
        warehouse.day_notes("events")
        assert warehouse.day_rows(snapshot) == {DAY1: 3, DAY2: count}
    assert len(parsed) == len(set(parsed)) == 3


@pytest.mark.parametrize("kind", ["sqlite", "postgresql"])
def test_a_database_that_does_not_answer_is_one_sentence(kind: str, tmp_path: Path) -> None:
    if kind == "postgresql":
        pytest.importorskip("psycopg2")
    with socket.socket() as held:  # bound, and not listened to: nobody else takes the port
        held.bind(("127.0.0.1", 0))
        place = f"127.0.0.1:{held.getsockname()[1]}/x"
        uri = f"postgresql+psycopg2://me:secret@{place}" if kind == "postgresql" else f"sqlite:///{tmp_path}/none/x.db"
        catalog = {"type": "sql", "uri": uri, "warehouse": f"file://{tmp_path}"}
        with pytest.raises(StorageError) as error:
            _ = Warehouse(WarehouseConfig(catalog=catalog), tmp_path).catalog
    shown = f"postgresql+psycopg2://{place}: connection to server" if kind == "postgresql" else f"{uri}: unable to open"
    assert str(error.value).startswith(f"cannot open the catalog at {shown}")
    assert str(error.value).endswith("its token or credential, and that the server runs.")
    assert "\n" not in str(error.value)
    assert "secret" not in str(error.value)


def test_pyicebergs_own_catalog_reads_the_same_tables(warehouse: Warehouse) -> None:
    """It parses the metadata anew, and shares nothing."""
    for count in (3, 4, 5):
        snapshot = write(warehouse, DAY1, count)
    warehouse.tag(snapshot, "train")
    write(warehouse, DAY2)
    assert isinstance(warehouse.catalog, ParsedOnceCatalog)
    plain = SqlCatalog("dlrm", **warehouse.catalog.properties).load_table("dlrm.events")
    ours = warehouse.table("events")
    assert type(plain.metadata.snapshots[0]) is not type(ours.metadata.snapshots[0])
    assert ours.metadata.snapshots == plain.metadata.snapshots
    assert plain.metadata.snapshots == ours.metadata.snapshots
    assert ours.metadata == plain.metadata
    assert ours.metadata.model_dump_json() == plain.metadata.model_dump_json()
    assert ours.metadata.snapshots != plain.metadata.snapshots[:-1]


def test_a_commit_leaves_the_table_that_others_have_loaded_as_it_was(warehouse: Warehouse) -> None:
    first = write(warehouse, DAY1)
    loaded = warehouse.table("events")
    before = loaded.metadata.model_dump_json()
    write(warehouse, DAY2)
    warehouse.tag(first, "train")
    warehouse.set_properties("events", {"a": "b"})
    expire(warehouse, "events", datetime.timedelta(0))
    assert loaded.metadata.model_dump_json() == before
    assert len(loaded.snapshots()) == 1


def test_a_commit_of_another_process_is_seen_at_once(warehouse: Warehouse) -> None:
    write(warehouse, DAY1)
    other = Warehouse(WarehouseConfig(), warehouse.home)
    for count in (4, 5):
        snapshot = write(other, DAY2, count)
        assert warehouse.current("events") == snapshot
        assert warehouse.day_rows(snapshot) == {DAY1: 3, DAY2: count}
        write(warehouse, DAY1)


def test_a_renamed_table_has_its_new_name(warehouse: Warehouse) -> None:
    write(warehouse, DAY1)
    assert warehouse.table("events").name() == ("dlrm", "events")
    warehouse.catalog.rename_table("dlrm.events", "dlrm.renamed")
    assert warehouse.table("renamed").name() == ("dlrm", "renamed")


def test_few_states_are_remembered(warehouse: Warehouse) -> None:
    write(warehouse, DAY1)
    for number in range(KEPT_STATES + 3):
        warehouse.set_properties("events", {"a": f"{number}"})
        assert warehouse.table("events").properties["a"] == f"{number}"
    assert isinstance(warehouse.catalog, ParsedOnceCatalog)
    assert len(warehouse.catalog._states) == KEPT_STATES
