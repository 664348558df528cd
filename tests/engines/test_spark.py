"""Tables that Spark writes, changes and maintains, read by us, by Spark and by pyiceberg: the same rows of the same days."""

import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pyiceberg.catalog.sql import SqlCatalog

from storage.config import TableConfig, WarehouseConfig
from storage.errors import StorageError
from storage.pages import columns as columns_module
from storage.pages.lists import open_list
from storage.reader import DAY
from storage.warehouse import Warehouse
from tests.engines.conftest import DuckDb, Spark
from tests.storage.pages.both import read_both

ROWS = """SELECT id,
  timestamp'2025-01-01 00:30:00' + make_interval(0, 0, 0, 0, CAST(id AS INT), 7, 0) AS ts,
  CAST(from_utc_timestamp(timestamp'2025-01-01 00:30:00' + make_interval(0, 0, 0, 0, CAST(id AS INT), 7, 0),
    'America/Los_Angeles') AS DATE) AS day,
  date_format(timestamp'2025-01-01 00:30:00' + make_interval(0, 0, 0, 0, CAST(id AS INT), 7, 0), 'yyyy-MM-dd') AS ds,
  CAST(date_format(timestamp'2025-01-01 00:30:00' + make_interval(0, 0, 0, 0, CAST(id AS INT), 7, 0), 'yyyyMMdd')
    AS INT) AS number,
  IF(id % 3 = 0, NULL, IF(id % 2 = 0, 'DE', 'AT')) AS country,
  CAST(id AS DOUBLE) / 7 AS num
  FROM range({first}, {end})"""
"""120 rows, one each 67 minutes. `day` is the day in Los Angeles, `ds` and `number` the day in UTC."""
MERGE_ON_READ = "'write.delete.mode'='merge-on-read', 'write.update.mode'='merge-on-read'"


def rows(first: int = 0, end: int = 120) -> str:
    return ROWS.format(first=first, end=end)


@pytest.fixture
def name(spark: Spark) -> str:
    """A table name of the test's own."""
    spark.sql("CREATE NAMESPACE IF NOT EXISTS prod.logs")
    return f"t{uuid.uuid4().hex[:12]}"


@pytest.fixture
def opened(spark: Spark, name: str, tmp_path: Path) -> Callable[..., Warehouse]:
    """Opens our warehouse with their table as `t`."""

    def open_as(**keys: Any) -> Warehouse:
        tables = {"t": TableConfig(table=f"prod.logs.{name}", **keys)}
        return Warehouse(WarehouseConfig(catalog=spark.properties("dlrm"), tables=tables), tmp_path)

    return open_as


def read(warehouse: Warehouse, columns: tuple[str, ...] = ("id", "num")) -> list[tuple[Any, ...]]:
    """Reads day by day, and checks that as many rows are read as are pinned."""
    snapshot, found = warehouse.current("t"), []
    reader = warehouse.reader(snapshot, [DAY, *columns])
    for day, count in warehouse.day_rows(snapshot).items():
        parts = [reader.read(fragment) for fragment in reader.fragments([day])]
        assert sum(part.num_rows for part in parts) == count == warehouse.count_rows(snapshot, [day])
        found += [row for part in parts for row in zip(*part.to_pydict().values(), strict=True)]
    return sorted(((str(day), *values) for day, *values in found), key=str)


def by_spark(spark: Spark, name: str, day: str = "day", columns: str = "id, num") -> list[tuple[Any, ...]]:
    return sorted(spark.sql(f"SELECT CAST(CAST({day} AS DATE) AS STRING), {columns} FROM prod.logs.{name}"), key=str)


def by_pyiceberg(spark: Spark, name: str) -> list[int]:
    table = SqlCatalog("prod", **spark.properties("prod")).load_table(f"logs.{name}")
    return sorted(table.scan(selected_fields=("id",)).to_arrow()["id"].to_pylist())


def by_duckdb(duck: DuckDb, name: str, columns: str = "id, num") -> list[tuple[Any, ...]]:
    return sorted(duck.rows("prod", f"logs.{name}", columns), key=str)


def without_day(found: list[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    return sorted((row[1:] for row in found), key=str)


DAYS: dict[str, tuple[dict[str, Any], str]] = {
    "day": ({}, "day"),
    "ts": ({"day_column": "ts"}, "ts"),
    "ts in Los Angeles": (
        {"day_column": "ts", "day_zone": "America/Los_Angeles"}, "from_utc_timestamp(ts, 'America/Los_Angeles')",
    ),
    "ds": ({"day_column": "ds"}, "ds"),
    "number": ({"day_column": "number"}, "to_date(CAST(number AS STRING), 'yyyyMMdd')"),
}  # fmt: skip
PARTITIONS = (
    "", "day", "days(ts)", "hours(ts)", "months(ts)", "ds", "country, day", "bucket(4, id), days(ts)", "truncate(7, ds)",
    "number",
)  # fmt: skip


@pytest.mark.parametrize("partition", PARTITIONS)
def test_the_day_of_a_row_is_its_own(spark: Spark, duck: DuckDb, name: str, opened: Any, partition: str) -> None:
    clause = f"PARTITIONED BY ({partition})" if partition else ""
    spark.sql(f"CREATE TABLE prod.logs.{name} USING iceberg {clause} AS {rows()}")
    for keys, day in DAYS.values():
        assert read(opened(**keys)) == by_spark(spark, name, day)
    assert [row[1] for row in sorted(read(opened()), key=lambda row: row[1])] == by_pyiceberg(spark, name)
    assert without_day(read(opened())) == by_duckdb(duck, name)


LISTS = f"""SELECT id, ts, day,
  IF(id % 5 = 0, NULL, transform(slice(sequence(1, 13), 1, CAST(id % 14 AS INT)), x -> IF(x = 4, NULL, x * id % 99)))
    AS ids,
  transform(slice(sequence(1, 13), 1, CAST(id % 6 AS INT)), x -> CAST(x AS DOUBLE) / (id + 1)) AS shares
  FROM ({rows(0, 3_000)})"""
"""Lists of numbers, of which some are null, empty or have nulls in them."""


@pytest.fixture
def ours(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Collects the paths of the list columns that our loops decode."""
    names: list[str] = []

    def open_noted(data: Any, leaf: Any, *given: Any) -> Any:
        chunk = open_list(data, leaf, *given)
        names.extend([leaf.path_in_schema] if chunk is not None else [])
        return chunk

    monkeypatch.setattr(columns_module, "open_list", open_noted)
    return names


@pytest.mark.parametrize(
    "properties",
    ["", "'write.parquet.compression-codec'='snappy'", "'write.parquet.dict-size-bytes'='64'"],
)
def test_lists_of_numbers(spark: Spark, name: str, opened: Any, ours: list[str], properties: str) -> None:
    clause = f"TBLPROPERTIES ({properties})" if properties else ""
    spark.sql(f"CREATE TABLE prod.logs.{name} USING iceberg {clause} AS {LISTS}")
    assert read(opened(), ("id", "ids", "shares")) == by_spark(spark, name, columns="id, ids, shares")
    assert {one.split(".")[0] for one in ours} == {"ids", "shares"}


@pytest.mark.parametrize(
    "options",
    [
        {"compression": "snappy"},
        {"compression": "gzip", "parquet.writer.version": "PARQUET_2_0"},
        {"compression": "zstd", "parquet.enable.dictionary": "false"},
        {"compression": "uncompressed", "parquet.dictionary.page.size": "64"},
    ],
    ids=str,
)
@pytest.mark.parametrize("legacy", [False, True])
def test_files_of_lists(spark: Spark, ours: list[str], tmp_path: Path, options: dict[str, str], legacy: bool) -> None:
    """Spark's own Parquet, also in the form of old Hive, against pyarrow. Iceberg has a writer of its own."""
    given = ", ".join(f"'{key}' '{value}'" for key, value in options.items())
    spark.sql(f"SET spark.sql.parquet.writeLegacyFormat={str(legacy).lower()}")
    try:
        spark.sql(f"INSERT OVERWRITE DIRECTORY '{tmp_path}/files' USING parquet OPTIONS ({given}) {LISTS}")
    finally:
        spark.sql("RESET spark.sql.parquet.writeLegacyFormat")
    paths = list((tmp_path / "files").glob("*.parquet"))
    batches = [pair for path in paths for pair in read_both(path, 1_000, ("ids", "id", "shares"))]
    assert sum(len(found) for found, _ in batches) == 3_000
    assert all(found.equals(expected) for found, expected in batches)
    if "parquet.writer.version" not in options:  # its second version has deltas and small pages, which pyarrow decodes
        assert {one.split(".")[0] for one in ours} == {"ids", "shares"}


def test_partitions_that_changed(spark: Spark, duck: DuckDb, name: str, opened: Any) -> None:
    spark.sql(
        f"CREATE TABLE prod.logs.{name} USING iceberg PARTITIONED BY (day) AS {rows(0, 40)}",
        f"ALTER TABLE prod.logs.{name} DROP PARTITION FIELD day",
        f"INSERT INTO prod.logs.{name} {rows(40, 60)}",
        f"ALTER TABLE prod.logs.{name} ADD PARTITION FIELD bucket(4, id)",
        f"ALTER TABLE prod.logs.{name} ADD PARTITION FIELD days(ts)",
        f"INSERT INTO prod.logs.{name} {rows(60, 120)}",
    )
    for keys, day in DAYS.values():
        assert read(opened(**keys)) == by_spark(spark, name, day)
    assert without_day(read(opened())) == by_duckdb(duck, name)


@pytest.mark.parametrize("version", [2, 3])
def test_rows_that_are_deleted_or_updated_without_rewriting(
    spark: Spark, duck: DuckDb, name: str, opened: Any, version: int
) -> None:
    properties = f"TBLPROPERTIES ('format-version'='{version}', {MERGE_ON_READ})"
    spark.sql(
        f"CREATE TABLE prod.logs.{name} USING iceberg PARTITIONED BY (days(ts)) {properties} AS {rows()}",
        f"DELETE FROM prod.logs.{name} WHERE id % 5 = 1",
        f"UPDATE prod.logs.{name} SET num = -1 WHERE id % 7 = 0",
    )
    kinds = spark.sql(f"SELECT DISTINCT content FROM prod.logs.{name}.files")
    assert (1,) in kinds  # position deletes
    for keys, day in DAYS.values():
        assert read(opened(**keys)) == by_spark(spark, name, day)
    assert without_day(read(opened())) == by_duckdb(duck, name)


def test_rows_that_are_deleted_by_value(spark: Spark, name: str, opened: Any) -> None:
    """Written through Iceberg's own library, as Flink's upserts are. DuckDB 1.5.5 also drops rows that have a null there."""
    table = f"prod.logs.{name}"
    gone = [[20250101, "DE"], [20250103, None], [20250104, "none"]]
    spark.sql(
        f"CREATE TABLE {table} USING iceberg TBLPROPERTIES ('format-version'='2') AS {rows(0, 100)}",
        {"do": "delete", "table": table, "columns": ["number", "country"], "rows": gone},
        f"INSERT INTO {table} {rows(50, 120)}",
    )
    assert (2,) in spark.sql(f"SELECT DISTINCT content FROM {table}.files")
    assert 150 < len(read(opened())) < 170
    for keys, day in DAYS.values():
        assert read(opened(**keys)) == by_spark(spark, name, day)


def test_columns_that_were_added_with_a_default_renamed_or_dropped(
    spark: Spark, duck: DuckDb, name: str, opened: Any
) -> None:
    table = f"prod.logs.{name}"
    spark.sql(f"CREATE TABLE {table} USING iceberg TBLPROPERTIES ('format-version'='3') AS {rows(0, 60)}")
    spark.sql({"do": "default", "table": table, "column": "bonus", "value": 42.5})
    spark.sql(
        f"ALTER TABLE {table} RENAME COLUMN num TO price",
        f"ALTER TABLE {table} DROP COLUMN number",
        f"INSERT INTO {table} SELECT id, ts, day, ds, country, num, 7 FROM ({rows(60, 120)})",
    )
    assert read(opened(), ("id", "price", "bonus")) == by_spark(spark, name, "day", "id, price, bonus")
    assert "number" not in opened().schema(opened().current("t")).names
    assert without_day(read(opened(), ("id", "price", "bonus"))) == by_duckdb(duck, name, "id, price, bonus")


def test_files_that_were_registered(spark: Spark, duck: DuckDb, name: str, opened: Any, tmp_path: Path) -> None:
    """By the name mapping of `add_files`, without field ids."""
    spark.sql(f"CREATE TABLE prod.logs.{name} USING iceberg AS {rows(0, 60)}")
    spark.sql(f"INSERT OVERWRITE DIRECTORY '{tmp_path}/plain' USING parquet {rows(60, 120)}")
    spark.sql(f"CALL prod.system.add_files(table => 'logs.{name}', source_table => '`parquet`.`{tmp_path}/plain`')")
    assert read(opened()) == by_spark(spark, name)
    assert without_day(read(opened())) == by_duckdb(duck, name)


def test_maps_are_read_by_key_and_structs_do_no_harm(spark: Spark, name: str, opened: Any) -> None:
    spark.sql(
        f"CREATE TABLE prod.logs.{name} USING iceberg PARTITIONED BY (days(ts)) AS "
        f"SELECT *, map(1, 0.5f, CAST(id % 3 AS INT) + 2, num) AS dense, map(4, array(id, NULL)) AS ids, "
        f"map(9, map(id, 2.0f)) AS scored, named_struct('a', 1) AS inner FROM ({rows()})"
    )
    assert read(opened(day_column="ts")) == by_spark(spark, name, "ts")
    columns = ("id", "dense_1", "dense_3", "ids_4", "scored_9", "scored_9_scores")
    found = read(opened(day_column="ts"), columns)
    looked_up = "id, dense[1], dense[3], ids[4], map_keys(scored[9]), map_values(scored[9])"
    assert sorted(map(str, found)) == sorted(map(str, by_spark(spark, name, "ts", looked_up)))


def test_a_branch_that_an_audit_writes(spark: Spark, name: str, opened: Any) -> None:
    table = f"prod.logs.{name}"
    spark.sql(
        f"CREATE TABLE {table} USING iceberg PARTITIONED BY (days(ts)) AS {rows(0, 60)}",
        f"ALTER TABLE {table} CREATE BRANCH audit",
        f"INSERT INTO {table}.branch_audit {rows(60, 120)}",
    )
    assert len(read(opened(day_column="ts"))) == 60
    assert len(read(opened(day_column="ts", branch="audit"))) == 120


@pytest.mark.parametrize(
    ("change", "keys", "message"),
    [
        (
            "INSERT INTO {table} SELECT 1, NULL, NULL, NULL, NULL, 'DE', 1.0",
            {},
            "expected a day in each row, got 1 rows",
        ),
        ("ALTER TABLE {table} RENAME COLUMN day TO Date", {}, "got no column 'day', columns: id, ts, Date"),
        (
            "ALTER TABLE {table} RENAME COLUMN day TO Date",
            {"day_column": "num"},
            "expected a column of dates, .* got 'num'",
        ),
    ],
    ids=["no day", "no column", "no days"],
)
def test_what_is_refused_says_what_to_do(
    spark: Spark, name: str, opened: Any, change: str, keys: dict[str, Any], message: str
) -> None:
    table = f"prod.logs.{name}"
    spark.sql(f"CREATE TABLE {table} USING iceberg AS {rows()}", change.format(table=table))
    with pytest.raises(StorageError, match=message):
        read(opened(**keys))


def test_other_formats_are_refused(spark: Spark, name: str, opened: Any) -> None:
    properties = "TBLPROPERTIES ('write.format.default'='orc')"
    spark.sql(f"CREATE TABLE prod.logs.{name} USING iceberg PARTITIONED BY (day) {properties} AS {rows()}")
    with pytest.raises(StorageError, match="expected a Parquet file, got one in ORC"):
        read(opened())
