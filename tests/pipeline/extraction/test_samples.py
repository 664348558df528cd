"""Columns, types and labels: how rows are stored, and what is refused before anything is written."""

import datetime
import decimal
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

from pipeline.errors import ConfigError, ContractError, DataError
from pipeline.extraction.config import SourceConfig, names_in
from pipeline.extraction.opening import SourceContext
from pipeline.transforms.schema import FeatureSchema
from storage.warehouse import Warehouse
from tests.homes import read_rows

DAY1, DAY2 = (datetime.date(2024, 1, day) for day in (1, 2))
FIXED = {"path": "rows.parquet", "day": "2024-01-01"}
BY_DAY = {"path": "*.parquet", "day_column": "date"}


def at(*texts: str, zone: str | None = None) -> pa.Array:
    return pa.array([pd.Timestamp(text, tz=zone) for text in texts])


def test_bad_numbers_as_labels(ingest: Any, stored: Any, put: Any) -> None:
    put("rows.parquet", user=list(range(8)), label=[0.0, 1.0, float("nan"), float("inf"), 1e300, 0.5, None, -0.0])
    result = ingest(FIXED, max_quarantined_share=0.9)
    assert dict(result.quarantined) == {"label is not 0 or 1": 3, "label is null": 2}
    assert stored()["user"].tolist() == [0, 1, 7]
    assert stored()["label"].tolist() == [0, 1, 0]


@pytest.mark.parametrize("positive", [None, 1])
def test_rows_without_a_label_are_left_out_if_the_config_says_so(
    positive: Any, ingest: Any, stored: Any, put: Any
) -> None:
    """Nine in ten have none. They are no bad rows, and a day of them alone is not written."""
    nothing = [None, float("nan")] * 9
    put("a.parquet", user=list(range(20)), label=pa.array([0.0, 1.0, *nothing]), date=[DAY1] * 20)
    put("b.parquet", user=list(range(18)), label=pa.array(nothing), date=[DAY2] * 18)
    given = BY_DAY | ({} if positive is None else {"positive": positive})
    with pytest.raises(DataError, match=r"at most 1\.00% bad rows"):
        ingest(given)
    result = ingest(given | {"unlabelled": "skip"})
    assert (dict(result.quarantined), result.days_written) == ({}, (DAY1,))
    day = result.by_day[DAY1]
    assert (day.rows, day.written, day.quarantined, day.left_out) == (20, 2, 0, 18)
    assert stored()["label"].tolist() == [0, 1]
    assert ingest(given | {"unlabelled": "skip"}).days_written == ()


LABELS: dict[str, tuple[Any, list[Any], list[int]]] = {
    "words": ("yes", ["no", "yes", "yes", None, "maybe"], [0, 1, 1, 0]),
    "true in text": (True, ["False", "true", "True", None, "F"], [0, 1, 1, 0]),
    "false": (False, [True, False, False, None, True], [0, 1, 1, 0]),
    "minus one": (1, [-1, 1, 1, None, -1], [0, 1, 1, 0]),
    "fractions": (1, [2.0, 1.0, 1.0, None, 2.0], [0, 1, 1, 0]),
    "a quote": (">50'K", ["<=50", ">50'K", ">50'K", None, ""], [0, 1, 1, 0]),
}


@pytest.mark.parametrize("case", LABELS)
def test_one_value_of_the_label_may_count_as_1(case: str, ingest: Any, stored: Any, put: Any) -> None:
    positive, values, expected = LABELS[case]
    put("rows.parquet", user=list(range(5)), label=pa.array(values))
    result = ingest(FIXED | {"positive": positive}, max_quarantined_share=0.9)
    assert dict(result.quarantined) == {"label is null": 1}
    assert stored()["label"].tolist() == expected


UNITS = {"seconds": 1, "milliseconds": 1_000, "microseconds": 1_000_000}


@pytest.mark.parametrize("unit", UNITS)
def test_numbers_may_give_the_day_if_their_unit_is_named(unit: str, ingest: Any, stored: Any, put: Any) -> None:
    moments = [int(pd.Timestamp(text).timestamp() * UNITS[unit]) for text in ("2024-01-01 23:59:59", "2024-01-02")]
    put("rows.parquet", user=[1, 2], label=[0, 1], at=moments)
    with pytest.raises(DataError) as error:
        ingest({"path": "rows.parquet", "day_column": "at"})
    assert str(error.value) == (
        f"source.day_column 'at': expected a date in every row, got no date in 2 rows, such as '{moments[0]}' in "
        f"'rows.parquet'. "
        f"If they are times since 1970, set source.day_unit={unit}; else write ISO dates."
    )
    ingest({"path": "rows.parquet", "day_column": "at", "day_unit": unit})
    assert stored()["day"].tolist() == [DAY1, DAY2]


def test_missing_columns_are_named_with_the_closest(ingest: Any, put: Any) -> None:
    put("rows.parquet", user=[1], price=[1.0], lable=[0])
    closest = "expected a column of the table, got none of that name. Closest: {}. Correct the name."
    with pytest.raises(ConfigError) as error:
        ingest(FIXED)
    assert str(error.value) == f"features.label 'label': {closest.format('lable')}"
    put("rows.parquet", user=[1], price=[1.0], label=[0])
    for given, sentence in {
        ("dense", "prise"): f"features.dense column 'prise': {closest.format('price')}",
        ("sparse", "usr"): f"features.sparse column 'usr': {closest.format('user')}",
        ("sparse", "cat_*"): f"features.sparse column 'cat_*': {closest.format('price, label, user')}",
    }.items():
        with pytest.raises(ConfigError) as error:
            ingest(FIXED, **{given[0]: [given[1]]})
        assert str(error.value) == sentence
    with pytest.raises(ConfigError) as error:
        ingest({"path": "rows.parquet", "day_column": "dat"})
    assert str(error.value) == f"source.day_column 'dat': {closest.format('label, user, price')}"


def test_text_in_a_dense_column(ingest: Any, stored: Any, put: Any) -> None:
    put("rows.parquet", user=[1, 2, 3], label=[0, 1, 0], price=["1.5", "cheap", None])
    with pytest.raises(DataError) as error:
        ingest(FIXED, dense=["price"])
    assert str(error.value) == (
        "dense column 'price': expected numbers, got text such as 'cheap' in 1 rows. "
        "Clean the column, or declare it under features.sparse."
    )
    put("rows.parquet", user=[1, 2, 3], label=[0, 1, 0], price=["1.5", "-2e3", None])
    ingest(FIXED, dense=["price"])
    assert stored()["price"].dtype == np.float64
    assert stored()["price"].tolist()[:2] == [1.5, -2000.0]
    assert pd.isna(stored()["price"][2])


def test_columns_of_derived_ones_are_known(ingest: Any, stored: Any, put: Any) -> None:
    score = {"kind": "compute_score", "function": "sum", "inputs": ["weights"], "output": "weight"}
    hour = {"kind": "get_local_hour", "inputs": ["seconds"], "output": "hour"}
    weights = pa.array([[0.5, None], None, []], pa.list_(pa.float32()))
    put("rows.parquet", user=[1, 2, 3], label=[0, 1, 0], seconds=["60", "3600.5", None], weights=weights)
    with pytest.raises(ConfigError) as error:
        ingest(FIXED, derived=[{**hour, "inputs": ["second"]}])
    assert str(error.value) == (
        "get_local_hour of 'hour', input 'second': expected a column of the table, got none of that name. "
        "Closest: seconds. Correct the name."
    )
    ingest(FIXED, derived=[score, hour], dense=["weight"], sparse=["user", "hour"])
    assert stored()["seconds"].tolist()[:2] == [60.0, 3600.5]  # text that is read as numbers is stored as such
    assert [None if row is None else str(list(map(float, row))) for row in stored()["weights"]] == [
        "[0.5, nan]",
        None,
        "[]",
    ]
    assert set(stored().columns) == {"user", "seconds", "weights", "day", "label"}


def test_unsigned_ids_keep_their_bits(ingest: Any, stored: Any, put: Any) -> None:
    values = np.array([0, 1, 2**63 - 1, 2**63, 2**64 - 1, 12_345_678_901_234_567_890], np.uint64)
    lists = pa.array([[int(v), 7] for v in values[:4]] + [[], None], pa.list_(pa.uint64()))
    put("rows.parquet", user=pa.array(values), tags=lists, label=[0, 1] * 3)
    ingest(FIXED, sparse=["user", "tags"])
    frame = stored()
    assert frame["user"].tolist() == values.view(np.int64).tolist()
    expected: list[list[int] | None] = [*([int(v), 7] for v in values[:4].view(np.int64)), [], None]
    assert [None if tags is None else list(tags) for tags in frame["tags"]] == expected


KINDS: dict[str, tuple[pa.Array, pa.DataType, list[Any]]] = {
    "bool": (pa.array([True, None]), pa.bool_(), [True, None]),
    "int8": (pa.array([-3, 5], pa.int8()), pa.int32(), [-3, 5]),
    "int16": (pa.array([-300, 5], pa.int16()), pa.int32(), [-300, 5]),
    "uint8": (pa.array([255, 0], pa.uint8()), pa.int32(), [255, 0]),
    "uint16": (pa.array([65_535, 0], pa.uint16()), pa.int32(), [65_535, 0]),
    "uint32": (pa.array([2**32 - 1, 0], pa.uint32()), pa.int64(), [2**32 - 1, 0]),
    "int64": (pa.array([2**63 - 1, -(2**63)]), pa.int64(), [2**63 - 1, -(2**63)]),
    "float": (pa.array([0.5, None], pa.float32()), pa.float32(), [0.5, None]),
    "decimal": (pa.array([decimal.Decimal("12.25"), None], pa.decimal128(18, 2)), pa.float64(), [12.25, None]),
    "ids of a database": (
        pa.array([decimal.Decimal(2**63 - 1), None], pa.decimal128(38, 0)),
        pa.int64(),
        [2**63 - 1, None],
    ),
    "list of ids": (
        pa.array([[decimal.Decimal(2**53 + 1)], None], pa.list_(pa.decimal128(20, 0))),
        pa.large_list(pa.int64()),
        [[2**53 + 1], None],
    ),
    "timestamp": (
        at("2024-01-01 01:02:03.000004", "2024-01-02").cast(pa.timestamp("us")),
        pa.timestamp("us"),
        [datetime.datetime(2024, 1, 1, 1, 2, 3, 4), datetime.datetime(2024, 1, 2)],
    ),
    "zoned": (
        at("2024-01-01 09:00", "2024-01-02 00:00", zone="Asia/Tokyo").cast(pa.timestamp("us", "Asia/Tokyo")),
        pa.timestamp("us", "UTC"),
        [datetime.datetime(2024, 1, day, hour, tzinfo=datetime.timezone.utc) for day, hour in ((1, 0), (1, 15))],  # noqa: UP017
    ),
    "date": (pa.array([DAY1, None]), pa.date32(), [DAY1, None]),
    "time": (pa.array([datetime.time(1, 2, 3), None]), pa.large_string(), ["01:02:03", None]),
    "text": (pa.array(["ä\n", ""]), pa.large_string(), ["ä\n", ""]),
    "dictionary": (pa.array(["a", "b"]).dictionary_encode(), pa.large_string(), ["a", "b"]),
    "list of int8": (pa.array([[1, None], []], pa.list_(pa.int8())), pa.large_list(pa.int32()), [[1, None], []]),
    "list of decimal": (
        pa.array([[decimal.Decimal("1.5")], None], pa.list_(pa.decimal128(9, 1))),
        pa.large_list(pa.float64()),
        [[1.5], None],
    ),
    "list of text": (pa.array([["a"], None]), pa.large_list(pa.large_string()), [["a"], None]),
}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("kind", KINDS)
def test_kinds_are_stored_in_iceberg_types(ingest: Any, put: Any, warehouse: Warehouse, kind: str) -> None:
    values, expected_type, expected = KINDS[kind]
    put("rows.parquet", user=[1, 2], label=[0, 1], x=values)
    snapshot = ingest(FIXED).snapshot
    column = read_rows(warehouse, snapshot, ["x"])["x"]
    plain = {"large_string": "string", "large_list<element: ": "list<element: "}
    names = [str(column.type), str(expected_type).replace("item:", "element:")]
    for wide, narrow in plain.items():
        names = [name.replace(wide, narrow) for name in names]
    assert names[0].replace(" not null", "") == names[1]
    assert column.to_pylist() == expected


def test_nulls_without_a_type_wait_for_one(ingest: Any, stored: Any, put: Any) -> None:
    put("1.parquet", user=[1], label=[0], date=[DAY1], word=pa.nulls(1), price=pa.nulls(1))
    ingest(BY_DAY, dense=["price"])
    assert list(stored().columns) == ["user", "date", "price", "day", "label"]
    put("2.parquet", user=[2], label=[1], date=[DAY2], word=["a"], price=[0.5])
    ingest(BY_DAY, dense=["price"])
    assert stored()["word"].isna().tolist() == [True, False]
    assert stored()["price"].isna().tolist() == [True, False]


def test_a_column_may_have_another_type_on_a_later_day_if_no_value_changes(
    ingest: Any, put: Any, warehouse: Warehouse
) -> None:
    """Else the day is refused, and what the error advises works."""
    pairs: dict[str, tuple[Any, Any]] = {
        "wider": (pa.array([1, 2], pa.int32()), pa.array([2**60, 3], pa.int64())),
        "narrower": (pa.array([2**60, 2]), pa.array([3, 4], pa.int8())),
        "whole": ([1, 2], [3.0, None]),
        "double": (pa.array([1.5, 2.5], pa.float32()), [0.1, 2.0]),
        "fractions": ([0.5, 1.5], [7, 2**40]),
        "text": (["a", "b"], [1, 2**60]),
        "text_of_floats": (["1", "b"], [5.0, None]),
        "lists": ([[1], []], pa.array([[2**60], [5]], pa.list_(pa.int64()))),
        "price": ([1, 2], [3, 4]),
        "id": ([1, 2], [3, 4]),
    }

    def write(day: int, names: dict[str, Any], source: dict[str, Any], **config: Any) -> None:
        put(f"{day}.parquet", user=[1, 2], label=[0, 1], date=[f"2024-01-0{day}"] * 2, **names)
        ingest(BY_DAY | source, **config)

    for day in (1, 2):
        write(day, {name: pair[day - 1] for name, pair in pairs.items()}, {}, dense=["price"])
    found = read_rows(warehouse, "events", [*pairs]).to_pydict()
    wanted = {name: [*pa.array(one).to_pylist(), *pa.array(two).to_pylist()] for name, (one, two) in pairs.items()}
    assert found == wanted | {"text": ["a", "b", "1", f"{2**60}"], "text_of_floats": ["1", "b", "5", None]}
    for name, values, got in (
        ("price", [1.5, 2.0], "'1.5'"),
        ("id", ["a", "b"], "'a'"),
        ("whole", [1.5, 2.0], "'1.5'"),
    ):
        own, group = {"path": "3.parquet"}, "dense" if name == "price" else "sparse"
        with pytest.raises(ContractError, match=f"got .*{got}.*A table's column keeps its type.*begin a new") as error:
            write(3, {name: values}, own, **{group: [name]})
        rename = re.search(r"rename=(\{.*?\})", str(error.value))
        assert rename is not None
        new = json.loads(rename[1])
        write(3, {name: values}, own | {"rename": new}, **{group: [new[name]]}, force=True)
        assert read_rows(warehouse, "events", [new[name]]).to_pydict()[new[name]] == [None] * 4 + values


def test_a_day_of_empty_lists_waits_for_their_type(ingest: Any, stored: Any, put: Any) -> None:
    put("1.parquet", user=[1, 2], label=[0, 1], date=[DAY1, DAY1], items=pa.array([[], None], pa.list_(pa.null())))
    ingest({**BY_DAY, "path": "1.parquet"})
    assert list(stored().columns) == ["user", "date", "day", "label"]
    put("2.parquet", user=[3], label=[1], date=[DAY2], items=[[7, 8]])
    ingest(BY_DAY)
    assert [None if one is None else list(one) for one in stored()["items"]][2:] == [[7, 8]]


@pytest.mark.parametrize("scale", [0, 4])
def test_ids_of_a_database_are_never_rounded(ingest: Any, stored: Any, put: Any, scale: int) -> None:
    """Whole decimals are ids: numbers of 64 bits, or text beyond. A number that a feature reads may be rounded."""
    kind = pa.decimal128(38, scale)
    short, long = ([decimal.Decimal(one) for one in ids] for ids in ([2**60 + 1, 2**60], [2**63, 2**63 + 1]))
    ids = {"short": pa.array(short, kind), "long": pa.array(long, kind), "size": pa.array(long, kind)}
    put("rows.parquet", user=[1, 2], label=[0, 1], **ids)
    ingest(FIXED, dense=["size"])
    assert stored()["short"].tolist() == [2**60 + 1, 2**60]
    assert [int(decimal.Decimal(one)) for one in stored()["long"]] == [2**63, 2**63 + 1]
    assert stored()["size"].tolist() == [2.0**63, 2.0**63]


def test_whole_numbers_in_text_keep_64_bits_as_ids(ingest: Any, stored: Any, tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text(f"user,label,ad\n1,0,{2**64 - 1}\n2,1,{2**63}\n3,1,7\n")
    ingest({"path": "rows.csv", "day": "2024-01-01"})
    assert stored()["ad"].tolist() == [-1, -(2**63), 7]


def test_whole_numbers_in_text_are_rounded_if_they_are_dense(ingest: Any, stored: Any, tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text(f"user,label,size\n1,0,{2**64 - 1}\n2,1,-3\n")
    ingest({"path": "rows.csv", "day": "2024-01-01"}, dense=["size"])
    assert stored()["size"].tolist() == [2.0**64, -3.0]


@pytest.mark.parametrize("value", [-3, 2**64])
def test_whole_numbers_in_text_that_64_bits_do_not_hold_stay_text(
    ingest: Any, stored: Any, tmp_path: Path, value: int
) -> None:
    (tmp_path / "rows.csv").write_text(f"user,label,ad\n1,0,{2**64 - 1}\n2,1,{value}\n")
    ingest({"path": "rows.csv", "day": "2024-01-01"})
    assert stored()["ad"].tolist() == [f"{2**64 - 1}", f"{value}"]


def test_a_decimal_column_stays_fractional_in_a_table_that_has_it_so(ingest: Any, stored: Any, put: Any) -> None:
    put("1.parquet", user=[1], label=[0], date=[DAY1], price=pa.array([1.5]), sizes=pa.array([[0.5]]))
    ingest({**BY_DAY, "path": "1.parquet"})
    whole = pa.array([decimal.Decimal(7)], pa.decimal128(10, 0))
    lists = pa.array([[decimal.Decimal(7)]], pa.list_(pa.decimal128(10, 0)))
    put("2.parquet", user=[2], label=[1], date=[DAY2], price=whole, sizes=lists, order_id=whole)
    ingest({**BY_DAY, "path": "2.parquet"})
    assert stored()["price"].tolist() == [1.5, 7.0]
    assert [list(one) for one in stored()["sizes"]] == [[0.5], [7.0]]
    assert stored()["order_id"].tolist()[1] == 7


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        (pa.array([{"a": 1}]), "STRUCT(a BIGINT)"),
        (pa.array([[[1]]]), "BIGINT[][]"),
        (pa.array([[[decimal.Decimal("1.5")]]]), "DECIMAL(2,1)[][]"),
        (pa.array([b"\xff"]), "BLOB"),
        (pa.array([[("k", 1)]], pa.map_(pa.string(), pa.int64())), "MAP(VARCHAR, BIGINT)"),
    ],
    ids=["struct", "lists of lists", "lists of lists of decimals", "bytes", "map"],
)
def test_kinds_that_are_refused(ingest: Any, put: Any, warehouse: Warehouse, values: pa.Array, kind: str) -> None:
    put("rows.parquet", user=[1], label=[0], nested=values)
    with pytest.raises(DataError) as error:
        ingest(FIXED, sparse=["nested"])
    assert str(error.value) == (
        f"column 'nested': expected numbers, text, dates, lists of them or maps of them by a whole number, got type {kind}. "
        "Split it into separate columns."
    )
    assert not warehouse.has_table("events")
    said: list[str] = []
    ingest(FIXED, warn=said.append)
    assert said == [f"columns left out, which the warehouse has no type for and no feature reads: nested ({kind})"]
    assert warehouse.schema(warehouse.current("events")).names == ["user", "day", "label"]


def test_truth_values_of_pandas_are_numbers_where_a_number_is_read(ingest: Any, stored: Any, tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text("user,label,new,seen\n1,False,True,True\n2,True,,False\n3,True,False,\n")
    ingest({"path": "rows.csv", "day": "2024-01-01"}, dense=["new"])
    frame = stored()
    assert frame["label"].tolist() == [0, 1, 1]
    assert [None if pd.isna(one) else one for one in frame["new"]] == [1.0, None, 0.0]
    assert [None if pd.isna(one) else one for one in frame["seen"]] == ["True", "False", None]


def test_bytes_that_are_text_are_text(ingest: Any, stored: Any, put: Any) -> None:
    """Old writers mark no text as such: days, labels and ids, too."""
    put("rows.parquet", user=[b"a", "ü".encode(), None], label=[b"0", b"1", b"1"], at=[b"2024-01-01", b"2024-01-02", b"2024-01-02"])  # fmt: skip
    ingest({"path": "rows.parquet", "day_column": "at"})
    assert stored()["user"].tolist()[:2] == ["a", "ü"]
    assert stored()["label"].tolist() == [0, 1, 1]


ANY_LABEL = {"one_label": "off"}


def decimals(*texts: str | None, scale: int = 10) -> pa.Array:
    return pa.array([text and decimal.Decimal(text) for text in texts], pa.decimal128(38, scale))


def test_times_in_nanoseconds_stay_in_their_day(ingest: Any, stored: Any, put: Any) -> None:
    """DuckDB would round the last ones of a day into the next. pandas' `end_time` is such a time."""
    last = pd.Timestamp("2024-01-01 23:59:59.999999999")
    times = pa.array([last.value, -1], pa.timestamp("ns"))
    put(
        "a.parquet",
        user=[1, 2],
        date=times,
        zoned=times.cast(pa.timestamp("ns", "UTC")),
        several=pa.array([[last], None]),
        label=[0, 1],
    )
    ingest(BY_DAY, checks=ANY_LABEL)
    rows = stored().sort_values("day")
    assert rows["day"].tolist() == [datetime.date(1969, 12, 31), DAY1]
    assert rows["date"].tolist() == rows["zoned"].dt.tz_localize(None).tolist()
    assert rows["date"].tolist() == [pd.Timestamp("1969-12-31 23:59:59.999999"), last.floor("us")]
    assert [pd.Timestamp(one) for one in rows["several"].tolist()[1]] == [last.floor("us")]


@pytest.mark.parametrize(
    ("first", "second", "values"),
    [
        (decimals("12345678901234567890", "1"), pa.array([1, 2]), [12345678901234567890 - 2**64, 1, 1, 2]),
        (decimals("9007199254740993", "7"), pa.array([1.5, 2.0]), "whole numbers, as in other files, one of which is 9007"),
        (decimals("9007199254740992.5", "9007199254740993"), None, "none beyond 2^53 among fractions, got 9007199254740993"),
        (decimals("1", "12345678901234567890"), None, ["1", "12345678901234567890"]),
        (decimals("0.5", "12.50"), pa.array(["a", "b"]), ["0.5", "12.5", "a", "b"]),
        (pa.array([[1.0, 2.5]]), pa.array([["a"], ["1"]]), [["1", "2.5"], ["a"], ["1"]]),
        (
            pa.array([[decimal.Decimal("9007199254740993.00")]], pa.list_(pa.decimal128(20, 2))),
            pa.array([[7]]),
            [[9007199254740993], [7]],
        ),
        (
            pa.array([[decimal.Decimal("9007199254740993.00"), decimal.Decimal("0.5")]], pa.list_(pa.decimal128(20, 2))),
            None,
            "none beyond 2^53 among fractions",
        ),
    ],
)  # fmt: skip
def test_no_number_becomes_another_and_no_id_two_texts(
    first: pa.Array, second: pa.Array | None, values: Any, ingest: Any, stored: Any, put: Any
) -> None:
    for name, column in {"a": first, "b": second}.items():
        if column is not None:
            put(
                f"{name}.parquet",
                user=[*range(len(column))],
                x=column,
                date=[DAY1] * len(column),
                label=[0] * len(column),
            )
    if isinstance(values, str):
        with pytest.raises(DataError, match=re.escape(values)):
            ingest(BY_DAY, checks=ANY_LABEL)
    else:
        ingest(BY_DAY, checks=ANY_LABEL)
        assert [one.tolist() if isinstance(one, np.ndarray) else one for one in stored()["x"]] == values


@pytest.mark.parametrize(
    ("before", "after", "got"),
    [
        (pa.array([1.5]), decimals("9007199254740993", scale=0), "got others in 1 rows, such as '9007199254740993'"),
        (pa.array([[1.5]]), pa.array([[2**53 + 1]]), "got others in 1 rows, such as '[9007199254740993]'"),
        (pa.array([[1]]), pa.array([[1.5]]), "whole numbers"),
        (pa.array([["a"]]), pa.array([[1.0]]), [["1"]]),
    ],
)
def test_a_later_day_changes_no_number(
    before: pa.Array, after: pa.Array, got: Any, ingest: Any, stored: Any, put: Any
) -> None:
    put("a.parquet", user=[1], x=before, date=[DAY1], label=[1])
    ingest(BY_DAY, ["user", "x"], checks=ANY_LABEL)
    put("b.parquet", user=[1], x=after, date=[DAY2], label=[1])
    if isinstance(got, str):
        with pytest.raises(DataError, match=re.escape(got)):
            ingest(BY_DAY, ["user", "x"], checks=ANY_LABEL)
    else:
        ingest(BY_DAY, ["user", "x"], checks=ANY_LABEL)
        assert stored()["x"].tolist()[-1].tolist() == got[0]


@pytest.mark.parametrize("skipped", [False, True])
def test_a_column_that_nothing_reads_holds_no_day_back(ingest: Any, stored: Any, put: Any, skipped: bool) -> None:
    """It is null where its value does not fit, which a warning says. So is one that `skip` names."""
    rows: dict[str, Any] = {"user": [1, 2], "label": [0, 1]}
    put("1.parquet", x=[1, 2], id=[1, 2], date=[DAY1] * 2, **rows)
    checks, read = {"skip": ["x"]} if skipped else {}, ["user", "id", *(["x"] if skipped else [])]
    ingest(BY_DAY, read, checks=checks)
    put("2.parquet", x=["a", "5"], id=[3, 4], date=[DAY2] * 2, **rows)
    (found,) = [one for one in ingest(BY_DAY, read, checks=checks).checked.findings if one.rule == "changed_type"]
    assert (found.day, found.outcome, found.column) == (DAY2, "warn", "x")
    assert found.got == "others in 1 rows, such as 'a' in '2.parquet'; they are null there"
    assert pa.array(stored()["x"], from_pandas=True).to_pylist() == [1, 2, None, 5]
    put("3.parquet", x=["b", "6"], id=["c", "7"], date=[datetime.date(2024, 1, 3)] * 2, **rows)
    with pytest.raises(
        ContractError, match=r"column 'id': expected whole numbers, .*, got others in 1 rows, such as 'c'"
    ):
        ingest(BY_DAY, read, checks=checks)  # both do not fit in one row, and one of them matters


def test_a_column_that_is_read_later_lacks_values_with_a_warning(ingest: Any, put: Any) -> None:
    rows: dict[str, Any] = {"user": [1, 2], "label": [0, 1]}
    put("1.parquet", x=[1, 2], date=[DAY1] * 2, **rows)
    ingest(BY_DAY)
    put("2.parquet", x=["a", "5"], date=[DAY2] * 2, **rows)
    said: list[str] = []
    ingest(BY_DAY, warn=said.append)
    ingest(BY_DAY, ["user", "x"], warn=said.append)
    (told,) = said
    assert told.startswith("column 'x' is null in 1 days where its values do not fit, the first is 2024-01-02: ")


def test_a_day_held_for_a_value_is_written_once_nothing_reads_it(ingest: Any, put: Any) -> None:
    rows: dict[str, Any] = {"user": [1, 2], "label": [0, 1]}
    put("1.parquet", x=[1, 2], date=[DAY1] * 2, **rows)
    hold = {"changed_type": "quarantine"}
    ingest(BY_DAY, ["user", "x"], checks=hold)
    put("2.parquet", x=["a", "5"], date=[DAY2] * 2, **rows)
    assert ingest(BY_DAY, ["user", "x"], checks=hold).days_held == (DAY2,)
    assert ingest(BY_DAY, ["user", "x"], checks=hold).days_held == (DAY2,)
    assert ingest(BY_DAY, ["user"], checks=hold).days_written == (DAY2,)


@pytest.mark.parametrize(
    "keys", [{"order_by": ["x"]}, {"checks": {"key": ["x"]}}, {"filter": "x > 1"}, {"weights": "{column}_x"}]
)
def test_a_column_of_any_role_is_read(keys: dict[str, Any], tmp_path: Path, warehouse: Warehouse) -> None:
    """Keys of other sections than features name columns, too, also within SQL; and so do the weights of ids."""
    groups: list[dict[str, Any]] = [{"columns": ["user"], "transforms": [{"kind": "sigrid_hash", "size": 9}]}]
    name = "user_x" if "weights" in keys else "x"
    groups[0] |= {"weights": keys["weights"]} if "weights" in keys else {}
    schema = FeatureSchema.model_validate({"sparse": groups, "dense": [{"columns": ["price"]}]})
    roles = frozenset(names_in(keys))
    source = SourceConfig(path="*.csv", day_column="date", rename={"old": "new"})
    context = SourceContext(source, schema, warehouse, "t", tmp_path, tmp_path, roles=roles)
    assert context.reads(name)
    assert context.has_role(name) == ("weights" not in keys)
    assert [context.reads(one) for one in ("user", "date", "price", "old", "other")] == [True, True, True, False, False]
    assert not context.has_role("price")


def test_text_that_a_table_has_stays_as_it_is_written(ingest: Any, stored: Any, tmp_path: Path) -> None:
    """Also where all values of a later day are times."""
    for day, word in ((1, "soon"), (2, "2024-01-02 00:00:00 UTC")):
        row = {"user": 1, "label": day % 2, "date": f"2024-01-0{day}", "word": word}
        (tmp_path / f"{day}.jsonl").write_text(json.dumps(row))
        ingest({"path": "*.jsonl", "day_column": "date"}, checks=ANY_LABEL)
    assert stored()["word"].tolist() == ["soon", "2024-01-02 00:00:00 UTC"]


def test_types_of_side_tables_are_guessed_by_their_own_format(
    ingest: Any, stored: Any, put: Any, tmp_path: Path
) -> None:
    put("rows.parquet", user=[1, 2], label=[0, 1], count=[3, 4])
    (tmp_path / "side.csv").write_text("user,price\n1,10\n2,20\n")
    side = {"path": "side.csv", "on": ["user"]}
    ingest({"path": "rows.parquet", "day": "2024-01-01", "lookups": [side]}, dense=["price", "count"])
    assert {name: f"{stored()[name].dtype}" for name in ("price", "count")} == {"price": "float64", "count": "int64"}


@pytest.mark.parametrize("form", ["csv", "jsonl"])
def test_whole_numbers_of_text_are_floats_where_features_read_numbers(
    ingest: Any, stored: Any, tmp_path: Path, form: str
) -> None:
    """A quiet first day has whole prices. The type of a column that is an id, too, is what its values say."""
    groups = {"dense": ["price", "count"], "sparse": ["user", "count"]}
    for day, prices in ((1, [10, 20]), (2, [10.5, 2])):
        frame = pd.DataFrame(
            {"user": [1, 2], "label": [0, 1], "date": [f"2024-01-0{day}"] * 2, "price": prices, "count": [3, 4]}
        ).astype({"price": object})
        path = tmp_path / f"{day}.{form}"
        path.write_text(frame.to_csv(index=False) if form == "csv" else frame.to_json(orient="records", lines=True))
        ingest({"path": f"*.{form}", "day_column": "date"}, **groups)
    assert stored()["price"].tolist() == [10.0, 20.0, 10.5, 2.0]
    assert {name: f"{stored()[name].dtype}" for name in ("price", "count")} == {"price": "float64", "count": "int64"}


def test_a_missing_whole_number_may_be_nan_on_a_later_day(ingest: Any, stored: Any, put: Any) -> None:
    put("1.parquet", user=[1, 2], label=[0, 1], date=[DAY1] * 2)
    ingest(BY_DAY)
    put("2.parquet", user=pa.array([3.0, float("nan")]), label=[0, 1], date=[DAY2] * 2)
    ingest(BY_DAY)
    assert pa.array(stored()["user"], from_pandas=True).to_pylist() == [1, 2, 3, None]


@pytest.mark.parametrize("form", ["csv", "jsonl"])
def test_times_as_bigquery_exports_them(ingest: Any, stored: Any, tmp_path: Path, form: str) -> None:
    times = ["2024-01-01 23:59:59.123456 UTC", "2024-01-02 00:00:00 UTC"]
    frame = pd.DataFrame({"user": [1, 2], "label": [0, 1], "at": times})
    path = tmp_path / f"rows.{form}"
    path.write_text(frame.to_csv(index=False) if form == "csv" else frame.to_json(orient="records", lines=True))
    ingest({"path": path.name, "day_column": "at"}, checks=ANY_LABEL)
    assert stored()["day"].tolist() == [DAY1, DAY2]
    assert stored()["at"].tolist() == [pd.Timestamp(time[:-4], tz="UTC") for time in times]


def test_days_may_be_written_as_numbers(ingest: Any, stored: Any, put: Any) -> None:
    put("a.parquet", user=[1, 2], date=[20240101, 20240102], label=[0, 1])
    with pytest.raises(DataError, match=re.escape('Set source.date_format="%Y%m%d".')):
        ingest(BY_DAY)
    given = BY_DAY | {"date_format": "%Y%m%d"}
    ingest(given, checks=ANY_LABEL)
    put("b.parquet", user=[1], date=[20240103], label=[0])
    result = ingest(given, checks=ANY_LABEL)
    assert (len(result.days_written), result.files.opened) == (1, 1)
    assert sorted(stored()["day"]) == [DAY1, DAY2, datetime.date(2024, 1, 3)]
