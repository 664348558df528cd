"""What a catalog names is on the disk."""

import datetime
import os
from pathlib import Path

import pyarrow as pa
import pytest

from storage.config import WarehouseConfig
from storage.snapshot.writing import replace_days
from storage.warehouse import Warehouse

DAY = datetime.date(2025, 6, 1)
SCHEMA = pa.schema([("day", pa.date32()), ("row", pa.int64())])


@pytest.mark.parametrize("named", [False, True], ids=["embedded catalog", "a catalog of local files"])
def test_every_file_of_a_table_is_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named: bool) -> None:
    """Otherwise a power failure may leave an empty file that the catalog has committed."""
    catalog = {"type": "sql", "uri": f"sqlite:///{tmp_path}/c.db", "warehouse": f"file://{tmp_path}/tables"}
    warehouse = Warehouse(WarehouseConfig(catalog=catalog if named else {}), tmp_path)
    synced: set[int] = set()
    fsync = os.fsync

    def note(descriptor: int) -> None:
        fsync(descriptor)
        synced.add(os.fstat(descriptor).st_ino)

    monkeypatch.setattr(os, "fsync", note)
    for number in range(2):
        rows = pa.table({"day": [DAY] * 3, "row": [number] * 3}, SCHEMA)
        reference = replace_days(warehouse, "ads", {DAY: f"{number}"}, SCHEMA, rows.to_batches(), 3)
    assert warehouse.day_rows(reference) == {DAY: 3}
    files = [path for path in tmp_path.rglob("*") if path.suffix in (".parquet", ".avro", ".json")]
    assert len(files) > 6
    assert [path.name for path in files if path.stat().st_ino not in synced] == []


def test_an_existing_file_is_not_written_over(tmp_path: Path) -> None:
    warehouse = Warehouse(WarehouseConfig(), tmp_path)
    rows = pa.table({"day": [DAY], "row": [1]}, SCHEMA)
    replace_days(warehouse, "ads", {DAY: "1"}, SCHEMA, rows.to_batches(), 1)
    table = warehouse.table("ads")
    with pytest.raises(FileExistsError, match="already exists"):
        table.io.new_output(table.metadata_location).create()
