"""Avro files, written by fastavro, give the rows that Parquet files of the same values give."""

import datetime
import decimal
import io
import json
import sys
import uuid
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.data.formats import avro
from pipeline.data.formats.avro import copy_avro
from pipeline.errors import ConfigError, DataError

fastavro = pytest.importorskip("fastavro", reason="needs `make setup EXTRAS=avro`")
pytestmark = pytest.mark.extra
UTC = datetime.UTC
FIELDS: dict[str, Any] = {
    "label": "int",
    "user": ["null", "long"],
    "price": ["null", "int", "double"],
    "word": ["null", "string"],
    "id": ["null", {"type": "string", "logicalType": "uuid"}],
    "kind": {"type": "enum", "name": "Kind", "symbols": ["A", "B"]},
    "again": "Kind",
    "items": ["null", {"type": "array", "items": ["null", "long"]}],
    "shares": {"type": "map", "values": "float"},
    "place": {"type": "record", "name": "Place", "fields": [{"name": "city", "type": "string"}]},
    "time": {"type": "long", "logicalType": "timestamp-millis"},
    "local": {"type": "long", "logicalType": "local-timestamp-micros"},
    "date": {"type": "int", "logicalType": "date"},
    "cost": {"type": "bytes", "logicalType": "decimal", "precision": 9, "scale": 2},
    "raw": {"type": "fixed", "name": "Raw", "size": 2},
    "ids": {"type": "array", "items": {"type": "string", "logicalType": "uuid"}},
}
ROWS: list[dict[str, Any]] = [
    {
        "label": 1, "user": 2**60, "price": 1.5, "word": "ß", "id": uuid.UUID(int=7), "kind": "A", "again": "B",
        "items": [1, None, -(2**60)], "shares": {"a": 0.5}, "place": {"city": "Bonn"},
        "time": datetime.datetime(2024, 1, 1, 12, tzinfo=UTC), "local": datetime.datetime(2024, 1, 1, 13),
        "date": datetime.date(2024, 1, 2), "cost": decimal.Decimal("12.25"), "raw": b"\xff\x00",
        "ids": [uuid.UUID(int=9)],
    },
    {
        "label": 0, "user": None, "price": None, "word": None, "id": None, "kind": "B", "again": "A", "items": None,
        "shares": {}, "place": {"city": ""}, "time": datetime.datetime(2024, 1, 1, 23, 59, 59, 999_000, UTC),
        "local": datetime.datetime(1969, 12, 31), "date": datetime.date(1970, 1, 1), "cost": decimal.Decimal("-0.01"),
        "raw": b"ab", "ids": [],
    },
    {
        "label": 0, "user": 0, "price": 3, "word": "", "id": uuid.UUID(int=0), "kind": "A", "again": "A", "items": [],
        "shares": {"b": 1.0, "c": -2.0}, "place": {"city": "Ulm"}, "time": datetime.datetime(2024, 1, 1, tzinfo=UTC),
        "local": datetime.datetime(2024, 1, 1), "date": datetime.date(2024, 2, 29), "cost": decimal.Decimal(0),
        "raw": b"  ", "ids": [uuid.UUID(int=1), uuid.UUID(int=2)],
    },
]  # fmt: skip
KINDS = {
    "label": pa.int32(), "user": pa.int64(), "price": pa.float64(), "word": pa.string(), "id": pa.string(),
    "kind": pa.string(), "again": pa.string(), "items": pa.list_(pa.int64()), "shares": pa.map_(pa.string(), pa.float32()),
    "place": pa.struct({"city": pa.string()}), "time": pa.timestamp("ms", "UTC"), "local": pa.timestamp("us"),
    "date": pa.date32(), "cost": pa.decimal128(9, 2), "raw": pa.binary(), "ids": pa.list_(pa.string()),
}  # fmt: skip


def write(path: Path, rows: list[dict[str, Any]], fields: dict[str, Any], codec: str = "null") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    schema = {
        "type": "record",
        "name": "Row",
        "fields": [{"name": name, "type": kind} for name, kind in fields.items()],
    }
    with path.open("wb") as file:
        fastavro.writer(file, schema, rows, codec=codec, sync_interval=100)


def test_names_are_resolved_as_other_writers_leave_them(tmp_path: Path) -> None:
    """Java writes names without their namespace. A decimal may have a name, and a number several types."""
    money = {"type": "fixed", "name": "Money", "size": 4, "logicalType": "decimal", "precision": 9, "scale": 2}
    inner = {
        "type": "record",
        "name": "Inner",
        "namespace": "com.other",
        "fields": [{"name": "kind", "type": "com.shop.Kind"}],
    }
    fields = {
        "kind": {"type": "enum", "name": "Kind", "symbols": ["A", "B"]}, "again": ["null", "Kind"], "cost": money,
        "tax": "Money", "inner": inner, "name": {"type": "string", "avro.java.string": "String"}, "n": ["long", "float"],
    }  # fmt: skip
    schema = {"type": "record", "name": "Row", "namespace": "com.shop"}
    schema["fields"] = [{"name": name, "type": kind} for name, kind in fields.items()]  # type: ignore[assignment]
    row = {"kind": "A", "again": "B", "cost": decimal.Decimal("1.25"), "tax": decimal.Decimal("-0.50")}
    row |= {"inner": {"kind": "B"}, "name": "x", "n": 2**30 + 1}
    parsed, body, head = fastavro.parse_schema(schema), io.BytesIO(), io.BytesIO()
    fastavro.schemaless_writer(body, parsed, row)
    meta = {"avro.schema": json.dumps(schema).encode(), "avro.codec": b"null"}
    fastavro.schemaless_writer(head, {"type": "map", "values": "bytes"}, meta)
    block = io.BytesIO()
    for number in (1, len(body.getvalue())):
        fastavro.schemaless_writer(block, "long", number)
    sync = bytes(16)
    (tmp_path / "a.avro").write_bytes(b"Obj\x01" + head.getvalue() + sync + block.getvalue() + body.getvalue() + sync)
    copy_avro(tmp_path / "a.avro", tmp_path / "a.parquet", {})
    found = pq.read_table(tmp_path / "a.parquet")
    assert found.to_pylist() == [row]
    assert found.schema.field("n").type == pa.float64()


@pytest.mark.parametrize("codec", ["null", "deflate", "snappy", "zstandard"])
def test_a_copy_has_every_type_and_value(tmp_path: Path, codec: str) -> None:
    write(tmp_path / "a.avro", ROWS * 10, FIELDS, codec)
    copy = tmp_path / "a.parquet"
    copy_avro(tmp_path / "a.avro", copy, {})
    found = pq.read_table(copy)
    expected = [
        row
        | {"id": row["id"] and str(row["id"]), "shares": list(row["shares"].items()), "ids": [*map(str, row["ids"])]}
        for row in ROWS * 10
    ]
    assert found.to_pylist() == expected
    assert dict(zip(found.schema.names, found.schema.types, strict=True)) == KINDS


def test_rows_are_stored_as_those_of_parquet(tmp_path: Path, ingest: Any, stored: Any) -> None:
    """Days come from folders, one day opens no other file, and the second ingest skips them."""
    names = ["label", "user", "price", "word", "id", "items", "time"]
    for day in (1, 2):
        rows = [{name: row[name] for name in names} | {"user": day} for row in ROWS]
        write(tmp_path / f"log/day=2024-01-0{day}/it's [1].avro", rows, {name: FIELDS[name] for name in names})
        texts = [row | {"id": row["id"] and str(row["id"])} for row in rows]
        pq.write_table(
            pa.Table.from_pylist(texts, pa.schema({name: KINDS[name] for name in names})),
            tmp_path / f"2024-01-0{day}.parquet",
        )
    source = {"path": "log/day=*/*.avro", "day_column": "day"}
    assert ingest(source, only=[datetime.date(2024, 1, 2)]).rows == 3
    assert ingest(source).days_written == (datetime.date(2024, 1, 1),)
    assert ingest(source).days_written == ()
    found = stored()
    assert list((tmp_path / "home" / "tmp").glob("avro-*")) == []
    ingest({"path": "2024*.parquet", "day_column": "time"}, force=True)
    expected = stored()
    assert found["user"].tolist() == [1] * 3 + [2] * 3
    same = [name for name in names if name != "user"]
    pd.testing.assert_frame_equal(found[same][:3], expected[same][:3])


def test_outcomes_and_side_tables_may_be_avro(tmp_path: Path, ingest: Any, stored: Any, put: Any) -> None:
    start = datetime.datetime(2024, 1, 1, 10, tzinfo=UTC)
    put("log.parquet", request=[1, 2, 3], user=[7, 8, 9], time=pa.array([start] * 3, pa.timestamp("us", "UTC")))
    millis = {"type": "long", "logicalType": "timestamp-millis"}
    write(tmp_path / "clicks.avro", [{"request": 2, "time": start}], {"request": "long", "time": millis})
    write(tmp_path / "users.AVRO", [{"user": 8, "age": 40}], {"user": "long", "age": "int"})
    outcomes = {"path": "clicks.avro", "on": "request", "feature_time": "time", "outcome_time": "time"}
    source = {"path": "log.parquet", "outcomes": outcomes, "lookups": [{"path": "users.AVRO", "on": "user"}]}
    ingest(source | {"day_column": "time"}, dense=["age"])
    found = stored().sort_values("user")
    assert found["label"].tolist() == [0, 1, 0]
    assert found["age"].fillna(-1).tolist() == [-1, 40, -1]


def test_a_file_of_another_name_is_read_as_the_source_says(tmp_path: Path, ingest: Any) -> None:
    write(tmp_path / "part-0", [{"user": 1, "label": 1}], {"user": "long", "label": "int"})
    assert ingest({"path": "part-0", "format": "avro", "day": "2024-01-01"}).rows == 1


def test_a_column_that_no_feature_reads_ends_no_file(tmp_path: Path, ingest: Any, stored: Any) -> None:
    inner = {"type": "record", "name": "item", "fields": [{"name": "next", "type": ["null", "item"]}]}
    long = {"type": "bytes", "logicalType": "decimal", "precision": 50, "scale": 2}
    fields = {"label": "int", "user": "long", "mixed": ["long", "string"], "tail": inner, "exact": long}
    rows = [
        {"label": number, "user": 5, "mixed": one, "tail": {"next": None}, "exact": decimal.Decimal("1.25")}
        for number, one in enumerate(("a", 7))
    ]
    write(tmp_path / "a.avro", rows, fields)
    said: list[str] = []
    ingest({"path": "a.avro", "day": "2024-01-01"}, warn=said.append)
    assert sorted(stored().columns) == ["day", "label", "user"]
    (note,) = said
    assert "no feature reads: mixed " in note
    for reason in ("long, string", "a record item inside itself", "precision"):
        assert reason in note


def test_what_cannot_be_read_is_named(tmp_path: Path, ingest: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    source = {"path": "a.avro", "day": "2024-01-01"}
    write(tmp_path / "a.avro", [{"user": 1, "label": 1}] * 50, {"user": ["long", "string"], "label": "int"})
    with pytest.raises(
        DataError, match=r"column 'user': expected numbers, .*, got type STRUCT\(\"long, string\" BOOLEAN\)"
    ):
        ingest(source)
    write(tmp_path / "a.avro", [{"user": 1, "label": 1}] * 50, {"user": "long", "label": "int"})
    whole = (tmp_path / "a.avro").read_bytes()
    for content in (whole[:-30], b"no Avro", whole.replace(b"long", b"wrong")):
        (tmp_path / "a.avro").write_bytes(content)
        with pytest.raises(DataError, match=r"Avro file 'a\.avro': expected readable rows, got .*Write the file again"):
            ingest(source)
    write(tmp_path / "a.avro", [{"user": 1, "User": 2}], {"user": "long", "User": "long"})
    with pytest.raises(DataError, match=r"names that differ in more than their case, got 'user' and 'User'"):
        ingest(source)
    write(tmp_path / "a.avro", [{}], {})
    with pytest.raises(DataError, match=r"Avro file 'a\.avro': expected records with fields, got no fields"):
        ingest(source)
    with (tmp_path / "a.avro").open("wb") as file:
        fastavro.writer(file, {"type": "long"}, [1, 2])
    with pytest.raises(
        DataError, match=r"Avro file 'a\.avro': expected records with fields, got values of another type"
    ):
        ingest(source)
    monkeypatch.setitem(sys.modules, "fastavro", None)
    with pytest.raises(ConfigError, match=r"expected the package fastavro, got none. Run: make setup EXTRAS=avro"):
        ingest(source)


def test_a_process_of_its_own_copies_the_same_and_says_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, damaged = tmp_path / "rows.avro", tmp_path / "damaged.avro"
    write(file, ROWS, FIELDS)
    damaged.write_bytes(file.read_bytes()[:-20])
    errors, tables = [], []
    for limit in (2**40, 0):
        monkeypatch.setattr(avro, "LARGE_BYTES", limit)
        avro.copy_avro(file, tmp_path / "copy.parquet", {})
        tables.append(pq.read_table(tmp_path / "copy.parquet"))
        with pytest.raises(DataError) as refused:
            avro.copy_avro(damaged, tmp_path / "none.parquet", {})
        errors.append(str(refused.value))
    assert tables[0] == tables[1]
    assert tables[0].num_rows == len(ROWS)
    assert errors[0] == errors[1]


def test_a_process_that_is_killed_is_told_as_such(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "rows.avro"
    write(file, ROWS, FIELDS)
    monkeypatch.setattr(avro, "LARGE_BYTES", 0)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    (tmp_path / "python").write_text("#!/bin/sh\nkill -9 $$\n")
    (tmp_path / "python").chmod(0o755)
    with pytest.raises(DataError, match="got exit code -9"):
        avro.copy_avro(file, tmp_path / "copy.parquet", {})
