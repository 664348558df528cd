"""Damaged tables: the files of a source, its side tables, and data files of the warehouse."""

import datetime
import io
import json
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
from pyiceberg.schema import Schema
from pyiceberg.typedef import Record
from pyiceberg.types import DateType, FloatType, IntegerType, ListType, LongType, MapType, NestedField

from pipeline.extraction.config import IngestConfig, SourceConfig
from pipeline.extraction.extract import extract
from pipeline.extraction.opening import SourceContext, SourceReader
from pipeline.transforms.schema import FeatureSchema
from storage.config import WarehouseConfig
from storage.pages.footer import SUFFIX
from storage.reader import SnapshotReader, SnapshotRef
from storage.warehouse import Warehouse
from tests.fuzz.harness import Case, require
from tests.fuzz.mutate import mutate_bytes, mutate_value
from tests.storage.foreign import add_file, delete_rows, delete_values

ROWS = 40
HASHED = [{"kind": "sigrid_hash", "size": 100}]
FEATURES = FeatureSchema.model_validate(
    {
        "dense": [{"columns": ["age", "price"], "transforms": [{"kind": "fill_null"}]}],
        "sparse": [{"columns": ["user", "country"], "transforms": HASHED}],
    }
)


def rows(lists: bool) -> pa.Table:
    """Rows of three days with nulls, big ids, text of all kinds and, if wanted, lists."""
    numbers = range(ROWS)
    words = ["DE", None, 'Å, "land"', "", "line\nbreak", "O'Neil"]
    columns: dict[str, Any] = {
        "day": [f"2024-01-0{1 + number % 3}" for number in numbers],
        "label": [number % 2 for number in numbers],
        "age": [None if number % 7 == 0 else number for number in numbers],
        "price": [number / 3 for number in numbers],
        "user": [2**62 + number % 5 for number in numbers],
        "country": [words[number % len(words)] for number in numbers],
        "since": [datetime.datetime(2024, 1, 1, number % 24) for number in numbers],
    }
    if lists:
        columns["items"] = [list(range(number % 4)) for number in numbers]
    return pa.table(columns)


def _read_source(folder: Path, source: dict[str, Any], home: Path) -> None:
    warehouse = Warehouse(WarehouseConfig(), home)
    config = SourceConfig.model_validate(source)
    context = SourceContext(config, FEATURES, warehouse, "events", folder, home / "logs")
    with SourceReader(context) as reader, reader.open(reader.files) as found:
        if found.join is not None:
            found.join.attribute(found.view, "day IS NOT NULL")
        found.connection.sql(f'SELECT * FROM "{found.create_good_view("true")}"').to_arrow_table().validate(full=True)


@contextmanager
def csv(folder: Path) -> Iterator[Case]:
    """CSV files of a source."""
    pyarrow.csv.write_csv(rows(lists=False), folder / "whole.csv")
    plain = b"day;label;age;price;user;country\n2024-01-01;1;3;0.5;7;DE\n2024-01-02;0;;1e3;8;\n"
    examples = [(folder / "whole.csv").read_bytes(), plain, plain.replace(b";", b"\t").replace(b"\n", b"\r\n")]

    def case(random: Random) -> None:
        (folder / "rows.csv").write_bytes(mutate_bytes(random, random.choice(examples)))
        source = {"path": "rows.csv", "day_column": "day"}
        if random.random() < 0.2:
            source["date_format"] = random.choice(["%Y-%m-%d", "%d.%m.%Y", "%q", "", "%"])
        _read_source(folder, source, folder / "home")

    yield case


@contextmanager
def json_lines(folder: Path) -> Iterator[Case]:
    """JSON lines of a source."""
    lines = rows(lists=True).to_pandas().to_json(orient="records", lines=True, date_format="iso").encode()
    plain = (
        b'{"day": "2024-01-01", "label": 1, "age": 3, "price": 0.5, "user": 7, "country": "DE", "items": [1, null]}\n'
    )
    examples = [lines, plain, plain.replace(b"\n", b"\r\n") * 3, b'{"label": 0, "user": 1}\n\n' + plain]

    def case(random: Random) -> None:
        content = random.choice(examples)
        if random.random() < 0.5:
            (folder / "rows.jsonl").write_bytes(mutate_bytes(random, content))
        else:
            values = mutate_value(random, [json.loads(line) for line in content.splitlines() if line][:5])
            text = "\n".join(json.dumps(one) for one in (values if isinstance(values, list) else [values]))
            (folder / "rows.jsonl").write_text(text, encoding="utf-8", errors="surrogatepass")
        _read_source(folder, {"path": "rows.jsonl", "day_column": "day"}, folder / "home")

    yield case


@contextmanager
def avro(folder: Path) -> Iterator[Case]:
    """Avro files of a source."""
    import fastavro

    fields: dict[str, Any] = {"day": "string", "label": "int", "age": "int", "user": "long", "country": "string"}
    fields["price"] = ["null", "int", "double"]
    fields["items"] = {"type": "array", "items": ["null", "long"]}
    schema = {
        "type": "record",
        "name": "Row",
        "fields": [{"name": name, "type": kind} for name, kind in fields.items()],
    }
    row = {"day": "2024-01-01", "label": 1, "age": 3, "user": 7, "country": "DE", "price": 0.5, "items": [1, None]}
    examples = []
    for codec in ("null", "deflate"):
        made = io.BytesIO()
        fastavro.writer(made, schema, [row] * 20, codec=codec, sync_interval=100)
        examples.append(made.getvalue())

    def case(random: Random) -> None:
        (folder / "rows.avro").write_bytes(mutate_bytes(random, random.choice(examples)))
        _read_source(folder, {"path": "rows.avro", "day_column": "day"}, folder / "home")

    yield case


def _parquet_examples(folder: Path, **options: Any) -> list[bytes]:
    found = []
    for number, more in enumerate(
        ({}, {"use_dictionary": False, "compression": "none"}, {"compression": "zstd", "row_group_size": 16})
    ):
        pq.write_table(rows(lists=True), folder / f"example{number}.parquet", **more, **options)
        found.append((folder / f"example{number}.parquet").read_bytes())
        (folder / f"example{number}.parquet").unlink()
    return found


def _mutate_footer(random: Random, content: bytes) -> bytes:
    """Damages the footer and keeps its length."""
    size = int.from_bytes(content[-8:-4], "little")
    footer = bytearray(content[-8 - size : -8])
    for _ in range(random.choice([1, 1, 2, 5])):
        footer[random.randrange(size)] = random.choice([0, 255, 127, random.randrange(256)])
    return content[: -8 - size] + bytes(footer) + content[-8:]


def _mutate_parquet(random: Random, content: bytes) -> bytes:
    return _mutate_footer(random, content) if random.random() < 0.3 else mutate_bytes(random, content)


@contextmanager
def parquet(folder: Path) -> Iterator[Case]:
    """Parquet files of a source."""
    examples = _parquet_examples(folder)

    def case(random: Random) -> None:
        (folder / "rows.parquet").write_bytes(_mutate_parquet(random, random.choice(examples)))
        _read_source(folder, {"path": "rows.parquet", "day_column": "day"}, folder / "home")

    yield case


@contextmanager
def side_table(folder: Path) -> Iterator[Case]:
    """Side tables, as CSV or Parquet."""
    pq.write_table(rows(lists=True), folder / "rows.parquet")
    side = pa.table(
        {
            "user": [2**62 + number for number in range(5)],
            "city": ["a", "b", None, "d", "ä"],
            "size": [1, 2, None, 4, 5],
        }
    )
    pq.write_table(side, folder / "side.parquet")
    pyarrow.csv.write_csv(side, folder / "side.csv")
    examples = {name: (folder / name).read_bytes() for name in ("side.parquet", "side.csv")}

    def case(random: Random) -> None:
        name = random.choice(list(examples))
        damaged = _mutate_parquet if name == "side.parquet" else mutate_bytes
        (folder / name).write_bytes(damaged(random, examples[name]))
        lookups = [{"path": name, "on": ["user"]}]
        _read_source(folder, {"path": "rows.parquet", "day_column": "day", "lookups": lookups}, folder / "home")

    yield case


def ingested(folder: Path) -> tuple[Warehouse, SnapshotRef]:
    """Makes a warehouse with a small table of three days."""
    pq.write_table(rows(lists=True), folder / "rows.parquet")
    warehouse = Warehouse(WarehouseConfig(), folder / "home")
    source = SourceConfig.model_validate({"path": "rows.parquet", "day_column": "day"})
    context = SourceContext(source, FEATURES, warehouse, "events", folder, folder / "logs")
    return warehouse, extract(context, IngestConfig()).snapshot


@contextmanager
def data_file(folder: Path) -> Iterator[Case]:
    """Data files of the warehouse. They have checksums, so what is read must be what was written."""
    warehouse, snapshot = ingested(folder)
    table = warehouse.table("events")
    names = warehouse.schema(snapshot).names

    def read() -> list[pa.Table]:
        reader = SnapshotReader(table, snapshot, names, None)
        return [reader.read(fragment) for fragment in reader.fragments()]

    written = read()
    paths = sorted((folder / "home").rglob("*-checked.parquet"))
    require(len(paths) >= 3, "the table has no files with checksums")

    def case(random: Random) -> None:
        path = random.choice(paths)
        content = path.read_bytes()
        try:
            path.write_bytes(_mutate_parquet(random, content))
            require(_equal(read(), written), "other rows than were written")
        finally:
            path.write_bytes(content)

    yield case


@contextmanager
def foreign_file(folder: Path) -> Iterator[Case]:
    """Data files that another engine wrote, without our checksums."""
    warehouse, snapshot = ingested(folder)
    table = warehouse.table("events")
    names = warehouse.schema(snapshot).names
    content = SnapshotReader(table, snapshot, names, None)
    added = pa.concat_tables([content.read(one) for one in content.fragments()][:1]).cast(table.schema().as_arrow())
    table.append(added)  # by pyiceberg's own writer
    newest = warehouse.current("events")
    paths = [path for path in sorted((folder / "home").rglob("*.parquet")) if not path.name.endswith(SUFFIX)]
    require(len(paths) == 1, "the table has no file without checksums")
    whole = paths[0].read_bytes()

    def case(random: Random) -> None:
        try:
            paths[0].write_bytes(_mutate_parquet(random, whole))
            reader = SnapshotReader(table, newest, names, None)
            for fragment in reader.fragments():
                found = reader.read(fragment)
                found.validate(full=True)
                require(found.num_rows == fragment.rows, "other rows than the file has")
        finally:
            paths[0].write_bytes(whole)

    yield case


MAPS = Schema(
    NestedField(1, "day", DateType(), required=False),
    NestedField(2, "row", LongType(), required=False),
    NestedField(3, "dense", MapType(10, IntegerType(), 11, FloatType(), False), required=False),
    NestedField(4, "ids", MapType(12, IntegerType(), 13, ListType(14, LongType(), False), False), required=False),
)


@contextmanager
def foreign_table(folder: Path) -> Iterator[Case]:
    """A table of another engine: features in maps, and rows deleted by position, by vector and by value."""
    warehouse = Warehouse(WarehouseConfig(), folder / "home")
    table = warehouse.catalog.create_table("dlrm.events", MAPS)
    day, other = datetime.date(2024, 1, 1), datetime.date(2024, 1, 2)
    made = pa.table(
        {
            "day": [day] * 20 + [other] * 20,
            "row": range(40),
            "dense": [None if row % 9 == 0 else [(key, row / 3) for key in range(row % 4)] for row in range(40)],
            "ids": [[(key, [row, None][: key % 3]) for key in range(row % 5)] for row in range(40)],
        },
        schema=MAPS.as_arrow(),
    )
    path = add_file(table, made, Record())
    delete_rows(table, {path: [3, 21]}, Record())
    delete_values(table, pa.table({"row": [5, 30]}), Record())
    snapshot = warehouse.current("events")
    names = ["row", "dense_0", "dense_2", "ids_1", "ids_3", "day"]
    whole = {file: file.read_bytes() for file in sorted((folder / "home").rglob("foreign-*"))}
    require(len(whole) == 3, "not all files of the table")

    def read() -> list[pa.Table]:
        reader = Warehouse(WarehouseConfig(), folder / "home").reader(snapshot, names)
        return [reader.read(fragment) for fragment in reader.fragments()]

    require(sum(len(one) for one in read()) == 36, "other rows than are left")

    def case(random: Random) -> None:
        file = random.choice(list(whole))
        try:
            file.write_bytes(_mutate_parquet(random, whole[file]))
            for one in read():
                one.validate(full=True)
        finally:
            file.write_bytes(whole[file])

    yield case


@contextmanager
def metadata(folder: Path) -> Iterator[Case]:
    """Metadata files of a table. Lists of files are left out: pyiceberg decodes Avro in C, without bounds."""
    ingested(folder)
    whole = {file: file.read_bytes() for file in sorted((folder / "home").rglob("*.metadata.json"))}
    require(whole, "the table has no metadata")

    def case(random: Random) -> None:
        file = random.choice(list(whole))
        try:
            file.write_bytes(mutate_bytes(random, whole[file]))
            warehouse = Warehouse(WarehouseConfig(), folder / "home")
            reader = warehouse.reader(warehouse.current("events"), ["user", "items"])
            found = [reader.read(one) for one in reader.fragments()]
            require(sum(map(len, found)) <= ROWS, "more rows than were written")
        finally:
            file.write_bytes(whole[file])

    yield case


def _equal(found: Sequence[pa.Table], expected: Sequence[pa.Table]) -> bool:
    return len(found) == len(expected) and all(one.equals(other) for one, other in zip(found, expected, strict=True))


@contextmanager
def ingest(folder: Path) -> Iterator[Case]:
    """Whole ingests of damaged files. A refused ingest leaves no rows."""
    pyarrow.csv.write_csv(rows(lists=False), folder / "whole.csv")
    examples = {"rows.csv": [(folder / "whole.csv").read_bytes()], "rows.parquet": _parquet_examples(folder)}

    def case(random: Random) -> None:
        name = random.choice(list(examples))
        damage = mutate_bytes if name == "rows.csv" else _mutate_parquet
        (folder / name).write_bytes(damage(random, random.choice(examples[name])))
        warehouse = Warehouse(WarehouseConfig(), folder / "fresh")
        source = SourceConfig.model_validate({"path": name, "day_column": "day"})
        context = SourceContext(source, FEATURES, warehouse, "events", folder, folder / "logs")
        try:
            result = extract(context, IngestConfig(max_quarantined_share=1.0))
            reader = SnapshotReader(warehouse.table("events"), result.snapshot, [], None)
            require(sum(one.rows for one in reader.fragments()) == result.rows, "other rows than were counted")
        finally:
            shutil.rmtree(folder / "fresh", ignore_errors=True)

    yield case
