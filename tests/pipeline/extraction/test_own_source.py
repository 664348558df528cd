"""A table takes rows of its own source, and of another only if somebody asks for it."""

from functools import partial
from typing import Any

import pyarrow as pa
import pytest

from pipeline.errors import DataError

ROWS = {"user": [1, 2], "label": [0, 1]}
DAY = {"day": "2024-01-01"}


@pytest.fixture
def ingest(ingest: Any) -> Any:
    """As a user has it."""
    return partial(ingest, other_sources=False)


def test_rows_of_another_source_are_refused_and_nothing_changes(
    ingest: Any, stored: Any, put: Any, tmp_path: Any
) -> None:
    put("first.parquet", **ROWS)
    put("second.parquet", user=[7, 8, 9], label=[0, 1, 1], other=pa.array(["a", "b", "c"]))
    ingest(DAY | {"path": "first.parquet"})
    before = stored()
    for force in (False, True):
        with pytest.raises(DataError) as error:
            ingest({"day": "2024-01-02", "path": "second.parquet"}, force=force)
    assert str(error.value) == (
        f"table 'events': expected rows of its own source, {tmp_path}/first.parquet, got {tmp_path}/second.parquet. "
        "Give these rows a table of their own: name=NAME; or let them into this one: ingest.other_sources=true."
    )
    assert stored().equals(before)
    ingest({"day": "2024-01-02", "path": "second.parquet"}, other_sources=True)
    assert len(stored()) == 5
    for path in ("second.parquet", "first.parquet"):
        ingest(DAY | {"path": path})  # both are its own now


SAME = [
    ("clicks/2024-01-01.parquet", "clicks/2024-01-02.parquet"),
    ("clicks/day=2024-01-01/a.parquet", "clicks/day=2024-01-02/a.parquet"),
    ("clicks/20240101/a.parquet", "clicks/20240131/a.parquet"),
    ("clicks/2024/01/01/a.parquet", "clicks/2024/02/01/a.parquet"),
    ("clicks/a.parquet", "clicks/*.parquet"),
    ("clicks/x/a.parquet", "clicks/**/*.parquet"),
    ("clicks/*.parquet", "clicks/a.parquet"),
    ("clicks/a.parquet", "./clicks/../clicks/a.parquet"),
    ("clicks/a.parquet", ["clicks/a.parquet"]),
]
OTHER = [
    ("clicks/a.parquet", "clicks/b.parquet"),
    ("clicks/a1.parquet", "clicks/a2.parquet"),
    ("clicks/a.parquet", "others/a.parquet"),
    ("clicks/*.parquet", "clicks/x/a.parquet"),
    ("clicks/a.parquet", ["clicks/a.parquet", "clicks/b.parquet"]),
    ("clicks/*.parquet", "others/*.parquet"),
]


@pytest.mark.one_in(5)
@pytest.mark.parametrize(("old", "new", "same"), [(*one, True) for one in SAME] + [(*one, False) for one in OTHER])
def test_files_of_other_days_are_of_the_same_source(old: Any, new: Any, same: bool, ingest: Any, put: Any) -> None:
    for path in (old, *([new] if isinstance(new, str) else new)):
        put(path.replace("**", "x").replace("*", "z").removeprefix("./"), **ROWS)
    ingest(DAY | {"path": old})
    if same:
        ingest(DAY | {"path": new}, force=True)
    else:
        with pytest.raises(DataError, match="expected rows of its own source"):
            ingest(DAY | {"path": new})


def test_a_table_of_an_earlier_version_takes_the_first_source_as_its_own(ingest: Any, put: Any, warehouse: Any) -> None:
    put("first.parquet", **ROWS)
    put("second.parquet", **ROWS)
    ingest(DAY | {"path": "first.parquet"})
    with warehouse.table("events").transaction() as transaction:
        transaction.remove_properties("dlrm.sources")
    ingest(DAY | {"path": "second.parquet"})
    with pytest.raises(DataError, match=r"second\.parquet, got"):
        ingest(DAY | {"path": "first.parquet"})
