"""Days of feature sources."""

import datetime

import pyarrow as pa
import pytest

from pipeline.data.stored import to_days
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
