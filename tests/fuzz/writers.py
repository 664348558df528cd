"""Writes one table as other programs do: pandas, PyArrow, Polars, DuckDB, fastavro, and Python's csv and json.

A table is a dict: column -> values, which are whole numbers, fractions, texts, times, lists, dicts, bytes or None.
"""

import csv
import datetime
import gzip
import io
import json
from collections.abc import Callable
from decimal import Decimal
from importlib.util import find_spec
from pathlib import Path
from random import Random
from typing import Any

import duckdb
import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq

Values = list[Any]
Table = dict[str, Values]
WHOLE = 2**53
"""Up to here a fraction holds every whole number."""


def _write_csv(path: Path, table: Table, random: Random) -> None:
    """Text as it is, nothing for null."""
    columns = {
        name: [f"{one}" if isinstance(one, datetime.datetime) else one for one in values]
        for name, values in table.items()
    }
    end, mark = random.choice(["\n", "\r\n"]), random.choice(",;\t|")
    by = random.choice(["pandas", "polars", "csv", "csv"])
    if by == "pandas":
        rows = pd.DataFrame({name: pd.Series(values, dtype=object) for name, values in columns.items()})
        text = rows.to_csv(index=False, sep=mark, lineterminator=end)
    elif by == "polars":
        text = pl.DataFrame({name: _texts(values) for name, values in columns.items()}).write_csv(
            separator=mark, line_terminator=end, quote_style=random.choice(["necessary", "always"])
        )
    else:
        buffer = io.StringIO()
        writer = csv.writer(
            buffer, delimiter=mark, lineterminator=end, quoting=random.choice([csv.QUOTE_MINIMAL, csv.QUOTE_ALL])
        )
        writer.writerow(columns)
        writer.writerows(["" if one is None else one for one in row] for row in zip(*columns.values(), strict=True))
        text = buffer.getvalue()
    _write(path, text.encode("utf-8-sig" if random.random() < 0.2 else "utf-8"))


def _texts(values: Values) -> Values:
    return [None if one is None else f"{one}" for one in values]


def _write(path: Path, content: bytes) -> None:
    if path.suffix == ".gz":
        content = gzip.compress(content, 1)
    elif path.suffix == ".zst":
        content = pa.compress(content, "zstd", asbytes=True)
    path.write_bytes(content)


def _write_json(path: Path, table: Table, random: Random) -> None:
    """Lists of one may be written as the value alone."""
    bare, alone, plain = random.random() < 0.5, random.random() < 0.3, random.random() < 0.5
    columns = {
        name: [
            f"{one.isoformat()}" if isinstance(one, datetime.datetime)
            else one[0] if alone and isinstance(one, list) and len(one) == 1 and not isinstance(one[0], list)
            else one
            for one in values
        ]
        for name, values in table.items()
    }  # fmt: skip
    rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    lines = [{name: one for name, one in row.items() if one is not None or not bare} for row in rows]
    _write(path, "".join(json.dumps(line, ensure_ascii=plain) + "\n" for line in lines).encode())


def _write_parquet(path: Path, table: Table, random: Random) -> None:
    """Whole numbers, times and texts have one of the types that writers give them."""
    rows = pa.table({name: _array(values, random) for name, values in table.items()})
    by = random.choice(["duckdb", "polars", "pandas", "pyarrow", "pyarrow", "pyarrow"])
    codec = random.choice(["snappy", "gzip", "zstd", "none", "lz4", "brotli"])
    nested = any(pa.types.is_nested(kind) and not pa.types.is_list(kind) for kind in rows.schema.types)
    if by == "duckdb":
        duckdb.from_arrow(rows).write_parquet(str(path), compression="zstd" if codec in ("none", "lz4") else codec)
    elif by == "polars" and not nested:
        frame = pl.from_arrow(rows)
        assert isinstance(frame, pl.DataFrame)
        frame.write_parquet(path, compression="uncompressed" if codec == "none" else codec, row_group_size=7)
    elif by == "pandas" and not nested:
        rows.to_pandas(types_mapper=pd.ArrowDtype).to_parquet(
            path, compression=None if codec == "none" else codec, write_page_checksum=True
        )
    else:
        old = random.random() < 0.3
        pq.write_table(
            rows, path, compression=codec, row_group_size=random.choice([3, 7, 100]), write_page_checksum=True,
            use_deprecated_int96_timestamps=old, use_dictionary=random.random() < 0.7,
            data_page_version=random.choice(["1.0", "2.0"]),
        )  # fmt: skip


def _array(values: Values, random: Random) -> pa.Array:
    some = [one for one in values if one is not None]
    if some and all(isinstance(one, int) for one in some):
        most = max(map(abs, some))
        kinds = [pa.decimal128(38, 0), *([pa.uint64()] if min(some) >= 0 else [])]
        kinds += [pa.int64(), pa.decimal128(38, 2)] if most < 2**63 else []
        kinds += [pa.int32()] if most < 2**31 else []
        kinds += [pa.float64()] if most <= WHOLE else []
        kind = random.choice(kinds)
        whole = pa.types.is_decimal(kind)
        return pa.array([Decimal(one) if whole and one is not None else one for one in values], kind)
    if some and all(isinstance(one, str) for one in some) and random.random() < 0.3:
        return pa.array([None if one is None else one.encode() for one in values], pa.binary())
    if some and all(isinstance(one, dict) for one in some) and "" in some[0]:  # a map
        return pa.array([one and [*one.items()] for one in values], pa.map_(pa.string(), pa.int64()))
    if some and all(isinstance(one, datetime.datetime) for one in some):
        near = all(1700 < one.year < 2200 for one in some)
        return pa.array(values, pa.timestamp(random.choice(["us", "ms", "ns"] if near else ["us", "ms"])))
    return pa.array(values)


def _write_avro(path: Path, table: Table, random: Random) -> None:
    import fastavro

    kinds: dict[type, Any] = {
        int: "long",
        float: "double",
        str: "string",
        list: {"type": "array", "items": "long"},
        datetime.datetime: {"type": "long", "logicalType": "local-timestamp-micros"},
    }
    columns = {
        name: _texts(values) if any(isinstance(one, int) and one >= 2**63 for one in values) else values
        for name, values in table.items()
    }
    fields = []
    for name, values in columns.items():
        kind = kinds[type(next((one for one in values if one is not None), ""))]
        items = [item for one in values if isinstance(one, list) for item in one]
        if items:
            kind = {"type": "array", "items": kinds[type(items[0])]}
        fields.append({"name": name, "type": ["null", kind]})
    schema = {"type": "record", "name": "row", "fields": fields}
    rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    with path.open("wb") as file:
        codec = random.choice(["null", "deflate", *(["snappy"] if find_spec("cramjam") else [])])
        fastavro.writer(file, fastavro.parse_schema(schema), rows, codec=codec)


WRITERS: dict[str, Callable[[Path, Table, Random], None]] = {
    "csv": _write_csv,
    "csv.gz": _write_csv,
    "csv.zst": _write_csv,
    "jsonl": _write_json,
    "json.gz": _write_json,
    "parquet": _write_parquet,
    **({"avro": _write_avro} if find_spec("fastavro") else {}),
}
"""Ending of a file's name -> who writes it."""


def can_write(form: str, values: Values) -> bool:
    """Tells whether a format has the values. Text has no lists, and what nests is written to Parquet and JSON alone."""
    lists = any(isinstance(one, list) for one in values)
    nested = [one for one in values if isinstance(one, dict | bytes) or (isinstance(one, list) and one and isinstance(one[0], list))]  # fmt: skip
    if form.startswith("csv"):
        return not lists and not nested
    if form.startswith("json"):
        return not any(isinstance(one, bytes) or (isinstance(one, dict) and "" in one) for one in nested)
    return form == "parquet" or not nested
