"""How many distinct values all rows have, estimated from some of them."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from pipeline.data.profile import types_of
from pipeline.suggestion.facts import measure_growth, observe
from storage.query import connect

ROWS = 200_000
COLUMNS = {
    "row": (np.arange(ROWS), 1.0),
    "session": (np.arange(ROWS) // 5, 1.0),
    "few": (np.random.default_rng(1).integers(0, 500, ROWS), 0.0),
    "of_a_day": (np.arange(ROWS) // 20_000 * 10 + np.random.default_rng(2).integers(0, 10, ROWS), 0.0),
    # A share of 1 / k ** 2 of the rows has the value k, so n rows have about n ** .5 values.
    "power": (np.floor(1 / np.random.default_rng(3).random(ROWS)).astype(np.int64), 0.5),
}


def table() -> pa.Table:
    columns = {name: values for name, (values, _) in COLUMNS.items()}
    items = pa.ListArray.from_arrays(pa.array(np.arange(0, ROWS + 1, 2, dtype=np.int32)), pa.array(columns["power"]))
    label = np.random.default_rng(4).integers(0, 2, ROWS)
    return pa.table(
        {"label": label, "day": pa.array(np.zeros(ROWS, np.int32)).cast(pa.date32()), **columns}
    ).append_column("items", pa.concat_arrays([items, pa.nulls(ROWS // 2, items.type)]))


def test_distinct_values_grow_with_the_rows_by_the_law_of_heaps(tmp_path: Path) -> None:
    with connect([], tmp_path / "tmp", "512MB", threads=1) as connection:
        connection.register("rows", rows := table())
        found = measure_growth(connection, lambda names: "rows", types_of(connection, rows))
    for name, (_, expected) in COLUMNS.items():
        assert found[name] == pytest.approx(expected, abs=0.1), name
    assert found["items"] == pytest.approx(0.5, abs=0.1)


def test_counts_of_a_sample_are_those_of_all_rows(tmp_path: Path) -> None:
    """Compared with the counts of all of them."""
    rows = table().drop_columns("items")
    some = pa.concat_tables([rows.slice(start, 256) for start in range(0, ROWS, 2_560)])
    with connect([], tmp_path / "tmp", "512MB", threads=1) as connection:
        connection.register("part", some)
        seen = observe(
            connection, lambda names: "part", types_of(connection, some), len(some), "label", ROWS / len(some)
        )
    assert (seen.rows, seen.scale) == (ROWS, ROWS / len(some))
    for fact in seen.facts:
        assert (fact.rows, fact.present) == (ROWS, ROWS)
        if fact.name in COLUMNS:
            distinct = len(np.unique(COLUMNS[fact.name][0]))
            assert distinct / 2 < fact.distinct < 2 * distinct, fact.name
