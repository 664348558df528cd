"""Filters: rows are those of a test of each row, whatever statistics files have, and what cannot pass is not read."""

import datetime
import itertools
import math
import operator
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pyiceberg.expressions.parser import parse
from pyiceberg.typedef import Record
from pyiceberg.types import DoubleType, LongType

from storage.config import WarehouseConfig
from storage.layout.rewrite import set_layout
from storage.layout.spec import Layout
from storage.reader import READ_ROWS, SnapshotReader, SnapshotRef
from storage.snapshot.row_groups import FileColumn, GroupFilter
from storage.snapshot.writing import append_rows, replace_days
from storage.warehouse import Warehouse
from storage.writer import MEASURED_COLUMNS
from tests.storage.foreign import add_files, delete_rows, delete_values

DAY = datetime.date(2024, 1, 1)
PARTITION = Record((DAY - datetime.date(1970, 1, 1)).days)
MICROSECOND = datetime.timedelta(microseconds=1)
TIME = datetime.datetime(2024, 1, 1)
VALUES: dict[str, list[Any]] = {
    "number": [-7, -1, 0, 1, 3, 2**31 - 1],
    "small": [0.1, -0.0, 0.0, 2.5, -3.25, math.inf, math.nan],
    "single": [0.1, 0.7, -0.3, 2.5, math.nan],
    "large": [0.1, 0.0, -0.0, -1.5, -math.inf, math.nan, 1e300],
    "text": ["", "a", "ab", "abé", "b" * 70, "ü"],
    "date": [DAY + datetime.timedelta(days) for days in (-400, 0, 1, 35)],
    "time": [TIME + step for step in (MICROSECOND, -MICROSECOND, datetime.timedelta(days=3))],
    "zoned": [TIME.replace(tzinfo=datetime.UTC) + MICROSECOND * step for step in (0, 1, 999, 10**12)],
    "flag": [False, True],
}
SCHEMA = pa.schema(
    [
        ("day", pa.date32()), ("id", pa.int64()), ("number", pa.int32()), ("small", pa.float32()), ("single", pa.float32()),
        ("large", pa.float64()), ("text", pa.string()), ("date", pa.date32()), ("time", pa.timestamp("us")),
        ("zoned", pa.timestamp("us", "UTC")), ("flag", pa.bool_()), ("tags", pa.list_(pa.int64())),
    ]
)  # fmt: skip
OPERATORS: dict[str, Callable[[Any, Any], bool]] = {
    "=": operator.eq, "!=": operator.ne, "<": operator.lt, ">=": operator.ge, ">": operator.gt, "<=": operator.le,
}  # fmt: skip

Test = Callable[[dict[str, Any]], bool]


def make_rows(random: np.random.Generator, count: int, first: int, clustered: bool) -> pa.Table:
    """Rows of which a part of the values are null or NaN. Clustered ones have few values close to each other."""
    columns: dict[str, list[Any]] = {"day": [DAY] * count, "id": list(range(first, first + count))}
    for name, values in VALUES.items():
        places = random.integers(0, len(values), count)
        if clustered:
            places = np.sort(places) if random.random() < 0.5 else np.repeat(places[::6], 6)[:count]
        gap = random.choice([0.0, 0.2, 1.0], p=[0.5, 0.4, 0.1])
        columns[name] = [None if random.random() < gap else values[i] for i in places]
    columns["tags"] = [None if i % 5 == 0 else list(range(i % 4)) for i in range(count)]
    return pa.table({name: pa.array(columns[name], SCHEMA.field(name).type) for name in SCHEMA.names})


def written(value: Any) -> str:
    if isinstance(value, bool):
        return f"{value}".lower()
    if isinstance(value, datetime.datetime):
        return f"'{value.isoformat(timespec='microseconds')}'"
    return f"{value:f}".rstrip("0") + "0" if isinstance(value, float) else f"'{value}'" if isinstance(value, str | datetime.date) else f"{value}"  # fmt: skip


def leaf(draw: st.DrawFn, negated: bool) -> tuple[str, Test]:
    """Draws a comparison, and its meaning or that of its opposite. No comparison with null is true."""
    name = draw(st.sampled_from(list(VALUES)))
    kind = np.float32 if name == "single" else (lambda value: value)  # Iceberg rounds a constant to the column's type
    usable = [value for value in VALUES[name] if not isinstance(value, float) or (math.isfinite(value) and value < 1e9)]
    kinds = ["compare", "among", "null", *(["nan"] if isinstance(VALUES[name][0], float) else []), *(["like"] if name == "text" else [])]  # fmt: skip
    which, opposite = draw(st.sampled_from(kinds)), draw(st.booleans())
    no, true = " not" if opposite else "", opposite == negated

    def valid(test: Callable[[Any], bool]) -> Test:
        return lambda row: row[name] is not None and test(row[name]) == true

    if which == "null":
        return f"{name} is{no} null", lambda row: (row[name] is None) == true
    if which == "nan":
        return f"{name} is{no} nan", valid(math.isnan)
    if which == "like":
        prefix = draw(st.sampled_from(["a", "ab", "b", "bbb", "ü", "c"]))
        return f"{name}{no} like '{prefix}%'", valid(lambda value: bool(value.startswith(prefix)))
    if which == "among":
        some = draw(st.lists(st.sampled_from(usable), min_size=1, max_size=3))
        text = f"{name}{no} in ({', '.join(map(written, some))})"
        return text, valid(lambda value: any(value == kind(one) for one in some))
    sign, value = draw(st.sampled_from(list(OPERATORS))), draw(st.sampled_from(usable))
    test = OPERATORS[sign]
    return f"{name} {sign} {written(value)}", lambda row: row[name] is not None and test(row[name], kind(value)) != negated  # fmt: skip


@st.composite
def filters(draw: st.DrawFn, depth: int = 2, negated: bool = False) -> tuple[str, Test]:
    """Draws a filter of the language, and the same as a function of a row."""
    joined = draw(st.sampled_from(["and", "or", "not", "leaf", "leaf"])) if depth else "leaf"
    if joined == "leaf":
        return leaf(draw, negated)
    if joined == "not":
        text, test = draw(filters(depth - 1, not negated))
        return f"not ({text})", test
    (left, first), (right, second) = draw(filters(depth - 1, negated)), draw(filters(depth - 1, negated))
    both = (joined == "and") != negated
    return f"({left}) {joined} ({right})", lambda row: first(row) and second(row) if both else first(row) or second(row)


Stored = tuple[Warehouse, SnapshotRef, list[dict[str, Any]]]


@pytest.fixture(scope="module", params=[1, *(pytest.param(seed, marks=pytest.mark.nightly) for seed in (2, 3))])
def stored(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Stored:
    """A table of our files, another engine's with and without statistics, deletes, and columns that became wider."""
    random = np.random.default_rng(request.param)
    warehouse = Warehouse(WarehouseConfig(row_group_rows=8, file_rows=40), tmp_path_factory.mktemp("warehouse"))
    starts = itertools.count(0, 60)
    own = [make_rows(random, 60, next(starts), clustered) for clustered in (True, False)]
    rows = pa.concat_tables(own)
    replace_days(warehouse, "events", {DAY: "i"}, SCHEMA, rows.to_batches(), rows.num_rows)
    theirs = []
    for options in ({}, {"write_statistics": False}, {"write_statistics": ["text", "large"]}, {"version": "1.0"}):
        theirs.append(make_rows(random, 60, next(starts), True))
        table = warehouse.table("events")
        [path] = add_files(table, [(theirs[-1], PARTITION)], row_group_size=8, **options)
        delete_rows(warehouse.table("events"), {path: [1, *range(16, 24), 59]}, PARTITION)
        if options.get("write_statistics") is False:
            with warehouse.table("events").update_schema() as update:
                update.update_column("number", LongType())
                update.update_column("small", DoubleType())
    gone = {int(part["id"][i].as_py()) for part in theirs for i in (1, *range(16, 24), 59)}
    by_value = pa.table({"id": pa.array([5, 130], pa.int64())})
    delete_values(warehouse.table("events"), by_value, PARTITION)
    found = [row for row in pa.concat_tables([*own, *theirs]).to_pylist() if row["id"] not in gone | {5, 130}]
    return warehouse, warehouse.current("events"), found


@pytest.mark.slow
@settings(max_examples=120, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(drawn=filters(), columns=st.sampled_from([["id"], ["id", "tags"], ["tags", "text", "id", "small"]]))
def test_a_filter_keeps_the_rows_that_pass_one_by_one(
    stored: Stored, drawn: tuple[str, Test], columns: list[str]
) -> None:
    warehouse, snapshot, rows = stored
    text, test = drawn
    expected = [row for row in rows if test(row)]
    reader = warehouse.reader(snapshot, columns, parse(text))
    found = [row for fragment in reader.fragments() for row in reader.read(fragment).to_pylist()]
    key = operator.itemgetter("id")
    assert repr(sorted(found, key=key)) == repr([{name: row[name] for name in columns} for row in sorted(expected, key=key)])  # fmt: skip


def read(reader: SnapshotReader) -> list[int]:
    return [number for fragment in reader.fragments() for number in reader.read(fragment)["id"].to_pylist()]


def chunk_bytes(reader: SnapshotReader, names: set[str], groups: Callable[[int], bool] = lambda group: True) -> int:
    """Stored bytes of some columns in those row groups of the table's only file."""
    metadata = pq.read_metadata(reader.fragments()[0].path.removeprefix("file://"))
    chunks = [metadata.row_group(i).column(j) for i in filter(groups, range(metadata.num_row_groups)) for j in range(metadata.num_columns)]  # fmt: skip
    return sum(chunk.total_compressed_size for chunk in chunks if chunk.path_in_schema.split(".")[0] in names)


@pytest.fixture
def sorted_table(tmp_path: Path) -> tuple[Warehouse, SnapshotRef]:
    """1,000 rows in row groups of 100, sorted by `id`. `other` has all its values in each row group."""
    warehouse = Warehouse(WarehouseConfig(row_group_rows=100), tmp_path / "home")
    ids = np.random.default_rng(1).permutation(1_000)
    rows = pa.table({
        "day": pa.array([DAY] * 1_000, pa.date32()), "id": ids, "other": ids % 10, "tags": [[i, i] for i in ids.tolist()],
    })  # fmt: skip
    replace_days(warehouse, "events", {DAY: "i"}, rows.schema, rows.slice(0, 0).to_batches(), 0)
    set_layout(warehouse.table("events"), Layout(row_group_rows=100, order_by=("id",)))
    return warehouse, replace_days(warehouse, "events", {DAY: "i"}, rows.schema, rows.to_batches(), 1_000)


@pytest.mark.parametrize(
    ("text", "kept", "groups"),
    [("id >= 250 and id < 310", range(250, 310), {2, 3}), ("id in (5, 905)", [5, 905], {0, 9}), ("id < 0", [], set())],
)
def test_row_groups_without_a_row_in_their_bounds_are_not_read(
    sorted_table: tuple[Warehouse, SnapshotRef], text: str, kept: Any, groups: set[int]
) -> None:
    warehouse, snapshot = sorted_table
    reader = warehouse.reader(snapshot, ["id", "tags"], parse(text))
    assert read(reader) == list(kept)
    assert reader.row_groups_skipped == 10 - len(groups)
    assert reader.bytes_read == chunk_bytes(reader, {"id", "tags"}, lambda group: group in groups)
    assert reader.bytes_stored == chunk_bytes(reader, {"day", "id", "other", "tags"})


def test_of_row_groups_without_a_row_that_passes_only_the_columns_of_the_filter_are_read(
    sorted_table: tuple[Warehouse, SnapshotRef],
) -> None:
    warehouse, snapshot = sorted_table
    reader = warehouse.reader(snapshot, ["id", "tags"], parse("other = 3 and id not in (403, 413) and id != 7"))
    assert len(read(reader)) == 98
    assert (reader.row_groups_skipped, reader.bytes_read) == (0, chunk_bytes(reader, {"id", "other", "tags"}))
    reader = warehouse.reader(snapshot, ["tags", "id"], parse("other = 5 and id = 504"))
    assert read(reader) == []
    assert reader.row_groups_skipped == 10
    of_filter = chunk_bytes(reader, {"id", "other"}, lambda group: group == 5)
    assert reader.bytes_read == of_filter  # nine row groups by their statistics, one by its rows


def test_a_reader_of_fewer_columns_filters_by_a_column_that_it_does_not_return(
    sorted_table: tuple[Warehouse, SnapshotRef],
) -> None:
    warehouse, snapshot = sorted_table
    wide = warehouse.reader(snapshot, ["id", "other", "tags"], parse("other = 3"))
    fragments = wide.fragments()
    narrow = wide.narrow(["id"])
    assert [number for one in fragments for number in narrow.read(one)["id"].to_pylist()] == list(range(3, 1_000, 10))


@pytest.mark.one_in(4)
@pytest.mark.parametrize("passing", [set(chosen) for n in range(4) for chosen in itertools.combinations(range(3), n)])
@pytest.mark.parametrize("deleted", [False, True])
def test_columns_are_aligned_where_some_parts_of_a_row_group_have_no_row(
    tmp_path: Path, passing: set[int], deleted: bool
) -> None:
    warehouse = Warehouse(WarehouseConfig(row_group_rows=3 * READ_ROWS), tmp_path / "home")
    count = 2 * READ_ROWS + 777
    parts = np.arange(count) // READ_ROWS
    mark = np.where(np.isin(parts, list(passing)) & (np.arange(count) % 3 == 0), 1, 0)
    rows = pa.table({
        "day": pa.array([DAY] * count, pa.date32()), "id": np.arange(count), "mark": mark,
        "tags": pa.array([[i] * (i % 4) for i in range(count)]), "text": [f"{i:x}" for i in range(count)],
    })  # fmt: skip
    snapshot = replace_days(warehouse, "events", {DAY: "i"}, rows.schema, rows.to_batches(), count)
    gone = [0, 1, 2, READ_ROWS - 1, READ_ROWS, count - 1] if deleted else []
    if deleted:
        [fragment] = warehouse.reader(snapshot, ["id"]).fragments()
        delete_rows(warehouse.table("events"), {fragment.path: gone}, PARTITION)
        snapshot = warehouse.current("events")
    reader = warehouse.reader(snapshot, ["tags", "id", "text"], parse("mark = 1"))
    [fragment] = reader.fragments()
    keep = pa.array((mark == 1) & ~np.isin(np.arange(count), gone))
    assert reader.read(fragment).to_pylist() == rows.filter(keep).select(["tags", "id", "text"]).to_pylist()
    assert reader.row_groups_skipped == (not passing)


@pytest.mark.parametrize(
    ("values", "kind", "text", "kept"),
    [
        (pa.array([1, 2], pa.uint32()), pa.int64(), "x > 2", False),
        (pa.array([1, 2**31], pa.uint32()), pa.int64(), "x > 2", True),
        (pa.array([1_000, 2_000], pa.timestamp("ns")), pa.timestamp("us"), "x > '1970-01-01T00:00:00.000002'", False),
        (pa.array([1_000, 2_001], pa.timestamp("ns")), pa.timestamp("us"), "x > '1970-01-01T00:00:00.000002'", True),
        (pa.array(["a", "b" * 5_000]), pa.string(), "x > 'c'", True),  # Arrow writes no bounds of long text
        (pa.array(["a", "b"]), pa.string(), "x > 'c'", False),
        (pa.array(["a", "b"]), pa.string(), "x is null", False),
        (pa.array([None, None], pa.string()), pa.string(), "x > 'c'", False),
        (pa.array([0.1, math.nan], pa.float32()), pa.float32(), "x = 0.1", True),
        (pa.array([0.1, math.nan], pa.float32()), pa.float32(), "x != 0.1", True),
        (pa.array([0.1, math.nan], pa.float32()), pa.float32(), "x > 0.2", False),
        (pa.array([math.nan, math.nan]), pa.float64(), "x > 0.2", True),  # no bounds
        (pa.array([0.1, math.nan]), pa.float64(), "not (x <= 0.2)", True),
        (pa.array([1, 2]), pa.int64(), "not (x <= 2)", False),
        (pa.array([-0.0, -0.0]), pa.float64(), "x in (0.0, 5.0)", True),
        (pa.array([0.0, 0.0]), pa.float32(), "x = -0.0", True),
        (pa.array([-0.0, 0.0]), pa.float64(), "x < 0.0", True),  # bounds are widened by a step
        (pa.array([[1], [2]]), pa.list_(pa.int64()), "x is null", True),  # nulls of lists are not counted
    ],
)
def test_statistics_of_another_writer_exclude_what_they_prove(
    tmp_path: Path, values: pa.Array, kind: pa.DataType, text: str, kept: bool
) -> None:
    warehouse = Warehouse(WarehouseConfig(), tmp_path / "home")
    schema = pa.schema([("day", pa.date32()), ("x", kind)])
    replace_days(warehouse, "events", {DAY: "i"}, schema, [], 0)
    pq.write_table(pa.table({"x": values}), tmp_path / "theirs.parquet")
    file = pq.ParquetFile(tmp_path / "theirs.parquet")
    table = warehouse.table("events")
    made = GroupFilter(table.schema(), parse(text), {"x": table.schema().as_arrow().field("x").type})
    known = {"x": FileColumn("x", file.schema_arrow.field("x").type)}
    assert made.may_match(file.metadata.row_group(0), known) == kept
    assert made.may_match(file.metadata.row_group(0), {})


@pytest.mark.one_in(4)
@pytest.mark.parametrize("kind", [pa.float32(), pa.float64()], ids=str)
@pytest.mark.parametrize("statistics", [True, False])
def test_zeros_and_nan_mean_the_same_to_filters_statistics_and_deletes(
    tmp_path: Path, kind: pa.DataType, statistics: bool
) -> None:
    """One value a row group, so that statistics decide wherever they can."""
    values = [-1.0, -0.0, 0.0, 0.5, 2.0, math.nan, -math.nan, math.inf, -math.inf, None]
    rows = pa.table({"id": range(len(values)), "x": pa.array(values, kind)})
    warehouse = Warehouse(WarehouseConfig(), tmp_path / "home")
    schema = pa.schema([("day", pa.date32()), ("id", pa.int64()), ("x", kind)])
    replace_days(warehouse, "events", {DAY: "i"}, schema, [], 0)
    stored = rows.add_column(0, "day", pa.array([DAY] * len(values)))
    add_files(warehouse.table("events"), [(stored, PARTITION)], row_group_size=1, write_statistics=statistics)

    def found(text: str) -> set[int]:
        return set(read(warehouse.reader(warehouse.current("events"), ["id"], parse(text))))

    known = set(range(len(values) - 1))
    for constant in ("0.0", "-0.0", "0.5", "-1.0"):
        for comparison in (*(f"x {sign} {constant}" for sign in OPERATORS), f"x in ({constant}, 7.0)", "x is nan"):
            passing, others = found(comparison), found(f"not ({comparison})")
            assert passing | others == known, comparison
            assert not passing & others, comparison
            assert found(f"not (not ({comparison}))") == passing
        assert found(f"x = {constant}") == found(f"x in ({constant})") == found(f"x in (9.0, {constant})")
        assert found(f"x != {constant}") == found(f"x not in ({constant}, 9.0)") == known - found(f"x = {constant}")
    assert found("x = 0.0") == found("x in (-0.0, 9.0)") == {1, 2}
    assert found("not (x <= 0.5 or x > 0.5)") == found("x is nan") == {5, 6}
    delete_values(warehouse.table("events"), pa.table({"x": pa.array([0.0, math.nan], kind)}), PARTITION)
    assert found("id >= 0") == {0, 3, 4, 7, 8, 9}


def test_a_column_that_a_file_lacks_is_null_or_has_its_default(sorted_table: tuple[Warehouse, SnapshotRef]) -> None:
    warehouse, _ = sorted_table
    with warehouse.table("events").update_schema() as update:
        update.add_column("later", LongType())
    schema = pa.schema([("day", pa.date32()), ("id", pa.int64()), ("later", pa.int64())])
    append_rows(warehouse, "events", schema, [{"day": DAY, "id": 1_000, "later": 1}])
    for text, kept, skipped in (
        ("later is null and id < 5", 5, 10),
        ("later = 1", 1, 10),
        ("later is not null", 1, 10),
    ):
        reader = warehouse.reader(warehouse.current("events"), ["id"], parse(text))
        assert (len(read(reader)), reader.row_groups_skipped) == (kept, skipped)


def test_sorted_and_first_columns_get_statistics_and_lists_none(tmp_path: Path) -> None:
    warehouse = Warehouse(WarehouseConfig(), tmp_path / "home")
    names = [f"c{i}" for i in range(MEASURED_COLUMNS + 20)]
    columns = {"day": pa.array([DAY] * 3, pa.date32()), **dict.fromkeys(names, pa.array([3, 1, 2])), "tags": [[1]] * 3}
    rows = pa.table(columns)
    replace_days(warehouse, "events", {DAY: "i"}, rows.schema, [], 0)
    set_layout(warehouse.table("events"), Layout(first=("c70", "tags"), order_by=(names[-1],)))
    snapshot = replace_days(warehouse, "events", {DAY: "i"}, rows.schema, rows.to_batches(), 3)
    [fragment] = warehouse.reader(snapshot, ["day"]).fragments()
    group = pq.read_metadata(fragment.path.removeprefix("file://")).row_group(0)
    chunks = [group.column(i) for i in range(group.num_columns)]
    expected = {"day", names[-1], "c70", *names[: MEASURED_COLUMNS - 3]}
    assert {chunk.path_in_schema for chunk in chunks if chunk.is_stats_set} == expected
