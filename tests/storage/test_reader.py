"""The rows read equal those that pandas selects. Unreadable files are named."""

import datetime
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pytest
from pyiceberg.expressions import And, EqualTo, GreaterThanOrEqual, In, IsNull, Not, NotEqualTo, NotIn, Or

from storage.config import WarehouseConfig
from storage.errors import CorruptFileError, StorageError
from storage.reader import SnapshotRef
from storage.warehouse import Warehouse
from tests.homes import write_days

DAY1, DAY2, DAY3 = (datetime.date(2024, 1, day) for day in (1, 2, 3))


write = partial(write_days, chunk_rows=5)


def reference() -> pd.DataFrame:
    return pd.DataFrame(
        {
            "day": [DAY1] * 40 + [DAY2] * 40,
            "id": range(80),
            "country": pd.Series(["DE", "FR", None, "US"] * 20, dtype=object),
            "x": [None if i % 7 == 0 else i / 8 for i in range(80)],
            "tags": [None if i % 5 == 0 else list(range(i % 4)) for i in range(80)],
        }
    )


FILTERS: dict[str, tuple[Any, Callable[[pd.DataFrame], Any]]] = {
    "text": (EqualTo("country", "DE"), lambda f: f["country"] == "DE"),
    "number": (GreaterThanOrEqual("x", 4.0), lambda f: f["x"] >= 4.0),
    "null": (IsNull("country"), lambda f: f["country"].isna()),
    "day": (EqualTo("day", "2024-01-02"), lambda f: f["day"] == DAY2),
    "both": (
        And(EqualTo("country", "US"), GreaterThanOrEqual("id", 30)),
        lambda f: (f["country"] == "US") & (f["id"] >= 30),
    ),
    "another text": (NotEqualTo("country", "DE"), lambda f: f["country"].isin(["FR", "US"])),
    "none of two texts": (NotIn("country", ["DE", "XX"]), lambda f: f["country"].isin(["FR", "US"])),
    "none of two, negated": (Not(In("country", ["DE", "XX"])), lambda f: f["country"].isin(["FR", "US"])),
    "none of two numbers": (NotIn("x", [1.0, 2.0]), lambda f: f["x"].notna() & ~f["x"].isin([1.0, 2.0])),
    "neither": (
        Not(Or(EqualTo("country", "DE"), GreaterThanOrEqual("x", 4.0))),
        lambda f: f["country"].isin(["FR", "US"]) & (f["x"] < 4.0),
    ),
    "none of two texts, or null": (
        Or(NotIn("country", ["DE", "XX"]), IsNull("country")),
        lambda f: f["country"] != "DE",
    ),
    "nothing": (EqualTo("id", -1), lambda f: f["id"] == -1),
}


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> tuple[Warehouse, SnapshotRef, pa.Schema]:
    warehouse = Warehouse(WarehouseConfig(row_group_rows=4, file_rows=10), tmp_path_factory.mktemp("warehouse"))
    schema = pa.schema(
        [
            ("day", pa.date32()),
            ("id", pa.int64()),
            ("country", pa.string()),
            ("x", pa.float64()),
            ("tags", pa.list_(pa.int64())),
        ]
    )
    return warehouse, write(warehouse, pa.Table.from_pandas(reference(), schema, preserve_index=False)), schema


@pytest.mark.parametrize("kind", FILTERS)
@pytest.mark.parametrize("columns", [["id", "tags"], ["x", "country", "id"], ["tags"]])
def test_filter_and_projection_equal_pandas(
    stored: tuple[Warehouse, SnapshotRef, pa.Schema], kind: str, columns: list[str]
) -> None:
    warehouse, snapshot, schema = stored
    row_filter, keep = FILTERS[kind]
    frame = reference()
    reader = warehouse.reader(snapshot, columns, row_filter)
    parts = [reader.read(fragment) for fragment in reader.fragments()]
    expected = pa.Table.from_pandas(frame[keep(frame)], schema, preserve_index=False).select(columns)
    got = pa.concat_tables(parts) if parts else expected.slice(0, 0)
    assert got.column_names == columns
    assert got.to_pylist() == expected.to_pylist()


def test_fragments_of_some_days(warehouse: Warehouse) -> None:
    snapshot = write(warehouse, pa.table({"day": [DAY1] * 5 + [DAY2] * 6 + [DAY3] * 7, "id": range(18)}))
    reader = warehouse.reader(snapshot, ["id"])
    assert {f.day for f in reader.fragments([DAY3, DAY1])} == {DAY1, DAY3}
    assert sum(f.rows for f in reader.fragments([DAY3, DAY1])) == 12
    assert reader.fragments([datetime.date(2030, 1, 1)]) == []


@pytest.mark.parametrize("damage", ["truncated", "empty", "absent", "footer"])
def test_a_damaged_file_is_named_with_its_snapshot(warehouse: Warehouse, damage: str) -> None:
    snapshot = write(warehouse, pa.table({"day": [DAY1] * 4, "id": range(4)}))
    reader = warehouse.reader(snapshot, ["id"])
    [fragment] = reader.fragments()
    path = Path(fragment.path.removeprefix("file://"))
    whole = path.read_bytes()
    flipped = whole[:-12] + bytes(255 - byte for byte in whole[-12:])
    {
        "truncated": lambda: path.write_bytes(whole[: len(whole) // 2]),
        "empty": lambda: path.write_bytes(b""),
        "absent": path.unlink,
        "footer": lambda: path.write_bytes(flipped),
    }[damage]()
    for call in (lambda: reader.read(fragment), reader.fragments):
        with pytest.raises(CorruptFileError) as error:
            call()
        assert re.fullmatch(
            rf"file '{re.escape(fragment.path)}' of snapshot {snapshot.snapshot_id} of table 'events': "
            r"expected a whole Parquet file, got .+[^.]\. Ingest its day with force=true\.",
            str(error.value),
        )


def test_a_reader_of_fewer_columns_reads_the_same_rows(tmp_path: Path) -> None:
    warehouse = Warehouse(WarehouseConfig(row_group_rows=15), tmp_path / "home")
    snapshot = write(warehouse, pa.Table.from_pandas(reference(), preserve_index=False))
    wide = warehouse.reader(snapshot, ["day", "id", "x", "tags"], EqualTo("country", "DE"))
    fragments = wide.fragments()
    narrow = wide.narrow(["x", "id"])
    found = pa.concat_tables(narrow.read(fragment) for fragment in fragments)
    whole = pa.concat_tables(wide.read(fragment) for fragment in fragments)
    assert found.num_rows == 20
    assert found.equals(whole.select(["x", "id"]))
    assert 0 < narrow.bytes_read < wide.bytes_read


def test_a_reader_of_fewer_columns_filters_by_a_column_that_it_does_not_return(tmp_path: Path) -> None:
    warehouse = Warehouse(WarehouseConfig(row_group_rows=15), tmp_path / "home")
    snapshot = write(warehouse, pa.Table.from_pandas(reference(), preserve_index=False))
    wide = warehouse.reader(snapshot, ["id", "x", "country"], EqualTo("country", "DE"))
    found = pa.concat_tables(wide.narrow(["x"]).read(fragment) for fragment in wide.fragments())
    whole = pa.concat_tables(wide.read(fragment) for fragment in wide.fragments())
    assert found.num_rows == 20
    assert found.equals(whole.select(["x"]))
    assert wide.identify("country") == wide.narrow(["x"]).identify("country") != wide.identify("x")


@pytest.mark.parametrize(
    ("pattern", "damage"),
    [("*-m0.avro", "gone"), ("snap-*.avro", "gone"), ("*.metadata.json", "gone"), ("*.metadata.json", "cut")],
)
def test_damaged_metadata_names_the_table(tmp_path: Path, pattern: str, damage: str) -> None:
    snapshot = write(
        Warehouse(WarehouseConfig(), tmp_path / "home"), pa.Table.from_pandas(reference(), preserve_index=False)
    )
    for path in (tmp_path / "home").rglob(pattern):
        path.write_bytes(path.read_bytes()[:60])
        if damage == "gone":
            path.unlink()
    said = (
        "files as they were written, got"
        if damage == "cut"
        else "the files that its catalog and its snapshots name, got none: "
    )
    with pytest.raises(StorageError, match=rf"metadata of table 'events': expected {said}"):
        Warehouse(WarehouseConfig(), tmp_path / "home").reader(snapshot, ["id"]).fragments()
