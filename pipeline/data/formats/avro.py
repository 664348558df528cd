"""Copies Avro files to Parquet. DuckDB's reader of Avro is an extension that it would download.

fastavro makes Python objects, which keep a processor for themselves. So a large file is copied by a process of its own:
`python -m pipeline.data.formats.avro`.
"""

import contextlib
import gc
import itertools
import json
import os
import pickle
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.data.formats.csv import refuse_like_names
from pipeline.data.formats.files import SourceFile, address_of
from pipeline.errors import ConfigError, ContractError, DataError, from_wire, to_wire
from pipeline.processes.process import die_with_parent
from storage.objects import open_file

ROWS_AT_ONCE = 10_000
LARGE_BYTES = 4_000_000
"""Files from this size on are worth the start of a process, which takes half a second."""
PRIMITIVE = {
    "null": pa.null(), "boolean": pa.bool_(), "int": pa.int32(), "long": pa.int64(), "float": pa.float32(),
    "double": pa.float64(), "bytes": pa.binary(), "string": pa.string(), "enum": pa.string(),
}  # fmt: skip
LOGICAL = {
    "date": pa.date32(), "time-millis": pa.time32("ms"), "time-micros": pa.time64("us"),
    "timestamp-millis": pa.timestamp("ms", "UTC"), "timestamp-micros": pa.timestamp("us", "UTC"),
    "local-timestamp-millis": pa.timestamp("ms"), "local-timestamp-micros": pa.timestamp("us"),
}  # fmt: skip
"""Logical types whose values fastavro returns as Arrow takes them."""
NUMBERS = ("int", "long", "float", "double")
"""Types that a column may mix. Whole numbers alone are read as long, and any others as double."""


def copy_avro(file: SourceFile, copy: Path, properties: Mapping[str, str]) -> None:
    """Copies an Avro file to Parquet, some rows at a time. A large one is copied by a process of its own.

    Raises:
        ConfigError: If fastavro is not installed.
        DataError: If the file cannot be read.
    """
    size = file.stat().st_size if isinstance(file, Path) else file.size
    if size < LARGE_BYTES:
        return _copy(file, copy, properties)
    done = subprocess.run(
        [sys.executable, "-m", __name__], input=pickle.dumps((file, copy, dict(properties))),
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}, capture_output=True,
        preexec_fn=partial(die_with_parent, os.getpid()), check=False,
    )  # fmt: skip
    if done.stdout:
        raise from_wire(json.loads(done.stdout))
    if done.returncode:
        last = (done.stderr.decode(errors="replace").strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise DataError(
            f"Avro file '{file.name}'", "a process that copies it", last,
            "Run it again. If the kernel killed it, the machine lacks memory.",
        )  # fmt: skip
    return None


def main() -> None:
    """Copies the file that standard input names. Prints an error of ours as JSON."""
    file, copy, properties = pickle.load(sys.stdin.buffer)  # of our parent
    gc.disable()  # rows hold no circles
    try:
        _copy(file, copy, properties)
    except ContractError as error:
        print(json.dumps(to_wire(error)))


def _copy(file: SourceFile, copy: Path, properties: Mapping[str, str]) -> None:
    if find_spec("fastavro") is None:
        raise ConfigError(
            f"Avro file '{file.name}'",
            "the package fastavro",
            "none",
            "Run: make setup EXTRAS=avro, or install fastavro.",
        )
    from fastavro.read import LOGICAL_READERS, reader
    from fastavro.schema import parse_schema

    LOGICAL_READERS["string-uuid"] = lambda text, *schemas: text  # otherwise an object, which Arrow does not take
    with _explained(file), open_file(address_of(file), properties) as opened:
        rows: Any = reader(opened)
        written = parse_schema(rows.writer_schema)  # with full names: a file may leave their namespace out
        if not isinstance(written, dict) or written["type"] != "record" or not written["fields"]:
            other = (
                "values of another type" if not isinstance(written, dict) or "fields" not in written else "no fields"
            )
            raise DataError(f"Avro file '{file.name}'", "records with fields", other, "Name another file.")
        schema, unreadable = _columns(written)
        refuse_like_names(f"Avro file '{file.name}'", schema.names)
        with pq.ParquetWriter(copy, schema, compression="lz4") as out:
            while taken := list(itertools.islice(rows, ROWS_AT_ONCE)):
                taken = [row | unreadable for row in taken] if unreadable else taken
                out.write_table(pa.Table.from_pylist(taken, schema))


def count_avro(file: SourceFile, properties: Mapping[str, str]) -> int:
    """Counts the rows of an Avro file by its blocks, which say how many they hold."""
    from fastavro.read import block_reader

    with _explained(file), open_file(address_of(file), properties) as opened:
        return sum(block.num_records for block in block_reader(opened))


@contextlib.contextmanager
def _explained(file: SourceFile) -> Iterator[None]:
    """Turns whatever a damaged file makes fastavro raise into one sentence."""
    try:
        yield
    except ContractError:
        raise
    except Exception as error:  # a store's or a disk's, too
        reason = f"{error}".splitlines()[0].rstrip(".") if f"{error}" else type(error).__name__
        raise DataError(
            f"Avro file '{file.name}'", "readable rows", reason, "Write the file again, or set source.format."
        ) from error


def _columns(schema: Mapping[str, Any]) -> tuple[pa.Schema, dict[str, None]]:
    """Returns the columns of a file, and null for each whose type no column can have.

    Such a one becomes a struct whose only field says why: it is left out, or named by whoever needs it.
    """
    named: dict[str, pa.DataType] = {}
    fields, unreadable = list[pa.Field](), dict[str, None]()
    for one in schema["fields"]:
        try:
            fields += _fields({"fields": [one]}, named)
        except (DataError, ValueError) as error:
            reason = error.actual if isinstance(error, DataError) else f"{error}"
            fields.append(pa.field(one["name"], pa.struct([pa.field(reason, pa.bool_())])))
            unreadable[one["name"]] = None
    return pa.schema(fields), unreadable


def _fields(schema: Mapping[str, Any], named: dict[str, pa.DataType]) -> list[pa.Field]:
    """Returns the fields of a record.

    Args:
        named: Types that have a name and were met before.
    """
    return [pa.field(one["name"], _type(one["type"], one["name"], named)) for one in schema["fields"]]


def _type(schema: Any, name: str, named: dict[str, pa.DataType]) -> pa.DataType:
    """Returns the Arrow type of a value."""
    if isinstance(schema, list):
        return _union(schema, name, named)
    if not isinstance(schema, dict):
        if schema not in PRIMITIVE and schema not in named:
            inside = f"a record {schema} inside itself"
            raise DataError(f"column '{name}' of Avro files", "values of one depth", inside, "Write it as a string.")
        return PRIMITIVE[schema] if schema in PRIMITIVE else named[schema]
    kind, logical = schema["type"], schema.get("logicalType")
    if logical == "decimal":
        found = pa.decimal128(schema["precision"], schema.get("scale", 0))
        return named.setdefault(schema["name"], found) if kind == "fixed" else found
    if logical in LOGICAL:
        return LOGICAL[logical]
    if kind == "array":
        return pa.list_(_type(schema["items"], name, named))
    if kind == "map":
        return pa.map_(pa.string(), _type(schema["values"], name, named))
    if kind in ("record", "enum", "fixed"):
        found = pa.struct(_fields(schema, named)) if kind == "record" else PRIMITIVE.get(kind, pa.binary())
        return named.setdefault(schema["name"], found)
    return _type(kind, name, named)


def _union(schema: Sequence[Any], name: str, named: dict[str, pa.DataType]) -> pa.DataType:
    """Returns the type of a union: of one type and null, or of numbers."""
    kinds = [kind for kind in schema if kind != "null"]
    if len(kinds) > 1 and all(kind in NUMBERS for kind in kinds):
        return pa.int64() if {*kinds} <= {"int", "long"} else pa.float64()
    if len(kinds) > 1:
        shown = ", ".join(kind if isinstance(kind, str) else kind["type"] for kind in kinds)
        raise DataError(f"column '{name}' of Avro files", "one type", shown, "Write it with one type, or as a string.")
    return _type(kinds[0], name, named) if kinds else pa.null()


if __name__ == "__main__":
    main()
