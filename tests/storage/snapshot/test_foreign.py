"""Tables of other catalogs are read under a name of ours, with the day of each row, and never written."""

import datetime
from collections.abc import Callable
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyiceberg.catalog import Catalog, load_catalog
from pyiceberg.catalog.sql import SqlCatalog
from pyiceberg.expressions import GreaterThan, LessThan
from pyiceberg.table import Table
from pyiceberg.transforms import (
    BucketTransform,
    DayTransform,
    HourTransform,
    IdentityTransform,
    MonthTransform,
    TruncateTransform,
)
from pyiceberg.typedef import Record
from sqlalchemy import text

from storage.config import TableConfig, WarehouseConfig
from storage.errors import StorageError
from storage.layout.rewrite import rewrite_days, set_layout
from storage.layout.spec import Layout
from storage.reader import DAY
from storage.snapshot.maintenance import drop_tags, expire, vacuum
from storage.snapshot.writing import append_rows, replace_days
from storage.warehouse import Warehouse
from tests.storage.foreign import add_files, register

START = datetime.datetime(2024, 2, 27, 0, 0, tzinfo=datetime.UTC)
COUNT = 120
MAPPED = '[{"field-id": 1, "names": ["id"]}, {"field-id": 2, "names": ["ds"]}]'
PARTITIONS: dict[str, list[tuple[str, Any, str]]] = {
    "nothing": [],
    "day": [("day", IdentityTransform(), "d")],
    "days(ts)": [("ts", DayTransform(), "d")],
    "hours(ts)": [("ts", HourTransform(), "h")],
    "months(day)": [("day", MonthTransform(), "m")],
    "ds": [("ds", IdentityTransform(), "p")],
    "bucket, ds": [("id", BucketTransform(3), "b"), ("ds", IdentityTransform(), "p")],
    "truncate(ds)": [("ds", TruncateTransform(6), "t")],
}


def log() -> pa.Table:
    """Rows of four days in UTC, 53 minutes apart, in a mixed order."""
    times = [START + datetime.timedelta(minutes=53 * (37 * i % COUNT)) for i in range(COUNT)]
    local = [time.astimezone(ZoneInfo("America/Los_Angeles")) for time in times]
    return pa.table(
        {
            "id": pa.array(range(COUNT), pa.int64()),
            "ts": pa.array(times, pa.timestamp("us", "UTC")),
            "wall": pa.array([time.replace(tzinfo=None) for time in local], pa.timestamp("us")),
            "day": pa.array([time.date() for time in local], pa.date32()),
            "ds": [f"{time:%Y-%m-%d}" for time in times],
            "number": pa.array([int(f"{time:%Y%m%d}") for time in times], pa.int32()),
            "odd": [f"{time:%d.%m.%Y}" for time in times],
            "iso": [f"{time:%Y-%m-%dT%H:%M:%SZ}" for time in times],
        }
    )


@pytest.fixture
def theirs(tmp_path: Path) -> Catalog:
    """A catalog of another team."""
    (tmp_path / "theirs").mkdir()
    folder = tmp_path / "theirs"
    catalog = load_catalog("theirs", type="sql", uri=f"sqlite:///{folder}/catalog.db", warehouse=f"file://{folder}")
    catalog.create_namespace("logs")
    return catalog


@pytest.fixture
def opened(theirs: Catalog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Warehouse]:
    """Opens a warehouse of ours that reads their table as `samples`."""
    for key in ("type", "uri", "warehouse"):
        monkeypatch.setenv(f"PYICEBERG_CATALOG__THEIRS__{key.upper()}", theirs.properties[key])
    monkeypatch.setattr("pyiceberg.catalog._ENV_CONFIG", type(_fresh())())

    def open_as(**keys: Any) -> Warehouse:
        tables = {"samples": TableConfig(table="theirs.logs.events", **keys)}
        return Warehouse(WarehouseConfig(tables=tables), tmp_path / "ours")

    return open_as


def _fresh() -> Any:
    from pyiceberg.utils.config import Config

    return Config()


def append(table: Table, rows: pa.Table) -> None:
    """Appends rows, each to the file of its partition. pyiceberg writes identity partitions alone."""
    fields = table.spec().fields
    if all(isinstance(field.transform, IdentityTransform) for field in fields):
        table.append(rows)
        return
    schema, groups = table.schema(), dict[tuple[Any, ...], list[int]]()
    sources = [schema.find_field(field.source_id) for field in fields]
    values = [rows[source.name] for source in sources]
    makers = [field.transform.transform(source.field_type) for field, source in zip(fields, sources, strict=True)]
    for i in range(rows.num_rows):
        raw = [value[i].value if pa.types.is_temporal(value.type) else value[i].as_py() for value in values]
        key = tuple(made(one) for made, one in zip(makers, raw, strict=True))
        groups.setdefault(key, []).append(i)
    table.refresh()
    add_files(table, [(rows.take(places), Record(*key)) for key, places in groups.items()])


def make(theirs: Catalog, partition: str) -> Table:
    """Writes the log in two commits."""
    rows = log()
    table = theirs.create_table("logs.events", rows.schema)
    with table.update_spec() as update:
        for source, transform, name in PARTITIONS[partition]:
            update.add_field(source, transform, name)
    append(table, rows.slice(0, 70))
    append(table, rows.slice(70))
    return table


def days_by_duckdb(expression: str) -> dict[datetime.date, list[int]]:
    with duckdb.connect() as connection:
        connection.execute("SET TimeZone = 'UTC'")
        connection.register("log", log())
        found = connection.sql(
            f"SELECT CAST({expression} AS DATE) d, list(id ORDER BY id) FROM log GROUP BY d ORDER BY d"
        )
        return dict(found.fetchall())


def ids_by_day(warehouse: Warehouse, **keys: Any) -> dict[datetime.date, list[int]]:
    reader = warehouse.reader(warehouse.current("samples"), [DAY, "id"], **keys)
    found: dict[datetime.date, list[int]] = {}
    for fragment in reader.fragments():
        rows = reader.read(fragment)
        assert set(rows[DAY].to_pylist()) <= {fragment.day}
        found.setdefault(fragment.day, []).extend(rows["id"].to_pylist())
    return {day: sorted(ids) for day, ids in sorted(found.items()) if ids}


@pytest.mark.one_in(6)
@pytest.mark.parametrize("partition", PARTITIONS)
@pytest.mark.parametrize(
    ("keys", "expression"),
    [
        ({}, "day"),
        ({"day_column": "ts"}, "ts"),
        ({"day_column": "ts", "day_zone": "America/Los_Angeles"}, "ts AT TIME ZONE 'America/Los_Angeles'"),
        ({"day_column": "ts", "day_zone": "Asia/Kathmandu"}, "ts AT TIME ZONE 'Asia/Kathmandu'"),
        ({"day_column": "wall"}, "wall"),
        ({"day_column": "ds"}, "ds"),
        ({"day_column": "iso", "day_zone": "Asia/Kathmandu"}, "ts AT TIME ZONE 'Asia/Kathmandu'"),
        ({"day_column": "number"}, "strptime(CAST(number AS VARCHAR), '%Y%m%d')"),
        ({"day_column": "odd", "date_format": ("%d.%m.%Y",)}, "strptime(odd, '%d.%m.%Y')"),
    ],
    ids=["date", "UTC", "zone", "odd zone", "wall clock", "text", "time in text", "number", "format"],
)
def test_the_day_of_a_row_is_its_own_however_the_table_is_partitioned(
    theirs: Catalog, opened: Callable[..., Warehouse], partition: str, keys: dict[str, Any], expression: str
) -> None:
    make(theirs, partition)
    warehouse, expected = opened(**keys), days_by_duckdb(expression)
    now = warehouse.current("samples")
    assert ids_by_day(warehouse) == expected
    assert warehouse.day_rows(now) == {day: len(ids) for day, ids in expected.items()}
    for day, ids in expected.items():
        assert warehouse.count_rows(now, [day]) == len(ids)
        reader = warehouse.reader(now, ["id"])
        of_day = [number for part in reader.fragments([day]) for number in reader.read(part)["id"].to_pylist()]
        assert sorted(of_day) == ids
    large = {day: [number for number in ids if number > 90] for day, ids in expected.items()}
    assert ids_by_day(warehouse, row_filter=GreaterThan("id", 90)) == {day: ids for day, ids in large.items() if ids}
    assert warehouse.schema(now).field(DAY).type == pa.date32()


def test_a_table_whose_partitions_changed_is_read_whole(theirs: Catalog, opened: Callable[..., Warehouse]) -> None:
    table, rows = theirs.create_table("logs.events", log().schema), log()
    table.append(rows.slice(0, 40))
    with table.update_spec() as update:
        update.add_field("ts", DayTransform(), "d")
    append(table, rows.slice(40, 40))
    with table.update_spec() as update:
        update.remove_field("d")
        update.add_field("id", BucketTransform(4), "b")
        update.add_field("day", IdentityTransform(), "day2")
    append(table, rows.slice(80))
    assert ids_by_day(opened()) == days_by_duckdb("day")
    assert ids_by_day(opened(day_column="ts")) == days_by_duckdb("ts")


def test_an_append_changes_only_the_contents_of_its_days(theirs: Catalog, opened: Callable[..., Warehouse]) -> None:
    table = make(theirs, "days(ts)")
    warehouse = opened(day_column="ts")
    before = warehouse.day_contents(warehouse.current("samples"))
    append(table, log().slice(0, 1))
    after = warehouse.day_contents(warehouse.current("samples"))
    assert [day for day in after if after[day] != before[day]] == [START.date()]


def test_a_branch_and_a_tag_are_read_by_name(theirs: Catalog, opened: Callable[..., Warehouse]) -> None:
    table = make(theirs, "ds")
    first = table.history()[0].snapshot_id
    table.manage_snapshots().create_tag(first, "audited").create_branch(first, "night").commit()
    table.append(log().slice(0, 5), branch="night")
    counts = {
        name: sum(map(len, ids_by_day(opened(branch=name)).values())) for name in (None, "main", "audited", "night")
    }
    assert counts == {None: COUNT, "main": COUNT, "audited": 70, "night": 75}
    with pytest.raises(
        StorageError, match="branch 'other' of table 'events': expected a branch or tag of the table, got"
    ):
        opened(branch="other").current("samples")


def test_a_table_is_never_changed(theirs: Catalog, opened: Callable[..., Warehouse], tmp_path: Path) -> None:
    """Not by a tag either, so rights to read are enough."""
    make(theirs, "ds")
    folder = Path(theirs.properties["uri"].removeprefix("sqlite:///")).parent
    before = {path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}
    warehouse = opened(day_column="ds")
    snapshot = warehouse.current("samples")
    rows = log().slice(0, 1)
    for change in (
        lambda: replace_days(warehouse, "samples", {START.date(): "i"}, rows.schema, rows.to_batches(), 1),
        lambda: append_rows(warehouse, "samples", rows.schema, rows.to_pylist()),
        lambda: warehouse.set_properties("samples", {"a": "b"}),
        lambda: set_layout(warehouse.table("samples"), Layout(codec="lz4")),
        lambda: rewrite_days(warehouse, "samples", [START.date()], tmp_path),
        lambda: expire(warehouse, "samples", datetime.timedelta()),
        lambda: vacuum(warehouse, "samples", datetime.timedelta(), dry_run=False),
        lambda: drop_tags(warehouse, "samples", ["a"]),
    ):
        with pytest.raises(
            StorageError, match=r"expected a table of our own .* got 'theirs.logs.events' of another engine"
        ):
            change()
    warehouse.tag(snapshot, "train-1")
    assert {path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()} == before


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (
            {"day_column": "when"},
            "source.day_column of table 'theirs.logs.events': expected a column of dates, timestamps, text or whole "
            "numbers, got no column 'when', columns: id, ts, wall, day, ds, number, odd, iso. Name the column that tells the "
            "day of a row.",
        ),
        (
            {"day_column": "odd"},
            "column 'odd' of table 'samples': expected days of the form 2025-01-31, 2025-01-31 10:00:00 or 20250131, got '29.02.2024'. "
            "Set source.date_format.",
        ),
    ],
    ids=["no column", "no day"],
)
def test_what_tells_no_day_is_refused(
    theirs: Catalog, opened: Callable[..., Warehouse], keys: dict[str, Any], message: str
) -> None:
    make(theirs, "nothing")
    warehouse = opened(**keys)
    with pytest.raises(StorageError) as error:
        warehouse.day_rows(warehouse.current("samples"))
    assert str(error.value) == message


@pytest.mark.parametrize(
    ("name", "kind"), [("day", pa.int64()), ("day", pa.string()), ("Day", pa.date32()), ("DAY", pa.float64())]
)
def test_a_column_that_the_day_would_hide_is_refused(
    theirs: Catalog, opened: Callable[..., Warehouse], name: str, kind: pa.DataType
) -> None:
    rows = log().select(["id", "ts"]).append_column(name, pa.nulls(COUNT, kind))
    theirs.create_table("logs.events", rows.schema).append(rows)
    warehouse = opened(day_column="ts")
    with pytest.raises(StorageError) as error:
        warehouse.day_rows(warehouse.current("samples"))
    assert f"{error.value}".startswith(
        f"column '{name}' of table 'theirs.logs.events': expected another name than day, the day of a row by 'ts', got "
    )
    assert f"{error.value}".endswith(f"Set source.day_column={name} if it tells the day; else rename it in the table.")


@pytest.mark.parametrize("damage", ["cut", "empty", "typed"])
def test_remedies_for_a_table_of_another_engine_work_there(
    theirs: Catalog, opened: Callable[..., Warehouse], damage: str
) -> None:
    """No ingest of ours writes it."""
    table = theirs.create_table("logs.events", log().schema) if damage == "empty" else make(theirs, "nothing")
    if damage != "empty":
        path = Path(next(iter(table.scan().plan_files())).file.file_path.removeprefix("file://"))
        rows = pq.read_table(path)
        ids = rows.schema.field("id").with_type(pa.float64())
        pq.write_table(rows.set_column(0, ids, pa.array([0.5] * len(rows))), path)
        path.write_bytes(path.read_bytes()[: -9 if damage == "cut" else None])
    with pytest.raises(StorageError) as error:
        ids_by_day(opened(day_column="ts"))
    assert "ngest" not in f"{error.value}"
    assert f"{error.value}".endswith(
        {
            "cut": "Put it back from a copy, or write its rows again with the engine of table 'theirs.logs.events'.",
            "typed": "Rewrite the file with the engine of table 'theirs.logs.events'.",
            "empty": "Write rows to 'theirs.logs.events' with its engine, or set source.branch.",
        }[damage]
    )


def test_rows_without_a_day_are_refused(theirs: Catalog, opened: Callable[..., Warehouse]) -> None:
    table = make(theirs, "nothing")
    row = log().slice(0, 1)
    table.append(row.set_column(1, "ts", pa.nulls(1, pa.timestamp("us", "UTC"))))
    warehouse = opened(day_column="ts")
    with pytest.raises(StorageError, match="expected a day in each row, got 1 rows without one"):
        warehouse.day_rows(warehouse.current("samples"))


def test_an_absent_table_is_named(opened: Callable[..., Warehouse]) -> None:
    with pytest.raises(StorageError) as error:
        opened().table("samples")
    assert str(error.value) == (
        "table 'theirs.logs.events': expected a table of that catalog and namespace, got none of that name. Correct the "
        "name. Catalogs in pyiceberg's own configuration: theirs. Otherwise set warehouse.catalog."
    )


def test_a_view_is_said_to_be_one(theirs: Catalog, opened: Callable[..., Warehouse]) -> None:
    """As Spark's JDBC catalog writes it beside the tables."""
    make(theirs, "ds")
    assert isinstance(theirs, SqlCatalog)
    with theirs.engine.begin() as connection:
        connection.execute(text("UPDATE iceberg_tables SET iceberg_type = 'VIEW'"))
    with pytest.raises(StorageError) as error:
        opened().table("samples")
    assert str(error.value) == (
        "'theirs.logs.events': expected a table, got a view, which is a query of its engine. Name the table that it "
        "reads, or have its engine write its rows to a table."
    )


def test_a_catalog_in_the_same_database_is_found_by_its_name(theirs: Catalog, tmp_path: Path) -> None:
    """As Spark's JDBC catalog, which has a name of its own there."""
    make(theirs, "ds")
    tables = {"samples": TableConfig(table="theirs.logs.events", day_column="ds")}
    warehouse = Warehouse(WarehouseConfig(catalog=dict(theirs.properties), tables=tables), tmp_path / "ours")
    assert ids_by_day(warehouse) == days_by_duckdb("ds")


@pytest.mark.parametrize("partition", ["nothing", "months(day)"])
def test_days_by_another_rule_are_other_days(
    theirs: Catalog, opened: Callable[..., Warehouse], tmp_path: Path, partition: str
) -> None:
    """Although they are of the same files: a training must not take them for what it has seen."""
    make(theirs, partition)
    found = []
    for zone in ("UTC", "America/Los_Angeles"):
        warehouse = opened(day_column="ts", day_zone=zone)
        found.append(warehouse.day_contents(warehouse.current("samples")))
    assert set(found[0].values()).isdisjoint(found[1].values())
    table = "theirs.logs.events"
    tables = {"samples": TableConfig(table=table, day_column="ts"), "b": TableConfig(table=table, day_column="wall")}
    both = Warehouse(WarehouseConfig(tables=tables), tmp_path / "ours")
    for name, expression in (("samples", "ts"), ("b", "wall")):
        expected = {day: len(ids) for day, ids in days_by_duckdb(expression).items()}
        assert both.day_rows(both.current(name)) == expected


@pytest.mark.parametrize("partition", [True, False])
def test_days_in_text_without_zeros_are_read_as_they_are_counted(
    theirs: Catalog, opened: Callable[..., Warehouse], partition: bool
) -> None:
    rows = pa.table({"id": pa.array(range(4), pa.int64()), "ds": ["1/5/2025", "01/05/2025", "1/05/2025", "1/6/2025"]})
    table = theirs.create_table("logs.events", rows.schema)
    if partition:
        with table.update_spec() as update:
            update.add_identity("ds")
    table.append(rows)
    warehouse = opened(day_column="ds", date_format=("%m/%d/%Y",))
    day = datetime.date(2025, 1, 5)
    assert warehouse.day_rows(warehouse.current("samples")) == {day: 3, datetime.date(2025, 1, 6): 1}
    reader = warehouse.reader(warehouse.current("samples"), ["id"])
    assert sorted(i for part in reader.fragments([day]) for i in reader.read(part)["id"].to_pylist()) == [0, 1, 2]


def test_a_number_that_is_too_short_is_no_day(theirs: Catalog, opened: Callable[..., Warehouse]) -> None:
    rows = pa.table({"id": [1], "number": pa.array([202511], pa.int32())})
    theirs.create_table("logs.events", rows.schema).append(rows)
    warehouse = opened(day_column="number")
    with pytest.raises(StorageError, match=r"expected days of the form .* got '202511'"):
        warehouse.day_rows(warehouse.current("samples"))


def test_a_filter_on_the_day_compares_days_not_text(theirs: Catalog, opened: Callable[..., Warehouse]) -> None:
    rows = pa.table({"id": [1, 2, 3], "day": ["20250105", "20250106", "20250301"]})
    table = theirs.create_table("logs.events", rows.schema)
    table.append(rows)
    warehouse = opened()
    assert ids_by_day(warehouse, row_filter=LessThan("day", "2025-02-01")) == {
        datetime.date(2025, 1, 5): [1], datetime.date(2025, 1, 6): [2],
    }  # fmt: skip


def test_a_column_that_only_the_partition_has_is_not_read_as_null(
    theirs: Catalog, opened: Callable[..., Warehouse], tmp_path: Path
) -> None:
    """As in tables that were migrated from Hive. The day is known, but not its text."""
    schema = pa.schema({"id": pa.int64(), "ds": pa.string()})
    table = theirs.create_table("logs.events", schema, properties={"schema.name-mapping.default": MAPPED})
    with table.update_spec() as update:
        update.add_identity("ds")
    pq.write_table(pa.table({"id": [7]}), tmp_path / "plain.parquet")
    table.refresh()
    register(table, str(tmp_path / "plain.parquet"), Record("2025-01-05"), 1)
    warehouse = opened(day_column="ds")
    assert ids_by_day(warehouse) == {datetime.date(2025, 1, 5): [7]}
    with pytest.raises(StorageError, match="expected column 'ds' in it, got only a partition of that value"):
        warehouse.reader(warehouse.current("samples"), ["id", "ds"]).fragments()


def test_a_partition_field_that_was_dropped_in_format_1_tells_nothing(
    theirs: Catalog, opened: Callable[..., Warehouse]
) -> None:
    table = theirs.create_table("logs.events", log().schema, properties={"format-version": "1"})
    with table.update_spec() as update:
        update.add_field("ts", DayTransform(), "d")
    append(table, log().slice(0, 60))
    with table.update_spec() as update:
        update.remove_field("d")
    table.refresh()
    add_files(table, [(log().slice(60), Record(*[None] * len(table.spec().fields)))])
    assert ids_by_day(opened(day_column="ts")) == days_by_duckdb("ts")


@pytest.mark.parametrize("value", [datetime.datetime(9999, 12, 31, 23, 59), datetime.datetime(1, 1, 1)])
def test_the_first_and_the_last_day_are_days(
    theirs: Catalog, opened: Callable[..., Warehouse], value: datetime.datetime
) -> None:
    rows = pa.table({"id": [1], "at": pa.array([value], pa.timestamp("us"))})
    theirs.create_table("logs.events", rows.schema).append(rows)
    warehouse = opened(day_column="at")
    assert ids_by_day(warehouse) == {value.date(): [1]}


def test_a_day_beyond_the_calendar_is_refused(theirs: Catalog, opened: Callable[..., Warehouse]) -> None:
    rows = pa.table({"id": [1], "at": pa.array([2**60], pa.timestamp("us"))})
    add_files(theirs.create_table("logs.events", rows.schema), [(rows, Record())])
    warehouse = opened(day_column="at")
    with pytest.raises(StorageError, match="expected days between the years 1 and 9999"):
        warehouse.day_rows(warehouse.current("samples"))
