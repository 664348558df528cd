"""Days of feature sources."""

import datetime
import decimal

import pyarrow as pa
import pytest

from pipeline.data.stored import stored_type, to_days, to_key_form, to_stored_form
from pipeline.errors import DataError

DAY = datetime.date(2024, 1, 1)


@pytest.mark.parametrize(
    "values",
    [
        pa.array(["2024-01-01", "2024-01-01 23:30:00", "2024-01-01T23:30:00.125"]),
        pa.array([datetime.datetime(2024, 1, 1, 23, 30)], pa.timestamp("us")),
        pa.array([datetime.datetime(2024, 1, 1, 23, 30)], pa.timestamp("us", "UTC")),
        pa.array([DAY]),
    ],
)
def test_days_are_read(values: pa.Array) -> None:
    assert set(to_days("day", values).to_pylist()) == {DAY}


@pytest.mark.parametrize("text", ["2024-01-01T23:30:00Z", "2024-01-01T23:30:00-05:00", "2024-01-01 23:30+05"])
def test_a_text_with_a_zone_is_refused(text: str) -> None:
    """Its day may differ in UTC."""
    with pytest.raises(DataError) as error:
        to_days("features.joined 'f', column 'at'", pa.array(["2024-01-01", text]))
    assert str(error.value) == (
        "features.joined 'f', column 'at': expected text without a time zone, got text with one. "
        "Convert it to timestamps."
    )


BIG = [9007199254740993 + number for number in range(20)]


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        (pa.decimal128(38, 0), [*BIG, None, 2**63 - 1, -5]),
        (pa.decimal128(20, 0), [2**63, 2**64 - 1, 7]),
        (pa.decimal256(40, 0), BIG),
        (pa.decimal128(38, 9), [1, 2**53, None]),
    ],
)
@pytest.mark.parametrize("listed", [False, True])
def test_whole_decimals_stay_apart(kind: pa.DataType, values: list[int | None], listed: bool) -> None:
    rows = pa.array([None if one is None else decimal.Decimal(one) for one in values], kind)
    expected = [None if one is None else one - 2**64 if one >= 2**63 else one for one in values]
    if listed:
        rows = pa.array([rows.slice(0, 2).to_pylist(), None, [], rows.slice(2).to_pylist()], pa.list_(kind))
    found = to_stored_form(rows, stored_type("column 'x'", rows.type))
    assert found.type == stored_type("column 'x'", rows.type)
    flat = [expected[:2], None, [], expected[2:]] if listed else expected
    assert found.to_pylist() == flat
    if not listed:
        assert to_key_form("key 'x'", rows).to_pylist() == expected


@pytest.mark.parametrize(
    ("kind", "value"), [(pa.decimal128(38, 0), 2**64), (pa.decimal128(38, 9), BIG[0]), (pa.decimal128(38, 0), -(2**70))]
)
def test_decimals_that_would_become_one_are_refused(kind: pa.DataType, value: int) -> None:
    rows = pa.array([decimal.Decimal(value)], kind)
    with pytest.raises(DataError, match=r"^column of a feature source: expected .* or as text|Write it as text"):
        to_stored_form(rows, stored_type("column 'x'", kind))


def test_a_key_with_a_fraction_is_refused() -> None:
    with pytest.raises(DataError, match=r"^key 'x': expected ids: whole numbers of 64 bits, got 1.5"):
        to_key_form("key 'x'", pa.array([decimal.Decimal("1.5")], pa.decimal128(5, 1)))


@pytest.mark.parametrize("listed", [False, True])
def test_nanoseconds_are_cut_also_before_1970(listed: bool) -> None:
    times = pa.array([-1, 1_999, None], pa.timestamp("ns"))
    found = to_stored_form(
        pa.array([times.to_numpy(zero_copy_only=False)], pa.list_(times.type)) if listed else times,
        pa.large_list(pa.timestamp("us")) if listed else pa.timestamp("us"),
    )
    assert (found.flatten() if listed else found).cast(pa.int64()).to_pylist() == [-1, 1, None]
