"""Tables that other engines made or changed: rows are read with their own day and values, or refused."""

import datetime
import json
import re
from functools import partial
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyiceberg.expressions import EqualTo, GreaterThan
from pyiceberg.manifest import FileFormat, ManifestFile
from pyiceberg.schema import Schema
from pyiceberg.table import Table
from pyiceberg.transforms import BucketTransform, IdentityTransform, MonthTransform
from pyiceberg.typedef import Record
from pyiceberg.types import DateType, DoubleType, NestedField, StringType

from storage.errors import CorruptFileError, StorageError
from storage.layout.columns import Footers
from storage.layout.rewrite import days_to_compact, rewrite_days, set_layout
from storage.layout.spec import Layout
from storage.reader import SnapshotReader, SnapshotRef
from storage.snapshot.writing import append_rows
from storage.warehouse import Warehouse
from tests.homes import rows_of, write_days
from tests.storage.foreign import add_file, delete_rows, delete_values

DAY1, DAY2, DAY3 = (datetime.date(2024, 1, day) for day in (1, 2, 3))
EPOCH = datetime.date(1970, 1, 1)


def rows(days: list[datetime.date], first: int = 0) -> pa.Table:
    ids = pa.array(range(first, first + len(days)), pa.int64())
    return pa.table({"day": pa.array(days, pa.date32()), "id": ids, "text": [f"t{i}" for i in ids.to_pylist()]})


def write(warehouse: Warehouse, *days: datetime.date, first: int = 0) -> SnapshotRef:
    return write_days(warehouse, rows(list(days), first))


def read(warehouse: Warehouse, days: list[datetime.date] | None = None) -> list[tuple[Any, ...]]:
    reader = warehouse.reader(warehouse.current("events"), ["day", "id", "text"])
    parts = [reader.read(fragment).to_pydict() for fragment in reader.fragments(days)]
    return [row for part in parts for row in zip(*part.values(), strict=True)]


def read_at(warehouse: Warehouse, snapshot: SnapshotRef) -> list[int]:
    reader = warehouse.reader(snapshot, ["id"])
    return [number for fragment in reader.fragments() for number in reader.read(fragment)["id"].to_pylist()]


def number(day: datetime.date) -> int:
    return (day - EPOCH).days


def refusal(call: Any) -> str:
    with pytest.raises(StorageError) as error:
        call()
    return re.sub(r"file '[^']*'", "file", str(error.value))


def partition_by(table: Table, *fields: tuple[str, Any, str]) -> None:
    with table.update_spec() as update:
        for field in table.spec().fields:
            update.remove_field(field.name)
        for source, transform, name in fields:
            update.add_field(source, transform, name)


# Partitions


@pytest.mark.parametrize("kind", ["month of day", "bucket of id", "nothing"])
@pytest.mark.parametrize("back", [False, True], ids=["now", "once"])
def test_files_with_rows_of_several_days_are_read_by_the_days_of_their_rows(
    warehouse: Warehouse, kind: str, back: bool
) -> None:
    write(warehouse, DAY1, DAY2)
    table = warehouse.table("events")
    kinds: dict[str, list[tuple[str, Any, str]]] = {
        "month of day": [("day", MonthTransform(), "month")], "bucket of id": [("id", BucketTransform(4), "bucket")],
    }  # fmt: skip
    fields = kinds.get(kind, [])
    partition_by(table, *fields)
    path = add_file(table, rows([DAY3, DAY1, DAY2, DAY3, DAY3, DAY1], 100), Record(*([648] * len(fields))))
    if back:
        partition_by(table, ("day", IdentityTransform(), "again"))
    before = warehouse.current("events")
    assert warehouse.day_rows(before) == {DAY1: 3, DAY2: 2, DAY3: 3}
    assert warehouse.count_rows(before, [DAY1, DAY3]) == 6
    assert [[row[:2] for row in read(warehouse, [day])] for day in (DAY1, DAY2, DAY3)] == [
        [(DAY1, 0), (DAY1, 101), (DAY1, 105)], [(DAY2, 1), (DAY2, 102)], [(DAY3, 100), (DAY3, 103), (DAY3, 104)],
    ]  # fmt: skip
    assert sorted(row[1] for row in read(warehouse)) == [0, 1, 100, 101, 102, 103, 104, 105]
    delete_rows(warehouse.table("events"), {path: [0, 1]}, Record(*([648] * len(fields)), *([None] if back else [])))
    if not back:  # with the new spec the deletes are of another partition
        assert warehouse.day_rows(warehouse.current("events")) == {DAY1: 2, DAY2: 2, DAY3: 2}
        assert [row[1] for row in read(warehouse, [DAY3])] == [103, 104]


def test_days_that_share_a_file_with_others_are_not_replaced(warehouse: Warehouse) -> None:
    write(warehouse, DAY1, DAY2)
    table = warehouse.table("events")
    partition_by(table)
    add_file(table, rows([DAY2, DAY3], 100), Record())
    partition_by(warehouse.table("events"), ("day", IdentityTransform(), "again"))
    before = warehouse.current("events")
    sentence = (
        "file: expected one day's rows, in a partition of that `day`, got rows of several days. "
        "Days of this table are read, but not replaced. Write to a table of another name."
    )
    assert refusal(lambda: write(warehouse, DAY2)) == sentence
    assert refusal(lambda: warehouse.day_files(before)) == sentence
    assert warehouse.current("events") == before
    write(warehouse, DAY1, DAY1, first=200)
    assert warehouse.day_rows(warehouse.current("events")) == {DAY1: 2, DAY2: 2, DAY3: 1}


def test_a_day_beside_other_partitions_is_found_by_its_field(warehouse: Warehouse) -> None:
    write(warehouse, DAY1, DAY2)
    table = warehouse.table("events")
    partition_by(table, ("id", BucketTransform(4), "bucket"), ("day", IdentityTransform(), "again"))
    add_file(table, rows([DAY3, DAY3], 100), Record(2, number(DAY3)))
    assert warehouse.day_rows(warehouse.current("events")) == {DAY1: 1, DAY2: 1, DAY3: 2}
    assert [row[1] for row in read(warehouse, [DAY3])] == [100, 101]
    assert [row[1] for row in read(warehouse, [DAY1])] == [0]


def test_rows_without_a_day_are_refused(warehouse: Warehouse) -> None:
    write(warehouse, DAY1)
    table = warehouse.table("events")
    nowhere = rows([DAY1, DAY1]).set_column(0, "day", pa.nulls(2, pa.date32()))
    add_file(table, nowhere, Record(None))
    assert refusal(lambda: read(warehouse)) == (
        "file of table 'events': expected a day in each row, got 2 rows without one. "
        "Delete them with the engine that wrote them."
    )


@pytest.mark.parametrize(
    ("column", "got"),
    [("day", "'day' string"), ("Day", "'Day' string"), ("ds", "no column of that name")],
)
def test_a_table_without_a_date_in_day_is_refused(warehouse: Warehouse, column: str, got: str) -> None:
    schema = Schema(NestedField(1, column, StringType(), required=False))
    table = warehouse.catalog.create_table((warehouse.config.namespace, "events"), schema)
    table.append(pa.table({column: ["2024-01-01"]}))
    assert refusal(lambda: warehouse.day_rows(warehouse.current("events"))) == (
        f"table 'events': expected a column `day` of type date, got {got}. "
        "Read it as it is, with source.table and source.day_column."
    )


# Columns


def test_files_without_field_ids_are_read_by_the_names_that_the_table_maps(
    warehouse: Warehouse, tmp_path: Path
) -> None:
    write(warehouse, DAY1)
    table = warehouse.table("events")
    pq.write_table(rows([DAY2, DAY2], 100), tmp_path / "added.parquet")
    table.add_files([str(tmp_path / "added.parquet")])
    assert read(warehouse) == [(DAY1, 0, "t0"), (DAY2, 100, "t100"), (DAY2, 101, "t101")]
    footers = Footers(warehouse.table("events"), warehouse.current("events"))
    assert footers.without_values(["id", "text"], [DAY2]).columns == []
    with warehouse.table("events").transaction() as transaction:
        transaction.remove_properties("schema.name-mapping.default")
    assert refusal(lambda: read(warehouse)) == (
        "file of table 'events': expected field ids, or a mapping of names by the table, got neither. "
        "Set the table's property schema.name-mapping.default, or ingest its day with force=true."
    )


def test_values_that_do_not_fit_the_type_of_their_column_are_refused(warehouse: Warehouse, tmp_path: Path) -> None:
    write(warehouse, DAY1)
    path = tmp_path / "added.parquet"
    pq.write_table(rows([DAY2, DAY2], 100), path)
    warehouse.table("events").add_files([str(path)])
    pq.write_table(rows([DAY2, DAY2]).set_column(1, "id", pa.array([1.0, 1.5])), path)
    assert refusal(lambda: read(warehouse, [DAY2])) == (
        "column 'id' of file: expected values that fit int64, got Float value 1.500000 was truncated converting to int64. "
        "Rewrite the file with the engine that wrote it, or ingest its day with force=true."
    )


def test_a_day_that_only_the_partition_has_is_read_from_there(warehouse: Warehouse, tmp_path: Path) -> None:
    """As Hive writes files: the value is in the folder's name."""
    write(warehouse, DAY1)
    pq.write_table(rows([DAY2, DAY2], 100), tmp_path / "added.parquet")
    warehouse.table("events").add_files([str(tmp_path / "added.parquet")])
    pq.write_table(rows([DAY2, DAY2], 100).drop(["day"]), tmp_path / "added.parquet")
    assert read(warehouse, [DAY2]) == [(DAY2, 100, "t100"), (DAY2, 101, "t101")]


def test_another_value_that_only_the_partition_has_is_refused(warehouse: Warehouse, tmp_path: Path) -> None:
    write(warehouse, DAY1)
    table = warehouse.table("events")
    partition_by(table, ("day", IdentityTransform(), "again"), ("text", IdentityTransform(), "text_part"))
    path = add_file(table, rows([DAY2, DAY2], 100), Record(number(DAY2), "DE"))
    schema = pq.read_schema(path)
    pq.write_table(pq.read_table(path, columns=["day", "id"]).cast(pa.schema([schema.field(0), schema.field(1)])), path)
    assert refusal(lambda: read(warehouse, [DAY2])) == (
        "file: expected column 'text' in it, got only a partition of that value. "
        "Rewrite the table with the engine that wrote it: in Spark "
        "`CALL system.rewrite_data_files(table => 'dlrm.dlrm.events', options => map('rewrite-all', 'true'))`."
    )
    reader = warehouse.reader(warehouse.current("events"), ["id"])
    assert [reader.read(fragment)["id"].to_pylist() for fragment in reader.fragments([DAY2])] == [[100, 101]]


def test_a_column_with_a_default_has_it_in_older_files(warehouse: Warehouse) -> None:
    snapshot = write(warehouse, DAY1, DAY2)
    table = warehouse.table("events")
    fields = [
        NestedField(90, "x", DoubleType(), required=False, initial_default=42.5),
        NestedField(91, "since", DateType(), required=False, initial_default=DAY3),
        NestedField(92, "text2", StringType(), required=False, initial_default="none"),
        NestedField(93, "y", DoubleType(), required=False),
    ]
    schema = Schema(*table.schema().fields, *fields)
    reader = SnapshotReader(table, snapshot, ["id", "x", "since", "text2", "y"], None, schema)
    assert [row for fragment in reader.fragments() for row in reader.read(fragment).to_pylist()] == [
        {"id": i, "x": 42.5, "since": DAY3, "text2": "none", "y": None} for i in (0, 1)
    ]


def test_columns_that_were_dropped_or_renamed_are_so_in_the_newest_snapshot(warehouse: Warehouse) -> None:
    old = write(warehouse, DAY1)
    new = write(warehouse, DAY2, first=5)
    with warehouse.table("events").update_schema() as update:
        update.rename_column("id", "number")
        update.delete_column("text")
        update.add_column("x", DoubleType())  # an ingest may be about to write it
    assert warehouse.schema(new).names == ["day", "number"]
    assert warehouse.schema(old).names == ["day", "id", "text"]
    reader = warehouse.reader(new, ["number"])
    assert [reader.read(fragment)["number"].to_pylist() for fragment in reader.fragments()] == [[0], [5]]
    assert refusal(lambda: warehouse.reader(new, ["text"])).startswith("column 'text': expected a column of table")


def test_a_filter_of_an_older_snapshot_goes_by_the_names_of_its_time(warehouse: Warehouse) -> None:
    old = write(warehouse, DAY1, DAY2)
    with warehouse.table("events").update_schema() as update:
        update.rename_column("id", "number")
    with warehouse.table("events").update_schema() as update:
        update.rename_column("text", "id")
    write_days(warehouse, rows_of(DAY3, number=[9], id=["t9"]))
    reader = warehouse.reader(old, ["text"], EqualTo("id", 1))
    found = [reader.read(fragment)["text"].to_pylist() for fragment in reader.fragments([DAY1, DAY2])]
    assert [text for texts in found for text in texts] == ["t1"]


# Row-level deletes and other formats


@pytest.mark.parametrize("how", ["file", "vector"])
def test_deleted_rows_are_left_out_wherever_rows_are_read_or_counted(
    warehouse: Warehouse, how: Literal["file", "vector"], tmp_path: Path
) -> None:
    """As pyiceberg reads them. The list of deleted rows is shared by two files, one of them in several row groups."""
    write(warehouse, DAY1)
    set_layout(warehouse.table("events"), Layout(row_group_rows=10))
    first = write(warehouse, *[DAY1] * 35, DAY2)
    assert days_to_compact(warehouse, first) == []
    table = warehouse.table("events")
    more = add_file(table, rows([DAY1] * 5, first=100), Record(number(DAY1)))
    path = warehouse.reader(first, ["id"]).fragments([DAY1])[0].path
    gone = {path: [0, 9, *range(10, 20), 34], more: [2]}
    delete_rows(table, gone, Record(number(DAY1)), how)
    delete_rows(table, {path: [9, 33]}, Record(number(DAY1)), how)  # one row twice
    left = {*range(1, 9), *range(20, 33), 35, 100, 101, 103, 104}
    assert {row[1] for row in read(warehouse)} == left
    assert {*warehouse.table("events").scan().to_arrow()["id"].to_pylist()} == left
    current = warehouse.current("events")
    assert warehouse.day_rows(current) == {DAY1: len(left) - 1, DAY2: 1}
    assert warehouse.count_rows(current, [DAY1]) == len(left) - 1
    reader = warehouse.reader(current, ["id"], GreaterThan("id", 30))
    assert [fragment.rows for fragment in reader.fragments([DAY1])] == [8, 10, 3, 4]  # without the empty row group
    assert {i for one in reader.fragments() for i in reader.read(one)["id"].to_pylist()} == {i for i in left if i > 30}
    assert len(read_at(warehouse, first)) == 36  # a pinned snapshot stays as it was
    assert warehouse.changed_days("events") == {DAY1: "i"}
    assert days_to_compact(warehouse, current) == [DAY1]
    rewrite_days(warehouse, "events", [DAY1], tmp_path)
    assert days_to_compact(warehouse, warehouse.current("events")) == []
    assert {row[1] for row in read(warehouse)} == left
    assert {*warehouse.table("events").scan().to_arrow()["id"].to_pylist()} == left


def test_a_day_without_a_row_left_is_gone(warehouse: Warehouse) -> None:
    write(warehouse, DAY1, DAY2)
    path = warehouse.reader(warehouse.current("events"), ["id"]).fragments([DAY1])[0].path
    delete_rows(warehouse.table("events"), {path: [0]}, Record(number(DAY1)))
    assert warehouse.day_rows(warehouse.current("events")) == {DAY2: 1}
    assert warehouse.day_contents(warehouse.current("events")).keys() == {DAY2}
    assert [row[1] for row in read(warehouse, [DAY1, DAY2])] == [1]


@pytest.mark.parametrize("how", ["file", "vector"])
def test_an_unreadable_list_of_deleted_rows_is_named(warehouse: Warehouse, how: Literal["file", "vector"]) -> None:
    """No row comes back to life because the list of deleted rows is damaged, and its day can be written again."""
    write(warehouse, DAY1, DAY1, DAY2)
    path = warehouse.reader(warehouse.current("events"), ["id"]).fragments([DAY1])[0].path
    listed = delete_rows(warehouse.table("events"), {path: [1]}, Record(number(DAY1)), how)
    whole = Path(listed).read_bytes()
    places = [20] if how == "file" else [20, whole.index(b"PFA1", 4) - 6]  # the latter: the position in a vector
    flipped = (whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :] for at in places)
    for damaged in (whole[:-9], b"PFA1", b"", b"PAR1" + whole[4:-40], *flipped):
        Path(listed).write_bytes(damaged)
        for call in (read, lambda all: all.count_rows(all.current("events"), [DAY1])):
            with pytest.raises(
                CorruptFileError, match=f"file '{re.escape(listed)}', which lists deleted rows: expected"
            ):
                call(warehouse)
        assert warehouse.day_rows(warehouse.current("events")) == {DAY1: 2, DAY2: 1}  # it blocks no other day
    assert [row[1] for row in read(warehouse, [DAY2])] == [2]
    write(warehouse, DAY1, DAY1, first=4)
    assert [row[1] for row in read(warehouse)] == [4, 5, 2]


@pytest.mark.parametrize(("begin", "name"), [(b"ORC", "ORC"), (b"Obj\x01", "AVRO")])
def test_a_list_of_deleted_rows_in_another_format_is_not_called_damaged(
    warehouse: Warehouse, begin: bytes, name: str
) -> None:
    """To write the day again would undo the deletes of the other engine."""
    write(warehouse, DAY1, DAY1, DAY2)
    path = warehouse.reader(warehouse.current("events"), ["id"]).fragments([DAY1])[0].path
    listed = Path(delete_rows(warehouse.table("events"), {path: [1]}, Record(number(DAY1))))
    listed.write_bytes(begin + listed.read_bytes()[len(begin) :])
    for call in (read, lambda all: all.count_rows(all.current("events"), [DAY1])):
        message = refusal(partial(call, warehouse))
        assert message.startswith(f"file: expected a Parquet file, got one in {name}. Set the table's prop")
        assert "force" not in message
    assert warehouse.day_rows(warehouse.current("events")) == {DAY1: 2, DAY2: 1}  # it blocks no other day
    assert [row[1] for row in read(warehouse, [DAY2])] == [2]


def test_a_list_of_rows_that_a_file_does_not_have_is_refused(warehouse: Warehouse) -> None:
    write(warehouse, DAY1)
    path = warehouse.reader(warehouse.current("events"), ["id"]).fragments([DAY1])[0].path
    delete_rows(warehouse.table("events"), {path: [1]}, Record(number(DAY1)))
    with pytest.raises(CorruptFileError, match="got 1 rows and deletes of rows 1 to 1"):
        read(warehouse)


@pytest.mark.parametrize("everywhere", [False, True], ids=["of a day", "of all days"])
def test_rows_that_are_deleted_by_value_are_left_out(warehouse: Warehouse, everywhere: bool) -> None:
    """Deletes apply to older files alone. Null equals null, and all columns must be equal."""
    write(warehouse, DAY1, DAY1, DAY1, DAY2, DAY2)  # rows 0 to 4
    table = warehouse.table("events")
    with_null = rows([DAY1, DAY1], 10).set_column(2, "text", pa.array([None, "t11"]))
    add_file(table, with_null, Record(number(DAY1)))
    gone = pa.table({"id": [1, 10, 11, 3], "text": ["t1", None, "other", "t3"]})
    day = table.spec().spec_id
    if everywhere:
        partition_by(warehouse.table("events"))
        nothing = warehouse.table("events").spec().spec_id
        partition_by(warehouse.table("events"), ("day", IdentityTransform(), "again"))
        delete_values(warehouse.table("events"), gone, Record(), nothing)
    else:
        delete_values(warehouse.table("events"), gone, Record(number(DAY1)), day)
    added = warehouse.table("events")
    add_file(added, rows([DAY1, DAY1], 1), Record(number(DAY1)))  # rows 1 and 2, again
    now = warehouse.current("events")
    assert [row[1] for row in read(warehouse, [DAY1])] == [0, 2, 11, 1, 2]
    assert [row[1] for row in read(warehouse, [DAY2])] == ([4] if everywhere else [3, 4])
    assert warehouse.day_rows(now) == {DAY1: 5, DAY2: 1 if everywhere else 2}
    assert warehouse.count_rows(now, [DAY1]) == 5
    reader = warehouse.reader(now, ["id"], GreaterThan("id", 2))
    assert [n for part in reader.fragments([DAY2]) for n in reader.read(part)["id"].to_pylist()] == (
        [4] if everywhere else [3, 4]
    )


def test_an_unreadable_file_of_deleted_values_is_named(warehouse: Warehouse) -> None:
    write(warehouse, DAY1, DAY1, DAY2)
    path = delete_values(warehouse.table("events"), pa.table({"id": [1]}), Record(number(DAY1)))
    Path(path).write_bytes(b"damaged")
    with pytest.raises(CorruptFileError, match=re.escape(f"file '{path}' of table 'events': expected a whole Parquet")):
        read(warehouse, [DAY1])
    assert [row[1] for row in read(warehouse, [DAY2])] == [2]
    assert warehouse.day_rows(warehouse.current("events")) == {DAY1: 2, DAY2: 1}


def test_text_of_another_engine_that_is_no_text_is_refused(warehouse: Warehouse) -> None:
    write(warehouse, DAY1)
    path = add_file(warehouse.table("events"), rows([DAY2, DAY2]), Record(number(DAY2)))
    content = Path(path).read_bytes()
    assert content.count(b"t1") >= 1
    Path(path).write_bytes(content.replace(b"t1", b"\xfft"))
    with pytest.raises(CorruptFileError, match="Invalid UTF8 sequence"):
        read(warehouse)


def test_files_of_another_format_are_refused(warehouse: Warehouse) -> None:
    write(warehouse, DAY1)
    add_file(warehouse.table("events"), rows([DAY2]), Record(number(DAY2)), FileFormat.ORC)
    assert [row[1] for row in read(warehouse, [DAY1])] == [0]
    assert refusal(lambda: read(warehouse)) == (
        "file: expected a Parquet file, got one in ORC. "
        "Set the table's properties write.format.default=parquet and write.delete.format.default=parquet and rewrite it: in Spark "
        "`CALL system.rewrite_data_files(table => 'dlrm.dlrm.events', options => map('rewrite-all', 'true'))`."
    )


# Writing


def test_a_table_of_format_version_3_is_read_and_not_written(warehouse: Warehouse) -> None:
    snapshot = write(warehouse, DAY1)
    metadata = Path(warehouse.table("events").metadata_location.removeprefix("file://"))
    metadata.write_text(json.dumps(json.loads(metadata.read_text()) | {"format-version": 3, "next-row-id": 0}))
    warehouse = Warehouse(warehouse.config, warehouse.home)
    assert [row[1] for row in read(warehouse)] == [0]
    for call in (
        lambda: write(warehouse, DAY1),
        lambda: append_rows(warehouse, "events", rows([]).schema, rows([DAY1]).to_pylist()),
        lambda: warehouse.tag(snapshot, "train"),
        lambda: warehouse.set_properties("events", {"a": "b"}),
    ):
        assert refusal(call) == (
            "format of table 'events': expected version 1 or 2 to change it, got 3. "
            "Copy it into a table of version 2 with the engine that made it."
        )


def test_a_column_that_must_have_values_is_named(warehouse: Warehouse) -> None:
    schema = Schema(
        NestedField(1, "day", DateType(), required=False), NestedField(2, "country", StringType(), required=True)
    )
    table = warehouse.catalog.create_table((warehouse.config.namespace, "events"), schema)
    partition_by(table, ("day", IdentityTransform(), "day"))
    assert refusal(lambda: write(warehouse, DAY1, DAY1)) == (
        "column 'country': expected a value in each row, as the table requires (NOT NULL), got 2 rows without one. "
        "Give them one, or make the column optional: ALTER COLUMN country DROP NOT NULL."
    )


def test_a_manifest_is_read_once_by_the_snapshots_that_share_it(
    warehouse: Warehouse, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A commit keeps the manifests of days that it does not touch. Deletes count in the snapshots that have them."""
    read, plain = list[str](), ManifestFile.fetch_manifest_entry

    def note(one: ManifestFile, *given: Any, **named: Any) -> Any:
        read.append(one.manifest_path)
        return plain(one, *given, **named)

    references, known = [write(warehouse, DAY1, DAY1)], set[str]()
    references.append(write(warehouse, DAY2, first=2))
    path = warehouse.reader(references[1], ["id"]).fragments([DAY1])[0].path
    delete_rows(warehouse.table("events"), {path: [1]}, Record(number(DAY1)))
    references += [warehouse.current("events"), write(warehouse, DAY2, DAY2, first=3)]
    expected = [{DAY1: 2}, {DAY1: 2, DAY2: 1}, {DAY1: 1, DAY2: 1}, {DAY1: 1, DAY2: 2}]
    fresh = Warehouse(warehouse.config, warehouse.home)
    monkeypatch.setattr(ManifestFile, "fetch_manifest_entry", note)
    for reference, rows_by_day in zip(references, expected, strict=True):
        assert fresh.day_rows(reference) == rows_by_day
        assert known.isdisjoint(read)
        known |= {*read}
        read.clear()
    assert len(known) >= 4
