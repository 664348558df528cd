"""Tables of ours that Spark reads, changes and maintains: nothing is doubled, lost or called what it is not."""

import datetime
import uuid
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from storage.config import WarehouseConfig
from storage.errors import StorageError
from storage.reader import DAY
from storage.snapshot.maintenance import expire
from storage.snapshot.writing import replace_days
from storage.warehouse import Warehouse
from tests.engines.conftest import DuckDb, Spark

DAYS = [datetime.date(2025, 1, day) for day in (1, 2, 3)]
WRITTEN = {day: f"input-{day}" for day in DAYS}
TABLE = pa.table(
    {
        DAY: pa.array([day for day in DAYS for _ in range(50)], pa.date32()),
        "id": pa.array(range(150), pa.int64()),
        "num": [i / 7 for i in range(150)],
        "tags": [list(range(i % 4)) for i in range(150)],
        "country": [None if i % 3 == 0 else "DE" for i in range(150)],
    }
)


@pytest.fixture
def own(spark: Spark, tmp_path: Path) -> Warehouse:
    return Warehouse(WarehouseConfig(catalog=spark.properties("dlrm")), tmp_path)


@pytest.fixture
def name(own: Warehouse) -> str:
    """A table of three days that was written twice."""
    found = f"t{uuid.uuid4().hex[:12]}"
    old = TABLE.set_column(2, "num", pa.array([-1.0] * 150))
    replace_days(own, found, dict.fromkeys(DAYS, "earlier"), old.schema, old.to_batches(), 150)
    replace_days(own, found, WRITTEN, TABLE.schema, TABLE.to_batches(), 150)
    return found


def read(own: Warehouse, name: str) -> list[tuple[Any, ...]]:
    reader = own.reader(own.current(name), [DAY, "id", "num", "tags", "country"])
    parts = [reader.read(fragment).to_pydict() for fragment in reader.fragments()]
    found = [row for part in parts for row in zip(*part.values(), strict=True)]
    return sorted((str(day), number, num, tuple(tags), country) for day, number, num, tags, country in found)


def by_spark(spark: Spark, name: str) -> list[tuple[Any, ...]]:
    found = spark.sql(f"SELECT CAST(day AS STRING), id, num, tags, country FROM dlrm.dlrm.{name}")
    return sorted((day, number, num, tuple(tags), country) for day, number, num, tags, country in found)


def test_spark_and_duckdb_read_what_we_write(spark: Spark, duck: DuckDb, own: Warehouse, name: str) -> None:
    assert by_spark(spark, name) == read(own, name)
    found = duck.rows("dlrm", f"dlrm.{name}", "CAST(day AS VARCHAR), id, num, tags, country")
    assert sorted((*row[:3], tuple(row[3]), row[4]) for row in found) == read(own, name)
    assert len(read(own, name)) == 150


@pytest.mark.parametrize(
    ("filtered", "kept"),
    [
        ("at >= TIMESTAMP'2025-01-02 12:00:00 UTC'", range(75, 150)),
        ("at < TIMESTAMP'2025-01-01 01:00:00 UTC'", range(3)),
        ("local > TIMESTAMP_NTZ'2025-01-03 00:00:00'", range(101, 150)),
        ("bought = DATE'2025-01-02' AND id < 60", range(50, 60)),
        ("late IS NULL", range(150)),
    ],
)
def test_spark_skips_no_row_by_the_bounds_that_we_write(
    spark: Spark, own: Warehouse, filtered: str, kept: range
) -> None:
    """It reads only files that may have such a row, and believes our metadata."""
    table = f"t{uuid.uuid4().hex[:12]}"
    start = datetime.datetime(2025, 1, 1, tzinfo=datetime.UTC)
    times = [start + datetime.timedelta(minutes=1_440 / 50 * i) for i in range(150)]
    rows = TABLE.select([DAY, "id"])
    rows = rows.append_column("at", pa.array(times, pa.timestamp("us", "UTC")))
    rows = rows.append_column("local", pa.array([time.replace(tzinfo=None) for time in times], pa.timestamp("us")))
    rows = rows.append_column("bought", TABLE.column(DAY))
    rows = rows.append_column("late", pa.nulls(150, pa.timestamp("us")))
    replace_days(own, table, WRITTEN, rows.schema, rows.to_batches(), 150)
    found = spark.sql(f"SELECT id FROM dlrm.dlrm.{table} WHERE {filtered}")
    assert sorted(one for (one,) in found) == list(kept)


def test_bounds_of_times_that_spark_wrote_are_those_of_its_rows(spark: Spark, own: Warehouse) -> None:
    table = f"t{uuid.uuid4().hex[:12]}"
    spark.sql(f"CREATE TABLE dlrm.dlrm.{table} (day DATE, at TIMESTAMP) USING iceberg PARTITIONED BY (day)")
    values = (
        "(DATE'2025-01-01', TIMESTAMP'2025-01-01 00:00:01 UTC'), (DATE'2025-01-01', TIMESTAMP'1969-12-31 23:59:59 UTC')"
    )
    spark.sql(f"INSERT INTO dlrm.dlrm.{table} VALUES {values}")
    opened = Warehouse(WarehouseConfig(catalog=spark.properties("dlrm")), own.home)
    assert opened.day_bounds(opened.current(table), "at") == {DAYS[0]: (-1_000_000, 1_735_689_601_000_000)}


CHANGES = {
    "update": "UPDATE {table} SET num = 555 WHERE day = DATE'2025-01-01' AND id < 10",
    "delete": "DELETE FROM {table} WHERE day = DATE'2025-01-01' AND id < 10",
    "overwrite": "INSERT OVERWRITE {table} SELECT day, id, num * 10, tags, country FROM {table} "
    "WHERE day = DATE'2025-01-01' AND id < 25",
    "merge": "MERGE INTO {table} t USING (SELECT 3 AS id) s ON t.id = s.id WHEN MATCHED THEN UPDATE SET num = 1",
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("how", ["copy-on-write", "merge-on-read"])
def test_a_day_that_spark_changed_is_called_so_even_after_its_maintenance(
    spark: Spark, own: Warehouse, name: str, change: str, how: str
) -> None:
    table = f"dlrm.dlrm.{name}"
    spark.sql(
        f"ALTER TABLE {table} SET TBLPROPERTIES ('write.update.mode'='{how}', 'write.delete.mode'='{how}', "
        f"'write.merge.mode'='{how}')",
        "SET spark.sql.sources.partitionOverwriteMode=dynamic",
        CHANGES[change].format(table=table),
    )
    others = {day: WRITTEN[day] for day in DAYS[1:]}
    for upkeep in (
        None,
        f"CALL dlrm.system.expire_snapshots(table => 'dlrm.dlrm.{name}', older_than => TIMESTAMP '2100-01-01', retain_last => 1)",
    ):
        if upkeep is not None:
            spark.sql(upkeep)
        assert read(own, name) == by_spark(spark, name)
        assert own.changed_days(name) == {DAYS[0]: WRITTEN[DAYS[0]]}
        assert own.written_days(name) == others


def test_a_table_that_was_rolled_back_shows_the_earlier_write(spark: Spark, own: Warehouse, name: str) -> None:
    first = own.table(name).history()[0].snapshot_id
    spark.sql(f"CALL dlrm.system.rollback_to_snapshot('dlrm.dlrm.{name}', {first})")
    assert own.written_days(name) == dict.fromkeys(DAYS, "earlier")
    assert {row[2] for row in read(own, name)} == {-1.0}


def test_a_table_that_was_replaced_is_not_as_written(spark: Spark, own: Warehouse, name: str) -> None:
    table = f"dlrm.dlrm.{name}"
    spark.sql(
        f"CREATE OR REPLACE TABLE {table} USING iceberg PARTITIONED BY (day) AS SELECT day, id, num * 2 AS num, tags, country FROM {table}"
    )
    assert own.written_days(name) == {}
    assert own.changed_days(name).keys() == set(DAYS)
    assert read(own, name) == by_spark(spark, name)


def test_compaction_by_spark_keeps_the_rows(spark: Spark, own: Warehouse, name: str) -> None:
    before = read(own, name)
    spark.sql(
        f"CALL dlrm.system.rewrite_data_files(table => 'dlrm.dlrm.{name}', options => map('rewrite-all', 'true'))"
    )
    assert read(own, name) == before == by_spark(spark, name)


def test_our_writes_and_our_expiry_stay_readable_by_spark(spark: Spark, own: Warehouse, name: str) -> None:
    table = f"dlrm.dlrm.{name}"
    spark.sql(f"INSERT INTO {table} SELECT DATE'2025-01-04', 900, 1.5, array(1L), 'AT'")
    again = TABLE.filter(pa.compute.equal(TABLE[DAY], pa.scalar(DAYS[1], pa.date32())))
    replace_days(own, name, {DAYS[1]: "third"}, again.schema, again.to_batches(), 50)
    expire(own, name, datetime.timedelta())
    assert read(own, name) == by_spark(spark, name)
    assert own.written_days(name) == WRITTEN | {DAYS[1]: "third"}


def test_a_table_that_spark_raised_to_version_3_is_read_and_not_written(
    spark: Spark, own: Warehouse, name: str
) -> None:
    spark.sql(f"ALTER TABLE dlrm.dlrm.{name} SET TBLPROPERTIES ('format-version'='3')")
    assert read(own, name) == by_spark(spark, name)
    with pytest.raises(StorageError, match="expected version 1 or 2 to change it, got 3"):
        replace_days(own, name, WRITTEN, TABLE.schema, TABLE.to_batches(), 150)


def test_columns_that_must_have_values_are_named(spark: Spark, own: Warehouse, name: str) -> None:
    table = f"dlrm.dlrm.{name}_must"
    spark.sql(
        f"CREATE TABLE {table} (day DATE, id BIGINT NOT NULL, must STRING NOT NULL) USING iceberg PARTITIONED BY (day)"
    )
    with pytest.raises(StorageError, match="must"):
        replace_days(
            own, f"{name}_must", WRITTEN, TABLE.select([DAY, "id"]).schema, TABLE.select([DAY, "id"]).to_batches(), 150
        )
