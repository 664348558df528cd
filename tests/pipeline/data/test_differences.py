"""Every way in which two versions of a value differ, against a reference that looks at one row at a time."""

import datetime
import math
from collections import Counter
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings

from pipeline.data.differences import WAYS, ColumnDifferences, common_form, compare, to_form
from pipeline.errors import ConfigError


def reference(then: list[Any], now: list[Any]) -> str:
    """The way in which two lists differ, by the definition of each way."""
    if then == now:
        return "same"
    if not then or not now:
        return "missing now" if then else "missing then"
    if Counter(then) == Counter(now):
        return "other order"
    return "other value"


def names(then: pa.Array, now: pa.Array, tolerance: float = 0.0) -> list[str]:
    form = common_form("column", then.type, now.type)
    codes, _ = compare(to_form("column", then, form), to_form("column", now, form), tolerance)
    return [WAYS[code] for code in codes.tolist()]


LISTS = st.lists(st.integers(0, 3), max_size=5)


@settings(deadline=None, max_examples=300)
@given(st.lists(st.tuples(LISTS | st.none(), LISTS), min_size=1, max_size=20), st.integers(0, 3))
def test_lists_differ_as_the_definition_says(pairs, skipped):
    """Also of slices, nulls and texts."""
    then, now = (pa.array([pair[i] for pair in pairs], pa.list_(pa.int32())).slice(skipped) for i in (0, 1))
    expected = [reference(one or [], two) for one, two in pairs][skipped:]
    assert names(then, now.cast(pa.large_list(pa.int64()))) == expected
    assert names(*(array.cast(pa.list_(pa.string())) for array in (then, now))) == expected


@pytest.mark.parametrize(
    ("then", "now", "way"),
    [
        ([5, 4, 3], [6, 5, 4], "other value"),
        ([5, 4], [5, 4, 3], "other value"),
        ([5, 4], [4, 5], "other order"),
        ([5, 4, 4], [5, 5, 4], "other value"),
        (None, [], "same"),
        ([], [1], "missing then"),
        ([1], None, "missing now"),
    ],
)
def test_each_way_of_lists_has_an_example(then, now, way):
    assert names(pa.array([then], pa.list_(pa.int64())), pa.array([now], pa.list_(pa.int64()))) == [way]


NUMBERS = st.none() | st.sampled_from([0.0, -0.0, 1.0, 1.0 + 1e-9, 1.001, 3.0, math.inf, -math.inf, math.nan])


@settings(deadline=None, max_examples=300)
@given(st.lists(st.tuples(NUMBERS, NUMBERS), min_size=1, max_size=30), st.sampled_from([0.0, 1e-6, 0.01]))
def test_numbers_differ_by_more_than_the_tolerance(pairs, tolerance):
    then, now = (pa.array([pair[i] for pair in pairs], pa.float64()) for i in (0, 1))

    def expected(one: float | None, two: float | None) -> str:
        gone = [value is None or math.isnan(value) for value in (one, two)]
        if any(gone):
            return "same" if all(gone) else "missing then" if gone[0] else "missing now"
        return "same" if math.isclose(one, two, rel_tol=tolerance, abs_tol=0.0) else "other value"

    assert names(then, now, tolerance) == [expected(*pair) for pair in pairs]


def test_types_that_callers_send_compare_with_those_of_the_table():
    """Numbers arrive as floats, dates as times, texts in any form."""
    whole = pa.array([1, 2, None, 2**60], pa.int64())
    assert names(pa.array([1.0, 3.0, math.nan, float(2**60)]), whole) == ["same", "other value", "same", "same"]
    assert names(pa.array([1, 2, None, 2**60 + 1], pa.int64()), whole)[-1] == "other value"  # digits of ids count
    assert names(pa.array([1.0, 0.0]), pa.array([True, True])) == ["same", "other value"]
    assert names(pa.array([True, False]), pa.array([True, True])) == ["same", "other value"]
    day = datetime.date(2025, 3, 1)
    times = pa.array([datetime.datetime(2025, 3, 1), datetime.datetime(2025, 3, 1, 1)], pa.timestamp("us"))
    assert names(times, pa.array([day, day])) == ["same", "other value"]
    assert names(times.cast(pa.timestamp("ms", "UTC")), times) == ["same", "same"]
    texts = pa.array(["a", "b", None])
    assert names(texts.dictionary_encode(), pa.array(["a", "c", "d"], pa.large_string())) == [
        "same",
        "other value",
        "missing then",
    ]
    assert names(pa.nulls(2), pa.array([[1], []])) == ["missing then", "same"]
    assert names(pa.array([[0.5]], pa.list_(pa.float32())), pa.array([[0.5]])) == ["same"]


@pytest.mark.parametrize(
    ("then", "now"), [(pa.string(), pa.int64()), (pa.int64(), pa.list_(pa.int64())), (pa.float64(), pa.timestamp("us"))]
)
def test_types_of_other_kinds_are_refused(then, now):
    with pytest.raises(ConfigError, match=r"column 'x': expected .*, or a type like it, got "):
        common_form("column 'x'", then, now)


def test_a_summary_counts_ways_and_names_rows():
    random = np.random.default_rng(4)
    then, found = random.normal(size=1_000), ColumnDifferences("num", 0.0)
    now = np.where(random.random(1_000) < 0.2, then + random.normal(size=1_000), then)
    for start in range(0, 1_000, 300):
        part = slice(start, start + 300)
        found.add(pa.array(then[part]), pa.array(now[part]), [pa.array(np.arange(1_000)[part]), pa.array(then[part])])
    other = np.flatnonzero(then != now)
    summary = found.summary()
    assert summary["reasons"] == {"other value": len(other)}
    assert (summary["rows"], summary["differing"], summary["share"]) == (1_000, len(other), len(other) / 1_000)
    assert summary["largest_difference"] == np.abs(then - now).max()
    assert summary["examples"] == {"other value": [[f"{row}", f"{then[row]}"] for row in other[:3].tolist()]}
