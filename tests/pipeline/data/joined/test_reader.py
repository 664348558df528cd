"""Rows joined to feature sources, compared with pandas' merge."""

import datetime
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.csv as pc_csv
import pyarrow.parquet as pq
import pytest

from pipeline.data.joined import index, reader
from pipeline.data.joined.index import KeyIndex
from pipeline.data.joined.reader import filter_schema, joined_schema, open_reader
from pipeline.data.joined.source import pin_sources, source_identity
from pipeline.data.selection import HASH_STEPS, Selection
from pipeline.errors import ConfigError, ContractError, DataError
from pipeline.transforms.joins import FeatureJoin
from pipeline.transforms.ops.sampling import Sampling
from storage.config import WarehouseConfig
from storage.filters import check_filter
from storage.reader import SnapshotReader
from storage.warehouse import Warehouse
from tests.pipeline.data.joined.tables import read, stored

DAYS = [datetime.date(2025, 3, 1) + datetime.timedelta(days=i) for i in range(3)]


def rows_of(random: np.random.Generator, rows: int = 700) -> pa.Table:
    """Warehouse rows with some null keys."""
    day = np.sort(random.integers(0, len(DAYS), rows))
    return pa.table(
        {
            "day": pa.array([DAYS[i] for i in day], pa.date32()),
            "row": np.arange(rows),
            "user": pa.array(random.integers(0, 60, rows), mask=random.random(rows) < 0.1),
            "shop": pa.array([f"s{i}" for i in random.integers(0, 5, rows)], mask=random.random(rows) < 0.1),
            "num": random.normal(size=rows),
        }
    )


def source_rows(random: np.random.Generator, dated: bool) -> pa.Table:
    """Rows for some of the keys, with numbers, text and lists. Some values are null."""
    keys = [(d, u, f"s{s}") for d in range(len(DAYS) if dated else 1) for u in range(70) for s in range(4)]
    keys = [keys[i] for i in random.permutation(len(keys))[: len(keys) * 2 // 3]]
    n = len(keys)

    def gaps() -> Any:
        return random.random(n) < 0.2

    lists = [None if gap else random.integers(-9, 9, k).tolist() for gap, k in zip(gaps(), random.integers(0, 4, n), strict=True)]  # fmt: skip
    return pa.table(
        {
            "user": pa.array([key[1] for key in keys], pa.int32()),
            "shop": [key[2] for key in keys],
            "date": pa.array([DAYS[key[0]] for key in keys], pa.date32()),
            "score": pa.array(random.normal(size=n), pa.float32(), mask=gaps()),
            "ids": pa.array(lists, pa.list_(pa.int16())),
            "word": pa.array([f"w{i}" for i in random.integers(0, 9, n)], mask=gaps()),
        }
    )


@pytest.fixture
def warehouse(tmp_path: Path) -> Warehouse:
    return Warehouse(WarehouseConfig(row_group_rows=100, file_rows=300), tmp_path / "home")


def merged(rows: pa.Table, side: pa.Table, on: list[str]) -> pd.DataFrame:
    """Joins with pandas. Null keys match nothing."""
    frame = side.to_pandas(types_mapper=pd.ArrowDtype)
    return rows.to_pandas(types_mapper=pd.ArrowDtype).merge(frame.dropna(subset=on), on=on, how="left")


def values(column: Any) -> list[Any]:
    return [None if value is None or value is pd.NA else value.tolist() if hasattr(value, "tolist") else value for value in column]  # fmt: skip


@pytest.mark.one_in(4)
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("dated", [False, True])
def test_joined_rows_are_those_of_a_merge(seed, dated, tmp_path, warehouse, monkeypatch):
    random = np.random.default_rng(seed)
    rows, side = rows_of(random), source_rows(random, dated)
    snapshot = stored(warehouse, rows)
    cut = int(random.integers(1, side.num_rows))
    for name, part in (("a", side[:cut]), ("b", side[cut:])):
        pq.write_table(part, tmp_path / f"{name}.parquet", row_group_size=50)
    source = FeatureJoin(
        path="*.parquet", on=("user", "shop"), day_column="date" if dated else None, columns=("[isw]*",)
    )
    if seed % 2:
        monkeypatch.setattr(reader, "CACHE_BYTES", 1)  # only the newest day stays cached
    joined = pin_sources([source], tmp_path, warehouse)
    text = "num > 0 and (score > 0.1 or row < 50) and word != 'w3'"
    check_filter(text, filter_schema(warehouse, snapshot, joined, text))
    wanted = ["word", "row", "ids", "score"]
    for chosen in (None, text):
        expression = Selection(days=(), filter=chosen).expression()
        found = read(open_reader(warehouse, snapshot, wanted, expression, joined))
        expected = merged(rows, side.rename_columns({"date": "day"}), ["user", "shop", *(["day"] if dated else [])])
        if chosen:
            expected = expected.query("num > 0 and (score > 0.1 or row < 50) and word != 'w3' and word.notna()")
        assert found.column_names == wanted
        assert len(expected) > 20
        for name in wanted:
            assert found.column(name).to_pylist() == values(expected[name]), name


def test_a_table_of_the_warehouse_is_a_feature_source(warehouse):
    random = np.random.default_rng(7)
    rows, side = rows_of(random), source_rows(random, True).rename_columns({"date": "day"}).sort_by("day")
    snapshot, _ = stored(warehouse, rows), stored(warehouse, side, "beta")
    joined = pin_sources(
        [FeatureJoin(table="beta", on=("user", "shop"), day_column="day", prefix="b_")], Path(), warehouse
    )
    found = read(open_reader(warehouse, snapshot, ["row", "b_score", "b_ids"], None, joined))
    expected = merged(rows, side, ["user", "shop", "day"])
    assert found.column("b_score").to_pylist() == values(expected["score"])
    assert found.column("b_ids").to_pylist() == values(expected["ids"])
    before = source_identity(joined[0], warehouse)
    stored(warehouse, side[:5], "beta")
    assert source_identity(pin_sources([joined[0].source], Path(), warehouse)[0], warehouse) != before


@pytest.mark.parametrize("name", ["a.csv", "a.csv.gz"])
def test_csv_and_text_days(name, tmp_path, warehouse):
    snapshot = stored(warehouse, pa.table({"day": [DAYS[0], DAYS[1]], "user": [1, 1]}))
    side = pa.table({"user": [1, 1, 2], "at": ["2025-03-01 10:00:00", "2025-03-02 23:59:59", "2025-03-02 00:00:00"], "x": [0.5, None, 1.5]})  # fmt: skip
    with pa.CompressedOutputStream(str(tmp_path / name), "gzip") if name.endswith("gz") else pa.OSFile(str(tmp_path / name), "wb") as out:  # fmt: skip
        pc_csv.write_csv(side, out)
    joined = pin_sources([FeatureJoin(path=name, on="user", day_column="at")], tmp_path, warehouse)
    assert read(open_reader(warehouse, snapshot, ["x"], None, joined)).column("x").to_pylist() == [0.5, None]


def test_types_agree_with_those_that_an_ingest_stores(tmp_path, warehouse):
    snapshot = stored(warehouse, pa.table({"day": [DAYS[0]], "user": pa.array([2**64 - 1], pa.uint64()).view(pa.int64())}))  # fmt: skip
    side = pa.table(
        {
            "user": pa.array([2**64 - 1, 5], pa.uint64()),
            "small": pa.array([7, 8], pa.uint16()),
            "wide": pa.array([2**64 - 3, 0], pa.uint64()),
            "kind": pa.array(["x", "y"]).dictionary_encode(),
            "at": pa.array(
                [datetime.datetime(2025, 3, 1, 2, tzinfo=datetime.UTC)] * 2, pa.timestamp("ns", "Asia/Tokyo")
            ),
            "nothing": pa.nulls(2),
        }
    )
    pq.write_table(side, tmp_path / "s.parquet")
    joined = pin_sources([FeatureJoin(path="s.parquet", on="user")], tmp_path, warehouse)
    schema = joined_schema(warehouse, snapshot, joined)
    kinds = {"small": pa.int32(), "wide": pa.int64(), "kind": pa.large_string(), "at": pa.timestamp("us", "UTC")}
    assert {name: schema.field(name).type for name in schema.names[2:]} == kinds
    row = read(open_reader(warehouse, snapshot, list(kinds), None, joined)).to_pylist()[0]
    assert row == {"small": 7, "wide": -3, "kind": "x", "at": datetime.datetime(2025, 3, 1, 2, tzinfo=datetime.UTC)}


def test_different_keys_with_equal_hashes_do_not_match(monkeypatch):
    monkeypatch.setattr(index, "hash_keys", lambda keys: np.zeros(len(keys[0]), np.uint64))
    keyed = KeyIndex([pa.array([3, 1, None, 2])], [pa.array(["c", "a", "x", "b"])], "w")
    assert keyed.values[0].take(keyed.find([pa.array([1, 2, 3, 4, None])])).to_pylist() == ["a", "b", "c", None, None]
    with pytest.raises(DataError, match="key 1 more than once"):
        KeyIndex([pa.array([1, 2, 1])], [pa.array([1, 2, 3])], "w")


def test_without_a_wanted_column_nothing_is_opened(tmp_path, warehouse):
    snapshot = stored(warehouse, rows_of(np.random.default_rng(0)))
    pq.write_table(pa.table({"user": [1], "x": [1]}), tmp_path / "s.parquet")
    joined = pin_sources([FeatureJoin(path="s.parquet", on="user")], tmp_path, warehouse)
    (tmp_path / "s.parquet").unlink()
    assert isinstance(open_reader(warehouse, snapshot, ["num"], None, joined), SnapshotReader)


def refused(
    tmp_path: Path, warehouse: Warehouse, source: dict[str, Any], side: dict[str, Any], column: str = "x"
) -> str:
    snapshot = stored(warehouse, rows_of(np.random.default_rng(0)))
    pq.write_table(pa.table(side), tmp_path / "s.parquet")
    joined = pin_sources(
        [FeatureJoin.model_validate({"path": "s.parquet", "on": "user"} | source)], tmp_path, warehouse
    )
    with pytest.raises(ContractError) as error:
        read(open_reader(warehouse, snapshot, [column], None, joined))
    return str(error.value)


@pytest.mark.parametrize(
    ("source", "side", "said"),
    [
        ({}, {"user": [1, 2, 1], "x": [1, 2, 3]}, "features.joined 's.parquet': expected each key once, got key 1 more than once. Remove duplicate keys."),
        ({"on": ["user", "shop"]}, {"user": [1, 1], "shop": ["a", "a"], "x": [1, 2]}, "features.joined 's.parquet': expected each key once, got key 1, a more than once. Remove duplicate keys."),
        ({"day_column": "d"}, {"user": [1, 1], "d": [DAYS[1]] * 2, "x": [1, 2]}, "features.joined 's.parquet', day 2025-03-02: expected each key once, got key 1 more than once. Remove duplicate keys."),
        ({}, {"user": ["1"], "x": [1]}, "features.joined 's.parquet', key 'user': expected int64 as in the table, got large_string. Convert it."),
        ({}, {"user": [1.0], "x": [1]}, "features.joined 's.parquet', key 'user': expected integers, text or dates, got double. Convert it, or name another column."),
        ({"on": "visitor"}, {"visitor": [1], "x": [1]}, "features.joined 's.parquet', key 'visitor': expected a column of the table, got none of that name. Closest: user, shop, row, num, day. Correct the name."),
        ({}, {"guest": [1], "x": [1]}, "features.joined 's.parquet', column 'user': expected a column of the table, got none of that name. Closest: guest, x. Correct the name."),
        ({"columns": ["y"]}, {"user": [1], "x": [1]}, "features.joined 's.parquet' 'y': expected a column of the table, got none of that name. Closest: x. Correct the name."),
        ({}, {"user": [1], "num": [1], "x": [1]}, "features.joined 's.parquet': expected columns that the rows do not have, got existing columns num. Set `stored: true` if flows.enrich wrote them, otherwise set `prefix`."),
        ({}, {"user": [1], "x": [{"a": 1}]}, "features.joined 's.parquet', column 'x': expected numbers, text, dates or lists of them, got type struct<a: int64>. Leave it out of `columns`."),
        ({"day_column": "d"}, {"user": [1], "d": ["soon"], "x": [1]}, "features.joined 's.parquet', day_column: expected dates, timestamps or ISO text"),
    ],
)  # fmt: skip
def test_what_is_refused(source, side, said, tmp_path, warehouse):
    assert refused(tmp_path, warehouse, source, side).startswith(said)


def test_a_file_that_changes_while_it_is_read_is_refused(tmp_path, warehouse):
    snapshot = stored(warehouse, rows_of(np.random.default_rng(0)))
    pq.write_table(pa.table({"user": [1], "x": [1]}), tmp_path / "s.parquet")
    joined = pin_sources([FeatureJoin(path="s.parquet", on="user")], tmp_path, warehouse)
    reader = open_reader(warehouse, snapshot, ["x"], None, joined)
    os.utime(tmp_path / "s.parquet", ns=(1, 1))
    with pytest.raises(DataError, match="the file unchanged since the run started"):
        read(reader)
    assert source_identity(joined[0], warehouse) != source_identity(
        pin_sources([joined[0].source], tmp_path, warehouse)[0], warehouse
    )


def test_one_source_and_its_days():
    for values, said in (
        ({"on": "a"}, "either `path` or `table`"),
        ({"on": "a", "path": "x", "table": "y"}, "either `path` or `table`"),
        ({"on": "a", "table": "y", "day_column": "d"}, "day_column 'day'"),
    ):
        with pytest.raises(ConfigError, match=said):
            FeatureJoin.model_validate(values)


def test_a_pinned_source_travels_as_json(tmp_path, warehouse):
    pq.write_table(pa.table({"user": [1], "x": [1]}), tmp_path / "s.parquet")
    pinned = pin_sources([FeatureJoin(path="s.parquet", on="user")], tmp_path, warehouse)[0]
    assert type(pinned).model_validate(json.loads(pinned.model_dump_json())) == pinned


@pytest.mark.one_in(6)
@pytest.mark.parametrize("text", [None, "num > 0", "num > 0 and score > 0.1", "row < 0"])
@pytest.mark.parametrize("keys", [(), ("user",), ("word",)], ids=["no split", "own key", "joined key"])
@pytest.mark.parametrize("sampled", [None, "shop", "ids"])
def test_keys_choose_the_same_rows_while_and_after_a_row_group_is_read(text, keys, sampled, tmp_path, warehouse):
    random = np.random.default_rng(7)
    rows, side = rows_of(random), source_rows(random, False)
    snapshot = stored(warehouse, rows)
    pq.write_table(side, tmp_path / "a.parquet")
    joined = pin_sources([FeatureJoin(path="*.parquet", on=("user", "shop"), columns=("score", "ids", "word"))], tmp_path, warehouse)  # fmt: skip
    sampling = None if sampled is None else Sampling(inputs=(sampled,), rate=0.6, seed=6)
    selection = Selection(days=(), filter=text, hash_keys=keys, hash_range=(0, HASH_STEPS // 2), sampling=sampling)
    wanted = list(dict.fromkeys(["row", "ids", "word", *selection.key_columns()]))
    one = open_reader(warehouse, snapshot, wanted, selection.expression(), joined)
    other = open_reader(warehouse, snapshot, wanted, selection.expression(), joined)
    whole = [selection.keep(other.read(fragment), fragment) for fragment in other.fragments()]
    parts = [one.read(fragment, selection.choice(fragment)) for fragment in one.fragments()]
    assert pa.concat_tables(parts).to_pylist() == pa.concat_tables(whole).to_pylist()
    found, passed = sum(map(len, parts)), sum(other.read(fragment).num_rows for fragment in other.fragments())
    assert (0 < found < passed) == (text != "row < 0" and bool(keys or sampled))
