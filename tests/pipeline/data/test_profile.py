"""Statistics by day and column, compared with pandas and NumPy."""

import datetime
import math
from collections import Counter
from collections.abc import Collection
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from pipeline.data.measurement import measure, measure_days
from pipeline.data.profile import SCHEMA, add_drift, profiles, stability, store
from pipeline.data.sketches import BUCKETS
from storage.config import WarehouseConfig
from storage.reader import DAY
from storage.snapshot.writing import replace_days
from storage.warehouse import Warehouse

DAYS = [datetime.date(2025, 3, 1) + datetime.timedelta(days=i) for i in range(3)]
HLL = 0.1
"""Relative error that an approximate count may have."""


def make(rows: int = 3_000, seed: int = 0) -> pa.Table:
    """Columns of every kind, with nulls, NaN, infinities and empty lists, and one column that is always null."""
    draw = np.random.default_rng(seed)
    price = draw.lognormal(1.0, 1.0, rows) * np.where(draw.random(rows) < 0.2, -1.0, 1.0)
    price[:4] = [math.nan, math.inf, 0.0, 1e300]
    lists = [draw.zipf(1.5, n).clip(max=10_000).tolist() for n in draw.geometric(0.2, rows) - 1]
    return pa.table(
        {
            DAY: pa.array([DAYS[i % 3] for i in range(rows)]),
            "price": pa.array(price, mask=draw.random(rows) < 0.1),
            "small": pa.array(draw.normal(size=rows), pa.float32()),
            "count": pa.array(draw.poisson(3.0, rows), pa.int32()),
            "user": pa.array(draw.integers(-(2**63), 2**63, rows) // 8, mask=draw.random(rows) < 0.3),
            "device": pa.array([f"device {i}" for i in draw.integers(0, 5, rows)]),
            "items": pa.array([None if draw.random() < 0.1 else one for one in lists], pa.list_(pa.int64())),
            "words": pa.array([[f"w{i % 7}" for i in one] for one in lists], pa.list_(pa.string())),
            "scores": pa.array([[float(i) for i in one] for one in lists], pa.list_(pa.float64())),
            "flag": pa.array(draw.random(rows) < 0.5),
            "at": pa.array([datetime.datetime(2025, 3, 1)] * rows, pa.timestamp("us")),
            "never": pa.nulls(rows, pa.int64()),
        }
    )


def measured(table: pa.Table, numbers: Collection[str] = (), rows: int = 700) -> dict[Any, dict[str, Any]]:
    """Measures a table in batches."""
    found = measure(table.schema, table.to_batches(rows), numbers)
    return {(row[DAY], row["column"]): row for row in found.to_pylist()}


def number_bucket(x: float) -> int:
    if x == 0:
        return 0
    return 1 + math.floor(2 * math.log2(x)) % 11 if x > 0 else 12 + math.floor(math.log2(-x)) % 4


def id_bucket(i: int) -> int:
    inner = int(math.fmod(i, 1)) if i == 0 else int(math.copysign(abs(i) % 2147483647, i))
    product = inner * 1103515245
    return int(math.copysign(1, product)) * (abs(product) % 2147483647) & 15


def histogram(buckets: list[int]) -> list[int]:
    counts = Counter(buckets)
    return [counts[i] for i in range(BUCKETS)]


def test_numbers_against_numpy() -> None:
    table = make()
    found = measured(table, numbers={"count"})
    frame = table.to_pandas()
    for day in DAYS:
        rows = frame[frame[DAY] == day]
        for name in ("price", "small", "count"):
            row, values = found[day, name], rows[name].dropna().to_numpy(float)
            assert (row["kind"], row["rows"], row["present"]) == ("number", len(rows), len(values))
            finite = values[np.abs(values) < 1e150]
            expected = [finite.mean(), finite.std(), finite.min(), finite.max()]
            assert [row[key] for key in ("mean", "deviation", "minimum", "maximum")] == pytest.approx(expected)
            assert row["distinct"] == pytest.approx(len(set(values)), rel=HLL)
            assert row["histogram"] == histogram([number_bucket(x) for x in finite])
            assert row["mean_length"] is row["p99_length"] is row["max_length"] is row["drift"] is None


def test_ids_text_and_the_rest() -> None:
    table = make()
    found = measured(table)
    frame = table.select([DAY, "user", "count", "device"]).to_pylist()
    for day in DAYS:
        rows = [row for row in frame if row[DAY] == day]
        users = [row["user"] for row in rows if row["user"] is not None]
        user, device = found[day, "user"], found[day, "device"]
        assert (user["kind"], user["present"]) == ("id", len(users))
        assert user["distinct"] == pytest.approx(len(set(users)), rel=HLL)
        assert user["histogram"] == histogram([id_bucket(i) for i in users])
        assert (user["minimum"], user["maximum"]) == (float(min(users)), float(max(users)))
        assert (device["kind"], device["present"], device["distinct"]) == ("text", len(rows), 5)
        assert sum(device["histogram"]) == len(rows)
        assert device["mean"] is None
        assert [found[day, name]["kind"] for name in ("count", "flag", "at", "never")] == ["id", "id", "other", "id"]
        assert (found[day, "flag"]["distinct"], found[day, "at"]["distinct"]) == (2, 1)
        never = found[day, "never"]
        assert (never["present"], never["distinct"], never["histogram"], never["mean"]) == (0, 0, None, None)


def test_lists_against_numpy() -> None:
    table = make()
    found = measured(table)
    for day in DAYS:
        rows = [row for row in table.to_pylist() if row[DAY] == day]
        for name in ("items", "words", "scores"):
            row, lists = found[day, name], [one[name] for one in rows if one[name]]
            lengths = sorted(map(len, lists))
            assert row["kind"] == ("other" if name == "scores" else "ids")
            assert (row["rows"], row["present"], row["max_length"]) == (len(rows), len(lists), lengths[-1])
            assert row["mean_length"] == pytest.approx(np.mean(lengths))
            assert row["p99_length"] == np.quantile(lengths, 0.99, method="inverted_cdf")
            items = [item for one in lists for item in one]
            if name != "scores":
                assert row["distinct"] == pytest.approx(len(set(items)), rel=HLL)
                assert sum(row["histogram"]) == len(items)
            if name == "items":
                assert row["histogram"] == histogram([id_bucket(i) for i in items])


@pytest.mark.parametrize("rows", [1, 64, 3_000])
def test_batches_of_any_size_give_the_same(rows: int) -> None:
    table = make()
    whole = measured(table, rows=701)
    for key, row in measured(table, rows=rows).items():
        for what, value in row.items():
            assert value == (pytest.approx(whole[key][what]) if isinstance(value, float) else whole[key][what])


def test_keys_of_maps_are_measured_like_columns() -> None:
    flat = make()
    columns = {name: flat[name].to_pylist() for name in ("price", "small", "user", "items", "words", "scores")}
    columns["items"] = [None if one is None else sorted(set(one)) for one in columns["items"]]

    def as_map(keys: dict[int, str], kind: pa.DataType) -> pa.Array:
        rows = [[(key, columns[name][i]) for key, name in keys.items()] for i in range(flat.num_rows)]
        return pa.array(
            [[pair for pair in row if pair[1] is not None] or None for row in rows], pa.map_(pa.int32(), kind)
        )

    keys = {"dense_3": "price", "dense_70": "small", "ids_0": "user", "lists_5": "items", "lists_9": "items"}
    keys |= {"words_1": "words", "scores_1": "scores", "scored_2": "items"}
    scored = [[] if one is None else [(2, [(item, 0.5) for item in one])] for one in columns["items"]]
    maps = pa.table(
        {
            DAY: flat[DAY],
            "dense": as_map({3: "price", 70: "small", -1: "price"}, pa.float64()),
            "ids": as_map({0: "user"}, pa.int64()),
            "lists": as_map({5: "items", 9: "items"}, pa.list_(pa.int64())),
            "words": as_map({1: "words"}, pa.list_(pa.string())),
            "scores": as_map({1: "scores"}, pa.list_(pa.float64())),
            "scored": pa.array(scored, pa.map_(pa.int32(), pa.map_(pa.int64(), pa.float32()))),
            "named": pa.array([[("a", 1.0)]] * flat.num_rows, pa.map_(pa.string(), pa.float32())),
        }
    )
    small = pa.array(columns["small"], pa.float64())  # approximate counts depend on the type
    items = pa.array(columns["items"], pa.list_(pa.int64()))
    flat = flat.set_column(flat.column_names.index("small"), "small", small)
    expected = measured(flat.set_column(flat.column_names.index("items"), "items", items))
    found = measured(maps)
    assert {name for _, name in found} == {*keys, *maps.column_names} - {DAY}
    for day in DAYS:
        for key, name in keys.items():
            for what, value in found[day, key].items():
                same = expected[day, name][what]
                same = key if what == "column" else same
                assert value == pytest.approx(same) if isinstance(same, float) else value == same, (key, what)
        assert found[day, "dense"]["present"] == sum(one is not None for one in rows_of(maps, day, "dense"))


def test_a_column_that_is_also_a_key_is_measured_as_a_column() -> None:
    """As in a table that is being flattened: the reader puts a column together from both."""
    dense = pa.array([[(1, 5.0), (2, 5.0), (3, 5.0)], None], pa.map_(pa.int32(), pa.float32()))
    found = measured(pa.table({DAY: [DAYS[0]] * 2, "dense": dense, "dense_2": [5.0, 7.0]}))
    assert {name: row["present"] for (_, name), row in found.items()} == {
        "dense": 1, "dense_1": 1, "dense_2": 2, "dense_3": 1,
    }  # fmt: skip
    assert found[DAYS[0], "dense_2"]["mean"] == 6.0


def rows_of(table: pa.Table, day: datetime.date, name: str) -> list[Any]:
    return [row[name] for row in table.to_pylist() if row[DAY] == day]


def test_every_type_that_arrow_knows_is_counted() -> None:
    """Sliced, with nulls between: ten values of each, of which five are distinct."""
    moment, draw = datetime.datetime(2025, 3, 1), np.random.default_rng(1)
    days = [moment + datetime.timedelta(days=i) for i in range(5)]
    values: dict[str, tuple[list[Any], pa.DataType]] = {
        "date": (days, pa.date32()), "at": (days, pa.timestamp("ns", "UTC")), "dates": (days, pa.date64()),
        "time": ([datetime.time(i) for i in range(5)], pa.time32("s")), "clock": ([datetime.time(i) for i in range(5)], pa.time64("us")),
        "span": ([datetime.timedelta(i) for i in range(5)], pa.duration("us")), "bytes": ([b"a", b"", b"c", b"dd", b"e"], pa.binary()),
        "id": ([draw.bytes(16) for _ in range(5)], pa.uuid()), "fixed": ([draw.bytes(3) for _ in range(5)], pa.binary(3)),
        "price": ([Decimal(i) / 8 for i in range(5)], pa.decimal128(30, 20)), "big": ([2**63 + i for i in range(5)], pa.uint64()),
        "half": ([0.5 * i for i in range(5)], pa.float16()), "word": ([*"abcd", ""], pa.dictionary(pa.int8(), pa.string())),
        "long": (["ü" * i for i in range(5)], pa.large_string()), "tiny": ([*range(5)], pa.uint8()),
        "struct": ([{"a": i} for i in range(5)], pa.struct({"a": pa.int8()})), "pairs": ([[i, i] for i in range(5)], pa.list_(pa.int8(), 2)),
        "lists": ([[[i]] for i in range(5)], pa.list_(pa.list_(pa.int64()))), "maps": ([[("a", i)] for i in range(5)], pa.map_(pa.string(), pa.int8())),
        "interval": ([pa.scalar((1, i, 0), pa.month_day_nano_interval()) for i in range(5)], pa.month_day_nano_interval()),
    }  # fmt: skip
    columns = {name: pa.array([None, *some, None, *some, None], kind).slice(1) for name, (some, kind) in values.items()}
    found = measured(pa.table({DAY: DAYS[:1] * 12, "nothing": pa.nulls(12), **columns}), rows=5)
    assert found.pop((DAYS[0], "nothing"))["present"] == 0
    assert {name: row["present"] for (_, name), row in found.items()} == dict.fromkeys(values, 10)
    nested = {"struct", "pairs", "lists", "maps", "interval"}
    assert {name: row["distinct"] for (_, name), row in found.items() if name not in nested} == dict.fromkeys(
        values.keys() - nested, 5
    )


def test_lists_that_are_all_empty() -> None:
    table = pa.table({DAY: [DAYS[0]] * 2, "items": pa.array([[], None], pa.list_(pa.int64()))})
    row = measured(table)[DAYS[0], "items"]
    assert (row["present"], row["distinct"], row["mean_length"], row["histogram"]) == (0, 0, None, None)


def test_stored_days_are_measured_like_the_source(tmp_path: Path) -> None:
    table = make()
    warehouse = Warehouse(WarehouseConfig(row_group_rows=500, file_rows=700), tmp_path / "home")
    snapshot = replace_days(warehouse, "t", dict.fromkeys(DAYS, "x"), table.schema, table.to_batches(300), 3_000)
    source = measured(table, numbers={"count"})
    again = measure_days(warehouse, snapshot, DAYS[1:], {"count"})
    assert set(again[DAY].to_pylist()) == set(DAYS[1:])
    for row in again.to_pylist():
        expected = source[row[DAY], row["column"]]
        for key, value in row.items():  # sums of floats depend on the order
            assert value == pytest.approx(expected[key]) if isinstance(value, float) else value == expected[key], row


def test_profiles_are_replaced_with_their_day(tmp_path: Path) -> None:
    warehouse = Warehouse(WarehouseConfig(), tmp_path / "home")
    assert profiles(warehouse, "t").equals(SCHEMA.empty_table())
    table = make()
    first = add_drift(measure(table.schema, table.to_batches()), profiles(warehouse, "t"))
    store(warehouse, "t", first, dict.fromkeys(DAYS, "one"))
    assert profiles(warehouse, "t").equals(first)
    assert profiles(warehouse, "t", DAYS[1:2]).num_rows == 11
    assert profiles(warehouse, "t", []).num_rows == 0
    other = make(seed=1)
    other = other.filter(pa.compute.equal(other[DAY], pa.scalar(DAYS[2])))
    second = add_drift(measure(other.schema, other.to_batches()), first)
    store(warehouse, "t", second, {DAYS[2]: "two"})
    assert profiles(warehouse, "t", DAYS[2:]).equals(second)
    assert profiles(warehouse, "t", DAYS[:2]).equals(first.slice(0, 22))
    store(warehouse, "t", second.slice(0, 0), {DAYS[2]: "three"})
    assert profiles(warehouse, "t").equals(first.slice(0, 22))


def test_drift_is_measured_against_the_trailing_days() -> None:
    table = make()
    measures = measure(table.schema, table.to_batches())
    drifted = {(row[DAY], row["column"]): row for row in add_drift(measures, measures.slice(0, 0)).to_pylist()}
    one, two, three = (drifted[day, "price"] for day in DAYS)
    assert one["drift"] is None
    assert two["drift"] == pytest.approx(index(two["histogram"], one["histogram"]))
    both = [a + b for a, b in zip(one["histogram"], two["histogram"], strict=True)]
    assert three["drift"] == pytest.approx(index(three["histogram"], both))
    last = add_drift(measures, measures.slice(0, 0), trailing_days=1).to_pylist()
    last_price = next(row for row in last if (row[DAY], row["column"]) == (DAYS[2], "price"))
    assert last_price["drift"] == pytest.approx(index(three["histogram"], two["histogram"]))
    # days measured together and one by one
    days = [measures.filter(pa.compute.equal(measures[DAY], pa.scalar(day))) for day in DAYS]
    alone = add_drift(days[2], pa.concat_tables(days[:2]))
    assert alone["drift"].to_pylist() == [drifted[DAYS[2], name]["drift"] for name in alone["column"].to_pylist()]


def index(new: list[int], old: list[int]) -> float:
    """Population stability index by its definition, with half a value added to each bucket."""
    p, q = ([(count + 0.5) / (sum(counts) + 8) for count in counts] for counts in (new, old))
    return sum((a - b) * math.log(a / b) for a, b in zip(p, q, strict=True))


def test_stability_grows_with_the_shift() -> None:
    draw = np.random.default_rng(3)
    base = histogram([number_bucket(x) for x in draw.lognormal(0.0, 1.0, 20_000)])
    shifts = [histogram([number_bucket(x * s) for x in draw.lognormal(0.0, 1.0, 20_000)]) for s in (1, 1.3, 2, 3)]
    found = stability(np.array(shifts), np.array([base] * 4)).tolist()
    assert found == sorted(found)
    assert found[0] < 0.01 < 0.1 < found[2]
    assert found == pytest.approx([index(shift, base) for shift in shifts])
    empty = [0] * len(base)
    assert np.isnan(stability(np.array([empty, base, empty]), np.array([base, empty, empty]))).all()
