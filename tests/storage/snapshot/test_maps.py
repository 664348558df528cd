"""Keys of maps are columns: read as a per-row lookup reads them, from any mixture of files."""

import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.errors import ConfigError
from storage.config import WarehouseConfig
from storage.errors import ConflictError, StorageError
from storage.filters import check_filter, parse_filter
from storage.keys import expand_keys
from storage.layout.flatten import add_columns, count_keys, drop_maps, refuse_new_keys
from storage.snapshot.maps import MapEntries
from storage.warehouse import Warehouse
from tests.homes import read_rows, write_days

DAY1 = datetime.date(2024, 1, 1)
KEYS = st.integers(0, 6)
VALUES: dict[str, tuple[pa.DataType, Any]] = {
    "number": (pa.float32(), st.none() | st.integers(-9, 9).map(float)),
    "list": (pa.large_list(pa.int64()), st.none() | st.lists(st.none() | st.integers(-(2**60), 2**60), max_size=3)),
    "scored": (
        pa.map_(pa.int64(), pa.float32()),
        st.dictionaries(st.integers(0, 99), st.integers(0, 9).map(float), max_size=3),
    ),
}


@pytest.mark.parametrize("kind", VALUES)
@given(data=st.data())
def test_a_key_is_read_as_by_a_lookup_in_each_row(kind: str, data: st.DataObject) -> None:
    made, values = VALUES[kind]
    rows = data.draw(st.lists(st.none() | st.dictionaries(KEYS, values, max_size=4), max_size=12))
    first = data.draw(st.integers(0, len(rows)))
    table = pa.array([None if row is None else list(row.items()) for row in rows], pa.map_(pa.int32(), made))
    index = MapEntries(table.slice(first))
    for key in range(8):
        found = [None if row is None else row.get(key) for row in rows[first:]]
        if kind != "scored":
            assert index.column(key, False).to_pylist() == found
            continue
        assert index.column(key, False).to_pylist() == [None if one is None else list(one) for one in found]
        assert index.column(key, True).to_pylist() == [None if one is None else list(one.values()) for one in found]


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("ids[42]", ["ids_42"]),
        ("ids[8..10]", ["ids_8", "ids_9", "ids_10"]),
        ("ids[3, 5..6]", ["ids_3", "ids_5", "ids_6"]),
        ("flat[7]", ["flat_7"]),
        ("int_[12]", ["int_[12]"]),
        ("ids_*", ["ids_*"]),
    ],
)
def test_spellings_of_keys(pattern: str, names: list[str]) -> None:
    assert expand_keys(pattern, ["flat_7", "int_1"], ["ids"]) == names


@pytest.mark.parametrize("pattern", ["ids[5..3]", "ids[0..10000]"])
def test_spellings_that_are_refused(pattern: str) -> None:
    with pytest.raises(StorageError, match="expected 1 to 10000 ascending keys"):
        expand_keys(pattern, [], ["ids"])


@pytest.fixture
def warehouse(tmp_path: Path) -> Warehouse:
    return Warehouse(WarehouseConfig(row_group_rows=7, file_rows=20), tmp_path)


def rows_of_maps(count: int = 50) -> list[dict[str, Any]]:
    random = np.random.default_rng(5)
    return [
        {
            "day": DAY1,
            "id": i,
            "dense": {int(key): float(key * i) for key in random.choice(9, random.integers(0, 5), replace=False)},
            "ids": {int(key): list(range(i, i + int(key) % 4)) for key in random.choice(9, 3, replace=False)},
            "scored": {int(key): {i: 0.5, i + 1: 2.0} for key in random.choice(9, 2, replace=False)},
        }
        for i in range(count)
    ]


SCHEMA = pa.schema(
    {
        "day": pa.date32(), "id": pa.int64(), "dense": pa.map_(pa.int32(), pa.float32()),
        "ids": pa.map_(pa.int32(), pa.list_(pa.int64())),
        "scored": pa.map_(pa.int32(), pa.map_(pa.int64(), pa.float32())),
    }
)  # fmt: skip


def write(warehouse: Warehouse) -> list[dict[str, Any]]:
    rows = rows_of_maps()
    shaped = [
        {name: list(value.items()) if isinstance(value, dict) else value for name, value in row.items()} for row in rows
    ]
    for row in shaped:
        row["scored"] = [(key, list(value.items())) for key, value in row["scored"]]
    table = pa.Table.from_pylist(shaped, SCHEMA)
    write_days(warehouse, table, name="t")
    return rows


def test_keys_are_columns_of_the_table(warehouse: Warehouse) -> None:
    rows = write(warehouse)
    now = warehouse.current("t")
    wanted = ["dense[0..8]", "ids_3", "scored_4", "scored_4_scores", "nothing_3", "id"]
    names = [name for name in warehouse.schema(now, wanted).names if name not in SCHEMA.names]
    assert names == [*(f"dense_{key}" for key in range(9)), "ids_3", "scored_4", "scored_4_scores"]
    reader = warehouse.reader(now, [*names, "id"])
    found = [row for part in reader.fragments() for row in reader.read(part).to_pylist()]
    assert found == [
        {f"dense_{key}": row["dense"].get(key) for key in range(9)}
        | {"ids_3": row["ids"].get(3)}
        | {"scored_4": list(row["scored"][4]) if 4 in row["scored"] else None}
        | {"scored_4_scores": list(row["scored"][4].values()) if 4 in row["scored"] else None}
        | {"id": row["id"]}
        for row in rows
    ]


def test_a_name_that_is_no_key_of_a_map_is_refused(warehouse: Warehouse) -> None:
    write(warehouse)
    for name in ("dense_x", "dense_3_scores", "id_3", "other_3"):
        with pytest.raises(StorageError, match=f"column '{name}': expected a column of table 't'"):
            warehouse.reader(warehouse.current("t"), [name])


def test_a_null_beside_the_map_is_taken_from_the_map(warehouse: Warehouse) -> None:
    """Another engine that writes all columns stores nulls for keys that are columns, too."""
    rows = write(warehouse)
    add_columns(warehouse, "t", ["dense_1", "ids_3", "scored_4"])
    table = warehouse.table("t")
    now = warehouse.current("t")
    everything = pa.concat_tables(
        [one.read(part) for one in [warehouse.reader(now, list(SCHEMA.names))] for part in one.fragments()]
    )
    table.append(everything)  # pyiceberg writes null for the three columns
    reader = warehouse.reader(warehouse.current("t"), ["dense_1", "ids_3", "scored_4"])
    found = [row for part in reader.fragments() for row in reader.read(part).to_pylist()]
    expected = [
        {
            "dense_1": row["dense"].get(1),
            "ids_3": row["ids"].get(3),
            "scored_4": None if 4 not in row["scored"] else list(row["scored"][4]),
        }
        for row in rows
    ]
    assert found == expected * 2


def test_keys_that_another_writer_adds_meanwhile_stay(warehouse: Warehouse) -> None:
    write(warehouse)
    counts = count_keys(warehouse, warehouse.current("t"))
    assert list(counts.values()) == sorted(counts.values(), reverse=True)
    add_columns(warehouse, "t", counts)
    refuse_new_keys(warehouse, warehouse.current("t"), DAY1, counts)
    new = pa.Table.from_pylist([{"day": DAY1, "id": 99, "dense": [(77, 1.0)], "ids": [], "scored": []}], SCHEMA)
    warehouse.table("t").append(new)
    with pytest.raises(ConflictError, match="expected the keys that were counted, got dense_77, too"):
        refuse_new_keys(warehouse, warehouse.current("t"), DAY1, counts)
    with pytest.raises(ConflictError, match="expected no other writer meanwhile"):
        drop_maps(warehouse, "t")
    assert {"dense", "ids", "scored"} < set(warehouse.table("t").schema().column_names)


def test_a_map_of_something_else_is_not_flattened(warehouse: Warehouse) -> None:
    schema = pa.schema({"day": pa.date32(), "words": pa.map_(pa.string(), pa.string())})
    table = pa.Table.from_pylist([{"day": DAY1, "words": [("a", "b")]}], schema)
    write_days(warehouse, table, name="t")
    with pytest.raises(StorageError, match="map 'words' of table 't': expected whole numbers as keys"):
        count_keys(warehouse, warehouse.current("t"))


def test_a_filter_compares_keys_of_maps(tmp_path: Path) -> None:
    random = np.random.default_rng(4)
    rows: list[dict[str, Any]] = [
        {
            "day": DAY1,
            "id": i,
            "dense": [(key, float(random.integers(-5, 6))) for key in range(3) if random.random() < 0.6],
        }
        for i in range(400)
    ]
    kinds = {"day": pa.date32(), "id": pa.int64(), "dense": pa.map_(pa.int32(), pa.float32())}
    table = pa.Table.from_pylist(rows, pa.schema(kinds))
    warehouse = Warehouse(WarehouseConfig(row_group_rows=100), tmp_path)
    snapshot = write_days(warehouse, table, name="t")
    text = "(dense_1 > 1 or dense_2 not in (0, 1)) and not (dense_0 <= -3) and id < 390"
    check_filter(text, warehouse.filter_schema(snapshot, ["dense_0", "dense_1", "dense_2"]))
    found = read_rows(warehouse, snapshot, ["id", "dense_1"], parse_filter(text))

    def keeps(values: dict[int, float], number: int) -> bool:
        some = values.get(1, 0) > 1 or (2 in values and values[2] not in (0, 1))
        return some and 0 in values and values[0] > -3 and number < 390

    expected = [(row["id"], dict(row["dense"]).get(1)) for row in rows if keeps(dict(row["dense"]), row["id"])]
    assert 20 < len(expected) < 200
    assert list(zip(found["id"].to_pylist(), found["dense_1"].to_pylist(), strict=True)) == expected
    with pytest.raises(ConfigError, match="expected columns of the table, got 'dense_x'"):
        check_filter("dense_x > 1", warehouse.filter_schema(snapshot, ["dense_x"]))


def test_a_file_whose_column_is_null_beside_the_map_is_not_left_out(tmp_path: Path) -> None:
    """Another engine that rewrites a file stores nulls beside the map, with statistics that say so."""
    warehouse = Warehouse(WarehouseConfig(), tmp_path)
    kinds = {"day": pa.date32(), "id": pa.int64(), "dense": pa.map_(pa.int32(), pa.float32())}
    rows = pa.Table.from_pylist([{"day": DAY1, "id": 1, "dense": [(0, 2.0)]}], pa.schema(kinds))
    write_days(warehouse, rows, name="t")
    add_columns(warehouse, "t", ["dense_0"])
    warehouse.set_properties("t", {"write.metadata.metrics.default": "full"})
    theirs = [{"day": DAY1, "id": 2, "dense": [(0, 3.0)], "dense_0": None}]
    warehouse.table("t").append(pa.Table.from_pylist(theirs, warehouse.table("t").schema().as_arrow()))
    kept = [one.file.null_value_counts or {} for one in warehouse.table("t").scan().plan_files()]
    assert any(1 in counts.values() for counts in kept)
    reader = warehouse.reader(warehouse.current("t"), ["id"], parse_filter("dense_0 > 0.5"))
    found = [number for fragment in reader.fragments() for number in reader.read(fragment)["id"].to_pylist()]
    assert sorted(found) == [1, 2]
