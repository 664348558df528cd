"""Raw rows as callers send them: how values are converted, when defaults apply, what is refused."""

import datetime
import json
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

from pipeline.errors import ConfigError, InputError
from pipeline.inference.request import TYPES, check_defaults, table_of
from pipeline.registration.config import RegistrationConfig
from pipeline.serving.bodies import read_tensors

VALUES: dict[str, tuple[list[Any], list[Any]]] = {
    "double": ([1, 2.5, None, float("nan"), True, np.float32(0.5), 2**60], [1.0, 2.5, None, None, 1.0, 0.5, 2.0**60]),
    "long": (
        [
            1,
            -(2**63),
            True,
            None,
            float("nan"),
            3.0,
            [2**62 + 1],
            [],
            (5,),
            np.int32(6),
            np.array([7]),
            2**63,
            [2**64 - 1],
            np.uint64(2**63 + 9),
        ],
        [1, -(2**63), 1, None, None, 3, 2**62 + 1, None, 5, 6, 7, -(2**63), -1, 9 - 2**63],
    ),
    "string": (["a", "", None, pd.NA, "\u00e5"], ["a", "", None, None, "\u00e5"]),
    "list<double>": ([[1, None], [], None, (0.5,), np.array([2.0])], [[1.0, None], [], None, [0.5], [2.0]]),
    "list<long>": (
        [[1, 2**62 + 1], [], None, [3.0, None], np.array([4]), [2**64 - 7, 1]],
        [[1, 2**62 + 1], [], None, [3, None], [4], [-7, 1]],
    ),
    "list<string>": ([["a", None], [], None], [["a", None], [], None]),
}
WRONG: dict[str, list[Any]] = {
    "double": ["1", [1.0], {}, b"1", 10**400],
    "long": ["1", 1.5, 2.0**60, 2.0**63, 2**64, -(2**63) - 1, [1, 2], ["1"], float("inf"), {}],
    "string": [1, ["a"], b"a", "\ud800", True],
    "timestamp": [1, 1.5, "soon", ["2025-01-01"], True],
    "list<double>": [1.0, "12", ["1"], [[1.0]], {1: 2}],
    "list<long>": [1, "12", [1.5], ["1"], [[1]], {1: 2}, [2**64], [2.0**63]],
    "list<string>": ["ab", [1], [["a"]], {"a": 1}],
}


@pytest.mark.parametrize("kind", VALUES)
def test_values_of_a_kind(kind):
    """All values together, and each alone: columns of one type are converted on a faster path."""
    values, expected = VALUES[kind]
    series = pd.Series(values, dtype="object")
    assert table_of({"x": values}, {"x": kind}, {}).column("x").to_pylist() == expected
    assert table_of(series.to_frame("x"), {"x": kind}, {}).column("x").to_pylist() == expected
    for value, wanted in zip(values, expected, strict=True):
        made = table_of({"x": [value]}, {"x": kind}, {})
        assert made.column("x").to_pylist() == [wanted]
        assert made.schema.field("x").type == TYPES[kind]


@pytest.mark.parametrize(("kind", "value"), [(kind, value) for kind, values in WRONG.items() for value in values])
def test_values_of_another_kind_are_refused_or_take_the_default(kind, value):
    good = VALUES.get(kind, (["2025-01-01"],))[0][0]
    for rows in ([value], [good, value]):
        with pytest.raises(InputError) as caught:
            table_of({"x": rows}, {"x": kind}, {})
        assert caught.value.where == f"row {len(rows) - 1}, column 'x'"
        assert (caught.value.expected, caught.value.actual) == (kind, repr(value)[:60])
        made = table_of({"x": rows}, {"x": kind}, {"x": good}).column("x")
        assert made.to_pylist() == table_of({"x": [good] * len(rows)}, {"x": kind}, {}).column("x").to_pylist()


@pytest.mark.parametrize("dtype", ["int32", "uint8", "Int64", "float32", "bool"])
def test_columns_of_pandas_types(dtype):
    rows = pd.DataFrame({"x": pd.Series([1, 0], dtype=dtype)})
    assert table_of(rows, {"x": "double"}, {}).column("x").to_pylist() == [1.0, 0.0]
    assert table_of(rows, {"x": "long"}, {}).column("x").to_pylist() == [1, 0]


NOON = datetime.datetime(2025, 3, 4, 12)
GOOD_TIMES = [
    ("2025-03-04T12:00:00Z", NOON), ("2025-03-04T12:00:00", NOON), ("2025-03-04 12:00", NOON), ("2025-03-04T12", NOON),
    ("2025-03-04T14:30:00+02:30", NOON), ("2025-03-04T14:30+0230", NOON), ("2025-03-04T10-02", NOON),
    ("20250304T120000Z", NOON), ("20250304T1200", NOON), ("2025-03-04", NOON.replace(hour=0)),
    ("2025-03-04T12:00:00,5Z", NOON.replace(microsecond=500_000)),
    ("2025-03-04T12:00:00.123456999", NOON.replace(microsecond=123_456)),
    ("1969-07-20T20:17:00.0000009Z", datetime.datetime(1969, 7, 20, 20, 17)), ("9999-12-31", datetime.datetime(9999, 12, 31)),
    (datetime.date(2025, 3, 4), NOON.replace(hour=0)), (np.datetime64("2025-03-04T12"), NOON), (pd.Timestamp("2025-03-04 12:00", tz="UTC"), NOON),
]  # fmt: skip
GUESSED = [
    "now", "today", "soon", "", " ", "2025", "2025-03", "202503", "20250304", "3/4/2025", "4.3.2025", "2025/03/04", "12:00", "March 4, 2025",
    "2025-3-4", "2025-03-04T", "2025-03-04Z", "2025-03-04T12:00 PM", "2025-03-04T12:00:00 UTC", "2025-03-04T12:00 Europe/Oslo", "2025-W10-2",
    "2025-063", "1741089600", "1741089600.5", "2025-03-04T12:00:00Z ", " 2025-03-04", "2025-02-30", "2025-13-01", "2025-03-04T25:00", "nan", "NaT",
    "\u0662\u0660\u0662\u0665-03-04", "2025-03-04x12:00", "0000-01-01", "P1D", 1741089600, 1741089600.5, True, b"2025-03-04",
    datetime.time(12), datetime.timedelta(1), np.timedelta64(1, "s"), np.int64(5),
]  # fmt: skip


@pytest.mark.parametrize(("value", "expected"), GOOD_TIMES, ids=str)
def test_times_in_iso_8601_or_of_a_type_with_a_unit(value, expected):
    for rows in ([value], [None, value]):
        assert table_of({"x": rows}, {"x": "timestamp"}, {}).column("x").to_pylist() == [None, expected][-len(rows) :]


@pytest.mark.parametrize("value", GUESSED, ids=str)
def test_no_time_is_guessed(value):
    for sent in ({"x": [None, value]}, pd.DataFrame({"x": pd.Series([None, value], dtype="object")})):
        with pytest.raises(InputError) as caught:
            table_of(sent, {"x": "timestamp"}, {})
        assert (caught.value.where, caught.value.expected) == ("row 1, column 'x'", "timestamp")
        assert caught.value.actual == repr(value)[:60]
    with pytest.raises(ConfigError):
        check_defaults({"x": value}, {"x": "timestamp"})


@pytest.mark.parametrize("unit", ["s", "ms", "us", "ns"])
@pytest.mark.parametrize("zone", [None, "UTC", "America/New_York", "Not/A_Zone"])
def test_arrow_declares_the_unit_and_a_zone_changes_no_time(unit, zone):
    size = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}[unit]
    seconds = [0, -1, 1_741_089_600, -86_401]
    times = pa.array([*(second * size for second in seconds), None], pa.int64()).view(pa.timestamp(unit, zone))
    expected = [datetime.datetime(1970, 1, 1) + datetime.timedelta(seconds=second) for second in seconds]
    assert table_of(pa.table({"x": times}), {"x": "timestamp"}, {}).column("x").to_pylist() == [*expected, None]


@pytest.mark.parametrize(
    "values",
    [
        pa.array([None, 2**62], pa.int64()).view(pa.timestamp("s")),
        pa.array([None, -(2**62)], pa.int64()).view(pa.timestamp("ms", "UTC")),
        pa.array([None, 2**62], pa.int64()).view(pa.date64()),
        pa.array([None, 2**31 - 1], pa.int32()).view(pa.date32()),
        pa.array([None, 5], pa.int64()),
        pa.array([None, 5], pa.duration("s")),
        pa.array([None, 5], pa.time64("us")),
        pa.array([None, [datetime.datetime(2025, 1, 1)]], pa.list_(pa.timestamp("ns", "Not/A_Zone"))),
    ],
    ids=lambda values: str(values.type),
)
def test_an_arrow_column_without_times_names_its_row(values):
    with pytest.raises(InputError) as caught:
        table_of(pa.table({"x": values}), {"x": "timestamp"}, {})
    assert (caught.value.where, caught.value.expected) == ("row 1, column 'x'", "timestamp")
    made = table_of(pa.table({"x": values}), {"x": "timestamp"}, {"x": "2025-03-04T12:00"}).column("x")
    assert made.to_pylist() == [None, NOON]


UNSIGNED = [2**63 - 1, 2**63, 2**64 - 1, 7]
WRAPPED = np.array(UNSIGNED, np.uint64).view(np.int64).tolist()
"""As an ingest stores them: the same 64 bits."""


@pytest.mark.parametrize(
    "make",
    [
        lambda ids: {"x": ids},
        lambda ids: {"x": [[one] for one in ids]},
        lambda ids: json.dumps({"x": ids}),
        lambda ids: json.dumps([{"x": one} for one in ids]),
        lambda ids: pd.DataFrame({"x": np.array(ids, np.uint64)}),
        lambda ids: pd.DataFrame({"x": pd.array(ids, "UInt64")}),
        lambda ids: pd.DataFrame({"x": pd.Series(ids, dtype="object")}),
        lambda ids: pd.DataFrame({"x": pd.Series(ids, dtype="uint64[pyarrow]")}),
        lambda ids: {"x": np.array(ids, np.uint64)},
        lambda ids: pa.table({"x": pa.array(ids, pa.uint64())}),
        lambda ids: pa.table({"x": pa.chunked_array([ids[:1], ids[1:]], pa.uint64())}),
        lambda ids: pa.table({"x": pa.array(ids, pa.uint64()).dictionary_encode()}),
        lambda ids: pa.table({"x": pa.array([[one] for one in ids], pa.list_(pa.uint64()))}),
        lambda ids: pa.table({"x": pa.array([[one] for one in ids], pa.large_list(pa.uint64()))}),
        lambda ids: read_tensors(
            {"inputs": [{"name": "x", "shape": [len(ids)], "datatype": "UINT64", "data": ids}]}, {"x": "long"}
        ),
    ],
)
@pytest.mark.parametrize("defaults", [{}, {"x": 3}])
def test_unsigned_ids_wrap_at_every_door(make, defaults):
    assert table_of(make(UNSIGNED), {"x": "long"}, defaults).column("x").to_pylist() == WRAPPED


@pytest.mark.parametrize("kind", [pa.list_(pa.uint64()), pa.large_list(pa.uint64()), None])
def test_lists_of_unsigned_ids_wrap(kind):
    rows = [[UNSIGNED[1], 7], [], None, [UNSIGNED[2], None]]
    sent = {"x": rows} if kind is None else pa.table({"x": pa.array(rows, kind)})
    made = table_of(sent, {"x": "list<long>"}, {"x": [3]}).column("x").to_pylist()
    assert made == [[WRAPPED[1], 7], [], None, [WRAPPED[2], None]]


def test_unsigned_numbers_of_a_dense_column_stay_numbers():
    for sent in ({"x": UNSIGNED}, pa.table({"x": pa.array(UNSIGNED, pa.uint64())})):
        assert table_of(sent, {"x": "double"}, {}).column("x").to_pylist() == [float(one) for one in UNSIGNED]


def test_text_of_rows_keeps_large_ids_next_to_nulls():
    text = json.dumps([{"user": 2**62 + 1}, {"user": None}, {}])
    assert table_of(text, {"user": "long"}, {}).column("user").to_pylist() == [2**62 + 1, None, None]


def test_a_million_ids_in_a_row():
    ids = list(range(1_000_000))
    made = table_of({"x": [ids, [1]]}, {"x": "list<long>"}, {}).column("x")
    assert made.combine_chunks().values.to_numpy().tolist() == [*ids, 1]


def test_empty_batches():
    columns = {"x": "list<long>", "y": "double", "at": "timestamp"}
    rows: Any
    for rows in ({"x": [], "y": [], "at": []}, pd.DataFrame(columns=["x", "y", "at"])):
        made = table_of(rows, columns, {})
        assert made.num_rows == 0
        assert made.schema.types == [TYPES[kind] for kind in columns.values()]
    assert table_of({"y": []}, columns, {"x": [], "at": None}).num_rows == 0


@pytest.mark.parametrize(
    ("rows", "sentence"),
    [
        ("{", "input: expected JSON text, got Expecting property name enclosed in double quotes: line 1 column 2 (char 1). Correct the text."),
        ("5", "input: expected a data frame, a dict of lists, or the JSON text of such a dict or of a list of rows, got 5. Send one of them."),
        ("[5]", "input: expected a data frame, a dict of lists, or the JSON text of such a dict or of a list of rows, got [5]. Send one of them."),
        ('{"x": 5}', "column 'x': expected a list of values, one a row, got 5. Put it in a list."),
        ({"x": "ab", "y": [1]}, "column 'x': expected a list of values, one a row, got 'ab'. Put it in a list."),
        ({"x": [1, 2], "y": [1]}, "input: expected 2 values in each column, got y of 1. Send null for what is unknown."),
        ({"y": [1]}, "input: expected columns x, y, got none named x. Add them."),
        ([], "input: expected a data frame, a dict of lists, or the JSON text of such a dict or of a list of rows, got []. Send one of them."),
        ({}, "input: expected columns x, y, got none named x, y. Add them; a batch without rows names them, too."),
        ("[]", "input: expected columns x, y, got none named x, y. Add them; a batch without rows names them, too."),
        (pd.DataFrame([[1, 2, 3]], columns=["x", "y", "x"]), "input: expected columns of different names, got x twice. Rename one of them."),
    ],
)  # fmt: skip
def test_what_is_no_table_is_refused(rows, sentence):
    with pytest.raises(InputError) as caught:
        table_of(rows, {"x": "long", "y": "long"}, {"y": 1})
    assert str(caught.value) == sentence


def test_text_nested_without_end_is_refused():
    with pytest.raises(InputError, match="expected JSON text"):
        table_of("[" * 100_000, {"x": "long"}, {})


def test_defaults_are_copied_for_every_row():
    columns = {"x": "list<long>", "y": "string", "z": "timestamp", "w": "double"}
    made = table_of({"w": [1, "?"]}, columns, {"x": [1, 2], "y": "none", "z": "2025-01-01", "w": None})
    assert made.drop_columns("z").to_pylist() == [{"x": [1, 2], "y": "none", "w": w} for w in (1.0, None)]
    assert made.column("z").cast(pa.string()).to_pylist() == ["2025-01-01 00:00:00.000000"] * 2


def test_good_defaults():
    read = RegistrationConfig.model_validate(
        {"defaults": {"a": 1, "b": [1, 2], "c": "x", "d": None, "e": True, "f": 0.5}}
    )
    assert read.defaults == {"a": 1, "b": (1, 2), "c": "x", "d": None, "e": True, "f": 0.5}
    assert [type(value) for value in read.defaults.values()] == [int, tuple, str, type(None), bool, float]
    kinds = {"a": "long", "b": "list<long>", "c": "string", "d": "list<string>", "e": "double", "f": "double"}
    check_defaults(read.defaults, kinds)


@pytest.mark.parametrize(
    ("defaults", "sentence"),
    [
        ({"user": "x"}, "registration.defaults 'user': expected long, got 'x'. Correct the value."),
        ({"tags": 5}, "registration.defaults 'tags': expected list<long>, got 5. Correct the value."),
        ({"usr": 5}, "registration.defaults 'usr': expected a column that the features read, got none of that name. Closest: user. Correct the name."),
    ],
)  # fmt: skip
def test_defaults_that_do_not_fit_are_refused(defaults, sentence):
    with pytest.raises(ConfigError) as caught:
        check_defaults(defaults, {"user": "long", "tags": "list<long>"})
    assert str(caught.value) == sentence


@pytest.mark.parametrize("name", ["o'hara", "a/b", "a:b"])
def test_names_that_the_registry_cannot_hold_are_refused(name):
    with pytest.raises(ConfigError) as caught:
        RegistrationConfig(model_name=name)
    assert str(caught.value) == (
        f'registration.model_name: expected a name without quotes, / and :, got "{name}". Rename it.'
    )
