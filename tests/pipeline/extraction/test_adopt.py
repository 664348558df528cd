"""Days of a table that another engine writes are checked where they are."""

import datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from pipeline.errors import ConfigError, DataError
from pipeline.extraction.adopt import adopt
from pipeline.extraction.config import IngestConfig, LabelColumns, SourceConfig
from pipeline.extraction.opening import SourceContext
from storage.config import TableConfig, WarehouseConfig
from storage.warehouse import Warehouse
from tests.homes import rows_of

DAYS = [datetime.date(2024, 1, day) for day in (1, 2)]


def checked(home: Path, labels: Any, row_filter: str | None = None, label: str = "label") -> tuple[datetime.date, ...]:
    """Checks a table with a good day and one with these labels."""
    warehouse = Warehouse(WarehouseConfig(tables={"t": TableConfig(table="theirs.t")}), home)
    good = pa.array([0, 1], pa.int32()).cast(pa.float32()).cast(labels.type)
    rows = [rows_of(day, len(values), label=values) for day, values in zip(DAYS, (good, labels), strict=True)]
    warehouse.catalog.create_namespace_if_not_exists("theirs")
    if not warehouse.catalog.table_exists("theirs.t"):
        warehouse.catalog.create_table("theirs.t", rows[0].schema).append(pa.concat_tables(rows))
    source = SourceConfig(table="theirs.t")
    context = SourceContext(source, LabelColumns(label=label), warehouse, "t", home, home)
    return adopt(context, IngestConfig(), row_filter).days_checked


@pytest.mark.parametrize(
    ("labels", "shown"),
    [
        (pa.array([1, None, 0]), "null in 1 rows"),
        (pa.array([1, 2, 3]), "2 in 2 rows"),
        (pa.array([0.0, 0.5]), "0.5 in 1 rows"),
        (pa.array([1.0, float("nan")]), "nan in 1 rows"),
        (pa.array([-1], pa.int32()), "-1 in 1 rows"),
        (pa.array([Decimal(7)], pa.decimal128(9, 1)), "7.0 in 1 rows"),
    ],
)
def test_a_label_that_is_neither_0_nor_1_is_refused(tmp_path: Path, labels: pa.Array, shown: str) -> None:
    for _ in range(2):  # what was refused counts as unchecked
        with pytest.raises(DataError) as refused:
            checked(tmp_path, labels)
        assert str(refused.value).startswith(
            f"label 'label' of day 2024-01-02: expected 0 or 1 in each row, got {shown}"
        )
        assert str(refused.value).endswith(
            "Leave such rows out with filter=\"label in (0, 1)\", or correct them in 'theirs.t' with its engine."
        )


@pytest.mark.parametrize("labels", [pa.array([True, False]), pa.array([1.0, 0.0]), pa.array([1, 0], pa.int32())])
def test_labels_of_any_type_are_read(tmp_path: Path, labels: pa.Array) -> None:
    assert checked(tmp_path, labels) == tuple(DAYS)


def test_rows_that_the_filter_leaves_out_need_no_label(tmp_path: Path) -> None:
    assert checked(tmp_path, pa.array([1, None, 7]), "label in (0, 1)") == tuple(DAYS)


def test_an_absent_label_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^features\.label 'lable'"):
        checked(tmp_path, pa.array([1]), label="lable")
